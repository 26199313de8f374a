"""`Node`: one operator of a graph."""

from __future__ import annotations

from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    from .enums import NodeType, data_type
    from .tensor import Tensor

    class Definition(Protocol):
        """What the graph needs to know of an operator (`ops.base.OpDef` has it)."""

        @property
        def name(self) -> str: ...
        @property
        def node_type(self) -> NodeType: ...
        @property
        def infer(self) -> Callable[[Any], None]: ...
        @property
        def optional_outputs(self) -> tuple[str, ...]: ...


__all__ = ["Node"]


class Node:
    """One operator: its input and output tensors by port name and its attributes.

    Read-only: `inputs`, `outputs` and `params` are mappings that refuse writes. Optional input ports that
    were not given are absent.
    """

    __slots__ = ("_compute_data_type", "_definition", "_inputs", "_name", "_outputs", "_params")

    def __init__(
        self,
        definition: Definition,
        name: str,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        params: dict[str, Any],
        compute_data_type: data_type | None,
    ) -> None:
        self._definition = definition
        self._name = name
        self._inputs = MappingProxyType(inputs)
        self._outputs = MappingProxyType(outputs)
        self._params = MappingProxyType(params)
        self._compute_data_type = compute_data_type

    if TYPE_CHECKING:
        name: str
        op: str
        node_type: NodeType
        inputs: Mapping[str, Tensor]
        outputs: Mapping[str, Tensor]
        params: Mapping[str, Any]
        compute_data_type: data_type | None
        definition: Definition
    else:
        name = property(attrgetter("_name"), doc="Label; `<op>.<k>` when the caller gave none.")
        op = property(attrgetter("_definition.name"), doc="Key of the operator in `opgraph.ops.OPS`.")
        node_type = property(attrgetter("_definition.node_type"), doc="Kind of operator.")
        inputs = property(attrgetter("_inputs"), doc="Tensor of each connected input port.")
        outputs = property(attrgetter("_outputs"), doc="Tensor of each output port.")
        params = property(attrgetter("_params"), doc="Attributes by name.")
        compute_data_type = property(
            attrgetter("_compute_data_type"), doc="The node's own arithmetic type; None takes the graph's."
        )
        definition = property(attrgetter("_definition"), doc="The operator's definition.")

    def __repr__(self) -> str:
        inputs = ", ".join(f"{port}={tensor.name!r}" for port, tensor in self._inputs.items())
        return f"<Node {self._name!r} {self._definition.name}({inputs}) -> {', '.join(self._outputs)}>"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "opgraph.Node belongs to its graph and cannot be copied or pickled alone; copy the graph"
        )
