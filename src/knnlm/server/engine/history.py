"""Traces of the last texts, and rescoring them with other settings without a model or a search."""

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
from knnlm.server.engine.predict import MixtureCache, memory_shares, scored_token
from knnlm.server.engine.requests import ComponentLogProbs, KeptNeighbours, MemoryOverrides, ScoredToken

_MAX_BYTES = 256 << 20
_MAX_TRACES = 4096
_TOKEN_BYTES, _SOURCE_BYTES, _SHARE_BYTES = 2000, 700, 500  # of the objects; a third more than measured
_BLOCK_NEIGHBOURS = 1 << 22  # rescored at once


@dataclass
class TraceEntry:
    """The tokens of one text with the log-probabilities of all components."""

    overrides: MemoryOverrides
    id: str
    tokens: list[ScoredToken] = field(default_factory=list)
    neighbours: list[KeptNeighbours | None] = field(default_factory=list)  # of the tokens
    bytes: int = 0
    missing_shards: set[str] = field(default_factory=set)  # shards of the store that its searches lacked


class TraceCache:
    """The traces of the last texts; the least recently used are evicted first. Thread-safe."""

    def __init__(self, *, max_bytes: int = _MAX_BYTES, max_traces: int = _MAX_TRACES) -> None:
        self.max_bytes, self.max_traces = max_bytes, max_traces
        self.prefix = "trace-"  # of the ids of new traces
        self.bytes = 0
        self._traces: OrderedDict[str, TraceEntry] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._traces)

    def begin(self, overrides: MemoryOverrides) -> TraceEntry:
        """Return a new, empty trace."""
        trace = TraceEntry(overrides, self.prefix + secrets.token_hex(12))
        with self._lock:
            self._traces[trace.id] = trace
            self._evict()
        return trace

    def add(self, trace: TraceEntry, tokens: Sequence[ScoredToken]) -> None:
        """Append tokens to a trace, unless it was evicted; their neighbours move to the trace."""
        with self._lock:
            kept = trace.id in self._traces
            for token in tokens:
                if kept:
                    size = _size(token)
                    trace.tokens.append(token)
                    trace.neighbours.append(token.neighbours)
                    trace.bytes += size
                    self.bytes += size
                token.neighbours = None
            self._evict()

    def clear(self) -> None:
        """Remove all traces."""
        with self._lock:
            self._traces.clear()
            self.bytes = 0

    def _evict(self) -> None:
        """Remove the oldest traces beyond the limits; the caller holds the lock."""
        while self._traces and (self.bytes > self.max_bytes or len(self._traces) > self.max_traces):
            _, oldest = self._traces.popitem(last=False)
            self.bytes -= oldest.bytes

    def find(self, trace_id: str) -> TraceEntry | None:
        """Return a copy of a trace, None if there is none."""
        with self._lock:
            if (trace := self._traces.get(trace_id)) is None:
                return None
            self._traces.move_to_end(trace_id)
            return replace(trace, tokens=list(trace.tokens), neighbours=list(trace.neighbours))


def _size(token: ScoredToken) -> int:
    """Return an estimate of a token's bytes."""
    others = _SHARE_BYTES * len(token.shares) + _SHARE_BYTES // 4 * len(token.top)
    names = ("before", "after", "source", "source_text")
    texts = sum(_SOURCE_BYTES + 2 * sum(len(source.get(name) or "") for name in names) for source in token.sources)
    arrays = 0
    if token.neighbours is not None:
        counts = token.neighbours.counts
        arrays = token.neighbours.distances.nbytes + token.neighbours.hits.nbytes
        arrays += 0 if counts is None else counts.nbytes
    return _TOKEN_BYTES + others + texts + arrays


def rescore(mixtures: MixtureCache, trace: TraceEntry, changes: MemoryOverrides) -> list[ScoredToken]:
    """Return the tokens of a trace as if the text had been requested with other settings."""
    max_k = max((len(each.distances) for each in trace.neighbours if each is not None), default=1)
    size = max(1, _BLOCK_NEIGHBOURS // max(1, max_k))
    # In blocks: a long text with many neighbours would need gigabytes.
    blocks = [
        replace(trace, tokens=trace.tokens[first : first + size], neighbours=trace.neighbours[first : first + size])
        for first in range(0, len(trace.tokens), size)
    ]
    return [token for block in blocks or [trace] for token in _rescore(mixtures, block, changes)]


def _rescore(mixtures: MixtureCache, trace: TraceEntry, changes: MemoryOverrides) -> list[ScoredToken]:
    overrides, tokens = trace.overrides, trace.tokens
    if overrides.off:
        raise ParameterError("This text was generated without memories and cannot be rescored.")
    changed = replace(
        overrides,
        lmbda=overrides.lmbda if changes.lmbda is None else changes.lmbda,
        k=overrides.k if changes.k is None else changes.k,
        knn_temperature=overrides.knn_temperature if changes.knn_temperature is None else changes.knn_temperature,
    )
    mixture = mixtures.get(changed)
    assert mixture is not None
    components = [token.components for token in tokens if token.components is not None]
    if not components:
        return list(tokens)
    log_probs = torch.tensor([each.log_probs for each in components], dtype=torch.float64)  # (N, M)
    if log_probs.shape[1] != len(mixture.component_names):
        raise ParameterError("The store has changed since this text was generated. Send it again.")
    votes = None
    if (vote_change := _vote_change(mixtures, mixture, overrides, changed)) is not None:
        column, params = vote_change
        kept = [each for token, each in zip(tokens, trace.neighbours, strict=True) if token.components is not None]
        votes = _vote(kept, params)
        log_probs[:, column] = votes.log_prob(torch.ones(len(components), dtype=torch.long)).double()
    rescored = _with_weights(mixture, tokens, log_probs, _weights(mixture, components))
    if votes is not None:
        scored = [token for token in rescored if token.components is not None]
        for token, each, log_weights in zip(scored, kept, votes.log_weights, strict=True):
            assert each is not None
            token.sources = _weigh_sources(mixtures, token, each.distances, log_weights)
    return rescored


def _with_weights(
    mixture: Mixture, tokens: Sequence[ScoredToken], log_probs: Tensor, weights: Tensor
) -> list[ScoredToken]:
    """Return tokens with other (N, M) log-probabilities and weights; those that were not predicted stay."""
    mixed = (log_probs + weights.log()).logsumexp(1)
    rows = iter(zip(log_probs.tolist(), weights.tolist(), mixed.tolist(), strict=True))
    changed = []
    for token in tokens:
        if token.components is None:
            changed.append(token)
            continue
        own, weight, log_p = next(rows)
        components = replace(token.components, log_probs=tuple(own), weights=tuple(weight))
        new = scored_token(token.id, log_p, components)
        new.text, new.shares, new.sources = token.text, memory_shares(mixture, components), token.sources
        if mixture.support is not None:  # the weights are as tuned
            new.support = token.support
        changed.append(new)
    return changed


def _weights(mixture: Mixture, components: Sequence[ComponentLogProbs]) -> Tensor:
    """Return the (N, M) weights of a mixture.

    A gate and online weights keep those of the trace: the inputs of a gate have not changed, and those of online
    weights (the tokens of a prompt) need not be in the trace.
    """
    if isinstance(mixture.weights, FixedWeights) and not mixture.layer.stateful:
        abstains = torch.tensor([each.abstains for each in components])
        return renormalise(torch.tensor(mixture.weights.values, dtype=torch.float64), abstains)
    return torch.tensor([each.weights for each in components], dtype=torch.float64)


def _weigh_sources(
    mixtures: MixtureCache, token: ScoredToken, distances: np.ndarray[Any, Any], log_weights: Tensor
) -> list[dict[str, Any]]:
    """Return a token's sources with the weights of changed votes, the largest first."""
    assert mixtures.adjustable is not None
    label = mixtures.mixture.labels[mixtures.adjustable]
    sources = []
    for source in token.sources:
        if source["memory"] == label:
            # Neighbours at the same distance have the same weight, so the distance identifies it.
            place = int(np.argmin(np.abs(distances - source["distance"])))
            source = {**source, "weight": float(log_weights[place].exp()) if place < len(log_weights) else 0.0}
        sources.append(source)
    return sorted(sources, key=lambda source: -source["weight"])


def _vote_change(
    mixtures: MixtureCache, mixture: Mixture, before: MemoryOverrides, after: MemoryOverrides
) -> tuple[int, VoteParams] | None:
    """Return the component whose votes change and their new parameters, None if no votes change."""
    if (before.k, before.knn_temperature) == (after.k, after.knn_temperature) or mixtures.adjustable is None:
        return None
    label = mixtures.mixture.labels[mixtures.adjustable]
    if label not in mixture.labels:
        return None
    number = mixture.labels.index(label)
    memory = mixture.memories[number]
    assert isinstance(memory, NeighbourMemory)
    return mixture.component_slices[number].start, memory.settings[0]


def _vote(neighbours: Sequence[KeptNeighbours | None], params: VoteParams) -> Votes:
    """Return the votes of kept neighbours in a vocabulary of two: 1 is the token of the text, 0 any other."""
    kept = [each for each in neighbours if each is not None]
    if len(kept) < len(neighbours):
        raise ParameterError("The neighbours of this text were not kept. Send it again.")
    k = max((len(each.distances) for each in kept), default=0)
    distances = torch.from_numpy(np.stack([_pad(each.distances, k, math.inf) for each in kept]))
    hits = torch.from_numpy(np.stack([_pad(each.hits, k, -1) for each in kept])).long()
    counts = None
    if any(each.counts is not None for each in kept):
        counts = torch.from_numpy(np.stack([_pad(_counts(each), k, 1) for each in kept]))
    nearest = RetrievedNeighbours(hits, distances, hits, counts).nearest(params.k)
    return vote(nearest, knn_temperature=params.knn_temperature, vocab_size=2)


def _counts(neighbours: KeptNeighbours) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.ones(len(neighbours.distances), np.float32) if neighbours.counts is None else neighbours.counts


def _pad(
    array: np.ndarray[tuple[int], np.dtype[np.float32 | np.int8]], width: int, value: float
) -> np.ndarray[tuple[int], np.dtype[np.float32 | np.int8]]:
    return np.pad(array, (0, width - len(array)), constant_values=value)
