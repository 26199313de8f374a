"""Slots, variant packs and workspace regions as an engine or a kernel sees them."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from exchange import Dlpack, Import, Managed, Versioned, borrow, described, table_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from probe import OneOperand, install

import opgraph as og
from opgraph import _native

D = og.data_type

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, (ctypes.py_object,)


def slot_of(buffer: Any, dims: Any = None, strides: Any = None, data_type: Any = D.FLOAT, **options: Any) -> Any:
    """The slot of an operand declared as the buffer is, or as told."""
    one = OneOperand(buffer.shape if dims is None else dims, strides, data_type, touch=False, **options)
    one.give(buffer)
    return one.slots[one.executable.uids.index(one.tensor.uid)]


def matrix() -> np.ndarray[Any, Any]:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


# ---- what a slot tells


def test_attributes():
    x = matrix()
    slot = slot_of(x, (4, 3), (1, 4))
    assert (slot.ptr, slot.shape, slot.strides) == (x.ctypes.data, (4, 3), (1, 4))
    assert (slot.dtype, slot.dlpack_dtype, slot.device, slot.nbytes) == ("float32", (2, 32, 1), (1, 0), 48)
    assert slot.present and slot.read_only
    assert repr(slot) == f"<opgraph.Slot float32 shape=(4, 3) strides=(1, 4) at {x.ctypes.data:#x} on device (1, 0)>"
    assert not slot_of(x, strides=(4, 1), output=True).read_only
    padded = slot_of(np.zeros(40, np.float32), (3, 4), (6, 1))
    assert padded.nbytes == 4 * (2 * 6 + 4)  # from the first to past the last, not what the buffer holds
    for name in ("ptr", "shape", "nbytes", "present", "anything"):
        with pytest.raises(AttributeError):
            setattr(slot, name, 0)
    with pytest.raises(TypeError):
        _native.Slot()


@pytest.mark.parametrize(
    ("data_type", "name", "dtype"),
    [
        (D.HALF, "float16", "float16"),
        (D.DOUBLE, "float64", "float64"),
        (D.INT8, "int8", "int8"),
        (D.INT64, "int64", "int64"),
        (D.UINT8, "uint8", "uint8"),
        (D.BOOLEAN, "bool", "bool"),
        (D.BFLOAT16, "bfloat16", "bfloat16"),
        (D.FP8_E4M3, "float8_e4m3fn", "float8_e4m3fn"),
        (D.FP8_E5M2, "float8_e5m2", "float8_e5m2"),
        (D.FP8_E8M0, "float8_e8m0fnu", "float8_e8m0fnu"),
    ],
)
def test_every_data_type_as_a_numpy_view(data_type: Any, name: str, dtype: str, ml_dtypes: Any):
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.ones((2, 3), real)
    slot = slot_of(x, data_type=data_type)
    assert slot.dtype == name
    seen = slot.numpy()
    assert seen.dtype == real and seen.tobytes() == x.tobytes()
    assert not seen.flags.writeable and seen.ctypes.data == x.ctypes.data
    out = slot_of(x, strides=(3, 1), data_type=data_type, output=True).numpy()
    out[...] = np.zeros((), real)
    assert not x.astype(np.float32).any() or data_type is D.FP8_E8M0


def test_numpy_views_are_of_host_memory_only():
    slot = slot_of(np.zeros(4, np.float32), device=(1, 0))
    assert slot.numpy().base is slot
    one = OneOperand((4,), touch=False, device=(2, 0))
    one.give(4096)
    with pytest.raises(BufferError, match=r"device \(2, 0\)"):
        one.slots[0].numpy()
    empty = slot_of(np.zeros((0, 3), np.float32))
    assert empty.numpy().shape == (0, 3)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_slots_are_not_copied(act: Any):
    with pytest.raises(TypeError, match="Slot cannot be copied or pickled"):
        act(slot_of(matrix()))


# ---- views


@st.composite
def layouts(draw: Any) -> tuple[Any, Any]:
    rank = draw(st.integers(0, 4))
    dims = [draw(st.sampled_from((1, 1, 2, 3, 4, 6))) for _ in range(rank)]
    if rank and draw(st.integers(0, 15)) == 0:
        dims[draw(st.integers(0, rank - 1))] = 0
    step, strides = 1, [0] * rank
    for axis in draw(st.one_of(st.just(range(rank - 1, -1, -1)), st.permutations(range(rank)))):
        if draw(st.integers(0, 11)) == 0:
            continue
        step += draw(st.sampled_from((0, 0, 0, 0, 2)))
        strides[axis] = step
        step *= max(dims[axis], 1)
    return tuple(dims) or (1,), tuple(strides) or (1,)


def shapes_of(draw: Any, total: int) -> tuple[int, ...]:
    """A random shape with that many elements, ones among them."""
    if total == 0:
        return tuple(draw(st.permutations((0, *draw(st.lists(st.integers(1, 4), max_size=3))))))
    shape, rest = [], total
    while rest > 1 and len(shape) < 5:
        factor = draw(st.sampled_from([f for f in range(1, rest + 1) if rest % f == 0]))
        shape.append(factor)
        rest //= factor
    return (*shape, rest) if draw(st.booleans()) else (rest, *shape)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(layouts(), st.data())
def test_permute_and_reshape_do_what_numpy_does(layout: Any, data: Any):
    dims, strides = layout
    span = 1 + sum(max(n - 1, 0) * s for n, s in zip(dims, strides, strict=True))
    memory = np.arange(span, dtype=np.float32)
    x = as_strided(memory, dims, [4 * s for s in strides])
    slot = slot_of(memory, dims, strides)
    assert slot.is_contiguous() == x.flags.c_contiguous
    axes = data.draw(st.permutations(range(len(dims))))
    turned = slot.permute(*axes)
    np.testing.assert_array_equal(turned.numpy(), x.transpose(axes))
    assert turned.is_contiguous() == x.transpose(axes).flags.c_contiguous
    for source, array in ((slot, x), (turned, x.transpose(axes))):
        shape = shapes_of(data.draw, x.size)
        wanted = array.reshape(shape)
        if x.size == 0 or np.shares_memory(wanted, array):
            got = source.reshape(*shape)
            np.testing.assert_array_equal(got.numpy(), wanted)
            assert got.shape == shape and got.ptr == slot.ptr and got.nbytes == slot.nbytes
            assert got.is_contiguous() == got.numpy().flags.c_contiguous
        else:
            with pytest.raises(ValueError, match="would need a copy"):
                source.reshape(*shape)


def test_views_that_do_not_fit():
    slot = slot_of(matrix())
    for axes in ((0,), (0, 1, 2), (0, 0), (0, 2), (-1, 0), ()):
        with pytest.raises(ValueError, match="permute"):
            slot.permute(*axes)
    with pytest.raises((TypeError, ValueError)):
        slot.permute((1, 0))
    for dims in ((5,), (3, 5), (), (2**32, 2**32), (2**62, 4), (2**63 - 1,)):
        with pytest.raises(ValueError, match="copy"):
            slot.reshape(*dims)
    empty = slot_of(np.zeros((0, 3), np.float32))
    with pytest.raises(ValueError, match="copy"):
        empty.reshape(2**32, 2**32)  # as many elements as 64 bits count to 0
    assert empty.reshape(7, 0).shape == (7, 0)
    for dims in ((-1,), (-3, -4), (3, -1)):
        with pytest.raises(ValueError, match="0 or more"):
            slot.reshape(*dims)
    with pytest.raises(ValueError, match="at most 8"):
        slot.reshape(*[1] * 7, 3, 4)
    with pytest.raises(OverflowError):
        slot.reshape(2**63)
    assert slot_of(np.zeros(1, np.float32)).reshape().shape == ()


def test_views_keep_the_role_and_the_memory():
    x = matrix()
    alive = weakref.ref(x)
    slot = slot_of(x).permute(1, 0).reshape(2, 2, 3)
    assert slot.read_only
    out = slot_of(x, strides=(4, 1), output=True).reshape(12)
    assert not out.read_only
    address = x.ctypes.data
    del x, out
    gc.collect()
    assert alive() is not None and slot.ptr == address
    del slot
    gc.collect()
    assert alive() is None


# ---- __dlpack__


def struct_of(capsule: Any) -> Any:
    assert _name(capsule) == b"dltensor_versioned"
    return Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))


def test_the_generation_follows_max_version():
    slot = slot_of(matrix())
    for version in (None, (0, 8), (0, 99)):
        assert _name(slot.__dlpack__(max_version=version)) == b"dltensor"
    assert _name(slot.__dlpack__()) == b"dltensor"
    for version in ((1, 0), (1, 3), (2, 0)):
        struct = struct_of(slot.__dlpack__(max_version=version))
        assert struct.major == 1
        assert described(struct.tensor) == {
            "address": slot.ptr,
            "dims": (3, 4),
            "strides": (4, 1),
            "dtype": (2, 32, 1),
            "device": (1, 0),
            "byte_offset": 0,
        }
    for wrong in (1, "1.0", (1,), (1, 0, 0), [1, 0]):
        with pytest.raises(TypeError, match="max_version"):
            slot.__dlpack__(max_version=wrong)


def test_keywords():
    slot = slot_of(matrix())
    assert slot.__dlpack_device__() == (1, 0)
    for good in (
        {"stream": None},
        {"stream": 7},
        {"dl_device": (1, 0)},
        {"dl_device": None},
        {"copy": False},
        {"copy": None},
    ):
        assert _name(slot.__dlpack__(**good)) == b"dltensor"
    with pytest.raises(BufferError, match=r"device \(1, 0\).*\(2, 0\)"):
        slot.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="not copied"):
        slot.__dlpack__(copy=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'strem'"):
        slot.__dlpack__(strem=1)
    with pytest.raises(TypeError, match="keyword"):
        slot.__dlpack__(1)


def test_read_only_exports():
    x = matrix()
    inputs, output = slot_of(x), slot_of(x, strides=(4, 1), output=True)
    locked = x.view()
    locked.flags.writeable = False
    assert struct_of(inputs.__dlpack__(max_version=(1, 0))).flags == 1
    assert struct_of(output.__dlpack__(max_version=(1, 0))).flags == 0
    assert not np.from_dlpack(inputs).flags.writeable and np.from_dlpack(output).flags.writeable
    # A legacy capsule cannot say it: refused where the caller's own buffer is locked, views of the slot included.
    slot = slot_of(locked)
    for view in (slot, slot.permute(1, 0), slot.reshape(12)):
        with pytest.raises(BufferError, match="read-only"):
            view.__dlpack__()
        assert struct_of(view.__dlpack__(max_version=(1, 0))).flags == 1


def test_a_slot_is_an_operand_of_another_call():
    x, y = matrix(), np.zeros((4, 3), np.float32)
    inside = []

    def run(pack: Any) -> None:
        second = OneOperand((4, 3), (1, 4))
        inside.append(second.give(pack[0]))
        third = OneOperand((4, 3), (3, 1), output=True)
        third.give(pack[1])
        for shown in (pack[0], pack[0].permute(0, 1), np.from_dlpack(pack[0]), pack[0].numpy()):
            assert OneOperand((4, 3), (1, 4), output=True).refusal(shown) == "read_only"

    graph = og.pygraph(io_data_type=D.FLOAT)
    a = graph.tensor((4, 3), (1, 4))
    b = graph.identity(a).set_output(True).set_stride((3, 1))
    install(graph, run)
    graph.execute({a: x, b: y})
    np.testing.assert_array_equal(inside[0], x.T)
    np.testing.assert_array_equal(y.ravel(), np.arange(1, 13))


# ---- lifetime


def test_an_export_outlives_slot_call_and_graph():
    x = matrix()
    alive = weakref.ref(x)
    one = OneOperand((4, 3), (1, 4), touch=False)
    one.give(x)
    export = np.from_dlpack(one.slots[0])
    capsule = one.slots[0].__dlpack__(max_version=(1, 0))
    unused = one.slots[0].__dlpack__()
    del x, one
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(export, matrix().T)
    assert described(struct_of(capsule).tensor)["strides"] == (1, 4)  # its own copy of the extents
    del export
    gc.collect()
    assert alive() is not None
    del capsule, unused
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("legacy", [False, True])
def test_memory_that_a_capsule_alone_keeps_outlives_the_call(legacy: bool):
    """A producer that copies on export: its struct goes back when the last slot or export has gone, not before."""
    handed: list[Managed] = []

    def make(kwargs: Any) -> Any:
        handed.append(Managed(matrix(), legacy=legacy))
        return handed[-1].capsule()

    one = OneOperand((3, 4), touch=False)
    one.give(Dlpack(make))
    slot = one.slots[0]
    one.slots = []
    export = np.from_dlpack(slot)
    del slot
    gc.collect()
    assert handed[0].released == 0
    np.testing.assert_array_equal(export, matrix())
    del export
    gc.collect()
    assert handed[0].released == 1


def test_memory_goes_back_when_the_call_is_over_and_nothing_was_kept():
    handed: list[Managed] = []

    def make(kwargs: Any) -> Any:
        handed.append(Managed(matrix()))
        return handed[-1].capsule()

    one = OneOperand((3, 4))
    one.give(Dlpack(make))
    one.slots = []
    assert handed[0].released == 1
    null = OneOperand((3, 4))
    install(null.graph, None)
    null.give(Dlpack(make))
    assert handed[1].released == 1
    with pytest.raises(og.OperandError):
        OneOperand((4, 3)).give(Dlpack(make))
    assert handed[2].released == 1


def test_exports_are_given_back_without_the_lock():
    """A consumer may call the deleter on a thread of its own, which does not hold the interpreter."""
    x = matrix()
    alive = weakref.ref(x)
    slot = slot_of(x)
    out = ctypes.c_void_p()
    assert table_of(type(slot)).export(slot, ctypes.byref(out)) == 0
    struct = Versioned.from_address(out.value)
    assert described(struct.tensor)["dims"] == (3, 4) and struct.flags == 1
    del x, slot
    gc.collect()
    assert alive() is not None
    struct.deleter(out.value)  # ctypes lets go of the lock for the call
    gc.collect()
    assert alive() is None


def test_many_slots_kept_and_dropped():
    one = OneOperand((2,), touch=False)
    arrays = [np.full(2, i, np.float32) for i in range(300)]
    slots = []
    for x in arrays:
        one.give(x)
        slots.append(one.slots[0])
    for i in range(0, 300, 2):
        slots[i] = None
    for i in range(1, 300, 2):
        assert slots[i].numpy()[0] == i and slots[i].ptr == arrays[i].ctypes.data


# ---- the exchange table


def test_the_table_borrows_and_exports():
    slot = slot_of(matrix(), (4, 3), (1, 4))
    assert (table_of(type(slot)).major, table_of(type(slot)).prev_api) == (1, None)
    assert borrow(slot) == {
        "address": slot.ptr,
        "dims": (4, 3),
        "strides": (1, 4),
        "dtype": (2, 32, 1),
        "device": (1, 0),
        "byte_offset": 0,
    }
    stream = ctypes.c_void_p(7)
    assert table_of(type(slot)).stream(1, 0, ctypes.byref(stream)) == 0 and stream.value is None


def test_the_table_imports_what_a_kernel_returns():
    take = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.py_object))
    call = take(ctypes.cast(table_of(_native.Slot).import_, ctypes.c_void_p).value or 0)
    for fields, expected in [
        ({}, (3, 4)),
        ({"strides": None}, (3, 4)),
        ({"dims": (2, 4), "strides": (4, 1), "byte_offset": 16}, (2, 4)),
        ({"flags": 1}, (3, 4)),
    ]:
        managed = Managed(matrix(), **fields)
        out = ctypes.py_object()
        assert call(managed.address, ctypes.byref(out)) == 0
        slot = out.value
        ctypes.pythonapi.Py_DecRef(out)  # the reference was given to us, and ctypes took one of its own
        start = fields.get("byte_offset", 0) // 16
        np.testing.assert_array_equal(slot.numpy(), matrix()[start : start + expected[0]])
        assert slot.read_only == ("flags" in fields)
        assert managed.released == 0
        del slot, out
        assert managed.released == 1
    assert Import is not None


@pytest.mark.frameworks
def test_torch_takes_a_slot(torch: Any):
    x = matrix()
    slot = slot_of(x, (4, 3), (1, 4), output=True)
    tensor = torch.from_dlpack(slot)
    assert (tensor.shape, tensor.stride(), tensor.data_ptr()) == ((4, 3), (1, 4), x.ctypes.data)
    tensor[0, 1] = 50
    assert x[1, 0] == 50
    alive = weakref.ref(x)
    del x, slot
    gc.collect()
    assert alive() is not None and tensor[0, 1] == 50
    half = torch.ones(4, dtype=torch.bfloat16)
    assert torch.from_dlpack(slot_of(half, (4,), data_type=D.BFLOAT16)).dtype is torch.bfloat16


@pytest.mark.frameworks
def test_a_tvm_ffi_function_takes_and_returns_slots(tvm_ffi: Any):
    x = matrix()
    slot = slot_of(x, (4, 3), (1, 4))
    seen: list[Any] = []

    def kernel(tensor: Any) -> Any:
        seen.append((tuple(tensor.shape), tuple(tensor.strides), str(tensor.dtype)))
        return tensor

    back = tvm_ffi.convert(kernel)(slot)
    assert seen == [((4, 3), (1, 4), "float32")]
    np.testing.assert_array_equal(np.from_dlpack(back), x.T)


@pytest.mark.frameworks
def test_jax_takes_a_slot(jax: Any):
    x = matrix()
    np.testing.assert_array_equal(np.asarray(jax.numpy.from_dlpack(slot_of(x, (4, 3), (1, 4)))), x.T)
