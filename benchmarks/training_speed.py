"""Tokens per second of a decoder's training beside a plain loop of transformers over full rows, in one run.

    python benchmarks/training_speed.py --device cuda                                      # rows of 1,024, 16 and 32
    python benchmarks/training_speed.py --device cuda --profile 20                         # and the slowest kernels
    python benchmarks/training_speed.py --device cuda --corpus CORPUS                      # lengths of its documents
    python benchmarks/training_speed.py --layers 2 --rows 2 --length 128 --steps 2         # seconds on two cores

The plain loop reads rows of random tokens without any boundaries, with a fused AdamW: once with float32 weights and
autocast, once with weights in bfloat16 alone. Ours is `DecoderTrainer`, as `adapt` and `distill` call it: packed rows
of documents that do not attend to each other, clipping, float32 weights, the loss curve; eager and, on a GPU, compiled.
Its tokens are those that are learnt, without padding. Throughput is measured without waiting for the device in between;
the phases of a step then in steps of their own, with waiting: reading (in a thread, hidden behind the rest unless it is
longer), forward and backward, optimiser. Without --corpus, documents have random lengths, --mean on average. Before
all that, loss and gradients of packed rows are compared with those of documents one by one in float32. Ratios are those
to the plain loop with float32 weights, as ours has them.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knnlm.evaluation.evaluate import first_documents
from knnlm.lm.causal import CausalLM
from knnlm.lm.loading import choose_device
from knnlm.lm.windows import WindowShape
from knnlm.training.data import TokenStream, TrainingBatch, TrainingBatches
from knnlm.training.decoder_pass import DecoderPass
from knnlm.training.decoder_trainer import DecoderConfig, DecoderTrainer
from knnlm.training.initial_model import InitialModel, open_initial_model
from knnlm.training.packed_attention import kernel_change
from knnlm.training.trainer import LossCurve
from perplexity import split

COLUMNS = ("loop", "rows", "tokens/s", "of plain", "reading", "forward, backward", "optimiser", "first step", "memory")


def main() -> None:
    options = parse()
    device = choose_device(options.device)
    lm = CausalLM.open(options.model, device="cpu", dtype="float32")
    initial = open_initial_model(options.model, like=lm, layers=options.layers)
    print(f"{device}, torch {torch.__version__}, {initial.parameters:,} weights", flush=True)
    if device.type == "cuda":
        print(f"the kernel of packed rows differs from the reference by {kernel_change(device):.4f}", flush=True)
    print(check(initial, device, options), flush=True)
    table = []
    for rows in options.rows:
        plain = [plain_loop(initial, kind, rows, device, options) for kind in plain_kinds(device)]
        best = plain[0]["tokens/s"]  # with weights in float32, as ours
        ours = [trainer_loop(initial, rows, compiled, device, options) for compiled in kinds(device, options)]
        table += [{**row, "of plain": row["tokens/s"] / best} for row in (*plain, *ours)]
    show(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--layers", type=int, help="blocks of the model (default: all)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32], help="rows of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--mean", type=int, default=300, help="tokens of a document, on average")
    parser.add_argument("--corpus", type=Path, help="a folder with train.jsonl, for documents of real lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="steps that are not measured")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", type=int, default=0, help="print this many of the slowest operations")
    return parser.parse_args()


def plain_kinds(device: torch.device) -> list[str]:
    return ["autocast", "bfloat16"] if device.type == "cuda" else ["float32"]


def kinds(device: torch.device, options: argparse.Namespace) -> list[bool]:
    """Return whether ours is compiled in each loop: never on a CPU."""
    return [False] if options.no_compile or device.type != "cuda" else [False, True]


# ------------------------------------------------------------------------------------------------------- plain loop


def plain_loop(
    initial: InitialModel, kind: str, rows: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a loop that anyone would write."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = copy.deepcopy(initial.lm.model).to(device, dtype).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    texts = torch.randint(initial.lm.vocab_size, (options.steps + options.warm_up, rows, options.length))
    texts = texts.pin_memory() if device.type == "cuda" else texts

    def passes(ids: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    def update() -> None:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    def step(ids: torch.Tensor) -> None:
        passes(ids.to(device, non_blocking=True))
        update()

    first = timed(lambda: step(texts[0]), device)
    for ids in texts[1 : options.warm_up]:
        step(ids)
    begun = time.perf_counter()
    for ids in texts[options.warm_up :]:
        step(ids)
    taken = seconds_since(begun, device)
    phases = [timed(lambda: passes(texts[0].to(device)), device), timed(update, device)]
    row = {"loop": f"plain, {kind}", "rows": rows, "tokens/s": options.steps * rows * options.length / taken}
    return report({**row, "forward, backward": phases[0], "optimiser": phases[1], "first step": first}, device)


# ------------------------------------------------------------------------------------------------------------- ours


class PhasedTrainer(DecoderTrainer):
    """A trainer that can measure the phases of its steps."""

    phases: dict[str, float] | None = None

    def _read(self, groups: Any, teacher: Any) -> Any:
        with self._phase("reading", wait=False):
            return super()._read(groups, teacher)

    def _accumulate(self, *args: Any) -> Any:
        with self._phase("forward, backward"):
            return super()._accumulate(*args)

    def _update(self, rate: float) -> None:
        with self._phase("optimiser"):
            super()._update(rate)

    @contextmanager
    def _phase(self, name: str, *, wait: bool = True) -> Iterator[None]:
        if self.phases is None:
            yield
            return
        if wait:
            wait_for(self._device)
        begun = time.perf_counter()
        yield
        if wait:
            wait_for(self._device)
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun


def trainer_loop(
    initial: InitialModel, rows: int, compiled: bool, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure the trainer on packed rows."""
    steps = options.warm_up + 2 * options.steps
    size = rows * options.length
    text = TokenStream.from_documents(documents(initial.lm, 2 * steps * size, options))
    given = DecoderConfig(epochs=1, batch_tokens=size, context=options.length, packed=True, compile=compiled)
    config = given.resolve(text, initial, device)
    shape = WindowShape(options.length, options.length)
    start = {"start_token": initial.lm.start_token, "held_out": 0.0, "seed": 0}
    batches = TrainingBatches(text, shape, **start, packed=True)
    model = copy.deepcopy(initial.lm.model).to(device)
    trainer = PhasedTrainer(model, batches, None, config, device=device)
    print(f"attention over packed rows: {trainer._pass.attention}; {trainer.notes or 'no notes'}", flush=True)
    with tempfile.TemporaryDirectory() as folder, trainer._compiled():
        curve = LossCurve(Path(folder, "losses.jsonl"), 0, lambda _: None)
        return measure(trainer, curve, compiled, rows, options)


def measure(
    trainer: PhasedTrainer, curve: LossCurve, compiled: bool, rows: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Take the steps of a trainer: a few to warm up, those of the throughput, those of the phases."""
    device, running = trainer._device, trainer._steps(curve, lambda _: None)
    first = timed(lambda: next(running), device)
    take(running, options.warm_up - 1)
    learnt = trainer.state.tokens
    taken = timed(lambda: take(running, options.steps), device)
    speed = (trainer.state.tokens - learnt) / taken
    trainer.phases = {}
    take(running, max(1, options.steps // 2))
    phases = {name: seconds / max(1, options.steps // 2) for name, seconds in trainer.phases.items()}
    trainer.phases = None
    if options.profile:
        profile(lambda: take(running, 2), options.profile)
    running.close()
    loss = curve.flush()
    name = f"ours, {'compiled' if compiled else 'eager'}, {trainer.config.precision}"
    row = {"loop": name, "rows": rows, "tokens/s": speed, **phases, "first step": first}
    if not math.isfinite(loss):
        sys.exit(f"{name}: the loss is {loss}")
    return report(row, device)


def documents(lm: CausalLM, tokens: int, options: argparse.Namespace) -> list[list[int]]:
    """Return documents with about this many tokens: real ones, or random ones of random lengths."""
    random, made = np.random.default_rng(0), []
    if options.corpus is not None:
        made = lm.encode_all([each.text for each in first_documents(split(options.corpus, "train"), lm, tokens)])
        count = sum(map(len, made))
        return made * math.ceil(tokens / max(1, count))
    while tokens > 0:
        length = max(2, int(random.exponential(options.mean)))
        made.append(random.integers(lm.vocab_size, size=length).tolist())
        tokens -= length
    return made


def check(initial: InitialModel, device: torch.device, options: argparse.Namespace) -> str:
    """Return how much loss and gradients of two packed rows differ from those of documents one by one in float32."""
    text = TokenStream.from_documents(documents(initial.lm, 3 * options.length, options))
    config = DecoderConfig(epochs=1, context=options.length).resolve(text, initial, device)
    start = {"start_token": initial.lm.start_token, "held_out": 0.0, "seed": 0}
    batches = TrainingBatches(text, WindowShape(options.length, options.length), **start, packed=True)
    rows = batches.steps(0, 2 * options.length)[0]
    windows = [batches.read(window[None]) for window in np.concatenate(rows)]
    model = copy.deepcopy(initial.lm.model).to(device)
    loss, wanted = one_by_one(model, windows, "float32")
    found = [] if config.precision == "float32" else [one_by_one(model, windows, config.precision)]
    passes = DecoderPass(model, precision=config.precision, row_length=options.length, longest=batches.longest)
    batch = batches.read_rows(rows, options.length)
    total = passes.losses(batch, None, beta=0.0, positions=len(windows)).total
    total.backward()
    found.append((total.item(), {name: weight.grad for name, weight in passes.weights.items()}))
    ways = [f"documents one by one in {config.precision}"] * (len(found) - 1)
    ways.append(f"packed rows ({passes.attention}, {config.precision})")
    lines = []
    for way, (own, gradients) in zip(ways, found, strict=True):
        squares = [
            ((gradients[name] - right).square().sum().item(), right.square().sum().item())
            for name, right in wanted.items()
        ]
        change = math.sqrt(sum(one for one, _ in squares) / sum(other for _, other in squares))
        reference = "beside documents one by one in float32"
        lines.append(f"{way} {reference}: loss {own / loss - 1:+.1e}, gradients {change:.1e} relative")
    return "\n".join(lines)


def one_by_one(model: Any, windows: list[TrainingBatch], precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of windows that are read one by one, and its gradients."""
    loss = 0.0
    for alone in windows:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(input_ids=alone.ids.to(model.device), use_cache=False).logits[0].float()
        targets = alone.targets.to(model.device)
        own = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / len(windows)
        own.backward()
        loss += own.item()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss, gradients


# ---------------------------------------------------------------------------------------------------------- measures


def take(running: Iterator[int], steps: int) -> None:
    for _ in range(steps):
        next(running)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_since(begun: float, device: torch.device) -> float:
    wait_for(device)
    return time.perf_counter() - begun


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that a call takes until the device has done its work."""
    wait_for(device)
    begun = time.perf_counter()
    call()
    return seconds_since(begun, device)


def profile(call: Callable[[], Any], rows: int) -> None:
    """Print the operations that take most of the time of the device, or of a CPU."""
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as found:
        call()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60), flush=True)


def report(row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Print a row when it is known, with the peak of the GPU's memory since the last one, and return it."""
    row["memory"] = 0.0
    if device.type == "cuda":
        row["memory"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    print(row, flush=True)
    return row


def show(table: list[dict[str, Any]]) -> None:
    """Print the table: phases in milliseconds per step, memory in GiB."""
    print("|", " | ".join(COLUMNS), "|\n|" + "---|" * len(COLUMNS))
    for row in table:
        cells = [row["loop"], str(row["rows"]), f"{row['tokens/s']:,.0f}", f"{row['of plain']:.3f}"]
        cells += [f"{1000 * row.get(name, 0.0):.1f}" for name in COLUMNS[4:7]]
        cells += [f"{row['first step']:.1f} s", f"{row['memory']:.1f}"]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
