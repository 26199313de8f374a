"""Mixture of experts: products of the rows of each expert, `moe_grouped_matmul` and `moe_grouped_matmul_bwd`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import NodeType, data_type, moe_grouped_matmul_mode
from ..ir.errors import tensor_label
from .base import (
    Array,
    ContentsError,
    GraphOps,
    OpDef,
    RefCall,
    check_required,
    check_set_dim,
    graph_op,
    malformed,
    number,
    row_major,
    set_dim,
    set_stride,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..ir.tensor import Tensor

__all__ = ["OPS", "MoeOps"]

_NONE, _GATHER = moe_grouped_matmul_mode.NONE, moe_grouped_matmul_mode.GATHER
_SCATTER, _COMBINE = moe_grouped_matmul_mode.SCATTER, moe_grouped_matmul_mode.COMBINE


class MoeOps(GraphOps):
    """Grouped products of the graph.

    Rows are routed: they are sorted by expert, and `first_token_offset` tells where the rows of each expert
    begin. It has E entries, expert e owning the rows from entry e on to entry e + 1 and the last expert those
    to the end, or E + 1 entries, the last one being the end. Offsets are INT32 or INT64, ascending, and lie
    in the rows; an expert may own none. Its `alignment_value` promises that every offset is a multiple of
    it. Products are summed in the compute type and rounded once. Nothing may alias unless the plan says so.
    """

    __slots__ = ()

    @graph_op
    def moe_grouped_matmul(
        self,
        token: Any,
        weight: Any = None,
        first_token_offset: Any = None,
        token_index: Any = None,
        token_ks: Any = None,
        mode: moe_grouped_matmul_mode = _NONE,
        top_k: int = 0,
        name: str = "",
        *,
        top_k_scores: Any = None,
        compute_data_type: Any = data_type.FLOAT,
        out_dims: Any = None,
    ) -> Tensor:
        """Each routed row times the weight of its expert; returns OUT_0, row-major.

            NONE:    OUT_0[0, r] = token[0, r] @ weight[e(r)]
            GATHER:  OUT_0[0, r] = token[0, token_index[r]] @ weight[e(r)]
            SCATTER: OUT_0[0, token_index[r] * top_k + token_ks[r]] = token[0, r] @ weight[e(r)]
            COMBINE: OUT_0[0, t] = sum over the rows r with token_index[r] = t of
                                   top_k_scores[0, t, token_ks[r]] * (token[0, r] @ weight[e(r)])

        Shapes: token [1, T, H]; weight [E, H, N], strides free; first_token_offset [E, 1, 1] or [E + 1, 1, 1];
        token_index and token_ks, INT32 or INT64, [1, R, 1] (or [R]), one entry for each routed row: R is free
        for GATHER and T otherwise; top_k_scores [1, tokens, top_k]. OUT_0 is [1, R, N], for COMBINE
        [1, tokens, N], of the graph's default type. `top_k` is how many experts each token has: 1 to E for
        SCATTER and COMBINE, without effect otherwise.

        Rows of OUT_0 that no expert's row reaches are unspecified (the CPU engine writes 0); for COMBINE they
        are the empty sum, 0. When several rows are scattered to one place, any of them is there.

        Raises `TypeError` for a mode that is no moe_grouped_matmul_mode or a top_k that is no integer.
        Raises at `validate()`: `ValueError` for an unset port that the mode needs, scores outside COMBINE,
        top_k out of range, and extents or index types that do not fit; `cudnnGraphNotSupportedError` for dims
        set on OUT_0 that are not the inferred ones. At execution, `ValueError` for offsets that decrease or
        leave the rows, and for indices of routed rows out of range.
        """
        if not isinstance(mode, moe_grouped_matmul_mode):
            raise TypeError(f"moe_grouped_matmul: mode is a moe_grouped_matmul_mode, given {mode!r}")
        return self._add_node(
            "moe_grouped_matmul",
            inputs={
                "token": token,
                "weight": weight,
                "first_token_offset": first_token_offset,
                "token_index": token_index,
                "token_ks": token_ks,
                "top_k_scores": top_k_scores,
            },
            outputs=("OUT_0",),
            params={"mode": mode, "top_k": index(top_k)},
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["OUT_0"]

    @graph_op
    def moe_grouped_matmul_bwd(
        self,
        doutput: Any,
        token: Any = None,
        first_token_offset: Any = None,
        name: str = "",
        compute_data_type: Any = data_type.FLOAT,
        out_dims: Any = None,
    ) -> Tensor:
        """Gradient of `moe_grouped_matmul` (mode NONE) for its weight; returns dweight.

            dweight[e] = sum over the rows r of expert e of token[0, r]^T doutput[0, r]

        Shapes: doutput [1, T, N], token [1, T, H], dweight [E, H, N]. E is the number of offsets; with E + 1
        of them, set the dim of dweight. dweight is column-major in (H, N), stride [H * N, 1, H], unless set.
        An expert without rows gets 0.

        Raises at `validate()`: `ValueError` for unset tensors and extents that do not fit;
        `cudnnGraphNotSupportedError` for dims set on dweight that are not the inferred ones. At execution,
        `ValueError` for offsets that decrease or leave the rows.
        """
        return self._add_node(
            "moe_grouped_matmul_bwd",
            inputs={"doutput": doutput, "token": token, "first_token_offset": first_token_offset},
            outputs=("dweight",),
            name=name,
            compute_data_type=compute_data_type,
            out_dims=out_dims,
        )["dweight"]


# -- inference -----------------------------------------------------------------------------------------------

_INTEGERS = (data_type.INT32, data_type.INT64)
_NEEDED = {
    _NONE: (),
    _GATHER: ("token_index",),
    _SCATTER: ("token_index", "token_ks"),
    _COMBINE: ("token_index", "token_ks", "top_k_scores"),
}


def _infer(node: Any) -> None:
    mode, top_k = node.params["mode"], node.params["top_k"]
    check_required(node, "token", "weight", "first_token_offset")
    for port in _NEEDED[mode]:
        if port not in node.inputs:
            malformed(node, f"{port} not set, which mode {mode.name} needs", next_step=f"pass {port}=")
    token, weight, scores = (node.inputs.get(port) for port in ("token", "weight", "top_k_scores"))
    if scores is not None and mode is not _COMBINE:
        malformed(node, "top_k_scores go with mode COMBINE", tensor=scores, given=mode.name)
    _check_rows(node, "token", token)
    if len(weight.dim) != 3 or weight.dim[1] != token.dim[2]:
        malformed(
            node,
            f"weight has one matrix per expert, with the channels of {tensor_label(token)}",
            tensor=weight,
            expected=f"(E, {token.dim[2]}, N)",
            given=weight.dim,
        )
    experts, _, width = weight.dim
    offsets = _check_integers(node, "first_token_offset")
    if offsets not in (experts, experts + 1):
        malformed(
            node,
            "first_token_offset has one entry per expert, and may have the end as one more",
            tensor=node.inputs["first_token_offset"],
            expected=f"{experts} or {experts + 1} elements",
            given=offsets,
        )
    low = 1 if mode in (_SCATTER, _COMBINE) else 0
    if not low <= top_k <= experts:
        malformed(node, "top_k out of range", expected=f"{low or 1} to {experts}, the experts", given=top_k)
    routed = token.dim[1]
    for port in ("token_index", "token_ks"):
        if port in node.inputs:
            count = _check_integers(node, port)
            if mode is _GATHER and port == "token_index":
                routed = count
            elif count != routed:
                malformed(
                    node, f"{port} has one entry for each routed row", tensor=node.inputs[port],
                    expected=routed, given=count,
                )  # fmt: skip
    if mode is _COMBINE:
        if len(scores.dim) != 3 or scores.dim[0] != 1 or scores.dim[2] != top_k:
            malformed(
                node, "top_k_scores has top_k entries for each token", tensor=scores,
                expected=f"(1, tokens, {top_k})", given=scores.dim,
            )  # fmt: skip
        routed = scores.dim[1]
    out = node.outputs["OUT_0"]
    check_set_dim(node, out, (1, routed, width))
    set_dim(out, (1, routed, width))
    set_stride(out, row_major(out.dim))


def _infer_bwd(node: Any) -> None:
    check_required(node, "doutput", "token", "first_token_offset")
    grad, token, out = node.inputs["doutput"], node.inputs["token"], node.outputs["dweight"]
    _check_rows(node, "doutput", grad)
    _check_rows(node, "token", token)
    if grad.dim[1] != token.dim[1]:
        malformed(
            node, f"doutput has the rows of {tensor_label(token)}", tensor=grad,
            expected=f"{token.dim[1]} at axis 1", given=grad.dim,
        )  # fmt: skip
    experts = _check_integers(node, "first_token_offset")
    if out.dim and out.dim[0] == experts - 1:
        experts -= 1
    dim = (experts, token.dim[2], grad.dim[2])
    check_set_dim(node, out, dim)
    set_dim(out, dim)
    set_stride(out, (max(dim[1], 1) * max(dim[2], 1), 1, max(dim[1], 1)))


def _check_rows(node: Any, port: str, tensor: Any) -> None:
    if len(tensor.dim) != 3 or tensor.dim[0] != 1:
        malformed(node, f"{port} is one matrix of rows", tensor=tensor, expected="(1, rows, n)", given=tensor.dim)


def _check_integers(node: Any, port: str) -> int:
    """The number of entries of a list of integers."""
    tensor = node.inputs[port]
    count = number(tensor.dim)
    if count not in tensor.dim:
        malformed(node, f"{port} is a list", tensor=tensor, expected="one axis longer than 1", given=tensor.dim)
    if tensor.data_type not in (None, *_INTEGERS):
        malformed(node, f"{port} is an integer", tensor=tensor, expected="INT32 or INT64", given=tensor.data_type.name)
    return count


# -- reference -----------------------------------------------------------------------------------------------


def _reference(call: RefCall) -> dict[str, Array]:
    inputs, math, out = call.inputs, call.math, call.outputs["OUT_0"]
    mode, top_k = call.params["mode"], call.params["top_k"]
    _check(call.params, inputs)  # once more, now for contents that the graph computed
    token, weight = inputs["token"][0], inputs["weight"]
    where = inputs["token_index"].reshape(-1) if mode is not _NONE and "token_index" in inputs else None
    which = inputs["token_ks"].reshape(-1) if mode in (_SCATTER, _COMBINE) else None
    routed = len(where) if where is not None else len(token)
    parts = list(_parts(inputs["first_token_offset"], weight.shape[0], routed))
    # Products of all routed rows, or the output itself.
    target = out.target(math.dtype) if mode in (_NONE, _GATHER) and math.dtype.kind != "b" else None
    shared = target is None or any(np.may_share_memory(target, array) for array in inputs.values())
    kind = np.dtype(np.int64) if math.dtype.kind == "b" else math.dtype
    result = np.empty((routed, weight.shape[2]), kind) if shared or target is None else target[0]
    place = 0
    for expert, first, last in parts:
        rows = token[where[first:last]] if mode is _GATHER and where is not None else token[first:last]
        result[place:first] = 0
        np.matmul(math.numeric(rows), math.numeric(weight[expert]), out=result[first:last])
        place = last
    result[place:] = 0
    if mode in (_NONE, _GATHER):
        return {"OUT_0": target if not shared and target is not None else result[None]}
    covered = slice(parts[0][1], parts[-1][2]) if parts else slice(0)
    assert where is not None and which is not None
    where, which, result = where[covered], which[covered], result[covered]
    whole = np.zeros(out.shape, kind)
    if mode is _SCATTER:
        whole[0, where.astype(np.int64) * top_k + which] = result
    elif len(where):
        order = np.argsort(where, kind="stable")
        where, which = where[order], which[order]
        scores = math.numeric(inputs["top_k_scores"][0])[where, which]
        heads = np.flatnonzero(np.concatenate(([True], where[1:] != where[:-1])))
        whole[0, where[heads]] = np.add.reduceat(result[order] * scores[:, None], heads, axis=0)
    return {"OUT_0": whole}


def _bwd_reference(call: RefCall) -> dict[str, Array]:
    inputs, math, out = call.inputs, call.math, call.outputs["dweight"]
    grad, token = inputs["doutput"][0], inputs["token"][0]
    kind = np.dtype(np.int64) if math.dtype.kind == "b" else math.dtype
    result = np.zeros(out.shape, kind)
    for expert, first, last in _parts(inputs["first_token_offset"], out.shape[0], len(token)):
        np.matmul(math.numeric(token[first:last]).T, math.numeric(grad[first:last]), out=result[expert])
    return {"dweight": result}


def _parts(offsets: Array, experts: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of the experts that own rows. Checks the offsets."""
    starts = offsets.reshape(-1).tolist()
    previous = 0
    for entry, start in enumerate(starts):
        if not previous <= start <= rows:
            raise ContentsError(
                "first_token_offset",
                "offsets do not decrease, and lie in the routed rows",
                f"{previous} to {rows} at entry {entry}",
                start,
            )
        previous = start
    ends = [*starts[1:], rows]
    for expert in range(experts):
        if starts[expert] < ends[expert]:
            yield expert, starts[expert], ends[expert]


def _check(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    """Raises `ContentsError` for offsets, or indices of routed rows, that the operands do not have."""
    mode, top_k = params["mode"], params["top_k"]
    if not {"first_token_offset", "token", "weight"} <= set(inputs):
        return
    where = inputs.get("token_index")
    if mode is not _NONE and where is None:
        return
    tokens = inputs["token"].shape[1]
    routed = tokens if where is None or mode is _NONE else where.size
    parts = list(_parts(inputs["first_token_offset"], inputs["weight"].shape[0], routed))
    if not parts or mode is _NONE or where is None:
        return
    covered = slice(parts[0][1], parts[-1][2])
    if mode is _GATHER:
        _within("token_index", where, covered, tokens)
        return
    if "token_ks" in inputs:
        _within("token_ks", inputs["token_ks"], covered, top_k)
    if mode is _COMBINE and "top_k_scores" in inputs:
        _within("token_index", where, covered, inputs["top_k_scores"].shape[1])
    elif mode is _SCATTER and "token_ks" in inputs:
        _within("token_index", where, covered, -(-tokens // top_k))
        place = where.reshape(-1).astype(np.int64) * top_k + inputs["token_ks"].reshape(-1)
        _within("token_index", place, covered, tokens, "token_index * top_k + token_ks is a row of the output")


def _within(
    port: str, entries: Array, covered: slice, most: int, rule: str = "indices of routed rows are in range"
) -> None:
    held = entries.reshape(-1)[covered]
    wrong = np.flatnonzero((held < 0) | (held >= most))
    if wrong.size:
        at = int(wrong[0])
        raise ContentsError(port, rule, f"0 to {most - 1} at entry {covered.start + at}", int(held[at]))


def _check_bwd(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    if "first_token_offset" in inputs and "token" in inputs:
        for _ in _parts(inputs["first_token_offset"], 0, inputs["token"].shape[1]):
            pass


OPS = (
    OpDef("moe_grouped_matmul", NodeType.MOE_GROUPED_MATMUL, _infer, _reference, check=_check),
    OpDef(
        "moe_grouped_matmul_bwd",
        NodeType.MOE_GROUPED_MATMUL_BACKWARD,
        _infer_bwd,
        _bwd_reference,
        check=_check_bwd,
    ),
)
