"""Reading a buffer: every protocol, what it says, what it gets wrong, and what is left when it failed."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
from exchange import Dlpack, Managed, capsule, forwarding
from probe import OneOperand

import opgraph as og
from opgraph import _native
from opgraph.planning.protocols import read

D = og.data_type
FLOAT32 = (2, 32, 1)


class Hooks:
    """What the native reader asks of Python: the slow protocols, on behalf of a plan for one device."""

    def __init__(self, device: tuple[int, int] = (1, 0)) -> None:
        self.device = device

    def read(self, obj: Any, device_type: int, stream: int) -> Any:
        return read(obj, self.device)


def describe(buffer: Any, stream: int = 0) -> dict[str, Any]:
    return _native.describe(buffer, stream, Hooks())


def check(buffer: Any, array: np.ndarray[Any, Any], dtype: Any = FLOAT32, read_only: bool | None = None) -> None:
    """The reader says of `buffer` what is true of `array`, and a plan reads the same elements."""
    told = describe(buffer)
    strides = tuple(s // array.itemsize for s in array.strides)
    if 0 not in array.shape:
        assert told["address"] == array.ctypes.data
        used = [i for i, extent in enumerate(array.shape) if extent > 1]
        assert [told["strides"][i] for i in used] == [strides[i] for i in used]
    assert (told["dims"], told["dtype"], told["device"]) == (array.shape, dtype, (1, 0))
    assert not told["bare_address"]
    assert told["read_only"] == (not array.flags.writeable if read_only is None else read_only)
    if dtype == FLOAT32 and array.ndim <= 8 and min(strides, default=0) >= 0:
        one = OneOperand(array.shape or (1,), strides or (1,))
        np.testing.assert_array_equal(one.give(buffer), array.reshape(array.shape or (1,)))


def refused(buffer: Any, words: str, error: Any = og.OperandError, dims: Any = (2, 3), data_type: Any = D.FLOAT) -> Any:
    with pytest.raises(error, match=words) as caught:
        OneOperand(dims, None, data_type).give(buffer)
    assert "'X' (uid 1)" in str(caught.value)
    with pytest.raises((TypeError, ValueError, BufferError, RuntimeError)):
        describe(buffer)
    return caught.value


def matrix() -> np.ndarray[Any, Any]:
    return np.arange(6, dtype=np.float32).reshape(2, 3)


# ---- NumPy


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x[::-1],
        lambda x: x[0, 0, ...],
        lambda x: x[:0],
        lambda x: x[:, None, :, None],
        lambda x: np.broadcast_to(x, (4, 2, 3)),
        lambda x: x.reshape((1,) * 30 + (2, 3)),
        lambda x: x.view(type("Sub", (np.ndarray,), {})),
    ],
)
def test_numpy_views(view: Any):
    x = view(matrix())
    check(x, x)


def test_numpy_read_only():
    x = matrix()
    x.flags.writeable = False
    check(x, x)
    assert describe(x)["read_only"]
    assert describe(np.frombuffer(bytes(8), np.float32))["read_only"]


NATIVE = {
    "float16": (2, 16, 1), "float32": (2, 32, 1), "float64": (2, 64, 1), "int8": (0, 8, 1), "int16": (0, 16, 1),
    "int32": (0, 32, 1), "int64": (0, 64, 1), "uint8": (1, 8, 1), "uint16": (1, 16, 1), "uint32": (1, 32, 1),
    "uint64": (1, 64, 1), "bool": (6, 8, 1), "complex64": (5, 64, 1), "complex128": (5, 128, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_numpy_data_types(name: str):
    x = np.ones((2, 3), name)[:, ::2]
    check(x, x, NATIVE[name])
    check(forwarding(x), x, NATIVE[name])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", (4, 16, 1)),
        ("float8_e3m4", (7, 8, 1)),
        ("float8_e4m3", (8, 8, 1)),
        ("float8_e4m3b11fnuz", (9, 8, 1)),
        ("float8_e4m3fn", (10, 8, 1)),
        ("float8_e4m3fnuz", (11, 8, 1)),
        ("float8_e5m2", (12, 8, 1)),
        ("float8_e5m2fnuz", (13, 8, 1)),
        ("float8_e8m0fnu", (14, 8, 1)),
        ("float4_e2m1fn", (17, 4, 1)),
        ("int4", (0, 4, 1)),
        ("uint4", (1, 4, 1)),
    ],
)
def test_ml_dtypes(name: str, dtype: Any, ml_dtypes: Any):
    """One lane of a sub-byte type: unpacked, so not the packed pairs a graph declares."""
    x = np.ones((2, 3), getattr(ml_dtypes, name)).T
    check(x, x, dtype)
    x.flags.writeable = False
    check(x, x, dtype)


@pytest.mark.parametrize("name", [">f4", ">i8", ">f2"])
def test_numpy_byte_order(name: str):
    error = refused(np.ones((2, 3), name), "byte-swapped")
    assert "newbyteorder" in str(error)
    assert describe(np.ones(3, np.dtype(">u1")))["dtype"] == (1, 8, 1)  # one byte has no order


@pytest.mark.parametrize(
    "name", ["O", "U3", "S4", "M8[s]", "m8[s]", "V8", "V0", [("a", "f4")], "longdouble", "clongdouble"]
)
def test_numpy_types_without_a_spelling(name: Any):
    refused(np.zeros((2, 3), np.dtype(name)), "no DLPack spelling")


def test_numpy_strides_between_elements():
    records = np.zeros((2, 3), np.dtype([("a", "i1"), ("b", "f4")]))
    refused(records["b"], "stride of 15 bytes on axis 0")
    told = describe(records["b"][:1, :1])  # one element: its strides are never used
    assert told["dims"] == (1, 1)
    raw = np.arange(25, dtype=np.uint8)
    x = raw[1:].view(np.float32).reshape(2, 3)  # no element lies at a multiple of its size
    np.testing.assert_array_equal(OneOperand((2, 3)).give(x), x)


def test_numpy_ranks():
    assert len(describe(np.zeros((1,) * 32, np.float32))["dims"]) == 32
    refused(np.zeros((1,) * 33, np.float32), "too many axes")


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array(matrix(), matrix() > 2)
    refused(masked, "mask")
    plain = np.asarray(masked.filled(0))
    check(plain, plain)


def test_numpy_scalars_are_no_buffers():
    for value in (np.float32(1), np.int64(4096), np.bool_(True)):
        refused(value, "not a buffer", TypeError)


# ---- __dlpack__


@pytest.mark.parametrize("legacy", [False, True])
def test_dlpack_capsules(legacy: bool):
    x = np.arange(16, dtype=np.float32)

    def given(**fields: Any) -> Dlpack:
        return Dlpack(lambda kwargs: Managed(x, legacy=legacy, **fields).capsule())

    check(given(), x)
    check(given(byte_offset=32, dims=(4,), strides=(1,)), x[8:12])
    check(given(dims=(2, 3), strides=None), x[:6].reshape(2, 3))
    check(given(dims=(2, 3), strides=(1, 4)), x.reshape(4, 4)[:3, :2].T)
    check(given(dims=(), strides=None), x[:1].reshape(()))
    check(given(dims=(0, 3), strides=None, data=None), x[:0].reshape(0, 3))
    assert describe(given(dims=(0, 3), strides=None, data=None, byte_offset=64))["address"] == 0
    if not legacy:
        check(given(flags=1), x, read_only=True)
        check(given(minor=99), x)  # minor versions add, they do not change
    for fields, words, rule in [
        ({"dims": (4, 3), "strides": (-3, 1)}, "negative strides", "negative_stride"),
        ({"dims": (-4,), "strides": (1,)}, "negative extent", "negative_extent"),
        ({"dims": (1,) * 33, "strides": None}, "too many axes", "rank"),
        ({"ndim": -1}, "too many axes", "rank"),
        ({"dtype": (2, 32, 2)}, "float32_x2", "dtype"),
        ({"dtype": (99, 7, 1)}, "code 99, bits 7", "dtype"),
        ({"device": (2, 0)}, "cuda:0", "device"),
        ({"shape": None}, "axes but no shape", "producer"),
    ]:
        with pytest.raises(og.OperandError, match=words) as caught:
            OneOperand((2, 3)).give(given(**fields))
        assert caught.value.rule == rule


def test_every_struct_goes_back():
    x = np.zeros(6, np.float32)
    for dims, fields in [
        ((6,), {}),
        ((7,), {}),
        ((6,), {"major": 99}),
        ((6,), {"dtype": (2, 16, 1)}),
        ((6,), {"dims": (1,) * 40}),
        ((6,), {"shape": None}),
    ]:
        managed = Managed(x, **fields)
        producer = Dlpack(lambda kwargs, managed=managed: managed.capsule())
        one = OneOperand(dims)
        one.refusal(producer)
        one.slots = []  # of the accepted one
        assert managed.released == 1, fields
    # A struct without a deleter is legal.
    managed = Managed(x)
    managed.struct.deleter = type(managed.struct.deleter)()
    assert OneOperand((6,)).refusal(Dlpack(lambda kwargs: managed.capsule())) == ""


def test_dlpack_answers_that_are_no_buffer():
    x = matrix()
    with pytest.raises(og.OperandError, match=r"major version 99.*reads version 1"):
        OneOperand((2, 3)).give(Dlpack(lambda kwargs: Managed(x, major=99).capsule()))
    managed = Managed(x)
    used = managed.capsule()
    assert OneOperand((2, 3)).refusal(Dlpack(lambda kwargs: used)) == ""
    for answer, words in [
        (used, "no unused DLPack capsule"),
        (capsule(managed.address, b"something"), "no unused DLPack capsule"),
        (7, "returned int, not a capsule"),
        (None, "returned NoneType, not a capsule"),
    ]:
        with pytest.raises(og.OperandError, match=words):
            OneOperand((2, 3)).give(Dlpack(lambda kwargs, answer=answer: answer))
    for device in ((1,), (1, 0, 0), 5, ("cpu", 0), None):
        producer = Dlpack(lambda kwargs: pytest.fail("asked"), device)  # type: ignore[arg-type]
        with pytest.raises(og.OperandError) as caught:
            OneOperand((2, 3)).give(producer)
        assert caught.value.rule == "producer"


def test_what_a_producer_is_asked():
    x = matrix()
    producer = forwarding(x)
    describe(producer)
    (asked,) = producer.asked
    assert set(asked) == {"max_version"} and asked["max_version"][0] == 1  # the host has no stream

    def fail(kwargs: Any) -> Any:
        raise BufferError("seen enough")

    for device, stream, expected in [
        ((2, 0), 0, 1),  # the legacy default stream is spelled 1, never 0
        ((2, 3), 0x1234, 4660),
        ((13, 0), 0, 1),
        ((10, 0), 0, 0),
        ((10, 0), 7, 7),
    ]:
        producer = Dlpack(fail, device)
        with pytest.raises(BufferError, match="seen enough"):
            describe(producer, stream)
        assert producer.asked[0]["stream"] == expected and type(producer.asked[0]["stream"]) is int


def test_a_producer_from_before_max_version():
    class Old:
        def __init__(self) -> None:
            self.calls = 0

        def __dlpack_device__(self) -> Any:
            return (1, 0)

        def __dlpack__(self, *, stream: Any = None) -> Any:
            self.calls += 1
            return matrix_kept.__dlpack__()

    matrix_kept = matrix()
    old = Old()
    check(old, matrix_kept)
    assert old.calls == 2  # described and executed


def test_a_producers_error_is_told_and_its_frames_are_not_kept():
    class Cause(Exception):
        pass

    def fail(kwargs: Any) -> Any:
        raise Cause("the reason")

    producer = Dlpack(fail)
    gone = weakref.ref(producer)
    with pytest.raises(og.OperandError, match=r"cannot be read.*Cause: the reason"):
        OneOperand((2, 3)).give(producer)
    del producer
    gc.collect()
    assert gone() is None

    def interrupt(kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OneOperand((2, 3)).give(Dlpack(interrupt))


def test_special_methods_are_looked_up_on_the_type():
    class Plain:
        pass

    plain = Plain()
    plain.__dlpack__ = matrix().__dlpack__  # type: ignore[attr-defined]
    plain.__dlpack_device__ = matrix().__dlpack_device__  # type: ignore[attr-defined]
    refused(plain, "not a buffer", TypeError)


# ---- the array interfaces, and objects that offer an address


class Interface:
    def __init__(self, array: np.ndarray[Any, Any], **entries: Any) -> None:
        self.array = array
        inter = {**array.__array_interface__, **entries}
        self.__array_interface__ = {k: v for k, v in inter.items() if v is not ...}


def test_array_interface():
    x = np.arange(12, dtype=np.float32)
    check(Interface(x), x)
    check(Interface(x, strides=None, shape=(3, 4)), x.reshape(3, 4))
    check(Interface(x, strides=..., shape=(3, 4)), x.reshape(3, 4))
    check(Interface(x, strides=(4, 16), shape=(4, 3)), x.reshape(3, 4).T)  # bytes
    check(Interface(x, data=(x.ctypes.data, True)), x, read_only=True)
    check(Interface(x, mask=None), x)
    for shape in ((0,), (4, 0, 3)):
        for strides in (None, ..., tuple(4 for _ in shape)):
            check(Interface(x, shape=shape, strides=strides, data=(0, False)), np.zeros(shape, np.float32))
    assert OneOperand((12,)).refusal(Interface(x, data=(0, False))) == "null_address"
    assert OneOperand((12,), (1,), output=True).refusal(Interface(x, data=(x.ctypes.data, True))) == "read_only"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"mask": np.zeros(12, bool)}, "mask"),
        ({"typestr": ">f4"}, "byte order"),
        ({"typestr": "|V2"}, "no element type"),
        ({"typestr": "nonsense"}, "no known type"),
        ({"typestr": ...}, "lacks 'typestr'"),
        ({"shape": ...}, "lacks 'shape'"),
        ({"data": ...}, "no address"),
        ({"data": None}, "no address"),
        ({"strides": (6,), "shape": (2,)}, "6 bytes is no multiple"),
        ({"strides": (4, 4)}, "2 strides for 1 axes"),
    ],
)
def test_array_interfaces_that_are_wrong(entries: Any, words: str):
    refused(Interface(np.zeros(12, np.float32), **entries), words, TypeError, dims=(12,))


def test_cuda_array_interface():
    class Cuda:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "version": 3,
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (4096, False),
            "strides": (4, 8),
        }

    told = describe(Cuda())
    assert (told["device"], told["strides"], told["address"]) == ((2, 0), (1, 2), 4096)
    assert OneOperand((2, 3), (1, 2), touch=False).refusal(Cuda()) == "device"
    on_gpu = OneOperand((2, 3), (1, 2), touch=False, device=(2, 0))
    assert on_gpu.refusal(Cuda()) == "" and on_gpu.slots[0].ptr == 4096


class Pointer:
    """`.data_ptr()`, `.shape`, `.stride()`, `.dtype`, `.device`."""

    def __init__(self, array: np.ndarray[Any, Any], **attributes: Any) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        for name, value in attributes.items():
            setattr(self, name, value)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> Any:
        return tuple(s // self.array.itemsize for s in self.array.strides)


def test_objects_with_an_address():
    x = matrix().T
    check(Pointer(x), x)
    check(Pointer(x, device="cpu"), x)
    dense = matrix()
    check(Pointer(dense, stride=None), dense)

    class Device:
        type, index = "cuda", 3

    assert describe(Pointer(x, device=Device()))["device"] == (2, 3)
    assert describe(Pointer(x, device="cuda:1"))["device"] == (2, 1)
    assert describe(Pointer(x, device=None))["device"] == (1, 0)  # says nothing: taken to be the plan's
    refused(Pointer(x, device="tpu:0"), "device that is not known here: 'tpu:0'", TypeError)
    assert OneOperand((3, 2), (1, 3)).refusal(Pointer(x, device="cuda")) == "device"
    refused(Pointer(x, dtype=None), "does not tell its data type", TypeError)
    refused(Pointer(x, dtype=np.dtype("U3")), "no counterpart", TypeError)

    class Memory:
        ptr = dense.ctypes.data

    class CupyLike:
        shape, strides, dtype, data = (2, 3), (12, 4), np.dtype("f4"), Memory()

    assert describe(CupyLike())["device"] == (2, 0)


# ---- addresses, and what is no buffer


def test_ints_are_addresses_and_nothing_else_is():
    x = matrix()
    told = describe(x.ctypes.data)
    assert told["bare_address"] and told["address"] == x.ctypes.data
    np.testing.assert_array_equal(OneOperand((2, 3)).give(x.ctypes.data), x)
    for value in (True, False):
        refused(value, "bool is neither", TypeError)
    for value in ("x", b"xxxx", bytearray(24), memoryview(bytes(24)), 1.5, 2j, object(), [1.0] * 6, (), {}, len):
        refused(value, "not a buffer", TypeError)
    for value in (x.__dlpack__(), x.__dlpack__(max_version=(1, 0))):
        refused(value, "capsule is not accepted", TypeError)
