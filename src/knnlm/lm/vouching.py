"""Compare the files of a model that we trained with the checksums that lie beside them. Knows nothing about the model.

DIR/knnlm.sha256 is what `sha256sum` writes and `sha256sum -c` reads: a SHA-256 and a name on each line. A model
without such a file is loaded as it is: it is somebody else's.
"""

from __future__ import annotations

import re
from pathlib import Path

from knnlm.checksums import checksum
from knnlm.errors import ModelError

FILE = "knnlm.sha256"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")
_MOST = 1 << 20  # bytes of the list: read whole, so one that only claims to be long must not fill the memory


def write_sums(folder: Path, *, without: str) -> None:
    """List the files of a folder, but for one that may change later."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (without, FILE))
    lines = [f"{checksum(file)}  {file.name}\n" for file in files]
    (folder / FILE).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Refuse a folder of which a file is not as it was written."""
    for name, what in damaged_files(folder) or []:
        raise ModelError(
            f"{folder / name} {what}. Restore it from a copy, or train the model again; if you changed it yourself, "
            f"remove {folder / FILE}."
        )


def damaged_files(folder: Path) -> list[tuple[str, str]] | None:
    """Name the files that are not as they were written, and say what is wrong; None where there is no list of them."""
    if not (folder / FILE).exists():
        return None
    found = []
    for name, sha256 in _listed(folder / FILE).items():
        try:
            if not (folder / name).is_file():
                found.append((name, "is missing"))
            elif checksum(folder / name) != sha256:
                found.append((name, "is not as it was written: its SHA-256 is another"))
        except OSError as error:
            found.append((name, f"cannot be read ({error.strerror or error})"))
    return found


def _listed(file: Path) -> dict[str, str]:
    """Read the list; of one that cannot be read, it is itself what is not as it was."""
    try:
        if file.is_file() and file.stat().st_size <= _MOST:
            found = [_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if found and None not in found:
                return {match[2]: match[1] for match in found if match is not None}
    except (OSError, UnicodeDecodeError):
        pass
    return {FILE: ""}
