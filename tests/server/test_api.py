"""The HTTP API: a real server on a loopback port, the real openai client, plain HTTP."""

from __future__ import annotations

import json
import math

import numpy as np
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from helpers.models import TEXT
from helpers.server import chat_mixture, serving
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.generation.causal import KnnForCausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig

PROMPT = "The memory of a model"
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return chat_mixture(tmp_path_factory.mktemp("serve") / "store", TEMPLATE)


def generated(mixture, prompt, tokens):
    """Return the text that transformers' own loop generates."""
    given = torch.tensor([mixture.lm.prompt(prompt)])
    made = KnnForCausalLM(mixture).generate(
        given, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return mixture.lm.tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)


def test_completion_equals_transformers_generate(client, mixture):
    answer = client.completions.create(model="docs", prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.text == generated(mixture, PROMPT, 12)
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(mixture.lm.encode(PROMPT))
    assert answer.usage.completion_tokens == 12
    assert choice.knnlm["tokens"][0]["p"] > 0


def test_streamed_chunks_join_to_the_whole_completion(client, mixture):
    chunks = list(
        client.completions.create(
            model="docs",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"sources": 2},
        )
    )
    assert chunks[-1].usage.total_tokens == len(mixture.lm.encode(PROMPT)) + 12
    pieces = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(piece.text for piece in pieces) == generated(mixture, PROMPT, 12)
    assert [piece.finish_reason for piece in pieces] == [None] * 12 + ["length"]
    for piece in pieces[:-1]:
        assert piece.text == "".join(token["text"] for token in piece.knnlm["tokens"])
        assert len(piece.knnlm["tokens"][0]["sources"]) == 2
    assert len({piece.knnlm["id"] for piece in pieces}) == 1


def test_choices_are_ordered_by_prompt_and_copy(client, mixture):
    prompts = [PROMPT, "When", "the far ones softly"]
    answer = client.completions.create(model="docs", prompt=prompts, max_tokens=5, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        assert choice.text == generated(mixture, prompts[choice.index // 2], 5)
    tokens = [mixture.lm.encode(prompt) for prompt in prompts]
    again = client.completions.create(model="docs", prompt=tokens, max_tokens=5, temperature=0)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices[::2]]


def test_sampling_with_a_seed_is_reproducible(client):
    def ask(seed):
        return client.completions.create(model="docs", prompt=PROMPT, max_tokens=15, seed=seed).choices[0].text

    assert ask(5) == ask(5)
    assert len({ask(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_ends_the_text_before_it(client, mixture, stream):
    whole = generated(mixture, PROMPT, 30)
    stop = whole[14:19]
    assert len(mixture.lm.encode(stop)) > 1
    end = whole.index(stop)
    answer = client.completions.create(
        model="docs", prompt=PROMPT, max_tokens=30, temperature=0, stop=["never", stop], stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[:end]
    assert choices[-1].finish_reason == "stop"
    texts = [token["text"] for choice in choices for token in choice.knnlm["tokens"]]
    assert "".join(texts) == whole[:end]


def test_beginning_of_a_stop_string_is_returned_if_it_does_not_complete(client, mixture):
    whole = generated(mixture, PROMPT, 10)
    answer = client.completions.create(
        model="docs", prompt=PROMPT, max_tokens=10, temperature=0, stop=[whole[-3:] + "?", whole[2:5] + "!"]
    )
    assert answer.choices[0].text == whole


def test_streamed_characters_of_several_tokens_are_complete(client, mixture):
    text = "naïve 日本 🙂 end"
    assert len(mixture.lm.encode(text)) > len(text)
    chunks = client.completions.create(model="docs", prompt=text, max_tokens=0, echo=True, stream=True, temperature=0)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_echoed_logprobs_equal_those_of_transformers(client, server, mixture):
    """Log-probabilities of prompt and continuation against the transformers model, position by position."""
    ids = mixture.lm.prompt(PROMPT)
    answer = client.completions.create(model="docs", prompt=ids[1:], max_tokens=3, temperature=0, echo=True, logprobs=4)
    logprobs = answer.choices[0].logprobs
    all_ids = [token["id"] for token in answer.choices[0].knnlm["tokens"]]
    assert all_ids[: len(ids) - 1] == ids[1:]
    with torch.no_grad():
        log_p = KnnForCausalLM(mixture)(torch.tensor([[ids[0], *all_ids]])).logits[0].log_softmax(-1)
    right = log_p[range(len(all_ids)), all_ids]
    np.testing.assert_allclose(logprobs.token_logprobs, right, rtol=1e-3, atol=1e-4)
    for place, top in enumerate(logprobs.top_logprobs):
        best = log_p[place].topk(4).values
        assert len(top) <= 4
        assert max(top.values()) == pytest.approx(best[0].item(), rel=1e-3, abs=1e-4)
        assert min(top.values()) >= best[3].item() - 1e-3
    assert [answer.choices[0].text[offset:][:1] for offset in logprobs.text_offset[:3]] == [
        token[:1] for token in logprobs.tokens[:3]
    ]
    assert answer.choices[0].text.startswith(PROMPT)
    first = client.completions.create(model="docs", prompt=ids, max_tokens=0, echo=True, logprobs=1)
    assert first.choices[0].logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(first.choices[0].logprobs.token_logprobs[1:], right[: len(ids) - 1], rtol=1e-3)


def test_chat_uses_the_models_template(client, mixture):
    messages = [{"role": "system", "content": "The memory"}, {"role": "user", "content": "of a model"}]
    answer = client.chat.completions.create(
        model="docs", messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    prompt = mixture.lm.encode("<system>The memory\n<user>of a model\n<assistant>")
    given = torch.tensor([prompt])
    made = KnnForCausalLM(mixture).generate(
        given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=given * 0 + 1
    )
    text = mixture.lm.tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert answer.usage.prompt_tokens == len(prompt)
    for logprobs, token in zip(choice.logprobs.content, choice.knnlm["tokens"], strict=True):
        assert math.exp(logprobs.logprob) == pytest.approx(token["p"], rel=1e-4)
        assert logprobs.top_logprobs[0].logprob >= logprobs.logprob - 1e-6
    stream = client.chat.completions.create(
        model="docs", messages=messages, max_completion_tokens=8, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text


def test_only_messages_of_users_are_evidence_and_read_by_the_cache(mixture):
    """The conversation continues as `generate` continues it with the mask of what the users wrote."""
    options = {"memories": "knn:0.2,cache:0.6", "k": 8, "knn_temperature": 4.0, "use_tuned": False}
    cached = Mixture.open(mixture.path, mixture.lm, **options)
    cached.online = OnlineConfig(0.3, 0.02)
    said = ["The memory of a model is ", "the memory of"]
    messages = [
        {"role": "system", "content": "The memory of a model."},
        {"role": "user", "content": said[0]},
        {"role": "assistant", "content": "a model"},
        {"role": "user", "content": [{"type": "text", "text": said[1]}]},
    ]
    text = f"<system>The memory of a model.\n<user>{said[0]}\n<assistant>a model\n<user>{said[1]}\n<assistant>"
    begins = [text.index(f"<user>{each}\n") + len("<user>") for each in said]
    ranges = [(begin, begin + len(each)) for begin, each in zip(begins, said, strict=True)]
    encoding = mixture.lm.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    given = torch.tensor([encoding["input_ids"]])
    readable = torch.tensor(
        [[any(begin <= a and b <= end for begin, end in ranges) for a, b in encoding["offset_mapping"]]]
    )
    assert 0 < readable.sum() < readable.numel()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": given * 0 + 1}
    settings |= {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    expected, other = (
        KnnForCausalLM(cached).generate(given, readable_mask=mask, **settings) for mask in (readable, None)
    )
    with serving(cached) as running:
        answer = running.post("/v1/chat/completions", model="docs", messages=messages, max_tokens=8, temperature=0)
    tokens = answer["choices"][0]["knnlm"]["tokens"]
    ids = expected.sequences[0, given.shape[1] :].tolist()
    assert answer["choices"][0]["message"]["content"] == mixture.lm.tokenizer.decode(ids, skip_special_tokens=True)
    probs = [float(logits[0, token].exp()) for logits, token in zip(expected.logits, ids, strict=True)]
    assert [token["p"] for token in tokens] == pytest.approx(probs, rel=1e-3)
    assert float(other.logits[0][0, ids[0]].exp()) != pytest.approx(probs[0], rel=1e-2)


def test_chat_without_a_template_is_an_error(lm, store):
    with serving(Mixture.open(store.path, lm)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="docs", messages=[{"role": "user", "content": "Hello"}])
        client.close()


def test_memory_settings_of_a_request_are_used(server, client, mixture):
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    off = server.post("/v1/completions", **body, memory={"off": True})["choices"][0]
    given = torch.tensor([mixture.lm.prompt(PROMPT)])
    made = mixture.lm.model.generate(given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert off["text"] == mixture.lm.tokenizer.decode(made[0, given.shape[1] :])
    assert {(token["p_knn"], token["weight"]) for token in off["knnlm"]["tokens"]} == {(None, 0)}
    other = server.post("/v1/completions", **body, memory={"lambda": 0.9, "k": 3, "knn_temperature": 1.0})["choices"][0]
    opened = Mixture.open(mixture.store.path, mixture.lm, k=3, knn_temperature=1.0, lmbda=0.9)
    assert other["text"] == generated(opened, PROMPT, 6)
    for token in other["knnlm"]["tokens"]:
        assert token["weight"] == pytest.approx(0.9)
        assert token["p"] == pytest.approx(0.1 * token["p_lm"] + 0.9 * token["p_knn"], rel=1e-4)
    with pytest.raises(openai.BadRequestError, match="There are: knn"):
        client.completions.create(model="docs", prompt="a", extra_body={"memory": {"memories": ["cache"]}})


def test_score_equals_evaluation_and_can_be_rescored(server, mixture):
    text = TEXT[:150]
    scored = server.post("/v1/score", text=text, sources=2)
    right = mixture.evaluate([Document(id="a", source="a", text=text)])
    assert scored["perplexity"] == pytest.approx(right.perplexity, rel=1e-3)
    assert scored["perplexity_lm"] == pytest.approx(right.base_perplexity, rel=1e-3)
    assert "".join(token["text"] for token in scored["knnlm"]["tokens"]) == text
    passes = server.service.scheduler.tokens_read
    again = server.post("/v1/rescore", id=scored["knnlm"]["id"], **{"lambda": 0.2, "k": 5, "knn_temperature": 3.0})
    assert server.service.scheduler.tokens_read == passes
    other = Mixture.open(mixture.store.path, mixture.lm, k=5, knn_temperature=3.0, lmbda=0.2)
    # All documents begin with the same context, so the neighbours of the first position are arbitrary.
    probs = [token["p"] for token in again["knnlm"]["tokens"]]
    np.testing.assert_allclose(probs[1:], [token.p for token in other.explain(text)][1:], rtol=1e-3)
    assert again["perplexity"] == pytest.approx(math.exp(-np.mean(np.log(probs))), rel=1e-4)
    fresh = server.post("/v1/score", text=text, memory={"lambda": 0.2, "k": 5, "knn_temperature": 3.0})
    np.testing.assert_allclose(probs, [token["p"] for token in fresh["knnlm"]["tokens"]], rtol=1e-4)
    with server.client() as client:
        assert client.post("/v1/rescore", json={"id": "trace-none"}).status_code == 404
        answer = client.post("/v1/rescore", json={"id": scored["knnlm"]["id"], "k": 17})
        assert "16 at most" in answer.json()["error"]["message"]


def test_neighbours_refer_to_passages_in_their_documents(server, mixture):
    found = server.post("/v1/neighbours", prompt=PROMPT, k=4)["neighbours"]
    assert len(found) == 4
    weights = [neighbour["weight"] for neighbour in found]
    assert weights == sorted(weights, reverse=True)
    store = mixture.store
    for neighbour in found:
        document = store.document_at(neighbour["entry"])
        assert (neighbour["document"], neighbour["number"]) == (document.id, document.number)
        with server.client() as client:
            passage = client.get(f"/v1/documents/{neighbour['number']}", params={"entry": neighbour["entry"]}).json()
        assert passage["token"] == neighbour["token"]
        assert passage["before"].endswith(neighbour["before"])
        assert passage["after"].startswith(neighbour["after"])


def test_documents_can_be_listed_searched_and_read_in_pages(server):
    right = documents(20)
    with server.client() as client:
        all_of_them = client.get("/v1/documents", params={"limit": 7, "offset": 14}).json()
        assert all_of_them["total"] == 20
        assert [each["id"] for each in all_of_them["documents"]] == [document.id for document in right[14:]]
        found = client.get("/v1/documents", params={"query": "JSONL:1"}).json()
        assert {each["source"] for each in found["documents"]} == {
            document.source for document in right if ":1" in document.source
        }
        text, offset = "", 0
        while True:
            page = client.get("/v1/documents/3", params={"offset": offset, "limit": 20}).json()
            text += page["before"]
            offset += 20
            if not page["more"]:
                break
        assert text == right[3].text
        assert client.get("/v1/documents/999").status_code == 404
        assert client.get("/v1/documents/3", params={"entry": 0}).status_code == 404


def test_model_is_listed_with_its_settings(client, server):
    (model,) = client.models.list().data
    assert model.id == "docs"
    assert (model.knnlm["k"], model.knnlm["lambda"], model.knnlm["memories"]) == (16, 0.6, ["knn"])
    assert client.models.retrieve("docs").id == "docs"
    with pytest.raises(openai.NotFoundError, match="There is: docs"):
        client.completions.create(model="gpt-4", prompt="a")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "memory": {"lambda": 1.5}}, "memory.lambda"),
        ({"prompt": "a", "memory": {"k": 0}}, "memory.k"),
        ({"prompt": "a", "max_tokens": 1000}, None),
        ({"prompt": "a " * 500, "max_tokens": 1}, None),
        ({"prompt": [319, 320]}, None),
        ({"prompt": "\ud800"}, None),
        ({"prompt": "a", "\ud800": 1}, None),
        ({"prompt": "a", "best_of": 3}, None),
    ],
)
def test_errors_have_openais_format(server, body, param):
    with server.client() as client:
        answer = client.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"].startswith(param)


def test_invalid_json_and_unknown_routes_are_errors_in_openais_format(server):
    with server.client() as client:
        headers = {"Content-Type": "application/json"}
        for content in (b"{", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}", b"\xff"):
            answer = client.post("/v1/completions", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), content[:20]
        assert client.post("/v1/completions", content=b"prompt=a").status_code == 415
        assert client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
        assert client.get("/v1/completions").status_code == 405
        for content, message in (
            (b'{"prompt": "x",', "The body is not valid JSON (at character 15). Send one JSON object."),
            (b"", "The body is empty. Send one JSON object."),
            (b"[]", "The body must be one JSON object."),
        ):
            error = client.post("/v1/completions", content=content, headers=headers).json()["error"]
            assert (error["message"], error["param"]) == (message, None)
        assert "begin with /v1" in client.get("/models").json()["error"]["message"]


def test_metrics_count_requests_and_tokens(server):
    def figures():
        with server.client() as client:
            text = client.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}

    before = figures()
    server.post("/v1/completions", prompt=PROMPT, max_tokens=7, temperature=0)
    after = figures()

    def grown(name, **labels):
        key = (name, *sorted(labels.items()))
        return after[key] - before.get(key, 0)

    assert grown("knnlm_tokens_generated_total") == 7
    assert grown("knnlm_tokens_read_total") == len(server.service.mixture.lm.prompt(PROMPT)) + 6
    assert grown("knnlm_searches_total") == 7
    assert grown("knnlm_requests_total", route="/v1/completions", status="200") == 1
    assert grown("knnlm_forward_seconds_total") > 0
    assert grown("knnlm_search_seconds_total") > 0
    assert after[("knnlm_sequences_active",)] == after[("knnlm_requests_waiting",)] == 0
    assert after[("knnlm_ready",)] == 1


def test_health_and_readiness_are_reported(server):
    with server.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json() == {"ready": True}


def test_page_loads_only_its_own_files_and_no_path_escapes_them(server):
    with server.client() as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "access-control-allow-origin" not in client.get("/v1/models", headers={"Origin": "http://x"}).headers
        for path in (
            "/static/..%2fapi.py",
            "/static/../api.py",
            "/static/%2e%2e/api.py",
            "/static/%2fetc%2fpasswd",
            "/static/a",
        ):
            assert client.get(path).status_code == 404
