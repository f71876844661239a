"""Gather documents until they make a segment. Knows nothing about how keys are read or where they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from knnlm.corpus import Document
from knnlm.datastore.schema import StoredDocument
from knnlm.datastore.store import text_hash
from knnlm.lm.windows import WindowShape
from knnlm.progress import Advance

Tokenised = tuple[Document, list[int]]


@dataclass
class Group:
    """Documents that will make one segment."""

    documents: list[Document] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    rows: int = 0
    size: int = 0  # bytes of the input

    def add(self, document: Document, tokens: list[int]) -> None:
        """Take one more document."""
        self.documents.append(document)
        self.tokens.append(tokens)
        self.rows += len(tokens)

    def beginning(self, count: int) -> list[list[int]]:
        """Give the first documents, cut where they have so many tokens."""
        sample: list[list[int]] = []
        for tokens in self.tokens:
            sample.append(tokens[:count])
            count -= len(sample[-1])
            if count <= 0:
                break
        return sample

    def whole_windows(self, shape: WindowShape) -> int:
        """Count the windows that are as long as windows get."""
        lengths = (len(tokens) for tokens in self.tokens if len(tokens) >= shape.context)
        return sum((length - shape.context) // shape.stride + 1 for length in lengths)

    def by_bytes(self, advance: Advance) -> Advance:
        """Return a callback that takes rows and advances by the bytes they came from."""
        done, size = 0, self.size

        def by_rows(rows: int) -> None:
            nonlocal done
            before, done = done, done + rows
            advance(size * done // self.rows - size * before // self.rows)

        return by_rows

    def stored(self, segment: int, *, first_row: int, number: int) -> Iterator[StoredDocument]:
        """Give the catalog rows of the documents."""
        for document, tokens in zip(self.documents, self.tokens, strict=True):
            known, fields = text_hash(document.text), document.fields
            yield StoredDocument(number, document.id, document.source, segment, first_row, len(tokens), known, fields)
            number += 1
            first_row += len(tokens)


def groups(tokenised: Iterable[Tokenised], rows: int) -> Iterator[Group]:
    """Gather whole documents until they have so many rows."""
    group = Group()
    for document, tokens in tokenised:
        group.add(document, tokens)
        if group.rows >= rows:
            yield group
            group = Group()
    if group.rows:
        yield group
