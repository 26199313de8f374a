"""How attention that needs every probability itself cuts its work: heads in units, rows in blocks, and bands."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from .base import Array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Band", "Heads", "even"]

# Bytes of the scores of a block; several arrays of that size are alive at a time.
_SCORE_BYTES = 1 << 21
# However long the keys are, a block has as many rows, so that its products stay products of matrices.
_LEAST_ROWS = 64


class Band:
    """Which keys a row sees: the lengths of each batch entry, and bounds around the diagonal (None: no bound).

    The diagonal starts in the first corner of the valid scores, or ends in the last one (`bottom_right`).
    """

    __slots__ = ("_bottom_right", "_left", "_len_kv", "_len_q", "_right", "padded")

    def __init__(
        self,
        len_q: Sequence[int],
        len_kv: Sequence[int],
        padded: bool,
        bottom_right: bool,
        left: int | None,
        right: int | None,
    ) -> None:
        self._len_q, self._len_kv, self.padded = len_q, len_kv, padded
        self._bottom_right, self._left, self._right = bottom_right, left, right

    def rows(self, entry: int) -> int:
        return self._len_q[entry]

    def _diagonal(self, entry: int) -> int:
        return self._len_kv[entry] - self._len_q[entry] if self._bottom_right else 0

    def columns(self, entry: int, i0: int, i1: int) -> tuple[int, int]:
        """First and last + 1 of the keys that a row from i0 to i1 sees."""
        first, last = 0, self._len_kv[entry]
        if self._right is not None:
            last = min(last, i1 + self._diagonal(entry) + self._right)
        if self._left is not None:
            first = max(first, i0 + self._diagonal(entry) - self._left + 1)
        return first, max(first, last)

    def hide(self, scores: Array, entry: int, i0: int, first: int) -> None:
        """-inf where a row does not see a key; scores [.., rows, columns] begin at (i0, first)."""
        if self._left is None and self._right is None:
            return
        rows, columns = scores.shape[-2:]
        diagonal = np.arange(i0, i0 + rows)[:, None] + self._diagonal(entry)
        key = np.arange(first, first + columns)
        if self._right is not None:
            np.copyto(scores, -np.inf, where=key > diagonal + self._right)
        if self._left is not None:
            np.copyto(scores, -np.inf, where=key <= diagonal - self._left)


class Heads:
    """q, k and v [B, H, S, D] as units of one key head, one value head and the query heads that read both.

    Arrays of the query side become [B, units, group, rows, D], of the key side [B, units, keys, D].
    """

    __slots__ = ("_group", "_units", "k", "q", "v")

    def __init__(self, q: Array, k: Array, v: Array) -> None:
        heads = q.shape[1]
        self._group = gcd(heads // max(k.shape[1], 1), heads // max(v.shape[1], 1)) or 1
        self._units = heads // self._group
        self.q, self.k, self.v = self.by_unit(q), self._repeated(k), self._repeated(v)

    def by_unit(self, array: Array) -> Array:
        """An array of the query side."""
        batch, _, rows, width = array.shape
        return array.reshape(batch, self._units, self._group, rows, width)

    def _repeated(self, array: Array) -> Array:
        heads = array.shape[1]
        return array if heads == self._units else np.repeat(array, self._units // heads, axis=1)

    def summed(self, array: Array, heads: int) -> Array:
        """A gradient of the key side [B, units, keys, D] as one of `heads` heads."""
        if heads == self._units:
            return array
        batch, _, keys, width = array.shape
        total: Array = array.reshape(batch, heads, -1, keys, width).sum(axis=2)
        return total

    def blocks(self, band: Band) -> Iterator[tuple[int, slice, slice, int, int, int]]:
        """(batch entry, entries, units, first row, last row + 1, rows of the entry) of each block.

        Without padding all batch entries are alike and share blocks.
        """
        batch, units, group, rows, _ = self.q.shape
        budget = _SCORE_BYTES // self.q.itemsize // max(group * self.k.shape[2], 1)
        together = 1 if band.padded else max(1, min(batch, budget // max(units * rows, 1)))
        for b in range(0, batch, together):
            valid = band.rows(b)
            tall = max(1, min(valid, max(budget // max(units, 1), _LEAST_ROWS)))
            step = max(1, budget // (tall * together))
            for u in range(0, units, step):
                for i in range(0, valid, tall):
                    yield b, slice(b, b + together), slice(u, u + step), i, min(i + tall, valid), valid


def even(total: int, most: int) -> int:
    """The length of the pieces when `total` is cut evenly into pieces of at most `most`; at least 1."""
    pieces = -(-total // max(most, 1))
    return -(-total // max(pieces, 1)) or 1
