"""The operand contract beyond plain layouts: ragged rows, scale blobs, sub-byte types, outputs, scalars, devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_model import Declared, Given, verdict
from exchange import Dlpack, forwarding, producer_type, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from probe import OneOperand, install

import opgraph as og
from opgraph.ir.tensor import row_major

D = og.data_type


def view(memory: np.ndarray[Any, Any], dims: Any, strides: Any, offset: int = 0) -> np.ndarray[Any, Any]:
    return as_strided(memory[offset:], dims, [s * memory.itemsize for s in strides])


def rule_of(call: Any, *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except og.OperandError as error:
        return str(error.rule)
    return ""


# ---- ragged


class Ragged:
    """Y = identity(X), X ragged `[B, H, S, W]`; the plan keeps the slot of X."""

    def __init__(self, dims: Any, strides: Any, rows: int = -1, multiplier: int = 1, int_type: Any = D.INT32):
        self.graph = og.pygraph(io_data_type=D.FLOAT)
        self.offsets = self.graph.tensor((dims[0] + 1, 1, 1, 1), data_type=int_type, name="offsets")
        self.x = self.graph.tensor(
            dims, strides, ragged_offset=self.offsets, ragged_offset_multiplier=multiplier, name="X"
        )
        self.y = self.graph.identity(self.x).set_output(True).set_name("Y").set_stride(row_major(tuple(dims)))
        install(self.graph, self._run, facts={"X": {"ragged_rows": rows}})
        self.int_dtype = np.int64 if int_type is D.INT64 else np.int32
        self.slot: Any = None

    def _run(self, pack: Any) -> None:
        self.slot = pack[pack.uids.index(self.x.uid)]

    def rule(self, buffer: Any, offsets: Any = None) -> str:
        self.slot = None
        where = 1 << 40 if offsets is None else np.array(offsets, self.int_dtype)
        if offsets is None:
            where = np.zeros(self.offsets.dim[0], self.int_dtype)
        return rule_of(self.graph.execute, {self.x: buffer, self.offsets: where, self.y: 1 << 41})


BSHD, QKV = (60, 5, 15, 1), (180, 5, 45, 1)  # of [2, 3, 4, 5]: rows of 15, and of 15 within 45


@pytest.mark.parametrize(
    ("strides", "dims", "steps", "rule"),
    [
        (BSHD, (7, 3, 5), (15, 5, 1), ""),
        (BSHD, (99, 3, 5), (15, 5, 1), ""),
        (BSHD, (1, 3, 5), (15, 5, 1), ""),
        (BSHD, (0, 3, 5), (15, 5, 1), ""),
        (BSHD, (7, 15), (15, 1), ""),
        (BSHD, (105,), (1,), ""),
        (BSHD, (2, 4, 3, 5), (60, 15, 5, 1), ""),
        (BSHD, (2, 3, 4, 5), BSHD, ""),
        (BSHD, (7, 5, 3), (15, 3, 1), "layout"),
        (BSHD, (7, 4, 5), (20, 5, 1), "layout"),
        (BSHD, (1, 4, 5), (20, 5, 1), "layout"),
        (BSHD, (3, 7, 5), (35, 5, 1), "layout"),  # heads outermost
        (BSHD, (7, 3, 5), (15, -5, 1), "negative_stride"),
        (QKV, (7, 3, 5), (45, 5, 1), ""),
        (QKV, (7, 3, 5), (15, 5, 1), "layout"),
        (QKV, (7, 9, 5), (45, 5, 1), "layout"),  # q, k and v: the declaration is of one of them
    ],
)
def test_ragged_rows(strides: Any, dims: Any, steps: Any, rule: str):
    memory = np.zeros(2000, np.float32)
    ragged = Ragged((2, 3, 4, 5), strides)
    buffer = view(memory, dims, steps, 40)
    assert ragged.rule(buffer) == rule
    if not rule:
        span = 0 if 0 in dims else 1 + sum((n - 1) * s for n, s in zip(dims, steps, strict=True))
        assert ragged.slot.nbytes == 4 * span, "the true size, not that of the declaration"
        assert ragged.slot.ptr == buffer.ctypes.data
        assert ragged.slot.shape == (2, 3, 4, 5) and ragged.slot.strides == strides


def test_ragged_bytes_are_those_of_max_total_seq_len():
    memory = np.zeros(2000, np.float32)
    for rows, rule in ((6, ""), (7, ""), (8, "bytes")):
        assert Ragged((2, 3, 4, 5), BSHD, rows).rule(view(memory, (7, 3, 5), (15, 5, 1))) == rule
        # A slice of packed rows ends with its last row, not where the next one would begin.
        assert Ragged((2, 3, 4, 5), QKV, rows).rule(view(memory, (7, 3, 5), (45, 5, 1))) == rule
    assert Ragged((2, 3, 4, 5), BSHD, 0).rule(memory[:0].reshape(0, 3, 5)) == ""


@pytest.mark.parametrize("int_type", [D.INT32, D.INT64])
def test_host_offsets_end_inside_the_buffer(int_type: Any):
    memory = np.zeros(2000, np.float32)
    dense, packed = view(memory, (7, 3, 5), (15, 5, 1)), view(memory, (7, 3, 5), (45, 5, 1))
    ragged = Ragged((2, 3, 4, 5), BSHD, int_type=int_type)
    for offsets, fits in [
        ([0, 45, 105], True),
        ([0, 0, 0], True),
        ([15, 60, 105], True),
        ([0, 45, 106], False),
        ([0, 45, 120], False),
        ([0, 60, 45], False),
        ([-15, 45, 105], False),
    ]:
        assert ragged.rule(dense, offsets) == ("" if fits else "ragged_offsets"), offsets
        assert ragged.rule(memory[:105], offsets) == ("" if fits else "ragged_offsets"), offsets
    ragged = Ragged((2, 3, 4, 5), QKV, int_type=int_type)
    for offsets, fits in [
        (
            [0, 90, 315],
            True,
        ),  # the last entry ends at its last row, inside; the offset points to the row after
        ([0, 315, 315], True),
        (
            [0, 30, 315],
            False,
        ),  # the last whole row from there ends at 30 + 6 * 45 + 15 = 315, the buffer at 285
        ([0, 40, 315], True),  # at 40 + 5 * 45 + 15 = 280
        ([0, 90, 316], False),
        ([0, 90, 360], False),
    ]:
        got = ragged.rule(packed, offsets)
        assert got == ("" if fits else "ragged_offsets"), offsets
    scaled = Ragged((2, 3, 4, 5), BSHD, multiplier=15, int_type=int_type)
    assert scaled.rule(dense, [0, 3, 7]) == "" and scaled.rule(dense, [0, 3, 8]) == "ragged_offsets"
    halved = Ragged((2, 3, 4, 5), BSHD, multiplier=2, int_type=int_type)
    assert halved.rule(dense, [0, 30, 52]) == "" and halved.rule(dense, [0, 30, 53]) == "ragged_offsets"
    assert scaled.rule(dense, [0, 3, np.iinfo(scaled.int_dtype).max]) == "ragged_offsets"


def test_a_sequence_of_one_row_still_has_a_step():
    memory = np.zeros(2000, np.float32)
    ragged = Ragged((2, 3, 1, 5), (45, 5, 45, 1))
    assert ragged.rule(view(memory, (7, 3, 5), (45, 5, 1))) == ""
    assert ragged.rule(view(memory, (7, 3, 5), (15, 5, 1))) == "layout"


def test_a_bare_address_has_no_size():
    ragged = Ragged((2, 3, 4, 5), BSHD)
    memory = np.zeros(500, np.float32)
    assert ragged.rule(memory.ctypes.data, [0, 15, 10**6]) == ""  # the caller vouches
    assert ragged.slot.nbytes == 0
    assert ragged.rule(0) == "null_address"


@st.composite
def ragged_samples(draw: Any) -> tuple[Declared, Given]:
    heads, most, width = (draw(st.integers(1, 4)) for _ in range(3))
    batch, gap = draw(st.integers(1, 3)), draw(st.sampled_from((0, 0, 0, 3, 2 * heads * width)))
    row = heads * width + gap
    outer = draw(st.sampled_from((most * row, 0, 77)))
    want = Declared((batch, heads, most, width), (outer, width, row, 1), ragged=True)
    want = want._replace(rows=draw(st.sampled_from((None, None, 0, 2, 5))))
    count = draw(st.integers(0, 6))
    axes = draw(
        st.sampled_from(
            (
                [(count, row), (heads, width), (width, 1)],
                [(count, row), (heads * width, 1)],
                [(2, 3 * row), (3, row), (heads, width), (width, 1)],
                [(count * heads, width), (width, 1)],
                [(count, row), (width, heads), (heads, 1)],
                [(count, row), (heads + 1, width), (width, 1)],
                [(count * row, 1)],
                list(zip(want.dims, want.strides, strict=True)),
            )
        )
    )
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(axes) - 1))
        axes[at] = (
            max(0, axes[at][0] + draw(st.sampled_from((-1, 1)))),
            axes[at][1] + draw(st.sampled_from((0, 0, 1))),
        )
    return want, Given(tuple(n for n, _ in axes), tuple(s for _, s in axes))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(ragged_samples())
def test_model_and_native_check_agree_on_ragged_rows(sample: Any):
    want, have = sample
    memory = np.zeros(2000, np.float32)
    ragged = Ragged(want.dims, want.strides, -1 if want.rows is None else want.rows)
    assert ragged.rule(view(memory, have.dims, have.strides)) == verdict(want, have)


def test_ragged_slices_of_packed_rows_through_the_cpu_engine():
    """q, k and v of one packed buffer, each its own ragged view; the outputs are slices of another."""
    heads, width, lengths = 2, 3, [3, 0, 2]
    rows, step = sum(lengths), 3 * heads * width
    packed = np.arange(rows * step, dtype=np.float32).reshape(rows, 3, heads, width)
    result = np.full_like(packed, -1)
    graph = og.pygraph(io_data_type=D.FLOAT)
    offsets = graph.tensor((4, 1, 1, 1), data_type=D.INT32, name="offsets")
    dims, strides = (3, heads, 4, width), (0, width, step, 1)
    pairs = []
    for name in "qkv":
        x = graph.tensor(dims, strides, ragged_offset=offsets, name=name)
        # The batch stride is no evidence: here it says nothing that would keep the three apart.
        y = graph.identity(x).set_output(True).set_dim(dims).set_stride((4 * heads * width, width, step, 1))
        pairs.append((x, y.set_ragged_offset(offsets)))
    graph.build(engine="cpu", device="cpu")
    pack: dict[Any, Any] = {offsets: np.cumsum([0, *lengths], dtype=np.int32) * step}
    for i, (x, y) in enumerate(pairs):
        pack[x], pack[y] = packed[:, i], result[:, 2 - i]
    graph.execute(pack)
    np.testing.assert_array_equal(result[:, ::-1], packed)
    pack[pairs[1][1]] = result[:, 2]
    with pytest.raises(og.OperandError, match="shares memory"):
        graph.execute(pack)


# ---- block-scale factors


def test_scale_blobs_count_whole_tiles_and_nothing_else():
    blob = np.zeros(4096, np.uint8)
    for dims, strides, physical, need in [
        ((128, 4), None, (128, 4), 512),
        ((1, 100, 3), None, (1, 128, 4), 512),
        ((2, 129, 5), None, (2, 256, 8), 4096),
        ((1, 3, 100), (300, 1, 3), (1, 4, 128), 512),
    ]:
        one = OneOperand(dims, strides, D.UINT8, touch=False, reordering_type=og.tensor_reordering.F8_128x4)
        model = Declared(physical, row_major(physical), (1, 8, 1), reordered=True)
        for given_dims, given_strides in [
            ((need,), (1,)),
            ((need // 16, 16), (16, 1)),
            ((16, need // 16), (1, 16)),  # dense in any order: the bytes are what counts
            ((need // 128, 1, 128), (128, 7, 1)),
            ((need - 1,), (1,)),
            ((need // 2,), (2,)),
            ((need // 8, 4), (8, 1)),
        ]:
            expected = verdict(model, Given(given_dims, given_strides, (1, 8, 1)))
            assert one.refusal(view(blob, given_dims, given_strides)) == expected, (dims, given_dims)
            if not expected:
                slot = one.slots[0]
                assert slot.nbytes == need and slot.shape == physical


# ---- sub-byte types


@pytest.mark.parametrize("data_type", [D.FP4_E2M1, D.INT4])
def test_packed_pairs_are_checked_in_storage_units(data_type: Any, ml_dtypes: Any):
    code = 17 if data_type is D.FP4_E2M1 else 0
    one = OneOperand((4, 8), None, data_type)
    packed = np.arange(16, dtype=np.uint8).reshape(4, 4)
    want = Declared((4, 4), (4, 1), (code, 4, 2), packed=True)
    tabled = producer_type(table())
    for dims, strides in [
        ((4, 4), (4, 1)),
        ((16,), (1,)),
        ((2, 2, 4), (8, 4, 1)),
        ((4, 8), (8, 1)),
        ((3, 4), (4, 1)),
    ]:
        memory = np.arange(64, dtype=np.uint8)
        for dtype, buffer in [
            ((1, 8, 1), view(memory, dims, strides)),
            ((code, 4, 2), tabled(view(memory, dims, strides), dtype=(code, 4, 2))),
        ]:
            expected = verdict(want, Given(dims, strides, dtype))
            assert one.refusal(buffer) == expected, (dims, dtype)
            if not expected:
                np.testing.assert_array_equal(one.read, packed)
    slot = one.slots and one.slots[0]
    one.give(packed)
    slot = one.slots[0]
    assert (slot.shape, slot.strides, slot.nbytes) == ((4, 4), (4, 1), 16)
    assert slot.dlpack_dtype == (code, 4, 2)


@pytest.mark.parametrize("data_type", [D.FP4_E2M1, D.INT4])
def test_unpacked_pairs_are_refused_naming_the_packing_call(data_type: Any, ml_dtypes: Any):
    unpacked_type = getattr(ml_dtypes, "float4_e2m1fn" if data_type is D.FP4_E2M1 else "int4")
    unpacked = np.arange(32).reshape(4, 8) % 4
    unpacked = unpacked.astype(unpacked_type)
    one = OneOperand((4, 8), None, data_type)
    for buffer in (unpacked, unpacked.ravel(), np.zeros((4, 4), unpacked_type), np.zeros(64, unpacked_type)):
        with pytest.raises(og.OperandError, match="pack_subbyte") as caught:
            one.give(buffer)
        assert caught.value.rule == "subbyte"
    np.testing.assert_array_equal(one.give(og.datatypes.pack_subbyte(unpacked)), og.datatypes.pack_subbyte(unpacked))
    assert one.refusal(np.zeros((4, 4), np.float32)) == "dtype"
    # An unpacked array is no buffer of the byte-wide type either.
    assert OneOperand((8,), None, D.INT8).refusal(np.zeros(8, ml_dtypes.int4)) == "dtype"


def test_odd_extents_have_no_storage_form(ml_dtypes: Any):
    with pytest.raises(ValueError, match="even"):
        OneOperand((4, 7), None, D.FP4_E2M1)


# ---- data types and devices


@pytest.mark.parametrize(
    ("declared", "given_type"),
    [(D.INT32, np.int64), (D.INT64, np.int32), (D.FLOAT, np.int32), (D.HALF, np.uint16), (D.BOOLEAN, np.uint8),
     (D.UINT8, np.bool_), (D.INT8, np.uint8), (D.FLOAT, np.float64), (D.DOUBLE, np.complex64)],
)  # fmt: skip
def test_the_data_type_is_the_declared_one(declared: Any, given_type: Any):
    one = OneOperand((3,), None, declared)
    for buffer in (np.zeros(3, given_type), forwarding(np.zeros(3, given_type))):
        with pytest.raises(og.OperandError) as caught:
            one.give(buffer)
        assert caught.value.rule == "dtype"
        assert np.dtype(given_type).name in str(caught.value.given)


def test_made_up_types_are_spelled():
    tabled = producer_type(table())
    one = OneOperand((3,))
    for dtype, words in [((99, 32, 1), "code 99"), ((2, 7, 1), "float7"), ((2, 32, 2), "float32_x2")]:
        with pytest.raises(og.OperandError, match=words):
            one.give(tabled(np.zeros(3, np.float32), dtype=dtype))


def test_devices():
    def on(device: tuple[int, int]) -> Any:
        return Dlpack(lambda kwargs: pytest.fail("asked for memory that could not be used"), device)

    tabled = producer_type(table())
    memory = np.zeros(3, np.float32)
    one = OneOperand((3,), touch=False)
    for device, rule in [((2, 0), "device"), ((99, 0), "device"), ((10, 0), "device"), ((13, 0), "device")]:
        assert verdict(Declared((3,), (1,)), Given((3,), (1,), device=device)) == rule
        assert one.refusal(on(device)) == rule
        assert one.refusal(tabled(memory, device=device)) == rule
    for device in [
        (1, 0),
        (1, 3),
        (3, 0),
        (11, 0),
    ]:  # host memory, pinned or not; its device id names no other memory
        assert verdict(Declared((3,), (1,)), Given((3,), (1,), device=device)) == ""
        assert one.refusal(tabled(memory, device=device)) == ""
        assert one.slots[0].device == (1, 0)
    gpu = OneOperand((3,), touch=False, device=(2, 1))
    for device, rule in [((2, 1), ""), ((2, 0), "device"), ((1, 0), "device"), ((3, 0), "device")]:
        assert gpu.refusal(tabled(memory, device=device)) == rule
    assert gpu.refusal(memory) == "device"
    assert gpu.refusal(memory.ctypes.data) == "" and gpu.slots[0].device == (2, 1)


def test_addresses():
    memory = np.arange(6, dtype=np.float32)
    one = OneOperand((2, 3), (1, 2))
    np.testing.assert_array_equal(one.give(memory.ctypes.data), view(memory, (2, 3), (1, 2)))
    assert one.refusal(0) == "null_address"
    for bad in (-8, 2**64):
        assert one.refusal(bad) == "address"
    empty = OneOperand((0, 3))
    assert empty.refusal(0) == "" and empty.read.shape == (0, 3)
    tabled = producer_type(table())
    assert one.refusal(tabled(memory.reshape(3, 2).T, data=None)) == "null_address"
    assert empty.refusal(tabled(memory[:0].reshape(0, 3), data=None)) == ""
    for wrong in (True, "x", b"x", 1.5, object(), memory.__dlpack__(), None.__class__):
        with pytest.raises(TypeError, match="'X'"):
            one.give(wrong)
