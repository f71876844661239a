"""The documentation: its commands and its Python run, its links lead somewhere, its generated page is current."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.models import FAMILIES, SEQ2SEQ_FAMILIES, pair_tokenizer, tiny
from helpers.pairs import pairs
from helpers.stores import documents
from helpers.thread_ray import ThreadRay
from knnlm.cli.app import run
from knnlm.cluster.build_worker import BuildWorker
from knnlm.lm import loading

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
SKIP = re.compile(r"skip=\S.*")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    """One fenced block, and the line of its first line."""

    line: int
    language: str
    info: str
    text: str


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, opened = [], None
    for number, line in enumerate(markdown.splitlines(), 1):
        if opened is not None and line.strip() == "```":
            start, language, info, lines = opened
            found.append(Block(start, language, info, "\n".join(lines)))
            opened = None
        elif opened is not None:
            opened[3].append(line)
        elif line.startswith("```"):
            language, _, info = line[3:].strip().partition(" ")
            opened = (number + 1, language, info.strip(), [])
    assert opened is None, f"the block that begins in line {opened[0] - 1} has no end"
    return found


def prose(markdown: str) -> str:
    """A page without its fenced blocks and without code in lines."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL))


def commands(text: str) -> list[list[str]]:
    """The knnlm commands of a block, with lines joined that end in a backslash; other programs are not run."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("knnlm ")]


@pytest.fixture
def workspace(tmp_path, model_folder, monkeypatch):
    """A folder as the pages take it for granted, where the bundled model is a tiny one."""
    (tmp_path / "docs").mkdir()
    for number, document in enumerate(documents(12)):
        (tmp_path / "docs" / f"{number}.txt").write_text(document.text)
    for name, start in (("held-out.txt", 50), ("valid.txt", 60)):
        (tmp_path / name).write_text(documents(1, words=100, start=start)[0].text)
    notes = [{"id": document.id, "text": document.text, "body": document.text} for document in documents(3, start=20)]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, notes)))
    letter = {"id": "n1", "text": "Acme asked for a quote.", "customer": "acme", "year": 2026}
    (tmp_path / "letters.jsonl").write_text(json.dumps(letter))
    for name, start in (
        ("pairs.tsv", 0),
        ("valid.tsv", 60),
        ("test.tsv", 90),
        ("general.tsv", 120),
        ("contracts.tsv", 150),
        ("contracts-valid.tsv", 180),
    ):
        lines = (f"{each.source_text}\t{each.text}\n" for each in pairs(12, start=start))
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "letter.de").write_text("".join(f"{each.source_text}\n" for each in pairs(3, start=90)))
    tiny("marian").save_pretrained(tmp_path / "opus-mt-de-en")
    pair_tokenizer("marian").save_pretrained(tmp_path / "opus-mt-de-en")
    monkeypatch.setattr(loading, "bundled_folder", lambda: model_folder)
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))
    # Workers as threads: those of Ray would open the real model.
    monkeypatch.setattr("knnlm.cluster.build.connected", ThreadRay(BuildWorker).connected)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run one command in this process; `< FILE` at its end is its standard input."""
    if "<" not in arguments:
        return run(arguments)
    where = arguments.index("<")
    with Path(arguments[where + 1]).open() as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", file)
        return run(arguments[:where])


@every_page
def test_commands_and_python_of_pages_run(page, workspace, monkeypatch, capfd):
    """In the order of the page, in one folder, and the Python with one set of names."""
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page.read_text()):
        where = f"{page.name}:{block.line}"
        if block.language not in ("sh", "python"):
            stray = [line for line in block.text.splitlines() if re.match(r"(\$ )?knnlm ", line)]
            assert not stray, f"{where}: write ```sh, so that it is tested: {stray[0]}"
            continue
        if block.info:
            assert SKIP.fullmatch(block.info), f"{where}: {block.info!r} is not skip=REASON"
            continue
        if block.language == "sh":
            for arguments in commands(block.text):
                code = run_command(arguments, monkeypatch)
                assert code == 0, f"{where}: knnlm {shlex.join(arguments)}\n{capfd.readouterr().err}"
        else:
            try:
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
            except Exception:
                pytest.fail(f"{where}\n{traceback.format_exc()}")


def test_cli_reference_page_is_current():
    check = [sys.executable, ROOT / "scripts" / "generate_cli.py", "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_page_of_plans_is_current():
    check = [sys.executable, ROOT / "scripts" / "generate_plans.py", "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def anchors(page: Path) -> set[str]:
    """What a link can point to within a page, as GitHub names it."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_links_are_valid(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert file.is_relative_to(ROOT), f"{page.name} links to {target}, which is outside the checkout"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}; {file.name} has {sorted(anchors(file))}"


def test_navigation_names_every_page():
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}


def test_page_on_key_layers_names_every_family():
    text = (ROOT / "docs" / "reference" / "models.md").read_text()
    named = re.findall(r"^\| `(\w+)`", text.partition("Families")[2], re.MULTILINE)
    assert sorted(named) == sorted({**FAMILIES, **SEQ2SEQ_FAMILIES})


@every_page
def test_python_in_pages_is_clean(page, tmp_path):
    """Format each block and lint them together; examples may print, and may import where they first need it."""
    python = [block.text for block in blocks(page.read_text()) if block.language == "python"]
    for number, text in enumerate(python):
        (tmp_path / f"{number}.py").write_text(text + "\n")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "page.py").write_text("\n\n".join(python) + "\n")
    settings = ["--quiet", "--no-cache", "--config", ROOT / "pyproject.toml"]
    for check in (
        ["format", "--check", *settings, *tmp_path.glob("*.py")],
        ["check", *settings, "--ignore", "T20,E402,I001", tmp_path / "all"],
    ):
        if python:
            result = subprocess.run([sys.executable, "-m", "ruff", *check], capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stdout + result.stderr


def test_checks_of_this_file_find_errors():
    page = "One `[a](b.md)`\n\n```sh skip=slow\nknnlm demo\n```\n\n```python\nx = 1\n```\n[c](d.md)\n"
    assert [(block.line, block.language, block.info) for block in blocks(page)] == [
        (4, "sh", "skip=slow"),
        (8, "python", ""),
    ]
    assert commands('make demo\nknnlm eval m \\\n  "a b" # why\n') == [["eval", "m", "a b"]]
    assert "b.md" not in prose(page)
    assert "knnlm" not in prose(page)
    assert "d.md" in prose(page)
    assert not SKIP.fullmatch("skip=")
    with pytest.raises(AssertionError, match="has no end"):
        blocks("```sh\nknnlm")
