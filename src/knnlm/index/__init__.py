"""Nearest neighbours over stored vectors, behind one protocol."""

from knnlm.index.base import METRICS, Index, Neighbours, Vectors
from knnlm.index.check import check_index
from knnlm.index.exact import ExactIndex
from knnlm.index.faiss import FaissIndex
from knnlm.index.ladder import auto_spec
from knnlm.index.rerank import Reranked

__all__ = [
    "METRICS",
    "ExactIndex",
    "FaissIndex",
    "Index",
    "Neighbours",
    "Reranked",
    "Vectors",
    "auto_spec",
    "check_index",
]
