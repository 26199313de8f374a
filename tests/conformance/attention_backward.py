"""Cases of `sdpa_backward`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.attention import bshd, slopes, visible
from conformance.calculus import vjp
from conformance.layouts import row_major
from conformance.memory import exact
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, diagonal_alignment

__all__ = ["CASES", "Setting", "tiles_of"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator


def tiles_of(rng: Rng, dims: Sequence[int]) -> tuple[Array, Array]:
    """A random block mask for scores [B, Hq, Sq, Skv], as bits and as elements."""
    batch, heads, rows, keys = dims
    tall, wide = -(-rows // 128), -(-keys // 128)
    keep = rng.random((batch, heads, tall, wide)) < 0.6
    bits = np.zeros((batch, heads, tall, -(-wide // 8)), np.uint8)
    for j in range(wide):
        bits[..., j // 8] |= keep[..., j].astype(np.uint8) << (j % 8)
    return bits, keep.repeat(128, 2).repeat(128, 3)[:, :, :rows, :keys]


class Setting:
    """Shapes and options of one attention."""

    def __init__(
        self,
        q: Sequence[int],
        kv: Sequence[int] = (),
        *,
        heads_v: int = 0,
        width_v: int = 0,
        options: Mapping[str, Any] | None = None,
        band: Mapping[str, Any] | None = None,
        lengths: tuple[Sequence[int], Sequence[int]] | None = None,
        bias: Sequence[int] | None = None,
        sink: bool = False,
        mask: Sequence[int] | None = None,
        tiles: bool = False,
        scale: float = 1.0,
        layout: Any = row_major,
    ) -> None:
        """`options` go to the operator, `band` tells the truth which keys are seen; `mask` are the dims of a
        dropout mask."""
        batch, heads, rows, width = q
        heads_k, keys = kv or (heads, rows)
        heads_v = heads_v or heads_k
        self.q, self.k, self.v = tuple(q), (batch, heads_k, keys, width), (batch, heads_v, keys, width_v or width)
        self.o, self.full = (*self.q[:3], self.v[3]), (batch, heads, rows, keys)
        self.options, self.lengths, self.bias, self.sink = dict(options or {}), lengths, bias, sink
        self.mask, self.tiles, self.scale, self.layout = mask, tiles, scale, layout
        len_q, len_kv = lengths or ([rows] * batch, [keys] * batch)
        self.seen = visible(self.full, len_q=len_q, len_kv=len_kv, **(band or {}))
        self.used_q = np.arange(rows)[:, None] < np.reshape(len_q, (batch, 1, 1, 1))
        self.used_kv = np.arange(keys)[:, None] < np.reshape(len_kv, (batch, 1, 1, 1))
        self.to_k, self.to_v = np.arange(heads) // (heads // heads_k), np.arange(heads) // (heads // heads_v)

    def scores(self, xp: Any, at: Mapping[str, Any]) -> Any:
        """Before masking; what lies beyond the lengths counts as 0."""
        q, k = _only(xp, self.used_q, at["q"]), _only(xp, self.used_kv, at["k"])[:, self.to_k]
        scores = self.scale * (q @ xp.swapaxes(k, 2, 3))
        if "bias" in at:
            scores = scores + at["bias"]
        if self.options.get("use_alibi_mask"):
            _, heads, rows, keys = self.full
            added = np.array(slopes(heads))[:, None, None] * (np.arange(keys) - np.arange(rows)[:, None])
            scores = scores + (added if xp is np else xp.from_numpy(added))
        return scores

    def forward(self, xp: Any, at: Mapping[str, Any]) -> dict[str, Any]:
        """O and Stats, differentiable by torch: no infinity takes part."""
        scores = self.scores(xp, at)
        seen = self.seen if xp is np else xp.from_numpy(self.seen)
        top = np.where(self.seen, exact(np.asarray(scores if xp is np else scores.detach())), -np.inf)
        top = top.max(-1, keepdims=True, initial=-np.inf)
        if self.sink:
            top = np.maximum(top, np.asarray(at["sink"] if xp is np else at["sink"].detach()))
        shift = np.where(np.isneginf(top), 0, top)
        shift = shift if xp is np else xp.from_numpy(shift)
        zero = xp.zeros_like(scores)
        weights = xp.where(seen, xp.exp(xp.where(seen, scores - shift, zero)), zero)
        total = weights.sum(-1, keepdims=True)
        if self.sink:
            total = total + xp.exp(at["sink"] - shift)
        chances = weights / xp.where(total == 0, xp.ones_like(total), total)
        if self.mask is not None:
            chances = chances * at["mask"] * at["mask_scale"]
        out = chances @ _only(xp, self.used_kv, at["v"])[:, self.to_v]
        return {"O": _only(xp, self.used_q, out), "Stats": xp.log(total) + shift}

    def backward(self, at: Mapping[str, Array]) -> dict[str, Array]:
        """The formulas of the gradient."""
        stats = np.where(self.used_q, at["stats"], 0)
        scores = np.where(self.seen, self.scores(np, at), -np.inf)
        chances = np.exp(scores - np.where(np.isneginf(stats), 0, stats))
        factors = at["mask"] * at["mask_scale"] if self.mask is not None else np.ones((1, 1, 1, 1))
        q, grad, o = (_only(np, self.used_q, at[name]) for name in ("q", "dO", "o"))
        k, v = _only(np, self.used_kv, at["k"])[:, self.to_k], _only(np, self.used_kv, at["v"])[:, self.to_v]
        delta = (grad * o).sum(-1, keepdims=True)
        ds = chances * (grad @ np.swapaxes(v, 2, 3) * factors - delta)
        by_head = {
            "dK": (self.scale * np.swapaxes(ds, 2, 3) @ q, self.to_k, self.k),
            "dV": (np.swapaxes(chances * factors, 2, 3) @ grad, self.to_v, self.v),
        }
        found = {"dQ": self.scale * ds @ k}
        for name, (heads, to, dim) in by_head.items():
            found[name] = np.zeros(dim)
            for head, of in enumerate(to):
                found[name][:, of] += heads[:, head]
        if self.bias is not None:
            one = tuple(axis for axis, extent in enumerate(self.bias) if extent == 1)
            found["dBias"] = ds.sum(one, keepdims=True)
        if self.sink:
            found["dSink"] = -(np.exp(at["sink"] - stats) * delta * self.used_q).sum((0, 2), keepdims=True)
        return found


def _only(xp: Any, used: Array, array: Any) -> Any:
    """0 in rows beyond the length, whatever they hold."""
    if xp is np:
        return np.where(used, array, 0)
    return xp.where(xp.from_numpy(used), array, xp.zeros_like(array))


def settings(rng: Rng) -> Iterator[tuple[str, Setting, dict[str, Any]]]:
    """(name, setting, more inputs)"""
    q = (2, 4, 7, 8)
    causal: dict[str, Any] = {"options": {"use_causal_mask": True}, "band": {"right": 0}}
    bottom: dict[str, Any] = {
        "options": {"use_causal_mask_bottom_right": True},
        "band": {"right": 0, "bottom_right": True},
    }
    padding: dict[str, Any] = {"lengths": ([3, 7], [5, 0])}
    for name, setting in (
        ("plain", Setting(q)),
        ("scale", Setting(q, scale=0.3)),
        ("one row", Setting((2, 3, 1, 8), (3, 9))),
        ("more rows than keys", Setting((1, 2, 9, 8), (2, 4))),
        ("tile edges", Setting((1, 2, 129, 16), (2, 127), scale=0.25)),
        ("wide values", Setting((1, 2, 5, 8), (2, 6), width_v=24)),
        ("no rows", Setting((1, 2, 0, 8), (2, 3))),
        ("no keys", Setting((1, 2, 3, 8), (2, 0))),
        ("grouped heads", Setting((2, 6, 5, 8), (2, 9))),
        ("one key head", Setting((1, 4, 5, 8), (1, 5))),
        ("k and v heads differ", Setting((1, 12, 5, 8), (4, 5), heads_v=6)),
        ("BSHD", Setting(q, layout=bshd)),
        ("causal", Setting(q, **causal)),
        ("causal bottom right", Setting((1, 2, 5, 8), (2, 9), **bottom)),
        ("alibi", Setting((1, 6, 7, 8), options={**causal["options"], "use_alibi_mask": True}, band=causal["band"])),
        ("sink", Setting(q, sink=True)),
        ("sink, causal, grouped", Setting((2, 4, 7, 8), (2, 7), sink=True, **causal)),
        ("padding", Setting(q, **padding)),
        ("padding, causal", Setting(q, **padding, **causal)),
        ("padding, bottom right", Setting(q, lengths=([3, 7], [5, 4]), **bottom)),
        ("padding, sink, bias", Setting(q, sink=True, bias=(1, 4, 7, 7), **padding)),
        ("dropout mask", Setting(q, mask=(2, 4, 7, 7))),
        ("dropout mask for all, padding", Setting(q, mask=(1, 1, 7, 7), **padding)),
        ("base 2", Setting(q, options={"stats_use_log2": True})),
        ("deterministic", Setting(q, options={"use_deterministic_algorithm": True}, scale=0.5)),
    ):
        yield name, setting, {}
    for left, right, bottom_right in ((1, 0, False), (3, 2, False), (2, None, False), (2, 1, True)):
        anchor = diagonal_alignment.BOTTOM_RIGHT if bottom_right else diagonal_alignment.TOP_LEFT
        options = {
            "diagonal_alignment": anchor, "diagonal_band_left_bound": left, "diagonal_band_right_bound": right,
        }  # fmt: skip
        band = {"left": left, "right": right, "bottom_right": bottom_right}
        yield f"band {left} {right} {anchor.name}", Setting((1, 2, 5, 8), (2, 9), options=options, band=band), {}
    for bias in ((1, 1, 7, 7), (2, 1, 7, 7), (1, 4, 7, 7), (2, 4, 7, 7), (1, 1, 1, 7)):
        yield f"bias {bias}", Setting(q, bias=bias), {}
    tiled = Setting((1, 2, 130, 8), (1, 260), scale=0.3)
    bits, keep = tiles_of(rng, tiled.full)
    tiled.seen &= keep
    yield "block mask", tiled, {"block_mask": Input(bits, data_type.UINT8, virtual_ok=False)}


class AttentionBackward:
    """`sdpa_backward` with options."""

    op = id = "sdpa_backward"
    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)

    def problem(
        self, id: str, rng: Rng, dtype: data_type, given: Setting, extra: Mapping[str, Input] | None = None
    ) -> Problem:
        inputs = dict(extra or {})
        used = {"q": given.used_q, "k": given.used_kv, "v": given.used_kv, "dO": given.used_q}
        for name, dim in (("q", given.q), ("k", given.k), ("v", given.v), ("dO", given.o)):
            # What lies beyond the lengths is never read.
            values = np.where(used[name], rng.standard_normal(dim), np.nan)
            inputs[name] = Input(values, dtype, given.layout(dim))
        if given.bias is not None:
            inputs["bias"] = Input(rng.standard_normal(given.bias), dtype)
        if given.sink:
            inputs["sink"] = Input(rng.standard_normal((1, given.q[1], 1, 1)), data_type.FLOAT)
        if given.mask is not None:
            inputs["mask"] = Input(rng.random(given.mask) < 0.7, dtype)
            for name, number in (("mask_scale", 1 / 0.7), ("mask_scale_inverse", 0.7)):
                inputs[name] = Input(np.full((1, 1, 1, 1), number), data_type.FLOAT)
        if given.lengths is not None:
            for name, lengths in zip(("seq_len_q", "seq_len_kv"), given.lengths, strict=True):
                inputs[name] = Input(np.reshape(lengths, (-1, 1, 1, 1)), data_type.INT32, virtual_ok=False)
        base = math.log(2) if given.options.get("stats_use_log2") else 1.0
        with np.errstate(divide="ignore"):
            made = given.forward(np, {name: exact(each.values) for name, each in inputs.items()})
        inputs["o"] = Input(np.where(given.used_q, made["O"], np.nan), dtype, given.layout(given.o))
        inputs["stats"] = Input(np.where(given.used_q, made["Stats"] / base, np.nan), data_type.FLOAT)
        names = ["dQ", "dK", "dV", *["dBias"] * (given.bias is not None), *["dSink"] * given.sink]

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            named = {k: tensors[k] for k in ("bias", "seq_len_q", "seq_len_kv", "block_mask") if k in tensors}
            if given.bias is not None:
                named["dBias"] = graph.tensor(given.bias, data_type=dtype, is_virtual=True, name="dBias")
            if given.sink:
                named["sink_token"] = tensors["sink"]
                named["dSink_token"] = graph.tensor(
                    (1, given.q[1], 1, 1), data_type=data_type.FLOAT, is_virtual=True, name="dSink"
                )
            if given.mask is not None:
                named["dropout"] = tuple(tensors[k] for k in ("mask", "mask_scale", "mask_scale_inverse"))
            found = graph.sdpa_backward(
                *(tensors[name] for name in ("q", "k", "v", "o", "dO", "stats")),
                attn_scale=None if given.scale == 1 else given.scale,
                use_padding_mask=given.lengths is not None, **named, **given.options,
            )  # fmt: skip
            found = dict(zip(("dQ", "dK", "dV"), found, strict=True))
            return {**found, **{k: named[k if k == "dBias" else "dSink_token"] for k in names[3:]}}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            if xp is np or dtype is not data_type.FLOAT:
                # o is an operand: what it lost to a narrow type counts, and autograd would not know of it.
                at = {name: np.asarray(value) for name, value in values.items()}
                found = given.backward({**at, "stats": at["stats"] * base})
                return found if xp is np else {name: xp.from_numpy(array) for name, array in found.items()}
            wanted = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias", "dSink": "sink"}
            cotangent = {"O": _only(xp, given.used_q, values["dO"])}
            found = vjp(
                xp, lambda at: given.forward(xp, at), values, cotangent, tuple(wanted[name] for name in names)
            )
            return {name: found[wanted[name]] for name in names}

        dims = {"dQ": given.q, "dK": given.k, "dV": given.v}
        expect = {name: Expect(dim, row_major(dim), dtype) for name, dim in dims.items()}
        if given.bias is not None:
            expect["dBias"] = Expect(given.bias, row_major(given.bias), dtype)
        if given.sink:
            expect["dSink"] = Expect((1, given.q[1], 1, 1), None, data_type.FLOAT, statistic_of=dtype)
        return Problem(f"sdpa_backward {dtype.name}: {id}", inputs, declare, truth, expect, io=dtype)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, given, extra in settings(rng):
            yield self.problem(id, rng, dtype, given, extra)
        yield self.problem("virtual", rng, dtype, Setting((2, 4, 7, 8), scale=0.5)).with_virtual_edges()


CASES = (AttentionBackward(),)
