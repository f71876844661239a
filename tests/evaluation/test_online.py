"""Online weights in evaluation, tuning, traces and explanations, against updates token by token in NumPy."""

from __future__ import annotations

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch

from helpers.online import log_probs_by_hand
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.evaluation.tune import (
    TraceTable,
    _units,
    choose_online,
    evaluate_trace,
    fit_weights,
    tabulate,
    token_frequencies,
)
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.mixture.em import fit
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import ExpertScores, OnlineConfig, choose_config
from knnlm.mixture.spec import MixtureOptions

VALID, TEST = documents(8, start=100), documents(6, start=130, words=90)
GRID = {"ks": [2, 16], "knn_temperatures": [4.0, 20.0]}  # all values would take most of the time
KINDS = ["fixed", "fitted", "buckets", "gated"]
CONFIGS = [OnlineConfig(0.3, 0.0), OnlineConfig(0.2, 0.02)]


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    # Windows that are shorter than the documents, so that states are carried from window to window.
    return build(documents(20), folder / "docs.store", lm=lm, window=lm.window(32, 16)).path


@pytest.fixture(scope="module")
def other(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    return build(documents(20, start=400), folder / "docs.store", lm=lm, window=lm.window(32, 16)).path


@pytest.fixture(scope="module")
def tuned(lm, path):
    """Return a copy of a mixture of these memories and weights, which is tuned once."""

    @cache
    def tune_once(memories, kind):
        mixture = Mixture.open(path, lm, memories=memories, use_tuned=False)
        mixture.tune(VALID, weights=kind, **GRID)
        return mixture

    return lambda memories, kind: copy.copy(tune_once(memories, kind))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_equals_one_token_at_a_time(tuned, kind, config, tmp_path):
    mixture = tuned("knn,cache,ngram", kind)
    mixture.online = config
    expected = math.exp(-np.mean(np.concatenate(log_probs_by_hand(mixture, TEST))))
    evaluation = mixture.evaluate(TEST, batch_tokens=64)
    assert evaluation.perplexity == pytest.approx(expected, rel=1e-4)
    assert evaluation.online == config
    trace = mixture.record(TEST, tmp_path / "trace")
    settings = [getattr(memory, "settings", ()) for memory in mixture.memories]
    replayed = evaluate_trace(trace, settings, mixture.weights, config)
    assert replayed.perplexity == pytest.approx(expected, rel=1e-3)
    assert replayed.lmbda == pytest.approx(evaluation.lmbda, rel=1e-2)


def test_gate_sees_evidence_if_it_is_trained_on_text_that_the_model_wrote(lm, path):
    mixture = Mixture.open(path, lm, memories="knn,cache,ngram", use_tuned=False)
    mixture.tune(VALID, weights="gated", samples=600, **GRID)
    assert mixture.weights.uses_evidence
    assert len(mixture.layer.first) == 4 + 2 + 3 * 3
    assert Mixture.open(path, lm).weights.uses_evidence
    mixture.tune(VALID, weights="gated", samples=0, **GRID)
    assert not mixture.weights.uses_evidence
    mixture.tune(VALID, weights="gated", online=False, **GRID)
    assert not mixture.weights.uses_evidence


def test_weights_beside_networks_are_fitted_to_samples_too(lm, path, tmp_path, monkeypatch):
    """Else they would add memories to text of another domain; without networks, they are fitted to the text alone."""
    mixture = Mixture.open(path, lm, memories="knn,cache,ngram", use_tuned=False)
    valid, written = (
        mixture.record(each, tmp_path / name)
        for name, each in (("valid", VALID), ("written", documents(20, start=700)))
    )
    settings = [getattr(memory, "settings", ()) for memory in mixture.memories]
    text, samples = tabulate(valid, settings), tabulate(written, settings)
    frequencies = token_frequencies(mixture.store)
    weights = fit_weights(text, "gated", frequencies=frequencies, samples=samples).weights
    assert weights.gate.trust > 0
    both = torch.cat([text.log_probs, samples.log_probs])
    expected = fit(both, prior=torch.ones(len(text.component_names))).weights
    torch.testing.assert_close(weights.gate.fitted.double(), expected, atol=1e-5, rtol=0)
    layers, layer = [], TraceTable.layer
    monkeypatch.setattr(TraceTable, "layer", lambda *arguments: layers.append(arguments) or layer(*arguments))
    found = choose_online(text, weights, samples)
    assert len(layers) == 2  # one for each text
    assert found[0] is None or isinstance(found[0], OnlineConfig)


def test_one_long_document_is_held_out_in_blocks_beside_samples():
    """As one unit, it would be predicted by networks that were trained on samples alone."""
    documents = torch.cat([torch.zeros(980), torch.full((20,), 980)]).long()
    assert _units(documents).tolist() == [row * 5 // 1000 for row in range(1000)]
    several = torch.cat([torch.zeros(600), torch.full((400,), 600)]).long()
    assert _units(several).tolist() == several.tolist()


def test_evidence_without_experts_equals_one_token_at_a_time(tuned):
    mixture = tuned("knn,cache", "gated")
    mixture.online = None
    assert mixture.layer.stateful
    expected = math.exp(-np.mean(np.concatenate(log_probs_by_hand(mixture, TEST))))
    assert mixture.evaluate(TEST, batch_tokens=64).perplexity == pytest.approx(expected, rel=1e-4)


def test_evidence_changes_the_weights_of_a_trained_gate(lm, tuned):
    """Networks that ignore evidence would make every comparison with the oracle pass."""
    mixture = tuned("knn,cache", "gated")
    (batch,) = mixture.read([lm.encode(TEST[0].text)], batch_tokens=10_000)
    given = mixture.predict_components(batch.context).given
    evidence = torch.randn(len(batch.rows), 6)
    without, with_evidence = (mixture.weights.compute(given.inputs, given.abstains, each) for each in (None, evidence))
    assert (without - with_evidence).abs().max() > 1e-3


@pytest.mark.parametrize("read_ahead", [False, True])
def test_deferred_search_gives_the_same_online_weights(lm, path, read_ahead):
    mixture = Mixture.open(path, lm, k=16, knn_temperature=4.0, lmbda=0.7)
    mixture.online = CONFIGS[1]
    expected = math.exp(-np.mean(np.concatenate(log_probs_by_hand(mixture, TEST))))
    assert mixture.evaluate(TEST, batch_tokens=64, read_ahead=read_ahead).perplexity == pytest.approx(
        expected, rel=1e-4
    )


def test_several_stores_are_experts_of_their_own(lm, path, other):
    mixture = Mixture.open(path, lm, memories=f"knn:0.5,knn={other}:0.01,cache:0.1", use_tuned=False)
    mixture.online = OnlineConfig(0.1, 0.0)
    expected = math.exp(-np.mean(np.concatenate(log_probs_by_hand(mixture, TEST))))
    assert mixture.evaluate(TEST).perplexity == pytest.approx(expected, rel=1e-4)


def test_store_of_noise_with_the_whole_weight_costs_no_more_than_the_bound(lm, path):
    """λ = 1 over a store of another text: each text loses at most -log prior nats against the model alone."""
    mixture = Mixture.open(path, lm, k=4, knn_temperature=0.01, lmbda=1.0)
    mixture.online = OnlineConfig(0.25, 0.0)
    for text in documents(5, start=900):
        tokens = len(lm.encode(text.text))
        evaluation = mixture.evaluate([text])
        excess = tokens * math.log(evaluation.perplexity / evaluation.base_perplexity)
        assert excess <= -math.log(0.25) + 1e-3
    mixture.online = None
    assert mixture.evaluate(documents(5, start=900)).perplexity > 10 * evaluation.base_perplexity


def test_explanation_has_the_online_weights(lm, path):
    mixture = Mixture.open(path, lm, memories="knn,cache", lmbda=0.6, use_tuned=False)
    mixture.online = CONFIGS[1]
    text = TEST[0].text
    (expected,) = log_probs_by_hand(mixture, [Document("text", "text", text)])
    found = mixture.explain(text)
    assert [math.log(token.p) for token in found] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    for token in found:
        total = sum(share.weight for share in token.shares)
        mixed = (1 - total) * token.p_lm + sum(share.weight * share.p for share in token.shares)
        assert token.p == pytest.approx(mixed, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_tuned_online_weights_are_saved_opened_and_left_out(lm, path, kind, tmp_path):
    mixture = Mixture.open(path, lm, memories="knn,cache,ngram", use_tuned=False)
    result = mixture.tune(VALID, weights=kind, **GRID)
    assert result.online is not None
    assert mixture.online == result.online
    assert Mixture.open(path, lm).online == result.online
    assert Mixture.open(path, lm, options=MixtureOptions(online=False)).online is None
    assert Mixture.open(path, lm, lmbda=0.5).online is None  # the paper's kNN-LM
    model = KnnForCausalLM(mixture)
    model.save_pretrained(tmp_path / "saved")
    assert KnnForCausalLM.from_pretrained(tmp_path / "saved").mixture.online == result.online
    assert mixture.tune(VALID, weights=kind, online=False, **GRID).online is None
    assert Mixture.open(path, lm).online is None


def test_tuning_reports_the_perplexity_with_online_weights(lm, path):
    mixture = Mixture.open(path, lm, memories="knn,ngram", use_tuned=False)
    result = mixture.tune(VALID, weights="fitted", **GRID)
    assert mixture.evaluate(VALID).perplexity == pytest.approx(result.perplexity, rel=1e-3)


def test_largest_prior_within_the_allowed_cost_is_chosen():
    begins = np.arange(2_000) % 500 == 0
    better = np.stack([np.full(2_000, -3.0), np.full(2_000, -2.0)], 1)
    config, loss = choose_config(ExpertScores(better, begins))
    assert config.prior == 0.5  # log 2 in 500 tokens is below 0.2 %
    assert loss == pytest.approx(2.0, abs=2e-3)
    begins = np.arange(2_000) % 10 == 0
    config, _ = choose_config(ExpertScores(better, begins))
    assert config.prior == 0.01  # of ten tokens, -log 0.99 is 0.1 %, -log 0.98 just above 0.2 %
    worse = np.stack([np.full(2_000, -2.0), np.full(2_000, -3.0)], 1)
    config, loss = choose_config(ExpertScores(worse, np.arange(2_000) == 0))
    assert config.prior == 0.5
    assert loss == pytest.approx(2.0, abs=2e-3)
    short = np.stack([np.full(400, -9.0), np.full(400, -2.0)], 1)
    # Texts of one token: 0.002 of the prior costs 0.2 %, and a little more.
    assert choose_config(ExpertScores(short, np.ones(400, bool))) == (None, 2.0)
    switching = np.where((np.arange(2_000) // 50 % 2 == 0)[:, None], better, worse)
    config, _ = choose_config(ExpertScores(switching, np.arange(2_000) == 0))
    assert config.switch_rate >= 0.01


def test_text_of_another_kind_chooses_among_configurations_that_cost_little():
    begins = np.arange(2_000) % 500 == 0
    own = ExpertScores(np.stack([np.full(2_000, -3.0), np.full(2_000, -2.0)], 1), begins)
    short = np.arange(2_000) % 20 == 0
    helped = ExpertScores(np.stack([np.full(2_000, -2.5), np.full(2_000, -2.0)], 1), short)
    assert choose_config(own, helped)[0].prior == 0.002
    harmed = ExpertScores(np.stack([np.full(2_000, -2.0), np.full(2_000, -2.5)], 1), short)
    assert choose_config(own, harmed)[0].prior == 0.3  # in 500 tokens, -log 0.7 is 0.071 %, -log 0.5 is above 0.1 %


def test_state_is_the_same_for_windows_in_one_batch_and_in_several(lm, path):
    mixture = Mixture.open(path, lm, memories="knn,cache", lmbda=0.6, use_tuned=False)
    mixture.online = CONFIGS[1]
    tokens = lm.encode(TEST[0].text)
    (batch,) = mixture.read([tokens], batch_tokens=10_000)
    assert len(batch.context.spans) > 2
    together = mixture.predict(batch.context).log_prob(batch.targets)
    (expected,) = log_probs_by_hand(mixture, [TEST[0]])
    torch.testing.assert_close(
        together.double()[batch.rows.argsort()], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4
    )


def test_text_of_another_domain_trains_the_gate(lm, path):
    mixture = Mixture.open(path, lm, memories="knn,ngram", use_tuned=False)
    tuned = mixture.tune(VALID, weights="gated", samples=0, **GRID)
    rows = tuned.weights.gate.metadata["rows"]
    assert not tuned.weights.uses_evidence
    other = documents(12, start=900)
    tuned = mixture.tune(VALID, weights="gated", samples=0, other=iter(other), **GRID)
    assert tuned.weights.uses_evidence
    assert tuned.weights.gate.metadata["rows"] == rows + sum(len(lm.encode(each.text)) for each in other)
    assert tuned.tokens == rows  # the figures are those of the text alone
