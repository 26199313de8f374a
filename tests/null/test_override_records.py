"""The core remembers overrides that passed: whatever it saw before, a call ends as on a graph that saw nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from probe import install

import opgraph as og

DIMS = (4, 6)


class Sum:
    """C = A + B on DIMS, with a plan that notes what it was given."""

    def __init__(self) -> None:
        self.graph = og.pygraph("sum", io_data_type=og.data_type.FLOAT, is_override_shape_enabled=True)
        a, b = (self.graph.tensor(DIMS, name=name) for name in "AB")
        self.graph.add(a, b).set_output(True).set_name("C")
        self.seen: Any = None
        install(self.graph, self.run)

    def run(self, pack: Any) -> None:
        slots = [(pack[i].shape, pack[i].strides, pack[i].nbytes) for i in range(len(pack))]
        self.seen = (slots, pack.geometry)

    def outcome(self, buffers: Any, uids: Any, shapes: Any, strides: Any) -> Any:
        """What the plan saw, or the refusal."""
        self.seen = None
        mapping = dict(zip("ABC", buffers, strict=True))
        try:
            self.graph.execute(mapping, override_uids=uids, override_shapes=shapes, override_strides=strides)
        except Exception as error:
            assert self.seen is None
            return type(error), str(error)
        return self.seen


def dense(shape: Any = DIMS, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def three(make: Any) -> list[Any]:
    return [make() for _ in range(3)]


UIDS = [1, 2, 3]
SMALL = [(2, 3)] * 3


def override_sets() -> list[tuple[Any, Any, Any]]:
    sets: list[tuple[Any, Any, Any]] = [
        (UIDS, [[rows, columns]] * 3, [[columns, 1]] * 3) for rows in range(5) for columns in (0, 1, 3, 6)
    ]
    every = [[3, 1]] * 3
    sets += [
        ((1, 2, 3), tuple(SMALL), tuple((3, 1) for _ in SMALL)),
        ([3, 1, 2], SMALL, every),  # another order of the same
        (UIDS, SMALL, [[6, 1]] * 3),
        (UIDS, SMALL, [[6, 1], [3, 1], [3, 1]]),
        (UIDS, SMALL, [[0, 0], [0, 1], [3, 1]]),
        (UIDS, SMALL, [[3, 1], [3, 1], [0, 1]]),  # the output would overlap itself
        (UIDS, SMALL, [[], (), [3, 1]]),
        (UIDS, [np.array([2, 3])] * 3, every),
        (UIDS, [[np.int64(2), 3]] * 3, every),
        (np.array(UIDS).tolist(), SMALL, every),
        ([np.int64(1), 2, 3], SMALL, every),
        (UIDS, [[True, 3]] * 3, every),
        (UIDS, [[2, -3]] * 3, every),
        (UIDS, [[2, 3]] * 3, [[-3, 1]] * 3),
        (UIDS, [[2, 2**40]] * 3, [[2**40, 1]] * 3),
        (UIDS, [[2, 2**70]] * 3, every),
        (UIDS, [[2**31, 2**31]] * 3, [[2**31, 1]] * 3),
        (UIDS, [[2.0, 3]] * 3, every),
        ([1, 1, 3], SMALL, every),
        ([1, 2, 9], SMALL, every),
        ([1, 2, True], SMALL, every),
        ([1, 2], SMALL[:2], every[:2]),  # the output keeps the declared shape: contradicts the graph
        (UIDS, SMALL, every[:2]),
        (UIDS, [[2, 3], [2, 3], [2, 3, 1]], [*every[:2], [3, 1, 1]]),
        (UIDS, [[2, 3], [2, 3], [3, 2]], [*every[:2], [2, 1]]),
        ([1], [[1, 6]], [[6, 1]]),  # broadcasts
        ([1, 2, 3], [[4, 6]] * 3, [[6, 1]] * 3),
        ([], [], []),
    ]
    return sets


BUFFERS: dict[str, Any] = {
    "declared size": lambda: three(dense),
    "flat": lambda: three(lambda: dense(24)),
    "larger": lambda: three(lambda: dense((8, 6))),
    "just enough": lambda: three(lambda: dense((2, 3))),
    "rows with gaps": lambda: three(lambda: dense((4, 8))[:, :6]),
    "other type": lambda: [dense(), dense(), dense(DIMS, np.float64)],
    "read-only output": lambda: [dense(), dense(), np.broadcast_to(np.float32(0), DIMS)],
    "address": lambda: [1 << 40, 1 << 41, 1 << 42],
}


@pytest.mark.parametrize("seed", range(4))
def test_records_change_no_outcome(seed: int):
    chance = random.Random(seed)
    case = Sum()
    sets = override_sets()
    chance.shuffle(sets)
    for turn in range(300):
        # A few sets come again and again, the others once in a while: more than there are records.
        uids, shapes, strides = chance.choice(sets[: 6 if turn % 3 else None])
        name = chance.choice(list(BUFFERS))
        buffers = BUFFERS[name]()
        expected = Sum().outcome(buffers, uids, shapes, strides)
        assert case.outcome(buffers, uids, shapes, strides) == expected, (name, uids, shapes, strides)


def test_lists_that_change_between_calls_are_read_again():
    case, buffers = Sum(), three(dense)
    shapes, strides = [[2, 3], [2, 3], [2, 3]], [[3, 1], [3, 1], [3, 1]]
    for columns in (3, 2, 6, 3):
        for shape, stride in zip(shapes, strides, strict=True):
            shape[1] = stride[0] = columns
        slots, geometry = case.outcome(buffers, UIDS, shapes, strides)
        assert [slot[0] for slot in slots] == [(2, columns)] * 3
        assert geometry[3] == ((2, columns), (columns, 1))
    shapes[2] = [4, 3]
    kind, text = case.outcome(buffers, UIDS, shapes, strides)
    assert kind is not KeyError and "C" in text


def test_a_producer_that_changes_the_lists_cannot_plant_a_record():
    """Reading a buffer runs the producer's code, after the overrides were read and before they are remembered."""
    case = Sum()
    shapes = [[2, 3], [2, 3], [2, 3]]
    strides = [[3, 1], [3, 1], [3, 1]]

    class Producer:
        def __init__(self) -> None:
            self.array = dense()

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **keywords: Any) -> Any:
            shapes[0][:] = [99, 99]
            return self.array.__dlpack__(**keywords)

    slots, _ = case.outcome([Producer(), dense(), dense()], UIDS, shapes, strides)
    assert [slot[0] for slot in slots] == [(2, 3)] * 3
    kind, text = case.outcome(three(dense), UIDS, shapes, strides)
    assert kind is og.OperandError and "the buffer is too small" in text
