"""Threads of one call: started for it, joined before it returns: a fork finds none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_together", "usable_cores"]


def usable_cores() -> int:
    """How many threads one call may use: the cores of this process, or fewer where OMP_NUM_THREADS says so.

    That variable is what the BLAS of NumPy and other libraries go by; OPENBLAS_NUM_THREADS comes before it.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return min(cores, int(text))
    return cores


def run_together(work: Callable[[], None], count: int) -> None:
    """Runs `work()` on up to `count` threads at once, this one included; raises the first exception.

    Starting a thread takes about 50 us. `work` takes its share from a queue and returns when that is empty.
    """
    count = min(count, usable_cores()) if count > 1 else 1
    if count <= 1:
        work()
        return
    from threading import Thread  # needed on this path only

    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [Thread(target=guarded, name=f"opgraph-{i}") for i in range(1, count)]
    try:
        for thread in threads:
            thread.start()
        work()
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if raised:
        raise raised[0]
