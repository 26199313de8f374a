"""The NumPy reference of `sdpa_backward`: cut in other ways, at its edges, and the checks of `validate()`.

Its numbers are checked by the conformance suite, against torch's autograd.
"""

from __future__ import annotations

import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance import run_case
from conformance.attention_backward import AttentionBackward, Setting, settings

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, diagonal_alignment
from opgraph.ops import OPS, Math, OutSpec, RefCall, attention_backward_blocks, threads

FLOAT, INT64 = data_type.FLOAT, data_type.INT64
GIVEN = list(settings(np.random.default_rng(0)))
PARAMS = {
    "attn_scale": 0.5,
    "use_causal_mask": False,
    "use_causal_mask_bottom_right": False,
    "sliding_window_length": None,
    "diagonal_alignment": diagonal_alignment.TOP_LEFT,
    "diagonal_band_left_bound": None,
    "diagonal_band_right_bound": None,
    "use_alibi_mask": False,
    "stats_use_log2": False,
    "dropout_probability": None,
    "score_mod": None,
}


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backward_blocks, "_SCORE_BYTES", 200)
    monkeypatch.setattr(attention_backward_blocks, "_SMALL_PRODUCT", 150)


def use_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: count)
    monkeypatch.setattr(attention_backward_blocks, "_THREAD_PRODUCTS", 1)


def backward(inputs: dict[str, Any], **params: Any) -> dict[str, Any]:
    """The gradients of the reference in float32."""
    outputs = {f"d{port.upper()}": OutSpec(inputs[port].shape, FLOAT, np.dtype(np.float32)) for port in "qkv"}
    with np.errstate(all="raise"):  # the reference silences what it expects
        return OPS["sdpa_backward"].reference(RefCall({**PARAMS, **params}, inputs, outputs, Math(FLOAT)))


@pytest.mark.parametrize("several", [False, True], ids=["one thread", "threads"])
@pytest.mark.parametrize("given", GIVEN, ids=[name for name, _, _ in GIVEN])
def test_however_the_work_is_cut(given, several, monkeypatch):
    name, setting, extra = given
    cut_small(monkeypatch)
    if several:
        use_threads(monkeypatch, 3)
    problem = AttentionBackward().problem(name, np.random.default_rng(3), FLOAT, setting, extra)
    run_case(problem, "cpu", {"precision": "native"})


def random_inputs(batch: int, heads: int, rows: int, width: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    names = ("q", "k", "v", "o", "dO")
    inputs = {name: rng.standard_normal((batch, heads, rows, width), dtype=np.float32) for name in names}
    return {**inputs, "stats": np.full((batch, heads, rows, 1), 3, np.float32)}


def test_threads_do_not_change_a_bit(monkeypatch):
    inputs = random_inputs(2, 6, 40, 8)
    cut_small(monkeypatch)
    found = []
    for count in (1, 4):
        use_threads(monkeypatch, count)
        found.append(backward(inputs, use_causal_mask=True))
    for port, array in found[0].items():
        assert np.array_equal(array, found[1][port]), port


def test_memory_is_linear_in_the_sequence():
    inputs = random_inputs(1, 1, 6000, 2)
    for options in ({}, {"use_causal_mask": True}, {"diagonal_band_left_bound": 5, "diagonal_band_right_bound": 0}):
        tracemalloc.start()
        backward(inputs, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20, options  # the scores alone would be 137 MiB


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_at_all(shape):
    found = backward(random_inputs(*shape))
    assert all(array.shape == shape for array in found.values())


def test_nan_stays_where_it_reaches():
    inputs = random_inputs(1, 2, 6, 4)
    inputs["dO"][0, 1, 2] = np.nan
    found = backward(inputs)
    assert np.isnan(found["dQ"][0, 1, 2]).all() and np.isfinite(np.delete(found["dQ"][0, 1], 2, 0)).all()
    assert all(np.isfinite(array[0, 0]).all() for array in found.values())


# ---- checks at validate()


class T(NamedTuple):
    """A tensor to declare."""

    dim: tuple[int, ...]
    dtype: Any = None


LENGTHS = {port: T((2, 1, 1, 1), data_type.INT32) for port in ("seq_len_q", "seq_len_kv")}
SINK = T((1, 4, 1, 1), FLOAT)


def declare(
    q: Any = (2, 4, 8, 16), k: Any = (2, 2, 8, 16), v: Any = (2, 2, 8, 24), o: Any = None, dO: Any = None,
    stats: Any = None, stride: Any = None, **options: Any,
) -> Any:  # fmt: skip
    graph = opgraph.pygraph(io_data_type=data_type.HALF, compute_data_type=FLOAT)

    def made(value: Any) -> Any:
        if isinstance(value, tuple) and not isinstance(value, T):
            return tuple(made(item) for item in value)
        return graph.tensor(value.dim, data_type=value.dtype) if isinstance(value, T) else value

    row = (*q[:3], v[-1])
    tensors = [graph.tensor(q, stride), graph.tensor(k), graph.tensor(v), graph.tensor(o or row)]
    tensors += [graph.tensor(dO or row), made(stats or T((*q[:3], 1), FLOAT))]
    return graph, graph.sdpa_backward(*tensors, **{name: made(value) for name, value in options.items()})


class TestValidate:
    def test_outputs(self):
        graph, (dq, dk, dv) = declare(bias=T((1, 4, 8, 8)), dBias=T((1, 4, 8, 8)), sink_token=SINK, dSink_token=SINK)
        graph.validate()
        assert [t.dim for t in (dq, dk, dv)] == [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 24)]
        assert dk.stride == (256, 128, 16, 1) and graph.scaled_dot_product_flash_attention_backward

    @pytest.mark.parametrize("declared", [
        {"q": (4, 8, 16)},
        {"o": (2, 4, 8, 16)},
        {"dO": (2, 4, 8, 16)},
        {"stats": T((2, 4, 8, 8), FLOAT)},
        {"use_padding_mask": True},
        {**LENGTHS},
        {"diagonal_band_left_bound": 0},
        {"diagonal_band_right_bound": -1},
        {"dBias": T((1, 4, 8, 8))},
        {"dSink_token": SINK},
        {"sink_token": T((1, 2, 1, 1), FLOAT)},
        {"bias": T((1, 4, 8, 7))},
        {"dropout": (1.0, 1, 2)},
        {"dropout": (T((1, 1, 8, 7)), T((1, 1, 1, 1)), T((1, 1, 1, 1)))},
        {"rng_dump": T((2, 4, 8, 8))},
    ], ids=str)  # fmt: skip
    def test_malformed(self, declared):
        with pytest.raises(ValueError, match="sdpa_backward"):
            declare(**declared)[0].validate()

    @pytest.mark.parametrize("declared", [
        {"k": (2, 3, 8, 16)},
        {"stride": (512, 128, 1, 8)},
        {"stats": T((2, 4, 8, 1), data_type.HALF)},
        {"q": (2, 4, 1, 16), "k": (2, 4, 1, 16), "v": (2, 4, 1, 16)},
        {"bias": T((1, 4, 8, 8), data_type.BOOLEAN)},
        {"bias": T((1, 4, 8, 8)), "dBias": T((1, 1, 8, 8))},
        {"use_alibi_mask": True},
        {"q": (2, 4, 9, 16), "use_causal_mask_bottom_right": True},
        {"q": (2, 4, 9, 16), "diagonal_band_left_bound": 3},
        {"use_causal_mask_bottom_right": True, "bias": T((1, 4, 8, 8))},
        {"sink_token": SINK, "dSink_token": T((1, 4, 1, 1), data_type.HALF)},
        {"max_total_seq_len_kv": 4},
        {"kv_mask": T((1, 1, 1, 8), FLOAT)},
        {"attn_scale_prefolded": True},
    ], ids=str)  # fmt: skip
    def test_not_supported(self, declared):
        with pytest.raises(cudnnGraphNotSupportedError, match="sdpa_backward"):
            declare(**declared)[0].validate()

    def test_kinds(self):
        for wrong in (
            {"cu_seq_len_q": None}, {"generate_stats": True}, {"use_casual_mask": True}, {"diagonal_alignment": 1}
        ):  # fmt: skip
            with pytest.raises(TypeError, match="sdpa_backward"):
                declare(**wrong)
        with pytest.raises(ValueError, match="scale_inverse"):
            declare(dropout=(T((1, 1, 8, 8)), T((1, 1, 1, 1))))

    def test_gradients_end_in_stride_1(self):
        graph, (dq, _, _) = declare()
        dq.set_dim((2, 4, 8, 16)).set_stride((512, 128, 1, 8))
        with pytest.raises(cudnnGraphNotSupportedError, match="last stride"):
            graph.validate()


def test_lengths_out_of_range_write_nothing():
    graph = opgraph.pygraph(io_data_type=FLOAT)
    tensors = [graph.tensor((2, 1, 3, w)) for w in (4, 4, 4, 4, 4, 1)]
    lengths = [graph.tensor((2, 1, 1, 1), data_type=data_type.INT32) for _ in range(2)]
    made = graph.sdpa_backward(*tensors, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1])
    outputs = {t.set_output(True): np.full((2, 1, 3, 4), 5, np.float32) for t in made}
    graph.build()
    pack = {t: np.ones(t.dim, np.float32) for t in tensors}
    for tensor, values in zip(lengths, ([1, 3], [3, 4]), strict=True):
        pack[tensor] = np.reshape(values, (2, 1, 1, 1)).astype(np.int32)
    with pytest.raises(ValueError, match=r"0 to 3 at entry 1, given 4"):
        graph.execute({**pack, **outputs})
    assert all((array == 5).all() for array in outputs.values())


def test_a_setting_sees_what_the_operator_sees():
    """The truth of the suite, differentiated numerically once: it stands without torch too."""
    setting = Setting((1, 2, 3, 8), (1, 3), bias=(1, 1, 3, 3), sink=True, scale=0.4, band={"right": 0})
    rng = np.random.default_rng(7)
    dims = {"q": setting.q, "k": setting.k, "v": setting.v, "dO": setting.o, "bias": (1, 1, 3, 3), "sink": (1, 2, 1, 1)}
    at = {name: rng.standard_normal(dim) for name, dim in dims.items()}
    made = setting.forward(np, at)
    found = setting.backward({**at, "o": made["O"], "stats": made["Stats"]})
    for name, port in (("q", "dQ"), ("k", "dK"), ("v", "dV"), ("bias", "dBias"), ("sink", "dSink")):
        right = np.zeros(at[name].shape)
        for place in np.ndindex(right.shape):
            moved = at[name].copy()
            values = []
            for step in (1e-6, -1e-6):
                moved[place] = at[name][place] + step
                values.append((setting.forward(np, {**at, name: moved})["O"] * at["dO"]).sum())
            right[place] = (values[0] - values[1]) / 2e-6
        np.testing.assert_allclose(found[port], right, 1e-6, 1e-7, err_msg=port)
