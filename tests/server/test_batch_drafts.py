"""Drafts of the server: every text is the one without drafts, and copied parts are those of a document."""

from __future__ import annotations

import copy
import json
import threading

import numpy as np
import pytest
import torch

from helpers.drafts import TEXTS, stored, tuned_mixture
from helpers.models import tiny, tiny_tokenizer
from helpers.server import serving
from knnlm.corpus import Document
from knnlm.errors import ParameterError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.draft import StepTimes
from knnlm.ingest.build import add, build
from knnlm.lm.causal import CausalLM
from knnlm.lm.layers import has_fixed_positions
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.engine import batch_drafts
from knnlm.server.engine.batching import BatchedCache, Prompt, SequentialCache, choose_cache, read_prompt
from knnlm.server.engine.requests import FinishEvent, GenerationRequest, MemoryOverrides, Penalties, TokensEvent
from knnlm.server.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def drafts_nearly_always(monkeypatch):
    """So that much is accepted and much is rejected."""
    monkeypatch.setattr(batch_drafts, "initial_times", lambda *_, **__: StepTimes(extra=0.0, each=0.001, weight=1e9))


def open_lm(family):
    return CausalLM(tiny(family).double(), tiny_tokenizer(), name=family)


@pytest.fixture(scope="module")
def lm():
    return open_lm("llama")


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    return stored(tmp_path_factory.mktemp("drafts") / "docs.store", lm)


@pytest.fixture(scope="module")
def tuned(lm, tmp_path_factory):
    """With a gate and online weights."""
    return tuned_mixture(tmp_path_factory.mktemp("drafts") / "tuned.store", lm)


def requests_of(lm, count=16):
    """Beginnings of stored texts, continued in several ways."""
    random = np.random.default_rng(3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.0, "penalties": Penalties(presence=0.5, frequency=0.3, bias={40: -2.0})},
        {"temperature": 0.5, "seed": 2, "top_p": 0.8, "copies": 2},
        {"temperature": 0.0, "overrides": MemoryOverrides(lmbda=0.9, k=2)},
        {"temperature": 0.0, "overrides": MemoryOverrides(off=True)},
        {"temperature": 0.0, "stop": (" the", "e ")},
    ]
    for number in range(count):
        tokens = lm.encode(TEXTS[number % len(TEXTS)].text)
        begin = int(random.integers(0, max(1, len(tokens) - 12)))
        prompt = (lm.start_token, *tokens[begin : begin + int(random.integers(1, 30))])
        settings = {"temperature": 0.0, "copies": 1, **kinds[number % len(kinds)]}
        yield GenerationRequest(
            prompt, int(random.integers(1, 40)), alternatives=2, ignore_eos=number % 2 == 0, **settings
        )


def answers(mixture, requests, *, draft):
    """Return tokens, probabilities and ends of all requests, run at the same time, and the scheduler's drafts."""
    scheduler = Scheduler(mixture, draft=draft)
    scheduler.start()
    try:
        found = []
        for handle in scheduler.submit_all(requests):
            texts, ends = {}, {}
            for event in handle.events():
                assert isinstance(event, (TokensEvent, FinishEvent)), event
                if isinstance(event, TokensEvent):
                    own = texts.setdefault(event.choice, [])
                    own += [(token.id, token.text, token.log_p) for token in event.tokens]
                else:
                    ends[event.choice] = event
            for choice, end in sorted(ends.items()):
                *columns, log_probs = zip(*texts.get(choice, [(0, "", 0.0)]), strict=True)
                found.append((columns, end.reason, end.generated, pytest.approx(log_probs, rel=1e-5, abs=1e-6)))
        return found, scheduler.drafts
    finally:
        scheduler.stop()


def check_same(mixture, count=16):
    requests = list(requests_of(mixture.lm, count))
    expected, none = answers(mixture, requests, draft=False)
    assert none is None
    found, drafts = answers(mixture, requests, draft=True)
    assert [own[:3] for own in found] == [own[:3] for own in expected]
    assert [own[3].expected for own in found] == [own[3] for own in expected]
    return drafts


@pytest.mark.parametrize("memories", ["knn:0.7", "knn:0.5,ngram:0.4", "knn:0.3,cache:0.3,ngram:0.3"])
def test_texts_with_drafts_are_the_texts_without(lm, path, memories):
    mixture = Mixture.open(path, lm, memories=memories, use_tuned=False, k=8, knn_temperature=4.0)
    drafts = check_same(mixture)
    assert 0 < drafts.accepted < drafts.drafted


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "qwen2"])
def test_other_families(family, tmp_path):
    lm = open_lm(family)
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(128))
    drafts = check_same(Mixture.open(store.path, lm, memories="knn:0.6,ngram:0.3", use_tuned=False, k=4))
    assert 0 < drafts.accepted < drafts.drafted


def test_models_whose_caches_forget_tokens_are_not_drafted(tmp_path):
    lm = open_lm("gemma3")
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(128))
    drafts = check_same(Mixture.open(store.path, lm, memories="knn:0.6,ngram:0.3", use_tuned=False, k=4), 6)
    assert drafts.drafted == 0


def test_gate_and_online_weights(tuned):
    assert tuned.layer.stateful
    drafts = check_same(tuned)
    assert 0 < drafts.accepted < drafts.drafted


def test_entries_that_are_followed(lm, path):
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=1))
    mixture = Mixture.open(path, lm, memories="knn:0.8", use_tuned=False, k=8, knn_temperature=2.0, options=options)
    drafts = check_same(mixture)
    assert 0 < drafts.accepted < drafts.drafted


def test_a_second_reader_is_cut_too(lm, path, tmp_path):
    folder = tmp_path / "second"
    for part in (tiny("llama", seed=4).double(), tiny_tokenizer()):
        part.save_pretrained(folder)
    mixture = Mixture.open(path, lm, memories=f"knn:0.5,decoder={folder}:0.3", use_tuned=False, k=4)
    drafts = check_same(mixture)
    assert 0 < drafts.accepted < drafts.drafted


@pytest.mark.parametrize("lengths", [(6, 6), (3, 9, 5)])
def test_what_is_left_after_a_cut_is_what_each_text_alone_has(lm, path, lengths):
    """Against reading every text from its beginning."""
    model = KnnForCausalLM(Mixture.open(path, lm, memories="knn:0.5,cache:0.3,ngram:0.1", use_tuned=False, k=4))
    random = np.random.default_rng(0)
    cache, texts = BatchedCache(model), []
    with torch.inference_mode():
        for length in lengths:
            texts.append([lm.start_token, *random.integers(20, 60, length - 1).tolist()])
            prompt = Prompt(list(texts[-1]))
            read_prompt(model, prompt, max_tokens=length, all_logits=False)
            cache.join(prompt, 1)
        for _ in range(6):
            new = [random.integers(20, 60, random.integers(1, 6)).tolist() for _ in texts]
            logits, context = cache.step(new)
            firsts = np.cumsum([0, *map(len, new)])
            for row, (text, own) in enumerate(zip(texts, new, strict=True)):
                alone = lm.model(torch.tensor([[*text, *own]])).logits[0, len(text) :]
                torch.testing.assert_close(logits[firsts[row] : firsts[row + 1]], alone)
                span = context.spans[row]
                assert span.tokens.tolist() == [*text, *own]
                assert span.start == len(text)
                for past in span.past.values():
                    assert len(past) == len(text)
            kept = [int(random.integers(1, len(own) + 1)) for own in new]
            cache.cut(kept)
            texts = [[*text, *own[:count]] for text, own, count in zip(texts, new, kept, strict=True)]
            assert cache.lengths == [len(text) for text in texts]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt"])
def test_drafts_end_at_the_last_position_of_the_longest_text(family, tmp_path):
    """A short text would be drafted beside one that has no room for as many positions."""
    lm = open_lm(family)
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(64))
    mixture = Mixture.open(store.path, lm, memories="knn:0.9", use_tuned=False, k=1, knn_temperature=1.0)
    tokens = lm.encode(" ".join(document.text for document in TEXTS))
    long = GenerationRequest((lm.start_token, *tokens[: mixture.max_length - 13]), 12, temperature=0.0, ignore_eos=True)
    short = GenerationRequest((lm.start_token, *tokens[:5]), 60, temperature=0.0, ignore_eos=True)
    expected, _ = answers(mixture, [long, short], draft=False)
    found, drafts = answers(mixture, [long, short], draft=True)
    assert [own[:3] for own in found] == [own[:3] for own in expected]
    assert drafts.drafted


def test_positions_that_depend_on_the_length_are_not_drafted(tmp_path):
    model = tiny("llama")
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = copy.deepcopy(model.config)
    config.rope_parameters = parameters
    assert has_fixed_positions(model.config)
    lm = CausalLM(type(model)(config).eval().double(), tiny_tokenizer(), name="dynamic")
    assert not has_fixed_positions(lm.model.config)
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(64))
    mixture = Mixture.open(store.path, lm, memories="knn:0.9", use_tuned=False, k=1)
    assert check_same(mixture, 4).drafted == 0
    with pytest.raises(ParameterError, match="dynamic: its positions depend on the length"):
        KnnForCausalLM(mixture).generate(torch.tensor([[1, 5, 9]]), max_new_tokens=3, draft=True)


def test_a_suffix_array_that_cannot_be_opened_does_not_stop_the_server(lm, tmp_path, caplog):
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(128))
    (store.path / "ngram").mkdir()
    (store.path / "ngram" / "metadata.json").write_text("{")
    mixture = Mixture.open(store.path, lm, memories="knn:0.9", use_tuned=False, k=1, knn_temperature=1.0)
    requests = list(requests_of(lm, 4))
    assert [own[:3] for own in answers(mixture, requests, draft=True)[0]] == [
        own[:3] for own in answers(mixture, requests, draft=False)[0]
    ]
    assert "cannot be indexed" in caplog.text


def test_added_documents_are_drafted_from_when_their_text_is_indexed(lm, tmp_path):
    store = build(TEXTS, tmp_path / "docs.store", lm=lm, window=lm.window(128))
    mixture = Mixture.open(store.path, lm, memories="knn:0.999", use_tuned=False, k=1, knn_temperature=1.0)
    new = Document("new", "new", "Seven violet engines hum beneath the quiet northern harbour of glass.")
    tokens = lm.encode(new.text)
    request = GenerationRequest((lm.start_token, *tokens[:4]), 12, temperature=0.0, ignore_eos=True)
    scheduler = Scheduler(mixture, draft=True)
    scheduler.start()
    try:
        list(scheduler.submit(request).events())
        add([new], store.path, lm=lm)
        list(scheduler.submit(request).events())  # after which another thread indexes the text
        for thread in threading.enumerate():
            if thread.name == "knnlm-drafts":
                thread.join(30)
        *_, end = scheduler.submit(request).events()
        assert "new" in {part["document"] for part in end.drafts["copied"]}
    finally:
        scheduler.stop()


def test_accepted_tokens_are_those_of_the_text(lm, path):
    """A stop string inside a draft ends the text: the tokens behind it are not counted."""
    mixture = Mixture.open(path, lm, memories="knn:0.999", use_tuned=False, k=1, knn_temperature=1.0)
    tokens = lm.encode(TEXTS[0].text)
    stop = lm.tokenizer.decode(tokens[9:11])
    request = GenerationRequest((lm.start_token, *tokens[:4]), 20, temperature=0.0, ignore_eos=True, stop=(stop,))
    (((_, reason, count, _),), drafts) = answers(mixture, [request], draft=True)
    assert reason == "stop"
    assert 0 < drafts.accepted <= count


def test_can_cut(lm, path):
    mixture = Mixture.open(path, lm, memories="knn:0.5", use_tuned=False)
    assert not SequentialCache(KnnForCausalLM(mixture)).can_cut
    assert isinstance(choose_cache(KnnForCausalLM(mixture)), BatchedCache)


def test_copied_parts_are_those_of_the_document(lm, path):
    """A store that votes for its own text alone copies it; the parts name where it stands."""
    mixture = Mixture.open(path, lm, memories="knn:0.999", use_tuned=False, k=1, knn_temperature=1.0)
    scheduler = Scheduler(mixture, draft=True)
    scheduler.start()
    copied = 0
    try:
        for document in TEXTS[:4]:
            tokens = lm.encode(document.text)
            request = GenerationRequest((lm.start_token, *tokens[:3]), 20, temperature=0.0, ignore_eos=True)
            *events, end = scheduler.submit(request).events()
            written = [token.id for event in events for token in event.tokens]
            assert end.drafts["accepted"] <= end.drafts["drafted"]
            for part in end.drafts["copied"]:
                source = lm.encode(next(each for each in TEXTS if each.id == part["document"]).text)
                begin, count = part["start"], part["tokens"]
                assert written[begin : begin + count] == source[part["offset"] : part["offset"] + count]
                copied += count
        assert copied > 20
    finally:
        scheduler.stop()


def test_drafts_over_http(tuned):
    body = {"prompt": TEXTS[0].text[:40], "max_tokens": 24, "temperature": 0}
    with serving(tuned) as plain, serving(tuned, draft=True) as drafting_server:
        (expected,) = plain.post("/v1/completions", **body)["choices"]
        (found,) = drafting_server.post("/v1/completions", **body)["choices"]
        assert found["text"] == expected["text"]
        assert "drafts" not in expected["knnlm"]
        drafts = found["knnlm"]["drafts"]
        assert drafts["drafted"] > 0
        with drafting_server.client() as client:
            streamed = client.post("/v1/completions", json=body | {"stream": True}).text
            metrics = client.get("/metrics").text
        chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == found["text"]
        later = chunks[-1]["choices"][0]["knnlm"]["drafts"]
        counters = dict(line.split() for line in metrics.splitlines() if line.startswith("knnlm_tokens_"))
        assert float(counters["knnlm_tokens_drafted_total"]) == drafts["drafted"] + later["drafted"]
        assert float(counters["knnlm_tokens_accepted_total"]) == drafts["accepted"] + later["accepted"]
        with plain.client() as client:
            assert "knnlm_tokens_drafted" not in client.get("/metrics").text
