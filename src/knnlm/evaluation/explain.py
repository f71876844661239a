"""Say which contexts spoke for each token of a text, and how loudly. Knows nothing about indexes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from knnlm.errors import CorpusError, ParameterError
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import NeighbourMemory, VoteOutput
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch

_BEFORE, _AFTER = 12, 8  # tokens around a neighbour

_HERE = "this text"


@dataclass(frozen=True)
class NeighbourVote:
    """One neighbour: the token it votes for, with what weight in its memory, and where it stands."""

    memory: str
    weight: float
    distance: float
    token: str
    agrees: bool  # it votes for the token that came
    document: str
    source: str
    before: str
    after: str


@dataclass(frozen=True)
class Contribution:
    """One memory: how probable it found the token, and how much it counted here."""

    memory: str
    p: float
    weight: float


@dataclass(frozen=True)
class TokenExplanation:
    """One token of the text: how probable it was, and who said so."""

    token: str
    p_lm: float
    p_knn: float | None  # by the first store; None where there is none
    p: float
    shares: tuple[Contribution, ...]
    neighbours: tuple[NeighbourVote, ...]


def explain(mixture: Mixture, text: str, *, top: int = 3) -> list[TokenExplanation]:
    """Explain every token of a text by its loudest neighbours."""
    if top < 0:
        raise ParameterError(f"top must be at least 0, not {top}.")
    tokens = mixture.lm.encode(text)
    if not tokens:
        raise CorpusError("There is nothing to explain: the text is empty.")
    explained: dict[int, TokenExplanation] = {}
    for batch in mixture.read([tokens]):
        for row, explanation in _Explainer(mixture, tokens, batch, top).each():
            explained[row] = explanation
    return [replace(explained[row], token=piece) for row, piece in enumerate(mixture.lm.token_texts(tokens))]


class _Explainer:
    """Explains the positions of one batch of one text."""

    def __init__(self, mixture: Mixture, tokens: Sequence[int], batch: ReadBatch, top: int) -> None:
        self.mixture = mixture
        self.tokens = tokens
        self.batch = batch
        self.top = top
        prediction = mixture.predict(batch.context)
        self.answers = prediction.outputs
        logs = prediction.component_log_probs(batch.targets)  # (N, M)
        self.p = prediction.combine(logs).exp().tolist()
        self.parts = logs.exp().cpu()
        self.weights = prediction.weights.cpu()

    def each(self) -> Iterator[tuple[int, TokenExplanation]]:
        """Give (row, explanation)."""
        rows, targets = self.batch.rows.tolist(), self.batch.targets.tolist()
        knn = next((n for n, memory in enumerate(self.mixture.memories) if isinstance(memory, KnnMemory)), None)
        for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
            shares = self._shares(number)
            yield (
                row,
                TokenExplanation(
                    token=self.mixture.lm.decode([target]),
                    p_lm=float(self.parts[number, 0]),
                    p_knn=None if knn is None else shares[knn].p,
                    p=self.p[number],
                    shares=tuple(shares),
                    neighbours=tuple(self._voices(number, target)),
                ),
            )

    def _shares(self, number: int) -> list[Contribution]:
        """Say what each memory gave, over all of its parts, and what they weighed together."""
        shares = []
        for label, span in zip(self.mixture.labels, self.mixture.component_slices, strict=True):
            given, weights = self.parts[number, span], self.weights[number, span]
            weight, mixed = float(weights.sum()), float((given * weights).sum())
            # Where its parts weigh nothing, the first of them speaks for the memory.
            shares.append(Contribution(label, mixed / weight if weight > 0 else float(given[0]), weight))
        return shares

    def _voices(self, number: int, target: int) -> Iterator[NeighbourVote]:
        # Neighbours come nearest first, so the first ones are the loudest.
        for label, memory, answer in zip(self.mixture.labels, self.mixture.memories, self.answers, strict=True):
            if isinstance(answer, VoteOutput) and isinstance(memory, NeighbourMemory):
                for place in range(min(self.top, answer.neighbours.ids.shape[1])):
                    if answer.neighbours.ids[number, place] >= 0:
                        yield self._voice(label, memory, answer, (number, place), target)

    def _voice(
        self, label: str, memory: NeighbourMemory, answer: VoteOutput, at: tuple[int, int], target: int
    ) -> NeighbourVote:
        row, value = int(answer.neighbours.ids[at]), int(answer.neighbours.values[at])
        if isinstance(memory, KnnMemory):
            document = memory.store.document_at(row)
            before, after = memory.store.around(row, before=_BEFORE, after=_AFTER)
            where = document.id, document.source
        else:
            before, after = self.tokens[max(0, row - _BEFORE) : row], self.tokens[row : row + _AFTER]  # type: ignore[assignment]
            where = _HERE, _HERE
        decode = self.mixture.lm.decode
        # Counted over the neighbours that vote; one beyond the first setting's k has no voice in it.
        votes = answer.components[0].log_weights
        return NeighbourVote(
            memory=label,
            weight=float(votes[at].exp()) if at[1] < votes.shape[1] else 0.0,
            distance=float(answer.neighbours.distances[at]),
            token=decode([value]),
            agrees=value == target,
            document=where[0],
            source=where[1],
            before=decode(before),
            after=decode(after[1:]),
        )
