"""Weights that are fitted on a trace are the weights that evaluation uses, for every kind of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conftest import documents
from knnlm import Mixture, build, evaluate, record, tune
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.fitting import evaluate_trace, fit_weights, look, variants
from knnlm.memory import Setting
from knnlm.mixture.evidence import evidence, feature_names, features, place
from knnlm.sweeping import Sweep
from knnlm.tuning import token_frequencies

MEMORIES = "knn,cache,ngram"
TEST = documents(4, start=130)


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    """A memory, tuned in every way."""
    store = build(documents(20), tmp_path_factory.mktemp("fitted") / "memory", lm=lm)
    return store.path


@pytest.fixture(scope="module", params=["fixed", "fitted", "buckets", "gated"])
def tuned(request, lm, path):
    fresh = Mixture.open(path, lm, memories=MEMORIES, fresh=True)
    return request.param, tune(fresh, documents(8, start=100), weights=request.param, sources=["valid"])


def settings(mixture):
    return [getattr(memory, "settings", ()) for memory in mixture.memories]


@pytest.fixture(scope="module")
def test_trace(lm, path, tmp_path_factory):
    """What is seen of the test text, at the widest settings."""
    mixture = Mixture.open(path, lm, memories=MEMORIES, fresh=True)
    return record(mixture, TEST, tmp_path_factory.mktemp("trace") / "trace")


def test_what_was_tuned_is_what_is_opened(tuned, lm, path):
    kind, result = tuned
    opened = Mixture.open(path, lm)
    assert opened.weights.kind == kind
    assert opened.labels == ["knn", "cache", "ngram"]
    assert [spec.settings for spec in result.specs] == [tuple(own) for own in settings(opened)]
    if kind in ("fixed", "fitted"):
        assert opened.weights.values == pytest.approx(result.weights.values)
    assert math.isfinite(result.perplexity)
    assert result.perplexity < result.base_perplexity


def test_a_trace_is_evaluated_as_the_text_is(tuned, lm, path, test_trace):
    opened = Mixture.open(path, lm)
    measured = evaluate(opened, TEST)
    replayed = evaluate_trace(test_trace, settings(opened), opened.weights)
    for name in ("perplexity", "base_perplexity", "oracle_perplexity", "lambda_"):
        assert getattr(replayed, name) == pytest.approx(getattr(measured, name), rel=5e-3), name
    for mine, theirs in zip(replayed.memories, measured.memories, strict=True):
        assert mine["weight"] == pytest.approx(theirs["weight"], abs=5e-3)


def asked_fraction(mixture, lm):
    """The part of the positions that the weights want a search for, by themselves."""
    asked = []
    for batch in mixture.read([lm.encode(document.text) for document in TEST]):
        context, _, _ = mixture.ask(batch.logits, batch.context)
        asked.append(context.asked)
    return float(torch.cat(asked).double().mean())


def test_searches_that_are_left_out_are_left_out_in_the_trace_too(lm, path, test_trace):
    fresh = Mixture.open(path, lm, memories=MEMORIES, fresh=True)
    tune(fresh, documents(8, start=100), weights="gated")
    for fraction in (0.4, 1.0):
        opened = Mixture.open(path, lm, skip=fraction)
        searched = []
        search = opened.knn.search
        opened.knn.search = lambda keys, k=None, search=search, searched=searched: (
            searched.append(len(keys)) or search(keys, k)
        )
        measured = evaluate(opened, TEST)
        replayed = evaluate_trace(test_trace, settings(opened), opened.weights)
        assert replayed.perplexity == pytest.approx(measured.perplexity, rel=5e-3)
        assert sum(searched) == round(measured.tokens * asked_fraction(opened, lm))
    assert sum(searched) == 0  # nothing is searched when everything is skipped


def test_what_a_gate_sees_in_a_trace_is_what_it_sees_in_the_text(lm, path, test_trace):
    from knnlm.memory import Spoken

    mixture = Mixture.open(path, lm, memories=MEMORIES, fresh=True)
    counts = token_frequencies(mixture.home)
    stored = look(test_trace, settings(mixture)).features(counts)
    names = feature_names(mixture.memories)
    assert stored.shape == (len(test_trace), len(names))
    tokens = [lm.encode(document.text) for document in TEST]
    for batch in mixture.read(tokens):
        lm_answer = Spoken(batch.logits)
        found = [evidence(memory.predict(batch.context), lm_answer) for memory in mixture.memories]
        here = features(place(batch.context), counts, (lm_answer.signals(), lm_answer.top()), found)
        difference = (here - stored[batch.rows]).abs()
        # Equally near neighbours come in any order: what depends on which of them is the 64th may differ a little.
        loose = torch.tensor([0.2 if "distinct" in name or "choice" in name else 5e-3 for name in names])
        wrong = (difference > loose).float().mean(0)
        assert float(wrong.max()) < 0.03, [names[i] for i in wrong.argsort(descending=True)[:3]]


def test_the_columns_of_a_trace_are_the_parts_of_the_mixture(lm, path, test_trace):
    mixture = Mixture.open(path, lm, memories=MEMORIES, fresh=True)
    seen = look(test_trace, settings(mixture))
    assert len(seen.names) == len(mixture.part_names) == seen.logs.shape[1]
    for batch in mixture.read([lm.encode(document.text) for document in TEST]):
        each = mixture.predict(batch.logits, batch.context).each_of(batch.targets)
        stored = seen.logs[batch.rows].nan_to_num(nan=-math.inf)
        torch.testing.assert_close(stored.exp(), each.exp(), rtol=1e-2, atol=2e-3)
    first = np.cumsum([0, *(len(lm.encode(document.text)) for document in TEST)])[:-1]
    assert sorted(set(seen.groups.tolist())) == first.tolist()


def test_counts_of_tokens_are_those_of_the_store(lm, path):
    mixture = Mixture.open(path, lm)
    tokens = [token for document in documents(20) for token in lm.encode(document.text)]
    assert token_frequencies(mixture.home).tolist() == np.bincount(tokens, minlength=lm.vocab_size).tolist()


def test_each_set_of_memories_keeps_its_own_choice(lm, path):
    valid = documents(4, start=100)
    for memories in ("knn", "cache,knn", "knn,ngram"):
        tune(Mixture.open(path, lm, memories=memories, fresh=True), valid, weights="fixed")
    assert Mixture.open(path, lm).labels == ["knn", "ngram"]  # the last one
    assert Mixture.open(path, lm, memories="knn").labels == ["knn"]
    assert Mixture.open(path, lm, memories="knn").knn.temperature != 2.0
    both = Mixture.open(path, lm, memories="cache,knn")
    assert both.labels == ["cache", "knn"]
    assert isinstance(both.weight, float)


def test_weights_on_the_command_line_are_taken_as_they_are(lm, path):
    opened = Mixture.open(path, lm, memories="knn:0.3,cache:0.1,ngram:0.2", fresh=True)
    assert opened.weights.values == pytest.approx((0.4, 0.3, 0.1, 0.2, 0.0))
    measured = evaluate(opened, TEST)
    assert measured.memories[0]["weight"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("memories", "says"),
    [
        ("knn,nonsense", "no memory 'nonsense'"),
        ("", "There is no memory"),
        ("knn,knn", "twice"),
        ("lm", "needs a model"),
        ("cache=folder", "takes no path"),
        ("knn:0.5,cache", "every memory a weight or none"),
        ("knn:0.8,cache:0.3", "sum to at most 1"),
    ],
)
def test_a_list_of_memories_that_means_nothing_is_refused(lm, path, memories, says):
    with pytest.raises(ParameterError, match=says):
        Mixture.open(path, lm, memories=memories)


def test_weights_that_there_are_not_are_refused(lm, path, test_trace):
    with pytest.raises(ParameterError, match="no weights 'magic'"):
        tune(Mixture.open(path, lm, fresh=True), TEST, weights="magic")
    trace_of_cache = record(Mixture.open(path, lm, memories="cache", fresh=True), TEST, path.parent / "cache-trace")
    with pytest.raises(ParameterError, match="mix in knn"):
        fit_weights(look(trace_of_cache, [(Setting(8, 1.0),)]), "buckets", frequencies=torch.zeros(lm.vocab_size))


def test_skipping_needs_a_gate(lm, path):
    with pytest.raises(ParameterError, match="Only a gate can skip"):
        Mixture.open(path, lm, memories="knn", fresh=True, skip=0.5)


def test_a_gate_that_was_damaged_is_named(lm, path):
    fresh = Mixture.open(path, lm, memories="knn,cache", fresh=True)
    tune(fresh, documents(5, start=100), weights="gated")
    name = Mixture.open(path, lm).home.catalog.get("choices")["knn,cache"]["weights"]["file"]
    file = path / "mixtures" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    with pytest.raises(DatastoreCorrupt, match="Tune it again"):
        Mixture.open(path, lm)
    file.unlink()
    with pytest.raises(DatastoreCorrupt, match="Tune it again"):
        Mixture.open(path, lm)
    file.write_bytes(whole)
    assert Mixture.open(path, lm).weights.kind == "gated"


def test_other_ways_of_counting_surround_the_best():
    perplexity = np.full((4, 20, 2), 50.0)
    perplexity[2, 7, 1] = 10.0  # k = 64, the eighth temperature
    perplexity[0, 3, 1] = 20.0
    temperatures = tuple(float(2**n) for n in range(20))
    found = Sweep((1, 8, 64, 256), temperatures, (0.0, 0.5), perplexity, 60.0, 10, 1, 0, 0.0)
    chosen = variants(found)
    assert chosen[0] == Setting(64, 2.0**7)
    assert {Setting(64, 2.0**n) for n in (1, 4, 10, 13)} < set(chosen)
    assert Setting(1, 2.0**3) in chosen
    assert len(set(chosen)) == len(chosen)
