"""Stop strings in a text that is generated token by token."""

from __future__ import annotations

from collections.abc import Sequence

from knnlm.lm.detokenizer import Detokenizer
from knnlm.server.engine.requests import ScoredToken


class StopStringFilter:
    """Sets the text of tokens, and holds them back while they may be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.detokenizer = detokenizer
        self.stop = [string for string in stop if string]
        self.held: list[ScoredToken] = []
        self.stopped = False

    def add(self, token: ScoredToken) -> list[ScoredToken]:
        """Add a token, and return the tokens whose text is final now."""
        token.text = self.detokenizer.add(token.id)
        self.held.append(token)
        if self.detokenizer.pending:
            return []
        text = "".join(held.text for held in self.held)
        if (end := self._find_stop(text)) is not None:
            return self._cut(end)
        return self._release(len(text) - self._possible_stop(text))

    def finish(self) -> list[ScoredToken]:
        """Return all tokens that are held at the end of the text."""
        if self.stopped:
            return []
        if self.held:
            self.held[-1].text += self.detokenizer.finish()
        if (end := self._find_stop("".join(held.text for held in self.held))) is not None:
            return self._cut(end)
        released, self.held = self.held, []
        return released

    def _find_stop(self, text: str) -> int | None:
        """Return where the first stop string begins, None if there is none."""
        return min((place for place in map(text.find, self.stop) if place >= 0), default=None)

    def _possible_stop(self, text: str) -> int:
        """Return the number of last characters that may be the beginning of a stop string."""
        max_length = max((len(string) - 1 for string in self.stop), default=0)
        for length in range(min(max_length, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self.stop):
                return length
        return 0

    def _release(self, length: int) -> list[ScoredToken]:
        """Return the held tokens that lie within the first `length` characters."""
        place = count = 0
        for token in self.held:
            if place + len(token.text) > length:
                break
            place += len(token.text)
            count += 1
        released, self.held = self.held[:count], self.held[count:]
        return released

    def _cut(self, end: int) -> list[ScoredToken]:
        """Return the held tokens before the stop string at `end`; the last of them is cut there."""
        self.stopped = True
        released, place = [], 0
        for token in self.held:
            if place >= end:
                break
            token.text = token.text[: end - place]
            place += len(token.text)
            released.append(token)
        self.held = []
        return released
