"""Damping of memories that repeat what was generated, against loops over all earlier places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnlm.memories.base import Logits
from knnlm.mixture.repetition import MAX_REPEAT, NO_TOKEN, damp, repeat_lengths
from knnlm.mixture.weights import MixturePrediction


def repeat_by_hand(tokens, top):
    """Return the length of the longest suffix that occurred before with the token `top` behind it."""
    longest = 0
    for place in range(len(tokens)):
        if tokens[place] == top:
            length = 0
            while length < min(place, MAX_REPEAT) and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            longest = max(longest, length)
    return longest


@dataclass
class Fixed:
    """The output of a memory with one or two components and a known most probable token."""

    best: torch.Tensor
    count: int

    @property
    def components(self):
        return [Logits(torch.zeros(len(self.best), 4))] * self.count

    def top(self):
        return self.best


texts = st.lists(st.lists(st.integers(0, 2), max_size=60), min_size=1, max_size=4)


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([[NO_TOKEN] * (width - len(row)) + row for row in rows], dtype=torch.long).reshape(
        len(rows), width
    )


@given(rows=texts, seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_repeats_equal_loops_over_all_places(rows, seed):
    tops = np.random.default_rng(seed).integers(-1, 3, (len(rows), 2))
    lengths = repeat_lengths(padded(rows), torch.from_numpy(tops)) if max(map(len, rows)) else torch.zeros(len(rows), 2)
    expected = [
        [repeat_by_hand(row, top) if top >= 0 else 0 for top in own] for row, own in zip(rows, tops, strict=True)
    ]
    assert lengths.tolist() == expected


@given(rows=texts, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_weight_of_a_repeating_memory_is_halved_for_each_token(rows, seed):
    random = np.random.default_rng(seed)
    tops = random.integers(-1, 3, (len(rows), 2))
    weights = random.dirichlet(np.ones(4), len(rows))
    outputs = [Fixed(torch.from_numpy(tops[:, 0]), 1), Fixed(torch.from_numpy(tops[:, 1]), 2)]
    mixed = MixturePrediction([Logits(torch.zeros(len(rows), 4))] * 4, torch.from_numpy(weights), outputs=outputs)
    expected = weights.copy()
    for row, tokens in enumerate(rows):
        for number, own in enumerate([slice(1, 2), slice(2, 4)]):
            top = tops[row, number]
            repeat = repeat_by_hand(tokens, top) if top >= 0 else 0
            if repeat >= 4:
                expected[row, own] *= 0.5 ** (repeat - 3)
    expected[:, 0] = 1 - expected[:, 1:].sum(1)
    np.testing.assert_allclose(damp(mixed, padded(rows)).weights.numpy(), expected, atol=1e-12)
    np.testing.assert_array_equal(mixed.weights.numpy(), weights)
    # Of some rows alone: the others stay as they are.
    some = np.flatnonzero(random.random(len(rows)) < 0.5)
    if len(some):
        found = damp(mixed, padded([rows[row] for row in some]), torch.from_numpy(some)).weights.numpy()
        rest = np.setdiff1d(np.arange(len(rows)), some)
        np.testing.assert_allclose(found[some], expected[some], atol=1e-12)
        np.testing.assert_array_equal(found[rest], weights[rest])
    np.testing.assert_array_equal(mixed.weights.numpy(), weights)


def test_loop_is_damped_more_with_each_round():
    loop = [5, 6, 7]
    factors = []
    for rounds in (1, 2, 3, 4, 8):
        generated = torch.tensor([loop * rounds])
        output = Fixed(torch.tensor([loop[0]]), 1)
        mixed = MixturePrediction([Logits(torch.zeros(1, 8))] * 2, torch.tensor([[0.2, 0.8]]), outputs=[output])
        factors.append(round(float(damp(mixed, generated).weights[0, 1]) / 0.8, 6))
    assert factors == [1, 1, 0.5**3, 0.5**6, round(0.5**13, 6)]
