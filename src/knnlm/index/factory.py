"""Make any approximate index in memory. Knows nothing about where memories keep theirs."""

from __future__ import annotations

from knnlm.index.base import Index, Vectors
from knnlm.index.blocks.build import build_blocks, is_blocks
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import Reranked
from knnlm.progress import Progress, silent


def build_approximate(
    vectors: Vectors, spec: str, *, metric: str = "l2", rerank: bool = True, progress: Progress = silent
) -> Index:
    """Make an index of blocks or of FAISS; distances are measured again where the index has only codes of keys."""
    if is_blocks(spec):
        blocks = build_blocks(vectors, spec, metric=metric, progress=progress)
        return Reranked(blocks, vectors) if rerank and not blocks.whole else blocks
    index = FaissIndex.build(vectors, spec, metric=metric, progress=progress)
    return Reranked(index, vectors) if rerank else index
