"""Cases of `sdpa` with cumulative lengths, pages, tile masks, dropout masks and score functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.attention_backward import Setting, tiles_of
from conformance.calculus import vjp
from conformance.layouts import row_major
from conformance.memory import exact
from conformance.problem import Expect, Input, Problem
from opgraph import data_type

__all__ = ["CASES"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
INT32, INT64, FLOAT, BOOLEAN = data_type.INT32, data_type.INT64, data_type.FLOAT, data_type.BOOLEAN
ONE = (1, 1, 1, 1)


def paged(rng: Rng, values: Array, lengths: Sequence[int], size: int) -> tuple[Array, Array]:
    """Keys or values as pages in random order and a table; unused pages and entries hold garbage."""
    batch, heads, keys, width = values.shape
    blocks = -(-keys // size)
    count = batch * blocks + 2
    pages = np.full((count, heads, size, width), np.nan)
    table = np.full((batch, 1, blocks, 1), -1)
    order = iter(rng.permutation(count))
    for b, length in enumerate(lengths):
        for block in range(-(-length // size)):
            page = table[b, 0, block, 0] = next(order)
            part = values[b, :, block * size : (block + 1) * size]
            pages[page, :, : part.shape[1]] = part
    return pages, table


class AttentionOptions:
    """`sdpa` with options of which the contents matter."""

    op, id = "sdpa", "sdpa_options"
    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)

    def problem(
        self,
        id: str,
        rng: Rng,
        dtype: data_type,
        given: Setting,
        *,
        more: Mapping[str, Input] | None = None,
        cumulative: Sequence[str] = (),
        sizes: tuple[int, int] = (0, 0),
        state_keys: bool = True,
    ) -> Problem:
        """`cumulative`: sides with lengths in that form; `sizes`: keys per page of k and of v, 0 for none."""
        inputs = dict(more or {})
        used = {"q": given.used_q, "k": given.used_kv, "v": given.used_kv}
        for name, dim in (("q", given.q), ("k", given.k), ("v", given.v)):
            inputs[name] = Input(np.where(used[name], rng.standard_normal(dim), np.nan), dtype, given.layout(dim))
        dense = {name: inputs[name] for name in ("k", "v")}
        for name, size in zip(("k", "v"), sizes, strict=True):
            if size:
                assert given.lengths is not None
                pages, table = paged(rng, exact(inputs[name].values), given.lengths[1], size)
                inputs[name] = Input(pages, dtype)
                inputs[f"paged_attention_{name}_table"] = Input(table, INT32, virtual_ok=False)
        if given.bias is not None:
            inputs["bias"] = Input(rng.standard_normal(given.bias), dtype)
        if given.mask is not None:
            inputs["mask"] = Input(rng.random(given.mask) < 0.7, dtype)
            inputs["mask_scale"] = Input(np.full(ONE, 1 / 0.7), FLOAT)
        for side, lengths in zip(("q", "kv"), given.lengths or ((), ()), strict=True):
            if side in cumulative:
                sums = np.reshape([0, *np.cumsum(lengths)], (-1, 1, 1, 1))
                inputs[f"cu_seq_len_{side}"] = Input(sums, INT64 if side == "q" else INT32, virtual_ok=False)
            elif given.lengths is not None:
                lengths = np.reshape(lengths, (-1, 1, 1, 1))
                inputs[f"seq_len_{side}"] = Input(lengths, INT32, virtual_ok=False)

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            named = {
                name: tensor for name, tensor in tensors.items()
                if name in ("bias", "block_mask") or "seq_len" in name or name.startswith("paged")
            }  # fmt: skip
            if given.mask is not None:
                named["dropout"] = (tensors["mask"], tensors["mask_scale"])
            if any(sizes) and state_keys:
                named["paged_attention_max_seq_len_kv"] = given.full[3]
            o, stats = graph.sdpa(
                tensors["q"], tensors["k"], tensors["v"], attn_scale=given.scale, generate_stats=True,
                use_padding_mask=given.lengths is not None, **named, **given.options,
            )  # fmt: skip
            return {"O": o, "Stats": stats}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            plain = {name: exact(each.values) for name, each in dense.items()}
            if xp is not np:
                plain = {name: xp.from_numpy(array) for name, array in plain.items()}
            return given.forward(xp, {**values, **plain})

        row = (*given.q[:3], 1)
        expect = {
            "O": Expect(given.o, row_major(given.o), dtype),
            "Stats": Expect(row, row_major(row), FLOAT, statistic_of=dtype),
        }
        return Problem(f"{self.id} {dtype.name}: {id}", inputs, declare, truth, expect, io=dtype)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        def problem(id: str, *args: Any, **kwargs: Any) -> Problem:
            return self.problem(id, rng, dtype, *args, **kwargs)

        q, kv = (3, 4, 7, 8), (2, 10)
        lengths: dict[str, Any] = {"lengths": ([3, 7, 2], [5, 1, 10])}
        causal: dict[str, Any] = {"options": {"use_causal_mask": True}, "band": {"right": 0}}
        yield problem("cumulative", Setting(q, kv, **lengths), cumulative=("q", "kv"))
        yield problem("one side cumulative", Setting(q, kv, **lengths), cumulative=("kv",))
        yield problem("cumulative, causal", Setting(q, kv, **lengths, **causal), cumulative=("q", "kv"))
        yield problem("pages", Setting(q, kv, scale=0.5, **lengths), sizes=(4, 4))
        yield problem("pages of one key", Setting(q, kv, **lengths), sizes=(1, 1))
        yield problem("k and v in other pages", Setting(q, kv, width_v=16, **lengths), sizes=(3, 5))
        yield problem("pages of v alone", Setting(q, kv, **lengths), sizes=(0, 4))
        yield problem("keys by the table", Setting(q, (2, 8), lengths=([3, 7, 2], [5, 0, 8])), sizes=(4, 4),
                      state_keys=False)  # fmt: skip
        yield problem("pages, causal, bias", Setting(q, kv, bias=(1, 4, 7, 10), **lengths, **causal), sizes=(4, 4))
        yield problem("pages, cumulative", Setting(q, kv, **lengths), sizes=(4, 4), cumulative=("q", "kv"))
        yield problem("dropout mask", Setting(q, kv, mask=(3, 4, 7, 10)))
        yield problem("dropout mask for all, causal", Setting(q, kv, mask=(1, 1, 7, 10), **causal))
        yield problem("dropout mask, padding", Setting(q, kv, mask=(3, 1, 7, 10), **lengths))
        for name, options in (("block mask", {}), ("block mask, causal", causal)):
            given = Setting((1, 2, 130, 8), (1, 1100) if not options else (2, 300), scale=0.3, **options)
            bits, keep = tiles_of(rng, given.full)
            given.seen &= keep
            yield problem(name, given, more={"block_mask": Input(bits, data_type.UINT8, virtual_ok=False)})


def causal_score(graph: Any, score: Any, at: Mapping[str, Any]) -> Any:
    row, column = graph.gen_index(score, 2), graph.gen_index(score, 3)
    keep = graph.cmp_ge(row.set_data_type(INT32), column.set_data_type(INT32)).set_data_type(BOOLEAN)
    return graph.binary_select(score, at["low"], keep)


def capped_score(graph: Any, score: Any, at: Mapping[str, Any]) -> Any:
    at["scaled"] = graph.div(score, at["cap"])
    at["tanh"] = graph.tanh(at["scaled"])
    return graph.mul(at["tanh"], at["cap"])


def capped_grad(graph: Any, grad: Any, at: Mapping[str, Any]) -> Any:
    return graph.div(graph.tanh_backward(graph.mul(grad, at["cap"]), at["scaled"]), at["cap"])


def biased_score(graph: Any, score: Any, at: Mapping[str, Any]) -> Any:
    distance = graph.sub(graph.gen_index(score, 3), graph.gen_index(score, 2))
    head = graph.add(graph.gen_index(score, 1), graph.gen_index(score, 0))
    return graph.add(graph.add(score, graph.mul(distance, at["slope"])), graph.mul(graph.mul(head, 0.25), at["row"]))


def _causal(xp: Any, s: Any, at: Mapping[str, Any]) -> Any:
    keep = np.tri(s.shape[2], s.shape[3], dtype=np.bool_)
    return xp.where(keep if xp is np else xp.from_numpy(keep), s, at["low"])


def _capped(xp: Any, s: Any, at: Mapping[str, Any]) -> Any:
    return xp.tanh(s / at["cap"]) * at["cap"]


def _biased(xp: Any, s: Any, at: Mapping[str, Any]) -> Any:
    batch, heads, rows, keys = s.shape
    head = np.arange(heads)[:, None, None] + np.arange(batch)[:, None, None, None]
    distance = np.arange(keys) - np.arange(rows)[:, None]
    head, distance = (x * 1.0 if xp is np else xp.from_numpy(x * 1.0) for x in (head, distance))
    return s + distance * at["slope"] + 0.25 * head * at["row"]


# name -> (score_mod, score_mod_bprop, the function, captured inputs)
FUNCTIONS: dict[str, Any] = {
    "causal": (causal_score, None, _causal, {"low": (ONE, -1e9)}),
    "cap": (capped_score, capped_grad, _capped, {"cap": (ONE, 0.7)}),
    "indices": (biased_score, None, _biased, {"slope": ((1, 4, 1, 1), None), "row": ((1, 1, 5, 1), None)}),
}


def score_inputs(rng: Rng, dtype: data_type, captured: Mapping[str, Any]) -> dict[str, Input]:
    inputs = {name: Input(rng.standard_normal(dim), dtype) for name, dim in (("q", (2, 4, 5, 8)), ("k", (2, 2, 6, 8)))}
    inputs["v"] = Input(rng.standard_normal((2, 2, 6, 8)), dtype)
    for name, (dim, value) in captured.items():
        inputs[name] = Input(rng.standard_normal(dim) if value is None else np.full(dim, value), FLOAT)
    return inputs


def score_truth(xp: Any, at: Mapping[str, Any], function: Any) -> dict[str, Any]:
    k, v = (at[name][:, [0, 0, 1, 1]] for name in ("k", "v"))
    scores = function(xp, 0.5 * (at["q"] @ xp.swapaxes(k, 2, 3)), at)
    top = scores.max(-1, keepdims=True) if xp is np else scores.amax(-1, keepdim=True)
    weights = xp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return {"O": weights / total @ v, "Stats": xp.log(total) + top}


class ScoreMod:
    """`sdpa` with a score function."""

    op, id = "sdpa", "sdpa_score_mod"
    data_types = (FLOAT, data_type.HALF)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for name, (build, _, function, captured) in FUNCTIONS.items():

            def declare(graph: Any, tensors: Mapping[str, Any], build: Any = build) -> dict[str, Any]:
                o, stats = graph.sdpa(
                    *(tensors[each] for each in ("q", "k", "v")), attn_scale=0.5, generate_stats=True,
                    score_mod=lambda inner, score: build(inner, score, dict(tensors)),
                )  # fmt: skip
                return {"O": o, "Stats": stats}

            def truth(xp: Any, values: Mapping[str, Any], function: Any = function) -> dict[str, Any]:
                return score_truth(xp, values, function)

            expect = {
                "O": Expect((2, 4, 5, 8), None, dtype),
                "Stats": Expect((2, 4, 5, 1), None, FLOAT, statistic_of=dtype),
            }
            made = Problem(
                f"{self.id} {dtype.name}: {name}", score_inputs(rng, dtype, captured), declare, truth, expect, io=dtype
            )
            yield made
            yield made.with_virtual_edges()


class ScoreModBackward:
    """`sdpa_backward` with a score function. o and stats are those of the exact inputs in FLOAT."""

    op, id = "sdpa_backward", "sdpa_backward_score_mod"
    truths = ("torch",)
    data_types = (FLOAT,)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for name, (build, bprop, function, captured) in FUNCTIONS.items():
            inputs = score_inputs(rng, dtype, captured)
            made = score_truth(np, {key: exact(each.values) for key, each in inputs.items()}, function)
            inputs["dO"] = Input(rng.standard_normal((2, 4, 5, 8)), dtype)
            inputs["o"], inputs["stats"] = Input(made["O"], dtype), Input(made["Stats"], FLOAT)

            def declare(
                graph: Any, tensors: Mapping[str, Any], build: Any = build, bprop: Any = bprop
            ) -> dict[str, Any]:
                held = dict(tensors)
                found = graph.sdpa_backward(
                    *(tensors[each] for each in ("q", "k", "v", "o", "dO", "stats")), attn_scale=0.5,
                    score_mod=lambda inner, score: build(inner, score, held),
                    score_mod_bprop=bprop and (lambda inner, grad: bprop(inner, grad, held)),
                )  # fmt: skip
                return dict(zip(("dQ", "dK", "dV"), found, strict=True))

            def truth(xp: Any, values: Mapping[str, Any], function: Any = function) -> dict[str, Any]:
                found = vjp(
                    xp, lambda at: score_truth(xp, at, function), values, {"O": values["dO"]}, ("q", "k", "v")
                )
                return {f"d{each.upper()}": found[each] for each in ("q", "k", "v")}

            yield Problem(f"{self.id} {dtype.name}: {name}", inputs, declare, truth, io=dtype)


CASES = (AttentionOptions(), ScoreMod(), ScoreModBackward())
