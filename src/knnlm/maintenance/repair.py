"""Keep what is sound of a damaged memory. Knows nothing about how damage is found.

The unit of loss is a segment: a checksum tells that a file is not as it was written, not which of its rows are wrong.
What is damaged goes to the folder `lost` first, then one transaction takes it out of the catalog, and only then is it
taken from where it was; so a repair that is killed leaves everything as it was, or is finished when it is run again.

In the catalog a single turned bit is found and turned back. Where more is wrong with a part of it, what the files vouch
for is kept: rows that fit them, and documents that fill their segments, though their names may be others.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import REQUESTED_INDEX, Catalog, drop_fields
from knnlm.datastore.indexes import build_requested_index, cancel_requested_index, request_index, requested_index
from knnlm.datastore.integrity import DigestUpdates, fill, there
from knnlm.datastore.locks import nobody_reading, writer_lock
from knnlm.datastore.paths import CATALOG_FILE, GATES_FOLDER, LOST_FOLDER, NGRAM_FOLDER, segment_folder
from knnlm.datastore.schema import IndexRow, SegmentRow
from knnlm.datastore.segments import index_file
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, KnnlmError
from knnlm.io import sync_folder, translate_os_errors
from knnlm.maintenance.mending import apply_mends, find_mends
from knnlm.maintenance.verify import DERIVED, INDEX, SEGMENT, SUM, Problem, Verification, verify
from knnlm.mixture.saved import gate_of
from knnlm.progress import Progress, silent

_SQLITE = "SQLite says: "


@dataclass(frozen=True)
class LostDocument:
    """A document whose tokens or keys are damaged."""

    id: str
    source: str
    tokens: int
    segment: int


@dataclass(frozen=True)
class Repair:
    """What was wrong, and what became of it."""

    memory: Path
    before: Verification
    lost: tuple[LostDocument, ...]
    segments: tuple[int, ...]  # that were taken out
    kept_in: Path | None  # where their files are now
    dropped: tuple[str, ...]  # derived files that were removed; they can be made again
    index: str | None  # that was made again
    mended: tuple[str, ...]  # cells of the catalog that are as they were written again
    unsure: tuple[str, ...]  # parts of the catalog that were kept though they are not as they were written
    documents: int  # that are there now
    tokens: int
    seconds: float


def repair(
    path: str | Path,
    *,
    index: bool = True,
    dry_run: bool = False,
    wait: float = 0.0,
    progress: Progress = silent,
) -> Repair:
    """Take out what is damaged, and make the index again if there was one; `dry_run` only says what would be done.

    Waits so many seconds for another writer.
    """
    folder, begin = Path(path), time.perf_counter()
    _check_catalog(folder)
    with writer_lock(folder, wait=wait):
        before = verify(folder, deep=True, progress=progress)
        mended = () if before.sound else _mend(folder / CATALOG_FILE, dry_run=dry_run)
        left = verify(folder, deep=True, progress=progress) if mended and not dry_run else before
        # What else is wrong is only known when bits were turned back.
        plan = _nothing(folder) if mended and dry_run else _plan(folder, left, index=index)
        if not left.sound and not dry_run:
            _carry_out(folder, plan)
    made = None if dry_run else _index_again(folder, plan, wait, progress)
    after = before if dry_run else verify(folder, deep=not before.sound, progress=progress)
    if not dry_run and not after.sound:
        raise DatastoreCorrupt(f"{folder} is still damaged after the repair: {after.problems[0]}. Build it again.")
    lost = tuple(plan.lost)
    gone = sum(document.tokens for document in lost) if dry_run else 0
    return Repair(
        folder,
        before,
        lost,
        tuple(segment.id for segment in plan.segments),
        plan.kept_in if plan.keeps and (dry_run or plan.kept_in.exists()) else None,
        tuple(plan.dropped),
        made,
        mended,
        tuple(part for part in plan.unsure if part != "indexes"),  # which are made again
        after.documents - (len(lost) if dry_run else 0),
        after.tokens - gone,
        time.perf_counter() - begin,
    )


@dataclass(frozen=True)
class _Plan:
    """What is to be done."""

    segments: list[SegmentRow]  # to take out
    remaining: list[SegmentRow]
    lost: list[LostDocument]
    indexes: list[IndexRow]  # to drop
    requested: tuple[str, str] | None  # the index to make then, and its metric
    set_aside: list[Path]  # trained files that are damaged
    dropped: list[str]
    reindex: bool  # of the tables of the catalog
    complete: bool  # not an unfinished build
    kept_in: Path
    unsure: tuple[str, ...]  # parts of the catalog to believe

    @property
    def keeps(self) -> bool:
        """Whether anything is to be set aside."""
        return bool(self.segments or self.set_aside or self.unsure)


def _nothing(folder: Path) -> _Plan:
    return _Plan([], [], [], [], None, [], [], False, True, folder / LOST_FOLDER, ())


def _check_catalog(folder: Path) -> None:
    """Say what can be done where there is no catalog: without it nobody knows what the files are."""
    if (folder / CATALOG_FILE).is_file():
        return
    found = len(list((folder / "segments").glob("*"))) if folder.is_dir() else 0
    if not found:
        raise DatastoreError(f"{folder} is not a memory: it has no {CATALOG_FILE}. Make one with: knnlm build")
    raise DatastoreError(
        f"{folder} has {found:,} segments but no {CATALOG_FILE}, which lists what they hold. Nothing was changed. "
        "Restore the file from a copy, or build the memory again in another folder."
    )


def _mend(file: Path, *, dry_run: bool) -> tuple[str, ...]:
    """Turn bits back, where SQLite can still read its tables, and say which."""
    try:
        found = find_mends(file)
        if found and not dry_run:
            apply_mends(file, found)
    except sqlite3.Error:
        return ()
    return tuple(map(str, found))


def _refuse(folder: Path, worst: Problem) -> None:
    raise DatastoreCorrupt(
        f"{folder} cannot be repaired: {worst}. Nothing was changed. Restore {worst.file} from a copy, or build "
        "the memory again in another folder."
    )


def _check_sums(folder: Path, wrong: list[Problem], segments: list[SegmentRow], lost: list[SegmentRow]) -> None:
    """Refuse a part of the catalog that is not as it was written, unless the files vouch for what it says.

    They do for all of a segment but its scale. Documents and what was removed must fill their segments, and an index is
    made again. Nothing vouches for a fact.
    """
    plain = all(segment.scale == 1.0 for segment in segments)
    for problem in wrong:
        table = str(problem.table).partition(" ")[0]
        if table == "meta" or (table == "segments" and not lost and not plain):
            _refuse(folder, problem)


def _plan(folder: Path, before: Verification, *, index: bool) -> _Plan:
    """Decide what to take out; refuse what cannot be repaired."""
    hopeless = [problem for problem in before.problems if problem.part not in (SEGMENT, INDEX, DERIVED, SUM)]
    tables = [problem for problem in hopeless if problem.what.startswith(_SQLITE)]
    if len(hopeless) > len(tables):
        _refuse(folder, next(problem for problem in hopeless if problem not in tables))
    damaged = {problem.segment for problem in before.problems if problem.part == SEGMENT}
    wrong = [problem for problem in before.problems if problem.part == SUM]
    with closing(Catalog.open(folder / CATALOG_FILE, compare=False)) as catalog:
        segments = catalog.segments()
        lost = [segment for segment in segments if segment.id in damaged]
        if lost and before.state != "complete":
            # A build that goes on begins after its last segment, so only a beginning can be kept.
            lost = segments[segments.index(lost[0]) :]
        documents = [
            LostDocument(document.id, document.source, document.rows, segment.id)
            for segment in lost
            for document in catalog.documents_of(segment.id)
        ]
        _check_sums(folder, wrong, segments, lost)
        bad_index = lost or any(problem.part == INDEX or problem.table == "indexes" for problem in before.problems)
        indexes = catalog.indexes() if bad_index else []
        # A repair that was killed when it had dropped the index has left its wish.
        wanted = None if catalog.indexes() else requested_index(catalog)
        if indexes:
            wanted = indexes[-1].spec, indexes[-1].metric
    derived = [problem for problem in before.problems if problem.part == DERIVED]
    dropped = [index_file(folder, row).relative_to(folder).as_posix() for row in indexes]
    if (folder / NGRAM_FOLDER).exists() and (lost or any(problem.file == NGRAM_FOLDER for problem in derived)):
        dropped.append(NGRAM_FOLDER)
    aside = [folder / problem.file for problem in derived if problem.file != NGRAM_FOLDER]
    remaining = [segment for segment in segments if segment not in lost]
    complete = before.state == "complete"
    place = _free_name(folder / LOST_FOLDER)
    requested = wanted if index else None
    unsure = tuple(str(problem.table) for problem in wrong)
    return _Plan(lost, remaining, documents, indexes, requested, aside, dropped, bool(tables), complete, place, unsure)


def _free_name(folder: Path) -> Path:
    """Choose a folder that no earlier repair has used."""
    number = 1
    while (folder / f"{number:03d}").exists():
        number += 1
    return folder / f"{number:03d}"


def _carry_out(folder: Path, plan: _Plan) -> None:
    """Copy what is damaged, commit, and then take it away."""
    places = [segment_folder(folder, segment.id) for segment in plan.segments]
    with translate_os_errors(plan.kept_in):
        for place in [*places, *plan.set_aside]:
            _keep(place, plan.kept_in / place.relative_to(folder))
        if plan.unsure:
            plan.kept_in.mkdir(parents=True, exist_ok=True)
        if plan.kept_in.exists():
            for file in (folder / CATALOG_FILE, folder / f"{CATALOG_FILE}-wal"):
                if file.exists():
                    shutil.copy2(file, plan.kept_in / file.name)
            sync_folder(plan.kept_in)
    _commit(folder / CATALOG_FILE, plan)
    replaced = [*places, *((folder / name).parent for name in plan.dropped if name != NGRAM_FOLDER)]
    with nobody_reading(folder) as sole:  # else the next writer takes away what readers still hold
        at_once = [*plan.set_aside, *(folder / name for name in plan.dropped if name == NGRAM_FOLDER)]
        for place in [*at_once, *(replaced if sole else [])]:
            if place.parent.resolve().is_relative_to(folder.resolve()):  # what lies behind a link is not ours
                _take_away(place)


def _keep(place: Path, target: Path) -> None:
    """Give files a second name, which takes no room, or copy them where that cannot be; links are not followed."""
    if place.is_symlink() or not place.exists():
        return  # a link leads elsewhere, where nothing is touched
    target.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        target.mkdir(exist_ok=True)
        for file in place.iterdir():
            _keep(file, target / file.name)
    elif place.is_file():
        try:
            os.link(place, target)
        except OSError:
            shutil.copy2(place, target)


def _take_away(place: Path) -> None:
    if place.is_symlink() or not place.is_dir():
        place.unlink(missing_ok=True)
    else:
        shutil.rmtree(place, ignore_errors=True)


def _commit(file: Path, plan: _Plan) -> None:
    """Take segments and indexes out of the catalog and number rows anew, all or nothing."""
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                _change_summed(connection, plan)
                if plan.reindex:
                    connection.execute("REINDEX")
                left = [row[0] for row in connection.execute("PRAGMA integrity_check(1)") if row[0] != "ok"]
                if left:
                    raise DatastoreCorrupt(
                        f"{file} cannot be repaired ({left[0]}). Nothing was changed. Restore it from a copy, or build "
                        "the memory again in another folder."
                    )
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise DatastoreCorrupt(
            f"{file} cannot be repaired ({error}). Restore it from a copy, or build the memory again in another folder."
        ) from None


def _change_summed(connection: sqlite3.Connection, plan: _Plan) -> None:
    """Change the catalog and its sums, where it has them; write those anew that are to be believed."""
    if not there(connection):
        _change(connection, plan)
        return
    tally = DigestUpdates(connection)
    tally.begin(connection)
    _change(connection, plan)
    tally.settle(connection)
    if plan.unsure:
        fill(connection)


def _change(connection: sqlite3.Connection, plan: _Plan) -> None:
    if plan.complete:
        # What was lost keeps its numbers: nothing that comes later may be taken for it.
        for fact, table, column in (("next_segment", "segments", "id"), ("next_document", "documents", "number")):
            (last,) = connection.execute(f"SELECT COALESCE(MAX({column}), -1) FROM {table}").fetchone()  # noqa: S608
            _put(connection, fact, max(_number(connection, fact), last + 1))
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    dependent = [name for name in ("documents", "removed") if name in tables]
    for segment in plan.segments:
        gone = connection.execute("SELECT number FROM documents WHERE segment = ?", (segment.id,)).fetchall()
        drop_fields(connection, (number for (number,) in gone))
        for table in dependent:
            connection.execute(f"DELETE FROM {table} WHERE segment = ?", (segment.id,))  # noqa: S608  (ours)
        connection.execute("DELETE FROM segments WHERE id = ?", (segment.id,))
    expected = 0
    for segment in plan.remaining:
        if (by := segment.first_row - expected) != 0:
            connection.execute("UPDATE segments SET first_row = ? WHERE id = ?", (expected, segment.id))
            for table in dependent:
                connection.execute(
                    f"UPDATE {table} SET first_row = first_row - ? WHERE segment = ?",  # noqa: S608
                    (by, segment.id),
                )
        expected += segment.rows
    for row in plan.indexes:
        connection.execute("DELETE FROM indexes WHERE id = ?", (row.id,))
    if plan.segments:
        # Whoever has the memory open sees by these that its content, and the numbers of its rows, have changed.
        for fact in ("generation", "layout"):
            _put(connection, fact, _number(connection, fact) + 1)
    if plan.segments or plan.indexes:
        connection.execute("DELETE FROM meta WHERE key = 'index_skipped'")
        _put(connection, REQUESTED_INDEX, None if plan.requested is None else request_index(*plan.requested))
    _forget_choices(connection, plan)


def _forget_choices(connection: sqlite3.Connection, plan: _Plan) -> None:
    """Take out what was tuned for a gate that is missing or set aside: nobody could open it."""
    lost = {place.name for place in plan.set_aside if place.parent.name == GATES_FOLDER}
    row = connection.execute("SELECT value FROM meta WHERE key = 'choices'").fetchone()
    choices: Any = json.loads(row[0]) if row else None
    if not lost or not isinstance(choices, dict):
        return
    left = {key: choice for key, choice in choices.items() if gate_of(choice) not in lost}
    _put(connection, "choices", left)
    row = connection.execute("SELECT value FROM meta WHERE key = 'chosen'").fetchone()
    if row and json.loads(row[0]) not in left:
        _put(connection, "chosen", None)


def _number(connection: sqlite3.Connection, fact: str) -> int:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (fact,)).fetchone()
    found: Any = json.loads(row[0]) if row else 0
    return found if isinstance(found, int) else 0


def _put(connection: sqlite3.Connection, fact: str, value: Any) -> None:
    connection.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (fact, json.dumps(value, sort_keys=True)),
    )


def _index_again(folder: Path, plan: _Plan, wait: float, progress: Progress) -> str | None:
    """Make the index again as it was; a memory that has become too small for it is searched exactly."""
    if plan.requested is None or not plan.complete:
        return None
    try:
        return build_requested_index(folder, *plan.requested, wait=wait, progress=progress)
    except DatastoreBusy:
        raise  # the wish stays, for the next repair
    except KnnlmError:
        cancel_requested_index(folder, wait=wait)
        return None
