"""The arithmetic of the gradient of attention on the CPU: blocks of query rows against the keys that they see.

Probabilities are computed again from the statistics, block by block, so memory is linear in the sequence
lengths. Rows and keys beyond their lengths are never read. Blocks of other heads or batch entries run on other
threads, those of the same ones in order, so the sums do not depend on how many threads there are.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .attention_fp8_blocks import Band, Heads
from .base import Array
from .threads import run_together

if TYPE_CHECKING:
    from .attention_options import Options

__all__ = ["Gradient"]

# Multiplications that pay for one more thread.
_THREAD_PRODUCTS = 30_000_000


class Gradient:
    """The gradient of one attention of arrays of one floating type, [batch, heads, rows, channels] each.

    `run()` fills `dq` like q, `dk` and `dv` like k and v, `dbias` and `dsink` like bias and sink where those
    are wanted. `stats` [B, Hq, Sq, 1] are natural logarithms; `bias` has 4 axes that broadcast to the scores,
    `slopes` has Hq entries, `sink` is [1, Hq, 1, 1].
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        grad: Array,
        stats: Array,
        *,
        scale: float,
        band: Band,
        options: Options,
        bias: Array | None = None,
        want_bias: bool = False,
        slopes: Array | None = None,
        sink: Array | None = None,
    ) -> None:
        heads = self._heads = Heads(q, k, v)
        batch, units, group, rows, _ = heads.q.shape
        keys = heads.k.shape[2]
        self._o, self._grad, self._stats = (heads.by_unit(array) for array in (o, grad, stats))
        self._scale, self._band, self._options = scale, band, options
        self._bias = self.dbias = self._slopes = self._sink = self.dsink = None
        if bias is not None:
            full = (batch, units * group, rows, keys)
            self._bias = np.broadcast_to(bias, full).reshape(batch, units, group, rows, keys)
            self.dbias = np.zeros_like(bias, subok=False) if want_bias else None
        if slopes is not None:
            self._slopes = slopes.astype(q.dtype).reshape(units, group, 1, 1)
        if sink is not None:
            self._sink = sink.reshape(units, group, 1, 1)
            self.dsink = np.zeros((batch, units, group), q.dtype)
        self.dq: Array = np.zeros(heads.q.shape, q.dtype)
        self.dk: Array = np.zeros(heads.k.shape, q.dtype)
        self.dv: Array = np.zeros(heads.v.shape, q.dtype)
        self._shapes = q.shape, k.shape[1], v.shape[1]

    def run(self) -> None:
        """Computes the gradients."""
        shares = groupby(self._heads.blocks(self._band), lambda block: (block[0], block[2].start))
        tasks = deque([list(blocks) for _, blocks in shares])

        def work() -> None:
            with np.errstate(all="ignore"):
                while tasks:
                    try:
                        task = tasks.popleft()
                    except IndexError:  # another thread was faster
                        return
                    for block in task:
                        self._compute(*itemgetter(0, 1, 2, 3, 4)(block))

        q, k, v = self._heads.q, self._heads.k, self._heads.v
        products = q.size * k.shape[2] * (3 + 2 * v.shape[3] // max(q.shape[4], 1))
        # The gradient of a bias adds up over heads and batch entries.
        count = 1 if self.dbias is not None else min(products // _THREAD_PRODUCTS, len(tasks))
        run_together(work, count)
        shape, heads_k, heads_v = self._shapes
        self.dq = self.dq.reshape(shape)
        self.dk, self.dv = self._heads.summed(self.dk, heads_k), self._heads.summed(self.dv, heads_v)
        if self.dsink is not None:
            self.dsink = self.dsink.sum(axis=0).reshape(1, shape[1], 1, 1)

    def _compute(self, b: int, entries: slice, units: slice, i0: int, i1: int) -> None:
        """Adds what the rows i0 to i1 of some heads contribute."""
        heads, options = self._heads, self._options
        part = (entries, units, slice(None), slice(i0, i1))
        q, grad, stats = heads.q[part], self._grad[part], self._stats[part]
        count, wide, group, rows, channels = q.shape
        tall = (count, wide, group * rows)
        first, last = self._band.columns(b, i0, i1)
        seen = (entries, units, slice(first, last))
        place = self._place(b, count, units.start * group, wide * group, (i0, i1), (first, last))
        k, v, q_flat, grad_flat = heads.k[seen], heads.v[seen], q.reshape(*tall, channels), grad.reshape(*tall, -1)

        scores = np.empty((count, wide, group, rows, last - first), q.dtype)
        flat = scores.reshape(*tall, last - first)
        by_head = scores.reshape(count, wide * group, rows, last - first)
        np.matmul(q_flat, k.swapaxes(2, 3), out=flat)
        np.multiply(scores, self._scale, out=scores)
        kept = options.modify(by_head, place) if options.modifies else None
        if self._bias is not None:
            np.add(scores, self._bias[part][..., first:last], out=scores)
        if self._slopes is not None:
            distance = np.arange(first, last) - np.arange(i0, i1)[:, None]
            np.add(scores, self._slopes[units] * distance.astype(scores.dtype), out=scores)
        self._band.hide(scores, b, i0, first)
        if options.modifies:
            options.hide(by_head, place)
        # A row that sees no key has the statistic -inf and only scores of -inf.
        np.subtract(scores, np.where(stats == -np.inf, 0, stats), out=scores)
        np.exp(scores, out=scores)

        inner = np.matmul(grad_flat, v.swapaxes(2, 3))
        inner_by_head = inner.reshape(by_head.shape)
        delta = np.einsum("ghuid,ghuid->ghui", self._o[part], grad)[..., None]
        if options.drops:
            factors = options.factors(place, q.dtype)
            np.multiply(inner_by_head, factors, out=inner_by_head)
            dropped = (by_head * factors).reshape(flat.shape)
        else:
            dropped = flat
        self.dv[seen] += np.matmul(dropped.swapaxes(2, 3), grad_flat)
        np.subtract(inner, delta.reshape(*tall, 1), out=inner)
        np.multiply(inner, flat, out=inner)
        if self.dsink is not None:
            chance = np.where(stats == -np.inf, 0, np.exp(self._sink[units] - stats))
            self.dsink[entries, units] -= (chance * delta).sum(axis=(3, 4))
        if self.dbias is not None:
            one = [axis for axis, extent in enumerate(self.dbias.shape) if extent == 1]
            target = tuple(slice(None) if axis in one else span for axis, span in enumerate(place))
            self.dbias[target] += inner_by_head.sum(axis=tuple(one), keepdims=True)
        if options.modifies:
            options.gradient(inner_by_head, place, kept)
        np.multiply(inner, self._scale, out=inner)
        self.dq[part] = np.matmul(inner, k).reshape(q.shape)
        self.dk[seen] += np.matmul(inner.swapaxes(2, 3), q_flat)

    @staticmethod
    def _place(
        b: int, count: int, head: int, heads: int, rows: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[slice, slice, slice, slice]:
        return slice(b, b + count), slice(head, head + heads), slice(*rows), slice(*columns)
