"""The k nearest stored contexts vote for the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ModelError
from knnlm.index.base import Index, Neighbours
from knnlm.index.gpu.deferred import check_flag
from knnlm.memories.automaton import Automaton
from knnlm.memories.base import Context, Source, SourceTokens
from knnlm.memories.subset import PairSubsetIndex
from knnlm.memories.voting import NeighbourMemory, RetrievedNeighbours, VoteParams


class KnnMemory(NeighbourMemory):
    """A datastore, its index, and how neighbours vote."""

    name = "knn"
    expensive = True
    history_length = 0

    def __init__(
        self,
        store: Datastore,
        index: Index | PairSubsetIndex,
        *,
        k: int,
        knn_temperature: float,
        others: Sequence[VoteParams] = (),
        source: Source | None = None,
        automaton: Automaton | None = None,
    ) -> None:
        self.store = store
        self.index = index
        self.metric = index.metric
        self.vocab_size = int(store.model["vocab_size"])
        self.settings = (VoteParams(k, knn_temperature), *others)
        self.source = source or Source(0, store.model["key_layer"], store.model["layer"])
        self.automaton = automaton  # None: every position is searched for

    @property
    def k(self) -> int:
        """The number of neighbours that vote."""
        return self.settings[0].k

    @property
    def knn_temperature(self) -> float:
        """τ of the softmax over negative distances."""
        return self.settings[0].knn_temperature

    @property
    def needs_sources(self) -> bool:
        """Whether a search depends on the source of a pair: only part of the store is searched."""
        return isinstance(self.index, PairSubsetIndex)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain a search: nothing of it is read from the device or from files."""
        looks_up = self.automaton is None and self.store.looks_up_on_device
        return self.metric == "l2" and looks_up and bool(getattr(self.index, "capturable", False))

    def search(
        self, keys: Tensor, k: int | None = None, source_tokens: Sequence[SourceTokens] | None = None
    ) -> RetrievedNeighbours:
        """Return the nearest stored contexts of (N, D) keys, in a subset search among those of their N sources."""
        queries = self._queries(keys)
        k = k or self.max_k
        # Fewer columns than k if the store is smaller; an empty store has none.
        k = max(1, min(k, self.store.key_count))
        if isinstance(self.index, PairSubsetIndex):
            neighbours = self.index.search(queries, k, source_tokens)
        else:
            neighbours = self.index.search(queries, k)
        distances = self._from_origin(neighbours.distances.to(keys.device), queries)
        ids = self.store.entries_of(neighbours.ids)
        counts = self.store.counts(neighbours.ids)
        return RetrievedNeighbours(
            ids.to(keys.device),
            distances,
            self.store.values(ids).to(keys.device),
            None if counts is None else counts.to(keys.device),
        )

    def _queries(self, keys: Tensor) -> Tensor:
        """Return keys in the space of the stored keys."""
        if check_flag(~keys.isfinite()):
            raise ModelError(
                "The model returns infinite or undefined hidden states, which have no neighbours. Try float32."
            )
        return self.store.project(keys, metric=self.metric)

    def _from_origin(self, distances: Tensor, queries: Tensor) -> Tensor:
        """Return the (N, k) distances to full keys from those to stored keys, from which an origin is subtracted."""
        if self.metric == "ip" and (origin := self.store.origin) is not None:
            return distances - (queries @ origin.to(queries))[:, None].to(distances.device)
        return distances

    def retrieve(self, context: Context, k: int | Sequence[int] | None = None) -> RetrievedNeighbours:
        """Return the nearest stored contexts of each position; none where k is 0 or the search mask is False.

        With an automaton and the texts of the positions, they are the nearest of those that it reaches, if there are
        enough.
        """
        keys, mask = context.states[self.source], context.search_mask
        if mask is not None and bool(mask.all()):
            mask = None
        walks = self.automaton is not None and bool(context.spans)
        if mask is None and not isinstance(k, Sequence) and not walks:
            return self.search(keys, k, context.source_tokens)
        ks = list(k) if isinstance(k, Sequence) else [k or self.max_k] * len(keys)
        most = min(max(ks, default=0), self.store.key_count)
        if mask is not None:
            ks = [each if wanted else 0 for each, wanted in zip(ks, mask.tolist(), strict=True)]
        if walks and self.automaton is not None and self.automaton.follows(most):
            return self._walk(self.automaton, context, ks, most)
        return self._search_each(keys, ks, context.source_tokens)

    def _walk(self, automaton: Automaton, context: Context, ks: Sequence[int], most: int) -> RetrievedNeighbours:
        """Return the neighbours that an automaton reaches, and those of the positions that are searched for."""
        keys, sources = context.states[self.source], context.source_tokens
        queries = self._queries(keys)

        def search(rows: Tensor, ks: Sequence[int]) -> RetrievedNeighbours:
            own = None if sources is None else [sources[row] for row in rows.tolist()]
            return self._search_each(keys[rows.to(keys.device)], ks, own)

        def compare(rows: Tensor, pointers: Tensor) -> Neighbours:
            own = queries[rows.to(keys.device)]
            nearest = automaton.nearest(own, pointers, most)
            return Neighbours(nearest.ids, self._from_origin(nearest.distances, own))

        return automaton.walk(context.spans, ks, most, compare=compare, search=search, device=keys.device)

    def _search_each(
        self, keys: Tensor, ks: Sequence[int], sources: Sequence[SourceTokens] | None
    ) -> RetrievedNeighbours:
        """Search once for each distinct number of neighbours; 0: no search."""
        depths = sorted(set(ks) - {0})
        if not depths:
            return RetrievedNeighbours.empty(len(keys), device=keys.device)
        if len(depths) == 1 and all(ks):
            return self.search(keys, depths[0], sources)
        blocks = []
        for depth in depths:
            chosen = [row for row, k in enumerate(ks) if k == depth]
            rows = torch.tensor(chosen, device=keys.device)
            own = None if sources is None else [sources[row] for row in chosen]
            blocks.append((rows, self.search(keys[rows], depth, own)))
        return RetrievedNeighbours.gather(len(keys), blocks)


@dataclass(frozen=True)
class StoredPassage:
    """The text around an entry, and its document."""

    document: str
    number: int  # of the document
    source: str
    entry: int
    token: str
    before: str
    after: str
    source_text: str | None = None  # of the document, where it is a pair


def stored_passage(
    store: Datastore, entry: int, decode: Callable[[list[int]], str], *, before: int, after: int
) -> StoredPassage:
    """Return the passage around an entry with this many tokens before it, and after it with its own."""
    document = store.document_at(entry)
    preceding, following = store.around(entry, before=before, after=after)
    texts = passage_texts(preceding, following, decode)
    return StoredPassage(
        document=document.id,
        number=document.number,
        source=document.source,
        entry=entry,
        token=texts[1],
        before=texts[0],
        after=texts[2],
        source_text=document.source_text,
    )


def passage_texts(
    preceding: list[int], following: list[int], decode: Callable[[list[int]], str]
) -> tuple[str, str, str]:
    """Return the texts before a token, of it, and after it; `following` begins with it.

    Some tokenizers drop the space before the first token of a text, so the texts are parts of the whole one, except
    where a character ends in the middle.
    """
    before, known, whole = decode(preceding), decode(preceding + following[:1]), decode(preceding + following)
    if known.startswith(before) and whole.startswith(known):
        return before, known[len(before) :], whole[len(known) :]
    return before, decode(following[:1]), decode(following[1:])
