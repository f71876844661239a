"""Name the stored contexts that spoke loudest. Knows nothing about batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knnlm.datastore import Datastore
from knnlm.lm import CausalLM
from knnlm.memory import Answer, KnnMemory, Poll
from knnlm.mixture import Mixture

BEFORE, AFTER = 16, 8  # tokens around a neighbour


def name_sources(mixture: Mixture, answers: Sequence[Answer], position: int, *, top: int) -> list[dict[str, Any]]:
    """Give the loudest neighbours of a position, of every store, loudest first."""
    named = []
    for label, memory, answer in zip(mixture.labels, mixture.memories, answers, strict=True):
        if not isinstance(answer, Poll) or not isinstance(memory, KnnMemory):
            continue
        # Of those that are equally loud, the nearer ones.
        votes, places = answer.parts[0].log_weights[position].exp().sort(descending=True, stable=True)
        for place, weight in zip(places[:top].tolist(), votes[:top].tolist(), strict=True):
            row = int(answer.found.ids[position, place])
            if row >= 0:
                facts = {"memory": label, "weight": weight}
                facts["distance"] = float(answer.found.distances[position, place])
                named.append({**facts, **describe(memory.store, mixture.lm, row)})
    return sorted(named, key=lambda each: -each["weight"])[:top]


def describe(store: Datastore, lm: CausalLM, row: int) -> dict[str, Any]:
    """Say where a row stands: its document, the token there, and the text around."""
    document = store.document_at(row)
    before, after = store.around(row, before=BEFORE, after=AFTER)
    return {
        "document": document.id,
        "number": document.number,
        "source": document.source,
        "row": row,
        "token": lm.decode(after[:1]),
        "before": lm.decode(before),
        "after": lm.decode(after[1:]),
    }
