"""Checks of single tensors that a graph makes when it is validated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .datatypes import element_bits, scalar_bytes
from .enums import data_type
from .errors import explain, tensor_label
from .tensor import overlaps_itself, span

if TYPE_CHECKING:
    from .program import GraphIR
    from .tensor import Tensor

__all__ = ["check_ragged", "check_wired"]

_INT64_MAX = 2**63 - 1
_OFFSET_TYPES = (data_type.INT32, data_type.INT64)


def check_ragged(tensor: Tensor, offset: Tensor, graph: GraphIR) -> None:
    """The offset tensor of a ragged tensor: of the same graph, integer, one entry more than the batch.

    A 1-D offset tensor is promoted to [B+1, 1, 1, 1].
    """
    where = tensor_label(tensor)
    if offset._owner is not graph:
        raise ValueError(explain(where, f"its ragged offset {tensor_label(offset)} belongs to another graph"))
    if offset._data_type is None:
        offset._data_type = graph.io_data_type
    if offset._data_type not in _OFFSET_TYPES:
        raise ValueError(
            explain(
                where,
                f"its ragged offset {tensor_label(offset)} has the wrong data type",
                expected="INT32 or INT64",
                given=offset.get_data_type().name,
                next_step="set the data type of the offset tensor",
            )
        )
    if len(offset._dim) == 1 and len(offset._stride) == 1:
        offset._dim, offset._stride = (*offset._dim, 1, 1, 1), (*offset._stride, 1, 1, 1)
    if not tensor._dim or offset._dim != (tensor._dim[0] + 1, 1, 1, 1):
        raise ValueError(
            explain(
                where,
                f"its ragged offset {tensor_label(offset)} must hold one entry more than the batch",
                expected=f"[{tensor._dim[0] + 1 if tensor._dim else 'B+1'}, 1, 1, 1]",
                given=offset._dim,
            )
        )
    _check_scalar(offset)


def _check_scalar(tensor: Tensor) -> None:
    if tensor._is_pass_by_value and span(tensor._dim, tensor._stride) > 1:
        raise ValueError(
            explain(
                tensor_label(tensor),
                "a pass-by-value tensor holds one element",
                expected="extents of 1",
                given=tensor._dim,
                next_step="set_dim((1,)), or pass a buffer: set_is_pass_by_value(False)",
            )
        )


def check_wired(tensor: Tensor) -> None:
    """A tensor of a node: its span is addressable, its scalar fits, an output does not overlap itself."""
    dtype = tensor._data_type
    assert dtype is not None
    dim, stride = tensor._dim, tensor._stride
    elements = span(dim, stride)
    if max(elements, elements * element_bits(dtype) // 8, *dim, *stride) > _INT64_MAX:
        raise ValueError(
            explain(
                tensor_label(tensor),
                "the declaration spans more than 64-bit arithmetic can address",
                expected=f"at most {_INT64_MAX} elements and bytes",
                given=f"{elements} elements of {dtype.name} (dim {dim}, stride {stride})",
                next_step="declare smaller extents or strides",
            )
        )
    _check_scalar(tensor)
    if tensor._pass_by_value is not None:
        scalar_bytes(tensor._pass_by_value, dtype, tensor_label(tensor))
    # Where the entries of a ragged batch lie is told by the offsets of each call, not by the batch stride.
    first = 0 if tensor._ragged_offset is None else 1
    if tensor._producer is not None and not tensor._is_virtual and overlaps_itself(dim[first:], stride[first:]):
        raise ValueError(
            explain(
                tensor_label(tensor),
                "the layout of an output overlaps itself",
                expected="sorted by stride, each stride at least the span of the axes below it",
                given=f"dim {dim}, stride {stride}",
                next_step="set strides that give each element its own place",
            )
        )
