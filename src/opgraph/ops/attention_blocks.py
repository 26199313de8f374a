"""The arithmetic of attention on the CPU: blocks of query rows against the keys that they can see.

A block of scores is made by one matrix product, masked, exponentiated and multiplied with the values while it
lies in the second level cache. Masks are slices where they can be: keys beyond a length are never touched,
and a band visits only the columns between its edges. Memory is linear in the sequence lengths.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .base import Array

__all__ = ["Attention", "softmax_block"]

# What a block works on: scores, queries, keys, values, results. A second level cache has 1 to 2 MiB per core.
_BLOCK_BYTES = 1 << 20
# OpenBLAS multiplies up to this m*n*k without packing or threads, at its best where neither operand is
# transposed; from about 16 rows on, a transposed copy of the keys pays for itself.
_SMALL_PRODUCT = 1_000_000
_FEW_ROWS = 16
# A block has at least this many rows, however long the keys are: its products stay products of matrices.
_LEAST_ROWS = 64
# Under a band, rows of a block see each other's columns; short blocks waste fewer of them.
_BAND_ROWS = 128


def softmax_block(scores: Array, row_max: Array, row_sum: Array) -> None:
    """In place exp(scores - max) of each row; scores [rows, n >= 1] C-contiguous, max and sum [rows] filled.

    A row of -inf alone becomes zeros with max -inf and sum 0. NaN anywhere in a row makes the row NaN.
    """
    np.max(scores, axis=1, out=row_max)
    hidden = row_max == -np.inf
    shift = np.where(hidden, 0, row_max) if hidden.any() else row_max
    np.subtract(scores, shift[:, None], out=scores)
    np.exp(scores, out=scores)
    np.einsum("ij->i", scores, out=row_sum)


class Attention:
    """One attention of arrays of one floating type, [batch, heads, rows, channels] each.

    `run()` fills `out` [B, Hq, Sq, Dv], which may not overlap the inputs, and the maxima and sums `row_max`
    and `row_sum` [B, Hq, Sq]. `bias` has 4 axes that broadcast to the scores, `slopes` and `sink` have Hq
    entries; `len_q`, `len_kv` are lists of B lengths, or None without padding. `left` and `right` bound the
    band around the diagonal, which starts in the first corner of the valid scores, or ends in the last one
    when `bottom_right`.
    """

    __slots__ = (
        "_bias",
        "_bottom_right",
        "_k",
        "_left",
        "_len_kv",
        "_len_q",
        "_out",
        "_padded",
        "_q",
        "_right",
        "_row_max",
        "_row_sum",
        "_scale",
        "_scratch",
        "_sink",
        "_slopes",
        "_v",
        "row_max",
        "row_sum",
    )

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        *,
        scale: float = 1.0,
        bias: Array | None = None,
        slopes: Array | None = None,
        sink: Array | None = None,
        len_q: Sequence[int] | None = None,
        len_kv: Sequence[int] | None = None,
        bottom_right: bool = False,
        left: int | None = None,
        right: int | None = None,
    ) -> None:
        batch, heads, rows, channels = q.shape
        keys, width = k.shape[2], v.shape[3]
        # Heads are worked on in units of one key head and one value head with the `group` query heads that
        # read both.
        group = gcd(heads // max(k.shape[1], 1), heads // max(v.shape[1], 1)) or 1
        units = heads // group
        self._q = q.reshape(batch, units, group, rows, channels)
        self._k = k if k.shape[1] == units else np.repeat(k, units // k.shape[1], axis=1)
        self._v = v if v.shape[1] == units else np.repeat(v, units // v.shape[1], axis=1)
        self._out = out.reshape(batch, units, group, rows, width)
        self._bias = None
        if bias is not None:
            self._bias = np.broadcast_to(bias, (batch, heads, rows, keys)).reshape(
                batch, units, group, rows, keys
            )
        self._slopes = None if slopes is None else slopes.astype(q.dtype).reshape(units, group, 1, 1)
        self._sink = None if sink is None else sink.reshape(units, group, 1)
        self._scale = scale
        self._padded = len_q is not None
        self._len_q = [rows] * batch if len_q is None else len_q
        self._len_kv = [keys] * batch if len_kv is None else len_kv
        self._bottom_right, self._left, self._right = bottom_right, left, right
        self.row_max: Array = np.full((batch, heads, rows), -np.inf, q.dtype)
        self.row_sum: Array = np.zeros((batch, heads, rows), q.dtype)
        self._row_max = self.row_max.reshape(batch, units, group, rows)
        self._row_sum = self.row_sum.reshape(batch, units, group, rows)
        self._scratch = _Scratch(q.dtype)

    def run(self) -> None:
        """Computes `out`, `row_max` and `row_sum`."""
        with np.errstate(all="ignore"):
            for block in self._blocks():
                self._compute(*block)
        if self._padded:
            for b, valid in enumerate(self._len_q):
                if valid < self._q.shape[3]:
                    self._out[b, :, :, valid:] = 0
                    self._row_max[b, :, :, valid:] = -np.inf
                    self._row_sum[b, :, :, valid:] = 0

    def _blocks(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(first and last batch entry, unit, row) of each block; only whole entries share a block."""
        batch, units, group, rows, channels = self._q.shape
        keys, width = self._k.shape[2], self._v.shape[3]
        budget = _BLOCK_BYTES // self._q.itemsize
        if units * group * rows * keys <= budget and group * rows * keys * channels <= _SMALL_PRODUCT:
            step = _even(batch, budget // max(2 * units * group * rows * width, 1))
            for b in range(0, batch, step):
                yield b, min(b + step, batch), 0, units, 0, rows
            return
        banded = self._left is not None or self._right is not None
        width += channels
        for b in range(batch):
            rows, keys = self._len_q[b], self._len_kv[b]
            most = max((budget - keys * width) // (group * (keys + width) or 1), -(-_LEAST_ROWS // group))
            tall = _even(rows, min(most, _BAND_ROWS) if banded else most)
            step = _even(units, budget // max(group * tall * (keys + width) + keys * width, 1))
            for u in range(0, units, step):
                for i in range(0, rows, tall):
                    yield b, b + 1, u, min(u + step, units), i, min(i + tall, rows)

    def _compute(self, b0: int, b1: int, u0: int, u1: int, i0: int, i1: int) -> None:
        """One block: rows i0 to i1 of the units u0 to u1 of the batch entries b0 to b1."""
        part = (slice(b0, b1), slice(u0, u1), slice(None), slice(i0, i1))
        q, out = self._q[part], self._out[part]
        entries, units, group, rows, channels = q.shape
        tall = group * rows
        take = self._scratch.take
        spans = [self._columns(b, i0, i1) for b in range(b0, b1)]
        longest = max(last - first for first, last in spans)
        copy_keys = tall >= _FEW_ROWS and tall * longest * channels <= _SMALL_PRODUCT
        if copy_keys and group == 1:
            queries = q[:, :, 0]  # the scale goes to the copy of the keys
        else:
            scaled = take("q", q.shape)
            np.multiply(q, 1 if copy_keys else self._scale, out=scaled)
            queries = scaled.reshape(entries, units, tall, channels)
        row_max, row_sum = take("max", (entries, units * tall)), take("sum", (entries, units * tall))
        result = take("out", (entries, units, tall, out.shape[-1]))
        for entry, (first, last) in enumerate(spans):
            if first >= last:
                row_max[entry], row_sum[entry], result[entry] = -np.inf, 0, 0
                continue
            b = b0 + entry
            keys = self._k[b, u0:u1, first:last].swapaxes(1, 2)
            if copy_keys:
                keys = np.multiply(keys, self._scale, out=take("keys", keys.shape))
            scores = take("scores", (units, tall, last - first))
            np.matmul(queries[entry], keys, out=scores)
            self._mask(scores.reshape(units, group, rows, last - first), b, slice(u0, u1), i0, first)
            softmax_block(scores.reshape(units * tall, last - first), row_max[entry], row_sum[entry])
            np.matmul(scores, self._v[b, u0:u1, first:last], out=result[entry])
        shape = (entries, units, group, rows)
        weight = self._finish(row_max.reshape(shape), row_sum.reshape(shape), part)
        np.multiply(result.reshape(out.shape), weight[..., None], out=out)

    def _columns(self, b: int, i0: int, i1: int) -> tuple[int, int]:
        """First and last + 1 of the columns that any of the rows i0 to i1 keeps."""
        first, last = 0, self._len_kv[b]
        delta = self._delta(b)
        if self._right is not None:
            last = min(last, i1 + delta + self._right)
        if self._left is not None:
            first = max(first, i0 + delta - self._left + 1)
        return first, max(first, last)

    def _delta(self, b: int) -> int:
        return self._len_kv[b] - self._len_q[b] if self._bottom_right else 0

    def _mask(self, scores: Array, b: int, heads: slice, i0: int, first: int) -> None:
        """Bias, ALiBi and the band on scores [units, group, rows, columns] whose corner is (i0, first)."""
        rows, columns = scores.shape[2:]
        i1, last = i0 + rows, first + columns
        if self._bias is not None:
            np.add(scores, self._bias[b, heads, :, i0:i1, first:last], out=scores)
        if self._slopes is not None:
            distance = np.arange(first, last) - np.arange(i0, i1)[:, None]
            term = self._scratch.take("alibi", scores.shape)
            np.multiply(self._slopes[heads], distance.astype(scores.dtype), out=term)
            np.add(scores, term, out=scores)
        if self._right is not None:
            edge = self._delta(b) + self._right  # row i keeps columns up to i + edge
            start = max(i0 + edge + 1, first)
            if start < last:
                hidden = np.arange(start, last) > np.arange(i0, i1)[:, None] + edge
                np.copyto(scores[..., start - first :], -np.inf, where=hidden)
        if self._left is not None:
            edge = self._delta(b) - self._left  # row i keeps columns from i + edge + 1
            stop = min(i1 + edge, last)
            if stop > first:
                hidden = np.arange(first, stop) <= np.arange(i0, i1)[:, None] + edge
                np.copyto(scores[..., : stop - first], -np.inf, where=hidden)

    def _finish(self, row_max: Array, row_sum: Array, part: tuple[slice, ...]) -> Array:
        """Stores the statistics of a block and returns the factor that normalises its rows."""
        if self._sink is None:
            self._row_max[part] = row_max
            self._row_sum[part] = row_sum
            row_sum[row_sum == 0] = 1  # rows that see no key: 0 / 1
            return np.divide(1, row_sum, out=row_sum)
        sink = self._sink[part[1]]
        top = np.maximum(row_max, sink)
        kept = np.exp(row_max - top)
        total = row_sum * kept + np.exp(sink - top)
        self._row_max[part] = top
        self._row_sum[part] = total
        return np.divide(kept, total, out=kept)


class _Scratch:
    """Arrays that are used again by every block of a call; a larger one replaces a smaller one."""

    __slots__ = ("_dtype", "_flat")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._flat: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """The array of this name, C-contiguous, with whatever it holds."""
        size = 1
        for extent in shape:
            size *= extent
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            flat = self._flat[name] = np.empty(size, self._dtype)
        return flat[:size].reshape(shape)


def _even(total: int, most: int) -> int:
    """The length of the pieces when `total` is cut evenly into pieces of at most `most`; at least 1."""
    pieces = -(-total // max(most, 1))
    return -(-total // max(pieces, 1)) or 1
