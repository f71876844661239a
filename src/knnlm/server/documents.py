"""The documents of the memory: list them, read them, add and remove some. Knows nothing about HTTP or generation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from knnlm.corpus import Document
from knnlm.datastore.remove import remove
from knnlm.datastore.schema import StoredDocument
from knnlm.datastore.store import Datastore
from knnlm.errors import KnnlmError
from knnlm.ingest.add import add
from knnlm.lm.causal import CausalLM

PAGE = 400  # tokens of a passage

_WAIT = 20.0  # seconds for another writer


class UnknownDocument(KnnlmError):
    """There is no such document."""


class DocumentService:
    """The store of a memory, as those see it who read and change its documents; it may be used from any thread."""

    def __init__(self, path: Path, lm: CausalLM) -> None:
        self.path = path
        # A tokenizer must not be used by two threads at once, so those who read and who add have their own.
        self.lm, self._adding = lm.with_own_tokenizer(), lm.with_own_tokenizer()
        self._store = Datastore.open(path)
        self._lock = threading.Lock()
        self._changing = threading.Lock()

    def close(self) -> None:
        """Let go of the files."""
        self._store.close()

    def list(self, *, query: str = "", offset: int = 0, limit: int = 50) -> dict[str, Any]:
        """Give some of the documents whose id or source has the query in it, and how many there are."""
        with self._lock:
            store = self._current()
            if not query:
                shown = list(islice(store.documents(), offset, offset + limit))
                total = store.catalog.document_count()
            else:
                shown, total = [], 0
                for document in store.documents():
                    if _has(document, query.casefold()):
                        total += 1
                        if offset < total <= offset + limit:
                            shown.append(document)
            return {"total": total, "offset": offset, "documents": [_facts(document) for document in shown]}

    def read(self, number: int, *, row: int | None = None, offset: int = 0, limit: int = PAGE) -> dict[str, Any]:
        """Give a piece of a document: around a row of the memory, or from a token of the document on."""
        with self._lock:
            store = self._current()
            document = _document(store, number)
            end = document.first_row + document.rows
            if row is not None:
                if not document.first_row <= row < end:
                    raise UnknownDocument(f"Row {row} is not in document {number}.")
                begin = max(document.first_row, row - limit // 2)
            else:
                begin = min(document.first_row + offset, end)
            stop = min(begin + limit, end)
            tokens = store.values(torch.arange(begin, stop)).tolist()
            place = len(tokens) if row is None else row - begin
            return {
                **_facts(document),
                "offset": begin - document.first_row,
                "before": self.lm.decode(tokens[:place]),
                "token": self.lm.decode(tokens[place : place + 1]),
                "after": self.lm.decode(tokens[place + 1 :]),
                "more": stop < end,
            }

    def add(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Remember documents; those whose text is there already are skipped."""
        with self._changing:
            made = add(documents, self.path, lm=self._adding, wait=_WAIT)
        return {"added": made.documents, "skipped": made.skipped, "tokens": made.tokens}

    def remove(self, number: int) -> dict[str, Any]:
        """Forget a document."""
        with self._lock:
            _document(self._current(), number)
        with self._changing:
            gone = remove(self.path, where=f"number={number}", wait=_WAIT)
        return {"removed": len(gone.documents)}

    def _current(self) -> Datastore:
        """Give the store as it is now; the caller holds the lock."""
        if self._store.stale:
            before, self._store = self._store, self._store.reopen()
            before.close()
        return self._store


def _has(document: StoredDocument, wanted: str) -> bool:
    return wanted in document.id.casefold() or wanted in document.source.casefold()


def _document(store: Datastore, number: int) -> StoredDocument:
    """Find a document by its number; numbers go up with rows, so a few looks are enough."""
    low, high = 0, store.rows - 1
    while low <= high:
        found = store.document_at((low + high) // 2)
        if found.number == number:
            return found
        if found.number < number:
            low = found.first_row + found.rows
        else:
            high = found.first_row - 1
    raise UnknownDocument(f"There is no document {number} in the memory.")


def _facts(document: StoredDocument) -> dict[str, Any]:
    return {
        "number": document.number,
        "id": document.id,
        "source": document.source,
        "tokens": document.rows,
        "first_row": document.first_row,
        "fields": dict(document.fields),
    }
