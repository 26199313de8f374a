"""An engine outside opgraph: float32 graphs of add, mul, scale and identity on the CPU, one C++ function per
node.

It shows the whole interface. `constraints` is the support table that `graph.explain()` reads, `propose`
offers a plan without compiling anything, `compile` makes it, and the plan's `run` hands slots of the variant
pack straight to functions that tvm-ffi compiled: a slot brings the address, so nothing is copied and no
framework takes part. Virtual tensors live in regions of the caller's workspace, which the plan asks for as
carves.
"""

from __future__ import annotations

import shutil
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from opgraph import data_type
from opgraph.engines.support import Candidate, CompiledPlan, Constraint, Engine, Target, layout_carves

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec, TensorSpec

__all__ = ["ENGINE", "TvmFfiEngine"]

# An input of one element is repeated. Inputs and output are dense, so a flat index serves them all.
SOURCE = """
#include <tvm/ffi/tvm_ffi.h>

using tvm::ffi::TensorView;

template <typename Function>
void each(TensorView a, TensorView b, TensorView out, Function function) {
  const float* x = static_cast<const float*>(a.data_ptr());
  const float* y = static_cast<const float*>(b.data_ptr());
  float* z = static_cast<float*>(out.data_ptr());
  const int64_t count = out.numel(), step_x = a.numel() > 1, step_y = b.numel() > 1;
  for (int64_t i = 0; i < count; ++i) z[i] = function(x[i * step_x], y[i * step_y]);
}

void add(TensorView a, TensorView b, TensorView out) {
  each(a, b, out, [](float x, float y) { return x + y; });
}
void mul(TensorView a, TensorView b, TensorView out) {
  each(a, b, out, [](float x, float y) { return x * y; });
}
void copy(TensorView a, TensorView out) {
  each(a, a, out, [](float x, float) { return x; });
}
// What a tensor argument looks like from C++, for tests.
int64_t address(TensorView a) { return reinterpret_cast<int64_t>(a.data_ptr()); }
"""

FUNCTIONS = {"add": "add", "mul": "mul", "scale": "mul", "identity": "copy"}  # operator -> C++ function

_lock = Lock()
_module: Any = None


def functions() -> Any:
    """The compiled functions. The first call of a process compiles (seconds) or finds them in tvm-ffi's
    cache."""
    global _module
    with _lock:
        if _module is None:
            from tvm_ffi.cpp import load_inline  # not before a plan is built: its import takes a second

            names = sorted({*FUNCTIONS.values(), "address"})
            _module = load_inline(name="opgraph_example", cpp_sources=SOURCE, functions=names)
        return _module


def _count(tensor: TensorSpec) -> int:
    count = 1
    for extent in tensor.dim:
        count *= extent
    return count


def _device(spec: GraphSpec, target: Target) -> str | None:
    return None if target.device.is_cpu else f"the graph's device is {target.device}"


def _operators(spec: GraphSpec, target: Target) -> str | None:
    return ", ".join(f"{node.op} ({node.name!r})" for node in spec.nodes if node.op not in FUNCTIONS) or None


def _data_types(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.tensors.values():
        if tensor.data_type is not data_type.FLOAT:
            return f"tensor {tensor.name!r} is {tensor.data_type.name}"
    for node in spec.nodes:
        if node.compute_data_type is not data_type.FLOAT:
            return f"node {node.name!r} computes in {node.compute_data_type.name}"
    return None


def _shapes(spec: GraphSpec, target: Target) -> str | None:
    for node in spec.nodes:
        (out,) = (spec.tensors[uid] for uid in node.outputs.values())
        for uid in node.inputs.values():
            tensor = spec.tensors[uid]
            if tensor.dim != out.dim and _count(tensor) != 1:
                return f"tensor {tensor.name!r} is {tensor.dim}, the output of {node.name!r} is {out.dim}"
    return None


def _layouts(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.operands:
        step = 1
        for extent, stride in zip(reversed(tensor.dim), reversed(tensor.stride), strict=True):
            if extent != 1 and stride != step and _count(tensor):
                return f"tensor {tensor.name!r} has strides {tensor.stride} for dims {tensor.dim}"
            step *= extent
    return None


def _host_scalars(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.tensors.values():
        if tensor.is_pass_by_value:
            return f"tensor {tensor.name!r} is passed by value"
    return None


def _compiler(spec: GraphSpec, target: Target) -> str | None:
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    return f"not found: {', '.join(missing)}" if missing else None


class TvmFfiEngine(Engine):
    """See the module."""

    name = "tvm_ffi_example"
    engine_ids: ClassVar = {28000: {}}
    constraints = (
        Constraint("device", "it runs on host memory", _device),
        Constraint("operator", f"the operators are {', '.join(FUNCTIONS)}", _operators),
        Constraint("data type", "everything is FLOAT", _data_types),
        Constraint("shape", "an input has the output's dims, or one element", _shapes),
        Constraint("layout", "operands are dense and row-major", _layouts),
        Constraint("by value", "no operand is a host scalar", _host_scalars),
        Constraint("compiler", "building a plan compiles C++", _compiler),
    )

    def propose(self, spec: GraphSpec, target: Target) -> list[Candidate]:
        self.check(spec, target)
        _, workspace = layout_carves(_regions(spec))
        # Listed behind the library's own engine, so that it runs only where it is named or nothing else does.
        return [Candidate(self.name, 28000, estimate=1e6, workspace_bytes=workspace)]

    def compile(self, spec: GraphSpec, candidate: Candidate, target: Target) -> CompiledPlan:
        module = functions()
        carves, workspace = layout_carves(_regions(spec))
        # Where a tensor is at call time: operand i of the pack at i, carve k after all operands.
        places = {tensor.uid: i for i, tensor in enumerate([*spec.operands, *_virtual(spec)])}
        steps = tuple(
            (
                getattr(module, FUNCTIONS[node.op]),
                tuple(places[uid] for uid in (*node.inputs.values(), *node.outputs.values())),
            )
            for node in spec.nodes
        )
        count = len(spec.operands)

        def run(pack: Any) -> None:
            slots = [*(pack[i] for i in range(count)), *pack.carves]
            for function, arguments in steps:
                function(*[slots[i] for i in arguments])

        # The functions take extents from the slots, but carves are laid out for the declared ones.
        return CompiledPlan(run, workspace_bytes=workspace, carves=carves, overrides=False, dynamic=False)


def _virtual(spec: GraphSpec) -> list[TensorSpec]:
    return [tensor for tensor in spec.tensors.values() if tensor.is_virtual]


def _regions(spec: GraphSpec) -> list[tuple[data_type, tuple[int, ...]]]:
    """What the plan needs in the workspace: one region for each virtual tensor."""
    return [(data_type.FLOAT, tensor.dim) for tensor in _virtual(spec)]


ENGINE = TvmFfiEngine()
