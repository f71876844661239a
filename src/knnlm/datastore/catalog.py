"""The catalog of a store: one SQLite file that lists its segments, documents, indexes and metadata.

A segment exists once its row is committed. Anything else on disk is garbage that the next writer removes. Every row is
part of a checksum in the table `digests`, which is compared before the row is used: metadata when the catalog is
opened, each other table when it is first read. A reader that holds its snapshot sees one state for as long as it is
open, whatever is written meanwhile.

A build writes its segments here; an addition writes them to `StagedAddition` until all of them are on disk. Both are a
`SegmentSink`.
"""

from __future__ import annotations

import json
import sqlite3
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from knnlm.corpus import Scalar, canonical_json, invalid_fields, json_candidates
from knnlm.datastore.digests import DigestUpdates, VerifiedTables, mismatched_parts, table_names
from knnlm.datastore.schema import (
    PARTIAL_CATALOG_FILES,
    RECORD_FILE,
    SCHEMA,
    SHARDED,
    SHARDS_FOLDER,
    SOURCES_SCHEMA,
    SOURCES_TABLE,
    VERSION,
    IndexRow,
    RemovedRow,
    SegmentRow,
    StoredDocument,
    check_format,
    checkpoint,
    connect,
    prepare_to_write,
    translate_sqlite_errors,
)
from knnlm.datastore.validation import check_database, check_schema, parse_row
from knnlm.errors import DatastoreCorrupt, DatastoreError

GENERATION, LAYOUT = "generation", "layout"  # metadata: counters of changes, and of changes of entry numbers
LANGUAGE_MODEL = "language_model"  # metadata: the model that a store is for, if it is not the reader
INDEX_SKIPPED = "index_skipped"  # metadata: ranges of keys that the index omits, as [first, count]
REQUESTED_INDEX = "requested_index"  # metadata: the index that an interrupted command was to build

# The members of the JSON object with a comma on either side, so that a member is found as a substring. No string value
# can contain one, since its quotation marks are escaped.
_MEMBERS = "', ' || substr(record, 2, length(record) - 2) || ', '"
_MAX_LISTED_FIELDS = 20
_MAX_VALUES = 500  # of one SQL query

_Row = TypeVar("_Row")


def fields_by_number(connection: sqlite3.Connection) -> Callable[[Any], dict[str, Scalar]]:
    """Return a function from the number of a document to its fields; it raises ValueError on invalid fields."""

    def find(number: Any) -> dict[str, Scalar]:
        row = connection.execute("SELECT record FROM fields WHERE number = ?", (number,)).fetchone()
        return {} if row is None else check_fields(json.loads(row[0]))

    return find


def check_fields(fields: Any) -> dict[str, Scalar]:
    """Return fields read from a file, or raise ValueError."""
    if (wrong := invalid_fields(fields)) is not None:
        raise ValueError(wrong)
    return dict(fields)


def sources_by_number(connection: sqlite3.Connection) -> Callable[[Any], str | None]:
    """Return a function from the number of a document to its source text, None where it has none."""

    def find(number: Any) -> str | None:
        row = connection.execute(f"SELECT text FROM {SOURCES_TABLE} WHERE number = ?", (number,)).fetchone()  # noqa: S608
        return None if row is None else row[0]

    return find


def put_sources(connection: sqlite3.Connection, documents: Iterable[StoredDocument]) -> None:
    """Write the source texts of pairs."""
    rows = [(document.number, document.source_text) for document in documents if document.source_text is not None]
    if rows:
        connection.executemany(f"INSERT INTO {SOURCES_TABLE} VALUES (?, ?)", rows)  # noqa: S608


def put_fields(connection: sqlite3.Connection, documents: Iterable[StoredDocument]) -> None:
    """Write the fields of documents."""
    rows = [(document.number, canonical_json(dict(document.fields))) for document in documents if document.fields]
    connection.executemany("INSERT INTO fields VALUES (?, ?)", rows)


def drop_fields(connection: sqlite3.Connection, numbers: Iterable[int] | None = None) -> None:
    """Delete the fields and source texts of these documents, or of all."""
    numbers = None if numbers is None else list(numbers)
    for table in ("fields", *({SOURCES_TABLE} & set(table_names(connection)))):
        if numbers is None:
            connection.execute(f"DELETE FROM {table}")  # noqa: S608  (ours)
        else:
            connection.executemany(f"DELETE FROM {table} WHERE number = ?", ((number,) for number in numbers))  # noqa: S608


def other_fields(connection: sqlite3.Connection, name: str) -> list[str] | None:
    """Return None if a document has this field, otherwise the first names of the fields that documents have."""
    query = f"SELECT 1 FROM fields WHERE instr({_MEMBERS}, ?) > 0 LIMIT 1"  # noqa: S608  (constant)
    if connection.execute(query, (f", {canonical_json(name)}: ",)).fetchone() is not None:
        return None
    records = connection.execute("SELECT record FROM fields")
    return sorted({each for (record,) in records for each in check_fields(json.loads(record))})[:_MAX_LISTED_FIELDS]


def field_condition(name: str, value: str) -> tuple[str, list[str]]:
    """Return the SQL condition that a field has a value, as text or as a number, and its parameters."""
    members = [f", {canonical_json(name)}: {json_value}, " for json_value in json_candidates(value)]
    either = " OR ".join([f"instr({_MEMBERS}, ?) > 0"] * len(members))
    return f"number IN (SELECT number FROM fields WHERE {either})", members  # noqa: S608


@dataclass(frozen=True)
class _SourceHashes:
    """The hashes of all sources, 16 bytes for each; valid in one process, as Python's hashes of texts are."""

    numbers: NDArray[np.int64]  # (N,) of the documents, ascending
    hashes: NDArray[np.int64]  # (N,)
    known: NDArray[np.int64]  # (N,) the hashes, ascending

    @classmethod
    def of(
        cls, numbers: Sequence[int] | NDArray[np.int64], texts: Sequence[str], before: _SourceHashes | None = None
    ) -> _SourceHashes:
        """Return the hashes of the texts of documents, beside those of `before`, whose documents have lower numbers."""
        own = np.array([hash(_normalised(text)) for text in texts], np.int64)
        first, hashes = (np.empty(0, np.int64),) * 2 if before is None else (before.numbers, before.hashes)
        hashes = np.concatenate([hashes, own])
        return cls(np.concatenate([first, np.array(numbers, np.int64)]), hashes, np.sort(hashes))

    def only(self, numbers: NDArray[np.int64]) -> _SourceHashes:
        """Return the hashes of those documents that are among these numbers."""
        kept = np.isin(self.numbers, numbers)
        return self if kept.all() else _SourceHashes(self.numbers[kept], self.hashes[kept], np.sort(self.hashes[kept]))

    def contain(self, texts: Sequence[str]) -> list[bool]:
        """Return whether each text is one of the sources; kinds of spaces and of equal characters do not count."""
        if not len(self.known):
            return [False] * len(texts)
        wanted = np.array([hash(_normalised(text)) for text in texts], np.int64)
        places = np.searchsorted(self.known, wanted).clip(max=len(self.known) - 1)
        return [bool(found) for found in self.known[places] == wanted]


def _normalised(text: str) -> str:
    """Return a text as tokenizers may return it: in the form NFKC, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


class Catalog:
    """Typed access to the catalog file."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        # A connection is part of a reference cycle: without this, it would hold its snapshot until the next collection.
        weakref.finalize(self, connection.close).atexit = False
        self.path = path
        self._writes = False
        self._digests: DigestUpdates | None = None
        self._verified: VerifiedTables | None = None  # None: digests are not compared
        self._sources_before: _SourceHashes | None = None  # of an earlier state

    @classmethod
    def create(cls, path: Path, meta: dict[str, Any]) -> Catalog:
        """Create a catalog with the metadata `meta`, atomically."""
        partial = path.with_suffix(".partial")
        # SQLite would apply the journal of a deleted catalog to the new one.
        for leftover in PARTIAL_CATALOG_FILES:
            path.with_name(leftover).unlink(missing_ok=True)
        with translate_sqlite_errors(path):
            catalog = cls(sqlite3.connect(partial, isolation_level=None), partial)
            catalog._connection.execute("PRAGMA journal_mode=WAL")
            paired = isinstance(model := meta.get("model"), dict) and model.get("encoder_decoder")
            catalog._connection.executescript(SCHEMA + (SOURCES_SCHEMA if paired else ""))
            catalog.put(format=VERSION, **meta)
            catalog.close()
        partial.rename(path)
        return cls.open(path, write=True, copying=True)

    @classmethod
    def open(
        cls, path: Path, *, write: bool = False, copying: bool = False, hold: bool = False, compare: bool = True
    ) -> Catalog:
        """Open an existing catalog.

        `copying` allows to write to an unfinished copy of another store. With `hold`, a reader sees one snapshot until
        it is closed. Without `compare`, digests are not checked.
        """
        if not path.parent.exists():
            raise DatastoreError(f"There is no folder {path.parent}. Make a store with: knnlm build")
        if not path.is_file() and (path.parent / SHARDS_FOLDER / RECORD_FILE).is_file():
            raise DatastoreError(
                f"{path.parent} is an unfinished build with workers. Run the same command again to finish it."
            )
        if not path.is_file():
            raise DatastoreError(f"{path.parent} is not a store: it has no {path.name}. Make one with: knnlm build")
        check_database(path)
        with translate_sqlite_errors(path):
            connection = connect(path, write=write)
            catalog = cls(connection, path)
            try:
                check_schema(connection, path)
                catalog._writes = write
                catalog._verified = VerifiedTables(path) if compare else None
                if write:
                    prepare_to_write(connection)
                else:
                    connection.execute("PRAGMA query_only=ON")
                if hold:
                    connection.execute("BEGIN")
                check_format(path, catalog.get, table_names(connection), copying=copying or not write)
                catalog._verify("meta")
            except BaseException:
                catalog.close()
                raise
        return catalog

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def get(self, key: str) -> Any:
        """Return one value of the store's metadata, or None."""
        with translate_sqlite_errors(self.path):
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return None if row is None else json.loads(row[0])

    def metadata(self) -> dict[str, Any]:
        """Return all metadata of the store."""
        with translate_sqlite_errors(self.path):
            return {str(key): json.loads(value) for key, value in self._all("SELECT key, value FROM meta")}

    def integrity(self) -> list[str]:
        """Return the errors that SQLite's integrity check finds."""
        return [str(row[0]) for row in self._all("PRAGMA integrity_check(100)") if row[0] != "ok"]

    def mismatched_parts(self) -> list[str]:
        """Return the parts that do not match their digests."""
        with translate_sqlite_errors(self.path), self._in_snapshot():
            return mismatched_parts(self._connection)

    def _verify(self, table: str, number: int | None = None) -> None:
        """Compare a table, or its part with a document, with its digests, once."""
        # In a writer's transaction, the stored digests are stale.
        stale = self._digests is not None and self._digests.running
        if self._verified is not None and not stale and self._verified.needs_check(table, number):
            with translate_sqlite_errors(self.path), self._in_snapshot():
                self._verified.check(self._connection, table, number)

    def _verify_all_documents(self) -> None:
        """Check all documents and fields; not for a writer, since its changes keep a wrong digest wrong."""
        if not self._writes:
            self._verify_documents()

    def _verify_documents(self, number: int | None = None) -> None:
        """Check documents and fields, or the part with one document."""
        self._verify("documents", number)
        self._verify("fields", number)
        if self.has_sources:
            self._verify(SOURCES_TABLE, number)

    @cached_property
    def has_sources(self) -> bool:
        """Whether documents may have source texts: the store is one of an encoder-decoder model."""
        with translate_sqlite_errors(self.path):
            return SOURCES_TABLE in table_names(self._connection)

    def put(self, **metadata: Any) -> None:
        """Write metadata in one transaction."""
        with self._transaction():
            self.write_metadata(**metadata)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read one state of the catalog in several queries."""
        with translate_sqlite_errors(self.path):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("COMMIT")

    def _in_snapshot(self) -> AbstractContextManager[None]:
        """Begin a snapshot unless a transaction is open."""
        return nullcontext() if self._connection.in_transaction else self.snapshot()

    def reopen(self) -> Catalog:
        """Open the catalog again, to read its present state; the caller closes it."""
        return Catalog.open(self.path)

    def file_state(self) -> object | None:
        """Return a value that changes with the files, where that is faster than to open them; None: it is not known."""
        return None

    @property
    def generation(self) -> int:
        """Number of changes of the content since the store was built."""
        return self._count(GENERATION)

    @property
    def layout(self) -> int:
        """Number of times that entries were renumbered."""
        return self._count(LAYOUT)

    def _count(self, name: str) -> int:
        found = self.get(name)
        if found is not None and (type(found) is not int or found < 0):
            raise DatastoreCorrupt(f"{self.path} has the {name} {found!r}. Build the store again.")
        return found or 0

    def segments(self) -> list[SegmentRow]:
        """Return the segments in the order of their entries."""
        return self._rows(SegmentRow, "segments", "first_entry, id")

    def removed(self) -> list[RemovedRow]:
        """Return the entries of removed documents, in order."""
        return self._rows(RemovedRow, "removed", "first_entry, number")

    def indexes(self) -> list[IndexRow]:
        """Return the indexes, oldest first."""
        return self._rows(IndexRow, "indexes", "id")

    def _rows(self, kind: type[_Row], table: str, order: str) -> list[_Row]:
        self._verify(table)
        found = self._all(f"SELECT * FROM {table} ORDER BY {order}")  # noqa: S608  (constant)
        return [parse_row(kind, row, self.path) for row in found]

    def documents(self) -> Iterator[StoredDocument]:
        """Iterate over the documents in the order of their entries, without loading all."""
        self._verify_documents()
        with translate_sqlite_errors(self.path):
            yield from self._parse_documents(self._connection.execute("SELECT * FROM documents ORDER BY number"))

    def source_texts(self) -> list[tuple[int, int, int, str]]:
        """Return (number, first entry, entries, source text) of every document, in the order of their entries."""
        self._verify_documents()
        if not self.has_sources:
            return []
        return self._all(
            "SELECT number, first_entry, entries, COALESCE(text, '') FROM documents NOT INDEXED "  # noqa: S608  (constant)
            f"LEFT JOIN {SOURCES_TABLE} USING (number) ORDER BY number"
        )

    def sample_sources(self, count: int) -> list[str]:
        """Return at most so many sources, evenly distributed over the documents."""
        if not self.has_sources:
            return []
        self._verify(SOURCES_TABLE)
        numbers = self._numbers_in(SOURCES_TABLE)
        if len(numbers) > count:
            numbers = numbers[np.arange(count) * len(numbers) // max(1, count)]
        return self._sources_of(numbers.tolist())

    def contains_sources(self, texts: Sequence[str]) -> list[bool]:
        """Return whether each text is the source of a stored pair, whatever its spaces."""
        return self._source_hashes.contain(texts)

    def reuse_sources(self, before: Catalog) -> None:
        """Take the sources that an earlier state of this catalog has read, so that only later ones are read."""
        self._sources_before = vars(before).get("_source_hashes", before._sources_before)

    @cached_property
    def _source_hashes(self) -> _SourceHashes:
        before = self._sources_before
        if before is None:
            pairs = self.source_texts()
            return _SourceHashes.of([number for number, *_ in pairs], [text for *_, text in pairs])
        numbers = self._numbers_in("documents")
        new = numbers[np.searchsorted(numbers, before.numbers.max(initial=-1), side="right") :].tolist()
        for number in new:
            self._verify(SOURCES_TABLE, number)
        return _SourceHashes.of(new, self._sources_of(new), before.only(numbers))

    def _numbers_in(self, table: str) -> NDArray[np.int64]:
        return np.array([number for (number,) in self._all(f"SELECT number FROM {table} ORDER BY number")], np.int64)  # noqa: S608

    def _sources_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the sources of documents, without checking them."""
        found: dict[int, str] = {}
        for begin in range(0, len(numbers), _MAX_VALUES):
            some = numbers[begin : begin + _MAX_VALUES]
            marks = ", ".join("?" * len(some))
            query = f"SELECT number, text FROM {SOURCES_TABLE} WHERE number IN ({marks})"  # noqa: S608  (constant)
            found.update(self._all(query, *some))
        return [found.get(number, "") for number in numbers]

    def _parse_documents(self, rows: Iterable[Any]) -> Iterator[StoredDocument]:
        """Yield documents with their fields from rows of the table."""
        with translate_sqlite_errors(self.path):
            fields_of, source_of = fields_by_number(self._connection), sources_by_number(self._connection)
            for row in rows:
                source = source_of(row[0]) if self.has_sources else None
                yield parse_row(StoredDocument, (*row, fields_of(row[0]), source), self.path)

    def documents_of(self, segment: int) -> list[StoredDocument]:
        """Return the documents of one segment."""
        return self.select("segment = ?", [segment])

    def select(
        self, condition: str, values: Sequence[Any], *, first: int = 0, limit: int | None = None
    ) -> list[StoredDocument]:
        """Return the documents that match an SQL condition, after skipping `first` of them."""
        self._verify_documents()
        found = self._all(
            # NOT INDEXED: the digests do not cover SQLite's indexes.
            f"SELECT * FROM documents NOT INDEXED WHERE {condition} ORDER BY number LIMIT ? OFFSET ?",  # noqa: S608
            *values,
            -1 if limit is None else limit,
            first,
        )
        return list(self._parse_documents(found))

    def document_count(self, condition: str = "1", values: Sequence[Any] = ()) -> int:
        """Return the number of documents, or of those that match an SQL condition."""
        self._verify_all_documents()
        query = f"SELECT COUNT(*) FROM documents NOT INDEXED WHERE {condition}"  # noqa: S608  (constant)
        return int(self._all(query, *values)[0][0])

    def has_text(self, sha256: str) -> bool:
        """Whether a document whose text has this SHA-256 is stored."""
        self._verify_all_documents()
        with translate_sqlite_errors(self.path):
            if self._verified is not None:
                self._verified.check_hashes(self._connection)
        return bool(self._all("SELECT 1 FROM documents WHERE sha256 = ? LIMIT 1", sha256))

    def document_at(self, entry: int) -> StoredDocument:
        """Return the document of an entry."""
        found = self._all(
            "SELECT number FROM documents WHERE first_entry <= ? AND entries > 0 ORDER BY first_entry DESC LIMIT 1",
            entry,
        )
        for (number,) in found:
            self._verify_documents(number)
            # Again from the table: the digests do not cover SQLite's index.
            for document in self._parse_documents(
                self._all("SELECT * FROM documents NOT INDEXED WHERE number = ?", number)
            ):
                if document.first_entry <= entry < document.first_entry + document.entries:
                    return document
        raise DatastoreCorrupt(f"{self.path} has no document for entry {entry}. Run: knnlm repair {self.path.parent}")

    def next_document(self) -> int:
        """Return the number of the next document; numbers are never reused."""
        last: int = self._all("SELECT COALESCE(MAX(number), -1) FROM documents")[0][0]
        return max(self._count("next_document"), last + 1)

    def next_segment(self) -> int:
        """Return the number of the next segment; numbers are never reused."""
        last: int = self._all("SELECT COALESCE(MAX(id), -1) FROM segments")[0][0]
        return max(self._count("next_segment"), last + 1)

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **metadata: Any) -> None:
        """Commit a segment, its documents and new metadata in one transaction."""
        # Adding to a complete store starts a new generation.
        with self.change() if self.get("state") == "complete" else self._transaction():
            self.put_segments([segment])
            self.put_documents(documents)
            self.write_metadata(**metadata)

    def put_documents(self, documents: Iterable[StoredDocument]) -> None:
        """Write documents, their fields and source texts, within the caller's transaction if there is one."""
        documents = list(documents)
        rows = (_values(document)[:-2] for document in documents)
        with nullcontext() if self._connection.in_transaction else self._transaction():
            self._connection.executemany("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            put_fields(self._connection, documents)
            put_sources(self._connection, documents)

    def put_removed(self, removed: Iterable[RemovedRow]) -> None:
        """Record the entries of removed documents, within the caller's transaction."""
        self._connection.executemany("INSERT INTO removed VALUES (?, ?, ?, ?)", map(_values, removed))

    def other_fields(self, name: str = "") -> list[str] | None:
        """Return None if a document has this field, otherwise the first names of the fields that documents have."""
        self._verify_documents()
        with translate_sqlite_errors(self.path):
            return other_fields(self._connection, name)

    def replace_keys(self, segments: Iterable[SegmentRow], **metadata: Any) -> None:
        """Commit new key files of segments and new metadata in one transaction."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE segments SET scale = ?, keys_sha256 = ? WHERE id = ?",
                ((segment.scale, segment.keys_sha256, segment.id) for segment in segments),
            )
            self.write_metadata(**metadata)

    def put_segments(self, segments: Iterable[SegmentRow]) -> None:
        """Write segments within the caller's transaction."""
        rows = map(_values, segments)
        self._connection.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def replace_indexes(self, index: IndexRow | None, *, skipped: list[tuple[int, int]] | None = None) -> None:
        """Make this the only index, or none; `skipped` are the ranges of keys that it omits."""
        with self._transaction():
            self.put_index(index, skipped or [])
            if self.get(REQUESTED_INDEX) is not None:
                self._put(REQUESTED_INDEX, None)

    def put_index(self, index: IndexRow | None, skipped: list[tuple[int, int]]) -> None:
        """Replace the index within the caller's transaction."""
        self._connection.execute("DELETE FROM indexes")
        if index is not None:
            self._connection.execute("INSERT INTO indexes VALUES (?, ?, ?, ?, ?)", _values(index))
        if skipped or self.get(INDEX_SKIPPED) is not None:
            self._put(INDEX_SKIPPED, skipped)

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction that changes the content and increments the generation."""
        with self._transaction():
            yield self._connection
            self._put(GENERATION, self.generation + 1)

    def vacuum(self) -> None:
        """Rewrite the database without deleted rows."""
        with translate_sqlite_errors(self.path):
            self._connection.execute("VACUUM")

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database; return False while a reader needs the log."""
        with translate_sqlite_errors(self.path):
            return checkpoint(self._connection)

    def write_metadata(self, **metadata: Any) -> None:
        """Write metadata within the caller's transaction."""
        for key, value in metadata.items():
            self._put(key, value)

    def _put(self, key: str, value: Any) -> None:
        self._connection.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, json.dumps(value, sort_keys=True)),
        )

    def _all(self, query: str, *values: Any) -> list[Any]:
        with translate_sqlite_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with translate_sqlite_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            self._digests = self._digests or DigestUpdates(self._connection)
            try:
                self._digests.begin(self._connection)
                yield
                self._digests.write(self._connection)
            except BaseException:
                self._digests.discard()
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _values(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in row.__dataclass_fields__)


class SegmentSink(Protocol):
    """Where a writer records segments: the catalog, or the staging log of an addition."""

    path: Path  # of the catalog

    def get(self, key: str) -> Any:
        """Return one value of the store's metadata, or None."""

    def segments(self) -> list[SegmentRow]:
        """Return the segments in the order of their entries."""

    def next_segment(self) -> int:
        """Return the number of the next segment."""

    def next_document(self) -> int:
        """Return the number of the next document."""

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **metadata: Any) -> None:
        """Record a segment that is on disk, its documents and new metadata."""

    def replace_keys(self, segments: Iterable[SegmentRow], **metadata: Any) -> None:
        """Record new key files of segments and new metadata."""


def check_complete(catalog: Catalog) -> None:
    """Raise if the build of a store is not complete."""
    if catalog.get("state") == SHARDED:
        raise DatastoreError(
            f"{catalog.path.parent} is a sharded store, for which this operation does not exist. Use its shards, which "
            "are ordinary stores."
        )
    if catalog.get("state") != "complete":
        raise DatastoreError(
            f"{catalog.path.parent} is an unfinished build. Resume it first, with the command that started it."
        )
