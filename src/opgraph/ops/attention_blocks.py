"""The arithmetic of attention on the CPU: blocks of query rows against the keys that they can see.

A block of scores is made by one matrix product, masked, exponentiated and multiplied with the values while it
lies in the second level cache. Masks are slices where they can be: values beyond a length are never touched,
and a band visits only the columns between its edges. Memory is linear in the sequence lengths.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby, islice
from math import gcd
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .attention_heads import even
from .base import Array, number
from .threads import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .attention_options import Options

__all__ = ["Attention", "softmax_block"]

# OpenBLAS multiplies up to this m*n*k without packing and without threads, at its best where neither operand
# is transposed. Larger products are cut: that is as fast on one core, and does not stall when the others are
# busy.
_SMALL_PRODUCT = 1_000_000
# Rows of a block: enough that a product of that size is nearly square. From _FEW_ROWS on, a transposed copy
# of the keys pays for itself.
_ROWS = 120
_FEW_ROWS = 16
# The scores that a block works on, next to its keys and values; a second level cache has 1 to 2 MiB per core.
# However long the keys are, a block has _LEAST_ROWS, so that its products stay products of matrices.
_SCORE_BYTES = 1 << 19
_LEAST_ROWS = 64
# Floats in the widest vectors.
_VECTOR = 16
# The scores of a run of batch entries with equal columns.
_RUN_BYTES = 1 << 18
# Multiplications that pay for one more thread (half a millisecond), and the blocks it takes at a time.
_THREAD_PRODUCTS = 30_000_000
_TASK_BLOCKS = 8


def softmax_block(scores: Array, row_max: Array, row_sum: Array) -> None:
    """In place exp(scores - max) of each row; scores [rows, n >= 1] C-contiguous, max and sum [rows] filled.

    A row of -inf alone becomes zeros with max -inf and sum 0. NaN anywhere in a row makes the row NaN. The
    native function of this name does the same, faster in float32 and slower in float64.
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
    when `bottom_right`. `options` holds masks of tiles, dropout and score functions.
    """

    __slots__ = (
        "_bias",
        "_bottom_right",
        "_k",
        "_left",
        "_len_kv",
        "_len_q",
        "_masked",
        "_options",
        "_out",
        "_padded",
        "_q",
        "_right",
        "_row_max",
        "_row_sum",
        "_scale",
        "_sink",
        "_slopes",
        "_softmax",
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
        options: Options | None = None,
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
            self._bias = np.broadcast_to(bias, (batch, heads, rows, keys)).reshape(batch, units, group, rows, keys)
        self._slopes = None if slopes is None else slopes.astype(q.dtype).reshape(units, group, 1, 1)
        self._sink = None if sink is None else sink.reshape(units, group, 1)
        self._scale = scale
        self._padded = len_q is not None
        self._len_q = [rows] * batch if len_q is None else len_q
        self._len_kv = [keys] * batch if len_kv is None else len_kv
        self._bottom_right, self._left, self._right = bottom_right, left, right
        self._options = options
        modified = options is not None and options.modifies
        self._masked = modified or not (bias is None and slopes is None and left is None and right is None)
        self.row_max: Array = np.full((batch, heads, rows), -np.inf, q.dtype)
        self.row_sum: Array = np.zeros((batch, heads, rows), q.dtype)
        self._row_max = self.row_max.reshape(batch, units, group, rows)
        self._row_sum = self.row_sum.reshape(batch, units, group, rows)
        self._softmax: Callable[[Array, Array, Array], None] = softmax_block
        if q.dtype == np.float32:
            from .. import _native  # here, so that the operators can be described without the native module

            self._softmax = _native.softmax_block

    def run(self) -> None:
        """Computes `out`, `row_max` and `row_sum`, on several threads where the work is worth it."""
        tasks = deque(self._tasks())

        def work() -> None:
            scratch = _Scratch(self._q.dtype)
            with np.errstate(all="ignore"):
                while tasks:
                    try:
                        task = tasks.popleft()
                    except IndexError:  # another thread was faster
                        return
                    for block in task:
                        self._compute(scratch, *block)

        pairs = sum(a * b for a, b in zip(self._len_q, self._len_kv, strict=True))
        products = pairs * self._out.shape[1] * self._out.shape[2] * (self._q.shape[4] + self._out.shape[4])
        run_together(work, min(products // _THREAD_PRODUCTS, len(tasks)))
        if self._padded:
            for b, valid in enumerate(self._len_q):
                if valid < self._q.shape[3]:
                    self._out[b, :, :, valid:] = 0
                    self._row_max[b, :, :, valid:] = -np.inf
                    self._row_sum[b, :, :, valid:] = 0

    def _tasks(self) -> Iterator[list[tuple[int, int, int, int, int, int]]]:
        """The blocks in shares for a thread: a few of the same heads, whose keys are copied once."""
        for _, blocks in groupby(self._blocks(), itemgetter(0, 2)):
            while task := list(islice(blocks, _TASK_BLOCKS)):
                yield task

    def _blocks(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(first and last batch entry, unit, row) of each block; only whole entries share a block."""
        batch, units, group, rows, channels = self._q.shape
        keys, width = self._k.shape[2], self._v.shape[3]
        budget = _SCORE_BYTES // self._q.itemsize
        widest = max(channels, width, 1)
        if units * group * rows * keys <= 2 * budget and group * rows * keys * widest <= _SMALL_PRODUCT:
            step = even(batch, budget // max(units * group * rows * width, 1))
            for b in range(0, batch, step):
                yield b, min(b + step, batch), 0, units, 0, rows
            return
        for b in range(batch):
            rows, keys = self._len_q[b], max(self._len_kv[b], 1)
            tall = max(min(_ROWS, budget // keys), _LEAST_ROWS)
            if self._left is None and self._right is None:
                tall = max(tall, _SMALL_PRODUCT // (keys * widest))
            tall = even(rows, max(tall // group, 1))
            step = even(units, budget // (group * tall * keys))
            for u in range(0, units, step):
                for i in range(0, rows, tall):
                    yield b, b + 1, u, min(u + step, units), i, min(i + tall, rows)

    def _compute(self, scratch: _Scratch, b0: int, b1: int, u0: int, u1: int, i0: int, i1: int) -> None:
        """One block: rows i0 to i1 of the units u0 to u1 of the batch entries b0 to b1."""
        part = (slice(b0, b1), slice(u0, u1), slice(None), slice(i0, i1))
        q, out = self._q[part], self._out[part]
        entries, units, group, rows, channels = q.shape
        tall = group * rows
        take = scratch.take
        copy_keys = self._q.shape[3] * group >= _FEW_ROWS
        if copy_keys and group == 1:
            queries = q[:, :, 0]  # the scale goes to the copy of the keys
        else:
            scaled = take("q", q.shape)
            np.multiply(q, 1 if copy_keys else self._scale, out=scaled)
            queries = scaled.reshape(entries, units, tall, channels)
        row_max, row_sum = take("max", (entries, units * tall)), take("sum", (entries, units * tall))
        result = take("out", (entries, units, tall, out.shape[-1]))
        spans = [self._columns(b, i0, i1) for b in range(b0, b1)]
        most = max(_RUN_BYTES // max(units * tall * self._k.shape[2] * q.itemsize, 1), 1)
        for e0, e1 in _runs(spans, most):
            first, last, delta = spans[e0]
            columns = last - first
            if not columns:
                row_max[e0:e1], row_sum[e0:e1], result[e0:e1] = -np.inf, 0, 0
                continue
            run = slice(b0 + e0, b0 + e1)
            wide = columns
            if not first:  # whole vectors, filled up with keys that are masked again
                wide = min(columns + -columns % _VECTOR, self._k.shape[2])
            scores = take("scores", (e1 - e0, units, tall, wide))
            _product(queries[e0:e1], self._keys(scratch, run, part[1], first, first + wide, copy_keys), scores)
            visible = scores if wide == columns else scores[..., :columns]
            if self._masked:
                grid = scores.reshape(e1 - e0, units, group, rows, wide)[..., :columns]
                self._mask(scratch, grid, (run, part[1]), i0, first, delta)
            if wide > columns:
                scores[..., columns:] = -np.inf
            flat = scores.reshape(-1, wide)
            self._softmax(flat, row_max[e0:e1].reshape(-1), row_sum[e0:e1].reshape(-1))
            if self._options is not None and self._options.drops:
                grid = scores.reshape(e1 - e0, units, group, rows, wide)[..., :columns]
                weighed, place = self._by_heads(grid, (run, part[1]), i0, first)
                np.multiply(weighed, self._options.factors(place, q.dtype), out=weighed)
            _weigh(scratch, visible, self._v[run, u0:u1, first:last], result[e0:e1])
        shape = (entries, units, group, rows)
        weight = self._finish(row_max.reshape(shape), row_sum.reshape(shape), part)
        np.multiply(result.reshape(out.shape), weight[..., None], out=out)

    def _keys(self, scratch: _Scratch, run: slice, units: slice, first: int, last: int, copy: bool) -> Array:
        """Keys first to last as [entries, units, channels, keys]; `copy`: dense and scaled.

        The copy of one batch entry has all its valid keys and serves every block of rows.
        """
        if not copy:
            return self._k[run, units, first:last].swapaxes(2, 3)
        if run.stop - run.start > 1:
            scratch.copied = (-1, -1)
            keys = self._k[run, units, first:last].swapaxes(2, 3)
            return np.multiply(keys, self._scale, out=scratch.take("keys", keys.shape))
        valid = self._len_kv[run.start]
        keys = self._k[run, units, : valid + -valid % _VECTOR].swapaxes(2, 3)
        dense = scratch.take("keys", keys.shape)
        if scratch.copied != (run.start, units.start):
            scratch.copied = (run.start, units.start)
            np.multiply(keys, self._scale, out=dense)
        return dense[..., first:last]

    def _columns(self, b: int, i0: int, i1: int) -> tuple[int, int, int]:
        """First and last + 1 of the columns that a row from i0 to i1 keeps, and the diagonal's offset."""
        first, last = 0, self._len_kv[b]
        delta = last - self._len_q[b] if self._bottom_right else 0
        if self._right is not None:
            last = min(last, i1 + delta + self._right)
        if self._left is not None:
            first = max(first, i0 + delta - self._left + 1)
        return first, max(first, last), delta

    def _mask(
        self,
        scratch: _Scratch,
        scores: Array,
        heads: tuple[slice, slice],
        i0: int,
        first: int,
        delta: int,
    ) -> None:
        """Options, bias, ALiBi and band on scores [entries, units, group, rows, columns] from (i0, first) on."""
        rows, columns = scores.shape[3:]
        i1, last = i0 + rows, first + columns
        options = self._options if self._options is not None and self._options.modifies else None
        if options is not None:
            options.modify(*self._by_heads(scores, heads, i0, first))
        if self._bias is not None:
            np.add(scores, self._bias[(*heads, slice(None), slice(i0, i1), slice(first, last))], out=scores)
        if self._slopes is not None:
            distance = np.arange(first, last) - np.arange(i0, i1)[:, None]
            term = scratch.take("alibi", scores.shape)
            np.multiply(self._slopes[heads[1]], distance.astype(scores.dtype), out=term)
            np.add(scores, term, out=scores)
        if self._right is not None:
            edge = delta + self._right  # row i keeps columns up to i + edge
            start = max(i0 + edge + 1, first)
            if start < last:
                hidden = np.arange(start, last) > np.arange(i0, i1)[:, None] + edge
                np.copyto(scores[..., start - first :], -np.inf, where=hidden)
        if self._left is not None:
            edge = delta - self._left  # row i keeps columns from i + edge + 1
            stop = min(i1 + edge, last)
            if stop > first:
                hidden = np.arange(first, stop) <= np.arange(i0, i1)[:, None] + edge
                np.copyto(scores[..., : stop - first], -np.inf, where=hidden)
        if options is not None:
            options.hide(*self._by_heads(scores, heads, i0, first))

    def _by_heads(
        self, scores: Array, heads: tuple[slice, slice], i0: int, first: int
    ) -> tuple[Array, tuple[slice, slice, slice, slice]]:
        """Scores of units as a view [entries, heads, rows, columns], and its part of all of them."""
        entries, units, group, rows, columns = scores.shape
        view = scores.reshape(entries, units * group, rows, columns)  # the axes lie next to each other
        start = heads[1].start * group
        span = slice(start, start + units * group)
        return view, (heads[0], span, slice(i0, i0 + rows), slice(first, first + columns))

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


def _product(queries: Array, keys: Array, out: Array) -> None:
    """out = queries @ keys, in pieces of columns that keep each product small."""
    piece = _piece(queries.shape[2] * queries.shape[3])
    if keys.shape[3] <= piece:
        np.matmul(queries, keys, out=out)
        return
    for start in range(0, keys.shape[3], piece):
        np.matmul(queries, keys[..., start : start + piece], out=out[..., start : start + piece])


def _weigh(scratch: _Scratch, scores: Array, values: Array, out: Array) -> None:
    """out = scores @ values, in pieces of columns that keep each product small."""
    piece = _piece(scores.shape[2] * values.shape[3])
    if scores.shape[3] <= piece:
        np.matmul(scores, values, out=out)
        return
    np.matmul(scores[..., :piece], values[:, :, :piece], out=out)
    for start in range(piece, scores.shape[3], piece):
        term = scratch.take("term", out.shape)
        np.matmul(scores[..., start : start + piece], values[:, :, start : start + piece], out=term)
        np.add(out, term, out=out)


def _piece(area: int) -> int:
    """How many columns make a small product with an operand of so many elements; whole vectors of 16."""
    return max(_SMALL_PRODUCT // max(area, 1) & -16, 16)


class _Scratch:
    """Arrays that every block of a thread uses again; a larger one replaces a smaller one.

    `copied`: batch entry and first unit whose keys it holds.
    """

    __slots__ = ("_dtype", "_flat", "_views", "copied")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._flat: dict[str, Array] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Array] = {}
        self.copied = (-1, -1)

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """The array of this name, C-contiguous, with whatever it holds."""
        view = self._views.get((name, shape))
        if view is None:
            size = number(shape)
            flat = self._flat.get(name)
            if flat is None or flat.size < size:
                flat = self._flat[name] = np.empty(size, self._dtype)
                self._views = {key: old for key, old in self._views.items() if key[0] != name}
            view = self._views[name, shape] = flat[:size].reshape(shape)
        return view


def _runs(spans: Sequence[Any], most: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of the stretches of at most `most` equal items."""
    start = 0
    for i in range(1, len(spans) + 1):
        if i == len(spans) or spans[i] != spans[start] or i - start == most:
            yield start, i
            start = i
