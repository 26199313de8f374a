"""Philox4x32-10, a random generator that computes the value at any place of its stream on its own.

Published by Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .base import Array

__all__ = ["keep_mask", "philox"]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """The four random words at each counter: arrays that broadcast, or numbers, of 32-bit values.

    The results are uint64 arrays of values below 2**32.
    """
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 32 times 32 bits fit
        a, b = (second >> _HALF) ^ b ^ np.uint64(k0), second & _MASK
        c, d = (first >> _HALF) ^ d ^ np.uint64(k1), first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return a, b, c, d


def keep_mask(
    probability: float, seed: int, offset: int, heads: Array, rows: range, columns: range
) -> Array:
    """Which elements [heads, rows, columns] a dropout of this probability keeps.

    Element (h, i, j) has word j % 4 at the counter (j // 4, i, h, offset's low half) under the key (seed's
    low half, seed's high half ^ offset's high half), and is kept when that word is at least
    probability * 2**32. `heads` are numbers counted through the batch, b * Hq + h.
    """
    low, high = offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF
    key = (seed & 0xFFFFFFFF, (seed >> 32 & 0xFFFFFFFF) ^ high)
    first = columns.start // 4
    quads = np.arange(first, -(-columns.stop // 4))
    counter = (quads, np.arange(rows.start, rows.stop)[:, None], heads[:, None, None], low)
    limit = np.uint64(min(round(probability * 2**32), 0xFFFFFFFF))
    kept = np.empty((len(heads), len(rows), len(quads), 4), np.bool_)
    for place, word in enumerate(philox(counter, key)):
        np.greater_equal(word, limit, out=kept[..., place])
    flat = kept.reshape(len(heads), len(rows), len(quads) * 4)
    return flat[..., columns.start - 4 * first : columns.stop - 4 * first]
