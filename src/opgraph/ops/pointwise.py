"""Pointwise arithmetic, comparison, logic, selection and elementary functions. Activations are in
activation.py.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import round_to, truth
from .base import Array, RefCall, graph_op, malformed
from .elementwise import OUT, ElementwiseOps, choose, end, infer, pointwise

if TYPE_CHECKING:
    from ..ir.tensor import Tensor

__all__ = ["OPS", "PointwiseOps"]


class PointwiseOps(ElementwiseOps):
    """Elementwise operators of the graph.

    Every method takes tensors (or buffers, which are declared and bound) whose dims broadcast like NumPy's,
    and returns one tensor with the broadcast dim. Its strides are those of the first input that has this dim;
    else the axis order of the first input is kept (virtual output) or the output is row-major. Arithmetic is
    done in the compute type and rounded once to the output's type, which is the graph's default unless set:
    results of comparisons and logic are 1 or 0 in that type, whatever it is, and any non-zero element counts
    as true.

    Raises at `validate()`: `ValueError` when the dims do not broadcast; `cudnnGraphNotSupportedError` when
    the output was given another dim than the broadcast one.
    """

    __slots__ = ()

    @graph_op
    def add(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """a + b"""
        return self._pointwise("add", (a, b), name, compute_data_type)

    @graph_op
    def sub(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """a - b"""
        return self._pointwise("sub", (a, b), name, compute_data_type)

    @graph_op
    def mul(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """a * b"""
        return self._pointwise("mul", (a, b), name, compute_data_type)

    @graph_op
    def div(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """a / b; in an integer compute type the quotient is truncated towards zero, and x / 0 is 0."""
        return self._pointwise("div", (a, b), name, compute_data_type)

    @graph_op
    def add_square(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """a + b * b"""
        return self._pointwise("add_square", (a, b), name, compute_data_type)

    @graph_op
    def bias(self, input: Any, bias: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input + bias"""
        return self._pointwise("bias", (input, bias), name, compute_data_type)

    @graph_op
    def scale(self, input: Any, scale: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input * scale"""
        return self._pointwise("scale", (input, scale), name, compute_data_type)

    @graph_op
    def max(self, input0: Any, input1: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The larger of the two; NaN if either is NaN."""
        return self._pointwise("max", (input0, input1), name, compute_data_type)

    @graph_op
    def min(self, input0: Any, input1: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The smaller of the two; NaN if either is NaN."""
        return self._pointwise("min", (input0, input1), name, compute_data_type)

    @graph_op
    def mod(self, input0: Any, input1: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """fmod(input0, input1): the remainder has the sign of input0."""
        return self._pointwise("mod", (input0, input1), name, compute_data_type)

    @graph_op
    def pow(self, input0: Any, input1: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input0 ** input1"""
        return self._pointwise("pow", (input0, input1), name, compute_data_type)

    @graph_op
    def cmp_eq(self, input: Any, comparison: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input == comparison"""
        return self._pointwise("cmp_eq", (input, comparison), name, compute_data_type)

    @graph_op
    def cmp_neq(
        self, input: Any, comparison: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """input != comparison"""
        return self._pointwise("cmp_neq", (input, comparison), name, compute_data_type)

    @graph_op
    def cmp_gt(self, input: Any, comparison: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input > comparison"""
        return self._pointwise("cmp_gt", (input, comparison), name, compute_data_type)

    @graph_op
    def cmp_ge(self, input: Any, comparison: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input >= comparison"""
        return self._pointwise("cmp_ge", (input, comparison), name, compute_data_type)

    @graph_op
    def cmp_lt(self, input: Any, comparison: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input < comparison"""
        return self._pointwise("cmp_lt", (input, comparison), name, compute_data_type)

    @graph_op
    def cmp_le(self, input: Any, comparison: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input <= comparison"""
        return self._pointwise("cmp_le", (input, comparison), name, compute_data_type)

    @graph_op
    def logical_and(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """1 where both are non-zero, else 0."""
        return self._pointwise("logical_and", (a, b), name, compute_data_type)

    @graph_op
    def logical_or(self, a: Any, b: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """1 where either is non-zero, else 0."""
        return self._pointwise("logical_or", (a, b), name, compute_data_type)

    @graph_op
    def logical_not(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """1 where input is zero, else 0."""
        return self._pointwise("logical_not", (input,), name, compute_data_type)

    @graph_op
    def binary_select(
        self, input0: Any, input1: Any, mask: Any, *, name: str = "", compute_data_type: Any = None
    ) -> Tensor:
        """input0 where mask is non-zero, else input1."""
        return self._pointwise("binary_select", (input0, input1, mask), name, compute_data_type)

    @graph_op
    def identity(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """input, converted to the output's type in one rounding (the compute type takes no part)."""
        return self._pointwise("identity", (input,), name, compute_data_type)

    @graph_op
    def abs(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """|input|"""
        return self._pointwise("abs", (input,), name, compute_data_type)

    @graph_op
    def neg(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """-input"""
        return self._pointwise("neg", (input,), name, compute_data_type)

    @graph_op
    def ceil(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The smallest whole number not below input."""
        return self._pointwise("ceil", (input,), name, compute_data_type)

    @graph_op
    def floor(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The largest whole number not above input."""
        return self._pointwise("floor", (input,), name, compute_data_type)

    @graph_op
    def reciprocal(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """1 / input"""
        return self._pointwise("reciprocal", (input,), name, compute_data_type)

    @graph_op
    def sqrt(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The square root."""
        return self._pointwise("sqrt", (input,), name, compute_data_type)

    @graph_op
    def rsqrt(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """1 / sqrt(input)"""
        return self._pointwise("rsqrt", (input,), name, compute_data_type)

    @graph_op
    def exp(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """e ** input"""
        return self._pointwise("exp", (input,), name, compute_data_type)

    @graph_op
    def log(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The natural logarithm."""
        return self._pointwise("log", (input,), name, compute_data_type)

    @graph_op
    def sin(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The sine, input in radians."""
        return self._pointwise("sin", (input,), name, compute_data_type)

    @graph_op
    def cos(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The cosine, input in radians."""
        return self._pointwise("cos", (input,), name, compute_data_type)

    @graph_op
    def tan(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The tangent, input in radians."""
        return self._pointwise("tan", (input,), name, compute_data_type)

    @graph_op
    def erf(self, input: Any, *, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The error function, 2/sqrt(pi) times the integral of exp(-t*t) from 0 to input."""
        return self._pointwise("erf", (input,), name, compute_data_type)

    @graph_op
    def gen_index(self, input: Any, axis: int, name: str = "", compute_data_type: Any = None) -> Tensor:
        """The coordinate of each element along `axis`, counted from 0; depends on the shape of input only.

        Raises `ValueError` at `validate()` when axis is outside 0..rank-1.
        """
        return self._pointwise("gen_index", (input,), name, compute_data_type, axis=index(axis))


# -- references ----------------------------------------------------------------------------------------------


def _unary(ufunc: np.ufunc) -> Any:
    """A function of a real number."""
    return lambda call: end(call, ufunc, call.math.real(call.inputs["IN_0"]))


def _unary_numeric(ufunc: np.ufunc) -> Any:
    return lambda call: end(call, ufunc, call.math.numeric(call.inputs["IN_0"]))


def _binary(ufunc: np.ufunc) -> Any:
    """Arithmetic in the math dtype; boolean arithmetic is done on 0 and 1."""
    return lambda call: end(call, ufunc, *(call.math.numeric(call.inputs[port]) for port in ("IN_0", "IN_1")))


def _compare(ufunc: np.ufunc) -> Any:
    return lambda call: end(call, ufunc, call.load("IN_0"), call.load("IN_1"), dtype=np.bool_)


def _logic(ufunc: np.ufunc) -> Any:
    """Truth is taken from the stored values: a conversion could round a small one to zero."""
    return lambda call: end(call, ufunc, *(truth(array) for array in call.inputs.values()), dtype=np.bool_)


def _div(call: RefCall) -> Array:
    a, b = (call.math.numeric(call.inputs[port]) for port in ("IN_0", "IN_1"))
    if a.dtype.kind == "f":
        return end(call, np.divide, a, b)
    quotient = np.floor_divide(a, b)
    quotient += (quotient * b != a) & ((a < 0) != (b < 0)) & (b != 0)  # floor to truncation
    return quotient


def _pow(call: RefCall) -> Array:
    a, b = (call.math.numeric(call.inputs[port]) for port in ("IN_0", "IN_1"))
    if a.dtype.kind == "f":
        return end(call, np.power, a, b)
    # Integers: x ** -n is 1 / x**n truncated, which is non-zero for 1 and -1 only.
    powers = np.power(a, np.maximum(b, 0))
    inverse = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0))
    return np.where(b < 0, inverse, powers)


def _add_square(call: RefCall) -> Array:
    b = call.math.numeric(call.inputs["IN_1"])
    square = b * b
    return end(call, np.add, call.math.numeric(call.inputs["IN_0"]), square, scratch=square)


def _rsqrt(call: RefCall) -> Array:
    root = np.sqrt(call.math.real(call.inputs["IN_0"]))
    return end(call, np.reciprocal, root, scratch=root)


def _whole(ufunc: np.ufunc) -> Any:
    def formula(call: RefCall) -> Array:
        x = call.math.numeric(call.inputs["IN_0"])
        return end(call, ufunc, x) if x.dtype.kind == "f" else x.copy()

    return formula


def erf(x: Array) -> Array:
    """The error function of a float32 or float64 array."""
    from .. import _native  # here, so that the operators can be described without the native module

    x = np.ascontiguousarray(x)
    result = np.empty_like(x)
    _native.erf(x, result)
    return result


def _erf(call: RefCall) -> Array:
    return erf(call.math.real(call.inputs["IN_0"]))


def _select(call: RefCall) -> Array:
    a, b, mask = (call.inputs[port] for port in ("IN_0", "IN_1", "IN_2"))
    if a.dtype != b.dtype:
        a, b = call.math.load(a), call.math.load(b)
    return choose(truth(mask), a, b)


def _identity(call: RefCall) -> Array:
    x, out = call.inputs["IN_0"], call.outputs[OUT]
    target = out.target(x.dtype)
    if target is not None and x.ndim <= target.ndim:
        np.copyto(target, x)
        return target
    return x.copy() if x.dtype == out.dtype else round_to(x, out.data_type)


def _gen_index(call: RefCall) -> Array:
    shape, axis = call.inputs["IN_0"].shape, call.params["axis"]
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis], dtype=np.int64).reshape(along), shape)


def _infer_gen_index(node: Any) -> None:
    source, axis = node.inputs["IN_0"], node.params["axis"]
    if not 0 <= axis < len(source.dim):
        malformed(
            node, "axis is out of range", tensor=source, expected=f"0..{len(source.dim) - 1}", given=axis
        )
    infer(node)


OPS = (
    pointwise("add", _binary(np.add), passes=1),
    pointwise("sub", _binary(np.subtract), passes=1),
    pointwise("mul", _binary(np.multiply), passes=1),
    pointwise("div", _div),
    pointwise("add_square", _add_square),
    pointwise("bias", _binary(np.add), passes=1),
    pointwise("scale", _binary(np.multiply), passes=1),
    pointwise("max", lambda call: end(call, np.maximum, call.load("IN_0"), call.load("IN_1")), passes=1),
    pointwise("min", lambda call: end(call, np.minimum, call.load("IN_0"), call.load("IN_1")), passes=1),
    pointwise("mod", _binary(np.fmod), passes=1),
    pointwise("pow", _pow, passes=1),
    pointwise("cmp_eq", _compare(np.equal), passes=1),
    pointwise("cmp_neq", _compare(np.not_equal), passes=1),
    pointwise("cmp_gt", _compare(np.greater), passes=1),
    pointwise("cmp_ge", _compare(np.greater_equal), passes=1),
    pointwise("cmp_lt", _compare(np.less), passes=1),
    pointwise("cmp_le", _compare(np.less_equal), passes=1),
    pointwise("logical_and", _logic(np.logical_and)),
    pointwise("logical_or", _logic(np.logical_or)),
    pointwise("logical_not", _logic(np.logical_not)),
    pointwise("binary_select", _select),
    pointwise("identity", _identity, passes=1),
    pointwise("abs", _unary_numeric(np.absolute), passes=1),
    pointwise("neg", _unary_numeric(np.negative), passes=1),
    pointwise("ceil", _whole(np.ceil), passes=1),
    pointwise("floor", _whole(np.floor), passes=1),
    pointwise("reciprocal", _unary(np.reciprocal), passes=1),
    pointwise("sqrt", _unary(np.sqrt), passes=1),
    pointwise("rsqrt", _rsqrt),
    pointwise("exp", _unary(np.exp), passes=1),
    pointwise("log", _unary(np.log), passes=1),
    pointwise("sin", _unary(np.sin), passes=1),
    pointwise("cos", _unary(np.cos), passes=1),
    pointwise("tan", _unary(np.tan), passes=1),
    pointwise("erf", _erf),
    pointwise("gen_index", _gen_index, _infer_gen_index, passes=0),
)
