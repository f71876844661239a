"""Studies of the store: how large it is, and by which distance it is searched. The model does not run again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from knnlm.index.base import Index
from knnlm.index.exact import ExactIndex
from knnlm.memories.voting import RetrievedNeighbours
from knnlm.report.context import Read, ReportContext
from knnlm.report.search import Outcome, Part, SubsetIndex, choose, merge, search_trace, with_neighbours
from knnlm.report.study import FIGURES, CannotStudy, Cell, Line, Plot, Study, Table, lowest, percent_lower

_HALVINGS = 4  # the smallest part of the store is 1/16


def both(desk: ReportContext) -> list[Read]:
    """Give the text to choose on, then the text to report on."""
    return [desk.valid, desk.test]


def search_both(desk: ReportContext, index: Index, texts: Sequence[Read] | None = None) -> list[RetrievedNeighbours]:
    """Search the store through another index, for both texts."""
    memory, k = desk.searcher(index), desk.chosen[0].k
    return [
        search_trace(memory, read.keys, k, device=desk.device, progress=desk.progress) for read in texts or both(desk)
    ]


def choose_for(
    desk: ReportContext,
    found: Sequence[RetrievedNeighbours],
    *,
    metric: str = "l2",
    texts: Sequence[Read] | None = None,
) -> Outcome:
    """Choose τ and λ for neighbours that were found for both texts, with the k that was chosen for the store."""
    valid, test = (
        with_neighbours(read.trace, neighbours, metric=metric)
        for read, neighbours in zip(texts or both(desk), found, strict=True)
    )
    return choose(valid, test, k=desk.chosen[0].k)


def study_size(desk: ReportContext) -> Study:
    """Search in a growing part of the store's documents; τ and λ are chosen for each."""
    groups, shares = _growing_parts(desk)
    if len(groups) < 2:
        raise CannotStudy("the store has too few documents to take a part of them")
    k = desk.chosen[0].k
    found: list[RetrievedNeighbours | None] = [None, None]
    tried: list[Outcome] = []
    for group in groups:
        part = Part(desk.store.keys, group)
        more = search_both(desk, SubsetIndex(ExactIndex(part, device=desk.device), part))
        merged = [merge(old, new, k) for old, new in zip(found, more, strict=True)]
        tried.append(choose_for(desk, merged))
        found = [*merged]
    keys = np.cumsum([len(group) for group in groups]).tolist()
    rows: list[list[Cell]] = [
        [share, count, *one.figures()] for share, count, one in zip(shares, keys, tried, strict=True)
    ]
    lines = [
        Line("tuning text", keys, [one.valid for one in tried]),
        Line("held-out text", keys, [one.test for one in tried]),
    ]
    return Study(
        name="size",
        title="How much is remembered",
        paper="kNN-LM, Figure 2",
        finding=(
            f"From {keys[0]:,} to {keys[-1]:,} stored contexts perplexity goes from {tried[0].test:.2f} to "
            f"{tried[-1].test:.2f}; the last step, from {keys[-2]:,} on, makes it "
            f"{percent_lower(tried[-1].test, tried[-2].test)}."
        ),
        command=desk.again("size"),
        tables=[
            Table.of(
                {"part": ".1%", "contexts": ",d", **FIGURES},
                rows,
                caption=f"Exact search with k = {k}. Whole documents, in the order of a hash of their text.",
                best=lowest([one.valid for one in tried]),
            )
        ],
        plots=[
            Plot.curves(
                "Perplexity by the size of the store", "stored contexts", lines, log_x=True, model_alone=desk.base
            )
        ],
    )


def _growing_parts(desk: ReportContext) -> tuple[list[Tensor], list[float]]:
    """Give the keys that each part has more than the part before it, and the share of the tokens that it has."""
    documents = list(desk.store.documents())
    order = sorted(range(len(documents)), key=lambda number: (documents[number].sha256, number))
    bounds = [desk.store.rows / 2**step for step in range(_HALVINGS, 0, -1)]
    part = np.zeros(len(documents), dtype=np.int64)
    share = np.zeros(_HALVINGS + 1)
    used = 0
    for number in order:
        part[number] = np.searchsorted(bounds, used, side="right")
        used += documents[number].rows
        share[part[number] :] = used / desk.store.rows
    starts = np.array([document.first_row for document in documents])
    rows = desk.store.rows_of(torch.arange(desk.store.key_count)).numpy()
    of_key = part[np.searchsorted(starts, rows, side="right") - 1]
    present = np.unique(of_key)
    groups = [torch.from_numpy(np.flatnonzero(of_key == number)) for number in present]
    return groups, share[present].tolist()


def study_metric(desk: ReportContext) -> Study:
    """Search exactly by both distances, each with τ and λ of its own."""
    names = {"l2": "squared L2", "ip": "inner product"}
    tried = [
        choose_for(
            desk, search_both(desk, ExactIndex(desk.store.keys, metric=metric, device=desk.device)), metric=metric
        )
        for metric in names
    ]
    rows: list[list[Cell]] = [
        [name, metric, one.k, *one.figures()] for (metric, name), one in zip(names.items(), tried, strict=True)
    ]
    best = lowest([one.valid for one in tried])
    first, second = (list(names.values())[number] for number in (best, 1 - best))
    return Study(
        name="metric",
        title="L2 against inner product",
        paper="kNN-LM, section 3; Why do Nearest Neighbor Language Models Work?, on distances",
        finding=(
            f"By {first} perplexity is {tried[best].test:.2f}, by {second} {tried[1 - best].test:.2f}, each with its "
            "own τ and λ."
        ),
        command=desk.evaluation("--memories", "knn", "--metric", "ip", *tried[1].options()),
        tables=[
            Table.of(
                {"distance": "", "--metric": "", "k": ",d", **FIGURES},
                rows,
                best=best,
            )
        ],
        plots=[
            Plot.bars(
                "Perplexity by distance", list(names.values()), [one.test for one in tried], model_alone=desk.base
            )
        ],
    )
