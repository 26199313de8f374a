"""Gated linear attention on the CPU engine: worked examples, limits, and the laws that tie calls to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.tolerances import LINEAR_ATTENTION_DECODE_STATE, ZERO_NORM, relative_norm
from gated import VARIANTS, Call, call, close, part, problem, same_bits, with_gradients

SMALLEST_NORMAL = 1.2e-38  # of float32
FORMS = [("float64", np.float64), ("native", np.float32)]


@pytest.fixture(params=FORMS, ids=["tokens", "chunks"])
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Token by token in float64, and chunks in float32."""
    return {"precision": request.param[0], "dtype": request.param[1]}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


def near(found: Any, expected: Any, form: Any) -> None:
    most = 1e-12 if form["dtype"] is np.float64 else 2e-6
    np.testing.assert_allclose(found, np.asarray(expected), rtol=most, atol=most)


def oracle(op: str, values: Any, **options: Any) -> Any:
    return call(op, values, precision="float64", dtype=np.float64, **options)


def chunks(op: str, values: Any, **options: Any) -> Any:
    return call(op, values, precision="native", dtype=np.float32, **options)


# ---- examples by hand


def heads_first(rows: Any) -> np.ndarray:
    """[T, D] of one head as [T, 1, D]."""
    return np.asarray(rows, np.float64)[:, None]


def by_hand(variant: str) -> dict[str, Any]:
    gates = np.log([0.5, 0.5] if variant == "gdn" else [[0.5, 0.25], [0.5, 0.25]])
    values = {
        "q": heads_first([[1, 0], [1, 1]]),
        "k": heads_first([[1, 0], [0.6, 0.8]]),
        "v": heads_first([[2, 4], [1, -1]]),
        "g": heads_first(gates) if variant != "gdn" else gates[:, None],
        "beta": np.array([[0.5], [1]]),
        "cu_seqlens": [0, 2],
        "initial_state": np.array([[[[0, 1], [2, 1]]]], np.float64),
    }
    if variant == "gdn2":
        values["beta"] = heads_first([[0.5, 1], [1, 0.25]])
        values["w"] = heads_first([[0.5, 1], [1, 0.5]])
    return values


FORWARD_BY_HAND = {
    "gdn": ([[1, 2.5], [1.45, -1.23]], [[0.8, 0.65], [0.08, -1.31]]),
    "kda": ([[1, 2.5], [1.4725, -1.2075]], [[0.89, 0.5825], [0.17, -1.3775]]),
    "gdn2": ([[1, 4.5], [1.525, -0.295]], [[0.9125, 0.6125], [1.1325, -1.4275]]),
}
BACKWARD_BY_HAND: dict[str, dict[str, Any]] = {
    "gdn": {
        "dQ": [[3.5, 1], [0.88, -0.66]],
        "dK": [[2.16, -0.69], [-3.9, -2.15]],
        "dV": [[0.54, 0.54], [1.4, 1.4]],
        "dG": [0.48, 0.22],
        "dBeta": [5.4, -2.03],
        "d_initial_state": [[0.27, -0.03], [0.27, -0.03]],
    },
    "kda": {
        "dQ": [[3.5, 0.5], [1.06, -0.795]],
        "dK": [[2.16, -0.345], [-3.6, -1.325]],
        "dG": [[0.54, -0.015], [0.28, -0.015]],
        "dBeta": [5.4, -1.61],
    },
    "gdn2": {"dBeta": [[-1.08, 0], [-2.31, -0.14]], "dW": [[2.16, 4.32], [1.4, -1.4]]},
}


def test_two_tokens_by_hand(variant, form):
    found = call(variant, by_hand(variant), scale=1.0, **form)
    out, state = FORWARD_BY_HAND[variant]
    near(found["O"][:, 0], out, form)
    near(found["final_state"][0, 0], state, form)


def test_gradients_of_two_tokens_by_hand(variant, form):
    values = {**by_hand(variant), "dO": np.ones((2, 1, 2))}
    found = call(f"{variant}_bwd", values, scale=1.0, **form)
    for port, expected in BACKWARD_BY_HAND[variant].items():
        near(np.squeeze(found[port]), expected, form)


def test_one_token(variant, form):
    values = problem(variant, [1], (1, 1), 3, 2)
    del values["initial_state"]
    q, k, v = (values[port][0, 0] for port in ("q", "k", "v"))
    w = values["w"][0, 0] if variant == "gdn2" else values["beta"][0, 0]
    found = call(variant, values, scale=0.5, **form)
    near(found["O"][0, 0], 0.5 * (q @ k) * w * v, form)
    near(found["final_state"][0, 0], (w * v)[:, None] * k, form)
    gradients = call(f"{variant}_bwd", with_gradients(values), **form)
    assert (gradients["dG"] == 0).all()


def test_nothing_written(variant, form):
    values = problem(variant, [70, 3])
    values["beta"] = np.zeros_like(values["beta"])
    if variant == "gdn2":
        values["w"] = np.zeros_like(values["w"])
    found = call(variant, values, scale=1.0, **form)
    decay = values["g"][..., None] if variant == "gdn" else values["g"]
    for n, (low, high) in enumerate([(0, 70), (70, 73)]):
        kept = values["initial_state"][n] * np.exp(decay[low:high].sum(0))[:, None, :]
        close({"S": found["final_state"][n]}, {"S": kept}, 1e-5)
        last = np.einsum("hvk,hk->hv", kept, values["q"][high - 1])
        close({"O": found["O"][high - 1]}, {"O": last}, 1e-5)
    gradients = call(f"{variant}_bwd", with_gradients(values), **form)
    # With w = 0 (GDN2) what is written has no value, yet dK holds the way of what is erased: only dV is 0.
    assert (gradients["dV"] == 0).all()
    if variant != "gdn2":
        assert np.linalg.norm(gradients["dK"]) < ZERO_NORM


def test_a_second_value_replaces_the_first(variant, form):
    key = np.array([0.6, 0.8])
    values = {
        "q": heads_first([key, key]),
        "k": heads_first([key, key]),
        "v": heads_first([[2, 4], [7, 9]]),
        "g": np.zeros((2, 1) if variant == "gdn" else (2, 1, 2)),
        "beta": np.ones((2, 1, 2) if variant == "gdn2" else (2, 1)),
        "cu_seqlens": [0, 2],
    }
    if variant == "gdn2":
        values["w"] = np.ones((2, 1, 2))
    found = call(variant, values, scale=1.0, **form)
    near(found["O"][:, 0], [[2, 4], [7, 9]], form)
    near(found["final_state"][0, 0], np.outer([7, 9], key), form)


def test_orthonormal_keys_are_kept_side_by_side(variant, form):
    values = problem(variant, [8], (1, 1), 8, 3)
    del values["initial_state"]
    values["k"] = np.linalg.qr(np.random.default_rng(2).standard_normal((8, 8)))[0][:, None]
    values["g"], values["beta"] = np.zeros_like(values["g"]), np.ones_like(values["beta"])
    if variant == "gdn2":
        values["w"] = np.ones_like(values["w"])
    found = call(variant, values, **form)
    close({"S": found["final_state"][0, 0]}, {"S": values["v"][:, 0].T @ values["k"][:, 0]}, 1e-5)


def test_beta_2_reflects(variant, form):
    tokens = 67
    key = np.array([0.6, 0.8])
    values = {
        "q": np.tile(key, (tokens, 1, 1)),
        "k": np.tile(key, (tokens, 1, 1)),
        "v": np.zeros((tokens, 1, 3)),
        "g": np.zeros((tokens, 1) if variant == "gdn" else (tokens, 1, 2)),
        "beta": np.full((tokens, 1, 2) if variant == "gdn2" else (tokens, 1), 2.0),
        "cu_seqlens": [0, tokens],
        "initial_state": np.outer([1, 2, 3], key)[None, None],
    }
    if variant == "gdn2":
        values["w"] = np.ones((tokens, 1, 3))
    found = call(variant, values, scale=1.0, **form)
    signs = (-1.0) ** np.arange(1, tokens + 1)
    np.testing.assert_allclose(found["O"][:, 0], signs[:, None] * [1, 2, 3], rtol=2e-5)
    np.testing.assert_allclose(found["final_state"], -values["initial_state"], rtol=2e-5)


# ---- sequences

EDGES = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]


def alone(values: Any, n: int) -> dict[str, Any]:
    """Sequence n with its states."""
    low, high = values["cu_seqlens"][n], values["cu_seqlens"][n + 1]
    states = {port: values[port][n : n + 1] for port in ("initial_state", "d_final_state") if port in values}
    return {**part(values, low, high), **states}


def test_packed_sequences_equal_their_own_calls_to_the_bit(variant, form):
    lengths = EDGES if form["precision"] == "native" else [1, 17, 64]
    values = with_gradients(problem(variant, lengths, (1, 2), 8, 12))
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    together, gradients = call(variant, forward, **form), call(f"{variant}_bwd", values, **form)
    for n in range(len(lengths)):
        own = alone(values, n)
        low, high = values["cu_seqlens"][n], values["cu_seqlens"][n + 1]
        found = call(f"{variant}_bwd", own, **form)
        for port, array in found.items():
            whole = gradients[port]
            same_bits(array, whole[n : n + 1] if port == "d_initial_state" else whole[low:high])
        own = {port: x for port, x in own.items() if port in forward}
        found = call(variant, own, **form)
        same_bits(found["O"], together["O"][low:high])
        same_bits(found["final_state"], together["final_state"][n : n + 1])


@pytest.mark.parametrize("lengths", [[0, 5], [5, 0], [0, 0, 3, 0, 0, 70, 0], [0], [0, 0]])
def test_empty_sequences_pass_states_through(variant, form, lengths):
    values = with_gradients(problem(variant, lengths))
    values["initial_state"][:, 0, 0, 0] = -0.0
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    found, gradients = call(variant, forward, **form), call(f"{variant}_bwd", values, **form)
    assert np.isfinite(found["O"]).all()
    for n, length in enumerate(lengths):
        if not length:
            same_bits(found["final_state"][n], values["initial_state"][n].astype(form["dtype"]))
            same_bits(gradients["d_initial_state"][n], values["d_final_state"][n].astype(form["dtype"]))
    del forward["initial_state"]
    found = call(variant, forward, **form)
    assert all((found["final_state"][n] == 0).all() for n, length in enumerate(lengths) if not length)
    kept = [n for n, length in enumerate(lengths) if length]
    if kept:
        packed = {**forward, "cu_seqlens": np.cumsum([0, *(lengths[n] for n in kept)])}
        same_bits(call(variant, packed, **form)["O"], found["O"])


def test_no_sequences(variant, form):
    values = problem(variant, [])
    found = call(variant, values, **form)
    assert found["O"].shape == (0, 2, 6) and found["final_state"].shape == (0, 2, 6, 8)
    gradients = call(f"{variant}_bwd", with_gradients(values), **form)
    assert gradients["dQ"].shape == (0, 2, 8)


def test_a_run_cut_in_two(variant, form):
    values = problem(variant, [100])
    whole = call(variant, values, **form)
    first = call(variant, {**part(values, 0, 37), "initial_state": values["initial_state"]}, **form)
    second = call(variant, {**part(values, 37, 100), "initial_state": first["final_state"]}, **form)
    most = 1e-14 if form["dtype"] is np.float64 else 2e-6
    joined = {"O": np.concatenate([first["O"], second["O"]]), "final_state": second["final_state"]}
    close(joined, whole, most)


@pytest.mark.parametrize("heads", [(2, 2), (1, 2), (4, 2)])
def test_a_run_cut_in_two_by_summaries(variant, form, heads):
    values = with_gradients(problem(variant, [100], heads))
    parts = [part(values, 0, 37), part(values, 37, 100)]
    options = {"output_transition": True, **form}
    ports = ("k", "v", "g", "beta", "w", "cu_seqlens")
    maps = [call(f"{variant}_summary", {p: piece[p] for p in ports if p in piece}, **options) for piece in parts]
    state = values["initial_state"]
    for each in maps:
        state = state @ each["transition"] + each["final_state"]
    most = 1e-13 if form["dtype"] is np.float64 else 2e-6
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    whole = call(variant, forward, **form)
    close({"final_state": state}, {"final_state": whole["final_state"]}, most)

    ports = ("q", "k", "g", "beta", "cu_seqlens", "dO")
    slope = values["d_final_state"]
    for piece, each in zip(parts[::-1], maps[::-1], strict=True):
        back = call(f"{variant}_summary_bwd", {p: piece[p] for p in ports}, **options)
        # The transition is small, the remainder of an identity: in float32 its own error is larger.
        close({"T": back["transition"]}, {"T": each["transition"].swapaxes(-1, -2)}, 10 * most)
        given = call(f"{variant}_summary_bwd", {**{p: piece[p] for p in ports}, "d_final_state": slope}, **form)
        slope = slope @ back["transition"] + back["d_initial_state"]
        close(given, {"d_initial_state": slope}, most)
    gradients = call(f"{variant}_bwd", values, **form)
    close({"d": slope}, {"d": gradients["d_initial_state"]}, most)


# ---- heads


@pytest.mark.parametrize("heads, heads_k", [((2, 4), 2), ((2, 4), 4), ((4, 2), 4), ((4, 2), 2), ((1, 8), 1)])
def test_shared_heads_are_repeated_ones(variant, form, heads, heads_k):
    values = with_gradients(problem(variant, [20, 70], heads, heads_k=heads_k))
    out = max(heads)
    repeated = {
        port: np.repeat(x, out // x.shape[1], axis=1) if port in ("q", "k", "v") else x for port, x in values.items()
    }
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    full = {port: repeated[port] for port in forward}
    most = 1e-13 if form["dtype"] is np.float64 else 2e-6
    close(call(variant, forward, **form), call(variant, full, **form), most)
    gradients, expected = call(f"{variant}_bwd", values, **form), call(f"{variant}_bwd", repeated, **form)
    for port, source in (("dQ", "q"), ("dK", "k"), ("dV", "v")):
        tokens, many, width = expected[port].shape
        few = values[source].shape[1]
        expected[port] = expected[port].reshape(tokens, few, many // few, width).sum(2)
    close(gradients, expected, most)


# ---- gates and numbers


@pytest.mark.parametrize("strength", ["spike", -5.0, -30.0, -100.0, -np.inf])
def test_strong_decay(variant, strength):
    values = with_gradients(problem(variant, [256, 40], (1, 2), 16, 8))
    if strength == "spike":
        values["g"][100] = -1e4
    else:
        values["g"] = np.full_like(values["g"], strength)
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    found, truth = chunks(variant, forward), oracle(variant, forward)
    close(found, truth, 1e-5)
    if strength == "spike":
        # The token after which everything is forgotten is a first token.
        rest = oracle(variant, part(forward, 100, 256))
        close({"O": truth["O"][100:256]}, {"O": rest["O"]}, 1e-12)
    gradients, truth = chunks(f"{variant}_bwd", values), oracle(f"{variant}_bwd", values)
    if strength == "spike":
        assert (gradients["dG"][100] == 0).all()
    for port in [port for port, array in truth.items() if np.abs(array).max() < SMALLEST_NORMAL]:
        assert np.abs(gradients.pop(port)).max() < SMALLEST_NORMAL > np.abs(truth.pop(port)).max()
    close(gradients, truth, 1e-5)


def test_linear_gate_of_zero(variant):
    values = with_gradients(problem(variant, [90]))
    values["g"] = np.exp(values["g"])
    values["g"][40] = 0
    options = {"gate_domain": "linear"}
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(chunks(variant, forward, **options), oracle(variant, forward, **options), 2e-6)
    close(chunks(f"{variant}_bwd", values, **options), oracle(f"{variant}_bwd", values, **options), 1e-4)


def test_errors_do_not_grow_with_length(variant):
    values = problem(variant, [4096], (1, 1), 16, 16)
    values["g"] = np.zeros_like(values["g"])
    found, truth = chunks(variant, values), oracle(variant, values)
    early, late = (relative_norm(found["O"][part], truth["O"][part]) for part in (slice(256), slice(3840, None)))
    assert late < max(2 * early, 2e-6)
    close(found, truth, 5e-6)


def test_state_alone(variant, form):
    values = with_gradients(problem(variant, [70, 5]))
    values["v"] = np.zeros_like(values["v"])
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(call(variant, forward, **form), oracle(variant, forward), 2e-6)
    values["dO"] = np.zeros_like(values["dO"])
    gradients = call(f"{variant}_bwd", values, **form)
    assert (gradients["dQ"] == 0).all()
    close(gradients, oracle(f"{variant}_bwd", values), 1e-5)


@pytest.mark.parametrize("alike", ["correlated", "identical"])
def test_keys_that_are_alike(variant, alike):
    values = with_gradients(problem(variant, [200], (1, 1), 16, 8, correlated=True))
    if alike == "identical":
        values["k"][:] = values["k"][0]
        values["g"], values["beta"] = np.zeros_like(values["g"]), np.ones_like(values["beta"])
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(chunks(variant, forward), oracle(variant, forward), 1e-5)
    close(chunks(f"{variant}_bwd", values), oracle(f"{variant}_bwd", values), 1e-4)


@pytest.mark.parametrize("length", [64, 70, 128, 9, 5])
def test_later_tokens_do_not_reach_back(variant, length):
    values = problem(variant, [length], (1, 2), 16, 8, strength=3.0)
    before = chunks(variant, values)["O"]
    for port, value in (("g", -5.0), ("k", 0.25), ("v", 7.0), ("q", 0.5), ("beta", 0.1)):
        changed = {**values, port: values[port].copy()}
        changed[port][-1] = value
        after = chunks(variant, changed)["O"]
        same_bits(before[:-1], after[:-1])


def test_equal_channels_are_one(form):
    values = with_gradients(problem("gdn", [20, 70]))
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    kda = {"g": np.repeat(values["g"][..., None], 8, -1)}
    gdn2 = {
        **kda,
        "beta": np.repeat(values["beta"][..., None], 8, -1),
        "w": np.repeat(values["beta"][..., None], 6, -1),
    }
    most = 1e-13 if form["dtype"] is np.float64 else 5e-6
    close(call("kda", {**forward, **kda}, **form), call("gdn", forward, **form), most)
    close(call("gdn2", {**forward, **gdn2}, **form), call("gdn", forward, **form), most)
    one, many, both = (
        call(f"{op}_bwd", {**values, **added}, **form) for op, added in (("gdn", {}), ("kda", kda), ("gdn2", gdn2))
    )
    many["dG"] = many["dG"].sum(-1)
    both["dG"] = both["dG"].sum(-1)
    both["dBeta"] = both["dBeta"].sum(-1) + both.pop("dW").sum(-1)
    close(many, one, 100 * most)
    close(both, one, 100 * most)


# ---- what is fused


@pytest.mark.parametrize("size", [1e-4, 0.0, 1e3])
def test_norm_of_unusual_rows(variant, size):
    values = with_gradients(problem(variant, [20, 70]))
    values["q"][::3] *= size
    values["k"][::2] *= size
    options = {"use_qk_l2norm": True}
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(chunks(variant, forward, **options), oracle(variant, forward, **options), 2e-6)
    close(chunks(f"{variant}_bwd", values, **options), oracle(f"{variant}_bwd", values, **options), 1e-4)


def test_sigmoid_of_large_logits(variant):
    values = with_gradients(problem(variant, [80]))
    values["beta"] = np.random.default_rng(4).choice([-20.0, 20.0, 0.5], values["beta"].shape)
    options = {"use_beta_sigmoid": True, "allow_neg_eigval": True}
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(chunks(variant, forward, **options), oracle(variant, forward, **options), 1e-5)
    close(chunks(f"{variant}_bwd", values, **options), oracle(f"{variant}_bwd", values, **options), 1e-4)


@pytest.mark.parametrize("parameters", [(), ("a_log",), ("dt_bias",), ("a_log", "dt_bias")])
def test_safe_gate_over_several_chunks(variant, parameters):
    values = with_gradients(problem(variant, [90, 70, 3]))
    rng = np.random.default_rng(5)
    values["g"] = 3 * rng.standard_normal(values["g"].shape)
    shapes = {"a_log": (2,), "dt_bias": values["g"].shape[1:]}
    values.update({port: rng.standard_normal(shapes[port]) for port in parameters})
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(chunks(variant, forward, safe_gate=True), oracle(variant, forward, safe_gate=True), 5e-6)
    found, truth = (run(f"{variant}_bwd", values, safe_gate=True) for run in (chunks, oracle))
    assert {"d_a_log", "d_dt_bias"} & found.keys() == {f"d_{port}" for port in parameters}
    close(found, truth, 1e-3)


# ---- steps and checkpoints


def test_one_token_each_is_a_step(variant):
    sequences, steps = 5, 30
    values = problem(variant, [1] * sequences * steps, (1, 2), 16, 8)
    state = values.pop("initial_state")[:sequences]
    ports = [port for port in values if port != "cu_seqlens"]
    found, truth = {"s": state}, {"s": state}
    for step in range(steps):
        now = {p: values[p][step * sequences : (step + 1) * sequences] for p in ports}
        now["cu_seqlens"] = np.arange(sequences + 1)
        for run, held in ((chunks, found), (oracle, truth)):
            result = run(variant, {**now, "initial_state": held["s"]}, max_seqlen=1)
            held["s"], held["o"] = result["final_state"], result["O"]
    assert relative_norm(found["s"], truth["s"]) < steps * LINEAR_ATTENTION_DECODE_STATE
    close({"O": found["o"]}, {"O": truth["o"]}, 1e-5)


@pytest.mark.parametrize("every", [1, 7, 16, 20, 33, 64, 100, 128, 1000])
def test_checkpoints_are_the_states_on_the_way(variant, form, every):
    lengths = [0, 70, 3, 140, 0] if form["precision"] == "native" else [0, 40, 3, 0]
    values = problem(variant, lengths, (1, 2), 8, 6)
    found = call(variant, values, checkpoint_every_n_tokens=every, **form)
    rows = found["state_checkpoints"]
    assert len(rows) == max(sum(lengths) // every + len(lengths), 1)
    row = 0
    for n, length in enumerate(lengths):
        low = values["cu_seqlens"][n]
        for start in range(0, length, every):
            expected = values["initial_state"][n : n + 1]
            if start:
                run = {**part(values, low, low + start), "initial_state": expected}
                expected = oracle(variant, run)["final_state"]
            close({"row": rows[row]}, {"row": expected[0]}, 1e-5)
            row += 1
    assert (rows[row:] == 0).all()
    # The rest does not depend on them, and the gradients may start from them.
    close({p: found[p] for p in ("O", "final_state")}, oracle(variant, values), 1e-5)
    backward = with_gradients(values)
    kept = {**backward, "state_checkpoints": rows}
    gradients = call(f"{variant}_bwd", kept, checkpoint_every_n_tokens=every, **form)
    close(gradients, oracle(f"{variant}_bwd", backward), 1e-4)


def test_final_gradient_is_optional(variant, form):
    values = problem(variant, [70, 5])
    nothing = np.zeros_like(values["initial_state"])
    with_dO = with_gradients(values, final=False)
    found = call(f"{variant}_bwd", with_dO, **form)
    expected = call(f"{variant}_bwd", {**with_dO, "d_final_state": nothing}, **form)
    for port, array in found.items():
        same_bits(array, expected[port])


def test_the_same_call_twice(variant, form):
    values = with_gradients(problem(variant, [70, 5, 128]))
    one = Call(f"{variant}_bwd", values, batch_invariant=True, **form)
    first, second = one.results(), one.results()
    for port, array in first.items():
        same_bits(array, second[port])
