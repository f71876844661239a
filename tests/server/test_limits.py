"""The limits of a server: keys, sizes, lengths, queues, time, disconnected clients, signals, hosts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from helpers.server import read_stream, serving
from knnlm.errors import ParameterError
from knnlm.mixture.mixture import Mixture
from knnlm.server.auth import ApiKeys, RequestGuard, check_host, is_loopback
from knnlm.server.engine.requests import GenerationRequest
from knnlm.server.limits import Limits
from knnlm.server.run import bind

USER, ADMIN = "user-key-1234", "admin-key-1234"
KEYS = ApiKeys((USER.encode(),), (ADMIN.encode(),))
LONG = {"prompt": "When", "max_tokens": 100, "temperature": 0}


@pytest.fixture(scope="module")
def mixture(lm, store):
    lm.model.generation_config.eos_token_id = None
    return Mixture.open(store.path, lm, k=16, knn_temperature=8.0, lmbda=0.6)


@pytest.fixture
def slow(mixture, monkeypatch):
    """A mixture with a slow search, so that a request runs while others arrive."""
    memory = mixture.knn
    search = memory.search

    def later(*args):
        time.sleep(0.03)
        return search(*args)

    monkeypatch.setattr(memory, "search", later)
    return mixture


def until(condition, seconds=10.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def test_keys_are_required_and_only_the_admin_key_changes_the_store(mixture):
    with serving(mixture, keys=KEYS) as running:
        for key, path, method, status in [
            (None, "/v1/models", "GET", 401),
            ("wrong", "/v1/models", "GET", 401),
            (USER, "/v1/models", "GET", 200),
            (ADMIN, "/v1/models", "GET", 200),
            (None, "/metrics", "GET", 401),
            (None, "/healthz", "GET", 200),
            (None, "/readyz", "GET", 200),
            (None, "/", "GET", 200),
            (USER, "/v1/documents", "GET", 200),
            (None, "/v1/documents/0", "DELETE", 401),
            (USER, "/v1/documents/0", "DELETE", 403),
            (USER, "/v1/documents", "POST", 403),
            (ADMIN, "/v1/documents/99999", "DELETE", 404),
            (ADMIN, "/v1/documents", "POST", 400),
        ]:
            with running.client(key) as client:
                answer = client.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == status, (key, path, answer.text)
        with pytest.raises(openai.AuthenticationError, match="API key"):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="nothing", max_retries=0).models.list()


def test_store_is_read_only_without_an_admin_key(mixture):
    with serving(mixture) as running, running.client("anything") as client:
        assert client.delete("/v1/documents/0").status_code == 403
        assert client.get("/v1/documents").json()["total"] == 40


def test_only_local_host_names_are_served_without_a_key(mixture):
    """A foreign page whose name resolves to this machine must not be served."""
    with serving(mixture) as running, running.client() as client:
        for host, status in [("evil.example", 403), ("localhost:8000", 200), ("[::1]:8000", 200), ("127.0.0.1", 200)]:
            assert client.get("/v1/models", headers={"Host": host}).status_code == status
    with serving(mixture, keys=KEYS) as running, running.client(USER) as client:
        assert client.get("/v1/models", headers={"Host": "my.server"}).status_code == 200


def test_public_hosts_need_a_key():
    for host, near in [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
        ("::", False), ("192.168.0.2", False), ("example.org", False), ("localhost.evil.org", False),
    ]:  # fmt: skip
        assert is_loopback(host) is near
        if near:
            check_host(host, ApiKeys())
        else:
            with pytest.raises(ParameterError, match="--api-key-file"):
                check_host(host, ApiKeys())
        check_host(host, KEYS)


def test_invalid_key_files_are_rejected(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{USER}\n\n  second-key-5678 \n")
    keys = ApiKeys.read(file, None)
    assert keys.is_user(USER)
    assert keys.is_user("second-key-5678")
    assert not keys.is_user(USER[:-1])
    assert not keys.is_user("")
    assert not keys.is_admin(USER)
    for content in ("", "\n", "short\n", "schlüssel-1234\n"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ParameterError, match=str(file)):
            ApiKeys.read(file, None)
    with pytest.raises(ParameterError, match="nowhere"):
        ApiKeys.read(tmp_path / "nowhere", None)


def test_too_large_body_is_rejected_also_without_content_length(mixture):
    with serving(mixture, body_bytes=2000) as running, running.client() as client:
        large = json.dumps({"prompt": "a" * 3000}).encode()
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=large, headers=headers).status_code == 413
        pieces = iter([large[:1500], large[1500:]])  # in chunks, without a length
        answer = client.post("/v1/completions", content=pieces, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_missing_body_times_out(mixture, monkeypatch):
    monkeypatch.setattr(RequestGuard.__init__, "__kwdefaults__", {"body_seconds": 0.2})
    with serving(mixture) as running, socket.create_connection(("127.0.0.1", running.port)) as connection:
        head = ["POST /v1/score HTTP/1.1", "Host: localhost", "Content-Length: 50", "Content-Type: application/json"]
        connection.sendall("\r\n".join([*head, "", '{"text":']).encode())
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_prompt_and_output_lengths_are_limited(mixture):
    with serving(mixture, prompt_tokens=20, output_tokens=10) as running, running.client() as client:

        def ask(**body):
            answer = client.post("/v1/completions", json={"temperature": 0, **body})
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        assert ask(prompt="When", max_tokens=10)[0] == 200
        assert ask(prompt="When", max_tokens=11) == (
            400,
            "11 tokens are requested, but this server generates 10 at most.",
        )
        status, message = ask(prompt=[5] * 20, max_tokens=1)
        assert (status, "21 tokens" in message) == (400, True)
        assert client.post("/v1/score", json={"text": "word " * 40}).status_code == 400


def test_number_of_sources_is_limited(mixture):
    with serving(mixture, sources=100) as running, running.client() as client:

        def ask(path, **body):
            answer = client.post(path, json=body)
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        body = {"prompt": "When", "max_tokens": 10, "sources": 5}
        assert ask("/v1/completions", **body, n=2)[0] == 200
        status, message = ask("/v1/completions", **body, n=3)
        assert (status, "150 sources" in message) == (400, True)
        assert ask("/v1/completions", **(body | {"prompt": ["When"] * 3}))[0] == 400
        assert ask("/v1/completions", **body, n=2, echo=True)[0] == 400
        assert ask("/v1/score", text="When the model reads a new context, it looks", sources=20)[0] == 400


def test_slow_document_lists_do_not_block_completions(mixture, monkeypatch):
    """Dozens of slow lists of documents must not take all threads."""
    with serving(mixture) as running:
        free = threading.Event()
        monkeypatch.setattr(running.service.documents, "list", lambda **_: free.wait(20) and {"total": 0})

        def look():
            with running.client(timeout=60) as client:
                client.get("/v1/documents")

        threads = [threading.Thread(target=look) for _ in range(60)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: running.connections >= 60)
            began = time.monotonic()
            assert running.post("/v1/completions", prompt="When", max_tokens=2)["usage"]["completion_tokens"] == 2
            assert time.monotonic() - began < 10
        finally:
            free.set()
            for thread in threads:
                thread.join(30)


def test_request_times_out_during_an_endless_step(mixture, monkeypatch):
    with serving(mixture, seconds=0.3) as running:
        free = threading.Event()
        memory, search = mixture.knn, mixture.knn.search
        monkeypatch.setattr(memory, "search", lambda *args: free.wait(20) and search(*args))
        try:
            with running.client() as client:
                began = time.monotonic()
                assert client.post("/v1/completions", json=LONG).status_code == 504
                assert time.monotonic() - began < 10
        finally:
            free.set()


def test_host_header_causes_no_redirect(mixture):
    """A redirect to the Host header would lead to another server."""
    with serving(mixture, keys=KEYS) as running, running.client(USER) as client:
        answer = client.get("/v1/models/", headers={"Host": "evil.example"})
        assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_content_type_is_case_insensitive(mixture):
    with serving(mixture) as running, running.client() as client:
        headers = {"Content-Type": "Application/JSON; charset=UTF-8"}
        answer = client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
        assert answer.status_code == 200


def test_limits_of_zero_or_less_are_rejected():
    with pytest.raises(ParameterError, match="slots"):
        Limits(slots=0)


def test_full_queue_returns_429_with_retry_after(slow):
    with serving(slow, slots=1, queue=1) as running:
        scheduler = running.service.scheduler

        async def crowd():
            first = asyncio.create_task(read_stream(running.port, LONG))
            while scheduler.active < 1:
                await asyncio.sleep(0.005)
            second = asyncio.create_task(read_stream(running.port, {**LONG, "max_tokens": 2}))
            while scheduler.waiting < 1:
                await asyncio.sleep(0.005)
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.post(f"{running.url}/v1/completions", json=LONG)
            first.cancel()
            return answer, await second

        answer, second = asyncio.run(crowd())
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert second.tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_frees_its_slot(slow, stream):
    with serving(slow, slots=1) as running:
        scheduler = running.service.scheduler
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            payload = json.dumps({**LONG, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
            until(lambda: scheduler.active == 1 and scheduler.tokens_generated >= 2)
        until(lambda: scheduler.active == 0)
        assert scheduler.tokens_generated < 50
        assert running.post("/v1/completions", prompt="When", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_waiting_request_of_a_disconnected_client_is_dropped(slow):
    with serving(slow, slots=1) as running:
        scheduler = running.service.scheduler
        first = scheduler.submit(GenerationRequest(tuple(slow.lm.prompt("When")), 100))
        payload = json.dumps({**LONG, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
            until(lambda: scheduler.waiting == 1)
        until(lambda: scheduler.waiting == 0)
        assert scheduler.active == 1
        first.cancel()


def test_slow_request_fails_with_a_timeout(slow):
    with serving(slow, seconds=0.4) as running:
        with running.client() as client:
            answer = client.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "server_error")
        stream = asyncio.run(read_stream(running.port, LONG))
        assert (stream.status, stream.done) == (200, False)
        assert "longer than the server allows" in stream.error
        assert 0 < stream.tokens < 100
        assert running.service.scheduler.active == 0


def test_shutdown_finishes_running_requests(slow):
    found = {}
    with serving(slow) as running:

        def ask():
            found["stream"] = asyncio.run(read_stream(running.port, {**LONG, "max_tokens": 30}))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: running.service.scheduler.active == 1)
    thread.join(10)
    assert (found["stream"].tokens, found["stream"].done) == (30, True)
    with pytest.raises(httpx.ConnectError):
        running.client().get("/healthz")


def test_port_in_use_is_an_error_of_one_line():
    with bind("127.0.0.1", 0, keys=ApiKeys()) as taken:
        taken.listen()
        with pytest.raises(ParameterError, match="Choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1], keys=ApiKeys())


@pytest.mark.parametrize("host", ["203.0.113.9", "nowhere.invalid"])
def test_unknown_host_is_an_error_that_names_it(host):
    keys = ApiKeys((b"a-key-of-mine",))  # without one, no other host is taken at all
    with pytest.raises(ParameterError, match=f"Cannot listen on {host}:0: .*Choose another --host"):
        bind(host, 0, keys=keys)


def test_command_serves_until_a_signal(store, model_folder, tmp_path):
    """A real process: it prints its URL, responds, and ends after SIGTERM."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "knnlm", "serve", str(store.path), "--model", str(model_folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stderr.readline()
            while "serving" not in line:
                assert line, "it ended"
                line = process.stderr.readline()
            url = line.split()[-1]
            with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
                until(lambda: client.get("/readyz").status_code == 200)
                body = {"prompt": "When", "max_tokens": 3, "temperature": 0}
                assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
                body = {"prompt": "When", "max_tokens": 100, "n": 16, "logit_bias": {"0": -100}, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as stream:
                    lines = stream.iter_lines()
                    assert next(lines).startswith("data: ")
                    process.send_signal(signal.SIGTERM)  # what is in flight is finished
                    events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert reasons.count("length") == 16
            assert process.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            process.kill()
