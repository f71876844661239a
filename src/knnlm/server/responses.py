"""The bodies of responses: events become JSON, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from knnlm.mixture.support import SUPPORTED
from knnlm.server.engine.requests import FinishEvent, OutputEvent, RequestFailed, ScoredToken

DONE = b"data: [DONE]\n\n"

_LOG_ZERO = -9999.0  # the logarithm of 0 in OpenAI's API
_CACHED_TOKENS = 1 << 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "unavailable_error"}

_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not buffer

# Clearer messages for some of the framework's.
_MESSAGES = {
    "Not Found": "There is no such route. The routes of the API begin with /v1; /openapi.json lists them.",
    "Method Not Allowed": "This route does not support the method. /openapi.json lists the supported ones.",
    "Field required": "The body is empty. Send one JSON object.",
    "Input should be a valid dictionary or object to extract fields from": "The body must be one JSON object.",
    "There was an error parsing the body": "The body cannot be read. Send one JSON object in UTF-8.",
}

# One encoder for all tokens; `json.dumps` with these options would create one at every call.
encode_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class JsonResponse(JSONResponse):
    """A JSON response in ASCII: any text can be escaped, also unpaired surrogates."""

    def render(self, content: Any) -> bytes:
        """Return the encoded body."""
        return encode_json(content).encode()


class EventStream(StreamingResponse):
    """Server-sent events; the iterators are closed when the response ends, also if the client disconnects."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], events: AsyncGenerator[Any, None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._iterators = (chunks, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for iterator in self._iterators:
                await iterator.aclose()


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": _MESSAGES.get(message, message),
            "type": _ERROR_TYPES.get(status, default),
            "param": param,
            "code": code,
        }
    }


def provenance(trace_id: str, k: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return the probabilities and sources of tokens; rescoring of the trace can use up to `k` neighbours."""
    return {"id": trace_id, "k": k, "tokens": [_token(token) for token in tokens]}


@dataclass
class SupportedShare:
    """The share of tokens that are supported, among those that have a support."""

    supported: int = 0
    tokens: int = 0

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Count some tokens."""
        for token in tokens:
            if token.support is not None:
                self.supported += token.support >= SUPPORTED
                self.tokens += 1

    def as_dict(self, *, low_support: bool | None = None) -> dict[str, Any]:
        """Return the fields of a response; none where no token has a support."""
        low = {} if low_support is None else {"low_support": low_support}
        return {"supported_share": self.supported / self.tokens, **low} if self.tokens else low


def _token(token: ScoredToken) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": token.id,
        "text": token.text,
        "p_lm": _finite(token.p_lm),
        "p_knn": _finite(token.p_knn),
        "p": _finite(token.p),
        "weight": _finite(token.weight),
        "sources": token.sources,
    }
    if token.support is not None:
        body["support"] = token.support
    if token.shares:
        body["shares"] = token.shares
    return body


def missing_body(shards: Sequence[str]) -> dict[str, Any]:
    """Return the field of a response that names the shards that its searches lacked; none where they lacked none."""
    return {"missing_shards": list(shards)} if shards else {}


def score_body(
    trace_id: str, k: int, tokens: Sequence[ScoredToken], missing_shards: Sequence[str] = ()
) -> dict[str, Any]:
    """Return log-probability and perplexity of a text, by the language model and by the mixture, and its tokens."""
    scored = [token for token in tokens if token.components is not None]
    lm = sum(token.components.log_probs[0] for token in scored if token.components is not None)
    mixed = sum(token.log_p for token in scored)
    body: dict[str, Any] = {"tokens": len(scored), "log_p_lm": _finite(lm), "log_p": _finite(mixed)}
    for name, log_p in (("perplexity_lm", lm), ("perplexity", mixed)):
        loss = -log_p / len(scored) if scored else math.nan
        body[name] = _finite(math.exp(loss)) if loss < 700 else None
    share = SupportedShare()
    share.add(tokens)
    more = share.as_dict() | missing_body(missing_shards)
    return {**body, "knnlm": {**provenance(trace_id, k, tokens), **more}}


def translation_body(completion: dict[str, Any], *, tokens: bool) -> dict[str, Any]:
    """Return the response to a request for translations, from that for completions of the same sources."""
    translations = [
        {name: choice[name] for name in ("index", "text", "finish_reason")}
        | {"memory": choice["knnlm"]["memory"], "knnlm": choice["knnlm"] if tokens else None}
        | missing_body(choice["knnlm"].get("missing_shards", ()))
        for choice in completion["choices"]
    ]
    head = {"id": f"trans-{secrets.token_hex(12)}", "object": "translation"}
    shared = {name: completion[name] for name in ("created", "model")}
    return {**head, **shared, "translations": translations, "usage": completion["usage"]}


def _finite(number: float | None) -> float | None:
    """Return a number as JSON can hold it."""
    return number if number is not None and math.isfinite(number) else None


@dataclass
class _Choice:
    """The state of one continuation."""

    index: int
    trace_id: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)  # of whole responses only
    length: int = 0  # characters in earlier chunks
    reason: str | None = None
    started: bool = False
    low_support: bool | None = None
    memory: bool | None = None
    drafts: Mapping[str, Any] | None = None
    missing_shards: tuple[str, ...] = ()
    share: SupportedShare = field(default_factory=SupportedShare)

    def summary(self) -> dict[str, Any]:
        """Return what is known at the end of the continuation."""
        memory = {} if self.memory is None else {"memory": self.memory}
        drafts = {} if self.drafts is None else {"drafts": self.drafts}
        support = self.share.as_dict(low_support=self.low_support)
        return {**support, **memory, **drafts, **missing_body(self.missing_shards)}


class ResponseWriter:
    """Writes the response to one request for completions, from the events of the scheduler."""

    def __init__(
        self,
        model: str,
        token_texts: TokenTexts,
        *,
        chat: bool,
        choices: int,
        prompt_tokens: int,
        alternatives: int | None,
        max_k: int,
    ) -> None:
        self.token_texts = token_texts
        self.chat = chat
        self.alternatives = alternatives  # None: no log-probabilities
        self.max_k = max_k
        self._choices = [_Choice(index) for index in range(choices)]
        self._prompt_tokens, self._generated = prompt_tokens, 0
        name = "chat.completion.chunk" if chat else "text_completion"
        id_ = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": id_, "object": name, "created": int(time.time()), "model": model}

    async def body(self, events: AsyncIterator[list[OutputEvent]]) -> dict[str, Any]:
        """Return the whole response."""
        async for group in events:
            for event in group:
                choice, tokens = self._update(event)
                choice.tokens += tokens
        head = {**self._head, "object": "chat.completion"} if self.chat else self._head
        return {**head, "choices": [self._whole(choice) for choice in self._choices], "usage": self._usage()}

    async def stream(
        self, first: list[OutputEvent], events: AsyncIterator[list[OutputEvent]], *, usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, in one piece those that arrive together; an error is the last one."""
        yield self._chunks(first)
        try:
            async for group in events:
                yield self._chunks(group)
            if usage:
                yield _sse({**self._head, "choices": [], "usage": self._usage()})
        except RequestFailed as error:
            yield _sse(error_body(error.status, str(error)))
        yield DONE

    def _chunks(self, events: Sequence[OutputEvent]) -> bytes:
        return b"".join([_sse(self._chunk(*self._update(event))) for event in events])

    def _update(self, event: OutputEvent) -> tuple[_Choice, list[ScoredToken]]:
        """Return the choice of an event, with the event applied, and the event's tokens."""
        choice = self._choices[event.choice]
        choice.trace_id = event.trace_id
        if not isinstance(event, FinishEvent):
            choice.share.add(event.tokens)
            return choice, event.tokens
        choice.reason, choice.low_support = event.reason, event.low_support
        choice.missing_shards, choice.memory, choice.drafts = event.missing_shards, event.memory, event.drafts
        self._generated += event.generated
        return choice, []

    def _chunk(self, choice: _Choice, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        text = "".join(token.text for token in tokens)
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason}
        if self.chat:
            body["delta"] = {"content": text} if tokens or not choice.reason else {}
            if not choice.started:
                body["delta"] = {"role": "assistant", **body["delta"]}
        else:
            body["text"] = text
        body["logprobs"] = self._logprobs(tokens, choice.length) if tokens else None
        body["knnlm"] = provenance(choice.trace_id, self.max_k, tokens)
        if choice.reason is not None:
            body["knnlm"] |= choice.summary()
        choice.started = True
        choice.length += len(text)
        return {**self._head, "choices": [body]}

    def _whole(self, choice: _Choice) -> dict[str, Any]:
        text = "".join(token.text for token in choice.tokens)
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason}
        if self.chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        body["logprobs"] = self._logprobs(choice.tokens, 0)
        body["knnlm"] = provenance(choice.trace_id, self.max_k, choice.tokens) | choice.summary()
        return body

    def _usage(self) -> dict[str, int]:
        prompt, generated = self._prompt_tokens, self._generated
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _logprobs(self, tokens: Sequence[ScoredToken], offset: int) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token) for token in tokens], "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self.token_texts.get(token.id)[0] for token in tokens],
            "token_logprobs": [None if token.components is None else _logprob(token.log_p) for token in tokens],
            "top_logprobs": [self._top_logprobs(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top_logprobs(self, token: ScoredToken) -> dict[str, float] | None:
        if token.components is None:
            return None
        logprobs: dict[str, float] = {}
        for other, log_p in token.top:  # of tokens with the same text, the most probable stays
            logprobs.setdefault(self.token_texts.get(other)[0], _logprob(log_p))
        return logprobs

    def _chat_logprob(self, token: ScoredToken) -> dict[str, Any]:
        return {
            **self._token_logprob(token.id, token.log_p),
            "top_logprobs": [self._token_logprob(other, log_p) for other, log_p in token.top],
        }

    def _token_logprob(self, token: int, log_p: float) -> dict[str, Any]:
        text, data = self.token_texts.get(token)
        return {"token": text, "logprob": _logprob(log_p), "bytes": None if data is None else list(data)}


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(body).encode() + b"\n\n"


def _logprob(log_p: float) -> float:
    return log_p if math.isfinite(log_p) else _LOG_ZERO


class TokenTexts:
    """The text and bytes of single tokens. Not thread-safe, as tokenizers are not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.get = lru_cache(maxsize=_CACHED_TOKENS)(self._get)

    def _get(self, token: int) -> tuple[str, bytes | None]:
        """Return a token's text and bytes; as in OpenAI's API, the text of a partial character lists its bytes."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if "\ufffd" not in text:
            return text, text.encode(errors="replace")
        data = _token_bytes(self.tokenizer.convert_ids_to_tokens(token))
        if data is None or data == text.encode(errors="replace"):
            return text, data
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def _token_bytes(name: Any) -> bytes | None:
    """Return the bytes of a byte-level or byte-fallback token, None for other tokens."""
    if not isinstance(name, str):
        return None
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in name) if all(char in alphabet for char in name) else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
