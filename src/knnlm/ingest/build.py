"""Build a store, or add documents to one: read text once and store its (context vector, next token) pairs.

An addition becomes segments behind the last one. All of its documents appear at once or not at all: until then they are
staged, and a command that was stopped and is run again continues behind the staged ones. Stored segments are not
touched, so the time depends only on what is added. Documents whose text is already stored are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.corpus import Document, DocumentMeter
from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog, check_complete
from knnlm.datastore.codecs import Storage, parse_storage
from knnlm.datastore.encoder import DeferredEncoder, storage_of
from knnlm.datastore.locks import purge, writer_lock
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import CATALOG_FILE, segment_folder
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.store import Datastore, check_folder, metadata_of
from knnlm.errors import CorpusError, DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.pipeline import tokenise
from knnlm.ingest.segment_builder import SegmentBuilder, batch_documents, default_batch_tokens, document_hash
from knnlm.ingest.shards import ShardText, add_to_shard, parse_shard, split_text
from knnlm.io import remove_unlisted
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import identity_difference
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
    return _build(
        documents,
        Path(path),
        lm,
        window=window,
        key_format=key_format,
        segment_entries=segment_entries,
        batch_tokens=batch_tokens,
        compile=compile,
        keep_on_device=keep_on_device,
        language_model=language_model,
        progress=progress,
    )


def build_shard(
    read: Callable[[], Iterable[Document]],
    path: str | Path,
    *,
    shard: str,
    lm: CausalLM,
    like: Datastore | None = None,
    **options: Any,
) -> Datastore:
    """Build one shard of a text, such as `2/5`; `knnlm.join_shards` makes one store of all.

    `read` returns all documents of the text at each call. `like` is a store whose offset, map and codec the keys get,
    which shards after the first need where keys are stored with a fitted codec. `options` are those of `build`.
    """
    return build_part(split_text(read, *parse_shard(shard), like=like), path, lm=lm, **options)


def build_part(part: ShardText, path: str | Path, *, lm: CausalLM, **options: Any) -> Datastore:
    """Build the shard of one part of a text; `options` are those of `build`."""
    return _build(part.documents(), Path(path), lm, shard=part, **options)


def _build(
    documents: Iterable[Document],
    folder: Path,
    lm: CausalLM,
    *,
    window: WindowShape | None = None,
    key_format: str = "float16",
    segment_entries: int | None = None,
    batch_tokens: int | None = None,
    compile: bool | None = None,  # noqa: A002
    keep_on_device: bool = False,
    language_model: str | None = None,
    shard: ShardText | None = None,
    progress: Progress = silent,
) -> Datastore:
    """Build a store of documents, which are those of one shard where one is given."""
    storage = parse_storage(key_format, width=lm.width)
    window = window or lm.window()
    settings = _settings(lm, window, storage, segment_entries, batch_tokens)
    check_folder(folder)
    if shard is not None:
        shard.check(lm, storage, window)
        settings |= shard.metadata
    with _open_catalog(folder, settings) as catalog:
        if shard is not None:
            shard.prepare(catalog, lm, window, settings["segment_entries"])
        source = DocumentMeter(documents, total_bytes=None if shard is None else shard.bytes)
        encoder = DeferredEncoder(folder, catalog, storage, width=lm.width)
        with progress("reading", total=source.total_bytes, unit="bytes") as advance:
            _skip_stored(source, catalog, advance)
            builder = SegmentBuilder(
                folder, catalog, lm, encoder, source, advance, compile=compile, keep_on_device=keep_on_device
            )
            _read(source, builder, lm, settings["segment_entries"])
            advance(source.take_rest())
        catalog.put(state="complete", **({} if language_model is None else {LANGUAGE_MODEL: language_model}))
    store = Datastore.open(folder)
    store.resident_keys = builder.resident_keys
    return store


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
    if is_sharded(folder):

        def add_here(place: Path, stored: Callable[[str], bool]) -> Added:
            return _add(documents, place, lm, stored, wait=wait, progress=progress)

        added, generation = add_to_shard(folder, add_here, wait=wait)
        return replace(added, generation=generation)
    return _add(documents, folder, lm, lambda _: False, wait=wait, progress=progress)


def _add(
    documents: Iterable[Document],
    folder: Path,
    lm: CausalLM,
    stored_elsewhere: Callable[[str], bool],
    *,
    wait: float,
    progress: Progress,
) -> Added:
    """Add documents to an ordinary store, except those whose hash is stored elsewhere."""
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        check_complete(catalog)
        _check_model(catalog, lm)
        purge(folder, catalog)
        staged = StagedAddition(folder, catalog)
        staged.check()
        encoder = DeferredEncoder(folder, staged, storage_of(catalog), width=lm.width)
        source = DocumentMeter(documents)
        with progress("reading", total=source.total_bytes, unit="bytes") as advance:
            new = _NewDocuments(source, catalog, staged, advance, stored_elsewhere)
            builder = SegmentBuilder(folder, staged, lm, encoder, source, advance, compile=False, keep_on_device=False)
            _read(new, builder, lm, catalog.get("segment_entries") or default_segment_entries(lm))
            advance(source.take_rest())
        count, tokens = staged.commit()
        return Added(count, tokens, new.skipped, new.resumed, catalog.generation)


def default_segment_entries(lm: CausalLM) -> int:
    """Return the entries of a segment, so that a stopped build loses at most about half a minute."""
    entries = _SEGMENT_ENTRIES.get(lm.device.type, _OTHER_SEGMENT_ENTRIES)
    if lm.device.type != "cuda":
        return entries
    return min(entries, max(_OTHER_SEGMENT_ENTRIES, _MAX_SEGMENT_BYTES // (2 * lm.width)))


def _read(documents: Iterable[Document], builder: SegmentBuilder, lm: CausalLM, segment_entries: int) -> None:
    """Tokenise documents and store them in segments of about `segment_entries`."""
    with closing(tokenise(documents, lm)) as tokenised:
        builder.run(batch_documents(tokenised, segment_entries))


def _settings(
    lm: CausalLM, window: WindowShape, storage: Storage, segment_entries: int | None, batch_tokens: int | None
) -> dict[str, Any]:
    """Return the metadata that a build is resumed with."""
    segment_entries = segment_entries if segment_entries is not None else default_segment_entries(lm)
    batch_tokens = batch_tokens if batch_tokens is not None else default_batch_tokens(lm)
    if segment_entries < 1 or batch_tokens < 1:
        raise ParameterError(
            f"segment entries ({segment_entries}) and batch tokens ({batch_tokens}) must be at least 1."
        )
    settings: dict[str, Any] = {
        "model": lm.identity,
        "window": {"context": window.context, "stride": window.stride},
        "key_dtype": storage.dtype,
        "segment_entries": segment_entries,
        "batch_tokens": batch_tokens,
    }
    return {**settings, "keys": str(storage)} if storage.fitted else settings


@contextmanager
def _open_catalog(folder: Path, settings: dict[str, Any]) -> Iterator[Catalog]:
    """Lock a folder and open its catalog; a new folder is removed if the text is unreadable from the beginning."""
    created = not folder.exists()
    with writer_lock(folder, create=True), closing(_create_or_resume(folder, settings)) as catalog:
        try:
            yield catalog
        except CorpusError:
            unused = created and not catalog.segments()
            catalog.close()
            if unused:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _create_or_resume(folder: Path, settings: dict[str, Any]) -> Catalog:
    """Create a catalog, or open that of an unfinished build with the same settings."""
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
        if (stored.id, stored.sha256) != (document.id, document_hash(document)):
            raise DatastoreError(
                f"{catalog.path.parent} is an unfinished build of other text: document {stored.number + 1} was "
                f"{stored.source}, now it is {document.source} or its text has changed. {advice}"
            )
        advance(documents.take(1))


class _NewDocuments:
    """The documents that are neither stored nor staged, each text once."""

    def __init__(
        self,
        documents: DocumentMeter,
        catalog: Catalog,
        staged: StagedAddition,
        advance: Advance,
        stored_elsewhere: Callable[[str], bool],
    ) -> None:
        self.skipped = self.resumed = 0
        self._stored_elsewhere = stored_elsewhere
        self._documents, self._catalog, self._staged, self._advance = documents, catalog, staged, advance

    def __iter__(self) -> Iterator[Document]:
        hashes: set[str] = set()  # of this addition, which is not in the catalog yet
        for document in self._documents:
            sha256 = document_hash(document)
            if sha256 in hashes or self._catalog.has_text(sha256) or self._stored_elsewhere(sha256):
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
