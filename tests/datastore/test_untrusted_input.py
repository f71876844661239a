"""Untrusted stores: opening one succeeds or raises an error of knnlm, whatever it contains."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import knnlm
from helpers.checksums import seal
from helpers.damage import change, mutate, use
from helpers.stores import BESIDE, documents
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.rewrite import derive, principal_components
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import open_suffix_array
from knnlm.errors import DatastoreCorrupt, DatastoreError, IndexInvalid, KnnlmError
from knnlm.ingest.build import build
from knnlm.io import checksum
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify

SOURCE = Path(knnlm.__file__).parent


@pytest.fixture(scope="module")
def mapped(lm, tmp_path_factory):
    """Return a small store with all features: pruned, counted, mapped, indexed, with a suffix array."""
    folder = tmp_path_factory.mktemp("hostile")
    with closing(build(documents(4), folder / "built", lm=lm, segment_entries=80)) as store:
        keep, counts = torch.arange(0, store.key_count, 2), torch.full((store.key_count,), 2.0)
        made = derive(store, folder / "store", keep=keep, counts=counts, key_map=principal_components(store, 6))
    build_index(made, "Flat")
    open_suffix_array(made)
    made.close()
    return folder / "store"


@pytest.fixture
def store_path(mapped, tmp_path):
    shutil.copytree(mapped, tmp_path / "store")
    return tmp_path / "store"


def survives(path: Path) -> bool:
    """Use a store; True where it is sound, False where it is refused. Anything else is raised."""
    verify(path, deep=True, trust_index=False)
    try:
        use(path)
    except KnnlmError:
        return False
    return True


def damaged_copy(store_path: Path, folder: Path, names: list[str], draw) -> tuple[Path, str]:
    """Copy a store and change one of these files of it; return the copy and the name of the file."""
    path = folder / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(store_path, path)
    name = draw(st.sampled_from(names))
    (path / name).write_bytes(mutate((path / name).read_bytes(), draw))
    return path, name


def files(path: Path, *, but: str = "never") -> list[str]:
    return sorted(
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and file.name not in BESIDE and but not in file.name
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_store_with_damaged_bytes_is_refused_or_works(data, mapped, tmp_path):
    """Checksums are on; FAISS reads only what has the right one, so it is never reached by a mutated file."""
    path, _ = damaged_copy(mapped, tmp_path, files(mapped), data.draw)
    survives(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_with_matching_checksums_are_refused_or_work(data, mapped, tmp_path):
    """As a stranger would make it: every checksum is right, so each reader must stand on its own."""
    names = [name for name in files(mapped, but="faiss") if name != "catalog.db"]
    path, name = damaged_copy(mapped, tmp_path, names, data.draw)
    match_checksums(path, name)
    survives(path)


def match_checksums(path: Path, name: str) -> None:
    """Write the checksum that a file has now to where it is compared with."""
    import json

    new = checksum(path / name)
    if name.startswith("segments/"):
        column = Path(name).stem + "_sha256"
        change(path, f"UPDATE segments SET {column} = ? WHERE id = ?", new, int(name.split("/")[1]))
    elif name == "map.safetensors":
        with closing(sqlite3.connect(path / "catalog.db", isolation_level=None)) as connection:
            (text,) = connection.execute("SELECT value FROM meta WHERE key = 'map'").fetchone()
        change(path, "UPDATE meta SET value = ? WHERE key = 'map'", json.dumps({**json.loads(text), "sha256": new}))
    if name != "ngram/metadata.json":
        try:
            with closing(Datastore.open(path)) as store:
                fingerprint = store.fingerprint
        except KnnlmError:
            return
        metadata = json.loads((path / "ngram/metadata.json").read_text()) | {"fingerprint": fingerprint}
        if name.startswith("ngram/"):
            metadata[Path(name).stem + "_sha256"] = new
        (path / "ngram/metadata.json").write_text(json.dumps(metadata))


VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.sampled_from(["[" * 3000, "9" * 6000, "1e999", "{}", "[]", "null", "NaN", "-1"]),
)  # fmt: skip


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_in_any_cell_of_the_catalog_is_refused_or_works(data, mapped, tmp_path):
    path = tmp_path / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(mapped, path)
    with closing(sqlite3.connect(path / "catalog.db", isolation_level=None)) as connection:
        table = data.draw(st.sampled_from(["meta", "segments", "documents", "indexes"]))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        key = columns[0]
        keys = [row[0] for row in connection.execute(f"SELECT {key} FROM {table} ORDER BY {key}")]
        column, row = data.draw(st.sampled_from(columns)), data.draw(st.sampled_from(keys))
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (data.draw(VALUES), row))
        except sqlite3.Error:
            return  # SQLite itself does not take it
    if data.draw(st.booleans(), label="the sums are made right"):
        seal(path / "catalog.db")
    survives(path)


def test_damaged_index_is_never_passed_to_faiss(store_path, monkeypatch):
    """Reading one could crash the process, so what is counted is whether it is reached."""
    import faiss

    reached = []
    monkeypatch.setattr(faiss, "read_index", lambda *args: reached.append(args))
    file = store_path / "index/000000/index.faiss"
    sound = file.read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(sound), 20).tolist():
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 255]) + sound[place + 1 :])
        with closing(Datastore.open(store_path)) as store, pytest.raises(IndexInvalid, match="checksum mismatch"):
            open_index(store)
        assert not verify(store_path, deep=True).sound
    assert not reached
    file.write_bytes(sound)
    with closing(Datastore.open(store_path, trust_index=False)) as store:
        assert type(open_index(store)).__name__ == "ExactIndex"
    assert not reached


def test_index_that_crashes_faiss_is_rebuilt_without_being_read(store_path):
    file = store_path / "index/000000/index.faiss"
    file.write_bytes(b"IxF2" + b"\xff" * 4096)
    change(store_path, "UPDATE indexes SET sha256 = ?", checksum(file))
    with closing(Datastore.open(store_path, trust_index=False)) as store:
        assert build_index(store, "Flat") == "Flat"
    assert verify(store_path, deep=True).sound


@pytest.mark.parametrize(
    "name", ["segments/000001/keys.npy", "segments/000001", "segments", "index/000000/index.faiss", "map.safetensors",
             "ngram/text.npy", "ngram/metadata.json", "catalog.db"],
)  # fmt: skip
def test_link_outside_the_store_is_not_followed(store_path, tmp_path, name):
    outside = tmp_path / "outside"
    shutil.move(store_path / name, outside)
    (store_path / name).symlink_to(outside)
    with pytest.raises(DatastoreCorrupt, match="outside of the store"):
        use(store_path)
    found = verify(store_path, deep=True)
    assert any("link" in problem.message or "outside" in problem.message for problem in found.problems)
    # A link that stays inside is as good as a file, and so is a store that is itself behind a link.
    (store_path / name).unlink()
    shutil.move(outside, store_path / "moved")
    if name != "catalog.db":
        (store_path / name).symlink_to(os.path.relpath(store_path / "moved", (store_path / name).parent))
        (tmp_path / "alias").symlink_to(store_path)
        use(tmp_path / "alias")


@pytest.mark.parametrize("name", ["writer.lock", "index", "segments", "segments/999999", "index/000007", "mixtures"])
def test_writers_do_not_change_the_target_of_a_link(store_path, tmp_path, name):
    """Writers remove what their catalog does not know, and opening a lock empties its file."""
    precious = tmp_path / "precious"
    (precious / "letters").mkdir(parents=True)
    (precious / "letters/a.txt").write_text("dear")
    (precious / "000001").mkdir()
    (precious / "000001/b.txt").write_text("sir")
    before = files(precious)
    place = store_path / name
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(precious / "letters/a.txt" if name == "writer.lock" else precious)

    def index():
        with closing(Datastore.open(store_path, trust_index=False)) as store:
            build_index(store, "Flat")

    for act in (
        index,
        lambda: repair(store_path),
        lambda: repair(store_path, dry_run=True),
        lambda: survives(store_path),
    ):
        with suppress(KnnlmError):
            act()
        assert files(precious) == before
        assert (precious / "letters/a.txt").read_text() == "dear"
    assert not (store_path / "lost").exists() or all(not file.is_symlink() for file in (store_path / "lost").rglob("*"))


@pytest.mark.parametrize("name", ["segments/000000/keys.npy", "map.safetensors", "catalog.db", "ngram/metadata.json"])
def test_pipe_without_a_writer_does_not_hang(store_path, name):
    (store_path / name).unlink()
    os.mkfifo(store_path / name)
    begin = time.perf_counter()
    with pytest.raises(DatastoreError):
        use(store_path)
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW endless AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT * FROM c",
        "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM documents; END",
        "CREATE TABLE more (a INTEGER, b TEXT GENERATED ALWAYS AS (zeroblob(a)))",
        "CREATE TABLE more (a INTEGER CHECK (length(zeroblob(a)) > 0))",
        "CREATE INDEX heavy ON documents(length(zeroblob(entries)))",
        "CREATE VIRTUAL TABLE words USING fts5(a)",
    ],
)
def test_catalog_with_computed_values_is_refused_before_it_is_read(store_path, statement):
    change(store_path, statement)
    with pytest.raises(DatastoreCorrupt, match="which does not belong into a catalog"):
        Datastore.open(store_path)
    assert not verify(store_path).sound


def test_table_replaced_by_an_endless_view_is_refused(store_path):
    change(store_path, "DROP TABLE meta")
    endless = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT 'format' AS key, x AS value FROM c"
    )
    change(store_path, f"CREATE VIEW meta AS {endless} WHERE x < 0")
    begin = time.perf_counter()
    with pytest.raises(DatastoreCorrupt, match="the view 'meta'"):
        Datastore.open(store_path)
    assert time.perf_counter() - begin < 10


def test_journal_cannot_make_sqlite_touch_another_file(store_path, tmp_path):
    """A journal may name a file that SQLite deletes when it has played the journal back."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = str(victim).encode()
    record = (0).to_bytes(4, "big") + name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big")
    magic = bytes.fromhex("d9d505f920a163d7")
    size = (store_path / "catalog.db").stat().st_size // 4096
    header = magic + b"".join(number.to_bytes(4, "big") for number in (0, 7, size, 512, 4096))
    (store_path / "catalog.db-journal").write_bytes(header.ljust(512, b"\0") + record + magic)
    with pytest.raises(DatastoreCorrupt, match="names another file"):
        Datastore.open(store_path)
    assert victim.read_text() == "precious"
    (store_path / "catalog.db-journal").unlink()
    for suffix in ("-journal", "-wal"):
        (store_path / f"catalog.db{suffix}").symlink_to(victim)
        with pytest.raises(DatastoreCorrupt):
            Datastore.open(store_path)
        (store_path / f"catalog.db{suffix}").unlink()
    assert victim.read_text() == "precious"
    use(store_path)


def npy(shape: str, *, dtype: str = "<f2", length: int | None = None) -> bytes:
    """A header that promises a shape, and no data."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(118) if length is None else text.ljust(length)
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        npy("(9223372036854775807, 6)"),
        npy("(" + "9" * 300 + ",)"),
        npy("(-1, 6)"),
        npy("(3, 6)", dtype="|O"),
        npy("__import__('os').system('touch executed')"),
        npy("(" * 90 + ")" * 90, length=300),
        b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little"),
        b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535,
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85R.",
        b"",
    ],
)
def test_header_with_huge_or_malicious_metadata_allocates_and_runs_nothing(store_path, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (store_path / "segments/000000/keys.npy").write_bytes(data)
    match_checksums(store_path, "segments/000000/keys.npy")
    with pytest.raises(DatastoreCorrupt, match=r"segments/000000/keys\.npy"):
        Datastore.open(store_path)
    assert not verify(store_path, deep=True).sound
    assert not (tmp_path / "executed").exists()


def test_huge_declared_sizes_do_not_use_ram(store_path, lm):
    """With 300 MB more than Python, torch and the store need; each declared size is terabytes."""
    script = """
        import resource, sys
        from pathlib import Path
        from helpers.damage import use
        from knnlm.errors import KnnlmError
        from knnlm.maintenance.repair import repair
        from knnlm.maintenance.verify import verify
        paths = [Path(path) for path in sys.argv[1:]]
        use(paths[0])
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 300_000_000,) * 2)
        for path in paths[1:]:
            verify(path)
            try:
                use(path)
            except KnnlmError as error:
                print(type(error).__name__)
    """
    copies = [store_path.parent / f"copy-{number}" for number in range(5)]
    for copy in copies:
        shutil.copytree(store_path, copy)
    change(copies[0], "UPDATE segments SET entries = 1000000000000, kept = 1000000000000 WHERE id = 0")
    header = (1 << 40).to_bytes(8, "little")
    (copies[1] / "map.safetensors").write_bytes(header + (copies[1] / "map.safetensors").read_bytes()[8:])
    match_checksums(copies[1], "map.safetensors")
    os.truncate(copies[2] / "ngram/metadata.json", 1 << 40)  # nothing but a size
    os.truncate(copies[3] / "segments/000000/values.npy", 1 << 40)
    vocabulary = "UPDATE meta SET value = json_set(value, '$.vocab_size', 2147483646) WHERE key = 'model'"
    change(copies[4], vocabulary)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent.parent}:{SOURCE.parent}",
        "OMP_NUM_THREADS": "1",
    }
    arguments = [sys.executable, "-c", textwrap.dedent(script), str(store_path), *map(str, copies)]
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["DatastoreCorrupt"] * 5


def test_source_code_never_unpickles():
    """What executes code when data is read: pickle, torch.load, numpy with allow_pickle, eval, remote code."""
    import ast

    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert called not in ("eval", "exec", "pickle.load", "pickle.loads"), (file, node.lineno)
                assert called != "torch.load" or given.get("weights_only") == "True", (file, node.lineno)
                assert given.get("allow_pickle", "False") == "False", (file, node.lineno)
                assert given.get("trust_remote_code", "False") == "False", (file, node.lineno)


def test_number_cannot_name_a_path_outside_the_store(store_path):
    """Folders are named by whole numbers of the catalog, so a name with dots is no number."""
    change(store_path, "PRAGMA writable_schema = 0")
    with closing(sqlite3.connect(store_path / "catalog.db", isolation_level=None)) as connection:
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute("UPDATE indexes SET id = '../../etc'")
        connection.execute("UPDATE indexes SET id = -1")
    seal(store_path / "catalog.db")
    with closing(Catalog.open(store_path / "catalog.db")) as catalog, pytest.raises(DatastoreCorrupt, match="-1 as id"):
        catalog.indexes()
