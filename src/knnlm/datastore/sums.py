"""Compare files with their checksums when they are first read. Knows nothing about what they hold.

A small file is hashed whole. A large one is read in places, so it is compared in blocks of 64 KiB, each when it is
first touched in this process. The catalog has one SHA-256 for the whole file; when that is found to be right for the
first time, the CRC-32 of every block is written down beside it, and from then on a block vouches for itself:

segments/000000/keys.sums   "KNNLMSUM", SHA-256 of keys.npy, CRC-32 of each block, SHA-256 of all that
"""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnlm.checksums import checksum
from knnlm.datastore.arrays import KEYS, array_sums
from knnlm.datastore.catalog import SegmentRow
from knnlm.errors import DatastoreCorrupt

BLOCK = 1 << 16
_AT_ONCE = 256  # blocks
_MAGIC = b"KNNLMSUM"
_DIGEST = 32
_NAME = 64  # characters of a SHA-256


class Sums:
    """What has been compared so far; one that is not `on` compares nothing."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._whole: set[Path] = set()
        self._blocks: dict[Path, _Blocks] = {}
        self._done: set[int] = set()  # the segments whose keys are all compared

    def array(self, folder: Path, segment: SegmentRow, name: str) -> None:
        """Compare a small array of a segment, once; keys are not small."""
        path = folder / name
        if self.on and name != KEYS and path not in self._whole:
            if checksum(path) != array_sums(segment)[name]:
                raise damaged(path)
            self._whole.add(path)

    def done(self, segment: SegmentRow) -> bool:
        """Say whether nothing of a segment's keys is left to compare."""
        return not self.on or segment.id in self._done

    def keys(self, path: Path, segment: SegmentRow, keys: NDArray[np.int64], row_bytes: int) -> None:
        """Compare the blocks that hold these keys of a segment, each once."""
        if self.done(segment):
            return
        if self.rows(path, segment.keys_sha256, keys, row_bytes, total=segment.keys):
            self._done.add(segment.id)

    def rows(self, path: Path, sha256: str, rows: NDArray[np.int64], row_bytes: int, *, total: int) -> bool:
        """Compare the blocks that hold these rows of the `total` that a file ends with, each once.

        True where nothing of the file is left to compare.
        """
        blocks = self._of(path, sha256)
        if blocks.size < total * row_bytes:  # cut short since the memory was opened
            raise damaged(path)
        if blocks.left:
            blocks.check(blocks.size - (total - rows) * row_bytes, row_bytes)
        return not blocks.left

    def stretches(self, path: Path, sha256: str, begins: NDArray[np.int64], length: int) -> None:
        """Compare the blocks of a file from each of these bytes on, as far as the length goes, each once."""
        if self.on and (blocks := self._of(path, sha256)).left:
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
        count = -(-self.size // BLOCK)
        file = path.with_suffix(".sums")
        sums = _load(file, sha256, count)
        self._seen = np.zeros(count, np.bool_)
        if sums is None:
            sums = _make(path, sha256)
            _save(file, sha256, sums)
            self._seen[:] = True  # just now
        self._sums = sums
        self.left = count - int(self._seen.sum())

    def check(self, begins: NDArray[np.int64], length: int) -> None:
        """Compare the blocks from each of these bytes on, as far as the length goes."""
        steps = [*range(0, length, BLOCK), max(0, length - 1)]
        touched = [(begins + step) // BLOCK for step in steps]
        inside = (blocks[blocks < len(self._seen)] for blocks in touched)
        wanted = np.unique(np.concatenate([blocks[~self._seen[blocks]] for blocks in inside]))
        if not len(wanted):
            return
        with self._path.open("rb") as file:
            cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
            for run in np.split(wanted, cuts):
                for part in (run[at : at + _AT_ONCE] for at in range(0, len(run), _AT_ONCE)):
                    file.seek(int(part[0]) * BLOCK)
                    data = memoryview(file.read(len(part) * BLOCK))
                    self._compare(data, int(part[0]))
        self._seen[wanted] = True
        self.left = len(self._seen) - int(self._seen.sum())

    def _compare(self, data: memoryview, first: int) -> None:
        for number, at in enumerate(range(0, len(data), BLOCK), first):
            if zlib.crc32(data[at : at + BLOCK]) != self._sums[number]:
                raise damaged(self._path, f" in bytes {number * BLOCK:,} to {(number + 1) * BLOCK - 1:,}")


def _make(path: Path, sha256: str) -> NDArray[np.uint32]:
    """Sum up every block of a file that is as it was written."""
    digest, sums = hashlib.sha256(), list[int]()
    with path.open("rb") as file:
        while data := file.read(_AT_ONCE * BLOCK):
            digest.update(data)
            view = memoryview(data)
            sums += [zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    if digest.hexdigest() != sha256:
        raise damaged(path)
    return np.array(sums, dtype="<u4")


def _save(file: Path, sha256: str, sums: NDArray[np.uint32]) -> None:
    """Write sums down for the next process; where that cannot be, it makes them again."""
    body = _MAGIC + sha256.encode() + sums.tobytes()
    # Whoever merely reads a memory of a stranger must not write where the stranger has put a link.
    partial = file.with_suffix(f".{secrets.token_hex(8)}.partial")
    with suppress(OSError):
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(body + hashlib.sha256(body).digest())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _load(file: Path, sha256: str, count: int) -> NDArray[np.uint32] | None:
    """Read sums; None where there are none for this file, or damaged ones."""
    size = len(_MAGIC) + _NAME + 4 * count + _DIGEST
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
            return None
        data = file.read_bytes()
    except OSError:
        return None
    body, end = data[:-_DIGEST], len(_MAGIC) + _NAME
    if hashlib.sha256(body).digest() != data[-_DIGEST:] or body[:end] != _MAGIC + sha256.encode():
        return None
    return np.frombuffer(body[end:], "<u4")


def damaged(path: Path, where: str = "") -> DatastoreCorrupt:
    """Say that a file of a segment is not what it was."""
    memory = path.parent.parent.parent
    return DatastoreCorrupt(f"{path} is not as it was written{where}. Restore it, or run: knnlm repair {memory}")
