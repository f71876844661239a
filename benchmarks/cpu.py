"""Speed of search on two cores, compared with the usual FAISS index, FAISS flat, and the model itself.

    make bench                                             # all of it: half an hour on two idle cores
    python benchmarks/cpu.py --sizes 10,100                # thousands of keys; a few minutes
    python benchmarks/cpu.py --store STORE --sizes 1000   # keys of a store, not synthetic ones
    python benchmarks/cpu.py --json figures.json
    python benchmarks/cpu.py --replot figures.json … --plot docs/images/search-cpu.png

Both sides run in one process, one after the other, with as many threads. Keys are synthetic, with the spectrum and the
clusters of real ones: those of the bundled model over Python's documentation, or of --store (see synthetic_keys.py).
Perplexity needs real keys; index_choice.py measures it. Times are medians of repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

import baselines
import synthetic_keys
from baselines import MappedKeys, median
from knnlm.benchmark import spread, times_of
from knnlm.corpus import Document
from knnlm.datastore.store import Datastore
from knnlm.index.blocks.build import build_blocks
from knnlm.index.exact import ExactIndex
from knnlm.index.factory import default_spec
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM

K = 1024
VOCABULARY = 49_152


def main() -> None:
    options = parse()
    if options.replot:
        plot([row for path in options.replot for row in json.loads(path.read_text())["search"]], options.plot)
        return
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    figures: dict[str, Any] = {"machine": baselines.machine(options.threads)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.model:
            figures["model"] = model(options)
        if options.sizes:
            figures["search"] = list(search(options, Path(folder), figures))
    figures["machine"]["load_after"] = baselines.machine(options.threads)["load"]
    table(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.plot:
        plot(figures.get("search", []), options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=thousands, default="10,100,1000", help="thousands of keys; 10000 takes 12 GB of disk"
    )
    parser.add_argument("--peer-up-to", type=int, default=1000, help="thousands of keys for the usual index")
    parser.add_argument("--flat-up-to", type=int, default=1000, help="thousands of keys for FAISS flat")
    parser.add_argument("--store", type=Path, help="a store whose keys are used if it has enough")
    parser.add_argument("--fit", type=int, default=16_000, help="tokens to read where there is no --store")
    parser.add_argument(
        "--model", action=argparse.BooleanOptionalAction, default=True, help="time the bundled model too"
    )
    parser.add_argument("--queries", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where keys are written (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--replot", type=Path, nargs="+", help="draw what earlier runs wrote")
    parser.add_argument("--plot", type=Path, help="draw milliseconds per query by the number of keys")
    return parser.parse_args()


def thousands(text: str) -> list[int]:
    return [int(number) * 1000 for number in text.split(",") if number.strip() not in ("", "0")]


def log(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


def model(options: argparse.Namespace) -> dict[str, float]:
    """Time the forward pass of the bundled model with and without its head, for comparison."""
    lm = CausalLM.open("bundled", device="cpu")
    tokens = torch.randint(100, 40_000, (1, 512))
    with torch.inference_mode():
        whole = times_of(lambda: lm.model(tokens, use_cache=False), options.repeats)
        body = times_of(lambda: lm.model.model(tokens, use_cache=False), options.repeats)
        state = lm.model(tokens, use_cache=True).past_key_values
        one = tokens[:, :1]

        def step() -> None:
            lm.model(one, past_key_values=state, use_cache=True)
            state.crop(-1)

        steps = times_of(step, 3 * options.repeats)
    found = {
        "forward_ms_per_token": median(whole) / 512 * 1e3,
        "without_head_ms_per_token": median(body) / 512 * 1e3,
        "one_token_ms": median(steps) * 1e3,
        "spread": spread(whole),
    }
    log("model", rounded(found))
    return found


def real_keys(options: argparse.Namespace, folder: Path) -> NDArray[np.float16]:
    """Return real keys: of a store, or of Python's documentation read by the bundled model."""
    if options.store:
        store = Datastore.open(options.store)
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))[: 4 * options.fit]
        pages = [Document(str(at), "pydoc", text[at : at + 4000]) for at in range(0, len(text), 4000)]
        store = build(pages, folder / "real", lm=CausalLM.open("bundled", device="cpu"))
    most = min(store.key_count, max(options.sizes) + options.queries if options.store else store.key_count)
    keys = np.lib.format.open_memmap(folder / "real.npy", "w+", np.float16, (most, store.width))
    for first, block in store.chunks(baselines.BLOCK):
        if first >= most:
            break
        keys[first : first + len(block)] = block[: most - first].half().numpy()
    return keys


def search(options: argparse.Namespace, folder: Path, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure all sides at every size."""
    real = real_keys(options, folder)
    some = torch.from_numpy(np.array(real[np.linspace(0, len(real) - 1, min(len(real), 40_000)).astype(int)])).float()
    shape = synthetic_keys.fit(some)
    figures["keys"] = {"fitted_on": shape.fitted_on, **synthetic_keys.compare(shape, some[:8192])}
    log("keys", figures["keys"])
    for rows in options.sizes:
        enough = len(real) >= rows + options.queries
        if enough:
            # Queries are other positions of the same text, evenly from all of it.
            queries_ = np.linspace(0, len(real) - 1, options.queries).astype(int)
            keys, queries = np.delete(real, queries_, axis=0)[:rows], real[queries_]
        else:
            keys = synthetic_keys.write(shape, rows, folder / f"{rows}.npy", seed=1)
            queries = torch.cat(list(shape.draw(options.queries, seed=2))).half().numpy()
        found = {"rows": rows, "synthetic": not enough, **one_size(keys, queries.astype(np.float32), options)}
        log(rounded(found))
        yield found
        del keys
        (folder / f"{rows}.npy").unlink(missing_ok=True)


def one_size(keys: NDArray[Any], queries: NDArray[np.float32], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides over one set of keys."""
    rows, k = len(keys), min(K, len(keys))
    queries_ = torch.from_numpy(queries)
    found: dict[str, Any] = {}
    truth = None
    if rows <= options.flat_up_to * 1000:
        exact = baselines.flat(keys)
        few = queries[: max(16, min(len(queries), 200_000_000 // rows))]
        found |= times("flat", lambda: exact.search(few, k), len(few), 1)
        truth = exact.search(few, k)[1]
        del exact
    if rows <= 200_000:
        plain = ExactIndex(MappedKeys(keys))
        found |= times("exact", lambda: plain.search(queries_[:512], k), 512, options.repeats)
        found |= times("exact_one", lambda: plain.search(queries_[:1], k), 1, 3 * options.repeats)
        del plain
    found |= ours(MappedKeys(keys), queries_, truth, options)
    if rows <= options.peer_up_to * 1000:
        found |= peer(keys, queries, truth, options)
        found["peer_build_s"] = found["peer_train_s"] + found["peer_add_s"]
        if "build_s" in found:
            found["ratio_build"] = found["peer_build_s"] / found["build_s"]
        found["ratio_search"] = found["peer_ms"] / found["ours_ms"]
        found["ratio_search_and_votes"] = found["peer_with_scatter_ms"] / found["ours_ms"]
    return found


def ours(
    keys: MappedKeys, queries: torch.Tensor, truth: NDArray[Any] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Build the index of `auto` and search it."""
    spec = default_spec(keys.rows)
    found: dict[str, Any] = {"spec": spec}
    if spec == "exact":
        index: Any = ExactIndex(keys)
        found["bytes_per_key"] = 0.0
    else:
        begin = time.perf_counter()
        index = build_blocks(keys, spec)
        found["build_s"] = time.perf_counter() - begin
        found["bytes_per_key"] = index.stored_bytes / keys.rows
    found |= times("ours", lambda: index.search(queries, K), len(queries), options.repeats)
    found |= times("ours_one", lambda: index.search(queries[:1], K), 1, 10 * options.repeats)
    if truth is not None:
        found["ours_recall"] = recall(index.search(queries[: len(truth)], K).ids.numpy(), truth)
    return found


def peer(
    keys: NDArray[Any], queries: NDArray[np.float32], truth: NDArray[Any] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Build the usual index, search it for each forward call, and scatter its votes."""
    made = baselines.usual_index(keys)
    found: dict[str, Any] = {
        "peer_train_s": made.train,
        "peer_add_s": made.add,
        "peer_bytes_per_key": made.bytes_per_key,
    }
    found |= times("peer", lambda: made.index.search(queries, K), len(queries), options.repeats)
    values = torch.randint(VOCABULARY, (512, K))

    def with_scatter() -> None:
        distances, _ = made.index.search(queries[:512], K)
        baselines.scatter(distances, values, vocab_size=VOCABULARY)

    found |= times("peer_with_scatter", with_scatter, 512, options.repeats)
    found |= times("peer_one", lambda: made.index.search(queries[:1], K), 1, 10 * options.repeats)
    if truth is not None:
        found["peer_recall"] = recall(made.index.search(queries[: len(truth)], K)[1], truth)
    return found


def times(name: str, work: Any, count: int, repeats: int) -> dict[str, float]:
    """Return milliseconds per query, and the spread of the repeats."""
    taken = times_of(work, repeats)
    return {f"{name}_ms": median(taken) / count * 1e3, f"{name}_spread": spread(taken)}


def recall(found: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the share of the true neighbours that was found."""
    return float(np.mean([np.isin(right, one).mean() for one, right in zip(found, truth, strict=True)]))


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}


def table(figures: dict[str, Any]) -> None:
    """Print a table; --json has all figures."""
    print("machine:", figures["machine"])
    if "model" in figures:
        print("model:", rounded(figures["model"]))
    print("| keys | index | build s (usual, ratio) | ms per query | one query ms | recall | bytes per key |")
    print("|---|---|---|---|---|---|---|")
    for row in figures.get("search", []):
        own = rounded(row)
        cells = [
            f"{row['rows']:,}{' synthetic' if row['synthetic'] else ''}",
            own["spec"],
            f"{own.get('build_s', '-')} ({own.get('peer_build_s', '-')}, {own.get('ratio_build', '-')}x)",
            f"{own['ours_ms']} ({own.get('peer_ms', '-')}, {own.get('ratio_search', '-')}x)",
            f"{own['ours_one_ms']} ({own.get('peer_one_ms', '-')})",
            f"{own.get('ours_recall', '-')} ({own.get('peer_recall', '-')})",
            f"{own['bytes_per_key']} ({own.get('peer_bytes_per_key', '-')})",
        ]
        print("|", " | ".join(cells), "|")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot milliseconds per query by the number of keys; later runs take precedence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, label, line in (
        ("ours_ms", "auto", "o-"),
        ("peer_ms", f"{baselines.USUAL_SPEC}, {baselines.PROBES} lists", "s--"),
        ("flat_ms", "FAISS flat", "^--"),
    ):
        own = sorted({row["rows"]: row[name] for row in rows if name in row}.items())
        axes.plot(*zip(*own, strict=True), line, label=label)
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="milliseconds per query, k = 1024, two cores")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
