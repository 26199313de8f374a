"""Cases of block-scaled data. Truths come from formulas element by element; factors in tiles are placed by the
formula of a single byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.layouts import padded, preserving, reversed_axes, row_major
from conformance.memory import exact, stored
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, tensor_reordering

__all__ = ["CASES", "factors_of", "tiled"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

E8M0, E4M3 = data_type.FP8_E8M0, data_type.FP8_E4M3
LARGEST = {
    data_type.FP8_E4M3: 448.0,
    data_type.FP8_E5M2: 57344.0,
    data_type.FP4_E2M1: 6.0,
    data_type.INT8: 127.0,
    data_type.INT4: 7.0,
}
WHOLE = (data_type.INT8, data_type.INT4)


def tiled(matrix: Array) -> Array:
    """[rows, columns] of whole tiles as it lies in memory, in the same dims."""
    rows, columns = matrix.shape
    r, c = np.indices(matrix.shape)
    tile = (r // 128) * (columns // 4) + c // 4
    byte = tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    memory = np.empty(rows * columns, matrix.dtype)
    memory[byte.reshape(-1)] = matrix.reshape(-1)
    return memory.reshape(matrix.shape)


def spread(factors: Array, dim: Sequence[int], sizes: Sequence[int]) -> Array:
    """The factor of each element."""
    where = [np.arange(n) // size for n, size in zip(dim, sizes, strict=True)]
    return factors[np.ix_(*where)]


def factors_of(x: Array, size: int, axis: int, largest: float, dtype: data_type) -> Array:
    """The factors in float64: E8M0 is the smallest power of two that no element exceeds `largest` times."""
    starts = range(0, x.shape[axis], size)
    parts = [np.abs(x.take(range(s, min(s + size, x.shape[axis])), axis)).max(axis, keepdims=True) for s in starts]
    dim = [n if a != axis else len(parts) for a, n in enumerate(x.shape)]
    scale = np.concatenate(parts, axis) / largest if parts else np.empty(dim)
    if dtype is not E8M0:
        return exact(stored(np.minimum(scale, 448.0) if dtype is E4M3 else scale, dtype))
    powers = 2.0 ** np.arange(-127, 128)
    return np.where(np.isnan(scale), np.nan, powers[np.minimum(np.searchsorted(powers, scale), 254)])


# (id, dim, block sizes of all axes)
_BLOCKS: tuple[tuple[str, Sequence[int], Sequence[int]], ...] = (
    ("one", [1, 1, 2], [1, 1, 2]),
    ("rows", [2, 5, 64], [1, 1, 32]),
    ("columns", [2, 64, 6], [1, 32, 1]),
    ("squares", [1, 8, 12], [1, 4, 6]),
    ("last block short", [3, 5, 50], [1, 1, 16]),
    ("one short block", [3, 6], [1, 16]),
    ("both short", [1, 7, 10], [1, 3, 4]),
    ("batch", [2, 3, 4, 32], [1, 1, 1, 16]),
    ("blocks of one", [3, 4], [1, 1]),
    ("none", [0, 64], [1, 32]),
)  # fmt: skip


class Dequantize:
    op = id = "block_scale_dequantize"
    truths = ("numpy",)
    source = E8M0
    data_types = (*LARGEST,)

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        sizes: Sequence[int],
        dtype: data_type,
        *,
        scale_type: data_type = E8M0,
        layout: Any = row_major,
        tiles: bool = False,
        columns_first: bool = False,
        given: Any = None,
        **options: Any,
    ) -> Problem:
        x = np.clip(rng.standard_normal(dim) * LARGEST[dtype] / 3, -LARGEST[dtype], LARGEST[dtype])
        count = [-(-n // size) for n, size in zip(dim, sizes, strict=True)]
        factors = 2.0 ** rng.integers(-6, 7, count) if scale_type is E8M0 else rng.random(count) + 0.1
        plain = exact(stored(factors, scale_type))
        inputs = {"x": Input(np.rint(x) if dtype in WHOLE else x, dtype, layout(dim))}
        if tiles:
            order = (0, 2, 1) if columns_first else (0, 1, 2)
            turned = factors.transpose(order)
            whole = [turned.shape[0], -(-turned.shape[1] // 128) * 128, -(-turned.shape[2] // 4) * 4]
            room = rng.random(whole)
            room[tuple(map(slice, turned.shape))] = turned
            held = np.stack([tiled(each) for each in room])
            # The memory of the tiles, as an array with the declared dims and strides.
            inputs["scale"] = Input(
                held.transpose(order), scale_type,
                (whole[1] * whole[2], 1, whole[2]) if columns_first else None, virtual_ok=False,
            )  # fmt: skip
        else:
            inputs["scale"] = Input(factors, scale_type)

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            if tiles:
                tensors["scale"].set_reordering_type(tensor_reordering.F8_128x4)
            wide = graph.block_scale_dequantize(
                tensors["x"], tensors["scale"], block_size=sizes if given is None else given, **options
            )
            return {"Y": graph.identity(wide)}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            y = values["x"] * spread(plain, dim, sizes)
            return {"Y": -y if options.get("is_negative_scale") else y}

        return Problem(
            f"dequantize {dtype.name}: {id}", inputs, declare, truth,
            {"Y": Expect(dim, layout(dim), data_type.FLOAT)},
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, sizes in _BLOCKS:
            yield self.problem(id, rng, dim, sizes, dtype)
        plain = ([2, 6, 32], [1, 1, 16], dtype)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        yield self.problem("E4M3 factors", rng, *plain, scale_type=E4M3)
        yield self.problem("FLOAT factors", rng, *plain, scale_type=data_type.FLOAT)
        yield self.problem("negative", rng, *plain, is_negative_scale=True)
        yield self.problem("one integer", rng, *plain, given=16)
        yield self.problem("first axis fastest", rng, *plain, layout=reversed_axes)
        yield self.problem("padded rows", rng, *plain, layout=lambda dim: padded(dim, 2))
        for tiles in ([1, 128, 128], [1, 5, 64], [2, 130, 160], [1, 257, 4]):
            size = [1, 1, 32 if tiles[2] > 4 else 2]
            yield self.problem(f"tiles {tiles}", rng, tiles, size, dtype, tiles=True)
        turned = ([2, 160, 130], [1, 32, 1], dtype)
        yield self.problem("tiles, columns first", rng, *turned, tiles=True, columns_first=True)


class Quantize:
    op = id = "block_scale_quantize"
    truths = ("numpy",)
    source = E8M0
    data_types = (*LARGEST,)

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        size: int,
        dtype: data_type,
        *,
        axis: int = -1,
        scale_type: data_type = E8M0,
        x_type: data_type = data_type.FLOAT,
        layout: Any = row_major,
        transpose: bool = False,
        tiles: bool = False,
        groups: Sequence[int] = (),
        values: Any = None,
    ) -> Problem:
        """`groups`: the first row of each group, for a matrix [1, rows, columns]."""
        x = rng.standard_normal(dim) * 10.0 ** rng.integers(-3, 4, (*dim[:-1], 1)) if values is None else values
        along = axis % len(dim)
        inputs = {"x": Input(x, x_type, layout(dim))}
        if groups:
            inputs["groups"] = Input(np.reshape(groups, (-1, 1, 1)), data_type.INT32, virtual_ok=False)
        y_stride, scale_dim = layout(dim), [-(-n // size) if a == along else n for a, n in enumerate(dim)]
        if transpose:
            y_stride = preserving(dim, [0 if a == along else s for a, s in enumerate(layout(dim))])
        spans = list(zip(groups, [*groups[1:], dim[-2]], strict=True)) if groups else [(0, dim[-2])]
        held = [(b - a) if along != len(dim) - 2 else -(-(b - a) // size) for a, b in spans]
        step = 128 if tiles else 1
        places = np.cumsum([0, *(-(-n // step) * step for n in held)])
        if groups:
            scale_dim[-2] = int(places[-1])
        if tiles:
            scale_dim = [scale_dim[0], -(-scale_dim[1] // 128) * 128, -(-scale_dim[2] // 4) * 4]

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            y, scale = graph.block_scale_quantize(
                tensors["x"], tensors.get("groups"), block_size=size, axis=axis, transpose=transpose
            )
            y.set_data_type(dtype)
            scale.set_data_type(scale_type)
            if tiles:
                scale.set_reordering_type(tensor_reordering.F8_128x4)
            if tiles or groups:
                scale.set_dim(scale_dim).set_stride(row_major(scale_dim))
            return {"Y": y, "scale": scale}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            x, lowest = values["x"], 2.0**-127 if scale_type is E8M0 else 0.0
            y, scale = np.zeros(dim), np.full(scale_dim, lowest)
            for (first, last), place in zip(spans, places[:-1], strict=True):
                if first == last:
                    continue
                rows = x[..., first:last, :]
                factors = factors_of(rows, size, along, LARGEST[dtype], scale_type)
                sizes = [size if a == along else 1 for a in range(len(dim))]
                each = spread(factors, rows.shape, sizes)
                y[..., first:last, :] = np.where(each == 0, 0, rows / each)
                scale[(..., *(slice(0, n) for n in factors.shape[:-2]), slice(place, place + factors.shape[-2]),
                       slice(0, factors.shape[-1]))] = factors  # fmt: skip
            if dtype in WHOLE:
                y = np.nan_to_num(np.clip(np.rint(y), -LARGEST[dtype] - 1, LARGEST[dtype]))
            elif dtype is data_type.FP4_E2M1:
                y = np.where(np.isnan(y), 6.0, y)
            return {"Y": y, "scale": np.stack([tiled(part) for part in scale]) if tiles else scale}

        expect = {
            "Y": Expect(dim, y_stride, dtype),
            "scale": Expect(
                scale_dim, row_major(scale_dim) if tiles or groups else preserving(scale_dim, layout(dim)),
                scale_type, exact=True,
            ),
        }  # fmt: skip
        return Problem(f"quantize {dtype.name}: {id}", inputs, declare, truth, expect)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, size, axis in (
            ("one", [1, 1, 2], 2, -1),
            ("rows", [2, 5, 64], 32, -1),
            ("columns", [2, 64, 6], 32, -2),
            ("first axis", [32, 3, 4], 8, 0),
            ("last block short", [3, 5, 50], 16, 2),
            ("one short block", [3, 6], 16, -1),
            ("batch", [2, 3, 4, 32], 16, 3),
            ("none", [0, 64], 32, -1),
        ):
            yield self.problem(id, rng, dim, size, dtype, axis=axis)
        plain = ([2, 6, 32], 16, dtype)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        yield self.problem("BFLOAT16 data", rng, *plain, x_type=data_type.BFLOAT16)
        yield self.problem("E4M3 factors", rng, *plain, scale_type=E4M3)
        yield self.problem("FLOAT factors", rng, *plain, scale_type=data_type.FLOAT)
        yield self.problem("first axis fastest", rng, *plain, layout=reversed_axes)
        yield self.problem("transposed", rng, [2, 16, 6], 8, dtype, axis=1, transpose=True)
        yield self.problem("transposed, batch", rng, [2, 16, 3, 4], 8, dtype, axis=1, transpose=True)
        largest = LARGEST[dtype]
        edges = np.array([
            [0.0] * 4, [largest, 0, 1, -largest], [largest * 1.0000001, 0, 0, 0], [1e-38, 0, 0, -1e-38],
            [np.inf, 1, -np.inf, 0], [np.nan, 1, 2, 3], [3e38, -3e38, 1, 0], [1e-45, 0, 0, 0],
        ])  # fmt: skip
        yield self.problem("edges", rng, [8, 4], 4, dtype, values=edges)
        yield self.problem("tiles", rng, [2, 130, 160], 32, dtype, tiles=True)
        yield self.problem("tiles, whole", rng, [1, 128, 64], 16, dtype, tiles=True, scale_type=E4M3)
        yield self.problem("groups", rng, [1, 20, 32], 16, dtype, groups=[0, 3, 3, 11])
        yield self.problem("groups, rows above", rng, [1, 20, 32], 16, dtype, groups=[4, 12])
        yield self.problem("groups along rows", rng, [1, 20, 6], 4, dtype, axis=1, groups=[0, 3, 3, 11])
        yield self.problem("groups in tiles", rng, [1, 300, 64], 16, dtype, groups=[0, 3, 3, 140], tiles=True)


CASES = (Dequantize(), Quantize())
