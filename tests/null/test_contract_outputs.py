"""Outputs and what they may share memory with, and pass-by-value scalars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_model import writes_once
from exchange import Dlpack, Managed, producer_type, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from probe import OneOperand, install

import opgraph as og

D = og.data_type


def view(memory: np.ndarray[Any, Any], dims: Any, strides: Any, offset: int = 0) -> np.ndarray[Any, Any]:
    return as_strided(memory[offset:], dims, [s * memory.itemsize for s in strides])


class Two:
    """Inputs A and B, outputs C and E of given layouts; the plan writes both outputs."""

    def __init__(self, layout: Any = ((6,), (1,)), other: Any = None, *, inplace: Any = (), workspace: int = 0):
        self.graph = og.pygraph("two", io_data_type=D.FLOAT)
        self.a = self.graph.tensor(*layout, name="A")
        self.b = self.graph.tensor(*(other or layout), name="B")
        self.c = self.graph.abs(self.a).set_output(True).set_name("C").set_dim(layout[0]).set_stride(layout[1])
        other = other or layout
        self.e = self.graph.neg(self.b).set_output(True).set_name("E").set_dim(other[0]).set_stride(other[1])
        self.ran = 0
        order = [t.uid for t in (self.a, self.b, self.c, self.e)]
        pairs = [(sorted(order).index(o.uid), sorted(order).index(i.uid)) for o, i in self.named(inplace)]
        install(self.graph, self._run, inplace=pairs, workspace_bytes=workspace)

    def named(self, pairs: Any) -> list[tuple[Any, Any]]:
        return [(getattr(self, o), getattr(self, i)) for o, i in pairs]

    def _run(self, pack: Any) -> None:
        self.ran += 1
        for tensor in (self.c, self.e):
            pack[pack.uids.index(tensor.uid)].numpy()[...] = 7

    def refusal(self, a: Any, b: Any, c: Any, e: Any, workspace: Any = None) -> tuple[str, ...]:
        """() when accepted, else the rule and the names of the tensors in the message."""
        self.ran = 0
        try:
            self.graph.execute({self.a: a, self.b: b, self.c: c, self.e: e}, workspace)
        except og.OperandError as error:
            assert not self.ran
            return (error.rule, *(name for name in "ABCE" if f"tensor {name!r}" in str(error)))
        assert self.ran == 1
        return ()


def fresh(n: int = 6) -> list[Any]:
    return [np.full(n, i, np.float32) for i in range(4)]


# ---- what an output buffer may be


@pytest.mark.parametrize(
    ("dims", "strides"),
    [((5,), (0,)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((3, 2), (1, 2)), ((2, 2, 2), (3, 2, 1))],
)
def test_an_output_that_overlaps_itself_is_refused_at_the_declaration(dims: Any, strides: Any):
    assert not writes_once(dims, strides)
    with pytest.raises(ValueError, match=r"'Y'.*overlaps itself"):
        OneOperand(dims, strides, output=True)
    assert OneOperand(dims, strides).refusal(view(np.zeros(16, np.float32), dims, strides)) == ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=4))
def test_declared_outputs_never_write_an_element_twice(axes: Any):
    dims, strides = zip(*axes, strict=True)
    places = sum(np.ix_(*(np.arange(n) * s for n, s in axes))).ravel()
    if writes_once(dims, strides):
        assert len(set(places.tolist())) == places.size  # the rule implies it; not the other way round
        OneOperand(dims, strides, output=True)
    else:
        with pytest.raises(ValueError, match="overlaps itself"):
            OneOperand(dims, strides, output=True)


def test_a_buffer_that_overlaps_itself_is_named_as_that():
    one = OneOperand((5,), (1,), output=True)
    memory = np.full(8, 3, np.float32)
    assert one.refusal(view(memory, (5,), (0,))) == "self_overlap"
    assert (memory == 3).all()


def test_read_only_outputs():
    memory = np.full(6, 3, np.float32)
    locked = memory.view()
    locked.flags.writeable = False
    flagged = Dlpack(lambda kwargs: Managed(memory, flags=1).capsule())
    owning = producer_type(table(borrow=False))(memory, flags=1)
    writer, reader = OneOperand((2, 3), output=True, strides=(3, 1)), OneOperand((2, 3))
    for buffer in (locked, locked.reshape(2, 3), flagged, owning, np.frombuffer(bytes(24), np.float32)):
        assert writer.refusal(buffer) == "read_only"
        assert reader.refusal(buffer) == ""
    assert (memory == 3).all()


# ---- memory shared between operands


def test_outputs_share_nothing():
    two = Two()
    a, b, c, e = fresh()
    memory = np.zeros(20, np.float32)
    assert two.refusal(a, b, c, e) == ()
    assert two.refusal(a, a, c, e) == ()  # inputs may
    assert two.refusal(a, b, c, c) == ("overlap", "C", "E")
    assert two.refusal(a, b, memory[:6], memory[6:12]) == ()
    assert two.refusal(a, b, memory[6:12], memory[:6]) == ()
    assert two.refusal(a, b, memory[:6], memory[5:11]) == ("overlap", "C", "E")
    assert two.refusal(a, b, memory[5:11], memory[:6]) == ("overlap", "C", "E")
    assert two.refusal(memory[:6], b, memory[5:11], e) == ("overlap", "A", "C")
    assert two.refusal(a, memory[5:11], memory[:6], e) == ("overlap", "B", "C")
    assert two.refusal(memory[:6], b, memory[6:12], e) == ()
    assert two.refusal(a, b, memory.ctypes.data, memory[5:11]) == ("overlap", "C", "E")
    assert two.refusal(a, b, memory.ctypes.data, memory.ctypes.data + 24) == ()
    # Only what the contract spans counts, not the rest of a longer buffer.
    assert two.refusal(a, b, memory, memory[6:]) == ()
    # A range that touches but by one byte.
    raw = np.zeros(100, np.uint8)
    shifted = raw[23:47].view(np.float32)
    assert two.refusal(a, b, raw[:24].view(np.float32), shifted) == ("overlap", "C", "E")


def test_in_place_where_the_plan_allows_it():
    a, b, c, e = fresh()
    assert Two().refusal(a, b, a, e) == ("inplace", "A", "C")
    two = Two(inplace=[("c", "a")])
    assert two.refusal(a, b, a, e) == () and (a == 7).all()
    assert two.refusal(a, b, c, b) == ("inplace", "B", "E")
    assert two.refusal(a, a, a, e) == ("inplace", "B", "C")  # B reads it as well
    memory = np.zeros(20, np.float32)
    assert two.refusal(memory[:6], b, memory[1:7], e) == ("overlap", "A", "C")
    assert two.refusal(memory.ctypes.data, b, memory[:6], e) == ()


def test_in_place_ignores_strides_that_are_never_used():
    a = fresh()[0]
    graph = og.pygraph(io_data_type=D.FLOAT)
    x = graph.tensor((1, 6), (99, 1), name="A")
    y = graph.abs(x).set_output(True).set_stride((6, 1))
    install(graph, lambda pack: None, inplace=[(1, 0)])
    graph.execute({x: a, y: a})


def test_interleaved_slices_of_one_buffer():
    """q, k and v of one packed buffer share its range of addresses and no element."""
    packed = np.zeros((4, 3, 6), np.float32)
    two = Two(((4, 6), (18, 1)))
    a = np.zeros((4, 18), np.float32)[:, :6]
    for _ in range(3):  # the second time the answer is remembered
        assert two.refusal(a, a, packed[:, 0], packed[:, 1]) == ()
        assert two.refusal(packed[:, 2], a, packed[:, 0], packed[:, 1]) == ()
        assert two.refusal(packed[:, 1], a, packed[:, 0], packed[:, 2]) == ()
        flat = packed.reshape(4, 18)
        assert two.refusal(a, a, flat[:, :6], flat[:, 5:11]) == ("overlap", "C", "E")
        assert two.refusal(a, flat[:, 5:11], flat[:, :6], flat[:, 12:]) == ("overlap", "B", "C")


def test_more_interleaved_distances_than_are_remembered():
    memory = np.zeros(4000, np.float32)
    two = Two(((3, 2), (100, 1)))
    a = np.zeros((3, 100), np.float32)[:, :2]
    for shift in [*range(2, 40), *range(2, 40)]:
        rows = (view(memory, (3, 2), (100, 1), at) for at in (0, shift))
        assert two.refusal(a, a, *rows) == ()
        rows = (view(memory, (3, 2), (100, 1), at) for at in (shift, shift + 1))
        assert two.refusal(a, a, *rows) == ("overlap", "C", "E")


@st.composite
def neighbours(draw: Any) -> Any:
    def layout() -> Any:
        rank = draw(st.integers(1, 3))
        dims = [draw(st.integers(1, 4)) for _ in range(rank)]
        step, strides = 1, [0] * rank
        for axis in draw(st.permutations(range(rank))):
            step += draw(st.sampled_from((0, 0, 1, 3, 6)))
            strides[axis] = step
            step *= dims[axis]
        return tuple(dims), tuple(strides)

    return layout(), layout(), draw(st.integers(0, 30)), draw(st.integers(0, 30))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(neighbours())
def test_overlap_is_decided_exactly(case: Any):
    """Against the sets of elements of both operands: an output with an output, and with an input."""
    first, second, at, other = case
    memory = np.zeros(2000, np.float32)
    index = np.arange(2000)
    sets = [set(view(index, *layout, start).ravel().tolist()) for layout, start in ((first, at), (second, other))]
    shared = bool(sets[0] & sets[1])
    two = Two(first, second)
    x, y = (np.zeros(2000, np.float32) for _ in range(2))
    c, e = view(memory, *first, at), view(memory, *second, other)
    expected = ("overlap", "C", "E") if shared else ()
    assert two.refusal(x, x, c, e) == expected
    got = two.refusal(x, e, c, y)
    assert (got[0] in ("overlap", "inplace") and got[1:] == ("B", "C")) if shared else got == ()


def test_the_workspace_is_apart_from_every_operand():
    two = Two(workspace=256)
    a, b, c, e = fresh()
    scratch = np.zeros(1024, np.uint8)
    inside = scratch[64:88].view(np.float32)
    assert two.refusal(a, b, c, e, scratch) == ()
    for operands in ((inside, b, c, e), (a, b, inside, e), (a, b, c, inside)):
        assert two.refusal(*operands, scratch)[0] == "workspace_overlap"
        assert two.refusal(*operands, scratch[128:]) == ()
        assert two.refusal(*operands, scratch.ctypes.data)[0] == "workspace_overlap"
    behind = scratch[512:536].view(np.float32)
    assert two.refusal(a, b, behind, e, scratch)[0] == "workspace_overlap"  # the whole buffer is the plan's
    assert two.refusal(a, b, behind, e, scratch.ctypes.data) == ()  # of an address, what was asked for


def test_a_workspace_of_no_bytes_overlaps_nothing():
    a, b, c, e = fresh()
    empty = a.view(np.uint8)[8:8]
    assert Two().refusal(a, b, c, e, empty) == ()
    assert Two(workspace=256).refusal(a, b, c, e, empty)[0] == "workspace_small"


def test_a_refusal_writes_nothing():
    """Every refusal comes before the plan runs, whichever operand is at fault and however late it is read."""
    outputs = [np.full(6, 5, np.float32) for _ in range(2)]
    two = Two()
    good = fresh()[0]
    for bad in (
        np.zeros(5, np.float32),
        np.zeros(6, np.float64),
        np.zeros((2, 3), np.float32).T,
        object(),
        0,
    ):
        for at in range(4):
            operands = [good, good, *outputs]
            operands[at] = bad
            try:
                rule = two.refusal(*operands)
            except TypeError as error:
                rule = (str(error),)
            assert rule and not two.ran
            assert all((o == 5).all() for o in outputs)


# ---- pass-by-value


class Scalar:
    """Y = X * s with s pass-by-value; `value` is what the plan saw."""

    def __init__(self, data_type: Any, device: Any = (1, 0)):
        self.graph = og.pygraph(io_data_type=data_type)
        x = self.graph.tensor((4,), name="X")
        self.s = self.graph.tensor((1,), data_type=data_type, is_pass_by_value=True, name="s")
        y = self.graph.mul(x, self.s).set_output(True)
        install(self.graph, self._run, device=device)
        self.pack = {x: 1 << 40, y: 1 << 41}
        self.value: Any = None
        self.slot: Any = None

    def _run(self, pack: Any) -> None:
        self.slot = pack[pack.uids.index(self.s.uid)]
        self.value = self.slot.numpy().copy()

    def give(self, value: Any) -> Any:
        self.graph.execute({**self.pack, self.s: value})
        return self.value


@pytest.mark.parametrize("device", [(1, 0), (2, 0)])
@pytest.mark.parametrize(
    ("data_type", "dtype", "value"),
    [
        (D.INT64, np.int64, 9007199254740993),
        (D.INT64, np.int64, -(2**63)),
        (D.INT32, np.int32, 7),
        (D.INT8, np.int8, -128),
        (D.FLOAT, np.float32, 0.1),
        (D.FLOAT, np.float32, 3),
        (D.FLOAT, np.float32, float("inf")),
        (D.DOUBLE, np.float64, 0.1),
        (D.HALF, np.float16, 1e-5),
        (D.BOOLEAN, np.bool_, True),
        (D.FLOAT, np.float32, np.float32(0.1)),
        (D.INT64, np.int64, np.int64(9007199254740993)),
        (D.FLOAT, np.float32, np.array(0.1, np.float32)),
        (D.FLOAT, np.float32, np.array([[0.1]], np.float32)),
        (D.BOOLEAN, np.bool_, np.array([True])),
    ],
)
def test_scalars_convert_exactly(data_type: Any, dtype: Any, value: Any, device: Any):
    """From host memory, whatever the plan's device: an int is the value here, never an address."""
    scalar = Scalar(data_type, device)
    got = scalar.give(value)
    assert got.dtype == dtype and got.shape == (1,)
    assert got[0] == np.asarray(value).astype(dtype).reshape(())
    assert scalar.slot.device == (1, 0) and scalar.slot.read_only and scalar.slot.nbytes == got.itemsize


@pytest.mark.parametrize(
    ("data_type", "value", "rule"),
    [
        (D.INT32, 2**31, "scalar"),
        (D.INT8, 128, "scalar"),
        (D.INT32, 1.0, "scalar"),
        (D.FLOAT, 2**24 + 1, "scalar"),
        (D.FLOAT, 1e39, "scalar"),
        (D.HALF, 70000.0, "scalar"),
        (D.FLOAT, True, "scalar"),
        (D.INT32, np.int64(1), "scalar"),
        (D.FLOAT, np.ones(2, np.float32), "scalar"),
        (D.FLOAT, np.ones(0, np.float32), "scalar"),
        (D.FLOAT, np.ones(1, np.float64), "dtype"),
        (D.INT32, np.ones(1, np.int64), "dtype"),
    ],
)
def test_scalars_that_do_not_convert(data_type: Any, value: Any, rule: str):
    scalar = Scalar(data_type)
    with pytest.raises(og.OperandError, match="'s'") as caught:
        scalar.give(value)
    assert (caught.value.rule, caught.value.tensor) == (rule, "s")
    assert scalar.value is None


def test_scalars_of_the_wrong_kind_and_place():
    scalar = Scalar(D.FLOAT)
    for value in ("1", b"1", object(), [1.0], 1j):
        with pytest.raises(TypeError, match="'s'"):
            scalar.give(value)
    tabled = producer_type(table())
    with pytest.raises(og.OperandError) as caught:
        scalar.give(tabled(np.ones(1, np.float32), device=(2, 0)))
    assert caught.value.rule == "device"
    assert scalar.give(tabled(np.full(1, 4, np.float32)))[0] == 4


def test_a_scalar_slot_outlives_its_call():
    scalar = Scalar(D.FLOAT)
    kept = []
    for value in range(50):
        scalar.give(float(value))
        kept.append(scalar.slot)
    assert [slot.numpy()[0] for slot in kept] == list(range(50))
