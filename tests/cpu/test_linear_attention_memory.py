"""Gated linear attention: pools of states, buffers in place, strided and overridden operands, long names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.tolerances import relative_norm
from gated import VARIANTS, Call, call, close, problem, same_bits, with_gradients
from sums import refused

import opgraph
from opgraph import data_type

FLOAT = data_type.FLOAT


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


# ---- pools


def pooled(variant: str, rows: Any, pool: int = 7) -> dict[str, Any]:
    values = problem(variant, [3, 0, 70, 5])
    rng = np.random.default_rng(9)
    states = rng.standard_normal((pool, *values["initial_state"].shape[1:]))
    return {**values, "initial_state": states, "state_indices": np.array(rows)}


FORM = pytest.mark.parametrize("precision, dtype", [("float64", np.float64), ("native", np.float32)])


@FORM
@pytest.mark.parametrize("in_place", [False, True])
def test_pool(variant, precision, dtype, in_place):
    values = pooled(variant, [5, 2, 0, 3])
    made = Call(
        variant, values, precision=precision, dtype=dtype, output_final_state=True, overwrite_initial_state=in_place
    )
    buffers = made.buffers()
    pool = buffers["final_state"].view
    if in_place:
        pool[...] = made.arrays["initial_state"]
    before = pool.copy()
    made.graph.execute(made.pack(buffers, **({"initial_state": pool} if in_place else {})))
    plain = {port: x for port, x in values.items() if port != "state_indices"}
    plain["initial_state"] = values["initial_state"][[5, 2, 0, 3]]
    expected = call(variant, plain, precision=precision, dtype=dtype)
    same_bits(buffers["O"].view, expected["O"])
    same_bits(pool[[5, 2, 0, 3]], expected["final_state"])
    same_bits(pool[[1, 4, 6]], before[[1, 4, 6]])  # rows of no sequence are not touched
    buffers["final_state"].check()


def test_swapped_slots_agree(variant):
    one = pooled(variant, [5, 2, 0, 3])
    other = {**one, "initial_state": one["initial_state"][::-1].copy(), "state_indices": np.array([1, 4, 6, 3])}
    first, second = (call(variant, values) for values in (one, other))
    same_bits(first["O"], second["O"])
    same_bits(first["final_state"][[5, 2, 0, 3]], second["final_state"][[1, 4, 6, 3]])


@pytest.mark.parametrize("rows", [[0, 1, 2, 7], [0, -1, 2, 3]])
def test_rows_outside_of_the_pool(variant, rows):
    made = Call(variant, pooled(variant, [0, 1, 2, 3]), output_final_state=True)
    buffers = made.buffers()
    pack = made.pack(buffers, state_indices=np.array(rows, np.int32))
    refused(lambda: made.graph.execute(pack), "'state_indices' (uid", "0 to 6", error=opgraph.OperandError)
    for buffer in buffers.values():
        buffer.untouched()


# ---- buffers


@FORM
def test_final_state_over_the_initial_one(variant, precision, dtype):
    values = problem(variant, [70, 0, 3])
    expected = call(variant, values, precision=precision, dtype=dtype)
    options = {"output_final_state": True, "overwrite_initial_state": True, "precision": precision, "dtype": dtype}
    made = Call(variant, values, **options)
    state = made.arrays["initial_state"].copy()
    out = np.full(expected["O"].shape, np.nan, dtype)
    made.graph.execute(made.pack({"O": out, "final_state": state}, initial_state=state))
    same_bits(out, expected["O"])
    same_bits(state, expected["final_state"])


def test_output_over_an_input(variant):
    """O in the buffer of v, which later chunks and sequences still read."""
    values = problem(variant, [150, 9], (2, 2), 6, 6)
    expected = call(variant, values, precision="native", dtype=np.float32)
    made = Call(variant, values, precision="native", dtype=np.float32)
    shared = made.arrays["v"].copy()
    made.graph.execute(made.pack({"O": shared}, v=shared))
    same_bits(shared, expected["O"])


@FORM
@pytest.mark.parametrize("suffix", ["", "_bwd"])
def test_outputs_left_virtual_may_have_a_buffer(variant, precision, dtype, suffix):
    values = problem(variant, [70, 3])
    options: dict[str, Any] = {"precision": precision, "dtype": dtype}
    if suffix:
        values = with_gradients(values)
    else:
        options.update(output_final_state=True, checkpoint_every_n_tokens=64)
    expected = Call(variant + suffix, values, **options).results()
    made = Call(variant + suffix, values, virtual=True, **options)
    for wanted in (list(expected), list(expected)[:1], list(expected)[1:], []):
        buffers = {port: b for port, b in made.buffers().items() if port in wanted}
        made.graph.execute(made.pack(buffers))
        for port, buffer in buffers.items():
            close({port: buffer.view}, {port: expected[port]}, 1e-6)


def test_an_output_left_virtual_feeds_another_node():
    values = problem("gdn", [3, 2], (1, 1))
    graph = opgraph.pygraph(io_data_type=data_type.DOUBLE, compute_data_type=data_type.DOUBLE)
    arrays = {port: x if x.dtype.kind == "f" else x.astype(np.int32) for port, x in values.items()}
    tensors = {port: graph.tensor(x.shape, data_type=x.dtype, name=port) for port, x in arrays.items()}
    out, state, _ = graph.gdn(**tensors, output_final_state=True)
    twice = graph.mul(out, 2.0).set_output(True)
    graph.build(engine="cpu")
    pack = {tensors[port]: x for port, x in arrays.items()}
    result = np.full(values["v"].shape, np.nan)
    graph.execute({**pack, twice: result})
    expected = call("gdn", values)
    np.testing.assert_allclose(result, 2 * expected["O"], rtol=1e-12)
    held = np.full(values["v"].shape, np.nan)
    states = np.full(values["initial_state"].shape, np.nan)
    graph.execute({**pack, twice: result, out: held, state: states})
    np.testing.assert_allclose(2 * held, result)
    np.testing.assert_allclose(states, expected["final_state"], rtol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "head first", "channel first"])
@FORM
def test_strided_operands(variant, layout, precision, dtype):
    values = problem(variant, [64, 70], (2, 2), 8, 8)
    plain = call(variant, values, precision=precision, dtype=dtype)
    order = {"head first": (1, 0, 2), "channel first": (2, 0, 1)}
    if layout == "packed":
        whole = np.stack([values["q"], values["k"], values["v"]], 1).astype(dtype)
        views = {"q": whole[:, 0], "k": whole[:, 1], "v": whole[:, 2]}
    else:
        axes = order[layout]
        back = tuple(np.argsort(axes))
        views = {
            p: np.ascontiguousarray(values[p].astype(dtype).transpose(axes)).transpose(back) for p in ("q", "k", "v")
        }
    made = Call(variant, {**values, **views}, precision=precision, dtype=dtype, output_final_state=True)
    strides = {port: tensor.get_stride() for port, tensor in made.inputs.items() if port in views}
    assert all(list(strides[p]) == [s // views[p].itemsize for s in views[p].strides] for p in views)
    found = made.results()
    for port, array in plain.items():
        same_bits(found[port], array)


def test_state_of_other_orientation_is_refused(variant):
    made = Call(variant, problem(variant, [3], (1, 1), 3, 2))
    turned = np.zeros((1, 1, 3, 2))
    refused(lambda: made.results(initial_state=turned), "'initial_state'", "(1, 1, 2, 3)", "(1, 1, 3, 2)")


@FORM
def test_live_extents(variant, precision, dtype):
    """Buffers larger than what is live: 40 tokens of 90, 2 sequences of 5."""
    large = problem(variant, [20, 20, 20, 20, 10])
    made = Call(
        variant, large, precision=precision, dtype=dtype, output_final_state=True,
        graph={"is_override_shape_enabled": True},
    )  # fmt: skip
    ports = {**made.inputs, **made.outputs}
    live = {"cu_seqlens": 3, "initial_state": 2, "final_state": 2}
    dims_live = {port: (live.get(port, 40), *tensor.get_dim()[1:]) for port, tensor in ports.items()}
    buffers = made.buffers()
    made.graph.execute(
        made.pack(buffers, cu_seqlens=np.array([0, 7, 40, -1, -1, -1], np.int32)),
        override_uids=[t.uid for t in ports.values()],
        override_shapes=[dims_live[port] for port in ports],
        override_strides=[t.get_stride() for t in ports.values()],
    )
    small = {p: x[:40] for p, x in large.items() if p not in ("cu_seqlens", "initial_state")}
    small |= {"cu_seqlens": np.array([0, 7, 40]), "initial_state": large["initial_state"][:2]}
    expected = call(variant, small, precision=precision, dtype=dtype)
    for port, array in expected.items():
        same_bits(buffers[port].view[: len(array)], array)
        assert np.isnan(buffers[port].view[len(array) :]).all()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (1, 1)])
def test_unusual_widths(variant, sizes):
    for precision in ("native", "float64"):
        values = problem(variant, [70, 2], (1, 2), 4, 4)
        k, v = sizes
        cut = {"q": k, "k": k, "v": v, "w": v}
        values = {p: x[..., : cut[p]] if p in cut else x for p, x in values.items()}
        values["initial_state"] = values["initial_state"][:, :, :v, :k]
        if variant != "gdn":
            values["g"] = values["g"][..., :k]
        if variant == "gdn2":
            values["beta"] = values["beta"][..., :k]
        found = call(variant, values, precision=precision)
        assert found["O"].shape == (72, 2, v) and np.isfinite(found["O"]).all()
        gradients = call(f"{variant}_bwd", with_gradients(values), precision=precision)
        assert all(np.isfinite(array).all() for array in gradients.values())


def test_no_heads(variant):
    values = problem(variant, [3, 2], (1, 1))
    values = {p: x[:, :0] if p != "cu_seqlens" else x for p, x in values.items()}
    assert call(variant, values, precision="native")["O"].shape == (5, 0, 6)
    assert call(f"{variant}_bwd", with_gradients(values), precision="native")["dQ"].shape == (5, 0, 8)


def test_double_is_double_in_chunks(variant):
    values = with_gradients(problem(variant, [130], (1, 2)))
    how = {"precision": "native", "compute": data_type.DOUBLE}
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(call(variant, forward, **how), call(variant, forward), 1e-13)
    close(call(f"{variant}_bwd", values, **how), call(f"{variant}_bwd", values), 1e-12)


def test_double_states_pass_unrounded_through_float_arithmetic(variant):
    values = problem(variant, [0, 3])
    found = call(variant, values, precision="native", dtype=np.float64, compute=FLOAT)
    same_bits(found["final_state"][0], values["initial_state"][0])


# ---- names


def test_long_names(variant):
    long = {"gdn": "gated_delta_net", "gdn2": "gated_delta_net_v2", "kda": "kimi_delta_attention"}[variant]
    values = problem(variant, [3, 4])
    values["beta"] = np.random.default_rng(1).standard_normal(values["beta"].shape)
    short = call(variant, values, use_qk_l2norm=True, use_beta_sigmoid=True)
    found = call(long, values, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)
    for port, array in short.items():
        same_bits(found[port], array)
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel"):
        call(long, values, use_qk_l2norm=True)


@pytest.mark.parametrize("boundaries", [None, "given"])
def test_long_names_take_a_batch(variant, boundaries):
    long = {"gdn": "gated_delta_net", "gdn2": "gated_delta_net_v2", "kda": "kimi_delta_attention"}[variant]
    values = problem(variant, [5, 5, 5], (1, 2))
    expected = call(variant, values, precision="native", dtype=np.float32)
    arrays = {p: x.astype(np.float32) for p, x in values.items() if p != "cu_seqlens"}
    batch = {p: x if p == "initial_state" else x.reshape(3, 5, *x.shape[1:]) for p, x in arrays.items()}
    graph = opgraph.pygraph(io_data_type=FLOAT)
    tensors: dict[str, Any] = {p: graph.tensor(x.shape, name=p) for p, x in batch.items()}
    if boundaries:
        batch["cu_seqlens"] = np.array([0, 5, 10, 15], np.int64)
        tensors["cu_seqlens"] = graph.tensor((4,), data_type=data_type.INT64)
    out, state, rows = getattr(graph, long)(**tensors, output_final_state=True)
    assert rows is None
    out.set_output(True)
    state.set_output(True)
    graph.build(engine="cpu", knobs={"precision": "native"})
    assert out.get_dim() == [3, 5, 2, 6]
    found, kept = np.empty((3, 5, 2, 6), np.float32), np.empty((3, 2, 6, 8), np.float32)
    graph.execute({tensors[p]: x for p, x in batch.items()} | {out: found, state: kept})
    same_bits(found.reshape(15, 2, 6), expected["O"])
    same_bits(kept, expected["final_state"])


def test_arrays_as_arguments():
    values = problem("gdn", [3, 2], (1, 1))
    arrays = {p: x.astype(np.float32 if x.dtype.kind == "f" else np.int32) for p, x in values.items()}
    graph = opgraph.pygraph(io_data_type=FLOAT)
    out = graph.gdn(**arrays)[0].set_output(True)
    graph.build(engine="cpu")
    found = np.empty(out.get_dim(), np.float32)
    graph.execute({out: found})
    assert relative_norm(found, call("gdn", values)["O"]) < 1e-6
