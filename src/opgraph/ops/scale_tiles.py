"""The memory of block-scale factors with the reordering F8_128x4: tiles of 128 rows by 4 columns of bytes.

A matrix of factors, padded to whole tiles, is held tile by tile, the tiles of a row of tiles next to each
other. In its tile of 512 bytes the factor of row r and column c is byte

    (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4

Columns are the one of the last two axes that lies dense (its stride is the smaller one), rows the other one.
Leading axes hold one matrix each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Array, number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TILE", "from_tiles", "tile_axes", "tiled_layout", "to_tiles"]

TILE = (128, 4)  # rows, columns
_LANES = 32  # rows of a tile that lie 16 bytes apart; the others follow 4 bytes apart


def tile_axes(stride: Sequence[int]) -> tuple[int, int]:
    """(rows, columns): the axes of a matrix of factors with these declared strides, two of them or more."""
    last = len(stride) - 1
    columns = last if stride[last] <= stride[last - 1] else last - 1
    return 2 * last - 1 - columns, columns


def tiled_layout(dim: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims padded to whole tiles, and dense strides that rank as the declared ones: what the memory holds."""
    rows, columns = tile_axes(stride)
    dims = list(dim)
    dims[rows] = -(-dim[rows] // TILE[0]) * TILE[0]
    dims[columns] = -(-dim[columns] // TILE[1]) * TILE[1]
    strides, step = list(stride), 1
    for axis in reversed(_order(stride)):
        strides[axis], step = step, step * max(dims[axis], 1)
    return tuple(dims), tuple(strides)


def _order(stride: Sequence[int]) -> tuple[int, ...]:
    """The axes from the slowest to the fastest: leading ones by their strides, then rows and columns."""
    leading = sorted(range(len(stride) - 2), key=lambda axis: (-stride[axis], axis))
    return (*leading, *tile_axes(stride))


def to_tiles(array: Array, stride: Sequence[int]) -> Array:
    """The memory [bytes] of factors (one byte each) declared with these strides; padding is 0."""
    order = _order(stride)
    dims, _ = tiled_layout(array.shape, stride)
    padded: Array = np.zeros([dims[axis] for axis in order], array.dtype)
    padded[tuple(slice(array.shape[axis]) for axis in order)] = array.transpose(order)
    *lead, rows, columns = padded.shape
    shape = (number(lead), rows // TILE[0], TILE[0] // _LANES, _LANES, columns // TILE[1], TILE[1])
    tiles = padded.reshape(shape)
    return tiles.transpose(0, 1, 4, 3, 2, 5).reshape(-1)


def from_tiles(memory: Array, dim: Sequence[int], stride: Sequence[int]) -> Array:
    """The factors of declared dim and strides that this memory [bytes] holds: the inverse of `to_tiles`."""
    order = _order(stride)
    dims, _ = tiled_layout(dim, stride)
    lead = [dim[axis] for axis in order[:-2]]
    rows, columns = dims[order[-2]], dims[order[-1]]
    shape = (number(lead), rows // TILE[0], columns // TILE[1], _LANES, TILE[0] // _LANES, TILE[1])
    padded = memory.reshape(shape).transpose(0, 1, 4, 3, 2, 5).reshape(*lead, rows, columns)
    back: Any = sorted(range(len(order)), key=order.__getitem__)
    return padded[tuple(slice(dim[axis]) for axis in order)].transpose(back)
