"""The file of a block index: a sequence of .npy arrays, which `np.load` reads from one open file in this order.

    header      format and metric, strings
    centre      (D,)       mean of the keys
    projection  (D, W)     maps a key less the centre to the W dimensions that are stored
    centroids   (n, W)     mean of each block
    sizes       (n,)       keys in each block
    scales      (n, size)  factor of each key's bytes
    constants   (n, size)  squared norms of the keys, or 0 for inner products; infinite where there is no key
    ids         (N,)       id of each key
    keys        (N + size, W) int8

Keys are stored block after block without gaps. After the last one is room for one more block, so that every block can
be read as if it were full. Keys come last: they are mapped, and their checksums are compared when a block is first
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import IndexInvalid
from knnlm.index.base import METRICS
from knnlm.io import as_tensor, read_array_header

_FORMAT = "knnlm blocks 1"
_NPY_VERSION = (1, 0)
_DTYPES: dict[str, tuple[str, ...]] = {
    "header": (f"<U{len(_FORMAT)}",),
    "centre": ("<f4",),
    "projection": ("<f4",),
    "centroids": ("<f4",),
    "sizes": ("<i4",),
    "scales": ("<f4",),
    "constants": ("<f4",),
    "ids": ("<i4", "<i8"),
    "keys": ("|i1",),
}

# Called with the offsets of some bytes and their number, before they are read; raises if their checksum differs.
CheckBytes = Callable[[NDArray[np.int64], int], None]


@dataclass(frozen=True)
class Blocks:
    """The contents of the file; arrays that grow with the keys are mapped."""

    metric: str
    size: int  # keys of a full block
    offset: int  # of the keys in the file
    centre: Tensor  # (D,)
    projection: Tensor  # (D, W)
    centroids: Tensor  # (n, W)
    sizes: NDArray[np.int32]  # (n,)
    scales: NDArray[np.float32]  # (n, size)
    constants: NDArray[np.float32]  # (n, size)
    ids: NDArray[Any]  # (N,)
    keys: Tensor  # (N + size, W) int8
    mapped_keys: NDArray[np.int8]  # the same memory as an array

    @property
    def code_width(self) -> int:
        """The number of stored dimensions, W."""
        return self.projection.shape[1]

    def project(self, vectors: Tensor, *, centre: bool = True) -> Tensor:
        """Map (n, D) vectors to the space of the keys, (n, W); without `centre`, inner products stay the same."""
        return (vectors - self.centre if centre else vectors) @ self.projection


class BlockWriter:
    """Writes the file: keys in the order of their blocks, then the arrays that are complete after the last key."""

    def __init__(
        self, path: Path, *, rows: int, width: int, code_width: int, blocks: int, size: int, metric: str
    ) -> None:
        id_dtype = np.int32 if rows <= np.iinfo(np.int32).max else np.int64
        self.arrays: dict[str, NDArray[Any]] = {
            "header": np.array([_FORMAT, metric]),
            "centre": np.zeros(width, np.float32),
            "projection": np.zeros((width, code_width), np.float32),
            "centroids": np.zeros((blocks, code_width), np.float32),
            "sizes": np.zeros(blocks, np.int32),
            "scales": np.zeros((blocks, size), np.float32),
            "constants": np.full((blocks, size), np.inf, np.float32),
            "ids": np.zeros(rows, id_dtype),
        }
        self._padding = size * code_width
        self._file: BinaryIO = path.open("wb")
        self._write_arrays()
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": "|i1", "fortran_order": False, "shape": (rows + size, code_width)}
        )

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._file.write(bytes(self._padding))
                self._file.seek(0)
                self._write_arrays()

    def write_keys(self, keys: NDArray[np.int8]) -> None:
        """Write the next (n, W) keys."""
        self._file.write(np.ascontiguousarray(keys).data)

    def _write_arrays(self) -> None:
        for array in self.arrays.values():
            np.lib.format.write_array(self._file, array, version=_NPY_VERSION, allow_pickle=False)


def read_blocks(path: Path, check_bytes: CheckBytes | None = None) -> Blocks:
    """Map the file; the checksums of all but the keys are compared now."""
    try:
        arrays, offset = _map_arrays(path, check_bytes)
        return _validated(arrays, offset)
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"[:160]
        raise IndexInvalid(f"{path} is not a readable index ({why}). Build it again with: knnlm index STORE") from None


def _map_arrays(path: Path, check_bytes: CheckBytes | None) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the arrays of a file and the offset of its keys."""
    places: dict[str, tuple[np.dtype[Any], tuple[int, ...], int]] = {}
    size = path.stat().st_size
    end = offset = 0
    with path.open("rb") as file:
        for name, dtypes in _DTYPES.items():
            file.seek(end)
            dtype, shape = read_array_header(file)
            if dtype.str not in dtypes:
                raise ValueError(f"{name} is {dtype} {shape}")
            offset = file.tell()
            end = offset + dtype.itemsize * math.prod(shape)
            if end > size:
                raise ValueError(f"{name} is incomplete")
            places[name] = dtype, shape, offset
    if end != size:
        raise ValueError(f"{size - end:,} bytes after the last array")
    if check_bytes is not None:
        check_bytes(np.zeros(1, np.int64), offset)
    mapped = np.asarray(np.memmap(path, np.uint8, mode="r"))
    return {
        name: mapped[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)
        for name, (dtype, shape, begin) in places.items()
    }, offset


def _validated(arrays: dict[str, NDArray[Any]], offset: int) -> Blocks:
    """Return the arrays as `Blocks` if they are consistent."""
    header = arrays["header"].tolist()
    if len(header) != 2 or header[0] != _FORMAT or header[1] not in METRICS:
        raise ValueError(f"format {header}")
    sizes, ids = arrays["sizes"], arrays["ids"]
    (width, code_width), (count, size), (rows,) = arrays["projection"].shape, arrays["constants"].shape, ids.shape
    shapes = {
        "centre": (width,), "centroids": (count, code_width), "sizes": (count,), "scales": (count, size),
        "keys": (rows + size, code_width),
    }  # fmt: skip
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has the shape {arrays[name].shape}, not {shape}")
    if not (width and code_width and size) or size & (size - 1):
        raise ValueError(f"keys of {width} dimensions, {code_width} of them stored, in blocks of {size}")
    if sizes.sum(dtype=np.int64) != rows or (count and not 0 < sizes.min() <= sizes.max() <= size):
        raise ValueError("invalid block sizes")
    if rows and not (0 <= ids.min() <= ids.max() < rows and np.bincount(ids, minlength=rows).max() == 1):
        raise ValueError("invalid ids")
    return Blocks(
        metric=header[1],
        size=size,
        offset=offset,
        centre=torch.from_numpy(arrays["centre"].copy()),
        projection=torch.from_numpy(arrays["projection"].copy()),
        centroids=as_tensor(arrays["centroids"]),
        sizes=sizes.copy(),
        scales=arrays["scales"],
        constants=arrays["constants"],
        ids=ids,
        keys=as_tensor(arrays["keys"]),
        mapped_keys=arrays["keys"],
    )
