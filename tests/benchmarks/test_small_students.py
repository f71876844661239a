"""The benchmark of small students on a tiny model: every way is trained, and its ratios are those of its rows."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import small_students
from helpers.corpora import corpus_folder
from perplexity import token_log_probs


def test_table_compares_small_decoders_with_the_full_one(model_folder, tmp_path, monkeypatch, capsys):
    arguments = f"{corpus_folder(tmp_path / 'corpus')} --model {model_folder} --device cpu --blocks 1 --epochs 1"
    ways = "model,full,full:0.5,full:1:full:300,model:0.9:model:300"
    arguments += f" --small-epochs 1 --limit 200 --ways {ways} --json {tmp_path / 'rows.json'}"
    monkeypatch.setattr(sys, "argv", ["small_students.py", *arguments.split()])
    small_students.main()
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in rows] == ["all blocks", *ways.split(",")]
    assert len({row["alone"] for row in rows}) == len(rows)
    for row, line in zip(rows, lines[2:], strict=True):
        shown = [cell.strip() for cell in line.strip("|").split("|")]
        assert shown[:3] == ["corpus", f"{row['model']:.2f}", row["way"]]
        assert float(shown[7]) == pytest.approx(row["mixed"] / rows[0]["mixed"], abs=1e-3)
        assert row["mixed"] <= row["model"] * 1.05
        assert (row["weights"] == 1) == (row["way"] == "all blocks")


def test_share_is_that_of_the_smallest_perplexity():
    one, other = torch.rand(50, dtype=torch.float64).log(), torch.rand(50, dtype=torch.float64).log()
    share = small_students.best_share(one, other)
    figures = {step: float(((1 - step) * one.exp() + step * other.exp()).log().mean()) for step in (0.0, share, 1.0)}
    finer = [float(((1 - s / 200) * one.exp() + s / 200 * other.exp()).log().mean()) for s in range(201)]
    assert figures[share] == max(figures.values())
    assert figures[share] >= max(finer) - 1e-4
    assert small_students.perplexity(small_students.mixed(one, other, 0.3)) == pytest.approx(
        float(torch.exp(-(0.7 * one.exp() + 0.3 * other.exp()).log().mean()))
    )


def test_log_probabilities_are_those_of_single_documents(lm):
    documents = [[5, 6, 7, 8], [9, 10]]
    found = token_log_probs(lm, documents).tolist()
    expected = []
    for document in documents:
        with torch.no_grad():
            log_p = lm.model(torch.tensor([[lm.start_token, *document[:-1]]])).logits[0].log_softmax(1)
        expected += log_p.gather(1, torch.tensor(document)[:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, rel=1e-4)
