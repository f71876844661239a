"""Nearest neighbours over stored vectors, behind one protocol."""

from knnlm.index.approximate import build_approximate
from knnlm.index.base import METRICS, Index, Neighbours, Vectors
from knnlm.index.blockmaking import build_blocks, is_blocks, write_blocks
from knnlm.index.blocks import BlockIndex
from knnlm.index.check import check_index
from knnlm.index.exact import ExactIndex
from knnlm.index.faiss import FaissIndex
from knnlm.index.ladder import auto_spec
from knnlm.index.rerank import Reranked

__all__ = [
    "METRICS",
    "BlockIndex",
    "ExactIndex",
    "FaissIndex",
    "Index",
    "Neighbours",
    "Reranked",
    "Vectors",
    "auto_spec",
    "build_approximate",
    "build_blocks",
    "check_index",
    "is_blocks",
    "write_blocks",
]
