"""Write a generated page of the documentation, or check that it is current."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, made: str, arguments: list[str], command: str) -> int:
    """Write the page, or with --check compare it; return the exit code. `command` writes the page again."""
    if arguments == ["--check"]:
        if path.exists() and path.read_text(encoding="utf-8") == made:
            return 0
        sys.stderr.write(f"{path} is not current. Run: {command}\n")
        return 1
    if arguments:
        sys.stderr.write(f"Unknown arguments {' '.join(arguments)}: give none, or --check.\n")
        return 2
    path.write_text(made, encoding="utf-8")
    return 0
