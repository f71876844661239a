"""Decoders of which only the last blocks are trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.cli import failure, knnlm
from helpers.decoders import PlainTraining, losses
from helpers.models import FAMILIES, tiny
from helpers.stores import documents
from knnlm.errors import DatastoreError, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.layers import layer_list
from knnlm.lm.shared import TopLM
from knnlm.lm.windows import WindowShape
from knnlm.mixture.mixture import Mixture
from knnlm.training.data import TokenStream, TrainingBatches
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import freeze_first_blocks

CONFIG = DecoderConfig(epochs=2, batch_tokens=256, learning_rate=2e-3, context=64, top=1)


@pytest.fixture(scope="module")
def texts(lm):
    return lm.encode_all([document.text for document in documents(12, words=20)])


def changed(folder, initial):
    """The names of the weights that the training has changed."""
    before = dict(initial.lm.model.named_parameters())
    return {
        name
        for name, tensor in CausalLM.open(str(folder), device="cpu").model.named_parameters()
        if not torch.equal(tensor, before[name])
    }


def test_only_the_last_blocks_are_trained_as_in_a_plain_loop(texts, lm, initial, tmp_path):
    card = train_decoder(texts, initial, tmp_path / "out", CONFIG, device="cpu")
    names = changed(tmp_path / "out", initial)
    assert names == {name for name in load_file(tmp_path / "out" / "model.safetensors") if "layers.2." in name} | {
        "model.norm.weight"
    }
    stream = TokenStream.from_documents(texts)
    batches = TrainingBatches(stream, WindowShape(64, 64), start_token=lm.start_token, held_out=0.0, seed=0)
    plain = PlainTraining(tiny("llama"), batches, trained=names)
    steps = [step for epoch in range(2) for step in batches.steps(epoch, 256)]
    assert card.steps == len(steps)
    for step, line in zip(steps, losses(tmp_path / "out"), strict=True):
        loss = plain.step(np.concatenate(step), line["learning_rate"])
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
    plain.check_weights(tmp_path / "out")


@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("lora", [0, 2])
def test_first_blocks_and_embeddings_stay_in_every_kind_of_training(texts, initial, tmp_path, lora, select):
    config = replace(CONFIG, lora=lora, select=select, held_out=0.2 if select else 0.0, epochs=1, top=2)
    train_decoder(texts, initial, tmp_path / "out", config, device="cpu")
    names = changed(tmp_path / "out", initial)
    blocks = {name.split(".")[2] for name in names if "layers" in name}
    assert blocks == {"1", "2"}
    assert names - {name for name in names if "layers" in name} <= ({"model.norm.weight"} if not lora else set())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_trained_comes_after_the_first_blocks(family):
    """Weights that are trained must not change the states that enter the last blocks."""
    model = tiny(family)
    freeze_first_blocks(model, 1)
    block, states = layer_list(model)[-1], []
    block.register_forward_pre_hook(
        lambda _, args, kwargs: states.append((args[0] if args else kwargs["hidden_states"]).detach().clone()),
        with_kwargs=True,
    )
    ids = torch.arange(5, 14)[None]
    outputs = []
    for _ in range(2):
        outputs.append(model(input_ids=ids, use_cache=False).logits.detach())
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data += 0.1
    assert torch.equal(*states)
    assert not torch.equal(*outputs)
    embeddings = model.get_input_embeddings().weight
    assert not embeddings.requires_grad
    assert any(weight.requires_grad for weight in block.parameters())


def test_more_blocks_than_there_are_and_none_are_refused(texts, initial, tmp_path):
    with pytest.raises(ParameterError, match="top must be from 1 to 3, the number of blocks of the decoder, not 4"):
        train_decoder(texts, initial, tmp_path / "out", replace(CONFIG, top=4), device="cpu")
    with pytest.raises(ParameterError, match="top must be at least 1, not 0"):
        DecoderConfig(top=0)


def test_decoder_with_other_blocks_is_not_resumed(texts, initial, tmp_path):
    train_decoder(texts, initial, tmp_path / "out", CONFIG, device="cpu")
    with pytest.raises(DatastoreError, match=r"another top \(1, now 2\)"):
        train_decoder(texts, initial, tmp_path / "out", replace(CONFIG, top=2), device="cpu")


def test_adapted_store_shares_the_first_blocks_of_its_model(model_folder, tmp_path, capfd):
    text = tmp_path / "docs"
    text.mkdir()
    for document in documents(10, words=30):
        (text / f"{document.id}.txt").write_text(document.text)
    options = ("--epochs", 1, "--batch-tokens", 512, "--learning-rate", 0.003, "--no-select", "--top", 1)
    code, shown, _ = knnlm(capfd, "adapt", text, "--out", tmp_path / "out", "--model", model_folder, *options)
    assert code == 0
    assert "all, gated" in shown
    mixture = Mixture.open(tmp_path / "out")
    top = mixture.readers.tops[1]
    assert isinstance(top, TopLM)
    assert top.first == 2
    assert mixture.evaluate(documents(2, start=80)).tokens > 0
    line = failure(capfd, "adapt", text, "--out", tmp_path / "more", "--model", model_folder, *options[:-1], 9)
    assert "top must be from 1 to 3" in line
