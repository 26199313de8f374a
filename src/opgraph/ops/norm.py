"""Layer and RMS normalisation, forward and backward: `layernorm`, `rmsnorm` and their `_backward`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, norm_forward_phase
from ..ir.errors import tensor_label
from .base import (
    Array,
    GraphOps,
    OpDef,
    OutSpec,
    RefCall,
    check_same_rank,
    check_scalar,
    check_set_dim,
    format_preserving,
    graph_op,
    host_scalar,
    like,
    malformed,
    number,
    set_dim,
    set_stride,
)
from .norm_rows import layernorm_rows, norm_backward_rows, rmsnorm_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "NormOps"]


class NormOps(GraphOps):
    """Normalisations of the graph.

    The normalised axes N are those where `scale.dim[i] != 1`; there is no axis argument. Example: x [rows, C,
    1, 1] or [B, S, C] with scale [1, C, 1, 1] or [1, 1, C]. Without scale, N is every axis but 0; that is
    legal when at most one of them is longer than 1, or when the dims of a statistic were set (N is then where
    they are 1 and x's are not). n is the number of elements in N. No elements (n = 0) have mean 0 and
    variance 0.

    All arithmetic is done in the compute type and rounded once per output. Data types of outputs are the
    graph's defaults; statistics are best set to FLOAT. Nothing may alias unless the plan says so.
    """

    __slots__ = ()

    @graph_op
    def layernorm(
        self,
        input: Any,
        scale: Any = None,
        bias: Any = None,
        epsilon: Any = None,
        norm_forward_phase: norm_forward_phase | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Layer normalisation; returns [Y, mean, inv_variance], the last two None in the INFERENCE phase.

            mean = sum_N(x) / n;  v = sum_N((x - mean)^2) / n;  inv_variance = 1 / sqrt(v + epsilon)
            Y = (x - mean) * inv_variance * scale + bias

        inv_variance is a reciprocal standard deviation. Shapes: input of any rank; scale of that rank, x's
        extent on N and 1 elsewhere; bias like scale; Y like x (strides too); mean and inv_variance have x's
        dims with 1 on N, their axes ordered as x's. `epsilon` is a by-value tensor of one element, fed at
        execution, or a Python number, which becomes a constant of the plan.

        Raises at `validate()`: `ValueError` for an unset phase or epsilon, ranks or extents that do not fit,
        a bias without scale, statistics whose dims differ, or N undecided; `cudnnGraphNotSupportedError` for
        dims set on Y that are not x's.
        """
        inputs = {"input": input, "scale": scale, "bias": bias, "epsilon": host_scalar(self, epsilon)}
        return _forward(
            self,
            "layernorm",
            ("MEAN", "INV_VARIANCE"),
            inputs,
            norm_forward_phase,
            name,
            compute_data_type,
            out_dims,
        )

    @graph_op
    def rmsnorm(
        self,
        input: Any,
        scale: Any = None,
        bias: Any = None,
        epsilon: Any = None,
        norm_forward_phase: norm_forward_phase | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """RMS normalisation; returns [Y, inv_variance], the last None in the INFERENCE phase.

            inv_variance = 1 / sqrt(sum_N(x^2) / n + epsilon);  Y = x * inv_variance * scale + bias

        Shapes, epsilon and errors are those of `layernorm`.
        """
        inputs = {"input": input, "scale": scale, "bias": bias, "epsilon": host_scalar(self, epsilon)}
        return _forward(
            self, "rmsnorm", ("INV_VARIANCE",), inputs, norm_forward_phase, name, compute_data_type, out_dims
        )

    @graph_op
    def layernorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any = None,
        mean: Any = None,
        inv_variance: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of `layernorm`; returns [DX, DScale, DBias], the last two None without scale.

            xh = (x - mean) * inv_variance;  g = grad * scale
            DX = inv_variance * (g - mean_N(g) - xh * mean_N(g * xh))
            DScale = sum over axes not in N of grad * xh;  DBias = the same sum of grad

        Shapes: grad and input alike; mean and inv_variance as `layernorm` returned them (without scale their
        dims tell N); DX dim and stride like input; DScale, DBias dim and stride like scale.

        Raises at `validate()`: `ValueError` for a missing statistic, or ranks or extents that do not fit;
        `cudnnGraphNotSupportedError` for dims set on an output that are not the inferred ones.
        """
        outputs = ("DX",) if scale is None else ("DX", "DSCALE", "DBIAS")
        made = self._add_node(
            "layernorm_backward",
            inputs={"grad": grad, "input": input, "scale": scale, "mean": mean, "inv_variance": inv_variance},
            outputs=outputs,
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made.get(port) for port in ("DX", "DSCALE", "DBIAS")]

    @graph_op
    def rmsnorm_backward(
        self,
        grad: Any,
        input: Any,
        scale: Any = None,
        inv_variance: Any = None,
        has_dbias: bool | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of `rmsnorm`; returns [DX, DScale, DBias].

            xh = x * inv_variance;  g = grad * scale
            DX = inv_variance * (g - xh * mean_N(g * xh))
            DScale = sum over axes not in N of grad * xh;  DBias = the same sum of grad

        `has_dbias` must be given; False makes the third item None. Without scale the last two are None.
        Shapes and errors are those of `layernorm_backward`; also `ValueError` at `validate()` for an unset
        `has_dbias`, and for `has_dbias=True` without scale.
        """
        outputs = ["DX"]
        if scale is not None:
            outputs.append("Dscale")
            if has_dbias is not False:
                outputs.append("Dbias")
        made = self._add_node(
            "rmsnorm_backward",
            inputs={"grad": grad, "input": input, "scale": scale, "inv_variance": inv_variance},
            outputs=outputs,
            params={"has_dbias": None if has_dbias is None else bool(has_dbias)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )
        return [made.get(port) for port in ("DX", "Dscale", "Dbias")]


def _forward(
    graph: GraphOps,
    op: str,
    statistics: tuple[str, ...],
    inputs: dict[str, Any],
    phase: Any,
    name: str,
    compute_data_type: Any,
    out_dims: Any,
) -> list[Tensor | None]:
    if phase is not None and not isinstance(phase, norm_forward_phase):
        raise TypeError(f"{op}: norm_forward_phase is a norm_forward_phase, given {phase!r}")
    training = phase is norm_forward_phase.TRAINING
    made = graph._add_node(
        op,
        inputs=inputs,
        outputs=("Y", *statistics) if training else ("Y",),
        params={"norm_forward_phase": phase},
        name=name,
        compute_data_type=compute_data_type,
        out_dims=out_dims,
    )
    return [made.get(port) for port in ("Y", *statistics)]


# -- inference -----------------------------------------------------------------------------------------------


def _infer_forward(node: Any) -> None:
    x, scale, bias = node.inputs["input"], node.inputs.get("scale"), node.inputs.get("bias")
    if node.params["norm_forward_phase"] in (None, norm_forward_phase.NOT_SET):
        malformed(
            node,
            "norm_forward_phase not set",
            expected="INFERENCE or TRAINING",
            next_step="pass norm_forward_phase=",
        )
    check_scalar(node, "epsilon")
    statistics = [tensor for port, tensor in node.outputs.items() if port != "Y"]
    if scale is None:
        if bias is not None:
            malformed(node, "a bias needs a scale", tensor=bias, next_step="pass a scale, of ones if need be")
        given = next((tensor.dim for tensor in statistics if tensor.dim), None)
        axes = _axes_without_scale(node, x, given)
    else:
        axes = _axes_of_scale(node, x, scale)
        if bias is not None and bias.dim != scale.dim:
            malformed(node, "bias must have the dim of scale", tensor=bias, expected=scale.dim, given=bias.dim)
    y = node.outputs["Y"]
    check_set_dim(node, y, x.dim)
    like(y, x)
    dim = _kept(x.dim, axes)
    for tensor in statistics:
        if tensor.dim and tensor.dim != dim:
            malformed(
                node,
                "a statistic has the input's dim with 1 on the normalised axes",
                tensor=tensor,
                expected=dim,
                given=tensor.dim,
                next_step="leave its dim unset",
            )
        set_dim(tensor, dim)
        set_stride(tensor, format_preserving(dim, x.stride))


def _infer_backward(node: Any) -> None:
    grad, x, scale = node.inputs["grad"], node.inputs["input"], node.inputs.get("scale")
    if "has_dbias" in node.params:
        if node.params["has_dbias"] is None:
            malformed(node, "has_dbias not set", expected="True or False", next_step="pass has_dbias=")
        if node.params["has_dbias"] and scale is None:
            malformed(node, "has_dbias=True needs a scale", next_step="pass has_dbias=False, or a scale")
    if grad.dim != x.dim:
        malformed(node, "grad must have the input's dim", tensor=grad, expected=x.dim, given=grad.dim)
    statistics = ["inv_variance"] if node.op == "rmsnorm_backward" else ["mean", "inv_variance"]
    for port in statistics:
        if port not in node.inputs:
            malformed(node, f"{port} not set", next_step=f"pass the {port} that the forward returned")
    first = node.inputs[statistics[0]]
    axes = _axes_without_scale(node, x, first.dim) if scale is None else _axes_of_scale(node, x, scale)
    dim = _kept(x.dim, axes)
    for port in statistics:
        tensor = node.inputs[port]
        if tensor.dim != dim:
            malformed(
                node,
                f"{port} has the input's dim with 1 on the normalised axes",
                tensor=tensor,
                expected=dim,
                given=tensor.dim,
            )
    for port, tensor in node.outputs.items():
        model = x if port == "DX" else scale
        check_set_dim(node, tensor, model.dim)
        like(tensor, model)


def _kept(dim: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(dim))


def _axes_of_scale(node: Any, x: Any, scale: Any) -> tuple[int, ...]:
    check_same_rank(node, (x, scale))
    axes = _long_axes(scale.dim)
    if any(scale.dim[axis] != x.dim[axis] for axis in axes):
        malformed(
            node,
            f"scale must have the extents of {tensor_label(x)} on the normalised axes, and 1 elsewhere",
            tensor=scale,
            expected=f"at each axis 1 or that of {x.dim}",
            given=scale.dim,
        )
    return axes


def _axes_without_scale(node: Any, x: Any, statistic: tuple[int, ...] | None) -> tuple[int, ...]:
    if statistic:
        if len(statistic) != len(x.dim) or any(a not in (1, b) for a, b in zip(statistic, x.dim, strict=True)):
            malformed(
                node,
                f"a statistic has the dim of {tensor_label(x)} with 1 on the normalised axes",
                expected=f"at each axis 1 or that of {x.dim}",
                given=statistic,
            )
        return _reduced_axes(x.dim, statistic)
    if len(_long_axes(x.dim[1:])) > 1:
        malformed(
            node,
            "without a scale, the normalised axes are undecided",
            tensor=x,
            expected="at most one axis after axis 0 longer than 1",
            given=x.dim,
            next_step="pass a scale, or set the dim of a statistic",
        )
    return tuple(range(1, len(x.dim)))


def _long_axes(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis, extent in enumerate(dim) if extent != 1)


def _reduced_axes(dim: Sequence[int], statistic: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis, (a, b) in enumerate(zip(dim, statistic, strict=True)) if b == 1 and a != 1)


# -- reference -----------------------------------------------------------------------------------------------


class _Rows:
    """The order of axes that turns an array into rows to normalise: kept axes first, then N, each by falling
    stride.

    Arrays of x's layout then become [rows, n] without a copy where N lies innermost in memory.
    """

    __slots__ = ("count", "length", "order", "shape")

    def __init__(self, x: Array, axes: Sequence[int]) -> None:
        order = sorted(range(x.ndim), key=lambda axis: (axis in axes, -x.strides[axis]))
        self.order = order
        self.shape = tuple(x.shape[axis] for axis in order)
        kept = x.ndim - len(axes)
        self.count = number(self.shape[:kept])
        self.length = number(self.shape[kept:])

    def view(self, array: Array) -> Array:
        """`array` (x's shape) as [rows, n]; a copy where its memory does not allow a view."""
        return array.transpose(self.order).reshape(self.count, self.length)

    def vector(self, array: Array) -> Array:
        """A scale (1 outside N) as [n], or a statistic (1 on N) as [rows]."""
        return array.transpose(self.order).reshape(-1)

    def restore(self, array: Array, shape: tuple[int, ...]) -> Array:
        """The inverse: [rows, n], [n] or [rows] as an array of `shape`, in x's order of axes."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return array.reshape([shape[axis] for axis in self.order]).transpose(back)


def _destination(call: RefCall, out: OutSpec, rows: _Rows, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Where a result of x's shape goes: `[rows, n]`, and the output's view when that is what it is a view of.

    The view is used only where it shares no memory with an input: a block is written before the next one is
    read.
    """
    target = out.target(dtype)
    if target is not None and not any(np.may_share_memory(target, array) for array in call.inputs.values()):
        flat = rows.view(target)
        if np.may_share_memory(flat, target):
            return flat, target
    return np.empty((rows.count, rows.length), dtype), None


def _layernorm_reference(call: RefCall) -> dict[str, Array]:
    return _forward_reference(call, centred=True)


def _rmsnorm_reference(call: RefCall) -> dict[str, Array]:
    return _forward_reference(call, centred=False)


def _forward_reference(call: RefCall, *, centred: bool) -> dict[str, Array]:
    math, inputs, outputs = call.math, call.inputs, call.outputs
    x = math.real(inputs["input"])
    scale = math.real(inputs["scale"]) if "scale" in inputs else None
    bias = math.real(inputs["bias"]) if "bias" in inputs else None
    epsilon = float(inputs["epsilon"].reshape(-1)[0])
    statistics = [port for port in outputs if port != "Y"]
    if scale is not None:
        axes = _long_axes(scale.shape)
    elif statistics:
        axes = _reduced_axes(x.shape, outputs[statistics[0]].shape)
    else:
        axes = tuple(range(1, x.ndim))
    rows = _Rows(x, axes)
    flat, view = _destination(call, outputs["Y"], rows, x.dtype)
    found = {port: np.empty(rows.count, x.dtype) for port in statistics}
    parts = (
        rows.view(x),
        None if scale is None else rows.vector(scale),
        None if bias is None else rows.vector(bias),
        epsilon,
        flat,
    )
    with np.errstate(all="ignore"):
        if centred:
            layernorm_rows(*parts, found.get("MEAN"), found.get("INV_VARIANCE"))
        else:
            rmsnorm_rows(*parts, found.get("INV_VARIANCE"))
    result = {port: rows.restore(values, outputs[port].shape) for port, values in found.items()}
    result["Y"] = view if view is not None else rows.restore(flat, x.shape)
    return result


def _backward_reference(call: RefCall) -> dict[str, Array]:
    math, inputs, outputs = call.math, call.inputs, call.outputs
    x = math.real(inputs["input"])
    scale = math.real(inputs["scale"]) if "scale" in inputs else None
    inverse = math.real(inputs["inv_variance"])
    axes = _reduced_axes(x.shape, inverse.shape) if scale is None else _long_axes(scale.shape)
    rows = _Rows(x, axes)
    flat, view = _destination(call, outputs["DX"], rows, x.dtype)
    # Sums over rows may have a million terms; float64 keeps them exact at no cost, as each is [n].
    sums = {port: np.zeros(rows.length) for port in outputs if port != "DX"}
    by_kind = {port.upper(): values for port, values in sums.items()}
    with np.errstate(all="ignore"):
        norm_backward_rows(
            rows.view(math.real(inputs["grad"])),
            rows.view(x),
            None if scale is None else rows.vector(scale),
            rows.vector(math.real(inputs["mean"])) if "mean" in inputs else None,
            rows.vector(inverse),
            flat,
            by_kind.get("DSCALE"),
            by_kind.get("DBIAS"),
        )
    result = {port: rows.restore(values, outputs[port].shape) for port, values in sums.items()}
    result["DX"] = view if view is not None else rows.restore(flat, x.shape)
    return result


OPS = (
    OpDef("layernorm", NodeType.LAYERNORM, _infer_forward, _layernorm_reference),
    OpDef("rmsnorm", NodeType.RMSNORM, _infer_forward, _rmsnorm_reference),
    OpDef("layernorm_backward", NodeType.LAYERNORM_BACKWARD, _infer_backward, _backward_reference),
    OpDef("rmsnorm_backward", NodeType.RMSNORM_BACKWARD, _infer_backward, _backward_reference),
)
