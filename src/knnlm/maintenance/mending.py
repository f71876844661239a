"""Find which one bit of a catalog was turned over, and turn it back. Knows nothing about what the cells mean.

The sum of a part (see `knnlm.datastore.digests`) less the SHA-256 of all its other rows is the SHA-256 that a row had
when it was written. So whether a bit was turned over there can be tried: of a number, of a text, or of the sum itself.
Only what gives the very sum that was written is believed, so nothing is ever guessed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.datastore.integrity import END, TABLE, part_of, row_sum, tables, there
from knnlm.datastore.schema import prepare_to_write

_LONGEST = 1 << 14  # bytes of a text that is tried: each of its bits is one SHA-256 of it


@dataclass(frozen=True)
class Correction:
    """One cell that had another value when it was written."""

    table: str
    column: str
    key: Any  # the first cell of its row, as it is now
    now: Any  # texts are bytes here: they may be none
    written: Any

    def __str__(self) -> str:
        now, written = _short(self.now), _short(self.written)
        return f"the {self.column} of {_short(self.key)} in {self.table} is {written} again, and was {now}"


def find_mends(file: Path) -> list[Correction]:
    """Find what was turned over in a catalog: one bit in each part whose sum is another, as far as that explains it."""
    with closing(_open(file)) as connection:
        if not there(connection):
            return []
        # As they are, also where they are no texts any more: a character for each byte.
        pairs = connection.execute(f"SELECT part, sum FROM {TABLE}")  # noqa: S608  (ours)
        kept = {part.decode("latin1"): total.decode("latin1") for part, total in pairs}
        found: list[Correction] = []
        for table in tables(connection):
            columns = _columns(connection, table)
            parts: dict[str, list[tuple[Any, ...]]] = {}
            for row in connection.execute(f'SELECT * FROM "{table}" NOT INDEXED'):  # noqa: S608
                parts.setdefault(part_of(table, row[0]), []).append(row)
            inside = [mend for part, rows in parts.items() for mend in _find(table, part, columns, rows, kept)]
            found += inside or _find_moved(table, columns, parts, kept)
        return found


def apply_mends(file: Path, mends: list[Correction]) -> None:
    """Write the cells as they were, all or none."""
    with closing(_open(file)) as connection:
        prepare_to_write(connection)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("REINDEX")  # else an index that still has the right value would be in the way
        for mend in mends:
            first = _columns(connection, mend.table)[0]
            key = "CAST(? AS TEXT)" if isinstance(mend.key, bytes) else "?"
            query = f'UPDATE "{mend.table}" SET "{mend.column}" = ? WHERE "{first}" = {key}'  # noqa: S608
            if connection.execute(query, (mend.written, mend.key)).rowcount != 1:
                raise sqlite3.DatabaseError(f"the row of {mend} cannot be reached")  # and all is taken back
        connection.execute("COMMIT")


def _open(file: Path) -> sqlite3.Connection:
    """Open a catalog whose texts may be no texts any more: they are bytes here."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.text_factory = bytes
    return connection


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    names = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return [_str(name) for (name,) in names]


def _find(
    table: str, part: str, columns: list[str], rows: list[tuple[Any, ...]], all_kept: dict[str, str]
) -> list[Correction]:
    """Look for the bit in one part."""
    kept = all_kept.get(part)
    sums = [_sum(table, row) for row in rows]
    unread = [number for number, total in enumerate(sums) if total is None]
    total = sum(number for number in sums if number is not None)
    found = f"{total % END:064x}"
    if len(unread) > 1 or (not unread and found == kept):
        return []
    if kept is None:  # or in the name of its sum
        near = [name for name, total_ in all_kept.items() if total_ == found and _one_bit_apart(name, part)]
        was = [name.encode("latin1") for name in near]
        return [Correction(TABLE, "part", name, name, part) for name in was]
    if not unread and _one_bit_apart(found, kept):
        return [Correction(TABLE, "sum", part.encode(), kept.encode("latin1"), found)]
    if (wanted := _hex(kept)) is None:
        return []
    for number in unread or range(len(rows)):
        goal = (wanted - total + (sums[number] or 0)) % END
        for place, now, written in _turned(table, rows[number], goal):
            return [Correction(table, columns[place], rows[number][0], now, written)]
    return []


def _find_moved(
    table: str, columns: list[str], parts: dict[str, list[tuple[Any, ...]]], kept: dict[str, str]
) -> list[Correction]:
    """Look for a row whose number has led it from one part into another."""
    lacks = {}  # the SHA-256 that a part would need, by part
    for part in {*parts, *(name for name in kept if name.partition(" ")[0] == table)}:
        sums = [_sum(table, row) for row in parts.get(part, [])]
        lack = ((_hex(kept.get(part, "0")) or 0) - sum(number or 0 for number in sums)) % END
        if lack:
            lacks[part] = lack
    for part in lacks.keys() & parts.keys() if len(lacks) > 1 else ():
        for row in parts[part]:
            for number in _one_bit(row[0]):
                there = part_of(table, number)
                if there != part and there in lacks and _sum(table, (number, *row[1:])) == lacks[there]:
                    return [Correction(table, columns[0], row[0], row[0], number)]
    return []


def _turned(table: str, row: tuple[Any, ...], goal: int) -> Iterator[tuple[int, Any, Any]]:
    """Give the cell of a row, and what it was, where one bit gives the SHA-256 that is wanted."""
    digest = goal.to_bytes(32, "big")
    texts = [_json(cell) for cell in row]
    for place, cell in enumerate(row):
        others = [text for number, text in enumerate(texts) if number != place]
        if any(text is None for text in others):
            continue  # another cell of this row is no text
        before = ", ".join([json.dumps(table), *texts[:place]])  # type: ignore[list-item]
        begun = hashlib.sha256(f"[{before}, ".encode())
        end = "".join(f", {text}" for text in texts[place + 1 :]) + "]"
        for other in _one_bit(cell):
            tried = begun.copy()
            tried.update((json.dumps(other) + end).encode())
            if tried.digest() == digest:
                yield place, cell, other


def _one_bit(cell: Any) -> Iterator[Any]:
    """Give every value that differs from this one in a single bit."""
    if isinstance(cell, int):
        yield from (cell ^ (1 << bit) for bit in range(63))
    elif isinstance(cell, float):
        (bits,) = struct.unpack("<Q", struct.pack("<d", cell))
        yield from (struct.unpack("<d", struct.pack("<Q", bits ^ (1 << bit)))[0] for bit in range(64))
    elif isinstance(cell, bytes) and len(cell) <= _LONGEST:
        changed = bytearray(cell)
        for number in range(len(cell)):
            for bit in range(8):
                changed[number] ^= 1 << bit
                if (text := _decoded(bytes(changed))) is not None:
                    yield text
                changed[number] ^= 1 << bit


def _one_bit_apart(one: str, two: str) -> bool:
    first, second = one.encode("latin1"), two.encode("latin1")
    return len(first) == len(second) and sum((a ^ b).bit_count() for a, b in zip(first, second, strict=True)) == 1


def _sum(table: str, row: tuple[Any, ...]) -> int | None:
    """Hash a row; None where a text in it is none."""
    cells = [_decoded(cell) if isinstance(cell, bytes) else cell for cell in row]
    if any(cell is None and was is not None for cell, was in zip(cells, row, strict=True)):
        return None
    return row_sum(table, cells)


def _json(cell: Any) -> str | None:
    text = _decoded(cell) if isinstance(cell, bytes) else cell
    return None if text is None and cell is not None else json.dumps(text)


def _hex(text: str) -> int | None:
    try:
        return int(text, 16)
    except ValueError:
        return None


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _short(cell: Any) -> str:
    text = repr(_str(cell) if isinstance(cell, bytes) else cell)
    return text if len(text) <= 60 else text[:57] + "…"


def _str(cell: Any) -> str:
    return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)
