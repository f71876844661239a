"""The ladder behind auto: which index for how many keys, and how it is trained."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch

from knnlm.index import FaissIndex, Reranked, auto_spec, check_index, ladder
from test_index import Array


class Whole(Array):
    """Vectors in large blocks, which remember how many were asked for at a time."""

    def __init__(self, data):
        super().__init__(data)
        self.taken = []

    def chunks(self, size):
        for first in range(0, self.rows, size):
            yield first, self.data[first : first + size]

    def take(self, ids):
        self.taken.append(ids.numel())
        return super().take(ids)


def clustered(rows, width, *, seed=0):
    """Keys in clusters whose dimensions matter less and less, as those of a language model do."""
    generator = np.random.default_rng(seed)
    spread = np.arange(1, width + 1) ** -0.5
    centres = generator.normal(size=(200, width)) * 3 * spread
    return (centres[generator.integers(0, 200, rows)] + generator.normal(size=(rows, width)) * spread).astype("float32")


def lists_of(spec):
    return next(int(part.removeprefix("IVF")) for part in spec.split(",") if part.startswith("IVF"))


def test_auto_is_exact_while_that_is_cheap_and_grows_its_lists_with_the_root_of_the_store():
    assert auto_spec(ladder.EXACT, 576) == "exact"
    sizes = []
    for rows in (ladder.EXACT + 1, 100_000, 1_000_000, 10_000_000, 100_000_000):
        spec = auto_spec(rows, 576)
        assert spec.startswith("PCAR256,")
        assert spec.endswith(",PQ128x4fs")
        sizes.append(lists_of(spec))
        assert 2**0.5 <= sizes[-1] / np.sqrt(rows) <= 2**1.5
    assert sizes == sorted(set(sizes))


def test_the_work_of_a_search_grows_with_the_root_of_the_store():
    def work(rows):
        lists = lists_of(auto_spec(rows, 576))
        return lists + ladder.probes_for(lists) * rows / lists  # centroids and codes that are compared

    slope = np.log(work(10_000_000) / work(100_000)) / np.log(100)
    assert slope <= 0.55


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 30, 64, 255, 256, 257, 576])
def test_faiss_understands_every_rung_at_every_width(width, metric):
    spec = auto_spec(ladder.EXACT + 1, width, metric=metric)
    assert faiss.index_factory(width, spec).d == width
    if metric == "ip":
        assert "PCA" not in spec  # it leaves out a mean, which changes inner products


def test_an_index_is_trained_on_a_sample_that_follows_its_lists(monkeypatch):
    monkeypatch.setattr(ladder, "_SAMPLE", 300)
    for lists, wanted in ((4, 300), (16, 768), (32, 1536), (64, 2000)):
        vectors = Whole(clustered(2000, 8))
        FaissIndex.build(vectors, f"IVF{lists},PQ4x4fs")
        assert vectors.taken == [wanted]


def test_the_number_of_rounds_and_probes_is_that_of_the_ladder():
    index = FaissIndex.build(Whole(clustered(3000, 8)), "IVF64,Flat")._index
    ivf = faiss.downcast_index(faiss.extract_index_ivf(index))
    assert (ivf.cp.niter, ivf.nprobe) == (ladder.ROUNDS, ladder.probes_for(64))


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_what_auto_makes_passes_its_check_and_finds_most_of_the_nearest(monkeypatch, metric):
    monkeypatch.setattr(ladder, "EXACT", 1000)
    keys = clustered(6000, 32)
    vectors = Whole(keys)
    index = FaissIndex.build(vectors, auto_spec(len(keys), 32, metric=metric), metric=metric)
    check_index(index, vectors, what="it")
    queries = keys[::200] + np.random.default_rng(1).normal(size=(30, 32)).astype("float32") * 0.1
    found = Reranked(index, vectors).search(torch.from_numpy(queries), 50).ids.numpy()
    distances = -queries @ keys.T if metric == "ip" else ((queries[:, None] - keys) ** 2).sum(2)
    right = np.argsort(distances, axis=1)[:, :50]
    recall = np.mean([len(set(one) & set(other)) / 50 for one, other in zip(found, right, strict=True)])
    assert recall > 0.9
