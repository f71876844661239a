"""Overhead of the server, and its throughput with concurrent requests.

    python benchmarks/server.py                        # a tiny model of its own, about a minute
    python benchmarks/server.py --store STORE         # any store
    python benchmarks/server.py --seconds 60           # with 64 streams for a minute, to see that RAM does not grow
                                                      # once the cache of traces is full

The server runs in this process, its clients in another one, both on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from transformers import LlamaConfig, LlamaForCausalLM

from helpers.models import tiny_tokenizer
from helpers.server import Running, read_stream, serving
from helpers.stores import documents
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture

PROMPT = "The memory of a model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="a store (default: a tiny one)")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long 64 streams run; 0: not at all")
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(asyncio.run(send(**options.client))))
        return
    with tempfile.TemporaryDirectory() as folder:
        mixture = Mixture.open(options.store) if options.store else make(Path(folder) / "store")
        print(json.dumps(measure(mixture, options), indent=2))


def make(path: Path) -> Mixture:
    """A llama of four layers and width 128, with 8,000 keys."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=384, max_position_embeddings=2048, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = CausalLM(LlamaForCausalLM(config).eval(), tiny_tokenizer(), name="benchmark")
    build(documents(80), path, lm=lm)
    return Mixture.open(path, lm, k=256, knn_temperature=4.0, lmbda=0.4)


def measure(mixture: Mixture, options: argparse.Namespace) -> dict[str, Any]:
    """Time `generate`, one request, and several at once."""
    with serving(mixture) as running:
        clients = {"port": running.port, "tokens": options.tokens, "seconds": 0.0}
        send_from_process({**clients, "streams": 1})
        generate(mixture, options.tokens)
        rounds = []
        for _ in range(options.repeat):  # alternating, so that other load of the machine affects all of them
            rounds.append(
                (
                    timed(lambda: generate(mixture, options.tokens)),
                    timed(lambda: send_from_process({**clients, "streams": 1})["rate"]),
                    timed(lambda: send_from_process({**clients, "streams": options.concurrent})["rate"]),
                )
            )
        generated, alone, together = (max(rate for rate, _ in column) for column in zip(*rounds, strict=True))
        own = [min(seconds for _, seconds in column) for column in zip(*rounds, strict=True)]
        ratios = sorted(one / other - 1 for (one, _), (other, _), _ in rounds)  # side by side, so that drift cancels
        figures = {
            "generate_tokens_per_second": round(generated, 1),
            "one_request_tokens_per_second": round(alone, 1),
            "overhead_over_generate": round(statistics.median(ratios), 3),
            "overhead_from_to": [round(ratios[0], 3), round(ratios[-1], 3)],
            # CPU time of this process, which other load of the machine affects less than wall time.
            "overhead_in_cpu_time": round(own[1] / own[0] - 1, 3),
            f"{options.concurrent}_requests_tokens_per_second": round(together, 1),
            "gain": round(together / alone, 2),
            "gain_in_cpu_time": round(options.concurrent * own[1] / own[2], 2),
        }
        if options.seconds:
            figures |= endure(running, options)
    return figures


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Return a rate, and the CPU seconds of this process."""
    began = time.process_time()
    return work(), time.process_time() - began


def generate(mixture: Mixture, tokens: int) -> float:
    """Tokens a second of `generate` at batch 1."""
    model = KnnForCausalLM(mixture)
    ids = torch.tensor([mixture.lm.prompt(PROMPT)], device=mixture.lm.device)
    began = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return tokens / (time.perf_counter() - began)


def endure(running: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Run 64 streams and measure the RAM of this process."""
    process = psutil.Process()
    clients = {"port": running.port, "tokens": options.tokens, "streams": 64}
    send_from_process({**clients, "seconds": min(10.0, options.seconds)})
    empty = process.memory_info().rss
    kept = fill(running, clients)
    before = process.memory_info().rss
    found = send_from_process({**clients, "seconds": options.seconds})
    after = process.memory_info().rss
    figures = {
        "traces_mb": round(kept / 2**20, 1),
        "taken_by_traces_mb": round((before - empty) / 2**20, 1),
        "grown_mb": round((after - before) / 2**20, 1),
    }
    return {"streams": 64, "seconds": options.seconds, **figures, **found}


def fill(running: Running, clients: dict[str, Any]) -> int:
    """Send requests until the cache of traces is full and was replaced once; return its bytes.

    Only then is RAM as fragmented as it will be.
    """
    scheduler, traces = running.service.scheduler, running.service.scheduler.traces
    while traces.bytes < 0.98 * traces.max_bytes:
        send_from_process({**clients, "seconds": 10.0})
    full = scheduler.tokens_generated
    while scheduler.tokens_generated < 2 * full:
        send_from_process({**clients, "seconds": 10.0})
    return traces.bytes


def send_from_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the clients in a process of their own, so that they do not share its interpreter with the server."""
    done = subprocess.run(
        [sys.executable, __file__, "--client", json.dumps(settings)], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout))


async def send(port: int, tokens: int, streams: int, seconds: float) -> dict[str, Any]:
    """Run some streams: each once, or repeatedly for some seconds."""
    began = time.perf_counter()
    found = []

    async def one(number: int) -> None:
        while True:
            body = {"prompt": PROMPT + " and" * (number % 7), "max_tokens": tokens, "temperature": 0}
            found.append(await read_stream(port, body))
            if time.perf_counter() - began >= seconds:
                return

    await asyncio.gather(*(one(number) for number in range(streams)))
    taken = time.perf_counter() - began
    first = sorted(stream.times[0] - stream.began for stream in found if stream.times)
    gaps = [later - earlier for stream in found for earlier, later in zip(stream.times, stream.times[1:], strict=False)]
    return {
        "rate": sum(stream.tokens for stream in found) / taken,
        "requests": len(found),
        "errors": sum(not stream.done or stream.error is not None for stream in found),
        "first_token_seconds_worst": round(first[-1], 3),
        "gap_seconds_worst": round(max(gaps, default=0.0), 3),
    }


if __name__ == "__main__":
    main()
