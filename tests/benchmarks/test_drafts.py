"""The benchmark of drafts on a tiny model: texts are the same, and ratios are those of its speeds."""

from __future__ import annotations

import json
import sys

import pytest

import drafts
from helpers.corpora import corpus_folder


def test_table_compares_drafts_with_mixture_and_model(model_folder, tmp_path, monkeypatch, capsys):
    folder = corpus_folder(tmp_path / "corpus")
    arguments = f"{folder} --model {model_folder} --device cpu --limit 200 --prompts 2"
    arguments += f" --prompt-tokens 4 --new-tokens 12 --from train --json {tmp_path / 'rows.json'}"
    monkeypatch.setattr(sys, "argv", ["drafts.py", *arguments.split()])
    drafts.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["mode"] for row in rows] == ["greedy", "sampled"]
    for row in rows:
        assert row["same"] == 2
        for other in ("model", "mixture"):
            ratio = row["drafts_tokens_per_second"] / row[f"{other}_tokens_per_second"]
            assert row[f"drafts_of_{other}"] == pytest.approx(ratio, rel=0.02)
        assert row["tokens_per_step"] >= 1
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [cells[:2] for cells in shown[-2:]] == [["corpus", "greedy"], ["corpus", "sampled"]]
