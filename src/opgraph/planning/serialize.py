"""Graphs with their selected plan as bytes, and back.

A file is a header and a JSON body: magic, format version, length of the body, sha256 of all the rest. Nothing in
it is executed or names code: operators, enum members, engines and knobs are looked up by name in what this package
has. The checksum finds damage; it is no signature. Content that JSON and the few tagged forms below cannot hold
exactly is refused when saving, and what is read is checked as any user's declaration is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from hashlib import sha256
from struct import Struct
from typing import Any, NoReturn

import numpy as np

from opgraph.ir import enums
from opgraph.ir.datatypes import as_data_type, numpy_dtype
from opgraph.ir.enums import data_type
from opgraph.ir.errors import SerializationError, cudnnGraphNotSupportedError, node_label, tensor_label
from opgraph.ir.node import Node
from opgraph.ir.program import GraphIR
from opgraph.ir.tensor import Tensor
from opgraph.ops import OPS

__all__ = ["FORMAT_VERSION", "Saved", "decode", "encode"]

# Raised with every change that an older reader would misread. A reader knows its own version only.
FORMAT_VERSION = 1

_MAGIC = b"\x89opgraph"  # the first byte is no ASCII: a text, or a copy that lost the eighth bit, is told apart
_HEAD = Struct("<8sIQ")  # magic, format version, bytes of the body
_DIGEST = 32

# Options of `pygraph` that are saved, and the types their values may have.
_OPTIONS: dict[str, tuple[type, ...]] = {
    "sm_count": (int, type(None)),
    "sm_version": (int, type(None)),
    "is_dynamic_shape_enabled": (bool,),
    "is_override_shape_enabled": (bool,),
    "cuda_graph_retention": (enums.cuda_graph_retention, type(None)),
    "is_cuda_graph_replay_expected": (bool,),
}
_ENUMS: dict[str, type[Enum]] = {name: getattr(enums, name) for name in enums.__all__}


class Saved:
    """What a file holds, read back and validated, but not planned.

    Attributes:
        ir: the graph.
        options: keywords of `pygraph` that shape plans.
        device_type: DLPack type of the device the plan was built for.
        engine, engine_id, knobs: the plan.
    """

    __slots__ = ("device_type", "engine", "engine_id", "ir", "knobs", "options")

    def __init__(
        self, ir: GraphIR, options: dict[str, Any], device_type: int, engine: str, engine_id: int, knobs: dict[str, Any]
    ) -> None:
        self.ir = ir
        self.options = options
        self.device_type = device_type
        self.engine = engine
        self.engine_id = engine_id
        self.knobs = knobs


# ---- saving


def encode(
    ir: GraphIR,
    options: Mapping[str, Any],
    device_type: int,
    engine: str,
    engine_id: int,
    knobs: Mapping[str, Any],
) -> bytes:
    """The bytes of a planned graph. TypeError for a value that cannot be written exactly, naming it."""
    tensors = [t for t in ir.all_tensors if _is_indexed(ir, t)]
    body = {
        "data_types": {
            "io": _name(ir._io_data_type),
            "intermediate": _name(ir._intermediate_data_type),
            "compute": _name(ir._compute_data_type),
        },
        "tensors": [_tensor_record(t) for t in tensors],
        "nodes": [_node_record(n) for n in ir.nodes],
        # What unnamed tensors and nodes of a later copy are numbered by.
        "next_uid": ir._next_uid,
        "node_counts": dict(ir._name_counts),
        "options": {key: _written(options[key], f"option {key}") for key in _OPTIONS},
        "plan": {
            "device_type": device_type,
            "engine": engine,
            "engine_id": engine_id,
            "knobs": {key: _written(value, f"engine {engine!r}, knob {key}") for key, value in knobs.items()},
        },
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, len(text))
    return head + sha256(head + text).digest() + text


def _is_indexed(ir: GraphIR, tensor: Tensor) -> bool:
    """False for a tensor declared after planning under a name of the graph: no lookup by name finds it."""
    held = ir._names.get(tensor.name)
    return held is tensor or (isinstance(held, list) and any(t is tensor for t in held))


def _name(member: Enum | None) -> str | None:
    return None if member is None else member.name


def _tensor_record(tensor: Tensor) -> dict[str, Any]:
    offset = tensor.ragged_offset
    return {
        "uid": tensor.uid,
        "name": tensor.name,
        "dim": list(tensor.dim),
        "stride": list(tensor.stride),
        "data_type": _name(tensor.data_type),
        # What the user set; the rest is inferred again when the file is read, and must come out as recorded.
        "set": [
            what
            for what, flag in (
                ("uid", tensor.uid_assigned),
                ("dim", tensor.dim_assigned),
                ("stride", tensor.stride_assigned),
                ("data_type", tensor._data_type_assigned),
            )
            if flag
        ],
        "is_virtual": tensor.is_virtual,
        "is_pass_by_value": tensor.is_pass_by_value,
        "pass_by_value": _written(tensor.pass_by_value, f"{tensor_label(tensor)}: embedded value"),
        "scalar_type": _name(tensor.scalar_type),
        "ragged_offset": None if offset is None else offset.uid,
        "ragged_offset_multiplier": tensor.ragged_offset_multiplier,
        "reordering_type": _name(tensor.reordering_type),
        "alignment_value": tensor.alignment_value,
    }


def _node_record(node: Node) -> dict[str, Any]:
    if OPS.get(node.op) is not node.definition:
        raise TypeError(
            f"serialize: {node_label(node)}: its operator is none of opgraph.ops.OPS, so no file can name it"
        )
    return {
        "op": node.op,
        "name": node.name,
        "inputs": {port: tensor.uid for port, tensor in node.inputs.items()},
        "outputs": {port: tensor.uid for port, tensor in node.outputs.items()},
        "params": {key: _written(value, f"{node_label(node)}: {key}") for key, value in node.params.items()},
        "compute_data_type": _name(node.compute_data_type),
    }


def _written(value: Any, where: str) -> Any:
    """A value as JSON that `_read` turns into an equal value of the same type."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind in (list, tuple):
        return {kind.__name__: [_written(item, where) for item in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _written(item, where) for key, item in value.items()}}
    if kind is slice:
        return {"slice": [_written(item, where) for item in (value.start, value.stop, value.step)]}
    if _ENUMS.get(kind.__name__) is kind:
        return {"enum": [kind.__name__, value.name]}
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _written_array(value, where)
    _refuse(value, where)


def _written_array(value: Any, where: str) -> dict[str, Any]:
    try:
        dtype = as_data_type(value.dtype)
    except cudnnGraphNotSupportedError:
        dtype = None
    if dtype is None or numpy_dtype(dtype) != value.dtype or not value.dtype.isnative:
        _refuse(value, where)
    array = np.asarray(value)
    if sys.byteorder == "big":
        array = array.byteswap()
    tag = "array" if isinstance(value, np.ndarray) else "scalar"
    return {tag: [dtype.name, list(array.shape), array.tobytes().hex()]}


def _refuse(value: Any, where: str) -> NoReturn:
    kind = type(value)
    raise TypeError(
        f"serialize: {where}: a {kind.__module__}.{kind.__qualname__} cannot be saved exactly; "
        "use a Python number, text, enum member or NumPy value of a type of opgraph.data_type"
    )


# ---- reading


def decode(data: Any, name: str) -> Saved:
    """The content of a file, as a validated graph of this name.

    Raises:
        SerializationError: no such file, a damaged one, another format version, or content that contradicts itself.
        TypeError: neither bytes nor a list of ints.
    """
    body = _body(_as_bytes(data))
    try:
        ir = _graph(body, name)
        options = {key: _of_any(_read(body["options"][key]), kinds) for key, kinds in _OPTIONS.items()}
        plan = body["plan"]
        knobs = {key: _read(value) for key, value in plan["knobs"].items()}
        return Saved(
            ir,
            options,
            _of(plan["device_type"], int),
            _of(plan["engine"], str),
            _of(plan["engine_id"], int),
            knobs,
        )
    except SerializationError:
        raise
    except ImportError:
        raise  # a package that a data type needs: the message names it
    except cudnnGraphNotSupportedError as error:
        raise SerializationError(f"deserialize: this version does not take the saved graph: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise SerializationError(
            f"deserialize: the content is not that of a saved graph ({type(error).__name__}: {error})"
        ) from error


def _as_bytes(data: Any) -> bytes:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if isinstance(data, str):
        raise SerializationError("deserialize: a text is no saved graph; read the file in binary mode")
    if not isinstance(data, (list, tuple)):
        raise TypeError(f"deserialize: expected bytes or a list of ints, got {type(data).__name__}")
    try:
        return bytes(data)
    except ValueError:
        raise SerializationError("deserialize: a list of bytes holds ints from 0 to 255 only") from None
    except TypeError:
        raise TypeError("deserialize: expected bytes or a list of ints, got a list of other things") from None


def _body(data: bytes) -> dict[str, Any]:
    start = _HEAD.size + _DIGEST
    if not data:
        raise SerializationError("deserialize: the data is empty")
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise SerializationError("deserialize: the data is no saved graph: it does not begin like one")
    if len(data) < start:
        raise SerializationError(f"deserialize: the data is cut off: {len(data)} bytes, the header alone has {start}")
    _, version, length = _HEAD.unpack_from(data)
    if version != FORMAT_VERSION:
        raise SerializationError(
            f"deserialize: the data has format version {version}, this opgraph reads version {FORMAT_VERSION}; "
            "save the graph again with this version"
        )
    text = data[start:]
    if len(text) != length:
        raise SerializationError(
            f"deserialize: the data is {'cut off' if len(text) < length else 'too long'}: "
            f"{len(text)} bytes of content where the header says {length}"
        )
    if sha256(data[: _HEAD.size] + text).digest() != data[_HEAD.size : start]:
        raise SerializationError("deserialize: the data is damaged: its checksum does not match")
    try:
        body = json.loads(text.decode("ascii"), parse_float=_no_number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"deserialize: the content is not JSON of this format: {error}") from error
    if not isinstance(body, dict):
        raise SerializationError("deserialize: the content is not that of a saved graph: no JSON object")
    return body


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"number {text!r}: floats are written as hexadecimal text")


def _of(value: Any, kind: type) -> Any:
    """The value, which must be of exactly this type: True is no int here."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value


def _of_any(value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, found {value!r}")
    return value


def _member(kind: type[Enum], name: str | None) -> Any:
    return None if name is None else kind[_of(name, str)]


def _graph(body: Mapping[str, Any], name: str) -> GraphIR:
    types = {key: _member(data_type, value) for key, value in body["data_types"].items()}
    ir = GraphIR(name, types["io"], types["intermediate"], types["compute"])
    records = _of(body["tensors"], list)
    tensors: dict[int, Tensor] = {}
    for record in records:
        tensor = _declare(ir, record)
        tensors[tensor.uid] = tensor
    for record in records:
        if record["ragged_offset"] is not None:
            tensors[record["uid"]].set_ragged_offset(tensors[record["ragged_offset"]])
    for record in _of(body["nodes"], list):
        _add(ir, record, tensors)
    for record in records:  # only now: a uid set by hand is one that nothing renumbers
        tensors[record["uid"]]._uid_assigned = "uid" in record["set"]
    ir._next_uid = max(_of(body["next_uid"], int), 1)
    ir._name_counts = {_of(op, str): _of(count, int) for op, count in body["node_counts"].items()}
    ir.validate()
    for record in records:
        _compare(tensors[record["uid"]], record)
    return ir


def _declare(ir: GraphIR, record: Mapping[str, Any]) -> Tensor:
    assigned = _of(record["set"], list)
    name = _of(record["name"], str)
    tensor = ir.tensor(
        record["dim"] if "dim" in assigned else (),
        record["stride"] if "stride" in assigned else None,
        _member(data_type, record["data_type"]) if "data_type" in assigned else None,
        _of(record["is_virtual"], bool),
        False,
        None,
        _member(enums.tensor_reordering, record["reordering_type"]),
        name,
        _of(record["uid"], int),
        _of(record["ragged_offset_multiplier"], int),
        _of(record["alignment_value"], int),
    )
    if not name:
        tensor.set_name("")
    tensor.set_pass_by_value(_read(record["pass_by_value"]))
    tensor.set_is_pass_by_value(_of(record["is_pass_by_value"], bool))
    tensor.set_scalar_type(_member(enums.scalar_type, record["scalar_type"]))
    return tensor


def _add(ir: GraphIR, record: Mapping[str, Any], tensors: Mapping[int, Tensor]) -> None:
    op = _of(record["op"], str)
    if op not in OPS:
        raise SerializationError(f"deserialize: this version has no operator {op!r}")
    ir.add_node(
        OPS[op],
        {_of(port, str): tensors[uid] for port, uid in record["inputs"].items()},
        {_of(port, str): tensors[uid] for port, uid in record["outputs"].items()},
        {_of(key, str): _read(value) for key, value in record["params"].items()},
        _of(record["name"], str),
        _member(data_type, record["compute_data_type"]),
    )


def _compare(tensor: Tensor, record: Mapping[str, Any]) -> None:
    """What is inferred must be what was inferred when the graph was saved: buffers are declared by it."""
    for what, found in (
        ("dim", list(tensor.dim)),
        ("stride", list(tensor.stride)),
        ("data_type", _name(tensor.data_type)),
    ):
        if found != record[what]:
            raise SerializationError(
                f"deserialize: {tensor_label(tensor)}: {what} was {record[what]} when the graph was saved, "
                f"this version infers {found}; build the graph anew"
            )


def _read(value: Any) -> Any:
    """The value that `_written` made this JSON from."""
    if value is None or type(value) in (bool, int, str):
        return value
    ((tag, content),) = _of(value, dict).items()
    return _READERS[tag](content)


def _read_array(content: Any) -> Any:
    name, shape, text = content
    array = np.frombuffer(bytes.fromhex(text), numpy_dtype(data_type[name])).reshape(shape)
    return array.byteswap() if sys.byteorder == "big" else array.copy()


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda content: float.fromhex(_of(content, str)),
    "list": lambda content: [_read(item) for item in _of(content, list)],
    "tuple": lambda content: tuple(_read(item) for item in _of(content, list)),
    "dict": lambda content: {key: _read(item) for key, item in _of(content, dict).items()},
    "slice": lambda content: slice(*(_read(item) for item in content)),
    "enum": lambda content: _ENUMS[content[0]][content[1]],
    "array": _read_array,
    "scalar": lambda content: _read_array(content)[()],
}
