"""Cases of grouped matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.layouts import padded, reversed_axes, row_major
from conformance.problem import Expect, Input, Problem
from opgraph import data_type
from opgraph import moe_grouped_matmul_mode as M

__all__ = ["CASES", "experts_of"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

_TYPES = (
    data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE, data_type.INT8, data_type.FP8_E4M3,
)  # fmt: skip


def experts_of(offsets: Sequence[int], experts: int, rows: int) -> Array:
    """The expert of each routed row; -1 for rows of none."""
    ends = [*offsets[1:], rows][:experts]
    found = np.full(rows, -1)
    for expert, (first, last) in enumerate(zip(offsets, ends, strict=False)):
        found[first:last] = expert
    return found


def kinds(dtype: data_type) -> tuple[data_type, data_type]:
    """(type of the output, compute type)"""
    out = {data_type.INT8: data_type.INT32, data_type.FP8_E4M3: data_type.FLOAT}.get(dtype, dtype)
    compute = {data_type.INT8: data_type.INT32, data_type.DOUBLE: data_type.DOUBLE}.get(dtype, data_type.FLOAT)
    return out, compute


def numbers(rng: Rng, dim: Sequence[int], dtype: data_type) -> Array:
    return rng.integers(-9, 10, dim) if dtype is data_type.INT8 else rng.standard_normal(dim)


def offsets_input(offsets: Sequence[int], dtype: data_type = data_type.INT32) -> Input:
    return Input(np.reshape(offsets, (-1, 1, 1)), dtype, virtual_ok=False)


class Grouped:
    op = id = "moe_grouped_matmul"
    data_types = _TYPES

    def problem(
        self,
        id: str,
        rng: Rng,
        dtype: data_type,
        offsets: Sequence[int],
        rows: int,
        *,
        mode: M = M.NONE,
        top_k: int = 0,
        tokens: int = 0,
        experts: int = 3,
        sizes: tuple[int, int] = (5, 7),
        weight_layout: Any = row_major,
        layout: Any = row_major,
        out_stride: Any = None,
        integers: data_type = data_type.INT32,
        spoiled: bool = False,
    ) -> Problem:
        """`rows` are routed, for GATHER, SCATTER and COMBINE from or to `tokens` tokens. `spoiled`: indices
        of rows that no expert owns are out of range, which nobody may notice."""
        width, out_width = sizes
        held = tokens if mode is M.GATHER else rows
        owner = experts_of(offsets, experts, rows)
        owned = np.flatnonzero(owner >= 0)
        inputs = {
            "token": Input(numbers(rng, (1, held, width), dtype), dtype, layout((1, held, width))),
            "weight": Input(
                numbers(rng, (experts, width, out_width), dtype), dtype, weight_layout((experts, width, out_width))
            ),
            "first_token_offset": offsets_input(offsets, integers),
        }
        where, which = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        if mode is M.GATHER:
            where = rng.integers(0, tokens, rows)
        elif mode is not M.NONE:
            pairs = rng.permutation(tokens * top_k)[:rows]
            where, which = pairs // top_k, pairs % top_k
        if spoiled:
            where[owner < 0], which[owner < 0] = -7, 10**6
        names = {M.GATHER: ("token_index",), M.NONE: ()}.get(mode, ("token_index", "token_ks"))
        for name, values in zip(names, (where, which), strict=False):
            inputs[name] = Input(np.reshape(values, (1, -1, 1)), integers, virtual_ok=False)
        if mode is M.COMBINE:
            inputs["top_k_scores"] = Input(
                numbers(rng, (1, tokens, top_k), dtype), dtype if dtype is data_type.INT8 else data_type.FLOAT
            )
        count = tokens if mode is M.COMBINE else rows
        dim = (1, count, out_width)
        out_type, compute = kinds(dtype)

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            out = graph.moe_grouped_matmul(**tensors, mode=mode, top_k=top_k, compute_data_type=compute)
            if out_stride is not None:
                out.set_stride(out_stride(dim))
            return {"OUT": out.set_data_type(out_type)}

        # Which product goes where: a matrix [rows of the output, owned rows].
        placed = np.zeros((count, len(owned)), np.int64)
        to = {M.SCATTER: where * top_k + which, M.COMBINE: where}.get(mode, np.arange(rows))
        placed[to[owned], np.arange(len(owned))] = 1

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            token, weight = values["token"][0], values["weight"]
            token = token[where[owned]] if mode is M.GATHER else token[owned]
            products = xp.einsum("rh,rhn->rn", token, weight[owner[owned]])
            if mode is M.COMBINE:
                products = products * values["top_k_scores"][0][where[owned], which[owned]][:, None]
            matrix = placed.astype(str(products.dtype).removeprefix("torch."))
            return {"OUT": ((matrix if xp is np else xp.from_numpy(matrix)) @ products)[None]}

        return Problem(
            f"moe {mode.name} {dtype.name}: {id}", inputs, declare, truth,
            {"OUT": Expect(dim, (out_stride or row_major)(dim), out_type)},
            io=out_type, compute=compute, intermediate=compute,
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, offsets, rows in (
            ("three experts", [0, 4, 9], 11),
            ("one row each", [0, 1, 2], 3),
            ("empty first expert", [0, 0, 5], 8),
            ("empty middle and last experts", [0, 8, 8], 8),
            ("all to the last", [0, 0, 0], 6),
            ("the end given", [0, 4, 9, 11], 11),
            ("rows after the end", [0, 4, 6, 8], 11),
            ("rows before the first", [2, 4, 9], 11),
            ("nobody", [5, 5, 5, 5], 11),
            ("no rows", [0, 0, 0], 0),
        ):
            yield self.problem(id, rng, dtype, offsets, rows)
        plain = (dtype, [0, 4, 9], 11)
        yield self.problem("one expert", rng, dtype, [0], 7, experts=1)
        yield self.problem("larger", rng, dtype, [0, 40, 105], 200, sizes=(33, 65))
        yield self.problem("INT64", rng, *plain, integers=data_type.INT64)
        yield self.problem("weight column-major", rng, *plain, weight_layout=lambda d: (d[1] * d[2], 1, d[1]))
        yield self.problem("expert fastest", rng, *plain, weight_layout=reversed_axes)
        yield self.problem("padded", rng, *plain, layout=padded, out_stride=padded)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        routes: dict[str, Any] = {"tokens": 6, "top_k": 2}
        yield self.problem("routed", rng, dtype, [0, 4, 9], 12, mode=M.GATHER, **routes)
        yield self.problem("fewer rows", rng, dtype, [0, 1, 1], 2, mode=M.GATHER, **routes)
        yield self.problem("no top_k", rng, dtype, [0, 4, 9], 12, mode=M.GATHER, tokens=6)
        yield self.problem("stray", rng, dtype, [1, 4, 9, 10], 12, mode=M.GATHER, spoiled=True, **routes)
        yield self.problem("virtual", rng, dtype, [0, 4, 9], 12, mode=M.GATHER, **routes).with_virtual_edges()
        for mode in (M.SCATTER, M.COMBINE):
            yield self.problem("routed", rng, dtype, [0, 4, 9], 12, mode=mode, **routes)
            yield self.problem("one each", rng, dtype, [0, 4, 4], 6, mode=mode, tokens=6, top_k=1)
            yield self.problem("all experts", rng, dtype, [0, 5, 10, 15], 15, mode=mode, tokens=5, top_k=3)
            yield self.problem("stray", rng, dtype, [1, 4, 9, 10], 12, mode=mode, spoiled=True, **routes)
            yield self.problem("nobody", rng, dtype, [3, 3, 3, 3], 12, mode=mode, **routes)
            yield self.problem("padded output", rng, dtype, [0, 4, 9], 12, mode=mode, out_stride=padded, **routes)
            yield self.problem("INT64", rng, dtype, [0, 4, 9], 12, mode=mode, integers=data_type.INT64, **routes)
        yield self.problem("tokens of fewer experts", rng, dtype, [0, 4, 6], 9, mode=M.COMBINE, **routes)


class GroupedBackward:
    op = id = "moe_grouped_matmul_bwd"
    data_types = _TYPES

    def problem(
        self,
        id: str,
        rng: Rng,
        dtype: data_type,
        offsets: Sequence[int],
        rows: int,
        *,
        experts: int = 3,
        sizes: tuple[int, int] = (5, 7),
        layout: Any = row_major,
        out_stride: Any = None,
    ) -> Problem:
        owner = experts_of(offsets, experts, rows)
        hot = (owner[:, None] == np.arange(experts)).astype(np.int64)
        dim = (experts, *sizes)
        out_type, compute = kinds(dtype)
        inputs = {
            "doutput": Input(numbers(rng, (1, rows, sizes[1]), dtype), dtype, layout((1, rows, sizes[1]))),
            "token": Input(numbers(rng, (1, rows, sizes[0]), dtype), dtype, layout((1, rows, sizes[0]))),
            "first_token_offset": offsets_input(offsets),
        }

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            out = graph.moe_grouped_matmul_bwd(
                **tensors, compute_data_type=compute, out_dims=None if len(offsets) == experts else list(dim)
            )
            if out_stride is not None:
                out.set_stride(out_stride(dim))
            return {"OUT": out.set_data_type(out_type)}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            token, grad = values["token"][0], values["doutput"][0]
            chosen = hot.astype(str(token.dtype).removeprefix("torch."))
            chosen = chosen if xp is np else xp.from_numpy(chosen)
            return {"OUT": xp.einsum("re,rh,rn->ehn", chosen, token, grad)}

        column_major = (sizes[0] * sizes[1], 1, sizes[0])
        return Problem(
            f"moe backward {dtype.name}: {id}", inputs, declare, truth,
            {"OUT": Expect(dim, out_stride(dim) if out_stride else column_major, out_type)},
            io=out_type, compute=compute, intermediate=compute,
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, offsets, rows in (
            ("three experts", [0, 4, 9], 11),
            ("empty experts", [0, 0, 8], 8),
            ("the end given", [0, 4, 9, 11], 11),
            ("rows of nobody", [2, 4, 6, 8], 11),
            ("no rows", [0, 0, 0], 0),
        ):
            yield self.problem(id, rng, dtype, offsets, rows)
        yield self.problem("larger", rng, dtype, [0, 40, 105], 200, sizes=(33, 65))
        yield self.problem("row-major", rng, dtype, [0, 4, 9], 11, out_stride=row_major)
        yield self.problem("padded", rng, dtype, [0, 4, 9], 11, layout=padded, out_stride=padded)
        yield self.problem("virtual", rng, dtype, [0, 4, 9], 11).with_virtual_edges()


CASES = (Grouped(), GroupedBackward())
