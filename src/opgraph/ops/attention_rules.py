"""What attention and its gradient share before anything is computed: arguments, and the rules of `validate()`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import data_type, diagonal_alignment, scalar_type
from ..ir.errors import tensor_label
from .base import ContentsError, malformed, number, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Array

__all__ = []

def _number_or_tensor(value: Any) -> tuple[float | None, Any]:
    if value is None or (isinstance(value, (int, float, np.generic)) and not isinstance(value, bool)):
        return (None if value is None else float(value)), None
    return None, value


def _alignment(value: Any) -> diagonal_alignment:
    if not isinstance(value, diagonal_alignment):
        raise TypeError(f"sdpa: diagonal_alignment is a diagonal_alignment, given {value!r}")
    return value


def _int_or_none(value: Any) -> int | None:
    return None if value is None else index(value)


def _dropout(dropout: Any) -> tuple[float | None, dict[str, Any]]:
    """`(probability, seed, offset)` or `(mask, scale)` as a probability and input ports."""
    if dropout is None:
        return None, {}
    if isinstance(dropout, (tuple, list)) and len(dropout) == 3 and isinstance(dropout[0], (int, float)):
        return float(dropout[0]), {"dropout_seed": dropout[1], "dropout_offset": dropout[2]}
    if isinstance(dropout, (tuple, list)) and len(dropout) == 2:
        return None, {"dropout_mask": dropout[0], "dropout_scale": dropout[1]}
    raise ValueError(f"sdpa: dropout is (probability, seed, offset) or (mask, scale); given {dropout!r}")


def band_of(params: Mapping[str, Any]) -> tuple[bool, int | None, int | None]:
    """(bottom right, left bound, right bound) of a node's attributes, deprecated spellings resolved."""
    left, right = params["diagonal_band_left_bound"], params["diagonal_band_right_bound"]
    if left is None:
        left = params["sliding_window_length"]
    bottom_right = params["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT
    if params["use_causal_mask"] or params["use_causal_mask_bottom_right"]:
        right = 0
        bottom_right = bottom_right or params["use_causal_mask_bottom_right"]
    return bottom_right, left, right


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head, as published with ALiBi (Press et al., 2021).

    n = the largest power of two up to `heads`; the first n heads have 2^(-8 i / n), i = 1..n, the others
    2^(-4 (2 j - 1) / n), j = 1, 2, ...
    """
    n = 1 << (max(heads, 1).bit_length() - 1)
    first = [2.0 ** (-8 * i / n) for i in range(1, min(n, heads) + 1)]
    return first + [2.0 ** (-4 * (2 * j - 1) / n) for j in range(1, heads - n + 1)]


# -- rules ---------------------------------------------------------------------------------------------------

_FLOATS = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)
_LENGTHS = (data_type.INT32, data_type.INT64)

def _check_shapes(node: Any) -> tuple[int, int, int, int, int]:
    """(B, Hq, Sq, Skv, Dv)"""
    q, k, v = (node.inputs.get(port) for port in ("q", "k", "v"))
    for port, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None:
            malformed(node, f"{port} is missing", next_step="pass q, k and v")
        if len(tensor.dim) != 4 or len(tensor.stride) != 4:
            malformed(
                node,
                f"{port} has the 4 axes batch, head, row, channel",
                tensor=tensor,
                expected="4 extents and 4 strides",
                given=f"dim {tensor.dim}, stride {tensor.stride}",
            )
    batch, heads, rows, channels = q.dim
    for tensor, axis, extent, what in (
        (k, 0, batch, f"the batch of {tensor_label(q)}"),
        (v, 0, batch, f"the batch of {tensor_label(q)}"),
        (k, 3, channels, f"the channels of {tensor_label(q)}"),
        (v, 2, k.dim[2], f"the rows of {tensor_label(k)}"),
    ):
        if tensor.dim[axis] != extent:
            malformed(
                node,
                f"axis {axis} must be {what}",
                tensor=tensor,
                expected=f"{extent} at axis {axis}",
                given=tensor.dim,
            )
    for tensor in (k, v):
        if heads % tensor.dim[1] if tensor.dim[1] else heads:
            unsupported(
                node,
                "the heads must divide those of q",
                tensor=tensor,
                expected=f"a divisor of {heads} at axis 1",
                given=tensor.dim,
            )
    for tensor in (q, k, v):
        if tensor.stride[3] != 1 and tensor.dim[3] > 1:
            unsupported(node, "the last stride must be 1", tensor=tensor, expected=1, given=tensor.stride)
        if tensor.data_type not in (None, *_FLOATS):
            unsupported(
                node,
                "the data type is not a plain floating one",
                tensor=tensor,
                expected="HALF, BFLOAT16, FLOAT or DOUBLE",
                given=tensor.data_type.name,
            )
    return batch, heads, rows, k.dim[2], v.dim[3]


def _check_lengths(node: Any, batch: int) -> None:
    params, inputs = node.params, node.inputs
    sides = [(f"seq_len_{side}", f"cu_seq_len_{side}") for side in ("q", "kv")]
    given = [[port for port in side if port in inputs] for side in sides]
    found = ", ".join(given[0] + given[1]) or "none"
    if any(len(ports) > 1 for ports in given):
        malformed(node, "a side has its lengths in one form", expected="seq_len or cu_seq_len", given=found)
    if len(given[0]) != len(given[1]):
        malformed(node, "lengths are needed for both sides", expected="seq_len_q and seq_len_kv", given=found)
    if params["use_padding_mask"] and not given[0]:
        malformed(node, "use_padding_mask needs the lengths", expected="seq_len_q and seq_len_kv", given=found)
    if given[0] and not params["use_padding_mask"] and params["score_mod"] is None:
        malformed(node, "lengths need the padding mask", given=found, next_step="pass use_padding_mask=True")
    for port in ("seq_len_q", "seq_len_kv"):
        tensor = inputs.get(port)
        if tensor is None:
            continue
        if tensor.dim not in ((batch, 1, 1, 1), (batch,)):
            malformed(
                node,
                f"{port} holds one length for each batch entry",
                tensor=tensor,
                expected=f"({batch}, 1, 1, 1) or ({batch},)",
                given=tensor.dim,
            )
        if tensor.data_type not in (None, *_LENGTHS):
            malformed(node, f"{port} is INT32", tensor=tensor, expected="INT32", given=tensor.data_type.name)
    if not params["use_padding_mask"]:
        for port, tensor in (*inputs.items(), *node.outputs.items()):
            if tensor.ragged_offset is not None:
                unsupported(
                    node,
                    f"{port} has a ragged offset, which needs the padding mask",
                    tensor=tensor,
                    next_step="pass use_padding_mask=True with seq_len_q and seq_len_kv",
                )


def _check_flags(node: Any) -> None:
    params, inputs = node.params, node.inputs
    if params["generate_stats"] is not None and params["generate_stats"] is params["is_inference"]:
        malformed(
            node,
            "generate_stats and is_inference contradict each other",
            given=f"both {params['generate_stats']}",
            next_step="pass generate_stats alone",
        )
    probability = params["dropout_probability"]
    if probability is not None and not 0 <= probability < 1:
        malformed(node, "the dropout probability is in [0, 1)", given=probability)
    paged = "paged_attention_k_table" in inputs or "paged_attention_v_table" in inputs
    if paged and not params["use_padding_mask"]:
        unsupported(node, "paged attention needs the padding mask")
    if params["paged_attention_max_seq_len_kv"] is not None and not paged:
        unsupported(node, "paged_attention_max_seq_len_kv needs a page table")
    for side, ports in (("q", ("q",)), ("kv", ("k", "v"))):
        if params[f"max_total_seq_len_{side}"] is not None and all(
            inputs[port].ragged_offset is None for port in ports
        ):
            unsupported(node, f"max_total_seq_len_{side} needs a ragged {' or '.join(ports)}")


def _check_band(node: Any, rows: int, keys: int) -> None:
    params = node.params
    causal, causal_right = params["use_causal_mask"], params["use_causal_mask_bottom_right"]
    left, right = params["diagonal_band_left_bound"], params["diagonal_band_right_bound"]
    window = params["sliding_window_length"]
    if causal and (causal_right or params["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT):
        malformed(node, "use_causal_mask is TOP_LEFT", given="BOTTOM_RIGHT too", next_step="pass one of them")
    if (causal or causal_right) and right not in (None, 0):
        malformed(node, "a causal mask has right bound 0", given=right, next_step="pass the bound alone")
    if window is not None and left not in (None, window):
        malformed(node, f"sliding_window_length {window} and the left bound {left} contradict each other")
    bottom_right, left, right = band_of(params)
    if left is not None and left < 1:
        malformed(node, "the left bound counts the diagonal", expected="1 or more", given=left)
    if right is not None and right < 0:
        malformed(node, "the right bound must not be negative", expected="0 or more", given=right)
    if params["score_mod"] is not None and (left is not None or right is not None or params["use_alibi_mask"]):
        malformed(node, "score_mod excludes the built-in masks", next_step="build the mask in score_mod")
    if params["use_alibi_mask"] and right != 0:
        unsupported(node, "use_alibi_mask needs right bound 0", expected=0, given=right)
    tall = rows > keys and not params["use_padding_mask"]
    next_step = "pass lengths with use_padding_mask=True"
    if tall and left is not None:
        unsupported(node, "a left bound needs Sq <= Skv", given=f"Sq {rows}, Skv {keys}", next_step=next_step)
    if bottom_right and (left is not None or right is not None):
        if tall:
            unsupported(node, "BOTTOM_RIGHT needs Sq <= Skv", given=f"Sq {rows}, Skv {keys}", next_step=next_step)
        for used, option in (
            ("bias" in node.inputs, "a bias"),
            (params["use_alibi_mask"], "ALiBi"),
            (params["dropout_probability"] is not None or "dropout_mask" in node.inputs, "dropout"),
        ):
            if used:
                unsupported(node, f"BOTTOM_RIGHT does not go with {option}")


def _check_extras(node: Any, batch: int, heads: int, rows: int, keys: int) -> None:
    bias, sink, scale = (node.inputs.get(port) for port in ("bias", "sink_token", "attn_scale"))
    if bias is not None:
        full = (batch, heads, rows, keys)
        if len(bias.dim) != 4 or any(a not in (1, b) for a, b in zip(bias.dim, full, strict=True)):
            malformed(
                node,
                "the bias must broadcast to the scores",
                tensor=bias,
                expected=f"each extent 1 or that of {full}",
                given=bias.dim,
            )
        if bias.data_type is data_type.BOOLEAN:
            unsupported(node, "a BOOLEAN bias", tensor=bias, next_step="pass 0 and -inf as floats")
    if scale is not None and number(scale.dim) != 1:
        malformed(node, "attn_scale is one number", tensor=scale, expected="(1, 1, 1, 1)", given=scale.dim)
    if sink is not None:
        if sink.dim != (1, heads, 1, 1):
            malformed(node, "one sink per head", tensor=sink, expected=(1, heads, 1, 1), given=sink.dim)
        if sink.data_type not in (None, data_type.FLOAT):
            unsupported(node, "sink_token is FLOAT", tensor=sink, given=sink.data_type.name)


