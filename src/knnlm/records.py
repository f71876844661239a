"""A document, and what its record says besides the text. Knows nothing about files or tokens.

Fields are there to choose documents by: `customer`, `year`. So they are single and short; whatever else a record has
is not kept, since nobody would expect a second text of it in a memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from knnlm.errors import CorpusError

Scalar: TypeAlias = str | int | float | bool | None
Fields: TypeAlias = Mapping[str, Scalar]

LONGEST = 256  # characters in a name or a value
MOST = 64  # fields of a document
LARGEST = 1 << 63  # whole numbers are smaller


@dataclass(frozen=True)
class Document:
    """A text, its name, where a person finds it, and what else its record says."""

    id: str
    source: str
    text: str
    fields: Fields = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.fields and (wrong := fault(self.fields)) is not None:
            raise CorpusError(f"{self.source}: {wrong}")


def fields_of(record: Mapping[str, Any], *, but: Collection[str]) -> dict[str, Scalar]:
    """Give what can be a field of a record, the first ones where there are very many."""
    found: dict[str, Scalar] = {}
    for name, value in record.items():
        if name not in but and len(found) < MOST and _is_name(name) and _is_scalar(value):
            found[_sayable(name)] = _sayable(value) if isinstance(value, str) else value
    return found


def fault(fields: Any) -> str | None:
    """Say what is wrong with fields that somebody gives; None where nothing is."""
    if not isinstance(fields, Mapping):
        return f"fields are not a mapping but {type(fields).__name__}; give name and value of each"
    if len(fields) > MOST:
        return f"{len(fields)} fields, more than {MOST}; leave some out"
    for name, value in fields.items():
        if not _is_name(name) or _sayable(name) != name:
            return f"{str(name)[:40]!r} is no name of a field; give a text of 1 to {LONGEST} characters"
        if not _is_scalar(value) or (isinstance(value, str) and _sayable(value) != value):
            may = f"a finite number, a truth value, or a text of at most {LONGEST} characters"
            return f"the field {name[:40]!r} cannot be kept ({type(value).__name__}); give {may}"
    return None


def written(value: Scalar | Fields) -> str:
    """Write a value, or all fields, as JSON in just one way; so a number is told from the same digits in a text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def ways_to_write(text: str) -> list[str]:
    """Give all values, as JSON, that a person may mean by a text: values compare as they are read."""
    # Other JSON begins otherwise, so that a text in quotation marks is not taken for what is between them.
    return [written(text)] if text.startswith('"') else [written(text), text]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= LONGEST


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and -LARGEST <= value < LARGEST)


def _sayable(text: str) -> str:
    """Replace what UTF-8 cannot say: JSON may have half a character."""
    return text.encode("utf-8", "replace").decode()
