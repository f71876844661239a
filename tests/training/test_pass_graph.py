"""Steps of a decoder's training that are replayed: a stand-in for CUDA graphs runs the captured step again."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from helpers.decoders import losses, weights
from helpers.graphs import Replays
from helpers.models import tiny
from helpers.stores import documents
from helpers.training import fit_decoder
from knnlm.errors import KnnlmWarning
from knnlm.ingest.build import build
from knnlm.lm.cuda_graph import WARM_RUNS
from knnlm.lm.windows import WindowShape
from knnlm.training import decoder_pass, decoder_trainer
from knnlm.training.data import TokenStream, TrainingBatches
from knnlm.training.decoder_pass import DecoderPass, has_dropout

PACKED = {"epochs": 2, "batch_tokens": 256, "learning_rate": 1e-3, "context": 64, "device": "cpu", "packed": True}


@pytest.fixture(scope="module")
def store(lm, tmp_path_factory):
    return build(documents(10, words=20), tmp_path_factory.mktemp("graph") / "docs.store", lm=lm)


@pytest.fixture
def replays(monkeypatch):
    made = Replays()
    monkeypatch.setattr(decoder_pass, "capture_graph", made.capture)
    monkeypatch.setattr(decoder_trainer, "DecoderPass", partial(DecoderPass, captures=True))
    return made


def train_plainly(store, initial, out, monkeypatch, **settings):
    """Without graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(decoder_trainer, "DecoderPass", partial(DecoderPass, captures=False))
        return fit_decoder(store, initial, out, **settings)


def check_alike(one, other):
    """Graphs read rows of padding too, which changes sums by rounding."""
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(other)[name], weight, rtol=1e-3, atol=1e-4)
    first, second = losses(one), losses(other)
    assert [line["loss"] for line in first] == pytest.approx([line["loss"] for line in second], rel=1e-4)
    assert [line["learning_rate"] for line in first] == [line["learning_rate"] for line in second]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_replayed_training_is_that_without_graphs(store, initial, tmp_path, monkeypatch, replays, precision):
    settings = {**PACKED, "precision": precision, "held_out": 0.2}
    plain = train_plainly(store, initial, tmp_path / "plain", monkeypatch, **settings)
    card = fit_decoder(store, initial, tmp_path / "replayed", **settings)
    assert replays.captured == 1
    assert replays.replayed == card.steps - WARM_RUNS > 3
    assert card.steps == plain.steps
    check_alike(tmp_path / "plain", tmp_path / "replayed")
    assert [row["loss"] for row in card.held_out] == pytest.approx([row["loss"] for row in plain.held_out], rel=1e-4)
    assert card.notes == []


def test_selected_training_is_that_without_graphs(store, initial, tmp_path, monkeypatch, replays):
    settings = {**PACKED, "select": True, "held_out": 0.2}
    plain = train_plainly(store, initial, tmp_path / "plain", monkeypatch, **settings)
    card = fit_decoder(store, initial, tmp_path / "replayed", **settings)
    assert replays.captured == 1
    assert replays.replayed == card.steps - WARM_RUNS > 5  # over the ends of trials, which change the weights
    assert card.steps == plain.steps
    assert card.selection["chosen"] == plain.selection["chosen"]
    check_alike(tmp_path / "plain", tmp_path / "replayed")


def test_step_in_several_parts_is_not_captured(store, initial, tmp_path, replays):
    card = fit_decoder(store, initial, tmp_path / "out", **PACKED, accumulate=2)
    assert card.steps > WARM_RUNS
    assert replays.captured == 0


@pytest.fixture
def steps():
    """A pass that captures, and batches of packed rows of 16 tokens: as many rows as asked for, from some row on."""
    text = TokenStream.from_documents([[5 + n % 9] * (8 + n % 3) for n in range(80)])
    batches = TrainingBatches(text, WindowShape(16, 16), start_token=1, held_out=0.0, seed=0, packed=True)
    passes = DecoderPass(tiny("llama"), precision="float32", row_length=16, longest=16, captures=True)
    rows = [row for step in batches.steps(0, 64) for row in step]
    return passes, lambda begin, count: batches.read_rows(rows[begin : begin + count], 16)


def check_gradients(passes, batch, positions):
    """Compare the gradients of a step, which may be replayed, with those of a pass without a graph."""
    found = passes.gradients([(batch, None)], beta=0.0, positions=positions)
    gradients = [weight.grad.clone() for weight in passes.weights.values()]
    passes.drop_gradients()
    expected = passes.losses(batch, None, beta=0.0, positions=positions)
    expected.total.backward()
    torch.testing.assert_close(found[0], expected.total.detach())
    for gradient, weight in zip(gradients, passes.weights.values(), strict=True):
        torch.testing.assert_close(gradient, weight.grad)
    passes.drop_gradients()


def test_graphs_of_few_shapes_are_kept(replays, steps):
    passes, read = steps
    for count in range(1, 7):
        for turn in range(WARM_RUNS + 2):
            check_gradients(passes, read(turn, count), 50 + turn)
    assert replays.captured == decoder_pass._MAX_GRAPHS < 6
    assert replays.replayed == 2 * replays.captured


def test_capture_that_fails_after_the_backward_pass_leaves_no_gradients(monkeypatch, replays, steps):
    passes, read = steps
    failed = []

    def fail(losses):
        losses.total.backward()
        failed.append(losses)
        raise RuntimeError("operation not permitted when stream is capturing")

    def refuse(run, *_, **__):
        with monkeypatch.context() as patch:
            patch.setattr(decoder_pass, "add_gradients", fail)
            run()

    monkeypatch.setattr(decoder_pass, "capture_graph", refuse)
    for turn in range(WARM_RUNS):
        check_gradients(passes, read(turn, 2), 50)
    with pytest.warns(KnnlmWarning, match="cannot be captured"):
        check_gradients(passes, read(WARM_RUNS, 2), 50)
    check_gradients(passes, read(WARM_RUNS + 1, 2), 50)
    assert len(failed) == 1


def test_failed_capture_is_reported_once_and_the_training_goes_on(store, initial, tmp_path, monkeypatch, replays):
    train_plainly(store, initial, tmp_path / "plain", monkeypatch, **PACKED)

    def refuse(run, *_, **__):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decoder_pass, "capture_graph", refuse)
    with pytest.warns(KnnlmWarning, match=r"cannot be captured .*not permitted") as found:
        fit_decoder(store, initial, tmp_path / "out", **PACKED)
    assert len([each for each in found if each.category is KnnlmWarning]) == 1
    check_alike(tmp_path / "plain", tmp_path / "out")


def test_too_little_memory_for_a_graph_is_no_warning(store, initial, tmp_path, monkeypatch, replays, recwarn):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoder_pass, "capture_graph", refuse)
    card = fit_decoder(store, initial, tmp_path / "out", **PACKED)
    assert card.notes == []
    assert not [each for each in recwarn if each.category is KnnlmWarning]


def test_memory_of_graphs_is_freed_where_a_pass_does_not_fit_beside_them(
    store, initial, tmp_path, monkeypatch, replays
):
    settings = {**PACKED, "held_out": 0.2}
    train_plainly(store, initial, tmp_path / "plain", monkeypatch, **settings)
    graphs, refused = [], []
    capture, losses = decoder_pass.capture_graph, DecoderPass.losses

    def watched(*arguments, **options):
        made = capture(*arguments, **options)
        graphs.append(weakref.ref(made))
        return made

    def losses_beside_graphs(self, *arguments, **options):
        if not torch.is_grad_enabled() and any(graph() is not None for graph in graphs):
            refused.append(len(graphs))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, *arguments, **options)

    monkeypatch.setattr(decoder_pass, "capture_graph", watched)
    monkeypatch.setattr(DecoderPass, "losses", losses_beside_graphs)
    card = fit_decoder(store, initial, tmp_path / "out", **settings)
    assert refused == [1, 2]  # once in each evaluation after an epoch, whose steps are captured again
    assert card.notes == []  # rows are not halved
    check_alike(tmp_path / "plain", tmp_path / "out")


@pytest.mark.parametrize(("family", "drops"), [("llama", False), ("gpt2", True)])
def test_model_with_dropout_is_not_captured(family, drops):
    model = tiny(family)
    if drops:
        model.config.resid_pdrop = 0.1
    assert has_dropout(model) == drops
    passes = DecoderPass(model, precision="float32", row_length=32, longest=16, captures=True)
    assert passes.has_fixed_shape != drops


def test_nothing_is_captured_on_a_cpu():
    passes = DecoderPass(tiny("llama"), precision="float32", row_length=32, longest=16)
    assert not passes.has_fixed_shape
