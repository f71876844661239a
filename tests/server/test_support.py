"""Support of tokens in responses, and answers that end or are marked where it is low."""

from __future__ import annotations

import json

import pytest

from helpers.server import chat_mixture, serving
from helpers.stores import documents
from knnlm.mixture.mixture import Mixture

PROMPT = "The memory of a model"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
GREEDY = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    made = chat_mixture(tmp_path_factory.mktemp("support") / "store", TEMPLATE)
    untuned = Mixture.open(made.path, made.lm, memories="knn,cache,ngram", use_tuned=False)
    untuned.tune(documents(10, start=100), ks=[8, 32], knn_temperatures=[4.0, 16.0])
    return Mixture.open(made.path, made.lm)


@pytest.fixture(scope="module")
def running(mixture):
    with serving(mixture) as server:
        yield server


def supports(body):
    return [token.get("support") for token in body["choices"][0]["knnlm"]["tokens"]]


def test_support_is_returned_where_tokens_are_shown(running):
    plain = running.post("/v1/completions", **GREEDY)["choices"][0]["knnlm"]
    assert all("support" not in token for token in plain["tokens"])
    assert "supported_share" not in plain
    assert all(support is not None for support in supports(running.post("/v1/completions", **GREEDY, support=True)))
    for shown in ({"sources": 1}, {"logprobs": 2}, {"logprobs": 0}):
        assert None not in supports(running.post("/v1/completions", **GREEDY, **shown))
    assert set(supports(running.post("/v1/completions", **GREEDY, sources=1, support=False))) == {None}
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}
    assert None not in supports(running.post("/v1/chat/completions", **chat, logprobs=True))
    assert set(supports(running.post("/v1/chat/completions", **chat, logprobs=False))) == {None}


def test_support_is_that_of_the_mixture_and_its_share_that_of_the_tokens(running, mixture):
    """A greedy answer that is scored afterwards has the same supports, up to the evidence of its own tokens."""
    choice = running.post("/v1/completions", **GREEDY, support=True)["choices"][0]
    tokens = choice["knnlm"]["tokens"]
    found = [token["support"] for token in tokens]
    assert all(0 < support < 1 for support in found)
    assert choice["knnlm"]["supported_share"] == sum(support >= 0.5 for support in found) / len(found)
    text = documents(1, start=130)[0].text
    scored = running.post("/v1/score", text=text)["knnlm"]
    (batch,) = mixture.read([mixture.lm.encode(text)])
    expected = mixture.support.of(mixture.predict(batch.context), batch.targets).tolist()
    assert [token["support"] for token in scored["tokens"]] == pytest.approx(expected, abs=1e-3)
    explained = mixture.explain(text)
    assert [token.support for token in explained] == pytest.approx(expected, abs=1e-3)
    assert scored["supported_share"] == sum(token["support"] >= 0.5 for token in scored["tokens"]) / len(expected)
    again = running.post("/v1/rescore", id=scored["id"])["knnlm"]
    assert [token["support"] for token in again["tokens"]] == [token["support"] for token in scored["tokens"]]
    other = running.post("/v1/rescore", id=scored["id"], **{"lambda": 0.4})["knnlm"]
    assert all("support" not in token for token in other["tokens"])  # other weights than the tuned ones


def test_streamed_answer_has_its_share_in_the_last_chunk(running):
    whole = running.post("/v1/completions", **GREEDY, support=True)["choices"][0]["knnlm"]
    with (
        running.client() as client,
        client.stream(
            "POST", "/v1/completions", json={**GREEDY, "support": True, "min_support": 0.0, "stream": True}
        ) as answer,
    ):
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line)["choices"][0] for line in lines]
    assert [token["support"] for chunk in chunks for token in chunk["knnlm"]["tokens"]] == [
        token["support"] for token in whole["tokens"]
    ]
    assert all("supported_share" not in chunk["knnlm"] for chunk in chunks[:-1])
    assert chunks[-1]["knnlm"]["supported_share"] == whole["supported_share"]
    assert chunks[-1]["knnlm"]["low_support"] is False


def test_answer_ends_where_the_mean_of_eight_tokens_falls_below_the_minimum(running):
    found = supports(running.post("/v1/completions", **GREEDY, support=True))
    means = [sum(found[end - 8 : end]) / 8 for end in range(8, len(found) + 1)]
    minimum = min(means) + 1e-6
    end = next(place for place, mean in enumerate(means, 8) if mean < minimum)
    ended = running.post("/v1/completions", **GREEDY, min_support=minimum)
    choice = ended["choices"][0]
    assert choice["finish_reason"] == "support"
    assert choice["knnlm"]["low_support"] is True
    assert supports(ended) == found[:end]
    assert ended["usage"]["completion_tokens"] == end
    marked = running.post("/v1/completions", **GREEDY, min_support=minimum, on_low_support="mark")
    choice = marked["choices"][0]
    assert (choice["finish_reason"], choice["knnlm"]["low_support"]) == ("length", True)
    assert supports(marked) == found
    unharmed = running.post("/v1/completions", **GREEDY, min_support=max(0.0, min(means) - 1e-6))["choices"][0]
    assert (unharmed["finish_reason"], unharmed["knnlm"]["low_support"]) == ("length", False)
    short = running.post("/v1/completions", **{**GREEDY, "max_tokens": 7}, min_support=1.0)["choices"][0]
    assert (short["finish_reason"], short["knnlm"]["low_support"]) == ("length", False)


def test_requests_that_cannot_have_support_are_errors(running, mixture):
    with running.client() as client:
        for memory in ({"off": True}, {"lambda": 0.3}, {"k": 4}, {"memories": ["knn"]}):
            for wanted in ({"min_support": 0.5}, {"support": True}):
                answer = client.post("/v1/completions", json={**GREEDY, **wanted, "memory": memory})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == next(iter(wanted))
            shown = client.post("/v1/completions", json={**GREEDY, "sources": 1, "memory": memory})
            assert set(supports(shown.json())) == {None}
        for wrong in ({"min_support": 1.5}, {"min_support": -0.1}, {"min_support": 0.5, "on_low_support": "warn"}):
            assert client.post("/v1/completions", json={**GREEDY, **wrong}).status_code == 400
        assert client.get("/v1/models").json()["data"][0]["knnlm"]["support"] is True


def test_support_is_computed_once_per_step_and_only_where_it_is_shown(running, mixture, monkeypatch):
    calls = []
    model = type(mixture.support)
    probabilities = model.probabilities
    monkeypatch.setattr(model, "probabilities", lambda self, *given: calls.append(1) or probabilities(self, *given))
    running.post("/v1/completions", **GREEDY)
    assert not calls
    running.post("/v1/completions", **GREEDY, n=3, support=True)
    assert len(calls) <= 20 + 3  # steps, and the copies of the first
