"""Search again for all positions of a text, in other keys or with another metric, and choose settings for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.evaluation.trace import MemoryTrace, Trace
from knnlm.index.base import Index, Neighbours, Vectors
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import RetrievedNeighbours
from knnlm.progress import Progress, silent
from knnlm.report.study import Outcome

_QUERY_BATCH = 4096  # keys that do not fit into RAM are read once for each batch


@dataclass(frozen=True)
class ArrayVectors:
    """Vectors that are held in RAM."""

    keys: Tensor  # (N, D) float32

    @property
    def rows(self) -> int:
        """The number of vectors."""
        return len(self.keys)

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self.keys.shape[1]

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first vector, (n, D)) from first to last."""
        for begin in range(0, self.rows, size):
            yield begin, self.keys[begin : begin + size]

    def take(self, ids: Tensor) -> Tensor:
        """Return the vectors of these ids; an id below 0 gives zeros."""
        vectors = self.keys[ids.clamp(min=0)]
        vectors[ids < 0] = 0
        return vectors


@dataclass(frozen=True)
class VectorSubset:
    """Some of other vectors, numbered from 0."""

    whole: Vectors
    ids: Tensor  # (n,) ascending numbers in the whole

    @property
    def rows(self) -> int:
        """The number of vectors."""
        return len(self.ids)

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self.whole.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first vector, (n, D)) from first to last."""
        for begin in range(0, self.rows, size):
            yield begin, self.whole.take(self.ids[begin : begin + size])

    def take(self, ids: Tensor) -> Tensor:
        """Return the vectors of these ids; an id below 0 gives zeros."""
        return self.whole.take(self.to_whole(ids))

    def to_whole(self, ids: Tensor) -> Tensor:
        """Return the ids in the whole of ids in the subset; an id below 0 stays."""
        if not self.rows:
            return ids
        return self.ids.to(ids.device)[ids.clamp(min=0)].masked_fill(ids < 0, -1)


class SubsetIndex:
    """An index over a subset that returns ids of the whole."""

    def __init__(self, index: Index, subset: VectorSubset) -> None:
        self.metric = index.metric
        self._index = index
        self._subset = subset

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        neighbours = self._index.search(queries, k)
        return Neighbours(self._subset.to_whole(neighbours.ids), neighbours.distances)


def search_trace(
    memory: KnnMemory, keys: NDArray[np.float32], k: int, *, device: str = "cpu", progress: Progress = silent
) -> RetrievedNeighbours:
    """Return the k nearest neighbours of all (N, D) keys, held in RAM."""
    blocks: list[RetrievedNeighbours] = []
    with progress("searching", total=len(keys), unit="tokens") as advance:
        for begin in range(0, len(keys), _QUERY_BATCH):
            queries = torch.from_numpy(np.array(keys[begin : begin + _QUERY_BATCH])).to(device)
            block = memory.search(queries, k)
            counts = None if block.counts is None else block.counts.cpu()
            blocks.append(RetrievedNeighbours(block.ids.cpu(), block.distances.cpu(), block.values.cpu(), counts))
            advance(len(queries))
    counted = None if blocks[0].counts is None else torch.cat([_counts(block) for block in blocks])
    return RetrievedNeighbours(
        torch.cat([block.ids for block in blocks]),
        torch.cat([block.distances for block in blocks]),
        torch.cat([block.values for block in blocks]),
        counted,
    )


def _counts(neighbours: RetrievedNeighbours) -> Tensor:
    return torch.ones_like(neighbours.distances) if neighbours.counts is None else neighbours.counts


def merge_neighbours(first: RetrievedNeighbours | None, second: RetrievedNeighbours, k: int) -> RetrievedNeighbours:
    """Return the k nearest of the results of two searches in different keys."""
    if first is None:
        return second.nearest(k)
    distances = torch.cat([first.distances, second.distances], 1)
    nearest, order = distances.sort(dim=1, stable=True)
    order = order[:, :k]
    ids = torch.cat([first.ids, second.ids], 1).gather(1, order)
    values = torch.cat([first.values, second.values], 1).gather(1, order)
    counts = None
    if first.counts is not None or second.counts is not None:
        counts = torch.cat([_counts(first), _counts(second)], 1).gather(1, order)
    return RetrievedNeighbours(ids, nearest[:, :k], values, counts)


def with_neighbours(trace: Trace, neighbours: RetrievedNeighbours, *, metric: str = "l2") -> Trace:
    """Return a trace of the same text with these neighbours as its only memory."""
    arrays: dict[str, NDArray[Any]] = {
        "distances": neighbours.distances.numpy().astype(np.float32),
        "values": neighbours.values.numpy().astype(np.int32),
    }
    if neighbours.counts is not None:
        arrays["counts"] = neighbours.counts.numpy().astype(np.float32)
    metadata = {
        "label": "knn",
        "kind": "knn",
        "k": neighbours.distances.shape[1],
        "metric": metric,
        "counted": neighbours.counts is not None,
        "expensive": True,
        "component_names": ["knn"],
        "feature_names": [],
    }
    return replace(trace, memories=[MemoryTrace(metadata, arrays, int(trace.metadata["vocab_size"]))])


def truncate_trace(trace: Trace, rows: int, documents: int) -> Trace:
    """Return the first rows of a trace, without memories."""
    return replace(
        trace,
        targets=trace.targets[:rows],
        lm_log_probs=trace.lm_log_probs[:rows],
        lm_features=trace.lm_features[:rows],
        lm_top=trace.lm_top[:rows],
        documents=trace.documents[:rows],
        positions=trace.positions[:rows],
        previous_tokens=trace.previous_tokens[:rows],
        memories=[],
        metadata={**trace.metadata, "tokens": rows, "documents": documents},
    )


def select_settings(
    valid: Trace,
    test: Trace,
    *,
    k: int | None = None,
    knn_temperatures: tuple[float, ...] | None = None,
    memory: int = 0,
) -> Outcome:
    """Choose k (if not given), τ and λ of a memory on the tuning text, and evaluate them on the held-out text."""
    result = valid.sweep(memory=memory, ks=None if k is None else [k], knn_temperatures=knn_temperatures)
    best_k, knn_temperature, lmbda, perplexity = result.best
    measured = test.replay(k=best_k, knn_temperature=knn_temperature, lmbda=lmbda, memory=memory)
    return Outcome(best_k, knn_temperature, lmbda, perplexity, measured.perplexity)
