"""Classes of tokens, and sums of gains and losses, against independent computations."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnlm.evaluation.evaluate import Totals
from knnlm.evaluation.tune import MemoryColumns, TraceTable
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.weights import FixedWeights
from knnlm.report.plots import draw
from knnlm.report.studies import gains
from knnlm.report.studies.gains import CLASSES, FUNCTION_WORDS, Changes, classify, study_gains, token_class
from knnlm.report.study import Line, Plot


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("", "The", "function word"),
        ("xt", " the", "function word"),
        ("n ", "OF", "function word"),
        ("", "Theo", "capitalised word"),
        ("xt", " Rust", "capitalised word"),
        ("xt", " USA", "capitalised word"),
        (" (", "Rust", "capitalised word"),
        ("xt", " rust", "word in lower case"),
        ("\n\n", "rust", "word in lower case"),
        ("e ", "日本", "word in lower case"),
        ("xt", ".rs", "word in lower case"),  # the name after the dot
        ("ru", "st", "continuation of a word"),
        (" 3", "rd", "continuation of a word"),
        ("on", "'t", "continuation of a word"),
        ("n’", "t", "continuation of a word"),
        ("ru", "the", "continuation of a word"),
        ("Mc", "Donald", "continuation of a word"),
        ("e", "\u0301", "continuation of a word"),  # a mark on the letter before
        (" '", "rust", "word in lower case"),  # a quotation mark
        ("'", "rust", "word in lower case"),
        ("xt", " 42", "number"),
        ("ru", "7", "number"),
        ("xt", " $3.5", "number"),
        ("xt", "½", "number"),
        ("xt", ".", "punctuation or symbol"),
        ("xt", " —", "punctuation or symbol"),
        ("xt", "_", "punctuation or symbol"),
        ("xt", " ∑", "punctuation or symbol"),
        ("xt", "\n\n", "white space"),
        ("xt", "\u00a0", "white space"),
        ("xt", "", "part of a character"),
    ],
)
def test_class_follows_from_the_text(before, text, expected):
    assert token_class(text, before) == expected
    assert expected in CLASSES


@given(st.text(), st.text(max_size=2))
def test_every_text_has_a_class(text, before):
    found = token_class(text, before)
    assert found in CLASSES
    assert (found == "white space") == bool(re.fullmatch(r"\s+", text))


def test_function_words_are_lower_case_and_few():
    assert all(word.isalpha() and word.islower() for word in FUNCTION_WORDS)
    assert 90 <= len(FUNCTION_WORDS) <= 110  # the documentation names about 100
    assert {"the", "of", "and", "to", "in"} <= FUNCTION_WORDS


def test_each_word_of_a_text_begins_once_however_it_is_split(lm):
    text = "The naïve fox (it's 42 years old) didn't jump: unbelievably, Ferris’s crab 日本 won."
    pieces = lm.token_texts(lm.encode(text))
    assert "".join(pieces) == text
    classes = classify(pieces)
    words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text)
    assert len(classes) == len(pieces) > len(words)
    assert sum(name in CLASSES[:3] for name in classes) == len(words) == 13
    assert classes.count("number") == sum(any(char.isdigit() for char in piece) for piece in pieces)
    assert classify(list(text)).count("punctuation or symbol") == len(re.findall(r"[^\w\s]", text))


finite = st.floats(-50, 50, allow_nan=False).map(lambda value: 0.0 if abs(value) < 1e-300 else value)


@given(st.lists(finite, min_size=1, max_size=60), st.integers(1, 4))
def test_gains_less_losses_are_the_total_change(values, groups):
    change = np.array(values)
    total = Changes.of(change)
    higher, lower = ([Fraction(value) for value in values if sign * value > 0] for sign in (1, -1))
    assert (total.tokens, total.improved, total.worse) == (len(values), len(higher), len(lower))
    # Each sum is the exact one, rounded once.
    assert total.gain == float(sum(higher))
    assert total.loss == float(-sum(lower))
    assert total.net == pytest.approx(float(sum(map(Fraction, values))), rel=1e-12, abs=1e-12)
    parts = [Changes.of(change[start::groups]) for start in range(min(groups, len(values)))]
    assert sum(part.tokens for part in parts) == total.tokens
    assert math.fsum(part.gain for part in parts) == pytest.approx(total.gain, rel=1e-14)
    assert math.fsum(part.loss for part in parts) == pytest.approx(total.loss, rel=1e-14)


def test_cells_are_shares_means_and_a_ratio():
    change = np.array([2.0, 1.0, 0.0, -0.5])
    tokens, improved, gain, worse, loss, net, in_all, ratio = Changes.of(change).cells()
    assert (tokens, improved, gain, worse, loss, net, in_all) == (4, 0.5, 1.5, 0.25, 0.5, 0.625, 2.5)
    assert ratio == pytest.approx(np.exp(-change.mean()))
    unchanged = Changes.of(np.zeros(3)).cells()
    assert unchanged == [3, 0.0, None, 0.0, None, 0.0, 0.0, 1.0]


def test_second_line_of_bars_is_drawn():
    names = ["a", "b"]
    gain, loss = Line("gain", [*names], [1.0, 0.5]), Line("loss", [*names], [-0.2, 0.0])
    both = draw(Plot("bars", "t", "", "nats", [gain, loss]))
    assert both != draw(Plot("bars", "t", "", "nats", [gain]))
    assert both == draw(Plot("bars", "t", "", "nats", [gain, loss]))


PRIOR, RATE = 0.2, 0.01
WEIGHTS = (0.5, 0.3, 0.2)  # of the model, knn and ngram


@pytest.fixture
def context(lm, monkeypatch):
    """Random log-probabilities of three documents, of which one is long; ngram abstains at some tokens."""
    generator = np.random.default_rng(0)
    lengths = (1500, 90, 10)
    tokens = sum(lengths)
    logs = torch.from_numpy(-generator.exponential(2.0, (tokens, 3)))
    logs[generator.random(tokens) < 0.3, 2] = torch.nan
    first = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    memories = [
        MemoryColumns(name, name, [name], logs[:, [number + 1]], None, None, {})
        for number, name in enumerate(("knn", "ngram"))
    ]
    nothing = torch.zeros(tokens)
    table = TraceTable(logs[:, 0], nothing, nothing, None, torch.from_numpy(first), memories, Totals())
    trace = SimpleNamespace(targets=generator.integers(0, lm.vocab_size, tokens), positions=np.arange(tokens) - first)
    read = SimpleNamespace(trace=trace)
    monkeypatch.setattr(gains, "choose_online", lambda *_: (OnlineConfig(PRIOR, RATE), 1.0))
    return SimpleNamespace(
        chosen=(None, 0.25),
        labels=["knn", "ngram"],
        lm=lm,
        valid=read,
        test=read,
        frequencies=torch.from_numpy(
            generator.integers(0, 10, lm.vocab_size) ** generator.integers(1, 6, lm.vocab_size)
        ),
        store_log_probs=lambda _: (logs[:, 0], logs[:, 1]),
        table=lambda *_: table,
        fit=lambda *_: SimpleNamespace(weights=FixedWeights(WEIGHTS)),
        report_command=lambda name: name,
    )


def changes_by_mixture(context):
    """The changes of one λ, of the weights and of fixed share over them, token by token."""
    table = context.table()
    lm, knn, ngram = (
        column.numpy() for column in (table.lm_log_probs, *(one.log_probs[:, 0] for one in table.memories))
    )
    one_lambda = np.log(0.75 * np.exp(lm) + 0.25 * np.exp(knn)) - lm
    probs = np.exp(np.stack([lm, knn, ngram], 1))
    mixed, online, share = [], [], None
    for row, position in zip(probs, context.test.trace.positions, strict=True):
        p = sum(weight * (row[0] if np.isnan(one) else one) for weight, one in zip(WEIGHTS, row, strict=True))
        share = np.array([PRIOR, 1 - PRIOR]) if position == 0 else share
        joint = share * [row[0], p]
        mixed.append(math.log(p / row[0]))
        online.append(math.log(joint.sum() / row[0]))
        share = (1 - RATE) * joint / joint.sum() + RATE * np.array([PRIOR, 1 - PRIOR])
    return [one_lambda, np.array(mixed), np.array(online)]


def expected_cells(change):
    higher, lower = change[change > 0], -change[change < 0]
    means = [float(own.mean()) if len(own) else None for own in (higher, lower)]
    shares = [len(own) / len(change) for own in (higher, lower)]
    net = change.sum()
    return [len(change), shares[0], means[0], shares[1], means[1], change.mean(), net, np.exp(-change.mean())]


def assert_cells(row, expected):
    for cell, wanted in zip(row, expected, strict=True):
        assert cell == (None if wanted is None else pytest.approx(wanted, rel=1e-9, abs=1e-9))


def test_study_agrees_with_numpy_on_random_log_probabilities(context):
    study = study_gains(context)
    by_mixture = changes_by_mixture(context)
    for row, change in zip(study.tables[0].rows, by_mixture, strict=True):
        assert 0.2 < (change > 0).mean() < 0.8
        assert_cells(row[1:], expected_cells(change))
    change, trace = by_mixture[-1], context.test.trace
    often = context.frequencies.numpy()[trace.targets]
    digits = np.array([len(str(count)) if count else 0 for count in often.tolist()])
    documents = np.split(trace.targets, np.flatnonzero(trace.positions == 0)[1:])
    classes = np.array([name for tokens in documents for name in classify(context.lm.token_texts(tokens.tolist()))])
    ranges = {"0": digits == 0, "1 to 9": digits == 1, "10 to 99": digits == 2, "100 to 999": digits == 3}
    early, third, last = trace.positions < 16, trace.positions >= 128, trace.positions >= 1024
    places = {"0 to 15": early, "16 to 127": ~early & ~third, "128 to 1,023": third & ~last, "1,024 or more": last}
    by_class = {name: classes == name for name in CLASSES if name in classes}
    wanted = [{**ranges, "1,000 or more": digits > 3}, by_class, places]
    for table, groups in zip(study.tables[1:], wanted, strict=True):
        assert [row[0] for row in table.rows] == list(groups)
        for row in table.rows:
            assert_cells(row[1:], expected_cells(change[groups[row[0]]]))
    loss = -change.sum()  # of the mixture, less that of the model
    assert study.numbers["loss"] - study.numbers["gain"] == pytest.approx(loss, rel=1e-12)
    for key in ("frequency", "class", "position"):
        parts = study.numbers[key].values()
        assert sum(part["loss"] - part["gain"] for part in parts) == pytest.approx(loss, rel=1e-12)
    drawn = study.plots[0].lines  # gains, and losses with a minus
    assert drawn[0].x == [row[0] for row in study.tables[2].rows]
    assert np.add(drawn[0].y, drawn[1].y) == pytest.approx([row[6] for row in study.tables[2].rows])
    assert f"{(change > 0).mean():.0%} of the tokens become more probable" in study.finding
