"""The protocols of an index and of the vectors it searches, and the checks that all indexes share.

Distances are squared L2, or the negated inner product: in both, smaller is nearer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import IndexInvalid, ParameterError

METRICS = ("l2", "ip")

KMEANS_ROUNDS = 5  # the first rounds do nearly all of the work

_SAMPLE_PER_LIST = 48  # training vectors for each centroid: fewer make lists uneven, more only take longer
_MIN_SAMPLE = 20_000  # training vectors
_ROTATION_SEED = 0
_MAX_IDS = 1 << 40  # vectors of all shards
_SHARD_EXPONENT = 0.25


@dataclass(frozen=True)
class Neighbours:
    """The nearest vectors of each query, nearest first."""

    ids: Tensor  # (N, k) int64; -1 where there are fewer than k
    distances: Tensor  # (N, k) float32, ascending; inf where the id is -1


class Vectors(Protocol):
    """Vectors that may be larger than RAM."""

    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (id of the first vector, (n, D) float32) from first to last."""

    def take(self, ids: Tensor) -> Tensor:
        """Return the vectors with these ids, (…) → (…, D) float32; zeros for a negative id."""


class HalfVectors(Vectors, Protocol):
    """Vectors that can be read as they are stored, if they are stored in float16."""

    @property
    def half(self) -> bool:
        """Whether they are stored in float16."""

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, D) float16 tensor with the vectors from this id on."""


class Searcher(Protocol):
    """One implementation of exact search."""

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) float32 queries."""


class Index(Protocol):
    """Finds the nearest vectors."""

    metric: str

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""


class BlockSearch(Index, Protocol):
    """An index whose blocks can be chosen together with those of other shards, before any is searched."""

    def probes(self, k: int) -> int | None:
        """Return how many blocks a query searches for its k nearest; None where the index has no blocks."""

    def nearest_blocks(self, queries: Tensor, count: int) -> Neighbours:
        """Return the nearest blocks of each query, and distances that can be compared with those of other shards."""

    def search_blocks(self, queries: Tensor, k: int, blocks: Tensor) -> Neighbours:
        """Return the k nearest of each query in its own of the (N, p) blocks, -1 for none; or fewer."""


@dataclass
class RemoteStatus:
    """Counters of the searches of shards that other processes hold."""

    shards: int = 0
    searches: int = 0
    retries: int = 0  # calls that were repeated because a process had died
    timeouts: int = 0
    degraded: int = 0  # searches that were answered without some of the shards
    unreachable: set[str] = field(default_factory=set)  # shards that are not searched at present
    _missing: set[str] = field(default_factory=set)

    def add_missing(self, shards: set[str]) -> None:
        """Count a search that was answered without these shards."""
        self.degraded += 1
        self._missing |= shards

    def take_missing(self) -> tuple[str, ...]:
        """Return the shards that searches since the last call have lacked."""
        missing, self._missing = self._missing, set()
        return tuple(sorted(missing))


def remote_status(index: object) -> RemoteStatus | None:
    """Return the counters of an index whose shards other processes hold; None for other indexes."""
    status: RemoteStatus | None = getattr(index, "remote", None)
    return status


def probes(index: object, k: int) -> int | None:
    """Return how many blocks of an index a query searches for its k nearest; None where it has no blocks."""
    count = getattr(index, "probes", None)
    return None if count is None else count(k)


def shard_probes(probes: float, shards: int) -> int:
    """Return how many blocks of all shards a query searches, given how many of one store it would.

    A block of a shard is as large as one of a whole store but contains fewer of a query's neighbours, so that more are
    searched for the same recall; see docs/background/log.md.
    """
    return math.ceil(probes * math.pow(shards, _SHARD_EXPONENT))


def no_neighbours(count: int, k: int, device: torch.device | str = "cpu") -> Neighbours:
    """Return the result of a search without any vectors."""
    return Neighbours(torch.full((count, k), -1, device=device), torch.full((count, k), torch.inf, device=device))


def order_ties(neighbours: Neighbours) -> Neighbours:
    """Return neighbours, nearest first, with those of equal distances in the order of their ids."""
    ids, distances = neighbours.ids, neighbours.distances
    farther = distances[:, 1:] != distances[:, :-1]
    rows = (~farther & (ids[:, 1:] < ids[:, :-1]) & (ids[:, 1:] >= 0)).any(1)
    if not rows.any():
        return neighbours
    # The place among different distances and the id as one number; NumPy sorts integers faster than torch.
    places = torch.nn.functional.pad(farther[rows], (1, 0)).cumsum(1)
    keys = torch.where(ids[rows] < 0, _MAX_IDS - 1, ids[rows]) + places * _MAX_IDS
    ordered = torch.from_numpy(np.sort(keys.cpu().numpy(), axis=1)).to(ids.device).remainder_(_MAX_IDS)
    result = ids.clone()
    result[rows] = torch.where(ordered == _MAX_IDS - 1, -1, ordered)
    return Neighbours(result, distances)


def pad_neighbours(neighbours: Neighbours, k: int) -> Neighbours:
    """Fill the result up to k columns."""
    missing = max(0, k - neighbours.ids.shape[1])
    if not missing:
        return neighbours
    ids = torch.nn.functional.pad(neighbours.ids, (0, missing), value=-1)
    return Neighbours(ids, torch.nn.functional.pad(neighbours.distances, (0, missing), value=torch.inf))


def even_sample(total: int, count: int) -> Tensor:
    """Return `count` ids that are spread evenly over all, ascending and without duplicates."""
    ids: Tensor = torch.linspace(0, max(0, total - 1), count, dtype=torch.float64).long().unique()
    return ids


def training_sample_size(lists: int) -> int:
    """Return how many vectors an index with this many lists is trained on."""
    return max(_SAMPLE_PER_LIST * lists, _MIN_SAMPLE)


def random_rotation(width: int, device: torch.device) -> Tensor:
    """Return a random (D, D) orthogonal matrix, the same every time."""
    generator = torch.Generator().manual_seed(_ROTATION_SEED)
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    rotation: Tensor = torch.linalg.qr(square).Q
    return rotation.to(device, torch.float32).contiguous()


def check_search(queries: Tensor, k: int, width: int) -> None:
    """Raise ParameterError for a k or queries that no index accepts."""
    if k < 1:
        raise ParameterError(f"k must be at least 1, not {k}.")
    if queries.ndim != 2 or queries.shape[1] != width:
        raise ParameterError(f"queries have shape {tuple(queries.shape)}, but the keys have width {width}.")


def check_metric(metric: str) -> None:
    """Raise ParameterError for an unknown metric."""
    if metric not in METRICS:
        raise ParameterError(f"Unknown metric {metric!r}: use {' or '.join(METRICS)}.")


def check_finite(squares: Tensor, first: int) -> None:
    """Raise IndexInvalid if a key is not finite, given the (n,) squared norms of the keys from `first` on."""
    if not squares.isfinite().all():
        raise IndexInvalid(
            f"The stored keys {first:,} to {first + len(squares) - 1:,} contain numbers that are not finite: their "
            "file is corrupt. Build the store again."
        )
