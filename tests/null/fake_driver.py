"""The recording CUDA driver of tests/native/fake_driver.c, built once and put in the driver's place."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from opgraph import _native

SOURCE = Path(__file__).parent.parent / "native" / "fake_driver.c"


class FakeDriver:
    """What the tests say to the fake and read from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        self._lib.fake_log.restype = ctypes.c_char_p
        self._lib.fake_current.restype = ctypes.c_void_p
        self._lib.fake_set_current.argtypes = [ctypes.c_void_p]

    def calls(self, *kinds: str) -> list[str]:
        """The recorded calls, only those that begin with one of `kinds` when given."""
        lines = self._lib.fake_log().decode().splitlines()
        return [line for line in lines if not kinds or line.startswith(kinds)]

    def reset(self, parameters: int = 0) -> None:
        """Forgets what was recorded; launches record their first `parameters` arguments, 8 bytes each."""
        self._lib.fake_reset()
        self._lib.fake_parameters(parameters)

    def fail(self, symbol: str, result: int) -> None:
        """The next call of `symbol` returns `result`."""
        self._lib.fake_fail(symbol.encode(), result)

    @property
    def current(self) -> int | None:
        """The current context."""
        return self._lib.fake_current()

    @current.setter
    def current(self, context: int | None) -> None:
        self._lib.fake_set_current(context)


def build(folder: Path) -> Path:
    """Compiles the fake driver; skips where there is no C compiler (the package itself needed one)."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    library = folder / "libfakecuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", str(SOURCE), "-o", str(library)], check=True)
    return library


def install(path: Path) -> FakeDriver:
    """Puts the fake in the driver's place; `remove` takes it out."""
    assert _native.use_driver(str(path)) == ""
    fake = FakeDriver(path)
    fake.current = None
    fake.reset()
    return fake


def remove() -> None:
    _native.use_driver("")
