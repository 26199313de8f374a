"""Compiled kernels on disk, by content: the key holds source, constants, target and compiler version.

An entry is written beside its place and renamed into it, so a reader never sees half of one. A lock file keeps two
processes from compiling the same kernel at once; a lock that outlives its timeout is passed by, with a warning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LOCK_SECONDS", "cache_folder", "cached"]

LOCK_SECONDS = 120.0  # longer than any one kernel takes to compile
_CHECK = 32  # bytes of sha256 in front of an entry: a damaged one is compiled again


def cache_folder() -> Path:
    """`OPGRAPH_CACHE`, else `opgraph` in the user's cache folder."""
    root = os.environ.get("OPGRAPH_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgraph"


def _read(path: Path) -> bytes | None:
    import hashlib

    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[_CHECK:]
    return body if hashlib.sha256(body).digest() == data[:_CHECK] else None


def _write(path: Path, body: bytes) -> None:
    import hashlib

    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(hashlib.sha256(body).digest() + body)
    os.replace(beside, path)


def _lock(path: Path, seconds: float) -> bool:
    """Takes the lock file, waiting up to `seconds`; False when it stayed taken."""
    end = time.monotonic() + seconds
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)


def cached(key: str, label: str, make: Callable[[], bytes], *, lock_seconds: float | None = None) -> bytes:
    """The entry of `key`, made by `make` when it is missing. A folder that cannot be written is no error."""
    import logging

    log = logging.getLogger("opgraph")
    folder = cache_folder()
    path = folder / f"{key}.bin"
    found = _read(path)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("kernel cache %s cannot be used (%s)", folder, error)
        return make()
    lock = folder / f"{key}.lock"
    seconds = LOCK_SECONDS if lock_seconds is None else lock_seconds
    held = _lock(lock, seconds)
    try:
        found = _read(path)
        if found is not None:
            return found
        if not held:
            log.warning(
                "the lock %s was held for %.0f s; compiling %s without it (delete the file if stale)",
                lock,
                seconds,
                label,
            )
        log.info("compiling %s, to be kept in %s", label, folder)
        body = make()
        try:
            _write(path, body)
        except OSError as error:
            log.warning("kernel cache %s cannot be written (%s)", folder, error)
        return body
    finally:
        if held:
            lock.unlink(missing_ok=True)
