"""`graph.draw()`: well-formed SVG that names everything, with boxes apart from each other."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

import opgraph as og
from opgraph import data_type

SVG = "{http://www.w3.org/2000/svg}"


def drawn(graph: Any) -> tuple[Any, list[str], list[tuple[float, float, float, float]]]:
    """Root, texts, and boxes (left, top, right, bottom) of a drawing."""
    root = ElementTree.fromstring(graph.draw())
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    boxes = []
    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            x, y, w, h = (float(rect.get(key, "")) for key in ("x", "y", "width", "height"))
            boxes.append((x, y, x + w, y + h))
    return root, texts, boxes


def network(layers: int) -> Any:
    graph = og.pygraph("net", io_data_type=data_type.HALF, intermediate_data_type=data_type.FLOAT)
    first = x = graph.tensor((1, 64, 64), name="x")
    for i in range(layers):
        y = graph.matmul(x, graph.tensor((1, 64, 64), name=f"w{i}"), name=f"mm{i}")
        y = graph.gelu(graph.add(y, graph.tensor((1, 1, 64), name=f"b{i}")))
        x = graph.add(y, x if i % 2 else first)
    x.set_output(True).set_name("out")
    return graph


@pytest.mark.parametrize("layers", [1, 5, 20])
def test_boxes_lie_apart_and_inside(layers: int) -> None:
    graph = network(layers)
    graph.validate()
    root, texts, boxes = drawn(graph)
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(boxes) == len(graph.nodes) + len(graph._ir.all_tensors)
    assert all(x >= 0 and y >= 0 and r <= width and b <= height for x, y, r, b in boxes)
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    for name in (*graph.tensors, *(n.name for n in graph.nodes)):
        assert name in texts
    assert texts.count("1×64×64 HALF") == layers + 2


def test_the_title_names_graph_and_plan() -> None:
    graph = network(1)
    assert drawn(graph)[1][0] == "net  ·  not planned"
    graph.create_execution_plans()
    assert drawn(graph)[1][0] == "net  ·  cpu[precision=native]"
    graph.build_plan_at_index(1)
    assert drawn(graph)[1][0] == "net  ·  cpu[precision=float64]"
    assert graph._repr_svg_() == graph.draw()


def test_names_are_escaped() -> None:
    graph = og.pygraph('<g & "h">', io_data_type=data_type.FLOAT)
    a = graph.tensor((3,), name="</text><script>")
    graph.add(a, 0.5, name="a & b\0\ud800").set_output(True).set_name("x" * 200)
    _, texts, _ = drawn(graph)
    assert texts[0].startswith('<g & "h">')
    assert "</text><script>" in texts and "a & b\ufffd\ufffd" in texts and "= 0.5" in texts
    assert any(t.startswith("xxx") and t.endswith("…") and len(t) < 50 for t in texts)


def test_graphs_of_every_state() -> None:
    graph = og.pygraph("bare")
    assert drawn(graph)[2] == []
    a = graph.tensor((2, 3), name="a")
    assert len(drawn(graph)[2]) == 1
    late = graph.tensor((2, 3), name="late", is_virtual=True)
    graph._add_node("add", inputs={"IN_0": a, "IN_1": late}, outputs=("OUT_0",), params={"mode": "add"})
    graph._add_node("exp", inputs={"IN_0": a}, outputs={"OUT_0": late}, params={"mode": "exp"})
    _, texts, _ = drawn(graph)  # nodes in an order that validate() refuses, dims unknown
    assert "? ?" in texts
    ragged = og.pygraph("ragged", io_data_type=data_type.FLOAT)
    offset = ragged.tensor((3, 1, 1, 1), data_type=data_type.INT32, name="rows")
    x = ragged.tensor((2, 1, 4, 8), ragged_offset=offset, name="x")
    ragged.identity(x).set_output(True)
    assert "ragged by rows" in drawn(ragged)[1]


def test_a_large_graph_takes_moments() -> None:
    graph = network(100)
    start = time.process_time()
    graph.draw()
    assert time.process_time() - start < 10  # 1 s on an idle machine
