"""From a graph to a list of steps over numbered registers, and the loop that runs them.

Everything that does not depend on a call is decided here: which register each port reads, the arithmetic of
each node, when a temporary is dropped, and which output may share memory with which input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opgraph.engines.cpu.storage import Plain, storage_of
from opgraph.ir.datatypes import numpy_dtype, round_to, scalar_bytes
from opgraph.ir.errors import OperandError, explain, node_label, tensor_label
from opgraph.ops.base import ContentsError, Math, OutSpec, RefCall

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec, NodeSpec, TensorSpec

__all__ = ["Program", "compile_program"]


class _Output:
    """One output port of a step. `operand`: it has a buffer; `needed`: something reads it later."""

    __slots__ = ("data_type", "dtype", "needed", "operand", "port", "register", "spec", "storage", "uid")

    def __init__(
        self, port: str, tensor: TensorSpec, register: int, operand: bool, needed: bool, storage: Any
    ) -> None:
        self.port = port
        self.uid = tensor.uid
        self.register = register
        self.data_type = tensor.data_type
        self.dtype = numpy_dtype(tensor.data_type)
        self.operand = operand
        self.needed = needed
        self.storage = storage
        # Where the call has no buffer of its own.
        self.spec = OutSpec(tensor.dim, tensor.data_type, self.dtype, None, tensor.reordering_type)


class _Step:
    """One node. `drops`: registers whose last reader it is. `owns`: its results may not share an input's
    memory."""

    __slots__ = (
        "check",
        "drops",
        "inputs",
        "label",
        "math",
        "outputs",
        "owns",
        "params",
        "ports",
        "reference",
        "strides",
        "tensors",
    )

    def __init__(
        self,
        node: NodeSpec,
        inputs: tuple[tuple[str, int], ...],
        outputs: tuple[_Output, ...],
        math: Math,
        strides: dict[str, tuple[int, ...]],
        tensors: dict[str, TensorSpec],
    ) -> None:
        self.reference = node.definition.reference  # type: ignore[attr-defined]
        self.check = node.definition.check  # type: ignore[attr-defined]
        self.label = node_label(node)
        self.tensors = tensors
        self.params = node.params
        self.inputs = inputs
        self.outputs = outputs
        self.math = math
        self.ports = {**node.inputs, **node.outputs}
        self.strides = strides
        # A view that the operator declares is tracked at compile. One that slips through (identity of an
        # equal type) would see an in-place output change under it, so it is copied; so are several results,
        # which are stored one by one. A single result that goes straight into its buffer needs no look.
        kept = any(not out.operand for out in outputs)
        declared = node.definition.alias_view  # type: ignore[attr-defined]
        self.owns = len(outputs) > 1 or (kept and not declared)
        self.drops: tuple[int, ...] = ()

    def check_operands(self, values: list[Any]) -> None:
        """Refuses lengths, offsets and indices that do not fit, in inputs that no node computes."""
        held = {port: values[register] for port, register in self.inputs if not self.tensors[port].is_output}
        try:
            self.check(self.params, held)
        except ContentsError as error:
            raise self.refusal(error) from None

    def refusal(self, error: ContentsError) -> OperandError:
        """The error with the tensor's name."""
        tensor = self.tensors[error.port]
        where = f"{self.label}, {tensor_label(tensor)}"
        return OperandError(
            explain(where, error.rule, expected=error.expected, given=error.given),
            tensor=tensor.name,
            uid=tensor.uid,
            rule="contents",
            declared=error.expected,
            given=error.given,
            next_step="pass contents that fit the other operands",
        )


class Program:
    """The steps of one graph. Immutable; `run` keeps everything of a call in its own list."""

    __slots__ = ("_checked", "_hazards", "_loads", "_registers", "_steps", "inplace")

    def __init__(
        self,
        registers: list[Any],
        loads: tuple[tuple[int, Any], ...],
        steps: tuple[_Step, ...],
        inplace: tuple[tuple[int, int], ...],
        hazards: tuple[tuple[int, int], ...],
    ) -> None:
        self._registers = registers
        self._loads = loads
        self._steps = steps
        self._checked = tuple(step for step in steps if step.check is not None)
        self.inplace = inplace
        self._hazards = hazards

    def run(self, pack: Any) -> None:
        """Runs the graph on the operands of one call."""
        values = self._registers.copy()
        geometry = pack.geometry
        with np.errstate(all="ignore"):
            for index, storage in self._loads:
                values[index] = storage.load(pack[index], values)
            for output, source in self._hazards:
                if pack[output].present and pack[output].ptr == pack[source].ptr and values[source] is not None:
                    values[source] = values[source].copy()  # it is read after the output that shares its buffer
            for step in self._checked:
                step.check_operands(values)
            for step in self._steps:
                arrays = {port: values[register] for port, register in step.inputs}
                targets = {}
                for out in step.outputs:
                    targets[out.port] = _target(out, values, geometry)
                strides = step.strides
                if geometry is not None:
                    strides = {port: geometry[uid][1] for port, uid in step.ports.items()}
                try:
                    results = step.reference(RefCall(step.params, arrays, targets, step.math, strides))
                except ContentsError as error:
                    raise step.refusal(error) from None
                if step.owns:
                    _own(results, arrays, targets, len(step.outputs) > 1)
                for out in step.outputs:
                    _store(out, results, targets[out.port], pack, values)
                for register in step.drops:
                    values[register] = None


def _target(out: _Output, values: list[Any], geometry: Any) -> OutSpec:
    view = values[out.register]
    if view is not None:
        return OutSpec(view.shape, out.data_type, out.dtype, view)
    if geometry is not None:
        return OutSpec(geometry[out.uid][0], out.data_type, out.dtype, None, out.spec.reordering)
    return out.spec


def _own(results: Any, arrays: Any, targets: Any, several: bool) -> None:
    """Copies results that share memory with an input, except the one result that is about to be stored
    anyway."""
    for port, array in results.items():
        view = targets[port].view
        if array is None or array is view or array.flags.owndata or (view is not None and not several):
            continue
        if any(np.may_share_memory(array, other) for other in arrays.values()):
            results[port] = array.copy()


def _store(out: _Output, results: Any, target: OutSpec, pack: Any, values: list[Any]) -> None:
    array = results.get(out.port)
    view = target.view
    if array is not None and array is view:
        return
    slot = pack[out.register] if out.operand else None
    present = slot is not None and slot.present
    if not present and not out.needed:
        return  # nobody asked for this result
    if array is None:
        raise RuntimeError(f"the reference left out port {out.port!r}, which is needed")
    if array.shape != target.shape:
        array = array.reshape(target.shape)  # leading extents of 1; anything else raises
    if array.dtype != out.dtype:
        array = round_to(array, out.data_type)
    if view is not None:
        np.copyto(view, array)
        return
    if present:
        out.storage.store(slot, values, array)
    values[out.register] = array if out.needed else None


def compile_program(spec: GraphSpec, *, precise: bool) -> Program:
    """Compiles a graph. `precise`: floating compute types accumulate in float64."""
    count = len(spec.operands)
    register = {t.uid: i for i, t in enumerate(spec.operands)}
    registers: list[Any] = [None] * count
    for tensor in spec.tensors.values():
        if tensor.uid not in register:
            register[tensor.uid] = len(registers)
            registers.append(_constant(tensor) if tensor.pass_by_value is not None else None)

    last_read = _last_reads(spec)
    # Offsets first: loading a ragged operand needs them.
    offsets = {t.ragged_offset for t in spec.operands if t.ragged_offset is not None}
    loads = []
    for i, tensor in sorted(enumerate(spec.operands), key=lambda item: item[1].uid not in offsets):
        storage = storage_of(tensor, register)
        if not tensor.is_output and (tensor.uid in last_read or tensor.uid in offsets):
            loads.append((i, storage))
        if tensor.is_output and storage.direct:
            loads.append((i, _OptionalView() if tensor.is_virtual else storage))

    steps = []
    for position, node in enumerate(spec.nodes):
        inputs = tuple((port, register[uid]) for port, uid in node.inputs.items())
        outputs = tuple(
            _Output(
                port,
                spec.tensors[uid],
                register[uid],
                register[uid] < count,
                uid in last_read,
                storage_of(spec.tensors[uid], register),
            )
            for port, uid in node.outputs.items()
        )
        ports = {**node.inputs, **node.outputs}
        strides = {port: spec.tensors[uid].stride for port, uid in ports.items()}
        named = {port: spec.tensors[uid] for port, uid in node.inputs.items()}
        step = _Step(node, inputs, outputs, Math(node.compute_data_type, precise), strides, named)
        read_here = {*node.inputs.values(), *node.outputs.values()}
        step.drops = tuple(
            sorted(
                register[u]
                for u in read_here
                if register[u] >= count and last_read.get(u, position) == position
            )
        )
        steps.append(step)
    return Program(registers, tuple(loads), tuple(steps), *_inplace_pairs(spec, register, last_read))


class _OptionalView(Plain):
    """An output that the caller may leave out."""

    __slots__ = ()

    def load(self, slot: Any, values: list[Any]) -> Any:
        return slot.numpy() if slot.present else None


def _constant(tensor: TensorSpec) -> np.ndarray[Any, Any]:
    """An embedded scalar in its declared type and dims."""
    data = scalar_bytes(tensor.pass_by_value, tensor.data_type, tensor_label(tensor))
    return np.frombuffer(data, numpy_dtype(tensor.data_type)).reshape(tensor.dim)


def _last_reads(spec: GraphSpec) -> dict[int, int]:
    """uid -> position of the last node that reads it; tensors nobody reads are absent."""
    return {uid: position for position, node in enumerate(spec.nodes) for uid in node.inputs.values()}


def _inplace_pairs(
    spec: GraphSpec, register: dict[int, int], last_read: dict[int, int]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(output, input) operand pairs that may be one buffer, and those of them where a call has to copy the input.

    A node reads all of its inputs before its results are stored, so a pair is free when nothing after the output's
    node reads the input. Where something does, the input is copied first. Reading a view of an input is reading it.
    """
    views: dict[int, set[int]] = {}  # uid of a virtual tensor -> operands it may be a view of
    until = dict(last_read)  # uid of an operand -> last node that reads it, through views too
    produced: dict[int, int] = {}
    for position, node in enumerate(spec.nodes):
        sources: set[int] = set()
        for uid in node.inputs.values():
            reached = views.get(uid, {uid})
            sources |= reached
            for operand in reached:
                until[operand] = position
        for uid in node.outputs.values():
            produced[uid] = position
            if node.definition.alias_view and spec.tensors[uid].is_virtual:  # type: ignore[attr-defined]
                views[uid] = sources
    pairs = [
        (output, source)
        for output in spec.operands
        if output.is_output
        for source in spec.operands
        if not source.is_output and not source.is_pass_by_value and source.data_type is output.data_type
    ]
    late = [(o, s) for o, s in pairs if until.get(s.uid, -1) > produced[o.uid]]
    return (
        tuple((register[o.uid], register[s.uid]) for o, s in pairs),
        tuple((register[o.uid], register[s.uid]) for o, s in late),
    )
