"""Cases of conversions: `identity` from one data type to another, FP8, FP4, INT4 and integers among them.

Floats round to nearest even; to 8 and 4 bits they saturate and NaN stays NaN; to integers they round to
nearest even, saturate, and NaN becomes 0; integers saturate; BOOLEAN is whether the element is non-zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.memory import numpy_dtype
from conformance.problem import Expect, Input, Problem
from conformance.tolerances import GRID
from opgraph import data_type

__all__ = ["CASES"]

Rng = np.random.Generator

_T = data_type
_RANGE = {
    _T.INT8: (-128, 127), _T.UINT8: (0, 255), _T.INT4: (-8, 7),
    _T.INT32: (-(2**31), 2**31 - 1), _T.INT64: (-(2**63), 2**63 - 1),
}  # fmt: skip
_FLOATS = (_T.FLOAT, _T.DOUBLE, _T.HALF, _T.BFLOAT16)
_SMALL = (_T.FP8_E4M3, _T.FP8_E5M2, _T.FP4_E2M1)


def converted(values: Any, dtype: data_type) -> Any:
    """float64, int64 or bool values as numbers that `dtype` holds."""
    if dtype is _T.BOOLEAN:
        return values != 0
    if dtype in _RANGE:
        low, high = _RANGE[dtype]
        if values.dtype.kind == "f":
            whole = np.rint(np.where(np.isnan(values), 0, values))
            # float64 cannot hold the largest int64, so the upper end is set apart.
            clipped = np.clip(whole, float(low), float(high))
            safe = np.where(clipped >= float(high), 0, clipped).astype(np.int64)
            return np.where(clipped >= float(high), high, safe)
        return np.clip(values.astype(np.int64), low, high)
    values = values.astype(np.float64)
    if dtype in GRID:
        return np.clip(values, -GRID[dtype][2], GRID[dtype][2]).astype(numpy_dtype(dtype)).astype(np.float64)
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype)).astype(np.float64)


def _source(rng: Rng, dtype: data_type, dim: tuple[int, ...]) -> Any:
    if dtype is _T.BOOLEAN:
        return rng.integers(0, 2, dim)
    if dtype in _RANGE:
        low, high = _RANGE[dtype]
        return rng.integers(low, high, dim, endpoint=True)
    if dtype in _SMALL:
        limit = GRID[dtype][2]
        return rng.uniform(-limit, limit, dim)
    values = rng.standard_normal(dim) * 10.0 ** rng.integers(-3, 4, dim)
    special = np.array([0.0, -0.0, 0.5, 1.5, 2.5, -0.5, 1e6, -1e6, 3e4, np.inf, -np.inf, np.nan])
    flat = values.reshape(-1)
    flat[: special.size] = special[: flat.size]
    return values


class Convert:
    """`identity` from `source` to each of the data types; exact to the bit."""

    op = "identity"
    truths = ("numpy",)

    def __init__(self, source: data_type) -> None:
        self.source = source
        self.id = f"convert {source.name}"
        self.data_types = (*_FLOATS, *_SMALL[:2], *_RANGE, _T.BOOLEAN, _T.FP4_E2M1)

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, stride in (
            ("dense", (4, 6), None),
            ("transposed", (4, 6), (1, 4)),
            ("gaps", (4, 6), (8, 1)),
        ):
            values = _source(rng, self.source, dim)
            if dtype is _T.FP4_E2M1:
                values = np.where(np.isnan(values), 1, values)  # FP4 has no NaN
            x = Input(values, self.source, stride)

            def declare(graph: Any, tensors: Mapping[str, Any], stride: Any = stride) -> dict[str, Any]:
                y = graph.identity(tensors["X"]).set_data_type(dtype)
                return {"Y": y if stride is None else y.set_stride(stride)}

            def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
                result = converted(values["X"], dtype)
                return {"Y": result}

            yield Problem(
                f"identity {self.source.name} to {dtype.name}: {id}", {"X": x}, declare, truth,
                {"Y": Expect(dim, x.stride, dtype, exact=True)},
            )  # fmt: skip


CASES = tuple(Convert(source) for source in (*_FLOATS, *_SMALL, *_RANGE, _T.BOOLEAN))
