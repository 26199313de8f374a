"""Memory of references: arrays cut into blocks that stay in the cache, and where a result is made."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Array, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .base import OutSpec, RefCall

__all__ = ["blocks", "destination", "part_of", "shares_memory"]


def blocks(shape: Sequence[int], axes: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cuts an array of `shape` into blocks of about `limit` elements at most: one index for each block.

    Only `axes` are cut, the first of them first; no axis is cut before the ones named earlier are down to an
    extent of 1, so a block is one stretch of memory when `axes` go from the slowest to the fastest. A block
    may be larger than `limit` where the other axes alone are. No elements give no blocks.
    """
    size = number(shape)
    steps = list(shape)
    for axis in axes:
        if size <= limit or size == 0:
            break
        size //= shape[axis]
        steps[axis] = min(shape[axis], max(1, limit // size))
        size *= steps[axis]
    cuts = (
        [slice(start, min(start + step, extent)) for start in range(0, extent, step or 1)]
        for extent, step in zip(shape, steps, strict=True)
    )
    return product(*cuts)


def part_of(array: Array, block: Sequence[slice]) -> Array:
    """The entries of an array that broadcasts to the one cut into blocks, for one block: a view."""
    index = (cut if n != 1 else slice(None) for n, cut in zip(array.shape, block, strict=True))
    return array[tuple(index)]


def shares_memory(array: Array, call: RefCall) -> bool:
    """Whether writing into `array` might change an input of the call."""
    return any(np.may_share_memory(array, each) for each in call.inputs.values())


def destination(call: RefCall, out: OutSpec, shape: tuple[int, ...], dtype: Any, model: Array) -> Array:
    """Where a result of `shape` and `dtype` is made piece by piece.

    The output's own memory where that holds this dtype and no input lies in it, because a block is written
    before the next one is read; else a fresh array. That one is laid out like the output, or like `model`
    (of the rank of `shape`) where the output has no memory.
    """
    target = out.target(dtype)
    if target is not None and target.shape == shape and not shares_memory(target, call):
        return target
    like = out.view if out.view is not None and out.view.ndim == len(shape) else model
    return np.empty_like(like, dtype=dtype, shape=shape)
