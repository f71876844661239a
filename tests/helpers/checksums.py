"""The sums of a catalog, as docs/reference/format.md says how to make them, without the library."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path


def sums_of(file: Path) -> dict[str, str]:
    """Sum up every part of a catalog."""
    sums: dict[str, int] = {}
    with closing(sqlite3.connect(file)) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in names - {"digests"}:
            for row in connection.execute(f"SELECT * FROM {table} NOT INDEXED"):
                part = f"{table} {row[0] // 1024}" if table in ("documents", "fields") else table
                digest = hashlib.sha256(json.dumps([table, *row]).encode()).hexdigest()
                sums[part] = (sums.get(part, 0) + int(digest, 16)) % 2**256
    return {part: f"{total:064x}" for part, total in sums.items()}


def written_sums(file: Path) -> dict[str, str]:
    """Give the sums that a catalog has, but for those of nothing."""
    with closing(sqlite3.connect(file)) as connection:
        return {part: total for part, total in connection.execute("SELECT * FROM digests") if int(total, 16)}


def seal(file: Path) -> None:
    """Make the sums right, as a stranger would who has changed something."""
    try:
        sums = sums_of(file)
    except (sqlite3.Error, TypeError):
        return  # what is no table, or no text, has no sum
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        if ("digests",) in connection.execute("SELECT name FROM sqlite_master").fetchall():
            connection.execute("DELETE FROM digests")
            connection.executemany("INSERT INTO digests VALUES (?, ?)", sums.items())
