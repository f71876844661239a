"""A report: every number is computed again from the papers' formulas, the page is sound, and nothing is done twice."""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from helpers.models import randomise, tiny, tiny_tokenizer
from helpers.online import prior_by_hand
from helpers.oracle import read_token_by_token, softmax
from helpers.stores import documents
from knnlm.cli.app import run
from knnlm.corpus import Document
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError, DatastoreBusy, DatastoreError, MissingExtra, ModelMismatch, ParameterError
from knnlm.evaluation.trace import Trace
from knnlm.evaluation.tune import (
    choose_online,
    choose_settings,
    fit_weights,
    score_table,
    sweep_all,
    tabulate,
    token_frequencies,
)
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.memories.decoder import load_card, save_card
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.mixture.weights import Buckets
from knnlm.report.context import describe_folds, out_of_fold, split_folds, split_texts
from knnlm.report.html import write_html
from knnlm.report.plots import draw
from knnlm.report.report import STUDIES, report
from knnlm.report.studies.compression import recall
from knnlm.report.studies.memories import name_memories
from knnlm.report.study import Example, ExampleNeighbour, Line, Plot, Study, Table
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from knnlm.training.output_matrix import train_output
from knnlm.training.prune import prune

HOSTILE = '<script>alert("x")</script> & "quotes" \'single\' <img src=http://evil.example/x.png> The memory of a model'
STORED = [*documents(12, words=12), Document("<b>id</b>", "<i>stored & kept</i>.txt", HOSTILE)]
TEXT = [
    *documents(5, words=12, start=100),
    Document("evil", "<a href=http://evil.example>.txt", HOSTILE + " is read"),
]


class Forwards:
    """Counts how often a model runs."""

    def __init__(self, lm):
        self.count = 0
        self.hook = lm.model.register_forward_hook(self.add)

    def add(self, *_):
        self.count += 1


@pytest.fixture(scope="module")
def place(lm, tmp_path_factory):
    """A folder with a store, its trained output matrix, and a decoder whose settings were chosen on other text."""
    folder = tmp_path_factory.mktemp("report")
    store = build(STORED, folder / "store", lm=lm, segment_entries=500)
    train_output(store, folder / "store" / "output", device="cpu")
    second = CausalLM(tiny("llama", seed=1), tiny_tokenizer(), name="second")
    second.model.save_pretrained(folder / "initial")
    second.tokenizer.save_pretrained(folder / "initial")
    config = DecoderConfig(epochs=2, learning_rate=1e-3, batch_tokens=256, select=True)
    initial = open_initial_model(str(folder / "initial"), like=lm)
    text = lm.encode_all([document.text for document in STORED])
    held_out = lm.encode_all([document.text for document in TEXT])
    train_decoder(text, initial, folder / "second", config, held_out_text=held_out, device="cpu")
    return folder


def make(place, lm, model_folder, **options):
    arguments = {"lm": lm, "model": str(model_folder), "second_lm": str(place / "second"), **options}
    out = arguments.pop("out", place / "report")
    text = arguments.pop("text", TEXT)
    return report(place / "store", text, out=out, **arguments)


@pytest.fixture(scope="module")
def made(place, lm, model_folder):
    """The whole report."""
    return make(place, lm, model_folder)


@pytest.fixture(scope="module")
def studies(made):
    return {study.name: study for study in made.studies}


class Text:
    """One of the two texts as it was read: what the model p_memory, and the keys."""

    def __init__(self, place, name):
        (folder,) = (place / "report" / "work").glob(f"texts-*/{name}")
        self.trace = Trace.open(folder / "trace")
        self.keys = np.load(folder / "keys.npy").astype(np.float64)
        self.model = np.asarray(self.trace.lm_log_probs, dtype=np.float64)
        self.targets = np.asarray(self.trace.targets)
        knn = self.trace.memories[0]
        self.distances = np.asarray(knn.arrays["distances"], dtype=np.float64)
        self.values = np.asarray(knn.arrays["values"])

    def vote(self, k, temperature, *, distances=None, values=None):
        """p_kNN of the target, row by row."""
        distances = self.distances if distances is None else distances
        values = self.values if values is None else values
        found = []
        for row, target in enumerate(self.targets):
            there = values[row, :k] >= 0
            weights = softmax(-distances[row, :k][there] / temperature)
            found.append(weights[values[row, :k][there] == target].sum())
        return np.array(found)

    def perplexity(self, vote, weight):
        return float(np.exp(-np.log((1 - weight) * np.exp(self.model) + weight * vote).mean()))

    def search(self, keys, values, k):
        """The k nearest keys by brute force: distances and tokens."""
        distances = ((self.keys[:, None] - keys[None]) ** 2).sum(2)
        order = np.argsort(distances, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(distances, order, 1), values[order]


@pytest.fixture(scope="module")
def valid(made, place):
    return Text(place, "valid")


@pytest.fixture(scope="module")
def test(made, place):
    return Text(place, "test")


@pytest.fixture(scope="module")
def stored(place):
    """The store's keys, as the model gave them, and its tokens."""
    store = Datastore.open(place / "store")
    keys = store.take(torch.arange(store.key_count)) + (0 if store.offset is None else store.offset)
    return keys.double().numpy(), store.values(torch.arange(store.entry_count)).numpy()


def test_every_study_is_run(made):
    assert [study.name for study in made.studies] == list(STUDIES)
    assert made.skipped == {}
    for study in made.studies:
        assert study.finding.endswith(".")
        assert study.command.startswith("knnlm ")
        assert study.tables or study.examples


def test_every_lambda_has_the_perplexity_of_the_formula(studies, made, valid, test):
    study, metadata = studies["lambda"], made.metadata
    for name, text in (("valid", valid), ("test", test)):
        vote = text.vote(metadata["k"], metadata["knn_temperature"])
        expected = [text.perplexity(vote, weight) for weight in study.numbers["lambda"]]
        np.testing.assert_allclose(study.numbers[name], expected, rtol=2e-4)
    chosen = study.tables[0].rows[study.tables[0].best]
    assert chosen[0] == metadata["lambda"] == study.numbers["lambda"][int(np.argmin(study.numbers["valid"]))]
    assert metadata["base_perplexity"] == pytest.approx(float(np.exp(-test.model.mean())))


def test_settings_are_chosen_on_one_text_and_measured_on_the_other(studies, valid, test, made):
    temperatures = [row[0] for row in studies["knn_temperature"].tables[0].rows]
    lambdas = np.arange(100) / 100
    for k, temperature, weight, on_valid, on_test in studies["k"].tables[0].rows[:4]:
        tried = {
            (other, lam): valid.perplexity(vote, lam)
            for other in temperatures
            for vote in [valid.vote(k, other)]
            for lam in lambdas
        }
        assert on_valid == pytest.approx(min(tried.values()), rel=1e-4)
        assert valid.perplexity(valid.vote(k, temperature), weight) == pytest.approx(on_valid, rel=1e-4)
        assert test.perplexity(test.vote(k, temperature), weight) == pytest.approx(on_test, rel=1e-4)
    for temperature, weight, _, on_test in studies["knn_temperature"].tables[0].rows:
        assert test.perplexity(test.vote(made.metadata["k"], temperature), weight) == pytest.approx(on_test, rel=1e-4)


def test_training_study_lists_what_was_tried_on_held_out_text(studies, place, lm):
    study = studies["training"]
    card = load_card(place / "second")
    decoder, initial = (CausalLM.open(str(place / name)) for name in ("second", "initial"))
    texts = lm.encode_all([document.text for document in TEXT])

    def loss(reader):
        found = []
        for tokens in texts:  # all at once: each text fits into the window
            logits = reader.model(torch.tensor([[reader.start_token, *tokens[:-1]]])).logits[0]
            found.append(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(tokens), reduction="none"))
        return torch.cat(found).mean().item()

    trials, shares = study.tables
    assert study.numbers["before"] == pytest.approx(math.exp(loss(initial)), rel=1e-4)
    assert study.plots[0].levels == {"before training": study.numbers["before"]}
    assert min(row[1] for row in shares.rows) == shares.rows[shares.best][1] == pytest.approx(loss(decoder), rel=1e-4)
    assert [row[:2] for row in trials.rows[:3]] == [[1e-3, 0.5], [2e-3, 0.5], [4e-3, 0.5]]
    chosen = card.selection["chosen"]
    assert trials.rows[trials.best][:2] == [chosen["learning_rate"], chosen["epochs"]]
    assert shares.rows[shares.best][0] == chosen["interpolation"]
    tried = [math.exp(trial["loss"]) for trial in card.selection["trials"][1:]]
    assert [row[2] for row in trials.rows] == pytest.approx(tried)
    assert trials.rows[trials.best][2] == pytest.approx(min(tried))
    rates = sorted({trial["learning_rate"] for trial in card.selection["trials"][1:]})
    assert [line.name for line in study.plots[0].lines] == [f"rate {rate:g}" for rate in rates]
    assert sum(len(line.x) for line in study.plots[0].lines) == len(tried)


def test_training_without_selection_lists_epochs_and_an_untrained_model_is_skipped(place, lm, model_folder, tmp_path):
    initial = open_initial_model(str(place / "initial"), like=lm)
    text = lm.encode_all([document.text for document in STORED])
    config = DecoderConfig(epochs=2, learning_rate=1e-3, batch_tokens=256, held_out=0.2)
    card = train_decoder(text, initial, tmp_path / "plain", config, device="cpu")
    few = {"studies": ["training"], "memories": "knn", "out": tmp_path / "one"}
    (study,) = make(place, lm, model_folder, second_lm=str(tmp_path / "plain"), **few).studies
    assert study.tables[0].rows == [[1e-3, line["epoch"], math.exp(line["ce"])] for line in card.held_out[1:]]
    assert len(study.tables) == 1
    for second, reason in ((str(place / "initial"), "no decoder"), (None, "no decoder")):
        found = make(place, lm, model_folder, second_lm=second, **{**few, "out": tmp_path / f"no-{second is None}"})
        assert reason in found.skipped["training"]


def test_rate_that_diverged_is_left_out_of_the_training_study(place, studies, lm, model_folder, tmp_path):
    shutil.copytree(place / "second", tmp_path / "second")
    card = load_card(place / "second")
    trials = [*card.selection["trials"], {"learning_rate": 9.0, "epochs": 1.0, "loss": math.inf}]
    save_card(tmp_path / "second", replace(card, selection={**card.selection, "trials": trials}))
    few = {"studies": ["training"], "memories": "knn", "out": tmp_path / "one"}
    (study,) = make(place, lm, model_folder, second_lm=str(tmp_path / "second"), **few).studies
    assert study.tables[0].rows == studies["training"].tables[0].rows


def documents_of(place, name):
    lines = (place / "report" / "work" / f"{name}.jsonl").read_text().splitlines()
    return [Document(**json.loads(line)) for line in lines]


def test_size_study_begins_with_a_subset_and_ends_with_the_whole_store(studies, place, lm, stored, test, made):
    rows, k = studies["size"].tables[0].rows, made.metadata["k"]
    part, count, temperature, weight, _, perplexity = rows[-1]
    assert (part, count) == (1.0, len(stored[0]))
    settings = {"k": k, "knn_temperature": temperature, "lmbda": weight}
    whole = Mixture.open(place / "store", lm, memories="knn", use_tuned=False, **settings)
    assert perplexity == pytest.approx(whole.evaluate(documents_of(place, "test")).perplexity, rel=1e-3)
    order = sorted(Datastore.open(place / "store").catalog.documents(), key=lambda document: document.sha256)
    taken = []
    for document in order:
        if sum(map(len, taken)) >= len(stored[0]) / 16:
            break
        taken.append(np.arange(document.first_entry, document.first_entry + document.entries))
    ids = np.concatenate(taken)
    assert rows[0][1] == len(ids)
    distances, values = test.search(stored[0][ids], stored[1][ids], k)
    _, _, temperature, weight, _, perplexity = rows[0]
    vote = test.vote(k, temperature, distances=distances, values=values)
    assert test.perplexity(vote, weight) == pytest.approx(perplexity, rel=2e-3)


def test_key_layers_are_measured_with_the_hidden_states_of_transformers(studies, place, lm, test, stored):
    table = studies["layer"].tables[0]
    assert [str(row[0]).split()[0] for row in table.rows] == [
        "ffn_input", "ffn_input_pre_norm", "attention_input", "attention_input_pre_norm", "output", "output_normed"
    ]  # fmt: skip

    def last_states(tokens):
        ids = torch.tensor([[lm.start_token, *tokens[:-1]]])
        with torch.inference_mode():
            return lm.model(ids, output_hidden_states=True).hidden_states[-1][0].double().numpy()

    order = sorted(Datastore.open(place / "store").catalog.documents(), key=lambda document: document.sha256)
    sample = [stored[1][one.first_entry : one.first_entry + one.entries].tolist() for one in order]
    assert max(map(len, sample)) <= lm.window().context  # one window each, so one pass is the same
    keys = np.concatenate([last_states(tokens) for tokens in sample])
    text = [lm.encode(document.text) for document in documents_of(place, "test")]
    own = Text(place, "test")
    own.keys = np.concatenate([last_states(tokens) for tokens in text])
    _, _, k, temperature, weight, _, perplexity = table.rows[-1]
    distances, values = own.search(keys, np.concatenate(sample), k)
    vote = own.vote(k, temperature, distances=distances, values=values)
    assert own.perplexity(vote, weight) == pytest.approx(perplexity, rel=2e-3)


def test_quantised_keys_are_compared_with_exact_ones(studies, stored, test, made):
    rows = studies["quantised"].tables[0].rows
    _, _, size, found, temperature, weight, _, perplexity = rows[0]
    assert rows[0][0] == "float16"  # as the store keeps them
    assert (size, found) == (2 * stored[0].shape[1], 1.0)
    distances, values = test.search(*stored, made.metadata["k"])
    vote = test.vote(made.metadata["k"], temperature, distances=distances, values=values)
    assert test.perplexity(vote, weight) == pytest.approx(perplexity, rel=2e-3)
    half = {row[1]: row for row in rows if row[0] == "SQfp16"}
    assert half["own distances"][2] == 2 * stored[0].shape[1]
    assert half["own distances"][7] == pytest.approx(perplexity, rel=0.02)
    assert half["reranked"][7] == pytest.approx(perplexity, rel=0.02)
    for spec in {row[0] for row in rows[1:]}:
        own, again = (row for row in rows if row[0] == spec)
        assert 0 < own[3] <= 1
        assert again[3] >= own[3]  # twice as many are looked at


@given(st.lists(st.lists(st.integers(-1, 12), min_size=3, max_size=3, unique=True), min_size=1, max_size=6), st.data())
def test_recall_counts_the_exact_neighbours_that_were_found(exact, data):
    found = [data.draw(st.lists(st.integers(0, 12), min_size=3, max_size=3)) for _ in exact]
    wanted = [{one for one in row if one >= 0} for row in exact]
    hits = sum(len(one & set(row)) for one, row in zip(wanted, found, strict=True))
    total = sum(map(len, wanted))
    assert recall(torch.tensor(found), torch.tensor(exact)) == pytest.approx(hits / max(1, total))


def test_pruned_store_has_the_reported_size_and_perplexity(studies, place, lm, tmp_path, made):
    rows = {row[0]: row for row in studies["pruning"].tables[0].rows}
    pruned = prune(Datastore.open(place / "store"), tmp_path / "merged", merge=8)
    _, keys, size, share, temperature, weight, _, perplexity = rows["merged"]
    assert (keys, size) == (pruned["keys_after"], pruned["bytes_after"])
    assert share == pruned["bytes_after"] / pruned["bytes_before"]
    options = {"k": made.metadata["k"], "knn_temperature": temperature, "lmbda": weight, "memories": "knn"}
    smaller = Mixture.open(tmp_path / "merged", lm, **options)
    assert smaller.evaluate(documents_of(place, "test")).perplexity == pytest.approx(perplexity, rel=1e-3)
    assert rows["the whole store"][2] == pruned["bytes_before"]
    assert not (place / "report" / "work" / "pruned").exists()


def test_mixtures_are_those_of_tune_and_eval(studies, place, lm, tmp_path):
    rows = {(row[0], row[1]): row for row in studies["memories"].tables[0].rows}
    shutil.copytree(place / "store", tmp_path / "store")
    second = f"decoder={place / 'second'}"
    wanted = {
        ("knn", "fixed"): "knn",
        ("knn + cache", "fixed"): "knn,cache",
        ("knn + cache + ngram + output + decoder=second", "fitted"): f"knn,cache,ngram,output,{second}",
        ("knn + cache + ngram + output + decoder=second", "gated"): f"knn,cache,ngram,output,{second}",
    }
    for (name, kind), memories in wanted.items():
        fresh = Mixture.open(tmp_path / "store", lm, memories=memories, use_tuned=False)
        tuning = fresh.tune(documents_of(place, "valid"), weights=kind, online=False)
        measured = Mixture.open(tmp_path / "store", lm, memories=memories).evaluate(documents_of(place, "test"))
        _, _, weight, on_valid, _, on_test = rows[name, kind]
        assert on_valid == pytest.approx(tuning.perplexity, rel=2e-3), (name, kind)
        assert on_test == pytest.approx(measured.perplexity, rel=1e-2), (name, kind)
        assert weight == pytest.approx(measured.lmbda, abs=2e-2), (name, kind)


def by_one_lambda(text, vote, fold):
    """Log-probabilities by a λ chosen on the other folds, each part having been right once before, by brute force."""
    model, lambdas = np.exp(text.model), np.linspace(0.0005, 0.9995, 1000)[:, None]
    found = np.zeros(len(model))
    for number in np.unique(fold):
        held = fold == number
        likely = np.log((1 - lambdas) * model[~held] + lambdas * vote[~held]).sum(1)
        weight = lambdas[np.argmax(likely + np.log(lambdas[:, 0]) + np.log1p(-lambdas[:, 0]))]
        found[held] = np.log((1 - weight) * model[held] + weight * vote[held])
    return found


def test_mixtures_are_compared_out_of_fold(studies, valid, made):
    table = studies["memories"].tables[0]
    out_of_fold_perplexities = [row[4] for row in table.rows]
    assert table.best == int(np.argmin(out_of_fold_perplexities))
    rows = {(row[0], row[1]): row for row in table.rows}
    fold = split_folds(torch.from_numpy(np.array(valid.trace.documents))).numpy()
    assert len(np.unique(fold)) == len(np.unique(valid.trace.documents)) == made.metadata["valid_documents"]
    knn = by_one_lambda(valid, valid.vote(made.metadata["k"], made.metadata["knn_temperature"]), fold)
    assert rows["knn", "fixed"][4] == pytest.approx(np.exp(-knn.mean()), rel=1e-3)
    p_memory = np.exp(np.asarray(valid.trace.memories[2].arrays["log_probs"][:, 0], dtype=np.float64))
    assert rows["ngram", "fixed"][4] == pytest.approx(np.exp(-by_one_lambda(valid, p_memory, fold).mean()), rel=1e-3)
    for name, kind, _, fitted, held_back, _ in table.rows:
        if kind in ("", "gated"):
            assert held_back == fitted
        else:
            assert held_back >= fitted * (1 - 1e-3), (name, kind)  # nothing is better by rows it was not fitted to
    assert "by weights fitted to other documents" in table.caption


def test_weights_out_of_fold_are_those_that_a_gate_starts_from(lm, valid):
    sweeps = sweep_all(valid.trace)
    seen = tabulate(valid.trace, choose_settings(valid.trace, sweeps, several=True))
    gated = fit_weights(seen, "gated", frequencies=torch.ones(lm.vocab_size))
    assert out_of_fold(seen, "fitted") == pytest.approx(gated.weights.gate.metadata["fitted_perplexity"], rel=1e-5)
    documents, near = seen.documents.numpy(), seen.memories[0].nearest
    fold, logs = split_folds(seen.documents).numpy(), seen.log_probs
    found = np.zeros(len(documents))
    for number in np.unique(fold):
        others = torch.from_numpy(fold != number)
        assert not set(documents[fold == number]) & set(documents[others.numpy()])
        buckets = Buckets.fit(logs[others], near[others])
        for row in np.flatnonzero(fold == number):
            p_memory = np.exp(logs[row].double().numpy())
            weights = buckets.table.numpy()[np.searchsorted(buckets.edges.numpy(), float(near[row]), side="right")]
            left = weights[np.isnan(p_memory)].sum()  # the weight of components that abstain goes to the model
            found[row] = np.log(np.nansum(p_memory * weights) + left * p_memory[0])
    assert out_of_fold(seen, "buckets") == pytest.approx(float(np.exp(-found.mean())), rel=1e-4)


def test_folds_are_described():
    assert describe_folds(torch.tensor([0] * 50 + [7] * 50)) == "by weights fitted to other documents"
    assert "other spans of the text" in describe_folds(torch.zeros(100, dtype=torch.long))
    assert "fitted to all of it" in describe_folds(torch.tensor([0, 0, 1, 1]))


def test_baselines_match_the_formula(studies, test, valid):
    study = studies["baselines"]
    for number, name in ((2, "ngram"), (3, "output"), (4, "decoder=second")):
        for text, which in ((valid, "valid"), (test, "test")):
            p_memory = np.exp(np.asarray(text.trace.memories[number].arrays["log_probs"][:, 0], dtype=np.float64))
            expected = [text.perplexity(p_memory, weight) for weight in study.numbers["lambda"]]
            np.testing.assert_allclose(study.numbers[name][which], expected, rtol=1e-5)
    for name, weight, on_valid, on_test in study.tables[0].rows:
        place = int(np.argmin(study.numbers[name]["valid"]))
        assert (weight, on_valid) == (study.numbers["lambda"][place], study.numbers[name]["valid"][place])
        assert on_test == study.numbers[name]["test"][place]


def test_trained_matrix_predicts_what_its_file_contains(studies, place, test):
    store = Datastore.open(place / "store")
    for r, rows, numbers, weight, _, perplexity in studies["output"].tables[0].rows:
        (folder,) = (place / "report" / "work").glob(f"output-r{r}-*")
        file = load_file(folder / "output.safetensors")
        assert file["weight"].shape == (rows, store.model["width"])
        assert numbers == file["weight"].size + file["bias"].size
        scores = (test.keys - file["centre"]) @ file["weight"].T.astype(np.float64) + file["bias"]
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        p_memory = (shares * (file["words"][None] == test.targets[:, None])).sum(1)
        assert test.perplexity(p_memory, weight) == pytest.approx(perplexity, rel=1e-4)


def test_no_mixture_beats_the_oracle(studies, test, made):
    rows = [row[1] for row in studies["oracle"].tables[0].rows]
    vote = test.vote(made.metadata["k"], made.metadata["knn_temperature"])
    best = np.maximum(np.exp(test.model), vote)
    assert rows[3] == pytest.approx(float(np.exp(-np.log(best).mean())), rel=1e-4)
    assert studies["oracle"].numbers["store_better"] == pytest.approx((vote > np.exp(test.model)).mean(), abs=1e-3)
    assert rows[3] <= min(studies["lambda"].numbers["test"]) * (1 + 1e-5)
    assert rows[1] == pytest.approx(test.perplexity(vote, made.metadata["lambda"]), rel=1e-4)
    for row in studies["memories"].tables[0].rows:
        assert rows[4] <= row[5] * (1 + 1e-5), row
    assert rows[4] <= rows[3]


def test_searches_are_skipped_as_in_eval(studies, place, lm, tmp_path):
    rows = studies["skip"].tables[0].rows
    everything = studies["memories"].tables[0].rows[-1]
    assert everything[1] == "gated"
    assert rows[0][:2] == [0.0, 0.0]
    assert rows[0][2] == pytest.approx(everything[5])
    assert rows[-1][:2] == [1.0, 1.0]
    shutil.copytree(place / "store", tmp_path / "store")
    memories = f"knn,cache,ngram,output,decoder={place / 'second'}"
    fresh = Mixture.open(tmp_path / "store", lm, memories=memories, use_tuned=False)
    fresh.tune(documents_of(place, "valid"), weights="gated", online=False)
    blind = Mixture.open(tmp_path / "store", lm, memories=memories, options=MixtureOptions(skip_fraction=1.0))
    assert rows[-1][2] == pytest.approx(blind.evaluate(documents_of(place, "test")).perplexity, rel=1e-2)


def test_gains_of_all_groups_add_up_to_the_gain(studies, test, made, stored):
    study, metadata = studies["where"], made.metadata
    mixed = (1 - metadata["lambda"]) * np.exp(test.model) + metadata["lambda"] * test.vote(
        metadata["k"], metadata["knn_temperature"]
    )
    gain = np.log(mixed) - test.model
    assert study.numbers["total"] == pytest.approx(gain.sum(), rel=1e-4)
    for table in study.tables:
        assert sum(row[1] for row in table.rows) == len(gain)
        assert sum(row[5] for row in table.rows) == pytest.approx(gain.sum(), rel=1e-4)
        assert sum(row[1] * row[4] for row in table.rows) == pytest.approx(gain.sum(), rel=1e-4)
        for row in table.rows:
            assert np.log(row[2] / row[3]) == pytest.approx(row[4], abs=1e-6)
    counts = Counter(stored[1].tolist())
    often = np.array([counts[target] for target in test.targets.tolist()])
    groups = {"0": often == 0, "1 to 9": (often > 0) & (often < 10), "10 to 99": (often >= 10) & (often < 100)}
    rows = {row[0]: row for row in study.tables[0].rows}
    for label, own in groups.items():
        assert (label in rows) == own.any()
        if own.any():
            assert rows[label][1] == own.sum()
            assert rows[label][4] == pytest.approx(gain[own].mean(), rel=1e-3)
    length = Counter(test.trace.documents.tolist())
    thirds = Counter(
        int(position * 3 // length[document])
        for document, position in zip(test.trace.documents.tolist(), test.trace.positions.tolist(), strict=True)
    )
    assert [row[1] for row in study.tables[3].rows] == [thirds[part] for part in range(3)]


def gained(change):
    """The cells of a row of the study of gains, token by token."""
    higher, lower = [one for one in change if one > 0], [-one for one in change if one < 0]
    net = sum(change)
    means = [sum(own) / len(own) if own else None for own in (higher, lower)]
    counts = [len(change), len(higher) / len(change), means[0], len(lower) / len(change), means[1]]
    return [*counts, net / len(change), net, np.exp(-net / len(change))]


def same_row(row, expected):
    """Whether the cells are the same; None where there is no token to take the mean of."""
    places = [place for place, cell in enumerate(expected) if cell is not None]
    assert [cell is None for cell in row] == [cell is None for cell in expected]
    return [row[place] for place in places] == pytest.approx([expected[place] for place in places], rel=1e-3, abs=1e-6)


def online_log_probs(by_expert, begins, prior, rate):
    """Fixed share over experts, token by token, from the (N, E) log-probabilities of the tokens by each."""
    found, share = [], None
    for probs, first in zip(np.exp(by_expert), begins, strict=True):
        share = prior if first else share
        joint = share * probs
        found.append(np.log(joint.sum()))
        share = (1 - rate) * joint / joint.sum() + rate * prior
    return np.array(found)


def with_cache(table, log_probs, weight):
    """Return the (N,) log-probabilities with this weight of the cache, in equal parts of all its components."""
    probs = np.exp(log_probs)
    (number,) = [number for number, memory in enumerate(table.memories) if memory.kind == "cache"]
    own = probs[:, table.component_slices[number]]
    parts = np.where(np.isnan(own), probs[:, :1], own)  # the weight of one that abstains goes to the model
    return np.log((1 - weight) * probs[:, 0] + weight * parts.mean(1))


def test_gains_and_losses_are_those_of_the_mixtures(studies, test, valid, made, lm, place):
    study, metadata = studies["gains"], made.metadata
    mixed = np.log(
        (1 - metadata["lambda"]) * np.exp(test.model)
        + metadata["lambda"] * test.vote(metadata["k"], metadata["knn_temperature"])
    )
    rows = study.tables[0].rows
    assert rows[0][0] == f"knn, λ = {metadata['lambda']:.2f}"
    assert same_row(rows[0][1:], gained(mixed - test.model))
    # The same networks by their own formula: weights of components that abstain go to the model.
    settings = choose_settings(valid.trace, sweep_all(valid.trace), several=True)
    tables = [tabulate(text.trace, settings) for text in (valid, test)]
    store = Datastore.open(place / "store")
    weights = fit_weights(tables[0], "gated", frequencies=token_frequencies(store)).weights
    online, _ = choose_online(tables[0], weights)
    scores = score_table(tables[1], weights)
    log_probs, by_row = (one.double().numpy() for one in (scores.components, scores.weights))
    gated = np.log(np.nansum(np.exp(log_probs) * by_row, 1))
    begins = np.asarray(test.trace.positions) == 0
    caches = [with_cache(tables[1], log_probs, weight) for weight in (0.02, 0.2)]
    by_expert = np.stack([test.model, gated, *caches], 1)
    change = online_log_probs(by_expert, begins, prior_by_hand(online, 1, 1), online.switch_rate) - test.model
    assert same_row(rows[1][1:], gained(gated - test.model))
    assert same_row(rows[2][1:], gained(change))
    assert rows[1][8] == pytest.approx(studies["memories"].tables[0].rows[-1][5] / metadata["base_perplexity"])
    check_groups(study, change, test, Counter(np.concatenate([lm.encode(one.text) for one in STORED]).tolist()), lm)


def check_groups(study, change, test, counts, lm):
    often, positions = np.array([counts[one] for one in test.targets.tolist()]), np.asarray(test.trace.positions)
    pieces = np.array(lm.token_texts(test.targets.tolist()))
    groups = {
        "frequency": {"0": often == 0, "1 to 9": (often >= 1) & (often <= 9), "10 to 99": (often >= 10) & (often < 100)}
        | {"100 to 999": (often >= 100) & (often < 1000), "1,000 or more": often >= 1000},
        "position": {"0 to 15": positions < 16, "16 to 127": (positions >= 16) & (positions < 128)}
        | {"128 to 1,023": (positions >= 128) & (positions < 1024), "1,024 or more": positions >= 1024},
    }
    for number, key in ((1, "frequency"), (3, "position")):
        rows = {row[0]: row[1:] for row in study.tables[number].rows}
        assert set(rows) == {label for label, own in groups[key].items() if own.any()}
        for label, row in rows.items():
            assert same_row(row, gained(change[groups[key][label]])), label
    blank = np.array([bool(re.fullmatch(r"\s+", piece)) for piece in pieces])
    digits = np.array([bool(re.search(r"\d", piece)) and not re.search(r"[^\W\d]", piece) for piece in pieces])
    signs = np.array([bool(re.fullmatch(r"\s*[^\w\s]+\s*", piece)) for piece in pieces])
    rows = {row[0]: row[1:] for row in study.tables[2].rows}
    for label, own in (("white space", blank), ("number", digits), ("punctuation or symbol", signs)):
        assert (label in rows) == own.any(), label
        if own.any():
            assert same_row(rows[label], gained(change[own])), label
    total = study.numbers
    for table in study.tables[1:]:
        assert sum(row[1] for row in table.rows) == len(change)
        assert sum(row[7] for row in table.rows) == pytest.approx(total["gain"] - total["loss"], rel=1e-12)
    for key in ("frequency", "class", "position"):
        for name in ("tokens", "improved", "worse", "gain", "loss"):
            assert sum(one[name] for one in total[key].values()) == pytest.approx(total[name], rel=1e-12), (key, name)


def test_examples_are_the_tokens_with_the_most_and_the_least_gain(studies, test, made, place, lm, stored):
    metadata = made.metadata
    vote = test.vote(metadata["k"], metadata["knn_temperature"])
    mixed = (1 - metadata["lambda"]) * np.exp(test.model) + metadata["lambda"] * vote
    gain = np.log(mixed) - test.model
    most, least = studies["examples"].examples["gained most"], studies["examples"].examples["lost most"]
    assert most[0].gain == pytest.approx(gain.max(), rel=1e-3)
    assert least[0].gain == pytest.approx(gain.min(), abs=0.011)
    assert [one.gain for one in most] == sorted((one.gain for one in most), reverse=True)
    store = Datastore.open(place / "store")
    texts = {document.source: document.text for document in documents_of(place, "test")}
    for example in (*most, *least):
        assert len({one.target for one in most}) == len(most)
        expected = (1 - metadata["lambda"]) * example.p_lm + metadata["lambda"] * example.p_knn
        assert example.p == pytest.approx(expected, rel=1e-3)
        assert example.context + example.target in texts[example.document]
        weights = [one.weight for one in example.neighbours]
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) <= 1 + 1e-6
        first, second = example.neighbours[:2]
        ratio = np.exp((first.distance - second.distance) / metadata["knn_temperature"])
        assert second.weight / first.weight == pytest.approx(ratio, rel=1e-3)
        for one in example.neighbours:
            assert one.agrees == (one.token == example.target)
            (document,) = (found for found in STORED if found.source == one.source)
            assert one.before + one.token + one.after in document.text
    assert store.entry_count == len(stored[1])


def test_commands_of_the_report_give_its_figures(studies, capfd):
    """Only `eval`: the others are covered by what they are made of."""
    expected = {
        "lambda": studies["lambda"].tables[0].rows[studies["lambda"].tables[0].best][2],
        "metric": studies["metric"].tables[0].rows[1][6],
        "oracle": studies["oracle"].tables[0].rows[1][1],
        "output": studies["output"].tables[0].rows[studies["output"].tables[0].best][5],
    }
    for name, perplexity in expected.items():
        command = shlex.split(studies[name].command.splitlines()[-1])
        assert run([*command[1:], "--json"]) == 0, command
        found = json.loads(capfd.readouterr().out)
        assert found["perplexity"] == pytest.approx(perplexity, rel=1e-3), name
        if name == "oracle":
            assert found["oracle_perplexity"] == pytest.approx(studies["oracle"].tables[0].rows[3][1], rel=1e-3)


def test_second_run_reads_nothing_and_gives_the_same_report(made, place, lm, model_folder, tmp_path):
    page, forwards = made.page.read_bytes(), Forwards(lm)
    try:
        again = make(place, lm, model_folder)
        assert forwards.count == 0
        assert again.as_dict() == made.as_dict()
        assert again.page.read_bytes() == page
        # A study that is broken is made again, out of what was read.
        shutil.copytree(place / "report" / "work", tmp_path / "copy" / "work")
        (tmp_path / "copy" / "work" / "lambda.json").write_text("{")
        again = make(place, lm, model_folder, out=tmp_path / "copy", studies=["lambda"])
        assert forwards.count == 0
        old, new = (found.as_dict()["studies"]["lambda"] for found in (made, again))
        assert {**new, "seconds": 0, "command": ""} == {**old, "seconds": 0, "command": ""}
    finally:
        forwards.hook.remove()


@contextmanager
def _bar():
    yield lambda _: None


class Bars:
    """Notes what goes on, and stops the work where it is told to."""

    def __init__(self, stop=None):
        self.names = []
        self.stop = stop

    def __call__(self, what, **_):
        self.names.append(what)
        if what == self.stop:
            raise KeyboardInterrupt
        return _bar()


def test_interrupted_report_resumes(place, lm, model_folder, tmp_path):
    few = {"out": tmp_path / "stopped", "second_lm": None, "memories": "knn", "studies": ["lambda", "k", "size"]}
    with pytest.raises(KeyboardInterrupt):
        make(place, lm, model_folder, progress=Bars("size: searching"), **few)
    assert not (tmp_path / "stopped" / "index.html").exists()
    bars, forwards = Bars(), Forwards(lm)
    try:
        found = make(place, lm, model_folder, progress=bars, **few)
        assert forwards.count == 0
    finally:
        forwards.hook.remove()
    assert "tracing" not in bars.names
    assert not any(name.startswith(("lambda: ", "k: ")) for name in bars.names)
    assert [study.name for study in found.studies] == ["lambda", "k", "size"]
    # With other text, all of it is done again, and what was read before is gone.
    bars = Bars()
    other = make(place, lm, model_folder, progress=bars, text=documents(4, words=12, start=200), **few)
    assert "tracing" in bars.names
    assert other.metadata["base_perplexity"] != found.metadata["base_perplexity"]
    assert len(list((tmp_path / "stopped" / "work").glob("texts-*"))) == 1


def test_keys_are_in_the_order_of_the_text_for_any_packing(place, lm, model_folder, tmp_path, test, monkeypatch):
    monkeypatch.setattr("knnlm.evaluation.evaluate._GROUP_TOKENS", 60)  # tokens that are packed into batches together
    make(place, lm, model_folder, out=tmp_path / "packed", memories="knn", second_lm=None, studies=["k"])
    (file,) = (tmp_path / "packed" / "work").glob("texts-*/test/keys.npy")
    np.testing.assert_allclose(np.load(file), test.keys, atol=1e-4)


def test_skipped_studies_are_listed_with_the_reason(place, lm, model_folder, tmp_path):
    lone = build(documents(1, words=12), tmp_path / "lone", lm=lm)
    found = report(lone.path, TEXT[:3], out=tmp_path / "out", lm=lm, memories="knn", studies=["size", "baselines", "k"])
    assert [study.name for study in found.studies] == ["k"]
    assert set(found.skipped) == {"size", "baselines"}
    page = found.page.read_text()
    for reason in found.skipped.values():
        assert reason in page


def test_error_in_one_study_does_not_affect_the_others(place, lm, model_folder, tmp_path, monkeypatch):
    def broken(context):
        raise DatastoreError(f"{context.store.path.name} cannot be <read>.")

    monkeypatch.setitem(STUDIES, "lambda", broken)
    few = {"second_lm": None, "memories": "knn", "studies": ["lambda", "k"], "out": tmp_path / "broken"}
    found = make(place, lm, model_folder, **few)
    assert [study.name for study in found.studies] == ["k"]
    assert found.skipped == {"lambda": "store cannot be <read>."}
    assert "store cannot be &lt;read&gt;." in found.page.read_text()
    monkeypatch.undo()
    assert make(place, lm, model_folder, **few).skipped == {}


def test_results_of_one_precision_are_not_used_for_another(place, tmp_path):
    # Weights that bfloat16 holds exactly are the same model in both precisions, but do not give the same numbers.
    rounded = tiny("llama").bfloat16().float()
    rounded.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    few = {"second_lm": None, "memories": "knn", "studies": ["k"]}
    single = make(place, None, tmp_path / "model", out=tmp_path / "one", dtype="float32", **few)
    half = make(place, None, tmp_path / "model", out=tmp_path / "one", dtype="bfloat16", **few)
    alone = make(place, None, tmp_path / "model", out=tmp_path / "other", dtype="bfloat16", **few)
    assert half.metadata["base_perplexity"] == alone.metadata["base_perplexity"] != single.metadata["base_perplexity"]
    assert half.studies[0].tables == alone.studies[0].tables


def test_results_of_one_model_are_not_used_for_another(place, model_folder, lm, tmp_path):
    few = {"second_lm": None, "memories": "knn", "studies": ["k"], "out": tmp_path / "one"}
    make(place, lm, model_folder, **few)
    another = CausalLM(tiny("llama", seed=5), tiny_tokenizer(), name=lm.name)
    with pytest.raises(ModelMismatch):
        make(place, another, model_folder, **few)


def test_report_works_with_a_model_of_fewer_layers(model_folder, tmp_path):
    build(STORED[:6], tmp_path / "store", lm=CausalLM.open(str(model_folder)))
    config = tiny("llama").config
    config.num_hidden_layers = 2  # the store reads the third layer of its own model
    short = randomise(lambda: type(tiny("llama"))(config), seed=3)
    tokenizer = tiny_tokenizer()
    for part in (short, tokenizer):
        part.save_pretrained(tmp_path / "short")
    options = {"valid": TEXT[:2], "memories": "knn", "studies": ["k"], "model": str(tmp_path / "short")}
    found = report(tmp_path / "store", TEXT[2:4], out=tmp_path / "out", **options)
    assert [study.name for study in found.studies] == ["k"]
    logs = []
    for document in TEXT[2:4]:
        tokens = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        window = Datastore.open(tmp_path / "store").window
        _, read = read_token_by_token(short, short.model.layers[-1].mlp, tokens, start_token=1, **window)
        logs.append(np.log(read[range(len(tokens)), tokens]))
    assert found.metadata["base_perplexity"] == pytest.approx(np.exp(-np.concatenate(logs).mean()), rel=1e-4)


def test_documents_are_shown_with_their_current_names(place, lm, model_folder, tmp_path):
    few = {"second_lm": None, "memories": "knn", "studies": ["examples"], "out": tmp_path / "named"}
    make(place, lm, model_folder, **few)
    renamed = [replace(one, source=f"new-{number}.txt") for number, one in enumerate(TEXT)]
    found = make(place, lm, model_folder, text=renamed, **few)
    shown = {example.document for kind in found.studies[0].examples.values() for example in kind}
    assert shown
    assert shown <= {one.source for one in renamed}


def test_unfinished_output_matrix_is_not_mixed_in(lm, model_folder, tmp_path):
    build(STORED[:4], tmp_path / "store", lm=lm)
    (tmp_path / "store" / "output").mkdir()
    (tmp_path / "store" / "output" / "writer.lock").touch()
    found = report(tmp_path / "store", TEXT[:4], out=tmp_path / "out", lm=lm, model=str(model_folder), studies=["k"])
    assert found.metadata["memories"] == ["knn", "cache", "ngram"]


def test_concurrent_reports_in_one_folder_are_refused(place, lm, model_folder, tmp_path):
    few = {"second_lm": None, "memories": "knn", "studies": ["k"], "out": tmp_path / "busy"}
    with writer_lock(tmp_path / "busy" / "work", create=True), pytest.raises(DatastoreBusy, match="busy/work"):
        make(place, lm, model_folder, **few)
    assert make(place, lm, model_folder, **few).page.exists()


def test_memories_of_the_same_name_get_distinct_names(place, lm, model_folder, tmp_path):
    assert name_memories(["knn", "decoder=/a/m", "decoder=/b/m/", "knn=/a/m", "cache=20"]) == [
        "knn", "decoder=a/m", "decoder=b/m", "knn=m", "cache=20"
    ]  # fmt: skip
    assert name_memories(["decoder=m", "decoder=a/m", "decoder=/m"]) == ["decoder=m", "decoder=a/m", "decoder=/m"]
    shutil.copytree(place / "second", tmp_path / "second")
    memories = f"knn,decoder={place / 'second'},decoder={tmp_path / 'second'}"
    found = make(place, lm, model_folder, memories=memories, second_lm=None, out=tmp_path / "x", studies=["baselines"])
    names = [row[0] for row in found.studies[0].tables[0].rows]
    assert len(set(names)) == 3
    assert [name.endswith("/second") for name in names] == [False, True, True]


@given(st.lists(st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3), min_size=1, max_size=6))
def test_no_two_memories_ever_have_one_name(paths):
    labels = sorted({f"decoder={'/'.join(path)}" for path in paths})
    names = name_memories(labels)
    assert len(set(names)) == len(labels)


class Outline(HTMLParser):
    """Checks that elements are closed in order, and notes links, pictures and ids."""

    VOID = ("meta", "img", "source")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.links, self.ids, self.data = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.links += [found[name] for name in ("href", "src", "srcset") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.data.append(data)


def check_page(text):
    """A page that is well formed, needs nothing from elsewhere, and runs nothing."""
    page = Outline(text)
    assert page.stack == []
    assert "script" not in page.tags
    assert not {"iframe", "object", "link", "b>id", "i"} & set(page.tags)
    for link in page.links:
        assert link.startswith(("#", "data:image/png;base64,")), link
    for url in re.findall(r"url\(|@import", text):
        raise AssertionError(url)
    assert len(set(page.ids)) == len(page.ids)
    return page


def test_page_is_self_contained_and_has_every_study(made):
    text = made.page.read_text(encoding="utf-8")
    page = check_page(text)
    for study in made.studies:
        assert f"#{study.name}" in page.links
        assert study.name in page.ids
        assert study.title in page.data
        assert study.finding in page.data
        assert study.command in page.data
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "chosen by a hash" in text


def test_plots_are_files_beside_the_page_and_embedded(made):
    text = made.page.read_text(encoding="utf-8")
    names = [
        study.name if len(study.plots) == 1 else f"{study.name}-{number + 1}"
        for study in made.studies
        for number in range(len(study.plots))
    ]
    assert len(names) > 15
    for name in names:
        data = (made.page.parent / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert base64.b64encode(data).decode() in text


def test_numbers_are_all_in_the_json(made):
    found = json.loads((made.page.parent / "report.json").read_text())
    assert found == made.as_dict()
    assert set(found["studies"]) == set(STUDIES)


def test_markup_in_text_is_escaped(tmp_path):
    evil = '"><script>alert(1)</script><img src="http://evil.example/x.png" onerror=\'x\'>&amp;'
    neighbour = ExampleNeighbour(0.5, 1.0, evil, True, evil, evil, evil, evil)
    example = Example(evil, evil, evil, 0.1, 0.2, 0.3, 1.0, [neighbour])
    plot = Plot("bars", evil, evil, evil, [Line(evil, [evil, "b"], [1.0, None])])
    table = Table([evil], [""], [[evil], [None]], caption=evil)
    study = Study("k", evil, evil, evil, evil, [table], [plot], {evil: [example]}, [evil])
    assert Study.from_dict(json.loads(json.dumps(study.as_dict()))) == study
    metadata = dict.fromkeys(["stored_tokens", "stored_documents", "test_tokens", "test_documents", "k"], 1)
    metadata |= dict.fromkeys(["valid_tokens", "valid_documents"], 1) | {"warnings": [evil], "at_edge": [evil]}
    metadata |= {"store": evil, "model": evil, "memories": [evil], "split": evil, "quick": True}
    metadata |= {"knn_temperature": 1.0, "lambda": 0.5, "base_perplexity": 2.0}
    drawings = {"k": [draw(plot)]}
    write_html(tmp_path / "x.html", metadata=metadata, studies=[study], skipped={evil: evil}, drawings=drawings)
    page = check_page((tmp_path / "x.html").read_text())
    assert page.data.count(evil) >= 10
    assert "http" not in " ".join(page.links)


def test_text_that_is_in_the_store_causes_a_warning(place, lm, model_folder, tmp_path):
    found = make(place, lm, model_folder, out=tmp_path / "known", text=STORED[:4], studies=["k"], second_lm=None)
    assert found.metadata["leaked_documents"] == 4
    assert "in the store itself" in found.page.read_text()
    assert "in the store itself" not in (place / "report" / "index.html").read_text()


def test_document_split_in_two_is_found_in_the_store_as_a_whole(place, lm, model_folder, tmp_path):
    few = {"studies": ["k"], "second_lm": None, "memories": "knn"}
    found = make(place, lm, model_folder, out=tmp_path / "known", text=STORED[:1], **few)
    assert found.metadata["leaked_documents"] == 1
    assert "1 document of the texts is in the store itself" in found.page.read_text()
    other = make(place, lm, model_folder, out=tmp_path / "new", text=TEXT[:1], **few)
    assert other.metadata["leaked_documents"] == 0


def test_tuning_text_in_the_held_out_text_is_refused_or_causes_a_warning(place, lm, model_folder, tmp_path, capfd):
    copies = [replace(one, id=f"copy of {one.id}") for one in TEXT]
    with pytest.raises(CorpusError, match="Every held-out document is also in --valid"):
        make(place, lm, model_folder, out=tmp_path / "same", valid=[*copies, STORED[0]])
    few = {"studies": ["k"], "second_lm": None, "memories": "knn"}
    found = make(place, lm, model_folder, out=tmp_path / "some", valid=copies[:2], **few)
    assert found.metadata["shared_documents"] == 2
    (warning,) = found.as_dict()["warnings"]
    assert warning.startswith("2 of the 6 documents held out are in the tuning text too")
    assert warning in found.page.read_text()
    files = [tmp_path / "valid.jsonl", tmp_path / "test.jsonl"]
    for file, own in zip(files, (copies[:2], TEXT), strict=True):
        file.write_text("\n".join(json.dumps({"id": one.id, "text": one.text}) for one in own))
    options = ["--memories", "knn", "--studies", "k", "--model", str(model_folder), "--out", str(tmp_path / "cli")]
    assert run(["report", str(place / "store"), str(files[1]), "--valid", str(files[0]), *options]) == 0
    assert "2 of the 6 documents held out" in " ".join(capfd.readouterr().out.split())


def test_settings_at_the_edge_of_the_grid_are_noted(made):
    expected = []
    metadata, study = made.metadata, {study.name: study for study in made.studies}
    temperatures = [row[0] for row in study["knn_temperature"].tables[0].rows]
    expected += ["knn_temperature"] if metadata["knn_temperature"] in (temperatures[0], temperatures[-1]) else []
    expected += ["lambda"] if metadata["lambda"] == study["lambda"].numbers["lambda"][-1] else []
    expected += ["k"] if metadata["k"] == study["k"].tables[0].rows[-1][0] else []
    assert metadata["at_edge"] == expected
    assert (f"last one tried of: {', '.join(expected)}." in made.page.read_text()) == bool(expected)


few_texts = st.lists(st.sampled_from(["a", "b b", "c c c c", "d" * 30]), min_size=2, max_size=12)
any_texts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=2, max_size=12)
texts = (any_texts | few_texts).filter(lambda given: len(set(given)) > 1)


@given(texts)
def test_text_is_split_into_two_halves_of_about_the_same_size(given_texts):
    whole = [Document(str(number), "x", text) for number, text in enumerate(given_texts)]
    split = split_texts(whole, None, limit=None)
    assert split.valid
    assert split.test
    assert sorted(map(id, (*split.valid, *split.test))) == sorted(map(id, whole))
    sizes = [sum(len(document.text) for document in half) for half in (split.valid, split.test)]
    assert abs(sizes[0] - sizes[1]) <= max(len(text) * times for text, times in Counter(given_texts).items())
    assert not {one.text for one in split.valid} & {one.text for one in split.test}
    again = split_texts(list(reversed(whole)), None, limit=None)
    assert {one.text for one in again.valid} == {one.text for one in split.valid}


def test_single_document_is_cut_in_its_middle():
    text = "one two three four five six"
    split = split_texts([Document("a", "a.txt", text)], None, limit=None)
    assert split.valid[0].text + split.test[0].text == text
    assert split.valid[0].text == "one two three"
    assert "first half" in split.description
    same = split_texts([Document(name, f"{name}.txt", text) for name in "abc"], None, limit=None)
    assert [one.text for one in same.valid] == ["one two three"] * 3
    assert [one.id for one in same.test] == ["a#1", "b#1", "c#1"]
    with pytest.raises(CorpusError, match="too short"):
        split_texts([Document("a", "a.txt", "x")], None, limit=None)
    with pytest.raises(CorpusError, match="no text"):
        split_texts([], None, limit=None)


def test_tuning_text_can_be_given(place, lm, model_folder, tmp_path):
    valid = documents(2, words=12, start=300)
    few = {"out": tmp_path / "given", "studies": ["k"], "second_lm": None, "memories": "knn"}
    found = make(place, lm, model_folder, valid=valid, **few)
    assert found.metadata["valid_tokens"] == sum(len(lm.encode(document.text)) for document in valid)
    assert found.metadata["test_tokens"] == sum(len(lm.encode(document.text)) for document in TEXT)
    limited = make(place, lm, model_folder, valid=valid, limit=10, **{**few, "out": tmp_path / "limited"})
    assert limited.metadata["test_documents"] == limited.metadata["valid_documents"] == 1


def test_command_writes_a_page(place, model_folder, tmp_path, capfd):
    file = tmp_path / "held-out.jsonl"
    file.write_text("\n".join(json.dumps({"id": one.id, "text": one.text}) for one in TEXT))
    common = ["report", str(place / "store"), str(file), "--out", str(tmp_path / "page"), "--memories", "knn"]
    common += ["--studies", "k,lambda", "--quick", "--model", str(model_folder)]
    assert run(common) == 0
    shown = capfd.readouterr().out
    assert "index.html" in "".join(shown.split())
    assert run([*common, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == json.loads((tmp_path / "page" / "report.json").read_text())
    assert list(found["studies"]) == ["lambda", "k"]
    assert run([*common[:-3], "--studies", "nonsense"]) == 2
    assert "The studies are memories, lambda, k" in capfd.readouterr().err


def test_invalid_options_are_refused_before_anything_is_read(place, lm, monkeypatch, tmp_path):
    with pytest.raises(ParameterError, match="no study 'nonsense'"):
        report(place / "store", TEXT, out=tmp_path / "x", lm=lm, studies=["nonsense"])
    with pytest.raises(ParameterError, match="A report needs the memory knn"):
        report(place / "store", TEXT, out=tmp_path / "x", lm=lm, memories="cache")
    with pytest.raises(ParameterError, match="at least 1 token"):
        report(place / "store", TEXT, out=tmp_path / "x", lm=lm, limit=0)
    for package in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtra, match=package + ".*" + re.escape("pip install 'knnlm[report]'")):
                report(place / "store", TEXT, out=tmp_path / "x", lm=lm)
    assert not (tmp_path / "x" / "index.html").exists()


def test_dollar_signs_are_drawn_literally():
    price = "decoder=$\\foo$ and $x$"
    lines = [Line(price, [1, 2], [1.0, 2.0])]
    assert draw(Plot("lines", price, price, price, lines, levels={price: 1.5}, mark=[1.0, 1.0])).startswith(b"\x89PNG")
    assert draw(Plot("points", price, price, price, lines, log_x=True)).startswith(b"\x89PNG")
    bars = [Line(price, [price, "b"], [1.0, 2.0])]
    assert draw(Plot("bars", price, price, price, bars, levels={price: 1.5})).startswith(b"\x89PNG")


def test_perplexity_of_a_worse_mixture_is_called_higher(made, tmp_path):
    (study,) = (study for study in made.studies if study.name == "memories")
    rows = [[*row[:5], 1.03 * made.metadata["base_perplexity"]] for row in study.tables[0].rows]
    worse = replace(study, tables=[replace(study.tables[0], rows=rows, best=1)])
    write_html(tmp_path / "x.html", metadata=made.metadata, studies=[worse], skipped={}, drawings={"memories": []})
    assert "of the held-out text, 3.0% higher with knn (fixed)" in (tmp_path / "x.html").read_text()


def test_plots_are_deterministic():
    lines = [Line("a", [1, 10, 100], [3.0, 2.0, 1.0]), Line("b", [1, 10, 100], [None, 1e9, 2.0])]
    plot = Plot("lines", "title", "x", "y", lines, log_x=True, levels={"level": 2.5}, mark=[10.0, 2.0])
    assert draw(plot) == draw(plot)
    assert draw(plot) != draw(replace(plot, title="another"))


def test_work_of_a_report_stays_in_its_folder(made, place):
    assert {path.name for path in Path(place).iterdir()} == {"store", "initial", "second", "report"}
