"""The gradient of scaled dot product attention: `sdpa_backward`."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, attention_implementation, data_type, diagonal_alignment
from .attention import record_callbacks
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
    check_required,
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

__all__ = ["OPS", "AttentionBackwardOps"]


class AttentionBackwardOps(GraphOps):
    """The gradient of attention."""

    __slots__ = ()

    @graph_op
    def sdpa_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,
        stats: Any,
        *,
        attn_scale: Any = None,
        bias: Any = None,
        dBias: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_alibi_mask: bool = False,
        dropout: Any = None,
        rng_dump: Any = None,
        block_mask: Any = None,
        sink_token: Any = None,
        dSink_token: Any = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        use_deterministic_algorithm: bool = False,
        implementation: attention_implementation = attention_implementation.AUTO,
        unfuse_fma: bool = False,
        stats_use_log2: bool = False,
        kv_mask: Any = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor]:
        """Gradients of `sdpa`; returns [dQ, dK, dV].

            P = exp(S - stats), 0 where masked, with the S of `sdpa`;  Pd = P * keep / (1 - probability)
            dV = Pd^T dO;  dP = (dO v^T) * keep / (1 - probability);  Delta = rowsum(dO * o)
            dS = P * (dP - Delta);  dQ = attn_scale * dS k;  dK = attn_scale * dS^T q
            dBias = dS summed to the dims of bias;  dSink = -sum over batch and rows of exp(sink - stats) * Delta

        Query heads that share a key or value head add up in it. Rows and keys at or beyond their length have
        gradient 0, and what any tensor holds there does not matter, NaN or not; the same dropout arguments
        give the mask of the forward pass. Results do not depend on the number of threads.

        Shapes: q, k and v as for `sdpa`; o and dO [B, Hq, Sq, Dv]; stats FLOAT [B, Hq, Sq, 1], the Stats of
        the forward pass. dQ, dK and dV have the dims of q, k and v and the graph's default type, row-major
        unless set. All of them may have ragged offsets, with the padding mask; packed storage outside the
        valid rows is not written.

        Args:
            dBias: tensor of this graph with the dims of bias that receives its gradient.
            dSink_token: FLOAT tensor [1, Hq, 1, 1] of this graph that receives the gradient of sink_token.
            dropout: (probability, seed, offset) or (mask, scale, scale_inverse); the last is not needed.
            score_mod, score_mod_bprop: score_mod as for `sdpa`; score_mod_bprop(graph, grad) -> tensor turns
                the gradient of its result into that of its argument, and may use what score_mod computed.
                Without it the gradient passes as it is, which is right where score_mod adds or masks.
            use_deterministic_algorithm: a hint; results are deterministic anyway.

        The other arguments are those of `sdpa`. kv_mask, softmax_precision and attn_scale_prefolded are not
        served.

        Raises at `validate()` what `sdpa` raises, and `ValueError` for o, dO or stats that do not fit, dBias
        without bias and dSink_token without sink_token; `cudnnGraphNotSupportedError` for Sq = Skv = 1,
        stats that are not FLOAT, and gradients whose last stride is not 1.
        """
        scale, scale_tensor = number_or_tensor(attn_scale)
        probability, dropout_inputs = dropout_ports(self, "sdpa_backward", dropout, backward=True)
        function, captured = record_callbacks(self, "sdpa_backward", score_mod, score_mod_bprop)
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "o": o,
            "dO": dO,
            "stats": stats,
            "attn_scale": scale_tensor,
            "bias": bias,
            "seq_len_q": seq_len_q,
            "seq_len_kv": seq_len_kv,
            "block_mask": block_mask,
            "sink_token": sink_token,
            "kv_mask": kv_mask,
            **dropout_inputs,
            **captured,
        }
        params = {
            "attn_scale": scale,
            "dropout_probability": probability,
            "score_mod": function,
            "use_deterministic_algorithm": bool(use_deterministic_algorithm),
            "softmax_precision": softmax_precision,
            "attn_scale_prefolded": attn_scale_prefolded,
            **mask_params(
                "sdpa_backward",
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
        outputs: dict[str, Tensor | None] = {"dQ": None, "dK": None, "dV": None}
        declared = {"dBias": dBias, "dSink_token": dSink_token, "rng_dump": rng_dump}
        outputs.update({port: tensor for port, tensor in declared.items() if tensor is not None})
        made = self._add_node(
            "sdpa_backward",
            inputs=inputs,
            outputs=outputs,
            params=params,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made["dQ"], made["dK"], made["dV"]]

    # The names of older releases.
    scaled_dot_product_flash_attention_backward = sdpa_backward


# -- inference -----------------------------------------------------------------------------------------------


def _infer(node: Any) -> None:
    params, inputs = node.params, node.inputs
    check_required(node, "q", "k", "v", "o", "dO", "stats")
    batch, heads, rows, keys, width = check_shapes(node)
    full = (batch, heads, rows, keys)
    for port, last in (("o", width), ("dO", width), ("stats", 1)):
        tensor, dim = inputs[port], (batch, heads, rows, last)
        if tensor.dim != dim:
            malformed(node, f"{port} does not fit q and v", tensor=tensor, expected=dim, given=tensor.dim)
        if tensor.stride[3] != 1 and last > 1:
            unsupported(node, "the last stride must be 1", tensor=tensor, expected=1, given=tensor.stride)
    if inputs["stats"].data_type not in (None, data_type.FLOAT):
        unsupported(
            node, "stats are FLOAT", tensor=inputs["stats"], expected="FLOAT",
            given=inputs["stats"].data_type.name,
        )  # fmt: skip
    for port, source in (("dBias", "bias"), ("dSink_token", "sink_token")):
        if port in node.outputs and source not in inputs:
            malformed(node, f"{port} needs {source}", tensor=node.outputs[port], next_step=f"pass {source}=")
    check_lengths(node, batch)
    check_flags(node)
    check_band(node, rows, keys)
    check_extras(node, full)
    if params["score_mod"] is not None:
        params["score_mod"].check(node, full)
    refuse(node, "kv_mask", "softmax_precision", "attn_scale_prefolded")
    if rows == keys == 1:
        unsupported(node, "Sq = Skv = 1", given="one row and one key", next_step="pad k and v to two keys")
    dims = {"dQ": inputs["q"].dim, "dK": inputs["k"].dim, "dV": inputs["v"].dim, "rng_dump": full}
    for port, out in node.outputs.items():
        if port == "dSink_token":
            set_data_type(out, data_type.FLOAT)
            if out.data_type is not data_type.FLOAT:
                unsupported(node, "dSink_token is FLOAT", tensor=out, given=out.data_type.name)
        dim = dims[port] if port in dims else inputs["bias" if port == "dBias" else "sink_token"].dim
        check_set_dim(node, out, dim)
        set_dim(out, dim)
        set_stride(out, row_major(out.dim))
        if port in ("dQ", "dK", "dV") and out.stride[-1] != 1 and out.dim[-1] > 1:
            unsupported(node, "the last stride must be 1", tensor=out, expected=1, given=out.stride)


# -- reference -----------------------------------------------------------------------------------------------


def _check(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    from .attention_options import check_contents

    check_contents(params, inputs)


def _reference(call: RefCall) -> dict[str, Array]:
    from .attention_backward_blocks import Gradient  # here for the sake of `import opgraph`, see `deferred`
    from .attention_heads import Band
    from .attention_options import Options, lengths_of

    params, inputs, outputs, real = call.params, call.inputs, call.outputs, call.math.real
    _check(params, inputs)  # once more, now for contents that the graph computed
    q, k, v = (real(inputs[port]) for port in ("q", "k", "v"))
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    len_q, len_kv = lengths_of(inputs, "q", rows), lengths_of(inputs, "kv", keys)
    scale = params["attn_scale"]
    if "attn_scale" in inputs:
        scale = float(inputs["attn_scale"].reshape(-1)[0])
    stats = real(inputs["stats"])
    if params["stats_use_log2"]:
        stats = stats * log(2)
    bottom_right, left, right = band_of(params)
    band = Band(
        len_q or [rows] * batch, len_kv or [keys] * batch, len_q is not None, bottom_right, left, right
    )
    options = Options(call, (batch, heads, rows, keys))
    work = Gradient(
        q,
        k,
        v,
        real(inputs["o"]),
        real(inputs["dO"]),
        stats,
        scale=1.0 if scale is None else scale,
        band=band,
        options=options,
        bias=real(inputs["bias"]) if "bias" in inputs else None,
        want_bias="dBias" in outputs,
        slopes=np.array(alibi_slopes(heads)) if params["use_alibi_mask"] else None,
        sink=real(inputs["sink_token"]) if "dSink_token" in outputs else None,
    )
    work.run()
    result = {"dQ": work.dq, "dK": work.dk, "dV": work.dv}
    if work.dbias is not None:
        result["dBias"] = work.dbias
    if work.dsink is not None:
        result["dSink_token"] = work.dsink
    if "rng_dump" in outputs:
        result["rng_dump"] = options.dump(outputs["rng_dump"].dtype)
    return result


OPS = (OpDef("sdpa_backward", NodeType.SDPA_BACKWARD, _infer, _reference, check=_check),)
