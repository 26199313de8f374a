"""The NumPy references of the normalisations, called directly: against torch and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, norm_forward_phase
from opgraph.ops import OPS, Math, OutSpec, RefCall, norm_rows

FLOAT = data_type.FLOAT
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
EPSILON = 1e-3

# x, scale (None: without), and the axes that are normalised
SHAPES: dict[str, tuple[Any, Any, Any]] = {
    "rows": ((5, 7), (1, 7), (1,)),
    "one": ((1, 1), (1, 1), ()),
    "vector": ((7,), (7,), (0,)),
    "tokens": ((2, 3, 11), (1, 1, 11), (2,)),
    "image": ((3, 4, 5, 2), (1, 4, 5, 2), (1, 2, 3)),
    "flat image": ((6, 8, 1, 1), (1, 8, 1, 1), (1,)),
    "channels": ((2, 5, 3, 4), (1, 5, 1, 1), (1,)),
    "inner and outer": ((2, 5, 3, 4), (2, 1, 1, 4), (0, 3)),
    "no scale": ((4, 9, 1, 1), None, (1,)),
    "no rows": ((0, 7), (1, 7), (1,)),
    "no elements": ((3, 0), (1, 0), (1,)),
}


@pytest.fixture(params=["one block", "many blocks"], autouse=True)
def blocking(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(norm_rows, "_BLOCK_BYTES", 100)


def random(rng: Any, *shapes: Any) -> list[Any]:
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def reference(op: str, inputs: Any, outputs: Any, *, precise: bool = True, views: Any = None, **params: Any):
    """`outputs` are shapes by port."""
    views = views or {}
    specs = {
        port: OutSpec(tuple(shape), FLOAT, np.dtype(np.float32), views.get(port)) for port, shape in outputs.items()
    }
    inputs = {port: array for port, array in inputs.items() if array is not None}
    before = {port: array.copy() for port, array in inputs.items()}
    with np.errstate(all="raise"):
        found = OPS[op].reference(RefCall(params, inputs, specs, Math(FLOAT, precise)))
    assert {port: array.shape for port, array in found.items()} == {p: s.shape for p, s in specs.items()}
    for port, array in inputs.items():
        assert np.array_equal(array, before[port], equal_nan=True), f"{port} was written to"
    return found


def kept(shape: Any, axes: Any) -> tuple[int, ...]:
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def forward(op, x, scale, bias, axes, *, phase=TRAINING, epsilon=EPSILON, **options):
    outputs = {"Y": x.shape}
    if phase is TRAINING:
        outputs.update({p: kept(x.shape, axes) for p in ("MEAN", "INV_VARIANCE") if op == "layernorm" or p != "MEAN"})
    inputs = {"input": x, "scale": scale, "bias": bias, "epsilon": np.full([1] * x.ndim, epsilon, np.float32)}
    return reference(op, inputs, outputs, norm_forward_phase=phase, **options)


def definition(op: str, x: Any, scale: Any, bias: Any, axes: Any, epsilon: float = EPSILON) -> dict[str, Any]:
    """The formulas in float64."""
    x = x.astype(np.float64)
    count = max(int(np.prod([x.shape[axis] for axis in axes])), 1)
    mean = x.sum(axes, keepdims=True) / count if op == "layernorm" else 0.0
    centred = x - mean
    inverse = 1 / np.sqrt((centred**2).sum(axes, keepdims=True) / count + float(np.float32(epsilon)))
    y = centred * inverse
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    right = {"Y": y, "INV_VARIANCE": inverse}
    if op == "layernorm":
        right["MEAN"] = mean
    return right


def case(shape: str, seed: int) -> tuple[Any, Any, Any, Any]:
    x_dim, scale_dim, axes = SHAPES[shape]
    rng = np.random.default_rng(seed)
    x = random(rng, x_dim)[0] * 2 + 1
    scale, bias = (None, None) if scale_dim is None else random(rng, scale_dim, scale_dim)
    return x, scale, bias, axes


def close(found: Any, right: Any, precise: bool, tolerance: float = 1e-5) -> None:
    tolerance = 1e-12 if precise else tolerance
    for port, array in found.items():
        np.testing.assert_allclose(array, right[port], tolerance, tolerance, err_msg=port)


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
class TestForward:
    def test_training(self, op, shape, precise):
        x, scale, bias, axes = case(shape, 1)
        close(forward(op, x, scale, bias, axes, precise=precise), definition(op, x, scale, bias, axes), precise)

    def test_inference_without_bias(self, op, shape, precise):
        x, scale, _, axes = case(shape, 2)
        found = forward(op, x, scale, None, axes, phase=INFERENCE, precise=precise)
        close(found, definition(op, x, scale, None, axes), precise)

    def test_any_layout_and_output_memory(self, op, shape, precise):
        x, scale, bias, axes = case(shape, 3)
        right = definition(op, x, scale, bias, axes)
        turned = np.asfortranarray(x)
        wide = np.repeat(x, 2, -1)[..., ::2]
        for given in (turned, wide):
            found = forward(op, given, scale, bias, axes, precise=precise)
            close(found, right, precise)
        for like in (x, turned):
            memory = np.full_like(like, np.nan)
            found = forward(op, like, scale, bias, axes, precise=False, views={"Y": memory})
            np.testing.assert_allclose(found["Y"], right["Y"], 1e-5, 1e-5)
            # In place is refused by the reference itself: a block is written before the next one is read.
            found = forward(op, like, scale, bias, axes, precise=False, views={"Y": like})
            assert found["Y"] is not like
            np.testing.assert_allclose(found["Y"], right["Y"], 1e-5, 1e-5)


def test_output_is_made_in_its_memory():
    x, scale, bias, axes = case("tokens", 4)
    memory = np.full_like(x, np.nan)
    assert forward("layernorm", x, scale, bias, axes, precise=False, views={"Y": memory})["Y"] is memory
    assert np.isfinite(memory).all()


@pytest.mark.parametrize("dims, axes", [((2, 3, 1), (2,)), ((2, 1, 1), (1, 2)), ((1, 3, 5), (0,))])
def test_without_scale_a_statistic_names_the_axes(dims, axes):
    x = random(np.random.default_rng(5), (2, 3, 5))[0]
    outputs = {"Y": x.shape, "MEAN": dims, "INV_VARIANCE": dims}
    inputs = {"input": x, "epsilon": np.full((1, 1, 1), EPSILON, np.float32)}
    found = reference("layernorm", inputs, outputs, norm_forward_phase=TRAINING)
    close(found, definition("layernorm", x, None, None, axes), True)


def test_large_mean_does_not_cancel():
    x = np.random.default_rng(6).standard_normal((64, 384)) * 1e-1 + 1e3
    x = x.astype(np.float32)
    right = definition("layernorm", x, None, None, (1,), 1e-8)
    found = forward("layernorm", x, None, None, (1,), epsilon=1e-8, precise=False)
    np.testing.assert_allclose(found["INV_VARIANCE"], right["INV_VARIANCE"], 2e-3)
    np.testing.assert_allclose(found["Y"], right["Y"], 0, 5e-3)


def test_nan_stays_in_its_row():
    x, scale, bias, axes = case("rows", 7)
    for op in ("layernorm", "rmsnorm"):
        right = forward(op, x, scale, bias, axes)["Y"]
        bad = x.copy()
        bad[2, 3] = np.nan
        found = forward(op, bad, scale, bias, axes)["Y"]
        assert np.isnan(found[2]).all() and np.array_equal(np.delete(found, 2, 0), np.delete(right, 2, 0))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_inputs_are_widened_once(name, ml_dtypes):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x, scale, bias, axes = case("tokens", 8)
    x, scale, bias = (array.astype(dtype) for array in (x, scale, bias))
    right = definition("layernorm", x, scale.astype(np.float64), bias.astype(np.float64), axes)
    close(forward("layernorm", x, scale, bias, axes), right, True)
    close(forward("layernorm", x, scale, bias, axes, precise=False), right, False)


# ---- backward


def backward(op: str, dy: Any, x: Any, scale: Any, axes: Any, *, precise: bool = True, **options: Any):
    stats = definition(op, x, None, None, axes)
    shape = kept(x.shape, axes)
    inputs = {"grad": dy, "input": x, "scale": scale}
    inputs["inv_variance"] = np.broadcast_to(stats["INV_VARIANCE"], shape)
    if op == "layernorm":
        inputs["mean"] = np.broadcast_to(stats["MEAN"], shape)
    outputs = {"DX": x.shape}
    if scale is not None:
        names = ("DSCALE", "DBIAS") if op == "layernorm" else ("Dscale", "Dbias")
        outputs.update(dict.fromkeys(names, scale.shape))
    return reference(f"{op}_backward", inputs, outputs, precise=precise, has_dbias=scale is not None, **options)


def gradients(op: str, dy: Any, x: Any, scale: Any, axes: Any) -> dict[str, Any]:
    """The formulas in float64."""
    stats = definition(op, x, None, None, axes)
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    others = tuple(axis for axis in range(x.ndim) if axis not in axes)
    count = max(int(np.prod([x.shape[axis] for axis in axes])), 1)
    xh = (x - stats.get("MEAN", 0.0)) * stats["INV_VARIANCE"]
    g = dy if scale is None else dy * scale
    dx = g - xh * (g * xh).sum(axes, keepdims=True) / count
    if op == "layernorm":
        dx = dx - g.sum(axes, keepdims=True) / count
    sums = {"DSCALE": (dy * xh).sum(others, keepdims=True), "DBIAS": dy.sum(others, keepdims=True)}
    if op == "rmsnorm":
        sums = {"Dscale": sums["DSCALE"], "Dbias": sums["DBIAS"]}
    return {"DX": dx * stats["INV_VARIANCE"], **sums}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
class TestBackward:
    @pytest.mark.parametrize("precise", [True, False])
    def test_formulas(self, op, shape, precise):
        x, scale, _, axes = case(shape, 9)
        dy = random(np.random.default_rng(10), x.shape)[0]
        right = gradients(op, dy, x, scale, axes)
        close(backward(op, dy, x, scale, axes, precise=precise), right, precise, 1e-4)
        turned = backward(op, dy, np.asfortranarray(x), scale, axes, precise=precise)
        close(turned, right, precise, 1e-4)

    def test_finite_differences(self, op, shape):
        x, scale, bias, axes = case(shape, 11)
        x = x.astype(np.float64)
        dy = random(np.random.default_rng(12), x.shape)[0].astype(np.float64)
        found = backward(op, dy, x, scale, axes)
        rng = np.random.default_rng(13)

        def loss(x: Any, scale: Any, bias: Any) -> float:
            return float((definition(op, x, scale, bias, axes)["Y"] * dy).sum())

        step = 1e-5
        direction = rng.standard_normal(x.shape)
        slope = (loss(x + step * direction, scale, bias) - loss(x - step * direction, scale, bias)) / (2 * step)
        assert (found["DX"] * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-7)
        if scale is None:
            return
        wide, direction = scale.astype(np.float64), rng.standard_normal(scale.shape)
        upper = {port.upper(): array for port, array in found.items()}
        slope = loss(x, wide + direction, bias) - loss(x, wide, bias)
        assert (upper["DSCALE"] * direction).sum() == pytest.approx(slope, rel=1e-9, abs=1e-9)
        slope = loss(x, scale, bias + direction) - loss(x, scale, bias)
        assert (upper["DBIAS"] * direction).sum() == pytest.approx(slope, rel=1e-9, abs=1e-9)


def test_gradient_is_made_in_its_memory():
    x, scale, _, axes = case("tokens", 14)
    dy = random(np.random.default_rng(15), x.shape)[0]
    memory = np.full_like(x, np.nan)
    found = backward("layernorm", dy, x, scale, axes, precise=False, views={"DX": memory})
    assert found["DX"] is memory
    in_place = backward("layernorm", dy, x, scale, axes, precise=False, views={"DX": dy})
    assert in_place["DX"] is not dy and np.array_equal(in_place["DX"], memory)


# ---- against torch


@pytest.mark.frameworks
class TestAgainstTorch:
    @pytest.mark.parametrize("shape", ["rows", "tokens", "image"])
    def test_layernorm(self, torch, shape):
        x, scale, bias, axes = case(shape, 16)
        dy = random(np.random.default_rng(17), x.shape)[0]
        tensors = [torch.from_numpy(a).double().requires_grad_() for a in (x, scale, bias)]
        trailing = [x.shape[axis] for axis in axes]
        y = torch.nn.functional.layer_norm(
            tensors[0], trailing, *(t.reshape(trailing) for t in tensors[1:]), eps=float(np.float32(EPSILON))
        )
        y.backward(torch.from_numpy(dy).double())
        right = dict(zip(("DX", "DSCALE", "DBIAS"), (t.grad.numpy() for t in tensors), strict=True))
        for precise, tolerance in ((True, 1e-12), (False, 1e-4)):
            found = forward("layernorm", x, scale, bias, axes, precise=precise)["Y"]
            np.testing.assert_allclose(found, y.detach().numpy(), tolerance, tolerance)
            close(backward("layernorm", dy, x, scale, axes, precise=precise), right, precise, 1e-4)

    @pytest.mark.parametrize("shape", ["rows", "tokens", "image"])
    def test_rmsnorm(self, torch, shape):
        x, scale, _, axes = case(shape, 18)
        dy = random(np.random.default_rng(19), x.shape)[0]
        tensors = [torch.from_numpy(a).double().requires_grad_() for a in (x, scale)]
        trailing = [x.shape[axis] for axis in axes]
        y = torch.nn.functional.rms_norm(
            tensors[0], trailing, tensors[1].reshape(trailing), eps=float(np.float32(EPSILON))
        )
        y.backward(torch.from_numpy(dy).double())
        right = {"DX": tensors[0].grad.numpy(), "Dscale": tensors[1].grad.numpy()}
        right["Dbias"] = gradients("rmsnorm", dy, x, scale, axes)["Dbias"]
        for precise, tolerance in ((True, 1e-12), (False, 1e-4)):
            found = forward("rmsnorm", x, scale, None, axes, precise=precise)["Y"]
            np.testing.assert_allclose(found, y.detach().numpy(), tolerance, tolerance)
            close(backward("rmsnorm", dy, x, scale, axes, precise=precise), right, precise, 1e-4)


# ---- checks at validate()


class TestValidate:
    def graph(self):
        return opgraph.pygraph(io_data_type=data_type.HALF, compute_data_type=FLOAT)

    def test_inferred_geometry(self):
        graph = self.graph()
        x = graph.tensor((2, 3, 4, 5), (60, 1, 15, 3))
        scale, bias = graph.tensor((1, 3, 4, 5)), graph.tensor((1, 3, 4, 5))
        y, mean, inverse = graph.layernorm(x, scale, bias, 1e-5, TRAINING)
        graph.validate()
        assert (y.dim, y.stride) == (x.dim, x.stride)
        assert mean.dim == inverse.dim == (2, 1, 1, 1)
        dx, dscale, dbias = graph.layernorm_backward(y, x, scale, mean, inverse)
        graph.validate()
        assert (dx.dim, dx.stride) == (x.dim, x.stride)
        assert (dscale.dim, dscale.stride) == (dbias.dim, dbias.stride) == (scale.dim, scale.stride)

    def test_holes_in_the_lists(self):
        graph = self.graph()
        x, scale = graph.tensor((4, 8)), graph.tensor((1, 8))
        assert graph.layernorm(x, scale, None, 1e-5, INFERENCE)[1:] == [None, None]
        assert graph.rmsnorm(x, scale, None, 1e-5, INFERENCE)[1:] == [None]
        y, inverse = graph.rmsnorm(x, scale, None, 1e-5, TRAINING)
        assert graph.rmsnorm_backward(y, x, scale, inverse, has_dbias=False)[2] is None
        assert graph.rmsnorm_backward(y, x, None, inverse, has_dbias=False)[1:] == [None, None]
        assert None not in graph.rmsnorm_backward(y, x, scale, inverse, has_dbias=True)
        graph.validate()

    def test_either_statistic_decides_both(self):
        for which in (1, 2):
            graph = self.graph()
            made = graph.layernorm(graph.tensor((2, 3, 4)), None, None, 1e-5, TRAINING)
            made[which].set_dim((2, 3, 1))
            graph.validate()
            assert made[1].dim == made[2].dim == (2, 3, 1)

    def malformed(self, match, declare):
        graph = self.graph()
        declare(graph, graph.tensor((2, 3, 4)), graph.tensor((1, 1, 4)))
        with pytest.raises(ValueError, match=match):
            graph.validate()

    def test_malformed(self):
        eps = 1e-5
        self.malformed("phase", lambda g, x, s: g.layernorm(x, s, None, eps))
        self.malformed("phase", lambda g, x, s: g.rmsnorm(x, s, None, eps, norm_forward_phase.NOT_SET))
        self.malformed("epsilon", lambda g, x, s: g.layernorm(x, s, norm_forward_phase=TRAINING))
        self.malformed("epsilon", lambda g, x, s: g.layernorm(x, s, None, g.tensor((2, 1, 1)), TRAINING))
        self.malformed("bias", lambda g, x, s: g.layernorm(x, None, s, eps, TRAINING))
        self.malformed("bias", lambda g, x, s: g.layernorm(x, s, g.tensor((1, 1, 3)), eps, TRAINING))
        self.malformed("undecided", lambda g, x, s: g.layernorm(x, None, None, eps, TRAINING))
        self.malformed("rank", lambda g, x, s: g.layernorm(x, g.tensor((1, 4)), None, eps, TRAINING))
        self.malformed("scale", lambda g, x, s: g.layernorm(x, g.tensor((1, 1, 3)), None, eps, TRAINING))
        self.malformed("statistic", lambda g, x, s: g.layernorm(x, s, None, eps, TRAINING)[1].set_dim((2, 1, 1)))
        self.malformed("grad", lambda g, x, s: g.layernorm_backward(s, x, s, s, s))
        self.malformed("mean", lambda g, x, s: g.layernorm_backward(x, x, s, None, g.tensor((2, 3, 1))))
        self.malformed("inv_variance", lambda g, x, s: g.layernorm_backward(x, x, s, g.tensor((2, 3, 1)), s))
        self.malformed("has_dbias", lambda g, x, s: g.rmsnorm_backward(x, x, s, g.tensor((2, 3, 1))))
        self.malformed("has_dbias", lambda g, x, s: g.rmsnorm_backward(x, x, None, g.tensor((2, 3, 1)), True))

    def test_other_output_dims_are_not_supported(self):
        graph = self.graph()
        graph.layernorm(graph.tensor((2, 4)), graph.tensor((1, 4)), None, 1e-5, INFERENCE, out_dims=[4, 2])
        with pytest.raises(cudnnGraphNotSupportedError):
            graph.validate()

    def test_wrong_kinds(self):
        graph = self.graph()
        x, scale = graph.tensor((2, 4)), graph.tensor((1, 4))
        with pytest.raises(TypeError, match="norm_forward_phase"):
            graph.layernorm(x, scale, None, 1e-5, "TRAINING")
        with pytest.raises(TypeError, match="epsilon"):
            graph.layernorm(x, scale, epsilom=1e-5)
