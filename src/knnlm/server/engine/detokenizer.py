"""From tokens to text, as they come. Knows nothing about how tokens are drawn.

A token's text is settled when it ends in whole characters and cannot be the beginning of a stop string any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from knnlm.server.engine.requests import ScoredToken

_BEHIND = 6  # earlier tokens that a token's text may depend on: some tokenizers write spaces between

_MOST = 24  # earlier tokens that are kept, so that their text mostly is what was written last

_UNFINISHED = 5  # tokens, at a byte each, that may be needed for one character

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Gives the text that each token adds, so that all of it together is the text."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self.decode = decode
        self.known = list(context)[-_BEHIND:]  # tokens whose text was given
        self.pending: list[int] = []
        self._written: str | None = None  # the text of those that are known, where it was looked at

    def add(self, token: int) -> str:
        """Give the text that is new with this token; nothing while a character is incomplete."""
        self.pending.append(token)
        before, after = self._before(), self.decode(self.known + self.pending)
        if after.endswith("\ufffd") and len(self.pending) < _UNFINISHED:
            return ""
        return self._settle(before, after)

    def rest(self) -> str:
        """Give what is left of an incomplete character."""
        if not self.pending:
            return ""
        return self._settle(self._before(), self.decode(self.known + self.pending))

    def _before(self) -> str:
        if self._written is None:
            self._written = self.decode(self.known)
        return self._written

    def _settle(self, before: str, after: str) -> str:
        if not after.startswith(before):
            # A character that was cut in the tokens before is whole now: its sign is one, and comes with what follows.
            before = before.removesuffix("\ufffd")
        new = after[len(before) :] if after.startswith(before) else self.decode(self.pending)
        self.known, self._written = self.known + self.pending, after
        if len(self.known) > _MOST:
            self.known, self._written = self.known[-_BEHIND:], None
        self.pending = []
        return new


class StopStringFilter:
    """Holds tokens back until their text is settled, and ends the text at a stop string."""

    def __init__(self, spelling: Detokenizer, stop: Sequence[str]) -> None:
        self.spelling = spelling
        self.stop = [string for string in stop if string]
        self.held: list[ScoredToken] = []
        self.stopped = False

    def add(self, token: ScoredToken) -> list[ScoredToken]:
        """Take a token, and give those whose text is settled now."""
        token.text = self.spelling.add(token.id)
        self.held.append(token)
        if self.spelling.pending:
            return []
        text = "".join(each.text for each in self.held)
        found = [place for place in (text.find(string) for string in self.stop) if place >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        return self._release(len(text) - self._doubtful(text))

    def finish(self) -> list[ScoredToken]:
        """Give all that is held, the end of the text."""
        if self.stopped:
            return []
        if self.held:
            self.held[-1].text += self.spelling.rest()
        released, self.held = self.held, []
        text = "".join(each.text for each in released)
        if found := [place for place in (text.find(string) for string in self.stop) if place >= 0]:
            self.held, self.stopped = released, True
            return self._cut(min(found))
        return released

    def _doubtful(self, text: str) -> int:
        """Say how many of the last characters may be the beginning of a stop string."""
        longest = max((len(string) - 1 for string in self.stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self.stop):
                return length
        return 0

    def _release(self, settled: int) -> list[ScoredToken]:
        """Give the tokens that lie within the first characters of what is held."""
        place = count = 0
        for token in self.held:
            if place + len(token.text) > settled:
                break
            place += len(token.text)
            count += 1
        released, self.held = self.held[:count], self.held[count:]
        return released

    def _cut(self, end: int) -> list[ScoredToken]:
        """Give the tokens before a place, the last of them cut there; the others are not part of the text."""
        released, place = [], 0
        for token in self.held:
            if place >= end:
                break
            token.text = token.text[: end - place]
            place += len(token.text)
            released.append(token)
        self.held = []
        return released
