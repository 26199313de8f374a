"""Activation functions and their derivatives: elementwise, with the rules of pointwise.py."""

from __future__ import annotations

from math import pi, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Array, RefCall, graph_op, malformed
from .elementwise import ElementwiseOps, choose, end, host_number, infer, keep, pointwise
from .pointwise import erf

if TYPE_CHECKING:
    from ..ir.tensor import Tensor

__all__ = ["OPS", "ActivationOps"]


class ActivationOps(ElementwiseOps):
    """Activations f(x) and backward operators dx = dy * f'(x).

    Shapes, strides, data types and errors are those of the other pointwise operators. A backward operator
    takes `(loss, input)` = (dy, x), where x is the forward *input*, not its result.
    """

    __slots__ = ()

    @graph_op
    def relu(
        self,
        input: Any,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> Tensor:
        """upper where x >= upper; x where lower < x < upper; lower + slope * (x - lower) where x <= lower.

        Defaults: slope 0, lower 0, no upper limit. NaN stays NaN. Raises `ValueError` at `validate()` when
        lower_clip is above upper_clip.
        """
        clips = _clips(negative_slope, lower_clip, upper_clip)
        return self._pointwise("relu", (input,), name, compute_data_type, **clips)

    @graph_op
    def relu_backward(
        self,
        loss: Any,
        input: Any,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> Tensor:
        """dy where lower < x < upper; slope * dy where x <= lower; 0 where x >= upper. Defaults of relu.

        A NaN in x counts as x <= lower.
        """
        clips = _clips(negative_slope, lower_clip, upper_clip)
        return self._pointwise("relu_backward", (loss, input), name, compute_data_type, **clips)

    @graph_op
    def leaky_relu(
        self, input: Any, negative_slope: float, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """x where x > 0, else negative_slope * x."""
        slope = _slope(negative_slope, "leaky_relu")
        return self._pointwise("leaky_relu", (input,), name, compute_data_type, negative_slope=slope)

    @graph_op
    def leaky_relu_backward(
        self, loss: Any, input: Any, negative_slope: float, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """dy where x > 0, else negative_slope * dy."""
        slope = _slope(negative_slope, "leaky_relu_backward")
        return self._pointwise(
            "leaky_relu_backward", (loss, input), name, compute_data_type, negative_slope=slope
        )

    @graph_op
    def elu(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """x where x > 0, else exp(x) - 1."""
        return self._pointwise("elu", (input,), name, compute_data_type)

    @graph_op
    def elu_backward(self, loss: Any, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """dy where x > 0, else dy * exp(x)."""
        return self._pointwise("elu_backward", (loss, input), name, compute_data_type)

    @graph_op
    def gelu(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """0.5 x (1 + erf(x / sqrt 2))"""
        return self._pointwise("gelu", (input,), name, compute_data_type)

    @graph_op
    def gelu_backward(
        self, loss: Any, input: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """dy (Phi(x) + x phi(x)), with the normal distribution function Phi and density phi."""
        return self._pointwise("gelu_backward", (loss, input), name, compute_data_type)

    @graph_op
    def gelu_approx_tanh(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))"""
        return self._pointwise("gelu_approx_tanh", (input,), name, compute_data_type)

    @graph_op
    def gelu_approx_tanh_backward(
        self, loss: Any, input: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """dy (0.5 (1 + t) + 0.5 x (1 - t^2) sqrt(2/pi) (1 + 0.134145 x^2)), t the tanh of
        gelu_approx_tanh.
        """
        return self._pointwise("gelu_approx_tanh_backward", (loss, input), name, compute_data_type)

    @graph_op
    def sigmoid(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """1 / (1 + exp(-x))"""
        return self._pointwise("sigmoid", (input,), name, compute_data_type)

    @graph_op
    def sigmoid_backward(
        self, loss: Any, input: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """dy s (1 - s), s = sigmoid(x)"""
        return self._pointwise("sigmoid_backward", (loss, input), name, compute_data_type)

    @graph_op
    def tanh(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The hyperbolic tangent."""
        return self._pointwise("tanh", (input,), name, compute_data_type)

    @graph_op
    def tanh_backward(
        self, loss: Any, input: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """dy (1 - tanh(x)^2)"""
        return self._pointwise("tanh_backward", (loss, input), name, compute_data_type)

    @graph_op
    def softplus(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """log(1 + exp(x))"""
        return self._pointwise("softplus", (input,), name, compute_data_type)

    @graph_op
    def softplus_backward(
        self, loss: Any, input: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """dy sigmoid(x)"""
        return self._pointwise("softplus_backward", (loss, input), name, compute_data_type)

    @graph_op
    def swish(
        self, input: Any, swish_beta: float | None = None, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """x sigmoid(beta x), beta = swish_beta, 1 by default."""
        beta = host_number(swish_beta, "swish: swish_beta")
        return self._pointwise("swish", (input,), name, compute_data_type, swish_beta=beta)

    @graph_op
    def swish_backward(
        self,
        loss: Any,
        input: Any,
        swish_beta: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> Tensor:
        """dy s (1 + beta x (1 - s)), s = sigmoid(beta x)"""
        beta = host_number(swish_beta, "swish_backward: swish_beta")
        return self._pointwise("swish_backward", (loss, input), name, compute_data_type, swish_beta=beta)


def _clips(negative_slope: Any, lower_clip: Any, upper_clip: Any) -> dict[str, float | None]:
    given = {"negative_slope": negative_slope, "lower_clip": lower_clip, "upper_clip": upper_clip}
    return {key: host_number(value, f"relu: {key}") for key, value in given.items()}


def _slope(value: Any, op: str) -> float:
    slope = host_number(value, f"{op}: negative_slope")
    if slope is None:
        raise TypeError(f"{op}: negative_slope is required")
    return slope


def _infer_relu(node: Any) -> None:
    low, high = node.params["lower_clip"] or 0.0, node.params["upper_clip"]
    if high is not None and not low <= high:
        malformed(node, "lower_clip is above upper_clip", expected=f"lower_clip <= {high}", given=low)
    infer(node)


# -- references ----------------------------------------------------------------------------------------------


def _real(call: RefCall, port: str) -> Array:
    return call.math.real(call.inputs[port])


def _times_loss(call: RefCall, slope: Array) -> Array:
    """dy * f'(x); `slope` is a temporary of the formula."""
    return end(call, np.multiply, slope, _real(call, "IN_0"), scratch=slope)


def _region(call: RefCall) -> tuple[float, float, float | None]:
    params = call.params
    return params["negative_slope"] or 0.0, params.get("lower_clip") or 0.0, params.get("upper_clip")


def _relu(call: RefCall) -> Array:
    slope, low, high = _region(call)
    x = _real(call, "IN_0")
    if slope == 0.0 and high is None:
        return end(call, np.maximum, x, np.asarray(low, x.dtype))
    if slope == 0.0:  # apart, because -inf * 0 is NaN
        result = np.maximum(x, low)
    elif low == 0.0:
        below = np.minimum(x, 0)
        below *= slope
        result = np.maximum(x, 0)
        result += below
    else:
        result = x - low
        result *= slope
        result += low
        result = choose(x > low, x, result)
    if high is None:
        return result
    if slope >= 0.0:
        return end(call, np.minimum, result, np.asarray(high, x.dtype), scratch=result)
    return choose(x >= high, np.full((1,) * x.ndim, high, x.dtype), result)


def _relu_backward(call: RefCall) -> Array:
    slope, low, high = _region(call)
    dy, x = _real(call, "IN_0"), _real(call, "IN_1")
    inside = x > low
    if slope:
        result = dy * np.take(np.asarray([slope, 1], dy.dtype), inside.view(np.int8))
    else:
        result = keep(inside, dy)
    return result if high is None else keep(~(x >= high), result)


def _elu(call: RefCall) -> Array:
    x = _real(call, "IN_0")
    below = np.minimum(x, 0)
    np.expm1(below, out=below)
    return end(call, np.add, below, np.maximum(x, 0), scratch=below)


def _elu_backward(call: RefCall) -> Array:
    slope = np.minimum(_real(call, "IN_1"), 0)
    np.exp(slope, out=slope)
    return _times_loss(call, slope)


def _gelu(call: RefCall) -> Array:
    from .. import _native  # here, so that the operators can be described without the native module

    x = np.ascontiguousarray(_real(call, "IN_0"))
    result = np.empty_like(x)
    _native.gelu(x, result)
    return result


def _gelu_backward(call: RefCall) -> Array:
    x = _real(call, "IN_1")
    slope = erf(x * sqrt(0.5))
    slope += 1
    slope *= 0.5
    x = np.clip(x, -40, 40)  # x * phi(x) is 0 from there on; keeps inf * 0 away
    density = x * x
    density *= -0.5
    np.exp(density, out=density)
    density *= x
    density *= 1 / sqrt(2 * pi)
    slope += density
    return _times_loss(call, slope)


_TANH_SCALE = sqrt(2 / pi)
_CUBIC = 0.044715


def _logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)), a new array. exp may overflow to infinity, whose reciprocal is the right 0."""
    t = np.negative(x)
    np.exp(t, out=t)
    t += 1
    return np.reciprocal(t, out=t)


def _twice_inner(x: Array) -> Array:
    """2 sqrt(2/pi) (x + 0.044715 x^3), a new array: 0.5 (1 + tanh u) is sigmoid(2u), without cancellation."""
    u = x * x
    u *= _CUBIC
    u += 1
    u *= x
    u *= 2 * _TANH_SCALE
    return u


def _gelu_approx_tanh(call: RefCall) -> Array:
    x = _real(call, "IN_0")
    u = _twice_inner(x)
    np.negative(u, out=u)
    np.exp(u, out=u)
    u += 1
    return end(call, np.divide, x, u, scratch=u)


def _gelu_approx_tanh_backward(call: RefCall) -> Array:
    x = np.clip(_real(call, "IN_1"), -100, 100)  # the derivative is 0 or 1 from there on
    u = _twice_inner(x)
    slope = x * x  # s (1 + x u' (1 - s)), s = sigmoid(u)
    slope *= 3 * _CUBIC
    slope += 1
    slope *= x
    slope *= 2 * _TANH_SCALE
    slope *= _logistic(-u)
    slope += 1
    slope *= _logistic(u)
    return _times_loss(call, slope)


def _sigmoid(call: RefCall) -> Array:
    t = np.negative(_real(call, "IN_0"))
    np.exp(t, out=t)
    t += 1
    return end(call, np.reciprocal, t, scratch=t)


def _bell(x: Array, factor: float) -> Array:
    """e / (1 + e)^2 with e = exp(-factor |x|): s (1 - s) without the cancellation in 1 - s."""
    e = np.absolute(x)
    e *= -factor
    np.exp(e, out=e)
    below = e + 1
    below *= below
    e /= below
    return e


def _sigmoid_backward(call: RefCall) -> Array:
    return _times_loss(call, _bell(_real(call, "IN_1"), 1.0))


def _tanh_backward(call: RefCall) -> Array:
    slope = _bell(_real(call, "IN_1"), 2.0)  # 1 - tanh(x)^2 = 4 s (1 - s), s = sigmoid(2x)
    slope *= 4
    return _times_loss(call, slope)


def _softplus(call: RefCall) -> Array:
    x = _real(call, "IN_0")
    t = np.absolute(x)
    np.negative(t, out=t)
    np.exp(t, out=t)
    np.log1p(t, out=t)
    return end(call, np.add, t, np.maximum(x, 0), scratch=t)


def _softplus_backward(call: RefCall) -> Array:
    return _times_loss(call, _logistic(_real(call, "IN_1")))


def _beta(call: RefCall) -> float:
    beta = call.params["swish_beta"]
    return 1.0 if beta is None else float(beta)


def _swish(call: RefCall) -> Array:
    x = _real(call, "IN_0")
    t = x * -_beta(call)
    np.exp(t, out=t)
    t += 1
    return end(call, np.divide, x, t, scratch=t)


def _swish_backward(call: RefCall) -> Array:
    z = _real(call, "IN_1") * _beta(call)
    np.clip(z, -1000, 1000, out=z)  # the derivative is 0 or 1 from there on; keeps inf * 0 away
    s = _logistic(z)
    z *= _logistic(-z)
    z += 1
    z *= s
    return _times_loss(call, z)


OPS = (
    pointwise("relu", _relu, _infer_relu),
    pointwise("relu_backward", _relu_backward, _infer_relu),
    pointwise("leaky_relu", _relu),
    pointwise("leaky_relu_backward", _relu_backward),
    pointwise("elu", _elu),
    pointwise("elu_backward", _elu_backward),
    pointwise("gelu", _gelu),
    pointwise("gelu_backward", _gelu_backward),
    pointwise("gelu_approx_tanh", _gelu_approx_tanh),
    pointwise("gelu_approx_tanh_backward", _gelu_approx_tanh_backward),
    pointwise("sigmoid", _sigmoid),
    pointwise("sigmoid_backward", _sigmoid_backward),
    pointwise("tanh", lambda call: end(call, np.tanh, _real(call, "IN_0"))),
    pointwise("tanh_backward", _tanh_backward),
    pointwise("softplus", _softplus),
    pointwise("softplus_backward", _softplus_backward),
    pointwise("swish", _swish),
    pointwise("swish_backward", _swish_backward),
)
