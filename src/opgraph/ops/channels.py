"""What batch and instance normalisation share: channel tensors, and statistics over some axes of [N, C, ...].

A statistic keeps x's extents on some axes (axis 1, or axes 0 and 1) and has 1 on the others; a channel tensor
is [1, C, 1, ..]. All functions take arrays of any layout, in blocks that stay in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.errors import tensor_label
from .base import (
    ADDED_IN_TURN,
    Array,
    RefCall,
    channels_last,
    check_set_dim,
    malformed,
    number,
    set_dim,
    set_stride,
)
from .blocking import blocks, destination, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "backward",
    "channel_dim",
    "check_channels",
    "check_statistic",
    "infer_gradients",
    "moments",
    "normalise",
    "sums",
]

# Elements of a block: 512 KiB of float32, so that the passes over a block find it in the cache.
_BLOCK = 1 << 17
# Smaller ones cost more in calls than they save.
_LEAST_BLOCK = 1 << 13


# -- inference -----------------------------------------------------------------------------------------------


def channel_dim(node: Any, x: Any) -> tuple[int, ...]:
    """[1, C, 1, ..] of x; `ValueError` when x has no channel axis."""
    if len(x.dim) < 2:
        malformed(
            node,
            "the input has a batch and a channel axis",
            tensor=x,
            expected="[N, C, ...]",
            given=x.dim,
            next_step="add an extent of 1",
        )
    return (1, x.dim[1], *(1,) * (len(x.dim) - 2))


def check_channels(node: Any, x: Any, *ports: str) -> None:
    """`ValueError` unless each of the input ports that is there is [1, C, 1, ..]."""
    dim = channel_dim(node, x)
    for port in ports:
        tensor = node.inputs.get(port)
        if tensor is not None and tensor.dim != dim:
            malformed(
                node,
                f"{port} has the extent of {tensor_label(x)} on axis 1 and 1 elsewhere",
                tensor=tensor,
                expected=dim,
                given=tensor.dim,
            )


def check_statistic(node: Any, tensor: Any, dim: tuple[int, ...]) -> None:
    """Fills dim and (channels-last) stride of a statistic or of a channel gradient; `ValueError` when its dim
    was set to another one.
    """
    if tensor.dim and tensor.dim != dim:
        malformed(
            node,
            "the dim set on the output differs from the one of the statistic",
            tensor=tensor,
            expected=dim,
            given=tensor.dim,
            next_step="leave it unset",
        )
    set_dim(tensor, dim)
    set_stride(tensor, channels_last(dim))


def infer_gradients(node: Any, statistic: tuple[int, ...]) -> None:
    """DX like x but channels-last, DSCALE and DBIAS [1, C, 1, ..]; mean and inv_variance must be
    `statistic`."""
    grad, x = node.inputs["grad"], node.inputs["input"]
    if grad.dim != x.dim:
        malformed(node, "grad must have the input's dim", tensor=grad, expected=x.dim, given=grad.dim)
    check_channels(node, x, "scale")
    for port in ("mean", "inv_variance"):
        tensor = node.inputs[port]
        if tensor.dim != statistic:
            malformed(
                node,
                f"{port} has the dim that the forward operator gives it",
                tensor=tensor,
                expected=statistic,
                given=tensor.dim,
            )
    dx = node.outputs["DX"]
    check_set_dim(node, dx, x.dim)
    set_dim(dx, x.dim)
    set_stride(dx, channels_last(dx.dim))
    for port in ("DSCALE", "DBIAS"):
        check_statistic(node, node.outputs[port], channel_dim(node, x))


# -- reference -----------------------------------------------------------------------------------------------


def _blocks(array: Array) -> Iterator[tuple[slice, ...]]:
    order = sorted(range(array.ndim), key=lambda axis: (array.shape[axis] != 1, -abs(array.strides[axis])))
    limit = _BLOCK
    if order[-1] == 1:
        # Channels innermost: places are added in turn, of which float32 takes so many, see ADDED_IN_TURN.
        limit = min(limit, max(ADDED_IN_TURN * array.shape[1], _LEAST_BLOCK))
    return blocks(array.shape, order, limit)


def _axes(block: Array, part: Array) -> tuple[int, ...]:
    return tuple(axis for axis, n in enumerate(part.shape) if n == 1 and block.shape[axis] != 1)


def _total(values: Array, axes: tuple[int, ...]) -> Array:
    """The sum over `axes`, which stay as 1, in float64; float32 values are added as ADDED_IN_TURN says."""
    in_turn = number(values.shape[axis] for axis in axes)
    fastest = min(range(values.ndim), key=lambda axis: (values.shape[axis] == 1, abs(values.strides[axis])))
    if fastest in axes:
        in_turn //= values.shape[fastest]
    dtype = np.float64 if in_turn > ADDED_IN_TURN else values.dtype
    return np.add.reduce(values, axis=axes, dtype=dtype, keepdims=True).astype(np.float64, copy=False)


def moments(x: Array, shape: tuple[int, ...], load: Callable[[Array], Array]) -> tuple[Array, Array, int]:
    """(mean, biased variance, count) of x for each entry of a statistic of `shape`, in float64.

    `load` brings a block into the math dtype. Each block is centred on its own mean and the blocks are merged
    (Chan, Golub and LeVeque), so large means cost no digits. No elements have mean 0 and variance 0.
    """
    mean, squares, seen = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for block in _blocks(x):
        values = load(x[block])
        part = part_of(mean, block)
        axes = _axes(values, part)
        n = values.size // part.size
        centre = (_total(values, axes) / n).astype(values.dtype)
        values = values - centre
        # What the rounding of the centre and of the sum left over.
        rest = _total(values, axes) / n
        np.multiply(values, values, out=values)
        spread = _total(values, axes) - n * rest * rest
        before = part_of(seen, block)
        apart = centre + rest - part
        part += apart * (n / (before + n))
        total = part_of(squares, block)
        total += spread + apart * apart * (before * n / (before + n))
        before += n
    count = number(x.shape) // max(number(shape), 1)
    np.maximum(squares, 0, out=squares)
    return mean, squares / max(count, 1), count


def sums(x: Array, shape: tuple[int, ...], load: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Sums of x and of x^2 for each entry of a statistic of `shape`, in float64."""
    total, squares = np.zeros(shape), np.zeros(shape)
    for block in _blocks(x):
        values = load(x[block])
        part = part_of(total, block)
        axes = _axes(values, part)
        part += _total(values, axes)
        part = part_of(squares, block)
        part += _total(values * values, axes)
    return total, squares


class _Centre:
    """Takes the mean off a block: in two steps where the rounding of a float32 mean would show."""

    __slots__ = ("_high", "_low")

    def __init__(self, mean: Array, inverse: Array, dtype: Any) -> None:
        self._high = mean.astype(dtype)
        rest = mean - self._high
        # Below 1e-7 standard deviations the remainder is lost in the result's own rounding.
        self._low = rest.astype(dtype) if np.any(np.abs(rest) * inverse > 1e-7) else None

    def __call__(self, values: Array, block: Sequence[slice], out: Array | None = None) -> Array:
        centred = np.subtract(values, part_of(self._high, block), out=out)
        if self._low is not None:
            np.subtract(centred, part_of(self._low, block), out=centred)
        return centred


def normalise(call: RefCall, mean: Array, inverse: Array, scale: Array, bias: Array) -> Array:
    """(x - mean) * inverse * scale + bias of the port `input`, made in the memory of Y where it can be.

    mean and inverse are statistics in float64, scale and bias channel tensors.
    """
    x, load = call.inputs["input"], call.math.real
    dtype = load(x[:0]).dtype
    y = destination(call, call.outputs["Y"], x.shape, dtype, x)
    centre = _Centre(mean, inverse, dtype)
    factor, shift = (inverse * scale.astype(np.float64)).astype(dtype), bias.astype(dtype)
    for block in _blocks(x):
        part = y[block]
        centre(load(x[block]), block, part)
        np.multiply(part, part_of(factor, block), out=part)
        np.add(part, part_of(shift, block), out=part)
    return y


def backward(call: RefCall, mean: Array, inverse: Array, scale: Array) -> dict[str, Array]:
    """DX, DSCALE and DBIAS, for statistics of any shape and a channel tensor `scale`.

    With m elements for each entry of a statistic, the sums of dy and dy * xh over them, and xh = (x - mean) *
    inverse: DX = scale * inverse * (dy - sum(dy) / m - xh * sum(dy * xh) / m). DBIAS and DSCALE are those
    sums, added up for each channel.
    """
    x, grad, load = call.inputs["input"], call.inputs["grad"], call.math.real
    dtype = load(x[:0]).dtype
    inverse = inverse.astype(np.float64)
    centre = _Centre(mean.astype(np.float64), inverse, dtype)
    of_grad, of_product = np.zeros(mean.shape), np.zeros(mean.shape)
    for block in _blocks(x):
        dy = load(grad[block])
        product = centre(load(x[block]), block)
        np.multiply(product, dy, out=product)
        part = part_of(of_grad, block)
        axes = _axes(dy, part)
        part += _total(dy, axes)
        part = part_of(of_product, block)
        part += _total(product, axes)
    of_product *= inverse
    count = max(number(x.shape) // max(number(mean.shape), 1), 1)
    factor = (inverse * scale.astype(np.float64)).astype(dtype)
    slope, shift = (inverse * of_product / count).astype(dtype), (of_grad / count).astype(dtype)
    dx = destination(call, call.outputs["DX"], x.shape, dtype, x)
    for block in _blocks(x):
        part = dx[block]
        centre(load(x[block]), block, part)
        np.multiply(part, part_of(slope, block), out=part)
        np.add(part, part_of(shift, block), out=part)
        np.subtract(load(grad[block]), part, out=part)
        np.multiply(part, part_of(factor, block), out=part)
    others = tuple(axis for axis in range(x.ndim) if axis != 1)
    return {
        "DX": dx,
        "DSCALE": of_product.sum(axis=others, keepdims=True),
        "DBIAS": of_grad.sum(axis=others, keepdims=True),
    }
