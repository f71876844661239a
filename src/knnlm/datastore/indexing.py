"""Make the index of a memory, and open it. Knows nothing about language models."""

from __future__ import annotations

import shutil

from knnlm.datastore.catalog import FILE, Catalog, IndexRow
from knnlm.datastore.codec import Codes
from knnlm.datastore.locking import writer_lock
from knnlm.datastore.segment import checksum, remove_others, sync_folder, writing
from knnlm.datastore.store import Datastore
from knnlm.datastore.store import index_folder as _folder
from knnlm.errors import DatastoreCorrupt, IndexInvalid
from knnlm.index import ExactIndex, FaissIndex, Index, Reranked, auto_spec, check_index
from knnlm.index.base import check_metric
from knnlm.index.exact import fast, fits
from knnlm.index.thin import thin_spec
from knnlm.progress import Progress, silent

_FILE = "index.faiss"
_DEEP = 3.0  # times k


def build_index(store: Datastore, spec: str = "auto", *, metric: str = "l2", progress: Progress = silent) -> str:
    """Make an index for a memory and return its factory string, or `exact` where none is needed."""
    check_metric(metric)
    if spec == "auto" and isinstance(store.codec, Codes):
        spec = thin_spec(store.key_count, store.width)
    with writer_lock(store.path):
        catalog = Catalog.open(store.path / FILE, write=True)
        try:
            return _replace_index(store, catalog, spec, metric, progress)
        finally:
            catalog.close()


def _replace_index(store: Datastore, catalog: Catalog, spec: str, metric: str, progress: Progress) -> str:
    old = catalog.indexes()
    number = old[-1].id + 1 if old else 0
    remove_others(store.path / "index", [_folder(store.path, row.id) for row in old])
    if spec == "auto":
        spec = auto_spec(store.key_count, store.width, metric=metric)
    if spec == "exact":
        catalog.replace_indexes(None)
    else:
        index = FaissIndex.build(store.keys, spec, metric=metric, progress=progress)
        check_index(index, store.keys, what=f"The new index {spec}")
        folder = _folder(store.path, number)
        partial = folder.with_suffix(".partial")
        with writing(partial):
            partial.mkdir(parents=True)
            index.save(partial / _FILE)
            sync_folder(partial)
            partial.rename(folder)
            sync_folder(folder.parent)
        catalog.replace_indexes(IndexRow(number, spec, metric, store.key_count, checksum(folder / _FILE)))
    for row in old:
        shutil.rmtree(_folder(store.path, row.id), ignore_errors=True)
    return spec


def open_index(
    store: Datastore, *, metric: str = "l2", rerank: bool = True, device: str = "cpu", keys: str = "float16"
) -> Index:
    """Open the memory's index after checking it, or search exactly where there is none for this metric.

    Where a GPU can hold all keys, exact search there is faster than any index on the CPU, so that one is used only
    where its own distances are wanted. `keys` is what the GPU holds keys in; int8 gives distances to rounded keys.
    """
    if (rerank or keys == "int8") and fast(device) and fits(store.keys, device, keys):
        return ExactIndex(store.keys, metric=metric, device=device, keys=keys)
    for row in store.catalog.indexes():
        if row.metric != metric:
            continue
        path = _folder(store.path, row.id) / _FILE
        if not path.is_file():
            raise DatastoreCorrupt(f"{path} is missing. Make it again with: knnlm index {store.path}")
        index = FaissIndex.load(path, metric=metric)
        if (index.rows, index.width, row.rows) != (store.key_count, store.width, store.key_count):
            raise IndexInvalid(
                f"{path} holds {index.rows:,} vectors of width {index.width}, but the memory has "
                f"{store.key_count:,} of width {store.width}. Make it again with: knnlm index {store.path}"
            )
        check_index(index, store.keys, what=str(path))
        return _reranked(index, store) if rerank else index
    return ExactIndex(store.keys, metric=metric, device=device, keys=keys)


def _reranked(index: Index, store: Datastore) -> Index:
    """Measure a shortlist again on what is stored; that of a thin index is long, for it is only roughly in order."""
    if isinstance(store.codec, Codes):
        return Reranked(index, store.keys, depth=_DEEP, measured=None)
    return Reranked(index, store.keys)
