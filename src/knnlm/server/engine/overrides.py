"""From what a request asks of the memory to a mixture that does so. Knows nothing about requests or batches.

All these mixtures share the models and memories of the one that is served; they differ in how neighbours vote and in
what counts how much. A search that was made for all rows of a batch is handed to them in the context.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memories.base import Context, Memory
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import NeighbourMemory, Retrieved, VoteParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.options import DEFAULTS
from knnlm.mixture.weights import FixedWeights, Weights, equal_weights, first_components
from knnlm.server.engine.requests import MemoryOverrides

_KEPT = 256  # mixtures; each is a few small objects


@dataclass(frozen=True)
class ContextWithNeighbours(Context):
    """A context whose searches were made already, together with those of others."""

    found: Mapping[str, Retrieved] = field(default_factory=dict)  # by the label of a memory


class PrefetchedKnn(KnnMemory):
    """A store that looks for neighbours in the context first."""

    label: str

    @classmethod
    def of(cls, memory: KnnMemory, label: str, settings: tuple[VoteParams, ...]) -> PrefetchedKnn:
        """Make one of a memory, with these ways of voting."""
        main, *others = settings
        made = cls(
            memory.store,
            memory.index,
            k=main.k,
            knn_temperature=main.knn_temperature,
            others=others,
            source=memory.source,
        )
        made.label = label
        return made

    def find(self, context: Context, k: int | None = None) -> Retrieved:
        """Give the neighbours that were found with those of others, or search."""
        if not isinstance(context, ContextWithNeighbours) or self.label not in context.found:
            return super().find(context, k)
        found = context.found[self.label].nearest(k or self.max_k)
        return found if context.search_mask is None else _only(found, context.search_mask)


def _only(found: Retrieved, asked: Tensor) -> Retrieved:
    """Forget the neighbours of rows that need none."""
    gone = ~asked[:, None]
    ids, values = found.ids.masked_fill(gone, -1), found.values.masked_fill(gone, -1)
    return Retrieved(ids, found.distances.masked_fill(gone, torch.inf), values, found.counts)


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
            home=base.home,
            folder=base.folder,
        )

    def _memory(self, number: int, wish: MemoryOverrides) -> Memory:
        memory, label = self.mixture.memories[number], self.mixture.labels[number]
        if number != self.own or (wish.k, wish.knn_temperature) == (None, None):
            return PrefetchedKnn.of(memory, label, memory.settings) if isinstance(memory, KnnMemory) else memory
        assert isinstance(memory, NeighbourMemory)
        main, *others = memory.settings
        main = VoteParams(
            main.k if wish.k is None else wish.k,
            main.knn_temperature if wish.knn_temperature is None else wish.knn_temperature,
        )
        if isinstance(memory, KnnMemory):
            return PrefetchedKnn.of(memory, label, (main, *others))
        return _with_settings(memory, (main, *others))

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


def _with_settings(memory: NeighbourMemory, settings: tuple[VoteParams, ...]) -> Memory:
    """Copy a memory of neighbours that is no store, with other ways of voting."""
    made = copy.copy(memory)
    made.settings = settings
    return made


def wanted_k(mixture: Mixture, label: str) -> int:
    """Say how many neighbours a mixture wants of a store; 0 where it has no such."""
    for own, memory in zip(mixture.labels, mixture.memories, strict=True):
        if own == label and isinstance(memory, KnnMemory):
            return memory.max_k
    return 0


def gather(context: Context, rows: Tensor | None) -> Context:
    """Keep some rows of a context; where texts are told of, each row must be a text's only one."""
    if rows is None:
        return context
    runs = [context.spans[row] for row in rows.tolist()] if context.spans else ()
    return replace(context, states={source: own[rows] for source, own in context.states.items()}, spans=runs)
