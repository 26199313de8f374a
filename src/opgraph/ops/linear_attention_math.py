"""What every evaluation of gated linear attention shares: operands, gates, their gradients, and outputs.

The recurrence of one head, with the state held as it is stored, X = S^T [V, K]:

    X = X * exp(g)            decay, along K
    u = w * v - X (b * k)     what is written
    X = X + u k^T
    o = scale * X q

GDN has one g per token and b = w = beta; KDA has a g per key channel; GDN2 also a b per key channel and a w
per value channel. A gate without a channel axis is carried with one of extent 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import round_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .base import Array, OutSpec, RefCall

__all__ = ["LOWEST_LOG_DECAY", "Gate", "Operands", "Place", "Rows", "Sink", "add_up", "sigmoid"]

L2_EPSILON = 1e-6
LINEAR_GATE_GUARD = 1e-10
DEFAULT_LOWER_BOUND = -5.0
# exp(-100) is below the smallest normal float32, so decays beyond it change nothing, while prefix sums of
# them would lose the low bits of all later ones (and -inf could not be summed at all).
LOWEST_LOG_DECAY = -100.0


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with small relative error at both ends."""
    with np.errstate(over="ignore"):
        return np.reciprocal(1 + np.exp(-x))


def add_up(array: Array, axis: int, *, reverse: bool = False) -> Array:
    """Running sums along an axis, in place. NumPy's own are slow on any axis but the last."""
    rows = np.moveaxis(array, axis, 0)
    if reverse:
        rows = rows[::-1]
    for i in range(1, len(rows)):
        np.add(rows[i], rows[i - 1], out=rows[i])
    return array


class Place:
    """Which tokens the arrays of one reading hold.

    `index` is a slice or an array of token numbers; read arrays start with the axes `shape`, the last of
    which is the token axis when `inner`: it is then moved behind the head axes. `padding` is True at entries
    that stand for no token, or None.
    """

    __slots__ = ("index", "inner", "padding", "shape")

    def __init__(self, index: slice | Array, shape: tuple[int, ...], padding: Array | None, inner: bool) -> None:
        self.index = index
        self.shape = shape
        self.padding = padding
        self.inner = inner

    def arranged(self, array: Array) -> Array:
        """`[*shape, S, G, D]` with the token axis where this reading has it, `[.., S, G, C, D]`."""
        return np.moveaxis(array, 2, 4) if self.inner else array

    def tokens_first(self, array: Array) -> Array:
        """The inverse of `arranged`."""
        return np.moveaxis(array, 4, 2) if self.inner else array


class Sink:
    """An output that is filled row by row: its buffer, or an array where that shares memory with an input.

    `same_as` is an input that may be the very same buffer, because every row is read before it is written.
    """

    __slots__ = ("_data_type", "array")

    def __init__(self, out: OutSpec, inputs: Mapping[str, Array], same_as: Array | None = None) -> None:
        view = out.view
        if view is not None and (
            view.shape != out.shape
            or any(np.may_share_memory(view, x) and not (x is same_as and _same(view, x)) for x in inputs.values())
        ):
            view = None
        self.array = np.empty(out.shape, out.dtype) if view is None else view
        self._data_type = out.data_type

    def put(self, index: Any, values: Array) -> None:
        """Stores rows, rounded to the output's type."""
        self.array[index] = self._rounded(values)

    def put_tokens(self, place: Place, values: Array) -> None:
        """Stores values `[.., S, G or 1, D]` of the tokens of a reading; heads and channels as the output has
        them.
        """
        array, values = self.array, self._rounded(place.tokens_first(values))
        if isinstance(place.index, slice):
            # Cutting an axis never copies, so this writes through.
            array[place.index].reshape(values.shape)[...] = values
            return
        index = place.index
        if place.padding is not None:
            index, values = index[~place.padding], values[~place.padding]
        array[index] = values.reshape(*index.shape, *array.shape[1:])

    def _rounded(self, values: Array) -> Array:
        return values if values.dtype == self.array.dtype else round_to(values, self._data_type)


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.strides == b.strides and a.ctypes.data == b.ctypes.data and a.dtype == b.dtype


class Gate:
    """From the g port to the natural logarithm of the decay, and back."""

    __slots__ = ("_a_log", "_bound", "_dt_bias", "_inner", "_linear", "_safe", "d_a_log", "d_dt_bias")

    def __init__(self, operands: Operands, inner: bool) -> None:
        params, inputs = operands.params, operands.inputs
        self._inner = inner
        self._linear = params["gate_domain"] == "linear"
        self._safe = params["safe_gate"]
        bound = params.get("gate_lower_bound")
        self._bound = DEFAULT_LOWER_BOUND if bound is None else bound
        self._a_log = self._parameter(operands, inputs.get("a_log"))
        self._dt_bias = self._parameter(operands, inputs.get("dt_bias"))
        self.d_a_log: Array | None = None
        self.d_dt_bias: Array | None = None

    def _parameter(self, operands: Operands, array: Array | None) -> Array | None:
        """A parameter [HO] or [HO, K] as [S, G, 1 or K], with a token axis where the readings have theirs."""
        if array is None:
            return None
        shaped = array.reshape(*operands.heads, array.shape[1] if array.ndim == 2 else 1)
        return operands.load(shaped[:, :, None] if self._inner else shaped)

    def log_decay(self, g: Array, channels: bool) -> Array:
        """log(alpha) of g as it was given."""
        if self._safe:
            x = g if self._dt_bias is None else g + self._dt_bias
            gain = 1 if self._a_log is None else np.exp(self._a_log)
            return self._bound * sigmoid(gain * x) if channels else -gain * np.logaddexp(0, x)
        return np.log(g + g.dtype.type(LINEAR_GATE_GUARD)) if self._linear else g

    def backward(self, dy: Array, g: Array, channels: bool) -> Array:
        """dG from the gradient of the log decay; adds to the gradients of the parameters."""
        if not self._safe:
            return dy / (g + g.dtype.type(LINEAR_GATE_GUARD)) if self._linear else dy
        x = g if self._dt_bias is None else g + self._dt_bias
        gain = 1 if self._a_log is None else np.exp(self._a_log)
        if channels:
            s = sigmoid(gain * x)
            slope = self._bound * s * sigmoid(-gain * x) * dy
            dx, da = slope * gain, slope * gain * x
        else:
            dx, da = -gain * sigmoid(x) * dy, -gain * np.logaddexp(0, x) * dy
        if self._a_log is not None:
            self.d_a_log = self._sum(da.sum(-1, dtype=np.float64), self.d_a_log)
        if self._dt_bias is not None:
            self.d_dt_bias = self._sum(dx, self.d_dt_bias)
        return dx

    def _sum(self, array: Array, before: Array | None) -> Array:
        """Adds the sum over tokens, in float64; [HO] or [HO, channels]."""
        total = array.sum((0, 1, 4) if self._inner else (0, 1), dtype=np.float64)
        return total if before is None else before + total


class Operands:
    """The inputs of one call, read for a few tokens at a time.

    Read arrays have two head axes: S heads of the source with the fewest, and the G = HO / S output heads
    that read each of them. A source with S heads has extent 1 on the second axis.
    """

    __slots__ = (
        "K", "N", "V", "channel_beta", "channel_gate", "cu", "dtype", "heads", "inputs", "lengths",
        "params", "scale",
    )  # fmt: skip

    def __init__(self, call: RefCall, dtype: np.dtype[Any]) -> None:
        self.params, self.inputs, self.dtype = call.params, call.inputs, dtype
        inputs = self.inputs
        self.cu: list[int] = inputs["cu_seqlens"].tolist()
        self.lengths = [high - low for low, high in pairwise(self.cu)]
        self.N = len(self.lengths)
        self.K = inputs["k"].shape[2]
        self.V = inputs["v" if "v" in inputs else "dO"].shape[2]
        out_heads = inputs["g"].shape[1]
        fewest = min(inputs[port].shape[1] for port in ("q", "k", "v") if port in inputs)
        self.heads = (fewest, out_heads // fewest if fewest else 1)
        self.channel_gate = inputs["g"].ndim == 3
        self.channel_beta = inputs["beta"].ndim == 3
        scale = self.params.get("scale")
        self.scale = scale if scale is not None else (self.K**-0.5 if self.K else 1.0)

    def load(self, array: Array) -> Array:
        """A copy in the dtype of the computation, C-contiguous."""
        loaded = np.empty(array.shape, self.dtype)
        with np.errstate(over="ignore"):
            np.copyto(loaded, array, casting="unsafe")
        return loaded

    def read(self, port: str, place: Place) -> Array:
        """`[.., S, G or 1, (C,) D]` of an input at the tokens of a reading; 0 at padding."""
        array = self.inputs[port]
        if array.ndim == 2:
            array = array[..., None]
        heads, channels = array.shape[1:]
        split = (self.heads[0], heads // self.heads[0] if self.heads[0] else 1, channels)
        rows = self.load(place.arranged(array[place.index].reshape(*place.shape, *split)))
        if place.padding is not None:
            place.tokens_first(rows)[place.padding] = 0
        return rows

    def states(self, port: str, rows: Any) -> Array:
        """Rows of a state port as `[n, S, G, V, K]`."""
        array = self.inputs[port][rows]
        return self.load(array.reshape(len(array), *self.heads, *array.shape[2:]))


class Rows:
    """The operands of some tokens after norms and gates: q, k, v, b, w and the log decay.

    `q` and `v` are None where the call has none. Readings for chunks have the log decay clamped, and no
    gradient where it was.
    """

    __slots__ = (
        "_free",
        "_gate",
        "_k_scale",
        "_operands",
        "_q_scale",
        "b",
        "beta",
        "g",
        "k",
        "log",
        "place",
        "q",
        "v",
        "w",
    )

    def __init__(self, operands: Operands, gate: Gate, place: Place) -> None:
        self._operands, self._gate, self.place = operands, gate, place
        params, inputs = operands.params, operands.inputs
        self.q: Any = operands.read("q", place) if "q" in inputs else None
        self.k = operands.read("k", place)
        self.v: Any = operands.read("v", place) if "v" in inputs else None
        self._q_scale = self._k_scale = None
        if params["use_qk_l2norm"]:
            self._k_scale = _normalise(self.k)
            if self.q is not None:
                self._q_scale = _normalise(self.q)
        self.g = operands.read("g", place)
        log = gate.log_decay(self.g, operands.channel_gate)
        self._free: Any = None
        if place.inner:
            self._free = log >= LOWEST_LOG_DECAY
            log = np.maximum(log, LOWEST_LOG_DECAY)
        self.log = log
        self.beta = beta = operands.read("beta", place)
        if params["use_beta_sigmoid"]:
            beta = sigmoid(beta)
            if params["allow_neg_eigval"]:
                beta += beta
        self.b = beta
        self.w = operands.read("w", place) if "w" in inputs else beta
        if place.padding is not None:
            place.tokens_first(self.log)[place.padding] = 0
            place.tokens_first(self._free)[place.padding] = False

    def fold(self, sinks: Mapping[str, Sink], dq: Array, dk: Array, de: Array, dx: Array, dlog: Array) -> None:
        """Stores the gradients of the ports.

        dq [.., S, G, (C,) K]; dk the part of k's gradient that does not go through e = b * k; de the gradient
        of e; dx that of w * v; dlog that of the log decay.
        """
        operands, params = self._operands, self._operands.params
        b, w, k, v = self.b, self.w, self.k, self.v
        if operands.channel_beta:
            dbeta = k * de
            sinks["dW"].put_tokens(self.place, v * dx)
        else:
            dbeta = (np.vecdot(k, de) + np.vecdot(v, dx))[..., None]
        if params["use_beta_sigmoid"]:
            dbeta = dbeta * b * sigmoid(-self.beta)
        sinks["dBeta"].put_tokens(self.place, dbeta)
        sinks["dV"].put_tokens(self.place, _group_sum(w * dx, v))
        dk = _denormalise(_group_sum(dk + b * de, k), k, self._k_scale)
        sinks["dK"].put_tokens(self.place, dk)
        sinks["dQ"].put_tokens(self.place, _denormalise(_group_sum(dq, self.q), self.q, self._q_scale))
        if self._free is not None:
            dlog = np.where(self._free, dlog, 0)
        sinks["dG"].put_tokens(self.place, self._gate.backward(dlog, self.g, operands.channel_gate))


def _normalise(x: Array) -> Array:
    """Divides rows by sqrt(sum of squares + epsilon), in place; returns the factors."""
    factor: Array = np.reciprocal(np.sqrt(np.vecdot(x, x)[..., None] + x.dtype.type(L2_EPSILON)))
    np.multiply(x, factor, out=x)
    return factor


def _denormalise(dy: Array, y: Array, factor: Array | None) -> Array:
    """The gradient before `_normalise` from the one after; y is the normalised row."""
    return dy if factor is None else factor * (dy - y * np.vecdot(y, dy)[..., None])


def _group_sum(gradient: Array, source: Array) -> Array:
    """Sums over the output heads that read one head of the source."""
    if source.shape[3] == gradient.shape[3]:
        return gradient
    return gradient.sum(3, keepdims=True)


def first_rows(lengths: Iterable[int], every: int) -> list[int]:
    """The first checkpoint row of each sequence, and the number of rows in use."""
    rows = [0]
    for length in lengths:
        rows.append(rows[-1] + -(-length // every))
    return rows
