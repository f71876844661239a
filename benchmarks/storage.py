"""Bytes per token and perplexity of every key format, on the same text.

    python benchmarks/storage.py CORPUS --store 40000 --limit 3000           # a quarter of an hour on two cores
    python benchmarks/storage.py CORPUS --store 1000000 --limit 20000 --device cuda

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst). All text is read once; each format
is a copy of one float16 store of train. Neighbours are found by exact search among the decoded keys, or with `--index`
by the store's own index, whose bytes are counted too. τ and λ are chosen on valid for every format, and the perplexity
is that of test. Its ratio is to the first format.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import knnlm
from knnlm.datastore.indexes import open_index
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import first_documents
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Logits
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import RetrievedNeighbours, vote
from perplexity import parser_for, split

FORMATS = ("float16", "int8", "pca256-int8", "pca128-int8", "codes96", "codes64", "codes48", "codes32")
TEMPERATURES = (0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8)
WEIGHTS = [step / 50 for step in range(50)]


def main() -> None:
    parser = parser_for(__doc__, corpora="?")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--index", help="auto or a factory string; without it, search is exact")
    parser.add_argument("--k", type=int, default=1024)
    parser.add_argument("--float16-store", type=Path, help="an existing float16 store of train")
    options = parser.parse_args()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        plain = options.float16_store or Path(folder) / "plain"
        if options.float16_store is None:
            knnlm.build(first_documents(split(options.corpus, "train"), lm, options.store), plain, lm=lm)
        texts = [
            read(lm, list(first_documents(split(options.corpus, name), lm, options.limit)))
            for name in ("valid", "test")
        ]
        against = None
        for key_format in options.formats:
            row = measure(plain, Path(folder) / key_format, key_format, texts, options)
            against = against or row["perplexity"]
            print(json.dumps({**row, "ratio": round(row["perplexity"] / against, 4)}))
            sys.stdout.flush()


def read(lm: CausalLM, documents: list[knnlm.Document]) -> tuple[Tensor, Tensor, Tensor]:
    """Read a text once: (N, D) hidden states, (N,) targets, (N,) log-probabilities of the model."""
    tokens = [lm.encode(document.text) for document in documents]
    parts = [
        (reading.keys, reading.targets, Logits(reading.logits).log_prob(reading.targets))
        for reading in lm.read(tokens, lm.window())
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def measure(
    plain: Path, path: Path, key_format: str, texts: list[tuple[Tensor, Tensor, Tensor]], options: argparse.Namespace
) -> dict[str, object]:
    """Store keys in one format, search them, and return its row."""
    begin = time.perf_counter()
    if key_format == "float16":
        path = plain
    else:
        Datastore.open(plain).compress(path, key_format=key_format)
    stored = time.perf_counter()
    spec = Datastore.open(path).build_index(options.index) if options.index else "exact"
    indexed = time.perf_counter()
    store = Datastore.open(path)
    # A GPU that can hold all keys would be searched instead of the index.
    device = "cpu" if options.index else str(texts[0][0].device)
    memory = KnnMemory(store, open_index(store, device=device), k=options.k, knn_temperature=1.0)
    found = [search(memory, keys) for keys, _, _ in texts]
    searched = time.perf_counter()
    valid, test = (losses(some, targets, log_p) for some, (_, targets, log_p) in zip(found, texts, strict=True))
    best = int(valid.argmin())
    temperature, lmbda = TEMPERATURES[best // len(WEIGHTS)], WEIGHTS[best % len(WEIGHTS)]
    return {
        "keys": key_format,
        "index": spec,
        "tokens": store.entry_count,
        "bytes_per_token": round((store.bytes + store.index_bytes) / store.entry_count, 1),
        "perplexity": round(float(test.flatten()[best].exp()), 4),
        "knn_temperature": temperature,
        "lambda": lmbda,
        "store_seconds": round(stored - begin, 1),
        "index_seconds": round(indexed - stored, 1),
        "ms_per_query": round(1e3 * (searched - indexed) / sum(len(text[1]) for text in texts), 3),
    }


def search(memory: KnnMemory, keys: Tensor) -> RetrievedNeighbours:
    parts = [memory.search(some) for some in keys.split(1024)]
    return RetrievedNeighbours(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "distances", "values"))
    )


def losses(found: RetrievedNeighbours, targets: Tensor, log_p: Tensor) -> Tensor:
    """Return the (temperatures, weights) mean losses of the mixture."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64, device=targets.device)
    rows = []
    for temperature in TEMPERATURES:
        votes = vote(found, knn_temperature=temperature, vocab_size=0).log_prob(targets).double().exp()
        mixed = (1 - weights) * log_p.double().exp()[:, None] + weights * votes[:, None]
        rows.append(-mixed.log().mean(0))
    return torch.stack(rows)


if __name__ == "__main__":
    main()
