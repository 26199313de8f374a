"""Saved graphs compute what the original computes, for every operator and option of the conformance cases."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from conformance.cases import CASES
from conformance.memory import ML_DTYPES, NumpyBuffer, Region
from conformance.problem import Input, build
from sums import refused

import opgraph
from opgraph import data_type, scalar_type
from opgraph.ir.datatypes import numpy_dtype
from opgraph.ops import OPS
from opgraph.ops.base import OpDef

FLOAT = data_type.FLOAT
KNOBS = {"precision": "float64"}


def reloaded(graph: Any) -> Any:
    twin = opgraph.pygraph(graph.name)
    twin.deserialize(graph.serialize(as_bytes=True))
    return twin


def results(graph: Any, values: dict[int, Any]) -> list[bytes]:
    """Runs the graph with operands by uid; the bytes of every output."""
    outputs = {t.uid: Region(t.dim, t.stride, t.data_type, NumpyBuffer) for t in graph.get_outputs()}
    size = graph.get_workspace_size()
    workspace = np.zeros(size, np.uint8) if size else None
    graph.execute({**values, **{uid: region.operand for uid, region in outputs.items()}}, workspace)
    return [region.values().tobytes() for region in outputs.values()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_round_trips(case: Any, request: pytest.FixtureRequest) -> None:
    """All problems of a case, in its last data type; the results of the first of each set of attributes too."""
    dtype = tuple(case.data_types)[-1]
    if not ML_DTYPES.keys().isdisjoint((dtype, getattr(case, "source", dtype))):
        request.getfixturevalue("ml_dtypes")
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    seen: set[str] = set()
    for problem in case.problems(dtype, rng):
        graph, tensors, _ = build(problem, "cpu", KNOBS)
        if any(n.params.get("score_mod") is not None for n in graph.nodes):
            refused(graph.serialize, "score_mod", error=TypeError)  # a user's callback
            continue
        described, key = graph.inspect(), graph.key()
        twin = reloaded(graph)
        assert twin.inspect() == described, problem.id
        assert [n.params for n in twin.nodes] == [n.params for n in graph.nodes], problem.id
        assert [[type(v) for v in n.params.values()] for n in twin.nodes] == [
            [type(v) for v in n.params.values()] for n in graph.nodes
        ]
        assert twin.key() == key
        assert [p.name for p in twin.plans] == ["cpu[precision=float64]"]
        options = repr([(n["op"], n["params"]) for n in described["nodes"]])
        if options not in seen:
            seen.add(options)
            values = {tensors[name].uid: operand(given) for name, given in problem.inputs.items()}
            assert results(twin, values) == results(graph, values), problem.id


def operand(given: Input) -> Any:
    """The buffer of an input, laid out as declared."""
    if given.by_value:
        return given.values
    region = Region(given.dim, given.stride, given.dtype, NumpyBuffer)
    region.fill(given.values)
    return region.operand


def test_every_operator_was_among_them() -> None:
    assert set(OPS) <= {case.op for case in CASES}


# ---- values


SCALARS = [
    (FLOAT, 0.1), (FLOAT, -0.0), (FLOAT, float("inf")), (FLOAT, 5e-324), (data_type.DOUBLE, 0.1), (FLOAT, 3),
    (data_type.INT64, 2**63 - 1), (FLOAT, np.float32(0.1)), (FLOAT, np.array([0.1], np.float32)),
    (FLOAT, np.array(0.1, np.float32)), (data_type.INT64, np.int64(-(2**63))), (data_type.BOOLEAN, True),
    (data_type.HALF, np.float16(1e-5)),
]  # fmt: skip


@pytest.mark.parametrize("dtype, value", SCALARS)
@pytest.mark.parametrize("kind", list(scalar_type))
def test_embedded_scalars_keep_their_bits(dtype: data_type, value: Any, kind: Any) -> None:
    graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=dtype)
    x = graph.tensor((3,), name="X")
    s = graph.tensor_scalar(value, kind, name="S").set_dim((1,)).set_stride((1,))
    graph.identity(s).set_output(True) if dtype is data_type.BOOLEAN else graph.mul(x, s).set_output(True)
    graph.build(engine="cpu", device="cpu")
    twin = reloaded(graph)
    found = twin.find_tensor("S")
    assert type(found.pass_by_value) is type(value) and found.scalar_type is kind
    assert np.asarray(found.pass_by_value).tobytes() == np.asarray(value).tobytes()
    assert np.asarray(found.pass_by_value).shape == np.asarray(value).shape
    ones = np.ones(3, numpy_dtype(dtype))
    assert results(twin, {x.uid: ones}) == results(graph, {x.uid: ones})


def test_a_bfloat16_scalar(ml_dtypes: Any) -> None:
    graph = opgraph.pygraph(io_data_type=data_type.BFLOAT16, compute_data_type=FLOAT)
    x = graph.tensor((3,))
    s = graph.tensor_scalar(ml_dtypes.bfloat16(0.1), scalar_type.RUNTIME_PARAM, "S").set_dim((1,)).set_stride((1,))
    graph.mul(x, s).set_output()
    graph.build(device="cpu")
    value = reloaded(graph).find_tensor("S").pass_by_value
    assert type(value) is ml_dtypes.bfloat16 and value == ml_dtypes.bfloat16(0.1)


def add_graph(**options: Any) -> Any:
    graph = opgraph.pygraph(io_data_type=FLOAT, **options)
    graph.add(graph.tensor((3,), name="A"), graph.tensor((3,), name="B")).set_output(True).set_name("C")
    return graph


def run(graph: Any, **changed: Any) -> list[float]:
    out = np.zeros(3, np.float32)
    graph.execute({"A": np.ones(3, np.float32), "B": np.full(3, 2, np.float32), "C": out, **changed})
    return out.tolist()


# ---- what is refused


def test_a_plan_has_to_be_built() -> None:
    graph = add_graph()
    for step in (lambda: None, graph.validate, lambda: graph.create_execution_plans(), graph.check_support):
        step()
        refused(graph.serialize, "serialize", "not built", error=RuntimeError)
    graph.build_plans()
    graph.serialize()
    graph.select_plan(1)
    refused(graph.serialize, "not built", error=RuntimeError)
    graph.build_plan_at_index(1)
    assert reloaded(graph).plans[0].name == "cpu[precision=float64]"


def test_auto_bound_arrays_are_refused() -> None:
    graph = opgraph.pygraph(io_data_type=FLOAT)
    graph.add(graph.tensor((3,), name="A"), np.ones(3, np.float32), name="plus").set_output(True)
    graph.build(device="cpu")
    refused(graph.serialize, "'plus::IN_1' (uid 2)", "numpy.ndarray", "execute()", error=TypeError)


@pytest.mark.frameworks
def test_scalars_of_a_framework_are_refused(torch: Any) -> None:
    graph = opgraph.pygraph(io_data_type=FLOAT)
    s = graph.tensor_scalar(torch.tensor([2.0]), scalar_type.RUNTIME_PARAM, "S").set_dim((1,)).set_stride((1,))
    graph.add(graph.tensor((3,)), s).set_output(True)
    graph.build(device="cpu")
    refused(graph.serialize, "'S' (uid 1)", "torch.Tensor", error=TypeError)


def test_callbacks_and_foreign_operators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = opgraph.pygraph(io_data_type=FLOAT)
    graph._add_node("identity", inputs={"IN_0": graph.tensor((3,))}, outputs=("OUT_0",), name="n",
                    params={"mode": "identity", "hook": len})["OUT_0"].set_output(True)  # fmt: skip
    graph.build(device="cpu")
    refused(graph.serialize, "identity 'n'", "hook", "builtin_function_or_method", error=TypeError)
    graph = add_graph()
    graph.build(device="cpu")
    known = OPS["add"]
    other = OpDef(known.name, known.node_type, known.infer, known.reference)
    monkeypatch.setitem(OPS, "add", other)
    refused(graph.serialize, "add 'add.0'", "OPS", error=TypeError)


def test_only_an_empty_graph_is_filled() -> None:
    built = add_graph()
    built.build(device="cpu")
    data = built.serialize()
    half = opgraph.pygraph()
    half.tensor((3,))
    for graph in (half, built, reloaded(built)):
        refused(lambda g=graph: g.deserialize(data), "not empty", error=RuntimeError)
    refused(lambda: opgraph.pygraph().deserialize(5, data), "Handle", error=TypeError)


# ---- what is kept


def test_a_loaded_graph_is_frozen_and_built() -> None:
    graph = add_graph(is_override_shape_enabled=True, sm_count=7)
    graph.build(engine="cpu", knobs={"precision": "float64"}, device="cpu")
    cache = opgraph.create_kernel_cache()
    twin = opgraph.pygraph("mine", kernel_cache=cache)
    assert twin.deserialize(graph.serialize()) is None
    assert twin.name == "mine" and twin._options["kernel_cache"] is cache
    assert twin._options["is_override_shape_enabled"] is True and twin._options["sm_count"] == 7
    assert twin.selected_engine.engine_id == 20001 and twin.get_workspace_size() == 0
    assert twin.query_tensor_attributes_of_uid(1).name == "A"
    for change in (lambda: twin.tensor((3,)).set_dim((2,)), lambda: twin.find_tensor("A").set_name("X"),
                   lambda: twin.add(twin.find_tensor("A"), 1.0), twin.create_execution_plans):  # fmt: skip
        refused(change, "mine", error=RuntimeError)
    assert run(twin) == [3, 3, 3]
    refused(lambda: run(twin, D=np.zeros(3)), "D", error=KeyError)
    refused(lambda: twin.execute({graph.find_tensor("A"): np.ones(3)}), "another graph", error=KeyError)


def test_saving_again_and_copies() -> None:
    graph = add_graph()
    graph.build(device="cpu")
    twin = reloaded(graph)
    assert twin.serialize() == graph.serialize()
    free = twin.copy()
    free.mul(free.find_tensor("C"), free.find_tensor("A")).set_output(True)
    assert free.nodes[-1].name == "mul.0" and [t.uid for t in free.tensors.values()] == [1, 2, 3, 4]
    free.add(free.find_tensor("A"), 1.0)
    assert free.nodes[-1].name == "add.1"


def test_names_and_uids_of_every_kind() -> None:
    graph = opgraph.pygraph('<a & "b">', io_data_type=FLOAT)
    a, b = graph.tensor((3,), name="same"), graph.tensor((3,), name="same", uid=0)
    c = graph.add(a, b, name="é\ud800\0").set_output(True).set_name("")
    unused = graph.tensor((5,), name="unused", uid=2**63 - 1)
    graph.build(device="cpu")
    late = graph.tensor((4,), name="unused")  # after planning: takes no name away
    twin = reloaded(graph)
    assert twin.inspect()["tensors"] == graph.inspect()["tensors"][:-1]
    refused(lambda: twin.find_tensor("same"), "ambiguous", error=ValueError)
    out = np.zeros(3, np.float32)
    x = np.ones(3, np.float32)
    twin.execute({a.uid: x, 0: x, "": out, unused.uid: x, "unused": x})
    assert out.tolist() == [2, 2, 2]
    refused(lambda: twin.execute({late.uid: x}), str(late.uid), error=KeyError)
    assert c.uid == twin.find_tensor("").uid


def test_a_handle_names_device_and_stream() -> None:
    graph = add_graph()
    graph.build(device="cpu")
    handle = opgraph.Handle(device="cpu", stream=3)
    for twin, call in ((opgraph.pygraph(), lambda g, d: g.deserialize(handle, d)),
                       (opgraph.pygraph(), lambda g, d: g.deserialize(handle=handle, data=d)),
                       (opgraph.pygraph(handle=handle), lambda g, d: g.deserialize(data=d))):  # fmt: skip
        call(twin, graph.serialize())
        assert twin.handle is handle and run(twin) == [3, 3, 3]


def test_the_wrapper_saves_and_loads() -> None:
    with opgraph.Graph(io_data_type=FLOAT) as g:
        a, b = g.tensor((3,), name="A"), g.tensor((3,), name="B")
        g.add(a, b).set_output(True).set_name("C")
    data = g.serialize()
    with opgraph.Graph(inputs=["A", "B"], outputs=["C"]) as h:
        h.deserialize(data)
    assert h(np.ones(3, np.float32), np.ones(3, np.float32)).tolist() == [2, 2, 2]
