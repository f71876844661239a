"""One vocabulary and plain English: words that source, documentation and help do not use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import knnlm
from helpers.cli import knnlm as command
from knnlm.cli.app import app

ROOT = Path(__file__).parent.parent
SOURCE = Path(knnlm.__file__).parent
# The metaphors of earlier versions, and words that plain technical English does without.
BANNED = [
    *("tickets?", "wish(es)?", "kitchen", "ingredients?", "outbox", "ledger", "vouch\\w*", "strangers?", "desk"),
    *("judg(e|es|ed|ing)", "heard", "hearing", "spoken", "spoke", "voices?", "lessons?", "ballots?", "recollection"),
    *("whoever", "whomever", "nobody", "somebody", "anew", "for ever", "whence", "knows nothing"),
]
PATTERN = re.compile(rf"\b({'|'.join(BANNED)})\b|_({'|'.join(BANNED)})(?=_|\b)", re.IGNORECASE)
FILES = sorted(
    file
    for folder in (SOURCE, ROOT / "docs")
    for file in folder.rglob("*")
    if file.suffix in (".py", ".md", ".js", ".html", ".css", ".j2") and "__pycache__" not in file.parts
)
PAGES = [*FILES, *sorted(ROOT.glob("*.md"))]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT if file.is_relative_to(ROOT) else SOURCE))


@pytest.mark.parametrize("file", PAGES, ids=name)
def test_no_banned_word_is_used(file):
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    found = [f"{file}:{number}: {match[0]}" for number, line in lines for match in PATTERN.finditer(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".py"], ids=name)
def test_no_docstring_begins_with_give_or_say(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = (ast.get_docstring(node) or "").split(" ", 1)[0]
            assert first not in ("Give", "Gives", "Say", "Says", "Tell", "Tells"), f"{file}: {ast.get_docstring(node)}"


def test_help_has_no_banned_word(capfd):
    names = [one.name or one.callback.__name__ for one in app.registered_commands]
    for arguments in ([], *([one] for one in names)):
        code, out, _ = command(capfd, *arguments, "--help")
        assert code == 0
        assert not PATTERN.search(out), (arguments, PATTERN.search(out))


def test_no_module_is_named_by_a_gerund():
    # These are nouns of the field.
    gerunds = {file.stem for file in SOURCE.rglob("*.py") if file.stem.endswith("ing")}
    assert gerunds <= {
        "encoding",
        "batching",
        "staging",
        "metric_learning",
        "loading",
        "streaming",
        "sampling",
        "voting",
    }


def test_no_two_public_classes_share_a_name():
    homes: dict[str, list[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name(file))
    assert {public: files for public, files in homes.items() if len(files) > 1} == {}


def test_no_import_renames_a_constant():
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("knnlm"):
                renamed = [alias.name for alias in node.names if alias.asname not in (None, alias.name)]
                assert not renamed, f"{file}: {renamed}"


def test_pattern_finds_what_it_should():
    for text in ("a Ticket", "self._ticket = 1", "nobody reads it", "for ever", "_heard_"):
        assert PATTERN.search(text), text
    for text in ("encoding", "in the order of", "sticket", "judgement call"):
        assert not PATTERN.search(text), text
