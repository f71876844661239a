"""Fixtures of the modules that compare translations with brute force; each has a class `Case` of its own."""

from __future__ import annotations

from functools import lru_cache

import pytest

from helpers.models import SEQ2SEQ_FAMILIES


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """The case of a family, which is built once."""
    kind = request.module.Case
    return lru_cache(lambda family: kind(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module", params=sorted(SEQ2SEQ_FAMILIES.keys() - {"whisper"}))
def every(request, case):
    """The case of each family that reads text."""
    return case(request.param)
