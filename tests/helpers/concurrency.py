"""A writer and readers of one store, and how a reader knows what it should see. Run by the zygote of crashing.py.

Before each change, the writer notes which documents there will be in the next generation. A reader looks its own
generation up there, and holds all that it reads against it.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers import oracle
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.store import Datastore
from knnlm.ingest.build import add
from knnlm.lm.causal import CausalLM

PLAN, KEYS = "plan.jsonl", "alone.npz"


def note(path: Path, generation: int, ids: list[str]) -> None:
    """Say what there will be in a generation."""
    with path.with_name(PLAN).open("a") as file:
        file.write(json.dumps({"generation": generation, "ids": ids}) + "\n")


def expected(path: Path, generation: int) -> list[str]:
    """Say what there must be in a generation: the last that was noted of it."""
    lines = path.with_name(PLAN).read_text().splitlines(keepends=True)
    notes = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one["ids"] for one in notes if one["generation"] == generation][-1]


def write(path: Path, order: dict[str, Any], lm: CausalLM) -> None:
    """Change the store until the time is over, one generation at a time."""
    from helpers.stores import documents

    chance, until = random.Random(order["seed"]), time.monotonic() + order["seconds"]
    everything = {document.id: document for document in documents(12)}
    with closing(Datastore.open(path)) as store:
        there, generation = [stored.id for stored in store.documents()], store.generation
    changes = 0
    while time.monotonic() < until:
        missing = sorted(set(everything) - set(there))
        do = chance.choice(["add", "add", "remove", "remove", "compact", "index"])
        if do == "add" and missing:
            new = chance.sample(missing, min(len(missing), chance.choice([1, 4])))  # one segment, or several
            there = [*there, *new]
            note(path, generation + 1, there)
            add([everything[name] for name in new], path, lm=lm)
        elif do == "remove" and len(there) > 2:
            gone = chance.choice(there)
            there = [name for name in there if name != gone]
            note(path, generation + 1, there)
            remove(path, document=gone)
        elif do == "compact":
            note(path, generation + 1, there)
            compact(path)
        else:
            with closing(Datastore.open(path)) as store:
                build_index(store, chance.choice(["Flat", "IVF2,Flat", "exact"]))
        with closing(Datastore.open(path)) as store:
            generation = store.generation
            assert [stored.id for stored in store.documents()] == there
        changes += 1
    path.with_name("writer").write_text(str(changes))


def read(path: Path, order: dict[str, Any]) -> None:
    """Open the store again and again, and check every answer."""
    torch.set_num_threads(1)
    chance, until = random.Random(order["seed"]), time.monotonic() + order["seconds"]
    alone = np.load(path.with_name(KEYS))
    checks, generations = 0, set()
    while time.monotonic() < until or not checks:
        with closing(Datastore.open(path)) as store:
            index = open_index(store)
            for _ in range(3):
                _check(store, index, expected(path, store.generation), alone, chance)
                checks += 1
                time.sleep(chance.random() * 0.05)
            generations.add(store.generation)
    path.with_name(f"reader-{order['seed']}").write_text(f"{checks} {len(generations)}")


def _check(store: Datastore, index: Any, ids: list[str], alone: Any, chance: random.Random) -> None:
    """Everything must be that of exactly these documents."""
    assert [stored.id for stored in store.documents()] == ids, (store.generation, ids)
    keys = np.concatenate([alone[f"keys {name}"] for name in ids])
    values = np.concatenate([alone[f"values {name}"] for name in ids])
    assert store.values(torch.arange(store.entry_count)).tolist() == values.tolist()
    query = alone[f"keys d{chance.randrange(12)}"][chance.randrange(20)] + np.float32(0.01)
    found = index.search(torch.from_numpy(query)[None], 4)
    right = np.sort(oracle.distances(query, keys))[:4]
    np.testing.assert_allclose(found.distances[0].numpy(), right, atol=0.05, rtol=0.02)
    row = int(found.ids[0, 0])
    document = store.document_at(row)
    assert document.id in ids
    assert document.first_entry <= row < document.first_entry + document.entries


def hold(path: Path, order: dict[str, Any]) -> None:
    """Open the store, say so, and when told to go on, see that it has not changed."""
    with closing(Datastore.open(path)) as store:
        right = store.take(torch.arange(store.entry_count)), list(store.documents())
        path.with_name("open").touch()
        while not path.with_name("go").exists():
            time.sleep(0.01)
        assert torch.equal(store.take(torch.arange(store.entry_count)), right[0])
        assert list(store.documents()) == right[1]
        time.sleep(0.3)
