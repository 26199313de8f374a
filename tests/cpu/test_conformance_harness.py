"""The conformance suite itself: engines with one fault each, every one of which it must find."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import pytest
from conformance import Problem, run_case
from conformance.matmul import matmul_problem
from conformance.memory import AddressBuffer, NumpyBuffer, Region, numpy_dtype, stored
from conformance.pointwise import CASES as POINTWISE
from conformance.tolerances import mismatch

from opgraph import data_type
from opgraph.engines.cpu import ENGINE as CPU_ENGINE
from opgraph.engines.support import Candidate, CompiledPlan, Engine, layout_carves
from opgraph.planning.registry import registry


class Faulty(Engine):
    """The CPU engine with something done after each call."""

    name = "faulty"
    engine_ids: ClassVar = {29900: {}}
    named_only = True

    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def propose(self, spec, target):
        return [Candidate(self.name, 29900, workspace_bytes=1024)]

    def compile(self, spec, candidate, target):
        honest = CPU_ENGINE.compile(spec, CPU_ENGINE.propose(spec, _plain(target))[0], target)
        carves, _ = layout_carves([(data_type.FLOAT, (256,))])

        def run(pack: Any) -> None:
            honest.run(pack)
            self.fault(pack)

        return CompiledPlan(run, workspace_bytes=1024, carves=carves, overrides=True)


def _plain(target):
    return type(target)(target.device)


@pytest.fixture
def faulty(request):
    registry.register(Faulty(request.param))
    yield "faulty"
    registry.unregister("faulty")


def problem(dtype: data_type = data_type.FLOAT) -> Problem:
    case = next(case for case in POINTWISE if case.op == "add")
    return case.problem("padded", np.random.default_rng(0), ([4, 5],), ((7, 1),), dtype, out_stride=(9, 1))


def _past(slot: Any, elements: int) -> np.ndarray:
    """Memory around a float32 slot, starting `elements` elements from its first one."""
    return np.ctypeslib.as_array((ctypes.c_float * 4).from_address(slot.ptr + 4 * elements))


def nothing(pack: Any) -> None:
    pass


def one_element_wrong(pack: Any) -> None:
    pack[2].numpy()[3, 4] *= np.float32(1.0001)


def one_element_missing(pack: Any) -> None:
    pack[2].numpy()[3, 4] = np.nan


def one_element_infinite(pack: Any) -> None:
    pack[2].numpy()[0, 0] = np.inf


def writes_padding(pack: Any) -> None:
    _past(pack[2], 6)[0] = 0


def writes_past_the_end(pack: Any) -> None:
    _past(pack[2], 9 * 3 + 5)[0] = 0


def writes_before_the_start(pack: Any) -> None:
    _past(pack[2], -1)[0] = 0


def writes_an_input(pack: Any) -> None:
    _past(pack[0], 0)[0] += 1


def writes_past_the_workspace(pack: Any) -> None:
    _past(pack.workspace, 256)[0] = 0


@pytest.mark.parametrize("faulty", [nothing], indirect=True)
def test_an_honest_engine_passes(faulty):
    run_case(problem(), faulty)


@pytest.mark.parametrize(
    "faulty",
    [
        one_element_wrong, one_element_missing, one_element_infinite, writes_padding, writes_past_the_end,
        writes_before_the_start, writes_an_input, writes_past_the_workspace,
    ],
    indirect=True,
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_a_faulty_engine_fails(faulty):
    with pytest.raises(AssertionError):
        run_case(problem(), faulty)


@pytest.mark.parametrize("make_buffer", [NumpyBuffer, AddressBuffer])
def test_a_problem_runs_on_any_kind_of_buffer(make_buffer):
    run_case(problem(), make_buffer=make_buffer)
    rng = np.random.default_rng(1)
    run_case(
        matmul_problem("", rng, [2, 3, 4], [2, 4, 5], None, (20, 1, 4), data_type.HALF),
        make_buffer=make_buffer,
    )


def test_a_wrong_expectation_of_geometry_fails():
    wrong = problem()
    wrong.expect["OUT"].stride = (5, 1)
    with pytest.raises(AssertionError, match=r"stride \(9, 1\), expected \(5, 1\)"):
        run_case(wrong)


def test_mismatch_says_where_and_what():
    truth = np.array([1.0, 2.0])
    assert mismatch(np.array([1.0, 2.0], np.float32), truth, data_type.FLOAT) is None
    assert "(1,)" in mismatch(np.array([1.0, 2.1], np.float32), truth, data_type.FLOAT)
    assert mismatch(np.array([1.0, np.nan], np.float32), truth, data_type.FLOAT)
    assert mismatch(np.array([1.0], np.float32), truth, data_type.FLOAT).startswith("shape")


def test_mismatch_knows_infinities_nan_and_signs():
    truth = np.array([np.inf, -np.inf, np.nan, 1e6])
    assert mismatch(np.array([np.inf, -np.inf, np.nan, np.inf], np.float16), truth, data_type.HALF) is None
    assert mismatch(np.array([-np.inf, -np.inf, np.nan, np.inf], np.float16), truth, data_type.HALF)
    assert mismatch(np.array([np.inf, -np.inf, 0, np.inf], np.float16), truth, data_type.HALF)


def test_mismatch_is_exact_for_integers_and_on_demand():
    assert mismatch(np.array([3], np.int32), np.array([4]), data_type.INT32)
    almost = np.array([1.0000001], np.float32)
    assert mismatch(almost, np.array([1.0]), data_type.FLOAT) is None
    assert mismatch(almost, np.array([1.0]), data_type.FLOAT, exact=True)


def test_fp8_is_compared_on_its_grid(ml_dtypes):
    grid = np.array([448, 1.0], numpy_dtype(data_type.FP8_E4M3))
    assert mismatch(grid, np.array([1e5, 1.1]), data_type.FP8_E4M3) is None
    assert mismatch(grid, np.array([1e5, 1.5]), data_type.FP8_E4M3)


def test_four_bit_elements_survive_packing(ml_dtypes):
    for dtype in (data_type.FP4_E2M1, data_type.INT4):
        for stride in ((6, 1), (1, 4)):
            values = stored(np.random.default_rng(0).integers(-4, 5, (4, 6)), dtype)
            region = Region((4, 6), stride, dtype, NumpyBuffer)
            region.fill(values)
            assert region.operand.dtype == np.uint8
            np.testing.assert_array_equal(region.values(), values)
