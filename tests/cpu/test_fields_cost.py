"""Field case F01: what a call costs, early and late, against a bare Python call."""

from __future__ import annotations

import gc
import sys
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sums import Engine

import opgraph

pytestmark = pytest.mark.timing

CALLS = 20_000
BATCH = 1_000  # the first and the last calls that are compared
WINDOW = 25  # calls per timing: short, so that some window of a batch is free of other work on the machine
ATTEMPTS = 3
SAME = 1.5  # largest ratio of the last batch to the first that counts as the same cost
SMALL, LARGE = 3, 13  # operands

# Largest cost of a call as a multiple of a bare Python call, about twice what is measured: (null, cpu).
BOUNDS = {"add of 3": (12.0, 1000.0), "sum of 13": (35.0, 6000.0), "overrides of 13": (70.0, 7000.0)}
OPERAND_BOUND_NS = 1_000.0


class Case:
    """The sum of `operands - 1` tiny inputs, with or without overrides for every operand."""

    def __init__(self, engine: Engine, operands: int, overridden: bool = False) -> None:
        self.graph = opgraph.pygraph(io_data_type=opgraph.data_type.FLOAT, is_override_shape_enabled=overridden)
        inputs = [self.graph.tensor((2, 3)) for _ in range(operands - 1)]
        total = inputs[0]
        for tensor in inputs[1:]:
            total = self.graph.add(total, tensor)
        tensors = [*inputs, total.set_output(True)]
        engine.build(self.graph)
        self.mapping = {tensor: np.ones((2, 3), np.float32) for tensor in tensors}
        self.overrides: dict[str, Any] = {}
        if overridden:
            self.overrides = {
                "override_uids": [tensor.uid for tensor in tensors],
                "override_shapes": [[1, 3]] * operands,
                "override_strides": [[3, 1]] * operands,
            }

    def timer(self) -> timeit.Timer:
        names = {"graph": self.graph, "mapping": self.mapping, **self.overrides}
        keywords = "".join(f", {name}={name}" for name in self.overrides)
        return timeit.Timer(f"graph.execute(mapping{keywords})", globals=names)


def empty() -> None:
    pass


def bare_call() -> float:
    """Nanoseconds of a Python call that does nothing."""
    timer = timeit.Timer("empty()", globals={"empty": empty})
    return min(timer.timeit(10 * WINDOW) for _ in range(100)) / (10 * WINDOW) * 1e9


class Run:
    """20,000 calls: the windows' costs in nanoseconds per call, and blocks allocated after the first and the
    last batch."""

    def __init__(self, timer: timeit.Timer) -> None:
        self.costs: list[float] = [0.0] * (CALLS // WINDOW)
        timer.timeit(WINDOW)  # the first sight of types and layouts is no steady call
        gc.collect()
        for window in range(len(self.costs)):
            self.costs[window] = timer.timeit(WINDOW) / WINDOW * 1e9
            if (window + 1) * WINDOW == BATCH:
                self.blocks_early = sys.getallocatedblocks()
        self.blocks_late = sys.getallocatedblocks()
        self.first = min(self.costs[: BATCH // WINDOW])
        self.last = min(self.costs[-BATCH // WINDOW :])
        self.least = min(self.costs)


def eventually(attempt: Callable[[], str]) -> None:
    """Runs `attempt` until it has nothing to object to. Other work on the machine only ever adds time, so one
    good attempt is proof."""
    objections = []
    for _ in range(ATTEMPTS):
        objections.append(attempt())
        if not objections[-1]:
            return
    pytest.fail("; ".join(objections))


@pytest.fixture(params=["null", "cpu"])
def each_engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


class TestF01SteadyCostOfExecute:
    @pytest.mark.parametrize("name", BOUNDS)
    def test_the_last_calls_cost_what_the_first_did(self, each_engine, name, record_property):
        bound = BOUNDS[name][0 if each_engine.name == "null" else 1]

        def attempt() -> str:
            case = Case(each_engine, SMALL if name == "add of 3" else LARGE, name.startswith("overrides"))
            run = Run(case.timer())
            multiple = run.least / bare_call()
            text = (
                f"F01 {each_engine.name}, {name}: {run.least:.0f} ns a call, {multiple:.1f} bare Python "
                f"calls (bound {bound:g}); last batch / first batch {run.last / run.first:.2f} (bound {SAME})"
            )
            print(text)
            record_property("cost", text)
            # Each window leaves one float in the list of costs; nothing else may stay.
            windows = (CALLS - BATCH) // WINDOW
            grown = run.blocks_late - run.blocks_early - windows
            if grown > 50:
                return f"{grown} more blocks of memory after {CALLS} calls than after {BATCH}"
            return text if multiple > bound or run.last / run.first > SAME else ""

        eventually(attempt)

    @pytest.mark.parametrize("overridden", [False, True], ids=["plain", "overrides"])
    def test_an_operand_more_costs_little(self, overridden, record_property):
        def attempt() -> str:
            costs = [Run(Case(Engine("null"), operands, overridden).timer()).least for operands in (SMALL, LARGE)]
            price = (costs[1] - costs[0]) / (LARGE - SMALL)
            text = f"F01 {price:.0f} ns for one more operand (bound {OPERAND_BOUND_NS:.0f})"
            print(text)
            record_property("operand_price", text)
            return text if price > OPERAND_BOUND_NS else ""

        eventually(attempt)
