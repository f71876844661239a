"""Checksums of files, and the error of a mismatch; `digests` has those of the catalog's rows.

A small file is hashed whole, and a JSON file contains its own checksum. A large file is read in places, so it is
compared in blocks of 64 KiB, each when it is first read by this process. The catalog has one SHA-256 for the whole
file; when that was found to match for the first time, the CRC-32 of every block is written beside it, and later reads
compare with that:

segments/000000/keys.sums   "KNNLMSUM", SHA-256 of keys.npy, CRC-32 of each block, SHA-256 of all that
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.schema import KEYS_FILE, SegmentRow, array_checksums
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.io import checksum

CHECKSUM_KEY = "sha256"  # of a JSON object: the checksum of its other members
BLOCK_BYTES = 1 << 16  # of a large file

_MAX_METADATA_BYTES = 1 << 28  # of a JSON file, which is read whole
_BLOCKS_PER_READ = 256
_MAGIC = b"KNNLMSUM"
_DIGEST_BYTES = 32
_HEX_DIGEST_LENGTH = 64


def load_metadata(file: Path, *, version: int, missing: str, advice: str) -> dict[str, Any]:
    """Read a JSON file with its checksum; `missing` is the message if it does not exist, `advice` ends all others."""
    try:
        if file.stat().st_size > _MAX_METADATA_BYTES:
            raise DatastoreCorrupt(f"{file} has {file.stat().st_size:,} bytes, too many for metadata. {advice}")
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatastoreError(missing) from None
    except OSError as error:
        raise DatastoreError(f"Cannot read {file}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise DatastoreCorrupt(f"{file} is not JSON. {advice}") from None
    if not isinstance(metadata, dict) or metadata.get("format") != version:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        raise DatastoreError(f"{file} has format version {found}, this knnlm reads version {version}. {advice}")
    verify_checksum(file, metadata, advice)
    return metadata


def with_checksum(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata for a JSON file, with its checksum."""
    return {**metadata, CHECKSUM_KEY: hash_metadata(metadata)}


def verify_checksum(file: Path, metadata: dict[str, Any], advice: str) -> None:
    """Raise on a checksum mismatch; metadata without a checksum passes."""
    if CHECKSUM_KEY in metadata and metadata[CHECKSUM_KEY] != hash_metadata(
        {name: metadata[name] for name in metadata if name != CHECKSUM_KEY}
    ):
        raise DatastoreCorrupt(f"{file}: checksum mismatch (SHA-256). {advice}")


def hash_metadata(metadata: dict[str, Any]) -> str:
    """Return the SHA-256 of metadata as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


class BlockChecksums:
    """Compares files with their checksums, each block once; compares nothing unless `enabled`."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._whole: set[Path] = set()
        self._blocks: dict[Path, _Blocks] = {}
        self._done: set[int] = set()  # segments whose keys are all checked

    def check_array(self, folder: Path, segment: SegmentRow, name: str) -> None:
        """Check an array of a segment whole, once; keys are checked in blocks, by `check_keys`."""
        path = folder / name
        if self.enabled and name != KEYS_FILE and path not in self._whole:
            if checksum(path) != array_checksums(segment)[name]:
                raise checksum_mismatch(path)
            self._whole.add(path)

    def is_checked(self, segment: SegmentRow) -> bool:
        """Whether all keys of a segment have been checked."""
        return not self.enabled or segment.id in self._done

    def check_keys(self, path: Path, segment: SegmentRow, keys: NDArray[np.int64], row_bytes: int) -> None:
        """Check the blocks with these keys of a segment, each once."""
        if self.is_checked(segment):
            return
        if self.check_rows(path, segment.keys_sha256, keys, row_bytes, total=segment.keys):
            self._done.add(segment.id)

    def check_rows(self, path: Path, sha256: str, rows: NDArray[np.int64], row_bytes: int, *, total: int) -> bool:
        """Check the blocks with these rows, each once; return whether the whole file has been checked.

        The file ends with `total` rows.
        """
        blocks = self._of(path, sha256)
        if blocks.size < total * row_bytes:  # truncated since the store was opened
            raise checksum_mismatch(path)
        if blocks.left:
            blocks.check(blocks.size - (total - rows) * row_bytes, row_bytes)
        return not blocks.left

    def check_ranges(self, path: Path, sha256: str, begins: NDArray[np.int64], length: int) -> None:
        """Check the blocks of the byte ranges of this length, each once."""
        if self.enabled and (blocks := self._of(path, sha256)).left:
            blocks.check(begins, length)

    def _of(self, path: Path, sha256: str) -> _Blocks:
        if path not in self._blocks:
            self._blocks[path] = _Blocks(path, sha256)
        return self._blocks[path]


class _Blocks:
    """The blocks of one file."""

    def __init__(self, path: Path, sha256: str) -> None:
        self._path = path
        self.size = path.stat().st_size
        count = -(-self.size // BLOCK_BYTES)
        file = path.with_suffix(".sums")
        sums = _load(file, sha256, count)
        self._checked = np.zeros(count, np.bool_)
        if sums is None:
            sums = _make(path, sha256)
            _save(file, sha256, sums)
            self._checked[:] = True
        self._sums = sums
        self.left = count - int(self._checked.sum())

    def check(self, begins: NDArray[np.int64], length: int) -> None:
        """Check the blocks of the byte ranges of this length."""
        steps = [*range(0, length, BLOCK_BYTES), max(0, length - 1)]
        touched = [(begins + step) // BLOCK_BYTES for step in steps]
        inside = (blocks[blocks < len(self._checked)] for blocks in touched)
        wanted = np.unique(np.concatenate([blocks[~self._checked[blocks]] for blocks in inside]))
        if not len(wanted):
            return
        with self._path.open("rb") as file:
            cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
            for span in np.split(wanted, cuts):
                for part in (span[at : at + _BLOCKS_PER_READ] for at in range(0, len(span), _BLOCKS_PER_READ)):
                    file.seek(int(part[0]) * BLOCK_BYTES)
                    data = memoryview(file.read(len(part) * BLOCK_BYTES))
                    self._compare(data, int(part[0]))
        self._checked[wanted] = True
        self.left = len(self._checked) - int(self._checked.sum())

    def _compare(self, data: memoryview, first: int) -> None:
        for number, at in enumerate(range(0, len(data), BLOCK_BYTES), first):
            if zlib.crc32(data[at : at + BLOCK_BYTES]) != self._sums[number]:
                raise checksum_mismatch(
                    self._path, f" in bytes {number * BLOCK_BYTES:,} to {(number + 1) * BLOCK_BYTES - 1:,}"
                )


def _make(path: Path, sha256: str) -> NDArray[np.uint32]:
    """Return the CRC-32 of every block of a file, after checking its SHA-256."""
    digest, sums = hashlib.sha256(), list[int]()
    with path.open("rb") as file:
        while data := file.read(_BLOCKS_PER_READ * BLOCK_BYTES):
            digest.update(data)
            view = memoryview(data)
            sums += [zlib.crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    if digest.hexdigest() != sha256:
        raise checksum_mismatch(path)
    return np.array(sums, dtype="<u4")


def _save(file: Path, sha256: str, sums: NDArray[np.uint32]) -> None:
    """Write the checksums of blocks for the next process; without write permission it computes them again."""
    body = _MAGIC + sha256.encode() + sums.tobytes()
    # A reader of an untrusted store must not write through a link in it.
    partial = file.with_suffix(f".{secrets.token_hex(8)}.partial")
    with suppress(OSError):
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(body + hashlib.sha256(body).digest())
            partial.replace(file)
        finally:
            # Also those of processes that were killed. One that is writing now fails to rename its file, and needs not.
            for leftover in file.parent.glob(f"{file.stem}.*.partial"):
                leftover.unlink(missing_ok=True)


def _load(file: Path, sha256: str, count: int) -> NDArray[np.uint32] | None:
    """Read the checksums of blocks; None if the file is missing, corrupt or of another version of the array."""
    size = len(_MAGIC) + _HEX_DIGEST_LENGTH + 4 * count + _DIGEST_BYTES
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
            return None
        data = file.read_bytes()
    except OSError:
        return None
    body, end = data[:-_DIGEST_BYTES], len(_MAGIC) + _HEX_DIGEST_LENGTH
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:] or body[:end] != _MAGIC + sha256.encode():
        return None
    return np.frombuffer(body[end:], "<u4")


def checksum_mismatch(path: Path, where: str = "") -> DatastoreCorrupt:
    """Return the error of a segment's file that does not match its checksum."""
    store = path.parent.parent.parent
    return DatastoreCorrupt(f"{path}: checksum mismatch{where}. Restore it, or run: knnlm repair {store}")
