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
