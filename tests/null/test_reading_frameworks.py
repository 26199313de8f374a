"""Reading what frameworks hold: torch, JAX and tvm-ffi tensors, their lazy views and their tensors without memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from probe import OneOperand, install
from test_reading import check, describe, matrix, refused
from test_reading_tables import producers, sum_of

import opgraph as og

pytestmark = pytest.mark.frameworks
D = og.data_type


def torch_views(torch: Any) -> dict[str, tuple[Any, np.ndarray[Any, Any]]]:
    """Views of one tensor, each with the NumPy view of the same memory."""
    x = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    n = x.numpy()
    return {
        "dense": (x, n),
        "transposed": (x.transpose(0, 2), n.transpose(2, 1, 0)),
        "sliced": (x[1:, ::2, 1:3], n[1:, ::2, 1:3]),
        "scalar": (x[1, 2, 3], n[1, 2, 3, ...]),
        "expanded": (x[:1].expand(5, 3, 4), np.broadcast_to(n[:1], (5, 3, 4))),
        "empty": (x[:0], n[:0]),
        "rank 5": (x[:, None, :, None], n[:, None, :, None]),
        "rank 6": (x[:, None, :, None, :, None], n[:, None, :, None, :, None]),
        "rank 8": (x.reshape(1, 2, 1, 3, 1, 4, 1, 1).transpose(1, 5), n.reshape(1, 2, 1, 3, 1, 4, 1, 1).swapaxes(1, 5)),
        "parameter": (torch.nn.Parameter(x), n),
        "requires grad": (x.detach().requires_grad_(), n),
        "not a leaf": (x.detach().requires_grad_()[1], n[1]),
        "subclass": (x.as_subclass(type("Sub", (torch.Tensor,), {})), n),
    }


VIEWS = ("dense", "transposed", "sliced", "scalar", "expanded", "empty", "rank 5", "rank 6", "rank 8", "parameter")
VIEWS += ("requires grad", "not a leaf", "subclass")


@pytest.mark.parametrize("name", VIEWS)
def test_torch_views(name: str, torch: Any):
    tensor, array = torch_views(torch)[name]
    for _ in range(2):
        check(tensor, array, read_only=False)


def test_torch_data_types(torch: Any):
    for name, dtype in [
        ("bfloat16", (4, 16, 1)),
        ("float16", (2, 16, 1)),
        ("float64", (2, 64, 1)),
        ("bool", (6, 8, 1)),
        ("uint8", (1, 8, 1)),
        ("int64", (0, 64, 1)),
        ("complex64", (5, 64, 1)),
        ("float8_e4m3fn", (10, 8, 1)),
        ("float8_e5m2", (12, 8, 1)),
        ("float8_e8m0fnu", (14, 8, 1)),
    ]:
        tensor = torch.ones(2, 3).to(getattr(torch, name)).T
        told = describe(tensor)
        assert (told["dtype"], told["dims"], told["strides"]) == (dtype, (3, 2), (1, 3))
        assert told["address"] == tensor.data_ptr()
    packed = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    assert describe(packed)["dtype"] == (17, 4, 2)
    one = OneOperand((2, 8), None, D.FP4_E2M1)
    np.testing.assert_array_equal(one.give(packed), np.arange(8).reshape(2, 4))
    assert OneOperand((2, 4), None, D.UINT8).refusal(packed) == "dtype"
    half = torch.arange(6).to(torch.bfloat16)
    assert OneOperand((6,), None, D.BFLOAT16).give(half).tobytes() == half.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("rank", [1, 5, 6, 8])
def test_torch_lazy_negation(rank: int, torch: Any):
    """Inside and beyond the rank up to which torch keeps extents in the tensor itself."""
    shape = (1,) * (rank - 1) + (4,)
    x = torch.arange(4, dtype=torch.float32).reshape(shape)
    for output in (False, True):
        one = OneOperand(shape, (1,) * rank, output=output, touch=False)
        for _ in range(3):
            assert one.refusal(x) == ""
            assert one.refusal(torch._neg_view(x)) == "negative_bit"
            assert one.refusal(torch._neg_view(x).resolve_neg()) == ""
            assert one.refusal(torch._neg_view(torch._neg_view(x))) == ""
    with pytest.raises(og.OperandError, match="resolve_neg"):
        one.give(torch._neg_view(x))


def test_torch_lazy_conjugate(torch: Any):
    """No declarable data type is complex; the check is there for plans of engines that take one."""
    one = OneOperand((3,), touch=False)
    install(one.graph, one._run, facts={"X": {"dtype": (5, 64, 1)}})
    x = torch.ones(3, dtype=torch.complex64)
    assert one.refusal(x) == ""
    assert one.refusal(x.conj()) == "conjugate"
    assert one.refusal(x.conj().resolve_conj()) == ""
    assert one.refusal(torch._neg_view(x)) == "negative_bit"
    assert OneOperand((3,), (2,), touch=False).refusal(x.conj().imag) == "negative_bit"  # torch negates lazily here


@pytest.mark.parametrize("rank", [1, 5, 6])
def test_torch_tensors_that_require_grad(rank: int, torch: Any):
    shape = (1,) * (rank - 1) + (4,)
    memory = torch.zeros(shape)
    reader, writer = OneOperand(shape), OneOperand(shape, (1,) * rank, output=True)
    leaf = torch.zeros(shape, requires_grad=True)
    kinds = [leaf, leaf * 2, torch.nn.Parameter(memory.clone())]
    with torch.no_grad():
        for tensor in kinds:
            assert reader.refusal(tensor) == "" and writer.refusal(tensor) == "requires_grad"
    for tensor in kinds:
        assert reader.refusal(tensor) == ""
        assert writer.refusal(tensor) == "requires_grad"
        assert not tensor.detach().any(), "written"
        assert writer.refusal(tensor.detach()) == ""
        assert tensor.detach().flatten().tolist() == [1, 2, 3, 4]
        tensor.detach().zero_()
    with torch.inference_mode():
        assert writer.refusal(torch.zeros(shape)) == ""
    with torch.no_grad():
        assert writer.refusal(leaf.detach()) == ""


def test_torch_tensors_without_memory(torch: Any):
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{function} was called")

    freed = torch.zeros(2, 3)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(2, 3)
    for tensor in (fake, freed, Wrapper(torch.zeros(2, 3))):
        for output in (False, True):
            one = OneOperand((2, 3), (3, 1), output=output)
            with pytest.raises(og.OperandError, match=r"null.*fake and meta tensors hold no data") as caught:
                one.give(tensor)
            assert caught.value.rule == "null_address"
    with FakeTensorMode():  # executing inside the mode is no different
        assert OneOperand((2, 3)).refusal(torch.empty(2, 3)) == "null_address"
    assert OneOperand((2, 3)).refusal(torch.empty(2, 3, device="meta")) == "producer"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_torch_layouts_that_have_no_strides(torch: Any):
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to_mkldnn()):
        refused(tensor, "cannot be read", dims=(3, 3))


@pytest.mark.parametrize(
    ("name", "declared", "dtype"),
    [
        ("float32", D.FLOAT, (2, 32, 1)),
        ("bfloat16", D.BFLOAT16, (4, 16, 1)),
        ("float16", D.HALF, (2, 16, 1)),
        ("int32", D.INT32, (0, 32, 1)),
        ("uint8", D.UINT8, (1, 8, 1)),
        ("bool", D.BOOLEAN, (6, 8, 1)),
        ("float8_e4m3fn", D.FP8_E4M3, (10, 8, 1)),
    ],
)
def test_jax_arrays_are_inputs_only(name: str, declared: Any, dtype: Any, jax: Any):
    x = jax.numpy.arange(6).reshape(2, 3).astype(name)
    told = describe(x)
    assert (told["dims"], told["strides"], told["dtype"], told["read_only"]) == ((2, 3), (3, 1), dtype, True)
    expected = np.asarray(x)
    got = OneOperand((2, 3), None, declared).give(x)
    assert got.tobytes() == expected.tobytes()
    assert OneOperand((2, 3), (3, 1), declared, output=True).refusal(x) == "read_only"
    assert np.asarray(x).tobytes() == expected.tobytes()
    assert OneOperand((3, 3), None, declared).refusal(x) == "bytes"
    scalar = x[1, 2]
    assert OneOperand((1,), None, declared).give(scalar).tobytes() == np.asarray(scalar).tobytes()


def test_jax_values_that_are_no_buffers(jax: Any):
    gone = jax.numpy.ones((2, 3))
    gone.delete()
    with pytest.raises(og.OperandError, match="deleted"):
        OneOperand((2, 3)).give(gone)
    with pytest.raises(TypeError, match="Tracer"):
        jax.jit(lambda x: OneOperand((2, 3)).give(x))(jax.numpy.ones((2, 3)))
    with pytest.raises(TypeError, match="not a buffer"):
        OneOperand((2, 3)).give(jax.ShapeDtypeStruct((2, 3), np.float32))
    with pytest.raises(TypeError, match="not a buffer"):
        OneOperand((1,)).give(jax.random.key(0))


def test_numpy_views_of_jax_arrays_are_read_only(jax: Any):
    x = np.asarray(jax.numpy.ones((2, 3)))
    assert OneOperand((2, 3)).refusal(x) == ""
    assert OneOperand((2, 3), (3, 1), output=True).refusal(x) == "read_only"


def test_tvm_ffi_tensors(tvm_ffi: Any):
    x = matrix()
    check(tvm_ffi.from_dlpack(x), x)
    turned = x.T
    check(tvm_ffi.from_dlpack(turned), turned)
    one = OneOperand((2, 3), (3, 1), output=True)
    one.give(tvm_ffi.from_dlpack(x))
    np.testing.assert_array_equal(x.ravel(), np.arange(1, 7))


@pytest.mark.parametrize("engine", ["null", "cpu"])
def test_a_pack_of_every_framework(engine: str, torch: Any, jax: Any, tvm_ffi: Any):
    x = matrix()
    buffers = [
        torch.from_numpy(x.copy()),
        jax.numpy.asarray(x),
        tvm_ffi.from_dlpack(x),
        torch.nn.Parameter(torch.from_numpy(x.copy())),
        *producers(x).values(),
    ]
    for turn in range(len(buffers)):
        order = buffers[turn:] + buffers[:turn]
        np.testing.assert_allclose(sum_of(order, engine), x * len(buffers))
