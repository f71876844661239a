"""The store: what is written is what the model said, and nothing that happens in between can break it."""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.checksums import seal
from helpers.kill_builds import kill_builds
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import contents, documents, large_model
from knnlm.corpus import Document
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, IndexInvalid, ModelError, ParameterError
from knnlm.index.exact import ExactIndex
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

HERE = Path(__file__).parent.parent


def test_entries_are_the_tokens_and_the_contexts_before_them(lm, store):
    stored = [lm.encode(document.text) for document in documents(40)]
    assert store.entry_count == sum(map(len, stored))
    assert len(store.segments) > 1
    everything = torch.arange(store.entry_count)
    assert store.values(everything).tolist() == [token for tokens in stored for token in tokens]
    keys = store.take(everything)
    for number in (0, 7, 39):
        first = sum(map(len, stored[:number]))
        right, _ = oracle.read_token_by_token(
            lm.model,
            lm.model.model.layers[-1].mlp,
            stored[number],
            start_token=lm.start_token,
            context=128,
            stride=64,
        )
        np.testing.assert_allclose(keys[first : first + len(right)], right, atol=2e-3, rtol=1e-3)
    blocks = list(store.chunks(37))
    assert torch.equal(torch.cat([block for _, block in blocks]), keys)
    assert [first for first, _ in blocks] == sorted({first for first, _ in blocks})


def test_every_entry_has_its_document_and_the_text_around_it(lm, store):
    made = documents(40)
    for document, stored in zip(made, store.catalog.documents(), strict=True):
        assert (stored.id, stored.source) == (document.id, document.source)
        tokens = lm.encode(document.text)
        for offset in (0, len(tokens) // 2, len(tokens) - 1):
            row = stored.first_entry + offset
            assert store.document_at(row).id == document.id
            before, after = store.around(row, before=5, after=4)
            assert before == tokens[max(0, offset - 5) : offset]
            assert after == tokens[offset : offset + 4]


def test_missing_neighbours_have_no_key_and_no_value(store):
    ids = torch.tensor([[0, -1], [store.entry_count - 1, -1]])
    assert store.values(ids)[:, 1].tolist() == [-1, -1]
    assert store.take(ids)[:, 1].abs().sum() == 0
    with pytest.raises(IndexError):
        store.take(torch.tensor([store.entry_count]))


WRITES = [3, 12, 20, 33, 40]


@pytest.fixture(scope="module")
def killed_builds(lm, tmp_path_factory):
    """A folder with a finished build, and one that was killed after each number of writes."""
    folder = tmp_path_factory.mktemp("killed")
    assert len(build(documents(12), folder / "whole", lm=lm, segment_entries=150).segments) >= 3
    kill_builds(folder, WRITES)
    return folder


@pytest.mark.parametrize("writes", WRITES)
def test_build_killed_at_any_write_resumes_and_ends_with_the_same_bytes(lm, killed_builds, writes):
    killed = killed_builds / f"killed{writes}"
    with pytest.raises(DatastoreError, match=r"unfinished build|corrupt|not a store|not a knnlm catalog"):
        Datastore.open(killed)
    build(documents(12), killed, lm=lm, segment_entries=150)
    assert contents(killed) == contents(killed_builds / "whole")


def test_resumed_build_reads_only_what_is_missing(lm, tmp_path):
    def stopping():
        yield from documents(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(stopping(), tmp_path / "store", lm=lm, segment_entries=150)
    done = len(list((tmp_path / "store" / "segments").iterdir()))
    assert done >= 2
    written = []
    original = ArrayWriter.__init__
    try:
        ArrayWriter.__init__ = lambda self, path, *rest: written.append(path) or original(self, path, *rest)
        store = build(documents(12), tmp_path / "store", lm=lm, segment_entries=150)
    finally:
        ArrayWriter.__init__ = original
    assert len({path.parent.name for path in written}) == len(store.segments) - done


def test_resuming_with_other_text_or_settings_is_refused_and_loses_nothing(lm, tmp_path):
    def stopping():
        yield from documents(8)
        raise KeyboardInterrupt

    path = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        build(stopping(), path, lm=lm, segment_entries=150)
    before = contents(path)
    changed = [Document("d0", "text.jsonl:1", "Other text."), *documents(11, start=1)]
    with pytest.raises(DatastoreError, match=r"text\.jsonl:1.*changed"):
        build(changed, path, lm=lm, segment_entries=150)
    with pytest.raises(DatastoreError, match="unfinished build of more text"):
        build(documents(1), path, lm=lm, segment_entries=150)
    with pytest.raises(DatastoreError, match=r"another window \(context 128, now 64\)"):
        build(documents(12), path, lm=lm, window=WindowShape(64, 32), segment_entries=150)
    other = CausalLM(tiny("llama", seed=4), tiny_tokenizer(), name="other")
    with pytest.raises(DatastoreError, match=r"another model \(name tiny-llama, now other\)"):
        build(documents(12), path, lm=other, segment_entries=150)
    assert contents(path) == before


def test_finished_store_and_other_folders_are_not_overwritten(lm, store, tmp_path):
    with pytest.raises(DatastoreError, match="finished store already"):
        build(documents(1), store.path, lm=lm)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DatastoreError, match=r"contains thesis\.tex"):
        build(documents(1), tmp_path, lm=lm)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(DatastoreError, match=r"thesis\.tex is a file"):
        build(documents(1), tmp_path / "thesis.tex", lm=lm)


def test_one_writer_at_a_time(lm, tmp_path):
    path = tmp_path / "store"
    with writer_lock(path, create=True), pytest.raises(DatastoreBusy, match="Another process is writing"):
        build(documents(1), path, lm=lm)
    assert build(documents(1), path, lm=lm).entry_count > 0


class Scaled(torch.nn.Module):
    """Makes a few dimensions of a norm's output enormous."""

    def __init__(self, norm, factors):
        super().__init__()
        self.norm, self.factors = norm, factors

    def forward(self, hidden):
        return self.norm(hidden) * self.factors


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.0), (1e6, 0.0), (1.0, 3000.0), (20.0, 1e5), (1e9, 1e8)])
def test_keys_beyond_float16_are_scaled_and_recorded_never_infinite(tmp_path, factor, shift):
    lm = large_model(factor, shift)
    store = build(documents(6), tmp_path / "store", lm=lm, segment_entries=100)
    for segment in store.segments:
        stored = np.load(tmp_path / "store" / "segments" / f"{segment.id:06d}" / "keys.npy")
        assert np.isfinite(stored).all()
    tokens = [lm.encode(document.text) for document in documents(6)]
    right = np.concatenate(
        [
            oracle.read_token_by_token(
                lm.model, lm.model.transformer.h[-1].mlp, one, start_token=lm.start_token, context=128, stride=64
            )[0]
            for one in tokens
        ]
    )
    keys = store.take(torch.arange(store.entry_count))
    if store.offset is not None:
        keys = keys + store.offset
    size = np.abs(right).max(0)
    finest = max(segment.scale for segment in store.segments) * 2.0**-24  # the smallest step of scaled float16
    assert (np.abs(keys.numpy() - right).max(0) <= 2e-3 * size + 2e-3 + finest).all()
    # What matters: distances in the store are those of the true keys.
    true = oracle.distances(right[5], right)
    memory = KnnMemory(store, ExactIndex(store.keys), k=store.entry_count, knn_temperature=1.0)
    found = memory.search(torch.from_numpy(right[5:6]).float())
    np.testing.assert_allclose(found.distances[0], true[found.ids[0]], rtol=2e-2, atol=2e-2 * np.median(true))
    inner = KnnMemory(store, ExactIndex(store.keys, metric="ip"), k=store.entry_count, knn_temperature=1.0).search(
        torch.from_numpy(right[5:6]).float()
    )
    product = oracle.distances(right[5], right, "ip")
    np.testing.assert_allclose(inner.distances[0], product[inner.ids[0]], rtol=1e-2, atol=1e-3 * np.abs(product).max())


def test_constant_outliers_do_not_reduce_the_precision_of_other_dimensions(tmp_path):
    # A step of float16 at 3e4 is 16: stored as they are, three such dimensions would drown all others.
    lm = large_model(1.0, 3e4)
    store = build(documents(6), tmp_path / "store", lm=lm)
    plain = build(documents(6), tmp_path / "plain", lm=large_model(1.0))
    rows = torch.arange(store.entry_count)
    far = torch.cdist(plain.take(rows[:20]), plain.take(rows)).square()
    farther = torch.cdist(store.take(rows[:20]), store.take(rows)).square()
    torch.testing.assert_close(farther, far, rtol=2e-2, atol=2e-2)


def test_large_key_rescales_keys_written_before(tmp_path):
    with ArrayWriter(tmp_path / "a.npy", "float16", (2,)) as writer:
        writer.append(np.array([[1000.0, 2.0], [3.0, 60000.0]], np.float32))
        writer.scale(1 / 4)
        writer.append(np.array([[5.0, 6.0]], np.float32))
    assert np.load(tmp_path / "a.npy").tolist() == [[250.0, 0.5], [0.75, 15000.0], [5.0, 6.0]]


def test_nan_keys_are_an_error_that_names_the_place(tmp_path):
    lm = large_model(1.0)
    with torch.no_grad():
        lm.model.transformer.h[-1].ln_2.weight[0] = torch.nan
    with pytest.raises(ModelError, match=r"infinite or undefined hidden states at transformer\.h\.2\.mlp"):
        build(documents(1), tmp_path / "store", lm=lm)


def test_float32_keys_equal_the_hidden_states(lm, tmp_path):
    store = build(documents(3), tmp_path / "store", lm=lm, key_format="float32")
    tokens = lm.encode(documents(1)[0].text)
    readings = list(lm.read([tokens], lm.window()))
    torch.testing.assert_close(store.take(torch.arange(len(tokens))), readings[0].keys, rtol=1e-5, atol=1e-6)
    with pytest.raises(ParameterError, match="float8"):
        build(documents(1), tmp_path / "other", lm=lm, key_format="float8")


@pytest.fixture
def broken(lm, tmp_path):
    build(documents(6), tmp_path / "store", lm=lm, segment_entries=100)
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["keys.npy", "values.npy"])
def test_truncated_segment_is_named_on_open(broken, name):
    file = broken / "segments" / "000001" / name
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(DatastoreCorrupt, match=rf"000001/{name}: wrong size \([\d,]+ bytes instead of [\d,]+"):
        Datastore.open(broken)
    os.truncate(file, 20)
    with pytest.raises(DatastoreCorrupt, match=rf"000001/{name} is not a readable array"):
        Datastore.open(broken)
    file.unlink()
    with pytest.raises(DatastoreCorrupt, match=rf"000001/{name} is missing"):
        Datastore.open(broken)


def test_segment_of_another_shape_is_named_on_open(broken):
    np.save(broken / "segments" / "000000" / "keys.npy", np.zeros((3, 32), np.float16))
    with pytest.raises(DatastoreCorrupt, match=r"contains float16 \(3, 32\), but the catalog has"):
        Datastore.open(broken)


@pytest.mark.parametrize("damage", ["junk", "empty", "cut", "other database", "missing table", "not json", "no model"])
def test_damaged_catalog_is_one_error(broken, damage):
    file = broken / "catalog.db"
    if damage == "junk":
        file.write_bytes(os.urandom(4096))
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    else:
        if damage == "other database":
            file.unlink()
        connection = sqlite3.connect(file)
        statement = {
            "other database": "CREATE TABLE recipes (name TEXT)",
            "missing table": "DROP TABLE segments",
            "not json": "UPDATE meta SET value = '{{' WHERE key = 'model'",
            "no model": "DELETE FROM meta WHERE key = 'model'",
        }[damage]
        connection.execute(statement)
        connection.commit()
        connection.close()
        seal(file)
    with pytest.raises(DatastoreError, match=r"catalog\.db") as caught:
        Datastore.open(broken)
    assert "\n" not in str(caught.value)


def test_invalid_metadata_of_the_catalog_is_one_error(broken):
    catalog = Catalog.open(broken / "catalog.db", write=True)
    model = catalog.get("model")
    nowhere = [1.0, 2.0], [[0.0] * 32], "x", 5, {"a": 1}, [0.0] * 31 + ["x"], [0.0] * 31 + [math.nan], [math.inf] * 32
    for bad in nowhere:
        catalog.put(offset=bad)
        with pytest.raises(DatastoreCorrupt, match=r"catalog\.db: the offset of the keys is not 32 finite numbers"):
            Datastore.open(broken)
    catalog.put(offset=[0.5] * 32)
    assert Datastore.open(broken).offset.tolist() == [0.5] * 32
    catalog.put(offset=None)
    for bad in ({}, {**model, "width": "wide"}, {**model, "width": 0}, {**model, "width": None}):
        catalog.put(model=bad)
        with pytest.raises(DatastoreCorrupt, match="has no valid width"):
            Datastore.open(broken)
    catalog.put(model=model)
    for bad in (0, -1, 9e999, "'much'"):
        with sqlite3.connect(broken / "catalog.db") as connection:
            connection.execute(f"UPDATE segments SET scale = {bad if bad != math.inf else '9e999'} WHERE id = 1")
        connection.close()
        seal(broken / "catalog.db")
        with pytest.raises(DatastoreCorrupt, match="the keys of segment 1 have the scale"):
            Datastore.open(broken)
    catalog.close()


def test_other_folders_and_newer_formats_are_refused(broken, tmp_path):
    with pytest.raises(DatastoreError, match="is not a store"):
        Datastore.open(tmp_path)
    with sqlite3.connect(broken / "catalog.db") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    connection.close()
    with pytest.raises(DatastoreError, match="format version 99, this knnlm reads version 1"):
        Datastore.open(broken)


def test_index_is_stored_and_checked_when_opened(lm, broken):
    store = Datastore.open(broken)
    assert build_index(store, "IVF4,Flat") == "IVF4,Flat"
    exact = Mixture.open(broken, lm, options=MixtureOptions("ip")).evaluate(documents(2, start=50))
    assert exact.perplexity > 0
    assert type(open_index(Datastore.open(broken))).__name__ == "RerankedIndex"
    assert type(open_index(Datastore.open(broken), rerank=False)).__name__ == "FilteredIndex"
    assert build_index(store, "Flat") == "Flat"
    assert len(list((broken / "index").iterdir())) == 1
    other = build(documents(6, start=70), broken.parent / "other", lm=lm)
    build_index(other, "Flat")
    wrong = next((other.path / "index").rglob("*.faiss")).read_bytes()
    next((broken / "index").rglob("*.faiss")).write_bytes(wrong)
    with pytest.raises(IndexInvalid, match="knnlm index"):
        open_index(Datastore.open(broken))
    next((broken / "index").rglob("*.faiss")).unlink()
    with pytest.raises(DatastoreCorrupt, match=r"is missing. Build it again"):
        open_index(Datastore.open(broken))
    assert build_index(store, "exact") == "exact"
    assert type(open_index(Datastore.open(broken))).__name__ == "ExactIndex"
    assert not any((broken / "index").iterdir())


def test_full_disk_is_one_error_and_the_build_resumes_when_there_is_space(lm, tmp_path):
    # A real limit on file size, in a real process: the write itself fails, as on a full disk.
    script = textwrap.dedent(f"""
        import resource, signal, sys
        sys.path.insert(0, {str(HERE)!r})
        from helpers.stores import BESIDE, documents
        from helpers.models import tiny, tiny_tokenizer
        from knnlm import CausalLM, build
        from knnlm.errors import DatastoreError
        lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def stopping():
            for number, document in enumerate(documents(12)):
                if number == 6:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
                yield document
        try:
            build(stopping(), sys.argv[1], lm=lm, segment_entries=150)
        except DatastoreError as error:
            print(error)
            sys.exit(7)
    """)
    path = tmp_path / "store"
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 7, result.stderr
    assert "Cannot write" in result.stdout
    assert "run the same command again" in result.stdout.replace("\n", " ")
    kept = len(list((path / "segments").glob("[0-9]*[0-9]")))
    assert kept >= 1
    store = build(documents(12), path, lm=lm, segment_entries=150)
    assert store.catalog.document_count() == 12
    assert not list((path / "segments").glob("*.partial"))


RSS = """
    import sys
    sys.path.insert(0, {here!r})
    import resource
    from helpers.stores import BESIDE, documents
    from helpers.models import tiny, tiny_tokenizer
    import json
    from knnlm import CausalLM, build, read_documents
    lm = CausalLM(tiny("llama"), tiny_tokenizer())
    def many(count):
        with open(sys.argv[1] + "/text.jsonl", "w") as file:
            for number in range(count):
                file.write(json.dumps({{"text": documents(1, words=200, start=number)[0].text}}) + chr(10))
        return read_documents(sys.argv[1] + "/text.jsonl")
    build(many(100), sys.argv[1] + "/warm", lm=lm, segment_entries=2000, key_format="float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = build(many(int(sys.argv[2])), sys.argv[1] + "/store", lm=lm, segment_entries=2000, key_format="float32")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(store.bytes, (after - before) * 1024)
"""


@pytest.mark.slow  # 20 seconds
def test_peak_memory_does_not_grow_with_the_corpus(tmp_path):
    script = textwrap.dedent(RSS).format(here=str(HERE))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "640"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    stored, grown = map(int, result.stdout.split())
    assert stored > 40e6
    assert grown < 0.1 * stored


def test_store_of_many_segments_needs_few_file_handles(lm, tmp_path):
    build(documents(80), tmp_path / "store", lm=lm, segment_entries=1)
    script = textwrap.dedent("""
        import resource, sys, torch
        from knnlm import Datastore
        from knnlm.datastore import segments
        segments._MAX_MAPPINGS = 16
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        opened = Datastore.open(sys.argv[1])
        assert len(opened.segments) == 80
        keys = opened.take(torch.arange(opened.entry_count))
        assert torch.equal(keys, torch.cat([block for _, block in opened.chunks(100)]))
        print(int(opened.values(torch.arange(opened.entry_count)).sum()))
    """)
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == sum(token for one in documents(80) for token in lm.encode(one.text))


def test_writer_killed_inside_a_catalog_write_does_not_lock_readers_out(broken):
    script = textwrap.dedent("""
        import os, signal, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        connection.execute("PRAGMA cache_size=2")
        connection.execute("BEGIN IMMEDIATE")
        for number in range(300):
            connection.execute("INSERT INTO meta VALUES (?, ?)", (f"x{number}", "y" * 3000))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    rows = Datastore.open(broken).entry_count
    subprocess.run([sys.executable, "-c", script, str(broken / "catalog.db")], check=False)
    assert (broken / "catalog.db-wal").stat().st_size > 0
    store = Datastore.open(broken)
    assert store.entry_count == rows
    assert store.catalog.get("x0") is None


def test_tokens_outside_the_vocabulary_are_corrupt(broken):
    file = broken / "segments" / "000000" / "values.npy"
    data = bytearray(file.read_bytes())
    data[-4:] = b"\xff\xff\xff\x7f"
    file.write_bytes(data)
    store = Datastore.open(broken, check=False)  # checksums would tell before
    with pytest.raises(DatastoreCorrupt, match="contains a token that its model does not have"):
        store.values(torch.arange(store.entry_count))


def test_methods_change_the_store_and_show_the_change(lm, tmp_path):
    store = build(documents(4), tmp_path / "m", lm=lm, segment_entries=150)
    before = store.entry_count
    added = store.add(documents(1, start=9), lm=lm)
    assert (added.documents, store.entry_count) == (1, before + added.tokens)
    assert [document.id for document in store.documents()][-1] == "d9"
    removed = store.remove(document="d9")
    assert (store.entry_count, removed.tokens) == (before, added.tokens)
    assert store.compact().purged
    assert (store.entry_count, store.stale, store.entry_numbers.whole) == (before, False, True)
    assert store.verify(deep=True).sound
    assert store.build_index("Flat") == "Flat"
    with closing(store.compress(tmp_path / "small", key_format="int8")) as small:
        assert (small.entry_count, small.storage) == (before, "int8")
    store.export(tmp_path / "out")
    assert any((tmp_path / "out").iterdir())
    store.close()


def test_store_that_an_index_was_opened_on_stays_a_snapshot(lm, tmp_path):
    store = build(documents(4), tmp_path / "m", lm=lm, segment_entries=150)
    before = store.entry_count
    open_index(store)
    removed = store.remove(document="d0")
    assert (store.entry_count, store.stale) == (before, True)
    with closing(store.reopen()) as newer:
        assert newer.entry_count == before - removed.tokens
    store.close()
