"""Field cases about one call: bare addresses, workspace, overrides, memory that operands share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from producers import Producer, interface_of
from sums import Engine, Guarded, ScratchEngine, Sum, refused

import opgraph
from opgraph import data_type
from opgraph.planning.registry import registry

FLOAT = data_type.FLOAT


@pytest.fixture(scope="module", autouse=True)
def scratch_engine() -> Iterator[None]:
    registry.register(ScratchEngine())
    yield
    registry.unregister("scratch")


@pytest.fixture(params=["scratch", "null"])
def hungry(request: pytest.FixtureRequest) -> Engine:
    """Engines whose plan asks for 256 bytes of workspace."""
    return (
        Engine("scratch", {"bytes": 256})
        if request.param == "scratch"
        else Engine("null", {"workspace": 256})
    )


# ---- F23: bare addresses


class TestF23BareAddressWorksWithEveryEngine:
    def operands(self) -> Any:
        return np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32), Guarded((3,))

    def test_mixed_with_arrays(self, any_engine):
        case = Sum(any_engine)
        a, b, c = self.operands()
        case.execute(a.ctypes.data, b, c.view.ctypes.data)
        c.check()
        assert c.view.tolist() == ([11, 22, 33] if any_engine.computes else [-1] * 3)

    def test_with_an_override(self, any_engine):
        case = Sum(any_engine, is_override_shape_enabled=True)
        a, b, c = self.operands()
        overrides = dict(override_uids=case.uids, override_shapes=[(2,)] * 3, override_strides=[(1,)] * 3)
        case.execute(a.ctypes.data, b, c.view.ctypes.data, **overrides)
        c.check()
        assert c.view.tolist() == ([11, 22, -1] if any_engine.computes else [-1] * 3)

    def test_ordered_form_and_bound_call(self, any_engine):
        case = Sum(any_engine)
        a, b, c = self.operands()
        case.graph.execute([c.view.ctypes.data, a.ctypes.data, b], tensor_uids=case.uids[2:] + case.uids[:2])
        bound = case.graph.bind({case.a: b.ctypes.data, case.b: a, case.c: c.view.ctypes.data})
        c.view[:] = -1
        bound()
        assert c.view.tolist() == ([11, 22, 33] if any_engine.computes else [-1] * 3)

    @pytest.mark.parametrize("value, error", [
        (0, opgraph.OperandError), (-8, opgraph.OperandError), (2**64, opgraph.OperandError),
        (True, TypeError), (np.int64(4096), TypeError), (np.bool_(True), TypeError), (4096.0, TypeError),
        ("4096", TypeError),
    ])  # fmt: skip
    def test_what_is_no_address(self, any_engine, value, error):
        case = Sum(any_engine)
        case.refuses("'B' (uid 2)", error=error, b=value)
        case.refuses("'C' (uid 3)", error=error, c=value)


# ---- F25, F26: workspace


class TestF25WorkspaceMissingOrTooSmall:
    def test_missing_or_small(self, hungry):
        case = Sum(hungry)
        out = Guarded((3,))
        for workspace, given in ((None, "0 bytes"), (np.zeros(255, np.uint8), "255 bytes")):
            refused(
                lambda w=workspace: case.execute(c=out.view, workspace=w), "workspace", "256 bytes", given
            )
        refused(lambda: case.execute(c=out.view, workspace=0), "workspace", "256 bytes")
        refused(lambda: case.execute(c=out.view, workspace=np.zeros(0, np.uint8)), "256 bytes", "0 bytes")
        out.untouched()
        assert case.graph.get_workspace_size() == 256

    @pytest.mark.parametrize("dim, dtype", [
        ((256,), "u1"), ((512,), "u1"), ((64,), "f4"), ((16, 16), "i1"), ((4, 8), "f8"), ((256, 1), "?"),
    ])  # fmt: skip
    def test_any_dense_type_with_enough_bytes(self, hungry, dim, dtype):
        """The rule: the workspace is bytes, so its data type and shape do not matter."""
        case = Sum(hungry)
        workspace, out = Guarded(dim, dtype=dtype, fill=0), Guarded((3,))
        case.execute(c=out.view, workspace=workspace.view)
        workspace.check()
        out.check()
        assert out.view.tolist() == ([3] * 3 if hungry.name == "scratch" else [-1] * 3)

    def test_other_forms(self, hungry):
        case = Sum(hungry)
        held = Guarded((256,), dtype=np.uint8)
        for form in (held.view.ctypes.data, interface_of(held.view), Producer(held.view, dtype=(1, 8, 1))):
            case.execute(workspace=form)
            held.check()

    @pytest.mark.frameworks
    def test_torch(self, hungry, torch):
        case = Sum(hungry)
        case.execute(workspace=torch.empty(64))
        refused(
            lambda: case.execute(workspace=torch.empty(64, requires_grad=True)), "workspace", "requires grad"
        )

    def test_not_writable_or_not_dense(self, hungry):
        case = Sum(hungry)
        out = Guarded((3,))
        fixed = np.zeros(256, np.uint8)
        fixed.setflags(write=False)
        wrong = {
            "read-only": (
                fixed,
                Producer(np.zeros(256, np.uint8), dtype=(1, 8, 1), generation="versioned", flags=1),
            ),
            "dense": (
                np.zeros(512, np.uint8)[::2],
                np.zeros((16, 64), np.uint8)[:, :32],
                np.zeros(256, np.uint8)[::-1],
                np.broadcast_to(np.uint8(0), (256,)),
            ),
        }
        for word, buffers in wrong.items():
            for buffer in buffers:
                refused(lambda b=buffer: case.execute(c=out.view, workspace=b), "workspace", word)
        for buffer in (
            "256",
            b"x" * 256,
            True,
            256.0,
            [0] * 256,
            np.uint8(0),
            np.zeros(256, np.uint8).__dlpack__(),
        ):
            refused(lambda b=buffer: case.execute(c=out.view, workspace=b), "workspace", error=TypeError)
        out.untouched()

    def test_none_needed(self, any_engine):
        case = Sum(any_engine)
        for workspace in (None, np.zeros(0, np.uint8), np.zeros(100, np.float32)):
            case.execute(workspace=workspace)

    def test_shared_with_an_operand(self, hungry):
        case = Sum(hungry)
        memory = np.zeros(512, np.uint8)
        shared = memory[252:264].view(np.float32)
        for operand, name in (("a", "'A' (uid 1)"), ("c", "'C' (uid 3)")):
            for workspace in (memory[:256], memory[:256].ctypes.data):
                refused(
                    lambda w=workspace, o=operand: case.execute(workspace=w, **{o: shared}), name, "workspace"
                )
        assert not memory.any()
        case.execute(workspace=memory[:256], c=memory[256:268].view(np.float32))  # side by side


class TestF26WorkspaceBelongsToTheCaller:
    def test_nothing_is_remembered(self):
        case = Sum(Engine("scratch", {"bytes": 256}))
        larger = Sum(Engine("scratch", {"bytes": 4096}))
        base = np.zeros(256, np.uint8)
        first = base[:]
        second = Guarded((256,), dtype=np.uint8)
        address, size = second.view.ctypes.data, second.view.size
        values = np.array([1, 2, 3], np.float32)
        assert case.result(values, workspace=first) == [3, 4, 5]
        gone = weakref.ref(first)
        del first
        assert gone() is None
        assert case.result(values, workspace=second.view) == [3, 4, 5]
        base[:] = 0xFF
        assert case.result(values, workspace=second.view) == [3, 4, 5]
        assert (base == 0xFF).all()
        refused(lambda: larger.execute(workspace=second.view), "4096 bytes", "256 bytes")
        assert larger.result(values, workspace=np.zeros(4096, np.uint8)) == [3, 4, 5]
        assert case.result(values, workspace=second.view) == [3, 4, 5]
        second.check()
        assert (second.view.ctypes.data, second.view.size) == (address, size)

    def test_a_bound_call_keeps_its_own_until_it_goes(self):
        case = Sum(Engine("scratch", {"bytes": 256}))
        workspace, out = np.zeros(256, np.uint8), Guarded((3,))
        kept = weakref.ref(workspace)
        bound = case.graph.bind(
            {case.a: np.ones(3, "f4"), case.b: np.ones(3, "f4"), case.c: out.view}, workspace
        )
        del workspace
        bound()
        assert out.view.tolist() == [2, 2, 2]
        assert kept() is not None
        del bound
        gc.collect()
        assert kept() is None


# ---- F27, F28: overrides


class TestF27OverrideIsApplied:
    @pytest.mark.parametrize("rows", [4, 2])
    def test_rows(self, any_engine, rows):
        case = Sum(any_engine, (4, 3), is_override_shape_enabled=True)
        a = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        b = np.full((rows, 3), 100, np.float32)

        def run(live: Any, shape: Any, a: Any = a, b: Any = b) -> Any:
            out = Guarded(shape)
            lists = {} if live is None else dict(override_uids=case.uids, override_shapes=[live] * 3,
                                                 override_strides=[(3, 1)] * 3)  # fmt: skip
            case.execute(a, b, out.view, **lists)
            out.check()
            return out.view

        computes = any_engine.computes
        for _ in range(2):
            c = run((2, 3), (rows, 3))
            assert (c[:2] == (a[:2] + 100 if computes else -1)).all()
            assert (c[2:] == -1).all()
            full = np.arange(12, dtype=np.float32).reshape(4, 3)
            c = run(None, (4, 3), full, np.ones((4, 3), np.float32))
            assert (c == (full + 1 if computes else -1)).all()
            assert (run((0, 3), (rows, 3)) == -1).all()

    def test_strides(self, engine):
        case = Sum(engine, (4, 3), is_override_shape_enabled=True)
        a = np.arange(12, dtype=np.float32)  # read as 2 rows of 3, 6 elements apart
        out = Guarded((12,))
        case.execute(
            a, np.zeros((4, 3), np.float32), out.view,
            override_uids=case.uids, override_shapes=[[2, 3]] * 3, override_strides=[(6, 1), [3, 1], (5, 1)],
        )  # fmt: skip
        assert out.view.tolist() == [0, 1, 2, -1, -1, 6, 7, 8, -1, -1, -1, -1]

    def test_integers_of_other_kinds(self, engine):
        case = Sum(engine, (4, 3), is_override_shape_enabled=True)
        out = Guarded((4, 3))
        shapes = [np.array([2, 3]), range(2, 4), (np.int32(2), 3)]
        case.execute(
            c=out.view, override_uids=tuple(case.uids), override_shapes=shapes, override_strides=[(), [], ()]
        )
        assert out.view.tolist() == [[3] * 3] * 2 + [[-1] * 3] * 2

    def test_bound_call(self, engine):
        case = Sum(engine, (4, 3), is_override_shape_enabled=True)
        out = Guarded((4, 3))
        ones = np.ones((4, 3), np.float32)
        lists = dict(override_uids=case.uids, override_shapes=[(2, 3)] * 3, override_strides=[(3, 1)] * 3)
        bound = case.graph.bind({case.a: ones, case.b: ones, case.c: out.view}, **lists)
        lists["override_shapes"][:] = [(4, 3)] * 3
        bound()
        bound.update({case.a: np.full((2, 3), 8, np.float32)})
        bound()
        out.check()
        assert out.view.tolist() == [[9] * 3] * 2 + [[-1] * 3] * 2


class TestF28OverrideOutsideTheBound:
    @pytest.mark.parametrize("uids, shapes, strides, words", [
        ([1, 2, 3], [(8, 3)] * 3, [(3, 1)] * 3, ("'A' (uid 1)", "96 bytes", "48 bytes")),
        ([1, 2, 3], [(4, 6)] * 3, [(6, 1)] * 3, ("'A' (uid 1)", "96 bytes", "48 bytes")),
        ([3], [(4, 3)], [(6, 1)], ("'C' (uid 3)", "84 bytes", "48 bytes")),
        ([1, 2, 3], [(2, 3)] * 3, [(1,)] * 3, ("'A' (uid 1)", "(4, 3)", "(1,)")),
        ([1, 2, 3], [(2, 3, 1)] * 3, [(3, 1, 1)] * 3, ("'A' (uid 1)", "(4, 3)", "(2, 3, 1)")),
        ([1, 2, 3], [(2, 3)] * 2, [(3, 1)] * 3, ("3", "2", "length")),
        ([1, 2, 3], [(2, 3)] * 3, [(3, 1)] * 2, ("3", "2", "length")),
        ([999], [(2, 3)], [(3, 1)], ("999",)),
        ([1, 2, 3], [(-2, 3)] * 3, [(3, 1)] * 3, ("'A' (uid 1)", "(4, 3)", "(-2, 3)")),
        ([1, 2, 3], [(2**62, 3)] * 3, [(3, 1)] * 3, ("'A' (uid 1)", "(4, 3)", f"({2**62}, 3)")),
        ([1, 2, 3], [(2**70, 3)] * 3, [(3, 1)] * 3, ("'A' (uid 1)", "(4, 3)", f"({2**70}, 3)")),
        ([1], [(2, 3)], [(3, 1)], ("uid 1", "uid 2", "(2, 3)", "(4, 3)")),
        ([1, 2], [(2, 3)] * 2, [(3, 1)] * 2, ("uid 3", "(2, 3)", "(4, 3)")),
        ([3], [(2, 3)], [(3, 1)], ("uid 3", "(2, 3)", "(4, 3)")),
        ([1, 1], [(2, 3)] * 2, [(3, 1)] * 2, ("'A' (uid 1)", "twice")),
    ])  # fmt: skip
    def test_refused(self, any_engine, uids, shapes, strides, words):
        case = Sum(any_engine, (4, 3), is_override_shape_enabled=True)
        lists = dict(override_uids=uids, override_shapes=shapes, override_strides=strides)
        case.refuses(*words, **lists)
        refused(
            lambda: case.graph.bind({t: np.zeros((4, 3), "f4") for t in (case.a, case.b, case.c)}, **lists),
            *words,
        )

    @pytest.mark.parametrize("uids, shapes, strides", [
        (["A"], [(2, 3)], [(3, 1)]), ([True], [(2, 3)], [(3, 1)]), ([1], [(2.0, 3)], [(3, 1)]),
        ([1], [5], [(3, 1)]), ([1], [(2, True)], [(3, 1)]), ("1", [(2, 3)], [(3, 1)]),
        ({1: 2}, [(2, 3)], [(3, 1)]), ([1], ["23"], [(3, 1)]),
    ])  # fmt: skip
    def test_of_the_wrong_kind(self, any_engine, uids, shapes, strides):
        case = Sum(any_engine, (4, 3), is_override_shape_enabled=True)
        lists = dict(override_uids=uids, override_shapes=shapes, override_strides=strides)
        case.refuses("override", error=TypeError, **lists)

    def test_growing_needs_buffers_that_cover_it(self, engine):
        """The rule: an override may exceed the declaration; the buffer has to hold it."""
        case = Sum(engine, (4, 3), is_override_shape_enabled=True)
        lists = dict(override_uids=case.uids, override_shapes=[(8, 3)] * 3, override_strides=[(3, 1)] * 3)
        big = np.arange(24, dtype=np.float32).reshape(8, 3)
        out = Guarded((8, 3))
        case.execute(big, big, out.view, **lists)
        out.check()
        assert (out.view == big * 2).all()
        small = Guarded((7, 3))
        refused(lambda: case.execute(big, big, small.view, **lists), "'C' (uid 3)", "96 bytes", "84 bytes")
        small.untouched()


# ---- memory that operands share


def two_outputs(engine: Engine, stride: Any = (6, 1)) -> Any:
    graph = opgraph.pygraph(io_data_type=FLOAT)
    a = graph.tensor((4, 3), name="A")
    c, d = graph.add(a, a).set_name("C"), graph.mul(a, a).set_name("D")
    for out in (c, d):
        out.set_output(True).set_stride(stride)
    engine.build(graph)
    return graph, a, c, d


class TestSharedMemory:
    def test_interleaved_outputs_in_one_packed_buffer(self, any_engine):
        graph, a, c, d = two_outputs(any_engine)
        packed = Guarded((4, 6))
        values = np.arange(12, dtype=np.float32).reshape(4, 3)
        for _ in range(2):
            graph.execute({a: values, c: packed.view[:, :3], d: packed.view[:, 3:]})
        packed.check()
        if any_engine.computes:
            assert (packed.view == np.hstack([values * 2, values * values])).all()

    def test_outputs_that_overlap(self, any_engine):
        graph, a, c, d = two_outputs(any_engine)
        packed = Guarded((4, 6))
        values = np.ones((4, 3), np.float32)
        for first, second in (
            (slice(0, 3), slice(0, 3)),
            (slice(0, 3), slice(2, 5)),
            (slice(3, 6), slice(1, 4)),
        ):
            operands = {a: values, c: packed.view[:, first], d: packed.view[:, second]}
            refused(lambda o=operands: graph.execute(o), "'C' (uid 2)", "'D' (uid 3)", "shares memory")
            packed.untouched()

    def test_an_input_beside_the_output_in_one_buffer(self, any_engine):
        case = Sum(any_engine, (4, 3), stride=(6, 1))
        packed = Guarded((4, 6), fill=np.arange(24).reshape(4, 6))
        before = packed.view.copy()
        case.execute(packed.view[:, 3:], packed.view[:, 3:], packed.view[:, :3])
        packed.check()
        if any_engine.computes:
            assert (packed.view == np.hstack([before[:, 3:] * 2, before[:, 3:]])).all()
        packed.view[...] = before
        refused(
            lambda: case.execute(a=packed.view[:, 1:4], c=packed.view[:, :3]), "'C' (uid 3)", "'A' (uid 1)"
        )
        packed.untouched()

    def test_in_place(self, any_engine):
        case = Sum(any_engine)
        held = Guarded((3,), fill=[1, 2, 3])
        case.execute(held.view, np.ones(3, np.float32), held.view)
        case.execute(np.ones(3, np.float32), held.view, held.view.ctypes.data)
        held.check()
        assert held.view.tolist() == ([3, 4, 5] if any_engine.computes else [1, 2, 3])

    @pytest.mark.parametrize("shift", [-2, -1, 1, 2])
    def test_partial_overlap(self, any_engine, shift):
        case = Sum(any_engine)
        memory = np.arange(9, dtype=np.float32)
        before = memory.tobytes()
        a, c = memory[3:6], memory[3 + shift : 6 + shift]
        for first, second in ((a, c), (a.ctypes.data, c), (a, c.ctypes.data)):
            refused(
                lambda x=first, y=second: case.execute(a=x, c=y),
                "'C' (uid 3)",
                "'A' (uid 1)",
                "shares memory",
            )
        assert memory.tobytes() == before

    def test_the_same_memory_read_in_another_order(self, any_engine):
        case = Sum(any_engine, (3, 3), stride=(3, 1), b_stride=(1, 3), out_stride=(3, 1))
        held = Guarded((3, 3), fill=np.arange(9).reshape(3, 3))
        refused(
            lambda: case.execute(b=held.view.T, c=held.view), "'C' (uid 3)", "'B' (uid 2)", "shares memory"
        )
        held.untouched()

    def test_one_buffer_as_both_inputs(self, engine):
        case = Sum(engine)
        held = np.array([1, 2, 3], np.float32)
        assert case.result(held, held) == [2, 4, 6]


class TestOrderedForm:
    @pytest.mark.parametrize("buffers, uids, error", [
        (2, [1, 2, 3], ValueError), (3, [1, 2], ValueError), (3, [1, 1, 3], ValueError),
        (3, [1, 2, 999], KeyError), (3, [1, 2, "C"], TypeError), (3, [1, 2, True], TypeError),
        (3, [1, 2, 3.0], TypeError), (3, 5, ValueError), (3, [1, 2, 2**70], Exception),
    ])  # fmt: skip
    def test_refused(self, any_engine, buffers, uids, error):
        case = Sum(any_engine)
        out = Guarded((3,))
        values = [np.ones(3, np.float32), np.ones(3, np.float32), out.view][:buffers]
        refused(lambda: case.graph.execute(values, tensor_uids=uids), error=error)
        out.untouched()
        case.usable()

    def test_a_list_needs_uids(self, any_engine):
        case = Sum(any_engine)
        for operands in ([np.ones(3)] * 3, None, 5, "ABC", np.ones(3)):
            refused(lambda o=operands: case.graph.execute(o), error=TypeError)
        refused(
            lambda: case.graph.execute({case.a: np.ones(3)}, tensor_uids=[1]), "tensor_uids", error=ValueError
        )
