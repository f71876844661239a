"""Keys that wait for their codec while the first ones of a store are read.

How keys are stored best is seen from keys. So the first ones, at least `ENOUGH` or all of a smaller text, are written
as float16 into `unencoded.npy` of their segments, which are committed like any other. Then the codec is fitted to them,
their `keys.npy` are written, and one transaction lets the codec and these files exist; what waited is removed. A build
that is killed before that transaction does it again from the same keys, so that the same bytes come out. The price is
float16 for the first segments while they wait; nothing is read by the model twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.catalog import SegmentSink
from knnlm.datastore.codecs import Codec, KeyMap, Plain, Storage, fit_codec, parse_storage, save_codec
from knnlm.datastore.paths import CODEC_FILE, KEYS_FILE, MAP_FILE, UNENCODED_FILE, segment_folder
from knnlm.datastore.schema import SegmentRow
from knnlm.datastore.segments import ArrayWriter, KeyWriter, open_array
from knnlm.datastore.store import metadata_of, stored_codec, stored_map
from knnlm.errors import DatastoreCorrupt
from knnlm.io import checksum, sync_folder, translate_os_errors

ENOUGH = 65_536  # keys to fit a codec to

_LOOKED_AT = 1 << 27  # bytes of those that wait, in float32

_BLOCK = 8192  # keys at a time


class CodeWriter(ArrayWriter):
    """Writes keys as what a codec makes of them."""

    divisor = 1.0

    def __init__(self, path: Path, codec: Codec) -> None:
        super().__init__(path, codec.dtype, (codec.columns,))
        self._codec = codec

    def put_keys(self, rows: NDArray[np.int64], keys: NDArray[np.float32]) -> None:
        """Write finite keys, mapped already, to these rows."""
        self.put(rows, self._codec.encode(torch.from_numpy(keys)).numpy())


class DeferredEncoder:
    """How a build stores its keys: as numbers from the start, or as numbers until there is a codec for them."""

    def __init__(self, folder: Path, catalog: SegmentSink, storage: Storage, *, width: int, enough: int | None = None):
        self._folder, self._catalog, self._storage, self._width = folder, catalog, storage, width
        self._enough = ENOUGH if enough is None else enough
        self.map: KeyMap | None = stored_map(catalog, width)
        self.codec: Codec | None = None
        mapped = width if self.map is None else self.map.width
        if not storage.fitted:
            self.codec = Plain(storage.dtype, mapped)
        elif catalog.get("codec") is not None:
            self.codec = stored_codec(catalog, mapped)
            if catalog.get("state") != "complete":
                self._remove_waiting(catalog.segments())

    @property
    def file(self) -> str:
        """The name of the file that keys go into now."""
        return UNENCODED_FILE if self.codec is None else KEYS_FILE

    @property
    def as_read(self) -> bool:
        """Whether keys are stored just as the model gives them, where that is in float16."""
        return isinstance(self.codec, Plain) and self.codec.dtype == "float16" and self.map is None

    @property
    def numbers(self) -> str | None:
        """The dtype of the numbers that keys are written as now; None where they are encoded."""
        if self.codec is None:
            return "float16"
        return self.codec.dtype if isinstance(self.codec, Plain) else None

    def due(self, rows: int) -> bool:
        """Return whether so many rows are enough to choose the codec by."""
        return self.codec is None and rows >= self._enough

    def writer(self, folder: Path) -> KeyWriter | CodeWriter:
        """Open the file of a new segment's keys."""
        if (dtype := self.numbers) is not None:
            return KeyWriter(folder / self.file, dtype, self._width if self.codec is None else self.codec.width)
        assert self.codec is not None
        return CodeWriter(folder / self.file, self.codec)

    def mapped(self, keys: Tensor) -> Tensor:
        """Bring keys to where they are stored; those that wait are left as they are."""
        return keys if self.map is None or self.codec is None else self.map.apply(keys)

    def encode(self, keys: Tensor) -> Tensor:
        """Turn (n, D) keys into what is stored of them, where they are."""
        assert self.codec is not None
        return self.codec.encode(self.mapped(keys).float())

    def settle(self) -> None:
        """Choose the codec by the keys that wait, and store them with it."""
        segments = self._catalog.segments()
        if self.codec is not None or not segments:
            return
        self.map, self.codec = fit_codec(self._storage, self._sample(segments))
        metadata: dict[str, object] = {"codec": save_codec(self.codec, self._folder / CODEC_FILE)}
        if self.map is not None:
            metadata["map"] = {"sha256": self.map.save(self._folder / MAP_FILE), "metadata": self.map.metadata}
        self._catalog.replace_keys([self._convert(segment) for segment in segments], **metadata)
        self._remove_waiting(segments)

    def _sample(self, segments: list[SegmentRow]) -> Tensor:
        """Return keys that wait, taken evenly from all where there are many."""
        rows = sum(segment.keys for segment in segments)
        step = max(1, -(-rows * self._width * 4 // _LOOKED_AT))
        parts, first = [], 0
        for segment in segments:
            local = np.arange(-first % step, segment.keys, step)
            parts.append(torch.from_numpy(self._open(segment)[local].astype(np.float32)) * segment.scale)
            first += segment.keys
        return torch.cat(parts)

    def _convert(self, segment: SegmentRow) -> SegmentRow:
        """Write the stored form of one segment's keys beside those that wait."""
        folder = segment_folder(self._folder, segment.id)
        with self.writer(folder) as writer:
            for first, keys in self._blocks(segment):
                writer.put_keys(np.arange(first, first + len(keys)), self.mapped(keys).numpy())
        with translate_os_errors(folder):
            sync_folder(folder)
        return replace(segment, scale=writer.divisor, keys_sha256=checksum(folder / KEYS_FILE))

    def _blocks(self, segment: SegmentRow) -> Iterator[tuple[int, Tensor]]:
        stored = self._open(segment)
        for first in range(0, segment.keys, _BLOCK):
            yield first, torch.from_numpy(stored[first : first + _BLOCK].astype(np.float32)) * segment.scale

    def _open(self, segment: SegmentRow) -> NDArray[np.float16]:
        path = segment_folder(self._folder, segment.id) / UNENCODED_FILE
        if checksum(path) != segment.keys_sha256:
            raise DatastoreCorrupt(f"{path} is not as it was written. Remove the store and build it again.")
        return open_array(path, "float16", (segment.keys, self._width))

    def _remove_waiting(self, segments: list[SegmentRow]) -> None:
        for segment in segments:
            path = segment_folder(self._folder, segment.id) / UNENCODED_FILE
            with translate_os_errors(path):
                path.unlink(missing_ok=True)


def storage_of(catalog: SegmentSink) -> Storage:
    """Return how a finished store stores its keys, for those that are added to it."""
    named = catalog.get("keys")
    if named is None:
        dtype = metadata_of(catalog, "key_dtype", str)
        return Storage("codes" if dtype == "uint8" else dtype)
    return parse_storage(str(named))
