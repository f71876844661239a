"""Synthetic keys with the distribution of real ones, for sizes that a model would take too long to read.

Real keys are clustered. A synthetic key is the centroid of a cluster, drawn in proportion to its size, plus noise with
the covariance of real keys around their centroids, scaled to that cluster. So spectrum, clusters and their sizes are
those of real keys. Neighbours are not followed by the same token more often than others, so these keys are for
times, bytes and recall, not for perplexity. `compare` measures how far they are from real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 65_536
_PER_CLUSTER = 32  # real keys in a cluster, on average
_ROUNDS = 8


@dataclass(frozen=True)
class KeyDistribution:
    """The clusters of real keys."""

    centroids: Tensor  # (C, D)
    shares: Tensor  # (C,) share of each cluster
    spread: Tensor  # (C,) width of each cluster, relative to all
    root: Tensor  # (D, D) square root of the covariance around centroids
    fitted_on: int

    def draw(self, count: int, *, seed: int) -> Iterator[Tensor]:
        """Yield (n, D) float32 keys, in blocks."""
        generator = torch.Generator().manual_seed(seed)
        for begin in range(0, count, BLOCK):
            size = min(BLOCK, count - begin)
            which = torch.multinomial(self.shares, size, replacement=True, generator=generator)
            noise = torch.randn(size, len(self.root), generator=generator) @ self.root
            yield self.centroids[which] + noise * self.spread[which, None]


def fit(keys: Tensor) -> KeyDistribution:
    """Fit the distribution of (n, D) real keys."""
    keys = keys.float()
    generator = torch.Generator().manual_seed(0)
    count = max(1, len(keys) // _PER_CLUSTER)
    centroids = keys[torch.randperm(len(keys), generator=generator)[:count]].clone()
    for _ in range(_ROUNDS):
        nearest = _nearest(keys, centroids)
        sizes = torch.bincount(nearest, minlength=count)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, keys)
        centroids = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centroids)
    nearest = _nearest(keys, centroids)
    sizes = torch.bincount(nearest, minlength=count).float()
    residuals = keys - centroids[nearest]
    # A centroid is the mean of few keys and nearer to them than to new ones: correct that.
    residuals *= (sizes / (sizes - 1).clamp(min=1)).sqrt()[nearest, None]
    widths = torch.zeros(count).index_add_(0, nearest, residuals.square().sum(1)) / sizes.clamp(min=1)
    mean_width = (widths * sizes).sum() / sizes.sum()
    spread = torch.where(sizes > 1, (widths / mean_width).sqrt(), 1.0)
    covariance = (residuals / spread[nearest, None].clamp(min=1e-3)).T @ residuals / len(residuals)
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return KeyDistribution(centroids, sizes / sizes.sum(), spread, root, len(keys))


def _nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    squares = centroids.square().sum(1)
    return torch.cat([torch.addmm(squares, part, centroids.T, alpha=-2).argmin(1) for part in keys.split(8192)])


def write(shape: KeyDistribution, count: int, path: Path, *, seed: int) -> NDArray[np.float16]:
    """Write synthetic keys into a file and map it."""
    keys = np.lib.format.open_memmap(path, "w+", np.float16, (count, shape.centroids.shape[1]))
    begin = 0
    for block in shape.draw(count, seed=seed):
        keys[begin : begin + len(block)] = block.half().numpy()
        begin += len(block)
    keys.flush()
    return np.load(path, mmap_mode="r")


def compare(shape: KeyDistribution, keys: Tensor, *, k: int = 64) -> dict[str, float]:
    """Compare synthetic keys with real ones: distances to the first and to the k-th neighbour."""
    figures = {}
    made = torch.cat(list(shape.draw(len(keys), seed=1)))
    for name, some in (("real", keys.float()), ("synthetic", made)):
        queries, others = some[::2][:256], some[1::2]
        distances = torch.cdist(queries, others).square().topk(k, dim=1, largest=False).values
        figures[f"{name}_first"] = float(distances[:, 0].median())
        figures[f"{name}_last"] = float(distances[:, -1].median())
        variances = torch.linalg.eigvalsh(torch.cov(some.T)).flip(0)
        figures[f"{name}_variance_in_64"] = float(variances[:64].sum() / variances.sum())
    return {name: round(value, 3) for name, value in figures.items()}
