"""What was found when a memory was looked through. Knows nothing about how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The parts of a memory.
CATALOG, SEGMENT, MAP, CODEC, INDEX, DERIVED = "catalog", "segment", "map", "codec", "index", "derived"
STUDENT = "student"
SUM = "sum"  # a part of the catalog that is not as it was written; which cell of it is not known


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    file: str  # within the memory
    what: str
    part: str = CATALOG
    segment: int | None = None  # whose documents it touches
    table: str | None = None  # the part of the catalog that is not as it was written

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class Verification:
    """All that was found."""

    memory: Path
    deep: bool
    format: int | None
    state: str | None
    documents: int
    tokens: int
    files: int
    bytes: int  # of the files that were looked at
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # what is not wrong, but worth knowing
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems
