"""One concrete graph with its data and its truth, and the function that runs it on an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import opgraph
from conformance.layouts import row_major
from conformance.memory import BufferMaker, NumpyBuffer, Region, exact, stored
from conformance.tolerances import mismatch
from opgraph import data_type

__all__ = ["Expect", "Input", "Problem", "build", "compute", "run_case"]

Array = np.ndarray[Any, Any]


class Input:
    """An input: its values (any numbers; rounded to `dtype` here) and how it is declared.

    `by_value`: a host scalar of the pack. `virtual_ok`: an edge of the graph may replace the buffer.
    """

    def __init__(
        self,
        values: Any,
        dtype: data_type = data_type.FLOAT,
        stride: Sequence[int] | None = None,
        *,
        by_value: bool = False,
        virtual_ok: bool = True,
    ) -> None:
        array = stored(values, dtype)
        self.dtype = dtype
        self.dim = array.shape
        self.stride = tuple(stride) if stride is not None else row_major(self.dim)
        one = tuple(slice(0, 1) if step == 0 else slice(None) for step in self.stride)
        self.values = np.broadcast_to(
            array[one], self.dim
        )  # stride 0: one element stands for all of the axis
        self.by_value = by_value
        self.virtual_ok = virtual_ok and not by_value


class Expect:
    """What an output must be: geometry and type after the build; None where the problem says nothing.

    `statistic_of`: the data type whose softmax statistics it holds. `exact`: no tolerance, whatever the type.
    `frobenius`: the relative norm of the error that is allowed, in place of bounds of its elements.
    """

    def __init__(
        self,
        dim: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: data_type | None = None,
        *,
        statistic_of: data_type | None = None,
        exact: bool = False,
        frobenius: float | None = None,
    ) -> None:
        self.dim = None if dim is None else tuple(dim)
        self.stride = None if stride is None else tuple(stride)
        self.dtype = dtype
        self.statistic_of = statistic_of
        self.exact = exact
        self.frobenius = frobenius


class Problem:
    """A graph, its data and its truth.

    `declare(graph, tensors)` calls the operators and returns the outputs by name, without `set_output`.
    `truth(xp, values)` returns the outputs by name from the inputs (float64, int64 or bool); `xp` is NumPy or
    torch, and values are arrays or tensors of it. `needs_torch`: NumPy would take finite differences of too
    many elements.
    """

    def __init__(
        self,
        id: str,
        inputs: Mapping[str, Input],
        declare: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
        truth: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
        expect: Mapping[str, Expect] | None = None,
        *,
        io: data_type = data_type.FLOAT,
        intermediate: data_type = data_type.FLOAT,
        compute: data_type = data_type.FLOAT,
        needs_torch: bool = False,
    ) -> None:
        self.id = id
        self.needs_torch = needs_torch
        self.inputs = dict(inputs)
        self.declare = declare
        self.truth = truth
        self.expect = dict(expect or {})
        self.io, self.intermediate, self.compute = io, intermediate, compute

    def __repr__(self) -> str:
        return self.id

    def with_types(self, *, intermediate: data_type, compute: data_type) -> Problem:
        """The same problem with other default types of virtual edges and of arithmetic."""
        return Problem(
            f"{self.id}, compute {compute.name}", self.inputs, self.declare, self.truth, self.expect,
            io=self.io, intermediate=intermediate, compute=compute, needs_torch=self.needs_torch,
        )  # fmt: skip

    def with_virtual_edges(self) -> Problem:
        """The same problem with every input and output carried by a virtual edge through `identity`."""

        def declare(graph: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
            # The edge takes the operand's own type, so that it is no further rounding.
            inner = {
                name: graph.identity(tensor).set_data_type(self.inputs[name].dtype)
                if self.inputs[name].virtual_ok
                else tensor
                for name, tensor in tensors.items()
            }
            outputs = {}
            for name, tensor in self.declare(graph, inner).items():
                dtype = self.expect[name].dtype if name in self.expect else None
                outputs[name] = graph.identity(tensor.set_data_type(dtype or self.io))
                outputs[name].set_data_type(dtype or self.io)
            return outputs

        expect = {
            name: Expect(e.dim, None, e.dtype, statistic_of=e.statistic_of, exact=e.exact, frobenius=e.frobenius)
            for name, e in self.expect.items()
        }
        return Problem(
            f"{self.id}, virtual edges", self.inputs, declare, self.truth, expect,
            io=self.io, intermediate=self.intermediate, compute=self.compute, needs_torch=self.needs_torch,
        )  # fmt: skip

    def solve(self, xp: Any) -> dict[str, Array]:
        """The truth, as NumPy arrays, computed with NumPy or with torch."""
        values: dict[str, Any] = {name: exact(given.values) for name, given in self.inputs.items()}
        if xp is not np:
            values = {name: xp.tensor(array) for name, array in values.items()}
        with np.errstate(all="ignore"):
            solved = self.truth(xp, values)
        return {name: np.asarray(r if xp is np else r.detach()) for name, r in solved.items()}


def build(
    problem: Problem, engine: str = "cpu", knobs: Mapping[str, Any] | None = None, device: Any = "cpu"
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The built graph, and its input and output tensors by name."""
    graph = opgraph.pygraph(
        problem.id,
        io_data_type=problem.io,
        intermediate_data_type=problem.intermediate,
        compute_data_type=problem.compute,
    )
    tensors = {
        name: graph.tensor(given.dim, given.stride, given.dtype, is_pass_by_value=given.by_value, name=name)
        for name, given in problem.inputs.items()
    }
    outputs = {
        name: t.set_output(True) for name, t in problem.declare(graph, tensors).items() if t is not None
    }
    graph.build(engine=engine, knobs=knobs, device=device)
    return graph, tensors, outputs


def compute(
    problem: Problem,
    engine: str = "cpu",
    knobs: Mapping[str, Any] | None = None,
    make_buffer: BufferMaker = NumpyBuffer,
    *,
    make_input: BufferMaker | None = None,
    device: Any = "cpu",
) -> dict[str, Array]:
    """Runs a problem end to end on an engine and returns its outputs in their own types.

    Checks everything but the numbers. Outputs and workspace start as NaN; padding, guards, inputs and
    everything around the workspace must stay as they were; dims, strides and data types must be those the
    problem expects. `make_input` makes the buffers of inputs where they differ from those of outputs and
    workspace. Raises what `build` and `execute` raise, and AssertionError.
    """
    graph, tensors, outputs = build(problem, engine, knobs, device)
    where = f"{problem.id} on {graph.plans[0].name}"
    for name, tensor in outputs.items():
        _check_geometry(f"{where}: {name}", tensor, problem.expect.get(name))

    pack: dict[Any, Any] = {}
    given: dict[str, Region] = {}
    for name, source in problem.inputs.items():
        if source.by_value:
            pack[tensors[name]] = source.values
            continue
        given[name] = Region(source.dim, source.stride, source.dtype, make_input or make_buffer)
        given[name].fill(source.values)
        pack[tensors[name]] = given[name].operand
    written: dict[str, Region] = {}
    for name, tensor in outputs.items():
        written[name] = Region(tensor.get_dim(), tensor.get_stride(), tensor.get_data_type(), make_buffer)
        pack[tensor] = written[name].operand
    size = graph.get_workspace_size()
    workspace = Region((size,), (1,), data_type.UINT8, make_buffer) if size else None
    graph.execute(pack, None if workspace is None else workspace.operand)

    results = {name: region.values() for name, region in written.items()}
    if workspace is not None:
        written["workspace"] = workspace
    for name, region in written.items():
        changed = region.changed_outside()
        assert changed is None, f"{where}: {name}: {changed}"
    for name, region in given.items():
        changed = region.changed()
        assert changed is None, f"{where}: input {name}: {changed}"
    return results


def run_case(
    problem: Problem,
    engine: str = "cpu",
    knobs: Mapping[str, Any] | None = None,
    make_buffer: BufferMaker = NumpyBuffer,
    *,
    make_input: BufferMaker | None = None,
    truth: Mapping[str, Array] | None = None,
    device: Any = "cpu",
) -> dict[str, Array]:
    """`compute`, and every output must equal the truth within tolerance. The truth comes from NumPy unless
    given."""
    found = compute(problem, engine, knobs, make_buffer, make_input=make_input, device=device)
    expected = problem.solve(np) if truth is None else truth
    where = f"{problem.id} on {engine} {dict(knobs or {})}"
    assert set(found) == set(expected), f"{where}: outputs {sorted(found)}, truth {sorted(expected)}"
    for name, values in found.items():
        rules = problem.expect.get(name, Expect())
        dtype = rules.dtype or problem.io
        wrong = mismatch(
            values,
            expected[name],
            dtype,
            statistic_of=rules.statistic_of,
            exact=rules.exact,
            frobenius=rules.frobenius,
        )
        assert wrong is None, f"{where}: {name}: {wrong}"
    return found


def _check_geometry(where: str, tensor: Any, expect: Expect | None) -> None:
    if expect is None:
        return
    for what, found, wanted in (
        ("dim", tensor.get_dim(), expect.dim),
        ("stride", tensor.get_stride(), expect.stride),
        ("data type", tensor.get_data_type(), expect.dtype),
    ):
        if wanted is not None:
            found = found if isinstance(found, data_type) else tuple(found)
            assert found == wanted, f"{where}: {what} {found}, expected {wanted}"
