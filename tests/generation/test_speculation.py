"""Text that is generated with drafts is the text without them."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from helpers.drafts import TEXTS, prompts, stored, tuned_mixture
from helpers.models import tiny, tiny_tokenizer
from knnlm.datastore.remove import remove
from knnlm.datastore.suffix_array import open_suffix_array
from knnlm.errors import ParameterError
from knnlm.generation.causal import KnnForCausalLM, generate_tokens
from knnlm.generation.draft import Drafter, StepTimes
from knnlm.generation.speculation import KeyedSample, describe_drafts, gumbel, make_drafter
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture

MEMORIES = ["knn:0.7", "knn:0.5,ngram:0.4", "knn:0.3,cache:0.3,ngram:0.2,ngram-cache:0.1"]


def eager(model):
    """A drafter that nearly always drafts, so that much is rejected."""
    store = model.mixture.store
    times = StepTimes(extra=0.0, each=0.001, weight=1e9)
    return Drafter(open_suffix_array(store), times, identity=make_drafter(model.mixture).identity)


@pytest.fixture(scope="module")
def lm():
    return CausalLM(tiny("llama").double(), tiny_tokenizer(), name="llama")


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    return stored(tmp_path_factory.mktemp("draft") / "docs.store", lm)


@pytest.fixture(scope="module")
def tuned(lm, tmp_path_factory):
    """With a gate and online weights."""
    return KnnForCausalLM(tuned_mixture(tmp_path_factory.mktemp("draft") / "tuned.store", lm))


class Totals:
    """Drafted and accepted tokens of several texts."""

    def __init__(self):
        self.drafted = self.accepted = 0

    def add(self, drafter):
        self.drafted += drafter.drafted
        self.accepted += drafter.accepted

    @property
    def some_rejected(self):
        return 0 < self.accepted < self.drafted


def check_same(model, lm, count, **settings):
    """Texts with drafts against those without; some tokens are accepted and some are not."""
    drafter, totals = eager(model), Totals()
    for ids in prompts(lm, count):
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, draft=drafter, **settings), expected)
        totals.add(drafter)
    assert totals.some_rejected


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("memories", MEMORIES)
def test_text_with_drafts_is_the_text_without(lm, path, memories, sampled):
    model = KnnForCausalLM(Mixture.open(path, lm, memories=memories, use_tuned=False, k=8, knn_temperature=4.0))
    check_same(model, lm, 12, max_new_tokens=14, do_sample=sampled, seed=7, temperature=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_thousand_texts_with_drafts_are_those_without(lm, path, tuned, sampled, online):
    options = {"memories": MEMORIES[-1], "use_tuned": False, "k": 8, "knn_temperature": 4.0}
    model = tuned if online else KnnForCausalLM(Mixture.open(path, lm, **options))
    check_same(model, lm, 1000, max_new_tokens=14, do_sample=sampled, seed=7, temperature=0.6)


@pytest.mark.parametrize("sampled", [False, True])
def test_online_weights_are_rolled_back_with_rejected_tokens(lm, tuned, sampled):
    assert tuned.mixture.layer.stateful
    check_same(tuned, lm, 12, max_new_tokens=14, do_sample=sampled, seed=3)


def test_penalties_and_forbidden_tokens_are_applied_before_verification(lm, path):
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.8", use_tuned=False, k=4, knn_temperature=1.0))
    (ids,) = prompts(lm, 1)
    forbidden = [[int(token)] for token in model.generate(ids, max_new_tokens=10)[0, -2:]]
    check_same(model, lm, 8, max_new_tokens=14, repetition_penalty=1.5, bad_words_ids=forbidden, min_new_tokens=5)


def test_second_reader_with_a_sliding_window_is_rolled_back(tmp_path):
    """Its cache forgets tokens, so that it must record what a rejected draft has replaced."""
    folder = tmp_path / "second"
    tiny("gemma3", seed=4).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    lm = CausalLM(tiny("gemma3"), tiny_tokenizer(), name="gemma3")
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(128))
    mixture = Mixture.open(store.path, lm, memories=f"knn:0.4,decoder={folder}:0.4", use_tuned=False, k=2)
    check_same(KnnForCausalLM(mixture), lm, 2, max_new_tokens=90)


@pytest.mark.parametrize("by_config", [False, True])
def test_text_ends_at_a_stop_string_inside_a_draft(lm, path, by_config):
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.9", use_tuned=False, k=1, knn_temperature=1.0))
    (ids,) = prompts(lm, 1)
    drafter = eager(model)
    whole = model.generate(ids, max_new_tokens=20)
    stopped = 0
    for place in range(ids.shape[1], whole.shape[1]):
        stop = {"stop_strings": [lm.tokenizer.decode(whole[0, place])], "max_new_tokens": 20}
        settings = {"generation_config": GenerationConfig(**stop)} if by_config else stop
        settings["tokenizer"] = lm.tokenizer
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, draft=drafter, **settings), expected)
        count = expected.shape[1] - ids.shape[1]
        described = describe_drafts(drafter, model.mixture.store, expected[0, ids.shape[1] :].tolist())
        assert all(part["start"] + part["tokens"] <= count for part in described["copied"])
        stopped += expected.shape[1] < whole.shape[1]
    assert stopped > 5


def test_fewer_passes_are_needed_where_the_store_has_the_text(lm, path):
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.9,ngram:0.09", use_tuned=False, k=1))
    tokens = lm.encode(TEXTS[2].text)
    ids, passes = torch.tensor([[lm.start_token, *tokens[:8]]]), []
    model.base.register_forward_hook(lambda *_: passes.append(1))
    counts = []
    for draft in (False, eager(model)):
        passes.clear()
        written = model.generate(ids, max_new_tokens=24, draft=draft)
        counts.append(len(passes))
    assert counts[0] == 24
    assert counts[1] < 12
    assert draft.accepted == 24 - counts[1]
    assert make_drafter(model.mixture)._store.suffixes is make_drafter(model.mixture)._store.suffixes
    assert written[0, -24:].tolist() == model.generate(ids, max_new_tokens=24)[0, -24:].tolist()


def test_copied_parts_are_found_in_their_documents(lm, path):
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.9", use_tuned=False, k=1))
    store, drafter = model.mixture.store, eager(model)
    every = {document.id: document for document in store.documents()}
    parts = []
    for number in range(5):
        ids = torch.tensor([[lm.start_token, *lm.encode(TEXTS[number].text)[:6]]])
        written = model.generate(ids, max_new_tokens=24, draft=drafter)[0, ids.shape[1] :].tolist()
        described = describe_drafts(drafter, store, written)
        for part in described["copied"]:
            first = every[part["document"]].first_entry + part["offset"]
            stored = store.values(torch.arange(first, first + part["tokens"])).tolist()
            assert written[part["start"] : part["start"] + part["tokens"]] == stored
            assert part["source"] == every[part["document"]].source
        parts += described["copied"]
        copied = sum(span.count for span in drafter.copied)
        joined = len(drafter.copied) - len(described["copied"])
        assert sum(part["tokens"] for part in described["copied"]) == copied + joined  # and the tokens between
    assert max(part["tokens"] for part in parts) >= 8


def test_sampled_tokens_have_the_probabilities_of_their_scores():
    """χ² of the tokens sampled at many positions, with 11 degrees of freedom."""
    probs = torch.softmax(torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 0)
    count = 6000
    sample = KeyedSample(5)
    tokens = [int(sample(torch.zeros(1, place), probs.log()[None]).argmax()) for place in range(count)]
    observed = torch.bincount(torch.tensor(tokens), minlength=12)
    statistic = ((observed - count * probs).square() / (count * probs)).sum()
    assert float(statistic) < 31.3  # 0.1 %


def test_noise_depends_on_seed_row_and_position():
    assert torch.equal(gumbel(1, 2, 3, 50), gumbel(1, 2, 3, 50))
    noises = [gumbel(*key, 50) for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2**63 - 1, 0, 0))]
    assert all(not torch.allclose(one, other) for place, one in enumerate(noises) for other in noises[:place])
    assert all(noise.isfinite().all() for noise in noises)


def test_seed_decides_a_sampled_text(lm, path):
    mixture = Mixture.open(path, lm, memories="knn:0.2", use_tuned=False)
    texts = [
        generate_tokens(mixture, "The memory", max_new_tokens=12, do_sample=True, seed=seed, draft=draft)
        for seed in (1, 2, 1)
        for draft in (False, True)
    ]
    assert texts[0] == texts[1] == texts[4] == texts[5]
    assert texts[2] == texts[3] != texts[0]


def test_drafts_of_another_state_of_the_store_are_not_attributed(lm, tmp_path):
    path = build(TEXTS, tmp_path / "docs.store", lm=lm).path
    mixture = Mixture.open(path, lm, memories="knn:0.2", use_tuned=False)
    drafter = make_drafter(mixture)
    sources = {source: {"drafted": 0, "accepted": 0} for source in ("store", "text", "student")}
    expected = {"drafted": 0, "accepted": 0, "sources": sources, "copied": []}
    assert describe_drafts(drafter, mixture.store, []) == expected
    remove(path, document=next(mixture.store.documents()).id)
    with pytest.raises(ParameterError, match="has changed"):
        describe_drafts(drafter, Mixture.open(path, lm).store, [])


def test_model_with_a_recurrent_state_is_refused(lm, path, monkeypatch):
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.2", use_tuned=False))
    monkeypatch.setattr(type(model.base), "_is_stateful", True)
    with pytest.raises(ParameterError, match="cannot be drafted"):
        model.generate(torch.tensor([[1, 2, 3]]), draft=True, max_new_tokens=3)


def test_what_cannot_be_drafted_is_refused(lm, path):
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.2", use_tuned=False))
    ids = torch.tensor([[1, 2, 3]])
    for given, settings, message in (
        (ids, {"num_beams": 2}, "beams"),
        (ids.repeat(2, 1), {}, "2 texts at once"),
        (ids, {"use_cache": False}, "cannot be drafted"),
        (ids, {"num_return_sequences": 2, "do_sample": True}, "2 texts at once"),
        (ids, {"generation_config": GenerationConfig(num_beams=3)}, "beams"),
        (ids, {"cache_implementation": "static"}, "cannot be drafted"),
        (ids, {"stop_strings": ["a"], "return_dict_in_generate": True}, "neither streamed"),
    ):
        with pytest.raises(ParameterError, match=message):
            model.generate(given, draft=True, max_new_tokens=3, **settings)
    with pytest.raises(ParameterError, match="by name"):
        model.generate(ids, GenerationConfig(), draft=True)
    with pytest.raises(ParameterError, match="model alone"):
        generate_tokens(model.mixture, "a", use_memory=False, draft=True)
