"""Targets that a model predicts, against its own forward passes over single prefixes."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from helpers.training import fit_decoder
from knnlm.errors import DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.training import model_teacher
from knnlm.training.data import TokenStream
from knnlm.training.initial_model import InitialModel
from knnlm.training.model_teacher import ModelTeacherConfig, PlannedModelTeacher, make_model_targets
from knnlm.training.teacher import OFFSETS, PROBS, TARGETS_FILE, TOKENS, Targets


@pytest.fixture(scope="module")
def text(lm):
    return TokenStream.from_documents([lm.encode(document.text) for document in documents(8)])


def distributions(lm, text):
    """The distribution of every token of a text, from a pass over the tokens before it, (N, V) in float64."""
    rows = []
    for begin, end in zip(text.starts[:-1], text.starts[1:], strict=True):
        tokens = [lm.start_token, *text.tokens[begin:end].tolist()]
        for place in range(1, len(tokens)):
            with torch.inference_mode():
                logits = lm.model(torch.tensor([tokens[:place]])).logits[0, -1]
            rows.append(logits.double().softmax(0).numpy())
    return np.array(rows)


def test_targets_are_the_predictions_of_the_model(lm, text, tmp_path, monkeypatch):
    monkeypatch.setattr(model_teacher, "_POSITIONS", 50)  # several groups
    right = distributions(lm, text)
    for top, mass in ((lm.vocab_size, 1.0), (5, 1.0), (40, 0.5)):
        targets = make_model_targets(text, tmp_path / f"{top}-{mass}", lm, ModelTeacherConfig(top, mass))
        found = targets.lookup(torch.arange(len(text.tokens)))
        assert targets.token_count == len(text.tokens) == len(right)
        masses = []
        for row, wanted in enumerate(right):
            order = np.argsort(-wanted, kind="stable")[:top]
            probs = wanted[order]
            kept = (np.cumsum(probs) - probs < mass) & (probs >= 2.0**-24)
            masses.append(probs[kept].sum())
            expected, own = np.zeros(len(wanted)), np.zeros(len(wanted))
            expected[order[kept]] = probs[kept] / probs[kept].sum()
            length = int(found.lengths[row])
            own[found.ids[row, :length]] = found.probs[row, :length]
            np.testing.assert_allclose(own, expected, atol=2e-3)
            assert abs(length - int(kept.sum())) <= 1  # a sum of float32 at the limit
        assert targets.metadata["kept_mass"] == pytest.approx(np.mean(masses), abs=2e-3)
        assert targets.metadata["dense_bytes_per_token"] == 6 * lm.vocab_size


def test_windows_give_every_token_half_of_the_context(tmp_path):
    short = CausalLM(tiny("llama"), tiny_tokenizer(), name="short")
    shape = short.window(16, 8)
    short.window = lambda *_: shape
    stream = TokenStream.from_documents([short.encode(" ".join(one.text for one in documents(3)))])
    found = make_model_targets(stream, tmp_path / "t", short, ModelTeacherConfig(short.vocab_size, 1.0)).lookup(
        torch.arange(len(stream.tokens))
    )
    for row in (0, 7, 15, 16, 23, 24, 40):
        first = 0 if row < 16 else (row - 8) // 8 * 8  # of the window in which the token is among the last eight
        before = [
            short.start_token if first == 0 else int(stream.tokens[first - 1]),
            *stream.tokens[first:row].tolist(),
        ]
        with torch.inference_mode():
            wanted = short.model(torch.tensor([before])).logits[0, -1].double().softmax(0).numpy()
        own = np.zeros(len(wanted))
        own[found.ids[row]] += found.probs[row].numpy() * (np.arange(found.ids.shape[1]) < int(found.lengths[row]))
        np.testing.assert_allclose(own, wanted, atol=2e-3)


def test_interrupted_targets_end_with_the_same_bytes(lm, text, tmp_path, monkeypatch):
    monkeypatch.setattr(model_teacher, "_POSITIONS", 40)

    @contextmanager
    def deadly(what, *, total=None, unit="tokens"):
        assert (what, total, unit) == ("predicting targets", len(text.tokens), "tokens")
        done = 0

        def advance(count):
            nonlocal done
            done += count
            if done > total // 2:
                raise KeyboardInterrupt

        yield advance

    make_model_targets(text, tmp_path / "whole", lm)
    with pytest.raises(KeyboardInterrupt):
        make_model_targets(text, tmp_path / "t", lm, checkpoint_every=0, progress=deadly)
    with pytest.raises(DatastoreError, match="unfinished"):
        Targets.open(tmp_path / "t")
    done = json.loads((tmp_path / "t" / TARGETS_FILE).read_text())["done"]["positions"]
    assert done in text.starts
    assert 0 < done < len(text.tokens)
    make_model_targets(text, tmp_path / "t", lm)
    for name in (OFFSETS, TOKENS, PROBS):
        assert (tmp_path / "t" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    other = CausalLM(tiny("llama", seed=1), tiny_tokenizer(), name="other")
    with pytest.raises(DatastoreError, match="another teacher"):
        make_model_targets(text, tmp_path / "t", other)


def test_student_learns_what_its_teacher_predicts(lm, text, tmp_path):
    """With β = 1 the loss of the untrained student is the divergence from the teacher, and it falls."""
    teacher = CausalLM(tiny("llama", seed=5), tiny_tokenizer(), name="teacher")
    targets = make_model_targets(text, tmp_path / "t", teacher, ModelTeacherConfig(teacher.vocab_size, 1.0))
    p, q = distributions(teacher, text), distributions(lm, text)
    divergence = float((p * (np.log(p) - np.log(q))).sum(1).mean())
    options = {"beta": 1.0, "epochs": 30, "batch_tokens": 256, "learning_rate": 3e-3, "held_out": 0.0, "packed": False}
    read = [text.tokens[begin:end].tolist() for begin, end in pairwise(text.starts)]
    card = fit_decoder(read, InitialModel(lm, "tiny"), tmp_path / "d", targets=targets, **options)
    first = json.loads((tmp_path / "d" / "losses.jsonl").read_text().splitlines()[0])
    assert first["kl"] == pytest.approx(divergence, rel=0.15)  # the first step is of some of the windows
    assert card.losses["kl"] < 0.5 * divergence
    assert card.targets["kind"] == "model"


def test_wrong_teachers_are_errors(lm, text, tmp_path):
    high = TokenStream(np.full(4, lm.vocab_size, np.int32), np.array([0, 4]))
    with pytest.raises(ModelMismatch, match=rf"tokens up to {lm.vocab_size}, but tiny-llama has only"):
        make_model_targets(high, tmp_path / "t", lm)
    pairs = TokenStream(text.tokens, text.starts, text)
    with pytest.raises(ParameterError, match="pairs"):
        make_model_targets(pairs, tmp_path / "t", lm)
    for options in ({"top": 0}, {"mass": 0.0}, {"mass": 1.5}):
        with pytest.raises(ParameterError):
            ModelTeacherConfig(**options)
    with pytest.raises(NotImplementedError):
        PlannedModelTeacher(text, lm, ModelTeacherConfig()).lookup(torch.arange(2))


def test_targets_of_other_documents_with_the_same_tokens_are_others(lm, text, tmp_path):
    make_model_targets(text, tmp_path / "t", lm)
    joined = TokenStream(text.tokens, text.starts[[0, -1]])
    with pytest.raises(DatastoreError, match="document boundaries"):
        make_model_targets(joined, tmp_path / "t", lm)


def test_store_of_the_text_and_its_documents_have_the_same_targets(lm, tmp_path):
    with closing(build(documents(5), tmp_path / "s", lm=lm)) as store:
        stored = TokenStream.from_store(store)
    read = TokenStream.from_documents([lm.encode(one.text) for one in documents(5)])
    make_model_targets(stored, tmp_path / "t", lm)
    assert make_model_targets(read, tmp_path / "t", lm).token_count == len(read.tokens)
