"""Saved tuning of a store: the memories, their settings and their weights.

store/
  catalog.db                  one tuning for each set of memories, and which of them is the last
  mixtures/<hash>.safetensors the networks of a gate and of the support of tokens
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.schema import CATALOG_FILE, GATES_FOLDER
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt
from knnlm.io import atomic_write, translate_os_errors
from knnlm.memories.base import Memory
from knnlm.mixture.gate import Gate, SearchSkipper, feature_names
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.source_domain import SourceDomain
from knnlm.mixture.spec import TUNE_AGAIN, MemorySpec, key_of
from knnlm.mixture.support import SupportModel, support_names
from knnlm.mixture.weights import KINDS, Buckets, BucketWeights, FixedWeights, GatedWeights, Weights

_NETWORKS = ("gate", "cheap", "skip")


@dataclass(frozen=True)
class SavedTuning:
    """The tuned settings and weights of one set of memories."""

    specs: list[MemorySpec]
    weights: dict[str, Any]
    metadata: dict[str, Any]  # the text it was tuned on, and the figures there


def load_tuning(store: Datastore, specs: Sequence[MemorySpec] | None) -> SavedTuning | None:
    """Return the tuning of these memories, or the last one; None if there is none."""
    tunings, last = _latest(store)
    stored = tunings.get((last or "") if specs is None else key_of(specs))
    return None if stored is None else _read(stored, str(store.catalog.path))


def tuned_settings(store: Datastore, spec: MemorySpec) -> MemorySpec:
    """Return a memory with the settings that it was tuned to among any other memories, the last tuning first."""
    tunings, last = _latest(store)
    for key in sorted(tunings, key=lambda key: key != last):
        for known in _read(tunings[key], str(store.catalog.path)).specs:
            if known.label == spec.label and known.settings and spec.metric in (None, known.metric):
                return replace(spec, settings=known.settings[:1], metric=known.metric)
    return spec


def _latest(store: Datastore) -> tuple[dict[str, Any], str | None]:
    """Return the tunings in the catalog's present state, also those saved after the store was opened."""
    with closing(store.catalog.reopen()) as catalog:
        return _tunings(catalog)


def _tunings(catalog: Catalog) -> tuple[dict[str, Any], str | None]:
    """Return the stored tunings by their keys, and the key of the last one."""
    tunings, last = catalog.get("tunings") or {}, catalog.get("active_tuning")
    if not isinstance(tunings, dict) or not isinstance(last, str | None):
        raise DatastoreCorrupt(f"{catalog.path}: the saved tuning cannot be read. {TUNE_AGAIN}")
    return tunings, last


def _read(stored: Any, where: str) -> SavedTuning:
    try:
        return SavedTuning(*read_mixture(stored, where), stored["metadata"])
    except (KeyError, TypeError) as error:
        raise DatastoreCorrupt(f"{where}: the saved tuning has no valid weights ({error}). {TUNE_AGAIN}") from None


def read_mixture(stored: Any, where: str) -> tuple[list[MemorySpec], dict[str, Any]]:
    """Validate and read what `write_mixture` returned; raise KeyError or TypeError for anything else."""
    specs = [MemorySpec.from_dict(each, where) for each in stored["memories"]]
    if stored["weights"]["kind"] not in KINDS:
        raise KeyError(stored["weights"]["kind"])
    if stored["weights"].get("online") is not None:
        OnlineConfig.from_dict(stored["weights"]["online"])
    return specs, stored["weights"]


def write_mixture(
    path: Path, specs: Sequence[MemorySpec], weights: dict[str, Any], tensors: dict[str, Tensor] | None
) -> dict[str, Any]:
    """Write the networks of weights into a folder, and return the rest as JSON types."""
    file = {"file": _write_tensors(path, tensors)} if tensors else {}
    return {"memories": [spec.as_dict() for spec in specs], "weights": {**weights, **file}}


def save_tuning(path: Path, tuning: SavedTuning, tensors: dict[str, Tensor] | None = None) -> None:
    """Save a tuning in the store as the last one; the caller holds the store's writer lock.

    Tunings that cannot be read are dropped, so that tuning again repairs a store whose saved tuning is corrupt.
    """
    stored = write_mixture(path, tuning.specs, tuning.weights, tensors)
    catalog = Catalog.open(path / CATALOG_FILE, write=True)
    try:
        tunings = _readable(catalog)
        key = key_of(tuning.specs)
        tunings[key] = {**stored, "metadata": tuning.metadata}
        catalog.put(tunings=tunings, active_tuning=key)
    finally:
        catalog.close()
    used = {gate_of(each) for each in tunings.values()}
    for file in (path / GATES_FOLDER).glob("*"):
        if file.name not in used:
            file.unlink(missing_ok=True)


def _readable(catalog: Catalog) -> dict[str, Any]:
    """Return the stored tunings without those that cannot be read."""
    readable = {}
    with suppress(DatastoreCorrupt):
        for key, stored in _tunings(catalog)[0].items():
            with suppress(DatastoreCorrupt):
                _read(stored, str(catalog.path))
                readable[key] = stored
    return readable


def gate_of(stored: Any) -> str | None:
    """Return the file name of the networks that a stored tuning needs; None if it needs none."""
    weights = stored.get("weights") if isinstance(stored, dict) else None
    file = weights.get("file") if isinstance(weights, dict) else None
    return Path(file).name if isinstance(file, str) else None


def weights_state(
    weights: Weights,
    online: OnlineConfig | None,
    *,
    support: SupportModel | None = None,
    source_domain: SourceDomain | None = None,
    end_odds: float = 1.0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return weights as JSON types for the catalog, and the tensors of their networks and of what belongs to them."""
    common: dict[str, Any] = {"kind": weights.kind, "online": online.as_dict() if online else None}
    common["end_odds"] = end_odds
    tensors: dict[str, Tensor] = {}
    if support is not None:
        state, common["support"] = support.state()
        tensors |= {f"support.{key}": value for key, value in state.items()}
    if source_domain is not None:
        state, common["source_domain"] = source_domain.state()
        tensors |= {f"source_domain.{key}": value for key, value in state.items()}
    if isinstance(weights, FixedWeights):
        return {**common, "values": list(weights.values)}, tensors
    if isinstance(weights, BucketWeights):
        return {**common, "memory": weights.memory, "buckets": weights.buckets.as_dict()}, tensors
    assert isinstance(weights, GatedWeights)
    metadata: dict[str, Any] = {**common, "fraction": weights.fraction, "networks": {}}
    tensors["frequencies"] = weights.frequencies
    for name in _NETWORKS:
        if (network := getattr(weights, name)) is not None:
            state, metadata["networks"][name] = network.state()
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return metadata, tensors


def load_weights(
    metadata: dict[str, Any],
    path: Path,
    memories: Sequence[Memory],
    *,
    vocab_size: int,
    skip_fraction: float | None = None,
) -> Weights:
    """Validate and load stored weights."""
    count = 1 + sum(len(memory.component_names) for memory in memories)
    try:
        if metadata["kind"] in ("fixed", "fitted"):
            weights: Weights = FixedWeights(tuple(float(value) for value in metadata["values"]), metadata["kind"])
            found = len(metadata["values"])
        elif metadata["kind"] == "buckets":
            buckets = Buckets.from_dict(metadata["buckets"])
            weights, found = BucketWeights(buckets, int(metadata["memory"])), buckets.table.shape[1]
            if not (0 <= weights.memory < len(memories) and memories[weights.memory].name == "knn"):
                raise ValueError(f"memory {weights.memory} has no neighbours to go by")
        else:
            gated = _load_gated(metadata, path, skip_fraction)
            weights, found = gated, len(gated.gate.component_names)
            names, given = (
                gated.gate.feature_names,
                tuple(feature_names([(one.name, one.feature_names) for one in memories], evidence=gated.uses_evidence)),
            )
            if names != given:
                raise ValueError(f"the gate has {len(names)} features, and these memories have {len(given)} others")
            counts = gated.frequencies
            if counts.shape != (vocab_size,) or not bool((counts >= 0).all() and counts.isfinite().all()):
                raise ValueError("its token frequencies are invalid")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, SafetensorError) as error:
        raise DatastoreCorrupt(f"{path}: the saved weights cannot be read ({error}). {TUNE_AGAIN}") from None
    if found != count:
        raise DatastoreCorrupt(
            f"{path}: the saved weights are of {found} components, but its memories have {count}. {TUNE_AGAIN}"
        )
    return weights


def load_support(metadata: dict[str, Any], path: Path, memories: Sequence[Memory]) -> SupportModel | None:
    """Validate and load the support of tokens that was stored with weights; None: there is none."""
    if metadata.get("support") is None:
        return None
    try:
        support = SupportModel.load(_stored(metadata, path, "support"), metadata["support"])
        if support.feature_names != tuple(support_names((one.name, one.feature_names) for one in memories)):
            raise ValueError(f"it has {len(support.feature_names)} features, and these memories have others")
    except (KeyError, TypeError, ValueError, AttributeError, OSError, SafetensorError) as error:
        raise DatastoreCorrupt(f"{path}: the saved support cannot be read ({error}). {TUNE_AGAIN}") from None
    return support


def load_source_domain(metadata: dict[str, Any], path: Path) -> SourceDomain | None:
    """Validate and load the domain of sources that was stored with weights; None: there is none."""
    if metadata.get("source_domain") is None:
        return None
    try:
        return SourceDomain.load(_stored(metadata, path, "source_domain"), metadata["source_domain"])
    except (KeyError, TypeError, ValueError, AttributeError, OSError, SafetensorError) as error:
        raise DatastoreCorrupt(f"{path}: the saved domain of sources cannot be read ({error}). {TUNE_AGAIN}") from None


def load_end_odds(metadata: dict[str, Any], path: Path) -> float:
    """Validate and return the factor of the odds of the end token that was stored with weights; 1: as they are."""
    found = metadata.get("end_odds", 1.0)
    if isinstance(found, bool) or not isinstance(found, float | int) or not 0 < found < math.inf:
        raise DatastoreCorrupt(f"{path}: the saved odds of the end token are {found!r}. {TUNE_AGAIN}")
    return float(found)


def _stored(metadata: dict[str, Any], path: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors that were stored with weights under a name."""
    tensors = load_networks(path / GATES_FOLDER / Path(metadata["file"]).name)
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


def load_networks(file: Path) -> dict[str, Tensor]:
    """Read the networks of a gate from a file that is named by its checksum."""
    data = file.read_bytes()
    try:
        if _name(data) == file.name:
            return load(data)
    except SafetensorError:
        pass
    raise DatastoreCorrupt(f"{file}: checksum mismatch (SHA-256). {TUNE_AGAIN}")


def _load_gated(metadata: dict[str, Any], path: Path, skip_fraction: float | None) -> GatedWeights:
    name = Path(metadata["file"]).name  # an untrusted path must not lead out of the store
    tensors = load_networks(path / GATES_FOLDER / name)
    kinds: dict[str, Any] = {"gate": Gate, "cheap": Gate, "skip": SearchSkipper}
    networks = {}
    for network, described in metadata["networks"].items():
        own = {
            key.removeprefix(f"{network}."): value for key, value in tensors.items() if key.startswith(f"{network}.")
        }
        networks[network] = kinds[network].load(own, described)
    fraction = metadata["fraction"] if skip_fraction is None else skip_fraction
    return GatedWeights(
        networks["gate"],
        tensors["frequencies"],
        skip=networks.get("skip"),
        fraction=float(fraction),
        cheap=networks.get("cheap"),
    )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write the networks of a gate into a folder, and return the file's name."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    name, folder = _name(data), path / GATES_FOLDER
    with translate_os_errors(folder):
        folder.mkdir(exist_ok=True)
    with atomic_write(folder / name) as partial:
        partial.write_bytes(data)
    return name


def _name(data: bytes) -> str:
    """Return the name of a file with this content."""
    return f"{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
