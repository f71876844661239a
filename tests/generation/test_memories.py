"""Generation with memories that depend on the text: their state follows every beam."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from helpers.models import logits_in_steps, tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.errors import ModelError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

FAMILIES = ["llama", "gpt2", "mistral", "gemma3", "qwen3_moe", "bloom"]
PROMPT = "The memory of a model is the memory of a model and the memory"
SETTINGS = {"do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    folder = tmp_path_factory.mktemp("second") / "model"
    torch.manual_seed(11)
    tiny("gpt2", seed=4).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, second, tmp_path_factory):
    """A tiny model of each family with all memories that depend on the tokens read."""
    lm = CausalLM(tiny(request.param), tiny_tokenizer(), name=request.param)
    path = tmp_path_factory.mktemp("memories") / "docs.store"
    store = build(documents(8), path, lm=lm, window=lm.window(128))  # as far as the second model reads
    memories = f"knn:0.1,cache:0.3,ngram:0.2,ngram-cache:0.1,decoder={second}:0.2"
    options = MixtureOptions(cache_generated=True)  # as in evaluation, where all tokens are given
    settings = {"k": 12, "knn_temperature": 4.0, "use_tuned": False}
    return KnnForCausalLM(Mixture.open(store.path, lm, memories=memories, options=options, **settings))


def prompt(model):
    return model.mixture.lm.prompt(PROMPT)


def by_evaluation(model, ids):
    """Log-probabilities at every position, as evaluation computes them; the first id is the start token."""
    mixture = model.mixture
    rows = {}
    for batch in mixture.read([[*ids[1:], 0]]):  # one more target, so that the last position is read too
        dense = mixture.predict(batch.context).log_probs()
        rows |= dict(zip(batch.rows.tolist(), dense, strict=True))
    return torch.stack([rows[row] for row in range(len(ids))])


def test_whole_text_is_scored_as_in_evaluation(model):
    ids = prompt(model)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits.exp(), by_evaluation(model, ids).exp(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(ids)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_steps_with_a_cache_equal_the_whole_text_at_once(model):
    ids = torch.tensor([prompt(model)])
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits_in_steps(model, ids).exp(), whole.exp(), rtol=1e-3, atol=1e-5)


def test_greedy_with_and_without_a_cache_are_the_same(model):
    ids = torch.tensor([prompt(model)])
    output = [model.generate(ids, max_new_tokens=10, use_cache=cached, **SETTINGS).tolist() for cached in (True, False)]
    assert output[0] == output[1]


def test_batch_with_left_padding_gives_what_each_prompt_gives_alone(model):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.padding_side = "left"
    texts = [model.mixture.lm.encode(text) for text in (PROMPT, "When", "In 1998 the library had the library")]
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=8, **SETTINGS)
    for row, ids in zip(output, texts, strict=True):
        alone = model.generate(torch.tensor([ids]), max_new_tokens=8, **SETTINGS)
        assert row[-8:].tolist() == alone[0, -8:].tolist()


def test_beams_score_each_hypothesis_by_its_own_past(model):
    ids = torch.tensor([prompt(model)])
    output = model.generate(
        ids,
        num_beams=5,
        num_return_sequences=5,
        max_new_tokens=6,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
    )
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        log_p = by_evaluation(model, sequence.tolist())[ids.shape[1] - 1 : -1]
        again = log_p.gather(1, sequence[ids.shape[1] :, None]).sum()
        assert score.item() == pytest.approx(again.item(), abs=2e-2)


def test_rejected_speculative_tokens_leave_no_trace_in_the_state(model):
    ids = torch.tensor([prompt(model)])
    plain = model.generate(ids, max_new_tokens=10, **SETTINGS)
    speculated = model.generate(ids, max_new_tokens=10, prompt_lookup_num_tokens=3, **SETTINGS)
    assert speculated.tolist() == plain.tolist()


def test_static_or_offloaded_cache_is_refused(model):
    ids = torch.tensor([prompt(model)])
    config = model.base.config.get_text_config()
    caches = [transformers.StaticCache(config=config, max_cache_len=64)]
    caches.append(transformers.DynamicCache(config=config, offloading=True) if torch.cuda.is_available() else caches[0])
    for cache in caches:
        with pytest.raises(ModelError, match="cannot carry"):
            model(ids, past_key_values=cache, use_cache=True)


def test_positions_out_of_order_are_refused(model):
    ids = torch.tensor([prompt(model)])
    with torch.no_grad():
        whole = model(ids).logits
        some = model(ids, logits_to_keep=torch.tensor([2, 3, 4])).logits
        torch.testing.assert_close(some, whole[:, 2:5], rtol=1e-4, atol=1e-4)
        for wrong in ([0, 2, 1, 3], [5, 5, 7]):
            with pytest.raises(ModelError, match="consecutive"):
                model(ids, logits_to_keep=torch.tensor(wrong))


def test_stateful_model_is_read_from_the_start_at_each_step(tmp_path):
    config = transformers.RecurrentGemmaConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, lru_width=32,
        attention_window_size=16, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = CausalLM(transformers.RecurrentGemmaForCausalLM(config).eval(), tiny_tokenizer(), name="recurrent")
    store = build(documents(4), tmp_path / "docs.store", lm=lm, window=lm.window(64))
    model = KnnForCausalLM(Mixture.open(store.path, lm, memories="knn:0.1,cache:0.5,ngram:0.3", use_tuned=False))
    ids = torch.tensor([prompt(model)])
    output = [model.generate(ids, max_new_tokens=6, use_cache=cached, **SETTINGS).tolist() for cached in (True, False)]
    assert output[0] == output[1]


@pytest.mark.parametrize("kind", ["given", "one memory, fitted", "gated, some searches skipped"])
def test_saved_mixture_is_loaded_unchanged(lm, tmp_path, kind):
    saved = KnnForCausalLM(build_mixture(lm, tmp_path / "docs.store", kind))
    saved.save_pretrained(tmp_path / "saved", copy_store=True)
    again = KnnForCausalLM.from_pretrained(tmp_path / "saved").mixture
    assert again.labels == saved.mixture.labels
    assert [getattr(one, "settings", None) for one in again.memories] == [
        getattr(one, "settings", None) for one in saved.mixture.memories
    ]
    text = documents(3, start=60)
    assert again.evaluate(text).perplexity == pytest.approx(saved.mixture.evaluate(text).perplexity, rel=1e-4)
    assert getattr(again.weights, "fraction", 0) == getattr(saved.mixture.weights, "fraction", 0)


def build_mixture(lm, path, kind):
    """Return a mixture of one kind over a new store."""
    build(documents(10), path, lm=lm)
    if kind == "given":
        return Mixture.open(
            path, lm, memories="knn:0.1,cache=20:0.4,ngram:0.2", k=8, knn_temperature=30.0, use_tuned=False
        )
    memories = "knn" if kind == "one memory, fitted" else "knn,ngram"
    fresh = Mixture.open(path, lm, memories=memories, use_tuned=False)
    fresh.tune(documents(6, start=30), weights="fitted" if memories == "knn" else "gated")
    return Mixture.open(path, lm, options=MixtureOptions(skip_fraction=None if memories == "knn" else 0.5))


def test_cache_filled_by_the_base_model_is_refused(model):
    ids = torch.tensor([prompt(model)])
    with torch.no_grad():
        past = model.base(ids[:, :-1], use_cache=True).past_key_values
    with pytest.raises(ModelError, match="filled without the memories"):
        model(ids[:, -1:], past_key_values=past)


def test_tuned_mixture_is_saved_with_its_memories(model, tmp_path):
    mixture = model.mixture
    labels = ",".join(mixture.labels)
    fresh = Mixture.open(mixture.store.path, mixture.lm, memories=labels, use_tuned=False)
    fresh.tune(documents(3, start=60), weights="fitted")
    tuned = KnnForCausalLM(Mixture.open(mixture.store.path, mixture.lm))
    tuned.save_pretrained(tmp_path / "saved")
    again = KnnForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([prompt(model)])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)
