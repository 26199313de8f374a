"""Random shapes, layouts and data types through the conformance suite, on the CPU engine in both
precisions."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from conformance import Problem, run_case
from conformance.layouts import dense
from conformance.matmul import matmul_problem
from conformance.memory import available
from conformance.pointwise import CASES as POINTWISE
from conformance.reduction import CASES as REDUCTIONS
from conformance.reduction import reduction_problem
from conformance.shape import concatenate_problem, reshape_problem, slice_problem, transpose_problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opgraph import data_type, reduction_mode, reshape_mode

FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
MOVED = (*FLOATS, data_type.INT32, data_type.INT8, data_type.BOOLEAN)


def check(problem: Problem) -> None:
    truth = problem.solve(np)
    for precision in ("native", "float64"):
        run_case(problem, "cpu", {"precision": precision}, truth=truth)


def data_types(draw: Any, among: Any) -> data_type:
    dtype = draw(st.sampled_from(among))
    assume(available(dtype))
    return dtype


def dims(most: int = 4, largest: int = 6) -> Any:
    return st.lists(st.integers(0, largest), min_size=1, max_size=most)


@st.composite
def layout(draw: Any, dim: Any, *, stride_0: bool = False) -> tuple[int, ...]:
    """Any layout without overlap: the axes in any order, with gaps; for inputs perhaps an axis of stride
    0."""
    order = draw(st.permutations(range(len(dim))))
    room = [n + draw(st.integers(0, 2)) for n in dim]
    stride = list(dense(room, order))
    scale = draw(st.sampled_from([1, 1, 2]))
    stride = [step * scale for step in stride]
    if stride_0 and draw(st.integers(0, 4)) == 0:
        stride[draw(st.integers(0, len(dim) - 1))] = 0
    return tuple(stride)


@st.composite
def rng(draw: Any) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**16)))


@st.composite
def pointwise_problems(draw: Any) -> Problem:
    case = draw(st.sampled_from(POINTWISE))
    dtype = data_types(draw, case.data_types)
    full = draw(dims())
    shapes = []
    for i in range(len(case.ports)):
        shape = [1 if draw(st.integers(0, 3)) == 0 else n for n in full]
        if i and draw(st.booleans()):
            shape = shape[draw(st.integers(0, len(shape) - 1)) :]
        shapes.append(shape)
    strides = [draw(layout(shape, stride_0=True)) for shape in shapes]
    out = np.broadcast_shapes(*map(tuple, shapes))
    out_stride = draw(st.none() | layout(out))
    return case.problem("random", draw(rng()), shapes, strides, dtype, out_stride=out_stride)


@settings(max_examples=150, deadline=None)
@given(pointwise_problems(), st.booleans())
def test_pointwise(problem, virtual):
    check(problem.with_virtual_edges() if virtual else problem)


@st.composite
def matmul_problems(draw: Any) -> Problem:
    dtype = data_types(draw, FLOATS)
    m, k, n = (draw(st.integers(0, 9)) for _ in range(3))
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    sides = [[1 if draw(st.integers(0, 3)) == 0 else extent for extent in batch] for _ in range(2)]
    a, b = [*sides[0], m, k], [*sides[1], k, n]
    out = [*np.broadcast_shapes(tuple(sides[0]), tuple(sides[1])), m, n]
    out_stride = draw(st.none() | layout(out))
    a_stride, b_stride = draw(layout(a, stride_0=True)), draw(layout(b, stride_0=True))
    return matmul_problem("random", draw(rng()), a, b, a_stride, b_stride, dtype, out_stride=out_stride)


@settings(max_examples=100, deadline=None)
@given(matmul_problems())
def test_matmul(problem):
    check(problem)


@st.composite
def reduction_problems(draw: Any) -> Problem:
    case = draw(st.sampled_from(REDUCTIONS))
    dtype = data_types(draw, FLOATS)
    dim = draw(dims())
    out = [1 if draw(st.booleans()) else n for n in dim]
    if case.mode in (reduction_mode.MIN, reduction_mode.MAX, reduction_mode.AMAX):
        assume(all(n == kept or n for n, kept in zip(dim, out, strict=True)))
    values = case.numbers(draw(rng()), dim, dtype)
    stride, out_stride = draw(layout(dim, stride_0=True)), draw(st.none() | layout(out))
    return reduction_problem("random", values, out, stride, case.mode, dtype, out_stride=out_stride)


@settings(max_examples=100, deadline=None)
@given(reduction_problems())
def test_reduction(problem):
    check(problem)


@st.composite
def moves(draw: Any) -> Problem:
    op = draw(st.sampled_from(["transpose", "slice", "concatenate", "reshape"]))
    dtype = data_types(draw, MOVED)
    dim = draw(dims())
    stride = draw(layout(dim))
    if op == "transpose":
        permutation = draw(st.permutations(range(len(dim))))
        out_stride = draw(st.none() | layout([dim[axis] for axis in permutation]))
        return transpose_problem("random", draw(rng()), dim, permutation, stride, dtype, out_stride)
    if op == "slice":
        slices = [draw(cuts(n)) for n in dim]
        out = [len(range(*cut.indices(n))) for cut, n in zip(slices, dim, strict=True)]
        return slice_problem("random", draw(rng()), dim, slices, stride, dtype, draw(st.none() | layout(out)))
    if op == "concatenate":
        axis = draw(st.integers(0, len(dim) - 1))
        parts = [[n if a != axis else draw(st.integers(0, 4)) for a, n in enumerate(dim)] for _ in range(3)]
        parts = parts[: draw(st.integers(1, 3))]
        strides = [draw(layout(part)) for part in parts]
        return concatenate_problem("random", draw(rng()), parts, axis, strides, dtype)
    out = draw(refolds(prod(dim)))
    out_stride = draw(st.none() | layout(out))
    return reshape_problem("random", draw(rng()), dim, out, stride, dtype, reshape_mode.LOGICAL, out_stride)


@st.composite
def cuts(draw: Any, extent: int) -> slice:
    ends = st.none() | st.integers(-extent - 1, extent + 1)
    return slice(draw(ends), draw(ends), draw(st.none() | st.integers(1, 3)))


@st.composite
def refolds(draw: Any, count: int) -> list[int]:
    """Dims with this many elements."""
    out = []
    while count > 1 and len(out) < 4 and draw(st.booleans()):
        factor = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        out.append(factor)
        count //= factor
    return [*out, count]


@settings(max_examples=150, deadline=None)
@given(moves())
def test_moves(problem):
    check(problem)
