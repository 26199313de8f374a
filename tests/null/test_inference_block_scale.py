"""Dims, strides and refusals of block scaling, the order of its arguments, and the tiles of scale factors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, tensor_reordering
from opgraph.ir import NodeType
from opgraph.ops.scale_tiles import from_tiles, tile_axes, tiled_layout, to_tiles

D = data_type
TILES = tensor_reordering.F8_128x4


def refuse(graph: Any, error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


def dequantize(x: Any = (2, 6, 64), scale: Any = (2, 6, 2), **given: Any) -> tuple[Any, Any, Any]:
    graph = opgraph.pygraph(io_data_type=D.HALF, intermediate_data_type=D.FLOAT, compute_data_type=D.FLOAT)
    tensors = graph.tensor(x, name="X", data_type=D.FP8_E4M3), graph.tensor(scale, name="S", data_type=D.FP8_E8M0)
    return graph, tensors, graph.block_scale_dequantize(*tensors, **{"block_size": [1, 32], **given})


def quantize(x: Any = (2, 6, 64), stride: Any = None, **given: Any) -> tuple[Any, Any, Any]:
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    y, scale = graph.block_scale_quantize(graph.tensor(x, stride, name="X"), **{"block_size": 32, **given})
    y.set_data_type(D.FP8_E4M3).set_output(True)
    scale.set_data_type(D.FP8_E8M0).set_output(True)
    return graph, y, scale


def test_order_of_arguments():
    names = ["input", "descale", "block_size", "is_negative_scale", "name", "compute_data_type", "out_dims"]
    assert list(inspect.signature(opgraph.pygraph.block_scale_dequantize).parameters)[1:] == names
    names = ["input", "group_offset", "block_size", "axis", "transpose", "name", "compute_data_type", "out_dims"]
    assert list(inspect.signature(opgraph.pygraph.block_scale_quantize).parameters)[1:] == names
    graph, _, out = dequantize(name="wide", is_negative_scale=True, block_size=(32,))
    node = graph.get_node("wide")
    assert node.node_type is NodeType.BLOCK_SCALE_DEQUANTIZE and node.params["block_size"] == (32,)
    assert node.params["is_negative_scale"] is True and out.name == "wide::OUT_0"
    graph, y, scale = quantize(name="narrow", transpose=True)
    node = graph.get_node("narrow")
    assert node.node_type is NodeType.BLOCK_SCALE_QUANTIZE
    assert dict(node.params) == {"block_size": 32, "axis": None, "transpose": True}
    assert (y.name, scale.name) == ("narrow::Y", "narrow::scale")
    with pytest.raises(TypeError, match="did you mean 'block_size'"):
        dequantize(blocksize=[32])
    for bad in ("32", [1.5], {}.__class__):
        with pytest.raises(TypeError):
            dequantize(block_size=bad)
    with pytest.raises(TypeError):
        quantize(block_size=[32])


def test_dequantized_is_like_its_input_and_virtual():
    graph, (x, _), out = dequantize()
    x.set_stride([1000, 100, 1])
    graph.validate()
    assert out.get_dim() == [2, 6, 64] and out.get_stride() == [1000, 100, 1]
    assert out.get_data_type() is D.FLOAT and out.get_is_virtual()
    graph, _, out = dequantize(x=[2, 6, 50], scale=[2, 6, 2])
    graph.validate()
    out.set_output(True)
    refuse(graph, ValueError, "stays virtual", "identity")


@pytest.mark.parametrize(
    ("scale", "given", "text"),
    [
        ((2, 6, 2), {"block_size": None}, "block_size not set"),
        ((2, 6, 2), {"block_size": []}, "1 to 3 positive integers"),
        ((2, 6, 2), {"block_size": [1, 0]}, "positive"),
        ((2, 6, 2), {"block_size": [1, 1, 1, 32]}, "positive"),
        ((2, 6, 3), {}, "do not fit the blocks"),
        ((2, 6, 1), {}, "do not fit the blocks"),
        ((1, 6, 2), {}, "(2, 6, 2)"),
        ((2, 128, 4), {}, "'S' (uid 2)"),
        ((6, 2), {}, "rank"),
    ],
)
def test_dequantize_malformed(scale, given, text):
    refuse(dequantize(scale=scale, **given)[0], ValueError, text)


def test_dequantize_refusals():
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    graph.block_scale_dequantize(graph.tensor([4, 32]), None, [32])
    refuse(graph, ValueError, "descale not set")
    graph, (_, scale), _ = dequantize()
    scale.set_data_type(D.INT8)
    refuse(graph, cudnnGraphNotSupportedError, "factors are floats")
    refuse(dequantize(out_dims=[2, 6, 32])[0], cudnnGraphNotSupportedError, "(2, 6, 64)")


@pytest.mark.parametrize(
    ("scale", "fits"),
    [
        ((2, 6, 2), True), ((2, 128, 4), True), ((2, 6, 4), True), ((2, 7, 3), True),
        ((2, 129, 4), False), ((2, 128, 5), False), ((3, 128, 4), False), ((2, 5, 4), False),
    ],
)  # fmt: skip
def test_factors_in_tiles_may_be_padded(scale, fits):
    graph, (_, tensor), _ = dequantize(scale=scale)
    tensor.set_reordering_type(TILES)
    if fits:
        graph.validate()
    else:
        refuse(graph, ValueError, "up to (2, 128, 4)")


def test_factors_in_tiles_are_bytes():
    graph, (_, tensor), _ = dequantize()
    tensor.set_reordering_type(TILES).set_data_type(D.FLOAT)
    refuse(graph, ValueError, "8-bit floats", "FP8_E8M0")


@pytest.mark.parametrize(
    ("stride", "given", "scale", "y_stride", "scale_stride"),
    [
        (None, {}, (2, 6, 2), (384, 64, 1), (12, 2, 1)),
        (None, {"axis": -1}, (2, 6, 2), (384, 64, 1), (12, 2, 1)),
        (None, {"axis": 1, "block_size": 4}, (2, 2, 64), (384, 64, 1), (128, 64, 1)),
        (None, {"axis": -2, "block_size": 4, "transpose": True}, (2, 2, 64), (384, 1, 6), (128, 64, 1)),
        (None, {"axis": 0, "block_size": 2, "transpose": True}, (1, 6, 64), (1, 128, 2), (384, 64, 1)),
        ((1, 2, 12), {"block_size": 60}, (2, 6, 2), (1, 2, 12), (1, 2, 12)),
        ((480, 80, 1), {}, (2, 6, 2), (480, 80, 1), (12, 2, 1)),
    ],
)
def test_quantized(stride, given, scale, y_stride, scale_stride):
    graph, y, factors = quantize(stride=stride, **given)
    graph.validate()
    assert y.get_dim() == [2, 6, 64] and y.get_stride() == list(y_stride)
    assert factors.get_dim() == list(scale) and factors.get_stride() == list(scale_stride)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"block_size": None}, "block_size not set"),
        ({"block_size": 0}, "block_size is 1 or more"),
        ({"axis": 3}, "axis is out of range"),
        ({"axis": -4}, "-3 to 2"),
        ({"out_dims": {"scale": [2, 6, 1]}}, "do not fit the blocks"),
        ({"out_dims": {"scale": [2, 128, 4]}}, "do not fit the blocks"),
        ({"out_dims": {"scale": [12, 2]}}, "rank"),
    ],
)
def test_quantize_malformed(given, text):
    refuse(quantize(**given)[0], ValueError, text)


def test_quantize_refusals():
    graph, y, scale = quantize()
    y.set_data_type(D.HALF)
    refuse(graph, cudnnGraphNotSupportedError, "few bits", "FP8_E4M3", "HALF")
    y.set_data_type(D.FP4_E2M1)
    scale.set_data_type(D.INT32)
    refuse(graph, cudnnGraphNotSupportedError, "factors are floats")
    refuse(quantize(out_dims=[2, 6, 32])[0], cudnnGraphNotSupportedError)


def test_groups():
    def grouped(x: Any = (1, 6, 64), offsets: Any = (3, 1, 1), dtype: Any = D.INT32, **given: Any) -> Any:
        graph = opgraph.pygraph(io_data_type=D.FLOAT)
        groups = graph.tensor(offsets, data_type=dtype)
        y, scale = graph.block_scale_quantize(graph.tensor(x), groups, block_size=32, **given)
        y.set_data_type(D.FP8_E4M3)
        scale.set_data_type(D.FP8_E8M0)
        return graph, scale

    graph, scale = grouped()
    scale.set_dim([1, 384, 4]).set_stride([1536, 4, 1]).set_reordering_type(TILES)
    graph.validate()  # three tiles of rows: what the groups need is known at execution
    graph, scale = grouped()
    scale.set_dim([1, 384, 8]).set_stride([3072, 8, 1]).set_reordering_type(TILES)
    refuse(graph, ValueError, "axis 1 is free")
    refuse(grouped(x=[64])[0], ValueError, "two axes")
    refuse(grouped(offsets=[3, 2, 1])[0], ValueError, "one list of rows")
    refuse(grouped(dtype=D.FLOAT)[0], ValueError, "INT32 or INT64")


# ---- tiles


@pytest.mark.parametrize(
    ("dim", "stride"),
    [
        ((128, 4), (4, 1)),
        ((1, 1), (1, 1)),
        ((130, 5), (5, 1)),
        ((5, 130), (1, 5)),
        ((2, 129, 3), (387, 3, 1)),
        ((2, 3, 40, 9), (360, 720, 9, 1)),
        ((0, 4), (4, 1)),
    ],
)
def test_tiles_hold_every_factor_at_its_byte(dim, stride):
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 256, dim).astype(np.uint8)
    memory = to_tiles(factors, stride)
    rows, columns = tile_axes(stride)
    dims, strides = tiled_layout(dim, stride)
    assert memory.size == np.prod(dims) and dims[rows] % 128 == 0 and dims[columns] % 4 == 0
    assert strides[columns] == 1 and strides[rows] == max(dims[columns], 1)
    seen = np.zeros(memory.size, np.bool_)
    for place in np.ndindex(*dim):
        r, c = place[rows], place[columns]
        matrix = sum(n * s for a, (n, s) in enumerate(zip(place, strides, strict=True)) if a not in (rows, columns))
        tile = (r // 128) * (dims[columns] // 4) + c // 4
        byte = matrix + tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
        assert memory[byte] == factors[place]
        seen[byte] = True
    assert not memory[~seen].any()
    np.testing.assert_array_equal(from_tiles(memory, dim, stride), factors)
