"""Cases of the convolutions: forward, and the gradients for image and filter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from conformance.calculus import vjp
from conformance.layouts import channels_last, padded
from conformance.problem import Expect, Input, Problem
from opgraph import convolution_mode, data_type

__all__ = ["CASES", "Convolution"]

Rng = np.random.Generator

# (id, image dims, filter dims, attributes; those left out are: no padding, stride 1, dilation 1)
_SHAPES: tuple[tuple[str, Sequence[int], Sequence[int], Mapping[str, Any]], ...] = (
    ("one", [1, 1, 1, 1], [1, 1, 1, 1], {}),
    ("1x1", [2, 3, 4, 5], [4, 3, 1, 1], {}),
    ("3x3", [2, 3, 6, 5], [4, 3, 3, 3], {"padding": [1, 1]}),
    ("no padding", [1, 2, 5, 7], [3, 2, 3, 2], {}),
    ("stride", [1, 2, 7, 6], [3, 2, 3, 3], {"padding": [1, 1], "stride": [2, 3]}),
    ("stride beyond the filter", [1, 2, 7, 7], [3, 2, 1, 1], {"stride": [3, 3]}),
    ("dilation", [1, 2, 7, 8], [3, 2, 3, 2], {"padding": [1, 0], "dilation": [2, 3]}),
    ("uneven padding", [1, 2, 4, 5], [3, 2, 3, 3], {"pre_padding": [0, 2], "post_padding": [2, 1]}),
    ("groups", [2, 4, 5, 4], [6, 2, 3, 3], {"padding": [1, 1]}),
    ("depthwise", [1, 5, 5, 4], [5, 1, 3, 3], {"padding": [1, 1]}),
    ("depthwise with two each", [1, 3, 5, 4], [6, 1, 3, 3], {"padding": [1, 1], "stride": [2, 1]}),
    (
        "flipped", [1, 2, 5, 6], [3, 2, 3, 2],
        {"padding": [1, 1], "convolution_mode": convolution_mode.CONVOLUTION},
    ),
    ("one axis", [2, 3, 17], [4, 3, 5], {"padding": [2]}),
    ("volume", [1, 2, 3, 4, 5], [3, 2, 2, 3, 2], {"padding": [1, 1, 0]}),
    ("tile edge", [1, 33, 5, 3], [17, 33, 2, 2], {}),
)  # fmt: skip


def _attributes(rank: int, given: Mapping[str, Any]) -> dict[str, Any]:
    ones = [1] * (rank - 2)
    filled = {"stride": ones, "dilation": ones, **given}
    if "padding" not in filled and "pre_padding" not in filled:
        filled["padding"] = [0] * (rank - 2)
    return filled


def convolved(xp: Any, image: Any, weight: Any, attributes: Mapping[str, Any]) -> Any:
    """The formula: a sum over taps in NumPy; torch's own convolution of the padded image."""
    pre = attributes.get("pre_padding", attributes.get("padding"))
    post = attributes.get("post_padding", attributes.get("padding"))
    stride, dilation = attributes["stride"], attributes["dilation"]
    spatial = tuple(range(2, len(image.shape)))
    if attributes.get("convolution_mode") is convolution_mode.CONVOLUTION:
        weight = np.flip(weight, spatial) if xp is np else weight.flip(spatial)
    groups = image.shape[1] // weight.shape[1]
    if xp is not np:
        sides = [n for pair in zip(reversed(pre), reversed(post), strict=True) for n in pair]
        function = getattr(xp.nn.functional, f"conv{len(spatial)}d")
        x = xp.nn.functional.pad(image, sides)
        return function(x, weight, stride=tuple(stride), dilation=tuple(dilation), groups=groups)
    x = np.pad(image, [(0, 0), (0, 0), *zip(pre, post, strict=True)])
    taps = weight.shape[2:]
    out = [
        (n - d * (f - 1) - 1) // s + 1 for n, f, s, d in zip(x.shape[2:], taps, stride, dilation, strict=True)
    ]
    parts = np.split(x, groups, 1)
    result = []
    for part, kernel in zip(parts, np.split(weight, groups, 0), strict=True):
        total = np.zeros((x.shape[0], kernel.shape[0], *out))
        for tap in product(*map(range, taps)):
            window = tuple(
                slice(r * d, r * d + s * (n - 1) + 1, s)
                for r, d, s, n in zip(tap, dilation, stride, out, strict=True)
            )
            total += np.einsum("nc...,kc->nk...", part[:, :, *window], kernel[:, :, *tap])
        result.append(total)
    return np.concatenate(result, 1)


# op -> (input ports, output, which argument of the forward operator it is the gradient of)
_PORTS = {
    "conv_fprop": (("image", "weight"), "Y", None),
    "conv_dgrad": (("loss", "filter"), "DX", "image"),
    "conv_wgrad": (("image", "loss"), "DW", "weight"),
}


class Convolution:
    """`conv_fprop`, `conv_dgrad` or `conv_wgrad`; gradients are derivatives of the forward formula."""

    def __init__(self, op: str) -> None:
        self.op = self.id = op
        whole = (data_type.INT8,) if op == "conv_fprop" else ()
        self.data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, *whole)

    def problem(
        self,
        id: str,
        rng: Rng,
        image: Sequence[int],
        weight: Sequence[int],
        given: Mapping[str, Any],
        dtype: data_type,
        *,
        layout: Any = None,
        out_stride: Any = None,
    ) -> Problem:
        whole = dtype is data_type.INT8
        attributes = _attributes(len(image), given)
        zero = {"image": np.zeros(image), "weight": np.zeros(weight)}
        response = convolved(np, zero["image"], zero["weight"], attributes).shape
        dims = {"image": image, "weight": weight, "filter": weight, "loss": response}
        ports, output, wanted = _PORTS[self.op]

        def numbers(dim: Sequence[int]) -> Any:
            return rng.integers(-9, 10, dim) if whole else rng.standard_normal(dim)

        inputs = {
            port: Input(numbers(dims[port]), dtype, None if layout is None else layout(dims[port]))
            for port in ports
        }
        out = tuple({"Y": response, "DX": tuple(image), "DW": tuple(weight)}[output])

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            y = getattr(graph, self.op)(**tensors, **attributes)
            if wanted is not None:
                y.set_dim(out)
            if out_stride is not None:
                y.set_stride(out_stride(out))
            return {output: y.set_data_type(data_type.INT32) if whole else y}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            if wanted is None:
                x, w = values["image"], values["weight"]
                if xp is not np:
                    x, w = x.double(), w.double()
                return {output: convolved(xp, x, w, attributes)}
            known = {"image": values.get("image"), "weight": values.get("filter")}
            known[wanted] = values["loss"].new_zeros(out) if xp is not np else np.zeros(out)

            def formula(at: Mapping[str, Any]) -> dict[str, Any]:
                return {"Y": convolved(xp, at["image"], at["weight"], attributes)}

            return {output: vjp(xp, formula, known, {"Y": values["loss"]}, (wanted,))[wanted]}

        expected = channels_last(out) if out_stride is None else out_stride(out)
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth,
            {output: Expect(out, expected, data_type.INT32 if whole else dtype)},
            io=dtype, compute=data_type.INT32 if whole else data_type.FLOAT,
            intermediate=data_type.INT32 if whole else data_type.FLOAT,
            needs_torch=wanted is not None and prod(out) > 80,
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        for id, image, weight, attributes in _SHAPES:
            yield self.problem(id, rng, image, weight, attributes, dtype)
        plain = ([2, 3, 6, 5], [4, 3, 3, 3], {"padding": [1, 1]}, dtype)
        yield self.problem("channels last", rng, *plain, layout=channels_last)
        yield self.problem("padded rows", rng, *plain, layout=padded)
        yield self.problem("row-major output", rng, *plain, out_stride=lambda dim: padded(dim, 0))
        yield self.problem("padded output", rng, *plain, out_stride=padded)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()


CASES = (Convolution("conv_fprop"), Convolution("conv_dgrad"), Convolution("conv_wgrad"))
