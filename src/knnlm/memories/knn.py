"""The k nearest stored contexts vote for the next token. Knows nothing about how the vote is mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ModelError
from knnlm.index.base import Index
from knnlm.index.gpu.deferred import check_flag
from knnlm.memories.base import Context, Source
from knnlm.memories.voting import NeighbourMemory, Retrieved, VoteParams


class KnnMemory(NeighbourMemory):
    """A datastore, its index, and how neighbours vote."""

    name = "knn"
    history_length = 0

    def __init__(
        self,
        store: Datastore,
        index: Index,
        *,
        k: int,
        knn_temperature: float,
        others: Sequence[VoteParams] = (),
        source: Source | None = None,
    ) -> None:
        self.store = store
        self.index = index
        self.metric = index.metric
        self.vocab_size = int(store.model["vocab_size"])
        self.settings = (VoteParams(k, knn_temperature), *others)
        self.source = source or Source(0, store.model["key_layer"], store.model["layer"])

    @property
    def k(self) -> int:
        """How many neighbours vote."""
        return self.settings[0].k

    @property
    def knn_temperature(self) -> float:
        """How much louder the nearer ones speak."""
        return self.settings[0].knn_temperature

    def search(self, keys: Tensor, k: int | None = None) -> Retrieved:
        """Find the nearest stored contexts of (N, D) keys."""
        if check_flag(~keys.isfinite()):
            raise ModelError(
                "The model gives infinite or undefined hidden states, which have no neighbours. Try float32."
            )
        queries = self.store.project(keys, metric=self.metric)
        k = k or self.max_k
        # Fewer columns than k where the store is smaller: an empty store gives no column at all.
        answer = self.index.search(queries, max(1, min(k, self.store.key_count)))
        distances = answer.distances.to(keys.device)
        if self.metric == "ip" and (origin := self.store.origin) is not None:
            distances = distances - (queries @ origin.to(queries))[:, None]
        ids = self.store.rows_of(answer.ids)
        counts = self.store.counts(answer.ids)
        return Retrieved(
            ids.to(keys.device),
            distances,
            self.store.values(ids).to(keys.device),
            None if counts is None else counts.to(keys.device),
        )

    def find(self, context: Context, k: int | None = None) -> Retrieved:
        """Find the nearest stored contexts of each position, where it is asked for."""
        keys = context.states[self.source]
        if context.search_mask is None or bool(context.search_mask.all()):
            return self.search(keys, k)
        if not context.search_mask.any():
            return _nobody(len(keys), keys.device)
        return _spread(self.search(keys[context.search_mask], k), context.search_mask)


def _nobody(rows: int, device: torch.device) -> Retrieved:
    """Give what is found where nothing is asked for: no column at all."""
    ids = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    return Retrieved(ids, torch.zeros(rows, 0, device=device), ids)


def _spread(found: Retrieved, asked: Tensor) -> Retrieved:
    """Put the neighbours of some rows among rows that have none."""
    shape = (len(asked), found.ids.shape[1])

    def wide(some: Tensor, nothing: float) -> Tensor:
        return torch.full(shape, nothing, dtype=some.dtype, device=some.device).masked_scatter_(asked[:, None], some)

    counts = None if found.counts is None else wide(found.counts, 1.0)
    return Retrieved(wide(found.ids, -1), wide(found.distances, torch.inf), wide(found.values, -1), counts)
