"""The k nearest stored contexts vote for the next token. Knows nothing about how the vote is mixed.

p_kNN(y | x) = Σ over the k nearest i with value y of softmax(-distance_i / τ)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.datastore import Datastore
from knnlm.errors import ModelError, ParameterError
from knnlm.index import Index
from knnlm.memory.context import Context
from knnlm.memory.prediction import Votes

_COLDEST = 1e-30  # float32 knows little below, and nothing is colder than one vote for the nearest


@dataclass(frozen=True)
class Found:
    """The neighbours of N queries, nearest first."""

    ids: Tensor  # (N, k) rows of the store; -1 = none
    distances: Tensor  # (N, k); inf = none
    values: Tensor  # (N, k) the token that followed; -1 = none


def vote(found: Found, *, temperature: float, vocab_size: int) -> Votes:
    """Turn distances into weights: softmax(-distance / τ) over the neighbours there are."""
    # Less the nearest one's: weights do not change, and a tiny τ cannot make the largest score infinite.
    scores = (found.distances[:, :1] - found.distances) / temperature
    log_weights = scores.log_softmax(1)
    # A row without any neighbour is -inf everywhere, and its softmax undefined.
    return Votes(found.values, log_weights.masked_fill(found.ids < 0, -torch.inf), vocab_size)


def check_vote(k: int, temperature: float) -> None:
    """Refuse a vote of nobody, or one whose weights are undefined."""
    if k < 1:
        raise ParameterError(f"k must be at least 1, not {k}.")
    if not (temperature >= _COLDEST and math.isfinite(temperature)):
        raise ParameterError(f"temperature must be above 0 (at least {_COLDEST:g}), not {temperature}.")


class KnnMemory:
    """A datastore, its index, and how neighbours vote."""

    name = "knn"

    def __init__(self, store: Datastore, index: Index, *, k: int, temperature: float) -> None:
        check_vote(k, temperature)
        self.store = store
        self.index = index
        self.k = k
        self.temperature = temperature

    def search(self, keys: Tensor, k: int | None = None) -> Found:
        """Find the nearest stored contexts of (N, D) keys."""
        if not keys.isfinite().all():
            raise ModelError(
                "The model gives infinite or undefined hidden states, which have no neighbours. Try float32."
            )
        euclidean = self.index.metric == "l2"
        queries = self.store.shift(keys) if euclidean else keys
        k = k or self.k
        # Fewer columns than k where the store is smaller: an empty store gives no column at all.
        answer = self.index.search(queries, max(1, min(k, self.store.rows)))
        distances = answer.distances.to(keys.device)
        if not euclidean and self.store.offset is not None:
            distances = distances - (keys @ self.store.offset.to(keys))[:, None]
        ids = answer.ids.to(keys.device)
        return Found(ids, distances, self.store.values(ids).to(keys.device))

    def predict(self, context: Context) -> Votes:
        """Let the neighbours of each position vote."""
        return self.vote(self.search(context.keys))

    def vote(self, found: Found) -> Votes:
        """Let neighbours vote, with this memory's temperature."""
        return vote(found, temperature=self.temperature, vocab_size=int(self.store.model["vocab_size"]))
