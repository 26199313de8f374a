"""A graph as plain values, for people and tools to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .program import GraphIR

__all__ = ["describe"]


def describe(graph: GraphIR) -> dict[str, Any]:
    """Context, nodes and tensors as plain values that JSON can hold."""
    return {
        "context": {
            "name": graph.name,
            "io_data_type": _text(graph._io_data_type),
            "intermediate_data_type": _text(graph.intermediate_data_type),
            "compute_data_type": _text(graph.compute_data_type),
        },
        "nodes": [
            {
                "name": node._name,
                "type": node.node_type.name,
                "op": node.op,
                "inputs": {port: tensor._uid for port, tensor in node._inputs.items()},
                "outputs": {port: tensor._uid for port, tensor in node._outputs.items()},
                "params": {key: _text(value) for key, value in node._params.items()},
                "compute_data_type": _text(node._compute_data_type),
            }
            for node in graph._nodes
        ],
        "tensors": [
            {
                "uid": tensor._uid,
                "name": tensor._name,
                "dim": list(tensor._dim),
                "stride": list(tensor._stride),
                "data_type": _text(tensor._data_type),
                "is_virtual": tensor._is_virtual,
                "is_pass_by_value": tensor._is_pass_by_value,
                "ragged_offset": None if tensor._ragged_offset is None else tensor._ragged_offset._uid,
            }
            for tensor in graph._tensors
        ],
    }


def _text(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_text(item) for item in value]
    return str(value)
