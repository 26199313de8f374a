"""Throughput of examples/minilm.py against the same network in PyTorch eager mode, on the CPU.

    python benchmarks/minilm.py [--json FILE] [--rounds N] [--threads N]

Both sides get the same token ids, lengths and weights (float32) and return unit-length embeddings;
tokenizing is not measured. A round measures one side and then the other, in alternating order; a row holds
the medians over the rounds. The peer is written with `torch.nn.functional` under `inference_mode`, with one
fused QKV projection like ours, and leaves the attention mask out where no sentence is padded: the fastest
eager form.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES = ((32, 32, 0.50), (32, 128, 0.45))  # batch, tokens per sentence, least ratio ours / peer
MIN_ROUNDS = 7
ROUND_SECONDS = 0.4  # each side runs at least this long per round
PAUSE_SECONDS = 0.2  # before each side: the other's idle BLAS and OpenMP threads go on spinning for a while
MAX_DIFFERENCE = 1e-5  # between the two sides' embeddings; more means that they do not compute the same thing


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("minilm_example", ROOT / "examples" / "minilm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TorchMiniLM:
    """The network of the example in torch eager, on the example's own weight arrays."""

    def __init__(self, example: Any, model: Any) -> None:
        import torch

        self.torch = torch
        self.heads, self.epsilon = example.HEADS, example.EPSILON
        tensor = torch.from_numpy
        self.words, self.positions = tensor(model.words), tensor(model.positions)
        self.embedding = {name: tensor(array) for name, array in model.embedding_weights.items()}
        self.layers = [{name: tensor(array) for name, array in w.items()} for w in model.layer_weights]

    def forward(self, ids: Any, lengths: Any) -> Any:
        torch, F = self.torch, self.torch.nn.functional
        batch, length = ids.shape
        width = self.words.shape[1]
        with torch.inference_mode():
            keep = torch.arange(length) < lengths[:, None]
            mask = None if bool(keep.all()) else keep[:, None, None, :]
            e = self.embedding
            x = F.embedding(ids, self.words) + self.positions[:length]
            x = F.layer_norm(x, (width,), e["embedding_scale"], e["embedding_bias"], self.epsilon)
            for w in self.layers:
                qkv = F.linear(x, w["qkv_weight"], w["qkv_bias"])
                q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                a = a.transpose(1, 2).reshape(batch, length, width)
                x = x + F.linear(a, w["projection_weight"], w["projection_bias"])
                x = F.layer_norm(x, (width,), w["attention_scale"], w["attention_bias"], self.epsilon)
                inner = F.gelu(F.linear(x, w["inner_weight"], w["inner_bias"]))
                x = x + F.linear(inner, w["outer_weight"], w["outer_bias"])
                x = F.layer_norm(x, (width,), w["output_scale"], w["output_bias"], self.epsilon)
            weights = keep.to(x.dtype) / lengths[:, None]
            return F.normalize(torch.einsum("bs,bsd->bd", weights, x), dim=1)


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """Rate of `call`, repeated for at least `seconds`, after a pause and one call that does not count."""
    time.sleep(PAUSE_SECONDS)
    call()
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count / elapsed


def measure(rounds: int, threads: int) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    example = load_example()
    model = example.MiniLM()
    peer = TorchMiniLM(example, model)
    rng = np.random.default_rng(0)
    rows = []
    for batch, length, bound in CASES:
        ids = rng.integers(1000, len(model.words), (batch, length))
        full = np.full(batch, length, np.int32)
        ragged = rng.integers(1, length + 1, batch).astype(np.int32)
        ids_t = torch.from_numpy(ids)
        for lengths in (ragged, full):
            theirs = peer.forward(ids_t, torch.from_numpy(lengths)).numpy()
            difference = np.abs(model.forward(ids, lengths) - theirs).max()
            if not difference <= MAX_DIFFERENCE:
                sys.exit(f"batch {batch}, length {length}: the two sides differ by {difference:.1e}")
        lengths_t = torch.from_numpy(full)
        sides: list[tuple[str, Callable[[], object]]] = [
            ("ours", lambda ids=ids, full=full: model.forward(ids, full)),
            ("peer", lambda ids_t=ids_t, lengths_t=lengths_t: peer.forward(ids_t, lengths_t)),
        ]
        rates: dict[str, list[float]] = {"ours": [], "peer": []}
        for turn in range(rounds + 1):
            for name, call in sides if turn % 2 else sides[::-1]:
                rate = calls_per_second(call, ROUND_SECONDS)
                if turn:  # the first round warms up
                    rates[name].append(batch * rate)
        case = f"minilm/batch{batch}/len{length}"
        ours, eager = (statistics.median(rates[name]) for name in ("ours", "peer"))
        print(f"{case:24} ours {ours:7.1f}/s  torch {eager:7.1f}/s  ratio {ours / eager:.3f}  bound {bound}")
        method = f"median of {rounds} interleaved rounds of {ROUND_SECONDS} s, {threads} threads"
        rows.append(
            {
                "case": case,
                "metric": "sentences_per_second",
                "ours": round(ours, 1),
                "peer": round(eager, 1),
                "peer_name": "torch eager",
                "ratio": round(ours / eager, 4),
                "bound": bound,
                "method": method,
            }
        )
    return rows


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import numpy as np
    import torch

    import opgraph as og

    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "opgraph": og.__version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "commit": commit,
        "rows": rows,
    }


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
    if options.json:
        options.json.write_text(json.dumps(report(rows), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
