"""Recorded output of the language model and of each memory for every token of a text.

With a trace, every sweep over k and τ and every fit of weights is arithmetic, without running a model.

    trace/
      trace.json           memories, text, number of tokens
      targets.npy          (N,) the token that follows each position
      documents.npy        (N,) row of the document's first token
      positions.npy        (N,) position in the document
      previous_tokens.npy  (N,) the token before the target
      lm_log_probs.npy     (N,) the language model's log-probability of the target
      lm_features.npy      (N, F) the language model's features for a gate
      lm_top.npy           (N,) the language model's most probable token
      candidates.npy       (N, C) tokens for the support of tokens, none chosen by the target; -1: none
      candidate_log_probs.npy (N, C) the language model's log-probability of them
      0/, 1/, …            one folder for each memory; of a memory that finds neighbours:
        distances.npy      (N, k) ascending; inf: none
        values.npy         (N, k) the tokens they vote for; -1: none
        counts.npy         (N, k) how many contexts each stands for, where that is not one
        lm_log_probs.npy   (N, 64) the language model's log-probability of the nearest neighbours' tokens
                           and of any other memory:
        log_probs.npy      (N, P) log-probability of the target by each of its components; NaN: it abstains
        features.npy       (N, F) its features for a gate
        top.npy            (N,) its most probable token; -1: none
        log_prob_of_lm_top.npy, lm_log_prob_of_top.npy: (N,), see `MemoryFeatures`
        candidate_log_probs.npy (N, C, P) log-probability of the candidates by each of its components
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.segments import ArrayWriter, open_array
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError
from knnlm.evaluation.evaluate import Evaluation, Totals, read_batches
from knnlm.io import atomic_folder, translate_os_errors
from knnlm.memories.base import ROWS, MemoryOutput, Positions
from knnlm.memories.decoder import LM_FEATURES, LMOutput
from knnlm.memories.voting import NEAR, NeighbourMemory, RetrievedNeighbours, VoteOutput, VoteParams
from knnlm.mixture.gate import MemoryFeatures, memory_features, place
from knnlm.mixture.loader import identity_of
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.progress import Progress, silent

if TYPE_CHECKING:
    from knnlm.evaluation.sweep import Sweep
    from knnlm.evaluation.tune import Tuning

_METADATA_FILE = "trace.json"
_METADATA_KEYS = {
    "bytes",
    "characters",
    "documents",
    "fingerprint",
    "leaked_documents",
    "memories",
    "sources",
    "vocab_size",
    "words",
}


@dataclass(frozen=True)
class MemoryTrace:
    """Recorded output of one memory; the arrays are memory-mapped."""

    metadata: dict[str, Any]  # label, kind, k, metric, component names, feature names
    arrays: dict[str, NDArray[Any]]
    vocab_size: int

    @property
    def label(self) -> str:
        """The memory's label in its mixture."""
        return str(self.metadata["label"])

    @property
    def has_neighbours(self) -> bool:
        """Whether the memory finds neighbours, so that k and τ can be chosen."""
        return "distances" in self.arrays

    @property
    def distances(self) -> NDArray[np.float32]:
        """Distances of the (N, k) neighbours."""
        return self.arrays["distances"]

    def neighbours(self, rows: slice, *, device: str = "cpu") -> RetrievedNeighbours:
        """Return the neighbours of some rows."""
        values = to_tensor(self.arrays["values"][rows]).to(device).long()
        counts = to_tensor(self.arrays["counts"][rows]).to(device) if "counts" in self.arrays else None
        # Votes only need to know which ids are below 0, so the values stand in for them.
        return RetrievedNeighbours(values, to_tensor(self.distances[rows]).to(device), values, counts)

    def vote(self, rows: slice, settings: Sequence[VoteParams], *, device: str = "cpu") -> VoteOutput:
        """Return the votes of the neighbours of some rows."""
        return VoteOutput(self.neighbours(rows, device=device), settings, self.vocab_size)

    def component_log_probs(
        self, rows: slice, targets: Tensor, settings: Sequence[VoteParams], *, device: str = "cpu"
    ) -> Tensor:
        """Return (n, P) log-probabilities of the targets by each component; NaN where it abstains."""
        if not self.has_neighbours:
            return to_tensor(self.arrays["log_probs"][rows])
        return _target_log_probs(self.vote(rows, settings, device=device), targets)

    def features(
        self, rows: slice, lm_top: Tensor, settings: Sequence[VoteParams], *, device: str = "cpu"
    ) -> MemoryFeatures:
        """Return the memory's features for a gate; `lm_top` is the language model's most probable token, (n,)."""
        if not self.has_neighbours:
            names = ("features", "log_prob_of_lm_top", "top", "lm_log_prob_of_top")
            return MemoryFeatures(*(to_tensor(self.arrays[name][rows]) for name in names))
        votes = self.vote(rows, settings[:1], device=device)
        top = votes.top()
        near = votes.neighbours.values[:, :NEAR]
        known = to_tensor(self.arrays["lm_log_probs"][rows]).to(device)
        same = (near == top[:, None]) & (top >= 0)[:, None]
        impossible = known.new_full((len(top), 1), -torch.inf)
        of_top = torch.cat([impossible, known.masked_fill(~same, -torch.inf)], 1).amax(1)
        return MemoryFeatures(votes.features(), votes.components[0].log_prob(lm_top), top, of_top)


@dataclass(frozen=True)
class Trace:
    """An opened trace; the arrays are memory-mapped."""

    targets: NDArray[np.int32]  # (N,)
    lm_log_probs: NDArray[np.float32]  # (N,)
    lm_features: NDArray[np.float32]  # (N, F)
    lm_top: NDArray[np.int32]  # (N,)
    documents: NDArray[np.int32]  # (N,)
    positions: NDArray[np.int32]  # (N,)
    previous_tokens: NDArray[np.int32]  # (N,)
    memories: list[MemoryTrace]
    metadata: dict[str, Any]
    candidates: NDArray[np.int32] | None = None  # (N, C); None: recorded without them
    candidate_log_probs: NDArray[np.float32] | None = None  # (N, C)

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Open a trace that `Mixture.record` has written."""
        folder = Path(path)
        try:
            metadata = json.loads((folder / _METADATA_FILE).read_text())
            rows, vocab_size = int(metadata["tokens"]), int(metadata["vocab_size"])
            if missing := _METADATA_KEYS - metadata.keys():
                raise KeyError(min(missing))
            count = int(metadata.get("candidates", 0))
            memories = [
                _open_memory(folder / str(number), own, (rows, count), vocab_size)
                for number, own in enumerate(metadata["memories"])
            ]
            width = len(metadata["lm_feature_names"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatastoreError(f"{folder}: not a trace ({error}). Make one with knnlm eval --save-trace.") from None
        integers = {
            name: open_array(folder / f"{name}.npy", np.int32, (rows,))
            for name in ("targets", "lm_top", "documents", "positions", "previous_tokens")
        }
        candidates = {}
        if count:
            for name, kind in (("candidates", np.int32), ("candidate_log_probs", np.float32)):
                candidates[name] = open_array(folder / f"{name}.npy", kind, (rows, count))
        return cls(
            lm_log_probs=open_array(folder / "lm_log_probs.npy", np.float32, (rows,)),
            lm_features=open_array(folder / "lm_features.npy", np.float32, (rows, width)),
            memories=memories,
            metadata=metadata,
            **integers,
            **candidates,
        )

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, *labels: str) -> Trace:
        """Return the trace of some of the memories, in this order."""
        by_label = {
            memory.label: (memory, own) for memory, own in zip(self.memories, self.metadata["memories"], strict=True)
        }
        if missing := next((label for label in labels if label not in by_label), None):
            raise DatastoreError(f"The trace has {', '.join(by_label)}, but not {missing}.")
        metadata = self.metadata | {"memories": [by_label[label][1] for label in labels]}
        return replace(self, memories=[by_label[label][0] for label in labels], metadata=metadata)

    def sweep(
        self,
        *,
        memory: int = 0,
        ks: Sequence[int] | None = None,
        knn_temperatures: Sequence[float] | None = None,
        lambdas: Sequence[float] | None = None,
        device: str = "cpu",
    ) -> Sweep:
        """Mix one memory with the language model by every combination of settings; k is at most that of the trace."""
        from knnlm.evaluation.sweep import sweep

        return sweep(self, memory=memory, ks=ks, knn_temperatures=knn_temperatures, lambdas=lambdas, device=device)

    def replay(self, *, k: int, knn_temperature: float, lmbda: float, memory: int = 0) -> Evaluation:
        """Return what `Mixture.evaluate` returns for one memory with one setting, computed from the trace."""
        from knnlm.evaluation.sweep import replay

        return replay(self, k=k, knn_temperature=knn_temperature, lmbda=lmbda, memory=memory)

    def tune(
        self, store: Datastore, *, weights: str = "gated", online: bool = True, progress: Progress = silent
    ) -> Tuning:
        """Choose settings and weights on the trace, and save them in the store that it was recorded with."""
        from knnlm.evaluation.tune import save_trace_tuning, tune_trace

        result = tune_trace(self, store, weights=weights, online=online, progress=progress)
        save_trace_tuning(store.path, result, self)
        return result

    def blocks(self, device: str = "cpu") -> Iterator[slice]:
        """Iterate over the rows in blocks, larger ones on a GPU."""
        size = 1024 if device == "cpu" else 16_384
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def positions_of(self, rows: slice) -> Positions:
        """Return the positions of some rows and the tokens before them."""
        return Positions(to_tensor(self.positions[rows]).long(), to_tensor(self.previous_tokens[rows]).long())


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Copy a memory-mapped array into a tensor."""
    return torch.from_numpy(np.array(array))


def _open_memory(folder: Path, metadata: dict[str, Any], size: tuple[int, int], vocab_size: int) -> MemoryTrace:
    (rows, candidates), k = size, int(metadata["k"])
    components, features = len(metadata["component_names"]), len(metadata["feature_names"])
    shapes: dict[str, tuple[type, tuple[int, ...]]]
    if k >= 0:
        shapes = {
            "distances": (np.float32, (rows, k)),
            "values": (np.int32, (rows, k)),
            "lm_log_probs": (np.float32, (rows, min(k, NEAR))),
        }
        if metadata["counted"]:
            shapes["counts"] = (np.float32, (rows, k))
    else:
        shapes = {
            "log_probs": (np.float32, (rows, components)),
            "features": (np.float32, (rows, features)),
            "top": (np.int32, (rows,)),
            "log_prob_of_lm_top": (np.float32, (rows,)),
            "lm_log_prob_of_top": (np.float32, (rows,)),
        }
        if candidates:
            shapes["candidate_log_probs"] = (np.float32, (rows, candidates, components))
    arrays = {name: open_array(folder / f"{name}.npy", dtype, shape) for name, (dtype, shape) in shapes.items()}
    return MemoryTrace(metadata, arrays, vocab_size)


def _target_log_probs(output: MemoryOutput, targets: Tensor) -> Tensor:
    """Return (n, P) log-probabilities of the targets by each component; NaN where it abstains."""
    by_component = [each.log_prob(targets).masked_fill(each.abstains(), torch.nan) for each in output.components]
    return torch.stack(by_component, 1)


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
    """Read a text once and write the output of every memory; the folder appears complete or not at all.

    `on_batch` is called with each batch and the rows that its positions have in the trace.
    """
    folder = Path(path)
    if folder.exists():
        raise DatastoreError(f"{folder}: already exists. Choose another folder for the trace, or remove it.")
    totals = Totals()
    reading: dict[str, Any] = {"limit": limit, "batch_tokens": batch_tokens, "progress": progress}
    with atomic_folder(folder) as partial:
        with ExitStack() as stack:
            writer = _TraceWriter(mixture, partial, stack, k)
            for first, batch in read_batches(mixture, documents, totals=totals, what="tracing", **reading):
                rows = (batch.rows + first).numpy()
                writer.write(rows, batch)
                if on_batch is not None:
                    on_batch(rows, batch)
        metadata = {**asdict(totals), **writer.metadata(), "sources": list(sources) or totals.sources}
        with translate_os_errors(partial):
            (partial / _METADATA_FILE).write_text(json.dumps(metadata, indent=2))
    return Trace.open(folder)


def candidate_tokens(lm: LMOutput, outputs: Sequence[MemoryOutput], generator: torch.Generator) -> Tensor:
    """Return (n, C) tokens: the model's top and a sample of it, each memory's top, and the nearest neighbours' tokens.

    None of them depends on the target, so that the share of them which is right can be learned. -1: none.
    """
    columns = [lm.top(), _sample(lm.logits, generator)]
    for output in outputs:
        columns.append(output.top().to(columns[0]))
        if isinstance(output, VoteOutput):
            values = output.neighbours.values
            nearest = values[:, 0] if values.shape[1] else values.new_full((len(values),), -1)
            columns.append(nearest.to(columns[0]))
    return torch.stack(columns, 1)


def _sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return (n,) tokens that are sampled from a language model, the same on every device."""
    uniform = torch.rand(len(logits), generator=generator, dtype=torch.float64).to(logits.device).float()
    tokens = []
    for rows, own in zip(logits.split(ROWS), uniform.split(ROWS), strict=True):
        below = rows.float().softmax(1).cumsum(1)
        tokens.append(torch.searchsorted(below, (own * below[:, -1])[:, None])[:, 0].clamp(max=rows.shape[1] - 1))
    return torch.cat(tokens) if tokens else logits.new_zeros(0, dtype=torch.long)


class _TraceWriter:
    """Writes a trace batch by batch."""

    def __init__(self, mixture: Mixture, folder: Path, stack: ExitStack, k: int | None) -> None:
        self.mixture = mixture
        self.folder = folder
        self.stack = stack
        self.k = k
        self.arrays: dict[str, ArrayWriter] = {}
        self.ks = [k if memory.expensive else None for memory in mixture.memories]  # neighbours to search for
        self.widths = [-1] * len(mixture.memories)  # neighbours that are written; -1: the memory has none
        self.counted = [False] * len(mixture.memories)
        self.candidates = 0  # tokens at each position
        self.generator = torch.Generator().manual_seed(0)

    def write(self, rows: NDArray[np.int64], batch: ReadBatch) -> None:
        """Write one batch into these rows of the trace."""
        lm = LMOutput(batch.logits)
        where = place(batch.context)
        self._write("targets", rows, batch.targets, np.int32)
        self._write("documents", rows, torch.from_numpy(rows) - where.positions, np.int32)
        self._write("positions", rows, where.positions, np.int32)
        self._write("previous_tokens", rows, where.tokens, np.int32)
        self._write("lm_log_probs", rows, lm.components[0].log_prob(batch.targets), np.float32)
        self._write("lm_features", rows, lm.features(), np.float32)
        self._write("lm_top", rows, lm.top(), np.int32)
        retrieved = self.mixture.retrieve(batch.context, self.ks)
        outputs: list[MemoryOutput] = []
        for number, memory in enumerate(self.mixture.memories):
            neighbours = retrieved.neighbours[number]
            if neighbours is None and isinstance(memory, NeighbourMemory):
                # At least k, also where the memory was tuned to fewer neighbours.
                neighbours = memory.retrieve(batch.context, max(self.k or 0, memory.max_k))
            if neighbours is not None:
                self._write_neighbours(number, rows, lm, neighbours)
                assert isinstance(memory, NeighbourMemory)
                outputs.append(memory.output(neighbours))
            else:
                outputs.append(memory.predict(batch.context))
                self._write_output(number, rows, lm, outputs[-1], batch.targets)
        self._write_candidates(rows, lm, outputs)

    def _write_candidates(self, rows: NDArray[np.int64], lm: LMOutput, outputs: Sequence[MemoryOutput]) -> None:
        """Write tokens whose support can be learned, with their log-probabilities by all but memories of neighbours."""
        tokens = candidate_tokens(lm, outputs, self.generator)  # (n, C)
        self.candidates = tokens.shape[1]
        known = tokens.clamp(min=0)  # entries of missing tokens are never read
        self._write("candidates", rows, tokens, np.int32)
        self._write("candidate_log_probs", rows, lm.components[0].log_prob_each(known), np.float32)
        for number, output in enumerate(outputs):
            if not isinstance(output, VoteOutput):
                each = [_target_log_probs(output, column) for column in known.T.contiguous()]
                self._write(f"{number}/candidate_log_probs", rows, torch.stack(each, 1), np.float32)

    def _write_neighbours(
        self, number: int, rows: NDArray[np.int64], lm: LMOutput, neighbours: RetrievedNeighbours
    ) -> None:
        self.widths[number] = neighbours.distances.shape[1]
        self._write(f"{number}/distances", rows, neighbours.distances, np.float32)
        self._write(f"{number}/values", rows, neighbours.values, np.int32)
        near = neighbours.values[:, :NEAR].clamp(min=0)  # entries of missing neighbours are never read
        self._write(f"{number}/lm_log_probs", rows, lm.components[0].log_prob_each(near), np.float32)
        if neighbours.counts is not None:
            self.counted[number] = True
            self._write(f"{number}/counts", rows, neighbours.counts, np.float32)

    def _write_output(
        self, number: int, rows: NDArray[np.int64], lm: LMOutput, output: MemoryOutput, targets: Tensor
    ) -> None:
        features = memory_features(output, lm)
        self._write(f"{number}/log_probs", rows, _target_log_probs(output, targets), np.float32)
        self._write(f"{number}/features", rows, features.features, np.float32)
        self._write(f"{number}/top", rows, features.top, np.int32)
        self._write(f"{number}/log_prob_of_lm_top", rows, features.log_prob_of_lm_top, np.float32)
        self._write(f"{number}/lm_log_prob_of_top", rows, features.lm_log_prob_of_top, np.float32)

    def _write(self, name: str, rows: NDArray[np.int64], values: Tensor, dtype: type) -> None:
        if name not in self.arrays:
            file = self.folder / f"{name}.npy"
            file.parent.mkdir(exist_ok=True)
            self.arrays[name] = self.stack.enter_context(ArrayWriter(file, dtype, tuple(values.shape[1:])))
        self.arrays[name].put(rows, values.cpu().numpy())

    def metadata(self) -> dict[str, Any]:
        """Return the description of the mixture."""
        mixture = self.mixture
        memories = [
            {
                "label": label,
                "kind": memory.name,
                "expensive": memory.expensive,
                "k": k,
                "metric": memory.metric if isinstance(memory, NeighbourMemory) else None,
                "counted": counted,
                "identity": identity_of(memory),
                "component_names": list(memory.component_names),
                "feature_names": list(memory.feature_names),
            }
            for label, memory, k, counted in zip(
                mixture.labels, mixture.memories, self.widths, self.counted, strict=True
            )
        ]
        store = mixture.store
        return {
            "store": str(store.path) if store else None,
            "fingerprint": store.fingerprint if store else None,
            "vocab_size": mixture.lm.vocab_size,
            "lm_feature_names": list(LM_FEATURES),
            "candidates": self.candidates,
            "memories": memories,
        }
