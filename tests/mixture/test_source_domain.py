"""The domain of sources: its classifier against a closed form, and translations of sources outside of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.pairs import pair_lm, pairs
from knnlm.corpus import Document
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture import source_domain
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.source_domain import SourceDomain, Sources
from knnlm.mixture.spec import MixtureOptions


def states(count: int, centre: float, seed: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) + centre


def tokens(count: int, frequent: int, seed: int) -> list[tuple[int, ...]]:
    """Rows of one to nine of ten tokens, of which one is frequent."""
    random = np.random.default_rng(seed)
    weights = np.where(np.arange(10) == frequent, 0.4, 0.6 / 9)
    return [tuple(random.choice(10, size=random.integers(1, 10), p=weights).tolist()) for _ in range(count)]


def sources(count: int, centre: float, seed: int, frequent: int = 3) -> Sources:
    return Sources(states(count, centre, seed), tokens(count, frequent, seed))


def test_classifier_separates_what_can_be_separated():
    domain = SourceDomain.fit(sources(200, 1.5, 0), sources(300, -1.5, 1))
    assert domain is not None
    assert domain.in_domain(states(100, 1.5, 2), tokens(100, 3, 2)).float().mean() > 0.99
    assert domain.in_domain(states(100, -1.5, 3), tokens(100, 3, 3)).float().mean() < 0.01
    assert domain.metadata["own"] > 0.98
    assert domain.metadata["other"] < 0.02
    assert (domain.metadata["sources"], domain.metadata["other_sources"]) == (200, 300)


def test_tokens_separate_sources_whose_states_do_not():
    domain = SourceDomain.fit(sources(300, 0, 0, frequent=3), sources(300, 0, 1, frequent=7))
    probe = states(200, 0, 2)
    inside, outside = (domain.in_domain(probe, tokens(200, frequent, 5)).float().mean() for frequent in (3, 7))
    assert inside > 0.6
    assert outside < 0.3
    assert domain.in_domain(probe, [(10**6, 3, 3, 3)] * 200).all()  # a token that was not seen counts nothing


def test_states_and_tokens_that_agree_are_surer_than_either():
    own, other = sources(300, 0.5, 0, frequent=3), sources(300, -0.5, 1, frequent=7)
    domain = SourceDomain.fit(own, other)
    probe = (sources(400, 0.5, 2, frequent=3), sources(400, -0.5, 3, frequent=7))

    def error(own: Sources, other: Sources, only: SourceDomain) -> float:
        passes = [only.in_domain(each.states, each.tokens).float().mean() for each in (own, other)]
        return float(1 - passes[0] + passes[1])

    by_states = SourceDomain.fit(Sources(own.states, [(0,)] * 300), Sources(other.states, [(0,)] * 300))
    by_tokens = SourceDomain.fit(Sources(own.states * 0, own.tokens), Sources(other.states * 0, other.tokens))
    assert error(*probe, domain) < min(error(*probe, by_states), error(*probe, by_tokens))


def gradients(
    inputs: np.ndarray, labels: np.ndarray, weight: np.ndarray, margin: np.ndarray, ridge: float
) -> np.ndarray:
    """The derivatives of the balanced loss by the weights of standardised inputs, and by the bias."""
    deviation = inputs.std(0)
    balance = np.where(labels == 1, 0.5 / (labels == 1).sum(), 0.5 / (labels == 0).sum())
    slope = balance * (1 / (1 + np.exp(-margin)) - labels)
    return np.append(slope @ ((inputs - inputs.mean(0)) / deviation) + 2 * ridge * weight * deviation, slope.sum())


def test_fit_is_the_minimum_of_both_losses():
    own, other = sources(80, 0.4, 0, frequent=3), sources(120, -0.4, 1, frequent=5)
    domain = SourceDomain.fit(own, other)
    labels, rows = np.r_[np.ones(80), np.zeros(120)], [*own.tokens, *other.tokens]
    inputs = torch.cat([own.states, other.states]).double().numpy()
    folds = np.r_[np.arange(80), np.arange(120)] % 5

    def naive_bayes(kept: np.ndarray) -> np.ndarray:
        counts = np.zeros((2, 1 + max(map(max, rows))))
        for label, row, used in zip(labels, rows, kept, strict=True):
            for token in row:
                counts[int(label), token] += used
        shared = counts.sum(0) + 0.1
        counts = counts + 100 * shared / shared.sum()
        logs = np.log(counts / counts.sum(1, keepdims=True))
        return logs[1] - logs[0]

    found = np.zeros((200, 2))
    for fold in range(5):
        kept = folds != fold
        mean, weight, bias = (
            each.numpy() for each in source_domain._fit(*map(torch.tensor, (inputs[kept], labels[kept])), 0.01)
        )
        margin = (inputs[kept] - mean) @ weight + bias
        assert np.abs(gradients(inputs[kept], labels[kept], weight, margin, 0.01)).max() < 1e-4
        found[~kept, 0] = (inputs[~kept] - mean) @ weight + bias
        ratios = naive_bayes(kept)
        found[~kept, 1] = [
            sum(ratios[token] for token in row) for row, used in zip(rows, kept, strict=True) if not used
        ]
    # The second regression, from the weights that are stored: they are those of the parts times its own.
    ratios = naive_bayes(np.ones(200, bool))
    mean, weight, bias = (each.numpy() for each in source_domain._fit(torch.tensor(inputs), torch.tensor(labels), 0.01))
    by_states = float(domain.weight[0]) / weight[0]
    by_tokens = float(domain.token_weights[3]) / ratios[3]
    np.testing.assert_allclose(domain.weight.numpy(), by_states * weight, rtol=1e-4)
    np.testing.assert_allclose(domain.token_weights.numpy(), by_tokens * ratios, rtol=1e-4)
    constant = float(domain.bias) - by_states * bias
    margin = found @ [by_states, by_tokens] + constant
    assert np.abs(gradients(found, labels, np.array([by_states, by_tokens]), margin, 1e-6)).max() < 1e-4
    sums = np.array([sum(ratios[token] for token in row) for row in rows])
    logits = by_states * ((inputs - mean) @ weight + bias) + by_tokens * sums + constant
    passes = domain.in_domain(torch.cat([own.states, other.states]), rows).numpy()
    clear = np.abs(logits) > 1e-3
    assert (passes == (logits >= 0))[clear].all()
    assert 60 < passes.sum() < 110


def test_few_or_equal_sources_have_no_domain():
    assert SourceDomain.fit(sources(49, 1, 0), sources(300, -1, 1)) is None
    same = sources(60, 0, 0)
    assert SourceDomain.fit(same, same) is None
    with pytest.raises(ParameterError, match="2 sources need a matrix"):
        Sources(states(3, 0, 0), [(1,), (2,)])


def test_state_is_restored_and_checked():
    domain = SourceDomain.fit(sources(60, 1, 0), sources(60, -1, 1))
    tensors, metadata = domain.state()
    again = SourceDomain.load(tensors, metadata)
    probe = states(50, 0, 5), tokens(50, 3, 5)
    assert torch.equal(again.in_domain(*probe), domain.in_domain(*probe))
    with pytest.raises(DatastoreCorrupt, match="mean state"):
        SourceDomain.load({}, {})
    for name in ("mean", "weight", "token_weights"):
        with pytest.raises(DatastoreCorrupt):
            SourceDomain.load({**tensors, name: torch.zeros(3, 2)}, metadata)


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
    found = lm.mean_source_states(lm.encode_sources(texts), batch_size=3)
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
    encoded = lm.encode_sources(texts)
    inside = opened.source_domain.in_domain(lm.mean_source_states(encoded), encoded).tolist()
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


def test_saved_model_keeps_the_domain_and_the_odds_of_the_end(tuned, tmp_path):
    folder, mixture, _ = tuned
    mixture.end_odds = 0.25
    KnnForSeq2SeqLM(mixture).save_pretrained(tmp_path / "saved")
    mixture.end_odds = 1.0
    again = KnnForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert again.mixture.end_odds == 0.25
    probe = torch.randn(20, mixture.source_domain.mean.shape[0]), tokens(20, 3, 0)
    assert torch.equal(again.mixture.source_domain.in_domain(*probe), mixture.source_domain.in_domain(*probe))
    mixture_with_lambda = Mixture.open(folder, mixture.lm)
    mixture_with_lambda.lmbda = 0.5
    assert mixture_with_lambda.source_domain is None
