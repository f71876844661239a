"""A linear map of keys, in memory and as a file. Knows nothing about how it was found.

key' = (key - centre) @ matrix
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from knnlm.checksums import checksum
from knnlm.datastore.segment import replacing
from knnlm.datastore.strangers import check_place
from knnlm.errors import DatastoreCorrupt, ParameterError

FILE = "map.safetensors"


@dataclass(frozen=True)
class KeyMap:
    """Where keys go, and what is worth knowing about how that was chosen."""

    matrix: Tensor  # (D, D') float32
    centre: Tensor  # (D,) float32
    facts: dict[str, Any] = field(default_factory=dict)
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2 or self.centre.shape != self.matrix.shape[:1] or 0 in self.matrix.shape:
            raise ParameterError(
                f"A map of keys has a matrix (D, D') and a centre (D,), not {tuple(self.matrix.shape)} and "
                f"{tuple(self.centre.shape)}."
            )
        if not (self.matrix.isfinite().all() and self.centre.isfinite().all()):
            raise ParameterError("A map of keys must be of finite numbers.")

    @property
    def width(self) -> int:
        """The number of dimensions that come out."""
        return self.matrix.shape[1]

    def apply(self, keys: Tensor) -> Tensor:
        """Map (…, D) keys."""
        matrix, centre = self.on(keys.device)
        return (keys.float() - centre) @ matrix

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give matrix and centre where they are needed; they are moved there once."""
        if device not in self._placed:
            self._placed[device] = (self.matrix.to(device, torch.float32), self.centre.to(device, torch.float32))
        return self._placed[device]

    def after(self, first: KeyMap | None) -> KeyMap:
        """Make the one map that does what `first` and then this one do."""
        if first is None:
            return self
        inner, outer = first.matrix.double(), self.matrix.double()
        # What is taken away between the two must be taken away before both: centre' @ inner = this centre. It is a
        # mean of keys that came out of `inner`, so there is such a centre'.
        before = torch.linalg.lstsq(inner.T, self.centre.double()[:, None], driver="gelsd").solution[:, 0]
        facts = {**self.facts, "after": first.facts}
        return KeyMap((inner @ outer).float(), (first.centre.double() + before).float(), facts)

    def save(self, path: Path) -> str:
        """Write the map so that it is there completely or not at all, and return the hash of the file."""
        tensors = {"matrix": self.matrix.float(), "centre": self.centre.float()}
        with replacing(path) as partial:
            try:
                save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
            except SafetensorError as error:
                raise OSError(str(error)) from None
        return checksum(path)

    @classmethod
    def load(cls, path: Path, *, sha256: str, facts: dict[str, Any]) -> KeyMap:
        """Read a map after checking that it is the one that the catalog means."""
        advice = "Make the memory again, or restore the file."
        check_place(path.parent, path)
        if not path.is_file():
            raise DatastoreCorrupt(f"{path} is missing. {advice}")
        if checksum(path) != sha256:
            raise DatastoreCorrupt(f"{path} is not the map of keys that this memory was made with. {advice}")
        try:
            tensors = load_file(path)
            if {tensors["matrix"].dtype, tensors["centre"].dtype} != {torch.float32}:
                raise ParameterError("its numbers are not float32")
            return cls(tensors["matrix"], tensors["centre"], facts)
        except (SafetensorError, KeyError, ParameterError) as error:
            raise DatastoreCorrupt(f"{path} is not a readable map of keys ({error}). {advice}") from None
