"""Handles: the device and the stream that calls run on.

A handle is named by whoever calls; there is no hidden process-wide one. On a machine without a CUDA driver
`create_handle()` gives a CPU handle, whose stream is carried along and ignored.
"""

from __future__ import annotations

from _thread import _local
from operator import index
from typing import Any

from opgraph import _native
from opgraph.engines.device import DeviceInfo, as_device, current_cuda_device

__all__ = ["DeviceInfo", "Handle", "create_handle", "destroy_handle", "get_stream", "set_stream"]

# How frameworks spell the raw stream address: torch `cuda_stream`, CuPy and cuda-python `ptr`, numba
# `handle`.
_STREAM_ATTRIBUTES = ("cuda_stream", "ptr", "handle")


class Handle(_native.Handle):
    """The device and stream of calls. Truthy, compared and hashed by identity, not convertible to an int.

    `Handle(backend_handle, ordinal, stream)` wraps a foreign native handle (kept as `backend_handle`, never
    owned) of CUDA device `ordinal`. `Handle(device="cpu")` names the device instead; with neither it is the
    current device.

    A handle cannot be copied or pickled: it names a device and a stream of this process.
    """

    def __init__(
        self,
        backend_handle: int | None = None,
        ordinal: int | None = None,
        stream: Any = None,
        *,
        device: Any = None,
    ) -> None:
        """See the class.

        Raises:
            TypeError: `stream` or `device` is of the wrong kind.
            ValueError: `device` is named next to `backend_handle` or `ordinal`, or a stream address is
                negative.
        """
        if device is not None:
            if backend_handle is not None or ordinal is not None:
                raise ValueError(
                    "Handle: device= already names the device; leave backend_handle and ordinal out"
                )
            info = as_device(device)
        elif backend_handle is not None or ordinal is not None:
            info = DeviceInfo.cuda(0 if ordinal is None else index(ordinal))
        else:
            info = current_cuda_device() or DeviceInfo.cpu()
        super().__init__(info.device_type, info.ordinal, as_stream(stream))
        self._device = info
        self.backend_handle = backend_handle

    @property
    def device(self) -> DeviceInfo:
        """The device; what the driver says of it was asked when the handle was made."""
        return self._device

    @property
    def stream(self) -> int:
        """The raw stream address, 0 for the legacy default. Set from an int, a NumPy int or a framework's
        stream object; None is the default."""
        return _native.Handle.stream.__get__(self)

    @stream.setter
    def stream(self, stream: Any) -> None:
        _native.Handle.stream.__set__(self, as_stream(stream))  # type: ignore[attr-defined]

    def set_stream(self, stream: Any) -> None:
        """See `opgraph.set_stream`."""
        self.stream = as_stream(stream)

    def __repr__(self) -> str:
        return f"<Handle on {self._device}, stream {self.stream:#x}>"


def as_stream(stream: Any) -> int:
    """A raw stream address from an int, a NumPy int or a framework's stream object; None is the legacy
    default, 0.

    Raises:
        TypeError: neither an integer nor a stream object.
        ValueError: a negative address.
    """
    if stream is None:
        return 0
    if isinstance(stream, (bool, str, bytes, float)):
        raise TypeError(f"stream: expected an int or a stream object, got {stream!r}")
    value = _raw_address(stream)
    if value is None:
        raise TypeError(
            f"stream: expected an int or a stream object, got {type(stream).__name__}; "
            f"an object needs one of the attributes {', '.join(_STREAM_ATTRIBUTES)} or __cuda_stream__"
        )
    if value < 0:
        raise ValueError(f"stream: expected a raw stream address of 0 or more, got {value}")
    return value


def _raw_address(stream: Any) -> int | None:
    if hasattr(type(stream), "__index__"):
        return index(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, address = protocol() if callable(protocol) else protocol
        return index(address)
    for attribute in _STREAM_ATTRIBUTES:
        value = getattr(stream, attribute, None)
        pointer: Any = getattr(value, "value", value)
        if pointer is not value:  # ctypes.c_void_p, which spells a null pointer None
            pointer = pointer or 0
        if hasattr(type(pointer), "__index__"):
            return index(pointer)
    return None


def _checked(handle: Any, what: str) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{what}: expected a Handle, got {type(handle).__name__}; make one with create_handle()"
        )
    return handle


def create_handle() -> Handle:
    """A handle on the current CUDA device, stream 0; a CPU handle where no CUDA driver answers."""
    return Handle()


def destroy_handle(handle: Handle) -> None:
    """Ends the use of a handle. Idempotent: opgraph's handles own no device resource."""
    _checked(handle, "destroy_handle")


def set_stream(handle: Handle, stream: Any) -> None:
    """Sets the stream: a raw address, a NumPy int or a framework's stream object; None is the legacy
    default."""
    _checked(handle, "set_stream").stream = as_stream(stream)


def get_stream(handle: Handle) -> int:
    """The raw stream address of a handle."""
    return int(_checked(handle, "get_stream").stream)


_thread_state = _local()


def default_handle() -> Handle:
    """This thread's handle on the current device, made at the first question (`Graph(handle="auto")`)."""
    handles: dict[DeviceInfo, Handle] = _thread_state.__dict__.setdefault("handles", {})
    device = current_cuda_device() or DeviceInfo.cpu()
    found = handles.get(device)
    if found is None:
        found = handles[device] = Handle(device=device)
    return found
