"""Say all that is wrong with a memory, file by file. Changes nothing, and knows nothing about repairs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from knnlm.checksums import checksum
from knnlm.datastore.arrays import index_file, segment_folder
from knnlm.datastore.builder import ADAPTED
from knnlm.datastore.catalog import FILE, Catalog, SegmentRow
from knnlm.datastore.codec import FILE as CODEC_FILE
from knnlm.datastore.facts import check_sum
from knnlm.datastore.indexing import open_index
from knnlm.datastore.keymap import FILE as MAP_FILE
from knnlm.datastore.pending import FILE as PENDING
from knnlm.datastore.pending import Pending
from knnlm.datastore.store import Datastore
from knnlm.datastore.strangers import check_place
from knnlm.datastore.suffixes import FOLDER as NGRAM
from knnlm.datastore.suffixes import kept_suffixes
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmError
from knnlm.guarding.catalog import Facts, check_documents, check_segments, read_facts, removed_rows
from knnlm.guarding.filing import SegmentFiles
from knnlm.guarding.findings import DERIVED, INDEX, STUDENT, SUM, Problem, Verification
from knnlm.lm.vouching import FILE as SUMS
from knnlm.lm.vouching import damaged_files
from knnlm.memory.decoder import CARD, load_card
from knnlm.memory.output import FILE as OUTPUT_FILE
from knnlm.memory.output import load_output
from knnlm.mixture.choice import FOLDER as GATES
from knnlm.mixture.choice import gate_of, load_networks
from knnlm.progress import Progress, silent

_ATTEMPTS = 3


def verify(
    path: str | Path, *, deep: bool = False, trust_index: bool = True, progress: Progress = silent
) -> Verification:
    """Look through a memory; `deep` reads every byte. With `trust_index` False no file of FAISS is opened."""
    folder = Path(path)
    if not (folder / FILE).exists():
        what = f"is not a memory: it has no {FILE}" if folder.is_dir() else "is not there"
        raise DatastoreError(f"{folder} {what}. See knnlm build and knnlm repair.")
    for _ in range(_ATTEMPTS):
        before = _contents(folder)
        found = _Look(folder, deep, trust_index).run(progress)
        # Another process may have swapped segments meanwhile: what is missing then was only moved on.
        if found.sound or before == _contents(folder):
            break
    return found


def _contents(folder: Path) -> Any:
    """Tell whether the catalog has changed."""
    try:
        with closing(Catalog.open(folder / FILE, compare=False)) as catalog:
            return catalog.segments(), catalog.indexes(), catalog.get("generation")
    except KnnlmError as error:
        return str(error)


class _Look:
    """One pass over a memory, which gathers what it finds."""

    def __init__(self, folder: Path, deep: bool, trust_index: bool) -> None:
        self.folder, self.deep, self.trust_index = folder, deep, trust_index
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.pending: set[Path] = set()  # folders of segments
        self.files: list[Path] = [folder / FILE]
        self.begin = time.perf_counter()

    def run(self, progress: Progress) -> Verification:
        """Look at the catalog, the segments, and what was made of them."""
        facts, documents, gone = Facts(), 0, 0
        segments: list[SegmentRow] = []
        with self._gathering(FILE), closing(Catalog.open(self.folder / FILE, compare=False)) as catalog:
            self.problems += [Problem(FILE, f"SQLite says: {line}") for line in catalog.integrity()]
            self._sums(catalog)
            facts, wrong = read_facts(catalog)
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
            self.notes.append(f"{FILE} is of an older format and has no sums of its own. The first change adds them.")
        for part in catalog.differing():
            what = f"its {part} is not as it was written: the SHA-256 is another"
            self.problems.append(Problem(FILE, what, SUM, table=part))

    def _segments(self, facts: Facts, segments: list[SegmentRow], progress: Progress) -> None:
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
            if not (self.folder / GATES / file).exists():
                self.problems.append(Problem(f"{GATES}/{file}", "is missing, but weights were tuned with it", DERIVED))

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
        pending = Pending(self.folder, catalog)
        self.pending = set(pending.folders)
        if self.pending:
            self.notes.append(
                f"{PENDING}: {pending.document_count:,} documents in {len(self.pending):,} segments are of an add that "
                "was stopped, or is under way. The same command goes on; knnlm compact drops them."
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
        if self.deep and (self.folder / NGRAM).exists() and self._opens():
            checks.append((self.folder / NGRAM, self._ngram))
        checks += [(file, load_output) for file in [self.folder / "output" / OUTPUT_FILE] if file.exists()]
        checks += [(file, load_networks) for file in sorted((self.folder / GATES).glob("*.safetensors"))]
        checks += [(file, self._adapted) for file in [self.folder / ADAPTED] if file.exists()]
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
        damaged = damaged_files(folder) if self.deep or not (folder / SUMS).exists() else []
        self.problems += [Problem(f"{STUDENT}/{name}", what, STUDENT) for name, what in damaged or []]
        if damaged is None:
            self.notes.append(f"{STUDENT} has no {SUMS}: an older knnlm trained it, and its files cannot be compared.")

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
                self.notes.append(f"{NGRAM} is of another state of the memory. It is made again when it is needed.")
