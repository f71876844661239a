"""Generation with a store that loops: its weight falls as the formula says, in `generate` and in the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.models import tiny, tiny_tokenizer
from knnlm.corpus import Document
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.repetition import MAX_REPEAT, MIN_REPEAT, NO_TOKEN, damp
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.engine import predict
from knnlm.server.engine.requests import GenerationRequest, MemoryOverrides, TokensEvent
from knnlm.server.engine.scheduler import Scheduler

PROMPT = "A sea. A"
TOKENS = 40
SETTINGS = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def opened(folder, family="llama", **options):
    lm = CausalLM(tiny(family), tiny_tokenizer(), name=family)
    path = folder / f"{family}.store"
    if not path.exists():
        build([Document("loop", "loop", "A sea. " * 30)], path, lm=lm, window=lm.window(64)).close()
    settings = {"memories": "knn:0.4,ngram:0.5", "k": 4, "knn_temperature": 1.0, "use_tuned": False}
    mixture = Mixture.open(path, lm, options=MixtureOptions(**options), **settings)
    mixture.online = OnlineConfig(0.05, 0.0)
    return mixture


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def mixture(request, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("loop"), request.param)


def greedy_by_hand(mixture, ids, count, *, damping=True):
    """Return the generated tokens and the weights of all memories at each, token by token in NumPy."""
    model, generated, weights = KnnForCausalLM(mixture), [], []
    before = mixture.damping
    mixture.damping = False
    state = None
    try:
        with torch.no_grad():
            for _ in range(count):
                _, context = model.read(torch.tensor([[*ids, *generated]]), logits_to_keep=0)
                mixed = mixture.predict(context)
                # The experts' weights are those at the end of the prompt.
                experts = mixed.by_expert.shape[1]
                state = mixed.states[len(ids) - 1, :experts].exp() if state is None else state
                own = (state @ mixed.by_expert[-1].double()).numpy()  # (M,)
                dense = (
                    torch.stack([component.log_probs()[-1].exp() for component in mixed.components]).double().numpy()
                )
                if damping:
                    own = damped_by_hand(own, mixture.component_slices, mixed.outputs, generated)
                weights.append(own[1:].sum())
                generated.append(int((own @ dense).argmax()))
    finally:
        mixture.damping = before
    return generated, weights


def damped_by_hand(weights, slices, outputs, generated):
    weights = weights.copy()
    for own, output in zip(slices, outputs, strict=True):
        top, repeat = int(output.top()[-1]), 0
        for place in [place for place, token in enumerate(generated) if token == top]:
            lengths = range(1, min(place, MAX_REPEAT) + 1)
            same = [length for length in lengths if generated[place - length : place] == generated[-length:]]
            repeat = max(repeat, *same, 0)
        if repeat >= 4:
            weights[own] *= 0.5 ** (repeat - 3)
    weights[0] = 1 - weights[1:].sum()
    return weights


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_equals_the_formula(mixture, use_cache):
    ids = mixture.lm.prompt(PROMPT)
    expected, _ = greedy_by_hand(mixture, ids, TOKENS)
    found = KnnForCausalLM(mixture).generate(torch.tensor([ids]), use_cache=use_cache, **SETTINGS)
    assert found[0, len(ids) :].tolist() == expected


def test_loop_ends_with_damping_only(mixture, tmp_path):
    ids = mixture.lm.prompt(PROMPT)
    without = opened(tmp_path, mixture.lm.name, damping=False)
    looping = KnnForCausalLM(without).generate(torch.tensor([ids]), **SETTINGS)[0, len(ids) :].tolist()
    assert looping == greedy_by_hand(without, ids, TOKENS, damping=False)[0]
    assert "A sea. " * 5 in mixture.lm.decode(looping)
    damped = KnnForCausalLM(mixture).generate(torch.tensor([ids]), **SETTINGS)[0, len(ids) :].tolist()
    assert damped[: MAX_REPEAT // 4] == looping[: MAX_REPEAT // 4]
    assert damped != looping
    assert "A sea. " * 3 not in mixture.lm.decode(damped)


def test_beams_are_damped_the_same_with_and_without_a_cache(mixture):
    ids = torch.tensor([mixture.lm.prompt(PROMPT)])
    beams = [
        KnnForCausalLM(mixture).generate(ids, num_beams=3, use_cache=use_cache, **SETTINGS)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


def test_given_text_is_not_damped(mixture, tmp_path):
    text = Document("loop", "loop", "A sea. " * 12)
    without = opened(tmp_path, mixture.lm.name, damping=False)
    assert mixture.evaluate([text]).perplexity == without.evaluate([text]).perplexity
    ids = torch.tensor([mixture.lm.prompt(text.text)])
    with torch.no_grad():
        assert torch.equal(KnnForCausalLM(mixture)(ids).logits, KnnForCausalLM(without)(ids).logits)


def test_server_damps_like_generate(mixture, monkeypatch):
    ids = mixture.lm.prompt(PROMPT)
    damped = []

    def recorded(mixed, generated, rows):
        damped.append((len(mixed.weights), generated.tolist()))
        return damp(mixed, generated, rows)

    monkeypatch.setattr(predict, "damp", recorded)
    expected, weights = greedy_by_hand(mixture, ids, TOKENS)
    scheduler = Scheduler(mixture)
    scheduler.start()
    try:
        assert scheduler.ready.wait(30)
        off = MemoryOverrides(off=True)
        requests = [
            GenerationRequest(tuple(ids), TOKENS, ignore_eos=True),
            GenerationRequest(tuple(ids), 7, ignore_eos=True, overrides=off),
            GenerationRequest(tuple(ids[:2]), TOKENS, ignore_eos=True),
        ]
        handles = [scheduler.submit(request) for request in requests]
        found = [
            [token for event in handle.events() if isinstance(event, TokensEvent) for token in event.tokens]
            for handle in handles
        ]
        plain = [
            token
            for event in scheduler.submit(
                GenerationRequest(tuple(ids), TOKENS, ignore_eos=True, overrides=MemoryOverrides(lmbda=0.9))
            ).events()
            if isinstance(event, TokensEvent)
            for token in event.tokens
        ]
    finally:
        scheduler.stop()
    assert [token.id for token in found[0]] == expected
    np.testing.assert_allclose([token.weight for token in found[0]], weights, atol=1e-4)
    assert min(weights) < 0.1 * max(weights)
    # Only texts that repeat are looked at.
    assert any(len(generated) < positions for positions, generated in damped)
    assert all(sum(token != NO_TOKEN for token in row) > MIN_REPEAT for _, generated in damped for row in generated)
    short, _ = greedy_by_hand(mixture, ids[:2], TOKENS)
    assert [token.id for token in found[2]] == short
    # λ in a request is that of the paper's kNN-LM.
    assert mixture.lm.decode([token.id for token in plain]).count("A sea.") == 6
