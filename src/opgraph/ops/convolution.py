"""Convolution over 1 to 3 spatial axes: `conv_fprop` and its adjoints `conv_dgrad` and `conv_wgrad`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from ..ir.enums import NodeType, convolution_mode
from ..ir.errors import tensor_label
from .base import (
    GraphOps,
    OpDef,
    channels_last,
    check_required,
    check_same_rank,
    check_set_dim,
    deferred,
    graph_op,
    malformed,
    number,
    set_dim,
    set_stride,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "ConvolutionOps"]

_MODE = convolution_mode  # the class, where an argument of the same name hides it
_MAX_FILTER = 2**31  # elements of a filter, from which on it is not offered


class ConvolutionOps(GraphOps):
    """Convolutions of the graph.

    image [N, C, *x], filter [K, C/G, *f] and response [N, K, *y] have one rank of 3, 4 or 5, so 1 to 3
    spatial axes; their strides carry the layout (NCHW, NHWC, padded). The number of groups is G = C /
    filter.dim[1], and K is a multiple of it; G = C is a depthwise convolution. For each spatial axis

        y = 1 + (x + pre_padding + post_padding - dilation * (f - 1) - 1) // stride

    `stride` and `dilation` (1 or more) and the paddings (0 or more) are lists with one entry for each spatial
    axis. `padding` sets both paddings, else `pre_padding` and `post_padding` are given. All of them must be
    given; there are no defaults. `convolution_mode` is CROSS_CORRELATION, or CONVOLUTION, which flips the
    filter on every spatial axis.

    Products are made and summed in the compute type and rounded once; with an integer compute type the sums
    are exact 64-bit ones (INT8 data with compute type INT32). Data types of outputs are the graph's default.
    Outputs are channels-last by default whatever the inputs are. Nothing may alias unless the plan says so.
    """

    __slots__ = ()

    @graph_op
    def conv_fprop(
        self,
        image: Any,
        weight: Any,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: convolution_mode = convolution_mode.CROSS_CORRELATION,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Convolution; returns Y [N, K, *y] of image [N, C, *x] and weight [K, C/G, *f].

            Y[n, k, p] = sum over c < C/G and taps r of
                         image[n, g * C/G + c, p * stride - pre_padding + r * dilation] * weight[k, c, r]

        with g = k // (K/G), the image taken as 0 outside its extents, and r replaced by f - 1 - r in weight
        for CONVOLUTION. Y's dim is inferred, its stride channels-last.

        Raises `TypeError` for attributes that are no lists of integers. Raises at `validate()`: `ValueError`
        for unset tensors or attributes, ranks, channels or lengths that do not fit, and extents of Y below 1;
        `cudnnGraphNotSupportedError` for more than 3 spatial axes, a weight of 2^31 or more elements, and
        dims set on Y that are not the inferred ones.
        """
        return self._add_node(
            "conv_fprop",
            inputs={"image": image, "weight": weight},
            outputs=("Y",),
            params=_params("conv_fprop", padding, pre_padding, post_padding, stride, dilation, convolution_mode),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["Y"]

    @graph_op
    def conv_dgrad(
        self,
        loss: Any,
        filter: Any,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: convolution_mode = convolution_mode.CROSS_CORRELATION,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Gradient of `conv_fprop` for its image; returns DX [N, C, *x].

            DX[n, g * C/G + c, i] = sum over k of group g, positions p and taps r with
                                    i = p * stride - pre_padding + r * dilation
                                    of loss[n, k, p] * filter[k, c, r]

        Shapes: loss [N, K, *y], filter [K, C/G, *f]. Set the dim of DX with `out_dims=` or `set_dim`: loss
        and filter do not tell the number of groups, nor x where the stride is above 1. Left unset with
        strides of 1, it is that of the image of one group, x = y + dilation * (f - 1) - pre_padding -
        post_padding. DX's stride is channels-last.

        Raises as `conv_fprop` does, and `ValueError` at `validate()` when DX was left unset with a stride
        above 1, or when its dim does not lead to that of loss.
        """
        return self._add_node(
            "conv_dgrad",
            inputs={"loss": loss, "filter": filter},
            outputs=("DX",),
            params=_params("conv_dgrad", padding, pre_padding, post_padding, stride, dilation, convolution_mode),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["DX"]

    @graph_op
    def conv_wgrad(
        self,
        image: Any,
        loss: Any,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: convolution_mode = convolution_mode.CROSS_CORRELATION,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Gradient of `conv_fprop` for its weight; returns DW [K, C/G, *f].

            DW[k, c, r] = sum over n and positions p of
                          loss[n, k, p] * image[n, g * C/G + c, p * stride - pre_padding + r * dilation]

        with g = k // (K/G), and r flipped for CONVOLUTION. Shapes: image [N, C, *x], loss [N, K, *y]. The dim
        of DW MUST be set, with `out_dims=` or `set_dim`; its axis 1 tells the number of groups. Stride
        channels-last.

        Raises as `conv_fprop` does, and `ValueError` at `validate()` when DW has no dim, or one that does not
        lead to that of loss.
        """
        return self._add_node(
            "conv_wgrad",
            inputs={"image": image, "loss": loss},
            outputs=("DW",),
            params=_params("conv_wgrad", padding, pre_padding, post_padding, stride, dilation, convolution_mode),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["DW"]


def _params(
    op: str, padding: Any, pre_padding: Any, post_padding: Any, stride: Any, dilation: Any, mode: Any
) -> dict[str, Any]:
    """The attributes of a node: tuples of integers, or None where not given."""
    if not isinstance(mode, _MODE):
        raise TypeError(f"{op}: convolution_mode is a convolution_mode, given {mode!r}")
    lists = {
        "padding": padding,
        "pre_padding": pre_padding,
        "post_padding": post_padding,
        "stride": stride,
        "dilation": dilation,
    }
    params: dict[str, Any] = {}
    for key, value in lists.items():
        try:
            params[key] = None if value is None else tuple(index(item) for item in value)
        except TypeError:
            raise TypeError(f"{op}: {key} is a list of integers, one for each spatial axis, given {value!r}") from None
    return {**params, "convolution_mode": mode}


# -- inference -----------------------------------------------------------------------------------------------


def _attributes(node: Any, rank: int) -> tuple[tuple[int, ...], ...]:
    """(pre_padding, post_padding, stride, dilation) of a node, checked."""
    params, spatial = node.params, rank - 2
    if params["padding"] is not None:
        for port in ("pre_padding", "post_padding"):
            if params[port] is not None and params[port] != params["padding"]:
                malformed(
                    node,
                    f"padding and {port} contradict each other",
                    expected="padding, or pre_padding and post_padding",
                    given=f"padding {params['padding']}, {port} {params[port]}",
                )
    found = []
    for key, least in (("pre_padding", 0), ("post_padding", 0), ("stride", 1), ("dilation", 1)):
        value = params["padding"] if params["padding"] is not None and least == 0 else params[key]
        if value is None:
            either = "padding, or pre_padding and post_padding" if least == 0 else key
            malformed(node, f"{key} not set", expected=f"{spatial} integers", next_step=f"pass {either}")
        if len(value) != spatial or min(value) < least:
            malformed(
                node,
                f"{key} does not fit",
                expected=f"{spatial} integers of {least} or more, one for each spatial axis",
                given=value,
            )
        found.append(value)
    return tuple(found)


def _check_rank(node: Any, first: Any, second: Any) -> int:
    rank = check_same_rank(node, (first, second))
    if rank < 3:
        malformed(
            node,
            "a convolution has a batch, a channel and at least one spatial axis",
            tensor=first,
            expected="[N, C, W], [N, C, H, W] or [N, C, D, H, W]",
            given=first.dim,
            next_step="add an extent of 1",
        )
    if rank > 5:
        unsupported(node, "more than 3 spatial axes are not offered", tensor=first, expected="3", given=rank - 2)
    return rank


def _check_filter(node: Any, tensor: Any, channels: int, responses: int, source: Any) -> None:
    """A filter [K, C/G, *f] for that many channels C and responses K; `source` is named as having them."""
    k, depth, *taps = tensor.dim
    if min(taps) < 1:
        malformed(node, "a filter has at least one tap on every spatial axis", tensor=tensor, given=tensor.dim)
    if number(tensor.dim) >= _MAX_FILTER:
        unsupported(
            node,
            "filters of 2^31 or more elements are not offered",
            tensor=tensor,
            expected=f"at most {_MAX_FILTER - 1}",
            given=number(tensor.dim),
        )
    if k != responses or (channels % depth if depth and channels else depth != channels):
        malformed(
            node,
            f"the filter [K, C/G, ...] does not fit {tensor_label(source)} {source.dim}",
            tensor=tensor,
            expected=f"K = {responses} and C/G a divisor of C = {channels}",
            given=tensor.dim,
        )
    groups = channels // depth if depth else 1
    if k % groups:
        malformed(
            node,
            f"the filter makes {groups} groups, which must have equally many responses",
            tensor=tensor,
            expected=f"K a multiple of {groups}",
            given=f"K = {k}",
        )


def _response(node: Any, image: Any, weight: Any, attributes: Any) -> tuple[int, ...]:
    """The dim of the response; `ValueError` when an extent is below 1."""
    extents = tuple(
        1 + (x + before + after - dilation * (f - 1) - 1) // stride
        for x, f, before, after, stride, dilation in zip(image.dim[2:], weight.dim[2:], *attributes, strict=True)
    )
    if min(extents) < 1:
        malformed(
            node,
            f"the filter {tensor_label(weight)} {weight.dim} does not fit into the padded image",
            tensor=image,
            expected="spatial extents of the response of 1 or more",
            given=f"{extents} from {image.dim}",
            next_step="add padding",
        )
    return (image.dim[0], weight.dim[0], *extents)


def _infer_fprop(node: Any) -> None:
    check_required(node, "image", "weight")
    image, weight, y = node.inputs["image"], node.inputs["weight"], node.outputs["Y"]
    attributes = _attributes(node, _check_rank(node, image, weight))
    _check_filter(node, weight, image.dim[1], weight.dim[0], image)
    dim = _response(node, image, weight, attributes)
    check_set_dim(node, y, dim)
    set_dim(y, dim)
    set_stride(y, channels_last(y.dim))


def _infer_dgrad(node: Any) -> None:
    check_required(node, "loss", "filter")
    loss, weight, dx = node.inputs["loss"], node.inputs["filter"], node.outputs["DX"]
    attributes = _attributes(node, _check_rank(node, loss, weight))
    if not dx.dim:
        set_dim(dx, _only_image(node, loss, weight, dx, *attributes))
    _check_adjoint(node, dx, loss, weight, dx, attributes)
    set_stride(dx, channels_last(dx.dim))


def _only_image(
    node: Any, loss: Any, weight: Any, dx: Any, pre: Any, post: Any, stride: Any, dilation: Any
) -> tuple[int, ...]:
    """The dim of the one image of one group that leads to `loss`; `ValueError` when there are several."""
    if max(stride) > 1:
        malformed(
            node,
            "dims not set: with a stride above 1, images of several extents lead to one loss",
            tensor=dx,
            expected=f"the dim of the image that led to {tensor_label(loss)} {loss.dim}",
            next_step="pass out_dims= or call set_dim on the output",
        )
    extents = tuple(
        y + d * (f - 1) - before - after
        for y, f, before, after, d in zip(loss.dim[2:], weight.dim[2:], pre, post, dilation, strict=True)
    )
    if min(extents) < 1:
        malformed(
            node,
            "no image leads to this loss",
            tensor=loss,
            expected="spatial extents of the image of 1 or more",
            given=f"{extents} from {loss.dim}",
            next_step="check the padding",
        )
    return (loss.dim[0], weight.dim[1], *extents)


def _infer_wgrad(node: Any) -> None:
    check_required(node, "image", "loss")
    image, loss, dw = node.inputs["image"], node.inputs["loss"], node.outputs["DW"]
    attributes = _attributes(node, _check_rank(node, image, loss))
    if not dw.dim:
        malformed(
            node,
            "dims not set: filters of several extents lead to one loss",
            tensor=dw,
            expected=f"[K, C/G, ...] with K = {loss.dim[1]} and C = {image.dim[1]}",
            next_step="pass out_dims= or call set_dim on the output",
        )
    _check_adjoint(node, image, loss, dw, dw, attributes)
    set_stride(dw, channels_last(dw.dim))


def _check_adjoint(node: Any, image: Any, loss: Any, weight: Any, out: Any, attributes: Any) -> None:
    """The three dims must be those of one convolution; `out` is the one that is blamed."""
    check_same_rank(node, (loss, out))
    _check_filter(node, weight, image.dim[1], loss.dim[1], loss)
    dim = _response(node, image, weight, attributes)
    if dim != loss.dim:
        malformed(
            node,
            f"the dims are not those of one convolution with the response {tensor_label(loss)} {loss.dim}",
            tensor=out,
            expected=f"an image and a filter that give {loss.dim}",
            given=f"image {image.dim} and filter {weight.dim}, which give {dim}",
            next_step="set the dim of the forward operator's tensor",
        )


OPS = (
    OpDef("conv_fprop", NodeType.CONV_FPROP, _infer_fprop, deferred("convolution_blocks", "fprop_reference")),
    OpDef("conv_dgrad", NodeType.CONV_DGRAD, _infer_dgrad, deferred("convolution_blocks", "dgrad_reference")),
    OpDef("conv_wgrad", NodeType.CONV_WGRAD, _infer_wgrad, deferred("convolution_blocks", "wgrad_reference")),
)
