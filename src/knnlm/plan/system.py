"""Memory of this process and its peak, and the speed of the disk without the system's cache."""

from __future__ import annotations

import mmap
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_CHUNK = 1 << 22
_PAGES = 256  # random pages


def resident_memory() -> float:
    """Return the bytes of memory that the process has now; the peak where that is unknown."""
    return _status("VmRSS") or _highest()


def peak_memory() -> float:
    """Return the largest number of bytes since `reset_peak`, or since the start where that is not supported."""
    return _status("VmHWM") or _highest()


def reset_peak() -> None:
    """Let the peak begin at the present memory, where the system supports that."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def idle_memory() -> float:
    """Return the bytes of a new process that can search and has no model."""
    faiss = ", faiss" if find_spec("faiss") is not None else ""
    script = f"import knnlm.datastore.indexes{faiss}, knnlm.plan.system as m; print(m.resident_memory())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    return float(done.stdout)


def _status(name: str) -> float | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else float(found[1]) * 1024


def _highest() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def measure_disk(folder: Path, size: int) -> tuple[float, float, float]:
    """Return the seconds to read a byte, to write one, and to read a random page."""
    path, clock = folder / "disk.bin", time.perf_counter
    chunk = np.random.default_rng(0).bytes(_CHUNK)
    writes, reads, pages = list[float](), list[float](), list[float]()
    for _ in range(2):
        begin = clock()
        with path.open("wb") as file:
            for _ in range(0, size, _CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        writes.append(clock() - begin)
        _forget(path)
        begin = clock()
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK):
                pass
        reads.append(clock() - begin)
        _forget(path)
        pages.append(_random_pages(path))
    path.unlink()
    length = -(-size // _CHUNK) * _CHUNK
    return min(reads) / length, min(writes) / length, min(pages)


def _random_pages(path: Path) -> float:
    """Return the mean time to read a random page of a mapped file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        places = np.random.default_rng(1).integers(len(mapped) // mmap.PAGESIZE, size=_PAGES) * mmap.PAGESIZE
        begin = time.perf_counter()
        for place in places.tolist():
            mapped[place]
        return (time.perf_counter() - begin) / _PAGES


def page_fault_seconds(folder: Path, size: int, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds for a byte of a mapped file that is cached but not resident in the process."""
    path = folder / "fault.bin"
    path.write_bytes(bytes(size))
    taken = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE]
        for _ in range(3):
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)
            begin = clock()
            int(array.sum(dtype=np.int64))
            first = clock() - begin
            begin = clock()
            int(array.sum(dtype=np.int64))
            taken.append(max(0.0, first - (clock() - begin)))
        del array
    path.unlink()
    return min(taken) / size


def _forget(path: Path) -> None:
    """Ask the system to drop a file from its cache."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
