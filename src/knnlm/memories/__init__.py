"""Components besides the language model that predict the next token."""

from knnlm.memories.base import (
    LOGITS,
    Context,
    Logits,
    Memory,
    MemoryOutput,
    Prediction,
    SimpleOutput,
    Source,
    Span,
    Votes,
)
from knnlm.memories.cache import CacheMemory
from knnlm.memories.decoder import DecoderMemory, LMOutput
from knnlm.memories.knn import KnnMemory
from knnlm.memories.ngram import NgramMemory
from knnlm.memories.output import OutputMemory
from knnlm.memories.voting import NEAR, NeighbourMemory, Retrieved, VoteOutput, VoteParams, check_vote, vote

__all__ = [
    "LOGITS",
    "NEAR",
    "CacheMemory",
    "Context",
    "DecoderMemory",
    "KnnMemory",
    "LMOutput",
    "Logits",
    "Memory",
    "MemoryOutput",
    "NeighbourMemory",
    "NgramMemory",
    "OutputMemory",
    "Prediction",
    "Retrieved",
    "SimpleOutput",
    "Source",
    "Span",
    "VoteOutput",
    "VoteParams",
    "Votes",
    "check_vote",
    "vote",
]
