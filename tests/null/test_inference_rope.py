"""Dims, strides and refusals of rotary embedding, and the order of its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type
from opgraph.ir import NodeType


def graph_of() -> Any:
    return opgraph.pygraph(io_data_type=data_type.FLOAT)


def refuse(graph: Any, error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


def rope(x: Any, freqs: Any, op: str = "rope", **given: Any) -> tuple[Any, Any]:
    graph = graph_of()
    return graph, getattr(graph, op)(graph.tensor(x, name="X"), graph.tensor(freqs, name="F"), **given)


@pytest.mark.parametrize("op", ["rope", "rope_backward"])
def test_rope_order_of_arguments_and_geometry(op):
    source = "dY" if op == "rope_backward" else "input"
    parameters = list(inspect.signature(getattr(opgraph.pygraph, op)).parameters)
    assert parameters[1:6] == [source, "freqs", "output_scale", "rope_dim", "name"]
    graph = graph_of()
    x = graph.tensor([2, 3, 5, 8], [200, 8, 24, 1])
    y = getattr(graph, op)(x, graph.tensor([5, 4]), 2, 4, "r")
    graph.validate()
    assert y.get_dim() == [2, 3, 5, 8] and y.get_stride() == [200, 8, 24, 1] and y.name == "r::OUT_0"
    assert graph.get_node("r").params == {"output_scale": 2.0, "rope_dim": 4}
    assert graph.get_node("r").node_type is NodeType[op.upper()]


@pytest.mark.parametrize(
    "freqs",
    [
        (5, 8), (5, 4), (1, 8), (1, 5, 8), (3, 5, 8), (1, 1, 5, 8), (2, 1, 5, 4), (2, 3, 5, 8), (5, 1, 1, 8),
        (1, 3, 1, 8),
    ],
)  # fmt: skip
def test_angles_that_fit(freqs):
    graph, _ = rope([2, 3, 5, 8], freqs)
    graph.validate()


@pytest.mark.parametrize(
    ("x", "freqs", "given", "texts"),
    [
        ([2, 3, 5], [5, 2], {}, ("4 axes", "'X' (uid 1)")),
        ([2, 3, 5, 7], [5, 7], {}, ("even number up to 7", "'X' (uid 1)")),
        ([2, 3, 5, 8], [5, 3], {"rope_dim": 3}, ("even number up to 8", "given 3")),
        ([2, 3, 5, 8], [5, 8], {"rope_dim": 10}, ("even number up to 8",)),
        ([2, 3, 5, 8], [5, 8], {"rope_dim": -2}, ("even number up to 8",)),
        ([2, 3, 5, 8], [5, 8], {"rope_dim": 4}, ("angles do not fit", "'F' (uid 2)", "(5, 8)")),
        ([2, 3, 5, 8], [8], {}, ("angles do not fit",)),
        ([2, 3, 5, 8], [6, 8], {}, ("angles do not fit",)),
        ([2, 3, 5, 8], [6, 1, 1, 8], {}, ("angles do not fit",)),
        ([2, 3, 5, 8], [2, 1, 1, 8], {}, ("angles do not fit",)),  # one angle for each batch, at any position
        ([2, 3, 5, 8], [1, 2, 3, 5, 8], {}, ("angles do not fit",)),
    ],
)
def test_malformed_rope(x, freqs, given, texts):
    for op in ("rope", "rope_backward"):
        graph, _ = rope(x, freqs, op, **given)
        refuse(graph, ValueError, *texts)


def test_rope_refusals():
    graph, y = rope([2, 3, 5, 8], [5, 8])
    y.set_dim([2, 3, 5, 4])
    refuse(graph, cudnnGraphNotSupportedError, "(2, 3, 5, 8)", "(2, 3, 5, 4)")
    graph = graph_of()
    x, freqs = graph.tensor([2, 3, 5, 8]), graph.tensor([5, 8])
    for bad in ({"output_scale": "1"}, {"output_scale": True}, {"rope_dim": 2.0}, {"rope_dim": None}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            graph.rope(x, freqs, **bad)
    graph.rope(x, None)
    refuse(graph, ValueError, "freqs not set")
