"""Gated linear attention token by token: the definition itself, over all heads and many sequences at once.

It is the oracle in float64, and the fast form for sequences of a few tokens in float32. A step costs a few
passes over the states, which it holds as they are stored, [V, K]: rows do not depend on each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .linear_attention_math import Gate, Operands, Place, Rows, Sink, first_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .base import Array

__all__ = ["backward", "final_slopes", "finish", "finish_slopes", "forward", "heads_joined", "start_states"]

# Tokens whose operands are read together.
_BLOCK = 64
# Bytes of the states that are worked on together; they are read and written several times per step. The
# gradients keep those of a whole block.
_GROUP_BYTES = 1 << 22
_GRADIENT_GROUP_BYTES = 1 << 20


def forward(operands: Operands, sequences: Sequence[int], sinks: Mapping[str, Sink]) -> None:
    """Fills the rows of the given sequences in the outputs that there are of a forward or summary node."""
    every = operands.params["checkpoint_every_n_tokens"] if "state_checkpoints" in sinks else 0
    checkpoint_rows = first_rows(operands.lengths, every) if every else []
    gate = Gate(operands, inner=False)
    for group in _groups(operands, sequences, _GROUP_BYTES):
        states = start_states(operands, group, "transition" in sinks)
        for first, place in _blocks(operands, group, _BLOCK):
            rows = Rows(operands, gate, place)
            out = np.empty(rows.w.shape[:4] + (operands.V,), operands.dtype) if "O" in sinks else None
            for step in range(place.shape[0]):
                active = states[: place.shape[1]]
                if every and (first + step) % every == 0:
                    at = [checkpoint_rows[n] + (first + step) // every for n in group[: len(active)]]
                    sinks["state_checkpoints"].put(at, heads_joined(active))
                _advance(active, rows, step, operands.V)
                if out is not None:
                    np.matmul(active, rows.q[step][..., None], out=out[step][..., None])
            if out is not None:
                out *= operands.scale
                sinks["O"].put_tokens(place, out)
        finish(operands, group, states, sinks)


def start_states(operands: Operands, group: Sequence[int], transition: bool) -> Array:
    """The states before the first tokens [n, S, G, V, K]; a transition adds K rows, the identity."""
    inputs, (few, shared), width, channels = operands.inputs, operands.heads, operands.V, operands.K
    states = np.zeros((len(group), few, shared, width + (channels if transition else 0), channels), operands.dtype)
    if "initial_state" in inputs:
        rows = inputs["state_indices"][list(group)] if "state_indices" in inputs else list(group)
        states[..., :width, :] = operands.states("initial_state", rows)
    if transition:
        states[..., width:, :] = np.eye(channels, dtype=operands.dtype)
    return states


def finish(operands: Operands, group: Sequence[int], states: Array, sinks: Mapping[str, Sink]) -> None:
    """Stores the states after the last tokens."""
    inputs, joined = operands.inputs, heads_joined(states)
    if "final_state" in sinks:
        rows = inputs["state_indices"][list(group)] if "state_indices" in inputs else list(group)
        sinks["final_state"].put(rows, joined[:, :, : operands.V])
    if "transition" in sinks:
        sinks["transition"].put(list(group), joined[:, :, operands.V :])


def heads_joined(states: Array) -> Array:
    """`[n, S, G, ..]` as `[n, HO, ..]`."""
    return states.reshape(len(states), states.shape[1] * states.shape[2], *states.shape[3:])


def _advance(states: Array, rows: Rows, step: int, width: int) -> Array:
    """One token of every sequence, in place; returns what was written, [n, S, G, V or more]."""
    k, log = rows.k[step], rows.log[step]
    states *= np.exp(log)[..., None, :]
    written: Array = -np.matmul(states, (rows.b[step] * k)[..., None])[..., 0]
    if rows.v is not None:
        written[..., :width] += rows.w[step] * rows.v[step]
    states += written[..., None] * k[..., None, :]
    return written


def _groups(operands: Operands, sequences: Sequence[int], bound: int) -> Iterator[list[int]]:
    """The sequences, longest first, in groups whose states take at most so many bytes."""
    lengths = operands.lengths
    size = operands.heads[0] * operands.heads[1] * operands.V * operands.K * operands.dtype.itemsize
    most = max(1, bound // max(size, 1))
    order = sorted(sequences, key=lambda n: -lengths[n])
    for first in range(0, len(order), most):
        yield order[first : first + most]


def _blocks(operands: Operands, group: Sequence[int], most: int) -> Iterator[tuple[int, Place]]:
    """(first step, reading [steps, sequences]) of runs of steps that the same sequences take part in."""
    lengths = [operands.lengths[n] for n in group]
    starts = np.array([operands.cu[n] for n in group], np.int64)
    step, active = 0, len(group)
    while True:
        while active and lengths[active - 1] <= step:
            active -= 1
        if not active:
            return
        last = min(step + most, lengths[active - 1])
        index = np.arange(step, last)[:, None] + starts[:active]
        yield step, Place(index, index.shape, None, inner=False)
        step = last


def backward(operands: Operands, sinks: Mapping[str, Sink]) -> Gate:
    """Fills the gradients of a backward or summary node; returns the gate, with those of its parameters."""
    gate = Gate(operands, inner=False)
    summary = "dQ" not in sinks
    for group in _groups(operands, range(operands.N), _GRADIENT_GROUP_BYTES):
        longest = operands.lengths[group[0]]
        blocks = list(_blocks(operands, group, max(int(longest**0.5), 1)))
        kept = [] if summary else _states_of_blocks(operands, gate, group, blocks)
        slopes = final_slopes(operands, group, "transition" in sinks)
        for at in range(len(blocks) - 1, -1, -1):
            first, place = blocks[at]
            rows = Rows(operands, gate, place)
            slope = slopes[: place.shape[1]]
            do = operands.read("dO", place)
            do *= operands.scale
            if summary:
                _retreat(slope, rows, do)
            else:
                _gradients(operands, group, first, rows, do, kept.pop(), slope, sinks)
        finish_slopes(operands, group, slopes, sinks)
    return gate


def final_slopes(operands: Operands, group: Sequence[int], transition: bool) -> Array:
    """The gradients of the states after the last tokens, with K more rows for the transition."""
    few, shared = operands.heads
    width, channels = operands.V, operands.K
    slopes = np.zeros((len(group), few, shared, width + (channels if transition else 0), channels), operands.dtype)
    if "d_final_state" in operands.inputs:
        slopes[..., :width, :] = operands.states("d_final_state", list(group))
    if transition:
        slopes[..., width:, :] = np.eye(channels, dtype=operands.dtype)
    return slopes


def finish_slopes(operands: Operands, group: Sequence[int], slopes: Array, sinks: Mapping[str, Sink]) -> None:
    """Stores the gradients of the states before the first tokens."""
    joined = heads_joined(slopes)
    if "d_initial_state" in sinks:
        sinks["d_initial_state"].put(list(group), joined[:, :, : operands.V])
    if "transition" in sinks:
        sinks["transition"].put(list(group), joined[:, :, operands.V :])


def _retreat(slopes: Array, rows: Rows, do: Array) -> None:
    """The gradient of the states from after a block to before it."""
    width = do.shape[-1]
    for step in range(len(do) - 1, -1, -1):
        k = rows.k[step]
        slopes[..., :width, :] += do[step][..., None] * rows.q[step][..., None, :]
        du = np.matmul(slopes, k[..., None])
        slopes -= du * (rows.b[step] * k)[..., None, :]
        slopes *= np.exp(rows.log[step])[..., None, :]


def _states_of_blocks(
    operands: Operands, gate: Gate, group: Sequence[int], blocks: Sequence[tuple[int, Place]]
) -> list[Array]:
    """The states before each block."""
    states, kept = start_states(operands, group, False), []
    for first, place in blocks:
        active = states[: place.shape[1]]
        kept.append(active.copy())
        rows = Rows(operands, gate, place)
        for step in range(place.shape[0]):
            _take_checkpoint(operands, group, first + step, active)
            _advance(active, rows, step, operands.V)
    return kept


def _take_checkpoint(operands: Operands, group: Sequence[int], step: int, states: Array) -> None:
    """Replaces the states before a step by those of `state_checkpoints`, where it has them."""
    if "state_checkpoints" not in operands.inputs:
        return
    every = operands.params["checkpoint_every_n_tokens"]
    if step % every == 0:
        rows = first_rows(operands.lengths, every)
        at = [rows[n] + step // every for n in group[: len(states)]]
        states[...] = operands.states("state_checkpoints", at)


def _gradients(
    operands: Operands,
    group: Sequence[int],
    first: int,
    rows: Rows,
    do: Array,
    states: Array,
    slopes: Array,
    sinks: Mapping[str, Sink],
) -> None:
    """All gradients of one block; `states` before it, `slopes` after it, which become those before it."""
    steps, width, scalar = len(do), operands.V, not operands.channel_gate
    decayed = np.empty((steps, *slopes.shape), operands.dtype)
    written = np.empty((steps, *slopes.shape[:-1]), operands.dtype)
    for step in range(steps):
        _take_checkpoint(operands, group, first + step, states)
        np.multiply(states, np.exp(rows.log[step])[..., None, :], out=decayed[step])
        written[step] = _advance(states, rows, step, width)
    dq, dk, de = (np.empty((*written.shape[:-1], operands.K), operands.dtype) for _ in range(3))
    dx = np.empty(written.shape, operands.dtype)
    dlog = np.empty((*written.shape[:-1], 1 if scalar else operands.K), operands.dtype)
    for step in range(steps - 1, -1, -1):
        k, do_row, u = rows.k[step], do[step][..., None, :], written[step][..., None, :]
        slopes += do[step][..., None] * rows.q[step][..., None, :]
        # The state after the token is the decayed one plus k u^T.
        dq[step] = np.matmul(do_row, decayed[step])[..., 0, :] + np.matmul(do_row, written[step][..., None])[..., 0] * k
        du = np.matmul(slopes, k[..., None])
        dx[step] = du[..., 0]
        de[step] = -np.matmul(du.swapaxes(-1, -2), decayed[step])[..., 0, :]
        dk[step] = np.matmul(u, slopes)[..., 0, :]
        slopes -= du * (rows.b[step] * k)[..., None, :]
        decayed[step] *= slopes
        sums = decayed[step].sum(-2)
        dlog[step] = sums.sum(-1, keepdims=True) if scalar else sums
        slopes *= np.exp(rows.log[step])[..., None, :]
    rows.fold(sinks, dq, dk, de, dx, dlog)
