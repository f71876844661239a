"""Make a memory of the raw arrays of other programs. Knows nothing about how those programs were run.

knn-transformers and fairseq's knnlm leave two memory maps without any header: keys (N, D) and tokens (N,). Their sizes
and types are in file names and flags, so here they are worked out from the lengths of the files, and refused where
these do not fit the model. The arrays know no documents: an import is one, or one for each segment where it needs more.
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
from knnlm.datastore.paths import CATALOG_FILE, KEYS_FILE, VALUES_FILE, segment_folder
from knnlm.datastore.schema import SegmentRow, StoredDocument
from knnlm.datastore.segments import NewSegment
from knnlm.datastore.store import Datastore, check_folder
from knnlm.errors import DatastoreError, ModelMismatch, ParameterError
from knnlm.io import remove_others
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.progress import Progress, silent

# What each program writes its tokens in; keys are float16 or float32 in both.
FORMATS: dict[str, tuple[str, ...]] = {"knn-transformers": ("int32",), "fairseq": ("int64", "int32", "int16")}

KEY_TYPES = ("float16", "float32")

SEGMENT_ROWS = 1 << 20

_PIECE = 1 << 24  # bytes at a time

_SAMPLE = 128  # positions that the model reads again

_NEAREST = 0.5  # of them must be nearer to their own key than to any other of the sample


@dataclass(frozen=True)
class ImportResult:
    """What an import has made."""

    memory: Path
    tokens: int
    key_dtype: str
    value_dtype: str
    agreement: float | None  # share of sampled positions whose key the model gives again; None: not looked at
    seconds: float


@dataclass(frozen=True)
class _Arrays:
    """The two files, of types and sizes that fit each other."""

    keys: NDArray[Any]  # (N, D)
    values: NDArray[Any]  # (N,)


def import_arrays(
    keys: str | Path,
    values: str | Path,
    out: str | Path,
    *,
    lm: CausalLM,
    format: str = "knn-transformers",  # noqa: A002  (what the option is called)
    rows: int | None = None,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
    window: WindowShape | None = None,
    segment_rows: int = SEGMENT_ROWS,
    check: bool = True,
    progress: Progress = silent,
) -> ImportResult:
    """Store the arrays of another program as a memory of this model, resuming an unfinished import.

    `rows` says how many were written, where the files were made larger than that. Types are taken from the lengths of
    the files where only one fits. `check` has the model read a sample again.
    """
    begin, folder = time.perf_counter(), Path(out)
    arrays = open_arrays(
        Path(keys), Path(values), lm.width, format=format, rows=rows, key_dtype=key_dtype, value_dtype=value_dtype
    )
    if segment_rows < 1:
        raise ParameterError(f"segment rows must be at least 1, not {segment_rows}.")
    shape = window or lm.window()
    agreement = check_sample(arrays.keys, arrays.values, lm, shape, what=str(keys)) if check else None
    check_folder(folder)
    with writer_lock(folder, create=True):
        about = {"format": format, "keys": Path(keys).name, "values": Path(values).name, "rows": len(arrays.values)}
        with closing(_begin(folder, lm, shape, arrays, about)) as catalog:
            _copy(folder, catalog, arrays, Path(keys), lm.vocab_size, segment_rows, progress)
            # The names were needed to go on with the same files only, and must go when the document is forgotten.
            catalog.put(state="complete", derived={"import": {"format": format, "rows": len(arrays.values)}})
    Datastore.open(folder).close()
    types = arrays.keys.dtype.name, arrays.values.dtype.name
    return ImportResult(folder, len(arrays.values), *types, agreement, time.perf_counter() - begin)


def open_arrays(
    keys: Path,
    values: Path,
    width: int,
    *,
    format: str,  # noqa: A002
    rows: int | None = None,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
) -> _Arrays:
    """Map both files, with types and a number of rows that fit their lengths; nothing is read before that is sure."""
    if format not in FORMATS:
        raise ParameterError(f"Unknown format {format!r}: use {' or '.join(FORMATS)}.")
    for name, given, known in (("keys", key_dtype, KEY_TYPES), ("values", value_dtype, ("int64", "int32", "int16"))):
        if given is not None and given not in known:
            raise ParameterError(f"Unknown type {given!r} of {name}: use {' or '.join(known)}.")
    sizes = [_size(path) for path in (keys, values)]
    fitting = [
        (key, value, count)
        for key in ([key_dtype] if key_dtype else KEY_TYPES)
        for value in ([value_dtype] if value_dtype else FORMATS[format])
        if (count := _rows(sizes, np.dtype(key).itemsize * width, np.dtype(value).itemsize, rows))
    ]
    if not fitting:
        raise DatastoreError(
            f"{keys} ({sizes[0]:,} bytes) and {values} ({sizes[1]:,} bytes) do not hold {rows or 'as many'} keys of "
            f"width {width:,} and tokens, in any type of {format}. Are they of this model? See --rows, --key-dtype and "
            "--value-dtype."
        )
    if len(fitting) > 1:
        raise ParameterError(
            f"{keys} and {values} could be {' or '.join(f'{key} and {value}' for key, value, _ in fitting)}: say which "
            "with --key-dtype and --value-dtype."
        )
    key, value, count = fitting[0]
    return _Arrays(np.memmap(keys, key, "r", 0, (count, width)), np.memmap(values, value, "r", 0, (count,)))


def _size(path: Path) -> int:
    if not path.is_file():
        raise DatastoreError(f"There is no file {path}.")
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise DatastoreError(
                f"{path} has the header of an array of NumPy; the programs that are known write none. Take it off, or "
                "store the array with tofile()."
            )
    return path.stat().st_size


def _rows(sizes: list[int], key_bytes: int, value_bytes: int, rows: int | None) -> int:
    """Give the number of rows if the lengths fit, else 0."""
    if rows is not None:
        return rows if rows > 0 and sizes[0] >= rows * key_bytes and sizes[1] >= rows * value_bytes else 0
    if sizes[0] % key_bytes or sizes[1] % value_bytes:
        return 0
    count = sizes[0] // key_bytes
    return count if count == sizes[1] // value_bytes else 0


def check_sample(keys: NDArray[Any], values: NDArray[Any], lm: CausalLM, window: WindowShape, *, what: str) -> float:
    """Read the beginning again: most positions must be nearer to their own key than to those of others.

    The other program may have begun the text with another token and cut it elsewhere, so keys need not be equal.
    """
    length = min(len(values), window.context, 4 * _SAMPLE)
    tokens = np.asarray(values[:length]).astype(np.int64)
    _check_tokens(tokens, lm.vocab_size, 0, what)
    given = torch.empty(length, lm.width)
    for reading in lm.read([tokens.tolist()], window, logits=False):
        given[reading.rows] = reading.keys.float().cpu()
    picked = torch.arange(length)[-_SAMPLE:]  # the later, the more context both have had
    stored = torch.from_numpy(np.asarray(keys[:length]).astype(np.float32))[picked]
    centre = stored.mean(0)
    nearest = torch.cdist(given[picked] - centre, stored - centre).argmin(1)
    # A key that occurs twice is as good as oneself.
    same = (stored[nearest] == stored).all(1) | (nearest == torch.arange(len(picked)))
    share = float(same.float().mean())
    if share < _NEAREST:
        raise ModelMismatch(
            f"{what} does not hold the states of {lm.name} at {lm.key_layer.module}: only {share:.0%} of "
            f"{len(picked)} positions are nearest to their own key (at least {_NEAREST:.0%} must be). Give the model, "
            "--key-layer and --layer they were made with, or --no-check."
        )
    return share


def _check_tokens(tokens: NDArray[np.int64], vocab_size: int, first: int, what: str) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        raise ModelMismatch(
            f"{what}: row {first + int(wrong[0]):,} has the token {int(tokens[wrong[0]]):,}, but the model has "
            f"{vocab_size:,}. Give the model that they were made with."
        )


def _begin(folder: Path, lm: CausalLM, window: WindowShape, arrays: _Arrays, about: dict[str, Any]) -> Catalog:
    settings: dict[str, Any] = {
        "model": lm.identity,
        "window": {"context": window.context, "stride": window.stride},
        "key_dtype": arrays.keys.dtype.name,
        "derived": {"import": about},
    }
    if not (folder / CATALOG_FILE).exists():
        return Catalog.create(folder / CATALOG_FILE, {"state": "building", "offset": None, **settings})
    catalog = Catalog.open(folder / CATALOG_FILE, write=True, copying=True)
    complete = catalog.get("state") == "complete"
    if complete or any(catalog.get(name) != wanted for name, wanted in settings.items()):
        catalog.close()
        what = "a finished memory already" if complete else "unfinished and of something else"
        raise DatastoreError(f"{folder} is {what}. Choose another --out, or remove it first.")
    remove_others(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
    return catalog


def _copy(
    folder: Path,
    catalog: Catalog,
    arrays: _Arrays,
    source: Path,
    vocab_size: int,
    segment_rows: int,
    progress: Progress,
) -> None:
    """Write the segments that are not there yet, each with a document of its own."""
    total = len(arrays.values)
    several = total > segment_rows
    done = len(catalog.segments())
    with progress("importing", total=total, unit="tokens") as advance:
        for number, first in enumerate(range(0, total, segment_rows)):
            end = min(first + segment_rows, total)
            if number >= done:
                row, digest = _copy_segment(NewSegment(folder, number), arrays, first, end, vocab_size, str(source))
                name = f"{source.name}:{first}-{end - 1}" if several else source.name
                document = StoredDocument(number, name, f"{source}:{first + 1}", number, first, end - first, digest)
                sums = row[KEYS_FILE], row[VALUES_FILE]
                catalog.add_segment(SegmentRow(number, first, end - first, 1.0, *sums), [document])
            advance(end - first)


def _copy_segment(
    made: NewSegment, arrays: _Arrays, first: int, end: int, vocab_size: int, what: str
) -> tuple[dict[str, str], str]:
    """Copy rows as they are, and give the hashes of the files and of the tokens."""
    digest = hashlib.sha256(b"knnlm tokens\n")  # of no text, since there is none
    with made.array(KEYS_FILE, arrays.keys.dtype, arrays.keys.shape[1:]) as writer:
        for begin, stop in _pieces(arrays.keys, first, end):
            piece = np.asarray(arrays.keys[begin:stop])
            if not np.isfinite(piece).all():
                row = begin + int(np.flatnonzero(~np.isfinite(piece).all(1))[0])
                raise DatastoreError(f"{what}: the key in row {row:,} is no finite number. See --rows for cutting it.")
            writer.append(piece)
    with made.array(VALUES_FILE, "int32") as writer:
        for begin, stop in _pieces(arrays.values, first, end):
            tokens = np.asarray(arrays.values[begin:stop]).astype(np.int64)
            _check_tokens(tokens, vocab_size, begin, what)
            digest.update(tokens.astype("<i4").tobytes())
            writer.append(tokens)
    return made.seal(), digest.hexdigest()


def _pieces(array: NDArray[Any], first: int, end: int) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE // (array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)
