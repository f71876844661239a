"""Generation with online weights: their state follows the text, beams, batches and the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.models import logits_in_steps, tiny, tiny_tokenizer
from helpers.online import OnlineByHand, prior_by_hand
from helpers.stores import documents
from knnlm.errors import ParameterError
from knnlm.generation import causal
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.spec import MixtureOptions

FAMILIES = ["llama", "gpt2", "gemma3"]
PROMPT = "The memory of a model is the memory of a model and the memory"
SETTINGS = {"do_sample": False, "eos_token_id": None}


def opened(family, folder, memories):
    lm = CausalLM(tiny(family), tiny_tokenizer(), name=family)
    store = build(documents(8), folder / "docs.store", lm=lm, window=lm.window(128))
    options = MixtureOptions(cache_generated=True, damping=False)  # as in evaluation, where all tokens are given
    settings = {"k": 12, "knn_temperature": 4.0, "use_tuned": False}
    mixture = Mixture.open(store.path, lm, memories=memories, options=options, **settings)
    mixture.online = OnlineConfig(0.3, 0.02)
    return KnnForCausalLM(mixture)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A tiny model of each family with memories that depend on the text, and online weights."""
    return opened(request.param, tmp_path_factory.mktemp("online"), "knn:0.3,cache:0.4,ngram:0.1")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def masked_model(request, tmp_path_factory):
    """A tiny model whose memories read no hidden tokens, so that only the evidence depends on the mask."""
    return opened(request.param, tmp_path_factory.mktemp("masked"), "knn:0.5,ngram:0.2")


@pytest.fixture(scope="module")
def gated_model(tmp_path_factory):
    """A tiny model with a gate that sees evidence."""
    model = opened("llama", tmp_path_factory.mktemp("gated"), "knn,cache,ngram")
    model.mixture.tune(documents(8, start=100), weights="gated")
    assert model.mixture.weights.uses_evidence
    model.mixture.online = OnlineConfig(0.3, 0.02)
    return model


@pytest.fixture(scope="module")
def knn_model(tmp_path_factory):
    """A tiny model with one λ, which needs no tokens without online weights."""
    return opened("llama", tmp_path_factory.mktemp("knn"), "knn:0.7")


def by_hand(model, ids, *, evidence=None, hidden=()):
    """Return (T, V) probabilities, with the state of the text updated token by token in NumPy.

    `evidence` is the number of tokens that update it, except those at `hidden` places; None: all.
    """
    mixture, found = model.mixture, {}
    for batch in mixture.read([[*ids[1:], 0]]):  # one more target, so that the last position is read too
        outputs = mixture.predict_components(batch.context)
        dense = torch.stack([component.log_probs().exp() for component in outputs.components], 1).double()  # (N, M, V)
        columns = (outputs.given.inputs, outputs.given.abstains.numpy(), dense.numpy())
        found |= {row: each for row, *each in zip(batch.rows.tolist(), *columns, strict=True)}
    state, rows = OnlineByHand(mixture), []
    for position in range(len(ids)):
        inputs, abstains, dense = found[position]
        by_expert = state.component_weights(inputs, abstains)
        rows.append(state.mixed(by_expert) @ dense)
        following = position + 1
        if following < (len(ids) if evidence is None else evidence) and following not in hidden:
            state.observe(by_expert, dense[:, ids[following]], abstains)
    return torch.from_numpy(np.stack(rows)).float()


def greedy_by_hand(model, ids, count, hidden=()):
    ids, prompt_length = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(by_hand(model, ids, evidence=prompt_length, hidden=hidden)[-1].argmax()))
    return ids


@torch.no_grad()
def test_whole_text_equals_updates_by_hand(model):
    ids = model.mixture.lm.prompt(PROMPT)
    logits = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits.exp(), by_hand(model, ids), rtol=1e-3, atol=1e-5)


def test_steps_with_a_cache_equal_the_whole_text(model):
    steps_equal_the_whole(model)


def test_steps_with_one_lambda_equal_the_whole_text(knn_model):
    steps_equal_the_whole(knn_model)


def test_steps_with_evidence_equal_the_whole_text(gated_model):
    steps_equal_the_whole(gated_model)


@torch.no_grad()
def test_whole_text_with_evidence_equals_updates_by_hand(gated_model):
    ids = gated_model.mixture.lm.prompt(PROMPT)
    logits = gated_model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits.exp(), by_hand(gated_model, ids), rtol=1e-3, atol=1e-5)


def test_only_the_prompt_is_evidence_for_a_gate_in_generation(gated_model):
    ids = gated_model.mixture.lm.prompt(PROMPT)
    generated = gated_model.generate(torch.tensor([ids]), max_new_tokens=8, **SETTINGS)
    assert generated[0].tolist() == greedy_by_hand(gated_model, ids, 8)


@torch.no_grad()
def steps_equal_the_whole(model):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits_in_steps(model, ids).exp(), whole.exp(), rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_last_logits_alone_are_those_of_the_whole_text(model):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    whole, last = model(ids).logits, model(ids, logits_to_keep=1).logits
    assert last.shape[1] == 1
    torch.testing.assert_close(last.exp(), whole[:, -1:].exp(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_only_the_prompt_is_evidence_in_generation(model, use_cache):
    ids = model.mixture.lm.prompt(PROMPT)
    generated = model.generate(torch.tensor([ids]), max_new_tokens=8, use_cache=use_cache, **SETTINGS)
    assert generated[0].tolist() == greedy_by_hand(model, ids, 8)


@pytest.mark.parametrize("settings", [{}, {"use_cache": False}, {"prefill_chunk_size": 3}])
def test_tokens_of_a_prompt_that_are_not_readable_are_no_evidence(masked_model, settings):
    lm = masked_model.mixture.lm
    prompts = [lm.prompt(PROMPT), lm.prompt("a model and the")]
    hidden = [{1, 2, 3, 5, 8, len(prompts[0]) - 1}, {2}]
    length = max(map(len, prompts))
    pads = [length - len(each) for each in prompts]
    ids = torch.tensor([[0] * pad + each for pad, each in zip(pads, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(each) for pad, each in zip(pads, prompts, strict=True)])
    readable = torch.ones_like(mask, dtype=torch.bool)
    for row, (pad, places) in enumerate(zip(pads, hidden, strict=True)):
        readable[row, [pad + place for place in places]] = False
    options = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, **SETTINGS, **settings}
    output = masked_model.generate(
        ids, readable_mask=readable, output_logits=True, return_dict_in_generate=True, **options
    )
    for row, (each, places) in enumerate(zip(prompts, hidden, strict=True)):
        expected = greedy_by_hand(masked_model, each, 6, places)
        assert output.sequences[row, length:].tolist() == expected[len(each) :]
        last = by_hand(masked_model, expected[:-1], evidence=len(each), hidden=places)[-1]
        torch.testing.assert_close(output.logits[-1][row].exp(), last, rtol=1e-3, atol=1e-5)


def test_readable_mask_follows_beams(masked_model):
    ids = torch.tensor([masked_model.mixture.lm.prompt(PROMPT)] * 2)
    readable = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    beams = [
        masked_model.generate(
            ids, max_new_tokens=6, num_beams=3, use_cache=use_cache, readable_mask=readable, pad_token_id=0, **SETTINGS
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


def test_cache_does_not_read_tokens_that_are_not_readable(tmp_path):
    model = opened("llama", tmp_path, "cache:0.9")
    model.mixture.online = None
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    settings = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, **SETTINGS}
    nothing = model.generate(ids, readable_mask=torch.zeros_like(ids), **settings).logits[0]
    alone = model.base.generate(ids, pad_token_id=0, **settings).logits[0].log_softmax(-1)
    torch.testing.assert_close(nothing, alone)
    everything = model.generate(ids, readable_mask=torch.ones_like(ids), **settings).logits[0]
    torch.testing.assert_close(everything, model.generate(ids, **settings).logits[0])
    assert not torch.allclose(everything, alone)


def test_readable_mask_of_another_shape_is_refused(knn_model):
    ids = torch.tensor([knn_model.mixture.lm.prompt(PROMPT)])
    with pytest.raises(ParameterError, match="readable_mask has the shape"):
        knn_model.generate(ids, readable_mask=torch.ones(1, 2), max_new_tokens=1)


def test_own_output_gives_a_looping_component_no_weight(model):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    output = model.generate(ids, max_new_tokens=12, return_dict_in_generate=True, **SETTINGS)
    weights = output.past_key_values.knnlm_state.online.keys[0, 0]  # (T, E)
    prompt = ids.shape[1]
    assert len(weights) == prompt + 11
    assert (weights[prompt - 1 :] == weights[prompt - 1]).all()
    assert not torch.equal(weights[prompt - 1], weights[0])


def test_beams_are_the_same_with_and_without_a_cache(model):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    beams = [
        model.generate(ids, max_new_tokens=6, num_beams=3, use_cache=use_cache, **SETTINGS)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


def test_padded_batch_generates_what_each_prompt_generates_alone(model):
    lm = model.mixture.lm
    prompts = [lm.prompt(PROMPT), lm.prompt("a model and the")]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (length - len(each)) + [1] * len(each) for each in prompts])
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **SETTINGS)
    for row, each in zip(together, prompts, strict=True):
        assert row[length:].tolist() == greedy_by_hand(model, each, 6)[len(each) :]


def test_evidence_is_limited_to_the_last_tokens_of_a_prompt(model, monkeypatch):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    monkeypatch.setattr(causal, "EVIDENCE_TOKENS", 4)
    output = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **SETTINGS)
    weights = output.past_key_values.knnlm_state.online.keys[0, 0, :, :4].exp()  # of the experts
    prior = torch.from_numpy(prior_by_hand(model.mixture.online, 1, 1))
    torch.testing.assert_close(weights[: ids.shape[1] - 3], prior.expand(ids.shape[1] - 3, 4))
    assert not torch.allclose(weights[ids.shape[1] - 1], prior)


def test_loss_has_gradients(model):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    loss = model(ids, labels=ids).loss
    loss.backward()
    expected = -by_hand(model, ids[0].tolist())[range(ids.shape[1] - 1), ids[0, 1:]].log().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.base.parameters())
    model.base.zero_grad()


@torch.no_grad()
def test_logits_of_chosen_positions_are_those_of_the_whole_text(model):
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    whole = model(ids).logits
    for places in ([5], [2, 3, 4]):
        chosen = model(ids, logits_to_keep=torch.tensor(places)).logits
        torch.testing.assert_close(chosen.exp(), whole[:, places].exp(), rtol=1e-3, atol=1e-5)


def test_start_token_alone_is_the_prompt_where_none_is_given(model):
    start = model.mixture.lm.start_token
    settings = {"max_new_tokens": 6, "bos_token_id": start, "pad_token_id": 0, **SETTINGS}
    output = model.generate(return_dict_in_generate=True, **settings)
    weights = output.past_key_values.knnlm_state.online.keys[0, 0]
    assert (weights == weights[0]).all()


@pytest.mark.parametrize("chunk", [2, 5])
def test_prompts_in_chunks_and_padded_give_the_same_text(model, chunk):
    lm = model.mixture.lm
    prompts = [lm.prompt(PROMPT), lm.prompt("a model and the"), lm.prompt("a")]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (length - len(each)) + [1] * len(each) for each in prompts])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, **SETTINGS}
    assert torch.equal(model.generate(ids, prefill_chunk_size=chunk, **settings), model.generate(ids, **settings))


@torch.no_grad()
def test_text_that_begins_in_a_later_step_begins_with_the_prior(model):
    lm = model.mixture.lm
    prompts = [lm.prompt(PROMPT), lm.prompt("")[:1]]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (length - len(each)) + [1] * len(each) for each in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    past = model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], use_cache=True)
    last = model(
        ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=past.past_key_values
    ).logits[:, -1]
    for row, each in zip(last, prompts, strict=True):
        torch.testing.assert_close(row.exp(), by_hand(model, each)[-1], rtol=1e-3, atol=1e-5)


def test_without_a_cache_the_evidence_of_a_long_prompt_stays(model, monkeypatch):
    monkeypatch.setattr(causal, "EVIDENCE_TOKENS", 6)
    ids = torch.tensor([model.mixture.lm.prompt(PROMPT)])
    settings = {"max_new_tokens": 10, "output_logits": True, "return_dict_in_generate": True, **SETTINGS}
    cached, plain = (model.generate(ids, use_cache=use_cache, **settings) for use_cache in (True, False))
    for one, other in zip(cached.logits, plain.logits, strict=True):
        torch.testing.assert_close(one.exp(), other.exp(), rtol=1e-3, atol=1e-5)
