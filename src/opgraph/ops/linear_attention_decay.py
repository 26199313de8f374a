"""Decay inside a chunk of tokens, and the inverse of the triangular system that couples its writes.

With G the running sums of the log decay in a chunk, everything is built from e^{G_i - G_j} with j <= i. Sums
are kept in float64, and differences are taken before the exponential, masked where j > i: no exponent is ever
positive, so any gate is legal, and a later gate cannot change an earlier row by a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .linear_attention_math import add_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import Array

__all__ = ["ChannelDecay", "ScalarDecay", "diagonals", "product", "unit_lower_inverse"]

# OpenBLAS multiplies up to this m*n*k without packing or threads, its best for matrices of a chunk's size.
_SMALL_PRODUCT = 1_000_000
# Rows of the diagonal blocks that are inverted by substitution, before blocks are merged in pairs.
_INVERSE_ROWS = 16
# Rows of the diagonal blocks whose decays are taken pair by pair.
_PAIR_ROWS = 4


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b of stacks of matrices, cut along columns into products that the BLAS does in one go."""
    rows, inner = a.shape[-2:]
    columns = b.shape[-1]
    pieces = -(-rows * inner * columns // _SMALL_PRODUCT)
    if pieces <= 1:
        return np.matmul(a, b, out=out)
    if out is None:
        out = np.empty((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), rows, columns), np.result_type(a, b))
    step = -(-columns // pieces)
    for first in range(0, columns, step):
        part = slice(first, first + step)
        np.matmul(a, b[..., part], out=out[..., part])
    return out


def unit_lower_inverse(lower: Array) -> Array:
    """(I + L)^-1 of stacks of strictly lower L [.., C, C]; only entries below the diagonal are read.

    Diagonal blocks of 16 rows by forward substitution, for all blocks at once; then pairs of blocks are
    merged, [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. C is 16 times a power of two.
    """
    size = lower.shape[-1]
    inverse = np.zeros_like(lower)
    _invert_blocks(lower, inverse)
    half = _INVERSE_ROWS
    while half < size:
        for first in range(0, size, 2 * half):
            top, low = slice(first, first + half), slice(first + half, first + 2 * half)
            coupled = np.matmul(lower[..., low, top], inverse[..., top, top])
            np.matmul(inverse[..., low, low], coupled, out=inverse[..., low, top])
            np.negative(inverse[..., low, top], out=inverse[..., low, top])
        half *= 2
    return inverse


def _invert_blocks(lower: Array, inverse: Array) -> None:
    size, rows = lower.shape[-1], _INVERSE_ROWS
    blocks = size // rows
    stack = lower.shape[:-2]
    # Stacks last, so that every step is a few operations on long runs.
    given = np.empty((rows, rows, blocks, *stack), lower.dtype)
    for block in range(blocks):
        part = slice(block * rows, (block + 1) * rows)
        given[:, :, block] = np.moveaxis(lower[..., part, part], (-2, -1), (0, 1))
    given = given.reshape(rows, rows, -1)
    solved = np.zeros_like(given)
    for row in range(rows):
        solved[row, row] = 1
    for row in range(rows - 1):
        solved[row + 1 :, : row + 1] -= given[row + 1 :, row, None] * solved[row, : row + 1]
    solved = solved.reshape(rows, rows, blocks, *stack)
    for block in range(blocks):
        part = slice(block * rows, (block + 1) * rows)
        inverse[..., part, part] = np.moveaxis(solved[:, :, block], (0, 1), (-2, -1))


class ScalarDecay:
    """One decay per token and head: log [.., C, 1].

    `inner` [.., C, 1] is e^{G_i}, `outer` e^{G_C - G_i}, `end` [.., 1, 1] e^{G_C}.
    """

    __slots__ = ("_pairs", "end", "inner", "outer")

    def __init__(self, log: Array) -> None:
        sums = np.cumsum(log[..., 0], axis=-1, dtype=np.float64)
        dtype = log.dtype
        pairs = (sums[..., :, None] - sums[..., None, :]).astype(dtype, copy=False)
        np.copyto(pairs, -np.inf, where=~np.tri(pairs.shape[-1], dtype=np.bool_))
        np.exp(pairs, out=pairs)
        self._pairs = pairs
        last = sums[..., -1:]
        self.inner = np.exp(sums).astype(dtype, copy=False)[..., None]
        self.outer = np.exp(last - sums).astype(dtype, copy=False)[..., None]
        self.end = np.exp(last).astype(dtype, copy=False)[..., None]

    def products(self, left: Sequence[Array], k: Array) -> list[Array]:
        """sum_d a_id k_jd e^{G_i - G_j} [.., C, C] for each a of `left`; 0 above the diagonal."""
        turned = np.ascontiguousarray(k.swapaxes(-1, -2))
        results = []
        for a in left:
            found = product(a, turned)
            results.append(np.multiply(found, self._pairs, out=found if found.shape == self._pairs.shape else None))
        return results

    def pull(
        self, weights: Sequence[Array], values: Sequence[Array], left: Sequence[Array], k: Array
    ) -> tuple[list[Array], Array, Array]:
        """Gradients of `products`: of each a, of k, and of the log decay [.., C, 1].

        `weights` are the gradients of the products, 0 above the diagonal, and `values` the products. What
        reaches the decay of row t are the products of the rows i >= t with the rows j < t. They are summed as
        such: taken as differences of the gradients of G_i, small decays would be lost in what cancels.
        """
        dk = np.zeros((*self._pairs.shape[:-1], k.shape[-1]), k.dtype)
        d_left = []
        crossing = np.zeros_like(self._pairs)
        for weight, value, a in zip(weights, values, left, strict=True):
            crossing += weight * value
            weight = weight * self._pairs
            d_left.append(product(weight, k))
            dk += product(weight.swapaxes(-1, -2), a)
        add_up(crossing, -2, reverse=True)
        crossing *= np.tri(crossing.shape[-1], k=-1, dtype=crossing.dtype)
        return d_left, dk, crossing.sum(-1, keepdims=True)

    def collect(self, x: Array, y: Array) -> Array:
        """The products x y that a decay takes part in, [.., C, 1]."""
        return np.vecdot(x, y)[..., None]

    def collect_states(self, states: Array, slopes: Array) -> Array:
        """What reaches every decay of a chunk through e^{G_C} S, [.., 1, 1]; states and slopes [.., K, V]."""
        return np.vecdot(states, slopes).sum(-1)[..., None, None] * self.end


class ChannelDecay:
    """One decay per token, head and key channel: log [.., C, K]. Members as those of `ScalarDecay`.

    `inner` and `outer` are [.., C, K], `end` is [.., K, 1]. The sum over channels has the decay inside, so it
    is split at an anchor A between the rows i and j: e^{G_i - A} e^{A - G_j}, neither above 1. The chunk is
    halved again and again; for the products of lower with upper rows the first lower row is the anchor. In
    the blocks of 4 rows that are left, pairs are taken one by one.
    """

    __slots__ = ("_halves", "_pairs", "end", "inner", "outer")

    def __init__(self, log: Array) -> None:
        sums = add_up(log.astype(np.float64), -2)
        dtype = log.dtype
        self.inner = _exp(sums, dtype)
        self.outer = _exp(sums[..., -1:, :] - sums, dtype)
        self.end = np.ascontiguousarray(self.inner[..., -1, :, None])
        self._halves = []
        half = sums.shape[-2] // 2
        while half >= _PAIR_ROWS:
            upper, lower = _halves(sums, half)
            anchor = lower[..., :1, :]
            self._halves.append((half, _exp(anchor - upper, dtype), _exp(lower - anchor, dtype)))
            half //= 2
        blocks = _rows_of_blocks(sums)
        self._pairs = [_exp(blocks[..., apart:, :] - blocks[..., :-apart, :], dtype) for apart in range(1, _PAIR_ROWS)]

    def products(self, left: Sequence[Array], k: Array) -> list[Array]:
        size = k.shape[-2]
        results = [np.zeros((*self.inner.shape[:-1], size), k.dtype) for _ in left]
        for half, to_anchor, from_anchor in self._halves:
            source = _halves(k, half)[0] * to_anchor
            turned = np.ascontiguousarray(source.swapaxes(-1, -2))
            for a, result in zip(left, results, strict=True):
                product(_halves(a, half)[1] * from_anchor, turned, out=_blocks_below(result, half))
        for apart in range(_PAIR_ROWS):
            source = self._earlier(k, apart)
            for a, result in zip(left, results, strict=True):
                later = _rows_of_blocks(a)[..., apart:, :]
                diagonals(result, _PAIR_ROWS, apart)[...] = np.vecdot(later, source)
        return results

    def pull(
        self, weights: Sequence[Array], values: Sequence[Array], left: Sequence[Array], k: Array
    ) -> tuple[list[Array], Array, Array]:
        d_left = [np.zeros(self.inner.shape, k.dtype) for _ in left]
        dk, dlog = np.zeros(self.inner.shape, k.dtype), np.zeros(self.inner.shape, k.dtype)
        for half, to_anchor, from_anchor in self._halves:
            upper, lower = _halves(dlog, half)
            source = _halves(k, half)[0] * to_anchor
            back, crossing = np.zeros_like(source), np.zeros_like(source)
            for weight, a, da in zip(weights, left, d_left, strict=True):
                block, later = _blocks_below(weight, half), _halves(a, half)[1]
                part = product(block, source)
                part *= from_anchor
                _halves(da, half)[1][...] += part
                part *= later
                crossing += part
                back += product(block.swapaxes(-1, -2), later * from_anchor)
            back *= to_anchor
            _halves(dk, half)[0][...] += back
            # A lower row has these products from itself on below it, an upper row from those above it.
            lower += add_up(crossing, -2, reverse=True)
            back *= _halves(k, half)[0]
            upper[..., 1:, :] += add_up(back, -2)[..., :-1, :]
        for apart in range(_PAIR_ROWS):
            source = self._earlier(k, apart)
            for weight, a, da in zip(weights, left, d_left, strict=True):
                factor, later = diagonals(weight, _PAIR_ROWS, apart)[..., None], _rows_of_blocks(a)[..., apart:, :]
                part = factor * source
                _rows_of_blocks(da)[..., apart:, :] += part
                part *= later
                for row in range(apart):
                    _rows_of_blocks(dlog)[..., apart - row : _PAIR_ROWS - row, :] += part
                part = factor * later
                if apart:
                    part *= self._pairs[apart - 1]
                _rows_of_blocks(dk)[..., : _PAIR_ROWS - apart, :] += part
        return d_left, dk, dlog

    def _earlier(self, k: Array, apart: int) -> Array:
        """k_{i - apart} e^{G_i - G_{i - apart}}, [.., blocks, rows i that have such a row, K]."""
        rows = _rows_of_blocks(k)
        return rows[..., : _PAIR_ROWS - apart, :] * self._pairs[apart - 1] if apart else rows

    def collect(self, x: Array, y: Array) -> Array:
        return x * y

    def collect_states(self, states: Array, slopes: Array) -> Array:
        return (np.vecdot(states, slopes) * self.end[..., 0])[..., None, :]


def _exp(exponents: Array, dtype: np.dtype[Any]) -> Array:
    result: Array = exponents.astype(dtype)
    return np.exp(result, out=result)


def _halves(array: Array, half: int) -> tuple[Array, Array]:
    """Upper and lower halves of blocks of 2 * half rows, [.., blocks, half, D], as views."""
    blocks = array.reshape(*array.shape[:-2], array.shape[-2] // (2 * half), 2, half, array.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _rows_of_blocks(array: Array) -> Array:
    """[.., blocks of 4 rows, 4, D], as a view."""
    blocks = array.shape[-2] // _PAIR_ROWS
    return array.reshape(*array.shape[:-2], blocks, _PAIR_ROWS, array.shape[-1])


def _blocks_below(square: Array, half: int) -> Array:
    """The lower left quarters of the diagonal blocks of 2 * half rows of [.., C, C], as a view."""
    row, column = square.strides[-2:]
    return np.lib.stride_tricks.as_strided(
        square[..., half:, :],
        (*square.shape[:-2], square.shape[-1] // (2 * half), half, half),
        (*square.strides[:-2], 2 * half * (row + column), row, column),
    )


def diagonals(square: Array, rows: int, below: int) -> Array:
    """The elements so far below the diagonal in each diagonal block of `rows` of [.., C, C], as a view."""
    row, column = square.strides[-2:]
    return np.lib.stride_tricks.as_strided(
        square[..., below:, :],
        (*square.shape[:-2], square.shape[-1] // rows, rows - below),
        (*square.strides[:-2], rows * (row + column), row + column),
    )
