"""`Graph`, `graph()`, `jit` and `graph_cache` on the CPU engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import opgraph as og

FLOAT = og.data_type.FLOAT
rng = np.random.default_rng(13)


def rand(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def described(**options):
    x, w, b = rand(2, 4, 8), rand(2, 8, 3), rand(1, 1, 3)
    with og.Graph(io_data_type=FLOAT, compute_data_type=FLOAT, **options) as g:
        y = g.add(g.matmul(x, w, name="mm"), b=b, name="act")
        y.set_output(True).set_name("Y")
    return g, (x, w, b), x @ w + b


def test_positional_calls():
    g, arrays, expected = described(inputs=["mm::0", "mm::1", "act::b"], outputs=["Y"])
    np.testing.assert_allclose(g(*arrays), expected, rtol=1e-6)
    with pytest.raises(RuntimeError, match="expected 3 arrays, got 2"):
        g(*arrays[:2])
    with pytest.raises(RuntimeError, match="expected an array, got str"):
        g(arrays[0], arrays[1], "x")


def test_io_may_be_named_by_array_uid_or_tensor():
    g, (x, w, b), expected = described()
    with pytest.raises(RuntimeError, match="set_io_tuples"):
        g(x, w, b)
    g.set_io_tuples([b, g.find_tensor("tensor_1"), 1], [g.find_tensor("Y").get_uid()])
    np.testing.assert_allclose(g(b, w, x), expected, rtol=1e-6)
    for inputs, outputs, words in (
        ([x, w], ["Y"], "left out"),
        ([x, w, b, b], ["Y"], "named twice"),
        ([x, w, b], ["mm::C"], "none of them"),
        ([x, w, b, "Y"], ["Y"], "none of them"),
        ([x, w, b], ["nothing"], "names no tensor"),
        (x, ["Y"], "expected a list"),
    ):
        with pytest.raises(ValueError, match=words):
            g.set_io_tuples(inputs, outputs)


def test_mapping_calls_fill_in_the_outputs():
    g, (x, w, b), expected = described()
    pack = {"mm::0": x, "mm::1": w, "act::b": b}
    result = g(pack)
    assert result is pack
    np.testing.assert_allclose(pack["act::OUT_0"], expected, rtol=1e-6)
    mine = np.zeros((2, 4, 3), np.float32)
    assert set(g({"mm::0": x, "mm::1": w, "act::b": b, "Y": mine})) == {"mm::0", "mm::1", "act::b", "Y"}
    np.testing.assert_allclose(mine, expected, rtol=1e-6)
    with pytest.raises(RuntimeError, match="no array for 'tensor_1'"):
        g({"mm::0": x, "act::b": b})


def test_outputs_come_from_the_inputs_framework(torch):
    g, arrays, expected = described(inputs=["mm::0", "mm::1", "act::b"], outputs=["Y"])
    result = g(*(torch.from_numpy(a) for a in arrays))
    assert isinstance(result, torch.Tensor)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)
    grad = torch.from_numpy(arrays[0]).requires_grad_()
    assert not g(grad, *map(torch.from_numpy, arrays[1:])).requires_grad


def test_outputs_have_the_declared_strides_and_type(ml_dtypes):
    x = rand(2, 3)
    with og.Graph(io_data_type=FLOAT, inputs=["n::input"], outputs=["a", "b"]) as g:
        g.neg(input=x, name="n").set_output(True).set_name("a").set_stride((1, 2))
        g.identity(x, name="i").set_output(True).set_name("b").set_data_type(og.data_type.BFLOAT16)
    a, b = g(x)
    assert a.strides == (4, 8)
    assert b.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(a, -x)


def test_options_are_checked():
    for name in ("inputs", "outputs", "heuristics"):
        with pytest.raises(ValueError, match=f"{name}: expected a list"):
            og.Graph(**{name: "x"})
    with pytest.raises(TypeError, match="handle"):
        og.Graph(handle=5)
    with pytest.raises(TypeError, match="unknown keyword"), og.Graph(nonsense=1):
        pass
    g = og.Graph()
    with pytest.raises(RuntimeError, match="with statement"):
        g.add(rand(2), rand(2))
    with pytest.raises(RuntimeError, match="has to end"):
        g(rand(2))


def test_a_graph_is_described_once_and_dropped_on_error():
    g, _, _ = described()
    with pytest.raises(RuntimeError, match="described once"), g:
        pass
    wrapped = og.Graph(io_data_type=FLOAT)
    with pytest.raises(ZeroDivisionError), wrapped:
        wrapped.add(rand(2), rand(2))
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="with statement"):
        wrapped.nodes  # noqa: B018


def test_blocked_and_passed_through():
    g, _, _ = described()
    for name in (
        "build",
        "execute",
        "execute_plan_at_index",
        "validate",
        "select_plan",
        "key",
        "get_plan_name_at_index",
    ):
        with pytest.raises(RuntimeError, match=name):
            getattr(g, name)
    assert g.get_workspace_size() == 0
    assert g.query_tensor_attributes_of_uid(1).get_uid() == 1
    with pytest.raises(AttributeError):
        g.nonsense  # noqa: B018


def test_node_names_are_unique():
    with pytest.raises(ValueError, match="'twice'"), og.Graph(io_data_type=FLOAT) as g:
        g.add(rand(2), rand(2), name="twice")
        g.add(rand(2), rand(2), name="twice")


def test_workspace_may_be_left_to_the_caller():
    g, arrays, expected = described(inputs=["mm::0", "mm::1", "act::b"], outputs=["Y"], workspace_alloc=False)
    with pytest.raises(RuntimeError, match="workspace="):
        g(*arrays)
    np.testing.assert_allclose(g(*arrays, workspace=np.zeros(0, np.uint8)), expected, rtol=1e-6)


def test_handles():
    for handle in ("auto", og.Handle(device="cpu")):
        g, arrays, expected = described(inputs=["mm::0", "mm::1", "act::b"], outputs=["Y"], handle=handle)
        np.testing.assert_allclose(g(*arrays), expected, rtol=1e-6)
        np.testing.assert_allclose(g(*arrays, handle=og.Handle(device="cpu")), expected, rtol=1e-6)


def test_graph_context_function():
    with og.graph(None, name="g", io_data_type=FLOAT) as (g, tensors):
        assert tensors == []
        assert (g.name, g.context.compute_data_type) == ("g", FLOAT)
        g.add(g.tensor((2,)), g.tensor((2,)))
    assert g.get_execution_plan_count() == 0


def test_jit_and_graph_cache_return_one_built_graph_per_key():
    made = []

    @og.jit(heur_modes=og.heur_mode.A)
    @og.graph_cache(key_fn=lambda n: n, maxsize=2)
    def square(n):
        with og.graph(None, io_data_type=FLOAT) as (g, tensors):
            a = g.tensor((n,))
            tensors += [a, g.mul(a, a).set_output(True)]
            made.append(n)
        return g, tensors

    g, uids = square(3)
    assert square(3)[0] is g
    assert g.get_execution_plan_count() == 1
    out = np.zeros(3, np.float32)
    g.execute({uids[0]: np.float32([1, 2, 3]), uids[1]: out})
    assert out.tolist() == [1, 4, 9]
    square(4), square(5)
    assert square(3)[0] is not g  # the oldest entry left
    assert made == [3, 4, 5, 3]
    assert square.__name__ == "square"
    with pytest.raises(TypeError, match="@jit"):
        og.jit(lambda: None)
    with pytest.raises(ValueError, match="maxsize"):
        og.graph_cache(len, maxsize=0)


def test_graph_cache_makes_a_key_once_across_threads():
    made = []
    barrier = threading.Barrier(4)

    @og.graph_cache(lambda: 0)
    def make():
        made.append(1)
        return object()

    def work():
        barrier.wait()
        make()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
