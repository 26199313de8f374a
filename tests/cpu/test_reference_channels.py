"""The NumPy references of batch and instance normalisation: blocks, running statistics, long sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import data_type, norm_forward_phase
from opgraph.ops import OPS, Math, OutSpec, RefCall, channels

FLOAT = data_type.FLOAT
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
EPSILON = np.float32(1e-3)
MILLION = 1_000_000

SHAPES = [
    (2, 3, 4, 5), (5, 7), (3, 2, 11), (2, 2, 3, 2, 3), (1, 1, 1), (4, 3, 1, 1),
    (0, 3, 4), (2, 0, 4), (2, 3, 0),
]  # fmt: skip
LAYOUTS = {
    "row-major": np.ascontiguousarray,
    "channels last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1),
    "first axis fastest": np.asfortranarray,
    "with gaps": lambda x: np.repeat(x, 2, -1)[..., ::2],
}


@pytest.fixture
def many_blocks(monkeypatch):
    monkeypatch.setattr(channels, "_BLOCK", 7)


def kept(op: str, shape: Any) -> tuple[int, ...]:
    """The dims of a statistic."""
    return (shape[0] if op.startswith("instance") else 1, shape[1], *[1] * (len(shape) - 2))


def reference(op: str, inputs: Any, outputs: Any, *, precise: bool = True, views: Any = None, **params: Any):
    """`outputs` are shapes by port."""
    views = views or {}
    specs = {
        port: OutSpec(tuple(shape), FLOAT, np.dtype(np.float32), views.get(port))
        for port, shape in outputs.items()
    }
    before = {port: array.copy() for port, array in inputs.items()}
    found = OPS[op].reference(RefCall(params, inputs, specs, Math(FLOAT, precise)))
    assert {port: array.shape for port, array in found.items()} == {p: s.shape for p, s in specs.items()}
    for port, array in inputs.items():
        assert np.array_equal(array, before[port], equal_nan=True), f"{port} was written to"
    return found


def operands(op: str, shape: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    channel = kept("batch", shape)
    x = rng.standard_normal(shape, np.float32) * 2 + 1
    return x, rng.uniform(0.5, 1.5, channel).astype(np.float32), rng.standard_normal(channel, np.float32)


def forward(
    op: str, x: Any, scale: Any, bias: Any, *, running: Any = (), momentum: float = 0.25, **options: Any
):
    outputs = {"Y": x.shape, "MEAN": kept(op, x.shape), "INV_VARIANCE": kept(op, x.shape)}
    inputs = {"input": x, "scale": scale, "bias": bias, "epsilon": np.full([1] * x.ndim, EPSILON)}
    if running:
        inputs |= dict(zip(("in_running_mean", "in_running_var"), running, strict=True))
        inputs["momentum"] = np.full([1] * x.ndim, momentum, np.float32)
        outputs |= dict.fromkeys(("NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR"), scale.shape)
    return reference(op, inputs, outputs, norm_forward_phase=TRAINING, peer_stats=0, **options)


def definition(op: str, x: Any, scale: Any = 1.0, bias: Any = 0.0) -> dict[str, Any]:
    """The formulas in float64."""
    x = x.astype(np.float64)
    axes = tuple(
        axis for axis, n in enumerate(kept(op, x.shape)) if axis > 1 or (axis == 0 and op == "batchnorm")
    )
    count = max(x.size // max(np.prod(kept(op, x.shape)), 1), 1)
    mean = x.sum(axes, keepdims=True) / count
    variance = ((x - mean) ** 2).sum(axes, keepdims=True) / count
    inverse = 1 / np.sqrt(variance + np.float64(EPSILON))
    y = (x - mean) * inverse * scale + bias
    return {"Y": y, "MEAN": mean, "INV_VARIANCE": inverse, "VARIANCE": variance, "COUNT": count}


def close(found: Any, right: Any, precise: bool) -> None:
    tolerance = 1e-12 if precise else 1e-5
    for port, array in found.items():
        np.testing.assert_allclose(array, right[port], tolerance, tolerance, err_msg=port)


# ---- forward


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_forward_in_many_blocks(op, layout, precise, many_blocks):
    for shape in SHAPES:
        x, scale, bias = operands(op, shape)
        right = definition(op, x, scale, bias)
        x = LAYOUTS[layout](x)
        close(forward(op, x, scale, bias, precise=precise), right, precise)
        memory = np.full_like(x, np.nan)
        found = forward(op, x, scale, bias, precise=False, views={"Y": memory})
        assert found["Y"] is memory
        close(found, right, False)
        # In place the reference itself keeps apart: a block is written before the next one is read.
        found = forward(op, x, scale, bias, precise=False, views={"Y": x})
        assert found["Y"] is not x or not x.size
        close(found, right, False)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 1), (0, 3, 2)])
def test_running_statistics(shape):
    x, scale, bias = operands("batchnorm", shape)
    rng = np.random.default_rng(1)
    old = [rng.uniform(0.5, 2, scale.shape).astype(np.float32) for _ in range(2)]
    right = definition("batchnorm", x)
    found = forward("batchnorm", x, scale, bias, running=old)
    count = right["COUNT"] if x.size else 0
    unbiased = right["VARIANCE"] * count / (count - 1) if count > 1 else right["VARIANCE"]
    wide = [array.astype(np.float64) for array in old]
    np.testing.assert_allclose(found["NEXT_RUNNING_MEAN"], 0.75 * wide[0] + 0.25 * right["MEAN"], 1e-12)
    np.testing.assert_allclose(found["NEXT_RUNNING_VAR"], 0.75 * wide[1] + 0.25 * unbiased, 1e-12)
    for momentum, port, value in ((0, "MEAN", old[0]), (0, "VAR", old[1]), (1, "MEAN", right["MEAN"])):
        found = forward("batchnorm", x, scale, bias, running=old, momentum=momentum)
        np.testing.assert_allclose(found[f"NEXT_RUNNING_{port}"], value, 1e-12)


@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_large_mean_does_not_cancel(op):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((3, 4, 1000)) * 1e-2 + 1e3).astype(np.float32)
    scale, bias = np.ones((1, 4, 1), np.float32), np.zeros((1, 4, 1), np.float32)
    close(forward(op, x, scale, bias, precise=False), definition(op, x), False)


@pytest.mark.parametrize("shape", [(1, 1, MILLION), (MILLION // 4, 4), (500, 4, 500)], ids=str)
@pytest.mark.parametrize("layout", ["row-major", "channels last"])
def test_sums_of_a_million_terms(shape, layout):
    # All a little above 1: every addition in turn rounds the same way.
    rng = np.random.default_rng(3)
    x = LAYOUTS[layout]((1 + rng.random(shape) * 1e-3).astype(np.float32))
    channel = kept("batchnorm", shape)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    wide = x.astype(np.float64)
    found = reference("genstats", {"input": x}, {"SUM": channel, "SQ_SUM": channel}, precise=False)
    np.testing.assert_allclose(found["SUM"], wide.sum(axes, keepdims=True), 1e-6)
    np.testing.assert_allclose(found["SQ_SUM"], (wide * wide).sum(axes, keepdims=True), 1e-6)
    ones = np.ones(channel, np.float32)
    inputs = {"grad": x, "input": x, "scale": ones, "mean": 0 * ones, "inv_variance": ones}
    outputs = {"DX": shape, "DSCALE": channel, "DBIAS": channel}
    found = reference("batchnorm_backward", inputs, outputs, precise=False, peer_stats=0)
    np.testing.assert_allclose(found["DBIAS"], wide.sum(axes, keepdims=True), 1e-6)
    np.testing.assert_allclose(found["DSCALE"], (wide * wide).sum(axes, keepdims=True), 1e-6)


@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_nan_stays_in_its_statistic(op, many_blocks):
    x, scale, bias = operands(op, (2, 3, 4, 5))
    right = forward(op, x, scale, bias)["Y"]
    bad = x.copy()
    bad[1, 2, 0, 3] = np.nan
    found = forward(op, bad, scale, bias)["Y"]
    lost = np.zeros(x.shape, np.bool_)
    lost[(slice(None) if op == "batchnorm" else 1), 2] = True
    assert np.isnan(found[lost]).all() and np.array_equal(found[~lost], right[~lost])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_narrow_inputs_are_widened_once(op, name, ml_dtypes):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x, scale, bias = (array.astype(dtype) for array in operands(op, (2, 3, 4, 5)))
    right = definition(op, x, scale.astype(np.float64), bias.astype(np.float64))
    close(forward(op, x, scale, bias), right, True)
    close(forward(op, x, scale, bias, precise=False), right, False)


# ---- backward


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_backward_in_many_blocks(op, layout, precise, many_blocks):
    for shape in SHAPES:
        x, scale, _ = operands(op, shape)
        dy = operands(op, shape, 1)[0]
        stats = definition(op, x)
        mean, inverse, count = stats["MEAN"], stats["INV_VARIANCE"], stats["COUNT"]
        xh = (x - mean) * inverse
        axes = tuple(axis for axis in range(x.ndim) if axis > 1 or (axis == 0 and op == "batchnorm"))
        sums = [(dy * each).sum(axes, keepdims=True, dtype=np.float64) for each in (np.ones_like(xh), xh)]
        others = tuple(axis for axis in range(x.ndim) if axis != 1)
        right = {
            "DX": scale * inverse * (dy - sums[0] / count - xh * sums[1] / count),
            "DBIAS": sums[0].sum(others, keepdims=True),
            "DSCALE": sums[1].sum(others, keepdims=True),
        }
        inputs = {
            "grad": LAYOUTS[layout](dy),
            "input": x,
            "scale": scale,
            "mean": mean,
            "inv_variance": inverse,
        }
        outputs = {"DX": shape, "DSCALE": scale.shape, "DBIAS": scale.shape}
        found = reference(f"{op}_backward", inputs, outputs, precise=precise, peer_stats=0)
        close(found, right, precise)
        memory = np.full_like(inputs["grad"], np.nan)
        found = reference(
            f"{op}_backward", inputs, outputs, precise=False, peer_stats=0, views={"DX": memory}
        )
        assert found["DX"] is memory
        close(found, right, False)


# ---- one buffer for input and output


def channel_graph(precision: str, declare: Any) -> tuple[Any, Any, Any]:
    graph = opgraph.pygraph(io_data_type=FLOAT)
    x = graph.tensor([2, 3, 4, 5], name="x")
    channel = [
        graph.tensor([1, 3, 1, 1], [3, 1, 3, 3], name=name) for name in ("scale", "bias", "mean", "var")
    ]
    outputs = [tensor.set_output(True) for tensor in declare(graph, x, *channel)]
    graph.build(engine="cpu", knobs={"precision": precision})
    return graph, (x, *channel), outputs


def test_running_statistics_in_place_over_several_steps(precision):
    graph, tensors, outputs = channel_graph(
        precision,
        lambda graph, x, scale, bias, mean, var: graph.batchnorm(x, scale, bias, mean, var, 1e-3, 0.25),
    )
    rng = np.random.default_rng(4)
    scale, bias, mean, var = (rng.uniform(0.5, 1.5, (1, 3, 1, 1)).astype(np.float32) for _ in range(4))
    right_mean, right_var = mean.astype(np.float64), var.astype(np.float64)
    results = [np.empty(tensor.get_dim(), np.float32) for tensor in outputs[:3]]
    for _ in range(3):
        x = rng.standard_normal((2, 3, 4, 5), np.float32)
        graph.execute(
            dict(zip((*tensors, *outputs), (x, scale, bias, mean, var, *results, mean, var), strict=True))
        )
        right = definition("batchnorm", x, scale, bias)
        right_mean = 0.75 * right_mean + 0.25 * right["MEAN"]
        right_var = 0.75 * right_var + 0.25 * right["VARIANCE"] * 40 / 39
        np.testing.assert_allclose(mean, right_mean, 1e-5, 1e-6)
        np.testing.assert_allclose(var, right_var, 1e-5, 1e-6)
        np.testing.assert_allclose(results[0], right["Y"], 1e-5, 1e-5)


DECLARE = {
    "batchnorm": lambda graph, x, scale, bias, mean, var: graph.batchnorm(
        x, scale, bias, epsilon=EPSILON_NUMBER
    )[:1],
    "batchnorm_inference": lambda graph, x, scale, bias, mean, var: [
        graph.batchnorm_inference(x, mean, var, scale, bias)
    ],
    "instancenorm": lambda graph, x, scale, bias, mean, var: graph.instancenorm(
        x, scale, bias, EPSILON_NUMBER, INFERENCE
    )[:1],
    "batchnorm_backward": lambda graph, x, scale, bias, mean, var: [
        graph.batchnorm_backward(x, x, scale, mean, var)[0].set_stride(x.get_stride())
    ],
}
EPSILON_NUMBER = float(EPSILON)


@pytest.mark.parametrize("op", DECLARE)
def test_in_place(op, precision, many_blocks):
    def run(in_place: bool) -> Any:
        def declare(graph: Any, x: Any, *channel: Any) -> Any:
            used.extend(channel)
            return DECLARE[op](graph, x, *channel)

        used: list[Any] = []
        graph, (x, *channel), (y,) = channel_graph(precision, declare)
        rng = np.random.default_rng(5)
        buffer = rng.standard_normal((2, 3, 4, 5), np.float32)
        given = [rng.uniform(0.5, 1.5, (1, 3, 1, 1)).astype(np.float32) for _ in channel]
        out = buffer if in_place else np.full_like(buffer, np.nan)
        wired = {tensor.get_uid() for node in graph.nodes for tensor in node.inputs.values()}
        pack = {
            tensor: array for tensor, array in zip(channel, given, strict=True) if tensor.get_uid() in wired
        }
        graph.execute({x: buffer, **pack, y: out})
        return out

    assert np.array_equal(run(True), run(False))
