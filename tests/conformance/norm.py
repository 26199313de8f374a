"""Cases of layer and RMS normalisation, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.calculus import vjp
from conformance.layouts import channels_last, padded, preserving, reversed_axes
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, norm_forward_phase

__all__ = ["CASES", "EPSILON", "Norm", "NormBackward", "normalised"]

Rng = np.random.Generator

EPSILON = 1e-3

# (id, x dims, scale dims, x strides)
_SHAPES: tuple[tuple[str, Sequence[int], Sequence[int], Sequence[int] | None], ...] = (
    ("rows", [5, 13, 1, 1], [1, 13, 1, 1], None),
    ("sequence", [2, 3, 8], [1, 1, 8], None),
    ("two axes normalised", [3, 4, 5], [1, 4, 5], None),
    ("image", [2, 3, 4, 5], [1, 3, 4, 5], None),
    ("one element in each row", [3, 2, 1], [1, 2, 1], None),
    ("tile edge below", [3, 127], [1, 127], None),
    ("tile edge above", [3, 129], [1, 129], None),
    ("transposed", [5, 7], [1, 7], reversed_axes([5, 7])),
    ("channels last", [2, 3, 4, 5], [1, 3, 1, 1], channels_last([2, 3, 4, 5])),
    ("padded rows", [4, 6], [1, 6], padded([4, 6])),
    ("first axis normalised", [6, 4], [6, 1], None),
    ("no rows", [0, 6], [1, 6], None),
)


def normalised(centred: bool, axes: tuple[int, ...], epsilon: Any) -> Any:
    """Y, mean and inv_variance from x, scale and bias: the formula in NumPy or torch."""

    def formula(values: Mapping[str, Any]) -> dict[str, Any]:
        x = values["x"]
        mean = x.mean(axes, keepdims=True) if centred else 0.0
        inverse = (((x - mean) ** 2).mean(axes, keepdims=True) + epsilon) ** -0.5
        y = (x - mean) * inverse
        if "scale" in values:
            y = y * values["scale"]
        if "bias" in values:
            y = y + values["bias"]
        found = {"Y": y, "INV_VARIANCE": inverse}
        if centred:
            found["MEAN"] = mean
        return found

    return formula


def _axes(scale: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis, extent in enumerate(scale) if extent != 1)


def _statistic(x: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(x))


class Norm:
    """Forward. `parts` says which of scale and bias are given."""

    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE)

    def __init__(self, op: str) -> None:
        self.op = self.id = op
        self.centred = op == "layernorm"
        self.statistics = ("MEAN", "INV_VARIANCE") if self.centred else ("INV_VARIANCE",)

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        scale: Sequence[int],
        stride: Sequence[int] | None,
        dtype: data_type,
        *,
        parts: str = "scale bias",
        training: bool = True,
        out_stride: Sequence[int] | None = None,
        shift: float = 0.5,
        scale_type: data_type | None = None,
    ) -> Problem:
        axes = _axes(scale)
        math = data_type.DOUBLE if dtype is data_type.DOUBLE else data_type.FLOAT
        inputs = {
            "x": Input(rng.standard_normal(dim) + shift, dtype, stride),
            "epsilon": Input(np.full([1] * len(dim), EPSILON), math, by_value=True),
        }
        if "scale" in parts:
            inputs["scale"] = Input(rng.uniform(0.5, 1.5, scale), scale_type or dtype)
        if "bias" in parts:
            inputs["bias"] = Input(rng.standard_normal(scale), scale_type or dtype)
        phase = norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            results = getattr(graph, self.op)(
                input=tensors["x"],
                scale=tensors.get("scale"),
                bias=tensors.get("bias"),
                epsilon=tensors["epsilon"],
                norm_forward_phase=phase,
            )
            y, *statistics = results
            if out_stride is not None:
                y.set_stride(out_stride)
            if not training:
                assert statistics == [None] * len(self.statistics), (
                    f"{id}: statistics {statistics} in INFERENCE"
                )
                return {"Y": y}
            for tensor in statistics:
                tensor.set_data_type(math)
            return {"Y": y, **dict(zip(self.statistics, statistics, strict=True))}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            found = normalised(self.centred, axes, values["epsilon"])(values)
            if xp is not np and self.centred and "scale" in values and axes == tuple(range(1, len(dim))):
                found["Y"] = _torch_layernorm(xp, values, len(axes))
            return found if training else {"Y": found["Y"]}

        x_stride = inputs["x"].stride
        expect = {"Y": Expect(dim, out_stride or x_stride, dtype)}
        if training:
            kept = _statistic(dim, axes)
            for name in self.statistics:
                expect[name] = Expect(kept, preserving(kept, x_stride), math)
        return Problem(
            f"{self.op} {dtype.name}: {id}",
            inputs,
            declare,
            truth,
            expect,
            io=dtype,
            intermediate=math,
            compute=math,
        )

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, scale, stride in _SHAPES:
            yield self.problem(id, rng, dim, scale, stride, dtype)
        plain = ([4, 6], [1, 6], None, dtype)
        yield self.problem("inference", rng, *plain, training=False)
        yield self.problem("no bias", rng, *plain, parts="scale")
        yield self.problem("no scale", rng, *plain, parts="")
        yield self.problem("padded output", rng, *plain, out_stride=(9, 1))
        yield self.problem("transposed output", rng, *plain, out_stride=(1, 4))
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        if dtype in (data_type.HALF, data_type.BFLOAT16):
            yield self.problem("FLOAT scale", rng, *plain, scale_type=data_type.FLOAT)


def _torch_layernorm(torch: Any, values: Mapping[str, Any], count: int) -> Any:
    shape = values["x"].shape[-count:]
    scale = values["scale"].reshape(shape)
    bias = values["bias"].reshape(shape) if "bias" in values else None
    return torch.nn.functional.layer_norm(values["x"], shape, scale, bias, float(values["epsilon"]))


class NormBackward:
    """The truth is the derivative of the forward formula; mean and inv_variance are those of x."""

    data_types = Norm.data_types

    def __init__(self, op: str) -> None:
        self.op = self.id = op
        self.centred = op == "layernorm_backward"

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        scale: Sequence[int],
        stride: Sequence[int] | None,
        dtype: data_type,
        *,
        with_scale: bool = True,
        dbias: bool = True,
        out_stride: Sequence[int] | None = None,
    ) -> Problem:
        axes = _axes(scale)
        math = data_type.DOUBLE if dtype is data_type.DOUBLE else data_type.FLOAT
        x = Input(rng.standard_normal(dim) + 0.5, dtype, stride)
        inputs = {"grad": Input(rng.standard_normal(dim), dtype), "x": x}
        if with_scale:
            inputs["scale"] = Input(rng.uniform(0.5, 1.5, scale), dtype)
        formula = normalised(self.centred, axes, EPSILON)
        statistics = formula({"x": x.values.astype(np.float64)})
        if self.centred:
            inputs["mean"] = Input(statistics["MEAN"], math)
        inputs["inv_variance"] = Input(statistics["INV_VARIANCE"], math)
        wanted = ["x", *(["scale"] if with_scale else []), *(["bias"] if with_scale and dbias else [])]
        ports = {"x": "DX", "scale": "DSCALE", "bias": "DBIAS"}

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            given: dict[str, Any] = (
                {"mean": tensors["mean"]} if self.centred else {"has_dbias": with_scale and dbias}
            )
            results = getattr(graph, self.op)(
                grad=tensors["grad"],
                input=tensors["x"],
                scale=tensors.get("scale"),
                inv_variance=tensors["inv_variance"],
                **given,
            )
            named = dict(zip(ports.values(), results, strict=True))
            made = {port for port, tensor in named.items() if tensor is not None}
            assert made == {ports[name] for name in wanted}, f"{id}: returned {sorted(made)}"
            if out_stride is not None:
                named["DX"].set_stride(out_stride)
            return {port: tensor for port, tensor in named.items() if tensor is not None}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            given = {"x": values["x"]}
            if with_scale:
                given["scale"] = values["scale"]
                given["bias"] = values["scale"] * 0
            found = vjp(xp, formula, given, {"Y": values["grad"]}, tuple(wanted))
            return {ports[name]: gradient for name, gradient in found.items()}

        expect = {"DX": Expect(dim, out_stride or x.stride, dtype)}
        for name in wanted[1:]:
            expect[ports[name]] = Expect(scale, inputs["scale"].stride, dtype)
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect,
            io=dtype, intermediate=math, compute=math,
            needs_torch=int(np.prod(dim)) > 100 or dtype is data_type.DOUBLE,
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, scale, stride in _SHAPES:
            yield self.problem(id, rng, dim, scale, stride, dtype)
        plain = ([4, 6], [1, 6], None, dtype)
        yield self.problem("no scale", rng, *plain, with_scale=False)
        yield self.problem("padded output", rng, *plain, out_stride=(9, 1))
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        if not self.centred:
            yield self.problem("no dbias", rng, *plain, dbias=False)


CASES = (
    Norm("layernorm"),
    Norm("rmsnorm"),
    NormBackward("layernorm_backward"),
    NormBackward("rmsnorm_backward"),
)
