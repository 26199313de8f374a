"""What every operator family builds on: definitions, reference calls, and shape helpers.

An operator is an `OpDef`: its name, how it infers the geometry of its outputs, and its NumPy reference. The
user-facing method stands beside it, in a mixin class of the family's file that derives from `GraphOps`.
"""

from __future__ import annotations

from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.datatypes import round_to, truth
from ..ir.enums import NodeType, data_type, scalar_type
from ..ir.errors import cudnnGraphNotSupportedError, explain, node_label, tensor_label
from ..ir.tensor import overlaps_itself, row_major

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import NoReturn, ParamSpec, TypeVar

    from ..ir.enums import tensor_reordering
    from ..ir.tensor import Tensor

    P = ParamSpec("P")
    R = TypeVar("R")

Array = np.ndarray[Any, Any]

# NumPy adds pairwise along the axis of smallest stride and one by one along others. From this many float32
# terms in turn on, whose rounding may all go one way, a sum is accumulated in float64: 512 of them stay
# within 2e-6 of it.
ADDED_IN_TURN = 512

__all__ = [
    "ADDED_IN_TURN",
    "Array",
    "ContentsError",
    "GraphOps",
    "Math",
    "OpDef",
    "OutSpec",
    "RefCall",
    "apply_out_dims",
    "broadcast_dims",
    "channels_last",
    "check_required",
    "check_same_rank",
    "check_scalar",
    "check_set_dim",
    "deferred",
    "format_preserving",
    "graph_op",
    "host_scalar",
    "like",
    "malformed",
    "number",
    "overlaps_itself",
    "row_major",
    "set_data_type",
    "set_dim",
    "set_stride",
    "unsupported",
    "widened",
]


class OpDef:
    """One operator: immutable.

    `infer(node)` fills dim and stride of the outputs that lack them (the data type only where the operator
    says "like X"), raises `ValueError` for a malformed node and `cudnnGraphNotSupportedError` for a
    well-formed one that is not offered. It is called on nodes of a graph, and on light copies with the live
    geometry of a call. `reference(call)` computes the outputs with NumPy. `alias_view`: the result may share
    memory with an input. `optional_outputs`: ports that stay operands of `execute` when they are left
    virtual. `check(params, inputs)` raises `ContentsError` for lengths, offsets or indices in the arrays of
    some of the input ports that do not fit; engines that see the contents call it before anything is written.
    """

    __slots__ = ("_alias_view", "_check", "_infer", "_name", "_node_type", "_optional_outputs", "_reference")

    def __init__(
        self,
        name: str,
        node_type: NodeType,
        infer: Callable[[Any], None],
        reference: Callable[[RefCall], dict[str, Array]],
        alias_view: bool = False,
        optional_outputs: tuple[str, ...] = (),
        check: Callable[[Mapping[str, Any], Mapping[str, Array]], None] | None = None,
    ) -> None:
        self._name = name
        self._node_type = node_type
        self._infer = infer
        self._reference = reference
        self._alias_view = alias_view
        self._optional_outputs = optional_outputs
        self._check = check

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
        @property
        def node_type(self) -> NodeType: ...
        @property
        def infer(self) -> Callable[[Any], None]: ...
        @property
        def reference(self) -> Callable[[RefCall], dict[str, Array]]: ...
        @property
        def alias_view(self) -> bool: ...
        @property
        def optional_outputs(self) -> tuple[str, ...]: ...
        @property
        def check(self) -> Callable[[Mapping[str, Any], Mapping[str, Array]], None] | None: ...
    else:
        name = property(attrgetter("_name"))
        node_type = property(attrgetter("_node_type"))
        infer = property(attrgetter("_infer"))
        reference = property(attrgetter("_reference"))
        alias_view = property(attrgetter("_alias_view"))
        optional_outputs = property(attrgetter("_optional_outputs"))
        check = property(attrgetter("_check"))

    def __repr__(self) -> str:
        return f"<OpDef {self._name!r} {self._node_type}>"


# -- references ----------------------------------------------------------------------------------------------


def deferred(module: str, name: str) -> Callable[[RefCall], dict[str, Array]]:
    """The reference `name` of a module next to this one, imported when it is first computed: a program uses
    few operators, and importing the package does not pay for the arithmetic of the others."""

    def reference(call: RefCall) -> dict[str, Array]:
        from importlib import import_module

        found: Callable[[RefCall], dict[str, Array]] = getattr(import_module(f"{__package__}.{module}"), name)
        return found(call)

    reference.__name__ = name
    return reference


class ContentsError(ValueError):
    """What an operand holds does not fit: `port`, `rule`, `expected`, `given`. The engine names the tensor."""

    def __init__(self, port: str, rule: str, expected: Any, given: Any) -> None:
        super().__init__(explain(port, rule, expected=expected, given=given))
        self.port = port
        self.rule = rule
        self.expected = expected
        self.given = given


class OutSpec:
    """Where a reference's result goes: live `shape`, `data_type` with its NumPy `dtype`, and `view`.

    `view` is the array to write into, or None. A reference may write into it as its last action, by a single
    ufunc or matrix product, because it may alias the inputs. `reordering` is the declared one; results are
    plain arrays whatever it is.
    """

    __slots__ = ("data_type", "dtype", "reordering", "shape", "view")

    def __init__(
        self,
        shape: tuple[int, ...],
        data_type: data_type,
        dtype: np.dtype[Any],
        view: Array | None = None,
        reordering: tensor_reordering | None = None,
    ) -> None:
        self.shape = shape
        self.reordering = reordering
        self.data_type = data_type
        self.dtype = dtype
        self.view = view

    def target(self, dtype: Any) -> Array | None:
        """`view` when a result of this NumPy dtype can be written straight into it, else None."""
        view = self.view
        return view if view is not None and view.dtype == dtype and view.shape == self.shape else None


_FLOAT64 = np.dtype(np.float64)
_MATH = {
    data_type.DOUBLE: np.dtype(np.float64),
    data_type.INT8: np.dtype(np.int64),
    data_type.UINT8: np.dtype(np.int64),
    data_type.INT32: np.dtype(np.int64),
    data_type.INT64: np.dtype(np.int64),
    data_type.INT4: np.dtype(np.int64),
    data_type.BOOLEAN: np.dtype(np.bool_),
}


_CODES: dict[tuple[np.dtype[Any], np.dtype[Any]], Array] = {}  # the value of each byte of an 8 or 4-bit type


def widened(array: Array, dtype: np.dtype[Any]) -> Array:
    """Elements of one byte each in a wider type, by a table: ml_dtypes takes ten times as long for FP8."""
    table = _CODES.get((array.dtype, dtype))
    if table is None:
        table = np.arange(256, dtype=np.uint8).view(array.dtype).astype(dtype)
        _CODES[array.dtype, dtype] = table
    result: Array = table[array.view(np.uint8)]
    return result.reshape(array.shape)  # an index without axes gives a scalar


class Math:
    """The arithmetic of one node: `dtype` of its temporaries, and whether the caller asked for float64.

    Floating compute types work in float32 (DOUBLE: float64), or in float64 when `precise`; integer ones in
    int64; BOOLEAN on whether elements are non-zero.
    """

    __slots__ = ("dtype", "precise")

    def __init__(self, compute: data_type | None = None, precise: bool = False) -> None:
        self.precise = precise
        default = _FLOAT64 if precise else np.dtype(np.float32)
        self.dtype: np.dtype[Any] = default if compute is None else _MATH.get(compute, default)

    def load(self, array: Array) -> Array:
        """`array` in the math dtype; the array itself when it has it."""
        dtype = self.dtype
        if array.dtype == dtype:
            return array
        if dtype.kind == "b":
            return truth(array)
        if dtype.kind == "i" and array.dtype.kind not in "iub":
            return round_to(array, data_type.INT64)
        if array.itemsize == 1 and array.dtype.kind not in "iub":
            return widened(array, dtype)
        with np.errstate(over="ignore"):
            return array.astype(dtype)

    def real(self, array: Array) -> Array:
        """`array` as floats: the math dtype, or float64 where that is an integer or boolean type."""
        if self.dtype.kind == "f":
            return self.load(array)
        return array.astype(_FLOAT64) if array.dtype != _FLOAT64 else array

    def numeric(self, array: Array) -> Array:
        """`array` as numbers: the math dtype, or int64 where that is boolean."""
        loaded = self.load(array)
        return loaded.astype(np.int64) if loaded.dtype.kind == "b" else loaded


class RefCall:
    """What a reference sees: attributes, input arrays in their storage dtype and declared axis order,
    outputs.

    Optional ports that were not given are absent. By-value scalars are arrays of their declared dims. Shapes
    are the live ones of the call. `strides` are those of the declaration (live too) by port, in elements; the
    memory of the arrays may be laid out in another way.
    """

    __slots__ = ("inputs", "math", "outputs", "params", "strides")

    def __init__(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, OutSpec],
        math: Math,
        strides: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.params = params
        self.inputs = inputs
        self.outputs = outputs
        self.math = math
        self.strides = strides if strides is not None else {}

    def load(self, port: str) -> Array:
        """Input `port` in the math dtype."""
        return self.math.load(self.inputs[port])


# -- the user-facing side ------------------------------------------------------------------------------------


class GraphOps:
    """Base of the operator mixins; the graph class supplies `_add_node`."""

    __slots__ = ()

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
        """Appends a node and returns its outputs by port.

        Inputs that are None are absent ports; inputs that are no Tensor are declared from the buffer and
        bound to it. `out_dims` are the dims of the first output, or dims by port. See `apply_out_dims`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement _add_node, so {op} cannot be added"
        )


def apply_out_dims(results: Mapping[str, Tensor], out_dims: Any, where: str) -> None:
    """Sets dims of a node's outputs: a list for the first output, or a mapping by port."""
    if out_dims is None:
        return
    by_port = out_dims if isinstance(out_dims, dict) else {next(iter(results)): out_dims}
    for port, dim in by_port.items():
        if port not in results:
            raise ValueError(
                explain(where, f"out_dims names no output {port!r}", expected=", ".join(results))
            )
        results[port].set_dim(dim)


def graph_op(method: Callable[P, R]) -> Callable[P, R]:
    """Marks a user-facing operator method: a call that does not fit its signature names the nearest
    keyword.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            # Raised while binding the arguments, not inside the method: the traceback ends in this frame.
            trace = error.__traceback__
            if trace is None or trace.tb_next is not None:
                raise
            raise TypeError(_with_suggestion(str(error), method, kwargs)) from None

    return call


def _with_suggestion(text: str, method: Any, kwargs: Mapping[str, Any]) -> str:
    from difflib import get_close_matches  # needed on this path only; its import costs

    code = method.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    unknown = [key for key in kwargs if key not in known]
    hints = []
    for key in unknown:
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        hints.append(f"{key!r} is unknown" + (f", did you mean {near[0]!r}?" if near else ""))
    return "; ".join([text, *hints, f"{method.__name__} takes ({', '.join(known)})"])


def host_scalar(graph: Any, value: Any) -> Any:
    """A Python number as a FLOAT constant of the plan; anything else as it is."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    return graph.tensor_scalar(float(value), scalar_type.COMPILE_TIME_CONST).set_data_type(data_type.FLOAT)


# -- geometry ------------------------------------------------------------------------------------------------


def number(values: Iterable[int]) -> int:
    """The product of extents."""
    total = 1
    for value in values:
        total *= value
    return total


def _dense(dim: Sequence[int], fastest_first: Iterable[int]) -> tuple[int, ...]:
    stride = [1] * len(dim)
    step = 1
    for axis in fastest_first:
        stride[axis] = step
        step *= dim[axis] or 1
    return tuple(stride)


def channels_last(dim: Sequence[int]) -> tuple[int, ...]:
    """Dense strides: axis 1 fastest, then the last axis down to axis 2, axis 0 slowest."""
    rank = len(dim)
    if rank < 2:
        return (1,) * rank
    return _dense(dim, (1, *range(rank - 1, 1, -1), 0))


def format_preserving(
    dim: Sequence[int], like_stride: Sequence[int], like_dim: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Dense strides for `dim` whose axes rank, fastest to slowest, as those of `like_stride`.

    Equal strides rank in axis order, the lower axis faster. With fewer strides than axes, the axes are
    aligned at the right and the leading ones are slowest. `like_dim` is accepted for symmetry and does not
    matter: extents of 1 rank by their stride like others.
    """
    lead = len(dim) - len(like_stride)
    if lead < 0:
        return row_major(tuple(dim))
    order = sorted(range(len(like_stride)), key=like_stride.__getitem__)
    return _dense(dim, (*(axis + lead for axis in order), *range(lead - 1, -1, -1)))


def broadcast_dims(node: Any, tensors: Sequence[Any]) -> tuple[int, ...]:
    """NumPy's right-aligned broadcast of the tensors' dims; `ValueError` naming the two that do not fit."""
    result = list(tensors[0].dim)
    for tensor in tensors[1:]:
        dim = tensor.dim
        if len(dim) > len(result):
            result[:0] = dim[: len(dim) - len(result)]
        lead = len(result) - len(dim)
        for axis, extent in enumerate(dim):
            held = result[lead + axis]
            if held == extent or extent == 1:
                continue
            if held != 1:
                _not_broadcastable(node, tensors, tensor)
            result[lead + axis] = extent
    return tuple(result)


def _not_broadcastable(node: Any, tensors: Sequence[Any], tensor: Any) -> NoReturn:
    malformed(
        node,
        "the dims of the inputs do not broadcast",
        tensor=tensor,
        expected="equal extents, or 1, counted from the last axis",
        given=", ".join(f"{each.name!r} (uid {each.uid}) {each.dim}" for each in tensors),
        next_step="reshape one of them",
    )


def set_dim(tensor: Any, dim: Iterable[int]) -> None:
    """Fills an inferred dim; one that is set already stays."""
    if not tensor._dim:
        tensor._dim = tuple(dim)


def set_stride(tensor: Any, stride: Iterable[int]) -> None:
    """Fills an inferred stride; one that is set already stays."""
    if not tensor._stride:
        tensor._stride = tuple(stride)


def set_data_type(tensor: Any, dtype: data_type | None) -> None:
    """Fills an inferred data type; one that is set already stays."""
    if tensor._data_type is None:
        tensor._data_type = dtype


def like(tensor: Any, model: Any) -> None:
    """Dim and stride of `model`, padding included, where `tensor` has none."""
    set_dim(tensor, model.dim)
    set_stride(tensor, model.stride)


# -- errors --------------------------------------------------------------------------------------------------


def _where(node: Any, tensor: Any) -> str:
    return node_label(node) if tensor is None else f"{node_label(node)}, {tensor_label(tensor)}"


def malformed(node: Any, rule: str, *, tensor: Any = None, **facts: Any) -> NoReturn:
    """Raises the `ValueError` of a malformed node. Facts: `expected`, `given`, `next_step`."""
    raise ValueError(explain(_where(node, tensor), rule, **facts))


def unsupported(node: Any, rule: str, *, tensor: Any = None, **facts: Any) -> NoReturn:
    """Raises the error of a well-formed node that is not offered. Facts as for `malformed`."""
    raise cudnnGraphNotSupportedError(explain(_where(node, tensor), rule, **facts))


def check_required(node: Any, *ports: str) -> None:
    """`ValueError` naming the first of the input ports that was given None."""
    for port in ports:
        if port not in node.inputs:
            malformed(node, f"{port} not set", next_step=f"pass {port}=")


def check_scalar(node: Any, port: str) -> None:
    """`ValueError` unless the input is there and has one element."""
    tensor = node.inputs.get(port)
    if tensor is None or number(tensor.dim) != 1:
        malformed(
            node,
            f"{port} not set" if tensor is None else f"{port} is a scalar",
            tensor=tensor,
            expected="a by-value tensor of one element, or a number",
            given="None" if tensor is None else tensor.dim,
        )


def check_same_rank(node: Any, tensors: Sequence[Any]) -> int:
    """The one rank of the tensors; `ValueError` when they differ."""
    rank = len(tensors[0].dim)
    for tensor in tensors[1:]:
        if len(tensor.dim) != rank:
            malformed(
                node,
                f"all tensors need the rank of {tensor_label(tensors[0])}",
                tensor=tensor,
                expected=f"{rank} axes, as in {tensors[0].dim}",
                given=tensor.dim,
                next_step="add extents of 1",
            )
    return rank


def check_set_dim(node: Any, tensor: Any, dim: tuple[int, ...]) -> None:
    """An output whose dim was set must have the dim that its inputs give; leading 1s do not count."""
    if tensor.dim and tensor.dim != dim and _core(tensor.dim) != _core(dim):
        unsupported(
            node,
            "the dim set on the output differs from the one its inputs give",
            tensor=tensor,
            expected=dim,
            given=tensor.dim,
            next_step="leave it unset, or set the expected one",
        )


def _core(dim: tuple[int, ...]) -> tuple[int, ...]:
    for axis, extent in enumerate(dim):
        if extent != 1:
            return dim[axis:]
    return ()
