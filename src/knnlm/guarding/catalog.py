"""Check what a catalog says, as far as it can be without looking at a file. Knows nothing about arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from knnlm.datastore.arrays import VOCABULARY, segment_faults
from knnlm.datastore.catalog import FILE, Catalog, SegmentRow
from knnlm.datastore.codec import FILE as CODEC_FILE
from knnlm.datastore.codec import Codec
from knnlm.datastore.keymap import FILE as MAP_FILE
from knnlm.datastore.segment import KEY_DTYPES
from knnlm.datastore.stored import stored_codec, stored_map
from knnlm.errors import DatastoreError
from knnlm.guarding.findings import CODEC, MAP, SEGMENT, Problem

STATES = ("building", "complete")
Ranges = dict[int, list[tuple[int, int]]]  # segment → (first row, rows)


@dataclass(frozen=True)
class Facts:
    """What the files are checked against; None where the catalog does not say."""

    format: int | None = None
    state: str | None = None
    codec: Codec | None = None  # what keys are stored by
    waiting: bool = False  # whether they still wait to be
    vocab_size: int | None = None


def read_facts(catalog: Catalog) -> tuple[Facts, list[Problem]]:
    """Read the facts that every memory has, and say which are not there or of no sense."""
    problems: list[Problem] = []

    def expect(name: str, value: Any, fine: bool) -> Any:
        if not fine:
            problems.append(Problem(FILE, f"the {name} of the memory is {_short(value)}"))
        return value if fine else None

    model = expect("model", model := catalog.get("model"), isinstance(model, dict)) or {}
    width = expect("model's width", found := model.get("width"), _whole(found, 1, 1 << 24))
    vocab_size = expect("model's vocabulary", found := model.get("vocab_size"), _whole(found, 1, VOCABULARY))
    expect("model's name", found := model.get("name"), isinstance(found, str))
    window = catalog.get("window")
    sizes = window if isinstance(window, dict) else {}
    expect("window", window, all(_whole(sizes.get(name), 1, 1 << 31) for name in ("context", "stride")))
    state = expect("state", found := catalog.get("state"), found in STATES)
    precise = isinstance(found := catalog.get("key_dtype"), str) and (found in KEY_DTYPES or _coded(catalog))
    expect("precision of keys", found, precise)
    offset = catalog.get("offset")
    expect("offset", offset, offset is None or _is_vector(offset, width))
    codec = None
    if width is not None and precise:
        codec, wrong = _read_codec(catalog, width)
        problems += wrong
    waiting = _coded(catalog) and catalog.get("codec") is None
    return Facts(catalog.get("format"), state, codec, waiting, vocab_size), problems


def _coded(catalog: Catalog) -> bool:
    """Whether keys are stored otherwise than as numbers, or are to be."""
    return catalog.get("codec") is not None or catalog.get("keys") is not None


def _read_codec(catalog: Catalog, width: int) -> tuple[Codec | None, list[Problem]]:
    """Read what lies beside the catalog and says what keys are: their map and their codec."""
    file, part = MAP_FILE, MAP
    try:
        key_map = stored_map(catalog, width)
        file, part = CODEC_FILE, CODEC
        return stored_codec(catalog, width if key_map is None else key_map.width), []
    except DatastoreError as error:
        return None, [Problem(file, str(error).removeprefix(str(catalog.path.with_name(file))).lstrip(": "), part)]


def check_segments(segments: Sequence[SegmentRow]) -> list[Problem]:
    """Rows must be numbered without gaps."""
    return [
        Problem(FILE, what, SEGMENT, segment.id) if its_own else Problem(FILE, what)
        for segment, what, its_own in segment_faults(segments)
    ]


def removed_rows(catalog: Catalog) -> Ranges:
    """Give the rows of removed documents by segment."""
    ranges: Ranges = {}
    for row in catalog.removed():
        ranges.setdefault(row.segment, []).append((row.first_row, row.rows))
    return ranges


def check_documents(catalog: Catalog, segments: Sequence[SegmentRow], removed: Ranges) -> list[Problem]:
    """Documents, and what was removed, must fill their segments: nothing twice, nothing left over."""
    problems, counted = [], 0
    for segment in segments:
        documents = catalog.documents_of(segment.id)
        counted += len(documents)
        ranges = [(document.first_row, document.rows, f"document {document.id!r}") for document in documents]
        ranges += [(first, rows, "what was removed") for first, rows in removed.get(segment.id, [])]
        expected, end = segment.first_row, segment.first_row + segment.rows
        for first, rows, name in sorted(ranges):
            if first != expected or first + rows > end:
                what = f"{name} has rows {first:,} to {first + rows - 1:,}; row {expected:,} was expected"
                problems.append(Problem(FILE, f"segment {segment.id}: {what}", SEGMENT, segment.id))
                break
            expected = first + rows
        else:
            if expected != end:
                what = f"rows {expected:,} to {end - 1:,} belong to no document"
                problems.append(Problem(FILE, f"segment {segment.id}: {what}", SEGMENT, segment.id))
    known = {segment.id for segment in segments}
    if lost := sum(rows for segment, ranges in removed.items() if segment not in known for _, rows in ranges):
        problems.append(Problem(FILE, f"{lost:,} removed rows are of segments that the catalog does not have"))
    if counted != catalog.document_count():
        missing = catalog.document_count() - counted
        problems.append(Problem(FILE, f"{missing:,} documents are of segments that the catalog does not have"))
    return problems


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_vector(value: Any, width: int | None) -> bool:
    return (
        isinstance(value, list)
        and (width is None or len(value) == width)
        and all(isinstance(number, (int, float)) and math.isfinite(number) for number in value)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
