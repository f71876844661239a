"""The comparison of plans with real runs: a whole run on a tiny model, and the predictions for a GPU."""

from __future__ import annotations

import sys

import pytest

import plan as script
from knnlm.plan.constants import load_constants
from knnlm.plan.sizes import ModelShape, TextShape


@pytest.fixture
def constants_file(monkeypatch, tmp_path):
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))
    load_constants()[0].save(tmp_path / "c.json")
    return tmp_path / "c.json"


def test_run_prints_predicted_and_real_figures(constants_file, model_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Document {number}. " * 60)
    arguments = ["plan.py", "--sizes", "600", "--formats", "float16", "--model", str(model_folder), "--threads", "1"]
    arguments += ["--constants", str(constants_file), "--text", str(tmp_path / "text"), "--characters", "200"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--folder", str(tmp_path), "--clock", "cpu"])

    def phase(options, name, store, storage, size):  # in this process: a new one takes seconds to import torch
        options.phase, options.store, options.format, options.sizes = name, store, storage, [size]
        return script.PHASES[name](options)

    monkeypatch.setattr(script, "phase", phase)
    script.main()
    header, *rows = capsys.readouterr().out.splitlines()[1:]
    assert header.startswith("| tokens | format | build, s |")
    assert rows[-1].count("**") >= 2 * 5
    assert "| float16 |" in rows[-1]


def test_gpu_is_predicted_by_its_constants(constants_file):
    constants = load_constants(constants_file)[0]
    shape = ModelShape("bundled", 576, 134_515_008, 106_203_456, 30, 576)
    found = script.predict(TextShape(1e6), shape, "float16", constants, "cuda")
    assert {"build_s", "gpu_mb", "disk_mb", "batch_ms", "one_ms"} <= found.keys() <= script.FIGURES.keys()
    assert found["disk_mb"] == pytest.approx(1156, rel=0.01)
