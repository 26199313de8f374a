"""Which engine takes a graph, and why the others do not: asked without compiling anything.

`survey` puts the question to every engine once; planning ranks what it returns, `explain` and the
not-supported error print it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opgraph.engines.device import CUDA, cuda_absence
from opgraph.engines.support import Candidate, Declined, Engine, Target
from opgraph.ir.errors import cudnnGraphNotSupportedError
from opgraph.planning.messages import note_error

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec
    from opgraph.planning.plan import Plan
    from opgraph.planning.registry import Registry

__all__ = ["Verdict", "not_supported", "survey", "text"]


class Verdict:
    """What one engine said about a graph: its candidates, or its reasons against it."""

    __slots__ = ("candidates", "engine", "reasons")

    def __init__(
        self, engine: str, candidates: Sequence[Candidate] = (), reasons: Sequence[str] = ()
    ) -> None:
        self.engine = engine
        self.candidates = tuple(candidates)
        self.reasons = tuple(reasons)


def survey(spec: GraphSpec, target: Target, engines: Registry) -> list[Verdict]:
    """One verdict per engine, in registry order. Only the engine that `target` pins is asked, if it pins
    one."""
    known = engines.engines()
    verdicts: list[Verdict] = []
    if target.engine is not None and target.engine not in engines.names():
        names = ", ".join(engines.names())
        verdicts.append(Verdict(target.engine, reasons=[f"unknown engine name; known engines: {names}"]))
    for engine in known:
        verdicts.append(_ask(engine, spec, target))
    for name, reason in engines.unavailable().items():
        verdicts.append(Verdict(name, reasons=[reason]))
    return verdicts


def _ask(engine: Engine, spec: GraphSpec, target: Target) -> Verdict:
    if target.engine is not None and target.engine != engine.name:
        return Verdict(engine.name, reasons=[f"not asked: engine={target.engine!r} is pinned"])
    if engine.named_only and target.engine != engine.name:
        return Verdict(engine.name, reasons=[f"proposed only when named: build(engine={engine.name!r})"])
    try:
        candidates = engine.propose(spec, target)
    except Declined as refusal:
        return Verdict(engine.name, reasons=refusal.reasons or ("declined without a reason",))
    return Verdict(engine.name, candidates, () if candidates else ("proposes no plan",))


def reason_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """One line per engine that does not take the graph."""
    return [f"  {v.engine}: {'; '.join(v.reasons)}" for v in verdicts if not v.candidates]


def not_supported(
    name: str, target: Target, verdicts: Sequence[Verdict], extra: Sequence[str] = ()
) -> Exception:
    """The exception for a well-formed graph that nothing runs: one line per engine and reason."""
    lines = [f"graph {name!r}: no engine runs it on {target.device}"]
    if target.device.device_type == CUDA and not target.device.is_fake and cuda_absence():
        lines[0] += f" ({cuda_absence()})"
    lines += reason_lines(verdicts)
    lines += extra
    return cudnnGraphNotSupportedError(note_error("\n".join(lines)))


def text(
    name: str,
    target: Target,
    verdicts: Sequence[Verdict],
    plans: Sequence[Plan] = (),
    selected: int = -1,
    barred: Sequence[str | None] = (),
) -> str:
    """The answer of `graph.explain()`."""
    count = len(plans) if plans else sum(len(v.candidates) for v in verdicts)
    lines = [f"graph {name!r} on {target.device}: {count} plan{'' if count == 1 else 's'}"]
    for verdict in verdicts:
        if not verdict.candidates:
            continue
        lines.append(f"  {verdict.engine}: proposes {', '.join(c.name for c in verdict.candidates)}")
    lines += reason_lines(verdicts)
    for plan in plans:
        state = (
            "failed to build: " + plan.failure if plan.failure else "built" if plan.compiled else "not built"
        )
        marks = ["selected"] if plan.index == selected else []
        if barred and barred[plan.index]:
            marks.append(f"barred by {barred[plan.index]}")
        tail = f" ({', '.join(marks)})" if marks else ""
        lines.append(f"  plan {plan.index}: {plan.name}, engine id {plan.engine_id}: {state}{tail}")
    return "\n".join(lines)
