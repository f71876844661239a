"""Remove files that are no longer part of a store.

They are left by a killed writer, or replaced by a compaction or a newer index. A reader that opened the store before
may still use the latter, so nothing is removed while there is a reader; the next writer tries again. An interrupted
addition is kept by default, as the same command resumes it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.locks import ReaderLock, without_readers
from knnlm.datastore.paths import CODEC_FILE, MAP_FILE, NGRAM_FOLDER, index_folder, segment_folder
from knnlm.datastore.staging import StagedAddition
from knnlm.io import remove_unlisted, translate_os_errors


def purge(
    folder: Path, catalog: Catalog, *, lease: ReaderLock | None = None, wait: float = 0.0, keep_pending: bool = True
) -> bool:
    """Remove files that the catalog does not name; return False while there is a reader.

    The caller holds the writer lock; `lease` is the caller's own, which does not count as a reader.
    """
    pending = StagedAddition(folder, catalog)
    if keep_pending:
        pending.remove_if_empty()
    else:
        pending.drop()
    with lease.exclusive() if lease is not None else without_readers(folder, wait=wait) as sole:
        if not sole:
            return False
        with translate_os_errors(folder):
            known = [segment_folder(folder, row.id) for row in catalog.segments()]
            remove_unlisted(folder / "segments", [*known, *pending.folders])
            remove_unlisted(folder / "index", [index_folder(folder, row.id) for row in catalog.indexes()])
            if has_stale_suffix_array(folder, catalog):
                shutil.rmtree(folder / NGRAM_FOLDER)
            for fact, name in (("codec", CODEC_FILE), ("map", MAP_FILE)):  # fitted to keys that were never committed
                if pending.get(fact) is None and (folder / name).is_file():
                    (folder / name).unlink()
        return catalog.checkpoint()


def has_stale_suffix_array(folder: Path, catalog: Catalog) -> bool:
    """Whether there is a suffix array of another generation, which may contain text of removed documents."""
    metadata = folder / NGRAM_FOLDER / "metadata.json"
    try:
        generation = json.loads(metadata.read_bytes()).get("generation", 0)
    except (OSError, ValueError, AttributeError, RecursionError):
        generation = None
    return (folder / NGRAM_FOLDER).exists() and generation != catalog.generation
