"""Rotary position embedding: `rope` and `rope_backward`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType
from ..ir.errors import tensor_label
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    check_required,
    check_set_dim,
    graph_op,
    like,
    malformed,
)
from .blocking import blocks, destination, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ir.tensor import Tensor

__all__ = ["OPS", "RopeOps"]

# Elements of a block: 512 KiB of float32, so that the passes over a block find it in the cache.
_BLOCK = 1 << 17


class RopeOps(GraphOps):
    """Rotary position embedding of the graph.

    input is [B, H, S, D] in any layout. With R = rope_dim (0 means D), even and at most D, the first R
    channels turn in pairs (d, d + R/2) by angles `freqs`, in radians, for each position and channel; the
    other channels pass. Everything is multiplied by output_scale.

    freqs is [S, R] or broadcasts to [B, H, S, R] (of 2 to 4 axes, aligned at the right), or [S, 1, 1, R].
    R/2 angles in place of R serve both halves. All arithmetic, sines and cosines included, is done in the
    compute type and rounded once. The data type of the output is the graph's default.
    """

    __slots__ = ()

    @graph_op
    def rope(
        self,
        input: Any,
        freqs: Any,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Turns pairs of channels by the angles of their position; returns OUT_0.

            y1 = output_scale * (x1 * cos(a1) - x2 * sin(a1))
            y2 = output_scale * (x2 * cos(a2) + x1 * sin(a2))

        with x1, x2 the channels d and d + R/2, and a1, a2 their angles (equal in a rotation). OUT_0 has dim
        and stride of input.

        Raises `TypeError` for attributes that are no numbers. Raises at `validate()`: `ValueError` for an
        unset tensor, an input that has not 4 axes, a rope_dim that is odd, negative or above D, or angles
        that do not fit; `cudnnGraphNotSupportedError` for dims set on OUT_0 that are not input's.
        """
        return self._add_node(
            "rope",
            inputs={"input": input, "freqs": freqs},
            outputs=("OUT_0",),
            params=_params("rope", output_scale, rope_dim),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]

    @graph_op
    def rope_backward(
        self,
        dY: Any,
        freqs: Any,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> Tensor:
        """Gradient of `rope` for its input: the inverse rotation of dY; returns OUT_0.

            dx1 = output_scale * (dy1 * cos(a1) + dy2 * sin(a2))
            dx2 = output_scale * (dy2 * cos(a2) - dy1 * sin(a1))

        Attributes, shapes and errors are those of `rope`, with dY in place of input.
        """
        return self._add_node(
            "rope_backward",
            inputs={"dY": dY, "freqs": freqs},
            outputs=("OUT_0",),
            params=_params("rope_backward", output_scale, rope_dim),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]


def _params(op: str, output_scale: Any, rope_dim: Any) -> dict[str, Any]:
    if isinstance(output_scale, bool) or not isinstance(output_scale, (int, float)):
        raise TypeError(f"{op}: output_scale is a number, given {output_scale!r}")
    try:
        return {"output_scale": float(output_scale), "rope_dim": index(rope_dim)}
    except TypeError:
        raise TypeError(f"{op}: rope_dim is an integer, given {rope_dim!r}") from None


# -- inference -----------------------------------------------------------------------------------------------


def _infer(node: Any) -> None:
    source = "dY" if node.op == "rope_backward" else "input"
    check_required(node, source, "freqs")
    x, freqs, out = node.inputs[source], node.inputs["freqs"], node.outputs["OUT_0"]
    if len(x.dim) != 4:
        malformed(node, f"{source} has 4 axes", tensor=x, expected="[B, H, S, D]", given=x.dim)
    width = node.params["rope_dim"] or x.dim[3]
    if width < 0 or width % 2 or width > x.dim[3]:
        malformed(
            node,
            "rope_dim does not fit the channels",
            tensor=x,
            expected=f"an even number up to {x.dim[3]}, or 0 for all of an even number of channels",
            given=node.params["rope_dim"],
        )
    if _angles_shape(freqs.dim, x.dim, width) is None:
        malformed(
            node,
            f"the angles do not fit {tensor_label(x)} {x.dim}",
            tensor=freqs,
            expected=f"[{x.dim[2]}, {width}], [{x.dim[2]}, 1, 1, {width}] or what broadcasts to "
            f"{(*x.dim[:3], width)}, with {width} or {width // 2} at the last axis",
            given=freqs.dim,
        )
    check_set_dim(node, out, x.dim)
    like(out, x)


def _angles_shape(freqs: Sequence[int], x: Sequence[int], width: int) -> tuple[int, ...] | None:
    """The 4 axes under which the angles broadcast to x, or None when they do not.

    [S, 1, 1, R] has its positions in front: where it could also be read as one angle for each batch, it is
    not.
    """
    if not 2 <= len(freqs) <= 4 or freqs[-1] not in (width, width // 2):
        return None
    shape = (*(1,) * (4 - len(freqs)), *freqs)
    if shape[0] != 1 and shape[1:3] == (1, 1) and x[2] != 1:
        return (1, 1, x[2], shape[3]) if shape[0] == x[2] else None
    fits = all(n in (1, extent) for n, extent in zip(shape[:3], x[:3], strict=True))
    return shape if fits else None


# -- reference -----------------------------------------------------------------------------------------------


def _reference(call: RefCall) -> dict[str, Array]:
    backward = "dY" in call.inputs
    x, freqs, real = call.inputs["dY" if backward else "input"], call.inputs["freqs"], call.math.real
    width, scale = call.params["rope_dim"] or x.shape[3], call.params["output_scale"]
    shape = _angles_shape(freqs.shape, x.shape, width)
    assert shape is not None
    half = width // 2
    with np.errstate(all="ignore"):
        angles = real(freqs.reshape(shape))
        cos, sin = np.cos(angles), np.sin(angles)
        np.multiply(cos, scale, out=cos)
        np.multiply(sin, scale, out=sin)
        cos1, cos2, sin1, sin2 = cos[..., :half], cos[..., -half:], sin[..., :half], sin[..., -half:]
        if backward:
            # The transposed rotation: y1 = x1 cos(a1) - x2 (-sin(a2)), y2 = x2 cos(a2) + x1 (-sin(a1)).
            sin1, sin2 = -sin2, -sin1
        out = destination(call, call.outputs["OUT_0"], x.shape, cos.dtype, x)
        slowest = sorted(range(3), key=lambda axis: -abs(x.strides[axis]))
        for block in blocks(x.shape, slowest, _BLOCK):
            source, target = real(x[block]), out[block]
            x1, x2 = source[..., :half], source[..., half:width]
            y1, y2 = target[..., :half], target[..., half:width]
            place = (*block[:3], slice(None))
            c1, c2, s1, s2 = (part_of(each, place) for each in (cos1, cos2, sin1, sin2))
            np.multiply(x1, c1, out=y1)
            np.subtract(y1, x2 * s1, out=y1)
            np.multiply(x2, c2, out=y2)
            np.add(y2, x1 * s2, out=y2)
            np.multiply(source[..., width:], cos.dtype.type(scale), out=target[..., width:])
    return {"OUT_0": out}


OPS = (
    OpDef("rope", NodeType.ROPE, _infer, _reference),
    OpDef("rope_backward", NodeType.ROPE_BACKWARD, _infer, _reference),
)
