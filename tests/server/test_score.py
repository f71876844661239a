"""Scores over HTTP equal those of evaluation, also for texts longer than the model can read at once."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from helpers.models import tiny, tiny_tokenizer
from helpers.server import read_stream, serving
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture

LONG = documents(1, words=180, start=60)[0].text
SETTINGS = {"k": 16, "knn_temperature": 8.0, "lmbda": 0.6}


@pytest.fixture(scope="module")
def lm():
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny")
    lm.model.generation_config.eos_token_id = None
    return lm


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    """A store with windows of 64 tokens and a stride of 24; the model can read 128 at once."""
    path = tmp_path_factory.mktemp("score") / "store"
    build(documents(12), path, lm=lm, window=lm.window(64, 24)).close()
    return path


def document(text):
    return Document(id="a", source="a", text=text)


@pytest.mark.parametrize("memories", ["knn:0.6", "knn:0.3,cache:0.2,ngram:0.2"])
def test_score_of_a_text_longer_than_the_model_equals_evaluation(lm, path, memories):
    mixture = Mixture.open(path, lm, memories=memories, k=16, knn_temperature=8.0, use_tuned=False)
    assert len(lm.encode(LONG)) > 2 * lm.max_length
    right, explained = mixture.evaluate([document(LONG)]), mixture.explain(LONG)
    with serving(mixture) as running:
        scored = running.post("/v1/score", text=LONG, sources=1)
        again = running.post("/v1/rescore", id=scored["knnlm"]["id"], **{"lambda": 0.2})
    assert scored["tokens"] == right.tokens
    assert scored["perplexity"] == pytest.approx(right.perplexity, rel=1e-4)
    assert scored["perplexity_lm"] == pytest.approx(right.base_perplexity, rel=1e-4)
    tokens = scored["knnlm"]["tokens"]
    assert "".join(token["text"] for token in tokens) == LONG
    np.testing.assert_allclose([token["p"] for token in tokens], [token.p for token in explained], rtol=1e-3)
    assert all(token["sources"] for token in tokens)
    np.testing.assert_allclose(
        [token["p"] for token in again["knnlm"]["tokens"] if token["weight"] > 0.19999],
        [0.8 * token["p_lm"] + 0.2 * token["p_knn"] for token in again["knnlm"]["tokens"] if token["weight"] > 0.19999],
        rtol=1e-4,
    )


def test_text_longer_than_the_window_is_scored_in_windows(lm, path):
    mixture = Mixture.open(path, lm, **SETTINGS)
    text = LONG[:200]
    assert 64 < len(lm.encode(text)) < lm.max_length
    right = mixture.evaluate([document(text)])
    with serving(mixture) as running:
        assert running.post("/v1/score", text=text)["perplexity"] == pytest.approx(right.perplexity, rel=1e-4)


def test_each_position_is_read_once_at_every_length_around_a_window(lm, path):
    mixture = Mixture.open(path, lm, **SETTINGS)
    tokens = lm.encode(LONG)
    with serving(mixture) as running:
        for length in (63, 64, 65, 88, 89):
            text = lm.decode(tokens[:length])
            assert lm.encode(text) == tokens[:length]
            scored, right = running.post("/v1/score", text=text), mixture.evaluate([document(text)])
            assert scored["tokens"] == right.tokens == length
            assert math.log(scored["perplexity"]) == pytest.approx(math.log(right.perplexity), rel=1e-4)


def test_long_score_and_completions_do_not_affect_each_other(lm, path):
    mixture = Mixture.open(path, lm, **SETTINGS)
    body = {"prompt": "When", "max_tokens": 60, "temperature": 0}
    with serving(mixture) as running:
        alone = asyncio.run(read_stream(running.port, body)).text
        right = running.post("/v1/score", text=LONG)["log_p"]

        async def both():
            loop = asyncio.get_running_loop()
            stream = asyncio.create_task(read_stream(running.port, body))
            scored = await loop.run_in_executor(None, lambda: running.post("/v1/score", text=LONG))
            return await stream, scored

        stream, scored = asyncio.run(both())
    assert stream.text == alone
    assert scored["log_p"] == pytest.approx(right, rel=1e-6)


def test_limit_of_prompts_holds_for_scores(lm, path):
    with serving(Mixture.open(path, lm, **SETTINGS), prompt_tokens=200) as running, running.client() as client:
        answer = client.post("/v1/score", json={"text": LONG})
    assert answer.status_code == 400
    assert "takes 200 at most" in answer.json()["error"]["message"]
