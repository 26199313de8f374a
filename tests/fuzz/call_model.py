"""The contract of a whole call Y = identity(X): operand by operand the model of tests/null, then what a call adds.

The order is that of the design: overrides, the operands by uid, the graph's shape rules, overlap, the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import _null_tests  # noqa: F401
import numpy as np
from contract_model import (
    HOSTS,
    Declared,
    Given,
    _axis_by_axis,
    _dense,
    _in_storage_order,
    _same_type,
    _squeezed,
    span,
    verdict,
    writes_once,
)

Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Buffer(NamedTuple):
    """One operand of a call as it describes itself, and where it lies."""

    given: Given
    address: int
    bare: bool = False  # an address, which brings no evidence
    grad: bool = False  # a tensor that requires grad


class Scratch(NamedTuple):
    """A workspace as it describes itself; `bare` for an address."""

    given: Given
    itemsize: int
    address: int
    bare: bool = False


def live_of(want: Declared, override: Layout | None) -> Declared:
    return want if override is None else want._replace(dims=override[0], strides=override[1])


def operand_rule(want: Declared, override: Layout | None, have: Buffer) -> str:
    live = live_of(want, override)
    if have.bare:
        return "null_address" if not have.address and span(live.dims, live.strides) else ""
    rule = verdict(want, have.given) if override is None else _overridden(live, have.given)
    # Autograd is asked for before the right to write.
    if have.grad and want.output and rule in ("", "read_only", "null_address"):
        return "requires_grad"
    return rule


def _overridden(live: Declared, have: Given, plan: tuple[int, int] = (1, 0)) -> str:
    """Type and device as ever; the span inside a dense buffer, or a strided buffer as it describes itself."""
    if not _same_type(live, have.dtype):
        return "dtype"
    if have.device != plan and not (have.device[0] in HOSTS and plan[0] in HOSTS):
        return "device"
    if 0 not in have.dims and any(s < 0 for n, s in zip(have.dims, have.strides, strict=True) if n > 1):
        return "negative_stride"
    given, wanted = _squeezed(have.dims, have.strides), _squeezed(live.dims, live.strides)
    need = span(live.dims, live.strides)
    broken = ""
    if span(have.dims, have.strides) < need:
        broken = "bytes"
    elif need and not (_dense(given) or _axis_by_axis(wanted, given) or _in_storage_order(wanted, given)):
        broken = "layout"
    if broken:
        return "self_overlap" if live.output and not writes_once(have.dims, have.strides) else broken
    if live.output and have.read_only:
        return "read_only"
    return "null_address" if have.null and need else ""


def places(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The storage units of a layout, counted from its first."""
    dims, strides = layout
    total = np.zeros((1,) * len(dims), np.int64)
    for axis, (extent, stride) in enumerate(zip(dims, strides, strict=True)):
        along = [1] * len(dims)
        along[axis] = extent
        total = total + (np.arange(extent) * stride).reshape(along)
    return total.ravel()


def overlap_rule(x: Buffer, y: Buffer, xl: Layout, yl: Layout, itemsize: int, inplace: bool) -> str:
    """X is read and Y is written."""
    spans = [span(*layout) * itemsize for layout in (xl, yl)]
    if not all(spans) or x.address + spans[0] <= y.address or y.address + spans[1] <= x.address:
        return ""
    same = xl[0] == yl[0] and all(n == 1 or a == b for n, a, b in zip(xl[0], xl[1], yl[1], strict=True))
    if same and x.address == y.address:
        return "" if inplace else "inplace"
    shift, rest = divmod(x.address - y.address, itemsize)
    first, second = places(xl) + shift, places(yl)
    # Elements that begin between two others touch both.
    touched = np.union1d(first, first + 1) if rest else first
    return "overlap" if np.intersect1d(touched, second).size else ""


def workspace_rule(need: int, scratch: Scratch | None, taken: Sequence[tuple[int, int]]) -> str:
    """`taken` are address and bytes of each operand."""
    if scratch is None:
        return "workspace_missing" if need else ""
    size = need
    if not scratch.bare:
        given = scratch.given
        if any(s < 0 for n, s in zip(given.dims, given.strides, strict=True) if n > 1):
            return "workspace_strided"
        if not _dense(_squeezed(given.dims, given.strides)):
            return "workspace_strided"
        if given.read_only:
            return "read_only"
        size = span(given.dims, given.strides) * scratch.itemsize
        if size < need:
            return "workspace_small"
    if not scratch.address and need:
        return "workspace_missing"
    for address, count in taken:
        if count and size and address < scratch.address + size and scratch.address < address + count:
            return "workspace_overlap"
    return ""
