"""Speed of search, building, evaluation and generation on a GPU, compared with what bounds them.

    python benchmarks/gpu.py                       # search on synthetic keys, forward pass of a random model
    python benchmarks/gpu.py --corpus FOLDER       # also build, tune, evaluate and generate with a real corpus
    python benchmarks/gpu.py --sizes 1,20 --int8 0 # millions of keys in float16, and in int8
    python benchmarks/gpu.py --sizes 0 --int8 0 --no-forward --streamed 20

FOLDER has train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. Keys are synthetic, with the
spectrum and the clusters of real ones (see `synthetic`). Times are medians of CUDA events after a warm-up. The product
that a search is compared with is that of all keys with all queries in float16, by torch (cuBLAS), its result discarded;
reading is one copy of as many bytes on the device, halved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knnlm.index.gpu.keys import DeviceKeys, HalfKeys, Int8Keys
from knnlm.index.gpu.search import FusedSearch

WIDTH = 576
MILLION = 1 << 20
BLOCK = MILLION  # keys that are made at once
BATCHES = (1, 16, 32, 256, 1024, 4096)
KS = (64, 1024)
rows: list[list[object]] = []


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device.")
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.perf_counter()
    note("device", torch.cuda.get_device_name(), f"torch {torch.__version__}")
    for size in numbers(options.sizes):
        search(size, "float16")
    for size in numbers(options.int8):
        search(size, "int8")
    for size in numbers(options.streamed):
        streamed(size)
    if options.forward:
        forward()
    if options.corpus:
        corpus(options.corpus, options)
    note("whole run", f"{time.perf_counter() - begin:.0f} s")
    show()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,20", help="millions of float16 keys")
    parser.add_argument("--int8", default="1,100", help="millions of int8 keys; 0 for none")
    parser.add_argument("--streamed", default="0", help="millions of float16 keys in host memory")
    parser.add_argument("--forward", action=argparse.BooleanOptionalAction, default=True, help="the bare forward pass")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--limit", type=int, default=60_000, help="tokens of valid and of test")
    parser.add_argument("--at", default="1024,1,0.40", help="k,τ,λ of the second evaluation")
    parser.add_argument("--folder", type=Path, help="where the store is built (default: a temporary folder)")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if int(number)]


def note(*cells: object) -> None:
    rows.append(list(cells))
    print(" | ".join(str(cell) for cell in cells), file=sys.stderr, flush=True)


def show() -> None:
    print("| what | figure | |")
    print("|---|---|---|")
    for cells in rows:
        print("|", " | ".join(str(cell) for cell in [*cells, ""][:3]), "|")


def timed(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Return the median milliseconds."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def synthetic(count: int, *, seed: int) -> Iterator[Tensor]:
    """Keys like those of a language model: 65,536 clusters, variances that fall as 1/rank, a mean far from zero."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    spread = torch.arange(1, WIDTH + 1, device="cuda").float().rsqrt()
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, device="cuda", generator=generator)).Q
    centres = torch.randn(1 << 16, WIDTH, device="cuda", generator=generator) * spread * 3
    mean = torch.randn(WIDTH, device="cuda", generator=generator)
    generator.manual_seed(seed)
    for begin in range(0, count, BLOCK):
        size = min(BLOCK, count - begin)
        which = torch.randint(len(centres), (size,), device="cuda", generator=generator)
        near = torch.randn(size, WIDTH, device="cuda", generator=generator) * spread
        yield (centres[which] + near) @ rotation + mean


def make_device_keys(count: int, dtype: str) -> DeviceKeys:
    device = torch.device("cuda")
    sample = next(synthetic(BLOCK, seed=1))[: 1 << 14]
    device_keys: DeviceKeys
    if dtype == "int8":
        device_keys = Int8Keys(count, WIDTH, metric="l2", device=device, sample=sample)
    else:
        device_keys = HalfKeys(count, WIDTH, metric="l2", device=device, centre=sample.mean(0))
    for number, block in enumerate(synthetic(count, seed=1)):
        device_keys.fill(number * BLOCK, block.half())
    return device_keys


def search(millions: int, dtype: str) -> None:
    """Time a search of this many keys at every batch and k, next to the product and to reading all keys once."""
    count = millions * 1_000_000
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    device_keys = make_device_keys(count, dtype)
    searcher = FusedSearch(device_keys)
    queries = next(synthetic(max(BATCHES), seed=2))
    reading = time_of_reading(device_keys.keys)
    note(
        f"{millions}M {dtype}: read all keys once",
        f"{reading:.2f} ms",
        f"{device_keys.keys.nbytes / reading / 1e9:.2f} TB/s",
    )
    products: dict[int, float] = {}
    if dtype == "float16":
        for batch in (256, 1024, 4096):
            products[batch] = time_of_product(device_keys.keys, queries[:batch].half())
            note(
                f"{millions}M {dtype}: product alone, batch {batch}", f"{batch * 1e3 / products[batch]:,.0f} queries/s"
            )
    for k in KS:
        for batch in BATCHES:
            one = queries[:batch]
            spent = timed(partial(searcher.search, one, k), repeats=3 if batch > 256 else 7)
            beside = f"÷ reading {reading / spent:.2f}"
            if batch in products:
                beside = f"÷ product {products[batch] / spent:.2f}"
            note(f"{millions}M {dtype}, k={k}, batch {batch}", f"{batch * 1e3 / spent:,.0f} queries/s", beside)
    if dtype == "float16":
        spent = timed(lambda: by_torch(device_keys, queries[:1024]), repeats=1)
        note(f"{millions}M {dtype}: torch mm + topk, k=1024, batch 1024", f"{1024e3 / spent:,.0f} queries/s")
    wrong, off = compare(searcher, device_keys, queries[:: max(BATCHES) // 64])
    note(
        f"{millions}M {dtype}: neighbours missed against brute force",
        f"{wrong} of {64 * 1024}",
        f"distances off by {off:.1e}",
    )
    note(f"{millions}M {dtype}: proofs, of them in parts", f"{searcher.proofs}, {searcher.divided}")
    note(f"{millions}M {dtype}: peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def time_of_reading(keys: Tensor) -> float:
    half = keys.view(-1)[: keys.numel() // 2]
    copy = torch.empty_like(half)
    return timed(lambda: copy.copy_(half))  # reads half and writes half: as many bytes as reading all


def time_of_product(keys: Tensor, queries: Tensor) -> float:
    out = torch.empty(len(queries), BLOCK, dtype=queries.dtype, device="cuda")

    def multiply() -> None:
        for part in keys.split(BLOCK):
            torch.mm(queries, part.T, out=out[:, : len(part)] if len(part) < BLOCK else out)

    return timed(multiply)


def by_torch(device_keys: DeviceKeys, queries: Tensor, k: int = 1024) -> Tensor:
    """The usual way: a product, top-k of it, block by block."""
    best = torch.full((len(queries), k), -torch.inf, device="cuda")
    ids = torch.zeros(len(queries), k, dtype=torch.int64, device="cuda")
    rounded = queries.half()
    for begin in range(0, device_keys.rows, BLOCK):
        end = min(begin + BLOCK, device_keys.rows)
        scores = (rounded @ device_keys.keys[begin:end].T).float() - device_keys.half_squares[begin:end]
        top = scores.topk(min(k, end - begin), dim=1)
        both, numbers = torch.cat([best, top.values], 1), torch.cat([ids, top.indices + begin], 1)
        kept = both.topk(k, dim=1)
        best, ids = kept.values, numbers.gather(1, kept.indices)
    return ids


def compare(searcher: FusedSearch, device_keys: DeviceKeys, queries: Tensor, k: int = 1024) -> tuple[int, float]:
    """Count neighbours that are farther than the true k-th by more than rounding, by brute force over all keys."""
    found = searcher.search(queries, k)
    prepared = device_keys.prepare(queries, 1).exact[: len(queries), : device_keys.width]
    best = torch.full((len(queries), k), torch.inf, device="cuda", dtype=torch.float64)
    for begin in range(0, device_keys.rows, BLOCK // 4):
        end = min(begin + BLOCK // 4, device_keys.rows)
        keys = device_keys.take(begin, end)
        distances = torch.cdist(prepared, keys, compute_mode="donot_use_mm_for_euclid_dist").double().square()
        both = torch.cat([best, distances], 1)
        best = both.topk(k, dim=1, largest=False, sorted=True).values
    off = ((found.distances.double() - best).abs() / best[:, -1:]).amax()
    missed = (found.distances.double() > best * (1 + 1e-5) + 1e-9).sum()
    return int(missed), float(off)


class Host:
    """Keys in host memory, as a store reads them."""

    half = True
    width = WIDTH

    def __init__(self, count: int) -> None:
        self.rows = count
        self.keys = torch.empty(count, WIDTH, dtype=torch.float16)
        for number, block in enumerate(synthetic(count, seed=1)):
            self.keys[number * BLOCK : number * BLOCK + len(block)] = block.half()

    def read(self, first: int, out: Tensor) -> None:
        out.copy_(self.keys[first : first + len(out)])


def streamed(millions: int) -> None:
    """Time a search of keys in host memory, about a twelfth of which fit on the device at a time."""
    from knnlm.index.exact import ExactIndex

    torch.cuda.empty_cache()
    host = Host(millions * 1_000_000)
    index = ExactIndex(host, device="cuda", max_bytes=host.keys.nbytes)
    pinned = torch.empty(1 << 28, dtype=torch.float16, pin_memory=True)
    on_device = torch.empty_like(pinned, device="cuda")
    bus = pinned.nbytes / timed(lambda: on_device.copy_(pinned, non_blocking=True)) * 1e3
    passing = host.keys.nbytes / bus
    note(f"{millions}M streamed: one pass over the bus", f"{passing:.2f} s", f"{bus / 1e9:.0f} GB/s")
    queries = next(synthetic(max(BATCHES), seed=2))
    for batch in (256, 4096):
        spent = timed(partial(index.search, queries[:batch], 1024), repeats=1) / 1e3
        note(
            f"{millions}M streamed, k=1024, batch {batch}",
            f"{batch / spent:,.0f} queries/s",
            f"÷ the bus {passing / spent:.2f}",
        )


def forward() -> None:
    """The forward pass of a model of 135M parameters with random weights, in bfloat16, windows of 1,024 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.cuda.empty_cache()
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(config.vocab_size, (64, 1024), device="cuda")
    with torch.inference_mode():
        eager = timed(lambda: model.model(ids, use_cache=False))
        note("forward without head, eager", f"{ids.numel() / eager / 1e3:.2f} M tokens/s")
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        begin = time.perf_counter()
        model.model(ids, use_cache=False)
        torch.cuda.synchronize()
        note("compiling its layers", f"{time.perf_counter() - begin:.1f} s")
        spent = timed(lambda: model.model(ids, use_cache=False))
        note("forward without head, compiled", f"{ids.numel() / spent / 1e3:.2f} M tokens/s", f"x{eager / spent:.2f}")


def corpus(folder: Path, options: argparse.Namespace) -> None:
    """Build, tune, evaluate and generate with a real corpus."""
    import knnlm
    from knnlm.lm.causal import CausalLM
    from knnlm.mixture.mixture import Mixture
    from knnlm.mixture.spec import MixtureOptions
    from perplexity import split

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    name = folder.name
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # compiled as for the first time
    torch._dynamo.reset()
    lm = CausalLM.open(options.model, device="cuda")
    documents = list(split(folder, "train"))
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        begin = time.perf_counter()
        store = knnlm.build(documents, Path(place) / "store", lm=lm, keep_on_device=True)
        built = time.perf_counter()
        mixture = Mixture.open(store, lm, use_tuned=False)
        torch.cuda.synchronize()
        ready = time.perf_counter()
        note(
            f"{name}: text to searchable keys",
            f"{ready - begin:.1f} s",
            f"{store.entry_count:,} keys, {built - begin:.1f} s of it the build",
        )
        kept = store.resident_keys is not None
        note(f"{name}: keys stayed on the device", kept, f"{store.entry_count / (built - begin) / 1e6:.2f} M keys/s")
        valid = mixture.record(split(folder, "valid"), Path(place) / "valid", k=1024, limit=options.limit)
        traced = time.perf_counter()
        note(f"{name}: tracing valid", f"{traced - ready:.1f} s", f"{len(valid):,} tokens")
        found = valid.sweep(device="cuda")
        again = valid.sweep(device="cuda")
        note(
            f"{name}: sweep of k, τ, λ",
            f"{again.seconds:.2f} s",
            f"first time {found.seconds:.2f} s; best {found.best}",
        )
        k, temperature, lmbda, _ = found.best
        for settings in ((k, temperature, lmbda), tuple(map(float, options.at.split(",")))):
            own = {"k": int(settings[0]), "knn_temperature": settings[1], "lambda": settings[2]}
            mixed = Mixture(
                lm,
                type(mixture.knn)(store, mixture.knn.index, k=own["k"], knn_temperature=own["knn_temperature"]),
                lmbda=own["lambda"],
            )
            test = list(split(folder, "test"))
            result = mixed.evaluate(test, limit=options.limit)
            figures = (
                f"{result.base_perplexity:.3f} → {result.perplexity:.3f}, best of both {result.oracle_perplexity:.3f}"
            )
            note(
                f"{name}: evaluation, {json.dumps(own)}",
                f"{result.seconds:.2f} s",
                f"{result.tokens:,} tokens; {figures}",
            )
        rounded = Mixture.open(
            store,
            lm,
            use_tuned=False,
            k=k,
            knn_temperature=temperature,
            lmbda=lmbda,
            options=MixtureOptions(key_dtype="int8"),
        )
        result = rounded.evaluate(test, limit=options.limit)
        note(f"{name}: evaluation with int8 keys", f"{result.seconds:.2f} s", f"{result.perplexity:.3f}")
        del rounded
        searcher = mixture.knn.index.searcher
        note(f"{name}: proofs, of them in parts", f"{searcher.proofs}, {searcher.divided}")
        generation(name, mixed)
        note(f"{name}: peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        store.close()


def generate(model: Any, ids: Tensor) -> None:
    settings = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


def generation(name: str, mixture: Any) -> None:
    """Tokens a second of `generate`, without and with the store, and of one step of search and vote as a graph."""
    import knnlm
    from knnlm.memories.voting import RetrievedNeighbours

    model = knnlm.KnnForCausalLM(mixture)
    memory, lm = mixture.knn, mixture.lm
    for batch in (1, 8):
        ids = torch.randint(100, 40_000, (batch, 32), device="cuda")
        plain = timed(partial(generate, lm.model, ids), repeats=1)
        mixed = timed(partial(generate, model, ids), repeats=1)
        note(
            f"{name}: generate, batch {batch}, 64 tokens each",
            f"{batch * 64e3 / mixed:.0f} tokens/s",
            f"{batch * 64e3 / plain:.0f} without the store",
        )
    keys = torch.randn(1, lm.width, device="cuda")

    def step() -> Tensor:
        found: RetrievedNeighbours = memory.search(keys)
        return memory.output(found).components[0].log_probs()

    spent = timed(step)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    replayed = timed(graph.replay)
    keys.copy_(torch.randn_like(keys))
    graph.replay()
    captured = out.clone()
    same = torch.allclose(captured.exp(), step().exp(), atol=1e-6)
    note(
        f"{name}: search and vote, one query",
        f"{spent:.2f} ms",
        f"as a CUDA graph {replayed:.2f} ms, same answer: {same}",
    )


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
