"""Made-up keys with the shape of real ones, for sizes that the model would take too long to read.

Real keys are cut into clusters. A made-up key is the centre of a cluster, drawn as often as it is large, and noise with
the covariance that real keys have around their centres, as wide as that cluster is. So the spectrum, the clusters and
how uneven they are come from real keys. What is lost is how likely two neighbours are to be followed by the same token;
so these keys are for times, bytes and recall, never for perplexity. `compare` says how far they are from real ones.
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
class Shape:
    """What is known of real keys."""

    centres: Tensor  # (C, D)
    shares: Tensor  # (C,) how large each cluster is
    spread: Tensor  # (C,) how wide, relative to all
    root: Tensor  # (D, D) of the covariance around centres
    fitted_on: int

    def draw(self, count: int, *, seed: int) -> Iterator[Tensor]:
        """Give (n, D) float32 keys, in blocks."""
        generator = torch.Generator().manual_seed(seed)
        for begin in range(0, count, BLOCK):
            size = min(BLOCK, count - begin)
            which = torch.multinomial(self.shares, size, replacement=True, generator=generator)
            noise = torch.randn(size, len(self.root), generator=generator) @ self.root
            yield self.centres[which] + noise * self.spread[which, None]


def fit(keys: Tensor) -> Shape:
    """Learn the shape of (n, D) real keys."""
    keys = keys.float()
    generator = torch.Generator().manual_seed(0)
    count = max(1, len(keys) // _PER_CLUSTER)
    centres = keys[torch.randperm(len(keys), generator=generator)[:count]].clone()
    for _ in range(_ROUNDS):
        nearest = _nearest(keys, centres)
        sizes = torch.bincount(nearest, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, nearest, keys)
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
    nearest = _nearest(keys, centres)
    sizes = torch.bincount(nearest, minlength=count).float()
    off = keys - centres[nearest]
    # A centre is the mean of few keys and lies nearer to them than to others of their kind: undo that.
    off *= (sizes / (sizes - 1).clamp(min=1)).sqrt()[nearest, None]
    widths = torch.zeros(count).index_add_(0, nearest, off.square().sum(1)) / sizes.clamp(min=1)
    usual = (widths * sizes).sum() / sizes.sum()
    spread = torch.where(sizes > 1, (widths / usual).sqrt(), 1.0)
    covariance = (off / spread[nearest, None].clamp(min=1e-3)).T @ off / len(off)
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return Shape(centres, sizes / sizes.sum(), spread, root, len(keys))


def _nearest(keys: Tensor, centres: Tensor) -> Tensor:
    squares = centres.square().sum(1)
    return torch.cat([torch.addmm(squares, part, centres.T, alpha=-2).argmin(1) for part in keys.split(8192)])


def write(shape: Shape, count: int, path: Path, *, seed: int) -> NDArray[np.float16]:
    """Put made-up keys into a file and map it, as a store does."""
    keys = np.lib.format.open_memmap(path, "w+", np.float16, (count, shape.centres.shape[1]))
    begin = 0
    for block in shape.draw(count, seed=seed):
        keys[begin : begin + len(block)] = block.half().numpy()
        begin += len(block)
    keys.flush()
    return np.load(path, mmap_mode="r")


def compare(shape: Shape, keys: Tensor, *, k: int = 64) -> dict[str, float]:
    """Say how far made-up keys are from as many real ones: distances to the first and to the k-th neighbour."""
    figures = {}
    made = torch.cat(list(shape.draw(len(keys), seed=1)))
    for name, some in (("real", keys.float()), ("made_up", made)):
        asked, others = some[::2][:256], some[1::2]
        distances = torch.cdist(asked, others).square().topk(k, dim=1, largest=False).values
        figures[f"{name}_first"] = float(distances[:, 0].median())
        figures[f"{name}_last"] = float(distances[:, -1].median())
        variances = torch.linalg.eigvalsh(torch.cov(some.T)).flip(0)
        figures[f"{name}_variance_in_64"] = float(variances[:64].sum() / variances.sum())
    return {name: round(value, 3) for name, value in figures.items()}
