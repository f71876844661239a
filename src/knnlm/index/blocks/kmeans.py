"""Points that stand for many rows each: find them, and find the nearest. Knows nothing about files.

All of this is done with rounded rows: which of some thousand points is nearest does not hang on the last digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.index.blocks.kernels import QuantisedRows, products, quantise

_AT_ONCE = 1024  # rows that are compared with all points


class Centroids:
    """Some points, to be compared with rows by squared distance, or by minus the inner product."""

    def __init__(self, points: Tensor, *, metric: str = "l2") -> None:
        near = quantise(points)
        self._values = near.values
        self._factor = near.scale[:, 0] * (-1.0 if metric == "ip" else -2.0)
        self._constant = torch.zeros(len(points)) if metric == "ip" else points.square().sum(1)

    def __len__(self) -> int:
        """The number of points."""
        return len(self._values)

    def distances(self, rows: QuantisedRows) -> Tensor:
        """Compare every row with every point, (m, n): distances but for what is the same for all points."""
        found = products(rows.values, self._values).float().mul_(self._factor)
        return torch.addcmul(self._constant, found, rows.scale, out=found)

    def nearest(self, rows: QuantisedRows) -> Tensor:
        """Give the nearest point of each row, (m,) int64."""
        return torch.cat(
            [self.distances(rows[at : at + _AT_ONCE]).argmin(1) for at in range(0, len(rows), _AT_ONCE)]
            or [torch.empty(0, dtype=torch.int64)]
        )


def kmeans(rows: Tensor, count: int, *, rounds: int) -> Tensor:
    """Find so many points that the (n, W) rows are near to, by k-means: (count, W)."""
    near = quantise(rows)
    points = rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long()].clone()
    for number in range(rounds):
        labels = Centroids(points).nearest(near)
        points = means(rows, labels, count)
        empty = (torch.bincount(labels, minlength=count) == 0).nonzero()[:, 0]
        # A point that nothing is near to begins anew at some row, most probably where there are many.
        some = torch.randint(len(rows), (len(empty),), generator=torch.Generator().manual_seed(number))
        points[empty] = rows[some]
    return points


def means(rows: Tensor, labels: Tensor, count: int) -> Tensor:
    """Give the mean of the rows with each of the labels 0 to count - 1, zeros where there are none: (count, W)."""
    sums = torch.zeros(count, rows.shape[1]).index_add_(0, labels, rows)
    return sums.div_(torch.bincount(labels, minlength=count).clamp_(min=1)[:, None])


def split_in_two(rows: Tensor, parts: int) -> list[Tensor]:
    """Cut (n, W) rows into parts of equal size whose rows are near one another: their numbers, part by part."""
    todo, done = [(torch.arange(len(rows)), parts)], list[Tensor]()
    while todo:
        numbers, count = todo.pop()
        if count == 1:
            done.append(numbers)
            continue
        left = count // 2
        inside = rows[numbers]
        order = (inside @ _between(inside)).argsort(stable=True)
        cut = round(len(numbers) * left / count)
        todo += [(numbers[order[:cut]], left), (numbers[order[cut:]], count - left)]
    return done


def _between(rows: Tensor, rounds: int = 8) -> Tensor:
    """Give the direction from one half of the rows to the other, by k-means with two points."""
    rows = rows - rows.mean(0)
    direction = rows[0] - rows[-1]
    for _ in range(rounds):
        side = (rows @ direction) > 0
        count = int(side.sum())
        if not 0 < count < len(rows):
            break
        one = rows[side].sum(0)  # all of them sum up to nothing
        direction = one / count + one / (len(rows) - count)
    return direction
