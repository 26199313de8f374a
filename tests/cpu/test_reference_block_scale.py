"""Block-scaled operands end to end on the CPU engine: tiles, packed data, a product of two of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.block_scale import tiled

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, tensor_reordering

D = data_type
TILES = tensor_reordering.F8_128x4


def memory_of(factors: Any) -> Any:
    """A matrix of factors as the bytes of whole tiles, filled up with NaN."""
    rows, columns = factors.shape
    whole = np.full((-(-rows // 128) * 128, -(-columns // 4) * 4), 0xFF, np.uint8)
    whole[:rows, :columns] = factors.view(np.uint8)
    return tiled(whole).reshape(-1).view(factors.dtype)


@pytest.mark.parametrize("padded", [False, True], ids=["dims of the factors", "dims of whole tiles"])
def test_product_of_fp4_matrices(padded, precision, ml_dtypes):
    rng = np.random.default_rng(0)
    m, k, n, size = 130, 96, 40, 16
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    a, b = rng.integers(0, 16, (m, k), np.uint8), rng.integers(0, 16, (n, k), np.uint8)
    scales = [rng.uniform(0.1, 2, (rows, k // size)).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n)]
    whole = (256, 128) if padded else (m, n)
    count = 8 if padded else k // size

    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    given: dict[str, Any] = {"data_type": D.FP8_E4M3, "reordering_type": TILES}
    x = graph.tensor([1, m, k], data_type=D.FP4_E2M1)
    y = graph.tensor([1, k, n], [k * n, 1, k], D.FP4_E2M1)
    x_scale = graph.tensor([1, whole[0], count], **given)
    y_scale = graph.tensor([1, count, whole[1]], [count * whole[1], 1, count], **given)
    wide_x = graph.block_scale_dequantize(x, x_scale, block_size=[1, size])
    wide_y = graph.block_scale_dequantize(y, y_scale, block_size=[size, 1])
    out = graph.matmul(wide_x, wide_y).set_output(True)
    graph.build(engine="cpu", knobs={"precision": precision})

    made = np.empty((1, m, n), np.float32)
    pairs = [(each[:, 0::2] | each[:, 1::2] << 4)[None] for each in (a, b)]
    graph.execute({
        x: pairs[0], y: pairs[1].swapaxes(1, 2), out: made,
        x_scale: memory_of(scales[0]), y_scale: memory_of(scales[1]),
    })  # fmt: skip
    wide = [values[c] * np.repeat(s.astype(np.float64), size, 1) for c, s in zip((a, b), scales, strict=True)]
    np.testing.assert_allclose(made[0], wide[0] @ wide[1].T, 1e-5, 1e-4)


def test_there_and_back(ml_dtypes):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((2, 70, 64)) * 10.0 ** rng.integers(-9, 9, (2, 70, 1))).astype(np.float32)
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    given = graph.tensor(x.shape)
    y, scale = graph.block_scale_quantize(given, block_size=32)
    y.set_data_type(D.FP8_E4M3)
    scale.set_data_type(D.FP8_E8M0)
    back = graph.identity(graph.block_scale_dequantize(y, scale, [1, 32])).set_output(True)
    graph.build(engine="cpu")
    made = np.empty_like(x)
    graph.execute({given: x, back: made})
    largest = np.repeat(np.abs(x).reshape(2, 70, 2, 32).max(-1), 32, -1)
    assert (np.abs(made - x) <= largest / 16).all()  # half a step of E4M3 at the top of the block's range
    near = np.abs(x) >= largest / 64
    assert (np.abs(made - x)[near] <= np.abs(x)[near] / 16).all()


def test_stored_tiles_are_read_again(ml_dtypes):
    """What one graph stores, dims of the factors alone, another one reads; the padding is 0."""
    x = np.random.default_rng(2).standard_normal((3, 5, 20)).astype(np.float32)
    data, factors = np.empty((3, 5, 20), ml_dtypes.float8_e5m2), np.full((3, 512), 0xEE, np.uint8)
    factors = factors.view(ml_dtypes.float8_e8m0fnu)
    made = np.empty_like(x)

    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    given = graph.tensor(x.shape)
    y, scale = graph.block_scale_quantize(given, block_size=8)
    y.set_output(True).set_data_type(D.FP8_E5M2)
    scale.set_output(True).set_data_type(D.FP8_E8M0).set_reordering_type(TILES)
    graph.build(engine="cpu")
    graph.execute({given: x, y: data, scale: factors})
    assert np.count_nonzero(factors.view(np.uint8)) == 3 * 5 * 3

    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    stored = graph.tensor([3, 5, 20], data_type=D.FP8_E5M2)
    held = graph.tensor([3, 5, 3], data_type=D.FP8_E8M0, reordering_type=TILES)
    out = graph.identity(graph.block_scale_dequantize(stored, held, 8)).set_output(True)
    graph.build(engine="cpu")
    graph.execute({stored: data, held: factors, out: made})
    assert (np.abs(made - x) <= np.abs(x) / 8 + 1e-5).all()


@pytest.mark.parametrize(
    ("dim", "dtype", "reordering"),
    [
        ([4, 32], D.INT8, tensor_reordering.INT8x32),
        ([4, 32], D.HALF, TILES),
        ([32], D.INT8, TILES),
    ],
)
def test_other_reorderings_are_declined(dim, dtype, reordering):
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    graph.identity(graph.tensor(dim, data_type=dtype, reordering_type=reordering)).set_output(True)
    with pytest.raises(cudnnGraphNotSupportedError, match="F8_128x4 tiles of a matrix"):
        graph.build(engine="cpu")
