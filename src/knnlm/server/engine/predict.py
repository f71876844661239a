"""Prediction of the next tokens of a batch, with their probabilities and sources.

One search retrieves the neighbours of all positions of a step; then positions with the same memory settings are
predicted together. The mixtures of different settings share the models and stores of the served mixture and differ
only in votes and weights, so that one search serves all of them.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knnlm.errors import ParameterError
from knnlm.memories.automaton import Automaton
from knnlm.memories.base import LM_LOGITS, Context, Logits, Memory, MemoryOutput, join_contexts
from knnlm.memories.knn import KnnMemory, stored_passage
from knnlm.memories.voting import NeighbourMemory, SearchMemory, VoteOutput, VoteParams, searches
from knnlm.mixture.mixture import Mixture, Retrieved
from knnlm.mixture.repetition import MIN_REPEAT, NO_TOKEN, damp
from knnlm.mixture.spec import DEFAULTS
from knnlm.mixture.weights import FixedWeights, MixturePrediction, Weights, equal_weights, first_components
from knnlm.server.engine.requests import (
    ComponentLogProbs,
    GenerationRequest,
    KeptNeighbours,
    MemoryOverrides,
    ScoredToken,
)

_CONTEXT_BEFORE, _CONTEXT_AFTER = 16, 8  # tokens around a source
_MAX_MIXTURES = 256  # each is a few small objects


class MixtureCache:
    """Builds the mixtures of overrides, and keeps those used last; thread-safe."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.adjustable = _adjustable(mixture)
        self.stores = [MixtureCache(own) for own in mixture.by_store] if mixture.router is not None else []
        self._mixtures: OrderedDict[MemoryOverrides, Mixture] = OrderedDict()
        self._lock = Lock()

    def get(self, overrides: MemoryOverrides) -> Mixture | None:
        """Return the mixture of overrides, None if memories are off; raise ParameterError for unknown memories."""
        return None if overrides.off else self._get(overrides)

    def _get(self, overrides: MemoryOverrides) -> Mixture:
        with self._lock:
            if overrides not in self._mixtures:
                self._mixtures[overrides] = self._build(overrides)
                if len(self._mixtures) > _MAX_MIXTURES:
                    self._mixtures.popitem(last=False)
            self._mixtures.move_to_end(overrides)
            return self._mixtures[overrides]

    def max_k(self, overrides: MemoryOverrides) -> int:
        """Return how many neighbours rescoring can use, of several stores that of any; 0: k cannot be changed."""
        if self.stores and not overrides.off:
            return min((own.max_k(each) for own, each in self._by_store(overrides).values()), default=0)
        mixture = self.get(overrides)
        if mixture is None or self.adjustable is None:
            return 0
        label = self.mixture.labels[self.adjustable]
        if label not in mixture.labels:
            return 0
        memory, base = mixture.memories[mixture.labels.index(label)], self.mixture.memories[self.adjustable]
        assert isinstance(memory, NeighbourMemory)
        assert isinstance(base, NeighbourMemory)
        return max(memory.max_k, base.max_k)

    def of_store(self, memories: tuple[str, ...] | None) -> MixtureCache:
        """Return the mixtures of one of several stores, if all of these memories are its own; else these."""
        if memories is None:
            return self
        return next((own for own in self.stores if set(memories) <= set(own.mixture.labels)), self)

    def _build(self, overrides: MemoryOverrides) -> Mixture:
        base = self.mixture
        if unknown := [name for name in overrides.memories or () if name not in base.labels]:
            raise ParameterError(f"There is no memory {unknown[0]!r}. There are: {', '.join(base.labels)}.")
        chosen = [n for n, label in enumerate(base.labels) if overrides.memories is None or label in overrides.memories]
        if not chosen:
            raise ParameterError('The list of memories is empty. To use none, send "off": true.')
        if self.stores:
            found = {place: own._get(each) for place, (own, each) in self._by_store(overrides).items()}
            return next(iter(found.values())) if len(found) == 1 else base.with_stores(found)
        memories = [self._memory(number, overrides) for number in chosen]
        weights = self._weights(overrides, chosen, memories)
        as_tuned = len(chosen) == len(base.memories) and _as_tuned(overrides)
        return Mixture(
            base.lm,
            memories,
            weights=weights,
            # λ, k and τ in a request are those of the paper's kNN-LM, as in rescoring.
            online=base.online if _as_tuned(overrides) else None,
            support=base.support if as_tuned else None,
            source_domain=base.source_domain if _as_tuned(overrides) else None,
            end_odds=base.end_odds if as_tuned else 1.0,
            domain_check=base.domain_check if overrides.domain_check is None else overrides.domain_check,
            damping=base.damping,
            readers=base.readers,
            labels=[base.labels[number] for number in chosen],
            store=base.store,
            path=base.path,
        )

    def _by_store(self, overrides: MemoryOverrides) -> dict[int, tuple[MixtureCache, MemoryOverrides]]:
        """Return the stores whose memories are used, by their places, each with the overrides of its own memories."""
        found = {}
        for place, own in enumerate(self.stores):
            labels = own.mixture.labels
            chosen = tuple(label for label in labels if overrides.memories is None or label in overrides.memories)
            if chosen:
                found[place] = own, replace(overrides, memories=chosen)
        return found

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


def _as_tuned(overrides: MemoryOverrides) -> bool:
    """Whether overrides keep λ, k and τ."""
    return (overrides.lmbda, overrides.k, overrides.knn_temperature) == (None,) * 3


def _adjustable(mixture: Mixture) -> int | None:
    """Return the number of the memory whose k and τ a request can set: the first knn, or the only one that votes."""
    stores = [n for n, memory in enumerate(mixture.memories) if isinstance(memory, KnnMemory)]
    voting = [n for n, memory in enumerate(mixture.memories) if isinstance(memory, NeighbourMemory)]
    return stores[0] if stores else voting[0] if len(voting) == 1 else None


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


Entries = Mapping[object, Tensor]  # that each automaton has reached, see `Span.entries`


@dataclass(frozen=True)
class PositionRequest:
    """One position of a request, and how its next token is chosen."""

    request: GenerationRequest
    samplers: Sequence[Callable[[Tensor], int]] = ()  # one for each continuation; none: `target` is the next token
    target: int = -1
    scored: bool = True  # False: the token only updates the online weights
    evidence: bool = True  # whether the known token updates the online weights
    generated: Sequence[int] = ()  # the tokens that were generated before, if the last of them occurred before


@dataclass(frozen=True)
class ForwardResult:
    """Positions that were read in one forward pass: those of one prompt, or the next ones of each sequence."""

    logits: Tensor  # (N, V)
    context: Context
    positions: Sequence[PositionRequest]
    one_prompt: bool  # the positions are not split into groups

    def with_states(self, states: Sequence[Tensor | None], entries: Sequence[Entries]) -> ForwardResult:
        """Return the result with the state of the online weights, and the reached entries, before each span."""
        known = zip(self.context.spans, states, entries, strict=True)
        spans = [replace(span, state=state, entries=own) for span, state, own in known]
        return replace(self, context=replace(self.context, spans=spans))


@dataclass(frozen=True)
class PredictedPosition:
    """The next tokens of a position, one for each continuation, and the state of the online weights after it."""

    tokens: list[ScoredToken]
    state: Tensor | None  # (S,) after the known token, or before the sampled ones; None: without online weights
    entries: Entries = field(default_factory=dict)


@dataclass
class _Group:
    """Positions with the same memory settings."""

    mixture: Mixture | None
    dense: bool  # whether the distribution over the vocabulary is needed
    positions: list[PositionRequest] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the positions in the batch
    contexts: list[Context] = field(default_factory=list)  # of the positions, to be joined

    def add(self, result: ForwardResult, first: int, rows: Sequence[int] | None = None) -> None:
        """Add rows of a forward result, or all of them; `first` is the number of its first row in the batch."""
        context = result.context
        if rows is None:
            rows = range(len(result.positions))
        else:
            context = _gather(context, torch.tensor(rows, device=result.logits.device))
        self.positions += [result.positions[row] for row in rows]
        self.rows += [first + row for row in rows]
        self.contexts.append(context)


@dataclass
class Times:
    """Totals of all searches."""

    search: float = 0.0  # seconds
    searched: int = 0  # positions


def predict_batch(mixtures: MixtureCache, results: Sequence[ForwardResult], times: Times) -> list[PredictedPosition]:
    """Return the next tokens of each position: one, or one for each continuation."""
    by_row: dict[int, PredictedPosition] = {}
    groups = _groups(mixtures, results)
    retrieved = _retrieve(mixtures, results, groups, times=times)
    for group in groups:
        by_row.update(zip(group.rows, _GroupPredictor(mixtures, group, retrieved).predict(), strict=True))
    reached = _reached(mixtures.mixture, retrieved)
    return [
        replace(by_row[row], entries={each: own[row] for each, own in reached.items()}) if reached else by_row[row]
        for row in range(len(by_row))
    ]


def _reached(mixture: Mixture, retrieved: Retrieved) -> dict[Automaton, Tensor]:
    """Return the (N, W) entries that each automaton has reached."""
    found = ((retrieved.neighbours[number], automaton) for number, automaton in mixture.automata.items())
    return {each: own.followed.entries for own, each in found if own is not None and own.followed is not None}


def _groups(mixtures: MixtureCache, results: Sequence[ForwardResult]) -> list[_Group]:
    """Group positions by their memory settings."""
    groups: dict[tuple[int, bool], _Group] = {}
    first = 0
    for result in results:
        kinds = [(mixtures.get(position.request.overrides), _is_dense(position)) for position in result.positions]
        keys = [(id(mixture), dense) for mixture, dense in kinds]
        if result.one_prompt or len(set(keys)) == 1:
            mixture, dense = kinds[0][0], any(dense for _, dense in kinds)
            groups.setdefault((id(mixture), dense), _Group(mixture, dense)).add(result, first)
        else:
            for key in dict.fromkeys(keys):
                rows = [row for row, own in enumerate(keys) if own == key]
                groups.setdefault(key, _Group(*kinds[rows[0]])).add(result, first, rows)
        first += len(result.positions)
    return list(groups.values())


def _is_dense(position: PositionRequest) -> bool:
    """Whether a position needs the distribution over the vocabulary."""
    return bool(position.samplers) or (position.scored and position.request.alternatives > 0)


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
    contexts = [
        Context(
            {source: result.context.states[source] for source in sources},
            result.context.spans if base.automata else (),
            source_tokens=result.context.source_tokens,
        )
        for result in results
    ]
    retrieved = base.retrieve(join_contexts(contexts), ks)
    if searched := _count_searches(retrieved, ks):
        times.search += perf_counter() - began
        times.searched += searched
    return retrieved


def _count_searches(retrieved: Retrieved, ks: Sequence[Sequence[int]]) -> int:
    """Return how many positions stores were searched for; those that an automaton reached are none of them."""
    count = 0
    for neighbours, wanted in zip(retrieved.neighbours, ks, strict=True):
        followed = None if neighbours is None else neighbours.followed
        count += sum(k > 0 for k in wanted) if followed is None else int(followed.searched.sum())
    return count


class _GroupPredictor:
    """Predicts the positions of one group."""

    def __init__(self, mixtures: MixtureCache, group: _Group, retrieved: Retrieved) -> None:
        self.mixtures = mixtures
        self.group = group
        self.mixture = group.mixture
        self.positions = group.positions
        context = join_contexts(group.contexts)
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
        sampled = [bool(position.samplers) for position in self.positions]
        if any(sampled):
            rows = None if all(sampled) else torch.tensor(sampled, device=self.logits.device)
            self.mixed = self.mixture.restrict_to_domain(self.mixed, rows)
        if self.mixture.damps:
            self._damp()

    def _damp(self) -> None:
        """Damp memories at the positions before which generated tokens repeat."""
        rows = [row for row, position in enumerate(self.positions) if len(position.generated) > MIN_REPEAT]
        if rows:
            texts = [torch.tensor(self.positions[row].generated, dtype=torch.long) for row in rows]
            padded = pad_sequence(texts, batch_first=True, padding_value=NO_TOKEN, padding_side="left")
            device = self.logits.device
            self.mixed = damp(self.mixed, padded.to(device), torch.tensor(rows, device=device))

    def predict(self) -> Iterator[PredictedPosition]:
        """Yield the next tokens of each position, and the states of the online weights."""
        dense = self.mixed.log_probs() if self.group.dense else None
        counts = [max(1, len(position.samplers)) for position in self.positions]
        tokens: list[list[ScoredToken]] = [[] for _ in self.positions]
        for number in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if number < count and self.positions[row].scored]
            targets = [self._target(row, number, dense) for row in range(len(self.positions))]
            for row, token in zip(rows, self._score(targets, dense, rows), strict=True):
                tokens[row].append(token)
        states = self._states()
        for row, own in enumerate(tokens):
            yield PredictedPosition(own, states[row] if states is not None else None)

    def _states(self) -> Tensor | None:
        """Return the (N, S) states of the online weights after known tokens, and before sampled ones.

        A known token that is no evidence leaves them unchanged.
        """
        states, by_expert = self.mixed.states, self.mixed.by_expert
        if states is None or by_expert is None or self.mixture is None:
            return None
        unchanged = [bool(position.samplers) or not position.evidence for position in self.positions]
        if all(unchanged):
            return states
        known = torch.tensor([max(0, position.target) for position in self.positions], device=self.logits.device)
        log_probs, abstains = self.mixed.component_log_probs(known), self.mixed.component_abstains()
        after = self.mixture.layer.after(states, by_expert, log_probs, abstains)
        return torch.where(torch.tensor(unchanged, device=after.device)[:, None], states, after)

    def _target(self, row: int, number: int, dense: Tensor | None) -> int:
        """Return the known or sampled next token of a position; 0 for a copy that it does not have."""
        position = self.positions[row]
        if not position.samplers:
            return position.target
        assert dense is not None
        return position.samplers[number](dense[row]) if number < len(position.samplers) else 0

    def _score(self, targets: list[int], dense: Tensor | None, rows: Sequence[int]) -> list[ScoredToken]:
        """Return the tokens of some rows with the log-probability and weight of every component."""
        if not rows:
            return []
        target = torch.tensor(targets, device=self.logits.device)
        logs = self.mixed.component_log_probs(target)  # (N, M)
        weights = self.mixed.weights  # (N, M)
        mixed = self.mixed.combine(logs)
        abstains = self.mixed.component_abstains()
        neighbours = self._neighbours(targets, rows)
        supports = self._supports(target, logs, mixed, rows)
        tokens = []
        columns = (logs.tolist(), weights.tolist(), abstains.tolist(), mixed.tolist())
        for number, row in enumerate(rows):
            own, weight, abstain, log_p = (column[row] for column in columns)
            components = ComponentLogProbs(tuple(own), tuple(weight), tuple(abstain))
            token = scored_token(targets[row], log_p, components)
            token.neighbours = neighbours[number] if neighbours else None
            request = self.positions[row].request
            if supports is not None and request.support:
                token.support = supports[row]
            if dense is not None and request.alternatives:
                top = dense[row].topk(min(request.alternatives, dense.shape[1]))
                token.top = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            if self.mixture is not None:
                token.shares = memory_shares(self.mixture, components)
                if request.sources:
                    token.sources = _sources(self.mixture, self.mixed.outputs, row, limit=request.sources)
            tokens.append(token)
        return tokens

    def _supports(self, target: Tensor, logs: Tensor, mixed: Tensor, rows: Sequence[int]) -> list[float] | None:
        """Return the supports of the (N,) tokens, if any of these rows shows them."""
        support, lm = None if self.mixture is None else self.mixture.support, self.mixed.lm
        if support is None or lm is None or not any(self.positions[row].request.support for row in rows):
            return None
        found: list[float] = support.of_log_probs(lm, self.mixed.outputs, target, logs, mixed).tolist()
        return found

    def _neighbours(self, targets: Sequence[int], rows: Sequence[int]) -> list[KeptNeighbours] | None:
        """Return the neighbours of the adjustable memory at some rows, as rescoring needs them."""
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
            for row in rows
        ]


def _gather(context: Context, rows: Tensor) -> Context:
    """Return some rows of a context: all rows of a span, or none."""
    wanted = set(rows.tolist())
    spans = [span for own, span in context.each_span() if own.start in wanted]
    states = {source: states[rows] for source, states in context.states.items()}
    known = context.source_tokens
    return replace(
        context,
        states=states,
        spans=spans,
        source_tokens=None if known is None else [known[row] for row in rows.tolist()],
    )


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
