"""Field case F43: many threads, one graph."""

from __future__ import annotations

import copy
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sums import ENGINES, Sum, refused, run_child

import opgraph


def lock_state() -> None:
    print(sys._is_gil_enabled())


class TestF43ManyThreadsOneGraph:
    @pytest.mark.parametrize("noise", [False, True], ids=["alone", "beside builds and errors"])
    @pytest.mark.parametrize("engine", ENGINES, ids=str)
    def test_every_result_is_right(self, engine, noise):
        case = Sum(engine, (5,))
        wrong: list[Any] = []
        stop = threading.Event()
        start = threading.Barrier(8)
        last_error = opgraph.get_last_error_string()
        computes = engine.computes

        def work(number: int) -> None:
            a, b, c = np.full(5, number, np.float32), np.zeros(5, np.float32), np.zeros(5, np.float32)
            workspace = np.zeros(64, np.uint8)
            operands = {case.a: a, case.b: b, case.c: c}
            start.wait()
            for iteration in range(2_000):
                b[:] = iteration
                c[:] = -1
                if iteration % 3 == 0:
                    case.graph.execute([c, a, b], workspace, tensor_uids=[3, 1, 2])
                else:
                    case.graph.execute(operands, workspace)
                if not (c == (number + iteration if computes else -1)).all():
                    wrong.append((number, iteration, c.copy()))

        def guarded(task: Callable[..., None], *arguments: Any) -> None:
            try:
                task(*arguments)
            except BaseException as error:
                wrong.append(error)

        def build() -> None:
            while not stop.is_set():
                Sum(engine, (3, 2)).usable()
                copy.deepcopy(case.graph)

        def fail() -> None:
            while not stop.is_set():
                caught = refused(lambda: case.execute(np.zeros(4, np.float32)), "'A' (uid 1)")
                assert opgraph.get_last_error_string() == str(caught)
                refused(lambda: case.execute(np.zeros(5, np.float64)), "float64")
                refused(lambda: case.graph.execute({999: 0}), "999", error=KeyError)

        threads = [threading.Thread(target=guarded, args=(work, n)) for n in range(8)]
        extra = [threading.Thread(target=guarded, args=(task,)) for task in (build, fail)] if noise else []
        for thread in threads + extra:
            thread.start()
        for thread in threads:
            thread.join(120)
        stop.set()
        for thread in extra:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads + extra), "it hangs"
        assert not wrong, wrong[:3]
        assert opgraph.get_last_error_string() == last_error  # errors stay in their thread
        case.usable()

    @pytest.mark.parametrize("engine", ENGINES, ids=str)
    def test_one_bound_call(self, engine):
        """Threads that share a bound call share its buffers; swapping them meanwhile harms no call."""
        case = Sum(engine, (3,))
        held = [np.full(3, n, np.float32) for n in range(4)]
        bound = case.graph.bind({case.a: held[0], case.b: held[0], case.c: np.zeros(3, np.float32)})
        wrong: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for iteration in range(500):
                    if iteration % 5 == number % 5:
                        bound.update({case.a: held[iteration % 4], case.c: np.zeros(3, np.float32)})
                    bound()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong, wrong[:3]

    def test_the_module_leaves_the_interpreter_lock_as_it_is(self):
        if not hasattr(sys, "_is_gil_enabled") or sysconfig.get_config_var("Py_GIL_DISABLED") != 1:
            pytest.skip("this interpreter has its lock")
        assert run_child(lock_state).strip() == "False"
