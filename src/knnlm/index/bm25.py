"""BM25: which documents of tokens have the most in common with a query, by an inverted index in NumPy.

score(q, d) = Σ over tokens t of q, each as often as it is there, of
    idf(t) · f · (K1 + 1) / (f + K1 · (1 - B + B · |d| / mean |d|)),   f: how often t is in d
idf(t) = ln(1 + (N - n + 0.5) / (n + 0.5)),   n: documents with t, of N
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75  # the defaults of Lucene

Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class _Postings:
    """How often tokens are in documents: one posting for each token of each document, by token, then by document."""

    tokens: SmallInts  # (P,)
    documents: SmallInts  # (P,)
    frequencies: SmallInts  # (P,)
    lengths: Ints  # (N,) of the documents

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]]) -> _Postings:
        """Count the tokens of documents."""
        given = [np.asarray(document, np.int64) for document in documents]
        lengths = np.array([len(document) for document in given], np.int64)
        count = max(1, len(given))
        tokens, places = np.unique(np.concatenate([*given, np.empty(0, np.int64)]), return_inverse=True)
        # One number for each token and document, so that one sort groups the postings of a token.
        pairs = places * count + np.repeat(np.arange(len(given)), lengths)
        pairs, frequencies = np.unique(pairs, return_counts=True)
        places, numbers = np.divmod(pairs, count)
        return cls(tokens[places].astype(np.int32), numbers.astype(np.int32), frequencies.astype(np.int32), lengths)

    def select(self, kept: Mask) -> _Postings:
        """Return those of some documents, which are numbered again in their order."""
        numbers, own = np.cumsum(kept, dtype=np.int32) - np.int32(1), kept[self.documents]
        return _Postings(self.tokens[own], numbers[self.documents[own]], self.frequencies[own], self.lengths[kept])

    def join(self, others: _Postings) -> _Postings:
        """Return these with those of other documents, which are numbered after them."""
        places = np.searchsorted(self.tokens, others.tokens, side="right")
        return _Postings(
            np.insert(self.tokens, places, others.tokens),
            np.insert(self.documents, places, others.documents + np.int32(len(self.lengths))),
            np.insert(self.frequencies, places, others.frequencies),
            np.concatenate([self.lengths, others.lengths]),
        )


class BM25:
    """An inverted index: for every token, the documents that contain it and what it adds to their scores."""

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        self._weigh(_Postings.of(documents))

    def changed(self, kept: Mask, added: Iterable[Sequence[int]]) -> BM25:
        """Return an index of the documents that `kept` marks, in their order, and of others after them.

        It equals one that is built of them, but only the others are counted and sorted.
        """
        index = copy.copy(self)
        index._weigh(self._postings.select(kept).join(_Postings.of(added)))
        return index

    def _weigh(self, postings: _Postings) -> None:
        """Compute what each posting adds to the score of its document."""
        self._postings = postings
        self.count = len(postings.lengths)
        firsts = np.flatnonzero(np.diff(postings.tokens, prepend=np.int32(-1)))
        self._tokens = postings.tokens[firsts]
        self._starts = np.append(firsts, len(postings.tokens))
        containing = np.diff(self._starts)
        idf = np.log1p((self.count - containing + 0.5) / (containing + 0.5))
        lengths, frequencies = postings.lengths, postings.frequencies
        norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1e-9)) if self.count else lengths.astype(np.float64)
        shares = frequencies * (K1 + 1) / (frequencies + norms[postings.documents])
        self._impacts = (np.repeat(idf, containing) * shares).astype(np.float32)  # (P,)

    def scores(self, query: Sequence[int]) -> NDArray[np.float64]:
        """Return the score of every document."""
        scores = np.zeros(self.count)
        wanted, counts = np.unique(np.asarray(query, np.int64), return_counts=True)
        places = np.searchsorted(self._tokens, wanted)
        for token, count, place in zip(wanted.tolist(), counts.tolist(), places.tolist(), strict=True):
            if place < len(self._tokens) and self._tokens[place] == token:
                own = slice(self._starts[place], self._starts[place + 1])
                scores[self._postings.documents[own]] += count * self._impacts[own]  # a document is there once
        return scores

    def nearest(self, query: Sequence[int], count: int) -> Ints:
        """Return the numbers of the documents with the largest scores, ascending; of equal ones the first."""
        if count >= self.count:
            return np.arange(self.count)
        scores = self.scores(query)
        last = np.partition(scores, self.count - count)[self.count - count]
        above = np.flatnonzero(scores > last)
        equal = np.flatnonzero(scores == last)[: count - len(above)]
        return np.sort(np.concatenate([above, equal]))
