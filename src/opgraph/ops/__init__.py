"""The operators: one file per family, with signature, inference and NumPy reference side by side."""

from __future__ import annotations

from . import (
    activation,
    attention,
    attention_backward,
    attention_fp8,
    batchnorm,
    block_scale,
    convolution,
    instancenorm,
    linear_attention,
    linear_attention_summary,
    matmul,
    moe,
    norm,
    pointwise,
    reduction,
    rope,
    shape,
)
from .base import GraphOps, Math, OpDef, OutSpec, RefCall

__all__ = ["FAMILIES", "OPS", "GraphOps", "Math", "OpDef", "OutSpec", "RefCall"]

# Every family is listed here and nowhere else; its mixin class is a base of the graph class.
FAMILIES = (
    matmul,
    pointwise,
    activation,
    reduction,
    shape,
    norm,
    attention,
    attention_backward,
    linear_attention,
    linear_attention_summary,
    rope,
    convolution,
    batchnorm,
    instancenorm,
    block_scale,
    moe,
    attention_fp8,
)


def _table() -> dict[str, OpDef]:
    table: dict[str, OpDef] = {}
    for family in FAMILIES:
        for definition in family.OPS:
            if definition.name in table:
                raise RuntimeError(
                    f"operator {definition.name!r} is defined twice, again in {family.__name__}"
                )
            table[definition.name] = definition
    return table


OPS = _table()
