"""What the planner knows about a device: `DeviceInfo`, and which CUDA device is current, if any.

Devices are told apart by DLPack's pair (device type, device id). The driver is reached through the native core's
table, at the first question and never at import.
"""

from __future__ import annotations

import re
from typing import Any

from opgraph import _native

__all__ = ["CPU", "CUDA", "DeviceInfo", "as_device", "cuda_absence", "current_cuda_device", "device_text"]

CPU = 1
CUDA = 2

_TYPE_NAMES = {
    1: "cpu",
    2: "cuda",
    3: "cuda_host",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    9: "vpi",
    10: "rocm",
    11: "rocm_host",
    13: "cuda_managed",
    14: "oneapi",
    15: "webgpu",
    16: "hexagon",
    17: "maia",
    18: "trn",
}
_HOST_TYPES = frozenset((1, 3, 11))


def device_text(device: tuple[int, int]) -> str:
    """`cpu`, `cuda:0`, or for a type outside DLPack's list `device type 99, id 0`."""
    kind, ordinal = device
    name = _TYPE_NAMES.get(kind)
    if name is None:
        return f"device type {kind}, id {ordinal}"
    return name if kind == CPU else f"{name}:{ordinal}"


class DeviceInfo:
    """One device. Immutable; equal when the DLPack pair and all known properties are equal.

    Attributes:
        device_type: DLPack device type (1 CPU, 2 CUDA).
        ordinal: device id within the type.
        name: what the driver calls it.
        compute_capability: `(major, minor)` of a CUDA device, else None.
        sm_count: number of streaming multiprocessors of a CUDA device, else 0.
        is_fake: made by `DeviceInfo.fake`, so nothing can run on it (planning can be tried for it all the
            same).
    """

    __slots__ = ("_fields",)
    _fields: tuple[int, int, str, tuple[int, int] | None, int, bool]

    def __init__(
        self,
        device_type: int,
        ordinal: int = 0,
        name: str = "",
        compute_capability: tuple[int, int] | None = None,
        sm_count: int = 0,
        is_fake: bool = False,
    ) -> None:
        label = name or device_text((device_type, ordinal))
        fields = (device_type, ordinal, label, compute_capability, sm_count, is_fake)
        object.__setattr__(self, "_fields", fields)

    @classmethod
    def cpu(cls) -> DeviceInfo:
        return cls(CPU)

    @classmethod
    def cuda(cls, ordinal: int = 0) -> DeviceInfo:
        """The CUDA device `ordinal`, with its properties where a driver answers."""
        if not 0 <= ordinal < _native.device_count():
            return cls(CUDA, ordinal)
        told = _native.describe_device(ordinal)
        return cls(CUDA, ordinal, told["name"], told["compute_capability"], told["sm_count"])

    @classmethod
    def fake(
        cls,
        device_type: int | str = CUDA,
        ordinal: int = 0,
        *,
        compute_capability: tuple[int, int] | None = (9, 0),
        sm_count: int = 132,
        name: str = "",
    ) -> DeviceInfo:
        """A device that need not exist, to plan for a machine that is not at hand."""
        if isinstance(device_type, str):
            device_type = next((k for k, v in _TYPE_NAMES.items() if v == device_type), -1)
        if device_type == CPU:
            compute_capability, sm_count = None, 0
        label = name or f"fake {device_text((device_type, ordinal))}"
        return cls(device_type, ordinal, label, compute_capability, sm_count, is_fake=True)

    device_type = property(lambda self: self._fields[0], doc="DLPack device type.")
    ordinal = property(lambda self: self._fields[1], doc="Device id within its type.")
    name = property(lambda self: self._fields[2], doc="What the driver calls the device.")
    compute_capability = property(lambda self: self._fields[3], doc="(major, minor), or None.")
    sm_count = property(lambda self: self._fields[4], doc="Number of streaming multiprocessors, or 0.")
    is_fake = property(lambda self: self._fields[5], doc="True for a device made by `fake`.")

    @property
    def key(self) -> tuple[int, int]:
        """DLPack's pair (device type, device id)."""
        return self._fields[:2]

    @property
    def is_cpu(self) -> bool:
        return self._fields[0] in _HOST_TYPES

    @property
    def sm_version(self) -> int:
        """`10 * major + minor` of the compute capability; 0 for a device without one."""
        capability = self._fields[3]
        return 10 * capability[0] + capability[1] if capability else 0

    def __str__(self) -> str:
        return device_text(self.key)

    def __repr__(self) -> str:
        return f"DeviceInfo({device_text(self.key)!r}, name={self.name!r}, sm_version={self.sm_version})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceInfo) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("DeviceInfo is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceInfo, self._fields


def as_device(device: Any) -> DeviceInfo:
    """`"cpu"`, `"cuda"`, `"cuda:1"`, a DLPack pair, or a DeviceInfo, as a DeviceInfo.

    Raises:
        TypeError: not one of these kinds.
        ValueError: a text that names no device.
    """
    if isinstance(device, DeviceInfo):
        return device
    if isinstance(device, str):
        match = re.fullmatch(r"([a-z_]+)(?::(\d+))?", device)
        kind = next((k for k, v in _TYPE_NAMES.items() if match and v == match[1]), None)
        if match is None or kind is None:
            raise ValueError(
                f"device: {device!r} names no device; expected 'cpu', 'cuda' or 'cuda:<ordinal>'"
            )
        if kind == CUDA and match[2] is None:
            return current_cuda_device() or DeviceInfo.cuda(0)
        pair = (kind, int(match[2] or 0))
    elif isinstance(device, tuple) and len(device) == 2:
        pair = (int(device[0]), int(device[1]))
    else:
        raise TypeError(
            f"device: expected a text, a DLPack pair or a DeviceInfo, got {type(device).__name__}"
        )
    return DeviceInfo.cuda(pair[1]) if pair[0] == CUDA else DeviceInfo(*pair)


def current_cuda_device() -> DeviceInfo | None:
    """The current CUDA device if a driver answers, else None."""
    if _native.device_count() == 0:
        return None
    return DeviceInfo.cuda(_native.current_device())


def cuda_absence() -> str:
    """Why no CUDA device can be used, or an empty text when one can."""
    if _native.device_count():
        return ""
    return _native.driver_failure() or "the CUDA driver reports no device"
