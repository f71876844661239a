"""Requests generated from the OpenAPI document: no response is a 500, and all match the document."""

from __future__ import annotations

import json

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from helpers.models import tiny, tiny_tokenizer
from helpers.pairs import pair_lm, pairs
from helpers.server import serving
from helpers.stores import documents
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.auth import ApiKeys

ADMIN = "admin-key-1234"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def lm():
    """A tiny model with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    return CausalLM(tiny("llama"), tokenizer, name="tiny")


def serve_new_store(lm, path, **limits):
    """Build a store and serve it."""
    build(documents(6), path, lm=lm).close()
    keys = ApiKeys((b"user-key-1234",), (ADMIN.encode(),))
    return serving(Mixture.open(path, lm, k=8), keys=keys, **limits)


@pytest.fixture(scope="module")
def server(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "store"
    with serve_new_store(lm, path, prompt_tokens=100, output_tokens=8) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server):
    made = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # Additions and removals would change the store of the other tests; they have a server of their own.
    return made.exclude(method=["DELETE"]).exclude(method="POST", path="/v1/documents")


@pytest.fixture(scope="module")
def writable_server(lm, tmp_path_factory):
    """A server of its own store, which may be changed."""
    with serve_new_store(lm, tmp_path_factory.mktemp("fuzz") / "store") as running:
        yield running


def run(schema, operation, *, examples, seed):
    """Send generated requests to one operation, and check each response."""

    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(seed)
    @hypothesis.given(case=operation.as_strategy())
    def one(case):
        # Streams are not JSON, and are tested elsewhere.
        if isinstance(case.body, dict):
            case.body.pop("stream", None)
        response = case.call(headers={"Authorization": f"Bearer {ADMIN}"})
        case.validate_response(response, checks=CHECKS)

    one()


def operations(schema):
    return [result.ok() for result in schema.get_all_operations()]


def test_openapi_document_has_all_routes(schema):
    found = {(operation.method.upper(), operation.path) for operation in operations(schema)}
    assert {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/translate"),
        ("POST", "/v1/score"),
        ("POST", "/v1/rescore"),
        ("POST", "/v1/neighbours"),
        ("GET", "/v1/documents"),
        ("GET", "/v1/documents/{number}"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
    } == found


def change(running, *, examples):
    """Send generated documents, and requests to remove some."""
    made = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    made = made.include(path_regex="^/v1/documents").exclude(method="GET")
    found = operations(made)
    assert {operation.method.upper() for operation in found} == {"POST", "DELETE"}
    for operation in found:
        run(made, operation, examples=examples, seed=3)
    assert running.service.ready
    assert running.client(ADMIN).post("/v1/score", json={"text": "The memory"}).status_code == 200


def stream(running, operation, *, examples):
    """Request generated streams: each is rejected, or complete. Return the number of complete ones."""
    answered = []

    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(4)
    @hypothesis.given(case=operation.as_strategy())
    def one(case):
        if not isinstance(case.body, dict):
            return
        # Few generated names are the model's, and few numbers of tokens are allowed.
        body = {**case.body, "model": "docs", "max_tokens": 3, "stream": True}
        with running.client(ADMIN) as client:
            answer = client.post(operation.path, json=body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            events = answer.text.removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            assert not any("error" in json.loads(event.removeprefix("data: ")) for event in events[:-1])
            answered.append(body)

    one()
    return len(answered)


def streams(running, schema, *, examples):
    """Do the same for all operations that can be streams; some of them must be complete."""
    for operation in operations(schema):
        if operation.path in ("/v1/completions", "/v1/chat/completions"):
            assert stream(running, operation, examples=examples) >= examples // 20
    assert running.service.ready
    assert running.service.scheduler.active == 0


def test_generated_documents_and_streams_cause_no_server_error(writable_server, server, schema):
    change(writable_server, examples=10)
    streams(server, schema, examples=20)


@pytest.mark.slow
def test_many_generated_documents_and_streams_cause_no_server_error(writable_server, server, schema):
    change(writable_server, examples=200)
    streams(server, schema, examples=500)


def test_generated_requests_to_a_store_of_pairs_cause_no_server_error(tmp_path):
    lm = pair_lm("marian")
    build(pairs(6), tmp_path / "store", lm=lm).close()
    keys = ApiKeys((b"user-key-1234",), (ADMIN.encode(),))
    with serving(Mixture.open(tmp_path / "store", lm, k=4), keys=keys, output_tokens=8) as running:
        made = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        for operation in operations(made.exclude(method=["DELETE"])):
            run(made, operation, examples=10, seed=5)
        assert running.service.ready
        assert running.client(ADMIN).post("/v1/translate", json={"text": "The memory"}).status_code == 200


def test_generated_requests_cause_no_server_error(schema, server):
    for operation in operations(schema):
        run(schema, operation, examples=15, seed=1)
    assert server.service.ready


@pytest.mark.slow
def test_many_generated_requests_cause_no_server_error(schema, server):
    for operation in operations(schema):
        run(schema, operation, examples=500, seed=2)
    assert server.service.ready
