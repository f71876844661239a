"""States of texts: spans, tokens that are no evidence, and updates of one token, against plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.online import OnlineByHand
from knnlm.memories.base import Origin, Span
from knnlm.mixture.em import renormalise
from knnlm.mixture.layer import OnlineLayer, PositionInputs, SpanTexts
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.weights import FixedWeights

KINDS = {1: ("knn",), 2: ("knn", "cache"), 3: ("knn", "ngram", "knn")}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinearWeights:
    """Weights that are a softmax of a linear function of inputs and evidence."""

    matrix: torch.Tensor
    uses_evidence: bool = True

    def compute(self, inputs, abstains, evidence=None):
        zeros = torch.zeros(len(inputs), self.matrix.shape[0] - inputs.shape[1])
        both = torch.cat([inputs, zeros if evidence is None else evidence], 1)
        return renormalise((both @ self.matrix).softmax(1), abstains)


def made(random, memories, config, *, evidence):
    slices = [slice(1 + number, 2 + number) for number in range(memories)]
    if evidence:
        weights = LinearWeights(torch.from_numpy(random.normal(size=(2 + 3 * memories, memories + 1))).float())
    else:
        weights = FixedWeights(tuple(np.full(memories + 1, 1 / (memories + 1))))
    kinds = KINDS[memories]
    mixture = SimpleNamespace(
        memories=[SimpleNamespace(name=kind) for kind in kinds],
        component_slices=slices,
        online=config,
        weights=weights,
    )
    return OnlineLayer(weights, config, kinds, tuple(slices)), mixture


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    memories=st.integers(1, 3),
    config=st.sampled_from([None, OnlineConfig(0.2, 0.0), OnlineConfig(0.1, 0.05)]),
    evidence=st.booleans(),
    share=st.sampled_from((0.0, 0.3, 0.8, 1.0)),
)
@settings(max_examples=120, deadline=None)
def test_only_given_tokens_update_the_states(seed, lengths, memories, config, evidence, share):
    random = np.random.default_rng(seed)
    layer, mixture = made(random, memories, config, evidence=evidence)
    rows = sum(lengths)
    abstains = random.random((rows, memories + 1)) < 0.1
    abstains[:, 0] = False
    given = PositionInputs(torch.from_numpy(random.normal(size=(rows, 2))).float(), torch.from_numpy(abstains))
    log_probs = np.log(random.uniform(1e-3, 1, (rows, memories + 1)))
    spans, states, weights, begin, any_evidence = [], [], [], 0, False
    for length in lengths:
        start = int(random.integers(0, 3))
        others = random.choice([Origin.GENERATED, Origin.HIDDEN])
        origins = np.where(random.random(start + length) < share, Origin.GIVEN, others)
        by_hand, known = OnlineByHand(mixture), None
        if random.random() < 0.5:
            by_hand.weights = random.dirichlet(np.ones(len(by_hand.prior)))
            by_hand.evidence = random.normal(size=(memories, 3)) * evidence
            by_hand.gain, by_hand.tokens = random.normal(), int(random.integers(0, 9))
            known = torch.from_numpy(state_of(by_hand, evidence=evidence))
        tokens = torch.zeros(start + length, dtype=torch.long)
        spans.append(Span(tokens, start, {}, state=known, origins=torch.from_numpy(origins)))
        for row in range(begin, begin + length):
            by_expert = by_hand.component_weights(given.inputs[row], abstains[row])
            states.append(state_of(by_hand, evidence=evidence))
            weights.append(by_hand.mixed(by_expert))
            following = start + row - begin + 1
            if following < len(origins) and origins[following] == Origin.GIVEN:
                any_evidence = True
                by_hand.observe(by_expert, np.exp(log_probs[row]), abstains[row])
        begin += length
    texts = SpanTexts.of(spans)
    assert texts.has_evidence == any_evidence
    found, by_expert = layer.span_states(texts, given, torch.from_numpy(log_probs))
    np.testing.assert_allclose(found.numpy(), np.stack(states), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.mixed(found, by_expert).numpy(), np.stack(weights), rtol=1e-4, atol=1e-5)
    if not any_evidence:
        np.testing.assert_allclose(layer.given_states(spans, rows, CPU).numpy(), np.stack(states), atol=1e-9)


def state_of(by_hand, *, evidence):
    return np.concatenate(
        [np.log(by_hand.weights), [by_hand.gain, by_hand.tokens], by_hand.evidence.flatten() if evidence else []]
    )


@pytest.mark.parametrize("evidence", [False, True])
@pytest.mark.parametrize("config", [None, OnlineConfig(0.2, 0.0), OnlineConfig(0.1, 0.05)])
def test_update_of_one_token_continues_the_states_of_a_text(config, evidence):
    random = np.random.default_rng(0)
    layer, _ = made(random, 2, config, evidence=evidence)
    given = PositionInputs(torch.zeros(40, 2), torch.zeros(40, 3, dtype=torch.bool))
    given.abstains[5, 1] = True
    log_probs = torch.from_numpy(np.log(random.uniform(1e-3, 1, (40, 3))))
    states, by_expert = layer.states_before(given, log_probs, torch.arange(40) == 0)
    after = layer.after(states, by_expert, log_probs, given.abstains)
    torch.testing.assert_close(after[:-1], states[1:], rtol=1e-5, atol=1e-6)
    assert states[0].tolist() == pytest.approx(layer.first)


def test_component_that_repeats_its_own_output_gains_no_weight():
    """It gives every token of its loop the probability 1; as given text, that would be decisive."""
    layer, _ = made(np.random.default_rng(0), 1, OnlineConfig(0.5, 0.003), evidence=False)
    given = PositionInputs(torch.zeros(41, 0), torch.zeros(41, 2, dtype=torch.bool))
    log_probs = torch.log(torch.tensor([[0.05, 1.0]], dtype=torch.float64)).expand(41, 2)
    tokens = torch.zeros(41, dtype=torch.long)
    origins = torch.full((41,), Origin.GENERATED)
    origins[:2] = Origin.GIVEN
    looping = layer.span_states(SpanTexts.of([Span(tokens, 0, origins=origins)]), given, log_probs)[0].exp()
    read = layer.span_states(SpanTexts.of([Span(tokens, 0)]), given, log_probs)[0].exp()
    assert (looping[1:] == looping[1]).all()
    assert read[-1, 1] > 0.99 > looping[-1, 1]


def test_windows_of_one_tensor_are_one_text():
    tokens = torch.arange(10)
    spans = [Span(tokens[:6], 0), Span(tokens, 6), Span(torch.arange(3), 1)]
    assert SpanTexts.of(spans).next_tokens(CPU).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 0]
