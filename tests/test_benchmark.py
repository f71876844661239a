"""Figures of knnlm bench: both sides of each ratio, on keys like those of the store."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from knnlm.benchmark import Size, SyntheticVectors, bench
from knnlm.cli.app import run
from knnlm.corpus import Document
from knnlm.datastore.store import Datastore
from knnlm.index import base, factory
from knnlm.index.factory import default_spec
from knnlm.ingest.build import build

TINY = Size(characters=2000, keys=2000, queries=8, generated=2, repeats=1)


def check(found):
    assert set(found) >= {"machine", "build", "evaluation", "generation", "search"}
    built = found["build"]
    assert built["ratio_to_forward_without_head"] == pytest.approx(
        built["tokens_per_second"] / built["without_head_tokens_per_second"]
    )
    for name in ("evaluation", "generation"):
        own = found[name]
        assert own["ratio_to_model"] == pytest.approx(own["ms_per_token"] / own["model_ms_per_token"])
    searched = found["search"]
    ratio = searched["exact_ms_per_query"] / searched["ms_per_query"]
    assert searched["ratio_exact_to_index"] == pytest.approx(ratio)
    assert 0 < searched["recall"] <= 1


def test_ratios_match_their_two_sides(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "MAX_EXACT", 1000)
    monkeypatch.setattr(base, "_MIN_SAMPLE", 1000)
    found = bench(lm, tmp_path / "docs.store", size=TINY)
    check(found)
    assert found["search"]["index"] == default_spec(TINY.keys) != "exact"
    store = Datastore.open(tmp_path / "docs.store")
    assert found["build"]["tokens"] == store.entry_count
    assert found["build"]["bytes_per_token"] == pytest.approx(store.bytes / store.entry_count)


def test_synthetic_keys_have_the_mean_and_the_spectrum_of_stored_ones(lm, tmp_path):
    text = " ".join(f"word{number % 97} is {number * number % 89}" for number in range(400))
    store = build([Document("0", "made", text)], tmp_path / "docs.store", lm=lm)
    real = store.take(torch.arange(store.key_count)).numpy()
    made = SyntheticVectors(store, 20_000, seed=0)
    keys = torch.cat([block for _, block in made.chunks(1000)]).numpy()
    scale = real.std()
    np.testing.assert_allclose(keys.mean(0), real.mean(0), atol=0.1 * scale)
    # A key and half of the difference of two others: variances add to one and a half times.
    np.testing.assert_allclose(keys.var(0), 1.5 * real.var(0), rtol=0.15)
    np.testing.assert_array_equal(made.take(torch.tensor([[5, -1]])).numpy()[0], [keys[5], np.zeros(made.width)])


def test_command_prints_the_same_as_json(model_folder, monkeypatch, capfd):
    monkeypatch.setattr("knnlm.benchmark.QUICK", TINY)
    monkeypatch.setattr(factory, "MAX_EXACT", 1000)
    monkeypatch.setattr(base, "_MIN_SAMPLE", 1000)
    assert run(["bench", "--quick", "--model", str(model_folder), "--json"]) == 0
    check(json.loads(capfd.readouterr().out))
    assert run(["bench", "--quick", "--model", str(model_folder)]) == 0
    shown = capfd.readouterr().out
    assert "tokens/s" in shown
    assert "ms/query" in shown
