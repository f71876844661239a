"""Searches that a gate skips, that an automaton avoids, and that both leave out, against perplexity.

    python benchmarks/searches.py CORPUS... --store 40000 --limit 3000 --plot searches.png     # an hour on two cores

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. A store of train is
searched in full, and with every combination of `--skip` (the fraction of the searches that the gate skips),
`--min-pointers` and `--clusters` (tokens of the store per cluster; 0: none). Weights are tuned on valid, fixed ones
(without skipping) and a gate. A row of the table is the combination with the fewest searches that raises the perplexity
of valid to at most 1.005 times that of always searching; all figures are those of test. The second table compares
perplexities at equal numbers of searches, between the combinations of each kind. With `--folder`, stores are kept there
and used again.
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

import knnlm
from knnlm.corpus import Document
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import first_documents, score_batches
from knnlm.lm.causal import CausalLM
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.spec import MixtureOptions
from perplexity import parser_for, split

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
    parser.add_argument("--skip", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8])
    parser.add_argument("--min-pointers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--clusters", type=int, nargs="+", default=[0, 50])
    parser.add_argument("--weights", nargs="+", default=["fixed", "gated"])
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def measure(corpus: Path, path: Path, lm: CausalLM, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the figures of all combinations on valid and test; the texts are read once."""
    if not path.exists():
        knnlm.build(first_documents(split(corpus, "train"), lm, options.store), path, lm=lm).close()
    store = Datastore.open(path)
    texts = {name: list(first_tokens(split(corpus, name), lm, options.limit)) for name in ("valid", "test")}
    plain = Mixture.open(store, lm, memories="knn", use_tuned=False)
    batches = {name: list(plain.read([lm.encode(each.text) for each in text])) for name, text in texts.items()}
    for weights in options.weights:
        Mixture.open(path, lm, memories="knn", use_tuned=False).tune(texts["valid"], weights=weights, online=False)
        for skip, least, clusters in combinations(options, weights):
            opened = open_mixture(path, lm, store.entry_count, (skip, least, clusters))
            for name, read in batches.items():
                yield Row(corpus.name, weights, name, skip, least, clusters, *score(opened, read))


def first_tokens(documents: Iterable[Document], lm: CausalLM, limit: int | None) -> Iterator[Document]:
    """Yield documents with so many tokens together: the last one, which may be long, is cut."""
    left = limit
    for document in first_documents(documents, lm, limit):
        tokens = lm.encode(document.text)
        yield document if left is None or len(tokens) <= left else replace(document, text=lm.decode(tokens[:left]))
        left = None if left is None else left - len(tokens)


def combinations(options: argparse.Namespace, weights: str) -> list[tuple[float, int, int]]:
    """Return the fractions that are skipped, the least pointers and the clusters; 0: none. All searches come first."""
    skips = [0.0, *(options.skip if weights == "gated" else ())]
    pointers = [(0, 0), *product(options.min_pointers, options.clusters)]
    return [(skip, *automaton) for skip, automaton in product(skips, pointers)]


def open_mixture(path: Path, lm: CausalLM, entries: int, combination: tuple[float, int, int]) -> Mixture:
    skip, least, clusters = combination
    number = max(1, entries // clusters) if clusters else None
    params = AutomatonParams(min_pointers=least, clusters=number) if least else None
    return Mixture.open(path, lm, memories="knn", options=MixtureOptions(skip_fraction=skip or None, automaton=params))


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
            if (chosen := choose(valid, mode)) is not None:
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
