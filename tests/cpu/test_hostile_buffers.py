"""Objects that are no buffer or not the one they seem; producers that lie, raise, re-enter or interfere."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import sums
from producers import CPU, Dlpack, Producer, Raising
from sums import Engine, Guarded, Sum, refused, run_child

import opgraph
from opgraph import data_type

FLOAT = data_type.FLOAT
GENERATIONS = ("legacy", "versioned")


# ---- objects that are no buffer, or not the one they seem


class Subclass(np.ndarray):
    def __dlpack__(self, **kwargs: Any) -> Any:
        raise AssertionError("NumPy's own description is enough")


class TestKindsOfObjects:
    @pytest.mark.parametrize("make", [
        memoryview, lambda array: bytearray(array), bytes, list, tuple, lambda array: None.__class__,
        lambda array: 1.5, lambda array: "A", lambda array: object(), lambda array: {},
        lambda array: array.data, lambda array: array.flat, lambda array: array[0],
        lambda array: np.float64(1), lambda array: np.void(b"abcd"), lambda array: (c for c in "a"),
        lambda array: array.dtype, lambda array: type(array), lambda array: Sum, lambda array: 1j,
    ])  # fmt: skip
    def test_no_buffers(self, any_engine, make):
        case = Sum(any_engine)
        for operand in "ac":
            value = make(np.ones(3, np.float32))
            case.refuses(f"'{operand.upper()}'", "buffer", error=TypeError, **{operand: value})

    def test_a_numpy_scalar_is_no_buffer(self, any_engine):
        """Its array interface shows memory that is freed when the attribute has been read."""
        case = Sum(any_engine, (1,))
        case.refuses("'A' (uid 1)", "float32", error=TypeError, a=np.float32(3))
        case.refuses("'C' (uid 3)", "float32", error=TypeError, c=np.float32(3))
        assert case.result(np.array(3, np.float32)) == ([5] if any_engine.computes else [-1])

    def test_subclasses_of_ndarray(self, any_engine):
        case = Sum(any_engine)
        held = np.array([1, 2, 3], np.float32)
        result = case.result(held.view(Subclass), held.view(np.memmap))
        assert result == [2, 4, 6] or not any_engine.computes
        out = Guarded((3,))
        case.execute(held, held, out.view.view(Subclass))
        assert out.view.tolist() == ([2, 4, 6] if any_engine.computes else [-1] * 3)
        case.refuses("'A' (uid 1)", "mask", a=np.ma.masked_array(held, [True, False, False]))
        case.refuses("'C' (uid 3)", "mask", c=np.ma.masked_array(held))
        case.refuses("'A' (uid 1)", "mask", error=TypeError, a=Masked(held))

    def test_huge_ranks(self, any_engine):
        case = Sum(any_engine)
        held = np.ones(3, np.float32)
        result = case.result(held.reshape((1,) * 31 + (3,)))
        assert result == [3, 3, 3] or not any_engine.computes
        for rank in (33, 64):
            case.refuses("'A' (uid 1)", f"{rank} axes", a=held.reshape((1,) * (rank - 1) + (3,)))
            case.refuses("'C' (uid 3)", f"{rank} axes", c=held.reshape((1,) * (rank - 1) + (3,)))

    def test_a_type_that_gains_the_protocol_later(self, any_engine):
        late = type("Late", (), {})
        case = Sum(any_engine)
        value = late()
        case.refuses("'A' (uid 1)", error=TypeError, a=value)
        held = np.ones(3, np.float32)
        late.__dlpack__ = lambda self, **kwargs: held.__dlpack__(**kwargs)
        late.__dlpack_device__ = lambda self: CPU
        case.execute(value)


class Masked:
    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {**array.__array_interface__, "mask": np.ones(3, bool)}


def lying_structs() -> None:
    """In a child process: structs whose fields contradict each other or the memory."""
    values = np.ones(3, np.float32)
    lies: dict[str, dict[str, Any]] = {
        "1000 axes": {"ndim": 1000},
        "-1 axes": {"ndim": -1},
        "2147483647 axes": {"ndim": 2**31 - 1},
        "no shape": {"shape": (), "ndim": 3},
        "negative extent": {"shape": (-3,)},
        "too small": {"shape": (2,)},
        "null": {"address": 0},
        "negative stride": {"strides": (-(2**62),)},
        f"strides ({2**62})": {"strides": (2**62,)},
        "layout does not fit": {"shape": (2**62, 2**62, 4), "strides": (0, 0, 1)},
    }
    for engine in sums.ENGINES:
        case = Sum(engine)
        for word, fields in lies.items():
            for generation in GENERATIONS:
                for operand in "ac":
                    producer = Producer(values, generation=generation, **{"strides": None, **fields})
                    words = () if operand == "c" and "layout" in word else (word,)
                    case.refuses(f"'{operand.upper()}'", *words, **{operand: producer})
                    assert producer.count.exported == producer.count.released == 1
        typed: Any = {"version": 3, "shape": (3,), "typestr": "<f4", "data": (values.ctypes.data, False)}
        for change in (
            {"data": b"0123456789ab"}, {"data": None}, {"data": (1,)}, {"data": ("16", False)},
            {"shape": None}, {"shape": ("a",)}, {"shape": 3}, {"typestr": ","}, {"typestr": 5},
            {"typestr": "<f9"}, {"strides": (4, 4)}, {"strides": (6,)}, {"strides": 4}, {"typestr": "|O"},
            {"data": (2**64, False)}, {"shape": (2**64,)}, {"shape": (-3,)}, {"data": (-16, False)},
            {"shape": (1,) * 40},
        ):  # fmt: skip
            broken = type("Broken", (), {"__array_interface__": {**typed, **change}})()
            case.refuses("'A' (uid 1)", error=(TypeError, ValueError), a=broken)
        assert values.tolist() == [1, 1, 1]


def lying_scalars() -> None:
    """In a child process: the same for the one operand whose bytes are read at once."""
    one = np.ones(1, np.float32)
    lies: dict[str, dict[str, Any]] = {
        "cuda:0": {"address": 16, "device": (2, 0)},
        "null": {"address": 0},
        "dims (2)": {"shape": (2,)},
        "dims (0)": {"shape": (0,)},
        "float32_x4": {"dtype": (2, 32, 4)},
        "float64": {"dtype": (2, 64, 1)},
        "99 axes": {"ndim": 99},
        "no shape": {"shape": (), "ndim": 1},
    }
    for engine in sums.ENGINES:
        graph = opgraph.pygraph(io_data_type=FLOAT)
        x, s = graph.tensor((3,)), graph.tensor((1,), is_pass_by_value=True, name="S")
        y = graph.add(x, s).set_output(True)
        engine.build(graph)
        out = Guarded((3,))
        operands = {x: np.ones(3, np.float32), y: out.view}
        for word, fields in lies.items():
            for told in ((1, 0), fields.get("device", (1, 0))):
                producer = Producer(one, told=told, strides=None, **fields)
                refused(lambda g=graph, o={**operands, s: producer}: g.execute(o), "'S' (uid 2)", word)
                assert producer.count.exported == producer.count.released
        out.untouched()
        graph.execute({**operands, s: Producer(one, shape=(1,) * 20, strides=None)})
        assert out.view.tolist() == ([2, 2, 2] if engine.computes else [-1] * 3)
    # An element that is larger than any number is refused at the build.
    graph = opgraph.pygraph(io_data_type=data_type.INT8x32)
    x = graph.tensor((1,), is_pass_by_value=True, name="X")
    graph.identity(x).set_output(True)
    refused(lambda: sums.NULL.build(graph), "uid 1", "256 bits", error=ValueError)


def test_structs_that_lie():
    run_child(lying_scalars)

    run_child(lying_structs)


# ---- producers that raise, re-enter or interfere


class Bound:
    """A producer that keeps the bound call that keeps it."""

    def __init__(self) -> None:
        self.array = np.ones(3, np.float32)
        self.call: Any = None

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


def test_a_cycle_through_a_bound_call_is_collected(any_engine):
    case = Sum(any_engine)
    for again in (False, True):
        producer = Bound()
        operands = {case.a: producer, case.b: producer, case.c: np.zeros(3, np.float32)}
        producer.call = case.graph.bind(operands)
        if again:
            producer.call.update({case.a: producer})
        gone = weakref.ref(producer)
        del producer, operands
        gc.collect()
        assert gone() is None


def test_more_overrides_than_are_remembered(engine):
    graph = opgraph.pygraph(io_data_type=FLOAT, is_override_shape_enabled=True)
    dim, live, count = (1, 1, 1, 1, 1, 1, 4, 3), (1, 1, 1, 1, 1, 1, 2, 3), 40
    inputs = [graph.tensor(dim) for _ in range(count)]
    total = inputs[0]
    for each in inputs[1:]:
        total = graph.add(total, each)
    total.set_output(True)
    engine.build(graph)
    out = Guarded(dim)
    operands: dict[Any, Any] = dict.fromkeys(inputs, np.ones(dim, np.float32))
    operands[total] = out.view
    lists = dict(
        override_uids=[tensor.uid for tensor in operands],
        override_shapes=[live] * (count + 1),
        override_strides=[()] * (count + 1),
    )
    for _ in range(3):
        graph.execute(operands, **lists)
    graph.bind(operands, **lists)()
    out.check()
    assert out.view.ravel().tolist() == [count] * 6 + [-1] * 6


class Interrupt(BaseException):
    pass


class TestProducersThatMisbehave:
    @pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
    def test_raising(self, any_engine, method):
        case = Sum(any_engine)
        for error in (
            ZeroDivisionError("told"),
            TypeError("told"),
            BufferError("told"),
            KeyError("told"),
            StopIteration(),
        ):
            for operand in "abc":
                producer = Raising(method, error)
                case.refuses(
                    f"'{operand.upper()}'",
                    "float32",
                    type(error).__name__,
                    *error.args,
                    **{operand: producer},
                )
        for error in (KeyboardInterrupt(), SystemExit(3), Interrupt()):
            refused(lambda e=error: case.execute(Raising(method, e)), error=type(error))
        case.usable()

    @pytest.mark.parametrize(
        "answer", [None, 5, (), (1,), (1, 0, 0), "cpu", ("a", "b"), (2**40, 0), (1.5, 0), (None, 0)]
    )
    def test_devices_that_are_none(self, any_engine, answer):
        case = Sum(any_engine)
        producer = Producer(np.ones(3, np.float32))
        producer.told = answer
        case.refuses("'A' (uid 1)", a=producer)
        assert not producer.count.exported

    def test_changing_the_mapping_during_the_call(self, any_engine):
        """The operands are those that the mapping held when the call began."""
        case = Sum(any_engine)
        for change in ("clear", "replace", "grow"):
            values, out = np.full(3, 5, np.float32), Guarded((3,))
            operands: dict[Any, Any] = {}

            def hook(operands=operands, change=change):
                if change == "clear":
                    operands.clear()
                elif change == "replace":
                    operands.update(dict.fromkeys(list(operands), None))
                else:
                    operands.update(dict.fromkeys(range(1000, 2000), 0))
                gc.collect()

            operands[case.b] = np.full(3, 7, np.float32)
            operands[case.c] = out.view
            operands[case.a] = Producer(values, hook=hook)
            case.graph.execute(operands)
            out.check()
            assert out.view.tolist() == ([12] * 3 if any_engine.computes else [-1] * 3)

    def test_execute_inside_of_execute(self, any_engine):
        case, other = Sum(any_engine), Sum(any_engine, (4,))
        results = []
        nested = Producer(
            np.ones(3, np.float32), hook=lambda: results.append((case.result(), other.result()))
        )
        outer = case.result(nested)
        assert outer == case.result() and results == [(case.result(), other.result())]
        bound = case.graph.bind(
            {case.a: np.ones(3, "f4"), case.b: np.ones(3, "f4"), case.c: np.ones(3, "f4")}
        )
        inner = Producer(np.ones(3, np.float32), hook=bound)
        case.execute(inner)
        swap = Producer(np.ones(3, np.float32), hook=lambda: bound.update({case.a: np.ones(3, "f4")}))
        bound.update({case.b: swap})
        bound()

    def test_building_another_plan_inside_of_execute(self, precision):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        a = graph.tensor((3,), name="A")
        c = graph.add(a, a).set_output(True)
        graph.build(device="cpu")
        out = Guarded((3,))

        def hook() -> None:
            graph.build_plan_at_index(1)
            graph.build_plan_at_index(0)
            gc.collect()

        graph.execute({a: Producer(np.ones(3, np.float32), hook=hook), c: out.view})
        assert out.view.tolist() == [2, 2, 2]

    def test_a_deleter_that_calls_back(self, any_engine):
        case = Sum(any_engine)
        done = []

        class Owner(np.ndarray):
            def __del__(self) -> None:
                done.append(case.result())

        operands = [Dlpack(np.ones(3, np.float32).view(Owner)) for _ in range(2)]
        case.execute(*operands)
        del operands
        assert done == [case.result()] * 2


def endless(size: int) -> None:
    """In a child process: a producer that executes the graph that reads it meets the recursion limit, not
    the end of the stack."""
    for engine in (Engine("cpu", {"precision": "native"}), sums.NULL):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        inputs = [graph.tensor((3,)) for _ in range(size)]
        total = inputs[0]
        for each in inputs[1:]:
            total = graph.add(total, each)
        total.set_output(True)
        engine.build(graph)
        out = Guarded((3,))
        operands: dict[Any, Any] = dict.fromkeys(inputs, np.ones(3, np.float32))
        operands[total] = out.view
        operands[inputs[0]] = Producer(np.ones(3, np.float32), hook=lambda g=graph, o=operands: g.execute(o))
        refused(
            lambda g=graph, o=operands: g.execute(o), "RecursionError", error=(RecursionError, ValueError)
        )
        out.untouched()
        operands[inputs[0]] = np.ones(3, np.float32)
        graph.execute(operands)
        assert out.view.tolist() == ([size] * 3 if engine.computes else [-1] * 3)


@pytest.mark.parametrize("size", [2, 60, 100])
def test_endless_recursion(size):
    run_child(endless, size)


# ---- containers that change while they are read


def hostile_containers() -> None:
    """In a child process: lists and mappings whose own code changes the other arguments of the call."""
    for engine in sums.ENGINES:
        case = Sum(engine, (4, 3), is_override_shape_enabled=True)

        shapes: list[Any] = [None, (2, 3), (2, 3)]
        strides: list[Any] = [(3, 1)] * 3

        class Clearing:
            def __iter__(self, shapes=shapes, strides=strides):
                shapes.clear()
                strides.clear()
                gc.collect()
                return iter((2, 3))

        shapes[0] = Clearing()
        lists = dict(override_uids=case.uids, override_shapes=shapes, override_strides=strides)
        case.refuses("length", "3", "0", **lists)

        inner: list[Any] = [0, 3]

        class Index:
            def __index__(self, inner=inner):
                inner.clear()
                return 2

        inner[0] = Index()
        out = case.out()
        case.execute(c=out.view, override_uids=case.uids, override_shapes=[inner, (2, 3), (2, 3)],
                     override_strides=[()] * 3)  # fmt: skip
        out.check()

        buffers = [np.ones((4, 3), np.float32) for _ in range(3)]

        class Uids(list):
            def __iter__(self, buffers=buffers):
                buffers.clear()
                return iter([1])

        refused(lambda: case.graph.execute(buffers, tensor_uids=Uids(case.uids)), "length")  # noqa: B023

        class Pairs(dict):
            def items(self):
                return [1, 2, 3]

        operands = {case.a: 0, case.b: 0, case.c: 0}
        refused(lambda: case.graph.execute(Pairs(operands)), "mapping", error=TypeError)  # noqa: B023
        bound = case.graph.bind({t: np.ones((4, 3), np.float32) for t in (case.a, case.b, case.c)})
        refused(lambda: bound.update(Pairs(operands)), "mapping", error=TypeError)  # noqa: B023
        bound()

        class Key:
            def __init__(self, uid, operands):
                self.uid, self.operands = uid, operands

            def get_uid(self):
                self.operands.clear()
                return self.uid

        keys: dict[Any, Any] = {}
        out = case.out()
        for uid, buffer in zip(
            case.uids, (np.ones((4, 3), "f4"), np.ones((4, 3), "f4"), out.view), strict=True
        ):
            keys[Key(uid, keys)] = buffer
        case.graph.execute(keys)
        assert not keys
        assert (out.view == (2 if engine.computes else -1)).all()
        case.usable()


def test_containers_that_change_while_they_are_read():
    run_child(hostile_containers)
