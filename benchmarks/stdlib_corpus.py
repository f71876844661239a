"""Make a corpus from the docstrings of Python's standard library.

    python benchmarks/stdlib_corpus.py FOLDER

A document contains the docstrings of one module. Whole packages go to train, valid or test by a hash of their name, so
that modules that quote each other stay together; documents are in the order of a hash, so that the first are mixed.
The source is parsed, never imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for name, text in sorted(modules(), key=lambda module: zlib.crc32(module[0].encode())):
        package = name.split(".")[0]
        part = {0: "test", 1: "valid"}.get(zlib.crc32(package.encode()) % 8, "train")
        parts[part].append(json.dumps({"id": name, "text": text}))
    for part, lines in parts.items():
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{part}: {len(lines)} modules, {sum(map(len, lines)):,} characters")


def modules() -> Iterator[tuple[str, str]]:
    """Yield (name, docstrings) of every module that has some."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if _EXCLUDED & set(parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        texts = [text for node in ast.walk(tree) if (text := docstring(node))]
        if sum(map(len, texts)) > 400:
            yield ".".join(parts), "\n\n".join(texts)


def docstring(node: ast.AST) -> str | None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node)
    return None


if __name__ == "__main__":
    main()
