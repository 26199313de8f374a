"""Gated linear attention in chunks of 64 tokens: matrix products in place of steps, for any length.

Inside a chunk that starts from the state S [K, V], with e = b * k, G the running sums of the log decay, and

    L_ij = sum_d e_id k_jd e^{G_id - G_jd}  (j < i),    P_ij = sum_d q_id k_jd e^{G_id - G_jd}  (j <= i)

the writes U solve (I + L) U = w * v - (e e^G) S, and

    O = scale ((q e^G) S + P U),    S' = e^{G_C} S + (k e^{G_C - G})^T U

What does not depend on the state is computed for many chunks together. Short chunks are padded with zero
rows: products always have the same extents, so a sequence's results do not depend on the others by a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .linear_attention_decay import ChannelDecay, ScalarDecay, product, unit_lower_inverse
from .linear_attention_math import Gate, Operands, Place, Rows, Sink, add_up, first_rows
from .linear_attention_steps import final_slopes, finish, finish_slopes, heads_joined, start_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .base import Array

__all__ = ["backward", "forward"]

# Rows of a chunk where checkpoints do not ask for shorter ones.
_CHUNK = 64
_SHORTEST_CHUNK = 16
# Bytes of one array [chunks, heads, rows, channels] of what is worked on together.
_TILE_BYTES = 1 << 19


class _Tile:
    """Consecutive chunks of some sequences: `offsets` [steps, sequences] from the starts of these."""

    __slots__ = ("offsets", "place")

    def __init__(self, starts: Array, offsets: Array, counts: Array, rows: int) -> None:
        self.offsets = offsets
        first = starts + offsets
        if starts.size == 1 and (counts == rows).all():
            # The chunks lie one behind the other.
            low = int(first[0, 0])
            self.place = Place(slice(low, low + len(offsets) * rows), (len(offsets), 1, rows), None, inner=True)
            return
        within = np.arange(rows)
        index = first[..., None] + np.minimum(within, counts[..., None] - 1)
        padding = within >= counts[..., None]
        self.place = Place(index, index.shape, padding if padding.any() else None, inner=True)


class _Group:
    """Sequences that are worked on together, most chunks first, and their chunks."""

    __slots__ = ("rows", "sequences", "tiles")

    def __init__(
        self, operands: Operands, sequences: Sequence[int], cuts: Sequence[tuple[Array, Array]], rows: int
    ) -> None:
        self.sequences, self.rows = sequences, rows
        self.tiles: list[_Tile] = []
        starts = np.array([operands.cu[n] for n in sequences], np.int64)
        steps = [len(offsets) for offsets, _ in cuts]
        most = _chunks_of_a_tile(operands, rows)
        step, active = 0, len(sequences)
        while True:
            while active and steps[active - 1] <= step:
                active -= 1
            if not active:
                return
            last = min(step + max(1, most // active), steps[active - 1])
            part = [(offsets[step:last], counts[step:last]) for offsets, counts in cuts[:active]]
            offsets, counts = (np.stack(arrays, axis=1) for arrays in zip(*part, strict=True))
            self.tiles.append(_Tile(starts[:active], offsets, counts, rows))
            step = last


def _chunks_of_a_tile(operands: Operands, rows: int) -> int:
    size = operands.heads[0] * operands.heads[1] * rows * max(operands.K, operands.V) * operands.dtype.itemsize
    return max(1, _TILE_BYTES // max(size, 1))


def _groups(operands: Operands, sequences: Sequence[int]) -> Iterator[_Group]:
    """The sequences cut into chunks that start anew at every checkpoint."""
    every = operands.params.get("checkpoint_every_n_tokens", 0)
    rows = _CHUNK
    while every and rows > _SHORTEST_CHUNK and every <= rows // 2:
        rows //= 2
    cuts = {n: _cut(operands.lengths[n], rows, every) for n in sequences}
    order = sorted(sequences, key=lambda n: -len(cuts[n][0]))
    most = _chunks_of_a_tile(operands, rows)
    for first in range(0, len(order), most):
        part = order[first : first + most]
        yield _Group(operands, part, [cuts[n] for n in part], rows)


def _cut(length: int, rows: int, every: int) -> tuple[Array, Array]:
    """Offsets and row counts of the chunks of one sequence."""
    if not every:
        offsets = np.arange(0, length, rows)
    else:
        within = np.arange(0, every, rows)
        offsets = (np.arange(0, length, every)[:, None] + within).reshape(-1)
        offsets = offsets[offsets < length]
    ends = np.append(offsets[1:], length)
    return offsets, ends - offsets


class _Factors:
    """What the chunks of a tile need beside the state; arrays [steps, sequences, S, G, C, ..]."""

    __slots__ = ("decay", "e", "e_in", "inverse", "k_out", "lower", "mixing", "q_in", "rows", "values")

    def __init__(self, operands: Operands, rows: Rows, *, outputs: bool) -> None:
        self.rows = rows
        self.decay = ChannelDecay(rows.log) if operands.channel_gate else ScalarDecay(rows.log)
        self.e = rows.b * rows.k
        self.e_in = self.e * self.decay.inner
        self.k_out = rows.k * self.decay.outer
        self.mixing: Any = None
        self.q_in: Any = None
        if outputs:
            self.mixing, self.lower = self.decay.products((rows.q, self.e), rows.k)
            self.q_in = rows.q * self.decay.inner
        else:
            (self.lower,) = self.decay.products((self.e,), rows.k)
        self.inverse = unit_lower_inverse(self.lower)
        self.values = None if rows.v is None else rows.w * rows.v

    def advance(self, states: Array) -> tuple[Array, Array]:
        """The states [steps + 1, ..] before each chunk and after the last, and what was written."""
        steps, width = len(self.e), states.shape[-1]
        kept = np.empty((steps + 1, *states.shape), states.dtype)
        kept[0] = states
        written = np.empty((*self.e.shape[:-1], width), states.dtype)
        for step in range(steps):
            before, after = kept[step], kept[step + 1]
            written[step] = product(self.inverse[step], self._right_hand_side(step, before))
            np.multiply(before, self.decay.end[step], out=after)
            after += product(self.k_out[step].swapaxes(-1, -2), written[step])
        return kept, written

    def _right_hand_side(self, step: int | slice, states: Array) -> Array:
        found = product(self.e_in[step], states)
        np.negative(found, out=found)
        if self.values is not None:
            found[..., : self.values.shape[-1]] += self.values[step]
        return found

    def written(self, states: Array) -> Array:
        """What was written, from the states before each chunk."""
        return product(self.inverse, self._right_hand_side(slice(None), states))

    def retreat(self, do: Array, slopes: Array) -> tuple[Array, Array]:
        """The gradients of the states [steps + 1, ..], and of the right hand sides, from the last one's."""
        steps, width = len(do), do.shape[-1]
        kept = np.empty((steps + 1, *slopes.shape), slopes.dtype)
        kept[steps] = slopes
        from_outputs = product(self.mixing.swapaxes(-1, -2), do)
        to_states = product(self.q_in.swapaxes(-1, -2), do)
        dx = np.empty((*self.e.shape[:-1], slopes.shape[-1]), slopes.dtype)
        for step in range(steps - 1, -1, -1):
            after, before = kept[step + 1], kept[step]
            du = product(self.k_out[step], after)
            du[..., :width] += from_outputs[step]
            product(self.inverse[step].swapaxes(-1, -2), du, out=dx[step])
            np.multiply(after, self.decay.end[step], out=before)
            before[..., :width] += to_states[step]
            before -= product(self.e_in[step].swapaxes(-1, -2), dx[step])
        return kept, dx


def forward(operands: Operands, sequences: Sequence[int], sinks: Mapping[str, Sink]) -> None:
    """Fills the rows of the given sequences in the outputs that there are of a forward or summary node."""
    gate = Gate(operands, inner=True)
    for group in _groups(operands, sequences):
        states = _turned(start_states(operands, group.sequences, "transition" in sinks))
        for tile in group.tiles:
            rows = Rows(operands, gate, tile.place)
            if rows.q is not None:
                rows.q *= operands.scale
            factors = _Factors(operands, rows, outputs="O" in sinks)
            active = states[: tile.offsets.shape[1]]
            kept, written = factors.advance(active)
            active[...] = kept[-1]
            if "state_checkpoints" in sinks:
                _put_checkpoints(operands, group.sequences, tile.offsets, kept[:-1], sinks["state_checkpoints"])
            if "O" in sinks:
                out = product(factors.q_in, kept[:-1])
                out += product(factors.mixing, written)
                sinks["O"].put_tokens(tile.place, out)
        finish(operands, group.sequences, states.swapaxes(-1, -2), sinks)


def _turned(states: Array) -> Array:
    """[.., V, K] as [.., K, V] or the other way round, copied."""
    return np.ascontiguousarray(states.swapaxes(-1, -2))


def _checkpoint_rows(operands: Operands, sequences: Sequence[int], offsets: Array) -> tuple[Array, Array]:
    """Which chunks [steps, sequences] start at a checkpoint, and the rows of these."""
    every = operands.params["checkpoint_every_n_tokens"]
    first = np.array(first_rows(operands.lengths, every))[list(sequences[: offsets.shape[1]])]
    here = offsets % every == 0
    return here, (first + offsets // every)[here]


def _put_checkpoints(operands: Operands, sequences: Sequence[int], offsets: Array, states: Array, sink: Sink) -> None:
    here, rows = _checkpoint_rows(operands, sequences, offsets)
    sink.put(rows, heads_joined(states.swapaxes(-1, -2)[here]))


def backward(operands: Operands, sinks: Mapping[str, Sink]) -> Gate:
    """Fills the gradients of a backward or summary node; returns the gate, with those of its parameters."""
    gate = Gate(operands, inner=True)
    summary = "dQ" not in sinks
    for group in _groups(operands, range(operands.N)):
        kept = [] if summary else _states_of_tiles(operands, gate, group)
        slopes = _turned(final_slopes(operands, group.sequences, "transition" in sinks))
        for tile in reversed(group.tiles):
            rows = Rows(operands, gate, tile.place)
            factors = _Factors(operands, rows, outputs=True)
            do = operands.read("dO", tile.place)
            do *= operands.scale
            active = slopes[: tile.offsets.shape[1]]
            after, dx = factors.retreat(do, active)
            active[...] = after[0]
            if not summary:
                _gradients(factors, kept.pop(), do, after[1:], dx, sinks)
        finish_slopes(operands, group.sequences, slopes.swapaxes(-1, -2), sinks)
    return gate


def _states_of_tiles(operands: Operands, gate: Gate, group: _Group) -> list[Array]:
    """The states before each chunk of each tile: from the checkpoints where there are some, else computed."""
    states, found = _turned(start_states(operands, group.sequences, False)), []
    every = operands.params["checkpoint_every_n_tokens"] if "state_checkpoints" in operands.inputs else 0
    for tile in group.tiles:
        active = states[: tile.offsets.shape[1]]
        if 0 < every <= group.rows:
            # Every chunk starts at a checkpoint.
            _, rows = _checkpoint_rows(operands, group.sequences, tile.offsets)
            stored = operands.states("state_checkpoints", rows)
            found.append(_turned(stored.reshape(*tile.offsets.shape, *stored.shape[1:])))
            continue
        factors = _Factors(operands, Rows(operands, gate, tile.place), outputs=False)
        kept, _ = factors.advance(active)
        active[...] = kept[-1]
        found.append(kept[:-1])
    return found


def _gradients(
    factors: _Factors, states: Array, do: Array, slopes: Array, dx: Array, sinks: Mapping[str, Sink]
) -> None:
    """All gradients of a tile, from the states before each chunk and their gradients (`slopes`) after it."""
    rows, decay = factors.rows, factors.decay
    q, k, e = rows.q, rows.k, factors.e
    written = factors.written(states)
    turned = _turned(written)
    d_mixing, d_lower = product(do, turned), product(dx, turned)
    np.negative(d_lower, out=d_lower)
    size = do.shape[-2]
    np.copyto(d_mixing, 0, where=~np.tri(size, k=0, dtype=np.bool_))
    np.copyto(d_lower, 0, where=~np.tri(size, k=-1, dtype=np.bool_))
    (dq, de), dk, dlog = decay.pull((d_mixing, d_lower), (factors.mixing, factors.lower), (q, e), k)

    # Through the state before the chunk: the decay of a row takes part in what the rows from it on read.
    turned = _turned(states)
    through = product(do, turned)
    through *= decay.inner
    dq += through
    reached = decay.collect(q, through)
    through = product(dx, turned)
    through *= decay.inner
    de -= through
    reached -= decay.collect(e, through)
    dlog += add_up(reached, -2, reverse=True)
    # Through the state after it: in what the rows before it wrote, and in what was there.
    through = product(written, _turned(slopes))
    through *= decay.outer
    dk += through
    dlog[..., 1:, :] += add_up(decay.collect(k, through), -2)[..., :-1, :]
    dlog += decay.collect_states(states, slopes)
    rows.fold(sinks, dq, dk, de, dx, dlog)
