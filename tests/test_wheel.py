"""The built wheel works outside the checkout: package data, types marker, entry point."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the tree, so that nothing is left in it."""
    source = tmp_path_factory.mktemp("source") / "knnlm"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".venv", ".git", ".*_cache", ".hypothesis", "__pycache__")
    )
    out = source.parent / "dist"
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_wheel_contains_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "knnlm/py.typed" in names
    assert all(name.startswith(("knnlm/", "knnlm-")) for name in names)
    source = {file.relative_to(ROOT / "src").as_posix() for file in (ROOT / "src" / "knnlm").rglob("*.py")}
    assert source == {name for name in names if name.endswith(".py")}


def test_wheel_works_outside_the_checkout(wheel, model_folder, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    installed = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home), "platbase": str(home)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    # Dependencies come from the environment of the tests. A plain path runs no .pth file there, so the editable
    # install of the checkout stays out of sight.
    here = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (installed / "dependencies.pth").write_text("\n".join(here))
    entry = zipfile.ZipFile(wheel).read(
        next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    )
    assert b"knnlm = knnlm.cli:main" in entry
    assert b"[lm_eval.models]\nknnlm = knnlm.integrations.lm_eval:KnnLM" in entry
    python = home / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import knnlm; print(knnlm.__file__)"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert where.stdout.startswith(str(installed))
    (tmp_path / "notes.txt").write_text("The memory of a model is a list of contexts. " * 20)
    run = [python, "-c", "from knnlm.cli import main; main()"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    build = [*run, "build", "notes.txt", "--out", "docs.store", "--model", model_folder, "--json"]
    made = subprocess.run(build, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert json.loads(made.stdout)["documents"] == 1
    evaluation = [*run, "eval", "docs.store", "notes.txt", "--json"]
    found = subprocess.run(evaluation, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    figures = json.loads(found.stdout)
    assert figures["perplexity"] < figures["base_perplexity"]
