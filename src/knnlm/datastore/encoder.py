"""Encoding of keys during a build, where the codec is fitted to the first keys.

The first `CODEC_SAMPLE_KEYS` keys, or all keys of a smaller text, are written as float16 to `unencoded.npy` of their
segments, which are committed like any other. Then the codec is fitted to them, their `keys.npy` are written, and one
transaction commits the codec and these files; `unencoded.npy` is removed. A build that is killed before that
transaction fits again to the same keys, with the same bytes as result. The model reads no text twice.
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
from knnlm.datastore.schema import CODEC_FILE, KEYS_FILE, MAP_FILE, UNENCODED_FILE, SegmentRow, segment_folder
from knnlm.datastore.segments import ArrayWriter, KeyWriter, open_array
from knnlm.datastore.store import metadata_of, stored_codec, stored_map
from knnlm.errors import DatastoreCorrupt
from knnlm.io import checksum, sync_folder, translate_os_errors

CODEC_SAMPLE_KEYS = 65_536  # keys to fit a codec to

_SAMPLE_BYTES = 1 << 27  # of the sample that a codec is fitted to, in float32
_BLOCK = 8192  # keys at a time


class CodeWriter(ArrayWriter):
    """Writes keys encoded by a codec."""

    divisor = 1.0

    def __init__(self, path: Path, codec: Codec) -> None:
        super().__init__(path, codec.dtype, (codec.columns,))
        self._codec = codec

    def put_keys(self, rows: NDArray[np.int64], keys: NDArray[np.float32]) -> None:
        """Write finite keys, which are mapped already, at these rows."""
        self.put(rows, self._codec.encode(torch.from_numpy(keys)).numpy())


class DeferredEncoder:
    """Chooses how a build writes its keys: as numbers, encoded, or as float16 until the codec is fitted."""

    def __init__(
        self, folder: Path, catalog: SegmentSink, storage: Storage, *, width: int, sample_keys: int | None = None
    ):
        self._folder, self._catalog, self._storage, self._width = folder, catalog, storage, width
        self._sample_keys = CODEC_SAMPLE_KEYS if sample_keys is None else sample_keys
        self.map: KeyMap | None = stored_map(catalog, width)
        self.codec: Codec | None = None
        mapped = width if self.map is None else self.map.width
        if not storage.fitted:
            self.codec = Plain(storage.dtype, mapped)
        elif catalog.get("codec") is not None:
            self.codec = stored_codec(catalog, mapped)
            if catalog.get("state") != "complete":
                self._remove_unencoded(catalog.segments())

    @property
    def file(self) -> str:
        """The name of the file that keys are written to now."""
        return UNENCODED_FILE if self.codec is None else KEYS_FILE

    @property
    def stores_model_output(self) -> bool:
        """Whether keys are stored as the model computes them, in float16 and without a map."""
        return isinstance(self.codec, Plain) and self.codec.dtype == "float16" and self.map is None

    @property
    def plain_dtype(self) -> str | None:
        """The dtype of keys that are written as plain numbers now; None where they are encoded."""
        if self.codec is None:
            return "float16"
        return self.codec.dtype if isinstance(self.codec, Plain) else None

    def is_due(self, keys: int) -> bool:
        """Whether this many keys are enough to fit the codec."""
        return self.codec is None and keys >= self._sample_keys

    def writer(self, folder: Path) -> KeyWriter | CodeWriter:
        """Open the file of a new segment's keys."""
        if (dtype := self.plain_dtype) is not None:
            return KeyWriter(folder / self.file, dtype, self._width if self.codec is None else self.codec.width)
        assert self.codec is not None
        return CodeWriter(folder / self.file, self.codec)

    def mapped(self, keys: Tensor) -> Tensor:
        """Apply the key map; keys are left as they are while the codec is not fitted."""
        return keys if self.map is None or self.codec is None else self.map.apply(keys)

    def encode(self, keys: Tensor) -> Tensor:
        """Return the stored form of (n, D) keys, on their device."""
        assert self.codec is not None
        return self.codec.encode(self.mapped(keys).float())

    def fit(self) -> None:
        """Fit the codec to the unencoded keys, and encode them."""
        segments = self._catalog.segments()
        if self.codec is not None or not segments:
            return
        self.map, self.codec = fit_codec(self._storage, self._sample(segments))
        metadata: dict[str, object] = {"codec": save_codec(self.codec, self._folder / CODEC_FILE)}
        if self.map is not None:
            metadata["map"] = {"sha256": self.map.save(self._folder / MAP_FILE), "metadata": self.map.metadata}
        self._catalog.replace_keys([self._convert(segment) for segment in segments], **metadata)
        self._remove_unencoded(segments)

    def _sample(self, segments: list[SegmentRow]) -> Tensor:
        """Return unencoded keys, an even sample where there are many."""
        count = sum(segment.keys for segment in segments)
        step = max(1, -(-count * self._width * 4 // _SAMPLE_BYTES))
        samples, first = [], 0
        for segment in segments:
            local = np.arange(-first % step, segment.keys, step)
            samples.append(torch.from_numpy(self._open(segment)[local].astype(np.float32)) * segment.scale)
            first += segment.keys
        return torch.cat(samples)

    def _convert(self, segment: SegmentRow) -> SegmentRow:
        """Write the encoded keys of a segment beside the unencoded ones."""
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
            raise DatastoreCorrupt(f"{path}: checksum mismatch (SHA-256). Remove the store and build it again.")
        return open_array(path, "float16", (segment.keys, self._width))

    def _remove_unencoded(self, segments: list[SegmentRow]) -> None:
        for segment in segments:
            path = segment_folder(self._folder, segment.id) / UNENCODED_FILE
            with translate_os_errors(path):
                path.unlink(missing_ok=True)


def storage_of(catalog: SegmentSink) -> Storage:
    """Return the key format of a finished store, for documents added to it."""
    named = catalog.get("keys")
    if named is None:
        dtype = metadata_of(catalog, "key_dtype", str)
        return Storage("codes" if dtype == "uint8" else dtype)
    return parse_storage(str(named))
