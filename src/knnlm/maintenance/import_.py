"""Import the raw arrays of other programs as a store.

knn-transformers and fairseq's knnlm write two memory maps without a header: keys (N, D) and tokens (N,). Their sizes
and types are in file names and flags, so they are derived here from the lengths of the files, and refused where these
do not fit the model. The arrays contain no documents: an import is one document, or one for each segment.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import CATALOG_FILE, KEYS_FILE, VALUES_FILE, SegmentRow, StoredDocument, segment_folder
from knnlm.datastore.segments import NewSegment
from knnlm.datastore.store import Datastore, check_folder
from knnlm.errors import DatastoreError, ModelMismatch, ParameterError
from knnlm.io import remove_unlisted
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.progress import Progress, silent

# The token types that each program writes; keys are float16 or float32 in both.
FORMATS: dict[str, tuple[str, ...]] = {"knn-transformers": ("int32",), "fairseq": ("int64", "int32", "int16")}
KEY_TYPES = ("float16", "float32")
VALUE_TYPES = ("int64", "int32", "int16")
SEGMENT_ENTRIES = 1 << 20

_CHUNK_BYTES = 1 << 24
_SAMPLE_POSITIONS = 128  # positions that the model reads again
_MIN_AGREEMENT = 0.5  # share of the sampled positions that must be nearest to their own key


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    store: Path
    tokens: int
    key_dtype: str
    value_dtype: str
    agreement: float | None  # share of sampled positions whose key the model reproduces; None if not checked
    seconds: float


@dataclass(frozen=True)
class RawArrays:
    """The two files, with types and sizes that fit each other."""

    keys: NDArray[Any]  # (N, D)
    values: NDArray[Any]  # (N,)


def import_arrays(
    keys: str | Path,
    values: str | Path,
    *,
    out: str | Path,
    lm: CausalLM,
    format: str = "knn-transformers",  # noqa: A002  (the option's name)
    entries: int | None = None,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
    window: WindowShape | None = None,
    segment_entries: int = SEGMENT_ENTRIES,
    check: bool = True,
    progress: Progress = silent,
) -> ImportResult:
    """Write the arrays of another program as a store of this model, resuming an unfinished import.

    `entries` is the number that was written, where the files are larger. Types are derived from the lengths of the
    files where only one fits. With `check` the model reads a sample again.
    """
    lm.require_text("An import")
    begin, folder = time.perf_counter(), Path(out)
    dtypes = {"key_dtype": key_dtype, "value_dtype": value_dtype}
    arrays = open_arrays(Path(keys), Path(values), width=lm.width, format=format, entries=entries, **dtypes)
    if segment_entries < 1:
        raise ParameterError(f"segment_entries must be at least 1, not {segment_entries}.")
    shape = window or lm.window()
    agreement = check_sample(arrays, lm, window=shape, name=str(keys)) if check else None
    check_folder(folder)
    count = len(arrays.values)
    with writer_lock(folder, create=True):
        origin = {"format": format, "keys": Path(keys).name, "values": Path(values).name, "entries": count}
        with closing(_open_catalog(folder, lm, window=shape, arrays=arrays, origin=origin)) as catalog:
            _Import(folder, catalog, arrays, source=Path(keys), vocab_size=lm.vocab_size).run(segment_entries, progress)
            # The file names are needed for resuming only, and must not outlive a removed document.
            catalog.put(state="complete", derived={"import": {"format": format, "entries": count}})
    Datastore.open(folder).close()
    found = arrays.keys.dtype.name, arrays.values.dtype.name
    return ImportResult(folder, count, *found, agreement, time.perf_counter() - begin)


def open_arrays(
    keys: Path,
    values: Path,
    *,
    width: int,
    format: str,  # noqa: A002
    entries: int | None = None,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
) -> RawArrays:
    """Map both files, with types and a number of entries that fit their lengths; raise before anything is read."""
    if format not in FORMATS:
        raise ParameterError(f"Unknown format {format!r}: use {' or '.join(FORMATS)}.")
    for name, dtype, known in (("keys", key_dtype, KEY_TYPES), ("values", value_dtype, VALUE_TYPES)):
        if dtype is not None and dtype not in known:
            raise ParameterError(f"Unknown type {dtype!r} of {name}: use {' or '.join(known)}.")
    sizes = [_file_size(path) for path in (keys, values)]
    fitting = [
        (key, value, count)
        for key in ([key_dtype] if key_dtype else KEY_TYPES)
        for value in ([value_dtype] if value_dtype else FORMATS[format])
        if (count := _count_entries(sizes, np.dtype(key).itemsize * width, np.dtype(value).itemsize, entries))
    ]
    if not fitting:
        raise DatastoreError(
            f"{keys} ({sizes[0]:,} bytes) and {values} ({sizes[1]:,} bytes) do not hold {entries or 'as many'} keys of "
            f"width {width:,} and tokens, in any type of {format}. Check the model, --entries, --key-dtype and "
            "--value-dtype."
        )
    if len(fitting) > 1:
        types = " or ".join(f"{key} and {value}" for key, value, _ in fitting)
        raise ParameterError(f"{keys} and {values} could be {types}. Choose with --key-dtype and --value-dtype.")
    key, value, count = fitting[0]
    return RawArrays(np.memmap(keys, key, "r", 0, (count, width)), np.memmap(values, value, "r", 0, (count,)))


def _file_size(path: Path) -> int:
    if not path.is_file():
        raise DatastoreError(f"{path}: no such file.")
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise DatastoreError(
                f"{path}: has a NumPy header, but raw arrays have none. Write the array with ndarray.tofile()."
            )
    return path.stat().st_size


def _count_entries(sizes: list[int], key_bytes: int, value_bytes: int, entries: int | None) -> int:
    """Return the number of entries if the lengths fit, else 0."""
    if entries is not None:
        return entries if entries > 0 and sizes[0] >= entries * key_bytes and sizes[1] >= entries * value_bytes else 0
    if sizes[0] % key_bytes or sizes[1] % value_bytes:
        return 0
    count = sizes[0] // key_bytes
    return count if count == sizes[1] // value_bytes else 0


def check_sample(arrays: RawArrays, lm: CausalLM, *, window: WindowShape, name: str) -> float:
    """Read the first tokens again and return the share of positions that are nearest to their own stored key.

    Raise where it is too low. Keys need not be equal: the other program may have used another start token and other
    window boundaries.
    """
    length = min(len(arrays.values), window.context, 4 * _SAMPLE_POSITIONS)
    tokens = np.asarray(arrays.values[:length]).astype(np.int64)
    _check_tokens(tokens, lm.vocab_size, first=0, name=name)
    computed = torch.empty(length, lm.width)
    for reading in lm.read([tokens.tolist()], window, logits=False):
        computed[reading.rows] = reading.keys.float().cpu()
    sample = torch.arange(length)[-_SAMPLE_POSITIONS:]  # late positions have the most context in common
    stored = torch.from_numpy(np.asarray(arrays.keys[:length]).astype(np.float32))[sample]
    centre = stored.mean(0)
    nearest = torch.cdist(computed[sample] - centre, stored - centre).argmin(1)
    # An equal key of another position counts too.
    same = (stored[nearest] == stored).all(1) | (nearest == torch.arange(len(sample)))
    share = float(same.float().mean())
    if share < _MIN_AGREEMENT:
        raise ModelMismatch(
            f"{name} does not hold the states of {lm.name} at {lm.key_layer.module}: only {share:.0%} of "
            f"{len(sample)} positions are nearest to their own key (at least {_MIN_AGREEMENT:.0%} must be). Use the "
            "model, --key-layer and --layer that the arrays were made with, or --no-check."
        )
    return share


def _check_tokens(tokens: NDArray[np.int64], vocab_size: int, *, first: int, name: str) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        raise ModelMismatch(
            f"{name}: entry {first + int(wrong[0]):,} has the token {int(tokens[wrong[0]]):,}, but the model has "
            f"{vocab_size:,}. Use the model that the arrays were made with."
        )


def _open_catalog(
    folder: Path, lm: CausalLM, *, window: WindowShape, arrays: RawArrays, origin: dict[str, Any]
) -> Catalog:
    """Create a catalog, or open that of an unfinished import of the same files."""
    settings: dict[str, Any] = {
        "model": lm.identity,
        "window": {"context": window.context, "stride": window.stride},
        "key_dtype": arrays.keys.dtype.name,
        "derived": {"import": origin},
    }
    if not (folder / CATALOG_FILE).exists():
        return Catalog.create(folder / CATALOG_FILE, {"state": "building", "offset": None, **settings})
    catalog = Catalog.open(folder / CATALOG_FILE, write=True, copying=True)
    complete = catalog.get("state") == "complete"
    if complete or any(catalog.get(name) != value for name, value in settings.items()):
        catalog.close()
        what = "already a finished store" if complete else "an unfinished store of other data"
        raise DatastoreError(f"{folder}: {what}. Choose another --out, or remove it first.")
    remove_unlisted(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
    return catalog


class _Import:
    """Copy arrays segment by segment, each with a document of its own."""

    def __init__(self, folder: Path, catalog: Catalog, arrays: RawArrays, *, source: Path, vocab_size: int) -> None:
        self._folder, self._catalog, self._arrays = folder, catalog, arrays
        self._source, self._vocab_size = source, vocab_size

    def run(self, segment_entries: int, progress: Progress) -> None:
        """Write the segments that are not committed yet."""
        total = len(self._arrays.values)
        done = len(self._catalog.segments())
        with progress("importing", total=total, unit="tokens") as advance:
            for number, first in enumerate(range(0, total, segment_entries)):
                end = min(first + segment_entries, total)
                if number >= done:
                    self._add_segment(number, first, end, several=total > segment_entries)
                advance(end - first)

    def _add_segment(self, number: int, first: int, end: int, *, several: bool) -> None:
        source = self._source
        checksums, digest = self._write_segment(NewSegment(self._folder, number), first, end)
        name = f"{source.name}:{first}-{end - 1}" if several else source.name
        document = StoredDocument(number, name, f"{source}:{first + 1}", number, first, end - first, digest)
        segment = SegmentRow(number, first, end - first, 1.0, checksums[KEYS_FILE], checksums[VALUES_FILE])
        self._catalog.add_segment(segment, [document])

    def _write_segment(self, new: NewSegment, first: int, end: int) -> tuple[dict[str, str], str]:
        """Copy entries as they are; return the checksums of the files and of the tokens."""
        keys, values = self._arrays.keys, self._arrays.values
        digest = hashlib.sha256(b"knnlm tokens\n")  # stands for the SHA-256 of the text, which is unknown
        with new.array(KEYS_FILE, keys.dtype, keys.shape[1:]) as writer:
            for begin, stop in _chunks(keys, first, end):
                chunk = np.asarray(keys[begin:stop])
                if not np.isfinite(chunk).all():
                    entry = begin + int(np.flatnonzero(~np.isfinite(chunk).all(1))[0])
                    raise DatastoreError(
                        f"{self._source}: the key of entry {entry:,} is not finite. --entries cuts the arrays."
                    )
                writer.append(chunk)
        with new.array(VALUES_FILE, "int32") as writer:
            for begin, stop in _chunks(values, first, end):
                tokens = np.asarray(values[begin:stop]).astype(np.int64)
                _check_tokens(tokens, self._vocab_size, first=begin, name=str(self._source))
                digest.update(tokens.astype("<i4").tobytes())
                writer.append(tokens)
        return new.seal(), digest.hexdigest()


def _chunks(array: NDArray[Any], first: int, end: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)
