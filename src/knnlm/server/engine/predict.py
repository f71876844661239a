"""Prediction of the next tokens of a batch, with their probabilities and sources.

One search retrieves the neighbours of all positions of a step; then positions with the same memory settings are
predicted together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.memories.base import LM_LOGITS, Context, Logits, MemoryOutput
from knnlm.memories.knn import KnnMemory, stored_passage
from knnlm.memories.voting import VoteOutput, searches
from knnlm.mixture.mixture import Mixture, Retrieved
from knnlm.mixture.weights import MixturePrediction
from knnlm.server.engine.batching import join_contexts
from knnlm.server.engine.overrides import MixtureCache, gather, search_k
from knnlm.server.engine.requests import ComponentLogProbs, GenerationRequest, KeptNeighbours, ScoredToken

_CONTEXT_BEFORE, _CONTEXT_AFTER = 16, 8  # tokens around a source


@dataclass(frozen=True)
class PositionRequest:
    """One position of a request, and how its next token is chosen."""

    request: GenerationRequest
    samplers: Sequence[Callable[[Tensor], int]] = ()  # one for each continuation; none: `target` is the next token
    target: int = -1


@dataclass(frozen=True)
class ForwardResult:
    """Positions that were read in one forward pass: those of one prompt, or one of each sequence."""

    logits: Tensor  # (N, V)
    context: Context
    positions: Sequence[PositionRequest]
    one_prompt: bool  # the positions are not split into groups


@dataclass
class _Group:
    """Positions with the same memory settings."""

    mixture: Mixture | None
    dense: bool  # whether the distribution over the vocabulary is needed
    # Forward results, their rows in the group (None: all), and the number of their first row in the batch.
    results: list[tuple[ForwardResult, list[int] | None, int]] = field(default_factory=list)

    @property
    def positions(self) -> list[PositionRequest]:
        """The positions of the group."""
        return [
            position
            for result, rows, _ in self.results
            for position in (result.positions if rows is None else [result.positions[row] for row in rows])
        ]

    @property
    def rows(self) -> list[int]:
        """The rows of the positions in the batch."""
        return [
            first + row
            for result, rows, first in self.results
            for row in (range(len(result.positions)) if rows is None else rows)
        ]


@dataclass
class Times:
    """Totals of all searches."""

    search: float = 0.0  # seconds
    searched: int = 0  # positions


def predict_batch(mixtures: MixtureCache, results: Sequence[ForwardResult], times: Times) -> list[list[ScoredToken]]:
    """Return the next tokens of each position: one, or one for each continuation."""
    tokens: list[list[ScoredToken]] = [[] for result in results for _ in result.positions]
    groups = _groups(mixtures, results)
    retrieved = _retrieve(mixtures, results, groups, times=times)
    for group in groups:
        for row, predicted in zip(group.rows, _GroupPredictor(mixtures, group, retrieved).tokens(), strict=True):
            tokens[row] = predicted
    return tokens


def _groups(mixtures: MixtureCache, results: Sequence[ForwardResult]) -> list[_Group]:
    """Group positions by their memory settings."""
    groups: dict[tuple[int, bool], _Group] = {}
    first = 0
    for result in results:
        kinds = [
            (mixtures.get(position.request.overrides), bool(position.samplers) or position.request.alternatives > 0)
            for position in result.positions
        ]
        keys = [(id(mixture), dense) for mixture, dense in kinds]
        if result.one_prompt or len(set(keys)) == 1:
            mixture, dense = kinds[0][0], any(dense for _, dense in kinds)
            groups.setdefault((id(mixture), dense), _Group(mixture, dense)).results.append((result, None, first))
        else:
            for key in dict.fromkeys(keys):
                rows = [row for row, own in enumerate(keys) if own == key]
                groups.setdefault(key, _Group(*kinds[rows[0]])).results.append((result, rows, first))
        first += len(result.positions)
    return list(groups.values())


def _retrieve(
    mixtures: MixtureCache, results: Sequence[ForwardResult], groups: Sequence[_Group], *, times: Times
) -> Retrieved:
    """Search each store once, for all positions whose mixture uses it."""
    base, total = mixtures.mixture, sum(len(result.positions) for result in results)
    ks: list[list[int]] = []
    for label, memory in zip(base.labels, base.memories, strict=True):
        wanted = [0] * total
        if searches(memory):
            for group in groups:
                k = search_k(group.mixture, label, memory)
                for row in group.rows:
                    wanted[row] = k
        ks.append(wanted)
    began = perf_counter()
    sources = {memory.source for memory in base.memories if memory.expensive and memory.source is not None}
    keys = {source: _concatenate([result.context.states[source] for result in results]) for source in sources}
    retrieved = base.retrieve(Context(keys), ks)
    if searched := sum(k > 0 for wanted in ks for k in wanted):
        times.search += perf_counter() - began
        times.searched += searched
    return retrieved


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


class _GroupPredictor:
    """Predicts the positions of one group."""

    def __init__(self, mixtures: MixtureCache, group: _Group, retrieved: Retrieved) -> None:
        self.mixtures = mixtures
        self.group = group
        self.mixture = group.mixture
        self.positions = group.positions
        contexts = [
            result.context if rows is None else gather(result.context, torch.tensor(rows, device=result.logits.device))
            for result, rows, _ in group.results
        ]
        context = join_contexts(contexts)
        self.logits = context.states[LM_LOGITS]
        self.retrieved: Retrieved | None = None
        if self.mixture is None:
            weights = torch.ones(len(self.logits), 1, device=self.logits.device)
            self.mixed = MixturePrediction([Logits(self.logits)], weights)
            return
        served = mixtures.mixture.labels
        self.retrieved = _select_rows(
            retrieved.only([served.index(label) for label in self.mixture.labels]), group.rows
        )
        self.mixed = self.mixture.predict(context, self.retrieved)

    def tokens(self) -> Iterator[list[ScoredToken]]:
        """Yield the next tokens of each position."""
        dense = self.mixed.log_probs() if self.group.dense else None
        counts = [max(1, len(position.samplers)) for position in self.positions]
        copies = []
        for copy in range(max(counts)):
            targets = [self._target(row, copy, dense) for row in range(len(self.positions))]
            copies.append(self._score(targets, dense))
        for row, count in enumerate(counts):
            yield [copies[copy][row] for copy in range(count)]

    def _target(self, row: int, copy: int, dense: Tensor | None) -> int:
        """Return the known or sampled next token of a position; 0 for a copy that it does not have."""
        position = self.positions[row]
        if not position.samplers:
            return position.target
        assert dense is not None
        return position.samplers[copy](dense[row]) if copy < len(position.samplers) else 0

    def _score(self, targets: list[int], dense: Tensor | None) -> list[ScoredToken]:
        """Return each position's token with the log-probability and weight of every component."""
        target = torch.tensor(targets, device=self.logits.device)
        logs = self.mixed.component_log_probs(target)  # (N, M)
        weights = self.mixed.weights  # (N, M)
        mixed = self.mixed.combine(logs)
        abstains = self.mixed.component_abstains()
        neighbours = self._neighbours(targets)
        tokens = []
        columns = (logs.tolist(), weights.tolist(), abstains.tolist(), mixed.tolist())
        for row, (own, weight, abstain, log_p) in enumerate(zip(*columns, strict=True)):
            kept = neighbours[row] if neighbours else None
            components = ComponentLogProbs(tuple(own), tuple(weight), tuple(abstain), kept)
            token = scored_token(targets[row], log_p, components)
            request = self.positions[row].request
            if dense is not None and request.alternatives:
                top = dense[row].topk(min(request.alternatives, dense.shape[1]))
                token.top = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            if self.mixture is not None:
                token.shares = memory_shares(self.mixture, components)
                if request.sources:
                    token.sources = _sources(self.mixture, self.mixed.outputs, row, limit=request.sources)
            tokens.append(token)
        return tokens

    def _neighbours(self, targets: Sequence[int]) -> list[KeptNeighbours] | None:
        """Return the neighbours of the adjustable memory, as rescoring needs them."""
        if self.mixture is None or self.mixtures.adjustable is None:
            return None
        label = self.mixtures.mixture.labels[self.mixtures.adjustable]
        if label not in self.mixture.labels:
            return None
        number = self.mixture.labels.index(label)
        output, base = self.mixed.outputs[number], self.mixtures.mixture.memories[self.mixtures.adjustable]
        if not isinstance(output, VoteOutput):
            return None
        neighbours = output.neighbours
        more = None if self.retrieved is None else self.retrieved.neighbours[number]
        if more is not None and self.mixed.search_mask is None and searches(base):
            # More neighbours may have been retrieved than voted; rescoring can use them.
            neighbours = more.nearest(search_k(self.mixture, label, base))
        # In NumPy, whose small operations are several times faster than torch's.
        ids, values = neighbours.ids.cpu().numpy(), neighbours.values.cpu().numpy()
        hits = (values == np.array(targets)[:, None]).astype(np.int8)
        hits[ids < 0] = -1
        distances = neighbours.distances.float().cpu().numpy()
        counts = None if neighbours.counts is None else neighbours.counts.float().cpu().numpy()
        return [
            KeptNeighbours(distances[row].copy(), hits[row].copy(), None if counts is None else counts[row].copy())
            for row in range(len(hits))
        ]


def _select_rows(retrieved: Retrieved, rows: Sequence[int]) -> Retrieved:
    first = next((neighbours for neighbours in retrieved.neighbours if neighbours is not None), None)
    if first is None or list(rows) == list(range(len(first.ids))):
        return retrieved
    return retrieved.select(torch.tensor(rows, device=first.ids.device))


def scored_token(token: int, log_p: float, components: ComponentLogProbs) -> ScoredToken:
    """Return a token with the memories combined: p = (1 - weight) · p_lm + weight · p_knn."""
    probs = [math.exp(log_prob) for log_prob in components.log_probs]
    weight = sum(components.weights[1:])
    p_knn = None
    if weight > 0:
        p_knn = sum(w * p for w, p in zip(components.weights[1:], probs[1:], strict=True)) / weight
    elif len(probs) > 1 and not components.abstains[1]:
        p_knn = probs[1]  # without any weight, that of the first memory
    return ScoredToken(
        id=token, log_p=log_p, p_lm=probs[0], p_knn=p_knn, p=math.exp(log_p), weight=weight, components=components
    )


def memory_shares(mixture: Mixture, components: ComponentLogProbs) -> list[dict[str, object]]:
    """Return the probability and weight of each memory, if there are several."""
    if len(mixture.memories) < 2:
        return []
    shares = []
    for label, own in zip(mixture.labels, mixture.component_slices, strict=True):
        weight = sum(components.weights[own])
        probs = [math.exp(log_prob) for log_prob in components.log_probs[own]]
        mixed = sum(w * p for w, p in zip(components.weights[own], probs, strict=True))
        shares.append({"memory": label, "p": mixed / weight if weight > 0 else probs[0], "weight": weight})
    return shares


def _sources(mixture: Mixture, outputs: Sequence[MemoryOutput], position: int, *, limit: int) -> list[dict[str, Any]]:
    """Return the neighbours of a position with the largest weights, of all stores."""
    sources = []
    for label, memory, output in zip(mixture.labels, mixture.memories, outputs, strict=True):
        if not isinstance(output, VoteOutput) or not isinstance(memory, KnnMemory):
            continue
        # Stable: of neighbours with equal weights, the nearer ones come first.
        weights, places = output.components[0].log_weights[position].exp().sort(descending=True, stable=True)
        for place, weight in zip(places[:limit].tolist(), weights[:limit].tolist(), strict=True):
            entry = int(output.neighbours.ids[position, place])
            if entry >= 0:
                distance = float(output.neighbours.distances[position, place])
                vote = {"memory": label, "weight": weight, "distance": distance}
                passage = stored_passage(
                    memory.store, entry, mixture.lm.decode, before=_CONTEXT_BEFORE, after=_CONTEXT_AFTER
                )
                sources.append({**vote, **asdict(passage)})
    return sorted(sources, key=lambda source: -source["weight"])[:limit]
