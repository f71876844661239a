"""Calibration and discrimination of the support of tokens, in a store's own domain and outside of it.

    python benchmarks/support.py CORPUS... --store 20000 --limit 2000            # minutes on two cores
    python benchmarks/support.py CORPUS... --limit 60000 --device cuda           # whole corpora on a GPU

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. Each store is built from
train and tuned on valid of its own corpus; then support is measured on the test text of every corpus. The figures are
those of the mixture's most probable token at every position: the share that is right, the mean support, the expected
calibration error (15 bins with equal numbers of tokens) of support and of the probability itself, and the AUROC for
right and wrong tokens of support, of the probability and of the negative entropy. The last column is the mean support
of the tokens of the text itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import knnlm
from knnlm.corpus import Document
from knnlm.evaluation.evaluate import first_documents
from knnlm.evaluation.support import measure_support
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from perplexity import add_store_options, measure_stores, parser_for, split

COLUMNS = (
    *("tokens", "right", "support", "ece", "ece_probability"),
    *("auroc", "auroc_probability", "auroc_entropy", "text_support"),
)


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    texts = {corpus.name: list(first_documents(split(corpus, "test"), lm, options.limit)) for corpus in options.corpus}
    show(measure_stores(options, lambda corpus, folder: measure(corpus, folder / "store", lm, texts, options)))


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_store_options(parser)
    parser.add_argument("--valid", type=int, help="tokens of valid to tune on (default: those of --limit)")
    parser.add_argument("--memories", default="knn,cache,ngram")
    parser.add_argument("--weights", default="gated", help="fixed, fitted, buckets or gated")
    parser.add_argument("--batch", type=int, help="tokens in a batch when measuring")
    return parser.parse_args()


def measure(
    corpus: Path, path: Path, lm: CausalLM, texts: dict[str, list[Document]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Build and tune the store of one corpus; return a row for the text it was tuned on and the test text of each."""
    store = knnlm.build(first_documents(split(corpus, "train"), lm, options.store), path, lm=lm)
    mixture = Mixture.open(path, lm, memories=options.memories, use_tuned=False)
    valid = first_documents(split(corpus, "valid"), lm, options.valid or options.limit)
    tuning = mixture.tune(valid, weights=options.weights)
    if tuning.support_figures is None:
        raise SystemExit(f"{corpus}: {tuning.tokens} tokens are too few to train support. Use a larger --valid.")
    rows = [{"store": corpus.name, "text": "valid, out of fold", **tuning.support_figures.as_dict()}]
    for name, documents in texts.items():
        figures = measure_support(mixture, documents, batch_tokens=options.batch)
        rows.append({"store": corpus.name, "text": name, **figures.as_dict()})
        print(json.dumps(rows[-1]), flush=True)
    store.close()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| store | text |", " | ".join(name.replace("_", " ") for name in COLUMNS), "|")
    print("|---|---|", "---|" * len(COLUMNS))
    for row in rows:
        figures = [row[name] for name in COLUMNS]
        shown = [f"{figures[0]:,}", *("-" if value is None else f"{value:.4f}" for value in figures[1:])]
        print(f"| {row['store']} | {row['text']} |", " | ".join(shown), "|")


if __name__ == "__main__":
    main()
