"""Choose by the quality of translations how far the memories are trusted, and how many neighbours vote.

Weights are fitted to the probabilities of the tokens of held-out targets, where every earlier token is right. A model
that knows a domain badly writes better translations with a larger weight of its memories than these probabilities
suggest, because its own choices lead it away from the domain. So the odds of the memories against the model are
multiplied by a few factors, and the one with the best BLEU of held-out translations is taken. Text of another domain
must not lose by it. In the same way, many neighbours give better probabilities, but often shorter and worse
translations than few, so that both are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from knnlm.corpus import Document
from knnlm.errors import CorpusError
from knnlm.evaluation.quality import TextScores, score_translations
from knnlm.memories.voting import NeighbourMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import Weights, multiply_odds
from knnlm.progress import Progress, silent

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
_BATCH_SIZE = 128  # sources that are translated together
_NEW_TOKENS = 128  # of a translation, at most: a model that knows a domain badly may repeat itself without end
MAX_LOSS = 0.25  # BLEU that text of another domain may lose against the model alone


@dataclass(frozen=True)
class OddsFigures:
    """The quality of translations with one factor of the odds."""

    factor: float  # 0: the model alone
    bleu: float
    chrf: float
    other_bleu: float | None = None  # of text of another domain; None: there is none
    max_k: int | None = None  # neighbours that vote, at most; None: no memory has neighbours

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class ChosenOdds:
    """Weights with the best factor, and the figures of all that were tried, the model alone first."""

    weights: Weights
    factor: float
    figures: tuple[OddsFigures, ...]

    @property
    def alone(self) -> OddsFigures:
        """The figures of the model alone."""
        return self.figures[0]

    @property
    def best(self) -> OddsFigures:
        """The figures of the chosen factor."""
        return next(own for own in self.figures if own.factor == self.factor)

    def as_dict(self) -> dict[str, Any]:
        """Return the choice and the figures as JSON types."""
        return {"factor": self.factor, "max_k": self.best.max_k, "tried": [own.as_dict() for own in self.figures]}


def choose_odds(
    mixture: Mixture,
    pairs: Sequence[Document],
    *,
    other: Sequence[Document] = (),
    alone: OddsFigures | None = None,
    progress: Progress = silent,
) -> ChosenOdds:
    """Translate pairs with each factor, and return the weights with the best BLEU.

    After two factors that were each worse than the one before, no larger one is tried. `other` are pairs of another
    domain, `alone` the figures of the model alone if they are known. The mixture keeps its weights.
    """
    if not pairs:
        raise CorpusError("There are no pairs to translate.")
    fitted, figures = mixture.weights, [alone] if alone else []
    max_k = max((memory.max_k for memory in mixture.memories if isinstance(memory, NeighbourMemory)), default=None)
    factors = FACTORS if alone else (0.0, *FACTORS)
    with progress("translating", total=len(factors) * (len(pairs) + len(other)), unit="sentences") as advance:
        for factor in factors:
            mixture.weights = multiply_odds(fitted, factor or 1.0)
            try:
                own = _translate(mixture, pairs, use_memory=factor > 0)
                elsewhere = _translate(mixture, other, use_memory=factor > 0) if other else None
            finally:
                mixture.weights = fitted
            other_bleu = elsewhere.bleu if elsewhere else None
            figures.append(OddsFigures(factor, own.bleu, own.chrf, other_bleu, max_k if factor else None))
            advance(len(pairs) + len(other))
            if factor and is_past_best(figures):
                break
    best = best_factor(figures)
    return ChosenOdds(multiply_odds(fitted, best), best, tuple(figures))


def best_factor(figures: Sequence[OddsFigures]) -> float:
    """Return the factor with the best BLEU among those that keep other text; the smallest one if none does."""
    alone, *tried = figures
    kept = [own for own in tried if _keeps(own, alone)]
    return max(kept, key=lambda own: own.bleu).factor if kept else tried[0].factor


def best_choice(chosen: Sequence[ChosenOdds]) -> int:
    """Return the number of the choice with the best BLEU, among those that keep other text if any does."""
    return max(
        range(len(chosen)), key=lambda place: (_keeps(chosen[place].best, chosen[place].alone), chosen[place].best.bleu)
    )


def _keeps(own: OddsFigures, alone: OddsFigures) -> bool:
    """Whether text of another domain loses little against the model alone."""
    return own.other_bleu is None or own.other_bleu >= (alone.other_bleu or 0) - MAX_LOSS


def is_past_best(figures: Sequence[OddsFigures]) -> bool:
    """Whether the last two factors were each worse than the one before, or the last one loses other text."""
    alone, *tried = figures
    worse = len(tried) > 2 and tried[-1].bleu < tried[-2].bleu < tried[-3].bleu
    return worse or not _keeps(tried[-1], alone)


def _translate(mixture: Mixture, pairs: Sequence[Document], *, use_memory: bool) -> TextScores:
    sources = [pair.source_text or "" for pair in pairs]
    sizes = {"batch_size": _BATCH_SIZE, "max_new_tokens": _NEW_TOKENS}
    found = mixture.translate(sources, use_memory=use_memory, num_beams=1, **sizes)
    return score_translations(found, [pair.text for pair in pairs])
