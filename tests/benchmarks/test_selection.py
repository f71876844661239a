"""The benchmark of selected decoders on a tiny model: its ratios are those of its rows."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

import selection
from helpers.corpora import corpus_folder


def test_table_compares_the_selected_decoder_with_the_best_of_the_others(
    lm, model_folder, tmp_path, monkeypatch, capsys
):
    arguments = f"{corpus_folder(tmp_path / 'corpus')} --model {model_folder} --device cpu --grid 1:1e-3,2:1e-4"
    monkeypatch.setattr(sys, "argv", ["selection.py", *arguments.split(), "--epochs", "1", "--limit", "200"])
    selection.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [row["decoder"] for row in rows] == ["model", "1 × 0.001", "2 × 0.0001", "selected"]
    shown = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert shown[:2] == ["corpus", f"{rows[0]['tokens']:,}"]
    assert shown[2:6] == [f"{row['test']:.3f}" for row in rows]
    best = min(row["test"] for row in rows[:-1])
    assert float(shown[6]) == pytest.approx(rows[-1]["test"] / best, abs=1e-4)
    assert rows[-1]["chosen"]["epochs"] <= 1


def test_perplexity_is_that_of_documents_one_by_one(lm):
    documents = [[5, 6, 7, 8], [9, 10]]
    total = 0.0
    for document in documents:
        ids = torch.tensor([[lm.start_token, *document[:-1]]])
        with torch.no_grad():
            log_p = lm.model(ids).logits[0].log_softmax(1)
        total -= float(log_p.gather(1, torch.tensor(document)[:, None]).sum())
    assert selection.perplexity(lm, documents) == pytest.approx(math.exp(total / 6), rel=1e-5)
