"""Test items that a store contains, by n-grams of tokens.

A test item that shares 13 consecutive tokens with a stored document may have been copied from it (the rule of the GPT-3
paper, with tokens instead of words). Figures on such items show what the store contains, not what the model learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import Ints, SuffixArray, open_suffix_array
from knnlm.errors import ParameterError
from knnlm.progress import Progress, silent

NGRAM = 13  # consecutive tokens that a test item and a document share


@dataclass(frozen=True)
class Overlap:
    """The items that share an n-gram with a store, and the documents they share it with."""

    items: tuple[bool, ...]  # for each item, whether the store contains an n-gram of it
    documents: tuple[str, ...]  # ids, in the order of the store


def find_overlap(
    store: Datastore, items: Iterable[Sequence[Sequence[int]]], *, n: int = NGRAM, progress: Progress = silent
) -> Overlap:
    """Find the items with an n-gram that the store contains. An item is a list of texts, and a text is its tokens.

    The store's suffix array is built where there is none.
    """
    if n < 1:
        raise ParameterError(f"n must be at least 1, not {n}.")
    array = open_suffix_array(store, progress=progress)
    borders = np.flatnonzero(array.text == 0)  # one before each document that has tokens
    found = np.zeros(len(borders), np.bool_)
    contained = []
    for item in items:
        ranges = [_occurrences(array, np.asarray(text, np.int64), n) for text in item]
        rows = np.concatenate([np.empty((0, 2), np.int64), *ranges])
        for low, high in np.unique(rows, axis=0):
            found[np.searchsorted(borders, array.order[low:high], side="right") - 1] = True
        contained.append(len(rows) > 0)
    # The border before a document stands at its first entry, moved by one for each document before it.
    entries = [int(borders[number]) - int(number) for number in np.flatnonzero(found)]
    return Overlap(tuple(contained), tuple(store.document_at(entry).id for entry in entries))


def _occurrences(array: SuffixArray, tokens: NDArray[np.int64], n: int) -> Ints:
    """Return the first row and the one after the last of each n-gram of a text that occurs, (n-grams, 2)."""
    numbers = array.encode(tokens, begins=False)
    begins = np.arange(max(0, len(numbers) - n + 1))
    low, high = array.first[numbers[begins]], array.first[numbers[begins] + 1]
    for length in range(1, n):
        alive = np.flatnonzero(low < high)
        begins, low, high = begins[alive], low[alive], high[alive]
        low, high = array.extend_match(low, high, numbers[begins + length], length)
    return np.stack([low, high], 1)[low < high]
