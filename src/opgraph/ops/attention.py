"""Scaled dot product attention, forward: `sdpa`."""

from __future__ import annotations

from math import log
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, attention_implementation, data_type, diagonal_alignment
from .attention_rules import (
    alibi_slopes,
    band_of,
    check_band,
    check_extras,
    check_flags,
    check_lengths,
    check_shapes,
    dropout_ports,
    mask_params,
    number_or_tensor,
    refuse,
)
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    check_set_dim,
    graph_op,
    malformed,
    row_major,
    set_data_type,
    set_dim,
    set_stride,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..ir.tensor import Tensor

__all__ = ["OPS", "AttentionOps", "alibi_slopes", "band_of", "record_callbacks"]


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
            cu_seq_len_q, cu_seq_len_kv: the same added up from 0, INT32 or INT64 [B + 1, 1, 1, 1] or [B + 1];
                each side takes one of the two forms.
            use_alibi_mask: ALiBi, see `alibi_slopes`; needs right bound 0.
            dropout: (probability, seed, offset), where seed and offset are INT64 tensors of one element, or
                ints that become constants of the plan; or (mask, scale), where the mask broadcasts to S. Then
                O = (P * keep / (1 - probability)) v or (P * mask * scale) v; the statistics are those of P.
                `philox.keep_mask` defines keep: it depends on seed, offset and place alone.
            rng_dump: tensor [B, Hq, Sq, Skv] of this graph that receives keep, as 1 and 0.
            block_mask: UINT8 [B, Hq, ceil(Sq / 128), ceil(ceil(Skv / 128) / 8)]; bit j % 8 of byte j // 8,
                the lowest first, keeps tile j of 128 x 128 scores.
            paged_attention_k_table, paged_attention_v_table: INT32 [B, 1, ceil(Skv / size), 1]; k (or v) is
                then a container of pages [pages, H, size, D], and key s of batch entry b is row s % size of
                page table[b, s // size]. Needs the padding mask; entries beyond a length do not matter.
            paged_attention_max_seq_len_kv: Skv under paging; without it, all the rows of a table's pages.
            score_mod: callable (graph, score) -> tensor, called once, now. It applies pointwise operators of
                the graph that it is given to score [B, Hq, Sq, Skv], which is attn_scale * q k^T, in FLOAT
                unless a data type is set; the result stands for it above. Tensors of this graph that it uses
                are operands. Excludes bands and ALiBi; lengths apply with or without the padding mask.
            sink_token: FLOAT [1, Hq, 1, 1], one more logit per head, without a value.
            score_max, score_sum_exp: FLOAT tensors [B, Hq, Sq, 1] of this graph that receive M and L.
            stats_use_log2: Stats times log2(e).
            max_total_seq_len_q, max_total_seq_len_kv: rows that a ragged buffer holds in all.
            implementation, unfuse_fma: hints to engines, without effect on the definition.

        kv_mask, softmax_precision and attn_scale_prefolded are part of the signature but not served: they
        raise `cudnnGraphNotSupportedError` at `validate()`.

        Raises at `validate()`: `ValueError` for ranks other than 4, extents that do not fit, bounds out of
        range, contradicting mask arguments, lengths without padding mask or the reverse.
        `cudnnGraphNotSupportedError` for heads that do not divide, a last stride other than 1, a BOOLEAN
        bias, Stats that are not FLOAT, ALiBi without right bound 0, BOTTOM_RIGHT with a bias, ALiBi,
        dropout or (without padding) Sq > Skv, a left bound with Sq > Skv (without padding), and paging
        without padding mask or with a ragged q, k or v (a ragged page table goes with a ragged q). At
        execution, `ValueError` for a length or page outside its range.
        """
        scale, scale_tensor = number_or_tensor(attn_scale)
        probability, dropout_inputs = dropout_ports(self, "sdpa", dropout)
        recorded, captured = record_callbacks(self, "sdpa", score_mod)
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
            **dropout_inputs,
            **captured,
        }
        most = paged_attention_max_seq_len_kv
        params = {
            "attn_scale": scale,
            "generate_stats": generate_stats,
            "is_inference": is_inference,
            "dropout_probability": probability,
            "paged_attention_max_seq_len_kv": None if most is None else index(most),
            "score_mod": recorded,
            "softmax_precision": softmax_precision,
            "attn_scale_prefolded": attn_scale_prefolded,
            **mask_params(
                "sdpa",
                {
                    "diagonal_alignment": diagonal_alignment,
                    "diagonal_band_left_bound": diagonal_band_left_bound,
                    "diagonal_band_right_bound": diagonal_band_right_bound,
                    "sliding_window_length": sliding_window_length,
                    "use_causal_mask": use_causal_mask,
                    "use_causal_mask_bottom_right": use_causal_mask_bottom_right,
                    "use_padding_mask": use_padding_mask,
                    "use_alibi_mask": use_alibi_mask,
                    "max_total_seq_len_q": max_total_seq_len_q,
                    "max_total_seq_len_kv": max_total_seq_len_kv,
                    "stats_use_log2": stats_use_log2,
                    "unfuse_fma": unfuse_fma,
                    "implementation": implementation,
                },
            ),
        }
        outputs: dict[str, Tensor | None] = {"O": None}
        if generate_stats or (generate_stats is None and is_inference is False):
            outputs["Stats"] = None
        declared = {"score_max": score_max, "score_sum_exp": score_sum_exp, "rng_dump": rng_dump}
        outputs.update({port: tensor for port, tensor in declared.items() if tensor is not None})
        made = self._add_node(
            "sdpa",
            inputs=inputs,
            outputs=outputs,
            params=params,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made["O"], made.get("Stats")]

    # The names of older releases.
    scaled_dot_product_flash_attention = sdpa


def record_callbacks(graph: Any, op: str, *callbacks: Any) -> Any:
    """`score_mod.record`, imported when there is something to record."""
    if not any(callbacks):
        return None, {}
    from .score_mod import record

    return record(graph, op, *callbacks)


# -- inference -----------------------------------------------------------------------------------------------


def _infer(node: Any) -> None:
    params, inputs = node.params, node.inputs
    batch, heads, rows, keys, width = check_shapes(node)
    check_lengths(node, batch)
    if params["generate_stats"] is not None and params["generate_stats"] is params["is_inference"]:
        malformed(
            node,
            "generate_stats and is_inference contradict each other",
            given=f"both {params['generate_stats']}",
            next_step="pass generate_stats alone",
        )
    paged = "paged_attention_k_table" in inputs or "paged_attention_v_table" in inputs
    if params["paged_attention_max_seq_len_kv"] is not None and not paged:
        unsupported(node, "paged_attention_max_seq_len_kv needs a page table")
    check_flags(node)
    check_band(node, rows, keys)
    check_extras(node, (batch, heads, rows, keys))
    if params["score_mod"] is not None:
        params["score_mod"].check(node, (batch, heads, rows, keys))
    refuse(node, "kv_mask", "softmax_precision", "attn_scale_prefolded")
    for port, out in node.outputs.items():
        dim = (batch, heads, rows, {"O": width, "rng_dump": keys}.get(port, 1))
        check_set_dim(node, out, dim)
        set_dim(out, dim)
        set_stride(out, row_major(out.dim))
        if port in ("O", "rng_dump"):
            continue
        set_data_type(out, data_type.FLOAT)
        if out.data_type is not data_type.FLOAT:
            unsupported(node, f"{port} is FLOAT", tensor=out, expected="FLOAT", given=out.data_type.name)


# -- reference -----------------------------------------------------------------------------------------------


def _check(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    from .attention_options import check_contents

    check_contents(params, inputs)


def _reference(call: RefCall) -> dict[str, Array]:
    from .attention_blocks import Attention  # here for the sake of `import opgraph`, see `deferred`
    from .attention_options import Options, keys_of, lengths_of, unpaged

    params, inputs, outputs, real = call.params, call.inputs, call.outputs, call.math.real
    _check(params, inputs)  # once more, now for contents that the graph computed
    keys = keys_of(params, inputs)
    assert keys is not None
    q = real(inputs["q"])
    batch, heads, rows, _ = q.shape
    len_q, len_kv = lengths_of(inputs, "q", rows), lengths_of(inputs, "kv", keys)
    k, v = (
        real(unpaged(inputs[side], inputs.get(f"paged_attention_{side}_table"), len_kv, keys)) for side in ("k", "v")
    )
    options = Options(call, (batch, heads, rows, keys))
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
        options=options,
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
    if "rng_dump" in outputs:
        result["rng_dump"] = options.dump(outputs["rng_dump"].dtype)
    return result


OPS = (OpDef("sdpa", NodeType.SDPA, _infer, _reference, check=_check),)
