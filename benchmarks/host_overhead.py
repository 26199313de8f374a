"""Host time of a call, of the package's import, and of declaring a graph, each against its peer.

    python benchmarks/host_overhead.py [--json FILE] [--check] [--rounds N]

A call is `execute` on the null plan, which does nothing: what is left is looking the operands up, reading
them and checking them against the contract. Ours and the peer take turns inside every round, a window of a
fraction of a millisecond each; a row's ratio is that of the two minima over the rounds. `--check` exits with 1
when a bound is missed.

Every torch tensor here belongs to one Python object alone. One that C++ holds as well (autograd, a view, an
owning export) is read in half the time, by either side.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    WINDOW_S,
    Loop,
    Sample,
    interleave,
    missed,
    print_rows,
    report,
    row,
    significant,
    slope,
    write_json,
)

OPERANDS = 8
SLOPE_SIZES = (8, 16, 24, 32)
SHAPE = (2, 3)
MIN_ROUNDS = 15
Measured = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # rows, and entries of the ladder
PACKAGES = ("opgraph", "numpy", "torch", "jax", "jaxlib", "ml_dtypes", "apache-tvm-ffi")


def sum_graph(operands: int, data_type: Any = None, engine: str = "null", **options: Any) -> tuple[Any, list[Any]]:
    """A built graph that adds `operands - 1` inputs up, and its tensors: the inputs, then the output."""
    import opgraph as og

    graph = og.pygraph(io_data_type=data_type or og.data_type.FLOAT, **options)
    inputs = [graph.tensor(SHAPE, name=f"x{i}") for i in range(operands - 1)]
    total = inputs[0]
    for tensor in inputs[1:]:
        total = graph.add(total, tensor)
    total.set_output(True)
    graph.build(engine=engine, device="cpu")
    return graph, [*inputs, total]


def torch_tensors(count: int) -> list[Any]:
    import torch

    return [torch.zeros(SHAPE) for _ in range(count)]


def mapping_call(graph: Any, tensors: list[Any], buffers: list[Any]) -> Loop:
    return Loop("graph.execute(mapping)", graph=graph, mapping=dict(zip(tensors, buffers, strict=True)))


def ordered_call(graph: Any, tensors: list[Any], buffers: list[Any]) -> Loop:
    uids = [tensor.uid for tensor in tensors]
    return Loop("graph.execute(buffers, tensor_uids=uids)", graph=graph, buffers=buffers, uids=uids)


def positional_call(function: Any, arguments: list[Any]) -> Loop:
    names = {f"a{i}": argument for i, argument in enumerate(arguments)}
    return Loop(f"function({', '.join(names)})", function=function, **names)


def borrow_loop(buffers: list[Any]) -> Sample:
    """Nanoseconds of one pass of the exchange table's borrowing call over the buffers, in a native loop."""
    from opgraph._native import borrow_loop_ns

    repeat = max(1, int(WINDOW_S * 1e9 / borrow_loop_ns(buffers, 1000)))
    return lambda: borrow_loop_ns(buffers, repeat)


# ---- calls


def measure_calls(rounds: int) -> Measured:
    """Rows of `execute` and of the bound call, and the ladder of baselines."""
    import ml_dtypes
    import numpy as np
    import torch
    import tvm_ffi

    import opgraph as og

    graph, tensors = sum_graph(OPERANDS)
    flexible, flexible_tensors = sum_graph(OPERANDS, is_override_shape_enabled=True)
    half, half_tensors = sum_graph(OPERANDS, og.data_type.BFLOAT16)
    nop = tvm_ffi.get_global_func("testing.nop")
    buffers = torch_tensors(OPERANDS)
    a, b, out = (np.zeros(SHAPE, np.float32) for _ in range(3))
    ta, tb, tout = torch_tensors(3)
    bound = graph.bind(dict(zip(tensors, torch_tensors(OPERANDS), strict=True)))

    def empty() -> None:
        pass

    overrides = Loop(
        "graph.execute(mapping, override_uids=uids, override_shapes=shapes, override_strides=strides)",
        graph=flexible,
        mapping=dict(zip(flexible_tensors, buffers, strict=True)),
        uids=[tensor.uid for tensor in flexible_tensors],
        shapes=[[1, 3]] * OPERANDS,
        strides=[[3, 1]] * OPERANDS,
    )
    numpy_buffers = [np.zeros(SHAPE, np.float32) for _ in tensors]
    bf16_buffers = [np.zeros(SHAPE, ml_dtypes.bfloat16) for _ in tensors]
    sides: dict[str, Sample] = {
        "empty Python call": Loop("empty()", empty=empty),
        "bound call": Loop("call()", call=bound),
        "tvm-ffi empty call, no argument": positional_call(nop, []),
        "numpy.add(out=)": Loop("add(a, b, out=out)", add=np.add, a=a, b=b, out=out),
        "torch.add(out=)": Loop("add(a, b, out=out)", add=torch.add, a=ta, b=tb, out=tout),
        "exchange table's borrowing call, native loop": borrow_loop(buffers),
        "execute, ordered": ordered_call(graph, tensors, buffers),
        "tvm-ffi empty call": positional_call(nop, buffers),
        "execute, mapping": mapping_call(graph, tensors, buffers),
        "execute, overrides": overrides,
        "execute, mapping, numpy": mapping_call(graph, tensors, numpy_buffers),
        "execute, mapping, ml_dtypes bfloat16": mapping_call(half, half_tensors, bf16_buffers),
    }
    samples = interleave(sides, rounds)
    method = f"{OPERANDS} operands {SHAPE}, 7 added up into 1; minima of {rounds} interleaved rounds"
    mapping, call = samples["execute, mapping"], samples["tvm-ffi empty call"]

    def against(case: str, side: str, peer: list[float], peer_name: str, bound: float, note: str = "") -> Any:
        return row(case, "ns per call", samples[side], peer, peer_name, bound, method + note)

    mine, theirs = "execute/null/mapping/torch/8", "tvm-ffi empty call, same tensors"
    bf16 = "execute, mapping, ml_dtypes bfloat16"
    rows = [
        against(mine, "execute, mapping", call, theirs, 0.70),
        against("execute/null/ordered/torch/8", "execute, ordered", call, theirs, 0.55),
        against("execute/null/mapping/numpy/8", "execute, mapping, numpy", mapping, mine, 1.0),
        against("execute/null/mapping/ml_dtypes_bf16/8", bf16, mapping, mine, 1.0),
        against(
            "execute/null/overrides/torch/8",
            "execute, overrides",
            mapping,
            mine,
            1.8,
            f"; each operand overridden to (1, 3) inside its {SHAPE} buffer, lists made once",
        ),
        against("bound/null/torch/8", "bound call", mapping, mine, 0.10),
    ]
    return rows, steps(samples)


def measure_slopes(rounds: int) -> Measured:
    """Cost of one more torch operand, against one more borrowing call."""
    sides: dict[str, Sample] = {}
    for operands in SLOPE_SIZES:
        graph, tensors = sum_graph(operands)
        buffers = torch_tensors(operands)
        sides[f"mapping {operands}"] = mapping_call(graph, tensors, buffers)
        sides[f"ordered {operands}"] = ordered_call(graph, tensors, buffers)
        sides[f"borrow {operands}"] = borrow_loop(buffers)
    samples = interleave(sides, rounds)

    def slope_of(kind: str, pick: Callable[[list[float]], float]) -> float:
        return slope(SLOPE_SIZES, [pick(samples[f"{kind} {operands}"]) for operands in SLOPE_SIZES])

    rows = []
    for form, bound in (("mapping", 1.45), ("ordered", 1.25)):
        line = row(
            f"execute/null/{form}/torch/slope",
            "ns per operand",
            [slope_of(form, min)],
            [slope_of("borrow", min)],
            "exchange table's borrowing call in a native loop, same tensors",
            bound,
            f"least-squares slope over {SLOPE_SIZES} operands of the minima of {rounds} interleaved rounds",
        )
        line["median_ratio"] = significant(slope_of(form, median) / slope_of("borrow", median))
        rows.append(line)
    return rows, []


def measure_jax(rounds: int) -> Measured:
    """JAX arrays are inputs only: eight of them, and a NumPy output."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax.numpy as jnp
    import numpy as np

    graph, tensors = sum_graph(OPERANDS + 1)
    arrays = [(jnp.zeros(SHAPE, jnp.float32) + i).block_until_ready() for i in range(OPERANDS)]
    names: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arrays)}
    sides: dict[str, Sample] = {
        "ours": mapping_call(graph, tensors, [*arrays, np.zeros(SHAPE, np.float32)]),
        "peer": Loop("; ".join(f"{name}.__dlpack__()" for name in names), **names),
    }
    samples = interleave(sides, rounds)
    rows = [
        row(
            "execute/null/mapping/jax/8",
            "ns per call",
            samples["ours"],
            samples["peer"],
            "eight __dlpack__ calls on the same arrays",
            1.2,
            f"9 operands {SHAPE}, 8 JAX arrays added up into 1 NumPy array; minima of {rounds} interleaved rounds",
        )
    ]
    return rows, []


def measure_slots(rounds: int) -> Measured:
    """Slots of a Python engine's pack as arguments of a tvm-ffi function."""
    import tvm_ffi

    from opgraph.engines.support import Candidate, CompiledPlan, Engine
    from opgraph.planning.registry import registry

    kept: list[Any] = []

    class Keeper(Engine):
        """Keeps the slots of the calls it sees."""

        name = "benchmark-keeper"
        engine_ids = {20999: {}}  # noqa: RUF012
        named_only = True

        def propose(self, spec: Any, target: Any) -> list[Candidate]:
            return [Candidate(self.name, 20999)]

        def compile(self, spec: Any, candidate: Any, target: Any) -> CompiledPlan:
            return CompiledPlan(lambda pack: kept.extend(pack[i] for i in range(len(pack))))

    registry.register(Keeper())
    try:
        graph, tensors = sum_graph(OPERANDS, engine=Keeper.name)
    finally:
        registry.unregister(Keeper.name)
    # The slots stand for other tensors than the peer's: a slot keeps its buffer's object.
    graph.execute(dict(zip(tensors, torch_tensors(OPERANDS), strict=True)))
    nop = tvm_ffi.get_global_func("testing.nop")
    sides: dict[str, Sample] = {
        "ours": positional_call(nop, kept),
        "peer": positional_call(nop, torch_tensors(OPERANDS)),
    }
    samples = interleave(sides, rounds)
    rows = [
        row(
            "slot/tvm_ffi_argument/8",
            "ns per call",
            samples["ours"],
            samples["peer"],
            "the same call with torch tensors",
            0.65,
            f"the empty tvm-ffi function with the 8 slots of a call; minima of {rounds} interleaved rounds",
        )
    ]
    return rows, []


# ---- import


def measure_import(rounds: int) -> Measured:
    """CPU time of the importing thread, which other work on the machine disturbs least."""
    program = "import time\nstart = time.thread_time()\nimport {}\nprint(time.thread_time() - start)"

    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def importing(package: str) -> Sample:
            command = [sys.executable, "-c", program.format(package)]

            def sample() -> float:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                return float(done.stdout) * 1e3

            sample()  # compiles both sides' modules into the cache
            return sample

        samples = interleave({"ours": importing("opgraph"), "peer": importing("numpy")}, rounds)
    rows = [
        row(
            "import/opgraph",
            "ms",
            samples["ours"],
            samples["peer"],
            "import numpy",
            1.3,
            "fresh processes, bytecode cached, CPU time of the importing thread; minima of "
            f"{rounds} interleaved rounds",
        )
    ]
    return rows, []


# ---- declaring


def declare(nodes: int) -> Any:
    """A graph of `nodes` operators: layers of matmul, bias and activation with a residual sum."""
    import opgraph as og

    graph = og.pygraph(io_data_type=og.data_type.HALF, compute_data_type=og.data_type.FLOAT)
    x = graph.tensor((1, 64, 64), name="x")
    for layer in range(nodes // 4):
        weight = graph.tensor((1, 64, 64), name=f"weight{layer}")
        bias = graph.tensor((1, 1, 64), name=f"bias{layer}")
        x = graph.add(graph.gelu(graph.bias(graph.matmul(x, weight), bias)), x)
    x.set_output(True)
    graph.validate()
    return graph


class PlainTensor:
    """A slotted object with the fields of a Tensor, filled the plain way."""

    __slots__ = tuple(f"f{i}" for i in range(19))

    def __init__(self, name: str, dim: tuple[int, ...], stride: tuple[int, ...], data_type: Any) -> None:
        self.f0, self.f1, self.f2, self.f3 = name, dim, stride, data_type
        self.f4 = self.f5 = self.f6 = self.f7 = self.f8 = self.f9 = self.f10 = self.f11 = None
        self.f12 = self.f13 = self.f14 = self.f15 = self.f16 = self.f17 = self.f18 = None


def measure_declaring(rounds: int) -> Measured:
    """The row of a large graph; for the ladder, what one tensor costs beyond an object with its fields."""
    import opgraph as og

    assert len(declare(1000).nodes) == 1000
    big = Loop("declare(1000)", declare=declare)
    kind, dim, stride = og.data_type.HALF, (4, 64, 64), (4096, 64, 1)

    def tensors(count: int = 200) -> float:
        # A graph of its own per window: what it holds must not grow with the number of rounds.
        graph = og.pygraph()
        names = iter([f"t{i}" for i in range(count)])
        space = {"tensor": graph.tensor, "dim": dim, "stride": stride, "kind": kind, "names": names}
        timer = timeit.Timer("tensor(dim, stride, kind, name=next(names))", globals=space)
        return timer.timeit(count) / count * 1e9

    sides: dict[str, Sample] = {
        "graph.tensor()": tensors,
        "plain slotted object, 19 fields": Loop(
            "Plain('', dim, stride, kind)", Plain=PlainTensor, dim=dim, stride=stride, kind=kind
        ),
    }
    samples = interleave(sides, 20 * rounds)
    seconds = [big() * 1e-9 for _ in range(rounds)]
    rows = [
        row(
            "graph/1000_nodes_seconds",
            "s",
            seconds,
            [0.1] * rounds,
            "0.1 s",
            1.0,
            f"declares 1,000 nodes and 501 input tensors and validates; minimum of {rounds} rounds",
        )
    ]
    return rows, steps(samples)


def steps(samples: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Entries of the ladder."""
    return [
        {"case": name, "ns": significant(min(values)), "median_ns": significant(median(values))}
        for name, values in samples.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, commit and rows")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--rounds", type=int, default=1000, help=f"of the calls; at least {MIN_ROUNDS}")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: at least {MIN_ROUNDS}")
    rounds, few = options.rounds, min(options.rounds, 40)
    rows: list[dict[str, Any]] = []
    ladder: list[dict[str, Any]] = []
    for measure, count in (
        (measure_calls, rounds),
        (measure_slopes, 2 * rounds),  # a difference of minima needs better ones
        (measure_jax, rounds),
        (measure_slots, 4 * rounds),  # the machine's speed changes in steps: long enough to meet its best on both sides
        (measure_declaring, few),
        (measure_import, few),
    ):
        more, entries = measure(count)
        rows += more
        ladder += entries
    print_rows(rows)
    print("\nladder (ns, minimum and median)")
    for step in ladder:
        print(f"  {step['case']:46} {step['ns']:9.1f} {step['median_ns']:9.1f}")
    if options.json:
        write_json(options.json, {**report(rows, *PACKAGES), "ladder": ladder})
    failed = missed(rows)
    if failed:
        print(f"\nmissed: {', '.join(failed)}")
    return 1 if options.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
