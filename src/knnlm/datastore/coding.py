"""Choose how keys are stored, and fit it to some of them. Knows nothing about files.

float16, float32     numbers as they are
int8                 a byte a dimension, with a centre and a step for each
codes, codes48       that many bytes a key (64 unless said): the key is turned to its principal components, these are
                     dealt out to pieces of equal size so that every piece varies as much, and a piece is a byte
pca256-int8          so many principal components of a key, stored as bytes, or as codes: pca256-codes48
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.datastore.codec import BOOK, LEVELS, Bytes, Codes, nearest_entries
from knnlm.datastore.components import components_of
from knnlm.datastore.keymap import KeyMap
from knnlm.errors import ParameterError

_FORM = re.compile(r"float16|float32|(?:pca(?P<components>[1-9]\d{0,5})-)?(?P<kind>int8|codes(?P<bytes>[1-9]\d{0,4})?)")
_BYTES = 64
_USUAL, _HEADROOM = 0.9999, 1.25  # bytes end at this many times what this share of keys stays below
_SMALLEST = 1e-20  # step of a dimension that does not vary
TRAINED = 16_384  # keys that books are made of: 64 for each entry
_ROUNDS = 10  # of k-means; more of them gain less than a thousandth
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
    """Make a book for each piece of the keys by k-means."""
    width = sample.shape[1]
    assert width % pieces == 0, (width, pieces)
    if len(sample) > TRAINED:
        sample = sample[torch.linspace(0, len(sample) - 1, TRAINED, dtype=torch.float64, device=sample.device).long()]
    generator = torch.Generator().manual_seed(_SEED)
    entries = min(BOOK, len(sample))
    first = sample[torch.randperm(len(sample), generator=generator)[:entries].to(sample.device)].float()
    books = first.reshape(entries, pieces, width // pieces).transpose(0, 1).contiguous()  # (W, E, d)
    for _ in range(_ROUNDS):
        books = _moved(sample, books)
    # Every byte names an entry, also in a damaged file.
    rest = books[:, :1].expand(-1, BOOK - entries, -1)
    return Codes(torch.cat([books, rest], 1).cpu().contiguous())


def _moved(sample: Tensor, books: Tensor) -> Tensor:
    """Move every entry to the mean of the pieces that are nearest to it: one round of k-means."""
    pieces, entries, size = books.shape
    places = nearest_entries(sample, books)  # (n, W)
    places += torch.arange(pieces, device=places.device) * entries
    sums = torch.zeros(pieces * entries, size, device=sample.device)
    sums.index_add_(0, places.flatten(), sample.float().reshape(-1, size))
    counts = places.flatten().bincount(minlength=pieces * entries)
    means = (sums / counts[:, None].clamp(min=1)).reshape(pieces, entries, size)
    empty = (counts == 0).reshape(pieces, entries)
    if empty.any():
        # An entry that nobody is near to goes beside one that many are near to, to share them with it.
        crowded = counts.reshape(pieces, entries).argsort(stable=True, dim=1, descending=True)
        rank = empty.cumsum(1) - 1
        beside = means.gather(1, crowded.gather(1, rank.clamp(min=0))[..., None].expand(-1, -1, size))
        means = torch.where(empty[..., None], beside * (1 + 1e-3) + 1e-6, means)
    return means


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
    return KeyMap(key_map.matrix[:, order].contiguous(), key_map.centre, key_map.facts)
