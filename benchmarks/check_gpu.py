"""Check exact search on a GPU against brute force in float64: `python benchmarks/check_gpu.py`.

The checks are those of tests/helpers/search_contract.py, which the tests run on a CPU, with larger sizes; and those
that need a GPU. Prints one line per check and "all checks passed" at the end, or exits with 1. Needs torch, Triton and
NumPy. With TRITON_INTERPRET=1 and `--device cpu --small` it runs without a GPU, to test the script itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers import search_contract as contract  # noqa: E402
from knnlm.index.base import Neighbours  # noqa: E402
from knnlm.index.exact import ExactIndex  # noqa: E402
from knnlm.index.gpu import search as gpu_search  # noqa: E402
from knnlm.index.gpu.search import FusedSearch  # noqa: E402
from knnlm.index.gpu.streaming import StreamedSearch  # noqa: E402

METRICS = ("l2", "ip")


class Sizes:
    """The sizes of the checks."""

    def __init__(self, *, small: bool) -> None:
        self.width = 64 if small else 576
        self.rows = 700 if small else 20_001
        self.k = 5 if small else 100
        self.large = 2_000 if small else 1_000_000
        self.large_k = 8 if small else 1024
        self.batches = (1, 7) if small else (1, 7, 16, 32, 100, 1000)
        self.odd = (
            [(1, 1, 1, 1), (2, 3, 17, 5), (257, 65, 2, 9)]
            if small
            else [
                (1, 1, 1, 1),
                (2, 3, 17, 5),
                (255, 65, 33, 300),
                (257, 65, 65, 7),
                (5_003, 65, 129, 33),
                (100_003, 65, 16, 4096),
                (30_011, 65, 300, 64),
            ]
        )


class Checks:
    """Every method is a check."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        self.device = device
        self.sizes = Sizes(small=small)
        self.real: tuple[Tensor, Tensor] | None = None

    def _new(self, seed: int) -> torch.Generator:
        return contract.seeded(seed, self.device)

    def largest_score_of_every_group(self) -> str:
        """For every tile shape, between poisoned guards."""
        for shape, dtype in contract.SHAPES.values():
            contract.check_group_maxima(shape, dtype, self.sizes.width, self._new(1))
        return f"{len(contract.SHAPES)} shapes"

    def measured_distances(self) -> str:
        """Of all members of some groups."""
        for metric in METRICS:
            for pairs, dtype in ((8, torch.float16), (16, torch.float16), (16, torch.int8)):
                contract.check_group_distances(pairs, dtype, metric, self.sizes.width, self._new(2))
        return ""

    def survivors_of_a_threshold(self) -> str:
        """Counts, overflow, and nothing else written."""
        for columns, capacity in ((100, 100), (1500, 40), (2049, 1), (40_000, 3000)):
            contract.check_survivors(9, columns, capacity, self._new(3))
        return ""

    def thresholds_that_mislead(self) -> str:
        """All branches of `_above_threshold`."""
        few = many = direct = 0
        with contract.settings(gpu_search, _MAX_TOPK_GROUPS=64, _MAX_TOPK_QUERIES=1, _THRESHOLD_SAMPLE=16):
            for kind in ("sample too good", "sample too bad", "all equal", "mixed", "nearly all padding", "random"):
                for wanted in (8, 16, 24):
                    spy = contract.check_groups(contract.misled(kind, 6, 256, 16, self._new(wanted)), wanted)
                    few, many, direct = few + spy.few, many + spy.many, direct + spy.direct
        assert few, "no threshold was lowered"
        assert many, "no threshold was raised"
        assert direct, "nothing was left to a plain top-k"
        return f"{few} lowered, {many} raised, {direct} sorted"

    def bounds_that_nothing_passes(self) -> str:
        """Scores of single keys against `score_bound`, as the tensor cores of this device round them."""
        for kind in contract.KINDS.values():
            for metric in METRICS:
                keys, queries = kind(self._new(4), 300, self.sizes.width, 7)
                contract.check_score_bound(keys, queries, metric)
        for metric in METRICS:
            # Tensor cores truncate, so that errors grow with the width; queries that are keys are not rounded.
            for width in (4096, 8192):
                keys, _ = contract.shifted(self._new(4), 300, width, 1)
                contract.check_score_bound(keys, keys[:7].float(), metric)
            keys, queries = contract.random_data(self._new(5), 300, self.sizes.width, 7)
            contract.check_score_bound(keys, queries, metric, int8=True)
        return f"{len(contract.KINDS)} kinds of data"

    def odd_sizes(self) -> str:
        """Any N, D, B and k, some of them above N."""
        for number, (rows, width, count, k) in enumerate(self.sizes.odd):
            keys, queries = contract.random_data(self._new(number), rows, width, count)
            contract.check_search(keys, queries, k, METRICS[number % 2])
        return f"{len(self.sizes.odd)} sizes"

    def difficult_data(self) -> str:
        """Anisotropic, clustered, duplicated, enormous, tiny, ordered."""
        proofs = divided = 0
        for kind in contract.KINDS.values():
            for metric in METRICS:
                for count in (3, 70):
                    keys, queries = kind(self._new(6), self.sizes.rows, self.sizes.width, count)
                    index = contract.check_search(keys, queries, self.sizes.k, metric)
                    proofs, divided = proofs + index.searcher.proofs, divided + index.searcher.divided  # type: ignore[attr-defined]
        return f"{proofs} proofs, {divided} measured in parts"

    def search_by_thresholds(self) -> str:
        """A whole search in which a sample suggests thresholds."""
        rounds = 0
        with contract.settings(gpu_search, _MAX_TOPK_GROUPS=64, _MAX_TOPK_QUERIES=1, _THRESHOLD_SAMPLE=128):
            for kind in (contract.ascending, contract.duplicates, contract.clusters):
                keys, queries = kind(self._new(7), 4 * self.sizes.rows, self.sizes.width, 70)
                with contract.spying(0) as spy:
                    contract.check_search(keys, queries, self.sizes.k, "l2")
                rounds += spy.rounds
        assert rounds >= 3, "no threshold was used"
        return f"{rounds} rounds"

    def proofs_that_repair(self) -> str:
        """As few groups as possible are measured at first, and queries lose their digits."""
        keys, queries = contract.shifted(self._new(8), self.sizes.rows, self.sizes.width, 20)
        with contract.settings(FusedSearch, _group_count=lambda _, k: k):
            index = contract.check_search(keys, queries, 3, "l2")
            proofs = index.searcher.proofs  # type: ignore[attr-defined]
            assert proofs, "nothing was proven"
            with contract.settings(gpu_search, _MAX_PROOF_GROUPS=8):
                keys, queries = contract.duplicates(self._new(9), self.sizes.rows, self.sizes.width, 20)
                index = contract.check_search(keys, queries, 3, "l2", coarse=1e-6)
                divided = index.searcher.divided  # type: ignore[attr-defined]
                assert divided, "nothing was measured in parts"
        return f"{proofs} proven, {divided} measured in parts"

    def int8_keys(self) -> str:
        """Exact about the rounded keys, close to the true ones."""
        recalls = []
        for metric in METRICS:
            for count in (7, 70):
                keys, queries = contract.random_data(self._new(10), self.sizes.rows, self.sizes.width, count)
                recalls.append(contract.check_int8(keys, queries, self.sizes.k, metric))
        assert min(recalls) > 0.9, f"recall {min(recalls)}"
        return f"recall at least {min(recalls):.3f}"

    def streamed_keys(self) -> str:
        """Keys streamed over the device, twice."""
        keys, queries = contract.clusters(self._new(11), self.sizes.rows, self.sizes.width, 20)
        max_bytes = 2 * self.sizes.width * self.sizes.rows - 1
        for metric in METRICS:
            index = contract.check_search(keys, queries, self.sizes.k, metric, max_bytes=max_bytes)
            assert isinstance(index.searcher, StreamedSearch)
            again, first = index.search(queries, self.sizes.k), index.search(queries, self.sizes.k)
            assert torch.equal(again.distances, first.distances)
        return f"chunks of {index.searcher.chunk:,}"  # type: ignore[attr-defined]

    def parts_of_the_keys(self) -> str:
        """Neighbours in parts of the keys merge to those in all keys, bit by bit, ties included."""
        firsts = [0, 1, self.sizes.rows // 3, self.sizes.rows // 2]
        for kind in contract.KINDS.values():
            for metric in METRICS:
                for count in (3, 70):
                    keys, queries = kind(self._new(13), self.sizes.rows, self.sizes.width, count)
                    contract.check_parts(keys, queries, self.sizes.k, metric, firsts)
        keys, queries = self._like_real()
        for count in self.sizes.batches:
            firsts = [0, len(keys) // 5, len(keys) // 2, len(keys) // 2 + 77]
            contract.check_parts(keys, queries[:count], self.sizes.large_k, "l2", firsts)
        return f"{len(contract.KINDS)} kinds of data, and a million keys"

    def _like_real(self) -> tuple[Tensor, Tensor]:
        """Return keys like those of a model: a few large dimensions, clusters, duplicates; and queries near some."""
        if self.real is None:
            rows, width, new = self.sizes.large, self.sizes.width, self._new(12)
            size = torch.rand(width, generator=new, device=self.device) + 0.1
            size[:: width // 4] *= 30
            centres = torch.randn(1000, width, generator=new, device=self.device) * size
            keys = torch.empty(rows, width, dtype=torch.float16, device=self.device)
            for begin in range(0, rows, 1 << 18):
                part = keys[begin : begin + (1 << 18)]
                own = torch.randint(1000, (len(part),), generator=new, device=self.device)
                part.copy_(centres[own] + torch.randn(part.shape, generator=new, device=self.device) * size / 2)
            keys[:: rows // 500] = keys[0].clone()  # the first key of every document
            near = torch.randint(rows, (max(self.sizes.batches),), generator=new, device=self.device)
            near[0] = 0
            noise = torch.randn(len(near), width, generator=new, device=self.device)
            self.real = keys, keys[near].float() + noise * size / 10
        return self.real

    def _compare(self, found: Neighbours, keys: Tensor, queries: Tensor, k: int) -> None:
        for begin in range(0, len(queries), 100):
            part = slice(begin, begin + 100)
            truth = true_distances(queries[part], keys)
            slack = contract.allowed(queries[part], keys[:1], truth, "l2")
            contract.check_answer(Neighbours(found.ids[part], found.distances[part]), truth, k, slack)

    def many_keys(self) -> str:
        """A million keys of width 576, k = 1024, small and large batches."""
        keys, queries = self._like_real()
        search = self._search_of(keys)
        for count in self.sizes.batches:
            with contract.poisoned():
                found = search.search(queries[:count], self.sizes.large_k)
            self._compare(found, keys, queries[:count], self.sizes.large_k)
        return f"{search.proofs} proofs, {search.divided} measured in parts"

    def _search_of(self, keys: Tensor) -> FusedSearch:
        return FusedSearch(contract.device_keys(keys, "l2", int8=False))

    def replayed_graph(self) -> str:
        """A search with one query, captured and replayed with others."""
        if self.device.type != "cuda":
            return "needs a GPU"
        keys, queries = self._like_real()
        kept = ExactIndex(_OnDevice(keys), device=self.device, kernels=True)
        search = kept.searcher
        assert isinstance(search, FusedSearch)
        query = queries[:1].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                kept.search(query, self.sizes.large_k)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kept.search(query, self.sizes.large_k)
        assert search.unproven is not None
        unproven = 0
        for number in range(20):
            query.copy_(queries[number : number + 1])
            captured.ids.fill_(-7)
            graph.replay()
            if bool(search.unproven.any()):
                unproven += 1
                continue
            eager = kept.search(queries[number : number + 1], self.sizes.large_k)
            assert torch.equal(captured.distances, eager.distances)
            assert torch.equal(captured.ids, eager.ids)
            ids = captured.ids[0]
            own = (keys[ids].float() - query).square().sum(1)
            torch.testing.assert_close(own, captured.distances[0], rtol=1e-4, atol=1e-5)
            assert len(ids.unique()) == len(ids)
        assert unproven < 20, "no replay was proven"
        return f"{20 - unproven} of 20 replays proven and equal"

    def steps_without_synchronisation(self) -> str:
        """Search, vote and mixture of a token without reading from the device; generation reads once, at the end."""
        from helpers.models import tiny, tiny_tokenizer
        from knnlm.corpus import Document
        from knnlm.generation.causal import KnnForCausalLM
        from knnlm.index.gpu.deferred import defer_checks
        from knnlm.ingest.build import build
        from knnlm.lm.causal import CausalLM
        from knnlm.memories.base import LM_LOGITS, Context
        from knnlm.mixture.mixture import Mixture

        lm = CausalLM(tiny("llama").to(self.device), tiny_tokenizer(), name="llama")
        with tempfile.TemporaryDirectory() as folder:
            texts = [f"In {year} the library had {year * 7 % 1000} books. " * 9 for year in range(1900, 1940)]
            stored = [Document(str(number), "synthetic", text) for number, text in enumerate(texts)]
            store = build(stored, Path(folder) / "store", lm=lm)
            mixture = Mixture.open(store, lm, k=64, knn_temperature=4.0, lmbda=0.6)
            assert mixture.knn is not None
            model = KnnForCausalLM(mixture)
            keys = torch.randn(3, lm.width, device=self.device)
            logits = torch.randn(3, lm.vocab_size, device=self.device)

            def step() -> Tensor:
                return mixture.predict(Context({mixture.knn.source: keys, LM_LOGITS: logits})).log_probs()

            expected = step()
            with defer_checks() as checks_:
                if self.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    deferred = step()
                finally:
                    if self.device.type == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            assert not checks_.any_failed()
            torch.testing.assert_close(deferred, expected)
            generated = []
            for late in (True, False):
                model.deferred_checks = late
                torch.manual_seed(3)
                ids = torch.tensor([[5, 6, 7]], device=self.device)
                generated.append(model.generate(ids, max_new_tokens=20, do_sample=True, eos_token_id=None))
            assert torch.equal(*generated)
        return ""

    def replayed_steps(self) -> str:
        """Translations with the steps of gate and one λ as CUDA graphs, against those without."""
        if self.device.type != "cuda":
            return "needs a GPU"
        from helpers.pairs import pair_lm, pairs
        from knnlm.generation import step_graph
        from knnlm.generation.seq2seq import KnnForSeq2SeqLM
        from knnlm.ingest.build import build
        from knnlm.mixture.mixture import Mixture

        lm = pair_lm("marian")
        lm.model.to(self.device)
        sources = lm.encode_sources([pair.source_text or "" for pair in pairs(7, start=90)])
        replays = 0
        with tempfile.TemporaryDirectory() as folder:
            path = build(pairs(400), Path(folder) / "store", lm=lm).path
            for settings in ({}, {"k": 9, "lmbda": 0.6, "memories": "knn"}):
                mixture = Mixture.open(path, lm, use_tuned=False, **settings)
                if not settings:
                    mixture.tune(pairs(60, start=500))
                model, found = KnnForSeq2SeqLM(mixture), []
                for captures in (True, False):
                    step_graph.WARM_RUNS = 2 if captures else 1 << 30
                    for beams in (1, 3):
                        written = model.generate(
                            **lm.pad_sources(sources),
                            num_beams=beams,
                            max_new_tokens=20,
                            min_new_tokens=20,
                            output_logits=True,
                            return_dict_in_generate=True,
                        )
                        found.append((written.sequences, torch.stack(written.logits)))
                    if captures:
                        replays += len(step_graph.step_graphs(mixture))
                        step_graph.step_graphs(mixture).clear()
                for (tokens, logits), (right, expected) in zip(found[:2], found[2:], strict=True):
                    assert torch.equal(tokens, right)
                    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        step_graph.WARM_RUNS = 2
        assert replays == 4, f"{replays} of 4 steps were captured"
        return f"{replays} graphs"

    def replayed_passes(self) -> str:
        """Generation with the passes of the model and a decoder, or its last block, as CUDA graphs, and without."""
        if self.device.type != "cuda":
            return "needs a GPU"
        from helpers.models import tiny, tiny_tokenizer
        from knnlm.corpus import Document
        from knnlm.generation import model_graph
        from knnlm.generation.causal import KnnForCausalLM
        from knnlm.generation.draft import Drafter, StepTimes
        from knnlm.ingest.build import build
        from knnlm.lm.causal import CausalLM
        from knnlm.lm.layers import layer_list
        from knnlm.mixture.mixture import Mixture

        lm = CausalLM(tiny("llama").to(self.device), tiny_tokenizer(), name="llama")
        whole, top = tiny("llama", seed=3), tiny("llama")
        with torch.no_grad():
            for weight in layer_list(top)[-1].parameters():
                weight.mul_(0.5)
        ids = torch.tensor([[1, 5, 9, 7, 30, 11], [0, 0, 0, 1, 6, 10]], device=self.device)
        padded = {"attention_mask": (ids > 0).long()}
        graphs = 0
        smallest, model_graph.MIN_CAPACITY = model_graph.MIN_CAPACITY, 32  # the texts outgrow it
        for model in (whole, top):
            with tempfile.TemporaryDirectory() as folder:
                for part in (model, tiny_tokenizer()):
                    part.save_pretrained(Path(folder) / "decoder")
                store = build([Document("a", "synthetic", "The library had 20 books.")], Path(folder) / "store", lm=lm)
                mixture = Mixture.open(store, lm, memories=f"decoder={Path(folder) / 'decoder'}:0.6", use_tuned=False)
            reader = mixture.readers.tops[1] or mixture.readers.models[1]
            found = []
            slow, fast = (StepTimes(extra=extra, each=0.01, weight=1e9) for extra in (1e3, 0.0))
            modes: list[tuple[Tensor, dict[str, Any]]] = [
                (ids[:1], {}),
                (ids, padded),
                (ids[:1], {"num_beams": 3}),
                (ids[:1], {"draft": Drafter(None, slow, student_times=fast)}),  # of the whole decoder
            ]
            for captures in (True, False):
                model_graph.WARM_RUNS = 2 if captures else 1 << 30
                for texts, settings in modes:
                    written = KnnForCausalLM(mixture).generate(
                        texts,
                        **settings,
                        do_sample=False,
                        max_new_tokens=60,
                        eos_token_id=None,
                        pad_token_id=0,
                        output_logits=True,
                        return_dict_in_generate=True,
                    )
                    found.append((written.sequences, torch.stack(written.logits)))
                for each in (lm, reader):
                    graphs += len(model_graph.model_graphs(each))
                    model_graph.model_graphs(each).clear()
            for (tokens, logits), (right, expected) in zip(found[: len(modes)], found[len(modes) :], strict=True):
                assert torch.equal(tokens, right)
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        model_graph.WARM_RUNS, model_graph.MIN_CAPACITY = 2, smallest
        assert graphs > 24, f"{graphs} passes were captured, of which 24 are without drafts"
        return f"{graphs} graphs"


class _OnDevice(contract.Array):
    """Keys that a build left on the device."""

    @property
    def resident_keys(self) -> list[Tensor]:
        """Two pieces."""
        return [self.data[: len(self.data) // 3], self.data[len(self.data) // 3 :]]


def true_distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Return (B, N) squared distances in float64, from centred products, chunk by chunk."""
    centre = keys[:1000].double().mean(0)
    queries = queries.double() - centre
    parts = []
    for chunk in keys.split(1 << 18):
        moved = chunk.double() - centre
        squares = queries.square().sum(1)[:, None] + moved.square().sum(1)
        parts.append(torch.addmm(squares, queries, moved.T, alpha=-2).clamp_(min=0))
    return torch.cat(parts, 1)


def main() -> int:
    """Run every check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for Triton's interpreter")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(options.device)
    checks = Checks(device, small=options.small)
    every: dict[str, Callable[[], Any]] = {
        name: getattr(checks, name) for name in vars(Checks) if not name.startswith("_")
    }
    failed = 0
    began = time.perf_counter()
    for name, check in every.items():
        start = time.perf_counter()
        try:
            detail, verdict = check(), "ok"
        except Exception:  # the other checks run anyway
            detail, verdict = traceback.format_exc(limit=-4).strip(), "FAILED"
            failed += 1
        took = time.perf_counter() - start
        print(f"{verdict:6} {name.replace('_', ' '):32} {took:6.1f} s  {detail}", flush=True)
    print(f"{len(every)} checks, {time.perf_counter() - began:.0f} s")
    print(f"{failed} checks failed" if failed else "all checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
