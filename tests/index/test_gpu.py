"""The fused exact search against float64 brute force, its kernels under Triton's interpreter where there is no GPU."""

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
from helpers import search_contract as searches
from helpers.search_contract import KINDS, Array, seeded
from helpers.stores import documents
from knnlm.datastore import indexes as indexing
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, IndexInvalid, ParameterError
from knnlm.index import exact as exact_module
from knnlm.index.exact import BlockedSearch, ExactIndex
from knnlm.index.gpu import kernels
from knnlm.index.gpu import search as fused
from knnlm.index.gpu import streaming as loading
from knnlm.index.gpu.deferred import DeferredChecks, defer_checks
from knnlm.index.gpu.search import FusedSearch
from knnlm.index.gpu.streaming import StreamedSearch
from knnlm.index.rerank import Reranked
from knnlm.ingest.build import build

METRICS = ["l2", "ip"]


def by_numpy(queries, keys, metric):
    return torch.from_numpy(np.stack([oracle.distances(query, keys, metric) for query in queries.numpy()]))


def check(keys, queries, k, metric, **options):
    return searches.check_search(keys, queries, k, metric, truth=by_numpy(queries, keys.numpy(), metric), **options)


def at_least(extra):
    """Measure few groups: the interpreter is slow."""
    return searches.settings(FusedSearch, _wanted=lambda _, k: k + extra)


# ------------------------------------------------------------------------------------------------------ any size


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
    keys, queries = searches.random_data(seeded(count), 900, 65, count)
    with at_least(1):
        index = check(keys, queries, 3, "l2" if count % 2 else "ip")
    assert isinstance(index.finder, FusedSearch)


def test_more_queries_than_fit_the_workspace_are_asked_in_parts():
    keys, queries = searches.random_data(seeded(0), 700, 16, 37)
    with at_least(1):
        search = FusedSearch(searches.hold(keys, "l2", int8=False), workspace=1)
        found = search.search(queries, 2)
        parts = [search.search(part, 2) for part in queries.split(16)]
    assert search._batch(37, 2) < 128
    truth = by_numpy(queries, keys.numpy(), "l2")
    searches.check_answer(found, truth, 2, searches.allowed(queries, keys, truth, "l2"))
    assert torch.equal(found.ids, torch.cat([part.ids for part in parts]))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_difficult_keys_and_queries_are_searched_exactly(kind, metric):
    keys, queries = KINDS[kind](seeded(7), 1500, 70, 3)
    with at_least(4):
        check(keys, queries, 7, metric)


def test_random_keys_need_no_second_look():
    keys, queries = searches.random_data(seeded(1), 3000, 64, 4)
    index = check(keys, queries, 10, "l2")
    assert index.finder.proofs == index.finder.plain == 0


def test_no_queries_give_no_answers():
    found = ExactIndex(Array(torch.ones(5, 4)), fused=True).search(torch.ones(0, 4), 3)
    assert found.ids.shape == found.distances.shape == (0, 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under the interpreter
@pytest.mark.parametrize("room", [None, 10_000])  # at once, and streamed in chunks
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_query_that_is_nowhere_has_no_neighbours_rather_than_padding(value, room):
    count = 300 if room is None else 2100
    keys, queries = searches.random_data(seeded(0), count, 8, 2)
    queries[1, 3] = value
    index = ExactIndex(Array(keys), fused=True, room=room)
    assert isinstance(index.finder, FusedSearch if room is None else StreamedSearch)
    found = index.search(queries, 4)
    truth = by_numpy(queries[:1], keys.numpy(), "l2")
    first = type(found)(found.ids[:1], found.distances[:1])
    searches.check_answer(first, truth, 4, searches.allowed(queries[:1], keys, truth, "l2"))
    assert (found.ids[1] == -1).all()
    assert (found.distances[1] == np.inf).all()


# ---------------------------------------------------------------------------------------------------------- proofs


def test_a_blurred_choice_of_groups_is_repaired_by_the_proof(monkeypatch):
    # Queries lose all their digits when they are rounded, and only k groups are measured at first.
    keys, queries = searches.shifted(seeded(3), 3000, 64, 12)
    with at_least(0):
        index = check(keys, queries, 3, "l2")
        assert index.finder.proofs > 0
        assert index.finder.plain == 0
        monkeypatch.setattr(FusedSearch, "_prove", lambda *_: None)
        with pytest.raises(AssertionError, match=r"missed|farther"):
            check(keys, queries, 3, "l2")


def test_while_nobody_looks_a_doubt_is_noted_and_looked_at_in_the_end(monkeypatch):
    keys, queries = searches.shifted(seeded(3), 3000, 64, 12)
    clear, asked = searches.random_data(seeded(1), 3000, 64, 4)
    monkeypatch.setattr(FusedSearch, "_prove", lambda *_: pytest.fail("it has looked"))
    with at_least(0):
        index = ExactIndex(Array(keys), fused=True)
        with defer_checks() as doubts:
            blind = index.search(queries, 3)
            assert blind.ids.shape == (12, 3)
        assert doubts.justified()
    with defer_checks() as doubts:
        check(clear, asked, 10, "l2")
    assert not doubts.justified()
    assert not DeferredChecks().justified()


def test_proofs_are_measured_in_parts(monkeypatch):
    keys, queries = searches.shifted(seeded(4), 1500, 64, 12)
    monkeypatch.setattr(fused, "_FEW", 3)
    monkeypatch.setattr(fused, "_AT_ONCE", 1)
    with at_least(0):
        assert check(keys, queries, 3, "l2").finder.proofs > 3


@pytest.mark.parametrize("metric", METRICS)
def test_where_too_many_groups_could_hold_a_neighbour_all_keys_are_compared(monkeypatch, metric):
    monkeypatch.setattr(fused, "_WIDEST", 8)
    keys, queries = searches.duplicates(seeded(5), 3000, 20, 4)
    with at_least(1):
        index = check(keys, queries, 5, metric, coarse=1e-6)
    assert index.finder.plain > 0
    # Rows that fit and rows that do not come together.
    monkeypatch.setattr(fused, "_WIDEST", 40)
    with at_least(1):
        index = check(keys, queries, 5, metric, coarse=1e-6)
    assert index.finder.proofs >= index.finder.plain


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_neighbour_scores_below_the_bound(kind, metric):
    for width, count in ((3, 2), (64, 5)):
        keys, queries = KINDS[kind](seeded(11), 200, width, count)
        searches.check_lower(keys, queries, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_the_bound_is_tight_for_random_keys(metric):
    keys, queries = searches.random_data(seeded(12), 250, 64, 6)
    assert searches.check_lower(keys, queries, metric) < 0.02


@pytest.mark.parametrize("metric", METRICS)
def test_no_neighbour_scores_below_the_bound_for_bytes(metric):
    keys, queries = searches.random_data(seeded(13), 250, 64, 6)
    searches.check_lower(keys, queries, metric, int8=True)


# --------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("name", searches.SHAPES)
def test_every_group_gets_its_largest_score_and_nothing_else_is_written(name):
    shape, dtype = searches.SHAPES[name]
    searches.check_group_maxima(shape, dtype, 128, seeded(14))


def test_every_number_of_queries_has_a_shape_that_was_tested():
    for dtype in (torch.float16, torch.int8):
        tested = [shape for shape, of in searches.SHAPES.values() if of == dtype]
        for count in (1, 16, 17, 32, 33, 64, 65, 4096):
            shape = kernels.shape_for(count, dtype)
            assert shape in tested
            assert shape.queries >= min(count, 128)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("pairs", "dtype"), [(8, torch.float16), (16, torch.float16), (16, torch.int8)])
def test_all_keys_of_the_groups_are_measured(pairs, dtype, metric):
    searches.check_measure(pairs, dtype, metric, 128, seeded(15))


@pytest.mark.parametrize(("columns", "capacity"), [(100, 100), (1500, 40), (2049, 1), (40_000, 3000)])
def test_survivors_are_counted_and_kept_while_they_fit(columns, capacity):
    searches.check_survivors(5, columns, capacity, seeded(16))


# ------------------------------------------------------------------------------------------------------ thresholds


@pytest.fixture
def small(monkeypatch):
    """Make 256 groups many, and take thresholds from 16 of them."""
    monkeypatch.setattr(fused, "_DIRECT", 64)
    monkeypatch.setattr(fused, "_FEW", 1)
    monkeypatch.setattr(fused, "_SAMPLE", 16)


def test_a_threshold_lets_enough_through_at_once(small):
    scores = torch.arange(256.0) * torch.arange(1.0, 6)[:, None]  # even steps through these are a fair sample
    spy = searches.check_groups(scores, 24)
    assert spy.good == 5
    assert spy.rounds == 1
    assert spy.few == spy.many == spy.direct == 0


def test_a_threshold_that_is_too_high_is_lowered(small):
    spy = searches.check_groups(searches.misled("sample too good", 5, 256, 16, seeded(1)), 8)
    assert spy.few == 10  # one, then four of the sample reach it; then all sixteen
    assert spy.good == 5
    assert spy.rounds == 3
    assert spy.many == spy.direct == 0


def test_a_threshold_that_is_too_low_is_raised(small):
    spy = searches.check_groups(searches.misled("sample too bad", 5, 256, 16, seeded(2)), 24)
    assert spy.many >= 5  # 240 of them reach the first one, and 96 fit
    assert spy.good == 5
    assert spy.few == spy.direct == 0


@pytest.mark.parametrize(("kind", "wanted"), [("sample too good", 16), ("all equal", 8), ("nearly all padding", 20)])
def test_what_no_threshold_finds_is_sorted(small, kind, wanted):
    spy = searches.check_groups(searches.misled(kind, 5, 256, 16, seeded(3)), wanted)
    assert spy.rounds == 3
    assert spy.direct == 5
    assert spy.good == 0


def test_padding_among_the_wanted_is_no_group_twice(small):
    searches.check_groups(torch.tensor([[1.0] * 3 + [-torch.inf] * 67] * 3), 40)


@settings(max_examples=40)
@given(data=st.data())
def test_groups_are_found_whatever_the_scores(data):
    groups = data.draw(st.integers(1, 300))
    kind = data.draw(st.sampled_from(["mixed", "sample too good", "sample too bad", "nearly all padding", "random"]))
    scores = searches.misled(kind, data.draw(st.integers(1, 4)), groups, 16, seeded(data.draw(st.integers(0, 999))))
    if data.draw(st.booleans()):
        scores = scores.round()  # ties
    with searches.settings(fused, _DIRECT=data.draw(st.sampled_from([1, 64])), _FEW=1, _SAMPLE=16):
        searches.check_groups(scores, data.draw(st.integers(1, 40)))


@pytest.mark.parametrize("kind", ["ascending", "duplicates", "clusters", "random_data"])
def test_a_search_by_thresholds_is_exact(small, kind):
    keys, queries = KINDS[kind](seeded(17), 3000, 20, 6)
    with at_least(4), searches.spying(8) as spy:
        check(keys, queries, 4, "l2")
    assert spy.rounds > 0


# ------------------------------------------------------------------------------------------------------------ int8


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("kind", "least"), [("random_data", 0.9), ("clusters", 0.0)])
def test_int8_answers_exactly_about_the_rounded_keys(kind, least, metric):
    keys, queries = KINDS[kind](seeded(18), 1500, 64, 6)
    with at_least(4):
        assert searches.check_int8(keys, queries, 8, metric) >= least


def test_int8_takes_more_queries_than_a_small_tile():
    keys, queries = searches.random_data(seeded(19), 600, 33, 66)
    with at_least(1):
        assert searches.check_int8(keys, queries, 5, "l2") > 0.9


def test_one_enormous_key_does_not_take_all_int8_steps():
    keys, queries = searches.random_data(seeded(20), 3000, 64, 4)
    keys[5] *= 300
    found = ExactIndex(Array(keys), fused=True, keys="int8").search(queries, 10)
    truth = by_numpy(queries, keys.numpy(), "l2")
    near = truth.gather(1, found.ids) <= truth.topk(10, largest=False).values[:, -1:]
    assert near.double().mean() > 0.8


def test_a_rotation_keeps_distances():
    turn = searches.ByteKeys(1, 37, metric="l2", device=torch.device("cpu"), sample=torch.ones(1, 37))._rotation
    np.testing.assert_allclose(turn.double() @ turn.double().T, np.eye(37), atol=1e-6)


def test_an_unknown_kind_of_keys_is_refused():
    with pytest.raises(ParameterError, match=r"Unknown .*'int4': use float16 or int8"):
        ExactIndex(Array(torch.ones(2, 2)), keys="int4")


# ------------------------------------------------------------------------------------------------- where keys are


@pytest.mark.parametrize("metric", METRICS)
def test_keys_that_do_not_fit_are_streamed_and_answer_the_same(metric):
    keys, queries = searches.clusters(seeded(21), 2500, 24, 3)
    with at_least(2):
        index = check(keys, queries, 9, metric, room=10_000)
        few = check(keys[:1030], queries, 1030, metric, room=10_000)  # k above the rows of the second chunk
        resident = check(keys, queries, 9, metric, room=1 << 30)
    assert isinstance(index.finder, StreamedSearch)
    assert isinstance(few.finder, StreamedSearch)
    assert isinstance(resident.finder, FusedSearch)
    assert index.finder.chunk == 1024
    one, other = index.search(queries, 9), resident.search(queries, 9)
    torch.testing.assert_close(one.distances, other.distances, rtol=1e-6, atol=0)
    again = index.search(queries, 9)
    assert torch.equal(one.ids, again.ids)


def stored(store):
    """All keys of a store, in its own words."""
    return torch.cat([block for _, block in store.chunks(100)])


def queries_near(store, count=3):
    return stored(store)[:: store.key_count // count][:count] + 0.01 * torch.randn(
        count, store.width, generator=seeded(0)
    )


def test_keys_are_read_as_they_are_stored_across_segments(store):
    assert len(store.segments) > 1
    border = store.segments[1].first_row
    everything = stored(store).half()
    assert store.keys.half
    for first, count in ((0, 1), (0, store.key_count), (border - 2, 4), (border, 3), (store.key_count - 1, 1)):
        out = torch.full((count, store.width), torch.nan, dtype=torch.float16)
        store.keys.read(first, out)
        assert torch.equal(out, everything[first : first + count])


def test_a_store_is_searched_where_it_lies(store, monkeypatch):
    monkeypatch.setattr(loading, "_CHUNK", 300)  # several reads, across the borders of segments
    queries = queries_near(store)
    truth = by_numpy(queries, stored(store).numpy(), "l2")
    slack = searches.allowed(queries, stored(store), truth, "l2")
    for room in (None, 10_000):
        index = ExactIndex(store.keys, fused=True, room=room)
        assert isinstance(index.finder, FusedSearch if room is None else StreamedSearch)
        with searches.poisoned():
            searches.check_answer(index.search(queries, 6), truth, 6, slack)


def test_keys_that_a_build_left_on_the_device_are_used(store, monkeypatch):
    monkeypatch.setattr(loading, "_CHUNK", 64)
    opened = Datastore.open(store.path)
    everything = stored(store).half()
    opened.resident_keys = list(everything.split(190))
    monkeypatch.setattr(opened, "read_documents", None)  # files are not looked at
    queries = queries_near(store)
    truth = by_numpy(queries, everything.numpy(), "l2")
    slack = searches.allowed(queries, everything, truth, "l2")
    found = ExactIndex(opened.keys, fused=True).search(queries, 6)
    searches.check_answer(found, truth, 6, slack)
    assert opened.resident_keys is not None
    opened.close()


def test_keys_that_do_not_fit_twice_are_let_go_and_read_from_their_files(store):
    opened = Datastore.open(store.path)
    wrong = torch.full_like(stored(store).half(), 7)
    opened.resident_keys = [wrong]
    queries = queries_near(store)
    index = ExactIndex(opened.keys, fused=True, room=10_000)
    assert isinstance(index.finder, StreamedSearch)
    assert opened.resident_keys is None
    truth = by_numpy(queries, stored(store).numpy(), "l2")
    slack = searches.allowed(queries, stored(store), truth, "l2")
    searches.check_answer(index.search(queries, 6), truth, 6, slack)
    opened.close()


def test_keys_that_no_memory_holds_are_read_as_they_are_needed(store, monkeypatch):
    monkeypatch.setattr(loading, "_host_memory", lambda: 10_000)
    assert isinstance(ExactIndex(store.keys, fused=True, room=10_000).finder, BlockedSearch)


def test_what_fits_on_a_device_is_known_before(lm, store, tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    assert loading.fits_on(store.keys, cpu, "float16")
    single = build(documents(3), tmp_path / "single", lm=lm, keys="float32")
    assert not loading.fits_on(single.keys, cpu, "float16")
    needed = {keys: loading._needed(store.keys, keys) for keys in ("float16", "int8")}
    assert needed["int8"] < needed["float16"]
    assert store.rows * store.width * 2 < needed["float16"]
    monkeypatch.setattr(loading, "_free", lambda _: needed["float16"] - 1)
    assert not loading.fits_on(store.keys, cpu, "float16")
    assert loading.fits_on(store.keys, cpu, "int8")


@pytest.mark.parametrize("fitting", [True, False])
def test_an_index_is_passed_over_only_where_all_keys_fit(lm, tmp_path, monkeypatch, fitting):
    made = build(documents(12), tmp_path / "memory", lm=lm)
    build_index(made, "Flat")
    monkeypatch.setattr(indexing, "fast", lambda _: True)
    monkeypatch.setattr(indexing, "fits", lambda *_: fitting)
    opened = open_index(Datastore.open(made.path))
    assert isinstance(opened, ExactIndex if fitting else Reranked)
    assert not isinstance(open_index(Datastore.open(made.path), rerank=False), ExactIndex)


@pytest.mark.parametrize("cut", [1, 128, 5000])
def test_a_file_that_is_cut_short_while_it_is_open_is_noticed(store, tmp_path, cut):
    shutil.copytree(store.path, tmp_path / "memory")
    opened = Datastore.open(tmp_path / "memory")
    file = tmp_path / "memory" / "segments" / "000001" / "keys.npy"
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(DatastoreCorrupt, match=r"000001/keys\.npy"):
        ExactIndex(opened.keys, fused=True)
    with pytest.raises(DatastoreCorrupt, match=r"000001/keys\.npy"):
        list(opened.chunks(100))
    opened.close()


def test_keys_that_float16_cannot_hold_are_searched_plainly(lm, store, tmp_path):
    floats = build(documents(3), tmp_path / "floats", lm=lm, keys="float32")
    scaled = Datastore.open(store.path)
    scaled._segments[1] = dataclasses.replace(scaled._segments[1], scale=2.0)
    for opened in (floats, scaled):
        assert not opened.keys.half
        queries = queries_near(opened)
        index = ExactIndex(opened.keys, fused=True)
        assert isinstance(index.finder, BlockedSearch)
        truth = by_numpy(queries, stored(opened).numpy(), "l2")
        slack = 1e-5 * truth.amax(1, keepdim=True)
        searches.check_answer(index.search(queries, 5), truth, 5, slack)
    scaled.close()
    index = ExactIndex(Array(torch.full((4, 3), 1.0001)), fused=True)
    assert isinstance(index.finder, BlockedSearch)


@pytest.mark.parametrize("keys", ["float16", "int8"])
@pytest.mark.parametrize("room", [None, 10_000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_keys_are_an_error_not_a_silence(keys, room, value):
    data = torch.ones(2000, 4)
    data[1500, 2] = value
    with pytest.raises(IndexInvalid, match="no finite numbers"):
        ExactIndex(Array(data), fused=True, keys=keys, room=room).search(torch.ones(1, 4), 3)


def test_damaged_keys_in_a_store_are_an_error(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "memory")
    opened = Datastore.open(tmp_path / "memory", check=False)  # checksums would tell before
    with (tmp_path / "memory" / "segments" / "000001" / "keys.npy").open("r+b") as file:
        file.seek(-6, os.SEEK_END)
        file.write(np.float16(np.nan).tobytes())
    for keys in ("float16", "int8"):
        with pytest.raises(IndexInvalid, match="no finite numbers"):
            ExactIndex(opened.keys, fused=True, keys=keys)
    opened.close()


# ---------------------------------------------------------------------------------------------- without a GPU


def test_a_cpu_searches_with_torch_unless_asked_otherwise():
    assert isinstance(ExactIndex(Array(torch.ones(3, 2))).finder, BlockedSearch)
    assert isinstance(ExactIndex(Array(torch.ones(3, 2)), fused=True).finder, FusedSearch)
    assert isinstance(ExactIndex(Array(torch.ones(0, 2)), fused=True).finder, BlockedSearch)


def test_without_triton_and_without_its_interpreter_torch_does_the_work(monkeypatch):
    asked = []
    monkeypatch.setattr(exact_module, "find_spec", asked.append)

    class Gpu(ExactIndex):
        """Thinks that it is on a GPU, as far as choosing goes."""

        def _choose(self, keys, fused, room):
            self._device = torch.device("cuda")
            monkeypatch.setattr(exact_module, "BlockedSearch", lambda *_, **options: ("plain", options["device"].type))
            return super()._choose(keys, fused, room)

    assert Gpu(Array(torch.ones(3, 2))).finder == ("plain", "cuda")
    assert asked == ["triton"]
    with pytest.raises(ParameterError, match="need Triton"):
        ExactIndex(Array(torch.ones(3, 2)), fused=True)
    monkeypatch.undo()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert isinstance(ExactIndex(Array(torch.ones(3, 2)), fused=True).finder, BlockedSearch)


def test_importing_the_index_needs_neither_faiss_nor_triton():
    code = "import sys, knnlm.index, knnlm.index.exact; sys.exit(any(n in sys.modules for n in ('faiss', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
