"""What one pass over a text saw: p_LM of each target and its neighbours. Knows nothing about settings.

With a trace, every sweep over k, τ and λ is arithmetic, and the model never runs again.

    trace/
      trace.json       the memory, the text, the metric, how much was read
      targets.npy      (N,) the token that came
      log_p.npy        (N,) the model's log-probability of it
      distances.npy    (N, k) of the neighbours, ascending; inf = none
      values.npy       (N, k) the tokens the neighbours vote for; -1 = none; equal to the target = a hit
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.corpus import Document
from knnlm.datastore.segment import ArrayWriter, open_array, writing
from knnlm.errors import DatastoreError
from knnlm.evaluation import Tally, read_all
from knnlm.memory import Logits
from knnlm.mixture import Mixture
from knnlm.progress import Progress, silent

_FILE = "trace.json"


@dataclass(frozen=True)
class Trace:
    """An opened trace; its arrays are mapped, not read."""

    targets: NDArray[np.int32]  # (N,)
    log_p: NDArray[np.float32]  # (N,)
    distances: NDArray[np.float32]  # (N, k)
    values: NDArray[np.int32]  # (N, k)
    facts: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Open a trace that `record` has written."""
        folder = Path(path)
        try:
            facts = json.loads((folder / _FILE).read_text())
            rows, k = int(facts["tokens"]), int(facts["k"])
            if (
                missing := {"metric", "text", "fingerprint", "documents", "words", "characters", "bytes", "remembered"}
                - facts.keys()
            ):
                raise KeyError(min(missing))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatastoreError(f"{folder} is not a trace ({error}). Make one with: knnlm eval --save-trace") from None
        return cls(
            targets=open_array(folder / "targets.npy", np.int32, (rows,)),
            log_p=open_array(folder / "log_p.npy", np.float32, (rows,)),
            distances=open_array(folder / "distances.npy", np.float32, (rows, k)),
            values=open_array(folder / "values.npy", np.int32, (rows, k)),
            facts=facts,
        )

    def __len__(self) -> int:
        return len(self.targets)


def record(
    mixture: Mixture,
    documents: Iterable[Document],
    path: str | Path,
    *,
    k: int | None = None,
    sources: Sequence[str] = (),
    limit: int | None = None,
    batch_tokens: int = 1024,
    total: int | None = None,
    progress: Progress = silent,
) -> Trace:
    """Read a text once and write what was seen; the folder appears complete or not at all."""
    folder = Path(path)
    if folder.exists():
        raise DatastoreError(f"{folder} exists already. Choose another folder for the trace, or remove it.")
    partial = folder.with_name(folder.name + ".partial")
    memory = mixture.memory
    k = max(1, min(k or memory.k, memory.store.rows))
    tally = Tally()
    with writing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            targets = stack.enter_context(ArrayWriter(partial / "targets.npy", np.int32))
            log_p = stack.enter_context(ArrayWriter(partial / "log_p.npy", np.float32))
            distances = stack.enter_context(ArrayWriter(partial / "distances.npy", np.float32, (k,)))
            values = stack.enter_context(ArrayWriter(partial / "values.npy", np.int32, (k,)))
            for first, reading in read_all(
                mixture,
                documents,
                tally=tally,
                limit=limit,
                batch_tokens=batch_tokens,
                total=total,
                progress=progress,
                what="tracing",
            ):
                assert reading.logits is not None
                found = memory.search(reading.keys, k)
                rows = (reading.rows + first).numpy()
                targets.put(rows, reading.targets.cpu().numpy())
                log_p.put(rows, Logits(reading.logits).of(reading.targets).cpu().numpy())
                distances.put(rows, found.distances.cpu().numpy())
                values.put(rows, found.values.cpu().numpy())
        facts = {
            "k": k,
            "metric": memory.index.metric,
            "memory": str(memory.store.path),
            "fingerprint": memory.store.fingerprint,
            "text": list(sources) or tally.sources,
        }
        with writing(partial):
            (partial / _FILE).write_text(json.dumps({**facts, **asdict(tally)}, indent=2))
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Trace.open(folder)
