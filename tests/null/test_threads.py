"""One graph, many threads: records published side by side, plans swapped under calls, types first seen by several."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from exchange import forwarding, producer_type, table
from probe import install

import opgraph as og

D = og.data_type
THREADS = 8


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads change places as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], count: int = THREADS) -> None:
    """Runs `work(i)` in `count` threads that start at one moment; the first exception reaches the test."""
    gate = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            gate.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Copy:
    """Y = identity(X) for a transposed X, by a plan that copies X to Y; overridden extents are followed."""

    def __init__(self, n: int = 4, m: int = 6) -> None:
        self.graph = og.pygraph(io_data_type=D.FLOAT)
        self.x = self.graph.tensor((n, m), (1, n), name="X")
        self.y = self.graph.identity(self.x).set_output(True).set_stride((m, 1)).set_name("Y")
        self.executable = install(self.graph, self.run)
        self.n, self.m = n, m

    @staticmethod
    def run(pack: Any) -> None:
        np.copyto(pack[1].numpy(), pack[0].numpy())

    def buffers(self, value: float, kind: int) -> tuple[Any, np.ndarray[Any, Any]]:
        """A buffer for X of one of many layouts and protocols, and what Y has to become."""
        n, m = self.n, self.m
        flat = np.arange((m + 3) * n, dtype=np.float32) + value
        memory = flat.reshape(m + 3, n)
        views = [
            flat, flat[: n * m], memory, memory[:m], memory[:m].T, memory.T,
            memory[:m].reshape(m // 2, 2, n), memory[:m].reshape(m, 2, n // 2), memory[:m].reshape(m, 1, n),
            memory[:m].reshape(1, m, n), memory[: m + 2].T,
        ]  # fmt: skip
        view = views[kind % len(views)]
        wrap = (lambda v: v, forwarding, TABLED, lambda v: v.ctypes.data)[kind // len(views) % 4]
        return (view, wrap(view)), memory[:m].T


TABLED = producer_type(table())


@pytest.mark.parametrize("fresh", [True, False])
def test_mixed_layouts_on_one_executable(fresh: bool):
    """More layouts than are remembered, first seen by all threads at once."""
    for _ in range(6 if fresh else 1):
        copies = Copy()

        def work(i: int, copies: Copy = copies) -> None:
            order = random.Random(i)
            for turn in range(60 if fresh else 400):
                kept, expected = copies.buffers(1000 * i + turn, order.randrange(44))
                out = np.full((4, 6), -1, np.float32)
                copies.graph.execute({copies.x: kept[1], copies.y: out})
                np.testing.assert_array_equal(out, expected)

        together(work)


def test_orders_overrides_and_neighbours_are_published_side_by_side():
    """Every kind of record, beyond what its table holds, with refusals in between."""
    for _ in range(4):
        graph = og.pygraph(io_data_type=D.FLOAT)
        tensors = [graph.tensor((6, 2), name=f"t{i}") for i in range(4)]
        total = tensors[0]
        for tensor in tensors[1:]:
            total = graph.add(total, tensor)
        other = graph.neg(total).set_output(True)
        total.set_output(True)

        order = sorted([*(t.uid for t in tensors), total.uid, other.uid])

        def run(pack: Any, last: int = len(tensors), order: Any = order, outs: Any = (total.uid, other.uid)) -> None:
            rows = None if pack.geometry is None else pack[0].shape[0]
            s = sum(pack[i].numpy() for i in range(last))
            assert rows is None or s.shape[0] == rows
            for uid, value in zip(outs, (s, -s), strict=True):
                pack[order.index(uid)].numpy()[...] = value

        install(graph, run)
        orders = list(itertools.permutations(range(6)))

        def work(i: int, graph: Any = graph, all_tensors: Any = (*tensors, total, other), orders: Any = orders) -> None:
            choose = random.Random(i)
            for turn in range(80):
                rows = choose.randrange(0, 7)
                inputs = [np.full((6, 2), 10 * i + turn + k, np.float32) for k in range(4)]
                result = [np.full((6, 2), -1, np.float32), np.full((6, 2), -1, np.float32)]
                pairs = dict(zip(all_tensors, [*inputs, *result], strict=True))
                expected = sum(inputs)[0, 0]
                kind = choose.randrange(4)
                if kind == 0:
                    graph.execute({all_tensors[k]: pairs[all_tensors[k]] for k in choose.choice(orders)})
                elif kind == 1:
                    keys = [all_tensors[k] for k in choose.choice(orders)]
                    graph.execute([pairs[k] for k in keys], tensor_uids=[k.uid for k in keys])
                elif kind == 2:
                    uids = [t.uid for t in all_tensors]
                    graph.execute(
                        pairs,
                        override_uids=uids,
                        override_shapes=[[rows, 2]] * 6,
                        override_strides=[[2, 1]] * 6,
                    )
                    assert (result[0][:rows] == expected).all() and (result[0][rows:] == -1).all()
                    continue
                else:
                    wrong = {**pairs, all_tensors[5]: result[0]}
                    with pytest.raises(og.OperandError, match="shares memory"):
                        graph.execute(wrong)
                    assert (result[0] == -1).all()
                    continue
                assert (result[0] == expected).all() and (result[1] == -expected).all()

        together(work)


def test_interleaved_outputs_from_many_threads():
    graph = og.pygraph(io_data_type=D.FLOAT)
    x = graph.tensor((5, 2), (64, 1))
    outs = [graph.neg(x).set_output(True).set_stride((64, 1)) for _ in range(2)]

    def run(pack: Any) -> None:
        for i in (1, 2):
            pack[i].numpy()[...] = pack[0].numpy() * i

    install(graph, run)

    def work(i: int) -> None:
        choose = random.Random(i)
        for turn in range(100):
            memory = np.zeros((5, 64), np.float32)
            at, to = choose.sample(range(2, 30), 2)
            memory[:, :2] = turn + 1
            pack = {x: memory[:, :2], outs[0]: memory[:, 2 * at : 2 * at + 2], outs[1]: memory[:, 2 * to : 2 * to + 2]}
            graph.execute(pack)
            assert (pack[outs[0]] == turn + 1).all() and (pack[outs[1]] == 2 * turn + 2).all()
            pack[outs[1]] = memory[:, 2 * at + 1 : 2 * at + 3]
            with pytest.raises(og.OperandError, match="shares memory"):
                graph.execute(pack)

    together(work)


def test_a_plan_swapped_under_calls():
    """Each call runs one plan from beginning to end, and plans that nobody runs any more go away."""

    class Step:
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, pack: Any) -> None:
            out = pack[1].numpy()
            for i in range(out.size):
                out.ravel()[i] = self.value

    graph = og.pygraph(io_data_type=D.FLOAT)
    x = graph.tensor((8,))
    y = graph.identity(x).set_output(True)
    steps: list[Any] = []
    stop = threading.Event()

    def swap() -> None:
        step = Step(len(steps))
        steps.append(weakref.ref(step))
        install(graph, step)

    swap()

    def work(i: int) -> None:
        if i == 0:
            try:
                while len(steps) < 300:
                    swap()
            finally:
                stop.set()
            return
        before = -1.0
        call = graph.bind({x: np.zeros(8, np.float32), y: np.zeros(8, np.float32)}) if i == 1 else None
        while not stop.is_set():
            out = np.full(8, -1, np.float32)
            graph.execute({x: np.zeros(8, np.float32), y: out})
            assert len(set(out.tolist())) == 1 and out[0] >= before
            before = out[0]
            if call is not None:
                call()

    together(work)
    gc.collect()
    assert [step() is not None for step in steps].count(True) == 1 and steps[-1]() is not None


def test_types_first_seen_by_many_threads():
    for _ in range(30):
        cls = producer_type(table())
        late = producer_type(table(borrow=False))
        copies = Copy()

        def work(i: int, cls: Any = cls, late: Any = late, copies: Copy = copies) -> None:
            memory = np.arange(24, dtype=np.float32).reshape(6, 4) + i
            for kind in (cls, late):
                obj = kind(memory)
                out = np.zeros((4, 6), np.float32)
                copies.graph.execute({copies.x: obj, copies.y: out})
                np.testing.assert_array_equal(out, memory.T)

        together(work, 4)


def test_an_unbuilt_graph_is_built_once():
    for _ in range(10):
        graph = og.pygraph(io_data_type=D.FLOAT)
        x = graph.tensor((4,))
        y = graph.abs(x).set_output(True)
        seen: list[Any] = []

        def work(i: int, graph: Any = graph, x: Any = x, y: Any = y, seen: Any = seen) -> None:
            out = np.zeros(4, np.float32)
            graph.execute({x: np.full(4, -i, np.float32), y: out})
            assert (out == i).all()
            seen.append(graph._executable)

        together(work)
        assert len({id(e) for e in seen}) == 1


def test_slots_are_made_and_dropped_in_many_threads():
    """Slots come from a shared list of spare ones; some are kept beyond their call, by another thread."""
    kept: list[Any] = []
    graph = og.pygraph(io_data_type=D.FLOAT)
    x = graph.tensor((4,))
    y = graph.identity(x).set_output(True)

    def run(pack: Any) -> None:
        kept.append((pack[0], float(pack[0].numpy()[0])))
        while len(kept) > 50:
            slot, value = kept.pop(0)
            assert (slot.numpy() == value).all()

    install(graph, run)

    def work(i: int) -> None:
        for turn in range(300):
            graph.execute({x: np.full(4, 1000 * i + turn, np.float32), y: np.zeros(4, np.float32)})

    together(work)
    assert all((slot.numpy() == value).all() for slot, value in kept)
