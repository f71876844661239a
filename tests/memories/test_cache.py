"""The cache: which earlier positions vote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnlm.memories.base import Context, Origin, Source, Span
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
    origins = None
    if prompt_length is not None:
        origins = torch.full((12,), Origin.GIVEN)
        origins[prompt_length:] = Origin.GENERATED
    span = Span(torch.from_numpy(tokens), start, past, origins=origins)
    found = memory.retrieve(Context({source: torch.from_numpy(keys[start:])}, [span]))
    votes = np.ones(13, bool)
    if prompt_length is not None and not generated:
        votes[prompt_length:] = False
    check(found, keys, tokens, start, window=window, votes=votes)


@pytest.mark.parametrize("generated", [False, True])
@given(seed=st.integers(0, 10_000), start=st.integers(0, 11), window=st.sampled_from([1, 4, 100]))
@settings(max_examples=40, deadline=None)
def test_tokens_vote_by_their_origin(generated, seed, start, window):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCAB, 12)
    keys = random.normal(size=(12, DIM)).astype(np.float32)
    origins = random.choice([Origin.GIVEN, Origin.GENERATED, Origin.HIDDEN], 12)
    source = Source()
    memory = CacheMemory(vocab_size=VOCAB, window=window, k=50, source=source, generated=generated)
    past = {source: torch.from_numpy(keys[:start])}
    span = Span(torch.from_numpy(tokens), start, past, origins=torch.from_numpy(origins))
    found = memory.retrieve(Context({source: torch.from_numpy(keys[start:])}, [span]))
    votes = (origins == Origin.GIVEN) | (generated & (origins == Origin.GENERATED))
    check(found, keys, tokens, start, window=window, votes=np.append(votes, False))


def check(found, keys, tokens, start, *, window, votes):
    for row, position in enumerate(range(start, 12)):
        expected = nearest_by_hand(keys, tokens, position, window=window, votes=votes)
        there = found.ids[row] >= 0
        pairs = zip(found.ids[row][there].tolist(), found.values[row][there].tolist(), strict=True)
        assert list(pairs) == expected
