"""The cache: which earlier positions vote."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from knnlm.memories.base import Context, Source, Span
from knnlm.memories.cache import CacheMemory

VOCAB, DIM = 50, 6


def nearest_by_hand(keys, tokens, position, *, window, votes):
    """Return the earlier positions of a position by distance, those whose next token `votes` marks."""
    earlier = [
        (float(((keys[position] - keys[other]) ** 2).sum()), other)
        for other in range(max(0, position - window), position)
        if votes[other + 1]
    ]
    return [(other, int(tokens[other + 1])) for _, other in sorted(earlier)]


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("prompt_length", [None, 1, 7, 20])
@pytest.mark.parametrize("start", [0, 6, 11])
@pytest.mark.parametrize("window", [4, 100])
def test_generated_tokens_vote_only_where_that_is_asked_for(generated, prompt_length, start, window):
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, 12)
    keys = random.normal(size=(12, DIM)).astype(np.float32)
    source = Source()
    memory = CacheMemory(vocab_size=VOCAB, window=window, k=50, source=source, generated=generated)
    past = {source: torch.from_numpy(keys[:start])}
    span = Span(torch.from_numpy(tokens), start, past, prompt_length=prompt_length)
    found = memory.retrieve(Context({source: torch.from_numpy(keys[start:])}, [span]))
    votes = np.ones(13, bool)
    if prompt_length is not None and not generated:
        votes[prompt_length:] = False
    for row, position in enumerate(range(start, 12)):
        expected = nearest_by_hand(keys, tokens, position, window=window, votes=votes)
        there = found.ids[row] >= 0
        pairs = zip(found.ids[row][there].tolist(), found.values[row][there].tolist(), strict=True)
        assert list(pairs) == expected
