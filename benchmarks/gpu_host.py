"""Host time of a call on the GPU, against bare launches and other launchers, in one process.

Each sample drains the device, then times a burst of calls on the host clock; the figure of a burst size is the median
of its samples, and a side's cost is the smallest of those medians (bursts short enough not to fill the launch queue).
Only ratios between sides of one run mean anything: hosts differ by a factor of two.

    python benchmarks/gpu_host.py [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import missed, report, significant, write_json

import opgraph
from opgraph import _native, data_type

BURSTS = (1, 4, 16, 64)
METHOD = "queue drained, bursts of 1, 4, 16, 64 calls, median of 60 samples each, smallest of the bursts; us per call"


def host_us(call: Callable[[], Any], samples: int = 60) -> float:
    """Microseconds of host time per call."""
    for _ in range(50):
        call()
    medians = []
    for burst in BURSTS:
        times = []
        for _ in range(samples):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(burst):
                call()
            times.append((time.perf_counter_ns() - start) / burst / 1e3)
        medians.append(statistics.median(times))
    torch.cuda.synchronize()
    return min(medians)


def bare_us(program: Any, addresses: list[int], stream: int, samples: int = 60) -> float:
    """Microseconds per launch of the program's kernel in a C loop with arguments laid out once."""
    medians = []
    for burst in BURSTS:
        times = []
        for _ in range(samples):
            torch.cuda.synchronize()
            times.append(_native.bare_launch_ns(program, addresses, stream, burst) / 1e3)
        medians.append(statistics.median(times))
    return min(medians)


def pointwise8() -> tuple[Any, dict[Any, torch.Tensor], list[torch.Tensor]]:
    """A chain over seven inputs and one output, 4096 float32 elements each."""
    graph = opgraph.pygraph(io_data_type=data_type.FLOAT)
    inputs = [graph.tensor([1, 32, 128], name=f"x{i}") for i in range(7)]
    y = inputs[0]
    for x in inputs[1:]:
        y = graph.add(y, x)
    y.set_output(True)
    graph.build(engine="fused", device="cuda")
    tensors = [torch.randn(1, 32, 128, device="cuda") for _ in range(8)]
    return graph, dict(zip((*inputs, y), tensors, strict=True)), tensors


def row(case: str, ours: float, peer: float, peer_name: str, bound: float | None) -> dict[str, Any]:
    return {
        "case": case,
        "metric": "host us per call",
        "ours": significant(ours),
        "peer": significant(peer),
        "peer_name": peer_name,
        "ratio": significant(ours / peer),
        "bound": bound,
        "method": METHOD,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound is missed")
    arguments = parser.parse_args()

    import tvm_ffi

    graph, pack, tensors = pointwise8()
    nop = tvm_ffi.get_global_func("testing.nop")
    stream = torch.cuda.current_stream().cuda_stream
    order = sorted(pack, key=lambda tensor: tensor.uid)
    addresses = [pack[t].data_ptr() for t in order]
    program = graph.plans[0].compiled.run
    others = [torch.randn_like(t) for t in tensors]
    fresh = dict(zip(pack, others, strict=True))
    packs = [pack, fresh]
    turn = [0]

    def execute() -> None:
        turn[0] ^= 1
        graph.execute(packs[turn[0]])

    buffers, uids = [pack[t] for t in order], [t.uid for t in order]
    empty = host_us(lambda: None)
    t = host_us(lambda: nop(*tensors))
    bare = bare_us(program, addresses, stream)
    ours = host_us(execute)
    call = graph.bind(pack)
    rows = [
        row("fused/pointwise8/execute", ours, bare + 0.9 * t, "bare cuLaunchKernelEx + 0.9 x tvm-ffi empty call", 1.0),
        row(
            "fused/pointwise8/ordered",
            host_us(lambda: graph.execute(buffers, tensor_uids=uids)),
            bare + 0.9 * t,
            "the same",
            None,
        ),
        row("fused/pointwise8/bound", host_us(call), bare, "bare cuLaunchKernelEx", None),
        row("floor/bare_launch", bare, t, "tvm-ffi empty call, 8 torch tensors", None),
        row("floor/empty_call", empty, t, "the same", None),
        row(
            "peer/torch_add",
            host_us(lambda: torch.add(tensors[0], tensors[1], out=tensors[7])),
            bare,
            "bare cuLaunchKernelEx",
            None,
        ),
    ]
    for r in rows:
        sides = f"ours {r['ours']:8.3f} us  peer {r['peer']:8.3f} us  ratio {r['ratio']:6.3f}"
        print(f"{r['case']:32} {sides}  bound {r['bound']}")
    if arguments.json:
        content = report(rows, "opgraph", "torch", "apache-tvm-ffi", "numpy")
        content["machine"]["gpu"] = torch.cuda.get_device_name()
        content["machine"]["driver"] = _native.describe_device(0)["driver_version"]
        write_json(arguments.json, content)
    return 1 if arguments.check and missed(rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
