"""The choice behind auto: which index for how many keys, and how it is trained."""

from __future__ import annotations

import re

import faiss
import numpy as np
import pytest
import torch

from helpers.vectors import RecordingArray, clustered
from knnlm.errors import ParameterError
from knnlm.index import base, factory
from knnlm.index.blocks.index import PROBES
from knnlm.index.factory import build_approximate, check_spec, default_spec
from knnlm.index.faiss import FaissIndex, default_probes
from knnlm.index.validation import check_index


def list_count_and_block_size(spec):
    return tuple(int(number) for number in re.fullmatch(r"Lists(\d+),Blocks(\d+)", spec).groups())


SIZES = (factory.MAX_EXACT + 1, 100_000, 1_000_000, 10_000_000, 100_000_000)


def test_auto_is_exact_while_that_is_cheap_and_grows_its_lists_with_the_root_of_the_store():
    assert default_spec(factory.MAX_EXACT) == "exact"
    assert default_spec(1_000_000) == "Lists512,Blocks256"
    lists = []
    for rows in SIZES:
        count, size = list_count_and_block_size(default_spec(rows))
        lists.append(count)
        assert 2**-1.5 <= count / np.sqrt(rows) <= 2**-0.5
        assert size == 256 or rows / (0.9 * size) > 16_000  # larger only where there would be very many
        assert rows / (0.9 * size) <= 32_000
    assert lists == sorted(set(lists))


def test_work_of_a_search_grows_with_the_root_of_the_store():
    def work(rows):
        size = list_count_and_block_size(default_spec(rows))[1]
        return rows / (0.9 * size) + PROBES * size  # centroids and keys that are compared

    slope = np.log(work(10_000_000) / work(100_000)) / np.log(100)
    assert slope <= 0.5


def test_fallback_is_a_faiss_index():
    assert factory.fallback_spec(1_000_000) == "IVF2048,SQfp16"
    assert faiss.index_factory(576, factory.fallback_spec(21_000)).d == 576


def test_index_is_trained_on_a_sample_that_follows_its_lists(monkeypatch):
    monkeypatch.setattr(base, "_MIN_SAMPLE", 300)
    for lists, wanted in ((4, 300), (16, 768), (32, 1536), (64, 2000)):
        vectors = RecordingArray(clustered(2000, 8))
        FaissIndex.build(vectors, f"IVF{lists},PQ4x4fs")
        assert vectors.taken == [wanted]


def test_faiss_uses_the_default_rounds_and_probes():
    index = FaissIndex.build(RecordingArray(clustered(3000, 8)), "IVF64,Flat")._index
    ivf = faiss.downcast_index(faiss.extract_index_ivf(index))
    assert (ivf.cp.niter, ivf.nprobe) == (base.KMEANS_ROUNDS, default_probes(64))


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_auto_index_passes_its_check_and_finds_most_of_the_nearest(monkeypatch, metric):
    monkeypatch.setattr(factory, "MAX_EXACT", 1000)
    keys = clustered(6000, 32)
    vectors = RecordingArray(keys)
    index = build_approximate(vectors, default_spec(len(keys)), metric=metric)
    check_index(index, vectors, what="it")
    queries = keys[::200] + np.random.default_rng(1).normal(size=(30, 32)).astype("float32") * 0.1
    found = index.search(torch.from_numpy(queries), 50).ids.numpy()
    distances = -queries @ keys.T if metric == "ip" else ((queries[:, None] - keys) ** 2).sum(2)
    right = np.argsort(distances, axis=1)[:, :50]
    recall = np.mean([len(set(one) & set(other)) / 50 for one, other in zip(found, right, strict=True)])
    assert recall > 0.9


def test_index_that_cannot_be_built_is_known_from_its_spec():
    for spec in ("auto", "exact", "Lists8,Blocks8", "IVF8,PQ4", "Flat"):
        check_spec(spec, 64)
    for spec, message in (("Foo", "does not understand the index 'Foo'"), ("IVF8,PQ5", "of width 64")):
        with pytest.raises(ParameterError, match=message):
            check_spec(spec, 64, metric="ip")
