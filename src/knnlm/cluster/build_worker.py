"""A worker of a build on Ray: one process with a model, which builds one shard after another.

The class is an ordinary one, and the driver makes an actor of it. A shard is built by the same function as with
`knnlm build --shard i/n`, so its bytes do not depend on the worker, and a shard whose worker was killed continues at
its last complete segment. Keys go from the model to the disk; the driver gets numbers, messages and the codec.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import knnlm
from knnlm.cluster.build_places import ShardPlaces
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import parse_storage
from knnlm.datastore.indexes import build_index, stored_indexes
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import CATALOG_FILE, RECORD_FILE
from knnlm.datastore.shards import CALIBRATED, shard_part
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, DatastoreError, KnnlmError
from knnlm.index.factory import check_spec
from knnlm.ingest.build import build_part
from knnlm.ingest.shards import Calibration, ReadText, ShardText, scan_text
from knnlm.lm.speech import open_lm
from knnlm.progress import Advance

READING, INDEXING = "reading", "indexing"

_LOCK_SECONDS = 60.0  # for the end of a worker that the driver took for dead


@dataclass(frozen=True)
class BuildJob:
    """What all workers of a build have in common."""

    read: ReadText  # returns all documents of the text at each call
    model: str
    model_options: dict[str, Any]  # of `open_lm`
    window: tuple[int | None, int | None]  # context and stride
    options: dict[str, Any]  # of `build`
    index: str | None
    metric: str
    places: ShardPlaces
    threads: int = 1
    working_folder: str = field(default_factory=os.getcwd)
    version: str = field(default_factory=lambda: str(knnlm.__version__))

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed build must have in common with the unfinished one."""
        context, stride = self.window
        settings = {"model": self.model, "model_options": self.model_options, "context": context, "stride": stride}
        return {**settings, "index": self.index, "metric": self.metric, "push": self.places.url, **self.options}

    @property
    def fits_codec(self) -> bool:
        """Whether the first shard has to fit a codec for the others."""
        return parse_storage(self.options["key_format"]).fitted


@dataclass(frozen=True)
class Failure:
    """An error that would occur again, as a value: exceptions of some classes cannot be sent."""

    kind: type[KnnlmError]
    message: str

    @classmethod
    def of(cls, error: KnnlmError) -> Failure:
        """Return an error with the name of the machine where it occurred."""
        return cls(type(error), f"{error} (on the machine {socket.gethostname()})")

    def error(self) -> KnnlmError:
        """Return the error."""
        error = self.kind.__new__(self.kind)
        error.args = (self.message,)
        return error


@dataclass(frozen=True)
class Status:
    """How far a worker is with its shard."""

    unit: int  # the number of the shard, from 1 on
    bytes: int
    step: str
    calibration: Calibration | None


def prepare_process(*, threads: int, working_folder: str, version: str) -> None:
    """Make threads and relative paths those of the driver; raise unless its version of knnlm is installed here."""
    torch.set_num_threads(threads)
    if Path(working_folder).is_dir():
        os.chdir(working_folder)
    if version != knnlm.__version__:
        raise ClusterError(
            f"The version of knnlm is {knnlm.__version__}, and that of the driver {version}. Install the same."
        )


class BuildWorker:
    """Builds shards with a model of its own; `status` is called while another thread builds."""

    def __init__(self, job: BuildJob) -> None:
        self._job = job
        self._unit, self._bytes, self._step = 0, 0, READING

    def open(self) -> Failure | None:
        """Open the model and split the text."""
        try:
            self._prepare_process()
            job = self._job
            self._lm = open_lm(job.model, **job.model_options)
            self._window = self._lm.window(*job.window)
            self._check_index()  # before anything is read
            self._sizes = scan_text(job.read)
        except KnnlmError as error:
            return Failure.of(error)
        return None

    def build(self, unit: int, of: int, text: str, calibration: Calibration | None) -> Failure | None:
        """Build one of `of` shards, and its index; `text` is the digest of all documents."""
        torch.set_num_threads(self._job.threads)  # of this thread, too
        self._unit, self._bytes, self._step = unit, 0, READING
        try:
            if self._sizes.digest != text:
                raise DatastoreError("The text is not the same on all machines, or changed during the build.")
            part, places = self._sizes.parts(of)[unit - 1], self._job.places
            if places.url is not None and places.is_finished(unit, part.part):
                return None  # it was copied by a worker that could not report it
            folder = places.build_folder(unit)
            with writer_lock(folder, create=True, wait=_LOCK_SECONDS):
                pass
            if not _is_finished(folder, part):
                self._read(part, folder, calibration)
            self._step = INDEXING
            if self._job.index is not None:
                _index(folder, self._job.index, self._job.metric)
            places.copy(unit)
        except KnnlmError as error:
            return Failure.of(error)
        return None

    def status(self, calibration: bool = False) -> Status:
        """Return how far the worker is, with the calibration of its shard if that is wanted and there is one."""
        unit = self._unit
        found = self._calibration(unit) if calibration and unit else None
        return Status(unit, self._bytes, self._step, found)

    def clean(self) -> None:
        """Remove what the build has left on the disk of this machine."""
        self._job.places.remove_work()

    def _prepare_process(self) -> None:
        """Make relative paths those of the driver, and check what has to be the same on every machine."""
        job = self._job
        prepare_process(threads=job.threads, working_folder=job.working_folder, version=job.version)
        job.places.remove_others()
        if job.places.url is not None:
            return
        try:
            same = job.places.build in (Path(job.places.folder) / RECORD_FILE).read_text()
        except OSError:
            same = False
        if not same:
            raise ClusterError(
                f"{job.places.folder} is another folder than that of the driver. Use a shared folder as --out, or add "
                "--push."
            )

    def _check_index(self) -> None:
        if self._job.index is not None:
            storage = parse_storage(self._job.options["key_format"], width=self._lm.width)
            check_spec(self._job.index, storage.components or self._lm.width, metric=self._job.metric)

    def _read(self, part: ShardText, folder: Path, calibration: Calibration | None) -> None:
        text = ShardText(part.read, part.part, part.bytes, calibration=calibration)
        options = {**self._job.options, "window": self._window, "progress": self._progress}
        build_part(text, folder, lm=self._lm, **options).close()

    @contextmanager
    def _progress(self, what: str, *, total: int | None = None, unit: str = "tokens") -> Iterator[Advance]:  # noqa: ARG002
        def advance(count: int) -> None:
            self._bytes += count

        yield advance

    def _calibration(self, unit: int) -> Calibration | None:
        """Return the calibration of a shard that is being built; None as long as it has none."""
        try:
            file = self._job.places.build_folder(unit) / CATALOG_FILE
            with closing(Catalog.open(file)) as catalog:
                ready = catalog.get(CALIBRATED) and not (self._job.fits_codec and catalog.get("codec") is None)
                return Calibration.of(catalog) if ready else None
        except (KnnlmError, OSError):  # it does not exist yet
            return None


def _is_finished(folder: Path, part: ShardText) -> bool:
    """Whether a shard was completed by a worker that could not report it."""
    if not (folder / CATALOG_FILE).is_file():
        return False
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        return catalog.get("state") == "complete" and shard_part(catalog) == part.part


def _index(folder: Path, spec: str, metric: str) -> None:
    """Build the index of a shard, unless it was built by a worker that could not report it."""
    with closing(Datastore.open(folder)) as store:
        found = [row.spec for row, _ in stored_indexes(store) if row.metric == metric]
        if not found or spec not in ("auto", *found):
            build_index(store, spec, metric=metric, wait=_LOCK_SECONDS)
