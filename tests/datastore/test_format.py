"""The format as the page describes it: memories read without our code, and old ones that must open for ever."""

from __future__ import annotations

import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.damage import change, tree
from helpers.format import GOLDEN, check_against_ours
from helpers.stores import documents as given_documents
from helpers.stores import random_store
from knnlm.datastore.indexes import open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.rewrite import derive, principal_components
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError
from knnlm.ingest.add import add
from knnlm.ingest.build import build
from knnlm.maintenance.verify import verify


def test_a_memory_is_read_the_same_without_our_code(store):
    check_against_ours(store.path)


@pytest.mark.parametrize("way", ["int8", "pca12-int8", "codes8"])
def test_a_coded_memory_that_lives_is_read_the_same_without_our_code(way, lm, tmp_path):
    build(given_documents(6), tmp_path / "m", lm=lm, segment_rows=150, keys=way).close()
    check_against_ours(tmp_path / "m")
    add(given_documents(1, start=8), tmp_path / "m", lm=lm)
    remove(tmp_path / "m", document="d2")
    check_against_ours(tmp_path / "m")


@settings(max_examples=10)
@given(
    seed=st.integers(0, 99), dtype=st.sampled_from(["float16", "float32"]), offset=st.booleans(), mapped=st.booleans(),
    share=st.floats(0.05, 1),
)  # fmt: skip
def test_any_derived_memory_is_read_the_same_without_our_code(seed, dtype, offset, mapped, share, tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    generator = np.random.default_rng(seed)
    given_offset = generator.normal(size=6) if offset else None
    with closing(random_store(folder / "m", rows=60, seed=seed, dtype=dtype, offset=given_offset)) as made:
        keep = torch.from_numpy(generator.random(60) < share)
        options = {"key_map": principal_components(made, 3)} if mapped else {}
        derive(made, folder / "d", keep=keep, counts=torch.full((60,), 1.5), **options).close()
    check_against_ours(folder / "m")
    check_against_ours(folder / "d")


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_the_golden_memories_are_read_without_our_code(version, tmp_path):
    shutil.copytree(GOLDEN / f"v{version}", tmp_path / "memory")
    check_against_ours(tmp_path / "memory")


TOKENS = [285, 271, 288, 290, 90, 268, 71, 259, 271, 291, 77, 298, 259, 299, 84, 85, 77, 74, 84, 85, 284, 84, 13, 222,
          70, 286, 73, 296, 78, 288, 67, 70, 83, 84, 260, 289, 70, 79, 266, 66, 78, 70, 275, 15, 263, 296, 66, 69, 84,
          292, 266, 66, 78, 70, 222, 56, 258, 79, 296, 66, 69, 84, 284, 13, 273, 290, 297, 85, 282, 222, 87, 80, 265,
          15, 268, 264, 84]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "fingerprint", "keys", "l2", "distances", "ip", "products"),
    [
        (1, "e199bf4775e16a90", 77, [18, 64, 36, 28, 32], [30.1754, 34.0273, 36.0374, 36.3169, 37.8459],
         [18, 36, 25], [-9.50474, -5.55655, -4.40222]),
        (2, "530e711c97b83f98", 26, [54, 21, 60, 75, 27], [2.13053, 2.26433, 4.26811, 5.80905, 7.20991],
         [66, 51, 75], [-5.39518, -5.03292, -3.96407]),
        (3, "45360fa6e2bfceea", 77, [18, 64, 36, 28, 32], [30.1754, 34.0273, 36.0374, 36.3169, 37.8459],
         [18, 36, 25], [-9.50474, -5.55655, -4.40222]),
        (4, "3e680dc66132b14e", 77, [18, 64, 36, 28, 32], [30.2011, 31.3737, 36.1061, 36.3424, 37.7992],
         [18, 36, 25], [-9.48119, -5.53128, -4.38892]),
        (5, "45360fa6e2bfceea", 77, [18, 64, 36, 28, 32], [30.1754, 34.0273, 36.0374, 36.3169, 37.8459],
         [18, 36, 25], [-9.50474, -5.55655, -4.40222]),
    ],
)  # fmt: skip
def test_a_golden_memory_opens_and_answers_as_on_the_day_it_was_made(
    version, fingerprint, keys, l2, distances, ip, products, tmp_path
):
    """Never change these figures, and never make these memories again: they stand for those that people have."""
    path = tmp_path / "memory"
    shutil.copytree(GOLDEN / f"v{version}", path)
    before = tree(path)
    found = verify(path, deep=True)
    assert (found.problems, found.format, found.documents, found.tokens) == ((), version, 3, 77)
    with closing(Datastore.open(path)) as store:
        assert (store.fingerprint, store.key_count) == (fingerprint, keys)
        assert store.values(torch.arange(77)).tolist() == TOKENS
        query = torch.linspace(-1, 1, store.width)[None]
        near = open_index(store).search(query, 5)
        assert store.rows_of(near.ids)[0].tolist() == l2
        assert near.distances[0].tolist() == pytest.approx(distances, rel=1e-4)
        product = open_index(store, metric="ip").search(query, 3)
        assert store.rows_of(product.ids)[0].tolist() == ip
        assert product.distances[0].tolist() == pytest.approx(products, rel=1e-4)
        assert [store.document_at(row).id for row in (0, 16, 76)] == ["d0", "d1", "d2"]
        assert (store.counts(near.ids) is None) == (version != 2)
    assert before.items() <= tree(path).items()  # there may be more, such as locks


def test_a_newer_version_says_that_knnlm_must_be_upgraded(tmp_path):
    shutil.copytree(GOLDEN / "v1", tmp_path / "m")
    change(tmp_path / "m", "UPDATE meta SET value = '6' WHERE key = 'format'")
    with pytest.raises(DatastoreError, match=r"format version 6.*Upgrade knnlm"):
        Datastore.open(tmp_path / "m")
    change(tmp_path / "m", "UPDATE meta SET value = '0' WHERE key = 'format'")
    with pytest.raises(DatastoreError, match=r"format version 0.*Build the memory again"):
        Datastore.open(tmp_path / "m")
