"""Build the index of a store, open it, and resume an index build that was interrupted."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.catalog import INDEX_SKIPPED, REQUESTED_INDEX, Catalog
from knnlm.datastore.codecs import Codes
from knnlm.datastore.live_numbers import LiveNumbers
from knnlm.datastore.locks import purge, writer_lock
from knnlm.datastore.schema import CATALOG_FILE, IndexRow, index_folder
from knnlm.datastore.segments import BLOCK_INDEX_FILE, FAISS_INDEX_FILE, index_file
from knnlm.datastore.store import Datastore, Keys
from knnlm.datastore.validation import check_regular_file
from knnlm.errors import DatastoreCorrupt, IndexInvalid
from knnlm.index.base import Index, check_metric
from knnlm.index.blocks import is_blocks
from knnlm.index.blocks.build import write_blocks
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.composite import ConcatenatedIndex, FilteredIndex, ShardedIndex
from knnlm.index.exact import ExactIndex, fits_on_device, has_kernels
from knnlm.index.factory import compressed_spec, default_spec, fallback_spec
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import RerankedIndex
from knnlm.index.validation import check_index
from knnlm.io import atomic_folder, checksum, translate_os_errors
from knnlm.progress import Progress, silent

_CODES_SHORTLIST = 3.0  # times k: the shortlist of a store with codes


def build_index(
    store: Datastore, spec: str = "auto", *, metric: str = "l2", wait: float = 0.0, progress: Progress = silent
) -> str:
    """Build an index over the current keys of a store and return its spec, `exact` where none is needed."""
    check_metric(metric)
    if store.shards:
        specs = [build_index(shard, spec, metric=metric, wait=wait, progress=progress) for shard in store.shards]
        return ", ".join(dict.fromkeys(specs))
    with writer_lock(store.path, wait=wait), closing(Catalog.open(store.path / CATALOG_FILE, write=True)) as catalog:
        current = store.reopen() if store.stale else store
        try:
            return _replace_index(current, catalog, spec, metric, progress)
        finally:
            if current is not store:
                current.close()


def _replace_index(store: Datastore, catalog: Catalog, spec: str, metric: str, progress: Progress) -> str:
    purge(store.path, catalog, reader_lock=store.reader_lock)
    if spec == "auto":
        spec = choose_spec(store)
    row = None if spec == "exact" else make_index(store, catalog, spec, metric, progress)
    catalog.replace_indexes(row, skipped=store.key_numbers.gaps)
    purge(store.path, catalog, reader_lock=store.reader_lock)
    return "exact" if row is None else row.spec


def choose_spec(store: Datastore) -> str:
    """Return the default index for the number of keys and their codec; `exact` where none is needed."""
    if isinstance(store.codec, Codes):
        return compressed_spec(store.key_count, store.width)
    return default_spec(store.key_count)


def make_index(store: Datastore, catalog: Catalog, spec: str, metric: str, progress: Progress) -> IndexRow:
    """Write an index over the keys; it is used once the returned row is in the catalog."""
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
            write_blocks(store.keys, spec, folder / BLOCK_INDEX_FILE, metric=metric, progress=progress)
            index = BlockIndex.load(folder / BLOCK_INDEX_FILE)
        else:
            index = FaissIndex.build(store.keys, spec, metric=metric, progress=progress)
        check_index(index, store.keys, what=f"The new index {spec}", precise=_is_precise(index))
    except IndexInvalid:
        if spec != choose_spec(store) or isinstance(store.codec, Codes):
            raise
        for leftover in folder.iterdir():
            leftover.unlink()
        return _write_index(store, fallback_spec(store.key_count), metric, folder, progress)
    if isinstance(index, FaissIndex):
        index.save(folder / FAISS_INDEX_FILE)
        return spec, FAISS_INDEX_FILE
    return spec, BLOCK_INDEX_FILE


def next_index(path: Path, catalog: Catalog) -> int:
    """Return a number that no index or leftover folder has."""
    taken = [row.id for row in catalog.indexes()]
    taken += [int(entry.name) for entry in (path / "index").glob("[0-9]*") if entry.name.isdigit()]
    return max(taken, default=-1) + 1


def open_index(
    store: Datastore, *, metric: str = "l2", rerank: bool = True, device: str = "cpu", key_dtype: str = "float16"
) -> Index:
    """Open and check the store's index, or an exact index where there is none for this metric.

    Where all keys fit on a GPU, exact search there is faster than any index on the CPU; the stored index is used only
    if `rerank` is False, for its own distances. `key_dtype` is the type of keys on the GPU; int8 gives distances to
    rounded keys.
    """
    store.pinned = True
    if (rerank or key_dtype == "int8") and has_kernels(device) and fits_on_device(store.keys, device, key_dtype):
        return ExactIndex(store.keys, metric=metric, device=device, key_dtype=key_dtype)
    if store.shards and store.trust_index and any(row.metric == metric for row, _ in stored_indexes(store)):
        if (joined := _join_blocks(store, metric, rerank=rerank)) is not None:
            return joined
        options: dict[str, Any] = {"metric": metric, "rerank": rerank, "device": device, "key_dtype": key_dtype}
        firsts = np.cumsum([0, *(shard.key_count for shard in store.shards[:-1])]).tolist()
        return ShardedIndex([open_index(shard, **options) for shard in store.shards], firsts, rows=store.key_count)
    # All shards at once: distances then are those of one store, to the last bit.
    for row, covered in stored_indexes(store) if store.trust_index and not store.shards else []:
        if row.metric == metric:
            return _join(store, _load_checked(store, row, covered), covered, rerank=rerank)
    return ExactIndex(store.keys, metric=metric, device=device, key_dtype=key_dtype)


def stored_indexes(store: Datastore) -> list[tuple[IndexRow, LiveNumbers]]:
    """Return the indexes of a store and the stored keys that each covers.

    An index built after the store was opened is used if keys have the same numbers and it lacks none of this store's
    keys; otherwise those from the time of opening, whose files the reader's lock keeps on disk. Those of a sharded
    store are the indexes of its shards, each over the keys of its shard.
    """
    if store.shards:
        return [found for shard in store.shards for found in stored_indexes(shard)]
    with closing(store.catalog.reopen()) as now, now.snapshot():
        newest = _coverage(store, now) if now.layout == store.layout else None
    live = store.key_numbers
    if newest is not None and all(
        not any(True for _ in live.stretches(first, min(first + count, live.total)))
        for _, covered in newest
        for first, count in covered.gaps
    ):
        return newest
    indexes = _coverage(store, store.catalog)
    # An index that this object has replaced itself is gone.
    return [(row, covered) for row, covered in indexes if index_file(store.path, row).is_file()]


def _coverage(store: Datastore, catalog: Catalog) -> list[tuple[IndexRow, LiveNumbers]]:
    """Return the indexes that a catalog names and the stored keys that each covers."""
    rows, skipped = catalog.indexes(), catalog.get(INDEX_SKIPPED) or []
    gaps = list[tuple[int, int]]()
    for gap in skipped if isinstance(skipped, list) else [None]:
        # Numbers of keys stay far below 2^48, and sums of them below 2^63.
        if not (
            isinstance(gap, list)
            and len(gap) == 2
            and all(type(number) is int and 0 <= number < 1 << 48 for number in gap)
        ):
            raise DatastoreCorrupt(f"{store.catalog.path}: invalid list of keys that the index lacks. {_advice(store)}")
        gaps.append((gap[0], gap[1]))
    lacking = sum(count for _, count in gaps)
    return [(row, LiveNumbers(row.entries + lacking, gaps)) for row in rows]


def _load_checked(store: Datastore, row: IndexRow, covered: LiveNumbers) -> FaissIndex | BlockIndex:
    """Load an index and check its number of keys."""
    path = index_file(store.path, row)
    if not path.is_file():
        raise DatastoreCorrupt(f"{path} is missing. {_advice(store)}")
    check_regular_file(store.path, path)
    index = _load(store, row, path)
    # An index newer than this snapshot may have more keys; one of a store that never changed may not have fewer.
    known = store.key_numbers.total
    fewer = store.generation == 0 and covered.total < known
    more = covered.total > known and row in store.catalog.indexes()
    if fewer or more or (index.rows, index.width) != (row.entries, store.width):
        raise IndexInvalid(
            f"{path} contains {index.rows:,} vectors of width {index.width}, but the store has "
            f"{store.key_count:,} of width {store.width}. {_advice(store)}"
        )
    return index


def _load(store: Datastore, row: IndexRow, path: Path) -> FaissIndex | BlockIndex:
    """Load the file of an index after comparing its checksum."""
    if is_blocks(row.spec):
        try:
            blocks = BlockIndex.load(path, check_bytes=partial(store.arrays.sums.check_ranges, path, row.sha256))
        except DatastoreCorrupt:
            raise IndexInvalid(f"{path}: checksum mismatch. {_advice(store)}") from None
        if blocks.metric != row.metric:
            raise IndexInvalid(f"{path} was built for metric {blocks.metric}, not {row.metric}. {_advice(store)}")
        return blocks
    if checksum(path) != row.sha256:
        raise IndexInvalid(f"{path}: checksum mismatch (SHA-256). {_advice(store)}")
    return FaissIndex.load(path, metric=row.metric)


def _advice(store: Datastore) -> str:
    return f"Build it again: knnlm index {store.path}"


def _join(store: Datastore, index: FaissIndex | BlockIndex, covered: LiveNumbers, *, rerank: bool) -> Index:
    """Filter removed keys out of an index, check it, and add an exact index over newer keys."""
    what = f"The index {index_folder(store.path, 0).parent}"
    precise = _is_precise(index)
    rerank = rerank and not precise
    known = store.key_numbers
    if known.gaps == covered.gaps and known.total == covered.total:
        check_index(index, store.keys, what=what, precise=precise)
        whole = FilteredIndex(index, None, store.keys)
        return _reranked(whole, store) if rerank else whole
    numbers = known.to_live(covered.to_stored(np.arange(index.rows)))
    first = known.before(min(covered.total, known.total))  # keys from here on are newer
    older = Keys(store, end=first)
    filtered = FilteredIndex(index, numbers, older)
    if filtered.rows:
        check_index(filtered, older, what=what, precise=precise)
    older_index: Index = _reranked(filtered, store) if rerank else filtered
    if first == store.key_count:
        return older_index
    return ConcatenatedIndex(older_index, ExactIndex(Keys(store, first), metric=index.metric), first=first)


def _join_blocks(store: Datastore, metric: str, *, rerank: bool) -> Index | None:
    """Return the block indexes of all shards as one; None where a shard has none, or keys that its index lacks."""
    indexes, numbers, whole = list[BlockIndex](), list[NDArray[np.int64]](), True
    first = 0
    for shard in store.shards:
        row, covered = next(
            ((row, covered) for row, covered in stored_indexes(shard) if row.metric == metric), (None, None)
        )
        if row is None or covered is None or not is_blocks(row.spec) or covered.total < shard.key_numbers.total:
            return None
        index = _load_checked(shard, row, covered)
        assert isinstance(index, BlockIndex)
        live = shard.key_numbers.to_live(covered.to_stored(np.arange(index.rows)))
        whole = whole and shard.key_numbers.gaps == covered.gaps and shard.key_numbers.total == covered.total
        indexes.append(index)
        numbers.append(np.where(live < 0, -1, live + first))
        first += shard.key_count
    if (joined := BlockIndex.join(indexes)) is None:
        return None
    filtered, precise = (
        FilteredIndex(joined, None if whole else np.concatenate(numbers), store.keys),
        _is_precise(joined),
    )
    check_index(filtered, store.keys, what=f"The index of the shards of {store.path}", precise=precise)
    return _reranked(filtered, store) if rerank and not precise else filtered


def _is_precise(index: FaissIndex | BlockIndex) -> bool:
    """Whether an index returns distances precise enough to vote with: one byte for each dimension is."""
    return isinstance(index, BlockIndex) and index.keeps_all_dimensions


def _reranked(index: Index, store: Datastore) -> Index:
    """Rerank the shortlist by stored keys; a store with codes needs a longer one, as its order is rough."""
    if isinstance(store.codec, Codes):
        return RerankedIndex(index, store.keys, depth=_CODES_SHORTLIST, measured=None)
    return RerankedIndex(index, store.keys)


def request_index(spec: str, metric: str) -> dict[str, Any]:
    """Return the metadata that requests an index."""
    return {"spec": spec, "metric": metric}


def requested_index(catalog: Catalog) -> tuple[str, str] | None:
    """Return spec and metric of the index that is still to be built; None where there is none, or it is invalid."""
    request = catalog.get(REQUESTED_INDEX)
    spec, metric = (request.get("spec"), request.get("metric")) if isinstance(request, dict) else (None, None)
    return (spec, metric) if isinstance(spec, str) and isinstance(metric, str) else None


def build_requested_index(
    folder: Path, spec: str, metric: str, *, wait: float = 0.0, progress: Progress = silent
) -> str:
    """Build the requested index and delete the request in the same transaction."""
    with closing(Datastore.open(folder)) as store:
        return build_index(store, spec, metric=metric, wait=wait, progress=progress)


def cancel_requested_index(folder: Path, *, wait: float = 0.0) -> None:
    """Delete a request for an index that cannot be built."""
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        if catalog.get(REQUESTED_INDEX) is not None:
            catalog.put(**{REQUESTED_INDEX: None})
