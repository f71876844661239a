"""The model that decoders are trained from in several tests."""

from __future__ import annotations

import pytest

from knnlm.training.initial_model import open_initial_model


@pytest.fixture(scope="module")
def initial(model_folder, lm):
    return open_initial_model(str(model_folder), like=lm)
