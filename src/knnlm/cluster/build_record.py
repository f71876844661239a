"""The driver's record of a build on Ray: how the text was split, and which shards are finished.

store/
  shards/          until all shards are finished, this is all there is
    build.json     the record, replaced atomically; it is removed when the shards are joined
    writer.lock    held by the driver
    0001/          an ordinary store of the first part of the text
    0002/

A shard is finished when the record lists it. A driver that is killed leaves a record that the same command continues.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from knnlm.cluster.build_places import ShardPlaces
from knnlm.datastore.locks import WRITER_LOCK
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import CATALOG_FILE, RECORD_FILE, SHARDS_FOLDER
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.ingest.shards import TextSizes
from knnlm.io import atomic_write

INDEX_SETTINGS = ("index", "metric")  # which may change

_VERSION = 1


@dataclass(frozen=True)
class BuildRecord:
    """The state of a build on disk."""

    settings: dict[str, Any]  # that a resumed build must have too
    shards: int
    text: str  # digest of all documents
    done: tuple[int, ...] = ()  # numbers of finished shards, from 1 on
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: bool = False  # whether workers may have built shards elsewhere than in the folder of the record

    @property
    def pending(self) -> list[int]:
        """The shards that are not finished, in order."""
        return [number for number in range(1, self.shards + 1) if number not in self.done]

    def finished(self, number: int) -> BuildRecord:
        """Return the record with one more finished shard."""
        return replace(self, done=(*self.done, number))


def check_out(out: Path) -> None:
    """Raise unless a build can begin in a folder, or continue there."""
    if out.exists() and not out.is_dir():
        raise DatastoreError(f"{out} is a file. Choose another --out.")
    if is_sharded(out):
        raise DatastoreError(f"{out} is a finished store already. Choose another --out, or remove it first.")
    folder = out / SHARDS_FOLDER
    if not out.exists() or (folder / RECORD_FILE).exists():
        return
    if (out / CATALOG_FILE).exists():
        raise DatastoreError(f"{out} is a store that was begun without --ray. Choose another --out, or remove it.")
    entries = [entry.name for entry in out.iterdir() if entry.name != SHARDS_FOLDER]
    if folder.is_dir():
        ours = {WRITER_LOCK, Path(RECORD_FILE).with_suffix(".partial").name}
        entries += [f"{SHARDS_FOLDER}/{entry.name}" for entry in folder.iterdir() if entry.name not in ours]
    if entries:
        raise DatastoreError(
            f"{out} is not empty (it contains {min(entries)}) and is not a store. Choose another --out."
        )


def open_record(
    places: ShardPlaces, settings: Mapping[str, Any], shards: int | None, default_shards: int
) -> BuildRecord:
    """Return the record in a folder after comparing its settings, or a new one, whose text is not yet known."""
    present = json.loads(json.dumps(dict(settings), default=str))  # as they are read
    folder = Path(places.folder)
    stored = _read(folder)
    if stored is None or not is_begun(folder, stored):
        return BuildRecord(present, default_shards if shards is None else shards, "")
    wanted = present if shards is None else {**present, "shards": shards}
    before = {**stored.settings, "shards": stored.shards}
    for name, value in wanted.items():
        # An index of a shard at a URL cannot be added there.
        if (name not in INDEX_SETTINGS or places.url is not None) and before.get(name) != value:
            raise DatastoreError(
                f"{folder.parent} is an unfinished build with another {name.replace('_', ' ')} ({before.get(name)}, "
                f"now {value}). Finish it with the same options, or remove it."
            )
    # A folder that was removed by hand is built again; finished shards only get another index, if that is wanted.
    done = [number for number in stored.done if places.exists(number)]
    if any(before.get(name) != present[name] for name in INDEX_SETTINGS):
        done = []
    return replace(stored, settings=present, done=tuple(done))


def is_begun(folder: Path, record: BuildRecord | None = None) -> bool:
    """Whether anything was built."""
    if any(folder.glob(f"*/{CATALOG_FILE}")):
        return True
    record = _read(folder) if record is None else record
    return record is not None and record.begun


def with_text(record: BuildRecord, folder: Path, text: TextSizes, *, fixed: bool) -> BuildRecord:
    """Return the record with the digest of the text, which must be that of the record where it has one.

    Unless the number of shards is `fixed`, a short text gets no more shards than it has documents.
    """
    if record.text:
        if record.text != text.digest:
            raise DatastoreError(
                f"{folder.parent} is an unfinished build of another text, or the text has changed. Give the same text "
                "in the same order, or remove the store and build it again."
            )
        return record
    shards = record.shards if fixed else max(1, min(record.shards, len(text.sizes)))
    return replace(record, text=text.digest, shards=shards)


def write_record(folder: Path, record: BuildRecord) -> None:
    """Replace the record atomically."""
    with atomic_write(folder / RECORD_FILE) as partial:
        partial.write_text(json.dumps({"format": _VERSION, **asdict(record)}))


def _read(folder: Path) -> BuildRecord | None:
    path = folder / RECORD_FILE
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != _VERSION:
            raise ValueError("another version of knnlm has written it")
        return BuildRecord(**{**content, "done": tuple(content["done"])})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror}.") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DatastoreCorrupt(
            f"{path} is corrupt ({type(error).__name__}: {error}). Remove {folder.parent} and build it again."
        ) from None
