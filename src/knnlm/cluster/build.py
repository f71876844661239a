"""Build a sharded store with workers on Ray.

The text is split into shards of whole documents, as `knnlm build --shard i/n` splits it. A shard is the unit of work: a
worker builds it with the same function as that command, then its index, and takes the next one. The driver assigns
shards and records on disk which are finished; it reads no keys. Where a worker dies, another one continues its shard at
the last complete segment; where the driver dies, the same command does. In the end the shards are joined.

All shards have the offset, map and codec of the first one. The others begin when these are known: after the first
2,048 tokens at most for plain keys, and after 65,536 keys for a fitted codec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.cluster.build_places import ShardPlaces
from knnlm.cluster.build_record import (
    BuildRecord,
    check_out,
    is_begun,
    open_record,
    with_text,
    write_record,
)
from knnlm.cluster.build_worker import (
    INDEXING,
    BuildJob,
    BuildWorker,
    Failure,
    Status,
)
from knnlm.cluster.connection import LOCAL, connected
from knnlm.datastore.codecs import parse_storage
from knnlm.datastore.locks import WRITER_LOCK, writer_lock
from knnlm.datastore.manifest import is_url
from knnlm.datastore.schema import RECORD_FILE, SHARDS_FOLDER
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, DatastoreError, ParameterError
from knnlm.index.base import check_metric
from knnlm.ingest.shards import Calibration, ReadText, ShardText, scan_text
from knnlm.lm.loading import BUNDLED
from knnlm.progress import Advance, Progress, note, silent

_OPTIONS = {"key_format", "segment_entries", "batch_tokens", "compile", "language_model"}  # of `build`
_POLL_SECONDS = 0.5
_CLEAN_SECONDS = 60.0  # for workers to remove what is left in their work folders
_MAX_DEATHS = 5  # of workers with the same shard, without reading further than the worker before


@dataclass(frozen=True)
class WorkerPlan:
    """How many workers there are, and what each of them gets."""

    count: int
    cores: int
    gpus: int
    device: str


def build_on_ray(
    read: ReadText,
    path: str | Path,
    *,
    model: str = BUNDLED,
    model_options: Mapping[str, Any] | None = None,
    address: str = LOCAL,
    workers: int | None = None,
    cores: int | None = None,
    shards: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    index: str | None = None,
    metric: str = "l2",
    push: str | None = None,
    work_folder: str | Path | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Datastore:
    """Build a sharded store with workers on Ray, or resume an unfinished build of the same text.

    `read` returns all documents of the text at each call, on every machine; `path` is a folder that all machines share.
    `model_options` are those of `knnlm.open_lm`, and `options` are `key_format`, `segment_entries`, `batch_tokens`,
    `compile` and `language_model` of `knnlm.build`. `address` is `local`, `auto` or that of a cluster. By default there
    is a worker for each GPU, otherwise for each machine, and a shard for each worker. `index` also builds an index of
    each shard, such as `auto`. With `work_folder`, each worker builds in this folder of its machine, and copies a shard
    when it is finished: to `path`, or to the URL `push`, such as s3://bucket/parts; then `path` need not be shared.
    """
    _check_options(options, metric, workers=workers, cores=cores, shards=shards)
    out = Path(path).absolute()
    job = BuildJob(
        read,
        model,
        dict(model_options or {}),
        window=(context, stride),
        options={"key_format": "float16", **options},
        index=index,
        metric=metric,
        places=_places(out, push, work_folder),
    )
    check_out(out)
    created = not out.exists()
    with writer_lock(out / SHARDS_FOLDER, create=True):
        try:
            with connected(address) as ray:
                plan = plan_workers(node_resources(ray), str(job.model_options.get("device", "auto")), workers, cores)
                record = _run(ray, job, plan, shards=shards, progress=progress)
        except BaseException:
            _remove_unused(out, created=created)
            raise
        job.places.remove_partial()
        join_shards([job.places.final(number + 1) for number in range(record.shards)], out, beside=[SHARDS_FOLDER])
        (out / SHARDS_FOLDER / RECORD_FILE).unlink(missing_ok=True)
    return Datastore.open(out)


def _places(out: Path, push: str | None, work_folder: str | Path | None) -> ShardPlaces:
    """Return where shards are built, and where they are in the end."""
    if push is not None and not is_url(push):
        raise ParameterError(f"{push} is no URL: write it as s3://bucket/parts.")
    work = None if work_folder is None else str(Path(work_folder).absolute())
    return ShardPlaces(str(out / SHARDS_FOLDER), push, work)


def _check_options(options: Mapping[str, Any], metric: str, **counts: int | None) -> None:
    """Raise for what every worker would refuse."""
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(f"build_on_ray() got an unexpected keyword argument {unknown[0]!r}")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ParameterError(f"{name} is {value}, and must be at least 1.")
    parse_storage(options.get("key_format", "float16"))
    check_metric(metric)


def plan_workers(
    nodes: Sequence[Mapping[str, float]],
    device: str,
    workers: int | None,
    cores: int | None,
    *,
    what: str = "workers",
) -> WorkerPlan:
    """Return the workers for machines with these resources: each has a GPU where there are some, else its cores."""
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if device.startswith("cuda:"):
        raise ParameterError(f"With Ray, --device is cuda, not {device}: Ray chooses a GPU for each worker.")
    if device == "cuda" or (device == "auto" and gpus):
        count = gpus if workers is None else workers
        if not gpus or count > gpus:
            raise ClusterError(f"The cluster has {gpus} GPUs, which are too few for {_count(max(1, count), what)}.")
        share = min(int(node.get("CPU", 0)) // int(node["GPU"]) for node in nodes if int(node.get("GPU", 0)))
        if cores is not None and cores > share and workers is None:
            raise ClusterError(f"The cluster has {share} cores for each GPU, which are less than {cores} for a worker.")
        return WorkerPlan(count, share if cores is None else cores, 1, "cuda")
    found = [int(node.get("CPU", 0)) for node in nodes]
    count = workers if workers is not None else max(1, sum(have > 0 for have in found))
    shares = [cores] if cores is not None else range(max(found, default=0), 0, -1)
    fitting = (share for share in shares if sum(have // share for have in found) >= count)
    if (share := next(fitting, 0)) == 0:
        each = "" if cores is None else f" with {cores} cores each"
        raise ClusterError(f"The cluster has {sum(found)} cores, which are too few for {_count(count, what)}{each}.")
    return WorkerPlan(count, share, 0, "cpu" if device == "auto" else device)


def _count(number: int, what: str) -> str:
    return f"{number} {what if number != 1 else what.removesuffix('s')}"


def node_resources(ray: Any) -> list[Mapping[str, float]]:
    """Return the resources of each machine of a cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _run(ray: Any, job: BuildJob, plan: WorkerPlan, *, shards: int | None, progress: Progress) -> BuildRecord:
    """Build the shards that are not finished, and return the record when all are."""
    folder = Path(job.places.folder)
    record = open_record(job.places, job.settings, shards, plan.count)
    write_record(folder, record)
    options = {**job.model_options, "device": plan.device}
    places = replace(job.places, build=record.id)
    job = replace(job, model_options=options, places=places, threads=max(1, plan.cores))
    with closing(_Driver(ray, job, plan, record)) as driver:
        driver.start_workers()  # which open their models meanwhile
        text = scan_text(job.read)
        record = with_text(record, folder, text, fixed=shards is not None)
        parts = text.parts(record.shards)
        if not record.begun:
            _check_free(places, record.shards)
        record = replace(record, begun=places.copies)
        write_record(folder, record)
        with progress("reading", total=sum(part.bytes for part in parts), unit="bytes") as advance:
            try:
                return driver.run(record, parts, advance)
            except ray.exceptions.RayError as error:  # of the cluster; those of workers are handled
                raise ClusterError(
                    f"The connection to Ray was lost: {_cause(error)}. Run the same command again."
                ) from error


def _check_free(places: ShardPlaces, shards: int) -> None:
    """Raise if there is a store at a URL of a new build."""
    taken = (number for number in range(1, shards + 1) if places.url is not None and places.exists(number))
    if (number := next(taken, None)) is not None:
        raise DatastoreError(f"{places.final(number)} is a store already. Choose another --push, or remove it.")


def _remove_unused(out: Path, *, created: bool) -> None:
    """Remove the record of a build that has failed before anything was built; other options can be tried then."""
    folder = out / SHARDS_FOLDER
    if is_begun(folder):
        return
    with suppress(OSError):
        (folder / RECORD_FILE).unlink(missing_ok=True)
        for shard in folder.glob("[0-9]*"):
            (shard / WRITER_LOCK).unlink(missing_ok=True)
            shard.rmdir()
        (folder / WRITER_LOCK).unlink(missing_ok=True)
        folder.rmdir()
        if created:
            out.rmdir()


@dataclass
class _Worker:
    """An actor and what it does: `task` is its present call, and `unit` the shard that it builds."""

    actor: Any
    task: Any
    unit: int = 0  # none
    status: Any = None  # a call of `status` that has not returned


class _Driver:
    """Assigns shards to workers until all are finished."""

    def __init__(self, ray: Any, job: BuildJob, plan: WorkerPlan, record: BuildRecord) -> None:
        self._ray, self._job, self._plan, self._record = ray, job, plan, record
        self._parts: list[ShardText] = []
        self._workers: list[_Worker] = []
        self._calibration: Calibration | None = None
        self._reached = Counter[int]()  # bytes of each shard
        self._deaths = Counter[int]()  # of workers with each shard, and before their first one
        self._reached_before = Counter[int]()  # bytes of each shard at the last death
        self._steps: dict[int, str] = {}
        self._shown = 0
        self._kind = ray.remote(BuildWorker).options(
            num_cpus=plan.cores,
            num_gpus=plan.gpus,
            max_concurrency=2,  # to build, and to be asked for the status
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )

    def close(self) -> None:
        """End all workers; shards that they have begun are continued by the next command."""
        for worker in self._workers:
            self._end(worker)

    def run(self, record: BuildRecord, parts: list[ShardText], advance: Advance) -> BuildRecord:
        """Build all shards, and return the record that lists them."""
        self._record, self._parts = record, parts
        while self._record.pending:
            self.start_workers()
            self._assign()
            self._collect()
            self._ask_status()
            self._show(advance)
        self._show(advance)
        if self._job.places.copies and self._workers:
            calls = [worker.actor.clean.remote() for worker in self._workers]
            self._ray.wait(calls, num_returns=len(calls), timeout=_CLEAN_SECONDS)
        return self._record

    def start_workers(self) -> None:
        """Start workers up to the number that is wanted, also those in place of dead ones."""
        for _ in range(len(self._workers), min(self._plan.count, len(self._record.pending))):
            try:
                actor = self._kind.remote(self._job)
            except self._ray.exceptions.RayError:
                raise
            except Exception as error:  # of any kind, of what cannot be sent
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ParameterError(f"The text cannot be read on other machines: {reason}") from error
            self._workers.append(_Worker(actor, actor.open.remote()))

    def _assign(self) -> None:
        """Assign the next shard to each idle worker; only the first one until its calibration is known."""
        busy = {worker.unit for worker in self._workers}
        waiting = [number for number in self._record.pending if number not in busy]
        self._find_calibration()
        for worker in self._workers:
            if worker.task is None and waiting and (waiting[0] == 1 or self._calibration is not None):
                worker.unit, worker.status = waiting.pop(0), None
                # Also to a first shard that was lost with its machine, after others got its calibration.
                settings = self._record.shards, self._record.text, self._calibration
                worker.task = worker.actor.build.remote(worker.unit, *settings)

    def _find_calibration(self) -> None:
        """Read the calibration of a finished shard; all have that of the first one."""
        if self._calibration is None and self._record.done:
            number = min(self._record.done)
            place = self._job.places.final(number)
            with self._job.places.catalog(number) as catalog:
                self._calibration = Calibration.of(catalog)
                if self._job.fits_codec and catalog.get("codec") is None:
                    raise DatastoreError(
                        f"{place} has no tokens that a codec could be fitted to. Remove the store; use fewer shards."
                    )

    def _collect(self) -> None:
        """Wait a moment for calls that return."""
        calls = {worker.task: worker for worker in self._workers if worker.task is not None}
        # Other workers wait for the calibration.
        seconds = _POLL_SECONDS if self._calibration is not None else _POLL_SECONDS / 5
        returned, _ = self._ray.wait(list(calls), timeout=seconds)
        for call in returned:
            worker = calls[call]
            try:
                result: Failure | None = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
                continue
            if result is not None:
                raise result.error()
            if worker.unit:
                self._record = self._record.finished(worker.unit)
                write_record(Path(self._job.places.folder), self._record)
            else:
                self._deaths[0] = 0
            worker.task, worker.unit, worker.status = None, 0, None

    def _lose(self, worker: _Worker, error: Exception) -> None:
        """Remove a dead worker; its shard is built again, unless that seems to be in vain."""
        self._end(worker)
        self._workers.remove(worker)
        unit = worker.unit
        self._steps.pop(unit, None)
        further = self._reached[unit] > self._reached_before[unit]
        self._reached_before[unit] = max(self._reached[unit], self._reached_before[unit])
        self._deaths[unit] = 1 if further else self._deaths[unit] + 1
        if self._deaths[unit] >= _MAX_DEATHS:
            what = f"shard {unit} of {self._record.shards}" if unit else "the opening of the model"
            raise ClusterError(
                f"{_MAX_DEATHS} workers in succession died at {what}: {_cause(error)}. Finished shards are kept: "
                "the same command continues."
            ) from error

    def _end(self, worker: _Worker) -> None:
        with suppress(Exception):  # it may be dead, or the connection lost
            self._ray.kill(worker.actor)

    def _ask_status(self) -> None:
        for worker in self._workers:
            if not worker.unit:
                continue
            if worker.status is None:
                worker.status = worker.actor.status.remote(worker.unit == 1 and self._calibration is None)
            elif self._ray.wait([worker.status], timeout=0)[0]:
                call, worker.status = worker.status, None
                with suppress(self._ray.exceptions.RayError):  # that the worker is dead shows at its other call
                    self._take_status(worker, self._ray.get(call))

    def _take_status(self, worker: _Worker, status: Status) -> None:
        if status.unit == worker.unit:
            self._reached[status.unit] = status.bytes
            self._steps[status.unit] = status.step
            self._calibration = self._calibration or status.calibration

    def _show(self, advance: Advance) -> None:
        """Advance one progress bar for all workers, which never moves back."""
        done = set(self._record.done)
        reached = sum(
            part.bytes if part.part.number in done else min(part.bytes, self._reached[part.part.number])
            for part in self._parts
        )
        busy = [worker.unit for worker in self._workers if worker.unit]
        indexing = sum(self._steps.get(unit) == INDEXING for unit in busy) if self._job.index is not None else 0
        text = f"{len(busy)} of {self._plan.count} workers, " if self._record.pending else ""
        text += f"{len(done)} of {self._record.shards} shards"
        note(advance, f"{text}, {indexing} indexing" if indexing else text)
        if reached > self._shown:
            advance(reached - self._shown)
            self._shown = reached


def _cause(error: Exception) -> str:
    """Return why a worker died, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
    text = " ".join(str(error).split())
    if "running low on memory" in text:
        return "too little memory on its machine"
    if "worker process has died" in text or "unexpectedly" in text:
        return "the process ended unexpectedly, as it does when memory runs out"
    return text[:200]
