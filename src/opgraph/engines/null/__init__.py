"""The engine that does nothing: for tests of everything around an engine, and for measuring what a call
costs.

Never proposed unless named (`build(engine="null")`). It takes every graph on every device, real or fake,
leaves all outputs as they are, and can ask for a workspace to see how a call treats one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from opgraph.engines.support import Candidate, Carve, CompiledPlan, Engine, Target, layout_carves
from opgraph.ir.enums import knob_type

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec

__all__ = ["ENGINE", "NullEngine"]


class NullEngine(Engine):
    """See the module."""

    name = "null"
    engine_ids: ClassVar = {20100: {}}
    knobs: ClassVar = {
        "workspace": "bytes of workspace to ask for (an int of 0 or more); default: what the carves need",
        "carves": "regions to carve from the workspace, a list of (data_type, shape)",
    }
    knob_types: ClassVar = {knob_type.WORKSPACE: "workspace"}
    named_only = True

    def propose(self, spec: GraphSpec, target: Target) -> list[Candidate]:
        self.check(spec, target)
        _, workspace = _workspace(target.knobs)
        return [Candidate(self.name, 20100, target.knobs, workspace_bytes=workspace)]

    def compile(self, spec: GraphSpec, candidate: Candidate, target: Target) -> CompiledPlan:
        carves, workspace = _workspace(candidate.knobs)
        outputs = [i for i, t in enumerate(spec.operands) if t.is_output]
        inputs = [i for i, t in enumerate(spec.operands) if not t.is_output]
        return CompiledPlan(
            None,
            workspace_bytes=workspace,
            carves=carves,
            inplace=[(o, i) for o in outputs for i in inputs],  # nothing is written, so every pair is safe
            overrides=True,
            dynamic=True,
        )


def _workspace(knobs: Any) -> tuple[tuple[Carve, ...], int]:
    carves, need = layout_carves(knobs.get("carves", ()))
    workspace = knobs.get("workspace", need)
    if not isinstance(workspace, int) or isinstance(workspace, bool) or workspace < need:
        raise ValueError(
            f"engine 'null': knob workspace: expected an int of {need} bytes or more, got {workspace!r}"
        )
    return carves, workspace


ENGINE = NullEngine()
