"""Dims, strides and refusals of grouped matrix products, and the order of their arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type
from opgraph import moe_grouped_matmul_mode as M
from opgraph.ir import NodeType

D = data_type
ROUTES = {"token_index": (1, 12, 1), "token_ks": (1, 12, 1)}
COMBINED = {**ROUTES, "top_k_scores": (1, 6, 2)}


def refuse(graph: Any, error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


def grouped(mode: M = M.NONE, *, types: Any = None, **given: Any) -> tuple[Any, Any]:
    """A graph with the tensors of the right dims for 3 experts and 12 rows, but for what is given."""
    graph = opgraph.pygraph(io_data_type=D.BFLOAT16)
    dims: dict[str, Any] = {"token": (1, 12, 5), "weight": (3, 5, 7), "first_token_offset": (3, 1, 1)}
    dims.update({M.GATHER: {"token_index": (1, 12, 1)}, M.SCATTER: ROUTES, M.COMBINE: COMBINED}.get(mode, {}))
    options = {key: given.pop(key) for key in ("top_k", "name", "out_dims") if key in given}
    if mode in (M.SCATTER, M.COMBINE):
        options.setdefault("top_k", 2)
    dims.update(given)
    kinds = {"first_token_offset": D.INT32, "token_index": D.INT32, "token_ks": D.INT64, **(types or {})}
    tensors = {
        port: graph.tensor(dim, data_type=kinds.get(port), name=port) for port, dim in dims.items() if dim is not None
    }
    token = tensors.pop("token")
    return graph, graph.moe_grouped_matmul(token, mode=mode, **tensors, **options)


def test_order_of_arguments():
    names = ["token", "weight", "first_token_offset", "token_index", "token_ks", "mode", "top_k", "name"]
    signature = inspect.signature(opgraph.pygraph.moe_grouped_matmul).parameters
    assert list(signature)[1:] == [*names, "top_k_scores", "compute_data_type", "out_dims"]
    assert signature["top_k_scores"].kind is inspect.Parameter.KEYWORD_ONLY
    assert signature["mode"].default is M.NONE and signature["compute_data_type"].default is D.FLOAT
    names = ["doutput", "token", "first_token_offset", "name", "compute_data_type", "out_dims"]
    assert list(inspect.signature(opgraph.pygraph.moe_grouped_matmul_bwd).parameters)[1:] == names
    graph, out = grouped(M.COMBINE, name="experts")
    node = graph.get_node("experts")
    assert node.node_type is NodeType.MOE_GROUPED_MATMUL and out.name == "experts::OUT_0"
    assert node.compute_data_type is D.FLOAT and dict(node.params) == {"mode": M.COMBINE, "top_k": 2}
    x = graph.tensor([1, 12, 5])
    for bad in (4, "COMBINE", None):
        with pytest.raises(TypeError, match="moe_grouped_matmul_mode"):
            graph.moe_grouped_matmul(x, x, x, mode=bad)
    with pytest.raises(TypeError):
        graph.moe_grouped_matmul(x, x, x, top_k=1.5)
    with pytest.raises(TypeError, match="did you mean 'top_k_scores'"):
        graph.moe_grouped_matmul(x, x, x, topk_scores=x)


@pytest.mark.parametrize(
    ("mode", "given", "dim"),
    [
        (M.NONE, {}, [1, 12, 7]),
        (M.NONE, {"first_token_offset": (4, 1, 1)}, [1, 12, 7]),
        (M.NONE, {"first_token_offset": (3,)}, [1, 12, 7]),
        (M.NONE, {"token": (1, 0, 5)}, [1, 0, 7]),
        (M.GATHER, {"token": (1, 9, 5)}, [1, 12, 7]),
        (M.GATHER, {"token_index": (4,), "top_k": 3}, [1, 4, 7]),
        (M.SCATTER, {}, [1, 12, 7]),
        (M.COMBINE, {}, [1, 6, 7]),
        (M.COMBINE, {"top_k_scores": (1, 50, 3), "top_k": 3}, [1, 50, 7]),
    ],
)
def test_output(mode, given, dim):
    graph, out = grouped(mode, **given)
    graph.validate()
    assert out.get_dim() == dim and out.get_stride() == [dim[1] * dim[2] or 7, dim[2], 1]


@pytest.mark.parametrize(
    ("mode", "given", "texts"),
    [
        (M.NONE, {"weight": None}, ["weight not set"]),
        (M.NONE, {"first_token_offset": None}, ["first_token_offset not set"]),
        (M.GATHER, {"token_index": None}, ["token_index not set", "GATHER"]),
        (M.SCATTER, {"token_index": None}, ["token_index not set"]),
        (M.SCATTER, {"token_ks": None}, ["token_ks not set", "SCATTER"]),
        (M.COMBINE, {"token_index": None}, ["token_index not set"]),
        (M.COMBINE, {"token_ks": None}, ["token_ks not set"]),
        (M.COMBINE, {"top_k_scores": None}, ["top_k_scores not set"]),
        (M.SCATTER, {"top_k_scores": (1, 6, 2)}, ["top_k_scores go with mode COMBINE"]),
        (M.NONE, {"top_k_scores": (1, 6, 2)}, ["'top_k_scores'"]),
        (M.SCATTER, {"top_k": 0}, ["top_k out of range", "1 to 3"]),
        (M.COMBINE, {"top_k": 4}, ["top_k out of range"]),
        (M.GATHER, {"top_k": 4}, ["top_k out of range"]),
        (M.NONE, {"top_k": -1}, ["top_k out of range"]),
        (M.NONE, {"token": (12, 5)}, ["token is one matrix"]),
        (M.NONE, {"token": (2, 6, 5)}, ["token is one matrix"]),
        (M.NONE, {"weight": (3, 6, 7)}, ["(E, 5, N)", "'weight'"]),
        (M.NONE, {"weight": (5, 7)}, ["(E, 5, N)"]),
        (M.NONE, {"first_token_offset": (5, 1, 1)}, ["3 or 4 elements"]),
        (M.NONE, {"first_token_offset": (2, 2, 1)}, ["is a list"]),
        (M.NONE, {"token_index": (1, 11, 1)}, ["one entry for each routed row"]),
        (M.SCATTER, {"token_ks": (1, 11, 1)}, ["token_ks has one entry"]),
        (M.COMBINE, {"top_k_scores": (1, 6, 3)}, ["(1, tokens, 2)"]),
        (M.COMBINE, {"top_k_scores": (6, 2)}, ["(1, tokens, 2)"]),
        (M.NONE, {"types": {"first_token_offset": D.FLOAT}}, ["INT32 or INT64", "FLOAT"]),
        (M.GATHER, {"types": {"token_index": D.UINT8}}, ["token_index is an integer"]),
    ],
)
def test_malformed(mode, given, texts):
    refuse(grouped(mode, **given)[0], ValueError, *texts)


def test_dims_set_on_the_output():
    refuse(grouped(out_dims=[1, 11, 7])[0], cudnnGraphNotSupportedError, "(1, 12, 7)")


# ---- backward


def backward(
    offsets: Any = (3, 1, 1), grad: Any = (1, 12, 7), token: Any = (1, 12, 5), **given: Any
) -> tuple[Any, Any]:
    graph = opgraph.pygraph(io_data_type=D.BFLOAT16)
    out = graph.moe_grouped_matmul_bwd(
        graph.tensor(grad, name="G"), graph.tensor(token, name="X"),
        graph.tensor(offsets, data_type=D.INT32), name="bwd", **given,
    )  # fmt: skip
    return graph, out


def test_gradient_of_the_weight():
    graph, out = backward()
    graph.validate()
    assert out.get_dim() == [3, 5, 7] and out.get_stride() == [35, 1, 5] and out.name == "bwd::dweight"
    node = graph.get_node("bwd")
    assert node.node_type is NodeType.MOE_GROUPED_MATMUL_BACKWARD and node.compute_data_type is D.FLOAT
    graph, out = backward(offsets=(4, 1, 1), out_dims=[3, 5, 7])
    graph.validate()
    assert out.get_stride() == [35, 1, 5]
    graph, out = backward(grad=(1, 12, 0))
    graph.validate()
    assert out.get_dim() == [3, 5, 0]


def test_backward_refusals():
    refuse(backward(grad=(1, 11, 7))[0], ValueError, "rows", "'G'")
    refuse(backward(token=(12, 5))[0], ValueError, "token is one matrix")
    refuse(backward(out_dims=[3, 5, 8])[0], cudnnGraphNotSupportedError, "(3, 5, 7)")
    refuse(backward(out_dims=[5, 5, 7])[0], cudnnGraphNotSupportedError, "(3, 5, 7)")
    graph = opgraph.pygraph(io_data_type=D.FLOAT)
    graph.moe_grouped_matmul_bwd(graph.tensor([1, 2, 3]), graph.tensor([1, 2, 3]))
    refuse(graph, ValueError, "first_token_offset not set")
