"""Cases of the operators that only move elements: reshape, transpose, slice, concatenate. All are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.layouts import channels_last, padded, preserving, reversed_axes, row_major
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, reshape_mode

__all__ = ["CASES", "concatenate_problem", "slice_problem", "transpose_problem"]

Rng = np.random.Generator

_TYPES = (
    data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE, data_type.INT32, data_type.INT64,
    data_type.INT8, data_type.UINT8, data_type.BOOLEAN, data_type.FP8_E4M3, data_type.FP8_E5M2,
)  # fmt: skip


def numbers(rng: Rng, dim: Sequence[int]) -> Any:
    return rng.integers(0, 100, dim)


def _problem(
    op: str, id: str, dtype: data_type, inputs: Any, declare: Any, truth: Any, dim: Any, stride: Any
) -> Problem:
    return Problem(
        f"{op} {dtype.name}: {id}", inputs, declare, truth, {"Y": Expect(dim, stride, dtype, exact=True)},
        io=dtype, intermediate=dtype,
    )  # fmt: skip


def transpose_problem(
    id: str, rng: Rng, dim: Sequence[int], permutation: Sequence[int], stride: Sequence[int] | None,
    dtype: data_type, out_stride: Sequence[int] | None = None,
) -> Problem:  # fmt: skip
    x = Input(numbers(rng, dim), dtype, stride)

    def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        y = graph.transpose(tensors["X"], permutation=permutation)
        return {"Y": y if out_stride is None else y.set_stride(out_stride)}

    def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        x = values["X"]
        return {"Y": x.transpose(permutation) if xp is np else x.permute(*permutation)}

    out = tuple(dim[axis] for axis in permutation)
    expected = out_stride or tuple(x.stride[axis] for axis in permutation)
    return _problem("transpose", id, dtype, {"X": x}, declare, truth, out, expected)


def slice_problem(
    id: str, rng: Rng, dim: Sequence[int], slices: Sequence[slice], stride: Sequence[int] | None,
    dtype: data_type, out_stride: Sequence[int] | None = None,
) -> Problem:  # fmt: skip
    x = Input(numbers(rng, dim), dtype, stride)

    def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        y = graph.slice(tensors["X"], slices=list(slices))
        return {"Y": y if out_stride is None else y.set_stride(out_stride)}

    out = tuple(len(range(*cut.indices(n))) for cut, n in zip(slices, dim, strict=True))
    expected = out_stride or tuple(s * (cut.step or 1) for s, cut in zip(x.stride, slices, strict=True))
    return _problem(
        "slice",
        id,
        dtype,
        {"X": x},
        declare,
        lambda xp, values: {"Y": values["X"][tuple(slices)]},
        out,
        expected,
    )


def concatenate_problem(
    id: str, rng: Rng, dims: Sequence[Sequence[int]], axis: int, strides: Sequence[Any], dtype: data_type,
    out_stride: Sequence[int] | None = None,
) -> Problem:  # fmt: skip
    inputs = {
        f"X{i}": Input(numbers(rng, dim), dtype, stride)
        for i, (dim, stride) in enumerate(zip(dims, strides, strict=True))
    }

    def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        y = graph.concatenate(inputs=list(tensors.values()), axis=axis)
        return {"Y": y if out_stride is None else y.set_stride(out_stride)}

    def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        parts = list(values.values())
        return {"Y": np.concatenate(parts, axis) if xp is np else xp.cat(parts, axis)}

    out = tuple(sum(dim[a] for dim in dims) if a == axis else n for a, n in enumerate(dims[0]))
    expected = out_stride or preserving(out, inputs["X0"].stride)
    return _problem("concatenate", id, dtype, inputs, declare, truth, out, expected)


def reshape_problem(
    id: str, rng: Rng, dim: Sequence[int], out: Sequence[int], stride: Sequence[int] | None, dtype: data_type,
    mode: reshape_mode | None = None, out_stride: Sequence[int] | None = None,
) -> Problem:  # fmt: skip
    x = Input(numbers(rng, dim), dtype, stride)
    expected = tuple(out_stride) if out_stride is not None else channels_last(out)
    x_stride = x.stride

    def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        y = graph.reshape(tensors["X"], **({} if mode is None else {"reshape_mode": mode})).set_dim(out)
        return {"Y": y if out_stride is None else y.set_stride(out_stride)}

    def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        x = values["X"]
        if mode is reshape_mode.LOGICAL:
            return {"Y": x.reshape(tuple(out))}
        # The same memory under other dims and strides: which element of x lies where, and what lies where y
        # looks.
        held, asked = _offsets(dim, x_stride), _offsets(out, expected)
        element = np.zeros(held.max(initial=-1) + 1, np.int64)
        element[held.reshape(-1)] = np.arange(held.size)
        picked = element[asked]
        return {"Y": x.reshape(-1)[picked if xp is np else xp.from_numpy(picked)]}

    label = "default" if mode is None else mode.name
    return _problem("reshape", f"{id} {label}", dtype, {"X": x}, declare, truth, out, expected)


def _offsets(dim: Sequence[int], stride: Sequence[int]) -> Any:
    """The offset of each element of a layout."""
    offsets = np.zeros(tuple(dim), np.int64)
    for places, step in zip(np.indices(tuple(dim)), stride, strict=True):
        offsets += places * step
    return offsets


class Transpose:
    op = id = "transpose"
    data_types = _TYPES

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, permutation, stride in (
            ("one axis", [5], [0], None),
            ("matrix", [5, 7], [1, 0], None),
            ("cycle", [2, 3, 5], [2, 0, 1], None),
            ("heads", [2, 3, 4, 5], [0, 2, 1, 3], None),
            ("nothing", [2, 3], [0, 1], None),
            ("empty", [0, 3], [1, 0], None),
            ("of a transpose", [5, 7], [1, 0], reversed_axes([5, 7])),
            ("padded rows", [4, 5], [1, 0], padded([4, 5])),
        ):
            yield transpose_problem(id, rng, dim, permutation, stride, dtype)
        yield transpose_problem("into row-major", rng, [4, 5], [1, 0], None, dtype, row_major([5, 4]))
        yield transpose_problem("into padded rows", rng, [4, 5], [1, 0], None, dtype, padded([5, 4]))
        yield transpose_problem("virtual", rng, [4, 5], [1, 0], None, dtype).with_virtual_edges()


class Slice:
    op = id = "slice"
    data_types = _TYPES

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        s = slice
        for id, dim, slices, stride in (
            ("all", [5], [s(None)], None),
            ("middle", [7], [s(2, 5)], None),
            ("from the end", [7], [s(-3, None)], None),
            ("steps", [4, 9], [s(1, 4), s(0, 9, 2)], None),
            ("one element", [3, 4], [s(2, 3), s(1, 2)], None),
            ("nothing", [3, 4], [s(2, 2), s(None)], None),
            ("beyond the end", [3, 4], [s(1, 100), s(None)], None),
            ("padded rows", [4, 5], [s(1, 3), s(None, None, 3)], padded([4, 5])),
            ("transposed", [5, 7], [s(1, 4), s(2, None)], reversed_axes([5, 7])),
        ):
            yield slice_problem(id, rng, dim, slices, stride, dtype)
        cut = [slice(1, 3), slice(0, 5, 2)]
        yield slice_problem("into row-major", rng, [4, 5], cut, None, dtype, row_major([2, 3]))
        yield slice_problem("virtual", rng, [4, 5], cut, None, dtype).with_virtual_edges()


class Concatenate:
    op = id = "concatenate"
    data_types = _TYPES

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dims, axis, strides in (
            ("one input", ([3, 4],), 0, (None,)),
            ("rows", ([3, 4], [2, 4]), 0, (None, None)),
            ("columns", ([3, 4], [3, 5], [3, 1]), 1, (None, None, None)),
            ("an empty part", ([3, 4], [0, 4]), 0, (None, None)),
            ("mixed layouts", ([3, 4], [3, 5]), 1, (reversed_axes([3, 4]), padded([3, 5]))),
            ("channels last", ([2, 3, 4, 5], [2, 2, 4, 5]), 1, (channels_last([2, 3, 4, 5]), None)),
        ):
            yield concatenate_problem(id, rng, dims, axis, strides, dtype)
        two = (([3, 4], [2, 4]), 0, (None, None), dtype)
        yield concatenate_problem("padded output", rng, *two, padded([5, 4]))
        yield concatenate_problem("virtual", rng, *two).with_virtual_edges()


class Reshape:
    op = id = "reshape"
    data_types = _TYPES

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for mode in (None, reshape_mode.VIEW_ONLY, reshape_mode.LOGICAL):
            for id, dim, out in (
                ("split", [12], [3, 4]),
                ("merge", [3, 4], [12]),
                ("across", [2, 6, 5], [3, 4, 5]),
                ("to four axes", [6, 20], [2, 3, 4, 5]),
                ("empty", [0, 3], [3, 0]),
            ):
                yield reshape_problem(id, rng, dim, out, None, dtype, mode)
                yield reshape_problem(f"{id} row-major", rng, dim, out, None, dtype, mode, row_major(out))
        view, logical = reshape_mode.VIEW_ONLY, reshape_mode.LOGICAL
        for id, dim, stride, out, out_stride in (
            ("split padded rows", [4, 6], (9, 1), [4, 2, 3], (9, 3, 1)),
            ("merge padded rows", [4, 2, 3], (9, 3, 1), [4, 6], (9, 1)),
            ("of a transpose", [4, 6], (1, 4), [2, 3, 4], (12, 4, 1)),
            ("transpose by view", [4, 6], (6, 1), [6, 4], (1, 6)),
        ):
            yield reshape_problem(id, rng, dim, out, stride, dtype, view, out_stride)
        yield reshape_problem("transposed", rng, [4, 6], [3, 8], reversed_axes([4, 6]), dtype, logical)
        yield reshape_problem("padded rows", rng, [4, 6], [3, 8], padded([4, 6]), dtype, logical)
        yield reshape_problem("padded output", rng, [4, 6], [3, 8], None, dtype, logical, padded([3, 8]))
        yield reshape_problem("virtual", rng, [4, 6], [3, 8], None, dtype, logical).with_virtual_edges()


CASES = (Transpose(), Slice(), Concatenate(), Reshape())
