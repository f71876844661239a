"""The domain of sources: its classifier against a closed form, and translations of sources outside of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.pairs import pair_lm, pairs
from knnlm.corpus import Document
from knnlm.errors import DatastoreCorrupt
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.source_domain import SourceDomain
from knnlm.mixture.spec import MixtureOptions


def states(count: int, centre: float, seed: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) + centre


def test_classifier_separates_what_can_be_separated():
    domain = SourceDomain.fit(states(200, 1.5, 0), states(300, -1.5, 1))
    assert domain is not None
    assert domain.in_domain(states(100, 1.5, 2)).float().mean() > 0.99
    assert domain.in_domain(states(100, -1.5, 3)).float().mean() < 0.01
    assert domain.metadata["own"] > 0.98
    assert domain.metadata["other"] < 0.02
    assert (domain.metadata["sources"], domain.metadata["other_sources"]) == (200, 300)


def test_fit_is_the_minimum_of_its_loss():
    own, other = states(80, 0.4, 0).double(), states(120, -0.4, 1).double()
    domain = SourceDomain.fit(own, other)
    inputs, labels = torch.cat([own, other]).numpy(), np.r_[np.ones(80), np.zeros(120)]
    deviation = inputs.std(0)
    margin = (inputs - domain.mean.numpy()) @ domain.weight.numpy() + float(domain.bias)
    balance = np.where(labels == 1, 0.5 / 80, 0.5 / 120)
    slope = balance * (1 / (1 + np.exp(-margin)) - labels)
    gradient = slope @ ((inputs - inputs.mean(0)) / deviation) + 2 * 0.01 * domain.weight.numpy() * deviation
    assert np.abs(gradient).max() < 1e-4
    assert abs(slope.sum()) < 1e-4


def test_few_or_equal_sources_have_no_domain():
    assert SourceDomain.fit(states(49, 1, 0), states(300, -1, 1)) is None
    same = states(60, 0, 0)
    assert SourceDomain.fit(same, same) is None


def test_state_is_restored_and_checked():
    domain = SourceDomain.fit(states(60, 1, 0), states(60, -1, 1))
    tensors, metadata = domain.state()
    again = SourceDomain.load(tensors, metadata)
    probe = states(50, 0, 5)
    assert torch.equal(again.in_domain(probe), domain.in_domain(probe))
    with pytest.raises(DatastoreCorrupt, match="mean state"):
        SourceDomain.load({}, {})
    with pytest.raises(DatastoreCorrupt):
        SourceDomain.load({**tensors, "weight": torch.zeros(3)}, metadata)


@pytest.fixture(scope="module")
def lm() -> Seq2SeqLM:
    return pair_lm("m2m_100")


def marked(count: int, start: int, word: str) -> list[Document]:
    """Pairs whose sources repeat a word."""
    own = pairs(count, start=start)
    return [Document(each.id, each.source, each.text, source_text=f"{word} {word} {each.source_text}") for each in own]


@pytest.fixture(scope="module")
def tuned(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "pairs.store"
    build(marked(60, 0, "with"), folder, lm=lm).close()
    mixture = Mixture.open(folder, lm, memories="knn", use_tuned=False)
    result = mixture.tune(marked(30, 100, "with"), other=marked(60, 300, "model"), samples=0, ks=[4])
    return folder, mixture, result


def test_mean_states_equal_one_source_at_a_time(lm):
    texts = [pair.source_text for pair in pairs(7)]
    found = lm.mean_source_states(texts, batch_size=3)
    for text, row in zip(texts, found, strict=True):
        (tokens,) = lm.encode_sources([text])
        hidden = lm.model.get_encoder()(input_ids=torch.tensor([tokens])).last_hidden_state
        torch.testing.assert_close(row, hidden[0].detach().mean(0), atol=1e-5, rtol=1e-4)


def test_source_outside_the_domain_is_translated_by_the_model_alone(lm, tuned):
    folder, mixture, result = tuned
    assert result.source_domain is not None
    opened = Mixture.open(folder, lm)
    unchecked = Mixture.open(folder, lm, options=MixtureOptions(domain_check=False))
    texts = [pair.source_text for pair in [*marked(6, 400, "with"), *marked(6, 500, "model")]]
    inside = opened.source_domain.in_domain(lm.mean_source_states(texts)).tolist()
    assert 0 < sum(inside) < len(texts)
    settings = {"max_new_tokens": 12, "batch_size": 5}
    alone = opened.translate(texts, use_memory=False, **settings)
    with_memory = unchecked.translate(texts, **settings)
    found = opened.translate(texts, **settings)
    expected = [with_memory[row] if known else alone[row] for row, known in enumerate(inside)]
    assert found == expected
    assert any(with_memory[row] != alone[row] for row, known in enumerate(inside) if not known)
    assert mixture.translate(texts, **settings) == found
    beams = {**settings, "num_beams": 3}
    searched = [opened.translate(texts, **beams), unchecked.translate(texts, **beams)]
    alone = opened.translate(texts, use_memory=False, **beams)
    assert searched[0] == [searched[1][row] if known else alone[row] for row, known in enumerate(inside)]


def test_saved_model_keeps_the_domain(tuned, tmp_path):
    folder, mixture, _ = tuned
    KnnForSeq2SeqLM(mixture).save_pretrained(tmp_path / "saved")
    again = KnnForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    probe = torch.randn(20, mixture.source_domain.mean.shape[0])
    assert torch.equal(again.mixture.source_domain.in_domain(probe), mixture.source_domain.in_domain(probe))
    mixture_with_lambda = Mixture.open(folder, mixture.lm)
    mixture_with_lambda.lmbda = 0.5
    assert mixture_with_lambda.source_domain is None
