"""Versions, and the small objects that scripts of the cuDNN frontend create beside a graph."""

from __future__ import annotations

from _thread import allocate_lock
from typing import Any

from opgraph import planning
from opgraph._version import __version__
from opgraph.engines.device import DeviceInfo, as_device

__all__ = [
    "DeviceProperties",
    "KernelCache",
    "backend_version",
    "backend_version_string",
    "create_device_properties",
    "create_kernel_cache",
    "get_last_error_string",
    "library_version",
]

# The level of the cuDNN API whose programs opgraph serves: public scripts gate features on it. It says
# nothing about an installed cuDNN, nor about opgraph itself (`library_version`).
_COMPATIBILITY_LEVEL = (9, 27, 0)


def backend_version() -> int:
    """The compatibility level as `major * 10000 + minor * 100 + patch`; not a library version."""
    major, minor, patch = _COMPATIBILITY_LEVEL
    return major * 10000 + minor * 100 + patch


def backend_version_string() -> str:
    """The compatibility level as `major.minor.patch`; not a library version."""
    return ".".join(map(str, _COMPATIBILITY_LEVEL))


def library_version() -> str:
    """opgraph's own version, as `__version__`."""
    return __version__


def get_last_error_string() -> str:
    """The last refusal of a graph or a buffer in this thread, or an empty text."""
    return planning.messages.last_error()


class KernelCache:
    """Compiled kernels that graphs share, by key. All methods may be called from any thread."""

    __slots__ = ("_entries", "_lock", "_revision")

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}
        self._revision = 0
        self._lock = allocate_lock()

    @property
    def size(self) -> int:
        """Number of kernels held."""
        return len(self._entries)

    @property
    def revision(self) -> int:
        """Grows with every kernel added, so that a caller can tell whether to serialize again."""
        return self._revision

    def get(self, key: str) -> str | None:
        """What an engine stored under `key`, or None."""
        return self._entries.get(key)

    def put(self, key: str, value: str) -> None:
        """Stores an engine's text under `key`; the same text again changes nothing."""
        with self._lock:
            if self._entries.get(key) != value:
                self._entries[key] = value
                self._revision += 1

    def serialize(self) -> str:
        """The cache as JSON text."""
        import json

        with self._lock:
            return json.dumps({"format": "opgraph.kernel_cache", "version": 1, "entries": self._entries})

    def deserialize(self, data: str) -> None:
        """Adds the kernels of a text that `serialize` made. ValueError for any other text; nothing is added
        then."""
        import json

        try:
            content = json.loads(data)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"kernel cache: not a serialized kernel cache: {error}") from None
        entries = content.get("entries") if isinstance(content, dict) else None
        known = isinstance(content, dict) and (content.get("format"), content.get("version")) == (
            "opgraph.kernel_cache",
            1,
        )
        if (
            not known
            or not isinstance(entries, dict)
            or not all(isinstance(v, str) for v in entries.values())
        ):
            raise ValueError("kernel cache: not a serialized kernel cache of version 1")
        for key, value in entries.items():
            self.put(key, value)


class DeviceProperties:
    """What is known of a device, to build for it where it is not present. Immutable."""

    __slots__ = ("_device",)

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device

    @property
    def device(self) -> DeviceInfo:
        """The device described."""
        return self._device

    def serialize(self) -> str:
        """The properties as JSON text, for `create_device_properties`."""
        import json

        device = self._device
        return json.dumps(
            {
                "format": "opgraph.device_properties",
                "version": 1,
                "device_type": device.device_type,
                "ordinal": device.ordinal,
                "name": device.name,
                "compute_capability": device.compute_capability,
                "sm_count": device.sm_count,
                "is_fake": device.is_fake,
            }
        )

    def __repr__(self) -> str:
        return f"DeviceProperties({self._device!r})"


def create_kernel_cache() -> KernelCache:
    """An empty kernel cache."""
    return KernelCache()


def create_device_properties(source: int | str = 0) -> DeviceProperties:
    """Properties of CUDA device `source`, or those in a text that `DeviceProperties.serialize` made.

    Raises:
        TypeError: neither an int nor a text.
        ValueError: a text that describes no device.
    """
    if isinstance(source, int) and not isinstance(source, bool):
        return DeviceProperties(as_device((2, source)))
    if not isinstance(source, str):
        raise TypeError(
            f"create_device_properties: expected an ordinal or a text, got {type(source).__name__}"
        )
    import json

    try:
        content: dict[str, Any] = json.loads(source)
        if content["format"] != "opgraph.device_properties" or content["version"] != 1:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        capability = content["compute_capability"]
        device = DeviceInfo(
            int(content["device_type"]),
            int(content["ordinal"]),
            str(content["name"]),
            None if capability is None else (int(capability[0]), int(capability[1])),
            int(content["sm_count"]),
            content.get("is_fake") is True,
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"create_device_properties: the text describes no device: {error}") from None
    return DeviceProperties(device)
