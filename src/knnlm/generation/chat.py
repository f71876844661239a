"""Conversations as prompts: the text of a chat template, and the origin of each of its tokens.

Contents of users' and tools' messages are given text. The template's own text and system messages are hidden, and
earlier answers were generated; see `Origin`. To locate the contents, the template is rendered once more with marks in
their places: the text between marks is the template's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from knnlm.errors import ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Origin

_ORIGINS = {"user": Origin.GIVEN, "tool": Origin.GIVEN, "assistant": Origin.GENERATED}  # all others are hidden

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ContentRange:
    """The characters of one message's content in the text of a conversation."""

    begin: int
    end: int
    origin: Origin


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation, and the contents that were located in it."""

    text: str
    contents: Sequence[ContentRange]  # in the order of the text

    def origins(self, offsets: Sequence[tuple[int, int]]) -> list[int]:
        """Return the origins of tokens with these characters; a token that is not inside of one content is hidden."""
        origins = [int(Origin.HIDDEN)] * len(offsets)
        left = iter(self.contents)
        content = next(left, None)
        for number, (begin, end) in enumerate(offsets):
            while content is not None and begin >= content.end:
                content = next(left, None)
            if content is not None and content.begin <= begin < end <= content.end:
                origins[number] = int(content.origin)
        return origins


@dataclass(frozen=True)
class EncodedChat:
    """The tokens of a conversation and their origins."""

    tokens: list[int]
    origins: list[int]

    @property
    def readable(self) -> list[bool]:
        """A row of `readable_mask` of `KnnForCausalLM.generate`."""
        return [origin == Origin.GIVEN for origin in self.origins]


def encode_chat(lm: CausalLM, messages: Messages) -> EncodedChat:
    """Return the tokens of a conversation with role and content of each message, up to the beginning of a reply.

    A model without a chat template reads the contents, one on each line.
    """
    rendered = render_chat(lm.tokenizer, messages)
    tokens, offsets = lm.encode_with_offsets(rendered.text)
    origins = rendered.origins(offsets)
    if not has_template(lm.tokenizer):
        tokens, origins = [lm.start_token, *tokens], [int(Origin.HIDDEN), *origins]
    return EncodedChat(tokens, origins)


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> RenderedChat:
    """Render a conversation with the tokenizer's template, and locate the contents of its messages.

    If the template changes contents, only the last one is located, where it is the user's and ends as it was given.
    """
    try:
        text = _render(tokenizer, messages)
    except Exception as error:  # a template can raise any error
        raise ParameterError(f"The model's chat template rejects the messages: {error}") from None
    mark = f"content-{secrets.token_hex(8)}-"
    marked = [
        {**message, "content": f"{mark}{number};"} if message.get("content") else message
        for number, message in enumerate(messages)
    ]
    try:
        skeleton = _render(tokenizer, marked)
    except Exception:  # the template does not accept the marks as contents
        return RenderedChat(text, [])
    first, *rest = re.split(f"{mark}([0-9]+);", skeleton)  # text, number, text, number, …, text
    places = [(messages[int(number)], after) for number, after in zip(rest[::2], rest[1::2], strict=True)]
    contents = _locate(text, first, places)
    return RenderedChat(text, _locate_last(text, places) if contents is None else contents)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    if not has_template(tokenizer):
        return "\n".join(message["content"] for message in messages)
    return str(
        tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False, add_generation_prompt=True)
    )


def _locate(text: str, first: str, places: Sequence[tuple[Mapping[str, Any], str]]) -> list[ContentRange] | None:
    """Return the contents in a text that begins with `first`; each place is a message and the text after it.

    None: the text is another one, because the template changes a content by more than removing spaces around it.
    """
    contents, begin = [], len(first)
    if not text.startswith(first):
        return None
    for message, after in places:
        ends = (begin + len(each) for each in _variants(message) if text.startswith(each, begin))
        end = next((end for end in ends if text.startswith(after, end)), None)
        if end is None:
            return None
        contents.append(ContentRange(begin, end, _origin(message)))
        begin = end + len(after)
    return contents if begin == len(text) else None


def _locate_last(text: str, places: Sequence[tuple[Mapping[str, Any], str]]) -> list[ContentRange]:
    """Return the last content alone, if it is given text, and nothing where it is not found."""
    if not places or _origin(places[-1][0]) != Origin.GIVEN or not text.endswith(places[-1][1]):
        return []
    message, after = places[-1]
    end = len(text) - len(after)
    begin = next((end - len(each) for each in _variants(message) if text.endswith(each, 0, end)), end)
    return [ContentRange(begin, end, Origin.GIVEN)]


def _variants(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield a content as a template may contain it: as it is, or without the spaces around it."""
    content = str(message["content"])
    yield from dict.fromkeys((content, content.rstrip(), content.lstrip(), content.strip()))


def _origin(message: Mapping[str, Any]) -> Origin:
    return _ORIGINS.get(message.get("role", ""), Origin.HIDDEN)
