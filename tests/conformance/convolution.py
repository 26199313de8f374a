"""Cases of the convolutions: forward, and the gradients for image and filter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from conformance.calculus import vjp
from conformance.layouts import channels_last, padded, row_major
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
    ("primes", [3, 5, 7, 5], [7, 5, 3, 2], {"padding": [2, 1]}),
    ("one position", [3, 4, 3, 3], [5, 4, 3, 3], {}),
    (
        "stride and dilation", [2, 2, 10, 7], [3, 2, 2, 3],
        {"padding": [1, 3], "stride": [3, 2], "dilation": [3, 2]},
    ),
    ("padding wider than the filter", [1, 2, 2, 3], [2, 2, 3, 2], {"padding": [5, 4]}),
    ("filter beyond the image", [1, 2, 2, 2], [2, 2, 5, 4], {"padding": [3, 2]}),
    ("dilation beyond the image", [1, 2, 3], [2, 2, 3], {"padding": [4], "dilation": [5]}),
    (
        "flipped groups", [1, 6, 7], [3, 2, 3],
        {"padding": [2], "stride": [2], "convolution_mode": convolution_mode.CONVOLUTION},
    ),
    (
        "flipped depthwise volume", [1, 3, 3, 4, 3], [3, 1, 2, 1, 3],
        {"padding": [1, 0, 2], "dilation": [1, 2, 1], "convolution_mode": convolution_mode.CONVOLUTION},
    ),
    ("wide groups", [1, 16, 4, 3], [16, 8, 2, 2], {"padding": [1, 0]}),
    ("no images", [0, 3, 5], [4, 3, 3], {"padding": [1]}),
    ("no channels", [2, 0, 5], [4, 0, 3], {"padding": [1]}),
    ("no responses", [2, 3, 5], [0, 3, 3], {"padding": [1]}),
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
    groups = image.shape[1] // weight.shape[1] if weight.shape[1] else 1
    if xp is not np:
        if 0 in (*image.shape, *weight.shape):  # torch refuses most of these
            empty = convolved(
                np, np.zeros(image.shape), np.zeros(weight.shape), {**attributes, "convolution_mode": None}
            )
            return xp.from_numpy(empty) + 0 * (image.sum() + weight.sum())
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
        self.data_types = (
            data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE, data_type.INT8,
        )  # fmt: skip

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
            return rng.integers(-128, 128, dim) if whole else rng.standard_normal(dim)

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
            values = {port: 1.0 * (value if xp is np else value.double()) for port, value in values.items()}
            if wanted is None:
                return {output: convolved(xp, values["image"], values["weight"], attributes)}
            known = {"image": values.get("image"), "weight": values.get("filter")}
            known[wanted] = values["loss"].new_zeros(out) if xp is not np else np.zeros(out)

            def formula(at: Mapping[str, Any]) -> dict[str, Any]:
                return {"Y": convolved(xp, at["image"], at["weight"], attributes)}

            found = vjp(xp, formula, known, {"Y": values["loss"]}, (wanted,))[wanted]
            # Differences of a linear function of integers are off by less than one half.
            return {output: xp.round(found) if whole else found}

        expected = channels_last(out) if out_stride is None else out_stride(out)
        math = {data_type.INT8: data_type.INT32, data_type.DOUBLE: data_type.DOUBLE}.get(
            dtype, data_type.FLOAT
        )
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth,
            {output: Expect(out, expected, data_type.INT32 if whole else dtype)},
            io=dtype, compute=math, intermediate=math,
            needs_torch=wanted is not None and (prod(out) > 80 or dtype is data_type.DOUBLE),
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        # FLOAT finds what is wrong with sizes; the others take every other one.
        for id, image, weight, attributes in _SHAPES[:: 1 if dtype is data_type.FLOAT else 2]:
            yield self.problem(id, rng, image, weight, attributes, dtype)
        plain = ([2, 3, 6, 5], [4, 3, 3, 3], {"padding": [1, 1]}, dtype)
        yield self.problem("channels last", rng, *plain, layout=channels_last)
        wide = ([1, 16, 3, 4], [16, 8, 2, 3], {"padding": [1, 1], "stride": [2, 1]}, dtype)
        yield self.problem("channels last, groups", rng, *wide, layout=channels_last)
        single = ([2, 5, 4, 3], [5, 1, 3, 3], {"padding": [1, 1]}, dtype)
        yield self.problem("channels last, depthwise", rng, *single, layout=channels_last)
        volume = ([1, 3, 3, 4, 2], [2, 3, 2, 2, 1], {"padding": [1, 0, 1]}, dtype)
        yield self.problem("channels last, volume", rng, *volume, layout=channels_last)
        yield self.problem("padded rows", rng, *plain, layout=padded)
        yield self.problem("row-major output", rng, *plain, out_stride=row_major)
        yield self.problem(
            "channels last to row-major", rng, *plain, layout=channels_last, out_stride=row_major
        )
        yield self.problem("padded output", rng, *plain, out_stride=padded)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()


CASES = (Convolution("conv_fprop"), Convolution("conv_dgrad"), Convolution("conv_wgrad"))
