"""Throughput of examples/minilm.py against the same network in PyTorch eager mode, on the CPU.

    python benchmarks/minilm.py [--json FILE] [--check] [--rounds N] [--threads N]

Both sides get the same token ids, lengths and weights (float32) and return unit-length embeddings;
tokenizing is not measured. A round measures one side and then the other, in alternating order; a row holds
the medians over the rounds. The peer is written with `torch.nn.functional` under `inference_mode`, with one
fused QKV projection like ours, and leaves the attention mask out where no sentence is padded: the fastest
eager form. The ratio is ours / peer, so here a bound is the least allowed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, Sample, interleave, report, significant, write_json

CASES = ((32, 32, 0.50), (32, 128, 0.45))  # batch, tokens per sentence, least ratio ours / peer
MIN_ROUNDS = 7
PACKAGES = ("opgraph", "numpy", "torch", "tokenizers", "safetensors")
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


def rate(call: Callable[[], object], batch: int) -> Sample:
    """Sampler of sentences per second: `call` repeated for ROUND_SECONDS, after a pause and one call."""

    def sample() -> float:
        time.sleep(PAUSE_SECONDS)
        call()
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < ROUND_SECONDS:
            call()
            count += 1
        return batch * count / elapsed

    return sample


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
        for lengths in (ragged, full):
            expected = peer.forward(torch.from_numpy(ids), torch.from_numpy(lengths)).numpy()
            difference = np.abs(model.forward(ids, lengths) - expected).max()
            if not difference <= MAX_DIFFERENCE:
                sys.exit(f"batch {batch}, length {length}: the two sides differ by {difference:.1e}")
        sides = {
            "ours": rate(partial(model.forward, ids, full), batch),
            "peer": rate(partial(peer.forward, torch.from_numpy(ids), torch.from_numpy(full)), batch),
        }
        rates = interleave(sides, rounds)
        ours, eager = statistics.median(rates["ours"]), statistics.median(rates["peer"])
        rows.append(
            {
                "case": f"minilm/batch{batch}/len{length}",
                "metric": "sentences_per_second",
                "ours": significant(ours),
                "peer": significant(eager),
                "peer_name": "torch eager",
                "ratio": significant(ours / eager),
                "bound": bound,
                "method": f"median of {rounds} interleaved rounds of {ROUND_SECONDS} s, {threads} threads",
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, commit and rows")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--rounds", type=int, default=2 * MIN_ROUNDS + 1, help=f"at least {MIN_ROUNDS}")
    parser.add_argument("--threads", type=int, default=2, help="of NumPy's BLAS and of torch")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: at least {MIN_ROUNDS}")
    # Read by the BLAS behind NumPy when it is loaded, so before the first import of numpy.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = str(options.threads)
    rows = measure(options.rounds, options.threads)
    slow = [row for row in rows if not row["ratio"] >= row["bound"]]
    for row in rows:
        rates = f"ours {row['ours']:6.4g}/s  torch {row['peer']:6.4g}/s  ratio {row['ratio']:.3f}"
        print(f"{row['case']:22} {rates}  bound {row['bound']:.2f}{'  MISSED' if row in slow else ''}")
    if options.json:
        write_json(options.json, report(rows, *PACKAGES))
    return 1 if options.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
