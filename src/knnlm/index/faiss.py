"""Approximate search with FAISS; the only module that imports it.

An index is trained on a sample and filled block by block, so RAM is bounded by the index, not by the keys.
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
from knnlm.index.base import (
    KMEANS_ROUNDS,
    Neighbours,
    Vectors,
    check_metric,
    check_search,
    even_sample,
    no_neighbours,
    pad_neighbours,
    training_sample_size,
)
from knnlm.progress import Progress, silent

_BLOCK = 16384  # vectors added at a time
_QUERY_BATCH = 1024  # fewer leave cores idle, and the tables of more do not stay in the processor's cache
_MAX_SAMPLE_BYTES = 1 << 30  # of training vectors
_PROBES = 64  # lists that a query is compared with
_MAX_CODE_BYTES = 64  # in the product quantiser that an error message suggests


def train_product_quantiser(sample: Tensor, pieces: int, *, seed: int, iterations: int) -> Tensor:
    """Return (pieces, 256, D / pieces) entries, those of each piece found by k-means on (n, D) vectors."""
    faiss = _faiss()
    width = sample.shape[1]
    assert width % pieces == 0, (width, pieces)
    quantiser = faiss.ProductQuantizer(width, pieces, 8)
    quantiser.cp.seed, quantiser.cp.niter = seed, iterations
    quantiser.cp.min_points_per_centroid, quantiser.cp.max_points_per_centroid = 1, 1 << 30
    repeats = -(-quantiser.ksub // len(sample))  # k-means needs as many vectors as entries
    quantiser.train(np.ascontiguousarray(sample.repeat(repeats, 1).numpy(), np.float32))
    entries = faiss.vector_to_array(quantiser.centroids)
    return torch.from_numpy(entries.reshape(pieces, quantiser.ksub, width // pieces).copy())


def cluster_vectors(vectors: Vectors, count: int) -> Tensor:
    """Return the number of the cluster of each vector, (n,), of `count` that k-means finds on an even sample."""
    faiss = _faiss()
    count = min(count, vectors.rows)
    if not count:
        return torch.zeros(0, dtype=torch.long)
    wanted = min(vectors.rows, training_sample_size(count), _MAX_SAMPLE_BYTES // (4 * vectors.width))
    sample = np.ascontiguousarray(vectors.take(even_sample(vectors.rows, wanted)).numpy())
    kmeans = faiss.Kmeans(vectors.width, count, niter=KMEANS_ROUNDS, seed=1)
    kmeans.cp.min_points_per_centroid, kmeans.cp.max_points_per_centroid = 1, 1 << 30
    kmeans.train(sample)
    blocks = (kmeans.index.search(block.contiguous().numpy(), 1)[1] for _, block in vectors.chunks(_BLOCK))
    return torch.cat([torch.from_numpy(labels[:, 0]) for labels in blocks])


def make_empty(spec: str, width: int, *, metric: str = "l2") -> Any:
    """Return the FAISS index of a factory string, not trained yet; raise where FAISS does not understand the string."""
    check_metric(metric)
    faiss = _faiss()
    faiss_metric = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    try:
        return faiss.index_factory(width, spec, faiss_metric)
    except RuntimeError as error:
        raise ParameterError(
            f"FAISS does not understand the index {spec!r} for vectors of width {width}: {_reason(error)}. Use auto, "
            f"exact, or a factory string such as IVF256,PQ{_code_bytes(width)}."
        ) from None


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
        index = make_empty(spec, vectors.width, metric=metric)
        if not index.is_trained:
            _train(index, spec, vectors, progress=progress)
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
                f"{path} is not a readable index ({_reason(error)}). Build it again with: knnlm index STORE"
            ) from None

    @property
    def rows(self) -> int:
        """The number of vectors."""
        return int(self._index.ntotal)

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return int(self._index.d)

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Return about the k nearest vectors of each of (N, D) queries, with the distances of their codes.

        `effort` multiplies the number of lists that are searched, if the index has lists.
        """
        check_search(queries, k, self.width)
        if not self.rows or not len(queries):
            return no_neighbours(len(queries), k)
        available = min(k, self.rows)
        array = np.ascontiguousarray(queries.detach().cpu().float().numpy())
        distances, ids = torch.empty(len(array), available), torch.empty(len(array), available, dtype=torch.int64)
        with _search_effort(self._index, effort):
            for begin in range(0, len(array), _QUERY_BATCH):
                batch = slice(begin, begin + _QUERY_BATCH)
                self._index.search(array[batch], available, D=distances[batch].numpy(), I=ids[batch].numpy())
        if self.metric == "ip":
            distances = -distances
        distances.masked_fill_(ids < 0, torch.inf)
        return pad_neighbours(Neighbours(ids.to(queries.device), distances.to(queries.device)), k)


def pair_distances(queries: Tensor, query_ids: Tensor, keys: Tensor, key_ids: Tensor, *, metric: str) -> Tensor:
    """Return the (n,) distances of queries[query_ids[i]] and keys[key_ids[i]], without gathering either.

    All tensors are contiguous on the CPU, in float32 and int64.
    """
    faiss = _faiss()
    distances = torch.empty(len(query_ids))
    function = faiss.pairwise_indexed_inner_product if metric == "ip" else faiss.pairwise_indexed_L2sqr
    arrays = (faiss.swig_ptr(array.numpy()) for array in (queries, query_ids, keys, key_ids, distances))
    function(queries.shape[1], len(query_ids), *arrays)
    return distances.neg_() if metric == "ip" else distances


def default_probes(lists: int) -> int:
    """Return how many lists a query is compared with."""
    return min(lists, _PROBES)


def _code_bytes(width: int) -> int:
    """Return the largest divisor of the width that is no more than 64."""
    return max(count for count in range(1, min(width, _MAX_CODE_BYTES) + 1) if width % count == 0)


def _train(index: Any, spec: str, vectors: Vectors, *, progress: Progress) -> None:
    """Train on an even sample of the vectors, as large as the centroids need."""
    ivf = _lists(index)
    for quantiser in (index, ivf):
        # Polysemous training reorders codes for a search that is not used here, and takes most of the time.
        if hasattr(quantiser, "do_polysemous_training"):
            quantiser.do_polysemous_training = False
    if ivf is not None:
        ivf.cp.niter = KMEANS_ROUNDS
        ivf.cp.min_points_per_centroid = 1  # fewer only cause a warning
    lists = 0 if ivf is None else ivf.nlist
    wanted = min(vectors.rows, training_sample_size(lists), _MAX_SAMPLE_BYTES // (4 * vectors.width))
    with progress("training the index", total=1, unit="steps") as advance:
        sample = np.ascontiguousarray(vectors.take(even_sample(vectors.rows, wanted)).numpy())
        try:
            index.train(sample)
        except RuntimeError as error:
            raise ParameterError(
                f"The index {spec!r} cannot be trained on {vectors.rows:,} keys: {_reason(error)}. "
                "Use fewer lists, or --index exact."
            ) from None
        advance(1)


def _set_nprobe(index: Any, nprobe: int | None) -> None:
    """Search enough lists to find most neighbours; FAISS's default is one."""
    ivf = _faiss().try_extract_index_ivf(index)
    if ivf is not None:
        ivf.nprobe = min(nprobe or default_probes(ivf.nlist), ivf.nlist)


def _lists(index: Any) -> Any:
    """Return the inverted lists within an index, or None where it has none."""
    faiss = _faiss()
    ivf = faiss.try_extract_index_ivf(index)
    return None if ivf is None else faiss.downcast_index(ivf)


@contextmanager
def _search_effort(index: Any, effort: float) -> Iterator[None]:
    """Multiply the number of lists that are searched, inside the context."""
    ivf = None if effort == 1.0 else _faiss().try_extract_index_ivf(index)
    if ivf is None:
        yield
        return
    before = ivf.nprobe
    ivf.nprobe = min(ivf.nlist, math.ceil(before * effort))
    try:
        yield
    finally:
        ivf.nprobe = before


def _reason(error: Exception) -> str:
    """Return FAISS's message without its C++ file names and line numbers."""
    message = " ".join(str(error).split())
    message = re.sub(r"^Error in .*? at \S+:\d+: ", "", message).removeprefix("Error: ")
    return message[:160].rstrip(".") or type(error).__name__


def _faiss() -> Any:
    # Imported late: the import is slow, and exact search works without it.
    try:
        import faiss
    except ImportError:
        raise ParameterError("This index needs FAISS: pip install faiss-cpu, or use --index exact.") from None
    return faiss
