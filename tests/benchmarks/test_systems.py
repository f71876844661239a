"""The systems that benchmarks compare: mixtures fitted to one trace are those that `tune` chooses."""

from __future__ import annotations

import pytest
import torch

import systems
from helpers.corpora import corpus_folder
from helpers.models import tiny, tiny_tokenizer
from knnlm.evaluation.evaluate import first_documents
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from perplexity import split


@pytest.fixture
def long_lm(tmp_path):
    """A tiny model without a maximal length; its tokenizer makes many tokens of a sentence."""
    tiny("bloom").save_pretrained(tmp_path / "bloom")
    tiny_tokenizer().save_pretrained(tmp_path / "bloom")
    return CausalLM.open(str(tmp_path / "bloom"), device="cpu")


def same_tensors(one, other):
    named, expected = one.gate.state()[0], other.gate.state()[0]
    return named.keys() == expected.keys() and all(torch.equal(named[name], expected[name]) for name in named)


def test_mixtures_of_one_trace_are_those_of_three_tunings(long_lm, tmp_path):
    corpus = corpus_folder(tmp_path / "notes", documents=6)
    store, found = systems.build_mixtures(corpus, tmp_path / "store", long_lm, store_tokens=None, limit=600)
    assert list(found) == list(systems.MIXTURES)
    valid = list(first_documents(split(corpus, "valid"), long_lm, 600))

    one = Mixture.open(store, long_lm, memories="knn", use_tuned=False)
    one.tune(valid, weights="fixed", online=False)
    assert found["one λ"].memories[0].settings == one.memories[0].settings
    assert found["one λ"].weights == one.weights
    assert found["one λ"].online is None

    gate = Mixture.open(store, long_lm, memories=systems.MEMORIES, use_tuned=False)
    gate.tune(valid, online=False)
    assert [getattr(memory, "settings", ()) for memory in found["gate"].memories] == [
        getattr(memory, "settings", ()) for memory in gate.memories
    ]
    assert same_tensors(found["gate"].weights, gate.weights)
    assert found["gate"].online is None

    default = Mixture.open(store, long_lm, memories=systems.MEMORIES, use_tuned=False)
    default.tune(valid)
    assert found["default"].weights.uses_evidence
    assert default.weights.uses_evidence
    assert found["default"].weights.gate.feature_names == default.weights.gate.feature_names
    # The mixtures do not share the settings of their memories.
    found["gate"].memories[0].settings = ()
    assert found["default"].memories[0].settings
    store.close()


def test_only_the_wanted_systems_are_fitted(long_lm, tmp_path, monkeypatch):
    corpus = corpus_folder(tmp_path / "notes", documents=6)
    monkeypatch.setattr(systems, "sample_documents", lambda *_: pytest.fail("nothing is sampled for one λ"))
    store, found = systems.build_mixtures(
        corpus, tmp_path / "store", long_lm, store_tokens=None, limit=600, names=["one λ"]
    )
    assert list(found) == ["one λ"]
    store.close()
