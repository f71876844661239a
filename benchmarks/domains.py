"""Perplexity of each corpus with the store of each other one: what a store costs outside its domain.

    python benchmarks/domains.py CORPUS... --store 20000 --limit 3000            # minutes on two cores
    python benchmarks/domains.py CORPUS... --limit 60000 --device cuda           # whole corpora on a GPU

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. Each store is built from
train and tuned on valid of its own corpus; then it predicts the test text of every corpus.
One pass over each text records the probability of every target by every component; the rows of the table are arithmetic
on that. "gated" is trained on valid alone; "default" is what `knnlm tune` chooses: a gate with evidence, trained also
on text that the model writes, and online weights. Then the time of whole
evaluations with and without these, in turns, and that of their arithmetic alone: the share of an evaluation that the
layer takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

import knnlm
from knnlm.corpus import Document
from knnlm.evaluation.evaluate import first_documents
from knnlm.evaluation.samples import sample_documents
from knnlm.evaluation.tune import (
    TraceTable,
    choose_online,
    choose_settings,
    component_table,
    evaluate_table,
    fit_weights,
    sweep_all,
    tabulate,
    token_frequencies,
)
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.weights import Weights
from perplexity import add_store_options, measure_stores, parser_for, split

Fitted: TypeAlias = tuple[Weights, tuple[str, ...], OnlineConfig | None]  # with the memories that are weighted

MEMORIES = "knn,cache,ngram"
COLUMNS = ("model", "one λ", "one λ, online", "gated", "gated, online", "default")


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    samples = sample_documents(lm, options.samples)
    texts = {corpus.name: list(first_documents(split(corpus, "test"), lm, options.limit)) for corpus in options.corpus}
    show(measure_stores(options, lambda corpus, folder: measure(corpus, folder, lm, texts, samples, options)))


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_store_options(parser)
    parser.add_argument("--samples", type=int, default=60_000, help="tokens that the model writes for the default gate")
    parser.add_argument("--repeats", type=int, default=3, help="turns of the timing")
    return parser.parse_args()


def measure(
    corpus: Path,
    folder: Path,
    lm: CausalLM,
    texts: dict[str, list[Document]],
    samples: list[Document],
    options: argparse.Namespace,
) -> list[dict[str, object]]:
    """Build and tune the store of one corpus; return a row for the test text of each corpus."""
    device = str(lm.device)
    store = knnlm.build(first_documents(split(corpus, "train"), lm, options.store), folder / "store", lm=lm)
    mixture = Mixture.open(folder / "store", lm, memories=MEMORIES, use_tuned=False)
    valid = mixture.record(first_documents(split(corpus, "valid"), lm, options.limit), folder / "valid", k=1024)
    settings = choose_settings(valid, sweep_all(valid, device=device), several=True)
    table = tabulate(valid, settings, device=device)
    some = list(first_documents(samples, lm, min(len(valid), options.samples)))
    written = tabulate(mixture.record(some, folder / "written", k=1024), settings, device=device)
    fitted = fit_all(table, written, token_frequencies(store), device)
    rows, own_table = [], table
    for name, documents in texts.items():
        own = tabulate(mixture.record(documents, folder / name, k=1024), settings, device=device)
        if name == corpus.name:
            own_table = own
        row: dict[str, object] = {"store": corpus.name, "text": name, "tokens": len(own.lm_log_probs)}
        for kind, (weights, labels, config) in fitted.items():
            scores = evaluate_table(own.select(*labels), weights, config)
            row |= {"model": scores.base_perplexity, kind: scores.perplexity, f"{kind}, config": str(config)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    for memory, chosen in zip(mixture.memories, settings, strict=True):
        if chosen:
            memory.settings = chosen  # type: ignore[attr-defined]
    times = overhead(mixture, texts[corpus.name], own_table, fitted, options)
    print(json.dumps({"store": corpus.name, **times}), flush=True)
    store.close()
    return rows


def fit_all(table: TraceTable, written: TraceTable, frequencies: Tensor, device: str) -> dict[str, Fitted]:
    """Return the weights, memories and online weights of each column, fitted on the table of valid."""
    labels = tuple(memory.label for memory in table.memories)
    one = fit_weights(table.select("knn"), "fixed", frequencies=frequencies).weights
    gate = fit_weights(table, "gated", frequencies=frequencies, device=device).weights
    default = fit_weights(table, "gated", frequencies=frequencies, samples=written, device=device).weights
    return {
        "one λ": (one, ("knn",), None),
        "one λ, online": (one, ("knn",), choose_online(table.select("knn"), one)[0]),
        "gated": (gate, labels, None),
        "gated, online": (gate, labels, choose_online(table, gate)[0]),
        "default": (default, labels, choose_online(table, default, written)[0]),
    }


def overhead(
    mixture: Mixture, text: list[Document], table: TraceTable, fitted: dict[str, Fitted], options: argparse.Namespace
) -> dict[str, float]:
    """Return the times of evaluations of a text with the default weights and with the gate alone, in turns.

    The difference of these varies with the machine's load. "layer" is that of computing the weights of the same text
    from its table, which is all that the default adds to an evaluation, and "share" is the layer's of an evaluation.
    """
    whole: dict[str, list[float]] = {"gated": [], "default": []}
    weighing: dict[str, list[float]] = {"gated": [], "default": []}
    for _ in range(options.repeats):
        for kind in whole:
            weights, _, mixture.online = fitted[kind]
            mixture.weights = weights
            scores, layer = component_table(table, weights), table.layer(weights, mixture.online)
            times = [time.perf_counter()]
            mixture.evaluate(text)
            times.append(time.perf_counter())
            scores.weigh(layer, table.begins)
            times.append(time.perf_counter())
            whole[kind].append(times[1] - times[0])
            weighing[kind].append(times[2] - times[1])
    gated, default = (statistics.median(times) for times in whole.values())
    layer_seconds = statistics.median(weighing["default"]) - statistics.median(weighing["gated"])
    return {
        "seconds": gated,
        "seconds_default": default,
        "ratio": default / gated,
        "layer": layer_seconds,
        "share": layer_seconds / gated,
    }


def show(rows: list[dict[str, object]]) -> None:
    print("| store | text |", " | ".join(COLUMNS), "| of the model | of the gate |")
    print("|---|---|", "---|" * (len(COLUMNS) + 2))
    for row in rows:
        figures = [float(str(row[name])) for name in COLUMNS]
        ratios = f"{figures[-1] / figures[0]:.4f} | {figures[-1] / figures[COLUMNS.index('gated')]:.4f}"
        print(f"| {row['store']} | {row['text']} |", " | ".join(f"{value:.2f}" for value in figures), f"| {ratios} |")


if __name__ == "__main__":
    main()
