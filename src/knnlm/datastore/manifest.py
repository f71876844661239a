"""The manifest of a sharded store: one small JSON file that lists ordinary stores.

store/
  shards.json   the shards in the order of their entries, and what they have in common
  catalog.db    tuned settings; it lists no segment and no document, which are in the shards

The catalog of each shard is the source of truth for its entries and documents. The manifest adds what no shard can
contain: where the shards are, their order, and the numbers of their documents. A shard numbers its documents from 0;
`NumberSpan` maps a stretch of these numbers to the numbers in the sharded store, which are never reused. The counts are
those of the last change through the sharded store.

A shard may be listed by a URL; then the folder of the shard is that of its copy on this machine (`remote.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.datastore.schema import REMOTE_FILE
from knnlm.datastore.validation import MAX_INTEGER, check_regular_file
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.io import atomic_write, cache_folder

MANIFEST_FILE = "shards.json"
MANIFEST_VERSION = 1
VALUES = "tokens"  # what the values of entries are

CURRENT_FILE = "current.json"  # of the copies of a shard at a URL

_MAX_BYTES = 1 << 26
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.DOTALL)
_VERSION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class NumberSpan:
    """Consecutive documents of a shard: `count` numbers from `local` on are those from `number` on."""

    local: int
    number: int
    count: int


@dataclass(frozen=True)
class Shard:
    """One shard, as it was at the last change through the sharded store."""

    path: str  # absolute, or relative to the folder of the sharded store, or a URL
    first_entry: int
    entries: int
    documents: tuple[NumberSpan, ...]
    generation: int
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """The shards of a store, and what they have in common."""

    model: dict[str, Any]  # the identity of the reader, with its key layer
    window: dict[str, Any]
    keys: dict[str, Any]  # format and dtype; SHA-256 of offset, map and codec, None where there is none
    shards: tuple[Shard, ...]
    joins: int = 1  # how often shards were joined here
    generation: int = 0  # of the store, less those of its shards: joining again increases the generation
    documents: int = 0  # numbers that documents had at the last change, also those of shards that are listed no more

    @property
    def form(self) -> dict[str, dict[str, Any]]:
        """What all shards have in common."""
        return {"model": self.model, "window": self.window, "keys": self.keys}

    @property
    def next_number(self) -> int:
        """The number of the next document."""
        ends = (span.number + span.count for shard in self.shards for span in shard.documents)
        return max(self.documents, *ends, 0)

    def folders(self, folder: Path) -> list[Path]:
        """Return the folders of the shards of the store at `folder`."""
        root = folder.resolve()
        # Without .. in messages; an absolute path stays as it is.
        return [
            _copy_of(shard.path) if is_url(shard.path) else Path(os.path.normpath(root / shard.path))
            for shard in self.shards
        ]

    @property
    def urls(self) -> list[str]:
        """The URLs of the shards that are not folders."""
        return [shard.path for shard in self.shards if is_url(shard.path)]

    def numbered(self, next_documents: Sequence[int]) -> Manifest:
        """Return the manifest with numbers for documents added since it was written, given the next of each shard."""
        number, shards = self.next_number, []
        for shard, end in zip(self.shards, next_documents, strict=True):
            spans = list(shard.documents)
            known = spans[-1].local + spans[-1].count if spans else 0
            if end > known and spans and spans[-1].number + spans[-1].count == number:
                spans[-1] = replace(spans[-1], count=spans[-1].count + end - known)
            elif end > known:
                spans.append(NumberSpan(known, number, end - known))
            number += max(0, end - known)
            shards.append(replace(shard, documents=tuple(spans)))
        return replace(self, shards=tuple(shards), documents=number)


def is_sharded(folder: Path) -> bool:
    """Whether a folder is a sharded store."""
    return (folder / MANIFEST_FILE).is_file()


def relative_path(shard: Path, folder: Path) -> str:
    """Return the place of a shard for the manifest: its URL where it is a copy of one, else its path.

    The path is relative where the shard lies beside or inside of the sharded store.
    """
    if (url := remote_url(shard)) is not None:
        return url
    shard, folder = shard.resolve(), folder.resolve()
    return os.path.relpath(shard, folder) if shard.is_relative_to(folder.parent) else str(shard)


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL such as s3://bucket/part-1.store."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None


def shard_cache(url: str) -> Path:
    """Return the folder of the copies of a shard at a URL."""
    return cache_folder() / "shards" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CurrentCopy:
    """The copy of a shard at a URL that was fetched last, and what identified the catalog there."""

    folder: Path
    key: str


def read_current(url: str) -> CurrentCopy | None:
    """Return the current copy of a shard at a URL; None where there is none."""
    home = shard_cache(url)
    try:
        record = json.loads((home / CURRENT_FILE).read_bytes())
        key, version = str(record["key"]), str(record["version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CurrentCopy(home / version, key) if _VERSION.fullmatch(version) else None


def _copy_of(url: str) -> Path:
    current = read_current(url)
    return shard_cache(url) / "not-fetched" if current is None else current.folder


def remote_url(folder: Path) -> str | None:
    """Return the URL of which a folder is a copy; None where it is none."""
    try:
        url = json.loads((folder / REMOTE_FILE).read_bytes())["url"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return url if is_url(url) else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically; the caller holds the writer lock of the sharded store."""
    content = {"format": MANIFEST_VERSION, "values": VALUES, **asdict(manifest)}
    for shard in content["shards"]:
        shard["documents"] = [list(span.values()) for span in shard["documents"]]
    with atomic_write(folder / MANIFEST_FILE) as partial:
        text = json.dumps(content)
        if len(text) > _MAX_BYTES:
            raise DatastoreError(
                f"{folder}: the list of its documents' numbers is too long. Make one store of it: knnlm merge {folder} "
                "--out STORE"
            )
        partial.write_text(text)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a sharded store."""
    path = folder / MANIFEST_FILE
    check_regular_file(folder, path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError("it is not an object")
        version = content.get("format")
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise DatastoreError(
                f"{path} has format version {version}, this knnlm reads version {MANIFEST_VERSION}. Upgrade knnlm: "
                "pip install -U knnlm"
            )
        if (version, content["values"]) != (MANIFEST_VERSION, VALUES):
            raise ValueError(f"format {version!r}, values {content['values']!r}")
        shards = tuple(_parse_shard(shard) for shard in content["shards"])
        model, window, keys = (_typed(content[name], dict) for name in ("model", "window", "keys"))
        counts = {name: _count(content[name]) for name in ("joins", "generation", "documents")}
        manifest = Manifest(model, window, keys, shards, **counts)
        _check_numbers(manifest)
    except OSError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror}.") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DatastoreCorrupt(
            f"{path} is corrupt ({type(error).__name__}: {error}). Write it again: knnlm shards join SHARD... --out "
            f"{folder} --replace"
        ) from None
    return manifest


def _parse_shard(stored: Any) -> Shard:
    spans = tuple(NumberSpan(*(_count(number) for number in span)) for span in _typed(stored["documents"], list))
    texts = [_typed(stored[name], str) for name in ("path", "fingerprint")]
    first, entries, generation = (_count(stored[name]) for name in ("first_entry", "entries", "generation"))
    return Shard(texts[0], first, entries, spans, generation, texts[1])


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is not a {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_INTEGER:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _check_numbers(manifest: Manifest) -> None:
    """Raise ValueError unless shards have entries without gaps and documents with one number each."""
    if not manifest.shards:
        raise ValueError("it lists no shard")
    entry = 0
    for shard in manifest.shards:
        if shard.first_entry != entry:
            raise ValueError(f"{shard.path} begins at entry {shard.first_entry:,}, not at {entry:,}")
        entry += shard.entries
        local = 0
        for span in shard.documents:
            if span.local != local:
                raise ValueError(f"{shard.path} has no numbers for its documents from {local:,} on")
            local += span.count
    end = 0
    for span in sorted((span for shard in manifest.shards for span in shard.documents), key=lambda span: span.number):
        if span.number < end:
            raise ValueError(f"two documents have the number {span.number:,}")
        end = span.number + span.count
