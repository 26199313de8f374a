"""Handles and streams, without a device."""

from __future__ import annotations

import copy
import ctypes
import pickle

import numpy as np
import pytest

import opgraph as og
from opgraph.engines.device import DeviceInfo
from opgraph.handle import default_handle


class Stream:
    """A framework's stream object: one attribute with the raw address."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class CudaStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 4660)


@pytest.mark.parametrize(
    ("given", "raw"),
    [
        (0, 0),
        (4660, 4660),
        (np.int64(4660), 4660),
        (None, 0),
        (Stream(cuda_stream=4660), 4660),
        (Stream(ptr=4660), 4660),
        (Stream(handle=4660), 4660),
        (Stream(handle=ctypes.c_void_p(4660)), 4660),
        (Stream(handle=ctypes.c_void_p(0)), 0),
        (CudaStream(), 4660),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_streams_read_back_equal(given, raw):
    handle = og.Handle(device="cpu")
    og.set_stream(handle=handle, stream=given)
    assert og.get_stream(handle) == raw
    assert handle.stream == raw
    handle.set_stream(given)
    assert handle.stream == raw
    assert og.Handle(device="cpu", stream=given).stream == raw


@pytest.mark.parametrize("bad", [-5, "0", b"0", 1.0, True, object(), Stream(ptr="x"), 2**64])
def test_other_streams_are_refused(bad):
    handle = og.Handle(device="cpu", stream=7)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        og.set_stream(handle, bad)
    assert og.get_stream(handle) == 7


def test_handle_is_a_name_not_a_number():
    handle = og.Handle(device="cpu")
    assert handle
    assert og.handle is og.Handle
    assert len({handle, og.Handle(device="cpu"), handle}) == 2
    with pytest.raises(TypeError):
        int(handle)
    assert handle.device == DeviceInfo.cpu()
    assert handle.backend_handle is None
    og.destroy_handle(handle)
    og.destroy_handle(handle)


def test_create_handle_is_on_the_current_device():
    handle = og.create_handle()
    assert handle.device.is_cpu
    assert handle.stream == 0


def test_foreign_handles_are_wrapped():
    handle = og.Handle(0xABC, 1, 16)
    assert (handle.backend_handle, handle.device.key, handle.stream) == (0xABC, (2, 1), 16)
    with pytest.raises(ValueError, match="already names the device"):
        og.Handle(0xABC, device="cpu")


@pytest.mark.parametrize("call", [og.destroy_handle, og.get_stream, lambda h: og.set_stream(h, 0)])
def test_only_handles_are_handles(call):
    for bad in (0, None, object()):
        with pytest.raises(TypeError, match="expected a Handle"):
            call(bad)
    with pytest.raises(TypeError, match="expected a Handle"):
        og.pygraph(handle=5)


def test_no_copies():
    handle = og.Handle(device="cpu")
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Handle"):
            call(handle)


def test_the_default_handle_is_the_threads_own():
    assert default_handle() is default_handle()
