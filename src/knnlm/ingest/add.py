"""Add documents to a finished store.

New documents become segments behind the last one. All of them appear at once or not at all: until then they are staged,
and a command that was stopped and is run again continues behind the staged ones. Stored segments are not touched, so
the time depends only on what is added. Documents whose text is already stored are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.corpus import Document, DocumentMeter
from knnlm.datastore.catalog import Catalog, check_complete
from knnlm.datastore.encoder import DeferredEncoder, storage_of
from knnlm.datastore.locks import purge, writer_lock
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.store import metadata_of, text_hash
from knnlm.errors import ModelMismatch
from knnlm.ingest.batches import batch_documents
from knnlm.ingest.build import default_segment_entries
from knnlm.ingest.pipeline import tokenise
from knnlm.ingest.segment_builder import SegmentBuilder
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import identity_difference
from knnlm.progress import Advance, Progress, silent


@dataclass(frozen=True)
class Added:
    """The result of an addition."""

    documents: int  # that are new
    tokens: int  # of them
    skipped: int  # documents whose text was stored already
    resumed: int  # of the new ones, those that a stopped command had read already
    generation: int  # of the store, after the addition


def add(
    documents: Iterable[Document],
    path: str | Path,
    *,
    lm: CausalLM,
    wait: float = 0.0,
    progress: Progress = silent,
) -> Added:
    """Add documents to a store, all or none, after waiting at most `wait` seconds for the store's lock.

    Documents that a stopped addition had read are not read again; those that are missing now are dropped.
    """
    folder = Path(path)
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        check_complete(catalog)
        _check_model(catalog, lm)
        purge(folder, catalog)
        staged = StagedAddition(folder, catalog)
        staged.check()
        encoder = DeferredEncoder(folder, staged, storage_of(catalog), width=lm.width)
        source = DocumentMeter(documents)
        with progress("reading", total=source.total_bytes, unit="bytes") as advance:
            new = _NewDocuments(source, catalog, staged, advance)
            builder = SegmentBuilder(folder, staged, lm, encoder, source, advance, compile=False, keep_on_device=False)
            with closing(tokenise(new, lm)) as tokenised:
                builder.run(batch_documents(tokenised, catalog.get("segment_entries") or default_segment_entries(lm)))
            advance(source.take_rest())
        count, tokens = staged.commit()
        return Added(count, tokens, new.skipped, new.resumed, catalog.generation)


class _NewDocuments:
    """The documents that are neither stored nor staged, each text once."""

    def __init__(self, documents: DocumentMeter, catalog: Catalog, staged: StagedAddition, advance: Advance) -> None:
        self.skipped = self.resumed = 0
        self._documents, self._catalog, self._staged, self._advance = documents, catalog, staged, advance

    def __iter__(self) -> Iterator[Document]:
        hashes: set[str] = set()  # of this addition, which is not in the catalog yet
        for document in self._documents:
            sha256 = text_hash(document.text)
            if sha256 in hashes or self._catalog.has_text(sha256):
                self.skipped += 1
                self._advance(self._documents.drop_last())
                continue
            hashes.add(sha256)
            if self._staged.claim(document, sha256):
                self.resumed += 1
                self._advance(self._documents.drop_last())
            else:
                yield document


def _check_model(catalog: Catalog, lm: CausalLM) -> None:
    """Raise an error unless the model is the reader of the store."""
    model: dict[str, Any] = metadata_of(catalog, "model", dict)
    place, stored_place = (lm.key_layer.place, lm.key_layer.layer), (model.get("key_layer"), model.get("layer"))
    change = identity_difference(model, lm.identity)
    if change is None and stored_place != place:
        change = "key layer", stored_place, place
    if change is not None:
        field, stored, loaded = change[0].replace("_", " "), *change[1:]
        raise ModelMismatch(
            f"{catalog.path.parent} was built with {model.get('name')} ({field} {stored}), but the loaded model is "
            f"{lm.name} ({field} {loaded}). Add with --model {model.get('name')}."
        )
