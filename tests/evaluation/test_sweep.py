"""Traces and sweeps: arithmetic that must equal an evaluation with the same settings, and tuning on them."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.stores import documents
from knnlm.datastore.locks import writer_lock
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.evaluation.sweep import temperature_grid
from knnlm.evaluation.trace import MemoryTrace, Trace
from knnlm.evaluation.tune import save_trace_tuning, tune_trace
from knnlm.ingest.build import build
from knnlm.memories.decoder import LM_FEATURES
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    return build(documents(20), tmp_path_factory.mktemp("tuned") / "docs.store", lm=lm).path


@pytest.fixture
def mixture(lm, folder):
    """A mixture of its own for each test, because tuning changes it."""
    return Mixture.open(folder, lm, k=64)


@pytest.fixture(scope="module")
def trace(lm, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace"
    return Mixture.open(folder, lm, k=64).record(documents(5, start=100), path, sources=["held-out"])


def test_sweep_equals_an_evaluation_with_each_setting(lm, mixture, trace):
    swept = trace.sweep(ks=[1, 7, 64], knn_temperatures=[0.5, 20.0], lambdas=[0.0, 0.3, 0.9])
    assert swept.tokens == len(trace)
    for i, k in enumerate(swept.ks):
        for j, knn_temperature in enumerate(swept.knn_temperatures):
            for m, lmbda in enumerate(swept.lambdas):
                opened = Mixture.open(mixture.knn.store.path, lm, k=k, knn_temperature=knn_temperature, lmbda=lmbda)
                measured = opened.evaluate(documents(5, start=100))
                # With the trace's own k the neighbours are the same; with fewer, ties may be broken otherwise.
                close = 1e-4 if k == 64 else 1e-2
                assert swept.perplexity[i, j, m] == pytest.approx(measured.perplexity, rel=close)
                assert swept.base_perplexity == pytest.approx(measured.base_perplexity, rel=1e-6)


@pytest.mark.parametrize(("k", "knn_temperature", "lmbda"), [(64, 3.0, 0.4), (64, 20.0, 0.0), (64, 3.0, 1.0)])
def test_replay_equals_an_evaluation(lm, mixture, trace, k, knn_temperature, lmbda):
    opened = Mixture.open(mixture.knn.store.path, lm, k=k, knn_temperature=knn_temperature, lmbda=lmbda)
    measured = opened.evaluate(documents(5, start=100)).as_dict()
    replayed = trace.replay(k=k, knn_temperature=knn_temperature, lmbda=lmbda).as_dict()
    names = ("metric", "weights", "online")
    assert [replayed.pop(name) for name in names] == [measured.pop(name) for name in names]
    assert (replayed.pop("searched"), measured.pop("searched")) == (None, 1)  # a trace does not tell
    (mine,), (theirs,) = replayed.pop("memories"), measured.pop("memories")
    assert mine.pop("weight") == pytest.approx(theirs.pop("weight"), abs=1e-6)
    assert mine == theirs
    for name in measured.keys() - {"seconds", "tokens_per_second"}:
        assert replayed[name] == pytest.approx(measured[name], rel=1e-4), name


def make_trace(log_p, distances, values, targets):
    metadata = {"tokens": len(targets), "sources": ["made"], "documents": 1, "leaked_documents": 0}
    own = {"label": "knn", "kind": "knn", "k": distances.shape[1], "metric": "l2"}
    memory = MemoryTrace(own, {"distances": distances, "values": values.astype(np.int32)}, 50)
    rows = np.zeros(len(targets), np.int32)
    features = np.zeros((len(targets), len(LM_FEATURES)), np.float32)
    return Trace(
        targets.astype(np.int32), log_p.astype(np.float32), features, rows, rows, rows, rows, [memory], metadata
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_sweep_agrees_with_numpy_on_any_trace(tokens, k, seed):
    generator = np.random.default_rng(seed)
    distances = np.sort(generator.choice([0, 1, 5, 5.5, 300, 2e5], (tokens, k)), 1).astype(np.float32)
    present = generator.integers(0, k + 1, tokens)
    distances[np.arange(k) >= present[:, None]] = np.inf
    values = np.where(np.isinf(distances), -1, generator.integers(0, 3, (tokens, k)))
    targets = generator.integers(0, 3, tokens)
    log_p = -generator.exponential(20, tokens)
    ks = sorted({1, k, (k + 1) // 2})
    swept = make_trace(log_p, distances, values, targets).sweep(
        ks=ks, knn_temperatures=[0.3, 40], lambdas=[0, 0.5, 0.99]
    )
    for i, count in enumerate(ks):
        for j, knn_temperature in enumerate((0.3, 40)):
            for m, lmbda in enumerate((0, 0.5, 0.99)):
                logs = []
                for row in range(tokens):
                    there = np.isfinite(distances[row, :count])
                    p_lm = np.exp(np.float64(np.float32(log_p[row])))
                    if there.any():
                        votes = oracle.softmax(-distances[row, :count][there] / knn_temperature)
                        p_knn = votes[values[row, :count][there] == targets[row]].sum()
                        logs.append(np.log((1 - lmbda) * p_lm + lmbda * p_knn))
                    else:
                        logs.append(np.log(p_lm))
                assert np.log(swept.perplexity[i, j, m]) == pytest.approx(-np.mean(logs), rel=1e-4, abs=1e-4)


def test_very_improbable_token_does_not_underflow():
    trace = make_trace(np.array([-200.0]), np.zeros((1, 1), np.float32), np.array([[1]]), np.array([0]))
    swept = trace.sweep(ks=[1], knn_temperatures=[1.0], lambdas=[0.5])
    assert np.log(swept.perplexity.item()) == pytest.approx(200 + np.log(2), rel=1e-6)


def test_best_setting_is_the_smallest_of_the_table(trace):
    swept = trace.sweep()
    k, knn_temperature, lmbda, perplexity = swept.best
    assert perplexity == swept.perplexity.min()
    place = swept.ks.index(k), swept.knn_temperatures.index(knn_temperature), swept.lambdas.index(lmbda)
    assert swept.perplexity[place] == perplexity
    assert swept.perplexity[:, :, 0] == pytest.approx(swept.base_perplexity, rel=1e-6)  # λ = 0
    assert swept.ks == (1, 4, 8, 16, 32, 64)


def test_tuning_is_saved_with_the_sources_of_its_text(lm, mixture):
    result = mixture.tune(documents(5, start=100), weights="fixed", online=False, sources=["held-out.txt"])
    k, knn_temperature, lmbda, perplexity = result.sweep.best
    assert result.perplexity == perplexity
    opened = Mixture.open(mixture.knn.store.path, lm)
    assert (opened.knn.k, opened.knn.knn_temperature, opened.lmbda) == (k, knn_temperature, lmbda)
    metadata = opened.store.catalog.get("tunings")["knn"]["metadata"]
    assert metadata["chosen_on"] == ["held-out.txt"]
    assert metadata["tokens"] == result.tokens
    assert opened.evaluate(documents(5, start=100)).perplexity == pytest.approx(perplexity, rel=1e-4)


def test_documents_that_are_in_the_store_are_counted(lm, mixture, tmp_path):
    text = [*documents(2), *documents(3, start=100)]
    assert mixture.evaluate(text).as_dict()["leaked_documents"] == 2
    trace = mixture.record(text, tmp_path / "trace")
    assert (trace.sweep().leaked_documents, trace.sweep().documents) == (2, 5)
    assert trace.replay(k=4, knn_temperature=1.0, lmbda=0.1).leaked_documents == 2
    assert trace.metadata["sources"] == [document.source for document in text[:3]]


def test_trace_contains_targets_values_and_distances_in_document_order(lm, mixture, trace):
    tokens = [token for document in documents(5, start=100) for token in lm.encode(document.text)]
    assert trace.targets.tolist() == tokens
    (memory,) = trace.memories
    assert (np.diff(memory.distances, axis=1) >= 0).all()
    assert trace.metadata["sources"] == ["held-out"]
    assert (memory.arrays["values"] < lm.vocab_size).all()


def test_trace_is_not_overwritten_and_a_corrupt_one_is_reported(mixture, tmp_path):
    path = tmp_path / "trace"
    mixture.record(documents(1, start=100), path)
    with pytest.raises(DatastoreError, match="already exists"):
        mixture.record(documents(1, start=100), path)
    with (path / "0" / "values.npy").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(DatastoreCorrupt, match=r"values\.npy: wrong size \(200 bytes instead of"):
        Trace.open(path)
    with pytest.raises(DatastoreError, match="not a trace"):
        Trace.open(tmp_path)
    metadata = json.loads((path / "trace.json").read_text())
    assert metadata["documents"] == 1


def test_trace_that_fails_leaves_nothing_behind(mixture, tmp_path):
    def broken():
        yield from documents(1)
        raise RuntimeError("the text ended badly")

    with pytest.raises(RuntimeError, match="ended badly"):
        mixture.record(broken(), tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "grid", [{"ks": [0]}, {"knn_temperatures": [0.0]}, {"knn_temperatures": [-1.0]}, {"lambdas": [1.5]}]
)
def test_values_outside_their_range_are_refused(trace, grid):
    with pytest.raises(ParameterError, match="must be"):
        trace.sweep(**grid)


def test_values_out_of_range_are_refused_before_anything_is_read(mixture):
    def never():
        raise AssertionError("the text was read")
        yield

    with pytest.raises(ParameterError, match="temperature must be above 0"):
        mixture.tune(never(), knn_temperatures=[1.0, 0.0])
    with writer_lock(mixture.knn.store.path), pytest.raises(DatastoreBusy):
        mixture.tune(never())


def test_k_above_the_number_of_neighbours_uses_all_of_them(trace):
    assert trace.sweep(ks=[8, 100_000]).ks == (8, 64)


def test_tuning_of_another_store_is_refused(lm, trace, tmp_path):
    other = build(documents(3), tmp_path / "other", lm=lm)
    with pytest.raises(DatastoreError, match="recorded with another store"):
        save_trace_tuning(other.path, tune_trace(trace, other), trace)
    assert other.catalog.get("tunings") is None


def test_tuning_for_one_metric_is_not_used_for_another(lm, mixture):
    mixture.tune(documents(2, start=100), weights="fixed", knn_temperatures=[1.25])
    assert Mixture.open(mixture.knn.store.path, lm).knn.knn_temperature == 1.25
    assert Mixture.open(mixture.knn.store.path, lm, options=MixtureOptions("ip")).knn.knn_temperature != 1.25


def test_temperatures_follow_the_scale_of_the_distances():
    generator = np.random.default_rng(0)
    distances = np.sort(generator.uniform(100, 200, (50, 8)).astype(np.float32), 1)
    none = np.zeros(50)
    small = temperature_grid(make_trace(none, distances, np.zeros((50, 8)), none).memories[0])
    large = temperature_grid(make_trace(none, distances * 1000, np.zeros((50, 8)), none).memories[0])
    assert len(small) == 20
    np.testing.assert_allclose(np.array(large) / np.array(small), 1000, rtol=0.02)
    far = make_trace(none, np.full((50, 1), np.inf, np.float32), np.zeros((50, 1)), none)
    nothing = temperature_grid(far.memories[0])
    assert all(np.isfinite(nothing))


def cpu_seconds(work):
    """The CPU time of one call in this thread, which other processes hardly change; the best of three."""
    times = []
    for _ in range(3):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def test_twenty_thousand_settings_cost_less_than_forty_times_one():
    generator = torch.Generator().manual_seed(0)
    distances = (torch.rand(2000, 1024, generator=generator) * 100).sort(1).values
    values = torch.randint(0, 50, (2000, 1024), generator=generator).numpy()
    trace = make_trace(np.full(2000, -3.0), distances.numpy(), values, np.zeros(2000))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert trace.sweep().perplexity.size == 10 * 20 * 100
        every = cpu_seconds(trace.sweep)
        one = cpu_seconds(lambda: trace.sweep(ks=[1024], knn_temperatures=[1.0], lambdas=[0.5]))
        pass_over_distances = cpu_seconds(lambda: [(block / 3).exp_() for block in distances.split(1024)])
    finally:
        torch.set_num_threads(threads)
    assert every < 40 * one
    # For each of the 20 temperatures, about seven passes over the distances: 50,000 tokens in less than ten seconds.
    assert every < 20 * 15 * pass_over_distances
