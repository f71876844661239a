"""The format as docs/reference/format.md specifies it, read without our code, and the golden store."""

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
from knnlm.ingest.build import add, build
from knnlm.maintenance.verify import verify


def test_store_is_readable_without_the_library(store):
    check_against_ours(store.path)


@pytest.mark.parametrize("way", ["int8", "pca12-int8", "codes8"])
def test_changed_store_with_codes_is_readable_without_the_library(way, lm, tmp_path):
    build(given_documents(6), tmp_path / "m", lm=lm, segment_entries=150, key_format=way).close()
    check_against_ours(tmp_path / "m")
    add(given_documents(1, start=8), tmp_path / "m", lm=lm)
    remove(tmp_path / "m", document="d2")
    check_against_ours(tmp_path / "m")


@settings(max_examples=10)
@given(
    seed=st.integers(0, 99), dtype=st.sampled_from(["float16", "float32"]), offset=st.booleans(), mapped=st.booleans(),
    share=st.floats(0.05, 1),
)  # fmt: skip
def test_derived_store_is_readable_without_the_library(seed, dtype, offset, mapped, share, tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    generator = np.random.default_rng(seed)
    given_offset = generator.normal(size=6) if offset else None
    with closing(random_store(folder / "m", rows=60, seed=seed, dtype=dtype, offset=given_offset)) as made:
        keep = torch.from_numpy(generator.random(60) < share)
        options = {"key_map": principal_components(made, 3)} if mapped else {}
        derive(made, folder / "d", keep=keep, counts=torch.full((60,), 1.5), **options).close()
    check_against_ours(folder / "m")
    check_against_ours(folder / "d")


def test_golden_store_is_readable_without_the_library(tmp_path):
    shutil.copytree(GOLDEN / "v1", tmp_path / "store")
    check_against_ours(tmp_path / "store")


TOKENS = [285, 271, 288, 290, 90, 268, 71, 259, 271, 291, 77, 298, 259, 299, 84, 85, 77, 74, 84, 85, 284, 84, 13, 222,
          70, 286, 73, 296, 78, 288, 67, 70, 83, 84, 260, 289, 70, 79, 266, 66, 78, 70, 275, 15, 263, 296, 66, 69, 84,
          292, 266, 66, 78, 70, 222, 56, 258, 79, 296, 66, 69, 84, 284, 13, 273, 290, 297, 85, 282, 222, 87, 80, 265,
          15, 268, 264, 84]  # fmt: skip


def test_golden_store_opens_with_the_recorded_results(tmp_path):
    path = tmp_path / "store"
    shutil.copytree(GOLDEN / "v1", path)
    before = tree(path)
    found = verify(path, deep=True)
    assert (found.problems, found.format, found.documents, found.tokens) == ((), 1, 3, 77)
    with closing(Datastore.open(path)) as store:
        assert (store.fingerprint, store.key_count) == ("5a2026d323645f5d", 45)
        assert store.values(torch.arange(77)).tolist() == TOKENS
        query = torch.linspace(-1, 1, store.width)[None]
        near = open_index(store).search(query, 5)
        assert store.entries_of(near.ids)[0].tolist() == [72, 57, 59, 54, 61]
        assert near.distances[0].tolist() == pytest.approx([3.28237, 6.61775, 7.88506, 8.24069, 8.76383], rel=1e-4)
        product = open_index(store, metric="ip").search(query, 3)
        assert store.entries_of(product.ids)[0].tolist() == [50, 0, 16]  # 0, 16 and 49 are equally near
        assert product.distances[0].tolist() == pytest.approx([-4.79085, -4.68865, -4.68865], rel=1e-4)
        assert [store.document_at(row).id for row in (0, 16, 76)] == ["d0", "d1", "d2"]
        assert store.counts(near.ids) is not None
        assert [dict(document.fields) for document in store.documents()] == [
            {"year": 2024, "customer": "acme"}, {}, {},
        ]  # fmt: skip
    assert before.items() <= tree(path).items()  # there may be more, such as locks


def test_other_format_version_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "v1", tmp_path / "m")
    change(tmp_path / "m", "UPDATE meta SET value = '2' WHERE key = 'format'")
    with pytest.raises(DatastoreError, match=r"format version 2.*Upgrade knnlm"):
        Datastore.open(tmp_path / "m")
    change(tmp_path / "m", "UPDATE meta SET value = '0' WHERE key = 'format'")
    with pytest.raises(DatastoreError, match=r"format version 0.*Build the store again"):
        Datastore.open(tmp_path / "m")
