"""Field cases about the exchange of buffers: protocols, lifetimes, devices, streams, tracing."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import sums
from producers import DataPointer, Dlpack, Producer, interface_of
from sums import Sum, refused, run_child

from opgraph import _native, data_type

FLOAT = data_type.FLOAT
GENERATIONS = ("legacy", "versioned")


# ---- F07: byte offset and missing strides


@pytest.mark.parametrize("generation", GENERATIONS)
class TestF07ByteOffsetAndMissingStrides:
    def held(self) -> Any:
        return np.arange(16, dtype=np.float32)

    def test_offset(self, any_engine, generation):
        case = Sum(any_engine, (4,))
        held = self.held()
        producer = Producer(held, generation=generation, byte_offset=32, shape=(4,), strides=(1,))
        result = case.result(producer, np.zeros(4, np.float32))
        case.execute(c=producer)
        if any_engine.computes:
            assert result == [8, 9, 10, 11]
            assert held.tolist() == [*range(8), 3, 3, 3, 3, *range(12, 16)]
        assert producer.count.exported == producer.count.released == 2

    def test_no_strides(self, any_engine, generation):
        case = Sum(any_engine, (2, 3))
        producer = Producer(self.held(), generation=generation, shape=(2, 3), strides=None)
        result = case.result(producer, np.zeros((2, 3), np.float32))
        case.execute(c=producer)
        if any_engine.computes:
            assert result == [[0, 1, 2], [3, 4, 5]]
            assert producer.array.tolist() == [3] * 6 + list(range(6, 16))

    def test_no_strides_and_no_dims(self, any_engine, generation):
        case = Sum(any_engine, (1,))
        producer = Producer(self.held(), generation=generation, shape=(), strides=None)
        result = case.result(producer, np.zeros(1, np.float32))
        assert result == ([0] if any_engine.computes else [-1])

    def test_offset_of_an_empty_buffer_without_address(self, any_engine, generation):
        case = Sum(any_engine, (0,))
        empty = Producer(
            np.empty(0, np.float32), generation=generation, address=0, byte_offset=32, strides=None
        )
        case.execute(empty, empty, empty)

    def test_what_the_reading_layer_makes_of_it(self, any_engine, generation):
        held = self.held()
        told = _native.describe(
            Producer(held, generation=generation, byte_offset=32, shape=(2, 2), strides=None)
        )
        assert told["address"] == held.ctypes.data + 32
        assert (told["dims"], told["strides"], told["dtype"]) == ((2, 2), (2, 1), (2, 32, 1))


# ---- F12: operands that require grad


@pytest.mark.frameworks
class TestF12OperandThatRequiresGrad:
    """The rule: fine as an input, refused as an output before any write, with and without no_grad."""

    def test_input(self, any_engine, torch):
        case = Sum(any_engine)
        parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                result = case.result(parameter, parameter)
                bound = case.graph.bind(
                    {case.a: parameter, case.b: parameter, case.c: np.zeros(3, np.float32)}
                )
                bound()
            if any_engine.computes:
                assert result == [2, 4, 6]
        assert parameter.tolist() == [1, 2, 3]
        assert parameter.requires_grad and parameter.grad is None

    def test_output(self, any_engine, torch):
        case = Sum(any_engine)
        leaf = torch.full((3,), 7.0, requires_grad=True)
        inner = leaf * 1
        for tensor in (leaf, inner, torch.nn.Parameter(torch.full((3,), 7.0))):
            for mode in (torch.enable_grad, torch.no_grad):
                with mode():
                    case.refuses("'C' (uid 3)", "requires grad", "detach", c=tensor)
            assert tensor.tolist() == [7, 7, 7]
        case.execute(c=leaf.detach())
        assert leaf.tolist() == ([3, 3, 3] if any_engine.computes else [7, 7, 7])

    def test_lazy_views_are_refused(self, any_engine, torch):
        case = Sum(any_engine)
        case.refuses("'A' (uid 1)", "resolve_neg", a=torch._neg_view(torch.ones(3)))
        case.refuses("'C' (uid 3)", "resolve_neg", c=torch._neg_view(torch.ones(3)))
        conjugate = (
            torch.complex(torch.ones(3), torch.ones(3)).conj().imag
        )  # a lazy negation of every second element
        wide = Sum(any_engine, stride=(2,))
        wide.refuses("'A' (uid 1)", "resolve_neg", a=conjugate)


# ---- F14, F15: capsules


class ReturnsAnInt(Producer):
    def __dlpack__(self, **kwargs: Any) -> Any:
        return 12345


def capsules() -> None:
    """In a child process: both generations of capsule, one of an unknown version, and no capsule at all."""
    for engine in sums.ENGINES:
        case = Sum(engine)
        values = np.array([1, 2, 3], np.float32)
        for generation in GENERATIONS:
            producer = Producer(values, generation=generation)
            result = case.result(producer, producer)
            assert result == [2, 4, 6] or not engine.computes
            assert producer.count.exported == producer.count.released == 2
        newer = Producer(values, generation="versioned", version=(1, 99))
        case.result(newer)
        for version in ((99, 0), (0, 8), (2, 0)):
            foreign = Producer(values, generation="versioned", version=version)
            case.refuses("'A' (uid 1)", f"major version {version[0]}", a=foreign)
            case.refuses("'C' (uid 3)", f"major version {version[0]}", c=foreign)
            assert foreign.count.exported == foreign.count.released == 2
        case.refuses("'A' (uid 1)", "returned int", a=ReturnsAnInt(values))
        once = values.__dlpack__()
        taken = type("Taken", (Producer,), {"__dlpack__": lambda self, **kwargs: once})(values)  # noqa: B023
        case.result(taken)
        case.refuses("'A' (uid 1)", "no unused DLPack capsule", a=taken)
        assert values.tolist() == [1, 2, 3]


def test_f14_legacy_and_versioned_capsules():
    run_child(capsules)


class TestF15OneCapsuleUsedTwice:
    """The rule: raw capsules are not accepted."""

    def test_every_use_is_a_type_error(self, any_engine):
        case = Sum(any_engine)
        values = np.array([1, 2, 3], np.float32)
        for capsule in (values.__dlpack__(), values.__dlpack__(max_version=(1, 0))):
            name = repr(capsule)
            for operands in ({"a": capsule}, {"a": capsule}, {"a": capsule, "b": capsule}, {"c": capsule}):
                case.refuses("capsule", error=TypeError, **operands)
            assert repr(capsule) == name  # not consumed

    def test_one_array_twice_is_fine(self, engine):
        values = np.array([1, 2, 3], np.float32)
        assert Sum(engine).result(values, values) == [2, 4, 6]


# ---- F16: lifetime


SINGLETONS = (None, True, False, Ellipsis, NotImplemented, 0, 3, "A")


def counts(objects: Any) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


class TestF16NothingIsKeptAfterACall:
    @pytest.mark.slow
    @pytest.mark.parametrize("raising", [False, True], ids=["runs", "raises"])
    def test_many_calls(self, any_engine, raising):
        count = (
            100_000 if any_engine.name == "null" or not raising else 20_000
        )  # a refused call meets no engine
        case = Sum(any_engine, (256,))
        held, short, workspace = np.ones(256, np.float32), np.ones(255, np.float32), np.zeros(16, np.uint8)
        operands = {case.a: None, case.b: short if raising else held, case.c: np.zeros(256, np.float32)}
        execute = case.graph.execute

        def calls(number: int) -> Any:
            fresh = None
            for _ in range(number):
                operands[case.a] = fresh = np.empty(256, np.float32)
                with suppress(ValueError):
                    execute(operands, workspace)
            operands[case.a] = None
            return weakref.ref(fresh)

        gc.collect()
        gc.disable()
        try:
            calls(2_000)
            kept = (held, short, workspace, operands, case.graph, case.a)
            tracemalloc.start()
            calls(500)
            memory = tracemalloc.get_traced_memory()[0]
            calls(2_000)
            assert tracemalloc.get_traced_memory()[0] - memory < 2_000
            tracemalloc.stop()
            before, common = counts(kept), counts(SINGLETONS)
            last = calls(count)
            assert last() is None
            assert counts(kept) == before
            # The interpreter itself and other tests hold some of these; a leak would show once per call.
            drift = [now - then for now, then in zip(counts(SINGLETONS), common, strict=True)]
            assert max(map(abs, drift)) < count // 1000, drift
        finally:
            tracemalloc.stop()
            gc.enable()

    @pytest.mark.parametrize("kind", [
        "legacy", "versioned", "interface", "pointer", "dlpack",
        pytest.param("torch", marks=pytest.mark.frameworks),
    ])  # fmt: skip
    def test_producers_go_when_the_caller_lets_go(self, any_engine, kind, request):
        torch = request.getfixturevalue("torch") if kind == "torch" else None

        def make(count: int = 3) -> Any:
            array = np.ones(count, np.float32)
            if kind in GENERATIONS:
                return Producer(array, generation=kind)
            forms = {"interface": interface_of, "pointer": DataPointer, "dlpack": Dlpack}
            return torch.ones(count) if torch else forms[kind](array)

        case = Sum(any_engine)
        gc.disable()
        try:
            for good in (True, False, True):
                operands = [make(), make(3 if good else 2), make()]
                watched = [weakref.ref(each) for each in operands]
                try:
                    case.execute(*operands)
                except ValueError as error:
                    assert not good
                    caught = error  # an exception that is kept keeps no buffer
                else:
                    assert good
                del operands
                if not good:
                    caught.__traceback__ = None
                    assert caught.args
                assert [ref() for ref in watched] == [None] * 3
        finally:
            gc.enable()

    def test_what_a_producer_handed_out_comes_back_on_every_path(self, any_engine):
        case = Sum(any_engine)
        good, wrong = Producer(np.ones(3, np.float32)), Producer(np.ones(3, np.float32), dtype=(0, 32, 1))
        for generation in GENERATIONS:
            good.generation = wrong.generation = generation
            case.execute(good, good)
            refused(lambda: case.execute(good, wrong))
            refused(lambda: case.execute(wrong, good))
            refused(lambda: case.execute(good, good, np.zeros(2, np.float32)))
        assert good.count.exported == good.count.released == 10
        assert wrong.count.exported == wrong.count.released == 4
        bound = case.graph.bind({case.a: good, case.b: good, case.c: np.zeros(3, np.float32)})
        bound()
        assert (good.count.exported, good.count.released) == (12, 10)
        bound.update({case.a: np.ones(3, np.float32)})
        assert good.count.released == good.count.exported - 1
        del bound
        assert good.count.released == good.count.exported
