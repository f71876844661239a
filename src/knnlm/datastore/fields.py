"""The fields of users' records in a catalog: one row for a document that has some. Knows nothing about other tables.

Memories of formats below 5 have no such table, and no fields, until they are changed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any

from knnlm.datastore.schema import StoredDocument
from knnlm.records import Scalar, fault, ways_to_write, written

# The members of the object with a comma on either side, so that one is found as a piece of text: within JSON, no text
# can look like a member, as its quotation marks have backslashes.
_MEMBERS = "', ' || substr(record, 2, length(record) - 2) || ', '"
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
        row = connection.execute("SELECT record FROM fields WHERE number = ?", (number,)).fetchone()
        return {} if row is None else check_fields(json.loads(row[0]))

    return find


def check_fields(found: Any) -> dict[str, Scalar]:
    """Give fields that came from a file, or a ValueError."""
    if (wrong := fault(found)) is not None:
        raise ValueError(wrong)
    return dict(found)


def put_fields(connection: sqlite3.Connection, documents: Iterable[StoredDocument]) -> None:
    """Write the fields of documents."""
    rows = [(one.number, written(dict(one.fields))) for one in documents if one.fields]
    connection.executemany("INSERT INTO fields VALUES (?, ?)", rows)


def drop_fields(connection: sqlite3.Connection, numbers: Iterable[int] | None = None) -> None:
    """Take out the fields of documents that go, or of all."""
    if has_fields(connection):
        if numbers is None:
            connection.execute("DELETE FROM fields")
        else:
            connection.executemany("DELETE FROM fields WHERE number = ?", ((number,) for number in numbers))


def other_fields(connection: sqlite3.Connection, name: str) -> list[str] | None:
    """Give None where documents have such a field, and otherwise the names of those that they have, not very many."""
    if not has_fields(connection):
        return []
    query = f"SELECT 1 FROM fields WHERE instr({_MEMBERS}, ?) > 0 LIMIT 1"  # noqa: S608  (ours)
    if connection.execute(query, (f", {written(name)}: ",)).fetchone() is not None:
        return None
    records = connection.execute("SELECT record FROM fields")
    return sorted({each for (record,) in records for each in check_fields(json.loads(record))})[:_SHOWN]


def field_condition(name: str, value: str) -> tuple[str, list[str]]:
    """Give the condition for SQL that a field has a value, whether that is a text or a number, and its values."""
    ways = [f", {written(name)}: {way}, " for way in ways_to_write(value)]
    either = " OR ".join([f"instr({_MEMBERS}, ?) > 0"] * len(ways))
    return f"number IN (SELECT number FROM fields WHERE {either})", ways  # noqa: S608
