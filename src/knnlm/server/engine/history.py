"""Remember what was said of the last texts, to weigh it anew. Runs no model and searches nothing."""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memories.base import Votes
from knnlm.memories.voting import NeighbourMemory, RetrievedNeighbours, VoteParams, vote
from knnlm.mixture.em import renormalise
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import FixedWeights
from knnlm.server.engine.overrides import MixtureCache
from knnlm.server.engine.predict import shares_of, weighed
from knnlm.server.engine.requests import ComponentLogProbs, KeptNeighbours, MemoryOverrides, ScoredToken

_BYTES = 256 << 20  # of all that is remembered

_MOST = 4096  # texts

_TOKEN, _SOURCE, _OTHER = 2000, 700, 500  # bytes that the objects of one take, a third more than they were measured

_BLOCK = 1 << 22  # neighbours that are counted anew at once


@dataclass
class TraceEntry:
    """The tokens of one text, with what every part of the mixture said of them."""

    wish: MemoryOverrides
    id: str = field(default_factory=lambda: f"trace-{secrets.token_hex(12)}")
    tokens: list[ScoredToken] = field(default_factory=list)
    bytes: int = 0


class TraceCache:
    """The last texts; the ones that were asked for longest ago are forgotten first."""

    def __init__(self, *, most_bytes: int = _BYTES, most: int = _MOST) -> None:
        self.most_bytes, self.most = most_bytes, most
        self.bytes = 0
        self._texts: OrderedDict[str, TraceEntry] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def begin(self, wish: MemoryOverrides) -> TraceEntry:
        """Begin a text."""
        made = TraceEntry(wish)
        with self._lock:
            self._texts[made.id] = made
            self._forget()
        return made

    def add(self, text: TraceEntry, tokens: Sequence[ScoredToken]) -> None:
        """Remember more of a text; what is forgotten already stays forgotten."""
        with self._lock:
            if text.id not in self._texts:
                return
            text.tokens.extend(tokens)
            more = sum(_size(token) for token in tokens)
            text.bytes += more
            self.bytes += more
            self._forget()

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._texts.clear()
            self.bytes = 0

    def _forget(self) -> None:
        """Make room; the caller holds the lock."""
        while self._texts and (self.bytes > self.most_bytes or len(self._texts) > self.most):
            _, oldest = self._texts.popitem(last=False)
            self.bytes -= oldest.bytes

    def find(self, name: str) -> tuple[MemoryOverrides, list[ScoredToken]] | None:
        """Give a text as it is now, None where it is forgotten."""
        with self._lock:
            if (text := self._texts.get(name)) is None:
                return None
            self._texts.move_to_end(name)
            return text.wish, list(text.tokens)


def _size(token: ScoredToken) -> int:
    neighbours = None if token.opinion is None else token.opinion.neighbours
    others = _OTHER * len(token.shares) + _OTHER // 4 * len(token.top)
    texts = sum(_SOURCE + 2 * len(source["before"] + source["after"] + source["source"]) for source in token.sources)
    return _TOKEN + others + texts + (0 if neighbours is None else neighbours.bytes)


def rescore(
    wishes: MixtureCache, wish: MemoryOverrides, tokens: Sequence[ScoredToken], changes: MemoryOverrides
) -> list[ScoredToken]:
    """Weigh tokens anew, as if the text had been asked for with other settings."""
    kept = [token.opinion.neighbours for token in tokens if token.opinion is not None]
    max_k = max((len(each.distances) for each in kept if each is not None), default=1)
    size = max(1, _BLOCK // max(1, max_k))
    # A long text with many neighbours would take gigabytes at once.
    blocks = [tokens[first : first + size] for first in range(0, len(tokens), size)] or [tokens]
    return [token for block in blocks for token in _rescore(wishes, wish, block, changes)]


def _rescore(
    wishes: MixtureCache, wish: MemoryOverrides, tokens: Sequence[ScoredToken], changes: MemoryOverrides
) -> list[ScoredToken]:
    if wish.off:
        raise ParameterError("This text was made without the memory, so there is nothing to weigh.")
    wanted = replace(
        wish,
        lmbda=wish.lmbda if changes.lmbda is None else changes.lmbda,
        k=wish.k if changes.k is None else changes.k,
        knn_temperature=wish.knn_temperature if changes.knn_temperature is None else changes.knn_temperature,
    )
    mixture = wishes.grant(wanted)
    assert mixture is not None
    known = [token for token in tokens if token.opinion is not None]
    if not known:
        return list(tokens)
    opinions = [token.opinion for token in known if token.opinion is not None]
    logs = torch.tensor([opinion.logs for opinion in opinions], dtype=torch.float64)  # (N, M)
    abstains = torch.tensor([opinion.abstains for opinion in opinions])
    if logs.shape[1] != len(mixture.component_names):
        raise ParameterError("The memory has changed since this text was made. Make it again.")
    votes = None
    if (setting := _changed(wishes, mixture, wish, wanted)) is not None:
        votes = _vote_again(opinions, setting[1])
        logs[:, setting[0]] = votes.log_prob(torch.ones(len(known), dtype=torch.long)).double()
    if isinstance(mixture.weights, FixedWeights):
        weights = renormalise(torch.tensor(mixture.weights.values, dtype=torch.float64), abstains)
    else:  # nothing was changed that such weights depend on
        weights = torch.tensor([opinion.weights for opinion in opinions], dtype=torch.float64)
    mixed = (logs + weights.log()).logsumexp(1)
    made = []
    columns = zip(opinions, logs.tolist(), weights.tolist(), mixed.tolist(), strict=True)
    for row, (token, (opinion, own, weight, log_p)) in enumerate(zip(known, columns, strict=True)):
        said = replace(opinion, logs=tuple(own), weights=tuple(weight))
        again = weighed(token.id, log_p, said)
        again.text, again.shares, again.sources = token.text, shares_of(mixture, said), token.sources
        if votes is not None:
            again.sources = _sources_again(wishes, token, opinion, votes.log_weights[row])
        made.append(again)
    weighed_again = iter(made)
    return [next(weighed_again) if token.opinion is not None else token for token in tokens]


def _sources_again(
    wishes: MixtureCache, token: ScoredToken, opinion: ComponentLogProbs, log_weights: Tensor
) -> list[dict[str, Any]]:
    """Give a token's sources their weight in a vote that was counted anew; those that have none now are last."""
    assert wishes.own is not None
    assert opinion.neighbours is not None
    label, distances = wishes.mixture.labels[wishes.own], opinion.neighbours.distances
    made = []
    for source in token.sources:
        # Neighbours that are as far away weigh the same, so the distance finds the weight.
        place = int(np.argmin(np.abs(distances - source["distance"]))) if source["memory"] == label else -1
        if place >= 0:
            source = {**source, "weight": float(log_weights[place].exp()) if place < len(log_weights) else 0.0}
        made.append(source)
    return sorted(made, key=lambda each: -each["weight"])


def _changed(
    wishes: MixtureCache, mixture: Mixture, before: MemoryOverrides, after: MemoryOverrides
) -> tuple[int, VoteParams] | None:
    """Say which part is to be counted anew, and how; None where votes stay as they are."""
    if (before.k, before.knn_temperature) == (after.k, after.knn_temperature) or wishes.own is None:
        return None
    label = wishes.mixture.labels[wishes.own]
    if label not in mixture.labels:
        return None
    number = mixture.labels.index(label)
    memory = mixture.memories[number]
    assert isinstance(memory, NeighbourMemory)
    return mixture.component_slices[number].start, memory.settings[0]


def _vote_again(opinions: Sequence[ComponentLogProbs], setting: VoteParams) -> Votes:
    """Count the votes of neighbours in another way: 1 is the token that came, 0 any other."""
    found = [opinion.neighbours for opinion in opinions]
    there = [each for each in found if each is not None]
    if len(there) < len(found):
        raise ParameterError("The neighbours of this text were not kept. Make it again.")
    max_k = max((len(each.distances) for each in there), default=0)
    distances = torch.from_numpy(np.stack([_wide(each.distances, max_k, math.inf) for each in there]))
    hits = torch.from_numpy(np.stack([_wide(each.hits, max_k, -1) for each in there])).long()
    counts = None
    if any(each.counts is not None for each in there):
        counts = torch.from_numpy(np.stack([_wide(_counts(each), max_k, 1) for each in there]))
    nearest = RetrievedNeighbours(hits, distances, hits, counts).nearest(setting.k)
    return vote(nearest, knn_temperature=setting.knn_temperature, vocab_size=2)


def _counts(each: KeptNeighbours) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.ones(len(each.distances), np.float32) if each.counts is None else each.counts


def _wide(
    array: np.ndarray[tuple[int], np.dtype[np.float32 | np.int8]], width: int, nothing: float
) -> np.ndarray[tuple[int], np.dtype[np.float32 | np.int8]]:
    return np.pad(array, (0, width - len(array)), constant_values=nothing)
