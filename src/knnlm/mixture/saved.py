"""What was tuned, kept in the memory: which memories, how they vote, how they are weighed.

memory/
  catalog.db                  the choices, one for each set of memories, and which was made last
  mixtures/<hash>.safetensors the networks of a gate
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.paths import CATALOG_FILE, GATES_FOLDER
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt
from knnlm.io import replacing, translate_os_errors
from knnlm.memories.base import Memory
from knnlm.mixture.gate import Gate, SearchSkipper, feature_names
from knnlm.mixture.spec import MemorySpec, key_of
from knnlm.mixture.weights import KINDS, Buckets, BucketWeights, FixedWeights, GatedWeights, Weights

_NETWORKS = ("gate", "cheap", "skip")


@dataclass(frozen=True)
class SavedTuning:
    """What was tuned for one set of memories."""

    specs: list[MemorySpec]
    weights: dict[str, Any]
    facts: dict[str, Any]  # on what it was chosen, and what it gave there


def load_tuning(store: Datastore, specs: Sequence[MemorySpec] | None) -> SavedTuning | None:
    """Give what was tuned for these memories, or last; None where nothing was."""
    choices, chosen = _known(store)
    found = choices.get((chosen or "") if specs is None else key_of(specs))
    return None if found is None else _read(found, str(store.catalog.path))


def tuned_settings(store: Datastore, spec: MemorySpec) -> MemorySpec:
    """Give a memory the way of voting that it was tuned to among whatever others, the last choice first."""
    choices, chosen = _known(store)
    for key in sorted(choices, key=lambda key: key != chosen):
        for known in _read(choices[key], str(store.catalog.path)).specs:
            if known.label == spec.label and known.settings and spec.metric in (None, known.metric):
                return replace(spec, settings=known.settings[:1], metric=known.metric)
    return spec


def _known(store: Datastore) -> tuple[dict[str, Any], str | None]:
    """Give what was tuned, also after the store was opened."""
    with closing(store.catalog.latest()) as now:
        return _choices(now)


def _choices(catalog: Catalog) -> tuple[dict[str, Any], str | None]:
    choices, chosen = catalog.get("choices") or {}, catalog.get("chosen")
    if not isinstance(choices, dict) or not isinstance(chosen, str | None):
        raise DatastoreCorrupt(
            f"{catalog.path} does not say what was tuned. Tune it again after removing the memory's "
            "catalog entry, or build it again."
        )
    return choices, chosen


def _read(found: Any, where: str) -> SavedTuning:
    try:
        return SavedTuning(*read_mixture(found, where), found["facts"])
    except (KeyError, TypeError) as error:
        raise DatastoreCorrupt(f"{where} does not say how its memories are weighed ({error}). Tune it again.") from None


def read_mixture(found: Any, where: str) -> tuple[list[MemorySpec], dict[str, Any]]:
    """Read the memories and weights that `write_mixture` gave; KeyError or TypeError where it is something else."""
    specs = [MemorySpec.from_dict(facts, where) for facts in found["memories"]]
    if found["weights"]["kind"] not in KINDS:
        raise KeyError(found["weights"]["kind"])
    return specs, found["weights"]


def write_mixture(
    path: Path, specs: Sequence[MemorySpec], weights: dict[str, Any], tensors: dict[str, Tensor] | None
) -> dict[str, Any]:
    """Write the networks of weights into a folder, and give the rest as JSON can keep it."""
    file = {"file": _write_tensors(path, tensors)} if tensors else {}
    return {"memories": [spec.as_dict() for spec in specs], "weights": {**weights, **file}}


def save_tuning(path: Path, choice: SavedTuning, tensors: dict[str, Tensor] | None = None) -> None:
    """Store a choice in the memory, as the last one; the caller holds the memory's writer lock."""
    written = write_mixture(path, choice.specs, choice.weights, tensors)
    catalog = Catalog.open(path / CATALOG_FILE, write=True)
    try:
        choices, _ = _choices(catalog)
        key = key_of(choice.specs)
        choices[key] = {**written, "facts": choice.facts}
        catalog.put(choices=choices, chosen=key)
    finally:
        catalog.close()
    used = {each["weights"].get("file") for each in choices.values()}
    for file in (path / GATES_FOLDER).glob("*"):
        if file.name not in used:
            file.unlink(missing_ok=True)


def gate_of(choice: Any) -> str | None:
    """Give the name of the file of networks that a choice, as the catalog has it, needs; None where it needs none."""
    weights = choice.get("weights") if isinstance(choice, dict) else None
    file = weights.get("file") if isinstance(weights, dict) else None
    return Path(file).name if isinstance(file, str) else None


def weights_state(weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Give what is written down of weights: facts for the catalog, and the tensors of networks."""
    if isinstance(weights, FixedWeights):
        return {"kind": weights.kind, "values": list(weights.values)}, {}
    if isinstance(weights, BucketWeights):
        return {"kind": weights.kind, "memory": weights.memory, "buckets": weights.buckets.as_dict()}, {}
    assert isinstance(weights, GatedWeights)
    facts: dict[str, Any] = {"kind": weights.kind, "fraction": weights.fraction, "networks": {}}
    tensors = {"frequencies": weights.frequencies}
    for name in _NETWORKS:
        if (network := getattr(weights, name)) is not None:
            state, facts["networks"][name] = network.state()
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return facts, tensors


def load_weights(
    facts: dict[str, Any], path: Path, memories: Sequence[Memory], *, vocab_size: int, skip: float | None = None
) -> Weights:
    """Make weights again from what was written down, and trust none of it."""
    parts = 1 + sum(len(memory.component_names) for memory in memories)
    try:
        if facts["kind"] in ("fixed", "fitted"):
            weights: Weights = FixedWeights(tuple(float(value) for value in facts["values"]), facts["kind"])
            found = len(facts["values"])
        elif facts["kind"] == "buckets":
            buckets = Buckets.from_dict(facts["buckets"])
            weights, found = BucketWeights(buckets, int(facts["memory"])), buckets.table.shape[1]
            if not (0 <= weights.memory < len(memories) and memories[weights.memory].name == "knn"):
                raise ValueError(f"memory {weights.memory} has no neighbours to go by")
        else:
            gated = _load_gated(facts, path, skip)
            weights, found = gated, len(gated.gate.component_names)
            names, given = (
                gated.gate.feature_names,
                tuple(feature_names((one.name, one.feature_names) for one in memories)),
            )
            if names != given:
                raise ValueError(f"it looks at {len(names)} signals, and these memories give {len(given)} others")
            counts = gated.frequencies
            if counts.shape != (vocab_size,) or not bool((counts >= 0).all() and counts.isfinite().all()):
                raise ValueError("it does not know how often each token is stored")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, SafetensorError) as error:
        raise DatastoreCorrupt(f"{path}: its mixture cannot be read ({error}). Tune it again.") from None
    if found != parts:
        raise DatastoreCorrupt(f"{path} has weights for {found} parts, but its memories have {parts}. Tune it again.")
    return weights


def load_networks(file: Path) -> dict[str, Tensor]:
    """Read the networks of a gate, whose file is named by its hash."""
    data = file.read_bytes()
    try:
        if _name(data) == file.name:
            return load(data)
    except SafetensorError:
        pass
    raise DatastoreCorrupt(f"{file} is damaged. Tune it again with: knnlm tune")


def _load_gated(facts: dict[str, Any], path: Path, skip: float | None) -> GatedWeights:
    name = Path(facts["file"]).name  # no path that a stranger wrote leads out of the memory
    tensors = load_networks(path / GATES_FOLDER / name)
    kinds: dict[str, Any] = {"gate": Gate, "cheap": Gate, "skip": SearchSkipper}
    networks = {}
    for network, described in facts["networks"].items():
        own = {
            key.removeprefix(f"{network}."): value for key, value in tensors.items() if key.startswith(f"{network}.")
        }
        networks[network] = kinds[network].load(own, described)
    fraction = facts["fraction"] if skip is None else skip
    return GatedWeights(
        networks["gate"],
        tensors["frequencies"],
        skip=networks.get("skip"),
        fraction=float(fraction),
        cheap=networks.get("cheap"),
    )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write the networks of a gate into a folder, and give the name of the file, which tells what is in it."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    name, folder = _name(data), path / GATES_FOLDER
    with translate_os_errors(folder):
        folder.mkdir(exist_ok=True)
    with replacing(folder / name) as partial:
        partial.write_bytes(data)
    return name


def _name(data: bytes) -> str:
    """Name a file by what is in it."""
    return f"{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
