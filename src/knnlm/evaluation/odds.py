"""Choose by the quality of translations how far the memories are trusted, and how many neighbours vote.

Weights are fitted to the probabilities of the tokens of held-out targets, where every earlier token is right. A model
that knows a domain badly writes better translations with a larger weight of its memories than these probabilities
suggest, because its own choices lead it away from the domain. So the odds of the memories against the model are
multiplied by a few factors, and the one with the best BLEU of held-out translations is taken. Text of another domain
must not lose by it. In the same way, many neighbours give better probabilities, but often shorter and worse
translations than few, so that both are tried.

Memories whose texts are shorter than those to translate end translations too early. So the odds of the end token are
divided by a few factors as well, and both factors are changed in turns while BLEU rises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from knnlm.corpus import Document
from knnlm.errors import CorpusError
from knnlm.evaluation.quality import TextScores, score_translations
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.voting import NeighbourMemory, VoteParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.source_domain import Sources
from knnlm.mixture.weights import Weights, multiply_odds
from knnlm.progress import Progress, silent

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
END_FACTORS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the odds of the end token
_BATCH_SIZE = 128  # sources that are translated together
_MAX_GPU_BATCH = 512  # of a GPU, whose steps take as long for few sources as for many
_GPU_LOGITS = 1 << 26  # of a step, at most
_NEW_TOKENS = 128  # of a translation, at most: a model that knows a domain badly may repeat itself without end
PATIENCE = 2  # steps of a line without a better BLEU, after which it ends
MAX_LOSS = 0.35  # BLEU that text of another domain may lose against the model alone


@dataclass(frozen=True)
class OddsFigures:
    """The quality of translations with one factor of the odds of the memories, and one of those of the end token."""

    factor: float  # 0: the model alone
    bleu: float
    chrf: float
    other_bleu: float | None = None  # of text of another domain; None: there is none
    max_k: int | None = None  # neighbours that vote, at most; None: no memory has neighbours
    end_odds: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class ChosenOdds:
    """Weights with the best factors, and the figures of all that were tried, the model alone first."""

    weights: Weights
    factor: float
    figures: tuple[OddsFigures, ...]
    end_odds: float = 1.0

    @property
    def alone(self) -> OddsFigures:
        """The figures of the model alone."""
        return self.figures[0]

    @property
    def best(self) -> OddsFigures:
        """The figures of the chosen factors."""
        return next(own for own in self.figures if (own.factor, own.end_odds) == (self.factor, self.end_odds))

    def as_dict(self) -> dict[str, Any]:
        """Return the choice and the figures as JSON types."""
        chosen = {"factor": self.factor, "end_odds": self.end_odds, "max_k": self.best.max_k}
        return {**chosen, "tried": [own.as_dict() for own in self.figures]}


class OddsSearch:
    """Held-out pairs, and the translations of the model alone, which every choice is compared with."""

    def __init__(
        self,
        mixture: Mixture,
        pairs: Sequence[Document],
        *,
        other: Sequence[Document] = (),
        progress: Progress = silent,
    ) -> None:
        """Take pairs of the store's domain, and `other` ones, of another domain."""
        if not pairs:
            raise CorpusError("There are no pairs to translate.")
        self._mixture, self._pairs, self._other, self._progress = mixture, pairs, other, progress
        # Sources outside the domain are translated by the model alone, whatever the weights.
        self._inside = [number for number, outside in enumerate(_outside_domain(mixture, other)) if not outside]
        self._alone: OddsFigures | None = None
        self._other_alone: list[str] = []  # translations of the model alone

    def choose(self, settings: Sequence[Sequence[VoteParams]], weights: Weights) -> ChosenOdds:
        """Translate the pairs with each factor of these weights, and return those with the best BLEU.

        After two factors that were each worse than the one before, no larger one is tried. The mixture gets the
        settings and weights as they are.
        """
        self._mixture.set_weights(weights, settings)
        total = len(FACTORS) * (len(self._pairs) + len(self._inside))
        total += 0 if self._alone else len(self._pairs) + len(self._other)
        with self._progress("translating", total=total, unit="sentences") as advance:
            figures = [self._figures_alone(advance)]
            for factor in FACTORS:
                figures.append(self._translate(weights, factor, 1.0, advance))
                if is_past_best(figures):
                    break
        best = best_factor(figures)
        return ChosenOdds(multiply_odds(weights, best), best, tuple(figures))

    def choose_end(self, settings: Sequence[Sequence[VoteParams]], weights: Weights, chosen: ChosenOdds) -> ChosenOdds:
        """Change the factor of the odds of the memories, or of the end token, while BLEU rises.

        Begins at what `choose` returned for the same settings and weights.
        """
        self._mixture.set_weights(weights, settings)
        best = chosen.best
        tried = {(own.factor, own.end_odds): own for own in chosen.figures if own.max_k in (None, best.max_k)}
        with self._progress("translating with other odds of the end", unit="sentences") as advance:
            alone = self._figures_alone(advance)

            def rank(own: OddsFigures) -> tuple[bool, float]:
                return _keeps(own, alone), own.bleu

            def translate(factor: float, end: float) -> OddsFigures:
                if (factor, end) not in tried:
                    tried[factor, end] = self._translate(weights, factor, end, advance)
                return tried[factor, end]

            while True:
                every = lines(best.factor, best.end_odds)
                after = max((walk(best, (translate(*own) for own in line), rank) for line in every), key=rank)
                if rank(after) <= rank(best):
                    break
                best = after
        changed = multiply_odds(weights, best.factor)
        return ChosenOdds(changed, best.factor, tuple(tried.values()), best.end_odds)

    def _figures_alone(self, advance: Callable[[int], None]) -> OddsFigures:
        """Return the figures of the model alone, which translates once."""
        if self._alone is None:
            self._alone = self._translate_alone(advance)
        return self._alone

    def _translate_alone(self, advance: Callable[[int], None]) -> OddsFigures:
        own = _score(_translate(self._mixture, self._pairs, use_memory=False), self._pairs)
        self._other_alone = _translate(self._mixture, self._other, use_memory=False)
        advance(len(self._pairs) + len(self._other))
        return OddsFigures(0.0, own.bleu, own.chrf, self._other_bleu(self._other_alone))

    def _translate(
        self, weights: Weights, factor: float, end_odds: float, advance: Callable[[int], None]
    ) -> OddsFigures:
        """Return the figures of weights with these factors; the mixture has them without factors afterwards."""
        mixture = self._mixture
        mixture.weights, mixture.end_odds = multiply_odds(weights, factor), end_odds
        try:
            own = _score(_translate(mixture, self._pairs), self._pairs)
            inside = _translate(mixture, [self._other[number] for number in self._inside])
        finally:
            mixture.weights, mixture.end_odds = weights, 1.0
        texts = list(self._other_alone)
        for number, text in zip(self._inside, inside, strict=True):
            texts[number] = text
        advance(len(self._pairs) + len(self._inside))
        voting = [memory.max_k for memory in mixture.memories if isinstance(memory, NeighbourMemory)]
        max_k = max(voting, default=None)
        return OddsFigures(factor, own.bleu, own.chrf, self._other_bleu(texts), max_k, end_odds)

    def _other_bleu(self, texts: Sequence[str]) -> float | None:
        return _score(texts, self._other).bleu if self._other else None


def best_factor(figures: Sequence[OddsFigures]) -> float:
    """Return the factor with the best BLEU among those that keep other text; if none does, that which loses least."""
    alone, *tried = figures
    return max(tried, key=lambda own: _rank(own, alone)).factor


def lines(factor: float, end_odds: float) -> list[list[tuple[float, float]]]:
    """Return the pairs of factors that differ from a pair in one, in four lines away from it."""
    ends = [[(factor, other) for other in line] for line in _away(END_FACTORS, end_odds)]
    return [*ends, *([(other, end_odds) for other in line] for line in _away(FACTORS, factor))]


def _away(values: Sequence[float], value: float) -> tuple[Sequence[float], Sequence[float]]:
    """Return the values after one of several, and those before it, the nearest first."""
    place = values.index(value)
    return values[place + 1 :], values[:place][::-1]


def walk(best: OddsFigures, line: Iterable[OddsFigures], rank: Callable[[OddsFigures], Any]) -> OddsFigures:
    """Return the best of some figures and those of a line, which ends after two that are not better than the best.

    BLEU of a few hundred short texts is so noisy that one worse step does not mean that the next one is worse.
    """
    misses = 0
    for own in line:
        best, misses = (own, 0) if rank(own) > rank(best) else (best, misses + 1)
        if misses == PATIENCE:
            break
    return best


def best_choice(chosen: Sequence[ChosenOdds]) -> int:
    """Return the number of the choice with the best BLEU among those that keep other text; else of the least loss."""
    return max(range(len(chosen)), key=lambda place: _rank(chosen[place].best, chosen[place].alone))


def _rank(own: OddsFigures, alone: OddsFigures) -> tuple[bool, float]:
    """Return what is larger for a better choice: its BLEU or, if it does not keep other text, that of other text."""
    return (True, own.bleu) if _keeps(own, alone) else (False, own.other_bleu or 0.0)


def _keeps(own: OddsFigures, alone: OddsFigures) -> bool:
    """Whether text of another domain loses little against the model alone."""
    return own.other_bleu is None or own.other_bleu >= (alone.other_bleu or 0) - MAX_LOSS


def is_past_best(figures: Sequence[OddsFigures]) -> bool:
    """Whether the last two factors were each worse than the one before, or the last one loses other text."""
    alone, *tried = figures
    worse = len(tried) > 2 and tried[-1].bleu < tried[-2].bleu < tried[-3].bleu
    return worse or not _keeps(tried[-1], alone)


def _outside_domain(mixture: Mixture, pairs: Sequence[Document]) -> list[bool]:
    """Return for each pair whether its source is outside the domain of the store."""
    if not pairs or not isinstance(mixture.lm, Seq2SeqLM):
        return [False] * len(pairs)
    sources = Sources.read(mixture.lm, [pair.source_text or "" for pair in pairs])
    return mixture.outside_domain(sources.states, sources.tokens).tolist()


def _translate(mixture: Mixture, pairs: Sequence[Document], *, use_memory: bool = True) -> list[str]:
    if not pairs:
        return []
    sources = [pair.source_text or "" for pair in pairs]
    batch = _BATCH_SIZE
    if mixture.lm.device.type != "cpu":
        batch = max(batch, min(_MAX_GPU_BATCH, _GPU_LOGITS // mixture.lm.vocab_size))
    sizes = {"batch_size": batch, "max_new_tokens": _NEW_TOKENS}
    return mixture.translate(sources, use_memory=use_memory, num_beams=1, **sizes)


def _score(texts: Sequence[str], pairs: Sequence[Document]) -> TextScores:
    return score_translations(texts, [pair.text for pair in pairs])
