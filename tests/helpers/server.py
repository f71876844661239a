"""A real server on a loopback port, in a thread of this process, and a bare client that reads streams from it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.auth import ApiKeys
from knnlm.server.endpoint import Endpoint, RemoteReplica
from knnlm.server.limits import Limits
from knnlm.server.run import Server, bind, make_endpoint_server, make_server, server_url
from knnlm.server.service import REFRESH_SECONDS, Service
from knnlm.server.translation import make_service


@dataclass
class Running:
    """A running server and its address."""

    service: Service | None  # None: several, in replicas
    url: str
    port: int
    server: Server

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self.server.server_state.connections)

    @property
    def most(self) -> int:
        """Largest number of connections."""
        return int(self.server.config.http_protocol_class.max_connections)

    def client(self, key: str | None = None, timeout: float = 60.0) -> httpx.Client:
        """A plain HTTP client."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def post(self, path: str, **body: Any) -> Any:
        """Post JSON, and return the JSON of the response."""
        with self.client() as client:
            answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def chat_mixture(path: Path, template: str) -> Mixture:
    """Return a mixture of a tiny model with a chat template and without an end-of-sequence token."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    lm = CausalLM(tiny("llama"), tokenizer, name="tiny")
    lm.model.generation_config.eos_token_id = None
    store = build(documents(20), path, lm=lm)
    return Mixture.open(store.path, lm, k=16, knn_temperature=8.0, lmbda=0.6)


@contextmanager
def serving(
    mixture: Mixture,
    *,
    keys: ApiKeys | None = None,
    refresh: float = REFRESH_SECONDS,
    draft: bool = False,
    **limits: Any,
) -> Iterator[Running]:
    """Serve a mixture within the context."""
    service = make_service(mixture, name="docs", limits=Limits(**limits), refresh=refresh, draft=draft)
    taken = bind("127.0.0.1", 0, keys=keys or ApiKeys())
    begun = threading.Event()
    server = make_server(service, taken, keys=keys, ready=begun.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    assert begun.wait(30)
    assert service.scheduler.ready.wait(30)
    try:
        yield Running(service, server_url(taken), taken.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def serving_endpoint(
    replicas: Sequence[RemoteReplica], limits: Limits | None = None, keys: ApiKeys | None = None
) -> Iterator[Running]:
    """Serve replicas behind one endpoint within the context."""
    endpoint = Endpoint(replicas, limits or Limits())
    taken, begun = bind("127.0.0.1", 0, keys=keys or ApiKeys()), threading.Event()
    server = make_endpoint_server(endpoint, taken, keys=keys, ready=begun.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    assert begun.wait(30)
    try:
        yield Running(None, server_url(taken), taken.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@dataclass
class Stream:
    """The result of one stream."""

    status: int = 0
    text: str = ""
    tokens: int = 0
    error: str | None = None
    done: bool = False
    began: float = field(default_factory=perf_counter)
    times: list[float] = field(default_factory=list)  # of its tokens


async def read_stream(port: int, body: dict[str, Any]) -> Stream:
    """Request a stream over a bare socket, which costs little beside a tiny model."""
    stream = Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps({"stream": True, **body}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
        "Connection: close",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + payload)
    await writer.drain()
    try:
        stream.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                stream.done = True
                break
            metadata = json.loads(line[6:])
            if "error" in metadata:
                stream.error = metadata["error"]["message"]
                break
            (choice,) = metadata["choices"]
            stream.text += choice["text"]
            if choice["knnlm"]["tokens"]:
                stream.tokens += len(choice["knnlm"]["tokens"])
                stream.times.append(perf_counter())
    finally:
        writer.close()
    return stream
