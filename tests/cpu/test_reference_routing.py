"""Grouped products and groups of scale factors on the CPU engine: contents that do not fit, and what is
written when they are refused; rows that nobody owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import data_type, tensor_reordering
from opgraph import moe_grouped_matmul_mode as M

D = data_type


def integers(values: Any) -> Any:
    return np.reshape(np.array(values, np.int32), (1, -1, 1))


class Routed:
    """3 experts, 6 routed rows of 2 channels, 3 tokens with 2 experts each."""

    def __init__(self, mode: M = M.NONE, *, computed: bool = False) -> None:
        self.mode = mode
        graph = self.graph = opgraph.pygraph(io_data_type=D.FLOAT)
        declared: dict[str, Any] = {"token": (1, 6, 2), "weight": (3, 2, 4), "first_token_offset": (3, 1, 1)}
        if mode is not M.NONE:
            declared["token_index"] = (1, 6, 1)
        if mode in (M.SCATTER, M.COMBINE):
            declared["token_ks"] = (1, 6, 1)
        if mode is M.COMBINE:
            declared["top_k_scores"] = (1, 3, 2)
        whole = ("first_token_offset", "token_index", "token_ks")
        self.tensors = {
            port: graph.tensor(dim, data_type=D.INT32 if port in whole else None, name=port)
            for port, dim in declared.items()
        }
        wired = dict(self.tensors)
        if computed:  # the contents are known in the middle of the call only
            for port in set(whole) & set(wired):
                zero = graph.sub(wired[port], wired[port], compute_data_type=D.INT32).set_data_type(D.INT32)
                wired[port] = graph.add(wired[port], zero, compute_data_type=D.INT32).set_data_type(D.INT32)
        top_k = 2 if mode in (M.SCATTER, M.COMBINE) else 0
        self.out = graph.moe_grouped_matmul(**wired, mode=mode, top_k=top_k).set_output(True)
        graph.build(engine="cpu")

    def __call__(self, offsets: Any = (0, 2, 4), index: Any = (0, 1, 2, 0, 1, 2), ks: Any = (0, 0, 0, 1, 1, 1)) -> Any:
        buffers: dict[str, Any] = {
            "token": np.ones((1, 6, 2), np.float32),
            "weight": np.ones((3, 2, 4), np.float32),
            "first_token_offset": integers(offsets).reshape(-1, 1, 1),
            "token_index": integers(index),
            "token_ks": integers(ks),
            "top_k_scores": np.ones((1, 3, 2), np.float32),
        }
        self.written = np.full(self.out.get_dim(), np.nan, np.float32)
        pack = {tensor: buffers[port] for port, tensor in self.tensors.items()}
        self.graph.execute({**pack, self.out: self.written})
        return self.written[0, :, 0]


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(
    ("mode", "given", "text"),
    [
        (M.NONE, {"offsets": (0, 3, 2)}, "3 to 6 at entry 2"),
        (M.NONE, {"offsets": (-1, 3, 4)}, "0 to 6 at entry 0"),
        (M.NONE, {"offsets": (0, 3, 7)}, "3 to 6 at entry 2, given 7"),
        (M.COMBINE, {"offsets": (0, 3, 2)}, "do not decrease"),
        (M.GATHER, {"index": (0, 1, 2, 3, 4, 6)}, "0 to 5 at entry 5"),
        (M.GATHER, {"index": (0, 1, -1, 3, 4, 5)}, "0 to 5 at entry 2"),
        (M.SCATTER, {"index": (0, 1, 3, 0, 1, 2)}, "0 to 2 at entry 2"),
        (M.SCATTER, {"ks": (0, 2, 0, 1, 1, 1)}, "0 to 1 at entry 1"),
        (M.COMBINE, {"index": (0, 1, 3, 0, 1, 2)}, "0 to 2 at entry 2"),
        (M.COMBINE, {"ks": (0, 0, 0, 1, 1, -2)}, "0 to 1 at entry 5"),
    ],
)
def test_contents_out_of_range(mode, given, text, computed):
    routed = Routed(mode, computed=computed)
    with pytest.raises(ValueError, match=text):
        routed(**given)
    assert np.isnan(routed.written).all()
    assert np.isfinite(routed()).all()


def test_rows_that_nobody_owns_are_not_looked_at():
    bad = (-5, 1, 2, 0, 1, 2)
    assert Routed(M.GATHER)(offsets=(1, 2, 4), index=bad).tolist() == [0, 2, 2, 2, 2, 2]
    assert Routed(M.SCATTER)(offsets=(1, 2, 4), index=bad).tolist() == [0, 2, 2, 2, 2, 2]
    assert Routed(M.COMBINE)(offsets=(1, 2, 4), index=bad).tolist() == [2, 4, 4]
    assert Routed()(offsets=(6, 6, 6)).tolist() == [0] * 6


def test_scatter_whose_last_token_has_a_place_too_many():
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    x, w = graph.tensor([1, 3, 1]), graph.tensor([2, 1, 1])
    offsets, index, ks = (graph.tensor(dim, data_type=D.INT32) for dim in ([2, 1, 1], [1, 3, 1], [1, 3, 1]))
    out = graph.moe_grouped_matmul(x, w, offsets, index, ks, M.SCATTER, 2).set_output(True)
    graph.build(engine="cpu")
    ones = np.ones((1, 3, 1), np.float32)
    pack = {x: ones, w: np.ones((2, 1, 1), np.float32), offsets: np.zeros((2, 1, 1), np.int32), out: ones.copy()}
    graph.execute({**pack, index: integers([0, 0, 1]), ks: integers([0, 1, 0])})
    with pytest.raises(ValueError, match="row of the output"):
        graph.execute({**pack, index: integers([0, 0, 1]), ks: integers([0, 1, 1])})


def test_scores_weigh_in_nan_and_repeated_routes_add_up():
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    x, w = graph.tensor([1, 4, 1]), graph.tensor([2, 1, 1])
    offsets, index, ks = (graph.tensor(dim, data_type=D.INT32) for dim in ([2, 1, 1], [1, 4, 1], [1, 4, 1]))
    scores = graph.tensor([1, 3, 2])
    out = graph.moe_grouped_matmul(x, w, offsets, index, ks, M.COMBINE, 2, top_k_scores=scores).set_output(True)
    graph.build(engine="cpu")
    y = np.empty((1, 3, 1), np.float32)
    graph.execute({
        x: np.array([1, 2, 3, 4], np.float32).reshape(1, 4, 1),
        w: np.array([1, 10], np.float32).reshape(2, 1, 1),
        offsets: np.array([0, 2], np.int32).reshape(2, 1, 1),
        index: integers([2, 2, 2, 1]),
        ks: integers([0, 0, 1, 0]),
        scores: np.array([[[np.nan, 5], [np.nan, 5], [2, 3]]], np.float32),
        out: y,
    })  # fmt: skip
    assert y[0, 0, 0] == 0 and np.isnan(y[0, 1, 0]) and y[0, 2, 0] == 2 * (1 + 2) + 3 * 30


def test_gradient_of_experts_without_rows():
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    grad, x, offsets = graph.tensor([1, 4, 2]), graph.tensor([1, 4, 3]), graph.tensor([3, 1, 1], data_type=D.INT32)
    out = graph.moe_grouped_matmul_bwd(grad, x, offsets).set_output(True)
    graph.build(engine="cpu")
    made = np.full((3, 2, 3), np.nan, np.float32)
    pack = {grad: np.ones((1, 4, 2), np.float32), x: np.ones((1, 4, 3), np.float32), out: made.swapaxes(1, 2)}
    graph.execute({**pack, offsets: np.array([1, 1, 4], np.int32).reshape(3, 1, 1)})
    assert made[:, 0, 0].tolist() == [0, 3, 0]
    with pytest.raises(ValueError, match="3 to 4 at entry 2"):
        graph.execute({**pack, offsets: np.array([1, 3, 2], np.int32).reshape(3, 1, 1)})


# ---- groups of scale factors


def grouped(extent: int, *, tiles: bool = True) -> Any:
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    x, groups = graph.tensor([1, 10, 8]), graph.tensor([2, 1, 1], data_type=D.INT32)
    y, scale = graph.block_scale_quantize(x, groups, block_size=4)
    y.set_output(True).set_data_type(D.FP8_E4M3)
    scale.set_output(True).set_data_type(D.FP8_E8M0).set_dim([1, extent, 2]).set_stride([2 * extent, 2, 1])
    if tiles:
        scale.set_reordering_type(tensor_reordering.F8_128x4)
    graph.build(engine="cpu")

    def run(*offsets: int) -> Any:
        rows = -(-extent // 128) * 128 if tiles else extent
        factors = np.full((rows, 4 if tiles else 2), 0xEE, np.uint8)
        graph.execute({
            x: np.full((1, 10, 8), 448, np.float32), groups: integers(offsets).reshape(2, 1, 1),
            y: np.zeros((1, 10, 8), np.uint8).view("u1").view(_e4m3()), scale: factors.view(_e8m0()),
        })  # fmt: skip
        return factors

    return run


def _e4m3() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e4m3fn)


def _e8m0() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e8m0fnu)


def test_groups_start_a_tile(ml_dtypes):
    factors = grouped(256)(0, 3).reshape(2, 512)  # one tile per 128 rows: byte r * 16 + c for r < 32
    used = np.zeros((2, 512), np.uint8)
    for tile, rows in ((0, 3), (1, 7)):
        for r in range(rows):
            used[tile, r * 16 : r * 16 + 2] = 127  # 2^0
    np.testing.assert_array_equal(factors, used)


def test_groups_that_scale_cannot_hold(ml_dtypes):
    run = grouped(128)
    assert run(0, 0)[0, 0] == 127  # an empty group takes no tile
    with pytest.raises(ValueError, match="at most 128 at axis 1"):
        run(0, 3)
    run = grouped(10, tiles=False)
    np.testing.assert_array_equal(run(0, 3), np.full((10, 2), 127))
    for offsets, text in (((3, 2), "3 to 10 at entry 1"), ((0, 11), "0 to 10 at entry 1"), ((-1, 2), "entry 0")):
        with pytest.raises(ValueError, match=text):
            run(*offsets)
