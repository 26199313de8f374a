"""Instance normalisation: `instancenorm` and `instancenorm_backward`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, norm_forward_phase
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
    malformed,
)
from .channels import (
    backward,
    channel_dim,
    check_channels,
    check_statistic,
    infer_gradients,
    moments,
    normalise,
)

if TYPE_CHECKING:
    from ..ir.tensor import Tensor

__all__ = ["OPS", "InstanceNormOps"]

_PHASE = norm_forward_phase  # the class, where an argument of the same name hides it


class InstanceNormOps(GraphOps):
    """Instance normalisation of the graph.

    x is [N, C, ...] of rank 2 or more, in any layout. Statistics are taken for each (n, c) over the axes from
    2 on, m elements each, and are [N, C, 1, ..]; scale, bias and their gradients are [1, C, 1, ..]. What an
    operator makes of these is channels-last and best set to FLOAT. All arithmetic is done in the compute type
    and rounded once per output; data types of outputs are the graph's defaults. No elements (m = 0) have mean
    0 and variance 0.
    """

    __slots__ = ()

    @graph_op
    def instancenorm(
        self,
        input: Any,
        scale: Any,
        bias: Any,
        epsilon: Any = None,
        norm_forward_phase: norm_forward_phase | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Returns [Y, mean, inv_variance], the last two None in the INFERENCE phase.

            mean = sum(x) / m;  v = sum((x - mean)^2) / m;  inv_variance = 1 / sqrt(v + epsilon)
            Y = (x - mean) * inv_variance * scale + bias

        inv_variance is a reciprocal standard deviation. Shapes: input [N, C, ...]; scale, bias [1, C, 1, ..];
        Y dim and stride like input; mean and inv_variance [N, C, 1, ..], channels-last. `epsilon` is a
        by-value tensor of one element, fed at execution, or a Python number, which becomes a constant of the
        plan.

        Raises at `validate()`: `ValueError` for an unset tensor, epsilon or phase, and for dims that do not
        fit; `cudnnGraphNotSupportedError` for dims set on Y that are not x's.
        """
        phase = norm_forward_phase
        if phase is not None and not isinstance(phase, _PHASE):
            raise TypeError(f"instancenorm: norm_forward_phase is a norm_forward_phase, given {phase!r}")
        ports = ("Y", "MEAN", "INV_VARIANCE")
        made = self._add_node(
            "instancenorm",
            inputs={"input": input, "scale": scale, "bias": bias, "epsilon": host_scalar(self, epsilon)},
            outputs=ports if phase is _PHASE.TRAINING else ports[:1],
            params={"norm_forward_phase": phase},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made.get(port) for port in ports]

    @graph_op
    def instancenorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any,
        mean: Any,
        inv_variance: Any,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor]:
        """Gradients of `instancenorm`; returns [DX, DScale, DBias].

            xh = (x - mean) * inv_variance;  g = grad * scale
            DX = inv_variance * (g - sum(g) / m - xh * sum(g * xh) / m), sums over the axes from 2 on
            DScale = sum(grad * xh);  DBias = sum(grad), sums over all axes but 1

        Shapes: grad and input alike, [N, C, ...]; scale [1, C, 1, ..]; mean and inv_variance [N, C, 1, ..] as
        `instancenorm` returned them. DX has input's dim and is channels-last whatever input's stride is;
        DScale and DBias are [1, C, 1, ..], channels-last.

        Raises at `validate()`: `ValueError` for an unset tensor or dims that do not fit;
        `cudnnGraphNotSupportedError` for dims set on DX that are not x's.
        """
        ports = ("DX", "DSCALE", "DBIAS")
        made = self._add_node(
            "instancenorm_backward",
            inputs={"grad": grad, "input": input, "scale": scale, "mean": mean, "inv_variance": inv_variance},
            outputs=ports,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made[port] for port in ports]


def _statistic_dim(node: Any, x: Any) -> tuple[int, ...]:
    return (x.dim[0], *channel_dim(node, x)[1:])


def _infer_forward(node: Any) -> None:
    check_required(node, "input", "scale", "bias")
    if node.params["norm_forward_phase"] in (None, _PHASE.NOT_SET):
        malformed(
            node,
            "norm_forward_phase not set",
            expected="INFERENCE or TRAINING",
            next_step="pass norm_forward_phase=",
        )
    check_scalar(node, "epsilon")
    x = node.inputs["input"]
    check_channels(node, x, "scale", "bias")
    for port, tensor in node.outputs.items():
        if port != "Y":
            check_statistic(node, tensor, _statistic_dim(node, x))
    check_set_dim(node, node.outputs["Y"], x.dim)
    like(node.outputs["Y"], x)


def _infer_backward(node: Any) -> None:
    check_required(node, "grad", "input", "scale", "mean", "inv_variance")
    infer_gradients(node, _statistic_dim(node, node.inputs["input"]))


def _forward_reference(call: RefCall) -> dict[str, Array]:
    inputs, real = call.inputs, call.math.real
    x = inputs["input"]
    with np.errstate(all="ignore"):
        mean, variance, _ = moments(x, (*x.shape[:2], *(1,) * (x.ndim - 2)), real)
        inverse = 1 / np.sqrt(variance + float(inputs["epsilon"].reshape(-1)[0]))
        y = normalise(call, mean, inverse, real(inputs["scale"]), real(inputs["bias"]))
    found = {"Y": y, "MEAN": mean, "INV_VARIANCE": inverse}
    return {port: found[port] for port in call.outputs}


def _backward_reference(call: RefCall) -> dict[str, Array]:
    mean, inverse, scale = (call.math.real(call.inputs[port]) for port in ("mean", "inv_variance", "scale"))
    with np.errstate(all="ignore"):
        return backward(call, mean, inverse, scale)


OPS = (
    OpDef("instancenorm", NodeType.INSTANCENORM, _infer_forward, _forward_reference),
    OpDef("instancenorm_backward", NodeType.INSTANCENORM_BACKWARD, _infer_backward, _backward_reference),
)
