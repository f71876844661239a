"""The fields of users' records in a catalog: one row for each field of a document. Knows nothing about other tables.

The table is made when the first document comes that has fields, so a memory without them is as it was before.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from knnlm.datastore.schema import StoredDocument
from knnlm.records import Scalar, fault, ways_to_write, written

TABLE = """
CREATE TABLE fields (
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (number, name)
) WITHOUT ROWID
"""
_SHOWN = 20  # names that are told


def has_fields(connection: sqlite3.Connection) -> bool:
    """Whether the table is there."""
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'fields'")
    return found.fetchone() is not None


def fields_by_number(connection: sqlite3.Connection) -> Callable[[Any], dict[str, Scalar]]:
    """Give what finds the fields of a document by its number; a ValueError where they cannot be."""
    if not has_fields(connection):
        return lambda _: {}

    def find(number: Any) -> dict[str, Scalar]:
        rows = connection.execute("SELECT name, value FROM fields WHERE number = ? ORDER BY name", (number,))
        return check_fields({name: json.loads(value) for name, value in rows})

    return find


def check_fields(found: Any) -> dict[str, Scalar]:
    """Give fields that came from a file, or a ValueError."""
    if (wrong := fault(found)) is not None:
        raise ValueError(wrong)
    return dict(found)


def put_fields(connection: sqlite3.Connection, documents: Iterable[StoredDocument]) -> None:
    """Write the fields of documents; the table must be there."""
    rows = [(one.number, name, written(value)) for one in documents for name, value in one.fields.items()]
    connection.executemany("INSERT INTO fields VALUES (?, ?, ?)", rows)


def drop_fields(connection: sqlite3.Connection, numbers: Iterable[int] | None = None) -> None:
    """Take out the fields of documents that go, or of all."""
    if has_fields(connection):
        if numbers is None:
            connection.execute("DELETE FROM fields")
        else:
            connection.executemany("DELETE FROM fields WHERE number = ?", ((number,) for number in numbers))


def is_field(connection: sqlite3.Connection, name: str) -> bool:
    """Whether any document has such a field."""
    if not has_fields(connection):
        return False
    return connection.execute("SELECT 1 FROM fields WHERE name = ? LIMIT 1", (name,)).fetchone() is not None


def field_names(connection: sqlite3.Connection) -> list[str]:
    """Name the fields that documents have, not all where there are many."""
    if not has_fields(connection):
        return []
    found = connection.execute("SELECT DISTINCT name FROM fields ORDER BY name LIMIT ?", (_SHOWN,))
    return [str(name) for (name,) in found]


def field_condition(name: str, value: str) -> tuple[str, Sequence[str]]:
    """Give the condition for SQL that a field has a value, whether that is a text or a number, and its values."""
    ways = ways_to_write(value)
    places = ", ".join("?" * len(ways))
    return f"number IN (SELECT number FROM fields WHERE name = ? AND value IN ({places}))", [name, *ways]  # noqa: S608
