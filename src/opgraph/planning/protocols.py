"""Buffer protocols that are read in Python: the array interfaces, and objects that offer only an address.

The native core serves exchange tables, NumPy and `__dlpack__` itself and comes here for the rest.
"""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from opgraph.engines.device import CPU, CUDA
from opgraph.ir.datatypes import as_data_type, dlpack_dtype
from opgraph.ir.errors import cudnnGraphNotSupportedError

__all__ = ["Description", "device_of", "read"]

# address, dims, strides in elements or None, (code, bits, lanes), (device type, id), read-only, what keeps it
# alive
Description = tuple[
    int, tuple[int, ...], tuple[int, ...] | None, tuple[int, int, int], tuple[int, int], bool, object
]

_KIND_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


def read(obj: Any, plan_device: tuple[int, int]) -> Description:
    """Describes a buffer by the first protocol it has; TypeError when it has none or a broken one."""
    cls = type(obj)
    if hasattr(cls, "__cuda_array_interface__") or "__cuda_array_interface__" in getattr(obj, "__dict__", ()):
        return _array_interface(obj, obj.__cuda_array_interface__, _cuda_device(obj, plan_device))
    interface = getattr(obj, "__array_interface__", None)
    if interface is not None:
        return _array_interface(obj, interface, (CPU, 0))
    if callable(getattr(obj, "data_ptr", None)) and hasattr(obj, "shape"):
        return _address_object(obj, plan_device)
    pointer: Any = getattr(getattr(obj, "data", None), "ptr", None)
    if isinstance(pointer, int) and hasattr(obj, "shape"):
        return _pointer_object(obj, pointer, plan_device)
    raise TypeError(f"{cls.__name__} has none of the buffer protocols")


def _array_interface(obj: Any, interface: Any, device: tuple[int, int]) -> Description:
    if not isinstance(interface, dict):
        raise TypeError(f"the array interface of {type(obj).__name__} is not a dict")
    try:
        shape = tuple(index(n) for n in interface["shape"])
        typestr = interface["typestr"]
    except KeyError as error:
        raise TypeError(f"the array interface of {type(obj).__name__} lacks {error.args[0]!r}") from None
    if interface.get("mask") is not None:
        raise TypeError("the array interface carries a mask, which is not supported")
    dtype, itemsize = _interface_dtype(typestr)
    strides = interface.get("strides")
    if strides is not None:
        strides = _element_strides(shape, strides, itemsize)
    data = interface.get("data")
    if not isinstance(data, tuple) or len(data) != 2:
        # A missing entry or a buffer object stands for the object's own buffer protocol: not read here.
        raise TypeError("the array interface gives no address: its data is not (address, read_only)")
    # An `offset` belongs to a buffer object, so it says nothing here (NumPy does not apply it either).
    return index(data[0] or 0), shape, strides, dtype, device, bool(data[1]), obj


def _interface_dtype(typestr: str) -> tuple[tuple[int, int, int], int]:
    try:
        dtype = np.dtype(typestr)
    except TypeError:
        raise TypeError(f"the array interface gives no known type: {typestr!r}") from None
    if not dtype.isnative:
        raise TypeError(f"the array interface gives {typestr!r}: not in this machine's byte order")
    if dtype.kind not in _KIND_CODES:
        raise TypeError(
            f"the array interface gives {typestr!r}, which says no element type; offer __dlpack__ instead"
        )
    return (_KIND_CODES[dtype.kind], dtype.itemsize * 8, 1), dtype.itemsize


def _element_strides(shape: tuple[int, ...], strides: Any, itemsize: int) -> tuple[int, ...]:
    if len(strides) != len(shape):
        raise TypeError(f"the array interface gives {len(strides)} strides for {len(shape)} axes")
    elements = []
    for extent, stride in zip(shape, strides, strict=True):
        whole, rest = divmod(index(stride), itemsize)
        if rest and extent > 1:
            raise TypeError(f"a stride of {stride} bytes is no multiple of the element's {itemsize} bytes")
        elements.append(whole)
    return tuple(elements)


def _address_object(obj: Any, plan_device: tuple[int, int]) -> Description:
    """`.data_ptr()`, `.shape`, `.stride()` in elements, `.dtype`, `.device`: what torch-like objects
    offer."""
    shape = tuple(index(n) for n in obj.shape)
    strides = getattr(obj, "stride", None)
    elements = tuple(index(n) for n in strides()) if callable(strides) else None
    return (
        index(obj.data_ptr()),
        shape,
        elements,
        _dtype_of(obj),
        _device_attribute(obj, plan_device),
        False,
        obj,
    )


def _pointer_object(obj: Any, address: int, plan_device: tuple[int, int]) -> Description:
    """`.data.ptr`, `.shape`, `.strides` in bytes, `.dtype`: what CuPy-like objects offer."""
    shape = tuple(index(n) for n in obj.shape)
    dtype = _dtype_of(obj)
    strides = getattr(obj, "strides", None)
    if strides is not None:
        strides = _element_strides(shape, strides, max(1, dtype[1] * dtype[2] // 8))
    return address, shape, strides, dtype, _cuda_device(obj, plan_device), False, obj


def _dtype_of(obj: Any) -> tuple[int, int, int]:
    try:
        dtype = as_data_type(getattr(obj, "dtype", None))
    except cudnnGraphNotSupportedError as error:
        raise TypeError(str(error)) from None
    if dtype is None:
        raise TypeError(f"{type(obj).__name__} does not tell its data type")
    return dlpack_dtype(dtype)


def _device_attribute(obj: Any, plan_device: tuple[int, int]) -> tuple[int, int]:
    if callable(getattr(obj, "__dlpack_device__", None)):
        kind, ordinal = obj.__dlpack_device__()
        return int(kind), int(ordinal)
    device = getattr(obj, "device", None)
    name: Any
    number: Any
    if isinstance(device, str):  # "cpu", "cuda:1"
        name, _, number = device.partition(":")
    else:
        name, number = getattr(device, "type", None), getattr(device, "index", None)
    if name == "cpu":
        return CPU, 0
    if name in ("cuda", "gpu"):
        return CUDA, int(number or 0)
    if name:
        raise TypeError(f"{type(obj).__name__} is on a device that is not known here: {str(device)!r}")
    return plan_device  # it tells nothing, as a bare address does


def _cuda_device(obj: Any, plan_device: tuple[int, int]) -> tuple[int, int]:
    """The interface has no device id; the object's own answer counts, else the plan's CUDA device."""
    if callable(getattr(obj, "__dlpack_device__", None)):
        kind, ordinal = obj.__dlpack_device__()
        return int(kind), int(ordinal)
    ordinal = getattr(getattr(obj, "device", None), "id", None)
    if isinstance(ordinal, int):
        return CUDA, ordinal
    return plan_device if plan_device[0] == CUDA else (CUDA, 0)


def device_of(obj: Any) -> tuple[int, int] | None:
    """The device an object's memory is on, without reading it; None when it does not tell (an address, a
    number)."""
    if isinstance(obj, np.ndarray):
        return CPU, 0
    if callable(getattr(type(obj), "__dlpack_device__", None)):
        kind, ordinal = obj.__dlpack_device__()
        return int(kind), int(ordinal)
    if hasattr(obj, "__cuda_array_interface__"):
        return _cuda_device(obj, (CUDA, 0))
    if hasattr(obj, "__array_interface__"):
        return CPU, 0
    device = getattr(obj, "device", None)
    if callable(getattr(obj, "data_ptr", None)) and device is not None:
        return _device_attribute(obj, (CPU, 0))
    return None
