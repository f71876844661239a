"""What was tuned, kept in the memory: which memories, how they vote, how they are weighed.

memory/
  catalog.db                  the choices, one for each set of memories, and which was made last
  mixtures/<hash>.safetensors the networks of a gate
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from knnlm.datastore import Datastore
from knnlm.datastore.catalog import FILE, Catalog
from knnlm.datastore.segment import sync_folder, writing
from knnlm.errors import DatastoreCorrupt
from knnlm.memory import Memory
from knnlm.mixture.buckets import Buckets
from knnlm.mixture.gate import Gate, Skip
from knnlm.mixture.recipe import MemorySpec, key_of
from knnlm.mixture.weights import Bucketed, Fixed, Gated, Weights

_FOLDER = "mixtures"
_NETWORKS = ("gate", "cheap", "skip")


@dataclass(frozen=True)
class Choice:
    """What was tuned for one set of memories."""

    specs: list[MemorySpec]
    weights: dict[str, Any]
    facts: dict[str, Any]  # on what it was chosen, and what it gave there


def tuned(store: Datastore, specs: Sequence[MemorySpec] | None) -> Choice | None:
    """Give what was tuned for these memories, or last; None where nothing was."""
    choices = store.catalog.get("choices") or {}
    key = store.catalog.get("chosen") if specs is None else key_of(specs)
    found = choices.get(key) if isinstance(choices, dict) else None
    if found is None:
        return None
    where = str(store.catalog.path)
    try:
        memories = [MemorySpec.from_dict(facts, where) for facts in found["memories"]]
        if found["weights"]["kind"] not in ("fixed", "fitted", "buckets", "gated"):
            raise KeyError(found["weights"]["kind"])
        return Choice(memories, found["weights"], found["facts"])
    except (KeyError, TypeError) as error:
        raise DatastoreCorrupt(f"{where} does not say how its memories are weighed ({error}). Tune it again.") from None


def choose(path: Path, choice: Choice, tensors: dict[str, Tensor] | None = None) -> None:
    """Store a choice in the memory, as the last one; the caller holds the memory's writer lock."""
    weights = dict(choice.weights)
    if tensors:
        weights["file"] = _write(path, tensors)
    catalog = Catalog.open(path / FILE, write=True)
    try:
        choices = catalog.get("choices") or {}
        key = key_of(choice.specs)
        memories = [spec.as_dict() for spec in choice.specs]
        choices[key] = {"memories": memories, "weights": weights, "facts": choice.facts}
        catalog.put(choices=choices, chosen=key)
    finally:
        catalog.close()
    used = {each["weights"].get("file") for each in choices.values()}
    for file in (path / _FOLDER).glob("*"):
        if file.name not in used:
            file.unlink(missing_ok=True)


def weights_state(weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Give what is written down of weights: facts for the catalog, and the tensors of networks."""
    if isinstance(weights, Fixed):
        return {"kind": weights.kind, "values": list(weights.values)}, {}
    if isinstance(weights, Bucketed):
        return {"kind": weights.kind, "memory": weights.memory, "buckets": weights.buckets.as_dict()}, {}
    assert isinstance(weights, Gated)
    facts: dict[str, Any] = {"kind": weights.kind, "fraction": weights.fraction, "networks": {}}
    tensors = {"frequencies": weights.frequencies}
    for name in _NETWORKS:
        if (network := getattr(weights, name)) is not None:
            state, facts["networks"][name] = network.state()
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return facts, tensors


def load_weights(
    facts: dict[str, Any], path: Path, memories: Sequence[Memory], *, skip: float | None = None
) -> Weights:
    """Make weights again from what was written down."""
    parts = 1 + sum(len(memory.part_names) for memory in memories)
    try:
        if facts["kind"] in ("fixed", "fitted"):
            weights: Weights = Fixed(tuple(float(value) for value in facts["values"]), facts["kind"])
            found = len(facts["values"])
        elif facts["kind"] == "buckets":
            buckets = Buckets.from_dict(facts["buckets"])
            weights, found = Bucketed(buckets, int(facts["memory"])), buckets.table.shape[1]
        else:
            gated = _load_gated(facts, path, skip)
            weights, found = gated, len(gated.gate.part_names)
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise DatastoreCorrupt(f"{path}: its mixture cannot be read ({error}). Tune it again.") from None
    if found != parts:
        raise DatastoreCorrupt(f"{path} has weights for {found} parts, but its memories have {parts}. Tune it again.")
    return weights


def _load_gated(facts: dict[str, Any], path: Path, skip: float | None) -> Gated:
    name = Path(facts["file"]).name  # no path that a stranger wrote leads out of the memory
    tensors = load_file(path / _FOLDER / name)
    kinds: dict[str, Any] = {"gate": Gate, "cheap": Gate, "skip": Skip}
    networks = {}
    for network, described in facts["networks"].items():
        own = {
            key.removeprefix(f"{network}."): value for key, value in tensors.items() if key.startswith(f"{network}.")
        }
        networks[network] = kinds[network].load(own, described)
    fraction = facts["fraction"] if skip is None else skip
    return Gated(
        networks["gate"],
        tensors["frequencies"],
        skip=networks.get("skip"),
        fraction=float(fraction),
        cheap=networks.get("cheap"),
    )


def _write(path: Path, tensors: dict[str, Tensor]) -> str:
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    name = f"{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    folder = path / _FOLDER
    with writing(folder):
        folder.mkdir(exist_ok=True)
        partial = folder / f"{name}.partial"
        partial.write_bytes(data)
        partial.replace(folder / name)
        sync_folder(folder)
    return name
