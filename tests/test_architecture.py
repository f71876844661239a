"""The shape of the code: imports point one way, public names are what they say, heavy packages stay at home."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import knnlm

SOURCE = Path(knnlm.__file__).parent
# Each package may import from its own row and the rows above it.
ROWS = [
    {"errors", "io", "progress"},
    {"corpus", "lm", "index"},
    {"datastore"},
    {"ingest"},
    {"memories"},
    {"mixture"},
    {"evaluation", "generation", "training", "maintenance"},
    {"benchmark", "demo", "report", "server"},
    {"cli"},
]
# Imports between packages of one row; no others are allowed.
WITHIN = {
    ("io", "errors"),
    ("training", "evaluation"),
    ("benchmark", "demo"),
}
# Methods that forward to a higher package, and import it when they are called: (file, package).
UPWARD = {
    ("datastore/store.py", "ingest"),  # Datastore.add
    ("datastore/store.py", "maintenance"),  # Datastore.verify, Datastore.export
    ("mixture/mixture.py", "evaluation"),  # Mixture.evaluate, tune, record, explain
    ("mixture/mixture.py", "generation"),  # Mixture.generate
}
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}
INGEST = ROW_OF["ingest"]
FILES = sorted(file for file in SOURCE.rglob("*.py") if file.parent != SOURCE or not file.name.startswith("__"))


def imported(file: Path) -> set[str]:
    """The knnlm modules that a file imports, by their first name, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "knnlm":
                found.update([parts[1]] if len(parts) > 1 else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("knnlm."))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file):
    own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in ROW_OF, f"{own} has no place in the order of modules"
    for other in imported(file) - {own}:
        assert other in ROW_OF, f"{file} imports {other}, which is no module"
        below = ROW_OF[other] < ROW_OF[own] or (file.relative_to(SOURCE).as_posix(), other) in UPWARD
        assert below or (own, other) in WITHIN, f"{own} must not import {other}"


def test_only_one_file_imports_faiss():
    users = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name == "faiss" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "faiss")
    }
    assert users == {"index/faiss.py"}


# What the commands that only look at a store or change its catalog import.
LIGHT = {
    "documents": ("knnlm.cli.app", "knnlm.datastore.catalog", "knnlm.datastore.remove"),
    "remove": ("knnlm.cli.app", "knnlm.datastore.remove"),
    "info": ("knnlm.cli.app", "knnlm.datastore.store", "knnlm.datastore.indexes", "knnlm.mixture.loader"),
    "verify": ("knnlm.cli.app", "knnlm.maintenance.verify"),
}


@pytest.mark.parametrize("command", LIGHT)
def test_commands_that_run_no_model_do_not_import_what_runs_one(command):
    heavy = ["transformers", "torch._dynamo", "torch._inductor"]
    heavy += ["torch"] if command in ("documents", "remove") else []
    script = f"import sys, {', '.join(LIGHT[command])}\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "file", [file for file in FILES if ROW_OF.get(file.relative_to(SOURCE).parts[0].removesuffix(".py"), 0) < INGEST]
)
def test_below_ingest_only_lm_imports_transformers(file):
    if file.relative_to(SOURCE).parts[0] == "lm":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] in ("transformers", "tokenizers")]


def test_every_public_name_is_found_also_after_its_module_was_imported():

    for home in sorted(set(knnlm._HOMES.values())):
        import_module(f"knnlm.{home}")
    assert sorted(knnlm.__all__) == knnlm.__all__ == sorted(knnlm._HOMES)
    for name in knnlm.__all__:
        assert not inspect.ismodule(getattr(knnlm, name)), name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = knnlm.nonsense


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_module_has_a_docstring(file):
    assert ast.get_docstring(ast.parse(file.read_text()))


def test_the_errors_are_drawn_as_they_are():
    from knnlm import errors

    drawn = [line.split("──")[1].split()[0] for line in errors.__doc__.splitlines() if "──" in line]
    made = [name for name, value in vars(errors).items() if inspect.isclass(value) and name != "KnnlmError"]
    assert sorted(drawn) == sorted(made)
