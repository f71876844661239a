"""Measure the constants of this machine in at most two minutes.

Every constant is the shortest of some repeats, since other work on a machine only makes it slower. The cost of storing
keys is that of a real build with a model that takes no time. The index is a real one over synthetic keys with
clusters; its stages are timed by their progress callbacks, less what is known of their products.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.benchmark import machine
from knnlm.corpus import Document
from knnlm.datastore.codecs import fit_bytes, fit_codec, fit_components, parse_storage
from knnlm.datastore.encoder import CODEC_SAMPLE_KEYS
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.store import Datastore
from knnlm.demo import split_topics
from knnlm.index.base import KMEANS_ROUNDS, Index, training_sample_size
from knnlm.index.blocks.build import balanced_split
from knnlm.index.blocks.index import PROBES
from knnlm.index.blocks.kernels import Centroids, QuantisedRows, quantise
from knnlm.index.exact import ExactIndex
from knnlm.index.factory import compressed_spec, inverted_lists
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import rerank
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM, KeyBatch
from knnlm.lm.windows import WindowShape
from knnlm.plan.constants import Constants, CpuConstants, DiskConstants, GpuConstants, packaged_constants
from knnlm.plan.cost import CACHED_KEYS, K, index_memory, search_memory
from knnlm.plan.model import shape_of
from knnlm.plan.sizes import IndexShape, automatic_index
from knnlm.plan.system import (
    idle_memory,
    measure_disk,
    page_fault_seconds,
    peak_memory,
    reset_peak,
    resident_memory,
)
from knnlm.progress import Progress, silent

Clock = Callable[[], float]

_CLUSTERS = 4096
_DOCUMENT_TOKENS = 1000
_PLAIN = parse_storage("float16")


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    keys: int = 100_000  # of the index
    stored: int = 32_768  # keys of each build
    forward: int = 1024  # tokens of a forward pass
    code_keys: int = 40_000  # of the index of codes
    segments: int = 320  # of a store: more than are mapped at the same time
    singles: int = 1000  # single queries
    batches: tuple[int, ...] = (1, 16, 256, 1024, 4096)
    repeats: int = 3
    disk_bytes: int = 1 << 27


FULL = Effort()


@dataclass
class _Measurement:
    """What the steps of a measurement share."""

    lm: CausalLM
    folder: Path
    effort: Effort
    clock: Clock
    found: dict[str, float] = field(default_factory=dict)
    latencies: tuple[float, ...] = (1.0,)

    def shortest(self, work: Callable[[], object], *, repeats: int | None = None) -> float:
        """Return the shortest time of some repeats, after a warm-up."""
        work()
        return min(self.times(work, repeats or self.effort.repeats))

    def times(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Return the time of each repeat."""
        taken = []
        for _ in range(repeats):
            begin = self.clock()
            work()
            taken.append(self.clock() - begin)
        return taken


def measure(
    lm: CausalLM,
    folder: Path,
    *,
    effort: Effort = FULL,
    clock: Clock = time.perf_counter,
    progress: Progress = silent,
) -> Constants:
    """Measure this machine with a model; files are written to a folder, which the caller removes."""
    lm.require_text("A measurement")
    work = _Measurement(lm, folder, effort, clock)
    # Without FAISS, no index can be built or checked.
    searching = (_codecs, _blocks, _exact, _codes) if find_spec("faiss") is not None else (_use_defaults,)
    steps = (_forward, _store, *searching)
    with progress("measuring", total=len(steps) + 2, unit="parts") as advance:
        models, gpu = dict[str, dict[str, float]](), cast(GpuConstants | None, None)
        if lm.device.type == "cuda":  # first, since it includes the first pass of the process
            from knnlm.plan.measure_gpu import measure_gpu

            models[lm.name], gpu = measure_gpu(lm, folder)
        advance(1)
        for step in steps:
            step(work)
            advance(1)
        disk = DiskConstants(*measure_disk(folder, effort.disk_bytes))
        work.found["fault"] = page_fault_seconds(folder, effort.disk_bytes, clock=clock)
        advance(1)
        forward = work.found.pop("forward")
        if gpu is None:
            models[lm.name] = {"cpu": forward}
        else:
            # The forward pass was that of the GPU. On a CPU it is as fast as a product of matrices.
            work.found["flop"] = work.found["product"] / 2
    about = {**machine(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about["gpu"] = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else None
    about["processor"] = processor_name() or about["processor"]
    cpu = CpuConstants(threads=torch.get_num_threads(), **work.found)
    return Constants(about, cpu, gpu, disk, models, work.latencies)


def _use_defaults(work: _Measurement) -> None:
    """Take the constants that cannot be measured without FAISS from the package."""
    for name, value in asdict(packaged_constants().cpu).items():
        if name not in ("threads", "fault"):
            work.found.setdefault(name, value)
    work.latencies = packaged_constants().latencies


def processor_name() -> str:
    """Return the processor's name as Linux knows it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def synthetic_keys(count: int, width: int, *, seed: int) -> Tensor:
    """Return clustered keys whose variances fall with the rank, (n, D) float16."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.arange(1, width + 1).float().rsqrt()
    centres = torch.randn(_CLUSTERS, width, generator=generator) * spread * 3
    generator.manual_seed(seed)
    keys = torch.empty(count, width, dtype=torch.float16)
    for begin in range(0, count, 1 << 14):
        size = min(1 << 14, count - begin)
        which = torch.randint(_CLUSTERS, (size,), generator=generator)
        noise = torch.randn(size, width, generator=generator) * spread
        keys[begin : begin + size] = (centres[which] + noise).half()
    return keys


class InstantModel:
    """Stands for a model that takes no time: its keys are given. `build` accepts it in place of a `CausalLM`."""

    has_encoder = False

    def __init__(self, lm: CausalLM, keys: Tensor, document_tokens: int) -> None:
        self.identity = {**lm.identity, "width": keys.shape[1]}
        self.device, self.name, self.width = torch.device("cpu"), lm.name, keys.shape[1]
        self.key_layer = SimpleNamespace(module=lm.key_layer.module)
        self._keys, self._document_tokens, self._done = keys, document_tokens, 0

    def window(self) -> WindowShape:
        """Return the default window."""
        return WindowShape()

    def documents(self) -> Iterator[Document]:
        """Yield as many documents as there are keys for."""
        for number in range(-(-len(self._keys) // self._document_tokens)):
            yield Document(f"document-{number}", f"synthetic/documents.jsonl:{number}", f"document {number}")

    def encode_document(self, document: Document) -> list[int]:
        """Return tokens; the last document has the rest."""
        first = int(document.text.split()[1]) * self._document_tokens
        return [0] * min(self._document_tokens, len(self._keys) - first)

    def read(
        self, documents: Sequence[Sequence[int]], shape: WindowShape, *, batch_tokens: int = 1024, logits: bool
    ) -> Iterator[KeyBatch]:
        """Yield the next keys."""
        del shape, logits
        total = sum(map(len, documents))
        first = self._done % len(self._keys)
        self._done += total if total > 256 else 0  # the sample that a build begins with is read again
        for row in range(0, total, batch_tokens):
            rows = torch.arange(row, min(row + batch_tokens, total))
            yield KeyBatch(rows, self._keys[(rows + first) % len(self._keys)].float(), torch.zeros(len(rows)), None)


def build_instantly(
    lm: CausalLM,
    keys: Tensor,
    path: Path,
    *,
    document_tokens: int = _DOCUMENT_TOKENS,
    **options: Any,
) -> Datastore:
    """Build a store of given keys."""
    instant = InstantModel(lm, keys, document_tokens)
    return build(instant.documents(), path, lm=cast(CausalLM, instant), **options)


def _forward(work: _Measurement) -> None:
    """Measure the tokenizer, the forward pass without the output matrix, and the memory of the process."""
    lm, text = work.lm, "\n\n".join(document.text for document in split_topics().store)
    begin = work.clock()
    tokens = lm.encode(text)
    work.found["tokenise"] = min((work.clock() - begin), work.shortest(lambda: lm.encode(text))) / len(tokens)
    window = lm.window()
    count = min(len(tokens), work.effort.forward)
    documents = [tokens[at : at + window.context] for at in range(0, count, window.context)]

    def read() -> None:
        for _ in lm.read(documents, window, batch_tokens=1024, logits=False):
            pass

    shape = shape_of(lm.model, lm.name)
    begin = work.clock()
    read()
    first = work.clock() - begin
    seconds = statistics.median(work.times(read, 3)) / count
    work.found["start"] = max(0.0, first - seconds * count)
    work.found |= {"forward": seconds, "flop": seconds / shape.flops(min(count, window.context))}
    weights = sum(each.nbytes for each in lm.model.parameters()) if lm.device.type == "cpu" else 0
    work.found["base_bytes"] = max(0.0, resident_memory() - weights)
    work.found["idle_bytes"] = idle_memory()


def _store(work: _Measurement) -> None:
    """Measure what a build takes beside the model: for each number, key, segment and document."""
    count, narrow = work.effort.stored, 16
    keys = synthetic_keys(count, work.lm.width, seed=3)

    def seconds(keys: Tensor, **options: Any) -> float:
        taken = []
        for number in range(2):
            path = work.folder / f"stored-{number}"
            begin = work.clock()
            store = build_instantly(work.lm, keys, path, **options)
            taken.append(work.clock() - begin)
            store.close()
            _remove(path)
        return min(taken)

    thin = keys[:, :narrow].contiguous()
    some = count // 2
    plain, half, slim, slim_half = seconds(keys), seconds(keys[:some]), seconds(thin), seconds(thin[:some])
    segments, documents = seconds(thin, segment_entries=1024), seconds(thin, document_tokens=50)
    segment = max(0.0, (segments - slim) / (count / 1024 - count / 16_384))
    document = max(0.0, (documents - slim) / (count / 50 - count / _DOCUMENT_TOKENS))
    around = segment / 16_384 + document / _DOCUMENT_TOKENS  # for each key
    each = max(0.0, (slim - slim_half) / (count - some) - around)
    number = max(1e-12, (plain - half) / (count - some) - around - each)
    work.found |= {"segment": segment, "document": document, "store_key": each, "store_plain": number / work.lm.width}
    work.found["start"] += max(0.0, half - some * (number + each + around))


def _codecs(work: _Measurement) -> None:
    """Measure the fitting of codecs, and encoding beyond what storing plain numbers takes."""
    width = work.lm.width
    count = min(CODEC_SAMPLE_KEYS, work.effort.stored)
    sample = synthetic_keys(count, width, seed=4).float()
    fewer = min(width, 256)
    numbers = count * width
    work.found["fit_int8"] = min(work.times(lambda: fit_bytes(sample), 2)) / numbers
    parts = sample.split(4096)
    work.found["fit_components"] = min(work.times(lambda: fit_components(parts, fewer), 1)) / numbers
    begin = work.clock()
    key_map, codes = fit_codec(parse_storage("codes", width=width), sample)
    work.found["fit_codes"] = (work.clock() - begin) / numbers
    assert key_map is not None
    block = sample[:4096]
    bytes_ = fit_bytes(block)
    plain = work.found["store_plain"]
    int8 = work.shortest(lambda: bytes_.encode(block)) / block.numel()
    coded = work.shortest(lambda: codes.encode(key_map.apply(block))) / block.numel()
    # A plain number is written and hashed as two bytes, int8 as one, and codes as next to none.
    work.found["store_int8"] = int8 + plain / 2
    work.found["store_codes"] = coded + plain / 10


def _blocks(work: _Measurement) -> None:
    """Measure the index of blocks: its stages, its memory, and searches."""
    lm, count = work.lm, work.effort.keys
    keys = synthetic_keys(count, lm.width, seed=1)
    stages: dict[str, float] = {}

    @contextmanager
    def timed(what: str, *, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        del total, unit
        begin = work.clock()
        yield lambda _: None
        stages[what] = work.clock() - begin

    shape = automatic_index(count, lm.width, _PLAIN)
    with closing(build_instantly(lm, keys, work.folder / "indexed")) as store:
        del keys
        _products(work, shape)
        before = resident_memory()
        reset_peak()
        begin = work.clock()
        build_index(store, shape.spec, progress=timed)
        whole = work.clock() - begin
        work.found["index_bytes"] = _residual(peak_memory() - before, index_memory, shape)
    with closing(Datastore.open(work.folder / "indexed")) as store:
        _stages(work, shape, stages, whole - sum(stages.values()))
        before = resident_memory()
        reset_peak()
        _block_search(work, shape, open_index(store))
        queries = max(work.effort.batches)
        work.found["search_bytes"] = _residual(peak_memory() - before, search_memory, shape, queries=queries)
    _remove(work.folder / "indexed")


def _residual(grown: float, model: Callable[..., float], shape: IndexShape, **options: Any) -> float:
    """Return the memory that a formula does not explain."""
    zero = SimpleNamespace(cpu=SimpleNamespace(idle_bytes=0.0, index_bytes=0.0, search_bytes=0.0))
    return max(0.0, grown - model(shape, _PLAIN, cast(Constants, zero), **options))


def _products(work: _Measurement, shape: IndexShape) -> None:
    """Measure products of keys and centroids, and the division of lists."""
    width = shape.code_width
    some = synthetic_keys(4096, width, seed=5).float()
    points, rows = Centroids(some[:2048]), quantise(some[:2048])
    work.found["nearest"] = work.shortest(lambda: points.nearest(rows)) / (2048 * 2048 * width)
    near = some[:1024]

    def compare() -> None:
        torch.addmm(near.square().sum(1), some, near.T, alpha=-2).min(1)

    work.found["product"] = work.shortest(compare) / (len(some) * len(near) * width)
    work.found["split_level"] = work.shortest(lambda: balanced_split(some, 16)) / (len(some) * width * 4)
    # Distances to all centroids and the choice of the nearest: once for each call, and for each query.
    many = Centroids(synthetic_keys(16_384, width, seed=6).float())

    def choose(rows: QuantisedRows) -> float:
        return work.shortest(lambda: many.distances(rows).topk(PROBES, largest=False, sorted=False))

    one, batch = choose(quantise(some[:1])), choose(quantise(some[:65]))
    work.found["centroid"] = max(0.0, batch - one) / 64 / (len(many) * width)
    work.found["centroid_read"] = max(0.0, one / (len(many) * width) - work.found["centroid"])


def _stages(work: _Measurement, shape: IndexShape, stages: dict[str, float], rest: float) -> None:
    """Subtract the products from the times of the stages; what remains is for each number of a key."""
    found, numbers = work.found, shape.keys * shape.code_width
    training = KMEANS_ROUNDS * shape.lists * found["nearest"]
    sampled = shape.sample * shape.code_width
    found["train"] = max(0.0, stages["training the index"] / sampled - training)
    found["assign"] = max(0.0, stages["sorting keys into lists"] / numbers - shape.lists * found["nearest"])
    split = shape.split_levels * found["split_level"]
    found["split_read"] = max(0.0, stages["splitting lists into blocks"] / numbers - split)
    moving = shape.near_blocks * found["product"]
    found["move"] = max(0.0, stages["moving keys to nearer blocks"] / numbers - moving)
    found["fill"] = stages["filling the index"] / numbers
    found["index_key"] = max(0.0, rest) / shape.keys


def _block_search(work: _Measurement, shape: IndexShape, index: Index) -> None:
    """Measure batches of several sizes and fit the terms of a search to them."""
    largest = max(work.effort.batches)
    queries = synthetic_keys(largest, work.lm.width, seed=2).float()
    index.search(queries, K)
    singles = [_time(work, index, queries[at : at + 1]) for at in range(min(largest, work.effort.singles))]
    seconds, terms = [], []
    for batch in work.effort.batches:
        taken = (
            singles if batch == 1 else [_time(work, index, queries[at : at + batch]) for at in _starts(largest, batch)]
        )
        known = shape.blocks * shape.code_width * (work.found["centroid_read"] + batch * work.found["centroid"])
        known += batch * shape.width * shape.code_width * work.found["product"]
        seconds.append(max(float(np.quantile(taken, 0.5 if batch == 1 else 0.25)) - known, 1e-9))
        touched = shape.touched_blocks(batch) * shape.block * shape.code_width
        terms.append([1.0, batch * shape.probes * shape.block, touched])
    fitted = non_negative_fit(np.array(terms), np.array(seconds))
    work.found |= dict(zip(("search", "scan", "block_read"), fitted, strict=True))
    middle = float(np.median(singles))
    work.latencies = tuple(round(each / middle, 4) for each in sorted(singles))


def _starts(total: int, batch: int) -> list[int]:
    """Return where batches begin: up to 24 of different queries, at least three."""
    starts = list(range(0, total - batch + 1, batch))[:24]
    return starts if len(starts) > 2 else [0] * 3


def _time(work: _Measurement, index: Index, queries: Tensor) -> float:
    return work.times(lambda: index.search(queries, K), 1)[0]


def non_negative_fit(terms: NDArray[Any], seconds: NDArray[Any]) -> list[float]:
    """Return factors of at least 0 for the (n, m) terms whose sums are nearest to the seconds, relative to these."""
    scaled = terms / seconds[:, None]
    units = np.maximum(np.abs(scaled).max(0), 1e-300)
    best, error = np.zeros(terms.shape[1]), math.inf
    for size in range(1, terms.shape[1] + 1):
        for chosen in combinations(range(terms.shape[1]), size):
            columns = list(chosen)
            solved = np.linalg.lstsq(scaled[:, columns] / units[columns], np.ones(len(seconds)), rcond=None)[0]
            if (solved < 0).any():
                continue
            factors = np.zeros(terms.shape[1])
            factors[columns] = solved / units[columns]
            left = float(np.square(scaled @ factors - 1).sum())
            if left < error * (1 - 1e-6):
                best, error = factors, left
    return [float(factor) for factor in best]


def _exact(work: _Measurement) -> None:
    """Measure exact search of one query and of many, over keys that fit into the cache and over more."""
    queries = synthetic_keys(512, work.lm.width, seed=2).float()
    terms, seconds = [], []
    for count in (CACHED_KEYS // 2, CACHED_KEYS, CACHED_KEYS * 3 // 2, CACHED_KEYS * 5 // 2):
        index = ExactIndex(MemoryVectors(synthetic_keys(count, work.lm.width, seed=1)))
        for batch, repeats in ((1, 31), (len(queries), 3)):
            index.search(queries[:batch], K)
            taken = work.times(partial(index.search, queries[:batch], K), repeats)
            terms.append([1.0, batch, count, max(0, count - CACHED_KEYS), batch * count])
            seconds.append(statistics.median(taken))
    names = ("exact", "exact_query", "exact_read", "exact_beyond", "exact_key")
    work.found |= dict(zip(names, non_negative_fit(np.array(terms), np.array(seconds)), strict=True))


class MemoryVectors:
    """Keys in memory; `codec` decodes them where they are codes."""

    def __init__(self, keys: Tensor, codec: Any = None, width: int | None = None) -> None:
        self.keys, self.rows, self.codec = keys, len(keys), codec
        self.width = width or keys.shape[1]

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over (number of the first key, (n, D) float32) in order."""
        for first in range(0, self.rows, size):
            yield first, self._decoded(self.keys[first : first + size])

    def take(self, ids: Tensor) -> Tensor:
        """Return these keys, (n) → (n, D) float32; zeros for an id below 0."""
        return self._decoded(self.keys[ids.clamp(min=0)]) * (ids >= 0)[..., None]

    def _decoded(self, keys: Tensor) -> Tensor:
        return keys.float() if self.codec is None else self.codec.decode(keys, 1.0)


def _codes(work: _Measurement) -> None:
    """Measure the index of a store of codes, and the measuring of its shortlist."""
    width, count = work.lm.width, work.effort.code_keys
    keys = synthetic_keys(count, width, seed=1).float()
    key_map, codec = fit_codec(parse_storage("codes", width=width), keys[:8192])
    assert key_map is not None
    vectors = MemoryVectors(torch.cat([codec.encode(key_map.apply(part)) for part in keys.split(8192)]), codec)
    vectors.width = codec.width
    queries = key_map.apply(synthetic_keys(256, width, seed=2).float())
    shortlist = torch.randint(count, (64, 3 * K), generator=torch.Generator().manual_seed(0))
    numbers = 3 * K * vectors.width
    one, many = (
        work.shortest(partial(rerank, vectors, queries[:size], shortlist[:size], metric="l2"), repeats=4) / numbers
        for size in (1, len(shortlist))
    )
    # Of many queries, each key is read once: as many numbers as all keys have, at most.
    different = min(len(shortlist) - 1.0, count / (3 * K))
    pair = max(0.0, many - one * different) / (len(shortlist) - different)
    work.found |= {"rerank": pair, "rerank_read": max(0.0, one - pair)}
    _code_search(work, vectors, queries)
    _segments(work)


def _code_search(work: _Measurement, vectors: MemoryVectors, queries: Tensor) -> None:
    """Measure an index with long lists, one with short lists, and one with fewer keys."""
    count = vectors.rows
    few, many = inverted_lists(count) // 4, inverted_lists(count)
    sample = min(training_sample_size(few), count // 2)
    fewer = MemoryVectors(vectors.keys[:sample], vectors.codec, vectors.width)

    def built(keys: MemoryVectors, lists: int) -> tuple[FaissIndex, float]:
        begin = work.clock()
        spec = compressed_spec(200_001, keys.width).replace(f"IVF{inverted_lists(200_001)}", f"IVF{lists}")
        return FaissIndex.build(keys, spec), work.clock() - begin

    (_, first), (long, second), (short, _) = built(fewer, few), built(vectors, few), built(vectors, many)
    coarse = few * 80 * work.found["product"]
    add = max(0.0, second - first) / (count - sample)  # both are trained on as many keys
    training = max(0.0, first - sample * add) / sample - KMEANS_ROUNDS * coarse
    work.found |= {"codes_add": max(0.0, add - coarse), "codes_train": max(0.0, training)}

    def seconds(index: FaissIndex, effort: float = 1.0) -> float:
        return work.shortest(lambda: index.search(queries, 3 * K, effort=effort)) / len(queries)

    once, twice = seconds(short), seconds(short, 2.0)
    probed, more, each = min(64, many), min(128, many), count / many  # lists, and keys of a short list
    scan = max(0.0, seconds(long) - once) / max(1.0, min(64, few) * count / few - probed * each)
    per_list = max(0.0, (twice - once) / max(1, more - probed) - scan * each)
    known = many * 80 * work.found["product"] + probed * (per_list + scan * each)
    single = work.shortest(lambda: short.search(queries[:1], 3 * K), repeats=20)
    work.found |= {"codes_scan": scan, "codes_list": per_list}
    work.found |= {"codes_query": max(0.0, once - known), "codes_one": max(0.0, single - known)}


def _segments(work: _Measurement) -> None:
    """Measure reading keys from all over a store: for each segment, mapped already or not."""
    keys = synthetic_keys(work.effort.segments * 64, 16, seed=0)
    ids = torch.randint(len(keys), (3 * K,), generator=torch.Generator().manual_seed(0)).sort().values
    seconds = {}
    for entries in (len(keys), 512, 64):
        store = build_instantly(work.lm, keys, work.folder / "segments", segment_entries=entries, document_tokens=64)
        with closing(store):
            count = len(store.segments)
            seconds[count] = work.shortest(partial(store.take, ids))
        _remove(work.folder / "segments")
    (_, one), (few, some), (many, all_) = sorted(seconds.items())
    work.found["segment_take"] = max(0.0, some - one) / few
    work.found["segment_open"] = max(work.found["segment_take"], (all_ - one) / many)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
