"""Saved tuning: what is corrupt is an error that names a command, and that command repairs it."""

from __future__ import annotations

from contextlib import closing

import pytest

from helpers.stores import documents
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.errors import DatastoreCorrupt
from knnlm.ingest.build import build
from knnlm.mixture.mixture import Mixture


@pytest.fixture
def path(lm, tmp_path):
    build(documents(8), tmp_path / "docs.store", lm=lm).close()
    return tmp_path / "docs.store"


def put(path, **values):
    with closing(Catalog.open(path / CATALOG_FILE, write=True)) as catalog:
        catalog.put(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"tunings": [1, 2]},
        {"tunings": {"knn": 5}, "active_tuning": "knn"},
        {"tunings": {"knn": {"memories": [], "weights": {"kind": "magic"}, "metadata": {}}}, "active_tuning": "knn"},
        {"tunings": {"knn": {"memories": [{"kind": "lm"}], "weights": {"kind": "fixed"}}}, "active_tuning": "knn"},
        {"active_tuning": 7},
    ],
)
def test_corrupt_tuning_names_the_command_that_repairs_it(lm, path, values):
    put(path, **values)
    with pytest.raises(DatastoreCorrupt, match="Tune the store again: knnlm tune STORE TEXT"):
        Mixture.open(path, lm)
    # As the command does it.
    Mixture.open(path, lm, memories="knn,cache", use_tuned=False).tune(documents(3, start=50), weights="fixed")
    assert Mixture.open(path, lm).labels == ["knn", "cache"]
    assert Mixture.open(path, lm, memories="knn").labels == ["knn"]


def test_tuning_keeps_the_readable_tunings_of_other_memories(lm, path):
    held_out = documents(3, start=50)
    Mixture.open(path, lm, memories="knn", use_tuned=False).tune(held_out, weights="fixed", knn_temperatures=[1.25])
    Mixture.open(path, lm, memories="cache", use_tuned=False).tune(held_out, weights="fixed")
    assert Mixture.open(path, lm).labels == ["cache"]
    assert Mixture.open(path, lm, memories="knn").knn.knn_temperature == 1.25
