"""The arithmetic of the normalisations on the CPU: rows [rows, n] that are normalised over n."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import ADDED_IN_TURN, Array

__all__ = ["layernorm_rows", "norm_backward_rows", "rmsnorm_rows"]

# From a mean of this many standard deviations on, layer normalisation takes the mean off in two steps: the
# rounding of a float32 mean is 2**-24 of it, which 16 deviations raise to 1e-6 of the result.
_FAR_FROM_ZERO = 16

# Rows are worked on in blocks of this many bytes, so that the passes over a block find it in the cache.
_BLOCK_BYTES = 1 << 19


def layernorm_rows(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    epsilon: float,
    out: Array,
    mean: Array | None,
    inv_std: Array | None,
) -> None:
    """`out = (x - mean) / sqrt(var + epsilon) * scale + bias` for each row; all arrays of one floating type.

    x and out [rows, n], scale and bias [n] or None; mean and inv_std [rows] are filled, or None. out may not
    overlap the others.
    """
    if _layernorm_native(x, scale, bias, epsilon, out, mean, inv_std):
        return
    count, length = x.shape
    ones = np.ones(length, x.dtype)
    for block in _blocks(count, length, x.itemsize):
        y = out[block]
        average = x[block] @ ones
        average /= max(length, 1)
        np.subtract(x[block], average[:, None], out=y)
        inverse = _inverse_root(y, epsilon)
        if np.any(np.abs(average) * inverse > _FAR_FROM_ZERO):
            # The rounding of the mean shows in y. Its remainder is small, so it is taken off almost exactly.
            rest = y @ ones
            rest /= max(length, 1)
            np.subtract(y, rest[:, None], out=y)
            average += rest
            inverse = _inverse_root(y, epsilon)
        _apply(y, y, inverse, scale, bias)
        if mean is not None:
            mean[block] = average
        if inv_std is not None:
            inv_std[block] = inverse


def _layernorm_native(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    epsilon: float,
    out: Array,
    mean: Array | None,
    inv_std: Array | None,
) -> bool:
    """`layernorm_rows` in one pass, for float32; False where that is not possible or not exact enough."""
    if x.dtype != np.float32 or not x.size or not (x.flags.c_contiguous and out.flags.c_contiguous):
        return False
    from .. import _native  # here, so that the operators can be described without the native module

    means: Any = np.empty(len(x), x.dtype) if mean is None else mean
    inverses: Any = np.empty(len(x), x.dtype) if inv_std is None else inv_std
    weight = None if scale is None else np.ascontiguousarray(scale)
    shift = None if bias is None else np.ascontiguousarray(bias)
    _native.layernorm_rows(x, weight, shift, epsilon, out, means, inverses)
    return not np.any(np.abs(means) * inverses > _FAR_FROM_ZERO)


def rmsnorm_rows(
    x: Array, scale: Array | None, bias: Array | None, epsilon: float, out: Array, inv_std: Array | None
) -> None:
    """`out = x / sqrt(mean(x^2) + epsilon) * scale + bias` for each row; arrays as for `layernorm_rows`."""
    count, length = x.shape
    for block in _blocks(count, length, x.itemsize):
        inverse = _inverse_root(x[block], epsilon)
        _apply(x[block], out[block], inverse, scale, bias)
        if inv_std is not None:
            inv_std[block] = inverse


def _blocks(count: int, length: int, itemsize: int) -> list[slice]:
    step = max(1, _BLOCK_BYTES // max(1, length * itemsize))
    return [slice(start, start + step) for start in range(0, count, step)]


def _inverse_root(rows: Array, epsilon: float) -> Array:
    """1 / sqrt(mean of squares + epsilon) of each row."""
    result: Array = np.vecdot(rows, rows)
    result /= max(rows.shape[1], 1)
    result += epsilon
    np.sqrt(result, out=result)
    return np.divide(1, result, out=result)


def _apply(x: Array, y: Array, inverse: Array, scale: Array | None, bias: Array | None) -> None:
    np.multiply(x, inverse[:, None], out=y)
    if scale is not None:
        np.multiply(y, scale, out=y)
    if bias is not None:
        np.add(y, bias, out=y)


def _column_sums(rows: Array) -> Array:
    """The sum of the rows. NumPy adds them one by one, so many short ones are added in float64."""
    total: Array = rows.sum(axis=0, dtype=np.float64 if len(rows) > ADDED_IN_TURN else None)
    return total


def norm_backward_rows(
    grad: Array,
    x: Array,
    scale: Array | None,
    mean: Array | None,
    inv_std: Array,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """Gradients of both normalisations for each row; without `mean` those of the RMS form.

    grad, x and dx [rows, n]; scale [n] or None; mean and inv_std [rows]; dscale and dbias [n] (float64) are
    added to, or None. dx may not overlap the others.
    """
    count, length = x.shape
    ones = np.ones(length, x.dtype)
    for block in _blocks(count, length, x.itemsize):
        dy, inverse, g = grad[block], inv_std[block, None], dx[block]
        if mean is None:
            xh = x[block] * inverse
        else:
            xh = x[block] - mean[block, None]
            np.multiply(xh, inverse, out=xh)
        if dbias is not None:
            dbias += _column_sums(dy)
        np.multiply(dy, xh, out=g)
        if dscale is not None:
            dscale += _column_sums(g)
        # The mean of g * xh is one product with scale, as g * xh = (dy * xh) * scale.
        projection = g @ (ones if scale is None else scale)
        projection /= max(length, 1)
        if scale is None:
            np.copyto(g, dy)
        else:
            np.multiply(dy, scale, out=g)
        np.multiply(xh, projection[:, None], out=xh)
        if mean is not None:
            average = g @ ones
            average /= max(length, 1)
            np.subtract(g, average[:, None], out=g)
        np.subtract(g, xh, out=g)
        np.multiply(g, inverse, out=g)
