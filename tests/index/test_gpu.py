"""Exact search on a GPU against float64 brute force; without a GPU, the kernels run in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers import search_contract as contract
from helpers.search_contract import KINDS, Array, seeded
from helpers.stores import documents
from knnlm.datastore import indexes
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, IndexInvalid, ParameterError
from knnlm.index import exact
from knnlm.index.exact import BruteForceSearch, ExactIndex
from knnlm.index.gpu import kernels, streaming
from knnlm.index.gpu import search as gpu_search
from knnlm.index.gpu.deferred import DeferredChecks, defer_checks
from knnlm.index.gpu.search import FusedSearch
from knnlm.index.gpu.streaming import StreamedSearch
from knnlm.index.rerank import RerankedIndex
from knnlm.ingest.build import build

METRICS = ["l2", "ip"]


def by_numpy(queries, keys, metric):
    return torch.from_numpy(np.stack([oracle.distances(query, keys, metric) for query in queries.numpy()]))


def check(keys, queries, k, metric, **options):
    return contract.check_search(keys, queries, k, metric, truth=by_numpy(queries, keys.numpy(), metric), **options)


def at_least(extra):
    """Measure few groups: the interpreter is slow."""
    return contract.settings(FusedSearch, _group_count=lambda _, k: k + extra)


@pytest.mark.parametrize("metric", METRICS)
@settings(max_examples=40)
@given(data=st.data())
def test_any_sizes_give_what_brute_force_gives(metric, data):
    rows = data.draw(st.sampled_from([1, 2, 3, 31, 127, 128, 255, 256, 257, 300, 513, 700]))
    width = data.draw(st.sampled_from([1, 3, 64, 65, 130]))
    count = data.draw(st.sampled_from([1, 2, 3, 5]))
    k = data.draw(st.one_of(st.integers(1, 12), st.just(rows), st.just(rows + 3)))
    kind = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    keys, queries = kind(seeded(data.draw(st.integers(0, 2**32))), rows, width, count)
    with at_least(data.draw(st.integers(0, 3))):
        check(keys, queries, k, metric)


@pytest.mark.parametrize("count", [1, 16, 17, 33, 65, 129])
def test_any_number_of_queries_is_answered(count):
    keys, queries = contract.random_data(seeded(count), 900, 65, count)
    with at_least(1):
        index = check(keys, queries, 3, "l2" if count % 2 else "ip")
    assert isinstance(index.searcher, FusedSearch)


def test_more_queries_than_fit_the_workspace_are_searched_in_batches():
    keys, queries = contract.random_data(seeded(0), 700, 16, 37)
    with at_least(1):
        search = FusedSearch(contract.device_keys(keys, "l2", int8=False), workspace=1)
        found = search.search(queries, 2)
        parts = [search.search(part, 2) for part in queries.split(16)]
    assert search._batch_size(37, 2) < 128
    truth = by_numpy(queries, keys.numpy(), "l2")
    contract.check_answer(found, truth, 2, contract.allowed(queries, keys, truth, "l2"))
    assert torch.equal(found.ids, torch.cat([part.ids for part in parts]))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_difficult_keys_and_queries_are_searched_exactly(kind, metric):
    keys, queries = KINDS[kind](seeded(7), 1500, 70, 3)
    with at_least(4):
        check(keys, queries, 7, metric)


@pytest.mark.parametrize("metric", METRICS)
@settings(max_examples=30)
@given(data=st.data())
def test_neighbours_in_parts_of_the_keys_merge_to_those_in_all_keys(metric, data):
    rows = data.draw(st.integers(2, 700))
    firsts = sorted({0, *data.draw(st.lists(st.integers(1, rows - 1), max_size=4))})
    width, count = data.draw(st.sampled_from([3, 64, 70])), data.draw(st.sampled_from([1, 3, 20]))
    kind = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    keys, queries = kind(seeded(data.draw(st.integers(0, 2**32))), rows, width, count)
    k = data.draw(st.one_of(st.integers(1, 12), st.just(rows + 3)))
    with at_least(data.draw(st.integers(0, 3))):
        contract.check_parts(keys, queries, k, metric, firsts)


@pytest.mark.parametrize("max_bytes", [None, 40_000])
def test_first_of_equal_keys_are_returned_and_parts_merge_to_them(max_bytes):
    keys, queries = contract.duplicates(seeded(3), 2000, 20, 6)
    with at_least(0):
        found = contract.check_parts(keys, queries, 9, "l2", [0, 1, 700, 1300], max_bytes=max_bytes)
    same = (keys == keys[0]).all(1).nonzero()[:9, 0]
    assert torch.equal(found.ids[0], same)


def test_equally_near_keys_that_were_measured_need_no_proof():
    keys, queries = contract.duplicates(seeded(4), 300, 20, 4)  # few keys: all of them are measured
    index = ExactIndex(Array(keys), kernels=True)
    expected = index.search(queries, 5)
    same = (keys == keys[0]).all(1).nonzero()[:5, 0]
    assert torch.equal(expected.ids[0], same)
    with defer_checks() as checks:
        found = index.search(queries, 5)
    assert not checks.any_failed()
    assert index.searcher.proofs == 0
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.distances, expected.distances)


def test_random_keys_need_no_proof():
    keys, queries = contract.random_data(seeded(1), 3000, 64, 4)
    index = check(keys, queries, 10, "l2")
    assert index.searcher.proofs == index.searcher.divided == 0


def test_no_queries_return_empty_results():
    found = ExactIndex(Array(torch.ones(5, 4)), kernels=True).search(torch.ones(0, 4), 3)
    assert found.ids.shape == found.distances.shape == (0, 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under the interpreter
@pytest.mark.parametrize("max_bytes", [None, 10_000])  # at once, and streamed in chunks
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_query_that_is_not_finite_has_no_neighbours(value, max_bytes):
    count = 300 if max_bytes is None else 2100
    keys, queries = contract.random_data(seeded(0), count, 8, 2)
    queries[1, 3] = value
    index = ExactIndex(Array(keys), kernels=True, max_bytes=max_bytes)
    assert isinstance(index.searcher, FusedSearch if max_bytes is None else StreamedSearch)
    found = index.search(queries, 4)
    truth = by_numpy(queries[:1], keys.numpy(), "l2")
    first = type(found)(found.ids[:1], found.distances[:1])
    contract.check_answer(first, truth, 4, contract.allowed(queries[:1], keys, truth, "l2"))
    assert (found.ids[1] == -1).all()
    assert (found.distances[1] == np.inf).all()


def test_wrong_choice_of_groups_is_repaired_by_the_proof(monkeypatch):
    # Rounding takes all digits of the queries, and only k groups are measured at first.
    keys, queries = contract.shifted(seeded(3), 3000, 64, 12)
    with at_least(0):
        index = check(keys, queries, 3, "l2")
        assert index.searcher.proofs > 0
        assert index.searcher.divided == 0
        monkeypatch.setattr(FusedSearch, "_prove", lambda *_, **__: None)
        with pytest.raises(AssertionError, match=r"missed|farther"):
            check(keys, queries, 3, "l2")


def test_deferred_check_is_evaluated_at_the_end(monkeypatch):
    keys, queries = contract.shifted(seeded(3), 3000, 64, 12)
    clear, asked = contract.random_data(seeded(1), 3000, 64, 4)
    monkeypatch.setattr(FusedSearch, "_prove", lambda *_, **__: pytest.fail("the check was evaluated"))
    with at_least(0):
        index = ExactIndex(Array(keys), kernels=True)
        with defer_checks() as checks:
            deferred = index.search(queries, 3)
            assert deferred.ids.shape == (12, 3)
        assert checks.any_failed()
    with defer_checks() as checks:
        check(clear, asked, 10, "l2")
    assert not checks.any_failed()
    assert not DeferredChecks().any_failed()


def test_proofs_are_measured_in_batches(monkeypatch):
    keys, queries = contract.shifted(seeded(4), 1500, 64, 12)
    monkeypatch.setattr(gpu_search, "_MAX_TOPK_QUERIES", 3)
    monkeypatch.setattr(gpu_search, "_PROOF_BATCH", 1)
    with at_least(0):
        assert check(keys, queries, 3, "l2").searcher.proofs > 3


@pytest.mark.parametrize("metric", METRICS)
def test_where_too_many_groups_could_hold_a_neighbour_all_keys_are_compared(monkeypatch, metric):
    monkeypatch.setattr(gpu_search, "_MAX_PROOF_GROUPS", 8)
    keys, queries = contract.duplicates(seeded(5), 3000, 20, 4)
    with at_least(1):
        index = check(keys, queries, 5, metric, coarse=1e-6)
    assert index.searcher.divided > 0
    # Queries that fit and queries that do not, in one batch.
    monkeypatch.setattr(gpu_search, "_MAX_PROOF_GROUPS", 40)
    with at_least(1):
        index = check(keys, queries, 5, metric, coarse=1e-6)
    assert index.searcher.proofs >= index.searcher.divided


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_neighbour_scores_below_the_bound(kind, metric):
    for width, count in ((3, 2), (64, 5)):
        keys, queries = KINDS[kind](seeded(11), 200, width, count)
        contract.check_score_bound(keys, queries, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_bound_is_tight_for_random_keys(metric):
    keys, queries = contract.random_data(seeded(12), 250, 64, 6)
    assert contract.check_score_bound(keys, queries, metric) < 0.02


@pytest.mark.parametrize("metric", METRICS)
def test_no_neighbour_scores_below_the_bound_for_int8(metric):
    keys, queries = contract.random_data(seeded(13), 250, 64, 6)
    contract.check_score_bound(keys, queries, metric, int8=True)


@pytest.mark.parametrize("name", contract.SHAPES)
def test_every_group_gets_its_largest_score_and_nothing_else_is_written(name):
    shape, dtype = contract.SHAPES[name]
    contract.check_group_maxima(shape, dtype, 128, seeded(14))


def test_every_number_of_queries_has_a_shape_that_was_tested():
    for dtype in (torch.float16, torch.int8):
        tested = [shape for shape, of in contract.SHAPES.values() if of == dtype]
        for count in (1, 16, 17, 32, 33, 64, 65, 4096):
            shape = kernels.shape_for(count, dtype)
            assert shape in tested
            assert shape.queries >= min(count, 128)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("pairs", "dtype"), [(8, torch.float16), (16, torch.float16), (16, torch.int8)])
def test_all_keys_of_the_groups_are_measured(pairs, dtype, metric):
    contract.check_group_distances(pairs, dtype, metric, 128, seeded(15))


@pytest.mark.parametrize(("columns", "capacity"), [(100, 100), (1500, 40), (2049, 1), (40_000, 3000)])
def test_survivors_are_counted_and_kept_while_they_fit(columns, capacity):
    contract.check_survivors(5, columns, capacity, seeded(16))


@pytest.fixture
def small(monkeypatch):
    """Make 256 groups many, and take thresholds from 16 of them."""
    monkeypatch.setattr(gpu_search, "_MAX_TOPK_GROUPS", 64)
    monkeypatch.setattr(gpu_search, "_MAX_TOPK_QUERIES", 1)
    monkeypatch.setattr(gpu_search, "_THRESHOLD_SAMPLE", 16)


def test_threshold_lets_enough_through_at_once(small):
    scores = torch.arange(256.0) * torch.arange(1.0, 6)[:, None]  # even steps through these are a fair sample
    spy = contract.check_groups(scores, 24)
    assert spy.good == 5
    assert spy.rounds == 1
    assert spy.few == spy.many == spy.direct == 0


def test_threshold_that_is_too_high_is_lowered(small):
    spy = contract.check_groups(contract.misled("sample too good", 5, 256, 16, seeded(1)), 8)
    assert spy.few == 10  # one, then four of the sample reach it; then all sixteen
    assert spy.good == 5
    assert spy.rounds == 3
    assert spy.many == spy.direct == 0


def test_threshold_that_is_too_low_is_raised(small):
    spy = contract.check_groups(contract.misled("sample too bad", 5, 256, 16, seeded(2)), 24)
    assert spy.many >= 5  # 240 of them reach the first one, and 96 fit
    assert spy.good == 5
    assert spy.few == spy.direct == 0


@pytest.mark.parametrize(("kind", "wanted"), [("sample too good", 16), ("all equal", 8), ("nearly all padding", 20)])
def test_what_no_threshold_finds_is_sorted(small, kind, wanted):
    spy = contract.check_groups(contract.misled(kind, 5, 256, 16, seeded(3)), wanted)
    assert spy.rounds == 3
    assert spy.direct == 5
    assert spy.good == 0


def test_padding_is_not_returned_as_a_group_twice(small):
    contract.check_groups(torch.tensor([[1.0] * 3 + [-torch.inf] * 67] * 3), 40)


@settings(max_examples=40)
@given(data=st.data())
def test_nearest_groups_are_found_for_any_scores(data):
    groups = data.draw(st.integers(1, 300))
    kind = data.draw(st.sampled_from(["mixed", "sample too good", "sample too bad", "nearly all padding", "random"]))
    scores = contract.misled(kind, data.draw(st.integers(1, 4)), groups, 16, seeded(data.draw(st.integers(0, 999))))
    if data.draw(st.booleans()):
        scores = scores.round()  # ties
    with contract.settings(
        gpu_search, _MAX_TOPK_GROUPS=data.draw(st.sampled_from([1, 64])), _MAX_TOPK_QUERIES=1, _THRESHOLD_SAMPLE=16
    ):
        contract.check_groups(scores, data.draw(st.integers(1, 40)))


@pytest.mark.parametrize("kind", ["ascending", "duplicates", "clusters", "random_data"])
def test_search_by_thresholds_is_exact(small, kind):
    keys, queries = KINDS[kind](seeded(17), 3000, 20, 6)
    with at_least(4), contract.spying(8) as spy:
        check(keys, queries, 4, "l2")
    assert spy.rounds > 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("kind", "least"), [("random_data", 0.9), ("clusters", 0.0)])
def test_int8_search_is_exact_for_the_rounded_keys(kind, least, metric):
    keys, queries = KINDS[kind](seeded(18), 1500, 64, 6)
    with at_least(4):
        assert contract.check_int8(keys, queries, 8, metric) >= least


def test_int8_takes_more_queries_than_a_small_tile():
    keys, queries = contract.random_data(seeded(19), 600, 33, 66)
    with at_least(1):
        assert contract.check_int8(keys, queries, 5, "l2") > 0.9


def test_one_enormous_key_leaves_int8_steps_to_the_others():
    keys, queries = contract.random_data(seeded(20), 3000, 64, 4)
    keys[5] *= 300
    found = ExactIndex(Array(keys), kernels=True, key_dtype="int8").search(queries, 10)
    truth = by_numpy(queries, keys.numpy(), "l2")
    near = truth.gather(1, found.ids) <= truth.topk(10, largest=False).values[:, -1:]
    assert near.double().mean() > 0.8


def test_rotation_keeps_distances():
    turn = contract.Int8Keys(1, 37, metric="l2", device=torch.device("cpu"), sample=torch.ones(1, 37))._rotation
    np.testing.assert_allclose(turn.double() @ turn.double().T, np.eye(37), atol=1e-6)


def test_unknown_key_dtype_is_refused():
    with pytest.raises(ParameterError, match=r"Unknown .*'int4': use float16 or int8"):
        ExactIndex(Array(torch.ones(2, 2)), key_dtype="int4")


@pytest.mark.parametrize("metric", METRICS)
def test_keys_that_do_not_fit_are_streamed_with_the_same_results(metric):
    keys, queries = contract.clusters(seeded(21), 2500, 24, 3)
    with at_least(2):
        index = check(keys, queries, 9, metric, max_bytes=10_000)
        few = check(keys[:1030], queries, 1030, metric, max_bytes=10_000)  # k above the rows of the second chunk
        resident = check(keys, queries, 9, metric, max_bytes=1 << 30)
    assert isinstance(index.searcher, StreamedSearch)
    assert isinstance(few.searcher, StreamedSearch)
    assert isinstance(resident.searcher, FusedSearch)
    assert index.searcher.chunk == 1024
    one, other = index.search(queries, 9), resident.search(queries, 9)
    torch.testing.assert_close(one.distances, other.distances, rtol=1e-6, atol=0)
    again = index.search(queries, 9)
    assert torch.equal(one.ids, again.ids)


def stored(store):
    """All keys of a store, as it returns them."""
    return torch.cat([block for _, block in store.chunks(100)])


def queries_near(store, count=3):
    return stored(store)[:: store.key_count // count][:count] + 0.01 * torch.randn(
        count, store.width, generator=seeded(0)
    )


def test_keys_are_read_as_they_are_stored_across_segments(store):
    assert len(store.segments) > 1
    border = store.segments[1].first_entry
    everything = stored(store).half()
    assert store.keys.half
    for first, count in ((0, 1), (0, store.key_count), (border - 2, 4), (border, 3), (store.key_count - 1, 1)):
        out = torch.full((count, store.width), torch.nan, dtype=torch.float16)
        store.keys.read(first, out)
        assert torch.equal(out, everything[first : first + count])


def test_store_is_searched_from_its_files(store, monkeypatch):
    monkeypatch.setattr(streaming, "_READ_BATCH", 300)  # several reads, across the borders of segments
    queries = queries_near(store)
    truth = by_numpy(queries, stored(store).numpy(), "l2")
    slack = contract.allowed(queries, stored(store), truth, "l2")
    for max_bytes in (None, 10_000):
        index = ExactIndex(store.keys, kernels=True, max_bytes=max_bytes)
        assert isinstance(index.searcher, FusedSearch if max_bytes is None else StreamedSearch)
        with contract.poisoned():
            contract.check_answer(index.search(queries, 6), truth, 6, slack)


def test_keys_that_a_build_left_on_the_device_are_used(store, monkeypatch):
    monkeypatch.setattr(streaming, "_READ_BATCH", 64)
    opened = Datastore.open(store.path)
    everything = stored(store).half()
    opened.resident_keys = list(everything.split(190))
    monkeypatch.setattr(opened, "read", None)  # files are not read
    queries = queries_near(store)
    truth = by_numpy(queries, everything.numpy(), "l2")
    slack = contract.allowed(queries, everything, truth, "l2")
    found = ExactIndex(opened.keys, kernels=True).search(queries, 6)
    contract.check_answer(found, truth, 6, slack)
    assert opened.resident_keys is not None
    opened.close()


def test_resident_keys_that_do_not_fit_twice_are_released_and_read_from_their_files(store):
    opened = Datastore.open(store.path)
    wrong = torch.full_like(stored(store).half(), 7)
    opened.resident_keys = [wrong]
    queries = queries_near(store)
    index = ExactIndex(opened.keys, kernels=True, max_bytes=10_000)
    assert isinstance(index.searcher, StreamedSearch)
    assert opened.resident_keys is None
    truth = by_numpy(queries, stored(store).numpy(), "l2")
    slack = contract.allowed(queries, stored(store), truth, "l2")
    contract.check_answer(index.search(queries, 6), truth, 6, slack)
    opened.close()


def test_keys_that_do_not_fit_into_host_memory_are_read_when_needed(store, monkeypatch):
    monkeypatch.setattr(streaming, "_available_host_bytes", lambda: 10_000)
    assert isinstance(ExactIndex(store.keys, kernels=True, max_bytes=10_000).searcher, BruteForceSearch)


def test_fits_on_device_follows_free_memory_and_dtype(lm, store, tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    assert streaming.fits_on_device(store.keys, cpu, "float16")
    single = build(documents(3), tmp_path / "single", lm=lm, key_format="float32")
    assert not streaming.fits_on_device(single.keys, cpu, "float16")
    needed = {keys: streaming._needed_bytes(store.keys, keys) for keys in ("float16", "int8")}
    assert needed["int8"] < needed["float16"]
    assert store.entry_count * store.width * 2 < needed["float16"]
    monkeypatch.setattr(streaming, "_free_bytes", lambda _: needed["float16"] - 1)
    assert not streaming.fits_on_device(store.keys, cpu, "float16")
    assert streaming.fits_on_device(store.keys, cpu, "int8")


@pytest.mark.parametrize("fitting", [True, False])
def test_exact_search_replaces_an_index_only_where_all_keys_fit(lm, tmp_path, monkeypatch, fitting):
    made = build(documents(12), tmp_path / "memory", lm=lm)
    build_index(made, "Flat")
    monkeypatch.setattr(indexes, "has_kernels", lambda _: True)
    monkeypatch.setattr(indexes, "fits_on_device", lambda *_: fitting)
    opened = open_index(Datastore.open(made.path))
    assert isinstance(opened, ExactIndex if fitting else RerankedIndex)
    assert not isinstance(open_index(Datastore.open(made.path), rerank=False), ExactIndex)


@pytest.mark.parametrize("cut", [1, 128, 5000])
def test_file_truncated_while_open_is_an_error(store, tmp_path, cut):
    shutil.copytree(store.path, tmp_path / "memory")
    opened = Datastore.open(tmp_path / "memory")
    file = tmp_path / "memory" / "segments" / "000001" / "keys.npy"
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(DatastoreCorrupt, match=r"000001/keys\.npy"):
        ExactIndex(opened.keys, kernels=True)
    with pytest.raises(DatastoreCorrupt, match=r"000001/keys\.npy"):
        list(opened.chunks(100))
    opened.close()


def test_keys_outside_float16_are_searched_by_brute_force(lm, store, tmp_path):
    floats = build(documents(3), tmp_path / "floats", lm=lm, key_format="float32")
    scaled = Datastore.open(store.path)
    scaled._segments[1] = dataclasses.replace(scaled._segments[1], scale=2.0)
    for opened in (floats, scaled):
        assert not opened.keys.half
        queries = queries_near(opened)
        index = ExactIndex(opened.keys, kernels=True)
        assert isinstance(index.searcher, BruteForceSearch)
        truth = by_numpy(queries, stored(opened).numpy(), "l2")
        slack = 1e-5 * truth.amax(1, keepdim=True)
        contract.check_answer(index.search(queries, 5), truth, 5, slack)
    scaled.close()
    index = ExactIndex(Array(torch.full((4, 3), 1.0001)), kernels=True)
    assert isinstance(index.searcher, BruteForceSearch)


@pytest.mark.parametrize("keys", ["float16", "int8"])
@pytest.mark.parametrize("max_bytes", [None, 10_000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_keys_that_are_not_finite_are_an_error(keys, max_bytes, value):
    data = torch.ones(2000, 4)
    data[1500, 2] = value
    with pytest.raises(IndexInvalid, match="not finite"):
        ExactIndex(Array(data), kernels=True, key_dtype=keys, max_bytes=max_bytes).search(torch.ones(1, 4), 3)


def test_corrupt_keys_of_a_store_are_an_error(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "memory")
    opened = Datastore.open(tmp_path / "memory", check=False)  # else a checksum mismatch comes first
    with (tmp_path / "memory" / "segments" / "000001" / "keys.npy").open("r+b") as file:
        file.seek(-6, os.SEEK_END)
        file.write(np.float16(np.nan).tobytes())
    for keys in ("float16", "int8"):
        with pytest.raises(IndexInvalid, match="not finite"):
            ExactIndex(opened.keys, kernels=True, key_dtype=keys)
    opened.close()


def test_cpu_uses_brute_force_unless_kernels_are_selected():
    assert isinstance(ExactIndex(Array(torch.ones(3, 2))).searcher, BruteForceSearch)
    assert isinstance(ExactIndex(Array(torch.ones(3, 2)), kernels=True).searcher, FusedSearch)
    assert isinstance(ExactIndex(Array(torch.ones(0, 2)), kernels=True).searcher, BruteForceSearch)


def test_without_triton_brute_force_is_used(monkeypatch):
    asked = []
    monkeypatch.setattr(exact, "find_spec", asked.append)

    class Gpu(ExactIndex):
        """An index that chooses as on a GPU."""

        def _choose_searcher(self, key_dtype, kernels, max_bytes):
            self._device = torch.device("cuda")
            monkeypatch.setattr(
                exact, "BruteForceSearch", lambda *_, **options: ("brute force", options["device"].type)
            )
            return super()._choose_searcher(key_dtype, kernels, max_bytes)

    assert Gpu(Array(torch.ones(3, 2))).searcher == ("brute force", "cuda")
    assert asked == ["triton"]
    with pytest.raises(ParameterError, match="need Triton"):
        ExactIndex(Array(torch.ones(3, 2)), kernels=True)
    monkeypatch.undo()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert isinstance(ExactIndex(Array(torch.ones(3, 2)), kernels=True).searcher, BruteForceSearch)


def test_importing_the_index_needs_neither_faiss_nor_triton():
    code = (
        "import sys, knnlm.index.composite, knnlm.index.factory, knnlm.index.validation;"
        "sys.exit(any(name in sys.modules for name in ('faiss', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
