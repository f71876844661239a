"""Changes of a served store: the next request retrieves added documents, and none retrieves removed ones."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time

import pytest

from helpers.models import tiny, tiny_tokenizer
from helpers.server import serving
from helpers.stores import documents
from knnlm import corpus
from knnlm.corpus import Document
from knnlm.datastore.remote import push_shard
from knnlm.datastore.remove import remove
from knnlm.datastore.shards import join_shards
from knnlm.errors import CorpusError
from knnlm.ingest.build import add, build, build_shard
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.auth import ApiKeys
from knnlm.server.engine import scheduler as scheduler_module
from knnlm.server.engine.requests import GenerationRequest
from knnlm.server.engine.scheduler import reload_if_stale

ADMIN = "admin-key-1234"
NEW = "Anna asked the librarian where the zebra of 1998 was, and the librarian said that the zebra sleeps."


@pytest.fixture
def lm():
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny")
    lm.model.generation_config.eos_token_id = None
    return lm


@pytest.fixture(params=["knn:0.6", "knn:0.3,cache:0.1,ngram:0.3"])
def server(request, lm, tmp_path):
    build(documents(10), tmp_path / "store", lm=lm)
    mixture = Mixture.open(tmp_path / "store", lm, memories=request.param, k=4, knn_temperature=1.0, use_tuned=False)
    keys = ApiKeys((b"user-key-1234",), (ADMIN.encode(),))
    with serving(mixture, keys=keys) as running:
        yield running


def nearest(client):
    """Return the document with the largest weight in the middle of the new text."""
    prompt = NEW[: NEW.index(" sleeps")]
    return client.post("/v1/neighbours", json={"prompt": prompt, "k": 1}).json()["neighbours"][0]


def check_changes(server):
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
    assert server.service.scheduler.reloads == 2


def test_added_document_is_retrieved_by_the_next_request_and_removed_document_by_none(server):
    check_changes(server)


def test_changes_of_a_sharded_store_are_served_like_those_of_one(lm, tmp_path):
    shards = [tmp_path / "1", tmp_path / "2"]
    for number, path in enumerate(shards, 1):
        build_shard(lambda: iter(documents(10)), path, shard=f"{number}/2", lm=lm).close()
    join_shards(shards, tmp_path / "store")
    options = {"memories": "knn:0.3,cache:0.1,ngram:0.3", "k": 4, "knn_temperature": 1.0, "use_tuned": False}
    with serving(Mixture.open(tmp_path / "store", lm, **options), keys=ApiKeys((), (ADMIN.encode(),))) as running:
        check_changes(running)


FIELDS = {"customer": "acme", "year": 2024, "open": True, "share": 0.5, "note": "naïve, 水", "until": None}


def test_fields_of_an_added_document_equal_those_of_a_file(server, lm, tmp_path):
    """The same record by the API and from a file: shown alike, and selected by the same conditions."""
    path = server.service.mixture.store.path
    with server.client(ADMIN) as client:
        new = [{"id": "sent", "text": NEW, "fields": FIELDS}, {"id": "bare", "text": NEW + " Again."}]
        assert client.post("/v1/documents", json={"documents": new}).json()["added"] == 2
        record = {"id": "read", "text": NEW + " And again.", **FIELDS}
        (tmp_path / "new.jsonl").write_text(json.dumps(record))
        add(list(corpus.read_documents(tmp_path / "new.jsonl")), path, lm=lm)
        listed = client.get("/v1/documents", params={"limit": 200}).json()["documents"]
        found = {document["id"]: document["fields"] for document in listed}
        assert found["sent"] == found["read"] == FIELDS
        assert all(type(found["sent"][name]) is type(value) for name, value in FIELDS.items())  # True == 1
        assert found["bare"] == {}
        number = next(document["number"] for document in listed if document["id"] == "sent")
        assert client.get(f"/v1/documents/{number}").json()["fields"] == FIELDS
        assert {document.id for document in remove(path, where="customer=acme").documents} == {"sent", "read"}
        assert {"sent", "bare", "read"} & ids(client) == {"bare"}


def ids(client):
    return {document["id"] for document in client.get("/v1/documents", params={"limit": 200}).json()["documents"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"": 1},
        {"n" * 257: 1},
        {"long": "x" * 257},
        {"several": [1, 2]},
        {"nested": {"a": 1}},
        {"huge": 1 << 63},
        {f"field {number}": number for number in range(65)},
        {"half": "\ud800"},
    ],
    ids=lambda fields: next(iter(fields))[:12] or "nameless",
)
def test_invalid_fields_are_rejected_with_the_message_for_files(server, fields):
    with server.client(ADMIN) as client:
        before = ids(client)
        bodies = [{"id": "fine", "text": NEW}, {"id": "zebra", "text": NEW + " Again.", "fields": fields}]
        body = json.dumps({"documents": bodies})
        answer = client.post("/v1/documents", content=body, headers={"Content-Type": "application/json"})
        with pytest.raises(CorpusError) as refused:
            Document(id="zebra", source="", text=NEW, fields=fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "documents.1.fields"
        assert answer.json()["error"]["message"] == f"documents.1.fields{refused.value}."
        assert ids(client) == before


def test_openapi_document_has_the_limits_of_fields(server):
    """The maxima of the schema are accepted, and one more is rejected."""
    with server.client(ADMIN) as client:
        parts = client.get("/openapi.json").json()["components"]["schemas"]
        schema = parts["NewDocument"]["properties"]["fields"]["anyOf"][0]
        text, whole = schema["additionalProperties"]["anyOf"][:2]
        least, beyond = int(whole["minimum"]), int(whole["exclusiveMaximum"])
        most = {"n" * schema["propertyNames"]["maxLength"]: "x" * text["maxLength"], "whole": beyond - 1}
        most |= {f"field {number}": least for number in range(schema["maxProperties"] - 2)}
        for fields, status in ((most, 200), ({**most, "more": 1}, 400), ({**most, "whole": beyond}, 400)):
            body = {"documents": [{"id": "zebra", "text": NEW, "fields": fields}]}
            assert client.post("/v1/documents", json=body).status_code == status
        shown = client.get("/v1/documents", params={"query": "zebra"}).json()["documents"][0]
        assert shown["fields"] == most


def test_store_changed_by_another_process_is_reloaded_while_requests_run(server, lm):
    scheduler = server.service.scheduler
    path = server.service.mixture.store.path
    with server.client(ADMIN, timeout=120) as client:
        found = {}

        def ask():
            body = {"prompt": "The memory", "max_tokens": 100, "temperature": 0}
            found["answer"] = client.post("/v1/completions", json=body).json()

        thread = threading.Thread(target=ask)
        thread.start()
        while not scheduler.tokens_generated:
            pass
        add([Document(id="zebra", source="notes", text=NEW)], path, lm=lm)
        with server.client(ADMIN) as other:
            assert nearest(other)["document"] == "zebra"
        thread.join(60)
    assert found["answer"]["usage"]["completion_tokens"] == 100


def test_request_during_a_reload_retrieves_documents_added_before_it(server, lm, monkeypatch):
    """While a store is reopened, a document may be added and then requested."""
    scheduler, path = server.service.scheduler, server.service.mixture.store.path
    late = []

    def slowly(mixture):
        found = reload_if_stale(mixture)
        if not late:
            add([Document(id="zebra", source="notes", text=NEW)], path, lm=lm)
            prompt = lm.prompt(NEW[: NEW.index(" sleeps")])
            late.append(scheduler.submit(GenerationRequest(tuple(prompt), 1, sources=1, ignore_eos=True)))
        return found

    monkeypatch.setattr(scheduler_module, "reload_if_stale", slowly)
    server.service.scheduler.submit(GenerationRequest((1, 2), 1))
    while not late:
        time.sleep(0.001)
    (event, _) = late[0].events()
    assert event.tokens[0].sources[0]["document"] == "zebra"


def test_two_servers_of_one_store_see_each_others_changes(server, lm):
    path = server.service.mixture.store.path
    other = Mixture.open(path, lm, k=4, knn_temperature=1.0)
    with (
        serving(other, keys=ApiKeys((), (ADMIN.encode(),))) as second,
        server.client(ADMIN) as here,
        second.client(ADMIN) as there,
    ):
        assert here.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW}]}).json()["added"] == 1
        found = nearest(there)
        assert found["document"] == nearest(here)["document"] == "zebra"
        assert there.delete(f"/v1/documents/{found['number']}").json() == {"removed": 1}
        assert nearest(here)["document"] != "zebra"
        assert here.get(f"/v1/documents/{found['number']}").status_code == 404


def test_documents_are_added_and_removed_while_requests_run(server):
    """Every text is finished, and the store ends as it was."""
    before = server.client(ADMIN).post("/v1/score", json={"text": NEW}).json()["perplexity"]
    stopped, answers = threading.Event(), []

    def ask(number):
        with server.client(ADMIN) as client:
            while not stopped.is_set():
                body = {"prompt": "The memory", "max_tokens": 10 + number, "sources": 2, "echo": bool(number % 2)}
                answers.append((10 + number, client.post("/v1/completions", json=body)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        with server.client(ADMIN) as client:
            for number in range(4):
                new = {"id": f"zebra-{number}", "text": f"{NEW} {number}"}
                assert client.post("/v1/documents", json={"documents": [new]}).json()["added"] == 1
                assert nearest(client)["document"] == f"zebra-{number}"
                (listed,) = client.get("/v1/documents", params={"query": "zebra"}).json()["documents"]
                assert client.delete(f"/v1/documents/{listed['number']}").json() == {"removed": 1}
    finally:
        stopped.set()
        for thread in threads:
            thread.join(60)
    assert len(answers) >= 4
    for wanted, answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == wanted
    after = server.client(ADMIN).post("/v1/score", json={"text": NEW}).json()["perplexity"]
    assert after == pytest.approx(before, rel=1e-4)


def test_rescoring_returns_no_text_of_a_removed_document(server, lm):
    """Rescoring returns sources; those of a document that was removed meanwhile must not be among them."""
    path = server.service.mixture.store.path
    with server.client(ADMIN) as client:
        for place in ("here", "elsewhere"):
            client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW}]})
            scored = client.post("/v1/score", json={"text": NEW, "sources": 3}).json()
            trace = {"id": scored["knnlm"]["id"], "lambda": 0.5}
            assert "zebra" in client.post("/v1/rescore", json=trace).text
            if place == "here":
                number = client.get("/v1/documents", params={"query": "zebra"}).json()["documents"][0]["number"]
                assert client.delete(f"/v1/documents/{number}").json() == {"removed": 1}
            else:
                remove(path, document="zebra")
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            answer = client.post("/v1/rescore", json=trace)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "trace_not_found")
            fresh = client.post("/v1/score", json={"text": NEW, "sources": 3}).json()
            assert not any(s["document"] == "zebra" for t in fresh["knnlm"]["tokens"] for s in t["sources"])


def test_added_document_keeps_traces_for_rescoring(server):
    with server.client(ADMIN) as client:
        scored = client.post("/v1/score", json={"text": "The memory of a model"}).json()
        client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW}]})
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert client.post("/v1/rescore", json={"id": scored["knnlm"]["id"], "lambda": 0.5}).status_code == 200


def test_failed_reload_fails_only_new_requests_and_is_retried(server, lm, monkeypatch):
    scheduler = server.service.scheduler
    path = server.service.mixture.store.path
    # So that the running request lasts.
    read = type(scheduler.model).read
    monkeypatch.setattr(type(scheduler.model), "read", lambda *a, **k: time.sleep(0.01) or read(*a, **k))
    found = {}

    def ask():
        body = {"prompt": "The memory", "max_tokens": 100, "temperature": 0}
        with server.client(ADMIN, timeout=120) as client:
            found["answer"] = client.post("/v1/completions", json=body).json()

    thread = threading.Thread(target=ask)
    thread.start()
    while not scheduler.tokens_generated:
        time.sleep(0.001)
    add([Document(id="zebra", source="notes", text=NEW)], path, lm=lm)
    segment = max((path / "segments").iterdir())
    segment.rename(path / "away")
    with server.client(ADMIN) as client:
        turns = scheduler.steps
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")
        assert "cannot be opened" in answer.json()["error"]["message"]
        assert scheduler.active == 1
        (path / "away").rename(segment)
        assert nearest(client)["document"] == "zebra"
        assert scheduler.steps < turns + 200
    thread.join(60)
    assert found["answer"]["usage"]["completion_tokens"] == 100


def test_shard_that_changes_at_its_url_is_fetched_and_opened(lm, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))
    shards = [tmp_path / "one.store", tmp_path / "two.store"]
    for number, path in enumerate(shards, 1):
        build_shard(lambda: documents(6), path, shard=f"{number}/2", lm=lm).close()
    urls = [push_shard(path, f"file://{tmp_path}/bucket/{path.name}").url for path in shards]
    join_shards(urls, tmp_path / "store")
    mixture = Mixture.open(tmp_path / "store", lm, memories="knn", k=4, knn_temperature=1.0, use_tuned=False)
    with serving(mixture, refresh=0.05) as running, running.client() as client:
        assert nearest(client)["document"] != "zebra"
        add([Document("zebra", "notes", NEW)], shards[1], lm=lm)
        push_shard(shards[1], urls[1], replace=True)
        until = time.monotonic() + 20
        while nearest(client)["document"] != "zebra":
            assert time.monotonic() < until
            time.sleep(0.02)
        assert running.service.scheduler.reloads == 1
        # While the bucket is away, the server answers from its copies.
        with caplog.at_level(logging.WARNING, "knnlm.server.service"):
            shutil.rmtree(tmp_path / "bucket")
            while "the copies of shards at URLs are kept" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.02)
        assert nearest(client)["document"] == "zebra"
