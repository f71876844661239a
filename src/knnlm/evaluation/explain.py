"""Attribution of each token of a text to the memories and their nearest neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from knnlm.corpus import Document
from knnlm.errors import CorpusError, ParameterError
from knnlm.evaluation.evaluate import component_scores, join_scores
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.knn import KnnMemory, StoredPassage, stored_passage
from knnlm.memories.voting import NeighbourMemory, VoteOutput
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch

_TOKENS_BEFORE, _TOKENS_AFTER = 12, 8  # of a neighbour's context
_SAME_TEXT = "this text"


@dataclass(frozen=True)
class NeighbourVote:
    """One neighbour: the token it votes for, its weight in its memory, and its context."""

    memory: str
    weight: float
    distance: float
    token: str
    agrees: bool  # it votes for the token of the text
    document: str
    source: str
    before: str
    after: str
    source_text: str | None = None  # of the neighbour's document, where it is a pair


@dataclass(frozen=True)
class Contribution:
    """One memory: its probability of the token, and its weight at this position."""

    memory: str
    p: float
    weight: float


@dataclass(frozen=True)
class TokenExplanation:
    """One token of the text: its probability, and the share of each memory in it."""

    token: str
    p_lm: float
    p_knn: float | None  # by the first store; None without a store
    p: float
    shares: tuple[Contribution, ...]
    neighbours: tuple[NeighbourVote, ...]
    support: float | None = None  # the calibrated probability that the token is right; None: not tuned


def explain(mixture: Mixture, text: str, *, source: str | None = None, top: int = 3) -> list[TokenExplanation]:
    """Explain every token of a text by its nearest neighbours, `top` of each memory; `source` is that of a pair.

    Of several stores, those that were tuned alone, the neighbours are those of the store that translates the source.
    """
    if top < 0:
        raise ParameterError(f"top must be at least 0, not {top}.")
    if source is not None and mixture.router is not None and isinstance(mixture.lm, Seq2SeqLM):
        (mixture,) = mixture.route_sources([tuple(row) for row in mixture.lm.encode_sources([source])])
    tokens = mixture.lm.encode_document(Document("text", "The text", text, source_text=source)) if text else []
    if not tokens:
        raise CorpusError("The text is empty: there is nothing to explain.")
    explainers = [_Explainer(mixture, tokens, batch, top) for batch in mixture.read([tokens])]
    _weigh(mixture, explainers)
    explained = {row: explanation for explainer in explainers for row, explanation in explainer.each()}
    return [replace(explained[row], token=piece) for row, piece in enumerate(mixture.lm.token_texts(tokens))]


def _weigh(mixture: Mixture, explainers: Sequence[_Explainer]) -> None:
    """Set the weights and probabilities of all positions of a text."""
    rows = [explainer.batch.rows for explainer in explainers]
    first = torch.arange(sum(map(len, rows))) == 0
    scores = join_scores([explainer.scores for explainer in explainers], rows).weigh(mixture.layer, first)
    for explainer in explainers:
        explainer.p = scores.mixture[explainer.batch.rows].exp().tolist()
        explainer.weights = scores.weights[explainer.batch.rows]
        explainer.log_p = scores.mixture[explainer.batch.rows]


class _Explainer:
    """Explains the positions of one batch of one text."""

    def __init__(self, mixture: Mixture, tokens: Sequence[int], batch: ReadBatch, top: int) -> None:
        self.mixture = mixture
        self.tokens = tokens
        self.batch = batch
        self.top = top
        found = mixture.predict_components(batch.context)
        self.outputs, self.lm = found.outputs, found.lm
        self.scores = component_scores(found, batch.targets)
        self.component_probs = self.scores.components.exp().cpu()
        # Of the tokens, set by `_weigh`: probabilities, their logarithms, and the (N, M) weights.
        self.p: list[float] = []
        self.log_p = self.weights = torch.empty(0)

    def each(self) -> Iterator[tuple[int, TokenExplanation]]:
        """Iterate over (row, explanation)."""
        rows, targets = self.batch.rows.tolist(), self.batch.targets.tolist()
        supports = self._supports()
        knn = next((n for n, memory in enumerate(self.mixture.memories) if isinstance(memory, KnnMemory)), None)
        for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
            shares = self._shares(number)
            yield (
                row,
                TokenExplanation(
                    token=self.mixture.lm.decode([target]),
                    p_lm=float(self.component_probs[number, 0]),
                    p_knn=None if knn is None else shares[knn].p,
                    p=self.p[number],
                    shares=tuple(shares),
                    neighbours=tuple(self._neighbours(number, target)),
                    support=None if supports is None else supports[number],
                ),
            )

    def _supports(self) -> list[float] | None:
        """Return the supports of the tokens; None if the mixture has none."""
        if self.mixture.support is None or self.lm is None:
            return None
        targets, log_probs = self.batch.targets, self.scores.components
        log_p = self.log_p.to(log_probs.device)
        found: list[float] = self.mixture.support.of_log_probs(
            self.lm, self.outputs, targets, log_probs, log_p
        ).tolist()
        return found

    def _shares(self, number: int) -> list[Contribution]:
        """Return the probability of each memory over all its components, and their weight."""
        shares = []
        for label, own in zip(self.mixture.labels, self.mixture.component_slices, strict=True):
            probs, weights = self.component_probs[number, own], self.weights[number, own]
            weight, mixed = float(weights.sum()), float((probs * weights).sum())
            # Without any weight, the first component stands for the memory.
            shares.append(Contribution(label, mixed / weight if weight > 0 else float(probs[0]), weight))
        return shares

    def _neighbours(self, number: int, target: int) -> Iterator[NeighbourVote]:
        # Neighbours are sorted by distance, so the first ones have the largest weights.
        for label, memory, output in zip(self.mixture.labels, self.mixture.memories, self.outputs, strict=True):
            if isinstance(output, VoteOutput) and isinstance(memory, NeighbourMemory):
                for rank in range(min(self.top, output.neighbours.ids.shape[1])):
                    if output.neighbours.ids[number, rank] >= 0:
                        yield self._vote(label, memory, output, (number, rank), target)

    def _vote(
        self, label: str, memory: NeighbourMemory, output: VoteOutput, at: tuple[int, int], target: int
    ) -> NeighbourVote:
        entry, value = int(output.neighbours.ids[at]), int(output.neighbours.values[at])
        decode = self.mixture.lm.decode
        if isinstance(memory, KnnMemory):
            passage = stored_passage(memory.store, entry, decode, before=_TOKENS_BEFORE, after=_TOKENS_AFTER)
        else:
            before = list(self.tokens[max(0, entry - _TOKENS_BEFORE) : entry])
            after = list(self.tokens[entry + 1 : entry + _TOKENS_AFTER])
            passage = StoredPassage(_SAME_TEXT, 0, _SAME_TEXT, entry, decode([value]), decode(before), decode(after))
        # The weight is that of the first setting; a neighbour beyond its k has none.
        log_weights = output.components[0].log_weights
        return NeighbourVote(
            memory=label,
            weight=float(log_weights[at].exp()) if at[1] < log_weights.shape[1] else 0.0,
            distance=float(output.neighbours.distances[at]),
            token=passage.token,
            agrees=value == target,
            document=passage.document,
            source=passage.source,
            before=passage.before,
            after=passage.after,
            source_text=passage.source_text,
        )
