"""What the studies share: the memory, both texts as they were read once, and the settings chosen on the first.

Nothing is read before it is asked for, and what was read is kept in OUT/work:

    work/
      texts-<key>/valid/trace, keys.npy     what one pass over the text saw, and the key of each of its positions
      texts-<key>/test/trace, keys.npy
      valid.jsonl, test.jsonl               the texts, as `knnlm tune` and `knnlm eval` read them
      <study>.json                          what a study said
      writer.lock                           held by the report that is being made
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.evaluation.fit import (
    FittedWeights,
    TraceTable,
    choose_settings,
    evaluate_table,
    fit_weights,
    sweep_all,
    tabulate,
)
from knnlm.evaluation.sweep import Sweep
from knnlm.evaluation.trace import Trace, record
from knnlm.evaluation.tune import token_frequencies
from knnlm.io import translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.lm.loading import choose_device
from knnlm.memories.knn import KnnMemory
from knnlm.memories.output import OUTPUT_FILE
from knnlm.memories.voting import VoteParams
from knnlm.mixture.loader import open_reader
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.spec import MixtureOptions, parse_memories
from knnlm.mixture.weights import FixedWeights
from knnlm.progress import Progress, silent
from knnlm.report.crossval import out_of_fold
from knnlm.report.search import beginning
from knnlm.report.texts import Splits, write_texts

FORMAT = 2  # of what is kept; another one is made again

K = 1024  # neighbours that are kept of each position


@dataclass(frozen=True)
class StudyTexts:
    """What is asked for."""

    memory: Path
    out: Path
    texts: Splits
    memories: str | None = None
    second_lm: str | None = None
    limit: int | None = None
    quick: bool = False
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True)
class Read:
    """One text, read once."""

    trace: Trace
    keys: NDArray[np.float32]  # (N, D) of the reader, as it gave them
    documents: list[Document]  # as many as were read

    def begin(self, tokens: int) -> Read:
        """Give the first tokens, without what memories said of them; the last document may be cut."""
        rows = min(tokens, len(self.trace))
        count = len(np.unique(self.trace.documents[:rows]))
        return Read(beginning(self.trace, rows, count), self.keys[:rows], self.documents[:count])


class ReportContext:
    """All that a study may use."""

    def __init__(self, order: StudyTexts, lm: CausalLM | None = None, *, progress: Progress = silent) -> None:
        self.order = order
        self.progress = progress
        self.store = Datastore.open(order.memory)
        self.labels = _labels(self.store, order)
        self.device = str(lm.device) if lm is not None else str(choose_device(order.device))
        self.work = order.out / "work"
        self._given = lm
        self._seen: dict[tuple[str, bool], TraceTable] = {}
        self._fits: dict[tuple[tuple[int, ...], str], FittedWeights] = {}

    @property
    def quick(self) -> bool:
        """Whether smaller samples will do."""
        return self.order.quick

    @cached_property
    def key(self) -> str:
        """Tell these inputs from any others: what was found for them holds for no others."""
        order, model = self.order, self.lm.model
        facts = [FORMAT, self.store.fingerprint, order.texts.key(), self.labels, order.limit, K, order.model]
        facts += [{**self.lm.identity, "name": None}, str(model.dtype), self.lm.device.type]
        # A model that was given has a precision of its own; others are opened as it was asked for.
        facts += [] if self._given is None else [order.dtype]
        facts += [[row.spec, row.metric] for row in self.store.catalog.indexes()]
        facts += [_state(place) for place in _places(self.store.path, self.labels)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @cached_property
    def mixture(self) -> Mixture:
        """The model and every memory, as if nothing had been tuned."""
        order = self.order
        return Mixture.open(
            order.memory,
            self.lm,
            memories=",".join(self.labels),
            use_tuned=False,
            options=MixtureOptions(model=order.model, device=order.device, dtype=order.dtype),
        )

    @cached_property
    def lm(self) -> CausalLM:
        """The language model."""
        order = self.order
        if self._given is not None:
            return self._given
        return open_reader(self.store, name=order.model, device=order.device, dtype=order.dtype)

    @cached_property
    def valid(self) -> Read:
        """The text that settings are chosen on."""
        return self._read("valid", self.order.texts.valid)

    @cached_property
    def test(self) -> Read:
        """The text that is reported on."""
        return self._read("test", self.order.texts.test)

    def _read(self, name: str, documents: list[Document]) -> Read:
        """Read a text, unless that was done before."""
        folder = self.work / f"texts-{self.key}" / name
        trace, keys = folder / "trace", folder / "keys.npy"
        if not (trace.exists() and keys.exists()):
            shutil.rmtree(folder, ignore_errors=True)
            for other in set(self.work.glob("texts-*")) - {folder.parent}:
                shutil.rmtree(other, ignore_errors=True)
            with translate_os_errors(folder):
                folder.mkdir(parents=True)
            self._record(documents, trace, keys)
        seen = Trace.open(trace)
        read = documents[: int(seen.metadata["documents"])]
        write_texts(self.work, name, read)
        return Read(seen, np.load(keys, mmap_mode="r"), read)

    def _record(self, documents: list[Document], trace: Path, keys: Path) -> None:
        mixture, partial = self.mixture, keys.with_suffix(".partial")
        assert mixture.knn is not None
        source, width = mixture.knn.source, int(mixture.knn.store.model["width"])
        with ArrayWriter(partial, np.float32, (width,)) as writer:

            def keep_keys(rows: NDArray[np.int64], batch: ReadBatch) -> None:
                writer.put(rows, batch.context.states[source].float().cpu().numpy())

            record(
                mixture,
                documents,
                trace,
                k=K,
                limit=self.order.limit,
                progress=self.progress,
                on_batch=keep_keys,
            )
        with translate_os_errors(keys):
            partial.rename(keys)

    @cached_property
    def sweeps(self) -> list[Sweep | None]:
        """Every k, τ and λ of each memory of neighbours, on the first text."""
        with self.progress("choosing settings", total=1, unit="steps") as advance:
            found = sweep_all(self.valid.trace, device=self.device)
            advance(1)
        return found

    @cached_property
    def knn(self) -> int:
        """Which of the memories is the store."""
        return self.labels.index("knn")

    @property
    def sweep(self) -> Sweep:
        """Every k, τ and λ of the store."""
        found = self.sweeps[self.knn]
        assert found is not None
        return found

    @property
    def chosen(self) -> tuple[VoteParams, float]:
        """How the store votes, and its λ, by the first text."""
        k, knn_temperature, lmbda, _ = self.sweep.best
        return VoteParams(k, knn_temperature), lmbda

    @cached_property
    def frequencies(self) -> Tensor:
        """How often the store has each token, (V,)."""
        return token_frequencies(self.store)

    @cached_property
    def base(self) -> float:
        """The perplexity of the model alone on the text that is reported on."""
        return perplexity(self.test.trace.lm_log_probs)

    def searcher(self, index: Any) -> KnnMemory:
        """Give the store behind another index."""
        setting, _ = self.chosen
        return KnnMemory(self.store, index, k=setting.k, knn_temperature=setting.knn_temperature)

    def store_logs(self, read: Read) -> tuple[Tensor, Tensor]:
        """Give the (N,) log-probabilities of a text by the model and by the store's vote; NaN where it abstains."""
        seen = self.seen(read, "fixed")
        return seen.lm_log_probs.double(), seen.memories[self.knn].log_probs[:, 0].double()

    def settings(self, kind: str) -> list[tuple[VoteParams, ...]]:
        """Say how the neighbours of each memory vote, by the first text, for weights of one kind."""
        return choose_settings(self.valid.trace, self.sweeps, several=kind != "fixed")

    def seen(self, read: Read, kind: str) -> TraceTable:
        """Give what each memory said of a text, at the settings that weights of one kind use."""
        name = ("valid" if read is self.valid else "test", kind != "fixed")
        if name not in self._seen:
            self._seen[name] = tabulate(read.trace, self.settings(kind), device=self.device)
        return self._seen[name]

    def some(self, read: Read, memories: Sequence[int], kind: str) -> TraceTable:
        """Give what some of the memories said of a text."""
        return self.seen(read, kind).select(*(read.trace.memories[number].label for number in memories))

    def fit(self, memories: tuple[int, ...], kind: str) -> FittedWeights:
        """Choose the weights of some memories on the first text, as `knnlm tune` does."""
        if (memories, kind) not in self._fits:
            first = self.sweeps[memories[0]]
            if kind == "fixed" and first is not None and len(memories) == 1:
                lmbda, found = first.best[2:]
                fitted = FittedWeights(FixedWeights((1 - lmbda, lmbda)), found)
            else:
                seen = self.some(self.valid, memories, kind)
                fitted = fit_weights(
                    seen, kind, frequencies=self.frequencies, device=self.device, progress=self.progress
                )
            self._fits[memories, kind] = fitted
        return self._fits[memories, kind]

    def judge(self, memories: tuple[int, ...], kind: str) -> float:
        """Give the perplexity of the first text by weights that had not seen it: what weights are compared by."""
        if kind == "gated":  # its own figure is of that sort
            return self.fit(memories, kind).perplexity
        return out_of_fold(self.some(self.valid, memories, kind), kind)

    def measure(self, memories: tuple[int, ...], kind: str) -> tuple[float, float, float]:
        """Give the perplexities on both texts, and what all memories weighed on the second."""
        fitted = self.fit(memories, kind)
        found = evaluate_table(self.some(self.test, memories, kind), fitted.weights)
        return fitted.perplexity, found.perplexity, found.lmbda

    def command(self, *words: object) -> str:
        """Write a command as it is given in a shell."""
        model = () if self.order.model is None else ("--model", self.order.model)
        return shlex.join([str(word) for word in ("knnlm", *words, *model)])

    def evaluation(self, *options: object) -> str:
        """Write the command that measures the text that is reported on."""
        return self.command("eval", self.order.memory, self.work / "test.jsonl", *options)

    def tuning(self, *options: object) -> str:
        """Write the command that chooses on the other text."""
        return self.command("tune", self.order.memory, self.work / "valid.jsonl", *options)

    def again(self, study: str) -> str:
        """Write the command that makes one study."""
        texts = (self.work / "test.jsonl", "--valid", self.work / "valid.jsonl")
        quick = ("--quick",) if self.quick else ()
        mixed = ("--memories", ",".join(self.labels), "--studies", study, "--out", f"{self.order.out}-{study}")
        return self.command("report", self.order.memory, *texts, *mixed, *quick)


def perplexity(log_p: Tensor | NDArray[Any]) -> float:
    """Turn (N,) log-probabilities into a perplexity; infinite where one of them is minus infinity."""
    values = np.asarray(log_p, dtype=np.float64)
    with np.errstate(over="ignore"):
        return float(np.exp(-values.mean()))


def _labels(store: Datastore, order: StudyTexts) -> list[str]:
    """Say what is mixed: all that there is, unless the caller chose."""
    if order.memories is not None:
        found = [spec.label for spec in parse_memories(order.memories)]
        if "knn" not in found:
            raise ParameterError(f"A report is about a store: let knn be among the memories, not only {found}.")
    else:
        found = ["knn", "cache", "ngram"]
        if (store.path / "output" / OUTPUT_FILE).is_file():  # a folder alone is what training left that was stopped
            found.append("output")
    if order.second_lm is not None and (label := f"decoder={order.second_lm}") not in found:
        found.append(label)
    return found


def _places(memory: Path, labels: Sequence[str]) -> list[Path]:
    """Say which folders are mixed in besides the store."""
    found = [Path(path) for label in labels if (path := label.partition("=")[2])]
    found = [memory / place if (memory / place).exists() else place for place in found]
    return [*found, memory / "output"] if "output" in labels else found


def _state(place: Path) -> list[Any]:
    """Tell what lies in a folder from what lay there before."""
    files = sorted(place.glob("*")) if place.is_dir() else [place]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return [str(place), [[name, state.st_size, state.st_mtime_ns] for name, state in states]]
