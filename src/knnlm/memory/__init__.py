"""Everything besides the language model that predicts the next token."""

from knnlm.memory.cache import CacheMemory
from knnlm.memory.context import LOGITS, Answer, Context, Memory, Run, Said, Source
from knnlm.memory.knn import KnnMemory
from knnlm.memory.lm import LMMemory, Spoken
from knnlm.memory.neighbours import NEAR, Found, Poll, Setting, Voters, check_vote, vote
from knnlm.memory.ngram import NgramMemory
from knnlm.memory.output import OutputMemory
from knnlm.memory.prediction import Logits, Prediction, Votes

__all__ = [
    "LOGITS",
    "NEAR",
    "Answer",
    "CacheMemory",
    "Context",
    "Found",
    "KnnMemory",
    "LMMemory",
    "Logits",
    "Memory",
    "NgramMemory",
    "OutputMemory",
    "Poll",
    "Prediction",
    "Run",
    "Said",
    "Setting",
    "Source",
    "Spoken",
    "Voters",
    "Votes",
    "check_vote",
    "vote",
]
