"""Cases of `sdpa`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.layouts import row_major
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, diagonal_alignment

__all__ = ["CASES", "Attention", "attention", "visible"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator


def visible(
    dims: Sequence[int],
    *,
    left: int | None = None,
    right: int | None = None,
    bottom_right: bool = False,
    len_q: Sequence[int] | None = None,
    len_kv: Sequence[int] | None = None,
) -> Array:
    """[B, Hq, Sq, Skv]: which key each query row sees."""
    batch, _, rows, keys = dims
    i, j = np.arange(rows)[:, None], np.arange(keys)
    seen = np.ones(dims, np.bool_)
    for b in range(batch):
        n_q = rows if len_q is None else len_q[b]
        n_kv = keys if len_kv is None else len_kv[b]
        delta = n_kv - n_q if bottom_right else 0
        keep = (i < n_q) & (j < n_kv)
        if right is not None:
            keep &= j <= i + delta + right
        if left is not None:
            keep &= j > i + delta - left
        seen[b] &= keep
    return seen


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes: a geometric row for the power of two below, every other one of the next row for the
    rest."""
    n = 2 ** int(math.log2(heads))
    return [2 ** (-8 * (i + 1) / n) for i in range(n)] + [
        2 ** (-4 * (2 * j + 1) / n) for j in range(heads - n)
    ]


def attention(
    xp: Any, values: Mapping[str, Any], *, scale: float, seen: Array, alibi: bool, rows_used: Array
) -> dict[str, Any]:
    """O, Stats, score_max and score_sum_exp: the formula in NumPy or torch. `rows_used` [B, 1, Sq, 1]: rows
    in use."""
    q = values["q"]
    heads, rows, keys = q.shape[1], q.shape[2], values["k"].shape[2]
    k, v = (values[name][:, np.arange(heads) // (heads // values[name].shape[1])] for name in ("k", "v"))
    added = 0.0
    if alibi:
        added = np.array(slopes(heads))[:, None, None] * (np.arange(keys) - np.arange(rows)[:, None])
    added = np.where(seen, added, -np.inf)
    if xp is not np:
        added = xp.from_numpy(added)
    scores = scale * (q @ xp.swapaxes(k, -1, -2)) + added
    if "bias" in values:
        scores = scores + values["bias"]
    if keys:
        top = scores.max(-1, keepdims=True) if xp is np else scores.amax(-1, keepdim=True)
    else:
        top = scores.sum(-1, keepdims=True) - np.inf
    used = rows_used if xp is np else xp.from_numpy(rows_used)
    sink = None
    if "sink" in values:
        sink = xp.where(used, values["sink"], xp.zeros_like(values["sink"]) - np.inf)
        top = xp.maximum(top, sink)
    shift = xp.where(top == -np.inf, xp.zeros_like(top), top)
    weights = xp.exp(scores - shift)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + xp.exp(sink - shift)
    chances = weights / xp.where(total == 0, xp.ones_like(total), total)
    out = chances @ v
    if xp is not np and sink is None and keys:
        # The framework's own answer, but for rows that see no key.
        mask = added + values["bias"] if "bias" in values else added
        mask = mask.expand(scores.shape)
        theirs = xp.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = xp.where(total == 0, out, theirs)
    return {"O": out, "Stats": top + xp.log(total), "score_max": top, "score_sum_exp": total}


def bshd(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides of [B, H, S, D] held as [B, S, H, D]."""
    _, heads, rows, width = dim
    return (rows * heads * width, width, heads * width, 1)


def packed(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides of one third of a packed [B, S, 3, H, D] projection."""
    _, heads, rows, width = dim
    return (rows * 3 * heads * width, width, 3 * heads * width, 1)


class Attention:
    """`sdpa` with options."""

    op = id = "sdpa"
    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)

    def problem(
        self,
        id: str,
        rng: Rng,
        dtype: data_type,
        q: Sequence[int],
        kv: Sequence[int] = (),
        *,
        heads_v: int = 0,
        width_v: int = 0,
        layout: Any = row_major,
        options: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = ("O", "Stats"),
        bias: Sequence[int] | None = None,
        sink: bool = False,
        scale_tensor: float | None = None,
        lengths: tuple[Sequence[int], Sequence[int]] | None = None,
        band: Mapping[str, Any] | None = None,
        out_layout: Any = None,
    ) -> Problem:
        """`kv` is (heads of k, rows); `options` go to the operator, `band` tells the truth which keys are
        seen."""
        options = dict(options or {})
        batch, heads, rows, width = q
        heads_k, keys = kv or (heads, rows)
        k, v = (batch, heads_k, keys, width), (batch, heads_v or heads_k, keys, width_v or width)
        inputs = {
            name: Input(rng.standard_normal(dim), dtype, layout(dim))
            for name, dim in (("q", q), ("k", k), ("v", v))
        }
        scale = options.get("attn_scale") or 1.0
        if scale_tensor is not None:
            scale = float(np.float32(scale_tensor))
            inputs["attn_scale"] = Input(np.full((1, 1, 1, 1), scale_tensor), data_type.FLOAT, by_value=True)
        if bias is not None:
            inputs["bias"] = Input(rng.standard_normal(bias), dtype)
        if sink:
            inputs["sink"] = Input(rng.standard_normal((1, heads, 1, 1)), data_type.FLOAT)
        if lengths is not None:
            for name, values in zip(("seq_len_q", "seq_len_kv"), lengths, strict=True):
                inputs[name] = Input(np.reshape(values, (batch, 1, 1, 1)), data_type.INT32, virtual_ok=False)
            options["use_padding_mask"] = True
        full = (batch, heads, rows, keys)
        len_q, len_kv = lengths or (None, None)
        seen = visible(full, len_q=len_q, len_kv=len_kv, **(band or {}))
        used = np.arange(rows)[:, None] < np.reshape(len_q or [rows] * batch, (batch, 1, 1, 1))

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            named = {
                key: tensors[key]
                for key in ("attn_scale", "bias", "seq_len_q", "seq_len_kv")
                if key in tensors
            }
            if sink:
                named["sink_token"] = tensors["sink"]
            for port in ("score_max", "score_sum_exp"):
                if port in outputs:
                    named[port] = graph.tensor(
                        [*q[:3], 1], data_type=data_type.FLOAT, is_virtual=True, name=port
                    )
            o, stats = graph.sdpa(
                tensors["q"], tensors["k"], tensors["v"],
                generate_stats="Stats" in outputs, **named, **options,
            )  # fmt: skip
            if out_layout is not None:
                o.set_dim([*q[:3], v[3]]).set_stride(out_layout([*q[:3], v[3]]))
            found = {"O": o, "Stats": stats, **named}
            assert (stats is None) == ("Stats" not in outputs), f"{id}: Stats is {stats}"
            return {port: found[port] for port in outputs}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            found = attention(
                xp, values, scale=scale, seen=seen, alibi=bool(options.get("use_alibi_mask")), rows_used=used
            )
            if options.get("stats_use_log2"):
                found["Stats"] = found["Stats"] / math.log(2)
            return {port: found[port] for port in outputs}

        o_dim, row = (*q[:3], v[3]), (*q[:3], 1)
        expect = {"O": Expect(o_dim, (out_layout or row_major)(o_dim), dtype)}
        for port in outputs[1:]:
            statistic_of = dtype if port in ("Stats", "score_max") else None
            expect[port] = Expect(row, row_major(row), data_type.FLOAT, statistic_of=statistic_of)
        return Problem(f"sdpa {dtype.name}: {id}", inputs, declare, truth, expect, io=dtype)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        def problem(id: str, *args: Any, **kwargs: Any) -> Problem:
            return self.problem(id, rng, dtype, *args, **kwargs)

        q = (2, 4, 7, 8)
        causal: dict[str, Any] = {"options": {"use_causal_mask": True}, "band": {"right": 0}}
        yield problem("plain", q)
        yield problem("one", (1, 1, 1, 1))
        yield problem("no rows", (2, 2, 0, 8), (2, 5))
        yield problem("no keys", (2, 2, 3, 8), (2, 0))
        yield problem("no batch", (0, 2, 3, 8))
        yield problem("scale", q, options={"attn_scale": 0.25})
        yield problem("scale tensor", q, scale_tensor=0.3)
        yield problem("without Stats", q, outputs=["O"])
        yield problem("one query row", (2, 4, 1, 16), (4, 33))
        yield problem("more rows than keys", (1, 2, 9, 8), (2, 4))
        yield problem("tile edges", (1, 2, 129, 24), (2, 127), options={"attn_scale": 0.2})
        yield problem("wide values", (1, 2, 5, 8), (2, 6), width_v=24)
        yield problem("grouped heads", (2, 6, 5, 8), (2, 9))
        yield problem("one key head", (1, 4, 5, 8), (1, 5))
        yield problem("k and v heads differ", (1, 6, 5, 8), (3, 5), heads_v=2)
        yield problem("BSHD", q, layout=bshd, out_layout=bshd)
        yield problem("packed projection", q, layout=packed)
        yield problem("causal", q, **causal)
        yield problem("causal, rows unlike keys", (1, 2, 5, 8), (2, 9), **causal)
        yield problem(
            "causal bottom right", (1, 2, 5, 8), (2, 9),
            options={"use_causal_mask_bottom_right": True}, band={"right": 0, "bottom_right": True},
        )  # fmt: skip
        yield problem(
            "window",
            q,
            options={"use_causal_mask": True, "sliding_window_length": 3},
            band={"left": 3, "right": 0},
        )
        for left, right, bottom_right in (
            (1, 0, False),
            (3, 2, False),
            (2, None, False),
            (2, 1, True),
            (None, 0, True),
        ):
            anchor = diagonal_alignment.BOTTOM_RIGHT if bottom_right else diagonal_alignment.TOP_LEFT
            yield problem(
                f"band {left} {right} {anchor.name}", (1, 2, 5, 8), (2, 9),
                options={
                    "diagonal_alignment": anchor, "diagonal_band_left_bound": left,
                    "diagonal_band_right_bound": right,
                },
                band={"left": left, "right": right, "bottom_right": bottom_right},
            )  # fmt: skip
        for bias in ((1, 1, 7, 7), (2, 1, 7, 7), (1, 4, 7, 7), (2, 4, 7, 7), (1, 1, 1, 7)):
            yield problem(f"bias {bias}", q, bias=bias)
        yield problem("bias, causal", q, bias=(1, 4, 7, 7), **causal)
        yield problem(
            "alibi",
            (1, 6, 7, 8),
            options={"use_alibi_mask": True, "use_causal_mask": True},
            band={"right": 0},
        )
        yield problem("sink", q, sink=True)
        yield problem("sink, causal", q, sink=True, **causal)
        padding: dict[str, Any] = {"lengths": ([3, 7], [5, 0])}
        yield problem("padding", q, **padding)
        yield problem("padding, causal", q, **padding, **causal)
        yield problem("padding, sink", q, sink=True, **padding)
        yield problem(
            "padding, bottom right", q, lengths=([3, 7], [5, 4]),
            options={"use_causal_mask_bottom_right": True}, band={"right": 0, "bottom_right": True},
        )  # fmt: skip
        yield problem("base 2", q, options={"stats_use_log2": True})
        yield problem("all statistics", q, outputs=["O", "Stats", "score_max", "score_sum_exp"], **causal)
        yield problem("virtual", q, **causal).with_virtual_edges()


CASES = (Attention(),)
