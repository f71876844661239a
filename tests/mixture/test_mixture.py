"""Votes and mixtures against NumPy, on whatever hypothesis can think of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers import oracle
from knnlm.errors import ParameterError
from knnlm.memories.base import Logits
from knnlm.memories.knn import KnnMemory
from knnlm.memories.voting import RetrievedNeighbours, check_vote, vote
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import FixedWeights, MixturePrediction, check_lambda

VOCABULARY = 11


@st.composite
def cases(draw):
    """Logits, neighbours with ties and gaps, targets."""
    rows, k = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    logits = draw(hnp.arrays(np.float32, (rows, VOCABULARY), elements=st.floats(-80, 80, width=32)))
    distances = draw(hnp.arrays(np.float32, (rows, k), elements=st.sampled_from([0.0, 1.0, 1.5, 7.0, 400.0, 9000.0])))
    distances.sort(1)
    values = draw(hnp.arrays(np.int64, (rows, k), elements=st.integers(0, VOCABULARY - 1)))
    present = draw(hnp.arrays(np.int64, (rows,), elements=st.integers(0, k)))
    ids = np.where(np.arange(k) < present[:, None], 3, -1)
    targets = draw(hnp.arrays(np.int64, (rows,), elements=st.integers(0, VOCABULARY - 1)))
    found = RetrievedNeighbours(
        torch.from_numpy(ids),
        torch.from_numpy(np.where(ids < 0, np.inf, distances).astype(np.float32)),
        torch.from_numpy(np.where(ids < 0, -1, values)),
    )
    return torch.from_numpy(logits), found, torch.from_numpy(targets)


def expected(logits, found, row, temperature, weight):
    """The mixture of one row by the formulas."""
    p_lm = oracle.softmax(logits[row])
    there = found.ids[row].numpy() >= 0
    if not there.any():
        return p_lm
    weights = oracle.softmax(-found.distances[row].double().numpy()[there] / temperature)
    p_knn = np.zeros(VOCABULARY)
    np.add.at(p_knn, found.values[row].numpy()[there], weights)
    return (1 - weight) * p_lm + weight * p_knn


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([0.01, 0.5, 1.0, 30.0, 1e6]), st.sampled_from([0.0, 0.1, 0.5, 0.999, 1.0]))
def test_mixture_is_the_weighted_sum_dense_and_for_one_target(case, temperature, weight):
    logits, found, targets = case
    votes = vote(found, knn_temperature=temperature, vocab_size=VOCABULARY)
    mixed = MixturePrediction.from_fixed([Logits(logits), votes], [1 - weight, weight])
    dense, of = mixed.log_probs().exp(), mixed.log_prob(targets)
    for row in range(len(logits)):
        right = expected(logits, found, row, temperature, weight)
        np.testing.assert_allclose(dense[row], right, rtol=1e-4, atol=1e-7)
        # Votes are summed in float32, which ends at 1e-38; the model's probabilities go far below.
        votes_alone = expected(logits, found, row, temperature, 1.0)
        defined = ~((votes_alone > 0) & (votes_alone < 1e-36))
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(mixed.log_probs()[row][defined], np.log(right[defined]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dense[row].sum(), 1, rtol=1e-5)
        # In the log domain nothing underflows, unlike in the oracle, whose float64 ends at e^-745.
        if right[targets[row]] > 0:
            np.testing.assert_allclose(of[row], np.log(right[targets[row]]), rtol=1e-4, atol=1e-4)
        else:
            assert of[row] < -700


@settings(max_examples=100, deadline=None)
@given(cases())
def test_lambda_zero_is_the_model_itself_bit_for_bit(case):
    logits, found, targets = case
    votes = vote(found, knn_temperature=1.0, vocab_size=VOCABULARY)
    mixed = MixturePrediction.from_fixed([Logits(logits), votes], [1.0, 0.0])
    assert torch.equal(mixed.log_prob(targets), Logits(logits).log_prob(targets))
    assert torch.equal(mixed.log_probs(), Logits(logits).log_probs())


def test_row_without_neighbours_has_the_models_distribution():
    found = RetrievedNeighbours(torch.tensor([[-1, -1]]), torch.full((1, 2), torch.inf), torch.tensor([[-1, -1]]))
    votes = vote(found, knn_temperature=1.0, vocab_size=VOCABULARY)
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    mixed = MixturePrediction.from_fixed([Logits(logits), votes], [0.0, 1.0])
    assert votes.abstains().tolist() == [True]
    torch.testing.assert_close(mixed.log_probs().exp(), logits.softmax(1))
    assert (votes.log_probs() == -torch.inf).all()


def test_many_rows_are_scored_in_pieces_as_if_at_once():
    logits = torch.randn(300, VOCABULARY, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(300) % VOCABULARY
    right = np.log([oracle.softmax(row)[target] for row, target in zip(logits.numpy(), targets, strict=True)])
    np.testing.assert_allclose(Logits(logits).log_prob(targets), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan"), float("inf")])
def test_lambda_outside_zero_to_one_is_refused(weight):
    with pytest.raises(ParameterError, match="lambda must be from 0 to 1"):
        check_lambda(weight)


@pytest.mark.parametrize(("k", "knn_temperature"), [(0, 1.0), (-3, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_vote_without_neighbours_or_temperature_is_refused(k, knn_temperature):
    with pytest.raises(ParameterError, match="must be"):
        check_vote(k, knn_temperature)


class CountedIndex:
    """An index that counts its searches and the queries in them."""

    def __init__(self, index):
        self.index, self.metric, self.searches, self.queries = index, index.metric, 0, 0

    def search(self, queries, k):
        self.searches += 1
        self.queries += len(queries)
        return self.index.search(queries, k)


TOKENS = [5, 9, 4, 5, 9, 3, 7, 8]


def test_one_retrieve_serves_several_predictions(store, lm):
    """Mixtures that differ in k, τ and λ give, from one search, what each gives from its own and what NumPy gives."""
    whole = Mixture.open(store.path, lm, k=16, knn_temperature=3.0, lmbda=0.4)
    index = whole.knn.index = CountedIndex(whole.knn.index)
    (batch,) = whole.read([TOKENS])
    retrieved = whole.retrieve(batch.context)
    assert (index.searches, index.queries) == (1, len(batch.targets))
    keys = store.keys.take(torch.arange(store.entry_count)).double().numpy()
    values = store.values(torch.arange(store.entry_count)).numpy()
    queries = store.project(batch.context.states[whole.knn.source], metric="l2").double().numpy()
    for k, knn_temperature, lmbda in [(16, 3.0, 0.4), (16, 1.0, 0.1), (3, 2.0, 0.9), (1, 2.0, 0.5)]:
        knn = KnnMemory(store, index, k=k, knn_temperature=knn_temperature, source=whole.knn.source)
        mixture = Mixture(lm, knn, lmbda=lmbda)
        found = mixture.predict(batch.context, retrieved)
        assert index.searches == 1
        separate = mixture.predict(batch.context)
        assert index.searches == 2
        index.searches = 1
        distances = ((keys[None] - queries[:, None]) ** 2).sum(2)  # (N, rows)
        nearest = np.argsort(distances, kind="stable")
        cut = np.take_along_axis(distances, nearest[:, k - 1 : k + 1], 1)
        # Entries that tie for the last place may differ between searches.
        untied = np.flatnonzero(cut[:, 1] - cut[:, 0] > 1e-4)
        assert len(untied) >= len(TOKENS) // 2
        torch.testing.assert_close(found.log_probs()[untied], separate.log_probs()[untied], rtol=1e-5, atol=1e-5)
        assert torch.equal(found.outputs[0].neighbours.ids[untied], separate.outputs[0].neighbours.ids[untied])
        for row in untied:
            target, own = int(batch.targets[row]), nearest[row, :k]
            weights = oracle.softmax(-distances[row, own] / knn_temperature)
            p_lm = oracle.softmax(batch.logits[row].double().numpy())[target]
            expected = np.log((1 - lmbda) * p_lm + lmbda * weights[values[own] == target].sum())
            np.testing.assert_allclose(float(found.log_prob(batch.targets)[row]), expected, rtol=1e-3, atol=1e-3)


def test_retrieved_neighbours_can_be_selected_by_position_memory_and_k(store, lm):
    mixture = Mixture.open(store.path, lm, memories="cache,knn", k=8)
    index = mixture.knn.index = CountedIndex(mixture.knn.index)
    (batch,) = mixture.read([TOKENS])
    retrieved = mixture.retrieve(batch.context)
    assert retrieved.neighbours[0] is None, "a cheap memory is not searched"
    neighbours = retrieved.neighbours[1]
    rows = torch.tensor([4, 1])
    part = retrieved.select(rows).nearest(3).only([1])
    assert torch.equal(part.neighbours[0].ids, neighbours.ids[rows, :3])
    assert torch.equal(part.neighbours[0].values, neighbours.values[rows, :3])
    assert torch.equal(part.neighbours[0].distances, neighbours.distances[rows, :3])
    assert index.searches == 1


def test_each_position_can_have_its_own_number_of_neighbours(store, lm):
    mixture = Mixture.open(store.path, lm, k=8)
    index = mixture.knn.index = CountedIndex(mixture.knn.index)
    (batch,) = mixture.read([TOKENS])
    ks = [0, 2, 5, 2, 0, 5, 2, 2]
    found = mixture.retrieve(batch.context, [ks]).neighbours[0]
    assert (index.searches, index.queries) == (2, 6)
    assert (found.ids >= 0).sum(1).tolist() == ks
    for row, k in enumerate(ks):
        if k:
            alone = mixture.knn.search(batch.context.states[mixture.knn.source][row : row + 1], k)
            torch.testing.assert_close(found.distances[row, :k], alone.distances[0])
    nothing = mixture.retrieve(batch.context, [[0] * len(ks)]).neighbours[0]
    assert nothing.ids.shape == (len(ks), 0)


def test_prediction_masks_what_was_retrieved_where_the_weights_skip_the_search(store, lm):
    class SkippingWeights(FixedWeights):
        skips_searches = True

        def search_mask(self, context, lm, answers):  # noqa: ARG002
            return torch.arange(len(context.states[mixture.knn.source])) % 2 == 0

    mixture = Mixture.open(store.path, lm, k=8)
    mixture.weights = SkippingWeights((0.5, 0.5))
    index = mixture.knn.index = CountedIndex(mixture.knn.index)
    (batch,) = mixture.read([TOKENS])
    everywhere = mixture.retrieve(batch.context, [8])
    skipped = mixture.retrieve(batch.context)
    assert index.queries == len(TOKENS) + len(TOKENS) // 2
    expected = mixture.predict(batch.context)
    assert expected.search_mask.tolist() == [True, False] * 4
    assert expected.component_abstains()[:, 1].tolist() == [False, True] * 4
    for retrieved in (everywhere, skipped):
        found = mixture.predict(batch.context, retrieved)
        torch.testing.assert_close(found.log_probs(), expected.log_probs())
        assert torch.equal(found.search_mask, expected.search_mask)


def test_only_expensive_memories_are_searched(store, lm):
    mixture = Mixture.open(store.path, lm, memories="knn,cache,ngram", k=8)
    assert [memory.expensive for memory in mixture.memories] == [True, False, False]
    assert [each is not None for each in mixture.retrieve(next(mixture.read([TOKENS])).context).neighbours] == [
        True,
        False,
        False,
    ]
