"""The file of an index in blocks. Knows nothing about searching it.

It is a safetensors file, the keys last, so that they can be mapped and each part be compared with a checksum when it
is first used. Block after block, keys lie without gaps; behind the last one is room for one more block, so that every
block may be read as if it were full.
"""

from __future__ import annotations

import json
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
from knnlm.io import as_tensor

_FORMAT = "knnlm blocks 1"

_KINDS = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "I8": np.int8}

_NAMES = {np.dtype(kind): name for name, kind in _KINDS.items()}

_ARRAYS = {"centre", "turn", "centres", "sizes", "scales", "constants", "numbers", "keys"}

_HEADER = 1 << 20  # bytes that a header may have

_ALIGN = 64


@dataclass(frozen=True)
class Blocks:
    """What the file holds: N keys of D dimensions, of which W are kept, in n blocks of up to `size`.

    What grows with the keys is mapped, and looked at where it lies.
    """

    metric: str
    size: int
    offset: int  # in the file, where keys begin
    centre: Tensor  # (D,) the mean of the keys
    turn: Tensor  # (D, W) what a key less the centre is multiplied with
    centres: Tensor  # (n, W) the mean of each block
    sizes: NDArray[np.int32]  # (n,)
    scales: NDArray[np.float32]  # (n, size) what the bytes of each key are to be multiplied with
    constants: NDArray[np.float32]  # (n, size) squared lengths of keys, or 0; infinite where there is none
    numbers: NDArray[Any]  # (N,) the number of each key
    keys: Tensor  # (N + size, W) int8, mapped
    mapped: NDArray[np.int8]  # the same

    @property
    def kept(self) -> int:
        """How many dimensions are kept."""
        return self.turn.shape[1]

    def turned(self, rows: Tensor, *, moved: bool = True) -> Tensor:
        """Bring (n, D) rows to where the keys are, (n, W); unless `moved`, their inner products stay."""
        return (rows - self.centre if moved else rows) @ self.turn


class BlockWriter:
    """Writes the file: keys from first to last, then all that is known when they are all there."""

    def __init__(self, path: Path, *, rows: int, width: int, kept: int, blocks: int, size: int, metric: str) -> None:
        number = np.int32 if rows <= np.iinfo(np.int32).max else np.int64
        self._arrays: dict[str, NDArray[Any]] = {
            "centre": np.zeros(width, np.float32),
            "turn": np.zeros((width, kept), np.float32),
            "centres": np.zeros((blocks, kept), np.float32),
            "sizes": np.zeros(blocks, np.int32),
            "scales": np.zeros((blocks, size), np.float32),
            "constants": np.full((blocks, size), np.inf, np.float32),
            "numbers": np.zeros(rows, number),
        }
        header, self._begin = _header(self._arrays, (rows + size, kept), {"format": _FORMAT, "metric": metric})
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)
        self._file.seek(self._begin + sum(array.nbytes for array in self._arrays.values()))
        self._slack = size * kept

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._file.write(bytes(self._slack))
                self._file.seek(self._begin)
                for array in self._arrays.values():
                    self._file.write(array.tobytes())

    def array(self, name: str) -> NDArray[Any]:
        """Give one of the arrays beside the keys, to be filled."""
        return self._arrays[name]

    def write(self, keys: NDArray[np.int8]) -> None:
        """Write the next (n, W) keys."""
        self._file.write(np.ascontiguousarray(keys).data)


def _header(arrays: dict[str, NDArray[Any]], keys: tuple[int, int], about: dict[str, str]) -> tuple[bytes, int]:
    """Write down where every array lies; give that, and where the first begins in the file."""
    entries: dict[str, Any] = {"__metadata__": about}
    at = 0
    shapes = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    for name, dtype, shape in [*shapes, ("keys", np.dtype(np.int8), keys)]:
        size = dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text, len(text) + 8


def read_blocks(path: Path, compare: Callable[[NDArray[np.int64], int], None] | None = None) -> Blocks:
    """Map the file; all but the keys is compared with its checksum now."""
    try:
        mapped = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from None
    whole = np.asarray(mapped)
    try:
        arrays, about, offset = _arrays(whole, compare)
        return _checked(arrays, about, offset)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None


def _arrays(
    whole: NDArray[np.uint8], compare: Callable[[NDArray[np.int64], int], None] | None
) -> tuple[dict[str, NDArray[Any]], dict[str, str], int]:
    """Find the arrays in the bytes of a file, and where its keys begin."""
    length = int.from_bytes(whole[:8].tobytes(), "little")
    if not 0 < length <= min(_HEADER, len(whole)):
        raise ValueError("it has no header")
    if compare is not None:
        compare(np.zeros(1, np.int64), 8 + length)
    entries: dict[str, Any] = json.loads(whole[8 : 8 + length].tobytes())
    about = entries.pop("__metadata__")
    if set(entries) != _ARRAYS:
        raise ValueError(f"it has the arrays {sorted(entries)}")
    places = {name: _place(name, entry, 8 + length, len(whole)) for name, entry in entries.items()}
    offset = places["keys"][0]
    if any(end > offset for name, (_, end) in places.items() if name != "keys"):
        raise ValueError("keys are not behind all others")
    if compare is not None:
        compare(np.zeros(1, np.int64), offset)
    found = {
        name: whole[begin:end].view(_KINDS[entries[name]["dtype"]]).reshape(entries[name]["shape"])
        for name, (begin, end) in places.items()
    }
    return found, about, offset


def _place(name: str, entry: Any, first: int, last: int) -> tuple[int, int]:
    """Say where in a file an array lies, if it can be there."""
    begin, end = (first + at for at in entry["data_offsets"])
    sound = all(type(number) is int and number >= 0 for number in [*entry["data_offsets"], *entry["shape"]])
    size = math.prod(entry["shape"]) * np.dtype(_KINDS[entry["dtype"]]).itemsize
    if not sound or not first <= begin <= end <= last or size != end - begin:
        raise ValueError(f"{name} cannot be where the header says")
    return begin, end


def _checked(arrays: dict[str, NDArray[Any]], about: dict[str, str], offset: int) -> Blocks:
    """Put the arrays together, if they fit one another."""
    if about["format"] != _FORMAT or about["metric"] not in METRICS:
        raise ValueError(f"it says {about}")
    turn, sizes, constants, numbers = (arrays[name] for name in ("turn", "sizes", "constants", "numbers"))
    (width, kept), (count, size), rows = turn.shape, constants.shape, len(numbers)
    shapes = {
        "centre": (width,), "centres": (count, kept), "sizes": (count,), "scales": (count, size), "numbers": (rows,),
        "keys": (rows + size, kept),
    }  # fmt: skip
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has the shape {arrays[name].shape}, not {shape}")
    kinds = {"sizes": "I32", "keys": "I8", "numbers": "I64" if numbers.dtype == np.int64 else "I32"}
    for name, array in arrays.items():
        if array.dtype != _KINDS[kinds.get(name, "F32")]:
            raise ValueError(f"{name} is of {array.dtype}")
    if not (width and kept and size) or size & (size - 1):
        raise ValueError(f"keys of {width} dimensions, {kept} of them kept, in blocks of {size}")
    if sizes.sum(dtype=np.int64) != rows or (count and not 0 < sizes.min() <= sizes.max() <= size):
        raise ValueError("blocks have other sizes than they can have")
    if rows and not (0 <= numbers.min() <= numbers.max() < rows and np.bincount(numbers, minlength=rows).max() == 1):
        raise ValueError("keys have numbers that they cannot have")
    centre, turned = (torch.from_numpy(arrays[name].copy()) for name in ("centre", "turn"))
    return Blocks(
        about["metric"], size, offset, centre, turned, as_tensor(arrays["centres"]), sizes.copy(), arrays["scales"],
        constants, numbers, as_tensor(arrays["keys"]), arrays["keys"],
    )  # fmt: skip


def _unreadable(path: Path, why: str) -> IndexInvalid:
    return IndexInvalid(f"{path} is not a readable index ({why[:160]}). Make it again with: knnlm index MEMORY")
