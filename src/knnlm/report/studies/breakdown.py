"""Studies of where the store helps and where it hurts: by kinds of tokens, and in single examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.indexes import open_index
from knnlm.memories.knn import KnnMemory, stored_passage
from knnlm.memories.voting import VoteOutput
from knnlm.report.context import ReportContext
from knnlm.report.study import Cell, Example, ExampleNeighbour, Line, Plot, Study, StudyUnavailable, Table

_CONTEXT_TOKENS = 40  # before the target
_BEFORE, _AFTER = 12, 8  # tokens around a neighbour
_MAX_NEIGHBOURS = 4  # of an example
_EXAMPLES = {True: 4, False: 8}  # of each kind, by `quick`


def log_probs_of_test(context: ReportContext) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (N,) log-probabilities of the held-out text by the model, by the store, and by both with one λ."""
    _, lmbda = context.chosen
    model, store = context.store_log_probs(context.test)
    vote = torch.where(store.isnan(), model, store)
    mixed = torch.logaddexp(model + np.log1p(-lmbda), vote + np.log(lmbda)) if lmbda > 0 else model
    return model, vote, mixed


def study_where(context: ReportContext) -> Study:
    """Sum the gain of the store by kinds of tokens."""
    model, _, mixed = log_probs_of_test(context)
    gain = (mixed - model).numpy()
    tables, plots, numbers = [], [], {}
    extremes: list[tuple[float, str, str]] = []
    for name, title, labels, group in _groupings(context):
        rows: list[list[Cell]] = []
        for number, label in enumerate(labels):
            own = group == number
            if own.any():
                before, after = (float(np.exp(-log_p.numpy()[own].mean())) for log_p in (model, mixed))
                mean = float(gain[own].mean())
                rows.append([label, int(own.sum()), before, after, mean, float(gain[own].sum())])
                extremes.append((mean, title, label))
        columns = [title, "tokens", "model", "with the store", "nats a token", "nats in all"]
        tables.append(Table(columns, ["", ",d", ".2f", ".2f", "+.3f", "+.1f"], rows))
        line = Line("gain", [row[0] for row in rows], [float(str(row[4])) for row in rows])
        plots.append(Plot("bars", f"Gain by {title}", "", "nats a token", [line]))
        numbers[name] = rows
    most, least = max(extremes), min(extremes)
    return Study(
        name="where",
        title="Where the store helps, and where it hurts",
        paper="kNN-LM, section 6",
        finding=(
            f"The store gains {gain.mean():.3f} nats a token; most, {most[0]:+.2f}, where {most[1]} is {most[2]}, and "
            f"least, {least[0]:+.2f}, where {least[1]} is {least[2]}. {float((gain < 0).mean()):.0%} of the tokens "
            "become less probable."
        ),
        command=context.report_command("where"),
        tables=tables,
        plots=plots,
        numbers={"gain": float(gain.mean()), "total": float(gain.sum()), **numbers},
    )


def _groupings(context: ReportContext) -> Iterator[tuple[str, str, list[str], NDArray[np.int64]]]:
    """Yield (name, title, names of the groups, the group of each token)."""
    trace = context.test.trace
    often = context.frequencies.numpy()[np.asarray(trace.targets)]
    yield "frequency", "frequency of the token in the store", *group_by_bounds(often, (1, 10, 100, 1000, 10_000))
    yield (
        "position",
        "position in the document",
        *group_by_bounds(np.asarray(trace.positions), (16, 64, 256, 1024, 4096)),
    )
    sure = np.exp(np.asarray(trace.lm_features[:, 0], dtype=np.float64))
    bounds = (0.1, 0.3, 0.6, 0.9)
    edges = [0.0, *bounds, 1.0]
    labels = [f"{a:g} to {b:g}" for a, b in pairwise(edges)]
    yield "confidence", "confidence of the model", labels, np.searchsorted(bounds, sure, side="right")
    _, first, length = np.unique(trace.documents, return_inverse=True, return_counts=True)
    thirds = np.asarray(trace.positions, dtype=np.int64) * 3 // length[first]
    yield "third", "third of the document", ["beginning", "middle", "end"], thirds


def group_by_bounds(values: NDArray[np.float64], bounds: Sequence[int]) -> tuple[list[str], NDArray[np.int64]]:
    """Return names of the ranges between bounds, and the range of each number."""
    edges = [0, *bounds]
    labels = [f"{a:,}" if b == a + 1 else f"{a:,} to {b - 1:,}" for a, b in pairwise(edges)]
    return [*labels, f"{edges[-1]:,} or more"], np.searchsorted(bounds, values, side="right")


def study_examples(context: ReportContext) -> Study:
    """Show the tokens with the largest gain and loss, with their nearest neighbours."""
    setting, lmbda = context.chosen
    if lmbda <= 0:
        raise StudyUnavailable("λ = 0 was chosen, so the store has no effect")
    model, vote, mixed = log_probs_of_test(context)
    gain = mixed - model
    index = open_index(context.store, device=context.device)
    memory = KnnMemory(context.store, index, k=setting.k, knn_temperature=setting.knn_temperature)
    count = _EXAMPLES[context.quick]
    examples = {}
    # Many tokens lose the maximum that λ allows; show those of which the model was most confident.
    lost = sorted(range(len(gain)), key=lambda row: (round(float(gain[row]), 2), -float(model[row])))
    for kind, order in (("gained most", gain.argsort(descending=True).tolist()), ("lost most", lost)):
        rows = _distinct(context, order, count)
        keys = torch.from_numpy(np.array(context.test.keys[np.sort(rows)])).to(context.device)
        place = {row: number for number, row in enumerate(np.sort(rows).tolist())}
        output = memory.output(memory.search(keys, setting.k))
        examples[kind] = [
            _example(context, output, place[row], row, [float(column[row]) for column in (model, vote, mixed)])
            for row in rows
        ]
    most, worst = examples["gained most"][0], examples["lost most"][0]
    return Study(
        name="examples",
        title="Examples",
        paper="kNN-LM, Tables 6 to 9",
        finding=(
            f"The most gained was {most.gain:.1f} nats ({most.p_lm:.2g} → {most.p:.2g}), the most lost "
            f"{-worst.gain:.2f} ({worst.p_lm:.2g} → {worst.p:.2g}): with λ = {lmbda:.2f} no token can lose more than "
            f"{-np.log1p(-lmbda):.2f}."
        ),
        command=context.report_command("examples"),
        examples=examples,
    )


def _distinct(context: ReportContext, order: Sequence[int], count: int) -> list[int]:
    """Return the first rows with distinct tokens."""
    chosen: dict[int, int] = {}
    for row in order:
        chosen.setdefault(int(context.test.trace.targets[row]), row)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _example(context: ReportContext, output: VoteOutput, number: int, row: int, logs: Sequence[float]) -> Example:
    """Describe one row of the held-out text, which is a row of `output` too, by its number there."""
    trace, decode = context.test.trace, context.lm.decode
    first = row - int(trace.positions[row])
    preceding = trace.targets[max(first, row - _CONTEXT_TOKENS) : row].tolist()
    document = context.test.documents[sorted(set(trace.documents.tolist())).index(first)]
    p_lm, p_knn, p = (float(np.exp(log_p)) for log_p in logs)
    votes, neighbours = output.components[0].log_weights[number].exp(), output.neighbours
    target = int(trace.targets[row])
    shown = []
    for place in range(min(_MAX_NEIGHBOURS, len(votes))):
        where, value = int(neighbours.ids[number, place]), int(neighbours.values[number, place])
        if where < 0:
            continue
        passage = stored_passage(context.store, where, decode, before=_BEFORE, after=_AFTER)
        shown.append(
            ExampleNeighbour(
                weight=float(votes[place]),
                distance=float(neighbours.distances[number, place]),
                token=passage.token,
                agrees=value == target,
                document=passage.document,
                source=passage.source,
                before=passage.before,
                after=passage.after,
            )
        )
    return Example(decode(preceding), decode([target]), document.source, p_lm, p_knn, p, logs[2] - logs[0], shown)
