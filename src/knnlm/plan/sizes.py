"""Sizes of a store in bytes, by the format of its files: exact, except for the catalog's rows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from knnlm.datastore.codecs import CODEBOOK_SIZE, Storage, parse_storage
from knnlm.index.base import training_sample_size
from knnlm.index.blocks import parse_spec
from knnlm.index.blocks.build import MAX_CODE_WIDTH
from knnlm.index.blocks.index import PROBES
from knnlm.index.factory import compressed_spec, default_spec, inverted_lists
from knnlm.lm.windows import WindowShape

VALUE_BYTES = 4
SEGMENT_ENTRIES = {"cpu": 16_384, "cuda": 1 << 20}

_HEADER_BYTES = 128  # of a .npy file
_CATALOG_BYTES = 43_000  # of a catalog without documents: SQLite's pages and the description of the model
_DOCUMENT_BYTES = 230  # of a catalog: a row with two checksums, in the table and two indexes
_SEGMENT_BYTES = 260
_CODEC_HEADER = 200  # of a safetensors file
_PCA_WIDTH, _PCA_CODE_BYTES, _ID_BYTES = 80, 20, 8  # of the index for stores of codes
_FAISS_BLOCK = 32  # keys that a list of codes is padded to
_MAX_SAMPLE_BYTES = 1 << 28  # of an index's training vectors


@dataclass(frozen=True)
class ModelShape:
    """What the cost of a model depends on."""

    name: str
    width: int  # of a key
    parameters: int
    body_parameters: int  # without embeddings and the output matrix, which a build does not use
    layers: int = 1
    attention_width: int = 0  # of all heads together
    window: WindowShape = field(default_factory=WindowShape)

    def flops(self, document_tokens: float) -> float:
        """Return the floating-point operations for one token that is read, without the output matrix."""
        context = min(document_tokens, self.window.context)
        return 2 * self.body_parameters + 4 * self.layers * self.attention_width * context


@dataclass(frozen=True)
class TextShape:
    """How much text, in documents of which length."""

    tokens: float
    document_tokens: float = 1000.0  # on average
    equal: bool = False  # all documents have that length; otherwise lengths are distributed exponentially

    @property
    def documents(self) -> float:
        """The number of documents."""
        return max(1.0, self.tokens / self.document_tokens)

    def read_tokens(self, window: WindowShape) -> float:
        """Return how many tokens the model reads: windows overlap, so those of long documents are read again."""
        length = min(self.document_tokens, self.tokens)
        overlap = window.context - window.stride
        # There is a window after the j-th if a document is longer than context + (j - 1) stride.
        if self.equal:
            again = max(0.0, math.ceil((length - window.context) / window.stride))
        else:
            again = math.exp(-window.context / length) / -math.expm1(-window.stride / length)
        return self.tokens + self.documents * overlap * again


def key_bytes(storage: Storage, width: int) -> int:
    """Return the bytes of one stored key."""
    if storage.kind == "codes":
        return storage.bytes
    numbers = storage.components or width
    return numbers * {"float32": 4, "float16": 2, "int8": 1}[storage.kind]


def stored_width(storage: Storage, width: int) -> int:
    """Return the number of dimensions of a decoded key: components that do not fill the codes evenly are dropped."""
    kept = storage.components or width
    return kept // storage.bytes * storage.bytes if storage.kind == "codes" else kept


def codec_bytes(storage: Storage, width: int) -> int:
    """Return the bytes of the key map and the codec."""
    if not storage.fitted:
        return 0
    kept = stored_width(storage, width)
    has_map = storage.kind == "codes" or storage.components is not None
    codec = 4 * kept * CODEBOOK_SIZE if storage.kind == "codes" else 8 * kept
    return codec + _CODEC_HEADER + (4 * width * (kept + 1) + _CODEC_HEADER if has_map else 0)


def store_bytes(text: TextShape, model: ModelShape, storage: Storage, *, device: str = "cpu") -> float:
    """Return the bytes of a store without an index: segments, codec and catalog."""
    segments = math.ceil(text.tokens / SEGMENT_ENTRIES[device])
    entries = text.tokens * (key_bytes(storage, model.width) + VALUE_BYTES)
    catalog = _CATALOG_BYTES + text.documents * _DOCUMENT_BYTES + segments * _SEGMENT_BYTES
    return entries + segments * 2 * _HEADER_BYTES + codec_bytes(storage, model.width) + catalog


@dataclass(frozen=True)
class IndexShape:
    """An index as `auto` builds it: what its size and its time depend on."""

    spec: str
    keys: float
    width: int  # of a key
    lists: int = 0
    block: int = 0  # keys of a full block
    segment: int = SEGMENT_ENTRIES["cpu"]  # keys of a segment of the store

    @property
    def kind(self) -> str:
        """exact, blocks or codes."""
        return "exact" if self.spec == "exact" else "blocks" if self.block else "codes"

    @property
    def possible(self) -> bool:
        """Whether the index can be built: a spec names blocks of up to six digits."""
        return self.kind != "blocks" or parse_spec(self.spec) is not None

    @property
    def code_width(self) -> int:
        """The number of stored dimensions."""
        return min(self.width, MAX_CODE_WIDTH)

    @property
    def blocks(self) -> float:
        """The expected number of blocks: the last block of each list is half full on average."""
        return min(self.keys, self.keys / self.block + self.lists / 2)

    @property
    def probes(self) -> float:
        """The number of blocks that a query searches."""
        return min(PROBES, self.blocks)

    @property
    def near_blocks(self) -> float:
        """The number of blocks that a key is compared with when it is moved."""
        return self.blocks * min(1.0, 65 / max(1, self.lists))

    @property
    def split_levels(self) -> float:
        """How many times a list is divided in two."""
        return math.log2(max(1.0, self.blocks / max(1, self.lists)))

    @property
    def sample(self) -> float:
        """The number of keys that the index is trained on."""
        return min(self.keys, training_sample_size(self.lists), _MAX_SAMPLE_BYTES // (4 * self.width))

    def touched_blocks(self, queries: float) -> float:
        """Return how many different blocks a batch of queries reads, if queries choose blocks independently."""
        if not self.blocks:
            return 0.0
        missed = math.log1p(-min(self.probes / self.blocks, 1 - 1e-12)) * queries
        return -self.blocks * math.expm1(missed)

    @property
    def bytes(self) -> float:
        """The size of the index file."""
        if self.kind == "exact":
            return 0.0
        if self.kind == "blocks":
            ids = 4 if self.keys < 1 << 31 else 8
            arrays = self.blocks * (4 * self.code_width + 4 + 8 * self.block)
            frame = 4 * self.width * (self.code_width + 1)
            return self.keys * ids + (self.keys + self.block) * self.code_width + arrays + frame + 9 * _HEADER_BYTES
        padding = self.lists * _FAISS_BLOCK / 2 * _PCA_CODE_BYTES
        centroids = self.lists * _PCA_WIDTH * 4
        frame = 4 * self.width * (self.width + _PCA_WIDTH + 2)  # all components are stored, not only those in use
        return self.keys * (_PCA_CODE_BYTES + _ID_BYTES) + padding + centroids + frame


def automatic_index(keys: float, width: int, storage: Storage, *, device: str = "cpu") -> IndexShape:
    """Return the index that `knnlm index --index auto` builds over a store that was built on a device."""
    segment = SEGMENT_ENTRIES[device]
    width = stored_width(storage, width)
    count = max(1, round(keys))
    if storage.kind == "codes":
        spec = compressed_spec(count, width)
        return IndexShape(spec, keys, width, 0 if spec == "exact" else inverted_lists(count), segment=segment)
    spec = default_spec(count)
    lists, block = (0, 0) if spec == "exact" else (int(number) for number in re.findall(r"\d+", spec))
    return IndexShape(spec, keys, width, lists, block, segment)


def formats(width: int) -> list[Storage]:
    """Return the key formats that a plan compares, largest first."""
    names = ["float32", "float16", "int8", *(["pca256-int8"] if width > 256 else []), "codes"]
    return [parse_storage(name, width=width) for name in names]
