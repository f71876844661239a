"""Support of tokens: a calibrated probability that a token is right, saved with the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.stores import documents
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.ingest.build import build
from knnlm.mixture.gate import NetworkEnsemble
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.saved import load_support, weights_state
from knnlm.mixture.support import SUPPORT_CONFIG, SupportModel, support_names, train_support

MEMORIES = "knn,cache,ngram"


def made_rows(count=6000, *, seed=0, documents=20):
    """Rows in which a token is right with a probability that the inputs show, and the mixture's p does not."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    truth = (1.5 * inputs[:, 0] - 0.5).sigmoid()
    right = torch.rand(count, generator=generator) < truth
    log_p = torch.full((count,), 0.5).log() + 0.1 * torch.randn(count, generator=generator)
    groups = torch.arange(count) * documents // count
    return inputs, log_p.clamp(max=-0.01), right, groups, truth


def trained(**options):
    inputs, log_p, right, groups, _ = made_rows(**options)
    return train_support(inputs, log_p, right, groups, feature_names=list("abcd"))


def test_support_is_the_probability_that_the_rows_have():
    model = trained()
    inputs, log_p, _, _, truth = made_rows(seed=1)
    support = model.probabilities(inputs, log_p)
    assert float((support - truth).abs().mean()) < 0.04
    assert model.out_of_fold.shape == (6000,)
    assert float((model.out_of_fold - made_rows()[4]).abs().mean()) < 0.04


def test_support_is_calibrated_where_the_mixture_is_overconfident():
    """Without any useful input, support is the share of right tokens at each probability of the mixture."""
    generator = torch.Generator().manual_seed(0)
    truth = 0.02 + 0.48 * torch.rand(20_000, generator=generator)
    right = torch.rand(20_000, generator=generator) < truth
    claimed = (truth / (1 - truth)).square().clamp(1e-3, 1e3)  # as odds: twice as sure, in logits
    log_p = (claimed / (1 + claimed)).log()
    inputs = torch.zeros(20_000, 2)
    model = train_support(inputs, log_p, right, torch.arange(20_000) // 500, feature_names=["a", "b"])
    assert float((model.probabilities(inputs, log_p) - truth).abs().mean()) < 0.02


def test_few_rows_leave_the_probability_of_the_mixture():
    generator = torch.Generator().manual_seed(0)
    log_p = torch.rand(60, generator=generator).clamp(0.05, 0.95).log()
    right = torch.rand(60, generator=generator) < log_p.exp()
    inputs = torch.randn(60, 3, generator=generator)
    model = train_support(inputs, log_p, right, torch.zeros(60, dtype=torch.long), feature_names=["a", "b", "c"])
    assert float((model.probabilities(inputs, log_p) - log_p.exp()).abs().mean()) < 0.15


def test_support_of_extreme_inputs_is_a_probability():
    model = trained()
    inputs = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e30], [0.0, 0.0, 0.0, 0.0]])
    support = model.probabilities(inputs, torch.tensor([-torch.inf, 0.0]))
    assert bool(((support >= 0) & (support <= 1)).all())
    with pytest.raises(ParameterError, match="4 features"):
        model.probabilities(torch.zeros(2, 3), torch.zeros(2))


def test_loaded_support_is_the_saved_one_and_what_is_corrupt_is_refused():
    model = trained(count=600)
    tensors, metadata = model.state()
    inputs, log_p, *_ = made_rows(count=50, seed=2)
    loaded = SupportModel.load(tensors, metadata)
    assert torch.equal(loaded.probabilities(inputs, log_p), model.probabilities(inputs, log_p))
    assert loaded.metadata["rows"] == 600
    for damaged in (
        {**tensors, "calibration": torch.tensor([-1.0, 0.0])},
        {**tensors, "calibration": torch.zeros(3)},
        {name: tensor for name, tensor in tensors.items() if name != "mean"},
    ):
        with pytest.raises(DatastoreCorrupt, match="Tune again"):
            SupportModel.load(damaged, metadata)
    with pytest.raises(DatastoreCorrupt, match="Tune again"):
        SupportModel.load(tensors, {})


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    return build(documents(20), tmp_path_factory.mktemp("support") / "docs.store", lm=lm).path


@pytest.mark.parametrize("kind", ["fixed", "fitted", "buckets", "gated"])
def test_every_kind_of_weights_has_support(lm, path, kind):
    fresh = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    assert fresh.support is None
    result = fresh.tune(documents(8, start=100), weights=kind)
    assert fresh.support is result.support is not None
    opened = Mixture.open(path, lm)
    for batch in opened.read([lm.encode(documents(1, start=130)[0].text)]):
        before, after = (each.support.of(each.predict(batch.context), batch.targets) for each in (fresh, opened))
        torch.testing.assert_close(before, after)
        assert bool(((after > 0) & (after < 1)).all())
    assert Mixture.open(path, lm, lmbda=0.5, memories=MEMORIES).support is None  # other weights than the tuned ones
    opened.lmbda = 0.2
    assert opened.support is None


def test_support_of_a_token_is_that_of_its_inputs_in_numpy(lm, path):
    """Networks, calibration and the features of the token, computed again."""
    Mixture.open(path, lm, memories=MEMORIES, use_tuned=False).tune(documents(8, start=100), weights="fitted")
    mixture = Mixture.open(path, lm)
    model = mixture.support
    names = support_names((memory.name, memory.feature_names) for memory in mixture.memories)
    assert model.feature_names == tuple(names)
    (batch,) = mixture.read([lm.encode(documents(1, start=140)[0].text)])
    prediction = mixture.predict(batch.context)
    tokens = batch.targets.roll(1)
    log_probs = prediction.component_log_probs(tokens).numpy()
    firsts = [0, *(own.start for own in mixture.component_slices)]
    tops = np.stack([batch.logits.argmax(1), *(output.top() for output in prediction.outputs)], 1)
    values = np.concatenate([log_probs[:, firsts].clip(-15, 0), tops == tokens.numpy()[:, None]], 1)
    lm_log_p = batch.logits.log_softmax(1)
    columns = [np.sort(lm_log_p.numpy(), 1)[:, [-1, -2]], -(lm_log_p.exp() * lm_log_p).sum(1, keepdim=True).numpy()]
    for output, top in zip(prediction.outputs, tops.T[1:], strict=True):
        of_lm_top = output.components[0].log_prob(torch.from_numpy(tops[:, 0])).numpy().clip(min=-15)
        of_top = lm_log_p.numpy()[np.arange(len(top)), top.clip(0)].clip(min=-15)
        of_top[top < 0] = -15
        columns += [output.features().numpy(), np.stack([of_lm_top, of_top, top == tops[:, 0], top < 0], 1)]
    inputs = np.concatenate([*columns, values], 1)
    hidden = ((inputs - model.nets.mean.numpy()) * model.nets.scale.numpy()).clip(-5, 5)
    (w0, b0), (w1, b1) = [[tensor.numpy() for tensor in layer] for layer in model.nets.layers]
    outputs = [np.maximum(hidden @ w0[k] + b0[k], 0) @ w1[k] + b1[k] for k in range(model.nets.count)]
    p = np.exp(prediction.log_prob(tokens).numpy()).clip(np.exp(-15), np.exp(-1e-4))
    logits = np.log(p / (1 - p)) + np.mean(outputs, 0)[:, 0]
    a, b = model.calibration.tolist()
    expected = 1 / (1 + np.exp(-(a * logits + b)))
    np.testing.assert_allclose(model.of(prediction, tokens).numpy(), expected, atol=1e-4)


def test_store_without_support_opens_and_one_for_other_memories_is_refused(lm, path):
    mixture = Mixture.open(path, lm, memories=MEMORIES, use_tuned=False)
    mixture.tune(documents(8, start=100), weights="fixed")
    assert load_support(weights_state(mixture.weights, None)[0], path, mixture.memories) is None
    saved, tensors = weights_state(mixture.weights, mixture.online, support=mixture.support)
    assert {name.split(".")[0] for name in tensors} == {"support"}
    with pytest.raises(DatastoreCorrupt, match="saved support"):
        load_support({**saved, "file": "missing.safetensors"}, path, mixture.memories)
    file = next(each.name for each in (path / "mixtures").iterdir())
    with pytest.raises(DatastoreCorrupt, match="saved support"):
        load_support({**saved, "file": file}, path, mixture.memories[:1])


def test_networks_start_at_zero():
    nets = NetworkEnsemble.new(torch.randn(40, 3), 1, SUPPORT_CONFIG)
    assert float(nets.outputs(torch.randn(7, 3)).abs().max()) == 0.0
