"""Memories made out of others: what is left out is what was meant, and all that stays is as it was."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.cli import knnlm
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import all_keys, contents, documents, made_store, random_store
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import KeyMap
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.rewrite import derive, principal_components
from knnlm.datastore.schema import CATALOG_FILE, segment_folder
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.index.exact import ExactIndex
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.training.prune import known_keys, merge_keys, prune, store_log_p


def test_store_as_built_has_a_key_for_each_token(store):
    assert store.key_count == store.entry_count
    ids = torch.tensor([[0, -1], [3, 7]])
    assert store.entries_of(ids) is ids
    assert store.counts(ids) is None
    assert {(segment.kept, segment.kept_sha256, segment.counts_sha256) for segment in store.segments} == {(None,) * 3}
    queries = torch.randn(3, store.width)
    assert store.project(queries) is queries


@pytest.mark.parametrize("by", ["mask", "numbers"])
def test_kept_keys_are_unchanged_and_keep_their_rows(store, tmp_path, by):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(store.entry_count, generator=generator) < 0.3
    mask[store.segments[1].first_entry : store.segments[1].first_entry + store.segments[1].entries] = False
    counts = 1 + torch.rand(store.entry_count, generator=generator)
    keep = mask if by == "mask" else mask.nonzero()[:, 0]
    pruned = derive(store, tmp_path / "pruned", keep=keep, counts=counts)
    assert (pruned.key_count, pruned.entry_count) == (int(mask.sum()), store.entry_count)
    rows = mask.nonzero()[:, 0]
    ids = torch.arange(pruned.key_count)
    assert torch.equal(pruned.entries_of(ids), rows)
    assert torch.equal(all_keys(pruned), store.take(rows))
    assert torch.equal(pruned.counts(ids), counts[rows])
    assert torch.equal(torch.cat([block for _, block in pruned.chunks(37)]), store.take(rows))
    firsts = [first for first, _ in pruned.chunks(37)]
    assert firsts == sorted(set(firsts))
    some = torch.tensor([[5, -1], [pruned.key_count - 1, 0]])
    assert pruned.entries_of(some).tolist() == [[int(rows[5]), -1], [int(rows[-1]), int(rows[0])]]
    assert pruned.counts(some)[0, 1] == 0
    assert pruned.bytes == pruned.key_count * (2 * 32 + 8) + 4 * pruned.entry_count
    assert pruned.fingerprint != store.fingerprint
    with pytest.raises(IndexError):
        pruned.entries_of(torch.tensor([pruned.key_count]))


def test_pruning_keeps_the_whole_text(store, tmp_path):
    pruned = derive(store, tmp_path / "pruned", keep=torch.arange(0, store.entry_count, 7))
    everything = torch.arange(store.entry_count)
    assert torch.equal(pruned.values(everything), store.values(everything))
    assert list(pruned.catalog.documents()) == list(store.catalog.documents())
    for row in (0, 50, store.entry_count - 1):
        assert pruned.around(row, before=5, after=9) == store.around(row, before=5, after=9)
        assert pruned.document_at(row) == store.document_at(row)
    assert pruned.holds(documents(1)[0].text)
    assert (pruned.model, pruned.window) == (store.model, store.window)


@pytest.mark.parametrize("spec", ["exact", "Flat", "IVF4,Flat"])
def test_index_of_a_pruned_store_finds_the_right_rows(tmp_path, spec):
    store = random_store(tmp_path / "docs.store", rows=400)
    rows = torch.arange(store.entry_count)[torch.arange(store.entry_count) % 3 != 1]
    pruned = derive(store, tmp_path / "pruned", keep=rows)
    assert build_index(pruned, spec) == spec
    queries = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    found = open_index(Datastore.open(tmp_path / "pruned")).search(pruned.project(queries), 5)
    keys = all_keys(store).numpy()[rows]
    for query, ids in zip(queries, pruned.entries_of(found.ids), strict=True):
        right = rows[np.argsort(oracle.distances(query, keys))[:5]]
        assert ids.tolist() == right.tolist()


def test_vote_with_counts_matches_repeated_keys(tmp_path):
    store = random_store(tmp_path / "docs.store")
    generator = np.random.default_rng(3)
    counts = torch.from_numpy(generator.integers(1, 4, store.entry_count))
    mask = torch.from_numpy(generator.random(store.entry_count) < 0.5)
    pruned = derive(store, tmp_path / "pruned", keep=mask, counts=counts)
    query = torch.randn(1, 6, generator=torch.Generator().manual_seed(2))
    found = ExactIndex(pruned.keys).search(query, pruned.key_count)
    weights = (-found.distances / 2.0 + pruned.counts(found.ids).log()).softmax(1)[0].double().numpy()
    voted = np.bincount(pruned.values(pruned.entries_of(found.ids))[0], weights, minlength=5)
    keys, values = all_keys(store).numpy(), store.values(torch.arange(store.entry_count)).numpy()
    again = np.repeat(np.flatnonzero(mask.numpy()), counts.numpy()[mask.numpy()])
    right = oracle.knn_distribution(query[0], keys[again], values[again], 5, k=len(again), knn_temperature=2.0)
    np.testing.assert_allclose(voted, right, rtol=1e-4)


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), out=st.integers(1, 6), shifted=st.booleans(), twice=st.booleans())
def test_queries_are_mapped_like_the_keys(tmp_path_factory, seed, out, shifted, twice):
    generator = np.random.default_rng(seed)
    raw = generator.normal(size=(40, 6)) + 3
    offset = generator.normal(size=6) + 3 if shifted else None
    kept = raw if offset is None else raw - offset
    folder = tmp_path_factory.mktemp("maps")
    store = made_store(folder / "a", kept, generator.integers(0, 4, 40), sizes=[20, 20], offset=offset)
    queries = generator.normal(size=(3, 6)) + 3
    true_keys, true_queries = raw, queries
    widths = [6, out] if twice else [out]
    for number, width in enumerate(widths):
        matrix = generator.normal(size=(store.width, width))
        centre = generator.normal(size=store.width)
        key_map = KeyMap(torch.from_numpy(matrix).float(), torch.from_numpy(centre).float())
        store = derive(store, folder / str(number), key_map=key_map)
        true_keys, true_queries = true_keys @ matrix, true_queries @ matrix
        assert (store.width, store.model["width"]) == (width, 6)
    for metric in ("l2", "ip"):
        projected = store.project(torch.from_numpy(queries).float(), metric=metric)
        found = ExactIndex(store.keys, metric=metric).search(projected, 40)
        distances = found.distances
        if metric == "ip" and store.origin is not None:
            distances = distances - (projected @ store.origin)[:, None]
        for query, ids, given_distances in zip(true_queries, found.ids, distances, strict=True):
            right = oracle.distances(query, true_keys, metric)
            np.testing.assert_allclose(given_distances, right[ids], rtol=2e-3, atol=2e-3 * np.abs(right).max())


def test_map_of_the_wrong_width_or_not_finite_is_refused(store, tmp_path):
    with pytest.raises(ParameterError, match="for keys of width 5"):
        derive(store, tmp_path / "a", key_map=KeyMap(torch.eye(5), torch.zeros(5)))
    with pytest.raises(ParameterError, match="finite"):
        KeyMap(torch.full((2, 2), torch.nan), torch.zeros(2))
    with pytest.raises(ParameterError, match=r"not \(2, 2\) and \(3,\)"):
        KeyMap(torch.eye(2), torch.zeros(3))
    for wrong in (torch.ones(3, dtype=torch.bool), torch.tensor([store.entry_count]), torch.tensor([-1])):
        with pytest.raises(ParameterError, match="keep"):
            derive(store, tmp_path / "a", keep=wrong)
    for wrong in (torch.ones(3), torch.zeros(store.entry_count), torch.full((store.entry_count,), torch.inf)):
        with pytest.raises(ParameterError, match="counts"):
            derive(store, tmp_path / "a", counts=wrong)
    with pytest.raises(ParameterError, match="float8"):
        derive(store, tmp_path / "a", key_dtype="float8")
    with pytest.raises(ParameterError, match="the store to copy from"):
        derive(store, store.path)
    assert not (tmp_path / "a").exists()


def test_keys_that_a_map_makes_too_large_for_float16_are_scaled(store, tmp_path):
    large = derive(store, tmp_path / "large", key_map=KeyMap(1e6 * torch.eye(32), torch.zeros(32)))
    assert min(segment.scale for segment in large.segments) > 1
    torch.testing.assert_close(all_keys(large), 1e6 * all_keys(store), rtol=1e-3, atol=1e3)


@pytest.mark.parametrize("factor", [1e-3, 1e-7, 1e-30])
def test_keys_that_a_map_makes_too_small_for_float16_keep_their_digits(store, tmp_path, factor):
    small = derive(store, tmp_path / "small", key_map=KeyMap(factor * torch.eye(32), torch.zeros(32)))
    assert max(segment.scale for segment in small.segments) < 1
    keys, right = all_keys(small).double(), factor * all_keys(store).double()
    # Float16 has eleven bits, and only what is a millionth of the largest key has fewer.
    assert ((keys - right).abs() <= 2**-11 * right.abs() + 1e-6 * right.abs().max()).all()
    for segment in small.segments:
        stored = np.load(segment_folder(small.path, segment.id) / "keys.npy")
        assert np.abs(stored).max() < 65504 / 4
        exponent = math.log2(segment.scale)
        assert exponent == round(exponent)
    # Distances are a square, which float32 has digits for as long as keys are not tiny beyond reason.
    if factor > 1e-15:
        near = ExactIndex(small.keys).search(factor * all_keys(store)[:100], 10).ids
        found = ExactIndex(store.keys).search(all_keys(store)[:100], 10).ids
        shared = [len(set(one) & set(other)) for one, other in zip(near.tolist(), found.tolist(), strict=True)]
        assert np.mean(shared) > 9.8


def test_keys_of_ordinary_size_are_copied_bit_by_bit(store, tmp_path):
    # Just above where keys are small: as a build would write them, not finer.
    factor = 1.01 * 2.0**-4 / min(float(store.take(torch.arange(s.first_entry, s.first_entry + s.entries)).abs().max())
                                  for s in store.segments)  # fmt: skip
    key_map = KeyMap(factor * torch.eye(32), torch.zeros(32))
    copy, mapped = derive(store, tmp_path / "copy"), derive(store, tmp_path / "mapped", key_map=key_map)
    for segment in store.segments:
        name = f"segments/{segment.id:06d}/keys.npy"
        assert (copy.path / name).read_bytes() == (store.path / name).read_bytes()
        right = key_map.apply(store.take(torch.arange(segment.first_entry, segment.first_entry + segment.entries)))
        assert (np.load(mapped.path / name) == right.numpy().astype(np.float16)).all()
    assert {segment.scale for segment in [*copy.segments, *mapped.segments]} == {1.0}


def test_pruned_store_can_be_pruned_again(tmp_path):
    store = random_store(tmp_path / "a")
    counts = torch.arange(1.0, store.entry_count + 1)
    once = derive(store, tmp_path / "b", keep=torch.arange(0, store.entry_count, 2), counts=counts)
    twice = derive(once, tmp_path / "c", keep=torch.arange(0, once.key_count, 3))
    rows = torch.arange(0, store.entry_count, 6)
    ids = torch.arange(twice.key_count)
    assert torch.equal(twice.entries_of(ids), rows)
    assert torch.equal(twice.counts(ids), counts[rows])
    assert torch.equal(all_keys(twice), store.take(rows))


def test_store_without_keys_can_be_opened_and_searched(tmp_path):
    store = random_store(tmp_path / "a")
    empty = derive(store, tmp_path / "b", keep=torch.zeros(store.entry_count, dtype=torch.bool))
    assert (empty.key_count, empty.entry_count) == (0, store.entry_count)
    found = open_index(empty).search(torch.randn(2, 6), 3)
    assert found.ids.tolist() == [[-1] * 3] * 2
    assert empty.entries_of(found.ids).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("name", ["keys.npy", "values.npy", "kept.npy", "counts.npy", "map.safetensors"])
def test_damaged_file_of_a_pruned_store_is_named(tmp_path, name):
    store = random_store(tmp_path / "a")
    key_map = KeyMap(torch.eye(6), torch.zeros(6))
    counts = torch.arange(1.0, store.entry_count + 1)
    derive(store, tmp_path / "b", keep=torch.arange(0, store.entry_count, 2), counts=counts, key_map=key_map)
    file = next((tmp_path / "b").rglob(name))
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(DatastoreCorrupt, match=name.replace(".", r"\.")):
        Datastore.open(tmp_path / "b")
    file.unlink()
    with pytest.raises(DatastoreCorrupt, match=rf"{name} is missing"):
        Datastore.open(tmp_path / "b")


def test_row_numbers_out_of_range_are_corrupt(tmp_path):
    store = random_store(tmp_path / "a")
    pruned = derive(store, tmp_path / "b", keep=torch.arange(0, store.entry_count, 2))
    file = next((tmp_path / "b").rglob("kept.npy"))
    data = bytearray(file.read_bytes())
    data[-4:] = np.int32(10_000).tobytes()
    file.write_bytes(data)
    with pytest.raises(DatastoreCorrupt, match=r"kept\.npy: checksum mismatch"):
        pruned.entries_of(torch.arange(pruned.key_count))
    pruned.sums.enabled = False  # as if an attacker had recomputed the checksum
    with pytest.raises(DatastoreCorrupt, match=r"kept\.npy names an entry beyond"):
        pruned.entries_of(torch.arange(pruned.key_count))


@pytest.mark.parametrize("bad", [math.nan, -3.0, 0.0, math.inf])
def test_invalid_counts_are_corrupt(tmp_path, bad):
    store = random_store(tmp_path / "a")
    pruned = derive(store, tmp_path / "b", counts=torch.arange(1.0, store.entry_count + 1))
    file = next((tmp_path / "b").rglob("counts.npy"))
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(bad).tobytes()
    file.write_bytes(data)
    pruned.sums.enabled = False  # as if an attacker had recomputed the checksum
    with pytest.raises(DatastoreCorrupt, match=r"counts\.npy contains counts that are not finite and above 0"):
        pruned.counts(torch.arange(store.entry_count))
    with pytest.raises(DatastoreCorrupt, match=r"counts\.npy"):
        merge_keys(Datastore.open(tmp_path / "b"), ExactIndex(store.keys), neighbours=2)


def test_invalid_metadata_of_a_map_is_corrupt(tmp_path):
    store = random_store(tmp_path / "a")
    derive(store, tmp_path / "b", key_map=KeyMap(torch.eye(6), torch.zeros(6))).close()
    catalog = Catalog.open(tmp_path / "b" / CATALOG_FILE, write=True)
    good = catalog.get("map")
    for bad in ("x", 5, [1], {"a": 1}, {**good, "sha256": 3}, {**good, "metadata": [1]}, {"sha256": good["sha256"]}):
        catalog.put(map=bad)
        with pytest.raises(DatastoreCorrupt, match=r"catalog\.db has no valid metadata of the key map"):
            Datastore.open(tmp_path / "b")
    catalog.put(map=good)
    assert Datastore.open(tmp_path / "b").width == 6
    catalog.close()


# Copies that stop themselves with SIGKILL at one write after another, each in a process of its own.
KILLED = """
    import os, signal, sys
    sys.path.insert(0, HERE)
    import torch
    from helpers.kill import Dying
    from knnlm.datastore import catalog, codecs, segments
    from knnlm.datastore.store import Datastore
    from knnlm.datastore.codecs import KeyMap
    from knnlm.datastore.rewrite import derive
    dying = Dying()
    segments.ArrayWriter.write = dying(segments.ArrayWriter.write)
    codecs.save_file = dying(codecs.save_file)
    catalog.Catalog.add_segment = dying(catalog.Catalog.add_segment)
    catalog.Catalog._put = dying(catalog.Catalog._put)
    torch.set_num_threads(1)
    for writes in map(int, sys.argv[2:]):
        if os.fork() == 0:
            dying.left = writes
            store = Datastore.open("a")
            counts = torch.arange(1.0, store.entry_count + 1)
            key_map = KeyMap(2 * torch.eye(6), torch.ones(6))
            derive(store, f"killed{writes}", keep=torch.arange(0, store.entry_count, 2), counts=counts, key_map=key_map)
            os._exit(0)
        assert os.wait()[1] == signal.SIGKILL, writes
"""


def test_copy_killed_at_any_write_resumes_and_ends_with_the_same_bytes(tmp_path):
    store = random_store(tmp_path / "a")
    options = {"keep": torch.arange(0, store.entry_count, 2), "counts": torch.arange(1.0, store.entry_count + 1)}
    key_map = KeyMap(2 * torch.eye(6), torch.ones(6))
    derive(store, tmp_path / "whole", key_map=key_map, **options)
    # The first write is the map's, then come the metadata of the catalog, then arrays and segments, then the last fact.
    points = [1, 3, 9, 10, 12, 13, 14, 19, 23]
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED).replace("HERE", repr(str(Path(__file__).parent.parent))),
        "-",
        *map(str, points),
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    for writes in points:
        killed = tmp_path / f"killed{writes}"
        with pytest.raises(DatastoreError, match=r"unfinished copy|not a store|not a knnlm catalog"):
            Datastore.open(killed)
        if writes > 12:
            with pytest.raises(DatastoreError, match="unfinished copy of another store, or with other settings"):
                derive(store, killed, **options)
        derive(store, killed, key_map=key_map, **options)
        assert contents(killed) == contents(tmp_path / "whole")
    with pytest.raises(DatastoreError, match="finished store already"):
        derive(store, killed, key_map=key_map, **options)


def stopped_copy(store, out):
    """A copy that was stopped when its first segment was written."""

    @contextmanager
    def stopping(what, *, total, unit):
        def advance(count):
            if len(list((out / "segments").glob("000001*"))):
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        derive(store, out, keep=torch.arange(0, store.entry_count, 2), progress=stopping)


def test_builds_and_copies_do_not_resume_each_other(lm, store, tmp_path):
    stopped_copy(store, tmp_path / "copy")
    before = contents(tmp_path / "copy")
    with pytest.raises(DatastoreError, match=r"copy is an unfinished copy of another store, as knnlm prune and"):
        build(documents(40), tmp_path / "copy", lm=lm, segment_entries=500)
    assert contents(tmp_path / "copy") == before
    assert derive(store, tmp_path / "copy", keep=torch.arange(0, store.entry_count, 2)).entry_count == store.entry_count

    def stopping():
        yield from documents(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(stopping(), tmp_path / "build", lm=lm, segment_entries=150)
    with pytest.raises(DatastoreError, match="build is an unfinished build, not a copy"):
        derive(store, tmp_path / "build")


def test_occupied_folder_is_refused_before_anything_slow(store, tmp_path):
    derive(store, tmp_path / "done").close()

    def progress(what, *, total, unit):
        raise AssertionError(f"{what} has begun")

    with pytest.raises(DatastoreError, match="finished store already"):
        prune(store, tmp_path / "done", merge=4, width=3, progress=progress)


def test_copy_does_not_overwrite_other_files(store, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DatastoreError, match=r"contains thesis\.tex"):
        derive(store, tmp_path)


def test_principal_components_match_the_singular_value_decomposition(tmp_path):
    generator = np.random.default_rng(5)
    keys = generator.normal(size=(300, 8)) * [9, 7, 5, 3, 1, 1, 0.5, 0.1] @ generator.normal(size=(8, 8)) + 100
    store = made_store(tmp_path / "a", keys, generator.integers(0, 4, 300), sizes=[100] * 3)
    keys = all_keys(store).double().numpy()
    found = principal_components(store, 3)
    centred = keys - keys.mean(0)
    _, sizes, vectors = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(found.centre, keys.mean(0), rtol=1e-5)
    np.testing.assert_allclose(np.abs(vectors[:3] @ found.matrix.double().numpy()), np.eye(3), atol=1e-4)
    assert found.metadata["explained_variance"] == pytest.approx((sizes[:3] ** 2).sum() / (sizes**2).sum(), rel=1e-6)
    result = prune(store, tmp_path / "b", width=3)
    small = Datastore.open(tmp_path / "b")
    projected = centred @ vectors[:3].T
    right = ((projected[:10, None] - projected[None]) ** 2).sum(2)
    far = torch.cdist(small.project(torch.from_numpy(keys[:10]).float()), all_keys(small)).square()
    np.testing.assert_allclose(far, right, atol=1e-3 * right.max())
    assert (result["keys_before"], result["keys_after"], result["merged"], result["dropped"]) == (300, 300, 0, 0)
    assert (result["bytes_before"], result["bytes_after"]) == (300 * (8 * 4 + 4), 300 * (3 * 4 + 4))
    assert small.catalog.get("derived")["metadata"]["settings"]["width"] == 3


def merge_by_hand(keys, values, order, neighbours, alive):
    """The greedy merge as described, one key after another, by brute force."""
    into = {key: key for key in range(len(keys)) if alive[key]}
    counts = dict.fromkeys(into, 1)
    for key in order:
        if not alive[key] or counts[key] > 1:
            continue
        near = np.argsort(oracle.distances(keys[key], keys))
        for other in [one for one in near if one != key][:neighbours]:
            if alive[other] and values[other] == values[key] and into[other] == other:
                into[key] = other
                counts[other] += 1
                counts[key] = 0
                break
    return into, counts


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), neighbours=st.integers(1, 12), dropping=st.booleans())
def test_greedy_merge_matches_brute_force(tmp_path_factory, seed, neighbours, dropping):
    store = random_store(tmp_path_factory.mktemp("merge") / "a", seed=seed)
    alive = torch.from_numpy(np.random.default_rng(seed).random(store.entry_count) < (0.7 if dropping else 2))
    keys, values = all_keys(store).numpy(), store.values(torch.arange(store.entry_count)).numpy()
    merged = merge_keys(store, ExactIndex(store.keys), neighbours=neighbours, alive=alive, seed=seed)
    order = np.random.default_rng(seed).permutation(store.entry_count)
    into, counts = merge_by_hand(keys, values, order, neighbours, alive.numpy())
    assert merged.into.tolist() == [into.get(key, -1) for key in range(store.entry_count)]
    assert merged.counts.tolist() == [counts.get(key, 0) for key in range(store.entry_count)]
    assert merged.counts.sum() == alive.sum()
    for key, other in into.items():
        assert values[key] == values[other]
        assert into[other] == other
        nearer = (oracle.distances(keys[key], keys) < oracle.distances(keys[key], keys)[other]).sum()
        assert key == other or nearer <= neighbours


def test_merging_stores_counts_and_its_figures_add_up(tmp_path):
    store = random_store(tmp_path / "a")
    result = prune(store, tmp_path / "b", merge=8, seed=4)
    pruned = Datastore.open(tmp_path / "b")
    assert 0 < result["merged"] == store.entry_count - pruned.key_count
    ids = torch.arange(pruned.key_count)
    assert pruned.counts(ids).sum() == store.entry_count
    merged = merge_keys(store, ExactIndex(store.keys), neighbours=8, seed=4)
    assert torch.equal(pruned.entries_of(ids), merged.keep.nonzero()[:, 0])
    assert torch.equal(pruned.counts(ids), merged.counts[merged.keep])
    prune(store, tmp_path / "c", merge=8, seed=4)
    assert contents(tmp_path / "c") == contents(tmp_path / "b")


def test_known_tokens_are_dropped_by_the_models_probability(lm, tmp_path):
    made = documents(3, words=60)
    store = build(made, tmp_path / "a", lm=lm, segment_entries=100, window=lm.window(48, 24))
    right = []
    for document in made:
        tokens = lm.encode(document.text)
        _, probs = oracle.read_token_by_token(
            lm.model, lm.model.model.layers[-1].mlp, tokens, start_token=lm.start_token, context=48, stride=24
        )
        right.extend(probs[np.arange(len(tokens)), tokens])
    log_p = store_log_p(store, lm)
    np.testing.assert_allclose(log_p, np.log(right), atol=1e-4)
    limit = float(np.quantile(right, 0.6))
    limit = math.exp(0.5 * (math.log(limit) + math.log(min(p for p in right if p > limit * 1.001))))
    assert torch.equal(known_keys(store, log_p, limit), torch.from_numpy(np.array(right) >= limit))
    result = prune(store, tmp_path / "b", drop_known=limit, log_p=log_p)
    pruned = Datastore.open(tmp_path / "b")
    assert result["dropped"] == (np.array(right) >= limit).sum() == store.entry_count - pruned.key_count
    assert (
        pruned.entries_of(torch.arange(pruned.key_count)).tolist() == np.flatnonzero(np.array(right) < limit).tolist()
    )
    assert pruned.counts(torch.arange(pruned.key_count)) is None
    both = prune(store, tmp_path / "c", drop_known=limit, log_p=log_p, merge=4, width=5)
    small = Datastore.open(tmp_path / "c")
    assert small.counts(torch.arange(small.key_count)).sum() == store.entry_count - both["dropped"]
    assert both["keys_after"] == store.entry_count - both["dropped"] - both["merged"] == small.key_count
    assert small.width == 5


def test_drop_known_uses_the_named_model(lm, store, model_folder, tmp_path, capfd):
    """On the command line: the language model, not the one that made the keys."""
    other = CausalLM(tiny("gpt2", seed=5), tiny_tokenizer(), name="other")
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    for name, model in (("own", lm), ("other", other)):
        log_p = store_log_p(store, model)
        limit = float(log_p.double().quantile(0.7).exp())
        folder = model_folder if name == "own" else tmp_path / "other"
        command = ["prune", store.path, "--out", tmp_path / f"without {name}", "--drop-known", limit, "--json"]
        code, out, err = knnlm(capfd, *command, "--model", folder)
        assert code == 0, err
        pruned = Datastore.open(tmp_path / f"without {name}")
        kept = (log_p.double() < math.log(limit)).nonzero()[:, 0]
        assert torch.equal(pruned.entries_of(torch.arange(pruned.key_count)), kept)
        assert json.loads(out)["dropped"] == store.entry_count - len(kept)
    small = CausalLM(tiny("llama"), tiny_tokenizer(), name="small")
    small.model.resize_token_embeddings(310)
    with pytest.raises(ModelMismatch, match="320, but that of small has 310"):
        store_log_p(store, CausalLM(small.model, tiny_tokenizer(), name="small"))


def test_map_that_cannot_be_written_is_a_clear_error(store, tmp_path):
    (tmp_path / "b" / "map.partial").mkdir(parents=True)  # what is there cannot be written over
    with pytest.raises(DatastoreError, match=r"Cannot write .*map\.safetensors: .*Is a directory"):
        prune(store, tmp_path / "b", width=4)
    (tmp_path / "b" / "map.partial").rmdir()
    (tmp_path / "b" / "map.partial").write_text("what a killed process left")
    prune(store, tmp_path / "b", width=4)
    assert Datastore.open(tmp_path / "b").key_count == store.entry_count
    assert not (tmp_path / "b" / "map.partial").exists()


def test_invalid_pruning_options_are_refused(store, tmp_path):
    wrong = [
        ({}, "Nothing to prune"),
        ({"width": 0}, "from 1 to 32"),
        ({"width": 33}, "from 1 to 32"),
        ({"merge": 0}, "at least 1"),
        ({"drop_known": 1.5, "log_p": torch.zeros(store.entry_count)}, "probability"),
        ({"drop_known": 0.5}, "store_log_p"),
        ({"drop_known": 0.5, "log_p": torch.zeros(3)}, "store_log_p"),
    ]
    for options, match in wrong:
        with pytest.raises(ParameterError, match=match):
            prune(store, tmp_path / "b", **options)
    other = CausalLM(tiny("llama"), tiny_tokenizer(bos=False), name="other")
    with pytest.raises(ModelMismatch, match="other has another tokenizer"):
        store_log_p(store, other)
