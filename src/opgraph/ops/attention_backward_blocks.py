"""The arithmetic of the gradient of attention on the CPU: tiles of query rows and the keys that they see.

Probabilities are computed again from the statistics, tile by tile, so memory is linear in the sequence
lengths. Rows and keys beyond their lengths are never read. Tiles of other heads or batch entries run on other
threads, those of the same ones in order, so the sums do not depend on how many threads there are.
"""

from __future__ import annotations

from collections import deque
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from .attention_heads import Band, Heads, even
from .base import Array
from .threads import run_together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .attention_options import Options

__all__ = ["Gradient"]

# OpenBLAS multiplies up to this m*n*k without packing and without threads, where neither operand is transposed
# (see attention_blocks): keys, values and the sums of their gradients are kept transposed.
_SMALL_PRODUCT = 1_000_000
# The scores of a tile of several heads; a few arrays of that size share a second level cache.
_SCORE_BYTES = 1 << 19
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
        self.dk: Array = np.zeros((batch, units, q.shape[3], keys), q.dtype)  # transposed until the end
        self.dv: Array = np.zeros((batch, units, v.shape[3], keys), q.dtype)
        self._shapes = q.shape, k.shape[1], v.shape[1]

    def run(self) -> None:
        """Computes the gradients."""
        tasks = deque(self._tasks())

        def work() -> None:
            with np.errstate(all="ignore"):
                while tasks:
                    try:
                        task = tasks.popleft()
                    except IndexError:  # another thread was faster
                        return
                    self._share(*task)

        q, k, v = self._heads.q, self._heads.k, self._heads.v
        products = q.size * k.shape[2] * (3 + 2 * v.shape[3] // max(q.shape[4], 1))
        # The gradient of a bias adds up over heads and batch entries.
        count = 1 if self.dbias is not None else min(products // _THREAD_PRODUCTS, len(tasks))
        run_together(work, count)
        shape, heads_k, heads_v = self._shapes
        self.dq = self.dq.reshape(shape)
        self.dk = self._heads.summed(self.dk.swapaxes(2, 3), heads_k)
        self.dv = self._heads.summed(self.dv.swapaxes(2, 3), heads_v)
        if self.dsink is not None:
            self.dsink = self.dsink.sum(axis=0).reshape(1, shape[1], 1, 1)

    def _tasks(self) -> Iterator[tuple[int, slice, slice, int, int]]:
        """(batch entry, entries, units, rows and columns of a tile) of what one thread does in order.

        Without padding all batch entries are alike and share tiles.
        """
        q, k, v = self._heads.q, self._heads.k, self._heads.v
        batch, units, group, _, channels = q.shape
        area = max(_SMALL_PRODUCT // max(channels, v.shape[3], 1), 1)
        budget = _SCORE_BYTES // q.itemsize
        b = 0
        while b < batch:
            valid = self._band.rows(b)
            tall = even(valid, max(isqrt(area) // group, 1))
            wide = max(area // (group * tall) & -16, 16)
            tile = group * tall * min(wide, max(k.shape[2], 1))
            together = 1 if self._band.padded else even(batch, budget // (tile * max(units, 1)))
            step = even(units, budget // tile)
            if valid:
                for u in range(0, units, step):
                    yield b, slice(b, min(b + together, batch)), slice(u, min(u + step, units)), tall, wide
            b += together

    def _share(self, b: int, entries: slice, units: slice, tall: int, wide: int) -> None:
        """Adds up the gradients of some heads."""
        valid = self._band.rows(b)
        keys, values = (
            np.ascontiguousarray(side[entries, units].swapaxes(2, 3)) for side in (self._heads.k, self._heads.v)
        )
        for i0 in range(0, valid, tall):
            i1 = min(i0 + tall, valid)
            part = (entries, units, slice(None), slice(i0, i1))
            grad, stats = self._grad[part], self._stats[part]
            delta = np.einsum("ghuid,ghuid->ghui", self._o[part], grad)[..., None]
            # A row that sees no key has the statistic -inf and only scores of -inf.
            shift = np.where(stats == -np.inf, 0, stats)
            if self._sink is not None and self.dsink is not None:
                chance = np.where(stats == -np.inf, 0, np.exp(self._sink[units] - shift))
                self.dsink[entries, units] -= (chance * delta).sum(axis=(3, 4))
            first, last = self._band.columns(b, i0, i1)
            flat = (*grad.shape[:2], grad.shape[2] * grad.shape[3])
            sides = [array.reshape(*flat, array.shape[4]) for array in (self._heads.q[part], grad)]
            sides += [np.ascontiguousarray(array.swapaxes(2, 3)) for array in sides]
            for j in range(first, last, wide):
                seen = slice(j, min(j + wide, last))
                self._tile(b, part, seen, sides, (keys[..., seen], values[..., seen]), delta, shift)

    def _tile(
        self,
        b: int,
        part: tuple[slice, ...],
        seen: slice,
        sides: list[Array],
        transposed: tuple[Array, Array],
        delta: Array,
        shift: Array,
    ) -> None:
        """Adds what some rows and keys of some heads contribute.

        `sides` are q, dO and both of them transposed, with the rows of a group in one axis; `transposed` are
        the keys and values.
        """
        heads, options = self._heads, self._options
        entries, units, _, row_span = part
        count, several, group, rows, _ = delta.shape
        tall, first, last = (count, several, group * rows), seen.start, seen.stop
        start = units.start * group
        place = (entries, slice(start, start + several * group), row_span, seen)
        q, grad, q_across, grad_across = sides
        keys, values = transposed

        scores = np.empty((count, several, group, rows, last - first), q.dtype)
        flat = scores.reshape(*tall, last - first)
        by_head = scores.reshape(count, several * group, rows, last - first)
        np.matmul(q, keys, out=flat)
        np.multiply(scores, self._scale, out=scores)
        kept = options.modify(by_head, place) if options.modifies else None
        if self._bias is not None:
            np.add(scores, self._bias[part][..., first:last], out=scores)
        if self._slopes is not None:
            distance = np.arange(first, last) - np.arange(row_span.start, row_span.stop)[:, None]
            np.add(scores, self._slopes[units] * distance.astype(scores.dtype), out=scores)
        self._band.hide(scores, b, row_span.start, first)
        if options.modifies:
            options.hide(by_head, place)
        np.subtract(scores, shift, out=scores)
        np.exp(scores, out=scores)

        inner = np.matmul(grad, values)
        inner_by_head = inner.reshape(by_head.shape)
        dropped = flat
        if options.drops:
            factors = options.factors(place, q.dtype)
            np.multiply(inner_by_head, factors, out=inner_by_head)
            dropped = (by_head * factors).reshape(flat.shape)
        self.dv[entries, units, :, seen] += np.matmul(grad_across, dropped)
        np.subtract(inner, delta.reshape(*tall, 1), out=inner)
        np.multiply(inner, flat, out=inner)
        if self.dbias is not None:
            one = [axis for axis, extent in enumerate(self.dbias.shape) if extent == 1]
            target = tuple(slice(None) if axis in one else at for axis, at in enumerate(place))
            self.dbias[target] += inner_by_head.sum(axis=tuple(one), keepdims=True)
        if options.modifies:
            options.gradient(inner_by_head, place, kept)
        np.multiply(inner, self._scale, out=inner)
        self.dq[part] += np.matmul(inner, heads.k[entries, units, seen]).reshape(self.dq[part].shape)
        self.dk[entries, units, :, seen] += np.matmul(q_across, inner)
