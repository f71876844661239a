"""What a catalog says about how a memory's rows and keys are stored, checked. Knows nothing about arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knnlm.datastore.catalog import Catalog, SegmentRow
from knnlm.datastore.keymap import FILE as MAP
from knnlm.datastore.keymap import KeyMap
from knnlm.errors import DatastoreCorrupt


def check_segments(catalog: Catalog, segments: Sequence[SegmentRow]) -> None:
    """The catalog must number rows without gaps."""
    expected = 0
    for segment in segments:
        if segment.id < 0 or segment.first_row != expected or segment.rows < 1:
            raise DatastoreCorrupt(
                f"{catalog.path}: segment {segment.id} begins at row {segment.first_row} with "
                f"{segment.rows} rows; row {expected} was expected. Build the memory again."
            )
        if not 0 <= segment.keys <= segment.rows:
            raise DatastoreCorrupt(
                f"{catalog.path}: segment {segment.id} has {segment.keys} keys for {segment.rows} rows. "
                "Make the memory again."
            )
        if not (isinstance(segment.scale, float) and 0 < segment.scale < math.inf):
            raise DatastoreCorrupt(
                f"{catalog.path}: the keys of segment {segment.id} have the scale {segment.scale!r}. "
                "Make the memory again."
            )
        expected += segment.rows


def check_removed(catalog: Catalog, segments: Sequence[SegmentRow]) -> list[tuple[int, int]]:
    """Give the stretches of rows that are no longer there, (first, count): each within its segment, none twice."""
    ends = {segment.id: segment.first_row + segment.rows for segment in segments}
    gaps, end = [], 0
    for gone in catalog.removed():
        numbers = all(type(one) is int for one in (gone.segment, gone.first_row, gone.rows))
        if (
            not numbers
            or gone.rows < 0
            or gone.first_row < end
            or gone.first_row + gone.rows > ends.get(gone.segment, -1)
        ):
            raise DatastoreCorrupt(
                f"{catalog.path}: {gone.rows} rows from {gone.first_row} on were removed, which are not in segment "
                f"{gone.segment}. Build the memory again."
            )
        end = gone.first_row + gone.rows
        gaps.append((gone.first_row, gone.rows))
    return gaps


def stored_offset(catalog: Catalog) -> Tensor | None:
    """Give what was taken from every key before it was stored, None where nothing was."""
    offset = catalog.get("offset")
    if offset is None:
        return None
    wide = width(catalog)
    try:
        found = torch.tensor(offset, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    if found.shape != (wide,) or not found.isfinite().all():
        raise DatastoreCorrupt(
            f"{catalog.path}: the offset of the keys is not {wide} finite numbers. Build the memory again."
        )
    return found


def stored_map(catalog: Catalog) -> KeyMap | None:
    """Give the linear map that keys went through before they were stored, None where there is none."""
    given, wide = catalog.get("map"), width(catalog)
    if given is None:
        return None
    facts = given if isinstance(given, dict) else {}
    sha256, about = facts.get("sha256"), facts.get("facts")
    if not isinstance(sha256, str) or not isinstance(about, dict):
        raise DatastoreCorrupt(f"{catalog.path} does not say which map the keys went through. Make the memory again.")
    found = KeyMap.load(catalog.path.with_name(MAP), sha256=sha256, facts=about)
    if len(found.centre) != wide:
        raise DatastoreCorrupt(
            f"{catalog.path.with_name(MAP)} maps keys of width {len(found.centre)}, but those of the model have "
            f"{wide}. Make the memory again."
        )
    return found


def width(catalog: Catalog) -> int:
    """Give the width of the reader's hidden states."""
    found = fact(catalog, "model", dict).get("width")
    if not isinstance(found, int) or found < 1:
        raise DatastoreCorrupt(f"{catalog.path} does not say the width of the model. Build the memory again.")
    return found


def fact(catalog: Catalog, key: str, kind: type) -> Any:
    """Read a fact that every memory has."""
    value = catalog.get(key)
    if not isinstance(value, kind):
        raise DatastoreCorrupt(f"{catalog.path} does not say the memory's {key}. Build the memory again.")
    return value
