"""Open a mixture anew when its memory has changed. Knows nothing about the texts that are under way."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

from knnlm.datastore.store import Datastore
from knnlm.errors import KnnlmError
from knnlm.mixture.mixture import Mixture

_log = logging.getLogger(__name__)


class Unavailable(KnnlmError):
    """The memory has changed, and cannot be opened as it is now."""


@dataclass(frozen=True)
class Reloaded:
    """A mixture as it was, and as it is now."""

    before: Mixture
    mixture: Mixture

    @property
    def removed(self) -> bool:
        """Whether documents are gone, or rows are numbered anew, which may be because some are."""
        return _removed(self.before) != _removed(self.mixture)

    def let_go(self) -> None:
        """Close what only the earlier one had open."""
        for store in _stores(self.before) - _stores(self.mixture):
            store.close()


def reload_if_stale(mixture: Mixture) -> Reloaded | None:
    """Open a mixture as it is now, None where nothing has changed; this one stays as it is."""
    try:
        return Reloaded(mixture, mixture.reopen()) if mixture.stale else None
    except (KnnlmError, OSError, sqlite3.Error) as error:
        _log.exception("the memory cannot be opened anew")
        raise Unavailable(f"The memory has changed and cannot be opened as it is now ({error}).") from error


def _stores(mixture: Mixture) -> set[Datastore]:
    """Give the stores that a mixture has open."""
    found = {store for memory in mixture.memories if isinstance(store := getattr(memory, "store", None), Datastore)}
    return found | ({mixture.store} if mixture.store is not None else set())


def _removed(mixture: Mixture) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """Say what is gone from each store."""
    return sorted((str(store.path), store.layout, store.row_numbers.gaps) for store in _stores(mixture))
