"""A graph as SVG text: operators and tensors in layers from inputs to outputs, after Sugiyama.

Layers come from the data flow, the order inside a layer from barycenter sweeps that keep the fewest crossings, and
the places from a least-squares fit under the minimum distances. A tensor that is read further below gets a lane
through the layers between, one for all of its readers.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

if TYPE_CHECKING:
    from opgraph.ir.node import Node
    from opgraph.ir.program import GraphIR
    from opgraph.ir.tensor import Tensor

__all__ = ["svg"]

_FONT = 12  # px, monospace
_ADVANCE = 0.61  # width of a character, in font sizes
_LINE = 15
_SMALL = 9  # port names
_PAD = 8
_GAP_X, _GAP_Y = 22, 30
_LANE = 10  # width kept free for an edge that passes a layer
_MARGIN = 16
_LONGEST = 44  # characters of a line
_SWEEPS = 12

# fill, border, dash of boxes by role
_LOOKS = {
    "operator": ("#dbe8ff", "#3568b8", ""),
    "input": ("#e3f4e1", "#4b8f45", ""),
    "output": ("#ffe9cf", "#c07a1e", ""),
    "virtual": ("#ffffff", "#9a9a9a", "4 3"),
}


class _Place:
    """One thing in a layer: an operator, a tensor, or (without lines) an edge passing through."""

    def __init__(self, look: str, lines: Sequence[str], hint: str = "") -> None:
        self.look = look
        self.lines = [_shortened(line) for line in lines]
        self.hint = hint
        self.above: list[_Edge] = []  # edges from the layer above, and to the one below
        self.below: list[_Edge] = []
        self.layer = 0
        self.x = 0.0  # centre
        self.y = 0.0  # top
        self.width = float(_LANE)
        self.height = 0.0

    def measure(self) -> None:
        if not self.lines:
            return
        text = max(_width(line, _FONT) for line in self.lines)
        self.width = max(text, _ports_width(self.above), _ports_width(self.below)) + 2 * _PAD
        rows = any(e.into for e in self.above) + any(e.out_of for e in self.below)
        self.height = len(self.lines) * _LINE + rows * (_SMALL + 3) + _PAD


class _Edge:
    """An edge between neighbouring layers. `out_of` and `into` are port names at its ends."""

    def __init__(self, start: _Place, end: _Place, out_of: str = "", into: str = "") -> None:
        self.start, self.end = start, end
        self.out_of, self.into = out_of, into
        self.x0 = self.x1 = 0.0
        start.below.append(self)
        end.above.append(self)


def svg(ir: GraphIR, plan: str | None) -> str:
    """The drawing of a graph, with the name of its plan (None: not planned) in the title."""
    layers, edges = _layered(ir)
    for place in (p for layer in layers for p in layer):
        place.measure()
    layers = _ordered(layers)
    _placed(layers)
    title = f"{ir.name}  \N{MIDDLE DOT}  {plan or 'not planned'}"
    return _written(layers, edges, title)


# ---- layers


def _layered(ir: GraphIR) -> tuple[list[list[_Place]], list[_Edge]]:
    """Places by layer, and the edges between neighbouring layers."""
    tensors = {t: _tensor_place(t) for t in ir.all_tensors}
    nodes = {n: _node_place(n) for n in ir.nodes}
    depth: dict[Any, int] = {}
    for node in ir.nodes:
        depth[node] = max((depth[t] + 1 for t in node.inputs.values() if t in depth), default=1)
        for tensor in node.outputs.values():
            depth[tensor] = depth[node] + 1
    for node in ir.nodes:  # inputs of the graph stand right above their first reader
        for tensor in node.inputs.values():
            if tensor._producer is None:
                depth[tensor] = min(depth.get(tensor, depth[node] - 1), depth[node] - 1)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=0) + 1)]

    def put(place: _Place, layer: int) -> None:
        place.layer = layer
        layers[layer].append(place)

    for tensor, place in tensors.items():
        put(place, depth.get(tensor, 0))
    for node, place in nodes.items():
        put(place, depth[node])
    edges: list[_Edge] = []
    lanes: dict[_Place, list[_Place]] = {}  # below a tensor, by layer

    def connect(start: _Place, end: _Place, out_of: str, into: str) -> None:
        if end.layer <= start.layer:
            return  # an order of nodes that validate() will refuse
        passed = lanes.setdefault(start, [start])
        for layer in range(start.layer + len(passed), end.layer):
            lane = _Place("lane", ())
            put(lane, layer)
            edges.append(_Edge(passed[-1], lane))
            passed.append(lane)
        edges.append(_Edge(passed[end.layer - start.layer - 1], end, out_of, into))

    for node in ir.nodes:
        for port, tensor in node.inputs.items():
            connect(tensors[tensor], nodes[node], "", port if len(node.inputs) > 1 else "")
        for port, tensor in node.outputs.items():
            connect(nodes[node], tensors[tensor], port if len(node.outputs) > 1 else "", "")
    return layers, edges


def _tensor_place(tensor: Tensor) -> _Place:
    dims = "\N{MULTIPLICATION SIGN}".join(map(str, tensor.dim)) or "?"
    kind = "?" if tensor.data_type is None else tensor.data_type.name
    lines = [tensor.name, f"{dims} {kind}"]
    if tensor.pass_by_value is not None:
        lines.append(f"= {tensor.pass_by_value}")
    elif tensor.is_pass_by_value:
        lines.append("by value")
    if tensor.ragged_offset is not None:
        lines.append(f"ragged by {tensor.ragged_offset.name}")
    look = "virtual" if tensor.is_virtual else "input" if tensor._producer is None else "output"
    hint = f"{tensor.name}: uid {tensor.uid}, dim {tensor.dim}, stride {tensor.stride}, {kind}, {look}"
    return _Place(look, lines, hint)


def _node_place(node: Node) -> _Place:
    params = ", ".join(f"{key}={value}" for key, value in node.params.items() if value is not None)
    own = node.name if node.name != node.op else ""
    return _Place("operator", [line for line in (node.op, own) if line], f"{node.op} {node.name}({params})")


# ---- order within the layers


def _ordered(layers: list[list[_Place]]) -> list[list[_Place]]:
    layers = [list(layer) for layer in layers]
    best, fewest = layers, _crossings(layers)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        spots: dict[_Place, int] = {p: i for layer in layers for i, p in enumerate(layer)}
        order = range(1, len(layers)) if down else range(len(layers) - 2, -1, -1)
        layers = [list(layer) for layer in layers]
        for i in order:
            means = {p: _mean(p, down, spots) for p in layers[i]}
            layers[i].sort(key=means.__getitem__)
            spots.update((p, k) for k, p in enumerate(layers[i]))
        found = _crossings(layers)
        if found < fewest:
            best, fewest = layers, found
    return best


def _mean(place: _Place, down: bool, spots: dict[_Place, int]) -> float:
    ends = [e.start for e in place.above] if down else [e.end for e in place.below]
    return sum(spots[p] for p in ends) / len(ends) if ends else float(spots[place])


def _crossings(layers: list[list[_Place]]) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        spots = {p: i for i, p in enumerate(lower)}
        passed: list[int] = []
        for place in upper:
            ends = sorted(spots[e.end] for e in place.below)
            count += sum(len(passed) - bisect_right(passed, end) for end in ends)
            for end in ends:
                insort(passed, end)
    return count


# ---- places


def _placed(layers: list[list[_Place]]) -> None:
    y = float(_MARGIN + 2 * _LINE)
    for layer in layers:
        height = max((p.height for p in layer), default=0.0)
        for place in layer:
            lane = not place.lines
            place.height = height if lane else place.height
            place.y = y if lane else y + (height - place.height) / 2
        y += height + _GAP_Y
        _spread(layer, [0.0] * len(layer))
    for sweep in range(4 * _SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = []
            for place in layer:
                near = [e.start.x for e in place.above] + [e.end.x for e in place.below]
                wanted.append(sum(near) / len(near) if near else place.x)
            _spread(layer, wanted)
    left = min((p.x - p.width / 2 for layer in layers for p in layer), default=0.0)
    for layer in layers:
        for place in layer:
            place.x += _MARGIN - left
            _fan(place)


def _spread(layer: list[_Place], wanted: Sequence[float]) -> None:
    """Centres nearest to those wanted, in the least-squares sense, at distances that keep boxes apart.

    Less the distances it is isotonic regression: neighbours that would pass each other are pooled.
    """
    offsets, at = [], 0.0
    for i, place in enumerate(layer):
        if i:
            at += (layer[i - 1].width + place.width) / 2 + _GAP_X
        offsets.append(at)
    pools: list[list[float]] = []  # sum of weighted wishes, weight, members
    for place, wish, offset in zip(layer, wanted, offsets, strict=True):
        weight = 1.0 if place.lines else 4.0  # a passing edge is kept straight first
        pools.append([(wish - offset) * weight, weight, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            for i, part in enumerate(pools.pop()):
                pools[-1][i] += part
    centres = [total / weight for total, weight, members in pools for _ in range(int(members))]
    for place, centre, offset in zip(layer, centres, offsets, strict=True):
        place.x = centre + offset


def _fan(place: _Place) -> None:
    """Where edges meet the upper and lower side of a box: spread evenly, wider where ports have names."""
    place.above.sort(key=lambda e: e.start.x)
    place.below.sort(key=lambda e: e.end.x)
    for edges, ports in ((place.above, [e.into for e in place.above]), (place.below, [e.out_of for e in place.below])):
        widths = [_port_width(port) for port in ports]
        room = max(place.width - 2 * _PAD - sum(widths), 0.0) / max(len(edges), 1)
        x = place.x - place.width / 2 + _PAD
        for edge, width in zip(edges, widths, strict=True):
            centre = place.x if not place.lines else x + (width + room) / 2
            if edge.end is place:
                edge.x1 = centre
            else:
                edge.x0 = centre
            x += width + room


def _port_width(port: str) -> float:
    return _width(port, _SMALL) + 8


def _ports_width(edges: Iterable[_Edge]) -> float:
    return sum(_port_width(e.into if e.into else e.out_of) for e in edges)


# ---- text


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _width(text: str, size: int) -> float:
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text) * size * _ADVANCE


def _escaped(text: str) -> str:
    """Text for XML; characters that XML 1.0 cannot hold at all become U+FFFD."""
    plain = "".join("\ufffd" if c < " " or "\ud800" <= c <= "\udfff" or c in "\ufffe\uffff" else c for c in text)
    for raw, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        plain = plain.replace(raw, entity)
    return plain


def _text(
    x: float, y: float, text: str, size: int, *, anchor: str = "middle", weight: str = "", fill: str = "#222"
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{bold}>'
        f"{_escaped(text)}</text>"
    )


def _written(layers: list[list[_Place]], edges: list[_Edge], title: str) -> str:
    places = [p for layer in layers for p in layer if p.lines]
    title = _shortened(title) if len(title) > 3 * _LONGEST else title
    width = max([p.x + p.width / 2 for p in places] + [_MARGIN + _width(title, _FONT + 2)]) + _MARGIN
    height = max([p.y + p.height for p in places] + [float(_MARGIN + _LINE)]) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace">',
        f"<title>{_escaped(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(_MARGIN, _MARGIN + _LINE - 3, title, _FONT + 2, anchor="start", weight="bold"),
        '<g fill="none" stroke="#666" stroke-width="1.2">',
        *(_line(edge) for edge in edges),
        "</g>",
        '<g fill="#666">',
        *(_arrow(edge) for edge in edges if edge.end.lines),
        "</g>",
    ]
    for place in places:
        parts += _box(place)
    return "\n".join((*parts, "</svg>\n"))


def _line(edge: _Edge) -> str:
    """A curve, with the straight part through the layer of a lane that it enters."""
    y0, y1 = edge.start.y + edge.start.height, edge.end.y
    middle = (y0 + y1) / 2
    through = "" if edge.end.lines else f"v{edge.end.height:.1f}"
    return (
        f'<path d="M{edge.x0:.1f},{y0:.1f}C{edge.x0:.1f},{middle:.1f} {edge.x1:.1f},{middle:.1f} '
        f'{edge.x1:.1f},{y1:.1f}{through}"/>'
    )


def _arrow(edge: _Edge) -> str:
    x, y = edge.x1, edge.end.y
    return f'<path d="M{x:.1f},{y:.1f}l-3.5,-7h7z"/>'


def _box(place: _Place) -> list[str]:
    fill, border, dash = _LOOKS[place.look]
    left, operator = place.x - place.width / 2, place.look == "operator"
    parts = [
        f"<g><title>{_escaped(place.hint)}</title>",
        f'<rect x="{left:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" '
        f'rx="{3 if operator else 10}" fill="{fill}" stroke="{border}"'
        + (f' stroke-dasharray="{dash}"' if dash else "")
        + "/>",
    ]
    y = place.y + _PAD / 2
    if any(e.into for e in place.above):
        y += _SMALL + 3
        parts += [_text(e.x1, place.y + _SMALL + 1, e.into, _SMALL, fill="#555") for e in place.above]
    for i, line in enumerate(place.lines):
        weight = "bold" if i == 0 else ""
        parts.append(_text(place.x, y + (i + 1) * _LINE - 4, line, _FONT, weight=weight))
    bottom = place.y + place.height - 4
    parts += [_text(e.x0, bottom, e.out_of, _SMALL, fill="#555") for e in place.below if e.out_of]
    parts.append("</g>")
    return parts
