"""Bound calls: what they keep, what an update changes, and calls that run while another thread updates."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from exchange import Dlpack, Managed, producer_type, table
from probe import install

import opgraph as og

D = og.data_type


def add_graph(engine: str, **options: Any) -> tuple[og.pygraph, Any, Any, Any]:
    graph = og.pygraph("add", io_data_type=D.FLOAT, **options)
    a, b = graph.tensor((4,), name="A"), graph.tensor((4,), name="B")
    c = graph.add(a, b).set_output(True).set_name("C")
    graph.build(engine=engine, device="cpu")
    return graph, a, b, c


def full(value: float, n: int = 4) -> np.ndarray[Any, Any]:
    return np.full(n, value, np.float32)


@pytest.fixture(params=["cpu", "null"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_bound_call_runs_again(engine: str):
    graph, a, b, c = add_graph(engine)
    x, y, z = full(1), full(2), full(0)
    call = graph.bind({a: x, "B": y, c.uid: z})
    assert z.tolist() == [0] * 4, "binding runs nothing"
    for value in (5, 6):
        x[:] = value
        assert call() is None
        assert engine == "null" or z.tolist() == [value + 2] * 4
    graph.execute({a: full(10), b: full(20), c: z})  # other calls of the graph do not disturb it
    call()
    assert engine == "null" or z.tolist() == [8] * 4


def test_every_form_of_the_arguments():
    graph, a, b, c = add_graph("cpu")
    z = full(0)
    graph.bind([full(1), z, full(2)], tensor_uids=[a.uid, c.uid, b.uid])()
    assert z.tolist() == [3] * 4
    graph.bind(tensor_dict={a: full(1), b: full(3), c: z}, handle=og.Handle(device="cpu"))()
    assert z.tolist() == [4] * 4
    call = graph.bind(
        {a: full(1), b: full(4), c: z},
        override_uids=[a.uid, b.uid, c.uid],
        override_shapes=[[2]] * 3,
        override_strides=[[1]] * 3,
    )
    call()
    assert z.tolist() == [5, 5, 4, 4]
    call.update({a: full(10)})  # the overrides stay
    call()
    assert z.tolist() == [14, 14, 4, 4]


def test_binding_an_unbuilt_graph_builds_it():
    graph = og.pygraph(io_data_type=D.FLOAT)
    a = graph.tensor((4,))
    c = graph.add(a, full(1)).set_output(True)  # the second input is bound by its declaration
    z = full(0)
    call = graph.bind({a: full(2), c: z})
    call()
    assert z.tolist() == [3] * 4


def test_refusals_at_bind(engine: str):
    graph, a, b, c = add_graph(engine)
    good = {a: full(1), b: full(2), c: full(0)}
    for changes, error in [
        ({b: full(1, 3)}, og.OperandError),
        ({b: None}, og.OperandError),
        ({b: "x"}, TypeError),
        ({99: full(1)}, KeyError),
        ({"nobody": full(1)}, KeyError),
    ]:
        with pytest.raises(error):
            graph.bind({**good, **changes})
    with pytest.raises(TypeError):
        graph.bind()
    call = graph.bind(good)
    for arguments in ((good,), (1, 2)):
        with pytest.raises(TypeError, match="takes no arguments"):
            call(*arguments)
    with pytest.raises(TypeError, match="takes no arguments"):
        call(workspace=None)


def test_what_is_bound_is_kept_alive(engine: str):
    graph, a, b, c = add_graph(engine)
    x, y, z = full(1), full(2), full(0)
    alive = [weakref.ref(array) for array in (x, y, z)]
    call = graph.bind({a: x, b: y, c: z})
    del graph, a, b, c, x, y
    gc.collect()
    assert all(ref() is not None for ref in alive)
    call()
    assert engine == "null" or z.tolist() == [3] * 4
    del call
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, True]


def test_owning_exports_keep_memory_that_the_object_lets_go():
    """The memory is an export's, not the object's: it stays although the object moves on."""
    handed: list[Managed] = []

    class Moving:
        def __init__(self, value: float) -> None:
            self.value = value

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **kwargs: Any) -> Any:
            handed.append(Managed(full(self.value)))
            return handed[-1].capsule()

    graph, a, b, c = add_graph("cpu")
    z = full(0)
    call = graph.bind({a: Moving(5), b: full(1), c: z})
    gc.collect()
    assert len(handed) == 1 and handed[0].released == 0
    for _ in range(3):
        call()
    assert z.tolist() == [6] * 4 and len(handed) == 1, "a call exports nothing"
    call.update({a: full(7)})
    assert handed[0].released == 1
    call()
    assert z.tolist() == [8] * 4


def test_the_owning_call_of_a_table_is_used():
    cls = producer_type(table())
    x = cls(full(3))
    for engine in ("cpu", "null"):
        graph, a, b, c = add_graph(engine)
        before = x.borrowed
        call = graph.bind({a: x, b: full(1), c: full(0)})
        call()
        assert x.borrowed == before and x.exports[-1].released == 0
        del call
        gc.collect()
        assert x.exports[-1].released == 1


@pytest.mark.frameworks
def test_torch_memory_outlives_the_callers_tensor(torch: Any):
    graph, a, b, c = add_graph("cpu")
    z = full(0)
    x = torch.full((8,), 5.0)
    call = graph.bind({a: x[:4], b: x[4:], c: z})
    del x
    filler = [torch.full((8,), 99.0) for _ in range(50)]
    call()
    assert z.tolist() == [10] * 4 and len(filler) == 50


def test_the_callers_mapping_is_not_kept():
    graph, a, b, c = add_graph("cpu")
    mapping = {a: full(1), b: full(2), c: full(0)}
    count = sys.getrefcount(mapping)
    z = mapping[c]
    call = graph.bind(mapping)
    assert sys.getrefcount(mapping) == count
    extra = full(1)
    alive = weakref.ref(extra)
    mapping["later"] = extra
    mapping.clear()
    del extra
    assert alive() is None
    call.update({a: full(5)})
    call()
    assert z.tolist() == [7] * 4
    buffers, uids = [full(1), full(2), z], [a.uid, b.uid, c.uid]
    count = sys.getrefcount(buffers), sys.getrefcount(uids)
    call = graph.bind(buffers, tensor_uids=uids)
    assert (sys.getrefcount(buffers), sys.getrefcount(uids)) == count
    call.update({b: full(9)})
    call()
    assert z.tolist() == [10] * 4


def test_update(engine: str):
    graph, a, b, c = add_graph(engine)
    x, y, z = full(1), full(2), full(0)
    call = graph.bind({a: x, b: y, c: z})
    old = weakref.ref(x)
    for key in (a, a.uid, "A"):
        fresh = full(10)
        assert call.update({key: fresh}) is None
        call()
        assert engine == "null" or z.tolist() == [12] * 4
    del x
    gc.collect()
    assert old() is None, "replaced operands are let go"
    other = full(0)
    call.update({c: other, b: full(5), None: 1, "A": None})  # None keys and values are ignored, as in execute
    call()
    assert engine == "null" or (other.tolist(), z.tolist()) == ([15] * 4, [12] * 4)
    call.update({})
    call()


def test_a_refused_update_leaves_the_call_as_it_was(engine: str):
    graph, a, b, c = add_graph(engine)
    foreign = og.pygraph().tensor((4,), name="A")
    z = full(0)
    call = graph.bind({a: full(1), b: full(2), c: z})
    read_only = full(0)
    read_only.flags.writeable = False
    good = full(100)
    for changes, error in [
        ({a: good, b: full(1, 3)}, og.OperandError),
        ({a: good, b: full(1).astype(np.float64)}, og.OperandError),
        ({a: good, c: read_only}, og.OperandError),
        ({a: good, c: good[1:]}, og.OperandError),
        ({a: good, b: "x"}, TypeError),
        ({a: good, b: 0}, og.OperandError),
        ({a: good, 99: good}, KeyError),
        ({a: good, "nobody": good}, KeyError),
        ({foreign: good}, KeyError),
        ({a: good, True: good}, TypeError),
        ([good], TypeError),
        (None, TypeError),
    ]:
        with pytest.raises(error):
            call.update(changes)
        call()
        assert engine == "null" or z.tolist() == [3] * 4
    assert sys.getrefcount(good) == 2, "a refused update keeps nothing"


def test_a_workspace_is_bound_too():
    seen: list[Any] = []
    graph = og.pygraph(io_data_type=D.FLOAT)
    a = graph.tensor((4,))
    c = graph.identity(a).set_output(True)
    install(graph, lambda pack: seen.append(pack.carves[0].ptr), workspace_bytes=64, carves=[(0, (1, 8, 1), (64,))])
    scratch = np.zeros(64, np.uint8)
    alive = weakref.ref(scratch)
    address = scratch.ctypes.data
    call = graph.bind({a: full(1), c: full(0)}, scratch)
    del scratch
    gc.collect()
    call()
    call.update({a: full(2)})
    call()
    assert seen == [address] * 2 and alive() is not None
    del call
    gc.collect()
    assert alive() is None
    handed: list[Managed] = []

    def make(kwargs: Any) -> Any:
        handed.append(Managed(np.zeros(64, np.uint8)))
        return handed[-1].capsule()

    call = graph.bind({a: full(1), c: full(0)}, Dlpack(make))
    call()
    assert handed[0].released == 0
    del call
    gc.collect()
    assert handed[0].released == 1


def test_scalars_are_bound_by_value(engine: str):
    graph = og.pygraph(io_data_type=D.FLOAT)
    a = graph.tensor((4,))
    s = graph.tensor((1,), is_pass_by_value=True)
    c = graph.mul(a, s).set_output(True)
    graph.build(engine=engine, device="cpu")
    z, value = full(0), np.array([3], np.float32)
    call = graph.bind({a: full(2), s: value, c: z})
    value[0] = 100  # read when it was bound
    call()
    assert engine == "null" or z.tolist() == [6] * 4
    call.update({s: 5.0})
    call()
    assert engine == "null" or z.tolist() == [10] * 4
    call.update({a: full(1)})
    call()
    assert engine == "null" or z.tolist() == [5] * 4


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_bound_calls_are_not_copied(act: Any):
    graph, a, b, c = add_graph("cpu")
    with pytest.raises(TypeError, match="BoundCall cannot be copied or pickled"):
        act(graph.bind({a: full(1), b: full(2), c: full(0)}))


@pytest.mark.parametrize("place", ["operand", "workspace"])
def test_a_cycle_through_a_buffer_is_collected(place: str):
    class Holder:
        """A buffer that holds the call it is bound in."""

        call: Any = None

        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__array_interface__ = array.__array_interface__
            self.array = array

    graph, a, b, c = add_graph("null")
    holder = Holder(full(1))
    holder.call = graph.bind(
        {a: holder if place == "operand" else full(1), b: full(1), c: full(0)},
        holder if place == "workspace" else None,
    )
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_a_rebuilt_graph_leaves_bound_calls_alone():
    graph, a, b, c = add_graph("cpu")
    z = full(0)
    call = graph.bind({a: full(1), b: full(2), c: z})
    install(graph, lambda pack: pack[2].numpy().fill(-1))
    graph.execute({a: full(1), b: full(2), c: z})
    assert z.tolist() == [-1] * 4
    call()
    assert z.tolist() == [3] * 4


def test_an_engines_exception_leaves_the_call_usable():
    graph, a, b, c = add_graph("cpu")
    fail = [True]

    def run(pack: Any) -> None:
        if fail[0]:
            raise RuntimeError("trouble")
        pack[2].numpy().fill(4)

    install(graph, run)
    z = full(0)
    call = graph.bind({a: full(1), b: full(2), c: z})
    with pytest.raises(RuntimeError, match="trouble"):
        call()
    fail[0] = False
    call()
    assert z.tolist() == [4] * 4


def test_calls_while_another_thread_updates(engine: str):
    """Each call sees one set of operands as a whole: A = B in every set, so C = 2 A."""
    graph, a, b, c = add_graph(engine)
    size = 4
    outputs = [full(0) for _ in range(8)]
    call = graph.bind({a: full(0), b: full(0), c: outputs[0]})
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: Any) -> Any:
        def run() -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                errors.append(error)
                stop.set()

        return run

    turn = iter(range(10**9))

    def update() -> None:
        i = next(turn)
        call.update({a: full(i % 1000), b: full(i % 1000), c: outputs[i % 8]})

    def refused() -> None:
        with pytest.raises(og.OperandError):
            call.update({a: full(7, size - 1), b: full(3)})

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=guarded(w)) for w in (update, refused, *[call] * 3)]
    for thread in threads:
        thread.start()
    stop.wait(0.4)
    stop.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert not errors, errors
    assert next(turn) > 20
    if engine == "cpu":
        for out in outputs:
            assert len(set(out.tolist())) == 1 and out[0] % 2 == 0
