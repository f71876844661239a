"""Verification names every damaged file; a repair keeps everything that is intact."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knnlm
from helpers.cli import failure
from helpers.cli import knnlm as command
from helpers.damage import change, flip, named, tree
from helpers.output import card_of, random_matrix
from helpers.stores import documents
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.rewrite import derive
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import open_suffix_array
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.ingest.build import build
from knnlm.maintenance import repair as repair_module
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify
from knnlm.memories.output import save_output
from knnlm.mixture.mixture import Mixture


@pytest.fixture(scope="module")
def original(lm, tmp_path_factory):
    """A store of ten documents in five segments, with an index and a suffix array."""
    path = tmp_path_factory.mktemp("original") / "store"
    store = build(documents(10), path, lm=lm, segment_entries=150)
    build_index(store, "IVF4,Flat")
    open_suffix_array(store)
    store.close()
    return path


@pytest.fixture
def store_path(original, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(original, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def pruned(original, tmp_path):
    """A copy with every second key, each counted twice."""
    with closing(Datastore.open(original)) as store:
        keep = torch.arange(0, store.key_count, 2)
        derive(store, tmp_path / "pruned", keep=keep, counts=torch.full((store.key_count,), 2.0)).close()
    return tmp_path / "pruned"


def test_sound_store_has_no_problems_and_is_not_changed(store_path, pruned):
    for path in (store_path, pruned):
        before = tree(path)
        for deep in (False, True):
            found = verify(path, deep=deep)
            assert found.sound, found.problems
            assert not found.notes
        with closing(Datastore.open(path)) as store:
            assert (found.documents, found.tokens) == (10, store.entry_count)
        assert tree(path) == before
    # catalog, 5 × 2 arrays, index, 4 files of the suffix array; pruned: catalog and 5 × 4
    assert [verify(path, deep=True).files for path in (store_path, pruned)] == [16, 21]


def test_flipped_bit_in_any_file_is_found_and_only_that_file_is_named(store_path, pruned):
    for path in (store_path, pruned):
        for name in sorted(tree(path)):
            # The catalog has its own tests; block checksums and what the JSON file describes are rebuilt.
            if name.endswith((".db", ".json", ".sums")):
                continue
            flip(path / name, -3)
            wanted = "ngram" if name.startswith("ngram/") else name
            assert named(verify(path, deep=True)) == {wanted}, name
            flip(path / name, -3)
    assert verify(store_path, deep=True).sound


@settings(max_examples=15)
@given(data=st.data())
def test_truncated_file_is_found_without_reading_it(data, original, tmp_path_factory):
    path = tmp_path_factory.mktemp("truncated") / "store"
    shutil.copytree(original, path)
    name = data.draw(
        st.sampled_from(sorted(name for name in tree(path) if name.startswith("segments/") and name.endswith(".npy")))
    )
    size = (path / name).stat().st_size
    os.truncate(path / name, data.draw(st.integers(0, size - 1)))
    assert named(verify(path)) == {name}
    with pytest.raises(DatastoreCorrupt, match=name.replace("/", ".")):
        Datastore.open(path)


def test_all_problems_are_reported(store_path):
    flip(store_path / "segments/000001/keys.npy", -1)
    (store_path / "segments/000002/values.npy").unlink()
    flip(store_path / "index/000000/index.faiss", 100)
    found = verify(store_path, deep=True)
    assert named(found) == {
        "segments/000001/keys.npy",
        "segments/000002/values.npy",
        "index/000000/index.faiss",
    }
    assert [problem.segment for problem in found.problems] == [1, 2, None]
    assert "missing" in str(found.problems[1])


def test_invalid_numbers_are_found_even_if_the_checksums_match(store_path, pruned):
    """As a faulty or hostile writer would leave them."""
    from knnlm.io import checksum

    cases = [
        (store_path, "keys", np.inf, "keys that are not finite"),
        (store_path, "values", 320, "tokens outside 0 to 319"),
        (store_path, "values", -1, "tokens outside"),
        (pruned, "counts", 0, "not finite and positive"),
        (pruned, "kept", 0, "ascending entries"),
        (pruned, "kept", 10_000, "ascending entries"),
    ]
    for path, name, bad, words in cases:
        file = path / "segments/000001" / f"{name}.npy"
        sound = file.read_bytes()
        array = np.load(file)
        array.reshape(-1)[7] = bad
        np.save(file, array)
        change(path, f"UPDATE segments SET {name}_sha256 = ? WHERE id = 1", checksum(file))
        (problem,) = [found for found in verify(path, deep=True).problems if found.kind == "segment"]
        assert words in problem.message
        file.write_bytes(sound)
        change(path, f"UPDATE segments SET {name}_sha256 = ? WHERE id = 1", checksum(file))


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE segments SET first_entry = first_entry + 1 WHERE id = 2", "segment 2 begins at entry"),
        ("UPDATE segments SET scale = -1.0 WHERE id = 1", "scale -1.0"),
        ("UPDATE segments SET entries = 'many' WHERE id = 1", "'many' as entries"),
        ("UPDATE documents SET first_entry = first_entry - 1 WHERE number = 4", "'d4' has entries"),
        ("UPDATE documents SET entries = entries - 1 WHERE number = 0", "entry .* was expected|belong to no document"),
        ("UPDATE documents SET segment = 77 WHERE number = 9", "1 documents belong to segments"),
        ("DELETE FROM documents WHERE number = 9", "belong to no document"),
        ("UPDATE meta SET value = '\"maybe\"' WHERE key = 'state'", "state of the store is 'maybe'"),
        ("UPDATE meta SET value = '{}' WHERE key = 'window'", "window of the store"),
        ("UPDATE meta SET value = '\"float8\"' WHERE key = 'key_dtype'", "key precision"),
        ("UPDATE meta SET value = '[1, 2]' WHERE key = 'offset'", "offset of the store"),
        ("UPDATE meta SET value = '[' WHERE key = 'model'", "invalid metadata"),
        ("UPDATE indexes SET id = 5", "index/000005"),
    ],
)
def test_inconsistent_catalog_is_described(store_path, statement, words):
    change(store_path, statement)
    found = verify(store_path)
    text = "\n".join(map(str, found.problems))
    assert re.search(words, text), text


def test_damaged_page_of_the_catalog_is_found(store_path):
    data = bytearray((store_path / "catalog.db").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = os.urandom(2000)
    (store_path / "catalog.db").write_bytes(data)
    assert "catalog.db" in named(verify(store_path))


def test_damaged_key_map_is_named(original, tmp_path):
    from knnlm.datastore.rewrite import principal_components

    with closing(Datastore.open(original)) as store:
        derive(store, tmp_path / "m", key_map=principal_components(store, 8)).close()
    assert verify(tmp_path / "m", deep=True).sound
    flip(tmp_path / "m/map.safetensors", -2)
    assert named(verify(tmp_path / "m")) == {"map.safetensors"}
    with pytest.raises(DatastoreCorrupt, match="cannot be repaired: map"):
        repair(tmp_path / "m")


def test_index_of_other_keys_is_found_even_if_its_checksum_matches(store_path):
    from knnlm.io import checksum

    with closing(Datastore.open(store_path)) as store:
        width, rows = store.width, store.key_count
    import faiss

    wrong = faiss.index_factory(width, "Flat")
    wrong.add(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32))
    faiss.write_index(wrong, str(store_path / "index/000000/index.faiss"))
    change(store_path, "UPDATE indexes SET sha256 = ?", checksum(store_path / "index/000000/index.faiss"))
    (problem,) = verify(store_path, deep=True).problems
    assert "belongs to other keys" in problem.message
    assert verify(store_path, deep=True, trust_index=False).sound  # the file is not opened


def test_unfinished_build_verifies_and_leftover_files_are_only_a_note(store_path):
    change(store_path, "UPDATE meta SET value = '\"building\"' WHERE key = 'state'")
    (store_path / "segments/000009.partial").mkdir()
    found = verify(store_path, deep=True)
    assert found.sound
    assert found.state == "building"
    assert any("000009.partial" in note for note in found.notes)


def test_repair_keeps_every_document_of_intact_segments_and_names_the_others(store_path, lm):
    with closing(Datastore.open(store_path)) as store:
        before = {d.id: (d.segment, store.values(torch.arange(d.first_entry, d.first_entry + d.entries)).tolist(),
                         store.take(torch.arange(d.first_entry, d.first_entry + d.entries)))
                  for d in list(store.catalog.documents())}  # fmt: skip
    flip(store_path / "segments/000001/keys.npy", -1)
    damaged = (store_path / "segments/000001/keys.npy").read_bytes()
    planned = repair(store_path, dry_run=True)
    assert not verify(store_path, deep=True).sound  # nothing was changed
    done = repair(store_path)
    assert {document.id for document in done.lost} == {name for name, (segment, *_) in before.items() if segment == 1}
    assert (planned.lost, planned.documents, planned.tokens) == (done.lost, done.documents, done.tokens)
    assert done.index == "IVF4,Flat"
    assert (done.kept_in / "segments/000001/keys.npy").read_bytes() == damaged
    assert verify(store_path, deep=True).sound
    with closing(Datastore.open(store_path)) as store:
        kept = list(store.catalog.documents())
        assert {d.id for d in kept} == set(before) - {document.id for document in done.lost}
        assert store.entry_count == sum(d.entries for d in kept) == done.tokens
        for document in kept:
            rows = torch.arange(document.first_entry, document.first_entry + document.entries)
            assert store.values(rows).tolist() == before[document.id][1]
            assert torch.equal(store.take(rows), before[document.id][2])
            assert store.document_at(int(rows[-1])).id == document.id
        keys = store.take(torch.arange(store.key_count))
        found = open_index(store).search(keys[:20], 1)
        assert found.distances.max() < 1e-6
    # Lost documents can be built again and merged in.
    again = [d for d in documents(10) if d.id in {document.id for document in done.lost}]
    build(again, store_path.parent / "again", lm=lm).close()
    merged = knnlm.merge([store_path, store_path.parent / "again"], store_path.parent / "whole")
    assert merged.documents == 10
    assert repair(store_path).before.sound


def test_damaged_derived_data_is_rebuilt_or_dropped_without_losing_documents(store_path):
    flip(store_path / "index/000000/index.faiss", 60)
    flip(store_path / "ngram/order.npy", -1)
    done = repair(store_path)
    assert (done.lost, done.index, done.kept_in) == ((), "IVF4,Flat", None)
    assert set(done.dropped) == {"index/000000/index.faiss", "ngram"}
    found = verify(store_path, deep=True)
    assert found.sound
    assert found.documents == 10


def test_repair_of_an_unfinished_build_keeps_the_beginning_and_the_build_resumes(lm, tmp_path, original):
    whole = tree(original)
    path = tmp_path / "store"
    shutil.copytree(original, path)
    change(path, "UPDATE meta SET value = '\"building\"' WHERE key = 'state'")
    change(path, "DELETE FROM indexes")
    flip(path / "segments/000002/values.npy", -1)
    done = repair(path)
    assert done.segments == (2, 3, 4)
    build(documents(10), path, lm=lm, segment_entries=150).close()
    assert verify(path, deep=True).sound
    for name in (name for name in whole if name.endswith(".npy") and name.startswith("segments/")):
        assert (path / name).read_bytes() == whole[name]


def test_unrepairable_store_is_not_changed_and_the_error_has_advice(store_path):
    change(store_path, "UPDATE meta SET value = '[1]' WHERE key = 'offset'")
    before = tree(store_path)
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: catalog.db: the offset.*Nothing was changed"):
        repair(store_path)
    assert tree(store_path) == before
    (store_path / "catalog.db").write_bytes(b"not a database at all" * 500)
    with pytest.raises(DatastoreCorrupt, match=r"Restore catalog\.db from a backup"):
        repair(store_path)
    (store_path / "catalog.db").unlink()
    with pytest.raises(DatastoreError, match=r"5 segments but no catalog.db.*build the store again"):
        repair(store_path)
    assert (store_path / "segments/000003/keys.npy").exists()


def test_damaged_sqlite_index_of_the_catalog_is_rebuilt(store_path):
    change(store_path, "PRAGMA writable_schema = 1")
    with closing(sqlite3.connect(store_path / "catalog.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = 1")
        # Empty the index by hash behind SQLite's back.
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'documents_by_hash'").fetchone()
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    data = bytearray((store_path / "catalog.db").read_bytes())
    begin = (page - 1) * size
    data[begin + 3 : begin + 5] = (0).to_bytes(2, "big")  # an empty page: no document is in the index
    data[begin + 5 : begin + 7] = size.to_bytes(2, "big")
    (store_path / "catalog.db").write_bytes(data)
    found = verify(store_path)
    assert found.problems
    assert all("SQLite reports" in problem.message for problem in found.problems)
    done = repair(store_path)
    assert done.lost == ()
    assert verify(store_path, deep=True).sound
    with closing(Datastore.open(store_path)) as store:
        assert all(store.holds(document.text) for document in documents(10))


def test_killed_repair_is_finished_by_the_next(store_path, tmp_path):
    flip(store_path / "segments/000001/keys.npy", -1)
    flip(store_path / "segments/000002/values.npy", -1)
    copies = [tmp_path / f"copy-{number}" for number in range(1, 10)]
    for copy in copies:
        shutil.copytree(store_path, copy)
    # One process that imports everything, and a forked child for each kill.
    script = f"""
        import os, sys
        sys.path[:0] = [{str(Path(__file__).parent.parent)!r}]
        from helpers.kill import Dying
        from knnlm.maintenance import repair as repair_module
        for number, path in enumerate(sys.argv[1:], 1):
            if os.fork() == 0:
                dying = Dying(number)
                for name in ("_keep", "_commit", "_put", "_delete"):
                    setattr(repair_module, name, dying(getattr(repair_module, name)))
                repair_module.repair(path, index=False)
                os._exit(0)
            print(os.waitpid(-1, 0)[1])
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, copies)], check=True, capture_output=True, text=True
    )
    assert process.stdout.split() == ["9"] * len(copies)
    for copy in copies:
        repair(copy, index=False)
        assert verify(copy, deep=True).sound
        with closing(Datastore.open(copy)) as store:
            assert {document.segment for document in store.catalog.documents()} == {0, 3, 4}
        kept = {file.parent.name for file in (copy / "lost").rglob("*.npy")}
        assert kept == {"000001", "000002"}


def test_repair_killed_before_rebuilding_the_index_is_finished_by_the_next(store_path, capfd, monkeypatch):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "IVF2,Flat", metric="ip")
    flip(store_path / "segments/000001/keys.npy", -1)
    with monkeypatch.context() as patched:
        patched.setattr(repair_module, "build_requested_index", lambda *_, **__: os._exit(7))
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                repair(store_path)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with closing(Catalog.open(store_path / "catalog.db")) as catalog:
        assert catalog.indexes() == []
    code, out, _ = command(capfd, "repair", store_path, "--wait", "5")
    assert (code, "no problem; the index IVF2,Flat was rebuilt" in out) == (0, True)
    with closing(Catalog.open(store_path / "catalog.db")) as catalog:
        (row,) = catalog.indexes()
        assert (row.spec, row.metric, catalog.get("requested_index")) == ("IVF2,Flat", "ip", None)
    assert repair(store_path).index is None
    assert verify(store_path, deep=True).sound


def test_commands_report_problems_with_exit_codes(store_path, capfd):
    code, out, _ = command(capfd, "verify", store_path)
    assert code == 0
    assert "no problem (without checksums: --deep)" in out
    flip(store_path / "segments/000001/keys.npy", -1)
    code, out, _ = command(capfd, "verify", store_path, "--deep")
    assert code == 1
    assert "segments/000001/keys.npy: checksum mismatch (SHA-256)" in out
    code, out, _ = command(capfd, "verify", store_path, "--deep", "--json")
    result = json.loads(out)
    assert (code, result["sound"], result["problems"][0]["segment"]) == (1, False, 1)
    code, out, _ = command(capfd, "repair", store_path, "--no-index")
    assert code == 0
    assert "lost: text.jsonl:" in out
    code, out, _ = command(capfd, "repair", store_path, "--json")
    assert json.loads(out)["lost"] == []
    assert "does not exist" in failure(capfd, "verify", store_path / "nowhere")
    assert "not a store" in failure(capfd, "repair", store_path.parent)


def test_tuned_gate_is_sound_and_a_damaged_one_is_set_aside(store_path, lm):
    held_out = documents(6, words=40, start=50)
    Mixture.open(store_path, lm).tune(held_out, weights="gated")
    (gate,) = (store_path / "mixtures").glob("*.safetensors")
    found = verify(store_path, deep=True)
    assert found.sound, found.problems
    assert repair(store_path).kept_in is None
    flip(gate, -2)
    assert named(verify(store_path)) == {f"mixtures/{gate.name}"}
    assert repair(store_path).kept_in is not None
    assert not gate.exists()
    assert verify(store_path, deep=True).sound
    Mixture.open(store_path, lm)  # falls back to the defaults


def test_damaged_output_matrix_is_found_and_set_aside(store_path):
    (store_path / "output").mkdir()
    save_output(store_path / "output", random_matrix([1, 2]), card_of(3, 2, 5, 40))
    assert verify(store_path).sound
    flip(store_path / "output/output.safetensors", -5)
    assert named(verify(store_path)) == {"output/output.safetensors"}
    assert (repair(store_path).kept_in / "output/output.safetensors").is_file()
    assert not (store_path / "output/output.safetensors").exists()
    assert verify(store_path, deep=True).sound


def test_tuned_weights_without_their_gate_are_removed_and_others_stay(store_path, lm):
    held_out = documents(6, words=40, start=50)
    Mixture.open(store_path, lm, memories="ngram").tune(held_out, weights="fixed")
    Mixture.open(store_path, lm, memories="knn").tune(held_out, weights="gated")
    with closing(Catalog.open(store_path / "catalog.db")) as catalog:
        gate = store_path / "mixtures" / catalog.get("tunings")[catalog.get("active_tuning")]["weights"]["file"]
    assert len([*gate.parent.glob("*.safetensors")]) == 2  # the fixed weights have the support of tokens
    gate.unlink()
    assert named(verify(store_path)) == {f"mixtures/{gate.name}"}
    assert repair(store_path).kept_in is None
    assert verify(store_path, deep=True).sound
    with closing(Catalog.open(store_path / "catalog.db")) as catalog:
        (left,) = catalog.get("tunings").values()
        assert ([spec["kind"] for spec in left["memories"]], catalog.get("active_tuning")) == (["ngram"], None)
    Mixture.open(store_path, lm)
