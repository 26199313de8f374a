"""Cases of the pointwise and activation operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.calculus import slope
from conformance.layouts import overlapping, padded, reversed_axes, row_major
from conformance.problem import Expect, Input, Problem
from opgraph import data_type

__all__ = ["CASES", "Pointwise", "pointwise_stride"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

_FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
_INTEGERS = (data_type.INT32, data_type.INT64)


def pointwise_stride(
    dim: Sequence[int], inputs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[int, ...]:
    """Default strides of a pointwise output with a buffer: of the first input with its dim that an output can
    have."""
    for shape, stride in inputs:
        if tuple(shape) == tuple(dim) and not overlapping(shape, stride):
            return tuple(stride)
    return row_major(dim)


# (id, dims of each input in turn (the last one repeats), strides of each or None)
_Shape = tuple[str, Sequence[Sequence[int]], Sequence[Sequence[int] | None]]
SHAPES: tuple[_Shape, ...] = (
    ("one", ([1],), (None,)),
    ("prime", ([7],), (None,)),
    ("cube", ([2, 3, 5],), (None,)),
    ("tile edge below", ([3, 127],), (None,)),
    ("tile edge", ([2, 128],), (None,)),
    ("tile edge above", ([129, 3],), (None,)),
    ("empty", ([0],), (None,)),
    ("empty axis", ([3, 0, 2],), (None,)),
    ("transposed", ([5, 7],), (reversed_axes([5, 7]),)),
    ("padded rows", ([4, 5],), (padded([4, 5]),)),
    ("gaps everywhere", ([3, 4, 2],), ((31, 7, 3),)),
    ("eight axes", ([1, 2, 1, 3, 1, 2, 1, 2],), (None,)),
)
BROADCASTS: tuple[_Shape, ...] = (
    ("fewer axes", ([2, 3, 5], [3, 5]), (None, None)),
    ("more axes", ([5], [2, 3, 5]), (None, None)),
    ("both ways", ([2, 1, 5], [1, 3, 1]), (None, None)),
    ("row", ([4, 129], [1, 129]), (None, None)),
    ("column", ([17, 4], [17, 1]), (None, None)),
    ("scalar", ([2, 3], [1, 1]), (None, None)),
    ("empty", ([2, 0], [2, 1]), (None, None)),
    ("stride 0", ([4, 6], [4, 6]), ((0, 1), None)),
    ("only stride 0", ([4, 6],), ((1, 0),)),
    ("mixed layouts", ([5, 7], [5, 7]), (reversed_axes([5, 7]), padded([5, 7]))),
    ("middle axis", ([3, 4, 5], [3, 1, 5]), ((1, 3, 12), None)),
)


class Pointwise:
    """One pointwise operator: keyword names of its tensors, a maker of values, a formula in NumPy or torch.

    `make[i](rng, dim)` gives numbers of input i; `formula(xp, *inputs)` the truth. A backward operator names
    its forward formula instead, and its truth is the derivative of that.
    """

    def __init__(
        self,
        op: str,
        ports: Sequence[str],
        formula: Callable[..., Any],
        make: Sequence[Callable[[Rng, Sequence[int]], Array]],
        *,
        params: Mapping[str, Any] | None = None,
        backward: bool = False,
        data_types: Sequence[data_type] = _FLOATS,
        exact: bool = False,
        label: str = "",
    ) -> None:
        self.op = op
        self.id = f"{op} {label}".strip()
        self.ports = tuple(ports)
        self.formula = formula
        self.make = [make[min(i, len(make) - 1)] for i in range(len(ports))]
        self.params = dict(params or {})
        self.backward = backward
        self.data_types = tuple(data_types)
        self.exact = exact

    def truth(self, xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        arrays = list(values.values())
        if not self.backward:
            return {"OUT": self.formula(xp, *arrays)}
        loss, x = arrays
        return {"OUT": loss * slope(xp, lambda at: self.formula(xp, at), x)}

    def declare(self, graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {"OUT": getattr(graph, self.op)(**tensors, **self.params)}

    def problem(
        self,
        id: str,
        rng: Rng,
        dims: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int] | None],
        dtype: data_type,
        *,
        out_stride: Sequence[int] | None = None,
        out_type: data_type | None = None,
    ) -> Problem:
        inputs = {}
        for i, port in enumerate(self.ports):
            dim, stride = dims[min(i, len(dims) - 1)], strides[min(i, len(strides) - 1)]
            kind = data_type.BOOLEAN if dtype is not data_type.FLOAT and port == "mask" else dtype
            inputs[port] = Input(self.make[i](rng, dim), kind, stride)
        dim = np.broadcast_shapes(*(given.dim for given in inputs.values()))
        stride = pointwise_stride(dim, [(given.dim, given.stride) for given in inputs.values()])

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            outputs = self.declare(graph, tensors)
            if out_stride is not None:
                outputs["OUT"].set_stride(out_stride)
            if out_type is not None:
                outputs["OUT"].set_data_type(out_type)
            return outputs

        return Problem(
            f"{self.id} {dtype.name}{'' if out_type is None else ' to ' + out_type.name}: {id}",
            inputs,
            declare,
            self.truth,
            {"OUT": Expect(dim, out_stride or stride, out_type or dtype, exact=self.exact)},
            io=dtype,
            compute=dtype if dtype in _INTEGERS else data_type.FLOAT,
        )

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        shapes = SHAPES + (BROADCASTS if len(self.ports) > 1 else ())
        for id, dims, strides in shapes:
            yield self.problem(id, rng, dims, strides, dtype)
        yield self.problem("padded output", rng, ([4, 5],), (None,), dtype, out_stride=(9, 1))
        yield self.problem("transposed output", rng, ([4, 5],), (None,), dtype, out_stride=(1, 4))
        yield self.problem("virtual", rng, ([3, 5],), ((1, 3),), dtype).with_virtual_edges()
        if self.op.startswith(("cmp_", "logical_")):
            yield self.problem("cube", rng, ([2, 3, 5],), (None,), dtype, out_type=data_type.BOOLEAN)
            yield self.problem("cube", rng, ([2, 3, 5],), (None,), dtype, out_type=data_type.INT32)
        if dtype in (data_type.HALF, data_type.BFLOAT16):
            yield self.problem("widened", rng, ([2, 3, 5],), (None,), dtype, out_type=data_type.FLOAT)
            own = self.problem("own type", rng, ([2, 3, 5],), (None,), dtype)
            yield own.with_types(intermediate=dtype, compute=dtype)


# -- values --------------------------------------------------------------------------------------------------


def normal(rng: Rng, dim: Sequence[int]) -> Array:
    return rng.standard_normal(dim) * 2


def positive(rng: Rng, dim: Sequence[int]) -> Array:
    return rng.uniform(0.05, 5, dim)


def away_from_zero(rng: Rng, dim: Sequence[int]) -> Array:
    return rng.uniform(0.3, 3, dim) * rng.choice([-1, 1], dim)


def below_quarter_turn(rng: Rng, dim: Sequence[int]) -> Array:
    return rng.uniform(-1.3, 1.3, dim)  # tan is steep, and halves are coarse, beyond


def few(rng: Rng, dim: Sequence[int]) -> Array:
    """Small whole numbers, so that equality happens."""
    return rng.integers(-2, 3, dim)


def whole(rng: Rng, dim: Sequence[int]) -> Array:
    return rng.integers(-1000, 1000, dim)


def not_zero(rng: Rng, dim: Sequence[int]) -> Array:
    return rng.integers(1, 50, dim) * rng.choice([-1, 1], dim)


# -- formulas: `xp` is NumPy or torch, in float64
# ------------------------------------------------------------------


def erf(xp: Any, x: Any) -> Any:
    if xp is np:
        return np.vectorize(math.erf, otypes=[np.float64])(x)
    return xp.erf(x)


def sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x)) if xp is np else xp.sigmoid(x)


def softplus(xp: Any, x: Any) -> Any:
    return np.logaddexp(0, x) if xp is np else xp.nn.functional.softplus(x, threshold=700.0)


def elu(xp: Any, x: Any) -> Any:
    return np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1) if xp is np else xp.nn.functional.elu(x)


def gelu(xp: Any, x: Any) -> Any:
    return x * (1 + erf(np, x / math.sqrt(2))) / 2 if xp is np else xp.nn.functional.gelu(x)


def gelu_tanh(xp: Any, x: Any) -> Any:
    if xp is np:
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return xp.nn.functional.gelu(x, approximate="tanh")


def relu(slope: float = 0.0, low: float = 0.0, high: float = math.inf) -> Callable[[Any, Any], Any]:
    def formula(xp: Any, x: Any) -> Any:
        middle = xp.where(x > low, x, low + slope * (x - low))
        return xp.where(x >= high, xp.full_like(x, high), middle)

    return formula


def swish(beta: float = 1.0) -> Callable[[Any, Any], Any]:
    return lambda xp, x: x * sigmoid(xp, beta * x)


def truth_of(x: Any) -> Any:
    return x != 0


def index_along(axis: int) -> Callable[[Any, Any], Any]:
    def formula(xp: Any, x: Any) -> Any:
        places = np.indices(tuple(x.shape))[axis]
        return places if xp is np else xp.from_numpy(places)

    return formula


def both(function: str, other: str = "") -> Callable[..., Any]:
    """A function of NumPy and torch by its names."""
    return lambda xp, *x: getattr(xp, function if xp is np else other or function)(*x)


_AB, _IC, _X = ("a", "b"), ("input", "comparison"), ("input",)
_PAIR, _LOSS = ("input0", "input1"), ("loss", "input")
_BIAS, _SCALE = ("input", "bias"), ("input", "scale")

_EXACT = (*_FLOATS, *_INTEGERS)

FORWARD: tuple[Pointwise, ...] = (
    Pointwise("add", _AB, lambda xp, a, b: a + b, [normal]),
    Pointwise("sub", _AB, lambda xp, a, b: a - b, [normal]),
    Pointwise("mul", _AB, lambda xp, a, b: a * b, [normal]),
    Pointwise("div", _AB, lambda xp, a, b: a / b, [normal, away_from_zero]),
    Pointwise("add_square", _AB, lambda xp, a, b: a + b * b, [normal]),
    Pointwise("bias", _BIAS, lambda xp, a, b: a + b, [normal]),
    Pointwise("scale", _SCALE, lambda xp, a, b: a * b, [normal]),
    Pointwise("max", _PAIR, both("maximum"), [normal]),
    Pointwise("min", _PAIR, both("minimum"), [normal]),
    Pointwise("mod", _PAIR, both("fmod"), [normal, away_from_zero]),
    Pointwise("pow", _PAIR, lambda xp, a, b: a**b, [positive, normal]),
    Pointwise("cmp_eq", _IC, lambda xp, a, b: a == b, [few], exact=True, data_types=_EXACT),
    Pointwise("cmp_neq", _IC, lambda xp, a, b: a != b, [few], exact=True, data_types=_EXACT),
    Pointwise("cmp_gt", _IC, lambda xp, a, b: a > b, [few], exact=True, data_types=_EXACT),
    Pointwise("cmp_ge", _IC, lambda xp, a, b: a >= b, [few], exact=True, data_types=_EXACT),
    Pointwise("cmp_lt", _IC, lambda xp, a, b: a < b, [few], exact=True, data_types=_EXACT),
    Pointwise("cmp_le", _IC, lambda xp, a, b: a <= b, [few], exact=True, data_types=_EXACT),
    Pointwise(
        "logical_and", _AB, lambda xp, a, b: truth_of(a) & truth_of(b), [few], exact=True,
        data_types=(*_EXACT, data_type.BOOLEAN),
    ),
    Pointwise(
        "logical_or", _AB, lambda xp, a, b: truth_of(a) | truth_of(b), [few], exact=True,
        data_types=(*_EXACT, data_type.BOOLEAN),
    ),
    Pointwise(
        "logical_not", _X, lambda xp, a: ~truth_of(a), [few], exact=True,
        data_types=(*_EXACT, data_type.BOOLEAN),
    ),
    Pointwise(
        "binary_select", ("input0", "input1", "mask"), lambda xp, a, b, m: xp.where(truth_of(m), a, b),
        [normal, normal, few],
    ),
    Pointwise("identity", _X, lambda xp, x: x, [normal], data_types=(*_FLOATS, data_type.BOOLEAN)),
    Pointwise("abs", _X, both("abs"), [normal]),
    Pointwise("neg", _X, lambda xp, x: -x, [normal]),
    Pointwise("ceil", _X, both("ceil"), [normal]),
    Pointwise("floor", _X, both("floor"), [normal]),
    Pointwise("reciprocal", _X, lambda xp, x: 1 / x, [away_from_zero]),
    Pointwise("sqrt", _X, both("sqrt"), [positive]),
    Pointwise("rsqrt", _X, lambda xp, x: 1 / xp.sqrt(x), [positive]),
    Pointwise("exp", _X, both("exp"), [normal]),
    Pointwise("log", _X, both("log"), [positive]),
    Pointwise("sin", _X, both("sin"), [normal]),
    Pointwise("cos", _X, both("cos"), [normal]),
    Pointwise("tan", _X, both("tan"), [below_quarter_turn]),
    Pointwise("erf", _X, erf, [normal]),
    Pointwise("gen_index", _X, index_along(0), [normal], params={"axis": 0}, data_types=_EXACT, exact=True),
    Pointwise("relu", _X, relu(), [normal]),
    Pointwise(
        "relu", _X, relu(0.2, -0.7771, 1.3331), [normal], label="clipped",
        params={"negative_slope": 0.2, "lower_clip": -0.7771, "upper_clip": 1.3331},
    ),
    Pointwise("leaky_relu", _X, relu(0.1), [normal], params={"negative_slope": 0.1}),
    Pointwise("elu", _X, elu, [normal]),
    Pointwise("gelu", _X, gelu, [normal]),
    Pointwise("gelu_approx_tanh", _X, gelu_tanh, [normal]),
    Pointwise("sigmoid", _X, sigmoid, [normal]),
    Pointwise("tanh", _X, both("tanh"), [normal]),
    Pointwise("softplus", _X, softplus, [normal]),
    Pointwise("swish", _X, swish(), [normal]),
    Pointwise("swish", _X, swish(1.7), [normal], params={"swish_beta": 1.7}, label="beta"),
)  # fmt: skip

WHOLE: tuple[Pointwise, ...] = (
    Pointwise("add", _AB, lambda xp, a, b: a + b, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("sub", _AB, lambda xp, a, b: a - b, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("mul", _AB, lambda xp, a, b: a * b, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("add_square", _AB, lambda xp, a, b: a + b * b, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("bias", _BIAS, lambda xp, a, b: a + b, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("scale", _SCALE, lambda xp, a, b: a * b, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("max", _PAIR, both("maximum"), [whole], label="whole", data_types=_INTEGERS),
    Pointwise("min", _PAIR, both("minimum"), [whole], label="whole", data_types=_INTEGERS),
    Pointwise("mod", _PAIR, both("fmod"), [whole, not_zero], label="whole", data_types=_INTEGERS),
    Pointwise("abs", _X, both("abs"), [whole], label="whole", data_types=_INTEGERS),
    Pointwise("neg", _X, lambda xp, x: -x, [whole], label="whole", data_types=_INTEGERS),
    Pointwise("identity", _X, lambda xp, x: x, [whole], label="whole", data_types=_INTEGERS),
    Pointwise(
        "binary_select", ("input0", "input1", "mask"), lambda xp, a, b, m: xp.where(truth_of(m), a, b),
        [whole, whole, few], label="whole", data_types=_INTEGERS,
    ),
)  # fmt: skip

BACKWARD: tuple[Pointwise, ...] = (
    Pointwise("relu_backward", _LOSS, relu(), [normal], backward=True),
    Pointwise(
        "relu_backward", _LOSS, relu(0.2, -0.7771, 1.3331), [normal], backward=True, label="clipped",
        params={"negative_slope": 0.2, "lower_clip": -0.7771, "upper_clip": 1.3331},
    ),
    Pointwise(
        "leaky_relu_backward", _LOSS, relu(0.1), [normal], backward=True, params={"negative_slope": 0.1}
    ),
    Pointwise("elu_backward", _LOSS, elu, [normal], backward=True),
    Pointwise("gelu_backward", _LOSS, gelu, [normal], backward=True),
    Pointwise("gelu_approx_tanh_backward", _LOSS, gelu_tanh, [normal], backward=True),
    Pointwise("sigmoid_backward", _LOSS, sigmoid, [normal], backward=True),
    Pointwise("tanh_backward", _LOSS, both("tanh"), [normal], backward=True),
    Pointwise("softplus_backward", _LOSS, softplus, [normal], backward=True),
    Pointwise("swish_backward", _LOSS, swish(), [normal], backward=True),
    Pointwise(
        "swish_backward", _LOSS, swish(1.7), [normal], backward=True, params={"swish_beta": 1.7}, label="beta"
    ),
)  # fmt: skip

CASES = (*FORWARD, *WHOLE, *BACKWARD)
