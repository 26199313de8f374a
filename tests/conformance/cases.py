"""Every case, by operator.

A case has `id`, `op`, `data_types` and `problems(data_type, rng)`, and `truths` where torch has no say in its
truth.
"""

from __future__ import annotations

from typing import Any

from conformance import attention, convert, matmul, norm, pointwise, reduction, shape

__all__ = ["CASES"]

CASES: tuple[Any, ...] = (
    *pointwise.CASES,
    *matmul.CASES,
    *reduction.CASES,
    *norm.CASES,
    *attention.CASES,
    *shape.CASES,
    *convert.CASES,
)
