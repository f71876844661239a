"""Weights that are fitted on a trace are the weights that evaluation uses, for every kind of weights."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch

from helpers.stores import documents
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.evaluation.sweep import Sweep
from knnlm.evaluation.tune import evaluate_trace, fit_weights, tabulate, token_frequencies, vote_variants
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Source
from knnlm.memories.cache import CacheMemory
from knnlm.memories.voting import VoteParams
from knnlm.mixture.gate import feature_names, features, memory_features, place
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

MEMORIES = "knn,cache,ngram,ngram-cache"
TEST = documents(4, start=130)
BUCKETS = {"edges": [], "weights": [[0.5, 0.5], [0.5, 0.5]]}


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    """A store, tuned in every way."""
    store = build(documents(20), tmp_path_factory.mktemp("fitted") / "docs.store", lm=lm)
    return store.path


@pytest.fixture(scope="module", params=["fixed", "fitted", "buckets", "gated"])
def tuned(request, lm, path):
    fresh = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    return request.param, fresh.tune(documents(8, start=100), weights=request.param, sources=["valid"])


def settings(mixture):
    return [getattr(memory, "settings", ()) for memory in mixture.memories]


@pytest.fixture(scope="module")
def recorded(lm, path, tmp_path_factory):
    """A trace of the test text with all memories."""
    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    return mixture.record(TEST, tmp_path_factory.mktemp("trace") / "trace")


def test_tuned_mixture_is_opened_with_its_tuning(tuned, lm, path):
    kind, result = tuned
    opened = Mixture.open(path, lm)
    assert opened.weights.kind == kind
    assert opened.labels == MEMORIES.split(",")
    assert [spec.settings for spec in result.specs] == [tuple(own) for own in settings(opened)]
    if kind in ("fixed", "fitted"):
        assert opened.weights.values == pytest.approx(result.weights.values)
    assert math.isfinite(result.perplexity)
    assert result.perplexity < result.base_perplexity


def test_evaluating_a_trace_equals_evaluating_the_text(tuned, lm, path, recorded):
    opened = Mixture.open(path, lm)
    measured = opened.evaluate(TEST)
    replayed = evaluate_trace(recorded, settings(opened), opened.weights)
    for name in ("perplexity", "base_perplexity", "oracle_perplexity", "lmbda"):
        assert getattr(replayed, name) == pytest.approx(getattr(measured, name), rel=5e-3), name
    for name in ("gain_nats", "loss_nats"):
        assert getattr(replayed, name) == pytest.approx(getattr(measured, name), abs=5e-3), name
    assert replayed.improved == pytest.approx(measured.improved, abs=0.02)
    for one in (measured, replayed):
        log_ratio = math.log(one.base_perplexity / one.perplexity)
        assert one.gain_nats - one.loss_nats == pytest.approx(log_ratio, abs=1e-12)
    for mine, theirs in zip(replayed.memories, measured.memories, strict=True):
        assert mine["weight"] == pytest.approx(theirs["weight"], abs=5e-3)


def searched_fraction(mixture, lm):
    """Return the fraction of positions for which the weights request a search."""
    masks = []
    for batch in mixture.read([lm.encode(document.text) for document in TEST]):
        masks.append(mixture.predict(batch.context).search_mask)
    return float(torch.cat(masks).double().mean())


def test_skipped_searches_are_skipped_in_the_trace(lm, path, recorded):
    fresh = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    fresh.tune(documents(8, start=100), weights="gated")
    for fraction in (0.4, 1.0):
        opened = Mixture.open(path, lm, options=MixtureOptions(skip_fraction=fraction))
        searched = []
        search = opened.knn.search
        opened.knn.search = lambda keys, *others, search=search, searched=searched: (
            searched.append(len(keys)) or search(keys, *others)
        )
        measured = opened.evaluate(TEST)
        replayed = evaluate_trace(recorded, settings(opened), opened.weights)
        assert replayed.perplexity == pytest.approx(measured.perplexity, rel=5e-3)
        assert sum(searched) == round(measured.tokens * searched_fraction(opened, lm))
    assert sum(searched) == 0  # nothing is searched when everything is skipped


def test_features_from_a_trace_equal_features_from_the_text(lm, path, recorded):
    from knnlm.memories.decoder import LMOutput

    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    counts = token_frequencies(mixture.store)
    stored = tabulate(recorded, settings(mixture)).features(counts)
    names = feature_names((memory.name, memory.feature_names) for memory in mixture.memories)
    assert stored.shape == (len(recorded), len(names))
    tokens = [lm.encode(document.text) for document in TEST]
    for batch in mixture.read(tokens):
        lm_answer = LMOutput(batch.logits)
        found = [memory_features(memory.predict(batch.context), lm_answer) for memory in mixture.memories]
        here = features(place(batch.context), counts, (lm_answer.features(), lm_answer.top()), found)
        difference = (here - stored[batch.rows]).abs()
        # Equally near neighbours come in any order: what depends on which of them is the 64th may differ a little.
        loose = torch.tensor([0.2 if "distinct" in name or "top token" in name else 5e-3 for name in names])
        wrong = (difference > loose).float().mean(0)
        assert float(wrong.max()) < 0.03, [names[i] for i in wrong.argsort(descending=True)[:3]]


def test_columns_of_the_table_are_the_components_of_the_mixture(lm, path, recorded):
    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    table = tabulate(recorded, settings(mixture))
    assert len(table.component_names) == len(mixture.component_names) == table.log_probs.shape[1]
    for batch in mixture.read([lm.encode(document.text) for document in TEST]):
        each = mixture.predict(batch.context).component_log_probs(batch.targets)
        stored = table.log_probs[batch.rows].nan_to_num(nan=-math.inf)
        torch.testing.assert_close(stored.exp(), each.exp(), rtol=1e-2, atol=2e-3)
    first = np.cumsum([0, *(len(lm.encode(document.text)) for document in TEST)])[:-1]
    assert sorted(set(table.documents.tolist())) == first.tolist()


def test_counts_of_tokens_are_those_of_the_store(lm, path):
    mixture = Mixture.open(path, lm)
    tokens = [token for document in documents(20) for token in lm.encode(document.text)]
    assert token_frequencies(mixture.store).tolist() == np.bincount(tokens, minlength=lm.vocab_size).tolist()


def test_each_set_of_memories_has_its_own_tuning(lm, path):
    valid = documents(4, start=100)
    for memories in ("knn", "cache,knn", "knn,ngram"):
        Mixture.open(path, lm, memories=memories, use_tuned=False).tune(valid, weights="fixed")
    assert Mixture.open(path, lm).labels == ["knn", "ngram"]  # the last one
    assert Mixture.open(path, lm, memories="knn").labels == ["knn"]
    assert Mixture.open(path, lm, memories="knn").knn.knn_temperature != 2.0
    for order in ("cache,knn", "knn,cache"):  # a set has no order
        both = Mixture.open(path, lm, memories=order)
        assert both.labels == ["cache", "knn"]
        assert both.lmbda != 0.25


def test_memory_tuned_with_others_keeps_its_settings(lm, tmp_path):
    path = build(documents(10), tmp_path / "docs.store", lm=lm).path
    fresh = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    result = fresh.tune(documents(6, start=100), weights="gated")
    (knn,) = [spec for spec in result.specs if spec.kind == "knn"]
    (cache,) = [spec for spec in result.specs if spec.kind == "cache"]
    opened = Mixture.open(path, lm, k=3)
    assert opened.labels == ["knn"]
    assert opened.knn.settings == (VoteParams(3, knn.settings[0].knn_temperature),)
    assert opened.lmbda == 0.25
    alone = Mixture.open(path, lm, memories="cache", knn_temperature=0.5)
    assert alone.memories[0].settings == (VoteParams(cache.settings[0].k, 0.5),)


def test_k_and_temperature_are_refused_where_they_are_ambiguous(lm, path, tmp_path):
    other = build(documents(3, start=300), tmp_path / "other", lm=lm)
    opened = Mixture.open(path, lm, memories=f"knn={other.path}", k=5, knn_temperature=9.0)
    assert opened.knn.settings == (VoteParams(5, 9.0),)
    with pytest.raises(ParameterError, match="has 2"):
        Mixture.open(path, lm, memories=f"knn={other.path},cache", k=5, use_tuned=False)


def test_stores_with_different_windows_are_refused(lm, path, tmp_path):
    other = build(documents(3, start=300), tmp_path / "other", lm=lm, window=lm.window(16))
    with pytest.raises(ParameterError, match="windows of"):
        Mixture.open(path, lm, memories=f"knn,knn={other.path}", use_tuned=False)


def test_output_matrix_is_opened_by_the_model_it_was_trained_for_only(lm, path, tmp_path):
    from helpers.models import tiny, tiny_tokenizer
    from knnlm.training.output_matrix import OutputConfig, train_output

    elsewhere = CausalLM(lm.model, lm.tokenizer, name="tiny-llama", key_layer="output")
    other_place = build(documents(8), tmp_path / "place", lm=elsewhere)
    train_output(other_place, tmp_path / "place-output", OutputConfig(epochs=1))
    opened = Mixture.open(path, lm, memories=f"output={tmp_path}/place-output", use_tuned=False)
    assert opened.memories[0].source.place == "output"
    other_lm = CausalLM(tiny("llama", seed=8), tiny_tokenizer(), name="other-model")
    other_model = build(documents(8), tmp_path / "model", lm=other_lm)
    train_output(other_model, tmp_path / "model-output", OutputConfig(epochs=1))
    with pytest.raises(ModelMismatch, match=r"trained on states of other-model"):
        Mixture.open(path, lm, memories=f"output={tmp_path}/model-output", use_tuned=False)


def test_weights_tuned_for_another_matrix_are_refused(lm, path, tmp_path):
    from knnlm.training.output_matrix import OutputConfig, train_output

    place = tmp_path / "matrix"
    store = Datastore.open(path)
    train_output(store, place, OutputConfig(epochs=1))
    Mixture.open(path, lm, memories=f"knn,output={place}", use_tuned=False).tune(
        documents(3, start=100),
        weights="fitted",
    )
    assert Mixture.open(path, lm).weights.kind == "fitted"
    (place / "output.safetensors").unlink()
    train_output(store, place, OutputConfig(epochs=2))
    with pytest.raises(DatastoreError, match="another matrix"):
        Mixture.open(path, lm)
    Mixture.open(path, lm, memories="knn", use_tuned=False).tune(documents(3, start=100), weights="fixed")


def test_mixture_that_could_not_be_reopened_is_not_tuned(lm, path):
    opened = Mixture.open(path, lm, memories="knn", use_tuned=False)
    twice = Mixture(lm, [opened.knn, opened.knn], store=opened.store)
    with pytest.raises(ParameterError, match="Two memories are called knn"):
        twice.tune(TEST)
    cache = CacheMemory(vocab_size=lm.vocab_size, window=9, metric="ip", source=Source(0, "ffn_input", 2))
    tuned = Mixture(lm, [opened.knn, cache], store=opened.store)
    result = tuned.tune(documents(3, start=100), weights="fixed")
    again = Mixture.open(path, lm).memories[1]
    assert (again.history_length, again.metric) == (9, "ip")
    assert result.specs[1].label == "cache=9"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda saved: saved["weights"].update(kind="buckets", memory=7, buckets=BUCKETS),
            "no neighbours to go by",
        ),
        (lambda saved: saved["memories"][0].update(settings=[[float("inf"), 1.0]]), "does not list its memories"),
        (lambda saved: saved["memories"][0].update(kind="decoder", path=None), "does not list its memories"),
        (lambda saved: saved["memories"][0].update(kind="cache", path="abc"), "does not list its memories"),
        (lambda saved: saved["weights"].update(values=[float("nan"), 0.5]), "cannot be read"),
        (
            lambda saved: saved["weights"].update(kind="gated", networks=[], file="x", fraction=0),
            "cannot be read",
        ),
        (lambda saved: saved["weights"].update(values=[1.0]), "weights are of 1 components"),
    ],
)
def test_invalid_saved_tuning_is_refused(lm, path, tmp_path, change, message):
    copied = shutil.copytree(path, tmp_path / "copy")
    tuning = {
        "memories": [{"kind": "knn", "path": None, "metric": "l2", "settings": [[4, 1.0]], "identity": None}],
        "weights": {"kind": "fixed", "online": None, "values": [0.5, 0.5]},
        "metadata": {},
    }
    change(tuning)
    catalog = Catalog.open(copied / CATALOG_FILE, write=True)
    catalog.put(tunings={"knn": tuning}, active_tuning="knn")
    catalog.close()
    with pytest.raises(DatastoreCorrupt, match=message):
        Mixture.open(copied, lm)


def test_tunings_of_the_wrong_type_are_refused(lm, path, tmp_path):
    copied = shutil.copytree(path, tmp_path / "copy")
    for metadata in ({"tunings": [1]}, {"tunings": {}, "active_tuning": [1]}):
        catalog = Catalog.open(copied / CATALOG_FILE, write=True)
        catalog.put(**metadata)
        catalog.close()
        with pytest.raises(DatastoreCorrupt, match="the saved tuning cannot be read"):
            Mixture.open(copied, lm)


def test_trace_is_tuned_for_some_of_its_memories(lm, path, recorded):
    from knnlm.evaluation.tune import tune_trace

    some = recorded.select("ngram", "knn")
    result = tune_trace(some, Datastore.open(path), weights="fixed")
    assert [spec.label for spec in result.specs] == ["ngram", "knn"]
    with pytest.raises(DatastoreError, match="but not output"):
        recorded.select("output")


def test_cache_is_limited_to_its_number_of_positions(lm, path):
    opened = Mixture.open(path, lm, memories="knn,cache=7", use_tuned=False)
    assert opened.memories[1].history_length == 7
    (batch,) = opened.read([lm.encode(TEST[0].text)[:50]])
    found = opened.memories[1].retrieve(batch.context)
    ages = torch.arange(50)[:, None] - found.ids
    assert int(ages[found.ids >= 0].max()) == 7
    assert (found.ids >= 0).sum(1).tolist() == [min(row, 7) for row in range(50)]


def test_weights_in_the_list_of_memories_are_used_unchanged(lm, path):
    opened = Mixture.open(path, lm, memories="knn:0.3,cache:0.1,ngram:0.2", use_tuned=False)
    assert opened.weights.values == pytest.approx((0.4, 0.3, 0.1, 0.2, 0.0))
    measured = opened.evaluate(TEST)
    assert measured.memories[0]["weight"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("memories", "message"),
    [
        ("knn,nonsense", "no memory 'nonsense'"),
        ("", "There is no memory"),
        ("knn,knn", "twice"),
        ("decoder", "needs a model"),
        ("cache=folder", "no number of positions"),
        ("cache=0", "no number of positions"),
        ("knn:0.5,cache", "every memory a weight or none"),
        ("knn:0.8,cache:0.3", "sum to at most 1"),
        ("knn:nan", "sum to at most 1"),
    ],
)
def test_invalid_list_of_memories_is_refused(lm, path, memories, message):
    with pytest.raises(ParameterError, match=message):
        Mixture.open(path, lm, memories=memories)


def test_unknown_or_impossible_weights_are_refused(lm, path, recorded):
    with pytest.raises(ParameterError, match="Unknown weights 'magic'"):
        Mixture.open(path, lm, use_tuned=False).tune(TEST, weights="magic")
    trace_of_cache = Mixture.open(path, lm, memories="cache", use_tuned=False).record(TEST, path.parent / "cache-trace")
    with pytest.raises(ParameterError, match="mix in knn"):
        fit_weights(
            tabulate(trace_of_cache, [(VoteParams(8, 1.0),)]), "buckets", frequencies=torch.zeros(lm.vocab_size)
        )


def test_skipping_needs_a_gate(lm, path):
    with pytest.raises(ParameterError, match="Only a gate can skip"):
        Mixture.open(path, lm, memories="knn", use_tuned=False, options=MixtureOptions(skip_fraction=0.5))


def test_corrupt_gate_is_reported(lm, path):
    fresh = Mixture.open(path, lm, memories="knn,cache", use_tuned=False)
    fresh.tune(documents(5, start=100), weights="gated")
    name = Mixture.open(path, lm).store.catalog.get("tunings")["cache,knn"]["weights"]["file"]
    file = path / "mixtures" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    with pytest.raises(DatastoreCorrupt, match="Tune the store again: knnlm tune"):
        Mixture.open(path, lm)
    file.unlink()
    with pytest.raises(DatastoreCorrupt, match="Tune the store again: knnlm tune"):
        Mixture.open(path, lm)
    file.write_bytes(whole)
    assert Mixture.open(path, lm).weights.kind == "gated"


def test_vote_variants_surround_the_best_setting():
    perplexity = np.full((4, 20, 2), 50.0)
    perplexity[2, 7, 1] = 10.0  # k = 64, the eighth temperature
    perplexity[0, 3, 1] = 20.0
    temperatures = tuple(float(2**n) for n in range(20))
    found = Sweep((1, 8, 64, 256), temperatures, (0.0, 0.5), perplexity, 60.0, 10, 1, 0, 0.0)
    chosen = vote_variants(found)
    assert chosen[0] == VoteParams(64, 2.0**7)
    assert {VoteParams(64, 2.0**n) for n in (1, 4, 10, 13)} < set(chosen)
    assert VoteParams(1, 2.0**3) in chosen
    assert len(set(chosen)) == len(chosen)


@pytest.mark.parametrize("weights", ["fixed", "gated"])
def test_tuning_is_applied_to_the_mixture_itself(lm, tmp_path, weights):
    path = build(documents(12), tmp_path / "docs.store", lm=lm).path
    mixture = Mixture.open(path, lm, memories="knn,cache", use_tuned=False)
    mixture.tune(documents(6, start=100), weights=weights)
    opened = Mixture.open(path, lm)
    assert [memory.settings for memory in mixture.memories] == [memory.settings for memory in opened.memories]
    assert mixture.weights.kind == opened.weights.kind == weights
    test = documents(3, start=130)
    assert mixture.evaluate(test).perplexity == pytest.approx(opened.evaluate(test).perplexity, rel=1e-5)
    # A second tuning sees as many neighbours as the first one.
    assert mixture.tune(documents(6, start=100), weights=weights).sweeps[1].ks[-1] == 1024


def test_trace_is_tuned_and_the_result_is_saved_in_its_store(lm, tmp_path):
    store = build(documents(12), tmp_path / "docs.store", lm=lm)
    mixture = Mixture.open(store, lm, memories="knn")
    result = mixture.record(documents(5, start=100), tmp_path / "trace").tune(store, weights="fixed")
    opened = Mixture.open(store.path, lm)
    assert opened.lmbda == pytest.approx(result.lmbda)
    assert opened.knn.settings == result.specs[0].settings
