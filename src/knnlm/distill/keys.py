"""Make a memory whose similarity was trained: learn the map, keep it, copy. Knows nothing about how either is done.

Learning takes minutes, and so may copying. What was learnt is kept beside the new memory, in OUT.map.safetensors, until
the copy is finished, so that a run that was stopped while it copied goes on there and need not come to the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knnlm.datastore import Datastore, KeyMap, derive
from knnlm.datastore.derive import check_out
from knnlm.datastore.segment import writing
from knnlm.distill.settings import check_same
from knnlm.distill.similarity import learn_map
from knnlm.errors import DatastoreCorrupt
from knnlm.memory.output import load_tensors, save_tensors
from knnlm.progress import Progress, silent


def distill_keys(
    store: Datastore,
    out: str | Path,
    *,
    width: int | None = None,
    anchors: int = 40_000,
    neighbours: int = 128,
    rounds: int = 1,
    epochs: int = 3,
    learning_rate: float = 5e-4,
    temperature: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Datastore:
    """Write the memory with the keys that `learn_map` maps, going on with an unfinished run of the same call.

    A run may go on on another device, or with another number of threads.
    """
    check_out(store, out)
    settings: dict[str, Any] = {
        "width": width,
        "anchors": anchors,
        "neighbours": neighbours,
        "rounds": rounds,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "temperature": temperature,
        "seed": seed,
    }
    learnt = learnt_file(out)
    wanted = {"store": store.fingerprint, **settings}
    if learnt.exists():
        key_map = _load(learnt, wanted)
    else:
        key_map = learn_map(store, **settings, device=device, progress=progress)
        with writing(learnt):
            learnt.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"matrix": key_map.matrix.float(), "centre": key_map.centre.float()}
        save_tensors(learnt, tensors, {"settings": wanted, "facts": key_map.facts})
    made = derive(store, out, key_map=key_map, facts={"settings": settings}, progress=progress)
    learnt.unlink(missing_ok=True)
    return made


def learnt_file(out: str | Path) -> Path:
    """Say where the map is kept while the memory is written: beside it, because a memory's folder has only its own."""
    place = Path(out).resolve()
    return place.with_name(f"{place.name}.map.safetensors")


def _load(path: Path, wanted: dict[str, Any]) -> KeyMap:
    """Read what an earlier run has learnt with these settings."""
    tensors, facts = load_tensors(path)
    check_same(path, facts.get("settings"), wanted)
    try:
        return KeyMap(tensors["matrix"].float(), tensors["centre"].float(), dict(facts["facts"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorrupt(f"{path} is not a readable map of keys ({error}). Remove it.") from None
