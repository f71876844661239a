"""Where the files of a memory lie, and what the catalog says is in them. Knows nothing about reading them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import SegmentRow
from knnlm.datastore.codec import Codec, Plain
from knnlm.datastore.segment import KEY_DTYPES
from knnlm.errors import DatastoreCorrupt

KEYS, VALUES, KEPT, COUNTS = "keys.npy", "values.npy", "kept.npy", "counts.npy"
INDEX = "index.faiss"


def segment_folder(path: Path, number: int) -> Path:
    """Say where a segment lies."""
    return path / "segments" / f"{number:06d}"


def index_folder(path: Path, number: int) -> Path:
    """Say where an index lies."""
    return path / "index" / f"{number:06d}"


def index_file(path: Path, number: int) -> Path:
    """Say where the file of an index lies."""
    return index_folder(path, number) / INDEX


def array_shapes(segment: SegmentRow, codec: Codec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Say of which type and shape the arrays are that a segment has."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        KEYS: (codec.dtype, (segment.keys, codec.columns)),
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


def check_facts(path: Path, model: dict[str, Any], window: dict[str, Any], codec: Codec) -> None:
    """Refuse facts that would be stumbled over later."""
    sound = {
        "model's name": isinstance(model.get("name"), str),
        "model's vocabulary": isinstance(size := model.get("vocab_size"), int) and 0 < size < 1 << 31,
        "window": all(isinstance(window.get(name), int) and window[name] > 0 for name in ("context", "stride")),
        "precision of the keys": not isinstance(codec, Plain) or codec.dtype in KEY_DTYPES,
    }
    if wrong := [name for name, fine in sound.items() if not fine]:
        raise DatastoreCorrupt(f"{path} does not say the {wrong[0]} properly. Build the memory again.")
