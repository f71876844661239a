"""Test items in a store, by n-grams, against brute force."""

from __future__ import annotations

import pytest

from helpers.stores import documents
from knnlm.datastore.remove import remove
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.evaluation.overlap import NGRAM, find_overlap
from knnlm.ingest.build import build


@pytest.fixture(scope="module")
def stored(lm, tmp_path_factory):
    """A store of a few documents, one of them empty of n-grams."""
    path = tmp_path_factory.mktemp("overlap") / "docs.store"
    texts = documents(10)
    return build([*texts[:4], *documents(1, words=1, start=900), *texts[4:]], path, lm=lm, segment_entries=300)


def ngrams(tokens, n):
    return {tuple(tokens[begin : begin + n]) for begin in range(len(tokens) - n + 1)}


def brute_force(store, items, n):
    found = {}
    for document in store.documents():
        found[document.id] = ngrams(store.around(document.first_entry, before=0, after=10_000)[1], n)
    every = set().union(*found.values())
    wanted = [set().union(*(ngrams(text, n) for text in item)) if item else set() for item in items]
    documents_found = [name for name, own in found.items() if any(own & each for each in wanted)]
    return [bool(each & every) for each in wanted], documents_found


@pytest.mark.parametrize("n", [1, 3, NGRAM, 40])
def test_overlap_agrees_with_brute_force(lm, stored, n):
    texts = [lm.encode(document.text) for document in (*documents(3), *documents(5, start=300))]
    last = lm.encode(documents(10)[6].text)[-n:]  # the end of a document
    items = [*([text] for text in texts), [last], [], [[5] * 50], [texts[0][:NGRAM], texts[4]], [texts[0][: n - 1]]]
    found = find_overlap(stored, items, n=n)
    contained, ids = brute_force(stored, items, n)
    assert list(found.items) == contained
    assert list(found.documents) == ids
    if n == NGRAM:
        assert contained[:3] == [True] * 3
        assert not any(contained[9:11])


def test_ngram_across_two_documents_is_not_contained(lm, stored):
    texts = [lm.encode(document.text) for document in documents(2)]
    assert find_overlap(stored, [[[*texts[0][-7:], *texts[1][:6]]]]).items == (False,)


def test_removed_document_has_no_overlap(lm, tmp_path):
    path = tmp_path / "docs.store"
    build(documents(6), path, lm=lm)
    item = [lm.encode(documents(6)[2].text)]
    assert find_overlap(Datastore.open(path), [item]).documents == ("d2",)
    remove(path, document="d2")
    found = find_overlap(Datastore.open(path), [item, [lm.encode(documents(6)[4].text)]])
    assert found.items == (False, True)
    assert found.documents == ("d4",)


def test_ngram_without_tokens_is_an_error(stored):
    with pytest.raises(ParameterError, match="at least 1"):
        find_overlap(stored, [], n=0)
