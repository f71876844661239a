"""Votes of neighbours by several settings, against NumPy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnlm.memories.voting import NEAR, RetrievedNeighbours, VoteOutput, VoteParams

VOCABULARY = 11


def retrieved(queries, k, seed, missing):
    generator = torch.Generator().manual_seed(seed)
    distances = (torch.rand(queries, k, generator=generator) * 9).sort(1).values
    values = torch.randint(0, VOCABULARY, (queries, k), generator=generator)
    ids = torch.arange(queries * k).view(queries, k)
    none = torch.zeros(queries, k, dtype=torch.bool)
    for row, count in enumerate(missing[:queries]):
        none[row, k - min(count, k) :] = True
    counts = torch.randint(1, 4, (queries, k), generator=generator).float() if seed % 2 else None
    return RetrievedNeighbours(
        ids.masked_fill(none, -1), distances.masked_fill(none, torch.inf), values.masked_fill(none, -1), counts
    )


def expected(neighbours, setting):
    """The (N, V) probabilities of the nearest `setting.k`, row by row."""
    probs = np.zeros((len(neighbours.ids), VOCABULARY))
    counts = torch.ones_like(neighbours.distances) if neighbours.counts is None else neighbours.counts
    columns = (neighbours.distances.double(), neighbours.values, counts)
    for row, own in enumerate(zip(*(column[:, : setting.k].tolist() for column in columns), strict=True)):
        votes = [vote for vote in zip(*own, strict=True) if vote[1] >= 0]
        weights = np.array([c * np.exp(-(d - votes[0][0]) / setting.knn_temperature) for d, _, c in votes])
        for weight, (_, value, _) in zip(weights / weights.sum() if votes else (), votes, strict=True):
            probs[row, value] += weight
    return probs


@given(
    st.sampled_from([4, 16, NEAR, NEAR + 6]),
    st.lists(st.tuples(st.integers(1, NEAR), st.sampled_from([0.3, 2.0, 50.0])), min_size=1, max_size=5, unique=True),
    st.booleans(),
    st.integers(0, 99),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_votes_of_each_setting_are_those_of_its_nearest_neighbours(width, pairs, largest_first, seed, missing):
    settings = [VoteParams(min(k, width), temperature) for k, temperature in pairs]
    if largest_first:  # the settings share their tensors then
        settings.sort(key=lambda setting: -setting.k)
    neighbours = retrieved(3, width, seed, missing)
    output = VoteOutput(neighbours.nearest(max(setting.k for setting in settings)), settings, VOCABULARY)
    for setting, votes in zip(settings, output.components, strict=True):
        wanted = expected(neighbours, setting)
        np.testing.assert_allclose(votes.log_probs().exp().numpy(), wanted, atol=1e-5)
        for token in range(VOCABULARY):
            found = votes.log_prob(torch.full((3,), token)).exp().numpy()
            np.testing.assert_allclose(found, wanted[:, token], atol=1e-5)
        assert votes.abstains().tolist() == [not row.any() for row in wanted]
    assert output.components[0].values.shape[1] == settings[0].k  # features count the neighbours of the first setting
