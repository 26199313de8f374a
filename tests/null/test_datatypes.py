"""The data type table, rounding, packing, and by-value scalars."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from opgraph.ir import as_data_type, cudnnGraphNotSupportedError, data_type, torch_to_cudnn_data_type
from opgraph.ir.datatypes import (
    dlpack_dtype,
    element_bits,
    from_dlpack_dtype,
    numpy_dtype,
    pack_subbyte,
    round_to,
    scalar_bytes,
    unpack_subbyte,
)

ml_dtypes = pytest.importorskip("ml_dtypes")
nan, inf = float("nan"), float("inf")
HELD = [d for d in data_type if d not in (data_type.NOT_SET, data_type.FAST_FLOAT_FOR_FP8)]
NUMPY = [d for d in HELD if "x" not in d.name and d is not data_type.FP8_E5M3]


def test_members_print_convert_and_keep_their_numbers():
    assert str(data_type.HALF) == "data_type.HALF" and int(data_type.HALF) == 3
    assert {int(d): d.name for d in data_type}[19] == "FP4_E2M1" and 13 not in {int(d) for d in data_type}
    assert {data_type.HALF: 1}[data_type(3)] == 1 and "HALF" in data_type.__members__


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_round_trip(dtype):
    assert as_data_type(numpy_dtype(dtype)) is dtype
    assert as_data_type(numpy_dtype(dtype).type) is dtype
    code, bits, lanes = dlpack_dtype(dtype)
    assert from_dlpack_dtype(code, bits, lanes) is dtype
    assert element_bits(dtype) == bits


def test_types_without_a_numpy_or_exchange_form():
    for dtype in (data_type.INT8x4, data_type.INT8x32, data_type.FP8_E5M3):
        with pytest.raises(cudnnGraphNotSupportedError, match=dtype.name):
            numpy_dtype(dtype)
    assert dlpack_dtype(data_type.INT8x32) == (0, 8, 32) and element_bits(data_type.INT8x32) == 256
    with pytest.raises(cudnnGraphNotSupportedError, match="FP8_E5M3"):
        dlpack_dtype(data_type.FP8_E5M3)
    with pytest.raises(cudnnGraphNotSupportedError, match="compute"):
        element_bits(data_type.FAST_FLOAT_FOR_FP8)
    assert from_dlpack_dtype(99, 32, 1) is None and from_dlpack_dtype(2, 32, 2) is None


@pytest.mark.parametrize(
    "bad", [np.complex64, np.dtype("V4"), np.dtype(">f4"), np.uint32, "float32", 3, float, object()]
)
def test_what_is_no_data_type(bad):
    with pytest.raises(cudnnGraphNotSupportedError, match="counterpart"):
        as_data_type(bad)


def test_unset_types():
    assert as_data_type(None) is None and as_data_type(data_type.NOT_SET) is None
    assert torch_to_cudnn_data_type(np.float32) is None


def test_torch_types_are_recognised_by_name():
    class dtype:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return "torch." + self.name

    dtype.__module__ = "torch"
    assert torch_to_cudnn_data_type(dtype("bfloat16")) is data_type.BFLOAT16
    assert as_data_type(dtype("float8_e4m3fn")) is data_type.FP8_E4M3
    assert torch_to_cudnn_data_type(dtype("complex64")) is None
    with pytest.raises(cudnnGraphNotSupportedError, match="counterpart"):
        as_data_type(dtype("complex64"))


# ---- rounding


def rounded(values, dtype, source=np.float64):
    result = round_to(np.asarray(values, source), dtype)
    assert result.dtype == numpy_dtype(dtype)
    return result.astype(np.float64).tolist()


def test_floats_round_to_nearest_even_once():
    half, double = data_type.HALF, np.float64
    assert rounded([1 + 2**-11, 1 + 2**-11 + 2**-40, 1e6, -1e6, nan], half, double)[:4] == [
        1,
        1 + 2**-10,
        inf,
        -inf,
    ]
    assert rounded([1 + 2**-8, 1 + 2**-8 + 2**-40, 1e39], data_type.BFLOAT16) == [1, 1 + 2**-7, inf]
    assert rounded([0.1], data_type.FLOAT) == [float(np.float32(0.1))]


@pytest.mark.parametrize(
    "dtype, top",
    [
        (data_type.FP8_E4M3, 448.0),
        (data_type.FP8_E5M2, 57344.0),
        (data_type.FP4_E2M1, 6.0),
        (data_type.FP8_E8M0, 2.0**127),
    ],
)
def test_small_floats_saturate(dtype, top):
    assert rounded([top, top * 1.04, 1e300, inf], dtype) == [top] * 4
    assert rounded([1e30 if top < 1e30 else 2.0**127, inf], dtype, np.float32) == [top, top]
    if dtype is not data_type.FP8_E8M0:
        assert rounded([-top * 1.04, -inf, 0.0], dtype) == [-top, -top, 0]
    if dtype is data_type.FP4_E2M1:
        assert rounded([nan, 2.5, 3.5], dtype) == [6.0, 2.0, 4.0]
    else:
        assert np.isnan(rounded([nan], dtype)).all()


def test_to_integers():
    assert rounded([0.5, 1.5, 2.5, -1.5, 300, -300, nan, inf], data_type.INT8) == [
        0,
        2,
        2,
        -2,
        127,
        -128,
        0,
        127,
    ]
    assert rounded([2.0**31, -(2.0**31) - 1, 2147483520], data_type.INT32, np.float32) == [
        2**31 - 1,
        -(2**31),
        2147483520,
    ]
    assert round_to(np.array([2.0**63, -(2.0**64), nan, 5.5, inf]), data_type.INT64).tolist() == [
        2**63 - 1,
        -(2**63),
        0,
        6,
        2**63 - 1,
    ]
    assert rounded([-1, 300], data_type.UINT8, np.int64) == [0, 255]
    assert rounded([-9, 9, 3], data_type.INT4, np.int64) == [-8, 7, 3]
    assert rounded([2**40, -(2**40)], data_type.INT32, np.int64) == [2**31 - 1, -(2**31)]
    assert rounded([True, False], data_type.INT32, np.bool_) == [1, 0]


def test_to_boolean():
    assert rounded([0, -0.0, 1e-300, nan, -2], data_type.BOOLEAN) == [0, 0, 1, 1, 1]
    assert rounded([0, 2], data_type.BOOLEAN, ml_dtypes.bfloat16) == [0, 1]


def test_ml_dtypes_as_source():
    source = np.array([1.5, -2.0, nan], ml_dtypes.bfloat16)
    assert round_to(source, data_type.FLOAT)[:2].tolist() == [1.5, -2.0]
    assert round_to(source, data_type.INT8).tolist() == [2, -2, 0]
    assert round_to(source, data_type.BFLOAT16) is source


def test_the_same_type_is_not_copied():
    x = np.ones(3, np.float32)
    assert round_to(x, data_type.FLOAT) is x


# ---- packing


@pytest.mark.parametrize("dtype", [data_type.FP4_E2M1, data_type.INT4])
def test_subbyte_round_trip(dtype):
    values = np.arange(16, dtype=np.uint8)
    every = unpack_subbyte(np.array([[lo | hi << 4 for lo in (0, 5) for hi in range(16)]], np.uint8), dtype)
    assert every.dtype == numpy_dtype(dtype) and every.shape == (1, 64)
    packed = pack_subbyte(every)
    assert packed.dtype == np.uint8 and packed.shape == (1, 32)
    assert np.array_equal(unpack_subbyte(packed, dtype).astype(np.float32), every.astype(np.float32))
    del values


def test_subbyte_order_and_refusals():
    low_first = pack_subbyte(np.array([-6, 1.5], np.float32).astype(ml_dtypes.float4_e2m1fn))
    assert low_first.tolist() == [0x3F]
    assert unpack_subbyte(np.array([0x8F], np.uint8), data_type.INT4).astype(int).tolist() == [-1, -8]
    with pytest.raises(ValueError, match="even"):
        pack_subbyte(np.zeros(3, ml_dtypes.int4))
    with pytest.raises(TypeError, match="int8"):
        pack_subbyte(np.zeros(4, np.int8))
    with pytest.raises(TypeError, match="HALF"):
        unpack_subbyte(np.zeros(4, np.uint8), data_type.HALF)


# ---- by-value scalars


def held(value, dtype):
    return np.frombuffer(scalar_bytes(value, dtype, "s"), numpy_dtype(dtype))[0]


def test_scalars_convert_exactly():
    big = 9007199254740993
    for value in (big, np.int64(big), np.array(big), np.array([[big]])):
        assert int(held(value, data_type.INT64)) == big
    for value in (0.1, np.float64(0.1), np.float32(0.1), np.array(0.1, np.float32)):
        assert held(value, data_type.FLOAT) == np.float32(0.1)
    for value in (1e-5, np.float16(1e-5), np.array([1e-5], np.float16)):
        assert held(value, data_type.HALF) == np.float16(1e-5)
    assert held(3, data_type.HALF) == 3 and held(2**60, data_type.FLOAT) == 2**60
    assert held(True, data_type.BOOLEAN) and not held(np.bool_(False), data_type.BOOLEAN)
    assert np.isnan(held(nan, data_type.HALF)) and held(-inf, data_type.BFLOAT16) == -inf
    assert held(448.0, data_type.FP8_E4M3) == 448 and held(3, data_type.BFLOAT16) == 3
    assert held(-8, data_type.INT4) == -8 and held(255, data_type.UINT8) == 255
    assert held(np.array(1.5, ml_dtypes.bfloat16), data_type.BFLOAT16) == 1.5


@pytest.mark.parametrize(
    "value, dtype",
    [
        (0.5, data_type.INT32),
        (2.0, data_type.INT32),
        (2**31, data_type.INT32),
        (-1, data_type.UINT8),
        (8, data_type.INT4),
        (2**24 + 1, data_type.FLOAT),
        (2**2000, data_type.DOUBLE),
        (2049, data_type.HALF),
        (449, data_type.FP8_E4M3),
        (1e39, data_type.FLOAT),
        (-70000.0, data_type.HALF),
        (500.0, data_type.FP8_E4M3),
        (inf, data_type.FP8_E4M3),
        (nan, data_type.FP4_E2M1),
        (0.0, data_type.FP8_E8M0),
        (1, data_type.BOOLEAN),
        (1.0, data_type.BOOLEAN),
        (True, data_type.INT32),
        (True, data_type.FLOAT),
        (np.int32(3), data_type.INT64),
        (np.int64(3), data_type.INT32),
        (np.float32(1), data_type.HALF),
        (np.array(0.1), data_type.FLOAT),
        (np.array(1.0, ">f4"), data_type.FLOAT),
        (np.zeros(2, np.float32), data_type.FLOAT),
        (np.zeros(0, np.float32), data_type.FLOAT),
    ],
)
def test_scalars_that_are_refused(value, dtype):
    with pytest.raises(ValueError, match=rf"tensor 's' \(uid 3\).*{dtype.name}"):
        scalar_bytes(value, dtype, "tensor 's' (uid 3)")


@pytest.mark.parametrize("value", ["1", 1j, None, [1.0], object()])
def test_scalars_of_the_wrong_kind(value):
    with pytest.raises(TypeError, match="by-value"):
        scalar_bytes(value, data_type.FLOAT, "s")


# ---- import


def test_declaring_does_not_import_ml_dtypes():
    code = """
import sys
from opgraph.ir import GraphIR, data_type
ir = GraphIR(io_data_type=data_type.BFLOAT16)
ir.tensor([2, 3], data_type=data_type.FP8_E4M3)
assert "ml_dtypes" not in sys.modules
sys.modules["ml_dtypes"] = None
from opgraph.ir.datatypes import numpy_dtype
try:
    numpy_dtype(data_type.BFLOAT16)
except ImportError as error:
    assert "ml_dtypes" in str(error) and "BFLOAT16" in str(error)
else:
    raise SystemExit("no ImportError")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
