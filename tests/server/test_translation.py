"""A served store of pairs: translations and their provenance against `translate` and brute force, limits and errors."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from helpers.models import pair_tokenizer, tiny, tiny_tokenizer
from helpers.pairs import BruteForce, pair_lm, pairs, read_last, start_tokens
from helpers.server import serving
from helpers.stores import documents
from knnlm.errors import ModelError, ParameterError, ShardChanged
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.source_domain import SourceDomain
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.auth import ApiKeys
from knnlm.server.engine import translator
from knnlm.server.engine.translator import _prefix_pieces, piece_texts
from knnlm.server.translation import TranslationService, make_service

STORED = pairs(24)
SOURCES = [each.source_text or "" for each in (*STORED[:8], *pairs(8, start=70))]
SETTINGS = {"k": 5, "knn_temperature": 4.0, "lmbda": 0.6}
ADMIN = "admin-key-1234"
TOKENS = 12


@pytest.fixture(scope="module", params=["marian", "t5", "m2m_100"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def every(family, tmp_path_factory):
    lm = pair_lm(family)
    path = tmp_path_factory.mktemp(family) / "pairs.store"
    build(STORED, path, lm=lm, key_format="float32")
    return Mixture.open(path, lm, **SETTINGS)


@pytest.fixture(scope="module")
def running(every):
    with serving(every) as served:
        yield served


def marian_mixture(path, **settings):
    lm = pair_lm("marian")
    build(STORED, path, lm=lm, key_format="float32")
    return Mixture.open(path, lm, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return marian_mixture(tmp_path_factory.mktemp("marian") / "pairs.store")


@pytest.fixture(scope="module")
def marian(mixture):
    with serving(mixture, output_tokens=100) as served:
        yield served


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A mixture with a slow search, so that a batch runs while others arrive."""
    slow = marian_mixture(tmp_path / "pairs.store", lmbda=0.01)
    slow.lm.model.generation_config.eos_token_id = None
    search = slow.knn.search

    def later(*args):
        time.sleep(0.03)
        return search(*args)

    monkeypatch.setattr(slow.knn, "search", later)
    return slow


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)


def error(served, path, **body):
    with served.client() as client:
        # With escapes: httpx cannot send unpaired surrogates.
        answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def translate(served, text, **options):
    return served.post("/v1/translate", text=text, **{"max_tokens": TOKENS, **options})


@pytest.mark.parametrize("beams", [None, 1, 3])
def test_parallel_requests_return_what_translate_returns_one_by_one(running, every, beams):
    settings = {} if beams is None else {"num_beams": beams}
    right = [every.translate([source], max_new_tokens=TOKENS, **settings)[0] for source in SOURCES]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda source: translate(running, source, beams=beams), SOURCES))
    assert [answer["translations"][0]["text"] for answer in found] == right
    assert len(set(right)) > 4  # else the order of results would not be tested
    together = translate(running, SOURCES, beams=beams)
    assert [each["text"] for each in together["translations"]] == right
    assert [each["index"] for each in together["translations"]] == list(range(16))
    assert [each["knnlm"] for each in together["translations"]] == [None] * 16


def test_waiting_requests_with_equal_settings_share_a_batch(marian, mixture):
    scheduler = marian.service.scheduler
    before = scheduler.steps
    answer = translate(marian, SOURCES)
    assert scheduler.steps - before == 1
    read = [len(mixture.lm.tokenizer(source)["input_ids"]) for source in SOURCES]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(read)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (answer["model"], answer["object"]) == ("docs", "translation")


def test_provenance_is_that_of_brute_force(running, every, family):
    lm, brute_force = every.lm, BruteForce(every.lm, family, STORED)
    source = SOURCES[1]
    (answer,) = translate(running, source, sources=3)["translations"]
    tokens, ids = answer["knnlm"]["tokens"], lm.tokenizer(source)["input_ids"]
    assert "".join(token["text"] for token in tokens) == answer["text"] != ""
    written = start_tokens(family, lm.tokenizer)
    for token in tokens:
        key, p_lm = read_last(lm, family, ids, written)
        p = brute_force.distribution(key, p_lm, **SETTINGS)
        assert int(p.argmax()) == token["id"]
        p_knn = (p[token["id"]] - (1 - SETTINGS["lmbda"]) * p_lm[token["id"]]) / SETTINGS["lmbda"]
        right = (p[token["id"]], p_lm[token["id"]], p_knn, SETTINGS["lmbda"])
        assert [token[name] for name in ("p", "p_lm", "p_knn", "weight")] == pytest.approx(right, abs=1e-4)
        written = [*written, token["id"]]
        assert len(token["sources"]) == 3
        check_sources(token["sources"])


def check_sources(sources):
    """Each neighbour is a stored pair: its target around the entry, and its source."""
    assert [source["weight"] for source in sources] == sorted((source["weight"] for source in sources), reverse=True)
    stored = {document.id: document for document in STORED}
    for source in sources:
        document = stored[source["document"]]
        assert source["source_text"] == document.source_text
        assert source["before"].strip() in document.text
        assert source["source"] == document.source


def test_second_model_as_a_memory_is_served_and_can_be_left_out(tmp_path):
    tiny("marian", seed=1).save_pretrained(tmp_path / "decoder")
    pair_tokenizer().save_pretrained(tmp_path / "decoder")
    memories = f"knn:0.3,decoder={tmp_path / 'decoder'}:0.4"
    mixture = marian_mixture(tmp_path / "pairs.store", memories=memories, lmbda=None)
    start, decoder = start_tokens("marian", mixture.lm.tokenizer), mixture.readers.models[1]
    with serving(mixture) as served:
        (answer,) = translate(served, SOURCES[1], sources=1)["translations"]
        together = translate(served, SOURCES, beams=2)["translations"]
        (alone,) = translate(served, SOURCES[1], memory={"memories": ["knn"]}, sources=1)["translations"]
    assert answer["text"] == mixture.translate([SOURCES[1]], max_new_tokens=TOKENS)[0]
    assert [each["text"] for each in together] == mixture.translate(SOURCES, max_new_tokens=TOKENS, num_beams=2)
    source, written = mixture.lm.tokenizer(SOURCES[1])["input_ids"], list(start)
    for token in answer["knnlm"]["tokens"]:
        (_, p_lm), (_, p_decoder) = (read_last(each, "marian", source, written) for each in (mixture.lm, decoder))
        knn, second = token["shares"]
        assert (knn["weight"], second["weight"]) == pytest.approx((0.3, 0.4))
        assert second["p"] == pytest.approx(p_decoder[token["id"]], abs=1e-5)
        right = 0.3 * p_lm[token["id"]] + 0.3 * knn["p"] + 0.4 * p_decoder[token["id"]]
        assert token["p"] == pytest.approx(right, abs=1e-4)
        written.append(token["id"])
    for token in alone["knnlm"]["tokens"]:
        assert "shares" not in token  # of one memory: they are p_knn and weight
        right = (1 - token["weight"]) * token["p_lm"] + token["weight"] * token["p_knn"]
        assert token["p"] == pytest.approx(right, abs=1e-5)


def test_tokens_without_sources_have_probabilities_and_can_be_rescored(marian):
    (answer,) = translate(marian, SOURCES[2], tokens=True)["translations"]
    tokens = answer["knnlm"]["tokens"]
    assert all(0 < token["p"] <= 1 and token["sources"] == [] for token in tokens)
    rescored = marian.post("/v1/rescore", id=answer["knnlm"]["id"], **{"lambda": 0.0})
    assert [token["p"] for token in rescored["knnlm"]["tokens"]] == pytest.approx([token["p_lm"] for token in tokens])


def test_provenance_of_online_weights_is_that_of_generation(tmp_path):
    mixture = marian_mixture(tmp_path / "pairs.store")
    mixture.tune(pairs(12, start=40), ks=[4], knn_temperatures=[4.0])
    tuned = Mixture.open(mixture.path, mixture.lm)
    tuned.online = OnlineConfig(0.1, 0.01)  # tune chooses none for pairs, whose targets are not given
    assert tuned.layer.stateful
    from knnlm.generation.seq2seq import KnnForSeq2SeqLM

    with serving(tuned) as served:
        (answer,) = translate(served, SOURCES[0], tokens=True)["translations"]
    inputs = tuned.lm.pad_sources(tuned.lm.encode_sources(SOURCES[:1]))
    scores = {"return_dict_in_generate": True, "output_logits": True}
    output = KnnForSeq2SeqLM(tuned).generate(**inputs, max_new_tokens=TOKENS, **scores)
    tokens = answer["knnlm"]["tokens"]
    right = [float(logits[0, token["id"]].exp()) for logits, token in zip(output.logits, tokens, strict=False)]
    assert [token["p"] for token in tokens] == pytest.approx(right, rel=1e-3)


def test_a_subset_search_is_that_of_translate(tmp_path):
    mixture = marian_mixture(tmp_path / "pairs.store", options=MixtureOptions(subset=3))
    right = mixture.translate(SOURCES, max_new_tokens=TOKENS)
    assert right != marian_mixture(tmp_path / "all.store").translate(SOURCES, max_new_tokens=TOKENS)
    with serving(mixture) as served:
        answer = translate(served, SOURCES, sources=5)
    assert [each["text"] for each in answer["translations"]] == right
    for each in answer["translations"]:
        found = {source["document"] for token in each["knnlm"]["tokens"] for source in token["sources"]}
        assert 0 < len(found) <= 3


def test_sources_outside_the_domain_are_translated_by_the_model_alone(tmp_path):
    mixture = marian_mixture(tmp_path / "pairs.store")
    alone = mixture.translate(SOURCES, max_new_tokens=TOKENS, use_memory=False)
    right = mixture.translate(SOURCES, max_new_tokens=TOKENS)
    assert all(own != other for own, other in zip(right, alone, strict=True))
    width = mixture.lm.model.config.d_model
    none = (torch.zeros(width), torch.zeros(width), torch.tensor(-1.0), torch.zeros(3))  # no source is inside
    mixture.source_domain = SourceDomain(*none)
    with serving(mixture) as served:
        answers = translate(served, SOURCES, sources=2)["translations"]
        unchecked = translate(served, SOURCES, memory={"domain_check": False})["translations"]
    stored = [source in {pair.source_text for pair in STORED} for source in SOURCES]
    assert stored == [True] * 8 + [False] * 8
    assert [each["memory"] for each in answers] == stored
    assert [each["text"] for each in answers] == [*right[:8], *alone[8:]]
    assert [each["text"] for each in unchecked] == right
    assert {each["memory"] for each in unchecked} == {True}
    for each in answers[8:]:
        assert all(token["sources"] == [] and token["p"] == token["p_lm"] for token in each["knnlm"]["tokens"])


def test_odds_of_the_end_are_those_of_the_tuned_weights_only(tmp_path):
    mixture = marian_mixture(tmp_path / "pairs.store")
    mixture.end_odds = 1e3
    short = mixture.translate(SOURCES[:3], max_new_tokens=TOKENS)
    mixture.end_odds = 1.0
    right = mixture.translate(SOURCES[:3], max_new_tokens=TOKENS)
    assert short != right
    mixture.end_odds = 1e3
    with serving(mixture) as served:
        found = translate(served, SOURCES[:3])["translations"]
        by_lambda = translate(served, SOURCES[:3], memory={"lambda": mixture.lmbda})["translations"]
    assert [each["text"] for each in found] == short
    assert [each["text"] for each in by_lambda] == right


def test_memory_settings_are_those_of_the_request(marian, mixture):
    alone = mixture.translate(SOURCES[:4], max_new_tokens=TOKENS, use_memory=False)
    found = translate(marian, SOURCES[:4], memory={"off": True}, tokens=True)["translations"]
    assert [each["text"] for each in found] == alone
    assert found[0]["knnlm"]["tokens"][0]["p"] == found[0]["knnlm"]["tokens"][0]["p_lm"]
    strong = Mixture.open(mixture.path, mixture.lm, k=1, lmbda=0.99, knn_temperature=1.0)
    memory = {"k": 1, "lambda": 0.99, "knn_temperature": 1.0}
    found = translate(marian, SOURCES[:4], memory=memory)["translations"]
    assert [each["text"] for each in found] == strong.translate(SOURCES[:4], max_new_tokens=TOKENS)
    assert [each["text"] for each in found] != alone


def test_sampling_depends_on_the_seed_and_not_on_other_requests(marian):
    def text(seed):
        return translate(marian, SOURCES[0], temperature=1.0, seed=seed)["translations"][0]["text"]

    alone = [text(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, range(6))) == alone
    assert len(set(alone)) > 1


def test_a_translation_ends_at_max_tokens_or_at_its_end(marian, mixture):
    (short,) = translate(marian, SOURCES[0], max_tokens=1, tokens=True)["translations"]
    assert short["finish_reason"] == "length"
    assert len(short["knnlm"]["tokens"]) == 1
    answer = translate(marian, STORED[0].source_text, memory={"k": 1, "lambda": 1.0, "knn_temperature": 1.0})
    right = {"index": 0, "text": STORED[0].text, "finish_reason": "stop", "memory": True, "knnlm": None}
    assert answer["translations"][0] == right
    target = mixture.lm.encode(STORED[0].text)
    assert answer["usage"]["completion_tokens"] == len(target) + 1  # with the end token


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": ["a"] * 65}, "text: a list of 1 to 64 texts is allowed, not 65."),
        ({"text": []}, "text: a list of 1 to 64 texts is allowed, not 0."),
        ({"text": "  "}, "text: the text is empty"),
        ({"text": ["a", ""]}, "text.1: the text is empty"),
        ({"text": "Anna " * 200}, "Split it into sentences."),
        ({"text": "Anna " * 100_000}, "far more than 128 tokens"),
        ({"text": "a", "beam": 3}, "beam: unknown field."),
        ({"text": "a", "beams": 17}, "beams"),
        ({"text": "a", "beams": 2, "temperature": 1.0}, "sampling with several beams"),
        ({"text": "a", "max_tokens": 101}, "101 tokens are requested, but this server generates 100 at most."),
        ({"text": "a", "memory": {"memories": ["cash"]}}, "There is no memory 'cash'. There are: knn."),
        ({"text": "a", "sources": 3, "tokens": False}, "tokens: sources are those of tokens"),
        ({"text": ["a"] * 64, "sources": 64}, "sources, but this server returns 65,536 at most"),
        ({"text": "\ud800"}, "not valid Unicode"),
    ],
)
def test_invalid_requests_are_refused(marian, body, message):
    assert message in error(marian, "/v1/translate", **body)


def test_more_beams_than_slots_are_refused(mixture):
    with serving(mixture, slots=2) as served:
        assert "3 beams and copies are requested, but this server has 2 slots." in error(
            served, "/v1/translate", text="a", beams=3
        )
        assert translate(served, SOURCES[:5], beams=2)["translations"][4]["text"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/score", {"text": "a"}, "/v1/score needs a store of texts, but this one has pairs. Use /v1/translate"),
        ("/v1/neighbours", {"prompt": "a"}, "/v1/neighbours needs a store of texts"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt: tokens are not supported"),
        ("/v1/completions", {"prompt": "a", "stop": "."}, "stop: not supported with a store of pairs."),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo: not supported"),
        ("/v1/completions", {"prompt": ""}, "prompt: the text is empty"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens: a translation has at least one token."),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "a"}]}, "no message of the role user"),
    ],
)
def test_what_makes_no_sense_for_pairs_is_refused(marian, path, body, message):
    assert message in error(marian, path, **body)


def test_a_store_of_texts_refuses_translations(tmp_path):
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny")
    mixture = Mixture.open(build(documents(4), tmp_path / "store", lm=lm).path, lm, k=2)
    with serving(mixture, keys=ApiKeys((), (ADMIN.encode(),))) as served:
        assert "/v1/translate needs a store of pairs, but this one has texts." in error(
            served, "/v1/translate", text="a"
        )
        with served.client(ADMIN) as client:
            pair = {"id": "x", "text": "a", "source_text": "b"}
            answer = client.post("/v1/documents", json={"documents": [pair]})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "documents.0.source_text: only for pairs."
        assert served.service.model_metadata()["knnlm"]["pairs"] is False


def test_sounds_are_not_served(mixture, monkeypatch):
    monkeypatch.setattr(type(mixture.lm), "reads_audio", True)
    with pytest.raises(ModelError, match="reads sounds, which are not served"):
        make_service(mixture, name="x")


def test_translations_are_not_drafted(mixture):
    with pytest.raises(ParameterError, match="Translations cannot be drafted"):
        make_service(mixture, name="x", draft=True)


def test_completions_translate_their_prompts(marian, mixture):
    right = mixture.translate(SOURCES[:3], max_new_tokens=TOKENS)
    client = openai.OpenAI(base_url=f"{marian.url}/v1", api_key="none")
    answer = client.completions.create(model="docs", prompt=SOURCES[:3], max_tokens=TOKENS)
    assert [choice.text for choice in answer.choices] == right
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(mixture.lm.tokenizer(source)["input_ids"]) for source in SOURCES[:3])
    several = client.completions.create(
        model="docs", prompt=SOURCES[0], n=2, temperature=1.0, seed=1, max_tokens=TOKENS
    )
    assert len({choice.text for choice in several.choices}) == 2
    scored = client.completions.create(model="docs", prompt=SOURCES[0], logprobs=2, max_tokens=TOKENS)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    provenance = scored.choices[0].model_extra["knnlm"]["tokens"]
    assert logprobs.token_logprobs == pytest.approx([torch.tensor(each["p"]).log().item() for each in provenance])
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert answer.choices[0].model_extra["knnlm"]["tokens"][0]["p"] is None


def test_chat_translates_the_last_user_message(marian, mixture):
    (right,) = mixture.translate(SOURCES[:1], max_new_tokens=TOKENS)
    client = openai.OpenAI(base_url=f"{marian.url}/v1", api_key="none")
    messages = [
        {"role": "system", "content": "Translate."},
        {"role": "user", "content": SOURCES[1]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": SOURCES[0]}]},
    ]
    answer = client.chat.completions.create(model="docs", messages=messages, max_tokens=TOKENS)
    assert answer.choices[0].message.content == right
    scored = client.chat.completions.create(
        model="docs", messages=messages, max_tokens=TOKENS, logprobs=True, top_logprobs=1
    )
    content = scored.choices[0].logprobs.content
    assert content[0].logprob == pytest.approx(content[0].top_logprobs[0].logprob)
    stream = client.chat.completions.create(
        model="docs", messages=messages, max_tokens=TOKENS, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == right
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_a_full_queue_is_429(slow):
    with serving(slow, slots=1, queue=2) as served, served.client() as client:
        body = {"text": SOURCES[0], "max_tokens": 25}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: client.post("/v1/translate", json=body), range(8)))
        statuses = sorted(answer.status_code for answer in answers)
        assert set(statuses) == {200, 429}
        busy = next(answer for answer in answers if answer.status_code == 429)
        assert int(busy.headers["Retry-After"]) >= 1
        assert client.post("/v1/translate", json={**body, "max_tokens": 1}).status_code == 200


def test_a_late_request_is_504_and_frees_its_slots(slow):
    with serving(slow, seconds=0.2) as served, served.client() as client:
        began = time.monotonic()
        answer = client.post("/v1/translate", json={"text": SOURCES[0], "max_tokens": 100})
        assert answer.status_code == 504, answer.text
        assert time.monotonic() - began < 2.5  # 100 tokens take 3 seconds
        until(lambda: served.service.scheduler.active == 0, 1.0)


@pytest.mark.parametrize("off", [False, True])
def test_a_disconnected_client_ends_its_batch(slow, off, monkeypatch):
    forward = slow.lm.model.forward

    def later(*args, **options):
        time.sleep(0.03)
        return forward(*args, **options)

    if off:
        monkeypatch.setattr(slow.lm.model, "forward", later)
    with serving(slow) as served:
        scheduler = served.service.scheduler
        with served.client(timeout=0.3) as client, pytest.raises(Exception, match="timed out"):
            client.post("/v1/translate", json={"text": SOURCES[0], "max_tokens": 120, "memory": {"off": off}})
        until(lambda: scheduler.active == 0, 1.5)  # 120 tokens take 4 seconds
        assert scheduler.tokens_generated == 0


def test_a_failed_batch_fails_its_requests_alone(tmp_path, monkeypatch):
    mixture = marian_mixture(tmp_path / "pairs.store")
    right = mixture.translate(SOURCES[:1], max_new_tokens=TOKENS)
    generate = translator.generate_targets
    failing = threading.Event()
    failing.set()

    def fail(*args, **options):
        if failing.is_set():
            raise RuntimeError("out of memory")
        return generate(*args, **options)

    monkeypatch.setattr(translator, "generate_targets", fail)
    with serving(mixture) as served, served.client() as client:
        answer = client.post("/v1/translate", json={"text": SOURCES[0]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            500,
            "Internal server error. See the server's log.",
        )
        failing.clear()
        assert translate(served, SOURCES[0])["translations"][0]["text"] == right[0]
        assert client.get("/healthz").status_code == 200


def test_batch_is_repeated_where_a_shard_has_changed(marian, monkeypatch):
    whole, failures = translator.Translator._generate_all, [2]

    def generate(this, requests):
        if failures[0]:
            failures[0] -= 1
            raise ShardChanged("part-1 was changed. Repeat it.")
        return whole(this, requests)

    expected = translate(marian, SOURCES[0])
    monkeypatch.setattr(translator.Translator, "_generate_all", generate)
    assert translate(marian, SOURCES[0])["translations"] == expected["translations"]
    assert failures == [0]
    failures[0] = 100
    with marian.client() as client:
        refused = client.post("/v1/translate", json={"text": SOURCES[0]})
    assert (refused.status_code, "was changed" in refused.text, failures[0]) == (503, True, 100 - 4)


def test_added_pairs_are_found_and_removed_ones_are_not(tmp_path):
    mixture = marian_mixture(tmp_path / "pairs.store", k=1, lmbda=1.0, knn_temperature=1.0)
    new = {"id": "new", "text": "the zebra sleeps", "source_text": "das Zebra schläft", "fields": {"by": "Anna"}}
    with (
        serving(mixture, keys=ApiKeys((b"user-key-1234",), (ADMIN.encode(),))) as served,
        served.client(ADMIN) as client,
    ):

        def first():
            body = {"text": new["source_text"], "sources": 1, "max_tokens": 40}
            (answer,) = client.post("/v1/translate", json=body).json()["translations"]
            return answer["text"], answer["knnlm"]["tokens"][0]["sources"][0]

        assert first()[1]["document"] != "new"
        answer = client.post("/v1/documents", json={"documents": [{**new, "source_text": None}]})
        assert answer.status_code == 400
        assert "documents.0.source_text: missing: this store has pairs" in answer.json()["error"]["message"]
        added = client.post("/v1/documents", json={"documents": [new]}).json()
        assert (added["added"], added["skipped"]) == (1, 0)
        assert client.post("/v1/documents", json={"documents": [new]}).json()["skipped"] == 1
        text, source = first()
        assert text == new["text"]
        assert (source["document"], source["source_text"]) == ("new", new["source_text"])
        passage = client.get(f"/v1/documents/{source['number']}", params={"entry": source["entry"]}).json()
        assert passage["source_text"] == new["source_text"]
        assert (passage["before"] + passage["token"] + passage["after"]).startswith(new["text"])
        assert client.delete(f"/v1/documents/{source['number']}").json() == {"removed": 1}
        assert first()[1]["document"] != "new"
        metrics = client.get("/metrics").text
        assert "knnlm_reloads_total 2.0" in metrics
        assert client.get("/healthz").json() == {"status": "ok"}


def test_metadata_and_schema_describe_translation(marian, mixture):
    assert isinstance(marian.service, TranslationService)
    with marian.client() as client:
        own = client.get("/v1/models").json()["data"][0]["knnlm"]
        assert (own["pairs"], own["max_prompt_tokens"]) == (True, mixture.lm.max_source_length)
        paths = json.loads(client.get("/openapi.json").text)["paths"]
        assert "/v1/translate" in paths


def test_pieces_join_to_the_translation(every):
    lm = every.lm
    for document in STORED[:6]:
        target = lm.encode(document.text)
        pieces = piece_texts(lm, target)
        assert len(pieces) == len(target)
        assert "".join(pieces) == lm.tokenizer.decode(target, skip_special_tokens=True).strip()
    assert _prefix_pieces("I don't", ["I", "I do", "I do n't"]) == ["I", " do", "n't"]
    assert piece_texts(lm, []) == []
