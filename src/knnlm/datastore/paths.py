"""Names of the files and folders of a store."""

from __future__ import annotations

from pathlib import Path

CATALOG_FILE = "catalog.db"
# The catalog before it is complete, and what SQLite writes beside it.
PARTIAL_CATALOG_FILES = ("catalog.partial", "catalog.partial-journal", "catalog.partial-wal", "catalog.partial-shm")
MAP_FILE, CODEC_FILE = "map.safetensors", "codec.safetensors"
STAGING_FILE = "staging.log"
KEYS_FILE, VALUES_FILE, KEPT_FILE, COUNTS_FILE = "keys.npy", "values.npy", "kept.npy", "counts.npy"
UNENCODED_FILE = "unencoded.npy"  # float16 keys of a segment whose codec is not chosen yet
NGRAM_FOLDER = "ngram"
LOST_FOLDER = "lost"  # what a repair has taken out
GATES_FOLDER = "mixtures"
DECODER_FOLDER = "decoder"
ADAPTED_FILE = "adapted.json"


def segment_folder(path: Path, number: int) -> Path:
    """Return the folder of a segment."""
    return path / "segments" / f"{number:06d}"


def index_folder(path: Path, number: int) -> Path:
    """Return the folder of an index."""
    return path / "index" / f"{number:06d}"
