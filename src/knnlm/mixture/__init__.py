"""How a language model and its memories are mixed."""

from knnlm.mixture.fixed import Mixed, check_lambda, mix
from knnlm.mixture.ingredients import DEFAULTS
from knnlm.mixture.model import Mixture
from knnlm.mixture.opening import check_model, open_reader
from knnlm.mixture.readers import Batch
from knnlm.mixture.weights import Fixed, Weights

__all__ = [
    "DEFAULTS",
    "Batch",
    "Fixed",
    "Mixed",
    "Mixture",
    "Weights",
    "check_lambda",
    "check_model",
    "mix",
    "open_reader",
]
