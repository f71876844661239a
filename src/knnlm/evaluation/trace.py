"""What one pass over a text saw: what the model and each memory said of every target. Knows nothing about settings.

With a trace, every sweep over k and τ and every fit of weights is arithmetic, and the model never runs again.

    trace/
      trace.json         the memories, the text, how much was read
      targets.npy        (N,) the token that came
      documents.npy      (N,) which document it is in, and positions.npy, where in it; tokens.npy, the token before it
      log_p.npy          (N,) the model's log-probability of the target
      signals.npy        (N, F) how sure the model seemed, and choice.npy, (N,) the token it found most probable
      0/, 1/, …          one folder for each memory; of one that finds neighbours:
        distances.npy    (N, k) ascending; inf = none
        values.npy       (N, k) the tokens they vote for; -1 = none; equal to the target = a hit
        counts.npy       (N, k) how many contexts each stands for, where that is not one
        model.npy        (N, 64) the model's log-probability of the nearest ones' tokens
                         and of any other:
        log_p.npy        (N, P) log-probability of the target by each of its parts; NaN = it abstains
        signals.npy      (N, F), choice.npy (N,), of_choice.npy (N,), model_of_choice.npy (N,): see `Evidence`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.segments import ArrayWriter, open_array
from knnlm.errors import DatastoreError
from knnlm.evaluation.evaluate import Totals, read_all
from knnlm.io import translate_os_errors
from knnlm.memories.base import MemoryOutput
from knnlm.memories.decoder import LM_FEATURES, LMOutput
from knnlm.memories.voting import NEAR, NeighbourMemory, RetrievedNeighbours, VoteOutput, VoteParams
from knnlm.mixture.gate import MemoryFeatures, Positions, memory_features, place
from knnlm.mixture.loader import identity_of
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.progress import Progress, silent

_FILE = "trace.json"

_FACTS = {"text", "fingerprint", "documents", "words", "characters", "bytes", "remembered", "memories", "vocab_size"}


@dataclass(frozen=True)
class MemoryTrace:
    """What one memory said; its arrays are mapped, not read."""

    facts: dict[str, Any]  # label, kind, k, metric, parts, signals
    arrays: dict[str, NDArray[Any]]
    vocab_size: int

    @property
    def label(self) -> str:
        """What the memory is called."""
        return str(self.facts["label"])

    @property
    def polls(self) -> bool:
        """Whether it finds neighbours, so that k and τ can be chosen."""
        return "distances" in self.arrays

    @property
    def distances(self) -> NDArray[np.float32]:
        """Distances of the (N, k) neighbours."""
        return self.arrays["distances"]

    def found(self, rows: slice, *, device: str = "cpu") -> RetrievedNeighbours:
        """Give the neighbours of some rows."""
        values = tensor_of(self.arrays["values"][rows]).to(device).long()
        counts = tensor_of(self.arrays["counts"][rows]).to(device) if "counts" in self.arrays else None
        # An id below 0 is all that votes need.
        return RetrievedNeighbours(values, tensor_of(self.distances[rows]).to(device), values, counts)

    def poll(self, rows: slice, settings: Sequence[VoteParams], *, device: str = "cpu") -> VoteOutput:
        """Let the neighbours of some rows vote."""
        return VoteOutput(self.found(rows, device=device), settings, self.vocab_size)

    def log_p(self, rows: slice, targets: Tensor, settings: Sequence[VoteParams], *, device: str = "cpu") -> Tensor:
        """Give (n, P) log-probabilities of targets by each part; NaN where it abstains."""
        if not self.polls:
            return tensor_of(self.arrays["log_p"][rows])
        parts = self.poll(rows, settings, device=device).components
        return torch.stack([part.log_prob(targets).masked_fill(part.abstains(), torch.nan) for part in parts], 1)

    def features(
        self, rows: slice, choice: Tensor, settings: Sequence[VoteParams], *, device: str = "cpu"
    ) -> MemoryFeatures:
        """Give what a gate looks at; `choice` is the model's."""
        if not self.polls:
            names = ("signals", "of_choice", "choice", "model_of_choice")
            return MemoryFeatures(*(tensor_of(self.arrays[name][rows]) for name in names))
        poll = self.poll(rows, settings[:1], device=device)
        top = poll.top()
        near = poll.neighbours.values[:, :NEAR]
        model = tensor_of(self.arrays["model"][rows]).to(device)
        same = (near == top[:, None]) & (top >= 0)[:, None]
        of_top = torch.cat([model.new_full((len(top), 1), -torch.inf), model.masked_fill(~same, -torch.inf)], 1).amax(1)
        return MemoryFeatures(poll.features(), poll.components[0].log_prob(choice), top, of_top)


@dataclass(frozen=True)
class Trace:
    """An opened trace; its arrays are mapped, not read."""

    targets: NDArray[np.int32]  # (N,)
    log_p: NDArray[np.float32]  # (N,)
    signals: NDArray[np.float32]  # (N, F)
    choice: NDArray[np.int32]  # (N,)
    documents: NDArray[np.int32]  # (N,)
    positions: NDArray[np.int32]  # (N,)
    tokens: NDArray[np.int32]  # (N,)
    memories: list[MemoryTrace]
    facts: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Open a trace that `record` has written."""
        folder = Path(path)
        try:
            facts = json.loads((folder / _FILE).read_text())
            rows, vocab_size = int(facts["tokens"]), int(facts["vocab_size"])
            if missing := _FACTS - facts.keys():
                raise KeyError(min(missing))
            memories = [
                _open_memory(folder / str(number), one, rows, vocab_size)
                for number, one in enumerate(facts["memories"])
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatastoreError(f"{folder} is not a trace ({error}). Make one with: knnlm eval --save-trace") from None
        whole = {
            name: open_array(folder / f"{name}.npy", np.int32, (rows,))
            for name in ("targets", "choice", "documents", "positions", "tokens")
        }
        return cls(
            log_p=open_array(folder / "log_p.npy", np.float32, (rows,)),
            signals=open_array(folder / "signals.npy", np.float32, (rows, len(facts["signals"]))),
            memories=memories,
            facts=facts,
            **whole,
        )

    def __len__(self) -> int:
        return len(self.targets)

    def only(self, *labels: str) -> Trace:
        """Keep some of the memories, in this order."""
        own = {
            memory.label: (memory, facts) for memory, facts in zip(self.memories, self.facts["memories"], strict=True)
        }
        if missing := next((label for label in labels if label not in own), None):
            raise DatastoreError(f"The trace has {', '.join(own)}, but not {missing}.")
        facts = self.facts | {"memories": [own[label][1] for label in labels]}
        return replace(self, memories=[own[label][0] for label in labels], facts=facts)

    def blocks(self, device: str = "cpu") -> Iterator[slice]:
        """Give some rows at a time, more where there is more room."""
        size = 1024 if device == "cpu" else 16_384
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def place(self, rows: slice) -> Positions:
        """Say where some rows are."""
        return Positions(tensor_of(self.positions[rows]).long(), tensor_of(self.tokens[rows]).long())


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Copy what is mapped into a tensor."""
    return torch.from_numpy(np.array(array))


def _open_memory(folder: Path, facts: dict[str, Any], rows: int, vocab_size: int) -> MemoryTrace:
    k, parts, signals = int(facts["k"]), len(facts["parts"]), len(facts["signals"])
    shapes: dict[str, tuple[type, tuple[int, ...]]]
    if k >= 0:
        shapes = {
            "distances": (np.float32, (rows, k)),
            "values": (np.int32, (rows, k)),
            "model": (np.float32, (rows, min(k, NEAR))),
        }
        if facts["counted"]:
            shapes["counts"] = (np.float32, (rows, k))
    else:
        shapes = {
            "log_p": (np.float32, (rows, parts)),
            "signals": (np.float32, (rows, signals)),
            "choice": (np.int32, (rows,)),
            "of_choice": (np.float32, (rows,)),
            "model_of_choice": (np.float32, (rows,)),
        }
    arrays = {name: open_array(folder / f"{name}.npy", dtype, shape) for name, (dtype, shape) in shapes.items()}
    return MemoryTrace(facts, arrays, vocab_size)


def record(
    mixture: Mixture,
    documents: Iterable[Document],
    path: str | Path,
    *,
    k: int | None = None,
    sources: Sequence[str] = (),
    limit: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress = silent,
    on_batch: Callable[[NDArray[np.int64], ReadBatch], None] | None = None,
) -> Trace:
    """Read a text once and write what was seen; the folder appears complete or not at all.

    `on_batch` is called with each batch and the rows that its positions have in the trace.
    """
    folder = Path(path)
    if folder.exists():
        raise DatastoreError(f"{folder} exists already. Choose another folder for the trace, or remove it.")
    partial = folder.with_name(folder.name + ".partial")
    tally = Totals()
    with translate_os_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            writer = _Writer(mixture, partial, stack, k)
            for first, batch in read_all(
                mixture,
                documents,
                tally=tally,
                limit=limit,
                batch_tokens=batch_tokens,
                progress=progress,
                what="tracing",
            ):
                writer.put(first, batch)
                if on_batch is not None:
                    on_batch((batch.rows + first).numpy(), batch)
        facts = writer.facts() | {"text": list(sources) or tally.sources}
        with translate_os_errors(partial):
            (partial / _FILE).write_text(json.dumps({**facts, **asdict(tally)}, indent=2))
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Trace.open(folder)


class _Writer:
    """Writes what was seen, batch by batch."""

    def __init__(self, mixture: Mixture, folder: Path, stack: ExitStack, k: int | None) -> None:
        self.mixture = mixture
        self.folder = folder
        self.stack = stack
        self.arrays: dict[str, ArrayWriter] = {}
        self.ks = [k if memory.expensive else None for memory in mixture.memories]  # neighbours to search for
        self.widths = [-1] * len(mixture.memories)  # neighbours that are written; -1: the memory has none
        self.counted = [False] * len(mixture.memories)

    def put(self, first: int, batch: ReadBatch) -> None:
        """Write one batch; `first` is the row of its group's first token."""
        rows = (batch.rows + first).numpy()
        lm = LMOutput(batch.logits)
        where = place(batch.context)
        begins = batch.rows + first - where.positions  # the row of the document's first token
        self._write("targets", rows, batch.targets, np.int32)
        self._write("documents", rows, begins, np.int32)
        self._write("positions", rows, where.positions, np.int32)
        self._write("tokens", rows, where.tokens, np.int32)
        self._write("log_p", rows, lm.components[0].log_prob(batch.targets), np.float32)
        self._write("signals", rows, lm.features(), np.float32)
        self._write("choice", rows, lm.top(), np.int32)
        retrieved = self.mixture.retrieve(batch.context, self.ks)
        for number, memory in enumerate(self.mixture.memories):
            if (neighbours := retrieved.neighbours[number]) is not None:
                self._put_neighbours(number, rows, lm, neighbours)
            elif isinstance(memory, NeighbourMemory):
                self._put_neighbours(number, rows, lm, memory.retrieve(batch.context))
            else:
                self._put_answer(number, rows, lm, memory.predict(batch.context), batch.targets)

    def _put_neighbours(self, number: int, rows: NDArray[np.int64], lm: LMOutput, found: RetrievedNeighbours) -> None:
        self.widths[number] = found.distances.shape[1]
        self._write(f"{number}/distances", rows, found.distances, np.float32)
        self._write(f"{number}/values", rows, found.values, np.int32)
        near = found.values[:, :NEAR].clamp(min=0)  # what is written of those below 0 is never read
        self._write(f"{number}/model", rows, lm.components[0].log_prob_each(near), np.float32)
        if found.counts is not None:
            self.counted[number] = True
            self._write(f"{number}/counts", rows, found.counts, np.float32)

    def _put_answer(
        self, number: int, rows: NDArray[np.int64], lm: LMOutput, answer: MemoryOutput, targets: Tensor
    ) -> None:
        logs = [part.log_prob(targets).masked_fill(part.abstains(), torch.nan) for part in answer.components]
        seen = memory_features(answer, lm)
        self._write(f"{number}/log_p", rows, torch.stack(logs, 1), np.float32)
        self._write(f"{number}/signals", rows, seen.signals, np.float32)
        self._write(f"{number}/choice", rows, seen.choice, np.int32)
        self._write(f"{number}/of_choice", rows, seen.of_choice, np.float32)
        self._write(f"{number}/model_of_choice", rows, seen.model_of_choice, np.float32)

    def _write(self, name: str, rows: NDArray[np.int64], values: Tensor, dtype: type) -> None:
        if name not in self.arrays:
            file = self.folder / f"{name}.npy"
            file.parent.mkdir(exist_ok=True)
            self.arrays[name] = self.stack.enter_context(ArrayWriter(file, dtype, tuple(values.shape[1:])))
        self.arrays[name].put(rows, values.cpu().numpy())

    def facts(self) -> dict[str, Any]:
        """Say what was mixed."""
        mixture = self.mixture
        memories = [
            {
                "label": label,
                "kind": memory.name,
                "k": k,
                "metric": memory.metric if isinstance(memory, NeighbourMemory) else None,
                "counted": counted,
                "identity": identity_of(memory),
                "parts": list(memory.component_names),
                "signals": list(memory.feature_names),
            }
            for label, memory, k, counted in zip(
                mixture.labels, mixture.memories, self.widths, self.counted, strict=True
            )
        ]
        home = mixture.store
        return {
            "memory": str(home.path) if home else None,
            "fingerprint": home.fingerprint if home else None,
            "vocab_size": mixture.lm.vocab_size,
            "signals": list(LM_FEATURES),
            "memories": memories,
        }
