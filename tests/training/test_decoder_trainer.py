"""The steps of a decoder's training: packed rows, half precision, compiled blocks, too little memory, divergence."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.decoders import PlainTraining, equal, losses, weights
from helpers.models import tiny
from helpers.stores import documents
from helpers.training import fit_decoder, retrieve_targets
from knnlm.errors import DatastoreError, KnnlmWarning, ParameterError
from knnlm.ingest.build import build
from knnlm.lm.windows import WindowShape
from knnlm.memories.decoder import load_card
from knnlm.training import adapt, decoder_trainer
from knnlm.training.data import TokenStream, TrainingBatches
from knnlm.training.decoder_pass import DecoderPass
from knnlm.training.decoder_trainer import DecoderConfig, DecoderTrainer
from knnlm.training.initial_model import open_initial_model
from knnlm.training.trainer import LossCurve, read_curve

QUICK = {"epochs": 2, "batch_tokens": 256, "learning_rate": 1e-3, "context": 64, "device": "cpu"}
PACKED = {**QUICK, "packed": True}


@pytest.fixture(scope="module")
def store(lm, tmp_path_factory):
    return build(documents(10, words=20), tmp_path_factory.mktemp("trainer") / "docs.store", lm=lm)


@pytest.fixture(scope="module")
def targets(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("targets") / "targets"
    return retrieve_targets(store, out, k=32, knn_temperature=20.0, device="cpu")


# ------------------------------------------------------------------------------------------------------ packed rows


def test_packed_training_is_that_of_a_plain_loop(store, targets, lm, initial, tmp_path):
    """Plain torch, the windows of each row one by one, with the KL to a teacher."""
    options = {**PACKED, "beta": 0.6, "warm_up": 0.3, "held_out": 0.2}
    card = fit_decoder(store, initial, tmp_path / "out", targets=targets, **options)
    assert card.settings["packed"] is True
    assert card.notes == []
    batches = TrainingBatches(
        TokenStream.from_store(store),
        WindowShape(64, 64),
        start_token=lm.start_token,
        held_out=0.2,
        seed=0,
        packed=True,
    )
    plain = PlainTraining(tiny("llama"), batches)
    steps = [rows for epoch in range(2) for rows in batches.steps(epoch, 256)]
    assert card.steps == len(steps)
    assert any(len(row) > 1 for rows in steps for row in rows)
    for rows, line in zip(steps, losses(tmp_path / "out"), strict=True):
        loss = plain.step(np.concatenate(rows), line["learning_rate"], targets, 0.6)
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
    plain.check_weights(tmp_path / "out")


def test_held_out_loss_does_not_depend_on_packing(store, initial, tmp_path):
    apart, packed = (
        fit_decoder(store, initial, tmp_path / str(packed), packed=packed, held_out=0.2, **{**QUICK, "epochs": 1})
        for packed in (False, True)
    )
    assert packed.held_out_tokens == apart.held_out_tokens
    assert packed.held_out[0]["loss"] == pytest.approx(apart.held_out[0]["loss"], rel=1e-5)


def stopping(trainer, monkeypatch, step):
    """Interrupt the training before the step after this one."""
    original = trainer._accumulate

    def interrupted(self, *args):
        if self.state.step == step:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(trainer, "_accumulate", interrupted)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_interrupted_packed_training_resumes_with_the_same_result(store, initial, tmp_path, monkeypatch, precision):
    options = {**PACKED, "held_out": 0.2, "precision": precision, "accumulate": 2}
    whole = fit_decoder(store, initial, tmp_path / "whole", **options)
    for step in (1, whole.steps - 1):
        out = tmp_path / str(step)
        with monkeypatch.context() as patch:
            stopping(DecoderTrainer, patch, step)
            with pytest.raises(KeyboardInterrupt):
                fit_decoder(store, initial, out, **options)
        card = fit_decoder(store, initial, out, **options)
        assert replace(card, seconds=0) == replace(whole, seconds=0)
        assert losses(out) == losses(tmp_path / "whole")
        assert equal(out, tmp_path / "whole")


def test_model_that_cannot_be_packed_is_trained_on_padded_windows(store, lm, tmp_path):
    config = tmp_path / "mamba.json"
    config.write_text('{"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the key layer, which is no part of this
        initial = open_initial_model(str(config), like=lm)
    short = {**QUICK, "epochs": 1, "context": 16}
    cards = [fit_decoder(store, initial, tmp_path / str(packed), packed=packed, **short) for packed in (False, True)]
    assert equal(tmp_path / "False", tmp_path / "True")
    assert [card.notes for card in cards] == [
        [],
        ["MambaForCausalLM cannot read packed rows, so windows were padded."],
    ]


def test_packing_is_automatic_on_a_gpu_only_and_no_reason_to_train_again(store, initial, tmp_path):
    text = TokenStream.from_store(store)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert DecoderConfig().resolve(text, initial, gpu).packed
    assert not DecoderConfig().resolve(text, initial, cpu).packed
    assert not DecoderConfig(packed=False).resolve(text, initial, gpu).packed
    assert DecoderConfig(packed=True).resolve(text, initial, cpu).packed
    # Nothing is compiled on a CPU, nor for a short text unless it is asked for.
    long = TokenStream(np.zeros(3_000_000, np.int8), np.array([0, 3_000_000]))
    for given, right in ((None, True), (False, False), (True, True)):
        assert DecoderConfig(compile=given).resolve(long, initial, gpu).compile is right
        assert not DecoderConfig(compile=given).resolve(long, initial, cpu).compile
    assert not DecoderConfig().resolve(text, initial, gpu).compile
    assert DecoderConfig(compile=True).resolve(text, initial, gpu).compile
    short = {**QUICK, "epochs": 1}
    packed = fit_decoder(store, initial, tmp_path / "out", packed=True, **short)
    assert fit_decoder(store, initial, tmp_path / "out", **short) == packed
    fit_decoder(store, initial, tmp_path / "other", **short)
    with pytest.raises(DatastoreError, match="another packed"):
        fit_decoder(store, initial, tmp_path / "other", packed=True, **short)


@pytest.mark.parametrize(
    ("trained", "asked"),
    [({"lora": 2}, {}), ({"select": True, "held_out": 0.2}, {"held_out": 0.2}), ({"packed": True}, {"packed": False})],
)
def test_decoder_with_an_option_is_not_taken_for_one_without(store, initial, tmp_path, monkeypatch, trained, asked):
    name, short = next(iter(trained)), {**QUICK, "epochs": 1}
    fit_decoder(store, initial, tmp_path / "out", **trained, **short)
    with pytest.raises(DatastoreError, match=f"trained with another {name} "):
        fit_decoder(store, initial, tmp_path / "out", **asked, **short)
    with monkeypatch.context() as patch:
        stopping(DecoderTrainer, patch, 1)
        with pytest.raises(KeyboardInterrupt):
            fit_decoder(store, initial, tmp_path / "unfinished", **trained, **short)
    with pytest.raises(DatastoreError, match=f"trained with another {name} "):
        fit_decoder(store, initial, tmp_path / "unfinished", **asked, **short)


# --------------------------------------------------------------------------------------------------- half precision


def test_half_precision_has_float32_weights_beside_it(store, initial, tmp_path):
    full, half = (
        fit_decoder(store, initial, tmp_path / precision, precision=precision, **PACKED)
        for precision in ("float32", "bfloat16")
    )
    assert half.losses["loss"] == pytest.approx(full.losses["loss"], rel=0.01)
    found = weights(tmp_path / "bfloat16")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    # Updates are far below the resolution of bfloat16, and are not lost.
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in found.values())
    for name, tensor in weights(tmp_path / "float32").items():
        torch.testing.assert_close(found[name], tensor, rtol=0.05, atol=5e-3)


def test_half_precision_has_gradients_in_float32():
    model = tiny("llama")
    batches = TrainingBatches(
        TokenStream.from_documents([[5 + n % 9] * (8 + n % 3) for n in range(40)]),
        WindowShape(16, 16), start_token=1, held_out=0.0, seed=0, packed=True,
    )  # fmt: skip
    half = DecoderPass(copy.deepcopy(model), precision="bfloat16", row_length=16, longest=16)
    rows = [row for step in batches.steps(0, 64) for row in step]
    parts = [(batches.read_rows([row], 16), None) for row in rows]
    half.gradients(parts, beta=0.0, positions=batches.tokens)
    exact = DecoderPass(model, precision="float32", row_length=16, longest=16)
    exact.losses(batches.read_rows(rows, 16), None, beta=0.0, positions=batches.tokens).total.backward()
    changed = []
    for name, weight in half.weights.items():
        right = exact.weights[name].grad
        assert weight.dtype == weight.grad.dtype == torch.float32
        assert float((weight.grad - right).norm()) < 0.03 * float(right.norm()) + 1e-4
        changed.append(not torch.equal(weight.grad, right))
    assert all(changed)


def test_residual_stream_is_in_float32_in_half_precision():
    model = tiny("llama")
    passes = DecoderPass(model, precision="bfloat16", row_length=16, longest=16)
    found = {}
    for name, module in model.named_modules():
        if name.endswith((".q_proj", ".input_layernorm")):
            module.register_forward_hook(lambda _, __, output, name=name: found.update({name: output.dtype}))
    text = TokenStream.from_documents([[5, 6, 7, 8]])
    batches = TrainingBatches(text, WindowShape(16, 16), start_token=1, held_out=0.0, seed=0, packed=True)
    passes.losses(batches.read_rows(batches.steps(0, 16)[0], 16), None, beta=0.0, positions=4)
    assert {dtype for name, dtype in found.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in found.items() if "proj" in name} == {torch.bfloat16}


# -------------------------------------------------------------------------------------------------- compiled blocks


def test_compiled_passes_have_the_same_losses_and_gradients():
    """With a backend that runs graphs as they are; on a CPU nothing is compiled unless a test does so."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    model = tiny("llama")
    batches = TrainingBatches(
        TokenStream.from_documents([[5 + n % 9] * (5 + n) for n in range(12)]),
        WindowShape(16, 16), start_token=1, held_out=0.0, seed=0, packed=True,
    )  # fmt: skip
    rows = batches.steps(0, 64)[0]
    found = []
    passes = DecoderPass(model, precision="float32", row_length=16, longest=16)
    batch = batches.read_rows(rows, 16, count=4)
    with passes.compiled((4, 16), backend=backend):
        total = passes.losses(batch, None, beta=0.0, positions=50).total
        total.backward()
        compiled = len(graphs)
        assert compiled == 2  # all blocks as one graph, and the loss
        found.append([total.detach(), *(weight.grad for weight in model.parameters())])
        with torch.no_grad():
            passes.losses(batch, None, beta=0.0, positions=50)
        assert len(graphs) == compiled  # an evaluation is not compiled
    passes.drop_gradients()
    total = passes.losses(batches.read_rows(rows, 16), None, beta=0.0, positions=50).total
    total.backward()
    assert len(graphs) == compiled
    found.append([total.detach(), *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_passes_run_uncompiled_with_one_warning_if_the_compiler_fails():
    torch._dynamo.reset()

    def backend(*_):
        raise RuntimeError("no compiler")

    batches = TrainingBatches(
        TokenStream.from_documents([[5] * 9, [7] * 7]), WindowShape(16, 16), start_token=1, held_out=0.0, seed=0,
        packed=True,
    )  # fmt: skip
    passes = DecoderPass(tiny("llama"), precision="bfloat16", row_length=16, longest=16)
    batch = batches.read_rows(batches.steps(0, 16)[0], 16)
    right = passes.losses(batch, None, beta=0.0, positions=16).total
    with passes.compiled((1, 16), backend=backend), pytest.warns(KnnlmWarning, match="no compiler") as caught:
        found = passes.losses(batch, None, beta=0.0, positions=16).total
    assert len(caught) == 1
    assert "compile=False skips" in str(caught[0].message)
    assert torch.equal(found, right)


# ------------------------------------------------------------------------------------------------- too little memory


def limit_memory(monkeypatch, rows):
    """Raise torch's error for batches with more rows than this, in the middle of a backward pass if there is one."""
    original, sizes = DecoderPass.losses, []

    def limited(self, batch, sparse, **options):
        found = original(self, batch, sparse, **options)
        if len(batch.ids) > rows:
            if torch.is_grad_enabled():
                found.total.backward()  # what it has collected must not be used
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(batch.ids))
        return found

    monkeypatch.setattr(DecoderPass, "losses", limited)
    return sizes


@pytest.mark.parametrize("packed", [True, False])
def test_too_little_memory_halves_the_rows_with_the_same_gradient(
    store, targets, initial, tmp_path, monkeypatch, packed
):
    options = {**QUICK, "packed": packed, "held_out": 0.2, "beta": 0.5, "targets": targets}
    whole = fit_decoder(store, initial, tmp_path / "whole", **options)
    sizes = limit_memory(monkeypatch, 1)
    with pytest.warns(KnnlmWarning, match="smaller parts, with the same gradient") as caught:
        card = fit_decoder(store, initial, tmp_path / "out", **options)
    assert len([one for one in caught if issubclass(one.category, KnnlmWarning)]) == 1
    assert set(sizes) == {1}
    assert card.steps == whole.steps
    assert "smaller parts" in card.notes[0]
    assert [line["loss"] for line in losses(tmp_path / "out")] == pytest.approx(
        [line["loss"] for line in losses(tmp_path / "whole")], rel=1e-4
    )
    for name, tensor in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], tensor, rtol=1e-3, atol=2e-4)


def test_resumed_training_keeps_the_smaller_parts(store, initial, tmp_path, monkeypatch):
    limit_memory(monkeypatch, 2)
    with pytest.warns(KnnlmWarning):
        fit_decoder(store, initial, tmp_path / "whole", **PACKED)
    with monkeypatch.context() as patch:
        stopping(DecoderTrainer, patch, 3)
        with pytest.warns(KnnlmWarning), pytest.raises(KeyboardInterrupt):
            fit_decoder(store, initial, tmp_path / "out", **PACKED)
    fit_decoder(store, initial, tmp_path / "out", **PACKED)  # without the warning
    assert equal(tmp_path / "out", tmp_path / "whole")


def test_memory_for_less_than_one_window_is_a_clear_error(store, initial, tmp_path, monkeypatch):
    limit_memory(monkeypatch, 0)
    with pytest.warns(KnnlmWarning), pytest.raises(ParameterError, match="too small to train on 64 tokens at once"):
        fit_decoder(store, initial, tmp_path / "out", **PACKED)


# ------------------------------------------------------------------------------------------------------- divergence


def diverge(monkeypatch, steps, *, times=1):
    """Make the loss of some steps infinite or NaN until the training went back this many times."""
    original = DecoderTrainer._accumulate

    def diverging(self, *args):
        sums = original(self, *args)
        if self.state.step in steps and self.state.divergences < times:
            sums[0] = torch.nan
            for weight in self._trained.values():
                weight.grad.fill_(torch.nan)
        return sums

    monkeypatch.setattr(DecoderTrainer, "_accumulate", diverging)


def test_divergence_goes_back_to_the_checkpoint_with_half_the_rate(store, initial, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fit_decoder(store, initial, tmp_path / "plain", **PACKED)
        diverge(patch, {2, 3})
        with pytest.warns(KnnlmWarning, match=r"went back to step 2 and on with half the learning rate") as caught:
            card = fit_decoder(store, initial, tmp_path / "out", checkpoint_every=0, **PACKED)
    assert len(caught) == 1
    assert card.notes == [str(caught[0].message)]
    before, after = losses(tmp_path / "plain"), losses(tmp_path / "out")
    assert after[:2] == before[:2]
    assert [line["step"] for line in after] == [line["step"] for line in before]
    assert [line["learning_rate"] for line in after[2:]] == [line["learning_rate"] / 2 for line in before[2:]]
    assert after[2]["loss"] == before[2]["loss"]  # the weights before it are the same
    assert np.isfinite([line["loss"] for line in after]).all()


def test_divergence_without_a_checkpoint_begins_again(store, initial, tmp_path, monkeypatch):
    halved = fit_decoder(store, initial, tmp_path / "half", **{**PACKED, "learning_rate": 5e-4})
    diverge(monkeypatch, {2})
    with pytest.warns(KnnlmWarning, match="went back to step 0"):
        card = fit_decoder(store, initial, tmp_path / "out", **PACKED)
    assert card.losses == halved.losses
    assert losses(tmp_path / "out") == losses(tmp_path / "half")
    assert equal(tmp_path / "out", tmp_path / "half")


@pytest.mark.parametrize("at", ["before", "after"])
def test_killed_training_that_diverged_resumes_with_the_same_result(store, initial, tmp_path, monkeypatch, at):
    diverge(monkeypatch, {3})
    options = {**PACKED, "checkpoint_every": 0}
    with pytest.warns(KnnlmWarning):
        fit_decoder(store, initial, tmp_path / "whole", **options)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopping(DecoderTrainer, patch, 2 if at == "before" else 5)
        with pytest.raises(KeyboardInterrupt):
            fit_decoder(store, initial, tmp_path / "out", **options)
        patch.undo()
        card = fit_decoder(store, initial, tmp_path / "out", **options)
    assert card.notes == load_card(tmp_path / "whole").notes != []
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert equal(tmp_path / "out", tmp_path / "whole")


def test_training_that_diverges_again_and_again_is_one_clear_error(store, initial, tmp_path, monkeypatch):
    diverge(monkeypatch, {2}, times=10**6)
    rates = []
    monkeypatch.setattr(
        DecoderTrainer,
        "_update",
        lambda self, rate, step=DecoderTrainer._update: rates.append(rate) or step(self, rate),
    )
    with pytest.warns(KnnlmWarning) as caught, pytest.raises(ParameterError, match="diverged at step 3") as error:
        fit_decoder(store, initial, tmp_path / "out", **PACKED)
    assert len(caught) == 1
    assert "\n" not in str(error.value)
    firsts = rates[:: len(rates) // 4]
    assert firsts == [firsts[0] / 2**times for times in range(4)]


def test_checkpoint_with_broken_weights_is_not_written(store, initial, tmp_path, monkeypatch):
    """The loss of a step is finite, but its gradient is not."""
    original = DecoderTrainer._update

    def broken(self, rate):
        original(self, rate)
        if self.state.step == 2 and not self.state.divergences:
            next(iter(self._trained.values())).data.view(-1)[0] = float("inf")

    monkeypatch.setattr(DecoderTrainer, "_update", broken)
    with pytest.warns(KnnlmWarning, match="went back to step 2"):
        card = fit_decoder(store, initial, tmp_path / "out", checkpoint_every=0, **PACKED)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out").values())
    assert card == load_card(tmp_path / "out")


def test_progress_does_not_go_back(store, initial, tmp_path, monkeypatch):
    from contextlib import contextmanager

    counts = []

    @contextmanager
    def progress(what, *, total=None, unit="tokens"):
        yield counts.append
        assert sum(counts) == total

    diverge(monkeypatch, {2})
    with pytest.warns(KnnlmWarning):
        fit_decoder(store, initial, tmp_path / "out", progress=progress, **PACKED)
    assert min(counts) == 0


def test_loss_curve_is_cut_where_the_training_goes_back(tmp_path):
    seen = []
    (tmp_path / "losses.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 6)))
    curve = LossCurve(tmp_path / "losses.jsonl", 4, seen.append)
    assert [line["step"] for line in seen] == [1, 2, 3, 4]
    assert [line["step"] for line in curve.rewind(2)] == [1, 2]
    assert [line["step"] for line in read_curve(tmp_path / "losses.jsonl")] == [1, 2]
    assert curve.pending == 0


def test_documentation_has_the_numbers_of_the_code():
    page = " ".join((Path(__file__).parents[2] / "docs" / "guides" / "adapting.md").read_text().split())
    assert f"at least {decoder_trainer._MIN_TOKENS_TO_COMPILE // 10**6} million tokens" in page
    assert decoder_trainer._MAX_DIVERGENCES == 3
    assert "at most three times" in page
    assert f"fewer than {adapt._MIN_TOKENS_TO_SPLIT} tokens" in page
