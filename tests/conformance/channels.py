"""Cases of normalisation by channel: batch and instance normalisation, forward and backward, and
`genstats`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.calculus import vjp
from conformance.layouts import channels_last, padded, reversed_axes
from conformance.problem import Expect, Input, Problem
from opgraph import data_type, norm_forward_phase

__all__ = ["CASES"]

Rng = np.random.Generator

EPSILON, MOMENTUM = 1e-3, 0.125

# (id, dims [N, C, ...], strides)
_SHAPES: tuple[tuple[str, Sequence[int], Sequence[int] | None], ...] = (
    ("image", [2, 3, 4, 5], None),
    ("rows", [7, 5, 1, 1], None),
    ("two axes", [13, 4], None),
    ("one spatial axis", [3, 2, 17], None),
    ("volume", [2, 3, 2, 2, 3], None),
    ("one channel", [2, 1, 4, 5], None),
    ("channels last", [2, 3, 4, 5], channels_last([2, 3, 4, 5])),
    ("transposed", [4, 3, 2], reversed_axes([4, 3, 2])),
    ("padded rows", [2, 3, 5], padded([2, 3, 5])),
    ("tile edge above", [3, 5, 43], None),
)


def _channel(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if axis == 1 else 1 for axis, n in enumerate(dim))


def _by_image(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if axis < 2 else 1 for axis, n in enumerate(dim))


def normalised(axes: Sequence[int]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Y, mean, biased variance and inv_variance of x over `axes`: the formula in NumPy or torch."""

    def formula(values: Mapping[str, Any]) -> dict[str, Any]:
        x = values["x"]
        mean = x.mean(tuple(axes), keepdims=True)
        variance = ((x - mean) ** 2).mean(tuple(axes), keepdims=True)
        inverse = (variance + EPSILON) ** -0.5
        y = (x - mean) * inverse * values["scale"] + values["bias"]
        return {"Y": y, "MEAN": mean, "INV_VARIANCE": inverse, "VARIANCE": variance}

    return formula


class _Channels:
    """What the operators have in common: which axes are normalised, and one problem per shape."""

    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)

    def __init__(self, op: str) -> None:
        self.op = self.id = op
        self.instance = op.startswith("instance")

    def axes(self, dim: Sequence[int]) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(dim)) if axis > 1 or (axis == 0 and not self.instance))

    def statistic(self, dim: Sequence[int]) -> tuple[int, ...]:
        return _by_image(dim) if self.instance else _channel(dim)

    def inputs(self, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type) -> dict[str, Input]:
        return {
            "x": Input(rng.standard_normal(dim) + 0.5, dtype, stride),
            "scale": Input(rng.uniform(0.5, 1.5, _channel(dim))),
            "bias": Input(rng.standard_normal(_channel(dim))),
        }

    def problem(self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type) -> Problem:
        raise NotImplementedError

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, dim, stride in _SHAPES:
            if self.instance and len(dim) == 2:
                continue
            yield self.problem(id, rng, dim, stride, dtype)
        yield self.problem("virtual", rng, [2, 3, 4, 5], None, dtype).with_virtual_edges()


class Forward(_Channels):
    """`batchnorm` with running statistics, or `instancenorm` in the TRAINING phase."""

    def problem(self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type) -> Problem:
        inputs = self.inputs(rng, dim, stride, dtype)
        one = [1] * len(dim)
        inputs["epsilon"] = Input(np.full(one, EPSILON), by_value=True)
        if not self.instance:
            inputs["running_mean"] = Input(rng.standard_normal(_channel(dim)))
            inputs["running_var"] = Input(rng.uniform(0.5, 2, _channel(dim)))
            inputs["momentum"] = Input(np.full(one, MOMENTUM), by_value=True)
        ports = ["Y", "MEAN", "INV_VARIANCE", *([] if self.instance else ["NEXT_MEAN", "NEXT_VAR"])]

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            common = {"input": t["x"], "scale": t["scale"], "bias": t["bias"], "epsilon": t["epsilon"]}
            if self.instance:
                found = graph.instancenorm(**common, norm_forward_phase=norm_forward_phase.TRAINING)
            else:
                running = {"in_running_mean": t["running_mean"], "in_running_var": t["running_var"]}
                found = graph.batchnorm(**common, **running, momentum=t["momentum"])
            for tensor in found[1:]:
                tensor.set_data_type(data_type.FLOAT)
            return dict(zip(ports, found, strict=True))

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            found = normalised(self.axes(dim))(values)
            count = values["x"].shape[0] if not self.instance else 1
            for extent in dim[2:]:
                count *= extent
            variance = found.pop("VARIANCE")
            if not self.instance:
                keep, unbiased = 1 - MOMENTUM, variance * count / (count - 1)
                found["NEXT_MEAN"] = keep * values["running_mean"] + MOMENTUM * found["MEAN"]
                found["NEXT_VAR"] = keep * values["running_var"] + MOMENTUM * unbiased
            if xp is not np and (not self.instance or len(dim) > 2):
                self._as_torch_says(xp, values, found)
            return found

        expect = {"Y": Expect(dim, inputs["x"].stride, dtype)}
        for port in ports[1:]:
            kept = self.statistic(dim)
            expect[port] = Expect(kept, channels_last(kept), data_type.FLOAT)
        return Problem(f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect, io=dtype)

    def _as_torch_says(self, torch: Any, values: Mapping[str, Any], found: dict[str, Any]) -> None:
        scale, bias = values["scale"].reshape(-1), values["bias"].reshape(-1)
        functional = torch.nn.functional
        if self.instance:
            # It refuses single elements, which have no variance.
            if values["x"][0, 0].numel() > 1:
                found["Y"] = functional.instance_norm(values["x"], weight=scale, bias=bias, eps=EPSILON)
            return
        mean, var = (values[name].reshape(-1).clone() for name in ("running_mean", "running_var"))
        found["Y"] = functional.batch_norm(values["x"], mean, var, scale, bias, True, MOMENTUM, EPSILON)
        found["NEXT_MEAN"] = mean.reshape(values["running_mean"].shape)
        found["NEXT_VAR"] = var.reshape(values["running_var"].shape)


class Inference(_Channels):
    """`batchnorm_inference`."""

    def problem(self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type) -> Problem:
        inputs = self.inputs(rng, dim, stride, dtype)
        inputs["mean"] = Input(rng.standard_normal(_channel(dim)))
        inputs["inv_variance"] = Input(rng.uniform(0.5, 2, _channel(dim)))

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            rest = {name: tensor for name, tensor in t.items() if name != "x"}
            return {"Y": graph.batchnorm_inference(input=t["x"], **rest)}

        def truth(xp: Any, v: Mapping[str, Any]) -> dict[str, Any]:
            return {"Y": (v["x"] - v["mean"]) * v["inv_variance"] * v["scale"] + v["bias"]}

        expect = {"Y": Expect(dim, inputs["x"].stride, dtype)}
        return Problem(f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect, io=dtype)


class Backward(_Channels):
    """The truth is the derivative of the forward formula; mean and inv_variance are those of x."""

    def problem(self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type) -> Problem:
        inputs = self.inputs(rng, dim, stride, dtype)
        del inputs["bias"]
        formula = normalised(self.axes(dim))
        x = inputs["x"].values.astype(np.float64)
        found = formula({"x": x, "scale": 1.0, "bias": 0.0})
        inputs["mean"], inputs["inv_variance"] = Input(found["MEAN"]), Input(found["INV_VARIANCE"])
        inputs["grad"] = Input(rng.standard_normal(dim), dtype)

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            rest = {name: tensor for name, tensor in t.items() if name != "x"}
            results = getattr(graph, self.op)(input=t["x"], **rest)
            for tensor in results[1:]:
                tensor.set_data_type(data_type.FLOAT)
            return dict(zip(("DX", "DSCALE", "DBIAS"), results, strict=True))

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            given = {"x": values["x"], "scale": values["scale"], "bias": values["scale"] * 0}
            gradients = vjp(xp, formula, given, {"Y": values["grad"]}, ("x", "scale", "bias"))
            return dict(zip(("DX", "DSCALE", "DBIAS"), gradients.values(), strict=True))

        kept = _channel(dim)
        expect = {"DX": Expect(dim, channels_last(dim), dtype)}
        for port in ("DSCALE", "DBIAS"):
            expect[port] = Expect(kept, channels_last(kept), data_type.FLOAT)
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect,
            io=dtype, needs_torch=int(np.prod(dim)) > 130,
        )  # fmt: skip


class Genstats(_Channels):
    """`genstats`: sum and sum of squares of each channel."""

    def problem(self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type) -> Problem:
        kept = _channel(dim)

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            results = graph.genstats(t["x"])
            return {
                port: tensor.set_data_type(data_type.FLOAT)
                for port, tensor in zip(("SUM", "SQ_SUM"), results, strict=True)
            }

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            x, axes = values["x"], self.axes(dim)
            return {"SUM": x.sum(axes, keepdims=True), "SQ_SUM": (x * x).sum(axes, keepdims=True)}

        expect = {port: Expect(kept, channels_last(kept), data_type.FLOAT) for port in ("SUM", "SQ_SUM")}
        x = Input(rng.standard_normal(dim), dtype, stride)
        return Problem(f"genstats {dtype.name}: {id}", {"x": x}, declare, truth, expect, io=dtype)


CASES = (
    Forward("batchnorm"),
    Inference("batchnorm_inference"),
    Backward("batchnorm_backward"),
    Genstats("genstats"),
    Forward("instancenorm"),
    Backward("instancenorm_backward"),
)
