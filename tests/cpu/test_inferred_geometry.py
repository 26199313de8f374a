"""Dims, strides and data types that outputs get when the user sets nothing: with a buffer, and virtual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conformance.layouts import channels_last, preserving, row_major

import opgraph
from opgraph import data_type, norm_forward_phase, reduction_mode, reshape_mode

IO, INTERMEDIATE, COMPUTE = data_type.HALF, data_type.BFLOAT16, data_type.FLOAT
FLOAT, INT8, INT32, FP8 = data_type.FLOAT, data_type.INT8, data_type.INT32, data_type.FP8_E4M3

PADDED = ((2, 3, 4), (40, 12, 2))  # strides no default would give
ODD = ((2, 3, 4, 6), (100, 1, 24, 4))
TRAINING = norm_forward_phase.TRAINING


def of(graph: Any, layout: Any, dtype: data_type | None = None) -> Any:
    return graph.tensor(*layout, dtype)


def norm(op: str) -> Callable[[Any], list[Any]]:
    def declare(graph: Any) -> list[Any]:
        scale = graph.tensor([1, 3, 4, 1])
        return getattr(graph, op)(
            input=of(graph, ODD), scale=scale, epsilon=1e-5, norm_forward_phase=TRAINING
        )

    return declare


def norm_backward(op: str, **given: Any) -> Callable[[Any], list[Any]]:
    def declare(graph: Any) -> list[Any]:
        statistic = graph.tensor([2, 1, 1, 6])
        ports = {"inv_variance": statistic, **({"mean": statistic} if op.startswith("layer") else given)}
        scale = graph.tensor([1, 3, 4, 1], [50, 1, 5, 5])
        return getattr(graph, op)(grad=graph.tensor(ODD[0]), input=of(graph, ODD), scale=scale, **ports)

    return declare


def heads(graph: Any) -> tuple[Any, Any, Any]:
    q = graph.tensor([2, 4, 5, 8], [160, 8, 32, 1])
    return q, graph.tensor([2, 2, 7, 8]), graph.tensor([2, 2, 7, 16])


def fp8_heads(graph: Any) -> list[Any]:
    q = graph.tensor([2, 4, 5, 16], [640, 16, 128, 1], FP8)
    return [q, graph.tensor([2, 2, 7, 16], None, FP8), graph.tensor([2, 2, 7, 16], None, FP8)]


def channel_tensors(graph: Any, count: int) -> list[Any]:
    return [graph.tensor([1, 3, 1, 1], [10, 2, 2, 2]) for _ in range(count)]


CONVOLUTION = {"padding": [1, 1], "stride": [1, 2], "dilation": [1, 1]}
_CHANNEL = ((1, 3, 1, 1), channels_last((1, 3, 1, 1)), None)
_IMAGE = ((2, 3, 1, 1), channels_last((2, 3, 1, 1)), None)
_AMAX = ((1, 1, 1, 1), (1, 1, 1, 1), FLOAT)
_KEPT = (2, 1, 1, 6)
_STATISTIC = (_KEPT, preserving(_KEPT, ODD[1]), None)
_SCALE = ((1, 3, 4, 1), (50, 1, 5, 5), None)

# op -> (declare, for each output (dim, stride with a buffer, stride of a virtual output if another, data type
# or None))
CASES: dict[str, tuple[str, Callable[[Any], Any], list[Any]]] = {
    "matmul": (
        "matmul",
        lambda g: g.matmul(g.tensor([2, 1, 3, 4], [12, 12, 1, 3]), g.tensor([1, 5, 4, 6])),
        [((2, 5, 3, 6), row_major((2, 5, 3, 6)), None)],
    ),
    "pointwise like the first input of the output's dim": (
        "add",
        lambda g: g.add(g.tensor([1, 3, 1]), of(g, PADDED)),
        [(*PADDED, None)],
    ),
    "pointwise, both of the output's dim": (
        "mul",
        lambda g: g.mul(of(g, PADDED), g.tensor([2, 3, 4])),
        [(*PADDED, None)],
    ),
    "pointwise, none of the output's dim": (
        "sub",
        lambda g: g.sub(g.tensor([2, 1, 4], [1, 8, 2]), g.tensor([1, 3, 1])),
        [((2, 3, 4), (row_major((2, 3, 4)), preserving((2, 3, 4), (1, 8, 2))), None)],
    ),
    "pointwise backward": (
        "gelu_backward", lambda g: g.gelu_backward(of(g, PADDED), of(g, PADDED)), [(*PADDED, None)]
    ),
    "reduction": (
        "reduction",
        lambda g: g.reduction(of(g, ODD), mode=reduction_mode.MAX).set_dim([2, 3, 1, 6]),
        [((2, 3, 1, 6), channels_last((2, 3, 1, 6)), None)],
    ),
    "reshape": (
        "reshape",
        lambda g: g.reshape(g.tensor([6, 20], data_type=INT8), reshape_mode.LOGICAL, out_dims=[2, 3, 4, 5]),
        [((2, 3, 4, 5), channels_last((2, 3, 4, 5)), INT8)],
    ),
    "reshape to one axis": (
        "reshape",
        lambda g: g.reshape(g.tensor([6, 20]), out_dims=[120]),
        [((120,), (1,), IO)],
    ),
    "transpose": (
        "transpose",
        lambda g: g.transpose(of(g, PADDED, INT8), permutation=[2, 0, 1]),
        [((4, 2, 3), (2, 40, 12), INT8)],
    ),
    "slice": (
        "slice",
        lambda g: g.slice(of(g, PADDED, INT8), slices=[slice(1, 2), slice(None), slice(0, 4, 3)]),
        [((1, 3, 2), (40, 12, 6), INT8)],
    ),
    "concatenate": (
        "concatenate",
        lambda g: g.concatenate(inputs=[of(g, PADDED), g.tensor([2, 5, 4])], axis=1),
        [((2, 8, 4), preserving((2, 8, 4), PADDED[1]), None)],
    ),
    "layernorm": ("layernorm", norm("layernorm"), [(*ODD, None), _STATISTIC, _STATISTIC]),
    "rmsnorm": ("rmsnorm", norm("rmsnorm"), [(*ODD, None), _STATISTIC]),
    "layernorm_backward": (
        "layernorm_backward", norm_backward("layernorm_backward"), [(*ODD, None), _SCALE, _SCALE]
    ),
    "rmsnorm_backward": (
        "rmsnorm_backward", norm_backward("rmsnorm_backward", has_dbias=True), [(*ODD, None), _SCALE, _SCALE]
    ),
    "conv_fprop": (
        "conv_fprop",
        lambda g: g.conv_fprop(of(g, ODD), g.tensor([5, 3, 3, 2]), **CONVOLUTION),
        [((2, 5, 4, 4), channels_last((2, 5, 4, 4)), None)],
    ),
    "conv_dgrad, dims set": (
        "conv_dgrad",
        lambda g: g.conv_dgrad(g.tensor([2, 5, 4, 4]), g.tensor([5, 3, 3, 2]), **CONVOLUTION).set_dim(ODD[0]),
        [(ODD[0], channels_last(ODD[0]), None)],
    ),
    "conv_wgrad, dims set": (
        "conv_wgrad",
        lambda g: g.conv_wgrad(of(g, ODD), g.tensor([2, 5, 4, 4]), **CONVOLUTION, out_dims=[5, 3, 3, 2]),
        [((5, 3, 3, 2), channels_last((5, 3, 3, 2)), None)],
    ),
    "batchnorm": (
        "batchnorm",
        lambda g: g.batchnorm(of(g, ODD), *channel_tensors(g, 4), epsilon=1e-5, momentum=0.1),
        [(*ODD, None)] + [_CHANNEL] * 4,
    ),
    "batchnorm_inference": (
        "batchnorm_inference",
        lambda g: g.batchnorm_inference(of(g, ODD), *channel_tensors(g, 4)),
        [(*ODD, None)],
    ),
    "batchnorm_backward": (
        "batchnorm_backward",
        lambda g: g.batchnorm_backward(g.tensor(ODD[0]), of(g, ODD), *channel_tensors(g, 3)),
        [(ODD[0], channels_last(ODD[0]), None), _CHANNEL, _CHANNEL],
    ),
    "genstats": ("genstats", lambda g: g.genstats(of(g, ODD)), [_CHANNEL, _CHANNEL]),
    "instancenorm": (
        "instancenorm",
        lambda g: g.instancenorm(of(g, ODD), *channel_tensors(g, 2), 1e-5, TRAINING),
        [(*ODD, None), _IMAGE, _IMAGE],
    ),
    "instancenorm_backward": (
        "instancenorm_backward",
        lambda g: g.instancenorm_backward(
            g.tensor(ODD[0]), of(g, ODD), *channel_tensors(g, 1), g.tensor(_IMAGE[0]), g.tensor(_IMAGE[0])
        ),
        [(ODD[0], channels_last(ODD[0]), None), _CHANNEL, _CHANNEL],
    ),
    "rope": ("rope", lambda g: g.rope(of(g, ODD), g.tensor([4, 6])), [(*ODD, None)]),
    "rope_backward": (
        "rope_backward", lambda g: g.rope_backward(of(g, ODD), g.tensor([4, 6])), [(*ODD, None)]
    ),
    "sdpa": (
        "sdpa",
        lambda g: g.sdpa(*heads(g), generate_stats=True),
        [((2, 4, 5, 16), row_major((2, 4, 5, 16)), None), ((2, 4, 5, 1), row_major((2, 4, 5, 1)), FLOAT)],
    ),
    "sdpa_fp8": (
        "sdpa_fp8",
        lambda g: g.sdpa_fp8(*fp8_heads(g), *[1.0] * 6, generate_stats=True),
        [((2, 4, 5, 16), row_major((2, 4, 5, 16)), None), ((2, 4, 5, 1), row_major((2, 4, 5, 1)), FLOAT)]
        + [_AMAX] * 2,
    ),
    "sdpa_fp8_backward": (
        "sdpa_fp8_backward",
        lambda g: g.sdpa_fp8_backward(
            *fp8_heads(g), g.tensor([2, 4, 5, 16]), g.tensor([2, 4, 5, 16], (1280, 320, 64, 1), FP8),
            g.tensor([2, 4, 5, 1], None, FLOAT), *[1.0] * 12,
        ),
        [(dim, row_major(dim), None) for dim in ((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16))] + [_AMAX] * 4,
    ),
    "moe_grouped_matmul": (
        "moe_grouped_matmul",
        lambda g: g.moe_grouped_matmul(
            g.tensor([1, 9, 4], [90, 8, 2]), g.tensor([3, 4, 5], [20, 1, 4]), g.tensor([3, 1, 1], None, INT32)
        ),
        [((1, 9, 5), row_major((1, 9, 5)), None)],
    ),
    "moe_grouped_matmul_bwd": (
        "moe_grouped_matmul_bwd",
        lambda g: g.moe_grouped_matmul_bwd(
            g.tensor([1, 9, 5]), g.tensor([1, 9, 4]), g.tensor([3, 1, 1], None, INT32)
        ),
        [((3, 4, 5), (20, 1, 4), None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("with_buffer", [True, False], ids=["with a buffer", "virtual"])
@pytest.mark.parametrize("name", list(CASES))
def test_inferred(name: str, with_buffer: bool):
    _, declare, wanted = CASES[name]
    graph = opgraph.pygraph(io_data_type=IO, intermediate_data_type=INTERMEDIATE, compute_data_type=COMPUTE)
    outputs = declare(graph)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    assert all(tensor.get_is_virtual() for tensor in outputs)
    for tensor in outputs:
        tensor.set_output(with_buffer)  # after the operator: the final state decides the data type
    if not with_buffer:
        graph.identity(outputs[0]).set_output(True)
    graph.build_operation_graph()
    for tensor, (dim, stride, dtype) in zip(outputs, wanted, strict=True):
        if isinstance(stride[0], tuple):
            stride = stride[0] if with_buffer else stride[1]
        assert tuple(tensor.get_dim()) == tuple(dim)
        assert tuple(tensor.get_stride()) == tuple(stride)
        assert tensor.get_data_type() is (dtype or (IO if with_buffer else INTERMEDIATE))


@pytest.mark.parametrize("name", [name for name, (op, _, _) in CASES.items() if op != "reshape"])
def test_what_the_user_sets_wins(name: str):
    """Another layout of every output than the inferred one; dims stay, as only these fit."""
    _, declare, wanted = CASES[name]
    graph = opgraph.pygraph(io_data_type=IO, intermediate_data_type=FLOAT, compute_data_type=COMPUTE)
    outputs = declare(graph)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    keeps_type = CASES[name][0] in ("transpose", "slice")
    strides = []
    for tensor, (dim, _, dtype) in zip(outputs, wanted, strict=True):
        strides.append(tuple(7 * step for step in row_major(dim)))
        tensor.set_output(True).set_dim(dim).set_stride(strides[-1])
        tensor.set_data_type(dtype if dtype is not None else FLOAT)
    graph.build_operation_graph()
    for tensor, stride, (dim, _, dtype) in zip(outputs, strides, wanted, strict=True):
        assert tuple(tensor.get_dim()) == tuple(dim) and tuple(tensor.get_stride()) == stride
        assert tensor.get_data_type() is (dtype if keeps_type or dtype is not None else FLOAT)
