"""Studies of a smaller store: keys in fewer bytes, fewer dimensions, fewer keys."""

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
from knnlm.report.search import ArrayVectors, SubsetIndex, VectorSubset, search_trace
from knnlm.report.studies.store import both_texts, search_both, select_for
from knnlm.report.study import Line, Outcome, Plot, Study, StudyUnavailable, Table
from knnlm.training.prune import prune, store_log_p

# By `quick`:
_QUANTISED_KEYS = {True: 20_000, False: 200_000}
_QUERY_TOKENS = {True: 500, False: 5000}  # of each text
_MAX_PRUNED_KEYS = {True: 20_000, False: 200_000}

_KEYS_PER_CENTROID = 39  # that FAISS wants for training a product quantiser
_OWN_DISTANCES, _RERANKED = "own distances", "reranked"


@dataclass(frozen=True)
class _Quantised:
    """One way to store keys, and its result."""

    name: str
    distances: str
    bytes: int  # per key
    recall: float
    outcome: Outcome


@dataclass(frozen=True)
class _Pruned:
    """One way to prune the store, and its result."""

    name: str
    options: str  # of `knnlm prune`
    keys: int
    bytes: int
    outcome: Outcome


def study_quantised(context: ReportContext) -> Study:
    """Store keys in fewer bytes, and vote with the distances of the codes or of the keys."""
    kept, notes = _quantise(context)
    if len(kept) == 1:
        raise StudyUnavailable(f"FAISS cannot quantise this store ({notes[-1]})")
    exact, *codes = kept
    coarse = min(codes, key=lambda one: one.bytes)
    again = codes[codes.index(coarse) + 1]
    lines = [
        Line(name, [one.bytes for one in own], [one.outcome.test for one in own])
        for name in (_OWN_DISTANCES, _RERANKED)
        if (own := [one for one in codes if one.distances == name])
    ]
    index = context.command("index", context.options.store, "--index", coarse.name)
    evaluation = context.eval_command("--memories", "knn", "--metric", "l2", *coarse.outcome.options(), "--no-rerank")
    return Study(
        name="quantised",
        title="Exact against quantised distances",
        paper="kNN-LM, section 5; Why do Nearest Neighbor Language Models Work?, on approximate search",
        finding=(
            f"Exact distances give {exact.outcome.test:.2f}; codes of {coarse.bytes} bytes ({coarse.name}) give "
            f"{coarse.outcome.test:.2f} by their own distances and {again.outcome.test:.2f} reranked by the keys."
        ),
        command=context.report_command("quantised"),
        tables=[
            Table.of_outcomes(
                {"keys stored as": "", "distances": "", "bytes per key": ",d", "recall": ".1%"},
                [(one.name, one.distances, one.bytes, one.recall) for one in kept],
                [one.outcome for one in kept],
                caption=f"Recall: the share of the {context.chosen[0].k} exact neighbours that are found.",
            )
        ],
        plots=[Plot.points("Perplexity by the size of a key", "bytes per key", lines, exact=exact.outcome.test)],
        notes=[*notes, f"For the whole text: {index} && {evaluation}"],
    )


def _quantise(context: ReportContext) -> tuple[list[_Quantised], list[str]]:
    """Try every way of storing keys, on the same sample of them."""
    store = context.store
    order = torch.randperm(store.key_count, generator=torch.Generator().manual_seed(0))
    part = VectorSubset(store.keys, order[: _QUANTISED_KEYS[context.quick]].sort().values)
    keys = ArrayVectors(part.take(torch.arange(part.rows)))  # in RAM, because they are read many times
    # Reranking fetches thousands of keys for each position, so there are few positions.
    texts = [read.head(_QUERY_TOKENS[context.quick]) for read in both_texts(context)]
    exact = search_both(context, SubsetIndex(ExactIndex(keys, device=context.device), part), texts)
    size = row_bytes(store.codec)
    kept = [_Quantised(store.storage, "exact", size, 1.0, select_for(context, exact, texts=texts))]
    notes = [f"In {part.rows:,} of the {store.key_count:,} keys, for {len(texts[1].keys):,} held-out tokens."]
    for spec, size in _specs(part.rows, store.width, quick=context.quick):
        try:
            index = FaissIndex.build(keys, spec, progress=context.progress)
        except ParameterError as error:
            notes.append(f"{spec} was skipped: {error}")
            continue
        for name, one in ((_OWN_DISTANCES, index), (_RERANKED, RerankedIndex(index, keys))):
            neighbours = search_both(context, SubsetIndex(one, part), texts)
            outcome = select_for(context, neighbours, texts=texts)
            kept.append(_Quantised(spec, name, size, recall(neighbours[1].ids, exact[1].ids), outcome))
    return kept, notes


def recall(found: Tensor, exact: Tensor) -> float:
    """Return the share of the (N, k) exact neighbours that are among the (N, k) found, row by row."""
    hits = total = 0
    for mine, theirs in zip(found.numpy(), exact.numpy(), strict=True):
        wanted = theirs[theirs >= 0]
        hits += int(np.isin(wanted, mine).sum())
        total += len(wanted)
    return hits / max(1, total)


def _specs(rows: int, width: int, *, quick: bool) -> Iterator[tuple[str, int]]:
    """Yield FAISS specs that store keys in fewer bytes, with their bytes per key."""
    pieces = max(pieces for pieces in range(1, min(width, 64) + 1) if width % pieces == 0)
    half, quarter = max(1, width // 2), max(1, width // 4)
    if not quick:
        yield "SQfp16", 2 * width
    yield "SQ8", width
    if rows >= width:  # PCA needs as many keys as dimensions
        if not quick:
            yield f"PCA{half},SQfp16", 2 * half
        yield f"PCA{quarter},SQ8", quarter
    if rows >= 256 * _KEYS_PER_CENTROID:
        yield f"PQ{pieces}", pieces
    elif rows >= 16 * _KEYS_PER_CENTROID:
        yield f"PQ{pieces}x4", -(-pieces // 2)


def study_pruning(context: ReportContext) -> Study:
    """Prune the store in a few ways, and search the rest exactly."""
    store = context.store
    if store.key_count > _MAX_PRUNED_KEYS[context.quick]:
        raise StudyUnavailable(
            f"the store has {store.key_count:,} keys, and merging compares all pairs; at most "
            f"{_MAX_PRUNED_KEYS[context.quick]:,} are pruned here{' with --quick' if context.quick else ''}. "
            "Run knnlm prune instead"
        )
    made = _prune_all(context)
    smallest = min(made, key=lambda one: one.bytes)
    out = context.work / "pruned"
    return Study(
        name="pruning",
        title="A smaller store",
        paper="Efficient Nearest Neighbor Language Models (He et al. 2021)",
        finding=(
            f"In {smallest.bytes / store.bytes:.0%} of the bytes ({smallest.name}) perplexity is "
            f"{smallest.outcome.test:.2f} instead of {made[0].outcome.test:.2f}."
        ),
        command=context.command("prune", context.options.store, "--out", out, *smallest.options.split())
        + "\n"
        + context.command("eval", out, context.work / "test.jsonl", "--memories", "knn", *smallest.outcome.options()),
        tables=[
            Table.of_outcomes(
                {"store": "", "keys": ",d", "bytes": ",d", "of all": ".0%"},
                [(one.name, one.keys, one.bytes, one.bytes / store.bytes) for one in made],
                [one.outcome for one in made],
                caption=f"Exact search with k = {context.chosen[0].k}; bytes of keys and tokens.",
            )
        ],
        plots=[
            Plot.points(
                "Perplexity by the size of the store",
                "bytes",
                [Line(one.name, [one.bytes], [one.outcome.test]) for one in made],
            )
        ],
    )


def _prune_all(context: ReportContext) -> list[_Pruned]:
    """Measure the whole store, then prune it in every way and measure each result."""
    store = context.store
    whole = select_for(context, search_both(context, ExactIndex(store.keys, device=context.device)))
    made = [_Pruned("the whole store", "", store.key_count, store.bytes, whole)]
    for name, options, settings in _prune_settings(context):
        with closing(_prune(context, settings)) as smaller:
            made.append(_Pruned(name, options, smaller.key_count, smaller.bytes, _measure(context, smaller)))
        shutil.rmtree(smaller.path, ignore_errors=True)
    return made


def _prune_settings(context: ReportContext) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield ways of pruning: in words, as options of `knnlm prune`, as arguments of `prune`."""
    half, quarter = max(1, context.store.width // 2), max(1, context.store.width // 4)
    yield "half the dimensions", f"--width {half}", {"width": half}
    yield "a quarter of the dimensions", f"--width {quarter}", {"width": quarter}
    yield "merged", "--merge 8", {"merge": 8}
    known = {"drop_known": 0.9, "log_p": store_log_p(context.store, context.lm, progress=context.progress)}
    yield "known dropped", "--drop-known 0.9", known
    together = f"--width {half} --merge 8 --drop-known 0.9"
    yield "all three", together, {"width": half, "merge": 8, **known}


def _prune(context: ReportContext, settings: dict[str, Any]) -> Datastore:
    out = context.work / "pruned"
    shutil.rmtree(out, ignore_errors=True)
    prune(context.store, out, device=context.device, progress=context.progress, **settings)
    return Datastore.open(out)


def _measure(context: ReportContext, smaller: Datastore) -> Outcome:
    setting = context.chosen[0]
    index = ExactIndex(smaller.keys, device=context.device)
    memory = KnnMemory(smaller, index, k=setting.k, knn_temperature=setting.knn_temperature)
    neighbours = [
        search_trace(memory, read.keys, setting.k, device=context.device, progress=context.progress)
        for read in both_texts(context)
    ]
    return select_for(context, neighbours)
