"""The operand contract in plain Python: may this buffer serve that declaration?

Written from the text of the design, not from the native check, and as plainly as the text allows: where the
native code walks axes once, this tries every way of merging them. `verdict` gives the broken rule or "".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

Axis = tuple[int, int]  # extent, stride

CPU = (1, 0)
FLOAT32 = (2, 32, 1)
UINT8 = (1, 8, 1)
HOSTS = (1, 3, 11)  # DLPack device types of host memory


class Declared(NamedTuple):
    """A tensor as the graph declares it. Dims and strides count storage units."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tuple[int, int, int] = FLOAT32
    output: bool = False
    packed: bool = False  # a sub-byte type, two elements in each storage unit
    reordered: bool = False  # block-scale factors; dims are those of whole tiles
    ragged: bool = False
    rows: int | None = None  # max_total_seq_len of a ragged tensor


class Given(NamedTuple):
    """A buffer as it describes itself."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tuple[int, int, int] = FLOAT32
    device: tuple[int, int] = CPU
    read_only: bool = False
    null: bool = False


def span(dims: Sequence[int], strides: Sequence[int]) -> int:
    """Storage units from the first to past the last; 0 when there is none."""
    if 0 in dims:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True))


def verdict(want: Declared, have: Given, plan: tuple[int, int] = CPU) -> str:
    """The first broken rule: type and device, then bytes, then layout, then whether it may be written."""
    if not _same_type(want, have.dtype):
        return "subbyte" if want.packed and have.dtype[0] == want.dtype[0] else "dtype"
    if have.device != plan and not (have.device[0] in HOSTS and plan[0] in HOSTS):
        return "device"
    if 0 not in have.dims and any(s < 0 for n, s in zip(have.dims, have.strides, strict=True) if n > 1):
        return "negative_stride"
    broken = _layout(want, have)
    if broken:
        # An output buffer in which several elements share an address is named as that.
        return "self_overlap" if want.output and not writes_once(have.dims, have.strides) else broken
    if want.output and have.read_only:
        return "read_only"
    needed = span(have.dims, have.strides) if want.ragged else span(want.dims, want.strides)
    return "null_address" if have.null and needed else ""


def writes_once(dims: Sequence[int], strides: Sequence[int]) -> bool:
    """Outputs: sorted by stride, each stride at least the span of the axes below it."""
    if 0 in dims:
        return True
    below = 1
    for extent, stride in sorted(_squeezed(dims, strides), key=lambda axis: axis[1]):
        if stride < below:
            return False
        below += (extent - 1) * stride
    return True


# ---- layout


def _same_type(want: Declared, given: tuple[int, int, int]) -> bool:
    return given == want.dtype or (want.packed and given == UINT8)


def _layout(want: Declared, have: Given) -> str:
    given = _squeezed(have.dims, have.strides)
    held = span(have.dims, have.strides)
    if want.ragged:
        return _ragged(want, given, held)
    if want.reordered:
        tiles = 1
        for extent in want.dims:
            tiles *= extent
        return "layout" if not _dense(given) else "bytes" if held < tiles else ""
    declared = _squeezed(want.dims, want.strides)
    if 0 in want.dims:
        return "" if len(given) <= 1 or _same_empty(declared, given) else "layout"
    if held < span(want.dims, want.strides):
        return "bytes"
    fits = _axis_by_axis(declared, given) or _in_storage_order(declared, given) or _line(given)
    return "" if fits else "layout"


def _squeezed(dims: Sequence[int], strides: Sequence[int]) -> list[Axis]:
    """Extent-1 axes say nothing about memory."""
    return [(n, s) for n, s in zip(dims, strides, strict=True) if n != 1]


def _stored(axes: list[Axis]) -> list[Axis]:
    """By falling stride; `sorted` is stable."""
    return sorted(axes, key=lambda axis: -axis[1])


def _line(given: list[Axis]) -> bool:
    """(c) One-dimensional and dense."""
    return not given or (len(given) == 1 and given[0][1] == 1)


def _dense(given: list[Axis]) -> bool:
    if any(extent == 0 for extent, _ in given):
        return True
    step = 1
    for extent, stride in reversed(_stored(given)):
        if stride != step:
            return False
        step *= extent
    return True


def _axis_by_axis(want: list[Axis], have: list[Axis]) -> bool:
    """(a) Extents and strides agree; the axis of largest stride, the first of them, may be longer."""
    if [s for _, s in want] != [s for _, s in have]:
        return False
    longest = max(range(len(want)), key=lambda i: want[i][1], default=0)
    return all(
        have_n == n or (i == longest and have_n > n)
        for i, ((n, _), (have_n, _)) in enumerate(zip(want, have, strict=True))
    )


def _c_ordered(have: list[Axis]) -> bool:
    return all(s > 0 for _, s in have) and all(a[1] >= b[1] for a, b in pairwise(have))


def _merges(axes: list[Axis]) -> Iterator[tuple[list[Axis], int]]:
    """Every merge of neighbours that are dense together, with the elements inside the first group's first
    axis."""
    if not axes:
        yield [], 1
        return
    for first in range(1, len(axes) + 1):
        group = axes[:first]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(group)):
            break
        inside = 1
        for extent, _ in group[1:]:
            inside *= extent
        for rest, _ in _merges(axes[first:]):
            yield [(group[0][0] * inside, group[-1][1]), *rest], inside


def _in_storage_order(want: list[Axis], have: list[Axis]) -> bool:
    """(b) C-ordered, and the declared axes in storage order, or a pure merge or a pure split of them."""
    if not _c_ordered(have):
        return False
    stored = _stored(want)
    if any(_same_but_longer(merged, have) for merged, _ in _merges(stored)):
        return True
    for merged, inside in _merges(have):
        # The buffer's outermost axis may be longer than the declaration fills: whole entries of it are left.
        if stored and stored[0][0] % inside == 0 and _same_but_longer(stored, merged):
            return True
    return False


def _same_but_longer(want: list[Axis], have: list[Axis]) -> bool:
    if len(want) != len(have) or want[1:] != have[1:]:
        return False
    return not want or (want[0][1] == have[0][1] and want[0][0] <= have[0][0])


def _same_empty(want: list[Axis], have: list[Axis]) -> bool:
    """No element exists, so strides say nothing: extents agree, merge or split, in declared or storage order."""
    given = [n for n, _ in have]
    for order in ([n for n, _ in want], [n for n, _ in _stored(want)]):
        if any(_same_extents(m, given) for m in _products(order)):
            return True
        if any(_same_extents(order, m) for m in _products(given)):
            return True
    return False


def _same_extents(want: list[int], have: list[int]) -> bool:
    """A declared extent of 0 may be anything in the buffer: none of it is read."""
    return len(want) == len(have) and all(w in (0, h) for w, h in zip(want, have, strict=True))


def _products(extents: list[int]) -> Iterator[list[int]]:
    if not extents:
        yield []
        return
    product = 1
    for first, extent in enumerate(extents, 1):
        product *= extent
        for rest in _products(extents[first:]):
            yield [product, *rest]


# ---- ragged


def row_axes(dims: Sequence[int], strides: Sequence[int]) -> tuple[int, list[Axis]]:
    """Step from row to row, and the axes inside a row in storage order.

    Rows are the widest axis but the batch; the last but one axis counts also where its extent is 1, since a
    sequence of one row still has a step.
    """
    axes = [i for i in range(1, len(dims)) if dims[i] != 1 or i == len(dims) - 2]
    if not axes:
        return 1, []
    row = max(axes, key=lambda i: strides[i])
    return strides[row], _stored([(dims[i], strides[i]) for i in axes if i != row and dims[i] != 1])


def _ragged(want: Declared, have: list[Axis], held: int) -> str:
    step, inner = row_axes(want.dims, want.strides)
    fits = _line(have) or _axis_by_axis(_squeezed(want.dims, want.strides), have) or _rows(step, inner, have, held)
    if not fits:
        return "layout"
    width = span([n for n, _ in inner], [s for _, s in inner])
    needed = (want.rows - 1) * step + width if want.rows else 0
    return "bytes" if held < needed else ""


def _rows(step: int, inner: list[Axis], have: list[Axis], held: int) -> bool:
    """One row as declared, or any number of them as (b) reads them."""
    if any(extent == 0 for extent, _ in have):
        return _same_empty([(0, step), *inner], have)
    if not _c_ordered(have):
        return False
    if have in [merged for merged, _ in _merges(inner)] or inner in [merged for merged, _ in _merges(have)]:
        return True
    return step > 0 and any(_in_storage_order([(rows, step), *inner], have) for rows in range(2, held // step + 2))
