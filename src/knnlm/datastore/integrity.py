"""Checksums of the catalog's rows, of JSON files and of blocks of large files.

Catalog: every row has a SHA-256, and those of a part are added up, so a change costs as much as the rows that it
touches. A part is a table, or 1,024 consecutive documents, of which one can be checked without reading all. The
digests are rows of the table `digests` and change with the rows in one transaction; temporary triggers of the writer's
connection report which rows change. Digests detect damage, not forgery.

Files: a small file is hashed whole. A large one is read in places, so it is compared in blocks of 64 KiB, each when it
is first read by this process. The catalog has one SHA-256 for the whole file; when that was found to match for the
first time, the CRC-32 of every block is written beside it, and later reads compare with that:

segments/000000/keys.sums   "KNNLMSUM", SHA-256 of keys.npy, CRC-32 of each block, SHA-256 of all that
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.paths import KEYS_FILE
from knnlm.datastore.schema import SegmentRow, array_sums
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.io import checksum

TABLE = "digests"

ROWS_PER_BLOCK = 1024  # numbers of documents in one part

_BLOCKS = ("documents", "fields")  # the tables that are cut into blocks, by the number of a document

END = 1 << 256  # where sums begin again

_NOTHING = f"{0:064x}"

_BY_HASH = "documents_by_hash"

_LACKING = f"""
SELECT 1 FROM documents AS one NOT INDEXED WHERE NOT EXISTS (
    SELECT 1 FROM documents AS other INDEXED BY {_BY_HASH}
    WHERE other.sha256 = one.sha256 AND other.number = one.number
) LIMIT 1
"""  # noqa: S608  (ours)


def row_sum(table: str, row: Iterable[object]) -> int:
    """Hash a row of a table."""
    return int.from_bytes(hashlib.sha256(json.dumps([table, *row]).encode()).digest(), "big")


def part_of(table: str, number: object) -> str:
    """Name the part that a row belongs to, by its first cell."""
    return f"{table} {number // ROWS_PER_BLOCK}" if table in _BLOCKS and isinstance(number, int) else table


def table_names(connection: sqlite3.Connection) -> list[str]:
    """List the tables of a catalog."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    names = (name for (name,) in connection.execute(query))
    return sorted(name.decode() if isinstance(name, bytes) else name for name in names)


def tables(connection: sqlite3.Connection) -> list[str]:
    """List the tables that have digests."""
    return [name for name in table_names(connection) if name != TABLE]


def found_sums(connection: sqlite3.Connection, table: str, block: int | None = None) -> dict[str, str]:
    """Sum up a table, or one block of its numbers, as it is now: the sums by part."""
    # Not from an index, whose copies of cells may be others.
    query = f"SELECT * FROM {_quoted(table)} NOT INDEXED"  # noqa: S608  (a table that is there)
    if block is not None:
        query += f" WHERE number >= {block * ROWS_PER_BLOCK} AND number < {(block + 1) * ROWS_PER_BLOCK}"
    sums: dict[str, int] = {}
    for row in connection.execute(query):
        part = part_of(table, row[0])
        sums[part] = sums.get(part, 0) + row_sum(table, row)
    return {part: f"{total % END:064x}" for part, total in sums.items()}


def kept_sums(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the sums that were written down, by part."""
    pairs = connection.execute(f"SELECT part, digest FROM {TABLE} ORDER BY part")  # noqa: S608  (ours)
    return {str(part): str(total) for part, total in pairs}


def differing(connection: sqlite3.Connection, table: str | None = None, block: int | None = None) -> list[str]:
    """Name the parts of a table, of one block of it, or of all tables, whose sums are not those written down."""
    kept = kept_sums(connection)
    if table is None:
        found = {part: total for each in tables(connection) for part, total in found_sums(connection, each).items()}
    else:
        found = found_sums(connection, table, block)
        wanted = table if block is None else part_of(table, block * ROWS_PER_BLOCK)
        kept = {part: kept[part] for part in kept if wanted in (part, part.partition(" ")[0])}
    # A part of no rows need not be there.
    return sorted(part for part in found.keys() | kept.keys() if found.get(part, _NOTHING) != kept.get(part, _NOTHING))


def fill(connection: sqlite3.Connection) -> None:
    """Write the sums of all that is there now, whatever they were; within a transaction."""
    connection.execute(f"DELETE FROM {TABLE}")  # noqa: S608
    for table in tables(connection):
        sums = found_sums(connection, table)
        connection.executemany(f"INSERT INTO {TABLE} VALUES (?, ?)", sums.items())  # noqa: S608


class VerifiedTables:
    """What a reader has compared with its sums so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: set[str] = set()

    def lacks(self, table: str, number: int | None = None) -> bool:
        """Return whether a table, or the part of it that holds a document, is still to be compared."""
        return not {table, table if number is None else part_of(table, number)} & self._parts

    def check(self, connection: sqlite3.Connection, table: str, number: int | None = None) -> None:
        """Reject what is not as it was written."""
        wrong = differing(connection, table, None if number is None else number // ROWS_PER_BLOCK)
        if wrong:
            raise DatastoreCorrupt(
                f"{self._path} is corrupt: checksum mismatch (SHA-256) in {wrong[0]}. Restore it, or "
                f"run: knnlm repair {self._path.parent}"
            )
        self._parts.add(table if number is None else part_of(table, number))

    def check_hashes(self, connection: sqlite3.Connection) -> None:
        """Refuse, once, an index by hash that lacks a document: it alone is asked whether a text is stored."""
        asked = "SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = ?"
        needed = _BY_HASH not in self._parts and connection.execute(asked, (_BY_HASH,)).fetchone()
        if needed and connection.execute(_LACKING).fetchone():
            raise DatastoreCorrupt(
                f"{self._path} is damaged (its index by hash lacks a document). Run: knnlm repair {self._path.parent}"
            )
        self._parts.add(_BY_HASH)


class DigestUpdates:
    """What a writer's transaction adds to the sums, and takes from them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.running = False  # sums are behind, until they are settled
        self._changes: dict[str, int] = {}
        self._watched: int | None = None
        connection.create_function("knnlm_digest", -1, self._note)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Watch what the transaction that has just begun does."""
        self._changes.clear()
        self.running = True
        if self._watched != (version := _version(connection)):
            for table in tables(connection):
                _watch(connection, table)
            self._watched = version

    def settle(self, connection: sqlite3.Connection) -> None:
        """Write the new sums, as the last act of the transaction."""
        if self._watched != _version(connection):
            fill(connection)  # tables have other columns now, or there are more of them
            self._watched = None
        else:
            kept = kept_sums(connection)
            new = {part: int(kept.get(part, "0"), 16) + change for part, change in self._changes.items()}
            connection.executemany(
                f"INSERT INTO {TABLE} VALUES (?, ?) ON CONFLICT (part) DO UPDATE SET digest = excluded.digest",  # noqa: S608
                ((part, f"{total % END:064x}") for part, total in new.items()),
            )
        self.running = False

    def forget(self) -> None:
        """The transaction was taken back, and what watched it with it."""
        self.running, self._watched = False, None

    def _note(self, table: str, sign: int, *row: object) -> None:
        assert self.running, "rows change within a transaction that settles their sums"
        part = part_of(table, row[0])
        self._changes[part] = self._changes.get(part, 0) + sign * row_sum(table, row)


def _watch(connection: sqlite3.Connection, table: str) -> None:
    """Have rows that come and go noted, by triggers of this connection."""
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]

    def note(sign: int, which: str) -> str:
        return f"knnlm_digest({_text(table)}, {sign}, {', '.join(f'{which}.{_quoted(name)}' for name in columns)})"

    new, old = note(1, "NEW"), note(-1, "OLD")
    for event, notes in (("INSERT", new), ("DELETE", old), ("UPDATE", f"{old}, {new}")):
        name = _quoted(f"knnlm_{table}_{event.lower()}")
        connection.execute(f"DROP TRIGGER IF EXISTS temp.{name}")
        connection.execute(
            f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{_quoted(table)} BEGIN SELECT {notes}; END"
        )


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("SELECT schema_version FROM pragma_schema_version").fetchone()[0]
    return version


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


SUM = "sha256"  # the checksum of the other members

_MOST = 1 << 28  # bytes: read whole, so a file that only claims to be large must not fill the store


def load_metadata(file: Path, *, version: int, missing: str, again: str) -> dict[str, Any]:
    """Return what the file holds; `missing` is said where it is not there, `again` how it is made again."""
    try:
        if file.stat().st_size > _MOST:
            raise DatastoreCorrupt(f"{file} has {file.stat().st_size:,} bytes, too many for metadata. {again}")
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatastoreError(missing) from None
    except OSError as error:
        raise DatastoreError(f"Cannot read {file}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise DatastoreCorrupt(f"{file} is no JSON. {again}") from None
    if not isinstance(metadata, dict) or metadata.get("format") != version:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        raise DatastoreError(f"{file} has format version {found}, this knnlm reads version {version}. {again}")
    check_sum(file, metadata, again)
    return metadata


def summed(metadata: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum to metadata that is kept as JSON."""
    return {**metadata, SUM: hash_metadata(metadata)}


def check_sum(file: Path, metadata: dict[str, Any], again: str) -> None:
    """Reject metadata that are not as they were written; older files have nothing to compare with."""
    if SUM in metadata and metadata[SUM] != hash_metadata({name: metadata[name] for name in metadata if name != SUM}):
        raise DatastoreCorrupt(f"{file} is not as it was written: its SHA-256 is another. {again}")


def hash_metadata(metadata: dict[str, Any]) -> str:
    """Return the SHA-256 of metadata that JSON can keep, in whatever order they are."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


BLOCK = 1 << 16

_AT_ONCE = 256  # blocks

_MAGIC = b"KNNLMSUM"

_DIGEST = 32

_NAME = 64  # characters of a SHA-256


class BlockChecksums:
    """What has been compared so far; one that is not `on` compares nothing."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._whole: set[Path] = set()
        self._blocks: dict[Path, _Blocks] = {}
        self._done: set[int] = set()  # the segments whose keys are all compared

    def array(self, folder: Path, segment: SegmentRow, name: str) -> None:
        """Compare a small array of a segment, once; keys are not small."""
        path = folder / name
        if self.on and name != KEYS_FILE and path not in self._whole:
            if checksum(path) != array_sums(segment)[name]:
                raise damaged(path)
            self._whole.add(path)

    def done(self, segment: SegmentRow) -> bool:
        """Return whether nothing of a segment's keys is left to compare."""
        return not self.on or segment.id in self._done

    def keys(self, path: Path, segment: SegmentRow, keys: NDArray[np.int64], row_bytes: int) -> None:
        """Compare the blocks that hold these keys of a segment, each once."""
        if self.done(segment):
            return
        if self.rows(path, segment.keys_sha256, keys, row_bytes, total=segment.keys):
            self._done.add(segment.id)

    def rows(self, path: Path, sha256: str, rows: NDArray[np.int64], row_bytes: int, *, total: int) -> bool:
        """Compare the blocks that hold these rows of the `total` that a file ends with, each once.

        True where nothing of the file is left to compare.
        """
        blocks = self._of(path, sha256)
        if blocks.size < total * row_bytes:  # cut short since the store was opened
            raise damaged(path)
        if blocks.left:
            blocks.check(blocks.size - (total - rows) * row_bytes, row_bytes)
        return not blocks.left

    def stretches(self, path: Path, sha256: str, begins: NDArray[np.int64], length: int) -> None:
        """Compare the blocks of a file from each of these bytes on, as far as the length goes, each once."""
        if self.on and (blocks := self._of(path, sha256)).left:
            blocks.check(begins, length)

    def _of(self, path: Path, sha256: str) -> _Blocks:
        if path not in self._blocks:
            self._blocks[path] = _Blocks(path, sha256)
        return self._blocks[path]


class _Blocks:
    """The blocks of one file."""

    def __init__(self, path: Path, sha256: str) -> None:
        self._path = path
        self.size = path.stat().st_size
        count = -(-self.size // BLOCK)
        file = path.with_suffix(".sums")
        sums = _load(file, sha256, count)
        self._seen = np.zeros(count, np.bool_)
        if sums is None:
            sums = _make(path, sha256)
            _save(file, sha256, sums)
            self._seen[:] = True  # just now
        self._sums = sums
        self.left = count - int(self._seen.sum())

    def check(self, begins: NDArray[np.int64], length: int) -> None:
        """Compare the blocks from each of these bytes on, as far as the length goes."""
        steps = [*range(0, length, BLOCK), max(0, length - 1)]
        touched = [(begins + step) // BLOCK for step in steps]
        inside = (blocks[blocks < len(self._seen)] for blocks in touched)
        wanted = np.unique(np.concatenate([blocks[~self._seen[blocks]] for blocks in inside]))
        if not len(wanted):
            return
        with self._path.open("rb") as file:
            cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
            for run in np.split(wanted, cuts):
                for part in (run[at : at + _AT_ONCE] for at in range(0, len(run), _AT_ONCE)):
                    file.seek(int(part[0]) * BLOCK)
                    data = memoryview(file.read(len(part) * BLOCK))
                    self._compare(data, int(part[0]))
        self._seen[wanted] = True
        self.left = len(self._seen) - int(self._seen.sum())

    def _compare(self, data: memoryview, first: int) -> None:
        for number, at in enumerate(range(0, len(data), BLOCK), first):
            if zlib.crc32(data[at : at + BLOCK]) != self._sums[number]:
                raise damaged(self._path, f" in bytes {number * BLOCK:,} to {(number + 1) * BLOCK - 1:,}")


def _make(path: Path, sha256: str) -> NDArray[np.uint32]:
    """Sum up every block of a file that is as it was written."""
    digest, sums = hashlib.sha256(), list[int]()
    with path.open("rb") as file:
        while data := file.read(_AT_ONCE * BLOCK):
            digest.update(data)
            view = memoryview(data)
            sums += [zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    if digest.hexdigest() != sha256:
        raise damaged(path)
    return np.array(sums, dtype="<u4")


def _save(file: Path, sha256: str, sums: NDArray[np.uint32]) -> None:
    """Write sums down for the next process; where that cannot be, it makes them again."""
    body = _MAGIC + sha256.encode() + sums.tobytes()
    # A reader of an untrusted store must not write through a link in it.
    partial = file.with_suffix(f".{secrets.token_hex(8)}.partial")
    with suppress(OSError):
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(body + hashlib.sha256(body).digest())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _load(file: Path, sha256: str, count: int) -> NDArray[np.uint32] | None:
    """Read sums; None where there are none for this file, or damaged ones."""
    size = len(_MAGIC) + _NAME + 4 * count + _DIGEST
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
            return None
        data = file.read_bytes()
    except OSError:
        return None
    body, end = data[:-_DIGEST], len(_MAGIC) + _NAME
    if hashlib.sha256(body).digest() != data[-_DIGEST:] or body[:end] != _MAGIC + sha256.encode():
        return None
    return np.frombuffer(body[end:], "<u4")


def damaged(path: Path, where: str = "") -> DatastoreCorrupt:
    """Return that a file of a segment is not what it was."""
    memory = path.parent.parent.parent
    return DatastoreCorrupt(f"{path} is not as it was written{where}. Restore it, or run: knnlm repair {memory}")
