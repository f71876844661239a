"""Time and memory of building, indexing and searching: pure functions of sizes and constants.

A cost has parts, of which a plan names the largest. On a CPU the parts follow one another; on a GPU, tokenising, the
forward pass and writing overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from knnlm.datastore.codecs import Storage
from knnlm.datastore.encoder import CODEC_SAMPLE_KEYS
from knnlm.index.base import KMEANS_ROUNDS
from knnlm.index.rerank import MEASURED
from knnlm.io import MAX_RESIDENT_BYTES, resident_limit
from knnlm.plan.constants import Constants, CpuConstants, GpuConstants
from knnlm.plan.sizes import (
    SEGMENT_ENTRIES,
    IndexShape,
    ModelShape,
    TextShape,
    key_bytes,
    store_bytes,
    stored_width,
)

K = 1024  # neighbours of a query
BATCH = 1024  # queries of a batch, where many are searched
CACHED_KEYS = 8192  # of exact search on a CPU; more are read from memory in every call
MIN_COMPILED_TOKENS = 15_000_000  # tokens in full windows from which on a build on a GPU compiles the model

_CALIBRATION_TOKENS = 256  # that a build reads twice
_INDEX_PASSES = 4  # over all keys: lists, blocks, moves, and writing
_MAPPINGS = 256  # files of keys that are mapped at the same time
_MAX_PRODUCT_BYTES = 3 << 27  # of a search with blocks
_QUERY_BATCH = 8192
_MAX_CODEC_SAMPLE = 1 << 27  # bytes of the keys that a codec is fitted to
_MAX_CPU_RESIDENT = 1 << 29  # bytes of float32 keys up to which exact search keeps them
_EXACT_QUERIES, _EXACT_KEYS = 512, 8192  # that exact search compares at once
_SHORTLIST = 3  # times k: neighbours of a search of codes that are measured
_PROBED_LISTS = 64
_PCA_WIDTH = 80
_KEY_WORK = 48  # bytes for each key while an index is built: labels, gains and orders
_VALIDATION_BYTES = 1 << 28  # of stored keys that the validation of an index maps: 8,192 places, 64 KiB for each two
_DEVICE_SHARE = 0.8  # of free GPU memory that keys and scores may take
_GROUP_SCORES = 32  # bytes of scores for each key on a GPU: 128 queries, 4 bytes, a sixteenth of the keys
_WORKSPACE = 1 << 33  # bytes of the scores of a batch on a GPU
_EXTRA_GROUPS = {"float16": 1 / 16, "int8": 1.0}  # for each neighbour, measured on a GPU beside the nearest
_FEW_QUERIES = 64  # up to which a score on a GPU is that of more keys
_PENDING_SEGMENTS = 4  # on a GPU: three that are being written, and the one that is computed
_DEVICE_KEY = 4  # bytes for each key on a GPU beside its numbers


@dataclass(frozen=True)
class Cost:
    """Seconds by part."""

    parts: Mapping[str, float]
    overlapping: tuple[str, ...] = ()  # parts that run at the same time; the longest of them counts

    @property
    def seconds(self) -> float:
        """The whole time."""
        beside = max((self.parts[name] for name in self.overlapping), default=0.0)
        return beside + sum(time for name, time in self.parts.items() if name not in self.overlapping)

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    def faster(self, times: float) -> Cost:
        """Return the cost on a machine that does all parts so many times as fast."""
        return Cost({name: seconds / times for name, seconds in self.parts.items()}, self.overlapping)


def build_on_cpu(
    text: TextShape, model: ModelShape, storage: Storage, constants: Constants, *, times: float = 1.0
) -> Cost:
    """Return the time to read a text and write its store, on `times` as many cores as were measured.

    More cores do not make the disk faster.
    """
    cpu, tokens = constants.cpu, text.tokens
    numbers = stored_width(storage, model.width) if storage.kind == "int8" else model.width
    number = {"int8": cpu.store_int8, "codes": cpu.store_codes}.get(storage.kind, cpu.store_plain)
    segments = math.ceil(tokens / SEGMENT_ENTRIES["cpu"])
    forward = forward_seconds(model, text, constants, "cpu")
    parts = {
        "forward pass": text.read_tokens(model.window) * forward,
        "tokenising": tokens * cpu.tokenise,
        "writing keys": tokens * (numbers * number + cpu.store_key)
        + segments * cpu.segment
        + text.documents * cpu.document,
        "starting": cpu.start + min(tokens, _CALIBRATION_TOKENS) * forward,
    }
    if storage.fitted:
        parts["fitting the codec"] = fit_seconds(tokens, model.width, storage, cpu)
        if storage.kind == "int8" and storage.components:  # the map of keys to components
            parts["writing keys"] += tokens * model.width * storage.components * cpu.product
    made = Cost(parts).faster(times)
    disk = store_bytes(text, model, storage) * constants.disk.write
    return Cost({**made.parts, "writing keys": max(made.parts["writing keys"], disk)})


def fit_seconds(tokens: float, width: int, storage: Storage, cpu: CpuConstants) -> float:
    """Return the time to fit a codec to the first keys."""
    numbers = min(tokens, CODEC_SAMPLE_KEYS) * width
    if storage.kind == "codes":
        return numbers * cpu.fit_codes
    return numbers * (cpu.fit_int8 + (cpu.fit_components if storage.components else 0.0))


def forward_seconds(model: ModelShape, text: TextShape, constants: Constants, device: str) -> float:
    """Return the time for one token that the model reads: measured for this model, else by its operations."""
    measured = constants.models.get(model.name, {}).get(device)
    if measured is not None:
        return measured
    flop = {"cpu": constants.cpu.flop}
    if constants.gpu is not None:
        flop |= {"cuda": constants.gpu.flop, "cuda-compiled": constants.gpu.compiled_flop}
    return model.flops(text.document_tokens) * flop[device]


def build_on_gpu(
    text: TextShape, model: ModelShape, storage: Storage, constants: Constants, *, workers: int = 1
) -> Cost:
    """Return the time to read a text and write its store with one of the GPUs that share a disk."""
    gpu = _gpu(constants)
    read = text.read_tokens(model.window)
    compiled = _compiled_tokens(text, model)
    forward = (read - compiled) * forward_seconds(model, text, constants, "cuda")
    forward += compiled * forward_seconds(model, text, constants, "cuda-compiled")
    parts = {
        "forward pass": forward,
        "tokenising": text.tokens * gpu.tokenise,
        "writing keys": store_bytes(text, model, storage, device="cuda")
        * max(gpu.store, workers * constants.disk.write),
        "starting": gpu.start + (gpu.compile if compiled else 0.0),
        "writing the last segment": min(text.tokens, SEGMENT_ENTRIES["cuda"])
        * key_bytes(storage, model.width)
        * gpu.store_one,
    }
    return Cost(parts, overlapping=("forward pass", "tokenising", "writing keys"))


def _compiled_tokens(text: TextShape, model: ModelShape) -> float:
    """Return how many tokens a compiled model reads, those in full windows; 0 where compiling does not pay."""
    window, length = model.window, min(text.document_tokens, text.tokens)
    if length < window.context:
        return 0.0
    tokens = text.documents * ((length - window.context) // window.stride + 1) * window.context
    return tokens if tokens >= MIN_COMPILED_TOKENS else 0.0


def index_cost(index: IndexShape, constants: Constants, *, times: float = 1.0, cold_bytes: float = 0.0) -> Cost:
    """Return the time to build an index on `times` as many cores as were measured.

    `cold_bytes` are those of the keys that do not fit into memory, and are read from the disk in every pass.
    """
    passes = _INDEX_PASSES if index.kind == "blocks" else 1
    made = Cost(_index_parts(index, constants.cpu)).faster(times)
    return Cost({**made.parts, "reading the disk": passes * cold_bytes * constants.disk.read})


def _index_parts(index: IndexShape, cpu: CpuConstants) -> dict[str, float]:
    keys = index.keys
    if index.kind == "exact":
        return {}
    if index.kind == "codes":
        # A multiplication and an addition for each dimension of each centroid.
        coarse = index.lists * _PCA_WIDTH * cpu.product
        training = index.sample * (coarse * KMEANS_ROUNDS + cpu.codes_train)
        return {"training": training, "adding keys": keys * (cpu.codes_add + coarse)}
    numbers = keys * index.code_width
    training = index.sample * index.code_width * (cpu.train + KMEANS_ROUNDS * index.lists * cpu.nearest)
    return {
        "training": training,
        "sorting keys into lists": numbers * (cpu.assign + index.lists * cpu.nearest),
        "splitting lists": numbers * (cpu.split_read + index.split_levels * cpu.split_level),
        "moving keys": numbers * (cpu.move + index.near_blocks * cpu.product),
        "writing blocks": numbers * cpu.fill + keys * cpu.index_key,
    }


def search_on_cpu(index: IndexShape, constants: Constants, *, queries: float, cached: float = 1.0) -> Cost:
    """Return the time of one batch of queries; `cached` is the share of the searched files that is in memory."""
    if index.kind == "exact":
        return _exact_on_cpu(index, constants, queries)
    if index.kind == "codes":
        return _search_codes(index, constants, queries, cached)
    cpu, width = constants.cpu, index.code_width
    steps = max(1.0, math.ceil(queries / block_batch(index)))
    each = queries / steps
    touched = index.touched_blocks(each) * index.block * width  # bytes, one for each number
    file = index.keys * width
    unmapped = max(0.0, 1 - resident_limit(each) / file) if file else 0.0
    parts = {
        "calls": cpu.search + each * index.width * width * cpu.product,
        "comparing centroids": index.blocks * width * (cpu.centroid_read + each * cpu.centroid),
        "comparing keys": each * index.probes * index.block * cpu.scan,
        "reading blocks": touched * (cpu.block_read + unmapped * cpu.fault),
        "reading the disk": touched * (1 - cached) * constants.disk.read,
    }
    whole = {name: steps * seconds for name, seconds in parts.items()}
    if index.width > width:  # of wide keys, the index has some dimensions only
        shortlist = _measure_shortlist(index, constants, queries=queries, length=MEASURED, cached=cached)
        whole = {name: whole.get(name, 0.0) + shortlist.get(name, 0.0) for name in {**whole, **shortlist}}
    return Cost(whole)


def block_batch(index: IndexShape) -> float:
    """Return how many queries a search with blocks takes at once."""
    return max(1.0, min(_QUERY_BATCH, _MAX_PRODUCT_BYTES // (4 * index.block * max(1.0, index.probes))))


def _exact_on_cpu(index: IndexShape, constants: Constants, queries: float) -> Cost:
    cpu, keys = constants.cpu, index.keys
    parts = {
        "calls": cpu.exact + queries * cpu.exact_query,
        "comparing keys": keys * queries * cpu.exact_key,
        "reading keys": keys * cpu.exact_read + max(0.0, keys - CACHED_KEYS) * cpu.exact_beyond,
    }
    if keys * index.width * 4 > _MAX_CPU_RESIDENT:
        parts["decoding keys"] = keys * index.width * cpu.assign
    return Cost(parts)


def _search_codes(index: IndexShape, constants: Constants, queries: float, cached: float) -> Cost:
    cpu = constants.cpu
    scanned = index.keys * min(1.0, _PROBED_LISTS / index.lists)
    lists = min(_PROBED_LISTS, index.lists)
    return Cost(
        {
            "calls": cpu.codes_one if queries == 1 else queries * cpu.codes_query,
            "comparing centroids": queries * index.lists * _PCA_WIDTH * cpu.product,
            "comparing codes": queries * (scanned * cpu.codes_scan + lists * cpu.codes_list),
            **_measure_shortlist(index, constants, queries=queries, length=_SHORTLIST * K, cached=cached),
        }
    )


def _measure_shortlist(
    index: IndexShape, constants: Constants, *, queries: float, length: float, cached: float
) -> dict[str, float]:
    """Return the time to read the stored keys of shortlists, from many segments, and to measure them."""
    cpu, keys = constants.cpu, queries * length
    segments = math.ceil(index.keys / index.segment)
    touched = -segments * math.expm1(-keys / segments)
    different = -index.keys * math.expm1(-keys / index.keys)
    each = cpu.segment_take if segments <= _MAPPINGS else cpu.segment_open
    return {
        "measuring the shortlist": index.width * (keys * cpu.rerank + different * cpu.rerank_read),
        "opening segments": touched * each,
        "reading the disk": different * (1 - cached) * constants.disk.page,
    }


def search_on_gpu(keys: float, width: int, constants: Constants, *, queries: float, key_dtype: str) -> Cost:
    """Return the time of one batch of queries over keys in the memory of one GPU, by exact search."""
    gpu, numbers = _gpu(constants), keys * _padded(width)
    read, product = (gpu.int8_read, gpu.int8) if key_dtype == "int8" else (gpu.half_read, gpu.half)
    parts = {
        "calls": gpu.search + queries * gpu.query,
        "reading keys": numbers * read,
        "comparing keys": numbers * queries * product,
    }
    overlapping = ("reading keys", "comparing keys")
    waiting = gpu.launch - Cost(parts, overlapping).seconds  # of the device, for the host
    return Cost({**parts, "starting kernels": max(0.0, waiting)}, overlapping)


def _gpu(constants: Constants) -> GpuConstants:
    assert constants.gpu is not None
    return constants.gpu


def _padded(width: int) -> int:
    return -(-width // 64) * 64


def gpu_bytes(keys: float, width: int, key_dtype: str) -> float:
    """Return the GPU memory that keys need to be searched, with the scores of the smallest batch."""
    return _resident_bytes(keys, width, key_dtype) + keys * _GROUP_SCORES


def _resident_bytes(keys: float, width: int, key_dtype: str) -> float:
    """Return the GPU memory of keys alone."""
    return keys * (_padded(width) * (1 if key_dtype == "int8" else 2) + _DEVICE_KEY)


def gpu_search_memory(keys: float, width: int, *, key_dtype: str, queries: float = BATCH) -> float:
    """Return the peak GPU memory of searching: keys, the scores of a batch, and the distances that are measured."""
    group = 16 if key_dtype == "float16" and queries > _FEW_QUERIES else 32  # keys with one score
    scores = min(4 * queries * keys / group, _WORKSPACE)
    measured = 4 * queries * group * min(keys / group, K * (1 + _EXTRA_GROUPS[key_dtype]))
    return _resident_bytes(keys, width, key_dtype) + scores + measured


def gpu_capacity(memory_bytes: float) -> float:
    """Return the bytes of a GPU's memory that keys and scores may take."""
    return memory_bytes * _DEVICE_SHARE


def build_memory(text: TextShape, model: ModelShape, storage: Storage, constants: Constants) -> float:
    """Return the peak memory of a build on a CPU: that of the model, and of the sample that a codec is fitted to."""
    sample = min(text.tokens, CODEC_SAMPLE_KEYS) * model.width * 4 if storage.fitted else 0.0
    return constants.cpu.base_bytes + 4 * model.parameters + 2 * min(sample, _MAX_CODEC_SAMPLE)


def gpu_build_memory(text: TextShape, model: ModelShape, constants: Constants) -> float:
    """Return the peak GPU memory of a build: weights, activations, and the segments that are being written."""
    segment = min(text.tokens, SEGMENT_ENTRIES["cuda"]) * 2 * model.width
    segments = min(_PENDING_SEGMENTS, math.ceil(text.tokens / SEGMENT_ENTRIES["cuda"]))
    gpu = _gpu(constants)
    work = gpu.compiled_work_bytes if _compiled_tokens(text, model) else gpu.work_bytes
    return work + 2 * model.parameters + segments * segment


def index_memory(index: IndexShape, storage: Storage, constants: Constants) -> float:
    """Return the peak memory of building an index, in a process that has no model."""
    cpu = constants.cpu
    if index.kind == "exact":
        return cpu.idle_bytes
    # Keys are read from all over the store, so that their files stay mapped.
    mapped = min(index.keys, _MAPPINGS * index.segment) * key_bytes(storage, index.width)
    sample = 4 * index.sample * index.width
    if index.kind == "codes":
        return cpu.idle_bytes + cpu.index_bytes + sample + mapped + index.bytes
    arrays = index.bytes - index.keys * index.code_width  # all but the keys themselves
    return cpu.idle_bytes + cpu.index_bytes + max(3 * sample, index.keys * _KEY_WORK + arrays) + mapped


def search_memory(index: IndexShape, storage: Storage, constants: Constants, *, queries: float = BATCH) -> float:
    """Return the peak memory of searching, in a process that has no model."""
    cpu = constants.cpu
    results = queries * K * 12 * 2
    if index.kind == "exact":
        whole = index.keys * index.width * 4
        products = 5 * 4 * min(queries, _EXACT_QUERIES) * min(index.keys, _EXACT_KEYS)  # and what is sorted of them
        return cpu.idle_bytes + cpu.search_bytes + results + products + (whole if whole <= _MAX_CPU_RESIDENT else 0.0)
    if index.kind == "codes":
        measured = queries * _SHORTLIST * K * 64
        mapped = min(MAX_RESIDENT_BYTES, index.keys * key_bytes(storage, index.width))
        return cpu.idle_bytes + cpu.search_bytes + results + measured + index.bytes + mapped
    products = 4 * index.block * index.probes * min(queries, block_batch(index))
    arrays = index.bytes - index.keys * index.code_width + index.blocks * index.code_width
    mapped = min(resident_limit(queries), index.keys * index.code_width)
    mapped += min(_VALIDATION_BYTES, index.keys * key_bytes(storage, index.width))
    return cpu.idle_bytes + cpu.search_bytes + results + products + arrays + mapped
