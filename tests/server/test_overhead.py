"""The server's work for each token, in counts: deliveries, writes, decoded tokens, calls between modules."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers.models import TEXT
from helpers.server import read_stream, serving
from knnlm import server as server_package
from knnlm.generation.causal import KnnForCausalLM
from knnlm.lm.detokenizer import Detokenizer
from knnlm.memories.base import Votes
from knnlm.mixture.mixture import Mixture
from knnlm.server import responses as responses_module
from knnlm.server.engine import scheduler as scheduler_module
from knnlm.server.engine.requests import FinishEvent, GenerationRequest, RequestHandle, TokensEvent
from knnlm.server.engine.scheduler import EventBuffer, Scheduler

PROMPT = "The memory of a model"
NEVER = 1e9  # seconds


@pytest.fixture(scope="module")
def mixture(lm, store):
    lm.model.generation_config.eos_token_id = None
    return Mixture.open(store.path, lm, k=16, knn_temperature=8.0, lmbda=0.6)


@pytest.fixture
def scheduler(mixture):
    running = Scheduler(mixture)
    running.start()
    assert running.ready.wait(30)
    yield running
    running.stop()


def make_request(mixture, tokens):
    return GenerationRequest(tuple(mixture.lm.prompt(PROMPT)), tokens)


def generated(mixture, tokens):
    given = torch.tensor([mixture.lm.prompt(PROMPT)])
    made = KnnForCausalLM(mixture).generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return made[0, given.shape[1] :].tolist()


@pytest.mark.parametrize(("pause", "deliveries"), [(0.0, 30), (NEVER, 2)])
def test_fast_tokens_are_delivered_together(scheduler, mixture, monkeypatch, pause, deliveries):
    """Without a pause, at each token; with an endless one, at the first token, which is urgent, and at the end."""
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", pause)
    events = list(scheduler.submit(make_request(mixture, 30)).events())
    assert scheduler.events.flushes == deliveries
    assert [type(event) for event in events] == [TokensEvent] * 30 + [FinishEvent]
    assert [token.id for event in events[:-1] for token in event.tokens] == generated(mixture, 30)


def test_buffered_events_are_delivered_before_a_prompt_is_read(scheduler, mixture, monkeypatch):
    """Reading a prompt may take long, and earlier tokens of other sequences must not wait for it."""
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", NEVER)
    delivered, seen = [], []
    read_prompt = scheduler_module.read_prompt

    def recording_read(*given, **named):
        if delivered:
            seen.append((len(delivered), scheduler.tokens_generated))
        return read_prompt(*given, **named)

    monkeypatch.setattr(scheduler_module, "read_prompt", recording_read)
    long = scheduler.submit(make_request(mixture, 200), lambda event: delivered.extend(getattr(event, "tokens", [])))
    while scheduler.tokens_generated < 20:
        time.sleep(0.001)
    assert len(delivered) == 1
    list(scheduler.submit(make_request(mixture, 1)).events())
    ((sent, made),) = seen
    assert sent == made >= 20
    long.cancel()


def test_events_are_flushed_if_one_is_urgent_or_after_a_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", 1.0)
    flushed = []
    buffer = EventBuffer(lambda events: flushed.append([event.choice for _, event in events]))
    handle = RequestHandle(GenerationRequest((1,), 1))

    def add(number, *, after, urgent=False, force=False):
        now[0] += after
        buffer.add(handle, TokensEvent(number, "", []), urgent=urgent)
        buffer.flush(force=force)

    add(0, after=0.0)
    add(1, after=0.5)
    add(2, after=0.25)
    add(3, after=0.25)  # a second after the first
    add(4, after=0.5)
    add(5, after=0.125, urgent=True)
    add(6, after=0.5)
    add(7, after=0.125, force=True)
    buffer.flush(force=True)  # the buffer is empty
    assert flushed == [[0], [1, 2, 3], [4, 5], [6, 7]]
    assert buffer.flushes == 4


def http_chunks(port, body):
    """Request a stream over a bare socket, and return its HTTP chunks: one for each write of the server."""
    payload = json.dumps({"stream": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    rest, found = answer.partition(b"\r\n\r\n")[2], []
    while size := int(rest.partition(b"\r\n")[0], 16):
        rest = rest.partition(b"\r\n")[2]
        found.append(rest[:size])
        rest = rest[size + 2 :]
    return found


def test_stream_has_an_event_per_token_and_a_write_per_delivery(mixture, monkeypatch):
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", NEVER)
    made, write = [], responses_module.encode_json
    monkeypatch.setattr(responses_module, "encode_json", lambda metadata: made.append(metadata) or write(metadata))
    with serving(mixture) as running:
        chunks = http_chunks(running.port, {"prompt": PROMPT, "max_tokens": 30, "temperature": 0})
        assert running.service.scheduler.events.flushes == 2
    assert [chunk.count(b"data: ") for chunk in chunks] == [1, 30, 1]  # the first; the others and the end; [DONE]
    assert len(made) == 31  # JSON is written once for each event
    events = [json.loads(line[6:]) for line in b"".join(chunks).split(b"\n\n")[:31]]
    tokens = [token["id"] for event in events for token in event["choices"][0]["knnlm"]["tokens"]]
    assert tokens == generated(mixture, 30)


def test_buffered_tokens_are_sent_before_an_error(mixture, monkeypatch):
    """A stream that a timeout ends contains all tokens generated before it."""
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", NEVER)
    search = mixture.knn.search
    monkeypatch.setattr(mixture.knn, "search", lambda *args: time.sleep(0.02) or search(*args))
    with serving(mixture, seconds=0.6) as running:
        stream = asyncio.run(read_stream(running.port, {"prompt": PROMPT, "max_tokens": 100, "temperature": 0}))
        assert "longer than the server allows" in stream.error
        assert 2 < stream.tokens == running.service.scheduler.tokens_generated


def test_token_is_decoded_once_and_its_context_rarely(lm):
    tokens = lm.encode(TEXT)[:200]
    calls = []

    def decode(some):
        calls.append(len(some))
        return lm.tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.finish()
    assert text == lm.decode(tokens)
    assert len(calls) <= 1.1 * len(tokens)
    assert max(calls) <= 32  # however long the text is


def test_abstention_is_computed_once_per_token(scheduler, mixture, monkeypatch):
    calls, abstains = [], Votes.abstains
    monkeypatch.setattr(Votes, "abstains", lambda votes: calls.append(1) or abstains(votes))
    list(scheduler.submit(make_request(mixture, 20)).events())
    assert len(calls) == 20


class CallProfile:
    """Counts the calls of functions in the server's modules, and those from one module into another."""

    def __init__(self):
        self.root = str(Path(server_package.__file__).parent) + os.sep
        self.active = False
        self.modules = Counter()
        self.hops = 0

    def module(self, frame):
        name = frame.f_code.co_filename
        return name.removeprefix(self.root) if name.startswith(self.root) else None

    def __call__(self, frame, event, _):
        if not self.active or event != "call" or (called := self.module(frame)) is None:
            return
        self.modules[called] += 1
        while (frame := frame.f_back) is not None:
            if (caller := self.module(frame)) is not None:
                self.hops += caller != called
                return


def test_streamed_request_passes_through_few_modules(mixture, monkeypatch):
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", 0.0)  # each token is delivered alone
    profile = CallProfile()
    before = threading.getprofile()
    threading.setprofile(profile)  # of the threads that start from here on
    try:
        with serving(mixture) as running:
            body = {"prompt": PROMPT, "temperature": 0}
            http_chunks(running.port, {**body, "max_tokens": 1})
            hops = {3: 0, 23: 0}
            for tokens in (3, 23, 3, 3, 3):  # tokens that are delivered together take fewer calls: the most count
                profile.hops, profile.active = 0, True
                assert http_chunks(running.port, {**body, "max_tokens": tokens})[-1] == b"data: [DONE]\n\n"
                profile.active = False
                hops[tokens] = max(hops[tokens], profile.hops)
    finally:
        threading.setprofile(before)
    assert len(profile.modules) <= 10, sorted(profile.modules)
    assert (hops[23] - hops[3]) / 20 <= 8  # calls from one module into another, for each token
