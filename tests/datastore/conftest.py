"""The process that starts writers which die; it takes seconds to start."""

from __future__ import annotations

import pytest

from helpers.crash import Zygote


@pytest.fixture(scope="session")
def zygote():
    made = Zygote()
    yield made
    made.close()
