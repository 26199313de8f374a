"""The planning half of `pygraph`: from a declared graph to built plans, and what can be asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

from opgraph import planning
from opgraph.engines.device import CUDA, DeviceInfo, as_device, current_cuda_device
from opgraph.handle import Handle
from opgraph.ir.enums import behavior_note, build_plan_policy, knob_type, numerical_note
from opgraph.ir.errors import cudnnGraphNotSupportedError

if TYPE_CHECKING:
    from opgraph.engines.support import CompiledPlan, Target
    from opgraph.ir.program import GraphIR, GraphSpec
    from opgraph.ir.tensor import Tensor
    from opgraph.planning.executable import Binding
    from opgraph.planning.plan import Filters, Plan, PlanList
    from opgraph.planning.serialize import Saved

__all__ = ["EngineKnob", "PlanApi", "SelectedEngine"]


class SelectedEngine:
    """The engine of the selected plan."""

    __slots__ = ("engine_id", "name")

    def __init__(self, name: str, engine_id: int) -> None:
        self.name = name
        self.engine_id = engine_id

    def __repr__(self) -> str:
        return f"<engine {self.name!r}, id {self.engine_id}>"


class EngineKnob:
    """A knob of an engine: `name` for `build(knobs=...)`, `type` (its `knob_type`, or None), and in words what it
    takes."""

    __slots__ = ("description", "name", "type")

    def __init__(self, name: str, type: knob_type | None, description: str) -> None:
        self.name = name
        self.type = type
        self.description = description

    def __repr__(self) -> str:
        return f"<knob {self.name!r}: {self.description}>"


class PlanApi:
    """Mixin of `pygraph`, which owns the state named below."""

    if TYPE_CHECKING:
        _ir: GraphIR
        _handle: Handle | None
        _options: dict[str, Any]
        _bound: dict[Tensor, Any]
        _declared_on: tuple[int, int] | None
        _lock: Any
        _filters: Filters
        _plans: PlanList | None
        _ranked: bool
        _executable: Any

    def _reset_plans(self) -> None:
        self._plans = None
        self._ranked = False
        self._executable = None

    # ---- the target

    def _target_device(self, device: Any = None, given: DeviceInfo | None = None) -> DeviceInfo:
        """The handle's device, else `device`, else what the graph was declared for, else `given` (the
        operands'), else the current CUDA device if a driver answers, else the CPU."""
        named = None if device is None else as_device(device.device if isinstance(device, Handle) else device)
        if self._handle is not None:
            own = self._handle.device
            if named is not None and named.key != own.key:
                raise ValueError(
                    f"graph {self._ir.name!r}: device={named} contradicts the graph's handle on {own}"
                )
            return own
        if named is not None:
            return named
        properties = self._options["device_property"]
        if properties is not None:
            return as_device(properties.device)
        if self._declared_on is not None:
            return as_device(self._declared_on)
        return given or current_cuda_device() or DeviceInfo.cpu()

    def _make_target(self, device: DeviceInfo, engine: str | None, knobs: Mapping[str, Any] | None) -> Target:
        if engine is not None and not isinstance(engine, str):
            raise TypeError(f"build: engine: expected an engine's name, got {type(engine).__name__}")
        if knobs is not None and engine is None:
            raise ValueError("build: knobs belong to one engine; name it with engine=")
        from opgraph.engines.support import Target

        return Target(
            device,
            engine=engine,
            knobs=knobs,
            overrides=self._options["is_override_shape_enabled"],
            dynamic=self._options["is_dynamic_shape_enabled"],
            sm_count=self._options["sm_count"],
            sm_version=self._options["sm_version"],
        )

    def _new_plans(self, spec: GraphSpec, target: Target) -> PlanList:
        name, tensors = self._ir.name, self._ir.all_tensors
        bound = {tensor.uid: buffer for tensor, buffer in self._bound.items()}
        device, stream = target.device.key, 0 if self._handle is None else self._handle.stream
        made: list[
            Binding
        ] = []  # at the first plan that is built: a refused graph may hold types without buffers

        def finish(compiled: CompiledPlan) -> Any:
            if not made:
                made.append(planning.executable.Binding(name, spec, tensors, bound, device, stream, target.dynamic))
            return planning.executable.make_executable(made[0], compiled)

        return planning.plan.PlanList(name, spec, target, planning.registry.registry, self._filters, finish)

    # ---- lifecycle

    def create_execution_plans(
        self,
        heuristics: Any = None,
        *,
        engine: str | None = None,
        knobs: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        """Ranks all plans into one flat list and freezes the graph. One-shot.

        Args:
            heuristics: list of `heur_mode`; default `[A, FALLBACK]`.
            engine, knobs, device: see `build`.

        Raises:
            RuntimeError: the graph was planned before.
            cudnnGraphNotSupportedError: no engine proposes a plan; one line per engine and reason.
        """
        modes = planning.plan.as_heuristics(heuristics)
        with self._lock:
            if self._ranked:
                raise RuntimeError(
                    f"graph {self._ir.name!r} is planned already; plan a copy() of it to choose differently"
                )
            self._plan(modes, engine, knobs, self._target_device(device))

    def _plan(
        self, modes: Any, engine: str | None, knobs: Mapping[str, Any] | None, device: DeviceInfo
    ) -> None:
        plans = self._plans
        if plans is None:
            target = self._make_target(device, engine, knobs)
            spec = self._ir.snapshot()
            self._check_outputs(spec)
            plans = self._new_plans(spec, target)
        plans.rank(modes)
        self._ir.freeze()  # a refused graph stays as it was
        self._plans = plans
        self._ranked = True

    def _check_outputs(self, spec: Any) -> None:
        """Refuses a graph that would compute nothing anybody can see."""
        if any(t.is_output for t in spec.operands):
            return
        leaves = [spec.tensors[uid] for node in spec.nodes for uid in node.outputs.values()]
        named = ", ".join(f"{t.name!r} (uid {t.uid})" for t in leaves[-3:])
        raise ValueError(
            f"graph {self._ir.name!r}: it has no output; "
            + (f"call set_output(True) on what execute should write, e.g. {named}" if leaves else "it has no nodes")
        )

    def create_execution_plan(self, engine_id: int, knobs: Mapping[Any, Any] | None = None) -> None:
        """Appends the one plan that an engine id and its knobs name, and freezes the graph.

        `knobs` is what `get_engine_and_knobs_at_index` returned. The plan has index
        `get_execution_plan_count() - 1`.

        Raises:
            ValueError: unknown engine id or knob.
            cudnnGraphNotSupportedError: the engine declines the graph.
        """
        with self._lock:
            plans = self._plans
            if plans is None:
                plans = self._new_plans(
                    self._ir.snapshot(), self._make_target(self._target_device(), None, None)
                )
            plans.append(engine_id, knobs)
            self._ir.freeze()
            self._plans = plans

    def check_support(self) -> None:
        """Raises cudnnGraphNotSupportedError when no plan can serve, RuntimeError before planning."""
        with self._lock:
            self._planned("check_support").check_support()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Builds the first plan that can be built, or all of them, and selects it.

        Raises:
            RuntimeError: before planning.
            cudnnGraphNotSupportedError: none could be built; one line per failure.
        """
        if not isinstance(policy, build_plan_policy):
            raise TypeError(f"build_plans: expected a build_plan_policy, got {policy!r}")
        with self._lock:
            plans = self._planned("build_plans")
            plan = plans.build(policy)
            self._executable = plans.executable(plan)

    def build(
        self,
        heuristics: Any = None,
        *,
        engine: str | None = None,
        knobs: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        """Validates, plans, checks and builds; a graph that is planned already is only built.

        Args:
            heuristics: list of `heur_mode`; default `[A, FALLBACK]`.
            engine: name of the one engine to use, e.g. `"cpu"`; others are not asked.
            knobs: knob values of that engine, e.g. `{"precision": "float64"}`.
            device: `"cpu"`, `"cuda:0"` or a DeviceInfo. Default: the handle's; else that of the arrays the
                graph was declared from; else the current CUDA device if a driver answers; else the CPU.

        Raises:
            ValueError: a malformed graph, an unknown knob, or a device that contradicts the handle.
            cudnnGraphNotSupportedError: nothing can run it; one line per engine and reason.
            RuntimeError: engine, knobs or device named for a graph that is planned already.
        """
        self._build(heuristics, engine, knobs, device, None)

    def _build(
        self,
        heuristics: Any,
        engine: str | None,
        knobs: Mapping[str, Any] | None,
        device: Any,
        given: DeviceInfo | None,
    ) -> None:
        modes = planning.plan.as_heuristics(heuristics)
        with self._lock:
            if not self._ranked and (self._plans is None or engine is not None):
                self._plan(modes, engine, knobs, self._target_device(device, given))
            elif engine is not None or knobs is not None or device is not None:
                raise RuntimeError(
                    f"graph {self._ir.name!r} is planned already, so engine, knobs and device cannot change; "
                    "plan a copy() of it"
                )
            plans = self._planned("build")
            plans.check_support()
            plan = plans.build(build_plan_policy.HEURISTICS_CHOICE)
            self._executable = plans.executable(plan)

    def _build_for(self, tensor_dict: Any, workspace: Any, handle: Any, tensor_uids: Any) -> Any:
        """Called by the native core when `execute` or `bind` meets a graph that is not built: builds it
        once."""
        if handle is not None and not isinstance(handle, Handle):
            raise TypeError(
                f"execute of graph {self._ir.name!r}: handle: expected a Handle, got {type(handle).__name__}"
            )
        with self._lock:
            if self._executable is None:
                first_plan = self._plans is None
                given = handle.device if handle is not None else self._operand_device(tensor_dict)
                self._build(
                    None, None, None, handle.device if handle is not None and first_plan else None, given
                )
                import logging  # needed once in a graph's life, and not cheap to import

                plan = self._plans.current() if self._plans is not None else None
                logging.getLogger("opgraph").info(
                    "graph %r was not built: built %s in execute()",
                    self._ir.name,
                    plan.name if plan else "nothing",
                )
            return self._executable

    def _operand_device(self, tensor_dict: Any) -> DeviceInfo | None:
        """The device of the first operand that tells one and is no host scalar of the graph."""
        items: Iterable[tuple[Any, Any]]
        if isinstance(tensor_dict, Mapping):
            items = tensor_dict.items()
        elif isinstance(tensor_dict, (list, tuple)):
            items = ((None, value) for value in tensor_dict)
        else:
            return None
        host = None
        for key, value in items:
            pair = planning.protocols.device_of(value)
            if pair is None or getattr(key, "is_pass_by_value", False):
                continue
            info = as_device(pair)
            if not info.is_cpu:
                return info
            host = info
        return host

    def _replay(self, saved: Saved, enforce_precompiled: bool) -> None:
        """Plans and builds a graph that was read from a file, exactly as recorded."""
        kind = saved.device_type
        recorded = as_device("cuda" if kind == CUDA else (kind, 0))
        device = self._target_device(given=recorded)
        plans = self._new_plans(self._ir.snapshot(), self._make_target(device, None, None))
        plan = plans.replay(saved.engine, saved.engine_id, saved.knobs)
        if enforce_precompiled and behavior_note.RUNTIME_COMPILATION in plan.behavior_notes:
            raise cudnnGraphNotSupportedError(
                f"deserialize: enforce_precompiled: {plan.name} compiles kernels, and the file holds none"
            )
        plans.build_at(plan.index)
        self._ir.freeze()
        self._plans, self._ranked = plans, True
        self._executable = plans.executable(plan)

    def _planned(self, what: str) -> PlanList:
        if self._plans is None:
            raise RuntimeError(
                f"{what}: graph {self._ir.name!r} is not planned; call create_execution_plans() or build()"
            )
        return self._plans

    # ---- plans

    @property
    def plans(self) -> list[Plan]:
        """Records of all plans (`index, name, engine, engine_id, knobs, ...`), a copy; empty before
        planning."""
        return [] if self._plans is None else list(self._plans.plans)

    @property
    def selected_engine(self) -> SelectedEngine | None:
        """The engine of the selected plan, or None before planning."""
        plan = None if self._plans is None else self._plans.current()
        return None if plan is None else SelectedEngine(plan.engine, plan.engine_id)

    def get_execution_plan_count(self) -> int:
        """Number of plans; 0 before planning."""
        return 0 if self._plans is None else len(self._plans.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        """`engine`, or `engine[knob=value, ...]` with the knobs sorted by name."""
        return str(self._planned("get_plan_name_at_index").at(index).name)

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[knob_type, int]]:
        """What `create_execution_plan` takes to repeat this choice."""
        plan = self._planned("get_engine_and_knobs_at_index").at(index)
        engine = planning.registry.registry.find(plan.engine)
        types = {} if engine is None else engine.knob_types
        return plan.engine_id, {kind: plan.knobs[name] for kind, name in types.items() if name in plan.knobs}

    def get_engine_count(self) -> int:
        """Number of engine ids with a plan for this graph on its device. Compiles nothing.

        Raises:
            AttributeError: the graph is not validated yet (`build_operation_graph`).
        """
        return len(self._engines_of("get_engine_count"))

    def get_knobs_for_engine(self, engine_id: int) -> list[EngineKnob]:
        """The knobs of the engine that owns an id, by name.

        Raises:
            AttributeError: the graph is not validated yet.
            ValueError: no engine has this id.
        """
        self._engines_of("get_knobs_for_engine")
        engine = planning.registry.registry.by_id(engine_id)
        if engine is None:
            raise ValueError(f"get_knobs_for_engine: {planning.registry.registry.unknown_id(engine_id)}")
        kinds = {name: kind for kind, name in engine.knob_types.items()}
        return [EngineKnob(name, kinds.get(name), engine.knobs[name]) for name in sorted(engine.knobs)]

    def _engines_of(self, what: str) -> set[int]:
        if not self._ir.validated:
            raise AttributeError(
                f"{what}: graph {self._ir.name!r} is not validated; call build_operation_graph() first"
            )
        with self._lock:
            target = self._make_target(self._target_device(), None, None) if self._plans is None else self._plans.target
            spec = self._ir.snapshot()
            plain = target if target.engine is None else target.pinned(None, {})
            verdicts = planning.explain.survey(spec, plain, planning.registry.registry)
            return {c.engine_id for v in verdicts for c in v.candidates}

    def select_plan(self, index: int) -> Self:
        """Pins a plan: a later build is strict about it and does not walk on. Returns the graph.

        Raises:
            RuntimeError: before planning. IndexError: out of range. ValueError (at the build): the plan is
                barred.
        """
        with self._lock:
            plans = self._planned("select_plan")
            plans.select(index)
            self._executable = plans.plans[index].executable  # None: the next build or execute builds it
        return self

    def build_plan_at_index(self, index: int) -> None:
        """Builds and selects exactly this plan.

        Raises:
            ValueError: a filter bars it. cudnnGraphNotSupportedError: it cannot be built.
        """
        with self._lock:
            plans = self._planned("build_plan_at_index")
            self._executable = plans.executable(plans.build_at(index))

    def execute_plan_at_index(
        self,
        tensor_dict: Any,
        workspace: Any = None,
        index: int = 0,
        handle: Handle | None = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
        tensor_uids: Any = None,
    ) -> None:
        """`execute` with the plan of this index, built if it is not; the selection stays as it is."""
        with self._lock:
            plans = self._planned("execute_plan_at_index")
            executable = plans.executable(plans.usable(index))
        executable.execute(
            tensor_dict, workspace, handle, override_uids, override_shapes, override_strides, tensor_uids
        )

    def get_workspace_size(
        self,
        handle: Handle | None = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> int:
        """Bytes of workspace the selected plan needs, for the declared extents and every smaller override.

        Raises:
            RuntimeError: before the build.
        """
        return self._built_plan("get_workspace_size").compiled.workspace_bytes  # type: ignore[union-attr]

    def _built_plan(self, what: str) -> Plan:
        """The selected plan, or RuntimeError where there is none or it is not built."""
        plan = None if self._plans is None else self._plans.current()
        if plan is None or plan.compiled is None:
            raise RuntimeError(f"{what}: graph {self._ir.name!r} is not built; call build()")
        return plan

    def get_workspace_size_plan_at_index(
        self,
        index: int,
        handle: Handle | None = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> int:
        """Bytes of workspace that plan needs; RuntimeError where that is known only after it is built."""
        plan = self._planned("get_workspace_size_plan_at_index").at(index)
        if plan.workspace_bytes is None:
            raise RuntimeError(f"get_workspace_size_plan_at_index: plan {index} ({plan.name}) is not built")
        return plan.workspace_bytes

    def get_behavior_notes(self) -> list[behavior_note]:
        """Behaviour notes of the selected plan."""
        plan = self._planned("get_behavior_notes").current()
        return [] if plan is None else plan.behavior_notes

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        """Behaviour notes of that plan."""
        return self._planned("get_behavior_notes_for_plan_at_index").at(index).behavior_notes

    def explain(self, *, engine: str | None = None, device: Any = None) -> str:
        """Every engine with its plans or its reasons against the graph, in text. Compiles nothing and changes
        nothing.

        Args:
            engine: ask as if `build(engine=...)` named it.
            device: ask for another device than `build` would choose; only before planning.
        """
        with self._lock:
            plans = self._plans
            if plans is not None and engine is None and device is None:
                barred = [self._filters.bar(plan) for plan in plans.plans]
                current = plans.current()
                return planning.explain.text(
                    self._ir.name,
                    plans.target,
                    plans.verdicts,
                    plans.plans,
                    current.index if current else -1,
                    barred,
                )
            target = self._make_target(self._target_device(device), engine, None)
            verdicts = planning.explain.survey(self._ir.snapshot(), target, planning.registry.registry)
            return planning.explain.text(self._ir.name, target, verdicts)

    # ---- filters

    def deselect_engines(self, names: Iterable[str]) -> Self:
        """Bars plans whose name contains one of these texts. Returns the graph."""
        if isinstance(names, str):
            raise TypeError("deselect_engines: expected a list of texts, got one text")
        self._filters.barred_engines += [_text(n) for n in names]
        return self._filtered()

    def deselect_workspace_greater_than(self, workspace: int) -> Self:
        """Bars plans that need more bytes of workspace than this. Returns the graph."""
        if not isinstance(workspace, int) or isinstance(workspace, bool):
            raise TypeError(f"deselect_workspace_greater_than: expected a number of bytes, got {workspace!r}")
        self._filters.workspace = workspace
        return self._filtered()

    def select_behavior_notes(self, notes: Iterable[behavior_note]) -> Self:
        """Bars plans that lack one of these notes. Returns the graph."""
        self._filters.needed_behavior.update(_notes(notes, behavior_note))
        return self._filtered()

    def deselect_behavior_notes(self, notes: Iterable[behavior_note]) -> Self:
        """Bars plans that have one of these notes. Returns the graph."""
        self._filters.barred_behavior.update(_notes(notes, behavior_note))
        return self._filtered()

    def select_numeric_notes(self, notes: Iterable[numerical_note]) -> Self:
        """Bars plans that lack one of these notes. Returns the graph."""
        self._filters.needed_numeric.update(_notes(notes, numerical_note))
        return self._filtered()

    def deselect_numeric_notes(self, notes: Iterable[numerical_note]) -> Self:
        """Bars plans that have one of these notes. Returns the graph."""
        self._filters.barred_numeric.update(_notes(notes, numerical_note))
        return self._filtered()

    def _filtered(self) -> Self:
        """A selected plan that the filters now bar runs no more: the next build chooses among the others."""
        with self._lock:
            plans = self._plans
            if plans is not None and plans.selected >= 0 and self._filters.bar(plans.plans[plans.selected]):
                self._executable = None
                if not plans.pinned:
                    plans.selected = -1
        return self


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"deselect_engines: expected texts, got {value!r}")
    return value


def _notes(notes: Any, kind: type) -> list[Any]:
    found = list(notes)
    for note in found:
        if not isinstance(note, kind):
            _wrong_note(note, kind)
    return found


def _wrong_note(note: Any, kind: type) -> NoReturn:
    raise TypeError(f"expected {kind.__name__} members, got {note!r}")
