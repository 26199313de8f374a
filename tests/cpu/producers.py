"""Hand-made buffer producers: DLPack structs filled field by field, array interfaces, and objects that
misbehave.

Everything here shows memory of a NumPy array that the producer keeps; only what a case wants wrong is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

CPU = (1, 0)
CUDA = (2, 0)

FLOAT32 = (2, 32, 1)
INT32 = (0, 32, 1)
INT64 = (0, 64, 1)


class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", Deleter))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


READ_ONLY = 1

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# A capsule keeps the address of its name: these have to outlive every capsule.
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"

# Address of each struct handed out -> what it needs to live, and the counter of its producer. No reference
# back to the producer, so a producer dies as soon as its user lets go.
_handed_out: dict[int, tuple[Any, ...]] = {}


@Deleter
def _release(address: int) -> None:
    entry = _handed_out.pop(address)
    entry[0].released += 1


class Count:
    """How many structs a producer handed out, and how many came back."""

    def __init__(self) -> None:
        self.exported = 0
        self.released = 0


class Producer:
    """Shows `array` through `__dlpack__`; keyword arguments overwrite fields of the struct.

    generation: "legacy", "versioned", or None to follow `max_version`. strides: None leaves the pointer null.
    hook: called inside `__dlpack__`, before the capsule is made.
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        *,
        generation: str | None = None,
        version: tuple[int, int] = (1, 0),
        flags: int = 0,
        address: int | None = None,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | str | None = "array",
        byte_offset: int = 0,
        dtype: tuple[int, int, int] = FLOAT32,
        device: tuple[int, int] = CPU,
        told: tuple[int, int] | None = None,
        ndim: int | None = None,
        hook: Callable[[], None] | None = None,
    ) -> None:
        self.array = array
        self.generation = generation
        self.version = version
        self.flags = flags
        self.address = array.ctypes.data if address is None else address
        self.shape = array.shape if shape is None else shape
        self.strides = tuple(s // array.itemsize for s in array.strides) if strides == "array" else strides
        self.byte_offset = byte_offset
        self.dtype = dtype
        self.device = device
        self.told = device if told is None else told
        self.ndim = len(self.shape) if ndim is None else ndim
        self.hook = hook
        self.count = Count()
        self.calls: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.told

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        if self.hook is not None:
            self.hook()
        asked = kwargs.get("max_version")
        generation = self.generation or ("versioned" if asked and asked[0] >= 1 else "legacy")
        managed: Any = DLManagedTensorVersioned() if generation == "versioned" else DLManagedTensor()
        shape = (ctypes.c_int64 * max(1, len(self.shape)))(*self.shape)
        strides = (
            None if self.strides is None else (ctypes.c_int64 * max(1, len(self.strides)))(*self.strides)
        )
        tensor = managed.dl_tensor
        tensor.data = self.address
        tensor.device = DLDevice(*self.device)
        tensor.ndim = self.ndim
        tensor.dtype = DLDataType(*self.dtype)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) if self.shape else None
        tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)) if strides is not None else None
        tensor.byte_offset = self.byte_offset
        managed.deleter = _release
        if generation == "versioned":
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        self.count.exported += 1
        address = ctypes.addressof(managed)
        _handed_out[address] = (self.count, managed, shape, strides, self.array)
        return _new_capsule(address, _VERSIONED if generation == "versioned" else _LEGACY, None)


class Interface:
    """An object with `__array_interface__` and nothing else; keyword arguments are its entries."""

    def __init__(self, keep: Any = None, **entries: Any) -> None:
        self.keep = keep
        self.__array_interface__ = {"version": 3, **entries}


def interface_of(array: np.ndarray[Any, Any]) -> Interface:
    """An array seen through the array interface."""
    return Interface(array, **{k: v for k, v in array.__array_interface__.items() if k != "version"})


class DataPointer:
    """`.data_ptr()`, `.shape`, `.stride()`, `.dtype`: what torch-like objects offer, without DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


class Dlpack:
    """Forwards `__dlpack__` to an array: the plain protocol, without an exchange table or NumPy's C API."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class Raising:
    """Raises from one method of the protocol, answers the other."""

    def __init__(self, method: str, error: BaseException, array: np.ndarray[Any, Any] | None = None) -> None:
        self.method = method
        self.error = error
        self.array = np.zeros(3, np.float32) if array is None else array

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.method == "__dlpack_device__":
            raise self.error
        return CPU

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.method == "__dlpack__":
            raise self.error
        return self.array.__dlpack__(**kwargs)
