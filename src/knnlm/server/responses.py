"""From the engine's events to the bodies of answers, whole or in chunks. Knows nothing about HTTP.

What one token is by itself: its text, and its bytes where it is only a part of a character.

Knows nothing about answers.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from knnlm.server.engine.requests import ScoredToken

_NEVER = -9999.0  # the logarithm of what is impossible, as OpenAI writes it


def finite(number: float | None) -> float | None:
    """Give a number as JSON can hold it."""
    return number if number is not None and math.isfinite(number) else None


def token_facts(token: ScoredToken) -> dict[str, Any]:
    """Tell of a token."""
    facts: dict[str, Any] = {
        "id": token.id,
        "text": token.text,
        "p_lm": finite(token.p_lm),
        "p_knn": finite(token.p_knn),
        "p": finite(token.p),
        "weight": token.weight,
        "sources": token.sources,
    }
    if token.shares:
        facts["shares"] = token.shares
    return facts


def provenance(trace: str, k: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Tell where tokens come from."""
    return {"id": trace, "k": k, "tokens": [token_facts(token) for token in tokens]}


def totals(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Give the log-probability and the perplexity of a text, by the model alone and with the memory."""
    known = [token for token in tokens if token.opinion is not None]
    lm = sum(token.opinion.logs[0] for token in known if token.opinion is not None)
    mixed = sum(token.log_p for token in known)
    facts: dict[str, Any] = {"tokens": len(known), "log_p_lm": finite(lm), "log_p": finite(mixed)}
    for name, log_p in (("perplexity_lm", lm), ("perplexity", mixed)):
        mean = -log_p / len(known) if known else math.nan
        facts[name] = finite(math.exp(mean)) if mean < 700 else None
    return facts


@dataclass
class Choice:
    """One continuation as far as it has come."""

    index: int
    trace: str = ""
    k: int = 0
    tokens: list[ScoredToken] = field(default_factory=list)
    length: int = 0  # characters told of
    reason: str | None = None
    begun: bool = False

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(token.text for token in self.tokens)


@dataclass
class ResponseFormatter:
    """What answers of one request look like."""

    kind: str  # "cmpl" or "chatcmpl"
    model: str
    pieces: TokenTexts
    alternatives: int | None  # None: no log-probabilities are wanted
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.kind}-{secrets.token_hex(12)}"

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return self.kind == "chatcmpl"

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """Write the whole answer."""
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._head(name), "choices": [self._choice(choice) for choice in choices], "usage": usage}

    def chunk(self, choice: Choice, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Write a piece of a stream: some tokens of a choice, or its end."""
        text = "".join(token.text for token in tokens)
        facts: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason}
        if self.chat:
            facts["delta"] = {"content": text} if tokens or not choice.reason else {}
            if not choice.begun:
                facts["delta"] = {"role": "assistant", **facts["delta"]}
        else:
            facts["text"] = text
        facts["logprobs"] = self._log_probabilities(tokens, choice.length) if tokens else None
        facts["knnlm"] = provenance(choice.trace, choice.k, tokens)
        choice.begun = True
        choice.length += len(text)
        return {**self._head(self._chunk_name), "choices": [facts]}

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        """Write the chunk that tells what was used."""
        return {**self._head(self._chunk_name), "choices": [], "usage": usage}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        facts: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason}
        if self.chat:
            facts["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            facts["text"] = choice.text
        facts["logprobs"] = self._log_probabilities(choice.tokens, 0)
        facts["knnlm"] = provenance(choice.trace, choice.k, choice.tokens)
        return facts

    def _log_probabilities(self, tokens: Sequence[ScoredToken], offset: int) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        if self.chat:
            return {"content": [self._chat_token(token) for token in tokens], "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self.pieces.spell(token.id)[0] for token in tokens],
            "token_logprobs": [None if token.opinion is None else _log(token.log_p) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        if token.opinion is None:
            return None
        found: dict[str, float] = {}
        for other, log_p in token.top:  # the most probable first: of two that are written alike, it stays
            found.setdefault(self.pieces.spell(other)[0], _log(log_p))
        return found

    def _chat_token(self, token: ScoredToken) -> dict[str, Any]:
        return {
            **self._spelt(token.id, token.log_p),
            "top_logprobs": [self._spelt(other, log_p) for other, log_p in token.top],
        }

    def _spelt(self, token: int, log_p: float) -> dict[str, Any]:
        name, spelt = self.pieces.spell(token)
        return {"token": name, "logprob": _log(log_p), "bytes": None if spelt is None else list(spelt)}


def _log(log_p: float) -> float:
    return log_p if math.isfinite(log_p) else _NEVER


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_KEPT = 1 << 16  # tokens that are remembered


class TokenTexts:
    """Spells tokens one by one; for one thread only, since a tokenizer is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.spell = lru_cache(maxsize=_KEPT)(self._spell)

    def _spell(self, token: int) -> tuple[str, bytes | None]:
        """Give a token's name and its bytes; as in OpenAI's API, a part of a character is named by its bytes."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if "\ufffd" not in text:
            return text, text.encode(errors="replace")
        found = _bytes(self.tokenizer.convert_ids_to_tokens(token))
        if found is None or found == text.encode(errors="replace"):
            return text, found
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found


def _bytes(piece: Any) -> bytes | None:
    """Read the bytes from how a tokenizer writes a token; None where it does not say."""
    if not isinstance(piece, str):
        return None
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    signs = _byte_signs()
    return bytes(signs[sign] for sign in piece) if all(sign in signs for sign in piece) else None


@lru_cache(maxsize=1)
def _byte_signs() -> dict[str, int]:
    """Say which sign stands for which byte where tokens are made of bytes: those that can be seen for themselves."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
