"""What serving does for each token, by counts: who is woken, what is written, what is asked and decoded."""

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


@pytest.mark.parametrize(("pause", "woken"), [(0.0, 30), (NEVER, 2)])
def test_tokens_that_come_quickly_wake_who_waits_together(scheduler, mixture, monkeypatch, pause, woken):
    """With no pause at each token; with an endless one at the first, which is not held back, and at the end."""
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", pause)
    events = list(scheduler.submit(make_request(mixture, 30)).events())
    assert scheduler.events.flushes == woken
    assert [type(event) for event in events] == [TokensEvent] * 30 + [FinishEvent]
    assert [token.id for event in events[:-1] for token in event.tokens] == generated(mixture, 30)


def test_what_is_held_back_is_told_before_a_prompt_is_read(scheduler, mixture, monkeypatch):
    """To read a prompt may take long, and what others wrote before is not to wait for it."""
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", NEVER)
    told, seen = [], []
    read_prompt = scheduler_module.read_prompt

    def reading(*given, **named):
        if told:
            seen.append((len(told), scheduler.tokens_generated))
        return read_prompt(*given, **named)

    monkeypatch.setattr(scheduler_module, "read_prompt", reading)
    long = scheduler.submit(make_request(mixture, 200), lambda event: told.extend(getattr(event, "tokens", [])))
    while scheduler.tokens_generated < 20:
        time.sleep(0.001)
    assert len(told) == 1
    list(scheduler.submit(make_request(mixture, 1)).events())
    ((heard, made),) = seen
    assert heard == made >= 20
    long.cancel()


def test_events_are_handed_over_where_one_is_urgent_or_enough_time_has_passed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", 1.0)
    posted = []
    buffer = EventBuffer(lambda events: posted.append([event.choice for _, event in events]))
    handle = RequestHandle(GenerationRequest((1,), 1))

    def tell(number, *, after, urgent=False, at_once=False):
        now[0] += after
        buffer.add(handle, TokensEvent(number, "", []), urgent=urgent)
        buffer.flush(force=at_once)

    tell(0, after=0.0)
    tell(1, after=0.5)
    tell(2, after=0.25)
    tell(3, after=0.25)  # a second after the first
    tell(4, after=0.5)
    tell(5, after=0.125, urgent=True)
    tell(6, after=0.5)
    tell(7, after=0.125, at_once=True)
    buffer.flush(force=True)  # nothing is there
    assert posted == [[0], [1, 2, 3], [4, 5], [6, 7]]
    assert buffer.flushes == 4


def http_chunks(port, body):
    """Ask for a stream over a bare socket, and give its HTTP chunks: a server makes one for each write."""
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


def test_a_stream_has_an_event_for_each_token_but_a_write_for_each_waking(mixture, monkeypatch):
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


def test_tokens_that_were_held_back_come_before_an_error(mixture, monkeypatch):
    """A stream that is cut off by the time-out: all that was written until then has come."""
    monkeypatch.setattr(scheduler_module, "FLUSH_SECONDS", NEVER)
    search = mixture.knn.search
    monkeypatch.setattr(mixture.knn, "search", lambda keys, k=None: time.sleep(0.02) or search(keys, k))
    with serving(mixture, seconds=0.6) as running:
        stream = asyncio.run(read_stream(running.port, {"prompt": PROMPT, "max_tokens": 100, "temperature": 0}))
        assert "longer than the server allows" in stream.error
        assert 2 < stream.tokens == running.service.scheduler.tokens_generated


def test_a_token_is_decoded_once_and_what_came_before_it_seldom_again(lm):
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


def test_who_abstains_is_asked_once_a_token(scheduler, mixture, monkeypatch):
    asked, abstains = [], Votes.abstains
    monkeypatch.setattr(Votes, "abstains", lambda votes: asked.append(1) or abstains(votes))
    list(scheduler.submit(make_request(mixture, 20)).events())
    assert len(asked) == 20


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
            hops = []
            for tokens in (3, 23):
                profile.hops, profile.active = 0, True
                assert http_chunks(running.port, {**body, "max_tokens": tokens})[-1] == b"data: [DONE]\n\n"
                profile.active = False
                hops.append(profile.hops)
    finally:
        threading.setprofile(before)
    assert len(profile.modules) <= 10, sorted(profile.modules)
    assert (hops[1] - hops[0]) / 20 <= 8  # calls from one module into another, for each token
