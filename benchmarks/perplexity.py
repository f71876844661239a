"""Perplexity of a corpus without and with a store of it, and the same by an independent NumPy computation.

    python benchmarks/perplexity.py CORPUS --store 20000 --limit 3000 --oracle      # minutes on two cores
    python benchmarks/perplexity.py CORPUS --limit 60000 --device cuda              # the whole corpus on a GPU

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. The store is built
from train, k, τ and λ are chosen on valid, and the figures are those of test.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import knnlm
from knnlm.corpus import Document
from knnlm.evaluation.evaluate import Evaluation, first_documents
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture

_BATCH_TOKENS, _LOGITS = 16_384, 2048  # of a pass, and whose logits are in float32 at the same time


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    for corpus in options.corpus:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(corpus, Path(folder) / "store", lm, options)
        print(json.dumps(row))
        sys.stdout.flush()


def parser_for(about: str | None, corpora: str = "+") -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks on a corpus share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs=corpora)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--store", type=int, help="tokens of train to use (default: all)")
    parser.add_argument("--limit", type=int, help="tokens of valid and of test (default: all)")
    return parser


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `measure_stores`."""
    parser.add_argument("--stores", nargs="+", help="names of the corpora to build stores of (default: all)")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")


def measure_stores(
    options: argparse.Namespace, measure: Callable[[Path, Path], list[dict[str, object]]]
) -> list[dict[str, object]]:
    """Return the rows that `measure` returns for each corpus and a temporary folder, where its store is built."""
    rows: list[dict[str, object]] = []
    for corpus in (each for each in options.corpus if options.stores is None or each.name in options.stores):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(corpus, Path(folder))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    return rows


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--at", help="k,τ,λ to use instead of choosing them on valid, e.g. 1024,2,0.75")
    parser.add_argument("--oracle", action="store_true", help="compute the test figures again in NumPy")
    parser.add_argument("--build-batch", type=int, help="tokens in a batch when building")
    parser.add_argument("--batch", type=int, help="tokens in a batch when evaluating")
    return parser.parse_args()


def measure(corpus: Path, path: Path, lm: CausalLM, options: argparse.Namespace) -> dict[str, object]:
    """Build, tune, evaluate; return one row of the table."""
    begin = time.perf_counter()
    train = list(first_documents(split(corpus, "train"), lm, options.store))
    store = knnlm.build(train, path, lm=lm, batch_tokens=options.build_batch)
    built = time.perf_counter()
    settings = {}
    if options.at:
        k, temperature, lmbda = options.at.split(",")
        settings = {"k": int(k), "knn_temperature": float(temperature), "lmbda": float(lmbda)}
    else:
        Mixture.open(path, lm).tune(split(corpus, "valid"), weights="fixed", sources=["valid"], limit=options.limit)
    tuned = time.perf_counter()
    test = list(first_documents(split(corpus, "test"), lm, options.limit))
    evaluation = Mixture.open(path, lm, **settings).evaluate(test, batch_tokens=options.batch)
    row: dict[str, object] = {
        "corpus": corpus.name,
        "store_tokens": store.entry_count,
        "test_tokens": evaluation.tokens,
        "lm": round(evaluation.base_perplexity, 4),
        "knn_lm": round(evaluation.perplexity, 4),
        "oracle_of_both": round(evaluation.oracle_perplexity, 4),
        "k": evaluation.k,
        "knn_temperature": evaluation.knn_temperature,
        "lambda": evaluation.lmbda,
        "build_seconds": round(built - begin, 1),
        "tune_seconds": round(tuned - built, 1),
        "eval_seconds": round(evaluation.seconds, 1),
    }
    if options.oracle:
        row |= by_numpy(lm, train, test, evaluation)
    return row


def split(corpus: Path, name: str) -> Iterator[Document]:
    files = sorted(corpus.glob(f"{name}.jsonl*"))
    if not files:
        sys.exit(f"{corpus} has no {name}.jsonl")
    return knnlm.read_documents(files[0])


def tokens_of(corpus: Path, lm: CausalLM, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return the tokens of the documents of train, valid and test, as many as the options ask for."""
    limits = {"train": options.store, "valid": options.limit, "test": options.limit}
    texts = {name: first_documents(split(corpus, name), lm, limit) for name, limit in limits.items()}
    return {name: lm.encode_all([document.text for document in text]) for name, text in texts.items()}


@torch.inference_mode()
def token_log_probs(lm: CausalLM, documents: list[list[int]]) -> torch.Tensor:
    """Return log p of every token of documents by a model alone, (N,) float64 on the CPU."""
    found = torch.zeros(sum(map(len, documents)), dtype=torch.float64)
    for batch in lm.read(documents, lm.window(), batch_tokens=_BATCH_TOKENS):
        assert batch.logits is not None
        parts = zip(batch.logits.split(_LOGITS), batch.targets.split(_LOGITS), strict=True)
        losses = [torch.nn.functional.cross_entropy(own.float(), targets, reduction="none") for own, targets in parts]
        found[batch.rows.cpu()] = -torch.cat(losses).double().cpu()
    return found


def by_numpy(lm: CausalLM, train: list[Document], test: list[Document], evaluation: Evaluation) -> dict[str, object]:
    """Compute the test figures from the formulas: one document at a time, plain hooks, float64 brute force.

    Once with keys rounded to float16, as they are stored, and once with keys as the model computed them.
    """
    keys, _, values = plain_reading(lm, train)
    reading = plain_reading(lm, test)
    rounded = keys.astype(np.float16).astype(np.float64)
    return {
        "numpy": vote_by_numpy(rounded, values, reading, evaluation),
        "numpy_unrounded_keys": vote_by_numpy(keys, values, reading, evaluation),
    }


def vote_by_numpy(
    keys: np.ndarray, values: np.ndarray, reading: tuple[np.ndarray, np.ndarray, np.ndarray], evaluation: Evaluation
) -> dict[str, float]:
    """Brute force, one query at a time."""
    queries, log_p, targets = reading
    squares = (keys**2).sum(1)
    knn = np.zeros(len(targets))
    for number, query in enumerate(queries):
        distances = squares - 2 * keys @ query + query @ query
        nearest = np.argpartition(distances, min(evaluation.k, len(keys)) - 1)[: evaluation.k]
        scores = -distances[nearest] / evaluation.knn_temperature
        weights = np.exp(scores - scores.max())
        knn[number] = weights[values[nearest] == targets[number]].sum() / weights.sum()
    base = np.exp(log_p)
    mixed = (1 - evaluation.lmbda) * base + evaluation.lmbda * knn
    return {
        "lm": round(float(np.exp(-log_p.mean())), 4),
        "knn_lm": round(float(np.exp(-np.log(mixed).mean())), 4),
        "oracle_of_both": round(float(np.exp(-np.log(np.maximum(base, knn)).mean())), 4),
    }


@torch.no_grad()
def plain_reading(lm: CausalLM, documents: list[Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, log p of the targets, and targets, without the library's windows, batches or hooks."""
    captured: list[torch.Tensor] = []
    module = lm.model.get_submodule(lm.key_layer.module)
    handle = module.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    keys, log_p, targets = [], [], []
    for document in documents:
        tokens = lm.encode(document.text)
        inputs = [lm.start_token, *tokens[:-1]]
        scored = begin = 0
        while scored < len(tokens):
            end = min(begin + 1024, len(tokens))
            logits = lm.model(torch.tensor([inputs[begin:end]], device=lm.device)).logits[0, scored - begin :]
            wanted = torch.tensor(tokens[scored:end], device=lm.device)
            log_p.append(logits.double().log_softmax(1).gather(1, wanted[:, None])[:, 0].cpu().numpy())
            keys.append(captured.pop()[0, scored - begin :].double().cpu().numpy())
            targets.extend(tokens[scored:end])
            scored, begin = end, begin + 512
    handle.remove()
    return np.concatenate(keys), np.concatenate(log_p), np.array(targets)


if __name__ == "__main__":
    main()
