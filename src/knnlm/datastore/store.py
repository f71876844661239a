"""Open a store, read it and change it.

store/
  catalog.db                 the SQLite database of segments, documents and metadata
  map.safetensors            the linear map that was applied to keys, where there is one
  codec.safetensors          the parameters of the codec, where keys are not stored as plain numbers
  segments/000000/keys.npy   (N, W) context vectors, less `offset`, mapped, divided by the segment's scale or encoded
  segments/000000/values.npy (N,) the token that followed each context
  segments/000000/kept.npy   (n,) the entries of the segment that its n keys belong to, where not every entry has one
  segments/000000/counts.npy (n,) the weight of each key in a vote, where it is not 1
  index/<id>/index.*         the search index: derived data, which can be built again

There is an entry for every token of the text. In a store as it was built, entry i has key i; in a pruned one, keys have
numbers of their own, and `entries_of` returns the entries that they belong to.

Entries and keys are numbered without those of removed documents, so that removed text cannot be addressed. An open
store is a snapshot: it does not show what other processes write. Its own methods `add`, `remove` and `compact` show
their change, unless an index or a mixture was opened on it. A process without write permission needs a store at rest,
without an active or interrupted writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.catalog import Catalog, SegmentSink
from knnlm.datastore.codecs import Codec, KeyMap, Plain, load_codec, row_bytes
from knnlm.datastore.integrity import BlockChecksums
from knnlm.datastore.live_numbers import LiveNumbers, by_segment, check_removed
from knnlm.datastore.locks import READERS_LOCK, WRITER_LOCK, ReaderLock
from knnlm.datastore.manifest import MANIFEST_FILE, Manifest, Shard, is_sharded, is_url, read_manifest
from knnlm.datastore.remote import fetch_shard
from knnlm.datastore.schema import (
    CATALOG_FILE,
    CODEC_FILE,
    COUNTS_FILE,
    DECODER_FOLDER,
    KEPT_FILE,
    MAP_FILE,
    PARTIAL_CATALOG_FILES,
    SHARDED,
    VALUES_FILE,
    SegmentRow,
    StoredDocument,
    index_folder,
)
from knnlm.datastore.segments import BULK_READ_KEYS, Arrays, Locate, array_shapes, check_metadata, check_segments
from knnlm.datastore.sharded_catalog import ShardedCatalog, locate
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch
from knnlm.index.gpu.deferred import check_flag
from knnlm.io import as_tensor
from knnlm.lm.fingerprint import identity_difference
from knnlm.progress import Progress, silent

if TYPE_CHECKING:
    from knnlm.corpus import Document
    from knnlm.datastore.compact import Compacted
    from knnlm.datastore.remove import Removed
    from knnlm.ingest.build import Added
    from knnlm.lm.causal import CausalLM
    from knnlm.maintenance.export import ExportResult
    from knnlm.maintenance.verify import Verification

_MAX_FLOAT16 = 65504.0 / 2  # half of the largest float16, so that two keys can be added
_MAX_WIDTH = 1 << 24  # of a hidden state
_MAX_RESIDENT_TOKENS = 1 << 26  # that are kept in memory: four bytes each
_MAX_DEVICE_TOKENS = 1 << 31  # that are kept on a GPU, beside their keys, which are hundreds of times larger
_BLOCK = 4096  # keys that are decoded at a time
_SHOWN = 60  # characters of a value in a message
_MAY_DIFFER = {("model", "name"), ("model", "weights"), ("model", "config")}  # of shards; see `form_difference`


@dataclass(frozen=True)
class Keys:
    """The keys of a store as `Vectors` of an index, numbered from 0: all, or those from `first` to `end`."""

    store: Datastore
    first: int = 0
    end: int | None = None

    @property
    def rows(self) -> int:
        """The number of keys."""
        return (self.store.key_count if self.end is None else self.end) - self.first

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return self.store.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Return (number of the first key, (n, D) float32) from first to last."""
        for number, block in self.store.chunks(size, begin=self.first):
            if number - self.first >= self.rows:
                return
            yield number - self.first, block[: self.rows - (number - self.first)]

    def take(self, ids: Tensor) -> Tensor:
        """Return these keys, (…) → (…, D) float32; an id below 0 gives zeros."""
        return self.store.take(torch.where(ids < 0, ids, ids + self.first) if self.first else ids)

    @property
    def half(self) -> bool:
        """Whether keys fit into float16: stored so and not divided, or decoded within its range."""
        codec = self.store.codec
        if not isinstance(codec, Plain):
            return codec.largest <= _MAX_FLOAT16
        return codec.dtype == "float16" and all(segment.scale == 1.0 for segment in self.store.segments)

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, D) float16 tensor with the keys from `first` on."""
        codec = self.store.codec
        first += self.first
        if isinstance(codec, Plain):
            self.store.read(first, out)
            return
        stored = torch.empty(len(out), codec.columns, dtype=getattr(torch, codec.dtype))
        self.store.read(first, stored)
        for begin in range(0, len(out), _BLOCK):
            out[begin : begin + _BLOCK] = codec.decode(stored[begin : begin + _BLOCK], 1.0)

    @property
    def resident_keys(self) -> list[Tensor] | None:
        """The keys on the device on which they were computed, if they were kept there."""
        return self.store.resident_keys if not self.first else None

    def release(self) -> None:
        """Free the keys on the device; they are in their files."""
        self.store.resident_keys = None


def stored_offset(catalog: SegmentSink) -> Tensor | None:
    """Return the vector that was subtracted from every key before it was stored, None where there is none."""
    offset = catalog.get("offset")
    if offset is None:
        return None
    width = reader_width(catalog)
    try:
        vector = torch.tensor(offset, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        vector = torch.zeros(0)
    if vector.shape != (width,) or not vector.isfinite().all():
        raise DatastoreCorrupt(
            f"{catalog.path}: the offset of the keys is not {width} finite numbers. Build the store again."
        )
    return vector


def stored_map(catalog: SegmentSink, width: int) -> KeyMap | None:
    """Return the linear map that was applied to keys of this width, None where there is none."""
    stored = catalog.get("map")
    if stored is None:
        return None
    stored = stored if isinstance(stored, dict) else {}
    sha256, metadata = stored.get("sha256"), stored.get("metadata")
    if not isinstance(sha256, str) or not isinstance(metadata, dict):
        raise DatastoreCorrupt(f"{catalog.path} has no valid metadata of the key map. Build the store again.")
    key_map = KeyMap.load(catalog.path.with_name(MAP_FILE), sha256=sha256, metadata=metadata)
    if len(key_map.centre) != width:
        raise DatastoreCorrupt(
            f"{catalog.path.with_name(MAP_FILE)} maps keys of width {len(key_map.centre)}, but the model has width "
            f"{width}. Build the store again."
        )
    return key_map


def stored_codec(catalog: SegmentSink, width: int) -> Codec:
    """Return the codec of a store whose keys have this width."""
    metadata = catalog.get("codec")
    if metadata is None:
        # Until the codec is fitted, keys are stored as float16.
        return Plain("float16" if catalog.get("keys") is not None else metadata_of(catalog, "key_dtype", str), width)
    codec = load_codec(catalog.path.with_name(CODEC_FILE), metadata, width=width)
    if codec.dtype != (key_dtype := metadata_of(catalog, "key_dtype", str)):
        raise DatastoreCorrupt(
            f"{catalog.path}: the key dtype is {key_dtype[:20]!r}, but that of the codec beside it is "
            f"{codec.dtype}. Build the store again."
        )
    return codec


def reader_width(catalog: SegmentSink) -> int:
    """Return the width of the reader's hidden states."""
    width = metadata_of(catalog, "model", dict).get("width")
    if not isinstance(width, int) or not 1 <= width <= _MAX_WIDTH:
        raise DatastoreCorrupt(f"{catalog.path} has no valid width of the model. Build the store again.")
    return width


def metadata_of(catalog: SegmentSink, key: str, kind: type) -> Any:
    """Return a value of the catalog's metadata that every store has."""
    value = catalog.get(key)
    if not isinstance(value, kind):
        raise DatastoreCorrupt(f"{catalog.path} has no valid {key} of the store. Build the store again.")
    return value


class Datastore:
    """The (context vector → next token) pairs of a text collection.

    `chunks` and `take` return keys less the store's `offset`, mapped by its `map`; `project` does the same to a query.
    """

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        *,
        reader_lock: ReaderLock | None = None,
        trust_index: bool = True,
        check: bool = True,
        shards: Sequence[Datastore] = (),
    ) -> None:
        self.path = path
        self.catalog = catalog
        self.shards = list(shards)  # of a sharded store, whose entries are those of the shards, one after another
        self.reader_lock, self.trust_index = reader_lock, trust_index
        self.generation, self.layout = catalog.generation, catalog.layout
        common = shards[0].catalog if shards else catalog  # the files of map and codec are beside it
        self.model: dict[str, Any] = metadata_of(common, "model", dict)
        self.window: dict[str, int] = metadata_of(common, "window", dict)
        self.key_dtype: str = metadata_of(common, "key_dtype", str)
        self._segments = catalog.segments()
        self.offset = stored_offset(common)
        self.map = stored_map(common, reader_width(common))
        self.codec = stored_codec(common, self.width)
        check_metadata(catalog.path, self.model, self.window, self.codec)
        check_segments(catalog.path, self._segments)
        self.arrays = Arrays(_locator(path, catalog, self.shards), self.codec, check=check)
        self._starts = _starts([segment.entries for segment in self._segments])
        self._key_starts = _starts([segment.keys for segment in self._segments])
        self._pruned = any(segment.kept is not None for segment in self._segments)
        self._counted = any(segment.counts_sha256 is not None for segment in self._segments)
        self.entry_numbers = LiveNumbers(int(self._starts[-1]), check_removed(catalog, self._segments))
        for segment in [] if shards else self._segments:
            self.arrays.check(segment)
        self.key_numbers = self._number_keys()
        self._values: dict[torch.device, Tensor] = {}
        self._offsets: dict[torch.device, Tensor] = {}
        # (n, D) float16 keys of each segment, where a build has left them on its device.
        self.resident_keys: list[Tensor] | None = None
        # Whether an index or a mixture was opened on this object, and relies on the numbers of its entries.
        self.pinned = False
        self._unchanged: object | None = None  # the state of the files when `stale` was False last

    @classmethod
    def open(cls, path: str | Path, *, trust_index: bool = True, check: bool = True) -> Datastore:
        """Open a finished store for reading: a folder, or a URL such as s3://bucket/part-1.store, which is fetched.

        With `trust_index` False no file of FAISS is read. With `check` False checksums are not compared.
        """
        folder = fetch_shard(path) if isinstance(path, str) and is_url(path) else Path(path)
        if is_sharded(folder):
            return cls._open_shards(folder, trust_index=trust_index, check=check)
        reader_lock = ReaderLock(folder)  # first, so that no writer removes files that the catalog names
        catalog = Catalog.open(folder / CATALOG_FILE, hold=True, compare=check)
        if catalog.get("state") == SHARDED:
            raise DatastoreError(
                f"{folder} is a sharded store without its {MANIFEST_FILE}. Write it again: knnlm shards join SHARD... "
                f"--out {folder}"
            )
        if catalog.get("state") != "complete":
            what = "copy of another store" if catalog.get("derived") else "build"
            raise DatastoreError(
                f"{folder} is an unfinished {what} ({catalog.document_count():,} documents are in). "
                "Run the same command again to finish it."
            )
        return cls(folder, catalog, reader_lock=reader_lock, trust_index=trust_index, check=check)

    @classmethod
    def _open_shards(cls, folder: Path, *, trust_index: bool, check: bool) -> Datastore:
        """Open a sharded store, after checking that all shards are those of its manifest."""
        manifest, shards = read_manifest(folder), list[Datastore]()
        for url in manifest.urls:
            fetch_shard(url)
        try:
            for listed, place in zip(manifest.shards, manifest.folders(folder), strict=True):
                check_place(folder, place)
                shards.append(cls.open(place, trust_index=trust_index, check=check))
                check_shard(folder, manifest, listed, shards[-1])
            check_different(folder, shards)
            if read_manifest(folder) != manifest:  # a writer has numbered documents since: open all of it again
                while shards:
                    shards.pop().close()
                return cls._open_shards(folder, trust_index=trust_index, check=check)
            catalog = ShardedCatalog.join(
                folder / CATALOG_FILE, manifest, [shard.catalog for shard in shards], compare=check
            )
            reader_lock = ReaderLock(folder)
            return cls(folder, catalog, reader_lock=reader_lock, trust_index=trust_index, check=check, shards=shards)
        except BaseException:
            for shard in shards:
                shard.close()
            raise

    @property
    def stale(self) -> bool:
        """Whether documents were added or removed since the store was opened."""
        state = self.catalog.file_state()
        if state is not None and state == self._unchanged:
            return False
        with closing(self.catalog.reopen()) as now:
            changed = now.generation != self.generation
        self._unchanged = None if changed else state
        return changed

    def reopen(self) -> Datastore:
        """Open the current state of the store; this object does not change."""
        return Datastore.open(self.path, trust_index=self.trust_index, check=self.sums.enabled)

    @property
    def entry_count(self) -> int:
        """The number of entries: one for each token of the text."""
        return self.entry_numbers.live

    @property
    def key_count(self) -> int:
        """The number of keys: as many as tokens, unless the store was pruned."""
        return self.key_numbers.live

    @property
    def keys(self) -> Keys:
        """The keys, for an index."""
        return Keys(self)

    @property
    def width(self) -> int:
        """The number of dimensions of a key; the reader's hidden states have `model["width"]`."""
        return int(self.model["width"]) if self.map is None else self.map.width

    @property
    def segments(self) -> list[SegmentRow]:
        """The segments in the order of their entries."""
        return list(self._segments)

    @property
    def sums(self) -> BlockChecksums:
        """The checksums, and which of them have been compared."""
        return self.arrays.sums

    def files(self, segment: SegmentRow) -> list[str]:
        """Return the file names of a segment's arrays."""
        return list(array_shapes(segment, self.codec))

    def first_key(self, segment: SegmentRow) -> int:
        """Return the stored number of a segment's first key."""
        return int(self._key_starts[self._segments.index(segment)])

    @property
    def bytes(self) -> int:
        """The size of keys, values, numbers of kept entries and counts on disk."""
        extra = 4 * self._pruned + 4 * self._counted
        return self.key_count * (row_bytes(self.codec) + extra) + 4 * self.entry_count

    @property
    def index_bytes(self) -> int:
        """The size of the index on disk."""
        if self.shards:
            return sum(shard.index_bytes for shard in self.shards)
        folders = [index_folder(self.path, row.id) for row in self.catalog.indexes()]
        return sum(file.stat().st_size for folder in folders for file in folder.glob("*"))

    @property
    def storage(self) -> str:
        """The key format, as `knnlm build --key-format` names it."""
        return self.key_dtype if isinstance(self.codec, Plain) else str(self.catalog.get("keys") or self.key_dtype)

    @property
    def fingerprint(self) -> str:
        """The identity of this store: a hash of the checksums of its files."""
        sums = [f"{segment.keys_sha256} {segment.values_sha256}" for segment in self._segments]
        if self._pruned:
            sums += [f"{segment.kept_sha256} {segment.counts_sha256}" for segment in self._segments]
        if self.map is not None:
            sums.append(self.catalog.get("map")["sha256"])
        if not isinstance(self.codec, Plain):
            sums.append(self.catalog.get("codec")["sha256"])
        sums += [f"without {first} {count}" for first, count in self.entry_numbers.gaps]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()[:16]

    @property
    def origin(self) -> Tensor | None:
        """The vector that `project` subtracts, in the space of the stored keys: (D,); None where there is none.

        The inner product with a stored key, plus that with the origin, is the inner product with the full key.
        """
        if self.map is None:
            return self.offset
        matrix, centre = self.map.on(torch.device("cpu"))
        return (centre if self.offset is None else centre + self.offset) @ matrix

    def project(self, queries: Tensor, *, metric: str = "l2") -> Tensor:
        """Map hidden states of the reader to the space of the stored keys, (N, model width) → (N, D).

        Distances do not change when keys and queries are shifted by the same vector; inner products do, by `origin`.
        """
        if metric == "ip":
            return queries if self.map is None else queries.float() @ self.map.on(queries.device)[0]
        if self.offset is not None:
            if queries.device not in self._offsets:  # copied there once: the host would wait at every token
                self._offsets[queries.device] = self.offset.to(queries.device)
            queries = queries - self._offsets[queries.device]
        return queries if self.map is None else self.map.apply(queries)

    def chunks(self, size: int, *, begin: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Return (number of the first key, (n, D) float32 keys) of the keys from `begin` on."""
        # Blocks do not depend on the segments, so that equal keys are compared in equal matrix products.
        number, rows, block = begin, 0, torch.empty(0)
        for segment, first, total in self._stretches(begin, size):
            for local, count in ((first, min(total, size - rows)), (first + size - rows, total - size + rows)):
                if count <= 0:
                    continue
                stored = np.empty((count, self.codec.columns), self.codec.dtype)
                self.arrays.read(segment, local, stored)
                keys = self.codec.decode(torch.from_numpy(stored), segment.scale)
                if count < size:
                    block = torch.empty(size, keys.shape[1]) if not rows else block
                    block[rows : rows + count] = keys
                rows += count
                if rows == size:
                    yield number, keys if count == size else block
                    number, rows = number + size, 0
        if rows:
            yield number, block[:rows]

    def _stretches(self, begin: int, size: int) -> Iterator[tuple[SegmentRow, int, int]]:
        """Return (segment, first key in it, count) of the live keys from `begin` on, at most `size` at a time."""
        lowest = int(self.key_numbers.to_stored(np.array([begin]))[0])
        for number, (first, end) in enumerate(pairwise(self._key_starts.tolist())):
            for start, count in self.key_numbers.stretches(max(first, lowest), end):
                for local in range(start - first, start - first + count, size):
                    yield self._segments[number], local, min(size, start - first + count - local)

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, W) tensor of the codec's dtype with the stored keys from `first` on."""
        done = 0
        for segment, local, count in self._stretches(first, max(1, len(out))):
            count = min(count, len(out) - done)
            if not count:
                return
            self.arrays.read(segment, local, out[done : done + count].numpy())
            done += count

    def take(self, ids: Tensor) -> Tensor:
        """Return these keys, (…) → (…, D) float32; an id below 0 gives zeros."""
        flat = self.key_numbers.to_stored(ids.reshape(-1).cpu().numpy())
        # Stored keys are gathered first and decoded together: the neighbours of a token are in many segments.
        stored = torch.empty(len(flat), self.codec.columns, dtype=getattr(torch, self.codec.dtype))
        scales = np.ones((len(flat), 1), np.float32)
        for number, places, local in by_segment(flat, self._key_starts):
            segment = self._segments[number]
            mapped = self.arrays.keys(segment, local)
            begin, end = places[0], places[-1] + 1
            if end - begin > len(places):
                stored.numpy()[places] = mapped[local]
            elif len(places) < BULK_READ_KEYS:  # consecutive places: no copy is needed
                np.take(mapped, local, axis=0, out=stored[begin:end].numpy(), mode="clip")
            else:  # torch uses all cores, which pays off for many keys
                torch.index_select(as_tensor(mapped), 0, torch.from_numpy(local), out=stored[begin:end])
            scales[places] = segment.scale
        keys = self.codec.decode(stored, 1.0)
        if (scales != 1).any() and isinstance(self.codec, Plain):
            keys.mul_(torch.from_numpy(scales))
        if (missing := flat < 0).any():
            keys[torch.from_numpy(missing)] = 0.0
        return keys.reshape(*ids.shape, self.width)

    def entries_of(self, ids: Tensor) -> Tensor:
        """Return the entries that these keys belong to; an id below 0 stays."""
        if not self._pruned:
            return ids
        flat = self.key_numbers.to_stored(ids.reshape(-1).cpu().numpy())
        entries = np.full(len(flat), -1, dtype=np.int64)
        for number, places, local in by_segment(flat, self._key_starts):
            segment = self._segments[number]
            kept = local if segment.kept is None else self.arrays.mapped(segment, KEPT_FILE)[local].astype(np.int64)
            if kept.min(initial=0) < 0 or kept.max(initial=0) >= segment.entries:
                raise DatastoreCorrupt(
                    f"{self.arrays.folder(segment) / KEPT_FILE} names an entry beyond the "
                    f"{segment.entries:,} of the segment. Build the store again."
                )
            entries[places] = kept + segment.first_entry
        entries = self.entry_numbers.to_live(entries)
        return torch.from_numpy(entries).reshape(ids.shape).to(ids.device)

    def counts(self, ids: Tensor) -> Tensor | None:
        """Return the weights of these keys in a vote, (…) float32, 0 for an id below 0; None where all are 1."""
        if not self._counted:
            return None
        flat = self.key_numbers.to_stored(ids.reshape(-1).cpu().numpy())
        counts = np.zeros(len(flat), dtype=np.float32)
        for number, places, local in by_segment(flat, self._key_starts):
            segment = self._segments[number]
            weights = np.ones(1) if segment.counts_sha256 is None else self.arrays.mapped(segment, COUNTS_FILE)[local]
            if not (np.isfinite(weights) & (weights > 0)).all():
                raise DatastoreCorrupt(
                    f"{self.arrays.folder(segment) / COUNTS_FILE} contains counts that are not finite and "
                    "above 0. Build the store again, or restore the file."
                )
            counts[places] = weights
        return torch.from_numpy(counts).reshape(ids.shape).to(ids.device)

    @property
    def looks_up_on_device(self) -> bool:
        """Whether the tokens of neighbours on a GPU are looked up there, and nothing is read from files."""
        return not self._pruned and not self._counted and self.entry_count <= _MAX_DEVICE_TOKENS

    def values(self, entries: Tensor) -> Tensor:
        """Return the tokens of these entries, on their device; -1 for an entry below 0."""
        if self.entry_count <= (_MAX_RESIDENT_TOKENS if entries.device.type == "cpu" else _MAX_DEVICE_TOKENS):
            return self._resident(entries)
        flat = self.entry_numbers.to_stored(entries.reshape(-1).cpu().numpy())
        values = np.full(len(flat), -1, dtype=np.int64)
        for number, places, local in by_segment(flat, self._starts):
            values[places] = self.arrays.mapped(self._segments[number], VALUES_FILE)[local]
        self._check_values(values)
        return torch.from_numpy(values).reshape(entries.shape).to(entries.device)

    def _resident(self, entries: Tensor) -> Tensor:
        """Look tokens up in one array on the caller's device: a query with a thousand neighbours is many lookups."""
        if entries.numel() and check_flag(entries.amax() >= self.entry_count):
            raise IndexError(f"entry {int(entries.max())} of {self.entry_count}")
        if entries.device not in self._values:
            values = np.empty(self.entry_count, np.int32)
            done = 0
            for segment in self._segments:  # one after another: each mapping holds a file handle
                mapped, first = self.arrays.open(segment, VALUES_FILE), segment.first_entry
                for start, count in self.entry_numbers.stretches(first, first + segment.entries):
                    values[done : done + count] = mapped[start - first : start - first + count]
                    done += count
            self._check_values(values)
            self._values[entries.device] = torch.from_numpy(values).to(entries.device)
        values_here = self._values[entries.device]
        if not len(values_here):
            return torch.full_like(entries, -1)
        return values_here[entries.clamp(min=0)].long().masked_fill_(entries < 0, -1)

    def _check_values(self, values: NDArray[Any]) -> None:
        if values.max(initial=-1) >= self.model["vocab_size"] or values.min(initial=0) < -1:
            raise DatastoreCorrupt(f"{self.path} contains a token that its model does not have. Build the store again.")

    @property
    def has_pairs(self) -> bool:
        """Whether its documents are pairs of a source and a target, read by an encoder-decoder model."""
        return self.model.get("encoder_decoder") is True

    def holds(self, text: str, source_text: str | None = None) -> bool:
        """Whether a document with exactly this text, of a pair with this source text, is stored."""
        return self.catalog.has_text(text_hash(text, source_text))

    def documents(self) -> Iterator[StoredDocument]:
        """Return the documents in the order of their entries, without holding them all in memory."""
        return map(self._renumbered, self.catalog.documents())

    def document_at(self, entry: int) -> StoredDocument:
        """Return the document that an entry belongs to."""
        stored = int(self.entry_numbers.to_stored(np.array([entry]))[0])
        document = self.catalog.document_at(stored)
        if not document.first_entry <= stored < document.first_entry + document.entries <= self.entry_numbers.total:
            raise DatastoreCorrupt(
                f"{self.catalog.path} has no document of entry {entry}. Run knnlm repair {self.path}"
            )
        return self._renumbered(document)

    def document_numbered(self, number: int) -> StoredDocument | None:
        """Return the document with this number by a binary search, None where there is none with entries."""
        if isinstance(self.catalog, ShardedCatalog):
            if (place := self.catalog.locate_document(number)) is None:
                return None
            shard, local = place
            if (found := self.shards[shard].document_numbered(local)) is None:
                return None
            first = found.first_entry + sum(before.entry_count for before in self.shards[:shard])
            segment = found.segment + self.catalog.segment_starts[shard]
            return replace(found, number=number, segment=segment, first_entry=first)
        low, high = 0, self.entry_count - 1
        while low <= high:  # numbers ascend with entries
            document = self.document_at((low + high) // 2)
            if document.number == number:
                return document
            if document.number < number:
                low = document.first_entry + document.entries
            else:
                high = document.first_entry - 1
        return None

    def _renumbered(self, document: StoredDocument) -> StoredDocument:
        """Return the document with the live number of its first entry."""
        if self.entry_numbers.whole:
            return document
        return replace(document, first_entry=self.entry_numbers.before(document.first_entry))

    def around(self, entry: int, *, before: int = 20, after: int = 20) -> tuple[list[int], list[int]]:
        """Return the tokens before an entry in its document, and those from it on."""
        document = self.document_at(entry)
        begin = max(document.first_entry, entry - before)
        end = min(document.first_entry + document.entries, entry + after)
        return self.values(torch.arange(begin, entry)).tolist(), self.values(torch.arange(entry, end)).tolist()

    def add(
        self, documents: Iterable[Document], *, lm: CausalLM, wait: float = 0.0, progress: Progress = silent
    ) -> Added:
        """Add documents, all or none, and show them in this store; see `knnlm.ingest.build`."""
        from knnlm.ingest.build import add

        with self._closed():
            return add(documents, self.path, lm=lm, wait=wait, progress=progress)

    def remove(
        self,
        *,
        document: str | None = None,
        source: str | None = None,
        where: str | tuple[str, ...] = (),
        dry_run: bool = False,
        wait: float = 0.0,
    ) -> Removed:
        """Remove documents by id, by a pattern of their source or by `field=value`; see `knnlm.datastore.remove`."""
        from knnlm.datastore.remove import remove

        with self._closed():
            return remove(self.path, document=document, source=source, where=where, dry_run=dry_run, wait=wait)

    def compact(
        self, *, segment_entries: int | None = None, wait: float = 0.0, progress: Progress = silent
    ) -> Compacted:
        """Erase removed documents, merge small segments and build the index again; see `knnlm.datastore.compact`."""
        from knnlm.datastore.compact import compact

        with self._closed():
            return compact(self.path, segment_entries=segment_entries, wait=wait, progress=progress)

    def verify(self, *, deep: bool = False, progress: Progress = silent) -> Verification:
        """Check the files against the catalog; `deep` reads every byte."""
        from knnlm.maintenance.verify import verify

        return verify(self.path, deep=deep, trust_index=self.trust_index, progress=progress)

    def build_index(
        self, spec: str = "auto", *, metric: str = "l2", wait: float = 0.0, progress: Progress = silent
    ) -> str:
        """Build an index over the keys and return its spec, `exact` where none is needed."""
        from knnlm.datastore.indexes import build_index

        return build_index(self, spec, metric=metric, wait=wait, progress=progress)

    def compress(
        self, out: str | Path, *, key_format: str = "codes", seed: int = 0, progress: Progress = silent
    ) -> Datastore:
        """Write a copy whose keys are stored as int8, pca256-int8, codes64 and so on, and open it."""
        from knnlm.datastore.rewrite import compress

        return compress(self, out, key_format=key_format, seed=seed, progress=progress)

    def export(
        self,
        out: str | Path,
        *,
        format: str = "parquet",  # noqa: A002  (the option's name)
        progress: Progress = silent,
    ) -> ExportResult:
        """Write every entry to Parquet files."""
        from knnlm.maintenance.export import export

        return export(self.path, out, format=format, progress=progress)

    @contextmanager
    def _closed(self) -> Iterator[None]:
        """Close the store for a change, as an open store keeps replaced files on disk, and show the result.

        A pinned store stays a snapshot: its index relies on the numbers of entries. `reopen` shows the change.
        """
        if self.pinned:
            yield
            return
        self.close()
        try:
            yield
        finally:
            vars(self).update(vars(self.reopen()))

    def close(self) -> None:
        """Close the files, so that writers can remove those that were replaced."""
        for store in (self, *self.shards):
            store.catalog.close()
            if store.reader_lock is not None:
                store.reader_lock.close()

    def _number_keys(self) -> LiveNumbers:
        """Return the numbers of keys without those of removed entries."""
        if not self._pruned:
            return self.entry_numbers
        gaps = []
        for segment, first in zip(self._segments, self._key_starts.tolist(), strict=False):
            for start, count in self.entry_numbers.gaps:
                local = start - segment.first_entry
                if 0 <= local < segment.entries:
                    kept = np.arange(segment.entries) if segment.kept is None else self.arrays.open(segment, KEPT_FILE)
                    low, high = np.searchsorted(kept, [local, local + count]).tolist()
                    gaps.append((first + low, high - low))
        return LiveNumbers(int(self._key_starts[-1]), gaps)


def _locator(path: Path, catalog: Catalog, shards: Sequence[Datastore]) -> Locate:
    """Return a function from the number of a segment to its place; it has no reference to the store."""
    if not isinstance(catalog, ShardedCatalog):
        return lambda number: (path, number)
    starts, folders = catalog.segment_starts, [shard.path for shard in shards]

    def find(number: int) -> tuple[Path, int]:
        shard, local = locate(starts, number)
        return folders[shard], local

    return find


def key_identity(store: Datastore) -> dict[str, Any]:
    """Return what shards must have in common beside the reader and its windows: the form of their keys."""
    hashes = {name: (store.catalog.get(name) or {}).get("sha256") for name in ("map", "codec")}
    offset = None if store.offset is None else hashlib.sha256(store.offset.numpy().tobytes()).hexdigest()
    return {"format": store.storage, "dtype": store.key_dtype, "offset": offset, **hashes}


def form_of(store: Datastore) -> dict[str, dict[str, Any]]:
    """Return what all shards of a store must have in common."""
    return {"model": store.model, "window": store.window, "keys": key_identity(store)}


def form_difference(one: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]]) -> tuple[str, str, str] | None:
    """Return the first difference of two stores that cannot be shards of one, with both values; None: there is none.

    The name of a model is a path, and the digits of its weights depend on their precision: neither makes a difference.
    """
    whole = all("weights" in each["model"] for each in (one, two))  # not of imported arrays
    if whole and (differing := identity_difference(one["model"], two["model"])) is not None:
        return f"model {differing[0]}", shorten(differing[1]), shorten(differing[2])
    for name in ("model", "window", "keys"):
        for part in {**one[name], **two[name]}:
            values = one[name].get(part), two[name].get(part)
            if values[0] != values[1] and not (whole and (name, part) in _MAY_DIFFER):
                return f"{name} {part.replace('_', ' ')}", shorten(values[0]), shorten(values[1])
    return None


def shorten(value: Any) -> str:
    """Return a value for a message."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check_place(folder: Path, place: Path) -> None:
    """Raise if a shard of a sharded store is not at its place, or not an ordinary store."""
    if place.resolve() == folder.resolve():
        raise DatastoreCorrupt(f"{folder} lists itself as one of its shards. Join them again.")
    if not (place / CATALOG_FILE).is_file():
        raise DatastoreError(
            f"{folder}: its shard {place} is missing. If it was moved, name the new places: knnlm shards join SHARD... "
            f"--out {folder} --replace"
        )
    if is_sharded(place):
        raise DatastoreCorrupt(f"{folder}: its shard {place} is a sharded store itself. Join the shards of both.")


def check_shard(folder: Path, manifest: Manifest, listed: Shard, shard: Datastore) -> None:
    """Raise if a shard is not the one that the manifest lists; documents may have been added to it or removed."""
    again = f"If this is intended, join again: knnlm shards join SHARD... --out {folder} --replace"
    if (difference := form_difference(manifest.form, form_of(shard))) is not None:
        what, expected, value = difference
        raise ModelMismatch(f"{shard.path} is no shard of {folder}: its {what} is {value}, not {expected}. {again}")
    same = shard.generation == listed.generation
    if shard.generation < listed.generation or (same and shard.fingerprint != listed.fingerprint):
        raise DatastoreError(f"{shard.path} is another store than the shard of {folder} at this place. {again}")


def check_different(folder: Path, shards: Sequence[Datastore]) -> None:
    """Raise if one shard lies at the places of two: a copy would answer in place of the other one."""
    seen: dict[str, Datastore] = {}
    for shard in shards:
        other = seen.setdefault(shard.fingerprint, shard) if shard.entry_count else shard
        if other is not shard:
            raise DatastoreError(
                f"{shard.path} is a copy of {other.path}, not another shard of {folder}. Put the shard of this place "
                f"back, or name other ones: knnlm shards join SHARD... --out {folder} --replace"
            )


def _starts(sizes: list[int]) -> NDArray[np.int64]:
    """Return the begin of each segment, followed by the end of the last one."""
    return np.cumsum([0, *sizes], dtype=np.int64)


def text_hash(text: str, source_text: str | None = None) -> str:
    """Return the SHA-256 by which a document's text, or a pair, is recognised."""
    # No text contains NUL, so two different pairs are different texts.
    return hashlib.sha256((text if source_text is None else f"{source_text}\0{text}").encode()).hexdigest()


def check_folder(folder: Path) -> None:
    """Raise for a folder that contains anything but a store."""
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    if is_sharded(folder):
        raise DatastoreError(f"{folder} is a sharded store already. Choose another --out.")
    ours = {WRITER_LOCK, READERS_LOCK, *PARTIAL_CATALOG_FILES, DECODER_FOLDER, f"{DECODER_FOLDER}.partial"}
    ours |= {MAP_FILE, CODEC_FILE}
    ours |= {Path(file).with_suffix(".partial").name for file in (MAP_FILE, CODEC_FILE)}
    if folder.exists() and not (folder / CATALOG_FILE).exists():
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
        if foreign:
            raise DatastoreError(
                f"{folder} is not empty (it contains {foreign[0]}) and is not a store. Choose another --out."
            )


def next_segment(folder: Path, catalog: SegmentSink) -> int:
    """Return a number that no segment or leftover folder has had."""
    names = (path.name.partition(".")[0] for path in (folder / "segments").glob("[0-9]*"))
    return max(catalog.next_segment(), *(int(name) + 1 for name in names if name.isdigit()), 0)
