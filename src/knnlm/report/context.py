"""The inputs that studies share: the store, traces of both texts, and the settings chosen on the tuning text.

Everything is computed on first use, and traces are kept in OUT/work:

    work/
      texts-<key>/valid/trace, keys.npy     the trace of one pass over the text, and the key of each of its positions
      texts-<key>/test/trace, keys.npy
      valid.jsonl, test.jsonl               the texts, as `knnlm tune` and `knnlm eval` read them
      <study>.json                          a finished study
      writer.lock                           held while a report is being made
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.schema import DECODER_FOLDER
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError, ModelError, ParameterError
from knnlm.evaluation.sweep import Sweep
from knnlm.evaluation.trace import Trace, record
from knnlm.evaluation.tune import (
    FittedWeights,
    TraceTable,
    choose_settings,
    evaluate_table,
    fit_weights,
    sweep_all,
    tabulate,
    token_frequencies,
)
from knnlm.io import atomic_write, translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.lm.loading import choose_device
from knnlm.memories.knn import KnnMemory
from knnlm.memories.output import OUTPUT_FILE
from knnlm.memories.voting import VoteParams
from knnlm.mixture.em import fit_folds, folds_of, log_mixed, renormalise
from knnlm.mixture.gate import DEFAULT_CONFIG, FEWEST, fewer_folds
from knnlm.mixture.loader import is_decoder, open_reader
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.spec import MixtureOptions, parse_memories
from knnlm.mixture.weights import Buckets, FixedWeights
from knnlm.progress import Progress, silent
from knnlm.report.search import truncate_trace

FORMAT = 3  # of the files in OUT/work; files of another format are made again
MAX_K = 1024  # neighbours that are recorded for each position
_MAX_CHARACTERS_PER_TOKEN = 16  # on average: how much text is read where the number of tokens is limited


@dataclass(frozen=True)
class TextSplit:
    """The documents of the tuning text and of the held-out text."""

    valid: list[Document]
    test: list[Document]
    description: str  # of where the tuning text comes from
    whole: list[Document] = field(default_factory=list)  # before the split, where every document was split in two

    def key(self) -> str:
        """Return a hash of the texts and of their names, which the report shows."""
        contents = [
            [[document.id, document.source, _hash(document)] for document in half] for half in (self.valid, self.test)
        ]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def split_texts(documents: Iterable[Document], valid: Iterable[Document] | None, *, limit: int | None) -> TextSplit:
    """Return both texts as given, or the halves of the only one."""
    room = None if limit is None else limit * _MAX_CHARACTERS_PER_TOKEN
    if valid is not None:
        split = TextSplit(_take(valid, room), _take(documents, room), "the text given with --valid")
        if count_shared(split.valid, split.test) == len(split.test):
            raise CorpusError(
                "Every held-out document is also in --valid, so settings would be chosen on the text they are "
                "reported on. Give another --valid, or none: then the text is split in two."
            )
        return split
    whole = _take(documents, None if room is None else 2 * room)
    if len(set(map(_hash, whole))) == 1:
        which = "the only document" if len(whole) == 1 else "each document, because all are the same"
        first, second = (list(half) for half in zip(*map(_split_document, whole), strict=True))
        return TextSplit(first, second, f"the first half of {which}; the second is held out", whole)
    halves = _split_documents(whole)
    return TextSplit(*halves, "half of the documents, chosen by a hash of their text; the other half is held out")


def count_shared(valid: Iterable[Document], test: Iterable[Document]) -> int:
    """Return the number of held-out documents whose text is also in the tuning text."""
    hashes = set(map(_hash, valid))
    return sum(_hash(document) in hashes for document in test)


def _hash(document: Document) -> str:
    return hashlib.sha256(document.text.encode()).hexdigest()


def write_texts(folder: Path, name: str, documents: Iterable[Document]) -> Path:
    """Write documents as a file that `knnlm eval` and `knnlm tune` read."""
    file = folder / f"{name}.jsonl"
    lines = (
        json.dumps({"id": document.id, "source": document.source, "text": document.text}) for document in documents
    )
    with translate_os_errors(file):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _take(documents: Iterable[Document], room: int | None) -> list[Document]:
    """Read documents up to about so many characters; those without text are left out."""
    taken: list[Document] = []
    size = 0
    for document in documents:
        if document.text:
            taken.append(document)
            size += len(document.text)
        if room is not None and size >= room:
            break
    if not taken:
        raise CorpusError("There is no text to report on: every document is empty.")
    return taken


def _split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Assign documents, in the order of their hashes, to the smaller half; each half keeps the original order.

    Documents with the same text go to the same half.
    """
    by_hash: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        by_hash.setdefault(_hash(document), []).append(number)
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for _, numbers in sorted(by_hash.items()):
        half = 0 if sizes[0] <= sizes[1] else 1
        halves[half].extend(numbers)
        sizes[half] += sum(len(documents[number].text) for number in numbers)
    first, second = ([documents[number] for number in sorted(half)] for half in halves)
    return first, second


def _split_document(document: Document) -> tuple[Document, Document]:
    """Split a document at the whitespace nearest to its middle."""
    text, middle = document.text, len(document.text) // 2
    blanks = [place for place, char in enumerate(text) if char.isspace() and 0 < place < len(text) - 1]
    place = min(blanks, key=lambda place: abs(place - middle), default=middle)
    if not place:
        raise CorpusError("The text is too short to be split in two. Give --valid, or a longer text.")
    halves = (text[:place], text[place:])
    first, second = (replace(document, id=f"{document.id}#{number}", text=half) for number, half in enumerate(halves))
    return first, second


@dataclass(frozen=True)
class ReportOptions:
    """The inputs and options of a report."""

    store: Path
    out: Path
    texts: TextSplit
    memories: str | None = None
    second_lm: str | None = None
    limit: int | None = None
    quick: bool = False
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True)
class TracedText:
    """The trace of one text."""

    trace: Trace
    keys: NDArray[np.float32]  # (N, D) as the reader returned them
    documents: list[Document]  # those that were read

    def head(self, tokens: int) -> TracedText:
        """Return the first tokens, without memories; the last document may be truncated."""
        rows = min(tokens, len(self.trace))
        count = len(np.unique(self.trace.documents[:rows]))
        return TracedText(truncate_trace(self.trace, rows, count), self.keys[:rows], self.documents[:count])


class ReportContext:
    """The inputs of a study."""

    def __init__(self, options: ReportOptions, lm: CausalLM | None = None, *, progress: Progress = silent) -> None:
        self.options = options
        self.progress = progress
        self.store = Datastore.open(options.store)
        if self.store.has_pairs:
            raise ModelError(f"A report needs a decoder-only model, but {options.store} is a store of pairs.")
        self.labels = _memory_labels(self.store, options)
        self.device = str(lm.device) if lm is not None else str(choose_device(options.device))
        self.work = options.out / "work"
        self._lm = lm
        self._tables: dict[tuple[str, bool], TraceTable] = {}
        self._fits: dict[tuple[tuple[int, ...], str], FittedWeights] = {}

    @property
    def quick(self) -> bool:
        """Whether studies use small samples."""
        return self.options.quick

    @cached_property
    def key(self) -> str:
        """A hash of all inputs, by which cached results are recognised."""
        options, model = self.options, self.lm.model
        inputs = [FORMAT, self.store.fingerprint, options.texts.key(), self.labels, options.limit, MAX_K, options.model]
        inputs += [{**self.lm.identity, "name": None}, str(model.dtype), self.lm.device.type]
        # A model that was passed in has its own precision; otherwise the option decides.
        inputs += [] if self._lm is None else [options.dtype]
        inputs += [[row.spec, row.metric] for row in self.store.catalog.indexes()]
        inputs += [_folder_state(folder) for folder in _memory_folders(self.store.path, self.labels)]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]

    @cached_property
    def mixture(self) -> Mixture:
        """The model with every memory, without tuned settings."""
        options = self.options
        return Mixture.open(
            options.store,
            self.lm,
            memories=",".join(self.labels),
            use_tuned=False,
            options=MixtureOptions(model=options.model, device=options.device, dtype=options.dtype),
        )

    @cached_property
    def lm(self) -> CausalLM:
        """The language model."""
        if self._lm is not None:
            return self._lm
        options = self.options
        return open_reader(self.store, name=options.model, device=options.device, dtype=options.dtype)

    @cached_property
    def valid(self) -> TracedText:
        """The tuning text, on which settings are chosen."""
        return self._read("valid", self.options.texts.valid)

    @cached_property
    def test(self) -> TracedText:
        """The held-out text, on which results are reported."""
        return self._read("test", self.options.texts.test)

    def _read(self, name: str, documents: list[Document]) -> TracedText:
        """Trace a text, or load the trace of an earlier run."""
        folder = self.work / f"texts-{self.key}" / name
        trace, keys = folder / "trace", folder / "keys.npy"
        if not (trace.exists() and keys.exists()):
            shutil.rmtree(folder, ignore_errors=True)
            for other in set(self.work.glob("texts-*")) - {folder.parent}:
                shutil.rmtree(other, ignore_errors=True)
            with translate_os_errors(folder):
                folder.mkdir(parents=True)
            self._record(documents, trace, keys)
        recorded = Trace.open(trace)
        read = documents[: int(recorded.metadata["documents"])]
        write_texts(self.work, name, read)
        return TracedText(recorded, np.load(keys, mmap_mode="r"), read)

    def _record(self, documents: list[Document], trace: Path, keys: Path) -> None:
        mixture = self.mixture
        assert mixture.knn is not None
        source, width = mixture.knn.source, int(mixture.knn.store.model["width"])
        with atomic_write(keys) as partial, ArrayWriter(partial, np.float32, (width,)) as writer:

            def keep_keys(rows: NDArray[np.int64], batch: ReadBatch) -> None:
                writer.put(rows, batch.context.states[source].float().cpu().numpy())

            record(
                mixture,
                documents,
                trace,
                k=MAX_K,
                limit=self.options.limit,
                progress=self.progress,
                on_batch=keep_keys,
            )

    @cached_property
    def sweeps(self) -> list[Sweep | None]:
        """The sweep of k, τ and λ of each memory on the tuning text; None for memories without neighbours."""
        with self.progress("choosing settings", total=1, unit="steps") as advance:
            sweeps = sweep_all(self.valid.trace, device=self.device)
            advance(1)
        return sweeps

    @cached_property
    def knn(self) -> int:
        """The position of knn among the memories."""
        return self.labels.index("knn")

    @property
    def sweep(self) -> Sweep:
        """The sweep of k, τ and λ of the knn memory."""
        sweep = self.sweeps[self.knn]
        assert sweep is not None
        return sweep

    @property
    def chosen(self) -> tuple[VoteParams, float]:
        """k and τ of the knn memory and its λ, chosen on the tuning text."""
        k, knn_temperature, lmbda, _ = self.sweep.best
        return VoteParams(k, knn_temperature), lmbda

    @cached_property
    def frequencies(self) -> Tensor:
        """The (V,) counts of tokens in the store."""
        return token_frequencies(self.store)

    @cached_property
    def base(self) -> float:
        """The perplexity of the model alone on the held-out text."""
        return perplexity(self.test.trace.lm_log_probs)

    def knn_memory(self, index: Any) -> KnnMemory:
        """Return a knn memory that searches the store through another index."""
        setting, _ = self.chosen
        return KnnMemory(self.store, index, k=setting.k, knn_temperature=setting.knn_temperature)

    def store_log_probs(self, read: TracedText) -> tuple[Tensor, Tensor]:
        """Return the (N,) log-probabilities of a text by the model and by knn; NaN where knn abstains."""
        table = self.table(read, "fixed")
        return table.lm_log_probs.double(), table.memories[self.knn].log_probs[:, 0].double()

    def settings(self, kind: str) -> list[tuple[VoteParams, ...]]:
        """Return k and τ of each memory, chosen on the tuning text, for weights of one kind."""
        return choose_settings(self.valid.trace, self.sweeps, several=kind != "fixed")

    def table(self, read: TracedText, kind: str) -> TraceTable:
        """Return the log-probabilities of a text by each memory, at the settings for weights of one kind."""
        name = ("valid" if read is self.valid else "test", kind != "fixed")
        if name not in self._tables:
            self._tables[name] = tabulate(read.trace, self.settings(kind), device=self.device)
        return self._tables[name]

    def subtable(self, read: TracedText, memories: Sequence[int], kind: str) -> TraceTable:
        """Return the log-probabilities of a text by some of the memories."""
        return self.table(read, kind).select(*(read.trace.memories[number].label for number in memories))

    def fit(self, memories: tuple[int, ...], kind: str) -> FittedWeights:
        """Fit the weights of some memories on the tuning text, as `knnlm tune` does."""
        if (memories, kind) not in self._fits:
            first = self.sweeps[memories[0]]
            if kind == "fixed" and first is not None and len(memories) == 1:
                lmbda, best = first.best[2:]
                fitted = FittedWeights(FixedWeights((1 - lmbda, lmbda)), best)
            else:
                table = self.subtable(self.valid, memories, kind)
                fitted = fit_weights(
                    table, kind, frequencies=self.frequencies, device=self.device, progress=self.progress
                )
            self._fits[memories, kind] = fitted
        return self._fits[memories, kind]

    def out_of_fold(self, memories: tuple[int, ...], kind: str) -> float:
        """Return the cross-validated perplexity of the tuning text, by which weights are compared."""
        if kind == "gated":  # the perplexity of a gate is cross-validated already
            return self.fit(memories, kind).perplexity
        return out_of_fold(self.subtable(self.valid, memories, kind), kind)

    def measure(self, memories: tuple[int, ...], kind: str) -> tuple[float, float, float]:
        """Return the perplexities of both texts, and the mean weight of all memories on the held-out text."""
        fitted = self.fit(memories, kind)
        result = evaluate_table(self.subtable(self.test, memories, kind), fitted.weights)
        return fitted.perplexity, result.perplexity, result.lmbda

    def command(self, *words: object) -> str:
        """Return a knnlm command as it is typed in a shell."""
        model = () if self.options.model is None else ("--model", self.options.model)
        return shlex.join([str(word) for word in ("knnlm", *words, *model)])

    def eval_command(self, *options: object) -> str:
        """Return the command that evaluates the held-out text."""
        return self.command("eval", self.options.store, self.work / "test.jsonl", *options)

    def tune_command(self, *options: object) -> str:
        """Return the command that tunes on the tuning text; the weights of studies are without online weights."""
        return self.command("tune", self.options.store, self.work / "valid.jsonl", *options, "--no-online")

    def report_command(self, study: str) -> str:
        """Return the command that makes one study."""
        texts = (self.work / "test.jsonl", "--valid", self.work / "valid.jsonl")
        quick = ("--quick",) if self.quick else ()
        memories = ("--memories", ",".join(self.labels), "--studies", study, "--out", f"{self.options.out}-{study}")
        return self.command("report", self.options.store, *texts, *memories, *quick)


def perplexity(log_p: Tensor | NDArray[Any]) -> float:
    """Return the perplexity of (N,) log-probabilities; infinite where one of them is minus infinity."""
    values = np.asarray(log_p, dtype=np.float64)
    with np.errstate(over="ignore"):
        return float(np.exp(-values.mean()))


def _memory_labels(store: Datastore, options: ReportOptions) -> list[str]:
    """Return the labels of the memories: those of the options, or all that the store has."""
    if options.memories is not None:
        labels = [spec.label for spec in parse_memories(options.memories)]
        if "knn" not in labels:
            raise ParameterError(f"A report needs the memory knn, not only {', '.join(labels)}. Add knn to --memory.")
    else:
        labels = ["knn", "cache", "ngram"]
        if (store.path / "output" / OUTPUT_FILE).is_file():  # interrupted training leaves the folder without the file
            labels.append("output")
        if is_decoder(store.path / DECODER_FOLDER):
            labels.append(f"decoder={DECODER_FOLDER}")
    if options.second_lm is not None and (label := f"decoder={options.second_lm}") not in labels:
        labels.append(label)
    return labels


def _memory_folders(store: Path, labels: Sequence[str]) -> list[Path]:
    """Return the folders of memories besides knn."""
    folders = [Path(path) for label in labels if (path := label.partition("=")[2])]
    folders = [store / folder if (store / folder).exists() else folder for folder in folders]
    return [*folders, store / "output"] if "output" in labels else folders


def _folder_state(folder: Path) -> list[Any]:
    """Return names, sizes and times of the files in a folder, which change when it is trained again."""
    files = sorted(folder.glob("*")) if folder.is_dir() else [folder]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return [str(folder), [[name, state.st_size, state.st_mtime_ns] for name, state in states]]


def split_folds(groups: Tensor) -> Tensor:
    """Return the fold in which a gate holds each of N rows out, by the (N,) numbers of their documents."""
    config = fewer_folds(DEFAULT_CONFIG, groups)
    return folds_of(groups, config.folds, seed=config.seed, fewest=FEWEST)


def describe_folds(groups: Tensor) -> str:
    """Return a clause that names the text to which the cross-validated weights were fitted."""
    fold = split_folds(groups)
    if int(fold.max()) < 0:
        return f"by weights fitted to all of it, since it has fewer than {FEWEST} tokens"
    pairs = torch.stack([groups, fold.to(groups)], 1).unique(dim=0)
    if len(pairs) == len(groups.unique()):
        return "by weights fitted to other documents"
    return "by weights fitted to other spans of the text, of the same document where there is only one"


def out_of_fold(table: TraceTable, kind: str) -> float:
    """Return the perplexity of a text by weights (fixed, fitted or buckets) that were fitted to its other folds."""
    log_p = _by_buckets(table) if kind == "buckets" else _by_fit(table, kind)
    return float((-log_p.double().mean()).exp())


def _by_fit(table: TraceTable, kind: str) -> Tensor:
    """Return (N,) log-probabilities by constant weights."""
    # As in fitting, fixed weights use only the first component of each memory.
    used = (
        [0, *(span.start for span in table.component_slices)]
        if kind == "fixed"
        else list(range(len(table.component_names)))
    )
    logs = table.log_probs[:, used]
    config = fewer_folds(DEFAULT_CONFIG, table.documents)
    fold, _, weights = fit_folds(logs, table.documents, folds=config.folds, seed=config.seed, fewest=FEWEST)
    return log_mixed(logs, renormalise(weights[fold.clamp(min=0)], logs.isnan()))


def _by_buckets(table: TraceTable) -> Tensor:
    """Return (N,) log-probabilities by weights that depend on the distance of the nearest neighbour."""
    logs, near, fold = table.log_probs, table.memories[table.expensive[0]].nearest, split_folds(table.documents)
    assert near is not None
    log_probs = torch.zeros(len(logs), dtype=torch.float64)
    for number in fold.unique().tolist():
        held = fold == number
        kept = held if number < 0 else ~held  # with few rows none is held out
        weights = Buckets.fit(logs[kept], near[kept]).weights(near[held], logs[held].isnan())
        log_probs[held] = log_mixed(logs[held], weights).double()
    return log_probs
