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


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("generated", [False, True])
@given(
    seed=st.integers(0, 10_000), window=st.sampled_from([1, 4, 100]), lengths=st.lists(st.integers(1, 12), min_size=2)
)
@settings(max_examples=40, deadline=None)
def test_positions_of_a_batch_find_what_each_finds_alone(metric, generated, seed, window, lengths):
    random = np.random.default_rng(seed)
    source = Source()
    memory = CacheMemory(vocab_size=VOCAB, window=window, k=8, metric=metric, source=source, generated=generated)
    spans, queries = [], []
    for number, length in enumerate(lengths):
        keys = torch.from_numpy(random.normal(size=(length, DIM)).astype(np.float32))
        origins = torch.from_numpy(random.choice([Origin.GIVEN, Origin.GENERATED, Origin.HIDDEN], length))
        tokens = torch.from_numpy(random.integers(0, VOCAB, length))
        given = None if number % 3 == 2 else origins
        spans.append(Span(tokens, length - 1, {source: keys[:-1]}, origins=given))
        queries.append(keys[-1:])
    together = memory.retrieve(Context({source: torch.cat(queries)}, spans))
    for row, (span, query) in enumerate(zip(spans, queries, strict=True)):
        alone = memory.retrieve(Context({source: query}, [span]))
        torch.testing.assert_close(together.ids[row], alone.ids[0])
        torch.testing.assert_close(together.values[row], alone.values[0])
        torch.testing.assert_close(together.distances[row], alone.distances[0], atol=1e-4, rtol=1e-4)


def test_batch_with_one_long_text_is_not_padded(monkeypatch):
    source, memory = Source(), CacheMemory(vocab_size=VOCAB, k=8)
    monkeypatch.setattr(memory, "_search_batch", lambda *_: pytest.fail("padded to the longest text"))  # 400 > 2 · 102
    spans = [Span(torch.zeros(n, dtype=torch.long), n - 1, {source: torch.randn(n - 1, DIM)}) for n in (100, 2, 2, 2)]
    found = memory.retrieve(Context({source: torch.randn(4, DIM)}, spans))
    assert (found.ids >= 0).sum(1).tolist() == [8, 1, 1, 1]


def check(found, keys, tokens, start, *, window, votes):
    for row, position in enumerate(range(start, 12)):
        expected = nearest_by_hand(keys, tokens, position, window=window, votes=votes)
        there = found.ids[row] >= 0
        pairs = zip(found.ids[row][there].tolist(), found.values[row][there].tolist(), strict=True)
        assert list(pairs) == expected
