"""The arithmetic of convolutions: patches of the image against the filter as matrix products, block by block.

A block is a range of images and response positions. Its windows (im2col) are a strided view of the image,
copied into a matrix of bounded size, so that one BLAS product for each group does the work. Two orders of
the matrix serve the two kinds of layout: positions innermost for NCHW, channels innermost for NHWC.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..ir.enums import convolution_mode
from .base import Array, RefCall, number
from .blocking import blocks, destination
from .matmul import magnitude

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["dgrad_reference", "fprop_reference", "wgrad_reference"]

# Elements of a block's matrix: 8 MiB of float32. A longer one makes the product no faster.
_BLOCK = 1 << 21
# Elements of a block where no matrix is made: 256 KiB of float32, so that the passes over it hit the cache.
_SMALL_BLOCK = 1 << 16
# Fewer channels in a group than this do not fill a vector register: then positions go innermost.
_CHANNELS = 8


class _Sizes:
    """The extents of one convolution: n images, `groups` of c channels and k responses, taps, positions."""

    __slots__ = ("c", "dilation", "flip", "groups", "k", "n", "padding", "positions", "stride", "taps", "x")

    def __init__(
        self, params: Any, image: Sequence[int], filter: Sequence[int], response: Sequence[int]
    ) -> None:
        self.n = image[0]
        self.c = filter[1]
        self.groups = image[1] // filter[1] if filter[1] else 1
        self.k = filter[0] // self.groups
        self.x = tuple(image[2:])
        self.taps = tuple(filter[2:])
        self.positions = tuple(response[2:])
        self.padding = params["pre_padding"] if params["padding"] is None else params["padding"]
        self.stride = params["stride"]
        self.dilation = params["dilation"]
        self.flip = params["convolution_mode"] is convolution_mode.CONVOLUTION

    @property
    def depthwise(self) -> bool:
        """One channel for each of several groups: worked on tap by tap, as products would be tiny."""
        return self.c == 1 and self.groups > 1

    def flipped(self, filter: Array) -> Array:
        """The filter as a cross correlation uses it, and back."""
        backwards: Any = (..., *(slice(None, None, -1),) * len(self.taps))
        return filter[backwards] if self.flip else filter

    def blocks(self) -> Iterator[tuple[slice, ...]]:
        """Ranges of images and positions whose matrices of windows and responses stay within the bound."""
        shape = (self.n, *self.positions)
        if self.depthwise:
            limit, per_position = _SMALL_BLOCK, self.groups * max(self.k, 1)
        else:
            limit, per_position = _BLOCK, self.groups * max(self.c * number(self.taps), self.k)
        return blocks(shape, range(len(shape)), max(limit // max(per_position, 1), 1))

    def taken(self, tap: Sequence[int], block: Sequence[slice]) -> tuple[list[slice], list[slice]]:
        """Where a tap meets the image: (spatial index of the image, spatial index within the block)."""
        images, positions = [], []
        for axis, (r, cut) in enumerate(zip(tap, block[1:], strict=True)):
            step, shift = self.stride[axis], r * self.dilation[axis] - self.padding[axis]
            first = max(cut.start, -(shift // step))
            last = min(cut.stop, (self.x[axis] - 1 - shift) // step + 1)
            last = max(first, last)
            positions.append(slice(first - cut.start, last - cut.start))
            images.append(slice(first * step + shift, max(last * step + shift - step + 1, 0), step))
        return images, positions


class _Numbers:
    """The type that products and sums are made in, and the parts of operands in it.

    Integers go through float64, and so through BLAS, while every sum stays below 2**53; else through int64.
    """

    __slots__ = ("_load", "dtype")

    def __init__(self, call: RefCall, a: Array, b: Array, terms: int) -> None:
        math = call.math
        self._load = math.load
        self.dtype = math.dtype
        if math.dtype.kind != "f":
            self._load = math.numeric
            exact = magnitude(math.numeric(a)) * magnitude(math.numeric(b)) * max(terms, 1) < 2**53
            self.dtype = np.dtype(np.float64 if exact else np.int64)

    def __call__(self, part: Array) -> Array:
        return self._load(part).astype(self.dtype, copy=False)


def _channels_innermost(array: Array, sizes: _Sizes) -> bool:
    steps = [abs(s) for n, s in zip(array.shape[2:], array.strides[2:], strict=True) if n > 1]
    return (
        array.shape[1] > 1
        and sizes.c >= min(_CHANNELS, array.shape[1])
        and abs(array.strides[1]) <= min(steps, default=0)
    )


def _windows(x: Array, sizes: _Sizes, block: Sequence[slice], numbers: _Numbers) -> Array:
    """[n, groups, c, *positions, *taps] of a block: a view of the image, or of a padded copy of its part."""
    inside: list[Any] = [block[0], slice(None)]
    around: list[Any] = [...]
    shape: list[int] = []
    for axis, cut in enumerate(block[1:]):
        step, before, extent = sizes.stride[axis], sizes.padding[axis], sizes.x[axis]
        start = cut.start * step - before
        stop = (cut.stop - 1) * step - before + (sizes.taps[axis] - 1) * sizes.dilation[axis] + 1
        low = min(max(start, 0), extent)
        high = max(min(stop, extent), low)
        inside.append(slice(low, high))
        around.append(slice(low - start, high - start))
        shape.append(stop - start)
    part = numbers(x[tuple(inside)])
    if part.shape[2:] != tuple(shape):
        padded = np.empty_like(part, shape=(*part.shape[:2], *shape))
        padded.fill(0)
        padded[tuple(around)] = part
        part = padded
    n, c, *spatial = part.strides
    return as_strided(
        part,
        (part.shape[0], sizes.groups, sizes.c, *_lengths(block[1:]), *sizes.taps),
        (
            n,
            sizes.c * c,
            c,
            *(step * s for step, s in zip(sizes.stride, spatial, strict=True)),
            *(step * s for step, s in zip(sizes.dilation, spatial, strict=True)),
        ),
        writeable=False,
    )


def _lengths(cuts: Sequence[slice]) -> tuple[int, ...]:
    return tuple(cut.stop - cut.start for cut in cuts)


def _grouped(array: Array, groups: int) -> Array:
    """[n, channels, ...] as [n, groups, channels of one, ...]: a view in any layout."""
    return array.reshape(array.shape[0], groups, array.shape[1] // groups, *array.shape[2:])


def _of_groups(block: Sequence[slice]) -> Any:
    """The index of a block in what `_grouped` gives."""
    return (block[0], slice(None), slice(None), *block[1:])


def _last(array: Array, index: Sequence[Any]) -> Array:
    """Indexes the last axes."""
    place: Any = (..., *index)
    part: Array = array[place]
    return part


def _matrix(array: Array, *axes: Sequence[int]) -> Array:
    """The array with each list of axes merged to one; a view where the memory allows."""
    order = [axis for merged in axes for axis in merged]
    return array.transpose(order).reshape([number(array.shape[axis] for axis in merged) for merged in axes])


def _axes(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of positions and of taps in windows [n, groups, c, *positions, *taps]."""
    return tuple(range(3, 3 + rank)), tuple(range(3 + rank, 3 + 2 * rank))


def fprop_reference(call: RefCall) -> dict[str, Array]:
    """`conv_fprop`: Y = weight @ windows for each group and block."""
    x, weight, out = call.inputs["image"], call.inputs["weight"], call.outputs["Y"]
    shape = (x.shape[0], weight.shape[0], *out.shape[len(out.shape) - x.ndim + 2 :])
    sizes = _Sizes(call.params, x.shape, weight.shape, shape)
    numbers = _Numbers(call, x, weight, sizes.c * number(sizes.taps))
    y = destination(call, out, shape, numbers.dtype, x)
    weights = numbers(sizes.flipped(weight)).reshape(sizes.groups, sizes.k, sizes.c, *sizes.taps)
    responses = _grouped(y, sizes.groups)
    rank = len(sizes.taps)
    positions, taps = _axes(rank)
    with np.errstate(all="ignore"):
        if sizes.depthwise:
            for block in sizes.blocks():
                windows = _windows(x, sizes, block, numbers)
                _depthwise(windows, weights, responses[_of_groups(block)])
            return {"Y": y}
        inner = _channels_innermost(x, sizes)
        if inner:
            filters = _matrix(weights, (0,), (*range(3, 3 + rank), 2), (1,))
        else:
            filters = _matrix(weights, (0,), (1,), range(2, 3 + rank))
        for block in sizes.blocks():
            windows = _windows(x, sizes, block, numbers)
            extents = (windows.shape[0], *windows.shape[3 : 3 + rank])
            if inner:
                found = _matrix(windows, (1,), (0, *positions), (*taps, 2)) @ filters
                found = np.moveaxis(found.reshape(sizes.groups, *extents, sizes.k), -1, 1)
            else:
                found = filters @ _matrix(windows, (1,), (2, *taps), (0, *positions))
                found = found.reshape(sizes.groups, sizes.k, *extents)
            responses[_of_groups(block)] = np.moveaxis(found, 2, 0)
    return {"Y": y}


def _factor(weights: Array, tap: Sequence[int], rank: int) -> Array:
    """[groups, k, 1, ..]: the weights [groups, k, 1, *taps] of one tap."""
    return _last(weights, (0, *tap)).reshape(*weights.shape[:2], *(1,) * rank)


def _depthwise(windows: Array, weights: Array, out: Array) -> None:
    """Fills out [n, groups, k, *positions] from windows [n, groups, 1, *positions, *taps]."""
    rank = out.ndim - 3
    total = np.empty_like(out)
    term = np.empty_like(out)
    for place, tap in enumerate(product(*map(range, weights.shape[3:]))):
        factor = _factor(weights, tap, rank)
        np.multiply(_last(windows, tap), factor, out=term if place else total)
        if place:
            np.add(total, term, out=total)
    np.copyto(out, total)


def _depthwise_gradient(losses: Array, weights: Array, image: Array, sizes: _Sizes, block: Any) -> None:
    """Adds what losses [n, groups, k, *positions] of a block give to image [n, groups, 1, *x]."""
    rank = losses.ndim - 3
    for tap in product(*map(range, sizes.taps)):
        places, positions = sizes.taken(tap, block)
        term = _last(losses, positions) * _factor(weights, tap, rank)
        target = image[_of_groups((block[0], *places))]
        np.add(target, term if sizes.k == 1 else term.sum(axis=2, keepdims=True), out=target)


def dgrad_reference(call: RefCall) -> dict[str, Array]:
    """`conv_dgrad`: what each tap gives back, filter^T @ loss, added up where the tap met the image."""
    loss, weight, out = call.inputs["loss"], call.inputs["filter"], call.outputs["DX"]
    sizes = _Sizes(call.params, out.shape, weight.shape, loss.shape)
    numbers = _Numbers(call, loss, weight, sizes.k * number(sizes.taps))
    dx = destination(call, out, out.shape, numbers.dtype, loss)
    dx.fill(0)
    weights = numbers(sizes.flipped(weight)).reshape(sizes.groups, sizes.k, sizes.c, *sizes.taps)
    losses, image = _grouped(loss, sizes.groups), _grouped(dx, sizes.groups)
    rank = len(sizes.taps)
    with np.errstate(all="ignore"):
        if sizes.depthwise:
            for block in sizes.blocks():
                _depthwise_gradient(numbers(losses[_of_groups(block)]), weights, image, sizes, block)
            return {"DX": dx}
        inner = _channels_innermost(dx, sizes)
        if inner:
            filters = _matrix(weights, (0,), (1,), (*range(3, 3 + rank), 2))
        else:
            filters = _matrix(weights, (0,), range(2, 3 + rank), (1,))
        for block in sizes.blocks():
            part = numbers(losses[_of_groups(block)])
            extents = (part.shape[0], *part.shape[3:])
            if inner:
                given = _matrix(part, (1,), (0, *range(3, 3 + rank)), (2,)) @ filters
                given = given.reshape(sizes.groups, *extents, *sizes.taps, sizes.c)
                # [n, groups, c, *positions, *taps]
                given = given.transpose(1, 0, 2 + 2 * rank, *range(2, 2 + 2 * rank))
            else:
                given = filters @ _matrix(part, (1,), (2,), (0, *range(3, 3 + rank)))
                given = given.reshape(sizes.groups, sizes.c, *sizes.taps, *extents)
                given = given.transpose(2 + rank, 0, 1, *range(3 + rank, 3 + 2 * rank), *range(2, 2 + rank))
            for tap in product(*map(range, sizes.taps)):
                places, positions = sizes.taken(tap, block)
                target = image[_of_groups((block[0], *places))]
                np.add(target, _last(_last(given, tap), positions), out=target)
    return {"DX": dx}


def wgrad_reference(call: RefCall) -> dict[str, Array]:
    """`conv_wgrad`: loss @ windows^T for each group, added up over blocks."""
    x, loss, out = call.inputs["image"], call.inputs["loss"], call.outputs["DW"]
    sizes = _Sizes(call.params, x.shape, out.shape, loss.shape)
    numbers = _Numbers(call, x, loss, sizes.n * number(sizes.positions))
    losses = _grouped(loss, sizes.groups)
    rank = len(sizes.taps)
    positions, taps = _axes(rank)
    inner = _channels_innermost(x, sizes)
    folded = (sizes.groups, sizes.k, sizes.c * number(sizes.taps))
    total = np.zeros(folded, numbers.dtype)
    with np.errstate(all="ignore"):
        for block in sizes.blocks():
            windows = _windows(x, sizes, block, numbers)
            part = numbers(losses[_of_groups(block)])
            if inner:
                right = _matrix(windows, (1,), (0, *positions), (*taps, 2))
                left = _matrix(part, (1,), (0, *positions), (2,)).transpose(0, 2, 1)
            else:
                right = _matrix(windows, (1,), (2, *taps), (0, *positions)).transpose(0, 2, 1)
                left = _matrix(part, (1,), (2,), (0, *positions))
            total += left @ right
    if inner:
        total = np.moveaxis(total.reshape(sizes.groups * sizes.k, *sizes.taps, sizes.c), -1, 1)
    return {"DW": sizes.flipped(total.reshape(out.shape))}
