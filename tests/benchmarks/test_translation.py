"""The benchmark of translation: its training, its brute force, and the table of a whole run with a tiny model."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
import torch

import translation
from helpers import oracle
from helpers.pairs import BruteForce, pair_lm, pairs
from knnlm.evaluation import odds
from knnlm.ingest.build import build
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture
from marian import TrainingConfig, batches, encode_pairs, new_model, smoothed_loss, train, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for pair in pairs(40) for text in (pair.source_text, pair.text)]
    return train_tokenizer(texts, 300)


def test_tokenizer_ends_texts_and_restores_them(tokenizer):
    ids = tokenizer("Größe, naïve — 7 %")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Größe, naïve — 7 %"


def test_batches_hold_all_pairs_within_the_limit(tokenizer):
    encoded = encode_pairs(tokenizer, pairs(50))
    stream, seen = batches(encoded, 200, random.Random(0)), []
    while len(seen) < len(encoded):
        batch = next(stream)
        assert len(batch) == 1 or len(batch) * max(len(side) for pair in batch for side in pair) <= 200
        seen += batch
    assert sorted(seen) == sorted(encoded)


def test_loss_equals_one_pair_at_a_time(tokenizer):
    torch.manual_seed(0)
    model = new_model(len(tokenizer), width=16, layers=1).eval()
    encoded = encode_pairs(tokenizer, pairs(5))
    together = smoothed_loss(model, encoded, 0.0, "cpu")
    losses, count = 0.0, 0
    for source, target in encoded:
        read = torch.tensor([[0, *target[:-1]]])
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=read).logits[0]
        losses -= logits.log_softmax(1)[range(len(target)), target].sum().item()
        count += len(target)
    assert together.item() == pytest.approx(losses / count, rel=1e-5)


def test_training_lowers_the_loss(tokenizer):
    torch.manual_seed(0)
    model = new_model(len(tokenizer), width=16, layers=1, dropout=0.0)
    encoded = encode_pairs(tokenizer, pairs(5))
    before = smoothed_loss(model.eval(), encoded, 0.1, "cpu").item()
    train(model, encoded, TrainingConfig(2.0, learning_rate=3e-3), "cpu")
    assert not model.training
    assert smoothed_loss(model, encoded, 0.1, "cpu").item() < before - 0.5


def test_brute_force_equals_numpy(tmp_path):
    lm, stored = pair_lm("marian"), pairs(24)
    build(stored, tmp_path / "pairs.store", lm=lm).close()
    vanilla = Mixture.open(tmp_path / "pairs.store", lm, memories="knn", k=4, knn_temperature=3.0, lmbda=0.6)
    settings = translation.VoteSettings(4, 3.0, 0.6)
    brute_force = translation.BruteForce(lm, stored, settings, batch=3)
    expected = BruteForce(lm, "marian", stored)
    np.testing.assert_allclose(brute_force.keys.numpy(), expected.keys, atol=2e-3)  # rounded to float16
    assert brute_force.values.tolist() == expected.values.tolist()
    keys = torch.randn(5, brute_force.keys.shape[1])
    probs = torch.rand(5, lm.vocab_size).softmax(1)
    found = brute_force._mixed(keys, probs)
    for row, key, p_lm in zip(found.numpy(), keys.numpy(), probs.numpy(), strict=True):
        knn = oracle.knn_distribution(
            key, brute_force.keys.numpy(), expected.values, lm.vocab_size, k=4, knn_temperature=3.0
        )
        np.testing.assert_allclose(row, 0.4 * p_lm + 0.6 * knn, atol=1e-5)
    sources = [pair.source_text for pair in stored[:6]]
    expected_texts = vanilla.translate(sources, max_new_tokens=translation.NEW_TOKENS)
    assert brute_force.translate(sources) == expected_texts
    # One list whose keys are stored whole: FAISS finds the same neighbours.
    vanilla.knn.index = translation.UsualIndex(vanilla.knn.store, "IVF1,Flat")
    assert vanilla.translate(sources, max_new_tokens=translation.NEW_TOKENS) == expected_texts


@pytest.fixture
def corpora(tmp_path):
    folders = []
    for number, name in enumerate(("general", "it", "koran")):
        folder = tmp_path / name
        folder.mkdir()
        for part, (split, count) in enumerate((("train", 30), ("valid", 12), ("test", 5))):
            own = pairs(count, start=300 * number + 100 * part)
            lines = (json.dumps({"id": each.id, "text": each.text, "source": each.source_text}) for each in own)
            (folder / f"{split}.jsonl").write_text("\n".join(lines))
        folders.append(folder)
    return folders


@pytest.mark.slow
def test_whole_run_has_a_row_for_each_system_and_text(corpora, tmp_path, monkeypatch, capsys):
    sizes = ["--width", "16", "--layers", "1", "--vocabulary", "300", "--train-seconds", "1", "--tune-seconds", "1"]
    sizes += [
        "--systems",
        ",".join([*translation.DEFAULT_SYSTEMS, "subset", "decoder", "gated-decoder"]),
        "--timed",
        "4",
        "--repeats",
        "1",
        "--quality",
        "2",
        "--subset",
        "8",
    ]
    arguments = ["translation.py", *map(str, corpora), *sizes, "--model", str(tmp_path / "model"), "--k", "4"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json", str(tmp_path / "rows.json")])
    monkeypatch.setattr(translation, "NEW_TOKENS", 12)
    monkeypatch.setattr(odds, "_NEW_TOKENS", 12)
    translation.main()
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "rows.json").read_text())
    rows, times = found["quality"], found["times"]
    # The model on three texts; nine systems of each domain on two; both stores on three.
    assert len(rows) == 3 + 2 * 9 * 2 + 3
    assert "tok:13a" in shown
    # The model and seven mixtures of each domain.
    mixtures = ["vanilla", "vanilla-end", "gated", "decoder", "gated-decoder", "subset", "gated-other"]
    assert [row["system"] for row in times] == 2 * ["model", *mixtures]
    assert all(row["step of the model"] > 0 for row in times)
    assert len({(row["store"], row["system"], row["text"]) for row in rows}) == len(rows)
    assert Seq2SeqLM.open(str(tmp_path / "model"), device="cpu").vocab_size <= 300
