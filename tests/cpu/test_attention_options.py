"""Dropout, pages, cumulative lengths, tile masks and score functions of attention, beyond the conformance suite."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance import run_case
from conformance.attention_options import AttentionOptions, ScoreMod, ScoreModBackward

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type
from opgraph.ops import attention_backward_blocks, attention_blocks, threads
from opgraph.ops.philox import keep_mask, philox

FLOAT, INT32, INT64, UINT8 = data_type.FLOAT, data_type.INT32, data_type.INT64, data_type.UINT8
ONE = (1, 1, 1, 1)


@pytest.fixture(params=["as it is", "small blocks", "threads"])
def blocking(request, monkeypatch):
    """The same numbers must come out however the work is cut."""
    if request.param == "as it is":
        return
    for name, value in (("_SCORE_BYTES", 200), ("_RUN_BYTES", 200), ("_VECTOR", 3), ("_ROWS", 3), ("_LEAST_ROWS", 2)):
        monkeypatch.setattr(attention_blocks, name, value)
    monkeypatch.setattr(attention_backward_blocks, "_SCORE_BYTES", 200)
    monkeypatch.setattr(attention_backward_blocks, "_SMALL_PRODUCT", 150)
    if request.param == "threads":
        monkeypatch.setattr(threads, "usable_cores", lambda: 3)
        monkeypatch.setattr(attention_blocks, "_THREAD_PRODUCTS", 1)
        monkeypatch.setattr(attention_blocks, "_TASK_BLOCKS", 2)
        monkeypatch.setattr(attention_backward_blocks, "_THREAD_PRODUCTS", 1)


@pytest.mark.parametrize("case", [AttentionOptions(), ScoreMod()], ids=lambda case: case.id)
def test_however_the_work_is_cut(case, blocking):
    for problem in case.problems(FLOAT, np.random.default_rng(1)):
        if "block mask" not in problem.id:
            run_case(problem, "cpu", {"precision": "native"})


@pytest.mark.frameworks
def test_score_gradients_however_the_work_is_cut(torch, blocking):
    for problem in ScoreModBackward().problems(FLOAT, np.random.default_rng(1)):
        run_case(problem, "cpu", {"precision": "native"}, truth=problem.solve(torch))


# ---- the generator


@pytest.mark.parametrize("counter, key, right", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
])  # fmt: skip
def test_philox_known_answers(counter, key, right):
    assert tuple(int(word) for word in philox(counter, key)) == right


def test_keep_mask():
    heads = np.arange(6)
    whole = keep_mask(0.3, 11, 22, heads, range(0, 33), range(0, 45))
    assert abs(whole.mean() - 0.7) < 0.01
    part = keep_mask(0.3, 11, 22, heads[2:4], range(5, 20), range(7, 30))
    assert np.array_equal(part, whole[2:4, 5:20, 7:30])
    seen = {whole.tobytes()}
    for seed, offset in ((12, 22), (11, 23), (11 + (1 << 32), 22), (11, 22 + (1 << 40)), (-11, 22), (11, -22)):
        other = keep_mask(0.3, seed, offset, heads, range(0, 33), range(0, 45))
        assert abs((other == whole).mean() - 0.58) < 0.02  # as two independent masks agree
        seen.add(other.tobytes())
    assert len(seen) == 7
    assert keep_mask(0.0, 1, 2, heads, range(3), range(5)).all()
    assert not keep_mask(1 - 1e-12, 1, 2, heads, range(3), range(5)).any()


# ---- dropout by probability


def call(op: str, inputs: dict[str, Any], named: dict[str, Any], outputs: dict[str, Any], **options: Any) -> Any:
    """Runs one node: `named` options are (array, data type), `outputs` the dims of declared ones."""
    graph = opgraph.pygraph(io_data_type=FLOAT)
    tensors = {name: graph.tensor(array.shape, name=name) for name, array in inputs.items()}
    given = {name: graph.tensor(array.shape, data_type=kind, name=name) for name, (array, kind) in named.items()}
    made = {name: graph.tensor(dim, data_type=FLOAT, is_virtual=True, name=name) for name, dim in outputs.items()}
    if "mask" in given:
        parts = ["mask", "scale", *(["inverse"] if "inverse" in given else [])]
        options["dropout"] = tuple(given.pop(name) for name in parts)
    if "seed" in given:
        options["dropout"] = (options.pop("probability"), given.pop("seed"), given.pop("offset"))
    found = getattr(graph, op)(*tensors.values(), **given, **made, **options)
    names = ("dQ", "dK", "dV") if op == "sdpa_backward" else ("O", "Stats")
    results = {**dict(zip(names, found, strict=True)), **made}
    wanted = {name: tensor.set_output(True) for name, tensor in results.items() if tensor is not None}
    graph.build(engine="cpu")
    buffers = {name: np.full(tensor.dim, np.nan, np.float32) for name, tensor in wanted.items()}
    pack = {**inputs}
    pack.update({name: array for name, (array, _) in named.items()})
    graph.execute({**pack, **{wanted[name]: array for name, array in buffers.items()}})
    return buffers


def random(*dims: Any) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(dim, dtype=np.float32) for dim in dims]


def number(value: int) -> tuple[Any, data_type]:
    return np.full(ONE, value, np.int64), INT64


def test_dropout_forward_and_backward(blocking):
    q, k, v, grad = random((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8), (2, 4, 9, 8))
    inputs, full = {"q": q, "k": k, "v": v}, (2, 4, 9, 13)
    seeds = {"seed": number(-5), "offset": number(1 << 40)}
    options = {"attn_scale": 0.4, "use_causal_mask": True}
    forward = call("sdpa", inputs, seeds, {"rng_dump": full}, probability=0.4, generate_stats=True, **options)
    mask = forward.pop("rng_dump")
    assert set(np.unique(mask)) == {0, 1} and abs(mask.mean() - 0.6) < 0.06
    # The other form with that mask is the same operator.
    masked = {"mask": (mask, FLOAT), "scale": (np.full(ONE, 1 / 0.6, np.float32), FLOAT)}
    right = call("sdpa", inputs, masked, {}, generate_stats=True, **options)
    plain = call("sdpa", inputs, {}, {}, generate_stats=True, **options)
    np.testing.assert_allclose(forward["O"], right["O"], 1e-5, 1e-6)
    np.testing.assert_allclose(forward["Stats"], plain["Stats"], 1e-6, 1e-6)
    assert not np.allclose(forward["O"], plain["O"], atol=1e-2)

    inputs.update(o=forward["O"], dO=grad, stats=forward["Stats"])
    found = call("sdpa_backward", inputs, seeds, {"rng_dump": full}, probability=0.4, **options)
    assert np.array_equal(found.pop("rng_dump"), mask)
    masked["inverse"] = (np.full(ONE, 0.6, np.float32), FLOAT)
    right = call("sdpa_backward", inputs, masked, {}, **options)
    for name, array in found.items():
        np.testing.assert_allclose(array, right[name], 1e-4, 1e-5, err_msg=name)


def test_dropout_seeds_may_be_numbers():
    q, k, v = random(*[(1, 2, 5, 8)] * 3)
    inputs, full = {"q": q, "k": k, "v": v}, {"rng_dump": (1, 2, 5, 5)}
    right = call("sdpa", inputs, {"seed": number((1 << 53) + 1), "offset": number(2)}, full, probability=0.5)
    found = call("sdpa", inputs, {}, full, dropout=(0.5, (1 << 53) + 1, 2))
    assert np.array_equal(found["rng_dump"], right["rng_dump"]) and np.array_equal(found["O"], right["O"])


# ---- contents that do not fit


def int32(*values: int) -> tuple[Any, data_type]:
    return np.reshape(values, (-1, 1, 1, 1)).astype(np.int32), INT32


@pytest.mark.parametrize("q, kv", [((0, 2, 1), (0, 1, 2)), ((0, 1, 2), (0, 1, 6)), ((0, 4, 5), (0, 1, 2))])
def test_cumulative_lengths_out_of_range(q, kv):
    arrays = dict(zip("qkv", random((2, 1, 3, 8), (2, 1, 4, 8), (2, 1, 4, 8)), strict=True))
    lengths = {"cu_seq_len_q": int32(*q), "cu_seq_len_kv": int32(*kv)}
    with pytest.raises(ValueError, match="lengths are in range"):
        call("sdpa", arrays, lengths, {}, use_padding_mask=True)


@pytest.mark.parametrize("page", [-1, 3, 2**31 - 1])
def test_pages_that_do_not_exist(page):
    arrays = dict(zip("qkv", random((2, 1, 3, 8), (3, 1, 4, 8), (3, 1, 4, 8)), strict=True))
    table = np.array([0, 1, 2, page], np.int32).reshape(2, 1, 2, 1)
    named = {f"paged_attention_{side}_table": (table, INT32) for side in "kv"}
    named.update(seq_len_q=int32(3, 3), seq_len_kv=int32(8, 4))
    options = {"use_padding_mask": True, "paged_attention_max_seq_len_kv": 8}
    assert np.isfinite(call("sdpa", arrays, named, {}, **options)["O"]).all()  # the entry is beyond the length
    named["seq_len_kv"] = int32(8, 5)
    with pytest.raises(ValueError, match=f"0 to 2 at entry 1, page 1, given {page}"):
        call("sdpa", arrays, named, {}, **options)


def test_packed_page_tables_go_with_a_ragged_q():
    q, k, v = random((3, 1, 8), (3, 1, 4, 8), (3, 1, 4, 8))
    graph = opgraph.pygraph(io_data_type=FLOAT)
    at = {"starts": graph.tensor((3, 1, 1, 1), data_type=INT32), "pages": graph.tensor((3, 1, 1, 1), data_type=INT32)}
    at["q"] = graph.tensor((2, 1, 2, 8), ragged_offset=at["starts"], ragged_offset_multiplier=8)
    at["k"], at["v"] = graph.tensor((3, 1, 4, 8)), graph.tensor((3, 1, 4, 8))
    at["table"] = graph.tensor((2, 1, 2, 1), data_type=INT32, ragged_offset=at["pages"])
    at["n_q"], at["n_kv"] = (graph.tensor((2,), data_type=INT32) for _ in range(2))
    o, _ = graph.sdpa(
        at["q"], at["k"], at["v"], use_padding_mask=True, seq_len_q=at["n_q"], seq_len_kv=at["n_kv"],
        paged_attention_k_table=at["table"], paged_attention_v_table=at["table"], paged_attention_max_seq_len_kv=8,
    )  # fmt: skip
    o.set_output(True).set_ragged_offset(at["starts"]).set_ragged_offset_multiplier(8)
    graph.build(engine="cpu")
    out = np.full((3, 1, 8), np.nan, np.float32)
    values = {
        "starts": int32(0, 2, 3)[0], "pages": int32(0, 2, 3)[0], "q": q, "k": k, "v": v,
        "table": np.array([2, 0, 1], np.int32), "n_q": np.array([2, 1], np.int32), "n_kv": np.array([7, 3], np.int32),
    }  # fmt: skip
    graph.execute({**{at[name]: array for name, array in values.items()}, o: out})
    for rows, pages, length in ((slice(0, 2), [2, 0], 7), (slice(2, 3), [1], 3)):
        keys, held = (x[pages, 0].reshape(-1, 8)[:length] for x in (k, v))
        weights = np.exp(q[rows, 0] @ keys.T)
        np.testing.assert_allclose(out[rows, 0], weights / weights.sum(1, keepdims=True) @ held, 1e-5, 1e-5)


# ---- checks at validate()


class T(NamedTuple):
    """A tensor to declare."""

    dim: tuple[int, ...]
    dtype: Any = None
    ragged: bool = False


CUMULATIVE = {f"cu_seq_len_{side}": T((3, 1, 1, 1), INT64) for side in ("q", "kv")}
PADDED = {"use_padding_mask": True, **CUMULATIVE}
PAGES = {"k": (9, 2, 4, 16), "v": (9, 2, 4, 16)}
TABLE = T((2, 1, 2, 1), INT32)
TABLES = {"paged_attention_k_table": TABLE, "paged_attention_v_table": TABLE, **PAGES}


def declare(q: Any = (2, 4, 8, 16), k: Any = (2, 2, 8, 16), v: Any = (2, 2, 8, 16), **options: Any) -> Any:
    graph = opgraph.pygraph(io_data_type=data_type.HALF, compute_data_type=FLOAT)

    def made(value: Any) -> Any:
        if isinstance(value, T):
            offset = graph.tensor((value.dim[0] + 1, 1, 1, 1), data_type=INT32) if value.ragged else None
            return graph.tensor(value.dim, data_type=value.dtype, ragged_offset=offset)
        return tuple(made(item) for item in value) if isinstance(value, tuple) else value

    tensors = [made(value if isinstance(value, T) else T(value)) for value in (q, k, v)]
    return graph, graph.sdpa(*tensors, **{name: made(value) for name, value in options.items()})


@pytest.mark.parametrize("declared", [
    PADDED,
    {**PADDED, "cu_seq_len_q": T((3,), INT32)},
    {**PADDED, **TABLES},
    {**PADDED, **TABLES, "paged_attention_max_seq_len_kv": 7},
    {**PADDED, **TABLES, "v": (2, 2, 8, 16), "paged_attention_v_table": None},
    {"dropout": (0.1, 1, 2), "rng_dump": T((2, 4, 8, 8))},
    {"dropout": (T((1, 4, 8, 8), UINT8), T(ONE, FLOAT))},
    {"block_mask": T((2, 4, 1, 1), UINT8)},
    {**CUMULATIVE, "score_mod": lambda graph, score: score},
], ids=str)  # fmt: skip
def test_served(declared):
    graph, (o, _) = declare(**declared)
    graph.validate()
    assert o.dim == (2, 4, 8, 16)


@pytest.mark.parametrize("declared", [
    CUMULATIVE,
    {**PADDED, "seq_len_q": T((2, 1, 1, 1), INT32)},
    {"use_padding_mask": True, "cu_seq_len_q": CUMULATIVE["cu_seq_len_q"]},
    {**PADDED, "cu_seq_len_kv": T((2, 1, 1, 1), INT32)},
    {**PADDED, "cu_seq_len_kv": T((3, 1, 1, 1), FLOAT)},
    {**PADDED, **TABLES, "paged_attention_max_seq_len_kv": 9},
    {**PADDED, **TABLES, "paged_attention_k_table": T((2, 1, 3, 1), INT32)},
    {**PADDED, **TABLES, "paged_attention_k_table": T((2, 2, 2, 1), INT32)},
    {**PADDED, **TABLES, "paged_attention_v_table": T((2, 1, 2, 1), FLOAT)},
    {**PADDED, **TABLES, "v": (9, 2, 3, 16)},
    {"dropout": (1.0, 1, 2)},
    {"dropout": (-0.1, 1, 2)},
    {"dropout": (0.1, T((2, 1, 1, 1), INT64), T(ONE, INT64))},
    {"dropout": (0.1, T(ONE, FLOAT), T(ONE, INT64))},
    {"dropout": (T((1, 3, 8, 8)), T(ONE, FLOAT))},
    {"dropout": (T((1, 4, 8, 8)), T((1, 1, 1, 2), FLOAT))},
    {"rng_dump": T((2, 4, 8, 8))},
    {"block_mask": T((2, 4, 1, 2), UINT8)},
    {"block_mask": T((2, 4, 1, 1), INT32)},
    {"use_alibi_mask": True, "diagonal_band_right_bound": 0, "score_mod": lambda graph, score: score},
], ids=str)  # fmt: skip
def test_malformed(declared):
    with pytest.raises(ValueError, match="sdpa"):
        declare(**declared)[0].validate()


@pytest.mark.parametrize("declared", [
    TABLES,
    {**PADDED, "paged_attention_max_seq_len_kv": 8},
    {**PADDED, **TABLES, "q": T((2, 4, 8, 16), ragged=True)},
    {**PADDED, **TABLES, "k": T((9, 2, 4, 16), ragged=True)},
    {"dropout": (0.1, 1, 2), "use_causal_mask_bottom_right": True},
    {"dropout": (0.1, 1, 2), "rng_dump": T((2, 4, 8, 7))},
], ids=str)  # fmt: skip
def test_not_supported(declared):
    with pytest.raises(cudnnGraphNotSupportedError, match="sdpa"):
        declare(**declared)[0].validate()


# ---- score functions


class TestScoreMod:
    def graph(self, build: Any, kind: data_type = FLOAT) -> Any:
        """A built graph with this score function; its q, k, v and O by name."""
        graph = opgraph.pygraph(io_data_type=kind)
        at = {name: graph.tensor((1, 2, 5, 8), name=name) for name in "qkv"}
        at["O"] = graph.sdpa(*at.values(), score_mod=build)[0].set_output(True)
        return graph, at

    def run(self, graph: Any, at: Any, more: Any = None) -> Any:
        arrays = dict(zip("qkv", random(*[(1, 2, 5, 8)] * 3), strict=True))
        out = np.full((1, 2, 5, 8), np.nan, np.float32)
        graph.execute({**{at[name]: array for name, array in arrays.items()}, at["O"]: out, **(more or {})})
        return out

    def test_called_once_and_frees_nothing(self):
        calls = []

        def build(inner: Any, score: Any) -> Any:
            calls.append(score)
            return inner.mul(score, 2.0)

        graph, at = self.graph(build)
        graph.build(engine="cpu")
        twice = self.run(graph, at)
        assert len(calls) == 1 and np.array_equal(self.run(graph, at), twice)
        plain = opgraph.pygraph(io_data_type=FLOAT)
        tensors = {name: plain.tensor((1, 2, 5, 8), name=name) for name in "qkv"}
        tensors["O"] = plain.sdpa(*tensors.values(), attn_scale=2.0)[0].set_output(True)
        plain.build(engine="cpu")
        np.testing.assert_allclose(twice, self.run(plain, tensors), 1e-5, 1e-5)

    def test_captured_tensors_are_operands(self):
        """Trap 25: outer tensors, tensors declared in the callback, and results of other nodes."""
        made: dict[str, Any] = {}

        def build(inner: Any, score: Any) -> Any:
            made["inside"] = inner.tensor((1, 2, 1, 1), data_type=FLOAT, name="inside")
            return inner.add(inner.add(score, made["inside"]), made["virtual"])

        graph = opgraph.pygraph(io_data_type=FLOAT)
        made["outside"] = graph.tensor((1, 1, 1, 5), name="outside")
        made["virtual"] = graph.mul(made["outside"], made["outside"])
        at = {name: graph.tensor((1, 2, 5, 8), name=name) for name in "qkv"}
        at["O"] = graph.sdpa(*at.values(), score_mod=build)[0].set_output(True)
        graph.build(engine="cpu")
        inside, outside = np.ones((1, 2, 1, 1), np.float32), np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)
        found = self.run(graph, at, {made["inside"]: inside, "outside": outside})
        q, k, v = random(*[(1, 2, 5, 8)] * 3)
        weights = np.exp(q @ k.swapaxes(2, 3) + inside + outside**2)
        np.testing.assert_allclose(found, weights / weights.sum(-1, keepdims=True) @ v, 1e-4, 1e-5)
        with pytest.raises(ValueError, match="inside"):
            self.run(graph, at, {"outside": outside})

    def test_a_copy_and_the_key(self):
        graph, at = self.graph(lambda inner, score: inner.tanh(inner.mul(score, 0.5)))
        same, _ = self.graph(lambda inner, score: inner.tanh(inner.mul(score, 0.5)))
        other, _ = self.graph(lambda inner, score: inner.tanh(inner.mul(score, 0.25)))
        twin = copy.deepcopy(graph)
        for each in (graph, same, other, twin):
            each.build(engine="cpu")
        assert graph.key() == same.key() == twin.key() != other.key()
        named = {name: twin.find_tensor(tensor.uid) if hasattr(twin, "find_tensor") else tensor.uid
                 for name, tensor in at.items()}  # fmt: skip
        assert np.array_equal(self.run(twin, named), self.run(graph, at))

    def test_refused(self):
        outer = opgraph.pygraph(io_data_type=FLOAT)
        with pytest.raises(cudnnGraphNotSupportedError, match="pointwise"):
            self.graph(lambda inner, score: inner.reduction(score, opgraph.reduction_mode.MAX))
        with pytest.raises(AttributeError, match="tanhh"):
            self.graph(lambda inner, score: inner.tanhh(score))
        with pytest.raises(TypeError, match="score_mod"):
            self.graph(lambda inner, score: None)
        wide = outer.tensor((1, 1, 1, 5), name="wide")
        with pytest.raises(ValueError, match="another graph"):
            self.graph(lambda inner, score: inner.add(score, wide))

    @pytest.mark.parametrize("dim", [(1, 1, 1, 4), (2, 2, 5, 5), (1, 1, 1, 1, 5)])
    def test_extents_that_do_not_broadcast(self, dim):
        graph, _ = self.graph(lambda inner, score: inner.add(score, inner.tensor(dim)))
        with pytest.raises(ValueError, match="broadcast"):
            graph.validate()
