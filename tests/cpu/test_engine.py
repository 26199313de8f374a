"""The CPU engine's own laws: overrides, work in place, storage forms, optional results, buffer protocols."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.engines.cpu.program import compile_program
from opgraph.engines.cpu.storage import Ragged
from opgraph.planning.protocols import device_of, read

FLOAT = og.data_type.FLOAT
rng = np.random.default_rng(11)


def add_graph(dim: tuple[int, ...], **options: Any) -> tuple[og.pygraph, og.Tensor, og.Tensor, og.Tensor]:
    g = og.pygraph(io_data_type=FLOAT, **options)
    a, b = g.tensor(dim, name="A"), g.tensor(dim, name="B")
    return g, a, b, g.add(a, b).set_output(True).set_name("C")


def rand(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- overrides


def test_overrides_apply_to_one_call(precision):
    g, a, b, c = add_graph((4, 3))
    g.build(engine="cpu", knobs={"precision": precision})
    x, y, out = rand(4, 3), rand(4, 3), np.full((4, 3), -1, np.float32)
    uids = [a.uid, b.uid, c.uid]
    g.execute({a: x, b: y, c: out}, None, None, uids, [(2, 3)] * 3, [(3, 1)] * 3)
    np.testing.assert_array_equal(out[:2], (x + y)[:2])
    assert (out[2:] == -1).all()
    small = np.full((2, 3), -1, np.float32)
    g.execute({a: x[:2], b: y[:2], c: small}, None, None, uids, [(2, 3)] * 3, [(3, 1)] * 3)
    np.testing.assert_array_equal(small, (x + y)[:2])
    g.execute({a: x, b: y, c: out})
    np.testing.assert_array_equal(out, x + y)
    before = out.copy()
    g.execute({a: x, b: y, c: out}, None, None, uids, [(0, 3)] * 3, [(3, 1)] * 3)
    np.testing.assert_array_equal(out, before)


def test_overrides_beyond_the_bound_are_refused_before_any_write():
    g, a, b, c = add_graph((4, 3))
    g.build()
    x, guarded = rand(4, 3), np.full((6, 3), 7, np.float32)
    out = guarded[1:5]
    uids = [a.uid, b.uid, c.uid]
    for wrong, words in (
        ((uids, [(8, 3)] * 3, [(3, 1)] * 3), ("uid 1", "96", "48")),
        ((uids, [(4, 6)] * 3, [(6, 1)] * 3), ("uid 1", "96", "48")),
        ((uids, [(2, 3)] * 3, [(3, 1)] * 2), ("3", "2")),
        ((uids, [(2, 3)] * 2, [(3, 1)] * 2), ("3", "2")),
        (([999], [(2, 3)], [(3, 1)]), ("999",)),
        ((uids, [(-2, 3)] * 3, [(3, 1)] * 3), ("uid 1", "-2")),
        ((uids[:1], [(2, 3)], [(3, 1)]), ("uid 1", "uid 2", "(2, 3)", "(4, 3)")),
        ((uids, [(2, 3)] * 3, [(3,)] * 3), ("uid 1",)),
    ):
        with pytest.raises(ValueError) as caught:
            g.execute({a: x, b: x, c: out}, None, None, *wrong)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert (guarded == 7).all()
    g.execute({a: x, b: x, c: out})
    np.testing.assert_array_equal(out, x + x)


def test_overrides_reach_virtual_tensors_and_other_shapes():
    g = og.pygraph(io_data_type=FLOAT)
    a, b = g.tensor((2, 8, 4), name="A"), g.tensor((2, 4, 6), name="B")
    out = g.relu(g.matmul(a, b)).set_output(True)
    g.build()
    x, y = rand(2, 3, 4), rand(2, 4, 5)
    result = np.full((2, 3, 5), np.nan, np.float32)
    g.execute(
        {a: x, b: y, out: result},
        None,
        None,
        [a.uid, b.uid, out.uid],
        [(2, 3, 4), (2, 4, 5), (2, 3, 5)],
        [(12, 4, 1), (20, 5, 1), (15, 5, 1)],
    )
    np.testing.assert_allclose(result, np.maximum(x @ y, 0), rtol=1e-6)


def test_dynamic_extents_come_from_the_buffers():
    g, a, b, c = add_graph((4, 3), is_dynamic_shape_enabled=True)
    g.build()
    x, out = rand(2, 3), np.zeros((2, 3), np.float32)
    g.execute({a: x, b: x, c: out})
    np.testing.assert_array_equal(out, 2 * x)
    with pytest.raises(ValueError):
        g.execute({a: x, b: rand(4, 3), c: out})


# ---- in place


def test_elementwise_in_place():
    g, a, b, c = add_graph((4,))
    g.build()
    x, y = rand(4), rand(4)
    expected = x + y
    g.execute({a: x, b: y, c: x})
    np.testing.assert_array_equal(x, expected)


def test_rotary_pattern_in_place():
    g = og.pygraph(io_data_type=FLOAT)
    x1, x2, cos, sin = (g.tensor((4, 8), name=n) for n in ("x1", "x2", "cos", "sin"))
    parts = g.mul(x1, cos), g.mul(x2, sin), g.mul(x2, cos), g.mul(x1, sin)
    y1 = g.sub(parts[0], parts[1]).set_output(True)
    y2 = g.add(parts[2], parts[3]).set_output(True)
    g.build()
    a, b, c, s = (rand(4, 8) for _ in range(4))
    expected = a * c - b * s, b * c + a * s
    g.execute({x1: a, x2: b, cos: c, sin: s, y1: a, y2: b})
    np.testing.assert_allclose((a, b), expected, rtol=1e-6, atol=1e-6)


def test_an_input_that_is_read_later_may_still_be_an_outputs_buffer():
    g = og.pygraph(io_data_type=FLOAT)
    a = g.tensor((4,), name="A")
    first = g.add(a, a).set_output(True).set_name("first")
    second = g.mul(a, first).set_output(True).set_name("second")
    g.build()
    x, u, v = rand(4), np.zeros(4, np.float32), np.zeros(4, np.float32)
    before = x.copy()
    g.execute({a: x, first: x, second: v})
    np.testing.assert_array_equal(x, 2 * before)
    np.testing.assert_array_equal(v, before * (2 * before))
    x[...] = before
    g.execute({a: x, first: u, second: x})
    np.testing.assert_array_equal(x, before * (before + before))
    fixed = np.concatenate([before, before])
    with pytest.raises(og.OperandError, match="shares memory"):  # partly, which no copy of one input would mend
        g.execute({a: fixed[2:6], first: fixed[4:], second: v})


def test_an_alias_of_an_input_counts_as_the_input():
    """`identity` of an equal type could hand the input itself on; writing in place must not change it."""
    g = og.pygraph(io_data_type=FLOAT)
    a = g.tensor((4,), name="A")
    same = g.identity(a)
    first = g.add(a, a).set_output(True)
    second = g.identity(same).set_output(True)
    g.build()
    x, out = rand(4), np.zeros(4, np.float32)
    before = x.copy()
    try:
        g.execute({a: x, first: x, second: out})
    except og.OperandError as error:
        assert error.rule == "inplace"
        np.testing.assert_array_equal(x, before)
    else:
        np.testing.assert_array_equal(x, 2 * before)
        np.testing.assert_array_equal(out, before)


def test_partial_overlap_is_refused_and_interleaving_is_not():
    g, a, b, c = add_graph((4, 4))
    g = og.pygraph(io_data_type=FLOAT)
    a, b = g.tensor((4, 4), (8, 1), name="A"), g.tensor((4, 4), (8, 1), name="B")
    c = g.add(a, b).set_output(True).set_name("C").set_stride((8, 1))
    g.build()
    memory = rand(5, 8)
    y, expected = rand(4, 8)[:, :4], memory.copy()
    g.execute({a: memory[:4, :4], b: y, c: memory[:4, 4:]})  # halves of one buffer
    expected[:4, 4:] = expected[:4, :4] + y
    np.testing.assert_array_equal(memory, expected)
    with pytest.raises(og.OperandError, match="shares memory") as caught:
        g.execute({a: memory[:4, :4], b: y, c: memory[:4, 2:6]})
    assert caught.value.rule == "overlap"
    np.testing.assert_array_equal(memory, expected)


# ---- storage forms


def test_padded_and_permuted_layouts():
    g = og.pygraph(io_data_type=FLOAT)
    a = g.tensor((2, 3, 4), (4, 8, 1), name="A")
    c = g.abs(a).set_output(True).set_stride((40, 10, 2))
    g.build()
    x = rand(3, 2, 4)
    memory = np.full(2 * 40, np.nan, np.float32)
    out = np.lib.stride_tricks.as_strided(memory, (2, 3, 4), (160, 40, 8))
    g.execute({a: x.transpose(1, 0, 2), c: out})
    np.testing.assert_array_equal(out, np.abs(x.transpose(1, 0, 2)))
    assert np.isnan(memory).sum() == 80 - 24


@pytest.mark.parametrize("name", ["FP4_E2M1", "INT4"])
def test_packed_pairs(ml_dtypes, name):
    dtype = og.data_type[name]
    g = og.pygraph(io_data_type=dtype, compute_data_type=FLOAT)
    a = g.tensor((3, 4), name="A")
    up = g.identity(a).set_output(True).set_data_type(FLOAT)
    back = g.neg(a).set_output(True)
    g.build()
    values = np.float32([[0, 1, 2, 3], [-1, -2, -3, -4], [4, 2, 0, 1]])
    packed = og.datatypes.pack_subbyte(og.datatypes.round_to(values, dtype))
    out, negated = np.zeros((3, 4), np.float32), np.zeros((3, 2), np.uint8)
    g.execute({a: packed, up: out, back: negated})
    np.testing.assert_array_equal(out, values)
    np.testing.assert_array_equal(og.datatypes.unpack_subbyte(negated, dtype).astype(np.float32), -values)
    with pytest.raises(og.OperandError, match="pack_subbyte" if name == "FP4_E2M1" else "'A'"):
        g.execute({a: og.datatypes.round_to(values, dtype), up: out, back: negated})


def test_packed_pairs_need_an_even_axis(ml_dtypes):
    g = og.pygraph(io_data_type=og.data_type.FP4_E2M1, compute_data_type=FLOAT)
    g.identity(g.tensor((3, 3), name="A")).set_output(True).set_data_type(FLOAT)
    with pytest.raises(og.cudnnGraphNotSupportedError, match=r"packing: .*'A' \(uid 1\)"):
        g.build()


@pytest.mark.parametrize("name", ["BFLOAT16", "FP8_E4M3", "FP8_E5M2", "HALF"])
def test_narrow_types(ml_dtypes, name, precision):
    dtype = og.data_type[name]
    numpy_type = og.datatypes.numpy_dtype(dtype)
    g = og.pygraph(io_data_type=dtype, compute_data_type=FLOAT)
    a, b = g.tensor((5,)), g.tensor((5,))
    c = g.add(a, b).set_output(True)
    g.build(engine="cpu", knobs={"precision": precision})
    x = np.float32([1, 2, 3, 0.5, -1]).astype(numpy_type)
    out = np.zeros(5, numpy_type)
    g.execute({a: x, b: x, c: out})
    assert out.astype(np.float32).tolist() == [2, 4, 6, 1, -2]


def test_empty_tensors():
    g, a, b, c = add_graph((0, 3))
    g.build()
    empty = np.zeros((0, 3), np.float32)
    g.execute({a: empty, b: empty, c: empty.copy()})


class RaggedSpec:
    """What `Ragged` reads of a tensor."""

    def __init__(self, dim: tuple[int, ...], stride: tuple[int, ...], multiplier: int) -> None:
        self.dim, self.stride, self.ragged_offset_multiplier, self.data_type = dim, stride, multiplier, FLOAT


class Memory:
    def __init__(self, array: np.ndarray) -> None:
        self.ptr = array.ctypes.data


@pytest.mark.parametrize("offset_type", [np.int32, np.int64])
def test_ragged_rows(offset_type):
    # Three entries of 2, 0 and 1 rows; 2 heads of width 3, heads beside each other in a row; a gap of one
    # row.
    heads, width = 2, 3
    offsets = np.array([0, 3, 3, 4], offset_type).reshape(4, 1, 1, 1)
    storage = Ragged(RaggedSpec((3, heads, 2, width), (99, width, heads * width, 1), heads * width), 0)  # type: ignore[arg-type]
    buffer = np.arange(4 * heads * width, dtype=np.float32)
    rows = buffer.reshape(4, heads, width)
    dense = storage.load(Memory(buffer), [offsets])
    np.testing.assert_array_equal(dense[0], rows[:2].transpose(1, 0, 2))
    assert (dense[1] == 0).all()
    np.testing.assert_array_equal(dense[2, :, 0], rows[3])
    assert (dense[2, :, 1] == 0).all()
    before = buffer.copy().reshape(4, heads, width)
    storage.store(Memory(buffer), [offsets], np.full_like(dense, -1))
    assert (rows[[0, 1, 3]] == -1).all()
    np.testing.assert_array_equal(rows[2], before[2])


# ---- the program


def test_temporaries_are_dropped_at_their_last_reader():
    g = og.pygraph(io_data_type=FLOAT)
    x = g.tensor((4,))
    a = g.exp(x)
    b = g.add(a, a)
    c = g.mul(b, a)
    g.neg(c).set_output(True)
    program = compile_program(g._ir.snapshot(), precise=False)
    assert [len(step.drops) for step in program._steps] == [0, 0, 2, 1]


def test_results_nobody_reads_are_not_kept():
    g = og.pygraph(io_data_type=FLOAT)
    a = g.tensor((4,))
    g.exp(a)
    c = g.neg(a).set_output(True)
    x, out = rand(4), np.zeros(4, np.float32)
    g.execute({a: x, c: out})
    np.testing.assert_array_equal(out, -x)


def test_an_output_that_is_read_again_is_rounded_once_to_its_own_type():
    g = og.pygraph(io_data_type=og.data_type.HALF, compute_data_type=FLOAT)
    a = g.tensor((1,))
    half = g.mul(a, 1.0009765625).set_output(True)
    c = g.sub(half, a).set_output(True).set_data_type(FLOAT)
    x, h, out = np.float16([1.5]), np.zeros(1, np.float16), np.zeros(1, np.float32)
    g.execute({a: x, half: h, c: out})
    assert out[0] == np.float32(h[0]) - np.float32(x[0])


@pytest.mark.slow
def test_inside_torch_compile(torch):
    g, a, b, c = add_graph((4,))
    g.build()
    out = torch.zeros(4)

    def call(x):
        g.execute({a: x, b: x, c: out})
        return out * 2

    compiled = torch.compile(call, backend="eager")
    for value in (1.0, 3.0):
        assert compiled(torch.full((4,), value)).tolist() == [4 * value] * 4


# ---- buffer protocols read in Python


class Interface:
    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


class AddressOnly:
    """`.data_ptr()`, `.shape`, `.stride()`, as torch-like objects have."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


class CudaInterface:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            **changes,
        }


def test_objects_with_an_array_interface_or_an_address():
    g, a, b, c = add_graph((3, 2))
    x, y, out = rand(3, 2), rand(2, 3).T.copy(), np.zeros((3, 2), np.float32)
    g.execute({a: Interface(x), b: AddressOnly(y), c: Interface(out)})
    np.testing.assert_array_equal(out, x + y)
    with pytest.raises(og.OperandError, match="read-only"):
        g.execute({a: x, b: y, c: Interface(out, data=(out.ctypes.data, True))})
    transposed = rand(2, 3).T
    with pytest.raises(og.OperandError, match="layout"):
        g.execute({a: Interface(transposed), b: y, c: out})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": np.zeros(4)}, "mask"),
        ({"typestr": ">f4"}, "byte order"),
        ({"typestr": "|V2"}, "no element type"),
        ({"typestr": "nonsense"}, "no known type"),
        ({"strides": (6,)}, "no multiple"),
        ({"strides": (4, 4)}, "2 strides for 1 axes"),
        ({"data": None}, "no address"),
    ],
)
def test_broken_interfaces(changes, words):
    for broken in (CudaInterface(**changes), Interface(np.zeros(4, np.float32), **changes)):
        with pytest.raises(TypeError, match=words):
            read(broken, (2, 0))


def test_cuda_interface():
    assert read(CudaInterface(), (2, 1))[:6] == (4096, (4,), None, (2, 32, 1), (2, 1), False)
    assert read(CudaInterface(strides=(8,), data=(4096, True)), (1, 0))[:6] == (
        4096,
        (4,),
        (2,),
        (2, 32, 1),
        (2, 0),
        True,
    )
    assert device_of(CudaInterface()) == (2, 0)
    assert device_of(np.zeros(1)) == (1, 0)
    assert device_of(Interface(np.zeros(1))) == (1, 0)
    assert device_of(5) is None
    g, a, b, c = add_graph((4,))
    x = rand(4)
    g.build()
    with pytest.raises(og.OperandError, match="wrong device"):
        g.execute({a: CudaInterface(), b: x, c: x.copy()})


def test_objects_without_any_protocol():
    g, a, b, c = add_graph((4,))
    x = rand(4)
    g.build()
    for bad in (object(), [1, 2, 3, 4], 3.5, "text", b"bytes", True, {}):
        with pytest.raises(TypeError, match=r"'A' \(uid 1\)"):
            g.execute({a: bad, b: x, c: x.copy()})
