"""Hash files. Knows nothing about what they hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PIECE = 1 << 24  # bytes at a time


def checksum(path: Path) -> str:
    """Give the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
