"""Perplexity, time and bytes of indexes on real keys: the data behind the choice of `auto`.

    python benchmarks/index_choice.py STORE TEXT.jsonl                         # the index of auto, and the usual one
    python benchmarks/index_choice.py STORE TEXT.jsonl --specs Lists128,Blocks256 IVF512,PQ64 --probes 16 64
    python benchmarks/index_choice.py STORE TEXT.jsonl --json choice.json --plot choice.png
    python benchmarks/index_choice.py --replot choice.json … --plot choice.png

STORE is a store of the bundled model, TEXT held-out text. τ and λ are chosen on one half of its tokens, and figures are
those of the other half. "measured" is how many of the k = 1024 neighbours get their exact distance; with 0 the
distances of the codes are used. Where there is a GPU, the model and exact search use it; indexes are always on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

import baselines
from knnlm.benchmark import spread, times_of
from knnlm.corpus import read_documents
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import Totals, read_batches
from knnlm.index.base import Index, Neighbours
from knnlm.index.blocks import index as block_index
from knnlm.index.blocks import is_blocks
from knnlm.index.blocks.build import build_blocks
from knnlm.index.exact import ExactIndex
from knnlm.index.factory import default_spec
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import RerankedIndex
from knnlm.lm.causal import CausalLM
from knnlm.memories.decoder import LMOutput
from knnlm.mixture.mixture import Mixture

K = 1024
TIMED = 4096  # queries
TEMPERATURES = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)
WEIGHTS = torch.linspace(0.02, 0.9, 45)[:, None]


@dataclass(frozen=True)
class Text:
    """Held-out positions."""

    queries: Tensor  # (N, D)
    targets: Tensor  # (N,)
    model: Tensor  # (N,) probability of the target by the model


def main() -> None:
    options = parse()
    if options.replot:
        plot([row for path in options.replot for row in json.loads(path.read_text())["rows"]], options.plot)
        return
    use_threads(options.threads)
    store = Datastore.open(options.store)
    text = read_text(store, options)
    truth = exact(store, text.queries, options.device)
    base = perplexity(store, text, truth)
    rows: list[dict[str, Any]] = []
    specs = options.specs or [default_spec(store.key_count), baselines.USUAL_SPEC]
    for spec in specs:
        for row in measure_spec(store, text, truth, spec, options):
            rows.append(row | {"ratio": row["perplexity"] / base["perplexity"]})
            print(json.dumps({name: rounded(value) for name, value in rows[-1].items()}), file=sys.stderr, flush=True)
    about = {
        "machine": baselines.machine(options.threads),
        "keys": store.key_count,
        "tokens": len(text.targets),
        "exact": base,
    }
    if options.json:
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    print(json.dumps(about))
    if options.plot:
        plot(rows, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--specs", nargs="+")
    parser.add_argument("--probes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--measured", type=int, nargs="+", default=[0, 128, K])
    parser.add_argument("--limit", type=int, default=8192, help="tokens of TEXT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--build-threads", type=int, help="threads for building indexes (default: --threads)")
    parser.add_argument("--device", default="auto", help="for the model and exact search; indexes are on the CPU")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--replot", type=Path, nargs="+", help="draw what earlier runs wrote")
    options = parser.parse_args()
    if not options.replot and not options.text:
        parser.error("STORE and TEXT, or --replot, are required")
    return options


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


def read_text(store: Datastore, options: argparse.Namespace) -> Text:
    """Read held-out text once: its keys, its tokens, and the model's probabilities."""
    lm = CausalLM.open(options.model, device=options.device)
    mixture = Mixture.open(store, lm, use_tuned=False)
    assert mixture.knn is not None
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode():
        for _, batch in read_batches(mixture, read_documents(options.text), totals=Totals(), limit=options.limit):
            keys = store.project(batch.context.states[mixture.knn.source].float())
            log_probs = LMOutput(batch.logits).components[0].log_prob(batch.targets)
            parts.append((keys.cpu(), batch.targets.cpu(), log_probs.exp().cpu()))
    queries, targets, model = (torch.cat(column) for column in zip(*parts, strict=True))
    # Mixed, so that both halves are of the whole text.
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))[: options.limit]
    return Text(queries[order], targets[order], model[order].double())


def exact(store: Datastore, queries: Tensor, device: str) -> Neighbours:
    """Search exactly, on a GPU where there is one."""
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    found = ExactIndex(store.keys, device=where).search(queries, min(K, store.key_count))
    return Neighbours(found.ids.cpu(), found.distances.cpu())


def perplexity(store: Datastore, text: Text, found: Neighbours) -> dict[str, float]:
    """Choose τ and λ on the first half, and measure on the second."""
    hits = store.values(store.entries_of(found.ids)) == text.targets[:, None]  # (N, k)
    half = len(text.targets) // 2
    best: tuple[float, float, float, float] | None = None
    for temperature in TEMPERATURES:
        weights = (-found.distances / temperature).softmax(1).nan_to_num()
        memory = (weights * hits).sum(1).double()
        logs = (WEIGHTS * memory + (1 - WEIGHTS) * text.model).log()  # (λ, N)
        chosen = int(logs[:, :half].mean(1).argmax())
        one = (
            float(logs[chosen, :half].mean()),
            temperature,
            float(WEIGHTS[chosen]),
            float(logs[chosen, half:].mean()),
        )
        best = one if best is None or one > best else best
    assert best is not None
    return {"perplexity": float(np.exp(-best[3])), "knn_temperature": best[1], "lambda": best[2]}


def measure_spec(
    store: Datastore, text: Text, truth: Neighbours, spec: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Build one index and search it with several settings."""
    build_threads = options.build_threads or options.threads
    use_threads(build_threads)
    begin = time.perf_counter()
    blocks = is_blocks(spec)
    built: Any = build_blocks(store.keys, spec) if blocks else FaissIndex.build(store.keys, spec)
    build_seconds = time.perf_counter() - begin
    use_threads(options.threads)
    metadata = {
        "spec": spec,
        "build_s": build_seconds,
        "build_threads": build_threads,
        "bytes_per_key": (built.stored_bytes if blocks else baselines.size_of(built._index)) / built.rows,
    }
    rows = []
    for probes in options.probes:
        if blocks:
            block_index.PROBES = probes
        else:
            faiss.extract_index_ivf(built._index).nprobe = probes
        for measured in [0] if blocks else options.measured:
            index: Index = RerankedIndex(built, store.keys, measured=measured) if measured else built
            found = index.search(text.queries, K)
            times = times_of(lambda index=index: index.search(text.queries[:TIMED], K), 2)
            hits = [np.isin(right, one).mean() for right, one in zip(truth.ids.numpy(), found.ids.numpy(), strict=True)]
            cost = {
                "ms_per_query": baselines.median(times) / min(TIMED, len(text.queries)) * 1e3,
                "spread": spread(times),
            }
            quality = perplexity(store, text, found) | {"recall": float(np.mean(hits))}
            rows.append(metadata | {"probes": probes, "measured": measured} | cost | quality)
    return rows


def rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw perplexity over that of exact search against milliseconds per query."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (spec, measured) in enumerate(sorted({(row["spec"], row["measured"]) for row in rows})):
        own = [row for row in rows if (row["spec"], row["measured"]) == (spec, measured)]
        own.sort(key=lambda row: row["ms_per_query"])
        label = f"{spec}, {measured} measured" if measured else spec if is_blocks(spec) else f"{spec}, codes only"
        line = {0: ":", K: "--"}.get(measured, "-")
        axes.plot(
            [row["ms_per_query"] for row in own],
            [row["ratio"] for row in own],
            line,
            marker="osD^vP*X"[number % 8],
            markersize=4,
            label=label,
        )
        for row in own:
            axes.annotate(f" {row['probes']}", (row["ms_per_query"], row["ratio"]), fontsize=7)
    axes.axhline(1.005, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="milliseconds per query", ylabel="perplexity ÷ that of exact search")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
