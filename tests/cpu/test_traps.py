"""Conventions of the operators that are easy to get wrong, one test each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import OperandError, cudnnGraphNotSupportedError, data_type, norm_forward_phase, reduction_mode

FLOAT, HALF, BOOLEAN = data_type.FLOAT, data_type.HALF, data_type.BOOLEAN


@pytest.fixture
def knobs(precision: str) -> dict[str, str]:
    return {"precision": precision}


def graph_of(io: data_type = FLOAT, **context: Any) -> Any:
    return opgraph.pygraph(io_data_type=io, **context)


def evaluate(graph: Any, feeds: dict[Any, Any], *outputs: Any, knobs: Any = None) -> list[np.ndarray]:
    """Marks the outputs, builds, and runs into buffers of NaN."""
    for tensor in outputs:
        tensor.set_output(True)
    graph.build(engine="cpu", knobs=knobs)
    results = []
    for tensor in outputs:
        dtype = {FLOAT: np.float32, HALF: np.float16, BOOLEAN: np.bool_}[tensor.get_data_type()]
        fill = True if dtype is np.bool_ else np.nan
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.get_dim(), tensor.get_stride(), strict=True))
        memory = np.full(span, fill, dtype)
        steps = [s * memory.itemsize for s in tensor.get_stride()]
        results.append(np.lib.stride_tricks.as_strided(memory, tensor.get_dim(), steps))
    graph.execute({**feeds, **dict(zip(outputs, results, strict=True))})
    return results


def normal(*dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dim).astype(np.float32)


def attention_inputs(
    graph: Any, rows: int = 3, keys: int = 3, width: int = 4
) -> tuple[dict[Any, Any], Any, Any, Any]:
    dims = ((1, 1, rows, width), (1, 1, keys, width), (1, 1, keys, width))
    tensors = [graph.tensor(dim, name=name) for name, dim in zip("qkv", dims, strict=True)]
    feeds = {tensor: normal(*dim, seed=i) for i, (tensor, dim) in enumerate(zip(tensors, dims, strict=True))}
    return feeds, *tensors


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_trap_01_an_unset_attn_scale_is_one(knobs):
    graph = graph_of()
    feeds, q, k, v = attention_inputs(graph)
    (o,) = evaluate(graph, feeds, graph.sdpa(q, k, v, generate_stats=False)[0], knobs=knobs)
    scores = feeds[q] @ feeds[k].swapaxes(-1, -2)
    np.testing.assert_allclose(o, softmax(scores) @ feeds[v], rtol=1e-5, atol=1e-5)
    assert np.abs(o - softmax(scores / 2) @ feeds[v]).max() > 1e-2, "not 1 / sqrt(4)"


def test_trap_02_io_half_alone_makes_compute_half():
    context = graph_of(HALF).context
    assert context.io_data_type is HALF
    assert context.intermediate_data_type is HALF
    assert context.compute_data_type is HALF
    context = opgraph.pygraph().context
    assert (context.intermediate_data_type, context.compute_data_type) == (FLOAT, FLOAT)
    graph = graph_of(HALF)
    a = graph.tensor([3])
    virtual = graph.mul(a, a)
    out = graph.add(virtual, a).set_output(True)
    graph.validate()
    assert virtual.get_data_type() is HALF and out.get_data_type() is HALF


def test_trap_02_a_virtual_edge_rounds_to_its_own_type(knobs):
    for intermediate, expected in ((HALF, 0.0), (FLOAT, 2**-20)):
        graph = graph_of(FLOAT, intermediate_data_type=intermediate, compute_data_type=FLOAT)
        a, b, one = (graph.tensor([1], name=name) for name in ("a", "b", "one"))
        out = graph.sub(graph.mul(a, b), one)
        feeds = {
            a: np.array([1 + 2**-20], np.float32),
            b: np.ones(1, np.float32),
            one: np.ones(1, np.float32),
        }
        assert evaluate(graph, feeds, out, knobs=knobs)[0][0] == expected


def test_trap_03_outputs_are_never_marked_by_themselves(knobs):
    graph = graph_of()
    a = graph.tensor([3], name="a")
    leaf = graph.neg(a).set_name("leaf")
    marked = graph.abs(a)
    ignored = np.full(3, 7, np.float32)
    (result,) = evaluate(graph, {a: np.array([-1, 2, -3], np.float32), leaf: ignored}, marked, knobs=knobs)
    assert result.tolist() == [1, 2, 3]
    assert ignored.tolist() == [7, 7, 7], "a virtual tensor's buffer is ignored"
    assert leaf.get_is_virtual() and marked not in graph.get_inputs() and graph.get_outputs() == [marked]


def test_trap_04_reduction_axes_come_from_the_output_dims(knobs):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for dims, expected in (
        ([2, 1], [[3], [12]]),
        ([1, 3], [[3, 5, 7]]),
        ([1, 1], [[15]]),
        ([2, 3], x.tolist()),
    ):
        graph = graph_of()
        a = graph.tensor([2, 3])
        out = graph.reduction(a, mode=reduction_mode.ADD).set_dim(dims)
        assert evaluate(graph, {a: x}, out, knobs=knobs)[0].tolist() == expected


def test_trap_04_equal_dims_still_apply_the_mode_to_each_element(knobs):
    x = np.array([[-2, 3]], np.float32)
    for mode, expected in (
        (reduction_mode.NORM1, [[2, 3]]),
        (reduction_mode.AMAX, [[2, 3]]),
        (reduction_mode.AVG, [[-2, 3]]),
    ):
        graph = graph_of()
        a = graph.tensor([1, 2])
        assert (
            evaluate(graph, {a: x}, graph.reduction(a, mode=mode, out_dims=[1, 2]), knobs=knobs)[0].tolist()
            == expected
        )


def test_trap_04_unset_output_dims_are_malformed():
    graph = graph_of()
    graph.reduction(graph.tensor([2, 3]), mode=reduction_mode.ADD).set_output(True)
    with pytest.raises(ValueError, match="dims not set"):
        graph.validate()


def test_trap_05_the_left_bound_counts_the_diagonal(knobs):
    graph = graph_of()
    feeds, q, k, v = attention_inputs(graph, rows=4, keys=4)
    o = graph.sdpa(q, k, v, generate_stats=False, diagonal_band_left_bound=1, diagonal_band_right_bound=0)[0]
    np.testing.assert_allclose(evaluate(graph, feeds, o, knobs=knobs)[0], feeds[v], rtol=1e-6)
    graph = graph_of()
    feeds, q, k, v = attention_inputs(graph)
    graph.sdpa(q, k, v, generate_stats=False, diagonal_band_left_bound=0)[0].set_output(True)
    with pytest.raises(ValueError, match="left bound"):
        graph.validate()


@pytest.mark.parametrize(
    "op, expected",
    [
        ("relu", [0, 1]), ("tanh", 1 - np.tanh([-1, 2]) ** 2),
        ("sigmoid", np.exp([-1, -2]) / (1 + np.exp([-1, -2])) ** 2),
        ("softplus", 1 / (1 + np.exp([1, -2]))), ("elu", [np.exp(-1), 1]),
    ],
)  # fmt: skip
def test_trap_06_backward_takes_loss_and_the_forward_input(op, expected, knobs):
    graph = graph_of()
    loss, x = graph.tensor([2], name="loss"), graph.tensor([2], name="x")
    feeds = {loss: np.array([3, 5], np.float32), x: np.array([-1, 2], np.float32)}
    (dx,) = evaluate(graph, feeds, getattr(graph, f"{op}_backward")(loss, x), knobs=knobs)
    np.testing.assert_allclose(dx, np.array(expected) * [3, 5], rtol=1e-6)


def test_trap_07_binary_select_takes_input0_where_the_mask_is_true(knobs):
    graph = graph_of()
    a, b = graph.tensor([4], name="a"), graph.tensor([4], name="b")
    mask = graph.tensor([4], name="mask", data_type=BOOLEAN)
    feeds = {
        a: np.full(4, 1, np.float32),
        b: np.full(4, np.nan, np.float32),
        mask: np.array([True, False, True, True]),
    }  # fmt: skip
    (result,) = evaluate(graph, feeds, graph.binary_select(a, b, mask), knobs=knobs)
    np.testing.assert_array_equal(result, [1, np.nan, 1, 1])


def test_trap_07_any_non_zero_mask_is_true(knobs):
    graph = graph_of()
    a, b, mask = (graph.tensor([5], name=name) for name in ("a", "b", "mask"))
    feeds = {
        a: np.ones(5, np.float32),
        b: np.zeros(5, np.float32),
        mask: np.array([0.5, -3, 0, -0.0, 1e-42], np.float32),
    }
    assert evaluate(graph, feeds, graph.binary_select(a, b, mask), knobs=knobs)[0].tolist() == [1, 1, 0, 0, 1]


def test_trap_08_comparisons_keep_the_default_type_unless_told(knobs):
    graph = graph_of(HALF, compute_data_type=FLOAT)
    a, b = graph.tensor([3], name="a"), graph.tensor([3], name="b")
    plain, told = graph.cmp_ge(a, b), graph.cmp_ge(a, b).set_data_type(BOOLEAN)
    x, y = np.array([1, 2, np.nan], np.float16), np.array([2, 2, 0], np.float16)
    as_half, as_bool = evaluate(graph, {a: x, b: y}, plain, told, knobs=knobs)
    assert plain.get_data_type() is HALF and as_half.tolist() == [0, 1, 0]
    assert told.get_data_type() is BOOLEAN and as_bool.tolist() == [False, True, False]


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_trap_09_norm_axes_are_where_scale_is_not_one(op, knobs):
    x = normal(3, 4, 5)
    for scale_dim, axes in (([1, 1, 5], (2,)), ([1, 4, 5], (1, 2)), ([1, 4, 1], (1,)), ([3, 1, 1], (0,))):
        graph = graph_of()
        a, scale = graph.tensor([3, 4, 5], name="x"), graph.tensor(scale_dim, name="scale")
        y = getattr(graph, op)(
            input=a, scale=scale, epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE
        )[0]
        (result,) = evaluate(graph, {a: x, scale: np.ones(scale_dim, np.float32)}, y, knobs=knobs)
        centred = x - x.mean(axes, keepdims=True) if op == "layernorm" else x
        expected = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_trap_09_without_scale_undecided_axes_are_malformed(op):
    def declare(dim, statistic=None):
        graph = graph_of()
        results = getattr(graph, op)(
            input=graph.tensor(dim), epsilon=1e-5, norm_forward_phase=norm_forward_phase.TRAINING
        )
        if statistic is not None:
            results[-1].set_dim(statistic).set_stride([1] * len(statistic))
        results[0].set_output(True)
        graph.validate()
        return [tuple(tensor.get_dim()) for tensor in results]

    with pytest.raises(ValueError, match="scale"):
        declare([2, 3, 4])
    assert declare([2, 3, 1])[1:] == [(2, 1, 1)] * (2 if op == "layernorm" else 1)
    assert declare([2, 3, 4], [2, 3, 1])[1:] == [(2, 3, 1)] * (2 if op == "layernorm" else 1)


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_trap_10_inv_variance_is_a_reciprocal_standard_deviation(op, knobs):
    graph = graph_of()
    x, scale = graph.tensor([1, 2], name="x"), graph.tensor([1, 2], name="scale")
    results = getattr(graph, op)(
        input=x, scale=scale, epsilon=0.0, norm_forward_phase=norm_forward_phase.TRAINING
    )
    feeds = {x: np.array([[-4, 4]], np.float32), scale: np.ones((1, 2), np.float32)}
    y, inverse = evaluate(graph, feeds, results[0], results[-1], knobs=knobs)
    assert inverse.tolist() == [[0.25]], "the variance is 16"
    assert y.tolist() == [[-1, 1]]


def _with_epsilon(knobs=None):
    graph = graph_of()
    x, scale = graph.tensor([2, 3], name="x"), graph.tensor([1, 3], name="scale")
    epsilon = graph.tensor([1, 1], is_pass_by_value=True, name="epsilon")
    y = graph.rmsnorm(input=x, scale=scale, epsilon=epsilon, norm_forward_phase=norm_forward_phase.INFERENCE)[
        0
    ].set_output(True)
    graph.build(engine="cpu", knobs=knobs)
    feeds = {
        x: np.zeros((2, 3), np.float32) + 2,
        scale: np.ones((1, 3), np.float32),
        y: np.zeros((2, 3), np.float32),
    }
    return graph, epsilon, y, feeds


def test_trap_11_epsilon_is_a_host_value_read_at_each_call(knobs):
    graph, epsilon, y, feeds = _with_epsilon(knobs)
    for value in (np.full((1, 1), 12, np.float32), 12.0, 12, np.float32(12)):
        feeds[y].fill(np.nan)
        graph.execute({**feeds, epsilon: value})
        np.testing.assert_allclose(feeds[y], 0.5, rtol=1e-6)  # 2 / sqrt(4 + 12)
    graph.execute({**feeds, epsilon: 0.0})
    np.testing.assert_allclose(feeds[y], 1.0, rtol=1e-6)


def test_trap_11_a_missing_epsilon_is_refused():
    graph, _, y, feeds = _with_epsilon()
    with pytest.raises(OperandError, match="epsilon") as refusal:
        graph.execute(feeds)
    assert isinstance(refusal.value, ValueError)
    assert (feeds[y] == 0).all()


def test_trap_12_gradients_by_channel_are_channels_last_and_row_ones_follow_x():
    graph = graph_of()
    dim, per_channel = [2, 3, 4, 5], [1, 3, 1, 1]
    x, grad, channel = graph.tensor(dim), graph.tensor(dim), graph.tensor(per_channel)
    per_image, per_row = graph.tensor([2, 3, 1, 1]), graph.tensor([2, 1, 1, 1])
    common = {"grad": grad, "input": x}
    batch = graph.batchnorm_backward(**common, scale=channel, mean=channel, inv_variance=channel)
    instance = graph.instancenorm_backward(**common, scale=channel, mean=per_image, inv_variance=per_image)
    whole = graph.tensor([1, 3, 4, 5])
    layer = graph.layernorm_backward(**common, scale=whole, mean=per_row, inv_variance=per_row)
    attributes = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
    weight = graph.tensor([3, 3, 3, 3])
    dgrad = graph.conv_dgrad(graph.tensor(dim), weight, **attributes).set_dim(dim)
    wgrad = graph.conv_wgrad(x, graph.tensor(dim), **attributes).set_dim([3, 3, 3, 3])
    for tensor in (batch[0], instance[0], layer[0], dgrad, wgrad):
        tensor.set_output(True)
    graph.validate()
    for tensor in (batch[0], instance[0], dgrad):
        assert tuple(tensor.get_stride()) == (60, 1, 15, 3)
    assert tuple(wgrad.get_stride()) == (27, 1, 9, 3)
    assert tuple(layer[0].get_stride()) == tuple(x.get_stride()) == (60, 20, 5, 1)


def test_trap_13_operators_with_several_outputs_return_lists_with_holes():
    phases = norm_forward_phase

    def results(op, phase):
        graph = graph_of()
        scale = graph.tensor([1, 3])
        return getattr(graph, op)(
            input=graph.tensor([2, 3]), scale=scale, epsilon=0.1, norm_forward_phase=phase
        )

    for op, count in (("rmsnorm", 2), ("layernorm", 3)):
        training, inference = results(op, phases.TRAINING), results(op, phases.INFERENCE)
        assert type(training) is list and len(training) == count and None not in training
        assert type(inference) is list and inference[1:] == [None] * (count - 1)
    graph = graph_of()
    x, statistic = graph.tensor([2, 3]), graph.tensor([2, 1])
    for given in ({"mean": statistic}, {"has_dbias": False}):
        op = graph.layernorm_backward if "mean" in given else graph.rmsnorm_backward
        found = op(grad=x, input=x, inv_variance=statistic, **given)
        assert type(found) is list and len(found) == 3 and found[1:] == [None, None]
    image, channel = graph.tensor([2, 3, 4, 5]), graph.tensor([1, 3, 1, 1])
    found = graph.batchnorm(input=image, scale=channel, bias=channel, epsilon=0.1)
    assert type(found) is list and len(found) == 5 and found[3:] == [None, None]
    _, q, k, v = attention_inputs(graph)
    for stats in (True, False):
        found = graph.sdpa(q, k, v, generate_stats=stats)
        assert type(found) is list and len(found) == 2 and (found[1] is not None) == stats


def test_trap_14_ragged_offsets_count_elements(knobs):
    """Sequences of 2 and 1 rows packed without padding, [tokens, heads, width]."""
    heads, width, lengths = 2, 4, [2, 1]
    graph = graph_of()
    dim, stride = [2, heads, 3, width], [3 * heads * width, width, heads * width, 1]
    offsets = graph.tensor([3, 1, 1, 1], data_type=data_type.INT64, name="offsets")
    q, k, v = (graph.tensor(dim, stride, ragged_offset=offsets, name=name) for name in "qkv")
    rows = [graph.tensor([2, 1, 1, 1], data_type=data_type.INT32, name=f"length of {side}") for side in "qk"]
    o = graph.sdpa(
        q, k, v, generate_stats=False, use_padding_mask=True, seq_len_q=rows[0], seq_len_kv=rows[1]
    )[0]
    o.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(offsets)
    graph.build(engine="cpu", knobs=knobs)
    packed = {tensor: normal(3, heads, width, seed=i) for i, tensor in enumerate((q, k, v))}
    out = np.full((4, heads, width), np.nan, np.float32)
    length = np.array(lengths, np.int32).reshape(2, 1, 1, 1)
    starts = np.array([0, 2, 3], np.int64).reshape(3, 1, 1, 1) * heads * width
    graph.execute({**packed, rows[0]: length, rows[1]: length, offsets: starts, o: out[:3]})
    for first, last in ((0, 2), (2, 3)):
        part = [packed[t][first:last].swapaxes(0, 1) for t in (q, k, v)]  # [heads, rows, width]
        expected = softmax(part[0] @ part[1].swapaxes(-1, -2)) @ part[2]
        np.testing.assert_allclose(out[first:last].swapaxes(0, 1), expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(out[3]).all()


def _add_graph():
    graph = graph_of()
    a, b = graph.tensor([3], name="a"), graph.tensor([3], name="b")
    out = graph.add(a, b).set_output(True).set_name("out")
    return graph, a, b, out


def test_trap_19_planning_happens_once():
    graph, a, b, out = _add_graph()
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans()
    with pytest.raises(RuntimeError, match="planned already"):
        graph.create_execution_plans()
    graph.check_support()
    graph.build_plans()
    with pytest.raises(RuntimeError, match="planned already"):
        graph.create_execution_plans()
    graph.build()  # a planned graph is only built
    result = np.zeros(3, np.float32)
    graph.execute({a: result + 1, b: result + 2, out: result})
    assert result.tolist() == [3, 3, 3]


def test_trap_20_executing_a_plan_by_index_does_not_select_it():
    # 2**24 + 1 + 1 tells the plans apart: float32 drops each 1, float64 keeps both.
    graph = graph_of()
    x = graph.tensor([1, 3], name="x")
    out = graph.reduction(x, mode=reduction_mode.ADD, out_dims=[1, 1]).set_output(True)
    graph.build()
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    precise = names.index("cpu[precision=float64]")
    values = np.array([[2**24, 1, 1]], np.float32)

    def run(index=None):
        result = np.full((1, 1), np.nan, np.float32)
        if index is None:
            graph.execute({x: values, out: result})
        else:
            graph.execute_plan_at_index({x: values, out: result}, index=index)
        return float(result[0, 0]) - 2**24

    assert [run(), run(precise), run()] == [0, 2, 0]
    assert graph.selected_engine.engine_id == graph.plans[names.index("cpu[precision=native]")].engine_id


def test_trap_21_not_supported_is_no_runtime_error():
    assert not issubclass(cudnnGraphNotSupportedError, (RuntimeError, ValueError))
    graph, *_ = _add_graph()
    with pytest.raises(cudnnGraphNotSupportedError) as refusal:
        graph.build(engine="no such engine")
    assert not isinstance(refusal.value, RuntimeError)


def test_trap_22_an_elementwise_output_may_be_its_input(knobs):
    graph = graph_of(compute_data_type=FLOAT)
    a, b = graph.tensor([2, 5], name="a"), graph.tensor([2, 5], name="b")
    out = graph.sub(graph.mul(a, a), b).set_output(True)
    graph.build(engine="cpu", knobs=knobs)
    x, y = normal(2, 5), normal(2, 5, seed=1)
    expected = np.float64(x) ** 2 - y
    for which in ("a", "b"):
        first, second = x.copy(), y.copy()
        graph.execute({a: first, b: second, out: first if which == "a" else second})
        np.testing.assert_allclose(first if which == "a" else second, expected, rtol=1e-5, atol=1e-6)


def test_trap_22_a_rotation_in_place_is_right_or_refused(knobs):
    """Both halves of a rotary embedding written over the halves they are made of."""
    graph = graph_of()
    x1, x2, cos, sin = (graph.tensor([4], name=name) for name in ("x1", "x2", "cos", "sin"))
    y1 = graph.sub(graph.mul(x1, cos), graph.mul(x2, sin)).set_output(True)
    y2 = graph.add(graph.mul(x2, cos), graph.mul(x1, sin)).set_output(True)
    graph.build(engine="cpu", knobs=knobs)
    a, b, angle = normal(4), normal(4, seed=1), normal(4, seed=2)
    c, s = np.cos(angle), np.sin(angle)
    expected = a * c - b * s, b * c + a * s
    first, second = a.copy(), b.copy()
    feeds = {x1: first, x2: second, cos: c, sin: s}
    try:
        graph.execute({**feeds, y1: first, y2: second})
    except OperandError as refusal:
        assert refusal.rule == "inplace"
        np.testing.assert_array_equal(first, a)
        np.testing.assert_array_equal(second, b)
    else:
        np.testing.assert_allclose(first, expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(second, expected[1], rtol=1e-5, atol=1e-6)


def test_trap_23_keyword_spellings_and_the_nearest_name():
    graph = graph_of()
    _, q, k, v = attention_inputs(graph)
    graph.sdpa(q, k, v, generate_stats=False, diagonal_band_left_bound=2, diagonal_band_right_bound=0)
    for wrong, right in (
        ("left_bound", "diagonal_band_left_bound"),
        ("right_bound", "diagonal_band_right_bound"),
    ):
        with pytest.raises(TypeError, match=right):
            graph.sdpa(q, k, v, generate_stats=False, **{wrong: 1})
    with pytest.raises(TypeError, match="did you mean"):
        graph.sdpa(q, k, v, generate_stat=False)
    with pytest.raises(TypeError):
        graph.add(a=q, c=k)


def test_trap_24_a_name_used_twice_is_legal_until_it_is_looked_up(knobs):
    graph = graph_of()
    a, b = graph.tensor([3], name="same"), graph.tensor([3], name="same")
    graph.add(a, b).set_output(True).set_name("out")
    graph.build(engine="cpu", knobs=knobs)
    x, result = np.ones(3, np.float32), np.zeros(3, np.float32)
    graph.execute({a: x, b: x, "out": result})
    assert result.tolist() == [2, 2, 2]
    assert "same" not in graph.tensors
    with pytest.raises(ValueError, match="ambiguous"):
        graph.find_tensor("same")
    with pytest.raises(ValueError, match="ambiguous"):
        graph.execute({"same": x, "out": result})
