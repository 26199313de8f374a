"""The operand contract: which buffers serve which declaration, and what a plan then reads and writes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from contract_model import Declared, Given, span, verdict, writes_once
from exchange import forwarding, producer_type, table
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from probe import OneOperand, install

import opgraph as og
from opgraph.ir.tensor import row_major

D = og.data_type
ITEM = 4  # bytes of the float32 elements most cases use


def dense(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(dims[i + 1 :]) for i in range(len(dims)))


def window(memory: np.ndarray[Any, Any], dims: Any, strides: Any, offset: int = 0) -> np.ndarray[Any, Any]:
    """A view of flat memory with any extents and strides, writable."""
    size = memory.itemsize
    return as_strided(memory[offset:], dims, [s * size for s in strides])


# ---- the examples of the design, one by one

OK = ""
B, H, S, W = 2, 3, 4, 5  # [B, H, S, W]; BSHD strides are those of memory laid out (B, S, H, W)
BSHD = (S * H * W, W, H * W, 1)
QKV = (3 * S * H * W, W, 3 * H * W, 1)

# what it shows | declared dims, strides | buffer dims, strides | rule that refuses it
TABLE = [
    ("as declared", (2, 3), (3, 1), (2, 3), (3, 1), OK),
    ("(batch, N, K) memory for [batch, K, N]", (2, 5, 3), (15, 1, 5), (2, 3, 5), (15, 5, 1), OK),
    ("[m, k] for [1, m, k]", (1, 4, 6), (24, 6, 1), (4, 6), (6, 1), OK),
    ("[1, m, k] for [m, k]", (4, 6), (6, 1), (1, 4, 6), (7, 6, 1), OK),
    ("strides of extent-1 axes", (1, 5), (5, 1), (1, 5), (12345, 1), OK),
    ("packed QKV view", (B, H, S, W), QKV, (B, H, S, W), QKV, OK),
    ("packed QKV view in storage order", (B, H, S, W), QKV, (B, S, H, W), (180, 45, 5, 1), OK),
    ("packed QKV view, head and width merged", (B, H, S, W), QKV, (B, S, H * W), (180, 45, 1), OK),
    ("packed QKV view, batch and rows merged", (B, H, S, W), QKV, (B * S, H, W), (45, 5, 1), OK),
    ("BSHD memory for BHSD declared with its strides", (B, H, S, W), BSHD, (B, S, H, W), (60, 15, 5, 1), OK),
    ("[B*S, D]", (B, S, W), (20, 5, 1), (B * S, W), (5, 1), OK),
    ("[B, S, D] for [B*S, D]", (B * S, W), (5, 1), (B, S, W), (20, 5, 1), OK),
    ("[B*S, H*D] for BSHD strides", (B, H, S, W), BSHD, (B * S, H * W), (15, 1), OK),
    ("column-major, as its own view", (2, 3), (1, 2), (2, 3), (1, 2), OK),
    ("column-major, as its memory", (2, 3), (1, 2), (3, 2), (2, 1), OK),
    ("NHWC memory for channels-last NCHW", (2, 3, 4, 5), (60, 1, 15, 3), (2, 4, 5, 3), (60, 15, 3, 1), OK),
    ("equal extents in C order are read as declared", (3, 3), (1, 3), (3, 3), (3, 1), OK),
    ("one-dimensional", (2, 3), (3, 1), (6,), (1,), OK),
    ("one-dimensional with more than the span", (2, 3), (8, 1), (40,), (1,), OK),
    ("one-dimensional for a transposed declaration", (2, 3), (1, 2), (6,), (1,), OK),
    ("longer along the widest axis", (2, 3), (3, 1), (7, 3), (3, 1), OK),
    ("longer along the widest axis, not the first", (2, 3), (1, 2), (2, 9), (1, 2), OK),
    ("longer along a merged axis", (2, 4, 5), (20, 5, 1), (9, 5), (5, 1), OK),
    ("longer along a split axis", (8, 5), (5, 1), (3, 4, 5), (20, 5, 1), OK),
    ("a scalar for ones", (1, 1, 1), (1, 1, 1), (), (), OK),
    ("broadcast input, as declared", (4, 3), (0, 1), (4, 3), (0, 1), OK),
    ("broadcast input from its one row", (4, 3), (0, 1), (3,), (1,), OK),
    ("padded rows, as declared", (2, 3), (4, 1), (2, 3), (4, 1), OK),
    ("forgotten transpose", (3, 5), (5, 1), (5, 3), (3, 1), "layout"),
    ("transposed view of dense rows", (2, 3), (3, 1), (2, 3), (1, 2), "layout"),
    ("BSHD for BHSD", (B, H, S, W), dense((B, H, S, W)), (B, S, H, W), (60, 15, 5, 1), "layout"),
    ("NHWC for NCHW", (2, 3, 4, 5), (60, 20, 5, 1), (2, 4, 5, 3), (60, 15, 3, 1), "layout"),
    ("dense buffer for padded rows", (2, 3), (4, 1), (3, 3), (3, 1), "layout"),
    ("dense buffer for padded rows, too short as well", (2, 3), (4, 1), (2, 3), (3, 1), "bytes"),
    ("padded rows for a dense declaration", (2, 3), (3, 1), (2, 3), (4, 1), "layout"),
    ("merge across a gap", (2, 4, 5), (40, 5, 1), (16, 5), (5, 1), "layout"),
    ("inner merge across a gap", (2, 3, 4), (20, 5, 1), (3, 12), (20, 1), "layout"),
    ("elements twice as far apart", (3, 4), (4, 1), (3, 4), (4, 2), "layout"),
    ("rows twice as far apart", (3, 4), (4, 1), (3, 4), (8, 1), "layout"),
    ("equal strides keep the declared order", (2, 3), (1, 1), (3, 2), (1, 1), "layout"),
    ("merge and split at once", (2, 4, 6), (24, 6, 1), (8, 2, 3), (6, 3, 1), "layout"),
    ("split that the declaration does not fill", (6, 5), (5, 1), (2, 4, 5), (20, 5, 1), "layout"),
    ("longer along an inner axis", (2, 3), (3, 1), (2, 4), (4, 1), "layout"),
    ("longer along an inner axis of the same stride", (3, 2), (5, 1), (3, 4), (5, 1), "layout"),
    ("shorter", (3, 3), (3, 1), (2, 3), (3, 1), "bytes"),
    ("one-dimensional, one short", (2, 3), (4, 1), (6,), (1,), "bytes"),
    ("one-dimensional, strided", (2, 3), (3, 1), (6,), (2,), "layout"),
    ("dense buffer for a broadcast", (4, 3), (0, 1), (4, 3), (3, 1), "layout"),
    ("broadcast buffer for a dense declaration", (4, 3), (3, 1), (4, 3), (0, 1), "bytes"),
    ("negative stride", (4,), (1,), (4,), (-1,), "negative_stride"),
    ("empty", (0, 3), (3, 1), (0, 3), (3, 1), OK),
    ("empty inside", (4, 0, 3), (3, 3, 1), (4, 0, 3), (7, 9, 1), OK),
    ("empty, negative strides of nothing", (4, 0), (1, 1), (4, 0), (-4, 1), OK),
    ("empty, one-dimensional", (4, 0, 3), (3, 3, 1), (0,), (1,), OK),
    ("empty, merged", (0, 4, 5), (20, 5, 1), (0, 5), (5, 1), OK),
    ("empty, split", (0, 5), (5, 1), (0, 4, 5), (20, 5, 1), OK),
    ("empty declared, more given", (0, 3), (3, 1), (5, 3), (3, 1), OK),
    ("empty of another shape", (4, 0, 3), (3, 3, 1), (0, 5), (5, 1), "layout"),
    ("an empty buffer where elements are declared", (2, 3), (3, 1), (0, 3), (3, 1), "bytes"),
]


def room(*layouts: tuple[Any, Any]) -> int:
    return max((span(d, s) for d, s in layouts), default=0)


@pytest.mark.parametrize("case", TABLE, ids=[row[0] for row in TABLE])
def test_the_examples_of_the_design(case: Any):
    _, dims, strides, has_dims, has_strides, rule = case
    assert verdict(Declared(dims, strides), Given(has_dims, has_strides)) == rule, "the model itself"
    backwards = sum((n - 1) * -s for n, s in zip(has_dims, has_strides, strict=True) if s < 0 and n > 0)
    memory = np.arange(room((dims, strides), (has_dims, has_strides)) + backwards + 8, dtype=np.float32)
    buffer = window(memory, has_dims, has_strides, backwards)
    reader = OneOperand(dims, strides)
    assert reader.refusal(buffer) == rule
    if rule == OK:
        np.testing.assert_array_equal(reader.read, window(memory, dims, strides))
    # The same through the engine that computes.
    graph = og.pygraph(io_data_type=D.FLOAT)
    x = graph.tensor(dims, strides, name="X")
    y = graph.identity(x).set_output(True).set_stride(row_major(dims))
    graph.build(engine="cpu", device="cpu")
    copy = np.full(dims, -1, np.float32)
    if rule == OK:
        graph.execute({x: buffer, y: copy})
        np.testing.assert_array_equal(copy, window(memory, dims, strides))
    else:
        with pytest.raises(og.OperandError):
            graph.execute({x: buffer, y: copy})
        assert (copy == -1).all()


@pytest.mark.parametrize("case", TABLE, ids=[row[0] for row in TABLE])
def test_the_examples_as_outputs(case: Any):
    _, dims, strides, has_dims, has_strides, rule = case
    if not writes_once(dims, strides):
        with pytest.raises(ValueError, match="overlaps itself"):
            OneOperand(dims, strides, output=True)
        return
    if any(s < 0 for s in has_strides):
        pytest.skip("no memory before the view")
    memory = np.full(room((dims, strides), (has_dims, has_strides)) + 8, -1, np.float32)
    writer = OneOperand(dims, strides, output=True)
    if not writes_once(has_dims, has_strides) and rule != OK:
        rule = "self_overlap"
    assert writer.refusal(window(memory, has_dims, has_strides)) == rule
    expected = np.full_like(memory, -1)
    if rule == OK:
        view = window(expected, dims, strides)
        view[...] = np.arange(1, view.size + 1).reshape(view.shape)
    np.testing.assert_array_equal(memory, expected)


def test_strides_that_differ_are_named_in_the_message():
    reader = OneOperand((3, 2), (2, 1))
    with pytest.raises(og.OperandError) as caught:
        reader.give(np.zeros((2, 4), np.float32).T[:3])
    error = caught.value
    assert error.declared == "dims (3, 2) strides (2, 1)" and error.given == "dims (3, 2) strides (1, 4)"


class Dynamic:
    """Y = |X| with live extents from the buffers; `read` is what the plan saw of X."""

    def __init__(self, dims: Any, strides: Any = None, **plan: Any) -> None:
        self.graph = og.pygraph(io_data_type=D.FLOAT)
        self.x = self.graph.tensor(dims, strides, name="X")
        self.y = self.graph.abs(self.x).set_output(True).set_stride(row_major(dims))
        install(self.graph, self._run, dynamic=True, **plan)
        self.read: Any = None

    def _run(self, pack: Any) -> None:
        self.read = pack[0].numpy().copy()
        np.copyto(pack[1].numpy(), self.read)


@pytest.mark.parametrize("overrides", [True, False])
@pytest.mark.parametrize("rows", [0, 2, 4, 6])
def test_live_extents_come_from_the_buffers(rows: int, overrides: bool):
    """Also where the buffer is longer: all of it counts then, not what the declaration would take of it."""
    dynamic = Dynamic((4, 3), overrides=overrides)
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    out = np.full((rows, 3), -1, np.float32)
    for _ in range(2):
        dynamic.graph.execute({dynamic.x: x, dynamic.y: out})
        np.testing.assert_array_equal(dynamic.read, x)
        np.testing.assert_array_equal(out, x)
    for other in {0, 2, 4, 6} - {rows}:
        dynamic.read = None
        with pytest.raises(ValueError, match=r"live dims|contradict"):
            dynamic.graph.execute({dynamic.x: x, dynamic.y: np.zeros((other, 3), np.float32)})
        assert dynamic.read is None


def test_other_descriptions_are_read_as_declared_under_dynamic_shapes():
    dynamic = Dynamic((2, 5, 3), (15, 1, 5))
    memory = np.arange(30, dtype=np.float32)
    out = np.zeros((2, 5, 3), np.float32)
    for buffer in (memory, memory.reshape(2, 3, 5), memory.reshape(6, 5)):
        dynamic.graph.execute({dynamic.x: buffer, dynamic.y: out})
        np.testing.assert_array_equal(dynamic.read, memory.reshape(2, 3, 5).transpose(0, 2, 1))


def test_lying_extents_are_refused_without_overflow():
    tabled = producer_type(table())
    huge = 2**62
    memory = np.zeros(64, np.float32)
    for dims, strides in [
        ((huge, huge), (huge, 1)),
        ((2, 2**32, 2**32), (2**63 - 1, 2**32, 1)),
        ((huge, 3), (3, 1)),
        ((4, 2**31, 2**31, 2), (2**63 - 1, 2**32, 2, 1)),
    ]:
        for declared in ((2, 3), (6,), (3,)):
            buffer = tabled(memory, dims=dims, strides=strides)
            given = Given(dims, strides)
            assert OneOperand(declared, touch=False).refusal(buffer) == verdict(
                Declared(declared, dense(declared)), given
            )


# ---- any declaration, any buffer


@st.composite
def declarations(draw: Any, output: bool) -> Declared:
    """Rank 1..6; permuted, padded and (inputs) broadcast strides; now and then an empty axis."""
    rank = draw(st.integers(1, 6))
    widest = {1: 12, 2: 6, 3: 4, 4: 3, 5: 3, 6: 2}[rank]
    extent = st.one_of(st.integers(1, widest), st.integers(2, widest), st.integers(2, widest))
    dims = [draw(extent) for _ in range(rank)]
    if draw(st.integers(0, 15)) == 0:
        dims[draw(st.integers(0, rank - 1))] = 0
    strides = [0] * rank
    step = 1
    order = draw(st.permutations(range(rank))) if draw(st.booleans()) else range(rank - 1, -1, -1)
    for axis in order:
        if not output and draw(st.integers(0, 9)) == 0:
            continue  # broadcast along this axis
        step += draw(st.sampled_from((0, 0, 0, 0, 1, 2, 5)))
        strides[axis] = step
        step *= max(dims[axis], 1)
    return Declared(tuple(dims), tuple(strides), output=output)


def _views(draw: Any, want: Declared) -> tuple[list[int], list[int]]:
    """A buffer's extents and strides: the declaration's own, altered up to three times."""
    axes = list(zip(want.dims, want.strides, strict=True))
    kind = draw(st.sampled_from(("declared", "stored", "stored", "dense", "flat", "any")))
    if kind == "stored":
        axes = sorted((a for a in axes if a[0] != 1), key=lambda a: -a[1])
    elif kind == "dense":
        dims = [n for n, _ in (axes if draw(st.booleans()) else sorted(axes, key=lambda a: -a[1]))]
        axes = list(zip(dims, dense(tuple(dims)), strict=True))
    elif kind == "flat":
        axes = [(span(want.dims, want.strides), 1)]
    elif kind == "any":
        rank = draw(st.integers(0, 4))
        axes = [(draw(st.integers(0, 5)), draw(st.integers(0, 12))) for _ in range(rank)]
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 1, 2, 3)))):
        axes = _altered(draw, axes)
    return [n for n, _ in axes], [s for _, s in axes]


def _altered(draw: Any, axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    what = draw(st.sampled_from(("merge", "split", "one", "extent", "wide", "swap", "permute", "stride", "sign")))
    at = draw(st.integers(0, max(0, len(axes) - 1)))
    if what == "one" or not axes:
        return [*axes[:at], (1, draw(st.integers(0, 99))), *axes[at:]] if len(axes) < 10 else axes
    extent, stride = axes[at]
    if what == "merge" and at + 1 < len(axes):
        fitting = [i for i, (a, b) in enumerate(pairwise(axes)) if a[1] == b[0] * b[1]]
        at = draw(st.sampled_from(fitting)) if fitting and draw(st.integers(0, 3)) else at
        return [*axes[:at], (axes[at][0] * axes[at + 1][0], axes[at + 1][1]), *axes[at + 2 :]]
    if what == "split":
        factors = [f for f in range(2, extent) if extent % f == 0]
        if factors:
            inner = draw(st.sampled_from(factors))
            return [*axes[:at], (extent // inner, stride * inner), (inner, stride), *axes[at + 1 :]]
    if what == "wide":  # longer along the widest axis
        at = max(range(len(axes)), key=lambda i: axes[i][1])
        extent, stride = axes[at]
        return [*axes[:at], (extent + draw(st.integers(1, 3)), stride), *axes[at + 1 :]]
    if what == "extent":
        return [*axes[:at], (max(0, extent + draw(st.sampled_from((-2, -1, 1, 2)))), stride), *axes[at + 1 :]]
    if what == "stride":
        return [*axes[:at], (extent, draw(st.sampled_from((0, stride + 1, 2 * stride, 1)))), *axes[at + 1 :]]
    if what == "sign" and draw(st.booleans()):
        return [*axes[:at], (extent, -stride), *axes[at + 1 :]]
    if what == "swap" and at + 1 < len(axes):
        return [*axes[:at], axes[at + 1], axes[at], *axes[at + 2 :]]
    return draw(st.permutations(axes)) if what == "permute" else axes


TABLED = producer_type(table())
OWNING_ONLY = producer_type(table(borrow=False))
# Ways a NumPy view reaches the library.
PRODUCERS: dict[str, Any] = {
    "numpy": lambda view: view,
    "dlpack": forwarding,
    "legacy": lambda view: forwarding(view, legacy=True),
    "table": TABLED,
    "owning table": lambda view: OWNING_ONLY(view, flags=0 if view.flags.writeable else 1),
}


@st.composite
def samples(draw: Any) -> tuple[Declared, Given, int, str]:
    want = draw(declarations(draw(st.booleans())))
    dims, strides = _views(draw, want)
    given = Given(tuple(dims), tuple(strides), read_only=draw(st.integers(0, 5)) == 0)
    return want, given, draw(st.integers(0, 3)), draw(st.sampled_from(sorted(PRODUCERS)))


def check_sample(want: Declared, have: Given, offset: int, make: Any) -> str:
    """Model and native check agree; what is accepted reads or writes exactly the declared elements.

    `make(memory, start)` gives the buffer that `have` describes, beginning at an element of flat memory.
    """
    before = sum((n - 1) * -s for n, s in zip(have.dims, have.strides, strict=True) if s < 0 and n > 0)
    start = offset + before
    reach = (span(d, [abs(s) for s in st_]) for d, st_ in ((want.dims, want.strides), (have.dims, have.strides)))
    size = start + max(reach) + 3
    memory = np.full(size, -1, np.float32) if want.output else np.arange(size, dtype=np.float32)
    untouched = memory.copy()
    one = OneOperand(want.dims, want.strides, output=want.output)
    rule = one.refusal(make(memory, start))
    expected = verdict(want, have)
    assert rule == expected, f"native {rule!r}, model {expected!r}"
    if want.output and rule == OK:
        view = window(untouched, want.dims, want.strides, start)
        view[...] = np.arange(1, view.size + 1).reshape(view.shape)
    elif rule == OK:
        np.testing.assert_array_equal(one.read, window(memory, want.dims, want.strides, start))
    np.testing.assert_array_equal(memory, untouched)
    return rule


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(samples())
def test_model_and_native_check_agree(sample: Any):
    want, have, offset, producer = sample
    if producer in ("legacy", "table"):
        have = have._replace(read_only=False)  # neither can say it

    def make(memory: Any, start: int) -> Any:
        view = window(memory, have.dims, have.strides, start)
        if have.read_only:
            view.flags.writeable = False
        return PRODUCERS[producer](view)

    event(check_sample(want, have, offset, make) or "accepted")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(declarations(False), st.data())
def test_a_numpy_view_of_the_same_memory_always_serves(want: Declared, data: Any):
    """Views that NumPy itself makes of one buffer: as declared, in storage order, merged where NumPy can, flat."""
    memory = np.arange(span(want.dims, want.strides) + 4, dtype=np.float32)
    declared = window(memory, want.dims, want.strides)
    assert check_view(want, declared, declared)
    assert check_view(want, memory, declared)
    if 0 in want.strides or 0 in want.dims:
        return
    stored = declared.transpose(np.argsort([-s for s in want.strides], kind="stable"))
    assert check_view(want, stored, declared)
    shape = stored.shape
    at = data.draw(st.integers(0, len(shape) - 1))
    merged = (*shape[:at], -1, *shape[at + 2 :])
    try:
        view = stored.view()
        view.shape = merged
    except AttributeError:
        return  # that merge would need a copy
    assert check_view(want, view, declared)


def check_view(want: Declared, view: Any, declared: Any) -> bool:
    one = OneOperand(want.dims, want.strides)
    if one.refusal(view):
        return False
    np.testing.assert_array_equal(one.read, declared)
    return True


@pytest.mark.frameworks
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(sample=samples())
def test_torch_views_are_judged_alike(torch: Any, sample: Any):
    want, have, offset, _ = sample
    if all(s >= 0 for s in have.strides):  # torch has no others
        check_sample(
            want,
            have._replace(read_only=False),
            offset,
            lambda memory, start: torch.as_strided(torch.from_numpy(memory), have.dims, have.strides, start),
        )
