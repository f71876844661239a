"""Which memories a mixture has, written down: on the command line, and in the memory's catalog. Opens nothing.

knn,cache,ngram              the memory's own store, the text being read, n-grams of the store
knn,knn=OTHER,lm=FOLDER      a second store, a second language model
knn:0.3,cache:0.1            with weights
knn,cache=2000               the last 2,000 positions of the text instead of all of it
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.voting import VoteParams

KINDS = ("knn", "cache", "ngram", "lm", "output")


@dataclass(frozen=True)
class MemorySpec:
    """One memory: its kind, where it lies if not in the store itself, and how its neighbours vote."""

    kind: str
    path: str | None = None
    weight: float | None = None
    settings: tuple[VoteParams, ...] = ()
    metric: str | None = None
    identity: str | None = None  # what it was when weights were fitted for it, where that can change

    @property
    def label(self) -> str:
        """What this memory is called among others."""
        return self.kind if self.path is None else f"{self.kind}={self.path}"

    def as_dict(self) -> dict[str, Any]:
        """Write it as JSON can."""
        return {
            "kind": self.kind,
            "path": self.path,
            "metric": self.metric,
            "settings": [[setting.k, setting.knn_temperature] for setting in self.settings],
            "identity": self.identity,
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any], where: str) -> MemorySpec:
        """Read what `as_dict` wrote; it may come from a stranger."""
        try:
            settings = tuple(VoteParams(int(k), float(knn_temperature)) for k, knn_temperature in facts["settings"])
            spec = cls(facts["kind"], facts["path"], None, settings, facts["metric"], facts["identity"])
            if spec.kind not in KINDS or not isinstance(spec.path, str | None):
                raise ValueError(f"unknown memory {spec.kind}")
            if spec.metric not in (None, "l2", "ip") or not isinstance(spec.identity, str | None):
                raise ValueError(f"unknown metric {spec.metric}")
            _parse(spec.label)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DatastoreCorrupt(f"{where} does not say which memories it has ({error}). Tune it again.") from None
        return spec


def parse_memories(text: str) -> list[MemorySpec]:
    """Read a list of memories as it is given on the command line."""
    specs = [_parse(piece.strip()) for piece in text.split(",") if piece.strip()]
    if not specs:
        raise ParameterError(f"There is no memory in {text!r}. Give some of {', '.join(KINDS)}, as in knn,cache,ngram.")
    labels = [spec.label for spec in specs]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ParameterError(f"The memory {twice} is there twice in {text!r}.")
    given = [spec.weight for spec in specs if spec.weight is not None]
    if given and (len(given) < len(specs) or not (min(given) >= 0 and sum(given) <= 1)):
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
    if kind == "lm" and not path:
        raise ParameterError("The memory lm needs a model: lm=FOLDER.")
    if kind == "cache" and path and not (path.isdecimal() and int(path) > 0):
        raise ParameterError(f"cache={path} is no number of positions to look back on, as in cache=2000.")
    return MemorySpec(kind, path or None, weight)


def resolve(specs: Sequence[MemorySpec], memory: Path) -> list[MemorySpec]:
    """Write paths so that they are found from any folder: within the memory as they are, others in full."""
    found = []
    for spec in specs:
        path = spec.path
        if path is not None and spec.kind != "cache" and not (memory / path).exists() and Path(path).exists():
            whole = Path(path).resolve()
            inside = whole.is_relative_to(memory.resolve())
            path = str(whole.relative_to(memory.resolve()) if inside else whole)
        found.append(replace(spec, path=path))
    return found


def key_of(specs: Sequence[MemorySpec]) -> str:
    """Name a set of memories, in whatever order, to find what was tuned for it."""
    return ",".join(sorted(spec.label for spec in specs))
