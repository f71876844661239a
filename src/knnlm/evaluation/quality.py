"""Quality of translations: BLEU and chrF of a mixture and of its model alone, by sacreBLEU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from knnlm.corpus import Document
from knnlm.errors import CorpusError, MissingExtra
from knnlm.evaluation.evaluate import first_documents
from knnlm.mixture.mixture import Mixture
from knnlm.progress import Progress, silent

_BATCH = 256  # pairs after which progress is shown; they are translated in smaller batches


@dataclass(frozen=True)
class TranslationQuality:
    """BLEU and chrF of translations, from 0 to 100, and the seconds that they took."""

    sentences: int
    base_bleu: float  # of the model alone
    bleu: float
    base_chrf: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    base_seconds: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class TextScores:
    """BLEU and chrF of some translations, with the signatures of sacreBLEU."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score_translations(found: Sequence[str], expected: Sequence[str]) -> TextScores:
    """Return the scores of translations against one reference each, with sacreBLEU's default settings."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingExtra("The quality of translations", "sacrebleu", "translation") from None
    bleu, chrf = BLEU(), CHRF()
    hypotheses, references = list(found), [list(expected)]
    return TextScores(
        bleu=float(bleu.corpus_score(hypotheses, references).score),
        chrf=float(chrf.corpus_score(hypotheses, references).score),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def check_metrics() -> None:
    """Raise MissingExtra without sacreBLEU, before the time of translations is lost."""
    score_translations(["a"], ["a"])


def measure_quality(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    limit: int | None = None,
    progress: Progress = silent,
    **settings: Any,
) -> TranslationQuality:
    """Translate the sources of pairs with and without the memories, and compare both with the targets.

    `limit` stops after the pair that reaches so many tokens of targets. Other settings are those of `translate`.
    """
    check_metrics()
    pairs = list(first_documents(documents, mixture.lm, limit))
    if not pairs:
        raise CorpusError("There are no pairs to translate.")
    sources, expected = [pair.source_text or "" for pair in pairs], [pair.text for pair in pairs]
    found, seconds = {}, {}
    with progress("translating", total=2 * len(pairs), unit="sentences") as advance:
        for use_memory in (False, True):
            begin, written = time.perf_counter(), list[str]()
            for first in range(0, len(sources), _BATCH):
                some = sources[first : first + _BATCH]
                written += mixture.translate(some, use_memory=use_memory, **settings)
                advance(len(some))
            found[use_memory], seconds[use_memory] = score_translations(written, expected), time.perf_counter() - begin
    base, own = found[False], found[True]
    return TranslationQuality(
        sentences=len(pairs),
        base_bleu=base.bleu,
        bleu=own.bleu,
        base_chrf=base.chrf,
        chrf=own.chrf,
        bleu_signature=own.bleu_signature,
        chrf_signature=own.chrf_signature,
        base_seconds=seconds[False],
        seconds=seconds[True],
    )
