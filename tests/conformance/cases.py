"""Every case, by operator.

A case has `id`, `op`, `data_types` and `problems(data_type, rng)`, and `truths` where torch has no say in its
truth.
"""

from __future__ import annotations

from typing import Any

from conformance import (
    attention,
    attention_backward,
    attention_fp8,
    attention_options,
    block_scale,
    channels,
    convert,
    convolution,
    linear_attention,
    matmul,
    moe,
    norm,
    pointwise,
    reduction,
    rope,
    shape,
)

__all__ = ["CASES"]

_FAMILIES = (
    pointwise,
    convert,
    matmul,
    reduction,
    shape,
    norm,
    attention,
    attention_backward,
    attention_options,
    linear_attention,
    channels,
    convolution,
    rope,
    block_scale,
    moe,
    attention_fp8,
)

CASES: tuple[Any, ...] = tuple(case for family in _FAMILIES for case in family.CASES)
