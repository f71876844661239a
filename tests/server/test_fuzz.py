"""Requests that a machine makes up from the OpenAPI document: none may be answered by 500, all as it says."""

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
    """A tiny model that converses."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    return CausalLM(tiny("llama"), tokenizer, name="tiny")


def serving_anew(lm, path, **limits):
    """Serve a memory that is made for this."""
    build(documents(6), path, lm=lm).close()
    keys = ApiKeys((b"user-key-1234",), (ADMIN.encode(),))
    return serving(Mixture.open(path, lm, k=8), keys=keys, **limits)


@pytest.fixture(scope="module")
def server(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "memory"
    with serving_anew(lm, path, prompt_tokens=100, output_tokens=8) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server):
    made = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # What adds and removes is tested where it may change the memory; here it would for all other tests.
    return made.exclude(method=["DELETE"]).exclude(method="POST", path="/v1/documents")


@pytest.fixture(scope="module")
def living(lm, tmp_path_factory):
    """A memory of its own, which may be changed."""
    with serving_anew(lm, tmp_path_factory.mktemp("fuzz") / "memory") as running:
        yield running


def run(schema, operation, *, examples, seed):
    """Send made-up requests to one operation, and look at each answer."""

    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(seed)
    @hypothesis.given(case=operation.as_strategy())
    def one(case):
        # Streams are no JSON, and are tested elsewhere.
        if isinstance(case.body, dict):
            case.body.pop("stream", None)
        response = case.call(headers={"Authorization": f"Bearer {ADMIN}"})
        case.validate_response(response, checks=CHECKS)

    one()


def operations(schema):
    return [result.ok() for result in schema.get_all_operations()]


def test_the_document_has_all_routes(schema):
    found = {(operation.method.upper(), operation.path) for operation in operations(schema)}
    assert {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/score"),
        ("POST", "/v1/rescore"),
        ("POST", "/v1/neighbours"),
        ("GET", "/v1/documents"),
        ("GET", "/v1/documents/{number}"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
    } == found


def change(running, *, examples):
    """Send made-up documents, and requests to remove some."""
    made = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    made = made.include(path_regex="^/v1/documents").exclude(method="GET")
    found = operations(made)
    assert {operation.method.upper() for operation in found} == {"POST", "DELETE"}
    for operation in found:
        run(made, operation, examples=examples, seed=3)
    assert running.service.ready
    assert running.client(ADMIN).post("/v1/score", json={"text": "The memory"}).status_code == 200


def stream(running, operation, *, examples):
    """Ask for made-up streams: each is refused, or comes to its end."""
    answered = []

    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(4)
    @hypothesis.given(case=operation.as_strategy())
    def one(case):
        if not isinstance(case.body, dict):
            return
        # Few made-up names are the model's, and few numbers of tokens are allowed.
        body = {**case.body, "model": "memory", "max_tokens": 3, "stream": True}
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
    """The same for all operations that can be streams; some of them must have been carried out."""
    for operation in operations(schema):
        if operation.path in ("/v1/completions", "/v1/chat/completions"):
            assert stream(running, operation, examples=examples) >= examples // 20
    assert running.service.ready
    assert running.service.scheduler.active == 0


def test_made_up_documents_and_streams_find_no_error_of_ours(living, server, schema):
    change(living, examples=10)
    streams(server, schema, examples=20)


@pytest.mark.slow
def test_many_made_up_documents_and_streams_find_no_error_of_ours(living, server, schema):
    change(living, examples=200)
    streams(server, schema, examples=500)


def test_made_up_requests_find_no_error_of_ours(schema, server):
    for operation in operations(schema):
        run(schema, operation, examples=15, seed=1)
    assert server.service.ready


@pytest.mark.slow
def test_many_made_up_requests_find_no_error_of_ours(schema, server):
    for operation in operations(schema):
        run(schema, operation, examples=500, seed=2)
    assert server.service.ready
