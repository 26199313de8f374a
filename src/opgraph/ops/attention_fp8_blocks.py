"""The arithmetic of attention on FP8 data: probabilities and their gradients are rounded to FP8 on the way.

Unlike the plain attention, whose rows are normalised after the product with the values, this one needs each
probability itself. Blocks of query rows are worked on against all keys that they may see, so memory is linear
in the sequence lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import round_to
from .attention_heads import Band, Heads
from .base import Array, widened

if TYPE_CHECKING:
    from ..ir.enums import data_type

__all__ = ["backward", "forward", "largest"]

def largest(array: Array) -> Any:
    """max |x|; 0 of nothing, NaN where there is one."""
    return np.abs(array).max(initial=0)


def _rounded(array: Array, scale: float, kind: data_type) -> Array:
    """fp8(array * scale), in the array's own type; overwrites the array."""
    np.multiply(array, scale, out=array)
    return widened(round_to(array, kind), array.dtype)


def _flat(array: Array) -> Array:
    """[entries, units, group, rows, D] with the rows of a group in one axis."""
    entries, units, group, rows, width = array.shape
    return array.reshape(entries, units, group * rows, width)


def forward(
    heads: Heads,
    band: Band,
    out: Array,
    stats: Array,
    *,
    scale: float,
    scale_p: float,
    scale_v: float,
    kind: data_type,
    sink: Array | None,
) -> tuple[Any, Any]:
    """Fills `out` with softmax(scale q k^T) v and `stats`, both as `by_unit` and 0 or -inf where no block
    goes; returns max |P| and max |out|.

    P is rounded to `kind` after the factor `scale_p`; `scale_v` is the factor of the product with v. `sink`
    [units, group, 1, 1] is one more logit.
    """
    top_p, top_o = out.dtype.type(0), out.dtype.type(0)
    for b, entries, units, i0, i1, _ in heads.blocks(band):
        q = heads.q[entries, units, :, i0:i1]
        count, wide, group, rows, _ = q.shape
        first, last = band.columns(b, i0, i1)
        columns = last - first
        scores = np.empty((count, wide, group, rows, columns), q.dtype)
        flat = scores.reshape(count, wide, group * rows, columns)
        np.matmul(_flat(q), heads.k[entries, units, first:last].swapaxes(2, 3), out=flat)
        np.multiply(scores, scale, out=scores)
        band.hide(scores, b, i0, first)
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if sink is not None:
            np.maximum(top, sink[units], out=top)
        shift = np.where(top == -np.inf, 0, top)
        np.subtract(scores, shift, out=scores)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if sink is not None:
            total += np.exp(sink[units] - shift)
        stats[entries, units, :, i0:i1] = top + np.log(total)
        np.divide(scores, np.where(total == 0, 1, total), out=scores)
        top_p = np.maximum(top_p, largest(scores))
        chances = _rounded(flat, scale_p, kind)
        made = np.matmul(chances, heads.v[entries, units, first:last])
        np.multiply(made, scale_v, out=made)
        top_o = np.maximum(top_o, largest(made))
        out[entries, units, :, i0:i1] = made.reshape(count, wide, group, rows, -1)
    return top_p, top_o


def backward(
    heads: Heads,
    band: Band,
    grad: Array,
    delta: Array,
    stats: Array,
    *,
    scale: float,
    attn_scale: float,
    scale_p: float,
    scale_ds: float,
    scale_dp: float,
    kind: data_type,
    grad_kind: data_type,
) -> tuple[Array, Array, Array, Any]:
    """Sums for dQ (as `by_unit`), dK and dV (units), without their factors, and max |dS|.

        P = exp(scale q k^T - stats);  dS = P * (scale_dp * grad v^T - delta) * attn_scale
        dV = fp8(P * scale_p)^T grad;  dQ = fp8(dS * scale_ds) k;  dK = fp8(dS * scale_ds)^T q

    `grad`, `delta` and `stats` as `by_unit`.
    """
    dq, dk, dv = np.zeros_like(heads.q), np.zeros_like(heads.k), np.zeros_like(heads.v)
    top = dq.dtype.type(0)
    for b, entries, units, i0, i1, _ in heads.blocks(band):
        part = (entries, units, slice(None), slice(i0, i1))
        q, dy, statistic = heads.q[part], _flat(grad[part]), stats[part]
        count, wide, group, rows, _ = q.shape
        first, last = band.columns(b, i0, i1)
        seen = (entries, units, slice(first, last))
        k, v = heads.k[seen], heads.v[seen]
        scores = np.empty((count, wide, group, rows, last - first), q.dtype)
        flat = scores.reshape(count, wide, group * rows, last - first)
        np.matmul(_flat(q), k.swapaxes(2, 3), out=flat)
        np.multiply(scores, scale, out=scores)
        band.hide(scores, b, i0, first)
        # A row that sees no key has the statistic -inf and only scores of -inf.
        np.subtract(scores, np.where(statistic == -np.inf, 0, statistic), out=scores)
        np.exp(scores, out=scores)
        inner = np.matmul(dy, v.swapaxes(2, 3))
        np.multiply(inner, scale_dp, out=inner)
        np.subtract(inner, _flat(delta[part]), out=inner)
        np.multiply(inner, flat, out=inner)
        np.multiply(inner, attn_scale, out=inner)
        top = np.maximum(top, largest(inner))
        dv[seen] += np.matmul(_rounded(flat, scale_p, kind).swapaxes(2, 3), dy)
        inner = _rounded(inner, scale_ds, grad_kind)
        dq[part] = np.matmul(inner, k).reshape(q.shape)
        dk[seen] += np.matmul(inner.swapaxes(2, 3), _flat(q))
    return dq, dk, dv, top
