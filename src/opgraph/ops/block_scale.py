"""Data of few bits with one scale factor per block: `block_scale_dequantize` and `block_scale_quantize`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import element_bits, is_floating, numpy_dtype, round_to
from ..ir.enums import NodeType, data_type, tensor_reordering
from ..ir.errors import tensor_label
from .base import (
    Array,
    ContentsError,
    GraphOps,
    OpDef,
    RefCall,
    check_required,
    check_same_rank,
    check_set_dim,
    format_preserving,
    graph_op,
    like,
    malformed,
    number,
    set_dim,
    set_stride,
    unsupported,
)
from .scale_tiles import TILE, tile_axes, tiled_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "BlockScaleOps"]


class BlockScaleOps(GraphOps):
    """Quantisation with scale factors of blocks.

    Scale factors are FP8_E8M0 (powers of two; usual with blocks of 32), FP8_E4M3 (usual with blocks of 16 and
    FP4 data), or wider floats. A tensor of factors whose reordering type is F8_128x4 lies in memory as tiles
    of 128 rows by 4 columns (see `ops/scale_tiles.py`); its declared dims may be those of the factors, or
    padded to whole tiles. Nothing may alias unless the plan says so.
    """

    __slots__ = ()

    @graph_op
    def block_scale_dequantize(
        self,
        input: Any,
        descale: Any = None,
        block_size: Sequence[int] | int | None = None,
        is_negative_scale: bool = False,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Widens block-scaled data; returns the virtual tensor OUT_0.

            OUT_0[i, ..] = input[i, ..] * descale[i // block_size, ..]

        with minus the factor when `is_negative_scale`. `block_size` counts elements for each of the last
        axes, [1, 32] for rows of blocks of 32, [32, 1] for columns; axes before them have blocks of 1. One
        integer is the last axis.

        Shapes: input of any rank; descale of that rank with extents ceil(x / block), or, reordered, up to
        those padded to whole tiles; OUT_0 dim and stride like input. OUT_0 has the graph's intermediate type
        and feeds other operators; it is no operand.

        Raises `TypeError` for block sizes that are no integers. Raises at `validate()`: `ValueError` for an
        unset descale or block_size, block sizes below 1 or more of them than axes, ranks or extents that do
        not fit, and OUT_0 made an output; `cudnnGraphNotSupportedError` for factors of a type that is no
        float, and for dims set on OUT_0 that are not input's.
        """
        return self._add_node(
            "block_scale_dequantize",
            inputs={"input": input, "descale": descale},
            outputs=("OUT_0",),
            params={"block_size": _block_sizes(block_size), "is_negative_scale": bool(is_negative_scale)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]

    @graph_op
    def block_scale_quantize(
        self,
        input: Any,
        group_offset: Any = None,
        block_size: int | None = None,
        axis: int | None = None,
        transpose: bool = False,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor]:
        """Narrows a tensor to block-scaled data; returns [Y, scale].

            scale = max |input| over the block / largest finite value of Y's type, rounded to scale's type
            Y = input / scale, rounded to nearest, ties to even, and saturated

        Blocks are `block_size` elements along `axis` (None and -1 are the last axis); the last one may be
        shorter. An FP8_E8M0 factor is rounded up to a power of two, at least 2^-127; every other type rounds
        to nearest, ties to even. Y is 0 where the factor is 0. A NaN makes the factor of its block NaN where
        the type has one.

        Shapes: Y dim like input; its stride too, or with `transpose` dense with `axis` fastest and the other
        axes in the order of input's. scale has input's dim with ceil(x / block_size) on `axis`, its axes ordered
        as input's; reordered, its extents may be set up to those padded to whole tiles, and the padding
        receives 0. Set the data types of both: Y is FP8_E4M3, FP8_E5M2, FP4_E2M1, INT8 or INT4.

        `group_offset`: INT32 or INT64, one ascending entry for each group of rows (axis -2). Group g is the
        rows from entry g on to the next entry, or to the last row. Each group is quantised on its own and its
        factors start a new tile of scale when that is reordered; otherwise they follow those of the group
        before. Set the extent of scale on axis -2 so that it holds all groups. Rows of no group are 0.

        Raises `TypeError` for an axis or block_size that is no integer. Raises at `validate()`: `ValueError`
        for an unset or non-positive block_size, an axis out of range, extents of scale that do not fit, and
        group offsets for an input of less than two axes; `cudnnGraphNotSupportedError` for other data types
        of Y, factors of a type that is no float, and dims set on Y that are not input's. At execution,
        `ValueError` for group offsets that decrease or leave the rows, and for groups that scale cannot hold.
        """
        made = self._add_node(
            "block_scale_quantize",
            inputs={"input": input, "group_offset": group_offset},
            outputs=("Y", "scale"),
            params={
                "block_size": None if block_size is None else index(block_size),
                "axis": None if axis is None else index(axis),
                "transpose": bool(transpose),
            },
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made["Y"], made["scale"]]


def _block_sizes(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if hasattr(value, "__index__"):
        return (index(value),)
    try:
        return tuple(index(size) for size in value)
    except TypeError:
        raise TypeError(
            f"block_scale_dequantize: block_size is an integer or a list of them, given {value!r}"
        ) from None


# -- inference -----------------------------------------------------------------------------------------------

# The largest finite value of the types that data is quantised to.
_LARGEST = {
    data_type.FP8_E4M3: 448.0,
    data_type.FP8_E5M2: 57344.0,
    data_type.FP4_E2M1: 6.0,
    data_type.INT8: 127.0,
    data_type.INT4: 7.0,
}


def _infer_dequantize(node: Any) -> None:
    check_required(node, "input", "descale")
    x, descale, out = node.inputs["input"], node.inputs["descale"], node.outputs["OUT_0"]
    sizes = node.params["block_size"]
    if sizes is None:
        malformed(node, "block_size not set", next_step="pass block_size=, one entry for each of the last axes")
    rank = check_same_rank(node, (x, descale))
    if len(sizes) > rank or not sizes or min(sizes) < 1:
        malformed(
            node,
            "block_size has 1 or more elements for each of the last axes",
            expected=f"1 to {rank} positive integers",
            given=sizes,
        )
    _check_factors(node, descale, _factors(x.dim, (1,) * (rank - len(sizes)) + sizes))
    if not out.is_virtual:
        malformed(
            node,
            "the result of a dequantisation stays virtual",
            tensor=out,
            next_step="pass it on to another operator, identity for one, and make that one's result the output",
        )
    check_set_dim(node, out, x.dim)
    like(out, x)


def _infer_quantize(node: Any) -> None:
    check_required(node, "input")
    x, y, scale = node.inputs["input"], node.outputs["Y"], node.outputs["scale"]
    groups = node.inputs.get("group_offset")
    size, axis = node.params["block_size"], _axis(node.params["axis"], len(x.dim))
    if size is None or size < 1:
        malformed(
            node, "block_size not set" if size is None else "block_size is 1 or more",
            given=size, next_step="pass block_size=",
        )  # fmt: skip
    if axis is None:
        malformed(
            node, "axis is out of range", expected=f"-{len(x.dim)} to {len(x.dim) - 1}", given=node.params["axis"]
        )
    if y.data_type is not None and y.data_type not in _LARGEST:
        unsupported(
            node,
            "the data type of Y is not one of few bits",
            tensor=y,
            expected=", ".join(each.name for each in _LARGEST),
            given=y.data_type.name,
            next_step="set the data types of Y and scale",
        )
    check_set_dim(node, y, x.dim)
    set_dim(y, x.dim)
    fastest = [-1 if a == axis else step for a, step in enumerate(x.stride)]
    set_stride(y, format_preserving(x.dim, fastest) if node.params["transpose"] else x.stride)
    dim = _factors(x.dim, tuple(size if a == axis else 1 for a in range(len(x.dim))))
    if groups is not None:
        _check_groups(node, x, groups)
    set_dim(scale, dim)
    set_stride(scale, format_preserving(scale.dim, x.stride))
    check_same_rank(node, (x, scale))
    _check_factors(node, scale, dim, free=None if groups is None else len(dim) - 2)


def _axis(axis: int | None, rank: int) -> int | None:
    """The axis counted from the first one; None where there is no such axis."""
    if axis is None:
        axis = -1
    return axis % rank if -rank <= axis < rank else None


def _factors(dim: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-extent // size) for extent, size in zip(dim, sizes, strict=True))


def _check_factors(node: Any, scale: Any, dim: tuple[int, ...], free: int | None = None) -> None:
    """The tensor of factors has this dim, or reordered one up to that of whole tiles; `free`: but for an axis."""
    if scale.data_type is not None and not is_floating(scale.data_type):
        unsupported(
            node, "scale factors are floats", tensor=scale,
            expected="FP8_E8M0, FP8_E4M3 or another float", given=scale.data_type.name,
        )  # fmt: skip
    most = dim
    if scale.reordering_type is tensor_reordering.F8_128x4:
        if len(dim) < 2 or (scale.data_type is not None and element_bits(scale.data_type) != 8):
            malformed(
                node, "reordered factors are a matrix of 8-bit floats", tensor=scale,
                expected="two axes or more, and FP8_E8M0 or FP8_E4M3", given=f"dim {scale.dim}, {scale.data_type}",
            )  # fmt: skip
        most, _ = tiled_layout(dim, scale.stride)
    for axis, (extent, low, high) in enumerate(zip(scale.dim, dim, most, strict=True)):
        if axis != free and not low <= extent <= high:
            malformed(
                node,
                "the scale factors do not fit the blocks"
                + ("" if free is None else f" (axis {free} is free, for the groups)"),
                tensor=scale,
                expected=dim if most == dim else f"{dim}, up to {most}",
                given=scale.dim,
            )


def _check_groups(node: Any, x: Any, groups: Any) -> None:
    if len(x.dim) < 2:
        malformed(node, "groups of rows need an input of two axes or more", tensor=x, given=x.dim)
    if number(groups.dim) != max(groups.dim, default=1) or 0 in groups.dim:
        malformed(
            node, "group_offset is one list of rows", tensor=groups,
            expected="one axis longer than 1", given=groups.dim,
        )  # fmt: skip
    if groups.data_type not in (None, data_type.INT32, data_type.INT64):
        malformed(node, f"{tensor_label(groups)} is an integer", expected="INT32 or INT64", given=groups.data_type.name)


# -- reference -----------------------------------------------------------------------------------------------


def _dequantize_reference(call: RefCall) -> dict[str, Array]:
    real = call.math.real
    x, descale = real(call.inputs["input"]), real(call.inputs["descale"])
    given = call.params["block_size"]
    sizes = (1,) * (x.ndim - len(given)) + given
    descale = descale[tuple(map(slice, _factors(x.shape, sizes)))]
    if call.params["is_negative_scale"]:
        descale = -descale
    if any(extent % size for extent, size in zip(x.shape, sizes, strict=True)):
        for axis, size in enumerate(sizes):
            if size > 1:
                descale = np.repeat(descale, size, axis)
        return {"OUT_0": x * descale[tuple(map(slice, x.shape))]}
    split: list[int] = []
    alone: list[int] = []
    for extent, size in zip(x.shape, sizes, strict=True):
        split += [extent // size, size]
        alone += [extent // size, 1]
    return {"OUT_0": (x.reshape(split) * descale.reshape(alone)).reshape(x.shape)}


def _quantize_reference(call: RefCall) -> dict[str, Array]:
    x = call.math.real(call.inputs["input"])
    axis = _axis(call.params["axis"], x.ndim)
    assert axis is not None
    y_type, out = call.outputs["Y"].data_type, call.outputs["scale"]

    def narrow(part: Array) -> tuple[Array, Array]:
        return _quantize(part, call.params["block_size"], axis, y_type, out.data_type)

    with np.errstate(all="ignore"):
        if "group_offset" not in call.inputs:
            y, scale = narrow(x)
            if scale.shape == out.shape:
                return {"Y": y, "scale": scale}
            padded = np.zeros(out.shape, scale.dtype)
            padded[tuple(map(slice, scale.shape))] = scale
            return {"Y": y, "scale": padded}
        return _quantize_groups(call, x, narrow)


def _quantize(x: Array, size: int, axis: int, y_type: data_type, scale_type: data_type) -> tuple[Array, Array]:
    """Y and the factors of one tensor, or of the rows of one group, in their own types."""
    extent = x.shape[axis]
    count = -(-extent // size)
    blocks = x
    if count * size != extent:
        blocks = np.zeros((*x.shape[:axis], count * size, *x.shape[axis + 1 :]), x.dtype)
        blocks[(slice(None),) * axis + (slice(extent),)] = x
    blocks = blocks.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    room = np.abs(blocks)
    largest = room.max(axis + 1, initial=0).astype(np.float64)
    largest /= _largest(y_type)
    if scale_type is data_type.FP8_E8M0:
        # v = mantissa * 2**exponent with a mantissa from 1/2 on, so 2**exponent is above v unless that is 1/2.
        mantissa, exponent = np.frexp(largest)
        power = np.ldexp(1.0, np.clip(exponent - (mantissa == 0.5), -127, 127))
        largest = np.where(np.isfinite(largest), np.where(largest == 0, 0, power), largest)
    scale = round_to(largest, scale_type)
    divisor = np.expand_dims(scale.astype(x.dtype), axis + 1)
    np.divide(blocks, divisor, out=room)
    if not divisor.all():
        np.copyto(room, 0, where=divisor == 0)
    blocks = room.reshape(*x.shape[:axis], count * size, *x.shape[axis + 1 :])
    return round_to(blocks[(slice(None),) * axis + (slice(extent),)], y_type), scale


def _largest(dtype: data_type) -> float:
    """The largest finite value. Types of more bits get here as virtual tensors that nobody gave a type."""
    found = _LARGEST.get(dtype)
    return float(np.finfo(numpy_dtype(dtype)).max) if found is None else found


def _quantize_groups(call: RefCall, x: Array, narrow: Callable[[Array], tuple[Array, Array]]) -> dict[str, Array]:
    y_out, out = call.outputs["Y"], call.outputs["scale"]
    rows = x.ndim - 2
    step = 1
    if out.reordering is tensor_reordering.F8_128x4:
        step = TILE[0] if tile_axes(call.strides["scale"])[0] == rows else TILE[1]
    y, scale = np.zeros(x.shape, y_out.dtype), np.zeros(out.shape, out.dtype)
    place = 0
    for first, last in _groups(call.inputs["group_offset"], x.shape[rows]):
        if first == last:
            continue
        y[..., first:last, :], factors = narrow(x[..., first:last, :])
        held = factors.shape[rows]
        if place + held > out.shape[rows]:
            raise ContentsError(
                "group_offset",
                "the factors of all groups must fit into scale",
                f"at most {out.shape[rows]} at axis {rows}",
                f"{place + held} or more",
            )
        scale[tuple(map(slice, factors.shape[:rows])) + (slice(place, place + held), slice(factors.shape[-1]))] = (
            factors
        )
        place += -(-held // step) * step
    return {"Y": y, "scale": scale}


def _groups(offsets: Array, rows: int) -> Iterator[tuple[int, int]]:
    """(first row, last row + 1) of each group. Checks the offsets."""
    starts = offsets.reshape(-1).tolist()
    previous = 0
    for entry, start in enumerate(starts):
        if not previous <= start <= rows:
            raise ContentsError(
                "group_offset",
                "group offsets do not decrease, and lie in the rows",
                f"{previous} to {rows} at entry {entry}",
                start,
            )
        previous = start
    yield from zip(starts, [*starts[1:], rows], strict=True)


def _check_quantize(params: Any, inputs: Any) -> None:
    """Group offsets, before anything is written."""
    if "group_offset" in inputs and "input" in inputs:
        for _ in _groups(inputs["group_offset"], inputs["input"].shape[-2]):
            pass


OPS = (
    OpDef("block_scale_dequantize", NodeType.BLOCK_SCALE_DEQUANTIZE, _infer_dequantize, _dequantize_reference),
    OpDef(
        "block_scale_quantize",
        NodeType.BLOCK_SCALE_QUANTIZE,
        _infer_quantize,
        _quantize_reference,
        check=_check_quantize,
    ),
)
