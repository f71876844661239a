"""Choose documents of a memory by what the catalog knows of them. Knows nothing about their text or keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from knnlm.errors import ParameterError

FIELDS = ("id", "number", "rows", "sha256", "source")
_CONDITION = re.compile(r"\s*(\w+)\s*=\s?(.*)", re.DOTALL)
_NUMBERS = ("number", "rows")
_OTHER_SIGNS = re.compile(r"[\[?]")


@dataclass(frozen=True)
class Selection:
    """Which documents are meant: all that fit everything that is given, none where nothing is given."""

    document: str | None = None  # its id
    source: str | None = None  # a pattern, in which * stands for anything
    where: tuple[str, ...] = ()  # field=value

    @property
    def empty(self) -> bool:
        """Whether nothing was asked for."""
        return self.document is None and self.source is None and not self.where

    @property
    def text(self) -> str:
        """What was asked for, as a user would write it."""
        given = [("--document", self.document), ("--source", self.source), *(("--where", one) for one in self.where)]
        return " ".join(f"{name} {value}" for name, value in given if value is not None)

    def condition(self) -> tuple[str, list[Any]]:
        """Give the condition for SQL and its values."""
        parts, values = ["1"], list[Any]()
        for field, value in self._fields():
            parts.append(f"{field} = ?")
            values.append(value)
        if self.source is not None:
            several = "*" in self.source
            parts.append("source GLOB ?" if several else "source = ?")
            # SQLite knows more signs than the one that is ours, and names of files may have them.
            values.append(_OTHER_SIGNS.sub(r"[\g<0>]", self.source) if several else self.source)
        return " AND ".join(parts), values

    def _fields(self) -> list[tuple[str, str | int]]:
        found: list[tuple[str, str | int]] = [] if self.document is None else [("id", self.document)]
        for one in self.where:
            match = _CONDITION.fullmatch(one)
            if match is None or match[1] not in FIELDS:
                raise ParameterError(f"{one!r} is no condition: write field=value, with {', '.join(FIELDS)} as fields.")
            field, value = match[1], match[2]
            if field in _NUMBERS and not re.fullmatch(r"\d{1,18}", value):
                raise ParameterError(f"{one!r} is no condition: the {field} of a document is a number.")
            found.append((field, int(value) if field in _NUMBERS else value))
        return found
