"""Perplexities against a brute-force evaluation, token by token, in NumPy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.datastore.indexes import build_index
from knnlm.errors import CorpusError, ParameterError
from knnlm.evaluation.evaluate import score_sums
from knnlm.ingest.build import build
from knnlm.lm.windows import WindowShape
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

WINDOW = WindowShape(24, 12)


@pytest.fixture(scope="module")
def small(lm, tmp_path_factory):
    """A store with short windows, so that documents take several."""
    path = tmp_path_factory.mktemp("small") / "docs.store"
    return build(documents(12), path, lm=lm, window=WINDOW, segment_entries=200)


@pytest.fixture(scope="module")
def reference(lm, small):
    """Keys and values of the store, and (p_LM, key, target) of every test token, all read token by token."""

    def read(tokens):
        return oracle.read_token_by_token(
            lm.model, lm.model.model.layers[-1].mlp, tokens, start_token=lm.start_token, context=24, stride=12
        )

    stored = [lm.encode(document.text) for document in documents(12)]
    keys = np.concatenate([read(tokens)[0] for tokens in stored])
    values = np.concatenate(stored)
    texts = [lm.encode(document.text) for document in documents(4, start=100)]
    readings = [read(tokens) for tokens in texts]
    return {
        "keys": keys.astype(np.float16).astype(np.float32),  # as they are stored
        "values": values,
        "queries": np.concatenate([reading[0] for reading in readings]),
        "p_lm": np.concatenate([reading[1] for reading in readings]),
        "targets": np.concatenate(texts),
    }


def expected(reference, *, k, knn_temperature, lmbda, metric):
    """The base perplexity, and the highest and lowest that the mixture and the oracle can have."""
    base, mixed, best = [], [], []
    for query, p_lm, target in zip(reference["queries"], reference["p_lm"], reference["targets"], strict=True):
        p_knn = np.array(
            oracle.knn_bounds(
                query,
                reference["keys"],
                reference["values"],
                target,
                k=k,
                knn_temperature=knn_temperature,
                metric=metric,
            )
        )
        base.append(p_lm[target])
        mixed.append((1 - lmbda) * p_lm[target] + lmbda * p_knn)
        best.append(np.maximum(p_lm[target], p_knn))
    return oracle.perplexity(base), *(
        [oracle.perplexity(column) for column in np.array(rows).T] for rows in (mixed, best)
    )


@pytest.mark.parametrize(
    ("k", "knn_temperature", "lmbda", "metric"),
    [(8, 1.0, 0.3, "l2"), (64, 5.0, 0.7, "l2"), (16, 2.0, 0.5, "ip"), (10_000, 10.0, 0.25, "l2"), (1, 1.0, 0.1, "l2")],
)
def test_evaluation_agrees_with_numpy_token_by_token(lm, small, reference, k, knn_temperature, lmbda, metric):
    options = MixtureOptions(metric=metric)
    mixture = Mixture.open(small.path, lm, k=k, knn_temperature=knn_temperature, lmbda=lmbda, options=options)
    measured = mixture.evaluate(documents(4, start=100))
    base, mixed, best = expected(reference, k=k, knn_temperature=knn_temperature, lmbda=lmbda, metric=metric)
    assert measured.tokens == len(reference["targets"])
    assert measured.base_perplexity == pytest.approx(base, rel=1e-5)
    for found, (highest, lowest) in ((measured.perplexity, mixed), (measured.oracle_perplexity, best)):
        assert lowest * (1 - 5e-4) <= found <= highest * (1 + 5e-4)
        assert highest / lowest < 1.05  # so that the check is a sharp one


def test_gains_and_losses_agree_with_numpy_token_by_token(lm, small, reference):
    settings = {"k": 10_000, "knn_temperature": 1.0}  # all keys, so that no tie is broken
    measured = Mixture.open(small.path, lm, lmbda=0.25, **settings).evaluate(documents(4, start=100))
    keys, values = reference["keys"], reference["values"]
    change = []
    for query, p_lm, target in zip(reference["queries"], reference["p_lm"], reference["targets"], strict=True):
        p_knn, _ = oracle.knn_bounds(query, keys, values, target, **settings)
        change.append(math.log(0.75 * p_lm[target] + 0.25 * p_knn) - math.log(p_lm[target]))
    change = np.array(change)
    assert 0.1 < (change > 0).mean() < 0.9  # both happen
    assert measured.improved == pytest.approx((change > 0).mean(), abs=1.5 / len(change))
    assert measured.gain_nats == pytest.approx(change[change > 0].sum() / len(change), rel=2e-3)
    assert measured.loss_nats == pytest.approx(-change[change < 0].sum() / len(change), rel=2e-3)


@pytest.mark.parametrize("lmbda", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("memories", ["knn", "knn,cache,ngram"])
def test_gains_less_losses_are_the_change_of_the_log_loss(lm, small, lmbda, memories):
    count = memories.count(",") + 1
    named = ",".join(f"{name}:{lmbda / count}" for name in memories.split(","))
    measured = Mixture.open(small.path, lm, memories=named).evaluate(documents(4, start=100))
    log_ratio = math.log(measured.base_perplexity / measured.perplexity)
    assert measured.gain_nats - measured.loss_nats == pytest.approx(log_ratio, abs=1e-12)
    assert min(measured.gain_nats, measured.loss_nats) >= 0
    assert (measured.improved > 0) == (measured.gain_nats > 0) == (lmbda > 0)


def test_gain_of_tokens_that_are_impossible_to_model_and_mixture_is_zero():
    inf = float("inf")
    lm, mixture = torch.tensor([-inf, -inf, -1.0, -2.0]), torch.tensor([-inf, -3.0, -inf, -1.5])
    sums = score_sums(lm, mixture, mixture).tolist()
    assert sums == [-inf, -inf, -inf, 2.0, inf, inf]
    assert score_sums(lm[::3], mixture[::3], mixture[::3]).tolist() == [-inf, -inf, -inf, 1.0, 0.5, 0.0]


def test_approximate_index_votes_with_the_distances_of_stored_keys(lm, reference, tmp_path):
    store = build(documents(12), tmp_path / "docs.store", lm=lm, window=WINDOW)
    assert build_index(store, "IVF8,PQ8x4") == "IVF8,PQ8x4"
    settings = {"k": 8, "knn_temperature": 1.0, "lmbda": 0.3}
    rough = MixtureOptions(metric="l2", rerank=False)
    plain = Mixture.open(store.path, lm, options=rough, **settings).evaluate(documents(4, start=100))
    fine = Mixture.open(store.path, lm, options=MixtureOptions("l2"), **settings).evaluate(documents(4, start=100))
    _, (right, _), _ = expected(reference, metric="l2", **settings)
    assert abs(math.log(fine.perplexity / right)) < abs(math.log(plain.perplexity / right))
    assert fine.perplexity == pytest.approx(right, rel=0.1)
    # For the other metric there is no index, and the search is exact.
    assert type(Mixture.open(store.path, lm, options=MixtureOptions(metric="ip")).knn.index).__name__ == "ExactIndex"


def test_lambda_zero_gives_the_models_own_perplexity(lm, small):
    measured = Mixture.open(small.path, lm, lmbda=0.0).evaluate(documents(4, start=100))
    assert measured.perplexity == pytest.approx(measured.base_perplexity, rel=1e-6)


def test_empty_store_does_not_change_the_perplexity(lm, tmp_path):
    store = build([], tmp_path / "docs.store", lm=lm)
    assert store.entry_count == 0
    measured = Mixture.open(store.path, lm, lmbda=0.5).evaluate(documents(2, start=100))
    assert measured.perplexity == pytest.approx(measured.base_perplexity, rel=1e-6)


def test_batch_size_does_not_change_the_figures(lm, small):
    figures = [
        Mixture.open(small.path, lm).evaluate(documents(4, start=100), batch_tokens=size) for size in (1, 60, 4096)
    ]
    for other in figures[1:]:
        assert other.perplexity == pytest.approx(figures[0].perplexity, rel=1e-4)


def test_words_bytes_and_their_figures_follow_from_the_text(lm, small):
    text = "naïve foxes said 日本.\nTwo lines"
    measured = Mixture.open(small.path, lm).evaluate([Document("x", "x", text)])
    figures = measured.as_dict()
    assert (measured.words, measured.bytes) == (6, len(text.encode()))
    loss = math.log(measured.perplexity) * measured.tokens
    assert figures["word_perplexity"] == pytest.approx(math.exp(loss / 6))
    assert figures["bits_per_byte"] == pytest.approx(loss / math.log(2) / len(text.encode()))


def test_limit_stops_after_the_document_that_reaches_it(lm, small):
    made = documents(10, start=100)
    lengths = np.cumsum([len(lm.encode(document.text)) for document in made])
    measured = Mixture.open(small.path, lm).evaluate(made, limit=int(lengths[2]) - 1)
    assert (measured.documents, measured.tokens) == (3, lengths[2])
    with pytest.raises(ParameterError, match="limit must be at least 1"):
        Mixture.open(small.path, lm).evaluate(made, limit=0)


def test_no_text_is_an_error(lm, small):
    with pytest.raises(CorpusError, match="no text to evaluate"):
        Mixture.open(small.path, lm).evaluate([])


def test_explanations_agree_with_numpy_and_name_their_source(lm, small, reference):
    document = documents(1, start=100)[0]
    mixture = Mixture.open(small.path, lm, k=20, knn_temperature=3.0, lmbda=0.4)
    explained = mixture.explain(document.text, top=4)
    assert "".join(token.token for token in explained) == document.text
    stored = documents(12)
    owners = np.repeat(np.arange(12), [len(lm.encode(one.text)) for one in stored])
    for number, token in enumerate(explained):
        query, p_lm, target = (reference[name][number] for name in ("queries", "p_lm", "targets"))
        p_knn = oracle.knn_distribution(
            query, reference["keys"], reference["values"], lm.vocab_size, k=20, knn_temperature=3.0
        )
        assert token.p_lm == pytest.approx(p_lm[target], rel=1e-3)
        assert token.p_knn == pytest.approx(p_knn[target], rel=2e-3, abs=1e-6)
        assert token.p == pytest.approx(0.6 * p_lm[target] + 0.4 * p_knn[target], rel=2e-3)
        distances = oracle.distances(query, reference["keys"])
        order = np.argsort(distances, kind="stable")
        weights = oracle.softmax(-distances[order[:20]] / 3.0)
        for rank, neighbour in enumerate(token.neighbours):
            assert neighbour.distance == pytest.approx(distances[order[rank]], rel=1e-2, abs=1e-3)
            assert neighbour.weight == pytest.approx(weights[rank], rel=1e-2)
            same = [stored[owners[row]] for row in order[:24] if distances[row] <= distances[order[rank]] * 1.01 + 1e-3]
            assert any(neighbour.source == one.source and neighbour.document == one.id for one in same)
            assert neighbour.before + neighbour.token + neighbour.after in next(
                one.text for one in stored if one.id == neighbour.document
            )
            assert neighbour.agrees == (neighbour.token == token.token)


def test_summary_says_lower_or_higher(lm, small):
    measured = Mixture.open(small.path, lm, lmbda=0.3).evaluate(documents(2, start=100))
    better = replace(measured, base_perplexity=20.0, perplexity=15.0)
    worse = replace(measured, base_perplexity=20.0, perplexity=40.72)
    assert (better.change, worse.change) == ("25.0% lower", "103.6% higher")
    assert str(better).startswith("perplexity 20.000 → 15.000 (25.0% lower) on ")
    assert f"{measured.tokens:,} tokens of 2 documents; fixed weights, λ 0.3" in str(worse)
