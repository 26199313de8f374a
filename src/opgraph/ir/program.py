"""`GraphIR`: the graph under construction. Declares, numbers and names tensors and nodes; infers; freezes."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from .datatypes import as_data_type
from .enums import data_type as _data_type
from .enums import scalar_type as _scalar_type
from .errors import explain, tensor_label
from .node import Node
from .rules import check_ragged, check_wired
from .spec import GraphSpec, NodeSpec, TensorSpec, infer_live, snapshot_of
from .tensor import (
    NOT_PACKED,
    PACKERS,
    Tensor,
    as_extents,
    as_offset,
    as_positive,
    as_reordering,
    owned_value,
    row_major,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .node import Definition

__all__ = ["GraphIR", "GraphSpec", "NodeSpec", "TensorSpec", "infer_live"]

_INT64_MAX = 2**63 - 1
_NOT_SET = _data_type.NOT_SET  # reading a member off an Enum class costs 0.1 us in Python 3.11


class GraphIR:
    """Tensors and nodes of one graph, with their numbers and names.

    Mutable until `freeze()`. `io_data_type` is given to non-virtual tensors that have none,
    `intermediate_data_type` to virtual ones, `compute_data_type` to nodes; the last two default to the first,
    and to FLOAT when nothing is set.
    """

    __slots__ = (
        "__weakref__",
        "_ambiguous",
        "_by_uid",
        "_compute_data_type",
        "_frozen",
        "_intermediate_data_type",
        "_io_data_type",
        "_name_counts",
        "_names",
        "_next_uid",
        "_nodes",
        "_snapshot",
        "_tensors",
        "_validated",
        "name",
    )

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
    ) -> None:
        self.name = name
        self._io_data_type = as_data_type(io_data_type)
        self._intermediate_data_type = as_data_type(intermediate_data_type)
        self._compute_data_type = as_data_type(compute_data_type)
        self._tensors: list[Tensor] = []
        self._nodes: list[Node] = []
        self._by_uid: dict[int, Tensor] = {}
        self._names: dict[str, Tensor | list[Tensor]] = {}  # a list: the name is ambiguous
        self._ambiguous = 0
        self._name_counts: dict[str, int] = {}
        self._next_uid = 1
        self._frozen = False
        self._validated = False
        self._snapshot: GraphSpec | None = None

    # -- context ---------------------------------------------------------------------------------------------

    @property
    def io_data_type(self) -> _data_type | None:
        """The type of non-virtual tensors that have none, or None."""
        return self._io_data_type

    @property
    def intermediate_data_type(self) -> _data_type:
        """The type of virtual tensors that have none."""
        return self._intermediate_data_type or self._io_data_type or _data_type.FLOAT

    @property
    def compute_data_type(self) -> _data_type:
        """The arithmetic type of nodes that set none."""
        return self._compute_data_type or self._io_data_type or _data_type.FLOAT

    @property
    def frozen(self) -> bool:
        """True once the graph was planned."""
        return self._frozen

    @property
    def validated(self) -> bool:
        """True while the last `validate()` still holds."""
        return self._validated

    def set_context(self, io: Any = None, intermediate: Any = None, compute: Any = None) -> None:
        """Changes the default data types that are given."""
        self._change("the default data types")
        self._io_data_type = as_data_type(io) or self._io_data_type
        self._intermediate_data_type = as_data_type(intermediate) or self._intermediate_data_type
        self._compute_data_type = as_data_type(compute) or self._compute_data_type

    # -- declaring -------------------------------------------------------------------------------------------

    def tensor(
        self,
        dim: Iterable[int],
        stride: Iterable[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: Any = None,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
    ) -> Tensor:
        """Declares a tensor. Strides are in elements; missing or empty ones are row-major.

        Raises `ValueError` for a negative extent or stride, more than 8 axes or a uid that another tensor was
        given by hand, and `cudnnGraphNotSupportedError` for a data type without counterpart.
        """
        # Written for speed: declaring costs about 1 us more than making the bare object.
        try:
            unpack, pack = PACKERS[len(dim)]  # type: ignore[arg-type]
            extents = unpack(pack(*dim))
            if stride is None or not len(stride):  # type: ignore[arg-type]
                strides, strided = row_major(extents), False
            else:
                unpack, pack = PACKERS[len(stride)]  # type: ignore[arg-type]
                strides, strided = unpack(pack(*stride)), True
        except NOT_PACKED:
            extents = as_extents(dim, "dim", f"tensor {name!r}")
            strides = () if stride is None else as_extents(stride, "stride", f"tensor {name!r}")
            strided = bool(strides)
            strides = strides or row_major(extents)
        if data_type.__class__ is not _data_type or data_type is _NOT_SET:
            data_type = as_data_type(data_type)
        names = self._names
        if not name:
            name = f"tensor_{len(names) - self._ambiguous}"
            if name in names:
                name = self._free_name()
        by_uid = self._by_uid
        number = self._next_uid
        if number in by_uid:
            number = self._free_uid()
        tensor = Tensor(
            name,
            extents,
            strides,
            data_type,
            is_virtual,
            is_pass_by_value,
            number,
            False,
            True,
            strided,
            self,
        )
        if not extents:
            tensor._dim_assigned = False
        if ragged_offset is not None:
            tensor._ragged_offset = as_offset(ragged_offset, tensor)
        if reordering_type is not None:
            tensor._reordering_type = as_reordering(reordering_type, tensor_label(tensor))
        if ragged_offset_multiplier != 1:
            tensor._ragged_offset_multiplier = as_positive(
                ragged_offset_multiplier, "ragged_offset_multiplier", tensor_label(tensor)
            )
        if alignment_value != 1:
            tensor._alignment_value = as_positive(alignment_value, "alignment_value", tensor_label(tensor))
        if uid is None and name not in names:
            names[name] = by_uid[number] = tensor
            self._next_uid = number + 1
            self._tensors.append(tensor)
        else:
            self._register(tensor, number, uid)
        self._validated = self._frozen  # what is declared after planning takes no part in the graph
        return tensor

    def tensor_scalar(self, value: Any, scalar_type: _scalar_type, name: str = "") -> Tensor:
        """A by-value scalar [1, 1, 1, 1] with an embedded value; it needs no entry in the variant pack.

        Its data type follows from the graph unless set; `validate()` refuses a value that it cannot hold.
        """
        if not isinstance(scalar_type, _scalar_type):
            raise TypeError(
                explain(f"tensor_scalar {name!r}", "scalar_type is required", given=repr(scalar_type))
            )
        if value is None:
            raise TypeError(explain(f"tensor_scalar {name!r}", "a value is required", given="None"))
        tensor = self.tensor((1, 1, 1, 1), (1, 1, 1, 1), is_pass_by_value=True, name=name)
        tensor._pass_by_value = owned_value(value)
        tensor._scalar_type = scalar_type
        return tensor

    def add_node(
        self,
        definition: Definition,
        inputs: Mapping[str, Tensor | None],
        outputs: Sequence[str] | Mapping[str, Tensor | None],
        params: Mapping[str, Any] | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> dict[str, Tensor]:
        """Appends a node and returns its output tensors by port.

        `outputs` lists the ports; as a mapping it may name a tensor that the caller declared for a port. New
        outputs are virtual and named `<node>::<PORT>`. Inputs that are None are left out.
        """
        self._change("the list of nodes")
        op = definition.name
        if not name:
            name = self.next_node_name(op)
            self._name_counts[op] = self._name_counts.get(op, 0) + 1
        wired = {port: tensor for port, tensor in inputs.items() if tensor is not None}
        for port, tensor in wired.items():
            self._check_member(tensor, f"{op} {name!r}: input {port}")
        given: Any = dict.fromkeys(outputs) if isinstance(outputs, (tuple, list)) else outputs
        for port, declared in given.items():
            if declared is not None:
                self._check_output(declared, wired, f"{op} {name!r}: output {port}")
        compute = None if compute_data_type is None else as_data_type(compute_data_type)
        results: dict[str, Tensor] = {}
        node = Node(definition, name, wired, results, dict(params or ()), compute)
        for port, declared in given.items():
            if declared is None:
                number = self._next_uid
                if number in self._by_uid:
                    number = self._free_uid()
                declared = Tensor(
                    f"{name}::{port}", (), (), None, True, False, number, False, False, False, self
                )
                self._register(declared, number, None)
            declared._producer = node
            if not declared._stride_assigned:
                declared._stride = ()
            results[port] = declared
        self._nodes.append(node)
        return dict(results)

    def next_node_name(self, op: str) -> str:
        """The name that the next unnamed node of this operator gets: `<op>.<k>`."""
        return f"{op}.{self._name_counts.get(op, 0)}"

    def _check_member(self, tensor: Any, where: str) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(explain(where, "a Tensor of this graph is needed", given=repr(tensor)))
        if tensor._owner is not self:
            raise ValueError(
                explain(
                    where,
                    f"{tensor_label(tensor)} belongs to another graph",
                    next_step="declare it on this graph with tensor_like",
                )
            )

    def _check_output(self, tensor: Any, inputs: dict[str, Tensor], where: str) -> None:
        self._check_member(tensor, where)
        if tensor._producer is not None:
            raise ValueError(
                explain(where, f"{tensor_label(tensor)} is already written by {tensor._producer.name!r}")
            )
        if any(tensor is other for other in inputs.values()):
            raise ValueError(
                explain(
                    where,
                    f"{tensor_label(tensor)} is also an input of the node",
                    next_step="declare a second tensor and bind one buffer to both",
                )
            )

    # -- numbers and names -----------------------------------------------------------------------------------

    def _change(self, what: str) -> None:
        if self._frozen:
            raise RuntimeError(
                f"graph {self.name!r}: {what} cannot change after planning, which froze the graph; "
                "copy the graph (copy.deepcopy) and change the copy"
            )
        self._validated = False

    def _free_uid(self) -> int:
        number = self._next_uid
        while number in self._by_uid:
            number += 1
        self._next_uid = number
        return number

    def _register(self, tensor: Tensor, number: int, uid: int | None) -> None:
        if uid is None or uid == -1:
            self._by_uid[number] = tensor
            self._next_uid = number + 1
        else:
            self._check_uid(tensor, uid)
            self._assign_uid(tensor, index(uid))
        name = tensor._name
        if name in self._names:
            if not self._frozen:  # a late tensor is unattached: it takes no name away from the frozen graph
                self._index_name(tensor)
        else:
            self._names[name] = tensor
        self._tensors.append(tensor)

    def _check_uid(self, tensor: Tensor, uid: Any) -> None:
        if isinstance(uid, bool) or not hasattr(uid, "__index__"):
            raise TypeError(explain(f"tensor {tensor._name!r}", "a uid is an int", given=repr(uid)))
        if not 0 <= uid <= _INT64_MAX:
            raise ValueError(
                explain(f"tensor {tensor._name!r}", "a uid is 0 or more and fits in 64 bits", given=uid)
            )
        holder = self._by_uid.get(uid)
        if holder is not None and (holder._uid_assigned or self._frozen):
            raise ValueError(
                explain(
                    f"tensor {tensor._name!r}",
                    f"uid {uid} belongs to {tensor_label(holder)}",
                    next_step="give each tensor its own uid",
                )
            )

    def _assign_uid(self, tensor: Tensor, uid: int) -> None:
        if uid == -1:
            tensor._uid_assigned = False
            return
        holder = self._by_uid.get(uid)
        if holder is not None and holder is not tensor:
            if holder._uid_assigned:
                raise ValueError(
                    explain(
                        tensor_label(tensor),
                        f"uid {uid} belongs to {tensor_label(holder)}",
                        next_step="give each tensor its own uid",
                    )
                )
            holder._uid = self._free_uid()
            self._by_uid[holder._uid] = holder
            self._next_uid = holder._uid + 1
        if self._by_uid.get(tensor._uid) is tensor:
            del self._by_uid[tensor._uid]
        tensor._uid, tensor._uid_assigned = uid, True
        self._by_uid[uid] = tensor

    def _free_name(self) -> str:
        count = len(self._names) - self._ambiguous
        while (name := f"tensor_{count}") in self._names:
            count += 1
        return name

    def _index_name(self, tensor: Tensor) -> None:
        held = self._names.get(tensor._name)
        if held is None:
            self._names[tensor._name] = tensor
        elif isinstance(held, list):
            held.append(tensor)
        else:
            self._names[tensor._name] = [held, tensor]
            self._ambiguous += 1

    def _renamed(self, tensor: Tensor, old: str) -> None:
        held = self._names.get(old)
        if isinstance(held, list):
            held.remove(tensor)
            if len(held) == 1:
                self._names[old] = held[0]
                self._ambiguous -= 1
        elif held is tensor:
            del self._names[old]
        self._index_name(tensor)

    # -- looking up ------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The nodes in insertion order, a copy."""
        return list(self._nodes)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name; ambiguous names are left out."""
        return {name: held for name, held in self._names.items() if isinstance(held, Tensor)}

    @property
    def all_tensors(self) -> list[Tensor]:
        """Every tensor in order of declaration, a copy."""
        return list(self._tensors)

    def find_tensor(self, key: str | int) -> Tensor | None:
        """The tensor of this name or uid, or None. `ValueError` when the name is ambiguous."""
        if isinstance(key, str):
            held = self._names.get(key)
            if isinstance(held, list):
                uids = ", ".join(str(tensor._uid) for tensor in held)
                raise ValueError(
                    explain(
                        f"tensor name {key!r}",
                        f"ambiguous: {len(held)} tensors have it (uids {uids})",
                        next_step="use the uid or the Tensor object, or rename one",
                    )
                )
            return held
        return self._by_uid.get(key)

    def get_node(self, name: str) -> Node | None:
        """The node of this name, or None. `ValueError` when several have it."""
        found = [node for node in self._nodes if node._name == name]
        if len(found) > 1:
            raise ValueError(f"node name {name!r}: ambiguous: {len(found)} nodes have it")
        return found[0] if found else None

    def get_inputs(self) -> list[Tensor]:
        """Non-virtual tensors that no node writes."""
        return [tensor for tensor in self._tensors if not tensor._is_virtual and tensor._producer is None]

    def get_outputs(self) -> list[Tensor]:
        """Non-virtual tensors that a node writes."""
        return [tensor for tensor in self._tensors if not tensor._is_virtual and tensor._producer is not None]

    # -- inference and checks --------------------------------------------------------------------------------

    def validate(self) -> None:
        """Fills data types, infers dims and strides of outputs, and checks every node and tensor. Idempotent.

        Raises `ValueError` for a malformed graph and `cudnnGraphNotSupportedError` for a well-formed one that
        uses what no engine offers. A rejected graph stays un-validated.
        """
        if self._validated:
            return
        for tensor in self._tensors:
            if not tensor._data_type_assigned:
                tensor._data_type = None
            if tensor._producer is not None:
                if not tensor._dim_assigned:
                    tensor._dim = ()
                if not tensor._stride_assigned:
                    tensor._stride = ()
        seen: set[int] = set()
        for node in self._nodes:
            for tensor in node._inputs.values():
                self._check_source(tensor, node, seen)
                self._fill_data_type(tensor, node)
            node._definition.infer(node)
            for tensor in node._outputs.values():
                self._fill_data_type(tensor, node)
                seen.add(id(tensor))
        for tensor in self._tensors:
            if tensor._ragged_offset is not None:
                check_ragged(tensor, tensor._ragged_offset, self)
            if tensor._is_virtual or not tensor._is_pass_by_value:
                tensor.validate()
        for node in self._nodes:
            for tensor in (*node._inputs.values(), *node._outputs.values()):
                check_wired(tensor)
        self._validated = True

    def _check_source(self, tensor: Tensor, node: Node, seen: set[int]) -> None:
        where = f"{node.op} {node.name!r}"
        if tensor._producer is None:
            if tensor._is_virtual:
                raise ValueError(
                    explain(
                        where,
                        f"input {tensor_label(tensor)} is virtual, but no node writes it",
                        next_step="graph inputs are operands: set_is_virtual(False)",
                    )
                )
        elif id(tensor) not in seen:
            raise ValueError(
                explain(
                    where,
                    f"input {tensor_label(tensor)} is written by the later node {tensor._producer.name!r}",
                    next_step="add nodes in the order in which they run",
                )
            )

    def _fill_data_type(self, tensor: Tensor, node: Node) -> None:
        if tensor._data_type is not None:
            return
        if tensor._is_virtual:
            tensor._data_type = self.intermediate_data_type
        elif self._io_data_type is not None:
            tensor._data_type = self._io_data_type
        else:
            raise ValueError(
                explain(
                    f"{node.op} {node.name!r}, {tensor_label(tensor)}",
                    "data type not set, and the graph has no io_data_type",
                    next_step="call set_data_type, or give the graph an io_data_type",
                )
            )

    # -- freezing and copying --------------------------------------------------------------------------------

    def freeze(self) -> GraphSpec:
        """Validates, refuses every change from now on, and returns the snapshot."""
        spec = self.snapshot()
        self._frozen = True
        return spec

    def snapshot(self) -> GraphSpec:
        """The validated graph as an immutable `GraphSpec`; later changes of this object do not reach it."""
        if self._frozen and self._snapshot is not None:
            return self._snapshot
        self.validate()
        self._snapshot = snapshot_of(self)
        return self._snapshot

    def copy(self) -> tuple[GraphIR, dict[Tensor, Tensor]]:
        """An unfrozen copy with new tensors, and the map from each tensor of this graph to its copy.

        Uids, names and everything the user set are kept; what was inferred is inferred again.
        """
        twin = GraphIR(self.name, self._io_data_type, self._intermediate_data_type, self._compute_data_type)
        replaced: dict[Tensor, Tensor] = {}
        for tensor in self._tensors:
            new = replaced[tensor] = Tensor.__new__(Tensor)
            for slot in Tensor.__slots__[1:]:
                setattr(new, slot, getattr(tensor, slot))
            new._owner, new._producer = twin, None
            twin._tensors.append(new)
            twin._by_uid[new._uid] = new
            twin._index_name(new)
        for new in twin._tensors:
            if new._ragged_offset is not None:
                new._ragged_offset = replaced[new._ragged_offset]
        for node in self._nodes:
            inputs = {port: replaced[tensor] for port, tensor in node._inputs.items()}
            outputs = {port: replaced[tensor] for port, tensor in node._outputs.items()}
            clone = Node(
                node._definition, node._name, inputs, outputs, dict(node._params), node._compute_data_type
            )
            for tensor in outputs.values():
                tensor._producer = clone
            twin._nodes.append(clone)
        twin._name_counts = dict(self._name_counts)
        twin._next_uid = self._next_uid
        return twin, replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphIR:
        twin, replaced = self.copy()
        for old, new in replaced.items():
            memo[id(old)] = new
        return twin

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("opgraph.GraphIR cannot be pickled; copy.deepcopy it, or serialize the built graph")

    def inspect(self) -> dict[str, Any]:
        """Context, nodes and tensors as plain values that JSON can hold."""
        from .describe import describe

        return describe(self)
