"""Graphs whose plan is a Python function: what an engine sees of a call, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import opgraph as og
from opgraph.engines.support import CompiledPlan
from opgraph.ir.tensor import row_major
from opgraph.planning.executable import Binding, make_executable

CPU = (1, 0)

Run = Callable[[Any], None]


def install(
    graph: og.pygraph,
    run: Run | None,
    *,
    device: tuple[int, int] = CPU,
    dynamic: bool = False,
    facts: dict[str, dict[str, Any]] | None = None,
    **plan: Any,
) -> Any:
    """Gives `graph` a plan that calls `run(pack)`, and returns its executable.

    `facts` overwrites what the native core is told of an operand, by name; `plan` goes to `CompiledPlan`.
    """
    bound = {tensor.uid: buffer for tensor, buffer in graph._bound.items()}
    binding = Binding(graph.name, graph._ir.snapshot(), graph._ir.all_tensors, bound, device, 0, dynamic=dynamic)
    for operand in binding.operands:
        operand.update((facts or {}).get(operand["name"], {}))
    graph._executable = make_executable(binding, CompiledPlan(run, **{"overrides": True, "dynamic": True, **plan}))
    return graph._executable


class OneOperand:
    """A graph Y = identity(X) in which one of the two is the operand under test, `tensor`.

    `give(buffer)` executes with it. As an input, what the plan read of its slot is in `read`. As an output, the plan
    writes 1, 2, 3, ... in the declared order of its elements. `slots` holds the slots of the last call.
    """

    def __init__(
        self,
        dims: Sequence[int],
        strides: Sequence[int] | None = None,
        data_type: Any = og.data_type.FLOAT,
        *,
        output: bool = False,
        device: tuple[int, int] = CPU,
        touch: bool = True,
        **declared: Any,
    ) -> None:
        self.graph = og.pygraph("one", io_data_type=data_type)
        self.output = output
        self.touch = touch
        self.read: Any = None
        self.slots: list[Any] = []
        x = self.graph.tensor(dims, None if output else strides, data_type, name="X", **({} if output else declared))
        y = self.graph.identity(x).set_output(True).set_name("Y")
        y.set_data_type(data_type)
        if output:
            y.set_dim(dims).set_stride(strides)
        else:
            y.set_stride(row_major(tuple(dims)))
        self.tensor = y if output else x
        self.other = x if output else y
        self.executable = install(self.graph, self._run, device=device)
        self.rest: Any = 1 << 40  # a bare address that nobody touches serves the other operand

    def _run(self, pack: Any) -> None:
        slot = pack[pack.uids.index(self.tensor.uid)]
        self.slots = [pack[i] for i in range(len(pack))]
        if not self.touch:
            return
        if self.output:
            view = slot.numpy()
            view[...] = np.arange(1, view.size + 1).reshape(view.shape)
        else:
            self.read = slot.numpy().copy()

    def give(self, buffer: Any, **arguments: Any) -> Any:
        self.read, self.slots = None, []
        self.graph.execute({self.tensor: buffer, self.other: self.rest}, **arguments)
        return self.read

    def refusal(self, buffer: Any, **arguments: Any) -> str:
        """The rule that refuses the buffer, "" when it is accepted. Checks what every refusal has to name."""
        try:
            self.give(buffer, **arguments)
        except og.OperandError as error:
            assert (error.tensor, error.uid) == (self.tensor.name, self.tensor.uid)
            assert repr(error.tensor) in str(error) and f"uid {error.uid}" in str(error)
            assert error.declared and error.given and error.next_step
            assert str(error.declared) in str(error) and str(error.given) in str(error)
            assert not self.slots, "the plan ran"
            return str(error.rule)
        return ""
