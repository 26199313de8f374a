"""Field cases about gated linear attention: empty sequences, state orientation, split runs, strong decay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gated import VARIANTS, Call, call, problem
from sums import refused

import opgraph
from opgraph import data_type

FORMS = [("float64", np.float64), ("native", np.float32)]


@pytest.fixture(params=FORMS, ids=["float64", "native"])
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"precision": request.param[0], "dtype": request.param[1]}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


def one_head(variant: str, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, lengths: Any = None) -> Any:
    """Operands of one head from rows of tokens; scalar gates become equal channels where the operator has channels."""
    q, k, v = (np.asarray(x, np.float64)[:, None] for x in (q, k, v))
    g, beta = (np.asarray(x, np.float64)[:, None] for x in (g, beta))
    tokens, keys, width = len(k), k.shape[2], v.shape[2]
    values = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": np.cumsum([0, *(lengths or [tokens])])}
    if variant != "gdn":
        values["g"] = np.repeat(g[..., None], keys, -1)
    if variant == "gdn2":
        values["beta"] = np.repeat(beta[..., None], keys, -1)
        values["w"] = np.repeat(beta[..., None], width, -1)
    if state is not None:
        # Given K by V, as the cases write it; stored V by K.
        values["initial_state"] = np.swapaxes(np.asarray(state, np.float64), -1, -2)[:, None].copy()
    return values


def near(found: Any, expected: Any, form: Any) -> None:
    most = 1e-13 if form["dtype"] is np.float64 else 1e-6
    np.testing.assert_allclose(found, np.asarray(expected, np.float64), rtol=most, atol=most)


class TestF33EmptySequenceAmongOthers:
    def test_the_middle_one_passes_its_state(self, variant, form):
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, 2)), rng.standard_normal((3, 2)), rng.standard_normal((3, 1))
        g, beta = -rng.random(3), rng.random(3)
        states = [[[1], [2]], [[4], [9]], [[-3], [5]]]
        values = one_head(variant, q, k, v, g, beta, states, [2, 0, 1])
        found = call(variant, values, **form)
        assert found["final_state"][1].tolist() == [[[4, 9]]]
        assert np.isfinite(found["O"]).all() and len(found["O"]) == 3
        for n, rows in ((0, slice(0, 2)), (2, slice(2, 3))):
            own = one_head(variant, q[rows], k[rows], v[rows], g[rows], beta[rows], [states[n]])
            alone = call(variant, own, **form)
            assert (alone["O"] == found["O"][rows]).all()
            assert (alone["final_state"][0] == found["final_state"][n]).all()

    @pytest.mark.parametrize("boundaries", [[0, 2, 1, 3], [0, 2, 2, 4], [0, 2, 2, 2], [1, 2, 2, 3]])
    def test_boundaries_that_do_not_fit_are_refused(self, variant, form, boundaries):
        made = Call(variant, problem(variant, [2, 0, 1], (1, 1), 2, 1), output_final_state=True, **form)
        buffers = made.buffers()
        pack = made.pack(buffers, cu_seqlens=np.array(boundaries, np.int32))
        refused(lambda: made.graph.execute(pack), "'cu_seqlens' (uid")
        for buffer in buffers.values():
            buffer.untouched()
        made.results()


class TestF34StateOrientation:
    def test_square_heads(self, variant, form):
        first = one_head(variant, [[1, 1]], [[1, 0]], [[5, 7]], [0], [1])
        found = call(variant, first, scale=1.0, **form)
        near(found["O"], [[[5, 7]]], form)
        near(found["final_state"], [[[[5, 0], [7, 0]]]], form)
        second = one_head(variant, [[1, 1]], [[0, 1]], [[0, 0]], [0], [0])
        second["initial_state"] = found["final_state"]
        near(call(variant, second, scale=1.0, **form)["O"], [[[5, 7]]], form)

    def test_the_other_orientation_is_refused(self, variant, form):
        values = one_head(variant, [[1, 1, 1]], [[1, 0, 0]], [[5, 7]], [0], [1], np.zeros((1, 3, 2)))
        made = Call(variant, values, output_final_state=True, **form)
        turned = np.zeros((1, 1, 3, 2), form["dtype"])
        refused(lambda: made.results(initial_state=turned), "'initial_state'", "(1, 1, 2, 3)", "(1, 1, 3, 2)")
        buffers = made.buffers()
        pack = made.pack({"O": buffers["O"], "final_state": turned})
        refused(lambda: made.graph.execute(pack), "final_state", "(1, 1, 2, 3)", "(1, 1, 3, 2)")
        assert not turned.any()

    def test_the_other_orientation_is_no_declaration(self, variant):
        graph = opgraph.pygraph(io_data_type=data_type.FLOAT)
        values = one_head(variant, [[1, 1, 1]], [[1, 0, 0]], [[5, 7]], [0], [1])
        tensors = {
            port: graph.tensor(x.shape, data_type=data_type.INT32 if port == "cu_seqlens" else None)
            for port, x in values.items()
        }
        getattr(graph, variant)(**tensors, initial_state=graph.tensor((1, 1, 3, 2), name="state"))
        refused(graph.validate, "'state'", "(1, 1, 2, 3)", "(1, 1, 3, 2)", error=ValueError)


class TestF35SplitRunEqualsWholeRun:
    def test_two_tokens(self, variant, form):
        q, k, v = [[1, 1], [1, 1]], [[1, 0], [0, 1]], [[2], [3]]
        g, beta = [0, np.log(0.5)], [1, 0.5]
        found = call(variant, one_head(variant, q, k, v, g, beta), scale=1.0, **form)
        near(found["O"][:, 0, 0], [2, 2.5], form)
        near(found["final_state"][0, 0], [[1, 1.5]], form)
        first = call(variant, one_head(variant, q[:1], k[:1], v[:1], g[:1], beta[:1]), scale=1.0, **form)
        rest = one_head(variant, q[1:], k[1:], v[1:], g[1:], beta[1:])
        second = call(variant, {**rest, "initial_state": first["final_state"]}, scale=1.0, **form)
        near([first["O"][0, 0, 0], second["O"][0, 0, 0]], [2, 2.5], form)
        near(second["final_state"][0, 0], [[1, 1.5]], form)

    def test_from_a_state(self, variant, form):
        values = one_head(variant, [[1, 1]], [[0, 1]], [[4]], [0], [0.5], [[[1], [2]]])
        found = call(variant, values, scale=1.0, **form)
        near(found["O"], [[[4]]], form)
        near(found["final_state"][0, 0], [[1, 3]], form)

    @pytest.mark.parametrize("cut", range(7))
    def test_every_split_point(self, variant, form, cut):
        values = problem(variant, [6], (1, 2), 4, 3)
        whole = call(variant, values, **form)
        tokens = [port for port in values if port not in ("cu_seqlens", "initial_state")]
        parts = [{p: values[p][rows] for p in tokens} for rows in (slice(0, cut), slice(cut, 6))]
        for part, length in zip(parts, (cut, 6 - cut), strict=True):
            part["cu_seqlens"] = np.array([0, length])
        first = call(variant, {**parts[0], "initial_state": values["initial_state"]}, **form)
        second = call(variant, {**parts[1], "initial_state": first["final_state"]}, **form)
        near(np.concatenate([first["O"], second["O"]]), whole["O"], form)
        near(second["final_state"], whole["final_state"], form)


class TestF36StrongDecay:
    def values(self, variant: str, g: float, tokens: int = 64) -> dict[str, Any]:
        keys = np.tile([[1.0, 0.0], [0.0, 1.0]], (tokens // 2, 1))
        ones = np.ones((tokens, 1))
        return one_head(variant, np.ones((tokens, 2)), keys, ones, np.full(tokens, g), np.ones(tokens))

    @pytest.mark.parametrize("tokens", [64, 192])
    def test_5(self, variant, form, tokens):
        found = call(variant, self.values(variant, -5.0, tokens), scale=1.0, **form)
        near(found["O"][0], [[1]], form)
        near(found["O"][1:, 0, 0], np.full(tokens - 1, 1 + np.exp(-5.0)), form)
        near(found["final_state"][0, 0], [[np.exp(-5.0), 1]], form)
        assert abs(found["O"][1, 0, 0] - 1.0067379) < 5e-7

    @pytest.mark.parametrize("g", [-2.5, -20.0, -100.0, -np.inf])
    def test_other_gates(self, variant, form, g):
        found = call(variant, self.values(variant, g), scale=1.0, **form)
        state, outputs = np.zeros(2), []
        for token in range(64):
            state = state * np.exp(g)
            key = np.eye(2)[token % 2]
            state = state + key * (1 - state @ key)
            outputs.append(state.sum())
        near(found["O"][:, 0, 0], outputs, form)
        near(found["final_state"][0, 0, 0], state, form)
        assert np.isfinite(found["O"]).all()
        if g == -np.inf:
            assert (found["O"] == 1).all()
