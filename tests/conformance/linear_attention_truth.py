"""Gated linear attention written down token by token, in float64, with NumPy or torch; gradients by differentiation.

One recurrence serves the three operators. With S [HO, K, V], b = w = beta for GDN and KDA:

    S <- exp(g) S;   S <- S + k (w v - S^T (b k))^T;   o = scale S^T q
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from conformance.calculus import vjp

__all__ = ["GRADIENT_OF", "backward", "forward", "summary", "summary_backward"]

GRADIENT_OF = {
    "dQ": "q",
    "dK": "k",
    "dV": "v",
    "dG": "g",
    "dBeta": "beta",
    "dW": "w",
    "d_initial_state": "initial_state",
    "d_a_log": "a_log",
    "d_dt_bias": "dt_bias",
}


def stacked(xp: Any, parts: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Parts along a new first axis; zeros of `shape` where there are none."""
    return xp.stack(list(parts)) if parts else xp.zeros(shape, dtype=xp.float64)


def unit_rows(x: Any) -> Any:
    return x / ((x * x).sum(-1)[..., None] + 1e-6) ** 0.5


def sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


def softplus(xp: Any, x: Any) -> Any:
    return xp.logaddexp(x, x - x)


def heads(x: Any, out: int) -> Any:
    """Every output head with the source head that it reads."""
    return x[:, [h // (out // x.shape[1]) for h in range(out)]]


def log_decay(xp: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """log(alpha) [T, HO, 1 or K]."""
    g = values["g"]
    channels = g.ndim == 3
    if options.get("safe_gate"):
        gain = xp.exp(values["a_log"]) if "a_log" in values else xp.ones(g.shape[1], dtype=xp.float64)
        x = g + values["dt_bias"] if "dt_bias" in values else g
        if channels:
            bound = options.get("gate_lower_bound")
            return (-5.0 if bound is None else bound) * sigmoid(xp, gain[:, None] * x)
        g = -gain * softplus(xp, x)
    elif options.get("gate_domain") == "linear":
        g = xp.log(g + 1e-10)
    return g if channels else g[..., None]


def forward(xp: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """O (where there is a q), final_state and state_checkpoints, of packed operands at the port names."""
    k, v = values["k"], values["v"]
    q = values.get("q")
    out = values["g"].shape[1]
    if options.get("use_qk_l2norm"):
        q, k = None if q is None else unit_rows(q), unit_rows(k)
    scale = options.get("scale")
    scale = k.shape[2] ** -0.5 if scale is None else scale
    log = log_decay(xp, values, options)
    beta = values["beta"]
    if options.get("use_beta_sigmoid"):
        beta = (2 if options.get("allow_neg_eigval") else 1) * sigmoid(xp, beta)
    b = beta if beta.ndim == 3 else beta[..., None]
    w = values.get("w", b)
    k, v = heads(k, out), heads(v, out)
    every = options.get("checkpoint_every_n_tokens", 0)
    bounds = [int(n) for n in values["cu_seqlens"]]
    initial = values.get("initial_state")
    rows = [int(n) for n in values["state_indices"]] if "state_indices" in values else range(len(bounds) - 1)

    outputs, states, checkpoints = [], [], []
    for sequence, (low, high) in enumerate(pairwise(bounds)):
        if initial is None:
            state = xp.zeros((out, k.shape[2], v.shape[2]), dtype=xp.float64)
        else:
            state = xp.swapaxes(initial[rows[sequence]], -1, -2)
        for t in range(low, high):
            if every and (t - low) % every == 0:
                checkpoints.append(xp.swapaxes(state, -1, -2))
            state = xp.exp(log[t])[..., None] * state
            written = w[t] * v[t] - xp.einsum("hkv,hk->hv", state, b[t] * k[t])
            state = state + k[t][..., None] * written[:, None, :]
            if q is not None:
                outputs.append(scale * xp.einsum("hkv,hk->hv", state, heads(q[t : t + 1], out)[0]))
        states.append(xp.swapaxes(state, -1, -2))
    if "state_indices" in values:
        pool = list(initial)
        for row, state in zip(rows, states, strict=True):
            pool[row] = state
        states = pool
    shape = (0, out, v.shape[2], k.shape[2])
    found = {"final_state": stacked(xp, states, shape)}
    if q is not None:
        found["O"] = stacked(xp, outputs, (0, *v.shape[1:]))
    if every:
        used = max(bounds[-1] // every + len(bounds) - 1, 1)
        empty = xp.zeros(shape[1:], dtype=xp.float64)
        found["state_checkpoints"] = stacked(xp, checkpoints + [empty] * (used - len(checkpoints)), shape)
    return found


def backward(xp: Any, values: Mapping[str, Any], options: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The gradients `wanted`, by port, of sum(dO * O) + sum(d_final_state * final_state)."""
    cotangents = {"O": values["dO"]}
    if "d_final_state" in values:
        cotangents["final_state"] = values["d_final_state"]
    options = {key: value for key, value in options.items() if key != "checkpoint_every_n_tokens"}
    sources = tuple(GRADIENT_OF[port] for port in wanted)
    found = vjp(xp, lambda inputs: forward(xp, inputs, options), values, cotangents, sources)
    return {port: found[GRADIENT_OF[port]] for port in wanted}


def summary(xp: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """final_state and transition: what happens to the unit vectors where nothing is written."""
    k, out = values["k"], values["g"].shape[1]
    sequences = len(values["cu_seqlens"]) - 1
    units = xp.eye(k.shape[2], dtype=xp.float64) + xp.zeros((sequences, out, 1, 1), dtype=xp.float64)
    nothing = xp.zeros((k.shape[0], out, k.shape[2]), dtype=xp.float64)
    alone = {port: value for port, value in values.items() if port not in ("q", "dO", "d_final_state")}
    if "w" in alone:
        alone["w"] = nothing
    transition = forward(xp, {**alone, "v": nothing, "initial_state": units}, options)["final_state"]
    found = {"transition": transition}
    if "v" in values:
        found["final_state"] = forward(xp, {**values, "q": None}, options)["final_state"]
    return found


def summary_backward(xp: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """d_initial_state and transition. The states' gradients do not depend on what is written."""
    do, k, out = values["dO"], values["k"], values["g"].shape[1]
    state = (len(values["cu_seqlens"]) - 1, out, do.shape[2], k.shape[2])
    nothing = xp.zeros(do.shape, dtype=xp.float64)
    filled = {**values, "v": nothing, "initial_state": xp.zeros(state, dtype=xp.float64)}
    if values["beta"].ndim == 3:
        filled["w"] = nothing
    gradient = backward(xp, filled, options, ["d_initial_state"])["d_initial_state"]
    transition = summary(xp, values, options)["transition"]
    return {"d_initial_state": gradient, "transition": xp.swapaxes(transition, -1, -2)}
