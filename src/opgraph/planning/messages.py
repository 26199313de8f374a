"""Every refusal of a call, in words: rule -> what is wrong, what was declared, what was given, the next step.

The native core finds a fault and names its rule; this module formats it and raises. Nothing here keeps a
reference to a buffer: facts are numbers and texts.
"""

from __future__ import annotations

from _thread import _local
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from opgraph.engines.device import device_text
from opgraph.ir.errors import OperandError

__all__ = ["RULES", "Where", "dtype_text", "last_error", "layout_text", "note_error", "raise_refusal"]

_state = _local()  # the last message of each thread

_MAX_AXES = 32  # kMaxBufferRank of the native core
_CALL_RULES = (
    "override",
    "ordered",
    "mapping",
    "handle",
)  # about the call as a whole; other rules name a buffer

Facts = Mapping[str, Any]


def note_error(message: str) -> str:
    """Remembers a message for `get_last_error_string` in this thread; returns it."""
    _state.message = message
    return message


def last_error() -> str:
    """The last message noted in this thread, or an empty text."""
    return getattr(_state, "message", "")


_BASES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_NAMES = {
    6: "bool",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}
_WIDTHS = {6: 8, 15: 6, 16: 6, 17: 4}


def dtype_text(dtype: Sequence[int]) -> str:
    """A DLPack dtype as its users spell it: `float32`, `bfloat16`, `float4_e2m1fn_x2`; else its three
    numbers."""
    code, bits, lanes = dtype
    if code in _BASES:
        name = f"{_BASES[code]}{bits}"
    elif code in _NAMES and bits == _WIDTHS.get(code, 8):
        name = _NAMES[code]
    else:
        return f"DLPack dtype (code {code}, bits {bits}, lanes {lanes})"
    return name if lanes == 1 else f"{name}_x{lanes}"


def layout_text(dims: Any, strides: Any) -> str:
    text = f"dims {_ints(dims)}"
    return text if strides is None else f"{text} strides {_ints(strides)}"


def _ints(values: Any) -> str:
    return "(" + ", ".join(str(v) for v in values) + ")"


class Where:
    """The tensor (or the call as a whole) that a refusal is about, and its declaration."""

    __slots__ = ("device", "graph", "operand", "other")

    def __init__(
        self,
        graph: str,
        operand: Mapping[str, Any] | None,
        other: Mapping[str, Any] | None,
        device: tuple[int, int],
    ) -> None:
        self.graph = graph
        self.operand = operand
        self.other = other
        self.device = device

    def text(self, rule: str) -> str:
        head = f"execute of graph {self.graph!r}"
        if self.operand is not None:
            return f"{head}: {_label(self.operand)}"
        return head if rule.startswith(_CALL_RULES) else f"{head}: workspace"

    def layout(self) -> str:
        operand = self.operand
        return "nothing" if operand is None else layout_text(operand["dims"], operand["strides"])


def _label(operand: Mapping[str, Any]) -> str:
    return f"tensor {operand['name']!r} (uid {operand['uid']})"


# ---- what was declared, what was given: each a function of (where, facts)


def _declared_dtype(w: Where, f: Facts) -> str:
    return dtype_text(w.operand["dtype"]) if w.operand else ""


def _declared_layout(w: Where, f: Facts) -> str:
    return w.layout()


def _declared_all(w: Where, f: Facts) -> str:
    return f"{_declared_dtype(w, f)} {w.layout()}" if w.operand else "a buffer"


def _declared_device(w: Where, f: Facts) -> str:
    return f"a plan for {device_text(w.device)}"


def _declared_role(w: Where, f: Facts) -> str:
    return "an output" if w.operand and w.operand["output"] else "an input"


def _declared_bytes(w: Where, f: Facts) -> str:
    need = f"{f['need']} bytes" if f.get("need", -1) >= 0 else "more bytes"
    if w.operand is None:
        return need
    if f.get("need") not in (None, -1, _span_bytes(w.operand)):
        return f"{need} for the extents overridden in this call, {_span_bytes(w.operand)} for {w.layout()}"
    return f"{need} for {w.layout()} of {_declared_dtype(w, f)}"


def _span_bytes(operand: Mapping[str, Any]) -> int:
    """Bytes from the first to past the last element of the declaration."""
    _, bits, lanes = operand["dtype"]
    elements = 1
    for extent, stride in zip(operand["dims"], operand["strides"], strict=True):
        if extent == 0:
            return 0
        elements += (extent - 1) * stride
    return int(elements // operand["pack"] * bits * lanes // 8)


def _declared_count(w: Where, f: Facts) -> str:
    return str(f["need"]) if f.get("need", -1) >= 0 else "equal lengths"


def _declared_rank(w: Where, f: Facts) -> str:
    return w.layout() if w.operand else f"at most {_MAX_AXES} axes"


def _declared_scalar(w: Where, f: Facts) -> str:
    return f"a pass-by-value scalar of {_declared_dtype(w, f)}"


def _declared_other(w: Where, f: Facts) -> str:
    return f"memory apart from {_label(w.other)}" if w.other else "memory of its own"


def _given_dtype(w: Where, f: Facts) -> str:
    return dtype_text(f["dtype"]) if "dtype" in f else ""


def _given_layout(w: Where, f: Facts) -> str:
    if "dims" in f:
        return layout_text(f["dims"], f.get("strides"))
    if "rank" in f:
        return f"{f['rank']} axes"
    return str(f.get("given", ""))


def _given_device(w: Where, f: Facts) -> str:
    return f"memory of {device_text(f['device'])}" if "device" in f else "memory of another device"


def _given_handle(w: Where, f: Facts) -> str:
    return f"a handle of {device_text((f.get('have', 0), f.get('need', 0)))}"


def _given_bytes(w: Where, f: Facts) -> str:
    layout = layout_text(f["dims"], f.get("strides")) if "dims" in f else ""
    if f.get("have", -1) < 0:
        return layout
    return f"{f['have']} bytes in {layout}" if layout else f"{f['have']} bytes"


def _given_elements(w: Where, f: Facts) -> str:
    return f"a buffer of {f['have']} elements" if f.get("have", -1) >= 0 else _given_layout(w, f)


def _given_count(w: Where, f: Facts) -> str:
    return str(f["have"]) if f.get("have", -1) >= 0 else ""


def _given_address(w: Where, f: Facts) -> str:
    return f"address {f['address']:#x}" if f.get("address") else "a null address"


def _given_type(w: Where, f: Facts) -> str:
    if "given" in f:
        return f"{f['given']} ({f['type']})" if "type" in f else str(f["given"])
    return f"an object of type {f['type']}" if "type" in f else ""


def _given_other(w: Where, f: Facts) -> str:
    return f"a buffer that shares memory with {_label(w.other)}" if w.other else "a buffer that shares memory"


def _nothing(w: Where, f: Facts) -> str:
    return ""


def _words(text: str) -> Callable[[Where, Facts], str]:
    return lambda w, f: text


_LAYOUT_STEP = (
    "pass a buffer laid out as declared, or declare the tensor with the buffer's own dims and strides"
)
_OVERRIDE_STEP = "override_uids, override_shapes and override_strides hold one entry per overridden tensor"
_ORDERED_STEP = "pass a list of buffers together with tensor_uids, a list of as many distinct int uids"

# rule -> (what is wrong, declared, given, next step). A detail from the native core follows the first part.
RULES: dict[str, tuple[str, Callable[[Where, Facts], str], Callable[[Where, Facts], str], str]] = {
    "missing": (
        "no buffer",
        _declared_layout,
        _words("none"),
        "pass a buffer under the tensor, its uid or its name",
    ),
    "type": (
        "not a buffer this library can read",
        _words("a buffer"),
        _given_type,
        "pass an array with __dlpack__, a NumPy array, an object with the array interface, or an int address",
    ),
    "bool": (
        "a bool is neither a buffer nor an address",
        _words("a buffer"),
        _words("a bool"),
        "pass an array; for a scalar tensor declare it BOOLEAN and pass-by-value",
    ),
    "capsule": (
        "a raw DLPack capsule is not accepted, since it can be consumed only once",
        _words("a buffer"),
        _words("a capsule"),
        "pass the array it was made from",
    ),
    "producer": (
        "the buffer cannot be read",
        _declared_all,
        _given_type,
        "what its producer reports is in parentheses; pass a plain array of the declared data type",
    ),
    "dtype": (
        "wrong data type",
        _declared_dtype,
        _given_dtype,
        "convert the buffer, or declare the tensor with the buffer's data type",
    ),
    "subbyte": (
        "unpacked elements of a sub-byte type",
        _declared_dtype,
        _given_dtype,
        "pack two elements per byte with opgraph.datatypes.pack_subbyte, and pass the bytes as uint8",
    ),
    "device": (
        "wrong device",
        _declared_device,
        _given_device,
        "move the buffer to the plan's device, or build the graph for the buffer's device",
    ),
    "rank": ("too many axes", _declared_rank, _given_layout, "pass a view with fewer axes"),
    "layout": (
        "the buffer's layout does not fit the declaration",
        _declared_layout,
        _given_layout,
        _LAYOUT_STEP,
    ),
    "bytes": (
        "the buffer is too small",
        _declared_bytes,
        _given_bytes,
        "pass a buffer of at least that size",
    ),
    "negative_stride": (
        "negative strides are not supported",
        _declared_layout,
        _given_layout,
        "pass a copy in forward order",
    ),
    "negative_extent": ("negative extent", _declared_layout, _given_layout, "extents are 0 or more"),
    "self_overlap": (
        "the output overlaps itself: several elements share one address",
        _declared_layout,
        _given_layout,
        "pass an output buffer in which each element has its own memory",
    ),
    "read_only": (
        "the buffer is read-only",
        _declared_role,
        _words("a read-only buffer"),
        "pass a writable buffer",
    ),
    "requires_grad": (
        "the buffer requires grad",
        _declared_role,
        _words("a tensor that requires grad"),
        "pass tensor.detach(), or an output that does not require grad",
    ),
    "conjugate": (
        "the tensor is a lazy conjugate",
        _declared_role,
        _words("a conjugate view"),
        "pass tensor.resolve_conj()",
    ),
    "negative_bit": (
        "the tensor is a lazy negation",
        _declared_role,
        _words("a negated view"),
        "pass tensor.resolve_neg()",
    ),
    "null_address": (
        "no memory: the address is null",
        _declared_layout,
        _given_address,
        "pass a real array; fake and meta tensors hold no data, so execute outside of tracing",
    ),
    "address": (
        "not an address",
        _words("an int address of 0 or more"),
        _given_type,
        "pass array.data_ptr()",
    ),
    "overlap": (
        "the output shares memory with another operand",
        _declared_other,
        _given_other,
        "pass separate memory",
    ),
    "inplace": (
        "the plan cannot work in place for this pair",
        _declared_other,
        _given_other,
        "pass an output buffer of its own",
    ),
    "ragged_offsets": (
        "the ragged offsets do not fit the buffer",
        _declared_layout,
        _given_elements,
        "offsets start at 0 or more, never fall, and end inside the buffer",
    ),
    "override_length": ("the override lists differ in length", _declared_count, _given_count, _OVERRIDE_STEP),
    "override_rank": (
        "the override has another rank",
        _declared_layout,
        _given_layout,
        "an override keeps the declared rank, and its stride has as many entries as its shape",
    ),
    "override_extent": (
        "the override does not fit",
        _declared_layout,
        _given_layout,
        "extents are 0 or more and the buffer has to hold them",
    ),
    "override_type": ("overrides must be lists of ints", _words("ints"), _given_type, _OVERRIDE_STEP),
    "override_duplicate": (
        "the tensor is overridden twice",
        _words("one override per tensor"),
        _nothing,
        _OVERRIDE_STEP,
    ),
    "override_unknown": (
        "an override names no operand of this graph",
        _words("uids of operands"),
        _given_type,
        _OVERRIDE_STEP,
    ),
    "override_kind": (
        "pass-by-value, ragged, reordered and packed tensors have no layout to override",
        _declared_layout,
        _given_layout,
        "leave it out of the override lists",
    ),
    "overrides_unsupported": (
        "the selected plan does not honour overrides",
        _words("no overrides"),
        _nothing,
        "build with is_override_shape_enabled=True",
    ),
    "ordered_form": (
        "a list of buffers needs tensor_uids, and tensor_uids a list of buffers",
        _words("both or neither"),
        _given_type,
        _ORDERED_STEP,
    ),
    "ordered_length": (
        "the list of buffers and tensor_uids differ in length",
        _declared_count,
        _given_count,
        _ORDERED_STEP,
    ),
    "ordered_duplicate": (
        "Duplicate tensor uid in tensor_uids",
        _words("distinct uids"),
        _given_count,
        _ORDERED_STEP,
    ),
    "ordered_type": ("tensor_uids must hold int uids", _words("ints"), _given_type, _ORDERED_STEP),
    "mapping_type": (
        "the operands are no mapping, and there are no tensor_uids that would order a list",
        _words("a mapping, or a list together with tensor_uids"),
        _given_type,
        "pass {tensor: buffer, ...}, or a list of buffers and tensor_uids=[...]",
    ),
    "workspace_missing": (
        "the plan needs a workspace",
        _declared_bytes,
        _words("none (0 bytes)"),
        "allocate graph.get_workspace_size() bytes and pass them as workspace",
    ),
    "workspace_small": (
        "the workspace is too small",
        _declared_bytes,
        _given_bytes,
        "allocate graph.get_workspace_size() bytes",
    ),
    "workspace_strided": (
        "the workspace is not dense, so its byte count is not a byte range",
        _words("a dense buffer"),
        _given_layout,
        "pass a contiguous buffer, uint8 by custom",
    ),
    "workspace_overlap": (
        "the workspace shares memory with an operand",
        _words("memory of its own"),
        _given_other,
        "pass separate memory",
    ),
    "workspace_unknown": (
        "the workspace is a bare address, so its size is not known",
        _words("a sized buffer"),
        _given_address,
        "pass an array as workspace",
    ),
    "handle_type": ("not a handle", _words("a Handle"), _given_type, "make one with opgraph.create_handle()"),
    "handle_device": (
        "the handle is of another device",
        _declared_device,
        _given_handle,
        "pass a handle of the plan's device",
    ),
    "scalar": (
        "a pass-by-value operand holds one element",
        _declared_scalar,
        _given_layout,
        "pass a Python number, a NumPy scalar or an array of one element",
    ),
}

_KIND_RULES = frozenset(
    (
        "type",
        "bool",
        "capsule",
        "override_type",
        "ordered_type",
        "mapping_type",
        "handle_type",
    )
)


def raise_refusal(rule: str, where: Where, facts: Facts) -> NoReturn:
    """Raises the exception of a rule: TypeError for an object of the wrong kind, else OperandError."""
    entry = RULES.get(rule, (rule.replace("_", " "), _declared_layout, _given_type, ""))
    what, declared_of, given_of, next_step = entry
    declared, given = declared_of(where, facts), given_of(where, facts)
    detail = facts.get("detail")
    parts = [f"{where.text(rule)}: {what}"]
    if detail:
        parts[0] += f" ({detail})"
    pair = [f"{'expected' if where.operand is None else 'declared'} {declared}"] if declared else []
    if given:
        pair.append(f"given {given}")
    if pair:
        parts.append(", ".join(pair))
    if next_step:
        parts.append(next_step)
    message = note_error("; ".join(parts))
    if rule in _KIND_RULES:
        raise TypeError(message)
    name = where.operand["name"] if where.operand else ""
    uid = where.operand["uid"] if where.operand else -1
    raise OperandError(
        message, tensor=name, uid=uid, rule=rule, declared=declared, given=given, next_step=next_step
    )
