"""Codecs, which store keys as numbers, bytes or codes, and the linear map that may be applied to keys before.

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

from knnlm.datastore.validation import check_regular_file
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.index.base import even_sample
from knnlm.io import atomic_write, checksum

LEVELS = 127  # of int8 on either side of zero
CODEBOOK_SIZE = 256  # entries that a byte can number
TRAINING_KEYS = 16_384  # keys that codebooks are trained on: 64 for each entry

_STORAGE_PATTERN = re.compile(
    r"float16|float32|(?:pca(?P<components>[1-9]\d{0,5})-)?(?P<kind>int8|codes(?P<bytes>[1-9]\d{0,4})?)"
)
_DEFAULT_CODE_BYTES = 64
_COVERED_SHARE, _HEADROOM = 0.9999, 1.25  # int8 reaches to this many times what this share of keys stays below
_MIN_STEP = 1e-20  # of a dimension that does not vary
_ITERATIONS = 10  # of k-means; more iterations gain less than a thousandth
_SEED = 0
_BLOCK = 4096  # keys at a time
_SCORE_BYTES = 1 << 22  # of distances to codebook entries at a time: they stay in the processor's cache


@dataclass(frozen=True)
class KeyMap:
    """A linear map of keys, with metadata on how it was chosen."""

    matrix: Tensor  # (D, D') float32
    centre: Tensor  # (D,) float32
    metadata: dict[str, Any] = field(default_factory=dict)
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2 or self.centre.shape != self.matrix.shape[:1] or 0 in self.matrix.shape:
            raise ParameterError(
                f"A key map has a matrix (D, D') and a centre (D,), not {tuple(self.matrix.shape)} and "
                f"{tuple(self.centre.shape)}."
            )
        if not (self.matrix.isfinite().all() and self.centre.isfinite().all()):
            raise ParameterError("The numbers of a key map must be finite.")

    @property
    def width(self) -> int:
        """D', the number of dimensions of a mapped key."""
        return self.matrix.shape[1]

    def apply(self, keys: Tensor) -> Tensor:
        """Map (…, D) keys."""
        matrix, centre = self.on(keys.device)
        return (keys.float() - centre) @ matrix

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return matrix and centre on a device; they are copied there once."""
        if device not in self._placed:
            self._placed[device] = (self.matrix.to(device, torch.float32), self.centre.to(device, torch.float32))
        return self._placed[device]

    def after(self, first: KeyMap | None) -> KeyMap:
        """Return the composition: `first`, then this map."""
        if first is None:
            return self
        inner, outer = first.matrix.double(), self.matrix.double()
        # This centre is subtracted between the two maps; the composition subtracts centre' before both, where
        # centre' @ inner = centre. It exists, as this centre is a mean of keys that `inner` has mapped.
        before = torch.linalg.lstsq(inner.T, self.centre.double()[:, None], driver="gelsd").solution[:, 0]
        metadata = {**self.metadata, "after": first.metadata}
        return KeyMap((inner @ outer).float(), (first.centre.double() + before).float(), metadata)

    def save(self, path: Path) -> str:
        """Write the map atomically and return the SHA-256 of the file."""
        tensors = {"matrix": self.matrix.float(), "centre": self.centre.float()}
        with atomic_write(path) as partial:
            try:
                save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
            except SafetensorError as error:
                raise OSError(str(error)) from None
        return checksum(path)

    @classmethod
    def load(cls, path: Path, *, sha256: str, metadata: dict[str, Any]) -> KeyMap:
        """Read a map whose checksum must be that of the catalog."""
        advice = "Build the store again, or restore the file."
        check_regular_file(path.parent, path)
        if not path.is_file():
            raise DatastoreCorrupt(f"{path} is missing. {advice}")
        if checksum(path) != sha256:
            raise DatastoreCorrupt(f"{path}: checksum mismatch (SHA-256). {advice}")
        try:
            tensors = load_file(path)
            if {tensors["matrix"].dtype, tensors["centre"].dtype} != {torch.float32}:
                raise ParameterError("its numbers are not float32")
            return cls(tensors["matrix"], tensors["centre"], metadata)
        except (SafetensorError, KeyError, ParameterError) as error:
            raise DatastoreCorrupt(f"{path}: not a readable key map ({error}). {advice}") from None


class Codec(Protocol):
    """Encodes keys for storage and decodes them."""

    @property
    def dtype(self) -> str:
        """The dtype of stored keys."""

    @property
    def width(self) -> int:
        """D, the number of dimensions of a key."""

    @property
    def columns(self) -> int:
        """W, the number of stored numbers of a key."""

    @property
    def largest(self) -> float:
        """An upper bound of the absolute values of decoded keys; inf where it depends on the keys."""

    def encode(self, keys: Tensor) -> Tensor:
        """Encode finite (n, D) keys as (n, W), on the device of the keys."""

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """Decode (n, W) to (n, D) float32 keys; `scale` is that of their segment."""


@dataclass(frozen=True)
class Plain:
    """Keys as numbers, divided by the scale of their segment."""

    dtype: str  # float16 or float32
    width: int

    @property
    def columns(self) -> int:
        """One number for each dimension."""
        return self.width

    @property
    def largest(self) -> float:
        """No bound: it depends on the keys."""
        return float("inf")

    def encode(self, keys: Tensor) -> Tensor:
        """Round keys that are divided by the scale already."""
        return keys.to(getattr(torch, self.dtype))

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """Return float32 keys multiplied by the scale."""
        keys = stored.float()
        return keys if scale == 1.0 else keys.mul_(scale) if keys is not stored else keys * scale


@dataclass(frozen=True)
class Bytes:
    """One byte for each dimension: key = centre + step · byte."""

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
        """One byte for each dimension."""
        return self.width

    @property
    def largest(self) -> float:
        """The largest absolute value that a byte can stand for."""
        return float((self.centre.abs() + LEVELS * self.step).max())

    def encode(self, keys: Tensor) -> Tensor:
        """Round each dimension to its nearest step; values out of range are clamped."""
        steps = (keys.float() - self.centre.to(keys.device)) / self.step.to(keys.device)
        return steps.round_().clamp_(-LEVELS, LEVELS).to(torch.int8)

    def decode(self, stored: Tensor, scale: float) -> Tensor:  # noqa: ARG002  (the steps include the scale)
        """Return the middle of each step."""
        return torch.addcmul(self.centre.to(stored.device), stored.float(), self.step.to(stored.device))

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {"centre": self.centre, "step": self.step}


@dataclass(frozen=True)
class Codes:
    """Product quantisation: each piece of a key is stored as the number of the nearest entry in its codebook."""

    books: Tensor  # (W, 256, d) float32, D = W · d
    kind = "codes"
    dtype = "uint8"
    _flat: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.books.ndim != 3 or self.books.shape[1] != CODEBOOK_SIZE or 0 in self.books.shape:
            raise ParameterError(f"Codes have books (W, {CODEBOOK_SIZE}, d), not {_shapes(self.tensors())}.")
        if not self.books.isfinite().all():
            raise ParameterError("The codebooks of codes must be finite.")

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self.books.shape[0] * self.books.shape[2]

    @property
    def columns(self) -> int:
        """One byte for each piece."""
        return self.books.shape[0]

    @property
    def largest(self) -> float:
        """The largest absolute value in any codebook."""
        return float(self.books.abs().max())

    def encode(self, keys: Tensor) -> Tensor:
        """Return the number of the nearest entry for each piece."""
        return nearest_entries(keys, self.books.to(keys.device)).to(torch.uint8)

    def decode(self, stored: Tensor, scale: float) -> Tensor:  # noqa: ARG002  (the entries include the scale)
        """Concatenate the entries of the pieces."""
        books = self._on(stored.device)
        places = stored.long() + torch.arange(self.columns, device=stored.device) * CODEBOOK_SIZE  # (n, W)
        return books.index_select(0, places.flatten()).reshape(len(stored), self.width)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {"books": self.books}

    def _on(self, device: torch.device) -> Tensor:
        """Return the entries of all codebooks as one (W · 256, d) tensor on a device."""
        if device not in self._flat:
            self._flat[device] = self.books.to(device).reshape(self.columns * CODEBOOK_SIZE, -1).contiguous()
        return self._flat[device]


_CODECS: dict[str, Any] = {Bytes.kind: Bytes, Codes.kind: Codes}


def nearest_entries(keys: Tensor, books: Tensor) -> Tensor:
    """Return the number of the nearest codebook entry of each piece, (n, D) and (W, E, d) → (n, W).

    Among entries at the same distance, the first is chosen.
    """
    pieces, entries, size = books.shape
    halves = books.square().sum(2) / 2  # |piece - entry|² = |piece|² - 2 (piece · entry - |entry|² / 2)
    found = torch.empty(len(keys), pieces, dtype=torch.int64, device=keys.device)
    step = max(1, _SCORE_BYTES // (4 * entries)) if keys.device.type == "cpu" else max(1, _SCORE_BYTES)
    for begin in range(0, len(keys), step):
        block = keys[begin : begin + step].float()
        for number in range(pieces):
            piece = block[:, number * size : (number + 1) * size]
            scores = torch.addmm(halves[number], piece, books[number].T, beta=-1)
            # On a CPU, NumPy's argmax is six times faster than torch's.
            best = scores.argmax(1) if scores.is_cuda else torch.from_numpy(scores.cpu().numpy().argmax(1))
            found[begin : begin + step, number] = best
    return found


def save_codec(codec: Bytes | Codes, path: Path) -> dict[str, Any]:
    """Write the parameters of a codec atomically and return the codec's metadata for the catalog."""
    with atomic_write(path) as partial:
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in codec.tensors().items()}, partial)
        except SafetensorError as error:
            raise OSError(str(error)) from None
    return {"kind": codec.kind, "sha256": checksum(path)}


def load_codec(path: Path, fact: Any, *, width: int) -> Codec:
    """Read the codec for keys of this width; its checksum must be that of the catalog."""
    advice = "Build the store again, or restore the file."
    metadata = fact if isinstance(fact, dict) else {}
    kind = _CODECS.get(str(metadata.get("kind")))
    if kind is None:
        raise DatastoreCorrupt(f"{path.parent} has no valid metadata of the codec. {advice}")
    check_regular_file(path.parent, path)
    if not path.is_file():
        raise DatastoreCorrupt(f"{path} is missing. {advice}")
    if checksum(path) != metadata.get("sha256"):
        raise DatastoreCorrupt(f"{path}: checksum mismatch (SHA-256). {advice}")
    try:
        tensors = load_file(path)
        if {tensor.dtype for tensor in tensors.values()} != {torch.float32}:
            raise ParameterError("its numbers are not float32")
        codec: Codec = kind(**tensors)
    except (SafetensorError, TypeError, ParameterError) as error:
        raise DatastoreCorrupt(f"{path}: not a readable codec ({error}). {advice}") from None
    if codec.width != width:
        raise DatastoreCorrupt(f"{path}: the codec is for keys of width {codec.width}, not {width}. {advice}")
    return codec


def row_bytes(codec: Codec) -> int:
    """Return the number of bytes of a stored key."""
    return codec.columns * np.dtype(codec.dtype).itemsize


def _shapes(tensors: dict[str, Tensor]) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors.values())


@dataclass(frozen=True)
class Storage:
    """A key format, as `--key-format` names it."""

    kind: str  # float16, float32, int8 or codes
    components: int | None = None  # principal components that are kept; None: all dimensions
    bytes: int = _DEFAULT_CODE_BYTES  # of a key in codes

    @property
    def fitted(self) -> bool:
        """Whether the format has parameters that are fitted to keys."""
        return self.kind in ("int8", "codes")

    @property
    def dtype(self) -> str:
        """The dtype of stored keys."""
        return "uint8" if self.kind == "codes" else self.kind

    def __str__(self) -> str:
        name = f"codes{self.bytes}" if self.kind == "codes" else self.kind
        return name if self.components is None else f"pca{self.components}-{name}"


def parse_storage(text: str, *, width: int | None = None) -> Storage:
    """Parse a key format; `width` is that of the keys, if it is known."""
    match = _STORAGE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ParameterError(
            f"Unknown key format {text!r}: use float16, float32, int8, codes, codes48 (bytes per key), or "
            "pca256-int8 (principal components of a key)."
        )
    if match["kind"] is None:
        return Storage(match[0])
    components = None if match["components"] is None else int(match["components"])
    kind = "codes" if match["kind"].startswith("codes") else "int8"
    storage = Storage(kind, components, int(match["bytes"] or _DEFAULT_CODE_BYTES))
    left = width if components is None else components
    if width is not None and components is not None and components > width:
        raise ParameterError(f"{text} has {components} components, but keys have only {width} dimensions.")
    if left is not None and storage.kind == "codes" and storage.bytes > left:
        if match["bytes"] is not None:
            raise ParameterError(f"{text} has {storage.bytes} bytes per key, but there are only {left} dimensions.")
        storage = Storage(storage.kind, components, left)
    return storage


def fit_codec(storage: Storage, sample: Tensor) -> tuple[KeyMap | None, Bytes | Codes]:
    """Fit a key format to (n, D) keys; return the key map, if the format has one, and the codec."""
    assert storage.fitted
    assert len(sample)
    if storage.kind == "codes":
        turned = _balanced_components(sample, storage.components or sample.shape[1], storage.bytes)
        return turned, fit_codes(turned.apply(sample), storage.bytes)
    if storage.components is None:
        return None, fit_bytes(sample)
    fewer, _ = fit_components(sample.split(_BLOCK), storage.components, sample=len(sample))
    return fewer, fit_bytes(fewer.apply(sample))


def fit_bytes(sample: Tensor) -> Bytes:
    """Fit the centre and the step of each dimension.

    The range covers nearly all keys rather than all, so that a single outlier does not make the steps coarse.
    """
    centre = sample.double().mean(0).float()
    sizes = (sample - centre).abs_()
    place = max(1, round((1 - _COVERED_SHARE) * len(sizes)))
    usual = sizes.topk(place, dim=0).values[-1]
    reach = torch.minimum(sizes.amax(0), _HEADROOM * usual)
    return Bytes(centre, (reach / LEVELS).clamp(min=_MIN_STEP))


def fit_codes(sample: Tensor, pieces: int) -> Codes:
    """Fit a product quantiser with 256 entries for each piece."""
    from knnlm.index.faiss import train_product_quantiser  # FAISS takes a while to import, and few stores need it

    if len(sample) > TRAINING_KEYS:
        sample = sample[even_sample(len(sample), TRAINING_KEYS).to(sample.device)]
    return Codes(train_product_quantiser(sample.float().cpu(), pieces, seed=_SEED, iterations=_ITERATIONS))


def _balanced_components(sample: Tensor, components: int, pieces: int) -> KeyMap:
    """Return the map to principal components, distributed so that each piece has about the same product of variances.

    For normally distributed keys, that minimises the total error of the codes (Ge et al. 2013, "Optimized Product
    Quantization"). Components that do not fill the pieces evenly are dropped: they have the smallest variance.
    """
    size = components // pieces
    key_map, variances = fit_components(sample.split(_BLOCK), size * pieces, sample=len(sample))
    logs = variances.clamp(min=1e-30).log()
    assigned: list[list[int]] = [[] for _ in range(pieces)]
    sums = [0.0] * pieces
    # Largest variance first, each to the piece with the smallest sum. Logarithms of small variances are negative, so
    # they are shifted to be at least 0.
    logs = logs - logs.min()
    for component, log in enumerate(logs.tolist()):
        open_pieces = (piece for piece in range(pieces) if len(assigned[piece]) < size)
        piece = min(open_pieces, key=lambda piece: (sums[piece], piece))
        assigned[piece].append(component)
        sums[piece] += log
    order = torch.tensor([component for piece in assigned for component in piece])
    return KeyMap(key_map.matrix[:, order].contiguous(), key_map.centre, key_map.metadata)


def fit_components(blocks: Iterable[Tensor], width: int, **metadata: Any) -> tuple[KeyMap, Tensor]:
    """Return the map to the first `width` principal components of (n, D) keys, and their (width,) variances."""
    count = 0
    for block in blocks:
        keys = block.double()
        if not count:
            # Keys are shifted by the first block's mean: sums of squares lose digits where keys are far from zero.
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
    # The sign of a component is arbitrary; fix it, so that the same keys give the same bytes.
    matrix = matrix * matrix.gather(0, matrix.abs().argmax(0, keepdim=True)).sign()
    explained = float(variances[-width:].sum() / variances.sum().clamp(min=1e-300))
    about = {"kind": "principal components", "explained_variance": explained, **metadata}
    return KeyMap(matrix.float(), (mean + origin).float(), about), variances[-width:].flip(0)
