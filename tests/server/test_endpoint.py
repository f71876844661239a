"""The endpoint of several replicas, which are in this process here: tests/cluster/test_replicas.py has real ones."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from helpers.models import tiny, tiny_tokenizer
from helpers.pairs import pair_lm, pairs
from helpers.server import serving, serving_endpoint
from helpers.stores import documents
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server import endpoint as module
from knnlm.server.auth import ApiKeys
from knnlm.server.endpoint import Endpoint, ReplicaLost
from knnlm.server.limits import Limits
from knnlm.server.replica import Replica, ResponseHead
from knnlm.server.translation import make_service

USER, ADMIN = "user-key-1234", "admin-key-1234"
KEYS = ApiKeys((USER.encode(),), (ADMIN.encode(),))
NEW = "Anna asked the librarian where the zebra of 1998 was, and the librarian said that the zebra sleeps."
PROMPT = NEW[: NEW.index(" sleeps")]


class LocalReplica:
    """A replica in this process, which can be lost, or see the store as it was."""

    def __init__(self, replica, number):
        self.replica, self.number, self.started = replica, number, False
        self.requests, self.lost, self.lost_after, self.behind, self.busy = [], False, None, 0, False

    def _check(self):
        if not self.started:
            self.started = True
            self.replica.service.start()
        if self.lost:
            raise ReplicaLost("lost")

    async def respond(self, request):
        self._check()
        self.requests.append(request)
        if self.busy:
            yield ResponseHead(429, ((b"retry-after", b"7"),), "busy")
            return
        count = 0
        async for part in self.replica.respond(request):
            yield part
            count += 1
            if count == self.lost_after:
                raise ReplicaLost("lost")

    async def refresh(self, generation, *, forget):
        self._check()
        return await self.replica.refresh(0 if self.behind else generation, forget=forget) - self.behind

    async def wait(self, seconds):
        await asyncio.sleep(seconds)
        self._check()

    async def metrics(self):
        self._check()
        return self.replica.metrics()


@contextmanager
def serving_replicas(mixtures, keys=None, **limits):
    """Serve mixtures, one for each replica, and yield the server and its replicas."""
    own = Limits(**limits)
    services = [make_service(mixture, name="docs", limits=own) for mixture in mixtures]
    replicas = [LocalReplica(Replica(service, number), number) for number, service in enumerate(services, 1)]
    with serving_endpoint(replicas, own, keys) as running:
        yield running, replicas
    for service in services:
        service.stop()


def made_lm():
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny")
    lm.model.generation_config.eos_token_id = None
    return lm


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("endpoint") / "store"
    build(documents(10), path, lm=made_lm()).close()
    return path


def opened(path):
    return Mixture.open(path, made_lm(), memories="knn:0.6", k=4, knn_temperature=1.0, use_tuned=False)


@pytest.fixture(scope="module")
def running(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WATCH_SECONDS", 0.05)
        patch.setattr(module, "_RETRY_SECONDS", 0.05)
        with serving_replicas([opened(path), opened(path)], keys=KEYS, body_bytes=20_000) as made:
            yield made


@pytest.fixture
def both(running):
    """The replicas, in order again after each test."""
    _, replicas = running
    for replica in replicas:
        replica.requests.clear()
    yield replicas
    for replica in replicas:
        replica.lost, replica.lost_after, replica.behind, replica.busy = False, None, 0, False
    wait_until(lambda: ready(running[0]) == 2)


@pytest.fixture
def client(running):
    with running[0].client(ADMIN) as made:
        yield made


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def ready(server):
    with server.client() as client:
        return client.get("/healthz").json()["ready"]


def timeless(body):
    """Return a response without ids and times."""
    if isinstance(body, dict):
        return {name: timeless(value) for name, value in body.items() if name not in ("id", "created")}
    return [timeless(one) for one in body] if isinstance(body, list) else body


COMPLETION = {"prompt": "The librarian said", "max_tokens": 6, "temperature": 0, "sources": 2, "logprobs": 2}
REQUESTS = [
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/v1/completions", {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/completions", {**COMPLETION, "temperature": 1, "seed": 3, "n": 2}),
    ("POST", "/v1/score", {"text": "The librarian said that the book was old."}),
    ("POST", "/v1/neighbours", {"prompt": "The librarian said", "k": 3}),
    ("POST", "/v1/completions", {"prompt": "x", "nonsense": 1}),
    ("POST", "/v1/translate", {"text": "x"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/v1/documents?limit=3&offset=1", None),
    ("GET", "/v1/documents/2?limit=5", None),
    ("GET", "/v1/documents/77", None),
    ("DELETE", "/v1/documents/77", None),
    ("PUT", "/v1/documents/1", None),
    ("GET", "/openapi.json", None),
    ("GET", "/nonsense", None),
    ("GET", "/", None),
    ("GET", "/static/page.js", None),
    ("GET", "/readyz", None),
]


def test_responses_of_all_replicas_equal_those_of_one_server(path, client, both):
    answered = set()
    with serving(opened(path), keys=KEYS) as one, one.client(ADMIN) as expected:
        for method, route, body in REQUESTS:
            wanted = expected.request(method, route, json=body)
            for _ in both:
                found = client.request(method, route, json=body)
                answered.add(found.headers.get("x-knnlm-replica"))
                assert (found.status_code, found.headers["content-type"]) == (
                    wanted.status_code,
                    wanted.headers["content-type"],
                ), route
                assert found.headers["x-content-type-options"] == "nosniff"
                if "event-stream" in found.headers["content-type"]:
                    assert events(found) == events(wanted)
                elif "json" in found.headers["content-type"]:
                    assert changed_limits(timeless(found.json())) == changed_limits(timeless(wanted.json())), route
                else:
                    assert found.content == wanted.content
    assert answered == {"1", "2", None}


def events(response):
    """Return the text and the log-probabilities of a stream: the events may arrive in other groups."""
    found = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.text.endswith("data: [DONE]\n\n")
    choices = [event["choices"][0] for event in found if event["choices"]]
    logprobs = [number for choice in choices for number in (choice["logprobs"] or {}).get("token_logprobs", [])]
    return "".join(choice["text"] for choice in choices), logprobs, found[-1]["usage"]


def changed_limits(body):
    text = json.dumps(body)
    return json.loads(text.replace('"max_body_bytes": 20000', '"max_body_bytes": 2097152'))


def test_requests_take_turns(client, both):
    numbers = [client.get("/v1/models").headers["x-knnlm-replica"] for _ in range(6)]
    assert sorted(numbers) == ["1"] * 3 + ["2"] * 3


def test_keys_and_sizes_are_checked_before_a_replica_gets_a_request(running, both):
    server, _ = running
    with server.client() as unknown, server.client(USER) as user:
        assert unknown.post("/v1/completions", json=COMPLETION).status_code == 401
        assert unknown.get("/metrics").status_code == 401
        assert user.post("/v1/documents", json={"documents": []}).status_code == 403
        assert user.post("/v1/completions", json={"prompt": "x" * 30_000}).status_code == 413
        chunks = (b"x" * 15_000 for _ in range(2))
        headers = {"Content-Type": "application/json"}
        assert user.post("/v1/completions", content=chunks, headers=headers).status_code == 413
        assert not both[0].requests
        assert not both[1].requests
        assert user.post("/v1/completions", json=COMPLETION).status_code == 200
    (request,) = both[0].requests + both[1].requests
    assert USER.encode() not in b"".join(value for _, value in request.headers)


def nearest(client, replicas):
    """Return the document nearest to the middle of the new text, by each replica."""
    found = {}
    while len(found) < len(replicas):
        response = client.post("/v1/neighbours", json={"prompt": PROMPT, "k": 1})
        found[response.headers["x-knnlm-replica"]] = response.json()["neighbours"][0]["document"]
    return found


def test_change_is_seen_by_all_replicas_before_its_response(client, both):
    for number in range(2):  # through each replica once
        body = {"documents": [{"id": "zebra", "text": f"{NEW} {number}", "source": "notes"}]}
        added = client.post("/v1/documents", json=body)
        assert added.json()["added"] == 1
        assert nearest(client, both) == {"1": "zebra", "2": "zebra"}
        (listed,) = client.get("/v1/documents", params={"query": "zebra"}).json()["documents"]
        traces = {}
        while len(traces) < 2:
            scored = client.post("/v1/score", json={"text": NEW, "sources": 1})
            traces[scored.headers["x-knnlm-replica"]] = scored.json()["knnlm"]["id"]
        for replica, trace in traces.items():
            for _ in range(3):
                rescored = client.post("/v1/rescore", json={"id": trace, "lambda": 0.1})
                assert (rescored.status_code, rescored.headers["x-knnlm-replica"]) == (200, replica)
        assert client.delete(f"/v1/documents/{listed['number']}").json() == {"removed": 1}
        assert "zebra" not in nearest(client, both).values()
        for trace in traces.values():  # they contain text of the document
            assert client.post("/v1/rescore", json={"id": trace, "lambda": 0.1}).status_code == 404
    for content in (b"[", b"[" * 5_000):  # not JSON, and nested too deeply
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/rescore", content=content, headers=headers).status_code == 400


def test_replica_that_does_not_see_a_change_gets_no_requests_until_it_does(running, client, both):
    both[1].behind = 1
    added = client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW + " Behind."}]})
    assert added.status_code == 200
    writer = added.headers["x-knnlm-replica"]
    for _ in range(4):
        assert client.get("/v1/models").headers["x-knnlm-replica"] == "1"
    assert ready(running[0]) == 1
    both[1].behind = 0
    wait_until(lambda: ready(running[0]) == 2)
    assert nearest(client, both) == {"1": "zebra", "2": "zebra"}
    (listed,) = client.get("/v1/documents", params={"query": "zebra"}).json()["documents"]
    assert client.delete(f"/v1/documents/{listed['number']}").json() == {"removed": 1}
    assert writer in ("1", "2")


def test_request_of_a_lost_replica_is_answered_by_another(running, client, both):
    expected = client.post("/v1/completions", json=COMPLETION).json()["choices"][0]["text"]
    both[0].lost = True
    for _ in range(3):
        found = client.post("/v1/completions", json=COMPLETION)
        assert (found.status_code, found.headers["x-knnlm-replica"]) == (200, "2")
        assert found.json()["choices"][0]["text"] == expected
    both[1].lost = True
    wait_until(lambda: ready(running[0]) == 0)
    for method, route in (("GET", "/v1/models"), ("DELETE", "/v1/documents/0")):
        refused = client.request(method, route)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable_error")
    assert client.get("/readyz").status_code == 503
    assert client.get("/").status_code == 200


def test_replica_that_is_lost_in_a_response_is_an_error(client, both):
    for replica in both:
        replica.lost_after = 2
    streamed = client.post("/v1/completions", json={**COMPLETION, "max_tokens": 40, "stream": True})
    assert streamed.status_code == 200
    *_, error, done = [line for line in streamed.text.splitlines() if line]
    assert json.loads(error[6:])["error"]["type"] == "unavailable_error"
    assert done == "data: [DONE]"


def test_change_that_is_lost_is_an_error(client, both):
    for replica in both:
        replica.lost_after = 1
    lost = client.post("/v1/documents", json={"documents": [{"id": "lost", "text": NEW + " Lost."}]})
    assert lost.status_code == 503
    assert "may have been made" in lost.json()["error"]["message"]


def test_replica_without_room_passes_requests_to_another(client, both):
    both[0].busy = True
    assert {client.get("/v1/models").headers["x-knnlm-replica"] for _ in range(4)} == {"2"}
    both[1].busy = True
    refused = client.get("/v1/models")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")


def test_metrics_name_their_replica(running, client, both):
    for _ in range(2):
        client.post("/v1/completions", json=COMPLETION)
    text = client.get("/metrics").text
    for number in "12":
        line = next(
            line for line in text.splitlines() if line.startswith(f'knnlm_tokens_generated_total{{replica="{number}"}}')
        )
        assert float(line.split()[-1]) > 0
        assert f'knnlm_ready{{replica="{number}"}} 1.0' in text
    assert text.count("# TYPE knnlm_tokens_generated_total counter") == 1
    assert 'knnlm_requests_total{route="/v1/completions",status="200"}' in text
    assert "knnlm_replicas 2.0" in text
    assert "knnlm_replicas_ready 2.0" in text
    both[1].lost = True
    wait_until(lambda: ready(running[0]) == 1)
    text = client.get("/metrics").text
    assert 'knnlm_ready{replica="2"} 0.0' in text
    assert 'knnlm_tokens_generated_total{replica="2"}' not in text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_disconnects_frees_its_slot(running, client, both, stream, monkeypatch):
    nearest(client, both)  # both have opened the present state of the store
    schedulers = [replica.replica.service.scheduler for replica in both]
    for scheduler in schedulers:
        memory, search = scheduler.mixture.knn, scheduler.mixture.knn.search
        monkeypatch.setattr(memory, "search", lambda *args, search=search: (time.sleep(0.03), search(*args))[1])
    before = sum(scheduler.tokens_generated for scheduler in schedulers)
    payload = json.dumps({"prompt": "The", "max_tokens": 100, "temperature": 0, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {USER}\r\n"
    head += f"Content-Length: {len(payload)}\r\nContent-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running[0].port)) as connection:
        connection.sendall(head.encode() + payload)
        wait_until(lambda: sum(scheduler.tokens_generated for scheduler in schedulers) >= before + 2)
    wait_until(lambda: not sum(scheduler.active for scheduler in schedulers))
    assert sum(scheduler.tokens_generated for scheduler in schedulers) < before + 50


def test_replica_that_hangs_is_an_error_after_the_time_limit(monkeypatch):
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.1)

    async def hang(_):
        await asyncio.sleep(60)
        yield b""

    async def ask():
        replica = SimpleNamespace(number=1, respond=hang)
        endpoint = Endpoint([replica], Limits(seconds=0.1))
        request = SimpleNamespace(path="/v1/models", method="GET", body=b"")
        with pytest.raises(module.RequestFailed, match="took longer"):
            async with endpoint.respond(request):
                pass
        with pytest.raises(module.RequestFailed, match="may have been made"):
            await endpoint.change(SimpleNamespace(path="/v1/documents", method="POST", body=b""))

    asyncio.run(ask())


def test_translations_of_all_replicas_equal_those_of_one_server_and_follow_changes(tmp_path):
    lm = pair_lm("marian")
    build(pairs(12), tmp_path / "pairs", lm=lm, key_format="float32").close()
    mixtures = [
        Mixture.open(tmp_path / "pairs", pair_lm("marian"), k=5, knn_temperature=4.0, lmbda=0.6) for _ in range(3)
    ]
    added = pairs(1, start=70)[0]
    body = {"text": added.source_text, "max_tokens": 12, "sources": 1}
    with (
        serving_replicas(mixtures[:2], keys=KEYS) as (server, _),
        serving(mixtures[2], keys=KEYS) as one,
        server.client(ADMIN) as client,
        one.client(ADMIN) as other,
    ):
        new = {"id": added.id, "text": added.text, "source_text": added.source_text}
        for documents_ in ([], [new]):
            if documents_:
                assert client.post("/v1/documents", json={"documents": documents_}).json()["added"] == 1
            expected = timeless(other.post("/v1/translate", json=body).json())
            for _ in range(2):
                assert timeless(client.post("/v1/translate", json=body).json()) == expected
        sources = [token["sources"][0]["document"] for token in expected["translations"][0]["knnlm"]["tokens"]]
        assert added.id in sources
