"""Cases of normalisation by channel: batch and instance normalisation, forward and backward, and
`genstats`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
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
    ("primes", [5, 7, 11, 3], None),
    ("primes, channels last", [3, 13, 7, 5], channels_last([3, 13, 7, 5])),
    ("one image", [1, 4, 3, 5], None),
    ("no images", [0, 3, 4], None),
    ("no channels", [2, 0, 4], None),
)


def _math(dtype: data_type) -> data_type:
    """The type of channel tensors and of arithmetic."""
    return dtype if dtype is data_type.DOUBLE else data_type.FLOAT


def _channel(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if axis == 1 else 1 for axis, n in enumerate(dim))


def _by_image(dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if axis < 2 else 1 for axis, n in enumerate(dim))


def normalised(axes: Sequence[int]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Y, mean, biased variance and inv_variance of x over `axes`: the formula in NumPy or torch."""

    def formula(values: Mapping[str, Any]) -> dict[str, Any]:
        x = values["x"]
        count = max(prod(x.shape[axis] for axis in axes), 1)  # no elements: mean 0 and variance 0
        mean = x.sum(tuple(axes), keepdims=True) / count
        variance = ((x - mean) ** 2).sum(tuple(axes), keepdims=True) / count
        inverse = (variance + EPSILON) ** -0.5
        y = (x - mean) * inverse * values["scale"] + values["bias"]
        return {"Y": y, "MEAN": mean, "INV_VARIANCE": inverse, "VARIANCE": variance}

    return formula


class _Channels:
    """What the operators have in common: which axes are normalised, and one problem per shape."""

    outputs: tuple[str, ...] = ("Y",)
    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE)

    def __init__(self, op: str) -> None:
        self.op = self.id = op
        self.instance = op.startswith("instance")

    def axes(self, dim: Sequence[int]) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(dim)) if axis > 1 or (axis == 0 and not self.instance))

    def statistic(self, dim: Sequence[int]) -> tuple[int, ...]:
        return _by_image(dim) if self.instance else _channel(dim)

    def inputs(
        self,
        rng: Rng,
        dim: Sequence[int],
        stride: Any,
        dtype: data_type,
        shift: float = 0.5,
        held: Any = None,
    ) -> dict[str, Input]:
        """`held`: the type of scale and bias."""
        held = held or _math(dtype)
        return {
            "x": Input(rng.standard_normal(dim) + shift, dtype, stride),
            "scale": Input(rng.uniform(0.5, 1.5, _channel(dim)), held),
            "bias": Input(rng.standard_normal(_channel(dim)), held),
        }

    def problem(
        self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type, **options: Any
    ) -> Problem:
        raise NotImplementedError

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        # FLOAT finds what is wrong with sizes; the others take every other one.
        for id, dim, stride in _SHAPES[:: 1 if dtype is data_type.FLOAT else 2]:
            if self.instance and len(dim) == 2:
                continue
            yield self.problem(id, rng, dim, stride, dtype)
        plain = ([2, 3, 4, 5], None, dtype)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        if "Y" in self.outputs or "DX" in self.outputs:
            yield self.problem("padded output", rng, *plain, out_stride=padded([2, 3, 4, 5]))
            yield self.problem("row-major output", rng, *plain, out_stride=padded([2, 3, 4, 5], 0))
            yield self.problem("channels last output", rng, *plain, out_stride=channels_last([2, 3, 4, 5]))


class Forward(_Channels):
    """`batchnorm` with or without running statistics, or `instancenorm` in either phase."""

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        stride: Any,
        dtype: data_type,
        *,
        running: bool = True,
        training: bool = True,
        out_stride: Any = None,
        shift: float = 0.5,
        held: Any = None,
    ) -> Problem:
        math, running = _math(dtype), running and not self.instance
        inputs = self.inputs(rng, dim, stride, dtype, shift, held)
        one = [1] * len(dim)
        inputs["epsilon"] = Input(np.full(one, EPSILON), math, by_value=True)
        if running:
            inputs["running_mean"] = Input(rng.standard_normal(_channel(dim)), math)
            inputs["running_var"] = Input(rng.uniform(0.5, 2, _channel(dim)), math)
            inputs["momentum"] = Input(np.full(one, MOMENTUM), math, by_value=True)
        ports = ["Y", *(["MEAN", "INV_VARIANCE"] if training else [])]
        ports += ["NEXT_MEAN", "NEXT_VAR"] if running else []

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            common = {"input": t["x"], "scale": t["scale"], "bias": t["bias"], "epsilon": t["epsilon"]}
            if self.instance:
                phase = norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE
                found = graph.instancenorm(**common, norm_forward_phase=phase)
                assert len(found) == 3
            else:
                given = {"in_running_mean": t.get("running_mean"), "in_running_var": t.get("running_var")}
                found = graph.batchnorm(**common, **given, momentum=t.get("momentum"))
                assert len(found) == 5
            assert found[len(ports) :] == [None] * (len(found) - len(ports)), f"{id}: returned {found}"
            found = found[: len(ports)]
            for tensor in found[1:]:
                tensor.set_data_type(math)
            if out_stride is not None:
                found[0].set_stride(out_stride)
            return dict(zip(ports, found, strict=True))

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            found = normalised(self.axes(dim))(values)
            count = prod(dim[axis] for axis in self.axes(dim))
            variance = found.pop("VARIANCE")
            if running:
                # A single element has the biased variance 0, which enters as it is.
                keep, unbiased = 1 - MOMENTUM, variance * count / max(count - 1, 1)
                found["NEXT_MEAN"] = keep * values["running_mean"] + MOMENTUM * found["MEAN"]
                found["NEXT_VAR"] = keep * values["running_var"] + MOMENTUM * unbiased
            if xp is not np and 0 not in dim and count > 1 and (not self.instance or len(dim) > 2):
                self._as_torch_says(xp, values, found, running)
            return {port: found[port] for port in ports}

        expect = {"Y": Expect(dim, out_stride or inputs["x"].stride, dtype)}
        for port in ports[1:]:
            kept = _channel(dim) if port.startswith("NEXT") else self.statistic(dim)
            expect[port] = Expect(kept, channels_last(kept), math)
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect,
            io=dtype, intermediate=math, compute=math,
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        yield from super().problems(dtype, rng)
        plain = ([2, 3, 4, 5], None, dtype)
        if self.instance:
            yield self.problem("inference", rng, *plain, training=False)
            yield self.problem("inference, virtual", rng, *plain, training=False).with_virtual_edges()
        else:
            yield self.problem("no running statistics", rng, *plain, running=False)
            yield self.problem("one element of each channel", rng, [1, 3, 1], None, dtype)
        yield self.problem("scale and bias of the io type", rng, *plain, held=dtype)
        if dtype is data_type.FLOAT:
            # float32 numbers are 1/128 apart there, so the input itself is as coarse; its statistics are not.
            yield self.problem("far from zero", rng, [4, 3, 50], None, dtype, shift=1e5)

    def _as_torch_says(
        self, torch: Any, values: Mapping[str, Any], found: dict[str, Any], running: bool
    ) -> None:
        scale, bias = values["scale"].reshape(-1), values["bias"].reshape(-1)
        functional = torch.nn.functional
        if self.instance:
            found["Y"] = functional.instance_norm(values["x"], weight=scale, bias=bias, eps=EPSILON)
            return
        if not running:
            found["Y"] = functional.batch_norm(values["x"], None, None, scale, bias, True, MOMENTUM, EPSILON)
            return
        mean, var = (values[name].reshape(-1).clone() for name in ("running_mean", "running_var"))
        found["Y"] = functional.batch_norm(values["x"], mean, var, scale, bias, True, MOMENTUM, EPSILON)
        found["NEXT_MEAN"] = mean.reshape(values["running_mean"].shape)
        found["NEXT_VAR"] = var.reshape(values["running_var"].shape)


class Inference(_Channels):
    """`batchnorm_inference`."""

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        stride: Any,
        dtype: data_type,
        *,
        out_stride: Any = None,
        **options: Any,
    ) -> Problem:
        math = _math(dtype)
        inputs = self.inputs(rng, dim, stride, dtype)
        inputs["mean"] = Input(rng.standard_normal(_channel(dim)), math)
        inputs["inv_variance"] = Input(rng.uniform(0.5, 2, _channel(dim)), math)

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            rest = {name: tensor for name, tensor in t.items() if name != "x"}
            y = graph.batchnorm_inference(input=t["x"], **rest)
            return {"Y": y if out_stride is None else y.set_stride(out_stride)}

        def truth(xp: Any, v: Mapping[str, Any]) -> dict[str, Any]:
            return {"Y": (v["x"] - v["mean"]) * v["inv_variance"] * v["scale"] + v["bias"]}

        expect = {"Y": Expect(dim, out_stride or inputs["x"].stride, dtype)}
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect,
            io=dtype, intermediate=math, compute=math,
        )  # fmt: skip


class Backward(_Channels):
    """The truth is the derivative of the forward formula; mean and inv_variance are those of x."""

    outputs = ("DX", "DSCALE", "DBIAS")

    def problem(
        self,
        id: str,
        rng: Rng,
        dim: Sequence[int],
        stride: Any,
        dtype: data_type,
        *,
        out_stride: Any = None,
        **options: Any,
    ) -> Problem:
        math = _math(dtype)
        inputs = self.inputs(rng, dim, stride, dtype)
        del inputs["bias"]
        formula = normalised(self.axes(dim))
        x = inputs["x"].values.astype(np.float64)
        found = formula({"x": x, "scale": 1.0, "bias": 0.0})
        inputs["mean"], inputs["inv_variance"] = (
            Input(found["MEAN"], math),
            Input(found["INV_VARIANCE"], math),
        )
        inputs["grad"] = Input(rng.standard_normal(dim), dtype)

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            rest = {name: tensor for name, tensor in t.items() if name != "x"}
            results = getattr(graph, self.op)(input=t["x"], **rest)
            for tensor in results[1:]:
                tensor.set_data_type(math)
            if out_stride is not None:
                results[0].set_stride(out_stride)
            return dict(zip(self.outputs, results, strict=True))

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            given = {"x": values["x"], "scale": values["scale"], "bias": values["scale"] * 0}
            gradients = vjp(xp, formula, given, {"Y": values["grad"]}, ("x", "scale", "bias"))
            return dict(zip(self.outputs, gradients.values(), strict=True))

        kept = _channel(dim)
        expect = {"DX": Expect(dim, out_stride or channels_last(dim), dtype)}
        for port in self.outputs[1:]:
            expect[port] = Expect(kept, channels_last(kept), math)
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth, expect,
            io=dtype, intermediate=math, compute=math,
            needs_torch=int(np.prod(dim)) > 130 or dtype is data_type.DOUBLE,
        )  # fmt: skip


class Genstats(_Channels):
    """`genstats`: sum and sum of squares of each channel."""

    outputs = ("SUM", "SQ_SUM")

    def problem(
        self, id: str, rng: Rng, dim: Sequence[int], stride: Any, dtype: data_type, **options: Any
    ) -> Problem:
        kept, math = _channel(dim), _math(dtype)

        def declare(graph: Any, t: Mapping[str, Any]) -> dict[str, Any]:
            results = graph.genstats(t["x"])
            return {
                port: tensor.set_data_type(math) for port, tensor in zip(self.outputs, results, strict=True)
            }

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            x, axes = values["x"], self.axes(dim)
            return {"SUM": x.sum(axes, keepdims=True), "SQ_SUM": (x * x).sum(axes, keepdims=True)}

        expect = {port: Expect(kept, channels_last(kept), math) for port in self.outputs}
        x = Input(rng.standard_normal(dim), dtype, stride)
        return Problem(
            f"genstats {dtype.name}: {id}", {"x": x}, declare, truth, expect,
            io=dtype, intermediate=math, compute=math,
        )  # fmt: skip


CASES = (
    Forward("batchnorm"),
    Inference("batchnorm_inference"),
    Backward("batchnorm_backward"),
    Genstats("genstats"),
    Forward("instancenorm"),
    Backward("instancenorm_backward"),
)
