"""A sharded store: the same neighbours, documents and figures as one store with the same documents."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from helpers.pairs import pair_lm, pairs
from helpers.stores import documents, made_store
from knnlm.datastore import sharded_catalog
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.manifest import MANIFEST_FILE, read_manifest, write_manifest
from knnlm.datastore.remove import Selection, list_documents, removal_report, remove
from knnlm.datastore.rewrite import derive
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.sharded_catalog import ShardedCatalog
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.index.composite import FilteredIndex, ShardedIndex
from knnlm.index.exact import ExactIndex
from knnlm.ingest.build import add, build, build_shard
from knnlm.maintenance.export import export
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify
from knnlm.memories.subset import PairSubsetIndex
from knnlm.mixture.mixture import Mixture
from knnlm.server.documents import DocumentService

DOCUMENTS = documents(15)
HELD_OUT = documents(2, words=40, start=50)
STORAGES = ("float16", "float32", "int8", "pca16-int8", "codes8")


def build_shards(folder: Path, lm, count: int, *, key_format: str = "float16") -> list[Path]:
    """Build every shard of the documents; those after the first have its codec."""
    paths = [folder / f"shard-{number}" for number in range(1, count + 1)]
    for number, path in enumerate(paths, 1):
        like = Datastore.open(paths[0]) if number > 1 else None
        shard = f"{number}/{count}"
        options = {"key_format": key_format, "segment_entries": 200, "like": like}
        build_shard(lambda: iter(DOCUMENTS), path, shard=shard, lm=lm, **options).close()
    return paths


@pytest.fixture(scope="module")
def joined(lm, tmp_path_factory):
    """Five shards of float16 keys, and the sharded store over them; in one folder."""
    folder = tmp_path_factory.mktemp("shards") / "whole"
    join_shards(build_shards(folder, lm, 5), folder)
    return folder


@pytest.fixture
def store_path(joined, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(joined, tmp_path / "whole")


def described(store: Datastore) -> list[tuple]:
    return [(one.id, one.source, one.first_entry, one.entries, one.sha256) for one in store.documents()]


def check_equal(path: Path, one_path: Path, *, metrics=("l2", "ip")) -> None:
    """A sharded store and one store have the same documents, and the same neighbours to the last bit."""
    with closing(Datastore.open(path)) as sharded, closing(Datastore.open(one_path)) as one:
        assert sharded.shards
        assert not one.shards
        numbers = torch.arange(one.entry_count)
        assert (sharded.entry_count, sharded.key_count) == (one.entry_count, one.key_count)
        assert torch.equal(sharded.values(numbers), one.values(numbers))
        keys = one.take(torch.arange(one.key_count))
        assert torch.equal(sharded.take(torch.arange(one.key_count)), keys)
        assert sharded.keys.half == one.keys.half
        if one.keys.half and len(keys) > 5:  # as a GPU reads them
            read = torch.empty(len(keys) - 5, one.width, dtype=torch.float16)
            sharded.keys.read(5, read)
            assert torch.equal(read, keys[5:].half())
        assert torch.equal(sharded.entries_of(torch.arange(one.key_count)), one.entries_of(torch.arange(one.key_count)))
        assert described(sharded) == described(one)
        for entry in range(0, one.entry_count, 97):
            assert sharded.document_at(entry).id == one.document_at(entry).id
            assert sharded.around(entry) == one.around(entry)
        for document in sharded.documents():
            assert sharded.document_numbered(document.number) == document
        queries = keys[::9] + torch.tensor([0.0, 0.25]).repeat(len(keys[::9]) // 2 + 1)[: len(keys[::9]), None]
        for metric in metrics:
            indexes = [open_index(each, metric=metric) for each in (sharded, one)]
            for k in (1, 13, 5000):
                ours, theirs = (index.search(queries, k) for index in indexes)
                assert torch.equal(ours.ids, theirs.ids)
                assert torch.equal(ours.distances, theirs.distances)


def perplexity(path: Path, lm, memories: str = "knn,ngram") -> float:
    return Mixture.open(path, lm, memories=memories).evaluate(HELD_OUT).perplexity


@pytest.mark.parametrize("key_format", STORAGES)
def test_neighbours_and_perplexity_are_those_of_one_store(key_format, lm, tmp_path):
    five = build_shards(tmp_path, lm, 5, key_format=key_format)
    for name, parts in (("one", five), ("first", five[:2]), ("second", five[2:])):
        merge(parts, tmp_path / name)
    expected = perplexity(tmp_path / "one", lm)
    for paths in ([tmp_path / "one"], [tmp_path / "first", tmp_path / "second"], five):
        sharded = tmp_path / f"sharded-{len(paths)}"
        join_shards(paths, sharded)
        check_equal(sharded, tmp_path / "one")
        assert Datastore.open(sharded).storage == key_format
    assert perplexity(sharded, lm) == expected
    assert verify(sharded, deep=True).sound


def test_neighbours_are_those_of_one_store_after_changes(store_path, lm, tmp_path):
    def check(name: str) -> None:
        merge([store_path], tmp_path / name)
        check_equal(store_path, tmp_path / name)
        assert perplexity(store_path, lm) == perplexity(tmp_path / name, lm)
        assert verify(store_path, deep=True).sound

    before = [shard.entries for shard in read_manifest(store_path).shards]
    added = add([*documents(2, start=30), DOCUMENTS[0], DOCUMENTS[14]], store_path, lm=lm)
    assert (added.documents, added.skipped, added.generation) == (2, 2, 1)
    after = [shard.entries for shard in read_manifest(store_path).shards]
    smallest = before.index(min(before))
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        added.tokens if number == smallest else 0 for number in range(5)
    ]
    check("added")
    gone = remove(store_path, where="source=text.jsonl:3")
    assert [one.id for one in gone.documents] == ["d2"]
    assert {one.id for one in remove(store_path, source="text.jsonl:1*").documents} == {
        f"d{number}" for number in (0, *range(9, 15))
    }
    check("removed")
    done = compact(store_path)
    assert done.tokens_dropped > 0
    assert done.purged
    check("compacted")
    assert not removal_report(store_path).bytes


@settings(max_examples=10)
@given(data=st.data())
def test_any_split_gives_the_neighbours_of_one_store(data):
    """Keys of few values, so that most distances are ties."""
    seed, metric = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.sampled_from(["l2", "ip"]))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(sizes) - 1)), max_size=4)) - {len(sizes)})
    dtype, k = data.draw(st.sampled_from(["float16", "float32"])), data.draw(st.integers(1, 60))
    generator = np.random.default_rng(seed)
    rows = sum(sizes)
    keys, values = generator.integers(-2, 3, (rows, 5)).astype(np.float32), generator.integers(0, 9, rows)
    queries = generator.normal(size=(7, 5)).astype(np.float32)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options = {"dtype": dtype, "vocab_size": 9}
        made_store(folder / "one", keys, values, sizes=sizes, segments=data.draw(st.integers(1, 4)), **options).close()
        paths = []
        for begin, end in pairwise([0, *cuts, len(sizes)]):
            own = slice(sum(sizes[:begin]), sum(sizes[:end]))
            segments, path = data.draw(st.integers(1, 3)), folder / f"from-{begin}"
            options |= {"sizes": sizes[begin:end], "segments": segments, "first_id": begin}
            made_store(path, keys[own], values[own], **options).close()
            paths.append(path)
        join_shards(paths, folder / "sharded")
        with closing(Datastore.open(folder / "one")) as one, closing(Datastore.open(folder / "sharded")) as sharded:
            asked = torch.from_numpy(queries)
            ours, theirs = (open_index(each, metric=metric).search(asked, k) for each in (sharded, one))
            assert torch.equal(ours.ids, theirs.ids)
            assert torch.equal(ours.distances, theirs.distances)
            assert described(sharded) == described(one)
            assert [document.number for document in sharded.documents()] == list(range(len(sizes)))
        check_by_brute_force(ours, queries, keys, metric, k)


def check_by_brute_force(found, queries, keys, metric, k) -> None:
    true = ((queries[:, None] - keys[None]) ** 2).sum(2) if metric == "l2" else -(queries @ keys.T)
    count = min(k, len(keys))
    np.testing.assert_allclose(found.distances[:, :count], np.sort(true, 1)[:, :count], atol=1e-4)
    np.testing.assert_allclose(
        np.take_along_axis(true, found.ids[:, :count].numpy(), 1), found.distances[:, :count], atol=1e-4
    )
    assert (found.ids[:, count:] == -1).all()


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data())
def test_any_changes_leave_the_neighbours_of_one_store(lm, joined, data):
    """Additions, removals, compactions and indexes, of the sharded store and of single shards."""
    with tempfile.TemporaryDirectory() as place:
        path, start = shutil.copytree(joined, Path(place) / "whole"), 100
        numbers = {document.id: document.number for document in Datastore.open(path).documents()}
        for step in range(data.draw(st.integers(1, 6))):
            target = data.draw(st.sampled_from([path, path, path / "shard-1", path / "shard-4"]))
            action = data.draw(st.sampled_from(["add", "add", "remove", "compact"]))
            stored = [document.id for document in Datastore.open(target).documents()]
            if action == "add":
                count = data.draw(st.integers(1, 3))
                add(documents(count, start=start), target, lm=lm)
                start += count
            elif action == "remove" and stored:
                remove(target, document=data.draw(st.sampled_from(stored)))
            elif action == "compact":
                compact(target)
            merge([path], Path(place) / f"one-{step}")
            check_equal(path, Path(place) / f"one-{step}")
            if target == path and action != "compact":  # numbers are final from here on
                now = {document.id: document.number for document in Datastore.open(path).documents()}
                assert all(numbers.get(name, number) == number for name, number in now.items())
                numbers |= now
        assert len(set(numbers.values())) == len(numbers)
        assert verify(path, deep=True).sound


def test_indexes_of_shards_are_searched_and_merged(store_path):
    with closing(Datastore.open(store_path)) as store:
        exact = open_index(store).search(store.take(torch.arange(0, store.key_count, 5)), 10)
        assert build_index(store, "Flat") == "Flat"
        index = open_index(store)
        assert isinstance(index, ShardedIndex)
        found = index.search(store.take(torch.arange(0, store.key_count, 5)), 10)
    torch.testing.assert_close(found.distances, exact.distances, atol=1e-3, rtol=1e-4)
    # Of equal distances, the lower number comes first.
    tied = found.distances[:, 1:] == found.distances[:, :-1]
    assert (found.ids[:, 1:] > found.ids[:, :-1])[tied].all()
    with closing(Datastore.open(store_path)) as store:
        assert len(store.catalog.indexes()) == 5
        assert store.index_bytes > 0
    with closing(Datastore.open(store_path, trust_index=False)) as store:
        assert not isinstance(open_index(store), ShardedIndex)


def test_block_indexes_of_shards_are_searched_as_one(store_path, lm):
    """As after a build, a removal, an addition, and a compaction; few keys, so that all blocks are searched."""

    def check(kind: type) -> None:
        with closing(Datastore.open(store_path)) as store:
            queries = store.take(torch.arange(0, store.key_count, 5))
            index = open_index(store)
            assert isinstance(index, kind)
            found, exact = index.search(queries, 10), ExactIndex(store.keys).search(queries, 10)
            torch.testing.assert_close(found.distances, exact.distances, atol=0.05 * exact.distances.max(), rtol=0.05)
            taken = store.take(found.ids)
        measured = (taken - queries[:, None]).square().sum(2)
        torch.testing.assert_close(found.distances, measured, atol=0.05 * exact.distances.max(), rtol=0.05)

    with closing(Datastore.open(store_path)) as store:
        build_index(store, "Lists4,Blocks64")
    check(FilteredIndex)
    remove(store_path, document="d3")
    check(FilteredIndex)
    add(documents(1, start=40), store_path, lm=lm)
    check(ShardedIndex)
    compact(store_path)
    check(FilteredIndex)


def test_numbers_of_documents_stay_when_documents_are_added_and_removed(store_path, lm):
    before = {one.id: one.number for one in Datastore.open(store_path).documents()}
    assert sorted(before.values()) == list(range(15))
    add(documents(1, start=40), store_path, lm=lm)
    remove(store_path, where="number=15")
    add(documents(1, start=41), store_path, lm=lm)
    compact(store_path)
    after = {one.id: one.number for one in Datastore.open(store_path).documents()}
    assert after == {**before, "d41": 16}
    found, total = list_documents(store_path, Selection(where=("number=7",)))
    assert ([one.id for one in found], total) == (["d7"], 1)
    for first, limit in ((0, 4), (3, 5), (12, None), (16, 3)):
        page, total = list_documents(store_path, first=first, limit=limit)
        listed = list(Datastore.open(store_path).documents())
        assert [one.id for one in page] == [one.id for one in listed][first:][:limit]
        assert total == 16
    with pytest.raises(DatastoreError, match="has no document for --where number=15"):
        remove(store_path, where="number=15")
    with pytest.raises(ParameterError, match="is an integer"):
        list_documents(store_path, Selection(where=("number=x",)))


def test_consecutive_additions_share_a_span_of_numbers(store_path, lm):
    for number in (44, 55, 66):  # of one word each, so that the smallest shard stays the smallest
        add(documents(1, start=number, words=1), store_path, lm=lm)
    spans = [len(shard.documents) for shard in read_manifest(store_path).shards]
    assert sorted(spans) == [1, 1, 1, 1, 2]
    numbers = {one.id: one.number for one in Datastore.open(store_path).documents()}
    assert [numbers[f"d{number}"] for number in (44, 55, 66)] == [15, 16, 17]


def test_a_shard_that_was_changed_directly_is_read_as_it_is(store_path, lm):
    add(documents(1, start=40), store_path / "shard-2", lm=lm)
    with closing(Datastore.open(store_path)) as store:
        assert [one.number for one in store.documents() if one.id == "d40"] == [15]
        assert store.generation == 1
    remove(store_path, document="d0")  # the numbers are written down
    add(documents(1, start=41), store_path / "shard-1", lm=lm)
    numbers = {one.id: one.number for one in Datastore.open(store_path).documents()}
    assert (numbers["d40"], numbers["d41"]) == (15, 16)


def test_an_interrupted_change_of_several_shards_is_finished_by_the_same_command(store_path, monkeypatch):
    from knnlm.datastore import shards

    real, calls = shards.remove, []

    def failing(path, **options):
        calls.append(path)
        if len(calls) == 2:
            raise DatastoreError("no space")
        return real(path, **options)

    monkeypatch.setattr(shards, "remove", failing)
    with pytest.raises(DatastoreError, match="no space"):
        remove(store_path, source="text*")
    monkeypatch.undo()
    left = Datastore.open(store_path).catalog.document_count()
    assert 0 < left < 15
    assert len(remove(store_path, source="text*").documents) == left
    assert Datastore.open(store_path).entry_count == 0


def test_unchanged_shards_are_not_opened_again(store_path, lm, monkeypatch):
    reopen, opened = ShardedCatalog.reopen, []
    monkeypatch.setattr(ShardedCatalog, "reopen", lambda catalog: opened.append(catalog) or reopen(catalog))
    changes = [
        lambda: add(documents(1, start=40), store_path, lm=lm),
        lambda: remove(store_path / "shard-2", document="d4"),
        lambda: join_shards([store_path / f"shard-{n}" for n in range(1, 6)], store_path, replace_manifest=True),
    ]
    for change in changes:
        with closing(Datastore.open(store_path)) as store:
            opened.clear()
            with monkeypatch.context() as patch:
                patch.setattr(sharded_catalog, "_SETTLED_NS", 3600 * 10**9)  # the files were written a moment ago
                assert [store.stale, store.stale, len(opened)] == [False, False, 2]
                patch.setattr(sharded_catalog, "_SETTLED_NS", 0)
                assert [store.stale, store.stale, len(opened)] == [False, False, 3]
                change()
                assert store.stale


def test_open_store_is_a_snapshot(store_path, lm):
    store = Datastore.open(store_path)
    before, layout = described(store), store.layout
    add(documents(1, start=40), store_path, lm=lm)
    assert store.stale
    assert described(store) == before
    fresh = store.reopen()
    assert len(described(fresh)) == len(before) + 1
    assert fresh.layout != layout  # entries of later shards have other numbers
    own = Datastore.open(store_path)
    own.remove(document="d40")
    assert described(own) == before
    assert own.holds(DOCUMENTS[3].text)
    assert not own.holds("anything else")


def test_tuning_is_saved_beside_the_manifest(store_path, lm):
    mixture = Mixture.open(store_path, lm)
    mixture.tune(HELD_OUT)
    assert Catalog.open(store_path / CATALOG_FILE).get("active_tuning") is not None
    assert Mixture.open(store_path, lm).evaluate(HELD_OUT).perplexity > 0
    assert verify(store_path, deep=True).sound


def test_removed_text_leaves_the_suffix_array(store_path, lm):
    assert perplexity(store_path, lm, "ngram") > 0
    assert (store_path / "ngram").is_dir()
    remove(store_path, document="d3")
    assert not (store_path / "ngram").exists()
    assert removal_report(store_path).removed_tokens > 0


def test_served_documents_are_found_by_number(store_path, lm):
    with closing(DocumentService(store_path, lm)) as service:
        added = service.add(documents(1, start=40))
        assert added["added"] == 1
        listed = {one["id"]: one for one in service.list()["documents"]}
        assert listed["d40"]["number"] == 15
        shown = service.read(15, limit=1000)
        assert shown["id"] == "d40"
        assert service.read(14)["id"] == "d14"
        service.remove(15)
        assert service.list()["total"] == 15


def test_other_commands_read_a_sharded_store(store_path, joined, lm, tmp_path):
    with closing(Datastore.open(store_path)) as store:
        copy = store.compress(tmp_path / "copy", key_format="int8")
        assert (copy.entry_count, copy.storage, copy.shards) == (store.entry_count, "int8", [])
        assert described(copy) == described(store)
    assert export(store_path, tmp_path / "exported").entries == copy.entry_count
    with pytest.raises(DatastoreError, match="Repair its shards"):
        repair(store_path)
    with pytest.raises(Exception, match="copy_store does not copy"):
        KnnForCausalLM(Mixture.open(store_path, lm)).save_pretrained(tmp_path / "saved", copy_store=True)
    for write in (lambda: build(DOCUMENTS, store_path, lm=lm), lambda: merge([joined], store_path)):
        with pytest.raises(DatastoreError, match="is a sharded store already"):
            write()


def test_join_orders_the_parts_of_a_text(joined, tmp_path):
    shards = [joined / f"shard-{number}" for number in (3, 1, 5, 2, 4)]
    result = join_shards(shards, tmp_path / "again")
    assert [path.name for path in result.shards] == [f"shard-{number}" for number in range(1, 6)]
    assert result.documents == 15
    assert all(Path(shard.path).is_absolute() for shard in read_manifest(tmp_path / "again").shards)
    assert [shard.path for shard in read_manifest(joined).shards] == [f"shard-{number}" for number in range(1, 6)]


def test_join_refuses_shards_that_do_not_fit(joined, lm, tmp_path):
    shards = [joined / f"shard-{number}" for number in range(1, 6)]
    out = tmp_path / "out"
    with pytest.raises(DatastoreError, match=r"Shard 3 of 5 is missing. Build it with --shard 3/5"):
        join_shards([*shards[:2], *shards[3:]], out)
    with pytest.raises(ParameterError, match="named twice"):
        join_shards([*shards, shards[0]], out)
    with pytest.raises(DatastoreError, match="There is no folder"):
        join_shards([tmp_path / "nothing"], out)
    with pytest.raises(DatastoreCorrupt, match="is a sharded store itself"):
        join_shards([joined], out)
    build(DOCUMENTS[:3], tmp_path / "a", lm=lm).close()
    with pytest.raises(DatastoreError, match="was not built with --shard"):
        join_shards([*shards, tmp_path / "a"], out)
    build(DOCUMENTS[2:5], tmp_path / "b", lm=lm).close()
    with pytest.raises(DatastoreError, match="both have a document d2"):
        join_shards([tmp_path / "a", tmp_path / "b"], out)
    build(DOCUMENTS[5:6], tmp_path / "c", lm=lm, key_format="float32").close()
    with pytest.raises(ModelMismatch, match="keys format float16 and float32"):
        join_shards([tmp_path / "a", tmp_path / "c"], out)
    build_shard(lambda: iter(DOCUMENTS[:14]), tmp_path / "d", shard="5/5", lm=lm).close()
    with pytest.raises(DatastoreError, match="not two parts of one text"):
        join_shards([*shards[:4], tmp_path / "d"], out)
    assert not out.exists()
    with pytest.raises(DatastoreError, match="is a sharded store already"):
        join_shards(shards, joined)
    with pytest.raises(DatastoreError, match="is one of the shards"):
        join_shards([tmp_path / "a"], tmp_path / "a")
    out.mkdir()
    (out / "thesis.txt").touch()
    with pytest.raises(DatastoreError, match=r"contains thesis\.txt"):
        join_shards(shards, out)


def test_a_copy_of_another_shard_is_an_error(store_path, lm):
    """Its generation may be higher than that of the shard whose place it takes."""
    add(documents(2, start=90), store_path / "shard-3", lm=lm)
    Datastore.open(store_path).close()
    shutil.rmtree(store_path / "shard-2")
    shutil.copytree(store_path / "shard-3", store_path / "shard-2")
    with pytest.raises(DatastoreError, match=r"shard-3 is a copy of .*shard-2, not another shard of"):
        Datastore.open(store_path)
    (problem,) = verify(store_path).problems
    assert "is a copy of" in str(problem)


def test_a_moved_or_replaced_shard_is_an_error_until_it_is_joined_again(store_path, lm):
    numbers = {one.id: one.number for one in Datastore.open(store_path).documents()}
    (store_path / "shard-2").rename(store_path / "elsewhere")
    with pytest.raises(DatastoreError, match=r"its shard .*shard-2 is missing. If it was moved"):
        Datastore.open(store_path)
    found = verify(store_path)
    (problem,) = map(str, found.problems)
    assert problem.startswith(f"{store_path / 'shard-2'}: the shard is missing: put it back, or build it again")
    assert problem.endswith(f"knnlm shards join SHARD... --out {store_path} --replace")
    shutil.copytree(store_path / "shard-3", store_path / "shard-2")
    with pytest.raises(DatastoreError, match="is another store than the shard"):
        Datastore.open(store_path)
    shutil.rmtree(store_path / "shard-2")
    build(DOCUMENTS[3:6], store_path / "shard-2", lm=lm, key_format="float32").close()
    with pytest.raises(ModelMismatch, match="is no shard of"):
        Datastore.open(store_path)
    shards = [store_path / name for name in ("shard-1", "elsewhere", "shard-3", "shard-4", "shard-5")]
    join_shards(shards, store_path, replace_manifest=True)
    assert {one.id: one.number for one in Datastore.open(store_path).documents()} == numbers


@pytest.mark.parametrize(
    "change",
    [
        {"shards": []},
        {"format": 0},
        {"values": "pictures"},
        {"model": []},
        {"shards": [{"path": 3}]},
        {
            "shards": [
                {"path": "a", "first_entry": 1, "entries": 2, "documents": [], "generation": 0, "fingerprint": ""}
            ]
        },
    ],
)
def test_corrupt_manifest_is_one_clear_error(change, store_path):
    path = store_path / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DatastoreCorrupt, match="is corrupt"):
        Datastore.open(store_path)
    assert not verify(store_path).sound


def test_manifest_of_a_newer_version_or_without_it(store_path):
    path = store_path / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(DatastoreError, match="Upgrade knnlm"):
        Datastore.open(store_path)
    path.write_text("{")
    with pytest.raises(DatastoreCorrupt, match="is corrupt"):
        Datastore.open(store_path)
    path.unlink()
    with pytest.raises(DatastoreError, match=r"without its shards\.json"):
        Datastore.open(store_path)
    with pytest.raises(DatastoreError, match="is a sharded store"):
        list_documents(store_path)


def test_manifest_with_two_documents_of_one_number_is_corrupt(store_path):
    manifest = read_manifest(store_path)
    first, second, *rest = manifest.shards
    write_manifest(store_path, replace(manifest, shards=(first, replace(second, documents=first.documents), *rest)))
    with pytest.raises(DatastoreCorrupt, match="two documents have the number 0"):
        Datastore.open(store_path)


def test_shards_of_pairs_have_the_subsets_of_one_store(tmp_path):
    lm, read = pair_lm("marian"), lambda: iter(pairs(12))
    paths = [tmp_path / "1", tmp_path / "2"]
    for number, path in enumerate(paths, 1):
        build_shard(read, path, shard=f"{number}/2", lm=lm).close()
    join_shards(paths, tmp_path / "sharded")
    merge(paths, tmp_path / "one")
    remove(tmp_path / "sharded", where="number=1")
    remove(tmp_path / "one", where="number=1")
    sharded, one = Datastore.open(tmp_path / "sharded"), Datastore.open(tmp_path / "one")
    assert sharded.catalog.source_texts() == one.catalog.source_texts()
    assert [each.source_text for each in sharded.documents()] == [each.source_text for each in one.documents()]
    for catalog in (sharded.catalog, one.catalog):
        texts = [each.source_text for each in pairs(13)]
        assert catalog.contains_sources(texts) == [True, False, *[True] * 10, False]
    reopened = sharded.reopen()
    reopened.catalog.reuse_sources(sharded.catalog)
    assert reopened.catalog.contains_sources(texts[:3]) == [True, False, True]
    assert sharded.catalog.sample_sources(99) == [each.source_text for each in sharded.documents()]
    assert len(set(sharded.catalog.sample_sources(5))) == 5
    tokens = [tuple(lm.encode_sources([each.source_text])[0]) for each in pairs(12)[4:7]]
    queries = one.take(torch.tensor([3, 20, 40]))
    found = [PairSubsetIndex(each, 3, encode=lm.encode_sources).search(queries, 4, tokens) for each in (sharded, one)]
    assert torch.equal(found[0].ids, found[1].ids)
    assert torch.equal(found[0].distances, found[1].distances)


def test_pruned_shards_have_the_keys_and_counts_of_one_store(joined, tmp_path):
    generator, paths = np.random.default_rng(0), [tmp_path / "1", tmp_path / "2"]
    for number, path in enumerate(paths, 1):
        with closing(Datastore.open(joined / f"shard-{number}")) as shard:
            keep = torch.from_numpy(generator.random(shard.key_count) < 0.6)
            counts = torch.from_numpy(generator.integers(1, 9, shard.key_count).astype(np.float32))
            derive(shard, path, keep=keep, counts=counts).close()
    join_shards(paths, tmp_path / "sharded")
    merge(paths, tmp_path / "one")
    remove(tmp_path / "sharded", where="number=4")
    remove(tmp_path / "one", where="number=4")
    check_equal(tmp_path / "sharded", tmp_path / "one")
    sharded, one = Datastore.open(tmp_path / "sharded"), Datastore.open(tmp_path / "one")
    assert sharded.key_count < sharded.entry_count
    numbers = torch.arange(one.key_count)
    assert torch.equal(sharded.counts(numbers), one.counts(numbers))


def test_parts_of_different_texts_are_refused(joined, lm, tmp_path):
    rotated = [replace(one, id=two.id) for one, two in zip([*DOCUMENTS[5:], *DOCUMENTS[:5]], DOCUMENTS, strict=True)]
    same_sizes = [replace(one, text=one.text.swapcase()) for one in DOCUMENTS]
    shards = [joined / f"shard-{number}" for number in range(1, 5)]
    for name, text in (("rotated", rotated), ("same sizes", same_sizes)):
        build_shard(lambda text=text: iter(text), tmp_path / name, shard="5/5", lm=lm).close()
        with pytest.raises(DatastoreError, match="were built from different texts"):
            join_shards([*shards, tmp_path / name], tmp_path / "out")


def test_joining_again_keeps_the_numbers_of_documents_and_uses_none_again(joined, lm, tmp_path):
    for number in (1, 2, 3):
        build(DOCUMENTS[3 * number : 3 * number + 3], tmp_path / f"{number}", lm=lm).close()
    first, second, third = (tmp_path / name for name in "123")
    store = tmp_path / "whole"
    join_shards([first, second], store)
    add(documents(1, start=70), store, lm=lm)
    open_before = Datastore.open(store)
    numbers = {one.id: one.number for one in open_before.documents()}
    add(documents(1, start=80), first, lm=lm)  # directly, after which `first` is known by its place
    join_shards([third, first, second], store, replace_manifest=True)
    assert open_before.stale
    found = {one.id: one.number for one in Datastore.open(store).documents()}
    assert numbers.items() <= found.items()
    assert len(set(found.values())) == len(found) == 11
    join_shards([first, second], store, replace_manifest=True)  # without the third
    add(documents(1, start=90), store, lm=lm)
    again = {one.id: one.number for one in Datastore.open(store).documents()}
    new = again.pop("d90")
    assert again.items() <= found.items()
    assert new > max(found.values())
    generations = [Datastore.open(store).generation]
    join_shards([second], store, replace_manifest=True)
    generations.append(Datastore.open(store).generation)
    assert generations[0] < generations[1]


def test_joining_again_refuses_shards_of_another_model(joined, tmp_path, lm):
    store = shutil.copytree(joined, tmp_path / "whole")
    other = tmp_path / "other"
    build(DOCUMENTS[:3], other, lm=lm, key_format="float32").close()
    with pytest.raises(ModelMismatch, match=r"cannot replace the shards of .*keys format"):
        join_shards([other], store, replace_manifest=True)


def test_a_text_may_have_an_id_twice(lm, tmp_path):
    text = [replace(one, id="same") for one in DOCUMENTS[:4]]
    for number in (1, 2):
        build_shard(lambda: iter(text), tmp_path / str(number), shard=f"{number}/2", lm=lm).close()
    assert join_shards([tmp_path / "1", tmp_path / "2"], tmp_path / "out").documents == 4


def test_places_that_cannot_be_joined(joined, tmp_path, lm):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatastoreError, match="is not a store, so it cannot be joined"):
        join_shards([joined / "shard-1", tmp_path / "empty"], tmp_path / "out")
    build(DOCUMENTS[:3], tmp_path / "a", lm=lm).close()
    with pytest.raises(DatastoreError, match="is one of the shards, or inside of one"):
        join_shards([tmp_path / "a"], tmp_path / "a" / "inside")
    store = shutil.copytree(joined, tmp_path / "whole")
    manifest = read_manifest(store)
    write_manifest(store, replace(manifest, shards=(replace(manifest.shards[0], path="."), *manifest.shards[1:])))
    assert [problem.message for problem in verify(store).problems] == ["the shard is a sharded store itself"]
    with pytest.raises(DatastoreCorrupt, match="lists itself"):
        Datastore.open(store)


def test_same_model_at_another_place_fits(joined, lm, tmp_path):
    renamed = [*joined.glob("shard-[12]")]
    shutil.copytree(renamed[0], tmp_path / "1")
    shutil.copytree(renamed[1], tmp_path / "2")
    with closing(Catalog.open(tmp_path / "2" / CATALOG_FILE, write=True)) as catalog:
        catalog.put(model={**catalog.get("model"), "name": "/another/folder"}, shard=None)
    with closing(Catalog.open(tmp_path / "1" / CATALOG_FILE, write=True)) as catalog:
        catalog.put(shard=None)
    assert join_shards([tmp_path / "1", tmp_path / "2"], tmp_path / "out").documents == 6
    Datastore.open(tmp_path / "out").close()


def test_dry_run_of_a_removal_needs_no_lock(store_path):
    with writer_lock(store_path):
        assert len(remove(store_path, where="number=1", dry_run=True).documents) == 1
