"""The documents of the served store: list, read, add, remove."""

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
from knnlm.ingest.build import add
from knnlm.lm.causal import CausalLM
from knnlm.memories.knn import passage_texts

_PASSAGE_TOKENS = 400
_LOCK_SECONDS = 20.0  # to wait for another writer


class UnknownDocument(KnnlmError):
    """The store has no document with this number."""


class DocumentService:
    """Reads and changes the documents of a store; thread-safe."""

    def __init__(self, path: Path, lm: CausalLM) -> None:
        self.path = path
        # Tokenizers are not thread-safe: one for readers, one for writers.
        self.lm, self._write_lm = lm.with_own_tokenizer(), lm.with_own_tokenizer()
        self._store = Datastore.open(path)
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    @property
    def generation(self) -> int:
        """The number of changes of the store, as this process sees it now."""
        with self._lock:
            return self._current().generation

    def list(self, *, query: str = "", offset: int = 0, limit: int = 50) -> dict[str, Any]:
        """Return a page of the documents whose id, source or source text contains the query, and their total number."""
        with self._lock:
            store = self._current()
            if not query:
                shown = list(islice(store.documents(), offset, offset + limit))
                total = store.catalog.document_count()
            else:
                shown, total = [], 0
                for document in store.documents():
                    if _matches(document, query.casefold()):
                        total += 1
                        if offset < total <= offset + limit:
                            shown.append(document)
            return {"total": total, "offset": offset, "documents": [_metadata(document) for document in shown]}

    def read(
        self, number: int, *, entry: int | None = None, offset: int = 0, limit: int = _PASSAGE_TOKENS
    ) -> dict[str, Any]:
        """Return a passage of a document: around an entry of the store, or from a token of the document on."""
        with self._lock:
            store = self._current()
            document = _document(store, number)
            end = document.first_entry + document.entries
            if entry is not None:
                if not document.first_entry <= entry < end:
                    raise UnknownDocument(f"Entry {entry} is not in document {number}.")
                begin = max(document.first_entry, entry - limit // 2)
            else:
                begin = min(document.first_entry + offset, end)
            stop = min(begin + limit, end)
            tokens = store.values(torch.arange(begin, stop)).tolist()
            place = len(tokens) if entry is None else entry - begin
            before, token, after = passage_texts(tokens[:place], tokens[place:], self.lm.decode)
            return {
                **_metadata(document),
                "offset": begin - document.first_entry,
                "before": before,
                "token": token,
                "after": after,
                "more": stop < end,
            }

    def add(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Add documents; those whose text is in the store are skipped."""
        with self._write_lock:
            added = add(documents, self.path, lm=self._write_lm, wait=_LOCK_SECONDS)
        return {"added": added.documents, "skipped": added.skipped, "tokens": added.tokens}

    def remove(self, number: int) -> dict[str, Any]:
        """Remove a document."""
        with self._lock:
            _document(self._current(), number)
        with self._write_lock:
            removed = remove(self.path, where=f"number={number}", wait=_LOCK_SECONDS)
        return {"removed": len(removed.documents)}

    def _current(self) -> Datastore:
        """Return the store, reopened if it has changed; the caller holds the lock."""
        if self._store.stale:
            before, self._store = self._store, self._store.reopen()
            before.close()
        return self._store


def _matches(document: StoredDocument, query: str) -> bool:
    texts = (document.id, document.source, document.source_text or "")
    return any(query in text.casefold() for text in texts)


def _document(store: Datastore, number: int) -> StoredDocument:
    if (document := store.document_numbered(number)) is None:
        raise UnknownDocument(f"The store has no document {number}.")
    return document


def _metadata(document: StoredDocument) -> dict[str, Any]:
    return {
        "number": document.number,
        "id": document.id,
        "source": document.source,
        "tokens": document.entries,
        "first_entry": document.first_entry,
        "fields": dict(document.fields),
        "source_text": document.source_text,
    }
