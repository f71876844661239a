"""Entries that are followed instead of searched, against a naive implementation, token by token, in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knnlm
from helpers import oracle
from helpers.stores import documents, made_store
from knnlm.datastore.remove import remove
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.index.exact import ExactIndex
from knnlm.memories.automaton import Automaton, AutomatonParams
from knnlm.memories.base import Context, Source, Span
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.training.prune import prune

SOURCE = Source(0, "ffn_input", -1)
WIDTH, WORDS = 3, 4


def open_memory(store, params, k, metric="l2"):
    automaton = None if params is None else Automaton(store, params, metric=metric)
    index = ExactIndex(store.keys, metric=metric)
    return KnnMemory(store, index, k=k, knn_temperature=1.0, source=SOURCE, automaton=automaton)


class Naive:
    """One text, one position after the other, over lists of documents; whatever is nearest is found by sorting."""

    def __init__(self, texts, params, k, metric="l2", labels=None):
        self.values = [value for text in texts for value in text["values"]]
        self.keys = np.array([key for text in texts for key in text["keys"]], np.float64).reshape(-1, WIDTH)
        self.after = {}  # the next entry of the same document
        first = 0
        for text in texts:
            for place in range(len(text["values"]) - 1):
                self.after[first + place] = first + place + 1
            first += len(text["values"])
        self.params, self.k, self.metric, self.labels = params, k, metric, labels
        self.reached = []

    def nearest(self, query, entries):
        distances = oracle.distances(query, self.keys, self.metric)
        found = sorted(entries, key=lambda entry: (distances[entry], entry))[: self.k]
        return found, [distances[entry] for entry in found]

    def step(self, token, query, wanted=True):
        """Read a token, and return the neighbours of its position, their distances, and whether it was searched."""
        pointers = [self.after[e] for e in self.reached if self.values[e] == token and e in self.after]
        pointers = pointers[: self.params.max_pointers]
        if not wanted:
            self.reached = pointers
            return [], [], False
        searched = len(pointers) < self.params.min_pointers
        entries = range(len(self.values)) if searched else pointers
        if not searched and self.labels is not None:
            for pointer in list(pointers):
                same = [entry for entry, label in enumerate(self.labels) if label == self.labels[pointer]]
                entries = entries + [entry for entry in same if entry not in entries]
            entries = entries[: self.params.max_pointers]
        self.reached, distances = self.nearest(query, entries)
        return self.reached, distances, searched


def check(neighbours, row, expected, k):
    entries, distances, searched = expected
    missing = [-1] * (neighbours.ids.shape[1] - len(entries))
    assert neighbours.ids[row].tolist() == entries + missing
    assert neighbours.distances[row, : len(entries)].tolist() == pytest.approx(distances, abs=1e-5)
    assert neighbours.distances[row, len(entries) :].isinf().all()
    assert bool(neighbours.followed.searched[row]) == searched


# Few keys, of which many are equal, so that entries are at equal distances; other distances differ.
KEYS = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(7, WIDTH)).astype(np.float32)
key, query_vector = st.sampled_from(KEYS.tolist()), st.sampled_from(QUERIES.tolist())
quickly = settings(deadline=None, max_examples=40)


@st.composite
def stored_texts(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return [
        {
            "values": draw(st.lists(st.integers(0, WORDS - 1), min_size=length, max_size=length)),
            "keys": draw(st.lists(key, min_size=length, max_size=length)),
        }
        for length in lengths
    ]


@st.composite
def read_texts(draw):
    """Texts of different lengths: of each position the token read last, the query, and whether it is wanted."""
    position = st.tuples(st.integers(0, WORDS - 1), query_vector, st.booleans())
    return draw(st.lists(st.lists(position, min_size=1, max_size=12), min_size=1, max_size=4))


automata = st.builds(AutomatonParams, min_pointers=st.integers(1, 4), max_pointers=st.integers(1, 6))


def store_of(texts, folder):
    """A store of these documents."""
    keys = [key for text in texts for key in text["keys"]]
    values = [value for text in texts for value in text["values"]]
    return made_store(folder / "store", keys, values, sizes=[len(text["values"]) for text in texts], vocab_size=WORDS)


def context_of(texts, mask=None):
    """The context of whole texts, the positions of which follow one another."""
    spans = [Span(torch.tensor([token for token, _, _ in text]), 0) for text in texts]
    queries = torch.tensor([query for text in texts for _, query, _ in text], dtype=torch.float32)
    return Context({SOURCE: queries}, spans, search_mask=mask)


@quickly
@given(stored_texts(), read_texts(), automata, st.integers(1, 7), st.sampled_from(["l2", "ip"]), st.booleans())
def test_positions_have_the_neighbours_of_the_naive_automaton(
    tmp_path_factory, stored, texts, params, k, metric, skips
):
    values = [value for text in stored for value in text["values"]]
    memory = open_memory(store_of(stored, tmp_path_factory.mktemp("texts")), params, k, metric)
    mask = torch.tensor([wanted for text in texts for _, _, wanted in text]) if skips else None
    neighbours = memory.retrieve(context_of(texts, mask))
    if params.min_pointers > min(k, params.max_pointers, len(values)):
        assert neighbours.followed is None  # no position could be followed
        return
    row = 0
    for text in texts:
        naive = Naive(stored, params, k, metric)
        for token, query, wanted in text:
            check(neighbours, row, naive.step(token, query, wanted or not skips), k)
            reached = neighbours.followed.entries[row]
            assert reached[reached >= 0].tolist() == naive.reached
            row += 1
    found = neighbours.ids >= 0
    assert neighbours.values[found].tolist() == np.array(values)[neighbours.ids[found].numpy()].tolist()
    assert (neighbours.values[~found] == -1).all()


@quickly
@given(stored_texts(), read_texts(), automata, st.integers(1, 7))
def test_a_text_that_is_read_in_parts_reaches_the_same_entries(tmp_path_factory, stored, texts, params, k):
    store = store_of(stored, tmp_path_factory.mktemp("texts"))
    memory = open_memory(store, params, k)
    whole = memory.retrieve(context_of(texts))
    if whole.followed is None:
        return
    first = 0
    for text in texts:
        tokens = torch.tensor([token for token, _, _ in text])
        entries = {}
        for place, (_, query, _) in enumerate(text):
            span = Span(tokens[: place + 1], place, entries=entries)
            step = memory.retrieve(Context({SOURCE: torch.tensor([query], dtype=torch.float32)}, [span]))
            assert step.ids.tolist() == whole.ids[first + place : first + place + 1].tolist()
            assert bool(step.followed.searched[0]) == bool(whole.followed.searched[first + place])
            entries = {memory.automaton: step.followed.entries[0]}
        first += len(text)


@quickly
@given(stored_texts(), read_texts(), automata, st.integers(1, 7), st.integers(1, 4))
def test_members_of_clusters_are_compared(tmp_path_factory, stored, texts, params, k, clusters):
    store = store_of(stored, tmp_path_factory.mktemp("texts"))
    memory = open_memory(store, replace(params, clusters=clusters), k)
    neighbours = memory.retrieve(context_of(texts))
    if neighbours.followed is None:
        return
    labels = memory.automaton._clusters[0].tolist()
    assert len(labels) == store.entry_count
    assert max(labels) < clusters
    row = 0
    for text in texts:
        naive = Naive(stored, params, k, labels=labels)
        for token, query, _ in text:
            check(neighbours, row, naive.step(token, query), k)
            row += 1


def test_clusters_contain_keys_that_are_near_each_other(tmp_path):
    generator = np.random.default_rng(0)
    centres = 20 * generator.normal(size=(3, WIDTH))
    groups = generator.integers(0, 3, 60)
    store = made_store(tmp_path / "store", centres[groups] + generator.normal(size=(60, WIDTH)), groups)
    labels = Automaton(store, AutomatonParams(clusters=3))._clusters[0]
    assert {tuple(labels[groups == group].tolist()) for group in range(3)} == {
        (labels[groups == group][0],) * int((groups == group).sum()) for group in range(3)
    }
    assert len(set(labels.tolist())) == 3


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_search_is_the_full_one_bit_for_bit_where_no_position_can_be_followed(lm, store, metric):
    never = AutomatonParams(min_pointers=10**9)
    text = documents(3, start=60)
    outputs = []
    for automaton in (None, never):
        options = MixtureOptions(metric=metric, automaton=automaton)
        mixture = Mixture.open(store.path, lm, k=16, knn_temperature=8.0, lmbda=0.6, options=options)
        tokens = [lm.encode(document.text) for document in text]
        outputs.append([mixture.retrieve(batch.context).neighbours[0] for batch in mixture.read(tokens)])
    for full, own in zip(*outputs, strict=True):
        assert torch.equal(full.ids, own.ids)
        assert torch.equal(full.distances, own.distances)
        assert torch.equal(full.values, own.values)


def test_removed_documents_are_never_followed_into(lm, tmp_path):
    """The entries of the documents that remain have the neighbours of a store that was built without the removed."""
    every = documents(9)
    knnlm.build(every, tmp_path / "store", lm=lm)
    for number in (0, 3, 4, 8):
        remove(tmp_path / "store", document=f"d{number}")
    left = [document for number, document in enumerate(every) if number not in (0, 3, 4, 8)]
    knnlm.build(left, tmp_path / "fresh", lm=lm)
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=1))
    found = []
    for name in ("store", "fresh"):
        mixture = Mixture.open(tmp_path / name, lm, k=8, knn_temperature=8.0, options=options)
        tokens = [lm.encode(document.text) for document in documents(3, start=3)]
        found.append([mixture.retrieve(batch.context).neighbours[0] for batch in mixture.read(tokens)])
    followed = 0
    for changed, fresh in zip(*found, strict=True):
        assert torch.equal(changed.followed.searched, fresh.followed.searched)
        assert torch.equal(changed.ids, fresh.ids)
        followed += int((~fresh.followed.searched).sum())
    assert followed > 20


def test_positions_without_their_texts_are_searched(lm, store):
    memory = open_memory(store, AutomatonParams(min_pointers=1), 8)
    keys = store.take(torch.arange(5))
    neighbours = memory.retrieve(Context({SOURCE: keys}))
    assert neighbours.followed is None
    assert neighbours.ids[:, 0].tolist() == [0, 1, 2, 3, 4] or bool((neighbours.distances[:, 0] == 0).all())


def test_a_pruned_store_cannot_be_followed(lm, tmp_path):
    knnlm.build(documents(20), tmp_path / "store", lm=lm)
    prune(Datastore.open(tmp_path / "store"), tmp_path / "pruned", merge=8)
    with pytest.raises(ParameterError, match="was pruned: entries without a key cannot be followed"):
        Mixture.open(tmp_path / "pruned", lm, options=MixtureOptions(automaton=AutomatonParams()))


def test_an_empty_store_is_followed_nowhere(lm, tmp_path):
    knnlm.build(documents(1), tmp_path / "store", lm=lm)
    remove(tmp_path / "store", document="d0")
    store = Datastore.open(tmp_path / "store")
    assert store.entry_count == 0
    memory = open_memory(store, AutomatonParams(min_pointers=1, clusters=2), 8)
    neighbours = memory.retrieve(Context({SOURCE: torch.zeros(2, store.width)}, [Span(torch.tensor([1, 2]), 0)]))
    assert (neighbours.ids == -1).all()


def test_invalid_parameters_are_refused(store):
    for wrong, line in (
        ({"min_pointers": 0}, "min_pointers must be at least 1, not 0."),
        ({"max_pointers": -1}, "max_pointers must be at least 1, not -1."),
        ({"clusters": 0}, "The number of clusters must be at least 1, not 0."),
    ):
        with pytest.raises(ParameterError, match=line):
            AutomatonParams(**wrong)
    with pytest.raises(ParameterError, match="leave out --subset"):
        MixtureOptions(automaton=AutomatonParams(), subset=3)
    with pytest.raises(ParameterError, match="does not search shards on Ray"):
        MixtureOptions(automaton=AutomatonParams(), open_index=lambda *_, **__: None)
