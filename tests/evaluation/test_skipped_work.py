"""Unneeded work is skipped: searches without influence, copies of the size of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.stores import documents
from knnlm.generation.causal import KnnForCausalLM
from knnlm.memories.base import Context, Logits, Votes
from knnlm.mixture import weights as fixed
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import MixturePrediction


class Counted:
    """An index that counts its searches, and the queries in them."""

    def __init__(self, index):
        self.index, self.metric = index, index.metric
        self.searches, self.queries = 0, 0

    def search(self, queries, k):
        self.searches += 1
        self.queries += len(queries)
        return self.index.search(queries, k)


def counted(mixture):
    mixture.knn.index = Counted(mixture.knn.index)
    return mixture.knn.index


def drawn_votes(generator, rows, k, words):
    values = torch.from_numpy(generator.integers(-1, words, (rows, k)))
    logs = torch.from_numpy(generator.normal(size=(rows, k)).astype(np.float32) * 3).masked_fill(values < 0, -torch.inf)
    return Votes(values, logs.log_softmax(1).nan_to_num(nan=-torch.inf), words)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 12), st.integers(1, 9), st.integers(1, 3))
def test_sparse_addition_of_votes_equals_dense_addition(seed, rows, k, words, polls):
    generator = np.random.default_rng(seed)
    parts = [drawn_votes(generator, rows, k, words) for _ in range(polls)]
    logits = torch.from_numpy(generator.normal(size=(rows, words)).astype(np.float32))
    weights = torch.from_numpy(generator.dirichlet(np.ones(polls + 1), rows).astype(np.float32))
    found = MixturePrediction([Logits(logits), *parts], weights).log_probs().exp().numpy()
    expected = weights[:, :1].double().numpy() * logits.double().softmax(1).numpy()
    for number, part in enumerate(parts, 1):
        for row in range(rows):
            for value, log in zip(part.values[row].tolist(), part.log_weights[row].tolist(), strict=True):
                if value >= 0:
                    expected[row, value] += float(weights[row, number]) * np.exp(log)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-7)
    polled = [(part, weights[:, number]) for number, part in enumerate(parts, 1)]
    total = logits.log_softmax(1) + weights[:, :1].log()
    assert torch.allclose(fixed._add_dense(total.clone(), polled).exp(), torch.from_numpy(found), rtol=1e-4, atol=1e-7)


def test_dense_mixture_allocates_one_tensor_of_the_vocabulary_size():
    made = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (2, 5000):
                made.append(out.data_ptr())
            return out

    parts = [Logits(torch.randn(2, 5000)), drawn_votes(np.random.default_rng(0), 2, 64, 5000)]
    mixed = MixturePrediction(parts, torch.tensor([[0.5, 0.5]]).expand(2, 2))
    with Watching():
        mixed.log_probs()
    assert len(set(made)) == 1


def test_gradients_go_through_a_dense_mixture():
    logits = torch.randn(3, 7, requires_grad=True)
    votes = drawn_votes(np.random.default_rng(1), 3, 5, 7)
    weights = torch.tensor([[0.7, 0.3]]).expand(3, 2)
    MixturePrediction([Logits(logits), votes], weights).log_probs()[:, 2].sum().backward()
    again = logits.detach().double().requires_grad_()
    dense = torch.zeros(3, 7, dtype=torch.float64)
    dense.scatter_add_(1, votes.values.clamp(min=0), 0.3 * votes.log_weights.exp().double())
    (0.7 * again.softmax(1) + dense).log()[:, 2].sum().backward()
    assert torch.allclose(logits.grad.double(), again.grad, atol=1e-5)


def test_generation_with_lambda_zero_equals_the_model_without_a_search(store, lm):
    mixture = Mixture.open(store.path, lm, k=8, lmbda=0.0)
    index = counted(mixture)
    ids = torch.tensor([[1, 5, 9, 4]])
    found = KnnForCausalLM(mixture)(input_ids=ids).logits
    assert index.searches == 0
    with torch.inference_mode():
        assert torch.allclose(found, lm.model(input_ids=ids).logits.float().log_softmax(-1), atol=1e-5)


def test_only_memories_with_a_weight_are_searched(store, lm):
    mixture = Mixture.open(store.path, lm, memories="knn:0,cache:0.3", k=8)
    index = counted(mixture)
    ids = torch.tensor([[1, 5, 9, 4, 5, 9]])
    quick = KnnForCausalLM(mixture)(input_ids=ids).logits
    assert index.searches == 0
    predictions = [mixture.predict(batch.context) for batch in mixture.read([[5, 9, 4, 5, 9, 3]])]
    assert index.searches == 1, "evaluation reports every component"
    assert len(predictions[0].components) == 3
    assert torch.isfinite(quick).all()


def test_evaluation_searches_once_for_a_batch_of_windows(store, lm):
    mixture = Mixture.open(store.path, lm, k=8, lmbda=0.3)
    index = counted(mixture)
    found = mixture.evaluate(documents(6, start=80))
    batches = len(list(mixture.read([lm.encode(document.text) for document in documents(6, start=80)])))
    assert (index.searches, index.queries) == (batches, found.tokens)


def test_nothing_is_searched_where_the_mask_is_false(store, lm):
    mixture = Mixture.open(store.path, lm, k=8, lmbda=0.3)
    index = counted(mixture)
    keys = torch.randn(4, store.width)
    context = Context({mixture.knn.source: keys})
    skipped = mixture.knn.predict(replace(context, search_mask=torch.zeros(4, dtype=torch.bool)))
    assert index.searches == 0
    assert skipped.components[0].abstains().all()
    assert skipped.features().shape == (4, len(mixture.knn.feature_names))
    assert (skipped.top() == -1).all()
    some = mixture.knn.predict(replace(context, search_mask=torch.tensor([True, False, False, True])))
    assert (index.searches, index.queries) == (1, 2)
    assert some.components[0].abstains().tolist() == [False, True, True, False]


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_predictions_without_unweighted_memories_are_the_same(store, lm, weight):
    mixture = Mixture.open(store.path, lm, k=8, lmbda=weight)
    (batch,) = mixture.read([[5, 9, 4, 5, 9, 3]])
    whole = mixture.predict(batch.context).log_probs()
    assert torch.allclose(mixture.predict(batch.context, all_components=False).log_probs(), whole, atol=1e-6)
