"""Reading through the exchange table of a type, and packs that mix every protocol."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from exchange import Base, capsule, forwarding, producer_type, table
from probe import OneOperand, install
from test_reading import Interface, Pointer, check, describe, matrix, refused

import opgraph as og

D = og.data_type


@pytest.mark.parametrize("form", ["capsule", "integer"])
@pytest.mark.parametrize("spelling", ["__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"])
def test_table_forms(form: str, spelling: str):
    cls = producer_type(table(), form=form, spelling=spelling)
    x = matrix().T
    obj = cls(x)
    for _ in range(3):  # first sight, then the cache
        check(obj, x)
    assert obj.borrowed == 6 and not obj.exports
    subclass = type("Sub", (cls,), {})
    check(subclass(x), x)


def test_the_newer_spelling_wins():
    cls = producer_type(table(borrow=False))
    cls.__c_dlpack_exchange_api__ = table()
    obj = cls(matrix())
    describe(obj)
    assert (obj.borrowed, len(obj.exports)) == (0, 1)


def test_a_table_without_the_borrowing_call():
    cls = producer_type(table(borrow=False))
    x = matrix()
    obj = cls(x)
    check(obj, x)
    gc.collect()
    assert [m.released for m in obj.exports] == [1, 1]
    assert OneOperand((3, 3)).refusal(obj) == "bytes"
    assert obj.exports[-1].released == 1
    check(cls(x, flags=1), x, read_only=True)
    check(cls(x, byte_offset=4, dims=(2,), strides=None), x.ravel()[1:3])


def test_a_borrowed_struct_with_an_offset_and_without_strides():
    cls = producer_type(table())
    x = np.arange(16, dtype=np.float32)
    check(cls(x, byte_offset=32, dims=(2, 3), strides=None), x[8:14].reshape(2, 3))
    check(cls(x, dims=(), strides=None), x[:1].reshape(()))
    obj = cls(x, dims=(1,) * 33, strides=None)
    assert OneOperand((1,)).refusal(obj) == "rank"
    assert OneOperand((2,)).refusal(cls(x, shape=None)) == "producer"


def test_older_tables_are_found_through_the_chain():
    ours = table()
    newer = table(version=(2, 0), prev=ours, borrow=False)
    newest = table(version=(3, 7), prev=newer, borrow=False)
    x = matrix()
    for address in (newer, newest):
        obj = producer_type(address)(x)
        check(obj, x)
        assert obj.borrowed == 2 and not obj.exports
    # No table that we read: the object's other protocols count.
    only_newer = producer_type(table(version=(2, 0)))
    refused(only_newer(x), "not a buffer", TypeError)
    only_newer.__dlpack__ = lambda self, **kwargs: self.array.__dlpack__(**kwargs)
    only_newer.__dlpack_device__ = lambda self: (1, 0)
    check(only_newer(x), x)


@pytest.mark.parametrize(
    "value", [0, None, "text", 1.5, lambda: capsule(table(), b"dlpack_exchange_ap"), lambda: capsule(table(), b"other"),
              lambda: table(borrow=False, export=False)]
)  # fmt: skip
def test_attributes_that_are_no_table_are_passed_over(value: Any):
    cls = type("Odd", (Base,), {"__dlpack_c_exchange_api__": value() if callable(value) else value})
    refused(cls(matrix()), "not a buffer", TypeError)


def test_a_type_that_gains_the_table_later():
    cls = type("Late", (Base,), {})
    x = matrix()
    refused(cls(x), "not a buffer", TypeError)
    cls.__dlpack__ = lambda self, **kwargs: self.array.__dlpack__(**kwargs)
    cls.__dlpack_device__ = lambda self: (1, 0)
    obj = cls(x)
    check(obj, x)
    assert obj.borrowed == 0
    cls.__dlpack_c_exchange_api__ = table()
    check(obj, x)
    assert obj.borrowed == 2


def test_a_cached_type_stays():
    """The cache holds its types, so an entry never speaks for another type at the same address."""
    cls = producer_type(table())
    describe(cls(matrix()))
    alive = weakref.ref(cls)
    del cls
    gc.collect()
    assert alive() is not None


def test_more_types_than_the_cache_holds():
    address = table()
    x = matrix()
    for _ in range(400):
        obj = producer_type(address, form="integer")(x)
        assert describe(obj)["address"] == x.ctypes.data
    assert obj.borrowed == 1


# ---- mixed packs


def producers(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "numpy": x,
        "dlpack": forwarding(x),
        "legacy": forwarding(x, legacy=True),
        "table": producer_type(table())(x),
        "owning table": producer_type(table(borrow=False))(x),
        "interface": Interface(x),
        "pointer": Pointer(x),
        "address": x.ctypes.data,
        "slot": slot_over(x),
    }


def slot_over(x: Any) -> Any:
    one = OneOperand(x.shape, touch=False)
    one.give(x)
    return one.slots[0]


def sum_of(buffers: list[Any], engine: str, extra: dict[Any, Any] | None = None) -> Any:
    """The sum of all buffers, each an operand of one graph."""
    graph = og.pygraph(io_data_type=D.FLOAT)
    tensors = [graph.tensor((2, 3), name=f"t{i}") for i in range(len(buffers))]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = graph.add(total, tensor)
    total.set_output(True)
    out = np.full((2, 3), -1, np.float32)
    if engine == "null":
        seen: list[Any] = []
        install(graph, lambda pack: seen.extend(pack[i].numpy().copy() for i in range(len(buffers))))
        graph.execute({**dict(zip(tensors, buffers, strict=True)), total: out})
        return sum(seen)
    graph.build(engine=engine, device="cpu")
    graph.execute({**dict(zip(tensors, buffers, strict=True)), total: out})
    return out


@pytest.mark.parametrize("engine", ["null", "cpu"])
def test_a_pack_of_every_kind(engine: str):
    arrays = [matrix() * 10**i for i in range(9)]
    kinds = [list(producers(x).values())[i] for i, x in enumerate(arrays)]
    expected = sum(arrays)
    for turn in range(3):
        order = kinds[turn:] + kinds[:turn]
        np.testing.assert_allclose(sum_of(order, engine), expected)
    np.testing.assert_allclose(sum_of(kinds * 4, engine), expected * 4, rtol=1e-6)


def test_one_object_may_be_several_operands():
    x = matrix()
    for kind, buffer in producers(x).items():
        np.testing.assert_array_equal(sum_of([buffer] * 3, "null"), 3 * x, err_msg=kind)


def test_a_pack_longer_than_the_stack_takes():
    arrays = [matrix() + i for i in range(150)]
    np.testing.assert_allclose(sum_of(arrays, "null"), sum(arrays))
