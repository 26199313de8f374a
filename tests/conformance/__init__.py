"""The conformance suite: for every operator, problems with independent truth that any engine can be run on.

`cases.CASES` has one case per operator; `case.problems(data_type)` yields concrete problems;
`run_case(problem, engine, knobs, make_buffer)` builds and executes one end to end and compares it with the
truth. Nothing here knows an engine, a device or a framework.
"""

from __future__ import annotations

from conformance.problem import Expect, Input, Problem, compute, run_case

__all__ = ["Expect", "Input", "Problem", "compute", "run_case"]
