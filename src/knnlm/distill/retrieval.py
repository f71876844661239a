"""What retrieval would say at the positions of its own store, each position left out. Knows nothing about training.

p(y | row) = Σ over the k nearest other rows i with value y of softmax(-distance_i / τ)

A row is left out by its number, not by coming first: where contexts are equal, another may come before it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knnlm.datastore import Datastore
from knnlm.datastore.indexing import open_index
from knnlm.distill.text import stored_tokens, tokens_hash
from knnlm.errors import DatastoreError, ParameterError
from knnlm.memory.neighbours import by_token, check_vote

EXCLUDED = ("self", "document")
_LEAST = 2.0**-24  # the smallest number above 0 in float16


class Sparse(NamedTuple):
    """Some tokens of each of n positions and their probabilities, most probable first; the rest is padding of 0."""

    ids: Tensor  # (n, m) int64
    probs: Tensor  # (n, m) float32; a row sums to 1, or to 0 where it has no target
    lengths: Tensor  # (n,) int64


@dataclass(frozen=True)
class Ballot:
    """How neighbours vote, which of them may not, and how much of the vote is kept."""

    k: int = 1024
    temperature: float = 2.0
    exclude: str = "self"
    top: int = 64
    mass: float = 0.99

    def __post_init__(self) -> None:
        check_vote(self.k, self.temperature)
        if self.exclude not in EXCLUDED:
            raise ParameterError(f"Unknown exclude {self.exclude!r}: use {' or '.join(EXCLUDED)}.")
        if self.top < 1:
            raise ParameterError(f"top must be at least 1, not {self.top}.")
        if not 0 < self.mass <= 1:
            raise ParameterError(f"mass must be above 0 and at most 1, not {self.mass}.")


class Planned:
    """What a store would be asked about its own positions: enough to know whether that was done."""

    def __init__(self, teacher: Datastore, ballot: Ballot) -> None:
        self.teacher, self.ballot = teacher, ballot

    @property
    def rows(self) -> int:
        """The number of positions."""
        return self.teacher.rows

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the answers depend on; all tokens are read for it."""
        text = tokens_hash(stored_tokens(self.teacher))
        return {"teacher": self.teacher.fingerprint, "text": text, **asdict(self.ballot)}

    def of(self, rows: Tensor) -> Sparse:
        """Nobody is asked."""
        raise NotImplementedError


class Retrieval(Planned):
    """A store that is asked about its own positions, on the fly.

    With exclude="document", a position's whole document is left out, and copies of it: equal texts are one document.
    """

    def __init__(self, teacher: Datastore, ballot: Ballot, *, device: str = "cpu") -> None:
        check_whole(teacher)
        super().__init__(teacher, ballot)
        self._index = open_index(teacher, device=device)
        self._groups = _documents(teacher) if ballot.exclude == "document" else None
        # Its document may have many of a position's nearest; more than half are not waited for.
        own = 1 if self._groups is None else min(int(self._groups.bincount().max()), ballot.k) if teacher.rows else 0
        self._wanted = max(1, min(ballot.k + own, teacher.rows))

    def of(self, rows: Tensor) -> Sparse:
        """Ask about these (n,) rows; one below 0 has no target."""
        return self.ask(rows)[0]

    def ask(self, rows: Tensor) -> tuple[Sparse, Tensor]:
        """Ask about (n,) rows, and say how much of each vote was kept, (n,); 0 where nobody voted."""
        found = self._index.search(self.teacher.take(rows), self._wanted)
        own = rows.to(found.ids.device)
        other = (found.ids >= 0) & (own >= 0)[:, None]
        if self._groups is None:
            other &= found.ids != own[:, None]
        else:
            self._groups = groups = self._groups.to(found.ids.device)  # from now on it is there
            other &= groups[found.ids.clamp(min=0)] != groups[own.clamp(min=0)][:, None]
        # One too many were asked for: where the row itself did not come back, as ties may have it, drop the last.
        other &= other.cumsum(1) <= self.ballot.k
        values = self.teacher.values(torch.where(other, found.ids, -1))
        tokens, shares = add_up(values, found.distances, self.ballot.temperature)
        return sparsify(tokens, shares, top=self.ballot.top, mass=self.ballot.mass)


def check_whole(teacher: Datastore) -> None:
    """Refuse a store in which not every token has a key of its own."""
    if teacher.key_count != teacher.rows or teacher.counts(torch.zeros(0, dtype=torch.int64)) is not None:
        raise DatastoreError(
            f"{teacher.path} was pruned: it has {teacher.key_count:,} keys for {teacher.rows:,} tokens, and a teacher "
            "must have one for each. Use the memory as it was built."
        )


def add_up(values: Tensor, distances: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Let (n, k) neighbours vote: tokens (n, k), ascending, -1 behind the last, and their float64 shares."""
    scores = (-distances.double() / temperature).masked_fill(values < 0, -torch.inf)
    weights = scores.softmax(1).nan_to_num(nan=0.0)  # nobody there: no weights
    ordered, order, group = by_token(values)
    shares = torch.zeros_like(weights).scatter_add_(1, group, weights.gather(1, order))
    return torch.full_like(ordered, -1).scatter_(1, group, ordered), shares


def sparsify(tokens: Tensor, shares: Tensor, *, top: int, mass: float) -> tuple[Sparse, Tensor]:
    """Keep the most probable tokens until they cover the mass, at most `top`; equal ones by their numbers."""
    shares, order = shares.sort(dim=1, descending=True, stable=True)
    shares, order = shares[:, :top], order[:, :top]
    kept = (shares.cumsum(1) - shares < mass) & (shares >= _LEAST)
    lengths = kept.sum(1)
    width = int(lengths.max()) if len(lengths) else 0
    shares = (shares * kept)[:, :width]
    total = shares.sum(1)
    probs = (shares / total.clamp(min=_LEAST)[:, None]).float()
    ids = tokens.gather(1, order[:, :width]).masked_fill(~kept[:, :width], 0)
    return Sparse(ids, probs, lengths), total


def _documents(store: Datastore) -> Tensor:
    """Give the (rows,) number of the text that each row is from."""
    numbers: dict[str, int] = {}
    groups = np.empty(store.rows, dtype=np.int64)
    for document in store.documents():
        number = numbers.setdefault(document.sha256, len(numbers))
        groups[document.first_row : document.first_row + document.rows] = number
    return torch.from_numpy(groups)
