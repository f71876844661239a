"""Merged stores contain every document once, unchanged; incompatible stores are refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
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

from helpers import oracle
from helpers.cli import failure
from helpers.cli import knnlm as command
from helpers.damage import change, flip, tree
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents, documents_by_hash, made_store
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import KeyMap
from knnlm.datastore.indexes import open_index
from knnlm.datastore.rewrite import derive
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.maintenance import merge as merge_module
from knnlm.maintenance.merge import merge
from knnlm.maintenance.verify import verify


@pytest.fixture(scope="module")
def three(lm, tmp_path_factory):
    """Stores of d0…d5, d4…d9 and d9…d11: d4, d5 and d9 are in two."""
    folder = tmp_path_factory.mktemp("merge")
    stores = [
        build(documents(count, start=start), folder / f"m{start}", lm=lm, segment_entries=100)
        for start, count in ((0, 6), (4, 6), (9, 3))
    ]
    for store in stores:
        store.close()
    return [store.path for store in stores]


def test_merge_has_every_document_once_with_its_keys(three, tmp_path):
    done = merge(three, tmp_path / "all")
    expected = {}
    for path in reversed(three):  # the first that has it counts
        expected |= documents_by_hash(path)
    found = documents_by_hash(tmp_path / "all")
    assert (done.documents, done.duplicates, done.stores) == (12, 3, 3)
    assert set(found) == set(expected)
    for name, (tokens, keys) in expected.items():
        assert found[name][0] == tokens
        assert np.array_equal(found[name][1], keys)
    assert done.tokens == done.keys == sum(len(tokens) for tokens, _ in expected.values())
    assert verify(tmp_path / "all", deep=True).sound


def test_search_in_a_merged_store_equals_brute_force(three, tmp_path, lm):
    merge(three, tmp_path / "all", index="IVF4,Flat")
    keys = np.concatenate([keys for _, keys in documents_by_hash(tmp_path / "all").values()])
    with closing(Datastore.open(tmp_path / "all")) as store:
        found = open_index(store, metric="ip").search(torch.from_numpy(keys[::17]), 5)
        for query, distances in zip(keys[::17], found.distances.numpy(), strict=True):
            assert distances == pytest.approx(np.sort(oracle.distances(query, keys, "ip"))[:5], rel=1e-4)
        assert store.catalog.indexes()[0].spec == "IVF4,Flat"
        for row in range(0, store.entry_count, 37):
            document = store.document_at(row)
            tokens = lm.encode(documents(12)[int(document.id[1:])].text)
            assert tokens[row - document.first_entry] == int(store.values(torch.tensor([row])))


def test_two_halves_merge_to_the_bytes_of_the_whole(lm, tmp_path):
    """With segments that end where the halves do."""
    whole = build(documents(6), tmp_path / "whole", lm=lm, segment_entries=1)
    build(documents(3), tmp_path / "a", lm=lm, segment_entries=1).close()
    build(documents(3, start=3), tmp_path / "b", lm=lm, segment_entries=1).close()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    files = {name: data for name, data in tree(tmp_path / "merged").items() if name.startswith("segments/")}
    assert files == {name: data for name, data in tree(whole.path).items() if name.startswith("segments/")}
    with closing(Datastore.open(tmp_path / "merged")) as merged:
        assert merged.fingerprint == whole.fingerprint
        assert list(merged.catalog.documents()) == list(whole.catalog.documents())


@settings(max_examples=8)
@given(data=st.data())
def test_overlapping_pruned_stores_merge_like_sets(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    sizes = generator.integers(1, 6, 12)
    pool = {str(number): (generator.normal(size=(size, 3)), generator.integers(0, 5, size)) for number, size in
            enumerate(sizes)}  # fmt: skip
    expected, paths = {}, []
    for number in range(data.draw(st.integers(1, 3))):
        names = data.draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, max_size=6, unique=True))
        keys, values = (np.concatenate([pool[name][part] for name in names]) for part in (0, 1))
        path = folder / f"m{number}"
        store = made_store(
            path,
            keys,
            [*values, 4][: len(values)] if 4 in values else values,
            sizes=[len(pool[name][1]) for name in names],
            texts=names,
        )
        with closing(Catalog.open(path / CATALOG_FILE, write=True)) as catalog:
            catalog.put(model={**store.model, "vocab_size": 5})
        store.close()
        if data.draw(st.booleans()):
            with closing(Datastore.open(path)) as whole:
                keep = torch.from_numpy(generator.random(whole.key_count) < 0.6)
                path = folder / f"p{number}"
                derive(whole, path, keep=keep, counts=torch.from_numpy(1 + generator.random(whole.key_count))).close()
        paths.append(path)
        expected = documents_by_hash(path) | expected
    merge(paths, folder / "out")
    found = documents_by_hash(folder / "out")
    assert found.keys() == expected.keys()
    for name, (tokens, keys) in expected.items():
        assert found[name][0] == tokens
        assert np.array_equal(found[name][1], keys)
    assert verify(folder / "out", deep=True).sound


def test_counts_of_pruned_keys_are_merged(tmp_path):
    generator = np.random.default_rng(0)
    one = made_store(tmp_path / "one", generator.normal(size=(20, 4)), np.arange(20) % 5, sizes=[5] * 4)
    counts = torch.arange(20) + 1.0
    keep = torch.tensor([0, 3, 7, 8, 12, 19])
    derive(one, tmp_path / "pruned", keep=keep, counts=counts).close()
    merge([tmp_path / "pruned"], tmp_path / "out")
    with closing(Datastore.open(tmp_path / "out")) as store:
        assert store.counts(torch.arange(6)).tolist() == [1, 4, 8, 9, 13, 20]
        assert store.entries_of(torch.arange(6)).tolist() == keep.tolist()


@pytest.mark.parametrize("mapped", [False, True])
def test_stores_with_other_offsets_and_scales_are_merged(tmp_path, mapped):
    generator = np.random.default_rng(1)
    keys = generator.normal(size=(30, 4)).astype(np.float32)
    offsets = [np.array([1000.0, 0, -500, 2], np.float32), np.array([996.0, 1, -510, 0], np.float32)]
    paths = []
    for number, offset in enumerate(offsets):
        part = slice(15 * number, 15 * number + 15)
        path = tmp_path / f"m{number}"
        sizes, texts = [5] * 3, [f"{number}-{place}" for place in range(3)]
        shifted = keys[part] + offsets[0] - offset  # so that whole keys are keys + offsets[0] everywhere
        store = made_store(path, shifted, np.arange(15) % 7, sizes=sizes, texts=texts, offset=offset, dtype="float32")
        if mapped:
            matrix = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 3))).float()
            derive(store, tmp_path / f"d{number}", key_map=KeyMap(matrix, torch.ones(4))).close()
            path = tmp_path / f"d{number}"
        paths.append(path)
    merge(paths, tmp_path / "out")
    with closing(Datastore.open(tmp_path / "out")) as store:
        queries = torch.from_numpy(keys[20:24] + offsets[0])
        found = open_index(store).search(store.project(queries), 1)
        assert found.ids[:, 0].tolist() == [20, 21, 22, 23]
        assert found.distances.max() < 1e-4
        assert torch.allclose(store.take(torch.arange(20, 24)), store.project(queries), atol=1e-3)
    assert verify(tmp_path / "out", deep=True).sound


def test_incompatible_stores_are_refused_with_the_difference(lm, three, tmp_path):
    other = CausalLM(tiny("llama", seed=1), tiny_tokenizer(), name="tiny-llama")
    layer = CausalLM(lm.model, lm.tokenizer, name="tiny-llama", layer=0)
    cases = [
        (build(documents(2), tmp_path / "weights", lm=other), "model's weights differs"),
        (build(documents(2), tmp_path / "layer", lm=layer), "model's key module differs"),
        (build(documents(2), tmp_path / "window", lm=lm, window=WindowShape(64, 32)), "window differs"),
        (
            build(documents(2), tmp_path / "dtype", lm=lm, key_format="float32"),
            r"key dtype differs \(float16 and float",
        ),
    ]
    for store, words in cases:
        store.close()
        with pytest.raises(ModelMismatch, match=words):
            merge([three[0], store.path], tmp_path / "out")
    with closing(Datastore.open(three[0])) as store:
        derive(store, tmp_path / "mapped", key_map=KeyMap(torch.eye(32)[:, :8].clone(), torch.zeros(32))).close()
    with pytest.raises(ModelMismatch, match="key map differs"):
        merge([three[0], tmp_path / "mapped"], tmp_path / "out")
    shutil.copytree(three[1], tmp_path / "future")
    change(tmp_path / "future", "INSERT INTO meta VALUES ('folding', '{\"bits\": 8}')")  # unknown metadata
    with pytest.raises(ModelMismatch, match="folding differs"):
        merge([three[0], tmp_path / "future"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_existing_targets_and_damaged_sources_are_refused(three, tmp_path):
    with pytest.raises(ParameterError, match="Nothing to merge"):
        merge([], tmp_path / "out")
    with pytest.raises(ParameterError, match="is the store to copy from"):
        merge([three[1]], three[1])
    shutil.copytree(three[0], tmp_path / "damaged")
    flip(tmp_path / "damaged/segments/000001/keys.npy", -1)
    with pytest.raises(DatastoreCorrupt, match=r"segments/000001/keys\.npy: checksum mismatch"):
        merge([tmp_path / "damaged"], tmp_path / "out")
    with pytest.raises(DatastoreError, match="an unfinished merge of other stores"):
        merge(three, tmp_path / "out")
    merge(three, tmp_path / "fine")
    with pytest.raises(DatastoreError, match="is a finished store already"):
        merge(three, tmp_path / "fine")


def test_killed_merge_resumes_and_ends_with_the_same_bytes(three, tmp_path):
    merge(three, tmp_path / "whole")
    expected = tree(tmp_path / "whole")
    outs = [tmp_path / f"out-{number}" for number in range(1, 11)]
    script = f"""
        import os, sys
        from pathlib import Path
        sys.path[:0] = [{str(Path(__file__).parent.parent)!r}]
        from helpers.kill import Dying
        from knnlm.datastore.catalog import Catalog
        from knnlm.maintenance import merge as merge_module
        from knnlm.datastore.segments import NewSegment
        for number, path in enumerate(sys.argv[1:], 1):
            if os.fork() == 0:
                dying = Dying(number)
                Catalog.add_segment = dying(Catalog.add_segment)
                NewSegment.seal, NewSegment.array = dying(NewSegment.seal), dying(NewSegment.array)
                Catalog.create = dying(Catalog.create)
                Path.rename = dying(Path.rename)
                merge_module.merge({[str(path) for path in three]!r}, path)
                os._exit(0)
            print(os.waitpid(-1, 0)[1])
    """
    command_line = [sys.executable, "-c", textwrap.dedent(script), *map(str, outs)]
    process = subprocess.run(command_line, check=True, capture_output=True, text=True)
    assert process.stdout.split() == ["9"] * len(outs)
    for out in outs:
        if (out / CATALOG_FILE).exists():
            with pytest.raises(DatastoreError, match="unfinished"):
                Datastore.open(out)
            assert verify(out, deep=True).sound  # as far as it is
        merge(three, out)
        found = tree(out)
        assert set(found) == set(expected)
        for name in found:
            if name.startswith("segments/"):
                assert found[name] == expected[name], name
        with closing(Datastore.open(out)) as one, closing(Datastore.open(tmp_path / "whole")) as two:
            assert list(one.catalog.documents()) == list(two.catalog.documents())


def test_merge_killed_before_its_index_builds_it_when_repeated(three, tmp_path, monkeypatch):
    out = tmp_path / "all"
    with monkeypatch.context() as patched:
        patched.setattr(merge_module, "build_requested_index", lambda *_, **__: os._exit(7))
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                merge(three, out, index="Flat", metric="ip")
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(DatastoreError, match="is a finished store already"):
        merge(three[:2], out, index="Flat", metric="ip")
    done = merge(three, out, index="Flat", metric="ip")
    assert (done.index, done.documents, done.duplicates) == ("Flat", 12, 3)
    with closing(Catalog.open(out / CATALOG_FILE)) as catalog:
        assert [(row.spec, row.metric) for row in catalog.indexes()] == [("Flat", "ip")]
    with pytest.raises(DatastoreError, match="is a finished store already"):
        merge(three, out, index="Flat", metric="ip")


def test_ram_use_does_not_grow_with_the_stores(tmp_path):
    """A merge of 64 MB of keys may take a few chunks of 16 MB, not all of them."""
    generator = np.random.default_rng(0)
    keys = generator.normal(size=(1 << 15, 512)).astype(np.float32)
    made_store(tmp_path / "big", keys, np.arange(len(keys)) % 7, sizes=[len(keys)], segments=1).close()
    script = """
        import resource, sys
        from knnlm.maintenance.merge import merge
        import torch, numpy
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        merge([sys.argv[1], sys.argv[2]], sys.argv[3])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    offset = np.full(512, 0.5, np.float32)
    made_store(tmp_path / "small", keys[:9], np.arange(9) % 7, texts=["other"], segments=1, offset=offset).close()
    arguments = [str(tmp_path / name) for name in ("small", "big", "out")]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments], check=True, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    mapped = keys.nbytes / 1024  # pages of mapped files count too, though they can be evicted
    assert int(result.stdout) < mapped + 80 * 1024


def test_command_merges_and_reports(three, tmp_path, capfd):
    code, out, err = command(capfd, "merge", *three, "--out", tmp_path / "all", "--index", "Flat", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["documents"], result["duplicates"], result["index"]) == (12, 3, "Flat")
    assert "finished store already" in failure(capfd, "merge", *three, "--out", tmp_path / "all")
    code, out, err = command(capfd, "merge", three[0], "--out", tmp_path / "one")
    assert "0 duplicates left out" in out
