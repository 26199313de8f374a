"""Hand-made producers at the level of C: DLPack structs and exchange tables filled field by field.

A callback of ctypes cannot leave an exception behind, so tables here never fail; frameworks' own tables do that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

PAIR = ctypes.c_int32 * 2


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", PAIR),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


Allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
Import = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
Borrow = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
Stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Api(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("prev_api", ctypes.c_void_p),
        ("allocate", Allocate),
        ("export", Export),
        ("import_", Import),
        ("borrow", Borrow),
        ("stream", Stream),
    )


TABLE_NAME = b"dlpack_exchange_api"
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

_forever: list[Any] = []  # tables and capsule names have to outlive the process' last look at them


def capsule(address: int, name: bytes) -> Any:
    _forever.append(name)
    return _new(address, name, None)


_handed_out: dict[int, Any] = {}  # address -> the Managed whose deleter has not been called


@Deleter
def _release(address: int | None) -> None:
    _handed_out.pop(address or 0).released += 1


class Managed:
    """A managed struct over an array, alive until its deleter is called, which counts in `released`."""

    def __init__(self, array: Any, *, legacy: bool = False, **fields: Any) -> None:
        self.released = 0
        struct = Legacy() if legacy else Versioned(major=1, minor=0)
        struct.deleter = _release
        for name in ("major", "minor", "flags"):
            if name in fields:
                setattr(struct, name, fields.pop(name))
        self.extents = fill(struct.tensor, array, **fields)
        self.array = array
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.name = b"dltensor" if legacy else b"dltensor_versioned"
        _handed_out[self.address] = self

    def capsule(self) -> Any:
        return capsule(self.address, self.name)


KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


def fill(tensor: DLTensor, array: np.ndarray[Any, Any], **fields: Any) -> tuple[Any, Any]:
    """Fills a DLTensor from an array, then with `fields`; the extents returned have to live as long as it.

    The caller's struct holds anything before: every field is set.
    """
    dims = fields.pop("dims", array.shape)
    strides = fields.pop("strides", tuple(s // array.itemsize for s in array.strides))
    shape = (ctypes.c_int64 * max(1, len(dims)))(*dims)
    steps = None if strides is None else (ctypes.c_int64 * max(1, len(strides)))(*strides)
    tensor.data = array.ctypes.data
    tensor.device = PAIR(*fields.pop("device", (1, 0)))
    tensor.ndim = len(dims)
    kind = KINDS.get(array.dtype.kind, 2)
    tensor.code, tensor.bits, tensor.lanes = fields.pop("dtype", (kind, array.itemsize * 8, 1))
    tensor.byte_offset = 0
    tensor.shape = ctypes.addressof(shape)
    tensor.strides = None if steps is None else ctypes.addressof(steps)
    for name, value in fields.items():
        setattr(tensor, name, value)
    return shape, steps


class Base:
    """What table producers are: an array, with fields that overwrite what the array says."""

    def __init__(self, array: np.ndarray[Any, Any], **fields: Any) -> None:
        self.array = array
        self.fields = fields
        self.exports: list[Managed] = []
        self.borrowed = 0
        self.extents: Any = None  # of the last borrow; a borrowed struct points into them


@Export
def _export(obj: Base, out: Any) -> int:
    managed = Managed(obj.array, **obj.fields)
    obj.exports.append(managed)
    out[0] = managed.address
    return 0


@Borrow
def _borrow(obj: Base, out: Any) -> int:
    obj.extents = fill(out[0], obj.array, **obj.fields)
    obj.borrowed += 1
    return 0


@Stream
def _stream(device_type: int, device_id: int, out: Any) -> int:
    out[0] = 0
    return 0


def table(*, borrow: bool = True, export: bool = True, version: tuple[int, int] = (1, 3), prev: int = 0) -> int:
    """The address of a new exchange table, which lives forever."""
    api = Api(major=version[0], minor=version[1], prev_api=prev or None)
    if export:
        api.export = _export
    if borrow:
        api.borrow = _borrow
    api.stream = _stream
    _forever.append(api)
    return ctypes.addressof(api)


def producer_type(address: int, *, form: str = "capsule", spelling: str = "__dlpack_c_exchange_api__") -> type[Any]:
    """A new type that offers the table at `address`, as a capsule or as an integer."""
    value = capsule(address, TABLE_NAME) if form == "capsule" else address
    return type("Tabled", (Base,), {spelling: value})


def table_of(cls: type[Any]) -> Api:
    """The exchange table of a type."""
    address = _pointer(cls.__dict__["__dlpack_c_exchange_api__"], TABLE_NAME)
    return Api.from_address(address)


def borrow(obj: Any) -> dict[str, Any]:
    """What the exchange table of an object's type says of it, through the borrowing call."""
    tensor = DLTensor()
    assert table_of(type(obj)).borrow(obj, ctypes.byref(tensor)) == 0
    return described(tensor)


def described(tensor: DLTensor) -> dict[str, Any]:
    n = tensor.ndim
    extents = [tuple((ctypes.c_int64 * n).from_address(p)) if n else () for p in (tensor.shape, tensor.strides)]
    return {
        "address": tensor.data or 0,
        "dims": extents[0],
        "strides": extents[1],
        "dtype": (tensor.code, tensor.bits, tensor.lanes),
        "device": tuple(tensor.device),
        "byte_offset": tensor.byte_offset,
    }


class Dlpack:
    """A producer with `__dlpack__` alone. `make(kwargs)` gives the capsule; the keywords asked with are in `asked`."""

    def __init__(self, make: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.make = make
        self.device = device
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        return self.make(kwargs)


def forwarding(array: Any, *, legacy: bool = False) -> Dlpack:
    """An array seen through `__dlpack__` alone, in either generation."""
    return Dlpack(lambda kwargs: array.__dlpack__() if legacy else array.__dlpack__(**kwargs))
