"""Operands whose buffer is not simply their array: packed 4-bit pairs, tiles of scale factors, ragged rows.

Operators see plain dense arrays: packed operands are unpacked before and packed after, so are tiles, and
ragged ones are padded with zeros to their declared dims before, and only the rows between two offsets are
written back after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opgraph.ir.datatypes import numpy_dtype, pack_subbyte, unpack_subbyte
from opgraph.ir.enums import data_type, tensor_reordering
from opgraph.ops.base import number
from opgraph.ops.scale_tiles import from_tiles, tiled_layout, to_tiles

if TYPE_CHECKING:
    from opgraph.ir.program import TensorSpec

__all__ = ["Packed", "Plain", "Ragged", "Tiled", "storage_of"]

Array = np.ndarray[Any, Any]


class Plain:
    """The buffer is the array."""

    __slots__ = ()
    direct = True  # a reference may write into the view of the buffer

    def load(self, slot: Any, values: list[Any]) -> Array:
        view: Array = slot.numpy()
        return view

    def store(self, slot: Any, values: list[Any], result: Array) -> None:
        np.copyto(slot.numpy(), result)


class Packed:
    """Two 4-bit elements per byte along the axis of stride 1."""

    __slots__ = ("_axis", "_data_type")
    direct = False

    def __init__(self, tensor: TensorSpec) -> None:
        axes = [a for a, (n, s) in enumerate(zip(tensor.dim, tensor.stride, strict=True)) if s == 1 and n > 1]
        self._axis = axes[-1] if axes else len(tensor.dim) - 1
        self._data_type = tensor.data_type

    def load(self, slot: Any, values: list[Any]) -> Array:
        packed = np.moveaxis(slot.numpy(), self._axis, -1)
        return np.moveaxis(unpack_subbyte(packed, self._data_type), -1, self._axis)

    def store(self, slot: Any, values: list[Any], result: Array) -> None:
        packed = pack_subbyte(np.moveaxis(result, self._axis, -1))
        np.copyto(slot.numpy(), np.moveaxis(packed, -1, self._axis))


class Tiled:
    """Block-scale factors in the tiles of F8_128x4; a store fills the padding of the last ones with 0."""

    __slots__ = ("_dim", "_dtype", "_size", "_stride")
    direct = False

    def __init__(self, tensor: TensorSpec) -> None:
        self._dim, self._stride = tensor.dim, tensor.stride
        self._dtype = numpy_dtype(tensor.data_type)
        self._size = number(tiled_layout(tensor.dim, tensor.stride)[0])

    def load(self, slot: Any, values: list[Any]) -> Array:
        return from_tiles(_memory(slot.ptr, self._size, self._dtype), self._dim, self._stride)

    def store(self, slot: Any, values: list[Any], result: Array) -> None:
        np.copyto(_memory(slot.ptr, self._size, self._dtype), to_tiles(result, self._stride))


class Ragged:
    """`[batch, heads, rows, width]` where entry b starts at element `offset[b] * multiplier` of the buffer.

    Within an entry the declared strides apply; it has as many rows as fit between its offset and the next
    one.
    """

    __slots__ = ("_dim", "_dtype", "_multiplier", "_offsets", "_stride")
    direct = False

    def __init__(self, tensor: TensorSpec, offsets: int) -> None:
        self._dim = tensor.dim
        self._stride = tensor.stride
        self._dtype = numpy_dtype(tensor.data_type)
        self._multiplier = tensor.ragged_offset_multiplier
        self._offsets = offsets  # register of the offset tensor

    def load(self, slot: Any, values: list[Any]) -> Array:
        dense = np.zeros(self._dim, self._dtype)
        for entry, rows in self._entries(slot, values):
            dense[entry, :, : rows.shape[1]] = rows
        return dense

    def store(self, slot: Any, values: list[Any], result: Array) -> None:
        for entry, rows in self._entries(slot, values):
            np.copyto(rows, result[entry, :, : rows.shape[1]])

    def _entries(self, slot: Any, values: list[Any]) -> Any:
        """(batch index, view [heads, rows, width] of the buffer) of every entry that has rows."""
        _, heads, most, width = self._dim
        _, head_step, row_step, width_step = self._stride
        offsets = values[self._offsets].reshape(-1).astype(np.int64) * self._multiplier
        item = self._dtype.itemsize
        flat = _memory(slot.ptr, int(offsets[-1]) * item, self._dtype)
        last = (heads - 1) * head_step + (width - 1) * width_step  # last element of a row's heads
        for entry in range(self._dim[0]):
            held = int(offsets[entry + 1] - offsets[entry]) - 1 - last
            rows = min(most, held // row_step + 1) if held >= 0 else 0
            if rows and heads and width:
                yield (
                    entry,
                    np.lib.stride_tricks.as_strided(
                        flat[int(offsets[entry]) :],
                        (heads, rows, width),
                        (head_step * item, row_step * item, width_step * item),
                    ),
                )


class _Interface:
    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _memory(address: int, size: int, dtype: np.dtype[Any]) -> Array:
    """A writable one-dimensional view of memory that the call's slot keeps alive."""
    if size == 0:
        return np.empty(0, dtype)
    return np.asarray(_Interface(address, size)).view(dtype)


def storage_of(tensor: TensorSpec, register: dict[int, int]) -> Plain | Packed | Tiled | Ragged:
    """How an operand's buffer holds its array. `register` maps uids to registers."""
    if tensor.ragged_offset is not None:
        return Ragged(tensor, register[tensor.ragged_offset])
    if tensor.data_type in (data_type.FP4_E2M1, data_type.INT4):
        return Packed(tensor)
    if tensor.reordering_type is tensor_reordering.F8_128x4 and not tensor.is_virtual:
        return Tiled(tensor)
    return _PLAIN


_PLAIN = Plain()
