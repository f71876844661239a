"""Many concurrent streams: no error, no starvation, constant memory use."""

from __future__ import annotations

import asyncio
import gc
import time

import psutil
import pytest

from helpers.server import read_stream, serving
from knnlm.mixture.mixture import Mixture

STREAMS = 64


async def run_streams(port, seconds):
    """Run 64 streams at a time, of all lengths and settings."""
    end = time.monotonic() + seconds
    found = []

    async def one(number):
        repeat = 0
        while time.monotonic() < end:
            memory = [{}, {"k": 3}, {"lambda": 0.9}, {"off": True}][(number + repeat) % 4]
            body = {
                "prompt": "When the model reads " * (1 + (number + repeat) % 5),
                "max_tokens": 4 + (7 * number + repeat) % 40,
                "temperature": number % 2,
                "memory": memory,
                "sources": number % 3,
            }
            stream = await read_stream(port, body)
            found.append((number, body["max_tokens"], stream))
            repeat += 1

    await asyncio.gather(*(one(number) for number in range(STREAMS)))
    return found


def check(found):
    for _, wanted, stream in found:
        assert (stream.status, stream.error, stream.done) == (200, None, True)
        assert stream.tokens == wanted
    assert {number for number, _, _ in found} == set(range(STREAMS))


@pytest.fixture
def server(lm, store):
    lm.model.generation_config.eos_token_id = None
    with serving(Mixture.open(store.path, lm, k=16, knn_temperature=8.0), trace_bytes=4 << 20) as running:
        yield running


def test_many_streams_are_all_served(server):
    check(asyncio.run(run_streams(server.port, 4.0)))
    assert server.service.scheduler.active == 0


@pytest.mark.slow
def test_many_streams_for_a_minute_leak_nothing(server):
    process = psutil.Process()
    check(asyncio.run(run_streams(server.port, 15.0)))
    gc.collect()
    before = process.memory_info().rss
    found = asyncio.run(run_streams(server.port, 60.0))
    check(found)
    gc.collect()
    grown = process.memory_info().rss - before
    assert grown < 30 << 20, f"{grown / 2**20:.1f} MiB more"
    scheduler = server.service.scheduler
    assert (scheduler.active, scheduler.waiting, len(scheduler._cache)) == (0, 0, 0)
    # No starvation: the slowest stream got at least a third of the median.
    made = sorted(sum(stream.tokens for number, _, stream in found if number == one) for one in range(STREAMS))
    assert made[0] > made[STREAMS // 2] / 3


@pytest.mark.slow
def test_trace_cache_uses_about_its_estimated_bytes_and_memory_stays_constant(lm, store):
    """Filled and replaced once, the cache is not much larger than its limit, and constant from then on."""
    lm.model.generation_config.eos_token_id = None
    process = psutil.Process()
    with serving(Mixture.open(store.path, lm, k=16, knn_temperature=8.0), trace_bytes=48 << 20) as running:
        scheduler, traces = running.service.scheduler, running.service.scheduler.traces
        check(asyncio.run(run_streams(running.port, 5.0)))
        empty, own = process.memory_info().rss, traces.bytes
        assert own < traces.max_bytes / 2
        while traces.bytes < 0.95 * traces.max_bytes:
            check(asyncio.run(run_streams(running.port, 5.0)))
        full = scheduler.tokens_generated
        while scheduler.tokens_generated < 2 * full:
            check(asyncio.run(run_streams(running.port, 5.0)))
        gc.collect()
        before = process.memory_info().rss
        assert before - empty < 1.5 * (traces.bytes - own)
        check(asyncio.run(run_streams(running.port, 30.0)))
        gc.collect()
        grown = process.memory_info().rss - before
        assert traces.bytes > 0.9 * traces.max_bytes
        assert grown < 15 << 20, f"{grown / 2**20:.1f} MiB more"
