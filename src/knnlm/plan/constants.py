"""The measured constants of a machine, and their JSON file.

Times are seconds for a unit of work, so that a cost is a sum of products. `knnlm plan --measure` writes a file; the
package contains one for the machine that is named in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from knnlm.errors import ParameterError
from knnlm.io import atomic_write, cache_folder

FORMAT = 1
CONSTANTS_FILE = "plan.json"

_ADVICE = "Measure them again: knnlm plan --measure"
_DEFAULTS = "defaults.json"


@dataclass(frozen=True)
class CpuConstants:
    """Seconds for units of work on the threads that were measured. A unit of most is one number of one key."""

    threads: float
    # Building
    start: float  # a build: its first batch, opening and closing files
    flop: float  # of a forward pass
    tokenise: float  # a token
    store_plain: float  # a number of a key: copy, write, flush and hash
    store_int8: float
    store_codes: float
    store_key: float  # a key: its token, and the bookkeeping of its position
    segment: float
    document: float
    fit_int8: float  # a number of a key of the sample that a codec is fitted to
    fit_components: float
    fit_codes: float
    # Index of blocks
    nearest: float  # int8 product of a key and a centroid, for each dimension
    product: float  # float32 product of a key and a centroid, for each dimension
    train: float  # a number of a key of the training sample
    assign: float  # a number of a key, for each pass over the keys
    split_read: float
    split_level: float
    move: float
    fill: float
    index_key: float  # a key: checksums and validation of the new index
    # Search with blocks
    search: float  # a call
    centroid_read: float  # a number of a centroid, for each call
    centroid: float  # a number of a centroid, for each query
    scan: float  # a key of a searched block, for each query
    block_read: float  # a number of a block, for each call
    fault: float  # a byte of a mapped file whose page is not resident
    # Exact search
    exact: float  # a call
    exact_read: float  # a key, for each call
    exact_beyond: float  # a key that does not fit into the cache, for each call, in addition
    exact_query: float
    exact_key: float  # a key, for each query
    # Search of codes with FAISS
    codes_query: float  # of a batch
    codes_one: float  # a single query
    codes_list: float  # a searched list, for each query
    codes_scan: float  # a key of a searched list, for each query
    rerank: float  # a number of a key of a shortlist, for each query
    rerank_read: float  # a number of a key of any shortlist, once for all queries of a batch
    segment_take: float  # a segment from which some keys are read
    segment_open: float  # the same, where there are too many segments to keep them mapped
    codes_train: float  # a key of the training sample
    codes_add: float  # a key
    # Memory, bytes
    base_bytes: float  # a process that has opened a model, without its weights
    idle_bytes: float  # a process without a model
    index_bytes: float  # working memory of building an index, beyond what is computed
    search_bytes: float  # the same for a search


@dataclass(frozen=True)
class GpuConstants:
    """Seconds for units of work on one GPU."""

    flop: float  # of a forward pass
    compiled_flop: float  # of one with compiled layers
    compile: float  # compilation
    tokenise: float  # a token, on the host, ahead of the model
    store: float  # a byte of keys: copy to the host, hash and write, behind the model
    store_one: float  # a byte of keys of one segment alone: the last one, after the model has ended
    start: float  # a build: the first batch, opening and closing files
    launch: float  # a call, at least: the time in which the host starts its kernels
    search: float  # a call, on the device
    query: float
    half_read: float  # a number of a float16 key, for each call
    half: float  # a number of a float16 key, for each query
    int8_read: float
    int8: float
    work_bytes: float  # of a build: activations and buffers
    compiled_work_bytes: float  # of a build with compiled layers


@dataclass(frozen=True)
class DiskConstants:
    """Seconds on the disk."""

    read: float  # a byte, in order, not cached
    write: float  # a byte, flushed
    page: float  # a random page that is not cached


@dataclass(frozen=True)
class Constants:
    """All constants of a machine."""

    machine: Mapping[str, Any]
    cpu: CpuConstants
    gpu: GpuConstants | None
    disk: DiskConstants
    # Seconds for each token that a model reads, by the model's name and then by cpu, cuda, cuda-compiled.
    models: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Latencies of single queries, relative to their median: the tail that a search over many shards adds up.
    latencies: tuple[float, ...] = (1.0,)

    @property
    def name(self) -> str:
        """The machine, in words."""
        threads = self.machine.get("threads", "?")
        parts = [
            str(self.machine.get("processor", "unknown processor")),
            f"{threads} thread{'' if threads == 1 else 's'}",
        ]
        if self.machine.get("gpu"):
            parts.append(f"GPU {self.machine['gpu']}")
        if self.machine.get("date"):
            parts.append(f"measured {self.machine['date']}")
        return ", ".join(parts)

    def as_json(self) -> str:
        """Return the constants as the text of a JSON file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, default=list) + "\n"

    def save(self, path: Path) -> None:
        """Write the JSON file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(self.as_json(), encoding="utf-8")


def user_constants() -> Path:
    """Return where `--measure` writes the constants of this machine."""
    return cache_folder() / CONSTANTS_FILE


def load_constants(path: Path | None = None) -> tuple[Constants, str]:
    """Return constants and their origin: those of a file, else those of this machine, else the package's."""
    if path is None and not user_constants().exists():
        return packaged_constants(), "the package"
    path = user_constants() if path is None else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ParameterError(f"{path}: the constants cannot be read ({reason}). {_ADVICE}") from None
    return parse_constants(text, str(path)), str(path)


def packaged_constants() -> Constants:
    """Return the constants of the package."""
    text = (files("knnlm.plan") / _DEFAULTS).read_text(encoding="utf-8")
    return parse_constants(text, f"knnlm's {_DEFAULTS}")


def parse_constants(text: str, name: str) -> Constants:
    """Parse the text of a constants file and check it; `name` is for errors."""
    try:
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, this knnlm reads {FORMAT}")
        gpu = record["gpu"]
        models = {
            str(model): {str(device): _positive(device, seconds) for device, seconds in figures.items()}
            for model, figures in record["models"].items()
        }
        latencies = tuple(_positive("latencies", latency) for latency in record["latencies"])
        if not latencies:
            raise ValueError("latencies is empty")
        return Constants(
            machine=dict(record["machine"]),
            cpu=_group(CpuConstants, record["cpu"]),
            gpu=None if gpu is None else _group(GpuConstants, gpu),
            disk=_group(DiskConstants, record["disk"]),
            models=models,
            latencies=latencies,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ParameterError(f"{name}: not a file of constants ({reason}). {_ADVICE}") from None


def _group(kind: Any, record: Mapping[str, Any]) -> Any:
    """Return one group of constants, each a finite number that is not negative."""
    names = [each.name for each in fields(kind)]
    return kind(**{name: _number(name, record[name]) for name in names})


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number from 0 on")
    return float(value)


def _positive(name: str, value: Any) -> float:
    if not _number(name, value):
        raise ValueError(f"{name} is 0")
    return float(value)
