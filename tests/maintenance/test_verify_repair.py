"""Damage to a memory is found and named file by file, and what is sound survives it."""

from __future__ import annotations

import json
import os
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
from knnlm.datastore.suffix_array import open_suffixes
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.evaluation.tune import tune
from knnlm.ingest.build import build
from knnlm.maintenance import repair as repairing
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify
from knnlm.memories.output import save_output
from knnlm.mixture.mixture import Mixture


@pytest.fixture(scope="module")
def original(lm, tmp_path_factory):
    """A memory of ten documents in five segments, with an index and sorted text."""
    path = tmp_path_factory.mktemp("guarded") / "memory"
    store = build(documents(10), path, lm=lm, segment_rows=150)
    build_index(store, "IVF4,Flat")
    open_suffixes(store)
    store.close()
    return path


@pytest.fixture
def memory(original, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(original, tmp_path / "memory")
    return tmp_path / "memory"


@pytest.fixture
def pruned(original, tmp_path):
    """A copy in which half the keys are left, and count twice."""
    with closing(Datastore.open(original)) as store:
        keep = torch.arange(0, store.key_count, 2)
        derive(store, tmp_path / "pruned", keep=keep, counts=torch.full((store.key_count,), 2.0)).close()
    return tmp_path / "pruned"


def test_a_sound_memory_has_no_problems_and_is_left_as_it_is(memory, pruned):
    for path in (memory, pruned):
        before = tree(path)
        for deep in (False, True):
            found = verify(path, deep=deep)
            assert found.sound, found.problems
            assert not found.notes
        with closing(Datastore.open(path)) as store:
            assert (found.documents, found.tokens) == (10, store.rows)
        assert tree(path) == before
    # catalog, 5 × 2 arrays, index, 4 files of sorted text; pruned: catalog and 5 × 4
    assert [verify(path, deep=True).files for path in (memory, pruned)] == [16, 21]


def test_a_flipped_bit_in_any_file_is_found_and_only_that_file_is_named(memory, pruned):
    for path in (memory, pruned):
        for name in sorted(tree(path)):
            # The catalog has tests of its own; sums that are wrong are made again, and so is what facts.json is of.
            if name.endswith((".db", ".json", ".sums")):
                continue
            flip(path / name, -3)
            wanted = "ngram" if name.startswith("ngram/") else name
            assert named(verify(path, deep=True)) == {wanted}, name
            flip(path / name, -3)
    assert verify(memory, deep=True).sound


@settings(max_examples=15)
@given(data=st.data())
def test_a_file_that_was_cut_short_is_found_without_reading_it(data, original, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "memory"
    shutil.copytree(original, path)
    name = data.draw(
        st.sampled_from(sorted(name for name in tree(path) if name.startswith("segments/") and name.endswith(".npy")))
    )
    size = (path / name).stat().st_size
    os.truncate(path / name, data.draw(st.integers(0, size - 1)))
    assert named(verify(path)) == {name}
    with pytest.raises(DatastoreCorrupt, match=name.replace("/", ".")):
        Datastore.open(path)


def test_all_problems_are_told_not_only_the_first(memory):
    flip(memory / "segments/000001/keys.npy", -1)
    (memory / "segments/000002/values.npy").unlink()
    flip(memory / "index/000000/index.faiss", 100)
    found = verify(memory, deep=True)
    assert named(found) == {
        "segments/000001/keys.npy",
        "segments/000002/values.npy",
        "index/000000/index.faiss",
    }
    assert [problem.segment for problem in found.problems] == [1, 2, None]
    assert "missing" in str(found.problems[1])


def test_numbers_that_cannot_be_are_found_also_where_the_checksums_are_right(memory, pruned):
    """As a writer with a mistake, or with intent, would leave them."""
    from knnlm.io import checksum

    cases = [
        (memory, "keys", np.inf, "no finite numbers"),
        (memory, "values", 320, "tokens that are not from 0 to 319"),
        (memory, "values", -1, "tokens that are not"),
        (pruned, "counts", 0, "not finite and above 0"),
        (pruned, "kept", 0, "ascending rows"),
        (pruned, "kept", 10_000, "ascending rows"),
    ]
    for path, name, bad, words in cases:
        file = path / "segments/000001" / f"{name}.npy"
        sound = file.read_bytes()
        array = np.load(file)
        array.reshape(-1)[7] = bad
        np.save(file, array)
        change(path, f"UPDATE segments SET {name}_sha256 = ? WHERE id = 1", checksum(file))
        (problem,) = [found for found in verify(path, deep=True).problems if found.part == "segment"]
        assert words in problem.what
        file.write_bytes(sound)
        change(path, f"UPDATE segments SET {name}_sha256 = ? WHERE id = 1", checksum(file))


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE segments SET first_row = first_row + 1 WHERE id = 2", "segment 2 begins at row"),
        ("UPDATE segments SET scale = -1.0 WHERE id = 1", "scale -1.0"),
        ("UPDATE segments SET rows = 'many' WHERE id = 1", "'many' as rows"),
        ("UPDATE documents SET first_row = first_row - 1 WHERE number = 4", "'d4' has rows"),
        ("UPDATE documents SET rows = rows - 1 WHERE number = 0", "row .* was expected|belong to no document"),
        ("UPDATE documents SET segment = 77 WHERE number = 9", "1 documents are of segments"),
        ("DELETE FROM documents WHERE number = 9", "belong to no document"),
        ("UPDATE meta SET value = '\"maybe\"' WHERE key = 'state'", "state of the memory is 'maybe'"),
        ("UPDATE meta SET value = '{}' WHERE key = 'window'", "window of the memory"),
        ("UPDATE meta SET value = '\"float8\"' WHERE key = 'key_dtype'", "precision of keys"),
        ("UPDATE meta SET value = '[1, 2]' WHERE key = 'offset'", "offset of the memory"),
        ("UPDATE meta SET value = '[' WHERE key = 'model'", "cannot be read"),
        ("UPDATE indexes SET id = 5", "index/000005"),
    ],
)
def test_a_catalog_that_contradicts_itself_is_told_in_words(memory, statement, words):
    change(memory, statement)
    found = verify(memory)
    text = "\n".join(map(str, found.problems))
    import re

    assert re.search(words, text), text


def test_a_damaged_page_of_the_catalog_is_found(memory):
    data = bytearray((memory / "catalog.db").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = os.urandom(2000)
    (memory / "catalog.db").write_bytes(data)
    assert "catalog.db" in named(verify(memory))


def test_a_map_that_is_damaged_is_named(original, tmp_path):
    from knnlm.datastore.rewrite import principal_components

    with closing(Datastore.open(original)) as store:
        derive(store, tmp_path / "m", key_map=principal_components(store, 8)).close()
    assert verify(tmp_path / "m", deep=True).sound
    flip(tmp_path / "m/map.safetensors", -2)
    assert named(verify(tmp_path / "m")) == {"map.safetensors"}
    with pytest.raises(DatastoreCorrupt, match="cannot be repaired: map"):
        repair(tmp_path / "m")


def test_an_index_that_answers_wrongly_is_found_though_its_checksum_is_right(memory):
    from knnlm.io import checksum

    with closing(Datastore.open(memory)) as store:
        width, rows = store.width, store.key_count
    import faiss

    wrong = faiss.index_factory(width, "Flat")
    wrong.add(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32))
    faiss.write_index(wrong, str(memory / "index/000000/index.faiss"))
    change(memory, "UPDATE indexes SET sha256 = ?", checksum(memory / "index/000000/index.faiss"))
    (problem,) = verify(memory, deep=True).problems
    assert "belongs to other keys" in problem.what
    assert verify(memory, deep=True, trust_index=False).sound  # it was not even opened


def test_an_unfinished_build_verifies_and_what_a_killed_process_left_is_only_a_note(memory):
    change(memory, "UPDATE meta SET value = '\"building\"' WHERE key = 'state'")
    (memory / "segments/000009.partial").mkdir()
    found = verify(memory, deep=True)
    assert found.sound
    assert found.state == "building"
    assert any("000009.partial" in note for note in found.notes)


def test_a_repair_keeps_every_document_of_sound_segments_and_names_the_others(memory, lm):
    with closing(Datastore.open(memory)) as store:
        before = {d.id: (d.segment, store.values(torch.arange(d.first_row, d.first_row + d.rows)).tolist(),
                         store.take(torch.arange(d.first_row, d.first_row + d.rows)))
                  for d in list(store.catalog.documents())}  # fmt: skip
    flip(memory / "segments/000001/keys.npy", -1)
    damaged = (memory / "segments/000001/keys.npy").read_bytes()
    told = repair(memory, dry_run=True)
    assert not verify(memory, deep=True).sound  # nothing was changed
    done = repair(memory)
    assert {document.id for document in done.lost} == {name for name, (segment, *_) in before.items() if segment == 1}
    assert (told.lost, told.documents, told.tokens) == (done.lost, done.documents, done.tokens)
    assert done.index == "IVF4,Flat"
    assert (done.kept_in / "segments/000001/keys.npy").read_bytes() == damaged
    assert verify(memory, deep=True).sound
    with closing(Datastore.open(memory)) as store:
        kept = list(store.catalog.documents())
        assert {d.id for d in kept} == set(before) - {document.id for document in done.lost}
        assert store.rows == sum(d.rows for d in kept) == done.tokens
        for document in kept:
            rows = torch.arange(document.first_row, document.first_row + document.rows)
            assert store.values(rows).tolist() == before[document.id][1]
            assert torch.equal(store.take(rows), before[document.id][2])
            assert store.document_at(int(rows[-1])).id == document.id
        keys = store.take(torch.arange(store.key_count))
        found = open_index(store).search(keys[:20], 1)
        assert found.distances.max() < 1e-6
    # What was lost can be built again, and merged in.
    again = [d for d in documents(10) if d.id in {document.id for document in done.lost}]
    build(again, memory.parent / "again", lm=lm).close()
    merged = knnlm.merge([memory, memory.parent / "again"], memory.parent / "whole")
    assert merged.documents == 10
    assert repair(memory).before.sound


def test_derived_data_alone_is_made_again_or_dropped_and_no_document_is_lost(memory):
    flip(memory / "index/000000/index.faiss", 60)
    flip(memory / "ngram/order.npy", -1)
    done = repair(memory)
    assert (done.lost, done.index, done.kept_in) == ((), "IVF4,Flat", None)
    assert set(done.dropped) == {"index/000000/index.faiss", "ngram"}
    found = verify(memory, deep=True)
    assert found.sound
    assert found.documents == 10


def test_a_repair_of_an_unfinished_build_keeps_the_beginning_and_the_build_goes_on(lm, tmp_path, original):
    whole = tree(original)
    path = tmp_path / "memory"
    shutil.copytree(original, path)
    change(path, "UPDATE meta SET value = '\"building\"' WHERE key = 'state'")
    change(path, "DELETE FROM indexes")
    flip(path / "segments/000002/values.npy", -1)
    done = repair(path)
    assert done.segments == (2, 3, 4)
    build(documents(10), path, lm=lm, segment_rows=150).close()
    assert verify(path, deep=True).sound
    for name in (name for name in whole if name.endswith(".npy") and name.startswith("segments/")):
        assert (path / name).read_bytes() == whole[name]


def test_what_cannot_be_repaired_is_left_and_the_error_says_what_can_be_done(memory):
    change(memory, "UPDATE meta SET value = '[1]' WHERE key = 'offset'")
    before = tree(memory)
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: catalog.db: the offset.*Nothing was changed"):
        repair(memory)
    assert tree(memory) == before
    (memory / "catalog.db").write_bytes(b"not a database at all" * 500)
    with pytest.raises(DatastoreCorrupt, match=r"Restore catalog\.db from a copy"):
        repair(memory)
    (memory / "catalog.db").unlink()
    with pytest.raises(DatastoreError, match=r"5 segments but no catalog.db.*build the memory again"):
        repair(memory)
    assert (memory / "segments/000003/keys.npy").exists()


def test_an_index_of_the_catalogs_own_that_is_damaged_is_made_again(memory):
    change(memory, "PRAGMA writable_schema = 1")
    with closing(sqlite3.connect(memory / "catalog.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = 1")
        # The index by row takes over the pages of the index by hash: its entries are of another column.
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'documents_by_hash'").fetchone()
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    data = bytearray((memory / "catalog.db").read_bytes())
    begin = (page - 1) * size
    data[begin + 3 : begin + 5] = (0).to_bytes(2, "big")  # an empty page: no document is in the index
    data[begin + 5 : begin + 7] = size.to_bytes(2, "big")
    (memory / "catalog.db").write_bytes(data)
    found = verify(memory)
    assert found.problems
    assert all("SQLite says" in problem.what for problem in found.problems)
    done = repair(memory)
    assert done.lost == ()
    assert verify(memory, deep=True).sound
    with closing(Datastore.open(memory)) as store:
        assert all(store.holds(document.text) for document in documents(10))


def test_a_repair_that_is_killed_anywhere_is_finished_by_the_next(memory, tmp_path):
    flip(memory / "segments/000001/keys.npy", -1)
    flip(memory / "segments/000002/values.npy", -1)
    copies = [tmp_path / f"copy-{number}" for number in range(1, 10)]
    for copy in copies:
        shutil.copytree(memory, copy)
    # One process with all that is imported, and a child of it for each death.
    script = f"""
        import os, sys
        sys.path[:0] = [{str(Path(__file__).parent.parent)!r}]
        from helpers.kill import Dying
        from knnlm.maintenance import repair as repairing
        for number, path in enumerate(sys.argv[1:], 1):
            if os.fork() == 0:
                dying = Dying(number)
                for name in ("_keep", "_commit", "_put", "_take_away"):
                    setattr(repairing, name, dying(getattr(repairing, name)))
                repairing.repair(path, index=False)
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


def test_a_repair_that_is_killed_before_the_index_is_finished_by_the_next(memory, capfd, monkeypatch):
    with closing(Datastore.open(memory)) as store:
        build_index(store, "IVF2,Flat", metric="ip")
    flip(memory / "segments/000001/keys.npy", -1)
    with monkeypatch.context() as patched:
        patched.setattr(repairing, "build_requested_index", lambda *_, **__: os._exit(7))
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                repair(memory)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with closing(Catalog.open(memory / "catalog.db")) as catalog:
        assert catalog.indexes() == []
    code, out, _ = command(capfd, "repair", memory, "--wait", "5")
    assert (code, "nothing is wrong; the index IVF2,Flat was made again" in out) == (0, True)
    with closing(Catalog.open(memory / "catalog.db")) as catalog:
        (row,) = catalog.indexes()
        assert (row.spec, row.metric, catalog.get("index_wanted")) == ("IVF2,Flat", "ip", None)
    assert repair(memory).index is None
    assert verify(memory, deep=True).sound


def test_the_commands_say_what_is_wrong_with_exit_codes(memory, capfd):
    code, out, _ = command(capfd, "verify", memory)
    assert code == 0
    assert "nothing is wrong (checksums were not: --deep)" in out
    flip(memory / "segments/000001/keys.npy", -1)
    code, out, _ = command(capfd, "verify", memory, "--deep")
    assert code == 1
    assert "segments/000001/keys.npy: is not as it was written" in out
    code, out, _ = command(capfd, "verify", memory, "--deep", "--json")
    facts = json.loads(out)
    assert (code, facts["sound"], facts["problems"][0]["segment"]) == (1, False, 1)
    code, out, _ = command(capfd, "repair", memory, "--no-index")
    assert code == 0
    assert "lost: text.jsonl:" in out
    code, out, _ = command(capfd, "repair", memory, "--json")
    assert json.loads(out)["lost"] == []
    assert "is not there" in failure(capfd, "verify", memory / "nowhere")
    assert "is not a memory" in failure(capfd, "repair", memory.parent)


def test_a_gate_that_was_tuned_is_sound_and_one_that_was_damaged_is_set_aside(memory, lm):
    held_out = documents(6, words=40, start=50)
    tune(Mixture.open(memory, lm), held_out, weights="gated")
    (gate,) = (memory / "mixtures").glob("*.safetensors")
    found = verify(memory, deep=True)
    assert found.sound, found.problems
    assert repair(memory).kept_in is None
    flip(gate, -2)
    assert named(verify(memory)) == {f"mixtures/{gate.name}"}
    assert repair(memory).kept_in is not None
    assert not gate.exists()
    assert verify(memory, deep=True).sound
    Mixture.open(memory, lm)  # as nobody has tuned it


def test_a_flipped_bit_in_an_output_matrix_is_found_and_it_is_set_aside(memory):
    (memory / "output").mkdir()
    save_output(memory / "output", random_matrix([1, 2]), card_of(3, 2, 5, 40))
    assert verify(memory).sound
    flip(memory / "output/output.safetensors", -5)
    assert named(verify(memory)) == {"output/output.safetensors"}
    assert (repair(memory).kept_in / "output/output.safetensors").is_file()
    assert not (memory / "output/output.safetensors").exists()
    assert verify(memory, deep=True).sound


def test_weights_whose_gate_is_missing_are_found_and_taken_out_and_others_stay(memory, lm):
    held_out = documents(6, words=40, start=50)
    tune(Mixture.open(memory, lm, memories="ngram"), held_out, weights="fixed")
    tune(Mixture.open(memory, lm, memories="knn"), held_out, weights="gated")
    (gate,) = (memory / "mixtures").glob("*.safetensors")
    gate.unlink()
    assert named(verify(memory)) == {f"mixtures/{gate.name}"}
    assert repair(memory).kept_in is None
    assert verify(memory, deep=True).sound
    with closing(Catalog.open(memory / "catalog.db")) as catalog:
        (left,) = catalog.get("choices").values()
        assert ([spec["kind"] for spec in left["memories"]], catalog.get("chosen")) == (["ngram"], None)
    Mixture.open(memory, lm)
