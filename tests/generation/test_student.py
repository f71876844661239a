"""Drafts of a decoder for the mixture that it is part of."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor

from helpers.adapters import random_adapters
from helpers.drafts import TEXTS, prompts, stored, tuned_mixture
from helpers.models import tiny, tiny_tokenizer
from knnlm.datastore.suffix_array import open_suffix_array
from knnlm.generation import student
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.draft import STUDENT, Drafter, StepTimes
from knnlm.generation.speculation import describe_drafts, drafting_student, make_drafter
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.shared import TopLM
from knnlm.memories.decoder import DecoderMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import Readers


def fast():
    """The times of drafts that cost nothing, so that much is drafted and rejected."""
    return StepTimes(extra=0.0, each=0.001, weight=1e9)


def slow():
    """The times of drafts that are never made."""
    return StepTimes(extra=1e3, each=1.0, weight=1e9)


def eager(model, *, copies=False):
    """A drafter that nearly always drafts tokens of the student or, with `copies`, of all sources."""
    suffixes = None if model.mixture.store is None else open_suffix_array(model.mixture.store)
    identity = make_drafter(model.mixture).identity
    copying = StepTimes(extra=0.5, each=0.001, weight=1e9) if copies else slow()
    return Drafter(suffixes, copying, student_times=fast(), identity=identity)


def save(folder, family="llama", *, seed=0, model=None):
    (tiny(family, seed=seed) if model is None else model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a student with fewer blocks, and a student of which only adapters are stored."""
    folder = tmp_path_factory.mktemp("student")
    save(folder / "model")
    save(folder / "student", seed=4)
    random_adapters(folder / "adapters", tiny("llama"), str(folder / "model"))
    cut = tiny("llama", seed=4)
    del cut.model.layers[1]
    cut.config.num_hidden_layers = len(cut.model.layers)
    cut.config.layer_types = None
    save(folder / "cut", model=cut)
    return folder


def open_lm(folder):
    return CausalLM.open(str(folder), device="cpu")


@pytest.fixture(scope="module")
def lm(folder):
    return open_lm(folder / "model")


@pytest.fixture(scope="module")
def path(lm, folder):
    return stored(folder / "docs.store", lm)


def opened(path, student, memories="knn:0.1,decoder:0.7", *, lm=None, top=None):
    """A mixture of models in float64, so that passes over one token and over several have equal results."""
    named = memories.replace("decoder", f"decoder={student}").replace("TOP", f"decoder={top}")
    lm = open_lm(path.parent / "model") if lm is None else lm
    return double(Mixture.open(path, lm, memories=named, use_tuned=False, k=8 if "knn" in memories else None))


def double(mixture):
    for model in (*mixture.readers.models, *filter(None, mixture.readers.tops.values())):
        model.model.double()
    return KnnForCausalLM(mixture)


@pytest.fixture(scope="module")
def tuned(lm, folder):
    """With a gate and online weights; the student reads the store, too."""
    student = open_lm(folder / "student")
    memories = f"knn,ngram,decoder={folder / 'student'}"
    mixture = tuned_mixture(folder / "tuned.store", open_lm(folder / "model"), reader=student, memories=memories)
    return double(mixture)


def check_same(model, lm, count, *, copies=False, **settings):
    """Texts with drafts against those without; some tokens of the student are accepted, and some are not."""
    drafter, drafted, accepted = eager(model, copies=copies), 0, 0
    for ids in prompts(lm, count):
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, draft=drafter, **settings), expected)
        drafted += drafter.drafted_from[STUDENT]
        accepted += drafter.accepted_from[STUDENT]
    assert 0 < accepted < drafted
    return accepted / drafted


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("decoder", ["student", "cut", "adapters"])
def test_text_with_drafts_of_a_student_is_the_text_without(lm, path, folder, decoder, sampled):
    model = opened(path, folder / decoder)
    check_same(model, lm, 8, max_new_tokens=14, do_sample=sampled, seed=7, temperature=0.6)


@pytest.mark.parametrize("sampled", [False, True])
def test_online_weights_are_rolled_back_with_rejected_tokens(lm, tuned, sampled):
    assert tuned.mixture.layer.stateful
    check_same(tuned, lm, 8, max_new_tokens=14, do_sample=sampled, seed=3)


def test_all_sources_draft_for_one_text(lm, path, folder):
    model = opened(path, folder / "student", "knn:0.1,decoder:0.7")
    check_same(model, lm, 12, copies=True, max_new_tokens=24)
    drafter = eager(model, copies=True)
    found = {}
    for ids in prompts(lm, 12):
        written = model.generate(ids, max_new_tokens=24, draft=drafter)[0, ids.shape[1] :].tolist()
        described = describe_drafts(drafter, model.mixture.store, written)
        for name in ("drafted", "accepted"):
            assert sum(counts[name] for counts in described["sources"].values()) == described[name]
        for source, counts in described["sources"].items():
            found[source] = found.get(source, 0) + counts["accepted"]
        assert sum(part["tokens"] for part in described["copied"]) >= described["sources"]["store"]["accepted"]
    assert found["store"]
    assert found["student"]


def test_noise_of_a_sample_is_that_of_the_text(lm, path, folder):
    """With the weight of the student near 1, a sample of the mixture is nearly always that of the student."""
    model = opened(path, folder / "student", "decoder:0.999")
    drafter, drafted, accepted = eager(model), 0, 0
    settings = {"max_new_tokens": 20, "do_sample": True, "seed": 5, "temperature": 1.3, "top_k": 30}
    for ids in prompts(lm, 6):
        model.generate(ids, draft=drafter, **settings)
        drafted, accepted = drafted + drafter.drafted, accepted + drafter.accepted
    assert accepted > 0.95 * drafted > 60


def test_penalties_and_forbidden_tokens_are_those_of_the_text(lm, path, folder, monkeypatch):
    model = opened(path, folder / "student", "decoder:0.8")
    (ids,) = prompts(lm, 1)
    forbidden = [[int(token)] for token in model.generate(ids, max_new_tokens=10)[0, -2:]]
    settings = {"repetition_penalty": 1.5, "bad_words_ids": forbidden, "min_new_tokens": 5}
    share = check_same(model, lm, 8, max_new_tokens=14, **settings)
    monkeypatch.setattr(student, "_APPLIED", ())
    assert check_same(model, lm, 8, max_new_tokens=14, **settings) < 0.8 * share


class Counted(LogitsProcessor):
    """A processor of the user, that counts its calls."""

    calls = 0

    def __call__(self, _, scores):
        self.calls += 1
        return scores


def test_processors_of_the_user_are_called_to_verify_alone(lm, path, folder):
    model = opened(path, folder / "student")
    (ids,) = prompts(lm, 1)
    counted, drafter = Counted(), eager(model)
    written = model.generate(ids, draft=drafter, max_new_tokens=14, logits_processor=[counted])
    passes = written.shape[1] - ids.shape[1] - drafter.accepted
    assert counted.calls == passes + drafter.drafted


def test_each_model_reads_each_drafted_token_once(lm, path, folder):
    model = opened(path, folder / "student")
    reading = drafting_student(model.mixture)
    read = {"model": [], "student": []}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, __, given, own=own: own.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        for own, module in zip(read.values(), (model.base, reading.model.model), strict=True)
    ]
    (ids,) = prompts(lm, 1)
    drafter = eager(model)
    model.generate(ids, max_new_tokens=30, draft=drafter)
    for hook in hooks:
        hook.remove()
    passes = 30 - drafter.accepted
    assert drafter.accepted
    assert len(read["model"]) == passes
    assert sum(read["model"]) == sum(read["student"]) == ids.shape[1] - 1 + passes + drafter.drafted
    assert set(read["student"][1:]) == {1}


@pytest.mark.parametrize("padded", [0, 3])
def test_verified_predictions_are_those_of_the_whole_text(lm, tuned, path, folder, padded):
    """What the student computed while it drafted stands for its pass over the text."""
    settings = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_logits": True}
    for model in (opened(path, folder / "student"), tuned):
        drafter, accepted = eager(model), 0
        for ids in prompts(lm, 4):
            mask = torch.ones(1, padded + ids.shape[1], dtype=torch.long)
            mask[:, :padded] = 0
            given = torch.cat([torch.zeros(1, padded, dtype=torch.long), ids], 1)
            found = model.generate(given, attention_mask=mask, draft=drafter, **settings)
            expected = model.generate(given, attention_mask=mask, **settings)
            assert torch.equal(found.sequences, expected.sequences)
            torch.testing.assert_close(torch.cat(found.logits), torch.cat(expected.logits), rtol=1e-5, atol=1e-5)
            accepted += drafter.accepted
        assert accepted


def test_whole_texts_are_scored_as_without_a_cache(lm, path, folder):
    model = opened(path, folder / "student")
    (ids,) = prompts(lm, 1)
    drafter = eager(model)
    found = model.generate(ids, draft=drafter, max_new_tokens=16, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        whole = model(found.sequences).logits[0, ids.shape[1] - 1 : -1]
    assert drafter.accepted
    torch.testing.assert_close(torch.cat(found.logits), whole.float(), rtol=1e-5, atol=1e-5)


def test_student_with_a_sliding_window_is_rolled_back(tmp_path):
    """Its cache forgets tokens, so that it must record what a rejected draft has replaced."""
    second = save(tmp_path / "second", "gemma3", seed=4)
    lm = CausalLM(tiny("gemma3"), tiny_tokenizer(), name="gemma3")
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(128))
    check_same(opened(store.path, second, "knn:0.2,decoder:0.6", lm=lm), lm, 2, max_new_tokens=90)


def test_text_ends_at_a_stop_string_inside_a_draft_of_the_student(lm, path, folder):
    model = opened(path, folder / "student", "decoder:0.9")
    (ids,) = prompts(lm, 1)
    whole, drafter, stopped = model.generate(ids, max_new_tokens=20), eager(model), 0
    for place in range(ids.shape[1], whole.shape[1]):
        settings = {"stop_strings": [lm.tokenizer.decode(whole[0, place])], "max_new_tokens": 20}
        expected = model.generate(ids, tokenizer=lm.tokenizer, **settings)
        assert torch.equal(model.generate(ids, tokenizer=lm.tokenizer, draft=drafter, **settings), expected)
        stopped += expected.shape[1] < whole.shape[1]
    assert stopped > 5


def test_student_without_a_store_drafts(folder):
    readers = Readers(lm := open_lm(folder / "model"))
    mixture = Mixture(
        lm, DecoderMemory(readers.add(open_lm(folder / "student"))), lmbda=0.8, readers=readers, path=folder
    )
    check_same(double(mixture), lm, 8, max_new_tokens=14)
    drafter = make_drafter(mixture)
    assert describe_drafts(drafter, mixture.store, [])["sources"][STUDENT] == {"drafted": 0, "accepted": 0}


def test_which_decoders_draft(lm, path, folder, tmp_path, monkeypatch):
    model = opened(path, folder / "student")
    assert drafting_student(model.mixture).model.name == str(folder / "student")
    assert make_drafter(model.mixture)._student_times is not None
    top = tiny("llama")
    with torch.no_grad():
        top.model.layers[-1].mlp.down_proj.weight.mul_(1.5)
    save(tmp_path / "top", model=top)
    both = opened(path, folder / "student", "TOP:0.3,decoder:0.4", top=tmp_path / "top")
    assert isinstance(both.mixture.readers.tops[1], TopLM)
    assert drafting_student(both.mixture).model.name == str(folder / "student")
    check_same(both, lm, 4, max_new_tokens=14)
    alone = opened(path, tmp_path / "top")  # it reads what the language model computes, so it cannot be first
    same = opened(path, folder / "model")
    for other in (alone, same, opened(path, folder / "student", "knn:0.3")):
        assert drafting_student(other.mixture) is None
        assert make_drafter(other.mixture)._student_times is None
        (ids,) = prompts(lm, 1)
        expected = other.generate(ids, max_new_tokens=8)
        assert torch.equal(other.generate(ids, max_new_tokens=8, draft=eager(other)), expected)
    monkeypatch.setattr(type(model.base), "_is_stateful", True)
    assert drafting_student(model.mixture) is None


def test_student_that_drafts_nothing_costs_no_pass(lm, path, folder):
    """Where no draft is expected to pay, the student reads a token with the language model, as without drafts."""
    model = opened(path, folder / "student")
    (ids,) = prompts(lm, 1)
    drafter = Drafter(None, slow(), student_times=slow())
    expected = model.generate(ids, max_new_tokens=10)
    asked = []
    drafter._ask = lambda propose, *rest: Drafter._ask(drafter, lambda drafted: asked.append(propose(drafted)), *rest)
    assert torch.equal(model.generate(ids, max_new_tokens=10, draft=drafter), expected)
    assert drafter.drafted == 0
    assert not asked
