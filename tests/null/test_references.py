"""The NumPy references of products, pointwise operators, activations and reductions, without an engine."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from declared import Declared, run

from opgraph.ir import data_type, reduction_mode
from opgraph.ir.datatypes import numpy_dtype
from opgraph.ops import OPS, Math, OutSpec, RefCall
from opgraph.ops.elementwise import BLOCK

nan, inf = math.nan, math.inf
rng = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def evaluate(op, *arrays, precise=True, compute=data_type.FLOAT, out=None, view=None, ports=None, **params):
    """One node on arrays, returning the unrounded result."""
    arrays = [np.asarray(array) for array in arrays]
    if ports is None:
        ports = [f"IN_{port}" for port in range(len(arrays))]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    params = {"mode": op, **params}
    if op.startswith("relu"):
        params = {"negative_slope": None, "lower_clip": None, "upper_clip": None, **params}
    if op.startswith("swish"):
        params = {"swish_beta": None, **params}
    out = out or (data_type.DOUBLE if view is None else data_type.FLOAT)
    spec = OutSpec(shape, out, numpy_dtype(out), view)
    call = RefCall(params, dict(zip(ports, arrays, strict=True)), {"OUT_0": spec}, Math(compute, precise))
    return OPS[op].reference(call)["OUT_0"]


X = np.array([-1e30, -300.0, -20.0, -3.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.25, 1.0, 2.5, 20.0, 300.0, 1e30])
ONE = np.ones_like(X)


def phi(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if abs(x) < 1e3 else 0.0


def cdf(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def sig(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def approx(x):
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * (1 + math.tanh(u))


def approx_slope(x):
    if abs(x) > 50:
        return float(x > 0)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + math.tanh(u)) + 0.5 * x * (1 - math.tanh(u) ** 2) * du


SCALAR = {
    "relu": lambda x: max(x, 0.0),
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "gelu_approx_tanh": lambda x: x * approx(x),
    "sigmoid": sig,
    "tanh": math.tanh,
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "swish": lambda x: x * sig(x),
    "relu_backward": lambda x: float(x > 0),
    "elu_backward": lambda x: 1.0 if x > 0 else math.exp(x),
    "gelu_approx_tanh_backward": approx_slope,
    "sigmoid_backward": lambda x: sig(x) * sig(-x),
    "tanh_backward": lambda x: (1 / math.cosh(x)) ** 2 if abs(x) < 350 else 0.0,
    "softplus_backward": sig,
    "swish_backward": lambda x: sig(x) * (1 + max(min(x, 800.0), -800.0) * sig(-x)),
    "abs": abs,
    "neg": lambda x: -x,
    "ceil": lambda x: float(math.ceil(x)),
    "floor": lambda x: float(math.floor(x)),
    "identity": lambda x: x,
    "exp": lambda x: math.exp(x) if x < 700 else inf,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}


@pytest.mark.parametrize("op", SCALAR)
@pytest.mark.parametrize("precise", [True, False])
def test_functions_of_one_value(op, precise):
    values = X if precise else X[1:-1].astype(np.float32)
    inputs = (np.ones_like(values), values) if op.endswith("backward") else (values,)
    result = evaluate(op, *inputs, precise=precise, out=data_type.DOUBLE if precise else data_type.FLOAT)
    expected = np.array([SCALAR[op](float(x)) for x in values])
    if not precise:
        with np.errstate(over="ignore"):
            expected = expected.astype(np.float32)
    assert result.dtype == values.dtype
    tolerance = 1e-13 if precise else 2e-6
    # Far out in the tails all that matters is that the value is tiny.
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=1e-100 if precise else 1e-37)


@pytest.mark.parametrize("op", sorted({*SCALAR, "sqrt", "rsqrt", "log", "reciprocal"} - {"relu_backward"}))
def test_nan_in_nan_out(op):
    inputs = ([1.0], [nan]) if op.endswith("backward") else ([nan],)
    assert np.isnan(evaluate(op, *inputs)).all()


def test_gelu_and_erf():
    pytest.importorskip("opgraph._native")
    near = X[1:-1]
    np.testing.assert_allclose(evaluate("erf", near), [math.erf(x) for x in near], rtol=1e-15)
    np.testing.assert_allclose(evaluate("gelu", near), [x * cdf(x) for x in near], rtol=1e-12, atol=1e-15)
    slope = [cdf(x) + x * phi(x) for x in X]
    np.testing.assert_allclose(
        evaluate("gelu_backward", 2 * ONE, X), 2 * np.array(slope), rtol=1e-12, atol=1e-15
    )
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert evaluate("gelu", strided, precise=False).shape == (4, 3)
    assert np.isnan(evaluate("gelu", [nan])).all() and evaluate("gelu", np.zeros((0, 3))).shape == (0, 3)


def test_real_functions_with_a_domain():
    np.testing.assert_array_equal(evaluate("sqrt", [4.0, 0.0, -1.0]), [2, 0, nan])
    np.testing.assert_array_equal(evaluate("rsqrt", [4.0, 0.0, inf]), [0.5, inf, 0])
    np.testing.assert_array_equal(evaluate("log", [1.0, 0.0, -1.0]), [0, -inf, nan])
    np.testing.assert_array_equal(evaluate("reciprocal", [4.0, 0.0, -inf]), [0.25, inf, -0.0])


def test_relu_regions():
    x = [-inf, -4.0, -1.0, 0.0, 1.0, 2.0, 6.0, 9.0, inf, nan]
    np.testing.assert_array_equal(evaluate("relu", x), [0, 0, 0, 0, 1, 2, 6, 9, inf, nan])
    np.testing.assert_array_equal(evaluate("relu", x, upper_clip=6.0), [0, 0, 0, 0, 1, 2, 6, 6, 6, nan])
    np.testing.assert_array_equal(
        evaluate("relu", x, lower_clip=1.0, upper_clip=6.0), [1, 1, 1, 1, 1, 2, 6, 6, 6, nan]
    )
    np.testing.assert_array_equal(
        evaluate("relu", x, negative_slope=0.5, lower_clip=1.0, upper_clip=6.0),
        [-inf, -1.5, 0, 0.5, 1, 2, 6, 6, 6, nan],
    )
    np.testing.assert_array_equal(
        evaluate("leaky_relu", x, negative_slope=0.5), [-inf, -2, -0.5, 0, 1, 2, 6, 9, inf, nan]
    )
    dy = np.full(9, 2.0)
    np.testing.assert_array_equal(
        evaluate("relu_backward", dy, x[:9], negative_slope=0.5, lower_clip=1.0, upper_clip=6.0),
        [1, 1, 1, 1, 1, 2, 0, 0, 0],
    )
    np.testing.assert_array_equal(evaluate("relu_backward", [inf, 3.0], [-1.0, 1.0]), [0, 3])
    np.testing.assert_array_equal(
        evaluate("leaky_relu_backward", dy, x[:9], negative_slope=0.25), [0.5, 0.5, 0.5, 0.5, 2, 2, 2, 2, 2]
    )


def test_swish_beta():
    x = np.array([-2.0, 0.5, 3.0])
    np.testing.assert_allclose(evaluate("swish", x, swish_beta=1.7), [v * sig(1.7 * v) for v in x])
    step = 1e-6
    numeric = (evaluate("swish", x + step, swish_beta=1.7) - evaluate("swish", x - step, swish_beta=1.7)) / (
        2 * step
    )
    np.testing.assert_allclose(evaluate("swish_backward", np.ones(3), x, swish_beta=1.7), numeric, rtol=1e-8)


@pytest.mark.parametrize("op", [op for op in SCALAR if op.endswith("backward")])
def test_backward_is_the_derivative_and_scales_with_the_loss(op):
    x = np.array([-2.3, -0.4, 0.7, 1.9])
    dy = np.array([[1.0], [-3.0]])
    step = 1e-6
    forward = op.removesuffix("_backward")
    slope = (evaluate(forward, x + step) - evaluate(forward, x - step)) / (2 * step)
    np.testing.assert_allclose(evaluate(op, dy, x), dy * slope, rtol=1e-7, atol=1e-9)


def test_arithmetic_and_broadcast():
    a, b = np.array([[7.0], [-7.0]]), np.array([2.0, -2.0, 0.5])
    for op, expected in (
        ("add", a + b),
        ("sub", a - b),
        ("mul", a * b),
        ("div", a / b),
        ("bias", a + b),
        ("scale", a * b),
        ("add_square", a + b * b),
        ("mod", [[1, 1, 0], [-1, -1, 0]]),
        ("max", np.maximum(a, b)),
        ("min", np.minimum(a, b)),
    ):
        np.testing.assert_array_equal(evaluate(op, a, b), expected, op)
    np.testing.assert_array_equal(evaluate("pow", [2.0, 9.0, -8.0], [10.0, 0.5, 0.5]), [1024, 3, nan])
    np.testing.assert_array_equal(evaluate("max", [nan, 1.0], [1.0, nan]), [nan, nan])
    np.testing.assert_array_equal(evaluate("min", [nan, 1.0], [1.0, nan]), [nan, nan])
    np.testing.assert_array_equal(evaluate("div", [1.0, 0.0], [0.0, 0.0]), [inf, nan])


def test_comparisons_and_logic():
    a, b = [1.0, 2.0, nan], [2.0, 2.0, nan]
    for op, expected in (
        ("cmp_eq", [0, 1, 0]),
        ("cmp_neq", [1, 0, 1]),
        ("cmp_gt", [0, 0, 0]),
        ("cmp_ge", [0, 1, 0]),
        ("cmp_lt", [1, 0, 0]),
        ("cmp_le", [1, 1, 0]),
    ):
        np.testing.assert_array_equal(evaluate(op, a, b), np.array(expected, bool), op)
    p, q = np.array([0.0, 1e-300, 0.0, nan]), np.array([0.0, 0.0, 3.0, 1.0])
    np.testing.assert_array_equal(evaluate("logical_and", p, q, precise=False), [0, 0, 0, 1])
    np.testing.assert_array_equal(evaluate("logical_or", p, q, precise=False), [0, 1, 1, 1])
    np.testing.assert_array_equal(evaluate("logical_not", p, precise=False), [1, 0, 1, 0])
    ints = np.array([1, 2], np.int32)
    result = evaluate("binary_select", ints, ints * 10, np.array([True, False]))
    assert result.tolist() == [1, 20] and result.dtype == np.int32


def test_gen_index():
    x = np.full((2, 3), nan, np.float16)
    assert evaluate("gen_index", x, axis=1).tolist() == [[0, 1, 2]] * 2
    assert evaluate("gen_index", x, axis=0).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert evaluate("gen_index", np.zeros((0, 3)), axis=1).shape == (0, 3)


@pytest.mark.parametrize("compute", [data_type.INT32, data_type.INT64])
def test_integer_arithmetic(compute):
    big = 9007199254740993
    a, b = np.array([7, -7, 7, -7, 5]), np.array([2, 2, -2, -2, 0])
    assert evaluate("add", np.array([big]), np.array([0]), compute=compute).tolist() == [big]
    assert evaluate("div", a, b, compute=compute).tolist() == [3, -3, -3, 3, 0]
    assert evaluate("mod", a, b, compute=compute).tolist() == [1, -1, 1, -1, 0]
    assert evaluate("pow", np.array([2, 3, -1, 0]), np.array([-1, 3, -3, 0]), compute=compute).tolist() == [
        0,
        27,
        -1,
        1,
    ]
    assert evaluate("ceil", a, compute=compute).tolist() == a.tolist()
    assert evaluate("relu", a, compute=compute).tolist() == [7, 0, 7, 0, 5]
    assert evaluate("cmp_gt", np.array([big]), np.array([big - 1]), compute=compute).tolist() == [True]


def test_boolean_arithmetic_counts_non_zero_as_one():
    p, q = np.array([True, True, False]), np.array([True, False, False])
    assert evaluate("add", p, q, compute=data_type.BOOLEAN).tolist() == [2, 1, 0]
    assert evaluate("sub", p, q, compute=data_type.BOOLEAN).tolist() == [0, 1, 0]
    assert evaluate("neg", p, compute=data_type.BOOLEAN).tolist() == [-1, -1, 0]
    assert evaluate("max", p, q, compute=data_type.BOOLEAN).tolist() == [True, True, False]
    graph = Declared(data_type.BOOLEAN)
    a, b = graph.tensor([3]), graph.tensor([3])
    y = graph.add(a, b)
    assert run(graph, {a: p, b: q})[y].tolist() == [True, True, False]


def test_results_land_in_the_output_in_place_and_strided():
    x = rng.standard_normal((3, 4)).astype(np.float32)
    for op in ("relu", "sigmoid", "exp", "softplus", "swish", "tanh", "gelu_approx_tanh", "identity", "neg"):
        expected = evaluate(op, x, precise=False)
        same = x.copy()
        result = evaluate(op, same, precise=False, view=same)
        assert result is same and np.array_equal(same, expected), op
        wide = np.full((3, 8), nan, np.float32)
        evaluate(op, x, precise=False, view=wide[:, :4])
        assert np.array_equal(wide[:, :4], expected) and np.isnan(wide[:, 4:]).all(), op
        assert not np.shares_memory(evaluate(op, x, precise=False), x), op
    shared = np.arange(5, dtype=np.float32)
    evaluate("add", shared[:4], shared[:4], precise=False, view=shared[1:])
    assert shared.tolist() == [0, 0, 2, 4, 6]


@pytest.mark.parametrize("size", [2 * BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_long_arrays_are_worked_on_in_blocks_with_the_same_result(size, dtype):
    x, dy = (rng.standard_normal(size).astype(dtype) for _ in range(2))
    for op, inputs in (
        ("swish", (x,)),
        ("swish_backward", (dy, x)),
        ("add", (x, dy)),
        ("add", (x, dy[:1])),
        ("binary_select", (x, dy, x > 0)),
        ("cmp_gt", (x, dy)),
    ):
        expected = np.concatenate(
            [
                evaluate(op, *(a if a.size == 1 else a[part] for a in inputs), precise=False)
                for part in (slice(0, 1000), slice(1000, BLOCK + 5), slice(BLOCK + 5, size))
            ]
        )
        whole = evaluate(op, *inputs, precise=False, out=data_type.FLOAT)
        assert np.array_equal(whole, expected.astype(np.float32)), op
        folded = evaluate(op, *(a if a.size == 1 else a.reshape(1, -1, 1) for a in inputs), precise=False)
        assert np.array_equal(folded.ravel(), expected), op
    index = evaluate(
        "gen_index", x.reshape(2, -1)[:, : size // 2] if size % 2 == 0 else x.reshape(1, -1), axis=1
    )
    assert index[0, -1] == index.shape[1] - 1


def test_blocks_in_place_and_overlapping():
    size = 2 * BLOCK + 9
    x = rng.standard_normal(size).astype(np.float32)
    expected = evaluate("swish", x[: 2 * BLOCK], precise=False)
    same = x.copy()[: 2 * BLOCK]
    assert evaluate("swish", same, precise=False, view=same) is same and np.array_equal(same, expected)
    shifted = x.copy()
    late = shifted[1 : 2 * BLOCK + 1]  # lies one element later, so that blocks overlap the next ones
    result = evaluate("swish", shifted[: 2 * BLOCK], precise=False, view=late)
    assert result is not late and np.array_equal(result, expected)


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.float64, np.bool_])
def test_selection_keeps_every_bit(dtype):
    a, b = (rng.integers(0, 2, (4, 5)).astype(dtype) for _ in range(2))
    if np.dtype(dtype).kind == "f":
        a[0], b[1] = nan, -0.0
    mask = rng.integers(0, 2, (1, 5)).astype(np.float32)
    result = evaluate("binary_select", a, b, mask)
    expected = np.where(mask != 0, a, b)
    assert result.dtype == dtype and np.array_equal(result.view(np.uint8), expected.view(np.uint8))
    assert evaluate("binary_select", a[:, ::2], b[:, ::2], mask[:, ::2]).shape == (4, 3)


def test_leading_ones_of_a_user_dim_do_not_matter():
    graph = Declared()
    x, one = graph.tensor([3, 4]), graph.tensor([1, 1, 1, 1])
    y = graph.add(x, one).set_dim([3, 4]).set_output(True)
    z = graph.exp(x).set_dim([1, 1, 3, 4]).set_output(True)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    out = np.empty((3, 4), np.float32)
    result = run(graph, {x: values, one: np.ones((1, 1, 1, 1), np.float32)}, precise=False, into={y: out})
    assert np.array_equal(out, values + 1) and result[z].shape == (1, 1, 3, 4)


# ---- products


def product(a, b, *, precise=True, compute=data_type.FLOAT, view=None):
    a, b = np.asarray(a), np.asarray(b)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    spec = OutSpec(shape, data_type.FLOAT, np.dtype(np.float32), view)
    call = RefCall({"padding": 0.0}, {"A": a, "B": b}, {"C": spec}, Math(compute, precise))
    return OPS["matmul"].reference(call)["C"]


@pytest.mark.parametrize(
    "a, b",
    [
        ((4, 7), (7, 5)),
        ((3, 4, 7), (1, 7, 5)),
        ((1, 4, 7), (3, 7, 5)),
        ((2, 1, 4, 7), (1, 3, 7, 5)),
        ((1, 1, 1), (1, 1, 1)),
        ((2, 0, 7), (1, 7, 5)),
        ((2, 4, 0), (2, 0, 5)),
        ((0, 4, 7), (1, 7, 5)),
    ],
)
@pytest.mark.parametrize("precise", [True, False])
def test_product(a, b, precise):
    a, b = rng.standard_normal(a).astype(np.float32), rng.standard_normal(b).astype(np.float32)
    expected = np.matmul(a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(product(a, b, precise=precise), expected, rtol=1e-5, atol=1e-5)
    wide = np.full((*expected.shape[:-1], expected.shape[-1] + 2), nan, np.float32)
    for view in (np.full(expected.shape, nan, np.float32), wide[..., :-2]):
        view[...] = product(a, b, precise=False, view=view)
        np.testing.assert_allclose(view, expected, rtol=1e-4, atol=1e-4)
    assert np.isnan(wide[..., -2:]).all()


def test_product_of_transposed_and_mixed_types():
    a = rng.standard_normal((7, 4)).astype(np.float16).T
    b = np.asfortranarray(rng.integers(-5, 5, (7, 5)).astype(np.int8))
    np.testing.assert_allclose(product(a, b), a.astype(float) @ b.astype(float), rtol=1e-12)


def test_integer_products_are_exact():
    a = np.full((2, 300), 127, np.int8)
    assert product(a, a.T, compute=data_type.INT32).tolist() == [[127 * 127 * 300] * 2] * 2
    big = np.array([[2**40 + 1, 1]])
    assert product(big, np.array([[2**20], [3]]), compute=data_type.INT64).tolist() == [[2**60 + 2**20 + 3]]
    lowest = np.full((1, 1), np.iinfo(np.int64).min)
    assert product(lowest, np.ones((1, 1), np.int64), compute=data_type.INT64).tolist() == [[-(2**63)]]


# ---- reductions

MODE = reduction_mode
NUMPY = {
    MODE.ADD: np.sum,
    MODE.MUL: np.prod,
    MODE.MIN: np.min,
    MODE.MAX: np.max,
    MODE.AVG: np.mean,
    MODE.AMAX: lambda x, **k: np.max(np.abs(x), **k),
    MODE.NORM1: lambda x, **k: np.sum(np.abs(x), **k),
    MODE.NORM2: lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    MODE.MUL_NO_ZEROS: lambda x, **k: np.prod(np.where(x == 0, 1, x), **k),
}


def reduce(x, mode, shape, offset=None, compute=data_type.FLOAT, precise=True):
    inputs = (
        {"IN_0": np.asarray(x)}
        if offset is None
        else {"IN_0": np.asarray(x), "group_offset": np.asarray(offset)}
    )
    spec = OutSpec(tuple(shape), data_type.DOUBLE, np.dtype(np.float64))
    result = OPS["reduction"].reference(
        RefCall({"mode": mode}, inputs, {"OUT_0": spec}, Math(compute, precise))
    )
    assert result["OUT_0"].shape == tuple(shape)
    return result["OUT_0"]


@pytest.mark.parametrize("mode", NUMPY)
@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2), ()])
def test_reduction(mode, axes):
    x = rng.standard_normal((2, 3, 5)).astype(np.float16)
    x[0, 1, 2] = 0
    shape = [1 if axis in axes else extent for axis, extent in enumerate(x.shape)]
    expected = NUMPY[mode](x.astype(np.float64), axis=axes, keepdims=True)
    np.testing.assert_allclose(reduce(x, mode, shape), expected, rtol=1e-12)
    np.testing.assert_allclose(reduce(x, mode, shape, precise=False), expected, rtol=2e-6)


def test_reduction_of_nothing_and_of_nan():
    empty = np.zeros((2, 0))
    for mode, neutral in (
        (MODE.ADD, 0),
        (MODE.MUL, 1),
        (MODE.MIN, inf),
        (MODE.MAX, -inf),
        (MODE.AMAX, 0),
        (MODE.AVG, nan),
        (MODE.NORM2, 0),
        (MODE.MUL_NO_ZEROS, 1),
    ):
        np.testing.assert_array_equal(reduce(empty, mode, (2, 1)), [[neutral]] * 2, mode.name)
        assert reduce(empty, mode, (2, 0)).size == 0
        assert np.isnan(reduce([[1.0, nan, 0.0]], mode, (1, 1))).all(), mode


def test_integer_reduction():
    x = np.array([[5, -3, 0, 9007199254740993]])
    for mode, expected in ((MODE.ADD, 9007199254740995), (MODE.MAX, 9007199254740993), (MODE.MIN, -3)):
        assert reduce(x, mode, (1, 1), compute=data_type.INT64).tolist() == [[expected]]
    assert reduce([[1, 2, 4]], MODE.AVG, (1, 1), compute=data_type.INT32).tolist() == [[7 / 3]]


@pytest.mark.parametrize("mode", NUMPY)
@pytest.mark.parametrize(
    "bounds", [[0, 3, 3, 10], [0, 0, 0, 10], [10, 10, 10, 10], [2, 2, 5, 9], [0, 4, 9, 9]]
)
@pytest.mark.parametrize("form", ["[1,E,H]", "[E,1,H]", "[1,E,1]", "[E,H]", "[2,E,H]"])
def test_grouped_reduction(mode, bounds, form):
    batch = 2 if form == "[2,E,H]" else 1
    x = rng.standard_normal((batch, 10, 4)) + 0.1
    groups = [x[:, start:end] for start, end in pairwise(bounds)]
    identity = {MODE.MIN: inf, MODE.MAX: -inf, MODE.MUL: 1, MODE.MUL_NO_ZEROS: 1, MODE.AVG: nan}.get(mode, 0)
    axes = (1, 2) if form == "[1,E,1]" else 1
    expected = np.concatenate(
        [
            NUMPY[mode](group, axis=axes, keepdims=True)
            if group.size
            else np.full((batch, 1, 1 if form == "[1,E,1]" else 4), identity, float)
            for group in groups
        ],
        axis=1,
    )
    if form == "[E,1,H]":
        expected = expected.reshape(3, 1, 4)
    if form == "[E,H]":
        x, expected = x[0], expected[0]
    np.testing.assert_allclose(
        reduce(x, mode, expected.shape, np.array(bounds, np.int32)), expected, rtol=1e-12
    )
    if bounds[-1] == 10:
        offset = np.array(bounds[:-1], np.int64).reshape(3, 1, 1)
        np.testing.assert_allclose(reduce(x, mode, expected.shape, offset), expected, rtol=1e-12)


@pytest.mark.parametrize("bounds", [[0, 5, 3, 10], [0, 3, 5, 11], [-1, 3, 5, 10]])
def test_bad_group_offsets(bounds):
    with pytest.raises(ValueError, match="group_offset"):
        reduce(np.ones((1, 10, 4)), MODE.ADD, (1, 3, 4), np.array(bounds))


# ---- whole graphs


def test_epilogue_is_rounded_once_per_tensor():
    graph = Declared(data_type.HALF, data_type.FLOAT, data_type.FLOAT)
    a, b, bias = graph.tensor([1, 8, 64]), graph.tensor([1, 64, 16]), graph.tensor([1, 1, 16])
    y = graph.relu(graph.bias(graph.matmul(a, b), bias)).set_output(True)
    va, vb, vbias = (rng.standard_normal(t.dim).astype(np.float16) for t in (a, b, bias))
    result = run(graph, {a: va, b: vb, bias: vbias})[y]
    exact = np.maximum(va.astype(np.float64) @ vb.astype(np.float64) + vbias, 0)
    assert result.dtype == np.float16
    np.testing.assert_allclose(result, exact, rtol=1e-3)
