"""Batches of documents, each of which becomes one segment."""

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
class DocumentBatch:
    """Tokenised documents that will become one segment."""

    documents: list[Document] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    rows: int = 0
    size: int = 0  # bytes of the input

    def add(self, document: Document, tokens: list[int]) -> None:
        """Append a document."""
        self.documents.append(document)
        self.tokens.append(tokens)
        self.rows += len(tokens)

    def sample(self, count: int) -> list[list[int]]:
        """Return the tokens of the first documents, at most `count` in all."""
        sample: list[list[int]] = []
        for tokens in self.tokens:
            sample.append(tokens[:count])
            count -= len(sample[-1])
            if count <= 0:
                break
        return sample

    def full_windows(self, shape: WindowShape) -> int:
        """Return the number of windows of the full context length."""
        lengths = (len(tokens) for tokens in self.tokens if len(tokens) >= shape.context)
        return sum((length - shape.context) // shape.stride + 1 for length in lengths)

    def advance_bytes(self, advance: Advance) -> Advance:
        """Return a callback that takes rows and advances by the bytes they came from."""
        done, size = 0, self.size

        def advance_rows(rows: int) -> None:
            nonlocal done
            before, done = done, done + rows
            advance(size * done // self.rows - size * before // self.rows)

        return advance_rows

    def stored(self, segment: int, *, first_entry: int, number: int) -> Iterator[StoredDocument]:
        """Yield the catalog entries of the documents."""
        for document, tokens in zip(self.documents, self.tokens, strict=True):
            sha256, fields = text_hash(document.text), document.fields
            yield StoredDocument(
                number, document.id, document.source, segment, first_entry, len(tokens), sha256, fields
            )
            number += 1
            first_entry += len(tokens)


def batch_documents(tokenised: Iterable[Tokenised], rows: int) -> Iterator[DocumentBatch]:
    """Group whole documents into batches of at least `rows` tokens, except the last."""
    batch = DocumentBatch()
    for document, tokens in tokenised:
        batch.add(document, tokens)
        if batch.rows >= rows:
            yield batch
            batch = DocumentBatch()
    if batch.rows:
        yield batch
