"""Say which stored contexts spoke for each token of a text, and how loudly. Knows nothing about indexes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from knnlm.errors import CorpusError, ParameterError
from knnlm.lm import Reading
from knnlm.memory import Found, Votes
from knnlm.mixture import Mixture


@dataclass(frozen=True)
class Voice:
    """One neighbour: the token it votes for, with what weight, and where it stands."""

    weight: float
    distance: float
    token: str
    agrees: bool  # it votes for the token that came
    document: str
    source: str
    before: str
    after: str


@dataclass(frozen=True)
class TokenExplanation:
    """One token of the text: how probable it was, and who said so."""

    token: str
    p_lm: float
    p_knn: float
    p: float
    neighbours: tuple[Voice, ...]


def explain(mixture: Mixture, text: str, *, top: int = 3) -> list[TokenExplanation]:
    """Explain every token of a text by its loudest neighbours."""
    if top < 0:
        raise ParameterError(f"top must be at least 0, not {top}.")
    tokens = mixture.lm.encode(text)
    if not tokens:
        raise CorpusError("There is nothing to explain: the text is empty.")
    explained: dict[int, TokenExplanation] = {}
    for reading in mixture.lm.read([tokens], mixture.window, batch_tokens=1024):
        for row, explanation in _explain_reading(mixture, reading, top):
            explained[row] = explanation
    return [replace(explained[row], token=piece) for row, piece in enumerate(mixture.lm.pieces(tokens))]


def _explain_reading(mixture: Mixture, reading: Reading, top: int) -> Iterator[tuple[int, TokenExplanation]]:
    assert reading.logits is not None
    found = mixture.memory.search(reading.keys)
    votes = mixture.memory.vote(found)
    prediction = mixture.mix(reading.logits, votes)
    each = prediction.each_of(reading.targets)
    columns = [*each.exp().T.tolist(), prediction.weigh(each).exp().tolist()]
    # Neighbours come nearest first, so the first ones are the loudest.
    for number, (row, target) in enumerate(zip(reading.rows.tolist(), reading.targets.tolist(), strict=True)):
        voices = [
            _voice(mixture, found, votes, (number, place), target)
            for place in range(min(top, found.ids.shape[1]))
            if found.ids[number, place] >= 0
        ]
        p_lm, p_knn, p = (column[number] for column in columns)
        yield row, TokenExplanation(mixture.lm.decode([target]), p_lm, p_knn, p, tuple(voices))


def _voice(mixture: Mixture, found: Found, votes: Votes, at: tuple[int, int], target: int) -> Voice:
    store = mixture.memory.store
    row, value = int(found.ids[at]), int(found.values[at])
    document = store.document_at(row)
    before, after = store.around(row, before=12, after=8)
    return Voice(
        weight=float(votes.log_weights[at].exp()),
        distance=float(found.distances[at]),
        token=mixture.lm.decode([value]),
        agrees=value == target,
        document=document.id,
        source=document.source,
        before=mixture.lm.decode(before),
        after=mixture.lm.decode(after[1:]),
    )
