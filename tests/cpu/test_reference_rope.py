"""The NumPy references of rotary embedding: the rotation and its inverse, angles, blocks, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import data_type
from opgraph.ops import OPS, Math, OutSpec, RefCall, rope

FLOAT = data_type.FLOAT


@pytest.fixture(autouse=True, params=["one block", "many blocks"])
def blocking(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(rope, "_BLOCK", 20)


def turn(
    op: str,
    x: Any,
    angles: Any,
    scale: float = 1.0,
    rope_dim: int = 0,
    *,
    precise: bool = True,
    view: Any = None,
) -> Any:
    inputs = {"input" if op == "rope" else "dY": x, "freqs": angles}
    out = OutSpec(x.shape, FLOAT, np.dtype(np.float32), view)
    params = {"output_scale": scale, "rope_dim": rope_dim}
    found = OPS[op].reference(RefCall(params, inputs, {"OUT_0": out}, Math(FLOAT, precise)))
    assert list(found) == ["OUT_0"] and found["OUT_0"].shape == x.shape
    return found["OUT_0"]


def test_backward_is_the_inverse_rotation():
    rng = np.random.default_rng(6)
    x, half = rng.standard_normal((2, 3, 5, 8)), rng.uniform(-9, 9, (5, 3))
    angles = np.concatenate([half, half], -1)
    y = turn("rope", x, angles, rope_dim=6)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), 1e-12)
    np.testing.assert_allclose(turn("rope_backward", y, angles, rope_dim=6), x, 1e-12, 1e-12)
    assert np.array_equal(y[..., 6:], x[..., 6:])
    scaled = turn("rope_backward", turn("rope", x, angles, 0.5, 6), angles, 0.5, 6)
    np.testing.assert_allclose(scaled, 0.25 * x, 1e-12, 1e-12)


def test_angles_may_differ_within_a_pair():
    """Then it is no rotation, and the gradient is the transposed map."""
    rng = np.random.default_rng(7)
    x, dy, angles = (
        rng.standard_normal((1, 2, 3, 4)),
        rng.standard_normal((1, 2, 3, 4)),
        rng.uniform(-4, 4, (3, 4)),
    )
    y = turn("rope", x, angles, 0.5)
    x1, x2, a1, a2 = x[..., :2], x[..., 2:], angles[..., :2], angles[..., 2:]
    right = [x1 * np.cos(a1) - x2 * np.sin(a1), x2 * np.cos(a2) + x1 * np.sin(a2)]
    np.testing.assert_allclose(y, 0.5 * np.concatenate(right, -1), 1e-12, 1e-12)
    dx = turn("rope_backward", dy, angles, 0.5)
    np.testing.assert_allclose((dx * x).sum(), (dy * y).sum(), 1e-12)
    for flat in range(x.size):
        one = np.zeros(x.shape)
        one.flat[flat] = 1
        np.testing.assert_allclose(dx.flat[flat], (turn("rope", one, angles, 0.5) * dy).sum(), 1e-12, 1e-12)


@pytest.mark.parametrize("op", ["rope", "rope_backward"])
def test_rotation_in_place(op, precision):
    graph = opgraph.pygraph(io_data_type=FLOAT)
    x, freqs = graph.tensor([2, 3, 5, 8], name="x"), graph.tensor([5, 6], name="f")
    y = getattr(graph, op)(x, freqs, 0.5, 6).set_output(True)
    rng = np.random.default_rng(5)
    buffer, angles = rng.standard_normal((2, 3, 5, 8), np.float32), rng.standard_normal((5, 6), np.float32)
    right = turn(op, buffer.copy(), angles, 0.5, 6)
    graph.build(engine="cpu", knobs={"precision": precision})
    graph.execute({x: buffer, freqs: angles, y: buffer})
    np.testing.assert_allclose(buffer, right, 1e-5, 1e-5)


def test_the_result_is_made_in_the_memory_of_the_output():
    rng = np.random.default_rng(8)
    x, angles = rng.standard_normal((2, 3, 5, 8), np.float32), rng.standard_normal((5, 8), np.float32)
    right = turn("rope", x, angles)
    for view in (np.full_like(x, np.nan), np.full((2, 5, 3, 8), np.nan, np.float32).transpose(0, 2, 1, 3)):
        assert turn("rope", x, angles, precise=False, view=view) is view
        np.testing.assert_allclose(view, right, 1e-5, 1e-5)
    assert turn("rope", x, angles, precise=False, view=x) is not x, (
        "a block is written before the next is read"
    )
