"""The NumPy references of convolutions: blocks, adjoints, integers, memory, in place."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from conformance.convolution import convolved
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import opgraph
from opgraph import convolution_mode, data_type
from opgraph.ops import OPS, Math, OutSpec, RefCall, convolution_blocks

T = data_type
ROW_MAJOR, CHANNELS_LAST = "row-major", "channels last"
OUTPUTS = {"conv_fprop": "Y", "conv_dgrad": "DX", "conv_wgrad": "DW"}


@pytest.fixture
def many_blocks(monkeypatch):
    monkeypatch.setattr(convolution_blocks, "_BLOCK", 60)
    monkeypatch.setattr(convolution_blocks, "_SMALL_BLOCK", 20)


def reference(
    op: str,
    inputs: Any,
    shape: Any,
    params: Any,
    *,
    compute: Any = T.FLOAT,
    precise: bool = True,
    view: Any = None,
) -> Any:
    before = {port: array.copy() for port, array in inputs.items()}
    dtype = np.dtype(np.float32) if view is None else view.dtype
    out = OutSpec(tuple(shape), T.FLOAT, dtype, view)
    found = OPS[op].reference(RefCall(params, inputs, {OUTPUTS[op]: out}, Math(compute, precise)))
    for port, array in inputs.items():
        assert view is array or np.array_equal(array, before[port]), f"{port} was written to"
    assert list(found) == [OUTPUTS[op]] and found[OUTPUTS[op]].shape == tuple(shape)
    return found[OUTPUTS[op]]


def in_layout(array: Any, layout: str) -> Any:
    """The same numbers, channels innermost or not."""
    if layout == ROW_MAJOR:
        return np.ascontiguousarray(array)
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def params_of(spatial: int, **attributes: Any) -> dict[str, Any]:
    params = {
        "padding": None,
        "pre_padding": (0,) * spatial,
        "post_padding": (0,) * spatial,
        "stride": (1,) * spatial,
        "dilation": (1,) * spatial,
        "convolution_mode": convolution_mode.CROSS_CORRELATION,
    }
    return {**params, **attributes}


@st.composite
def convolutions(draw: Any) -> tuple[Any, ...]:
    """(attributes, image, filter, response) with numbers in random layouts."""
    spatial = draw(st.integers(1, 3))
    groups, c, k = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 9])), draw(st.integers(1, 3))

    def entries(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(spatial))

    params = params_of(
        spatial,
        pre_padding=entries(0, 3),
        post_padding=entries(0, 3),
        stride=entries(1, 3),
        dilation=entries(1, 3),
        convolution_mode=draw(st.sampled_from(list(convolution_mode))),
    )
    x, f = entries(1, 7), entries(1, 3)
    y = tuple(
        1 + (n + before + after - d * (taps - 1) - 1) // s
        for n, taps, before, after, s, d in zip(
            x,
            f,
            params["pre_padding"],
            params["post_padding"],
            params["stride"],
            params["dilation"],
            strict=True,
        )
    )
    assume(min(y) > 0)
    n = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    arrays = [
        in_layout(rng.standard_normal(dim, np.float32), draw(st.sampled_from([ROW_MAJOR, CHANNELS_LAST])))
        for dim in ((n, groups * c, *x), (groups * k, c, *f), (n, groups * k, *y))
    ]
    return params, *arrays


def check_convolution(problem: tuple[Any, ...]) -> None:
    """The response is that of the formula; the gradients are its adjoints, as <Y, loss> = <DX, image> = <DW,
    weight>."""
    params, image, weight, loss = problem
    y = reference("conv_fprop", {"image": image, "weight": weight}, loss.shape, params)
    right = convolved(np, image.astype(np.float64), weight.astype(np.float64), params)
    np.testing.assert_allclose(y, right, 1e-12, 1e-12)
    dx = reference("conv_dgrad", {"loss": loss, "filter": weight}, image.shape, params)
    dw = reference("conv_wgrad", {"image": image, "loss": loss}, weight.shape, params)
    size = max(np.abs(y * loss).sum(), 1)
    assert abs((dx * image).sum() - (y * loss).sum()) < 1e-12 * size
    assert abs((dw * weight).sum() - (y * loss).sum()) < 1e-12 * size
    # In one number two errors might cancel: each element by itself, for a few of them.
    for gradient, at, op, port in ((dx, image, "conv_fprop", "image"), (dw, weight, "conv_fprop", "weight")):
        for flat in {0, gradient.size // 2, gradient.size - 1}:
            one = np.zeros(at.shape)
            one.flat[flat] = 1
            inputs = {"image": image, "weight": weight, port: one}
            slope = (reference(op, inputs, loss.shape, params) * loss).sum()
            assert abs(gradient.flat[flat] - slope) < 1e-12 * size


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_random_convolutions(problem):
    check_convolution(problem)


def test_many_blocks_make_no_difference(many_blocks):
    rng = np.random.default_rng(0)
    for groups, c, k, layout in (
        (1, 3, 4, ROW_MAJOR),
        (1, 3, 4, CHANNELS_LAST),
        (2, 8, 3, CHANNELS_LAST),
        (3, 1, 2, ROW_MAJOR),
    ):
        params = params_of(2, pre_padding=(2, 1), post_padding=(0, 3), stride=(2, 1), dilation=(1, 2))
        dims = ((3, groups * c, 9, 8), (groups * k, c, 3, 3), (3, groups * k, 5, 8))
        check_convolution(
            (params, *(in_layout(rng.standard_normal(dim, np.float32), layout) for dim in dims))
        )


def test_blocks_cover_positions_one_by_one(monkeypatch):
    monkeypatch.setattr(convolution_blocks, "_BLOCK", 1)
    monkeypatch.setattr(convolution_blocks, "_SMALL_BLOCK", 1)
    rng = np.random.default_rng(1)
    params = params_of(1, pre_padding=(2,), post_padding=(2,), stride=(2,))
    for groups, c in ((1, 2), (2, 1)):
        dims = ((2, groups * c, 5), (groups, c, 3), (2, groups, 4))
        check_convolution((params, *(rng.standard_normal(dim, np.float32) for dim in dims)))


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad", "conv_wgrad"])
@pytest.mark.parametrize("layout", [ROW_MAJOR, CHANNELS_LAST])
def test_memory_stays_bounded(op, layout):
    """All windows at once would be 150 MB here, all responses of all taps too."""
    dims = {"image": (2, 32, 256, 256), "filter": (4, 32, 3, 3), "loss": (2, 4, 256, 256)}
    arrays = {name: in_layout(np.ones(dim, np.float32), layout) for name, dim in dims.items()}
    params = params_of(2, pre_padding=(1, 1), post_padding=(1, 1))
    arrays["weight"] = arrays["filter"]
    ports = {
        "conv_fprop": ("image", "weight"),
        "conv_dgrad": ("loss", "filter"),
        "conv_wgrad": ("image", "loss"),
    }[op]
    result = {"conv_fprop": "loss", "conv_dgrad": "image", "conv_wgrad": "filter"}[op]
    inputs = {port: arrays[port] for port in ports}
    view = np.empty_like(arrays[result])
    tracemalloc.start()
    try:
        found = reference(op, inputs, dims[result], params, precise=False, view=view)
        peak = tracemalloc.get_traced_memory()[1] - sum(array.nbytes for array in inputs.values())
    finally:
        tracemalloc.stop()
    assert peak < 6 * 4 * convolution_blocks._BLOCK, f"{peak / 2**20:.0f} MiB"
    assert op == "conv_wgrad" or found is view, "the result is made in the output's memory"


# ---- integers


def test_small_integers_are_summed_exactly():
    """The largest sums that INT8 makes; float32 would round them."""
    image = np.full((1, 513, 5), -128, np.int8)
    image[0, 0, 2] = 127
    weight = np.full((2, 513, 3), -128, np.int8)
    for compute in (T.INT32, T.INT64):
        y = reference(
            "conv_fprop", {"image": image, "weight": weight}, (1, 2, 3), params_of(1), compute=compute
        )
        assert (y == 513 * 3 * 128 * 128 - 128 * 255).all()


def test_large_integers_are_summed_exactly():
    """Beyond 2**53, where float64 drops the last bits."""
    rng = np.random.default_rng(2)
    image, weight, loss = (
        rng.integers(2**27, 2**28, dim).astype(np.int32) for dim in ((2, 3, 6), (2, 3, 2), (2, 2, 5))
    )
    y, dw = np.zeros(loss.shape, np.int64), np.zeros(weight.shape, np.int64)
    dx = np.zeros(image.shape, np.int64)
    for tap in range(2):
        window, wide = image[:, :, tap : tap + 5].astype(np.int64), loss.astype(np.int64)
        y += np.einsum("ncp,kc->nkp", window, weight[:, :, tap])
        dw[:, :, tap] = np.einsum("nkp,ncp->kc", wide, window)
        dx[:, :, tap : tap + 5] += np.einsum("nkp,kc->ncp", wide, weight[:, :, tap])
    for op, inputs, right in (
        ("conv_fprop", {"image": image, "weight": weight}, y),
        ("conv_dgrad", {"loss": loss, "filter": weight}, dx),
        ("conv_wgrad", {"image": image, "loss": loss}, dw),
    ):
        found = reference(op, inputs, right.shape, params_of(1), compute=T.INT64)
        assert found.dtype == np.int64 and np.array_equal(found, right), op
        assert not np.array_equal(right.astype(np.float64).astype(np.int64), right), "float64 would do"


def test_int8_to_float_through_an_epilogue(precision):
    """INT8 data, sums in INT32, a FLOAT scale and bias after them."""
    graph = opgraph.pygraph(io_data_type=T.INT8, intermediate_data_type=T.INT32, compute_data_type=T.INT32)
    x, w = graph.tensor([1, 4, 5, 5], name="x"), graph.tensor([3, 4, 3, 3], name="w")
    scale = graph.tensor([1, 3, 1, 1], data_type=T.FLOAT, name="scale")
    ones = [1, 1]
    y = graph.conv_fprop(x, w, padding=ones, stride=ones, dilation=ones)
    z = graph.scale(y, scale, compute_data_type=T.FLOAT).set_data_type(T.FLOAT).set_output(True)
    graph.build(engine="cpu", knobs={"precision": precision})
    assert y.get_data_type() is T.INT32
    rng = np.random.default_rng(3)
    image, weight = (rng.integers(-128, 128, dim).astype(np.int8) for dim in ([1, 4, 5, 5], [3, 4, 3, 3]))
    factors = np.array([0.5, -2, 3], np.float32).reshape(1, 3, 1, 1)
    out = np.moveaxis(np.empty((1, 5, 5, 3), np.float32), -1, 1)
    graph.execute({x: image, w: weight, scale: factors, z: out})
    right = convolved(
        np, image.astype(np.int64), weight.astype(np.int64), params_of(2, pre_padding=ones, post_padding=ones)
    )
    assert np.array_equal(out, right * factors)


# ---- one buffer for input and output


def run(graph: Any, pack: Any, precision: str) -> None:
    graph.build(engine="cpu", knobs={"precision": precision})
    graph.execute(pack)


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad"])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolution_in_place(op, groups, precision):
    graph = opgraph.pygraph(io_data_type=T.FLOAT)
    dim, filter = [2, 4, 6, 5], [4, 4 // groups, 3, 3]
    a, w = graph.tensor(dim, name="a"), graph.tensor(filter, name="w")
    attributes = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
    y = getattr(graph, op)(a, w, **attributes).set_output(True).set_dim(dim).set_stride(a.get_stride())
    rng = np.random.default_rng(4)
    buffer, weight = rng.standard_normal(dim, np.float32), rng.standard_normal(filter, np.float32)
    inputs = {
        "image" if op == "conv_fprop" else "loss": buffer.copy(),
        "weight" if op == "conv_fprop" else "filter": weight,
    }
    right = reference(op, inputs, dim, params_of(2, pre_padding=(1, 1), post_padding=(1, 1)))
    run(graph, {a: buffer, w: weight, y: buffer}, precision)
    np.testing.assert_allclose(buffer, right, 1e-5, 1e-5)


# ---- fewer images at a call


def test_overrides(precision):
    graph = opgraph.pygraph(io_data_type=T.FLOAT, is_override_shape_enabled=True)
    x, w = graph.tensor([4, 3, 6], name="x"), graph.tensor([2, 3, 3], name="w")
    y = graph.conv_fprop(x, w, padding=[1], stride=[1], dilation=[1]).set_output(True)
    graph.build(engine="cpu", knobs={"precision": precision})
    rng = np.random.default_rng(8)
    image, weight = rng.standard_normal((4, 3, 6), np.float32), rng.standard_normal((2, 3, 3), np.float32)
    out = np.full((4, 6, 2), np.nan, np.float32)
    graph.execute(
        {x: image, w: weight, y: out.transpose(0, 2, 1)},
        override_uids=[x.get_uid(), y.get_uid()],
        override_shapes=[[2, 3, 6], [2, 2, 6]],
        override_strides=[[18, 6, 1], [12, 1, 2]],
    )
    right = convolved(
        np,
        image[:2].astype(np.float64),
        weight.astype(np.float64),
        params_of(1, pre_padding=(1,), post_padding=(1,)),
    )
    np.testing.assert_allclose(out[:2].transpose(0, 2, 1), right, 1e-5, 1e-5)
    assert np.isnan(out[2:]).all()
