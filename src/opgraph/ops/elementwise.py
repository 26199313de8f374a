"""What the pointwise and activation families share: inference, and the frame of their NumPy references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType
from ..ir.errors import explain
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    broadcast_dims,
    check_set_dim,
    format_preserving,
    overlaps_itself,
    row_major,
    set_dim,
    set_stride,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..ir.tensor import Tensor

__all__ = ["ElementwiseOps", "end", "host_number", "infer", "pointwise"]

OUT = "OUT_0"


class ElementwiseOps(GraphOps):
    """Adds elementwise nodes: input ports IN_0.., output port OUT_0, `params["mode"]` the method's name."""

    __slots__ = ()

    def _pointwise(
        self, mode: str, tensors: tuple[Any, ...], name: str, compute_data_type: Any, **params: Any
    ) -> Tensor:
        for port, tensor in enumerate(tensors):
            if tensor is None:
                raise TypeError(
                    explain(f"{mode} {name!r}".rstrip(" '"), f"input {port} is None; it is required")
                )
        return self._add_node(
            mode,
            inputs={f"IN_{port}": tensor for port, tensor in enumerate(tensors)},
            outputs=(OUT,),
            params={"mode": mode, **params},
            name=name,
            compute_data_type=compute_data_type,
        )[OUT]


def host_number(value: Any, what: str) -> float | None:
    """An attribute that is a number known when the graph is built, or None."""
    if value is None:
        return None
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") or hasattr(value, "get_uid"):
        raise TypeError(f"{what} is a number, fixed when the graph is built; given {value!r}")
    return float(value)


def infer(node: Any) -> None:
    """dim: broadcast of the inputs. Stride: of the first input with that dim whose layout an output can have;
    else, for a virtual output, dense in the axis order of IN_0; else row-major."""
    inputs = tuple(node.inputs.values())
    out = node.outputs[OUT]
    dim = broadcast_dims(node, inputs)
    check_set_dim(node, out, dim)
    set_dim(out, dim)
    if out.stride:
        return
    dim = out.dim
    for tensor in inputs:
        # A broadcast input (stride 0) has the right dim but no layout that can be written.
        if tensor.dim == dim and not overlaps_itself(dim, tensor.stride):
            set_stride(out, tensor.stride)
            return
    set_stride(out, format_preserving(dim, inputs[0].stride) if out.is_virtual else row_major(dim))


def pointwise(mode: str, formula: Callable[[RefCall], Array], infer: Callable[[Any], None] = infer) -> OpDef:
    """The definition of one method: `formula(call)` gives the broadcast result."""

    def reference(call: RefCall) -> dict[str, Array]:
        with np.errstate(all="ignore"):  # infinities and NaN are results here, not accidents
            result = formula(call)
        shape = call.outputs[OUT].shape
        return {OUT: result if result.shape == shape else result.reshape(shape)}

    return OpDef(mode, NodeType.POINTWISE, infer, reference)


def end(
    call: RefCall, ufunc: np.ufunc, *operands: Array, scratch: Array | None = None, dtype: Any = None
) -> Array:
    """The last step of a formula: into the output's own memory where it has the result's type, else into
    `scratch` where that has the result's shape, else into a new array. `dtype` is the result's, by default
    that of the first operand."""
    out = call.outputs[OUT]
    target = out.target(operands[0].dtype if dtype is None else dtype)
    if target is not None and all(operand.ndim <= target.ndim for operand in operands):
        return np.asarray(ufunc(*operands, out=target))
    if scratch is not None and all(
        operand.shape == scratch.shape or np.broadcast_shapes(operand.shape, scratch.shape) == scratch.shape
        for operand in operands
    ):
        return np.asarray(ufunc(*operands, out=scratch))
    return np.asarray(ufunc(*operands))
