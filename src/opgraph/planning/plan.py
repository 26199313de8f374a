"""The plans of one graph: ranked, filtered, built.

The list is flat and never renumbered: filters bar entries, they do not remove them, so an index keeps its
meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opgraph.engines.support import Candidate, CompiledPlan, Declined, Engine, Target
from opgraph.ir.enums import behavior_note, build_plan_policy, heur_mode, numerical_note
from opgraph.planning.explain import Verdict, not_supported, survey

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec
    from opgraph.planning.registry import Registry

__all__ = ["DEFAULT_HEURISTICS", "Filters", "Plan", "PlanList", "as_heuristics"]

DEFAULT_HEURISTICS = (heur_mode.A, heur_mode.FALLBACK)


class Filters:
    """What bars a plan. Set before or after planning; applies to every later use of an index."""

    __slots__ = (
        "barred_behavior",
        "barred_engines",
        "barred_numeric",
        "needed_behavior",
        "needed_numeric",
        "workspace",
    )

    def __init__(self) -> None:
        self.barred_engines: list[str] = []
        self.workspace: int | None = None
        self.barred_behavior: set[behavior_note] = set()
        self.needed_behavior: set[behavior_note] = set()
        self.barred_numeric: set[numerical_note] = set()
        self.needed_numeric: set[numerical_note] = set()

    def copy(self) -> Filters:
        other = Filters()
        other.barred_engines = list(self.barred_engines)
        other.workspace = self.workspace
        for name in ("barred_behavior", "needed_behavior", "barred_numeric", "needed_numeric"):
            setattr(other, name, set(getattr(self, name)))
        return other

    def bar(self, plan: Plan) -> str | None:
        """The filter that bars this plan, or None."""
        for part in self.barred_engines:
            if part in plan.name:
                return f"deselect_engines([{part!r}])"
        need = plan.workspace_bytes
        if self.workspace is not None and need is not None and need > self.workspace:
            return f"deselect_workspace_greater_than({self.workspace}): it needs {need} bytes"
        behavior, numeric = set(plan.candidate.behavior_notes), set(plan.candidate.numeric_notes)
        for name, found in (
            ("deselect_behavior_notes", self.barred_behavior & behavior),
            ("select_behavior_notes", self.needed_behavior - behavior),
            ("deselect_numeric_notes", self.barred_numeric & numeric),
            ("select_numeric_notes", self.needed_numeric - numeric),
        ):
            if found:
                return f"{name}([{', '.join(sorted(n.name for n in found))}])"
        return None


class Plan:
    """One entry of the plan list.

    Attributes:
        index: its place in the list.
        name: engine and knobs, e.g. `cpu[precision=native]`.
        engine, engine_id, knobs: which engine, and the choice that `create_execution_plan` would repeat.
        compiled: the engine's result once built, else None.
        failure: why it failed to build, or an empty text.
    """

    __slots__ = ("candidate", "compiled", "executable", "failure", "index")

    def __init__(self, index: int, candidate: Candidate) -> None:
        self.index = index
        self.candidate = candidate
        self.compiled: CompiledPlan | None = None
        self.executable: Any = None
        self.failure = ""

    name = property(lambda self: self.candidate.name)
    engine = property(lambda self: self.candidate.engine)
    engine_id = property(lambda self: self.candidate.engine_id)
    knobs = property(lambda self: dict(self.candidate.knobs))
    behavior_notes = property(lambda self: list(self.candidate.behavior_notes))
    numeric_notes = property(lambda self: list(self.candidate.numeric_notes))

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes of workspace it needs; None while unknown (known at the latest once it is built)."""
        return self.candidate.workspace_bytes if self.compiled is None else self.compiled.workspace_bytes

    def __repr__(self) -> str:
        state = "failed" if self.failure else "built" if self.compiled else "not built"
        return f"<plan {self.index}: {self.name}, {state}>"


class PlanList:
    """All plans of one frozen graph, and which of them is selected. Its owner serialises the calls."""

    def __init__(
        self,
        name: str,
        spec: GraphSpec,
        target: Target,
        engines: Registry,
        filters: Filters,
        finish: Callable[[CompiledPlan], Any],
    ) -> None:
        self.name = name
        self.spec = spec
        self.target = target
        self.filters = filters
        self.plans: list[Plan] = []
        self.verdicts: list[Verdict] = []
        self.selected = -1
        self.pinned = False
        self._engines = engines
        self._finish = finish

    # ---- filling the list

    def rank(self, heuristics: Sequence[heur_mode]) -> None:
        """Appends every candidate the heuristic modes list, mode by mode, by falling promise within a mode.

        Raises:
            cudnnGraphNotSupportedError: no engine proposes one; one line per engine and reason.
        """
        target = self.target
        engine = self._engines.find(target.engine) if target.engine is not None else None
        if engine is not None:
            target = self.target = target.pinned(engine.name, named_knobs(engine, target.knobs))
        self.verdicts = survey(self.spec, target, self._engines)
        found = [c for v in self.verdicts for c in v.candidates]
        listed: list[Candidate] = []
        if target.engine is not None:
            listed = sorted(found, key=lambda c: (c.fallback, c.estimate))
        else:
            for mode in heuristics:
                wanted = [c for c in found if c not in listed and self._listed(mode, c)]
                listed += sorted(wanted, key=lambda c: c.estimate)
        if not listed:
            left_out = (
                [f"  not asked for by the heuristics given: {', '.join(c.name for c in found)}"]
                if found
                else []
            )
            raise not_supported(self.name, target, self.verdicts, left_out)
        self.plans += [Plan(len(self.plans) + i, c) for i, c in enumerate(listed)]

    def append(self, engine_id: int, knobs: Mapping[Any, Any] | None) -> Plan:
        """Appends the one plan an engine id and its knobs name.

        Raises:
            ValueError: no engine has this id, or the engine has no such knob.
            cudnnGraphNotSupportedError: the engine declines the graph.
        """
        engine = self._engines.by_id(engine_id)
        if engine is None:
            raise ValueError(f"create_execution_plan: {self._engines.unknown_id(engine_id)}")
        given = named_knobs(engine, knobs or {})
        for key, fixed in engine.engine_ids[engine_id].items():
            if given.get(key, fixed) != fixed:
                raise ValueError(
                    f"create_execution_plan: engine id {engine_id} stands for {key}={fixed}, which {key}={given[key]} "
                    "contradicts; use the id of that value"
                )
        values = {**engine.engine_ids[engine_id], **given}
        target = self.target.pinned(engine.name, values)
        verdict = next(v for v in survey(self.spec, target, self._engines) if v.engine == engine.name)
        match = [c for c in verdict.candidates if c.engine_id == engine_id]
        if not match:
            raise not_supported(self.name, target, [verdict])
        plan = Plan(len(self.plans), next((c for c in match if c.knobs == values), match[0]))
        self.plans.append(plan)
        return plan

    def replay(self, name: str, engine_id: int, knobs: Mapping[str, Any]) -> Plan:
        """Appends the recorded plan. cudnnGraphNotSupportedError where this process cannot make exactly that one."""
        engine = self._engines.by_id(engine_id)
        if engine is None or engine.name != name:
            absent = self._engines.unavailable().get(name)
            reason = absent or ("is not installed" if self._engines.find(name) is None else f"has no id {engine_id}")
            raise not_supported(self.name, self.target, [Verdict(name, reasons=[f"the recorded engine {reason}"])])
        try:
            plan = self.append(engine_id, knobs)
        except ValueError as error:  # a knob or a value that this version of the engine does not have
            raise not_supported(self.name, self.target, [Verdict(name, reasons=[str(error)])]) from error
        if dict(plan.candidate.knobs) != dict(knobs):
            reason = f"the recorded knobs {dict(knobs)} became {dict(plan.candidate.knobs)}"
            raise not_supported(self.name, self.target, [Verdict(name, reasons=[reason])])
        return plan

    def _listed(self, mode: heur_mode, candidate: Candidate) -> bool:
        if mode is heur_mode.FALLBACK:
            return candidate.fallback
        if mode is heur_mode.OPENSOURCE:
            engine = self._engines.find(candidate.engine)
            return engine is not None and engine.open_source
        return not candidate.fallback

    # ---- choosing

    def at(self, index: int) -> Plan:
        """The plan of an index; IndexError outside the list (negative indices too)."""
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"plan index: expected an int, got {type(index).__name__}")
        if not 0 <= index < len(self.plans):
            raise IndexError(f"plan index {index} is out of range; the graph has {len(self.plans)} plans")
        return self.plans[index]

    def usable(self, index: int) -> Plan:
        """As `at`, and ValueError when a filter bars the plan."""
        plan = self.at(index)
        barred = self.filters.bar(plan)
        if barred is not None:
            raise ValueError(f"plan {index} ({plan.name}) is barred by {barred}")
        return plan

    def select(self, index: int) -> None:
        """Pins a plan: the build is strict about it from here on."""
        self.selected = self.at(index).index
        self.pinned = True

    def current(self) -> Plan | None:
        """The selected plan: the pinned one, the built one, else the first that nothing bars."""
        if self.selected >= 0:
            return self.plans[self.selected]
        return next((p for p in self.plans if self.filters.bar(p) is None and not p.failure), None)

    def check_support(self) -> None:
        """Raises when no plan of the list can still serve; ValueError when a filter bars the pinned one."""
        if self.pinned:
            self.usable(self.selected)
        if all(plan.failure or self.filters.bar(plan) is not None for plan in self.plans):
            raise not_supported(self.name, self.target, self.verdicts, self._failures(self.plans))

    # ---- building

    def build(self, policy: build_plan_policy) -> Plan:
        """Builds from the selected plan on, or every plan; the result is selected.

        Raises:
            cudnnGraphNotSupportedError: nothing built; one line per failure.
            ValueError: the pinned plan is barred.
        """
        if self.pinned:
            self.usable(self.selected)
        if policy is build_plan_policy.ALL:
            for plan in self.plans:
                self._try(plan)
        start = max(self.selected, 0)
        chosen = None
        for plan in self.plans[start : start + 1 if self.pinned else None]:
            if self._try(plan):
                chosen = plan
                break
        if chosen is None:
            raise not_supported(self.name, self.target, self.verdicts, self._failures(self.plans[start:]))
        self.selected = chosen.index
        self.executable(chosen)
        return chosen

    def build_at(self, index: int) -> Plan:
        """Builds and selects exactly this plan."""
        plan = self.usable(index)
        if not self._try(plan):
            raise not_supported(self.name, self.target, self.verdicts, self._failures([plan]))
        self.selected = index
        self.executable(plan)
        return plan

    def executable(self, plan: Plan) -> Any:
        """The native executable of a plan, built at the first question."""
        if plan.executable is None:
            if not self._try(plan):
                raise not_supported(self.name, self.target, self.verdicts, self._failures([plan]))
            plan.executable = self._finish(plan.compiled)  # type: ignore[arg-type]
        return plan.executable

    def _try(self, plan: Plan) -> bool:
        """True when the plan is built and no filter bars it. A decline is noted; any other exception is a
        bug."""
        if self.filters.bar(plan) is not None or plan.failure:
            return False
        if plan.compiled is None:
            engine = self._engines.find(plan.engine)
            if engine is None:
                plan.failure = f"engine {plan.engine!r} is no longer registered"
                return False
            target = self.target.pinned(engine.name, plan.candidate.knobs)
            try:
                compiled = engine.compile(self.spec, plan.candidate, target)
            except Declined as refusal:
                plan.failure = "; ".join(refusal.reasons) or "declined without a reason"
                return False
            if target.overrides and not compiled.overrides:
                plan.failure = "does not honour the overrides that is_override_shape_enabled asks for"
                return False
            if target.dynamic and not compiled.dynamic:
                plan.failure = "does not honour the live extents that is_dynamic_shape_enabled asks for"
                return False
            plan.compiled = compiled
        return self.filters.bar(plan) is None  # the workspace may be known only now

    def _failures(self, plans: Iterable[Plan]) -> list[str]:
        lines = []
        for plan in plans:
            why = plan.failure
            barred = self.filters.bar(plan)
            if barred is not None:
                why = f"barred by {barred}"
            if why:
                lines.append(f"  plan {plan.index} {plan.name}: {why}")
        return lines


def named_knobs(engine: Engine, knobs: Mapping[Any, Any]) -> dict[str, Any]:
    """Knobs by name: `knob_type` members (or their values) become the engine's own knob names."""
    values: dict[str, Any] = {}
    for key, value in knobs.items():
        if isinstance(key, str):
            values[key] = value
            continue
        name = next((n for k, n in engine.knob_types.items() if k == key or k.value == key), None)
        if name is None:
            known = ", ".join(k.name for k in engine.knob_types) or "none"
            raise ValueError(f"engine {engine.name!r} has no knob {key}; its knob types: {known}")
        values[name] = value
    return values


def as_heuristics(modes: Any) -> tuple[heur_mode, ...]:
    """None, one mode or a list of modes, as a tuple."""
    if modes is None:
        return DEFAULT_HEURISTICS
    if isinstance(modes, heur_mode):
        return (modes,)
    if not isinstance(modes, (list, tuple)) or not all(isinstance(m, heur_mode) for m in modes):
        raise TypeError(f"heuristics: expected a list of heur_mode, got {modes!r}")
    return tuple(modes) or DEFAULT_HEURISTICS
