"""CUDA C++ to a cubin by NVRTC, for a named compute capability, with no GPU present; results are cached on disk.

NVRTC is looked for where CUDA installs it: among the libraries of the `nvidia-cuda-nvrtc` wheel, then by the system's
loader. Nothing is looked for before the first compile.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

from opgraph.engines.fused.cache import cached

__all__ = ["CompileError", "compile_cubin", "compiler_absence"]

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_state: dict[str, Any] = {}


class CompileError(RuntimeError):
    """NVRTC refused a source; the text ends in its log."""


def _candidates() -> list[str]:
    import importlib.util

    found: list[str] = []
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
            found += sorted(
                str(p) for p in Path(root).glob(pattern) if "builtins" not in p.name and "alt" not in p.name
            )
    return [*found, *_SONAMES]


def _library() -> Any:
    """The loaded NVRTC; OSError with what was tried."""
    if "library" not in _state:
        tried = []
        for path in _candidates():
            try:
                _state["library"] = ctypes.CDLL(path)
                break
            except OSError as error:
                tried.append(str(error))
        else:
            raise OSError("NVRTC was not found (pip install nvidia-cuda-nvrtc); tried: " + "; ".join(tried))
    return _state["library"]


def compiler_absence() -> str | None:
    """Why sources cannot be compiled here, or None."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def _version(lib: Any) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _compile(lib: Any, source: str, name: str, options: list[bytes]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        lib, lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode() + b".cu", 0, None, None), ""
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*options)
        result = lib.nvrtcCompileProgram(program, len(options), flags)
        if result:
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            _check(lib, result, log.value.decode(errors="replace"))
        size = ctypes.c_size_t()
        _check(lib, lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "")
        image = ctypes.create_string_buffer(size.value)
        _check(lib, lib.nvrtcGetCUBIN(program, image), "")
        return image.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _check(lib: Any, result: int, log: str) -> None:
    if result:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        text = lib.nvrtcGetErrorString(result).decode()
        raise CompileError(f"NVRTC: {text}\n{log}".rstrip())


def compile_cubin(source: str, name: str, compute_capability: tuple[int, int]) -> bytes:
    """The machine code of `source` for one compute capability, from the disk cache or by NVRTC.

    Raises:
        OSError: NVRTC is not installed.
        CompileError: the source does not compile.
    """
    lib = _library()
    major, minor = compute_capability
    arch = f"sm_{major}{minor}"
    options = [b"--gpu-architecture=" + arch.encode(), b"--std=c++17", b"-default-device", b"--fmad=true"]
    version = _version(lib)
    key = hashlib.sha256("\0".join((source, name, arch, repr(options), repr(version))).encode()).hexdigest()
    return cached(key, name, lambda: _compile(lib, source, name, options))
