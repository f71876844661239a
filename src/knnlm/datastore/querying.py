"""Choose documents of a memory by what the catalog knows of them. Knows nothing about their text or keys.

A field is one that every document has, or else one of the users' records; `fields.source` is always the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.fields import field_condition
from knnlm.errors import ParameterError

FIELDS = ("id", "number", "rows", "sha256", "source")
_CONDITION = re.compile(r"\s*([^=\s](?:[^=]*[^=\s])?)\s*=\s?(.*)", re.DOTALL)
_RECORD = "fields."
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

    def check(self, catalog: Catalog) -> None:
        """Refuse a field of users' records that no document has."""
        for given, name, _ in self._given():
            if name not in FIELDS and (others := catalog.other_fields(name.removeprefix(_RECORD))) is not None:
                known = ", ".join([*FIELDS, *others])
                raise ParameterError(f"{given!r} is no condition: no document has this field. Known are {known}.")

    def condition(self) -> tuple[str, list[Any]]:
        """Give the condition for SQL and its values."""
        parts, values = ["1"], list[Any]()
        if self.document is not None:
            parts.append("id = ?")
            values.append(self.document)
        for given, name, value in self._given():
            own = name in FIELDS
            part, wanted = _own(given, name, value) if own else field_condition(name.removeprefix(_RECORD), value)
            parts.append(part)
            values += wanted
        if self.source is not None:
            several = "*" in self.source
            parts.append("source GLOB ?" if several else "source = ?")
            # SQLite knows more signs than the one that is ours, and names of files may have them.
            values.append(_OTHER_SIGNS.sub(r"[\g<0>]", self.source) if several else self.source)
        return " AND ".join(parts), values

    def _given(self) -> Iterator[tuple[str, str, str]]:
        """Give each condition as it was written, its field and its value."""
        for one in self.where:
            match = _CONDITION.fullmatch(one)
            if match is None:
                raise ParameterError(f"{one!r} is no condition: write field=value.")
            yield one, match[1], match[2]


def _own(given: str, name: str, value: str) -> tuple[str, list[Any]]:
    """Compare what every document has."""
    if name not in _NUMBERS:
        return f"{name} = ?", [value]
    if not re.fullmatch(r"\d{1,18}", value):
        raise ParameterError(f"{given!r} is no condition: the {name} of a document is a number.")
    return f"{name} = ?", [int(value)]
