"""Attention on FP8 data with one scale per tensor: `sdpa_fp8` and `sdpa_fp8_backward`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import as_data_type
from ..ir.enums import NodeType, attention_implementation, data_type, diagonal_alignment
from ..ir.errors import tensor_label
from .attention_fp8_blocks import backward, forward, largest
from .attention_heads import Band, Heads
from .base import (
    Array,
    ContentsError,
    GraphOps,
    OpDef,
    RefCall,
    check_required,
    check_scalar,
    check_set_dim,
    graph_op,
    host_scalar,
    malformed,
    number,
    row_major,
    set_data_type,
    set_dim,
    set_stride,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "AttentionFp8Ops"]

_ALIGNMENT = diagonal_alignment  # the class, where an argument of the same name hides it
_TOP_LEFT, _BOTTOM_RIGHT = diagonal_alignment.TOP_LEFT, diagonal_alignment.BOTTOM_RIGHT


class AttentionFp8Ops(GraphOps):
    """Attention on FP8 data.

    A tensor x stands for x * descale_x; a value y is stored as y * scale_y. Scales and descales are FLOAT
    tensors of one element, [1, 1, 1, 1], or Python numbers, which become constants of the plan. sat rounds to
    the output's type, to nearest with ties to even; FP8 saturates. fp8 is that for q's type where
    probabilities are rounded, for dO's type where dS is.
    """

    __slots__ = ()

    @graph_op
    def sdpa_fp8(
        self,
        q: Any,
        k: Any,
        v: Any,
        descale_q: Any = None,
        descale_k: Any = None,
        descale_v: Any = None,
        descale_s: Any = None,
        scale_s: Any = None,
        scale_o: Any = None,
        *,
        attn_scale: Any = None,
        generate_stats: bool | None = None,
        is_inference: bool | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window: int | None = None,
        diagonal_alignment: diagonal_alignment = _TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        dropout: Any = None,
        rng_dump: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        sink_token: Any = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        fn: Callable[..., Any] | None = None,
        sf_o: Any = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Attention on FP8 data; returns [O, Stats, Amax_S, Amax_O].

            S = q k^T * descale_q * descale_k * attn_scale;  P = softmax(S with -inf where masked)
            Amax_S = max |P|;  O_f = (fp8(P * scale_s) v) * descale_v * descale_s;  Amax_O = max |O_f|
            O = sat(O_f * scale_o);  Stats = max_j S + ln sum_j exp(S - max_j S)

        Shapes, heads, masks, padding, `attn_scale` (None is 1), Stats (None unless asked for) and sink_token
        are those of `sdpa`, with the bounds spelt `left_bound`, `right_bound` and `sliding_window`. q, k and
        v are FP8_E4M3 or FP8_E5M2 with channels in multiples of 16. O [B, Hq, Sq, Dv] has the graph's default
        type, FP8, HALF, BFLOAT16 or FLOAT; Amax_S and Amax_O are FLOAT [1, 1, 1, 1]. Rows and keys beyond
        their length take no part in the maxima. scale_s is usually the largest FP8 value and descale_s its
        reciprocal.

        dropout, rng_dump, the paged_attention arguments, fn and sf_o are part of the signature but not
        served: `cudnnGraphNotSupportedError` at `validate()`.

        Raises at `validate()`: `ValueError` for unset scales, ranks other than 4, extents that do not fit,
        bounds out of range, contradicting mask arguments, and lengths without padding mask or the reverse;
        `cudnnGraphNotSupportedError` for other data types, channels that are no multiple of 16, a last
        stride other than 1, heads that do not divide, and BOTTOM_RIGHT or a left bound with Sq > Skv without
        padding. At execution, `ValueError` for a length outside its range.
        """
        scales = {
            "descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v, "descale_s": descale_s,
            "scale_s": scale_s, "scale_o": scale_o,
        }  # fmt: skip
        params = _mask_params(
            "sdpa_fp8", use_causal_mask, use_causal_mask_bottom_right, sliding_window, diagonal_alignment,
            left_bound, right_bound, use_padding_mask, max_total_seq_len_q, max_total_seq_len_kv,
        )  # fmt: skip
        given = {
            "dropout": dropout, "rng_dump": rng_dump, "fn": fn, "sf_o": sf_o,
            "paged_attention_k_table": paged_attention_k_table,
            "paged_attention_v_table": paged_attention_v_table,
            "paged_attention_max_seq_len_kv": paged_attention_max_seq_len_kv,
        }  # fmt: skip
        params["not_served"] = tuple(option for option, value in given.items() if value is not None)
        params["generate_stats"], params["is_inference"] = generate_stats, is_inference
        params["implementation"] = implementation
        outputs = ["O", "Amax_S", "Amax_O"]
        if generate_stats or (generate_stats is None and is_inference is False):
            outputs.insert(1, "Stats")
        made = self._add_node(
            "sdpa_fp8",
            inputs={
                "q": q, "k": k, "v": v,
                **{port: host_scalar(self, value) for port, value in scales.items()},
                "attn_scale": host_scalar(self, attn_scale),
                "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv, "sink_token": sink_token,
            },
            outputs=outputs,
            params=params,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )  # fmt: skip
        return [made.get(port) for port in ("O", "Stats", "Amax_S", "Amax_O")]

    @graph_op
    def sdpa_fp8_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any = None,
        dO: Any = None,
        stats: Any = None,
        descale_q: Any = None,
        descale_k: Any = None,
        descale_v: Any = None,
        descale_o: Any = None,
        descale_dO: Any = None,
        descale_s: Any = None,
        descale_dP: Any = None,
        scale_s: Any = None,
        scale_dQ: Any = None,
        scale_dK: Any = None,
        scale_dV: Any = None,
        scale_dP: Any = None,
        *,
        attn_scale: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window: int | None = None,
        diagonal_alignment: diagonal_alignment = _TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        dropout: Any = None,
        rng_dump: Any = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_deterministic_algorithm: bool = False,
        fn: Callable[..., Any] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of `sdpa_fp8`; returns [dQ, dK, dV, amax_dQ, amax_dK, amax_dV, amax_dP].

            P = exp(q k^T * descale_q * descale_k * attn_scale - stats), 0 where masked
            dV = fp8(P * scale_s)^T dO * descale_s * descale_dO
            dP = dO v^T * descale_dO * descale_v;  Delta = rowsum(o * dO) * descale_o * descale_dO
            dS = P * (dP - Delta) * attn_scale;  amax_dP = max |dS|;  dSq = fp8(dS * scale_dP)
            dQ = dSq k * descale_k * descale_dP;  dK = dSq^T q * descale_q * descale_dP

        amax_dQ, amax_dK and amax_dV are the maxima of |dQ|, |dK| and |dV| as they stand here; each output is
        then sat(dX * scale_dX). Grouped heads add up in their key or value head. Rows and keys beyond their
        length have gradient 0 and are not read.

        Shapes: q, k, v, masks and padding as for `sdpa_fp8`; o and dO [B, Hq, Sq, Dv]; stats FLOAT
        [B, Hq, Sq, 1]; dQ, dK, dV with the dims of q, k and v, row-major unless set; the maxima FLOAT
        [1, 1, 1, 1]. q, k, v and dO are FP8; o and the gradients are FP8, HALF, BFLOAT16 or FLOAT.
        `use_deterministic_algorithm` is a hint. dropout, rng_dump and fn are not served. Errors are those of
        `sdpa_fp8`.
        """
        scales = {
            "descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v, "descale_o": descale_o,
            "descale_dO": descale_dO, "descale_s": descale_s, "descale_dP": descale_dP, "scale_s": scale_s,
            "scale_dQ": scale_dQ, "scale_dK": scale_dK, "scale_dV": scale_dV, "scale_dP": scale_dP,
        }  # fmt: skip
        params = _mask_params(
            "sdpa_fp8_backward", use_causal_mask, use_causal_mask_bottom_right, sliding_window,
            diagonal_alignment, left_bound, right_bound, use_padding_mask, max_total_seq_len_q,
            max_total_seq_len_kv,
        )  # fmt: skip
        given = {"dropout": dropout, "rng_dump": rng_dump, "fn": fn}
        params["not_served"] = tuple(option for option, value in given.items() if value is not None)
        params["use_deterministic_algorithm"] = bool(use_deterministic_algorithm)
        made = self._add_node(
            "sdpa_fp8_backward",
            inputs={
                "q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats,
                **{port: host_scalar(self, value) for port, value in scales.items()},
                "attn_scale": host_scalar(self, attn_scale), "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv,
            },
            outputs=_GRADIENTS,
            params=params,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )  # fmt: skip
        return [made[port] for port in _GRADIENTS]


_GRADIENTS = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")


def _mask_params(
    op: str,
    causal: bool,
    causal_bottom_right: bool,
    window: int | None,
    alignment: Any,
    left: int | None,
    right: int | None,
    padding: bool,
    total_q: int | None,
    total_kv: int | None,
) -> dict[str, Any]:
    if not isinstance(alignment, _ALIGNMENT):
        raise TypeError(f"{op}: diagonal_alignment is a diagonal_alignment, given {alignment!r}")
    bounds = {"sliding_window": window, "left_bound": left, "right_bound": right}
    totals = {"max_total_seq_len_q": total_q, "max_total_seq_len_kv": total_kv}
    return {
        "use_causal_mask": bool(causal),
        "use_causal_mask_bottom_right": bool(causal_bottom_right),
        "diagonal_alignment": alignment,
        "use_padding_mask": bool(padding),
        **{key: None if value is None else index(value) for key, value in {**bounds, **totals}.items()},
    }


def _band_of(params: Mapping[str, Any]) -> tuple[bool, int | None, int | None]:
    """(bottom right, left bound, right bound), the other spellings resolved."""
    causal = params["use_causal_mask"] or params["use_causal_mask_bottom_right"]
    left = params["left_bound"] if params["left_bound"] is not None else params["sliding_window"]
    bottom_right = params["use_causal_mask_bottom_right"] or params["diagonal_alignment"] is _BOTTOM_RIGHT
    return bottom_right, left, 0 if causal else params["right_bound"]


# -- inference -----------------------------------------------------------------------------------------------

_FP8 = (data_type.FP8_E4M3, data_type.FP8_E5M2)
_STORED = (*_FP8, data_type.HALF, data_type.BFLOAT16, data_type.FLOAT)


def _infer_forward(node: Any) -> None:
    batch, heads, rows, width = _check_common(node, ("descale_q", "descale_k", "descale_v", "descale_s"))
    check_scalar(node, "scale_s")
    check_scalar(node, "scale_o")
    params, sink = node.params, node.inputs.get("sink_token")
    if params["generate_stats"] is not None and params["generate_stats"] is params["is_inference"]:
        malformed(
            node, "generate_stats and is_inference contradict each other",
            given=f"both {params['generate_stats']}", next_step="pass generate_stats alone",
        )  # fmt: skip
    if sink is not None and sink.dim != (1, heads, 1, 1):
        malformed(node, "one sink per head", tensor=sink, expected=(1, heads, 1, 1), given=sink.dim)
    for port, out in node.outputs.items():
        if port == "O":
            _set(node, out, (batch, heads, rows, width), _STORED)
        else:
            dim = (batch, heads, rows, 1) if port == "Stats" else (1, 1, 1, 1)
            set_data_type(out, data_type.FLOAT)
            _set(node, out, dim, (data_type.FLOAT,))


def _infer_backward(node: Any) -> None:
    inputs = node.inputs
    check_required(node, "o", "dO", "stats")
    scales = ("q", "k", "v", "o", "dO", "s", "dP")
    batch, heads, rows, width = _check_common(node, tuple(f"descale_{each}" for each in scales))
    for each in ("s", "dQ", "dK", "dV", "dP"):
        check_scalar(node, f"scale_{each}")
    for port, last, kinds in (("o", width, _STORED), ("dO", width, _FP8), ("stats", 1, (data_type.FLOAT,))):
        tensor, dim = inputs[port], (batch, heads, rows, last)
        if tensor.dim != dim:
            malformed(node, f"{port} does not fit q and v", tensor=tensor, expected=dim, given=tensor.dim)
        _check_type(node, tensor, kinds)
    for port, out in node.outputs.items():
        if port.startswith("amax"):
            set_data_type(out, data_type.FLOAT)
            _set(node, out, (1, 1, 1, 1), (data_type.FLOAT,))
        else:
            _set(node, out, inputs[port[1:].lower()].dim, _STORED)


def _set(node: Any, out: Any, dim: tuple[int, ...], kinds: Sequence[data_type]) -> None:
    _check_type(node, out, kinds)
    check_set_dim(node, out, dim)
    set_dim(out, dim)
    set_stride(out, row_major(out.dim))


def _check_type(node: Any, tensor: Any, kinds: Sequence[data_type]) -> None:
    if tensor.data_type not in (None, *kinds):
        expected = ", ".join(kind.name for kind in kinds)
        unsupported(
            node, "the data type is not one of this port", tensor=tensor, expected=expected,
            given=tensor.data_type.name,
        )  # fmt: skip


def _check_common(node: Any, scales: Sequence[str]) -> tuple[int, int, int, int]:
    """(B, Hq, Sq, Dv)"""
    check_required(node, "q", "k", "v")
    q, k, v = (node.inputs[port] for port in ("q", "k", "v"))
    for port, tensor in (("q", q), ("k", k), ("v", v)):
        if len(tensor.dim) != 4 or len(tensor.stride) != 4:
            malformed(
                node, f"{port} has the 4 axes batch, head, row, channel", tensor=tensor,
                expected="4 extents and 4 strides", given=f"dim {tensor.dim}, stride {tensor.stride}",
            )  # fmt: skip
        _check_type(node, tensor, _FP8)
        if tensor.dim[3] % 16:
            unsupported(
                node, "the channels are a multiple of 16", tensor=tensor, expected="16, 32, ..", given=tensor.dim
            )
        if tensor.stride[3] != 1:
            unsupported(node, "the last stride must be 1", tensor=tensor, expected=1, given=tensor.stride)
    batch, heads, rows, channels = q.dim
    for tensor, axis, extent, of in (
        (k, 0, batch, q), (v, 0, batch, q), (k, 3, channels, q), (v, 2, k.dim[2], k),
    ):  # fmt: skip
        if tensor.dim[axis] != extent:
            malformed(
                node, f"axis {axis} must be that of {tensor_label(of)}", tensor=tensor,
                expected=f"{extent} at axis {axis}", given=tensor.dim,
            )  # fmt: skip
    for tensor in (k, v):
        if heads % tensor.dim[1] if tensor.dim[1] else heads:
            unsupported(
                node, "the heads must divide those of q", tensor=tensor,
                expected=f"a divisor of {heads} at axis 1", given=tensor.dim,
            )  # fmt: skip
    for port in scales:
        check_scalar(node, port)
    if "attn_scale" in node.inputs:
        check_scalar(node, "attn_scale")
    _check_lengths(node, batch)
    _check_band(node, rows, k.dim[2])
    for option in node.params["not_served"]:
        unsupported(node, f"option {option} is not served", next_step=f"leave {option} out")
    return batch, heads, rows, v.dim[3]


def _check_lengths(node: Any, batch: int) -> None:
    params, inputs = node.params, node.inputs
    given = [port for port in ("seq_len_q", "seq_len_kv") if port in inputs]
    if len(given) == 1 or bool(given) is not params["use_padding_mask"]:
        malformed(
            node, "the padding mask goes with the lengths of both sides",
            expected="use_padding_mask=True, seq_len_q and seq_len_kv, or none of them",
            given=", ".join([f"use_padding_mask={params['use_padding_mask']}", *given]),
        )  # fmt: skip
    for port in given:
        tensor = inputs[port]
        if number(tensor.dim) != batch or tensor.dim[0] != batch:
            malformed(
                node, f"{port} holds one length for each batch entry", tensor=tensor,
                expected=f"({batch}, 1, 1, 1) or ({batch},)", given=tensor.dim,
            )  # fmt: skip
        if tensor.data_type not in (None, data_type.INT32, data_type.INT64):
            malformed(node, f"{port} is INT32", tensor=tensor, expected="INT32", given=tensor.data_type.name)
    for port, tensor in (*inputs.items(), *node.outputs.items()):
        if tensor.ragged_offset is not None and not given:
            unsupported(node, f"{port} is ragged, which needs the padding mask", tensor=tensor)
    for side, ports in (("q", ("q",)), ("kv", ("k", "v"))):
        total = params[f"max_total_seq_len_{side}"]
        if total is not None and all(inputs[port].ragged_offset is None for port in ports):
            unsupported(node, f"max_total_seq_len_{side} needs a ragged {' or '.join(ports)}")


def _check_band(node: Any, rows: int, keys: int) -> None:
    params = node.params
    causal, window = params["use_causal_mask"], params["sliding_window"]
    bottom_right, left, right = _band_of(params)
    if causal and bottom_right:
        malformed(node, "use_causal_mask is TOP_LEFT", given="BOTTOM_RIGHT too", next_step="pass one of them")
    if right == 0 and params["right_bound"] not in (None, 0):
        malformed(node, "a causal mask has right bound 0", given=params["right_bound"])
    if window is not None and left != window:
        malformed(node, f"sliding_window {window} and left_bound {left} contradict each other")
    if left is not None and left < 1:
        malformed(node, "the left bound counts the diagonal", expected="1 or more", given=left)
    if right is not None and right < 0:
        malformed(node, "the right bound must not be negative", expected="0 or more", given=right)
    if rows <= keys or params["use_padding_mask"]:
        return
    given, next_step = f"Sq {rows}, Skv {keys}", "pass lengths with use_padding_mask=True"
    if left is not None:
        unsupported(node, "a left bound needs Sq <= Skv", given=given, next_step=next_step)
    if bottom_right and right is not None:
        unsupported(node, "BOTTOM_RIGHT needs Sq <= Skv", given=given, next_step=next_step)


# -- reference -----------------------------------------------------------------------------------------------


def _scalars(call: RefCall) -> Callable[[str], float]:
    def value(port: str) -> float:
        return float(call.inputs[port].reshape(-1)[0])

    return value


def _setting(call: RefCall) -> tuple[Heads, Band, float]:
    """Heads, band and attn_scale of a call."""
    inputs, real = call.inputs, call.math.real
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    _check(call.params, inputs)  # once more, now for lengths that the graph computed
    lengths = [
        inputs[port].reshape(-1).tolist() if port in inputs else [most] * q.shape[0]
        for port, most in (("seq_len_q", q.shape[2]), ("seq_len_kv", k.shape[2]))
    ]
    band = Band(lengths[0], lengths[1], "seq_len_q" in inputs, *_band_of(call.params))
    scale = _scalars(call)("attn_scale") if "attn_scale" in inputs else 1.0
    return Heads(real(q), real(k), real(v)), band, scale


def _kind(array: Array) -> data_type:
    found = as_data_type(array.dtype)
    assert found is not None
    return found


def _one(value: Any) -> Array:
    return np.asarray(value).reshape(1, 1, 1, 1)


def _forward_reference(call: RefCall) -> dict[str, Array]:
    value, inputs, shape = _scalars(call), call.inputs, call.outputs["O"].shape
    heads, band, scale = _setting(call)
    out = np.zeros(shape, heads.q.dtype)
    stats = np.full((*shape[:3], 1), -np.inf, out.dtype)
    sink = None
    if "sink_token" in inputs:
        sink = heads.by_unit(call.math.real(inputs["sink_token"]))[0]
    with np.errstate(all="ignore"):
        top_s, top_o = forward(
            heads,
            band,
            heads.by_unit(out),
            heads.by_unit(stats),
            scale=value("descale_q") * value("descale_k") * scale,
            scale_p=value("scale_s"),
            scale_v=value("descale_v") * value("descale_s"),
            kind=_kind(inputs["q"]),
            sink=sink,
        )
        out *= value("scale_o")
    result = {"O": out, "Amax_S": _one(top_s), "Amax_O": _one(top_o)}
    if "Stats" in call.outputs:
        result["Stats"] = stats
    return result


def _backward_reference(call: RefCall) -> dict[str, Array]:
    value, inputs, real = _scalars(call), call.inputs, call.math.real
    heads, band, scale = _setting(call)
    grad = real(inputs["dO"])
    with np.errstate(all="ignore"):
        delta = np.einsum("bhsd,bhsd->bhs", real(inputs["o"]), grad)[..., None]
        delta *= value("descale_o") * value("descale_dO")
        dq, dk, dv, top = backward(
            heads,
            band,
            heads.by_unit(grad),
            heads.by_unit(delta),
            heads.by_unit(real(inputs["stats"])),
            scale=value("descale_q") * value("descale_k") * scale,
            attn_scale=scale,
            scale_p=value("scale_s"),
            scale_ds=value("scale_dP"),
            scale_dp=value("descale_dO") * value("descale_v"),
            kind=_kind(inputs["q"]),
            grad_kind=_kind(inputs["dO"]),
        )
        result = {"amax_dP": _one(top)}
        for name, made, factor in (
            ("dQ", dq.reshape(inputs["q"].shape), value("descale_k") * value("descale_dP")),
            ("dK", heads.summed(dk, inputs["k"].shape[1]), value("descale_q") * value("descale_dP")),
            ("dV", heads.summed(dv, inputs["v"].shape[1]), value("descale_s") * value("descale_dO")),
        ):
            made *= factor
            result[f"amax_{name}"] = _one(largest(made))
            made *= value(f"scale_{name}")
            result[name] = made
    return result


def _check(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    """Raises `ContentsError` for lengths that q and k do not have."""
    for port, model in (("seq_len_q", "q"), ("seq_len_kv", "k")):
        if port not in inputs or model not in inputs:
            continue
        most = inputs[model].shape[2]
        for entry, length in enumerate(inputs[port].reshape(-1).tolist()):
            if not 0 <= length <= most:
                raise ContentsError(port, "lengths are in range", f"0 to {most} at entry {entry}", length)


OPS = (
    OpDef("sdpa_fp8", NodeType.SDPA_FP8, _infer_forward, _forward_reference, check=_check),
    OpDef("sdpa_fp8_backward", NodeType.SDPA_FP8_BACKWARD, _infer_backward, _backward_reference, check=_check),
)
