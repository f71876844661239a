"""Test perplexity of a corpus with each memory and each kind of weights, all fitted on valid.

    python benchmarks/mixtures.py CORPUS... --store 20000 --limit 3000            # minutes on two cores
    python benchmarks/mixtures.py CORPUS... --limit 60000 --device cuda --keep D  # the whole corpus on a GPU
    python benchmarks/mixtures.py --from D                                        # the same table from the kept files

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. One pass over valid and
one over test record the probability of every target by every component; each row of the table is then arithmetic on
that. --keep stores features in float16, so that a gate fitted to them may differ in the last digit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import knnlm
from knnlm.datastore.rewrite import derive
from knnlm.evaluation.evaluate import Totals, first_documents
from knnlm.evaluation.tune import (
    MemoryColumns,
    TraceTable,
    choose_settings,
    evaluate_table,
    fit_weights,
    sweep_all,
    tabulate,
    token_frequencies,
)
from knnlm.lm.causal import CausalLM
from knnlm.mixture.gate import MemoryFeatures, Positions
from knnlm.mixture.mixture import Mixture
from knnlm.training.metric_learning import KeyMetricConfig, train_key_map
from knnlm.training.output_matrix import OutputConfig, train_output
from perplexity import parser_for, split

KNN, MAPPED, CACHE, NGRAM, NGRAM_CACHE = "knn", "trained keys", "cache", "ngram", "ngram-cache"
WORDS, BEST = "W_ds r={}", "the best W_ds"


def table_rows(table_: TraceTable) -> list[tuple[str, list[str], str]]:
    """The rows of the table: (name, memories, weights)."""
    present = {memory.label for memory in table_.memories}
    words = [label for label in map(WORDS.format, range(1, 10)) if label in present]
    rows = [("kNN, one λ", [KNN], "fixed"), ("cache, one λ", [CACHE], "fixed"), ("n-grams, one λ", [NGRAM], "fixed")]
    rows += [(f"{label}, one λ", [label], "fixed") for label in words]
    rows += [("trained similarity, one λ", [MAPPED], "fixed")]
    rows += [("kNN + cache, one weight each", [KNN, CACHE], "fixed")]
    rows += [("kNN + cache + n-grams, one weight each", [KNN, CACHE, NGRAM], "fixed")]
    base = [KNN, CACHE, NGRAM]
    rows += [(f"kNN + cache + n-grams, {kind}", base, kind) for kind in ("fitted", "buckets", "gated")]
    rows += [("kNN + cache + n-grams + n-gram cache, gated", [*base, NGRAM_CACHE], "gated")]
    rows += [("kNN, fitted", [KNN], "fitted"), ("kNN, buckets", [KNN], "buckets"), ("kNN, gated", [KNN], "gated")]
    rows += [("kNN + cache, gated", [KNN, CACHE], "gated")]
    rows += [("kNN + cache + n-grams + W_ds, fitted", [*base, BEST], "fitted")]
    rows += [("kNN + cache + n-grams + W_ds, gated", [*base, BEST], "gated")]
    rows += [("all, one weight each", [*base, BEST, MAPPED], "fixed")]
    rows += [("all, fitted", [*base, BEST, MAPPED], "fitted")]
    rows += [("all, gated", [*base, BEST, MAPPED], "gated")]
    return rows


def main() -> None:
    options = parse()
    tables = {}
    if options.kept:
        names = sorted({file.name.split("-")[0] for file in options.kept.glob("*-valid.npz")})
        tables = {
            name: table(*(load(options.kept, name, part) for part in ("valid", "test")), options) for name in names
        }
    else:
        lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
        for corpus in options.corpus:
            with tempfile.TemporaryDirectory() as folder:
                parts = trace_corpus(corpus, Path(folder), lm, options)
            tables[corpus.name] = table(*parts, options)
    show(tables)


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__, "*")
    parser.add_argument("--rows", default="1,2,3", help="r of W_ds")
    parser.add_argument(
        "--anchors", type=int, default=40_000, help="contexts that the similarity is learnt from; 0 for none"
    )
    parser.add_argument("--build-batch", type=int, help="tokens in a batch when building")
    parser.add_argument("--batch", type=int, help="tokens in a batch when reading")
    parser.add_argument("--keep", type=Path, help="also write the tables into this folder")
    parser.add_argument("--from", dest="kept", type=Path, help="use the files of --keep instead of a corpus")
    parser.add_argument("--only", help="rows whose name contains this")
    options = parser.parse_args()
    if bool(options.corpus) == bool(options.kept):
        parser.error("corpora or --from are required")
    return options


def trace_corpus(
    corpus: Path, folder: Path, lm: CausalLM, options: argparse.Namespace
) -> tuple[tuple[TraceTable, torch.Tensor], ...]:
    """Build, train the memories, and read valid and test once."""
    clock = Clock(corpus.name)
    device = str(lm.device)
    train = list(first_documents(split(corpus, "train"), lm, options.store))
    store = knnlm.build(train, folder / "store", lm=lm, batch_tokens=options.build_batch)
    clock.log("built", store.entry_count)
    labels = {"knn": KNN, "cache": CACHE, "ngram": NGRAM, "ngram-cache": NGRAM_CACHE}
    memories = ["knn", "cache", "ngram", "ngram-cache"]
    for rows in map(int, options.rows.split(",")):
        card = train_output(store, folder / f"output-{rows}", OutputConfig(rows=rows), device=device)
        memories.append(f"output={folder}/output-{rows}")
        labels[memories[-1]] = WORDS.format(rows)
        clock.log(f"W_ds r={rows}: held-out loss {card.held_out_before} to {card.held_out_after}", card.steps)
    if options.anchors:
        learned = train_key_map(store, KeyMetricConfig(anchors=options.anchors), device=device)
        derive(store, folder / "mapped", key_map=learned).close()
        memories.append(f"knn={folder}/mapped")
        labels[memories[-1]] = MAPPED
        clock.log("trained keys", json.dumps(learned.metadata)[:600])
    mixture = Mixture.open(folder / "store", lm, memories=",".join(memories), use_tuned=False)
    clock.log("opened", 0)
    traces = []
    for part in ("valid", "test"):
        documents = split(corpus, part)
        trace = mixture.record(documents, folder / part, k=1024, limit=options.limit, batch_tokens=options.batch)
        traces.append(trace)
        clock.log(f"read {part}", len(trace))
    sweeps = sweep_all(traces[0], device=device)
    clock.log("swept", [found.best for found in sweeps if found])
    settings = choose_settings(traces[0], sweeps, several=True)
    found = []
    for part, trace in zip(("valid", "test"), traces, strict=True):
        table_ = rename(tabulate(trace, settings, device=device), labels)
        found.append((table_, token_frequencies(store)))
        if options.keep:
            save(options.keep, corpus.name, part, *found[-1])
    clock.log("tabulated", 0)
    return tuple(found)


class Clock:
    """Prints steps with their times."""

    def __init__(self, name: str) -> None:
        self.name, self.begin = name, time.perf_counter()

    def log(self, what: str, figure: object) -> None:
        print(f"{self.name} {time.perf_counter() - self.begin:6.1f} s  {what}: {figure}", file=sys.stderr, flush=True)


def rename(table_: TraceTable, labels: dict[str, str]) -> TraceTable:
    from dataclasses import replace

    named = []
    for memory in table_.memories:
        own = next((new for old, new in labels.items() if memory.label in (old, old.split("=")[-1])), memory.label)
        named.append(replace(memory, label=own))
    return replace(table_, memories=named)


def table(
    valid: tuple[TraceTable, torch.Tensor], test: tuple[TraceTable, torch.Tensor], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Fit every row on valid and evaluate it on test: name → (valid, test)."""
    table_, frequencies = valid
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = float((-table_.lm_log_probs.double().mean()).exp()), float((-test[0].lm_log_probs.double().mean()).exp())
    found = {"model": list(model)}
    present = {memory.label for memory in table_.memories}
    words = [memory.label for memory in table_.memories if memory.label.startswith("W_ds")]
    alone = {label: fit_weights(table_.select(label), "fixed", frequencies=frequencies).perplexity for label in words}
    best = min(words, key=alone.__getitem__)  # by valid
    for name, memories, kind in table_rows(table_):
        if options.only and options.only not in name:
            continue
        memories = [best if memory == BEST else memory for memory in memories]
        if not set(memories) <= present:
            continue
        begin = time.perf_counter()
        fitted = fit_weights(table_.select(*memories), kind, frequencies=frequencies, device=device)
        measured = evaluate_table(test[0].select(*memories), fitted.weights)
        found[name] = [fitted.perplexity, measured.perplexity]
        print(
            f"  {name:<45} valid {fitted.perplexity:8.3f}  test {measured.perplexity:8.3f}  "
            f"{time.perf_counter() - begin:5.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def show(tables: dict[str, dict[str, list[float]]]) -> None:
    names = list(dict.fromkeys(name for found in tables.values() for name in found))
    print("| mixture |", " | ".join(tables), "|")
    print("|---|", "|".join("---" for _ in tables), "|")
    for name in names:
        print(
            f"| {name} |",
            " | ".join(f"{found[name][1]:.2f}" if name in found else "" for found in tables.values()),
            "|",
        )


def save(folder: Path, corpus: str, part: str, table_: TraceTable, frequencies: torch.Tensor) -> None:
    """Write a table: some tens of megabytes rather than the trace's gigabytes."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "lm_log_probs": table_.lm_log_probs,
        "lm_features": table_.lm_features,
        "lm_top": table_.lm_top.int(),
        "positions": table_.positions.positions.int(),
        "tokens": table_.positions.tokens.int(),
        "groups": table_.documents.int(),
        "frequencies": frequencies,
    }
    metadata = {"totals": vars(table_.totals), "memories": []}
    for number, memory in enumerate(table_.memories):
        metadata["memories"].append(
            {
                "label": memory.label,
                "kind": memory.kind,
                "component_names": memory.component_names,
                "metadata": memory.metadata,
                "feature_names": list(memory.feature_names),
                "expensive": memory.expensive,
            }
        )
        arrays[f"{number}.logs"] = memory.log_probs
        for name in MemoryFeatures.__dataclass_fields__:
            value = getattr(memory.features, name)
            arrays[f"{number}.{name}"] = value.half() if value.is_floating_point() else value.int()
        if memory.nearest is not None:
            arrays[f"{number}.nearest"] = memory.nearest
    np.savez_compressed(
        folder / f"{corpus}-{part}.npz",
        metadata=json.dumps(metadata),
        **{name: one.numpy() for name, one in arrays.items()},
    )


def load(folder: Path, corpus: str, part: str) -> tuple[TraceTable, torch.Tensor]:
    """Read a table of `save`."""
    with np.load(folder / f"{corpus}-{part}.npz") as file:
        metadata = json.loads(str(file["metadata"]))
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "metadata"}
    memories = []
    for number, own in enumerate(metadata["memories"]):
        features = [arrays[f"{number}.{name}"] for name in MemoryFeatures.__dataclass_fields__]
        features = [one.float() if one.is_floating_point() else one.long() for one in features]
        nearest = arrays.get(f"{number}.nearest")
        known = (
            own["label"],
            own["kind"],
            own["component_names"],
            arrays[f"{number}.logs"],
            MemoryFeatures(*features),
            nearest,
        )
        memories.append(MemoryColumns(*known, own["metadata"], own["feature_names"], own["expensive"]))
    place = Positions(arrays["positions"].long(), arrays["tokens"].long())
    table_ = TraceTable(
        arrays["lm_log_probs"],
        arrays["lm_features"],
        arrays["lm_top"].long(),
        place,
        arrays["groups"].long(),
        memories,
        Totals(**metadata["totals"]),
    )
    return table_, arrays["frequencies"]


if __name__ == "__main__":
    main()
