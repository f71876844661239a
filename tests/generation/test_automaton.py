"""Entries that are followed while text is generated: their state follows every text, beam and cropped draft."""

from __future__ import annotations

import pytest
import torch

from helpers.models import logits_in_steps
from helpers.stores import WORDS, documents
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FOLLOW = MixtureOptions(automaton=AutomatonParams(min_pointers=2))
# Parts of stored documents, so that neighbours continue as the text does, and a text of other words.
PROMPTS = [" ".join(documents(40)[n].text.split()[:length]) for n, length in ((3, 9), (17, 4), (8, 14))]
PROMPTS.append(" ".join(WORDS[-6:]))


@pytest.fixture(scope="module")
def model(lm, store):
    return KnnForCausalLM(Mixture.open(store.path, lm, k=8, knn_temperature=4.0, lmbda=0.8, options=FOLLOW))


def whole_text(model, ids, prompt):
    """The log-probabilities of the generated tokens' positions by one pass, and which of them were searched.

    As in generation, nothing is known of the positions before the last one of the prompt.
    """
    with torch.no_grad():
        _, context = model.read(ids, use_cache=False, logits_to_keep=ids.shape[1] - prompt + 1)
        retrieved = model.mixture.retrieve(context)
        log_p = model.mixture.predict(context, retrieved).log_probs()
    return log_p, retrieved.neighbours[0].followed.searched


def searches_of(model, action):
    """The number of queries of all searches."""
    memory, counts = model.mixture.knn, []
    search = memory.index.search

    class Counted:
        metric = memory.index.metric

        def search(self, queries, k):
            counts.append(len(queries))
            return search(queries, k)

    kept, memory.index = memory.index, Counted()
    try:
        return action(), sum(counts)
    finally:
        memory.index = kept


@torch.no_grad()
def test_steps_with_a_cache_equal_the_whole_text_at_once(model):
    ids = torch.tensor([model.mixture.lm.prompt(documents(40)[5].text)])
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits_in_steps(model, ids).exp(), whole.exp(), rtol=1e-3, atol=1e-5)
    full = KnnForCausalLM(Mixture.open(model.mixture.path, model.mixture.lm, k=8, knn_temperature=4.0, lmbda=0.8))
    assert (full(ids, use_cache=False).logits.exp() - whole.exp()).abs().max() > 1e-3  # not the same by chance


@pytest.mark.parametrize("text", PROMPTS)
def test_generated_text_is_that_of_one_pass_with_as_many_searches(model, text):
    ids = torch.tensor([model.mixture.lm.prompt(text)])
    prompt = ids.shape[1]
    output, searches = searches_of(model, lambda: model.generate(ids, max_new_tokens=20, **SETTINGS))
    log_p, searched = whole_text(model, output[:, :-1], prompt)
    assert log_p.argmax(1).tolist() == output[0, prompt:].tolist()
    assert searches == int(searched.sum()) < 20


def test_texts_of_a_padded_batch_follow_their_own_entries(model):
    lm = model.mixture.lm
    texts = [lm.prompt(text) for text in PROMPTS]
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    output = model.generate(ids, attention_mask=mask, max_new_tokens=15, **SETTINGS)
    for row, text in zip(output, texts, strict=True):
        alone = model.generate(torch.tensor([text]), max_new_tokens=15, **SETTINGS)
        assert row[longest:].tolist() == alone[0, len(text) :].tolist()


@pytest.mark.parametrize("text", PROMPTS[:2])
def test_beams_score_each_hypothesis_by_the_entries_of_its_own_text(model, text):
    ids = torch.tensor([model.mixture.lm.prompt(text)])
    prompt = ids.shape[1]
    output = model.generate(
        ids,
        num_beams=5,
        num_return_sequences=5,
        max_new_tokens=7,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
    )
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        log_p, _ = whole_text(model, sequence[None, :-1], prompt)
        assert score.item() == pytest.approx(log_p.gather(1, sequence[prompt:, None]).sum().item(), abs=1e-3)


@pytest.mark.parametrize("text", PROMPTS)
def test_rejected_drafts_leave_no_entries_behind(model, text):
    ids = torch.tensor([model.mixture.lm.prompt(text)])
    plain = model.generate(ids, max_new_tokens=20, **SETTINGS)
    drafted = model.generate(ids, max_new_tokens=20, prompt_lookup_num_tokens=3, **SETTINGS)
    assert drafted.tolist() == plain.tolist()


def test_online_weights_and_skipped_searches_follow_too(lm, tmp_path):
    """With evidence, the prompt is predicted from its beginning, and positions are predicted twice."""
    path = tmp_path / "store"
    build(documents(20), path, lm=lm, window=lm.window(128))
    Mixture.open(path, lm, memories="knn,ngram", use_tuned=False).tune(documents(5, start=40), ks=[4, 8])
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=2), skip_fraction=0.3)
    model = KnnForCausalLM(Mixture.open(path, lm, options=options))
    assert model.mixture.layer.stateful
    ids = torch.tensor([lm.prompt(documents(20)[2].text)])
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(logits_in_steps(model, ids).exp(), whole.exp(), rtol=1e-3, atol=1e-5)


def test_saved_model_follows_entries_again(model, tmp_path):
    model.save_pretrained(tmp_path / "saved", copy_store=True)
    again = KnnForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.mixture.options.automaton == FOLLOW.automaton
    ids = torch.tensor([model.mixture.lm.prompt(PROMPTS[0])])
    found = [each.generate(ids, max_new_tokens=12, **SETTINGS).tolist() for each in (model, again)]
    assert found[0] == found[1]
