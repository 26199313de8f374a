"""Engines that the field cases run on."""

from __future__ import annotations

import pytest
from sums import Engine


@pytest.fixture
def engine(precision: str) -> Engine:
    """The CPU engine, in both precisions."""
    return Engine("cpu", {"precision": precision})


@pytest.fixture(params=["native", "float64", "null"])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Every engine that takes a CPU graph: what a caller may pass must not depend on the plan."""
    return Engine("null") if request.param == "null" else Engine("cpu", {"precision": request.param})
