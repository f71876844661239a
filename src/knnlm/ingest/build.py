"""Read a text collection once and store its (context vector → next token) pairs. Knows nothing about search.

Documents are gathered until they fill a segment. A segment is written under a temporary name, flushed, renamed, and
then exists from the moment its catalog row is committed. Windows are packed within a segment only, so a build that was
killed and run again from its last finished segment ends with the same bytes.
"""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.corpus import Document, DocumentMeter
from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog, SegmentSink
from knnlm.datastore.codecs import Plain, Storage, parse_storage
from knnlm.datastore.encoding import DeferredEncoder
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.paths import CATALOG_FILE, VALUES_FILE, segment_folder
from knnlm.datastore.schema import SegmentRow
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.store import Datastore, check_folder, next_segment, stored_offset, text_hash
from knnlm.errors import CorpusError, DatastoreError, ModelError, ParameterError
from knnlm.ingest.batches import Group, groups
from knnlm.ingest.pipeline import Disk, WrittenSegment, collect, pipelined, room, tokenised
from knnlm.io import checksum, remove_unlisted, sync_folder, translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.lm.compile import CompileStatus, compiled
from knnlm.lm.windows import WindowShape
from knnlm.progress import Advance, Progress, silent

# Above this, one step of float16 is a whole unit: as much as neighbours differ by in an ordinary dimension.
_LARGE = 1024.0


_GLANCE, _CALIBRATION = 256, 2048  # tokens read to see how large the keys of a model are; the latter if they may be

_BATCH_TOKENS = {"cpu": 1024, "cuda": 65_536}  # on a GPU, of a model of this width; fewer of a wider one

_WIDTH, _FEWEST = 576, 4096

_SEGMENT_BYTES = 1 << 31

_BEHIND = 3  # segments that may be on their way to the disk

_PAYS = 15_000_000  # tokens in whole windows: to compile takes ten seconds, and saves 0.7 for a million


def build(
    documents: Iterable[Document],
    path: str | Path,
    *,
    lm: CausalLM,
    window: WindowShape | None = None,
    keys: str = "float16",
    segment_entries: int | None = None,
    batch_tokens: int | None = None,
    compile: bool | None = None,  # noqa: A002  (what torch calls it)
    keep_on_device: bool = False,
    language_model: str | None = None,
    progress: Progress = silent,
) -> Datastore:
    """Store every document, resuming an unfinished build of the same text.

    `keys` says how they are stored: float16, float32, int8, pca256-int8 or codes64, with any number.
    `compile` says whether the model's blocks are compiled, by default where that pays; a resumed build does as it
    began. `keep_on_device` leaves keys on the device too, as `resident_keys` of what is returned, if they can be.
    `language_model` names the model that the memory is for, if that is not the one that reads it.
    """
    storage = parse_storage(keys, width=lm.width)
    segment_entries = segment_entries if segment_entries is not None else usual_segment_entries(lm)
    batch_tokens = batch_tokens if batch_tokens is not None else _batch_tokens(lm)
    if segment_entries < 1 or batch_tokens < 1:
        raise ParameterError(
            f"segment entries ({segment_entries}) and batch tokens ({batch_tokens}) must be at least 1."
        )
    folder = Path(path)
    check_folder(folder)
    created, empty = not folder.exists(), True
    with writer_lock(folder, create=True), _removing_if(lambda: created and empty, folder):
        catalog = _begin(folder, lm, window or lm.window(), storage, segment_entries, batch_tokens)
        try:
            source = DocumentMeter(documents)
            with progress("reading", total=source.total_bytes, unit="bytes") as advance:
                _skip_stored(source, catalog, advance)
                waiting = DeferredEncoder(folder, catalog, storage, width=lm.width)
                work = Build(folder, catalog, lm, waiting, source, advance, compile=compile, keep=keep_on_device)
                with closing(tokenised(source, lm)) as pairs:
                    work.run(groups(pairs, segment_entries))
                advance(source.take_rest())
            helped = {} if language_model is None else {LANGUAGE_MODEL: language_model}
            catalog.put(state="complete", **helped)
        finally:
            empty = not catalog.segments()
            catalog.close()
    store = Datastore.open(folder)
    if keep_on_device:
        store.resident_keys = work.kept
    return store


@contextmanager
def _removing_if(unused: Callable[[], bool], folder: Path) -> Iterator[None]:
    """Remove the folder again where the text could not be read before anything of it was stored."""
    try:
        yield
    except CorpusError:
        if unused():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def usual_segment_entries(lm: CausalLM) -> int:
    """Choose how many rows make a segment. A stopped build loses the one that was begun: half a minute, not more."""
    if lm.device.type != "cuda":
        return 16_384 if lm.device.type == "cpu" else 65_536
    # Several segments are on the device at a time.
    return min(1 << 20, max(65_536, _SEGMENT_BYTES // (2 * lm.width)))


def _batch_tokens(lm: CausalLM) -> int:
    """Choose how many tokens are read at once: as many as keep the device busy and fit beside the keys."""
    usual = _BATCH_TOKENS.get(lm.device.type, 16_384)
    return usual if lm.device.type == "cpu" else max(_FEWEST, min(usual, usual * _WIDTH // lm.width))


def _begin(
    folder: Path, lm: CausalLM, window: WindowShape, storage: Storage, segment_entries: int, batch_tokens: int
) -> Catalog:
    """Make a new catalog, or open that of an unfinished build with the same settings."""
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
        raise DatastoreError(f"{folder} is a finished memory already. Choose another --out, or remove it first.")
    for name, wanted in settings.items():
        found = catalog.get(name)
        if found != wanted:
            raise DatastoreError(
                f"{folder} is an unfinished build with another {name.replace('_', ' ')} "
                f"({_difference(found, wanted)}). Finish it with the same options, or remove it."
            )
    remove_unlisted(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
    return catalog


def _difference(found: Any, wanted: Any) -> str:
    """Say in what two settings differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        name = next(name for name in wanted if found.get(name) != wanted[name])
        return f"{name} {found.get(name)}, now {wanted[name]}"
    return f"{found}, now {wanted}"


def _skip_stored(documents: DocumentMeter, catalog: Catalog, advance: Advance) -> None:
    """Pass over the documents that are stored, after checking that they are the same."""
    for known in catalog.documents():
        document = next(documents, None)
        if document is None:
            raise DatastoreError(
                f"{catalog.path.parent} is an unfinished build of more text: it already holds {known.source}, which is "
                "not in the text given now. Give the same text, or remove the memory and begin again."
            )
        if (known.id, known.sha256) != (document.id, text_hash(document.text)):
            raise DatastoreError(
                f"{catalog.path.parent} is an unfinished build of other text: document {known.number + 1} was "
                f"{known.source}, now it is {document.source} or its text has changed. Give the same text in the "
                "same order, or remove the memory and begin again."
            )
        advance(documents.take(1))


@dataclass(frozen=True)
class _Segment:
    """A group and its place in the memory."""

    group: Group
    number: int
    first_row: int


class Build:
    """Reads one group after another and commits each as the next segment.

    On a fast device, segments are written in threads while the model reads on, and are committed here, in their order,
    when they are on disk.
    """

    def __init__(
        self,
        folder: Path,
        catalog: SegmentSink,
        lm: CausalLM,
        waiting: DeferredEncoder,
        source: DocumentMeter,
        advance: Advance,
        *,
        compile: bool | None,  # noqa: A002
        keep: bool,
    ) -> None:
        self._folder, self._catalog, self._lm, self._advance = folder, catalog, lm, advance
        self._compile, self._source, self._keys = compile, source, waiting
        self._window = WindowShape(**catalog.get("window"))
        self._batch_tokens: int = catalog.get("batch_tokens") or _batch_tokens(lm)
        segments = catalog.segments()
        self._number = next_segment(folder, catalog)
        self._row = segments[-1].first_row + segments[-1].rows if segments else 0
        self._offset = stored_offset(catalog)
        self._first, self._growing = catalog.next_segment() == 0, catalog.get("state") == "complete"
        self._compiling: CompileStatus | None = None
        # What is written in threads is float16 as it was read, or what the device has encoded.
        self._piped = pipelined(lm.device) and (waiting.as_read or not isinstance(waiting.codec, Plain))
        self._waiting: deque[tuple[_Segment, Future[WrittenSegment]]] = deque()
        # Only where nothing is lost by storing them.
        self.kept: list[Tensor] | None = [] if keep and self._piped and waiting.as_read and not segments else None

    def run(self, groups: Iterable[Group]) -> None:
        """Make a segment of each group. What is on disk when something goes wrong is committed before it is raised."""
        with ExitStack() as stack:
            self._disk = stack.enter_context(Disk(_seal))
            try:
                for number, group in enumerate(groups):
                    group.size = self._source.take(len(group.documents))
                    if number == 0:
                        self._prepare(group, stack)
                    self._add(group)
                self._settle(0)
                self._keys.settle()
            except BaseException:
                self._rescue()
                raise

    def _prepare(self, group: Group, stack: ExitStack) -> None:
        """Decide on the first group what holds for all; a resumed build has decided."""
        window = self._window
        if self._first:
            self._offset = _calibrate(self._lm, group, window)
            wanted = self._pays(group) if self._compile is None else self._compile
        else:
            wanted = bool(self._catalog.get("compile")) and not self._growing
        if wanted:
            shape = (max(1, self._batch_tokens // window.context), window.context)  # of every batch of whole windows
            self._compiling = stack.enter_context(compiled(self._lm.model, self._lm.key_layer, shape))

    def _pays(self, group: Group) -> bool:
        """Say whether compiling saves more than it takes, judged by how many whole windows a group has."""
        if self._lm.device.type != "cuda" or (total := self._source.total_bytes) is None:
            return False
        read = group.whole_windows(self._window) * self._window.context
        return read * total >= _PAYS * max(1, group.size)

    def _add(self, group: Group) -> None:
        if self._keys.due(self._row):
            self._settle(0)
            self._keys.settle()
        segment = _Segment(group, self._number, self._row)
        self._number, self._row = self._number + 1, self._row + group.rows
        self._settle(_BEHIND - 1)
        if self._piped and self._make_room(group.rows * self._lm.width * 2):
            collected = collect(
                self._lm,
                group.tokens,
                self._window,
                batch_tokens=self._batch_tokens,
                offset=self._offset,
                advance=group.by_bytes(self._advance),
            )
            if self.kept is not None:
                self.kept.append(collected.keys)
            values = np.concatenate([np.asarray(tokens, np.int32) for tokens in group.tokens])
            final = segment_folder(self._folder, segment.number)
            encode = self._keys.encode if self._keys.numbers is None else None
            self._waiting.append((segment, self._disk.submit(final, collected, values, self._keys.file, encode)))
        else:
            self.kept = None
            self._settle(0)
            self._commit(segment, *self._write(segment, group.by_bytes(self._advance)))

    def _make_room(self, size: int) -> bool:
        """See that the device has room for keys of so many bytes; False where they must not stay there."""
        while size > room(self._lm.device):
            if self._waiting:
                self._take()
            elif self.kept:
                self.kept = None
            else:
                return False
        return True

    def _settle(self, most: int) -> None:
        """Commit what has been written, and wait until at most so many segments are not."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0][1].done()):
            self._take()

    def _take(self) -> None:
        """Commit the oldest segment that was handed to the disk."""
        segment, future = self._waiting[0]
        written = future.result()
        if not math.isfinite(written.largest):
            raise self._undefined(segment.group)
        if written.sums is not None:
            self._commit(segment, 1.0, *written.sums)
        else:
            # Larger than float16: read once more, into a file that is divided as need be; and so from now on.
            self._piped, self.kept = False, None
            self._commit(segment, *self._write(segment, lambda _: None))
        self._waiting.popleft()  # not before: where something goes wrong, none behind it may be committed

    def _rescue(self) -> None:
        """Commit what is on its way to the disk, up to the first segment that does not get there."""
        for segment, future in self._waiting:
            if future.exception() is not None or (sums := future.result().sums) is None:
                return
            try:
                self._commit(segment, 1.0, *sums)
            except DatastoreError:  # what went wrong first is what should be told
                return

    def _write(self, segment: _Segment, advance: Advance) -> tuple[float, str, str]:
        """Read a group and write it here and now; give the scale, and the hashes of keys and values."""
        final = segment_folder(self._folder, segment.number)
        partial = final.with_suffix(".partial")
        with translate_os_errors(partial):
            partial.mkdir(parents=True)
        with self._keys.writer(partial) as writer:
            readings = self._lm.read(segment.group.tokens, self._window, batch_tokens=self._batch_tokens, logits=False)
            for reading in readings:
                keys = reading.keys.cpu()
                if self._offset is not None:
                    keys = keys - self._offset
                keys = self._keys.mapped(keys)
                if not math.isfinite(float(keys.abs().max())):
                    raise self._undefined(segment.group)
                writer.put_keys(reading.rows.numpy(), keys.numpy())
                advance(len(keys))
        with ArrayWriter(partial / VALUES_FILE, "int32") as values:
            for tokens in segment.group.tokens:
                values.append(np.asarray(tokens, np.int32))
        _seal(partial, final)
        return writer.divisor, checksum(final / self._keys.file), checksum(final / VALUES_FILE)

    def _undefined(self, group: Group) -> ModelError:
        return ModelError(
            f"{self._lm.name} gives infinite or undefined hidden states at {self._lm.key_layer.module} "
            f"(among the tokens of {group.documents[0].source} and after). Try --dtype float32 or another "
            "--key-layer."
        )

    def _commit(self, segment: _Segment, scale: float, keys_sum: str, values_sum: str) -> None:
        """Let a segment that is on disk exist."""
        row = SegmentRow(segment.number, segment.first_row, segment.group.rows, scale, keys_sum, values_sum)
        number = self._catalog.next_document()
        documents = segment.group.stored(segment.number, first_row=segment.first_row, number=number)
        facts: dict[str, Any] = {}
        if self._first:
            facts["compile"] = self._compiling is not None and not self._compiling.failed
            if self._offset is not None:
                facts["offset"] = self._offset.tolist()
        self._catalog.add_segment(row, documents, **facts)
        self._first = False


def _seal(partial: Path, final: Path) -> None:
    """Give a folder that was written its name, so that both are on disk."""
    with translate_os_errors(final):
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)


def _calibrate(lm: CausalLM, group: Group, window: WindowShape) -> Tensor | None:
    """Find the mean of the keys where some are too large for fine steps of float16; None where all is well.

    Some models have a few dimensions that are thousands of times larger than the rest and hardly vary. Stored less
    their mean, they take as little of the precision as the others do.
    """
    for count, bound in ((_GLANCE, _LARGE / 4), (_CALIBRATION, _LARGE)):
        keys = torch.cat([reading.keys.cpu() for reading in lm.read(group.beginning(count), window, logits=False)])
        if float(keys.abs().max()) <= bound:
            return None
    return keys.mean(0)
