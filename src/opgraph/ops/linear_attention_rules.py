"""Gated linear attention: which nodes are valid, what their outputs are, what boundaries and indices hold."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..ir.enums import data_type
from .base import ContentsError, malformed, row_major, set_data_type, set_dim, set_stride, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .base import Array

__all__ = [
    "BACKWARD",
    "FORWARD",
    "SUMMARY",
    "SUMMARY_BACKWARD",
    "VARIANTS",
    "Variant",
    "check_contents",
    "inference",
]

FORWARD, BACKWARD, SUMMARY, SUMMARY_BACKWARD = "forward", "backward", "summary", "summary_backward"

_FLOATS = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)
_LENGTHS = (data_type.INT32, data_type.INT64)
_STATES = ("initial_state", "d_final_state", "final_state", "d_initial_state")
_PARAMETERS = ("a_log", "dt_bias")

_INPUTS = {
    FORWARD: ("q", "k", "v", "g", "beta", "w", "cu_seqlens"),
    BACKWARD: ("q", "k", "v", "g", "beta", "w", "cu_seqlens", "dO"),
    SUMMARY: ("k", "v", "g", "beta", "w", "cu_seqlens"),
    SUMMARY_BACKWARD: ("q", "k", "g", "beta", "cu_seqlens", "dO"),
}
_OUTPUTS = {
    FORWARD: ("O",),
    BACKWARD: ("dQ", "dK", "dV", "dG", "dBeta", "dW"),
    SUMMARY: ("final_state",),
    SUMMARY_BACKWARD: ("d_initial_state",),
}


class Variant:
    """One of the three recurrences: whether its gate, and its beta, have a channel axis."""

    __slots__ = ("channel_beta", "channel_gate", "name")

    def __init__(self, name: str, channel_gate: bool, channel_beta: bool) -> None:
        self.name = name
        self.channel_gate = channel_gate
        self.channel_beta = channel_beta

    def inputs(self, role: str) -> tuple[str, ...]:
        """The input ports that must be there."""
        return tuple(port for port in _INPUTS[role] if port != "w" or self.channel_beta)

    def outputs(self, role: str) -> tuple[str, ...]:
        """The output ports that are always there."""
        return tuple(port for port in _OUTPUTS[role] if port != "dW" or self.channel_beta)


VARIANTS = (Variant("gdn", False, False), Variant("gdn2", True, True), Variant("kda", True, False))


class _Extents:
    """The extents that the ports of a node share; `rows` are those of the states."""

    __slots__ = ("channels", "out_heads", "rows", "sequences", "tokens", "width")

    channels: int
    out_heads: int
    rows: int
    sequences: int
    tokens: int
    width: int


def inference(variant: Variant, role: str) -> Callable[[Any], None]:
    """The `infer` of one operator."""

    def infer(node: Any) -> None:
        for port in variant.inputs(role):
            if node.inputs.get(port) is None:
                malformed(node, f"{port} is missing", next_step=f"pass {', '.join(variant.inputs(role))}")
        _check_attributes(node, role)
        extents = _check_shapes(node, variant, role)
        _check_optional_inputs(node, variant, extents)
        _check_data_types(node)
        _check_output_ports(node, variant, role)
        _fill_outputs(node, extents)

    return infer


# ---- attributes


def _check_attributes(node: Any, role: str) -> None:
    params, inputs = node.params, node.inputs
    domain = params["gate_domain"]
    if domain not in ("log", "linear"):
        malformed(node, "gate_domain is 'log' or 'linear'", given=repr(domain))
    if params["safe_gate"] and domain == "linear":
        malformed(node, "safe_gate excludes gate_domain 'linear'", next_step="pass raw logits as g, or no safe_gate")
    bound = params.get("gate_lower_bound")
    if not params["safe_gate"]:
        for port in _PARAMETERS:
            if port in inputs:
                malformed(node, f"{port} needs safe_gate", tensor=inputs[port], next_step="pass safe_gate=True")
        if bound is not None:
            malformed(node, "gate_lower_bound needs safe_gate", given=bound, next_step="pass safe_gate=True")
    if bound is not None and not -5 <= bound < 0:
        malformed(node, "gate_lower_bound is in [-5, 0)", given=bound)
    if params["allow_neg_eigval"] and not params["use_beta_sigmoid"]:
        malformed(node, "allow_neg_eigval needs use_beta_sigmoid", next_step="pass use_beta_sigmoid=True")
    scale = params.get("scale")
    if scale is not None and not isfinite(scale):
        malformed(node, "scale is finite", given=scale)
    if params["max_seqlen"] is not None and params["max_seqlen"] < 0:
        malformed(node, "max_seqlen is a number of tokens, 0 or more", given=params["max_seqlen"])
    if role in (FORWARD, BACKWARD):
        _check_states(node, role)
    if params.get("beta_guard"):
        unsupported(node, "option beta_guard is not served", next_step="leave beta_guard out")


def _check_states(node: Any, role: str) -> None:
    params, inputs, outputs = node.params, node.inputs, node.outputs
    every = params["checkpoint_every_n_tokens"]
    if every < 0:
        malformed(node, "checkpoint_every_n_tokens is 0 (none) or more", given=every)
    held = "state_checkpoints" in (outputs if role == FORWARD else inputs)
    if held != (every > 0):
        malformed(
            node,
            "checkpoint_every_n_tokens and the port state_checkpoints come together",
            given=f"checkpoint_every_n_tokens {every}, {'a' if held else 'no'} port state_checkpoints",
        )
    if "state_indices" in inputs:
        indices = inputs["state_indices"]
        if role != FORWARD:
            malformed(node, "state_indices is for the forward operators only", tensor=indices)
        if "initial_state" not in inputs:
            malformed(node, "state_indices needs initial_state", tensor=indices, next_step="pass the pool of states")
        if every:
            malformed(
                node,
                "state_indices excludes checkpoints",
                tensor=indices,
                given=f"checkpoint_every_n_tokens {every}",
            )
    if params["overwrite_initial_state"]:
        for port, there in (
            ("initial_state", "initial_state" in inputs),
            ("final_state", "final_state" in outputs),
        ):
            if not there:
                malformed(node, f"overwrite_initial_state needs {port}", given=f"no {port}")


# ---- inputs


def _check_shapes(node: Any, variant: Variant, role: str) -> _Extents:
    inputs = node.inputs
    extents = _Extents()
    for port in ("q", "k", "v"):
        if port in inputs:
            _check_rank(node, port, 3, "token, head, channel")
    _check_rank(node, "g", 3 if variant.channel_gate else 2, _axes(variant.channel_gate))
    _check_rank(node, "beta", 3 if variant.channel_beta else 2, _axes(variant.channel_beta))
    _check_rank(node, "cu_seqlens", 1, "boundary")
    if not inputs["cu_seqlens"].dim[0]:
        malformed(
            node,
            "cu_seqlens holds N + 1 boundaries",
            tensor=inputs["cu_seqlens"],
            expected="1 or more",
            given=0,
        )
    k = inputs["k"]
    extents.tokens, extents.channels = k.dim[0], k.dim[2]
    extents.sequences = inputs["cu_seqlens"].dim[0] - 1
    if "dO" in inputs:
        _check_rank(node, "dO", 3, "token, head, channel")
    extents.width = inputs["v" if "v" in inputs else "dO"].dim[2]
    _check_heads(node, extents)
    tokens, heads = extents.tokens, extents.out_heads
    if "q" in inputs:
        _check_dim(node, "q", "[T, HQ, K]", (tokens, inputs["q"].dim[1], extents.channels))
    if "v" in inputs:
        _check_dim(node, "v", "[T, HV, V]", (tokens, inputs["v"].dim[1], extents.width))
    for port, channels in (("g", variant.channel_gate), ("beta", variant.channel_beta)):
        what = "[T, HO, K]" if channels else "[T, HO]"
        _check_dim(node, port, what, (tokens, heads, extents.channels) if channels else (tokens, heads))
    if "dO" in inputs:
        _check_dim(node, "dO", "[T, HO, V]", (tokens, heads, extents.width))
    if variant.channel_beta and "w" in inputs:
        _check_dim(node, "w", "[T, HO, V]", (tokens, heads, extents.width))
    return extents


def _axes(channels: bool) -> str:
    return "token, output head, channel" if channels else "token, output head"


def _check_rank(node: Any, port: str, rank: int, axes: str) -> None:
    tensor = node.inputs[port]
    if len(tensor.dim) != rank:
        malformed(
            node,
            f"{port} has {rank} axes: {axes}",
            tensor=tensor,
            expected=f"{rank} extents",
            given=tensor.dim,
        )


def _check_dim(node: Any, port: str, what: str, dim: tuple[int, ...]) -> None:
    tensor = node.inputs[port]
    if tensor.dim != dim:
        malformed(node, f"{port} is {what}", tensor=tensor, expected=dim, given=tensor.dim)


def _check_heads(node: Any, extents: _Extents) -> None:
    """HO = max(HQ, HV), the smaller of HQ and HV divides the larger, HK is one of them.

    A summary lacks q or v; there HO is what the gates have, and the heads of q and v that are missing are HO
    or those of k.
    """
    inputs = node.inputs
    heads = {port: inputs[port].dim[1] for port in ("q", "k", "v") if port in inputs}
    k = heads["k"]
    if len(heads) == 3:
        q, v = heads["q"], heads["v"]
        extents.out_heads = max(q, v)
        if not _divides(min(q, v), max(q, v)):
            malformed(
                node,
                "one of the heads of q and v divides the other",
                tensor=inputs["v"],
                expected=f"a divisor or a multiple of {q} heads",
                given=f"{v} heads",
            )
        if k not in (q, v):
            malformed(
                node,
                "k has the heads of q or those of v",
                tensor=inputs["k"],
                expected=f"{q} or {v} heads" if q != v else f"{q} heads",
                given=f"{k} heads",
            )
        return
    extents.out_heads = out = inputs["g"].dim[1]
    (other,) = (port for port in heads if port != "k")
    for port in ("k", other):
        if not _divides(heads[port], out):
            malformed(
                node,
                f"the heads of {port} divide the output heads, which g has",
                tensor=inputs[port],
                expected=f"a divisor of {out} heads",
                given=f"{heads[port]} heads",
            )
    if out not in (k, heads[other]) and k != heads[other]:
        malformed(
            node,
            f"k has the heads of {other} or the output heads, which g has",
            tensor=inputs["k"],
            expected=f"{heads[other]} or {out} heads",
            given=f"{k} heads",
        )


def _divides(few: int, many: int) -> bool:
    return many % few == 0 if few else many == 0


def _check_optional_inputs(node: Any, variant: Variant, extents: _Extents) -> None:
    inputs, heads = node.inputs, extents.out_heads
    state = (heads, extents.width, extents.channels)
    pooled = "state_indices" in inputs
    if pooled:
        _check_dim(node, "state_indices", "[N]", (extents.sequences,))
        pool = inputs["initial_state"].dim
        rows = pool[0] if pool else 0
        _check_dim(node, "initial_state", "a pool [rows, HO, V, K], value axis before key axis", (rows, *state))
    elif "initial_state" in inputs:
        what = "[N, HO, V, K], value axis before key axis"
        _check_dim(node, "initial_state", what, (extents.sequences, *state))
    extents.rows = inputs["initial_state"].dim[0] if pooled else extents.sequences
    if "d_final_state" in inputs:
        what = "[N, HO, V, K], value axis before key axis"
        _check_dim(node, "d_final_state", what, (extents.sequences, *state))
    if "state_checkpoints" in inputs:
        _check_dim(
            node,
            "state_checkpoints",
            "[max(T // n + N, 1), HO, V, K]",
            (_checkpoint_rows(node, extents), *state),
        )
    if "a_log" in inputs:
        _check_dim(node, "a_log", "[HO]", (heads,))
    if "dt_bias" in inputs:
        what = "[HO, K]" if variant.channel_gate else "[HO]"
        _check_dim(node, "dt_bias", what, (heads, extents.channels) if variant.channel_gate else (heads,))


def _checkpoint_rows(node: Any, extents: _Extents) -> int:
    every = node.params["checkpoint_every_n_tokens"]
    return max(extents.tokens // every + extents.sequences, 1)


def _check_data_types(node: Any) -> None:
    for port, tensor in node.inputs.items():
        if port in ("cu_seqlens", "state_indices"):
            allowed = _LENGTHS if port == "cu_seqlens" else _LENGTHS[:1]
            if tensor.data_type not in (None, *allowed):
                names = " or ".join(dtype.name for dtype in allowed)
                malformed(node, f"{port} is {names}", tensor=tensor, expected=names, given=tensor.data_type.name)
        elif tensor.data_type not in (None, *_FLOATS):
            unsupported(
                node,
                "the data type is not a plain floating one",
                tensor=tensor,
                expected="HALF, BFLOAT16, FLOAT or DOUBLE",
                given=tensor.data_type.name,
            )


# ---- outputs

_GRADIENTS = {
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


def _check_output_ports(node: Any, variant: Variant, role: str) -> None:
    """Which outputs there are; the operators' methods see to it, other makers of nodes may not."""
    outputs, inputs, params = node.outputs, node.inputs, node.params
    conditions: dict[str, tuple[bool, str]] = dict.fromkeys(variant.outputs(role), (True, "always"))
    if role == FORWARD:
        conditions["final_state"] = params["output_final_state"], "exactly when output_final_state is given"
        every = params["checkpoint_every_n_tokens"]
        conditions["state_checkpoints"] = every > 0, "exactly when checkpoint_every_n_tokens is given"
    elif role == BACKWARD:
        for port in ("d_initial_state", "d_a_log", "d_dt_bias"):
            source = _GRADIENTS[port]
            conditions[port] = source in inputs, f"exactly when {source} is given"
    else:
        conditions["transition"] = params["output_transition"], "exactly when output_transition is given"
    for port in sorted({*conditions, *outputs}):
        wanted, when = conditions.get(port, (False, "never"))
        if wanted != (port in outputs):
            malformed(
                node,
                f"output {port} exists {when}",
                tensor=outputs.get(port),
                given=f"a node {'with' if port in outputs else 'without'} it",
            )


def _fill_outputs(node: Any, extents: _Extents) -> None:
    inputs, outputs = node.inputs, node.outputs
    state = (extents.out_heads, extents.width, extents.channels)
    fixed = {
        "O": (extents.tokens, extents.out_heads, extents.width),
        "final_state": (extents.rows, *state),
        "d_initial_state": (extents.sequences, *state),
        "transition": (extents.sequences, extents.out_heads, extents.channels, extents.channels),
    }
    if "state_checkpoints" in outputs:
        fixed["state_checkpoints"] = (_checkpoint_rows(node, extents), *state)
    held = next((inputs[port].data_type for port in _STATES if port in inputs), None) or data_type.FLOAT
    for port, out in outputs.items():
        model = inputs.get(_GRADIENTS.get(port, ""))
        dim = model.dim if model is not None else fixed[port]
        set_dim(out, dim)
        if out.dim != dim:
            malformed(
                node,
                f"the dim set on {port} is not the one of its inputs",
                tensor=out,
                expected=dim,
                given=out.dim,
            )
        set_stride(out, row_major(dim))
        if port in ("final_state", "d_initial_state", "transition"):
            set_data_type(out, held)
        elif model is not None:
            set_data_type(out, model.data_type)
        if out.data_type not in (None, *_FLOATS):
            unsupported(
                node,
                f"{port} has a plain floating data type",
                tensor=out,
                expected="HALF, BFLOAT16, FLOAT or DOUBLE",
                given=out.data_type.name,
            )
    states = [(port, tensor) for ports in (inputs, outputs) for port, tensor in ports.items() if port in _STATES]
    for port, tensor in states:
        if None not in (tensor.data_type, states[0][1].data_type) and tensor.data_type != states[0][1].data_type:
            malformed(
                node,
                f"{states[0][0]} and {port} have one data type",
                tensor=tensor,
                expected=states[0][1].data_type.name,
                given=tensor.data_type.name,
            )


# ---- contents


def check_contents(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    """Raises `ContentsError` for boundaries or pool rows that the operands do not have."""
    boundaries = inputs.get("cu_seqlens")
    if boundaries is not None:
        bounds = boundaries.tolist()
        tokens = inputs["k"].shape[0] if "k" in inputs else bounds[-1]
        most = params["max_seqlen"]
        if bounds[0] != 0:
            raise ContentsError("cu_seqlens", "boundaries start at 0", 0, f"{bounds[0]} at entry 0")
        for entry, (low, high) in enumerate(pairwise(bounds), 1):
            if high < low:
                raise ContentsError(
                    "cu_seqlens",
                    "boundaries do not decrease",
                    f"at least {low} at entry {entry}",
                    f"{high} there",
                )
            if most is not None and high - low > most:
                raise ContentsError(
                    "cu_seqlens",
                    "no sequence is longer than max_seqlen",
                    f"at most {most} tokens",
                    f"{high - low}",
                )
        if bounds[-1] != tokens:
            raise ContentsError("cu_seqlens", "boundaries end at the number of tokens", tokens, bounds[-1])
    rows = inputs.get("state_indices")
    if rows is not None and "initial_state" in inputs:
        pool = inputs["initial_state"].shape[0]
        for entry, row in enumerate(rows.tolist()):
            if not 0 <= row < pool:
                raise ContentsError(
                    "state_indices",
                    "every sequence has a row of the pool",
                    f"0 to {pool - 1}",
                    f"{row} at entry {entry}",
                )
