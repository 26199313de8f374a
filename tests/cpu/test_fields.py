"""Field cases about layout, empty buffers, alignment, data types, read-only memory and large offsets."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import sums
from producers import DataPointer, Dlpack, Interface, Producer, interface_of
from sums import Guarded, Sum, refused, run_child

import opgraph
from opgraph import data_type, reduction_mode

FLOAT = data_type.FLOAT


def strided(base: Any, shape: Any, strides: Any) -> Any:
    """A view with these strides in elements."""
    return np.lib.stride_tricks.as_strided(base, shape, tuple(s * base.itemsize for s in strides))


def copy_graph(
    engine: Any, dim: Any, stride: Any, dtype: data_type = FLOAT, out: data_type | None = None
) -> Any:
    """X -> Y, dense, without arithmetic."""
    graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=FLOAT)
    x = graph.tensor(dim, stride, name="X")
    y = graph.identity(x).set_output(True).set_name("Y")
    y.set_stride(tuple(int(np.prod(dim[axis + 1 :])) for axis in range(len(dim)))).set_data_type(out)
    engine.build(graph)
    return graph, x, y


# ---- F02 - F05: strides


@pytest.mark.parametrize("dim, strides", [
    ((1, 5), ((5, 1), (1, 1), (0, 1), (12345, 1))),
    ((6, 1), ((1, 1), (1, 6), (1, 0), (1, 12345))),
])  # fmt: skip
class TestF02ExtentOneWithAnyStride:
    def test_as_input_and_output(self, any_engine, dim, strides):
        case = Sum(any_engine, dim, stride=strides[0])
        values = np.arange(max(dim), dtype=np.float32)
        for stride in strides:
            out = Guarded((max(dim),))
            case.execute(
                strided(values, dim, stride), np.ones(dim, np.float32), strided(out.view, dim, stride)
            )
            out.check()
            if any_engine.computes:
                assert out.view.tolist() == [value + 1 for value in range(max(dim))]

    def test_in_the_declaration(self, engine, dim, strides):
        values = np.arange(max(dim), dtype=np.float32).reshape(dim)
        for stride in strides:
            case = Sum(engine, dim, stride=stride)
            out = Guarded(dim)
            case.execute(values, np.ones(dim, np.float32), out.view)
            assert (out.view == values + 1).all()
            out.check()


class TestF03TransposedOrSlicedView:
    def test_declared_as_they_lie(self, engine):
        b = np.arange(6, dtype=np.float32).reshape(3, 2).T
        c = np.arange(8, dtype=np.float32).reshape(2, 4)[:, :3]
        for view, right in ((b, [[0, 2, 4], [1, 3, 5]]), (c, [[0, 1, 2], [4, 5, 6]])):
            graph, x, y = copy_graph(engine, (2, 3), tuple(s // 4 for s in view.strides))
            out = Guarded((2, 3))
            graph.execute({x: view, y: out.view})
            assert out.view.tolist() == right
            out.check()

    def test_declared_dense_the_transposed_buffer_is_refused(self, any_engine):
        graph, x, y = copy_graph(any_engine, (2, 3), (3, 1))
        out = Guarded((2, 3))
        view = np.arange(6, dtype=np.float32).reshape(3, 2).T
        refused(lambda: graph.execute({x: view, y: out.view}), "'X' (uid 1)", "(3, 1)", "(1, 2)")
        out.untouched()

    def test_declared_dense_the_sliced_buffer_is_refused(self, any_engine):
        graph, x, y = copy_graph(any_engine, (2, 3), (3, 1))
        out = Guarded((2, 3))
        view = np.arange(8, dtype=np.float32).reshape(2, 4)[:, :3]
        refused(lambda: graph.execute({x: view, y: out.view}), "'X' (uid 1)", "(3, 1)", "(4, 1)")
        out.untouched()


class TestF04OutputWithStride0:
    def test_buffer(self, any_engine):
        case = Sum(any_engine, (5,))
        one = np.full(1, 7, np.float32)
        view = strided(one, (5,), (0,))
        case.refuses("'C' (uid 3)", "overlaps itself", a=np.arange(5, dtype=np.float32), c=view)
        assert one.tolist() == [7]

    def test_override(self, any_engine):
        case = Sum(any_engine, (5,))
        overrides = dict(
            override_uids=case.uids, override_shapes=[(5,)] * 3, override_strides=[(1,), (1,), (0,)]
        )
        case.refuses("'C' (uid 3)", "overlaps itself", **overrides)

    def test_declaration(self, any_engine):
        refused(
            lambda: Sum(any_engine, (5,), out_stride=(0,)), "'C' (uid 3)", "overlaps itself", error=ValueError
        )

    def test_the_same_buffer_as_an_input(self, any_engine):
        case = Sum(any_engine, (5,), b_stride=(0,), out_stride=(1,))
        result = case.result(np.arange(5, dtype=np.float32), strided(np.full(1, 7, np.float32), (5,), (0,)))
        if any_engine.computes:
            assert result == [7, 8, 9, 10, 11]


class TestF05NegativeStride:
    """The rule: negative strides are refused, in declarations and buffers."""

    def test_buffers(self, any_engine):
        case = Sum(any_engine, (4,))
        held = Guarded((4,), fill=np.arange(4))
        case.refuses("'A' (uid 1)", "negative stride", "(-1)", a=held.view[::-1])
        held.untouched()
        out = Guarded((4,))
        case.refuses("'C' (uid 3)", "negative stride", "(-1)", c=out.view[::-1])
        out.untouched()

    def test_other_protocols(self, any_engine):
        case = Sum(any_engine, (4,))
        held = np.arange(12, dtype=np.float32)[4:8][::-1]
        for buffer in (Producer(held), interface_of(held), DataPointer(held)):
            case.refuses("'A' (uid 1)", "negative stride", "(-1)", a=buffer)

    def test_declaration_and_override(self, any_engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        refused(lambda: graph.tensor((4,), (-1,), name="A"), "'A'", "-1", error=ValueError)
        case = Sum(any_engine, (4,))
        overrides = dict(override_uids=[case.a.uid], override_shapes=[(4,)], override_strides=[(-1,)])
        case.refuses("'A' (uid 1)", "-1", **overrides)


# ---- F06: empty buffers


def nowhere(shape: Any, **entries: Any) -> Interface:
    return Interface(shape=shape, typestr="<f4", data=(0, False), **entries)


EMPTY = {
    "no strides": nowhere,
    "strides None": lambda shape: nowhere(shape, strides=None),
    "strides given": lambda shape: nowhere(shape, strides=tuple(4 * (k + 1) for k in range(len(shape)))),
    "strides 0": lambda shape: nowhere(shape, strides=(0,) * len(shape)),
    "strides negative": lambda shape: nowhere(shape, strides=(-4,) * len(shape)),
    "real": lambda shape: np.empty(shape, np.float32),
    "reversed": lambda shape: np.empty(shape, np.float32)[::-1],
    "flat": lambda shape: np.empty(0, np.float32),
    "address": lambda shape: 0,
    "producer": lambda shape: Producer(np.empty(0, np.float32), address=0, shape=shape, strides=None),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY.keys())
class TestF06ZeroSizeOperandWithANullAddress:
    @pytest.mark.parametrize("dim", [(0,), (4, 0, 3)])
    def test_declared(self, any_engine, make, dim):
        case = Sum(any_engine, dim)
        case.execute(make(dim), make(dim), make(dim))
        case.execute(np.empty(dim, np.float32), make(dim), np.empty(dim, np.float32))

    @pytest.mark.parametrize("dim, live", [((5,), (0,)), ((4, 2, 3), (4, 0, 3)), ((4, 2, 3), (0, 2, 3))])
    def test_overridden(self, any_engine, make, dim, live):
        case = Sum(any_engine, dim, is_override_shape_enabled=True)
        for strides in ((), case.a.stride):
            overrides = dict(
                override_uids=case.uids, override_shapes=[live] * 3, override_strides=[strides] * 3
            )
            case.execute(make(live), make(live), make(live), **overrides)
            out = case.out()
            case.execute(make(live), make(live), out.view, **overrides)
            out.untouched()
        case.usable()


# ---- F08: alignment


def aligned(count: int, dtype: Any) -> Any:
    """`count` elements that start on a 64-byte boundary."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


class TestF08ContiguousButMisaligned:
    @pytest.mark.parametrize("dtype, name", [(FLOAT, "f4"), (data_type.HALF, "f2")])
    def test_alternating_on_one_graph(self, engine, dtype, name):
        case = Sum(engine, (16,), dtype=dtype, compute=FLOAT)
        buffers, outs = aligned(17, name), aligned(17, name)
        buffers[:] = np.arange(17)
        for start in (0, 1, 0, 1):
            outs[:] = -1
            case.execute(buffers[start : start + 16], np.ones(16, name), outs[start : start + 16])
            assert outs[start : start + 16].tolist() == list(range(start + 1, start + 17))
            assert outs[16 - 16 * start] == -1  # the element on the other side

    def test_addresses_that_are_no_multiple_of_the_element(self, engine):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        x = graph.tensor((1, 33), name="X")
        y = graph.gelu(graph.tanh(x)).set_output(True).set_name("Y")
        engine.build(graph)
        values = np.linspace(-3, 3, 33, dtype=np.float32)[None]
        right = np.empty_like(values)
        graph.execute({x: values, y: right})
        for shift in (1, 2, 3):
            raw, out = (np.zeros(33 * 4 + 4, np.uint8) for _ in range(2))
            view = raw[shift : shift + 132].view(np.float32).reshape(1, 33)
            target = out[shift : shift + 132].view(np.float32).reshape(1, 33)
            assert not view.flags.aligned
            view[...] = values
            graph.execute({x: view, y: target})
            assert (target == right).all()
            assert not out[:shift].any() and not out[shift + 132 :].any()


# ---- F09 - F11: data types


def unusual_types() -> None:
    """In a child process: what a producer says of its elements is compared, never used as an index."""
    values = np.array([1, 2, 3], np.float32)
    types = {
        (2, 32, 2): "float32_x2",
        (2, 7, 1): "float7",
        (99, 32, 1): "code 99",
        (255, 255, 65535): "code 255",
        (5, 64, 1): "complex64",
        (3, 32, 1): "code 3",
        (2, 0, 1): "float0",
        (17, 4, 2): "float4_e2m1fn_x2",
    }
    for engine in sums.ENGINES:
        case = Sum(engine)
        for dtype, name in types.items():
            for generation in ("legacy", "versioned"):
                for operand in ("a", "c"):
                    producer = Producer(values, dtype=dtype, generation=generation)
                    case.refuses("float32", name, f"'{operand.upper()}'", **{operand: producer})
                    assert producer.count.released == producer.count.exported == 1
        assert values.tolist() == [1, 2, 3]


class TestF09UnknownOrUnusualDtype:
    def test_bfloat16(self, engine, ml_dtypes):
        values = np.array([1, 2, 3], ml_dtypes.bfloat16)
        graph, x, y = copy_graph(engine, (3,), (1,), data_type.BFLOAT16)
        out = Guarded((3,), dtype=ml_dtypes.bfloat16)
        graph.execute({x: values, y: out.view})
        assert out.view.tolist() == [1, 2, 3]
        out.check()
        case = Sum(engine, dtype=data_type.BFLOAT16, compute=FLOAT)
        assert case.result(values, np.ones(3, ml_dtypes.bfloat16)) == [2, 3, 4]

    @pytest.mark.frameworks
    def test_bfloat16_of_torch(self, engine, ml_dtypes, torch):
        case = Sum(engine, dtype=data_type.BFLOAT16, compute=FLOAT)
        out = torch.zeros(3, dtype=torch.bfloat16)
        case.execute(torch.tensor([1, 2, 3]).bfloat16(), np.ones(3, ml_dtypes.bfloat16), out)
        assert out.tolist() == [2, 3, 4]

    def test_made_up_types(self):
        run_child(unusual_types)

    def test_complex_is_no_declared_type(self):
        graph = opgraph.pygraph()
        for dtype in (np.complex64, np.dtype("c8")):
            refused(
                lambda dtype=dtype: graph.tensor((3,), data_type=dtype),
                "complex64",
                error=opgraph.cudnnGraphNotSupportedError,
            )

    @pytest.mark.parametrize("dtype", [">f4", "c8", "f8", "g", "O", "U1", "S4", "M8[s]", "V4", [("x", "f4")]])
    def test_numpy_types_that_are_no_float32(self, any_engine, dtype):
        buffer = np.array([1, 2, 3], np.float32).astype(dtype) if dtype == ">f4" else np.zeros(3, dtype)
        spelled = {"c8": "complex64", "f8": "float64", "g": str(np.dtype("g"))}
        case = Sum(any_engine)
        word = spelled.get(dtype) if isinstance(dtype, str) else None
        case.refuses("'A' (uid 1)", "float32", word or repr(np.dtype(dtype))[6:-1], a=buffer)

    def test_a_structured_type_is_not_taken_for_its_name(self, any_engine, ml_dtypes):
        named = type("bfloat16", (np.void,), {})
        case = Sum(any_engine, dtype=data_type.BFLOAT16, compute=FLOAT)
        case.refuses("'A' (uid 1)", "bfloat16", a=np.zeros(3, np.dtype((named, [("x", "u1")]))))


INTEGER = {
    "numpy": lambda array: array,
    "legacy capsule": lambda array: Producer(array, generation="legacy", dtype=(0, array.itemsize * 8, 1)),
    "versioned capsule": lambda array: Producer(
        array, generation="versioned", dtype=(0, array.itemsize * 8, 1)
    ),
    "array interface": interface_of,
    "data_ptr": DataPointer,
    "dlpack of numpy": Dlpack,
}


class TestF10IntegersOfTheOtherWidth:
    """A bare address cannot be checked and is taken as declared."""

    @pytest.mark.parametrize("protocol", INTEGER.values(), ids=INTEGER.keys())
    @pytest.mark.parametrize("declared, given", [("int32", "int64"), ("int64", "int32")])
    def test_offsets(self, any_engine, protocol, declared, given):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        x = graph.tensor((5, 2), name="X")
        offsets = graph.tensor((3,), data_type=getattr(data_type, declared.upper()), name="offsets")
        y = graph.reduction(x, offsets, mode=reduction_mode.ADD, out_dims=(2, 2)).set_output(True)
        any_engine.build(graph)
        out = Guarded((2, 2), y.stride)
        values = np.arange(10, dtype=np.float32).reshape(5, 2)
        wrong = protocol(np.array([0, 2, 5], given))
        refused(
            lambda: graph.execute({x: values, offsets: wrong, y: out.view}),
            "'offsets' (uid 2)",
            declared,
            given,
        )
        out.untouched()
        graph.execute({x: values, offsets: protocol(np.array([0, 2, 5], declared)), y: out.view})
        if any_engine.computes:
            assert out.view.tolist() == [[2, 4], [18, 21]]

    @pytest.mark.frameworks
    @pytest.mark.parametrize("framework", ["torch", "jax"])
    def test_frameworks(self, any_engine, framework, request):
        module = request.getfixturevalue(framework)
        make = module.tensor if framework == "torch" else module.numpy.array
        case = Sum(any_engine, dtype=data_type.INT64)
        case.refuses("'A' (uid 1)", "int64", "int32", a=make(np.array([0, 2, 5], np.int32)))

    def test_a_bare_address_is_taken_as_declared(self, engine):
        held = np.array([0, 2, 5], np.int64)
        case = Sum(engine, dtype=data_type.INT32)
        assert case.result(held.ctypes.data, np.zeros(3, np.int32)) == held.view(np.int32)[:3].tolist()


class TestF11Float8AndBool:
    @pytest.mark.frameworks
    def test_float8_of_torch(self, engine, torch, ml_dtypes):
        graph, x, y = copy_graph(engine, (3,), (1,), data_type.FP8_E4M3, out=FLOAT)
        out = Guarded((3,))
        graph.execute({x: torch.tensor([1.0, 2.0, 448.0]).to(torch.float8_e4m3fn), y: out.view})
        assert out.view.tolist() == [1, 2, 448]

    def test_float8_of_ml_dtypes(self, engine, ml_dtypes):
        graph, x, y = copy_graph(engine, (3,), (1,), data_type.FP8_E4M3, out=FLOAT)
        out = Guarded((3,))
        graph.execute({x: np.array([1, 2, 448], ml_dtypes.float8_e4m3fn), y: out.view})
        assert out.view.tolist() == [1, 2, 448]
        wrong = np.array([1, 2, 448], ml_dtypes.float8_e5m2)
        refused(lambda: graph.execute({x: wrong, y: out.view}), "'X'", "float8_e4m3fn", "float8_e5m2")

    @pytest.mark.parametrize(
        "kind", ["numpy", pytest.param("torch", marks=pytest.mark.frameworks), "producer"]
    )
    @pytest.mark.parametrize("values, dim", [([True, False, True], (3,)), (True, (1,)), (False, (1,))])
    def test_masks(self, engine, kind, values, dim, request):
        graph = opgraph.pygraph(io_data_type=FLOAT)
        a, b = graph.tensor(dim, name="A"), graph.tensor(dim, name="B")
        mask = graph.tensor(dim, data_type=data_type.BOOLEAN, name="mask")
        c = graph.binary_select(a, b, mask).set_output(True)
        engine.build(graph)
        held = np.array(values)
        given = held
        if kind == "torch":
            given = request.getfixturevalue("torch").tensor(values)
        elif kind == "producer":
            given = Producer(held, dtype=(6, 8, 1))
        out = Guarded(dim)
        operands = {a: np.full(dim, 1, np.float32), b: np.full(dim, 2, np.float32), c: out.view}
        graph.execute({**operands, mask: given})
        assert out.view.tolist() == np.where(held, 1, 2).reshape(dim).tolist()
        out.check()
        refused(lambda: graph.execute({**operands, mask: held.view(np.uint8)}), "'mask'", "bool", "uint8")

    def test_bool_is_no_uint8(self, any_engine):
        case = Sum(any_engine, dtype=data_type.UINT8, compute=data_type.INT32)
        case.refuses("'A' (uid 1)", "uint8", "bool", a=np.array([True, False, True]))

    def test_a_type_that_no_engine_takes_is_refused_at_the_build(self, any_engine):
        graph = opgraph.pygraph(io_data_type=data_type.FP8_E5M3, compute_data_type=FLOAT)
        x = graph.tensor((3,), name="X")
        graph.identity(x).set_output(True)
        refused(lambda: any_engine.build(graph), "FP8_E5M3", error=opgraph.cudnnGraphNotSupportedError)


# ---- F13: read-only memory


class TestF13ReadOnlyInput:
    def make(self, kind: str, request: Any) -> Any:
        if kind == "not writeable":
            array = np.arange(6, dtype=np.float32).reshape(3, 2)
            array.setflags(write=False)
            return array
        if kind == "bytes":
            return np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), np.float32).reshape(3, 2)
        if kind == "broadcast":
            return np.broadcast_to(np.float32(5), (3, 2))
        jax = request.getfixturevalue("jax")
        array = jax.numpy.arange(6, dtype=np.float32).reshape(3, 2)
        return array if kind == "jax" else np.asarray(array)

    @pytest.mark.parametrize("kind", [
        "not writeable", "bytes", "broadcast", pytest.param("view of jax", marks=pytest.mark.frameworks),
        pytest.param("jax", marks=pytest.mark.frameworks),
    ])  # fmt: skip
    def test_input(self, any_engine, kind, request):
        buffer = self.make(kind, request)
        array = np.asarray(buffer)
        assert not array.flags.writeable
        case = Sum(
            any_engine,
            (3, 2),
            stride=tuple(s // 4 for s in array.strides),
            b_stride=(2, 1),
            out_stride=(2, 1),
        )
        before = array.tobytes()
        result = case.result(buffer, np.ones((3, 2), np.float32))
        assert array.tobytes() == before
        if any_engine.computes:
            assert result == (array + 1).tolist()
        dense = Sum(any_engine, (3, 2))
        dense.refuses("'C' (uid 3)", "read-only" if kind != "broadcast" else "overlaps itself", c=buffer)
        assert array.tobytes() == before


# ---- F32: offsets that 32 bits do not hold


class TestF32OffsetBeyond31Bits:
    def test_rows_far_apart(self, engine):
        try:
            pages = mmap.mmap(-1, 2**31 + 4)
        except (OSError, ValueError, OverflowError):
            pytest.skip("this machine maps no 2 GiB of lazily committed memory")
        memory = np.frombuffer(pages, np.int8)
        memory[:4], memory[2**31 :] = (1, 2, 3, 4), (5, 6, 7, 8)
        for view in (strided(memory, (2, 4), (2**31, 1)), memory.ctypes.data):
            graph, x, y = copy_graph(engine, (2, 4), (2**31, 1), data_type.INT8)
            out = Guarded((2, 4), dtype=np.int8)
            graph.execute({x: view, y: out.view})
            assert out.view.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
            out.check()
        # And the same as the output.
        case = Sum(engine, (2, 4), stride=(4, 1), out_stride=(2**31, 1), dtype=data_type.INT8)
        case.execute(
            np.full((2, 4), 9, np.int8), np.ones((2, 4), np.int8), strided(memory, (2, 4), (2**31, 1))
        )
        assert memory[:4].tolist() == memory[2**31 :].tolist() == [10] * 4
        assert memory[4] == memory[2**31 - 1] == 0

    @pytest.mark.parametrize("dtype, count", [(data_type.INT8, 2**32), (FLOAT, 2**34)])
    def test_a_product_of_extents_does_not_wrap(self, any_engine, dtype, count):
        case = Sum(any_engine, (65536, 65536), dtype=dtype)
        small = np.zeros(16, case.dtype)
        refused(
            lambda: case.execute(small, small, small),
            "'A' (uid 1)",
            f"{count} bytes",
            f"{small.nbytes} bytes",
        )

    def test_a_span_past_64_bits_is_refused_at_the_declaration(self, any_engine):
        refused(lambda: Sum(any_engine, (2**32, 2**32)), "64-bit", error=ValueError)
