"""What a mixture is opened from: the memories it has, its settings, and their defaults.

knn,cache,ngram                   the store's own entries, the text being read, n-grams of the store
knn,knn=OTHER,decoder=FOLDER      a second store, a second language model
knn:0.3,cache:0.1                 with weights
knn,cache=2000                    the last 2,000 positions of the text instead of all of it
knn,cache,ngram,ngram-cache       also n-grams of the text being read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.index.base import Index, check_metric
from knnlm.index.exact import check_key_dtype
from knnlm.memories.automaton import AutomatonParams
from knnlm.memories.subset import check_subset
from knnlm.memories.voting import VoteParams, check_vote
from knnlm.mixture.weights import check_lambda

KINDS = ("knn", "cache", "ngram", "ngram-cache", "decoder", "output")

TUNE_AGAIN = "Tune the store again: knnlm tune STORE TEXT"

# The settings of a store until it is tuned.
DEFAULTS: dict[str, Any] = {"k": 1024, "knn_temperature": 2.0, "lambda": 0.25}


IndexOpener = Callable[..., Index]  # with the arguments of `knnlm.datastore.indexes.open_index`

_SAVED_OPTIONS = ("cache_generated", "domain_check", "damping", "rerank", "key_dtype", "subset", "automaton")


@dataclass(frozen=True)
class MixtureOptions:
    """How a mixture is opened, besides the paper's settings."""

    metric: str | None = None  # l2 or ip; None: as tuned, else l2
    skip_fraction: float | None = None  # of the searches that a gate skips; None: as tuned
    online: bool = True  # with the online weights that were tuned; False: without
    cache_generated: bool = False  # both caches also predict tokens that the mixture generated in this text
    domain_check: bool = True  # with online weights, memories are left out of text that follows a prompt unlike theirs
    damping: bool = True  # with online weights, generation damps memories that repeat what was generated
    rerank: bool = True  # vote with distances to the stored keys instead of the index's own
    key_dtype: str = "float16"  # of keys on a GPU
    subset: int | None = None  # stored pairs, those with the nearest sources, that are searched; None: all
    automaton: AutomatonParams | None = None  # entries are followed where enough are reached; None: all is searched
    open_index: IndexOpener | None = None  # opens the index of a store, such as one on Ray; None: in this process
    model: str | None = None  # the language model; None: the one that the store was built with
    device: str = "auto"
    dtype: str = "auto"  # of the language model

    def __post_init__(self) -> None:
        check_metric(self.metric or "l2")
        check_key_dtype(self.key_dtype)
        check_subset(self.subset)
        if self.subset is not None and self.open_index is not None:
            raise ParameterError("--subset gathers keys in one process, so it does not search shards on Ray.")
        if self.automaton is not None and self.open_index is not None:
            raise ParameterError(
                "--search automaton compares keys in one process, so it does not search shards on Ray."
            )
        if self.automaton is not None and self.subset is not None:
            raise ParameterError("--search automaton follows entries of the whole store: leave out --subset.")
        if self.skip_fraction is not None and not 0 <= self.skip_fraction <= 1:
            raise ParameterError(f"skip must be a fraction from 0 to 1, not {self.skip_fraction}.")

    def as_dict(self) -> dict[str, Any]:
        """Return, as JSON types, the options that are saved with a model and not with its memories or weights."""
        saved = {name: getattr(self, name) for name in _SAVED_OPTIONS}
        return saved | {"automaton": None if self.automaton is None else self.automaton.as_dict()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> MixtureOptions:
        """Validate and read what `as_dict` returned; options that are not there keep their defaults."""
        given = {name: stored[name] for name in _SAVED_OPTIONS if name in stored}
        params = given.pop("automaton", None)
        for name, value in given.items():
            kinds = (int, type(None)) if name == "subset" else (type(getattr(cls, name)),)
            if type(value) not in kinds:
                raise TypeError(f"option {name} is {value!r}")
        return cls(**given, automaton=None if params is None else AutomatonParams.from_dict(params))


@dataclass(frozen=True)
class SavedMixture:
    """A mixture as it was saved with a model."""

    specs: list[MemorySpec]
    weights: dict[str, Any]
    folder: Path  # with the tensors of the weights
    options: MixtureOptions = field(default_factory=MixtureOptions)


@dataclass(frozen=True)
class MixtureRequest:
    """The arguments of `Mixture.open`; None: as tuned."""

    memories: str | None = None
    k: int | None = None
    knn_temperature: float | None = None
    lmbda: float | None = None
    use_tuned: bool = True
    options: MixtureOptions = field(default_factory=MixtureOptions)
    saved: SavedMixture | None = None  # opened instead of what was tuned

    def __post_init__(self) -> None:
        check_vote(
            DEFAULTS["k"] if self.k is None else self.k,
            DEFAULTS["knn_temperature"] if self.knn_temperature is None else self.knn_temperature,
        )
        check_lambda(DEFAULTS["lambda"] if self.lmbda is None else self.lmbda)


@dataclass(frozen=True)
class MemorySpec:
    """One memory: its kind, its path if it is not in the store itself, and how its neighbours vote."""

    kind: str
    path: str | None = None
    weight: float | None = None
    settings: tuple[VoteParams, ...] = ()
    metric: str | None = None
    identity: str | None = None  # a hash of the memory that the weights were fitted to, where it can be replaced

    @property
    def label(self) -> str:
        """The name of this memory among others."""
        return self.kind if self.path is None else f"{self.kind}={self.path}"

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as JSON types."""
        return {
            "kind": self.kind,
            "path": self.path,
            "metric": self.metric,
            "settings": [[setting.k, setting.knn_temperature] for setting in self.settings],
            "identity": self.identity,
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any], where: str) -> MemorySpec:
        """Validate and read what `as_dict` returned."""
        try:
            settings = tuple(VoteParams(int(k), float(knn_temperature)) for k, knn_temperature in stored["settings"])
            spec = cls(stored["kind"], stored["path"], None, settings, stored["metric"], stored["identity"])
            if spec.kind not in KINDS or not isinstance(spec.path, str | None):
                raise ValueError(f"unknown memory {spec.kind}")
            if spec.metric not in (None, "l2", "ip") or not isinstance(spec.identity, str | None):
                raise ValueError(f"unknown metric {spec.metric}")
            _parse(spec.label)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DatastoreCorrupt(
                f"{where}: the saved tuning does not list its memories ({error}). {TUNE_AGAIN}"
            ) from None
        return spec


def parse_memories(text: str) -> list[MemorySpec]:
    """Parse a list of memories as given on the command line."""
    specs = [_parse(piece.strip()) for piece in text.split(",") if piece.strip()]
    if not specs:
        raise ParameterError(f"There is no memory in {text!r}. Name some of {', '.join(KINDS)}, as in knn,cache,ngram.")
    labels = [spec.label for spec in specs]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ParameterError(f"The memory {twice} is there twice in {text!r}.")
    weights = [spec.weight for spec in specs if spec.weight is not None]
    if weights and (len(weights) < len(specs) or not (min(weights) >= 0 and sum(weights) <= 1)):
        raise ParameterError(
            f"In {text!r}, give every memory a weight or none; weights are at least 0 and sum to at most 1, and the "
            "language model gets the rest."
        )
    return specs


def _parse(piece: str) -> MemorySpec:
    weight = None
    head, _, tail = piece.rpartition(":")
    if head and not Path(piece.partition("=")[2] or ":").exists():
        with suppress(ValueError):  # a colon within a path
            weight, piece = float(tail), head
    kind, _, path = piece.partition("=")
    if kind not in KINDS:
        raise ParameterError(
            f"There is no memory {kind!r}. The memories are {', '.join(KINDS)}, as in knn,cache,ngram."
        )
    if kind == "decoder" and not path:
        raise ParameterError("The memory decoder needs a model: decoder=FOLDER.")
    if kind == "ngram-cache" and path:
        raise ParameterError(f"ngram-cache={path}: the memory ngram-cache reads the text alone, so it takes no value.")
    if kind == "cache" and path and not (path.isdecimal() and int(path) > 0):
        raise ParameterError(f"cache={path} is no number of positions to look back on, as in cache=2000.")
    return MemorySpec(kind, path or None, weight)


def resolve(specs: Sequence[MemorySpec], store: Path) -> list[MemorySpec]:
    """Make paths independent of the working folder: relative to the store if inside it, else absolute."""
    resolved = []
    for spec in specs:
        path = spec.path
        if path is not None and spec.kind != "cache" and not (store / path).exists() and Path(path).exists():
            absolute = Path(path).resolve()
            inside = absolute.is_relative_to(store.resolve())
            path = str(absolute.relative_to(store.resolve()) if inside else absolute)
        resolved.append(replace(spec, path=path))
    return resolved


def key_of(specs: Sequence[MemorySpec]) -> str:
    """Return the name of a set of memories, in any order, under which its tuning is saved."""
    return ",".join(sorted(spec.label for spec in specs))
