"""The reference engine: every operator in NumPy, on host memory. Always present; the oracle of every other
engine.

Knob `precision`: `native` computes FLOAT, HALF and BFLOAT16 nodes in float32 with the BLAS that NumPy uses;
`float64` computes them in float64 and rounds each result once, which is what conformance tests compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from opgraph.engines.cpu.program import compile_program
from opgraph.engines.support import Candidate, CompiledPlan, Constraint, Engine, Target
from opgraph.ir.datatypes import element_bits, numpy_dtype
from opgraph.ir.enums import data_type, tensor_reordering
from opgraph.ir.errors import cudnnGraphNotSupportedError, tensor_label
from opgraph.ir.tensor import MAX_RANK
from opgraph.ops import OPS

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec

__all__ = ["ENGINE", "CpuEngine"]

_IDS = {20000: {"precision": "native"}, 20001: {"precision": "float64"}}


def _device(spec: GraphSpec, target: Target) -> str | None:
    return None if target.device.is_cpu else f"the graph's device is {target.device}"


def _operators(spec: GraphSpec, target: Target) -> str | None:
    unknown = [f"{n.op} ({n.name!r})" for n in spec.nodes if n.op not in OPS]
    return ", ".join(unknown) or None


def _data_types(spec: GraphSpec, target: Target) -> str | None:
    found: dict[str, str] = {}
    for tensor in spec.tensors.values():
        if tensor.data_type.name in found:
            continue
        try:
            numpy_dtype(tensor.data_type)
        except (ImportError, cudnnGraphNotSupportedError) as error:
            found[tensor.data_type.name] = f"{tensor_label(tensor)} is {tensor.data_type.name}: {error}"
    return "; ".join(found.values()) or None


def _rank(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.tensors.values():
        if len(tensor.dim) > MAX_RANK:
            return f"{tensor_label(tensor)} has {len(tensor.dim)}"
    return None


def _reordering(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.operands:
        if tensor.reordering_type is None:
            continue
        tiles = tensor.reordering_type is tensor_reordering.F8_128x4 and tensor.ragged_offset is None
        if not tiles or len(tensor.dim) < 2 or element_bits(tensor.data_type) != 8:
            kind = tensor.data_type.name
            return f"{tensor_label(tensor)} has {tensor.reordering_type}, is {kind} with dim {tensor.dim}"
    return None


def _packed(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.operands:
        if tensor.data_type not in (data_type.FP4_E2M1, data_type.INT4):
            continue
        axes = list(zip(tensor.dim, tensor.stride, strict=True))
        unit = [a for a, (extent, step) in enumerate(axes) if step == 1 and extent > 1]
        others = [step for a, (extent, step) in enumerate(axes) if extent > 1 and a not in unit[-1:]]
        if not unit or tensor.dim[unit[-1]] % 2 or any(step % 2 for step in others):
            kind = tensor.data_type.name
            return f"{tensor_label(tensor)} is {kind} with dim {tensor.dim} stride {tensor.stride}"
    return None


def _ragged(spec: GraphSpec, target: Target) -> str | None:
    for tensor in spec.operands:
        if tensor.ragged_offset is None:
            continue
        if len(tensor.dim) != 4:
            return f"{tensor_label(tensor)} has {len(tensor.dim)} axes"
        if spec.tensors[tensor.ragged_offset].is_virtual:
            return f"the offsets of {tensor_label(tensor)} are computed by the graph"
    return None


class CpuEngine(Engine):
    """See the module."""

    name = "cpu"
    engine_ids: ClassVar = _IDS
    knobs: ClassVar = {
        "precision": "native (float32, NumPy's BLAS) or float64 (accumulate in float64, round once)"
    }
    constraints = (
        Constraint("device", "it runs on host memory", _device),
        Constraint("operator", "every operator needs a NumPy reference", _operators),
        Constraint("data type", "every tensor needs a NumPy or ml_dtypes type", _data_types),
        Constraint("rank", f"tensors have at most {MAX_RANK} axes", _rank),
        Constraint(
            "reordering",
            "operands are addressed by strides, or are F8_128x4 tiles of a matrix of 8-bit factors",
            _reordering,
        ),
        Constraint(
            "packing",
            "4-bit operands lie in pairs along an even axis of stride 1, other strides even",
            _packed,
        ),
        Constraint(
            "ragged", "ragged operands are [batch, heads, rows, width] with offsets in host memory", _ragged
        ),
    )

    def propose(self, spec: GraphSpec, target: Target) -> list[Candidate]:
        self.check(spec, target)
        asked = target.knobs.get("precision")
        known = [knobs["precision"] for knobs in _IDS.values()]
        if asked is not None and asked not in known:
            raise ValueError(
                f"engine 'cpu': knob precision: expected one of {', '.join(known)}, got {asked!r}"
            )
        elements = sum(_count(t.dim) for t in spec.tensors.values())
        found = []
        for engine_id, knobs in _IDS.items():
            if asked is None or asked == knobs["precision"]:
                # About 1 ns per element and 10 us per node; float64 doubles the traffic.
                precise = knobs["precision"] == "float64"
                estimate = 10.0 * len(spec.nodes) + elements * (2e-3 if precise else 1e-3)
                found.append(
                    Candidate(
                        self.name, engine_id, knobs, estimate=estimate, fallback=precise, workspace_bytes=0
                    )
                )
        return found

    def compile(self, spec: GraphSpec, candidate: Candidate, target: Target) -> CompiledPlan:
        program = compile_program(spec, precise=candidate.knobs["precision"] == "float64")
        return CompiledPlan(program.run, inplace=program.inplace, overrides=True, dynamic=True)


def _count(dim: tuple[int, ...]) -> int:
    total = 1
    for extent in dim:
        total *= extent
    return total


ENGINE = CpuEngine()
