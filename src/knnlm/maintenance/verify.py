"""What was found when a memory was looked through. Knows nothing about how.

Look through the files of a segment. Knows nothing about catalogs beyond the row of the segment.

Check what a catalog says, as far as it can be without looking at a file. Knows nothing about arrays.

Say all that is wrong with a memory, file by file. Changes nothing, and knows nothing about repairs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import Codec
from knnlm.datastore.indexes import open_index
from knnlm.datastore.integrity import check_sum
from knnlm.datastore.paths import (
    ADAPTED_FILE,
    CATALOG_FILE,
    CODEC_FILE,
    COUNTS_FILE,
    GATES_FOLDER,
    KEPT_FILE,
    KEYS_FILE,
    MAP_FILE,
    NGRAM_FOLDER,
    STAGING_FILE,
    UNENCODED_FILE,
    VALUES_FILE,
    segment_folder,
)
from knnlm.datastore.schema import SegmentRow, array_sums
from knnlm.datastore.segments import (
    KEY_DTYPES,
    VOCABULARY,
    array_shapes,
    index_file,
    open_array,
    segment_faults,
    skip_header,
)
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.store import Datastore, stored_codec, stored_map
from knnlm.datastore.suffix_array import kept_suffixes
from knnlm.datastore.validation import check_place
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmError
from knnlm.io import checksum
from knnlm.lm.loading import CHECKSUMS_FILE, damaged_files
from knnlm.memories.decoder import CARD, load_card
from knnlm.memories.output import OUTPUT_FILE, load_output
from knnlm.mixture.saved import gate_of, load_networks
from knnlm.progress import Advance, Progress, silent

# The parts of a memory.
CATALOG, SEGMENT, MAP, CODEC, INDEX, DERIVED = "catalog", "segment", "map", "codec", "index", "derived"

STUDENT = "student"

SUM = "sum"  # a part of the catalog that is not as it was written; which cell of it is not known


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    file: str  # within the memory
    what: str
    part: str = CATALOG
    segment: int | None = None  # whose documents it touches
    table: str | None = None  # the part of the catalog that is not as it was written

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class Verification:
    """All that was found."""

    memory: Path
    deep: bool
    format: int | None
    state: str | None
    documents: int
    tokens: int
    files: int
    bytes: int  # of the files that were looked at
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # what is not wrong, but worth knowing
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


_PIECE = 1 << 24  # bytes at a time

ScanOptions = Callable[[NDArray[Any]], str | None]


class SegmentFiles:
    """The arrays of one segment, and what must be true of them."""

    def __init__(
        self, folder: Path, segment: SegmentRow, codec: Codec, *, vocab_size: int, waiting: bool = False
    ) -> None:
        """Keys that are `waiting` for their codec lie in a file of another name, as the codec that is given says."""
        self._folder, self._segment, self._vocab_size = folder, segment, vocab_size
        self._shapes = array_shapes(segment, codec)
        if waiting:
            self._shapes[UNENCODED_FILE] = self._shapes.pop(KEYS_FILE)
        self._sums = {**array_sums(segment), UNENCODED_FILE: segment.keys_sha256}

    def paths(self) -> list[Path]:
        """Name the files."""
        return [segment_folder(self._folder, self._segment.id) / name for name in self._shapes]

    def check(self, *, deep: bool, advance: Advance) -> list[Problem]:
        """Say what is wrong: type, shape and size; if `deep`, also checksums and contents."""
        found = []
        for path in self.paths():
            what = self._look(path, deep, advance)
            if what is not None:
                name = path.relative_to(self._folder).as_posix()
                found.append(Problem(name, what, SEGMENT, self._segment.id))
        return found

    def _look(self, path: Path, deep: bool, advance: Advance) -> str | None:
        try:
            check_place(self._folder, path)
            dtype, shape = self._shapes[path.name]
            open_array(path, dtype, shape)
            return self._read(path, dtype, shape, advance) if deep else None
        except DatastoreError as error:
            return _less_path(str(error), path)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"

    def _read(self, path: Path, dtype: str, shape: tuple[int, ...], advance: Advance) -> str | None:
        """Hash the file and look at its numbers, in one pass."""
        looks: dict[str, ScanOptions] = {
            KEYS_FILE: _look_at_keys,
            UNENCODED_FILE: _look_at_keys,
            VALUES_FILE: self._look_at_values,
            KEPT_FILE: _Ascending(self._segment.rows),
            COUNTS_FILE: _look_at_counts,
        }
        wrong: str | None = None
        row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))
        piece_bytes = max(1, _PIECE // row_bytes) * row_bytes
        with path.open("rb") as file:
            begin = skip_header(file)
            file.seek(0)
            digest = hashlib.sha256(file.read(begin))
            while piece := file.read(piece_bytes):
                digest.update(piece)
                whole = len(piece) // row_bytes * row_bytes
                wrong = wrong or looks[path.name](np.frombuffer(piece[:whole], dtype))
                advance(len(piece))
        if digest.hexdigest() != self._sums[path.name]:
            return "is not as it was written: its SHA-256 is not the catalog's"
        return wrong

    def _look_at_values(self, values: NDArray[Any]) -> str | None:
        if values.min(initial=0) < 0 or values.max(initial=0) >= self._vocab_size:
            return f"holds tokens that are not from 0 to {self._vocab_size - 1:,}"
        return None


class _Ascending:
    """Rows that have keys ascend, within their segment; pieces come one after another."""

    def __init__(self, rows: int) -> None:
        self._rows, self._last = rows, -1

    def __call__(self, kept: NDArray[Any]) -> str | None:
        steps = np.diff(kept.astype(np.int64), prepend=self._last)
        self._last = int(kept[-1]) if len(kept) else self._last
        if (steps <= 0).any() or self._last >= self._rows:
            return f"does not name ascending rows of the {self._rows:,} of the segment"
        return None


def _look_at_keys(keys: NDArray[Any]) -> str | None:
    if keys.dtype.kind == "f" and not np.isfinite(keys).all():
        return "holds keys that are no finite numbers"
    return None


def _look_at_counts(counts: NDArray[Any]) -> str | None:
    if not (np.isfinite(counts) & (counts > 0)).all():
        return "holds counts that are not finite and above 0"
    return None


def _less_path(message: str, path: Path) -> str:
    """Leave out the path that an error begins with, and its advice: both are said elsewhere."""
    text = message.removeprefix(str(path)).lstrip(": ")
    return text.partition(". ")[0].rstrip(".")


STATES = ("building", "complete")

Ranges = dict[int, list[tuple[int, int]]]  # segment → (first row, rows)


@dataclass(frozen=True)
class StoreMetadata:
    """What the files are checked against; None where the catalog does not say."""

    format: int | None = None
    state: str | None = None
    codec: Codec | None = None  # what keys are stored by
    waiting: bool = False  # whether they still wait to be
    vocab_size: int | None = None


def read_metadata(catalog: Catalog) -> tuple[StoreMetadata, list[Problem]]:
    """Read the facts that every memory has, and say which are not there or of no sense."""
    problems: list[Problem] = []

    def expect(name: str, value: Any, fine: bool) -> Any:
        if not fine:
            problems.append(Problem(CATALOG_FILE, f"the {name} of the memory is {_short(value)}"))
        return value if fine else None

    model = expect("model", model := catalog.get("model"), isinstance(model, dict)) or {}
    width = expect("model's width", found := model.get("width"), _whole(found, 1, 1 << 24))
    vocab_size = expect("model's vocabulary", found := model.get("vocab_size"), _whole(found, 1, VOCABULARY))
    expect("model's name", found := model.get("name"), isinstance(found, str))
    window = catalog.get("window")
    sizes = window if isinstance(window, dict) else {}
    expect("window", window, all(_whole(sizes.get(name), 1, 1 << 31) for name in ("context", "stride")))
    state = expect("state", found := catalog.get("state"), found in STATES)
    precise = isinstance(found := catalog.get("key_dtype"), str) and (found in KEY_DTYPES or _coded(catalog))
    expect("precision of keys", found, precise)
    offset = catalog.get("offset")
    expect("offset", offset, offset is None or _is_vector(offset, width))
    codec = None
    if width is not None and precise:
        codec, wrong = _read_codec(catalog, width)
        problems += wrong
    waiting = _coded(catalog) and catalog.get("codec") is None
    return StoreMetadata(catalog.get("format"), state, codec, waiting, vocab_size), problems


def _coded(catalog: Catalog) -> bool:
    """Whether keys are stored otherwise than as numbers, or are to be."""
    return catalog.get("codec") is not None or catalog.get("keys") is not None


def _read_codec(catalog: Catalog, width: int) -> tuple[Codec | None, list[Problem]]:
    """Read what lies beside the catalog and says what keys are: their map and their codec."""
    file, part = MAP_FILE, MAP
    try:
        key_map = stored_map(catalog, width)
        file, part = CODEC_FILE, CODEC
        return stored_codec(catalog, width if key_map is None else key_map.width), []
    except DatastoreError as error:
        return None, [Problem(file, str(error).removeprefix(str(catalog.path.with_name(file))).lstrip(": "), part)]


def check_segments(segments: Sequence[SegmentRow]) -> list[Problem]:
    """Rows must be numbered without gaps."""
    return [
        Problem(CATALOG_FILE, what, SEGMENT, segment.id) if its_own else Problem(CATALOG_FILE, what)
        for segment, what, its_own in segment_faults(segments)
    ]


def removed_rows(catalog: Catalog) -> Ranges:
    """Give the rows of removed documents by segment."""
    ranges: Ranges = {}
    for row in catalog.removed():
        ranges.setdefault(row.segment, []).append((row.first_row, row.rows))
    return ranges


def check_documents(catalog: Catalog, segments: Sequence[SegmentRow], removed: Ranges) -> list[Problem]:
    """Documents, and what was removed, must fill their segments: nothing twice, nothing left over."""
    problems, counted = [], 0
    for segment in segments:
        documents = catalog.documents_of(segment.id)
        counted += len(documents)
        ranges = [(document.first_row, document.rows, f"document {document.id!r}") for document in documents]
        ranges += [(first, rows, "what was removed") for first, rows in removed.get(segment.id, [])]
        expected, end = segment.first_row, segment.first_row + segment.rows
        for first, rows, name in sorted(ranges):
            if first != expected or first + rows > end:
                what = f"{name} has rows {first:,} to {first + rows - 1:,}; row {expected:,} was expected"
                problems.append(Problem(CATALOG_FILE, f"segment {segment.id}: {what}", SEGMENT, segment.id))
                break
            expected = first + rows
        else:
            if expected != end:
                what = f"rows {expected:,} to {end - 1:,} belong to no document"
                problems.append(Problem(CATALOG_FILE, f"segment {segment.id}: {what}", SEGMENT, segment.id))
    known = {segment.id for segment in segments}
    if lost := sum(rows for segment, ranges in removed.items() if segment not in known for _, rows in ranges):
        problems.append(Problem(CATALOG_FILE, f"{lost:,} removed rows are of segments that the catalog does not have"))
    if counted != catalog.document_count():
        missing = catalog.document_count() - counted
        problems.append(Problem(CATALOG_FILE, f"{missing:,} documents are of segments that the catalog does not have"))
    return problems


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_vector(value: Any, width: int | None) -> bool:
    return (
        isinstance(value, list)
        and (width is None or len(value) == width)
        and all(isinstance(number, (int, float)) and math.isfinite(number) for number in value)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


_ATTEMPTS = 3


def verify(
    path: str | Path, *, deep: bool = False, trust_index: bool = True, progress: Progress = silent
) -> Verification:
    """Look through a memory; `deep` reads every byte. With `trust_index` False no file of FAISS is opened."""
    folder = Path(path)
    if not (folder / CATALOG_FILE).exists():
        what = f"is not a memory: it has no {CATALOG_FILE}" if folder.is_dir() else "is not there"
        raise DatastoreError(f"{folder} {what}. See knnlm build and knnlm repair.")
    for _ in range(_ATTEMPTS):
        before = _contents(folder)
        found = _Verifier(folder, deep, trust_index).run(progress)
        # Another process may have swapped segments meanwhile: what is missing then was only moved on.
        if found.sound or before == _contents(folder):
            break
    return found


def _contents(folder: Path) -> Any:
    """Tell whether the catalog has changed."""
    try:
        with closing(Catalog.open(folder / CATALOG_FILE, compare=False)) as catalog:
            return catalog.segments(), catalog.indexes(), catalog.get("generation")
    except KnnlmError as error:
        return str(error)


class _Verifier:
    """One pass over a memory, which gathers what it finds."""

    def __init__(self, folder: Path, deep: bool, trust_index: bool) -> None:
        self.folder, self.deep, self.trust_index = folder, deep, trust_index
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.pending: set[Path] = set()  # folders of segments
        self.files: list[Path] = [folder / CATALOG_FILE]
        self.begin = time.perf_counter()

    def run(self, progress: Progress) -> Verification:
        """Look at the catalog, the segments, and what was made of them."""
        facts, documents, gone = StoreMetadata(), 0, 0
        segments: list[SegmentRow] = []
        with self._gathering(CATALOG_FILE), closing(Catalog.open(self.folder / CATALOG_FILE, compare=False)) as catalog:
            self.problems += [Problem(CATALOG_FILE, f"SQLite says: {line}") for line in catalog.integrity()]
            self._sums(catalog)
            facts, wrong = read_metadata(catalog)
            self.problems += wrong
            segments = catalog.segments()
            self.problems += check_segments(segments)
            documents = catalog.document_count()
            removed = removed_rows(catalog)
            gone = sum(rows for ranges in removed.values() for _, rows in ranges)
            self.problems += check_documents(catalog, segments, removed)
            self._segments(facts, segments, progress)
            self._index(catalog)
            self._gates(catalog)
            self._pending(catalog)
        self._links()
        self._strays(segments)
        self._derived()
        self._student()
        return Verification(
            self.folder,
            self.deep,
            facts.format,
            facts.state,
            documents,
            sum(segment.rows for segment in segments) - gone,
            len(self.files),
            sum(file.stat().st_size for file in self.files if file.is_file()),
            tuple(self.problems),
            tuple(self.notes),
            time.perf_counter() - self.begin,
        )

    @contextmanager
    def _gathering(self, file: str, part: str = "catalog") -> Iterator[None]:
        """Write an error down as a problem of this file."""
        try:
            yield
        except (KnnlmError, OSError) as error:
            self.problems.append(Problem(file, str(error).removeprefix(str(self.folder / file)).lstrip(": "), part))

    def _sums(self, catalog: Catalog) -> None:
        """Compare every row of every table with the sums of the catalog."""
        if not catalog.summed:
            self.notes.append(
                f"{CATALOG_FILE} is of an older format and has no sums of its own. The first change adds them."
            )
        for part in catalog.differing():
            what = f"its {part} is not as it was written: the SHA-256 is another"
            self.problems.append(Problem(CATALOG_FILE, what, SUM, table=part))

    def _segments(self, facts: StoreMetadata, segments: list[SegmentRow], progress: Progress) -> None:
        if facts.codec is None or facts.vocab_size is None:
            return  # it is not known what the files should be, and that has been said
        sets = [
            SegmentFiles(self.folder, segment, facts.codec, vocab_size=facts.vocab_size, waiting=facts.waiting)
            for segment in segments
        ]
        paths = [path for each in sets for path in each.paths()]
        self.files += paths
        total = sum(path.stat().st_size for path in paths if path.is_file()) if self.deep else None
        with progress("reading files" if self.deep else "looking at files", total=total, unit="bytes") as advance:
            for each in sets:
                self.problems += each.check(deep=self.deep, advance=advance)

    def _index(self, catalog: Catalog) -> None:
        for row in catalog.indexes():
            file = index_file(self.folder, row)
            name = file.relative_to(self.folder).as_posix()
            self.files.append(file)
            with self._gathering(name, INDEX):
                check_place(self.folder, file)
                if not file.is_file():
                    self.problems.append(Problem(name, "is missing", INDEX))
                elif self.deep and checksum(file) != row.sha256:
                    self.problems.append(
                        Problem(name, "is not as it was written: its SHA-256 is not the catalog's", INDEX)
                    )
                elif self.deep and self.trust_index and not self.problems and catalog.get("state") == "complete":
                    with closing(Datastore.open(self.folder)) as store:
                        open_index(store, metric=row.metric, rerank=False)

    def _gates(self, catalog: Catalog) -> None:
        """Find choices whose networks are gone."""
        choices = catalog.get("choices")
        files = {gate_of(choice) for choice in choices.values()} if isinstance(choices, dict) else set()
        for file in sorted(name for name in files if name is not None):
            if not (self.folder / GATES_FOLDER / file).exists():
                self.problems.append(
                    Problem(f"{GATES_FOLDER}/{file}", "is missing, but weights were tuned with it", DERIVED)
                )

    def _links(self) -> None:
        """Find links that lead out of the folder, wherever they are."""
        for root, folders, files in os.walk(self.folder):
            for path in (Path(root) / name for name in [*folders, *files]):
                if path.is_symlink():
                    real = path.resolve()
                    if not real.is_relative_to(self.folder.resolve()):
                        name = path.relative_to(self.folder).as_posix()
                        if all(problem.file != name for problem in self.problems):
                            self.problems.append(Problem(name, f"is a link out of the memory, to {real}", DERIVED))

    def _pending(self, catalog: Catalog) -> None:
        """Tell of an addition that was stopped, or is under way: what it has read is no part of the memory yet."""
        pending = StagedAddition(self.folder, catalog)
        self.pending = set(pending.folders)
        if self.pending:
            self.notes.append(
                f"{STAGING_FILE}: {pending.document_count:,} documents in {len(self.pending):,} segments are of an add "
                "that was stopped, or is under way. The same command goes on; knnlm compact drops them."
            )

    def _strays(self, segments: list[SegmentRow]) -> None:
        known = {segment_folder(self.folder, segment.id) for segment in segments} | self.pending
        strays = sorted(set((self.folder / "segments").glob("*")) - known)
        strays += sorted(self.folder.glob("*.partial"))
        self.notes += [
            f"{stray.relative_to(self.folder).as_posix()} is in no catalog: what a stopped process left, or a process "
            "is writing. The next writer removes it."
            for stray in strays
        ]

    def _derived(self) -> None:
        """Look at what was made of the segments, where it is there."""
        checks: list[tuple[Path, Callable[[Path], object]]] = []
        if self.deep and (self.folder / NGRAM_FOLDER).exists() and self._opens():
            checks.append((self.folder / NGRAM_FOLDER, self._ngram))
        checks += [(file, load_output) for file in [self.folder / "output" / OUTPUT_FILE] if file.exists()]
        checks += [(file, load_networks) for file in sorted((self.folder / GATES_FOLDER).glob("*.safetensors"))]
        checks += [(file, self._adapted) for file in [self.folder / ADAPTED_FILE] if file.exists()]
        for file, check in checks:
            self.files += sorted(file.glob("*")) if file.is_dir() else [file]
            with self._gathering(file.relative_to(self.folder).as_posix(), DERIVED):
                if not file.is_dir():
                    check_place(self.folder, file)
                check(file)
        self.files += [self.folder / name for name in (MAP_FILE, CODEC_FILE) if (self.folder / name).is_file()]

    def _opens(self) -> bool:
        """Whether the memory can be opened, which what is derived from it needs to be compared with it."""
        try:
            Datastore.open(self.folder, trust_index=False).close()
        except KnnlmError:
            return False
        return True

    def _student(self) -> None:
        """Look at the card of a student, and, if deep, at every byte of it."""
        folder = self.folder / STUDENT
        if not folder.exists():
            return
        self.files += sorted(file for file in folder.glob("*") if file.is_file())
        with self._gathering(f"{STUDENT}/{CARD}", STUDENT):
            load_card(folder)
        damaged = damaged_files(folder) if self.deep or not (folder / CHECKSUMS_FILE).exists() else []
        self.problems += [Problem(f"{STUDENT}/{name}", what, STUDENT) for name, what in damaged or []]
        if damaged is None:
            self.notes.append(
                f"{STUDENT} has no {CHECKSUMS_FILE}: an older knnlm trained it, and its files cannot be compared."
            )

    def _adapted(self, file: Path) -> None:
        """Compare what an adaptation says of itself with its sum."""
        try:
            facts = json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict):
            raise DatastoreCorrupt(f"{file} is no JSON of facts")
        check_sum(file, facts, "")

    def _ngram(self, _: Path) -> None:
        with closing(Datastore.open(self.folder, trust_index=False)) as store:
            if kept_suffixes(store) is None:
                self.notes.append(
                    f"{NGRAM_FOLDER} is of another state of the memory. It is made again when it is needed."
                )
