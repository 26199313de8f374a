"""Cases of the matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.layouts import padded, row_major
from conformance.problem import Expect, Input, Problem
from opgraph import data_type

__all__ = ["CASES", "matmul_problem"]

Rng = np.random.Generator

# (id, A dims, B dims, A strides, B strides)
_SHAPES: tuple[tuple[str, Sequence[int], Sequence[int], Sequence[int] | None, Sequence[int] | None], ...] = (
    ("one", [1, 1, 1], [1, 1, 1], None, None),
    ("two axes", [3, 5], [5, 7], None, None),
    ("vector times matrix", [1, 1, 33], [1, 33, 9], None, None),
    ("primes", [1, 13, 17], [1, 17, 11], None, None),
    ("tile edge below", [1, 63, 31], [1, 31, 65], None, None),
    ("tile edge", [1, 64, 32], [1, 32, 64], None, None),
    ("tile edge above", [1, 65, 33], [1, 33, 63], None, None),
    ("batch", [3, 4, 5], [3, 5, 6], None, None),
    ("batch of A only", [3, 4, 5], [1, 5, 6], None, None),
    ("batch of B only", [1, 4, 5], [3, 5, 6], None, None),
    ("two batch axes", [2, 1, 4, 5], [1, 3, 5, 6], None, None),
    ("no rows", [2, 0, 5], [2, 5, 6], None, None),
    ("no columns", [2, 4, 5], [2, 5, 0], None, None),
    ("nothing to sum", [2, 4, 0], [2, 0, 6], None, None),
    ("no batch", [0, 4, 5], [0, 5, 6], None, None),
    ("A transposed", [2, 4, 5], [2, 5, 6], (20, 1, 4), None),
    ("B transposed", [2, 4, 5], [2, 5, 6], None, (30, 1, 5)),
    ("both transposed", [2, 4, 5], [2, 5, 6], (20, 1, 4), (30, 1, 5)),
    ("padded rows", [2, 4, 5], [2, 5, 6], padded([2, 4, 5]), padded([2, 5, 6])),
    ("batch innermost", [2, 4, 5], [2, 5, 6], (1, 10, 2), (1, 12, 2)),
    ("A of stride 0", [3, 4, 5], [3, 5, 6], (0, 5, 1), None),
)


def matmul_problem(
    id: str,
    rng: Rng,
    a: Sequence[int],
    b: Sequence[int],
    a_stride: Sequence[int] | None,
    b_stride: Sequence[int] | None,
    dtype: data_type,
    *,
    b_type: data_type | None = None,
    out_type: data_type | None = None,
    out_stride: Sequence[int] | None = None,
    compute: data_type = data_type.FLOAT,
) -> Problem:
    """C = A @ B. Integers are drawn from -9..9, floats from a normal distribution."""
    whole = compute in (data_type.INT32, data_type.INT64)

    def numbers(dim: Sequence[int]) -> Any:
        return rng.integers(-9, 10, dim) if whole else rng.standard_normal(dim)

    dim = (*np.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2])), a[-2], b[-1])

    def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        c = graph.matmul(tensors["A"], tensors["B"])
        if out_stride is not None:
            c.set_stride(out_stride)
        return {"C": c if out_type is None else c.set_data_type(out_type)}

    def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        if xp is np:
            return {"C": np.einsum("...mk,...kn->...mn", values["A"], values["B"])}
        return {"C": xp.matmul(values["A"], values["B"])}

    return Problem(
        f"matmul {dtype.name}: {id}",
        {"A": Input(numbers(a), dtype, a_stride), "B": Input(numbers(b), b_type or dtype, b_stride)},
        declare,
        truth,
        {"C": Expect(dim, out_stride or row_major(dim), out_type or dtype)},
        io=dtype,
        intermediate=data_type.INT32 if whole else data_type.FLOAT,
        compute=compute,
    )


class Matmul:
    op = id = "matmul"
    data_types = (
        data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE,
        data_type.INT8, data_type.INT32, data_type.FP8_E4M3,
    )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        kind: dict[str, Any] = {}
        if dtype is data_type.DOUBLE:
            kind = {"compute": data_type.DOUBLE}
        elif dtype in (data_type.INT8, data_type.INT32):
            kind = {"compute": data_type.INT32, "out_type": data_type.INT32}
        elif dtype is data_type.FP8_E4M3:
            kind = {"out_type": data_type.FLOAT}
        for id, a, b, a_stride, b_stride in _SHAPES:
            yield matmul_problem(id, rng, a, b, a_stride, b_stride, dtype, **kind)
        plain = ([2, 4, 5], [2, 5, 6], None, None, dtype)
        yield matmul_problem("padded output", rng, *plain, out_stride=(36, 9, 1), **kind)
        yield matmul_problem("transposed output", rng, *plain, out_stride=(24, 1, 4), **kind)
        yield matmul_problem("virtual", rng, *plain, **kind).with_virtual_edges()
        if dtype in (data_type.HALF, data_type.BFLOAT16):
            yield matmul_problem("widened", rng, *plain, out_type=data_type.FLOAT)
            yield matmul_problem("mixed", rng, *plain, b_type=data_type.FLOAT)
            yield matmul_problem("own type", rng, *plain).with_types(intermediate=dtype, compute=dtype)
        if dtype is data_type.INT32:  # sums beyond what float64 holds exactly
            big = matmul_problem("large", rng, *plain, compute=data_type.INT64, out_type=data_type.INT64)
            big.inputs = {
                name: Input(rng.integers(2**30, 2**31, given.dim), dtype)
                for name, given in big.inputs.items()
            }
            yield big


CASES = (Matmul(),)
