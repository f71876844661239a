"""Repair a damaged store: keep everything that is intact and list what is lost.

The unit of loss is a segment, because a checksum covers a whole file. Damaged files are copied to the folder `lost`
first, then one transaction removes them from the catalog, and only then are the originals deleted. A repair that is
killed leaves the store as it was, or is finished by the next one.

A damaged catalog cannot be corrected. Tables that the files confirm (segments without a scale, documents that fill
their segments) are kept and reported as unverified; an index is rebuilt; any other mismatch is refused, with the advice
to restore the catalog from a backup.
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
from knnlm.datastore.digests import DigestUpdates, recompute_digests
from knnlm.datastore.indexes import build_requested_index, cancel_requested_index, request_index, requested_index
from knnlm.datastore.locks import without_readers, writer_lock
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import (
    CATALOG_FILE,
    GATES_FOLDER,
    LOST_FOLDER,
    NGRAM_FOLDER,
    IndexRow,
    SegmentRow,
    segment_folder,
)
from knnlm.datastore.segments import index_file
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, KnnlmError
from knnlm.io import sync_folder, translate_os_errors
from knnlm.maintenance.verify import DERIVED, INDEX, SEGMENT, SQLITE_ERROR, TABLE, Problem, Verification, verify
from knnlm.mixture.saved import gate_of
from knnlm.progress import Progress, silent

_RESTORE = "from a backup, or build the store again in another folder."


@dataclass(frozen=True)
class LostDocument:
    """A document whose tokens or keys are damaged."""

    id: str
    source: str
    tokens: int
    segment: int


@dataclass(frozen=True)
class RepairResult:
    """The damage that a repair found, and what it did."""

    store: Path
    before: Verification
    lost: tuple[LostDocument, ...]
    segments: tuple[int, ...]  # removed segments
    kept_in: Path | None  # the folder with the damaged files
    dropped: tuple[str, ...]  # deleted derived files, which can be rebuilt
    index: str | None  # the index that was rebuilt
    unverified: tuple[str, ...]  # catalog tables that were kept in spite of a checksum mismatch
    documents: int  # after the repair
    tokens: int
    seconds: float


def repair(
    path: str | Path,
    *,
    index: bool = True,
    dry_run: bool = False,
    wait: float = 0.0,
    progress: Progress = silent,
) -> RepairResult:
    """Remove what is damaged, and rebuild the index if there was one; `dry_run` only reports what would be done.

    `wait` is the number of seconds to wait for the store's lock.
    """
    folder, begin = Path(path), time.perf_counter()
    _check_catalog_exists(folder)
    if is_sharded(folder):
        raise DatastoreError(f"{folder} is a sharded store. Repair its shards, each with: knnlm repair SHARD")
    with writer_lock(folder, wait=wait):
        before = verify(folder, deep=True, progress=progress)
        plan = _plan(folder, before, index=index)
        if not before.sound and not dry_run:
            _apply(folder, plan)
    rebuilt = None if dry_run else _rebuild_index(folder, plan, wait, progress)
    after = before if dry_run else verify(folder, deep=not before.sound, progress=progress)
    if not dry_run and not after.sound:
        raise DatastoreCorrupt(f"{folder}: still damaged after the repair: {after.problems[0]}. Build it again.")
    return RepairResult(
        store=folder,
        before=before,
        lost=tuple(plan.lost),
        segments=tuple(segment.id for segment in plan.segments),
        kept_in=plan.kept_in if plan.keeps and (dry_run or plan.kept_in.exists()) else None,
        dropped=tuple(plan.dropped),
        index=rebuilt,
        unverified=tuple(table for table in plan.unverified if table != "indexes"),  # indexes are rebuilt
        documents=after.documents - (len(plan.lost) if dry_run else 0),
        tokens=after.tokens - (sum(document.tokens for document in plan.lost) if dry_run else 0),
        seconds=time.perf_counter() - begin,
    )


@dataclass(frozen=True)
class _RepairPlan:
    """The changes a repair makes."""

    segments: list[SegmentRow]  # to remove
    remaining: list[SegmentRow]
    lost: list[LostDocument]
    indexes: list[IndexRow]  # to drop
    requested: tuple[str, str] | None  # the spec and metric of the index to build afterwards
    set_aside: list[Path]  # damaged trained files
    dropped: list[str]
    reindex: bool  # whether SQLite's own indexes of the catalog are rebuilt
    complete: bool  # False for an unfinished build
    kept_in: Path
    unverified: tuple[str, ...]  # catalog tables to keep in spite of a checksum mismatch

    @property
    def keeps(self) -> bool:
        """Whether any file is copied to the folder `lost`."""
        return bool(self.segments or self.set_aside or self.unverified)


def _check_catalog_exists(folder: Path) -> None:
    if (folder / CATALOG_FILE).is_file():
        return
    segments = len(list((folder / "segments").glob("*"))) if folder.is_dir() else 0
    if not segments:
        raise DatastoreError(f"{folder}: not a store: it has no {CATALOG_FILE}. Make one with: knnlm build")
    raise DatastoreError(
        f"{folder}: {segments:,} segments but no {CATALOG_FILE}, which lists their contents. Nothing was changed. "
        f"Restore {CATALOG_FILE} {_RESTORE}"
    )


def _refuse(folder: Path, problem: Problem) -> None:
    raise DatastoreCorrupt(
        f"{folder}: cannot be repaired: {problem}. Nothing was changed. Restore {problem.file} {_RESTORE}"
    )


def _check_tables(folder: Path, mismatches: list[Problem], segments: list[SegmentRow], lost: list[SegmentRow]) -> None:
    """Refuse a catalog table with a checksum mismatch unless the files confirm its contents.

    Files confirm everything of a segment but its scale; documents and removed ranges must fill their segments; an index
    is rebuilt. Nothing confirms metadata.
    """
    unscaled = all(segment.scale == 1.0 for segment in segments)
    for problem in mismatches:
        table = str(problem.table).partition(" ")[0]
        if table == "meta" or (table == "segments" and not lost and not unscaled):
            _refuse(folder, problem)


def _plan(folder: Path, before: Verification, *, index: bool) -> _RepairPlan:
    """Decide what to remove; raise where a problem cannot be repaired."""
    reparable = (SEGMENT, INDEX, DERIVED, TABLE)
    sqlite_errors = [problem for problem in before.problems if problem.message.startswith(SQLITE_ERROR)]
    for problem in before.problems:
        if problem.kind not in reparable and problem not in sqlite_errors:
            _refuse(folder, problem)
    damaged = {problem.segment for problem in before.problems if problem.kind == SEGMENT}
    mismatches = [problem for problem in before.problems if problem.kind == TABLE]
    with closing(Catalog.open(folder / CATALOG_FILE, compare=False)) as catalog:
        segments = catalog.segments()
        removed = [segment for segment in segments if segment.id in damaged]
        if removed and before.state != "complete":
            # A resumed build starts after its last segment, so all segments after the first damaged one are lost.
            removed = segments[segments.index(removed[0]) :]
        lost = _lost_documents(catalog, removed)
        _check_tables(folder, mismatches, segments, removed)
        bad_index = removed or any(problem.kind == INDEX or problem.table == "indexes" for problem in before.problems)
        indexes = catalog.indexes() if bad_index else []
        # A repair that was killed after it had dropped the index left the request for it.
        requested = None if catalog.indexes() else requested_index(catalog)
        if indexes:
            requested = indexes[-1].spec, indexes[-1].metric
    derived = [problem.file for problem in before.problems if problem.kind == DERIVED]
    dropped = [index_file(folder, row).relative_to(folder).as_posix() for row in indexes]
    if (folder / NGRAM_FOLDER).exists() and (removed or NGRAM_FOLDER in derived):
        dropped.append(NGRAM_FOLDER)
    return _RepairPlan(
        segments=removed,
        remaining=[segment for segment in segments if segment not in removed],
        lost=lost,
        indexes=indexes,
        requested=requested if index else None,
        set_aside=[folder / file for file in derived if file != NGRAM_FOLDER],
        dropped=dropped,
        reindex=bool(sqlite_errors),
        complete=before.state == "complete",
        kept_in=_unused_name(folder / LOST_FOLDER),
        unverified=tuple(str(problem.table) for problem in mismatches),
    )


def _lost_documents(catalog: Catalog, removed: list[SegmentRow]) -> list[LostDocument]:
    """Return the documents of segments that will be removed."""
    return [
        LostDocument(document.id, document.source, document.entries, segment.id)
        for segment in removed
        for document in catalog.documents_of(segment.id)
    ]


def _unused_name(folder: Path) -> Path:
    """Return a folder name that no earlier repair has used."""
    number = 1
    while (folder / f"{number:03d}").exists():
        number += 1
    return folder / f"{number:03d}"


def _apply(folder: Path, plan: _RepairPlan) -> None:
    """Copy damaged files, commit the changes to the catalog, then delete the originals."""
    segments = [segment_folder(folder, segment.id) for segment in plan.segments]
    with translate_os_errors(plan.kept_in):
        for path in [*segments, *plan.set_aside]:
            _keep(path, plan.kept_in / path.relative_to(folder))
        if plan.unverified:
            plan.kept_in.mkdir(parents=True, exist_ok=True)
        if plan.kept_in.exists():
            for file in (folder / CATALOG_FILE, folder / f"{CATALOG_FILE}-wal"):
                if file.exists():
                    shutil.copy2(file, plan.kept_in / file.name)
            sync_folder(plan.kept_in)
    _commit(folder / CATALOG_FILE, plan)
    replaced = [*segments, *((folder / name).parent for name in plan.dropped if name != NGRAM_FOLDER)]
    with without_readers(folder) as unread:  # otherwise the next writer deletes the files that readers still use
        at_once = [*plan.set_aside, *(folder / name for name in plan.dropped if name == NGRAM_FOLDER)]
        for path in [*at_once, *(replaced if unread else [])]:
            if path.parent.resolve().is_relative_to(folder.resolve()):  # nothing behind a link is deleted
                _delete(path)


def _keep(path: Path, target: Path) -> None:
    """Hard-link files, which takes no space, or copy them where that fails; symbolic links are not followed."""
    if path.is_symlink() or not path.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        target.mkdir(exist_ok=True)
        for file in path.iterdir():
            _keep(file, target / file.name)
    elif path.is_file():
        try:
            os.link(path, target)
        except OSError:
            shutil.copy2(path, target)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _commit(file: Path, plan: _RepairPlan) -> None:
    """Remove segments and indexes from the catalog and renumber rows, in one transaction."""
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                _change_with_checksums(connection, plan)
                if plan.reindex:
                    connection.execute("REINDEX")
                errors = [row[0] for row in connection.execute("PRAGMA integrity_check(1)") if row[0] != "ok"]
                if errors:
                    raise DatastoreCorrupt(
                        f"{file}: cannot be repaired ({errors[0]}). Nothing was changed. Restore it {_RESTORE}"
                    )
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise DatastoreCorrupt(
            f"{file}: cannot be repaired ({error}). Nothing was changed. Restore it {_RESTORE}"
        ) from None


def _change_with_checksums(connection: sqlite3.Connection, plan: _RepairPlan) -> None:
    """Change the catalog and its checksums; compute all of them again if a table is kept unverified."""
    if plan.unverified:  # old checksums may be damaged too, so they cannot be updated
        _change(connection, plan)
        recompute_digests(connection)
    else:
        updates = DigestUpdates(connection)
        updates.begin(connection)
        _change(connection, plan)
        updates.write(connection)


def _change(connection: sqlite3.Connection, plan: _RepairPlan) -> None:
    if plan.complete:
        # Lost segments and documents keep their numbers: later ones must not be mistaken for them.
        for name, table, column in (("next_segment", "segments", "id"), ("next_document", "documents", "number")):
            (last,) = connection.execute(f"SELECT COALESCE(MAX({column}), -1) FROM {table}").fetchone()  # noqa: S608
            _put(connection, name, max(_get_int(connection, name), last + 1))
    _remove_segments(connection, plan)
    for row in plan.indexes:
        connection.execute("DELETE FROM indexes WHERE id = ?", (row.id,))
    if plan.segments:
        # Open readers notice by these that the contents and the row numbers have changed.
        for name in ("generation", "layout"):
            _put(connection, name, _get_int(connection, name) + 1)
    if plan.segments or plan.indexes:
        connection.execute("DELETE FROM meta WHERE key = 'index_skipped'")
        _put(connection, REQUESTED_INDEX, None if plan.requested is None else request_index(*plan.requested))
    _remove_tunings(connection, plan)


def _remove_segments(connection: sqlite3.Connection, plan: _RepairPlan) -> None:
    """Delete segments with their documents, and close the gaps in the row numbers."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    dependent = [name for name in ("documents", "removed") if name in tables]
    for segment in plan.segments:
        numbers = connection.execute("SELECT number FROM documents WHERE segment = ?", (segment.id,)).fetchall()
        drop_fields(connection, (number for (number,) in numbers))
        for table in dependent:
            connection.execute(f"DELETE FROM {table} WHERE segment = ?", (segment.id,))  # noqa: S608  (ours)
        connection.execute("DELETE FROM segments WHERE id = ?", (segment.id,))
    expected = 0
    for segment in plan.remaining:
        if (shift := segment.first_entry - expected) != 0:
            connection.execute("UPDATE segments SET first_entry = ? WHERE id = ?", (expected, segment.id))
            for table in dependent:
                connection.execute(
                    f"UPDATE {table} SET first_entry = first_entry - ? WHERE segment = ?",  # noqa: S608
                    (shift, segment.id),
                )
        expected += segment.entries


def _remove_tunings(connection: sqlite3.Connection, plan: _RepairPlan) -> None:
    """Remove saved tunings whose gate is missing or set aside: they could not be opened."""
    lost = {path.name for path in plan.set_aside if path.parent.name == GATES_FOLDER}
    row = connection.execute("SELECT value FROM meta WHERE key = 'tunings'").fetchone()
    tunings: Any = json.loads(row[0]) if row else None
    if not lost or not isinstance(tunings, dict):
        return
    remaining = {key: tuning for key, tuning in tunings.items() if gate_of(tuning) not in lost}
    _put(connection, "tunings", remaining)
    row = connection.execute("SELECT value FROM meta WHERE key = 'active_tuning'").fetchone()
    if row and json.loads(row[0]) not in remaining:
        _put(connection, "active_tuning", None)


def _get_int(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (name,)).fetchone()
    value: Any = json.loads(row[0]) if row else 0
    return value if isinstance(value, int) else 0


def _put(connection: sqlite3.Connection, name: str, value: Any) -> None:
    connection.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (name, json.dumps(value, sort_keys=True)),
    )


def _rebuild_index(folder: Path, plan: _RepairPlan, wait: float, progress: Progress) -> str | None:
    """Rebuild the index as it was; a store that is too small for it now is searched exactly."""
    if plan.requested is None or not plan.complete:
        return None
    try:
        return build_requested_index(folder, *plan.requested, wait=wait, progress=progress)
    except DatastoreBusy:
        raise  # the request stays, for the next repair
    except KnnlmError:
        cancel_requested_index(folder, wait=wait)
        return None
