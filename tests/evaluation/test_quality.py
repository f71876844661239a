"""BLEU and chrF of translations: against counts by hand, and of a whole store of pairs."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter

import pytest

from helpers.pairs import pair_lm, pairs
from knnlm.corpus import Document
from knnlm.errors import CorpusError, MissingExtra, ModelError
from knnlm.evaluation.quality import measure_quality, score_translations
from knnlm.ingest.build import build
from knnlm.mixture.mixture import Mixture

STORED = pairs(24)


def bleu_by_hand(found, expected):
    """Corpus BLEU-4 of words that are separated by spaces, without smoothing."""
    hits, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for one, other in zip(found, expected, strict=True):
        words, wanted = one.split(), other.split()
        lengths[0] += len(words)
        lengths[1] += len(wanted)
        for size in range(1, 5):
            grams = [
                Counter(tuple(each[start : start + size]) for start in range(len(each) - size + 1))
                for each in (words, wanted)
            ]
            hits[size - 1] += sum((grams[0] & grams[1]).values())
            totals[size - 1] += sum(grams[0].values())
    precision = sum(math.log(hit / total) for hit, total in zip(hits, totals, strict=True)) / 4
    return 100 * math.exp(min(0, 1 - lengths[1] / lengths[0]) + precision)


def test_bleu_equals_counts_by_hand():
    expected = ["the cat sat on the mat today", "a store of words and their sources"]
    found = ["the cat sat on a mat", "a store of words and sources of them"]
    scores = score_translations(found, expected)
    assert scores.bleu == pytest.approx(bleu_by_hand(found, expected))
    assert 0 < scores.chrf < 100
    assert "tok:13a" in scores.bleu_signature
    assert "nc:6" in scores.chrf_signature


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    lm, path = pair_lm("marian"), tmp_path_factory.mktemp("quality") / "pairs.store"
    build(STORED, path, lm=lm, key_format="float32")
    return Mixture.open(path, lm, memories="knn", k=1, knn_temperature=1.0, lmbda=1.0)


def test_stored_pairs_are_translated_as_they_were_stored(mixture):
    some = STORED[2:8]  # with k = 1 and λ = 1, each target is found again
    found = measure_quality(mixture, some, max_new_tokens=24)
    assert found.sentences == len(some)
    expected = [pair.text for pair in some]
    assert mixture.translate([pair.source_text for pair in some], max_new_tokens=24) == expected
    assert found.chrf == pytest.approx(100)
    base = mixture.translate([pair.source_text for pair in some], max_new_tokens=24, use_memory=False)
    assert found.base_chrf == pytest.approx(score_translations(base, expected).chrf)
    assert found.base_chrf < 60
    assert json.loads(json.dumps(found.as_dict()))["sentences"] == len(some)


def test_limit_counts_tokens_of_targets(mixture):
    first = len(mixture.lm.encode(STORED[0].text))
    assert measure_quality(mixture, STORED, limit=first, max_new_tokens=2).sentences == 1
    assert measure_quality(mixture, STORED, limit=first + 1, max_new_tokens=2).sentences == 2


def test_no_pairs_are_refused(mixture):
    with pytest.raises(CorpusError, match="no pairs"):
        measure_quality(mixture, [])


def test_missing_package_is_named_before_anything_is_translated(mixture, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(MissingExtra, match=r"pip install 'knnlm\[translation\]'"):
        measure_quality(mixture, STORED)


def test_store_of_texts_has_no_translations(lm, tmp_path):
    build([Document("a", "a", "A text without a source.")], tmp_path / "text.store", lm=lm).close()
    opened = Mixture.open(tmp_path / "text.store", lm, memories="knn", use_tuned=False)
    with pytest.raises(ModelError, match="encoder"):
        measure_quality(opened, STORED)
