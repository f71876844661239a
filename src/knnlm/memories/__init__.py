"""Components besides the language model that predict the next token."""

from knnlm.memories.automaton import AutomatonParams
from knnlm.memories.base import (
    LM_LOGITS,
    LOGITS,
    AdditivePrediction,
    Context,
    Logits,
    Memory,
    MemoryOutput,
    Origin,
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
from knnlm.memories.ngram_cache import NgramCacheMemory
from knnlm.memories.output import OutputMemory
from knnlm.memories.voting import (
    NEAR,
    NeighbourMemory,
    RetrievedNeighbours,
    SearchMemory,
    VoteOutput,
    VoteParams,
    check_vote,
    searches,
    vote,
)

__all__ = [
    "LM_LOGITS",
    "LOGITS",
    "NEAR",
    "AdditivePrediction",
    "AutomatonParams",
    "CacheMemory",
    "Context",
    "DecoderMemory",
    "KnnMemory",
    "LMOutput",
    "Logits",
    "Memory",
    "MemoryOutput",
    "NeighbourMemory",
    "NgramCacheMemory",
    "NgramMemory",
    "Origin",
    "OutputMemory",
    "Prediction",
    "RetrievedNeighbours",
    "SearchMemory",
    "SimpleOutput",
    "Source",
    "Span",
    "VoteOutput",
    "VoteParams",
    "Votes",
    "check_vote",
    "searches",
    "vote",
]
