"""Mixtures with the memory settings of single requests.

They share the models and stores of the served mixture and differ only in votes and weights, so that one search serves
all of them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from threading import Lock

from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memories.base import Context, Memory
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import NeighbourMemory, SearchMemory, VoteParams, searches
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import DEFAULTS
from knnlm.mixture.weights import FixedWeights, Weights, equal_weights, first_components
from knnlm.server.engine.requests import MemoryOverrides

_MAX_MIXTURES = 256  # each is a few small objects


class MixtureCache:
    """Builds the mixtures of overrides, and keeps those used last; thread-safe."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._mixtures: OrderedDict[MemoryOverrides, Mixture] = OrderedDict()
        self._lock = Lock()

    def get(self, overrides: MemoryOverrides) -> Mixture | None:
        """Return the mixture of overrides, None if memories are off; raise ParameterError for unknown memories."""
        if overrides.off:
            return None
        with self._lock:
            if overrides not in self._mixtures:
                self._mixtures[overrides] = self._build(overrides)
                if len(self._mixtures) > _MAX_MIXTURES:
                    self._mixtures.popitem(last=False)
            self._mixtures.move_to_end(overrides)
            return self._mixtures[overrides]

    @property
    def adjustable(self) -> int | None:
        """Number of the memory whose k and τ a request can set: the first knn, or the only one with neighbours."""
        stores = [n for n, memory in enumerate(self.mixture.memories) if isinstance(memory, KnnMemory)]
        voting = [n for n, memory in enumerate(self.mixture.memories) if isinstance(memory, NeighbourMemory)]
        return stores[0] if stores else voting[0] if len(voting) == 1 else None

    def _build(self, overrides: MemoryOverrides) -> Mixture:
        base = self.mixture
        if unknown := [name for name in overrides.memories or () if name not in base.labels]:
            raise ParameterError(f"There is no memory {unknown[0]!r}. There are: {', '.join(base.labels)}.")
        chosen = [n for n, label in enumerate(base.labels) if overrides.memories is None or label in overrides.memories]
        if not chosen:
            raise ParameterError('The list of memories is empty. To use none, send "off": true.')
        memories = [self._memory(number, overrides) for number in chosen]
        weights = self._weights(overrides, chosen, memories)
        return Mixture(
            base.lm,
            memories,
            weights=weights,
            readers=base.readers,
            labels=[base.labels[number] for number in chosen],
            store=base.store,
            path=base.path,
        )

    def _memory(self, number: int, overrides: MemoryOverrides) -> Memory:
        memory = self.mixture.memories[number]
        if number != self.adjustable or (overrides.k, overrides.knn_temperature) == (None, None):
            return memory
        assert isinstance(memory, NeighbourMemory)
        main, *others = memory.settings
        main = VoteParams(
            main.k if overrides.k is None else overrides.k,
            main.knn_temperature if overrides.knn_temperature is None else overrides.knn_temperature,
        )
        changed = copy.copy(memory)
        changed.settings = (main, *others)
        return changed

    def _weights(self, overrides: MemoryOverrides, chosen: list[int], memories: list[Memory]) -> Weights:
        base = self.mixture
        if overrides.lmbda is not None:
            return equal_weights(memories, overrides.lmbda)
        if isinstance(base.weights, FixedWeights):
            totals = [sum(base.weights.values[base.component_slices[number]]) for number in chosen]
            if len(chosen) == len(base.memories):
                return base.weights
            return first_components(memories, 1 - sum(totals), totals)
        # A gate works only with the memories and votes it was trained with.
        if len(chosen) == len(base.memories) and (overrides.k, overrides.knn_temperature) == (None, None):
            return base.weights
        return equal_weights(memories, DEFAULTS["lambda"])


def search_k(mixture: Mixture | None, label: str, memory: SearchMemory) -> int:
    """Return how many neighbours of a served memory are searched for: those of the server's own setting, or more.

    So most texts share one search, whatever their k, and the neighbours of a text do not depend on the other texts in
    the batch: among neighbours at equal distance, a search for fewer may return others. 0: the mixture does not have
    the memory.
    """
    if mixture is None or label not in mixture.labels:
        return 0
    own = mixture.memories[mixture.labels.index(label)]
    return max(own.max_k, memory.max_k) if searches(own) else 0


def gather(context: Context, rows: Tensor | None) -> Context:
    """Return some rows of a context; if it has spans, each must have one row."""
    if rows is None:
        return context
    spans = [context.spans[row] for row in rows.tolist()] if context.spans else ()
    return replace(context, states={source: states[rows] for source, states in context.states.items()}, spans=spans)
