"""A gate without online weights: generation gives it positions and last tokens, evaluation whole texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers.masking_utils import create_masks_for_generate

from helpers.models import tiny, tiny_tokenizer
from helpers.pairs import pair_lm, pairs
from helpers.stores import documents
from knnlm.errors import ModelError
from knnlm.generation.cache import text_mask
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Context, Positions, join_contexts
from knnlm.mixture.gate import place
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import GatedWeights

TEXTS = [[5, 9, 7, 30, 11, 12, 8], [6, 10, 41]]


class OfPositionAlone:
    """Stands for a gate: the weight of the memory depends on the position and the last token alone."""

    def __init__(self, weights: GatedWeights) -> None:
        self.feature_names, self.component_names = weights.gate.feature_names, weights.gate.component_names
        self.starts = weights.gate.starts

    def weights(self, features, _):
        share = (0.03 + 0.1 * features[:, 0] + 0.05 * features[:, 1].clamp(max=3)).clamp(max=0.9)
        rest = torch.zeros(len(features), len(self.component_names) - 2)
        return torch.cat([1 - share[:, None], share[:, None], rest], 1)


def opened(path, lm, texts):
    """A mixture whose weights depend on positions and tokens in a known way."""
    mixture = Mixture.open(path, lm, use_tuned=False)
    mixture.tune(texts, online=False)
    assert isinstance(mixture.weights, GatedWeights)
    mixture.weights = replace(mixture.weights, gate=OfPositionAlone(mixture.weights))
    assert mixture.needs_positions
    assert not mixture.needs_texts
    return mixture


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def mixture(request, tmp_path_factory):
    lm = CausalLM(tiny(request.param), tiny_tokenizer(), name=request.param)
    store = build(documents(12), tmp_path_factory.mktemp(request.param) / "docs.store", lm=lm)
    return opened(store.path, lm, documents(8, start=40))


def evaluated(mixture, tokens):
    """Log-probabilities after the start token and each of the tokens, as evaluation computes them."""
    (batch,) = mixture.read([[*tokens, 0]])
    assert batch.context.where is None
    return mixture.predict(batch.context).log_probs()


def test_forward_has_the_positions_of_evaluation(mixture):
    model = KnnForCausalLM(mixture)
    for tokens in TEXTS:
        ids = torch.tensor([[mixture.lm.start_token, *tokens]])
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits[0], evaluated(mixture, tokens), rtol=1e-4, atol=1e-4)


def test_steps_with_a_cache_have_the_positions_of_evaluation(mixture):
    model, tokens = KnnForCausalLM(mixture), TEXTS[0]
    ids = torch.tensor([[mixture.lm.start_token, *tokens]])
    right = evaluated(mixture, tokens)
    past, found = None, []
    for begin, end in ((0, 3), (3, 4), (4, 5), (5, 8)):
        with torch.no_grad():
            output = model(ids[:, begin:end], past_key_values=past, use_cache=True)
        past = output.past_key_values
        found.append(output.logits[0])
    torch.testing.assert_close(torch.cat(found), right, rtol=1e-4, atol=1e-4)


def test_static_cache_is_refused(mixture):
    """Its length is a tensor that the pass changes, and its masks have the width of the whole cache."""
    ids = torch.tensor([[mixture.lm.start_token, *TEXTS[0]]])
    cache = transformers.StaticCache(config=mixture.lm.model.config, max_cache_len=32)
    model = KnnForCausalLM(mixture)
    with pytest.raises(ModelError, match="A static or offloaded cache cannot carry"):
        model(ids, past_key_values=cache, use_cache=True)
    with pytest.raises(ModelError, match="A static or offloaded cache cannot carry"):
        model.generate(ids, max_new_tokens=2, pad_token_id=0, cache_implementation="static", disable_compile=True)


def test_length_is_a_copy_where_a_cache_changes_its_own_in_place(mixture, monkeypatch):
    count = torch.tensor(3)
    monkeypatch.setattr(transformers.DynamicCache, "get_seq_length", lambda *_: count)
    length = KnnForCausalLM(mixture)._text_length(transformers.DynamicCache())
    count.add_(4)
    assert length == 3


def test_generation_of_padded_prompts_has_the_positions_of_evaluation(mixture):
    model = KnnForCausalLM(mixture)
    start = mixture.lm.start_token
    longest = 1 + max(map(len, TEXTS))
    rows = [[start] * (longest - 1 - len(tokens)) + [start, *tokens] for tokens in TEXTS]
    mask = torch.tensor([[0] * (longest - 1 - len(tokens)) + [1] * (1 + len(tokens)) for tokens in TEXTS])
    written = model.generate(
        torch.tensor(rows), attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for row, tokens in enumerate(TEXTS):
        text = list(tokens)
        for _ in range(5):
            text.append(int(evaluated(mixture, text)[-1].argmax()))
        assert written[row, longest:].tolist() == text[len(tokens) :]


@pytest.mark.parametrize("memories", ["knn", "knn,cache"])
def test_masks_by_kind_of_layer_have_the_positions_of_evaluation(memories, tmp_path):
    """As transformers prepares them for a hybrid model, here after padding on the left."""
    lm = CausalLM(tiny("gemma2"), tiny_tokenizer(), name="gemma2")
    store = build(documents(12), tmp_path / "docs.store", lm=lm)
    mixture = Mixture.open(store.path, lm, memories=memories, use_tuned=False)
    mixture.tune(documents(8, start=40), online=False)
    mixture.weights = replace(mixture.weights, gate=OfPositionAlone(mixture.weights))
    model = KnnForCausalLM(mixture)
    assert model._keeps_state == ("cache" in memories)
    ids = torch.tensor([[0, 0, lm.start_token, *TEXTS[1]], [lm.start_token, *TEXTS[0][:5]]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        masks = create_masks_for_generate(lm.model.config, model.get_input_embeddings()(ids), mask, None)
        assert isinstance(masks, dict)
        right = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(model(ids, attention_mask=masks).logits, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(right[0, 2:], evaluated(mixture, TEXTS[1]), rtol=1e-4, atol=1e-4)
    masks.pop("full_attention")
    with pytest.raises(ModelError, match=r"Pass one mask of \(batch, tokens\)"):
        text_mask(masks, 2)


def test_masks_of_all_kinds_have_the_same_padding():
    right = torch.tensor([[0, 1, 1], [1, 1, 1]])
    causal = torch.ones(3, 3, dtype=torch.bool).tril() & right.bool()[:, None, None]  # (2, 1, 3, 3)
    added = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    for full in (right, causal, added):
        assert torch.equal(text_mask({"full_attention": full}, 2), right)
    assert torch.equal(text_mask({"full_attention": causal[1:]}, 2), right[1:].expand(2, -1))
    assert text_mask({"full_attention": None}, 2) is None
    assert text_mask(right, 2) is right


def test_stateful_model_generates_with_the_positions_of_evaluation(tmp_path):
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    lm = CausalLM(transformers.MambaForCausalLM(config), tiny_tokenizer(), key_layer="output", name="mamba")
    store = build(documents(12), tmp_path / "docs.store", lm=lm)
    mixture = opened(store.path, lm, documents(8, start=40))
    text = list(TEXTS[0])
    ids = torch.tensor([[lm.start_token, *text]])
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = KnnForCausalLM(mixture).generate(ids, **settings)
    for _ in range(5):
        text.append(int(evaluated(mixture, text)[-1].argmax()))
    assert written[0, 1:].tolist() == text


def test_embeddings_without_tokens_are_refused(mixture):
    model = KnnForCausalLM(mixture)
    embeddings = model.get_input_embeddings()(torch.tensor([TEXTS[0]]))
    with pytest.raises(ModelError, match="need the tokens"):
        model(inputs_embeds=embeddings)


@pytest.mark.parametrize("family", ["marian", "m2m_100"])
def test_targets_have_the_positions_of_evaluation(family, tmp_path):
    lm = pair_lm(family)
    store = build(pairs(30), tmp_path / "pairs.store", lm=lm)
    mixture = opened(store.path, lm, pairs(20, start=50))
    model = KnnForSeq2SeqLM(mixture)
    (pair,) = pairs(1, start=90)
    (read,) = mixture.read([lm.encode_document(pair)])
    right = mixture.predict(read.context).log_probs()
    target = torch.tensor([[*lm.start_tokens, *read.targets[:-1].tolist()]])
    source = lm.pad_sources(lm.encode_sources([pair.source_text]))
    before = len(lm.prefix_tokens)
    with torch.no_grad():
        whole = model(**source, decoder_input_ids=target).logits[0, before:]
        past, steps = None, []
        for position in range(target.shape[1]):
            step = target[:, position : position + 1]
            output = model(**source, decoder_input_ids=step, past_key_values=past, use_cache=True)
            past = output.past_key_values
            steps.append(output.logits[0])
    torch.testing.assert_close(whole, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(steps)[before:], right, rtol=1e-4, atol=1e-4)


def test_joined_contexts_keep_their_positions():
    one, other = (
        Context({}, where=Positions(torch.tensor(places), torch.tensor(tokens)))
        for places, tokens in (([3], [8]), ([0, 4], [1, 2]))
    )
    joined = place(join_contexts([one, other]))
    assert joined.positions.tolist() == [3, 0, 4]
    assert joined.tokens.tolist() == [8, 1, 2]
