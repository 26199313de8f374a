"""Score functions of attention: a callback's pointwise operators, recorded at declaration, run block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import as_data_type, numpy_dtype, round_to, scalar_bytes
from ..ir.enums import data_type, scalar_type
from ..ir.errors import cudnnGraphNotSupportedError, explain, tensor_label
from ..ir.program import GraphIR
from ..ir.tensor import Tensor
from .activation import OPS as ACTIVATIONS
from .activation import ActivationOps
from .base import Array, Math, OutSpec, RefCall, malformed, row_major
from .pointwise import OPS as POINTWISE
from .pointwise import PointwiseOps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..ir.node import Node
    from .attention_options import Part

__all__ = ["ScoreMod", "record"]

_OPS = {definition.name: definition for definition in (*POINTWISE, *ACTIVATIONS)}
_DECLARING = ("tensor", "tensor_like", "tensor_scalar")


class _ScoreGraph(PointwiseOps, ActivationOps):
    """The graph that a callback sees. What it declares belongs to the outer graph, so that it is an operand
    there; what it computes belongs to the inner one. Outer tensors that it uses are captured."""

    def __init__(self, outer: Any, op: str) -> None:
        self._outer, self._op = outer, op
        self._ir = GraphIR("score_mod", data_type.FLOAT, data_type.FLOAT, data_type.FLOAT)
        self._captured: dict[Tensor, Tensor] = {}  # outer -> inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._outer, name)  # AttributeError for what no graph has
        if name in _DECLARING or not callable(found):
            return found
        raise cudnnGraphNotSupportedError(
            explain(f"{self._op}: score_mod", f"{name} is not pointwise", expected="pointwise operators only")
        )

    def _add_node(
        self,
        op: str,
        *,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | Mapping[str, Tensor | None],
        params: Mapping[str, Any] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> dict[str, Tensor]:
        wired = {port: self._inner(x, compute_data_type) for port, x in inputs.items()}
        return self._ir.add_node(_OPS[op], wired, outputs, params, name, compute_data_type)

    def _inner(self, x: Any, compute: Any) -> Any:
        if x is None or (isinstance(x, Tensor) and x._owner is self._ir):
            return x
        if isinstance(x, (bool, int, float)):
            kind = as_data_type(compute) or data_type.FLOAT
            scalar = self._ir.tensor((1, 1, 1, 1), None, kind, is_pass_by_value=True)
            return scalar.set_pass_by_value(x).set_scalar_type(scalar_type.RUNTIME_PARAM)
        if not isinstance(x, Tensor):
            x = self._outer._declare(x, f"{self._op}::score_mod_{len(self._captured)}", 4, compute)
        found = self._captured.get(x)
        if found is None:
            found = self._captured[x] = self._ir.tensor((), None, data_type.FLOAT, name=x.name)
        return found


def record(
    outer: Any, op: str, score_mod: Callable[..., Any] | None, score_mod_bprop: Callable[..., Any] | None = None
) -> tuple[ScoreMod | None, dict[str, Tensor]]:
    """Calls the callbacks with (graph, tensor): what they built, and the outer tensors it reads by port."""
    if score_mod is None and score_mod_bprop is None:
        return None, {}
    graph = _ScoreGraph(outer, op)
    score = out = graph._ir.tensor((), None, data_type.FLOAT, name="score")
    grad = grad_out = graph._ir.tensor((), None, data_type.FLOAT, name="grad")
    if score_mod is not None:
        out = _result(graph, "score_mod", score_mod(graph, score))
    count = len(graph._ir.nodes)
    if score_mod_bprop is not None:
        grad_out = _result(graph, "score_mod_bprop", score_mod_bprop(graph, grad))
    ports = {f"score_mod_{i}": tensor for i, tensor in enumerate(graph._captured)}
    inner = dict(zip(ports, graph._captured.values(), strict=True))
    return ScoreMod(graph._ir, count, inner, (score, out), (grad, grad_out)), ports


def _result(graph: _ScoreGraph, what: str, found: Any) -> Tensor:
    if not isinstance(found, Tensor) or (found._owner is not graph._ir and found not in graph._captured):
        raise TypeError(f"{graph._op}: {what} returns a tensor that it computed; given {found!r}")
    return graph._captured.get(found, found)


class ScoreMod:
    """A recorded score function. Immutable; `bound` gives it the arrays of a call."""

    __slots__ = ("_count", "_grad", "_ir", "_nodes", "_ports", "_score")

    def __init__(
        self,
        ir: GraphIR,
        count: int,
        ports: dict[str, Tensor],
        score: tuple[Tensor, Tensor],
        grad: tuple[Tensor, Tensor],
    ) -> None:
        self._ir, self._count, self._ports = ir, count, ports
        self._score, self._grad = score, grad
        self._nodes = ir.nodes

    def __repr__(self) -> str:
        """The same text for the same function, wherever it was recorded."""
        order: dict[Tensor, int] = {}
        for tensor in (self._score[0], self._grad[0], *self._ports.values()):
            order[tensor] = len(order)

        def place(tensor: Tensor) -> str:
            if tensor._pass_by_value is not None:
                return f"{tensor._pass_by_value!r}"
            return f"t{order.setdefault(tensor, len(order))}"

        steps = [
            f"{place(node.outputs['OUT_0'])}:{_kind(node.outputs['OUT_0']).name} = {node.op}"
            f"({', '.join(map(place, node.inputs.values()))}, {dict(node.params)}, {node.compute_data_type})"
            for node in self._nodes
        ]
        return f"ScoreMod({'; '.join(steps)}; {self._count}, {place(self._score[1])}, {place(self._grad[1])})"

    def check(self, node: Any, full: tuple[int, int, int, int]) -> None:
        """The rules of the recorded operators, for scores of this extent."""
        ir, twins = self._ir.copy()
        for tensor in (self._score[0], self._grad[0]):
            _shape(twins[tensor], full, data_type.FLOAT)
        for port, tensor in self._ports.items():
            given = node.inputs[port]
            if len(given.dim) > 4 or any(
                a not in (1, b) for a, b in zip(reversed(given.dim), reversed(full), strict=False)
            ):
                malformed(
                    node, "a tensor that score_mod uses must broadcast to the scores",
                    tensor=given, expected=f"each extent 1 or that of {full}", given=given.dim,
                )  # fmt: skip
            _shape(twins[tensor], given.dim, given.data_type or data_type.FLOAT)
        try:
            ir.validate()
        except (ValueError, cudnnGraphNotSupportedError) as error:
            raise type(error)(f"{node.op} {node.name!r}: score_mod: {error}") from error
        for tensor in (self._score[1], self._grad[1]):
            dim = twins[tensor].dim
            if any(a not in (1, b) for a, b in zip(reversed(dim), reversed(full), strict=False)):
                malformed(node, "score_mod gives other extents", tensor=tensor, expected=full, given=dim)

    def bound(self, inputs: Mapping[str, Array], full: tuple[int, int, int, int], precise: bool) -> BoundScoreMod:
        """The function with the arrays of a call."""
        arrays = {tensor: inputs[port] for port, tensor in self._ports.items()}
        for node in self._nodes:
            for tensor in node.inputs.values():
                if tensor._pass_by_value is not None:
                    dtype = _kind(tensor)
                    data = scalar_bytes(tensor._pass_by_value, dtype, tensor_label(tensor))
                    arrays[tensor] = np.frombuffer(data, numpy_dtype(dtype)).reshape(tensor.dim)
        return BoundScoreMod(
            self._nodes[: self._count], self._nodes[self._count :], self._score, self._grad, arrays, full, precise
        )


def _shape(tensor: Tensor, dim: tuple[int, ...], dtype: data_type) -> None:
    tensor._dim, tensor._stride = tuple(dim), row_major(tuple(dim))
    tensor._dim_assigned = tensor._stride_assigned = True
    tensor._data_type, tensor._data_type_assigned = dtype, True


def _kind(tensor: Tensor) -> data_type:
    """The type the user set; what is computed is FLOAT else, in the width of the call's arithmetic."""
    dtype: data_type | None = tensor._data_type if tensor._data_type_assigned else None
    return dtype or data_type.FLOAT


class BoundScoreMod:
    """A score function with the arrays of a call. Any number of threads may use it."""

    __slots__ = ("_arrays", "_backward", "_forward", "_full", "_grad", "_precise", "_score")

    def __init__(
        self,
        forward: list[Node],
        backward: list[Node],
        score: tuple[Tensor, Tensor],
        grad: tuple[Tensor, Tensor],
        arrays: dict[Tensor, Array],
        full: tuple[int, int, int, int],
        precise: bool,
    ) -> None:
        self._forward, self._backward, self._score, self._grad = forward, backward, score, grad
        self._arrays, self._full, self._precise = arrays, full, precise

    def scores(self, block: Array, part: Part) -> Any:
        """Overwrites a block of scaled scores; returns the values on the way."""
        source, result = self._score
        values = {tensor: (self._cut(array, part), array.shape) for tensor, array in self._arrays.items()}
        # What the gradient reads later must not change with the block.
        values[source] = (block.copy() if self._backward else block, self._full)
        self._run(self._forward, values, part)
        if result is not source:
            np.copyto(block, values[result][0])
        return values

    def gradient(self, block: Array, part: Part, values: Any) -> None:
        """Overwrites a block of gradients of the function's result by those of its argument."""
        source, result = self._grad
        values[source] = (block, self._full)
        self._run(self._backward, values, part)
        if result is not source:
            np.copyto(block, values[result][0])

    def _cut(self, array: Array, part: Part) -> Array:
        """The part of an array that broadcasts to the scores."""
        rank = array.ndim
        spans = zip(array.shape, self._full[4 - rank :], part[4 - rank :], strict=True)
        return array[tuple(span if n == whole and n > 1 else slice(None) for n, whole, span in spans)]

    def _run(self, nodes: list[Node], values: dict[Tensor, Any], part: Part) -> None:
        """`values`: each tensor's array for this part, and its whole shape."""
        for node in nodes:
            given = [values[tensor] for tensor in node.inputs.values()]
            arrays = {port: array for port, (array, _) in zip(node.inputs, given, strict=True)}
            shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
            whole = np.broadcast_shapes(*(extents for _, extents in given))
            tensor = node.outputs["OUT_0"]
            kind = _kind(tensor)
            math = Math(node.compute_data_type or data_type.FLOAT, self._precise)
            out = OutSpec(shape, kind, numpy_dtype(kind))
            found = node.definition.reference(RefCall(node.params, arrays, {"OUT_0": out}, math))["OUT_0"]  # type: ignore[attr-defined]
            if node.op == "gen_index":
                axis = node.params["axis"]
                place = 4 - len(whole) + axis
                if whole[axis] == self._full[place] and whole[axis] > 1:
                    found = found + part[place].start
            if kind is data_type.FLOAT:
                found = Math(None, self._precise).real(found)
            elif found.dtype != out.dtype:
                found = round_to(found, kind)
            values[tensor] = (found, whole)
