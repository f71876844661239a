"""A flipped bit in a catalog is noticed, and never changes an answer silently."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import textwrap
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import knnlm
from helpers.checksums import sums_of, written_sums
from helpers.cli import knnlm as command
from helpers.stores import documents
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.rewrite import derive
from knnlm.datastore.schema import SegmentRow, StoredDocument
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, KnnlmError
from knnlm.ingest.build import add, build
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify

FILE = "catalog.db"
FIXED = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@pytest.fixture(scope="module")
def changed_store(lm, tmp_path_factory):
    """A store with a row in every table: pruned to half its keys, indexed, a document added, another removed."""
    folder = tmp_path_factory.mktemp("summed")
    with closing(build(documents(6), folder / "built", lm=lm, segment_entries=120)) as store:
        keep, counts = torch.arange(0, store.key_count, 2), torch.full((store.key_count,), 2.0)
        derive(store, folder / "store", keep=keep, counts=counts).close()
    add([knnlm.Document("ö", "näher/🙂.txt", "A model that has a memory can learn.")], folder / "store", lm=lm)
    remove(folder / "store", document="d2")
    with closing(Datastore.open(folder / "store")) as store:
        build_index(store, "Flat")
    return folder / "store"


@pytest.fixture
def store_path(changed_store, tmp_path):
    shutil.copytree(changed_store, tmp_path / "store")
    return tmp_path / "store"


def fresh(changed_store: Path, folder: Path) -> Path:
    path = folder / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(changed_store, path)
    return path


def answers(path: Path) -> dict[str, object]:
    """Return all results that a reader can get from a store, in every way."""
    with closing(Datastore.open(path)) as store:
        keys = torch.arange(store.key_count)
        return {
            "one by one": [store.document_at(row) for row in range(0, store.entry_count, 5)],
            "documents": list(store.documents()),
            "selected": store.catalog.select("source GLOB ?", ["text*"]),
            "by hash": [store.holds(one.text) for one in documents(7)],
            "count": store.catalog.document_count(),
            "segments": store.segments,
            "removed": store.catalog.removed(),
            "indexes": store.catalog.indexes(),
            "metadata": store.catalog.metadata(),
            "keys": store.take(keys).tolist(),
            "rows": store.entries_of(keys).tolist(),
            "counts": store.counts(keys).tolist(),
            "values": store.values(torch.arange(store.entry_count)).tolist(),
            "near": open_index(store).search(store.take(keys[:2]), 3).ids.tolist(),
        }


@pytest.fixture(scope="module")
def sound(changed_store):
    return answers(changed_store)


def same_sums(path: Path) -> bool:
    return sums_of(path / FILE) == written_sums(path / FILE)


def test_every_command_writes_the_specified_digests(lm, tmp_path, model_folder, capfd):
    path = tmp_path / "m"
    store = build(documents(5), path, lm=lm, segment_entries=100)
    assert same_sums(path)
    assert set(written_sums(path / FILE)) == {"meta", "segments", "documents 0"}
    build_index(store, "Flat")
    store.close()
    assert same_sums(path)
    add(documents(3, start=20), path, lm=lm)
    assert same_sums(path)
    remove(path, document="d1")
    remove(path, source="text.jsonl:2*")
    assert same_sums(path)
    assert "removed" in written_sums(path / FILE)
    assert compact(path, segment_entries=150).purged
    assert same_sums(path)
    assert "removed" not in written_sums(path / FILE)
    (tmp_path / "t.txt").write_text("The memory of a model is a list of contexts. " * 8)
    options = ("--model", model_folder, "--memories", "knn", "--weights", "fixed")
    assert command(capfd, "tune", path, tmp_path / "t.txt", *options)[0] == 0
    assert same_sums(path)
    build(documents(3, start=30), tmp_path / "n", lm=lm).close()
    merge([path, tmp_path / "n"], tmp_path / "both", index="Flat")
    assert same_sums(tmp_path / "both")
    with closing(Datastore.open(tmp_path / "both")) as both:
        derive(both, tmp_path / "half", keep=torch.arange(0, both.key_count, 2)).close()
    assert same_sums(tmp_path / "half")
    data = bytearray((tmp_path / "both/segments/000000/keys.npy").read_bytes())
    data[-1] ^= 1
    (tmp_path / "both/segments/000000/keys.npy").write_bytes(data)
    assert repair(tmp_path / "both").lost
    assert same_sums(tmp_path / "both")
    assert verify(tmp_path / "both", deep=True).sound


def test_failed_change_leaves_the_digests_unchanged(store_path):
    before = written_sums(store_path / FILE)
    with closing(Catalog.open(store_path / FILE, write=True)) as catalog:
        with suppress(ZeroDivisionError), catalog.change():
            catalog.write_metadata(colour="green")
            _ = 1 / 0
        assert written_sums(store_path / FILE) == before
        catalog.put(colour="red")
        with catalog.change() as connection:
            connection.execute("UPDATE documents SET source = upper(source)")
            connection.execute("DELETE FROM removed")
    assert written_sums(store_path / FILE) != before
    assert same_sums(store_path)


def cells(path: Path) -> list[tuple[str, str, object, str, str]]:
    """Every cell of every table: (table, key column, key, column, type)."""
    found = []
    with closing(sqlite3.connect(path / FILE)) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            for row in connection.execute(f"SELECT * FROM {table} NOT INDEXED").fetchall():
                found += [(table, columns[0], row[0], name, type(cell).__name__)
                          for name, cell in zip(columns, row, strict=True) if cell is not None]  # fmt: skip
    return sorted(found, key=repr)


def turn(path: Path, cell: tuple[str, str, object, str, str], bit: int) -> bool:
    """Turn one bit of a cell over; False where SQLite itself does not take it."""
    table, key_column, key, column, kind = cell
    with closing(sqlite3.connect(path / FILE, isolation_level=None)) as connection:
        (value,) = connection.execute(f"SELECT {column} FROM {table} WHERE {key_column} = ?", (key,)).fetchone()
        if kind == "int":
            new, place = value ^ (1 << bit % 62), "?"
        elif kind == "float":
            (number,) = struct.unpack("<Q", struct.pack("<d", value))
            new, place = struct.unpack("<d", struct.pack("<Q", number ^ (1 << bit % 64)))[0], "?"
        else:
            data = bytearray(value.encode())
            data[bit // 8 % len(data)] ^= 1 << bit % 8
            new, place = bytes(data), "CAST(? AS TEXT)"
        try:
            connection.execute(f"UPDATE {table} SET {column} = {place} WHERE {key_column} = ?", (new, key))
        except sqlite3.Error:
            return False
    return True


@settings(max_examples=60, **FIXED)
@given(data=st.data())
def test_flipped_bit_of_any_cell_is_found_by_verify_and_changes_no_result(data, changed_store, tmp_path):
    path = fresh(changed_store, tmp_path)
    tables = sorted({cell[0] for cell in cells(path)})
    assert tables == ["digests", "documents", "indexes", "meta", "removed", "segments"]
    table = data.draw(st.sampled_from(tables))
    cell = data.draw(st.sampled_from([cell for cell in cells(path) if cell[0] == table]))
    if not turn(path, cell, data.draw(st.integers(0, 1 << 16))):
        return
    found = verify(path)
    assert not found.sound
    assert all(problem.file == FILE for problem in found.problems if problem.kind == "table")
    with pytest.raises(KnnlmError) as caught:
        answers(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=80, **FIXED)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_anywhere_in_the_catalog_is_found_or_changes_nothing(place, bit, changed_store, sound, tmp_path):
    """A bit of a page that is free, or of a field that nobody reads, changes no answer; any other is noticed."""
    path = fresh(changed_store, tmp_path)
    assert not (path / f"{FILE}-wal").exists()
    data = bytearray((path / FILE).read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (path / FILE).write_bytes(data)
    report = verify(path)
    try:
        found = answers(path)
    except KnnlmError:
        assert not report.sound
        return
    assert not {name for name in sound if found[name] != sound[name]}


def test_damage_stays_detected_after_changes_of_other_rows(store_path, lm):
    assert turn(store_path, ("documents", "number", 4, "source", "str"), 3)
    with pytest.raises(
        DatastoreCorrupt, match=r"catalog\.db is corrupt: checksum mismatch .*documents 0.*knnlm repair"
    ):
        remove(store_path, document="d0")
    add(documents(1, start=40), store_path, lm=lm)
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "Flat")
        with pytest.raises(DatastoreCorrupt, match="documents 0"):
            store.document_at(0)
        with pytest.raises(DatastoreCorrupt, match="documents 0"):
            list(store.documents())
    assert {problem.table for problem in verify(store_path).problems} == {"documents 0"}
    with closing(Datastore.open(store_path, check=False)) as store:  # without checks there is no error
        assert len(list(store.documents())) == 7


def catalog_of(path: Path, count: int) -> Catalog:
    """A catalog of many documents of ten rows, without arrays."""
    path.mkdir()
    catalog = Catalog.create(path / FILE, {"state": "complete"})
    listed = [StoredDocument(n, f"d{n}", "s", 0, 10 * n, 10, f"{n:064d}") for n in range(count)]
    catalog.add_segment(SegmentRow(0, 0, 10 * count, 1.0, "", ""), listed)
    return catalog


def test_document_lookup_reads_one_block_of_documents(tmp_path):
    catalog_of(tmp_path / "m", 3000).close()
    assert set(written_sums(tmp_path / "m" / FILE)) == {
        "meta", "segments", "documents 0", "documents 1", "documents 2",
    }  # fmt: skip
    assert turn(tmp_path / "m", ("documents", "number", 1500, "id", "str"), 0)
    with closing(Catalog.open(tmp_path / "m" / FILE)) as catalog:
        assert [catalog.document_at(row).number for row in (0, 10_239, 29_999)] == [0, 1023, 2999]
        with pytest.raises(DatastoreCorrupt, match=r"checksum mismatch .*documents 1"):
            catalog.document_at(20_479)
        with pytest.raises(DatastoreCorrupt, match=r"checksum mismatch .*documents 1"):
            catalog.document_count()


def test_readers_report_no_damage_during_a_write(tmp_path):
    """A catalog and its sums are of one moment, also for one who holds no snapshot."""
    catalog_of(tmp_path / "m", 300).close()
    script = textwrap.dedent("""
        import sys
        from contextlib import closing, suppress
        from pathlib import Path
        from knnlm.datastore.catalog import Catalog, StoredDocument
        with closing(Catalog.open(Path(sys.argv[1]) / "catalog.db", write=True)) as catalog:
            print("begun", flush=True)
            for number in range(300, 10**9):
                with catalog.change() as connection:
                    catalog.write_metadata(counter=number)
                    catalog.put_documents([StoredDocument(number, "x", "s", 0, 3000, 0, "")])
                    connection.execute("DELETE FROM documents WHERE number = ?", (number - 5,))
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(knnlm.__file__).parent.parent)}
    arguments = [sys.executable, "-c", script, str(tmp_path / "m")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout.readline() == "begun\n"
        seen = []
        for turn_ in range(40):
            with closing(Catalog.open(tmp_path / "m" / FILE, hold=bool(turn_ % 2))) as catalog:
                assert catalog.document_count() == 300
                catalog.segments()
                assert catalog.mismatched_parts() == []
                seen.append(catalog.get("counter") or 0)
    finally:
        process.kill()
        process.wait()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


@settings(max_examples=25, **FIXED)
@given(data=st.data())
def test_repair_of_a_flipped_bit_makes_the_store_sound_or_changes_nothing(data, changed_store, tmp_path):
    path = fresh(changed_store, tmp_path)
    chosen = [cell for cell in cells(path) if cell[3] not in ("key", "part")]
    table = data.draw(st.sampled_from(sorted({cell[0] for cell in chosen})))
    cell = data.draw(st.sampled_from([cell for cell in chosen if cell[0] == table]))
    if not turn(path, cell, data.draw(st.integers(0, 1 << 16))):
        return
    assert not verify(path).sound
    before = (path / FILE).read_bytes()
    try:
        planned = repair(path, dry_run=True)
    except DatastoreCorrupt:
        message = r"cannot be repaired.*Nothing was changed\. Restore .* from a backup"
        with pytest.raises(DatastoreCorrupt, match=message):
            repair(path)
        assert (path / FILE).read_bytes() == before
        return
    assert not verify(path).sound
    done = repair(path)
    assert (done.lost, done.unverified) == (planned.lost, planned.unverified)
    assert done.lost or done.unverified or done.dropped  # never silently
    assert verify(path, deep=True).sound


def test_catalog_text_that_is_not_utf8_is_refused(store_path):
    data = (store_path / FILE).read_bytes()
    assert data.count(b"text.jsonl:4") == 1
    damaged = data.replace(b"text.jsonl:4", b"te\xf8t.jsonl:4")
    (store_path / FILE).write_bytes(damaged)
    assert not verify(store_path).sound
    with pytest.raises(DatastoreCorrupt, match="is corrupt"):
        answers(store_path)
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: catalog\.db.*Restore catalog\.db from a backup"):
        repair(store_path)
    assert (store_path / FILE).read_bytes() == damaged


def test_damaged_documents_that_fit_the_files_are_kept_and_reported(store_path, capfd):
    with closing(sqlite3.connect(store_path / FILE, isolation_level=None)) as connection:
        connection.execute("UPDATE documents SET source = 'elsewhere' WHERE number = 3")
    done = repair(store_path)
    assert (done.lost, done.unverified) == ((), ("documents 0",))
    assert (done.kept_in / FILE).exists()
    assert verify(store_path, deep=True).sound
    with closing(Datastore.open(store_path)) as store:
        assert "elsewhere" in {one.source for one in store.documents()}
    with closing(sqlite3.connect(store_path / FILE, isolation_level=None)) as connection:
        connection.execute("UPDATE documents SET source = 'elsewhere again' WHERE number = 3")
    code, out, _ = command(capfd, "repair", store_path)
    assert code == 0
    assert "unverified: documents 0 of the catalog" in out


@pytest.mark.parametrize(
    "statement",
    [
        """UPDATE meta SET value = '"another"' WHERE key = 'keys' OR key = 'window'""",
        "UPDATE segments SET scale = 3.25 WHERE id = 0",
        "DELETE FROM digests",
    ],
)
def test_rows_without_a_matching_digest_are_refused(store_path, statement):
    with closing(sqlite3.connect(store_path / FILE, isolation_level=None)) as connection:
        connection.execute(statement)
    before = (store_path / FILE).read_bytes()
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: catalog.db.*Nothing was changed"):
        repair(store_path)
    assert (store_path / FILE).read_bytes() == before
    with pytest.raises(DatastoreCorrupt):
        Datastore.open(store_path)


def test_index_with_a_damaged_row_is_built_again(store_path):
    with closing(sqlite3.connect(store_path / FILE, isolation_level=None)) as connection:
        connection.execute("UPDATE indexes SET entries = entries + 7, metric = 'l2'")
    with (
        closing(Datastore.open(store_path)) as store,
        pytest.raises(DatastoreCorrupt, match=r"checksum mismatch .*in indexes"),
    ):
        open_index(store)
    assert repair(store_path).index == "Flat"
    assert verify(store_path, deep=True).sound


@given(st.lists(st.tuples(st.sampled_from("pdr"), st.integers(0, 40), st.text(max_size=5)), max_size=12))
@example([("p", 0, "\x00"), ("p", 0, "\x00\x00"), ("p", 1, "é"), ("d", 0, ""), ("r", 0, "x")])
@settings(max_examples=15)
def test_digests_match_after_any_changes(tmp_path_factory, steps):
    """Of metadata and documents, put, deleted and renamed in any order."""
    path = tmp_path_factory.mktemp("any") / "m"
    with closing(catalog_of(path, 20)) as catalog:
        for kind, number, text in steps:
            with catalog.change() as connection:
                if kind == "p":
                    catalog.write_metadata(**{f"fact {number}": text})
                elif kind == "d":
                    connection.execute("DELETE FROM documents WHERE number >= ?", (number,))
                else:
                    connection.execute("UPDATE documents SET number = number + 2000, id = ?", (text,))
        assert catalog.mismatched_parts() == []
    assert same_sums(path)
