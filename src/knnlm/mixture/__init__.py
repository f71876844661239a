"""Mixtures of a language model and its memories."""

from knnlm.mixture.loader import check_model, open_reader
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.options import DEFAULTS
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.weights import FixedWeights, Mixed, Weights, check_lambda, mix

__all__ = [
    "DEFAULTS",
    "FixedWeights",
    "Mixed",
    "Mixture",
    "ReadBatch",
    "Weights",
    "check_lambda",
    "check_model",
    "mix",
    "open_reader",
]
