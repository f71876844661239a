"""Limits of connections: slow or endless headers, slow bodies, clients that do not read."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

import pytest

from helpers.server import serving
from knnlm.mixture.mixture import Mixture
from knnlm.server.auth import RequestGuard
from knnlm.server.run import LimitedHttpProtocol

HEAD = "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def mixture(lm, store):
    lm.model.generation_config.eos_token_id = None
    return Mixture.open(store.path, lm, k=16, knn_temperature=8.0, lmbda=0.6)


def connect(running):
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.settimeout(10)
    return connection


def receive_all(connection):
    """Return all bytes until the server closes the connection."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def send_slowly(connection, data, seconds):
    """Send single bytes until the server closes the connection, and return the seconds."""
    began = time.monotonic()
    try:
        for byte in data:
            connection.send(bytes([byte]))
            time.sleep(seconds)
            if time.monotonic() - began > 8:
                break
    except OSError:
        pass
    return time.monotonic() - began


def test_endless_headers_time_out(mixture, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "head_seconds", 0.3)
    with serving(mixture) as running:
        with connect(running) as silent, connect(running) as slow:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHo")
            assert receive_all(silent) == b""
            assert receive_all(slow).startswith(b"HTTP/1.1 408")
        with connect(running) as dripping:
            assert send_slowly(dripping, b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 1000, 0.05) < 5
        with connect(running) as idle:  # bare line ends between two requests are no request either
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200")
            assert send_slowly(idle, b"\r\n" * 500, 0.05) < 5
        assert running.client().get("/healthz").status_code == 200


def test_each_request_of_a_connection_has_its_own_timeout(mixture, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "head_seconds", 0.5)
    with serving(mixture) as running, connect(running) as connection:
        for _ in range(4):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(0.2)


def test_size_of_headers_is_limited(mixture):
    with serving(mixture) as running, connect(running) as connection:
        line = b"X-Filler: " + b"a" * 1000 + b"\r\n"
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        found = b""
        try:
            for _ in range(2000):
                connection.sendall(line)
        except OSError:
            pass
        try:
            found = receive_all(connection)
        except OSError:  # the rest of what was sent may come back as a reset
            found = found or b"reset"
        assert found == b"reset" or found.startswith(b"HTTP/1.1 431")
        assert running.client().get("/healthz").status_code == 200


def test_large_body_is_not_counted_as_headers(mixture):
    text = "a " * 100_000
    with serving(mixture) as running, running.client() as client:
        for _ in range(3):
            answer = client.post("/v1/score", json={"text": text})
            assert answer.status_code == 400
            assert "takes 8,192 at most" in answer.json()["error"]["message"]


def test_slow_body_times_out(mixture, monkeypatch):
    monkeypatch.setattr(RequestGuard.__init__, "__kwdefaults__", {"body_seconds": 0.4})
    with serving(mixture) as running, connect(running) as connection:
        connection.sendall(f"{HEAD}Content-Length: 500\r\n\r\n".encode())
        assert send_slowly(connection, b" " * 500, 0.05) < 5
    with serving(mixture) as running:
        assert running.post("/v1/score", text="When")["tokens"] > 0


def test_client_that_does_not_read_is_disconnected(mixture, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "read_seconds", 0.5)
    with serving(mixture) as running:
        # Sources make a response of megabytes, more than the system buffers for a client that does not read.
        payload = json.dumps({"prompt": "When", "max_tokens": 100, "sources": 40, "n": 16, "stream": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port))
            head = HEAD.replace("score", "completions")
            connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            scheduler = running.service.scheduler
            end = time.monotonic() + 20
            while not scheduler.tokens_generated and time.monotonic() < end:
                time.sleep(0.01)
            assert scheduler.tokens_generated
            # The server has dropped the connection while the client is still connected.
            while (running.connections or scheduler.active) and time.monotonic() < end:
                time.sleep(0.05)
            assert (running.connections, scheduler.active) == (0, 0)


def test_too_many_connections_are_refused(mixture, monkeypatch):
    with serving(mixture, slots=1, queue=1) as running, ExitStack() as held:
        most = running.most
        assert most == 1 + 1 + 256
        for _ in range(most):
            held.enter_context(connect(running))
        end = time.monotonic() + 10
        while running.connections < most and time.monotonic() < end:
            time.sleep(0.01)
        with connect(running) as late:
            answer = receive_all(late)
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "unavailable_error"
        held.close()
        while running.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert running.client().get("/healthz").status_code == 200


def test_pipelined_requests_are_both_answered(mixture):
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(mixture) as running, connect(running) as connection:
        connection.sendall(ask + ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert receive_all(connection).count(b"HTTP/1.1 200") == 2
