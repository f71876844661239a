"""The output matrix: its predictions match NumPy, and training finds the optimum."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.output import card_of, random_matrix
from helpers.stores import documents, made_store
from helpers.training import fit_output
from knnlm.datastore.codecs import KeyMap
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.rewrite import derive
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, ModelError, ParameterError
from knnlm.ingest.build import build
from knnlm.memories.base import Context, Source
from knnlm.memories.output import OUTPUT_FILE, OutputMatrix, OutputMemory, load_output, save_output
from knnlm.training import data
from knnlm.training.data import EntryBatches, mark_held_out_tokens
from knnlm.training.output_matrix import CHECKPOINT, allocate_rows, output_losses

HERE = Path(__file__).parent.parent
SOURCE = Source(0, "ffn_input", -1)
QUICK = {"epochs": 2, "batch_size": 128, "held_out": 0.1}


def memory_of(matrix: OutputMatrix, vocabulary: int = 40, **options: object) -> OutputMemory:
    card = card_of(len(matrix.words), len(matrix.words.unique()), matrix.weight.shape[1], vocabulary)
    return OutputMemory(matrix, card, **options)


def expected(matrix: OutputMatrix, key: np.ndarray, vocabulary: int, temperature: float = 1.0) -> np.ndarray:
    """p over the vocabulary, by the formula, in float64."""
    weight, bias, centre, words = (getattr(matrix, name).numpy() for name in ("weight", "bias", "centre", "words"))
    scores = [
        float(row @ (key.astype(float) - centre) + add) for row, add in zip(weight.astype(float), bias, strict=True)
    ]
    probs = np.zeros(vocabulary)
    for word, prob in zip(words, oracle.softmax(np.array(scores) / temperature), strict=True):
        probs[word] += prob
    return probs


def cross_entropy(matrix: OutputMatrix, keys: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> float:
    return -float(
        np.mean([np.log(expected(matrix, k, vocabulary)[t]) for k, t in zip(keys.numpy(), targets, strict=True)])
    )


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    positions=st.integers(0, 5),
    seed=st.integers(0, 1000),
    temperature=st.floats(0.3, 3),
)
def test_probability_of_a_word_is_the_sum_over_its_rows(counts, positions, seed, temperature):
    matrix = random_matrix(counts, seed=seed)
    keys = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=(positions, 5)).astype(np.float32))
    answer = memory_of(matrix, softmax_temperature=temperature).predict(Context({SOURCE: keys}))
    [prediction] = answer.components
    right = np.array([expected(matrix, key, 40, temperature) for key in keys.numpy()]).reshape(positions, 40)
    np.testing.assert_allclose(prediction.log_probs().exp(), right, atol=1e-6, rtol=1e-4)
    np.testing.assert_allclose(prediction.log_probs().exp().sum(1), np.ones(positions), rtol=1e-5)
    assert not prediction.abstains().any()
    for token in range(40):
        found = prediction.log_prob(torch.full((positions,), token)).exp()
        np.testing.assert_allclose(found, right[:, token], atol=1e-6, rtol=1e-4)
    assert right[np.arange(positions), answer.top()] == pytest.approx(right.max(1, initial=0))
    for number, row in enumerate(right):
        some = row[row > 0]
        second = np.sort(some)[-2] if len(some) > 1 else some[0]
        features = [-(some * np.log(some)).sum(), np.log(some.max()), np.log(some.max() / second)]
        np.testing.assert_allclose(answer.features()[number], features, atol=1e-4, rtol=1e-4)


def test_batch_matches_single_positions():
    memory = memory_of(random_matrix([2, 1, 3, 1, 1, 2]))
    keys = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    together = memory.predict(Context({SOURCE: keys}))
    for number in range(0, 300, 7):
        alone = memory.predict(Context({SOURCE: keys[number : number + 1]}))
        torch.testing.assert_close(alone.components[0].log_probs()[0], together.components[0].log_probs()[number])
        torch.testing.assert_close(alone.features()[0], together.features()[number])
        assert alone.top()[0] == together.top()[number]


def test_unlikely_word_keeps_its_log_probability_where_its_probability_underflows():
    matrix = OutputMatrix(
        torch.zeros(4, 2), torch.tensor([0.0, -300.0, -301.0, 0.0]), torch.zeros(2), torch.tensor([1, 3, 3, 5])
    )
    [prediction] = memory_of(matrix).predict(Context({SOURCE: torch.ones(1, 2)})).components
    right = -300 + math.log1p(math.exp(-1)) - math.log(2)
    assert float(prediction.log_prob(torch.tensor([3]))) == pytest.approx(right, rel=1e-6)
    assert float(prediction.log_probs()[0, 3]) == pytest.approx(right, rel=1e-6)
    assert float(prediction.log_prob(torch.tensor([2]))) == -math.inf


def test_states_of_the_wrong_shape_or_not_finite_are_refused():
    memory = memory_of(random_matrix([1, 1]))
    with pytest.raises(ModelError, match=r"width 5.*have 6"):
        memory.predict(Context({SOURCE: torch.zeros(1, 6)}))
    with pytest.raises(ModelError, match="infinite"):
        memory.predict(Context({SOURCE: torch.full((1, 5), torch.nan)}))
    with pytest.raises(ParameterError, match="softmax_temperature"):
        memory_of(random_matrix([1]), softmax_temperature=0.0)


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    interpolate=st.none() | st.floats(0.05, 1),
)
def test_losses_and_their_gradient_match_the_formulas(counts, seed, interpolate):
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(size=(6, sum(counts))) * 3).requires_grad_()
    rows = torch.tensor(counts)
    columns = torch.from_numpy(random.integers(len(counts), size=6))
    first = (rows.cumsum(0) - rows)[columns]
    shares = torch.from_numpy(random.dirichlet(np.ones(6)))
    log_p_lm = None if interpolate is None else torch.from_numpy(np.log(random.uniform(0.01, 1, size=6)))
    softmax = scores.softmax(1)
    p = torch.stack([softmax[i, first[i] : first[i] + rows[c]].sum() for i, c in enumerate(columns)])
    if log_p_lm is not None:
        p = (1 - interpolate) * log_p_lm.exp() + interpolate * p
    (-p.log() @ shares).backward()
    turned = scores.detach().clone()
    losses = output_losses(turned, first, rows[columns], shares=shares, log_p_lm=log_p_lm, interpolate=interpolate)
    torch.testing.assert_close(losses, -p.log().detach())
    torch.testing.assert_close(turned, scores.grad)


@given(counts=st.lists(st.integers(0, 5000), min_size=1, max_size=60), rows=st.integers(1, 9))
def test_frequent_words_get_more_rows_and_the_total_is_constant(counts, rows):
    words = torch.tensor(counts)
    assert allocate_rows(words, rows, "uniform").tolist() == [rows] * len(counts)
    shared = allocate_rows(words, rows, "frequency").tolist()
    assert sum(shared) == rows * len(counts)
    assert 1 <= min(shared) <= max(shared) <= 64
    for count, found in zip(counts, shared, strict=True):
        assert all(found >= more for other, more in zip(counts, shared, strict=True) if other < count)
    # Each word's part of the rows is the root of its count times one number for all, but no more than 63; that number
    # is found by bisection. What is given is that, rounded up or down.
    roots, low, high = [math.sqrt(count) for count in counts], 0.0, 1e6
    if sum(min(63, high * root) for root in roots) > (rows - 1) * len(counts):
        for _ in range(200):
            middle = (low + high) / 2
            enough = sum(min(63, middle * root) for root in roots) >= (rows - 1) * len(counts)
            low, high = (low, middle) if enough else (middle, high)
        for root, found in zip(roots, shared, strict=True):
            assert abs(found - 1 - min(63, high * root)) < 1 + 1e-6


def test_rows_by_frequency_of_a_hand_worked_case():
    # Eight more rows by 1 : 2 : 4 : 9 are 0.5, 1, 2 and 4.5; the last half goes to the first of the equally near.
    assert allocate_rows(torch.tensor([1, 4, 16, 81]), 3, "frequency").tolist() == [2, 2, 3, 5]
    # A hundred words, of which one is nearly all of the text: it has the most, and the others share what is left.
    shared = allocate_rows(torch.tensor([10**9] + [1] * 99), 2, "frequency")
    assert shared.tolist()[0] == 64
    assert sorted(shared.tolist()[1:]) == [1] * 62 + [2] * 37
    # A word that is not in training gets more only when all others have the maximum.
    assert allocate_rows(torch.tensor([0, 1, 1]), 20, "frequency").tolist() == [1, 30, 29]
    assert allocate_rows(torch.tensor([0, 1, 1]), 60, "frequency").tolist() == [52, 64, 64]


@pytest.fixture(scope="module")
def everything(store):
    """All keys and values of the store."""
    ids = torch.arange(store.entry_count)
    return store.take(ids), store.values(ids)


def test_held_out_are_whole_documents_and_equal_texts_together(store):
    marked = mark_held_out_tokens(store, 0.1, seed=3)
    inside = [marked[d.first_entry : d.first_entry + d.entries] for d in store.catalog.documents()]
    assert {part.mean() for part in inside} == {0.0, 1.0}
    assert 0.1 * store.entry_count <= marked.sum() <= 0.1 * store.entry_count + max(map(len, inside))
    assert not mark_held_out_tokens(store, 0.0, seed=3).any()
    assert (mark_held_out_tokens(store, 0.1, seed=4) != marked).any()


def test_by_default_whole_documents_are_held_out_where_there_are_enough(lm, tmp_path):
    made = documents(60, words=60)
    store = build([*made, replace(made[0], id="again")], tmp_path / "docs.store", lm=lm, segment_entries=2000)
    for seed in range(8):
        marked = mark_held_out_tokens(store, 0.02, seed=seed)
        inside = [marked[d.first_entry : d.first_entry + d.entries] for d in store.catalog.documents()]
        assert {part.mean() for part in inside} == {0.0, 1.0}
        assert inside[0].mean() == inside[-1].mean()
        assert 0.02 * store.entry_count <= marked.sum() <= 0.02 * store.entry_count + 2 * max(map(len, inside))


def held_out_of(path, sizes, share):
    """The share of the text that is held out, and of each document."""
    rows = sum(sizes)
    store = made_store(path, np.zeros((rows, 1)), np.arange(rows) % 3, sizes=sizes)
    marked = mark_held_out_tokens(store, share, seed=0)
    return marked.mean(), [part.mean() for part in np.split(marked, np.cumsum(sizes)[:-1])]


def test_document_that_is_most_of_the_text_is_not_held_out_whole(tmp_path):
    share, parts = held_out_of(tmp_path / "a", [9000, *[100] * 30], 0.02)
    assert parts[0] == 0
    assert set(parts[1:]) == {0.0, 1.0}
    assert 0.02 <= share < 0.03
    # The short ones are not enough, so all are cut.
    share, parts = held_out_of(tmp_path / "b", [*[3000] * 7, *[2] * 12], 0.1)
    assert 0.1 <= share < 0.16
    assert any(0 < part < 1 for part in parts)
    # Enough of them, but few: they are large, and whole all the same.
    share, parts = held_out_of(tmp_path / "c", [1000] * 20, 0.02)
    assert sorted(parts) == [0.0] * 19 + [1.0]


def test_equal_texts_are_held_out_together_and_long_ones_in_spans(lm, tmp_path):
    made = documents(3)
    twins = build([*made, *[replace(made[n], id=f"again {n}") for n in range(3)]], tmp_path / "twins", lm=lm)
    marked = mark_held_out_tokens(twins, 0.2, seed=0)
    assert 0 < marked.sum() < len(marked)
    assert (marked[: len(marked) // 2] == marked[len(marked) // 2 :]).all()
    [book] = documents(1, words=1500)
    long = build([book], tmp_path / "long", lm=lm)
    marked = mark_held_out_tokens(long, 0.1, seed=0)
    assert 0.1 * long.entry_count <= marked.sum() <= 0.16 * long.entry_count


def test_every_training_entry_comes_once_per_epoch_and_no_held_out_one(store, everything, monkeypatch):
    monkeypatch.setattr(data, "_KEYS_PER_READ", 64)
    monkeypatch.setattr(data, "_SHUFFLE_BUFFER", 256)
    entries = EntryBatches(
        store, held_out=0.1, seed=0, whole_vocabulary=False, device=torch.device("cpu"), dtype=torch.float32
    )
    keys, values = everything
    kept = np.flatnonzero(~mark_held_out_tokens(store, 0.1, seed=0))
    mean, spread = keys.numpy()[kept].mean(0, dtype=float), keys.numpy()[kept].std(0, dtype=float)
    batches = list(entries.batches(0, 50))
    ids = torch.cat([batch[0] for batch in batches]).numpy()
    assert sorted(ids) == kept.tolist()
    assert (ids != np.sort(ids)).mean() > 0.9
    for rows, found, columns in batches:
        np.testing.assert_allclose(found, (keys.numpy()[rows] - mean) / spread, atol=1e-3)
        assert entries.words[columns].tolist() == values[rows].tolist()
        assert 25 <= len(rows) <= 75
    for skip in (1, 6, len(batches)):
        again = [batch[0].tolist() for batch in entries.batches(0, 50, skip=skip)]
        assert again == [batch[0].tolist() for batch in batches[skip:]]
    assert torch.cat([batch[0] for batch in entries.batches(1, 50)]).tolist() != ids.tolist()


def descend(keys: np.ndarray, columns: np.ndarray, words: int, *, steps: int, decay: float = 0.0) -> float:
    """The least cross-entropy of a logistic regression, by full-batch gradient descent with momentum in float64."""
    inputs = np.concatenate([keys, np.ones((len(keys), 1))], 1).astype(float)
    weight, speed = np.zeros((words, inputs.shape[1])), 0.0
    wanted = np.eye(words)[columns]
    rate = 2.0 / np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1]
    for _ in range(steps):
        scores = inputs @ weight.T
        probs = np.exp(scores - scores.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        speed = 0.95 * speed + (probs - wanted).T @ inputs / len(inputs)
        weight -= rate * speed
    return -float(np.log(probs[np.arange(len(columns)), columns]).mean())


def test_training_finds_the_optimum_of_a_logistic_regression(lm, tmp_path):
    """Without decay and held-out text it is a convex problem, and NumPy comes to the same least loss."""
    random = np.random.default_rng(0)
    # Three dimensions cannot tell all words apart, so the least loss is far from 0.
    key_map = KeyMap(torch.from_numpy(random.normal(size=(lm.width, 3)).astype(np.float32)), torch.zeros(lm.width))
    whole = build(documents(8, words=12), tmp_path / "docs.store", lm=lm)
    store = derive(whole, tmp_path / "mapped", key_map=key_map)
    ids = torch.arange(store.entry_count)
    keys, values = store.take(ids), store.values(ids)
    words, columns = np.unique(values.numpy(), return_inverse=True)
    standard = ((keys - keys.mean(0)) / keys.std(0, correction=0)).numpy()
    least = descend(standard, columns, len(words), steps=2000)
    options = {"held_out": 0, "weight_decay": 0, "epochs": 800, "batch_size": 1024, "learning_rate": 0.5}
    card = fit_output(store, tmp_path / "o", **options)
    assert (card.held_out_before, card.held_out_after, card.held_out_pairs) == (None, None, 0)
    matrix, _ = load_output(tmp_path / "o")
    found = cross_entropy(matrix, whole.take(ids), values, store.model["vocab_size"])
    assert found == pytest.approx(least, rel=0.01)


def test_card_matches_the_matrix(store, everything, tmp_path):
    keys, values = everything
    card = fit_output(store, tmp_path / "o", rows=2, rows_by="frequency", **QUICK)
    matrix, loaded = load_output(tmp_path / "o")
    assert loaded == card
    held_out = mark_held_out_tokens(store, 0.1, seed=0)
    assert (card.held_out_pairs, card.trained_pairs) == (held_out.sum(), (~held_out).sum())
    found = cross_entropy(matrix, keys[held_out], values[held_out], store.model["vocab_size"])
    assert card.held_out_after == pytest.approx(found, rel=1e-4)
    counts = np.bincount(values[~held_out], minlength=store.model["vocab_size"])[values.unique()] + 0.5
    unigram = dict(zip(values.unique().tolist(), np.log(counts / counts.sum()), strict=True))
    before = -np.mean([unigram[token] for token in values[held_out].tolist()])
    assert card.held_out_before == pytest.approx(before, abs=0.05)  # rows of a word differ by a little noise
    assert card.held_out_after < card.held_out_before - 0.2
    assert (card.store, card.model) == (store.fingerprint, store.model)
    assert matrix.words.unique().tolist() == values.unique().tolist()
    assert (card.rows, card.words) == (len(matrix.words), len(values.unique()))
    assert card.steps == card.history[-1][0]
    assert not (tmp_path / "o" / CHECKPOINT).exists()


def test_best_matrix_on_held_out_text_is_kept_and_training_stops(store, everything, tmp_path):
    keys, values = everything
    card = fit_output(store, tmp_path / "o", epochs=100, batch_size=64, held_out=0.1, learning_rate=4.0, patience=3)
    losses = [entry[2] for entry in card.history]
    assert card.held_out_after == min(losses) < losses[-1]
    assert card.history[int(np.argmin(losses))][0] == card.best_step
    assert len(losses) - 1 - int(np.argmin(losses)) == 3
    assert card.steps < 100 * card.trained_pairs / 64 / 2
    held_out = mark_held_out_tokens(store, 0.1, seed=0)
    matrix, _ = load_output(tmp_path / "o")
    found = cross_entropy(matrix, keys[held_out], values[held_out], store.model["vocab_size"])
    assert found == pytest.approx(min(losses), rel=1e-4)


def test_loss_on_the_mixture_is_lower_on_the_mixture(store, everything, tmp_path):
    keys, values = everything
    known = torch.from_numpy(np.random.default_rng(0).random(store.entry_count) < 0.5)
    log_p_lm = torch.where(known, -0.001, -12.0)
    card = fit_output(store, tmp_path / "mixed", interpolate=0.3, log_p_lm=log_p_lm, **QUICK)
    fit_output(store, tmp_path / "plain", **QUICK)
    held_out = torch.from_numpy(mark_held_out_tokens(store, 0.1, seed=0))
    losses = {}
    for name in ("mixed", "plain"):
        memory = OutputMemory.open(tmp_path / name)
        own = memory.predict(Context({memory.source: keys})).components[0].log_prob(values).double().exp()
        losses[name] = -(0.7 * log_p_lm.double().exp() + 0.3 * own).log()
    assert card.held_out_after == pytest.approx(float(losses["mixed"][held_out].mean()), rel=1e-4)
    assert losses["mixed"][~held_out].mean() < losses["plain"][~held_out].mean()


def test_initial_embedding_starts_with_the_models_loss(store, everything, tmp_path):
    keys, values = everything
    random = torch.Generator().manual_seed(0)
    init = torch.randn(store.model["vocab_size"], store.width, generator=random) * 0.3
    scores = keys.double() @ init.double().T
    words = values.unique()
    right = scores.gather(1, values[:, None])[:, 0] - scores[:, words].logsumexp(1)
    held_out = torch.from_numpy(mark_held_out_tokens(store, 0.1, seed=0))
    for name, options in {"some": {}, "no bias": {"bias": False}}.items():
        card = fit_output(store, tmp_path / name, init=init, **options, **QUICK)
        assert card.held_out_before == pytest.approx(-float(right[held_out].mean()), rel=1e-4)
        assert card.held_out_after < card.held_out_before
    card = fit_output(store, tmp_path / "all", init=init, vocabulary="all", **QUICK)
    assert card.words == store.model["vocab_size"]
    right = scores.log_softmax(1).gather(1, values[:, None])[:, 0]
    assert card.held_out_before == pytest.approx(-float(right[held_out].mean()), rel=1e-4)


def test_matrix_reads_the_models_states_if_the_store_subtracts_an_offset(store, everything, tmp_path, monkeypatch):
    """The same keys, stored less an offset: the predictions of the matrix for the states themselves must not change."""
    keys, values = everything
    fit_output(store, tmp_path / "plain", **QUICK)
    monkeypatch.setattr(store, "offset", torch.linspace(-3000, 3000, store.width))
    fit_output(store, tmp_path / "moved", **QUICK)
    plain, moved = OutputMemory.open(tmp_path / "plain"), OutputMemory.open(tmp_path / "moved")
    expected_log_p = plain.predict(Context({plain.source: keys})).components[0].log_prob(values)
    again = moved.predict(Context({moved.source: keys + store.offset})).components[0].log_prob(values)
    torch.testing.assert_close(again, expected_log_p, atol=0.02, rtol=0.01)


def test_matrix_reads_the_models_states_if_the_store_maps_them(store, everything, tmp_path):
    keys, values = everything
    random = np.random.default_rng(0)
    centre = torch.from_numpy(random.normal(size=store.width).astype(np.float32))
    key_map = KeyMap(torch.from_numpy(random.normal(size=(store.width, 9)).astype(np.float32)), centre)
    mapped = derive(store, tmp_path / "mapped", key_map=key_map, key_dtype="float32")
    card = fit_output(mapped, tmp_path / "o", **QUICK)
    matrix, _ = load_output(tmp_path / "o")
    assert matrix.weight.shape[1] == store.width != mapped.width
    held_out = mark_held_out_tokens(store, 0.1, seed=0)
    found = cross_entropy(matrix, keys[held_out], values[held_out], store.model["vocab_size"])
    assert card.held_out_after == pytest.approx(found, rel=1e-4)
    with pytest.raises(ParameterError, match="init"):
        fit_output(mapped, tmp_path / "p", init=torch.zeros(store.model["vocab_size"], store.width))


def test_pruned_store_trains_with_its_keys_weighted_by_their_counts(store, everything, tmp_path):
    keys, values = everything
    random = np.random.default_rng(0)
    keep = torch.from_numpy(random.random(store.entry_count) < 0.6)
    counts = torch.from_numpy(random.integers(1, 9, size=store.entry_count).astype(np.float32))
    pruned = derive(store, tmp_path / "pruned", keep=keep, counts=counts)
    log_p_lm = torch.from_numpy(np.log(random.uniform(0.01, 1, size=store.entry_count)).astype(np.float32))
    held_out = torch.from_numpy(mark_held_out_tokens(store, 0.1, seed=0))
    for name, options in {"plain": {}, "mixed": {"interpolate": 0.4, "log_p_lm": log_p_lm}}.items():
        card = fit_output(pruned, tmp_path / name, **options, **QUICK)
        assert (card.trained_pairs, card.held_out_pairs) == (
            int((keep & ~held_out).sum()),
            int((keep & held_out).sum()),
        )
        memory = OutputMemory.open(tmp_path / name)
        p = memory.predict(Context({memory.source: keys})).components[0].log_prob(values).double().exp()
        p = 0.6 * log_p_lm.double().exp() + 0.4 * p if options else p
        left = keep & held_out
        assert card.held_out_after == pytest.approx(-np.average(p[left].log(), weights=counts[left]), rel=1e-4)


def test_scale_of_keys_does_not_matter(store, tmp_path, monkeypatch):
    plain = fit_output(store, tmp_path / "plain", **QUICK)
    take = Datastore.take
    monkeypatch.setattr(Datastore, "take", lambda self, ids: take(self, ids) * 1024)
    scaled = fit_output(store, tmp_path / "scaled", **QUICK)
    assert scaled.held_out_after == pytest.approx(plain.held_out_after, rel=1e-5)


def test_bfloat16_learns_nearly_the_same(store, tmp_path):
    """What is the default on a GPU."""
    whole = fit_output(store, tmp_path / "whole", **QUICK)
    half = fit_output(store, tmp_path / "half", dtype="bfloat16", **QUICK)
    assert half.held_out_after != whole.held_out_after
    assert half.held_out_after == pytest.approx(whole.held_out_after, rel=0.01)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def equal(one: Path, other: Path) -> bool:
    first, second = tensors_of(one / OUTPUT_FILE), tensors_of(other / OUTPUT_FILE)
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_same_seed_gives_the_same_numbers_and_another_gives_others(store, tmp_path):
    cards = [fit_output(store, tmp_path / str(n), rows=2, seed=n // 2, **QUICK) for n in range(3)]
    assert cards[0].history == cards[1].history != cards[2].history
    assert equal(tmp_path / "0", tmp_path / "1")
    assert not equal(tmp_path / "0", tmp_path / "2")


def test_killed_training_resumes_and_ends_with_the_same_numbers(store, tmp_path):
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(HERE)!r})
        import torch
        torch.set_num_threads(1)
        from contextlib import contextmanager
        from knnlm import Datastore
        from knnlm.training.output_matrix import OutputConfig, train_output

        steps = 0

        @contextmanager
        def deadly(what, *, total=None, unit="tokens"):
            def advance(count):
                global steps
                steps += count > 0
                if steps == int(sys.argv[1]):
                    os.kill(os.getpid(), signal.SIGKILL)
            yield advance

        config = OutputConfig(rows=2, epochs=3, batch_size=128, held_out=0.1)
        train_output(Datastore.open({str(store.path)!r}), sys.argv[2], config, checkpoint_every=0, progress=deadly)
    """
    options = {"rows": 2, "epochs": 3, "batch_size": 128, "held_out": 0.1}
    whole = fit_output(store, tmp_path / "whole", **options)
    out = tmp_path / "killed"
    for steps in (whole.steps // 2,):
        result = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(steps), str(out)], check=False)
        assert result.returncode == -signal.SIGKILL
        assert (out / CHECKPOINT).exists()
        assert not (out / OUTPUT_FILE).exists()
    with pytest.raises(DatastoreError, match=r"another learning rate \(0.5, now 0.1\)"):
        fit_output(store, out, learning_rate=0.1, **options)
    begun = []

    @contextmanager
    def watch(what, *, total, unit):
        yield begun.append

    card = fit_output(store, out, progress=watch, **options)
    assert sum(1 for count in begun if count) < whole.steps  # it did not begin again
    assert equal(tmp_path / "whole", out)
    assert replace(card, seconds=0) == replace(whole, seconds=0)
    assert not (out / CHECKPOINT).exists()


def test_finished_matrix_is_reused_and_never_replaced(store, lm, tmp_path):
    out = tmp_path / "o"
    card = fit_output(store, out, **QUICK)
    begun = time.monotonic()
    assert fit_output(store, out, **QUICK) == card
    assert time.monotonic() - begun < 1
    with pytest.raises(DatastoreError, match=r"another rows \(1, now 2\)"):
        fit_output(store, out, rows=2, **QUICK)
    other = build(documents(5), tmp_path / "other", lm=lm)
    with pytest.raises(DatastoreError, match="another store"):
        fit_output(other, out, **QUICK)


def test_progress_counts_every_entry_and_shows_the_loss(store, tmp_path):
    bars = []

    @contextmanager
    def watch(what, *, total, unit):
        counts = []
        yield counts.append
        bars.append((what, total, sum(counts), unit))

    card = fit_output(store, tmp_path / "o", progress=watch, **QUICK)
    assert [bar[1:] for bar in bars] == [(card.trained_pairs, card.trained_pairs, "tokens")] * 2
    assert bars[0][0] == f"epoch 1 of 2, loss {card.held_out_before:.3f}"


def test_wrong_settings_are_refused_before_anything_is_written(store, tmp_path):
    wrong = {
        "rows": [0, 65],
        "rows_by": ["size"],
        "vocabulary": ["some"],
        "epochs": [0],
        "batch_size": [0],
        "patience": [0],
        "seed": [-1],
        "dtype": ["float8"],
        "device": ["abacus", "cuda:77"],
        "learning_rate": [0.0, math.nan],
        "weight_decay": [-1.0, math.inf],
        "held_out": [-0.1, 0.6],
        "init": [torch.zeros(3, 3), torch.full((store.model["vocab_size"], store.width), torch.nan)],
        "interpolate": [0.5, 0.0, 2.0],
        "log_p_lm": [torch.zeros(store.entry_count)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ParameterError, match=name):
                fit_output(store, tmp_path / "o", **{name: value})
    for given_array in (torch.zeros(3), torch.ones(store.entry_count)):
        with pytest.raises(ParameterError, match="log_p_lm"):
            fit_output(store, tmp_path / "o", interpolate=0.5, log_p_lm=given_array)
    assert not (tmp_path / "o").exists()
    (tmp_path / "file").touch()
    with pytest.raises(DatastoreError, match="is a file"):
        fit_output(store, tmp_path / "file")


def test_diverging_training_is_an_error(store, tmp_path):
    with pytest.raises(ParameterError, match=r"diverged.*smaller learning_rate"):
        fit_output(store, tmp_path / "o", learning_rate=1e38, epochs=2, batch_size=128)


def test_store_with_nothing_to_train_on_is_refused(lm, tmp_path):
    empty = build([], tmp_path / "empty", lm=lm)
    with pytest.raises(DatastoreError, match="nothing to learn"):
        fit_output(empty, tmp_path / "o")
    tiny = build(documents(1, words=5), tmp_path / "tiny", lm=lm)
    with pytest.raises(ParameterError, match="held_out=0"):
        fit_output(tiny, tmp_path / "o")
    assert fit_output(tiny, tmp_path / "o", held_out=0, epochs=1).trained_pairs == tiny.entry_count


def test_advised_commands_run(lm, model_folder, tmp_path, capfd):
    tiny = build(documents(1, words=5), tmp_path / "tiny", lm=lm).path
    assert "--held-out 0" in failure(capfd, "distill", tiny)
    code, out, err = knnlm(capfd, "distill", tiny, "--held-out", 0, "--epochs", 1)
    assert code == 0, err
    assert "nothing was held out" in out
    card = load_output(tiny / "output")[1]
    assert (card.settings["held_out"], card.settings["epochs"], card.held_out_pairs) == (0, 1, 0)


def test_options_of_the_other_kind_are_refused(store, tmp_path, capfd):
    output = {"--rows": 5, "--rows-by": "frequency", "--interpolate": 0.5, "--held-out": 0.1}
    keys = {"--width": 3, "--anchors": 7, "--neighbours": 4, "--rounds": 2}
    for into, wrong, other in (("keys", output, "output"), ("output", keys, "keys")):
        for name, value in wrong.items():
            line = failure(capfd, "distill", store.path, "--into", into, "--out", tmp_path / "o", name, value)
            assert f"{name} applies to --into {other}, not to --into {into}" in line
        both = [str(part) for pair in list(wrong.items())[:2] for part in pair]
        line = failure(capfd, "distill", store.path, "--into", into, "--out", tmp_path / "o", *both)
        assert f"{both[0]} and {both[2]} apply to --into {other}" in line
    assert not (tmp_path / "o").exists()
    command = ["distill", store.path, "--out", tmp_path / "o", "--rows", 2, "--rows-by", "frequency", "--json"]
    code, out, err = knnlm(capfd, *command, "--epochs", 1, "--held-out", 0.1)
    assert code == 0, err
    card = json.loads(out)
    assert card["settings"] | {"rows": 2, "rows_by": "frequency", "epochs": 1, "held_out": 0.1} == card["settings"]
    assert card["rows"] == 2 * card["words"]


def test_one_process_trains_at_a_time(store, tmp_path):
    with writer_lock(tmp_path / "o", create=True), pytest.raises(DatastoreBusy):
        fit_output(store, tmp_path / "o")


def test_damaged_files_are_refused_by_name(store, tmp_path):
    out = tmp_path / "o"
    with pytest.raises(DatastoreError, match=r"does not exist.*knnlm distill"):
        OutputMemory.open(out)
    fit_output(store, out, **QUICK)
    file = out / OUTPUT_FILE
    good = file.read_bytes()
    for bad in (b"", b"nonsense", good[:-10], good[:50], (1 << 60).to_bytes(8, "little") + good[8:]):
        file.write_bytes(bad)
        with pytest.raises(DatastoreCorrupt, match=r"output\.safetensors"):
            OutputMemory.open(out)
        with pytest.raises(DatastoreCorrupt, match=r"output\.safetensors"):
            fit_output(store, out, **QUICK)
    file.write_bytes(good)
    tensors = tensors_of(file)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    del header["sha256"]  # an attacker could make it right
    metadata = json.loads(header["metadata"])

    def refused(tensors: dict, header: dict, match: str) -> None:
        save_file(tensors, file, header)
        with pytest.raises(DatastoreError, match=match):
            OutputMemory.open(out)

    refused(tensors, {}, "format version None")
    refused(tensors, {**header, "format": "2"}, "format version 2")
    refused(tensors, {**header, "metadata": "[" * 100_000}, "metadata cannot be read")
    refused(tensors, {**header, "metadata": "[]"}, "metadata cannot be read")
    for change, match in (
        ({"rows": 0}, "0 rows"),
        ({"rows": "5"}, "rows of its card is missing or invalid"),
        ({"more": 1}, "more of its card is missing or invalid"),
        ({"words": 1}, "card has 1"),
        ({"rows": metadata["rows"] + 1}, "weight|bias|words"),
        ({"model": {}}, "the model's width"),
        ({"model": {**metadata["model"], "vocab_size": 5}}, "not in the vocabulary"),
    ):
        refused(tensors, {**header, "metadata": json.dumps({**metadata, **change})}, match)
    for name, bad in (
        ("weight", tensors["weight"].half()),
        ("weight", tensors["weight"] * torch.nan),
        ("words", tensors["words"].flip(0)),
        ("bias", tensors["bias"][1:].clone()),
    ):
        refused({**tensors, name: bad}, header, name)
    refused({name: tensor for name, tensor in tensors.items() if name != "centre"}, header, "centre is missing")


def test_no_flipped_bit_changes_a_matrix_unnoticed(tmp_path):
    save_output(tmp_path, random_matrix([1, 2]), card_of(3, 2, 5, 40))
    file = tmp_path / OUTPUT_FILE
    good = file.read_bytes()
    right = load_output(file)
    begin = 8 + int.from_bytes(good[:8], "little")
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        try:
            matrix, card = load_output(file)
        except DatastoreError:
            continue
        assert place < begin, place  # only in the header, where another spelling may mean the same
        assert card == right[1]
        assert all(torch.equal(getattr(matrix, one), getattr(right[0], one)) for one in ("weight", "bias", "words"))


def test_damaged_checkpoint_is_refused_by_name(store, tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    for bad in (b"", b"nonsense"):
        (out / CHECKPOINT).write_bytes(bad)
        with pytest.raises(DatastoreCorrupt, match=r"checkpoint\.safetensors"):
            fit_output(store, out, **QUICK)
    save_file({"parameters.weight": torch.zeros(2, 2)}, out / CHECKPOINT, {"format": "1", "metadata": "{}"})
    with pytest.raises(DatastoreError, match=r"checkpoint\.safetensors: trained with another store"):
        fit_output(store, out, **QUICK)


def test_matrix_is_written_atomically(tmp_path):
    matrix = random_matrix([1, 2])
    card = card_of(3, 2, 5, 40)
    save_output(tmp_path, matrix, card)
    before = (tmp_path / OUTPUT_FILE).read_bytes()
    (tmp_path / "output.partial").mkdir()  # what is there cannot be written over
    with pytest.raises(DatastoreError, match="Cannot write"):
        save_output(tmp_path, matrix, card)
    assert (tmp_path / OUTPUT_FILE).read_bytes() == before
