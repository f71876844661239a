"""KnnForCausalLM is a transformers model whose logits are the mixture, in every mode of generation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    TextIteratorStreamer,
    pipeline,
)

from helpers import oracle
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ModelError
from knnlm.generation.causal import KnnForCausalLM, generate_tokens
from knnlm.index.base import Neighbours
from knnlm.index.exact import ExactIndex
from knnlm.index.gpu.deferred import check_flag, is_deferred
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Source
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import Readers

FAMILIES = ["llama", "gpt2", "opt", "bloom", "falcon", "gpt_neox", "gemma3", "qwen3_moe", "mpt"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A tiny model of each family with its own store."""
    lm = CausalLM(tiny(request.param), tiny_tokenizer(), name=request.param)
    store = build(documents(8), tmp_path_factory.mktemp("generate") / "docs.store", lm=lm)
    return KnnForCausalLM(Mixture.open(store.path, lm, k=12, knn_temperature=4.0, lmbda=0.6))


@pytest.fixture(scope="module")
def llama(lm, store):
    return KnnForCausalLM(Mixture.open(store.path, lm, k=12, knn_temperature=4.0, lmbda=0.6))


def prompts(model):
    return [model.mixture.lm.encode(text) for text in ("The memory of a model", "When", "In 1998 the library had")]


def numpy_next(model, ids):
    """The mixture after one sequence, by brute force over the stored keys."""
    store = model.mixture.knn.store
    with torch.no_grad(), model.mixture.lm.key_layer.capture() as captured:
        logits = model.base(torch.tensor([ids])).logits[0, -1]
    rows = torch.arange(store.entry_count)
    p_knn = oracle.knn_distribution(
        captured[-1][0, -1].numpy(),
        store.take(rows).numpy(),
        store.values(rows).numpy(),
        model.mixture.lm.vocab_size,
        k=model.mixture.knn.k,
        knn_temperature=model.mixture.knn.knn_temperature,
    )
    return oracle.mix(oracle.softmax(logits.double().numpy()), p_knn, model.mixture.lmbda)


def greedy(model, ids, steps):
    """Greedy decoding with the oracle, without a cache."""
    ids = list(ids)
    for _ in range(steps):
        ids.append(int(numpy_next(model, ids).argmax()))
    return ids


def test_knn_model_is_a_transformers_model(llama):
    assert isinstance(llama, PreTrainedModel)
    assert isinstance(llama, GenerationMixin)
    assert llama.can_generate()


def test_logits_are_the_log_of_the_mixture(model):
    for ids in prompts(model):
        logits = model(torch.tensor([ids])).logits[0]
        assert logits.shape == (len(ids), model.mixture.lm.vocab_size)
        torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(ids)))
        np.testing.assert_allclose(logits[-1].detach().exp(), numpy_next(model, ids), rtol=5e-3, atol=1e-5)


def test_greedy_with_and_without_cache_equals_the_oracle(model):
    ids = prompts(model)[0]
    expected = greedy(model, ids, 8)
    for cached in (True, False):
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, use_cache=cached, eos_token_id=None
        )
        assert output[0].tolist() == expected


def test_batch_with_left_padding_gives_what_each_prompt_gives_alone(model):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.padding_side = "left"
    texts = prompts(model)
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=6, do_sample=False, eos_token_id=None)
    for row, ids in zip(output, texts, strict=True):
        alone = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert row[-6:].tolist() == alone[0, -6:].tolist()


def test_beams_find_a_continuation_at_least_as_probable_as_greedy(model):
    ids = torch.tensor([prompts(model)[0]])
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    scores = []
    for beams in (1, 6):
        output = model.generate(ids, num_beams=beams, **settings)
        log_p = model(output).logits[0, ids.shape[1] - 1 : -1]
        scores.append(log_p.gather(1, output[0, ids.shape[1] :, None]).sum().item())
    assert scores[1] >= scores[0] - 1e-3


def test_beams_score_each_hypothesis_by_its_own_past(llama):
    ids = torch.tensor([prompts(llama)[0]])
    output = llama.generate(
        ids,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=5,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
    )
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        log_p = llama(sequence[None]).logits[0, ids.shape[1] - 1 : -1]
        again = log_p.gather(1, sequence[ids.shape[1] :, None]).sum()
        assert score.item() == pytest.approx(again.item(), abs=2e-2)


def test_samples_follow_the_mixture(llama):
    ids = prompts(llama)[0]
    torch.manual_seed(0)
    output = llama.generate(
        torch.tensor([ids]), max_new_tokens=1, do_sample=True, top_k=0, num_return_sequences=4000, eos_token_id=None
    )
    counts = torch.bincount(output[:, -1], minlength=llama.mixture.lm.vocab_size).numpy() / 4000
    expected = numpy_next(llama, ids)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max() / 4000)
    torch.manual_seed(0)
    again = llama.generate(
        torch.tensor([ids]), max_new_tokens=1, do_sample=True, top_k=0, num_return_sequences=4000, eos_token_id=None
    )
    assert torch.equal(output, again)


class InexactIndex:
    """An index that is wrong while checks are deferred, and reports it."""

    def __init__(self, index, *, inexact):
        self.index, self.metric, self.inexact, self.searches = index, index.metric, inexact, 0

    def search(self, queries, k):
        self.searches += 1
        found = self.index.search(queries, k)
        wrong = is_deferred(queries) and self.inexact
        check_flag(torch.tensor([False, self.inexact]))
        return Neighbours(found.ids.flip(0) * 0, found.distances) if wrong else found


@pytest.mark.parametrize("inexact", [True, False])
def test_generation_with_deferred_checks_is_repeated_after_an_inexact_search(lm, store, inexact):
    settings = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "eos_token_id": None}

    def sampled(model, **more):
        torch.manual_seed(5)
        return model.generate(torch.tensor([prompts(model)[0]]), **settings, **more)

    index = InexactIndex(ExactIndex(store.keys), inexact=inexact)
    model = KnnForCausalLM(Mixture(lm, KnnMemory(store, index, k=12, knn_temperature=4.0), lmbda=0.9))
    model.deferred_checks = False
    expected, after = sampled(model), torch.rand(1)
    assert index.searches == 6
    model.deferred_checks = True
    assert torch.equal(sampled(model), expected)
    assert torch.rand(1) == after
    assert index.searches == 6 + (12 if inexact else 6)
    # Streamed tokens cannot be taken back, so every token is checked.
    streamer = TextIteratorStreamer(model.tokenizer, skip_prompt=True)
    assert torch.equal(sampled(model, streamer=streamer), expected)
    assert index.searches == 6 + (12 if inexact else 6) + 6


def test_undefined_hidden_states_raise_also_with_deferred_checks(lm, store):
    model = KnnForCausalLM(Mixture(lm, KnnMemory(store, ExactIndex(store.keys), k=12, knn_temperature=4.0), lmbda=0.9))
    model.deferred_checks = True
    embeddings = lm.model.get_input_embeddings().weight
    original = embeddings.data.clone()
    try:
        embeddings.data.fill_(torch.nan)
        with pytest.raises(ModelError, match="infinite or undefined"):
            model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False)
    finally:
        embeddings.data.copy_(original)


def test_streamed_text_equals_the_generated_text(llama):
    ids = torch.tensor([prompts(llama)[0]])
    streamer = TextIteratorStreamer(llama.tokenizer, skip_prompt=True)
    output = llama.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, streamer=streamer)
    assert "".join(streamer) == llama.tokenizer.decode(output[0, ids.shape[1] :])


def test_knn_model_works_in_a_pipeline(llama):
    write = pipeline("text-generation", model=llama, tokenizer=llama.tokenizer)
    output = write("The memory of a model", max_new_tokens=6, do_sample=False, eos_token_id=None)
    ids = llama.mixture.lm.encode("The memory of a model")
    assert output[0]["generated_text"] == llama.tokenizer.decode(greedy(llama, ids, 6))


def test_base_model_is_unchanged_by_wrapping(lm, store):
    ids = torch.tensor([lm.encode("The memory of a model")])
    forward, methods = lm.model.forward, set(lm.model.__dict__)
    before = lm.model(ids).logits
    written = lm.model.generate(ids, max_new_tokens=6, do_sample=False)
    attention = lm.model.config._attn_implementation
    wrapped = KnnForCausalLM(Mixture.open(store.path, lm, lmbda=0.9))
    wrapped.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(lm.model(ids).logits, before)
    assert torch.equal(lm.model.generate(ids, max_new_tokens=6, do_sample=False), written)
    assert lm.model.forward == forward
    assert set(lm.model.__dict__) == methods
    assert lm.model.config._attn_implementation == attention
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())


def test_loss_is_the_mean_of_minus_log_p(llama):
    ids = torch.tensor([prompts(llama)[0]])
    output = llama(ids, labels=ids)
    expected = -np.mean(
        [np.log(numpy_next(llama, ids[0, : n + 1].tolist())[ids[0, n + 1]]) for n in range(ids.shape[1] - 1)]
    )
    assert output.loss.item() == pytest.approx(expected, rel=1e-3)


def test_small_probabilities_do_not_underflow_and_gradients_flow(lm, store):
    sharp = tiny("llama")
    with torch.no_grad():
        sharp.lm_head.weight *= 40
    sharp_lm = CausalLM(sharp, tiny_tokenizer(), name="sharp")
    readers = Readers(sharp_lm)
    source = Source(readers.add(lm), lm.key_layer.place, lm.key_layer.layer)
    memory = KnnMemory(store, ExactIndex(store.keys), k=5, knn_temperature=1.0, source=source)
    ids = torch.tensor([lm.encode("The memory of a model")])
    expected = sharp(ids).logits.log_softmax(-1)
    assert expected.min() < -120
    assert expected.exp().min() == 0
    mixture = Mixture(sharp_lm, memory, lmbda=0.0, readers=readers)
    wrapped = KnnForCausalLM(mixture)
    torch.testing.assert_close(wrapped(ids).logits, expected)
    wrapped.mixture.lmbda = 0.3
    wrapped(ids, labels=ids).loss.backward()
    gradient = sharp.lm_head.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_state_space_model_generates(tmp_path):
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    lm = CausalLM(transformers.MambaForCausalLM(config), tiny_tokenizer(), key_layer="output", name="mamba")
    build(documents(3), tmp_path / "docs.store", lm=lm, window=lm.window(64))
    model = KnnForCausalLM(Mixture.open(tmp_path / "docs.store", lm, k=8, knn_temperature=4.0, lmbda=0.6))
    ids = lm.encode("The memory of a model")
    output = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert output[0].tolist() == greedy(model, ids, 6)


def test_settings_changed_after_opening_are_saved_also_twice(lm, store, tmp_path):
    model = KnnForCausalLM(Mixture.open(store.path, lm, lmbda=0.2))
    model.mixture.lmbda = 0.9
    for _ in range(2):
        model.save_pretrained(tmp_path / "saved", copy_store=True)
    loaded = KnnForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.mixture.lmbda == 0.9
    loaded.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    assert KnnForCausalLM.from_pretrained(tmp_path / "moved").mixture.knn.store.entry_count == store.entry_count


def test_only_predicted_positions_are_searched(llama):
    query_counts = []
    memory = llama.mixture.knn
    original = memory.index.search
    memory.index.search = lambda queries, k: query_counts.append(len(queries)) or original(queries, k)
    try:
        ids = torch.tensor([prompts(llama)[0]])
        llama.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    finally:
        memory.index.search = original
    assert query_counts == [1, 1, 1]


@pytest.mark.parametrize("copied", [False, True])
def test_saving_and_loading_gives_the_same_model(model, tmp_path, copied):
    model.save_pretrained(tmp_path / "saved", copy_store=copied)
    ids = torch.tensor([prompts(model)[0]])
    for loaded in (
        KnnForCausalLM.from_pretrained(tmp_path / "saved"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
    ):
        assert isinstance(loaded, KnnForCausalLM)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        assert loaded.mixture.lmbda == model.mixture.lmbda
        path = loaded.mixture.knn.store.path
        assert path == (tmp_path / "saved" / "store" if copied else model.mixture.knn.store.path)
    # The base model inside is an ordinary folder that needs no knnlm.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "base")
    torch.testing.assert_close(plain(ids).logits, model.base(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("The")["input_ids"]


def test_saved_model_whose_store_is_gone_names_its_path(lm, tmp_path):
    store = build(documents(2), tmp_path / "docs.store", lm=lm)
    KnnForCausalLM(Mixture.open(store.path, lm)).save_pretrained(tmp_path / "saved")
    (tmp_path / "docs.store").rename(tmp_path / "moved")
    with pytest.raises(DatastoreError, match=str(tmp_path / "docs.store")):
        KnnForCausalLM.from_pretrained(tmp_path / "saved")


def test_from_store_takes_settings(lm, store):
    opened = KnnForCausalLM.from_store(store.path, lm, k=5, lmbda=0.2)
    assert (opened.config.k, opened.config.lmbda) == (5, 0.2)
    assert Datastore.open(opened.config.store).entry_count == store.entry_count


def test_generated_text_is_the_continuation_of_the_prompt(llama):
    prompt = "The memory of a model"
    ids = llama.mixture.lm.prompt(prompt)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    text = llama.mixture.generate(prompt, **settings)
    assert text == llama.tokenizer.decode(greedy(llama, ids, 6)[len(ids) :])
    alone = generate_tokens(llama.mixture, prompt, use_memory=False, **settings)
    assert alone == llama.base.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
    sampled = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "seed": 3}
    assert llama.mixture.generate(prompt, **sampled) == llama.mixture.generate(prompt, **sampled)
