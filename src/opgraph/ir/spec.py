"""The immutable snapshot of a graph that planning and engines read, and its live geometry under overrides."""

from __future__ import annotations

from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .errors import cudnnGraphNotSupportedError, explain, tensor_label
from .node import Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .enums import data_type, scalar_type, tensor_reordering
    from .node import Definition
    from .program import GraphIR
    from .tensor import Tensor

__all__ = ["GraphSpec", "NodeSpec", "TensorSpec", "infer_live", "snapshot_of"]

Geometry = tuple[tuple[int, ...], tuple[int, ...]]


class _Record:
    """Slots that are set once, by keyword, at construction."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        for slot in self.__slots__:
            object.__setattr__(self, slot, fields.pop(slot))
        if fields:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(fields)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only: a snapshot never changes")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only: a snapshot never changes")

    def __repr__(self) -> str:
        fields = ", ".join(f"{slot}={getattr(self, slot)!r}" for slot in self.__slots__)
        return f"{type(self).__name__}({fields})"


class TensorSpec(_Record):
    """One tensor of a snapshot. `dim_assigned` and `stride_assigned` tell what the user set.

    `is_output`: a node writes it. `is_optional`: an output left virtual that `execute` may still be given a
    buffer for. `pass_by_value`: the embedded scalar, or None. `ragged_offset`: uid of the offset tensor, or
    None.
    """

    __slots__ = (
        "alignment_value",
        "data_type",
        "dim",
        "dim_assigned",
        "is_optional",
        "is_output",
        "is_pass_by_value",
        "is_virtual",
        "name",
        "pass_by_value",
        "ragged_offset",
        "ragged_offset_multiplier",
        "reordering_type",
        "scalar_type",
        "stride",
        "stride_assigned",
        "uid",
        "uid_assigned",
    )

    if TYPE_CHECKING:
        alignment_value: int
        data_type: data_type
        dim: tuple[int, ...]
        dim_assigned: bool
        is_optional: bool
        is_output: bool
        is_pass_by_value: bool
        is_virtual: bool
        name: str
        pass_by_value: Any
        ragged_offset: int | None
        ragged_offset_multiplier: int
        reordering_type: tensor_reordering | None
        scalar_type: scalar_type | None
        stride: tuple[int, ...]
        stride_assigned: bool
        uid: int
        uid_assigned: bool


class NodeSpec(_Record):
    """One node of a snapshot: ports to uids. `compute_data_type` is resolved, never None."""

    __slots__ = ("compute_data_type", "definition", "inputs", "name", "node_type", "op", "outputs", "params")

    if TYPE_CHECKING:
        compute_data_type: data_type
        definition: Definition
        inputs: Mapping[str, int]
        name: str
        node_type: Any
        op: str
        outputs: Mapping[str, int]
        params: Mapping[str, Any]


class GraphSpec(_Record):
    """A validated graph, frozen. `operands` ascend by uid and are the only order of a plan's variant pack."""

    __slots__ = (
        "compute_data_type",
        "intermediate_data_type",
        "io_data_type",
        "name",
        "nodes",
        "operands",
        "tensors",
    )

    if TYPE_CHECKING:
        compute_data_type: data_type
        intermediate_data_type: data_type
        io_data_type: data_type | None
        name: str
        nodes: tuple[NodeSpec, ...]
        operands: tuple[TensorSpec, ...]
        tensors: Mapping[int, TensorSpec]


class _LiveTensor:
    """A tensor of one call: its own geometry, everything else from the snapshot."""

    __slots__ = ("_data_type", "_dim", "_spec", "_stride")

    dim = property(attrgetter("_dim"))
    stride = property(attrgetter("_stride"))
    data_type = property(attrgetter("_data_type"))

    def __init__(self, spec: TensorSpec, dim: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self._spec = spec
        self._dim = dim
        self._stride = stride
        self._data_type = spec.data_type

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


def infer_live(
    spec: GraphSpec, overrides: Mapping[int, tuple[Sequence[int], Sequence[int]]]
) -> dict[int, Geometry]:
    """The geometry of every tensor of one call: `{uid: (dims, strides)}`.

    `overrides` replaces dims and strides of operands, by uid. Inferred dims of virtual tensors are computed
    again, those the user set are kept, and every rule of every node is checked again. Raises `ValueError`
    naming the tensor, its uid and both values where the call contradicts the graph.
    """
    produced = {uid for node in spec.nodes for uid in node.outputs.values()}
    expected: dict[int, Geometry] = {}
    live: dict[int, _LiveTensor] = {}
    for uid, tensor in spec.tensors.items():
        dim, stride = _declared_or_override(tensor, overrides.get(uid))
        if uid in produced:
            if not tensor.is_virtual:
                expected[uid] = dim, stride
            if not tensor.dim_assigned:
                dim = ()
            if tensor.is_virtual and not tensor.stride_assigned:
                stride = ()
        live[uid] = _LiveTensor(tensor, dim, stride)
    for uid in overrides:
        if uid not in live:
            raise ValueError(explain("override", f"uid {uid} names no tensor of this graph"))

    for node in spec.nodes:
        _infer_node(node, live)
        for uid in node.outputs.values():
            if uid in expected and live[uid].dim != expected[uid][0]:
                raise ValueError(
                    explain(
                        f"{node.op} {node.name!r}, {tensor_label(spec.tensors[uid])}",
                        "the live dims of an output contradict those its inputs give",
                        expected=live[uid].dim,
                        given=expected[uid][0],
                        next_step="override all tensors that change, outputs too",
                    )
                )
    return {uid: (tensor.dim, tensor.stride) for uid, tensor in live.items()}


def _declared_or_override(
    tensor: TensorSpec, override: tuple[Sequence[int], Sequence[int]] | None
) -> Geometry:
    if override is None:
        return tensor.dim, tensor.stride
    dim, stride = tuple(override[0]), tuple(override[1])
    for what, values in (("dims", dim), ("strides", stride)):
        if len(values) != len(tensor.dim) or any(value < 0 for value in values):
            raise ValueError(
                explain(
                    f"override of {tensor_label(tensor)}",
                    f"{what} must be {len(tensor.dim)} values of 0 or more",
                    expected=f"{what} for declared dim {tensor.dim}",
                    given=values,
                )
            )
    return dim, stride


def _infer_node(node: NodeSpec, live: dict[int, _LiveTensor]) -> None:
    view: Any = Node(
        node.definition,
        node.name,
        {port: live[uid] for port, uid in node.inputs.items()},  # type: ignore[misc]
        {port: live[uid] for port, uid in node.outputs.items()},  # type: ignore[misc]
        dict(node.params),
        node.compute_data_type,
    )
    try:
        node.definition.infer(view)
    except cudnnGraphNotSupportedError as error:
        raise ValueError(f"overridden shapes contradict the graph: {error}") from error
    for port, uid in node.outputs.items():
        if not live[uid].dim or not live[uid].stride:
            raise ValueError(
                f"{node.op} {node.name!r}: port {port} has no live dims; override its tensor (uid {uid})"
            )


def snapshot_of(graph: GraphIR) -> GraphSpec:
    """The snapshot of a validated graph."""
    wired: dict[int, Tensor] = {}
    optional: set[int] = set()
    nodes = []
    for node in graph._nodes:
        for tensor in (*node._inputs.values(), *node._outputs.values()):
            wired[tensor._uid] = tensor
        for port in node._definition.optional_outputs:
            if port in node._outputs and node._outputs[port]._is_virtual:
                optional.add(node._outputs[port]._uid)
        nodes.append(
            NodeSpec(
                name=node._name,
                op=node.op,
                node_type=node.node_type,
                definition=node._definition,
                inputs=MappingProxyType({port: tensor._uid for port, tensor in node._inputs.items()}),
                outputs=MappingProxyType({port: tensor._uid for port, tensor in node._outputs.items()}),
                params=MappingProxyType(dict(node._params)),
                compute_data_type=node._compute_data_type or graph.compute_data_type,
            )
        )
    operands = {uid for uid, tensor in wired.items() if not tensor._is_virtual} | optional
    for tensor in tuple(wired.values()):
        offset = tensor._ragged_offset
        if offset is not None:
            wired[offset._uid] = offset
            if tensor._uid in operands:
                operands.add(offset._uid)
    tensors = {uid: _tensor_spec(wired[uid], uid in optional) for uid in sorted(wired)}
    return GraphSpec(
        name=graph.name,
        io_data_type=graph.io_data_type,
        intermediate_data_type=graph.intermediate_data_type,
        compute_data_type=graph.compute_data_type,
        tensors=MappingProxyType(tensors),
        nodes=tuple(nodes),
        operands=tuple(
            spec for uid, spec in tensors.items() if uid in operands and spec.pass_by_value is None
        ),
    )


def _tensor_spec(tensor: Tensor, is_optional: bool) -> TensorSpec:
    offset = tensor._ragged_offset
    return TensorSpec(
        uid=tensor._uid,
        uid_assigned=tensor._uid_assigned,
        name=tensor._name,
        dim=tensor._dim,
        stride=tensor._stride,
        data_type=tensor._data_type,
        is_virtual=tensor._is_virtual,
        is_optional=is_optional,
        is_output=tensor._producer is not None,
        is_pass_by_value=tensor._is_pass_by_value,
        pass_by_value=tensor._pass_by_value,
        scalar_type=tensor._scalar_type,
        ragged_offset=None if offset is None else offset._uid,
        ragged_offset_multiplier=tensor._ragged_offset_multiplier,
        reordering_type=tensor._reordering_type,
        alignment_value=tensor._alignment_value,
        dim_assigned=tensor._dim_assigned,
        stride_assigned=tensor._stride_assigned,
    )
