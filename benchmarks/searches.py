"""Searches that a gate skips, that an automaton avoids, and that both leave out, against perplexity.

    python benchmarks/searches.py CORPUS... --store 40000 --limit 2000 --plot searches.png  # half an hour on two cores

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line; documents of valid and
test are cut to `--cut` tokens. A store of train is searched in full and with every automaton of `--min-pointers` and
`--clusters` (entries per cluster; 0: none). For each, weights are tuned on every other document of valid: fixed ones,
and a gate, which then skips fractions of the searches. A row of the first table is the combination with the fewest
searches that raises the perplexity of the rest of valid to at most 1.005 times that of always searching. The second
table compares perplexities at equal numbers of searches. All figures are those of test. With `--folder`, stores are
kept there and used again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import knnlm
from knnlm.corpus import Document
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import first_documents, score_batches
from knnlm.index.base import Index, Neighbours
from knnlm.lm.causal import CausalLM
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.spec import MixtureOptions
from perplexity import parser_for, split

K = 1024  # neighbours of a search, of which a setting uses as many as it was tuned to
MODES = ("all", "skip", "automaton", "both")
MOST = 1.005  # times the perplexity of always searching
SHARES = (0.75, 0.5, 0.25)  # of the searches, at which perplexities are compared


@dataclass(frozen=True)
class Row:
    """One combination, and its figures on one text."""

    corpus: str
    weights: str
    split: str
    skip: float
    min_pointers: int  # 0: without an automaton
    clusters: int  # entries per cluster; 0: none
    searched: float
    perplexity: float
    seconds: float

    @property
    def mode(self) -> str:
        return MODES[(self.skip > 0) + 2 * (self.min_pointers > 0)]


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    rows: list[Row] = []
    for corpus in options.corpus:
        with tempfile.TemporaryDirectory() as temporary:
            path = (options.folder or Path(temporary)) / f"{corpus.name}.store"
            for row in measure(corpus, path, lm, options):
                rows.append(row)
                print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))
    show(rows, options.plot)


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--folder", type=Path, help="where stores are kept (default: a temporary folder)")
    parser.add_argument("--cut", type=int, default=1000, help="tokens of a document")
    parser.add_argument("--skip", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--min-pointers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clusters", type=int, nargs="+", default=[0, 200, 400])
    parser.add_argument("--weights", nargs="+", default=["fixed", "gated"])
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def measure(corpus: Path, path: Path, lm: CausalLM, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the figures of all combinations on valid and test, that of all searches first.

    Texts are read once, and positions are searched once: their neighbours do not depend on the combination.
    """
    if not path.exists():
        knnlm.build(first_documents(split(corpus, "train"), lm, options.store), path, lm=lm).close()
    store = Datastore.open(path)
    texts = {name: list(first_tokens(split(corpus, name), lm, options)) for name in ("valid", "test")}
    tuned_on, texts["valid"] = texts["valid"][::2], texts["valid"][1::2]
    plain = Mixture.open(store, lm, memories="knn", use_tuned=False)
    batches = {name: list(plain.read([lm.encode(each.text) for each in text])) for name, text in texts.items()}
    assert plain.knn is not None
    index = RememberedSearch(plain.knn.index)
    automata = [(0, 0), *product(options.min_pointers, options.clusters)]
    for weights, (least, clusters) in product(options.weights, automata):
        number = max(1, store.entry_count // clusters) if clusters else None
        searching = MixtureOptions(automaton=AutomatonParams(least, clusters=number) if least else None)
        untuned = open_mixture(path, lm, index, searching, use_tuned=False)
        untuned.tune(tuned_on, weights=weights, online=False)
        for skip in (0.0, *(options.skip if weights == "gated" else ())):
            opened = open_mixture(path, lm, index, replace(searching, skip_fraction=skip or None))
            for name, read in batches.items():
                yield Row(corpus.name, weights, name, skip, least, clusters, *score(opened, read))


class RememberedSearch:
    """An index that keeps what it has found for each query."""

    def __init__(self, index: Index) -> None:
        self.index, self.metric = index, index.metric
        self._known: dict[bytes, tuple[Tensor, Tensor]] = {}  # ids and distances by the bytes of the query

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest of each of (N, D) queries."""
        names = [row.tobytes() for row in queries.float().cpu().numpy()]
        if unknown := [row for row, name in enumerate(names) if name not in self._known]:
            found = self.index.search(queries[unknown], K)
            for row, ids, distances in zip(unknown, found.ids.cpu(), found.distances.cpu(), strict=True):
                self._known[names[row]] = ids, distances
        ids, distances = (torch.stack(each)[:, :k] for each in zip(*map(self._known.__getitem__, names), strict=True))
        return Neighbours(ids, distances)


def open_mixture(
    path: Path, lm: CausalLM, index: RememberedSearch, options: MixtureOptions, *, use_tuned: bool = True
) -> Mixture:
    mixture = Mixture.open(path, lm, memories="knn", options=options, use_tuned=use_tuned)
    assert mixture.knn is not None
    mixture.knn.index = index
    return mixture


def first_tokens(documents: Iterable[Document], lm: CausalLM, options: argparse.Namespace) -> Iterator[Document]:
    """Yield cut documents up to the one that reaches the limit."""
    cut = (replace(each, text=lm.decode(lm.encode(each.text)[: options.cut])) for each in documents)
    return first_documents(cut, lm, options.limit)


def score(mixture: Mixture, batches: Sequence[ReadBatch]) -> tuple[float, float, float]:
    """Return the share of searched tokens, the perplexity and the seconds without the model."""
    begin, searched, total, count = time.perf_counter(), 0.0, 0.0, 0
    for scores in score_batches(mixture, batches):
        weighed = scores.weigh_alone(mixture.layer)
        assert weighed.searched is not None
        searched, total = searched + float(weighed.searched.sum()), total - float(weighed.mixture.sum())
        count += len(weighed.mixture)
    return searched / count, float(np.exp(total / count)), time.perf_counter() - begin


def show(rows: Sequence[Row], plot: Path | None) -> None:
    groups = list(dict.fromkeys((row.corpus, row.weights) for row in rows))
    tests = {
        group: [row for row in rows if (row.corpus, row.weights) == group and row.split == "test"] for group in groups
    }
    print("| corpus | weights | searches | skip | min pointers | per cluster | searched | saved | perplexity | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for group, test in tests.items():
        valid = [row for row in rows if (row.corpus, row.weights) == group and row.split == "valid"]
        for mode in MODES:
            if not any(row.mode == mode for row in test):
                continue
            if (chosen := choose(valid, mode)) is None:
                print("|", " | ".join([*group, mode, *7 * "-"]), "|")
            else:
                row = next(row for row in test if replace(chosen, split="test") == key_of(row, chosen))
                ratio = row.perplexity / test[0].perplexity
                print(
                    f"| {row.corpus} | {row.weights} | {mode} | {row.skip:g} | {row.min_pointers} | {row.clusters} | "
                    f"{row.searched:.1%} | {1 - row.searched:.1%} | {row.perplexity:.3f} | {ratio:.4f} |"
                )
    print("\n| corpus | weights | searches |", " | ".join(f"at {share:.0%}" for share in SHARES), "|")
    print("|---|---|---|", "---|" * len(SHARES), sep="")
    for (corpus, weights), test in tests.items():
        for mode in MODES[1:]:
            if any(row.mode == mode for row in test):
                shown = [f"{ratio:.4f}" if (ratio := ratio_at(test, mode, share)) else "-" for share in SHARES]
                print(f"| {corpus} | {weights} | {mode} |", " | ".join(shown), "|")
    if plot is not None:
        draw(tests, plot)


def key_of(row: Row, like: Row) -> Row:
    """Return a row with the figures of another one, so that only the combinations are compared."""
    return replace(row, searched=like.searched, perplexity=like.perplexity, seconds=like.seconds)


def choose(valid: Sequence[Row], mode: str) -> Row | None:
    """Return the combination of a kind with the fewest searches, among those that are as good as always searching."""
    good = [row for row in valid if row.mode == mode and row.perplexity <= MOST * valid[0].perplexity]
    return min(good, key=lambda row: row.searched, default=None)


def frontier(test: Sequence[Row], mode: str) -> list[tuple[float, float]]:
    """Return (share of searches, ratio of perplexities) of the combinations of a kind that no other one dominates."""
    points = sorted((row.searched, row.perplexity / test[0].perplexity) for row in test if row.mode in (mode, "all"))
    best: list[tuple[float, float]] = []
    for searched, ratio in points:
        if not best or ratio < best[-1][1]:
            best.append((searched, ratio))
    return best


def ratio_at(test: Sequence[Row], mode: str, share: float) -> float | None:
    """Return the ratio at a share of the searches: of two combinations, each used for a part of the text."""
    searched, ratios = zip(*frontier(test, mode), strict=True)
    return None if share < searched[0] else float(np.interp(share, searched, ratios))


def draw(tests: dict[tuple[str, str], list[Row]], path: Path) -> None:
    """Plot the frontier of each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(tests), 3.8), layout="constrained")
    for axes, ((corpus, weights), test) in zip(
        figure.subplots(1, len(tests), squeeze=False)[0], tests.items(), strict=True
    ):
        for mode, line, colour in zip(MODES[1:], ("s--", "o-", "^-"), ("#d9480f", "#1f6feb", "#2b8a3e"), strict=True):
            if any(row.mode == mode for row in test):
                points = np.array(frontier(test, mode))
                axes.plot(100 * points[:, 0], points[:, 1], line, color=colour, label=mode, markersize=4, linewidth=1.4)
        axes.plot(100, 1, "k*", label="all")
        axes.axhline(MOST, color="#667085", linewidth=0.8, linestyle=":")
        axes.set(xlabel="tokens that are searched, %", ylabel="perplexity, relative to all searches", xlim=(0, 103))
        axes.set_title(f"{corpus}, {weights} weights", fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
