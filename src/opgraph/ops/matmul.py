"""Matrix product: `matmul`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType
from ..ir.errors import tensor_label
from .base import (
    Array,
    GraphOps,
    OpDef,
    RefCall,
    check_same_rank,
    graph_op,
    malformed,
    number,
    row_major,
    set_dim,
    set_stride,
    unsupported,
)

if TYPE_CHECKING:
    from ..ir.tensor import Tensor

__all__ = ["OPS", "MatmulOps", "magnitude"]


class MatmulOps(GraphOps):
    """User-facing matrix products."""

    __slots__ = ()

    @graph_op
    def matmul(
        self, A: Any, B: Any, compute_data_type: Any = None, padding: float = 0.0, name: str = ""
    ) -> Tensor:
        """C[..., m, n] = sum_k A[..., m, k] B[..., k, n], accumulated in the compute type, rounded once.

        Shapes: A [..., M, K], B [..., K, N], C [..., M, N], one rank of at least 2; leading extents are equal
        or 1, on either side. C is row-major whatever the inputs are; a transposed operand is expressed by its
        strides. Data types may differ: the products are made in the compute type. C takes the graph's
        default. `padding` is the value assumed outside runtime extents of M, N, K; without those it has no
        effect.

        Raises at `validate()`: `ValueError` when ranks, K or leading extents do not fit;
        `cudnnGraphNotSupportedError` when C was given other dims.
        """
        return self._add_node(
            "matmul",
            inputs={"A": A, "B": B},
            outputs=("C",),
            params={"padding": float(padding)},
            name=name,
            compute_data_type=compute_data_type,
        )["C"]


def _infer(node: Any) -> None:
    a, b, c = node.inputs["A"], node.inputs["B"], node.outputs["C"]
    if check_same_rank(node, (a, b)) < 2:
        malformed(
            node, "matrices have at least 2 axes", tensor=a, given=a.dim, next_step="add an extent of 1"
        )
    if a.dim[-1] != b.dim[-2]:
        malformed(
            node,
            f"the inner extents of A [..., M, K] and B [..., K, N] differ: {tensor_label(a)} is {a.dim}",
            tensor=b,
            expected=f"K = {a.dim[-1]} at axis -2",
            given=b.dim,
            next_step="declare a transposed matrix with swapped dim and stride",
        )
    lead = []
    for left, right in zip(a.dim[:-2], b.dim[:-2], strict=True):
        if left != right and left != 1 and right != 1:
            malformed(
                node,
                f"the leading extents do not broadcast: {tensor_label(a)} is {a.dim}",
                tensor=b,
                expected="equal extents, or 1",
                given=b.dim,
            )
        lead.append(right if left == 1 else left)
    dim = (*lead, a.dim[-2], b.dim[-1])
    if c.dim and c.dim != dim:
        unsupported(
            node,
            "the dim set on the product differs from the one its inputs give",
            tensor=c,
            expected=dim,
            given=c.dim,
            next_step="leave it unset, or set the expected one",
        )
    set_dim(c, dim)
    set_stride(c, row_major(c.dim))


def _reference(call: RefCall) -> dict[str, Array]:
    out = call.outputs["C"]
    a, b = call.inputs["A"], call.inputs["B"]
    dtype = call.math.dtype
    if dtype.kind == "f":
        return {"C": _product(call.math.load(a), call.math.load(b), out.target(dtype))}
    # BLAS has no integers. While every sum stays below 2**53, float64 holds it exactly.
    a, b = call.math.numeric(a), call.math.numeric(b)
    if magnitude(a) * magnitude(b) * max(a.shape[-1], 1) < 2**53:
        return {"C": _product(a.astype(np.float64), b.astype(np.float64), None)}
    return {"C": np.matmul(a, b)}


def magnitude(array: Array) -> int:
    """The largest absolute value of integers; 0 without elements."""
    return max(int(array.max()), -int(array.min())) if array.size else 0


def _product(a: Array, b: Array, target: Array | None) -> Array:
    """`a @ b`, one call of BLAS when `b` has no batch of its own and the rows of `a` lie evenly."""
    with np.errstate(all="ignore"):
        if a.ndim > 2 and a.flags.c_contiguous and number(b.shape[:-2]) == 1 and a.size and b.size:
            rows = a.reshape(-1, a.shape[-1])
            shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
            if target is not None and target.flags.c_contiguous:
                np.matmul(rows, b.reshape(b.shape[-2:]), out=target.reshape(rows.shape[0], b.shape[-1]))
                return target
            return np.matmul(rows, b.reshape(b.shape[-2:])).reshape(shape)
        if target is not None:
            return np.matmul(a, b, out=target)
        return np.asarray(np.matmul(a, b))


OPS = (OpDef("matmul", NodeType.MATMUL, _infer, _reference),)
