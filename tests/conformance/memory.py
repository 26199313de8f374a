"""Operand memory with guards: one host image per operand, which a buffer maker turns into what `execute`
takes.

An image is the operand's bytes with guard bytes before and after. It starts as 0xFF everywhere, which is NaN
in every float type, so padding that is read or output that is not written shows, and a write outside the
declared elements too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from opgraph import data_type

Array = np.ndarray[Any, Any]

GUARD = 256  # bytes on each side; keeps the alignment that device allocators give
FILL = 0xFF

_PACKED = (data_type.FP4_E2M1, data_type.INT4)
ML_DTYPES = {
    data_type.BFLOAT16: "bfloat16",
    data_type.FP8_E4M3: "float8_e4m3fn",
    data_type.FP8_E5M2: "float8_e5m2",
    data_type.FP8_E8M0: "float8_e8m0fnu",
    data_type.FP4_E2M1: "float4_e2m1fn",
    data_type.INT4: "int4",
}


def numpy_dtype(dtype: data_type) -> np.dtype[Any]:
    """The NumPy type that stores one element; ml_dtypes is imported only for types that need it."""
    names = {
        data_type.FLOAT: "float32",
        data_type.DOUBLE: "float64",
        data_type.HALF: "float16",
        data_type.INT8: "int8",
        data_type.UINT8: "uint8",
        data_type.INT32: "int32",
        data_type.INT64: "int64",
        data_type.BOOLEAN: "bool",
    }
    if dtype in names:
        return np.dtype(names[dtype])
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, ML_DTYPES[dtype]))


def available(dtype: data_type) -> bool:
    """Whether this machine has a NumPy type for it."""
    try:
        numpy_dtype(dtype)
    except ImportError:
        return False
    return True


def stored(values: Any, dtype: data_type) -> Array:
    """Values in the type's own NumPy type: nearest, to even."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(numpy_dtype(dtype))


def exact(array: Array) -> Array:
    """Stored elements as the numbers they are: float64, int64 or bool."""
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "iu" or array.dtype.name == "int4":
        return array.astype(np.int64)
    return array.astype(np.float64)


class Buffer(Protocol):
    """An operand as `execute` takes it, and its image after the call."""

    operand: Any

    def image(self) -> Array: ...


# (image, first byte of the operand, dims, strides in elements, element type) -> Buffer
BufferMaker = Callable[[Array, int, Sequence[int], Sequence[int], data_type], Buffer]


class NumpyBuffer:
    """A strided NumPy array over the image itself."""

    def __init__(
        self, image: Array, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        self._image = image
        self.operand = strided(image, offset, dims, strides, numpy_dtype(dtype))

    def image(self) -> Array:
        return self._image


class AddressBuffer(NumpyBuffer):
    """The bare address of the first element."""

    def __init__(
        self, image: Array, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        super().__init__(image, offset, dims, strides, dtype)
        self.operand = image.ctypes.data + offset


def strided(
    image: Array, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]
) -> Array:
    """Elements of an image as an array."""
    steps = tuple(step * dtype.itemsize for step in strides)
    return np.ndarray(tuple(dims), dtype, image.data, offset, steps)


def aligned(size: int) -> Array:
    """`size` bytes of 0xFF at an address divisible by 256."""
    room = np.full(size + GUARD, FILL, np.uint8)
    start = -room.ctypes.data % GUARD
    return room[start : start + size]


class Region:
    """One operand's place: its declared geometry in storage units, its image, its buffer."""

    def __init__(
        self, dim: Sequence[int], stride: Sequence[int], dtype: data_type, make_buffer: BufferMaker
    ) -> None:
        self.dim, self.stride, self.dtype = tuple(dim), tuple(stride), dtype
        self.units, self.steps, self.unit_type = _storage(self.dim, self.stride, dtype)
        self.element = numpy_dtype(self.unit_type)
        span = 0
        if 0 not in self.units:
            span = 1 + sum((n - 1) * s for n, s in zip(self.units, self.steps, strict=True))
        self._start = aligned(span * self.element.itemsize + 2 * GUARD)
        self._make_buffer = make_buffer
        self._buffer: Buffer | None = None

    def fill(self, values: Array) -> None:
        """Puts elements (in the type's NumPy type) in place; padding stays NaN."""
        view = strided(self._start, GUARD, self.units, self.steps, self.element)
        view[...] = _packed(values, self.dim, self.stride) if self.dtype in _PACKED else values

    @property
    def operand(self) -> Any:
        if self._buffer is None:
            self._buffer = self._make_buffer(
                self._start.copy() if self._start.size == 0 else _copy(self._start),
                GUARD,
                self.units,
                self.steps,
                self.unit_type,
            )
        return self._buffer.operand

    def values(self) -> Array:
        """The elements after the call."""
        assert self._buffer is not None
        view = strided(self._buffer.image(), GUARD, self.units, self.steps, self.element).copy()
        return _unpacked(view, self.dim, self.stride, self.dtype) if self.dtype in _PACKED else view

    def changed_outside(self) -> str | None:
        """Where bytes that are no element changed, in words."""
        inside = np.zeros(self._start.shape, np.bool_)
        width = self.element.itemsize
        for byte in range(width):
            shifted = tuple(step * width for step in self.steps)
            np.ndarray(self.units, np.bool_, inside.data, GUARD + byte, shifted)[...] = True
        return self._changed(~inside)

    def changed(self) -> str | None:
        """Where any byte changed, in words."""
        return self._changed(np.ones(self._start.shape, np.bool_))

    def _changed(self, where: Array) -> str | None:
        assert self._buffer is not None
        places = np.flatnonzero(where & (self._buffer.image() != self._start))
        if not places.size:
            return None
        return (
            f"{places.size} bytes changed, the first at byte {int(places[0]) - GUARD} from the first element"
        )


def _copy(image: Array) -> Array:
    copy = aligned(image.size)
    copy[...] = image
    return copy


def _storage(
    dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type
) -> tuple[tuple[int, ...], tuple[int, ...], data_type]:
    """Dims and strides in storage units: pairs of 4-bit elements along the axis of stride 1."""
    if dtype not in _PACKED:
        return dim, stride, dtype
    axis = _pair_axis(dim, stride)
    units = tuple(n // 2 if a == axis else n for a, n in enumerate(dim))
    steps = tuple(s if a == axis else s // 2 for a, s in enumerate(stride))
    return units, steps, data_type.UINT8


def _pair_axis(dim: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return next(a for a, (n, s) in enumerate(zip(dim, stride, strict=True)) if s == 1 and n > 1)


def _packed(values: Array, dim: tuple[int, ...], stride: tuple[int, ...]) -> Array:
    axis = _pair_axis(dim, stride)
    nibbles = np.moveaxis(values.view(np.uint8) & 0xF, axis, -1)
    return np.moveaxis(nibbles[..., 0::2] | nibbles[..., 1::2] << 4, -1, axis)


def _unpacked(units: Array, dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type) -> Array:
    axis = _pair_axis(dim, stride)
    pairs = np.moveaxis(units, axis, -1)
    nibbles = np.stack([pairs & 0xF, pairs >> 4], -1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
    if dtype is data_type.INT4:
        signed = nibbles.astype(np.int8)
        values = np.where(signed > 7, signed - 16, signed).astype(numpy_dtype(dtype))
    else:
        values = nibbles.view(numpy_dtype(dtype))
    return np.moveaxis(values, -1, axis)
