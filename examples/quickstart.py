"""One graph, gelu(x @ w + b), executed on the buffers of several libraries.

    python examples/quickstart.py

The graph is described and built once. `execute` then takes whatever holds the data: NumPy, torch and JAX
arrays, or bare addresses. For each kind the script prints the plan, the error against the CPU engine in
float64, and the time of a call; for a library that is not installed, it says so.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import opgraph as og

ROWS, DEPTH, COLUMNS = 32, 128, 64


def declare() -> Any:
    """gelu(x @ w + b) in float32: operands x, w, b and y."""
    float32 = og.data_type.FLOAT
    graph = og.pygraph("quickstart", io_data_type=float32, compute_data_type=float32)
    x = graph.tensor(dim=[ROWS, DEPTH], name="x")
    w = graph.tensor(dim=[DEPTH, COLUMNS], name="w")
    b = graph.tensor(dim=[1, COLUMNS], name="b")
    y = graph.gelu(graph.bias(graph.matmul(x, w), b))
    y.set_name("y").set_output(True)
    return graph


def from_numpy(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return arrays


def from_torch(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def from_jax(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """JAX arrays never change, so they are inputs; the result goes to a NumPy array."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    return {name: array if name == "y" else jax.numpy.asarray(array) for name, array in arrays.items()}


def from_addresses(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """An int is an address: shape, strides and data type are the graph's."""
    return {name: array.ctypes.data for name, array in arrays.items()}


KINDS: dict[str, Callable[[dict[str, np.ndarray]], dict[str, Any]]] = {
    "numpy": from_numpy,
    "torch": from_torch,
    "jax": from_jax,
    "bare addresses": from_addresses,
}


def microseconds_per_call(call: Callable[[], object], calls: int = 200, repeats: int = 5) -> float:
    """Best of `repeats` averages over `calls` calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def measure(kind: str) -> str:
    """One line of the report: how `graph.execute` fares on this kind of buffer."""
    rng = np.random.default_rng(0)
    shapes = {"x": (ROWS, DEPTH), "w": (DEPTH, COLUMNS), "b": (COLUMNS,), "y": (ROWS, COLUMNS)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    exact = np.empty(shapes["y"], np.float32)
    oracle = declare()
    oracle.build(device="cpu", engine="cpu", knobs={"precision": "float64"})
    oracle.execute({**arrays, "y": exact})

    graph = declare()
    graph.build(device="cpu")
    plan = next(plan for plan in graph.plans if plan.compiled is not None)
    arrays["y"].fill(np.nan)
    buffers = KINDS[kind](arrays)
    graph.execute(buffers)
    error = np.abs(arrays["y"] - exact).max() / np.abs(exact).max()
    took = microseconds_per_call(lambda: graph.execute(buffers))
    return f"{kind:15} {plan!r}  error {error:.1e}  {took:6.1f} us per call"


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(sys.argv[1]))
        return
    # torch and JAX take a second each to import: two processes do that side by side.
    libraries = [kind for kind in KINDS if kind in ("torch", "jax") and importlib.util.find_spec(kind)]
    command = [sys.executable, __file__]
    children = {k: subprocess.Popen([*command, k], stdout=subprocess.PIPE, text=True) for k in libraries}
    lines = {kind: child.communicate()[0].rstrip() for kind, child in children.items()}
    for kind in ("numpy", "bare addresses"):
        lines[kind] = measure(kind)
    for kind in KINDS:
        print(lines.get(kind, f"{kind:15} not installed"))
    sys.exit(any(child.returncode for child in children.values()))


if __name__ == "__main__":
    main()
