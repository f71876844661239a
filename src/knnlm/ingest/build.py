"""Build a store: read a corpus once and store its (context vector, next token) pairs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from knnlm.corpus import Document, DocumentMeter
from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog
from knnlm.datastore.codecs import Storage, parse_storage
from knnlm.datastore.encoder import DeferredEncoder
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import CATALOG_FILE, segment_folder
from knnlm.datastore.store import Datastore, check_folder, text_hash
from knnlm.errors import CorpusError, DatastoreError, ParameterError
from knnlm.ingest.batches import batch_documents
from knnlm.ingest.pipeline import tokenise
from knnlm.ingest.segment_builder import SegmentBuilder, default_batch_tokens
from knnlm.io import remove_unlisted
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.progress import Advance, Progress, silent

_SEGMENT_ENTRIES = {"cpu": 16_384, "cuda": 1 << 20}  # on a GPU, fewer for a model with wide keys
_OTHER_SEGMENT_ENTRIES = 65_536
_MAX_SEGMENT_BYTES = 1 << 31  # of float16 keys; several segments are on a GPU at a time


def build(
    documents: Iterable[Document],
    path: str | Path,
    *,
    lm: CausalLM,
    window: WindowShape | None = None,
    key_format: str = "float16",
    segment_entries: int | None = None,
    batch_tokens: int | None = None,
    compile: bool | None = None,  # noqa: A002  (torch's name)
    keep_on_device: bool = False,
    language_model: str | None = None,
    progress: Progress = silent,
) -> Datastore:
    """Build a store of the documents, or resume an unfinished build of the same documents.

    `key_format` is the format of stored keys: float16, float32, int8, pca256-int8 or codes64, with any number.
    `compile` compiles the model's blocks, by default where that saves time; a resumed build continues as it began.
    `keep_on_device` also leaves the keys on the device, as `resident_keys` of the store, where that is possible.
    `language_model` names the model that the store is for, if it is not the reader.
    """
    storage = parse_storage(key_format, width=lm.width)
    segment_entries = segment_entries if segment_entries is not None else default_segment_entries(lm)
    batch_tokens = batch_tokens if batch_tokens is not None else default_batch_tokens(lm)
    if segment_entries < 1 or batch_tokens < 1:
        raise ParameterError(
            f"segment entries ({segment_entries}) and batch tokens ({batch_tokens}) must be at least 1."
        )
    folder = Path(path)
    check_folder(folder)
    created, empty = not folder.exists(), True
    with writer_lock(folder, create=True), _remove_unused(folder, lambda: created and empty):
        catalog = _open_catalog(folder, lm, window or lm.window(), storage, segment_entries, batch_tokens)
        try:
            source = DocumentMeter(documents)
            encoder = DeferredEncoder(folder, catalog, storage, width=lm.width)
            with progress("reading", total=source.total_bytes, unit="bytes") as advance:
                _skip_stored(source, catalog, advance)
                builder = SegmentBuilder(
                    folder, catalog, lm, encoder, source, advance, compile=compile, keep_on_device=keep_on_device
                )
                with closing(tokenise(source, lm)) as tokenised:
                    builder.run(batch_documents(tokenised, segment_entries))
                advance(source.take_rest())
            catalog.put(state="complete", **({} if language_model is None else {LANGUAGE_MODEL: language_model}))
        finally:
            empty = not catalog.segments()
            catalog.close()
    store = Datastore.open(folder)
    if keep_on_device:
        store.resident_keys = builder.resident_keys
    return store


def default_segment_entries(lm: CausalLM) -> int:
    """Return the entries of a segment, so that a stopped build loses at most about half a minute."""
    rows = _SEGMENT_ENTRIES.get(lm.device.type, _OTHER_SEGMENT_ENTRIES)
    return (
        rows
        if lm.device.type != "cuda"
        else min(rows, max(_OTHER_SEGMENT_ENTRIES, _MAX_SEGMENT_BYTES // (2 * lm.width)))
    )


@contextmanager
def _remove_unused(folder: Path, unused: Callable[[], bool]) -> Iterator[None]:
    """Remove a new folder if the text turns out to be unreadable before anything was stored."""
    try:
        yield
    except CorpusError:
        if unused():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _open_catalog(
    folder: Path, lm: CausalLM, window: WindowShape, storage: Storage, segment_entries: int, batch_tokens: int
) -> Catalog:
    """Create a catalog, or open that of an unfinished build with the same settings."""
    settings: dict[str, Any] = {
        "model": lm.identity,
        "window": {"context": window.context, "stride": window.stride},
        "key_dtype": storage.dtype,
        "segment_entries": segment_entries,
        "batch_tokens": batch_tokens,
    }
    if storage.fitted:
        settings["keys"] = str(storage)
    file = folder / CATALOG_FILE
    if not file.exists():
        return Catalog.create(file, {"state": "building", "offset": None, **settings})
    catalog = Catalog.open(file, write=True)
    if catalog.get("state") == "complete":
        raise DatastoreError(f"{folder} is a finished store already. Choose another --out, or remove it first.")
    for name, value in settings.items():
        stored = catalog.get(name)
        if stored != value:
            raise DatastoreError(
                f"{folder} is an unfinished build with another {name.replace('_', ' ')} "
                f"({_describe_change(stored, value)}). Finish it with the same options, or remove it."
            )
    remove_unlisted(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
    return catalog


def _describe_change(stored: Any, value: Any) -> str:
    """Return how a setting differs from the stored one."""
    if isinstance(stored, dict) and isinstance(value, dict):
        name = next(name for name in value if stored.get(name) != value[name])
        return f"{name} {stored.get(name)}, now {value[name]}"
    return f"{stored}, now {value}"


def _skip_stored(documents: DocumentMeter, catalog: Catalog, advance: Advance) -> None:
    """Skip the documents that are stored, after checking that they are the same."""
    advice = "Give the same text in the same order, or remove the store and build it again."
    for stored in catalog.documents():
        document = next(documents, None)
        if document is None:
            raise DatastoreError(
                f"{catalog.path.parent} is an unfinished build of more text: it already contains {stored.source}, "
                f"which is missing from the text now. {advice}"
            )
        if (stored.id, stored.sha256) != (document.id, text_hash(document.text)):
            raise DatastoreError(
                f"{catalog.path.parent} is an unfinished build of other text: document {stored.number + 1} was "
                f"{stored.source}, now it is {document.source} or its text has changed. {advice}"
            )
        advance(documents.take(1))
