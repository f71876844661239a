"""Incremental detokenisation: the text that each token adds.

`tokenizers.decoders.DecodeStream` does the same for fast tokenizers, but buffers a sequence of invalid bytes without
bound (decoding it again at every token), repeats text where the given context ends inside a character, and would need
this code as the fallback for slow tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 6  # earlier tokens that the text of a token may depend on: some tokenizers insert spaces
_MAX_KNOWN_TOKENS = 24  # known tokens to keep before they are cut to the context
_MAX_CHARACTER_TOKENS = 5  # tokens of one character, at a byte each; more are invalid bytes
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Returns the text that each token adds; the concatenation is the text of all tokens."""

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self.decode = decode
        self.pending: list[int] = []  # tokens of an incomplete character
        self._known = list(context)[-_CONTEXT_TOKENS:]  # tokens whose text was returned
        self._known_text: str | None = None

    def add(self, token: int) -> str:
        """Return the text that this token adds; "" while a character is incomplete."""
        self.pending.append(token)
        before, after = self._before(), self.decode(self._known + self.pending)
        if after.endswith(_REPLACEMENT) and len(self.pending) < _MAX_CHARACTER_TOKENS:
            return ""
        return self._advance(before, after)

    def finish(self) -> str:
        """Return the text of an incomplete character at the end."""
        if not self.pending:
            return ""
        return self._advance(self._before(), self.decode(self._known + self.pending))

    def _before(self) -> str:
        if self._known_text is None:
            self._known_text = self.decode(self._known)
        return self._known_text

    def _advance(self, before: str, after: str) -> str:
        if not after.startswith(before):
            # The context ended inside a character that is complete now.
            before = before.removesuffix(_REPLACEMENT)
        new = after[len(before) :] if after.startswith(before) else self.decode(self.pending)
        self._known, self._known_text = self._known + self.pending, after
        if len(self._known) > _MAX_KNOWN_TOKENS:
            self._known, self._known_text = self._known[-_CONTEXT_TOKENS:], None
        self.pending = []
        return new


def token_texts(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text of each token; a character of several tokens is the text of the last of them."""
    detokenizer = Detokenizer(decode)
    texts = [detokenizer.add(token) for token in tokens]
    if texts:
        texts[-1] += detokenizer.finish()
    return texts
