"""Votes of neighbours, whether they are entries of a store or earlier positions of the text.

p(y | x) = Σ over the k nearest i with value y of softmax(log count_i - distance_i / τ)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memories.base import Context, Memory, MemoryOutput, Source, Votes, on_device

NEAR = 64  # neighbours among which the token with the largest vote is searched

_MIN_TEMPERATURE = 1e-30  # near the smallest float32; only the nearest neighbour has a vote there

_DEPTHS = (1, 8, 64)  # ranks whose distance is a feature, besides the last

_CROWDS = (16, 64)  # numbers of nearest neighbours whose distinct tokens are counted, besides all

FEATURES = (
    *(f"distance {depth}" for depth in _DEPTHS),
    "last distance",
    *(f"distinct {crowd}" for crowd in _CROWDS),
    "distinct",
    "entropy",
    "largest vote",
)


@dataclass(frozen=True)
class Followed:
    """What an automaton has reached at N positions; see `knnlm.memories.automaton`."""

    entries: Tensor  # (N, W) whose pointers lead on from the position; -1: none
    searched: Tensor  # (N,) whether the position was searched for

    def select(self, rows: Tensor) -> Followed:
        """Return what was reached at some positions."""
        rows = rows.to(self.entries.device)
        return Followed(self.entries[rows], self.searched[rows])


@dataclass(frozen=True)
class RetrievedNeighbours:
    """The neighbours of N queries, nearest first."""

    ids: Tensor  # (N, k) entries of the store, or positions of the text; -1 = none
    distances: Tensor  # (N, k); inf = none
    values: Tensor  # (N, k) the token that followed; -1 = none
    counts: Tensor | None = None  # (N, k) number of merged entries; None: one each
    followed: Followed | None = None  # None: without an automaton

    def nearest(self, k: int) -> RetrievedNeighbours:
        """Return at most the k nearest of each query."""
        if k >= self.ids.shape[1]:
            return self
        counts = None if self.counts is None else self.counts[:, :k]
        return RetrievedNeighbours(self.ids[:, :k], self.distances[:, :k], self.values[:, :k], counts, self.followed)

    def select(self, rows: Tensor) -> RetrievedNeighbours:
        """Return the neighbours of some queries, (n,) → n queries."""
        counts = None if self.counts is None else self.counts[rows]
        followed = None if self.followed is None else self.followed.select(rows)
        return RetrievedNeighbours(self.ids[rows], self.distances[rows], self.values[rows], counts, followed)

    def masked(self, mask: Tensor) -> RetrievedNeighbours:
        """Remove the neighbours of the queries where the (N,) mask is False."""
        removed = ~mask[:, None]
        return RetrievedNeighbours(
            self.ids.masked_fill(removed, -1),
            self.distances.masked_fill(removed, torch.inf),
            self.values.masked_fill(removed, -1),
            self.counts,
            self.followed,
        )

    @classmethod
    def empty(cls, queries: int, k: int = 0, *, device: torch.device | str = "cpu") -> RetrievedNeighbours:
        """Return k columns without a neighbour for each query."""
        ids = torch.full((queries, k), -1, device=device)
        return cls(ids, torch.full((queries, k), torch.inf, device=device), ids.clone())

    @classmethod
    def gather(cls, queries: int, blocks: Sequence[tuple[Tensor, RetrievedNeighbours]]) -> RetrievedNeighbours:
        """Join the neighbours of blocks of queries, (n,) rows and n queries each; other rows have none."""
        width = max(neighbours.ids.shape[1] for _, neighbours in blocks)
        joined = cls.empty(queries, width, device=blocks[0][1].ids.device)
        counts = None if blocks[0][1].counts is None else torch.ones_like(joined.distances)
        for rows, neighbours in blocks:
            k = neighbours.ids.shape[1]
            joined.ids[rows, :k], joined.values[rows, :k] = neighbours.ids, neighbours.values
            joined.distances[rows, :k] = neighbours.distances.to(joined.distances)
            if counts is not None and neighbours.counts is not None:
                counts[rows, :k] = neighbours.counts.to(counts)
        return cls(joined.ids, joined.distances, joined.values, counts)


@dataclass(frozen=True)
class VoteParams:
    """How neighbours vote: how many, and with which τ."""

    k: int
    knn_temperature: float

    def __post_init__(self) -> None:
        check_vote(self.k, self.knn_temperature)

    def __str__(self) -> str:
        return f"k={self.k} τ={self.knn_temperature:g}"


def check_vote(k: int, knn_temperature: float) -> None:
    """Raise ParameterError for a k or τ that is out of range."""
    if k < 1:
        raise ParameterError(f"k must be at least 1, not {k}.")
    if not (knn_temperature >= _MIN_TEMPERATURE and math.isfinite(knn_temperature)):
        raise ParameterError(f"knn_temperature must be above 0 (at least {_MIN_TEMPERATURE:g}), not {knn_temperature}.")


def vote(neighbours: RetrievedNeighbours, *, knn_temperature: float, vocab_size: int) -> Votes:
    """Return the votes of neighbours, weighted by softmax(-distance / τ)."""
    return Votes(neighbours.values, _log_weights(neighbours, (knn_temperature,))[0], vocab_size)


def _log_weights(
    neighbours: RetrievedNeighbours, temperatures: tuple[float, ...], ks: tuple[int, ...] | None = None
) -> Tensor:
    """Return the (S, N, k) log-weights of neighbours by each of S temperatures; -inf where there is no neighbour.

    `ks` are the numbers of the nearest that vote with each temperature; None: all.
    """
    distances = neighbours.distances
    # Relative to the nearest: the weights are the same, and a tiny τ cannot make the largest score infinite.
    scores = (distances[:, :1] - distances) / on_device(temperatures, distances.device, distances.dtype)[:, None, None]
    if neighbours.counts is not None:
        scores = scores + neighbours.counts.log()
    if ks is not None:
        ranks = on_device(tuple(range(distances.shape[1])), distances.device)
        scores = scores.masked_fill(ranks >= on_device(ks, distances.device)[:, None, None], -torch.inf)
    # A row without any neighbour is -inf everywhere, and its softmax is undefined.
    return scores.log_softmax(-1).masked_fill(neighbours.ids < 0, -torch.inf)


@dataclass(frozen=True)
class VoteOutput:
    """The output of a memory with neighbours: their votes by one or more settings."""

    neighbours: RetrievedNeighbours
    settings: Sequence[VoteParams]
    vocab_size: int

    @cached_property
    def components(self) -> Sequence[Votes]:
        """The votes by each of the settings; those of the same neighbours share one tensor of values."""
        made: dict[VoteParams, Votes] = {}
        ks = list(dict.fromkeys(setting.k for setting in self.settings))
        # Of few neighbours, those that do not vote are as cheap as those that do: fewer and larger operations.
        together = len(ks) > 1 and ks[0] == max(ks) <= NEAR
        for k in ks[:1] if together else ks:
            own = [setting for setting in self.settings if together or setting.k == k]
            nearest = self.neighbours.nearest(k)
            temperatures = tuple(setting.knn_temperature for setting in own)
            weights = _log_weights(nearest, temperatures, tuple(setting.k for setting in own) if together else None)
            made |= {
                setting: Votes(nearest.values, each, self.vocab_size)
                for setting, each in zip(own, weights, strict=True)
            }
        return [made[setting] for setting in self.settings]

    def features(self) -> Tensor:
        """Return (N, F): distances of the neighbours, numbers of distinct tokens, agreement of the votes."""
        return self._features

    def top(self) -> Tensor:
        """Return the (N,) tokens with the largest vote of the nearest; -1 where there is no neighbour."""
        return self._top

    @cached_property
    def _features(self) -> Tensor:
        votes, distances = self.components[0], self.neighbours.distances
        rows, width = votes.values.shape
        if not width:
            return distances.new_zeros(rows, len(FEATURES))
        present = (votes.values >= 0).sum(1)  # (N,)
        device, whole = distances.device, torch.long
        # arcsinh: a logarithm that also takes inner products, which can be negative.
        depths = on_device((*_DEPTHS, width), device, whole)
        ranks = (torch.minimum(present[:, None], depths) - 1).clamp(min=0)
        far = distances.gather(1, ranks).asinh().nan_to_num(posinf=0.0)
        groups = self._groups
        crowds = on_device((*_CROWDS, width), device, whole)
        distinct = (groups.first[:, None] < crowds[:, None]).sum(2).float().log1p()  # (N, crowds)
        entropy = -torch.xlogy(groups.shares, groups.shares).sum(1)
        largest = groups.shares.amax(1).clamp(min=1e-9).log()
        features = torch.cat([far, distinct, torch.stack([entropy, largest], 1)], 1)
        return features.masked_fill((present == 0)[:, None], 0.0)

    @cached_property
    def _groups(self) -> _Groups:
        return _group(self.components[0].values, self.components[0].log_weights.exp())

    @cached_property
    def _top(self) -> Tensor:
        values = self.components[0].values[:, :NEAR]
        if not values.shape[1]:
            return values.new_full((len(values),), -1)
        near = values.shape[1] == self.components[0].values.shape[1]
        groups = self._groups if near else _group(values, self.components[0].log_weights[:, :NEAR].exp())
        best = groups.shares.argmax(1, keepdim=True)
        top = values.gather(1, groups.first.gather(1, best).clamp(max=values.shape[1] - 1))[:, 0]
        return top.masked_fill((values < 0).all(1), -1)


class SearchMemory(Memory, Protocol):
    """A memory that is expensive: `predict(context)` is `output(retrieve(context))`, and one search serves many."""

    @property
    def max_k(self) -> int:
        """The largest number of neighbours that votes."""

    def retrieve(self, context: Context, k: int | Sequence[int] | None = None) -> RetrievedNeighbours:
        """Return the k nearest neighbours of each position; None: `max_k`, a sequence: one k for each position."""

    def output(self, neighbours: RetrievedNeighbours) -> MemoryOutput:
        """Return the prediction from retrieved neighbours; there may be more than `max_k` of them."""


def searches(memory: Memory) -> TypeGuard[SearchMemory]:
    """Whether a memory is expensive, so that it must be a `SearchMemory`."""
    return memory.expensive


class NeighbourMemory:
    """Base class of memories with neighbours: they retrieve some, and let them vote by their settings."""

    name: str
    expensive = False
    vocab_size: int
    metric: str
    source: Source
    history_length: int
    settings: tuple[VoteParams, ...]
    feature_names = FEATURES

    @property
    def component_names(self) -> Sequence[str]:
        """One component for each of the settings."""
        return [f"{self.name} {setting}" for setting in self.settings]

    @property
    def max_k(self) -> int:
        """The largest k of the settings."""
        return max(setting.k for setting in self.settings)

    def retrieve(self, context: Context, k: int | None = None) -> RetrievedNeighbours:
        """Return the k nearest neighbours of each position; None: `max_k`."""
        raise NotImplementedError

    def output(self, neighbours: RetrievedNeighbours) -> VoteOutput:
        """Return the votes of retrieved neighbours by this memory's settings."""
        return VoteOutput(neighbours.nearest(self.max_k), self.settings, self.vocab_size)

    def predict(self, context: Context) -> VoteOutput:
        """Retrieve the neighbours of each position and let them vote."""
        return self.output(self.retrieve(context))


@dataclass(frozen=True)
class _Groups:
    """Votes of each row, summed by token; as many columns as neighbours, the last ones empty."""

    shares: Tensor  # (N, k) weight of each group
    first: Tensor  # (N, k) rank of its nearest member; k where there is no group


def _group(values: Tensor, weights: Tensor) -> _Groups:
    """Sum the votes for the same token."""
    ordered, order, group = by_token(values)
    shares = torch.zeros_like(weights).scatter_add_(1, group, weights.gather(1, order))
    missing = values.shape[1]
    ranks = order.masked_fill(ordered < 0, missing)
    first = torch.full_like(group, missing).scatter_reduce_(1, group, ranks, "amin")
    return _Groups(shares, first)


def by_token(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (N, k) tokens: return them, their previous columns, and the number of each one's group in its row."""
    ordered, order = values.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered, order, new.cumsum(1) - 1
