"""Cases of `reduction`, one per mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.layouts import channels_last, padded, reversed_axes
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, reduction_mode

__all__ = ["CASES", "reduced", "reduction_problem"]

Rng = np.random.Generator

# (id, input dims, output dims, input strides)
_SHAPES: tuple[tuple[str, Sequence[int], Sequence[int], Sequence[int] | None], ...] = (
    ("one", [1], [1], None),
    ("vector", [7], [1], None),
    ("nothing reduced", [3, 4], [3, 4], None),
    ("rows", [5, 13], [5, 1], None),
    ("columns", [13, 5], [1, 5], None),
    ("all", [3, 4, 5], [1, 1, 1], None),
    ("middle", [3, 17, 5], [3, 1, 5], None),
    ("channels", [2, 3, 4, 5], [1, 3, 1, 1], None),
    ("tile edge below", [3, 127], [3, 1], None),
    ("tile edge above", [3, 129], [3, 1], None),
    ("transposed", [5, 7], [5, 1], reversed_axes([5, 7])),
    ("channels last", [2, 3, 4, 5], [2, 3, 1, 1], channels_last([2, 3, 4, 5])),
    ("padded rows", [4, 5], [1, 5], padded([4, 5])),
    ("stride 0", [4, 5], [1, 5], (0, 1)),
    ("no output", [0, 5], [0, 1], None),
    ("three axes kept", [2, 3, 2, 5], [2, 3, 2, 1], None),
)
# Reducing no elements gives the neutral element.
_NOTHING = ("no elements", [3, 0], [3, 1], None)


def reduced(xp: Any, mode: reduction_mode, x: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The formula of a mode in NumPy or torch."""
    if not axes:
        axes_of: Any = None
    else:
        axes_of = axes
    name = mode.name
    if name in ("AMAX", "NORM1", "NORM2"):
        x = abs(x)
    if name == "NORM2":
        x = x * x
    if name == "MUL_NO_ZEROS":
        x = xp.where(x == 0, xp.ones_like(x), x)
    if axes_of is not None:
        if name in ("ADD", "NORM1", "NORM2", "AVG"):
            count = 1
            for axis in axes:
                count *= x.shape[axis]
            x = x.sum(axes)
            if name == "AVG":
                x = x / count if count else x * float("nan")
        else:
            for axis in sorted(axes, reverse=True):
                x = _fold(xp, name, x, axis)
    if name == "NORM2":
        x = xp.sqrt(x)
    return x.reshape(shape)


def _fold(xp: Any, name: str, x: Any, axis: int) -> Any:
    if name in ("MUL", "MUL_NO_ZEROS"):
        return x.prod(axis)
    if xp is np:
        return x.min(axis) if name == "MIN" else x.max(axis)
    return x.amin(axis) if name == "MIN" else x.amax(axis)


def reduction_problem(
    id: str,
    values: Any,
    out: Sequence[int],
    stride: Sequence[int] | None,
    mode: reduction_mode,
    dtype: data_type,
    *,
    out_type: data_type | None = None,
    out_stride: Sequence[int] | None = None,
    compute: data_type = data_type.FLOAT,
) -> Problem:
    """A reduction of `values` to the dims `out`."""
    dim = np.shape(values)
    axes = tuple(axis for axis, (n, kept) in enumerate(zip(dim, out, strict=True)) if n != kept)

    def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        y = graph.reduction(tensors["X"], mode=mode, out_dims=out)
        if out_stride is not None:
            y.set_stride(out_stride)
        return {"Y": y if out_type is None else y.set_data_type(out_type)}

    return Problem(
        f"reduction {mode.name} {dtype.name}: {id}",
        {"X": Input(values, dtype, stride)},
        declare,
        lambda xp, values: {"Y": reduced(xp, mode, values["X"], axes, tuple(out))},
        {"Y": Expect(out, out_stride or channels_last(out), out_type or dtype)},
        io=dtype,
        compute=compute,
    )


class Reduction:
    op = "reduction"

    def __init__(self, mode: reduction_mode) -> None:
        self.mode = mode
        self.id = f"reduction {mode.name}"
        whole = (
            (data_type.INT32, data_type.INT64) if mode.name not in ("NORM2", "AVG", "MUL_NO_ZEROS") else ()
        )
        self.data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE, *whole)

    def numbers(self, rng: Rng, dim: Sequence[int], dtype: data_type) -> Any:
        if dtype in (data_type.INT32, data_type.INT64):
            return rng.choice([-1, 1, 1], dim) if self.mode.name == "MUL" else rng.integers(-99, 100, dim)
        if self.mode.name in ("MUL", "MUL_NO_ZEROS"):
            values = rng.uniform(0.7, 1.35, dim) * rng.choice([-1, 1], dim)  # products stay near 1
            return np.where(rng.random(dim) < 0.2, 0, values) if self.mode.name == "MUL_NO_ZEROS" else values
        return rng.standard_normal(dim)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        compute = data_type.FLOAT
        if dtype in (data_type.INT32, data_type.INT64, data_type.DOUBLE):
            compute = dtype
        kind: dict[str, Any] = {"mode": self.mode, "dtype": dtype, "compute": compute}
        shapes = _SHAPES
        if self.mode.name in ("ADD", "MUL", "NORM1", "NORM2", "MUL_NO_ZEROS"):
            shapes += (_NOTHING,)
        for id, dim, out, stride in shapes:
            yield reduction_problem(id, self.numbers(rng, dim, dtype), out, stride, **kind)
        x = self.numbers(rng, [4, 5, 6], dtype)
        yield reduction_problem("padded output", x, [4, 1, 6], None, out_stride=(9, 9, 1), **kind)
        yield reduction_problem("transposed output", x, [4, 5, 1], None, out_stride=(1, 4, 4), **kind)
        yield reduction_problem("virtual", x, [4, 1, 1], None, **kind).with_virtual_edges()
        if dtype in (data_type.HALF, data_type.BFLOAT16):
            yield reduction_problem("widened", x, [4, 5, 1], None, out_type=data_type.FLOAT, **kind)
            own = reduction_problem("own type", x, [4, 1, 6], None, **kind)
            yield own.with_types(intermediate=dtype, compute=dtype)


CASES = tuple(Reduction(mode) for mode in reduction_mode if mode is not reduction_mode.NOT_SET)
