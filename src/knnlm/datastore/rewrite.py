"""Copies of a store with fewer keys, mapped keys or another key format.

`derive` writes every such copy; `principal_components` and `compress` fit a map or a codec for it to a sample of keys.
All tokens and documents are copied, so that the text around a neighbour is available; only keys are left out. Segments
are committed one by one, as in a build: a copy that was killed resumes after the last committed segment and ends with
the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog
from knnlm.datastore.codecs import (
    Bytes,
    Codec,
    Codes,
    KeyMap,
    Plain,
    fit_codec,
    fit_components,
    parse_storage,
    save_codec,
)
from knnlm.datastore.encoder import CodeWriter
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import (
    CATALOG_FILE,
    CODEC_FILE,
    COUNTS_FILE,
    KEPT_FILE,
    KEYS_FILE,
    MAP_FILE,
    VALUES_FILE,
    SegmentRow,
    segment_folder,
)
from knnlm.datastore.segments import KEY_DTYPES, KeyWriter, NewSegment
from knnlm.datastore.store import Datastore, check_folder
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.io import remove_unlisted
from knnlm.progress import Advance, Progress, silent

_PCA_SAMPLE_KEYS = 100_000
_CODEC_SAMPLE_BYTES = 1 << 27  # of keys, in float32, that a codec is fitted to
_SAMPLE_BLOCK = 4096  # keys of a sample at a time
_BLOCK = 8192  # keys of a copy at a time


@dataclass(frozen=True)
class _Plan:
    """The content of the new store."""

    store: Datastore
    keep: NDArray[np.bool_] | None  # over the keys of `store`; None: all
    counts: NDArray[np.float32] | None  # over the keys of `store`; None: as in `store`
    map: KeyMap | None
    codec: Codec

    def identity(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return what distinguishes this plan from any other, so that only the same plan is resumed."""
        arrays: dict[str, NDArray[Any] | None] = {
            "keep": self.keep,
            "counts": self.counts,
            "matrix": None if self.map is None else self.map.matrix.float().cpu().numpy(),
            "centre": None if self.map is None else self.map.centre.float().cpu().numpy(),
        }
        if isinstance(self.codec, Bytes | Codes):
            arrays |= {name: tensor.cpu().numpy() for name, tensor in self.codec.tensors().items()}
        hashes = {name: None if array is None else _hash(array) for name, array in arrays.items()}
        return {"from": self.store.fingerprint, "key_dtype": self.codec.dtype, **hashes, "metadata": metadata}


def derive(
    store: Datastore,
    out: str | Path,
    *,
    keep: Tensor | None = None,
    counts: Tensor | None = None,
    key_map: KeyMap | None = None,
    key_dtype: str | None = None,
    codec: Codec | None = None,
    metadata: dict[str, Any] | None = None,
    progress: Progress = silent,
) -> Datastore:
    """Write a copy of a store with the keys that `keep` selects (a mask, or numbers), weighted and mapped.

    `counts` are the weights of all keys of `store`. Its map, if it has one, is applied before the new one. Keys are
    stored by `codec`, or as numbers of `key_dtype`, or as before; bytes and codes that are mapped become float16.
    `metadata` is kept in the catalog.
    """
    plan = _plan(store, keep, counts, key_map, codec or _codec(store, key_map, key_dtype))
    folder = Path(out)
    check_out(store, folder)
    with writer_lock(folder, create=True):
        check_out(store, folder)  # another process may have finished it meanwhile
        catalog = _begin(folder, plan, plan.identity(metadata or {}))
        try:
            _copy(folder, catalog, plan, progress)
            catalog.put(state="complete")
        finally:
            catalog.close()
    return Datastore.open(folder)


def compress(
    store: Datastore, out: str | Path, *, key_format: str = "codes", seed: int = 0, progress: Progress = silent
) -> Datastore:
    """Write a copy of a store whose keys are stored as int8, pca256-int8, codes64 and so on, and open it.

    The codec is fitted to keys of the whole store; that of a build, only to the first ones.
    """
    storage = parse_storage(key_format, width=store.width)
    check_out(store, out)
    if not store.key_count:
        raise ParameterError(f"{store.path} has no keys to compress.")
    metadata: dict[str, Any] = {"keys": str(storage), "seed": seed}
    if not storage.fitted:
        return derive(store, out, codec=Plain(storage.dtype, store.width), metadata=metadata, progress=progress)
    ids = sample_keys(store, max(1, _CODEC_SAMPLE_BYTES // (4 * store.width)), seed=seed)
    sample = torch.empty(len(ids), store.width)
    with progress("choosing a codec", total=len(ids), unit="keys") as advance:
        for begin in range(0, len(ids), _SAMPLE_BLOCK):
            sample[begin : begin + _SAMPLE_BLOCK] = store.take(ids[begin : begin + _SAMPLE_BLOCK])
            advance(len(ids[begin : begin + _SAMPLE_BLOCK]))
    key_map, codec = fit_codec(storage, sample)
    del sample
    return derive(store, out, key_map=key_map, codec=codec, metadata=metadata, progress=progress)


def check_out(store: Datastore, out: str | Path) -> None:
    """Raise for an output folder that cannot take a copy of a store."""
    folder = Path(out)
    if folder.resolve() == store.path.resolve():
        raise ParameterError(f"{folder} is the store to copy from. Choose another --out.")
    check_folder(folder)
    if not (folder / CATALOG_FILE).exists():
        return
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        if catalog.get("state") == "complete":
            raise DatastoreError(f"{folder} is a finished store already. Choose another --out, or remove it first.")
        if catalog.get("derived") is None:
            raise DatastoreError(
                f"{folder} is an unfinished build, not a copy. Finish it with knnlm build, choose another --out, or "
                "remove it."
            )


def principal_components(store: Datastore, width: int, *, seed: int = 0, progress: Progress = silent) -> KeyMap:
    """Return the map to the first principal components of a sample of the keys."""
    ids = sample_keys(store, _PCA_SAMPLE_KEYS, seed=seed)
    if not len(ids):
        raise ParameterError(f"{store.path} has no keys, and so no principal components.")

    def blocks() -> Iterator[Tensor]:
        with progress("finding principal components", total=len(ids), unit="keys") as advance:
            for part in ids.split(_SAMPLE_BLOCK):
                yield store.take(part)
                advance(len(part))

    return fit_components(blocks(), width, sample=len(ids), seed=seed)[0]


def sample_keys(store: Datastore, size: int, *, seed: int) -> Tensor:
    """Return the numbers of `size` random keys, ascending; of all keys where there are no more."""
    if store.key_count <= size:
        return torch.arange(store.key_count)
    chosen = np.random.default_rng(seed).choice(store.key_count, size, replace=False)
    return torch.from_numpy(np.sort(chosen))


def _plan(store: Datastore, keep: Tensor | None, counts: Tensor | None, key_map: KeyMap | None, codec: Codec) -> _Plan:
    """Check the arguments of `derive`."""
    if key_map is not None and len(key_map.centre) != store.width:
        raise ParameterError(
            f"The map is for keys of width {len(key_map.centre)}, but those of {store.path} have {store.width}."
        )
    mask = _mask(store, keep)
    weights = None
    if counts is not None:
        weights = counts.detach().cpu().numpy().astype(np.float32)
        if weights.shape != (store.key_count,):
            raise ParameterError(
                f"counts has shape {weights.shape}, but {store.path} has {store.key_count:,} keys: one number each."
            )
        used = weights if mask is None else weights[mask]
        if not (np.isfinite(used) & (used > 0)).all():
            raise ParameterError("counts must be finite and above 0 for every key that is kept.")
    width = store.width if key_map is None else key_map.width
    if codec.width != width:
        raise ParameterError(f"The codec is for keys of width {codec.width}, but those of the copy have {width}.")
    return _Plan(store, mask, weights, key_map, codec)


def _codec(store: Datastore, key_map: KeyMap | None, key_dtype: str | None) -> Codec:
    """Return the codec of a copy for which none is given."""
    if key_dtype is not None and key_dtype not in KEY_DTYPES:
        raise ParameterError(f"Unknown key dtype {key_dtype!r}: use {' or '.join(KEY_DTYPES)}.")
    if isinstance(store.codec, Plain):
        return Plain(key_dtype or store.codec.dtype, store.width if key_map is None else key_map.width)
    # Encoding a decoded key restores its bytes, or others that decode to the same float32: nothing is lost.
    if key_map is None:
        return store.codec if key_dtype is None else Plain(key_dtype, store.width)
    return Plain(key_dtype or "float16", key_map.width)


def _mask(store: Datastore, keep: Tensor | None) -> NDArray[np.bool_] | None:
    """Return a mask or numbers of keys as a mask; None where all are kept."""
    if keep is None:
        return None
    keep = keep.detach().cpu()
    if keep.dtype != torch.bool:
        if keep.ndim != 1 or (len(keep) and not 0 <= int(keep.min()) <= int(keep.max()) < store.key_count):
            raise ParameterError(f"keep names keys that are not among the {store.key_count:,} of {store.path}.")
        mask = torch.zeros(store.key_count, dtype=torch.bool)
        mask[keep.long()] = True
        return mask.numpy()
    if keep.shape != (store.key_count,):
        raise ParameterError(
            f"keep has shape {tuple(keep.shape)}, but {store.path} has {store.key_count:,} keys: one truth value each."
        )
    return keep.numpy()


def _begin(folder: Path, plan: _Plan, derived: dict[str, Any]) -> Catalog:
    """Create a catalog, or open that of an unfinished copy with the same settings."""
    file = folder / CATALOG_FILE
    if not file.exists():
        store = plan.store
        meta: dict[str, Any] = {
            "state": "building",
            "model": store.model,
            "window": store.window,
            "key_dtype": plan.codec.dtype,
            "offset": None if store.offset is None else store.offset.tolist(),
            "derived": derived,
        }
        key_map = store.map if plan.map is None else plan.map.after(store.map)
        if key_map is not None:
            meta["map"] = {"sha256": key_map.save(folder / MAP_FILE), "metadata": key_map.metadata}
        if isinstance(plan.codec, Bytes | Codes):
            meta["codec"] = save_codec(plan.codec, folder / CODEC_FILE)
            meta["keys"] = derived["metadata"].get("keys") or store.catalog.get("keys")
        if (language_model := store.catalog.get(LANGUAGE_MODEL)) is not None:
            meta[LANGUAGE_MODEL] = language_model
        return Catalog.create(file, meta)
    catalog = Catalog.open(file, write=True, copying=True)
    if catalog.get("derived") != derived:
        catalog.close()
        raise DatastoreError(
            f"{folder} is an unfinished copy of another store, or with other settings. Finish it with the same "
            "command, or remove it."
        )
    remove_unlisted(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
    return catalog


@dataclass(frozen=True)
class _LiveSegment:
    """The live entries and keys of a segment, and its number in the copy."""

    segment: SegmentRow
    number: int
    first_entry: int
    entries: int
    first_key: int
    keys: int
    sources: tuple[int, ...]  # segments whose documents go with it: documents without entries outlive their segment


def _live_segments(store: Datastore) -> list[_LiveSegment]:
    """Return the segments with live entries; documents of the others go to the next segment, or to the last."""
    segments, stored = list[_LiveSegment](), 0
    waiting: tuple[int, ...] = ()
    for segment in store.segments:
        first, first_key = store.entry_numbers.before(segment.first_entry), store.key_numbers.before(stored)
        stored += segment.keys
        entries = store.entry_numbers.before(segment.first_entry + segment.entries) - first
        waiting += (segment.id,)
        if entries:
            keys = store.key_numbers.before(stored) - first_key
            segments.append(_LiveSegment(segment, len(segments), first, entries, first_key, keys, waiting))
            waiting = ()
    if segments:
        segments[-1] = replace(segments[-1], sources=segments[-1].sources + waiting)
    return segments


def _copy(folder: Path, catalog: Catalog, plan: _Plan, progress: Progress) -> None:
    """Write the segments that are missing."""
    done = len(catalog.segments())
    store = plan.store
    with progress("writing keys", total=store.key_count, unit="keys") as advance:
        for live in _live_segments(store):
            if live.number < done:
                advance(live.keys)
                continue
            row = _copy_segment(folder, plan, live, advance)
            documents = [document for source in live.sources for document in store.catalog.documents_of(source)]
            before = store.entry_numbers.before
            catalog.add_segment(
                row,
                (replace(each, segment=live.number, first_entry=before(each.first_entry)) for each in documents),
            )


def _copy_segment(folder: Path, plan: _Plan, live: _LiveSegment, advance: Advance) -> SegmentRow:
    """Write one segment and return its row of the catalog."""
    new = NewSegment(folder, live.number)
    kept = np.arange(live.first_key, live.first_key + live.keys)
    if plan.keep is not None:
        kept = kept[plan.keep[kept]]
    divisor = _write_keys(new.place(KEYS_FILE), plan, kept, live.keys, advance)
    _write_values(new, plan.store, live.segment)
    entries = plan.store.entries_of(torch.from_numpy(kept)).numpy() - live.first_entry
    weights = _weights(plan, kept)
    pruned = len(entries) < live.entries or weights is not None
    for name, dtype, array in ((KEPT_FILE, "int32", entries if pruned else None), (COUNTS_FILE, "float32", weights)):
        if array is not None:
            with new.array(name, dtype) as writer:
                writer.append(array)
    sums = new.seal()
    return SegmentRow(
        live.number,
        live.first_entry,
        live.entries,
        divisor,
        sums[KEYS_FILE],
        sums[VALUES_FILE],
        len(entries) if pruned else None,
        sums.get(KEPT_FILE),
        sums.get(COUNTS_FILE),
    )


def _write_keys(path: Path, plan: _Plan, kept: NDArray[np.int64], total: int, advance: Advance) -> float:
    """Write these keys of the old store and return their divisor."""
    writer = _write_mapped(path, plan, kept, total, advance)
    if isinstance(writer, KeyWriter) and writer.finer_divisor < 1:
        # A map may shrink keys below the precision of float16, which shows only after all are mapped.
        writer = _write_mapped(path, plan, kept, 0, advance, divisor=writer.finer_divisor)
    return writer.divisor


def _write_mapped(
    path: Path, plan: _Plan, kept: NDArray[np.int64], total: int, advance: Advance, *, divisor: float = 1.0
) -> KeyWriter | CodeWriter:
    """Write these keys of the old store, divided, and advance the progress by `total`."""
    advanced = 0
    codec = plan.codec
    plain = isinstance(codec, Plain)
    with KeyWriter(path, codec.dtype, codec.width, divisor=divisor) if plain else CodeWriter(path, codec) as writer:
        for begin, keys in _blocks(plan.store, kept):
            mapped = keys if plan.map is None else plan.map.apply(keys)
            if not mapped.isfinite().all():
                raise DatastoreCorrupt(
                    f"{plan.store.path} has keys that are not finite, or not after the map. Build the store again."
                )
            writer.put_keys(np.arange(begin, begin + len(keys)), mapped.numpy())
            share = total * (begin + len(keys)) // len(kept)
            advance(share - advanced)
            advanced = share
    advance(total - advanced)
    return writer


def _blocks(store: Datastore, kept: NDArray[np.int64]) -> Iterator[tuple[int, Tensor]]:
    """Return (number in the new segment, keys) of the kept keys in blocks."""
    for begin in range(0, len(kept), _BLOCK):
        yield begin, store.take(torch.from_numpy(kept[begin : begin + _BLOCK]))


def _write_values(new: NewSegment, store: Datastore, segment: SegmentRow) -> None:
    """Copy the live tokens of a segment."""
    first = segment.first_entry
    stretches = store.entry_numbers.stretches(first, first + segment.entries)
    with new.array(VALUES_FILE, "int32") as writer:
        for piece in store.arrays.copy(segment, VALUES_FILE, ((start - first, count) for start, count in stretches)):
            writer.append(piece)


def _weights(plan: _Plan, kept: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return the weights of the kept keys; None where all are 1."""
    if plan.counts is not None:
        weights = plan.counts[kept]
    else:
        found = plan.store.counts(torch.from_numpy(kept))
        if found is None:
            return None
        weights = found.numpy()
    return None if (weights == 1).all() else weights


def _hash(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
