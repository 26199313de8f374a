"""Field cases F29 to F31, about the lengths and layouts of attention: head dim 1, scale 1, keys 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import data_type

FLOAT, INT32, INT64 = data_type.FLOAT, data_type.INT32, data_type.INT64
PRECISIONS = pytest.mark.parametrize("precision", ["native", "float64"])


def column(values: Sequence[float], rows: int, kind: Any = np.float32) -> Any:
    """[batch, 1, rows, 1] of the values in order."""
    return np.array(values, kind).reshape(-1, 1, rows, 1)


def attend(
    precision: str, q: Any, k: Any, v: Any, q_lengths: Sequence[int], kv_lengths: Sequence[int], grad: Any = None
) -> tuple[Any, ...]:
    """O and Stats, and dQ, dK and dV for the gradient `grad` of O, in buffers that start as NaN."""
    lengths = {
        name: column(values, 1, np.int32)
        for name, values in (("seq_len_q", q_lengths), ("seq_len_kv", kv_lengths))
    }
    found = _run(precision, "sdpa", {"q": q, "k": k, "v": v}, lengths, ((*q.shape[:3], v.shape[3]), (*q.shape[:3], 1)))
    if grad is None:
        return found
    held = {"q": q, "k": k, "v": v, "o": found[0], "dO": grad, "stats": found[1]}
    return found + _run(precision, "sdpa_backward", held, lengths, (q.shape, k.shape, v.shape))


def _run(
    precision: str, op: str, inputs: Mapping[str, Any], lengths: Mapping[str, Any], dims: Sequence[Any]
) -> tuple[Any, ...]:
    graph = opgraph.pygraph(io_data_type=FLOAT)
    tensors = {name: graph.tensor(array.shape, name=name) for name, array in inputs.items()}
    named = {name: graph.tensor(array.shape, data_type=INT32, name=name) for name, array in lengths.items()}
    stats = {"generate_stats": True} if op == "sdpa" else {}
    made = getattr(graph, op)(*tensors.values(), use_padding_mask=True, **named, **stats)
    graph_outputs = [tensor.set_output(True) for tensor in made]
    graph.build(engine="cpu", knobs={"precision": precision})
    outputs = tuple(np.full(dim, np.nan, np.float32) for dim in dims)
    pack = {tensors[name]: array for name, array in inputs.items()}
    pack.update({named[name]: array for name, array in lengths.items()})
    graph.execute({**pack, **dict(zip(graph_outputs, outputs, strict=True))})
    return outputs


# ---- F29: zero-length sequences


@PRECISIONS
class TestF29ZeroLengthSequences:
    def run(self, precision: str, q_lengths: Sequence[int], kv_lengths: Sequence[int], values: Any) -> Any:
        """O and Stats of the valid rows; the others and all gradients are checked here."""
        batch, rows, keys = len(q_lengths), max(*q_lengths, 1), max(*kv_lengths, 2)
        v = np.full((batch, 1, keys, 1), np.nan, np.float32)
        left = iter(values)
        for b, length in enumerate(kv_lengths):
            v[b, 0, :length, 0] = [next(left) for _ in range(length)]
        q, k = np.ones((batch, 1, rows, 1), np.float32), np.zeros((batch, 1, keys, 1), np.float32)
        o, stats, dq, dk, dv = attend(precision, q, k, v, q_lengths, kv_lengths, np.ones_like(q))
        used = (np.arange(rows) < np.array(q_lengths)[:, None])[:, None, :, None]
        seen = (np.arange(keys) < np.array(kv_lengths)[:, None])[:, None, :, None]
        assert not o[~used].any() and (stats[~used] == -np.inf).all()
        assert np.isfinite(dq).all() and not dq.any()  # the keys are 0
        for grad in (dk, dv):
            assert np.isfinite(grad).all() and not grad[~seen].any()
        for b, (n_q, n_kv) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
            assert dv[b].sum() == pytest.approx(n_q if n_kv else 0)  # each row gives its weights away
        return o[used].tolist(), stats[used].tolist()

    def test_no_keys(self, precision):
        assert self.run(precision, [1], [0], []) == ([0], [-np.inf])

    def test_mixed_lengths(self, precision):
        assert self.run(precision, [0, 1, 1, 0], [0, 2, 4, 3], range(9))[0] == [0.5, 3.5]

    def test_an_entry_without_rows(self, precision):
        assert self.run(precision, [1, 0, 1], [1, 2, 1], [10, 20, 30, 40])[0] == [10, 40]


# ---- F30: garbage beyond the valid length


@PRECISIONS
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
class TestF30GarbageBeyondTheLength:
    def test_keys_and_values(self, precision, garbage):
        q, k, v = column([1], 1), column([0, 0, garbage], 3), column([1, 3, garbage], 3)
        o, stats, dq, dk, dv = attend(precision, q, k, v, [1], [2], column([1], 1))
        assert o.ravel().tolist() == [2] and stats.ravel() == pytest.approx([0.693147])
        assert dq.ravel().tolist() == [0]
        assert dk.ravel() == pytest.approx([-0.5, 0.5, 0]) and dv.ravel() == pytest.approx([0.5, 0.5, 0])

    def test_query_rows(self, precision, garbage):
        q, k, v = column([1, garbage], 2), column([0, 0, garbage], 3), column([1, 3, garbage], 3)
        o, stats, dq, dk, dv = attend(precision, q, k, v, [1], [2], column([1, garbage], 2))
        assert o.ravel().tolist() == [2, 0]
        assert stats.ravel() == pytest.approx([0.693147, -np.inf])
        assert dq.ravel().tolist() == [0, 0]
        assert dk.ravel() == pytest.approx([-0.5, 0.5, 0]) and dv.ravel() == pytest.approx([0.5, 0.5, 0])


# ---- F31: a ragged layout with gaps


@PRECISIONS
@pytest.mark.parametrize("kind", [np.int32, np.int64])
class TestF31RaggedLayoutWithGaps:
    def graph(self, precision: str, kind: Any, backward: bool = False) -> Any:
        """A graph whose tensors are all packed, [2, 1, 2, 1] in 4 rows; the tensors by name."""
        graph = opgraph.pygraph(io_data_type=FLOAT)
        at = {"offset": graph.tensor([3, 1, 1, 1], data_type=INT32 if kind is np.int32 else INT64)}
        at["lengths"] = graph.tensor([2, 1, 1, 1], data_type=INT32)
        options = {"use_padding_mask": True, "seq_len_q": at["lengths"], "seq_len_kv": at["lengths"]}
        names = ["q", "k", "v", *(["o", "dO", "stats"] if backward else [])]
        for name in names:
            at[name] = graph.tensor([2, 1, 2, 1], ragged_offset=at["offset"], name=name)
        if backward:
            made = graph.sdpa_backward(*(at[name] for name in names), **options)
        else:
            made = graph.sdpa(*(at[name] for name in names), generate_stats=True, **options)
        for name, tensor in zip(("dQ", "dK", "dV") if backward else ("O", "Stats"), made, strict=True):
            at[name] = tensor.set_output(True).set_ragged_offset(at["offset"])
        graph.build(engine="cpu", knobs={"precision": precision})
        return graph, at

    def execute(self, graph: Any, at: Any, starts: Sequence[int], kind: Any, **buffers: Any) -> None:
        pack = {at[name]: array for name, array in buffers.items()}
        pack[at["offset"]] = np.array(starts, kind).reshape(3, 1, 1, 1)
        pack[at["lengths"]] = column([2, 1], 1, np.int32)
        graph.execute(pack)

    def packed(self, *values: float) -> Any:
        return np.array(values, np.float32).reshape(4, 1, 1)

    def test_forward_and_backward(self, precision, kind):
        graph, at = self.graph(precision, kind)
        zeros, v = self.packed(0, 0, np.nan, 0), self.packed(1, 3, 99, 7)
        o, stats = self.packed(-1, -1, -1, -1), self.packed(-1, -1, -1, -1)
        self.execute(graph, at, [0, 3, 4], kind, q=zeros, k=zeros, v=v, O=o, Stats=stats)
        assert o.ravel()[[0, 1, 3]].tolist() == [2, 2, 7] and o.ravel()[2] in (-1, 0)
        assert stats.ravel()[[0, 1, 3]] == pytest.approx([np.log(2), np.log(2), 0], abs=1e-6)

        graph, at = self.graph(precision, kind, backward=True)
        q, grad = self.packed(1, 1, np.nan, 1), self.packed(1, 2, np.nan, 4)
        dq, dk, dv = (self.packed(-1, -1, -1, -1) for _ in range(3))
        self.execute(
            graph, at, [0, 3, 4], kind, q=q, k=zeros, v=v, o=o, dO=grad, stats=stats, dQ=dq, dK=dk, dV=dv
        )  # fmt: skip
        for found, right in ((dq, [0, 0, 0]), (dk, [-1.5, 1.5, 0]), (dv, [1.5, 1.5, 4])):
            assert found.ravel()[[0, 1, 3]] == pytest.approx(right) and found.ravel()[2] in (-1, 0)

    @pytest.mark.parametrize("starts", [[0, 3, 2], [0, -1, 4], [0, 3, 5]])
    def test_offsets_that_do_not_fit_are_refused(self, precision, kind, starts):
        graph, at = self.graph(precision, kind)
        zeros, o = self.packed(0, 0, 0, 0), self.packed(-1, -1, -1, -1)
        with pytest.raises(ValueError, match="offset"):
            self.execute(graph, at, starts, kind, q=zeros, k=zeros, v=zeros, O=o, Stats=o.copy())
        assert (o == -1).all()


def test_f20_execute_does_not_build_or_compile_for_other_lengths(monkeypatch):
    """CPU half: 50 calls with other lengths inside the declared bounds run the one plan that was built."""
    from opgraph.engines.cpu import ENGINE

    compiled = []
    compile_plan = type(ENGINE).compile

    def counting(self, spec, candidate, target):
        compiled.append(candidate.name)
        return compile_plan(self, spec, candidate, target)

    monkeypatch.setattr(type(ENGINE), "compile", counting)
    graph = opgraph.pygraph(io_data_type=opgraph.data_type.FLOAT)
    q, k, v = (graph.tensor([2, 1, 8, 4], name=name) for name in "qkv")
    lengths = [graph.tensor([2, 1, 1, 1], data_type=opgraph.data_type.INT32, name=name) for name in ("lq", "lkv")]
    o, _ = graph.sdpa(
        q, k, v, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1], generate_stats=False, name="s"
    )
    o.set_output(True)
    graph.build(engine="cpu", device="cpu")
    built, executable = len(compiled), graph._executable
    rng = np.random.default_rng(20)
    for _ in range(50):
        live = rng.integers(0, 9, (2, 1, 1, 1), dtype=np.int32)
        values = rng.standard_normal((2, 1, 8, 4)).astype(np.float32)
        out = np.full((2, 1, 8, 4), np.nan, np.float32)
        full = np.full_like(live, 8)
        graph.execute({q: np.zeros_like(values), k: values, v: values, lengths[0]: full, lengths[1]: live, o: out})
        for batch, count in enumerate(live.ravel()):
            want = values[batch, 0, :count].mean(0) if count else np.zeros(4, np.float32)
            np.testing.assert_allclose(out[batch, 0], np.broadcast_to(want, (8, 4)), rtol=1e-5, atol=1e-6)
    assert len(compiled) == built and graph._executable is executable
