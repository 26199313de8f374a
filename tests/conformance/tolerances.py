"""How close a result must be to the truth, per data type of the output: the only place that says so.

Floats: |result - truth| <= t * (1 + |truth|) with t below. FP8 and FP4: one step of the type's grid plus 2%.
E8M0 factors, integers, booleans, indices and masks: exact. Statistics of softmax for half inputs: 1e-3 absolute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph import data_type

Array = np.ndarray[Any, Any]

CLOSE = {
    data_type.DOUBLE: 1e-12,
    data_type.FLOAT: 1e-5,
    data_type.HALF: 2e-3,
    data_type.BFLOAT16: 2e-2,
}

# (stored mantissa bits, smallest normal exponent, largest finite value)
GRID = {
    data_type.FP8_E4M3: (3, -6, 448.0),
    data_type.FP8_E5M2: (2, -14, 57344.0),
    data_type.FP4_E2M1: (1, 0, 6.0),
}
GRID_RELATIVE = 0.02

STATISTIC_OF_HALF = 1e-3

# Gated linear attention: relative Frobenius norm of the error of an output, against the recurrence in float64 on the
# same rounded inputs, for q, k and v in BFLOAT16 and random keys of length 1.
LINEAR_ATTENTION = {
    "O": 8e-3,
    "final_state": 8e-3,
    "state_checkpoints": 8e-3,
    "transition": 8e-3,
    "dQ": 1.2e-2,
    "dK": 1.2e-2,
    "dV": 1.2e-2,
    "dBeta": 1.2e-2,
    "dW": 1.2e-2,
    "dG": 1.5e-2,
    "d_initial_state": 1e-2,
    "d_a_log": 4e-2,  # sums over tokens of what dG is made of, in which most of it cancels
    "d_dt_bias": 4e-2,
}
# Factor of these bounds for other types of q, k and v: the ratio of the types' precisions, with some room for FLOAT,
# whose sums are as exact as its operands.
LINEAR_ATTENTION_TYPES = {data_type.BFLOAT16: 1.0, data_type.HALF: 1 / 4, data_type.FLOAT: 1 / 1000}
LINEAR_ATTENTION_NEG_EIGVAL = 1.5  # factor where beta is in (0, 2)
LINEAR_ATTENTION_CORRELATED_KEYS = 3e-2  # instead, for keys that are nearly alike
LINEAR_ATTENTION_CORRELATED_KEYS_DG = 1e-1
LINEAR_ATTENTION_DECODE_O = 2.5e-3  # token by token in float32: the rounding of the output
LINEAR_ATTENTION_DECODE_STATE = 2e-6  # a FLOAT state, per step
ZERO_NORM = 1e-6  # of an output that is exactly zero
LARGEST = {
    data_type.HALF: 65504.0,
    data_type.BFLOAT16: 3.3895313892515355e38,
    data_type.FLOAT: 3.4028234663852886e38,
}


def bound(truth: Array, dtype: data_type, *, statistic_of: data_type | None = None) -> Array:
    """The largest error allowed at each element, given the truth in float64."""
    size = np.abs(truth)
    if statistic_of in (data_type.HALF, data_type.BFLOAT16):
        return np.maximum(
            STATISTIC_OF_HALF, CLOSE[dtype] * (1 + size)
        )  # large ones are bound by their own type
    if dtype in CLOSE:
        return CLOSE[dtype] * (1 + size)
    if dtype in GRID:
        mantissa, smallest, _ = GRID[dtype]
        with np.errstate(divide="ignore"):
            exponent = np.maximum(np.floor(np.log2(size)), smallest)
        return 2.0 ** (exponent - mantissa) + GRID_RELATIVE * size
    return np.zeros(truth.shape)


def mismatch(
    result: Array,
    truth: Array,
    dtype: data_type,
    *,
    statistic_of: data_type | None = None,
    exact: bool = False,
    frobenius: float | None = None,
) -> str | None:
    """None when `result` (of the output's own type) is the truth within tolerance; else what is wrong, in
    words. `frobenius`: a bound of the relative norm of the error in place of bounds of its elements."""
    if result.shape != truth.shape:
        return f"shape {result.shape}, expected {truth.shape}"
    if frobenius is not None:
        return _norm_mismatch(result.astype(np.float64), truth.astype(np.float64), frobenius)
    exact = exact or dtype is data_type.FP8_E8M0  # powers of two: the next one is no rounding of this one
    if dtype not in CLOSE and dtype not in GRID and not exact:
        wrong = result.astype(np.int64) != truth.astype(np.int64)
        return _worst(wrong, wrong.astype(np.float64), result, truth, "exact") if wrong.any() else None
    found, truth = result.astype(np.float64), truth.astype(np.float64)
    if exact:
        wrong = (found != truth) & ~(np.isnan(found) & np.isnan(truth))
        return _worst(wrong, wrong.astype(np.float64), found, truth, "exact") if wrong.any() else None
    if dtype in GRID:
        largest = GRID[dtype][2]
        truth = np.clip(truth, -largest, largest)  # conversions to 8 and 4 bits saturate; NaN stays NaN
    elif dtype in LARGEST:
        # What rounds beyond the largest finite value is infinite; within tolerance of it, either will do.
        over = (np.abs(truth) > LARGEST[dtype]) & ~(
            np.isfinite(found) & (np.abs(truth) < 1.01 * LARGEST[dtype])
        )
        truth = np.where(over, np.copysign(np.inf, truth), truth)
    with np.errstate(invalid="ignore"):
        error = np.abs(found - truth)
        close = (
            (error <= bound(truth, dtype, statistic_of=statistic_of))
            & np.isfinite(found)
            & np.isfinite(truth)
        )
    wrong = ~close & (found != truth) & ~(np.isnan(found) & np.isnan(truth))
    return _worst(wrong, error, found, truth, dtype.name) if wrong.any() else None


def linear_attention(port: str, dtype: data_type, *, neg_eigval: bool = False, correlated: bool = False) -> float:
    """The bound for one output of gated linear attention; `dtype` is that of q, k and v."""
    most = LINEAR_ATTENTION[port]
    if correlated:
        most = LINEAR_ATTENTION_CORRELATED_KEYS_DG if port == "dG" else LINEAR_ATTENTION_CORRELATED_KEYS
    return most * LINEAR_ATTENTION_TYPES[dtype] * (LINEAR_ATTENTION_NEG_EIGVAL if neg_eigval else 1.0)


def relative_norm(result: Array, truth: Array) -> float:
    """|result - truth| / |truth| in the Frobenius norm; |result| where the truth is zero."""
    size = float(np.linalg.norm(truth.astype(np.float64)))
    error = float(np.linalg.norm(result.astype(np.float64) - truth.astype(np.float64)))
    return error / size if size else error


def _norm_mismatch(result: Array, truth: Array, most: float) -> str | None:
    if not np.isfinite(result).all():
        return f"{int((~np.isfinite(result)).sum())} of {result.size} elements are not finite"
    error = relative_norm(result, truth)
    bound = most if truth.any() else ZERO_NORM
    return None if error <= bound else f"relative error {error:.2e} in the Frobenius norm, at most {bound:.2e} allowed"


def _worst(wrong: Array, error: Array, found: Array, truth: Array, rule: str) -> str:
    score = np.where(wrong, np.nan_to_num(error, nan=np.inf, posinf=np.inf), -1)
    place = np.unravel_index(int(np.argmax(score)), score.shape)
    where = tuple(int(i) for i in place)
    return (
        f"{int(wrong.sum())} of {wrong.size} elements differ ({rule}); worst at {where}: "
        f"{found[place]!r}, expected {truth[place]!r}"
    )
