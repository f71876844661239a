"""The benchmark of tasks on tiny models: figures against NumPy, and the table of a whole run."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import tasks
from helpers.corpora import corpus_folder
from helpers.models import tiny, tiny_tokenizer
from knnlm.evaluation.continuations import ContinuationScore
from task_items import Item


def test_grade_counts_the_largest_likelihood_and_its_standard_error():
    items = [Item("a", (" x", " yy"), 0), Item("b", (" x", " yyyy"), 0), Item("c", (" xx", " y"), 1)]
    scores = [ContinuationScore(value, False) for value in (-1.0, -2.0, -3.0, -2.0, -1.0, -4.0)]
    found = tasks.grade(items, scores)
    correct = np.array([1, 0, 0])
    assert found == {"accuracy": tasks.Figure(pytest.approx(correct.mean()), pytest.approx(correct.std() / 3**0.5))}
    # By character: -0.5 > -0.67; -1.5 < -0.4; -0.33 > -2.
    assert tasks.grade(items, scores, scores)["accuracy"].mean == pytest.approx(1 / 3)
    longer = [ContinuationScore(value, False) for value in (-1.0, -1.2)]
    item = Item("a", (" x", " yyyy"), 1)
    assert tasks.grade([item], longer, longer)["accuracy"].mean == 1.0
    assert tasks.grade([item], longer)["accuracy"].mean == 0.0


def test_mutual_information_is_what_the_context_adds():
    item = Item("a", (" xxxx", " y", " z"), 2)
    scores = [ContinuationScore(value, False) for value in (-1.0, -3.0, -2.0)]
    alone = [ContinuationScore(value, False) for value in (-1.5, -3.0, -4.0)]  # the context adds 0.5, 0 and 2 nats
    found = tasks.grade([item], scores, alone)
    assert found["accuracy"].mean == 0.0
    assert found["accuracy by mutual information"].mean == 1.0


def test_grade_of_cloze_is_greedy_and_has_a_likelihood():
    scores = [ContinuationScore(-1.0, True), ContinuationScore(-3.0, False)]
    found = tasks.grade([Item("a", (" x",)), Item("b", (" y",))], scores)
    assert found["accuracy"].mean == 0.5
    assert found["log-likelihood"] == tasks.Figure(-2.0, pytest.approx(1 / 2**0.5))


def test_contexts_keep_their_end_after_the_start_token(lm):
    item = Item("one two three four five", (" six", " seven"), 0)
    pairs = tasks.encode(lm, item, 4)
    assert [context for context, _ in pairs] == [[lm.start_token, *lm.encode(item.context)[-4:]]] * 2
    assert [continuation for _, continuation in pairs] == [lm.encode(" six"), lm.encode(" seven")]


@pytest.fixture
def long_model_folder(tmp_path):
    """A tiny model without a maximal length; its tokenizer makes many tokens of a sentence."""
    tiny("bloom").save_pretrained(tmp_path / "bloom")
    tiny_tokenizer().save_pretrained(tmp_path / "bloom")
    return tmp_path / "bloom"


@pytest.mark.slow  # 8 seconds; the parts are tested above
def test_whole_run_prints_a_row_for_each_store_and_task(long_model_folder, tmp_path, monkeypatch, capsys):
    corpora = [corpus_folder(tmp_path / name, seed) for seed, name in enumerate(("acl", "aws"))]
    arguments = ["tasks.py", *map(str, corpora), "--model", str(long_model_folder), "--items", "4", "--context", "16"]
    arguments += ["--limit", "300"]
    arguments += ["--train-student", "--student-tokens", "300", "--student-epochs", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json", str(tmp_path / "rows.json")])
    tasks.main()
    shown = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 2 * (
        5 + 4 + 4
    )  # two stores; three tasks and a likelihood, also by information (acl); general ones
    assert all(set(tasks.SYSTEMS) <= set(row) for row in rows)
    accuracies = [row[system][0] for row in rows for system in tasks.SYSTEMS if "likelihood" not in row["task"]]
    assert all(0 <= value <= 1 for value in accuracies)
    # The model alone does not depend on the store.
    by_task = {}
    for row in rows:
        by_task.setdefault((row["corpus"], row["task"]), []).append(row["model"])
    assert all(first == second for first, second in by_task.values())
    assert sum(line.startswith("| acl |") for line in shown) == sum(line.startswith("| aws |") for line in shown) == 13
    assert shown[-2].startswith("The default weights raise")
    assert shown[-1].startswith("The default weights lower")
