"""Memory with pages on both sides that nobody may touch: reading or writing one byte too far ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
ROOM = 4 * PAGE  # bytes between the guards

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Array = np.ndarray[Any, Any]


class Arena:
    """`size` bytes at `address`, shown by `raw`. Never unmapped: views of them may live as long as they like."""

    def __init__(self, size: int = ROOM) -> None:
        none, private = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _libc.mmap(None, size + 2 * PAGE, none, private, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        self.address = base + PAGE
        self.size = size
        if _libc.mprotect(self.address, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.raw: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        self._words = self.raw.view(np.uint64)
        self._kept = self._words.copy()

    def keep(self) -> None:
        """What the arena holds now is what `restore` brings back."""
        np.copyto(self._kept, self._words)

    def restore(self) -> None:
        np.copyto(self._words, self._kept)

    def holds(self, expected: Array | None = None) -> bool:
        """Whether every byte is as in `expected`, by default as kept."""
        return bool(np.array_equal(self._words, self._kept if expected is None else expected.view(np.uint64)))

    def offset_of(self, low: int, high: int, against_end: bool) -> int:
        """Where an address has to lie so that the bytes [low, high) around it touch a guard page."""
        return self.size - high if against_end else -low
