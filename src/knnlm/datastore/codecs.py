"""How keys are stored: as numbers, a byte a dimension or codes; and the linear map that they may go through first.

A codec turns (n, D) float32 keys into an (n, W) array, and back. `Plain` numbers are divided by the scale of their
segment. `Bytes` and `Codes` have parameters fitted to a sample of keys, in a file beside the catalog. A `KeyMap` is
key' = (key - centre) @ matrix.

float16, float32     numbers as they are
int8                 a byte a dimension, with a centre and a step for each
codes, codes48       product quantisation with that many bytes a key (64 by default), after a rotation to principal
                     components that are distributed so that every piece has the same variance
pca256-int8          so many principal components of a key as bytes, or as codes: pca256-codes48
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from knnlm.datastore.validation import check_place
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.index.base import even_sample
from knnlm.io import atomic_write, checksum


@dataclass(frozen=True)
class KeyMap:
    """Where keys go, and what is worth knowing about how that was chosen."""

    matrix: Tensor  # (D, D') float32
    centre: Tensor  # (D,) float32
    metadata: dict[str, Any] = field(default_factory=dict)
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
        """Return matrix and centre where they are needed; they are moved there once."""
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
        metadata = {**self.metadata, "after": first.metadata}
        return KeyMap((inner @ outer).float(), (first.centre.double() + before).float(), metadata)

    def save(self, path: Path) -> str:
        """Write the map so that it is there completely or not at all, and return the hash of the file."""
        tensors = {"matrix": self.matrix.float(), "centre": self.centre.float()}
        with atomic_write(path) as partial:
            try:
                save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
            except SafetensorError as error:
                raise OSError(str(error)) from None
        return checksum(path)

    @classmethod
    def load(cls, path: Path, *, sha256: str, metadata: dict[str, Any]) -> KeyMap:
        """Read a map after checking that it is the one that the catalog means."""
        advice = "Make the store again, or restore the file."
        check_place(path.parent, path)
        if not path.is_file():
            raise DatastoreCorrupt(f"{path} is missing. {advice}")
        if checksum(path) != sha256:
            raise DatastoreCorrupt(f"{path} is not the map of keys that this store was made with. {advice}")
        try:
            tensors = load_file(path)
            if {tensors["matrix"].dtype, tensors["centre"].dtype} != {torch.float32}:
                raise ParameterError("its numbers are not float32")
            return cls(tensors["matrix"], tensors["centre"], metadata)
        except (SafetensorError, KeyError, ParameterError) as error:
            raise DatastoreCorrupt(f"{path} is not a readable map of keys ({error}). {advice}") from None


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
        """Return the keys in float32."""
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
        """The end of the max_k dimension."""
        return float((self.centre.abs() + LEVELS * self.step).max())

    def encode(self, keys: Tensor) -> Tensor:
        """Round each dimension to its nearest step; what lies beyond the last one becomes that."""
        steps = (keys.float() - self.centre.to(keys.device)) / self.step.to(keys.device)
        return steps.round_().clamp_(-LEVELS, LEVELS).to(torch.int8)

    def decode(self, stored: Tensor, scale: float) -> Tensor:  # noqa: ARG002  (steps are scale enough)
        """Return the middle of each step."""
        return torch.addcmul(self.centre.to(stored.device), stored.float(), self.step.to(stored.device))

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
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
        """Return the parameters by name."""
        return {"books": self.books}

    def _on(self, device: torch.device) -> Tensor:
        """Return all entries of all books, one below another, where they are needed."""
        if device not in self._flat:
            self._flat[device] = self.books.to(device).reshape(self.columns * BOOK, -1).contiguous()
        return self._flat[device]


KINDS: dict[str, Any] = {Bytes.kind: Bytes, Codes.kind: Codes}


def nearest_entries(keys: Tensor, books: Tensor) -> Tensor:
    """Return which entry of its book is nearest to each piece, (n, D) and (W, E, d) → (n, W); the first of equals."""
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
    with atomic_write(path) as partial:
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in codec.tensors().items()}, partial)
        except SafetensorError as error:
            raise OSError(str(error)) from None
    return {"kind": codec.kind, "sha256": checksum(path)}


def load_codec(path: Path, fact: Any, *, width: int) -> Codec:
    """Read the parameters of keys of this width after checking that they are those that the catalog means."""
    advice = "Make the store again, or restore the file."
    metadata = fact if isinstance(fact, dict) else {}
    kind = KINDS.get(str(metadata.get("kind")))
    if kind is None:
        raise DatastoreCorrupt(f"{path.parent} does not say properly how its keys are stored. {advice}")
    check_place(path.parent, path)
    if not path.is_file():
        raise DatastoreCorrupt(f"{path} is missing. {advice}")
    if checksum(path) != metadata.get("sha256"):
        raise DatastoreCorrupt(f"{path} is not the codec that this store was made with. {advice}")
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
    """Return how many bytes a stored key takes."""
    return codec.columns * np.dtype(codec.dtype).itemsize


def _shapes(tensors: dict[str, Tensor]) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors.values())


_FORM = re.compile(r"float16|float32|(?:pca(?P<components>[1-9]\d{0,5})-)?(?P<kind>int8|codes(?P<bytes>[1-9]\d{0,4})?)")

_BYTES = 64

_USUAL, _HEADROOM = 0.9999, 1.25  # bytes end at this many times what this share of keys stays below

_SMALLEST = 1e-20  # step of a dimension that does not vary

TRAINED = 16_384  # keys that books are made of: 64 for each entry

_ITERATIONS = 10  # of k-means; more of them gain less than a thousandth

_SEED = 0

_BLOCK = 4096  # keys at a time


@dataclass(frozen=True)
class Storage:
    """A way of storing keys, as it is asked for."""

    kind: str  # float16, float32, int8 or codes
    components: int | None = None  # principal components that are kept; None: keys as they are
    bytes: int = _BYTES  # of a key in codes

    @property
    def fitted(self) -> bool:
        """Whether keys must be seen before one can be stored."""
        return self.kind in ("int8", "codes")

    @property
    def dtype(self) -> str:
        """The dtype of what is stored."""
        return "uint8" if self.kind == "codes" else self.kind

    def __str__(self) -> str:
        name = f"codes{self.bytes}" if self.kind == "codes" else self.kind
        return name if self.components is None else f"pca{self.components}-{name}"


def parse_storage(text: str, *, width: int | None = None) -> Storage:
    """Read a way of storing keys, of this width if that is known."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ParameterError(
            f"Unknown way to store keys {text!r}: use float16, float32, int8, codes, codes48 (bytes a key), or "
            "pca256-int8 (so many principal components of a key)."
        )
    if found["kind"] is None:
        return Storage(found[0])
    components = None if found["components"] is None else int(found["components"])
    kind = "codes" if found["kind"].startswith("codes") else "int8"
    storage = Storage(kind, components, int(found["bytes"] or _BYTES))
    left = width if components is None else components
    if width is not None and components is not None and components > width:
        raise ParameterError(f"{text} asks for {components} components, but keys have only {width} dimensions.")
    if left is not None and storage.kind == "codes" and storage.bytes > left:
        if found["bytes"] is not None:
            raise ParameterError(f"{text} asks for {storage.bytes} bytes a key, but there are {left} dimensions.")
        storage = Storage(storage.kind, components, left)
    return storage


def fit_codec(storage: Storage, sample: Tensor) -> tuple[KeyMap | None, Bytes | Codes]:
    """Fit what a way of storing needs to (n, D) keys: the map that they go through first, if any, and the codec."""
    assert storage.fitted
    assert len(sample)
    if storage.kind == "codes":
        turned = _dealt(sample, storage.components or sample.shape[1], storage.bytes)
        return turned, fit_codes(turned.apply(sample), storage.bytes)
    if storage.components is None:
        return None, fit_bytes(sample)
    fewer, _ = components_of(sample.split(_BLOCK), storage.components, sample=len(sample))
    return fewer, fit_bytes(fewer.apply(sample))


def fit_bytes(sample: Tensor) -> Bytes:
    """Let the steps of each dimension reach as far as nearly all keys do: one enormous key must not widen them."""
    centre = sample.double().mean(0).float()
    sizes = (sample - centre).abs_()
    place = max(1, round((1 - _USUAL) * len(sizes)))
    usual = sizes.topk(place, dim=0).values[-1]
    reach = torch.minimum(sizes.amax(0), _HEADROOM * usual)
    return Bytes(centre, (reach / LEVELS).clamp(min=_SMALLEST))


def fit_codes(sample: Tensor, pieces: int) -> Codes:
    """Fit a product quantiser: 256 entries for each piece of the keys."""
    from knnlm.index.faiss import train_product_quantiser  # FAISS takes a while to import, and few stores need it

    if len(sample) > TRAINED:
        sample = sample[even_sample(len(sample), TRAINED).to(sample.device)]
    return Codes(train_product_quantiser(sample.float().cpu(), pieces, seed=_SEED, iterations=_ITERATIONS))


def _dealt(sample: Tensor, components: int, pieces: int) -> KeyMap:
    """Turn keys to their principal components, dealt out so that the product of variances is alike in all pieces.

    That is where the error of all codes together is least, for keys that are normally distributed (Ge et al. 2013,
    "Optimized Product Quantization"). What does not fill the pieces evenly is left out: it varies least.
    """
    size = components // pieces
    key_map, variances = components_of(sample.split(_BLOCK), size * pieces, sample=len(sample))
    logs = variances.clamp(min=1e-30).log()
    hands: list[list[int]] = [[] for _ in range(pieces)]
    sums = [0.0] * pieces
    # The largest first, each to the piece that has least; logarithms of small variances are negative, so count from
    # the smallest of all.
    logs = logs - logs.min()
    for component, log in enumerate(logs.tolist()):
        piece = min((one for one in range(pieces) if len(hands[one]) < size), key=lambda one: (sums[one], one))
        hands[piece].append(component)
        sums[piece] += log
    order = torch.tensor([component for hand in hands for component in hand])
    return KeyMap(key_map.matrix[:, order].contiguous(), key_map.centre, key_map.metadata)


def components_of(blocks: Iterable[Tensor], width: int, **metadata: Any) -> tuple[KeyMap, Tensor]:
    """Find the map to the directions in which (n, D) keys vary most, in float64, and their (width,) variances."""
    count = 0
    for block in blocks:
        keys = block.double()
        if not count:
            # Less the first block's mean from the start: sums of squares lose digits where keys are far from zero.
            origin = keys.mean(0)
            total, squares = torch.zeros_like(origin), origin.new_zeros(len(origin), len(origin))
        keys = keys - origin
        total += keys.sum(0)
        squares.addmm_(keys.T, keys)
        count += len(keys)
    mean = total / count
    variances, vectors = torch.linalg.eigh(squares / count - torch.outer(mean, mean))  # ascending
    variances = variances.clamp(min=0)
    matrix = vectors[:, -width:].flip(1)
    # A direction has no sign of its own; choose one, so that the same keys give the same bytes.
    matrix = matrix * matrix.gather(0, matrix.abs().argmax(0, keepdim=True)).sign()
    explained = float(variances[-width:].sum() / variances.sum().clamp(min=1e-300))
    about = {"kind": "principal components", "explained_variance": explained, **metadata}
    return KeyMap(matrix.float(), (mean + origin).float(), about), variances[-width:].flip(0)
