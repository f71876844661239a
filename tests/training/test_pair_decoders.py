"""Training of a decoder on pairs: against plain torch, pair by pair, and its use beside a store."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.cli import failure, knnlm
from helpers.decoders import PlainTraining, equal, losses
from helpers.models import pair_tokenizer, tiny, tiny_tokenizer, whisper_extractor, whisper_tokenizer
from helpers.pairs import languages, pairs, start_tokens, write_tsv
from knnlm.cli.train import _describe_losses
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.build import build, build_shard
from knnlm.lm.speech import open_lm
from knnlm.lm.windows import PairTokens, WindowShape
from knnlm.memories.decoder import load_card
from knnlm.mixture.mixture import Mixture
from knnlm.training.data import TokenStream, TrainingBatches
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig, DecoderTrainer
from knnlm.training.initial_model import open_initial_model

STORED, HELD_OUT = pairs(30), pairs(6, start=60)
CONFIG = DecoderConfig(epochs=2, batch_tokens=48, learning_rate=1e-3, warm_up=0.3)
DROPOUT = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "dropout_rate",
    "encoder_layerdrop",
    "decoder_layerdrop",
)


def save_model(family, folder):
    """Save a tiny model without dropout, so that a training has no random numbers."""
    model = tiny(family)
    for name in DROPOUT:
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    model.save_pretrained(folder)
    pair_tokenizer(family).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens the model of a family, saved once."""
    folders = {}

    def open_family(family):
        if family not in folders:
            folders[family] = save_model(family, tmp_path_factory.mktemp(family) / "model")
        lm = open_lm(str(folders[family]), device="cpu", **languages(family))
        return lm, open_initial_model(str(folders[family]), like=lm)

    return open_family


def pair_loss(family, lm, documents):
    """The mean cross entropy of windows that are whole targets: each pair is read alone, without padding."""
    tokenizer, start = lm.tokenizer, start_tokens(family, lm.tokenizer)
    read = []
    for document in documents:
        target = tokenizer(text_target=document.text, add_special_tokens=False)["input_ids"]
        read.append((tokenizer(document.source_text)["input_ids"], [*target, tokenizer.eos_token_id]))
    firsts = np.cumsum([0, *(len(target) for _, target in read)]).tolist()

    def loss(model, _batches, windows, _targets, _beta):
        total, count = 0.0, 0
        for first, begin, scored, end in windows.tolist():
            source, target = read[firsts.index(first)]
            assert (begin, scored, end) == (0, 0, len(target))
            ids = torch.tensor([[*start, *target[:-1]]])
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=ids).logits[0, len(start) - 1 :]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum")
            count += len(target)
        return total / count

    return loss


@pytest.mark.parametrize("family", ["marian", "m2m_100", "bart", "t5", "mbart"])
def test_training_on_pairs_is_that_of_a_plain_loop(family, opened, tmp_path):
    lm, initial = opened(family)
    texts = lm.encode_documents(STORED)
    card = train_decoder(texts, initial, tmp_path / "out", CONFIG, device="cpu")
    batches = TrainingBatches(
        TokenStream.from_documents(texts), WindowShape(128, 128), start_token=lm.start_token, held_out=0.0, seed=0
    )
    plain = PlainTraining(opened(family)[0].model, batches, loss=pair_loss(family, lm, STORED))
    steps = [groups for epoch in range(2) for groups in batches.steps(epoch, 48)]
    assert card.steps == len(steps) > 4
    for groups, line in zip(steps, losses(tmp_path / "out"), strict=True):
        loss = plain.step(np.concatenate(groups), line["learning_rate"])
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
    plain.check_weights(tmp_path / "out")
    decoder = open_lm(str(tmp_path / "out"), device="cpu", **languages(family))
    assert (decoder.src_lang, decoder.tgt_lang) == (lm.src_lang, lm.tgt_lang)


def test_long_targets_are_read_in_windows_with_the_whole_source(opened):
    """Each position is scored once, after the tokens before it in its window and beside all of its source."""
    lm, _ = opened("m2m_100")
    long = [replace(STORED[0], text=" ".join(each.text for each in STORED[:4]))]
    (tokens,) = lm.encode_documents(long)
    batches = TrainingBatches(
        TokenStream.from_documents([tokens, *lm.encode_documents(STORED[1:3])]),
        WindowShape(8, 4),
        start_token=lm.start_token,
        held_out=0.0,
        seed=0,
        prefix=lm.prefix_tokens,
    )
    windows = batches.windows(0)
    batch = batches.read(windows)
    assert sorted(batch.positions[batch.positions >= 0].tolist()) == list(range(int((batch.targets >= 0).sum())))
    ids, targets = batch.ids, batch.targets.view(batch.ids.shape)
    for row, (first, begin, scored, end) in enumerate(windows.tolist()):
        document = tokens if first == 0 else lm.encode_documents(STORED[1:3])[int(first != len(tokens))]
        before = [*lm.start_tokens, *document[: end - 1]] if not begin else document[begin - 1 : end - 1]
        assert ids[row, : len(before)].tolist() == before
        counted = targets[row] >= 0
        assert targets[row][counted].tolist() == document[scored:end]
        assert counted.nonzero()[-1].item() == len(before) - 1
        length = int(batch.source_mask[row].sum())
        assert batch.sources[row, :length].tolist() == document.source
    part = batch.rows(1, 3)
    assert part.sources.tolist() == batch.sources[1:3].tolist()
    assert batch.columns(3).source_mask.tolist() == batch.source_mask[:1].tolist()


@given(
    sizes=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=5), min_size=1, max_size=5
    ),
    room=st.integers(0, 600),
)
def test_groups_of_pairs_are_joined_up_to_the_maximum_with_their_sources(sizes, room):
    flat = [size for group in sizes for size in group]
    text = TokenStream.from_documents([PairTokens([5] * target, [6] * source) for target, source in flat])
    batches = TrainingBatches(text, WindowShape(64, 64), start_token=1, held_out=0.0, seed=0)
    windows = np.array([[first, 0, 0, target] for first, (target, _) in zip(text.starts, flat, strict=False)])
    groups = np.split(windows, np.cumsum([len(group) for group in sizes])[:-1])
    found = batches.join_groups(groups, room)
    assert sorted(np.concatenate(found)[:, 0].tolist()) == windows[:, 0].tolist()
    given_ = {tuple(group[:, 0].tolist()) for group in groups}
    for group in found:
        batch = batches.read(group)
        read = batch.ids.numel() + batch.sources.numel()
        assert read <= room or tuple(group[:, 0].tolist()) in given_


@pytest.mark.parametrize("shards", [1, 2])
def test_documents_of_a_changed_store_are_trained_on_with_their_own_sources(opened, tmp_path, shards):
    """Removed pairs leave gaps in the numbers of entries, and shards have numbers of their own."""
    lm, initial = opened("marian")
    if shards == 1:
        store = build(STORED, tmp_path / "pairs.store", lm=lm)
    else:
        parts = [tmp_path / str(number) for number in range(shards)]
        for number, part in enumerate(parts, 1):
            build_shard(lambda: STORED, part, shard=f"{number}/{shards}", lm=lm).close()
        join_shards(parts, tmp_path / "pairs.store")
        store = Datastore.open(tmp_path / "pairs.store")
    for number in (1, 2, 7, 20):
        store.remove(document=f"p{number}")
    store, by_id = Datastore.open(tmp_path / "pairs.store"), {each.id: each for each in STORED}
    left = [by_id[document.id] for document in store.documents()]
    assert len(left) == len(STORED) - 4
    train_decoder(store, initial, tmp_path / "store", CONFIG, device="cpu")
    train_decoder(lm.encode_documents(left), initial, tmp_path / "texts", CONFIG, device="cpu")
    assert equal(tmp_path / "store", tmp_path / "texts")


def test_selection_holds_pairs_out_and_ends_below_the_model(opened, tmp_path):
    lm, initial = opened("marian")
    config = replace(CONFIG, select=True, epochs=2, learning_rate=3e-3)
    held_out = lm.encode_documents(STORED[24:])
    card = train_decoder(
        lm.encode_documents(STORED[:24]), initial, tmp_path / "out", config, held_out_text=held_out, device="cpu"
    )
    # The loss on held-out pairs before the training, from a pass over each.
    loss = pair_loss("marian", lm, STORED[24:])
    firsts = np.cumsum([0, *map(len, held_out)]).tolist()
    windows = np.array([[first, 0, 0, len(target)] for first, target in zip(firsts, held_out, strict=False)])
    with torch.no_grad():
        assert card.held_out[0]["loss"] == pytest.approx(float(loss(lm.model, None, windows, None, 0)), rel=1e-5)
    assert min(trial["loss"] for trial in card.selection["trials"]) < card.held_out[0]["loss"]
    trained = open_lm(str(tmp_path / "out"), device="cpu")
    with torch.no_grad():
        after = math.exp(float(loss(trained.model, None, windows, None, 0)))
    chosen = card.selection["chosen"]
    described = _describe_losses(asdict(card))
    assert described.startswith(f"held-out perplexity {math.exp(card.held_out[0]['loss']):.3f} → ")
    assert float(described.split("→ ")[1].split()[0]) == pytest.approx(after, rel=1e-3)
    assert described.endswith(f"(rate {chosen['learning_rate']:g}, {chosen['epochs']:g} epochs)")
    others = lm.encode_documents([replace(each, source_text=f"{each.source_text} x") for each in STORED[24:]])
    assert [list(other) for other in others] == [list(own) for own in held_out]
    with pytest.raises(DatastoreError, match="trained with another held out sources"):
        train_decoder(
            lm.encode_documents(STORED[:24]), initial, tmp_path / "out", config, held_out_text=others, device="cpu"
        )


def test_interrupted_training_on_pairs_resumes_with_the_same_result(opened, tmp_path, monkeypatch):
    lm, initial = opened("marian")
    texts = lm.encode_documents(STORED)
    train_decoder(texts, initial, tmp_path / "whole", CONFIG, device="cpu")
    original = DecoderTrainer._accumulate

    def interrupted(self, *args):
        if self.state.step == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderTrainer, "_accumulate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_decoder(texts, initial, tmp_path / "out", CONFIG, device="cpu")
    others = lm.encode_documents([replace(each, source_text=f"{each.source_text} x") for each in STORED])
    with pytest.raises(DatastoreError, match="trained with another sources"):
        train_decoder(others, initial, tmp_path / "out", CONFIG, device="cpu")
    with pytest.raises(DatastoreError, match="trained with another held out"):
        train_decoder(texts, initial, tmp_path / "out", CONFIG, held_out_text=others[:5], device="cpu")
    train_decoder(texts, initial, tmp_path / "out", CONFIG, device="cpu")
    assert equal(tmp_path / "out", tmp_path / "whole")


def test_adapters_of_pairs_are_merged_and_saved_for_peft(opened, tmp_path):
    lm, initial = opened("marian")
    config = replace(CONFIG, lora=4, learning_rate=3e-3, epochs=6)
    card = train_decoder(lm.encode_documents(STORED), initial, tmp_path / "out", config, device="cpu")
    assert card.losses["loss"] < losses(tmp_path / "out")[0]["loss"]
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["task_type"] == "SEQ_2_SEQ_LM"
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(opened("marian")[0].model, tmp_path / "out")
    merged = open_lm(str(tmp_path / "out"), device="cpu")
    inputs = {**lm.pad_sources(lm.encode_sources(["ab c"])), "decoder_input_ids": torch.tensor([[1, 7, 9]])}
    with torch.no_grad():
        torch.testing.assert_close(merged.model(**inputs).logits, adapted(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_what_pairs_do_not_have_is_refused(opened, tmp_path):
    lm, initial = opened("marian")
    texts = lm.encode_documents(STORED)
    for wrong, name in (({"top": 1}, "top"), ({"packed": True}, "packed")):
        with pytest.raises(ParameterError, match=f"^{name} is for decoder-only models"):
            train_decoder(texts, initial, tmp_path / "out", replace(CONFIG, **wrong), device="cpu")
    with pytest.raises(ParameterError, match="is trained on pairs, but the texts have no sources"):
        train_decoder([list(text) for text in texts], initial, tmp_path / "out", CONFIG, device="cpu")
    with pytest.raises(ParameterError, match="has all blocks of a pretrained one"):
        open_initial_model(lm.name, like=lm, layers=1)
    with pytest.raises(ParameterError, match="has all blocks of a pretrained one"):
        open_initial_model("small.json", like=lm)
    tiny("llama").save_pretrained(tmp_path / "text")
    tiny_tokenizer().save_pretrained(tmp_path / "text")
    plain = open_lm(str(tmp_path / "text"), device="cpu")
    with pytest.raises(ParameterError, match="is a decoder-only model, but the texts are pairs"):
        train_decoder(texts, open_initial_model(plain.name, like=plain), tmp_path / "out", CONFIG, device="cpu")
    for part in (tiny("whisper"), whisper_tokenizer(), whisper_extractor()):
        part.save_pretrained(tmp_path / "whisper")
    with pytest.raises(ParameterError, match="reads sounds: no decoder can be"):
        open_initial_model(str(tmp_path / "whisper"), like=open_lm(str(tmp_path / "whisper"), tgt_lang="en"))


def test_models_of_other_languages_or_start_tokens_are_refused_before_the_training(opened, tmp_path):
    lm, initial = opened("m2m_100")
    store = build(STORED[:6], tmp_path / "pairs.store", lm=lm)
    back = open_lm(lm.name, device="cpu", src_lang="eng_Latn", tgt_lang="deu_Latn")
    other = open_initial_model(lm.name, like=back)
    with pytest.raises(
        DatastoreError, match=r"built with another src lang \(deu_Latn\) than that of the initial model"
    ):
        train_decoder(store, other, tmp_path / "out", CONFIG, device="cpu")
    texts = lm.encode_documents(STORED[:6])
    train_decoder(texts, initial, tmp_path / "out", CONFIG, device="cpu")
    with pytest.raises(DatastoreError, match="trained with another start tokens"):
        train_decoder(texts, other, tmp_path / "out", CONFIG, device="cpu")
    marian, _ = opened("marian")
    model = tiny("marian")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    for part in (model, marian.tokenizer):
        part.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelMismatch, match=r"begin with the tokens \[0\], those of .* with \[1\]"):
        open_initial_model(str(tmp_path / "other"), like=marian)


@pytest.mark.parametrize("family", ["marian", "m2m_100"])
def test_commands_distil_tune_and_translate_with_a_decoder_of_pairs(family, opened, tmp_path, capfd):
    lm, _ = opened(family)
    stored = write_tsv(tmp_path / "stored.tsv", STORED)
    valid = write_tsv(tmp_path / "valid.tsv", [*STORED[:12], *HELD_OUT])
    store, decoder = tmp_path / "pairs.store", tmp_path / "decoder"
    named = [part for name, value in languages(family).items() for part in (f"--{name.replace('_', '-')}", value)]
    assert knnlm(capfd, "build", stored, "--out", store, "--model", lm.name, *named)[0] == 0
    training = ["--epochs", 4, "--learning-rate", 3e-3, "--batch-tokens", 64, "--no-select"]
    code, out, err = knnlm(
        capfd, "distill", store, "--into", "decoder", "--out", decoder, "--valid", valid, *training, "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["lambda_metadata"]["perplexity"] < result["lambda_metadata"]["base_perplexity"]
    code, out, err = knnlm(capfd, "eval", decoder, valid, "--json")
    assert code == 0, err
    assert json.loads(out)["perplexity"] == pytest.approx(result["lambda_metadata"]["perplexity"], rel=1e-5)
    assert json.loads(out)["documents"] == 18
    memories = f"knn,decoder={decoder}"
    assert knnlm(capfd, "tune", store, valid, "--memories", memories, "--weights", "fixed")[0] == 0
    code, out, err = knnlm(capfd, "translate", store, STORED[2].source_text, "--max-new-tokens", 12)
    assert code == 0, err
    assert out.strip() == Mixture.open(store).translate([STORED[2].source_text], max_new_tokens=12)[0]
    code, out, err = knnlm(capfd, "translate", decoder, STORED[2].source_text, "--max-new-tokens", 12)
    assert code == 0, err
    assert out.strip() == Mixture.open(decoder).translate([STORED[2].source_text], max_new_tokens=12)[0]
    assert "note:" not in err  # no domain check has left the decoder out
    assert load_card(decoder).initial_model.get("tgt_lang") == lm.tgt_lang
    wrong = failure(capfd, "distill", store, "--into", "decoder", "--out", tmp_path / "o", "--layers", 1)
    assert "has all blocks of a pretrained one" in wrong
    decoder.rename(tmp_path / "moved")
    assert f"The decoder {decoder} does not exist. If it was moved, name" in failure(capfd, "translate", store, "ab")
    (tmp_path / "decoder.partial").mkdir()
    assert "has not ended. Repeat the command" in failure(capfd, "translate", store, "ab")
    for folder, what in ((store, "a store: name it as knn="), (tmp_path / "decoder.partial", "no model")):
        wrong = failure(capfd, "translate", store, "ab", "--memories", f"decoder={folder}")
        assert f"The folder {folder} contains {what}" in wrong
