"""From what a request asks of the memory to a mixture that does so. Knows nothing about requests or batches.

All these mixtures share the models and memories of the one that is served; they differ in how neighbours vote and in
what counts how much, so that one search serves all of them.
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

_KEPT = 256  # mixtures; each is a few small objects


class MixtureCache:
    """Makes the mixture that a wish asks for, and remembers the last ones."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._made: OrderedDict[MemoryOverrides, Mixture] = OrderedDict()
        self._lock = Lock()

    def grant(self, wish: MemoryOverrides) -> Mixture | None:
        """Give the mixture, None where the memory is off; ParameterError where there is no such thing."""
        if wish.off:
            return None
        with self._lock:
            if wish not in self._made:
                self._made[wish] = self._make(wish)
                if len(self._made) > _KEPT:
                    self._made.popitem(last=False)
            self._made.move_to_end(wish)
            return self._made[wish]

    @property
    def own(self) -> int | None:
        """The memory whose k and τ a request may set: the first store, or the only one that has neighbours."""
        stores = [n for n, memory in enumerate(self.mixture.memories) if isinstance(memory, KnnMemory)]
        polls = [n for n, memory in enumerate(self.mixture.memories) if isinstance(memory, NeighbourMemory)]
        return stores[0] if stores else polls[0] if len(polls) == 1 else None

    def _make(self, wish: MemoryOverrides) -> Mixture:
        base = self.mixture
        if unknown := [name for name in wish.memories or () if name not in base.labels]:
            raise ParameterError(f"There is no memory {unknown[0]!r} here. There are: {', '.join(base.labels)}.")
        chosen = [n for n, label in enumerate(base.labels) if wish.memories is None or label in wish.memories]
        if not chosen:
            raise ParameterError('No memory is named. To do without any, say "off": true.')
        memories = [self._memory(number, wish) for number in chosen]
        weights = self._weights(wish, chosen, memories)
        return Mixture(
            base.lm,
            memories,
            weights=weights,
            readers=base.readers,
            labels=[base.labels[number] for number in chosen],
            store=base.store,
            path=base.path,
        )

    def _memory(self, number: int, wish: MemoryOverrides) -> Memory:
        memory = self.mixture.memories[number]
        if number != self.own or (wish.k, wish.knn_temperature) == (None, None):
            return memory
        assert isinstance(memory, NeighbourMemory)
        main, *others = memory.settings
        main = VoteParams(
            main.k if wish.k is None else wish.k,
            main.knn_temperature if wish.knn_temperature is None else wish.knn_temperature,
        )
        changed = copy.copy(memory)
        changed.settings = (main, *others)
        return changed

    def _weights(self, wish: MemoryOverrides, chosen: list[int], memories: list[Memory]) -> Weights:
        base = self.mixture
        if wish.lmbda is not None:
            return equal_weights(memories, wish.lmbda)
        if isinstance(base.weights, FixedWeights):
            given = [sum(base.weights.values[base.component_slices[number]]) for number in chosen]
            if len(chosen) == len(base.memories):
                return base.weights
            return first_components(memories, 1 - sum(given), given)
        # A gate knows the memories and votes that it was trained with, and no others.
        if len(chosen) == len(base.memories) and (wish.k, wish.knn_temperature) == (None, None):
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
    """Keep some rows of a context; where texts are told of, each row must be a text's only one."""
    if rows is None:
        return context
    runs = [context.spans[row] for row in rows.tolist()] if context.spans else ()
    return replace(context, states={source: own[rows] for source, own in context.states.items()}, spans=runs)
