"""Data types: the table that relates our names, NumPy's, torch's and DLPack's, and exact conversions.

`ml_dtypes` is imported when a type that NumPy lacks is first needed, because importing it is slow. No other
framework is ever imported here: torch data types are recognised by their printed name.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .enums import data_type
from .errors import cudnnGraphNotSupportedError, explain

__all__ = [
    "DType",
    "as_data_type",
    "describe_value",
    "dlpack_dtype",
    "element_bits",
    "from_dlpack_dtype",
    "is_floating",
    "is_integer",
    "numpy_dtype",
    "pack_subbyte",
    "round_to",
    "scalar_bytes",
    "torch_to_cudnn_data_type",
    "truth",
    "unpack_subbyte",
]


class DType:
    """One row of the data type table.

    `kind`: "f" IEEE-like float that overflows to infinity, "q" float that saturates (FP8, FP4), "i" integer,
    "b" boolean, "v" vector of integers, "" compute-only. `bits` counts one element, one whole
    vector for "v".
    """

    __slots__ = ("bits", "data_type", "dlpack", "kind", "name", "numpy", "torch")

    def __init__(
        self,
        data_type: data_type,
        kind: str,
        bits: int,
        dlpack: tuple[int, int, int] | None,
        numpy: str | None,
        torch: str | None,
    ) -> None:
        self.data_type = data_type
        self.name = data_type.name
        self.kind = kind
        self.bits = bits
        self.dlpack = dlpack
        self.numpy = numpy
        self.torch = torch


_TABLE = tuple(
    DType(*row)
    for row in (
        (data_type.FLOAT, "f", 32, (2, 32, 1), "float32", "float32"),
        (data_type.DOUBLE, "f", 64, (2, 64, 1), "float64", "float64"),
        (data_type.HALF, "f", 16, (2, 16, 1), "float16", "float16"),
        (data_type.INT8, "i", 8, (0, 8, 1), "int8", "int8"),
        (data_type.INT32, "i", 32, (0, 32, 1), "int32", "int32"),
        (data_type.INT8x4, "v", 32, (0, 8, 4), None, None),
        (data_type.UINT8, "i", 8, (1, 8, 1), "uint8", "uint8"),
        (data_type.UINT8x4, "v", 32, (1, 8, 4), None, None),
        (data_type.INT8x32, "v", 256, (0, 8, 32), None, None),
        (data_type.BFLOAT16, "f", 16, (4, 16, 1), "bfloat16", "bfloat16"),
        (data_type.INT64, "i", 64, (0, 64, 1), "int64", "int64"),
        (data_type.BOOLEAN, "b", 8, (6, 8, 1), "bool", "bool"),
        (data_type.FP8_E4M3, "q", 8, (10, 8, 1), "float8_e4m3fn", "float8_e4m3fn"),
        (data_type.FP8_E5M2, "q", 8, (12, 8, 1), "float8_e5m2", "float8_e5m2"),
        (data_type.FAST_FLOAT_FOR_FP8, "", 0, None, None, None),
        (data_type.FP8_E8M0, "q", 8, (14, 8, 1), "float8_e8m0fnu", "float8_e8m0fnu"),
        (data_type.FP8_E5M3, "q", 8, None, None, None),
        (data_type.FP4_E2M1, "q", 4, (17, 4, 2), "float4_e2m1fn", "float4_e2m1fn_x2"),
        (data_type.INT4, "i", 4, (0, 4, 1), "int4", None),
    )
)

_ROWS = {row.data_type: row for row in _TABLE}
_BY_NUMPY = {row.numpy: row.data_type for row in _TABLE if row.numpy}
_BY_TORCH = {"torch." + row.torch: row.data_type for row in _TABLE if row.torch}
_BY_DLPACK = {row.dlpack: row.data_type for row in _TABLE if row.dlpack}
_BUILTIN = {
    row.data_type: np.dtype(row.numpy)
    for row in _TABLE
    if row.numpy in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
}
_NUMPY: dict[data_type, np.dtype[Any]] = dict(_BUILTIN)

# Finite range of the types that saturate. E8M0 holds powers of two only and has no zero and no sign.
_SATURATE = {
    data_type.FP8_E4M3: (-448.0, 448.0),
    data_type.FP8_E5M2: (-57344.0, 57344.0),
    data_type.FP8_E8M0: (2.0**-127, 2.0**127),
    data_type.FP4_E2M1: (-6.0, 6.0),
}
_INT_RANGE = {
    data_type.INT8: (-(2**7), 2**7 - 1),
    data_type.INT32: (-(2**31), 2**31 - 1),
    data_type.INT64: (-(2**63), 2**63 - 1),
    data_type.UINT8: (0, 2**8 - 1),
    data_type.INT4: (-8, 7),
}


def as_data_type(value: Any) -> data_type | None:
    """`value` as a `data_type`; None and NOT_SET give None.

    Accepts a `data_type`, a NumPy dtype or scalar type (ml_dtypes included) and a torch dtype. Anything else
    raises `cudnnGraphNotSupportedError` naming it.
    """
    if value.__class__ is data_type:
        return None if value is data_type.NOT_SET else value
    if value is None:
        return None
    found = torch_to_cudnn_data_type(value)
    if found is not None:
        return found
    dtype = _numpy_dtype_of(value)
    if dtype is not None and dtype.isnative:
        found = _BY_NUMPY.get(dtype.name)
        if found is not None:
            return found
    raise cudnnGraphNotSupportedError(
        explain(
            "data_type",
            f"{value!r} has no counterpart here",
            expected="one of "
            + ", ".join(row.name for row in _TABLE)
            + " or a NumPy or torch dtype of that kind",
            next_step="convert the buffer to a listed type first",
        )
    )


def _numpy_dtype_of(value: Any) -> np.dtype[Any] | None:
    if isinstance(value, np.dtype):
        return value
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value)
    dtype = getattr(value, "dtype", None)  # jax.numpy.float32 is neither, but carries one
    return dtype if isinstance(dtype, np.dtype) and callable(value) else None


def torch_to_cudnn_data_type(torch_dtype: Any) -> data_type | None:
    """The `data_type` of a torch dtype, or None when there is none. Does not import torch."""
    if type(torch_dtype).__module__ != "torch":
        return None
    return _BY_TORCH.get(str(torch_dtype))


def from_dlpack_dtype(code: int, bits: int, lanes: int = 1) -> data_type | None:
    """The `data_type` of a DLPack (code, bits, lanes), or None when there is none."""
    return _BY_DLPACK.get((code, bits, lanes))


def _row(dt: data_type) -> DType:
    row = _ROWS.get(dt)
    if row is None:
        raise cudnnGraphNotSupportedError(f"data_type: {dt!r} names no element type")
    return row


def dlpack_dtype(dt: data_type) -> tuple[int, int, int]:
    """DLPack (code, bits, lanes) of a buffer of this type."""
    found = _row(dt).dlpack
    if found is None:
        raise cudnnGraphNotSupportedError(
            f"data_type: {dt.name} has no DLPack type, so no buffer can hold it"
        )
    return found


def element_bits(dt: data_type) -> int:
    """Bits of one element (of one vector for the INT8x4 kind)."""
    bits = _row(dt).bits
    if not bits:
        raise cudnnGraphNotSupportedError(f"data_type: {dt.name} is a compute type; no tensor can hold it")
    return bits


def is_floating(dt: data_type) -> bool:
    """True for every floating point element type, FP8 and FP4 included."""
    return _row(dt).kind in ("f", "q")


def is_integer(dt: data_type) -> bool:
    """True for the plain integer types (BOOLEAN is not one)."""
    return _row(dt).kind == "i"


def numpy_dtype(dt: data_type) -> np.dtype[Any]:
    """The NumPy dtype of one element. INT4 and FP4 are the unpacked ml_dtypes types, one byte per element.

    Raises `ImportError` when the type needs ml_dtypes: it names the version needed and tells whether the
    package is not installed, does not import, or is too old. Raises `cudnnGraphNotSupportedError` for types
    that NumPy cannot hold.
    """
    found = _NUMPY.get(dt)
    if found is not None:
        return found
    name = _row(dt).numpy
    if name is None:
        raise cudnnGraphNotSupportedError(
            f"data_type: {dt.name} has no NumPy type, so the CPU cannot hold it"
        )
    need = f"data_type {dt.name} needs the package ml_dtypes, version 0.5 or newer"
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        if error.name == "ml_dtypes":
            raise ImportError(f"{need}, which is not installed: {error}") from error
        raise ImportError(f"{need}; the installed one is broken: {error}") from error
    except Exception as error:  # what a broken installation raises; a missing shared library is an OSError
        raise ImportError(f"{need}; the installed one is broken: {type(error).__name__}: {error}") from error
    try:
        found = np.dtype(getattr(ml_dtypes, name))
    except AttributeError:
        version = getattr(ml_dtypes, "__version__", "(no version)")
        raise ImportError(f"{need}; the installed {version} is too old: it lacks {name}") from None
    _NUMPY[dt] = found
    return found


def truth(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Element by element: is it non-zero? NaN is. The array itself when it is boolean already."""
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind == "V":  # ml_dtypes: every value is exact in float32
        array = array.astype(np.float32)
    return array != 0


def round_to(array: Any, dt: data_type) -> np.ndarray[Any, Any]:
    """`array` rounded once to `dt`, as an array of `numpy_dtype(dt)`; the array itself if it has that type.

    Floats round to nearest, ties to even. FP8 and FP4 saturate to their largest finite value, infinities too;
    NaN stays NaN where the type has one (FP4 gives its largest value). To integers: nearest, ties to even,
    saturating, NaN gives 0. To BOOLEAN: x != 0.
    """
    array = np.asarray(array)
    target = numpy_dtype(dt)
    source = array.dtype
    if source == target:
        return array
    kind = _ROWS[dt].kind
    if kind == "b":
        return truth(array)
    if source.kind == "V" or (source.kind == "f" and source.itemsize == 1):  # float8_e5m2 alone says "f"
        array = array.astype(np.float32)
        if array.dtype == target:
            return array
    if kind == "i":
        return _round_to_integer(array, dt, target)
    if kind == "q":
        return _saturate(array, dt, target)
    if array.itemsize <= target.itemsize:
        return array.astype(target)
    with np.errstate(over="ignore"):
        return array.astype(target)


def _saturate(array: np.ndarray[Any, Any], dt: data_type, target: np.dtype[Any]) -> np.ndarray[Any, Any]:
    low, high = _SATURATE[dt]
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    clipped = np.clip(array, low, high)
    if dt is data_type.FP4_E2M1:
        np.copyto(clipped, high, where=np.isnan(clipped))
    elif dt is data_type.FP8_E8M0:
        np.copyto(clipped, np.nan, where=array < 0)
    return clipped.astype(target)


def _round_to_integer(
    array: np.ndarray[Any, Any], dt: data_type, target: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    low, high = _INT_RANGE[dt]
    kind = array.dtype.kind
    if kind == "b":
        return array.astype(target)
    if kind in "iu":
        held = np.iinfo(array.dtype)
        if held.min < low or held.max > high:
            array = np.clip(array, max(low, held.min), min(high, held.max))
        return array.astype(target)
    if high > 2**24 and array.itemsize < 8:
        array = array.astype(np.float64)  # the bounds of INT32 are exact in float64, not in float32
    rounded = np.rint(array)
    np.copyto(rounded, 0.0, where=np.isnan(rounded))
    if high < 2**53:
        return np.clip(rounded, low, high, out=rounded).astype(target)
    with np.errstate(invalid="ignore"):
        result = rounded.astype(target)
    # 2**63 - 1 is no float64: values from 2**63 up are replaced after the cast, which leaves them undefined.
    np.copyto(result, high, where=rounded >= 2.0**63)
    np.copyto(result, low, where=rounded < -(2.0**63))
    return result


def pack_subbyte(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Two 4-bit elements per byte along the last axis, the even element in the low nibble.

    `array` is an unpacked ml_dtypes `float4_e2m1fn` or `int4` array, whose last extent must be even.
    """
    array = np.asarray(array)
    if array.dtype.name not in ("float4_e2m1fn", "int4"):
        raise TypeError(f"pack_subbyte takes a float4_e2m1fn or int4 array, not {array.dtype}")
    if array.ndim == 0 or array.shape[-1] % 2:
        raise ValueError(f"pack_subbyte: the last extent must be even, shape is {array.shape}")
    nibbles: np.ndarray[Any, np.dtype[np.uint8]] = np.ascontiguousarray(array).view(np.uint8)
    nibbles = nibbles & np.uint8(0x0F)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


def unpack_subbyte(array: Any, dt: data_type) -> np.ndarray[Any, Any]:
    """The inverse of `pack_subbyte`: bytes become an array of `numpy_dtype(dt)`, last extent doubled."""
    if dt not in (data_type.FP4_E2M1, data_type.INT4):
        raise TypeError(f"unpack_subbyte gives FP4_E2M1 or INT4, not {dt}")
    packed = np.ascontiguousarray(array).view(np.uint8)
    if packed.ndim == 0:
        raise ValueError("unpack_subbyte takes an array of at least one axis")
    nibbles = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    nibbles[..., 0::2] = packed & 0x0F
    nibbles[..., 1::2] = packed >> 4
    if dt is data_type.INT4:
        nibbles ^= 8
        nibbles -= 8  # sign-extends the nibble
    return nibbles.view(numpy_dtype(dt))


def describe_value(value: Any) -> str:
    """A short text of a scalar value and its type, for messages."""
    kind = type(value).__name__
    dtype = getattr(value, "dtype", None)
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({kind})" if dtype is None else f"{text} ({kind} of {dtype})"


def scalar_bytes(value: Any, data_type: data_type, label: str) -> bytes:
    """The bytes of one by-value scalar in the declared data type, converted exactly or refused.

    Python numbers (a `np.float64` is one): an int becomes an integer in range, or a float that equals it; a
    float becomes the nearest float of the type and may not overflow; a bool is for BOOLEAN only. NumPy
    values, and arrays of one element, must have the declared type. `label` names the tensor in messages.
    Raises `TypeError` for a value of the wrong kind and `ValueError` for one that does not fit.
    """
    target = numpy_dtype(data_type)
    row = _ROWS[data_type]
    if isinstance(value, float):
        return _float_bytes(float(value), row, target, label)
    if isinstance(value, (bool, np.bool_)):
        if row.kind != "b":
            raise _refuse(
                label, row, value, "a bool is a value of BOOLEAN only", "pass a number of the declared type"
            )
        return b"\1" if value else b"\0"
    if isinstance(value, (np.generic, np.ndarray)):
        return _array_bytes(value, row, target, label)
    if isinstance(value, int):
        return _int_bytes(value, row, target, label)
    if hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise TypeError(
                explain(
                    label,
                    f"the by-value scalar cannot be read on the host: {error}",
                    expected=row.name,
                    given=describe_value(value),
                    next_step="pass a Python number or a NumPy array of one element",
                )
            ) from error
        return _array_bytes(array, row, target, label)
    raise TypeError(
        explain(
            label,
            "a by-value scalar is a Python number, a NumPy scalar or an array of one element",
            expected=row.name,
            given=describe_value(value),
            next_step="pass one of these",
        )
    )


def _refuse(label: str, row: DType, value: Any, rule: str, next_step: str) -> ValueError:
    return ValueError(
        explain(label, rule, expected=row.name, given=describe_value(value), next_step=next_step)
    )


def _array_bytes(value: Any, row: DType, target: np.dtype[Any], label: str) -> bytes:
    if value.size != 1:
        raise _refuse(
            label, row, value, f"a by-value scalar has one element, not {value.size}", "pass one element"
        )
    if value.dtype != target or not value.dtype.isnative:
        raise _refuse(
            label,
            row,
            value,
            f"a typed value must have the declared type, not {value.dtype}",
            f"convert it to {target}, or declare the tensor with its type",
        )
    return bytes(value.tobytes())


def _int_bytes(value: int, row: DType, target: np.dtype[Any], label: str) -> bytes:
    value = operator.index(value)
    if row.kind == "b":
        raise _refuse(label, row, value, "BOOLEAN takes a bool", "pass True or False")
    if row.kind == "i":
        low, high = _INT_RANGE[row.data_type]
        if not low <= value <= high:
            raise _refuse(
                label, row, value, f"the integer is outside [{low}, {high}]", "declare a wider type"
            )
        return np.array(value).astype(target).tobytes()
    try:
        held = float(value)
    except OverflowError:
        held = float("inf")
    if held == value:
        with np.errstate(all="ignore"):
            converted = np.array(held).astype(target)
        if float(converted.astype(np.float64)) == value:
            return converted.tobytes()
    raise _refuse(
        label,
        row,
        value,
        f"the integer is not exact in {row.name}",
        "pass a float to have it rounded to nearest",
    )


def _float_bytes(value: float, row: DType, target: np.dtype[Any], label: str) -> bytes:
    if row.kind not in ("f", "q"):
        raise _refuse(
            label,
            row,
            value,
            "a float is no value of an integer type",
            "pass an int, or declare a float type",
        )
    with np.errstate(all="ignore"):
        converted = np.array(value).astype(target)
    back = float(converted.astype(np.float64))
    if value - value != 0.0:  # infinity or NaN: kept where the type has it
        fits = back == value or (value != value and back != back)
    elif row.kind == "q":  # ml_dtypes saturates some of these types without a word
        low, high = _SATURATE[row.data_type]
        fits = low <= value <= high
    else:
        fits = back - back == 0.0
    if not fits:
        raise _refuse(label, row, value, f"the value is out of range of {row.name}", "declare a wider type")
    return converted.tobytes()
