"""The references of the gated linear attention family: tokens one by one in float64, chunks of them in
float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import linear_attention_chunks as chunks
from . import linear_attention_steps as steps
from .linear_attention_math import Operands, Sink, first_rows
from .linear_attention_rules import check_contents

if TYPE_CHECKING:
    from .base import Array, RefCall

__all__ = ["backward_reference", "forward_reference"]

_STATES = ("initial_state", "d_final_state")
# A sequence of at most so many tokens is cheaper token by token than as one padded chunk.
_FEW_TOKENS = 8


def _operands(call: RefCall) -> Operands:
    check_contents(call.params, call.inputs)
    dtype = call.math.dtype
    held = any(call.inputs[port].dtype == np.float64 for port in _STATES if port in call.inputs)
    # States pass through empty sequences bit for bit, so they are held at least as exactly as they came.
    return Operands(call, dtype if dtype.kind == "f" and not held else np.dtype(np.float64))


def forward_reference(call: RefCall) -> dict[str, Array]:
    """O, final_state, state_checkpoints and transition, of those that the node has."""
    operands = _operands(call)
    initial = call.inputs.get("initial_state")
    sinks = {
        port: Sink(out, call.inputs, initial if port == "final_state" else None) for port, out in call.outputs.items()
    }
    if "state_indices" in call.inputs and "final_state" in sinks:
        pool = sinks["final_state"]
        if pool.array is not call.outputs["final_state"].view:
            assert initial is not None
            pool.put(slice(None), initial)  # rows that no sequence has keep what the pool holds
    if "state_checkpoints" in sinks:
        every = call.params["checkpoint_every_n_tokens"]
        sinks["state_checkpoints"].array[first_rows(operands.lengths, every)[-1] :] = 0
    everything = range(operands.N)
    if call.math.precise:
        steps.forward(operands, everything, sinks)
    else:
        few = [n for n, length in enumerate(operands.lengths) if length <= _FEW_TOKENS]
        short = set(few)
        steps.forward(operands, few, sinks)
        chunks.forward(operands, [n for n in everything if n not in short], sinks)
    return {port: sink.array for port, sink in sinks.items()}


def backward_reference(call: RefCall) -> dict[str, Array]:
    """The gradients that the node has; of a summary d_initial_state and the transition."""
    operands = _operands(call)
    parameters = {"d_a_log": "a_log", "d_dt_bias": "dt_bias"}
    sinks = {port: Sink(out, call.inputs) for port, out in call.outputs.items() if port not in parameters}
    gate = (steps if call.math.precise else chunks).backward(operands, sinks)
    results = {port: sink.array for port, sink in sinks.items()}
    for port, source in parameters.items():
        if port in call.outputs:
            shape, total = call.inputs[source].shape, getattr(gate, port)
            results[port] = np.zeros(shape) if total is None else total.reshape(shape)
    return results
