"""Scores of continuations against NumPy, against the transformers model, and the number of searches they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.stores import documents
from knnlm.errors import ParameterError
from knnlm.evaluation.continuations import score_continuations
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.windows import WindowShape
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig

K, TAU, LAMBDA = 10_000, 5.0, 0.4  # all neighbours vote, so that ties do not matter


@pytest.fixture(scope="module")
def small(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "docs.store"
    return build(documents(12), path, lm=lm, window=WindowShape(24, 12), segment_entries=200)


@pytest.fixture(scope="module")
def pairs(lm):
    """Contexts and continuations of many lengths, some of them stored, one generated greedily by the model."""
    made = []
    for number, document in enumerate(documents(8, start=8)):
        tokens = lm.encode(document.text)
        cut = 1 + number * 5
        made.append((tokens[:cut], tokens[cut : cut + 1 + number % 4]))
    context = made[-1][0]
    with torch.no_grad():
        best = int(lm.model(torch.tensor([context])).logits[0, -1].argmax())
    return [*made, (context, [best])]


def by_hand(lm, small, pair, lmbda):
    """The mixture's (n, V) probabilities at the positions of a continuation, token by token, in NumPy."""
    module = lm.model.model.layers[-1].mlp
    text = [*pair[0], *pair[1]]
    queries, p_lm = oracle.read_token_by_token(
        lm.model, module, text[1:], start_token=text[0], context=len(text), stride=1
    )
    keys, values = small.take(torch.arange(small.key_count)).numpy(), small.values(torch.arange(small.entry_count))
    rows = []
    for position in range(len(pair[0]) - 1, len(text) - 1):
        p_knn = oracle.knn_distribution(
            queries[position], keys, values.numpy(), lm.vocab_size, k=K, knn_temperature=TAU
        )
        rows.append(oracle.mix(p_lm[position], p_knn, lmbda))
    return np.array(rows)


@pytest.mark.parametrize("lmbda", [0.0, LAMBDA, 1.0])
def test_scores_agree_with_numpy_token_by_token(lm, small, pairs, lmbda):
    mixture = Mixture.open(small.path, lm, k=K, knn_temperature=TAU, lmbda=lmbda)
    found = score_continuations(mixture, pairs)
    for pair, score in zip(pairs, found, strict=True):
        probs = by_hand(lm, small, pair, lmbda)
        with np.errstate(divide="ignore"):  # with λ = 1, a token without a neighbour has probability 0
            expected = np.log(probs[np.arange(len(probs)), pair[1]]).sum()
        assert score.log_prob == pytest.approx(expected, abs=1e-4, rel=1e-4)
        assert score.is_greedy == (probs.argmax(1) == pair[1]).all()
    if not lmbda:
        assert found[-1].is_greedy
    assert not all(score.is_greedy for score in found)


@pytest.mark.parametrize("gated", [False, True], ids=["fixed", "gated"])
def test_scores_with_cache_ngrams_and_gate_are_those_of_the_transformers_model(lm, pairs, tmp_path, gated):
    path = tmp_path / "docs.store"
    build(documents(12), path, lm=lm, window=WindowShape(24, 12))
    if gated:
        mixture = Mixture.open(path, lm, memories="knn,cache,ngram", k=64)
        mixture.tune(documents(6, start=40))
    else:
        mixture = Mixture.open(path, lm, memories="knn:0.3,cache:0.2,ngram:0.2", k=64)
    model = KnnForCausalLM(mixture)
    for pair, score in zip(pairs, score_continuations(mixture, pairs), strict=True):
        text = torch.tensor([[*pair[0], *pair[1]]])
        with torch.no_grad():
            log_probs = model(input_ids=text[:, :-1]).logits[0, len(pair[0]) - 1 :]
        expected = log_probs.gather(1, text[0, len(pair[0]) :, None]).sum()
        assert score.log_prob == pytest.approx(float(expected), abs=1e-4)
        assert score.is_greedy == bool((log_probs.argmax(1) == text[0, len(pair[0]) :]).all())


def test_online_weights_at_a_continuation_are_those_that_its_context_leads_to(lm, small, pairs):
    mixture = Mixture.open(small.path, lm, memories="knn:0.3,cache:0.2", k=64)
    without = [score.log_prob for score in score_continuations(mixture, pairs)]
    mixture.online = OnlineConfig(prior=0.5, switch_rate=0.01)
    model, found = KnnForCausalLM(mixture), score_continuations(mixture, pairs)
    for pair, score in zip(pairs, found, strict=True):
        text = torch.tensor([[*pair[0], *pair[1]]])
        with torch.no_grad():
            log_probs = model(input_ids=text[:, :-1]).logits[0, len(pair[0]) - 1 :]
        expected = log_probs.gather(1, text[0, len(pair[0]) :, None]).sum()
        assert score.log_prob == pytest.approx(float(expected), abs=1e-4)
    assert max(abs(score.log_prob - other) for score, other in zip(found, without, strict=True)) > 0.05


def test_context_of_several_continuations_is_searched_once_with_online_weights(lm, small, pairs, monkeypatch):
    mixture = Mixture.open(small.path, lm, memories="knn:0.3,cache:0.2", k=64)
    mixture.online = OnlineConfig(prior=0.5, switch_rate=0.01)
    shared = [(context, [*continuation, *more]) for context, continuation in pairs[:4] for more in ([], [5], [6, 7, 8])]
    alone = [score_continuations(mixture, [pair])[0] for pair in shared]
    counts = searched(mixture, monkeypatch)
    together = score_continuations(mixture, shared)
    assert [score.log_prob for score in together] == pytest.approx([score.log_prob for score in alone], abs=1e-4)
    assert [score.is_greedy for score in together] == [score.is_greedy for score in alone]
    # Positions of a context before its last one, once; and those of every continuation.
    assert sum(counts) == sum(len(context) - 1 for context, _ in pairs[:4]) + sum(len(own) for _, own in shared)


def searched(mixture, monkeypatch):
    """A list to which every search adds its number of positions."""
    counts, search = [], mixture.knn.search
    monkeypatch.setattr(mixture.knn, "search", lambda keys, *others: counts.append(len(keys)) or search(keys, *others))
    return counts


def test_only_positions_of_continuations_are_searched(lm, small, pairs, monkeypatch):
    mixture = Mixture.open(small.path, lm, lmbda=LAMBDA)
    counts = searched(mixture, monkeypatch)
    score_continuations(mixture, pairs)
    assert counts == [sum(len(continuation) for _, continuation in pairs)]


def test_lambda_zero_searches_nothing(lm, small, pairs, monkeypatch):
    mixture = Mixture.open(small.path, lm, lmbda=0.0)
    counts = searched(mixture, monkeypatch)
    score_continuations(mixture, pairs)
    assert counts == []


def test_continuations_that_differ_in_the_last_token_are_read_once(lm, small, monkeypatch):
    mixture = Mixture.open(small.path, lm, lmbda=LAMBDA)
    counts = searched(mixture, monkeypatch)
    context = lm.encode("The memory of a")
    letters = [[*lm.encode(" model"), token] for token in range(60, 64)]
    together = score_continuations(mixture, [(context, letter) for letter in letters])
    assert counts == [len(letters[0])]
    alone = [score_continuations(mixture, [(context, letter)])[0] for letter in letters]
    assert [score.log_prob for score in together] == pytest.approx([score.log_prob for score in alone], abs=1e-5)
    assert len({score.log_prob for score in together}) == len(letters)


def test_scores_do_not_depend_on_the_batch(lm, small, pairs):
    mixture = Mixture.open(small.path, lm, lmbda=LAMBDA, memories="knn:0.2,cache:0.2", k=K)
    one, many = (score_continuations(mixture, pairs, batch_tokens=size) for size in (1, 4096))
    assert [score.log_prob for score in one] == pytest.approx([score.log_prob for score in many], abs=1e-4)


def test_context_that_is_too_long_loses_its_beginning(lm, small, pairs):
    mixture = Mixture.open(small.path, lm, lmbda=0.0)
    context, continuation = pairs[5]
    cut = score_continuations(mixture, [(context, continuation)], max_length=10)[0]
    expected = score_continuations(mixture, [(context[-(11 - len(continuation)) :], continuation)])[0]
    assert cut.log_prob == pytest.approx(expected.log_prob, abs=1e-5)
    whole = score_continuations(mixture, [([5] * 500 + list(context), continuation)])[0]
    assert np.isfinite(whole.log_prob)


def test_lengths_out_of_range_are_errors_and_an_empty_continuation_is_certain(lm, small):
    mixture = Mixture.open(small.path, lm, lmbda=LAMBDA)
    with pytest.raises(ParameterError, match="at least one token"):
        score_continuations(mixture, [([], [1])])
    with pytest.raises(ParameterError, match="A continuation has 129 tokens, but only 128"):
        score_continuations(mixture, [([1], [2] * 129)])
    (score,) = score_continuations(mixture, [([1], [])])
    assert (score.log_prob, score.is_greedy) == (0.0, True)
    assert score_continuations(mixture, []) == []
