"""Where the memory helps and where it hurts: by kinds of tokens, and in single examples. All from the trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.indexes import open_index
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import RetrievedNeighbours
from knnlm.report.context import ReportContext
from knnlm.report.study import CannotStudy, Cell, Example, ExampleNeighbour, Line, Plot, Study, Table

_CONTEXT = 40  # tokens before the target

_BEFORE, _AFTER = 12, 8  # tokens around a neighbour

_SHOWN = 4  # neighbours of an example

_EXAMPLES = {True: 4, False: 8}  # of each kind, by whether it is to be quick


def gains(desk: ReportContext) -> tuple[Tensor, Tensor, Tensor]:
    """Give the (N,) log-probabilities of the held-out text by the model, by the store, and by both with one λ."""
    _, lmbda = desk.chosen
    model, store = desk.store_logs(desk.test)
    vote = torch.where(store.isnan(), model, store)
    mixed = torch.logaddexp(model + np.log1p(-lmbda), vote + np.log(lmbda)) if lmbda > 0 else model
    return model, vote, mixed


def study_where(desk: ReportContext) -> Study:
    """Add up what the store gained, by kinds of tokens."""
    model, _, mixed = gains(desk)
    gain = (mixed - model).numpy()
    tables, plots, numbers = [], [], {}
    extremes: list[tuple[float, str, str]] = []
    for name, title, labels, group in _groupings(desk):
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
        title="Where the memory helps, and where it hurts",
        paper="kNN-LM, section 6",
        finding=(
            f"The store gains {gain.mean():.3f} nats a token; most, {most[0]:+.2f}, where {most[1]} is {most[2]}, and "
            f"least, {least[0]:+.2f}, where {least[1]} is {least[2]}. {float((gain < 0).mean()):.0%} of the tokens "
            "become less probable."
        ),
        command=desk.again("where"),
        tables=tables,
        plots=plots,
        numbers={"gain": float(gain.mean()), "total": float(gain.sum()), **numbers},
    )


def _groupings(desk: ReportContext) -> Iterator[tuple[str, str, list[str], NDArray[np.int64]]]:
    """Give (name, title, names of the groups, the group of each token)."""
    trace = desk.test.trace
    often = desk.frequencies.numpy()[np.asarray(trace.targets)]
    yield "frequency", "frequency of the token in the store", *_cut(often, (1, 10, 100, 1000, 10_000))
    yield "position", "position in the document", *_cut(np.asarray(trace.positions), (16, 64, 256, 1024, 4096))
    sure = np.exp(np.asarray(trace.lm_features[:, 0], dtype=np.float64))
    bounds = (0.1, 0.3, 0.6, 0.9)
    edges = [0.0, *bounds, 1.0]
    labels = [f"{a:g} to {b:g}" for a, b in pairwise(edges)]
    yield "confidence", "confidence of the model", labels, np.searchsorted(bounds, sure, side="right")
    _, first, length = np.unique(trace.documents, return_inverse=True, return_counts=True)
    thirds = np.asarray(trace.positions, dtype=np.int64) * 3 // length[first]
    yield "part", "part of the document", ["beginning", "middle", "end"], thirds


def _cut(values: NDArray[np.float64], bounds: Sequence[int]) -> tuple[list[str], NDArray[np.int64]]:
    """Cut whole numbers at bounds, and name what is between them."""
    edges = [0, *bounds]
    labels = [f"{a:,}" if b == a + 1 else f"{a:,} to {b - 1:,}" for a, b in pairwise(edges)]
    return [*labels, f"{edges[-1]:,} or more"], np.searchsorted(bounds, values, side="right")


def study_examples(desk: ReportContext) -> Study:
    """Show the tokens for which the store gained and lost most, with the neighbours that spoke."""
    setting, lmbda = desk.chosen
    if lmbda <= 0:
        raise CannotStudy("λ = 0 was chosen: the store is not heard at all")
    model, vote, mixed = gains(desk)
    gain = mixed - model
    index = open_index(desk.store, device=desk.device)
    memory = KnnMemory(desk.store, index, k=setting.k, knn_temperature=setting.knn_temperature)
    count = _EXAMPLES[desk.quick]
    examples = {}
    # Many lose all that one λ lets them lose; those that the model was surest of tell most.
    lost = sorted(range(len(gain)), key=lambda row: (round(float(gain[row]), 2), -float(model[row])))
    for kind, order in (("gained most", gain.argsort(descending=True).tolist()), ("lost most", lost)):
        rows = _distinct(desk, order, count)
        keys = torch.from_numpy(np.array(desk.test.keys[np.sort(rows)])).to(desk.device)
        place = {row: number for number, row in enumerate(np.sort(rows).tolist())}
        found = memory.search(keys, setting.k)
        examples[kind] = [
            _example(desk, memory, found, place[row], row, [float(column[row]) for column in (model, vote, mixed)])
            for row in rows
        ]
    most, worst = examples["gained most"][0], examples["lost most"][0]
    return Study(
        name="examples",
        title="The most telling examples",
        paper="kNN-LM, Tables 6 to 9",
        finding=(
            f"The most gained was {most.gain:.1f} nats ({most.p_lm:.2g} → {most.p:.2g}), the most lost "
            f"{-worst.gain:.2f} ({worst.p_lm:.2g} → {worst.p:.2g}): with λ = {lmbda:.2f} no token can lose more than "
            f"{-np.log1p(-lmbda):.2f}."
        ),
        command=desk.again("examples"),
        examples=examples,
    )


def _distinct(desk: ReportContext, order: Sequence[int], count: int) -> list[int]:
    """Take the first rows whose tokens are all different."""
    chosen: dict[int, int] = {}
    for row in order:
        chosen.setdefault(int(desk.test.trace.targets[row]), row)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _example(
    desk: ReportContext, memory: KnnMemory, found: RetrievedNeighbours, number: int, row: int, logs: Sequence[float]
) -> Example:
    trace, decode = desk.test.trace, desk.lm.decode
    first = row - int(trace.positions[row])
    context = trace.targets[max(first, row - _CONTEXT) : row].tolist()
    document = desk.test.documents[sorted(set(trace.documents.tolist())).index(first)]
    p_lm, p_knn, p = (float(np.exp(log_p)) for log_p in logs)
    votes = memory.output(found).components[0].log_weights[number].exp()
    target = int(trace.targets[row])
    neighbours = []
    for place in range(min(_SHOWN, len(votes))):
        where, value = int(found.ids[number, place]), int(found.values[number, place])
        if where < 0:
            continue
        before, after = desk.store.around(where, before=_BEFORE, after=_AFTER)
        stored = desk.store.document_at(where)
        neighbours.append(
            ExampleNeighbour(
                weight=float(votes[place]),
                distance=float(found.distances[number, place]),
                token=decode([value]),
                agrees=value == target,
                document=stored.id,
                source=stored.source,
                before=decode(before),
                after=decode(after[1:]),
            )
        )
    return Example(decode(context), decode([target]), document.source, p_lm, p_knn, p, logs[2] - logs[0], neighbours)
