"""The model that decoders are trained from in several tests, and trainings without plots."""

from __future__ import annotations

import pytest

from knnlm.training import decoder, trainer
from knnlm.training.initial_model import open_initial_model


@pytest.fixture(scope="module", autouse=True)
def _without_plots():
    """Drawing the curve takes longer than training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "draw_curve", lambda *_: b"")
        yield


@pytest.fixture
def with_plots(monkeypatch):
    """Draw curves as always."""
    monkeypatch.setattr(decoder, "draw_curve", trainer.draw_curve)


@pytest.fixture(scope="module")
def initial(model_folder, lm):
    return open_initial_model(str(model_folder), like=lm)
