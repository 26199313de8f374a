"""What broke the native core once: each test here crashed, leaked, or read memory that was not its own."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from exchange import Api, Base, Managed, Stream, capsule, producer_type, table, table_of
from probe import OneOperand, install

import opgraph as og

D = og.data_type


def add_graph(engine: str = "null") -> tuple[og.pygraph, Any, Any, Any]:
    graph = og.pygraph("add", io_data_type=D.FLOAT)
    a, b = graph.tensor((4,), name="A"), graph.tensor((4,), name="B")
    c = graph.add(a, b).set_output(True).set_name("C")
    graph.build(engine=engine, device="cpu")
    return graph, a, b, c


def full(value: float, n: int = 4) -> np.ndarray[Any, Any]:
    return np.full(n, value, np.float32)


# ---- tables


def test_a_table_with_the_borrowing_call_alone_cannot_be_bound():
    cls = producer_type(table(export=False))
    graph, a, b, c = add_graph("cpu")
    x, z = cls(full(1)), full(0)
    graph.execute({a: x, b: full(2), c: z})
    assert z.tolist() == [3] * 4
    with pytest.raises(TypeError, match="not a buffer"):
        graph.bind({a: x, b: full(2), c: z})
    # The object's other protocols serve the bound call.
    cls.__dlpack__ = lambda self, **kwargs: self.array.__dlpack__(**kwargs)
    cls.__dlpack_device__ = lambda self: (1, 0)
    graph.bind({a: cls(full(5)), b: full(2), c: z})()
    assert z.tolist() == [7] * 4


def test_axes_without_a_shape_behind_an_operand_of_the_same_type():
    """The second operand of one type takes a shorter way through the reading."""
    cls = producer_type(table())
    graph, a, b, c = add_graph()
    graph.execute({a: cls(full(1)), b: cls(full(1)), c: full(0)})  # the type is known from here on
    with pytest.raises(og.OperandError, match="axes but no shape"):
        graph.execute({a: cls(full(1)), b: cls(full(1), shape=None), c: full(0)})


def test_a_table_that_does_not_tell_its_stream():
    @Stream
    def silent(device_type: int, device_id: int, out: Any) -> int:
        return -1

    api = Api.from_address(table())
    api.stream = silent
    cls = type("Silent", (Base,), {"__dlpack_c_exchange_api__": capsule(ctypes.addressof(api), b"dlpack_exchange_api")})
    one = OneOperand((4,), device=(2, 0), touch=False)
    with pytest.raises(RuntimeError, match="Silent does not tell its current stream"):
        one.give(cls(full(1), device=(2, 0)))


@pytest.mark.parametrize("fields", [{"ndim": -1}, {"ndim": 9}, {"shape": None}])
def test_a_slot_is_not_made_of_nonsense(fields: dict[str, Any]):
    one = OneOperand((4,))
    one.give(full(1))
    managed, out = Managed(full(1), **fields), ctypes.c_void_p()
    with pytest.raises(BufferError, match="at most 8 axes and a shape"):
        table_of(type(one.slots[0])).import_(managed.address, ctypes.byref(out))
    assert managed.released == 0, "a refused tensor stays the caller's"


# ---- code of the caller's that runs inside a call


@pytest.mark.parametrize("kind", ["name", "uid"])
def test_a_key_whose_comparison_empties_the_mapping(kind: str):
    """Names and uids of the graph may be instances of subclasses; looking a key up must not run their code."""
    armed: list[Any] = []

    class Name(str):
        def __hash__(self) -> int:
            return hash("key")

        def __eq__(self, other: object) -> bool:
            return bool(armed and armed[0]()) or str.__eq__(self, other)

    class Uid(int):
        def __hash__(self) -> int:
            return hash(77)

        def __eq__(self, other: object) -> bool:
            return bool(armed and armed[0]()) or int.__eq__(self, other)

    graph = og.pygraph("keys", io_data_type=D.FLOAT)
    a = graph.tensor((4,), name=Name("odd") if kind == "name" else "odd", uid=Uid(5) if kind == "uid" else 5)
    c = graph.identity(a).set_output(True)
    graph.build(engine="cpu", device="cpu")
    mapping: dict[Any, Any] = {"key" if kind == "name" else 77: full(7), c: full(0)}

    def empty() -> bool:
        armed.clear()
        mapping.clear()
        return True

    armed.append(empty)
    with suppress(KeyError):  # the graph's own look-up may run it, on a private copy of the mapping
        graph.execute(mapping)
    armed.clear()
    z = full(0)
    for key in ("odd", 5, a):
        graph.execute({key: full(3), c: z})
        assert z.tolist() == [3] * 4


def test_a_refusal_reports_what_was_read():
    """Asking for the type's name runs the metaclass, which here reshapes the array that is being reported."""

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            if name == "__qualname__" and arrays:
                arrays.pop().shape = (2,) * 8
                others.extend(np.empty((1,) * 8) for _ in range(8))  # these take what the old extents lay in
            return type.__getattribute__(cls, name)

    class Array(np.ndarray[Any, Any], metaclass=Meta):
        pass

    arrays: list[Any] = []
    others: list[Any] = []
    array = np.zeros((1,) * 7 + (256,), np.float32).view(Array)
    one = OneOperand((512,))
    arrays.append(array)
    with pytest.raises(og.OperandError, match=r"dims \(1, 1, 1, 1, 1, 1, 1, 256\)"):
        one.give(array)


# ---- pass-by-value


def test_a_scalar_has_one_element():
    """Its 16 bytes would be read as the whole array."""
    for dims in ((2,), (1, 5000)):
        graph = og.pygraph("scalar", io_data_type=D.FLOAT)
        s = graph.tensor(dims, is_pass_by_value=True, name="S")
        graph.mul(graph.tensor(dims), s).set_output(True)
        with pytest.raises(ValueError, match=r"tensor 'S'.*a pass-by-value tensor holds one element"):
            graph.validate()
    graph = og.pygraph("ragged", io_data_type=D.FLOAT)
    offset = graph.tensor((2001, 1, 1, 1), data_type=D.INT32, is_pass_by_value=True, name="S")
    x = graph.tensor((2000, 1, 4, 4)).set_ragged_offset(offset)
    graph.identity(x).set_output(True)
    with pytest.raises(ValueError, match=r"tensor 'S'.*a pass-by-value tensor holds one element"):
        graph.validate()
    graph = og.pygraph("ones", io_data_type=D.FLOAT)
    s = graph.tensor((1, 1, 1, 1), is_pass_by_value=True)
    y = graph.mul(graph.tensor((1, 1, 2, 2), name="X"), s).set_output(True)
    graph.build(engine="cpu", device="cpu")
    z = np.zeros((1, 1, 2, 2), np.float32)
    graph.execute({"X": np.ones_like(z), s: 3.0, y: z})
    assert z.ravel().tolist() == [3] * 4


def test_the_native_core_takes_no_scalar_of_many_elements():
    graph = og.pygraph("scalar", io_data_type=D.FLOAT)
    s = graph.tensor((1,), is_pass_by_value=True, name="S")
    graph.identity(s).set_output(True)
    graph.validate()
    with pytest.raises(ValueError, match="holds one element"):
        install(graph, None, facts={"S": {"dims": (5000,)}})


# ---- life times


def test_slots_of_slots_are_freed_on_a_small_stack():
    graph = og.pygraph("chain", io_data_type=D.FLOAT)
    x = graph.tensor((4,))
    y = graph.identity(x).set_output(True)
    kept: list[Any] = []
    install(graph, lambda pack: kept.append(pack[0]))
    memory = full(5)
    alive = weakref.ref(memory)
    kept.append(memory)
    for _ in range(20_000):
        graph.execute({x: kept.pop(), y: 1 << 40})
    del memory
    assert alive() is not None and kept[0].numpy().tolist() == [5] * 4
    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("place", ["operand", "workspace"])
def test_a_cycle_through_the_slots_of_a_bound_call_is_collected(place: str):
    """A plan in Python keeps a pack, whose slots keep the buffers."""

    class Holder:
        call: Any = None

        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__array_interface__ = array.__array_interface__
            self.array = array

    graph, a, b, c = add_graph("cpu")
    install(graph, lambda pack: None, workspace_bytes=1024, carves=[(0, (1, 8, 1), (64,)), (256, (1, 8, 1), (64,))])
    holder = Holder(full(1) if place == "operand" else full(1, 256))
    operand = holder if place == "operand" else full(1)
    holder.call = graph.bind({a: operand, b: full(1), c: full(0)}, holder if place == "workspace" else full(1, 256))
    gone = weakref.ref(holder)
    del holder, operand
    gc.collect()
    assert gone() is None


def test_a_slot_that_is_held_elsewhere_keeps_its_buffer_through_a_collection():
    graph, a, b, c = add_graph("cpu")
    slots: list[Any] = []
    install(graph, lambda pack: slots.extend((pack[0], pack[0].reshape(2, 2))))

    class Holder:
        call: Any = None

        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__array_interface__ = array.__array_interface__
            self.array = array

    holder = Holder(full(6))
    holder.call = graph.bind({a: holder, b: full(1), c: full(0)})
    holder.call()
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is not None and slots[0].numpy().tolist() == [6] * 4
    gone().call()
    slots.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("engine", ["cpu", "null"])
def test_a_plan_that_holds_its_own_bound_call_is_collected(engine: str):
    class Run:
        call: Any = None

        def __call__(self, pack: Any) -> None:
            pass

    graph, a, b, c = add_graph(engine)
    run = Run()
    install(graph, run)
    run.call = graph.bind({a: full(1), b: full(1), c: full(0)})
    gone = weakref.ref(run)
    del graph, a, b, c, run
    gc.collect()
    assert gone() is None


# ---- arguments


@pytest.mark.parametrize("device", [[1, 0], 1, "cpu"])
def test_a_device_that_is_no_pair(device: Any):
    one = OneOperand((4,))
    one.give(full(1))
    with pytest.raises(TypeError, match=r"dl_device must be a tuple"):
        one.slots[0].__dlpack__(dl_device=device)


def test_the_size_of_a_boasting_workspace_does_not_wrap():
    graph, a, b, c = add_graph()
    sizes: list[int] = []
    install(graph, lambda pack: sizes.append(pack.workspace.nbytes), workspace_bytes=256)
    memory = producer_type(table())(
        np.zeros(256, np.uint8), dims=(2**53,), strides=(1,), dtype=(1, 255, 65535), data=1 << 20
    )
    graph.execute({a: 1 << 10, b: 1 << 11, c: 1 << 12}, memory)
    assert sizes == [2**63 - 1]
