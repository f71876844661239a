"""Choose by the quality of translations how far the memories are trusted, and how many neighbours vote.

Weights are fitted to the probabilities of the tokens of held-out targets, where every earlier token is right. A model
that knows a domain badly writes better translations with a larger weight of its memories than these probabilities
suggest, because its own choices lead it away from the domain. So the odds of the memories against the model are
multiplied by a few factors, and the one with the best BLEU of held-out translations is taken. Text of another domain
must not lose by it. In the same way, many neighbours give better probabilities, but often shorter and worse
translations than few, so that both are tried.

Memories whose texts are shorter than those to translate end translations too early. So the odds of the end token are
divided by a few factors as well, and both factors are changed in turns while BLEU rises.

Several stores have factors of their own, each chosen on the held-out pairs whose sources are most like those of the
store: what is best for long verses is not best for short messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from knnlm.corpus import Document
from knnlm.errors import CorpusError
from knnlm.evaluation.quality import TextScores, score_translations
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import NeighbourMemory, VoteParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.source_domain import Sources, nearest_sources, sample_sources
from knnlm.mixture.weights import Odds, Weights, multiply_odds
from knnlm.progress import Progress, silent

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
END_FACTORS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the odds of the end token
_BATCH_SIZE = 128  # sources that are translated together
_MAX_GPU_BATCH = 512  # of a GPU, whose steps take as long for few sources as for many
_GPU_LOGITS = 1 << 26  # of a step, at most
_NEW_TOKENS = 128  # of a translation, at most: a model that knows a domain badly may repeat itself without end
PATIENCE = 2  # steps of a line without a better BLEU, after which it ends
MAX_LOSS = 0.35  # BLEU that text of another domain may lose against the model alone
FEWEST_PAIRS = 20  # that are like the sources of each store; with fewer of any, all stores have the same factors


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
class StoreOdds:
    """The best factors of the memories of one store, and the figures of all that were tried, the model alone first."""

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


@dataclass(frozen=True)
class ChosenOdds:
    """Weights with the best factors of each store."""

    weights: Weights
    stores: tuple[StoreOdds, ...]
    owners: tuple[int, ...]  # for each memory, the place of its store in `stores`

    @property
    def factor(self) -> Odds:
        """The factor of the odds of the memories: one number, or one for each memory."""
        return _by_memory([own.factor for own in self.stores], self.owners)

    @property
    def end_odds(self) -> Odds:
        """The factor of the odds of the end token: one number, or one for each memory."""
        return _by_memory([own.end_odds for own in self.stores], self.owners)

    @property
    def bleu(self) -> float:
        """The mean BLEU of the stores."""
        return sum(own.best.bleu for own in self.stores) / len(self.stores)

    @property
    def keeps_other_text(self) -> bool:
        """Whether text of another domain loses little against the model alone."""
        return all(_keeps(own.best, own.alone) for own in self.stores)

    def with_figures(self, others: Iterable[Sequence[StoreOdds]]) -> ChosenOdds:
        """Return this choice with the figures of others beside its own, without those of the model alone."""
        stores = list(self.stores)
        for other in others:
            stores = [
                replace(own, figures=(*own.figures, *more.figures[1:])) for own, more in zip(stores, other, strict=True)
            ]
        return replace(self, stores=tuple(stores))

    def as_dict(self) -> dict[str, Any]:
        """Return the choice and the figures as JSON types: those of the only store, or of each."""
        if len(self.stores) == 1:
            return self.stores[0].as_dict()
        return {"owners": list(self.owners), "stores": [own.as_dict() for own in self.stores]}


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
        """Take pairs of the stores' domains, and `other` ones, of another domain."""
        if not pairs:
            raise CorpusError("There are no pairs to translate.")
        self._mixture, self._other, self._progress = mixture, other, progress
        # Sources outside the domain are translated by the model alone, whatever the weights.
        self._inside = [number for number, outside in enumerate(_outside_domain(mixture, other)) if not outside]
        self._owners, self._pairs = _pairs_by_store(mixture, pairs)
        self._alone: list[OddsFigures] = []  # for each store
        self._other_alone: list[str] = []  # translations of the model alone

    def choose(self, settings: Sequence[Sequence[VoteParams]], weights: Weights) -> ChosenOdds:
        """Translate the pairs with each factor of these weights, and return those with the best BLEU.

        After two factors that were each worse than the one before, no larger one is tried. The mixture gets the
        settings and weights as they are.
        """
        self._mixture.set_weights(weights, settings)
        total = len(FACTORS) * sum(len(own) + len(self._inside) for own in self._pairs)
        total += 0 if self._alone else sum(map(len, self._pairs)) + len(self._other)
        found = [StoreOdds(1.0, ())] * len(self._pairs)
        with self._progress("translating", total=total, unit="sentences") as advance:
            alone = self._figures_alone(advance)
            for place in range(len(found)):
                figures = [alone[place]]
                for factor in FACTORS:
                    found[place] = StoreOdds(factor, ())
                    figures.append(self._translate(weights, found, place, advance))
                    if is_past_best(figures):
                        break
                found[place] = StoreOdds(best_factor(figures), tuple(figures))
        return self._chosen(weights, found)

    def choose_end(self, settings: Sequence[Sequence[VoteParams]], weights: Weights, chosen: ChosenOdds) -> ChosenOdds:
        """Change the factor of the odds of the memories, or of the end token, while BLEU rises, of each store in turn.

        Begins at what `choose` returned for the same settings and weights.
        """
        self._mixture.set_weights(weights, settings)
        found = list(chosen.stores)
        with self._progress("translating with other odds of the end", unit="sentences") as advance:
            for place in range(len(found)):
                found[place] = self._climb(weights, found, place, advance)
        return self._chosen(weights, found)

    def _climb(
        self, weights: Weights, found: Sequence[StoreOdds], place: int, advance: Callable[[int], None]
    ) -> StoreOdds:
        """Return the factors of one store from which no change of one of them raises BLEU."""
        alone, best, odds = self._figures_alone(advance)[place], found[place].best, list(found)
        tried = {(own.factor, own.end_odds): own for own in found[place].figures if own.max_k in (None, best.max_k)}

        def rank(own: OddsFigures) -> tuple[bool, float]:
            return _keeps(own, alone), own.bleu

        def translate(factor: float, end: float) -> OddsFigures:
            if (factor, end) not in tried:
                odds[place] = StoreOdds(factor, (), end)
                tried[factor, end] = self._translate(weights, odds, place, advance)
            return tried[factor, end]

        while True:
            every = lines(best.factor, best.end_odds)
            after = max((walk(best, (translate(*own) for own in line), rank) for line in every), key=rank)
            if rank(after) <= rank(best):
                return StoreOdds(best.factor, tuple(tried.values()), best.end_odds)
            best = after

    def _chosen(self, weights: Weights, found: Sequence[StoreOdds]) -> ChosenOdds:
        return ChosenOdds(self._multiplied(weights, found), tuple(found), self._owners)

    def _multiplied(self, weights: Weights, odds: Sequence[StoreOdds]) -> Weights:
        """Return weights with the factors of each store."""
        if len(odds) == 1:
            return multiply_odds(weights, odds[0].factor)
        slices = zip(self._owners, self._mixture.component_slices, strict=True)
        return multiply_odds(weights, [odds[owner].factor for owner, own in slices for _ in range(own.start, own.stop)])

    def _figures_alone(self, advance: Callable[[int], None]) -> list[OddsFigures]:
        """Return the figures of the model alone for each store; it translates once."""
        if not self._alone:
            self._alone = self._translate_alone(advance)
        return self._alone

    def _translate_alone(self, advance: Callable[[int], None]) -> list[OddsFigures]:
        scores = [_score(_translate(self._mixture, own, use_memory=False), own) for own in self._pairs]
        self._other_alone = _translate(self._mixture, self._other, use_memory=False)
        advance(sum(map(len, self._pairs)) + len(self._other))
        other = self._other_bleu(self._other_alone)
        return [OddsFigures(0.0, own.bleu, own.chrf, other) for own in scores]

    def _translate(
        self, weights: Weights, odds: Sequence[StoreOdds], place: int, advance: Callable[[int], None]
    ) -> OddsFigures:
        """Return the figures of the pairs of one store with the factors of all.

        The mixture has the weights without factors afterwards.
        """
        mixture, pairs = self._mixture, self._pairs[place]
        mixture.weights = self._multiplied(weights, odds)
        mixture.end_odds = _by_memory([own.end_odds for own in odds], self._owners)
        try:
            own = _score(_translate(mixture, pairs), pairs)
            inside = _translate(mixture, [self._other[number] for number in self._inside])
        finally:
            mixture.weights, mixture.end_odds = weights, 1.0
        texts = list(self._other_alone)
        for number, text in zip(self._inside, inside, strict=True):
            texts[number] = text
        advance(len(pairs) + len(self._inside))
        voting = [memory.max_k for memory in mixture.memories if isinstance(memory, NeighbourMemory)]
        factor, end, max_k = odds[place].factor, odds[place].end_odds, max(voting, default=None)
        return OddsFigures(factor, own.bleu, own.chrf, self._other_bleu(texts), max_k, end)

    def _other_bleu(self, texts: Sequence[str]) -> float | None:
        return _score(texts, self._other).bleu if self._other else None


def best_factor(figures: Sequence[OddsFigures]) -> float:
    """Return the factor with the best BLEU among those that keep other text; the smallest one if none does."""
    alone, *tried = figures
    kept = [own for own in tried if _keeps(own, alone)]
    return max(kept, key=_bleu).factor if kept else tried[0].factor


def memories_by_store(mixture: Mixture) -> list[list[int]]:
    """Return the numbers of the memories of each store: first all of the main one, then those of each other store."""
    others = [number for number, spec in enumerate(mixture.specs) if spec.kind == "knn" and spec.path]
    own = [number for number in range(len(mixture.memories)) if number not in others]
    return [numbers for numbers in (own, *([number] for number in others)) if numbers]


def _pairs_by_store(mixture: Mixture, pairs: Sequence[Document]) -> tuple[tuple[int, ...], list[Sequence[Document]]]:
    """Return the place of each memory's store, and the pairs whose sources are most like those of each store.

    Where a store has too few such pairs, all memories are those of one store with all pairs.
    """
    together = (0,) * len(mixture.memories), [pairs]
    if len(numbers := memories_by_store(mixture)) < 2 or not isinstance(mixture.lm, Seq2SeqLM):
        return together
    memories = [mixture.memories[own[0]] for own in numbers]
    stores = [memory.store if isinstance(memory, KnnMemory) else mixture.store for memory in memories]
    texts = [sample_sources(store) if store is not None else [] for store in stores]
    nearest = nearest_sources(mixture.lm, [pair.source_text or "" for pair in pairs], texts)
    by_store = [[pair for pair, own in zip(pairs, nearest, strict=True) if own == place] for place in range(len(texts))]
    if min(map(len, by_store)) < FEWEST_PAIRS:
        return together
    owners = {number: place for place, own in enumerate(numbers) for number in own}
    return tuple(owners[number] for number in range(len(mixture.memories))), [*by_store]


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


def _by_memory(values: Sequence[float], owners: Sequence[int]) -> Odds:
    """Return the value of the only store, or the value of each memory's store."""
    return values[0] if len(values) == 1 else tuple(values[owner] for owner in owners)


def _bleu(own: OddsFigures) -> float:
    return own.bleu


def best_choice(chosen: Sequence[ChosenOdds]) -> int:
    """Return the number of the choice with the best BLEU, among those that keep other text if any does."""
    return max(range(len(chosen)), key=lambda place: (chosen[place].keeps_other_text, chosen[place].bleu))


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
    if not pairs or not mixture.checks_sources:
        return [False] * len(pairs)
    lm = mixture.lm
    assert isinstance(lm, Seq2SeqLM)
    sources = Sources.read(lm, [pair.source_text or "" for pair in pairs])
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
