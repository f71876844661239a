"""The benchmark of generated text on tiny models: batches, features and perplexities against plain passes."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch

import generation
from helpers.corpora import corpus_folder
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.ingest.build import build
from knnlm.mixture.mixture import Mixture

GREEDY = generation.DECODINGS["greedy"]


@pytest.fixture
def prompts(lm):
    return [
        [lm.start_token, *lm.encode(document.text)[: 6 + 3 * number]] for number, document in enumerate(documents(3))
    ]


@pytest.fixture
def mixture(lm, tmp_path):
    build(documents(12), tmp_path / "docs.store", lm=lm)
    return Mixture.open(tmp_path / "docs.store", lm, memories="knn:0.3,cache:0.2,ngram:0.2", k=16)


def test_batches_generate_what_each_prompt_generates_alone(lm, mixture, prompts):
    for system in (lm, mixture):
        together = generation.generate(system, prompts, new_tokens=8, batch=2, **GREEDY)
        alone = [generation.generate(system, [prompt], new_tokens=8, batch=1, **GREEDY)[0] for prompt in prompts]
        assert together == alone


def test_seed_decides_samples(lm, prompts):
    sampled = generation.DECODINGS["sampled"]
    first, again, other = (
        generation.generate(lm, prompts, new_tokens=8, batch=3, seed=seed, **sampled) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_unreadable_prompts_are_not_copied(mixture, prompts):
    hidden = [[False] * len(prompt) for prompt in prompts]
    mixture.weights = type(mixture.weights)((0.0, 0.0, 1.0, 0.0))  # the cache alone
    with_cache = generation.generate(mixture, prompts, new_tokens=4, batch=3, **GREEDY)
    without = generation.generate(mixture, prompts, readable=hidden, new_tokens=4, batch=3, **GREEDY)
    assert with_cache != without


def test_mean_states_are_those_of_a_plain_pass(lm, prompts):
    found = [lm.encode("and the books")[:5], lm.encode("a model")[:4], lm.encode("rooms are closed")]
    vectors = generation.mean_states(lm, prompts, found)
    for prompt, tokens, vector in zip(prompts, found, vectors, strict=True):
        with torch.no_grad():
            keys, _ = lm.forward(torch.tensor([[*prompt, *tokens]]))
        expected = keys[0][0, len(prompt) - 1 : -1].double().mean(0)
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_perplexity_is_that_of_a_plain_pass(lm, prompts):
    found = [lm.encode("and the books")[:5], lm.encode("a model")[:4], lm.encode("rooms are closed")]
    total = 0.0
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.no_grad():
            log_probs = lm.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(1)
        total += float(log_probs.gather(1, torch.tensor(tokens)[:, None]).sum())
    expected = math.exp(-total / sum(map(len, found)))
    assert generation.perplexity(lm, prompts, found) == pytest.approx(expected, rel=1e-4)


def test_passages_are_consecutive_tokens_of_joined_or_divided_documents(lm):
    texts = [Document(str(number), "made", text) for number, text in enumerate(("ab cd", "ef gh ij", "kl mn " * 30))]
    length = 10
    found = generation.passages(texts, lm, length, 100)
    joined = "\n".join(document.text for document in texts)
    assert all(len(passage) == length for passage in found)
    assert all(lm.decode(passage) in joined for passage in found)
    assert len(found) == len({lm.decode(passage) for passage in found}) or len(found) > 5
    assert generation.passages(texts, lm, length, 2) == [found[0], found[len(found) // 2]]


def test_whole_run_prints_both_tables_and_writes_all_texts(tmp_path, monkeypatch, capsys):
    student = ["--train-student", "--student-tokens", "300", "--student-epochs", "1"]
    monkeypatch.setattr(sys, "argv", _arguments(tmp_path, *student))
    generation.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    systems = ["model", "one λ", "gate", "default"]
    assert [row["system"] for row in rows["answers"]] == systems
    assert rows["answers"][0]["identical"] == 1.0
    assert [(row["decoding"], row["system"]) for row in rows["continuations"]] == [
        ("real", "text"),
        *(("greedy", name) for name in systems),
        *(("sampled", name) for name in systems),
    ]
    assert rows["continuations"][0]["area"] == pytest.approx(1.0)
    assert all(row["perplexity, student"] > 1 and 0 <= row["copy, max"] <= 8 for row in rows["continuations"])
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 4 * 5 + 9 * 4
    shown = capsys.readouterr().out
    assert "| corpus | decoding | system |" in shown
    # Every row is also a line of its own, in the order in which rows become known.
    printed = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert [row for row in printed if "part" not in row] == [*rows["answers"], *rows["continuations"]]
    assert [row["part"] for row in printed if "part" in row] == ["build", "instructions", "student", "continuations"]


def test_run_that_is_cut_keeps_its_rows_and_texts(tmp_path, monkeypatch, capsys):
    run = _arguments(tmp_path, "--systems", "one λ", "model", "--families", "related", "--decodings", "greedy")
    texts = []

    def generate(system, prompts, **_):
        if texts:
            raise KeyboardInterrupt
        texts.extend(prompts)
        return [[5] * 8 for _ in prompts]

    monkeypatch.setattr(generation, "generate", generate)
    monkeypatch.setattr(sys, "argv", run)
    with pytest.raises(KeyboardInterrupt):
        generation.main()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["system"] for row in printed if "system" in row] == ["text", "one λ"]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows == {"answers": [], "continuations": [row for row in printed if "system" in row]}
    lines = (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["system"] for line in lines] == ["text"] * 4 + ["one λ"] * 4


def test_chosen_family_and_systems_are_measured_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", _arguments(tmp_path, "--systems", "gate", "--families", "instructions"))
    monkeypatch.setattr(generation, "open_student", lambda *_: pytest.fail("no student is needed"))
    generation.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["system"] for row in rows["answers"]] == ["model", "gate"]  # answers are compared with the model's
    assert not rows["continuations"]


def _arguments(folder, *more):
    """Return the arguments of a run on a tiny model and corpus."""
    tiny("bloom").save_pretrained(folder / "bloom")
    tiny_tokenizer().save_pretrained(folder / "bloom")
    corpus = corpus_folder(folder / "notes", documents=6)
    arguments = ["generation.py", str(corpus), "--model", str(folder / "bloom"), "--instructions", "5", "--batch", "3"]
    arguments += ["--answer-tokens", "6", "--prompts", "4", "--prompt-tokens", "8", "--new-tokens", "8"]
    return [*arguments, "--texts", str(folder / "texts.jsonl"), "--json", str(folder / "rows.json"), *more]
