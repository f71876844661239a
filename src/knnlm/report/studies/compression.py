"""Studies of a smaller store: keys in fewer bytes, fewer dimensions, fewer keys. What each costs in perplexity."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.datastore.codecs import row_bytes
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.index.exact import ExactIndex
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import RerankedIndex
from knnlm.memories.knn import KnnMemory
from knnlm.report.context import ReportContext
from knnlm.report.search import ArrayVectors, Outcome, Part, SubsetIndex, search_trace
from knnlm.report.studies.store import both, choose_for, search_both
from knnlm.report.study import FIGURES, CannotStudy, Cell, Line, Plot, Study, Table, lowest
from knnlm.training.prune import prune, store_log_p

_SAMPLE = {True: 20_000, False: 200_000}  # keys that are quantised, by whether it is to be quick

_TEXT = {True: 500, False: 5000}  # tokens of each text that are searched for in them

_PRUNED = {True: 20_000, False: 200_000}  # keys of the largest store that is pruned

_TRAINED = 39  # keys that FAISS wants for each centroid of a product quantiser

_OWN, _AGAIN = "own distances", "reranked"


@dataclass(frozen=True)
class _Kept:
    """One way of keeping keys, and what it gives."""

    name: str
    distances: str
    bytes: int  # a key
    recall: float
    outcome: Outcome


def study_quantised(desk: ReportContext) -> Study:
    """Keep keys in fewer bytes, and vote with the distances of the codes or with those of the keys."""
    kept, notes = _quantise(desk)
    if len(kept) == 1:
        raise CannotStudy(f"FAISS can quantise nothing here ({notes[-1]})")
    exact, *codes = kept
    coarse = min(codes, key=lambda one: one.bytes)
    again = codes[codes.index(coarse) + 1]
    rows: list[list[Cell]] = [[one.name, one.distances, one.bytes, one.recall, *one.outcome.figures()] for one in kept]
    lines = [
        Line(name, [one.bytes for one in own], [one.outcome.test for one in own])
        for name in (_OWN, _AGAIN)
        if (own := [one for one in codes if one.distances == name])
    ]
    index = desk.command("index", desk.order.memory, "--index", coarse.name)
    evaluation = desk.evaluation("--memories", "knn", "--metric", "l2", *coarse.outcome.options(), "--no-rerank")
    return Study(
        name="quantised",
        title="Exact against quantised distances",
        paper="kNN-LM, section 5; Why do Nearest Neighbor Language Models Work?, on approximate search",
        finding=(
            f"Exact distances give {exact.outcome.test:.2f}; codes of {coarse.bytes} bytes ({coarse.name}) give "
            f"{coarse.outcome.test:.2f} by their own distances and {again.outcome.test:.2f} reranked by the keys."
        ),
        command=desk.again("quantised"),
        tables=[
            Table.of(
                {"keys kept as": "", "distances": "", "bytes a key": ",d", "recall": ".1%", **FIGURES},
                rows,
                caption=f"Recall: the share of the {desk.chosen[0].k} exactly nearest that are among those found.",
                best=lowest([one.outcome.valid for one in kept]),
            )
        ],
        plots=[
            Plot(
                "points",
                "Perplexity by the size of a key",
                "bytes a key",
                "perplexity",
                lines,
                log_x=True,
                levels={"exact": exact.outcome.test},
            )
        ],
        notes=[*notes, f"For the whole text: {index} && {evaluation}"],
    )


def _quantise(desk: ReportContext) -> tuple[list[_Kept], list[str]]:
    """Try every way of keeping keys, on the same sample of them."""
    store = desk.store
    order = torch.randperm(store.key_count, generator=torch.Generator().manual_seed(0))
    part = Part(store.keys, order[: _SAMPLE[desk.quick]].sort().values)
    keys = ArrayVectors(part.take(torch.arange(part.rows)))  # they are looked at again and again
    # Reranking fetches thousands of keys for each position, so few positions must do.
    texts = [read.begin(_TEXT[desk.quick]) for read in both(desk)]
    exact = search_both(desk, SubsetIndex(ExactIndex(keys, device=desk.device), part), texts)
    size = row_bytes(store.codec)
    kept = [_Kept(store.storage, "exact", size, 1.0, choose_for(desk, exact, texts=texts))]
    notes = [f"In {part.rows:,} of the {store.key_count:,} keys, for {len(texts[1].keys):,} held-out tokens."]
    for spec, size in _specs(part.rows, store.width, quick=desk.quick):
        try:
            index = FaissIndex.build(keys, spec, progress=desk.progress)
        except ParameterError as error:
            notes.append(f"{spec} was left out: {error}")
            continue
        for name, one in ((_OWN, index), (_AGAIN, RerankedIndex(index, keys))):
            found = search_both(desk, SubsetIndex(one, part), texts)
            outcome = choose_for(desk, found, texts=texts)
            kept.append(_Kept(spec, name, size, recall(found[1].ids, exact[1].ids), outcome))
    return kept, notes


def recall(found: Tensor, exact: Tensor) -> float:
    """Give the share of the (N, k) exact neighbours that are among the (N, k) found, row by row."""
    hits = total = 0
    for mine, theirs in zip(found.numpy(), exact.numpy(), strict=True):
        wanted = theirs[theirs >= 0]
        hits += int(np.isin(wanted, mine).sum())
        total += len(wanted)
    return hits / max(1, total)


def _specs(rows: int, width: int, *, quick: bool) -> Iterator[tuple[str, int]]:
    """Name ways of keeping keys in fewer bytes, with their bytes a key."""
    pieces = max(pieces for pieces in range(1, min(width, 64) + 1) if width % pieces == 0)
    half, quarter = max(1, width // 2), max(1, width // 4)
    if not quick:
        yield "SQfp16", 2 * width
    yield "SQ8", width
    if rows >= width:  # fewer keys have fewer directions
        if not quick:
            yield f"PCA{half},SQfp16", 2 * half
        yield f"PCA{quarter},SQ8", quarter
    if rows >= 256 * _TRAINED:
        yield f"PQ{pieces}", pieces
    elif rows >= 16 * _TRAINED:
        yield f"PQ{pieces}x4", -(-pieces // 2)


def study_pruning(desk: ReportContext) -> Study:
    """Prune the store in a few ways, and search what is left exactly."""
    store = desk.store
    if store.key_count > _PRUNED[desk.quick]:
        raise CannotStudy(
            f"the store has {store.key_count:,} keys, and merging compares all with all; up to "
            f"{_PRUNED[desk.quick]:,} are pruned here{' with --quick' if desk.quick else ''}. Try knnlm prune by itself"
        )
    made: list[tuple[str, str, int, int, Outcome]] = []
    whole = choose_for(desk, search_both(desk, ExactIndex(store.keys, device=desk.device)))
    made.append(("the whole store", "", store.key_count, store.bytes, whole))
    for name, options, settings in _ways(desk):
        with closing(_prune(desk, settings)) as smaller:
            made.append((name, options, smaller.key_count, smaller.bytes, _measure(desk, smaller)))
        shutil.rmtree(smaller.path, ignore_errors=True)
    rows: list[list[Cell]] = [
        [name, keys, size, size / store.bytes, one.knn_temperature, one.lmbda, one.valid, one.test]
        for name, _, keys, size, one in made
    ]
    smallest = min(made, key=lambda one: one[3])
    lines = [Line(name, [size], [one.test]) for name, _, _, size, one in made]
    out = desk.work / "pruned"
    return Study(
        name="pruning",
        title="A smaller store",
        paper="Efficient Nearest Neighbor Language Models (He et al. 2021)",
        finding=(
            f"In {smallest[3] / store.bytes:.0%} of the bytes ({smallest[0]}) perplexity is {smallest[4].test:.2f} "
            f"instead of {whole.test:.2f}."
        ),
        command=desk.command("prune", desk.order.memory, "--out", out, *smallest[1].split())
        + "\n"
        + desk.command("eval", out, desk.work / "test.jsonl", "--memories", "knn", *smallest[4].options()),
        tables=[
            Table.of(
                {"store": "", "keys": ",d", "bytes": ",d", "of all": ".0%", **FIGURES},
                rows,
                caption=f"Exact search with k = {desk.chosen[0].k}; bytes of keys and tokens.",
                best=lowest([one[4].valid for one in made]),
            )
        ],
        plots=[Plot("points", "Perplexity by the size of the store", "bytes", "perplexity", lines, log_x=True)],
    )


def _ways(desk: ReportContext) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name ways of pruning: in words, as options of `knnlm prune`, as arguments of `prune`."""
    half, quarter = max(1, desk.store.width // 2), max(1, desk.store.width // 4)
    yield "half the dimensions", f"--width {half}", {"width": half}
    yield "a quarter of the dimensions", f"--width {quarter}", {"width": quarter}
    yield "merged", "--merge 8", {"merge": 8}
    known = {"drop_known": 0.9, "log_p": store_log_p(desk.store, desk.lm, progress=desk.progress)}
    yield "known dropped", "--drop-known 0.9", known
    together = f"--width {half} --merge 8 --drop-known 0.9"
    yield "all three", together, {"width": half, "merge": 8, **known}


def _prune(desk: ReportContext, settings: dict[str, Any]) -> Datastore:
    out = desk.work / "pruned"
    shutil.rmtree(out, ignore_errors=True)
    prune(desk.store, out, device=desk.device, progress=desk.progress, **settings)
    return Datastore.open(out)


def _measure(desk: ReportContext, smaller: Datastore) -> Outcome:
    setting = desk.chosen[0]
    index = ExactIndex(smaller.keys, device=desk.device)
    memory = KnnMemory(smaller, index, k=setting.k, knn_temperature=setting.knn_temperature)
    found = [
        search_trace(memory, read.keys, setting.k, device=desk.device, progress=desk.progress) for read in both(desk)
    ]
    return choose_for(desk, found)
