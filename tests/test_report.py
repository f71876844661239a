"""A report: every number is computed again from the papers' formulas, the page is sound, and nothing is done twice."""

from __future__ import annotations

import base64
import json
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

import knnlm.evaluation
from conftest import documents
from knnlm import CausalLM, Datastore, Document, Mixture, Trace, build, evaluate, tune
from knnlm.cli.app import run
from knnlm.distill.output import distill_output
from knnlm.errors import CorpusError, MissingExtra, ParameterError
from knnlm.prune import prune
from knnlm.report import STUDIES, report
from knnlm.report.page import write_page
from knnlm.report.plots import draw
from knnlm.report.shrinking import recall
from knnlm.report.study import Example, Line, Neighbour, Plot, Study, Table
from knnlm.report.texts import gather
from models import tiny, tiny_tokenizer
from oracle import softmax

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
    """A folder with a memory, its trained output matrix, and a second model."""
    folder = tmp_path_factory.mktemp("report")
    store = build(STORED, folder / "memory", lm=lm, segment_rows=500)
    distill_output(store, folder / "memory" / "output", device="cpu")
    second = CausalLM(tiny("llama", seed=1), tiny_tokenizer(), name="second")
    second.model.save_pretrained(folder / "second")
    second.tokenizer.save_pretrained(folder / "second")
    return folder


def make(place, lm, model_folder, **options):
    arguments = {"lm": lm, "model": str(model_folder), "second_lm": str(place / "second"), **options}
    out = arguments.pop("out", place / "report")
    text = arguments.pop("text", TEXT)
    return report(place / "memory", text, out, **arguments)


@pytest.fixture(scope="module")
def made(place, lm, model_folder):
    """The whole report."""
    return make(place, lm, model_folder)


@pytest.fixture(scope="module")
def studies(made):
    return {study.name: study for study in made.studies}


class Text:
    """One of the two texts as it was read: what the model said, and the keys."""

    def __init__(self, place, name):
        (folder,) = (place / "report" / "work").glob(f"texts-*/{name}")
        self.trace = Trace.open(folder / "trace")
        self.keys = np.load(folder / "keys.npy").astype(np.float64)
        self.model = np.asarray(self.trace.log_p, dtype=np.float64)
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
    store = Datastore.open(place / "memory")
    keys = store.take(torch.arange(store.key_count)) + (0 if store.offset is None else store.offset)
    return keys.double().numpy(), store.values(torch.arange(store.rows)).numpy()


def test_every_study_is_made(made):
    assert [study.name for study in made.studies] == list(STUDIES)
    assert made.left_out == {}
    for study in made.studies:
        assert study.finding.endswith(".")
        assert study.command.startswith("knnlm ")
        assert study.tables or study.examples


def test_every_lambda_has_the_perplexity_of_the_formula(studies, made, valid, test):
    study, facts = studies["lambda"], made.facts
    for name, text in (("valid", valid), ("test", test)):
        vote = text.vote(facts["k"], facts["temperature"])
        expected = [text.perplexity(vote, weight) for weight in study.numbers["lambda"]]
        np.testing.assert_allclose(study.numbers[name], expected, rtol=2e-4)
    chosen = study.tables[0].rows[study.tables[0].best]
    assert chosen[0] == facts["lambda"] == study.numbers["lambda"][int(np.argmin(study.numbers["valid"]))]
    assert facts["base_perplexity"] == pytest.approx(float(np.exp(-test.model.mean())))


def test_settings_are_chosen_on_one_text_and_measured_on_the_other(studies, valid, test, made):
    temperatures = [row[0] for row in studies["temperature"].tables[0].rows]
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
    for temperature, weight, _, on_test in studies["temperature"].tables[0].rows:
        assert test.perplexity(test.vote(made.facts["k"], temperature), weight) == pytest.approx(on_test, rel=1e-4)


def documents_of(place, name):
    lines = (place / "report" / "work" / f"{name}.jsonl").read_text().splitlines()
    return [Document(**json.loads(line)) for line in lines]


def test_a_growing_store_ends_as_the_whole_and_begins_as_a_part(studies, place, lm, stored, test, made):
    rows, k = studies["size"].tables[0].rows, made.facts["k"]
    part, count, temperature, weight, _, perplexity = rows[-1]
    assert (part, count) == (1.0, len(stored[0]))
    settings = {"k": k, "temperature": temperature, "weight": weight}
    whole = Mixture.open(place / "memory", lm, memories="knn", fresh=True, **settings)
    assert perplexity == pytest.approx(evaluate(whole, documents_of(place, "test")).perplexity, rel=1e-3)
    order = sorted(Datastore.open(place / "memory").catalog.documents(), key=lambda document: document.sha256)
    taken = []
    for document in order:
        if sum(map(len, taken)) >= len(stored[0]) / 16:
            break
        taken.append(np.arange(document.first_row, document.first_row + document.rows))
    ids = np.concatenate(taken)
    assert rows[0][1] == len(ids)
    distances, values = test.search(stored[0][ids], stored[1][ids], k)
    _, _, temperature, weight, _, perplexity = rows[0]
    vote = test.vote(k, temperature, distances=distances, values=values)
    assert test.perplexity(vote, weight) == pytest.approx(perplexity, rel=2e-3)


def test_a_key_layer_is_measured_with_the_states_that_transformers_gives(studies, place, lm, test, stored):
    table = studies["layer"].tables[0]
    assert [str(row[0]).split()[0] for row in table.rows] == [
        "ffn_input", "ffn_input_pre_norm", "attention_input", "attention_input_pre_norm", "output", "output_normed"
    ]  # fmt: skip

    def last_states(tokens):
        ids = torch.tensor([[lm.start_token, *tokens[:-1]]])
        with torch.inference_mode():
            return lm.model(ids, output_hidden_states=True).hidden_states[-1][0].double().numpy()

    order = sorted(Datastore.open(place / "memory").catalog.documents(), key=lambda document: document.sha256)
    sample = [stored[1][one.first_row : one.first_row + one.rows].tolist() for one in order]
    assert max(map(len, sample)) <= lm.window().context  # one window each, so one pass is the same
    keys = np.concatenate([last_states(tokens) for tokens in sample])
    text = [lm.encode(document.text) for document in documents_of(place, "test")]
    own = Text(place, "test")
    own.keys = np.concatenate([last_states(tokens) for tokens in text])
    _, _, k, temperature, weight, _, perplexity = table.rows[-1]
    distances, values = own.search(keys, np.concatenate(sample), k)
    vote = own.vote(k, temperature, distances=distances, values=values)
    assert own.perplexity(vote, weight) == pytest.approx(perplexity, rel=2e-3)


def test_what_was_quantised_is_compared_with_what_was_not(studies, stored, test, made):
    rows = studies["quantised"].tables[0].rows
    _, _, size, found, temperature, weight, _, perplexity = rows[0]
    assert (size, found) == (4 * stored[0].shape[1], 1.0)
    distances, values = test.search(*stored, made.facts["k"])
    vote = test.vote(made.facts["k"], temperature, distances=distances, values=values)
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


def test_a_pruned_store_is_as_large_and_as_good_as_it_is_said(studies, place, lm, tmp_path, made):
    rows = {row[0]: row for row in studies["pruning"].tables[0].rows}
    facts = prune(Datastore.open(place / "memory"), tmp_path / "merged", merge=8)
    _, keys, size, share, temperature, weight, _, perplexity = rows["merged"]
    assert (keys, size) == (facts["keys_after"], facts["bytes_after"])
    assert share == facts["bytes_after"] / facts["bytes_before"]
    options = {"k": made.facts["k"], "temperature": temperature, "weight": weight, "memories": "knn"}
    smaller = Mixture.open(tmp_path / "merged", lm, **options)
    assert evaluate(smaller, documents_of(place, "test")).perplexity == pytest.approx(perplexity, rel=1e-3)
    assert rows["the whole store"][2] == facts["bytes_before"]
    assert not (place / "report" / "work" / "pruned").exists()


def test_mixtures_are_those_of_tune_and_eval(studies, place, lm, tmp_path):
    rows = {(row[0], row[1]): row for row in studies["memories"].tables[0].rows}
    shutil.copytree(place / "memory", tmp_path / "memory")
    second = f"lm={place / 'second'}"
    wanted = {
        ("knn", "fixed"): "knn",
        ("knn + cache", "fixed"): "knn,cache",
        ("knn + cache + ngram + output + lm=second", "fitted"): f"knn,cache,ngram,output,{second}",
        ("knn + cache + ngram + output + lm=second", "gated"): f"knn,cache,ngram,output,{second}",
    }
    for (name, kind), memories in wanted.items():
        fresh = Mixture.open(tmp_path / "memory", lm, memories=memories, fresh=True)
        tuning = tune(fresh, documents_of(place, "valid"), weights=kind)
        measured = evaluate(Mixture.open(tmp_path / "memory", lm, memories=memories), documents_of(place, "test"))
        _, _, weight, on_valid, on_test = rows[name, kind]
        assert on_valid == pytest.approx(tuning.perplexity, rel=2e-3), (name, kind)
        assert on_test == pytest.approx(measured.perplexity, rel=1e-2), (name, kind)
        assert weight == pytest.approx(measured.lambda_, abs=2e-2), (name, kind)


def test_baselines_are_the_formula_too(studies, test, valid):
    study = studies["baselines"]
    for number, name in ((2, "ngram"), (3, "output"), (4, "lm=second")):
        for text, which in ((valid, "valid"), (test, "test")):
            said = np.exp(np.asarray(text.trace.memories[number].arrays["log_p"][:, 0], dtype=np.float64))
            expected = [text.perplexity(said, weight) for weight in study.numbers["lambda"]]
            np.testing.assert_allclose(study.numbers[name][which], expected, rtol=1e-5)
    for name, weight, on_valid, on_test in study.tables[0].rows:
        place = int(np.argmin(study.numbers[name]["valid"]))
        assert (weight, on_valid) == (study.numbers["lambda"][place], study.numbers[name]["valid"][place])
        assert on_test == study.numbers[name]["test"][place]


def test_a_learned_matrix_is_read_as_its_file_says(studies, place, test):
    store = Datastore.open(place / "memory")
    for r, rows, numbers, weight, _, perplexity in studies["output"].tables[0].rows:
        (folder,) = (place / "report" / "work").glob(f"output-r{r}-*")
        file = load_file(folder / "output.safetensors")
        assert file["weight"].shape == (rows, store.model["width"])
        assert numbers == file["weight"].size + file["bias"].size
        scores = (test.keys - file["centre"]) @ file["weight"].T.astype(np.float64) + file["bias"]
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        said = (shares * (file["words"][None] == test.targets[:, None])).sum(1)
        assert test.perplexity(said, weight) == pytest.approx(perplexity, rel=1e-4)


def test_no_mixture_beats_who_knows_the_token(studies, test, made):
    rows = [row[1] for row in studies["oracle"].tables[0].rows]
    vote = test.vote(made.facts["k"], made.facts["temperature"])
    best = np.maximum(np.exp(test.model), vote)
    assert rows[3] == pytest.approx(float(np.exp(-np.log(best).mean())), rel=1e-4)
    assert studies["oracle"].numbers["store_better"] == pytest.approx((vote > np.exp(test.model)).mean(), abs=1e-3)
    assert rows[3] <= min(studies["lambda"].numbers["test"]) * (1 + 1e-5)
    assert rows[1] == pytest.approx(test.perplexity(vote, made.facts["lambda"]), rel=1e-4)
    for row in studies["memories"].tables[0].rows:
        assert rows[4] <= row[4] * (1 + 1e-5), row
    assert rows[4] <= rows[3]


def test_searches_are_left_out_as_eval_leaves_them_out(studies, place, lm, tmp_path):
    rows = studies["skip"].tables[0].rows
    everything = studies["memories"].tables[0].rows[-1]
    assert everything[1] == "gated"
    assert rows[0][:2] == [0.0, 0.0]
    assert rows[0][2] == pytest.approx(everything[4])
    assert rows[-1][:2] == [1.0, 1.0]
    shutil.copytree(place / "memory", tmp_path / "memory")
    memories = f"knn,cache,ngram,output,lm={place / 'second'}"
    fresh = Mixture.open(tmp_path / "memory", lm, memories=memories, fresh=True)
    tune(fresh, documents_of(place, "valid"), weights="gated")
    blind = Mixture.open(tmp_path / "memory", lm, memories=memories, skip=1.0)
    assert rows[-1][2] == pytest.approx(evaluate(blind, documents_of(place, "test")).perplexity, rel=1e-2)


def test_gains_of_all_groups_add_up_to_the_gain(studies, test, made, stored):
    study, facts = studies["where"], made.facts
    mixed = (1 - facts["lambda"]) * np.exp(test.model) + facts["lambda"] * test.vote(facts["k"], facts["temperature"])
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


def test_examples_are_the_tokens_with_the_most_and_the_least_gain(studies, test, made, place, lm, stored):
    facts = made.facts
    vote = test.vote(facts["k"], facts["temperature"])
    mixed = (1 - facts["lambda"]) * np.exp(test.model) + facts["lambda"] * vote
    gain = np.log(mixed) - test.model
    most, least = studies["examples"].examples["gained most"], studies["examples"].examples["lost most"]
    assert most[0].gain == pytest.approx(gain.max(), rel=1e-3)
    assert least[0].gain == pytest.approx(gain.min(), abs=0.011)
    assert [one.gain for one in most] == sorted((one.gain for one in most), reverse=True)
    store = Datastore.open(place / "memory")
    texts = {document.source: document.text for document in documents_of(place, "test")}
    for example in (*most, *least):
        assert len({one.target for one in most}) == len(most)
        expected = (1 - facts["lambda"]) * example.p_lm + facts["lambda"] * example.p_knn
        assert example.p == pytest.approx(expected, rel=1e-3)
        assert example.context + example.target in texts[example.document]
        weights = [one.weight for one in example.neighbours]
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) <= 1 + 1e-6
        first, second = example.neighbours[:2]
        ratio = np.exp((first.distance - second.distance) / facts["temperature"])
        assert second.weight / first.weight == pytest.approx(ratio, rel=1e-3)
        for one in example.neighbours:
            assert one.agrees == (one.token == example.target)
            (document,) = (found for found in STORED if found.source == one.source)
            assert one.before + one.token + one.after in document.text
    assert store.rows == len(stored[1])


def test_the_commands_give_the_figures(studies, capfd):
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


def test_a_second_run_reads_nothing_again_and_says_the_same(made, place, lm, model_folder, tmp_path):
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


def test_a_report_that_was_stopped_goes_on_where_it_was(place, lm, model_folder, tmp_path):
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
    assert "lambda: tracing" not in bars.names
    assert not any(name.startswith(("lambda: ", "k: ")) for name in bars.names)
    assert [study.name for study in found.studies] == ["lambda", "k", "size"]
    # With other text, all of it is done again, and what was read before is gone.
    bars = Bars()
    other = make(place, lm, model_folder, progress=bars, text=documents(4, words=12, start=200), **few)
    assert "lambda: tracing" in bars.names
    assert other.facts["base_perplexity"] != found.facts["base_perplexity"]
    assert len(list((tmp_path / "stopped" / "work").glob("texts-*"))) == 1


def test_keys_are_kept_in_the_order_of_the_text_however_it_is_packed(
    place, lm, model_folder, tmp_path, test, monkeypatch
):
    monkeypatch.setattr(knnlm.evaluation, "_GROUP", 60)  # tokens that are packed into batches together
    make(place, lm, model_folder, out=tmp_path / "packed", memories="knn", second_lm=None, studies=["k"])
    (file,) = (tmp_path / "packed" / "work").glob("texts-*/test/keys.npy")
    np.testing.assert_allclose(np.load(file), test.keys, atol=1e-4)


def test_studies_that_cannot_be_made_are_named_with_the_reason(place, lm, model_folder, tmp_path):
    lone = build(documents(1, words=12), tmp_path / "lone", lm=lm)
    found = report(lone.path, TEXT[:3], tmp_path / "out", lm=lm, memories="knn", studies=["size", "baselines", "k"])
    assert [study.name for study in found.studies] == ["k"]
    assert set(found.left_out) == {"size", "baselines"}
    page = found.page.read_text()
    for reason in found.left_out.values():
        assert reason in page


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


def test_the_page_stands_alone_and_has_every_study(made):
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
    assert "dealt by a hash" in text


def test_the_plots_lie_beside_the_page_and_in_it(made):
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


def test_the_numbers_are_all_in_the_json(made):
    found = json.loads((made.page.parent / "report.json").read_text())
    assert found == made.as_dict()
    assert set(found["studies"]) == set(STUDIES)


def test_hostile_text_is_shown_and_not_run(tmp_path):
    evil = '"><script>alert(1)</script><img src="http://evil.example/x.png" onerror=\'x\'>&amp;'
    neighbour = Neighbour(0.5, 1.0, evil, True, evil, evil, evil, evil)
    example = Example(evil, evil, evil, 0.1, 0.2, 0.3, 1.0, [neighbour])
    plot = Plot("bars", evil, evil, evil, [Line(evil, [evil, "b"], [1.0, None])])
    table = Table([evil], [""], [[evil], [None]], caption=evil)
    study = Study("k", evil, evil, evil, evil, [table], [plot], {evil: [example]}, [evil])
    assert Study.from_dict(json.loads(json.dumps(study.as_dict()))) == study
    facts = dict.fromkeys(["stored_tokens", "stored_documents", "test_tokens", "test_documents", "k"], 1)
    facts |= dict.fromkeys(["valid_tokens", "valid_documents", "remembered_documents"], 1)
    facts |= {"memory": evil, "model": evil, "memories": [evil], "chosen_on": evil, "quick": True}
    facts |= {"temperature": 1.0, "lambda": 0.5, "base_perplexity": 2.0}
    drawings = {"k": [draw(plot)]}
    write_page(tmp_path / "x.html", facts=facts, studies=[study], left_out={evil: evil}, drawings=drawings)
    page = check_page((tmp_path / "x.html").read_text())
    assert page.data.count(evil) >= 10
    assert "http" not in " ".join(page.links)


def test_a_warning_is_given_where_the_text_is_in_the_memory(place, lm, model_folder, tmp_path):
    found = make(place, lm, model_folder, out=tmp_path / "known", text=STORED[:4], studies=["k"], second_lm=None)
    assert found.facts["remembered_documents"] == 4
    assert "in the memory itself" in found.page.read_text()
    assert "in the memory itself" not in (place / "report" / "index.html").read_text()


texts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=2, max_size=12)


@given(texts)
def test_a_text_is_split_into_two_halves_of_about_the_same_size(given_texts):
    whole = [Document(str(number), "x", text) for number, text in enumerate(given_texts)]
    split = gather(whole, None, limit=None)
    assert split.valid
    assert split.test
    assert sorted(map(id, (*split.valid, *split.test))) == sorted(map(id, whole))
    sizes = [sum(len(document.text) for document in half) for half in (split.valid, split.test)]
    assert abs(sizes[0] - sizes[1]) <= max(map(len, given_texts))
    again = gather(list(reversed(whole)), None, limit=None)
    if len(set(given_texts)) == len(given_texts):
        assert {one.text for one in again.valid} == {one.text for one in split.valid}


def test_a_single_document_is_cut_in_its_middle():
    text = "one two three four five six"
    split = gather([Document("a", "a.txt", text)], None, limit=None)
    assert split.valid[0].text + split.test[0].text == text
    assert split.valid[0].text == "one two three"
    assert "first half" in split.how
    with pytest.raises(CorpusError, match="too short"):
        gather([Document("a", "a.txt", "x")], None, limit=None)
    with pytest.raises(CorpusError, match="no text"):
        gather([], None, limit=None)


def test_text_to_choose_on_may_be_given(place, lm, model_folder, tmp_path):
    valid = documents(2, words=12, start=300)
    few = {"out": tmp_path / "given", "studies": ["k"], "second_lm": None, "memories": "knn"}
    found = make(place, lm, model_folder, valid=valid, **few)
    assert found.facts["valid_tokens"] == sum(len(lm.encode(document.text)) for document in valid)
    assert found.facts["test_tokens"] == sum(len(lm.encode(document.text)) for document in TEXT)
    limited = make(place, lm, model_folder, valid=valid, limit=10, **{**few, "out": tmp_path / "limited"})
    assert limited.facts["test_documents"] == limited.facts["valid_documents"] == 1


def test_the_command_writes_a_page(place, model_folder, tmp_path, capfd):
    file = tmp_path / "held-out.jsonl"
    file.write_text("\n".join(json.dumps({"id": one.id, "text": one.text}) for one in TEXT))
    common = ["report", str(place / "memory"), str(file), "--out", str(tmp_path / "page"), "--memory", "knn"]
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


def test_wrong_wishes_are_refused_before_anything_is_read(place, lm, monkeypatch, tmp_path):
    with pytest.raises(ParameterError, match="no study 'nonsense'"):
        report(place / "memory", TEXT, tmp_path / "x", lm=lm, studies=["nonsense"])
    with pytest.raises(ParameterError, match="let knn be among"):
        report(place / "memory", TEXT, tmp_path / "x", lm=lm, memories="cache")
    with pytest.raises(ParameterError, match="at least 1 token"):
        report(place / "memory", TEXT, tmp_path / "x", lm=lm, limit=0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'knnlm[report]'")):
        report(place / "memory", TEXT, tmp_path / "x", lm=lm)
    assert not (tmp_path / "x" / "index.html").exists()


def test_the_same_numbers_are_drawn_as_the_same_picture():
    lines = [Line("a", [1, 10, 100], [3.0, 2.0, 1.0]), Line("b", [1, 10, 100], [None, 1e9, 2.0])]
    plot = Plot("lines", "title", "x", "y", lines, log_x=True, levels={"level": 2.5}, mark=[10.0, 2.0])
    assert draw(plot) == draw(plot)
    assert draw(plot) != draw(replace(plot, title="another"))


def test_the_work_of_a_report_stays_in_its_folder(made, place):
    assert {path.name for path in Path(place).iterdir()} == {"memory", "second", "report"}
