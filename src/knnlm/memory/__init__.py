"""Everything besides the language model that predicts the next token."""

from knnlm.memory.context import Context, Memory
from knnlm.memory.knn import Found, KnnMemory, check_vote, vote
from knnlm.memory.prediction import Logits, Prediction, Votes

__all__ = ["Context", "Found", "KnnMemory", "Logits", "Memory", "Prediction", "Votes", "check_vote", "vote"]
