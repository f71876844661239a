"""Add documents to a finished memory. Knows nothing about search.

They are read as the others were and become segments behind the last one. All of them are there from one moment on, or
none: until then they are `pending`, and a command that was stopped and is given again goes on behind what it had read.
What was stored is not touched, so that to add takes as long as what is added. Documents whose text is stored already
are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.corpus import Document, DocumentMeter
from knnlm.datastore.catalog import Catalog, check_complete
from knnlm.datastore.encoding import DeferredEncoder, storage_of
from knnlm.datastore.garbage import purge
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.paths import CATALOG_FILE
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.store import metadata_of, text_hash
from knnlm.errors import ModelMismatch
from knnlm.ingest.batches import groups
from knnlm.ingest.build import Build, usual_segment_entries
from knnlm.ingest.pipeline import tokenised
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import identity_difference
from knnlm.progress import Advance, Progress, silent


@dataclass(frozen=True)
class Added:
    """What became of the documents that were given."""

    documents: int  # that are new
    tokens: int  # of them
    skipped: int  # documents whose text was stored already
    resumed: int  # of the new ones, those that a command that was stopped had read already
    generation: int  # of the memory, as it is now


def add(
    documents: Iterable[Document],
    path: str | Path,
    *,
    lm: CausalLM,
    wait: float = 0.0,
    progress: Progress = silent,
) -> Added:
    """Add documents to a memory, all or none; `wait` for another writer so many seconds.

    What an addition that was stopped had read is not read again, if it is among
    the documents; and dropped, if it is not.
    """
    folder = Path(path)
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        check_complete(catalog)
        _check_model(catalog, lm)
        purge(folder, catalog)
        pending = StagedAddition(folder, catalog)
        pending.check()
        waiting = DeferredEncoder(folder, pending, storage_of(catalog), width=lm.width)
        source = DocumentMeter(documents)
        with progress("reading", total=source.total_bytes, unit="bytes") as advance:
            new = _New(source, catalog, pending, advance)
            work = Build(folder, pending, lm, waiting, source, advance, compile=False, keep=False)
            with closing(tokenised(new, lm)) as pairs:
                work.run(groups(pairs, catalog.get("segment_entries") or usual_segment_entries(lm)))
            advance(source.take_rest())
        count, tokens = pending.commit()
        return Added(count, tokens, new.skipped, new.resumed, catalog.generation)


class _New:
    """The documents that are neither stored nor pending, each text once."""

    def __init__(self, documents: DocumentMeter, catalog: Catalog, pending: StagedAddition, advance: Advance) -> None:
        self.skipped = self.resumed = 0
        self._documents, self._catalog, self._pending, self._advance = documents, catalog, pending, advance

    def __iter__(self) -> Iterator[Document]:
        given: set[str] = set()  # now: most of them are not in the catalog yet
        for document in self._documents:
            known = text_hash(document.text)
            if known in given or self._catalog.holds(known):
                self.skipped += 1
                self._advance(self._documents.drop_last())
                continue
            given.add(known)
            if self._pending.claim(document, known):
                self.resumed += 1
                self._advance(self._documents.drop_last())
            else:
                yield document


def _check_model(catalog: Catalog, lm: CausalLM) -> None:
    """Refuse a model whose keys would mean nothing among those that are stored."""
    found: dict[str, Any] = metadata_of(catalog, "model", dict)
    place, own = (lm.key_layer.place, lm.key_layer.layer), (found.get("key_layer"), found.get("layer"))
    wrong = identity_difference(found, lm.identity) or (("key layer", own, place) if own != place else None)
    if wrong is not None:
        what, stored, now = wrong
        raise ModelMismatch(
            f"{catalog.path.parent} was built with {found.get('name')} ({what.replace('_', ' ')} {stored}), but the "
            f"loaded model is {lm.name} ({what.replace('_', ' ')} {now}). Add with --model {found.get('name')}."
        )
