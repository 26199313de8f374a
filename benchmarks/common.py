"""Shared by the benchmarks: interleaved timing, the form of a result row, the report around the rows.

A claim is a ratio between two sides that were timed alternately on the same machine in the same run, never a
time. Other work on the machine only ever adds time, so a side's cost is its minimum over many short windows;
the median of the per-round ratios is given next to it and shows how noisy the machine was.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

WINDOW_S = 0.15e-3  # short, so that some windows are free of other work on the machine
WARM_UP = 3

Sample = Callable[[], float]  # one measurement of one side


class Loop:
    """Nanoseconds of one run of a statement: a window of `window_s` seconds per sample, in a compiled loop.

    The statement's names are the keywords. Garbage collection is off inside a window (timeit's rule): it
    would charge one side for the other's objects.
    """

    def __init__(self, statement: str, window_s: float = WINDOW_S, **names: Any) -> None:
        self.statement = statement
        # Bound by the setup, the names are locals of timeit's inner function: a look-up costs next to nothing.
        setup = "\n".join(f"{name} = _names[{name!r}]" for name in names) or "pass"
        self._timer = timeit.Timer(statement, setup, globals={"_names": names})
        self._timer.timeit(WARM_UP)  # first sights are no steady state
        self.calls = 1
        # The least of three: a window that lost the processor says nothing about how many calls fill one.
        while (spent := min(self._timer.repeat(3, self.calls))) < window_s:
            self.calls = max(2 * self.calls, int(self.calls * window_s / max(spent, 1e-7)))

    def __call__(self) -> float:
        return self._timer.timeit(self.calls) / self.calls * 1e9


def interleave(sides: Mapping[str, Sample], rounds: int) -> dict[str, list[float]]:
    """Samples every side once per round, for `rounds` rounds, in alternating order."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides.items())
    for turn in range(rounds):
        for name, sample in order if turn % 2 else order[::-1]:
            samples[name].append(sample())
    return samples


def slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Least-squares slope of costs over sizes."""
    return statistics.linear_regression(sizes, costs).slope


def row(
    case: str,
    metric: str,
    ours: Sequence[float],
    peer: Sequence[float],
    peer_name: str,
    bound: float,
    method: str,
) -> dict[str, Any]:
    """A result row from the samples of the two sides: minima, their ratio, the median ratio of the rounds."""
    least, other = min(ours), min(peer)
    return {
        "case": case,
        "metric": metric,
        "ours": significant(least),
        "peer": significant(other),
        "peer_name": peer_name,
        "ratio": significant(least / other),
        "median_ratio": significant(statistics.median(a / b for a, b in zip(ours, peer, strict=True))),
        "bound": bound,
        "method": method,
    }


def significant(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cases whose ratio is above its bound."""
    return [r["case"] for r in rows if r["bound"] is not None and not r["ratio"] <= r["bound"]]


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    width = max(len(r["case"]) for r in rows)
    print(f"{'case':{width}} {'ours':>10} {'peer':>10} {'ratio':>7} {'median':>7} {'bound':>6}  metric, peer")
    for r in rows:
        bound = "" if r["bound"] is None else f"{r['bound']:.2f}"
        mark = "  MISSED" if missed([r]) else ""
        print(
            f"{r['case']:{width}} {r['ours']:10.4g} {r['peer']:10.4g} {r['ratio']:7.3f} "
            f"{r['median_ratio']:7.3f} {bound:>6}  {r['metric']}, {r['peer_name']}{mark}"
        )


# ---- what a result file says about where it comes from


def machine() -> dict[str, Any]:
    return {"cpu": _processor(), "cores": os.cpu_count(), "system": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the packages that are installed; none of them is imported."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The revision of the checkout, `-dirty` where tracked files differ; empty outside a checkout."""
    told = os.environ.get("OPGRAPH_COMMIT")  # for a copy of the tree without its history
    if told:
        return told
    revision = _git("rev-parse", "HEAD")
    changed = revision and _git("status", "--porcelain", "--untracked-files=no")
    return f"{revision}-dirty" if changed else revision


def report(rows: Sequence[Mapping[str, Any]], *packages: str) -> dict[str, Any]:
    return {"machine": machine(), "versions": versions(*packages), "commit": commit(), "rows": list(rows)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
