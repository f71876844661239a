"""Items of the tasks: choices contain the right answer once, contexts are what comes before it, seeds decide."""

from __future__ import annotations

import random

import pytest

import task_items
from helpers.corpora import NAMES, THINGS, report
from knnlm.corpus import Document
from task_items import CHOICES, GENERAL, corpus_tasks


def texts(count: int = 40) -> list[Document]:
    generator = random.Random(0)
    return [Document(f"d{number}", "made", report(number, generator)) for number in range(count)]


def check(items):
    """The right answer is among different choices."""
    for item in items:
        assert len(set(item.choices)) == len(item.choices)
        assert item.choices.count(item.right) == 1
        assert item.context


@pytest.mark.parametrize("corpus", ["koran", "acl", "aws"])
def test_items_of_a_corpus_are_taken_from_its_text(corpus):
    documents = texts()
    tasks = corpus_tasks(corpus, documents, 12, seed=1)
    assert len(tasks) == 3
    for name, items in tasks.items():
        check(items)
        assert len(items) == 12, name
        assert all(len(item.choices) == (1 if name == "last word" else CHOICES) for item in items)
        for item in items:
            assert any(item.context + item.right in document.text for document in documents), (name, item)


@pytest.mark.parametrize("make", GENERAL.values(), ids=GENERAL)
def test_general_items_are_different_and_the_seed_decides(make):
    items = make(60, 3)
    check(items)
    assert len(items) == 60
    assert items == make(60, 3)
    assert items != make(60, 4)
    assert len({(item.context, item.right) for item in items}) == 60
    assert len({item.answer for item in items}) == len(items[0].choices)


def test_seed_decides_items_of_a_corpus():
    documents = texts()
    assert corpus_tasks("acl", documents, 9, seed=1) == corpus_tasks("acl", documents, 9, seed=1)
    assert corpus_tasks("acl", documents, 9, seed=1) != corpus_tasks("acl", documents, 9, seed=2)


def test_last_words_have_four_letters():
    words = {item.right for item in task_items.last_words(texts(), 100)}
    assert words == {" lost", " Guide", *(f" {thing}" for thing in THINGS)}


def test_entities_are_names_inside_sentences_and_none_dominates():
    items = task_items.entities(texts(200), 30)
    assert {item.right.split()[0].rstrip("0123456789") for item in items} <= {
        *NAMES,
        "CreateTable",
        "DeleteTable",
        "Amazon",
    }
    assert all(name != "Then" for item in items for name in item.choices)
    rights = [item.right for item in items]
    assert max(map(rights.count, rights)) <= 3


def test_word_that_is_mostly_written_in_lower_case_is_no_name():
    documents = [
        Document("0", "made", f"He asked {name} and Who else was there, and who, and who. " * 3) for name in NAMES
    ]
    assert all(" Who" not in item.choices for item in task_items.entities(documents, 20))


def test_sentences_do_not_end_at_initials_and_one_sentence_is_divided_at_a_clause():
    spoken = "We hear the case of Mr. John G. Roberts today. It is about a very old house."
    assert list(task_items._divided(spoken)) == [
        ("We hear the case of Mr. John G. Roberts today.", "It is about a very old house.")
    ]
    verse = "They came to the city at night, and they found it empty and dark"
    assert list(task_items._divided(verse)) == [("They came to the city at night,", "and they found it empty and dark")]


def test_sums_are_right_and_wrong_choices_are_wrong():
    for item in task_items.arithmetic(50):
        a, b = map(int, item.context.splitlines()[-1].rstrip(" =").split(" + "))
        assert [int(choice) == a + b for choice in item.choices].count(True) == 1
        assert int(item.right) == a + b


def test_copied_word_is_the_next_of_the_list():
    for item in task_items.copying(30):
        first, second = item.context.split("\n")
        listed = first.removeprefix("Words: ").split(", ")
        repeated = second.removeprefix("The same words again: ").rstrip(",").split(", ")
        assert listed[: len(repeated)] == repeated
        assert item.right == f" {listed[len(repeated)]}"


def test_brackets_close_what_is_open(tmp_path):
    source = 'def f(a, b):\n    text = "(["  # ]\n    return [a, {b}, (a + b) ]\n\nx = f(1, 2)\ny = {1: [2, x]\n}\n'
    (tmp_path / "module.py").write_text(source)
    items = task_items.closing_brackets(9, 0, tmp_path)
    assert {(item.context.splitlines()[-1], item.right) for item in items} == {
        ("    return [a, {b}, (a + b", ")"),
        ("x = f(1, 2", ")"),
        ("y = {1: [2, x", "]"),
    }
    pairs = {")": "(", "]": "[", "}": "{"}
    for item in task_items.closing_brackets(60):
        assert pairs[item.right] in item.context
    rights = [item.right for item in task_items.closing_brackets(60)]
    assert {rights.count(bracket) for bracket in pairs} == {20}


def test_services_offer_no_two_names_of_one_service():
    documents = texts()
    documents.append(Document("q", "made", "Use the operation CreateDashboard to make one in Amazon Kinesis Streams."))
    for item in task_items.services(documents, 40):
        assert item.context.endswith("Amazon")
        assert sum(choice.startswith(" Kinesis") for choice in item.choices) <= 1 or "Kinesis" not in item.right
