"""BM25: which documents of tokens have the most in common with a query, by an inverted index in NumPy.

score(q, d) = Σ over tokens t of q, each as often as it is there, of
    idf(t) · f · (K1 + 1) / (f + K1 · (1 - B + B · |d| / mean |d|)),   f: how often t is in d
idf(t) = ln(1 + (N - n + 0.5) / (n + 0.5)),   n: documents with t, of N
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75  # the defaults of Lucene

Ints = NDArray[np.int64]


class BM25:
    """An inverted index: for every token, the documents that contain it and what it adds to their scores."""

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        given = [np.asarray(document, np.int64) for document in documents]
        self.count = len(given)
        lengths = np.array([len(document) for document in given], np.int64)
        tokens = np.concatenate(given) if given else np.empty(0, np.int64)
        self._tokens, places = np.unique(tokens, return_inverse=True)
        # One number for each token and document, so that one sort groups the postings of a token.
        pairs = places * max(1, self.count) + np.repeat(np.arange(self.count), lengths)
        pairs, frequencies = np.unique(pairs, return_counts=True)
        token, documents_of = np.divmod(pairs, max(1, self.count))
        self._documents = documents_of.astype(np.int32)  # (P,) of the postings, sorted by token
        self._starts = np.searchsorted(token, np.arange(len(self._tokens) + 1))
        containing = np.diff(self._starts)
        idf = np.log1p((self.count - containing + 0.5) / (containing + 0.5))
        norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1e-9)) if self.count else lengths.astype(np.float64)
        shares = frequencies * (K1 + 1) / (frequencies + norms[documents_of])
        self._impacts = (idf[token] * shares).astype(np.float32)  # (P,)

    def scores(self, query: Sequence[int]) -> NDArray[np.float64]:
        """Return the score of every document."""
        scores = np.zeros(self.count)
        wanted, counts = np.unique(np.asarray(query, np.int64), return_counts=True)
        places = np.searchsorted(self._tokens, wanted)
        for token, count, place in zip(wanted.tolist(), counts.tolist(), places.tolist(), strict=True):
            if place < len(self._tokens) and self._tokens[place] == token:
                own = slice(self._starts[place], self._starts[place + 1])
                scores[self._documents[own]] += count * self._impacts[own]  # a document is there once
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
