"""The pipeline of a GPU, run on a CPU: the bytes are those of a synchronous build, also after errors."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.kill_builds import kill_builds
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import contents, documents, large_model
from knnlm.corpus import Document, read_documents
from knnlm.datastore import segments as segment
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ModelError, ParameterError
from knnlm.ingest import pipeline, segment_builder
from knnlm.ingest.build import add, build
from knnlm.ingest.segment_builder import DocumentBatch, batch_documents
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape, windows

HERE = Path(__file__).parent.parent


@pytest.fixture
def piped(monkeypatch):
    """A function that lets builds on the CPU use the pipeline, in small chunks."""

    def switch() -> None:
        monkeypatch.setattr(pipeline, "PIPELINED_DEVICES", {"cpu"})
        monkeypatch.setattr(pipeline, "_COPY_BYTES", 1000)
        monkeypatch.setattr(pipeline, "_MAX_CALL_DOCUMENTS", 3)

    return switch


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("knnlm-")}


SHAPES = [
    {"segment_entries": 150},
    {"segment_entries": 1},
    {"segment_entries": 100_000},
    {"segment_entries": 333, "batch_tokens": 77, "window": WindowShape(32, 16)},
    {"segment_entries": 333, "batch_tokens": 4096, "window": WindowShape(31, 7)},
    {"segment_entries": 250, "batch_tokens": 1, "window": WindowShape(64, 64)},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_a_synchronous_build(lm, tmp_path, piped, shape):
    text = [*documents(9), Document("none", "empty", ""), Document("one", "short", "a"), *documents(3, start=9)]
    plain = build(text, tmp_path / "plain", lm=lm, **shape)
    piped()
    store = build(text, tmp_path / "piped", lm=lm, **shape)
    assert contents(tmp_path / "piped") == contents(tmp_path / "plain")
    assert plain.entry_count == store.entry_count == sum(len(lm.encode(document.text)) for document in text)
    for row in store.segments:
        folder = tmp_path / "piped" / "segments" / f"{row.id:06d}"
        sums = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("keys.npy", "values.npy")]
        assert sums == [row.keys_sha256, row.values_sha256]
    assert not threads()


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 3000.0), (1.0, 3e4), (1e6, 0.0), (20.0, 1e5), (1e9, 1e8)])
def test_large_keys_are_stored_as_by_a_synchronous_build(tmp_path, piped, factor, shift):
    lm = large_model(factor, shift)
    plain = build(documents(8), tmp_path / "plain", lm=lm, segment_entries=100)
    assert plain.offset is not None
    piped()
    store = build(documents(8), tmp_path / "piped", lm=lm, segment_entries=100, keep_on_device=True)
    assert contents(tmp_path / "piped") == contents(tmp_path / "plain")
    assert (store.resident_keys is None) == any(row.scale != 1.0 for row in store.segments)


def test_segments_before_and_after_one_of_too_large_keys_are_right(tmp_path, piped):
    # So large that some segments have a key beyond half of float16's range, and others do not.
    for step in range(40):
        lm = large_model(5000 * 1.1**step)
        plain = build(documents(12), tmp_path / f"plain{step}", lm=lm, segment_entries=1)
        scales = [row.scale for row in plain.segments]
        if scales[0] == scales[-1] == 1.0 and max(scales) > 1.0:
            break
    else:
        pytest.fail("no such size")
    piped()
    store = build(documents(12), tmp_path / "piped", lm=lm, segment_entries=1, keep_on_device=True)
    assert contents(tmp_path / "piped") == contents(plain.path)
    assert store.resident_keys is None


def test_float32_keys_are_written_synchronously(lm, tmp_path, piped):
    build(documents(4), tmp_path / "plain", lm=lm, key_format="float32", segment_entries=150)
    piped()
    store = build(
        documents(4), tmp_path / "piped", lm=lm, key_format="float32", segment_entries=150, keep_on_device=True
    )
    assert contents(tmp_path / "piped") == contents(tmp_path / "plain")
    assert store.resident_keys is None


def test_keys_leave_a_device_without_free_memory(lm, tmp_path, piped, monkeypatch):
    build(documents(12), tmp_path / "plain", lm=lm, segment_entries=150)
    piped()
    for name, rooms in {"never": [], "at first": [10**9, 10**9], "later": [10**9, 0, 0, 0, 0, 0, 10**9]}.items():
        left = iter(rooms)
        monkeypatch.setattr(segment_builder, "free_bytes", lambda _, left=left: next(left, 0))
        store = build(documents(12), tmp_path / name, lm=lm, segment_entries=150, keep_on_device=True)
        assert contents(tmp_path / name) == contents(tmp_path / "plain")
        assert store.resident_keys is None


def test_keys_that_stay_on_the_device_are_the_stored_ones(lm, tmp_path, piped):
    assert (
        build(documents(12), tmp_path / "plain", lm=lm, segment_entries=150, keep_on_device=True).resident_keys is None
    )
    piped()
    assert build(documents(12), tmp_path / "without", lm=lm, segment_entries=150).resident_keys is None
    store = build(documents(12), tmp_path / "piped", lm=lm, segment_entries=150, keep_on_device=True)
    assert [len(keys) for keys in store.resident_keys] == [row.entries for row in store.segments]
    assert all(keys.dtype == torch.float16 and not keys.is_inference() for keys in store.resident_keys)
    assert torch.equal(torch.cat(store.resident_keys).float(), store.take(torch.arange(store.entry_count)))


def test_progress_counts_every_byte_once(lm, tmp_path, piped):
    piped()
    text = documents(12)
    counted, totals = [], []

    class Bar:
        def __init__(self, what, *, total=None, unit="tokens"):
            assert (what, unit) == ("reading", "bytes")
            totals.append(total)

        def __enter__(self):
            return counted.append

        def __exit__(self, *_): ...

    def stopping():
        yield from text[:8]
        raise RuntimeError("no more")

    total = sum(len(document.text.encode()) for document in text)
    with pytest.raises(RuntimeError):
        build(stopping(), tmp_path / "store", lm=lm, segment_entries=150, progress=Bar)
    assert 0 < sum(counted) < total
    counted.clear()
    build(text, tmp_path / "store", lm=lm, segment_entries=150, progress=Bar)
    assert sum(counted) == total
    assert len(counted) > 4
    assert totals == [None, total]


def test_progress_of_files_is_by_their_bytes(lm, tmp_path):
    counted, totals = [], []

    @contextmanager
    def bar(what, *, total=None, unit="tokens"):
        totals.append((total, unit))
        yield counted.append

    lines = "".join(json.dumps({"text": document.text, "id": document.id}) + "\n" for document in documents(12))
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    size = (tmp_path / "text.jsonl.gz").stat().st_size
    build(read_documents(tmp_path / "text.jsonl.gz"), tmp_path / "store", lm=lm, segment_entries=150, progress=bar)
    assert totals == [(size, "bytes")]
    assert sum(counted) == size
    counted.clear()
    (tmp_path / "more.txt").write_text(documents(1, start=20)[0].text + "\n")
    added = add(
        read_documents(tmp_path / "more.txt", tmp_path / "text.jsonl.gz"), tmp_path / "store", lm=lm, progress=bar
    )
    assert (added.documents, added.skipped) == (1, 12)
    assert totals[1:] == [(sum(counted), "bytes")]


@pytest.fixture
def whole(lm, tmp_path):
    build(documents(12), tmp_path / "whole", lm=lm, segment_entries=150)
    return contents(tmp_path / "whole")


@pytest.mark.parametrize("count", [0, 1, 5, 8, 11])
def test_error_of_the_source_is_raised_after_the_documents_before_it_are_stored(lm, tmp_path, piped, whole, count):
    def stopping(error):
        yield from documents(count)
        raise error

    piped()
    for name, error in {"store": OSError("gone"), "stopped": KeyboardInterrupt()}.items():
        with pytest.raises(type(error)):
            build(stopping(error), tmp_path / name, lm=lm, segment_entries=150)
        assert not threads()
    done = sum(len(batch.documents) for batch in grouped(lm, documents(count)) if batch.entries >= 150)
    with pytest.raises(DatastoreError, match=f"{done} documents are in"):
        Datastore.open(tmp_path / "store")
    for name in ("store", "stopped"):
        catalog = Catalog.open(tmp_path / name / "catalog.db")
        resumed = catalog.document_count() > 0
        catalog.close()
        store = build(documents(12), tmp_path / name, lm=lm, segment_entries=150, keep_on_device=True)
        assert contents(tmp_path / name) == whole
        assert (store.resident_keys is None) == resumed


def grouped(lm: CausalLM, text: list[Document]) -> list[DocumentBatch]:
    return list(batch_documents(((document, lm.encode(document.text)) for document in text), 150))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("passes", [1, 2, 4, 6])
def test_error_of_the_model_keeps_the_segments_before_it(lm, tmp_path, piped, whole, monkeypatch, passes, error):
    piped()
    original, left = CausalLM.forward, [passes]

    def failing(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise error
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "forward", failing)
        with pytest.raises(error):
            build(documents(12), tmp_path / "store", lm=lm, segment_entries=150, batch_tokens=1024)
    assert not threads()
    # Each segment is one batch here, after one pass that calibrates.
    with pytest.raises(DatastoreError, match="unfinished build") as caught:
        Datastore.open(tmp_path / "store")
    done = sum(len(batch.documents) for batch in grouped(lm, documents(12))[: max(0, passes - 2)])
    assert f"{done} documents are in" in str(caught.value)
    build(documents(12), tmp_path / "store", lm=lm, segment_entries=150)
    assert contents(tmp_path / "store") == whole


@pytest.mark.parametrize("once", [False, True])  # then segments behind the one that failed get to the disk
@pytest.mark.parametrize("call", [1, 2, 4, 5, 7])
def test_full_disk_is_an_error_and_the_build_resumes_when_there_is_space(
    lm, tmp_path, piped, whole, monkeypatch, call, once
):
    piped()
    original, left = os.fsync, [call]

    def failing(handle):
        left[0] -= 1
        if left[0] == 0 or (left[0] < 0 and not once):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(handle)

    with monkeypatch.context() as patch:
        patch.setattr(segment.os, "fsync", failing)
        with pytest.raises(DatastoreError, match=r"Cannot write .*: No space left on device"):
            build(documents(12), tmp_path / "store", lm=lm, segment_entries=150)
    assert not threads()
    kept = {name: data for name, data in contents(tmp_path / "store").items() if name.endswith(".npy")}
    build(documents(12), tmp_path / "store", lm=lm, segment_entries=150)
    assert contents(tmp_path / "store") == whole
    for name, data in kept.items():
        assert "partial" in name or whole[name] == data


WRITES = [9, 25, 41]


@pytest.fixture(scope="module")
def killed_builds(tmp_path_factory):
    """A folder with one build that was killed after each number of writes."""
    folder = tmp_path_factory.mktemp("killed")
    kill_builds(folder, WRITES, pipelined=True)
    return folder


@pytest.mark.parametrize("writes", WRITES)
def test_build_killed_at_any_write_resumes_and_ends_with_the_same_bytes(lm, killed_builds, piped, whole, writes):
    killed = killed_builds / f"killed{writes}"
    piped()
    build(documents(12), killed, lm=lm, segment_entries=150)
    assert contents(killed) == whole


def test_nan_keys_are_an_error_that_names_the_place(tmp_path, piped):
    piped()
    lm = large_model(1.0)
    with torch.no_grad():
        lm.model.transformer.wte.weight[lm.encode("é")[0]] = torch.nan
    bad = Document("bad", "bad.txt", "A café in the library.")
    with pytest.raises(ModelError, match=r"undefined hidden states at transformer\.h\.2\.mlp \(among .* bad\.txt"):
        build([*documents(2), bad, *documents(6, start=2)], tmp_path / "store", lm=lm, segment_entries=1)
    with pytest.raises(DatastoreError, match="2 documents are in"):
        Datastore.open(tmp_path / "store")


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=8)


@settings(max_examples=40)
@given(texts=TEXTS)
def test_texts_are_tokenised_together_as_alone(lm, texts):
    assert lm.encode_all(texts) == [lm.encode(text) for text in texts]


def test_texts_that_cannot_be_tokenised_are_refused_together_as_alone(lm):
    small = CausalLM(tiny("llama"), tiny_tokenizer(), name="small")
    small.vocab_size = max(lm.encode("library")) - 1
    for model, text, error in ((lm, "ab\ud800", ParameterError), (small, "library", ModelError)):
        with pytest.raises(error) as alone:
            model.encode(text)
        with pytest.raises(error) as together:
            model.encode_all(["", text])
        assert str(alone.value) == str(together.value)


def test_documents_are_tokenised_ahead_in_order_and_not_too_far(lm, monkeypatch):
    monkeypatch.setattr(pipeline, "_MAX_CALL_DOCUMENTS", 3)
    taken = []

    def source():
        for document in documents(40):
            taken.append(document)
            yield document

    given = []
    for document, tokens in pipeline.tokenise_ahead(source(), lm):
        given.append(document)
        assert tokens == lm.encode(document.text)
        assert len(taken) - len(given) < 3 * (pipeline._CALLS_AHEAD + 1)
    assert given == taken == documents(40)
    assert not threads()
    monkeypatch.setattr(pipeline, "_MAX_CALL_CHARACTERS", 1)
    assert [document for document, _ in pipeline.tokenise_ahead(documents(5), lm)] == documents(5)
    assert list(pipeline.tokenise_ahead([], lm)) == []


def test_bad_text_is_refused_after_the_texts_before_it_and_leaves_no_thread(lm):
    text = [*documents(4), Document("bad", "bad", "ab\ud800"), *documents(4, start=4)]
    reading = pipeline.tokenise_ahead(text, lm)
    assert [next(reading)[0] for _ in range(4)] == documents(4)
    with pytest.raises(ParameterError, match="not Unicode at character 2"):
        next(reading)
    reading = pipeline.tokenise(iter(documents(4)), lm)
    next(reading)
    reading.close()
    assert not threads()


@given(lengths=st.lists(st.integers(0, 60), max_size=6), context=st.integers(1, 20), data=st.data())
def test_full_windows_are_counted_as_they_are_cut(lengths, context, data):
    shape = WindowShape(context, data.draw(st.integers(1, context)))
    batch = DocumentBatch()
    for length in lengths:
        batch.add(Document("d", "d", "x" * length), list(range(length)))
    cut = [window for tokens in batch.tokens for window in windows(tokens, shape, start_token=0)]
    assert batch.full_windows(shape) == sum(len(window) == context for window in cut)


@given(lengths=st.lists(st.integers(0, 60), max_size=6), count=st.integers(1, 200))
def test_sample_of_a_batch_is_its_first_tokens(lengths, count):
    batch, first = DocumentBatch(), 0
    for length in lengths:
        batch.add(Document("d", "d", ""), list(range(first, first + length)))
        first += length
    sample = [token for tokens in batch.sample(count) for token in tokens]
    assert sample == list(range(min(count, first)))
