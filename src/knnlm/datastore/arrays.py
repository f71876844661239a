"""Which arrays a segment has, by what the catalog says. Knows nothing about reading them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from knnlm.datastore.catalog import SegmentRow
from knnlm.errors import DatastoreCorrupt

KEYS, VALUES, KEPT, COUNTS = "keys.npy", "values.npy", "kept.npy", "counts.npy"


def array_shapes(segment: SegmentRow, key_dtype: str, width: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Say of which type and shape the arrays are that a segment has."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        KEYS: (key_dtype, (segment.keys, width)),
        VALUES: ("int32", (segment.rows,)),
    }
    if segment.kept is not None:
        shapes[KEPT] = ("int32", (segment.keys,))
    if segment.counts_sha256 is not None:
        shapes[COUNTS] = ("float32", (segment.keys,))
    return shapes


def check_segments(path: Path, segments: Sequence[SegmentRow]) -> None:
    """The catalog must number segments and rows without gaps."""
    expected = 0
    for segment in segments:  # ids ascend; a repair leaves gaps between them
        if segment.first_row != expected or segment.rows < 1:
            raise DatastoreCorrupt(
                f"{path}: segment {segment.id} begins at row {segment.first_row} with "
                f"{segment.rows} rows; row {expected} was expected. Build the memory again."
            )
        if not 0 <= segment.keys <= segment.rows:
            raise DatastoreCorrupt(
                f"{path}: segment {segment.id} has {segment.keys} keys for {segment.rows} rows. Make the memory again."
            )
        if not (isinstance(segment.scale, float) and 0 < segment.scale < math.inf):
            raise DatastoreCorrupt(
                f"{path}: the keys of segment {segment.id} have the scale {segment.scale!r}. Make the memory again."
            )
        expected += segment.rows
