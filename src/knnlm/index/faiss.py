"""Approximate search with FAISS, the only module that imports it. Knows nothing about tokens.

An index is trained on a sample and filled block by block, so memory is bounded by the index, not by the keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import IndexInvalid, ParameterError
from knnlm.index.base import Neighbours, Vectors, check_metric, check_search, evenly
from knnlm.index.spec import ROUNDS, pieces, probes_for, sample_for
from knnlm.progress import Progress, silent

_BLOCK = 16384

_QUERIES = 1024  # at a time: fewer keep cores waiting, and the tables of more do not stay near the processor

_SAMPLE = 1 << 30  # bytes to train on at most


class FaissIndex:
    """A FAISS index behind the `Index` protocol."""

    def __init__(self, index: Any, *, metric: str = "l2") -> None:
        self.metric = metric
        self._index = index

    @classmethod
    def build(
        cls,
        vectors: Vectors,
        spec: str,
        *,
        metric: str = "l2",
        nprobe: int | None = None,
        progress: Progress = silent,
    ) -> FaissIndex:
        """Train and fill an index from a FAISS factory string, such as `IVF256,PQ64`."""
        check_metric(metric)
        faiss = _faiss()
        kind = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
        try:
            index = faiss.index_factory(vectors.width, spec, kind)
        except RuntimeError as error:
            raise ParameterError(
                f"FAISS does not understand the index {spec!r} for vectors of width {vectors.width}: "
                f"{_reason(error)}. Use auto, exact, or a factory string such as "
                f"IVF256,PQ{pieces(vectors.width)}."
            ) from None
        if not index.is_trained:
            _train(index, spec, vectors, progress)
        with progress("filling the index", total=vectors.rows, unit="keys") as advance:
            for _, block in vectors.chunks(_BLOCK):
                try:
                    index.add(block.numpy())
                except RuntimeError as error:
                    raise ParameterError(f"The index {spec!r} cannot be filled: {_reason(error)}.") from None
                advance(len(block))
        _set_nprobe(index, nprobe)
        return cls(index, metric=metric)

    def save(self, path: Path) -> None:
        """Write the index to a file."""
        try:
            _faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise OSError(_reason(error)) from None

    @classmethod
    def load(cls, path: Path, *, metric: str = "l2") -> FaissIndex:
        """Read an index from a file."""
        try:
            return cls(_faiss().read_index(str(path)), metric=metric)
        except RuntimeError as error:
            raise IndexInvalid(
                f"{path} is not a readable index ({_reason(error)}). Make it again with: knnlm index MEMORY"
            ) from None

    @property
    def rows(self) -> int:
        """The number of vectors in the index."""
        return int(self._index.ntotal)

    @property
    def width(self) -> int:
        """The number of dimensions of a vector."""
        return int(self._index.d)

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Find about the k nearest rows of each of (N, D) queries; distances are those of the codes.

        With more `effort`, so many times more lists are looked into, where the index has lists.
        """
        check_search(queries, k, self.width)
        if not self.rows or not len(queries):
            shape = (len(queries), k)
            return Neighbours(torch.full(shape, -1), torch.full(shape, torch.inf))
        wanted = min(k, self.rows)
        asked = np.ascontiguousarray(queries.detach().cpu().float().numpy())
        distances, found = torch.empty(len(asked), wanted), torch.empty(len(asked), wanted, dtype=torch.int64)
        with _looking_into(self._index, effort):
            for begin in range(0, len(asked), _QUERIES):
                part = slice(begin, begin + _QUERIES)
                self._index.search(asked[part], wanted, D=distances[part].numpy(), I=found[part].numpy())
        if self.metric == "ip":
            distances = -distances
        distances.masked_fill_(found < 0, torch.inf)
        if wanted < k:
            found = torch.nn.functional.pad(found, (0, k - wanted), value=-1)
            distances = torch.nn.functional.pad(distances, (0, k - wanted), value=torch.inf)
        return Neighbours(found.to(queries.device), distances.to(queries.device))


def pair_distances(queries: Tensor, one: Tensor, keys: Tensor, other: Tensor, *, metric: str) -> Tensor:
    """Measure pairs, queries[one[i]] and keys[other[i]] for every i, without making an array of either; (n,) float32.

    All are on the CPU, contiguous, in float32 and int64.
    """
    faiss = _faiss()
    found = torch.empty(len(one))
    work = faiss.pairwise_indexed_inner_product if metric == "ip" else faiss.pairwise_indexed_L2sqr
    arrays = (faiss.swig_ptr(array.numpy()) for array in (queries, one, keys, other, found))
    work(queries.shape[1], len(one), *arrays)
    return found.neg_() if metric == "ip" else found


def _train(index: Any, spec: str, vectors: Vectors, progress: Progress) -> None:
    """Train on as many vectors as the centroids need, taken evenly from all."""
    ivf = _lists(index)
    for part in (index, ivf):
        # Reordering codes for a kind of search that is not used here takes most of the training of a small PQ.
        if hasattr(part, "do_polysemous_training"):
            part.do_polysemous_training = False
    if ivf is not None:
        ivf.cp.niter = ROUNDS
        ivf.cp.min_points_per_centroid = 1  # it would only complain
    wanted = min(vectors.rows, sample_for(0 if ivf is None else ivf.nlist), _SAMPLE // (4 * vectors.width))
    with progress("training the index", total=1, unit="steps") as advance:
        sample = np.ascontiguousarray(vectors.take(evenly(vectors.rows, wanted)).numpy())
        try:
            index.train(sample)
        except RuntimeError as error:
            raise ParameterError(
                f"The index {spec!r} cannot be trained on {vectors.rows:,} keys: {_reason(error)}. "
                "Use fewer lists, or --index exact."
            ) from None
        advance(1)


def _set_nprobe(index: Any, nprobe: int | None) -> None:
    """Look into as many lists as find most neighbours; FAISS looks into one if not told."""
    ivf = _faiss().try_extract_index_ivf(index)
    if ivf is not None:
        ivf.nprobe = min(nprobe or probes_for(ivf.nlist), ivf.nlist)


def _lists(index: Any) -> Any:
    """Find the part of an index that has lists, as what it is; None where there is none."""
    faiss = _faiss()
    found = faiss.try_extract_index_ivf(index)
    return None if found is None else faiss.downcast_index(found)


@contextmanager
def _looking_into(index: Any, effort: float) -> Iterator[None]:
    """Look into more lists for as long as this lasts."""
    ivf = None if effort == 1.0 else _faiss().try_extract_index_ivf(index)
    if ivf is None:
        yield
        return
    usual = ivf.nprobe
    ivf.nprobe = min(ivf.nlist, math.ceil(usual * effort))
    try:
        yield
    finally:
        ivf.nprobe = usual


def _reason(error: Exception) -> str:
    """Keep what FAISS says went wrong, without its C++ file names and line numbers."""
    message = " ".join(str(error).split())
    message = re.sub(r"^Error in .*? at \S+:\d+: ", "", message).removeprefix("Error: ")
    return message[:160].rstrip(".") or type(error).__name__


def _faiss() -> Any:
    # Imported late: it takes a while, and machines without it can still search exactly.
    try:
        import faiss
    except ImportError:
        raise ParameterError("This index needs FAISS: pip install faiss-cpu, or use --index exact.") from None
    return faiss
