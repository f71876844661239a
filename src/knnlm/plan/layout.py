"""Layouts of a store on given hardware, and the choice among them.

A layout is a key format, a way to search, and a number of shards and replicas. All that fit are compared; the
recommended one has the best format among those whose 99th percentile of latency is at most twice the lowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from knnlm.datastore.codecs import Storage, parse_storage
from knnlm.errors import ParameterError
from knnlm.plan.constants import Constants
from knnlm.plan.cost import (
    BATCH,
    Cost,
    build_memory,
    build_on_cpu,
    build_on_gpu,
    gpu_bytes,
    gpu_capacity,
    index_cost,
    index_memory,
    search_memory,
    search_on_cpu,
    search_on_gpu,
)
from knnlm.plan.sizes import IndexShape, ModelShape, TextShape, automatic_index, formats, key_bytes, store_bytes
from knnlm.plan.tail import TailRow, slowest_quantile, tail_table

NETWORK_SECONDS = 0.0005  # a request to a shard and its answer
RAM_SHARE = 0.8  # of a node's memory that keys and indexes may take
TAIL_SHARDS = (8, 32, 128, 512)

_MAX_INDEX_KEYS = 1e10  # of one index of blocks
_SLOWER = 2.0  # times the lowest latency that a better key format may take
_GPU_SEARCH = "GPU"
_MAX_TOKENS, _MAX_QUERIES = 1e15, 1e12


@dataclass(frozen=True)
class Hardware:
    """Nodes that are all the same."""

    nodes: int = 1
    cores: int = 2  # of a node
    ram: float = 16e9  # bytes of a node
    gpus: int = 0  # of a node
    gpu_memory: float = 80e9  # bytes of a GPU
    disk_bytes_per_second: float | None = None  # of a node; None: as measured

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.cores < 1 or self.gpus < 0:
            raise ParameterError("A plan needs at least one node and one core, and no negative number of GPUs.")
        speed = 1.0 if self.disk_bytes_per_second is None else self.disk_bytes_per_second
        given = {"memory": self.ram, "memory of a GPU": self.gpu_memory, "speed of the disk": speed}
        for name, number in given.items():
            if not 0 < number < math.inf:
                raise ParameterError(f"The {name} must be a finite number above 0, not {number / 1e9:g} GB.")

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.gpu_memory / 1e9:g} GB" if self.gpus else ""
        what = f"{self.cores} core{'s' if self.cores > 1 else ''}, {self.ram / 1e9:.4g} GB RAM{gpus}"
        return f"1 node: {what}" if self.nodes == 1 else f"{self.nodes:,} nodes, each {what}"


@dataclass(frozen=True)
class FormatRow:
    """What one key format costs, for all of the text on all of the hardware."""

    storage: str
    key_bytes: int
    store_bytes: float
    index: str
    index_bytes: float
    build: Cost
    index_time: Cost
    build_memory: float
    index_memory: float


@dataclass(frozen=True)
class Layout:
    """One way to hold and search all keys."""

    storage: str
    search: str
    shards: int
    replicas: int
    keys_per_shard: float
    shard_memory: float  # bytes that one replica of a shard takes on its GPU, or of its node's memory
    one_query: Cost  # on one shard
    latency: float  # median of one query over all shards
    latency_p99: float
    queries_per_second: float  # of all replicas
    limit: str = ""  # why the hardware is not enough; empty where it is
    nodes_needed: int = 1

    @property
    def fits(self) -> bool:
        """Whether the hardware is enough."""
        return not self.limit

    @property
    def on_gpus(self) -> bool:
        """Whether the keys are in the memory of GPUs."""
        return self.search.startswith(_GPU_SEARCH)


@dataclass(frozen=True)
class Plan:
    """All figures of a plan."""

    text: TextShape
    model: ModelShape
    hardware: Hardware
    queries_per_second: float
    formats: list[FormatRow]
    layouts: list[Layout]
    recommended: Layout | None
    tail: list[TailRow]  # of the recommended layout's latency for one shard, in seconds
    constants: Constants
    origin: str


def make_plan(
    text: TextShape,
    model: ModelShape,
    hardware: Hardware,
    constants: Constants,
    *,
    queries_per_second: float = 1.0,
    origin: str = "",
) -> Plan:
    """Return the costs of every key format and layout, and the recommended layout."""
    for name, number in (("tokens", text.tokens), ("tokens of a document", text.document_tokens)):
        if not 1 <= number <= _MAX_TOKENS:
            raise ParameterError(f"The number of {name} must be from 1 to {_MAX_TOKENS:g}, not {number:g}.")
    if not 0 < queries_per_second <= _MAX_QUERIES:
        raise ParameterError(f"Queries per second must be above 0 and at most {_MAX_QUERIES:g}.")
    constants = _with_disk(constants, hardware)
    rows = [format_row(text, model, storage, hardware, constants) for storage in formats(model.width)]
    layouts = compare_layouts(text, model, hardware, constants, queries_per_second)
    chosen = recommend(layouts)
    base = [] if chosen is None else [chosen.one_query.seconds * each for each in constants.latencies]
    tail = tail_table(base, TAIL_SHARDS) if base else []
    return Plan(text, model, hardware, queries_per_second, rows, layouts, chosen, tail, constants, origin)


def _with_disk(constants: Constants, hardware: Hardware) -> Constants:
    """Return constants with the disk of the hardware, where it is given."""
    if hardware.disk_bytes_per_second is None:
        return constants
    seconds = 1 / hardware.disk_bytes_per_second
    return replace(constants, disk=replace(constants.disk, read=seconds, write=seconds))


def format_row(
    text: TextShape, model: ModelShape, storage: Storage, hardware: Hardware, constants: Constants
) -> FormatRow:
    """Return what one key format costs; the index is one for each node."""
    on_gpu = hardware.gpus > 0 and constants.gpu is not None
    workers = hardware.gpus if on_gpu else 1
    part = TextShape(text.tokens / (hardware.nodes * workers), text.document_tokens, text.equal)
    cores = hardware.cores / constants.cpu.threads
    build = (
        build_on_gpu(part, model, storage, constants, workers=workers)
        if on_gpu
        else build_on_cpu(part, model, storage, constants, times=cores)
    )
    device = "cuda" if on_gpu else "cpu"
    index = automatic_index(text.tokens / hardware.nodes, model.width, storage, device=device)
    keys = index.keys * key_bytes(storage, model.width)
    cached = min(1.0, RAM_SHARE * hardware.ram / keys)
    return FormatRow(
        storage=str(storage),
        key_bytes=key_bytes(storage, model.width),
        store_bytes=store_bytes(text, model, storage, device=device),
        index=index.spec,
        index_bytes=hardware.nodes * index.bytes,
        build=build,
        index_time=index_cost(index, constants, times=cores, cold_bytes=(1 - cached) * keys),
        build_memory=build_memory(part, model, storage, constants),
        index_memory=index_memory(index, storage, constants),
    )


def compare_layouts(
    text: TextShape, model: ModelShape, hardware: Hardware, constants: Constants, queries_per_second: float
) -> list[Layout]:
    """Return all layouts, the one with the most precise keys first."""
    found = []
    if hardware.gpus and constants.gpu is not None:
        for key_dtype in ("float16", "int8"):
            found.append(_on_gpus(text, model, hardware, constants, queries_per_second, key_dtype))
    for storage in (*("float16", "int8"), *(("pca256-int8",) if model.width > 256 else ()), "codes"):
        parsed = parse_storage(storage, width=model.width)
        found.append(_on_nodes(text, model, hardware, constants, queries_per_second, parsed))
    return found


def _on_gpus(
    text: TextShape,
    model: ModelShape,
    hardware: Hardware,
    constants: Constants,
    wanted: float,
    key_dtype: str,
) -> Layout:
    """Return the layout with exact search on GPUs: as many shards as the memory of a GPU makes necessary."""
    capacity, per_key = gpu_capacity(hardware.gpu_memory), gpu_bytes(1, model.width, key_dtype)
    shards = math.ceil(text.tokens * per_key / capacity)
    keys = text.tokens / shards
    one, many = (
        search_on_gpu(keys, model.width, constants, queries=queries, key_dtype=key_dtype) for queries in (1, BATCH)
    )
    rate = BATCH / many.seconds
    replicas = max(1, math.ceil(wanted / rate))
    total = hardware.nodes * hardware.gpus
    limit = "" if shards <= total else "GPU memory"
    if not limit and shards * replicas > total:
        limit = "GPU time"
    return _layout(
        constants,
        storage="float16",
        search=f"{_GPU_SEARCH}, exact, {key_dtype} keys",
        shards=shards,
        replicas=replicas,
        keys=keys,
        memory=gpu_bytes(keys, model.width, key_dtype),
        one=one,
        rate=rate,
        limit=limit,
        nodes=math.ceil(shards * replicas / hardware.gpus),
    )


def _on_nodes(
    text: TextShape,
    model: ModelShape,
    hardware: Hardware,
    constants: Constants,
    wanted: float,
    storage: Storage,
) -> Layout:
    """Return the layout with search on the cores of nodes: as many shards as keep the searched files in memory."""
    room, cores = RAM_SHARE * hardware.ram, hardware.cores / constants.cpu.threads
    device = "cuda" if hardware.gpus and constants.gpu is not None else "cpu"
    shards, index = 1, automatic_index(text.tokens, model.width, storage, device=device)
    while shards < hardware.nodes and search_memory(index, storage, constants) + _files(index, storage) > room:
        shards = min(hardware.nodes, shards * 2)
        index = automatic_index(text.tokens / shards, model.width, storage, device=device)
    needed = search_memory(index, storage, constants)
    cached = min(1.0, max(0.0, room - needed) / max(1.0, _files(index, storage)))
    one, many = (search_on_cpu(index, constants, queries=queries, cached=cached) for queries in (1, BATCH))
    rate = BATCH / many.faster(cores).seconds
    replicas = max(1, math.ceil(wanted / rate))
    limit, nodes = "", shards * replicas
    if needed > room:
        limit, nodes = "memory", math.ceil(shards * needed / room) * replicas
    elif not index.possible:
        limit, nodes = "keys of one index", math.ceil(text.tokens / _MAX_INDEX_KEYS) * replicas
    elif nodes > hardware.nodes:
        limit = "disk" if many.bottleneck == "reading the disk" else "CPU time"
    return _layout(
        constants,
        storage=str(storage),
        search=f"CPU, {index.spec}",
        shards=shards,
        replicas=replicas,
        keys=index.keys,
        memory=min(room, needed + _files(index, storage)),
        one=one,
        rate=rate,
        limit=limit,
        nodes=nodes,
    )


def _files(index: IndexShape, storage: Storage) -> float:
    """Return the bytes of the files that a search reads, and that are best in the page cache."""
    if index.kind == "blocks":
        return index.keys * index.code_width
    return index.keys * key_bytes(storage, index.width)


def _layout(
    constants: Constants,
    *,
    storage: str,
    search: str,
    shards: int,
    replicas: int,
    keys: float,
    memory: float,
    one: Cost,
    rate: float,
    limit: str,
    nodes: int,
) -> Layout:
    middle, late = (slowest_quantile(constants.latencies, shards, quantile) for quantile in (0.5, 0.99))
    network = NETWORK_SECONDS if shards > 1 else 0.0
    return Layout(
        storage=storage,
        search=search,
        shards=shards,
        replicas=replicas,
        keys_per_shard=keys,
        shard_memory=memory,
        one_query=one,
        latency=one.seconds * middle + network,
        latency_p99=one.seconds * late + network,
        queries_per_second=rate * replicas,
        limit=limit,
        nodes_needed=nodes,
    )


def recommend(layouts: list[Layout]) -> Layout | None:
    """Return the first layout that fits and takes at most twice the lowest latency; None where none fits."""
    fitting = [layout for layout in layouts if layout.fits]
    lowest = min((layout.latency_p99 for layout in fitting), default=0.0)
    return next((layout for layout in fitting if layout.latency_p99 <= _SLOWER * lowest), None)
