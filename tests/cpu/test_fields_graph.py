"""Field cases about graph descriptions, plan choice, scalars, copies and imports."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from producers import Producer
from sums import Engine, Guarded, ScratchEngine, Sum, refused, run_python

import opgraph
from opgraph import data_type, scalar_type
from opgraph.engines.device import DeviceInfo
from opgraph.ir.datatypes import numpy_dtype
from opgraph.planning.registry import registry

FLOAT = data_type.FLOAT
NotSupported = opgraph.cudnnGraphNotSupportedError


def ones(count: int = 3, value: float = 1) -> Any:
    return np.full(count, value, np.float32)


# ---- F21, F22: uids and keys


class TestF21TwoTensorsWithOneUid:
    def test_both_given(self, any_engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        graph.tensor((3,), name="A", uid=7)
        refused(lambda: graph.tensor((3,), name="B", uid=7), "'A' (uid 7)", "'B'", error=ValueError)
        b = graph.tensor((3,), name="B")
        refused(lambda: b.set_uid(7), "'A' (uid 7)", "'B'", error=ValueError)

    def test_an_automatic_holder_gives_way(self, engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        a = graph.tensor((3,), name="A")
        b = graph.tensor((3,), name="B")
        c = graph.add(a, b).set_output(True).set_name("C")
        held = c.uid
        b.set_uid(held)
        assert b.uid == held and len({a.uid, b.uid, c.uid}) == 3
        engine.build(graph)
        out = Guarded((3,))
        graph.execute({a.uid: ones(), b.uid: ones(value=4), c.uid: out.view})
        assert out.view.tolist() == [5, 5, 5]
        out.check()

    def test_one_tensor_as_both_inputs(self, engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        a = graph.tensor((3,), name="A", uid=0)
        c = graph.add(a, a).set_output(True)
        engine.build(graph)
        out = Guarded((3,))
        graph.execute({0: np.array([1, 2, 3], np.float32), c: out.view})
        assert out.view.tolist() == [2, 4, 6]

    def test_the_last_uid_counts(self, any_engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        a = graph.tensor((3,), name="A")
        c = graph.add(a, a).set_output(True)
        a.set_uid(70).set_uid(71)
        any_engine.build(graph)
        out = Guarded((3,))
        refused(lambda: graph.execute({70: ones(), c: out.view}), "70", error=KeyError)
        out.untouched()
        graph.execute({71: ones(), c: out.view})
        assert out.view.tolist() == ([2, 2, 2] if any_engine.computes else [-1] * 3)


class TestF22MissingOrForeignEntry:
    """Virtual tensors' buffers are ignored; what names no tensor of the graph is a KeyError."""

    def operands(self, case: Sum) -> tuple[dict[Any, Any], Guarded]:
        out = Guarded((3,))
        return {case.a: ones(), case.b: ones(), case.c: out.view}, out

    def test_missing(self, any_engine):
        case = Sum(any_engine)
        operands, out = self.operands(case)
        for wrong in ({k: v for k, v in operands.items() if k is not case.b}, {**operands, case.b: None}):
            caught = refused(lambda w=wrong: case.graph.execute(w), "'B' (uid 2)")
            assert (caught.tensor, caught.uid) == ("B", 2)
        lists = ([ones(), out.view], [1, 3]), ([ones(), None, out.view], [1, 2, 3])
        for buffers, uids in lists:
            refused(lambda b=buffers, u=uids: case.graph.execute(b, tensor_uids=u), "'B' (uid 2)")
        out.untouched()
        case.usable()

    def test_unknown_and_foreign(self, any_engine):
        case, other = Sum(any_engine), Sum(any_engine)
        operands, out = self.operands(case)
        assert other.b.uid == case.b.uid
        refused(lambda: case.graph.execute({**operands, 999: ones()}), "999", error=KeyError)
        refused(lambda: case.graph.execute({**operands, "Z": ones()}), "'Z'", error=KeyError)
        refused(lambda: case.graph.execute({**operands, other.b: ones()}), "'B' (uid 2)", error=KeyError)
        refused(lambda: case.graph.execute({**operands, other.b: None}), "'B' (uid 2)", error=KeyError)
        buffers = [*operands.values(), ones()]
        refused(lambda: case.graph.execute(buffers, tensor_uids=[1, 2, 3, 999]), "999", error=KeyError)
        refused(lambda: case.graph.execute({**operands, 1.5: ones()}), "float", error=AttributeError)
        for key in ((1, 2), (1,), ()):
            refused(lambda k=key: case.graph.execute({**operands, k: ones()}), "tuple", error=AttributeError)
        refused(lambda: case.graph.execute({**operands, True: ones()}), error=(TypeError, KeyError))
        late = case.graph.tensor((3,), name="late")
        refused(lambda: case.graph.execute({**operands, late: ones()}), "'late'", error=KeyError)
        out.untouched()
        case.graph.execute({**operands, None: ones()})

    def test_virtual(self, any_engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        a = graph.tensor((3,), name="A")
        virtual = graph.add(a, a).set_name("V")
        c = graph.add(virtual, a).set_output(True)
        any_engine.build(graph)
        given, out = Guarded((3,)), Guarded((3,))
        for extra in (given.view, ones(2), "nonsense", Producer(ones(), device=(2, 0))):
            for key in (virtual, virtual.uid, "V"):
                graph.execute({a: ones(), key: extra, c: out.view})
        given.untouched()
        assert out.view.tolist() == ([3, 3, 3] if any_engine.computes else [-1] * 3)


# ---- F24: changes after the build


class TestF24GraphChangedAfterBuild:
    def changes(self, case: Sum) -> dict[str, Callable[[], Any]]:
        a, graph = case.a, case.graph
        return {
            "dim": lambda: a.set_dim((2,)),
            "dim=": lambda: setattr(a, "dim", (2,)),
            "stride": lambda: a.set_stride((2,)),
            "stride=": lambda: setattr(a, "stride", (2,)),
            "dtype": lambda: a.set_data_type(data_type.HALF),
            "dtype=": lambda: setattr(a, "data_type", data_type.HALF),
            "uid": lambda: a.set_uid(70),
            "uid=": lambda: setattr(a, "uid", 70),
            "name": lambda: a.set_name("renamed"),
            "output": lambda: case.c.set_output(False),
            "virtual": lambda: setattr(case.c, "is_virtual", True),
            "by value": lambda: a.set_is_pass_by_value(True),
            "node": lambda: graph.add(a, a),
            "node of numbers": lambda: graph.add(a, 1.0),
        }

    def test_each_is_refused_at_once(self, any_engine):
        case = Sum(any_engine, (4,))
        before = case.graph.inspect()
        for what, change in self.changes(case).items():
            refused(change, "plan", error=RuntimeError)
            assert case.graph.inspect() == before, what
            case.usable()

    def test_nothing_reaches_the_plan_by_its_parts(self, any_engine):
        case = Sum(any_engine, (4,))
        node = case.graph.nodes[0]
        for container in (node.inputs, node.outputs, node.params):
            refused(
                lambda c=container: c.__setitem__("IN_0", case.b),
                error=(TypeError, AttributeError, RuntimeError),
            )
        case.graph.nodes.clear()
        case.graph.tensors.clear()
        case.a.get_dim()[0] = 2
        case.usable()

    def test_a_changed_copy_runs_what_it_says(self, engine):
        case = Sum(engine, (4,))
        twin = case.graph.copy()
        for name in "ABC":
            twin.find_tensor(name).set_dim((2,))
        engine.build(twin)
        out = Guarded((2,))
        twin.execute({"A": ones(2), "B": ones(2, 5), "C": out.view})
        assert out.view.tolist() == [6, 6]
        out.check()
        case.usable()
        refused(lambda: twin.execute({"A": ones(2), "B": ones(2), "C": ones(1)}), "'C' (uid 3)")


# ---- F37: no plan


class TestF37NoPlanSayWhy:
    @pytest.fixture(autouse=True)
    def compiles_nothing(self, monkeypatch):
        def compile(*arguments: Any) -> Any:
            raise AssertionError("compiled")

        for engine in registry.engines():
            monkeypatch.setattr(type(engine), "compile", compile)

    def lines(self, call: Callable[[], Any]) -> dict[str, str]:
        """The reason of each engine; asked twice, and quick."""
        call_text = ""
        for _ in range(2):
            start = time.perf_counter()
            call_text = str(refused(call, error=NotSupported))
            assert time.perf_counter() - start < 1
        reasons = [line.strip().partition(": ") for line in call_text.splitlines()[1:]]
        return {name: reason for name, _, reason in reasons}

    def matmul(self, dtype: data_type) -> Any:
        graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=FLOAT)
        graph.matmul(graph.tensor((2, 4)), graph.tensor((4, 8))).set_output(True)
        return graph

    @pytest.mark.parametrize("dtype", [data_type.FP8_E5M3, data_type.INT8x4])
    def test_a_data_type_that_no_engine_takes(self, dtype):
        reasons = self.lines(lambda: self.matmul(dtype).build(device="cpu"))
        assert "data type" in reasons["cpu"] and dtype.name in reasons["cpu"]
        assert "only when named" in reasons["null"]
        graph = self.matmul(dtype)
        assert self.lines(lambda: graph.build(device="cpu")) == reasons

    def test_a_graph_for_a_device_that_is_not_there(self):
        graph = self.matmul(FLOAT)
        reasons = self.lines(lambda: graph.build(device=DeviceInfo(2, 77)))
        assert "device" in reasons["cpu"] and "cuda:77" in reasons["cpu"]
        assert graph.explain(device=DeviceInfo(2, 77)).count("\n") >= 2

    def test_an_engine_that_does_not_exist(self):
        graph = self.matmul(FLOAT)
        reasons = self.lines(lambda: graph.build(engine="cpv", device="cpu"))
        assert "unknown engine name" in reasons["cpv"]
        assert "cpu" in reasons["cpv"] and "null" in reasons["cpv"]
        assert {"cpu", "null"} <= set(reasons)

    def test_the_reasons_differ(self):
        kinds = (
            self.lines(lambda: self.matmul(data_type.FP8_E5M3).build(device="cpu"))["cpu"],
            self.lines(lambda: self.matmul(FLOAT).build(device=DeviceInfo(2, 77)))["cpu"],
            self.lines(lambda: self.matmul(FLOAT).build(engine="cpv"))["cpu"],
        )
        assert len(set(kinds)) == 3

    def test_a_wrong_shape_is_another_error(self):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        graph.matmul(graph.tensor((2, 4)), graph.tensor((5, 8))).set_output(True)
        refused(lambda: graph.build(device="cpu"), "matmul", error=ValueError)


# ---- F38: by-value scalars


EXACT = [
    (data_type.INT64, 9007199254740993, "add", 0),
    (data_type.INT64, -(2**63), "add", 0),
    (FLOAT, 0.1, "mul", 1),
    (data_type.HALF, 1e-5, "mul", 1),
    (data_type.DOUBLE, 0.1, "mul", 1),
    (data_type.INT32, 2**31 - 1, "mul", 1),
]


def as_given(value: Any, dtype: data_type, form: str) -> Any:
    numpy = numpy_dtype(dtype).type
    if form == "array":
        return np.array(value, numpy)
    if form == "array of one":
        return np.array([value], numpy)
    return value if form == "python" else numpy(value)


class TestF38ByValueScalarKeepsItsType:
    @pytest.mark.parametrize("form", ["python", "numpy", "array", "array of one"])
    @pytest.mark.parametrize("place", ["call", "embedded", "constant"])
    @pytest.mark.parametrize("dtype, value, op, neutral", EXACT)
    def test_exact(self, engine, dtype, value, op, neutral, place, form):
        compute = FLOAT if dtype is data_type.HALF else dtype
        graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=compute)
        x = graph.tensor((3,), name="X")
        given = as_given(value, dtype, form)
        if place == "call":
            s = graph.tensor((1,), is_pass_by_value=True, name="S")
        else:
            kind = scalar_type.RUNTIME_PARAM if place == "embedded" else scalar_type.COMPILE_TIME_CONST
            s = graph.tensor_scalar(given, kind, name="S").set_dim((1,)).set_stride((1,))
        y = getattr(graph, op)(x, s).set_output(True)
        engine.build(graph)
        numpy = numpy_dtype(dtype)
        out = Guarded((3,), dtype=numpy, fill=7)
        operands = {x: np.full(3, neutral, numpy), y: out.view}
        graph.execute({**operands, s: given} if place == "call" else operands)
        out.check()
        assert (out.view == numpy.type(value)).all()
        if dtype is data_type.INT64:
            assert [int(each) for each in out.view] == [value] * 3

    @pytest.mark.frameworks
    def test_of_torch(self, engine, torch):
        graph = opgraph.pygraph(io_data_type=data_type.INT64)
        x, s = graph.tensor((3,)), graph.tensor((1,), is_pass_by_value=True)
        y = graph.add(x, s).set_output(True)
        engine.build(graph)
        for value in (torch.tensor(9007199254740993), torch.tensor([9007199254740993])):
            out = np.zeros(3, np.int64)
            graph.execute({x: np.zeros(3, np.int64), s: value, y: out})
            assert out.tolist() == [9007199254740993] * 3

    @pytest.mark.parametrize("dtype, value", [
        (data_type.INT64, 1.5), (data_type.INT64, 1.0), (data_type.INT32, 2**31), (data_type.INT8, -129),
        (data_type.UINT8, -1), (data_type.INT64, 2**63), (FLOAT, 1e39), (data_type.HALF, 65520.0),
        (FLOAT, 2**24 + 1), (FLOAT, np.float16(1)), (data_type.INT64, np.int32(1)), (FLOAT, True),
        (data_type.INT32, np.array([1, 2], "i4")), (FLOAT, "1"), (FLOAT, 1j), (FLOAT, [1.0]),
        (data_type.INT32, None.__class__),
    ])  # fmt: skip
    def test_refused(self, any_engine, dtype, value):
        compute = FLOAT if dtype is data_type.HALF else dtype
        graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=compute)
        x = graph.tensor((3,), name="X")
        s = graph.tensor_scalar(value, scalar_type.RUNTIME_PARAM, name="S").set_dim((1,)).set_stride((1,))
        graph.add(x, s).set_output(True)
        refused(lambda: any_engine.build(graph), "'S'", dtype.name, error=(TypeError, ValueError))

        graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=compute)
        x = graph.tensor((3,), name="X")
        s = graph.tensor((1,), is_pass_by_value=True, name="S")
        y = graph.add(x, s).set_output(True)
        any_engine.build(graph)
        out = Guarded((3,), dtype=numpy_dtype(dtype))
        operands = {x: np.zeros(3, numpy_dtype(dtype)), y: out.view}
        refused(lambda: graph.execute({**operands, s: value}), "'S'", error=(TypeError, ValueError))
        out.untouched()
        graph.execute({**operands, s: 1.0 if dtype in (FLOAT, data_type.HALF) else 1})

    def test_an_int_is_a_value_and_never_an_address(self, engine):
        graph = opgraph.pygraph(io_data_type=data_type.INT64)
        x, s = graph.tensor((1,)), graph.tensor((1,), is_pass_by_value=True)
        y = graph.add(x, s).set_output(True)
        engine.build(graph)
        held, out = np.zeros(1, np.int64), np.zeros(1, np.int64)
        graph.execute({x: held, s: held.ctypes.data, y: out})
        assert out.tolist() == [held.ctypes.data]


# ---- F40: copies


class TestF40CopyAndPickle:
    def unbuilt(self) -> Any:
        graph = opgraph.pygraph("sum", io_data_type=FLOAT)
        a = graph.tensor((3,), name="A", uid=10)
        graph.add(a, graph.tensor((3,), name="B")).set_output(True).set_name("C")
        return graph

    def check(self, graph: Any, engine: Engine) -> None:
        out = Guarded((3,))
        graph.execute({"A": ones(), "B": ones(value=2), "C": out.view})
        out.check()
        assert out.view.tolist() == ([3, 3, 3] if engine.computes else [-1] * 3)

    @pytest.mark.parametrize("built", [False, True])
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda graph: graph.copy()])
    def test_graphs_copy(self, any_engine, built, duplicate):
        graph = self.unbuilt()
        if built:
            any_engine.build(graph)
        described = graph.inspect()
        twin = duplicate(graph)
        del graph
        gc.collect()
        assert twin.inspect() == described
        if not built:
            twin.find_tensor("A").set_name("A")  # it can change
        any_engine.build(twin)
        self.check(twin, any_engine)

    def test_a_copied_mapping_speaks_of_the_copied_graph(self, engine):
        graph = engine.build(self.unbuilt())
        pair = {"graph": graph, "tensors": [graph.find_tensor(name) for name in "ABC"]}
        twin = copy.deepcopy(pair)
        del pair, graph
        gc.collect()
        engine.build(twin["graph"])
        out = Guarded((3,))
        twin["graph"].execute(dict(zip(twin["tensors"], (ones(), ones(), out.view), strict=True)))
        assert out.view.tolist() == [2, 2, 2]

    def objects(self, engine: Engine) -> dict[str, Any]:
        graph = engine.build(self.unbuilt())
        bound = graph.bind({"A": ones(), "B": ones(), "C": ones()})
        seen: list[Any] = []
        registry.register(ScratchEngine(seen.append))
        try:
            Sum(Engine("scratch", {"bytes": 256})).execute(workspace=np.zeros(256, np.uint8))
        finally:
            registry.unregister("scratch")
        return {
            "pygraph": graph,
            "Tensor": graph.find_tensor("A"),
            "Handle": opgraph.Handle(device="cpu"),
            "BoundCall": bound,
            "Executable": graph._executable,
            "Node": graph.nodes[0],
            "VariantPack": seen[0],
            "Slot": seen[0][0],
        }

    def test_pickles_are_refused_by_name(self, any_engine):
        for name, value in self.objects(any_engine).items():
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                refused(lambda v=value, p=protocol: pickle.dumps(v, p), name, error=TypeError)
        refused(lambda: pickle.dumps(self.unbuilt()), "pygraph", error=TypeError)

    def test_copies_that_are_refused(self, any_engine):
        for name, value in self.objects(any_engine).items():
            if name == "pygraph":
                continue
            for duplicate in (copy.copy, copy.deepcopy):
                refused(lambda v=value, d=duplicate: d(v), name, error=TypeError)

    def test_a_bound_call_outlives_its_graph(self, any_engine):
        graph = any_engine.build(self.unbuilt())
        out = Guarded((3,))
        bound = graph.bind({"A": ones(), "B": ones(value=2), "C": out.view})
        del graph
        gc.collect()
        bound()
        bound.update({"A": ones(value=5)})
        bound()
        assert out.view.tolist() == ([7, 7, 7] if any_engine.computes else [-1] * 3)


# ---- F41: optional packages


PACKAGES = ("torch", "jax", "jaxlib", "cupy", "triton", "cuda", "cutlass", "tvm_ffi", "ml_dtypes")

RUN = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import numpy as np, opgraph
g = opgraph.pygraph(io_data_type=np.float32)
a, b = g.tensor((3,)), g.tensor((3,))
c = g.add(a, b).set_output(True)
out = np.zeros(3, np.float32)
for knobs in ({{"precision": "native"}}, {{"precision": "float64"}}):
    twin = g.copy()
    twin.build(engine="cpu", knobs=knobs, device="cpu")
    twin.execute({{a.uid: np.ones(3, np.float32), b.uid: np.ones(3, np.float32), c.uid: out}})
    assert out.tolist() == [2, 2, 2]
assert not set(sys.modules) & {packages!r}, set(sys.modules) & {packages!r}
"""

ASK = """
for ask in (lambda: opgraph.datatypes.numpy_dtype(opgraph.data_type.BFLOAT16),):
    try:
        ask()
    except ImportError as error:
        print(error)
    else:
        raise AssertionError("it is there")
g = opgraph.pygraph(io_data_type=opgraph.data_type.BFLOAT16)
t = g.tensor((3,))
g.add(t, t).set_output(True)
try:
    g.build(device="cpu")
except opgraph.cudnnGraphNotSupportedError as error:
    print(error)
"""


class TestF41ImportWithoutOptionalPackages:
    @pytest.mark.parametrize("blocked", [
        ("torch",), ("jax", "jaxlib"), ("cupy",), ("triton", "cutlass", "cuda"), ("tvm_ffi",), ("ml_dtypes",),
        PACKAGES,
    ])  # fmt: skip
    def test_blocked(self, blocked):
        code = RUN.format(blocked=set(blocked), packages=set(PACKAGES))
        if "ml_dtypes" not in blocked:
            run_python(code)
            return
        told = run_python(code + ASK)
        assert told.count("ml_dtypes, version 0.5 or newer, which is not installed") == 2

    @pytest.mark.parametrize("body, word", [
        ("__version__ = '0.0.1'", "0.0.1 is too old"),
        ("raise OSError('libmissing.so: cannot open it')", "is broken: OSError: libmissing.so"),
        ("import a_package_that_is_missing", "is broken: No module named 'a_package_that_is_missing'"),
        ("raise ImportError('half of it')", "is broken: ImportError: half of it"),
    ], ids=["too old", "OSError", "dependency", "ImportError"])  # fmt: skip
    def test_too_old_and_broken(self, tmp_path, body, word):
        for package in PACKAGES:
            (tmp_path / f"{package}.py").write_text(body + "\n")
        told = run_python(RUN.format(blocked=set(), packages=set(PACKAGES)) + ASK, tmp_path)
        assert told.count("ml_dtypes, version 0.5 or newer; the installed") == told.count(word) == 2
        assert "not installed" not in told
