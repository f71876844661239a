"""The layout of the code: import order, public names, and where heavy packages are imported."""

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
    {"benchmark", "cluster", "demo", "integrations", "plan", "report", "server"},
    {"cli"},
]
# Imports between packages of one row; no others are allowed.
WITHIN = {
    ("io", "errors"),
    ("training", "evaluation"),
    ("benchmark", "demo"),
    ("plan", "benchmark"),
    ("plan", "demo"),
    ("cluster", "server"),
}
# Methods that forward to a higher package, and import it when they are called: (file, package).
UPWARD = {
    ("datastore/store.py", "ingest"),  # Datastore.add
    ("datastore/store.py", "maintenance"),  # Datastore.verify, Datastore.export
    ("mixture/mixture.py", "evaluation"),  # Mixture.evaluate, tune, record, explain
    ("mixture/mixture.py", "generation"),  # Mixture.generate, translate
}
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}
# Inside a package, each module may import those before it.
ORDER = {
    "lm": "cuda_graph detokenizer fingerprint adapters hooks layers windows loading key_layers causal shared seq2seq "
    "speech compile",
    "index": "base bm25 packed exact gpu.deferred gpu.keys gpu.kernels gpu.search gpu.streaming faiss rerank "
    "composite blocks.kernels blocks.file blocks.index blocks.build validation factory",
    "datastore": "validation codecs schema manifest digests integrity catalog sharded_catalog segments live_numbers "
    "staging locks remote remove store encoder suffix_array rewrite indexes compact shards",
    "ingest": "pipeline segment_builder shards build",
    "memories": "base decoder ngram ngram_cache output voting cache subset automaton knn",
    "mixture": (
        "em readers evidence gate online weights layer repetition support source_domain spec saved loader mixture"
    ),
    "evaluation": "evaluate continuations overlap samples explain quality odds trace sweep support tune",
    "generation": "draft speculation model_graph cache step_graph student causal chat seq2seq",
    "training": "initial_model prune trainer data metric_learning output_matrix teacher "
    "model_teacher packed_attention head_loss decoder_pass lora selection decoder_trainer selecting_trainer decoder "
    "adapt",
    "maintenance": "export import_ merge verify repair",
    "cluster": "connection build_places build_worker build_record build search_actor search replicas",
    "integrations": "lm_eval",
    "plan": "constants sizes cost tail layout model text plot system measure_gpu measure",
    "report": "study search context html plots studies.breakdown studies.gains studies.layers studies.memories "
    "studies.output studies.selection studies.store studies.votes studies.compression report",
    "server": "limits schemas documents engine.requests engine.batching engine.predict engine.history engine.sequence "
    "engine.batch_drafts engine.scheduler engine.translator metrics responses auth service translation routes app "
    "replica endpoint run",
    "cli": "output options make use train maintain serve chat start plan app",
}
# Functions that forward to a later module of their package, and import it when they are called.
FORWARD = {
    ("index.exact", "index.gpu.streaming"),
    ("datastore.compact", "datastore.shards"),
    ("datastore.remove", "datastore.shards"),
    ("datastore.store", "datastore.compact"),
    ("datastore.store", "datastore.indexes"),
    ("datastore.store", "datastore.rewrite"),
    ("evaluation.trace", "evaluation.sweep"),
    ("evaluation.trace", "evaluation.tune"),
}
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


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts)


MODULES = {module_of(file): file for file in FILES if file.name != "__init__.py"}


def imported_modules(file: Path) -> set[str]:
    """The modules of knnlm that a file imports, except those for type checking only."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only and (node.module or "").startswith("knnlm"):
            package = (node.module or "")[len("knnlm.") :]
            named = {f"{package}.{alias.name}".strip(".") for alias in node.names}
            found |= {name if name in MODULES else package for name in named}
    return found & MODULES.keys()


@pytest.mark.parametrize("package", ORDER)
def test_modules_of_a_package_import_in_one_direction(package):
    order = [f"{package}.{name}" for name in ORDER[package].split()]
    assert sorted(order) == sorted(name for name in MODULES if name.startswith(f"{package}."))
    for number, name in enumerate(order):
        own = {other for other in imported_modules(MODULES[name]) if other.startswith(f"{package}.")}
        later = {other for other in own - set(order[:number]) if (name, other) not in FORWARD}
        assert later <= {name}, f"{name} imports {later}, which come later"


def test_small_files_have_several_importers():
    users: dict[str, set[str]] = {name: set() for name in MODULES}
    for file in SOURCE.rglob("*.py"):
        for name in imported_modules(file) - {module_of(file)}:
            users[name].add(module_of(file))
    small = {
        name: users[name]
        for name, file in MODULES.items()
        if len(file.read_text().splitlines()) < 60 and len(users[name]) == 1
    }
    # The self-check is a thing with a name and tests of its own.
    assert small.keys() <= {"index.validation"}, f"below 60 lines with one importer: {small}"


@pytest.mark.parametrize(
    ("package", "user"),
    [
        ("faiss", "index/faiss.py"),
        ("fsspec", "datastore/remote.py"),
        ("lm_eval", "integrations/lm_eval.py"),
    ],
    ids=["faiss", "fsspec", "lm_eval"],
)
def test_only_one_file_imports_a_package(package, user):
    users = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == package for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package)
    }
    assert users == {user}


def test_only_one_package_imports_ray():
    users = {
        file.relative_to(SOURCE).parts[0]
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "ray" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray")
    }
    assert users == {"cluster"}


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


def test_every_error_is_public_and_in_the_tree_of_the_docstring():
    from knnlm import errors

    drawn = [line.split("──")[1].split()[0] for line in errors.__doc__.splitlines() if "──" in line]
    made = [name for name, value in vars(errors).items() if inspect.isclass(value) and name != "KnnlmError"]
    assert sorted(drawn) == sorted(made)
    assert {*made, "KnnlmError"} <= set(knnlm.__all__)
    assert knnlm.errors is errors
