"""How a language model and its memories are mixed."""

from knnlm.mixture.fixed import Mixed, check_lambda, mix
from knnlm.mixture.model import DEFAULTS, Mixture, check_model, open_reader

__all__ = ["DEFAULTS", "Mixed", "Mixture", "check_lambda", "check_model", "mix", "open_reader"]
