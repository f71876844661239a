"""Any sequence of changes to a store, compared with a dictionary of documents and brute force."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers import oracle
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import check_keys, documents
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError
from knnlm.ingest.build import add, build
from knnlm.lm.causal import CausalLM
from knnlm.maintenance.merge import merge
from knnlm.maintenance.verify import verify

ALL = documents(9, words=8)
SPECS = ("Flat", "IVF2,Flat", "HNSW4", "exact")
WAYS = ("float16", "int8", "codes8")  # to store keys


@lru_cache
def reader() -> CausalLM:
    return CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")


@lru_cache
def baseline() -> dict[str, tuple[np.ndarray, list[int]]]:
    """The keys and tokens of each document, read baseline."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for document in ALL:
            with closing(build([document], Path(folder) / document.id, lm=reader())) as store:
                rows = torch.arange(store.entry_count)
                found[document.id] = store.take(rows).numpy(), store.values(rows).tolist()
    return found


def check(store: Datastore, ids: list[str]) -> None:
    """A store answers as one of exactly these documents, in this order, would."""
    stored = list(store.documents())
    assert [document.id for document in stored] == ids
    keys = np.concatenate([np.zeros((0, 32), np.float32), *(baseline()[name][0] for name in ids)])
    tokens = [token for name in ids for token in baseline()[name][1]]
    rows = torch.arange(store.entry_count)
    assert store.values(rows).tolist() == tokens
    check_keys(store, keys)
    keys = store.take(rows).numpy()  # which need not be just those, where a codec has rounded them
    for query in [keys[number] + np.float32(0.01) for number in range(0, len(keys), 41)]:
        found = open_index(store).search(torch.from_numpy(query)[None], 5)
        right = np.sort(oracle.distances(query, keys))[:5]
        there = found.ids[0] >= 0
        assert int(there.sum()) == min(5, len(keys))
        # An approximate index may give farther ones, but never nearer ones than there are.
        assert (found.distances[0][there].numpy() >= right - 0.05 - 0.02 * right).all()
        assert found.distances[0, 0].item() <= right[0] + 0.1 + 0.02 * right[0]


class StoreMachine(RuleBasedStateMachine):
    """A store on disk, and the list of its expected documents."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="knnlm-states-"))
        self.path = self.folder / "store"
        self.ids: list[str] = []
        self.begun: set[str] = set()  # documents that an addition may have read before it was stopped
        self.merged = True  # whether it can be
        self.held: list[tuple[Datastore, list[str]]] = []
        self.elsewhere: list[tuple[Datastore, list[str]]] = []  # of stores that were merged since
        self.merges = 0

    @initialize(count=st.integers(0, 4), rows=st.sampled_from([20, 60, 1000]), way=st.sampled_from(WAYS))
    def begin(self, count, rows, way):
        build(ALL[:count], self.path, lm=reader(), segment_entries=rows, key_format=way).close()
        self.ids = [document.id for document in ALL[:count]]
        self.merged = way == "float16" or count > 0
        if way != "float16" and count:
            # Only stores of one codec are merged, so the others are made from a copy.
            empty = shutil.copytree(self.path, self.folder / "empty")
            for name in self.ids:
                remove(empty, document=name)
            compact(empty)

    @rule(numbers=st.lists(st.integers(0, len(ALL) - 1), max_size=3))
    def add(self, numbers):
        added = add([ALL[number] for number in numbers], self.path, lm=reader())
        new = [name for name in dict.fromkeys(f"d{number}" for number in numbers) if name not in self.ids]
        assert (added.documents, added.skipped) == (len(new), len(numbers) - len(new))
        assert added.resumed <= len(self.begun & set(new))
        with closing(Datastore.open(self.path)) as store:
            there = [document.id for document in store.documents()][len(self.ids) :]
        # What had been read before comes first, in the order in which it was read.
        rest = [name for name in new if name in there[added.resumed :]]
        assert (sorted(there), there[added.resumed :]) == (sorted(new), rest)
        self.ids, self.begun = self.ids + there, set()

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def remove(self, data):
        gone = data.draw(st.sampled_from(self.ids))
        assert [document.id for document in remove(self.path, document=gone).documents] == [gone]
        self.ids = [name for name in self.ids if name != gone]

    @precondition(lambda self: self.ids)
    @rule(spec=st.sampled_from(SPECS))
    def index(self, spec):
        with closing(Datastore.open(self.path)) as store:
            build_index(store, spec)

    @rule(rows=st.sampled_from([None, 30, 500]))
    def compact(self, rows):
        done = compact(self.path, segment_entries=rows)
        self.begun = set()
        assert done.purged == (not self.held)

    @rule(numbers=st.lists(st.integers(0, len(ALL) - 1), min_size=2, max_size=5, unique=True), left=st.integers(0, 2))
    def stop(self, numbers, left):
        """Begin to add, and fail before the end: nothing is there, whatever comes next."""

        def some():
            yield from (ALL[number] for number in numbers[: len(numbers) - left])
            raise CorpusError("no more")

        with pytest.raises(CorpusError, match="no more"):
            add(some(), self.path, lm=reader())
        self.begun |= {f"d{number}" for number in numbers}

    @precondition(lambda self: self.merged)
    @rule(numbers=st.lists(st.integers(0, len(ALL) - 1), max_size=3, unique=True), first=st.booleans())
    def merge(self, numbers, first):
        """Continue with a merge of the store and another one, in either order; open readers keep the old one."""
        self.merges += 1
        other, out = self.folder / f"other-{self.merges}", self.folder / f"merged-{self.merges}"
        if (self.folder / "empty").exists():
            shutil.copytree(self.folder / "empty", other)
            add([ALL[number] for number in numbers], other, lm=reader())
        else:
            build([ALL[number] for number in numbers], other, lm=reader(), segment_entries=40).close()
        others = [f"d{number}" for number in numbers]
        both = [others, self.ids] if first else [self.ids, others]
        done = merge([other, self.path] if first else [self.path, other], out)
        right = list(dict.fromkeys(both[0] + both[1]))
        assert (done.documents, done.duplicates) == (len(right), len(both[0] + both[1]) - len(right))
        assert verify(out, deep=True).sound
        self.path, self.ids, self.begun = out, right, set()
        self.elsewhere, self.held = self.elsewhere + self.held, []

    @precondition(lambda self: len(self.held) < 2)
    @rule()
    def hold(self):
        self.held.append((Datastore.open(self.path), list(self.ids)))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self):
        self.held.pop(0)[0].close()

    @invariant()
    def everybody_sees_what_they_should(self):
        if not self.path.exists():
            return
        for store, ids in self.held + self.elsewhere:
            check(store, ids)
        with closing(Datastore.open(self.path)) as store:
            check(store, self.ids)

    def teardown(self):
        for store, _ in self.held + self.elsewhere:
            store.close()
        shutil.rmtree(self.folder)


def run_machine(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    wanted = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(StoreMachine, settings=wanted)


def test_store_contains_what_was_added_and_not_removed():
    run_machine(6, 10)


@pytest.mark.slow
def test_store_contains_what_was_added_and_not_removed_in_long_runs():
    run_machine(120, 30)
