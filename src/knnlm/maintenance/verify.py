"""Verify a store: compare the catalog with the files and list every problem. Nothing is changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import Codec
from knnlm.datastore.indexes import open_index
from knnlm.datastore.integrity import verify_checksum
from knnlm.datastore.manifest import MANIFEST_FILE, MANIFEST_VERSION, is_sharded, read_manifest
from knnlm.datastore.remote import fetch_shard
from knnlm.datastore.schema import (
    ADAPTED_FILE,
    CATALOG_FILE,
    CODEC_FILE,
    COUNTS_FILE,
    DECODER_FOLDER,
    GATES_FOLDER,
    KEPT_FILE,
    KEYS_FILE,
    MAP_FILE,
    NGRAM_FOLDER,
    SHARDED,
    STAGING_FILE,
    UNENCODED_FILE,
    VALUES_FILE,
    SegmentRow,
    array_checksums,
    segment_folder,
)
from knnlm.datastore.segments import (
    KEY_DTYPES,
    MAX_VOCAB_SIZE,
    array_shapes,
    index_file,
    open_array,
    segment_faults,
    skip_header,
)
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.store import Datastore, stored_codec, stored_map
from knnlm.datastore.suffix_array import stored_suffix_array
from knnlm.datastore.validation import check_regular_file
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmError
from knnlm.io import checksum
from knnlm.progress import Advance, Progress, silent

# Modules of memories and mixtures import torch, so they are imported only where a store has such files.

# Kinds of problems: the part of the store that is damaged decides what a repair can do.
CATALOG, SEGMENT, MAP, CODEC, INDEX, DERIVED = "catalog", "segment", "map", "codec", "index", "derived"
TABLE = "table"  # rows of a catalog table do not match the table's checksum; which row is unknown
DECODER = "decoder"

SQLITE_ERROR = "SQLite reports: "  # begins the message of a problem that SQLite's own check found

_STATES = ("building", "complete")
_MISSING_SHARD = (
    "the shard is missing: put it back, or build it again, and name the new place: knnlm shards join SHARD... --out "
    "{folder} --replace"
)
_CHECKSUM_MISMATCH = "checksum mismatch (SHA-256)"
_CHUNK_BYTES = 1 << 24
_MAX_ATTEMPTS = 3
_MAX_MODEL_WIDTH = 1 << 24
_MAX_WINDOW = 1 << 31

ArrayCheck = Callable[[NDArray[Any]], str | None]
Ranges = dict[int, list[tuple[int, int]]]  # segment → (first entry, number of entries)


@dataclass(frozen=True)
class Problem:
    """One problem of a store."""

    file: str  # relative to the store
    message: str
    kind: str = CATALOG
    segment: int | None = None  # the segment whose documents are affected
    table: str | None = None  # the catalog table, or block of one, whose checksum does not match

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


@dataclass(frozen=True)
class Verification:
    """The result of verifying a store."""

    store: Path
    deep: bool
    format: int | None
    state: str | None
    documents: int
    tokens: int
    files: int
    bytes: int  # of the files that were checked
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # findings that are no problems
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(frozen=True)
class StoreMetadata:
    """The metadata that files are checked against; None where the catalog has no valid value."""

    format: int | None = None
    state: str | None = None
    codec: Codec | None = None
    unencoded: bool = False  # whether keys are stored before encoding, because the codec is not fitted yet
    vocab_size: int | None = None


def verify(
    path: str | Path, *, deep: bool = False, trust_index: bool = True, progress: Progress = silent
) -> Verification:
    """Return every problem of a store; `deep` reads every byte.

    With `trust_index` False no FAISS file is opened.
    """
    folder = Path(path)
    if not (folder / CATALOG_FILE).exists():
        message = f"not a store: it has no {CATALOG_FILE}" if folder.is_dir() else "does not exist"
        raise DatastoreError(f"{folder}: {message}. See knnlm build and knnlm repair.")
    if is_sharded(folder):
        return _verify_shards(folder, deep=deep, trust_index=trust_index, progress=progress)
    for _ in range(_MAX_ATTEMPTS):
        before = _contents(folder)
        verification = _Verifier(folder, deep, trust_index).run(progress)
        # A concurrent writer may have replaced segments: files that seem to be missing are then only replaced.
        if verification.sound or before == _contents(folder):
            break
    return verification


def _verify_shards(folder: Path, *, deep: bool, trust_index: bool, progress: Progress) -> Verification:
    """Check every shard of a sharded store, its manifest and what was derived from all of them."""
    begin = time.perf_counter()
    own = _Verifier(folder, deep, trust_index)
    own.files.append(folder / MANIFEST_FILE)
    found: list[Verification] = []
    for place in _shard_folders(own):
        if not (place / CATALOG_FILE).exists():
            own.problems.append(Problem(str(place), _MISSING_SHARD.format(folder=folder)))
            continue
        if is_sharded(place):
            own.problems.append(Problem(str(place), "the shard is a sharded store itself"))
            continue
        one = verify(place, deep=deep, trust_index=trust_index, progress=progress)
        own.problems += [replace(problem, file=str(place / problem.file)) for problem in one.problems]
        own.notes += [f"{place}: {note}" for note in one.notes]
        found.append(one)
    if all(one.sound for one in found) and not own.problems:
        own.check_sharded()
    return Verification(
        store=folder,
        deep=deep,
        format=MANIFEST_VERSION,
        state=SHARDED,
        documents=sum(one.documents for one in found),
        tokens=sum(one.tokens for one in found),
        files=len(own.files) + sum(one.files for one in found),
        bytes=sum(file.stat().st_size for file in own.files if file.is_file()) + sum(one.bytes for one in found),
        problems=tuple(own.problems),
        notes=tuple(own.notes),
        seconds=time.perf_counter() - begin,
    )


def _shard_folders(verifier: _Verifier) -> list[Path]:
    try:
        manifest = read_manifest(verifier.folder)
        for url in manifest.urls:
            fetch_shard(url)
        return manifest.folders(verifier.folder)
    except KnnlmError as error:
        verifier.problems.append(Problem(MANIFEST_FILE, str(error)))
        return []


def _contents(folder: Path) -> Any:
    """Return a value that changes when the catalog does."""
    try:
        with closing(Catalog.open(folder / CATALOG_FILE, compare=False)) as catalog:
            return catalog.segments(), catalog.indexes(), catalog.get("generation")
    except KnnlmError as error:
        return str(error)


class _Verifier:
    """One pass over a store that collects problems."""

    def __init__(self, folder: Path, deep: bool, trust_index: bool) -> None:
        self.folder, self.deep, self.trust_index = folder, deep, trust_index
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.staged: set[Path] = set()  # folders of segments that are not committed yet
        self.files: list[Path] = [folder / CATALOG_FILE]
        self.begin = time.perf_counter()

    def run(self, progress: Progress) -> Verification:
        """Check the catalog, the segments and everything derived from them."""
        metadata, documents, removed_count = StoreMetadata(), 0, 0
        segments: list[SegmentRow] = []
        with self._collect(CATALOG_FILE), closing(Catalog.open(self.folder / CATALOG_FILE, compare=False)) as catalog:
            self.problems += [Problem(CATALOG_FILE, f"{SQLITE_ERROR}{line}") for line in catalog.integrity()]
            self._check_tables(catalog)
            metadata, problems = read_metadata(catalog)
            self.problems += problems
            segments = catalog.segments()
            self.problems += check_segments(segments)
            documents = catalog.document_count()
            removed = removed_entries(catalog)
            removed_count = sum(count for ranges in removed.values() for _, count in ranges)
            self.problems += check_documents(catalog, segments, removed)
            self._check_segment_files(metadata, segments, progress)
            self._check_indexes(catalog)
            self._check_missing_gates(catalog)
            self._note_staged(catalog)
        self._check_links()
        self._note_uncommitted(segments)
        self._check_derived()
        self._check_decoder()
        return Verification(
            store=self.folder,
            deep=self.deep,
            format=metadata.format,
            state=metadata.state,
            documents=documents,
            tokens=sum(segment.entries for segment in segments) - removed_count,
            files=len(self.files),
            bytes=sum(file.stat().st_size for file in self.files if file.is_file()),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            seconds=time.perf_counter() - self.begin,
        )

    def check_sharded(self) -> None:
        """Check the manifest of a sharded store, and the files in its own folder; its shards are sound."""
        with self._collect(CATALOG_FILE), closing(Catalog.open(self.folder / CATALOG_FILE, compare=False)) as catalog:
            self.problems += [Problem(CATALOG_FILE, f"{SQLITE_ERROR}{line}") for line in catalog.integrity()]
            self._check_tables(catalog)
            self._check_missing_gates(catalog)
        with self._collect(MANIFEST_FILE):
            Datastore.open(self.folder, trust_index=False).close()
        self._check_derived()
        self._check_decoder()

    @contextmanager
    def _collect(self, file: str, kind: str = CATALOG) -> Iterator[None]:
        """Turn an error into a problem of this file."""
        try:
            yield
        except (KnnlmError, OSError) as error:
            message = str(error).removeprefix(str(self.folder / file)).lstrip(": ")
            self.problems.append(Problem(file, message, kind))

    def _check_tables(self, catalog: Catalog) -> None:
        """Compare every row of every table with the checksums in the catalog."""
        for table in catalog.mismatched_parts():
            self.problems.append(Problem(CATALOG_FILE, f"{_CHECKSUM_MISMATCH} in {table}", TABLE, table=table))

    def _check_segment_files(self, metadata: StoreMetadata, segments: list[SegmentRow], progress: Progress) -> None:
        if metadata.codec is None or metadata.vocab_size is None:
            return  # what the files should contain is unknown, which is a problem already
        segment_files = [
            SegmentFiles(
                self.folder,
                segment,
                codec=metadata.codec,
                vocab_size=metadata.vocab_size,
                unencoded=metadata.unencoded,
            )
            for segment in segments
        ]
        paths = [path for files in segment_files for path in files.paths()]
        self.files += paths
        total = sum(path.stat().st_size for path in paths if path.is_file()) if self.deep else None
        with progress("reading files" if self.deep else "checking files", total=total, unit="bytes") as advance:
            for files in segment_files:
                self.problems += files.check(deep=self.deep, advance=advance)

    def _check_indexes(self, catalog: Catalog) -> None:
        for row in catalog.indexes():
            file = index_file(self.folder, row)
            name = file.relative_to(self.folder).as_posix()
            self.files.append(file)
            with self._collect(name, INDEX):
                check_regular_file(self.folder, file)
                if not file.is_file():
                    self.problems.append(Problem(name, "is missing", INDEX))
                elif self.deep and checksum(file) != row.sha256:
                    self.problems.append(Problem(name, _CHECKSUM_MISMATCH, INDEX))
                elif self.deep and self.trust_index and not self.problems and catalog.get("state") == "complete":
                    with closing(Datastore.open(self.folder)) as store:
                        open_index(store, metric=row.metric, rerank=False)

    def _check_missing_gates(self, catalog: Catalog) -> None:
        """Find tuned weights whose gate file is missing."""
        tunings = catalog.get("tunings")
        if not tunings or not isinstance(tunings, dict):
            return
        from knnlm.mixture.saved import gate_of

        files = {gate_of(tuning) for tuning in tunings.values()}
        for file in sorted(name for name in files if name is not None):
            if not (self.folder / GATES_FOLDER / file).exists():
                message = "is missing, but tuned weights need it"
                self.problems.append(Problem(f"{GATES_FOLDER}/{file}", message, DERIVED))

    def _check_links(self) -> None:
        """Find symbolic links that lead out of the store."""
        for root, folders, files in os.walk(self.folder):
            for path in (Path(root) / name for name in [*folders, *files]):
                if not path.is_symlink() or (target := path.resolve()).is_relative_to(self.folder.resolve()):
                    continue
                name = path.relative_to(self.folder).as_posix()
                if all(problem.file != name for problem in self.problems):
                    self.problems.append(Problem(name, f"is a link out of the store, to {target}", DERIVED))

    def _note_staged(self, catalog: Catalog) -> None:
        """Note an addition that was interrupted or is running: its documents are not in the store yet."""
        staged = StagedAddition(self.folder, catalog)
        self.staged = set(staged.folders)
        if self.staged:
            self.notes.append(
                f"{STAGING_FILE}: {staged.document_count:,} documents in {len(self.staged):,} segments belong to an "
                "add that was interrupted or is running. The same command resumes it; knnlm compact drops them."
            )

    def _note_uncommitted(self, segments: list[SegmentRow]) -> None:
        committed = {segment_folder(self.folder, segment.id) for segment in segments} | self.staged
        extra = sorted(set((self.folder / "segments").glob("*")) - committed)
        extra += sorted(self.folder.glob("*.partial"))
        self.notes += [
            f"{path.relative_to(self.folder).as_posix()} is not in the catalog: an interrupted process left it, or a "
            "process is writing it. The next writer removes it."
            for path in extra
        ]

    def _check_derived(self) -> None:
        """Check files that are derived from segments, where they exist."""
        checks: list[tuple[Path, Callable[[Path], object]]] = []
        if self.deep and (self.folder / NGRAM_FOLDER).exists() and self._can_open():
            checks.append((self.folder / NGRAM_FOLDER, self._check_ngram))
        if (self.folder / "output").exists():
            from knnlm.memories.output import OUTPUT_FILE, load_output

            checks += [(file, load_output) for file in [self.folder / "output" / OUTPUT_FILE] if file.exists()]
        if gates := sorted((self.folder / GATES_FOLDER).glob("*.safetensors")):
            from knnlm.mixture.saved import load_networks

            checks += [(file, load_networks) for file in gates]
        checks += [(file, _check_adaptation) for file in [self.folder / ADAPTED_FILE] if file.exists()]
        for file, check in checks:
            self.files += sorted(file.glob("*")) if file.is_dir() else [file]
            with self._collect(file.relative_to(self.folder).as_posix(), DERIVED):
                if not file.is_dir():
                    check_regular_file(self.folder, file)
                check(file)
        self.files += [self.folder / name for name in (MAP_FILE, CODEC_FILE) if (self.folder / name).is_file()]

    def _can_open(self) -> bool:
        try:
            Datastore.open(self.folder, trust_index=False).close()
        except KnnlmError:
            return False
        return True

    def _check_ngram(self, _: Path) -> None:
        with closing(Datastore.open(self.folder, trust_index=False)) as store:
            if stored_suffix_array(store) is None:
                self.notes.append(f"{NGRAM_FOLDER} is stale. It is rebuilt when it is needed.")

    def _check_decoder(self) -> None:
        """Check the card of a trained decoder and, if deep, every byte of its files."""
        folder = self.folder / DECODER_FOLDER
        if not folder.exists():
            return
        from knnlm.lm.loading import CHECKSUMS_FILE, damaged_files
        from knnlm.memories.decoder import CARD, load_card

        self.files += sorted(file for file in folder.glob("*") if file.is_file())
        with self._collect(f"{DECODER_FOLDER}/{CARD}", DECODER):
            load_card(folder)
        damaged = damaged_files(folder) if self.deep or not (folder / CHECKSUMS_FILE).exists() else []
        self.problems += [Problem(f"{DECODER_FOLDER}/{name}", message, DECODER) for name, message in damaged or []]
        if damaged is None:
            self.notes.append(f"{DECODER_FOLDER} has no {CHECKSUMS_FILE}, so its files cannot be verified.")


def _check_adaptation(file: Path) -> None:
    """Raise where the record of an adaptation does not match its own checksum."""
    try:
        metadata = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise DatastoreCorrupt(f"{file}: not a JSON object")
    verify_checksum(file, metadata, "")


class SegmentFiles:
    """The arrays of one segment and their checks."""

    def __init__(
        self, folder: Path, segment: SegmentRow, *, codec: Codec, vocab_size: int, unencoded: bool = False
    ) -> None:
        """Take `codec` for the type and shape of keys; `unencoded` keys are in a file of another name."""
        self._folder, self._segment, self._vocab_size = folder, segment, vocab_size
        self._shapes = array_shapes(segment, codec)
        if unencoded:
            self._shapes[UNENCODED_FILE] = self._shapes.pop(KEYS_FILE)
        self._checksums = {**array_checksums(segment), UNENCODED_FILE: segment.keys_sha256}

    def paths(self) -> list[Path]:
        """Return the paths of the segment's files."""
        return [segment_folder(self._folder, self._segment.id) / name for name in self._shapes]

    def check(self, *, deep: bool, advance: Advance) -> list[Problem]:
        """Return problems of type, shape and size; if `deep`, of checksums and contents too."""
        problems = []
        for path in self.paths():
            message = self._check_file(path, deep, advance)
            if message is not None:
                name = path.relative_to(self._folder).as_posix()
                problems.append(Problem(name, message, SEGMENT, self._segment.id))
        return problems

    def _check_file(self, path: Path, deep: bool, advance: Advance) -> str | None:
        try:
            check_regular_file(self._folder, path)
            dtype, shape = self._shapes[path.name]
            open_array(path, dtype, shape)
            return self._check_contents(path, dtype, shape, advance) if deep else None
        except DatastoreError as error:
            return _without_path(str(error), path)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"

    def _check_contents(self, path: Path, dtype: str, shape: tuple[int, ...], advance: Advance) -> str | None:
        """Hash the file and check its numbers, in one pass."""
        checks: dict[str, ArrayCheck] = {
            KEYS_FILE: _check_keys,
            UNENCODED_FILE: _check_keys,
            VALUES_FILE: self._check_values,
            KEPT_FILE: _AscendingCheck(self._segment.entries),
            COUNTS_FILE: _check_counts,
        }
        message: str | None = None
        row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))
        chunk_bytes = max(1, _CHUNK_BYTES // row_bytes) * row_bytes
        with path.open("rb") as file:
            begin = skip_header(file)
            file.seek(0)
            digest = hashlib.sha256(file.read(begin))
            while chunk := file.read(chunk_bytes):
                digest.update(chunk)
                complete = len(chunk) // row_bytes * row_bytes
                message = message or checks[path.name](np.frombuffer(chunk[:complete], dtype))
                advance(len(chunk))
        if digest.hexdigest() != self._checksums[path.name]:
            return _CHECKSUM_MISMATCH
        return message

    def _check_values(self, values: NDArray[Any]) -> str | None:
        if values.min(initial=0) < 0 or values.max(initial=0) >= self._vocab_size:
            return f"contains tokens outside 0 to {self._vocab_size - 1:,}"
        return None


class _AscendingCheck:
    """Check, chunk by chunk, that the entries that have keys ascend within their segment."""

    def __init__(self, entries: int) -> None:
        self._entries, self._last = entries, -1

    def __call__(self, kept: NDArray[Any]) -> str | None:
        steps = np.diff(kept.astype(np.int64), prepend=self._last)
        self._last = int(kept[-1]) if len(kept) else self._last
        if (steps <= 0).any() or self._last >= self._entries:
            return f"does not contain ascending entries of the segment's {self._entries:,}"
        return None


def _check_keys(keys: NDArray[Any]) -> str | None:
    if keys.dtype.kind == "f" and not np.isfinite(keys).all():
        return "contains keys that are not finite"
    return None


def _check_counts(counts: NDArray[Any]) -> str | None:
    if not (np.isfinite(counts) & (counts > 0)).all():
        return "contains counts that are not finite and positive"
    return None


def _without_path(message: str, path: Path) -> str:
    """Return an error message without the path it begins with and without its advice."""
    text = message.removeprefix(str(path)).lstrip(": ")
    return text.partition(". ")[0].rstrip(".")


def read_metadata(catalog: Catalog) -> tuple[StoreMetadata, list[Problem]]:
    """Return the metadata that every store has, and a problem for each invalid value."""
    problems: list[Problem] = []

    def expect(name: str, value: Any, valid: bool) -> Any:
        if not valid:
            problems.append(Problem(CATALOG_FILE, f"the {name} of the store is {_shorten(value)}"))
        return value if valid else None

    model = expect("model", model := catalog.get("model"), isinstance(model, dict)) or {}
    width = expect("model's width", value := model.get("width"), _is_int(value, 1, _MAX_MODEL_WIDTH))
    vocab_size = expect("model's vocabulary", value := model.get("vocab_size"), _is_int(value, 1, MAX_VOCAB_SIZE))
    expect("model's name", value := model.get("name"), isinstance(value, str))
    window = catalog.get("window")
    sizes = window if isinstance(window, dict) else {}
    expect("window", window, all(_is_int(sizes.get(name), 1, _MAX_WINDOW) for name in ("context", "stride")))
    state = expect("state", value := catalog.get("state"), value in _STATES)
    key_dtype = catalog.get("key_dtype")
    valid_dtype = isinstance(key_dtype, str) and (key_dtype in KEY_DTYPES or _has_codec(catalog))
    expect("key precision", key_dtype, valid_dtype)
    offset = catalog.get("offset")
    expect("offset", offset, offset is None or _is_vector(offset, width))
    codec = None
    if width is not None and valid_dtype:
        codec, codec_problems = _read_codec(catalog, width)
        problems += codec_problems
    unencoded = _has_codec(catalog) and catalog.get("codec") is None
    return StoreMetadata(catalog.get("format"), state, codec, unencoded, vocab_size), problems


def _has_codec(catalog: Catalog) -> bool:
    """Whether keys are encoded, or will be once their codec is fitted."""
    return catalog.get("codec") is not None or catalog.get("keys") is not None


def _read_codec(catalog: Catalog, width: int) -> tuple[Codec | None, list[Problem]]:
    """Read the key map and the codec, which are files beside the catalog."""
    file, kind = MAP_FILE, MAP
    try:
        key_map = stored_map(catalog, width)
        file, kind = CODEC_FILE, CODEC
        return stored_codec(catalog, width if key_map is None else key_map.width), []
    except DatastoreError as error:
        message = str(error).removeprefix(str(catalog.path.with_name(file))).lstrip(": ")
        return None, [Problem(file, message, kind)]


def check_segments(segments: Sequence[SegmentRow]) -> list[Problem]:
    """Return problems of the segments' entries, which must be numbered without gaps."""
    return [
        Problem(CATALOG_FILE, message, SEGMENT, segment.id) if its_own else Problem(CATALOG_FILE, message)
        for segment, message, its_own in segment_faults(segments)
    ]


def removed_entries(catalog: Catalog) -> Ranges:
    """Return the entries of removed documents by segment."""
    ranges: Ranges = {}
    for row in catalog.removed():
        ranges.setdefault(row.segment, []).append((row.first_entry, row.entries))
    return ranges


def check_documents(catalog: Catalog, segments: Sequence[SegmentRow], removed: Ranges) -> list[Problem]:
    """Return problems of documents: with removed ranges, they must fill their segments without overlap or gap."""
    problems, counted = [], 0
    for segment in segments:
        documents = catalog.documents_of(segment.id)
        counted += len(documents)
        ranges = [(document.first_entry, document.entries, f"document {document.id!r}") for document in documents]
        ranges += [(first, count, "a removed document") for first, count in removed.get(segment.id, [])]
        if (message := _check_ranges(segment, ranges)) is not None:
            problems.append(Problem(CATALOG_FILE, f"segment {segment.id}: {message}", SEGMENT, segment.id))
    known = {segment.id for segment in segments}
    if lost := sum(count for segment, ranges in removed.items() if segment not in known for _, count in ranges):
        problems.append(Problem(CATALOG_FILE, f"{lost:,} removed entries belong to segments missing from the catalog"))
    if counted != catalog.document_count():
        missing = catalog.document_count() - counted
        problems.append(Problem(CATALOG_FILE, f"{missing:,} documents belong to segments missing from the catalog"))
    return problems


def _check_ranges(segment: SegmentRow, ranges: Sequence[tuple[int, int, str]]) -> str | None:
    """Return the first overlap or gap of (first entry, number of entries, name) in a segment."""
    expected, end = segment.first_entry, segment.first_entry + segment.entries
    for first, count, name in sorted(ranges):
        if first != expected or first + count > end:
            return f"{name} has entries {first:,} to {first + count - 1:,}; entry {expected:,} was expected"
        expected = first + count
    return None if expected == end else f"entries {expected:,} to {end - 1:,} belong to no document"


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_vector(value: Any, width: int | None) -> bool:
    return (
        isinstance(value, list)
        and (width is None or len(value) == width)
        and all(isinstance(number, (int, float)) and math.isfinite(number) for number in value)
    )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
