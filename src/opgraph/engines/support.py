"""What an engine offers to planning: constraint tables, candidates, compiled plans, and the one way to say
no.

An engine is an object with `name`, `engine_ids`, `constraints`, `propose` and `compile`; deriving from
`Engine` gives everything but the last two their usual form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from opgraph.engines.device import DeviceInfo
from opgraph.ir.datatypes import dlpack_dtype, element_bits

if TYPE_CHECKING:
    from opgraph._native import Program
    from opgraph.ir.enums import behavior_note, data_type, knob_type, numerical_note
    from opgraph.ir.program import GraphSpec

__all__ = [
    "Candidate",
    "Carve",
    "CompiledPlan",
    "Constraint",
    "Declined",
    "Engine",
    "Target",
    "layout_carves",
]

CARVE_ALIGNMENT = 256  # bytes; what device allocators give, so no kernel needs to ask for less

Carve = tuple[int, tuple[int, int, int], tuple[int, ...]]  # byte offset, DLPack dtype, shape


class Declined(Exception):
    """An engine's refusal of a graph. Any other exception out of an engine is a bug and reaches the user."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Target:
    """What a plan is wanted for. Immutable by convention.

    Attributes:
        device: where the operands live.
        engine: name of the engine the caller pinned, or None.
        knobs: knob values the caller asked of the pinned engine, by knob name.
        overrides: the graph may be executed with dims and strides of the call (`is_override_shape_enabled`).
        dynamic: live extents may come from the buffers (`is_dynamic_shape_enabled`).
        sm_count: number of multiprocessors a launch may use, or None for all.
        sm_version: compute capability to build for, or None for the device's.
    """

    __slots__ = ("device", "dynamic", "engine", "knobs", "overrides", "sm_count", "sm_version")

    def __init__(
        self,
        device: DeviceInfo,
        *,
        engine: str | None = None,
        knobs: Mapping[str, Any] | None = None,
        overrides: bool = False,
        dynamic: bool = False,
        sm_count: int | None = None,
        sm_version: int | None = None,
    ) -> None:
        self.device = device
        self.engine = engine
        self.knobs: Mapping[str, Any] = dict(knobs or {})
        self.overrides = overrides
        self.dynamic = dynamic
        self.sm_count = sm_count
        self.sm_version = sm_version

    def pinned(self, engine: str | None, knobs: Mapping[str, Any]) -> Target:
        """The same target with an engine and its knobs named, or with none."""
        return Target(
            self.device,
            engine=engine,
            knobs=knobs,
            overrides=self.overrides,
            dynamic=self.dynamic,
            sm_count=self.sm_count,
            sm_version=self.sm_version,
        )


class Constraint:
    """One named limit of an engine: `law` says it in general, `violation` finds what breaks it.

    `violation(spec, target)` returns None when the limit is met, else a short text naming what breaks it.
    """

    __slots__ = ("law", "name", "violation")

    def __init__(self, name: str, law: str, violation: Callable[[GraphSpec, Target], str | None]) -> None:
        self.name = name
        self.law = law
        self.violation = violation

    def reason(self, spec: GraphSpec, target: Target) -> str | None:
        """The full reason against this graph, or None."""
        found = self.violation(spec, target)
        return None if found is None else f"{self.name}: {self.law}; {found}"


class Candidate:
    """A plan an engine could compile.

    Attributes:
        engine: name of the engine.
        engine_id: number that, with the knobs, names this choice for good (ids are append-only).
        knobs: knob values by name.
        estimate: expected time of one call in microseconds; only the order counts.
        fallback: a correct but slow choice, listed for `heur_mode.FALLBACK` only.
        workspace_bytes: bytes it will ask for where known before the compile, else None.
        behavior_notes, numeric_notes: what filters select by.
    """

    __slots__ = (
        "behavior_notes",
        "engine",
        "engine_id",
        "estimate",
        "fallback",
        "knobs",
        "numeric_notes",
        "workspace_bytes",
    )

    def __init__(
        self,
        engine: str,
        engine_id: int,
        knobs: Mapping[str, Any] | None = None,
        *,
        estimate: float = 0.0,
        fallback: bool = False,
        workspace_bytes: int | None = None,
        behavior_notes: Iterable[behavior_note] = (),
        numeric_notes: Iterable[numerical_note] = (),
    ) -> None:
        self.engine = engine
        self.engine_id = engine_id
        self.knobs: Mapping[str, Any] = dict(knobs or {})
        self.estimate = estimate
        self.fallback = fallback
        self.workspace_bytes = workspace_bytes
        self.behavior_notes = tuple(behavior_notes)
        self.numeric_notes = tuple(numeric_notes)

    @property
    def name(self) -> str:
        """`engine`, or `engine[knob=value, ...]` with the knobs sorted by name."""
        if not self.knobs:
            return self.engine
        return f"{self.engine}[{', '.join(f'{k}={self.knobs[k]}' for k in sorted(self.knobs))}]"

    def __repr__(self) -> str:
        return f"Candidate({self.name!r}, engine_id={self.engine_id})"


class CompiledPlan:
    """What an engine made of a candidate. Immutable; safe to run from many threads.

    Attributes:
        run: a `_native.Program`, or a function called with the `VariantPack` of a call; None does nothing.
        workspace_bytes: scratch the caller must bring.
        carves: regions of the workspace the plan uses, see `layout_carves`.
        inplace: pairs (output operand index, input operand index) that may be one buffer.
        overrides: honours dims and strides given for one call.
        dynamic: honours live extents taken from the buffers.
        resources: kept alive as long as the plan.
    """

    __slots__ = ("carves", "dynamic", "inplace", "overrides", "resources", "run", "workspace_bytes")

    def __init__(
        self,
        run: Callable[[Any], None] | Program | None,
        *,
        workspace_bytes: int = 0,
        carves: Sequence[Carve] = (),
        inplace: Iterable[tuple[int, int]] = (),
        overrides: bool = False,
        dynamic: bool = False,
        resources: object = None,
    ) -> None:
        self.run = run
        self.workspace_bytes = workspace_bytes
        self.carves = tuple(carves)
        self.inplace = tuple(inplace)
        self.overrides = overrides
        self.dynamic = dynamic
        self.resources = resources


class Engine:
    """The usual form of an engine.

    Class attributes a subclass sets:
        name: unique among engines.
        engine_ids: engine id -> the knob values that id stands for.
        knobs: knob name -> what it does and takes, in words.
        knob_types: the `knob_type` member under which a knob's integer value is recorded, for those that have
            one.
        constraints: the support table; planning, `explain` and the docs all read it.
        named_only: never proposed unless the caller names it.
        open_source: listed for `heur_mode.OPENSOURCE`.
    """

    name: str = ""
    engine_ids: ClassVar[Mapping[int, Mapping[str, Any]]] = {}
    knobs: ClassVar[Mapping[str, str]] = {}
    knob_types: ClassVar[Mapping[knob_type, str]] = {}
    constraints: tuple[Constraint, ...] = ()
    named_only: bool = False
    open_source: bool = True

    def check(self, spec: GraphSpec, target: Target) -> None:
        """Raises `Declined` with every reason of the constraint table, and `ValueError` for an unknown
        knob."""
        for knob in target.knobs:
            if knob not in self.knobs:
                known = ", ".join(sorted(self.knobs)) or "none"
                raise ValueError(f"engine {self.name!r} has no knob {knob!r}; its knobs: {known}")
        reasons = [r for r in (c.reason(spec, target) for c in self.constraints) if r is not None]
        if reasons:
            raise Declined(*reasons)

    def propose(self, spec: GraphSpec, target: Target) -> list[Candidate]:
        """Candidate plans for the graph, best first; raises `Declined` when there is none. Compiles
        nothing."""
        raise NotImplementedError

    def compile(self, spec: GraphSpec, candidate: Candidate, target: Target) -> CompiledPlan:
        """Makes the plan; raises `Declined` when the candidate turns out not to work."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<engine {self.name!r}>"


def layout_carves(regions: Iterable[tuple[data_type, Sequence[int]]]) -> tuple[tuple[Carve, ...], int]:
    """Places regions one after the other in a workspace, each aligned to 256 bytes.

    Returns the carves (byte offset, DLPack dtype, shape) and the bytes they need together.
    """
    carves: list[Carve] = []
    offset = 0
    for dtype, shape in regions:
        offset = -(-offset // CARVE_ALIGNMENT) * CARVE_ALIGNMENT
        count = 1
        for extent in shape:
            count *= extent
        carves.append((offset, dlpack_dtype(dtype), tuple(shape)))
        offset += (count * element_bits(dtype) + 7) // 8
    return tuple(carves), offset
