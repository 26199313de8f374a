"""Every case of the conformance suite on the CPU engine, in both precisions, against NumPy's and torch's
float64."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from conformance import run_case
from conformance.cases import CASES
from conformance.memory import ML_DTYPES

from opgraph import data_type
from opgraph.ops import OPS

PARAMS = [
    pytest.param(
        case, dtype, truth, id=f"{case.id}-{dtype.name}-{truth}",
        marks=[pytest.mark.frameworks] if truth == "torch" else [],
    )
    for case in CASES
    for dtype in case.data_types
    for truth in getattr(case, "truths", ("numpy", "torch"))
]  # fmt: skip


def test_every_operator_has_a_case():
    missing = sorted(set(OPS) - {case.op for case in CASES})
    assert not missing, f"no case in tests/conformance for {missing}"


@pytest.mark.parametrize(("case", "dtype", "truth"), PARAMS)
def test_case(case: Any, dtype: data_type, truth: str, request: pytest.FixtureRequest):
    if not ML_DTYPES.keys().isdisjoint((dtype, getattr(case, "source", dtype))):
        request.getfixturevalue("ml_dtypes")
    xp = request.getfixturevalue("torch") if truth == "torch" else np
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    ran = 0
    for problem in case.problems(dtype, rng):
        if truth == "numpy" and problem.needs_torch:
            continue
        solved = problem.solve(xp)
        # What NumPy solves has run in both precisions against it; torch then vouches for that truth.
        both = truth == "numpy" or problem.needs_torch
        for precision in ("native", "float64") if both else ("float64",):
            run_case(problem, "cpu", {"precision": precision}, truth=solved)
            ran += 1
    if not ran:
        pytest.skip("the truth of every problem needs torch")
