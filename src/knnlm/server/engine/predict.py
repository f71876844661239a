"""From one pass over many texts to the tokens that follow and what was said of them. Knows nothing about requests.

Whatever was read in one turn is searched for at once, with the most neighbours that any text wants; then texts that ask
the same of the memory are predicted together.

Name the stored contexts that spoke loudest. Knows nothing about batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import LM_LOGITS, Context, Logits, MemoryOutput
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import VoteOutput, searches
from knnlm.mixture.mixture import Mixture, Retrieved
from knnlm.mixture.weights import MixturePrediction
from knnlm.server.engine.batching import join_contexts
from knnlm.server.engine.overrides import MixtureCache, gather, search_k
from knnlm.server.engine.requests import ComponentLogProbs, GenerationRequest, KeptNeighbours, ScoredToken


@dataclass(frozen=True)
class PositionRequest:
    """One position: whose it is, and how the token that follows it is found, None: it is known."""

    order: GenerationRequest
    draw: Sequence[Callable[[Tensor], int]] = ()  # one for each continuation
    target: int = -1


@dataclass(frozen=True)
class ForwardResult:
    """Positions that were read in one pass, one after another: of one prompt, or one each of several texts."""

    logits: Tensor  # (N, V)
    context: Context
    wants: Sequence[PositionRequest]
    whole: bool  # positions of one prompt: they stay together


@dataclass
class Group:
    """Positions that ask the same of the memory."""

    mixture: Mixture | None
    dense: bool  # the whole distribution is wanted
    pieces: list[tuple[ForwardResult, list[int] | None, int]] = field(
        default_factory=list
    )  # its rows; its first row of all

    @property
    def wants(self) -> list[PositionRequest]:
        """The positions, one after another."""
        return [
            want
            for heard, rows, _ in self.pieces
            for want in (heard.wants if rows is None else [heard.wants[row] for row in rows])
        ]

    @property
    def rows(self) -> list[int]:
        """Where they are among all positions."""
        return [
            first + row
            for heard, rows, first in self.pieces
            for row in (range(len(heard.wants)) if rows is None else rows)
        ]


@dataclass
class Times:
    """How long searching took, for those who measure."""

    search: float = 0.0
    searched: int = 0


def predict_batch(wishes: MixtureCache, heard: Sequence[ForwardResult], times: Times) -> list[list[ScoredToken]]:
    """Give, for each position in turn, the tokens that follow it: one, or one for each continuation."""
    answers: list[list[ScoredToken]] = [[] for piece in heard for _ in piece.wants]
    groups = _groups(wishes, heard)
    retrieved = _retrieve(wishes, heard, groups, times)
    for group in groups:
        for row, tokens in zip(group.rows, _GroupPredictor(wishes, group, retrieved).tokens(), strict=True):
            answers[row] = tokens
    return answers


def _groups(wishes: MixtureCache, heard: Sequence[ForwardResult]) -> list[Group]:
    """Put positions together that ask the same."""
    groups: dict[tuple[int, bool], Group] = {}
    first = 0
    for piece in heard:
        kinds = [
            (wishes.grant(want.order.wish), bool(want.draw) or want.order.alternatives > 0) for want in piece.wants
        ]
        if piece.whole or len({(id(mixture), dense) for mixture, dense in kinds}) == 1:
            mixture, dense = kinds[0][0], any(dense for _, dense in kinds)
            groups.setdefault((id(mixture), dense), Group(mixture, dense)).pieces.append((piece, None, first))
        else:
            order = sorted(range(len(kinds)), key=lambda row: (id(kinds[row][0]), kinds[row][1]))
            for key, rows in groupby(order, key=lambda row: (id(kinds[row][0]), kinds[row][1])):
                own = list(rows)
                groups.setdefault(key, Group(kinds[own[0]][0], key[1])).pieces.append((piece, own, first))
        first += len(piece.wants)
    return list(groups.values())


def _retrieve(wishes: MixtureCache, heard: Sequence[ForwardResult], groups: Sequence[Group], times: Times) -> Retrieved:
    """Search each store once for all positions that want it; the others have no neighbour."""
    base, total = wishes.mixture, sum(len(piece.wants) for piece in heard)
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
    keys = {source: _joined([piece.context.states[source] for piece in heard]) for source in sources}
    retrieved = base.retrieve(Context(keys), ks)
    if searched := sum(k > 0 for wanted in ks for k in wanted):
        times.search += perf_counter() - began
        times.searched += searched
    return retrieved


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


class _GroupPredictor:
    """Predicts one group: all that is told of a token comes from here."""

    def __init__(self, wishes: MixtureCache, group: Group, retrieved: Retrieved) -> None:
        self.wishes = wishes
        self.group = group
        self.mixture = group.mixture
        self.wants = group.wants
        pieces = [
            heard.context if rows is None else gather(heard.context, torch.tensor(rows, device=heard.logits.device))
            for heard, rows, _ in group.pieces
        ]
        context = join_contexts(pieces)
        self.logits = context.states[LM_LOGITS]
        self.retrieved: Retrieved | None = None
        if self.mixture is None:
            weights = torch.ones(len(self.logits), 1, device=self.logits.device)
            self.mixed = MixturePrediction([Logits(self.logits)], weights)
            return
        served = wishes.mixture.labels
        self.retrieved = _rows_of(retrieved.only([served.index(label) for label in self.mixture.labels]), group.rows)
        self.mixed = self.mixture.predict(context, self.retrieved)

    def tokens(self) -> Iterator[list[ScoredToken]]:
        """Give the tokens that follow each position."""
        dense = self.mixed.log_probs() if self.group.dense else None
        copies = max(max(1, len(want.draw)) for want in self.wants)
        rounds = []
        for copy in range(copies):
            targets = [self._target(row, want, copy, dense) for row, want in enumerate(self.wants)]
            rounds.append(self._facts(targets, dense))
        for row, want in enumerate(self.wants):
            yield [rounds[copy][row] for copy in range(max(1, len(want.draw)))]

    def _target(self, row: int, want: PositionRequest, copy: int, dense: Tensor | None) -> int:
        if not want.draw:
            return want.target
        assert dense is not None
        return want.draw[min(copy, len(want.draw) - 1)](dense[row]) if copy < len(want.draw) else 0

    def _facts(self, targets: list[int], dense: Tensor | None) -> list[ScoredToken]:
        """Say of each position's token what every part said."""
        target = torch.tensor(targets, device=self.logits.device)
        logs = self.mixed.component_log_probs(target)  # (N, M)
        weights = self.mixed.weights  # (N, M)
        mixed = self.mixed.combine(logs)
        abstains = self.mixed.component_abstains()
        neighbours = self._neighbours(targets)
        made = []
        columns = (logs.tolist(), weights.tolist(), abstains.tolist(), mixed.tolist())
        for row, (own, weight, gone, log_p) in enumerate(zip(*columns, strict=True)):
            opinion = ComponentLogProbs(tuple(own), tuple(weight), tuple(gone), neighbours[row] if neighbours else None)
            token = weighed(targets[row], log_p, opinion)
            want = self.wants[row]
            if dense is not None and want.order.alternatives:
                top = dense[row].topk(min(want.order.alternatives, dense.shape[1]))
                token.top = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            if self.mixture is not None:
                token.shares = shares_of(self.mixture, opinion)
                if want.order.sources:
                    token.sources = name_sources(self.mixture, self.mixed.outputs, row, top=want.order.sources)
            made.append(token)
        return made

    def _neighbours(self, targets: Sequence[int]) -> list[KeptNeighbours] | None:
        """Keep what scoring again needs of the neighbours of the store whose settings may be changed."""
        if self.mixture is None or self.wishes.own is None:
            return None
        label = self.wishes.mixture.labels[self.wishes.own]
        if label not in self.mixture.labels:
            return None
        number = self.mixture.labels.index(label)
        output, base = self.mixed.outputs[number], self.wishes.mixture.memories[self.wishes.own]
        if not isinstance(output, VoteOutput):
            return None
        found = output.neighbours
        more = None if self.retrieved is None else self.retrieved.neighbours[number]
        if more is not None and self.mixed.search_mask is None and searches(base):
            # More than have voted may have been found; scoring again may let them vote.
            found = more.nearest(search_k(self.mixture, label, base))
        # By NumPy, whose small steps cost a fraction of what torch's do.
        ids, values = found.ids.cpu().numpy(), found.values.cpu().numpy()
        hits = (values == np.array(targets)[:, None]).astype(np.int8)
        hits[ids < 0] = -1
        distances = found.distances.float().cpu().numpy()
        counts = None if found.counts is None else found.counts.float().cpu().numpy()
        return [
            KeptNeighbours(distances[row].copy(), hits[row].copy(), None if counts is None else counts[row].copy())
            for row in range(len(hits))
        ]


def _rows_of(retrieved: Retrieved, rows: Sequence[int]) -> Retrieved:
    found = next((each for each in retrieved.neighbours if each is not None), None)
    if found is None or list(rows) == list(range(len(found.ids))):
        return retrieved
    return retrieved.select(torch.tensor(rows, device=found.ids.device))


def weighed(token: int, log_p: float, opinion: ComponentLogProbs) -> ScoredToken:
    """Say what the memories gave together: p = (1 - weight) · p_lm + weight · p_knn."""
    said = [math.exp(log) for log in opinion.logs]
    weight = sum(opinion.weights[1:])
    p_knn = None
    if weight > 0:
        p_knn = sum(w * p for w, p in zip(opinion.weights[1:], said[1:], strict=True)) / weight
    elif len(said) > 1 and not opinion.abstains[1]:
        p_knn = said[1]  # where they weigh nothing, the first part speaks for them
    return ScoredToken(
        id=token, log_p=log_p, p_lm=said[0], p_knn=p_knn, p=math.exp(log_p), weight=weight, opinion=opinion
    )


def shares_of(mixture: Mixture, opinion: ComponentLogProbs) -> list[dict[str, object]]:
    """Say what each memory gave, where there are several."""
    if len(mixture.memories) < 2:
        return []
    shares = []
    for label, span in zip(mixture.labels, mixture.component_slices, strict=True):
        weight = sum(opinion.weights[span])
        given = [math.exp(log) for log in opinion.logs[span]]
        mixed = sum(w * p for w, p in zip(opinion.weights[span], given, strict=True))
        shares.append({"memory": label, "p": mixed / weight if weight > 0 else given[0], "weight": weight})
    return shares


BEFORE, AFTER = 16, 8  # tokens around a neighbour


def name_sources(mixture: Mixture, answers: Sequence[MemoryOutput], position: int, *, top: int) -> list[dict[str, Any]]:
    """Give the loudest neighbours of a position, of every store, loudest first."""
    named = []
    for label, memory, answer in zip(mixture.labels, mixture.memories, answers, strict=True):
        if not isinstance(answer, VoteOutput) or not isinstance(memory, KnnMemory):
            continue
        # Of those that are equally loud, the nearer ones.
        votes, places = answer.components[0].log_weights[position].exp().sort(descending=True, stable=True)
        for place, weight in zip(places[:top].tolist(), votes[:top].tolist(), strict=True):
            row = int(answer.neighbours.ids[position, place])
            if row >= 0:
                facts = {"memory": label, "weight": weight}
                facts["distance"] = float(answer.neighbours.distances[position, place])
                named.append({**facts, **describe(memory.store, mixture.lm, row)})
    return sorted(named, key=lambda each: -each["weight"])[:top]


def describe(store: Datastore, lm: CausalLM, row: int) -> dict[str, Any]:
    """Say where a row stands: its document, the token there, and the text around."""
    document = store.document_at(row)
    before, after = store.around(row, before=BEFORE, after=AFTER)
    return {
        "document": document.id,
        "number": document.number,
        "source": document.source,
        "row": row,
        "token": lm.decode(after[:1]),
        "before": lm.decode(before),
        "after": lm.decode(after[1:]),
    }
