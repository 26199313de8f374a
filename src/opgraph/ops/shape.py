"""Operators that move elements and compute nothing: `reshape`, `transpose`, `slice`, `concatenate`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import round_to
from ..ir.enums import NodeType, reshape_mode
from ..ir.errors import tensor_label
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    channels_last,
    check_set_dim,
    format_preserving,
    graph_op,
    malformed,
    number,
    set_data_type,
    set_dim,
    set_stride,
    unsupported,
)

if TYPE_CHECKING:
    from builtins import slice as Slice
    from collections.abc import Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "ShapeOps"]


class ShapeOps(GraphOps):
    """Operators of the graph that move elements and compute nothing."""

    __slots__ = ()

    @graph_op
    def reshape(
        self,
        input: Any,
        reshape_mode: reshape_mode = reshape_mode.VIEW_ONLY,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """The same elements under other dims, which MUST be set with `out_dims=` or `set_dim`.

        VIEW_ONLY reads the memory of the input, as its dim and stride describe it, through the output's dim
        and stride: where both are dense and row-major this is the usual reshape. LOGICAL keeps the row-major
        order of indices whatever the strides are. Both keep the number of elements; neither converts.

        Strides default to channels-last (axis 1 fastest, then the last axis down to axis 2, axis 0 slowest)
        for rank 2 and more: in rank 2 that is row-major, in rank 3 it is not, so set the stride too. The data
        type defaults to the input's.

        Raises at `validate()`: `ValueError` when the dims are not set, the element counts differ or the data
        type is another one than the input's; `cudnnGraphNotSupportedError` for a VIEW_ONLY output whose
        strides do not cover exactly the memory of the input.
        """
        return self._add_node(
            "reshape",
            inputs={"IN_0": input},
            outputs=("OUT_0",),
            params={"reshape_mode": _mode(reshape_mode)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]

    @graph_op
    def transpose(
        self,
        input: Any,
        permutation: Sequence[int] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Permutes the axes: axis i of the output is axis `permutation[i]` of the input.

        Dim and stride are the input's, permuted: a view. The data type is the input's.

        Raises `ValueError` at `validate()` when the permutation is missing or is none of all axes, or the
        data type set on the output is another one than the input's; `cudnnGraphNotSupportedError` for other
        dims set on it.
        """
        return self._add_node(
            "transpose",
            inputs={"IN_0": input},
            outputs=("OUT_0",),
            params={"permutation": None if permutation is None else tuple(index(axis) for axis in permutation)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]

    @graph_op
    def slice(
        self,
        input: Any,
        slices: Sequence[Slice] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Part of each axis: `input[slices[0], slices[1], ...]`, one Python slice per axis.

        Starts and stops may be negative or None, as in Python; steps are 1 or more. Dim: the lengths. Stride:
        the input's times the step, a view. The data type is the input's.

        Raises `ValueError` at `validate()` for a number of slices that is not the rank, a step below 1, or a
        data type set on the output that is not the input's; `cudnnGraphNotSupportedError` for other dims set
        on it.
        """
        return self._add_node(
            "slice",
            inputs={"IN_0": input},
            outputs=("OUT_0",),
            params={"slices": None if slices is None else tuple(slices)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]

    @graph_op
    def concatenate(
        self,
        *,
        inputs: Sequence[Any] | None = None,
        axis: int | None = None,
        in_place_index: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Joins the inputs along `axis`, in order; keyword arguments only.

        Shapes: one rank; extents equal but on `axis`, where the output has their sum. Stride: dense, with the
        axis order of `inputs[0]`. The output takes the graph's default data type; each input is converted to
        it. `in_place_index` says that this input already lies in the output's memory, so that an engine may
        leave it; the result is the same.

        Raises `ValueError` at `validate()` when axis or inputs are missing, an axis or index is out of range,
        or the extents do not fit; `cudnnGraphNotSupportedError` for other dims set on the output.
        """
        tensors = [] if inputs is None else list(inputs)
        if any(tensor is None for tensor in tensors):
            raise TypeError("concatenate: an item of inputs is None")
        return self._add_node(
            "concatenate",
            inputs={f"IN_{i}": tensor for i, tensor in enumerate(tensors)},
            outputs=("OUT_0",),
            params={
                "axis": None if axis is None else index(axis),
                "in_place_index": None if in_place_index is None else index(in_place_index),
            },
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]


def _mode(value: Any) -> reshape_mode:
    if not isinstance(value, reshape_mode):
        raise TypeError(f"reshape: reshape_mode is a reshape_mode, given {value!r}")
    return value


def _keep_data_type(node: Any, source: Any, out: Any) -> None:
    """These operators do not convert: the output has the input's data type."""
    set_data_type(out, source.data_type)
    if out.data_type is not source.data_type:
        malformed(
            node,
            f"the data type must be that of {tensor_label(source)}",
            tensor=out,
            expected=source.data_type.name,
            given=out.data_type.name,
            next_step="convert with identity",
        )


# -- reshape -------------------------------------------------------------------------------------------------


def _infer_reshape(node: Any) -> None:
    source, out = node.inputs["IN_0"], node.outputs["OUT_0"]
    if not out.dim:
        malformed(node, "dims not set", tensor=out, next_step="pass out_dims= or call set_dim on the output")
    if number(out.dim) != number(source.dim):
        malformed(
            node,
            f"a reshape keeps the number of elements of {tensor_label(source)} {source.dim}",
            tensor=out,
            expected=f"{number(source.dim)} elements",
            given=f"{number(out.dim)} elements in {out.dim}",
        )
    _keep_data_type(node, source, out)
    set_stride(out, channels_last(out.dim))
    if node.params["reshape_mode"] is reshape_mode.VIEW_ONLY and number(out.dim):
        needed, held = _memory(out.dim, out.stride), _memory(source.dim, source.stride)
        if needed != held:
            unsupported(
                node,
                f"the strides of a VIEW_ONLY reshape do not address exactly what {tensor_label(source)} does",
                tensor=out,
                expected=f"strides that cover the memory of dim {source.dim}, stride {source.stride}",
                given=f"dim {out.dim}, stride {out.stride}",
                next_step="set other strides, or use reshape_mode.LOGICAL",
            )


def _memory(dim: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """The offsets that a layout addresses, as (extent, stride) pairs merged where they are dense together.

    Equal lists address equal offsets, each as often.
    """
    merged: list[tuple[int, int]] = []
    for step, extent in sorted((step, extent) for extent, step in zip(dim, stride, strict=True) if extent != 1):
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, step))
    return merged


def _reshape(call: RefCall) -> dict[str, Array]:
    source, out = call.inputs["IN_0"], call.outputs["OUT_0"]
    if call.params["reshape_mode"] is reshape_mode.LOGICAL:
        return {"OUT_0": source.reshape(out.shape)}
    # The elements in the order of memory: by falling stride on either side. Both sides address the same
    # offsets, so the n-th element of one is the n-th of the other.
    into = _slowest_first(call.strides["OUT_0"])
    flat = source.transpose(_slowest_first(call.strides["IN_0"])).reshape([out.shape[axis] for axis in into])
    return {"OUT_0": flat.transpose(sorted(range(len(into)), key=into.__getitem__))}


def _slowest_first(stride: Sequence[int]) -> list[int]:
    return sorted(range(len(stride)), key=lambda axis: -stride[axis])


# -- transpose and slice -------------------------------------------------------------------------------------


def _infer_transpose(node: Any) -> None:
    source, out = node.inputs["IN_0"], node.outputs["OUT_0"]
    permutation = node.params["permutation"]
    if permutation is None or sorted(permutation) != list(range(len(source.dim))):
        malformed(
            node,
            "permutation not set" if permutation is None else "the permutation must name every axis once",
            tensor=source,
            expected=f"the axes 0 to {len(source.dim) - 1} in some order",
            given=permutation,
        )
    _keep_data_type(node, source, out)
    dim = tuple(source.dim[axis] for axis in permutation)
    check_set_dim(node, out, dim)
    set_dim(out, dim)
    set_stride(out, (source.stride[axis] for axis in permutation))


def _transpose(call: RefCall) -> dict[str, Array]:
    return {"OUT_0": call.inputs["IN_0"].transpose(call.params["permutation"])}


def _infer_slice(node: Any) -> None:
    source, out = node.inputs["IN_0"], node.outputs["OUT_0"]
    slices = node.params["slices"]
    if slices is None or len(slices) != len(source.dim):
        malformed(
            node,
            "slices not set" if slices is None else "one slice per axis is needed",
            tensor=source,
            expected=f"{len(source.dim)} slices for dim {source.dim}",
            given=slices,
        )
    dim, stride = [], []
    for part, extent, step in zip(slices, source.dim, source.stride, strict=True):
        if not isinstance(part, slice) or (part.step is not None and index(part.step) < 1):
            malformed(node, "slices are Python slices with a step of 1 or more", tensor=source, given=slices)
        picked = range(*part.indices(extent))
        dim.append(len(picked))
        stride.append(step * picked.step)
    _keep_data_type(node, source, out)
    check_set_dim(node, out, tuple(dim))
    set_dim(out, dim)
    set_stride(out, stride)


def _slice(call: RefCall) -> dict[str, Array]:
    return {"OUT_0": call.inputs["IN_0"][call.params["slices"]]}


# -- concatenate ---------------------------------------------------------------------------------------------


def _infer_concatenate(node: Any) -> None:
    tensors, out = list(node.inputs.values()), node.outputs["OUT_0"]
    axis, in_place = node.params["axis"], node.params["in_place_index"]
    if not tensors:
        malformed(node, "inputs not set", next_step="pass inputs=[...]")
    first = tensors[0]
    rank = len(first.dim)
    if axis is None or not -rank <= axis < rank:
        malformed(
            node,
            "axis not set" if axis is None else "the axis is out of range",
            tensor=first,
            expected=f"{-rank} to {rank - 1}",
            given=axis,
        )
    axis %= rank
    if in_place is not None and not 0 <= in_place < len(tensors):
        malformed(node, "in_place_index names no input", expected=f"0 to {len(tensors) - 1}", given=in_place)
    for tensor in tensors[1:]:
        if len(tensor.dim) != rank or any(
            a != b for i, (a, b) in enumerate(zip(tensor.dim, first.dim, strict=True)) if i != axis
        ):
            malformed(
                node,
                f"inputs must match {tensor_label(first)} {first.dim} but on axis {axis}",
                tensor=tensor,
                expected=f"the extents of {first.dim} but on axis {axis}",
                given=tensor.dim,
            )
    dim = (*first.dim[:axis], sum(tensor.dim[axis] for tensor in tensors), *first.dim[axis + 1 :])
    check_set_dim(node, out, dim)
    set_dim(out, dim)
    set_stride(out, format_preserving(out.dim, first.stride))


def _concatenate(call: RefCall) -> dict[str, Array]:
    out = call.outputs["OUT_0"]
    arrays = [call.inputs[f"IN_{i}"] for i in range(len(call.inputs))]
    if any(array.dtype != arrays[0].dtype for array in arrays):
        arrays = [round_to(array, out.data_type) for array in arrays]
    target = out.target(arrays[0].dtype)
    # An input may lie in the output already, and not in the part it goes to.
    if target is None or any(np.may_share_memory(target, array) for array in arrays):
        return {"OUT_0": np.concatenate(arrays, call.params["axis"])}
    return {"OUT_0": np.concatenate(arrays, call.params["axis"], out=target)}


OPS = (
    OpDef("reshape", NodeType.RESHAPE, _infer_reshape, _reshape, alias_view=True),
    OpDef("transpose", NodeType.TRANSPOSE, _infer_transpose, _transpose, alias_view=True),
    OpDef("slice", NodeType.SLICE, _infer_slice, _slice, alias_view=True),
    OpDef("concatenate", NodeType.CONCATENATE, _infer_concatenate, _concatenate),
)
