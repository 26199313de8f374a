"""Cases of attention on FP8 data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.attention import bshd, visible
from conformance.layouts import row_major
from conformance.memory import exact, stored
from conformance.problem import Expect, Input, Problem
from conformance.tolerances import GRID
from opgraph import data_type, diagonal_alignment

__all__ = ["CASES", "Setting"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
BOTTOM_RIGHT = diagonal_alignment.BOTTOM_RIGHT
ONE = (1, 1, 1, 1)


def rounded(array: Array, dtype: data_type) -> Array:
    """Saturated to an FP8 type, as float64."""
    largest = GRID[dtype][2]
    return exact(stored(np.clip(array, -largest, largest), dtype))


def largest(array: Array) -> Array:
    return np.full(ONE, np.abs(array).max(initial=0))


class Setting:
    """Shapes, masks and numbers that the forward and the backward problem share."""

    def __init__(
        self,
        q: Sequence[int],
        kv: Sequence[int] = (),
        *,
        heads_v: int = 0,
        width_v: int = 0,
        options: Mapping[str, Any] | None = None,
        lengths: tuple[Sequence[int], Sequence[int]] | None = None,
        band: Mapping[str, Any] | None = None,
        attn_scale: float | None = 0.25,
        layout: Any = row_major,
        dtypes: Sequence[data_type] = (),
        out: data_type | None = None,
        sink: bool = False,
    ) -> None:
        """`options` go to the operator, `band` tells the truth which keys are seen; `dtypes` are those of k, v
        and dO where they are not q's."""
        batch, heads, rows, width = q
        heads_k, keys = kv or (heads, rows)
        heads_v = heads_v or heads_k
        self.q, self.k, self.v = tuple(q), (batch, heads_k, keys, width), (batch, heads_v, keys, width_v or width)
        self.o = (batch, heads, rows, self.v[3])
        self.options, self.lengths, self.attn_scale = dict(options or {}), lengths, attn_scale
        self.layout, self.dtypes, self.out, self.sink = layout, dtypes, out, sink
        len_q, len_kv = lengths or ([rows] * batch, [keys] * batch)
        self.seen = visible((batch, heads, rows, keys), len_q=len_q, len_kv=len_kv, **(band or {}))
        self.used = np.arange(rows)[:, None] < np.reshape(len_q, (batch, 1, 1, 1))
        self.to_k = np.arange(heads) // (heads // heads_k)
        self.to_v = np.arange(heads) // (heads // heads_v)

    def inputs(self, rng: Rng, dtype: data_type, scales: Sequence[str], by_value: bool) -> dict[str, Input]:
        kinds = dict(zip(("k", "v"), self.dtypes, strict=False))
        found = {
            name: Input(rng.standard_normal(dim) * 4, kinds.get(name, dtype), self.layout(dim))
            for name, dim in (("q", self.q), ("k", self.k), ("v", self.v))
        }
        for name in scales:
            # Factors of about 1 but for those of the probabilities, which use the range of the type.
            value = {"scale_s": GRID[dtype][2], "descale_s": 1 / GRID[dtype][2]}.get(name, rng.uniform(0.4, 1.2))
            found[name] = Input(np.full(ONE, value), data_type.FLOAT, by_value=by_value)
        if self.sink:
            found["sink"] = Input(rng.standard_normal((1, self.q[1], 1, 1)), data_type.FLOAT)
        if self.lengths is not None:
            for name, values in zip(("seq_len_q", "seq_len_kv"), self.lengths, strict=True):
                found[name] = Input(np.reshape(values, (-1, 1, 1, 1)), data_type.INT32, virtual_ok=False)
        return found

    def keywords(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: tensors[name] for name in ("seq_len_q", "seq_len_kv") if name in tensors}
        return {**named, **self.options, "attn_scale": self.attn_scale, "use_padding_mask": self.lengths is not None}

    def scores(self, at: Mapping[str, Array]) -> Array:
        product = np.einsum("bhid,bhjd->bhij", at["q"], at["k"][:, self.to_k])
        product = product * at["descale_q"] * at["descale_k"] * (1 if self.attn_scale is None else self.attn_scale)
        return np.where(self.seen, product, -np.inf)

    def forward(self, at: Mapping[str, Array], dtype: data_type) -> dict[str, Array]:
        scores = self.scores(at)
        sink = np.where(self.used, at["sink"], -np.inf) if self.sink else np.full(ONE, -np.inf)
        top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        shift = np.where(np.isneginf(top), 0, top)
        total = np.exp(scores - shift).sum(-1, keepdims=True) + np.exp(sink - shift)
        chances = np.exp(scores - shift) / np.where(total == 0, 1, total)
        weighed = rounded(chances * at["scale_s"], dtype) @ at["v"][:, self.to_v]
        made = weighed * at["descale_v"] * at["descale_s"]
        return {
            "O": made * at["scale_o"],
            "Stats": top + np.log(total),
            "Amax_S": largest(chances),
            "Amax_O": largest(made),
        }

    def backward(self, at: Mapping[str, Array], dtype: data_type, grad_type: data_type) -> dict[str, Array]:
        k, v = at["k"][:, self.to_k], at["v"][:, self.to_v]
        stats = np.where(self.used, at["stats"], np.inf)
        chances = np.where(self.seen, np.exp(self.scores(at) - np.where(np.isneginf(stats), 0, stats)), 0)
        grad, o = (np.where(self.used, at[name], 0) for name in ("dO", "o"))
        scale = 1 if self.attn_scale is None else self.attn_scale
        dp = grad @ np.swapaxes(v, 2, 3) * at["descale_dO"] * at["descale_v"]
        delta = (o * grad).sum(-1, keepdims=True) * at["descale_o"] * at["descale_dO"]
        ds = chances * (dp - delta) * scale
        ds_q = rounded(ds * at["scale_dP"], grad_type)
        heads = {
            "dQ": ds_q @ k * at["descale_k"] * at["descale_dP"],
            "dK": np.swapaxes(ds_q, 2, 3) @ at["q"] * at["descale_q"] * at["descale_dP"],
            "dV": np.swapaxes(rounded(chances * at["scale_s"], dtype), 2, 3) @ grad
            * at["descale_s"] * at["descale_dO"],
        }  # fmt: skip
        found = {"amax_dP": largest(ds)}
        for name, to in (("dQ", np.arange(self.q[1])), ("dK", self.to_k), ("dV", self.to_v)):
            total = np.zeros((self.q[0], to.max(initial=-1) + 1, *heads[name].shape[2:]))
            for head, of in enumerate(to):
                total[:, of] += heads[name][:, head]
            found[f"amax_{name}"] = largest(total)
            found[name] = total * at[f"scale_{name}"]
        return found


def settings(dtype: data_type) -> Iterator[tuple[str, Setting]]:
    other = data_type.FP8_E5M2 if dtype is data_type.FP8_E4M3 else data_type.FP8_E4M3
    yield "one", Setting((1, 1, 1, 16))
    yield "primes", Setting((2, 3, 7, 16), (3, 11), width_v=32)
    yield "no scale", Setting((1, 2, 5, 16), attn_scale=None)
    yield "grouped", Setting((2, 6, 5, 16), (2, 7))
    yield "k and v heads", Setting((1, 12, 5, 16), (4, 6), heads_v=6)
    yield "one key head", Setting((1, 4, 9, 32), (1, 9))
    yield "longer", Setting((1, 2, 130, 16), (2, 200))
    yield "held as BSHD", Setting((2, 3, 6, 16), layout=bshd)
    yield "mixed types", Setting((1, 2, 6, 16), dtypes=(other, other, other))
    yield "no keys", Setting((1, 2, 3, 16), (2, 0))
    yield "no rows", Setting((1, 2, 0, 16), (2, 3))
    causal = {"right": 0}
    yield "causal", Setting((2, 2, 9, 16), options={"use_causal_mask": True}, band=causal)
    yield "right bound", Setting((1, 2, 9, 16), (2, 12), options={"right_bound": 2}, band={"right": 2})
    bottom = {"right": 0, "bottom_right": True}
    yield (
        "causal, bottom right",
        Setting((1, 2, 5, 16), (2, 9), options={"use_causal_mask_bottom_right": True}, band=bottom),
    )
    window = {"left": 3, "right": 1, "bottom_right": True}
    yield "window, bottom right", Setting(
        (1, 2, 9, 16), (2, 12), band=window,
        options={"left_bound": 3, "right_bound": 1, "diagonal_alignment": BOTTOM_RIGHT},
    )  # fmt: skip
    yield (
        "sliding window",
        Setting((1, 1, 9, 16), options={"sliding_window": 2, "use_causal_mask": True}, band={"left": 2, "right": 0}),
    )
    lengths = ([5, 0, 7, 3], [9, 4, 0, 2])
    yield "padding", Setting((4, 2, 7, 16), (1, 9), lengths=lengths)
    yield "padding, causal", Setting((4, 2, 7, 16), options={"use_causal_mask": True}, band=causal,
                                     lengths=([5, 0, 7, 3], [7, 4, 0, 2]))  # fmt: skip
    yield (
        "padding, bottom right",
        Setting((4, 2, 7, 16), (2, 9), options={"use_causal_mask_bottom_right": True}, band=bottom, lengths=lengths),
    )
    for out in (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT):
        yield f"{out.name} output", Setting((2, 2, 7, 16), out=out)


class AttentionFp8:
    op = id = "sdpa_fp8"
    truths = ("numpy",)
    data_types = (data_type.FP8_E4M3, data_type.FP8_E5M2)

    def problem(
        self, id: str, rng: Rng, dtype: data_type, given: Setting, *, by_value: bool = False, stats: bool = True
    ) -> Problem:
        scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        out = given.out or dtype

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            extra = {"sink_token": tensors["sink"]} if given.sink else {}
            made = graph.sdpa_fp8(
                *(tensors[name] for name in ("q", "k", "v", *scales)),
                generate_stats=stats, **given.keywords(tensors), **extra,
            )  # fmt: skip
            assert (made[1] is None) is not stats
            return {"O": made[0], **({"Stats": made[1]} if stats else {}), "Amax_S": made[2], "Amax_O": made[3]}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            found = given.forward(values, dtype)
            return {name: array for name, array in found.items() if stats or name != "Stats"}

        expect = {"O": Expect(given.o, row_major(given.o), out)}
        for name in ("Stats", "Amax_S", "Amax_O"):
            dim = (*given.o[:3], 1) if name == "Stats" else ONE
            if stats or name != "Stats":
                expect[name] = Expect(dim, row_major(dim), data_type.FLOAT)
        return Problem(
            f"sdpa_fp8 {dtype.name}: {id}", given.inputs(rng, dtype, scales, by_value), declare, truth, expect, io=out
        )

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, given in settings(dtype):
            yield self.problem(id, rng, dtype, given)
        plain = Setting((2, 2, 7, 16))
        yield self.problem("scales by value", rng, dtype, plain, by_value=True)
        yield self.problem("no statistics", rng, dtype, plain, stats=False)
        yield self.problem("virtual", rng, dtype, plain).with_virtual_edges()
        yield self.problem("sink", rng, dtype, Setting((2, 4, 7, 16), (2, 5), sink=True))
        padded = Setting((3, 2, 7, 16), lengths=([5, 0, 7], [7, 4, 0]), sink=True)
        yield self.problem("sink, padding", rng, dtype, padded)


class AttentionFp8Backward:
    op = id = "sdpa_fp8_backward"
    truths = ("numpy",)
    data_types = (data_type.FP8_E4M3, data_type.FP8_E5M2)

    def problem(self, id: str, rng: Rng, dtype: data_type, given: Setting, *, by_value: bool = False) -> Problem:
        forward = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = (
            "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP",
            "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP",
        )  # fmt: skip
        both = given.inputs(rng, dtype, (*forward, *scales), by_value)
        with np.errstate(divide="ignore"):
            made = given.forward({name: exact(each.values) for name, each in both.items()}, dtype)
        inputs = {name: each for name, each in both.items() if name != "scale_o"}
        out, grad_type = given.out or dtype, given.dtypes[2] if len(given.dtypes) > 2 else dtype
        o = made["O"] if out not in GRID else rounded(made["O"], out)
        # What lies beyond the lengths is never read.
        inputs["o"] = Input(np.where(given.used, o, np.nan), out, given.layout(given.o))
        inputs["dO"] = Input(
            np.where(given.used, rng.standard_normal(given.o) * 4, np.nan), grad_type, given.layout(given.o)
        )
        inputs["stats"] = Input(np.where(given.used, made["Stats"], np.nan), data_type.FLOAT)
        names = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            found = graph.sdpa_fp8_backward(
                *(tensors[name] for name in ("q", "k", "v", "o", "dO", "stats", *scales)),
                **given.keywords(tensors),
            )
            return dict(zip(names, found, strict=True))

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            return given.backward(values, dtype, grad_type)

        dims = {"dQ": given.q, "dK": given.k, "dV": given.v}
        expect = {name: Expect(dim, row_major(dim), out) for name, dim in dims.items()}
        expect.update({name: Expect(ONE, ONE, data_type.FLOAT) for name in names[3:]})
        return Problem(f"sdpa_fp8_backward {dtype.name}: {id}", inputs, declare, truth, expect, io=out)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, given in settings(dtype):
            yield self.problem(id, rng, dtype, given)
        plain = Setting((2, 2, 7, 16))
        yield self.problem("scales by value", rng, dtype, plain, by_value=True)
        yield self.problem("virtual", rng, dtype, plain).with_virtual_edges()


CASES = (AttentionFp8(), AttentionFp8Backward())
