"""A number for the structure of a graph, the same in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec

__all__ = ["structure_key"]


def structure_key(spec: GraphSpec) -> int:
    """63 bits over operators, attributes, data types, layouts, roles and wiring; names and uids do not
    enter."""
    from hashlib import blake2b

    order: dict[int, int] = {}  # uid -> first appearance in node order

    def place(uid: int | None) -> int:
        return -1 if uid is None else order.setdefault(uid, len(order))

    nodes = [
        (
            n.op,
            sorted((port, place(uid)) for port, uid in n.inputs.items()),
            sorted((port, place(uid)) for port, uid in n.outputs.items()),
            sorted((key, _plain(value)) for key, value in n.params.items()),
            n.compute_data_type.value,
        )
        for n in spec.nodes
    ]
    for tensor in spec.tensors.values():
        place(tensor.uid)
    tensors = [
        (
            order[t.uid],
            t.dim,
            t.stride,
            t.data_type.value,
            t.is_virtual,
            t.is_pass_by_value,
            _plain(t.pass_by_value),
            place(t.ragged_offset),
            t.ragged_offset_multiplier,
            _plain(t.reordering_type),
            t.alignment_value,
        )
        for t in sorted(spec.tensors.values(), key=lambda t: order[t.uid])
    ]
    digest = blake2b(repr((nodes, tensors)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _plain(value: Any) -> str:
    """A text that is the same in every process: addresses of objects must not enter."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_plain(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in sorted(value.items())) + "}"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{value.tobytes().hex()}"
    return repr(value)
