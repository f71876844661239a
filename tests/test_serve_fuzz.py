"""Requests that a machine makes up from the OpenAPI document: none may be answered by 500, all as it says."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from knnlm import Mixture
from knnlm.serve.keys import Keys
from serving import serving

ADMIN = "admin-key-1234"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(lm, store):
    keys = Keys((b"user-key-1234",), (ADMIN.encode(),))
    with serving(Mixture.open(store.path, lm, k=8), keys=keys, prompt_tokens=100, output_tokens=8) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server):
    made = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # What adds and removes is tested where it may change the memory; here it would change it for all other tests.
    return made.exclude(method=["DELETE"]).exclude(method="POST", path="/v1/documents")


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


def test_made_up_requests_find_no_error_of_ours(schema, server):
    for operation in operations(schema):
        run(schema, operation, examples=15, seed=1)
    assert server.service.ready


@pytest.mark.slow
def test_many_made_up_requests_find_no_error_of_ours(schema, server):
    for operation in operations(schema):
        run(schema, operation, examples=500, seed=2)
    assert server.service.ready
