"""How a key becomes numbers on disk: itself, a byte a dimension, or codes. Knows nothing about catalogs or segments.

A codec takes (n, D) float32 keys and gives an (n, W) array to store, and back. `Plain` numbers are divided by the
scale of their segment, which its writer has found. `Bytes` and `Codes` have parameters of their own that were fitted
to some keys; these lie in a file beside the catalog, which knows its hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from knnlm.checksums import checksum
from knnlm.datastore.segment import replacing
from knnlm.datastore.strangers import check_place
from knnlm.errors import DatastoreCorrupt, ParameterError

FILE = "codec.safetensors"
LEVELS = 127  # of int8 on either side of zero
BOOK = 256  # what a byte can name
_SCORES = 1 << 22  # bytes of distances to the entries of a book at a time: what stays near the processor


class Codec(Protocol):
    """What turns keys into what is stored, and back."""

    @property
    def dtype(self) -> str:
        """The dtype of what is stored."""

    @property
    def width(self) -> int:
        """D, the number of dimensions of a key."""

    @property
    def columns(self) -> int:
        """W, how many numbers are stored of a key."""

    @property
    def largest(self) -> float:
        """What no number of a decoded key exceeds; inf where that depends on the keys."""

    def encode(self, keys: Tensor) -> Tensor:
        """Turn finite (n, D) keys into (n, W), where the keys are."""

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """Turn (n, W) into (n, D) float32 keys; `scale` is that of their segment."""


@dataclass(frozen=True)
class Plain:
    """Keys as numbers, divided by the scale of their segment."""

    dtype: str  # float16 or float32
    width: int

    @property
    def columns(self) -> int:
        """One number a dimension."""
        return self.width

    @property
    def largest(self) -> float:
        """It depends on the keys."""
        return float("inf")

    def encode(self, keys: Tensor) -> Tensor:
        """Round keys that have been divided already."""
        return keys.to(getattr(torch, self.dtype))

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """Give the keys in float32."""
        keys = stored.float()
        return keys if scale == 1.0 else keys.mul_(scale) if keys is not stored else keys * scale


@dataclass(frozen=True)
class Bytes:
    """A byte a dimension: key = centre + step · byte."""

    centre: Tensor  # (D,) float32
    step: Tensor  # (D,) float32, above 0
    kind = "bytes"
    dtype = "int8"

    def __post_init__(self) -> None:
        if self.centre.ndim != 1 or self.centre.shape != self.step.shape or not len(self.step):
            raise ParameterError(f"Bytes have a centre (D,) and a step (D,), not {_shapes(self.tensors())}.")
        if not (self.centre.isfinite().all() and self.step.isfinite().all() and (self.step > 0).all()):
            raise ParameterError("The centre of bytes must be finite, and their step finite and above 0.")

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return len(self.centre)

    @property
    def columns(self) -> int:
        """One byte a dimension."""
        return self.width

    @property
    def largest(self) -> float:
        """The end of the widest dimension."""
        return float((self.centre.abs() + LEVELS * self.step).max())

    def encode(self, keys: Tensor) -> Tensor:
        """Round each dimension to its nearest step; what lies beyond the last one becomes that."""
        steps = (keys.float() - self.centre.to(keys.device)) / self.step.to(keys.device)
        return steps.round_().clamp_(-LEVELS, LEVELS).to(torch.int8)

    def decode(self, stored: Tensor, scale: float) -> Tensor:  # noqa: ARG002  (steps are scale enough)
        """Give the middle of each step."""
        return torch.addcmul(self.centre.to(stored.device), stored.float(), self.step.to(stored.device))

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name."""
        return {"centre": self.centre, "step": self.step}


@dataclass(frozen=True)
class Codes:
    """Keys cut into pieces, each piece a byte: the number of the nearest entry in the piece's book."""

    books: Tensor  # (W, 256, d) float32, D = W · d
    kind = "codes"
    dtype = "uint8"
    _flat: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.books.ndim != 3 or self.books.shape[1] != BOOK or 0 in self.books.shape:
            raise ParameterError(f"Codes have books (W, {BOOK}, d), not {_shapes(self.tensors())}.")
        if not self.books.isfinite().all():
            raise ParameterError("The books of codes must be finite.")

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self.books.shape[0] * self.books.shape[2]

    @property
    def columns(self) -> int:
        """One byte a piece."""
        return self.books.shape[0]

    @property
    def largest(self) -> float:
        """The largest number in any book."""
        return float(self.books.abs().max())

    def encode(self, keys: Tensor) -> Tensor:
        """Find the nearest entry for each piece."""
        return nearest_entries(keys, self.books.to(keys.device)).to(torch.uint8)

    def decode(self, stored: Tensor, scale: float) -> Tensor:  # noqa: ARG002  (entries are in full size)
        """Put the entries side by side."""
        books = self._on(stored.device)
        places = stored.long() + torch.arange(self.columns, device=stored.device) * BOOK  # (n, W)
        return books.index_select(0, places.flatten()).reshape(len(stored), self.width)

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name."""
        return {"books": self.books}

    def _on(self, device: torch.device) -> Tensor:
        """Give all entries of all books, one below another, where they are needed."""
        if device not in self._flat:
            self._flat[device] = self.books.to(device).reshape(self.columns * BOOK, -1).contiguous()
        return self._flat[device]


KINDS: dict[str, Any] = {Bytes.kind: Bytes, Codes.kind: Codes}


def nearest_entries(keys: Tensor, books: Tensor) -> Tensor:
    """Say which entry of its book is nearest to each piece, (n, D) and (W, E, d) → (n, W); the first of equals."""
    pieces, entries, size = books.shape
    halves = books.square().sum(2) / 2  # |piece - entry|² = |piece|² - 2 (piece · entry - |entry|² / 2)
    found = torch.empty(len(keys), pieces, dtype=torch.int64, device=keys.device)
    step = max(1, _SCORES // (4 * entries)) if keys.device.type == "cpu" else max(1, _SCORES)
    for begin in range(0, len(keys), step):
        block = keys[begin : begin + step].float()
        for number in range(pieces):
            piece = block[:, number * size : (number + 1) * size]
            scores = torch.addmm(halves[number], piece, books[number].T, beta=-1)
            # On a CPU, numpy finds the largest six times faster than torch does.
            best = scores.argmax(1) if scores.is_cuda else torch.from_numpy(scores.cpu().numpy().argmax(1))
            found[begin : begin + step, number] = best
    return found


def save_codec(codec: Bytes | Codes, path: Path) -> dict[str, Any]:
    """Write the parameters so that they are there completely or not at all; give what the catalog is to know."""
    with replacing(path) as partial:
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in codec.tensors().items()}, partial)
        except SafetensorError as error:
            raise OSError(str(error)) from None
    return {"kind": codec.kind, "sha256": checksum(path)}


def load_codec(path: Path, fact: Any, *, width: int) -> Codec:
    """Read the parameters of keys of this width after checking that they are those that the catalog means."""
    advice = "Make the memory again, or restore the file."
    facts = fact if isinstance(fact, dict) else {}
    kind = KINDS.get(str(facts.get("kind")))
    if kind is None:
        raise DatastoreCorrupt(f"{path.parent} does not say properly how its keys are stored. {advice}")
    check_place(path.parent, path)
    if not path.is_file():
        raise DatastoreCorrupt(f"{path} is missing. {advice}")
    if checksum(path) != facts.get("sha256"):
        raise DatastoreCorrupt(f"{path} is not the codec that this memory was made with. {advice}")
    try:
        tensors = load_file(path)
        if {tensor.dtype for tensor in tensors.values()} != {torch.float32}:
            raise ParameterError("its numbers are not float32")
        codec: Codec = kind(**tensors)
    except (SafetensorError, TypeError, ParameterError) as error:
        raise DatastoreCorrupt(f"{path} is not a readable codec ({error}). {advice}") from None
    if codec.width != width:
        raise DatastoreCorrupt(f"{path} is for keys of width {codec.width}, but those here have {width}. {advice}")
    return codec


def row_bytes(codec: Codec) -> int:
    """Say how many bytes a stored key takes."""
    return codec.columns * np.dtype(codec.dtype).itemsize


def _shapes(tensors: dict[str, Tensor]) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors.values())
