"""Attention on FP8 data on the CPU engine: blocks, saturation, NaN, lengths, packed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance import run_case
from conformance.attention_fp8 import AttentionFp8, AttentionFp8Backward

import opgraph
from opgraph import data_type
from opgraph.ops import attention_heads

D = data_type


@pytest.mark.parametrize("budget", [64, 1 << 10, 1 << 13])
@pytest.mark.parametrize("case", [AttentionFp8(), AttentionFp8Backward()], ids=lambda case: case.id)
def test_blocks_of_any_size_give_the_answer(case, budget, monkeypatch, ml_dtypes):
    monkeypatch.setattr(attention_heads, "_SCORE_BYTES", budget)
    for problem in case.problems(D.FP8_E4M3, np.random.default_rng(budget)):
        if any(word in problem.id for word in ("primes", "grouped", "longer", "window", "padding", "FLOAT")):
            run_case(problem, "cpu", {"precision": "float64"})


class Plain:
    """One graph with FLOAT O and all scales 1 unless given; q, k and v from arrays."""

    def __init__(self, batch: int = 1, rows: int = 2, keys: int = 3, **options: Any) -> None:
        import ml_dtypes

        self.type = np.dtype(ml_dtypes.float8_e4m3fn)
        graph = self.graph = opgraph.pygraph(io_data_type=D.FP8_E4M3, compute_data_type=D.FLOAT)
        scale_s, padded = options.pop("scale_s", 1), options.pop("padded", False)
        dims = {"q": [batch, 1, rows, 16], "k": [batch, 1, keys, 16], "v": [batch, 1, keys, 16]}
        self.inputs = {name: graph.tensor(dim, name=name) for name, dim in dims.items()}
        self.lengths: dict[str, Any] = {}
        if padded:
            self.lengths = {
                name: graph.tensor([batch, 1, 1, 1], data_type=D.INT32, name=name)
                for name in ("seq_len_q", "seq_len_kv")
            }
        self.outputs = graph.sdpa_fp8(
            *self.inputs.values(), 1, 1, 1, 1 / scale_s, scale_s, 1,
            generate_stats=True, use_padding_mask=padded, **self.lengths, **options,
        )  # fmt: skip
        for out in self.outputs:
            out.set_output(True).set_data_type(D.FLOAT)
        graph.build(engine="cpu")

    def __call__(self, q: Any = 1.0, k: Any = 1.0, v: Any = 1.0, **lengths: Any) -> list[Any]:
        pack: dict[Any, Any] = {}
        for tensor, values in zip(self.inputs.values(), (q, k, v), strict=True):
            pack[tensor] = np.broadcast_to(np.asarray(values, np.float32), tensor.get_dim()).astype(self.type)
        for name, values in lengths.items():
            pack[self.lengths[name]] = np.array(values, np.int32).reshape(-1, 1, 1, 1)
        made = [np.full(out.get_dim(), np.nan, np.float32) for out in self.outputs]
        self.written = made
        self.graph.execute({**pack, **dict(zip(self.outputs, made, strict=True))})
        return made


def test_probabilities_saturate(ml_dtypes):
    o, stats, top_s, top_o = Plain(keys=1, scale_s=1024.0)()  # P = 1, held as 448 of 1024
    assert (o == np.float32(448 / 1024)).all() and top_s == 1 and top_o == o[0, 0, 0, 0]
    assert (stats == 16).all()


def test_small_probabilities_are_lost_without_a_scale(ml_dtypes):
    one = np.zeros((1, 1, 3, 16), np.float32)
    one[0, 0, 0] = 1
    flat = Plain(scale_s=1.0)(k=one / 2, v=1 - one)[0]  # the others have e^-8 of it
    fine = Plain(scale_s=448.0)(k=one / 2, v=1 - one)[0]
    assert (flat == 0).all() and (fine > 0).all()


def test_nan_reaches_its_row_and_the_maxima(ml_dtypes):
    q = np.ones((1, 1, 2, 16), np.float32)
    q[0, 0, 1, 0] = np.nan
    o, stats, top_s, top_o = Plain()(q=q)
    assert np.isfinite(o[0, 0, 0]).all() and np.isnan(o[0, 0, 1]).all()
    assert np.isfinite(stats[0, 0, 0]) and np.isnan(stats[0, 0, 1]) and np.isnan(top_s) and np.isnan(top_o)


def test_what_lies_beyond_the_lengths_is_not_read(ml_dtypes):
    plain = Plain(batch=2, padded=True)
    values = np.ones((2, 1, 3, 16), np.float32)
    values[0, 0, 2:], values[1] = np.nan, np.nan
    q = np.ones((2, 1, 2, 16), np.float32)
    q[0, 0, 1] = np.nan
    o, stats, top_s, top_o = plain(q, values, values, seq_len_q=[1, 2], seq_len_kv=[2, 0])
    assert (o[0, 0, 0] == 1).all() and (o[0, 0, 1] == 0).all() and (o[1] == 0).all()
    assert np.isneginf(stats[0, 0, 1]) and np.isneginf(stats[1]).all()
    assert top_s == 0.5 and top_o == 1


@pytest.mark.parametrize("lengths", [([1, 3], [2, 0]), ([1, -1], [2, 0]), ([1, 2], [2, 4])])
def test_lengths_out_of_range(lengths, ml_dtypes):
    plain = Plain(batch=2, padded=True)
    with pytest.raises(ValueError, match="at entry 1"):
        plain(seq_len_q=lengths[0], seq_len_kv=lengths[1])
    assert all(np.isnan(each).all() for each in plain.written)


def test_packed_rows(ml_dtypes):
    rng = np.random.default_rng(3)
    kind = np.dtype(ml_dtypes.float8_e4m3fn)
    len_q, len_kv = [3, 0, 2], [4, 2, 1]
    graph = opgraph.pygraph(io_data_type=D.FP8_E4M3, compute_data_type=D.FLOAT)
    offsets = {side: graph.tensor([4, 1, 1, 1], data_type=D.INT32) for side in ("q", "kv")}
    lengths = {side: graph.tensor([3, 1, 1, 1], data_type=D.INT32) for side in ("q", "kv")}
    inputs = {
        name: graph.tensor([3, 2, most, 16], [most * 32, 16, 32, 1], name=name, ragged_offset=offsets[side],
                           ragged_offset_multiplier=32)
        for name, side, most in (("q", "q", 3), ("k", "kv", 4), ("v", "kv", 4))
    }  # fmt: skip
    o, _, top_s, top_o = graph.sdpa_fp8(
        *inputs.values(), 1, 1, 1, 1 / 448, 448, 1, attn_scale=0.25, use_padding_mask=True,
        seq_len_q=lengths["q"], seq_len_kv=lengths["kv"],
    )  # fmt: skip
    o.set_output(True).set_data_type(D.FLOAT).set_dim([3, 2, 3, 16]).set_stride([96, 16, 32, 1])
    o.set_ragged_offset(offsets["q"]).set_ragged_offset_multiplier(32)
    top_s.set_output(True)
    top_o.set_output(True)
    graph.build(engine="cpu", knobs={"precision": "float64"})
    q, k, v = (rng.standard_normal((n, 2, 16)).astype(kind) for n in (5, 7, 7))
    out, tops = np.full((5, 2, 16), np.nan, np.float32), [np.empty((1, 1, 1, 1), np.float32) for _ in range(2)]
    starts = {side: np.cumsum([0, *n]) for side, n in (("q", len_q), ("kv", len_kv))}
    pack: dict[Any, Any] = dict(zip(inputs.values(), (q, k, v), strict=True))
    for side, n in (("q", len_q), ("kv", len_kv)):
        pack[offsets[side]] = starts[side].astype(np.int32).reshape(-1, 1, 1, 1)
        pack[lengths[side]] = np.array(n, np.int32).reshape(-1, 1, 1, 1)
    graph.execute({**pack, o: out, top_s: tops[0], top_o: tops[1]})
    largest = 0.0
    for b in range(3):
        rows, keys = (slice(starts[side][b], starts[side][b + 1]) for side in ("q", "kv"))
        scores = np.einsum("ihd,jhd->hij", q[rows].astype(float), k[keys].astype(float)) / 4
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        held = (chances * 448).astype(kind).astype(float) / 448
        np.testing.assert_allclose(out[rows], np.einsum("hij,jhd->ihd", held, v[keys].astype(float)), 1e-6, 1e-6)
        largest = max(largest, chances.max(initial=0))
    np.testing.assert_allclose(tops[0].item(), largest, 1e-6)
    np.testing.assert_allclose(tops[1].item(), np.abs(out).max(), 1e-6)
