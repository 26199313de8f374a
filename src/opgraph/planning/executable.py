"""From a graph's snapshot and a compiled plan to the native `Executable`, and the cold paths it calls back
into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from opgraph import _native
from opgraph.ir.datatypes import dlpack_dtype, scalar_bytes
from opgraph.ir.enums import data_type, tensor_reordering
from opgraph.ir.errors import OperandError
from opgraph.ir.program import infer_live
from opgraph.ir.tensor import Tensor
from opgraph.ops.scale_tiles import tiled_layout
from opgraph.planning.messages import Where, note_error, raise_refusal
from opgraph.planning.protocols import Description, read

if TYPE_CHECKING:
    from opgraph.engines.support import CompiledPlan
    from opgraph.ir.program import GraphSpec, TensorSpec

__all__ = ["Binding", "Hooks", "make_executable"]

_PACKED = (data_type.FP4_E2M1, data_type.INT4)  # two elements per storage unit

# An exact overlap answer may take exponential time in the number of axes; past this much work two layouts
# count as overlapping. 10**4 steps are some 100 us, and interleaved layouts of real programs need a handful.
_OVERLAP_WORK: Any = 10_000  # NumPy's own annotation knows only its two special values

_DUMMY_BASE = 1 << 62

# Ports that carry rows of the query side and of the key/value side, for max_total_seq_len_q and _kv.
_Q_PORTS = frozenset(("q", "o", "do", "dq", "stats", "score_max", "score_sum_exp"))
_KV_PORTS = frozenset(("k", "v", "dk", "dv"))


class Binding:
    """What all plans of one graph share: its operands, the keys that name them, and the buffers bound by
    declaration.

    `tensors` are all tensors of the graph, `bound` maps the uid of an auto-bound input to its buffer.
    """

    __slots__ = ("defaults", "dynamic", "hooks", "keys", "operands", "stream")

    def __init__(
        self,
        name: str,
        spec: GraphSpec,
        tensors: Iterable[Tensor],
        bound: Mapping[int, Any],
        device: tuple[int, int],
        stream: int = 0,
        dynamic: bool = False,
    ) -> None:
        places = {t.uid: i for i, t in enumerate(spec.operands)}
        rows = _ragged_rows(spec)
        self.operands = tuple(_operand(t, places, rows.get(t.uid, -1)) for t in spec.operands)
        self.keys = _keys(tensors, places)
        self.defaults = tuple(bound.get(t.uid) for t in spec.operands)
        self.hooks = Hooks(name, spec, self.operands, self.keys, device)
        self.stream = stream
        self.dynamic = dynamic


def make_executable(binding: Binding, compiled: CompiledPlan) -> Any:
    """The native executable of one compiled plan."""
    return _native.Executable(
        operands=binding.operands,
        keys=binding.keys,
        tensor_type=Tensor,
        defaults=binding.defaults,
        device=binding.hooks.device,
        workspace_bytes=compiled.workspace_bytes,
        carves=compiled.carves,
        inplace=compiled.inplace,
        run=compiled.run,
        hooks=binding.hooks,
        overrides=compiled.overrides,
        dynamic=compiled.dynamic and binding.dynamic,
        stream=binding.stream,
    )


def _operand(tensor: TensorSpec, places: Mapping[int, int], ragged_rows: int) -> dict[str, Any]:
    reordering = tensor.reordering_type
    packed = tensor.data_type in _PACKED
    code, bits, lanes = dlpack_dtype(tensor.data_type)
    dims, strides = _tiled(tensor)
    return {
        "uid": tensor.uid,
        "name": tensor.name,
        "dtype": (code, bits, 2 if packed else lanes),  # INT4 is stored in pairs as well
        "dims": dims,
        "strides": strides,
        "output": tensor.is_output,
        "by_value": tensor.is_pass_by_value,
        "optional": tensor.is_virtual,
        "reorder": reordering is not None and reordering is not tensor_reordering.NONE,
        "ragged": -1 if tensor.ragged_offset is None else places[tensor.ragged_offset],
        "ragged_multiplier": tensor.ragged_offset_multiplier,
        "ragged_rows": ragged_rows,
        "pack": 2 if packed else 1,
    }


def _tiled(tensor: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims and strides of an operand's memory: those declared, with block-scale factors padded to whole tiles."""
    dim, stride = tensor.dim, tensor.stride
    if tensor.reordering_type is not tensor_reordering.F8_128x4 or len(dim) < 2:
        return dim, stride
    return tiled_layout(dim, stride)


def _ragged_rows(spec: GraphSpec) -> dict[int, int]:
    """uid -> rows a ragged tensor holds in all, where a node declares it (`max_total_seq_len_q`, `_kv`)."""
    rows: dict[int, int] = {}
    for node in spec.nodes:
        for param, ports in (("max_total_seq_len_q", _Q_PORTS), ("max_total_seq_len_kv", _KV_PORTS)):
            total = node.params.get(param)
            if total is None:
                continue
            for port, uid in (*node.inputs.items(), *node.outputs.items()):
                if uid is not None and port.lower() in ports:
                    rows[uid] = int(total)
    return rows


def _keys(tensors: Iterable[Tensor], places: Mapping[int, int]) -> dict[object, int]:
    """Tensor object, uid and unambiguous name -> operand index; -1 for the graph's tensors that are no
    operands."""
    keys: dict[object, int] = {}
    ambiguous: set[str] = set()
    for tensor in tensors:
        place = places.get(tensor.uid, -1)
        keys[tensor] = place
        keys[tensor.uid] = place
        if tensor.name in keys:
            ambiguous.add(tensor.name)
        keys[tensor.name] = place
    for name in ambiguous:
        del keys[name]
    return keys


class Hooks:
    """What the native core asks of Python: never on the path of a call that succeeds with what it saw
    before."""

    __slots__ = ("_graph", "_keys", "_operands", "_spec", "device")

    def __init__(
        self,
        graph: str,
        spec: GraphSpec,
        operands: tuple[dict[str, Any], ...],
        keys: dict[object, int],
        device: tuple[int, int],
    ) -> None:
        self._graph = graph
        self._spec = spec
        self._operands = operands
        self._keys = keys
        self.device = device

    # ---- refusals

    def fail(self, rule: str, operand: int, other: int, facts: dict[str, Any]) -> NoReturn:
        """Raises the exception of a rule about an operand (-1: the workspace or the call as a whole)."""
        first = self._operands[operand] if operand >= 0 else None
        second = (
            self._operands[other] if operand >= 0 and other >= 0 else None
        )  # without an operand: a list position
        raise_refusal(rule, Where(self._graph, first, second, self.device), facts)

    def key(self, key: Any) -> int:
        """The operand index of any key; -1 for a tensor of this graph that is no operand.

        Raises:
            KeyError: an unknown uid or name, or a tensor of another graph.
            ValueError: a name that several tensors of the graph have.
            AttributeError: an object of another kind without `get_uid()`.
        """
        if isinstance(key, bool):
            raise TypeError(
                f"execute of graph {self._graph!r}: a bool is no key; use the tensor, its uid or its name"
            )
        if isinstance(key, (Tensor, str)):
            found = self._keys.get(key)
            if found is None:
                raise self._foreign(key) if isinstance(key, Tensor) else self._unknown(key, "name")
            return found
        get_uid = getattr(key, "get_uid", None)
        if callable(get_uid):
            key = get_uid()
        elif not hasattr(type(key), "__index__"):
            raise AttributeError(
                f"execute of graph {self._graph!r}: a key of type {type(key).__name__} names no tensor: "
                "it has no get_uid(); use the tensor, its uid or its name"
            )
        uid = index(key)
        found = self._keys.get(uid)
        if found is None:
            raise self._unknown(uid, "uid")
        return found

    def _foreign(self, tensor: Tensor) -> Exception:
        return KeyError(
            f"execute of graph {self._graph!r}: tensor {tensor.name!r} (uid {tensor.uid}) belongs to another "
            "graph, or was declared after this one was planned"
        )

    def _unknown(self, key: Any, kind: str) -> Exception:
        same = [t for t in self._keys if isinstance(t, Tensor) and t.name == key] if kind == "name" else []
        if len(same) > 1:
            uids = ", ".join(str(t.uid) for t in same)
            return ValueError(
                f"execute of graph {self._graph!r}: the name {key!r} is ambiguous (uids {uids}); "
                "use a uid or the tensor"
            )
        known = ", ".join(f"{t.name!r} (uid {t.uid})" for t in self._spec.operands[:16])
        more = ", ..." if len(self._spec.operands) > 16 else ""
        return KeyError(
            f"execute of graph {self._graph!r}: no tensor has the {kind} {key!r}; its operands: {known}{more}"
        )

    # ---- reading and converting

    def read(self, obj: Any, device_type: int, stream: int) -> Description:
        """Describes a buffer by the protocols that are read in Python."""
        return read(obj, self.device)

    def scalar(self, value: Any, operand: int) -> bytes:
        """A pass-by-value number in the operand's data type, exactly."""
        tensor = self._spec.operands[operand]
        label = f"execute of graph {self._graph!r}: tensor {tensor.name!r} (uid {tensor.uid})"
        try:
            return scalar_bytes(value, tensor.data_type, label)
        except ValueError as error:
            kind = tensor.data_type.name
            raise OperandError(
                note_error(str(error)),
                tensor=tensor.name,
                uid=tensor.uid,
                rule="scalar",
                declared=kind,
                given=repr(value),
                next_step="pass a value that the declared data type holds",
            ) from None

    # ---- geometry

    def geometry(self, overrides: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
        """Live dims and strides of every tensor under the overrides of one call; ValueError when they
        disagree."""
        operands = self._spec.operands
        try:
            return infer_live(self._spec, {operands[i].uid: layout for i, layout in overrides.items()})
        except ValueError as error:
            message = f"execute of graph {self._graph!r}: the overrides contradict the graph: {error}"
            raise OperandError(note_error(message), rule="override_geometry") from error

    def overlaps(self, a: tuple[int, Any, Any, int], b: tuple[int, Any, Any, int]) -> bool:
        """Whether two strided layouts share a byte; True also where that takes too much work to decide."""
        try:
            return bool(np.shares_memory(_dummy(*a), _dummy(*b), max_work=_OVERLAP_WORK))
        except np.exceptions.TooHardError:
            return True


class _Interface:
    """Carries an address into NumPy, which never reads it: only bounds and strides are looked at."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _dummy(address: int, dims: Any, strides: Any, itemsize: int) -> np.ndarray[Any, Any]:
    interface = {
        "version": 3,
        "shape": tuple(dims),
        "strides": tuple(s * itemsize for s in strides),
        "typestr": f"|V{itemsize}",
        "data": (_DUMMY_BASE + address, True),  # addresses come relative to one of the pair
    }
    return np.asarray(_Interface(interface))
