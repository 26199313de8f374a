"""The null engine, fake devices, workspaces and carves, structure keys, and the objects beside a graph."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import opgraph as og
from opgraph.engines.device import DeviceInfo, as_device, device_text
from opgraph.engines.support import Candidate, CompiledPlan, Engine, Target, layout_carves
from opgraph.planning.registry import registry

FLOAT = og.data_type.FLOAT


def add_graph(**options: Any) -> tuple[og.pygraph, dict[str, og.Tensor]]:
    g = og.pygraph(io_data_type=FLOAT, **options)
    a, b = g.tensor((4,), name="A"), g.tensor((4,), name="B")
    c = g.add(a, b).set_output(True).set_name("C")
    return g, {"A": a, "B": b, "C": c}


# ---- devices


def test_device_texts_and_pairs():
    assert as_device("cpu") == DeviceInfo.cpu()
    assert as_device("cuda:3").key == (2, 3)
    assert as_device((1, 0)).is_cpu
    assert str(DeviceInfo.fake("cuda", 1)) == "cuda:1"
    assert device_text((99, 4)) == "device type 99, id 4"
    for bad in ("gpu", "cuda:x", ""):
        with pytest.raises(ValueError, match="names no device"):
            as_device(bad)
    with pytest.raises(TypeError):
        as_device(1)
    fake = DeviceInfo.fake(compute_capability=(10, 3))
    assert (fake.sm_version, fake.sm_count, fake.is_fake) == (103, 132, True)
    with pytest.raises(AttributeError):
        fake.name = "x"


def test_the_target_device_is_the_handles_then_the_named_one():
    g, _ = add_graph(handle=og.Handle(device=DeviceInfo.fake("cuda", 1)))
    assert "on cuda:1" in g.explain()
    with pytest.raises(ValueError, match="contradicts the graph's handle"):
        g.build(device="cpu")
    g, _ = add_graph()
    assert "on cuda:7" in g.explain(device=DeviceInfo.fake("cuda", 7))
    assert "on rocm:0" in g.explain(device=(10, 0))


def test_the_cpu_engine_never_stands_in_for_another_device():
    g, _ = add_graph()
    with pytest.raises(og.cudnnGraphNotSupportedError, match="cpu: device: it runs on host memory"):
        g.build(device=DeviceInfo.fake("cuda"))


def test_the_null_engine_plans_for_a_fake_device():
    g, t = add_graph(handle=og.Handle(device=DeviceInfo.fake("cuda")))
    g.build(engine="null")
    x = np.zeros(4, np.float32)
    with pytest.raises(
        og.OperandError, match="wrong device; declared a plan for cuda:0, given memory of cpu"
    ) as caught:
        g.execute({t["A"]: x, t["B"]: x, t["C"]: x})
    assert (caught.value.tensor, caught.value.uid, caught.value.rule) == ("A", 1, "device")
    g.execute({t["A"]: 4096, t["B"]: 8192, t["C"]: 12288})  # bare addresses: nothing is read


def test_device_properties_round_trip():
    made = og.create_device_properties(0)
    again = og.create_device_properties(made.serialize())
    assert again.device.key == (2, 0)
    g, _ = add_graph(device_property=again)
    assert "on cuda:0" in g.explain()
    for bad in ("", "{}", "[]", '{"format": "opgraph.device_properties", "version": 9}'):
        with pytest.raises(ValueError, match="describes no device"):
            og.create_device_properties(bad)


# ---- the null engine, workspace, carves


def test_null_is_proposed_only_when_named():
    g, t = add_graph()
    g.build()
    assert all(p.engine != "null" for p in g.plans)
    g, t = add_graph()
    g.build(engine="null")
    c = np.full(4, 7, np.float32)
    g.execute({t["A"]: c, t["B"]: c, t["C"]: c})
    assert c.tolist() == [7, 7, 7, 7]
    assert "proposes null" in add_graph()[0].explain(engine="null")


def test_workspace_rules():
    g, t = add_graph()
    g.build(engine="null", knobs={"workspace": 256})
    assert g.get_workspace_size() == 256
    x, guarded = np.zeros(4, np.float32), np.full(1024, 7, np.uint8)
    pack = {t["A"]: x, t["B"]: x, t["C"]: x.copy()}
    read_only = np.zeros(256, np.uint8)
    read_only.flags.writeable = False
    for bad, words in (
        (None, ("256", "0 bytes")),
        (guarded[:255], ("256", "255")),
        (read_only, ("read-only",)),
        (guarded[::2], ("not dense",)),
        (0, ("256",)),
        ("x", ("str",)),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            g.execute(pack, bad)
        assert all(w in str(caught.value) for w in ("workspace", *words)), str(caught.value)
    for good in (guarded[:256], guarded[:512], np.zeros(64, np.float32), guarded.ctypes.data):
        g.execute(pack, good)
    assert (guarded == 7).all()
    g, t = add_graph()
    g.build(engine="null")
    pack = {t["A"]: x, t["B"]: x, t["C"]: x.copy()}
    g.execute(pack)
    g.execute(pack, np.zeros(0, np.uint8))


def test_null_knobs_are_checked():
    for bad in (-1, True, "256", 1.5):
        with pytest.raises(ValueError, match="knob workspace"):
            add_graph()[0].build(engine="null", knobs={"workspace": bad})


def test_carves_are_aligned_and_reach_the_plan():
    carves, need = layout_carves([(FLOAT, (3,)), (og.data_type.HALF, (5, 7)), (og.data_type.FP4_E2M1, (6,))])
    assert [c[0] for c in carves] == [0, 256, 512]
    assert need == 512 + 3
    g, _ = add_graph()
    g.build(engine="null", knobs={"carves": [(FLOAT, (3,)), (og.data_type.HALF, (5, 7))]})
    assert g.get_workspace_size() == 256 + 70


def test_carves_and_geometry_as_an_engine_sees_them():
    seen: list[Any] = []

    class Probe(Engine):
        name = "probe"
        engine_ids: ClassVar = {31000: {}}

        def propose(self, spec: Any, target: Target) -> list[Candidate]:
            return [Candidate(self.name, 31000)]

        def compile(self, spec: Any, candidate: Candidate, target: Target) -> CompiledPlan:
            carves, need = layout_carves([(FLOAT, (3,)), (og.data_type.INT32, (2, 2))])

            def run(pack: Any) -> None:
                seen.append(
                    (
                        pack.uids,
                        [(s.ptr, s.shape) for s in pack.carves],
                        pack[0].shape,
                        pack.geometry,
                        len(pack),
                    )
                )

            return CompiledPlan(run, workspace_bytes=need, carves=carves, overrides=True)

    registry.register(Probe())
    try:
        g, t = add_graph()
        g.build(engine="probe")
        x, work = np.zeros(4, np.float32), np.zeros(1024, np.uint8)
        pack = {t["A"]: x, t["B"]: x, t["C"]: x.copy()}
        g.execute(pack, work)
        g.execute(pack, work, None, [1, 2, 3], [(2,)] * 3, [(1,)] * 3)
    finally:
        registry.unregister("probe")
    uids, carves, shape, geometry, count = seen[0]
    assert (uids, count, shape, geometry) == ((1, 2, 3), 3, (4,), None)
    assert carves == [(work.ctypes.data, (3,)), (work.ctypes.data + 256, (2, 2))]
    assert seen[1][2] == (2,)
    assert seen[1][3][3] == ((2,), (1,))


# ---- structure keys, caches


def test_key_depends_on_structure_alone():
    g, _ = add_graph()
    h, t = add_graph(name="other")
    t["A"].set_uid(77).set_name("renamed")
    assert g.key() == h.key()
    assert isinstance(g.key(), int)
    for change in (
        lambda t: t["A"].set_stride((2,)),
        lambda t: t["A"].set_data_type(og.data_type.HALF),
        lambda t: t["A"].set_is_pass_by_value(True).set_dim((1,)),
    ):
        k, t = add_graph()
        change(t)
        assert k.key() != g.key()


def test_kernel_cache_round_trip():
    cache = og.create_kernel_cache()
    cache.put("a", "x")
    cache.put("a", "x")
    assert (cache.size, cache.revision) == (1, 1)
    other = og.create_kernel_cache()
    other.deserialize(cache.serialize())
    assert other.get("a") == "x"
    for bad in ("", "[]", "{}", '{"format": "opgraph.kernel_cache", "version": 1, "entries": {"a": 1}}', 5):
        with pytest.raises(ValueError, match="not a serialized kernel cache"):
            other.deserialize(bad)
    assert other.size == 1


def test_versions():
    assert og.backend_version() == 92700
    assert og.backend_version_string() == "9.27.0"
    assert og.library_version() == og.__version__
