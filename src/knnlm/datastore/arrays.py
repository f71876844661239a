"""Where the files of a memory lie, and what the catalog says is in them. Knows nothing about reading them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import IndexRow, SegmentRow
from knnlm.datastore.codec import Codec, Plain
from knnlm.datastore.segment import KEY_DTYPES
from knnlm.errors import DatastoreCorrupt
from knnlm.index import is_blocks

KEYS, VALUES, KEPT, COUNTS = "keys.npy", "values.npy", "kept.npy", "counts.npy"
INDEX, BLOCKS = "index.faiss", "index.safetensors"
LOST = "lost"  # the folder of what a repair has taken out
VOCABULARY = 1 << 22  # tokens that a model may have: tables of that length are made, whoever wrote the catalog


def segment_folder(path: Path, number: int) -> Path:
    """Say where a segment lies."""
    return path / "segments" / f"{number:06d}"


def index_folder(path: Path, number: int) -> Path:
    """Say where an index lies."""
    return path / "index" / f"{number:06d}"


def index_file(path: Path, row: IndexRow) -> Path:
    """Say where the file of an index lies."""
    return index_folder(path, row.id) / (BLOCKS if is_blocks(row.spec) else INDEX)


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


def array_sums(segment: SegmentRow) -> dict[str, str | None]:
    """Say which SHA-256 the arrays have that a segment has."""
    sums = (segment.keys_sha256, segment.values_sha256, segment.kept_sha256, segment.counts_sha256)
    return dict(zip((KEYS, VALUES, KEPT, COUNTS), sums, strict=True))


def segment_faults(segments: Sequence[SegmentRow]) -> Iterator[tuple[SegmentRow, str, bool]]:
    """Say what is wrong with the numbers of segments, and whether it is with that one only: rows go without gaps."""
    expected = 0
    for segment in segments:
        if segment.first_row != expected or segment.rows < 1:
            what = f"begins at row {segment.first_row:,} with {segment.rows:,} rows; row {expected:,} was expected"
            yield segment, f"segment {segment.id} {what}", False
        if not 0 <= segment.keys <= segment.rows:
            yield segment, f"segment {segment.id} has {segment.keys:,} keys for {segment.rows:,} rows", False
        if not (isinstance(segment.scale, float) and 0 < segment.scale < math.inf):
            yield segment, f"the keys of segment {segment.id} have the scale {repr(segment.scale)[:60]}", True
        expected = segment.first_row + segment.rows


def check_segments(path: Path, segments: Sequence[SegmentRow]) -> None:
    """Refuse segments whose numbers cannot be."""
    for _, what, _ in segment_faults(segments):
        raise DatastoreCorrupt(f"{path}: {what}. Make the memory again, or run: knnlm repair {path.parent}")


def check_facts(path: Path, model: dict[str, Any], window: dict[str, Any], codec: Codec) -> None:
    """Refuse facts that would be stumbled over later."""
    sound = {
        "model's name": isinstance(model.get("name"), str),
        "model's vocabulary": isinstance(size := model.get("vocab_size"), int) and 0 < size <= VOCABULARY,
        "window": all(isinstance(window.get(name), int) and window[name] > 0 for name in ("context", "stride")),
        "precision of the keys": not isinstance(codec, Plain) or codec.dtype in KEY_DTYPES,
    }
    if wrong := [name for name, fine in sound.items() if not fine]:
        raise DatastoreCorrupt(f"{path} does not say the {wrong[0]} properly. Build the memory again.")
