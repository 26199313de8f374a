"""What the pointwise and activation families share: inference, and the frame of their NumPy references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import round_to
from ..ir.enums import NodeType
from ..ir.errors import explain
from .base import (
    Array,
    GraphOps,
    OpDef,
    OutSpec,
    RefCall,
    broadcast_dims,
    check_set_dim,
    format_preserving,
    number,
    overlaps_itself,
    row_major,
    set_dim,
    set_stride,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..ir.tensor import Tensor

__all__ = ["OUT", "ElementwiseOps", "choose", "end", "host_number", "infer", "keep", "pointwise"]

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


def pointwise(
    mode: str,
    formula: Callable[[RefCall], Array],
    infer: Callable[[Any], None] = infer,
    *,
    passes: int = 2,
) -> OpDef:
    """The definition of one method: `formula(call)` gives the broadcast result. `passes`: how often it walks
    over memory when no conversion is needed; 0 keeps the arrays whole (a formula that looks at indices)."""

    def reference(call: RefCall) -> dict[str, Array]:
        out = call.outputs[OUT]
        with np.errstate(all="ignore"):  # infinities and NaN are results here, not accidents
            if passes and _is_long(call, out, passes):
                return {OUT: _by_blocks(call, out, formula)}
            result = formula(call)
        return {OUT: result if result.shape == out.shape else result.reshape(out.shape)}

    return OpDef(mode, NodeType.POINTWISE, infer, reference)


# Elements worked on at a time. The temporaries of a block stay in a core's cache, where a formula of several
# passes runs up to twice as fast as on whole arrays.
BLOCK = 32768


def _is_long(call: RefCall, out: OutSpec, passes: int) -> bool:
    """True when flat blocks pay: big dense operands of one shape (or one element), more than one pass."""
    size = number(out.shape)
    if size < 2 * BLOCK:
        return False
    dtype = call.math.dtype
    for array in call.inputs.values():
        if array.size != 1 and not (array.size == size and array.flags.c_contiguous):
            return False
        if array.dtype != dtype:
            passes += 1
    return passes > 1 or out.dtype != dtype


def _by_blocks(call: RefCall, out: OutSpec, formula: Callable[[RefCall], Array]) -> Array:
    flat = {port: array.reshape(-1) for port, array in call.inputs.items()}
    size = number(out.shape)
    result = _memory(out, call.inputs.values())
    line = result.reshape(-1)
    for start in range(0, size, BLOCK):
        block = slice(start, min(start + BLOCK, size))
        target = line[block]
        part = OutSpec(target.shape, out.data_type, out.dtype, target)
        inputs = {port: array if array.size == 1 else array[block] for port, array in flat.items()}
        value = formula(RefCall(call.params, inputs, {OUT: part}, call.math))
        if value is not target:
            target[...] = round_to(value, out.data_type)
    return result


def _memory(out: OutSpec, inputs: Iterable[Array]) -> Array:
    """The output's own memory when it is dense and no block of it can overlap a later block of an input."""
    view = out.target(out.dtype)
    if view is not None and view.flags.c_contiguous:
        for array in inputs:
            same = array.ctypes.data == view.ctypes.data and array.dtype.itemsize == view.dtype.itemsize
            if not (same and array.size == view.size) and np.may_share_memory(array, view):
                break
        else:
            return view
    return np.empty(out.shape, out.dtype)


def choose(mask: Array, first: Array, second: Array) -> Array:
    """`first` where the boolean `mask`, else `second`, of one dtype.

    On the bits: `np.where` mispredicts a branch per element and takes six times as long.
    """
    words = np.dtype(f"i{first.dtype.itemsize}")
    other = second.view(words)
    bits = first.view(words) ^ other
    bits = bits & _all_ones(mask, words)
    return np.asarray(bits ^ other).view(first.dtype)


def keep(mask: Array, values: Array) -> Array:
    """`values` where the boolean `mask`, else +0; like `choose`."""
    words = np.dtype(f"i{values.dtype.itemsize}")
    return np.asarray(values.view(words) & _all_ones(mask, words)).view(values.dtype)


def _all_ones(mask: Array, words: np.dtype[Any]) -> Array:
    return np.negative(mask.view(np.int8)).astype(words, copy=False)


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
