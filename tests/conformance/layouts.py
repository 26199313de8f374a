"""Strides, written apart from the library so that its inferred ones can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["channels_last", "dense", "overlapping", "padded", "preserving", "reversed_axes", "row_major"]

Dims = Sequence[int]


def dense(dim: Dims, slowest_first: Sequence[int]) -> tuple[int, ...]:
    """Dense strides with the axes in this order in memory; extents of 0 count as 1."""
    steps = accumulate((max(dim[axis], 1) for axis in reversed(slowest_first)), int.__mul__, initial=1)
    by_axis = dict(zip(reversed(slowest_first), steps, strict=False))
    return tuple(by_axis[axis] for axis in range(len(dim)))


def row_major(dim: Dims) -> tuple[int, ...]:
    return dense(dim, range(len(dim)))


def reversed_axes(dim: Dims) -> tuple[int, ...]:
    """Axis 0 fastest."""
    return dense(dim, range(len(dim) - 1, -1, -1))


def channels_last(dim: Dims) -> tuple[int, ...]:
    """Axis 1 fastest, then the last axis, ..., axis 2, and axis 0 slowest."""
    return dense(dim, [0, *range(2, len(dim)), 1] if len(dim) > 1 else [0])


def preserving(dim: Dims, like: Dims) -> tuple[int, ...]:
    """Dense strides whose axes rank as those of `like`; of equal strides the lower axis is faster."""
    extra = len(dim) - len(like)
    ranked = sorted(range(len(like)), key=lambda axis: (like[axis], axis))
    return dense(dim, [*range(extra), *(axis + extra for axis in reversed(ranked))])


def padded(dim: Dims, by: int = 3) -> tuple[int, ...]:
    """Row-major with `by` elements of padding after each row."""
    wide = [*dim[:-1], dim[-1] + by] if dim else []
    return row_major(wide)


def overlapping(dim: Dims, stride: Dims) -> bool:
    """Whether two elements share a place, or a stride is below the span of the axes under it."""
    reach = 1
    for step, extent in sorted((s, n) for n, s in zip(dim, stride, strict=True) if n > 1):
        if step < reach:
            return 0 not in dim
        reach = step * (extent - 1) + reach
    return False
