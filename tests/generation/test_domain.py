"""Memories in text after a prompt that is unlike the text of the store: left out, in `generate` and in the server."""

from __future__ import annotations

import pytest
import torch

from helpers.models import tiny, tiny_tokenizer
from helpers.online import OnlineByHand
from knnlm.corpus import Document
from knnlm.errors import ModelError
from knnlm.generation.causal import KnnForCausalLM, generate_tokens
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.engine.requests import GenerationRequest, MemoryOverrides, TokensEvent
from knnlm.server.engine.scheduler import Scheduler

STORE = "The sea is calm today, and the ships are at rest. "
INSIDE, OUTSIDE = "The sea is calm today", "xq zj 8%7 kk"
SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def opened(folder, family="llama", memories="knn:0.4,ngram:0.5", **options):
    lm = CausalLM(tiny(family), tiny_tokenizer(), name=family)
    path = folder / f"{family}.store"
    if not path.exists():
        build([Document("sea", "sea", STORE * 8)], path, lm=lm, window=lm.window(64)).close()
    settings = {"memories": memories, "k": 4, "knn_temperature": 1.0, "use_tuned": False}
    mixture = Mixture.open(path, lm, options=MixtureOptions(**options), **settings)
    mixture.online = OnlineConfig(1e-30, 0.0)  # so small that the experts do not return to the model
    return mixture


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def mixture(request, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("domain"), request.param)


def domain_by_hand(mixture, ids):
    """Return the gain of the mixture on a text, one token at a time, and whether the text is in the domain."""
    state, found = OnlineByHand(mixture), {}
    for batch in mixture.read([ids[1:]]):
        outputs = mixture.predict_components(batch.context)
        dense = torch.stack([component.log_probs().exp() for component in outputs.components], 1).double().numpy()
        columns = (outputs.given.inputs, outputs.given.abstains.numpy(), dense)
        found |= {row: each for row, *each in zip(batch.rows.tolist(), *columns, strict=True)}
    for position, token in enumerate(ids[1:]):
        inputs, abstains, dense = found[position]
        by_expert = state.component_weights(inputs, abstains)
        state.observe(by_expert, dense[:, token], abstains)
    return state.gain, state.gain >= min(2.0, 0.25 * state.tokens)


def greedy(mixture, prompt, count=12, *, use_memory=True, **settings):
    return generate_tokens(mixture, prompt, max_new_tokens=count, use_memory=use_memory, **SETTINGS, **settings)


@pytest.mark.parametrize("text", [INSIDE, OUTSIDE, "T", "", "The se", "zq", INSIDE + OUTSIDE, OUTSIDE + INSIDE])
def test_state_of_a_prompt_equals_one_token_at_a_time(mixture, text):
    ids = mixture.lm.prompt(text)
    _, context = KnnForCausalLM(mixture).read(torch.tensor([ids]))
    states = mixture.predict(context).states
    gain, inside = domain_by_hand(mixture, ids)
    torch.testing.assert_close(states[-1, mixture.layer.experts].item(), gain, atol=1e-4, rtol=1e-4)
    assert bool(mixture.layer.in_domain(states)[-1]) == inside


@pytest.mark.parametrize("use_cache", [True, False])
def test_answer_to_another_text_is_that_of_the_model(mixture, use_cache):
    alone = greedy(mixture, OUTSIDE, use_memory=False)
    assert greedy(mixture, OUTSIDE, use_cache=use_cache) == alone
    mixture.domain_check = False
    try:
        assert greedy(mixture, OUTSIDE, use_cache=use_cache) != alone  # so that the test above can fail
    finally:
        mixture.domain_check = True


def test_text_of_the_domain_and_no_text_use_the_memories(mixture):
    assert mixture.lm.decode(greedy(mixture, INSIDE)).startswith(", and the sh")
    assert greedy(mixture, "") != greedy(mixture, "", use_memory=False)


def test_only_given_tokens_count(mixture):
    ids = mixture.lm.prompt(INSIDE + OUTSIDE)
    hidden = len(mixture.lm.prompt(INSIDE))
    readable = torch.tensor([[place >= hidden for place in range(len(ids))]])
    model = KnnForCausalLM(mixture)
    found = model.generate(torch.tensor([ids]), readable_mask=readable, max_new_tokens=8, **SETTINGS)
    alone = mixture.lm.model.generate(torch.tensor([ids]), max_new_tokens=8, **SETTINGS)
    assert torch.equal(found, alone)
    assert not torch.equal(model.generate(torch.tensor([ids]), max_new_tokens=8, **SETTINGS), alone)


def test_padded_batch_decides_for_each_prompt(mixture):
    prompts = [mixture.lm.prompt(text) for text in (INSIDE, OUTSIDE, "The")]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    together = KnnForCausalLM(mixture).generate(ids, attention_mask=mask, max_new_tokens=10, **SETTINGS)
    for row, text in zip(together, (INSIDE, OUTSIDE, "The"), strict=True):
        assert row[width:].tolist() == greedy(mixture, text, 10)


def test_evaluation_uses_the_memories_everywhere(mixture, tmp_path):
    text = [Document("other", "other", OUTSIDE)]
    everywhere = opened(tmp_path, mixture.lm.name, domain_check=False)
    assert mixture.evaluate(text).perplexity == everywhere.evaluate(text).perplexity


def test_saved_model_checks_and_damps_as_before(tmp_path):
    mixture = opened(tmp_path, memories="knn:0.4,cache:0.1,ngram:0.4", domain_check=False, cache_generated=True)
    mixture.damping = False  # after it was opened
    model = KnnForCausalLM(mixture)
    model.save_pretrained(tmp_path / "saved")
    again = KnnForCausalLM.from_pretrained(tmp_path / "saved").mixture
    assert (again.domain_check, again.damping) == (False, False)
    assert again.options.cache_generated
    assert greedy(again, OUTSIDE, 20) == greedy(mixture, OUTSIDE, 20)
    config = tmp_path / "saved" / "config.json"
    config.write_text(config.read_text().replace('"damping": false', '"damping": "no"'))
    with pytest.raises(ModelError, match="option damping is 'no'"):
        KnnForCausalLM.from_pretrained(tmp_path / "saved")


def serve_texts(mixture, *wanted):
    """Return the tokens that a server generates after each text with its overrides."""
    scheduler = Scheduler(mixture)
    scheduler.start()
    try:
        assert scheduler.ready.wait(30)
        requests = [
            GenerationRequest(tuple(mixture.lm.prompt(text)), 10, ignore_eos=True, overrides=overrides)
            for text, overrides in wanted
        ]
        handles = [scheduler.submit(request) for request in requests]
        return [
            [token for event in handle.events() if isinstance(event, TokensEvent) for token in event.tokens]
            for handle in handles
        ]
    finally:
        scheduler.stop()


def test_request_switches_the_check_of_a_server_on(tmp_path):
    mixture = opened(tmp_path, domain_check=False)
    own, checked = MemoryOverrides(), MemoryOverrides(domain_check=True)
    found = serve_texts(mixture, (OUTSIDE, own), (OUTSIDE, checked), (INSIDE, checked))
    assert all(token.weight > 0 for token in found[0])
    assert all(token.weight == 0 for token in found[1])
    assert all(token.weight > 0 for token in found[2])


def test_server_decides_like_generate(mixture):
    own, everywhere = MemoryOverrides(), MemoryOverrides(domain_check=False)
    found = serve_texts(mixture, (INSIDE, own), (OUTSIDE, own), (OUTSIDE, everywhere))
    assert [token.id for token in found[0]] == greedy(mixture, INSIDE, 10)
    assert [token.id for token in found[1]] == greedy(mixture, OUTSIDE, 10, use_memory=False)
    assert all(token.weight == 0 for token in found[1])
    assert all(token.weight > 0 for token in found[2])


def test_without_online_weights_nothing_is_checked(tmp_path):
    mixture = opened(tmp_path, online=False)
    assert not mixture.domain_check
    assert not mixture.damping
