"""K-means, the nearest centroid of each vector, and balanced splits.

Vectors are compared in int8: which of some thousand centroids is nearest does not depend on the last digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.index.blocks.kernels import QuantisedRows, int8_matmul, quantise

_BATCH = 1024  # vectors that are compared with all centroids
_SPLIT_ROUNDS = 8


class Centroids:
    """Points that are compared with vectors by squared distance, or by the negated inner product."""

    def __init__(self, points: Tensor, *, metric: str = "l2") -> None:
        quantised = quantise(points)
        self._values = quantised.values
        self._factor = quantised.scale[:, 0] * (-1.0 if metric == "ip" else -2.0)
        self._constant = torch.zeros(len(points)) if metric == "ip" else points.square().sum(1)

    def __len__(self) -> int:
        return len(self._values)

    def distances(self, vectors: QuantisedRows) -> Tensor:
        """Return (m, n) distances of every vector to every point, less what is the same for all points."""
        distances = int8_matmul(vectors.values, self._values).float().mul_(self._factor)
        return torch.addcmul(self._constant, distances, vectors.scale, out=distances)

    def nearest(self, vectors: QuantisedRows) -> Tensor:
        """Return the nearest point of each vector, (m,) int64."""
        batches = (vectors[begin : begin + _BATCH] for begin in range(0, len(vectors), _BATCH))
        return torch.cat([self.distances(batch).argmin(1) for batch in batches] or [torch.empty(0, dtype=torch.int64)])


def kmeans(vectors: Tensor, count: int, *, rounds: int) -> Tensor:
    """Return `count` centroids of the (n, W) vectors, (count, W)."""
    quantised = quantise(vectors)
    points = vectors[torch.linspace(0, len(vectors) - 1, count, dtype=torch.float64).long()].clone()
    for seed in range(rounds):
        labels = Centroids(points).nearest(quantised)
        points = means(vectors, labels, count)
        empty = (torch.bincount(labels, minlength=count) == 0).nonzero()[:, 0]
        # A centroid without vectors restarts at a random vector, most probably in a dense region.
        restarts = torch.randint(len(vectors), (len(empty),), generator=torch.Generator().manual_seed(seed))
        points[empty] = vectors[restarts]
    return points


def means(vectors: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the mean of the vectors with each of the labels 0 to count - 1, zeros for unused ones: (count, W)."""
    sums = torch.zeros(count, vectors.shape[1]).index_add_(0, labels, vectors)
    return sums.div_(torch.bincount(labels, minlength=count).clamp_(min=1)[:, None])


def balanced_split(vectors: Tensor, count: int) -> list[Tensor]:
    """Split (n, W) vectors into groups of equal size whose members are near one another; return their row numbers."""
    todo, done = [(torch.arange(len(vectors)), count)], list[Tensor]()
    while todo:
        rows, groups = todo.pop()
        if groups == 1:
            done.append(rows)
            continue
        left = groups // 2
        members = vectors[rows]
        order = (members @ _split_direction(members)).argsort(stable=True)
        cut = round(len(rows) * left / groups)
        todo += [(rows[order[:cut]], left), (rows[order[cut:]], groups - left)]
    return done


def _split_direction(vectors: Tensor) -> Tensor:
    """Return the direction from one half of the vectors to the other, by k-means with two centroids."""
    vectors = vectors - vectors.mean(0)
    direction = vectors[0] - vectors[-1]
    for _ in range(_SPLIT_ROUNDS):
        side = (vectors @ direction) > 0
        count = int(side.sum())
        if not 0 < count < len(vectors):
            break
        total = vectors[side].sum(0)  # both sides sum to zero
        direction = total / count + total / (len(vectors) - count)
    return direction
