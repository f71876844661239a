"""Constraints on an answer that a program can check, in the style of IFEval."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any


def words(text: str) -> int:
    """Return the number of words."""
    return len(text.split())


def lines(text: str) -> int:
    """Return the number of lines that are not empty."""
    return sum(bool(line.strip()) for line in text.splitlines())


def bullets(text: str) -> int:
    """Return the number of lines that begin with a dash, an asterisk or a bullet."""
    return sum(bool(re.match(r"\s*[-*•]\s+\S", line)) for line in text.splitlines())


def sentences(text: str) -> int:
    """Return the number of sentences; the last one need not have an end."""
    return len([piece for piece in re.split(r"(?<=[.!?])\s+", text.strip()) if re.search(r"\w", piece)])


def contains(text: str, word: str) -> bool:
    """Whether a text contains a word, in any case."""
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def ends_with(text: str, end: str) -> bool:
    """Whether a text ends with some words, in any case and before any punctuation, or with a punctuation mark."""
    text = text.strip()
    return text.endswith(end) if not end[-1].isalnum() else text.rstrip(".!?\"'” ").lower().endswith(end.lower())


def is_json(text: str) -> bool:
    """Whether a text is a JSON object or list, possibly in a fenced block."""
    fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", text, re.DOTALL)
    try:
        return isinstance(json.loads(fenced[1] if fenced else text), (dict, list))
    except ValueError:
        return False


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "words_at_most": lambda text, count: 0 < words(text) <= count,
    "words_at_least": lambda text, count: words(text) >= count,
    "lines": lambda text, count: lines(text) == count,
    "bullets": lambda text, count: bullets(text) == count,
    "sentences": lambda text, count: sentences(text) == count,
    "lower_case": lambda text, _: text == text.lower() != text.upper(),
    "upper_case": lambda text, _: text == text.upper() != text.lower(),
    "contains": contains,
    "excludes": lambda text, word: bool(text.strip()) and not contains(text, word),
    "starts_with": lambda text, start: text.strip().lower().startswith(str(start).lower()),
    "ends_with": ends_with,
    "json": lambda text, _: is_json(text),
    "no_commas": lambda text, _: bool(text.strip()) and "," not in text,
}


def check(text: str, constraints: Mapping[str, Any]) -> list[bool]:
    """Return for each constraint whether an answer meets it."""
    return [CHECKS[name](text, value) for name, value in constraints.items()]
