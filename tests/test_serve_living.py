"""A memory that changes while it is served: what is added is found by the next request, what is removed by none."""

from __future__ import annotations

import threading

import pytest

import knnlm
from conftest import documents
from knnlm import CausalLM, Mixture, build
from knnlm.corpus import Document
from knnlm.serve.keys import Keys
from models import tiny, tiny_tokenizer
from serving import serving

ADMIN = "admin-key-1234"
NEW = "Anna asked the librarian where the zebra of 1998 was, and the librarian said that the zebra sleeps."


@pytest.fixture
def lm():
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny")
    lm.model.generation_config.eos_token_id = None
    return lm


@pytest.fixture(params=["knn:0.6", "knn:0.3,cache:0.1,ngram:0.3"])
def server(request, lm, tmp_path):
    build(documents(10), tmp_path / "memory", lm=lm)
    mixture = Mixture.open(tmp_path / "memory", lm, memories=request.param, k=4, temperature=1.0, fresh=True)
    keys = Keys((b"user-key-1234",), (ADMIN.encode(),))
    with serving(mixture, keys=keys) as running:
        yield running


def nearest(client):
    """The document that speaks loudest in the middle of the new text."""
    prompt = NEW[: NEW.index(" sleeps")]
    return client.post("/v1/neighbours", json={"prompt": prompt, "k": 1}).json()["neighbours"][0]


def test_what_is_added_is_found_by_the_next_request_and_what_is_removed_by_none(server):
    with server.client(ADMIN) as client:
        assert nearest(client)["document"] != "zebra"
        before = client.post("/v1/score", json={"text": NEW}).json()
        added = client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW, "source": "notes"}]})
        assert added.json()["added"] == 1
        assert added.json()["tokens"] == before["tokens"]
        found = nearest(client)
        assert (found["document"], found["source"]) == ("zebra", "notes")
        assert found["before"].endswith("that the zebra")
        assert client.post("/v1/score", json={"text": NEW}).json()["perplexity"] < before["perplexity"] / 2
        listed = client.get("/v1/documents", params={"query": "zebra"}).json()
        assert (listed["total"], listed["documents"][0]["number"]) == (1, found["number"])
        again = client.post("/v1/documents", json={"documents": [{"id": "other", "text": NEW}]}).json()
        assert (again["added"], again["skipped"]) == (0, 1)
        assert client.delete(f"/v1/documents/{found['number']}").json() == {"removed": 1}
        assert nearest(client)["document"] != "zebra"
        assert client.get("/v1/documents", params={"query": "zebra"}).json()["total"] == 0
        assert client.delete(f"/v1/documents/{found['number']}").status_code == 404
        after = client.post("/v1/score", json={"text": NEW}).json()
        assert after["perplexity"] == pytest.approx(before["perplexity"], rel=1e-4)
    assert server.service.engine.reopened == 2


def test_a_memory_that_another_process_changes_is_opened_anew_under_texts_in_flight(server, lm):
    engine = server.service.engine
    path = server.service.mixture.home.path
    with server.client(ADMIN, timeout=120) as client:
        found = {}

        def ask():
            body = {"prompt": "The memory", "max_tokens": 100, "temperature": 0}
            found["answer"] = client.post("/v1/completions", json=body).json()

        thread = threading.Thread(target=ask)
        thread.start()
        while not engine.tokens_made:
            pass
        knnlm.add([Document(id="zebra", source="notes", text=NEW)], path, lm=lm)
        with server.client(ADMIN) as other:
            assert nearest(other)["document"] == "zebra"
        thread.join(60)
    assert found["answer"]["usage"]["completion_tokens"] == 100
