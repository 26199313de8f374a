"""The fused engine on the conformance suite: every pointwise operator, every storage type, every kind of buffer."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from conformance import run_case
from conformance.cases import CASES
from device_memory import AddressBuffer, CupyBuffer, TorchBuffer

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type
from opgraph.engines.fused.pointwise import FORMULAS, STORAGE

POINTWISE = [case for case in CASES if case.op in FORMULAS or case.op == "gen_index"]
PARAMS = [
    pytest.param(case, dtype, id=f"{case.id}-{dtype.name}")
    for case in POINTWISE
    for dtype in case.data_types
    if dtype in STORAGE and getattr(case, "source", dtype) in STORAGE
]


@pytest.mark.parametrize(("case", "dtype"), PARAMS)
def test_case(case: Any, dtype: data_type):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    ran, declined = 0, []
    for problem in case.problems(dtype, rng):
        truth = problem.solve(torch if problem.needs_torch else np)
        try:
            run_case(problem, "fused", {}, TorchBuffer, truth=truth, device="cuda:0")
        except cudnnGraphNotSupportedError as error:
            declined.append(str(error))
        else:
            ran += 1
    assert ran, f"every problem was declined: {declined[0]}"


@pytest.mark.parametrize("maker", [CupyBuffer, AddressBuffer])
@pytest.mark.parametrize("op", ["add", "gelu", "binary_select"])
def test_other_buffers_give_the_same_bytes(op: str, maker: Any):
    pytest.importorskip("torch")
    if maker is CupyBuffer:
        pytest.importorskip("cupy")
    case = next(c for c in POINTWISE if c.op == op)
    for problem in case.problems(data_type.FLOAT, np.random.default_rng(3)):
        truth = problem.solve(np)
        ours = run_case(problem, "fused", {}, maker, truth=truth, device="cuda:0")
        theirs = run_case(problem, "fused", {}, TorchBuffer, truth=truth, device="cuda:0")
        for name, values in ours.items():
            np.testing.assert_array_equal(values.view(np.uint8), theirs[name].view(np.uint8))


@pytest.fixture
def chain():
    """y = gelu(x + b) * x on [64, 48, 256] bfloat16, built for the device."""
    torch = pytest.importorskip("torch")
    graph = opgraph.pygraph(
        io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT
    )
    x, b = graph.tensor([64, 48, 256], name="x"), graph.tensor([1, 1, 256], name="b")
    y = graph.mul(graph.gelu(graph.bias(x, b)), x).set_output(True).set_name("y")
    graph.build(engine="fused", device="cuda:0")

    def want(xs, bs):
        return torch.nn.functional.gelu(xs.double() + bs.double()) * xs.double()

    return torch, graph, (x, b, y), want


def test_misaligned_operands_run_the_other_kernel(chain):
    torch, graph, (x, b, y), want = chain
    flat = torch.randn(64 * 48 * 256 + 8, device="cuda", dtype=torch.bfloat16)
    bs = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    for shift in (0, 1, 8, 3):
        xs = flat[shift : shift + 64 * 48 * 256].view(64, 48, 256)
        ys = torch.full_like(xs, float("nan"))
        graph.execute({x: xs, b: bs, y: ys})
        torch.testing.assert_close(ys.double(), want(xs, bs), rtol=2e-2, atol=2e-2)


def test_the_current_stream_of_the_framework_is_used(chain):
    torch, graph, (x, b, y), want = chain
    xs = torch.zeros(64, 48, 256, device="cuda", dtype=torch.bfloat16)
    bs = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    ys = torch.zeros_like(xs)
    source = torch.randn_like(xs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: work elsewhere would read the zeros
        xs.copy_(source)
        graph.execute({x: xs, b: bs, y: ys})
    side.synchronize()
    torch.testing.assert_close(ys.double(), want(source, bs), rtol=2e-2, atol=2e-2)
    ys.zero_()
    xs.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        xs.copy_(source)
    handle = opgraph.create_handle()
    opgraph.set_stream(handle, side)
    graph.execute({x: xs, b: bs, y: ys}, handle=handle)
    side.synchronize()
    torch.testing.assert_close(ys.double(), want(source, bs), rtol=2e-2, atol=2e-2)


def test_execute_can_be_captured_and_replayed(chain):
    torch, graph, (x, b, y), want = chain
    xs = torch.randn(64, 48, 256, device="cuda", dtype=torch.bfloat16)
    bs = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    ys = torch.zeros_like(xs)
    graph.execute({x: xs, b: bs, y: ys})
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute({x: xs, b: bs, y: ys})
    xs.copy_(torch.randn_like(xs))
    captured.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(ys.double(), want(xs, bs), rtol=2e-2, atol=2e-2)


def test_host_buffers_are_refused(chain):
    torch, graph, (x, b, y), _ = chain
    on_device = torch.zeros(64, 48, 256, device="cuda", dtype=torch.bfloat16)
    bs = torch.zeros(1, 1, 256, dtype=torch.bfloat16)
    with pytest.raises(opgraph.OperandError, match=r"'b'.*device"):
        graph.execute({x: on_device, b: bs, y: torch.empty_like(on_device)})


def test_threads_with_their_own_streams(chain):
    import threading

    torch, graph, (x, b, y), want = chain
    bs = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(50):
                    xs = torch.randn(64, 48, 256, device="cuda", dtype=torch.bfloat16)
                    ys = torch.empty_like(xs)
                    graph.execute({x: xs, b: bs, y: ys})
                    stream.synchronize()
                    torch.testing.assert_close(ys.double(), want(xs, bs), rtol=2e-2, atol=2e-2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_offsets_beyond_2_to_the_31():
    torch = pytest.importorskip("torch")
    graph = opgraph.pygraph(io_data_type=data_type.INT8, compute_data_type=data_type.INT32)
    a = graph.tensor([2, 64], [2**31, 1], name="a")
    c = graph.add(a, a).set_output(True).set_name("c").set_dim([2, 64]).set_stride([2**31, 1])
    graph.build(engine="fused", device="cuda:0")
    memory = torch.zeros(2**31 + 64, dtype=torch.int8, device="cuda")
    out = torch.zeros_like(memory)
    memory[:64] = 1
    memory[2**31 :] = 2
    graph.execute({a: memory, c: out})
    assert out[:64].eq(2).all() and out[2**31 :].eq(4).all() and int(out[64 : 2**31].count_nonzero()) == 0
