"""Time of builds with workers on Ray against a build without Ray, each worker with one core.

    python benchmarks/cluster.py TEXT.jsonl                       # 8,000 tokens of the bundled model
    python benchmarks/cluster.py TEXT.jsonl --tokens 40000 --rounds 3 --cores 1
    python benchmarks/cluster.py TEXT.jsonl --device cuda --workers 4 --tokens 20000000

Sides, each in a process of its own, in turns; the best round of each counts:

- plain: `knnlm.build`
- two plain: as many `knnlm.build_shard` at the same time as there are workers, without Ray: what the machine allows
- ray 1: `knnlm.build_on_ray` with one worker
- ray N: with several workers

`total` is the time of the process, with imports, the start of Ray and of the model; `reading` is the time in which
workers build shards, for `plain` that of `knnlm.build`. Both sides read whole documents with as many threads. `cpu` is
the CPU time of the slowest worker while it reads, and `beside` that of the driver and the processes of Ray meanwhile:
for a machine on which other programs run, and less exact, since it contains no waiting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

WORKER = "ray::BuildWorker"  # the name of the processes of workers


def main() -> None:
    options = parse()
    if options.side:
        print(json.dumps(run_side(options)))
        return
    sides = list(dict.fromkeys(["plain", "ray 1", f"ray {options.workers}"]))
    sides += [] if options.device == "cuda" or options.workers == 1 else [f"{options.workers} plain"]
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="knnlm-cluster-", dir=options.folder) as name:
        folder = Path(name)
        text, tokens = limited_text(options, folder)
        print(f"{tokens:,} tokens, {options.cores} cores a worker, load {os.getloadavg()[0]:.1f}", flush=True)
        for number, side in itertools.product(range(options.rounds), sides):
            wait_until_idle(options.calm)
            found = measure(options, side, text, folder / f"{number}-{side.replace(' ', '-')}")
            print(f"  {side}: {json.dumps({key: round(value, 1) for key, value in found.items()})}", flush=True)
            for key, value in found.items():
                best.setdefault(side, {})[key] = min(value, best.get(side, {}).get(key, value))
    show(best, tokens, options.workers)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a .jsonl file of documents")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="of each worker")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calm", type=float, default=0, help="seconds to wait for an idle machine before each side")
    parser.add_argument("--folder", type=Path, help="of the stores, which are removed")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def limited_text(options: argparse.Namespace, folder: Path) -> tuple[Path, int]:
    """Write the first documents of a text, in pieces of at most 500 words, so that shards have equal sizes."""
    from transformers import AutoTokenizer

    from knnlm.corpus import read_documents
    from knnlm.lm.loading import BUNDLED, bundled_folder

    place = bundled_folder() if options.model == BUNDLED else options.model
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokens, lines = 0, list[str]()
    for document in read_documents(options.text):
        words = document.text.split(" ")
        for first in range(0, len(words), 500):
            piece = " ".join(words[first : first + 500])
            tokens += len(tokenizer(piece)["input_ids"])
            lines.append(json.dumps({"text": piece}))
            if tokens >= options.tokens:
                break
        if tokens >= options.tokens:
            break
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "text.jsonl", tokens


def wait_until_idle(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and psutil.cpu_percent(2.0) > 10:
        pass


def measure(options: argparse.Namespace, side: str, text: Path, out: Path) -> dict[str, float]:
    """Run one side in a process of its own; several plain builds in as many processes."""
    command = [sys.executable, __file__, str(text), "--workers", str(options.workers), "--cores", str(options.cores)]
    command += ["--model", options.model, "--device", options.device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.cores)}
    count = options.workers if side.endswith(" plain") else 1
    sides = [f"shard {number + 1}/{count}" for number in range(count)] if count > 1 else [side]
    begin = time.perf_counter()
    started = [
        subprocess.Popen(
            [*command, "--side", each, "--out", f"{out}-{number}"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for number, each in enumerate(sides)
    ]
    found = [json.loads(process.communicate()[0]) for process in started]
    assert not any(process.returncode for process in started)
    total = time.perf_counter() - begin
    return {"total": total, **{key: max(each[key] for each in found) for key in ("reading", "cpu", "beside")}}


def run_side(options: argparse.Namespace) -> dict[str, float]:
    """Build in this process, or with workers that it starts, and return the seconds of reading."""
    import torch

    import knnlm

    read = partial(knnlm.read_documents, options.text)
    kind, _, number = options.side.partition(" ")
    if kind == "ray":
        watch = Watch()
        given: dict[str, Any] = {"model": options.model, "model_options": {"device": options.device}}
        given |= {"workers": int(number), "cores": options.cores, "progress": watch.progress}
        knnlm.build_on_ray(read, options.out, **given)
        return watch.result()
    torch.set_num_threads(options.cores)
    lm = knnlm.open_lm(options.model, device=options.device)
    begin, cpu = time.perf_counter(), time.process_time()
    if kind == "plain":
        knnlm.build(read(), options.out, lm=lm)
    else:
        knnlm.build_shard(read, options.out, shard=number, lm=lm)
    return {"reading": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "beside": 0.0}


class Watch:
    """A progress bar that measures the time from when the first worker has a shard."""

    def __init__(self) -> None:
        self._begin, self._seconds = 0.0, 0.0
        self._first: dict[int, float] = {}  # CPU seconds by process
        self._last: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._processes: list[psutil.Process] = []
        self._sampled = 0.0

    @contextmanager
    def progress(self, what: str, *, total: int | None = None, unit: str = "") -> Any:
        del what, total, unit
        yield self
        self._seconds = time.perf_counter() - self._begin

    def __call__(self, count: int) -> None:
        del count

    def note(self, text: str) -> None:
        if not self._begin and not text.startswith("0 of "):
            self._begin = time.perf_counter()
            own = psutil.Process()
            self._processes = [own, *own.children(recursive=True)]
            self._names = {process.pid: (process.cmdline() or [""])[0] for process in self._processes}
            self._sample(self._processes)
            self._first = dict(self._last)
        if self._begin:  # the processes of Ray seldom, since looking takes time too
            workers = [one for one in self._processes if self._names[one.pid].startswith(WORKER)]
            all_of_them = time.perf_counter() - self._sampled > 3
            self._sample(self._processes if all_of_them else workers)

    def _sample(self, processes: list[psutil.Process]) -> None:
        if len(processes) == len(self._processes):
            self._sampled = time.perf_counter()
        for process in processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._last[process.pid] = times.user + times.system

    def result(self) -> dict[str, float]:
        """Return the seconds of reading, and the CPU seconds of workers and of the rest."""
        used = {number: cpu - self._first.get(number, 0.0) for number, cpu in self._last.items()}
        workers = [cpu for number, cpu in used.items() if self._names[number].startswith(WORKER)]
        return {"reading": self._seconds, "cpu": max(workers), "beside": sum(used.values()) - sum(workers)}


def show(best: dict[str, dict[str, float]], tokens: int, workers: int) -> None:
    print(f"\n{'':10}{'total':>9}{'reading':>9}{'tokens/s':>10}{'cpu':>9}{'beside':>9}")
    for side, found in best.items():
        print(f"{side:10}{found['total']:8.1f}s{found['reading']:8.1f}s{tokens / found['reading']:10.0f}", end="")
        print(f"{found['cpu']:8.1f}s{found['beside']:8.1f}s")
        found["cpu and beside"] = found["cpu"] + found["beside"] / (workers if str(workers) in side else 1)
    plain, one, many = best["plain"], best["ray 1"], best[f"ray {workers}"]
    rows = [("time with Ray over time without", one, plain)]
    rows += [(f"speed of {workers} workers over 1", one, many)] if workers > 1 else []
    if machine := best.get(f"{workers} plain"):
        rows.append((f"speed of {workers} plain processes over 1", plain, machine))
    for name, first, second in rows:
        ratios = ", ".join(
            f"{key} {first[key] / second[key]:.3f}" for key in ("total", "reading", "cpu", "cpu and beside")
        )
        print(f"{name}: {ratios}")


if __name__ == "__main__":
    main()
