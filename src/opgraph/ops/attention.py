"""Scaled dot product attention, forward: `sdpa`."""

from __future__ import annotations

from math import log
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, attention_implementation, data_type, diagonal_alignment
from ..ir.errors import tensor_label
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    check_set_dim,
    graph_op,
    malformed,
    number,
    row_major,
    set_data_type,
    set_dim,
    set_stride,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..ir.tensor import Tensor

__all__ = ["OPS", "AttentionOps", "alibi_slopes", "band_of"]


class AttentionOps(GraphOps):
    """Attention operators of the graph."""

    __slots__ = ()

    @graph_op
    def sdpa(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        attn_scale: Any = None,
        generate_stats: bool | None = None,
        is_inference: bool | None = None,
        bias: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        cu_seq_len_q: Any = None,
        cu_seq_len_kv: Any = None,
        use_alibi_mask: bool = False,
        dropout: Any = None,
        rng_dump: Any = None,
        block_mask: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        sink_token: Any = None,
        score_max: Any = None,
        score_sum_exp: Any = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        score_mod: Callable[..., Any] | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        unfuse_fma: bool = False,
        stats_use_log2: bool = False,
        kv_mask: Any = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Attention softmax(attn_scale * q k^T + bias + masks) v; returns [O, Stats].

            S = attn_scale * q k^T + bias;  with ALiBi S[i, j] += slope[h] * (j - i);  S = -inf where masked
            M = max_j S, over the sink too;  L = sum_j exp(S - M) [+ exp(sink - M)];  P = exp(S - M) / L
            O = P v;  Stats = M + ln L;  score_max = M;  score_sum_exp = L

        A row with every key masked has P = 0 and O = 0, M = Stats = -inf and L = 0 (with a sink: Stats =
        sink). Query rows at or beyond their length are such rows, with a sink too: O = 0, Stats = -inf. What
        keys and values hold at or beyond their length does not matter, NaN or not.

        Shapes, with axes batch, head, row, channel (strides free, but 1 on the last axis):
        q [B, Hq, Sq, Dqk], k [B, Hk, Skv, Dqk], v [B, Hv, Skv, Dv]; Hk and Hv divide Hq, and query head h
        reads key head h // (Hq / Hk) and value head h // (Hq / Hv). O [B, Hq, Sq, Dv] and Stats
        [B, Hq, Sq, 1], both row-major unless set (set dim and stride of O together). q, k, v are HALF,
        BFLOAT16, FLOAT or DOUBLE; O has the graph's default type, Stats is FLOAT. q, k, v, O and the
        statistics may have ragged offsets; that needs the padding mask.

        Args:
            attn_scale: factor of q k^T, a number or a tensor of one element. None is 1, not 1 / sqrt(Dqk).
            generate_stats, is_inference: Stats is returned when generate_stats is true, or when that is
                None and is_inference is False; else the second item is None.
            bias: added to S after scaling; each extent that of [B, Hq, Sq, Skv], or 1.
            diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound: row i keeps column j
                where j <= i + delta + right and j > i + delta - left; None is no limit. delta is 0 for
                TOP_LEFT and Skv - Sq for BOTTOM_RIGHT, of the lengths instead of the extents under
                padding. The left bound counts the diagonal: left 1 with right 0 keeps the diagonal alone.
            use_causal_mask, use_causal_mask_bottom_right: deprecated; right bound 0 with the TOP_LEFT or
                the BOTTOM_RIGHT alignment.
            sliding_window_length: deprecated; the left bound.
            use_padding_mask, seq_len_q, seq_len_kv: the lengths of each batch entry, INT32 [B, 1, 1, 1] or
                [B], at most Sq and Skv.
            use_alibi_mask: ALiBi, see `alibi_slopes`; needs right bound 0.
            sink_token: FLOAT [1, Hq, 1, 1], one more logit per head, without a value.
            score_max, score_sum_exp: FLOAT tensors [B, Hq, Sq, 1] of this graph that receive M and L.
            stats_use_log2: Stats times log2(e).
            max_total_seq_len_q, max_total_seq_len_kv: rows that a ragged buffer holds in all.
            implementation, unfuse_fma: hints to engines, without effect on the definition.

        The other options are part of the signature but not served yet: cu_seq_len_q and cu_seq_len_kv,
        dropout, rng_dump, block_mask, the paged_attention arguments, score_mod, kv_mask, softmax_precision
        and attn_scale_prefolded raise `cudnnGraphNotSupportedError` at `validate()`.

        Raises at `validate()`: `ValueError` for ranks other than 4, extents that do not fit, bounds out of
        range, contradicting mask arguments, lengths without padding mask or the reverse.
        `cudnnGraphNotSupportedError` for heads that do not divide, a last stride other than 1, a BOOLEAN
        bias, Stats that are not FLOAT, ALiBi without right bound 0, BOTTOM_RIGHT with a bias, ALiBi or
        (without padding) Sq > Skv, and a left bound with Sq > Skv (without padding). At execution,
        `ValueError` for a length outside its range.
        """
        scale, scale_tensor = _number_or_tensor(attn_scale)
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "attn_scale": scale_tensor,
            "bias": bias,
            "seq_len_q": seq_len_q,
            "seq_len_kv": seq_len_kv,
            "cu_seq_len_q": cu_seq_len_q,
            "cu_seq_len_kv": cu_seq_len_kv,
            "block_mask": block_mask,
            "paged_attention_k_table": paged_attention_k_table,
            "paged_attention_v_table": paged_attention_v_table,
            "sink_token": sink_token,
            "kv_mask": kv_mask,
        }
        probability, dropout_inputs = _dropout(dropout)
        params = {
            "attn_scale": scale,
            "generate_stats": generate_stats,
            "is_inference": is_inference,
            "use_causal_mask": bool(use_causal_mask),
            "use_causal_mask_bottom_right": bool(use_causal_mask_bottom_right),
            "sliding_window_length": _int_or_none(sliding_window_length),
            "diagonal_alignment": _alignment(diagonal_alignment),
            "diagonal_band_left_bound": _int_or_none(diagonal_band_left_bound),
            "diagonal_band_right_bound": _int_or_none(diagonal_band_right_bound),
            "use_padding_mask": bool(use_padding_mask),
            "use_alibi_mask": bool(use_alibi_mask),
            "dropout_probability": probability,
            "paged_attention_max_seq_len_kv": _int_or_none(paged_attention_max_seq_len_kv),
            "max_total_seq_len_q": _int_or_none(max_total_seq_len_q),
            "max_total_seq_len_kv": _int_or_none(max_total_seq_len_kv),
            "score_mod": score_mod,
            "implementation": implementation,
            "unfuse_fma": bool(unfuse_fma),
            "stats_use_log2": bool(stats_use_log2),
            "softmax_precision": softmax_precision,
            "attn_scale_prefolded": attn_scale_prefolded,
        }
        outputs: dict[str, Tensor | None] = {"O": None}
        if generate_stats or (generate_stats is None and is_inference is False):
            outputs["Stats"] = None
        declared = {"score_max": score_max, "score_sum_exp": score_sum_exp, "rng_dump": rng_dump}
        outputs.update({port: tensor for port, tensor in declared.items() if tensor is not None})
        made = self._add_node(
            "sdpa",
            inputs={**inputs, **dropout_inputs},
            outputs=outputs,
            params=params,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made["O"], made.get("Stats")]

    # The names of older releases.
    scaled_dot_product_flash_attention = sdpa


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


# -- inference -----------------------------------------------------------------------------------------------

_FLOATS = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)
_LENGTHS = (data_type.INT32, data_type.INT64)
_NOT_SERVED = (
    "cu_seq_len_q",
    "cu_seq_len_kv",
    "dropout_probability",
    "dropout_mask",
    "rng_dump",
    "block_mask",
    "paged_attention_k_table",
    "paged_attention_v_table",
    "paged_attention_max_seq_len_kv",
    "score_mod",
    "kv_mask",
    "softmax_precision",
    "attn_scale_prefolded",
)


def _infer(node: Any) -> None:
    batch, heads, rows, keys, width = _check_shapes(node)
    _check_lengths(node, batch)
    _check_flags(node)
    _check_band(node, rows, keys)
    _check_extras(node, batch, heads, rows, keys)
    for name in _NOT_SERVED:
        value = node.params.get(name)
        if name in node.inputs or name in node.outputs or (value is not None and value is not False):
            option = "dropout" if name.startswith("dropout") else name
            unsupported(node, f"option {option} is not served yet", next_step=f"leave {option} out")
    for port, out in node.outputs.items():
        dim = (batch, heads, rows, width if port == "O" else 1)
        check_set_dim(node, out, dim)
        set_dim(out, dim)
        set_stride(out, row_major(out.dim))
        if port == "O":
            continue
        set_data_type(out, data_type.FLOAT)
        if out.data_type is not data_type.FLOAT:
            unsupported(node, f"{port} is FLOAT", tensor=out, expected="FLOAT", given=out.data_type.name)


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


# -- reference -----------------------------------------------------------------------------------------------


def _reference(call: RefCall) -> dict[str, Array]:
    from .attention_blocks import Attention  # here for the sake of `import opgraph`, see `deferred`

    params, inputs, outputs, real = call.params, call.inputs, call.outputs, call.math.real
    q, k, v = real(inputs["q"]), real(inputs["k"]), real(inputs["v"])
    batch, heads, rows, _ = q.shape
    len_q = _lengths(inputs.get("seq_len_q"), "seq_len_q", rows)
    len_kv = _lengths(inputs.get("seq_len_kv"), "seq_len_kv", k.shape[2])
    scale = params["attn_scale"]
    if "attn_scale" in inputs:
        scale = float(inputs["attn_scale"].reshape(-1)[0])
    # Blocks are written while later ones are still to be read, so the buffer serves only where it is no
    # input's.
    out = outputs["O"].target(q.dtype)
    if out is None or any(np.may_share_memory(out, array) for array in inputs.values()):
        out = np.empty((batch, heads, rows, v.shape[3]), q.dtype)
    bottom_right, left, right = band_of(params)
    work = Attention(
        q,
        k,
        v,
        out,
        scale=1.0 if scale is None else scale,
        bias=real(inputs["bias"]) if "bias" in inputs else None,
        slopes=np.array(alibi_slopes(heads)) if params["use_alibi_mask"] else None,
        sink=real(inputs["sink_token"]) if "sink_token" in inputs else None,
        len_q=len_q,
        len_kv=len_kv,
        bottom_right=bottom_right,
        left=left,
        right=right,
    )
    work.run()
    result = {"O": out}
    if "Stats" in outputs:
        with np.errstate(divide="ignore"):
            stats = np.log(work.row_sum)
        stats += work.row_max
        if params["stats_use_log2"]:
            stats *= 1 / log(2)
        result["Stats"] = stats[..., None]
    if "score_max" in outputs:
        result["score_max"] = work.row_max[..., None]
    if "score_sum_exp" in outputs:
        result["score_sum_exp"] = work.row_sum[..., None]
    return result


def _lengths(array: Array | None, port: str, most: int) -> list[int] | None:
    if array is None:
        return None
    lengths: list[int] = array.reshape(-1).tolist()
    for entry, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise ValueError(f"sdpa: {port} of batch entry {entry} is {length}; expected 0 to {most}")
    return lengths


OPS = (OpDef("sdpa", NodeType.SDPA, _infer, _reference),)
