"""Inference and NumPy references of reshape, transpose, slice and concatenate."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, reshape_mode
from opgraph.ops import OPS, Math, OutSpec, RefCall

FLOAT, HALF, INT8 = data_type.FLOAT, data_type.HALF, data_type.INT8


def reference(op, inputs, shape, *, view=None, dtype=FLOAT, numpy=np.float32, strides=None, **params) -> Any:
    spec = OutSpec(tuple(shape), dtype, np.dtype(numpy), view)
    ports = {f"IN_{i}": array for i, array in enumerate(inputs)}
    found = OPS[op].reference(RefCall(params, ports, {"OUT_0": spec}, Math(FLOAT, True), strides))["OUT_0"]
    assert found.shape == tuple(shape)
    return found


def graph_of(io: Any = FLOAT) -> Any:
    return opgraph.pygraph(io_data_type=io, compute_data_type=FLOAT)


def dense(dim: Any, order: Any) -> tuple[int, ...]:
    """Strides of `dim` whose axes lie in memory as `order` says, slowest first."""
    stride, step = [0] * len(dim), 1
    for axis in reversed(order):
        stride[axis], step = step, step * dim[axis]
    return tuple(stride)


def counted(dim: Any) -> Any:
    return np.arange(np.prod(dim, dtype=int), dtype=np.float32).reshape(dim)


class TestReshape:
    @pytest.mark.parametrize("dim, shape", [
        ((2, 3, 4), (6, 4)), ((2, 3, 4), (24,)), ((7,), (1, 7, 1)), ((1, 1), (1,)),
        ((0, 3), (3, 0, 5)), ((13, 2), (2, 13)),
    ])  # fmt: skip
    def test_logical(self, dim, shape):
        x = counted(dim)
        for given in (x, np.asfortranarray(x), np.repeat(x, 2, 0)[::2]):
            found = reference("reshape", [given], shape, reshape_mode=reshape_mode.LOGICAL)
            assert np.array_equal(found, x.reshape(shape))

    @pytest.mark.parametrize("dim, shape", [((2, 3, 4), (4, 6)), ((2, 3, 4), (2, 12)), ((4, 6), (2, 3, 4))])
    def test_view_reads_the_memory_of_the_declaration(self, dim, shape):
        """Element by element through the offsets of both declarations, whatever the array's own layout."""
        for order in itertools.permutations(range(len(dim))):
            for out_order in itertools.permutations(range(len(shape))):
                stride, out_stride = dense(dim, order), dense(shape, out_order)
                x = counted(dim)
                memory = np.empty(x.size, np.float32)
                for place in np.ndindex(*dim):
                    memory[np.dot(place, stride)] = x[place]
                right = np.empty(shape, np.float32)
                for place in np.ndindex(*shape):
                    right[place] = memory[np.dot(place, out_stride)]
                for given in (x, np.asfortranarray(x)):
                    found = reference(
                        "reshape", [given], shape, reshape_mode=reshape_mode.VIEW_ONLY,
                        strides={"IN_0": stride, "OUT_0": out_stride},
                    )  # fmt: skip
                    assert np.array_equal(found, right)

    @pytest.mark.parametrize("virtual", [False, True])
    def test_through_a_graph(self, virtual):
        graph = graph_of()
        x = graph.tensor((2, 3, 4), (12, 1, 3))  # axis 1 fastest
        source = graph.identity(x) if virtual else x
        y = graph.reshape(source, out_dims=[2, 4, 3]).set_output(True).set_stride((12, 3, 1))
        z = graph.reshape(source, reshape_mode.LOGICAL, out_dims=[4, 6]).set_output(True)
        graph.build()
        a = np.ascontiguousarray(counted((2, 3, 4)).transpose(0, 2, 1)).transpose(0, 2, 1)
        b, c = np.empty((2, 4, 3), np.float32), np.empty((4, 6), np.float32)
        graph.execute({x: a, y: b, z: c})
        assert np.array_equal(b, a.transpose(0, 2, 1)) and np.array_equal(c, a.reshape(4, 6))

    def test_default_stride_and_type(self):
        graph = graph_of(HALF)
        flat = graph.reshape(graph.tensor((4, 6), data_type=INT8), out_dims=[3, 8])
        cube = graph.reshape(graph.tensor((4, 6)), reshape_mode.LOGICAL, out_dims=[2, 3, 4])
        graph.validate()
        assert (flat.stride, flat.data_type) == ((8, 1), INT8)
        assert cube.stride == (12, 1, 3)

    @pytest.mark.parametrize("dim, stride, shape, out_stride, legal", [
        ((4, 6), None, (4, 6), (6, 1), True),
        ((4, 6), (8, 1), (4, 6), (8, 1), True),
        ((4, 6), (8, 1), (4, 2, 3), (8, 3, 1), True),
        ((4, 6), (8, 1), (24, 1), (1, 1), False),
        ((4, 6), None, (4, 6), (8, 1), False),
        ((4, 1, 6), (6, 99, 1), (24,), (1,), True),
        ((0, 6), None, (6, 0), (1, 1), True),
    ])  # fmt: skip
    def test_view_only_covers_the_memory(self, dim, stride, shape, out_stride, legal):
        graph = graph_of()
        graph.reshape(graph.tensor(dim, stride), out_dims=shape).set_stride(out_stride)
        if legal:
            graph.validate()
        else:
            with pytest.raises(cudnnGraphNotSupportedError, match="VIEW_ONLY"):
                graph.validate()

    def test_malformed(self):
        for mode in reshape_mode:
            graph = graph_of()
            graph.reshape(graph.tensor((4, 6)), mode)
            with pytest.raises(ValueError, match="dims not set"):
                graph.validate()
            graph = graph_of()
            graph.reshape(graph.tensor((4, 6)), mode, out_dims=[5, 5])
            with pytest.raises(ValueError, match="number of elements"):
                graph.validate()
            graph = graph_of()
            graph.reshape(graph.tensor((4, 6)), mode, out_dims=[24]).set_data_type(HALF)
            with pytest.raises(ValueError, match="data type"):
                graph.validate()
        with pytest.raises(TypeError, match="reshape_mode"):
            graph.reshape(graph.tensor((4, 6)), "LOGICAL")


class TestTranspose:
    def test_every_permutation(self):
        x = counted((2, 3, 5))
        for order in itertools.permutations(range(3)):
            right = x.transpose(order)
            assert np.array_equal(reference("transpose", [x], right.shape, permutation=order), right)
            graph = graph_of(HALF)
            y = graph.transpose(graph.tensor((2, 3, 5), (40, 10, 2), INT8), order)
            graph.validate()
            assert y.dim == right.shape and y.data_type is INT8
            assert y.stride == tuple((40, 10, 2)[axis] for axis in order)

    @pytest.mark.parametrize("order", [None, (0, 1), (0, 1, 1), (0, 1, 3), (-1, 0, 1), ()])
    def test_malformed(self, order):
        graph = graph_of()
        graph.transpose(graph.tensor((2, 3, 5)), order)
        with pytest.raises(ValueError, match="permutation"):
            graph.validate()

    def test_converts_nothing(self):
        graph = graph_of()
        graph.transpose(graph.tensor((2, 3)), (1, 0)).set_data_type(HALF)
        with pytest.raises(ValueError, match="data type"):
            graph.validate()


class TestSlice:
    @pytest.mark.parametrize("parts", [
        (slice(None), slice(None)), (slice(1, 4), slice(2)), (slice(-3, None), slice(None, -1)),
        (slice(0, 5, 2), slice(1, 7, 3)), (slice(2, 2), slice(None)), (slice(4, 1), slice(50)),
        (slice(-50, 50, 7), slice(6, 7)),
    ], ids=str)  # fmt: skip
    def test_as_python_slices(self, parts):
        x = counted((5, 7))
        right = x[parts]
        assert np.array_equal(reference("slice", [x], right.shape, slices=parts), right)
        graph = graph_of(HALF)
        y = graph.slice(graph.tensor((5, 7), (20, 2), INT8), list(parts))
        graph.validate()
        assert y.dim == right.shape and y.data_type is INT8
        assert y.stride == tuple(s * (p.step or 1) for s, p in zip((20, 2), parts, strict=True))

    @pytest.mark.parametrize("parts", [
        None, [slice(None)], [slice(None)] * 3, [slice(None), slice(5, 0, -1)],
        [slice(None), slice(0, 5, 0)], [0, slice(None)],
    ], ids=str)  # fmt: skip
    def test_malformed(self, parts):
        graph = graph_of()
        graph.slice(graph.tensor((5, 7)), parts)
        with pytest.raises(ValueError, match="slice"):
            graph.validate()

    def test_converts_nothing(self):
        graph = graph_of()
        graph.slice(graph.tensor((5,)), [slice(2)]).set_data_type(HALF)
        with pytest.raises(ValueError, match="data type"):
            graph.validate()

    def test_view_of_a_virtual_tensor_into_a_product(self):
        graph = graph_of()
        a, b = graph.tensor((1, 4, 6)), graph.tensor((1, 3, 2))
        part = graph.slice(graph.mul(a, a), [slice(None), slice(1, 4, 2), slice(3, 6)])
        c = graph.matmul(graph.transpose(part, (0, 1, 2)), b).set_output(True)
        graph.build()
        x, y, z = counted((1, 4, 6)), counted((1, 3, 2)), np.empty((1, 2, 2), np.float32)
        graph.execute({a: x, b: y, c: z})
        assert np.array_equal(z, (x * x)[:, 1:4:2, 3:6] @ y)


class TestConcatenate:
    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
    @pytest.mark.parametrize("extents", [(1,), (2, 3), (0, 4, 1), (0, 0)])
    def test_along_every_axis(self, axis, extents):
        shapes = [[2, 3, 5] for _ in extents]
        for shape, extent in zip(shapes, extents, strict=True):
            shape[axis] = extent
        arrays = [counted(shape) + 100 * i for i, shape in enumerate(shapes)]
        right = np.concatenate(arrays, axis)
        params = {"axis": axis, "in_place_index": None}
        assert np.array_equal(reference("concatenate", arrays, right.shape, **params), right)
        view = np.full_like(right, np.nan)
        assert reference("concatenate", arrays, right.shape, view=view, **params) is view
        assert np.array_equal(view, right)
        graph = graph_of()
        y = graph.concatenate(inputs=[graph.tensor(shape) for shape in shapes], axis=axis)
        graph.validate()
        assert y.dim == right.shape

    def test_inputs_that_lie_in_the_output(self):
        memory = counted((4, 3))
        right = np.concatenate([memory[2:], memory[:2]])
        found = reference("concatenate", [memory[2:], memory[:2]], (4, 3), view=memory, axis=0)
        assert found is not memory and np.array_equal(found, right)

    def test_mixed_types_are_converted_each_to_the_output(self):
        big = np.array([2**24 + 1, -7], np.int32)
        found = reference("concatenate", [big, np.array([1.5, 2.6], np.float16)], (4,), dtype=data_type.INT32,
                          numpy=np.int32, axis=0)  # fmt: skip
        assert found.tolist() == [2**24 + 1, -7, 2, 3] and found.dtype == np.int32

    def test_stride_keeps_the_order_of_axes(self):
        graph = graph_of()
        y = graph.concatenate(inputs=[graph.tensor((2, 3, 4), (12, 1, 3)), graph.tensor((2, 3, 1))], axis=2)
        graph.validate()
        assert (y.dim, y.stride) == ((2, 3, 5), (15, 1, 3))

    @pytest.mark.parametrize("options, match", [
        ({"axis": 0}, "inputs"), ({"inputs": [], "axis": 0}, "inputs"), ({"inputs": [(2, 3)]}, "axis"),
        ({"inputs": [(2, 3)], "axis": 2}, "axis"), ({"inputs": [(2, 3), (3, 3)], "axis": 1}, "axis 1"),
        ({"inputs": [(2, 3), (2, 3, 1)], "axis": 1}, "match"),
        ({"inputs": [(2, 3)], "axis": 0, "in_place_index": 1}, "in_place_index"),
    ], ids=str)  # fmt: skip
    def test_malformed(self, options, match):
        graph = graph_of()
        if "inputs" in options:
            options = {**options, "inputs": [graph.tensor(dim) for dim in options["inputs"]]}
        graph.concatenate(**options)
        with pytest.raises(ValueError, match=match):
            graph.validate()

    def test_wrong_calls(self):
        graph = graph_of()
        x = graph.tensor((2, 3))
        with pytest.raises(TypeError):
            graph.concatenate([x, x], 0)
        with pytest.raises(TypeError, match="axis"):
            graph.concatenate(inputs=[x], axes=0)
        with pytest.raises(TypeError, match="None"):
            graph.concatenate(inputs=[x, None], axis=0)

    def test_other_dims_are_not_supported(self):
        graph = graph_of()
        graph.concatenate(inputs=[graph.tensor((2, 3))] * 2, axis=0, out_dims=[5, 3])
        with pytest.raises(cudnnGraphNotSupportedError):
            graph.validate()
