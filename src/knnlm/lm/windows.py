"""Cut documents into windows that a model can read, and batch the windows.

A document is its start token and then its tokens; its targets are all its tokens. The first window of a document
scores every target in it. Each later window scores the next `stride` targets and reads at least `context - stride`
earlier tokens, which it does not score again.

The document of an encoder-decoder model is the target of a pair; each of its windows is read with the whole source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass

from knnlm.errors import ParameterError


class PairTokens(list[int]):
    """The tokens of a target, and the `source` that an encoder reads: tokens, or a file with a sound."""

    def __init__(self, target: Iterable[int], source: Sized) -> None:
        super().__init__(target)
        self.source = source


def source_of(document: Sequence[int]) -> Sized | None:
    """Return the source of a tokenised document; None where it is no pair."""
    return document.source if isinstance(document, PairTokens) else None


def first_tokens(document: Sequence[int], count: int) -> Sequence[int]:
    """Return the first tokens of a document; those of a pair with its source."""
    source = source_of(document)
    return document[:count] if source is None else PairTokens(document[:count], source)


@dataclass(frozen=True)
class WindowShape:
    """How many tokens a window contains, and by how many the next one is shifted."""

    context: int = 1024
    stride: int = 512

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ParameterError(f"context must be at least 1, not {self.context}.")
        if not 1 <= self.stride <= self.context:
            raise ParameterError(f"stride must be from 1 to the context ({self.context}), not {self.stride}.")


@dataclass(frozen=True)
class Window:
    """Positions begin … end - 1 of a document; those from `scored` on are scored and numbered from `row` on.

    Tokens are sliced from the document when needed: with a short stride there are as many windows as tokens.
    """

    document: Sequence[int]
    start_token: int
    begin: int
    scored: int
    end: int
    row: int
    source: Sized | None = None  # of a pair

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def tokens(self) -> list[int]:
        """The model's input: the token before each position, the start token before the first."""
        if self.begin:
            return list(self.document[self.begin - 1 : self.end - 1])
        return [self.start_token, *self.document[: self.end - 1]]

    @property
    def targets(self) -> Sequence[int]:
        """The tokens that the scored positions predict."""
        return self.document[self.scored : self.end]

    @property
    def source_length(self) -> int:
        """The length of the source; 0 without one."""
        return 0 if self.source is None else len(self.source)


def windows(
    document: Sequence[int],
    shape: WindowShape,
    *,
    start_token: int,
    row: int = 0,
    source: Sized | None = None,
) -> Iterator[Window]:
    """Cut one document into windows; `row` is the number of its first target, `source` by default that of a pair."""
    source = source_of(document) if source is None else source
    scored = 0
    begin = 0
    while scored < len(document):
        end = min(begin + shape.context, len(document))
        yield Window(document, start_token, begin, scored, end, row + scored, source)
        scored = end
        begin += shape.stride


def batches(ready: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Group windows of similar length, longest first, so that batches have little padding; deterministic.

    Sources count as well, each as long as the longest of its batch.
    """
    batch: list[Window] = []
    longest = 0  # source of the batch
    for window in sorted(ready, key=lambda each: (len(each), each.source_length), reverse=True):
        wider = max(longest, window.source_length)
        if batch and (len(batch) + 1) * (len(batch[0]) + wider) > batch_tokens:
            yield batch
            batch, wider = [], window.source_length
        batch.append(window)
        longest = wider
    if batch:
        yield batch
