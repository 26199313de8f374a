"""What attention and its gradient share before anything is computed: arguments, and the rules of `validate()`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import data_type, diagonal_alignment, scalar_type
from ..ir.errors import tensor_label
from .base import malformed, number, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "alibi_slopes",
    "band_of",
    "check_band",
    "check_extras",
    "check_flags",
    "check_lengths",
    "check_shapes",
    "dropout_ports",
    "mask_params",
    "number_or_tensor",
    "refuse",
]



# -- arguments -----------------------------------------------------------------------------------------------


def number_or_tensor(value: Any) -> tuple[float | None, Any]:
    """A scale that is a number, or else the tensor."""
    if value is None or (isinstance(value, (int, float, np.generic)) and not isinstance(value, bool)):
        return (None if value is None else float(value)), None
    return None, value


_INTS = (
    "sliding_window_length",
    "diagonal_band_left_bound",
    "diagonal_band_right_bound",
    "max_total_seq_len_q",
    "max_total_seq_len_kv",
)
_FLAGS = (
    "use_causal_mask",
    "use_causal_mask_bottom_right",
    "use_padding_mask",
    "use_alibi_mask",
    "stats_use_log2",
    "unfuse_fma",
)


def mask_params(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that both operators have, of the right kinds; `TypeError` for others."""
    alignment = given["diagonal_alignment"]
    if not isinstance(alignment, diagonal_alignment):
        raise TypeError(f"{op}: diagonal_alignment is a diagonal_alignment, given {alignment!r}")
    return {
        "diagonal_alignment": alignment,
        **{key: None if given[key] is None else index(given[key]) for key in _INTS},
        **{key: bool(given[key]) for key in _FLAGS},
        "implementation": given["implementation"],
    }


def dropout_ports(graph: Any, op: str, dropout: Any, backward: bool = False) -> tuple[float | None, dict[str, Any]]:
    """A `dropout` argument as a probability, or None, and input ports."""
    if dropout is None:
        return None, {}
    items = tuple(dropout) if isinstance(dropout, (tuple, list)) else ()
    if len(items) == 3 and isinstance(items[0], (int, float, np.generic)):
        ports = {"dropout_seed": items[1], "dropout_offset": items[2]}
        return float(items[0]), {port: _int64(graph, value) for port, value in ports.items()}
    if len(items) == (3 if backward else 2):
        ports = dict(zip(("dropout_mask", "dropout_scale", "dropout_scale_inverse"), items, strict=False))
        return None, ports
    forms = "(mask, scale, scale_inverse)" if backward else "(mask, scale)"
    raise ValueError(f"{op}: dropout is (probability, seed, offset) or {forms}; given {dropout!r}")


def _int64(graph: Any, value: Any) -> Any:
    """A Python number as an INT64 constant of the plan; anything else as it is."""
    if not isinstance(value, int):
        return value
    return graph.tensor_scalar(value, scalar_type.COMPILE_TIME_CONST).set_data_type(data_type.INT64)


def band_of(params: Mapping[str, Any]) -> tuple[bool, int | None, int | None]:
    """(bottom right, left bound, right bound) of a node's attributes, deprecated spellings resolved."""
    left, right = params["diagonal_band_left_bound"], params["diagonal_band_right_bound"]
    if left is None:
        left = params["sliding_window_length"]
    bottom_right = params["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT
    if params["use_causal_mask"] or params["use_causal_mask_bottom_right"]:
        right = 0
        bottom_right = bottom_right or params["use_causal_mask_bottom_right"]
    return bottom_right, left, right


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head, as published with ALiBi (Press et al., 2021).

    n = the largest power of two up to `heads`; the first n heads have 2^(-8 i / n), i = 1..n, the others
    2^(-4 (2 j - 1) / n), j = 1, 2, ...
    """
    n = 1 << (max(heads, 1).bit_length() - 1)
    first = [2.0 ** (-8 * i / n) for i in range(1, min(n, heads) + 1)]
    return first + [2.0 ** (-4 * (2 * j - 1) / n) for j in range(1, heads - n + 1)]


# -- rules ---------------------------------------------------------------------------------------------------

_FLOATS = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)
_INTEGERS = (data_type.INT32, data_type.INT64)


def refuse(node: Any, *options: str) -> None:
    """Options that are part of the signature but not served."""
    for option in options:
        value = node.params.get(option)
        if option in node.inputs or option in node.outputs or (value is not None and value is not False):
            unsupported(node, f"option {option} is not served", next_step=f"leave {option} out")


def check_shapes(node: Any) -> tuple[int, int, int, int, int]:
    """(B, Hq, Sq, Skv, Dv)"""
    q, k, v = (node.inputs.get(port) for port in ("q", "k", "v"))
    for port, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None:
            malformed(node, f"{port} is missing", next_step="pass q, k and v")
        if len(tensor.dim) != 4 or len(tensor.stride) != 4:
            malformed(
                node,
                f"{port} has the 4 axes batch, head, row, channel",
                tensor=tensor,
                expected="4 extents and 4 strides",
                given=f"dim {tensor.dim}, stride {tensor.stride}",
            )
    batch, heads, rows, channels = q.dim
    tables = [f"paged_attention_{side}_table" for side in ("k", "v")]
    keys = _check_paging(node, batch) if any(table in node.inputs for table in tables) else k.dim[2]
    rules = [(k, 3, channels, f"the channels of {tensor_label(q)}")]
    for tensor, table in zip((k, v), tables, strict=True):
        if table not in node.inputs:
            rules.append((tensor, 0, batch, f"the batch of {tensor_label(q)}"))
            rules.append((tensor, 2, keys, "the number of keys"))
    for tensor, axis, extent, what in rules:
        if tensor.dim[axis] != extent:
            malformed(
                node,
                f"axis {axis} must be {what}",
                tensor=tensor,
                expected=f"{extent} at axis {axis}",
                given=tensor.dim,
            )
    for tensor in (k, v):
        if heads % tensor.dim[1] if tensor.dim[1] else heads:
            unsupported(
                node,
                "the heads must divide those of q",
                tensor=tensor,
                expected=f"a divisor of {heads} at axis 1",
                given=tensor.dim,
            )
    for tensor in (q, k, v):
        if tensor.stride[3] != 1 and tensor.dim[3] > 1:
            unsupported(node, "the last stride must be 1", tensor=tensor, expected=1, given=tensor.stride)
        if tensor.data_type not in (None, *_FLOATS):
            unsupported(
                node,
                "the data type is not a plain floating one",
                tensor=tensor,
                expected="HALF, BFLOAT16, FLOAT or DOUBLE",
                given=tensor.data_type.name,
            )
    return batch, heads, rows, keys, v.dim[3]


def _check_paging(node: Any, batch: int) -> int:
    """The number of keys that the page tables stand for."""
    params, inputs = node.params, node.inputs
    if not params["use_padding_mask"]:
        unsupported(node, "paged attention needs the padding mask")
    tables = {side: inputs.get(f"paged_attention_{side}_table") for side in ("k", "v")}
    paged = [(side, table) for side, table in tables.items() if table is not None]
    plain = [side for side, table in tables.items() if table is None]
    most = params["paged_attention_max_seq_len_kv"]
    for _, table in paged:
        if len(table.dim) != 4 or table.dim[0] != batch or (table.dim[1], table.dim[3]) != (1, 1):
            malformed(
                node, "a page table holds the blocks of each batch entry", tensor=table,
                expected=f"({batch}, 1, blocks, 1)", given=table.dim,
            )  # fmt: skip
        if table.data_type not in (None, *_INTEGERS):
            malformed(node, "a page table is INT32", tensor=table, expected="INT32", given=table.data_type.name)
    side, table = paged[0]
    if most is not None and most < 0:
        malformed(node, "paged_attention_max_seq_len_kv is a length", expected="0 or more", given=most)
    keys = inputs[plain[0]].dim[2] if plain else most if most is not None else table.dim[2] * inputs[side].dim[2]
    for side, table in paged:
        size = inputs[side].dim[2]
        blocks = -(-keys // size) if size else 0
        if table.dim[2] != blocks:
            malformed(
                node, f"the page table of {side} has one entry for each block of {size} keys", tensor=table,
                expected=f"{blocks} entries for {keys} keys", given=table.dim,
            )  # fmt: skip
    packed = any(table.ragged_offset is not None for _, table in paged)
    for port in ("q", "k", "v"):
        if inputs[port].ragged_offset is not None and not (packed and port == "q"):
            unsupported(node, "paged attention does not go with a ragged q, k or v", tensor=inputs[port])
    return int(keys)


def check_lengths(node: Any, batch: int) -> None:
    """The lengths of each side are there in one form when they are needed, and only then."""
    params, inputs = node.params, node.inputs
    sides = [(f"seq_len_{side}", f"cu_seq_len_{side}") for side in ("q", "kv")]
    given = [[port for port in side if port in inputs] for side in sides]
    found = ", ".join(given[0] + given[1]) or "none"
    if any(len(ports) > 1 for ports in given):
        malformed(node, "a side has its lengths in one form", expected="seq_len or cu_seq_len", given=found)
    if len(given[0]) != len(given[1]):
        malformed(node, "lengths are needed for both sides", expected="seq_len_q and seq_len_kv", given=found)
    if params["use_padding_mask"] and not given[0]:
        malformed(node, "use_padding_mask needs the lengths", expected="seq_len_q and seq_len_kv", given=found)
    if given[0] and not params["use_padding_mask"] and params["score_mod"] is None:
        malformed(node, "lengths need the padding mask", given=found, next_step="pass use_padding_mask=True")
    for port in given[0] + given[1]:
        tensor, entries = inputs[port], batch + port.startswith("cu_")
        if tensor.dim not in ((entries, 1, 1, 1), (entries,)):
            malformed(
                node,
                f"{port} holds one length for each batch entry" + (", added up from 0" if entries > batch else ""),
                tensor=tensor,
                expected=f"({entries}, 1, 1, 1) or ({entries},)",
                given=tensor.dim,
            )
        if tensor.data_type not in (None, *_INTEGERS):
            malformed(node, f"{port} is INT32", tensor=tensor, expected="INT32", given=tensor.data_type.name)
    if not given[0]:
        for port, tensor in (*inputs.items(), *node.outputs.items()):
            if tensor.ragged_offset is not None:
                unsupported(
                    node,
                    f"{port} has a ragged offset, which needs the padding mask",
                    tensor=tensor,
                    next_step="pass use_padding_mask=True with seq_len_q and seq_len_kv",
                )


def check_flags(node: Any) -> None:
    """Attributes that need another one."""
    params, inputs = node.params, node.inputs
    probability = params["dropout_probability"]
    if probability is not None and not 0 <= probability < 1:
        malformed(node, "the dropout probability is in [0, 1)", given=probability)
    if "rng_dump" in node.outputs and probability is None:
        malformed(node, "rng_dump needs a dropout with a probability", next_step="pass dropout=(p, seed, offset)")
    for side, ports in (("q", ("q",)), ("kv", ("k", "v"))):
        if params[f"max_total_seq_len_{side}"] is not None and all(
            inputs[port].ragged_offset is None for port in ports
        ):
            unsupported(node, f"max_total_seq_len_{side} needs a ragged {' or '.join(ports)}")


def check_band(node: Any, rows: int, keys: int) -> None:
    params = node.params
    causal, causal_right = params["use_causal_mask"], params["use_causal_mask_bottom_right"]
    left, right = params["diagonal_band_left_bound"], params["diagonal_band_right_bound"]
    window = params["sliding_window_length"]
    if causal and (causal_right or params["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT):
        malformed(node, "use_causal_mask is TOP_LEFT", given="BOTTOM_RIGHT too", next_step="pass one of them")
    if (causal or causal_right) and right not in (None, 0):
        malformed(node, "a causal mask has right bound 0", given=right, next_step="pass the bound alone")
    if window is not None and left not in (None, window):
        malformed(node, f"sliding_window_length {window} and the left bound {left} contradict each other")
    bottom_right, left, right = band_of(params)
    if left is not None and left < 1:
        malformed(node, "the left bound counts the diagonal", expected="1 or more", given=left)
    if right is not None and right < 0:
        malformed(node, "the right bound must not be negative", expected="0 or more", given=right)
    if params["score_mod"] is not None and (left is not None or right is not None or params["use_alibi_mask"]):
        malformed(node, "score_mod excludes the built-in masks", next_step="build the mask in score_mod")
    if params["use_alibi_mask"] and right != 0:
        unsupported(node, "use_alibi_mask needs right bound 0", expected=0, given=right)
    tall = rows > keys and not params["use_padding_mask"]
    next_step = "pass lengths with use_padding_mask=True"
    if tall and left is not None:
        unsupported(node, "a left bound needs Sq <= Skv", given=f"Sq {rows}, Skv {keys}", next_step=next_step)
    if bottom_right and (left is not None or right is not None):
        if tall:
            unsupported(node, "BOTTOM_RIGHT needs Sq <= Skv", given=f"Sq {rows}, Skv {keys}", next_step=next_step)
        for used, option in (
            ("bias" in node.inputs, "a bias"),
            (params["use_alibi_mask"], "ALiBi"),
            (params["dropout_probability"] is not None or "dropout_mask" in node.inputs, "dropout"),
        ):
            if used:
                unsupported(node, f"BOTTOM_RIGHT does not go with {option}")


def check_extras(node: Any, full: tuple[int, int, int, int]) -> None:
    """The tensors beside q, k and v: each fits the scores [B, Hq, Sq, Skv]."""
    inputs = node.inputs
    batch, heads, rows, keys = full
    for port in ("bias", "dropout_mask"):
        tensor = inputs.get(port)
        if tensor is None:
            continue
        if len(tensor.dim) != 4 or any(a not in (1, b) for a, b in zip(tensor.dim, full, strict=True)):
            malformed(
                node,
                f"the {port.replace('_', ' ')} must broadcast to the scores",
                tensor=tensor,
                expected=f"each extent 1 or that of {full}",
                given=tensor.dim,
            )
        if port == "bias" and tensor.data_type is data_type.BOOLEAN:
            unsupported(node, "a BOOLEAN bias", tensor=tensor, next_step="pass 0 and -inf as floats")
    for port in ("attn_scale", "dropout_seed", "dropout_offset", "dropout_scale", "dropout_scale_inverse"):
        tensor = inputs.get(port)
        if tensor is None:
            continue
        if number(tensor.dim) != 1:
            malformed(node, f"{port} is one number", tensor=tensor, expected="(1, 1, 1, 1)", given=tensor.dim)
        if port in ("dropout_seed", "dropout_offset") and tensor.data_type not in (None, *_INTEGERS):
            malformed(node, f"{port} is INT64", tensor=tensor, expected="INT64", given=tensor.data_type.name)
    sink, tiles = inputs.get("sink_token"), inputs.get("block_mask")
    if sink is not None:
        if sink.dim != (1, heads, 1, 1):
            malformed(node, "one sink per head", tensor=sink, expected=(1, heads, 1, 1), given=sink.dim)
        if sink.data_type not in (None, data_type.FLOAT):
            unsupported(node, "sink_token is FLOAT", tensor=sink, given=sink.data_type.name)
    if tiles is not None:
        dim = (batch, heads, (rows + 127) // 128, (keys + 1023) // 1024)
        if tiles.dim != dim:
            malformed(node, "one bit for each tile of 128 x 128 scores", tensor=tiles, expected=dim, given=tiles.dim)
        if tiles.data_type not in (None, data_type.UINT8):
            malformed(node, "block_mask is UINT8", tensor=tiles, expected="UINT8", given=tiles.data_type.name)
