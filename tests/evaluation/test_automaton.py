"""Evaluation along an automaton: every document begins by itself, and searches are counted."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.stores import documents
from knnlm.ingest.build import build
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

FOLLOW = AutomatonParams(min_pointers=2)


def opened(path, lm, automaton=FOLLOW, **settings):
    given = {"k": 8, "knn_temperature": 4.0, "lmbda": 0.6} if not settings else {}
    return Mixture.open(path, lm, options=MixtureOptions(automaton=automaton, **settings), **given)


@torch.no_grad()
def text_by_text(mixture, texts):
    """The log-probability of every token, and whether it was searched for: windows of a document, one after another."""
    log_p, searched = [], []
    for text in texts:
        for batch in mixture.read([mixture.lm.encode(text.text)], batch_tokens=1):
            retrieved = mixture.retrieve(batch.context)
            log_p.append(mixture.predict(batch.context, retrieved).log_prob(batch.targets))
            searched.append(retrieved.neighbours[0].followed.searched)
    return torch.cat(log_p).double(), torch.cat(searched)


@pytest.mark.parametrize("memories", ["knn", "knn,cache"])  # with and without logits until the search
def test_evaluation_of_many_texts_together_is_that_of_each_alone(lm, store, memories):
    settings = {"k": 8, "knn_temperature": 4.0, "lmbda": 0.6} if memories == "knn" else {"use_tuned": False}
    options = MixtureOptions(automaton=FOLLOW)
    mixture = Mixture.open(store.path, lm, memories=memories, options=options, **settings)
    texts = documents(9, start=30)  # some of them stored, some new
    log_p, searched = text_by_text(mixture, texts)
    for batch_tokens in (64, 1024):
        result = mixture.evaluate(texts, batch_tokens=batch_tokens)
        assert result.perplexity == pytest.approx(math.exp(-log_p.mean()), rel=1e-4)
        assert result.searched == pytest.approx(float(searched.double().mean()))
        assert result.as_dict()["searched"] == result.searched
    assert 0 < result.searched < 0.9


def test_windows_of_a_document_begin_with_a_search(lm, tmp_path):
    build(documents(20), tmp_path / "store", lm=lm, window=lm.window(24))
    mixture = opened(tmp_path / "store", lm, AutomatonParams(min_pointers=1))
    tokens = lm.encode(documents(20)[6].text)
    begins = 0
    for batch in mixture.read([tokens], batch_tokens=1024):
        searched = mixture.retrieve(batch.context).neighbours[0].followed.searched
        for rows, _ in batch.context.each_span():
            assert searched[rows][0]
            begins += 1
    assert begins > 2


def test_without_an_automaton_all_tokens_are_searched_and_without_a_store_none_is_counted(lm, store):
    assert opened(store.path, lm, None).evaluate(documents(2, start=60)).searched == 1
    without = Mixture.open(store.path, lm, memories="cache", use_tuned=False)
    assert without.evaluate(documents(2, start=60)).searched is None


def test_a_token_is_searched_only_if_neither_gate_nor_automaton_avoids_it(lm, tmp_path):
    path = tmp_path / "store"
    build(documents(20), path, lm=lm)
    Mixture.open(path, lm, memories="knn", use_tuned=False).tune(
        documents(6, start=30), weights="gated", ks=[4, 8], knn_temperatures=[4.0, 16.0], online=False
    )
    texts = documents(6, start=15)
    searched = {}
    for skip in (0.0, 0.4, 1.0):
        for automaton in (None, FOLLOW):
            mixture = opened(path, lm, automaton, skip_fraction=skip)
            masks, found = [], []
            for batch in mixture.read([lm.encode(text.text) for text in texts]):
                retrieved = mixture.retrieve(batch.context)
                every = torch.ones(len(batch.targets), dtype=torch.bool)
                mask = every if retrieved.search_mask is None else retrieved.search_mask
                followed = retrieved.neighbours[0].followed
                own = mask if followed is None else followed.searched
                assert not (own & ~mask).any()
                output = mixture.predict(batch.context, retrieved).outputs[0].neighbours
                assert (output.ids[~mask] == -1).all()
                masks.append(mask)
                found.append(own)
            result = mixture.evaluate(texts)
            assert result.searched == pytest.approx(float(torch.cat(found).double().mean()))
            searched[skip, automaton is not None] = result.searched
    assert searched[0.0, False] == 1
    assert searched[1.0, False] == searched[1.0, True] == 0
    assert searched[0.4, True] < min(searched[0.4, False], searched[0.0, True])


def test_settings_are_tuned_along_an_automaton(lm, tmp_path):
    """The trace has the neighbours that the automaton reaches, so that replaying it is evaluating with it."""
    build(documents(20), tmp_path / "store", lm=lm)
    mixture = opened(tmp_path / "store", lm)
    texts = documents(6, start=15)
    trace = mixture.record(texts, tmp_path / "trace", k=8)
    replayed = trace.replay(k=8, knn_temperature=4.0, lmbda=0.6)
    assert replayed.perplexity == pytest.approx(mixture.evaluate(texts).perplexity, rel=1e-4)
