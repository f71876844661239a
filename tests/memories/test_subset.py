"""Subset search: the neighbours are those of brute force over the pairs with the nearest sources."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.pairs import pair_lm, pairs
from knnlm.datastore.store import Datastore
from knnlm.errors import IndexInvalid, ModelError, ParameterError
from knnlm.index.bm25 import BM25
from knnlm.index.exact import ExactIndex
from knnlm.ingest.build import build
from knnlm.memories import subset as subset_module
from knnlm.memories.subset import PairSubsetIndex
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.training.prune import prune

STORED = pairs(30)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="module")
def lm():
    return pair_lm("marian")


@pytest.fixture(scope="module")
def store(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("subset") / "pairs.store"
    return build(STORED, path, lm=lm, segment_entries=40, key_format="float32")


def open_subset(store, lm, sentences, **settings):
    special = lm.tokenizer.all_special_ids
    return PairSubsetIndex(store, sentences, encode=lm.encode_sources, special_tokens=special, **settings)


def sources_of(lm, documents):
    return [tuple(source) for source in lm.encode_sources([each.source_text for each in documents])]


def chosen_keys(store, lm, source, sentences):
    """The keys of the nearest documents, by BM25 over the documents that the store lists."""
    special = set(lm.tokenizer.all_special_ids)
    documents = list(store.documents())
    words = [[token for token in tokens if token not in special] for tokens in sources_of(lm, documents)]
    entries = store.entries_of(torch.arange(store.key_count)).tolist()
    chosen = set()
    for number in BM25(words).nearest([token for token in source if token not in special], sentences):
        document = documents[number]
        chosen |= set(range(document.first_entry, document.first_entry + document.entries))
    return [key for key, entry in enumerate(entries) if entry in chosen]


def check_neighbours(store, lm, index, queries, sources, k, *, metric="l2"):
    """Compare with distances to every chosen key; equal distances may come in any order."""
    found = index.search(queries, k, sources)
    assert found.ids.shape == found.distances.shape == (len(queries), k)
    for row, source in enumerate(sources):
        ids = chosen_keys(store, lm, source, index.sentences)
        keys = store.take(torch.tensor(ids)).double().numpy()
        query = queries[row].double().cpu().numpy()
        every = ((keys - query) ** 2).sum(1) if metric == "l2" else -(keys @ query)
        by_id = dict(zip(ids, every, strict=True))
        expected = np.sort(every)[:k]
        own = found.ids[row].tolist()
        assert own[len(expected) :] == [-1] * (k - len(expected))
        assert found.distances[row, len(expected) :].isinf().all()
        assert len(set(own[: len(expected)])) == len(expected)
        np.testing.assert_allclose(found.distances[row, : len(expected)].cpu(), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose([by_id[each] for each in own[: len(expected)]], expected, rtol=1e-4, atol=1e-4)


def some_queries(store, count, seed=0):
    torch.manual_seed(seed)
    near = store.take(torch.randint(store.key_count, (count,)))
    return near + 0.3 * torch.randn_like(near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("sentences", [1, 4, 29])
def test_neighbours_are_those_of_brute_force_over_the_nearest_pairs(store, lm, sentences, metric, device):
    index = open_subset(store, lm, sentences, metric=metric, device=device)
    sources = sources_of(lm, pairs(4, start=60)) * 3  # rows of a source need not be side by side
    queries = some_queries(store, len(sources)).to(device)
    for k in (1, 5, 40):
        check_neighbours(store, lm, index, queries, sources, k, metric=metric)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_all_pairs_are_the_whole_store(store, lm, metric):
    index = open_subset(store, lm, len(STORED), metric=metric)
    queries = some_queries(store, 12)
    expected = ExactIndex(store.keys, metric=metric).search(queries, 9)
    for sources in (None, sources_of(lm, pairs(12, start=50))):
        found = index.search(queries, 9, sources)
        assert found.ids.equal(expected.ids)
        assert found.distances.equal(expected.distances)


def test_gathered_subset_of_all_pairs_gives_the_distances_of_the_exact_search(store, lm, monkeypatch):
    index = open_subset(store, lm, len(STORED) - 1)
    monkeypatch.setattr(index, "documents", lambda _: np.arange(len(STORED)))
    queries = some_queries(store, 12)
    expected = ExactIndex(store.keys).search(queries, 9)
    found = index.search(queries, 9, sources_of(lm, pairs(12, start=50)))
    assert found.ids.equal(expected.ids)
    torch.testing.assert_close(found.distances, expected.distances)


def test_small_blocks_and_a_small_cache_give_the_same_neighbours(store, lm, monkeypatch):
    sources = sources_of(lm, pairs(6, start=60)) * 4
    queries = some_queries(store, len(sources))
    plain = open_subset(store, lm, 5)
    expected = plain.search(queries, 7, sources)
    assert plain._kept_bytes == sum(each.bytes for each in plain._kept.values()) > 0
    for distances, kept in ((1, 1 << 31), (50, 5000), (1 << 24, 0)):
        monkeypatch.setattr(subset_module, "_MAX_DISTANCES", distances)
        monkeypatch.setattr(subset_module, "_MAX_KEPT", kept)
        index = open_subset(store, lm, 5)
        for _ in range(2):
            found = index.search(queries, 7, sources)
            assert found.ids.equal(expected.ids)
            torch.testing.assert_close(found.distances, expected.distances)
        assert index._kept_bytes == sum(each.bytes for each in index._kept.values())
        assert len(index._kept) <= 1 or index._kept_bytes <= kept


def test_keys_of_a_source_are_gathered_once(store, lm, monkeypatch):
    index = open_subset(store, lm, 5)
    gathered = []
    plain = index._gather
    monkeypatch.setattr(index, "_gather", lambda source: gathered.append(source) or plain(source))
    sources = sources_of(lm, pairs(3, start=60))
    for step in range(4):
        index.search(some_queries(store, 6, seed=step), 3, [source for source in sources for _ in range(2)])
    assert gathered == sources


def test_removed_and_added_pairs_disappear_and_appear(lm, tmp_path):
    build(STORED[:20], tmp_path / "s", lm=lm, segment_entries=30, key_format="float32")
    with closing(Datastore.open(tmp_path / "s")) as store:
        store.remove(document=STORED[3].id)
        store.remove(document=STORED[11].id)
        store.add(STORED[20:], lm=lm)
    store = Datastore.open(tmp_path / "s")
    queries = some_queries(store, 8)
    sources = sources_of(lm, [STORED[3], STORED[11], STORED[25], *pairs(5, start=60)])
    for sentences in (1, 6, 27):
        check_neighbours(store, lm, open_subset(store, lm, sentences), queries, sources, 6)
    documents = list(store.documents())
    nearest = open_subset(store, lm, 1).documents(sources[2])
    assert [documents[number].id for number in nearest] == [STORED[25].id]


def test_reopened_mixture_tokenises_only_added_sources(lm, tmp_path, monkeypatch):
    path = tmp_path / "s"
    build(STORED[:20], path, lm=lm, segment_entries=30).close()
    options = {"k": 3, "knn_temperature": 4.0, "lmbda": 0.5, "options": MixtureOptions(subset=4)}
    mixture = Mixture.open(path, lm, **options)
    source = sources_of(lm, [STORED[25]])[0]
    encoded, plain = [], lm.encode_sources
    with monkeypatch.context() as patch:
        patch.setattr(lm, "encode_sources", lambda texts: encoded.extend(texts) or plain(texts))
        with closing(Datastore.open(path)) as store:
            store.add(STORED[20:26], lm=lm)
            encoded.clear()
            mixture = mixture.reopen()
            assert encoded == [each.source_text for each in STORED[20:26]]
            store.remove(document=STORED[3].id)
            store.remove(document=STORED[25].id)
            store.compact()
            encoded.clear()
            mixture = mixture.reopen()
            assert encoded == []
            store.add([replace(STORED[29], id="last")], lm=lm)  # may get the number of the one that was removed
            encoded.clear()
            mixture = mixture.reopen()
            assert encoded == [STORED[29].source_text]
    fresh = Mixture.open(path, lm, **options)
    found, right = (each.knn.index for each in (mixture, fresh))
    for each in (source, *sources_of(lm, STORED)):
        assert found.documents(each).tolist() == right.documents(each).tolist()
    queries = some_queries(fresh.store, 6)
    assert found.search(queries, 3, [source] * 6).ids.equal(right.search(queries, 3, [source] * 6).ids)


def test_pruned_store_is_searched_by_its_keys(lm, store, tmp_path):
    log_p = torch.arange(store.key_count).remainder(3).gt(0).float().mul(-9.0)  # every third token is known
    prune(store, tmp_path / "pruned", drop_known=0.5, log_p=log_p)
    pruned = Datastore.open(tmp_path / "pruned")
    assert pruned.key_count < pruned.entry_count
    queries, sources = some_queries(pruned, 8), sources_of(lm, pairs(8, start=60))
    check_neighbours(pruned, lm, open_subset(pruned, lm, 6), queries, sources, 5)


def test_groups_of_far_keys_are_searched_precisely(lm, store, monkeypatch):
    index = open_subset(store, lm, 6)
    plain = store.take
    far = torch.zeros(store.width)
    far[0] = 30_000.0
    monkeypatch.setattr(store, "take", lambda ids: plain(ids) + far * (ids % 2 == 0)[:, None])
    sources = sources_of(lm, pairs(4, start=60))
    queries = torch.cat([plain(torch.arange(2)) + far + 0.1, plain(torch.arange(2)) + 0.1])
    check_neighbours(store, lm, index, queries, sources, 4)


def test_errors_are_sentences(store, lm, monkeypatch):
    with pytest.raises(ParameterError, match="subset must be at least 1 sentence, not 0"):
        open_subset(store, lm, 0)
    index = open_subset(store, lm, 3)
    with pytest.raises(ModelError, match="needs the sources: give their tokens as input_ids"):
        index.search(some_queries(store, 2), 3)
    plain = store.take
    monkeypatch.setattr(store, "take", lambda ids: plain(ids) * torch.inf)
    with pytest.raises(IndexInvalid, match="not finite"):
        index.search(torch.zeros(1, store.width), 3, [(5,)])
