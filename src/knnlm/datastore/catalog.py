"""The catalog of a store: one SQLite file that lists its segments, documents, indexes and metadata.

A segment exists once its row is committed. Anything else on disk is garbage that the next writer removes. Every row is
part of a checksum in the table `digests`, which is compared before the row is used: metadata when the catalog is
opened, each other table when it is first read. A reader that holds its snapshot sees one state for as long as it is
open, whatever is written meanwhile.

A build records its segments here; an addition records them in `StagedAddition` until all of them are on disk. Both are
a `SegmentSink`. A `Selection` chooses documents by what the catalog has about them: a field is one that every document
has, or else one of the users' records; `fields.source` is always the latter.
"""

from __future__ import annotations

import json
import re
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from knnlm.corpus import Scalar, canonical_json, invalid_fields, json_candidates
from knnlm.datastore.integrity import DigestUpdates, VerifiedTables, differing, table_names
from knnlm.datastore.paths import PARTIAL_CATALOG_FILES
from knnlm.datastore.schema import (
    SCHEMA,
    VERSION,
    IndexRow,
    RemovedRow,
    SegmentRow,
    StoredDocument,
    check_format,
    connect,
    empty_log,
    prepare_to_write,
    reporting,
)
from knnlm.datastore.validation import check_database, check_schema, typed
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError

# The members of the object with a comma on either side, so that one is found as a piece of text: within JSON, no text
# can look like a member, as its quotation marks have backslashes.
_MEMBERS = "', ' || substr(record, 2, length(record) - 2) || ', '"

_SHOWN = 20  # names that are told


def fields_by_number(connection: sqlite3.Connection) -> Callable[[Any], dict[str, Scalar]]:
    """Return what finds the fields of a document by its number; a ValueError where they cannot be."""

    def find(number: Any) -> dict[str, Scalar]:
        row = connection.execute("SELECT record FROM fields WHERE number = ?", (number,)).fetchone()
        return {} if row is None else check_fields(json.loads(row[0]))

    return find


def check_fields(found: Any) -> dict[str, Scalar]:
    """Return fields that came from a file, or a ValueError."""
    if (wrong := invalid_fields(found)) is not None:
        raise ValueError(wrong)
    return dict(found)


def put_fields(connection: sqlite3.Connection, documents: Iterable[StoredDocument]) -> None:
    """Write the fields of documents."""
    rows = [(one.number, canonical_json(dict(one.fields))) for one in documents if one.fields]
    connection.executemany("INSERT INTO fields VALUES (?, ?)", rows)


def drop_fields(connection: sqlite3.Connection, numbers: Iterable[int] | None = None) -> None:
    """Take out the fields of documents that go, or of all."""
    if numbers is None:
        connection.execute("DELETE FROM fields")
    else:
        connection.executemany("DELETE FROM fields WHERE number = ?", ((number,) for number in numbers))


def other_fields(connection: sqlite3.Connection, name: str) -> list[str] | None:
    """Return None where documents have such a field, and otherwise the names of those that they have, not very many."""
    query = f"SELECT 1 FROM fields WHERE instr({_MEMBERS}, ?) > 0 LIMIT 1"  # noqa: S608  (ours)
    if connection.execute(query, (f", {canonical_json(name)}: ",)).fetchone() is not None:
        return None
    records = connection.execute("SELECT record FROM fields")
    return sorted({each for (record,) in records for each in check_fields(json.loads(record))})[:_SHOWN]


def field_condition(name: str, value: str) -> tuple[str, list[str]]:
    """Return the condition for SQL that a field has a value, whether that is a text or a number, and its values."""
    ways = [f", {canonical_json(name)}: {way}, " for way in json_candidates(value)]
    either = " OR ".join([f"instr({_MEMBERS}, ?) > 0"] * len(ways))
    return f"number IN (SELECT number FROM fields WHERE {either})", ways  # noqa: S608


GENERATION, LAYOUT = "generation", "layout"  # metadata: how often the content has changed, and the numbers of its rows

LANGUAGE_MODEL = "language_model"  # the fact that names the model that a store is for, if that is not its reader

SKIPPED = "index_skipped"  # the fact that says which keys the index has left out: [first, count] each

REQUESTED_INDEX = (
    "index_wanted"  # the fact that says which index is still to be made, by a command that may have been killed
)

_Row = TypeVar("_Row")


class Catalog:
    """Typed access to the catalog file."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        # SQLite's own objects are a cycle, and one that is forgotten would hold its snapshot until that is collected.
        weakref.finalize(self, connection.close).atexit = False
        self.path = path
        self._writes = False
        self._digests: DigestUpdates | None = None
        self._compared: VerifiedTables | None = None  # None: nothing is to be

    @classmethod
    def create(cls, path: Path, meta: dict[str, Any]) -> Catalog:
        """Make a new catalog that already holds `meta`; it appears complete or not at all."""
        partial = path.with_suffix(".partial")
        # A journal that outlived its catalog would be played back into the new one.
        for leftover in PARTIAL_CATALOG_FILES:
            path.with_name(leftover).unlink(missing_ok=True)
        with reporting(path):
            catalog = cls(sqlite3.connect(partial, isolation_level=None), partial)
            catalog._connection.execute("PRAGMA journal_mode=WAL")
            catalog._connection.executescript(SCHEMA)
            catalog.put(format=VERSION, **meta)
            catalog.close()
        partial.rename(path)
        return cls.open(path, write=True, copying=True)

    @classmethod
    def open(
        cls, path: Path, *, write: bool = False, copying: bool = False, hold: bool = False, compare: bool = True
    ) -> Catalog:
        """Open an existing catalog, for reading unless told otherwise.

        An unfinished copy of another store is only opened for writing with `copying`. A reader that
        is to `hold` its snapshot goes on to see what it saw first. Unless one is to `compare`, sums are not looked at.
        """
        if not path.parent.exists():
            raise DatastoreError(f"There is no folder {path.parent}. Make a store with: knnlm build")
        if not path.is_file():
            raise DatastoreError(f"{path.parent} is not a store: it has no {path.name}. Make one with: knnlm build")
        check_database(path)
        with reporting(path):
            connection = connect(path, write=write)
            catalog = cls(connection, path)
            try:
                check_schema(connection, path)
                catalog._writes = write
                catalog._compared = VerifiedTables(path) if compare else None
                if write:
                    prepare_to_write(connection)
                else:
                    connection.execute("PRAGMA query_only=ON")
                if hold:
                    connection.execute("BEGIN")
                check_format(path, catalog.get, table_names(connection), copying=copying or not write)
                catalog._compare("meta")
            except BaseException:
                catalog.close()
                raise
        return catalog

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def get(self, key: str) -> Any:
        """Read one fact about the store; None where it is not known."""
        with reporting(self.path):
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return None if row is None else json.loads(row[0])

    def metadata(self) -> dict[str, Any]:
        """Read all metadata about the store."""
        with reporting(self.path):
            return {str(key): json.loads(value) for key, value in self._all("SELECT key, value FROM meta")}

    def integrity(self) -> list[str]:
        """Let SQLite check its own file, and give what it finds wrong."""
        return [str(row[0]) for row in self._all("PRAGMA integrity_check(100)") if row[0] != "ok"]

    def differing(self) -> list[str]:
        """Name the parts that are not as they were written, by their sums."""
        with reporting(self.path), self._still():
            return differing(self._connection)

    def _compare(self, table: str, number: int | None = None) -> None:
        """Check once that a table is as it was written, or the part of it that holds a document."""
        # Within a transaction that writes, sums are behind; and they are the same rows that were compared before.
        ahead = self._digests is not None and self._digests.running
        if self._compared is not None and not ahead and self._compared.lacks(table, number):
            with reporting(self.path), self._still():
                self._compared.check(self._connection, table, number)

    def _compare_documents(self) -> None:
        """Check that all documents are as they were written; a writer need not, as what it changes stays as wrong."""
        if not self._writes:
            self._compare_both()

    def _compare_both(self, number: int | None = None) -> None:
        """Check that documents, or the part that holds one, are as they were written, and so their fields."""
        self._compare("documents", number)
        self._compare("fields", number)

    def put(self, **metadata: Any) -> None:
        """Write metadata about the store, all or none."""
        with self._transaction():
            self.put_within(**metadata)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let several questions be answered by one state."""
        with reporting(self.path):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("COMMIT")

    def _still(self) -> AbstractContextManager[None]:
        """Do so unless there is one state anyway."""
        return nullcontext() if self._connection.in_transaction else self.snapshot()

    def latest(self) -> Catalog:
        """Open the catalog once more, to see what others have written since; close it."""
        return Catalog.open(self.path)

    @property
    def generation(self) -> int:
        """How often the content has changed since the store was built."""
        return self._count(GENERATION)

    @property
    def layout(self) -> int:
        """How often rows have been numbered again."""
        return self._count(LAYOUT)

    def _count(self, name: str) -> int:
        found = self.get(name)
        if found is not None and (type(found) is not int or found < 0):
            raise DatastoreCorrupt(f"{self.path} has the {name} {found!r}. Build the store again.")
        return found or 0

    def segments(self) -> list[SegmentRow]:
        """List the segments in the order of their rows."""
        return self._rows(SegmentRow, "segments", "first_entry, id")

    def removed(self) -> list[RemovedRow]:
        """List the rows that are no longer there, in their order."""
        return self._rows(RemovedRow, "removed", "first_entry, number")

    def indexes(self) -> list[IndexRow]:
        """List the indexes, oldest first."""
        return self._rows(IndexRow, "indexes", "id")

    def _rows(self, kind: type[_Row], table: str, order: str) -> list[_Row]:
        self._compare(table)
        found = self._all(f"SELECT * FROM {table} ORDER BY {order}")  # noqa: S608  (ours)
        return [typed(kind, row, self.path) for row in found]

    def documents(self) -> Iterator[StoredDocument]:
        """Return the documents in the order of their rows, without holding them all in memory."""
        self._compare_both()
        with reporting(self.path):
            yield from self._typed(self._connection.execute("SELECT * FROM documents ORDER BY number"))

    def _typed(self, rows: Iterable[Any]) -> Iterator[StoredDocument]:
        """Make documents of rows, with their fields."""
        with reporting(self.path):
            fields_of = fields_by_number(self._connection)
            for row in rows:
                yield typed(StoredDocument, (*row, fields_of(row[0])), self.path)

    def documents_of(self, segment: int) -> list[StoredDocument]:
        """List the documents of one segment."""
        return self.select("segment = ?", [segment])

    def select(
        self, condition: str, values: Sequence[Any], *, first: int = 0, limit: int | None = None
    ) -> list[StoredDocument]:
        """List the documents that fit a condition in SQL, from the first one on."""
        self._compare_both()
        found = self._all(
            # Not by an index, which may say other things than the table that was compared.
            f"SELECT * FROM documents NOT INDEXED WHERE {condition} ORDER BY number LIMIT ? OFFSET ?",  # noqa: S608
            *values,
            -1 if limit is None else limit,
            first,
        )
        return list(self._typed(found))

    def document_count(self, condition: str = "1", values: Sequence[Any] = ()) -> int:
        """Count the documents, all or those that fit a condition in SQL."""
        self._compare_documents()
        query = f"SELECT COUNT(*) FROM documents NOT INDEXED WHERE {condition}"  # noqa: S608  (ours)
        return int(self._all(query, *values)[0][0])

    def holds(self, sha256: str) -> bool:
        """Return whether a document with this hash of its text is stored."""
        self._compare_documents()
        with reporting(self.path):
            if self._compared is not None:
                self._compared.check_hashes(self._connection)
        return bool(self._all("SELECT 1 FROM documents WHERE sha256 = ? LIMIT 1", sha256))

    def document_at(self, row: int) -> StoredDocument:
        """Find the document that holds a row."""
        found = self._all(
            "SELECT number FROM documents WHERE first_entry <= ? AND entries > 0 ORDER BY first_entry DESC LIMIT 1", row
        )
        for (number,) in found:
            self._compare_both(number)
            # Once more from the table: what the index says of the row was not compared.
            for document in self._typed(self._all("SELECT * FROM documents NOT INDEXED WHERE number = ?", number)):
                if document.first_entry <= row < document.first_entry + document.entries:
                    return document
        raise DatastoreCorrupt(f"{self.path} has no document for row {row}. Run: knnlm repair {self.path.parent}")

    def next_document(self) -> int:
        """Return the number of the next document; no number is given twice."""
        last: int = self._all("SELECT COALESCE(MAX(number), -1) FROM documents")[0][0]
        return max(self._count("next_document"), last + 1)

    def next_segment(self) -> int:
        """Return the number of the next segment; no number is given twice."""
        last: int = self._all("SELECT COALESCE(MAX(id), -1) FROM segments")[0][0]
        return max(self._count("next_segment"), last + 1)

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **metadata: Any) -> None:
        """Commit a segment, its documents and metadata that hold from now on, all or none."""
        # What is added to a finished store is a change of it.
        with self.change() if self.get("state") == "complete" else self._transaction():
            self.put_segments([segment])
            self.put_documents(documents)
            self.put_within(**metadata)

    def put_documents(self, documents: Iterable[StoredDocument]) -> None:
        """Write documents and their fields within a change, or those of no rows by themselves."""
        given = list(documents)
        rows = (_values(document)[:-1] for document in given)
        with nullcontext() if self._connection.in_transaction else self._transaction():
            self._connection.executemany("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            put_fields(self._connection, given)

    def put_removed(self, removed: Iterable[RemovedRow]) -> None:
        """Note within a change that rows are no longer there."""
        self._connection.executemany("INSERT INTO removed VALUES (?, ?, ?, ?)", map(_values, removed))

    def other_fields(self, name: str = "") -> list[str] | None:
        """Return None where documents have such a field, and otherwise the names of those that they have."""
        self._compare_both()
        with reporting(self.path):
            return other_fields(self._connection, name)

    def replace_keys(self, segments: Iterable[SegmentRow], **metadata: Any) -> None:
        """Return that segments have other files of keys now, and metadata that hold from now on, all or none."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE segments SET scale = ?, keys_sha256 = ? WHERE id = ?",
                ((segment.scale, segment.keys_sha256, segment.id) for segment in segments),
            )
            self.put_within(**metadata)

    def put_segments(self, segments: Iterable[SegmentRow]) -> None:
        """Write segments within a change."""
        rows = map(_values, segments)
        self._connection.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def replace_indexes(self, index: IndexRow | None, *, skipped: list[tuple[int, int]] | None = None) -> None:
        """Make this the only index, or let there be none; `skipped` are the stretches of keys it has left out."""
        with self._transaction():
            self.put_index(index, skipped or [])
            if self.get(REQUESTED_INDEX) is not None:
                self._put(REQUESTED_INDEX, None)

    def put_index(self, index: IndexRow | None, skipped: list[tuple[int, int]]) -> None:
        """Do so within a change."""
        self._connection.execute("DELETE FROM indexes")
        if index is not None:
            self._connection.execute("INSERT INTO indexes VALUES (?, ?, ?, ?, ?)", _values(index))
        if skipped or self.get(SKIPPED) is not None:
            self._put(SKIPPED, skipped)

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Change the content, all or nothing: what is done within counts as one more generation."""
        with self._transaction():
            yield self._connection
            self._put(GENERATION, self.generation + 1)

    def tidy(self) -> None:
        """Write the catalog again, so that nothing of what was deleted is in it."""
        with reporting(self.path):
            self._connection.execute("VACUUM")

    def settle(self) -> bool:
        """Empty the log of changes into the catalog's file; False where a reader still needs it."""
        with reporting(self.path):
            return empty_log(self._connection)

    def put_within(self, **metadata: Any) -> None:
        """Write metadata within a change."""
        for key, value in metadata.items():
            self._put(key, value)

    def _put(self, key: str, value: Any) -> None:
        self._connection.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, json.dumps(value, sort_keys=True)),
        )

    def _all(self, query: str, *values: Any) -> list[Any]:
        with reporting(self.path):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with reporting(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            self._digests = self._digests or DigestUpdates(self._connection)
            try:
                self._digests.begin(self._connection)
                yield
                self._digests.settle(self._connection)
            except BaseException:
                self._digests.forget()
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _values(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in row.__dataclass_fields__)


class SegmentSink(Protocol):
    """The catalog, or what stands in for it."""

    path: Path  # of the catalog

    def get(self, key: str) -> Any:
        """Read one fact about the store; None where it is not known."""

    def segments(self) -> list[SegmentRow]:
        """List the segments in the order of their rows."""

    def next_segment(self) -> int:
        """Return the number of the next segment."""

    def next_document(self) -> int:
        """Return the number of the next document."""

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **metadata: Any) -> None:
        """Note a segment that is on disk, its documents, and metadata that hold from now on."""

    def replace_keys(self, segments: Iterable[SegmentRow], **metadata: Any) -> None:
        """Note that segments have other files of keys now, and metadata that hold from now on."""


FIELDS = ("id", "number", "tokens", "sha256", "source")

_CONDITION = re.compile(r"\s*([^=\s](?:[^=]*[^=\s])?)\s*=\s?(.*)", re.DOTALL)

_RECORD = "fields."

_NUMBERS = ("number", "tokens")

_COLUMNS = {"tokens": "entries"}  # of the table of documents, where the field has another name

_OTHER_SIGNS = re.compile(r"[\[?]")


@dataclass(frozen=True)
class Selection:
    """Which documents are meant: all that fit everything that is given, none where nothing is given."""

    document: str | None = None  # its id
    source: str | None = None  # a pattern, in which * stands for anything
    where: tuple[str, ...] = ()  # field=value

    @property
    def empty(self) -> bool:
        """Whether nothing was asked for."""
        return self.document is None and self.source is None and not self.where

    @property
    def text(self) -> str:
        """What was asked for, as a user would write it."""
        given = [("--document", self.document), ("--source", self.source), *(("--where", one) for one in self.where)]
        return " ".join(f"{name} {value}" for name, value in given if value is not None)

    def check(self, catalog: Catalog) -> None:
        """Reject a field of users' records that no document has."""
        for given, name, _ in self._given():
            if name not in FIELDS and (others := catalog.other_fields(name.removeprefix(_RECORD))) is not None:
                known = ", ".join([*FIELDS, *others])
                raise ParameterError(f"{given!r} is no condition: no document has this field. Known are {known}.")

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition for SQL and its values."""
        parts, values = ["1"], list[Any]()
        if self.document is not None:
            parts.append("id = ?")
            values.append(self.document)
        for given, name, value in self._given():
            own = name in FIELDS
            part, wanted = _own(given, name, value) if own else field_condition(name.removeprefix(_RECORD), value)
            parts.append(part)
            values += wanted
        if self.source is not None:
            several = "*" in self.source
            parts.append("source GLOB ?" if several else "source = ?")
            # SQLite knows more signs than the one that is ours, and names of files may have them.
            values.append(_OTHER_SIGNS.sub(r"[\g<0>]", self.source) if several else self.source)
        return " AND ".join(parts), values

    def _given(self) -> Iterator[tuple[str, str, str]]:
        """Return each condition as it was written, its field and its value."""
        for one in self.where:
            match = _CONDITION.fullmatch(one)
            if match is None:
                raise ParameterError(f"{one!r} is no condition: write field=value.")
            yield one, match[1], match[2]


def _own(given: str, name: str, value: str) -> tuple[str, list[Any]]:
    """Compare what every document has."""
    if name not in _NUMBERS:
        return f"{name} = ?", [value]
    if not re.fullmatch(r"\d{1,18}", value):
        raise ParameterError(f"{given!r} is no condition: the {name} of a document is a number.")
    return f"{_COLUMNS.get(name, name)} = ?", [int(value)]


def check_complete(catalog: Catalog) -> None:
    """Reject a store that is not finished."""
    if catalog.get("state") != "complete":
        raise DatastoreError(
            f"{catalog.path.parent} is an unfinished build. Finish it first, with the command that began it."
        )
