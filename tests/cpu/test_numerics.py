"""Numbers that float32 arithmetic gets wrong when done carelessly: the `native` precision against the
truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance import Expect, Input, Problem, compute, run_case
from conformance.attention import Attention
from conformance.matmul import matmul_problem
from conformance.norm import EPSILON, Norm, NormBackward, normalised
from conformance.pointwise import BACKWARD, FORWARD
from conformance.reduction import reduction_problem
from conformance.tolerances import mismatch

from opgraph import data_type, reduction_mode

FLOAT = data_type.FLOAT
MILLION = 1_000_000


@pytest.fixture
def knobs(precision: str) -> dict[str, str]:
    return {"precision": precision}


# -- long sums

# Reduced axes innermost, outermost, in the middle, and on both sides of a kept one.
LONG = [
    ((1, MILLION), (1, 1)),
    ((MILLION, 1), (1, 1)),
    ((MILLION // 4, 4), (1, 4)),
    ((2, MILLION // 4, 2), (2, 1, 2)),
    ((1000, 10, 100), (1, 10, 1)),
]


@pytest.mark.parametrize("mode", ["ADD", "AVG", "NORM1", "NORM2"])
@pytest.mark.parametrize(("dim", "out"), LONG, ids=str)
def test_sums_of_a_million_terms(dim, out, mode, knobs):
    # All a little above 1: every addition in turn rounds the same way.
    values = 1 + np.random.default_rng(0).random(dim) * 1e-3
    run_case(reduction_problem("", values, out, None, reduction_mode[mode], FLOAT), "cpu", knobs)


@pytest.mark.parametrize("dim", [(1, MILLION), (MILLION // 4, 4)], ids=str)
def test_sums_that_cancel_are_exact_to_the_size_of_their_terms(dim, knobs):
    values = np.random.default_rng(1).standard_normal(dim).astype(np.float32)
    out = (1, 1 if dim[0] == 1 else dim[1])
    problem = reduction_problem("", values, out, None, reduction_mode.ADD, FLOAT)
    error = np.abs(compute(problem, "cpu", knobs)["Y"] - problem.solve(np)["Y"])
    assert (error <= 1e-7 * np.abs(values.astype(np.float64)).sum(dim.index(max(dim)), keepdims=True)).all()


def test_a_long_inner_product_is_exact_to_the_size_of_its_terms(knobs):
    rng = np.random.default_rng(2)
    problem = matmul_problem("", rng, [1, 3, 100_000], [1, 100_000, 3], None, None, FLOAT)
    a, b = (given.values.astype(np.float64) for given in problem.inputs.values())
    error = np.abs(compute(problem, "cpu", knobs)["C"] - a @ b)
    assert (error <= 1e-6 * (np.abs(a) @ np.abs(b))).all()


def test_row_groups_of_a_million_rows(knobs):
    values = 1 + np.random.default_rng(3).random((1, MILLION // 4, 4)) * 1e-3
    offsets = np.array([0, 10, 100_010]).reshape(3, 1, 1)

    def truth(xp: Any, given: Any) -> dict[str, Any]:
        parts = np.split(given["X"][0], [10, 100_010])
        return {"Y": np.stack([part.sum(0, keepdims=True) for part in parts])}

    run_case(
        Problem(
            "grouped sum",
            {"X": Input(values), "offsets": Input(offsets, data_type.INT32, virtual_ok=False)},
            lambda graph, t: {
                "Y": graph.reduction(
                    t["X"], group_offset=t["offsets"], mode=reduction_mode.ADD, out_dims=[3, 1, 4]
                )
            },
            truth,
            {"Y": Expect((3, 1, 4), None, FLOAT)},
        ),
        "cpu",
        knobs,
    )


# -- normalisation


def _shifted(op: str, by: float, width: int) -> Problem:
    return Norm(op).problem(
        f"mean {by:g}", np.random.default_rng(4), [5, width], [1, width], None, FLOAT, shift=by
    )


@pytest.mark.parametrize("width", [7, 768, 20_000])
@pytest.mark.parametrize("mean", [0.5, 10, 1e3, -1e4, 1e5])
def test_layernorm_far_from_zero(mean, width, knobs):
    run_case(_shifted("layernorm", mean, width), "cpu", knobs)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1, 1e6, 1e15])
def test_rmsnorm_of_any_size(size, knobs):
    problem = _shifted("rmsnorm", 0, 3000)
    x = problem.inputs["x"]
    problem.inputs["x"] = Input(x.values * np.float32(size))
    # inv_variance of tiny and huge rows is compared by its own size, which the tolerance of Y is not about.
    found, truth = compute(problem, "cpu", knobs), problem.solve(np)
    assert mismatch(found["Y"], truth["Y"], FLOAT) is None
    np.testing.assert_allclose(found["INV_VARIANCE"], truth["INV_VARIANCE"], rtol=1e-6)


def test_constant_rows_have_no_variance(knobs):
    for value in (0.0, 1.0, 0.1, 3e7):
        problem = _shifted("layernorm", 0, 1000)
        problem.inputs["x"] = Input(np.full((5, 1000), value))
        found = compute(problem, "cpu", knobs)
        np.testing.assert_allclose(
            found["Y"], np.broadcast_to(problem.inputs["bias"].values, (5, 1000)), atol=1e-5 * max(1, value)
        )
        np.testing.assert_allclose(found["INV_VARIANCE"], EPSILON**-0.5, rtol=1e-2)


@pytest.mark.parametrize("op", ["layernorm_backward", "rmsnorm_backward"])
def test_gradients_summed_over_many_rows(op, knobs):
    rows, width = 200_000, 4
    problem = NormBackward(op).problem(
        "many rows", np.random.default_rng(5), [rows, width], [1, width], None, FLOAT
    )
    problem.inputs["grad"] = Input(1 + np.random.default_rng(6).random((rows, width)) * 1e-3)
    x, grad = (problem.inputs[name].values.astype(np.float64) for name in ("x", "grad"))
    statistics = normalised(op == "layernorm_backward", (1,), EPSILON)({"x": x})
    dscale, dbias = (grad * statistics["Y"]).sum(0), grad.sum(0)
    found = compute(problem, "cpu", knobs)
    np.testing.assert_allclose(found["DBIAS"][0], dbias, rtol=1e-6)
    assert (np.abs(found["DSCALE"][0] - dscale) <= 1e-6 * np.abs(grad * statistics["Y"]).sum(0)).all()


# -- pointwise


def _magnitudes() -> np.ndarray:
    powers = 10.0 ** np.arange(-44, 38, 0.25)
    return np.concatenate([np.linspace(-110, 110, 4001), np.linspace(-6, 6, 4001), powers, -powers])


UNARY = [case for case in (*FORWARD, *BACKWARD) if (len(case.ports) == 1 or case.backward) and not case.exact]


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.id)
def test_functions_of_one_number_over_the_whole_range(case, knobs):
    x = _magnitudes()
    inputs = {port: Input(np.ones_like(x) if port == "loss" else x) for port in case.ports}
    expect = {"OUT": Expect(None, None, FLOAT)}
    # NumPy's differences are no truth for steep or tiny arguments, so derivatives are tested where they are
    # tame.
    if case.backward:
        inputs["input"] = Input(np.linspace(-30, 30, 3000))  # without 0, where some have two derivatives
        inputs["loss"] = Input(np.ones(3000))
    run_case(Problem(case.id, inputs, case.declare, case.truth, expect), "cpu", knobs)


INF, NAN = np.inf, np.nan
AT_INFINITY = {  # op: values at -inf, +inf, NaN; for backward operators with a loss of 1
    "relu": (0, INF, NAN),
    "elu": (-1, INF, NAN),
    "sigmoid": (0, 1, NAN),
    "tanh": (-1, 1, NAN),
    "softplus": (0, INF, NAN),
    "erf": (-1, 1, NAN),
    "exp": (0, INF, NAN),
    "log": (NAN, INF, NAN),
    "sqrt": (NAN, INF, NAN),
    "rsqrt": (NAN, 0, NAN),
    "reciprocal": (0, 0, NAN),
    "abs": (INF, INF, NAN),
    "floor": (-INF, INF, NAN),
    "gelu_backward": (0, 1, NAN),
    "gelu_approx_tanh_backward": (0, 1, NAN),
    "sigmoid_backward": (0, 0, NAN),
    "tanh_backward": (0, 0, NAN),
    "softplus_backward": (0, 1, NAN),
    "swish_backward": (0, 1, NAN),
    "elu_backward": (0, 1, NAN),
}


@pytest.mark.parametrize("op", AT_INFINITY)
def test_infinities_and_nan(op, knobs):
    ports = ("loss", "input") if op.endswith("_backward") else ("input",)
    inputs = {port: Input(np.ones(3) if port == "loss" else [-INF, INF, NAN]) for port in ports}
    problem = Problem(
        op,
        inputs,
        lambda graph, tensors: {"OUT": getattr(graph, op)(**tensors)},
        lambda xp, values: {"OUT": np.array(AT_INFINITY[op])},
        {"OUT": Expect(exact=True)},
    )
    run_case(problem, "cpu", knobs)


@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_propagate_nan(op, knobs):
    a, b = np.array([NAN, 1, NAN, -INF, 0.0]), np.array([1, NAN, NAN, INF, -0.0])
    expected = np.maximum(a, b) if op == "max" else np.minimum(a, b)
    problem = Problem(
        op,
        {"input0": Input(a), "input1": Input(b)},
        lambda graph, tensors: {"OUT": getattr(graph, op)(**tensors)},
        lambda xp, values: {"OUT": expected},
        {"OUT": Expect(exact=True)},
    )
    run_case(problem, "cpu", knobs)


# -- attention


def _attention(id: str, q: Any, kv: Any, *, size: float = 1.0, **options: Any) -> Problem:
    problem = Attention().problem(id, np.random.default_rng(7), FLOAT, q, kv, **options)
    for name in "qk":
        problem.inputs[name] = Input(problem.inputs[name].values * np.float32(size))
    return problem


def test_attention_over_many_keys(knobs):
    run_case(_attention("many keys", (1, 1, 3, 16), (1, 20_000), options={"attn_scale": 0.18}), "cpu", knobs)


def test_attention_of_equal_scores_is_the_mean(knobs):
    problem = _attention("equal", (1, 1, 2, 8), (1, 20_000), size=0.0)
    found = compute(problem, "cpu", knobs)
    mean = problem.inputs["v"].values.astype(np.float64).mean(2)
    np.testing.assert_allclose(found["O"][0, 0], np.broadcast_to(mean[0], (2, 8)), atol=1e-6)
    np.testing.assert_allclose(found["Stats"], np.log(20_000), rtol=1e-6)


def test_attention_with_scores_that_exp_cannot_hold(knobs):
    run_case(_attention("large", (1, 2, 9, 8), (2, 65), size=60.0), "cpu", knobs)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_never_reads_beyond_the_lengths(causal, knobs):
    options = {"use_causal_mask": True} if causal else {}
    problem = Attention().problem(
        "NaN beyond the lengths", np.random.default_rng(8), FLOAT, (2, 2, 9, 8), (2, 11),
        lengths=([4, 9], [7, 0]), options=options, band={"right": 0} if causal else None,
    )  # fmt: skip
    truth = problem.solve(np)
    for name, lengths in (("q", [4, 9]), ("k", [7, 0]), ("v", [7, 0])):
        values = problem.inputs[name].values.copy()
        for b, length in enumerate(lengths):
            values[b, :, length:] = NAN
        problem.inputs[name] = Input(values)
    run_case(problem, "cpu", knobs, truth=truth)
