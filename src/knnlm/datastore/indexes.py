"""Build the index of a store, open it, and record an index that is still to be built after an interruption."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from knnlm.datastore.catalog import REQUESTED_INDEX, SKIPPED, Catalog
from knnlm.datastore.codecs import Codes
from knnlm.datastore.garbage import purge
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.paths import CATALOG_FILE, index_folder
from knnlm.datastore.rowmap import RowMap
from knnlm.datastore.schema import IndexRow
from knnlm.datastore.segments import BLOCKS, INDEX, index_file
from knnlm.datastore.store import Datastore, Keys
from knnlm.datastore.validation import check_place
from knnlm.errors import DatastoreCorrupt, IndexInvalid
from knnlm.index.base import Index, check_metric
from knnlm.index.blocks import is_blocks
from knnlm.index.blocks.build import write_blocks
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.composite import ConcatenatedIndex, FilteredIndex
from knnlm.index.exact import ExactIndex, fits_on_device, has_kernels
from knnlm.index.factory import compressed_spec, default_spec, fallback_spec
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import RerankedIndex
from knnlm.index.validation import check_index
from knnlm.io import atomic_folder, checksum, translate_os_errors
from knnlm.progress import Progress, silent

_DEEP = 3.0  # times k


def build_index(
    store: Datastore, spec: str = "auto", *, metric: str = "l2", wait: float = 0.0, progress: Progress = silent
) -> str:
    """Make an index for a store as it is now and return its factory string, or `exact` where none is needed."""
    check_metric(metric)
    with writer_lock(store.path, wait=wait), closing(Catalog.open(store.path / CATALOG_FILE, write=True)) as catalog:
        current = store.reopen() if store.stale else store
        try:
            return _replace_index(current, catalog, spec, metric, progress)
        finally:
            if current is not store:
                current.close()


def _replace_index(store: Datastore, catalog: Catalog, spec: str, metric: str, progress: Progress) -> str:
    purge(store.path, catalog, lease=store.lease)
    if spec == "auto":
        spec = choose_spec(store)
    made = None if spec == "exact" else make_index(store, catalog, spec, metric, progress)
    catalog.replace_indexes(made, skipped=store.key_numbers.gaps)
    purge(store.path, catalog, lease=store.lease)
    return "exact" if made is None else made.spec


def choose_spec(store: Datastore) -> str:
    """Choose an index by how many keys there are, and by how they are stored; `exact` where none is needed."""
    if isinstance(store.codec, Codes):
        return compressed_spec(store.key_count, store.width)
    return default_spec(store.key_count)


def make_index(store: Datastore, catalog: Catalog, spec: str, metric: str, progress: Progress) -> IndexRow:
    """Write an index over the keys that are there; it is used from when its row is in the catalog."""
    number = next_index(store.path, catalog)
    folder = index_folder(store.path, number)
    with translate_os_errors(folder), atomic_folder(folder) as partial:
        spec, name = _write_index(store, spec, metric, partial, progress)
    return IndexRow(number, spec, metric, store.key_count, checksum(folder / name))


def _write_index(store: Datastore, spec: str, metric: str, folder: Path, progress: Progress) -> tuple[str, str]:
    """Write an index that passes its validation and return its spec and the name of its file.

    Where the automatic choice fails the validation, the fallback takes its place.
    """
    index: BlockIndex | FaissIndex
    try:
        if is_blocks(spec):
            write_blocks(store.keys, spec, folder / BLOCKS, metric=metric, progress=progress)
            index = BlockIndex.load(folder / BLOCKS)
        else:
            index = FaissIndex.build(store.keys, spec, metric=metric, progress=progress)
        check_index(index, store.keys, what=f"The new index {spec}", precise=_votes_itself(index))
    except IndexInvalid:
        if spec != choose_spec(store) or isinstance(store.codec, Codes):
            raise
        (folder / BLOCKS).unlink(missing_ok=True)
        return _write_index(store, fallback_spec(store.key_count), metric, folder, progress)
    if isinstance(index, FaissIndex):
        index.save(folder / INDEX)
        return spec, INDEX
    return spec, BLOCKS


def next_index(path: Path, catalog: Catalog) -> int:
    """Return a number that neither an index nor a leftover folder has."""
    taken = [row.id for row in catalog.indexes()]
    taken += [int(entry.name) for entry in (path / "index").glob("[0-9]*") if entry.name.isdigit()]
    return max(taken, default=-1) + 1


def open_index(
    store: Datastore, *, metric: str = "l2", rerank: bool = True, device: str = "cpu", keys: str = "float16"
) -> Index:
    """Open the store's index after checking it, or search exactly where there is none for this metric.

    Where a GPU can hold all keys, exact search there is faster than any index on the CPU, so that one is used only
    where its own distances are wanted. `keys` is what the GPU holds keys in; int8 gives distances to rounded keys.
    """
    store.pinned = True
    if (rerank or keys == "int8") and has_kernels(device) and fits_on_device(store.keys, device, keys):
        return ExactIndex(store.keys, metric=metric, device=device, key_dtype=keys)
    for row, covered in stored_indexes(store) if store.trust_index else []:
        if row.metric == metric:
            return _join(store, _open(store, row, covered), covered, rerank=rerank)
    return ExactIndex(store.keys, metric=metric, device=device, key_dtype=keys)


def stored_indexes(store: Datastore) -> list[tuple[IndexRow, RowMap]]:
    """List the indexes of a store, and which stored keys each has.

    Also one that was made after the store was opened, as long as keys have the same numbers and it has left out none
    that this store still has; else those that the store saw when it was opened, which its lease keeps in their place.
    """
    with closing(store.catalog.latest()) as now, now.snapshot():
        newest = _covering(store, now) if now.layout == store.layout else None
    gone = store.key_numbers
    if newest is not None and all(
        not any(True for _ in gone.stretches(first, min(first + count, gone.total)))
        for _, covered in newest
        for first, count in covered.gaps
    ):
        return newest
    seen = _covering(store, store.catalog)
    # One that this store has itself replaced is gone, and what came after it is of no use here.
    return [(row, covered) for row, covered in seen if index_file(store.path, row).is_file()]


def _covering(store: Datastore, catalog: Catalog) -> list[tuple[IndexRow, RowMap]]:
    """List the indexes that a catalog names, and which stored keys each has."""
    rows, skipped = catalog.indexes(), catalog.get(SKIPPED) or []
    gaps = list[tuple[int, int]]()
    for gap in skipped if isinstance(skipped, list) else [None]:
        # Numbers of keys stay far below this, and sums of them in 64 bits.
        if not (
            isinstance(gap, list) and len(gap) == 2 and all(type(one) is int and 0 <= one < 1 << 48 for one in gap)
        ):
            raise DatastoreCorrupt(
                f"{store.catalog.path} does not say what the index covers. Make it again with: knnlm index {store.path}"
            )
        gaps.append((gap[0], gap[1]))
    gone = sum(count for _, count in gaps)
    return [(row, RowMap(row.entries + gone, gaps)) for row in rows]


def _open(store: Datastore, row: IndexRow, covered: RowMap) -> FaissIndex | BlockIndex:
    """Read an index that must have as many keys as the catalog says."""
    path = index_file(store.path, row)
    if not path.is_file():
        raise DatastoreCorrupt(f"{path} is missing. Make it again with: knnlm index {store.path}")
    check_place(store.path, path)
    index = _read(store, row, path)
    # One that is newer than what the store has seen may have more; one as old as a build may not have fewer.
    known = store.key_numbers.total
    fewer = store.generation == 0 and covered.total < known
    more = covered.total > known and row in store.catalog.indexes()
    if fewer or more or (index.rows, index.width) != (row.entries, store.width):
        raise IndexInvalid(
            f"{path} holds {index.rows:,} vectors of width {index.width}, but the store has "
            f"{store.key_count:,} of width {store.width}. Make it again with: knnlm index {store.path}"
        )
    return index


def _read(store: Datastore, row: IndexRow, path: Path) -> FaissIndex | BlockIndex:
    """Read the file of an index, if it is the one that was written."""
    advice = f"Make it again with: knnlm index {store.path}"
    if is_blocks(row.spec):
        try:
            blocks = BlockIndex.load(path, check_bytes=partial(store.arrays.sums.stretches, path, row.sha256))
        except DatastoreCorrupt:
            raise IndexInvalid(f"{path} is not the file that was written. {advice}") from None
        if blocks.metric != row.metric:
            raise IndexInvalid(f"{path} was made for the metric {blocks.metric}, not {row.metric}. {advice}")
        return blocks
    if checksum(path) != row.sha256:
        raise IndexInvalid(f"{path} is not the file that was written, and FAISS reads no other. {advice}")
    return FaissIndex.load(path, metric=row.metric)


def _join(store: Datastore, index: FaissIndex | BlockIndex, covered: RowMap, *, rerank: bool) -> Index:
    """Leave out of an index what is gone, check it, and search beside it what is newer."""
    what = f"The index {index_folder(store.path, 0).parent}"
    precise = _votes_itself(index)
    rerank = rerank and not precise
    known = store.key_numbers
    if known.gaps == covered.gaps and known.total == covered.total:
        check_index(index, store.keys, what=what, precise=precise)
        whole = FilteredIndex(index, None, store.keys)
        return _reranked(whole, store) if rerank else whole
    numbers = known.to_live(covered.to_stored(np.arange(index.rows)))
    first = known.before(min(covered.total, known.total))  # keys from here on are newer
    older = Keys(store, end=first)
    alive = FilteredIndex(index, numbers, older)
    if alive.rows:
        check_index(alive, older, what=what, precise=precise)
    found: Index = _reranked(alive, store) if rerank else alive
    if first == store.key_count:
        return found
    return ConcatenatedIndex(found, ExactIndex(Keys(store, first), metric=index.metric), first=first)


def _votes_itself(index: FaissIndex | BlockIndex) -> bool:
    """Return whether an index gives distances that are good as they are: a byte for each dimension is enough."""
    return isinstance(index, BlockIndex) and index.keeps_all_dimensions


def _reranked(index: Index, store: Datastore) -> Index:
    """Measure a shortlist again on what is stored; that of a thin index is long, for it is only roughly in order."""
    if isinstance(store.codec, Codes):
        return RerankedIndex(index, store.keys, depth=_DEEP, measured=None)
    return RerankedIndex(index, store.keys)


def request_index(spec: str, metric: str) -> dict[str, Any]:
    """Return the metadata that requests an index."""
    return {"spec": spec, "metric": metric}


def requested_index(catalog: Catalog) -> tuple[str, str] | None:
    """Return spec and metric of the index that is still to be made; None where none is, or the fact is of no sense."""
    found = catalog.get(REQUESTED_INDEX)
    values = (found.get("spec"), found.get("metric")) if isinstance(found, dict) else (None, None)
    spec, metric = values
    return (spec, metric) if isinstance(spec, str) and isinstance(metric, str) else None


def build_requested_index(
    folder: Path, spec: str, metric: str, *, wait: float = 0.0, progress: Progress = silent
) -> str:
    """Build the requested index, and drop the request in the same transaction."""
    with closing(Datastore.open(folder)) as store:
        return build_index(store, spec, metric=metric, wait=wait, progress=progress)


def cancel_requested_index(folder: Path, *, wait: float = 0.0) -> None:
    """Drop a request that cannot be met."""
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        if catalog.get(REQUESTED_INDEX) is not None:
            catalog.put(**{REQUESTED_INDEX: None})
