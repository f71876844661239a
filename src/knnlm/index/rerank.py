"""Measure a shortlist again on the vectors themselves. Knows nothing about how the shortlist came about.

Approximate indexes compare with compressed codes. Votes weigh neighbours by exp(-distance), so an error of the codes
would enter them directly; measured on the stored vectors, only the choice of the shortlist is approximate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.index.base import Index, Neighbours, Vectors

_BYTES = 1 << 26  # of gathered vectors at a time


class Reranked:
    """Ask an index for more than k, measure them exactly, keep the k nearest."""

    def __init__(self, index: Index, vectors: Vectors, *, depth: float = 2.0) -> None:
        self.metric = index.metric
        self._index = index
        self._vectors = vectors
        self._depth = depth

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""
        shortlist = self._index.search(queries, max(k, min(int(k * self._depth), self._vectors.rows)))
        measured = remeasure(self._vectors, queries.float(), shortlist.ids, metric=self.metric)
        return Neighbours(measured.ids[:, :k], measured.distances[:, :k])


def remeasure(vectors: Vectors, queries: Tensor, ids: Tensor, *, metric: str) -> Neighbours:
    """Put ids (N, k) into the order of their exact distances, computed as differences in float32."""
    distances = torch.empty(ids.shape, device=queries.device)
    step = max(1, _BYTES // (4 * vectors.width * max(1, ids.shape[1])))
    for begin in range(0, len(ids), step):
        part = slice(begin, begin + step)
        keys = vectors.take(ids[part]).to(queries.device)  # (n, k, D)
        if metric == "ip":
            distances[part] = -torch.einsum("nkd,nd->nk", keys, queries[part])
        else:
            distances[part] = (keys - queries[part, None]).square_().sum(2)
    distances.masked_fill_(ids < 0, torch.inf)
    distances, order = distances.sort(dim=1, stable=True)
    return Neighbours(ids.gather(1, order), distances)
