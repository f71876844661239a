"""Every field of OpenAI's API is supported, accepted because it has no effect, or rejected by its name."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.server import chat_mixture
from knnlm.generation.causal import KnnForCausalLM
from knnlm.server.engine.requests import Penalties
from knnlm.server.engine.sequence import Sampler, penalise
from knnlm.server.responses import TokenTexts

PROMPT = "The memory of a model"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return chat_mixture(tmp_path_factory.mktemp("openai") / "store", TEMPLATE)


def written(mixture, tokens, count, *, presence=0.0, frequency=0.0, bias=None):
    """Generate greedily with penalties, in NumPy, with a whole pass for every token."""
    model, start = KnnForCausalLM(mixture), len(tokens)
    for _ in range(count):
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0, -1].double().numpy()
        counts = np.bincount(tokens[start:], minlength=len(scores))
        scores = scores - frequency * counts - presence * (counts > 0)
        for token, value in (bias or {}).items():
            scores[token] += value
        tokens = [*tokens, int(scores.argmax())]
    return tokens[start:]


@pytest.mark.parametrize(
    ("presence", "frequency"), [(0.0, 0.0), (2.0, 0.0), (0.0, 1.5), (-2.0, 0.7), (1.3, -1.0), (2.0, 2.0)]
)
def test_penalised_text_follows_the_formula(client, mixture, presence, frequency):
    answer = client.completions.create(
        model="docs",
        prompt=PROMPT,
        max_tokens=25,
        temperature=0,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    right = written(mixture, mixture.lm.prompt(PROMPT), 25, presence=presence, frequency=frequency)
    assert [token["id"] for token in answer.choices[0].knnlm["tokens"]] == right
    if min(presence, frequency) >= 0 and max(presence, frequency) > 0:
        assert right != written(mixture, mixture.lm.prompt(PROMPT), 25)


def test_bias_excludes_and_forces_tokens(client, mixture):
    plain = written(mixture, mixture.lm.prompt(PROMPT), 10)
    bias = {plain[0]: -100, 77: 3.5}
    answer = client.completions.create(
        model="docs", prompt=PROMPT, max_tokens=10, temperature=0, logit_bias={str(t): v for t, v in bias.items()}
    )
    found = [token["id"] for token in answer.choices[0].knnlm["tokens"]]
    assert found == written(mixture, mixture.lm.prompt(PROMPT), 10, bias=bias)
    assert plain[0] not in found
    forced = client.completions.create(
        model="docs", prompt=PROMPT, max_tokens=6, temperature=1.0, seed=3, logit_bias={"77": 100}
    )
    assert {token["id"] for token in forced.choices[0].knnlm["tokens"]} == {77}
    with pytest.raises(openai.BadRequestError, match="token 320 is not one of the 320") as refused:
        client.completions.create(model="docs", prompt=PROMPT, logit_bias={"320": 1})
    assert refused.value.param == "logit_bias"


def test_reported_probabilities_are_the_mixtures_without_penalties(client, mixture):
    answer = client.completions.create(
        model="docs", prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={"77": 100}, logprobs=1
    )
    with torch.no_grad():
        log_p = KnnForCausalLM(mixture)(torch.tensor([mixture.lm.prompt(PROMPT)])).logits[0, -1].log_softmax(0)
    assert answer.choices[0].logprobs.token_logprobs[0] == pytest.approx(log_p[77].item(), rel=1e-3)


def test_penalties_are_counted_per_copy_and_work_in_chats(client):
    messages = [{"role": "user", "content": "The memory"}]
    settings = {"model": "docs", "messages": messages, "max_tokens": 12, "seed": 4}
    both = client.chat.completions.create(**settings, n=2, presence_penalty=2.0, frequency_penalty=2.0)
    one = client.chat.completions.create(**settings, presence_penalty=2.0, frequency_penalty=2.0)
    assert both.choices[0].message.content == one.choices[0].message.content
    assert both.choices[1].message.content != one.choices[0].message.content


@given(
    logits=st.lists(st.floats(-20, 20), min_size=2, max_size=9),
    drawn=st.dictionaries(st.integers(0, 8), st.integers(1, 5), max_size=5),
    bias=st.dictionaries(st.integers(0, 8), st.floats(-100, 100), max_size=5),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalised_scores_equal_the_formula_for_any_counts(logits, drawn, bias, presence, frequency):
    size = len(logits)
    drawn = {token: times for token, times in drawn.items() if token < size}
    bias = {token: value for token, value in bias.items() if token < size}
    right = [
        score - frequency * drawn.get(token, 0) - presence * (token in drawn) + bias.get(token, 0.0)
        for token, score in enumerate(logits)
    ]
    found = penalise(torch.tensor(logits), Penalties(presence, frequency, bias), drawn)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-4)


def test_impossible_token_stays_impossible_with_any_bias():
    sampler = Sampler(1.0, 1.0, 1, Penalties(bias={0: 100.0}))
    log_p = torch.tensor([-torch.inf, 0.0])
    assert {sampler.draw(log_p) for _ in range(20)} == {1}


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        ("completions", "suffix", "end", "insertion"),
        ("completions", "best_of", 3, "only the same value as n"),
        ("completions", "presence_penalty", 2.5, "less than or equal to 2"),
        ("completions", "logit_bias", {"a": 1}, "pattern"),
        ("completions", "logit_bias", {"5": 101}, "less than or equal to 100"),
        ("completions", "store", True, "not stored"),
        ("completions", "temprature", 1, "unknown field"),
        (
            "chat/completions",
            "tools",
            [{"type": "function", "function": {"name": "f"}}],
            "tool calls are not supported",
        ),
        ("chat/completions", "tool_choice", "required", "tool calls are not supported"),
        ("chat/completions", "functions", [{"name": "f"}], "function calls are not supported"),
        ("chat/completions", "function_call", {"name": "f"}, "function calls are not supported"),
        ("chat/completions", "response_format", {"type": "json_object"}, "structured output is not"),
        ("chat/completions", "modalities", ["text", "audio"], "only text"),
        ("chat/completions", "audio", {"voice": "a"}, "only text"),
        ("chat/completions", "prediction", {"type": "content"}, "not supported"),
        ("chat/completions", "reasoning_effort", "high", "reasoning effort is not"),
        ("chat/completions", "verbosity", "low", "max_tokens"),
        ("chat/completions", "web_search_options", {}, "web search is not"),
        ("chat/completions", "top_logprobs", 2, "needs logprobs"),
        ("chat/completions", "echo", True, "unknown field"),
    ],
)
def test_unsupported_field_is_rejected_by_name(server, path, field, value, message):
    body = CHAT if path.startswith("chat") else {"prompt": "a"}
    with server.client() as client:
        answer = client.post(f"/v1/{path}", json={**body, field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"].split(".")[0] == field
    assert error["message"].startswith(field)
    assert message in error["message"]


def test_fields_without_effect_are_accepted_and_change_nothing(client):
    settings = {"model": "docs", "temperature": 0, "max_tokens": 5, **CHAT}
    plain = client.chat.completions.create(**settings).choices[0].message.content
    asking = client.chat.completions.create(
        **settings,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        response_format={"type": "text"},
        modalities=["text"],
        tools=[],
        tool_choice="none",
        parallel_tool_calls=False,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0,
        extra_body={"functions": None, "reasoning_effort": None, "audio": None, "prediction": None},
    )
    assert asking.choices[0].message.content == plain


def test_response_message_can_be_sent_back(client):
    messages = [{"role": "user", "content": "The memory"}]
    first = client.chat.completions.create(model="docs", messages=messages, max_tokens=4, temperature=0)
    messages += [first.choices[0].message, {"role": "user", "content": "of a model"}]
    second = client.chat.completions.create(model="docs", messages=messages, max_tokens=4, temperature=0)
    spelt = [
        {"role": "user", "content": "The memory"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "of a model"},
    ]
    right = client.chat.completions.create(model="docs", messages=spelt, max_tokens=4, temperature=0)
    assert second.choices[0].message.content == right.choices[0].message.content
    assert second.usage.prompt_tokens == right.usage.prompt_tokens


def test_bytes_of_tokens_join_to_the_text_of_cut_characters(client, mixture):
    """A character of several tokens is forced by bias, token by token."""
    tokens = mixture.lm.encode("日")
    assert len(tokens) > 1
    found = b""
    for token in tokens:
        answer = client.chat.completions.create(
            model="docs",
            max_tokens=1,
            logprobs=True,
            top_logprobs=1,
            logit_bias={str(token): 100},
            temperature=0,
            **CHAT,
        )
        (content,) = answer.choices[0].logprobs.content
        found += bytes(content.bytes)
        assert content.token.startswith("bytes:\\x")
    assert found.decode() == "日"
    token_texts = TokenTexts(mixture.lm.tokenizer)
    for text in ("The memory", "naïve", "🙂!", "a\nb"):
        assert b"".join(token_texts.get(token)[1] for token in mixture.lm.encode(text)).decode() == text


def test_alternatives_of_partial_characters_have_distinct_names(server):
    answer = server.post("/v1/completions", prompt="日", max_tokens=3, temperature=0, logprobs=20)
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) == 20


def test_impossible_token_has_a_finite_logarithm(server):
    """Clients that score add log-probabilities; by the memory alone, most tokens are impossible."""
    body = {"prompt": "zzzz qqqq", "max_tokens": 0, "echo": True, "logprobs": 5, "memory": {"lambda": 1.0, "k": 1}}
    logprobs = server.post("/v1/completions", **body)["choices"][0]["logprobs"]
    assert -9999.0 in logprobs["token_logprobs"]
    assert all(isinstance(number, float) for number in logprobs["token_logprobs"])
    assert all(isinstance(number, float) for top in logprobs["top_logprobs"] for number in top.values())


def test_openapi_document_has_every_accepted_field(server):
    with server.client() as client:
        made = client.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        assert {"presence_penalty", "frequency_penalty", "logit_bias", "user"} <= set(made[name]["properties"])
        assert made[name]["additionalProperties"] is False
    assert json.dumps(made["MemorySettings"]["properties"]["lambda"])
