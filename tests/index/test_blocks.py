"""The block index: searches equal brute force over rounded keys, and every key is in exactly one block."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers import oracle
from helpers.stores import made_store
from helpers.vectors import Array, RecordingArray, assert_nearest, clustered
from knnlm import io
from knnlm.corpus import Document
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, IndexInvalid, ParameterError
from knnlm.index import base, factory
from knnlm.index.blocks import build as build_module
from knnlm.index.blocks import index as blocks_module
from knnlm.index.blocks import is_blocks, kernels
from knnlm.index.blocks.build import balanced_split, build_blocks, kmeans, means, write_blocks
from knnlm.index.blocks.file import read_blocks
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.blocks.kernels import Centroids, int8_matmul, parallel_for, quantise, smallest_k
from knnlm.index.composite import ConcatenatedIndex, FilteredIndex, ShardedIndex
from knnlm.index.exact import ExactIndex
from knnlm.index.factory import build_approximate
from knnlm.index.rerank import RerankedIndex
from knnlm.index.validation import check_index
from knnlm.ingest.build import add, build
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify


def decoded(blocks):
    """The keys as the file has them, in the order of their numbers, in float64."""
    scales = np.concatenate([row[:size] for row, size in zip(blocks.scales, blocks.sizes, strict=True)])
    keys = blocks.mapped_keys[: len(scales)].astype(np.float64) * scales.astype(np.float64)[:, None]
    found = np.empty_like(keys)
    found[blocks.ids] = keys
    return found


def brute_force(index, queries):
    """Distances between rounded queries and rounded keys, computed in another way than the index does."""
    blocks = index._blocks
    keys = decoded(blocks)
    turned = blocks.project(torch.as_tensor(queries), centre=index.metric == "l2").double().numpy()
    scale = np.maximum(np.abs(turned).max(1, keepdims=True), 1e-30) / 127
    asked = np.round(turned / scale) * scale
    if index.metric == "l2":
        return ((asked[:, None] - keys) ** 2).sum(2)
    return -asked @ keys.T - (queries.astype(np.float64) @ blocks.centre.double().numpy())[:, None]


def assert_finds(index, queries, k, *, effort=1e9):
    answer = index.search(torch.as_tensor(queries), k, effort=effort)
    assert_nearest(answer, brute_force(index, queries), k, near=1e-3)


numbers = st.floats(-4, 4, width=32).map(lambda value: round(value, 1))  # rounding makes ties and duplicates common


@pytest.mark.parametrize("metric", ["l2", "ip"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_search_of_all_blocks_equals_brute_force(metric, data):
    width, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 60))
    keys = data.draw(hnp.arrays(np.float32, (rows, width), elements=numbers))
    queries = data.draw(hnp.arrays(np.float32, (data.draw(st.integers(0, 5)), width), elements=numbers))
    spec = f"Lists{data.draw(st.integers(1, 8))},Blocks{data.draw(st.sampled_from([1, 4, 16]))}"
    assert_finds(build_blocks(Array(keys), spec, metric=metric), queries, data.draw(st.integers(1, 70)))


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("floats", [False, True])
def test_many_queries_in_many_blocks_equal_brute_force(monkeypatch, metric, floats):
    # More queries than are asked at once, on more than one thread, with and without instructions for bytes.
    monkeypatch.setattr(blocks_module, "_QUERY_BATCH", 700)
    monkeypatch.setattr(kernels, "_ROWS_PER_TASK", 100)
    monkeypatch.setattr(blocks_module, "_SELECT_BATCH", 1 << 15)
    monkeypatch.setattr(kernels, "int8_is_faster", lambda: not floats)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    index = build_blocks(RecordingArray(clustered(3000, 24)), "Lists16,Blocks64", metric=metric)
    assert_finds(index, clustered(1500, 24, seed=1), 50)
    assert_finds(index, clustered(3, 24, seed=2), 3000)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_distances_are_nearly_those_of_the_keys_themselves(metric):
    keys, queries = clustered(4000, 64), clustered(30, 64, seed=1)
    found = build_blocks(RecordingArray(keys), "Lists16,Blocks128", metric=metric).search(
        torch.from_numpy(queries), 100
    )
    true = np.stack([oracle.distances(query, keys, metric) for query in queries])
    off = np.abs(found.distances.numpy() - np.take_along_axis(true, found.ids.numpy(), 1))
    assert off.mean() < 0.01 * true.std()


def test_query_searches_the_default_number_of_blocks_and_each_block_is_read_once(monkeypatch):
    monkeypatch.setattr(blocks_module, "PROBES", 5)
    index = build_blocks(RecordingArray(clustered(4000, 16)), "Lists16,Blocks64")
    asked = []
    original = int8_matmul

    def counting(rows, others, *, out=None):
        asked.append(len(rows))
        return original(rows, others, out=out)

    monkeypatch.setattr(blocks_module, "int8_matmul", counting)
    queries = torch.from_numpy(clustered(300, 16, seed=1))
    few = index.search(queries, 100)
    assert sum(asked) == 300 * 5
    assert len(asked) <= len(index._blocks.sizes) < 300 * 5
    asked.clear()
    many = index.search(queries, 100, effort=3)
    assert sum(asked) == 300 * 15
    assert (many.distances <= few.distances + 1e-3).all()
    # Half as many for 16 neighbours and fewer.
    for k in (16, 1):
        asked.clear()
        index.search(queries, k)
        assert sum(asked) == 300 * 3
    # Few blocks cannot hold many neighbours: then there are more of them.
    asked.clear()
    assert (index.search(queries[:10], 1000).ids >= 0).sum(1).min() > 600
    assert sum(asked) == 10 * 17


def test_pages_of_blocks_stay_mapped_between_few_queries(tmp_path, monkeypatch):
    keys = clustered(60_000, 256).astype(np.float32)
    write_blocks(RecordingArray(keys), "Lists64,Blocks256", tmp_path / "index")
    index, queries = BlockIndex.load(tmp_path / "index"), torch.from_numpy(clustered(2000, 256, seed=1))
    monkeypatch.setattr(io, "MAX_RESIDENT_BYTES", -1)  # always too many
    index.search(queries[:65], 1)  # what is resident now does not count
    size = (tmp_path / "index").stat().st_size

    def growth(step):
        before = io.resident_bytes()
        for begin in range(0, len(queries) - step + 1, step):
            index.search(queries[begin : begin + step], 100)
        return io.resident_bytes() - before

    assert growth(250) < size // 4
    assert growth(64) > size // 2
    assert growth(250) < -size // 4


def test_some_blocks_find_most_of_the_nearest():
    keys, queries = clustered(30_000, 32), clustered(100, 32, seed=1)
    index = build_blocks(RecordingArray(keys), factory.default_spec(30_000))
    found = index.search(torch.from_numpy(queries), 100).ids.numpy()
    right = np.argsort(((queries[:, None] - keys) ** 2).sum(2), axis=1)[:, :100]
    recall = np.mean([len(set(one) & set(other)) / 100 for one, other in zip(found, right, strict=True)])
    assert recall > 0.9
    few = index.search(torch.from_numpy(queries), 16).ids.numpy()
    assert np.mean([len(set(one) & set(other)) / 16 for one, other in zip(few, right[:, :16], strict=True)]) > 0.9


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 2000])
def test_every_key_is_in_one_block_and_no_block_has_too_many(rows):
    keys = clustered(rows, 8)
    blocks = build_blocks(RecordingArray(keys), "Lists8,Blocks64")._blocks
    assert sorted(blocks.ids.tolist()) == list(range(rows))
    assert 0 < blocks.sizes.min() <= blocks.sizes.max() <= 64
    # Rounded, but turned back they are the keys.
    back = decoded(blocks) @ blocks.projection.double().numpy().T + blocks.centre.double().numpy()
    assert np.abs(back - keys).max() < 0.05 * np.abs(keys).max()
    assert np.isinf(blocks.constants).sum() == len(blocks.sizes) * 64 - rows
    beginning = np.cumsum(blocks.sizes) - blocks.sizes
    inside = np.add.reduceat(decoded(blocks)[blocks.ids], beginning, axis=0) / blocks.sizes[:, None]
    np.testing.assert_allclose(blocks.centroids, inside, atol=0.05 * np.abs(keys).max())


def test_keys_move_to_nearer_blocks_while_there_is_room():
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 8).astype(np.int32)
    best, gain = generator.integers(0, 10, 80).astype(np.int32), generator.random(80).astype(np.float32)
    found, count = build_module._move(labels, best, gain, size=10)
    assert count == 10
    assert np.bincount(found).max() <= 10
    moved = found != labels
    assert moved.any()
    assert (found[moved] == best[moved]).all()
    # A key that stays although another block is nearer found that block full.
    stay = ~moved & (best != labels)
    assert (np.bincount(found, minlength=10)[best[stay]] == 10).all()


def test_moving_makes_blocks_narrower(monkeypatch):
    keys = clustered(4000, 16)

    def spread():
        blocks = build_blocks(RecordingArray(keys), "Lists16,Blocks64")._blocks
        centres = np.repeat(blocks.centroids.numpy(), blocks.sizes, axis=0)
        return ((decoded(blocks)[blocks.ids] - centres) ** 2).sum(1).mean()

    after = spread()
    monkeypatch.setattr(build_module, "_MOVE_ROUNDS", 0)
    assert after < 0.98 * spread()


def test_memory_is_bounded_while_blocks_are_made(monkeypatch):
    monkeypatch.setattr(build_module, "_BATCH", 500)
    monkeypatch.setattr(build_module, "_READ_BATCH", 100)
    monkeypatch.setattr(base, "_MIN_SAMPLE", 400)
    together = []
    original = build_module._read
    monkeypatch.setattr(build_module, "_read", lambda *given: together.append(len(given[1])) or original(*given))
    vectors = RecordingArray(clustered(4000, 8))
    build_blocks(vectors, "Lists64,Blocks32")
    assert together[0] == 64 * base._SAMPLE_PER_LIST  # what is learned from follows the lists
    assert sum(together[1:]) == 3 * 4000  # cut, moved, written
    assert max(together[1:]) <= 500
    assert max(vectors.taken) <= 100


def test_wide_keys_lose_dimensions_and_are_measured_again(monkeypatch, tmp_path):
    monkeypatch.setattr(build_module, "MAX_CODE_WIDTH", 8)
    monkeypatch.setattr(factory, "MAX_EXACT", 1000)
    keys, queries = clustered(2000, 24), torch.from_numpy(clustered(20, 24, seed=1))
    narrow = build_blocks(RecordingArray(keys), "Lists8,Blocks64")
    assert narrow._blocks.keys.shape[1] == 8
    assert not narrow.keeps_all_dimensions
    assert isinstance(build_approximate(RecordingArray(keys), "Lists8,Blocks64"), RerankedIndex)
    store = made_store(tmp_path / "memory", keys, np.zeros(2000, np.int64))
    build_index(store)
    with closing(Datastore.open(store.path)) as again:
        found = open_index(again).search(queries, 5)
    true = np.stack([oracle.distances(query, keys) for query in queries.numpy()])
    np.testing.assert_allclose(found.distances, np.take_along_axis(true, found.ids.numpy(), 1), rtol=1e-2)
    # The first are those that keys differ most in: what is left out is less than any other part.
    kept = ((keys - keys.mean(0)) @ narrow._blocks.projection.numpy()).var()
    assert 8 * kept > 0.5 * (keys - keys.mean(0)).var(0).sum()


@pytest.mark.parametrize("spec", ["Lists0,Blocks256", "Lists8,Blocks0", "Lists8", "Blocks8", "Lists8,Blocks8,Flat"])
def test_other_specs_are_not_block_indexes(spec, tmp_path):
    assert not is_blocks(spec)
    with pytest.raises(ParameterError, match="Lists2048,Blocks256"):
        write_blocks(Array(np.ones((3, 2))), spec, tmp_path / "index")


def test_block_sizes_other_than_powers_of_two_are_refused():
    with pytest.raises(ParameterError, match="Blocks of 100 keys are not supported: use a power of two"):
        build_blocks(Array(np.ones((3, 2))), "Lists4,Blocks100")


def test_keys_that_are_not_finite_are_refused_and_such_queries_find_nothing():
    keys = clustered(500, 4)
    index = build_blocks(RecordingArray(keys), "Lists4,Blocks16")
    queries = torch.from_numpy(keys[:3].copy())
    queries[1, 2] = torch.nan
    found = index.search(queries, 5)
    assert (found.ids[1] == -1).all()
    assert torch.isinf(found.distances[1]).all()
    assert (found.ids[[0, 2]] >= 0).all()
    keys[137, 1] = np.inf
    with pytest.raises(IndexInvalid, match="not finite"):
        build_blocks(RecordingArray(keys), "Lists4,Blocks16")


def test_equal_keys_are_all_found(capfd):
    index = build_blocks(RecordingArray(np.ones((300, 4), np.float32)), "Lists4,Blocks16")
    found = index.search(torch.ones(2, 4), 300)
    assert sorted(found.ids[0].tolist()) == list(range(300))
    assert (found.distances == 0).all()


def write(tmp_path, rows=500):
    path = tmp_path / "index"
    write_blocks(RecordingArray(clustered(rows, 8)), "Lists4,Blocks16", path)
    return path


NAMES = ("header", "centre", "projection", "centroids", "sizes", "scales", "constants", "ids", "keys")


def load_arrays(path):
    with path.open("rb") as file:
        arrays = {name: np.load(file, allow_pickle=False) for name in NAMES}
        assert not file.read()
    return arrays


def save_arrays(path, arrays):
    with path.open("wb") as file:
        for array in arrays.values():
            np.save(file, array, allow_pickle=False)


def test_file_is_a_sequence_of_npy_arrays(tmp_path):
    path = write(tmp_path)
    arrays, blocks = load_arrays(path), read_blocks(path)
    assert arrays["header"].tolist() == ["knnlm blocks 1", "l2"]
    np.testing.assert_array_equal(arrays["keys"], blocks.mapped_keys)
    np.testing.assert_array_equal(arrays["constants"], blocks.constants)
    np.testing.assert_array_equal(arrays["projection"], blocks.projection)
    assert path.read_bytes()[blocks.offset :] == arrays["keys"].tobytes()
    save_arrays(tmp_path / "copy", arrays)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


def test_same_keys_give_the_same_file(tmp_path):
    first = write(tmp_path).read_bytes()
    assert write(tmp_path).read_bytes() == first


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"junk" * 100,
        b"\x93NUMPY\x01\x00" + (40).to_bytes(2, "little") + b"null" * 10,
        b"\x93NUMPY\x01\x00" + (40).to_bytes(2, "little") + b"[" * 40,
        b"\xff" * 80,
    ],
)
def test_unreadable_block_file_is_named(tmp_path, data):
    (tmp_path / "index").write_bytes(data)
    with pytest.raises(IndexInvalid, match="index is not a readable index"):
        BlockIndex.load(tmp_path / "index")
    with pytest.raises(IndexInvalid, match="missing is not a readable index"):
        BlockIndex.load(tmp_path / "missing")


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("projection"),
        lambda arrays: arrays.update(sizes=arrays["sizes"][:1]),
        lambda arrays: arrays.update(sizes=arrays["sizes"][::-1] * 0 + 1),
        lambda arrays: arrays.update(keys=arrays["keys"][:-1]),
        lambda arrays: arrays.update(ids=arrays["ids"].astype(np.float32)),
        lambda arrays: arrays.update(ids=arrays["ids"] * 0),
        lambda arrays: arrays.update(ids=arrays["ids"] - 1),
        lambda arrays: arrays.update(header=np.array(["knnlm blocks 1", "cosine"])),
        lambda arrays: arrays.update(header=np.array(["another format", "l2"])),
        lambda arrays: arrays.update(header=np.array("knnlm blocks 1")),
        lambda arrays: arrays.update(centre=arrays["scales"]),
        lambda arrays: arrays.update(sizes=arrays["ids"]),
        lambda arrays: arrays.update(more=arrays["scales"]),
        lambda arrays: arrays.update(keys=np.asfortranarray(arrays["keys"])),
        lambda arrays: arrays.update(keys=arrays["keys"][:, :0]),
        lambda arrays: arrays.update(centre=arrays["centre"].astype(">f4")),
    ],
)
def test_arrays_that_are_inconsistent_are_refused(tmp_path, change):
    path = write(tmp_path)
    arrays = load_arrays(path)
    change(arrays)
    save_arrays(path, arrays)
    with pytest.raises(IndexInvalid, match="is not a readable index"):
        BlockIndex.load(path)


@pytest.mark.parametrize("shape", [b"(-1, 8), ", b"(99999999999999999, 8), ", b"(516.0, 8), ", b"(), "])
def test_shapes_that_do_not_fit_the_file_are_refused(tmp_path, shape):
    path = write(tmp_path)
    data, (rows, width) = path.read_bytes(), read_blocks(path).mapped_keys.shape
    before = f"({rows}, {width}), ".encode()
    begin = data.rindex(b"\x93NUMPY")
    header = data[begin : begin + 128]
    assert before in header
    changed = header.replace(before, shape)
    changed = changed[:-1].rstrip(b" ").ljust(127) + b"\n"
    path.write_bytes(data[:begin] + changed[:128] + data[begin + 128 :])
    with pytest.raises(IndexInvalid, match="is not a readable index"):
        BlockIndex.load(path)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "MAX_EXACT", 1000)
    keys = clustered(3000, 16)
    store = made_store(tmp_path / "memory", keys, np.arange(3000) % 7)
    assert is_blocks(build_index(store))
    return store.path, keys


def test_checksums_of_all_bytes_are_compared_before_use(memory):
    path, keys = memory
    file = path / "index/000000/index.blocks"
    sound = file.read_bytes()
    with closing(Datastore.open(path)) as store:
        open_index(store).search(torch.from_numpy(keys[:5]), 5)
    for at in np.linspace(0, len(sound) - 1, 30).astype(int).tolist():
        damaged = bytearray(sound)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with closing(Datastore.open(path)) as store, pytest.raises((IndexInvalid, DatastoreCorrupt), match="index"):
            open_index(store).search(torch.from_numpy(keys), 5)
    # Without the file of block checksums, the SHA-256 is compared.
    file.with_suffix(".sums").unlink()
    with closing(Datastore.open(path)) as store, pytest.raises(IndexInvalid, match="checksum mismatch"):
        open_index(store)


def test_only_checksums_of_read_blocks_are_compared(memory, monkeypatch):
    path, keys = memory
    with closing(Datastore.open(path)) as store:
        open_index(store).search(torch.from_numpy(keys[:1]), 5)  # sums are written down
    read = []
    original = BlockIndex.load

    def load(file, *, check_bytes):
        return original(
            file,
            check_bytes=lambda begins, length: read.append((begins.tolist(), length)) or check_bytes(begins, length),
        )

    monkeypatch.setattr(BlockIndex, "load", staticmethod(load))
    monkeypatch.setattr(blocks_module, "PROBES", 2)
    with closing(Datastore.open(path)) as store:
        index = open_index(store)
        offset = index._index._blocks.offset
        read.clear()
        index.search(torch.from_numpy(keys[:1]), 5)
    assert len(read) == 1
    begins, length = read[0]
    assert len(begins) == 2
    assert min(begins) >= offset
    assert length == 256 * 16


def test_removed_entries_are_not_found_and_added_ones_are(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "MAX_EXACT", 100)
    path = tmp_path / "memory"
    texts = [Document(f"d{n}", "some", f"a text that is the {n}. of its kind, " * 8) for n in range(8)]
    build(texts[:6], path, lm=lm)
    with closing(Datastore.open(path)) as store:
        assert is_blocks(build_index(store))
        before = store.key_count
    remove(path, document="d2")
    with closing(Datastore.open(path)) as store:
        assert store.key_count < before
        assert isinstance(open_index(store), FilteredIndex)
        assert_nearly_exact(store)
    add(texts[6:], path, lm=lm)
    with closing(Datastore.open(path)) as store:
        assert isinstance(open_index(store), ConcatenatedIndex)
        assert_nearly_exact(store)


def assert_nearly_exact(store):
    keys = store.take(torch.arange(store.key_count))
    right = ExactIndex(Array(keys)).search(keys, 20)
    found = open_index(store).search(keys, 20)
    assert (found.ids >= 0).all()
    assert found.ids.max() < store.key_count
    assert (found.distances[:, 0] < 0.01 * right.distances.median()).all()  # each finds itself, or its like
    assert (found.distances - right.distances).abs().median() < 0.02 * right.distances.median()


def test_stores_with_a_block_index_are_verified_repaired_and_compacted(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "MAX_EXACT", 100)
    path = tmp_path / "memory"
    build([Document(f"d{n}", "some", f"a text that is the {n}. of its kind, " * 8) for n in range(6)], path, lm=lm)
    with closing(Datastore.open(path)) as store:
        build_index(store)
    assert not verify(path, deep=True).problems
    remove(path, document="d1")
    compact(path)
    with closing(Datastore.open(path)) as store:
        assert [row.spec for row in store.catalog.indexes()] == ["Lists16,Blocks256"]
        assert_nearly_exact(store)
    (file,) = path.glob("index/*/index.blocks")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert [problem.kind for problem in verify(path, deep=True).problems] == ["index"]
    assert repair(path).dropped
    with closing(Datastore.open(path)) as store:
        assert_nearly_exact(store)  # it was made again
    assert not verify(path, deep=True).problems


def test_distant_keys_do_not_change_the_distances_of_near_ones():
    generator = np.random.default_rng(0)
    keys = np.concatenate([generator.normal(size=(300, 16)), generator.normal(size=(9700, 16)) * 100]).astype(
        np.float32
    )
    index = build_blocks(RecordingArray(keys), "Lists64,Blocks256")
    queries = keys[:100] + generator.normal(size=(100, 16)).astype(np.float32) * 0.1
    found = index.search(torch.from_numpy(queries), 10).distances.numpy()
    right = np.sort(((queries[:, None] - keys) ** 2).sum(2), axis=1)[:, :10]
    assert np.abs(found - right).max() < 0.1 * right.mean()


def test_precise_check_refuses_distances_that_are_wrong():
    generator = np.random.default_rng(1)
    for gap, sound in ((1, True), (80, False)):
        centres = generator.normal(size=(100, 64)) * gap
        keys = (centres[generator.integers(0, 100, 20_000)] + generator.normal(size=(20_000, 64))).astype(np.float32)
        index = build_blocks(RecordingArray(keys), "Lists64,Blocks256")
        check_index(index, RecordingArray(keys), what="it")
        if sound:
            check_index(index, RecordingArray(keys), what="it", precise=True)
        else:
            with pytest.raises(IndexInvalid, match=r"from those of the stored keys \(median; at most 5%"):
                check_index(index, RecordingArray(keys), what="it", precise=True)


def test_lists_with_nearly_all_keys_are_split_in_pieces(monkeypatch):
    monkeypatch.setattr(build_module, "_MAX_LIST", 300)
    monkeypatch.setattr(build_module, "_COMPARISON_BATCH", 1000)
    most = []
    original = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *given, **more: most.append((r := original(*given, **more)).numel()) or r
    )
    keys = np.ones((3000, 4), np.float32)
    keys[:50] = clustered(50, 4)
    blocks = build_blocks(RecordingArray(keys), "Lists8,Blocks16")._blocks
    assert sorted(blocks.ids.tolist()) == list(range(3000))
    assert most
    assert max(most) <= 1000


def test_concurrent_searches_agree_and_keep_one_buffer():
    keys, queries = clustered(3000, 16), torch.from_numpy(clustered(400, 16, seed=1))
    index = build_blocks(RecordingArray(keys), "Lists16,Blocks64")
    right = index.search(queries, 20)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: index.search(queries, 20), range(40)):
            assert torch.equal(found.ids, right.ids)
    assert len(index._spare) == 1


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_smallest_k_equals_sorting(data):
    rows, width = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 60))
    choices = st.sampled_from([0.0, 1.0, 2.5, -3.0, 1e6, np.inf, np.nan, 7.25])
    values = data.draw(hnp.arrays(np.float32, (rows, width), elements=choices))
    check_smallest(values, data.draw(st.integers(1, 80)))


@pytest.mark.parametrize(("width", "k"), [(5000, 40), (10240, 1024), (10240, 9000), (70_000, 1024), (3000, 1)])
@pytest.mark.parametrize("kind", ["normal", "sorted", "few", "holes", "periodic"])
def test_smallest_k_of_many_equals_sorting(width, k, kind):
    generator = np.random.default_rng(width + k)
    values = generator.normal(20, 5, (6, width)).astype(np.float32)
    if kind == "sorted":
        values.sort(axis=1)
    elif kind == "few":
        values = np.round(values)
    elif kind == "holes":
        values[:, width // 50 :] = np.inf
    elif kind == "periodic":
        values[:, ::16] -= 100  # the sample is all that is small: its limit is far too low
    check_smallest(values, k)


def test_first_numbers_are_in_order_however_far_the_last_are():
    generator = np.random.default_rng(0)
    values = np.full((3, 10_240), 1e6, np.float32)
    values[:, :500] = 1 + np.arange(500) / 100
    generator.permuted(values, axis=1, out=values)
    places, found = smallest_k(values, 1024)
    np.testing.assert_array_equal(found[:, :500], np.tile((1 + np.arange(500) / 100).astype(np.float32), (3, 1)))
    np.testing.assert_array_equal(np.take_along_axis(values, places, 1), found)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1e18])
def test_tiny_and_huge_keys_are_distinguished(size, recwarn):
    keys = clustered(500, 4) * np.float32(size)
    index = build_blocks(RecordingArray(keys), "Lists4,Blocks16")
    found = index.search(torch.from_numpy(keys[:20]), 3, effort=1e9)
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
    if size > 1e-19:  # else squares are 0 in float32
        assert (found.ids[:, 0] == torch.arange(20)).float().mean() > 0.8


def test_query_that_is_too_far_for_float32_finds_nothing(recwarn):
    index = build_blocks(RecordingArray(clustered(500, 4)), "Lists4,Blocks16")
    found = index.search(torch.full((2, 4), 1e30), 5)
    assert (found.ids == -1).all()
    assert torch.isinf(found.distances).all()


@pytest.mark.parametrize("kind", ["AVX2", "SSE41"])
def test_processors_with_wrong_int8_sums_use_float32(kind):
    program = (
        "import torch; from knnlm.index.blocks.kernels import int8_matmul, int8_is_faster;"
        "a = torch.full((70, 512), 127, dtype=torch.int8); assert (int8_matmul(a, a) == 127 * 127 * 512).all();"
        "g = torch.Generator().manual_seed(1);"
        "a, b = (torch.randint(-127, 128, (n, 300), generator=g).char() for n in (33, 256));"
        "assert torch.equal(int8_matmul(a, b).long(), a.long() @ b.long().T)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": kind})


def check_smallest(values, k):
    places, found = smallest_k(values.copy(), k)
    assert places.shape == found.shape == (len(values), k)
    for row, at, numbers_ in zip(values, places, found, strict=True):
        there = np.sort(row[np.isfinite(row)])[:k]
        count = len(there)
        assert (at[count:] == -1).all()
        assert np.isinf(numbers_[count:]).all()
        assert len(set(at[:count].tolist())) == count
        near = 1e-4 * (there[-1] - there[0]) * 16 if count else 0
        np.testing.assert_allclose(row[at[:count]], there, atol=near + 1e-6)
        np.testing.assert_allclose(numbers_[:count], there, atol=near + 1e-5 * np.abs(there).max(initial=0))
        assert (np.diff(numbers_[:count]) >= 0).all()


@pytest.mark.parametrize("count", [0, 1, 511, 1024, 5000])
@pytest.mark.parametrize("threads", [1, 3])
def test_parallel_for_covers_every_row_once(monkeypatch, count, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    done = np.zeros(count, np.int64)

    def work(begin, end):
        done[begin:end] += 1

    parallel_for(count, work)
    assert (done == 1).all()


def test_parallel_for_raises_errors_of_the_work(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def work(begin, end):
        if begin <= 3000 < end:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        parallel_for(5000, work)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize(("rows", "others", "width"), [(1, 4, 1), (3, 7, 5), (65, 130, 576), (4, 6, 3000), (0, 5, 4)])
def test_int8_products_are_exact(monkeypatch, faster, rows, others, width):
    monkeypatch.setattr(kernels, "int8_is_faster", lambda: faster)
    generator = np.random.default_rng(width)
    one, other = (generator.integers(-127, 128, (n, width)).astype(np.int8) for n in (rows, others))
    one[:1], other[:1] = 127, 127  # as large as it gets
    right = one.astype(np.int64) @ other.astype(np.int64).T
    found = int8_matmul(torch.from_numpy(one), torch.from_numpy(other))
    np.testing.assert_array_equal(found, right)
    out = torch.full(found.shape, 9, dtype=torch.int32)
    int8_matmul(torch.from_numpy(one), torch.from_numpy(other), out=out)
    np.testing.assert_array_equal(out, right)


def test_quantisation_error_is_at_most_half_a_step():
    rows = torch.from_numpy(clustered(200, 30))
    rows[3] = 0
    near = quantise(rows)
    assert ((near.values * near.scale - rows).abs() <= 0.5001 * near.scale).all()
    assert near.values.abs().amax(1)[4:].eq(127).all()
    np.testing.assert_allclose(
        near.squares()[:, 0], (near.values.double() * near.scale.double()).square().sum(1), rtol=1e-5
    )


def test_kmeans_finds_clusters_and_the_nearest_of_each_vector():
    generator = np.random.default_rng(3)
    true = generator.normal(size=(20, 8)) * 10
    rows = torch.from_numpy(
        (true[generator.integers(0, 20, 4000)] + generator.normal(size=(4000, 8))).astype(np.float32)
    )
    points = kmeans(rows, 40, rounds=8)
    apart = ((rows[:, None] - points) ** 2).sum(2)
    assert apart.min(1).values.mean() < 12  # 8 of noise; 20 points for 20 clusters would leave no more
    found = Centroids(points).nearest(quantise(rows))
    chosen = apart.gather(1, found[:, None])[:, 0]
    assert (chosen - apart.min(1).values).max() < 0.05 * apart.mean()
    labels = torch.from_numpy(generator.integers(0, 5, 4000))
    right = np.stack([rows.numpy()[labels.numpy() == one].mean(0) for one in range(5)])
    np.testing.assert_allclose(means(rows, labels, 6)[:5], right, atol=1e-3)
    assert (means(rows, labels, 6)[5] == 0).all()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 200), size=st.integers(1, 40), same=st.booleans())
def test_balanced_split_has_equal_sizes_and_every_row(rows, size, same):
    parts = -(-rows // size)
    data = torch.ones(rows, 3) if same else torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
    found = balanced_split(data, parts)
    assert sorted(torch.cat(found).tolist()) == list(range(rows))
    assert len(found) == parts
    assert max(len(part) for part in found) <= size
    assert max(len(part) for part in found) - min(len(part) for part in found) <= 1


def test_balanced_split_separates_clusters():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(100, 6, generator=generator) + torch.tensor([0.0, 20.0]).repeat(50)[:, None]
    one, other = balanced_split(rows, 2)
    assert {frozenset(one.tolist()), frozenset(other.tolist())} == {
        frozenset(range(0, 100, 2)),
        frozenset(range(1, 100, 2)),
    }


def split_indexes(keys, *, metric="l2", cuts=(0, 900, 2100, 3000), spec="Lists8,Blocks64"):
    return [build_blocks(RecordingArray(keys[begin:end]), spec, metric=metric) for begin, end in pairwise(cuts)]


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_joined_indexes_of_shards_equal_brute_force(metric):
    keys, queries = clustered(3000, 24), clustered(40, 24, seed=1)
    parts = split_indexes(keys, metric=metric)
    joined = BlockIndex.join(parts)
    assert joined.rows == 3000
    true = np.concatenate([brute_force(part, queries) for part in parts], axis=1)
    assert_nearest(joined.search(torch.from_numpy(queries), 70, effort=1e9), true, 70, near=1e-3)
    assert BlockIndex.join([*parts[:2], *split_indexes(keys, metric=metric, spec="Lists8,Blocks32")]) is None


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_blocks_are_chosen_over_all_shards(metric, monkeypatch):
    """Chosen together or searched after a choice: the same blocks. See the log for the recall of real keys."""
    keys, queries = clustered(24_000, 32), clustered(100, 32, seed=1)
    cuts = (0, 6000, 12_000, 18_000, 24_000)
    parts = split_indexes(keys, metric=metric, cuts=cuts, spec="Lists32,Blocks64")
    asked, joined, one = (
        torch.from_numpy(queries),
        BlockIndex.join(parts),
        build_blocks(RecordingArray(keys), "Lists64,Blocks64", metric=metric),
    )
    sharded = ShardedIndex([FilteredIndex(part, None, None) for part in parts], cuts[:-1], rows=len(keys))
    together, apart = joined.search(asked, 50), sharded.search(asked, 50)
    torch.testing.assert_close(together.distances, apart.distances, atol=1e-3, rtol=1e-3)
    assert np.mean([len({*a} & {*b}) for a, b in zip(together.ids.tolist(), apart.ids.tolist(), strict=True)]) > 48
    true = np.stack([oracle.distances(query, keys, metric) for query in queries])
    nearest = np.argsort(true, axis=1)[:, :50]

    def recall(found):
        return np.mean([len({*a} & {*b}) / 50 for a, b in zip(found.ids.tolist(), nearest.tolist(), strict=True)])

    assert recall(together) > 0.9 * recall(one.search(asked, 50))
    assert (joined.probes(1024), joined.probes(64), joined.probes(36)) == (57, 57, 43)
    # Each shard searches only its own of these blocks.
    searched = []
    original = BlockIndex.search_blocks
    monkeypatch.setattr(
        BlockIndex, "search_blocks", lambda *args: searched.append((args[3] >= 0).sum(1)) or original(*args)
    )
    sharded.search(asked, 50)
    assert torch.stack(searched).sum(0).tolist() == [joined.probes(50)] * 100


def test_chosen_blocks_of_any_number_equal_brute_force():
    keys, queries = clustered(2000, 16), clustered(30, 16, seed=1)
    index = build_blocks(RecordingArray(keys), "Lists8,Blocks64")
    generator = torch.Generator().manual_seed(0)
    count = len(index._blocks.sizes)
    blocks = torch.rand(30, count, generator=generator).argsort(1)
    blocks[torch.rand(30, count, generator=generator) < torch.linspace(0, 1, 30)[:, None]] = -1
    found = index.search_blocks(torch.from_numpy(queries), 40, blocks)
    owner = np.empty(2000, np.int64)
    owner[index._blocks.ids] = np.repeat(np.arange(count), index._blocks.sizes)
    distances = brute_force(index, queries)
    for row, (chosen, ids) in enumerate(zip(blocks.tolist(), found.ids.tolist(), strict=True)):
        own = np.flatnonzero(np.isin(owner, [block for block in chosen if block >= 0]))
        expected = np.sort(distances[row, own])[:40]
        assert sum(number >= 0 for number in ids) == len(expected)
        np.testing.assert_allclose(found.distances[row, : len(expected)], expected, atol=1e-2)
        assert np.isin(ids[: len(expected)], own).all()


def test_short_results_of_chosen_blocks_are_completed():
    """Most keys are removed, so that the chosen blocks contain too few."""
    keys = clustered(3000, 24)
    cuts = (0, 900, 2100, 3000)
    parts = []
    for part, (begin, end) in zip(split_indexes(keys), pairwise(cuts), strict=True):
        kept = np.arange(0, end - begin, 30)
        new_ids = np.full(end - begin, -1)
        new_ids[kept] = np.arange(len(kept))
        parts.append(FilteredIndex(part, new_ids, RecordingArray(keys[begin:end][kept])))
    sharded = ShardedIndex(parts, [0, 30, 70], rows=100)
    found = sharded.search(torch.from_numpy(clustered(5, 24, seed=1)), 100)
    assert found.ids.sort(1).values.tolist() == [list(range(100))] * 5
