"""Generation with a decoder that shares its first blocks with the language model, against the whole decoder."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.errors import ModelError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.layers import layer_list
from knnlm.lm.shared import TopLM
from knnlm.mixture import readers
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import FixedWeights
from knnlm.server.engine.batching import BatchedCache, Prompt, read_prompt
from knnlm.server.engine.predict import MixtureCache
from knnlm.server.engine.requests import MemoryOverrides
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model

PROMPTS = [[1, 5, 9, 7, 30, 11], [1, 6, 10]]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 7}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def store(request, tmp_path_factory):
    """A store whose reader is a decoder of which only the last block was trained, with its language model."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lm = CausalLM.open(str(folder / "model"), device="cpu")
    initial = open_initial_model(str(folder / "model"), like=lm)
    config = DecoderConfig(epochs=2, batch_tokens=256, learning_rate=1e-2, context=64, top=1)
    texts = documents(10)
    train_decoder(lm.encode_all([text.text for text in texts]), initial, folder / "decoder", config, device="cpu")
    reader = CausalLM.open(str(folder / "decoder"), device="cpu")
    return lm, build(texts, folder / "docs.store", lm=reader, window=lm.window(64)).path, folder / "decoder"


def opened(store, memories="knn:0.3,decoder:0.4,cache:0.1"):
    lm, path, decoder = store
    named = memories.replace("decoder", f"decoder={decoder}")
    return Mixture.open(path, lm, memories=named, use_tuned=False)


@pytest.fixture
def both(store, monkeypatch):
    """The same mixture with a decoder that shares its first blocks, and with a whole one."""
    top = opened(store)
    assert isinstance(top.readers.tops[1], TopLM)
    monkeypatch.setattr(readers, "share_blocks", lambda _, other, __: other)
    whole = opened(store)
    assert whole.readers.tops[1] is None
    return top, whole


def test_evaluation_is_that_with_a_whole_decoder(both):
    top, whole = (mixture.evaluate(documents(4, start=40)) for mixture in both)
    assert top.perplexity == pytest.approx(whole.perplexity, rel=1e-5)
    assert top.base_perplexity == pytest.approx(whole.base_perplexity, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_generation_is_that_with_a_whole_decoder(both, settings):
    ids = torch.tensor([PROMPTS[0]])
    top, whole = (KnnForCausalLM(mixture).generate(ids, **GREEDY, **settings) for mixture in both)
    assert torch.equal(top, whole)


def test_padded_prompts_are_continued_as_with_a_whole_decoder(both):
    ids = torch.tensor([PROMPTS[0], [0, 0, 0, *PROMPTS[1]]])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    top, whole = (KnnForCausalLM(mixture).generate(ids, attention_mask=mask, **GREEDY) for mixture in both)
    assert torch.equal(top, whole)
    alone = KnnForCausalLM(both[0]).generate(torch.tensor([PROMPTS[1]]), **GREEDY)
    assert top[1, 6:].tolist() == alone[0, 3:].tolist()


def test_chunks_of_a_text_have_the_distributions_of_the_whole_text(both):
    model = KnnForCausalLM(both[0])
    ids = torch.tensor([[*PROMPTS[0], 14, 15, 16]])
    with torch.no_grad():
        right = model(ids).logits
        past, found = None, []
        for begin, end in ((0, 4), (4, 5), (5, 9)):
            output = model(ids[:, begin:end], past_key_values=past, use_cache=True)
            past = output.past_key_values
            found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=1e-4, atol=1e-4)


def test_sequences_of_a_server_have_the_distributions_of_each_alone(both):
    """Prompts of different lengths, read one by one and then continued in one batch."""
    found = []
    for mixture in both:
        model = KnnForCausalLM(mixture)
        batch, rows = BatchedCache(model), []
        for tokens in PROMPTS:
            prompt = Prompt(list(tokens))
            while prompt.remaining:
                _, context = read_prompt(model, prompt, max_tokens=4, all_logits=False)
            rows.append(mixture.predict(context).log_probs())
            batch.join(prompt, 1)
        for tokens in ([8, 9], [20, 21]):
            _, context = batch.step([[token] for token in tokens])
            rows.append(mixture.predict(context).log_probs())
        found.append(torch.cat(rows))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_copies_of_a_mixture_share_too(store):
    mixture = opened(store)
    again = mixture.reopen()
    assert isinstance(again.readers.tops[1], TopLM)
    clone = copy.copy(mixture)
    assert clone.readers.tops[1] is mixture.readers.tops[1]


def test_mixture_of_some_memories_leaves_the_others_as_they_are(store, tmp_path):
    """As in a request that names its memories; the store needs states of a block that the decoder alone does not."""
    lm, _, decoder = store
    reader = CausalLM.open(str(decoder), device="cpu", layer=0)
    path = build(documents(6), tmp_path / "docs.store", lm=reader, window=lm.window(64)).path
    mixture = opened((lm, path, decoder), "decoder:0.4,knn:0.3")
    before = mixture.evaluate(documents(3, start=40)).perplexity
    MixtureCache(mixture).get(MemoryOverrides(memories=(mixture.labels[0],)))
    assert mixture.evaluate(documents(3, start=40)).perplexity == before


def test_mixture_that_needs_first_blocks_reads_the_whole_decoder(store, tmp_path):
    """After a mixture that does not need them, on the same readers."""
    lm, _, decoder = store
    alone = opened(store, "decoder:0.4")
    assert alone.readers.tops[1].first == 2
    reader = CausalLM.open(str(decoder), device="cpu", layer=0)
    path = build(documents(6), tmp_path / "docs.store", lm=reader, window=lm.window(64)).path
    right = opened((lm, path, decoder), "decoder:0.4,knn:0.3")
    both = Mixture(
        lm, right.memories, readers=alone.readers, weights=right.weights, labels=right.labels, store=right.store
    )
    texts = documents(3, start=40)
    assert both.evaluate(texts).perplexity == pytest.approx(right.evaluate(texts).perplexity, rel=1e-5)
    ids = torch.tensor([PROMPTS[0]])
    found, wanted = (KnnForCausalLM(mixture).generate(ids, **GREEDY) for mixture in (both, right))
    assert torch.equal(found, wanted)


@pytest.fixture
def with_dropout(store):
    """A mixture of the decoder alone, with a language model that has dropout in training."""
    mixture = opened(store, "decoder:0.4")
    mixture.weights = FixedWeights((0.0, 1.0))
    blocks = layer_list(mixture.lm.model)
    before = [block.self_attn.attention_dropout for block in blocks]
    for block in blocks:
        block.self_attn.attention_dropout = 0.5
    yield KnnForCausalLM(mixture)
    mixture.lm.model.eval()
    for block, dropout in zip(blocks, before, strict=True):
        block.self_attn.attention_dropout = dropout


def test_memory_has_no_dropout_of_a_model_in_training(with_dropout):
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        right = with_dropout(ids).logits
        found = with_dropout.train()(ids).logits
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_cache_of_evaluation_is_not_continued_in_training(with_dropout):
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        past = with_dropout(ids[:, :4], use_cache=True).past_key_values
        with pytest.raises(ModelError, match="switched between training and evaluation"):
            with_dropout.train()(ids[:, 4:], past_key_values=past, use_cache=True)
