"""Dims, strides and refusals of batch and instance normalisation, and the order of their arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, norm_forward_phase
from opgraph.ir import NodeType
from opgraph.ir.spec import infer_live
from opgraph.ops.base import channels_last

TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
X, CHANNEL, IMAGE = [2, 3, 4, 5], [1, 3, 1, 1], [2, 3, 1, 1]
PADDED = [100, 30, 6, 1]
TAIL = ["name", "compute_data_type", "out_dims"]

# op -> (tensor arguments with their dims, in order, then attributes; outputs with their dims)
OPS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "batchnorm": (
        {
            "input": X, "scale": CHANNEL, "bias": CHANNEL, "in_running_mean": CHANNEL,
            "in_running_var": CHANNEL, "epsilon": [1, 1, 1, 1], "momentum": [1, 1, 1, 1],
        },
        [],
        {
            "Y": X, "MEAN": CHANNEL, "INV_VARIANCE": CHANNEL, "NEXT_RUNNING_MEAN": CHANNEL,
            "NEXT_RUNNING_VAR": CHANNEL,
        },
    ),
    "batchnorm_inference": (
        {"input": X, "mean": CHANNEL, "inv_variance": CHANNEL, "scale": CHANNEL, "bias": CHANNEL}, [],
        {"Y": X},
    ),
    "batchnorm_backward": (
        {"grad": X, "input": X, "scale": CHANNEL, "mean": CHANNEL, "inv_variance": CHANNEL}, [],
        {"DX": X, "DSCALE": CHANNEL, "DBIAS": CHANNEL},
    ),
    "genstats": ({"input": X}, [], {"SUM": CHANNEL, "SQ_SUM": CHANNEL}),
    "instancenorm": (
        {"input": X, "scale": CHANNEL, "bias": CHANNEL, "epsilon": [1, 1, 1, 1]}, ["norm_forward_phase"],
        {"Y": X, "MEAN": IMAGE, "INV_VARIANCE": IMAGE},
    ),
    "instancenorm_backward": (
        {"grad": X, "input": X, "scale": CHANNEL, "mean": IMAGE, "inv_variance": IMAGE}, [],
        {"DX": X, "DSCALE": CHANNEL, "DBIAS": CHANNEL},
    ),
}  # fmt: skip


def declare(op: str, **changes: Any) -> tuple[Any, Any]:
    """The operator with its tensors; `changes` replaces dims (None: no tensor) and adds keywords."""
    graph = opgraph.pygraph(io_data_type=data_type.HALF, intermediate_data_type=data_type.FLOAT)
    dims, attributes, _ = OPS[op]
    tensors = {}
    for port, dim in dims.items():
        dim = changes.pop(port, dim)
        stride = PADDED if port == "input" and dim == X else None
        scalar = port in ("epsilon", "momentum")
        tensors[port] = None if dim is None else graph.tensor(dim, stride, is_pass_by_value=scalar, name=port)
    given = {"norm_forward_phase": TRAINING} if attributes else {}
    return graph, getattr(graph, op)(*tensors.values(), **{**given, **changes})


def refuse(graph: Any, error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


@pytest.mark.parametrize("op", OPS)
def test_arguments_and_outputs(op):
    dims, attributes, outputs = OPS[op]
    parameters = list(inspect.signature(getattr(opgraph.pygraph, op)).parameters)[1:]
    peers = ["peer_stats"] if op in ("batchnorm", "batchnorm_backward") else []
    assert parameters == [*dims, *attributes, *TAIL, *peers]
    graph, results = declare(op, name="n")
    results = results if isinstance(results, list) else [results]
    assert isinstance(results, list) and [tensor.name for tensor in results] == [f"n::{p}" for p in outputs]
    results[-1].set_output(True)
    graph.validate()
    assert graph.get_node("n").node_type is NodeType[op.upper()]
    for tensor, (port, dim) in zip(results, outputs.items(), strict=True):
        assert tensor.get_dim() == dim
        assert tensor.get_stride() == (PADDED if port == "Y" else list(channels_last(dim))), port
        wanted = data_type.HALF if tensor is results[-1] else data_type.FLOAT
        assert tensor.get_data_type() is wanted


@pytest.mark.parametrize(
    "dim", [(2, 3), (2, 3, 7), (2, 3, 2, 2, 2), (0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)]
)
@pytest.mark.parametrize("op", OPS)
def test_any_rank_from_two_and_any_extent(op, dim):
    channel, image = (1, dim[1], *[1] * (len(dim) - 2)), (*dim[:2], *[1] * (len(dim) - 2))
    as_here = {tuple(X): dim, tuple(CHANNEL): channel, tuple(IMAGE): image, (1, 1, 1, 1): [1] * len(dim)}
    graph, results = declare(op, **{port: as_here[tuple(old)] for port, old in OPS[op][0].items()})
    graph.validate()
    results = results if isinstance(results, list) else [results]
    for tensor, old in zip(results, OPS[op][2].values(), strict=True):
        assert tensor.get_dim() == list(as_here[tuple(old)])


def test_outputs_that_were_not_asked_for_are_none():
    _, results = declare("batchnorm", in_running_mean=None, in_running_var=None, momentum=None)
    assert (
        type(results) is list
        and len(results) == 5
        and results[3:] == [None, None]
        and None not in results[:3]
    )
    _, results = declare("instancenorm", norm_forward_phase=INFERENCE)
    assert type(results) is list and len(results) == 3 and results[1:] == [None, None]
    graph, results = declare("batchnorm", in_running_mean=None, in_running_var=None)
    graph.validate()  # a momentum that nothing needs
    assert results[3:] == [None, None]


def test_numbers_are_constants_of_the_plan():
    graph = opgraph.pygraph(io_data_type=data_type.HALF)
    x, c = graph.tensor(X), graph.tensor(CHANNEL)
    graph.batchnorm(x, c, c, c, c, 1e-5, 0.1)
    graph.instancenorm(x, c, c, 1e-5, TRAINING)
    graph.validate()
    scalars = [
        graph.nodes[0].inputs["epsilon"],
        graph.nodes[0].inputs["momentum"],
        graph.nodes[1].inputs["epsilon"],
    ]
    assert [tensor.pass_by_value for tensor in scalars] == [1e-5, 0.1, 1e-5]
    assert {tensor.get_data_type() for tensor in scalars} == {data_type.FLOAT}


@pytest.mark.parametrize("op", OPS)
def test_every_tensor_is_needed(op):
    optional = ("in_running_mean", "in_running_var")
    for port in OPS[op][0]:
        if port in optional:
            continue
        graph, _ = declare(op, **{port: None})
        refuse(graph, ValueError, f"{port} not set", f"{op} '{op}.0'")


def test_running_statistics_come_together():
    for port, other in (("in_running_mean", "in_running_var"), ("in_running_var", "in_running_mean")):
        graph, _ = declare("batchnorm", **{port: None})
        refuse(graph, ValueError, f"{port} not set")
        assert other in graph.nodes[0].inputs


def test_phase():
    for phase in (None, norm_forward_phase.NOT_SET):
        graph, _ = declare("instancenorm", norm_forward_phase=phase)
        refuse(graph, ValueError, "norm_forward_phase not set")
    with pytest.raises(TypeError, match="norm_forward_phase"):
        declare("instancenorm", norm_forward_phase=1)


@pytest.mark.parametrize("op", OPS)
def test_dims_that_do_not_fit(op):
    for port, dim in OPS[op][0].items():
        if port in ("epsilon", "momentum"):
            wrong: Any = [1, 2, 1, 1]
        elif port == "input" and len(OPS[op][0]) == 1:
            continue
        elif port in ("input", "grad"):
            wrong = [2, 4, 4, 5]
        else:
            wrong = [dim[0], 2, 1, 1]
        graph, _ = declare(op, **{port: wrong})
        # Another input is contradicted by the first tensor that has its old channels.
        refuse(graph, ValueError, "given" if port in ("input", "grad") else str(tuple(wrong)))
        if port not in ("input", "grad", "epsilon", "momentum"):
            graph, _ = declare(op, **{port: dim[:-1]})  # another rank
            refuse(graph, ValueError, f"'{port}'")
            graph, _ = declare(op, **{port: [2, *dim[1:3], 2]})
            refuse(graph, ValueError, f"'{port}'")


def test_an_input_has_a_channel_axis():
    graph = opgraph.pygraph(io_data_type=data_type.FLOAT)
    graph.genstats(graph.tensor([7], name="x"))
    refuse(graph, ValueError, "'x'", "[N, C, ...]")


@pytest.mark.parametrize("op", OPS)
def test_dims_set_on_outputs(op):
    for port, dim in OPS[op][2].items():
        graph, _ = declare(op, out_dims={port: dim})
        graph.validate()
        wrong = [dim[0], 7, *dim[2:]]
        graph, _ = declare(op, out_dims={port: wrong})
        error = cudnnGraphNotSupportedError if port in ("Y", "DX") else ValueError
        refuse(graph, error, str(tuple(wrong)))


@pytest.mark.parametrize("op", ["batchnorm", "batchnorm_backward"])
def test_peer_statistics_are_declined(op):
    graph, _ = declare(op, peer_stats=[])
    graph.validate()
    peer = graph.tensor([2, 4 * 3, 1, 1])
    graph, _ = declare(op, peer_stats=[peer, peer])
    refuse(graph, cudnnGraphNotSupportedError, "several devices", "2 tensors", f"{op} '{op}.0'")
    with pytest.raises(cudnnGraphNotSupportedError):
        graph.build()


def test_live_geometry():
    graph, results = declare("instancenorm")
    for tensor in results:
        tensor.set_output(True)
    spec = graph._ir.snapshot()
    x, outputs = graph.find_tensor("input").get_uid(), [tensor.get_uid() for tensor in results]
    live = {x: ((1, 3, 4, 5), (60, 20, 5, 1)), outputs[0]: ((1, 3, 4, 5), (60, 20, 5, 1))}
    live |= dict.fromkeys(outputs[1:], ((1, 3, 1, 1), (3, 1, 3, 3)))
    assert infer_live(spec, live)[outputs[1]][0] == (1, 3, 1, 1)
    del live[outputs[2]]
    with pytest.raises(ValueError, match=r"\(1, 3, 1, 1\).*\(2, 3, 1, 1\)"):
        infer_live(spec, live)
