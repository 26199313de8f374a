"""Random declarations, buffers that nearly fit them, and the protocols by which a buffer reaches the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from random import Random
from typing import Any

import _null_tests  # noqa: F401
import numpy as np
from contract_model import Declared, Given, span, writes_once
from exchange import forwarding, producer_type, table
from numpy.lib.stride_tricks import as_strided

import opgraph as og

D = og.data_type
Axes = list[tuple[int, int]]

# data type -> storage, and what it says of itself
STORAGE: dict[Any, tuple[Any, tuple[int, int, int]]] = {
    D.FLOAT: (np.float32, (2, 32, 1)),
    D.HALF: (np.float16, (2, 16, 1)),
    D.DOUBLE: (np.float64, (2, 64, 1)),
    D.INT8: (np.int8, (0, 8, 1)),
    D.UINT8: (np.uint8, (1, 8, 1)),
    D.INT32: (np.int32, (0, 32, 1)),
    D.INT64: (np.int64, (0, 64, 1)),
    D.BOOLEAN: (np.bool_, (6, 8, 1)),
    D.INT4: (np.uint8, (0, 4, 2)),  # pairs, shown as bytes
}
NUMPY_TYPES = [(np.dtype(t), says) for key, (t, says) in STORAGE.items() if key is not D.INT4]
MOST_UNITS = 1500  # a declaration spans at most these, so that it fits an arena in every type


def dense(dims: Any) -> tuple[int, ...]:
    return tuple(math.prod(dims[i + 1 :]) for i in range(len(dims)))


# ---- declarations


def declaration(rng: Random, output: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rank 1..6; permuted, padded and (inputs) broadcast strides; now and then an empty axis."""
    while True:
        rank = rng.randint(1, 6)
        widest = (12, 6, 4, 3, 3, 2)[rank - 1]
        dims = [rng.randint(rng.choice((1, 2, 2)), widest) for _ in range(rank)]
        if rng.random() < 0.05:
            dims[rng.randrange(rank)] = 0
        strides = strides_for(rng, dims, output)
        if span(dims, strides) <= MOST_UNITS and (not output or writes_once(dims, strides)):
            return tuple(dims), tuple(strides)


def strides_for(rng: Random, dims: Any, output: bool) -> tuple[int, ...]:
    strides = [0] * len(dims)
    order = list(range(len(dims)))[::-1]
    if rng.random() < 0.5:
        rng.shuffle(order)
    step = 1
    for axis in order:
        if not output and rng.random() < 0.08:
            continue  # broadcast along this axis
        step += rng.choice((0, 0, 0, 0, 0, 1, 2, 5))
        strides[axis] = step
        step *= max(dims[axis], 1)
    return tuple(strides)


# ---- buffers


def axes_for(rng: Random, want: Declared) -> Axes:
    """The declaration's own axes, the same memory described otherwise, or something else; altered up to three times."""
    axes = list(zip(want.dims, want.strides, strict=True))
    kind = rng.choice(("declared", "declared", "stored", "stored", "dense", "flat", "any"))
    if kind == "stored":
        axes = sorted((a for a in axes if a[0] != 1), key=lambda a: -a[1])
    elif kind == "dense":
        dims = [n for n, _ in (axes if rng.random() < 0.5 else sorted(axes, key=lambda a: -a[1]))]
        axes = list(zip(dims, dense(dims), strict=True))
    elif kind == "flat":
        axes = [(span(want.dims, want.strides), 1)]
    elif kind == "any":
        axes = [(rng.randint(0, 5), rng.randint(0, 12)) for _ in range(rng.randint(0, 4))]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 2, 3))):
        axes = altered(rng, axes)
    return axes


CHANGES = ("merge", "merge", "split", "split", "one", "extent", "wide", "swap", "permute", "stride", "sign")


def altered(rng: Random, axes: Axes) -> Axes:
    what = rng.choice(CHANGES)
    at = rng.randrange(max(1, len(axes)))
    if what == "one" or not axes:
        return [*axes[:at], (1, rng.randint(0, 99)), *axes[at:]] if len(axes) < 10 else axes
    extent, stride = axes[at]
    if what == "merge" and len(axes) > 1:
        fitting = [i for i, (a, b) in enumerate(pairwise(axes)) if a[1] == b[0] * b[1]]
        at = rng.choice(fitting) if fitting and rng.random() < 0.8 else rng.randrange(len(axes) - 1)
        return [*axes[:at], (axes[at][0] * axes[at + 1][0], axes[at + 1][1]), *axes[at + 2 :]]
    if what == "split" and (factors := [f for f in range(2, extent) if extent % f == 0]):
        inner = rng.choice(factors)
        return [*axes[:at], (extent // inner, stride * inner), (inner, stride), *axes[at + 1 :]]
    if what == "wide":  # longer along the widest axis
        at = max(range(len(axes)), key=lambda i: axes[i][1])
        return [*axes[:at], (axes[at][0] + rng.randint(1, 3), axes[at][1]), *axes[at + 1 :]]
    if what == "extent":
        return [*axes[:at], (max(0, extent + rng.choice((-2, -1, 1, 2))), stride), *axes[at + 1 :]]
    if what == "stride":
        return [*axes[:at], (extent, rng.choice((0, stride + 1, 2 * stride, 1))), *axes[at + 1 :]]
    if what == "sign" and rng.random() < 0.5:
        return [*axes[:at], (extent, -stride), *axes[at + 1 :]]
    if what == "swap" and at + 1 < len(axes):
        return [*axes[:at], axes[at + 1], axes[at], *axes[at + 2 :]]
    if what == "permute":
        return rng.sample(axes, len(axes))
    return axes


def reach(dims: Any, strides: Any) -> tuple[int, int]:
    """The units before and after the first element that a description takes in."""
    if 0 in dims:
        return 0, 0
    ends = [(n - 1) * s for n, s in zip(dims, strides, strict=True)]
    return sum(e for e in ends if e < 0), 1 + sum(e for e in ends if e > 0)


# ---- protocols


class Interface:
    """A buffer that has an array interface and nothing else."""

    def __init__(self, view: Any) -> None:
        self.view = view

    @property
    def __array_interface__(self) -> Any:
        return self.view.__array_interface__


class Pointer:
    """`data_ptr()`, `shape`, `stride()` and `dtype`, as objects that resemble tensors have."""

    def __init__(self, view: Any) -> None:
        self.shape, self.dtype = view.shape, view.dtype
        self._address = view.ctypes.data
        self._strides = tuple(s // view.itemsize for s in view.strides)

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides


class Subclass(np.ndarray):
    pass


Tabled = producer_type(table())
OwningTabled = producer_type(table(borrow=False))


def owning(view: Any) -> Any:
    return OwningTabled(view, flags=0 if view.flags.writeable else 1)


def torch_view(view: Any) -> Any:
    import torch

    backwards, end = reach(view.shape, strides := [s // view.itemsize for s in view.strides])
    # A tensor that has no element still needs a storage to lie in.
    flat = as_strided(view, (max(end, 1) if view.size else 0,), (view.itemsize,))
    assert not backwards
    return torch.as_strided(torch.from_numpy(flat), view.shape, strides)


# name -> how a NumPy view is given, and whether that can say "read-only"
PROTOCOLS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "numpy": (lambda view: view, True),
    "dlpack": (forwarding, True),
    "legacy dlpack": (lambda view: forwarding(view, legacy=True), False),
    "exchange table": (Tabled, False),
    "owning table": (owning, True),
    "array interface": (Interface, True),
    "data_ptr": (Pointer, False),
    "ndarray subclass": (lambda view: view.view(Subclass), True),
}
WEIGHTS = {"numpy": 4, "exchange table": 3}
if find_spec("torch"):
    PROTOCOLS["torch"] = (torch_view, False)
    WEIGHTS["torch"] = 3
HAS_JAX = find_spec("jax") is not None


def _choices() -> list[str]:
    return [name for name in PROTOCOLS for _ in range(WEIGHTS.get(name, 1))]


CHOICES = _choices()


def without_frameworks() -> None:
    global HAS_JAX, CHOICES
    HAS_JAX = False
    PROTOCOLS.pop("torch", None)
    CHOICES = _choices()


def jax_array(rng: Random, dims: Any, dtype: Any) -> Any:
    """An array of JAX's own: dense, immutable, in its own memory."""
    import jax

    values = np.array([rng.randrange(2) for _ in range(math.prod(dims))], dtype).reshape(dims)
    return jax.device_put(values)


def tabled_lies(rng: Random, view: Any, given: Given) -> tuple[Any, Given]:
    """A producer that says it lies elsewhere, or at no address at all."""
    if rng.random() < 0.6:
        device = rng.choice(((2, 0), (2, 0), (3, 0), (1, 1), (11, 0), (13, 0), (8, 0)))
        return Tabled(view, device=device), given._replace(device=device, read_only=False)
    return Tabled(view, data=None), given._replace(null=True, read_only=False)
