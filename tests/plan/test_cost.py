"""The cost model against closed forms, real files and real stores."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch

from helpers.stores import documents
from knnlm.datastore.codecs import parse_storage
from knnlm.datastore.indexes import build_index
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.index import exact
from knnlm.index.blocks import index as block_index
from knnlm.index.faiss import FaissIndex
from knnlm.index.gpu import kernels, streaming
from knnlm.index.gpu import keys as gpu_keys
from knnlm.ingest import build as ingest
from knnlm.ingest import segment_builder
from knnlm.ingest.build import build
from knnlm.lm.windows import WindowShape, windows
from knnlm.plan import cost, sizes
from knnlm.plan.constants import Constants, CpuConstants, DiskConstants, GpuConstants
from knnlm.plan.cost import (
    Cost,
    build_memory,
    build_on_cpu,
    build_on_gpu,
    gpu_build_memory,
    gpu_bytes,
    gpu_search_memory,
    index_cost,
    search_on_cpu,
    search_on_gpu,
)
from knnlm.plan.measure import MemoryVectors, build_instantly, synthetic_keys
from knnlm.plan.sizes import IndexShape, ModelShape, TextShape, automatic_index, formats, key_bytes, store_bytes

MODEL = ModelShape("m", width=64, parameters=1000, body_parameters=400, layers=2, attention_width=64)


def unit_constants(**changed: float) -> Constants:
    """Constants that are all 0 except those that are given, as `name` or `gpu_name` or `disk_name`."""
    groups = {}
    for kind, prefix in ((CpuConstants, ""), (GpuConstants, "gpu_"), (DiskConstants, "disk_")):
        names = [each.name for each in fields(kind)]
        groups[prefix] = kind(**{name: float(changed.pop(prefix + name, 0.0)) for name in names})
    assert not changed
    cpu = replace(groups[""], threads=groups[""].threads or 1.0)
    return Constants({}, cpu, groups["gpu_"], groups["disk_"])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 12, 13, 40, 41])
def test_read_tokens_are_those_of_the_windows(length):
    shape = WindowShape(8, 4)
    real = sum(len(window) for window in windows(list(range(length)), shape, start_token=0))
    text = TextShape(3.0 * length, length, equal=True)
    assert text.read_tokens(shape) == pytest.approx(3 * real)


def test_read_tokens_of_exponential_lengths_are_the_mean_over_lengths():
    shape, mean = WindowShape(8, 4), 10.0
    total, step = 0.0, 0.01
    for number in range(40_000):
        length = (number + 0.5) * step
        again = max(0, math.ceil((length - shape.context) / shape.stride))
        total += math.exp(-length / mean) / mean * step * (length + (shape.context - shape.stride) * again)
    assert TextShape(1e6, mean).read_tokens(shape) == pytest.approx(1e6 * total / mean, rel=1e-3)


def test_build_on_a_cpu_adds_all_parts():
    text = TextShape(32_768.0, 1024.0, equal=True)
    made = build_on_cpu(text, MODEL, parse_storage("float16"), unit_constants(flop=1e-3, tokenise=2.0, start=9.0))
    flops = 2 * 400 + 4 * 2 * 64 * 1024
    assert made.parts["forward pass"] == pytest.approx(32_768 * flops * 1e-3)
    assert made.parts["tokenising"] == 65_536
    assert made.parts["starting"] == pytest.approx(9 + 256 * flops * 1e-3)
    stored = unit_constants(store_plain=1.0, store_key=10.0, segment=100.0, document=1000.0)
    made = build_on_cpu(text, MODEL, parse_storage("float16"), stored)
    assert made.seconds == 32_768 * (64 + 10) + 2 * 100 + 32 * 1000
    fitted = build_on_cpu(text, MODEL, parse_storage("int8"), unit_constants(fit_int8=1.0))
    assert fitted.seconds == 32_768 * 64


def test_measured_model_takes_precedence_over_its_operations():
    constants = replace(unit_constants(flop=1.0), models={"m": {"cpu": 0.25}})
    assert build_on_cpu(TextShape(100.0, 10.0, equal=True), MODEL, parse_storage("float16"), constants).seconds == 50


def test_parts_of_a_build_on_a_gpu_overlap():
    text = TextShape(1000.0, 100.0, equal=True)
    constants = unit_constants(gpu_tokenise=3.0, gpu_store=1.0, gpu_start=5.0)
    constants = replace(constants, models={"m": {"cuda": 1.0, "cuda-compiled": 0.5}})
    made = build_on_gpu(text, MODEL, parse_storage("float16"), constants)
    written = store_bytes(text, MODEL, parse_storage("float16"), device="cuda")
    assert made.seconds == max(1000.0, 3000.0, written) + 5
    compiled = build_on_gpu(TextShape(2e7, 2048.0, equal=True), MODEL, parse_storage("float16"), constants)
    windows_ = 2e7 / 2048 * 3
    assert compiled.parts["forward pass"] == pytest.approx(windows_ * 1024 * 0.5)
    plain = build_on_gpu(TextShape(2e7, 1000.0, equal=True), MODEL, parse_storage("float16"), constants)
    assert plain.parts["forward pass"] == pytest.approx(2e7)  # no window is full


def test_cost_names_its_largest_part_and_scales():
    made = Cost({"a": 3.0, "b": 4.0, "c": 1.0}, overlapping=("a", "b"))
    assert (made.seconds, made.bottleneck, made.faster(2).seconds) == (5.0, "b", 2.5)


def test_exact_search_on_a_cpu_is_a_product():
    index = automatic_index(5000, 64, parse_storage("float16"))
    assert index.kind == "exact"
    constants = unit_constants(exact=1.0, exact_read=2.0, exact_query=3.0, exact_key=5.0, exact_beyond=11.0)
    made = search_on_cpu(index, constants, queries=7)
    assert made.seconds == 1 + 2 * 5000 + 3 * 7 + 5 * 7 * 5000
    larger = search_on_cpu(replace(index, keys=8200.0), constants, queries=7)
    assert larger.seconds == 1 + 2 * 8200 + 11 * 8 + 3 * 7 + 5 * 7 * 8200


def test_search_with_blocks_counts_centroids_keys_and_blocks():
    index = IndexShape("Lists128,Blocks256", 100_000.0, 64, 128, 256)
    assert index.blocks == pytest.approx(100_000 / 256 + 64)
    one = search_on_cpu(index, unit_constants(centroid=1.0, centroid_read=1.0), queries=1)
    assert one.seconds == pytest.approx(2 * index.blocks * 64)
    assert search_on_cpu(index, unit_constants(scan=1.0), queries=10).seconds == 10 * 40 * 256
    assert search_on_cpu(index, unit_constants(block_read=1.0), queries=1).seconds == pytest.approx(40 * 256 * 64)
    everything = search_on_cpu(index, unit_constants(block_read=1.0), queries=1e6).seconds
    batches = math.ceil(1e6 / 8192)
    assert everything == pytest.approx(batches * index.blocks * 256 * 64, rel=1e-6)
    cold = search_on_cpu(index, unit_constants(disk_read=1.0), queries=1, cached=0.75).seconds
    assert cold == pytest.approx(40 * 256 * 64 / 4)


def test_search_on_a_gpu_is_bound_by_reading_or_by_products():
    constants = unit_constants(gpu_search=1.0, gpu_query=2.0, gpu_half_read=1e-3, gpu_half=1e-4)
    one = search_on_gpu(1000, 64, constants, queries=1, key_dtype="float16")
    assert one.seconds == pytest.approx(1 + 2 + 64)
    many = search_on_gpu(1000, 64, constants, queries=100, key_dtype="float16")
    assert many.seconds == pytest.approx(1 + 200 + 640)
    assert one.bottleneck == "reading keys"
    assert many.bottleneck == "comparing keys"


@pytest.mark.parametrize(("keys", "seconds"), [(10, 100.0), (98, 100.0), (99, 101.0)])
def test_search_on_a_gpu_waits_at_least_for_the_host(keys, seconds):
    constants = unit_constants(gpu_launch=100.0, gpu_search=2.0, gpu_half_read=1 / 64)
    made = search_on_gpu(keys, 64, constants, queries=1, key_dtype="float16")
    assert made.seconds == pytest.approx(seconds)
    assert (made.bottleneck == "starting kernels") == (keys == 10)


def test_last_segment_of_a_build_on_a_gpu_is_written_when_the_model_has_ended():
    constants = unit_constants(gpu_store_one=1.0)
    for tokens in (1000, 3 << 20):
        made = build_on_gpu(TextShape(tokens), MODEL, parse_storage("float16"), constants)
        assert made.seconds == min(tokens, 1 << 20) * 128


def test_index_of_codes_is_searched_by_lists_and_shortlist():
    index = automatic_index(1e6, 128, parse_storage("codes"))
    assert (index.kind, index.lists) == ("codes", 2048)
    scanned = 1e6 * 64 / 2048
    assert search_on_cpu(index, unit_constants(codes_scan=1.0), queries=3).seconds == 3 * scanned
    assert search_on_cpu(index, unit_constants(codes_list=1.0), queries=3).seconds == 3 * 64
    assert search_on_cpu(index, unit_constants(rerank=1.0), queries=1).seconds == 3 * 1024 * 128
    one = search_on_cpu(index, unit_constants(rerank_read=1.0), queries=1).seconds
    assert one == pytest.approx(3 * 1024 * 128, rel=0.002)
    assert search_on_cpu(index, unit_constants(rerank_read=1.0), queries=1e6).seconds == pytest.approx(1e6 * 128)
    segments = math.ceil(1e6 / 16_384)
    few = search_on_cpu(index, unit_constants(segment_take=1.0, segment_open=50.0), queries=1).seconds
    assert few == pytest.approx(segments, rel=1e-6)
    many = search_on_cpu(automatic_index(1e9, 128, parse_storage("codes")), unit_constants(segment_open=1.0), queries=1)
    assert 2900 < many.seconds < 3 * 1024  # nearly every key of the shortlist is in a segment of its own
    assert index_cost(index, unit_constants(codes_add=1.0)).seconds == 1e6


def test_shortlist_of_wide_keys_is_measured():
    wide = automatic_index(1e6, 2048, parse_storage("float16"))
    assert search_on_cpu(wide, unit_constants(rerank=1.0), queries=2).seconds == 2 * 128 * 2048
    narrow = automatic_index(1e6, 1024, parse_storage("float16"))
    assert search_on_cpu(narrow, unit_constants(rerank=1.0), queries=2).seconds == 0


def test_memory_of_a_build_grows_with_the_sample_of_a_codec_only():
    plain, int8 = parse_storage("float16"), parse_storage("int8")
    constants = unit_constants(base_bytes=100.0)
    assert build_memory(TextShape(1e9), MODEL, plain, constants) == 100 + 4000
    assert build_memory(TextShape(1000.0), MODEL, int8, constants) == 4100 + 2 * 1000 * 64 * 4
    assert build_memory(TextShape(1e9), MODEL, int8, constants) == 4100 + 2 * 65_536 * 64 * 4


def test_time_of_an_index_is_the_sum_of_its_stages():
    index = IndexShape("Lists128,Blocks256", 100_000.0, 64, 128, 256)
    made = index_cost(index, unit_constants(nearest=1.0))
    assert made.seconds == pytest.approx(64 * 128 * (20_000 * 5 + 100_000))
    assert index_cost(index, unit_constants(fill=1.0, index_key=2.0)).seconds == 100_000 * 66
    near = index.blocks * 65 / 128
    assert index_cost(index, unit_constants(product=1.0)).seconds == pytest.approx(100_000 * 64 * near)


def test_more_cores_do_not_make_the_disk_faster():
    text, storage = TextShape(1e6), parse_storage("float16")
    constants = unit_constants(store_plain=1.0, disk_write=0.1)
    written = store_bytes(text, MODEL, storage) * 0.1
    assert build_on_cpu(text, MODEL, storage, constants).seconds == 1e6 * 64
    assert build_on_cpu(text, MODEL, storage, constants, times=1e6).seconds == pytest.approx(written)
    gpus = build_on_gpu(text, MODEL, storage, constants, workers=8)
    assert gpus.seconds == pytest.approx(8 * store_bytes(text, MODEL, storage, device="cuda") * 0.1)
    index = automatic_index(1e6, 64, storage)
    cold = index_cost(index, unit_constants(disk_read=1.0, fill=1.0), times=64, cold_bytes=1000.0)
    assert cold.parts["reading the disk"] == 4000
    assert cold.parts["writing blocks"] == 1e6


def test_constants_of_the_code_are_those_of_the_plan():
    assert {"cpu", "cuda"} == set(sizes.SEGMENT_ENTRIES)
    assert sizes.SEGMENT_ENTRIES == ingest._SEGMENT_ENTRIES
    assert cost.MIN_COMPILED_TOKENS == segment_builder._MIN_COMPILED_TOKENS
    assert cost._QUERY_BATCH == block_index._QUERY_BATCH
    assert cost._MAX_PRODUCT_BYTES == block_index._MAX_PRODUCT_BYTES
    assert (cost._EXACT_QUERIES, cost._EXACT_KEYS) == (exact.QUERY_BATCH, exact._BLOCK)
    assert cost._MAX_CPU_RESIDENT == exact._MAX_CPU_RESIDENT
    assert cost._DEVICE_SHARE == streaming._DEVICE_SHARE
    assert cost._PENDING_SEGMENTS == segment_builder._MAX_PENDING_SEGMENTS + 1
    assert cost._WORKSPACE == streaming.DEFAULT_WORKSPACE
    keys = {"float16": gpu_keys.HalfKeys, "int8": gpu_keys.Int8Keys}
    assert {name: kind.extra_groups for name, kind in keys.items()} == cost._EXTRA_GROUPS
    assert cost._padded(100) == gpu_keys.padded(100, gpu_keys.WIDTH_MULTIPLE)


@pytest.mark.parametrize("key_dtype", ["float16", "int8"])
def test_gpu_memory_is_what_the_search_asks_for(key_dtype):
    class Vectors:
        rows, width = 256 * 40, 100

    needed = streaming._needed_bytes(Vectors(), key_dtype)
    assert gpu_bytes(Vectors.rows, Vectors.width, key_dtype) == needed


@pytest.mark.parametrize(("key_dtype", "dtype"), [("float16", torch.float16), ("int8", torch.int8)])
@pytest.mark.parametrize("queries", [1, 64, 65, 1024])
def test_gpu_memory_of_a_search_is_that_of_its_keys_scores_and_distances(key_dtype, dtype, queries):
    group = 2 * kernels.shape_for(queries, dtype).pairs
    keys, measured = group * 40_000, 1024 + int(1024 * cost._EXTRA_GROUPS[key_dtype])
    resident = keys * (128 * (2 if key_dtype == "float16" else 1) + 4)
    expected = resident + queries * 40_000 * 4 + queries * measured * group * 4
    assert gpu_search_memory(keys, 100, key_dtype=key_dtype, queries=queries) == expected


def test_scores_of_a_search_on_a_gpu_take_no_more_than_their_workspace():
    found = gpu_search_memory(1e9, 64, key_dtype="float16", queries=4096)
    assert found == 1e9 * (128 + 4) + 2**33 + 4 * 4096 * 16 * 1088


def test_memory_of_a_build_on_a_gpu_is_bounded():
    small = gpu_build_memory(TextShape(1000.0), MODEL, unit_constants(gpu_work_bytes=7.0))
    assert small == 7 + 2000 + 1000 * 128
    constants = unit_constants(gpu_work_bytes=7.0, gpu_compiled_work_bytes=11.0)
    large = [gpu_build_memory(TextShape(tokens, 5000.0), MODEL, constants) for tokens in (1e8, 1e9)]
    assert large[0] == large[1] == 11 + 2000 + 4 * 128 * 2**20
    short = gpu_build_memory(TextShape(1e8), MODEL, constants)  # no full windows, so not compiled
    assert short == 7 + 2000 + 4 * 128 * 2**20


@pytest.mark.parametrize("key_format", ["float16", "float32", "int8", "pca16-int8", "codes", "pca16-codes8"])
def test_predicted_disk_is_that_of_a_store(lm, tmp_path, key_format):
    with closing(build(documents(60), tmp_path / "a.store", lm=lm, key_format=key_format)) as store:
        text = TextShape(store.entry_count, store.entry_count / 60)
        model = ModelShape("m", lm.width, 0, 0)
        storage = parse_storage(key_format, width=lm.width)
        assert key_bytes(storage, lm.width) * store.key_count + 4 * store.entry_count == store.bytes
    real = sum(file.stat().st_size for file in (tmp_path / "a.store").rglob("*") if file.is_file())
    assert store_bytes(text, model, storage) == pytest.approx(real, rel=0.1)


def test_predicted_index_is_that_of_a_store(lm, tmp_path):
    keys = synthetic_keys(30_000, 32, seed=0)
    with closing(build_instantly(lm, keys, tmp_path / "a.store")) as store:
        build_index(store)
    with closing(Datastore.open(tmp_path / "a.store")) as store:
        index = automatic_index(store.key_count, store.width, parse_storage("float16"))
        assert [row.spec for row in store.catalog.indexes()] == [index.spec]
        assert index.bytes == pytest.approx(store.index_bytes, rel=0.02)
        real = sum(file.stat().st_size for file in (tmp_path / "a.store").rglob("*") if file.is_file())
        text = TextShape(store.entry_count, 1000.0)
        predicted = store_bytes(text, ModelShape("m", 32, 0, 0), parse_storage("float16")) + index.bytes
        assert predicted == pytest.approx(real, rel=0.03)


def test_predicted_index_of_codes_is_that_of_faiss(tmp_path):
    keys = MemoryVectors(synthetic_keys(6000, 128, seed=0))
    built = FaissIndex.build(keys, "PCAR80,IVF64,PQ40x4fsr")
    built.save(tmp_path / "index.faiss")
    predicted = IndexShape("PCAR80,IVF64,PQ40x4fsr", 6000, 128, 64).bytes
    assert predicted == pytest.approx((tmp_path / "index.faiss").stat().st_size, rel=0.03)


def test_formats_are_those_that_the_width_allows():
    assert [str(storage) for storage in formats(576)] == ["float32", "float16", "int8", "pca256-int8", "codes64"]
    assert [str(storage) for storage in formats(32)] == ["float32", "float16", "int8", "codes32"]


def test_bytes_grow_with_the_text():
    for storage in formats(576):
        model = ModelShape("m", 576, 0, 0)
        sizes_ = [store_bytes(TextShape(10.0**power), model, storage) for power in range(4, 13)]
        assert all(after > before for before, after in pairwise(sizes_))


def test_unknown_format_is_an_error():
    with pytest.raises(ParameterError):
        parse_storage("float8")
