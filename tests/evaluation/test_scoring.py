"""Coalesced searches, compared with a prediction for each batch."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from helpers.stores import documents
from knnlm.evaluation.evaluate import can_defer_search, score_batches
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import VoteParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import Buckets, BucketWeights

ALL = 10_000  # neighbours: which one is the last of k would depend on rounding


@pytest.fixture
def mixture(lm, store):
    """A store with two settings."""
    mixture = Mixture.open(store, lm, k=ALL, knn_temperature=3.0, lmbda=0.4)
    knn = mixture.knn
    both = KnnMemory(store, knn.index, k=ALL, knn_temperature=3.0, others=(VoteParams(ALL, 1.0),), source=knn.source)
    return Mixture(lm, both, lmbda=0.4)


@pytest.fixture
def texts(lm):
    return [lm.encode(document.text) for document in documents(6, words=12, start=100)]


class RecordingIndex:
    """An index that records the size of each search, and calls a function before it."""

    def __init__(self, index, before=lambda: None):
        self._index, self.metric, self._before, self.query_counts = index, index.metric, before, []

    def search(self, queries, k):
        self.query_counts.append(len(queries))
        self._before()
        return self._index.search(queries, k)


def watch(mixture, before=lambda: None):
    knn = mixture.knn
    knn.index = RecordingIndex(knn.index, before)
    return knn.index


def score_each_batch(mixture, texts):
    """Return the scores of each batch predicted alone."""
    found = []
    for batch in mixture.read(texts, batch_tokens=32):
        prediction = mixture.predict(batch.context)
        found.append(
            (prediction.component_log_probs(batch.targets), prediction.log_prob(batch.targets), prediction.weights)
        )
    return [torch.cat(column) for column in zip(*found, strict=True)]


def score_coalesced(mixture, texts, **options):
    scored = score_batches(mixture, mixture.read(texts, batch_tokens=32), **options)
    found = [scores.weigh_alone(mixture.layer) for scores in scored]
    return [torch.cat([getattr(one, name) for one in found]) for name in ("components", "mixture", "weights")]


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("least", [1, 100, 100_000])
@pytest.mark.parametrize("kind", ["fixed", "buckets"])
def test_coalesced_searches_equal_searches_of_each_batch(mixture, texts, monkeypatch, read_ahead, least, kind):
    if kind == "buckets":
        edges, weights = torch.tensor([1.0, 5.0]), torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
        mixture.weights = BucketWeights(Buckets(edges, weights), 0)
    monkeypatch.setattr("knnlm.evaluation.evaluate._MIN_QUERIES", least)
    expected = score_each_batch(mixture, texts)
    index = watch(mixture)
    found = score_coalesced(mixture, texts, read_ahead=read_ahead)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(other), other, rtol=1e-5, atol=1e-6)
    tokens = sum(map(len, texts))
    assert sum(index.query_counts) == tokens
    assert all(count >= least for count in index.query_counts[:-1])
    assert len(index.query_counts) <= tokens // least + 1


def test_logits_are_not_kept_while_searches_wait(mixture, texts, monkeypatch):
    monkeypatch.setattr("knnlm.evaluation.evaluate._MIN_QUERIES", 200)
    logits = []

    def batches():
        for batch in mixture.read(texts, batch_tokens=32):
            logits.append(weakref.ref(batch.logits))
            yield batch

    alive = []
    watch(mixture, lambda: alive.append(sum(one() is not None for one in logits)))
    list(score_batches(mixture, batches()))
    assert len(logits) > 4
    assert max(alive) <= 1  # of the batch that was read last, at most


def test_model_runs_while_a_search_runs(mixture, texts, monkeypatch):
    monkeypatch.setattr("knnlm.evaluation.evaluate._MIN_QUERIES", 64)
    read_on, waited = threading.Event(), []
    batches = list(mixture.read(texts, batch_tokens=32))

    def reading():
        for number, batch in enumerate(batches):
            if number:
                read_on.set()
            yield batch

    def before():
        if not waited:
            waited.append(read_on.wait(timeout=30))

    watch(mixture, before)
    list(score_batches(mixture, reading(), read_ahead=True))
    assert waited == [True]


@pytest.mark.parametrize("read_ahead", [False, True])
def test_error_of_a_search_is_raised_to_the_caller(mixture, texts, read_ahead):
    def fail():
        raise OSError("the disk is gone")

    watch(mixture, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        list(score_batches(mixture, mixture.read(texts), read_ahead=read_ahead))


def test_no_text_has_no_scores(mixture):
    assert not list(score_batches(mixture, []))
    assert not list(score_batches(mixture, [], read_ahead=True))


def test_searches_are_deferred_only_where_logits_are_not_needed(lm, store, mixture):
    assert can_defer_search(mixture)
    assert not can_defer_search(Mixture.open(store, lm, memories="knn,cache"))
