"""Dims, strides and refusals of convolutions, and the order of their arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import opgraph
from opgraph import convolution_mode, cudnnGraphNotSupportedError, data_type
from opgraph.ir import NodeType
from opgraph.ir.spec import infer_live
from opgraph.ops.base import channels_last

ONES = {"padding": [0, 0], "stride": [1, 1], "dilation": [1, 1]}
CONVOLUTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")


def graph_of(**types: Any) -> Any:
    return opgraph.pygraph(io_data_type=data_type.FLOAT, **types)


def refuse(graph: Any, error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


def fprop(image: Any, weight: Any, **given: Any) -> tuple[Any, Any]:
    graph = graph_of()
    spatial = len(image) - 2
    attributes = {"padding": [0] * spatial, "stride": [1] * spatial, "dilation": [1] * spatial, **given}
    return graph, graph.conv_fprop(
        graph.tensor(image, name="X"), graph.tensor(weight, name="W"), **attributes
    )


# ---- signatures


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        ("conv_fprop", ["image", "weight"]),
        ("conv_dgrad", ["loss", "filter"]),
        ("conv_wgrad", ["image", "loss"]),
    ],
)
def test_order_of_arguments(op, tensors):
    attributes = ["padding", "pre_padding", "post_padding", "stride", "dilation", "convolution_mode"]
    method = getattr(opgraph.pygraph, op)
    assert list(inspect.signature(method).parameters)[1:] == [
        *tensors, *attributes, "name", "compute_data_type", "out_dims",
    ]  # fmt: skip
    graph = graph_of()
    a, b = graph.tensor([2, 3, 5, 5]), graph.tensor([4, 3, 3, 3] if op != "conv_wgrad" else [2, 4, 3, 3])
    flip = convolution_mode.CONVOLUTION
    y = method(graph, a, b, None, [0, 0], [0, 0], [1, 1], [1, 1], flip, "c", data_type.DOUBLE, [1, 1, 1, 1])
    node = graph.get_node("c")
    assert node.node_type is NodeType[op.upper()] and y.get_dim() == [1, 1, 1, 1]
    assert node.compute_data_type is data_type.DOUBLE
    assert node.params["convolution_mode"] is flip
    assert node.params["padding"] is None and node.params["pre_padding"] == (0, 0)
    assert y.name == f"c::{dict(zip(CONVOLUTIONS, ('Y', 'DX', 'DW'), strict=True))[op]}"


def test_attributes_are_lists_of_integers():
    graph = graph_of()
    x, w = graph.tensor([2, 3, 5, 5]), graph.tensor([4, 3, 3, 3])
    for key in ("padding", "pre_padding", "post_padding", "stride", "dilation"):
        for bad in (1, "11", [1.0, 1.0], [None, 1]):
            with pytest.raises(TypeError, match=f"conv_fprop: {key} is a list of integers"):
                graph.conv_fprop(x, w, **{**ONES, key: bad})
    with pytest.raises(TypeError, match="convolution_mode"):
        graph.conv_fprop(x, w, **ONES, convolution_mode=1)
    with pytest.raises(TypeError, match="did you mean 'padding'"):
        graph.conv_fprop(x, w, pading=[0, 0])
    with pytest.raises(TypeError):
        graph.conv_fprop(x)
    graph.conv_fprop(x, w, (1, 1), stride=(1, 1), dilation=(1, 1))
    assert not graph.nodes[0].name.startswith("conv_dgrad")


# ---- dims


@pytest.mark.parametrize(
    ("image", "weight", "given", "dim"),
    [
        ([2, 3, 9], [4, 3, 3], {}, (2, 4, 7)),
        ([2, 3, 9, 8], [4, 3, 3, 2], {"padding": [1, 0]}, (2, 4, 9, 7)),
        ([2, 3, 9, 8, 7], [4, 1, 2, 2, 2], {"stride": [2, 3, 1]}, None),  # 4 is no multiple of 3 groups
        ([2, 3, 9, 8, 7], [6, 1, 2, 2, 2], {"stride": [2, 3, 1]}, (2, 6, 4, 3, 6)),
        ([2, 3, 9, 8], [4, 3, 3, 3], {"stride": [3, 4], "dilation": [2, 3]}, (2, 4, 2, 1)),
        ([0, 3, 9, 8], [4, 3, 9, 8], {}, (0, 4, 1, 1)),
        ([2, 3, 0, 8], [4, 3, 3, 8], {"padding": [2, 0]}, (2, 4, 2, 1)),
        ([1, 1, 1], [1, 1, 1], {}, (1, 1, 1)),
    ],
)
def test_response(image, weight, given, dim):
    graph, y = fprop(image, weight, **given)
    if dim is None:
        refuse(graph, ValueError, "K a multiple of 3", "'W' (uid 2)")
        return
    graph.validate()
    assert y.get_dim() == list(dim) and y.get_stride() == list(channels_last(dim))


def test_one_padding_for_both_sides_or_one_for_each():
    for padding, extent in (
        ({"padding": [1]}, 7),
        ({"pre_padding": [2], "post_padding": [3]}, 10),
        ({"padding": [1], "pre_padding": [1], "post_padding": [1]}, 7),
    ):
        graph = graph_of()
        y = graph.conv_fprop(
            graph.tensor([1, 1, 7]), graph.tensor([1, 1, 3]), stride=[1], dilation=[1], **padding
        )
        graph.validate()
        assert y.get_dim() == [1, 1, extent]
    graph, _ = fprop([1, 1, 7], [1, 1, 3], padding=[1], pre_padding=[2])
    refuse(graph, ValueError, "padding and pre_padding contradict", "(1,)", "(2,)")


@pytest.mark.parametrize(
    ("image", "weight", "given", "texts"),
    [
        ([2, 3], [4, 3], {}, ("spatial axis", "'X' (uid 1)", "(2, 3)")),
        ([2, 3, 5], [4, 3, 3, 3], {}, ("rank", "'W' (uid 2)")),
        ([2, 3, 5], [4, 3, 0], {}, ("at least one tap", "'W' (uid 2)")),
        ([2, 3, 5], [4, 2, 3], {}, ("'W' (uid 2)", "a divisor of C = 3")),
        ([2, 0, 5], [4, 2, 3], {}, ("'W' (uid 2)", "a divisor of C = 0")),
        ([2, 2, 5], [4, 0, 3], {}, ("'W' (uid 2)", "a divisor of C = 2")),
        ([2, 4, 5], [3, 2, 3], {}, ("'W' (uid 2)", "K a multiple of 2")),
        ([2, 3, 2], [4, 3, 3], {}, ("does not fit into the padded image", "(0,)")),
        ([2, 3, 4], [4, 3, 3], {"dilation": [3]}, ("does not fit into the padded image", "(-2,)")),
        ([2, 3, 5], [4, 3, 3], {"padding": None}, ("pre_padding not set", "pass padding")),
        ([2, 3, 5], [4, 3, 3], {"padding": None, "pre_padding": [1]}, ("post_padding not set",)),
        ([2, 3, 5], [4, 3, 3], {"stride": None}, ("stride not set", "pass stride")),
        ([2, 3, 5], [4, 3, 3], {"dilation": None}, ("dilation not set",)),
        ([2, 3, 5], [4, 3, 3], {"stride": [0]}, ("stride does not fit", "1 integers of 1 or more", "(0,)")),
        ([2, 3, 5], [4, 3, 3], {"dilation": [-1]}, ("dilation does not fit",)),
        ([2, 3, 5], [4, 3, 3], {"padding": [-1]}, ("padding does not fit", "0 or more")),
        ([2, 3, 5, 5], [4, 3, 3, 3], {"stride": [1]}, ("stride does not fit", "2 integers", "(1,)")),
    ],
)
def test_malformed(image, weight, given, texts):
    graph, _ = fprop(image, weight, **given)
    refuse(graph, ValueError, "conv_fprop 'conv_fprop.0'", *texts)


def test_unset_tensors_are_malformed():
    graph = graph_of()
    graph.conv_fprop(graph.tensor([2, 3, 5, 5]), None, **ONES)
    refuse(graph, ValueError, "weight not set")


def test_well_formed_and_not_offered():
    graph, _ = fprop([1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1])
    refuse(graph, cudnnGraphNotSupportedError, "more than 3 spatial axes")
    graph, _ = fprop([1, 1, 2**31], [1, 1, 2**31])
    refuse(graph, cudnnGraphNotSupportedError, "2^31")
    graph, _ = fprop([1, 1, 2**31], [1, 1, 2**31 - 1])
    graph.validate()
    graph, y = fprop([2, 3, 5], [4, 3, 3])
    y.set_dim([2, 4, 4])
    refuse(graph, cudnnGraphNotSupportedError, "(2, 4, 3)", "(2, 4, 4)")


# ---- gradients


def adjoint(op: str, dims: Any, out: Any = None, how: str = "set_dim", **given: Any) -> tuple[Any, Any]:
    graph = graph_of()
    spatial = len(dims[0]) - 2
    attributes = {"padding": [0] * spatial, "stride": [1] * spatial, "dilation": [1] * spatial, **given}
    tensors = [graph.tensor(dim, name=name) for dim, name in zip(dims, "AB", strict=True)]
    y = getattr(graph, op)(*tensors, **attributes, out_dims=out if how == "out_dims" else None)
    if out is not None and how == "set_dim":
        y.set_dim(out)
    return graph, y


@pytest.mark.parametrize("how", ["set_dim", "out_dims"])
def test_gradient_dims_are_taken_as_set(how):
    for out in ([2, 6, 7, 9], [2, 6, 8, 9]):  # both lead to [3, 4] with stride 2
        graph, dx = adjoint("conv_dgrad", ([2, 4, 3, 4], [4, 3, 3, 3]), out, how, stride=[2, 2])
        graph.validate()
        assert dx.get_dim() == out and dx.get_stride() == list(channels_last(out))
    for out in ([4, 3, 3, 3], [4, 6, 3, 3], [4, 3, 4, 3]):
        graph, dw = adjoint("conv_wgrad", ([2, 6, 8, 9], [2, 4, 3, 4]), out, how, stride=[2, 2])
        graph.validate()
        assert dw.get_dim() == out and dw.get_stride() == list(channels_last(out))


def test_the_one_image_of_unit_stride_is_inferred():
    graph, dx = adjoint("conv_dgrad", ([2, 4, 5, 6], [4, 3, 3, 2]), padding=[1, 0], dilation=[2, 3])
    graph.validate()
    assert dx.get_dim() == [2, 3, 7, 9] and dx.get_stride() == list(channels_last((2, 3, 7, 9)))
    graph, _ = adjoint("conv_dgrad", ([2, 4, 5, 6], [4, 3, 3, 2]), stride=[1, 2])
    refuse(graph, ValueError, "dims not set", "out_dims")
    graph, _ = adjoint("conv_dgrad", ([2, 4, 1], [4, 3, 1]), padding=[1])
    refuse(graph, ValueError, "no image leads to this loss", "(-1,)")


def test_filter_dims_must_be_set():
    graph, _ = adjoint("conv_wgrad", ([2, 6, 8, 9], [2, 4, 3, 4]), stride=[2, 2])
    refuse(graph, ValueError, "dims not set", "K = 4", "out_dims")


@pytest.mark.parametrize(
    ("op", "dims", "out", "texts"),
    [
        ("conv_dgrad", ([2, 4, 5], [4, 3, 3]), [2, 3, 8], ("(2, 4, 6)", "(2, 4, 5)")),
        ("conv_dgrad", ([2, 4, 5], [4, 3, 3]), [3, 3, 7], ("(3, 4, 5)",)),
        ("conv_dgrad", ([2, 5, 5], [4, 3, 3]), [2, 3, 7], ("K = 5",)),
        ("conv_dgrad", ([2, 4, 5], [4, 3, 3]), [2, 4, 7], ("C = 4",)),
        ("conv_dgrad", ([2, 4, 5], [4, 3, 3]), [2, 15, 7], ("K a multiple of 5",)),
        ("conv_dgrad", ([2, 4, 5], [4, 3, 3]), [2, 3, 7, 1], ("rank",)),
        ("conv_wgrad", ([2, 6, 7], [2, 4, 5]), [4, 6, 4], ("(2, 4, 4)", "(2, 4, 5)")),
        ("conv_wgrad", ([2, 6, 7], [2, 4, 5]), [5, 6, 3], ("K = 4",)),
        ("conv_wgrad", ([2, 6, 7], [2, 4, 5]), [4, 4, 3], ("C = 6",)),
        ("conv_wgrad", ([2, 6, 7], [3, 4, 5]), [4, 6, 3], ("(2, 4, 5)", "(3, 4, 5)")),
    ],
)
def test_gradient_dims_that_are_of_no_convolution(op, dims, out, texts):
    graph, _ = adjoint(op, dims, out)
    refuse(graph, ValueError, *texts)


# ---- live geometry


def test_fewer_images_at_a_call():
    graph, y = fprop([8, 3, 5], [4, 3, 3])
    y.set_output(True)
    spec = graph._ir.snapshot()
    x = graph.find_tensor("X").get_uid()
    live = {x: ((2, 3, 5), (15, 5, 1)), y.get_uid(): ((2, 4, 3), (12, 1, 4))}
    assert infer_live(spec, live)[y.get_uid()][0] == (2, 4, 3)
    with pytest.raises(ValueError, match="contradict"):
        infer_live(spec, {x: live[x]})
