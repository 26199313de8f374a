"""The NumPy reference of `sdpa`, called directly: against the definition, against torch, and at its edges."""

from __future__ import annotations

import os
import threading
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest

import opgraph
from opgraph import _native, cudnnGraphNotSupportedError, data_type, diagonal_alignment
from opgraph.ops import OPS, Math, OutSpec, RefCall, attention_blocks, threads
from opgraph.ops.attention import alibi_slopes

FLOAT = data_type.FLOAT
BOTTOM_RIGHT = diagonal_alignment.BOTTOM_RIGHT
PARAMS = {
    "attn_scale": None,
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
PORTS = ("O", "Stats", "score_max", "score_sum_exp")


def sdpa(
    q: Any, k: Any, v: Any, *, precise: bool = True, view: Any = None, dtype: Any = np.float32, **options: Any
) -> dict[str, Any]:
    """All outputs of the reference. Options are attributes, or input ports where they are arrays."""
    inputs = {"q": q, "k": k, "v": v}
    inputs.update({port: value for port, value in options.items() if isinstance(value, np.ndarray)})
    params = {**PARAMS, **{name: value for name, value in options.items() if name not in inputs}}
    shape = (*q.shape[:3], v.shape[3])
    outputs = {"O": OutSpec(shape, FLOAT, np.dtype(dtype), view)}
    for port in PORTS[1:]:
        outputs[port] = OutSpec((*q.shape[:3], 1), FLOAT, np.dtype(np.float32))
    with np.errstate(all="raise"):  # the reference silences what it expects
        results = OPS["sdpa"].reference(RefCall(params, inputs, outputs, Math(FLOAT, precise)))
    assert {port: array.shape for port, array in results.items()} == {
        port: spec.shape for port, spec in outputs.items()
    }
    return results


def definition(q: Any, k: Any, v: Any, **options: Any) -> dict[str, Any]:
    """The formulas row by row, in float64."""
    options = {**PARAMS, **options}
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    out = np.zeros((batch, heads, rows, v.shape[3]))
    top = np.full((batch, heads, rows, 1), -np.inf)
    total = np.zeros((batch, heads, rows, 1))
    left = options["diagonal_band_left_bound"] or options["sliding_window_length"]
    right = options["diagonal_band_right_bound"]
    if options["use_causal_mask"] or options["use_causal_mask_bottom_right"]:
        right = 0
    bottom = options["diagonal_alignment"] is BOTTOM_RIGHT or options["use_causal_mask_bottom_right"]
    scale = options["attn_scale"]
    scale = 1.0 if scale is None else float(np.ravel(scale)[0])
    for b in range(batch):
        n_q = int(options["seq_len_q"].ravel()[b]) if "seq_len_q" in options else rows
        n_kv = int(options["seq_len_kv"].ravel()[b]) if "seq_len_kv" in options else keys
        delta = n_kv - n_q if bottom else 0
        for h in range(heads):
            kh, vh = h // (heads // k.shape[1]), h // (heads // v.shape[1])
            for i in range(n_q):
                seen = [
                    j
                    for j in range(n_kv)
                    if (right is None or j <= i + delta + right) and (left is None or j > i + delta - left)
                ]
                s = scale * (k[b, kh, seen].astype(np.float64) @ q[b, h, i].astype(np.float64))
                if "bias" in options:
                    s = s + np.broadcast_to(options["bias"], (batch, heads, rows, keys))[b, h, i, seen]
                if options["use_alibi_mask"]:
                    s = s + alibi_slopes(heads)[h] * (np.array(seen) - i)
                sink = options["sink_token"][0, h, 0, 0] if "sink_token" in options else -np.inf
                m = max([*s, sink])
                if m == -np.inf:
                    continue
                p = np.exp(s - m)
                top[b, h, i], total[b, h, i] = m, p.sum() + np.exp(sink - m)
                out[b, h, i] = p @ v[b, vh, seen] / total[b, h, i]
    with np.errstate(divide="ignore"):
        stats = top + np.log(total)
    if options["stats_use_log2"]:
        stats = stats * np.log2(np.e)
    return {"O": out, "Stats": stats, "score_max": top, "score_sum_exp": total}


def random(rng: Any, *shapes: Any) -> list[Any]:
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def int32(*values: int) -> Any:
    return np.array(values, np.int32).reshape(-1, 1, 1, 1)


def check(found: Any, right: Any, precise: bool) -> None:
    tolerance = 1e-12 if precise else 2e-5
    for port in PORTS:
        np.testing.assert_allclose(found[port], right[port], tolerance, tolerance, err_msg=port)


SHAPES = {  # q, k, v
    "one": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    "primes": ((2, 3, 7, 5), (2, 3, 11, 5), (2, 3, 11, 13)),
    "decode": ((3, 4, 1, 8), (3, 4, 37, 8), (3, 4, 37, 8)),
    "tall": ((1, 2, 19, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
    "one key head": ((2, 6, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4)),
    "groups of 3": ((2, 6, 17, 4), (2, 2, 23, 4), (2, 2, 23, 3)),
    "k and v heads": ((1, 12, 5, 4), (1, 4, 6, 4), (1, 6, 6, 4)),
    "no batch": ((0, 2, 3, 4), (0, 2, 5, 4), (0, 2, 5, 4)),
    "no heads": ((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)),
    "no rows": ((2, 2, 0, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    "no keys": ((2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 4)),
    "no channels": ((2, 2, 3, 0), (2, 2, 5, 0), (2, 2, 5, 4)),
    "no width": ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 0)),
}
BANDS = {
    "full": {},
    "causal": {"use_causal_mask": True},
    "causal, bottom right": {"use_causal_mask_bottom_right": True},
    "diagonal": {"diagonal_band_left_bound": 1, "diagonal_band_right_bound": 0},
    "left": {"diagonal_band_left_bound": 3},
    "right": {"diagonal_band_right_bound": 2},
    "both, bottom right": {
        "diagonal_band_left_bound": 4, "diagonal_band_right_bound": 1, "diagonal_alignment": BOTTOM_RIGHT,
    },
    "window": {"use_causal_mask": True, "sliding_window_length": 2},
}  # fmt: skip


@pytest.fixture(params=["as it is", "small blocks", "small products", "threads"])
def blocking(request, monkeypatch):
    """The same numbers must come out however the work is cut."""
    if request.param in ("small blocks", "threads"):
        for name, value in (
            ("_SCORE_BYTES", 200),
            ("_RUN_BYTES", 200),
            ("_VECTOR", 3),
            ("_ROWS", 3),
            ("_LEAST_ROWS", 2),
        ):
            monkeypatch.setattr(attention_blocks, name, value)
    if request.param == "threads":
        monkeypatch.setattr(threads, "usable_cores", lambda: 3)
        monkeypatch.setattr(attention_blocks, "_THREAD_PRODUCTS", 1)
        monkeypatch.setattr(attention_blocks, "_TASK_BLOCKS", 2)
    if request.param == "small products":
        monkeypatch.setattr(attention_blocks, "_FEW_ROWS", 2)
        monkeypatch.setattr(attention_blocks, "_SMALL_PRODUCT", 0)
        monkeypatch.setattr(attention_blocks, "_piece", lambda area: 4)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_bands(shape, band, blocking):
    rng = np.random.default_rng(len(shape) + 7 * len(band))
    q, k, v = random(rng, *SHAPES[shape])
    options = {**BANDS[band], "attn_scale": 0.4}
    right = definition(q, k, v, **options)
    check(sdpa(q, k, v, **options), right, True)
    check(sdpa(q, k, v, precise=False, **options), right, False)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("lengths", [
    ([7, 3, 0, 1], [11, 5, 4, 0]),
    ([0, 0, 0, 0], [11, 11, 11, 11]),
    ([7, 7, 7, 7], [0, 0, 0, 0]),
    ([5, 6, 7, 2], [2, 6, 11, 1]),
])  # fmt: skip
def test_padding(lengths, band, blocking):
    rng = np.random.default_rng(5)
    q, k, v = random(rng, (4, 6, 7, 3), (4, 2, 11, 3), (4, 6, 11, 2))
    options: dict[str, Any] = {
        **BANDS[band],
        "seq_len_q": int32(*lengths[0]),
        "seq_len_kv": int32(*lengths[1]),
    }
    right = definition(q, k, v, **options)
    for b, (n_q, n_kv) in enumerate(zip(*lengths, strict=True)):  # F30: whatever lies beyond the lengths
        q[b, :, n_q:], k[b, :, n_kv:], v[b, :, n_kv:] = np.nan, np.inf, np.nan
    check(sdpa(q, k, v, **options), right, True)
    check(sdpa(q, k, v, precise=False, **options), right, False)


@pytest.mark.parametrize("options", [
    {"bias": (2, 6, 7, 11)}, {"bias": (1, 6, 7, 11)}, {"bias": (2, 1, 1, 11)}, {"bias": (1, 1, 7, 1)},
    {"use_alibi_mask": True, "use_causal_mask": True},
    {"sink_token": (1, 6, 1, 1)},
    {"sink_token": (1, 6, 1, 1), "diagonal_band_right_bound": 0, "bias": (1, 1, 7, 11)},
    {"sink_token": (1, 6, 1, 1), "seq_len_q": int32(7, 2), "seq_len_kv": int32(0, 9)},
    {"use_alibi_mask": True, "use_causal_mask": True, "seq_len_q": int32(7, 2), "seq_len_kv": int32(3, 9)},
    {"attn_scale": np.full((1, 1, 1, 1), 0.3)},
    {"stats_use_log2": True},
], ids=str)  # fmt: skip
def test_options(options, blocking):
    rng = np.random.default_rng(11)
    q, k, v = random(rng, (2, 6, 7, 4), (2, 3, 11, 4), (2, 2, 11, 5))
    options = {name: random(rng, value)[0] if isinstance(value, tuple) else value for name, value in options.items()}
    right = definition(q, k, v, **options)
    check(sdpa(q, k, v, **options), right, True)
    check(sdpa(q, k, v, precise=False, **options), right, False)


def test_masked_bias_rows_are_zero():
    q, k, v = random(np.random.default_rng(1), *[(1, 2, 3, 4)] * 3)
    bias = np.zeros((1, 1, 3, 3), np.float32)
    bias[0, 0, 1] = -np.inf
    found = sdpa(q, k, v, bias=bias)
    assert not found["O"][0, :, 1].any() and (found["Stats"][0, :, 1] == -np.inf).all()
    assert np.isfinite(found["O"]).all() and np.isfinite(found["Stats"][0, :, [0, 2]]).all()


def test_nan_stays_in_its_row():
    q, k, v = random(np.random.default_rng(2), *[(1, 1, 5, 4)] * 3)
    right = sdpa(q, k, v)["O"]
    q[0, 0, 2, 1] = np.nan
    found = sdpa(q, k, v)["O"]
    assert np.isnan(found[0, 0, 2]).all()
    assert np.array_equal(np.delete(found, 2, 2), np.delete(right, 2, 2))


def test_scores_far_from_zero():
    q, k, v = random(np.random.default_rng(3), *[(1, 2, 6, 4)] * 3)
    for scale in (1e4, -1e4):
        right = definition(q, k, v, attn_scale=scale)
        check(sdpa(q, k, v, attn_scale=scale), right, True)
        found = sdpa(q, k, v, precise=False, attn_scale=scale)
        assert np.isfinite(found["O"]).all()
        np.testing.assert_allclose(found["score_max"], right["score_max"], 1e-5)


# ---- layouts and memory


def test_layouts_and_output_memory():
    rng = np.random.default_rng(4)
    qkv = random(rng, (2, 9, 3, 4, 8))[0]
    before = qkv.copy()
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    right = sdpa(*(np.ascontiguousarray(x) for x in (q, k, v)), precise=False)
    memory = np.full((2, 9, 4, 12), np.nan, np.float32)
    view = memory[..., 2:10].transpose(0, 2, 1, 3)
    found = sdpa(q, k, v, precise=False, view=view)
    assert found["O"] is view
    np.testing.assert_allclose(view, right["O"], 1e-6, 1e-6)
    assert np.isnan(memory[..., :2]).all() and np.isnan(memory[..., 10:]).all()
    assert np.array_equal(qkv, before)


def test_output_in_the_memory_of_an_input_is_not_used():
    q, k, v = random(np.random.default_rng(6), *[(2, 2, 8, 4)] * 3)
    right = sdpa(q, k, v, precise=False)["O"]
    for view in (q, k, v):
        before = view.copy()
        found = sdpa(q, k, v, precise=False, view=view)["O"]
        assert found is not view and np.array_equal(found, right) and np.array_equal(view, before)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_inputs_are_widened_once(name, ml_dtypes):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    q, k, v = (x.astype(dtype) for x in random(np.random.default_rng(7), *[(2, 2, 5, 4)] * 3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    check(sdpa(q, k, v), definition(*wide), True)
    check(sdpa(q, k, v, precise=False), definition(*wide), False)


def test_memory_is_linear_in_the_sequence():
    q, k, v = random(np.random.default_rng(8), *[(1, 1, 6000, 2)] * 3)
    for options in ({}, {"use_causal_mask": True}, {"diagonal_band_left_bound": 5}):
        tracemalloc.start()
        sdpa(q, k, v, precise=False, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20, options  # the scores alone would be 137 MiB


# ---- parts


@pytest.mark.parametrize("softmax_block", [attention_blocks.softmax_block, _native.softmax_block])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_block(softmax_block, dtype):
    scores = np.array([[1, 2, 3], [-np.inf, 5, -np.inf], [-np.inf] * 3, [np.nan, 1, 2], [-1e30, 0, 1e4]], dtype)
    row_max, row_sum = np.empty(5, dtype), np.empty(5, dtype)
    with np.errstate(all="ignore"):
        softmax_block(scores, row_max, row_sum)
    assert row_max[[0, 1, 2, 4]].tolist() == [3, 5, -np.inf, 1e4]
    np.testing.assert_allclose(scores[0], np.exp([-2, -1, 0]), 1e-6)
    np.testing.assert_allclose(row_sum[0], np.exp([-2, -1, 0]).sum(), 1e-6)
    assert scores[1].tolist() == [0, 1, 0] and row_sum[1] == 1
    assert not scores[2].any() and row_sum[2] == 0
    assert np.isnan(scores[3]).all() and np.isnan(row_sum[3])
    assert scores[4].tolist() == [0, 0, 1]


class TestThreads:
    @pytest.fixture(autouse=True)
    def cores(self, monkeypatch):
        monkeypatch.setattr(threads, "usable_cores", lambda: 4)

    @pytest.mark.parametrize("count, started", [(-1, 1), (0, 1), (1, 1), (3, 3), (9, 4)])
    def test_run_together(self, count, started):
        seen = []
        threads.run_together(lambda: seen.append(threading.get_ident()), count)
        assert len(seen) == started and threading.get_ident() in seen
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("opgraph-")]

    @pytest.mark.parametrize("here", [True, False])
    def test_an_exception_reaches_the_caller(self, here):
        caller = threading.get_ident()

        def work():
            if (threading.get_ident() == caller) == here:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            threads.run_together(work, 2)


def test_usable_cores(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = threads.usable_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)
    for text, right in (("1", 1), ("4096", cores), ("0", cores), ("many", cores)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert threads.usable_cores() == right
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert threads.usable_cores() == 1


def test_alibi_slopes():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8] and alibi_slopes(0) == []
    np.testing.assert_allclose(alibi_slopes(6)[:4], [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    np.testing.assert_allclose(alibi_slopes(6)[4:], [2.0**-1, 2.0**-3])


@pytest.mark.parametrize("port, lengths", [("seq_len_q", (8, 1)), ("seq_len_kv", (3, 12)), ("seq_len_q", (-1, 1))])
def test_lengths_out_of_range(port, lengths):
    q, k, v = random(np.random.default_rng(9), (2, 1, 7, 2), (2, 1, 11, 2), (2, 1, 11, 2))
    view = np.full((2, 1, 7, 2), 5, np.float32)
    given = {"seq_len_q": int32(1, 1), "seq_len_kv": int32(1, 1), port: int32(*lengths)}
    with pytest.raises(ValueError, match=port):
        sdpa(q, k, v, precise=False, view=view, **given)
    assert (view == 5).all()


# ---- against torch


@pytest.mark.frameworks
class TestAgainstTorch:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("shape", ["one", "primes", "decode", "tall", "groups of 3", "one key head"])
    def test_sdpa(self, torch, shape, causal):
        q, k, v = random(np.random.default_rng(10), *SHAPES[shape])
        wide = [torch.from_numpy(x).double() for x in (q, k, v)]
        right = torch.nn.functional.scaled_dot_product_attention(
            *wide, is_causal=causal, scale=0.3, enable_gqa=True
        ).numpy()
        np.testing.assert_allclose(sdpa(q, k, v, attn_scale=0.3, use_causal_mask=causal)["O"], right, 1e-12, 1e-12)
        native = sdpa(q, k, v, precise=False, attn_scale=0.3, use_causal_mask=causal)["O"]
        np.testing.assert_allclose(native, right, 1e-5, 1e-5)

    def test_padding_and_bias(self, torch):
        q, k, v = random(np.random.default_rng(12), (3, 2, 65, 16), (3, 2, 130, 16), (3, 2, 130, 16))
        bias = random(np.random.default_rng(13), (1, 2, 65, 130))[0]
        lengths = [130, 1, 77]
        mask = torch.from_numpy(np.where(np.arange(130) < np.reshape(lengths, (3, 1, 1, 1)), bias, -np.inf))
        wide = [torch.from_numpy(x).double() for x in (q, k, v)]
        right = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask.double(), scale=0.25).numpy()
        options = {
            "seq_len_q": int32(65, 65, 65),
            "seq_len_kv": int32(*lengths),
            "bias": bias,
            "attn_scale": 0.25,
        }
        np.testing.assert_allclose(sdpa(q, k, v, **options)["O"], right, 1e-12, 1e-12)
        np.testing.assert_allclose(sdpa(q, k, v, precise=False, **options)["O"], right, 1e-5, 1e-5)


# ---- checks at validate()


class T(NamedTuple):
    """A tensor to declare."""

    dim: tuple[int, ...]
    dtype: Any = None


LENGTHS = {port: T((2, 1, 1, 1), data_type.INT32) for port in ("seq_len_q", "seq_len_kv")}


class TestValidate:
    def declare(self, q=(2, 4, 8, 16), k=(2, 2, 8, 16), v=(2, 2, 8, 16), stride=None, **options):
        graph = opgraph.pygraph(io_data_type=data_type.HALF, compute_data_type=FLOAT)
        made = {
            name: graph.tensor(value.dim, data_type=value.dtype) if isinstance(value, T) else value
            for name, value in options.items()
        }
        o, stats = graph.sdpa(graph.tensor(q, stride), graph.tensor(k), graph.tensor(v), **made)
        return graph, o, stats

    def test_outputs(self):
        graph, o, stats = self.declare(v=(2, 4, 8, 24), generate_stats=True)
        graph.validate()
        assert (o.dim, o.stride) == ((2, 4, 8, 24), (768, 192, 24, 1))
        assert (stats.dim, stats.stride, stats.data_type) == ((2, 4, 8, 1), (32, 8, 1, 1), FLOAT)

    @pytest.mark.parametrize("flags, made", [
        ({}, False), ({"generate_stats": False}, False), ({"is_inference": True}, False),
        ({"is_inference": False}, True), ({"generate_stats": True, "is_inference": False}, True),
    ])  # fmt: skip
    def test_stats_flag(self, flags, made):
        assert (self.declare(**flags)[2] is not None) == made

    @pytest.mark.parametrize("declared", [
        {"q": (4, 8, 16)},
        {"q": (3, 4, 8, 16)},
        {"q": (2, 4, 8, 8)},
        {"v": (2, 2, 9, 16)},
        {"use_padding_mask": True},
        {"use_padding_mask": True, "seq_len_q": LENGTHS["seq_len_q"]},
        {**LENGTHS},
        {**LENGTHS, "use_padding_mask": True, "cu_seq_len_q": T((3, 1, 1, 1), data_type.INT32)},
        {"use_padding_mask": True, **LENGTHS, "seq_len_q": T((3, 1, 1, 1), data_type.INT32)},
        {"use_padding_mask": True, **LENGTHS, "seq_len_q": T((2, 1, 1, 1), FLOAT)},
        {"diagonal_band_right_bound": -1},
        {"diagonal_band_left_bound": 0},
        {"sliding_window_length": -2},
        {"sliding_window_length": 2, "diagonal_band_left_bound": 3},
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
        {"use_causal_mask": True, "diagonal_band_right_bound": 2},
        {"use_causal_mask": True, "score_mod": lambda graph, score: score},
        {"generate_stats": True, "is_inference": True},
        {"dropout": (1.0, 1, 2)},
        {"bias": T((1, 4, 8, 7))},
        {"bias": T((8, 8))},
        {"sink_token": T((1, 2, 1, 1), FLOAT)},
        {"attn_scale": T((1, 1, 1, 2), FLOAT)},
    ], ids=str)  # fmt: skip
    def test_malformed(self, declared):
        with pytest.raises(ValueError, match="sdpa"):
            self.declare(**declared)[0].validate()

    @pytest.mark.parametrize("declared", [
        {"k": (2, 3, 8, 16)},
        {"stride": (512, 128, 1, 8)},
        {"bias": T((1, 4, 8, 8), data_type.BOOLEAN)},
        {"use_alibi_mask": True},
        {"use_alibi_mask": True, "diagonal_band_right_bound": 1},
        {"q": (2, 4, 9, 16), "use_causal_mask_bottom_right": True},
        {"q": (2, 4, 9, 16), "diagonal_band_left_bound": 3},
        {"use_causal_mask_bottom_right": True, "bias": T((1, 4, 8, 8))},
        {"use_causal_mask_bottom_right": True, "use_alibi_mask": True},
        {"max_total_seq_len_q": 4},
        {"paged_attention_max_seq_len_kv": 8},
    ], ids=str)  # fmt: skip
    def test_not_supported(self, declared):
        with pytest.raises(cudnnGraphNotSupportedError, match="sdpa"):
            self.declare(**declared)[0].validate()

    def test_padding_lifts_the_limit_on_rows(self):
        padded = {**LENGTHS, "use_padding_mask": True, "q": (2, 4, 9, 16)}
        self.declare(**padded, use_causal_mask_bottom_right=True)[0].validate()
        self.declare(**padded, diagonal_band_left_bound=3)[0].validate()

    @pytest.mark.parametrize("option, value", [
        ("kv_mask", T((1, 1, 1, 8), FLOAT)),
        ("softmax_precision", FLOAT),
        ("attn_scale_prefolded", True),
    ], ids=str)  # fmt: skip
    def test_not_served_is_named(self, option, value):
        with pytest.raises(cudnnGraphNotSupportedError, match=option):
            self.declare(**{option: value})[0].validate()

    def test_ragged_needs_padding(self):
        graph = opgraph.pygraph(io_data_type=data_type.HALF)
        offset = graph.tensor([3, 1, 1, 1], data_type=data_type.INT32)
        q = graph.tensor([2, 1, 2, 8], ragged_offset=offset)
        graph.sdpa(q, graph.tensor([2, 1, 2, 8]), graph.tensor([2, 1, 2, 8]))
        with pytest.raises(cudnnGraphNotSupportedError, match="ragged"):
            graph.validate()

    def test_unknown_keyword_names_the_nearest(self):
        with pytest.raises(TypeError, match="use_causal_mask"):
            self.declare(use_casual_mask=True)

    def test_kinds(self):
        with pytest.raises(TypeError, match="diagonal_alignment"):
            self.declare(diagonal_alignment="TOP_LEFT")
        with pytest.raises(TypeError):
            self.declare(diagonal_band_left_bound=2.5)
        with pytest.raises(ValueError, match="dropout"):
            self.declare(dropout=0.5)
