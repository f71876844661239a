"""Mixtures of a language model and its memories."""

from knnlm.mixture.loader import check_model, open_reader
from knnlm.mixture.mixture import Mixture, Retrieved
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.spec import DEFAULTS, MixtureOptions
from knnlm.mixture.weights import FixedWeights, MixturePrediction, Weights, check_lambda

__all__ = [
    "DEFAULTS",
    "FixedWeights",
    "Mixture",
    "MixtureOptions",
    "MixturePrediction",
    "ReadBatch",
    "Retrieved",
    "Weights",
    "check_lambda",
    "check_model",
    "open_reader",
]
