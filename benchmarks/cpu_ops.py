"""The CPU engine's heavy operators against PyTorch on the CPU: time, and memory.

    python benchmarks/cpu_ops.py [--json FILE] [--rounds N] [--threads N]

Both sides get the same float32 arrays and must agree. A round measures one side and then the other, in alternating
order, after a pause in which the other's idle threads fall asleep; the ratio is the median over the rounds of ours /
peer. Gated delta rule: 4096 tokens of one sequence, 4 heads, K = V = 128; the peer is the chunked algorithm (C = 64, WY
form, states carried from chunk to chunk) in torch operators, which is how it is done where no GPU kernel serves. Scaled
dot product attention [8, 12, 512, 64]: the peer is torch.nn.functional.scaled_dot_product_attention.

Memory: inputs and outputs and the most that a call of ours allocates at a time, over inputs and outputs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import missed, print_rows, report, significant, write_json

CHUNK = 64
TIME_BOUNDS = {"cpu/gdn_fwd/4096x4x128": 3.0, "cpu/sdpa_fwd/8x12x512x64": 2.5}
MEMORY_BOUND = 3.0
MIN_ROUNDS = 7
ROUND_SECONDS = 0.4  # each side runs at least this long per round
PAUSE_SECONDS = 0.2  # before each side: the other's idle BLAS and OpenMP threads go on spinning for a while
MAX_DIFFERENCE = 1e-4  # between the two sides' results, whose elements are of the order of 1


class Case:
    """One operator, both sides built. `arrays` are ours: inputs and outputs."""

    def __init__(self, name: str, peer_name: str) -> None:
        self.name = name
        self.peer_name = peer_name
        self.arrays: list[Any] = []
        self.ours: Callable[[], object]
        self.peer: Callable[[], object]
        self.difference: float

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    """O [T, H, V] of one sequence from zeros, T a multiple of the chunk; with L, P, U, W as the WY form has them.

    W and U0 of all chunks are made together, then the state walks over the chunks: U = U0 - W S.
    """
    import torch

    tokens, heads, keys = q.shape
    count = tokens // CHUNK

    def chunked(x: Any) -> Any:
        return x.unflatten(0, (count, CHUNK)).movedim(2, 0).contiguous()  # [H, chunks, C, ...]

    q, k, v, g, beta = (chunked(x) for x in (q * keys**-0.5, k, v, g, beta[..., None]))
    sums = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, -math.inf).exp()
    erase = k * beta
    coupling = ((erase @ k.mT) * decay).tril(-1)
    one = torch.eye(CHUNK)
    inverse = torch.linalg.solve_triangular(one + coupling, one.expand_as(coupling), upper=False, unitriangular=True)
    grown = sums.exp()[..., None]
    fresh, erased = inverse @ (v * beta), inverse @ (erase * grown)
    mixing = (q @ k.mT) * decay
    q, k = q * grown, k * (sums[..., -1:] - sums).exp()[..., None]
    end = sums[..., -1].exp()[..., None, None]
    state = torch.zeros(heads, keys, v.shape[-1])
    out = torch.empty_like(v)
    for c in range(count):
        written = fresh[:, c] - erased[:, c] @ state
        out[:, c] = q[:, c] @ state + mixing[:, c] @ written
        state = end[:, c] * state + k[:, c].mT @ written
    return out.movedim(0, 2).flatten(0, 1), state.mT


def gdn_case() -> Case:
    import numpy as np
    import torch

    import opgraph

    case = Case("cpu/gdn_fwd/4096x4x128", "torch chunked")
    tokens, heads, width = 4096, 4, 128
    rng = np.random.default_rng(0)

    def normal(*dim: int) -> Any:
        return rng.standard_normal(dim, np.float32)

    arrays = {port: normal(tokens, heads, width) for port in ("q", "k", "v")}
    for port in ("q", "k"):
        arrays[port] /= np.linalg.norm(arrays[port], axis=-1, keepdims=True)
    arrays["g"] = -np.logaddexp(0, normal(tokens, heads) - 2)
    arrays["beta"] = rng.random((tokens, heads), np.float32)
    boundaries = np.array([0, tokens], np.int32)
    graph = opgraph.pygraph(io_data_type=np.float32)
    tensors = {port: graph.tensor(x.shape, data_type=x.dtype) for port, x in arrays.items()}
    lengths = graph.tensor((2,), data_type=boundaries.dtype)
    o, final, _ = graph.gdn(**tensors, cu_seqlens=lengths, output_final_state=True)
    o.set_output(True)
    final.set_output(True)
    graph.build(engine="cpu", knobs={"precision": "native"})
    outputs = [np.empty(t.get_dim(), np.float32) for t in (o, final)]
    pack = {tensors[port]: x for port, x in arrays.items()} | {lengths: boundaries, o: outputs[0], final: outputs[1]}
    theirs = {port: torch.from_numpy(x) for port, x in arrays.items()}
    case.ours = lambda: graph.execute(pack)
    case.peer = lambda: gated_delta_rule(**theirs)
    case.arrays = [*arrays.values(), boundaries, *outputs]
    case.ours()
    found = gated_delta_rule(**theirs)
    case.difference = max(float(np.abs(a - b[None].numpy().reshape(a.shape)).max()) for a, b in zip(outputs, found))
    return case


def sdpa_case() -> Case:
    import numpy as np
    import torch

    import opgraph

    case = Case("cpu/sdpa_fwd/8x12x512x64", "torch sdpa")
    dim = (8, 12, 512, 64)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(dim, np.float32) for _ in range(3)]
    graph = opgraph.pygraph(io_data_type=np.float32)
    tensors = [graph.tensor(dim) for _ in range(3)]
    o = graph.sdpa(*tensors, attn_scale=dim[-1] ** -0.5)[0].set_output(True)
    graph.build(engine="cpu", knobs={"precision": "native"})
    out = np.empty(dim, np.float32)
    pack = dict(zip(tensors, arrays)) | {o: out}
    theirs = [torch.from_numpy(x) for x in arrays]
    case.ours = lambda: graph.execute(pack)
    case.peer = lambda: torch.nn.functional.scaled_dot_product_attention(*theirs)
    case.arrays = [*arrays, out]
    case.ours()
    case.difference = float(np.abs(out - case.peer().numpy()).max())
    return case


def seconds_per_call(call: Callable[[], object]) -> float:
    """The cost of one call, of as many as fill a round, after a pause and one call that does not count."""
    time.sleep(PAUSE_SECONDS)
    call()
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= ROUND_SECONDS:
            return elapsed / count


def time_row(case: Case, rounds: int, threads: int) -> dict[str, Any]:
    sides = [("ours", case.ours), ("peer", case.peer)]
    samples: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(rounds + 1):
        for name, call in sides if turn % 2 else sides[::-1]:
            seconds = seconds_per_call(call)
            if turn:  # the first round warms up
                samples[name].append(seconds * 1e3)
    ratios = [a / b for a, b in zip(samples["ours"], samples["peer"], strict=True)]
    return {
        "case": case.name,
        "metric": "ms",
        "ours": significant(statistics.median(samples["ours"])),
        "peer": significant(statistics.median(samples["peer"])),
        "peer_name": case.peer_name,
        "ratio": significant(statistics.median(ratios)),
        "median_ratio": significant(statistics.median(ratios)),
        "bound": TIME_BOUNDS[case.name],
        "method": f"median of {rounds} interleaved rounds of {ROUND_SECONDS} s, {threads} threads",
    }


def memory_row(case: Case) -> dict[str, Any]:
    case.ours()
    tracemalloc.start()
    case.ours()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ratio = significant((case.bytes + peak) / case.bytes)
    return {
        "case": case.name,
        "metric": "peak_bytes",
        "ours": case.bytes + peak,
        "peer": case.bytes,
        "peer_name": "inputs and outputs",
        "ratio": ratio,
        "median_ratio": ratio,
        "bound": MEMORY_BOUND,
        "method": "tracemalloc peak of one call, plus inputs and outputs",
    }


def measure(rounds: int, threads: int) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(threads)
    rows = []
    with torch.inference_mode():
        for make in (gdn_case, sdpa_case):
            case = make()
            if not case.difference <= MAX_DIFFERENCE:
                sys.exit(f"{case.name}: the two sides differ by {case.difference:.1e}")
            rows += [time_row(case, rounds, threads), memory_row(case)]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, commit and rows")
    parser.add_argument("--rounds", type=int, default=2 * MIN_ROUNDS + 1, help=f"at least {MIN_ROUNDS}")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: at least {MIN_ROUNDS}")
    # Read by the BLAS behind NumPy when it is loaded, so before the first import of numpy.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = str(options.threads)
    rows = measure(options.rounds, options.threads)
    print_rows(rows)
    if options.json:
        write_json(options.json, report(rows, "opgraph", "numpy", "torch"))
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
