"""The scheduler: sequences in a batch are what transformers generates for each alone."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from helpers.models import TEXT, tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.datastore.remove import remove
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.generation import causal as causal_module
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.detokenizer import Detokenizer
from knnlm.memories.automaton import AutomatonParams
from knnlm.memories.base import Origin
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.engine import history as history_module
from knnlm.server.engine import scheduler as scheduler_module
from knnlm.server.engine.batching import BatchedCache, SequentialCache, choose_cache
from knnlm.server.engine.history import TraceCache, rescore
from knnlm.server.engine.requests import (
    Busy,
    ErrorEvent,
    FinishEvent,
    GenerationRequest,
    MemoryOverrides,
    RequestHandle,
    Stopped,
    TokensEvent,
)
from knnlm.server.engine.scheduler import Scheduler
from knnlm.server.engine.sequence import Sampler

FAMILIES = ["llama", "gpt2", "gemma3", "bloom", "opt"]
PROMPTS = [
    "The memory of a model",
    "When",
    "In 1998 the library had 20 rooms; in 2024 it has 3.",
    "the far ones softly",
]


def start_scheduler(mixture, **settings):
    scheduler = Scheduler(mixture, **settings)
    scheduler.start()
    assert scheduler.ready.wait(30)
    return scheduler


@pytest.fixture(scope="module")
def mixture(lm, store):
    return Mixture.open(store.path, lm, k=16, knn_temperature=8.0, lmbda=0.6)


@pytest.fixture(scope="module")
def scheduler(mixture):
    running = start_scheduler(mixture)
    yield running
    running.stop()


def make_request(scheduler, prompt, tokens=12, **settings):
    given = {"ignore_eos": True, **settings}
    return GenerationRequest(tuple(scheduler.mixture.lm.prompt(prompt)), tokens, **given)


def tokens_of(handle, copy=0):
    """Return the tokens of one continuation."""
    events = list(handle.events())
    assert not any(isinstance(event, ErrorEvent) for event in events), events
    return [
        token for event in events if isinstance(event, TokensEvent) and event.choice == copy for token in event.tokens
    ]


def trace_of(scheduler, request):
    """Return the trace of a request with one continuation."""
    *_, last = scheduler.submit(request).events()
    return scheduler.traces.find(last.trace_id)


def ids(tokens):
    return [token.id for token in tokens]


def generated(mixture, prompt, tokens, **settings):
    """Return the tokens that transformers' own loop generates."""
    given = torch.tensor([mixture.lm.prompt(prompt)])
    made = KnnForCausalLM(mixture).generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
        **{"do_sample": False, **settings},
    )  # fmt: skip
    return made[0, given.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_join_and_leave_a_batch_equal_generate(family, tmp_path):
    """Longer than the sliding windows of 64 tokens, and joining while other sequences run."""
    lm = CausalLM(tiny(family), tiny_tokenizer(), name=family)
    store = build(documents(8), tmp_path / "store", lm=lm)
    mixture = Mixture.open(store.path, lm, k=8, knn_temperature=4.0, lmbda=0.5)
    scheduler = start_scheduler(mixture)
    assert scheduler.batched
    handles = []
    lengths = [58, 20, 4, 9]
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        handles.append(scheduler.submit(make_request(scheduler, prompt, length)))
        began = scheduler.steps
        while scheduler.steps < began + 5 and scheduler.active:
            time.sleep(0.001)
    together = [ids(tokens_of(handle)) for handle in handles]
    scheduler.stop()
    assert together == [generated(mixture, *each) for each in zip(PROMPTS, lengths, strict=True)]


@pytest.mark.parametrize("memories", ["cache", "ngram", "ngram-cache", "cache,ngram,decoder"])
def test_memories_with_history_work_in_a_batch(memories, lm, tmp_path):
    folder = tmp_path / "second"
    tiny("gpt2", seed=4).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    store = build(documents(8), tmp_path / "store", lm=lm, window=lm.window(128))
    named = ",".join(f"decoder={folder}:0.2" if name == "decoder" else f"{name}:0.3" for name in memories.split(","))
    mixture = Mixture.open(store.path, lm, memories=f"knn:0.1,{named}", use_tuned=False)
    scheduler = start_scheduler(mixture)
    assert scheduler.batched
    handles = [scheduler.submit(make_request(scheduler, prompt, 20 + 7 * n)) for n, prompt in enumerate(PROMPTS)]
    for number, handle in enumerate(handles):
        assert ids(tokens_of(handle)) == generated(mixture, PROMPTS[number], 20 + 7 * number)
    scheduler.stop()


def test_gate_that_skips_searches_works_in_a_batch(lm, tmp_path):
    build(documents(10), tmp_path / "store", lm=lm)
    Mixture.open(tmp_path / "store", lm, memories="knn,ngram", use_tuned=False).tune(
        documents(6, start=30), weights="gated", ks=[4, 16], knn_temperatures=[4.0, 16.0]
    )
    mixture = Mixture.open(tmp_path / "store", lm, options=MixtureOptions(skip_fraction=0.5))
    scheduler = start_scheduler(mixture)
    handles = [scheduler.submit(make_request(scheduler, prompt, 15)) for prompt in PROMPTS]
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert ids(tokens_of(handle)) == generated(mixture, prompt, 15)
    scheduler.stop()


@pytest.mark.parametrize("batched", [True, False])
def test_automata_follow_each_text_of_a_batch(lm, store, batched, monkeypatch):
    """Texts of a batch are those of each alone, and a prompt that is echoed in chunks is that of one pass."""
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=2))
    mixture = Mixture.open(store.path, lm, k=8, knn_temperature=4.0, lmbda=0.8, options=options)
    if not batched:
        monkeypatch.setattr(scheduler_module, "choose_cache", SequentialCache)
    scheduler = start_scheduler(mixture)
    assert scheduler.batched == batched
    prompts = [document.text[:60] for document in documents(40)[3:9]]
    handles = [scheduler.submit(make_request(scheduler, prompt, 20)) for prompt in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        assert ids(tokens_of(handle)) == generated(mixture, prompt, 20)
    positions = 20 * len(prompts)
    assert 0 < scheduler.times.searched < positions
    monkeypatch.setattr(scheduler_module, "MAX_PROMPT_CHUNK", 7)
    request = make_request(scheduler, documents(40)[5].text, 6, echo=True)
    tokens = tokens_of(scheduler.submit(request))
    with torch.no_grad():
        whole = torch.tensor([[request.tokens[0], *ids(tokens)]])
        log_p = KnnForCausalLM(mixture)(whole[:, :-1]).logits[0]
    assert [token.log_p for token in tokens] == pytest.approx(
        log_p.gather(1, whole[0, 1:, None])[:, 0].tolist(), abs=1e-3
    )
    scheduler.stop()


def test_texts_forget_the_entries_of_a_store_that_has_changed(lm, tmp_path):
    """Numbers of entries change where documents are removed; running texts go on with a search."""
    store = build(documents(20), tmp_path / "store", lm=lm)
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=2))
    given = {"k": 8, "knn_temperature": 4.0, "lmbda": 0.8, "options": options}
    scheduler = start_scheduler(Mixture.open(store.path, lm, **given))
    running = scheduler.submit(make_request(scheduler, documents(20)[9].text[:60], 150))
    while scheduler.tokens_generated < 5:
        time.sleep(0.001)
    remove(store.path, document="d3")
    following = scheduler.submit(make_request(scheduler, documents(20)[9].text[:60], 20))
    assert ids(tokens_of(following)) == generated(Mixture.open(store.path, lm, **given), documents(20)[9].text[:60], 20)
    assert len(tokens_of(running)) == 150
    assert scheduler.reloads == 1
    scheduler.stop()


def test_model_without_a_mergeable_cache_is_read_sequentially(tmp_path):
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    lm = CausalLM(transformers.MambaForCausalLM(config), tiny_tokenizer(), key_layer="output", name="mamba")
    build(documents(3), tmp_path / "store", lm=lm, window=lm.window(64))
    mixture = Mixture.open(tmp_path / "store", lm, k=8, knn_temperature=4.0, lmbda=0.6)
    scheduler = start_scheduler(mixture)
    assert not scheduler.batched
    handles = [scheduler.submit(make_request(scheduler, prompt, 6, copies=2)) for prompt in PROMPTS[:2]]
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        assert ids(tokens_of(handle, 1)) == generated(mixture, prompt, 6)
    scheduler.stop()


def test_model_that_ignores_the_mask_gets_a_sequential_cache(mixture, monkeypatch):
    """A model that ignores the mask has other logits in a padded batch."""
    model = KnnForCausalLM(mixture)
    assert isinstance(choose_cache(model), BatchedCache)
    read = model.read
    monkeypatch.setattr(model, "read", lambda *given, **more: read(*given, **(more | {"attention_mask": None})))
    assert isinstance(choose_cache(model), SequentialCache)


def test_requests_of_one_batch_have_their_own_settings(lm, store, scheduler):
    """k, τ, λ and no memory: as a mixture that was opened with them, with one search per step."""
    all_overrides = [
        MemoryOverrides(k=3, knn_temperature=2.0, lmbda=0.9),
        MemoryOverrides(k=40, knn_temperature=20.0, lmbda=0.3),
        MemoryOverrides(lmbda=0.0),
        MemoryOverrides(off=True),
        MemoryOverrides(),
    ]
    handles = [
        scheduler.submit(make_request(scheduler, PROMPTS[0], 10, overrides=overrides, sources=1))
        for overrides in all_overrides
    ]
    answers = [tokens_of(handle) for handle in handles]
    for overrides, answer in zip(all_overrides, answers, strict=True):
        if overrides.off:
            given = torch.tensor([lm.prompt(PROMPTS[0])])
            made = lm.model.generate(given, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert ids(answer) == made[0, given.shape[1] :].tolist()
            assert {token.weight for token in answer} == {0}
            assert {token.p_knn for token in answer} == {None}
            assert not any(token.sources for token in answer)
            continue
        settings = {"k": overrides.k or 16, "knn_temperature": overrides.knn_temperature or 8.0}
        weight = 0.6 if overrides.lmbda is None else overrides.lmbda
        assert ids(answer) == generated(Mixture.open(store.path, lm, lmbda=weight, **settings), PROMPTS[0], 10)


def test_batch_is_searched_once_per_step_for_all_k(mixture):
    scheduler = Scheduler(mixture)
    searches = []
    memory, search = scheduler.mixture.knn, scheduler.mixture.knn.search
    memory.search = lambda keys, k, *others: searches.append((len(keys), k)) or search(keys, k, *others)
    try:
        for k in (5, 9, 2):
            scheduler._waiting.append(RequestHandle(make_request(scheduler, "When", 3, overrides=MemoryOverrides(k=k))))
        scheduler.start()
        while scheduler.active or scheduler.waiting or not scheduler.steps:
            time.sleep(0.001)
    finally:
        del memory.search
        scheduler.stop()
    assert searches == [(3, 16)] * 3


def test_echoed_tokens_equal_those_of_explain(scheduler):
    """Echoed prompts have the probabilities of `explain`, which reads texts in another way."""
    text = PROMPTS[2]
    answer = tokens_of(scheduler.submit(make_request(scheduler, text, 0, echo=True, sources=3)))
    right = scheduler.mixture.explain(text, top=3)
    assert [token.text for token in answer] == [token.token for token in right]
    for token, other in zip(answer, right, strict=True):
        assert token.p_lm == pytest.approx(other.p_lm, rel=1e-3)
        assert token.p_knn == pytest.approx(other.p_knn, rel=1e-3, abs=1e-6)
        assert token.p == pytest.approx(other.p, rel=1e-3)
        assert token.p == pytest.approx((1 - token.weight) * token.p_lm + token.weight * token.p_knn, rel=1e-4)
        assert [source["document"] for source in token.sources] == [voice.document for voice in other.neighbours]
        for source, voice in zip(token.sources, other.neighbours, strict=True):
            assert source["weight"] == pytest.approx(voice.weight, rel=1e-3, abs=1e-6)
            assert source["token"] == voice.token
            assert source["before"].endswith(voice.before)
            assert source["after"].startswith(voice.after)


def test_echoed_log_probabilities_equal_evaluation(scheduler):
    text = TEXT[:200]
    answer = tokens_of(scheduler.submit(make_request(scheduler, text, 0, echo=True)))
    right = scheduler.mixture.evaluate([Document(id="a", source="a", text=text)])
    mean = -sum(token.log_p for token in answer) / len(answer)
    assert math.exp(mean) == pytest.approx(right.perplexity, rel=1e-3)
    assert math.exp(-np.mean([token.components.log_probs[0] for token in answer])) == pytest.approx(
        right.base_perplexity, rel=1e-3
    )


@pytest.mark.parametrize("chunk", [1, 3, 7, 256])
def test_prompt_read_in_chunks_has_the_same_output(mixture, monkeypatch, chunk):
    monkeypatch.setattr(scheduler_module, "MAX_PROMPT_CHUNK", chunk)
    scheduler = start_scheduler(mixture)
    handles = [scheduler.submit(make_request(scheduler, prompt, 8, echo=True)) for prompt in PROMPTS]
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        answer = tokens_of(handle)
        assert ids(answer) == mixture.lm.encode(prompt) + generated(mixture, prompt, 8)
        assert "".join(token.text for token in answer).startswith(prompt)
    scheduler.stop()


def test_short_request_finishes_before_a_long_prompt(mixture, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_PROMPT_CHUNK", 4)
    scheduler = Scheduler(mixture)
    ended = []
    long, short = make_request(scheduler, TEXT[:200], 1), make_request(scheduler, "When", 5)
    for name, each in (("long", long), ("short", short)):
        handle = RequestHandle(each, lambda event, name=name: isinstance(event, FinishEvent) and ended.append(name))
        scheduler._waiting.append(handle)
    scheduler.start()
    while len(ended) < 2:
        time.sleep(0.001)
    scheduler.stop()
    assert ended == ["short", "long"]


def test_sampling_follows_the_distribution_and_the_seed(scheduler):
    """Frequencies of a first token against the mixture's own probabilities, by their chi-square."""
    mixture, prompt = scheduler.mixture, PROMPTS[0]
    given = torch.tensor([mixture.lm.prompt(prompt)])
    with torch.no_grad():
        log_p = KnnForCausalLM(mixture)(given).logits[0, -1].double()
    right = (log_p / 0.7).softmax(0)
    ordered, tokens = right.sort(descending=True)
    kept = int((ordered.cumsum(0) - ordered < 0.8).sum())
    right = torch.zeros_like(right).scatter_(0, tokens[:kept], ordered[:kept] / ordered[:kept].sum()).numpy()
    found = np.zeros(len(right))
    for block in range(10):
        handle = scheduler.submit(
            make_request(scheduler, prompt, 1, copies=64, temperature=0.7, top_p=0.8, seed=1000 * block)
        )
        for event in handle.events():
            if isinstance(event, TokensEvent):
                found[event.tokens[0].id] += 1
    assert found[right == 0].sum() == 0
    expected = right[right > 0] * found.sum()
    chi_square = ((found[right > 0] - expected) ** 2 / expected).sum()
    assert chi_square < kept + 5 * math.sqrt(2 * kept)


def test_seeded_text_does_not_depend_on_the_batch(scheduler):
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "copies": 2}
    alone = scheduler.submit(make_request(scheduler, PROMPTS[0], 20, **settings))
    first = [ids(tokens_of(alone, copy)) for copy in (0,)]
    crowd = [scheduler.submit(make_request(scheduler, prompt, 30, temperature=1.0)) for prompt in PROMPTS]
    again = scheduler.submit(make_request(scheduler, PROMPTS[0], 20, **settings))
    events = list(again.events())
    texts = [
        [t.id for e in events if isinstance(e, TokensEvent) and e.choice == copy for t in e.tokens] for copy in (0, 1)
    ]
    assert texts[0] == first[0]
    assert texts[1] != texts[0]
    for handle in crowd:
        tokens_of(handle)


def test_rescoring_equals_a_new_request(scheduler):
    """λ, k, τ changed in the trace against the same text scored by the scheduler with these settings."""
    text = PROMPTS[2]
    trace = trace_of(scheduler, make_request(scheduler, text, 0, echo=True, overrides=MemoryOverrides(k=30)))
    assert trace.overrides == MemoryOverrides(k=30)
    for changes in (
        MemoryOverrides(k=12),
        MemoryOverrides(lmbda=0.1),
        MemoryOverrides(k=4),
        MemoryOverrides(knn_temperature=1.0),
        MemoryOverrides(lmbda=0.8, k=9, knn_temperature=30.0),
        MemoryOverrides(lmbda=0.0),
        MemoryOverrides(lmbda=1.0),
        MemoryOverrides(),
    ):
        again = rescore(scheduler.mixtures, trace, changes)
        overrides = MemoryOverrides(lmbda=changes.lmbda, k=changes.k or 30, knn_temperature=changes.knn_temperature)
        right = tokens_of(scheduler.submit(make_request(scheduler, text, 0, echo=True, overrides=overrides)))
        assert ids(again) == ids(right)
        for one, other in zip(again, right, strict=True):
            assert one.log_p == pytest.approx(other.log_p, rel=1e-4, abs=1e-4) or one.log_p == other.log_p
            assert one.p_knn == pytest.approx(other.p_knn, rel=1e-4, abs=1e-7)
            assert (one.weight, one.text) == (pytest.approx(other.weight), other.text)


def test_rescoring_works_with_several_memories(lm, store):
    scheduler = start_scheduler(Mixture.open(store.path, lm, memories="knn:0.2,cache:0.3,ngram:0.2", use_tuned=False))
    text = PROMPTS[0] + " " + PROMPTS[0]
    trace = trace_of(scheduler, make_request(scheduler, text, 0, echo=True))
    assert {share["memory"] for share in trace.tokens[3].shares} == {"knn", "cache", "ngram"}
    for changes in (MemoryOverrides(lmbda=0.9), MemoryOverrides(k=5, knn_temperature=3.0)):
        again = rescore(scheduler.mixtures, trace, changes)
        right = tokens_of(scheduler.submit(make_request(scheduler, text, 0, echo=True, overrides=changes)))
        np.testing.assert_allclose([one.p for one in again], [one.p for one in right], rtol=1e-4, atol=1e-7)
    scheduler.stop()


def test_trace_cache_is_bounded_and_evicts_the_oldest(mixture):
    scheduler = start_scheduler(mixture, traces=TraceCache(max_bytes=200_000))
    handles = [scheduler.submit(make_request(scheduler, "When", 10)) for _ in range(30)]
    trace_ids = [list(handle.events())[-1].trace_id for handle in handles]
    assert scheduler.traces.bytes <= 200_000
    assert scheduler.traces.find(trace_ids[0]) is None
    trace = scheduler.traces.find(trace_ids[-1])
    assert (trace.overrides, len(trace.tokens)) == (MemoryOverrides(), 10)
    scheduler.stop()


def test_trace_has_nothing_of_the_vocabularys_size(scheduler):
    trace = trace_of(scheduler, make_request(scheduler, "When", 1))
    assert len(trace.tokens[0].components.log_probs) == 2
    assert trace.neighbours[0].distances.shape == (16,)
    assert trace.neighbours[0].distances.base is None  # not a view of something larger
    assert trace.tokens[0].neighbours is None  # events hold the same tokens


def test_unknown_memory_is_rejected(scheduler):
    with pytest.raises(ParameterError, match="There are: knn"):
        scheduler.submit(make_request(scheduler, "When", overrides=MemoryOverrides(memories=("cache",))))


def test_slots_and_queue_are_limited_and_cancelled_requests_free_them(mixture):
    scheduler = start_scheduler(mixture, slots=2, queue=3)
    handles = [scheduler.submit(make_request(scheduler, "When", 100)) for _ in range(2)]
    while scheduler.active < 2:
        time.sleep(0.001)
    waiting = [scheduler.submit(make_request(scheduler, "When", 3)) for _ in range(3)]
    with pytest.raises(Busy, match="3 requests are waiting"):
        scheduler.submit(make_request(scheduler, "When", 1))
    assert scheduler.active == 2
    for handle in handles:
        handle.cancel()
    for handle in waiting:
        assert len(tokens_of(handle)) == 3
    scheduler.stop()


def test_request_past_its_deadline_fails(scheduler):
    late = scheduler.submit(make_request(scheduler, "When", 60, deadline=time.monotonic() - 1))
    (event,) = late.events()
    assert event.status == 504


def test_error_in_a_step_fails_only_its_requests(mixture, monkeypatch):
    scheduler = start_scheduler(mixture)

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "predict_batch", broken)
        (event,) = scheduler.submit(make_request(scheduler, "When", 5)).events()
        assert event == ErrorEvent(500, "Internal server error. See the server's log.")
    assert ids(tokens_of(scheduler.submit(make_request(scheduler, "When", 5)))) == generated(mixture, "When", 5)
    scheduler.stop()


def test_error_while_a_sequence_joins_is_reported_and_leaves_no_state(mixture, monkeypatch):
    """As where its cache does not fit into memory: the request fails, and the next one runs."""
    scheduler = start_scheduler(mixture)
    join = BatchedCache.join

    def half(rows, prompt, copies):
        rows.cache = prompt.cache  # and then it fails
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(BatchedCache, "join", half)
        (event,) = scheduler.submit(make_request(scheduler, PROMPTS[0], 5)).events()
        assert event == ErrorEvent(500, "Internal server error. See the server's log.")
    assert BatchedCache.join is join
    handles = [scheduler.submit(make_request(scheduler, prompt, 6)) for prompt in PROMPTS]
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert ids(tokens_of(handle)) == generated(mixture, prompt, 6)
    assert scheduler.active == 0
    scheduler.stop()


def test_error_while_a_request_starts_is_reported(mixture, monkeypatch):
    scheduler = start_scheduler(mixture)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "GeneratedSequence", lambda *_: 1 / 0)
        (event,) = scheduler.submit(make_request(scheduler, "When", 5)).events()
        assert event.status == 500
    assert ids(tokens_of(scheduler.submit(make_request(scheduler, "When", 5)))) == generated(mixture, "When", 5)
    scheduler.stop()


@hypothesis.given(text=st.text(max_size=12), cut=st.integers(0, 40))
def test_detokenizer_completes_characters_cut_anywhere(text, cut):
    """After any context, the texts of the other tokens join to the rest, with a character that was cut."""
    tokenizer = tiny_tokenizer()

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    hypothesis.assume(decode(tokens) == text)
    before, after = tokens[:cut], tokens[cut:]
    detokenizer = Detokenizer(decode, before)
    pieces = [detokenizer.add(token) for token in after]
    pieces.append(detokenizer.finish())
    head = decode(before)
    while not text.startswith(head):
        head = head[:-1]
    assert "".join(pieces) == (text[len(head) :] if after else "")


def test_prompt_with_many_sources_is_read_in_smaller_chunks(mixture):
    """A prompt with 64 sources for each token is read in smaller chunks."""
    scheduler = start_scheduler(mixture)
    long = scheduler.submit(make_request(scheduler, TEXT[:200], 0, echo=True, sources=64))
    began = scheduler.steps
    tokens = tokens_of(long)
    assert len(tokens) > 60
    assert all(len(token.sources) == 16 for token in tokens)  # all that voted
    assert scheduler.steps - began >= len(tokens) * 8 // scheduler_module.MAX_PROMPT_CHUNK
    scheduler.stop()


def test_rescoring_in_blocks_equals_rescoring_at_once(scheduler, monkeypatch):
    text = PROMPTS[2]
    trace = trace_of(scheduler, make_request(scheduler, text, 0, echo=True))
    whole = rescore(scheduler.mixtures, trace, MemoryOverrides(k=5, knn_temperature=2.0))
    monkeypatch.setattr(history_module, "_BLOCK_NEIGHBOURS", 16 * 7)
    blocks = rescore(scheduler.mixtures, trace, MemoryOverrides(k=5, knn_temperature=2.0))
    assert [token.log_p for token in blocks] == [token.log_p for token in whole]
    assert "".join(token.text for token in blocks) == text


def test_stop_fails_waiting_requests(mixture):
    scheduler = start_scheduler(mixture, slots=1)
    handles = [scheduler.submit(make_request(scheduler, "When", 100)) for _ in range(3)]
    scheduler.stop()
    for handle in handles:
        *_, last = handle.events()
        assert isinstance(last, ErrorEvent | FinishEvent)
    with pytest.raises(Stopped):
        scheduler.submit(make_request(scheduler, "When", 1))


@hypothesis.given(
    logits=st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
)
def test_sampled_token_is_in_the_nucleus(logits, temperature, top_p, seed):
    log_p = torch.tensor(logits).log_softmax(0)
    token = Sampler(temperature, top_p, seed).draw(log_p)
    right = log_p.double()
    if temperature <= 1e-4:
        assert right[token] == right.max()
        return
    probs = (right / temperature).softmax(0)
    more_probable = float(probs[probs > probs[token] * (1 + 1e-5)].sum())
    assert more_probable < top_p + 1e-5


ONLINE = OnlineConfig(0.3, 0.02)


@pytest.fixture(params=["llama", "gpt2"])
def online_mixture(request, tmp_path):
    lm = CausalLM(tiny(request.param), tiny_tokenizer(), name=request.param)
    store = build(documents(8), tmp_path / "store", lm=lm, window=lm.window(32))
    memories = "knn:0.3,cache:0.4,ngram:0.1"
    mixture = Mixture.open(store.path, lm, memories=memories, k=8, knn_temperature=4.0, use_tuned=False)
    mixture.online = ONLINE
    return mixture


def test_online_weights_of_sequences_in_a_batch_equal_generate(online_mixture, monkeypatch):
    """Prompts are read in chunks, so that their state is carried from chunk to chunk."""
    monkeypatch.setattr(scheduler_module, "MAX_PROMPT_CHUNK", 5)
    scheduler = start_scheduler(online_mixture)
    try:
        requests = [make_request(scheduler, prompt, 9) for prompt in PROMPTS]
        handles = [scheduler.submit(request) for request in requests]
        found = [tokens_of(handle) for handle in handles]
    finally:
        scheduler.stop()
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        given = torch.tensor([online_mixture.lm.prompt(prompt)])
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
        alone = KnnForCausalLM(online_mixture).generate(given, max_new_tokens=9, output_logits=True, **settings)
        assert ids(tokens) == alone.sequences[0, given.shape[1] :].tolist()
        expected = [float(logits[0, token.id]) for logits, token in zip(alone.logits, tokens, strict=True)]
        assert [token.log_p for token in tokens] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        weights = [token.weight for token in tokens]
        assert max(weights) < 0.7999  # below that of the memories alone, as the model has a share


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("copies", [1, 2])
def test_tokens_that_are_not_readable_are_neither_evidence_nor_read(online_mixture, monkeypatch, batched, copies):
    """Each prompt has its own mask, in chunks and beside others, with and without a batched cache."""
    monkeypatch.setattr(scheduler_module, "MAX_PROMPT_CHUNK", 5)
    if not batched:
        monkeypatch.setattr(scheduler_module, "choose_cache", SequentialCache)
    scheduler = start_scheduler(online_mixture)
    random = np.random.default_rng(0)
    try:
        requests = [make_request(scheduler, prompt, 9, copies=copies) for prompt in PROMPTS]
        origins = [random.choice([Origin.GIVEN, Origin.HIDDEN], len(request.tokens)) for request in requests]
        origins[1][:] = Origin.HIDDEN
        pairs = zip(requests, origins, strict=True)
        requests = [replace(request, origins=tuple(own.tolist())) for request, own in pairs]
        handles = [scheduler.submit(request) for request in requests]
        found = [tokens_of(handle, copies - 1) for handle in handles]
    finally:
        scheduler.stop()
    for request, tokens in zip(requests, found, strict=True):
        given = torch.tensor([request.tokens])
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
        readable = torch.tensor([request.origins]) == Origin.GIVEN
        alone = KnnForCausalLM(online_mixture).generate(
            given, max_new_tokens=9, output_logits=True, readable_mask=readable, **settings
        )
        assert ids(tokens) == alone.sequences[0, given.shape[1] :].tolist()
        expected = [float(logits[0, token.id]) for logits, token in zip(alone.logits, tokens, strict=True)]
        assert [token.log_p for token in tokens] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_online_weights_of_a_scored_text_equal_evaluation(online_mixture):
    text = TEXT[:300]
    tokens = online_mixture.lm.encode(text)
    expected = online_mixture.evaluate([Document("text", "text", text)])
    scheduler = start_scheduler(online_mixture)
    try:
        start = online_mixture.lm.start_token
        request = GenerationRequest((start, *tokens), 0, echo=True, start_added=True, windowed=True)
        scored = tokens_of(scheduler.submit(request))
    finally:
        scheduler.stop()
    assert len(tokens) > 40  # several windows
    loss = -sum(token.log_p for token in scored) / len(scored)
    assert math.exp(loss) == pytest.approx(expected.perplexity, rel=1e-4)


def test_lambda_of_a_request_replaces_online_weights(online_mixture):
    scheduler = start_scheduler(online_mixture)
    try:
        request = make_request(scheduler, PROMPTS[0], 6, overrides=MemoryOverrides(lmbda=0.6))
        found = tokens_of(scheduler.submit(request))
    finally:
        scheduler.stop()
    assert all(token.weight == pytest.approx(0.6, abs=0.21) for token in found)  # less where a memory abstains
    fixed = copy.copy(online_mixture)
    fixed.online, fixed.lmbda = None, 0.6
    assert ids(found) == generated(fixed, PROMPTS[0], 6)


@pytest.mark.parametrize("chunk", [5, 8, 64])
@pytest.mark.parametrize("beside", [False, True])
def test_evidence_of_a_long_prompt_does_not_depend_on_chunks(online_mixture, monkeypatch, chunk, beside):
    monkeypatch.setattr(scheduler_module, "MAX_PROMPT_CHUNK", chunk)
    monkeypatch.setattr(scheduler_module, "EVIDENCE_TOKENS", 7)
    monkeypatch.setattr(causal_module, "EVIDENCE_TOKENS", 7)
    scheduler = start_scheduler(online_mixture)
    try:
        handles = [scheduler.submit(make_request(scheduler, PROMPTS[2], 4))]
        if beside:
            handles.append(scheduler.submit(make_request(scheduler, PROMPTS[0], 4)))
        found, *_ = [tokens_of(handle) for handle in handles]
    finally:
        scheduler.stop()
    given = torch.tensor([online_mixture.lm.prompt(PROMPTS[2])])
    assert given.shape[1] > 14
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    alone = KnnForCausalLM(online_mixture).generate(given, max_new_tokens=4, output_logits=True, **settings)
    expected = [float(logits[0, token.id]) for logits, token in zip(alone.logits, found, strict=True)]
    assert [token.log_p for token in found] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_evidence_of_a_model_without_a_cache_is_that_of_generate(tmp_path, monkeypatch, echo, hidden):
    for module in (scheduler_module, causal_module):
        monkeypatch.setattr(module, "EVIDENCE_TOKENS", 7)
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    lm = CausalLM(transformers.MambaForCausalLM(config), tiny_tokenizer(), key_layer="output", name="mamba")
    build(documents(3), tmp_path / "store", lm=lm, window=lm.window(64))
    settings = {"memories": "knn:0.5,cache:0.3", "k": 8, "knn_temperature": 4.0, "use_tuned": False}
    mixture = Mixture.open(tmp_path / "store", lm, **settings)
    mixture.online = OnlineConfig(0.5, 0.0)
    scheduler = start_scheduler(mixture)
    try:
        request = make_request(scheduler, PROMPTS[2], 4, echo=echo)
        readable = torch.ones(1, len(request.tokens), dtype=torch.bool)
        if hidden:
            readable[0, -4:] = False
            request = replace(request, origins=tuple((Origin.HIDDEN * ~readable[0]).tolist()))
        found = tokens_of(scheduler.submit(request))[-4:]
    finally:
        scheduler.stop()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    alone = KnnForCausalLM(mixture).generate(
        torch.tensor([request.tokens]), max_new_tokens=4, output_logits=True, readable_mask=readable, **settings
    )
    assert ids(found) == alone.sequences[0, -4:].tolist()
    expected = [float(logits[0, token.id]) for logits, token in zip(alone.logits, found, strict=True)]
    assert [token.log_p for token in found] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_rescoring_with_another_k_equals_a_request_with_it(online_mixture):
    scheduler = start_scheduler(online_mixture)
    try:
        trace = trace_of(scheduler, make_request(scheduler, PROMPTS[0], 6))
        rescored = rescore(scheduler.mixtures, trace, MemoryOverrides(k=2))
        fresh = trace_of(scheduler, make_request(scheduler, PROMPTS[0], 1, overrides=MemoryOverrides(k=2)))
    finally:
        scheduler.stop()
    assert all(math.isfinite(token.log_p) for token in rescored)
    if fresh.tokens[0].id == rescored[0].id:
        assert rescored[0].log_p == pytest.approx(fresh.tokens[0].log_p, rel=1e-4)


def test_reload_with_other_memories_waits_for_running_requests(lm, tmp_path):
    store = build(documents(8), tmp_path / "store", lm=lm)
    tuned = {"weights": "fixed", "ks": [4], "knn_temperatures": [10.0]}
    Mixture.open(store.path, lm, memories="knn,ngram", use_tuned=False).tune(documents(3, start=50), **tuned)
    mixture = Mixture.open(store.path, lm)
    scheduler = start_scheduler(mixture)
    try:
        only = MemoryOverrides(memories=("ngram",))
        running = scheduler.submit(make_request(scheduler, PROMPTS[0], 200, overrides=only))
        while not scheduler.tokens_generated:
            time.sleep(0.001)
        Mixture.open(store.path, lm, memories="knn", use_tuned=False).tune(documents(3, start=50), **tuned)
        Datastore.open(store.path).add(documents(1, start=70), lm=lm)
        following = scheduler.submit(make_request(scheduler, PROMPTS[1], 5))
        assert len(tokens_of(running)) == 200
        assert len(tokens_of(following)) == 5
        assert scheduler.mixture.labels == ["knn"]
    finally:
        scheduler.stop()
    # The states of both mixtures have the same length.
    assert len(mixture.layer.first) == len(scheduler.mixture.layer.first)


def test_reload_that_changes_online_weights_waits_for_running_requests(lm, tmp_path):
    store = build(documents(8), tmp_path / "store", lm=lm)
    tuned = {"ks": [4], "knn_temperatures": [10.0]}
    Mixture.open(store.path, lm, use_tuned=False).tune(documents(3, start=50), weights="fixed", online=False, **tuned)
    scheduler = start_scheduler(Mixture.open(store.path, lm))
    try:
        running = scheduler.submit(make_request(scheduler, PROMPTS[0], 200))
        while not scheduler.tokens_generated:
            time.sleep(0.001)
        Mixture.open(store.path, lm, use_tuned=False).tune(documents(3, start=50), weights="fixed", **tuned)
        Datastore.open(store.path).add(documents(1, start=70), lm=lm)
        following = scheduler.submit(make_request(scheduler, PROMPTS[1], 5))
        assert len(tokens_of(running)) == 200
        assert len(tokens_of(following)) == 5
        assert scheduler.reloads == 1
        assert scheduler.mixture.online is not None
    finally:
        scheduler.stop()
