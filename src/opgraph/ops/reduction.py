"""Reductions over axes that the output's dims name: `reduction`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, reduction_mode
from ..ir.errors import tensor_label
from .base import (
    ADDED_IN_TURN,
    Array,
    GraphOps,
    Math,
    OpDef,
    RefCall,
    channels_last,
    check_same_rank,
    graph_op,
    malformed,
    number,
    set_stride,
)

if TYPE_CHECKING:
    from ..ir.tensor import Tensor

__all__ = ["OPS", "ReductionOps"]


class ReductionOps(GraphOps):
    """User-facing reductions."""

    __slots__ = ()

    @graph_op
    def reduction(
        self,
        input: Any,
        group_offset: Any = None,
        mode: reduction_mode | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Reduces the axes where the output's extent is 1 and the input's is not; pass `mode` by keyword.

        Modes: ADD sum, MUL product, MIN, MAX, AMAX max |x|, AVG mean, NORM1 sum |x|, NORM2 sqrt(sum x^2),
        MUL_NO_ZEROS product of the non-zero elements. Accumulated in the compute type. No elements give the
        neutral element (0, 1, +inf, -inf, 0; NaN for AVG).

        The output dims MUST be set, with `out_dims=` or `set_dim`: the input's rank, each extent the input's
        or 1. Dims equal to the input's reduce nothing, and the mode acts on each element. Strides default to
        channels-last, the data type to the graph's.

        `group_offset` (INT32 or INT64, E or E+1 entries in rising order) cuts the second to last axis of
        length T into row groups [offset[e], offset[e+1]), the last one ending at T, and reduces each by
        itself. The output then has E at that axis, or E at axis 0 and 1 at that axis ([1, T, H] to [E, 1,
        H]).

        Raises at `validate()`: `ValueError` when mode or the output dims are missing or do not fit.
        """
        if isinstance(group_offset, reduction_mode):
            raise TypeError(
                "reduction: the second positional argument is group_offset; pass mode= by keyword"
            )
        if mode is not None and not isinstance(mode, reduction_mode):
            raise TypeError(f"reduction: mode is a reduction_mode, given {mode!r}")
        return self._add_node(
            "reduction",
            inputs={"IN_0": input, "group_offset": group_offset},
            outputs=("OUT_0",),
            params={"mode": mode},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]


def _infer(node: Any) -> None:
    source, out = node.inputs["IN_0"], node.outputs["OUT_0"]
    mode = node.params["mode"]
    if mode is None or mode is reduction_mode.NOT_SET:
        malformed(node, "mode not set", expected="a reduction_mode", next_step="pass mode= by keyword")
    if not out.dim:
        malformed(
            node,
            "dims not set: the output's dims say which axes are reduced",
            tensor=out,
            expected=f"{len(source.dim)} extents, each that of {tensor_label(source)} {source.dim} or 1",
            next_step="pass out_dims= or call set_dim on the output",
        )
    check_same_rank(node, (source, out))
    offset = node.inputs.get("group_offset")
    grouped = () if offset is None else _check_groups(node, source, offset, out)
    for axis, (extent, given) in enumerate(zip(source.dim, out.dim, strict=True)):
        if axis not in grouped and given not in (extent, 1):
            malformed(
                node,
                f"axis {axis} of the output is neither kept nor reduced",
                tensor=out,
                expected=f"{extent} or 1 at axis {axis}, as {tensor_label(source)} is {source.dim}",
                given=out.dim,
                next_step="set the output's dims to the input's, with 1 where it is reduced",
            )
    set_stride(out, channels_last(out.dim))


def _check_groups(node: Any, source: Any, offset: Any, out: Any) -> tuple[int, ...]:
    """The axes whose output extent the groups decide."""
    entries = number(offset.dim)
    rows = len(source.dim) - 2
    if rows < 0:
        malformed(node, "row groups need an input of at least 2 axes", tensor=source, given=source.dim)
    if out.dim[rows] in (entries, entries - 1) and (rows == 0 or out.dim[0] == source.dim[0]):
        return (rows,)
    if rows > 0 and source.dim[0] == 1 and out.dim[rows] == 1 and out.dim[0] in (entries, entries - 1):
        return (0, rows)
    malformed(
        node,
        f"{tensor_label(offset)} holds {entries} offsets, which the output's dims do not match",
        tensor=out,
        expected=f"{entries} or {entries - 1} at axis {rows}, or at axis 0 with 1 at axis {rows}",
        given=out.dim,
    )


# -- reference -----------------------------------------------------------------------------------------------

_MODE = reduction_mode
_UFUNC = {
    _MODE.ADD: np.add,
    _MODE.AVG: np.add,
    _MODE.NORM1: np.add,
    _MODE.NORM2: np.add,
    _MODE.MUL: np.multiply,
    _MODE.MUL_NO_ZEROS: np.multiply,
    _MODE.MIN: np.minimum,
    _MODE.MAX: np.maximum,
    _MODE.AMAX: np.maximum,
}


def _reference(call: RefCall) -> dict[str, Array]:
    mode, out = call.params["mode"], call.outputs["OUT_0"]
    with np.errstate(all="ignore"):
        values = _prepared(call.inputs["IN_0"], mode, call.math)
        if "group_offset" in call.inputs:
            return {"OUT_0": _grouped(values, call.inputs["group_offset"], mode, out.shape)}
        axes = tuple(
            axis
            for axis, (extent, kept) in enumerate(zip(values.shape, out.shape, strict=True))
            if extent != kept
        )
        result = _reduce(values, axes, mode)
        return {"OUT_0": _finished(result, mode, number(values.shape[axis] for axis in axes))}


def _prepared(array: Array, mode: reduction_mode, math: Math) -> Array:
    """What each element contributes."""
    x = math.numeric(array)
    if mode in (_MODE.AMAX, _MODE.NORM1):
        return np.absolute(x)
    if mode is _MODE.NORM2:
        return x * x
    if mode is _MODE.MUL_NO_ZEROS:
        return np.where(x == 0, x.dtype.type(1), x)
    return x


def _neutral(mode: reduction_mode, dtype: np.dtype[Any]) -> Any:
    if mode in (_MODE.MUL, _MODE.MUL_NO_ZEROS):
        return dtype.type(1)
    if mode in (_MODE.MIN, _MODE.MAX):
        if dtype.kind == "f":
            return dtype.type(np.inf if mode is _MODE.MIN else -np.inf)
        return np.iinfo(dtype).max if mode is _MODE.MIN else np.iinfo(dtype).min
    return dtype.type(0)


def _reduce(values: Array, axes: tuple[int, ...], mode: reduction_mode) -> Array:
    dtype = _sum_type(values, axes, mode)
    initial = _neutral(mode, dtype)
    return np.asarray(_UFUNC[mode].reduce(values, axis=axes, dtype=dtype, keepdims=True, initial=initial))


def _sum_type(values: Array, axes: tuple[int, ...], mode: reduction_mode) -> np.dtype[Any]:
    """The type to accumulate in: that of the values, but float64 for long float32 sums, see ADDED_IN_TURN."""
    if _UFUNC[mode] is not np.add or values.dtype != np.float32 or not values.size:
        return values.dtype
    in_turn = number(values.shape[axis] for axis in axes)
    innermost = min(range(values.ndim), key=lambda axis: (values.shape[axis] == 1, abs(values.strides[axis])))
    if innermost in axes:
        in_turn //= values.shape[innermost]
    return np.dtype(np.float64) if in_turn > ADDED_IN_TURN else values.dtype


def _finished(result: Array, mode: reduction_mode, count: Any) -> Array:
    if mode is _MODE.AVG:
        return result / np.asarray(count, np.float64 if result.dtype.kind != "f" else result.dtype)
    return np.sqrt(result) if mode is _MODE.NORM2 else result


def _grouped(values: Array, offsets: Array, mode: reduction_mode, shape: tuple[int, ...]) -> Array:
    rows = values.ndim - 2
    groups = shape[rows]
    if groups == 1 and rows > 0 and values.shape[0] == 1:
        groups = shape[0]
    total = values.shape[rows]
    bounds = offsets.reshape(-1).astype(np.int64)
    if bounds.size == groups:
        bounds = np.append(bounds, total)
    if (bounds < 0).any() or (bounds > total).any() or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"reduction: group_offset must rise from 0 or more to at most {total}, the number of rows; "
            f"it holds {offsets.reshape(-1).tolist()}"
        )
    kept = tuple(
        axis for axis in range(values.ndim) if axis not in (0, rows) and shape[axis] == values.shape[axis]
    )
    others = tuple(axis for axis in range(values.ndim) if axis != rows and axis not in kept)
    if values.shape[0] == shape[0] or values.shape[0] == 1:
        others = tuple(axis for axis in others if axis != 0)
    count = number(values.shape[axis] for axis in others)
    values = _reduce(values, others, mode)
    starts, ends = bounds[:-1], bounds[1:]
    dtype = _sum_type(values, (rows,), mode)
    result = np.full(
        (*values.shape[:rows], groups, *values.shape[rows + 1 :]), _neutral(mode, dtype), dtype
    )
    filled = np.flatnonzero(ends > starts)
    if filled.size:
        # Empty groups hold no rows, so the groups that do follow each other without gaps.
        live = values[(slice(None),) * rows + (slice(0, int(bounds[-1])),)]
        sums = _UFUNC[mode].reduceat(live, starts[filled], axis=rows, dtype=dtype)
        result[(slice(None),) * rows + (filled,)] = sums
    counts = (ends - starts).reshape(-1, *(1,) * (values.ndim - rows - 1)) * count
    return _finished(result, mode, counts).reshape(shape)


OPS = (OpDef("reduction", NodeType.REDUCTION, _infer, _reference),)
