"""Dims, strides and types that nodes give their outputs, the errors of malformed nodes, and live geometry."""

from __future__ import annotations

import time

import numpy as np
import pytest
from declared import Declared

from opgraph.ir import NodeType, cudnnGraphNotSupportedError, data_type, infer_live, reduction_mode
from opgraph.ops import FAMILIES, OPS
from opgraph.ops.base import channels_last, format_preserving, row_major

# fmt: off
POINTWISE = [
    "abs", "add", "add_square", "bias", "binary_select", "ceil", "cmp_eq", "cmp_ge", "cmp_gt", "cmp_le",
    "cmp_lt", "cmp_neq", "cos", "div", "elu", "elu_backward", "erf", "exp", "floor", "gelu",
    "gelu_approx_tanh", "gelu_approx_tanh_backward", "gelu_backward", "gen_index", "identity", "leaky_relu",
    "leaky_relu_backward", "log", "logical_and", "logical_not", "logical_or", "max", "min", "mod", "mul",
    "neg", "pow", "reciprocal", "relu", "relu_backward", "rsqrt", "scale", "sigmoid", "sigmoid_backward",
    "sin", "softplus", "softplus_backward", "sqrt", "sub", "swish", "swish_backward", "tan", "tanh",
    "tanh_backward",
]
# fmt: on


# ---- layouts


@pytest.mark.parametrize(
    "dim, stride",
    [
        ((2, 3, 4, 5), (60, 1, 15, 3)),
        ((2, 3, 4), (12, 1, 3)),
        ((2, 3), (3, 1)),
        ((7,), (1,)),
        ((2, 3, 4, 5, 6), (360, 1, 90, 18, 3)),
        ((2, 0, 4), (4, 1, 1)),
    ],
)
def test_channels_last(dim, stride):
    assert channels_last(dim) == stride


@pytest.mark.parametrize(
    "dim, like, stride",
    [
        ((2, 3, 4), (1, 2, 6), (1, 2, 6)),
        ((2, 3, 4), (100, 1, 10), (12, 1, 3)),
        ((2, 3, 4), (1, 1, 1), (1, 2, 6)),  # ties: the lower axis is faster
        ((5, 2, 3, 4), (100, 1, 10), (24, 12, 1, 3)),  # leading axes are slowest
        ((3, 4), (9, 9, 9), (4, 1)),
    ],
)
def test_format_preserving(dim, like, stride):
    assert format_preserving(dim, like) == stride


# ---- the table of defaults


def test_matmul_is_row_major_with_broadcast_batch():
    graph = Declared(data_type.HALF, data_type.FLOAT)
    a = graph.tensor([1, 5, 4, 7], [140, 28, 1, 4])
    b = graph.tensor([3, 1, 7, 6])
    c = graph.matmul(a, b)
    d = graph.matmul(A=a, B=b).set_output(True)
    graph.validate()
    assert c.dim == d.dim == (3, 5, 4, 6) and c.stride == d.stride == row_major((3, 5, 4, 6))
    assert (c.data_type, d.data_type) == (data_type.FLOAT, data_type.HALF)
    assert graph.ir.nodes[0].node_type is NodeType.MATMUL
    assert list(graph.ir.nodes[0].inputs) == ["A", "B"] and list(graph.ir.nodes[0].outputs) == ["C"]


def test_pointwise_takes_the_stride_of_the_first_input_with_the_output_dim():
    graph = Declared()
    bias = graph.tensor([1, 1, 4])
    x = graph.tensor([2, 3, 4], [1, 2, 6])
    padded = graph.tensor([2, 3, 4], [24, 8, 1])
    first = graph.add(bias, x)
    second = graph.add(padded, x)
    graph.validate()
    assert first.stride == (1, 2, 6)
    assert second.stride == (24, 8, 1)  # padding included


def test_pointwise_with_no_input_of_the_output_dim():
    graph = Declared()
    column = graph.tensor([3, 1, 1], [1, 3, 3])
    row = graph.tensor([1, 4, 5], [20, 1, 4])
    virtual, real = graph.add(column, row), graph.add(column, row).set_output(True)
    graph.validate()
    assert virtual.dim == real.dim == (3, 4, 5)
    assert virtual.stride == format_preserving((3, 4, 5), column.stride) == (1, 3, 12)
    assert real.stride == (20, 5, 1)


def test_pointwise_broadcast_aligns_at_the_right():
    graph = Declared()
    y = graph.add(graph.tensor([3, 4]), graph.tensor([1, 1, 1, 1]))
    z = graph.mul(graph.tensor([5, 1]), graph.tensor([2, 1, 6]))
    empty = graph.mul(graph.tensor([0, 3]), graph.tensor([1, 3]))
    graph.validate()
    assert (y.dim, z.dim, empty.dim) == ((1, 1, 3, 4), (2, 5, 6), (0, 3))


def test_a_repeating_input_lends_no_stride_to_an_output():
    graph = Declared()
    y = graph.relu(graph.tensor([3, 4], [0, 1])).set_output(True)
    graph.validate()
    assert y.stride == (4, 1)


def test_user_dims_and_strides_win():
    graph = Declared()
    y = graph.relu(graph.tensor([3, 4])).set_output(True).set_dim([3, 4]).set_stride([1, 3])
    z = graph.add(graph.tensor([2, 3, 4]), graph.tensor([4])).set_stride([100, 10, 1])
    flat = graph.add(graph.tensor([3, 4]), graph.tensor([1, 1, 1, 1])).set_dim([3, 4])
    graph.validate()
    assert y.stride == (1, 3) and z.dim == (2, 3, 4) and z.stride == (100, 10, 1)
    assert flat.dim == (3, 4) and flat.stride == (4, 1)


def test_reduction_defaults():
    graph = Declared()
    x = graph.tensor([2, 3, 4, 5])
    y = graph.reduction(x, mode=reduction_mode.ADD, out_dims=[2, 3, 1, 1])
    z = graph.reduction(x, mode=reduction_mode.ADD)
    z.set_dim([2, 3, 4, 5])
    named = graph.reduction(x, mode=reduction_mode.MAX, out_dims={"OUT_0": (1, 1, 1, 1)})
    graph.validate()
    assert y.stride == (3, 1, 3, 3) and y.dim == (2, 3, 1, 1)
    assert z.stride == channels_last((2, 3, 4, 5))
    assert named.dim == (1, 1, 1, 1)
    assert y.name == "reduction.0::OUT_0"


def test_comparisons_infer_no_boolean():
    graph = Declared(data_type.HALF, data_type.FLOAT)
    y = graph.cmp_gt(graph.tensor([4]), graph.tensor([4]))
    graph.validate()
    assert y.data_type is data_type.FLOAT


@pytest.mark.parametrize("op", POINTWISE)
def test_every_pointwise_method(op):
    graph = Declared(data_type.HALF, data_type.FLOAT)
    definition = OPS[op]
    method = getattr(graph, op)
    x = graph.tensor([2, 3], [1, 2])
    code = method.__wrapped__.__code__
    tensors = [
        name
        for name in code.co_varnames[1 : code.co_argcount]
        if name in ("a", "b", "input", "input0", "input1", "mask", "loss", "comparison", "bias", "scale")
    ]
    extra = {"negative_slope": 0.5} if "leaky" in op else {"axis": 1} if op == "gen_index" else {}
    y = method(*[x] * len(tensors), **extra)
    by_keyword = method(**dict.fromkeys(tensors, x), **extra, name="k", compute_data_type=data_type.DOUBLE)
    graph.validate()
    assert y.dim == (2, 3) and y.stride == (1, 2) and y.is_virtual and y.data_type is data_type.FLOAT
    node = graph.ir.nodes[0]
    assert node.node_type is definition.node_type is NodeType.POINTWISE
    assert node.params["mode"] == op and node.name == f"{op}.0" and y.name == f"{op}.0::OUT_0"
    assert list(node.inputs) == [f"IN_{port}" for port in range(len(tensors))]
    assert by_keyword.name == "k::OUT_0" and graph.ir.nodes[1].compute_data_type is data_type.DOUBLE
    with pytest.raises(TypeError):
        method(*[x] * (len(tensors) + 6))
    with pytest.raises(TypeError):
        method()
    with pytest.raises(TypeError, match="did you mean 'compute_data_type'"):
        method(*[x] * len(tensors), **extra, compute_dtype=None)
    assert len(method.__doc__) > 3


def test_the_pointwise_family_is_complete():
    assert [name for name, d in sorted(OPS.items()) if d.node_type is NodeType.POINTWISE] == sorted(POINTWISE)
    assert len(POINTWISE) == 54
    assert len(OPS) == sum(len(family.OPS) for family in FAMILIES)


def test_scalars_may_be_positional_where_the_vocabulary_says_so():
    graph = Declared()
    x = graph.tensor([4])
    graph.relu(x, 0.1, 0.0, 6.0, "r")
    graph.leaky_relu(x, 0.1, "l")
    graph.swish(x, 2.0, "s")
    graph.gen_index(x, 0, "g")
    graph.relu_backward(x, x, 0.1)
    assert [node.name for node in graph.ir.nodes] == ["r", "l", "s", "g", "relu_backward.0"]
    assert graph.ir.get_node("r").params["upper_clip"] == 6.0
    with pytest.raises(TypeError):
        graph.add(x, x, "name")


# ---- malformed nodes


def refuse(graph, error, *texts):
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


def test_dims_that_do_not_broadcast():
    graph = Declared()
    graph.add(graph.tensor([2, 3], name="A"), graph.tensor([2, 4], name="B"), name="sum")
    refuse(graph, ValueError, "add 'sum'", "'B' (uid 2)", "(2, 3)", "(2, 4)", "'A' (uid 1)")


def test_zero_does_not_broadcast_against_more_than_one():
    graph = Declared()
    graph.add(graph.tensor([0]), graph.tensor([2]))
    refuse(graph, ValueError, "broadcast")


@pytest.mark.parametrize("dim", [(2, 3), (2, 3, 5), (1, 1, 3, 4)])
def test_an_output_dim_that_is_not_the_broadcast_one_is_not_supported(dim):
    graph = Declared()
    graph.relu(graph.tensor([2, 3, 4], name="A"), name="r").set_dim(dim).set_name("Y")
    refuse(graph, cudnnGraphNotSupportedError, "relu 'r'", "'Y' (uid 2)", "(2, 3, 4)", str(dim))


@pytest.mark.parametrize(
    "a, b, texts",
    [
        ((2, 3, 4), (2, 5, 6), ("matmul 'm'", "'B' (uid 2)", "(2, 5, 6)", "(2, 3, 4)")),
        ((2, 3, 4), (3, 4, 6), ("'B' (uid 2)", "leading")),
        ((3, 4), (1, 4, 6), ("'B' (uid 2)", "rank")),
        ((4,), (4,), ("2 axes",)),
    ],
)
def test_malformed_matmul(a, b, texts):
    graph = Declared()
    graph.matmul(graph.tensor(a, name="A"), graph.tensor(b, name="B"), name="m")
    refuse(graph, ValueError, *texts)


def test_a_wrong_dim_on_a_product_is_not_supported():
    graph = Declared()
    graph.matmul(graph.tensor([2, 3, 4]), graph.tensor([2, 4, 5])).set_dim([2, 5, 3])
    refuse(graph, cudnnGraphNotSupportedError, "(2, 3, 5)", "(2, 5, 3)")


def test_malformed_reduction():
    for out_dims, mode, texts in (
        (None, reduction_mode.ADD, ("dims not set", "reduction 'r'", "out_dims")),
        ([2, 1], None, ("mode not set",)),
        ([2, 1], reduction_mode.NOT_SET, ("mode not set",)),
        ([2, 1, 1], reduction_mode.ADD, ("rank",)),
        ([2, 2], reduction_mode.ADD, ("axis 1", "(2, 2)", "(2, 3)")),
    ):
        graph = Declared()
        graph.reduction(graph.tensor([2, 3], name="X"), mode=mode, name="r", out_dims=out_dims)
        refuse(graph, ValueError, *texts)
    graph = Declared()
    x = graph.tensor([2, 3])
    with pytest.raises(TypeError, match="mode= by keyword"):
        graph.reduction(x, reduction_mode.ADD)
    with pytest.raises(TypeError, match="reduction_mode"):
        graph.reduction(x, mode="add")
    with pytest.raises(ValueError, match="out_dims names no output 'Y'"):
        graph.reduction(x, mode=reduction_mode.ADD, out_dims={"Y": [1, 1]})


def test_grouped_reduction_shapes():
    for out_dims, fine in (
        ([1, 3, 8], True),
        ([3, 1, 8], True),
        ([1, 2, 8], True),  # three entries are the bounds of two groups
        ([3, 1, 1], True),
        ([1, 4, 8], False),
        ([3, 3, 8], False),
        ([1, 3, 7], False),
    ):
        graph = Declared()
        offset = graph.tensor([3, 1, 1], data_type=data_type.INT32)
        graph.reduction(graph.tensor([1, 10, 8]), offset, mode=reduction_mode.ADD, out_dims=out_dims)
        if fine:
            graph.validate()
        else:
            refuse(graph, ValueError, str(tuple(out_dims)))


@pytest.mark.parametrize("axis", [-1, 2])
def test_gen_index_axis(axis):
    graph = Declared()
    graph.gen_index(graph.tensor([2, 3], name="X"), axis)
    refuse(graph, ValueError, "axis", "'X' (uid 1)", str(axis))


def test_relu_limits_and_attribute_kinds():
    graph = Declared()
    x = graph.tensor([4])
    graph.relu(x, lower_clip=2.0, upper_clip=1.0)
    refuse(graph, ValueError, "lower_clip")
    for bad in (x, "1", True):
        with pytest.raises(TypeError):
            graph.relu(x, negative_slope=bad)
    with pytest.raises(TypeError, match="negative_slope"):
        graph.leaky_relu(x, None)
    with pytest.raises(TypeError, match="input 1"):
        graph.add(x, None)


# ---- live geometry


def chain():
    graph = Declared()
    a, b = graph.tensor([4, 3], name="A"), graph.tensor([4, 3], name="B")
    middle = graph.add(a, b)
    c = graph.relu(middle).set_output(True).set_name("C")
    return graph, graph.ir.snapshot(), a, b, middle, c


def test_live_geometry_follows_overrides():
    _, spec, a, b, middle, c = chain()
    live = ((2, 3), (3, 1))
    result = infer_live(spec, dict.fromkeys((a.uid, b.uid, c.uid), live))
    assert result == dict.fromkeys((a.uid, b.uid, middle.uid, c.uid), live)
    assert middle.dim == (4, 3)
    empty = infer_live(spec, dict.fromkeys((a.uid, b.uid, c.uid), ((0, 3), (3, 1))))
    assert empty[middle.uid][0] == (0, 3)
    assert infer_live(spec, {})[c.uid] == ((4, 3), (3, 1))
    grown = infer_live(spec, dict.fromkeys((a.uid, b.uid, c.uid), ([8, 3], [3, 1])))
    assert grown[middle.uid][0] == (8, 3)


def test_contradicting_overrides_name_tensor_uid_and_values():
    _, spec, a, b, _, c = chain()
    live = ((2, 3), (3, 1))
    for overrides, texts in (
        ({a.uid: live}, ("'A' (uid 1)", "'B' (uid 2)", "(2, 3)", "(4, 3)")),
        ({a.uid: live, b.uid: live}, ("'C' (uid 4)", "(2, 3)", "(4, 3)")),
        ({a.uid: live, b.uid: live, c.uid: ((3, 3), (3, 1))}, ("'C' (uid 4)", "(2, 3)", "(3, 3)")),
        ({a.uid: ((-1, 3), (3, 1))}, ("'A' (uid 1)", "(-1, 3)")),
        ({a.uid: ((2, 3, 1), (3, 1, 1))}, ("'A' (uid 1)", "(2, 3, 1)", "(4, 3)")),
        ({a.uid: ((2, 3), (3,))}, ("'A' (uid 1)", "strides")),
        ({999: live}, ("999",)),
    ):
        with pytest.raises(ValueError) as caught:
            infer_live(spec, overrides)
        for text in texts:
            assert text in str(caught.value), (text, str(caught.value))


def test_dims_set_by_the_user_are_checked_against_the_live_ones():
    graph = Declared()
    a = graph.tensor([4, 3], name="A")
    middle = graph.relu(a).set_dim([4, 3]).set_name("M")
    c = graph.reduction(middle, mode=reduction_mode.ADD, out_dims=[4, 1]).set_output(True)
    spec = graph.ir.snapshot()
    with pytest.raises(ValueError, match=r"'M' \(uid 2\).*\(2, 3\).*\(4, 3\)"):
        infer_live(spec, {a.uid: ((2, 3), (3, 1)), c.uid: ((2, 1), (1, 1))})

    graph = Declared()
    a = graph.tensor([4, 3], name="A")
    c = (
        graph.reduction(graph.relu(a), mode=reduction_mode.ADD, out_dims=[4, 1])
        .set_output(True)
        .set_name("C")
    )
    spec = graph.ir.snapshot()
    assert infer_live(spec, {a.uid: ((2, 3), (3, 1)), c.uid: ((2, 1), (1, 1))})[c.uid] == ((2, 1), (1, 1))
    with pytest.raises(ValueError, match=r"'C' \(uid 3\)"):
        infer_live(spec, {a.uid: ((2, 3), (3, 1))})


def test_live_product():
    graph = Declared()
    a, b = graph.tensor([1, 8, 16]), graph.tensor([1, 16, 4])
    c = graph.matmul(a, b).set_output(True)
    spec = graph.ir.snapshot()
    live = {a.uid: ((1, 5, 7), (35, 7, 1)), b.uid: ((1, 7, 4), (28, 4, 1)), c.uid: ((1, 5, 4), (20, 4, 1))}
    assert infer_live(spec, live)[c.uid] == ((1, 5, 4), (20, 4, 1))
    del live[c.uid]
    with pytest.raises(ValueError, match=r"\(1, 5, 4\).*\(1, 8, 4\)"):
        infer_live(spec, live)


# ---- cost


@pytest.mark.timing
def test_a_thousand_nodes_declare_and_validate_in_a_tenth_of_a_second():
    times = []
    for _ in range(5):
        start = time.perf_counter()
        graph = Declared()
        x, bias = graph.tensor([8, 128, 64]), graph.tensor([1, 1, 64])
        for _ in range(500):
            x = graph.relu(graph.add(x, bias))
        x.set_output(True)
        graph.validate()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1, f"{min(times):.3f} s"
    assert x.dim == (8, 128, 64)


def test_numpy_extents_make_plain_dims():
    graph = Declared()
    y = graph.relu(graph.tensor(np.array([2, 3])))
    graph.validate()
    assert all(type(extent) is int for extent in y.dim + y.stride)
