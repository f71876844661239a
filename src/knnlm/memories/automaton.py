"""Entries of a store as the states of an automaton, which are followed instead of searched: RetoMaton (2201.12431).

The entry of a token points at the entry of the next token of the same document. While a text is read, the neighbours of
a position whose value is the token that follows have pointers to entries of the same continuation. Where at least
`min_pointers` of them remain, only the entries that they point at are compared with the next position, without a
search; elsewhere, the position is searched in full. With clusters, the members of the clusters of these entries are
compared, too.

What is reached at a position depends on the positions before it: on those of the same span, and on the entries that the
span begins with. A span that begins with none, such as the beginning of a text or of a window, is searched in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.index.base import Neighbours
from knnlm.index.faiss import cluster_vectors
from knnlm.index.rerank import rerank
from knnlm.memories.base import Span
from knnlm.memories.voting import Followed, RetrievedNeighbours

# Returns the neighbours of some rows, at most so many of each.
Search = Callable[[Tensor, Sequence[int]], RetrievedNeighbours]
# Returns the nearest of what pointers lead to from some rows.
Compare = Callable[[Tensor, Tensor], Neighbours]


@dataclass(frozen=True)
class AutomatonParams:
    """Where entries are followed instead of searched, and how many are compared."""

    min_pointers: int = 4  # with fewer, a position is searched
    max_pointers: int = 1024  # entries that are compared, those with the nearest predecessors
    clusters: int | None = None  # of similar keys; None: only the entries that are pointed at are compared

    def __post_init__(self) -> None:
        for name in ("min_pointers", "max_pointers"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.clusters is not None and self.clusters < 1:
            raise ParameterError(f"The number of clusters must be at least 1, not {self.clusters}.")

    def as_dict(self) -> dict[str, int | None]:
        """Return the parameters as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> AutomatonParams:
        """Validate and read what `as_dict` returned."""
        params = cls(**stored)
        if not all(type(value) is int for name, value in stored.items() if name != "clusters" or value is not None):
            raise TypeError(f"parameters of an automaton are {stored!r}")
        return params


class Automaton:
    """The pointers of a store, and which entries they lead to along a text."""

    def __init__(self, store: Datastore, params: AutomatonParams, *, metric: str = "l2") -> None:
        if store.key_count != store.entry_count:
            raise ParameterError(
                f"{store.path} was pruned: entries without a key cannot be followed. Search it in full, or build the "
                "store again."
            )
        store.pinned = True
        self.params = params
        self._store = store
        self._metric = metric
        last = [document.first_entry + document.entries - 1 for document in store.documents() if document.entries]
        self._last = torch.tensor(last, dtype=torch.long)  # entries of documents, ascending
        # Of entries that are kept for every position of a text, which are copied at each step.
        self.kept_dtype = torch.int32 if store.entry_count <= torch.iinfo(torch.int32).max else torch.int64

    def follows(self, k: int) -> bool:
        """Whether any position can be followed if a search returns k neighbours."""
        return self.params.min_pointers <= min(k, self.params.max_pointers)

    def follow(self, entries: Tensor, tokens: Tensor) -> Tensor:
        """Return what those of (N, W) entries point at whose value is the (N,) token, in their order; -1: none."""
        right = (entries >= 0) & (self._store.values(entries) == tokens[:, None]) & ~self._ends(entries)
        counts = right.sum(1)
        count = min(int(counts.max()) if len(counts) else 0, self.params.max_pointers)
        columns = (~right).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]
        missing = torch.arange(count) >= counts[:, None]
        return (entries.gather(1, columns) + 1).masked_fill_(missing, -1)

    def _ends(self, entries: Tensor) -> Tensor:
        """Mark the last entries of documents."""
        if not len(self._last):
            return torch.ones_like(entries, dtype=torch.bool)
        places = torch.searchsorted(self._last, entries).clamp_(max=len(self._last) - 1)
        return self._last[places] == entries

    def nearest(self, queries: Tensor, pointers: Tensor, k: int) -> Neighbours:
        """Return the k nearest of what (N, n) pointers lead to, by their stored keys: (distance, entry) ascending."""
        candidates = pointers if self.params.clusters is None else self._extended(pointers)
        found = rerank(self._store.keys, queries, candidates.sort(dim=1).values, metric=self._metric)
        return Neighbours(found.ids[:, :k], found.distances[:, :k])

    def _extended(self, pointers: Tensor) -> Tensor:
        """Append the members of the clusters of pointers, in the order of the pointers, to at most `max_pointers`."""
        labels, order, starts = self._clusters
        rows = []
        for row in pointers.numpy():
            own = row[row >= 0]
            found, first = np.unique(labels[own], return_index=True)
            members = [order[starts[label] : starts[label + 1]] for label in found[np.argsort(first)].tolist()]
            others = np.concatenate([own[:0], *members])
            rows.append(np.concatenate([own, others[~np.isin(others, own)]])[: self.params.max_pointers])
        width = max(map(len, rows), default=0)
        return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row)), constant_values=-1) for row in rows]))

    @cached_property
    def _clusters(self) -> tuple[Any, Any, Any]:
        """The cluster of each entry, the entries by their clusters, and where those of each cluster begin."""
        assert self.params.clusters is not None
        labels = cluster_vectors(self._store.keys, self.params.clusters).numpy()
        counts = np.bincount(labels, minlength=self.params.clusters)
        return labels, np.argsort(labels, kind="stable"), np.append(0, np.cumsum(counts))

    def walk(
        self,
        spans: Sequence[Span],
        ks: Sequence[int],
        k: int,
        *,
        compare: Compare,
        search: Search,
        device: torch.device,
    ) -> RetrievedNeighbours:
        """Return the neighbours of every position of spans, reached from the position before or searched for.

        `ks` are their numbers, at most `k`; where it is 0, entries are followed without comparing them.
        """
        texts, wanted = _Texts.of(spans, self), torch.tensor(ks)
        found = RetrievedNeighbours.empty(len(ks), k)
        reached = torch.full((len(ks), k), -1)
        searched = torch.zeros(len(ks), dtype=torch.bool)
        before = _fit(texts.entries, k)
        for step in range(texts.tokens.shape[1]):
            rows = texts.rows(step)
            pointers = self.follow(before[: len(rows)], texts.tokens[: len(rows), step])
            known = ((pointers >= 0).sum(1) >= self.params.min_pointers) & (wanted[rows] > 0)
            unknown = ~known & (wanted[rows] > 0)
            reached[rows] = _fit(pointers, k)
            if known.any():
                own = rows[known]
                nearest = compare(own, pointers[known])
                _write(found, own, nearest.ids, nearest.distances.cpu(), wanted[own])
                reached[own] = found.ids[own]
            if unknown.any():
                own = rows[unknown]
                neighbours = search(own, wanted[own].tolist())
                _write(found, own, neighbours.ids.cpu(), neighbours.distances.cpu(), wanted[own])
                reached[own], searched[own] = found.ids[own], True
            before = reached[rows]
        values, followed = self._store.values(found.ids).to(device), Followed(reached, searched)
        return RetrievedNeighbours(found.ids.to(device), found.distances.to(device), values, followed=followed)


@dataclass(frozen=True)
class _Texts:
    """Spans side by side, the longest first, so that those with a position at some step are the first of them."""

    first: Tensor  # (S,) row of each span's first position
    lengths: Tensor  # (S,) descending
    tokens: Tensor  # (S, steps) that were read last at each position
    entries: Tensor  # (S, W) reached at the position before each span

    @classmethod
    def of(cls, spans: Sequence[Span], automaton: Automaton) -> _Texts:
        """Arrange spans."""
        lengths = torch.tensor([len(span) for span in spans], dtype=torch.long)
        first = lengths.cumsum(0) - lengths
        lengths, order = lengths.sort(descending=True, stable=True)
        chosen = [spans[number] for number in order.tolist()]
        tokens = [span.tokens[span.start :].cpu().long() for span in chosen]
        entries = [span.entries.get(automaton, torch.empty(0)).cpu().long() for span in chosen]
        width = max(map(len, entries), default=0)
        joined = torch.stack([_fit(each[None], width)[0] for each in entries])
        return cls(first[order], lengths, torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), joined)

    def rows(self, step: int) -> Tensor:
        """Return the row of each span's position at a step, of the spans that have it."""
        return self.first[: int((self.lengths > step).sum())] + step


def _fit(entries: Tensor, width: int) -> Tensor:
    """Return (N, width) of the first entries of each row, filled up with -1."""
    return torch.nn.functional.pad(entries[:, :width], (0, max(0, width - entries.shape[1])), value=-1)


def _write(found: RetrievedNeighbours, rows: Tensor, ids: Tensor, distances: Tensor, ks: Tensor) -> None:
    """Write at most as many neighbours of each row as are wanted."""
    width = min(ids.shape[1], found.ids.shape[1])
    beyond = torch.arange(width) >= ks[:, None]
    found.ids[rows, :width] = ids[:, :width].masked_fill(beyond, -1)
    found.distances[rows, :width] = distances[:, :width].to(found.distances).masked_fill(beyond, torch.inf)
