"""Planning without any computation: registry, refusals, ranking, building, filters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import opgraph as og
from opgraph.engines.device import DeviceInfo
from opgraph.engines.support import (
    Candidate,
    CompiledPlan,
    Constraint,
    Declined,
    Engine,
    Target,
)
from opgraph.planning.registry import Registry, registry

FLOAT = og.data_type.FLOAT


def add_graph(**options: Any) -> tuple[og.pygraph, dict[str, og.Tensor]]:
    g = og.pygraph(io_data_type=FLOAT, **options)
    a, b = g.tensor((4,), name="A"), g.tensor((4,), name="B")
    c = g.add(a, b).set_output(True).set_name("C")
    return g, {"A": a, "B": b, "C": c}


class FakeEngine(Engine):
    """Two plans, or reasons against the graph; records what it is asked."""

    name = "fake"
    engine_ids: ClassVar = {30000: {"tile": 1}, 30001: {"tile": 2}}
    knobs: ClassVar = {"tile": "1 or 2"}
    knob_types: ClassVar = {og.knob_type.TILE_SIZE: "tile"}

    def __init__(self, **behaviour: Any) -> None:
        self.behaviour = behaviour
        self.compiled: list[str] = []

    def propose(self, spec: Any, target: Target) -> list[Candidate]:
        self.check(spec, target)
        if "reasons" in self.behaviour:
            raise Declined(*self.behaviour["reasons"])
        if "bug" in self.behaviour:
            raise self.behaviour["bug"]
        tiles = [target.knobs["tile"]] if "tile" in target.knobs else [1, 2]
        return [
            Candidate(
                self.name,
                29999 + tile,
                {"tile": tile},
                estimate=1e-6 * tile,
                workspace_bytes=None if self.behaviour.get("late_workspace") else 1000 * tile,
                behavior_notes=[og.behavior_note.RUNTIME_COMPILATION] if tile == 1 else [],
                numeric_notes=[og.numerical_note.TENSOR_CORE] if tile == 2 else [],
            )
            for tile in tiles
        ]

    def compile(self, spec: Any, candidate: Candidate, target: Target) -> CompiledPlan:
        tile = candidate.knobs["tile"]
        self.compiled.append(candidate.name)
        error = self.behaviour.get("compile", {}).get(tile)
        if error is not None:
            raise error
        return CompiledPlan(
            None, workspace_bytes=1000 * tile, overrides=self.behaviour.get("overrides", True), inplace=()
        )


@pytest.fixture
def engine() -> Iterator[Any]:
    """Registers a FakeEngine with the behaviour asked for, and removes it again."""
    made: list[FakeEngine] = []

    def make(**behaviour: Any) -> FakeEngine:
        fake = FakeEngine(**behaviour)
        registry.register(fake)
        made.append(fake)
        return fake

    yield make
    for fake in made:
        registry.unregister(fake.name)


# ---- registry


def test_engines_are_found_by_folder():
    names = registry.names()
    assert "cpu" in names
    assert "null" in names
    assert registry.find("cpu").name == "cpu"
    assert registry.find("nothing") is None
    assert registry.by_id(20000).name == "cpu"
    assert registry.by_id(20100).name == "null"


def test_engine_names_and_ids_are_unique():
    engines = Registry(discover=False)
    engines.register(FakeEngine())
    with pytest.raises(ValueError, match="'fake' is already registered"):
        engines.register(FakeEngine())
    other = FakeEngine()
    other.name = "other"
    with pytest.raises(ValueError, match="engine id 30000 belongs to 'fake'"):
        engines.register(other)
    engines.unregister("fake")
    engines.register(other)


def test_an_engine_that_cannot_be_imported_is_named_with_the_reason(monkeypatch):
    def broken() -> Any:
        raise ImportError("package 'wonder' 2.0 or newer is not installed")

    monkeypatch.setattr("opgraph.planning.registry._entry_points", lambda: [("wonder", broken)])
    engines = Registry()
    assert "wonder" in engines.names()
    assert engines.find("wonder") is None
    assert engines.unavailable()["wonder"].endswith("'wonder' 2.0 or newer is not installed")
    monkeypatch.setattr("opgraph.planning.registry.registry", engines)
    g, _ = add_graph()
    assert "wonder: cannot be imported" in g.explain()
    with pytest.raises(og.cudnnGraphNotSupportedError, match="wonder: cannot be imported"):
        g.build(engine="wonder")


def test_a_bug_in_an_engines_import_reaches_the_caller(monkeypatch):
    def broken() -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("opgraph.planning.registry._entry_points", lambda: [("wonder", broken)])
    engines = Registry()
    for _ in range(2):  # and again: nothing is half loaded
        with pytest.raises(ZeroDivisionError):
            engines.engines()


# ---- refusals


def test_no_plan_says_why_one_line_per_engine(engine):
    engine(reasons=["shape: rows are multiples of 64; tensor 'A' has 4", "dtype: no float32"])
    g, _ = add_graph(handle=og.Handle(device=DeviceInfo.fake("cuda")))
    started = time.perf_counter()
    for _ in range(2):  # quick and the same the second time; nothing is compiled
        with pytest.raises(og.cudnnGraphNotSupportedError) as caught:
            g.build()
        lines = str(caught.value).splitlines()
        assert lines[0] == "graph 'test_graph': no engine runs it on cuda:0"
        assert "  fake: shape: rows are multiples of 64; tensor 'A' has 4; dtype: no float32" in lines
        assert "  cpu: device: it runs on host memory; the graph's device is cuda:0" in lines
        assert "  null: proposed only when named: build(engine='null')" in lines
        assert str(caught.value) == og.get_last_error_string()
    assert time.perf_counter() - started < 1.0
    g.tensor((2,), name="still mutable")
    g.find_tensor("A").set_dim((5,))


def test_unknown_engine_lists_the_known_ones():
    g, _ = add_graph()
    with pytest.raises(
        og.cudnnGraphNotSupportedError, match="nope: unknown engine name; known engines: cpu, fused, null"
    ):
        g.build(engine="nope")


def test_a_dtype_no_engine_takes():
    g = og.pygraph(io_data_type=og.data_type.FP8_E5M3, compute_data_type=FLOAT)
    g.matmul(g.tensor((2, 2), name="A"), g.tensor((2, 2))).set_output(True)
    with pytest.raises(og.cudnnGraphNotSupportedError, match=r"cpu: data type: .*'A' \(uid 1\) is FP8_E5M3"):
        g.build(device="cpu")


def test_only_the_declared_refusal_means_no(engine):
    engine(bug=NotImplementedError("a bug"))
    g, _ = add_graph()
    with pytest.raises(NotImplementedError, match="a bug"):
        g.build()


def test_constraints_are_a_table_of_name_law_and_violation():
    table = registry.find("cpu").constraints
    assert all(isinstance(c, Constraint) and c.name and c.law for c in table)
    assert len({c.name for c in table}) == len(table)


def test_unknown_knobs_and_values():
    for knobs, text in (
        ({"speed": 1}, "no knob 'speed'; its knobs: precision"),
        ({"precision": "half"}, "native, float64"),
    ):
        g, _ = add_graph()
        with pytest.raises(ValueError, match=text):
            g.build(engine="cpu", knobs=knobs)
    with pytest.raises(ValueError, match="name it with engine="):
        add_graph()[0].build(knobs={"precision": "native"})


# ---- ranking, building


def test_ranking_by_mode_and_estimate(engine):
    engine()
    g, _ = add_graph()
    g.create_execution_plans()
    names = [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]
    assert names == ["fake[tile=1]", "fake[tile=2]", "cpu[precision=native]", "cpu[precision=float64]"]
    g, _ = add_graph()
    g.create_execution_plans([og.heur_mode.FALLBACK, og.heur_mode.A])
    assert g.get_plan_name_at_index(0) == "cpu[precision=float64]"
    assert g.get_execution_plan_count() == 4
    g, _ = add_graph()
    g.create_execution_plans([og.heur_mode.OPENSOURCE])
    assert g.get_execution_plan_count() == 4
    with pytest.raises(TypeError, match="heur_mode"):
        add_graph()[0].build(heuristics=["A"])


def test_heuristics_that_list_nothing_name_what_was_left_out(engine):
    fake = engine()
    fake.open_source = False
    g, _ = add_graph(handle=og.Handle(device=DeviceInfo.fake("cuda")))
    with pytest.raises(
        og.cudnnGraphNotSupportedError, match=r"not asked for by the heuristics given: fake\[tile=1\]"
    ):
        g.build([og.heur_mode.OPENSOURCE])


def test_planning_compiles_nothing_and_the_build_stops_at_the_first(engine):
    fake = engine()
    g, _ = add_graph()
    g.explain()
    g.create_execution_plans()
    g.check_support()
    g.explain()
    assert fake.compiled == []
    g.build_plans()
    assert fake.compiled == ["fake[tile=1]"]
    assert g.selected_engine.name == "fake"
    g.build()  # a built graph stays as it is
    assert fake.compiled == ["fake[tile=1]"]


def test_a_decline_at_the_build_walks_on(engine):
    engine(compile={1: Declined("ptxas is too old"), 2: Declined("no shared memory", "no registers")})
    g, _ = add_graph()
    g.build()
    assert g.selected_engine.name == "cpu"
    assert g.plans[0].failure == "ptxas is too old"
    assert (
        "plan 1: fake[tile=2], engine id 30001: failed to build: no shared memory; no registers"
        in g.explain()
    )


def test_other_exceptions_of_a_compile_propagate(engine):
    engine(compile={1: KeyError("a bug")})
    g, _ = add_graph()
    with pytest.raises(KeyError, match="a bug"):
        g.build()


def test_nothing_built_lists_each_failure(engine):
    engine(compile={1: Declined("one"), 2: Declined("two")})
    g, _ = add_graph()
    with pytest.raises(og.cudnnGraphNotSupportedError) as caught:
        g.build(engine="fake")
    assert "plan 0 fake[tile=1]: one" in str(caught.value)
    assert "plan 1 fake[tile=2]: two" in str(caught.value)


def test_policy_all_builds_every_plan(engine):
    fake = engine(compile={1: Declined("one")})
    g, _ = add_graph()
    g.create_execution_plans()
    g.build_plans(og.build_plan_policy.ALL)
    assert fake.compiled == ["fake[tile=1]", "fake[tile=2]"]
    assert [p.compiled is not None for p in g.plans] == [False, True, True, True]
    assert g.selected_engine.engine_id == 30001


def test_a_pinned_plan_is_strict(engine):
    engine(compile={2: Declined("two")})
    g, _ = add_graph()
    g.create_execution_plans()
    assert g.select_plan(1) is g
    with pytest.raises(og.cudnnGraphNotSupportedError, match=r"plan 1 fake\[tile=2\]: two"):
        g.build_plans()
    g.select_plan(0)
    g.deselect_engines(["tile=1"])
    with pytest.raises(ValueError, match="barred by deselect_engines"):
        g.build_plans()
    g.select_plan(2).build_plans()
    assert g.selected_engine.name == "cpu"


def test_an_engine_that_ignores_overrides_declines_when_they_are_asked_for(engine):
    engine(overrides=False)
    g, t = add_graph()
    g.build()
    assert g.selected_engine.name == "fake"
    with pytest.raises(ValueError, match="does not honour overrides"):
        x = np.zeros(4, np.float32)
        g.execute(
            {t["A"]: x, t["B"]: x, t["C"]: x.copy()}, np.zeros(1000, np.uint8), None, [1], [(2,)], [(1,)]
        )
    g, _ = add_graph(is_override_shape_enabled=True)
    g.build()
    assert g.selected_engine.name == "cpu"
    assert "does not honour the overrides" in g.plans[0].failure


def test_indices():
    g, _ = add_graph()
    assert g.get_execution_plan_count() == 0
    assert g.plans == []
    assert g.selected_engine is None
    g.build()
    for bad in (-1, 2, 99):
        for call in (
            g.get_plan_name_at_index,
            g.select_plan,
            g.build_plan_at_index,
            g.get_engine_and_knobs_at_index,
        ):
            with pytest.raises(IndexError, match="has 2 plans"):
                call(bad)
    with pytest.raises(TypeError):
        g.get_plan_name_at_index("0")


def test_engine_ids_and_knobs_replay(engine):
    engine()
    g, _ = add_graph()
    g.create_execution_plans()
    recorded = [g.get_engine_and_knobs_at_index(i) for i in range(4)]
    assert recorded[1] == (30001, {og.knob_type.TILE_SIZE: 2})
    assert recorded[2] == (20000, {})
    for index, (engine_id, knobs) in enumerate(recorded):
        h, _ = add_graph()
        h.create_execution_plan(engine_id, knobs)
        assert h.get_execution_plan_count() == 1
        assert h.get_plan_name_at_index(0) == g.get_plan_name_at_index(index)
        h.build()
        assert h.selected_engine.engine_id == engine_id


def test_create_execution_plan_appends_and_freezes():
    g, t = add_graph()
    g.create_execution_plans()
    g.create_execution_plan(20001)
    assert g.get_execution_plan_count() == 3
    assert g.get_plan_name_at_index(2) == "cpu[precision=float64]"
    h, t = add_graph()
    h.create_execution_plan(20100, {og.knob_type.WORKSPACE: 64})
    with pytest.raises(RuntimeError, match="froze"):
        t["A"].set_dim((5,))
    h.build()
    assert h.get_workspace_size() == 64
    with pytest.raises(ValueError, match="unknown engine id 12; known ids"):
        h.create_execution_plan(12)
    with pytest.raises(ValueError, match="no knob"):
        h.create_execution_plan(20000, {og.knob_type.STAGES: 2})


def test_an_engine_id_and_a_knob_that_contradict_each_other():
    g, _ = add_graph()
    with pytest.raises(ValueError, match="20000 stands for precision=native"):
        g.create_execution_plan(20000, {"precision": "float64"})
    g.create_execution_plan(20001, {"precision": "float64"})  # says it twice
    assert g.get_engine_and_knobs_at_index(0) == (20001, {})


def test_engine_count_and_knobs_need_a_validated_graph(engine):
    engine()
    g, _ = add_graph()
    for call in (g.get_engine_count, lambda: g.get_knobs_for_engine(20000)):
        with pytest.raises(AttributeError, match="build_operation_graph"):
            call()
    g.build_operation_graph()
    listed = g.get_engine_count()
    g.build()
    assert g.get_engine_count() == listed == len({p.engine_id for p in g.plans})
    (knob,) = g.get_knobs_for_engine(20001)
    assert (knob.name, knob.type) == ("precision", None) and "float64" in knob.description
    carves, workspace = g.get_knobs_for_engine(20100)
    assert (carves.name, workspace.type) == ("carves", og.knob_type.WORKSPACE)
    with pytest.raises(ValueError, match="unknown engine id 7; known ids"):
        g.get_knobs_for_engine(7)
    pinned, _ = add_graph()
    pinned.build(engine="null")
    assert pinned.get_engine_count() == listed  # what could run it, not what was asked


# ---- saved plans


def test_a_saved_plan_is_built_by_its_engine_and_knobs_only(engine):
    one = engine()
    g, _ = add_graph()
    g.create_execution_plans()
    g.build_plan_at_index(1)
    data = g.serialize()
    h = og.pygraph()
    h.deserialize(data)
    assert [(p.name, p.engine_id, p.knobs) for p in h.plans] == [
        (g.plans[1].name, g.plans[1].engine_id, g.plans[1].knobs)
    ]

    def refused(*words):
        h = og.pygraph()
        with pytest.raises(og.cudnnGraphNotSupportedError) as caught:
            h.deserialize(data)
        assert all(word in str(caught.value) for word in words), caught.value
        assert not h.nodes and not h.plans

    registry.unregister(one.name)
    try:
        refused(one.name, "not installed")
    finally:
        registry.register(one)


def test_a_saved_plan_on_other_devices():
    g, _ = add_graph()
    g.build(device="cpu")
    fake = og.Handle(device=DeviceInfo.fake("cuda"))
    with pytest.raises(og.cudnnGraphNotSupportedError, match="cpu: device: it runs on host memory"):
        og.pygraph(handle=fake).deserialize(g.serialize())
    h, _ = add_graph(handle=fake)
    h.build(engine="null", knobs={"workspace": 512, "carves": [(og.data_type.HALF, (3,))]})
    twin = og.pygraph()
    twin.deserialize(h.serialize())  # for the CUDA device, which is not there: null does not mind
    assert twin.get_workspace_size() == 512
    assert "on cuda:0" in twin.explain()
    described = og.create_device_properties(og.resources.DeviceProperties(fake.device).serialize())
    assert described.device == fake.device
    twin = og.pygraph(device_property=described)
    twin.deserialize(h.serialize())
    assert twin._planned("").target.device.is_fake


def test_enforce_precompiled(engine):
    one = engine()
    g, _ = add_graph()
    g.build(device="cpu", engine="cpu")
    og.pygraph().deserialize(None, g.serialize(), enforce_precompiled=True)
    h, _ = add_graph()
    h.build(engine=one.name)  # its first plan compiles kernels
    with pytest.raises(og.cudnnGraphNotSupportedError, match="enforce_precompiled"):
        og.pygraph().deserialize(data=h.serialize(), enforce_precompiled=True)


# ---- filters


def test_filters_bar_without_renumbering(engine):
    engine()
    g, _ = add_graph()
    assert g.deselect_engines(["fake[tile=1]"]) is g  # also before planning
    g.create_execution_plans()
    assert g.get_execution_plan_count() == 4
    g.build_plans()
    assert g.get_plan_name_at_index(0) == "fake[tile=1]"
    assert g.selected_engine.engine_id == 30001
    for call in (g.build_plan_at_index, lambda i: g.execute_plan_at_index({}, None, i)):
        with pytest.raises(ValueError, match=r"plan 0 .* is barred by deselect_engines"):
            call(0)
    assert "barred by deselect_engines" in g.explain()


def test_workspace_filter_before_and_after_the_compile(engine):
    engine()
    g, _ = add_graph()
    g.deselect_workspace_greater_than(1000).deselect_engines(["tile=1"])
    g.build()
    assert g.selected_engine.name == "cpu"
    assert g.get_workspace_size_plan_at_index(1) == 2000
    registry.unregister("fake")
    late = engine(late_workspace=True)
    g, _ = add_graph()
    g.create_execution_plans()
    with pytest.raises(RuntimeError, match="is not built"):
        g.get_workspace_size_plan_at_index(0)
    g.deselect_workspace_greater_than(999)
    g.build()
    assert late.compiled == ["fake[tile=1]", "fake[tile=2]"]
    assert g.selected_engine.name == "cpu"


def test_note_filters(engine):
    engine()
    note, number = og.behavior_note.RUNTIME_COMPILATION, og.numerical_note.TENSOR_CORE
    for call, expected in (
        (lambda g: g.deselect_behavior_notes([note]), 30001),
        (lambda g: g.select_behavior_notes([note]), 30000),
        (lambda g: g.deselect_numeric_notes([number]), 30000),
        (lambda g: g.select_numeric_notes([number]), 30001),
        (lambda g: g.deselect_numeric_notes([number]).deselect_behavior_notes([note]), 20000),
    ):
        g, _ = add_graph()
        call(g).build()
        assert g.selected_engine.engine_id == expected
    g.get_behavior_notes()
    assert g.get_behavior_notes_for_plan_at_index(0) == [note]
    with pytest.raises(TypeError):
        g.deselect_behavior_notes(["RUNTIME_COMPILATION"])
    with pytest.raises(TypeError):
        g.deselect_engines("cpu")


def test_filters_that_bar_everything():
    g, _ = add_graph()
    g.deselect_engines(["cpu"])
    g.create_execution_plans()
    with pytest.raises(og.cudnnGraphNotSupportedError, match="barred by deselect_engines"):
        g.check_support()
    with pytest.raises(og.cudnnGraphNotSupportedError):
        g.build_plans()


def test_a_filter_after_the_build_takes_the_plan_away():
    g, t = add_graph()
    g.build()
    g.deselect_engines(["native"])
    x = np.ones(4, np.float32)
    c = np.zeros(4, np.float32)
    g.execute({t["A"]: x, t["B"]: x, t["C"]: c})
    assert g.selected_engine.engine_id == 20001
    assert c.tolist() == [2, 2, 2, 2]
