"""Our own compiled GPU kernels, launched natively: graphs of pointwise operators become one kernel each.

The kernel is generated from the graph, compiled for the device by NVRTC at `build()` (cached on disk), and issued by
the native program; nothing of a kernel language's launcher is on the path of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from opgraph.engines.device import CUDA
from opgraph.engines.fused.pointwise import FORMULAS, STORAGE, Kernel, generate, shape_of
from opgraph.engines.support import Candidate, CompiledPlan, Constraint, Engine, Target
from opgraph.ir.enums import behavior_note, data_type

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec

__all__ = ["ENGINE", "FusedEngine"]

_COMPUTE = (data_type.FLOAT, data_type.DOUBLE, data_type.INT32, data_type.INT64, data_type.INT8, data_type.UINT8)


def _device(spec: GraphSpec, target: Target) -> str | None:
    if target.device.device_type != CUDA:
        return f"the graph runs on {target.device}"
    if target.device.is_fake:
        return "the device is a fake"
    return None if target.device.compute_capability else f"no driver shows {target.device}"


def _operators(spec: GraphSpec, target: Target) -> str | None:
    other = sorted({n.op for n in spec.nodes if n.op not in FORMULAS and n.op != "gen_index"})
    return f"the graph has {', '.join(other)}" if other else None


def _types(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.tensors.values():
        if tensor.data_type not in STORAGE:
            return f"tensor {tensor.name!r} (uid {tensor.uid}) is {tensor.data_type}"
    return None


def _compute(spec: GraphSpec, target: Target) -> str | None:
    for node in spec.nodes:
        if node.compute_data_type not in _COMPUTE and node.compute_data_type not in STORAGE:
            return f"node {node.name!r} computes in {node.compute_data_type}"
    return None


def _shapes(spec: GraphSpec, target: Target) -> str | None:
    shape = shape_of(spec)
    for tensor in spec.operands:
        if tensor.is_output and (1,) * (len(shape) - len(tensor.dim)) + tensor.dim != shape:
            return f"output {tensor.name!r} (uid {tensor.uid}) has {tensor.dim}, the graph {shape}"
    return None


def _plain(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.tensors.values():
        if tensor.ragged_offset is not None:
            return f"tensor {tensor.name!r} (uid {tensor.uid}) is ragged"
        if tensor.reordering_type is not None and tensor.reordering_type.value:
            return f"tensor {tensor.name!r} (uid {tensor.uid}) is reordered"
    return None


def _fixed(spec: GraphSpec, target: Target) -> str | None:
    return "the graph allows overrides or dynamic shapes" if target.overrides or target.dynamic else None


def _compiler(spec: GraphSpec, target: Target) -> str | None:
    if target.device.device_type != CUDA:
        return None  # the device settles it; a compiler that is not needed is not looked for
    from opgraph.engines.fused.compiler import compiler_absence

    return compiler_absence()


class FusedEngine(Engine):
    """See the module."""

    name = "fused"
    engine_ids: ClassVar = {21000: {}}
    constraints = (
        Constraint("device", "runs on CUDA devices that are there", _device),
        Constraint("operators", "fuses pointwise operators only", _operators),
        Constraint("data types", "stores " + ", ".join(t.name for t in STORAGE), _types),
        Constraint("compute", "computes in FLOAT, DOUBLE or integers", _compute),
        Constraint("shapes", "all outputs have the broadcast shape of the graph", _shapes),
        Constraint("layout", "no ragged or reordered tensors", _plain),
        Constraint("overrides", "extents are compiled into the kernel", _fixed),
        Constraint("compiler", "needs NVRTC", _compiler),
    )

    def propose(self, spec: GraphSpec, target: Target) -> list[Candidate]:
        self.check(spec, target)
        note = (behavior_note.RUNTIME_COMPILATION,)
        return [Candidate(self.name, 21000, target.knobs, estimate=1.0, workspace_bytes=0, behavior_notes=note)]

    def compile(self, spec: GraphSpec, candidate: Candidate, target: Target) -> CompiledPlan:
        from opgraph import _native

        wide = generate(spec, vectorise=True)
        ordinal = target.device.ordinal
        capability = target.device.compute_capability
        ranks = [len(t.dim) for t in spec.operands]
        program = None
        if wide.aligned:  # addresses of lower alignment run the form without wide accesses
            program = _native.make_program(ordinal, _steps(generate(spec, vectorise=False), ordinal, capability), ranks)
        steps = _steps(wide, ordinal, capability)
        program = _native.make_program(ordinal, steps, ranks, needs=wide.aligned, otherwise=program)
        return CompiledPlan(program, inplace=_inplace(spec), overrides=False, dynamic=False, resources=program)


def _steps(kernel: Kernel, ordinal: int, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """The one launch of a kernel; none for an empty graph."""
    from opgraph import _native
    from opgraph.engines.fused.compiler import compile_cubin

    if not kernel.grid:
        return []
    module = _native.load_module(compile_cubin(kernel.source, kernel.name, capability), ordinal)
    return [
        {
            "kind": "kernel",
            "function": _native.get_function(module, kernel.name),
            "grid": (kernel.grid, 1, 1),
            "block": (kernel.block, 1, 1),
            "shared": 0,
            "attributes": [],
            "parameters": kernel.parameters,
        }
    ]


def _inplace(spec: GraphSpec) -> list[tuple[int, int]]:
    """A thread reads its elements of every tensor before it writes: an input laid out like the output may be it."""
    places = {t.uid: i for i, t in enumerate(spec.operands)}
    outputs = [t for t in spec.operands if t.is_output]
    if len(outputs) != 1:
        return []  # one output's store could precede another thread's read only through a broadcast input; be strict
    output = outputs[0]
    return [
        (places[output.uid], places[t.uid])
        for t in spec.operands
        if not t.is_output and t.dim == output.dim and t.stride == output.stride and t.data_type is output.data_type
    ]


ENGINE = FusedEngine()
