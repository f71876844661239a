"""Remember that an index is still to be made, so that a command that was killed before can be given again.

Knows nothing about which command that is.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import FILE, WISH, Catalog
from knnlm.datastore.indexing import build_index
from knnlm.datastore.locking import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.progress import Progress, silent


def wish(spec: str, metric: str) -> dict[str, Any]:
    """Give the wish as a fact for the catalog."""
    return {"spec": spec, "metric": metric}


def read_wish(catalog: Catalog) -> tuple[str, str] | None:
    """Give spec and metric of the index that is still to be made; None where none is, or the fact is of no sense."""
    found = catalog.get(WISH)
    values = (found.get("spec"), found.get("metric")) if isinstance(found, dict) else (None, None)
    spec, metric = values
    return (spec, metric) if isinstance(spec, str) and isinstance(metric, str) else None


def fulfil(folder: Path, spec: str, metric: str, *, wait: float = 0.0, progress: Progress = silent) -> str:
    """Make the index; the wish goes with the same transaction."""
    with closing(Datastore.open(folder)) as store:
        return build_index(store, spec, metric=metric, wait=wait, progress=progress)


def drop_wish(folder: Path, *, wait: float = 0.0) -> None:
    """Forget a wish that cannot be fulfilled."""
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / FILE, write=True)) as catalog:
        if catalog.get(WISH) is not None:
            catalog.put(**{WISH: None})
