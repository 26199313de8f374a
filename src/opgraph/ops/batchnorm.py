"""Batch normalisation: `batchnorm`, `batchnorm_inference`, `batchnorm_backward` and `genstats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    check_required,
    check_scalar,
    check_set_dim,
    graph_op,
    host_scalar,
    like,
    unsupported,
)
from .channels import (
    backward,
    channel_dim,
    check_channels,
    check_statistic,
    infer_gradients,
    moments,
    normalise,
    sums,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "BatchNormOps"]


class BatchNormOps(GraphOps):
    """Batch normalisation of the graph.

    x is [N, C, ...] of rank 2 or more, in any layout. Statistics are taken for each channel c (axis 1) over
    all other axes, m elements each. Channel tensors (scale, bias, statistics, running statistics and their
    gradients) are [1, C, 1, ..]; those that an operator makes are channels-last and best set to FLOAT. All
    arithmetic is done in the compute type and rounded once per output; data types of outputs are the graph's
    defaults. No elements (m = 0) have mean 0 and variance 0.
    """

    __slots__ = ()

    @graph_op
    def batchnorm(
        self,
        input: Any,
        scale: Any,
        bias: Any,
        in_running_mean: Any = None,
        in_running_var: Any = None,
        epsilon: Any = None,
        momentum: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
        *,
        peer_stats: Sequence[Any] = (),
    ) -> list[Tensor | None]:
        """Training step; returns [Y, mean, inv_variance, next_running_mean, next_running_var].

            mean = sum(x) / m;  v = sum((x - mean)^2) / m;  inv_variance = 1 / sqrt(v + epsilon)
            Y = (x - mean) * inv_variance * scale + bias
            next_running_mean = (1 - momentum) * in_running_mean + momentum * mean
            next_running_var = (1 - momentum) * in_running_var + momentum * v * m / (m - 1)

        inv_variance is a reciprocal standard deviation. The last two outputs are None without running inputs.
        With m = 1, v is 0 and enters the running variance as 0.

        Shapes: input [N, C, ...]; every other tensor [1, C, 1, ..]; Y dim and stride like input. `epsilon`
        and `momentum` are by-value tensors of one element, fed at execution, or Python numbers, which become
        constants of the plan. A running output may be the buffer of its input (update in place).

        Raises at `validate()`: `ValueError` for an unset tensor or epsilon, for one running input without the
        other or without momentum, and for dims that do not fit; `cudnnGraphNotSupportedError` for
        `peer_stats` (statistics of several devices) and for dims set on Y that are not x's.
        """
        running = in_running_mean is not None or in_running_var is not None
        ports = ("Y", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")
        made = self._add_node(
            "batchnorm",
            inputs={
                "input": input,
                "scale": scale,
                "bias": bias,
                "in_running_mean": in_running_mean,
                "in_running_var": in_running_var,
                "epsilon": host_scalar(self, epsilon),
                "momentum": host_scalar(self, momentum),
            },
            outputs=ports if running else ports[:3],
            params={"peer_stats": len(peer_stats)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made.get(port) for port in ports]

    @graph_op
    def batchnorm_inference(
        self,
        input: Any,
        mean: Any,
        inv_variance: Any,
        scale: Any,
        bias: Any,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Y = (x - mean) * inv_variance * scale + bias, with given statistics.

        inv_variance is 1 / sqrt(variance + epsilon) already. Shapes: input [N, C, ...]; mean, inv_variance,
        scale, bias [1, C, 1, ..]; Y dim and stride like input.

        Raises at `validate()`: `ValueError` for an unset tensor or dims that do not fit;
        `cudnnGraphNotSupportedError` for dims set on Y that are not x's.
        """
        return self._add_node(
            "batchnorm_inference",
            inputs={
                "input": input,
                "mean": mean,
                "inv_variance": inv_variance,
                "scale": scale,
                "bias": bias,
            },
            outputs=("Y",),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["Y"]

    @graph_op
    def batchnorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any,
        inv_variance: Any,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
        *,
        peer_stats: Sequence[Any] = (),
    ) -> list[Tensor]:
        """Gradients of `batchnorm`; returns [DX, DScale, DBias].

            xh = (x - mean) * inv_variance
            DBias = sum(grad);  DScale = sum(grad * xh)
            DX = scale * inv_variance * (grad - DBias / m - xh * DScale / m)

        Shapes: grad and input alike, [N, C, ...]; scale, mean and inv_variance [1, C, 1, ..], the statistics
        as `batchnorm` returned them. DX has input's dim and is channels-last whatever input's stride is;
        DScale and DBias are [1, C, 1, ..], channels-last.

        Raises at `validate()`: `ValueError` for an unset tensor or dims that do not fit;
        `cudnnGraphNotSupportedError` for `peer_stats` and for dims set on DX that are not x's.
        """
        ports = ("DX", "DSCALE", "DBIAS")
        made = self._add_node(
            "batchnorm_backward",
            inputs={"grad": grad, "input": input, "scale": scale, "mean": mean, "inv_variance": inv_variance},
            outputs=ports,
            params={"peer_stats": len(peer_stats)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made[port] for port in ports]

    @graph_op
    def genstats(
        self, input: Any, name: str = "", compute_data_type: Any = None, out_dims: Any = None
    ) -> list[Tensor]:
        """Sums for each channel; returns [SUM, SQ_SUM]: SUM = sum(x), SQ_SUM = sum(x^2).

        Shapes: input [N, C, ...]; both outputs [1, C, 1, ..], channels-last. Data types of outputs are the
        graph's defaults; FLOAT is advised, as sums leave the range of HALF soon.

        Raises `ValueError` at `validate()` for an unset input, one without a channel axis, and for other dims
        set on an output.
        """
        made = self._add_node(
            "genstats",
            inputs={"input": input},
            outputs=("SUM", "SQ_SUM"),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made["SUM"], made["SQ_SUM"]]


# -- inference -----------------------------------------------------------------------------------------------


def _no_peers(node: Any) -> None:
    if node.params["peer_stats"]:
        unsupported(
            node,
            "statistics of several devices are not offered",
            expected="no peer_stats",
            given=f"{node.params['peer_stats']} tensors",
            next_step="leave peer_stats empty",
        )


def _infer_training(node: Any) -> None:
    check_required(node, "input", "scale", "bias")
    x = node.inputs["input"]
    check_scalar(node, "epsilon")
    check_channels(node, x, "scale", "bias", "in_running_mean", "in_running_var")
    if "NEXT_RUNNING_MEAN" in node.outputs:
        check_required(node, "in_running_mean", "in_running_var")
        check_scalar(node, "momentum")
    elif "momentum" in node.inputs:
        check_scalar(node, "momentum")
    _no_peers(node)
    for port, tensor in node.outputs.items():
        if port != "Y":
            check_statistic(node, tensor, channel_dim(node, x))
    check_set_dim(node, node.outputs["Y"], x.dim)
    like(node.outputs["Y"], x)


def _infer_inference(node: Any) -> None:
    ports = ("mean", "inv_variance", "scale", "bias")
    check_required(node, "input", *ports)
    x = node.inputs["input"]
    check_channels(node, x, *ports)
    check_set_dim(node, node.outputs["Y"], x.dim)
    like(node.outputs["Y"], x)


def _infer_backward(node: Any) -> None:
    check_required(node, "grad", "input", "scale", "mean", "inv_variance")
    _no_peers(node)
    infer_gradients(node, channel_dim(node, node.inputs["input"]))


def _infer_genstats(node: Any) -> None:
    check_required(node, "input")
    for tensor in node.outputs.values():
        check_statistic(node, tensor, channel_dim(node, node.inputs["input"]))


# -- reference -----------------------------------------------------------------------------------------------


def _training_reference(call: RefCall) -> dict[str, Array]:
    inputs, real = call.inputs, call.math.real
    x, scale, bias = inputs["input"], inputs["scale"], inputs["bias"]
    with np.errstate(all="ignore"):
        mean, variance, count = moments(x, scale.shape, real)
        inverse = 1 / np.sqrt(variance + float(inputs["epsilon"].reshape(-1)[0]))
        result = {"MEAN": mean, "INV_VARIANCE": inverse}
        if "NEXT_RUNNING_MEAN" in call.outputs:
            momentum = float(inputs["momentum"].reshape(-1)[0])
            unbiased = variance * (count / max(count - 1, 1))
            for port, new in (("mean", mean), ("var", unbiased)):
                old = inputs[f"in_running_{port}"].astype(np.float64)
                result[f"NEXT_RUNNING_{port.upper()}"] = (1 - momentum) * old + momentum * new
        result["Y"] = normalise(call, mean, inverse, real(scale), real(bias))
    return result


def _inference_reference(call: RefCall) -> dict[str, Array]:
    inputs, real = call.inputs, call.math.real
    mean, inverse = (inputs[port].astype(np.float64) for port in ("mean", "inv_variance"))
    with np.errstate(all="ignore"):
        return {"Y": normalise(call, mean, inverse, real(inputs["scale"]), real(inputs["bias"]))}


def _backward_reference(call: RefCall) -> dict[str, Array]:
    mean, inverse, scale = (call.math.real(call.inputs[port]) for port in ("mean", "inv_variance", "scale"))
    with np.errstate(all="ignore"):
        return backward(call, mean, inverse, scale)


def _genstats_reference(call: RefCall) -> dict[str, Array]:
    with np.errstate(all="ignore"):
        total, squares = sums(call.inputs["input"], call.outputs["SUM"].shape, call.math.real)
    return {"SUM": total, "SQ_SUM": squares}


OPS = (
    OpDef("batchnorm", NodeType.BATCHNORM, _infer_training, _training_reference),
    OpDef("batchnorm_inference", NodeType.BATCHNORM_INFERENCE, _infer_inference, _inference_reference),
    OpDef("batchnorm_backward", NodeType.BATCHNORM_BACKWARD, _infer_backward, _backward_reference),
    OpDef("genstats", NodeType.GENSTATS, _infer_genstats, _genstats_reference),
)
