"""Constraints on answers, each with answers that meet it and answers that do not."""

from __future__ import annotations

import json

import pytest

from constraints import CHECKS, check
from generation import INSTRUCTIONS

CASES = [
    ("words_at_most", 3, ["one two three", "one"], ["one two three four", ""]),
    ("words_at_least", 2, ["one two", "one two three"], ["one", ""]),
    ("lines", 2, ["a\nb", "a\n\nb\n"], ["a", "a\nb\nc"]),
    ("bullets", 2, ["- a\n- b", "Here:\n* a\n* b"], ["- a", "a\nb", "-a\n-b"]),
    ("sentences", 2, ["One. Two.", "One! Two"], ["One.", "One. Two? Three."]),
    ("lower_case", True, ["all small.", "1 apple"], ["Not small", "123"]),
    ("upper_case", True, ["ALL LARGE!"], ["Not large", "..."]),
    ("contains", "dog", ["A Dog.", "the dog"], ["dogs", "cat"]),
    ("excludes", "dog", ["cats", "dogs"], ["A dog", "  "]),
    ("starts_with", "First", ["First, sit.", "first"], ["At first"]),
    ("ends_with", "Drive safely", ["So: drive safely.", 'He said "Drive safely!"'], ["Drive safely now"]),
    ("ends_with", "?", ["Why?"], ["Why.", "Why"]),
    ("json", True, ['{"a": 1}', "[]", "```json\n[1, 2]\n```"], ["{a: 1}", "3", "Here: []"]),
    ("no_commas", True, ["a b"], ["a, b", ""]),
]


@pytest.mark.parametrize(("kind", "value", "met", "missed"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_constraint_separates_answers(kind, value, met, missed):
    assert [check(text, {kind: value}) for text in met] == [[True]] * len(met)
    assert [check(text, {kind: value}) for text in missed] == [[False]] * len(missed)


def test_every_constraint_is_tested():
    assert {case[0] for case in CASES} == set(CHECKS)


def test_instructions_are_a_hundred_and_most_can_be_checked():
    lines = [json.loads(line) for line in INSTRUCTIONS.read_text(encoding="utf-8").splitlines()]
    assert len({line["prompt"] for line in lines}) == len(lines) == 100
    assert sum(bool(line["constraints"]) for line in lines) >= 50
    for line in lines:
        assert set(line["constraints"]) <= set(CHECKS)
        check("An answer.", line["constraints"])  # values have the right type
