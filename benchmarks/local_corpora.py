"""Make a corpus from text that lies on most machines.

    python benchmarks/local_corpora.py FOLDER                       # docstrings of Python's standard library
    python benchmarks/local_corpora.py FOLDER --kind source         # its source code
    python benchmarks/local_corpora.py FOLDER --kind changelogs     # of the installed Debian packages
    python benchmarks/local_corpora.py FOLDER --kind kernel-docs    # of the Debian package linux-doc-6.1

A document contains the docstrings or the code of one module, the first 20,000 characters of a package's changelog, or
one page. Whole packages, or parts of the kernel's documentation, go to train, valid or test by a hash of their name, so
that texts that quote each other stay together; documents are in the order of a hash, so that the first are mixed. Code
is parsed, never imported.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
_DOCUMENTATION = Path("/usr/share/doc")
_MIN_CHARACTERS = 400
_CHANGELOG_CHARACTERS = 20_000  # its latest entries

Texts = Iterator[tuple[str, str, str]]  # package, name of the document, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="docstrings")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for package, name, text in sorted(KINDS[options.kind](), key=lambda found: zlib.crc32(found[1].encode())):
        if len(text) > _MIN_CHARACTERS:
            part = {0: "test", 1: "valid"}.get(zlib.crc32(package.encode()) % 8, "train")
            parts[part].append(json.dumps({"id": name, "text": text}))
    if not parts["train"]:
        raise SystemExit(f"There are no {options.kind} on this machine.")
    for part, lines in parts.items():
        (options.folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{part}: {len(lines)} documents, {sum(map(len, lines)):,} characters")


def modules() -> Iterator[tuple[tuple[str, ...], bytes, ast.Module]]:
    """Yield the name, the code and the syntax tree of every module of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if _EXCLUDED & set(parts):
            continue
        try:
            yield parts, file.read_bytes(), ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue


def docstrings() -> Texts:
    """Yield the docstrings of modules; those of a module below the limit of characters are left out by their sum."""
    for parts, _, tree in modules():
        texts = [text for node in ast.walk(tree) if (text := docstring(node))]
        if sum(map(len, texts)) > _MIN_CHARACTERS:
            yield parts[0], ".".join(parts), "\n\n".join(texts)


def docstring(node: ast.AST) -> str | None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node)
    return None


def source() -> Texts:
    """Yield the code of modules."""
    for parts, code, _ in modules():
        yield parts[0], ".".join(parts), code.decode("utf-8", "replace")


def changelogs() -> Texts:
    """Yield the latest entries of the changelogs of Debian packages, one for each source package."""
    known = set()
    for file in sorted(_DOCUMENTATION.glob("*/changelog.Debian.gz")):
        text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")[:_CHANGELOG_CHARACTERS]
        name = text.split(" ", 1)[0]  # of the source package, with which every entry begins
        if name not in known:
            known.add(name)
            yield name, name, text


def kernel_docs() -> Texts:
    """Yield the pages of the kernel's documentation."""
    for root in sorted(_DOCUMENTATION.glob("linux-doc-*/Documentation")):
        for file in sorted(root.rglob("*.rst*")):
            data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            parts = file.relative_to(root).parts
            if parts[0] != "translations":
                yield "/".join(parts[:2]), "/".join(parts), data.decode("utf-8", "replace")


KINDS: dict[str, Callable[[], Texts]] = {
    "docstrings": docstrings,
    "source": source,
    "changelogs": changelogs,
    "kernel-docs": kernel_docs,
}


if __name__ == "__main__":
    main()
