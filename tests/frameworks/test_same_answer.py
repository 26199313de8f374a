"""The same graph gives the same bits, whatever the buffers are: NumPy, torch, JAX (inputs), addresses, or a
mixture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from conformance import Problem, run_case
from conformance.attention import Attention, bshd
from conformance.matmul import matmul_problem
from conformance.memory import AddressBuffer, NumpyBuffer, numpy_dtype, strided
from conformance.norm import Norm, NormBackward
from conformance.pointwise import CASES as POINTWISE
from conformance.reduction import reduction_problem

from opgraph import data_type, reduction_mode

pytestmark = pytest.mark.frameworks

FLOATS = [data_type.FLOAT, data_type.HALF, data_type.BFLOAT16]


class TorchBuffer(NumpyBuffer):
    """A strided torch tensor over the image."""

    def __init__(
        self, image: Any, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        super().__init__(image, offset, dims, strides, dtype)
        import torch

        element = getattr(torch, "bool" if dtype is data_type.BOOLEAN else numpy_dtype(dtype).name)
        room = torch.from_numpy(image)[offset : len(image) - offset].view(element)
        self.operand = room.as_strided(tuple(dims), tuple(strides))


class JaxBuffer(NumpyBuffer):
    """A JAX array of the elements in storage order: JAX arrays are always row-major."""

    def __init__(
        self, image: Any, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        super().__init__(image, offset, dims, strides, dtype)
        import jax

        order = sorted(range(len(dims)), key=lambda axis: -strides[axis])
        self.operand = jax.device_put(
            strided(image, offset, dims, strides, numpy_dtype(dtype)).transpose(order).copy()
        )


def problems(dtype: data_type) -> Iterator[Problem]:
    rng = np.random.default_rng(5)
    ops = {case.id: case for case in POINTWISE}
    for op in ("gelu", "add_square", "softplus_backward", "cmp_gt"):
        yield ops[op].problem("dense", rng, ([3, 17],), (None,), dtype)
        yield ops[op].problem("transposed", rng, ([3, 17],), ((1, 3),), dtype)
    yield matmul_problem("dense", rng, [2, 33, 17], [1, 17, 9], None, None, dtype)
    yield matmul_problem("B transposed", rng, [2, 33, 17], [2, 17, 9], None, (153, 1, 17), dtype)
    x = rng.standard_normal((3, 65, 4))
    for mode in (reduction_mode.ADD, reduction_mode.NORM2, reduction_mode.AMAX):
        yield reduction_problem("", x, [3, 1, 4], None, mode, dtype)
    yield Norm("layernorm").problem("", rng, [5, 33], [1, 33], None, dtype)
    yield NormBackward("rmsnorm_backward").problem("", rng, [5, 9], [1, 9], None, dtype)
    yield Attention().problem(
        "BSHD", rng, dtype, (2, 4, 9, 8), (2, 9), layout=bshd, sink=True, lengths=([9, 3], [4, 9]),
        options={"use_causal_mask": True}, band={"right": 0},
    )  # fmt: skip


def mixture(*makers: Any) -> Any:
    """A maker that takes each operand from the next framework."""
    turn = cycle(makers)
    return lambda *arguments: next(turn)(*arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_every_kind_of_buffer_gives_the_same_bits(dtype, precision, torch, jax, ml_dtypes):
    makers = {
        "torch": (TorchBuffer, TorchBuffer),
        "JAX": (JaxBuffer, NumpyBuffer),
        "addresses": (AddressBuffer, AddressBuffer),
        "a mixture": (
            mixture(JaxBuffer, TorchBuffer, AddressBuffer, NumpyBuffer), mixture(TorchBuffer, NumpyBuffer)
        ),
    }  # fmt: skip
    knobs = {"precision": precision}
    ran = 0
    for problem in problems(dtype):
        truth = problem.solve(torch)
        expected = run_case(problem, "cpu", knobs, truth=truth)
        for kind, (make_input, make_output) in makers.items():
            found = run_case(problem, "cpu", knobs, make_output, make_input=make_input, truth=truth)
            for name, values in expected.items():
                assert found[name].tobytes() == values.tobytes(), f"{problem.id}: {name} differs with {kind}"
            ran += 1
    assert ran > 40


@pytest.mark.parametrize("kind", [TorchBuffer, AddressBuffer])
def test_padded_layouts_too(kind, precision, torch):
    rng = np.random.default_rng(6)
    for problem in (
        matmul_problem(
            "", rng, [2, 5, 7], [2, 7, 3], (50, 9, 1), (40, 5, 1), data_type.FLOAT, out_stride=(60, 11, 2)
        ),
        Norm("rmsnorm").problem("", rng, [4, 6], [1, 6], (9, 1), data_type.HALF, out_stride=(1, 4)),
    ):
        expected = run_case(problem, "cpu", {"precision": precision})
        found = run_case(problem, "cpu", {"precision": precision}, kind)
        assert all(found[name].tobytes() == values.tobytes() for name, values in expected.items())
