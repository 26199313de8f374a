"""Field cases about devices, streams and tracing."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import sums
from producers import CPU, CUDA, Producer
from sums import Engine, ScratchEngine, Sum, refused, run_child

import opgraph
from opgraph import _native, data_type
from opgraph.planning.registry import registry

FLOAT = data_type.FLOAT


# ---- F17: devices


def foreign_devices() -> None:
    """In a child process: address 16 is never looked at."""
    for engine in sums.ENGINES:
        case = Sum(engine)
        values = np.ones(3, np.float32)
        for device, name in (
            (CUDA, "cuda:0"),
            ((2, 3), "cuda:3"),
            ((99, 0), "99"),
            ((10, 0), "rocm"),
            ((-1, 0), "-1"),
        ):
            for told in (device, CPU):  # the capsule may say something else than the query
                for operand in "abc":
                    producer = Producer(values, address=16, device=device, told=told)
                    case.refuses(f"'{operand.upper()}'", name, "cpu", **{operand: producer})
                    assert producer.count.exported == producer.count.released == (told == CPU)
            producer = Producer(values, device=device, address=16)
            refused(lambda p=producer, c=case: c.execute(workspace=p), "workspace", name)

        interface = {"version": 3, "shape": (3,), "typestr": "<f4", "data": (16, False)}
        cuda_array = type("CudaArray", (), {"__cuda_array_interface__": interface})()
        case.refuses("'B' (uid 2)", "cuda:0", "cpu", b=cuda_array)


class TestF17OperandsOnDifferentDevices:
    def test_foreign_devices(self):
        run_child(foreign_devices)

    def test_ids_of_host_devices_are_not_compared(self, any_engine):
        """The rule: host memory is host memory, whatever device id, and pinned memory too."""
        case = Sum(any_engine)
        for device in ((1, 3), (1, -1), (3, 0), (3, 1), (11, 0)):
            result = case.result(Producer(np.ones(3, np.float32), device=device))
            assert result == [3, 3, 3] or not any_engine.computes

    def test_a_handle_of_another_device(self, any_engine):
        case = Sum(any_engine)
        handle = opgraph.Handle(ordinal=0)
        case.refuses("cuda:0", "cpu", handle=handle)
        for wrong in (0, 4660, "cpu", object()):
            case.refuses("Handle", error=TypeError, handle=wrong)
        case.execute(handle=opgraph.Handle(device="cpu"))


# ---- F18, F19: streams


class Recording:
    """Notes how it is asked. A CUDA one raises, since there is no memory to show."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device
        self.array = np.zeros(3, np.float32)
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        if self.device[0] != 1:
            raise BufferError("recorded")
        return self.array.__dlpack__(**kwargs)


class Older(Recording):
    """From before `max_version`."""

    def __dlpack__(self, stream: Any = "omitted") -> Any:
        self.asked.append({"stream": stream})
        if self.device[0] != 1:
            raise BufferError("recorded")
        return self.array.__dlpack__()


class TestF18StreamValueGivenToProducers:
    def test_cpu(self, any_engine):
        handle = opgraph.Handle(device="cpu", stream=0x1234)
        for stream in (0, handle.stream):
            producer = Recording(CPU)
            _native.describe(producer, stream)
            assert producer.asked[0].get("stream") is None
        case = Sum(any_engine)
        producer = Recording(CPU)
        case.execute(producer, handle=handle)
        assert producer.asked[0].get("stream") is None
        older = Older(CPU)
        case.execute(older, handle=handle)
        assert older.asked == [{"stream": "omitted"}]

    @pytest.mark.parametrize("device, default", [(2, 1), (13, 1), (10, 0)], ids=["cuda", "managed", "rocm"])
    @pytest.mark.parametrize("kind", [Recording, Older])
    def test_gpu(self, device, default, kind):
        """The legacy default stream is 1 for CUDA (0 is ambiguous there), 0 for ROCm."""
        handle = opgraph.Handle(ordinal=0)
        given = []
        for stream in (None, 0, 0x1234):
            if stream is not None:
                opgraph.set_stream(handle, stream)
            producer = kind((device, 0))
            refused(
                lambda p=producer, s=stream: (
                    _native.describe(p) if s is None else _native.describe(p, handle.stream)
                ),
                "recorded",
                error=BufferError,
            )
            given.append(producer.asked[0]["stream"])
        assert given == [default, default, 4660]


class TestF19WhichStreamIsUsed:
    class Stream:
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

    @pytest.mark.parametrize("value, raw", [
        (7, 7), (0, 0), (2**63 - 1, 2**63 - 1), (np.int64(9), 9), (np.uint64(2**40), 2**40), (None, 0),
        (Stream(cuda_stream=11), 11), (Stream(ptr=12), 12), (Stream(handle=13), 13),
        (Stream(ptr=ctypes.c_void_p(14)), 14), (Stream(handle=ctypes.c_void_p(0)), 0),
        (Stream(__cuda_stream__=lambda: (0, 15)), 15),
    ])  # fmt: skip
    def test_accepted(self, value, raw):
        handle = opgraph.Handle(device="cpu", stream=99)
        opgraph.set_stream(handle, value)
        assert opgraph.get_stream(handle) == handle.stream == raw
        handle.stream = 99
        handle.stream = value
        assert handle.stream == raw
        assert opgraph.Handle(device="cpu", stream=value).stream == raw

    @pytest.mark.parametrize("value, error", [
        (-5, ValueError), (np.int64(-5), ValueError), ("0", TypeError), (b"0", TypeError), (True, TypeError),
        (1.0, TypeError), (object(), TypeError), (2**64, (OverflowError, ValueError)),
        (Stream(cuda_stream=-1), ValueError), (Stream(cuda_stream="0"), TypeError),
    ])  # fmt: skip
    def test_refused(self, value, error):
        handle = opgraph.Handle(device="cpu", stream=7)
        refused(lambda: opgraph.set_stream(handle, value), error=error)
        refused(lambda: setattr(handle, "stream", value), error=error)
        refused(lambda: opgraph.Handle(device="cpu", stream=value), error=error)
        assert handle.stream == 7

    @pytest.mark.frameworks
    def test_stream_of_torch(self, torch):
        handle = opgraph.Handle(device="cpu")
        opgraph.set_stream(handle, self.Stream(cuda_stream=torch.empty(0).data_ptr() or 5))
        assert handle.stream == 5

    def test_the_stream_of_a_call(self):
        """The call's handle, else the graph's, else the default, as an engine sees it."""
        seen: list[int] = []
        registry.register(ScratchEngine(lambda pack: seen.append(pack.stream)))
        try:
            for options in ({}, {"handle": opgraph.Handle(device="cpu", stream=21)}):
                case = Sum(Engine("scratch", {"bytes": 256}), **options)
                for handle in (None, opgraph.Handle(device="cpu", stream=22), opgraph.Handle(device="cpu")):
                    case.execute(handle=handle, workspace=np.zeros(256, np.uint8))
        finally:
            registry.unregister("scratch")
        assert seen == [0, 22, 0, 21, 22, 0]


# ---- F42: tracing


def tracing() -> None:
    """In a child process, where torch and its compiler leave no state behind."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    for engine in sums.ENGINES:
        case = Sum(engine)
        with FakeTensorMode():
            fake = torch.empty(3)
            for operand in "abc":
                case.refuses(f"'{operand.upper()}'", "no memory", **{operand: fake})
        case.refuses("'A' (uid 1)", "no memory", a=fake)
        case.refuses("'C' (uid 3)", "no memory", c=fake)
        for kind in ({"device": "meta"}, {"layout": torch.sparse_coo}):
            case.refuses("'A' (uid 1)", a=torch.empty(3, **kind))
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        case.refuses("'A' (uid 1)", "no memory", a=freed)
        for transform in (torch.func.grad, torch.func.vmap, torch.func.functionalize):

            def inside(x, case=case, transform=transform):
                case.refuses("'A' (uid 1)", a=x)
                return x.sum()

            transform(inside)(torch.ones(2, 3) if transform is torch.func.vmap else torch.ones(3))

        out = torch.zeros(3)
        unbuilt = opgraph.pygraph(io_data_type=FLOAT)
        x = unbuilt.tensor((3,))
        y = unbuilt.add(x, x).set_output(True)
        two = np.full(3, 2, np.float32)

        def eager(value, case=case, out=out, unbuilt=unbuilt, x=x, y=y, two=two):
            value = value * 2
            case.execute(value, two, out)
            first = out + 1
            unbuilt.execute({x: value, y: out})
            return first, out * 1

        bound = case.graph.bind({case.a: out, case.b: two, case.c: torch.zeros(3)})

        def with_bound_call(value, case=case, bound=bound, out=out):
            bound.update({case.a: value, case.c: out})
            bound()
            return out - 1

        def refusing(value, case=case):
            try:
                case.execute(value[:2])
            except ValueError as error:
                return value + len(type(error).__name__)
            raise AssertionError("accepted")

        for function in (eager, with_bound_call, refusing):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="eager")
            for number in (1.0, 3.0):
                value = torch.full((3,), number)
                out.fill_(-1)
                wanted = [each.tolist() for each in function(value)]
                out.fill_(-1)
                assert [each.tolist() for each in compiled(value)] == wanted
        whole = torch.compile(eager, fullgraph=True, backend="eager")
        try:
            whole(torch.ones(3))
        except Exception as error:
            assert "execute" in str(error)
        else:
            raise AssertionError("a full graph was claimed")


@pytest.mark.frameworks
@pytest.mark.slow
def test_f42_fake_tensors_while_tracing(torch):
    run_child(tracing)


@pytest.mark.frameworks
def test_f42_tracers_and_deleted_arrays_of_jax(any_engine, jax):
    case = Sum(any_engine)

    def traced(x):
        case.refuses("'A' (uid 1)", error=(TypeError, ValueError), a=x)
        return x

    jax.jit(traced)(jax.numpy.ones(3))
    jax.vmap(traced)(jax.numpy.ones((2, 3)))
    gone = jax.numpy.ones(3)
    gone.delete()
    case.refuses("'A' (uid 1)", "deleted", a=gone)
