"""Studies of the store: its size, and the metric of the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from knnlm.index.base import Index
from knnlm.index.exact import ExactIndex
from knnlm.memories.voting import RetrievedNeighbours
from knnlm.report.context import ReportContext, TracedText
from knnlm.report.search import (
    SubsetIndex,
    VectorSubset,
    merge_neighbours,
    search_trace,
    select_settings,
    with_neighbours,
)
from knnlm.report.study import Line, Outcome, Plot, Study, StudyUnavailable, Table, lowest, percent_lower

_HALVINGS = 4  # the smallest subset of the store is 1/16


def both_texts(context: ReportContext) -> list[TracedText]:
    """Return the tuning text and the held-out text."""
    return [context.valid, context.test]


def search_both(
    context: ReportContext, index: Index, texts: Sequence[TracedText] | None = None
) -> list[RetrievedNeighbours]:
    """Search the store through another index, for both texts."""
    memory, k = context.knn_memory(index), context.chosen[0].k
    return [
        search_trace(memory, read.keys, k, device=context.device, progress=context.progress)
        for read in texts or both_texts(context)
    ]


def select_for(
    context: ReportContext,
    neighbours: Sequence[RetrievedNeighbours],
    *,
    metric: str = "l2",
    texts: Sequence[TracedText] | None = None,
) -> Outcome:
    """Choose τ and λ for the neighbours of both texts, with the k that was chosen for the store."""
    valid, test = (
        with_neighbours(read.trace, own, metric=metric)
        for read, own in zip(texts or both_texts(context), neighbours, strict=True)
    )
    return select_settings(valid, test, k=context.chosen[0].k)


def study_size(context: ReportContext) -> Study:
    """Search in a growing subset of the store's documents; τ and λ are chosen for each."""
    groups, shares = _growing_subsets(context)
    if len(groups) < 2:
        raise StudyUnavailable("the store has too few documents")
    k = context.chosen[0].k
    nearest: list[RetrievedNeighbours | None] = [None, None]
    tried: list[Outcome] = []
    for group in groups:
        part = VectorSubset(context.store.keys, group)
        more = search_both(context, SubsetIndex(ExactIndex(part, device=context.device), part))
        merged = [merge_neighbours(old, new, k) for old, new in zip(nearest, more, strict=True)]
        tried.append(select_for(context, merged))
        nearest = [*merged]
    keys = np.cumsum([len(group) for group in groups]).tolist()
    title = "Perplexity by the size of the store"
    return Study(
        name="size",
        title="Size of the store",
        paper="kNN-LM, Figure 2",
        finding=(
            f"From {keys[0]:,} to {keys[-1]:,} entries perplexity goes from {tried[0].test:.2f} to "
            f"{tried[-1].test:.2f}; the last step, from {keys[-2]:,} on, makes it "
            f"{percent_lower(tried[-1].test, tried[-2].test)}."
        ),
        command=context.report_command("size"),
        tables=[
            Table.of_outcomes(
                {"share": ".1%", "entries": ",d"},
                list(zip(shares, keys, strict=True)),
                tried,
                caption=f"Exact search with k = {k}. Whole documents, in the order of a hash of their text.",
            )
        ],
        plots=[Plot.curves(title, "entries", Line.of_outcomes(keys, tried), log_x=True, model_alone=context.base)],
    )


def _growing_subsets(context: ReportContext) -> tuple[list[Tensor], list[float]]:
    """Return the keys that each subset adds to the one before, and its share of the tokens."""
    documents = list(context.store.documents())
    order = sorted(range(len(documents)), key=lambda number: (documents[number].sha256, number))
    bounds = [context.store.entry_count / 2**step for step in range(_HALVINGS, 0, -1)]
    part = np.zeros(len(documents), dtype=np.int64)
    share = np.zeros(_HALVINGS + 1)
    used = 0
    for number in order:
        part[number] = np.searchsorted(bounds, used, side="right")
        used += documents[number].entries
        share[part[number] :] = used / context.store.entry_count
    starts = np.array([document.first_entry for document in documents])
    rows = context.store.entries_of(torch.arange(context.store.key_count)).numpy()
    of_key = part[np.searchsorted(starts, rows, side="right") - 1]
    present = np.unique(of_key)
    groups = [torch.from_numpy(np.flatnonzero(of_key == number)) for number in present]
    return groups, share[present].tolist()


def study_metric(context: ReportContext) -> Study:
    """Search exactly with both metrics, each with its own τ and λ."""
    names = {"l2": "squared L2", "ip": "inner product"}
    tried = [
        select_for(
            context,
            search_both(context, ExactIndex(context.store.keys, metric=metric, device=context.device)),
            metric=metric,
        )
        for metric in names
    ]
    cells = [(name, metric, one.k) for (metric, name), one in zip(names.items(), tried, strict=True)]
    best = lowest([one.valid for one in tried])
    first, second = (list(names.values())[number] for number in (best, 1 - best))
    return Study(
        name="metric",
        title="L2 against inner product",
        paper="kNN-LM, section 3; Why do Nearest Neighbor Language Models Work?, on distances",
        finding=(
            f"With {first} perplexity is {tried[best].test:.2f}, with {second} {tried[1 - best].test:.2f}, each with "
            "its own τ and λ."
        ),
        command=context.eval_command("--memories", "knn", "--metric", "ip", *tried[1].options()),
        tables=[Table.of_outcomes({"metric": "", "--metric": "", "k": ",d"}, cells, tried)],
        plots=[
            Plot.bars("Perplexity by metric", [*names.values()], [one.test for one in tried], model_alone=context.base)
        ],
    )
