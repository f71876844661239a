"""Figures of support against NumPy and brute force, and what a removed document does to it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.errors import CorpusError, ParameterError
from knnlm.evaluation.support import FEWEST, auroc, expected_calibration_error, fit_support, measure_support
from knnlm.evaluation.trace import Trace
from knnlm.evaluation.tune import score_table, tabulate, tune_trace
from knnlm.ingest.build import build
from knnlm.memories.base import LM_LOGITS
from knnlm.memories.decoder import LMOutput
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig

MEMORIES = "knn,cache,ngram"
GRID = {"ks": [4, 32], "knn_temperatures": [4.0, 16.0]}  # all values would take most of the time


def test_calibration_error_is_that_of_bins_with_equal_numbers():
    generator = np.random.default_rng(0)
    probabilities = generator.random(1000)
    right = generator.random(1000) < probabilities**2
    order = np.argsort(probabilities)
    expected = 0.0
    for number in range(15):
        rows = [row for place, row in enumerate(order) if _bin(place, 1000, 15) == number]
        expected += len(rows) / 1000 * abs(probabilities[rows].mean() - right[rows].mean())
    assert expected_calibration_error(probabilities, right) == pytest.approx(expected, abs=1e-12)
    assert expected_calibration_error(right.astype(float), right) == 0.0
    assert expected_calibration_error(np.full(10, 0.3), np.zeros(10, bool), bins=3) == pytest.approx(0.3)
    assert expected_calibration_error(np.zeros(0), np.zeros(0, bool)) == 0.0


def _bin(place, count, bins):
    """The bin of a place where the first `count % bins` bins have one more."""
    size, more = divmod(count, bins)
    return place // (size + 1) if place < more * (size + 1) else more + (place - more * (size + 1)) // size


def test_auroc_is_the_share_of_pairs_in_order():
    generator = np.random.default_rng(1)
    scores = generator.integers(0, 8, 200).astype(float)  # with many ties
    right = generator.random(200) < scores / 8
    above = scores[right][:, None] - scores[~right][None]
    assert auroc(scores, right) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean(), abs=1e-12)
    assert auroc(right.astype(float), right) == 1.0
    assert auroc(-right.astype(float), right) == 0.0
    assert math.isnan(auroc(scores, np.ones(200, bool)))


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    return build(documents(20), tmp_path_factory.mktemp("support") / "docs.store", lm=lm).path


@pytest.fixture(scope="module")
def trace(lm, path, tmp_path_factory):
    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    return mixture.record(documents(10, start=100), tmp_path_factory.mktemp("trace") / "trace", k=64)


def test_candidates_of_a_trace_have_the_log_probabilities_of_the_mixture(lm, path, trace):
    from knnlm.evaluation.support import _read_candidates

    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False, k=64)
    settings = [getattr(memory, "settings", ()) for memory in mixture.memories]
    table = tabulate(trace, settings)
    weights = score_table(table, mixture.weights).weights
    candidates = _read_candidates(trace, settings, weights)
    for part in ("tokens", "first_log_probs", "mixture", "right"):
        sparse = getattr(_read_candidates(trace, settings, weights, step=7), part)
        assert torch.equal(sparse, getattr(candidates, part)[::7])
    tokens = to_long(trace.candidates)
    assert tokens.shape == (len(trace), 2 + 2 + 2 + 1)  # model and sample; knn and cache with their nearest; ngram
    for batch in mixture.read([lm.encode(document.text) for document in documents(10, start=100)]):
        prediction = mixture.predict(batch.context)
        assert torch.equal(tokens[batch.rows, 0], LMOutput(batch.logits).top())
        for column in range(tokens.shape[1]):
            own = candidates.tokens[batch.rows, column]
            kept = own >= 0
            assert torch.equal(own[kept], tokens[batch.rows, column][kept])
            log_p = prediction.log_prob(own.clamp(min=0)).float()
            stored = candidates.mixture[batch.rows, column]
            torch.testing.assert_close(stored[kept].exp(), log_p[kept].exp(), rtol=1e-2, atol=2e-3)
            assert torch.equal(candidates.right[batch.rows, column][kept], (own == batch.targets)[kept])
    kept = [set(row[row >= 0].tolist()) for row in candidates.tokens]
    assert kept == [set(row[row >= 0].tolist()) for row in tokens]
    assert [len(one) for one in kept] == (candidates.tokens >= 0).sum(1).tolist()  # each token once


def to_long(array):
    return torch.from_numpy(np.array(array)).long()


def test_sampled_candidates_follow_the_language_model():
    from knnlm.evaluation.trace import _sample

    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(20_000, 4)
    tokens = _sample(logits, torch.Generator().manual_seed(0))
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=0.02, rtol=0)
    assert shares[3] == 0


def test_tuning_reports_held_out_figures_and_evaluation_measures_them(lm, path):
    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    result = mixture.tune(documents(30, start=100), **GRID)
    figures = result.support_figures
    assert figures.tokens == result.tokens
    assert 0 < figures.right < 1
    assert figures.auroc > 0.5
    json.dumps(result.support.metadata["figures"])
    measured = measure_support(Mixture.open(path, lm), documents(12, start=300))
    tokens = sum(len(lm.encode(document.text)) for document in documents(12, start=300))
    assert measured.tokens == tokens
    assert measured.auroc > 0.5
    assert measured.ece < 0.15  # a few hundred tokens
    assert measured.auroc_entropy is not None
    assert 0 < measured.text_support < 1
    assert measure_support(Mixture.open(path, lm), documents(12, start=300), limit=50).tokens < tokens


def test_measured_figures_are_those_of_each_position_alone(lm, path):
    """The most probable token of the mixture and its entropy, from the text read token by token."""
    Mixture.open(path, lm, memories=MEMORIES, use_tuned=False).tune(documents(10, start=100), weights="fitted", **GRID)
    mixture = Mixture.open(path, lm)
    text = documents(3, start=200)
    right, support, entropy, log_p = [], [], [], []
    for document in text:
        (batch,) = mixture.read([lm.encode(document.text)])
        prediction = mixture.predict(batch.context)
        dense = prediction.log_probs()
        top = dense.argmax(1)
        right += (top == batch.targets).tolist()
        support += mixture.support.of(prediction, top).tolist()
        log_p += dense.amax(1).tolist()
        entropy += (-(dense.exp() * dense).nan_to_num(nan=0.0).sum(1)).tolist()
    figures = measure_support(mixture, text)
    right = np.array(right)
    assert figures.right == pytest.approx(right.mean())
    assert figures.support == pytest.approx(np.mean(support), abs=1e-4)
    assert figures.auroc == pytest.approx(auroc(np.array(support), right), abs=0.01)
    assert figures.auroc_entropy == pytest.approx(auroc(-np.array(entropy), right), abs=0.01)
    assert figures.auroc_probability == pytest.approx(auroc(np.array(log_p), right), abs=0.01)


def test_long_document_is_measured_in_batches_with_the_state_of_the_whole(lm, tmp_path, monkeypatch):
    path = build(documents(20), tmp_path / "docs.store", lm=lm, window=lm.window(32, 16)).path
    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    mixture.tune(documents(10, start=100), weights="fitted", **GRID)
    mixture.online = OnlineConfig(0.1, 0.01)
    text = [Document("long", "made", " ".join(document.text for document in documents(12, start=200)))]
    text += documents(2, start=300)
    sizes, predict = [], Mixture.predict

    def counted(self, context, *arguments, **options):
        sizes.append(len(context.states[LM_LOGITS]))
        return predict(self, context, *arguments, **options)

    monkeypatch.setattr(Mixture, "predict", counted)
    whole = measure_support(mixture, text, batch_tokens=100_000)
    assert max(sizes) > 300
    sizes.clear()
    in_batches = measure_support(mixture, text, batch_tokens=64)
    assert max(sizes) <= 64
    assert in_batches.tokens == whole.tokens
    for name, figure in whole.as_dict().items():
        assert in_batches.as_dict()[name] == pytest.approx(figure, abs=1e-5), name


def test_without_support_there_are_no_figures(lm, path):
    mixture = Mixture.open(path, lm, memories="knn", use_tuned=False)
    with pytest.raises(ParameterError, match="Tune"):
        measure_support(mixture, documents(1))
    short = mixture.tune(documents(2, start=100), weights="fixed", **GRID)
    assert short.tokens < FEWEST
    assert (short.support, short.support_figures, mixture.support) == (None, None, None)
    mixture.tune(documents(10, start=100), weights="fixed", **GRID)
    with pytest.raises(CorpusError, match="no text"):
        measure_support(mixture, [])


def test_trace_recorded_without_candidates_can_be_tuned_without_support(lm, path, trace, tmp_path):
    import shutil

    folder = tmp_path / "old"
    source = tmp_path / "made"
    Mixture.open(path, lm, memories=MEMORIES, use_tuned=False).record(documents(10, start=100), source, k=64)
    shutil.copytree(source, folder)
    for file in folder.rglob("candidate*.npy"):
        file.unlink()
    metadata = json.loads((folder / "trace.json").read_text())
    del metadata["candidates"]
    (folder / "trace.json").write_text(json.dumps(metadata))
    store = Mixture.open(path, lm, memories="knn", use_tuned=False).store
    assert tune_trace(Trace.open(folder), store, weights="fitted").support is None
    assert tune_trace(Trace.open(source), store, weights="fitted").support is not None
    table = tabulate(trace, [spec.settings for spec in tune_trace(trace, store, weights="fixed").specs])
    assert fit_support(Trace.open(folder), table, [], table.log_probs) is None


def test_removed_document_loses_its_support(lm, tmp_path):
    """Support of text that only a removed document contained falls to the level of unrelated text."""
    words = [f"{first}{second}" for first in "bdfgklmnprst" for second in "aeiou"]
    generator = np.random.default_rng(0)

    def text(number, count=40):
        return Document(f"t{number}", f"t{number}", " ".join(generator.choice(words, count)))

    kept, removed, unrelated = ([text(100 * group + number) for number in range(6)] for group in range(3))
    path = build([*kept, *removed], tmp_path / "docs.store", lm=lm).path
    # Half of the text to tune on is in the store: there the neighbours are right.
    valid = [*kept[:3], *(text(300 + number) for number in range(3))]
    Mixture.open(path, lm, memories="knn,ngram", use_tuned=False).tune(valid, **GRID)

    def mean_support(documents):
        return measure_support(Mixture.open(path, lm), documents).text_support

    before, level = mean_support(removed), mean_support(unrelated)
    assert before > level + 0.3
    store = Mixture.open(path, lm).store
    for document in removed:
        store.remove(document=document.id)
    after, level = mean_support(removed), mean_support(unrelated)
    assert after == pytest.approx(level, abs=0.05)
    assert mean_support(kept) == pytest.approx(before, abs=0.15)
