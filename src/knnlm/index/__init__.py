"""Nearest neighbours over stored vectors."""

from knnlm.index.base import METRICS, Index, Neighbours, Vectors
from knnlm.index.blocks.build import build_blocks, is_blocks, write_blocks
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.exact import ExactIndex
from knnlm.index.factory import build_approximate, default_spec
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import RerankedIndex
from knnlm.index.validation import check_index

__all__ = [
    "METRICS",
    "BlockIndex",
    "ExactIndex",
    "FaissIndex",
    "Index",
    "Neighbours",
    "RerankedIndex",
    "Vectors",
    "build_approximate",
    "build_blocks",
    "check_index",
    "default_spec",
    "is_blocks",
    "write_blocks",
]
