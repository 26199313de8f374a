"""`pygraph`: declares a graph of tensor operations, plans it, and runs it on the caller's buffers."""

from __future__ import annotations

from _thread import RLock
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from opgraph import _native, planning
from opgraph.engines.device import CPU
from opgraph.graph_plans import PlanApi
from opgraph.handle import Handle
from opgraph.ir.datatypes import as_data_type
from opgraph.ir.enums import cuda_graph_retention, data_type, scalar_type
from opgraph.ir.errors import cudnnGraphNotSupportedError
from opgraph.ir.node import Node
from opgraph.ir.program import GraphIR
from opgraph.ir.tensor import Tensor
from opgraph.ops import OPS
from opgraph.ops.activation import ActivationOps
from opgraph.ops.attention import AttentionOps
from opgraph.ops.attention_backward import AttentionBackwardOps
from opgraph.ops.attention_fp8 import AttentionFp8Ops
from opgraph.ops.base import apply_out_dims
from opgraph.ops.batchnorm import BatchNormOps
from opgraph.ops.block_scale import BlockScaleOps
from opgraph.ops.convolution import ConvolutionOps
from opgraph.ops.instancenorm import InstanceNormOps
from opgraph.ops.linear_attention_names import LinearAttentionNames
from opgraph.ops.linear_attention_summary import LinearAttentionSummaryOps
from opgraph.ops.matmul import MatmulOps
from opgraph.ops.moe import MoeOps
from opgraph.ops.norm import NormOps
from opgraph.ops.pointwise import PointwiseOps
from opgraph.ops.reduction import ReductionOps
from opgraph.ops.rope import RopeOps
from opgraph.ops.shape import ShapeOps

__all__ = ["GraphContext", "pygraph"]


class GraphContext:
    """The default data types of a graph: what tensors and nodes that set none get."""

    __slots__ = ("_ir",)

    def __init__(self, ir: GraphIR) -> None:
        self._ir = ir

    @property
    def io_data_type(self) -> data_type | None:
        """Given to tensors with a buffer."""
        return self._ir.io_data_type

    @property
    def intermediate_data_type(self) -> data_type:
        """Given to virtual tensors."""
        return self._ir.intermediate_data_type

    @property
    def compute_data_type(self) -> data_type:
        """The arithmetic of nodes."""
        return self._ir.compute_data_type

    def __repr__(self) -> str:
        return (
            f"GraphContext(io={self.io_data_type}, intermediate={self.intermediate_data_type}, "
            f"compute={self.compute_data_type})"
        )


class pygraph(
    PlanApi,
    MatmulOps,
    PointwiseOps,
    ActivationOps,
    ReductionOps,
    ShapeOps,
    NormOps,
    AttentionOps,
    AttentionBackwardOps,
    LinearAttentionNames,
    LinearAttentionSummaryOps,
    RopeOps,
    ConvolutionOps,
    BatchNormOps,
    InstanceNormOps,
    BlockScaleOps,
    MoeOps,
    AttentionFp8Ops,
    _native.GraphBase,
):
    """A graph of tensor operations.

    Declare tensors and call operators, then `build()` and `execute({tensor: buffer, ...}, workspace)`.
    Planning freezes the graph for good; `copy()` gives one that can change again. A built graph may be
    executed from many threads.

    Args:
        name: a label, used in messages.
        io_data_type: data type of tensors with a buffer that set none.
        intermediate_data_type: data type of virtual tensors that set none; default: `io_data_type`.
        compute_data_type: arithmetic of nodes that set none; default: `io_data_type`. With nothing set at
            all, the last two are FLOAT. A NumPy or torch dtype is accepted wherever a `data_type` is.
        handle: device and stream of the graph's calls.
        sm_count: how many multiprocessors launches may use, None for all.
        sm_version: compute capability to build for, as `10 * major + minor`; None for the device's.
        kernel_cache: object of `create_kernel_cache()`, to share compiled kernels between graphs.
        device_property: object of `create_device_properties()`, to build with no device present.
        is_dynamic_shape_enabled: live extents may come from the buffers themselves.
        is_override_shape_enabled: only engines that honour shape and stride overrides may serve the graph.
        cuda_graph_retention: lifetime of captured-graph resources.
        is_cuda_graph_replay_expected: a hint that the caller captures `execute`; changes neither support nor
            numbers.

    Raises:
        TypeError: an unknown keyword, or a handle that is no Handle.
        cudnnGraphNotSupportedError: a data type that has no counterpart.
    """

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: cuda_graph_retention | None = None,
        *,
        is_cuda_graph_replay_expected: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(_unknown_keywords(unknown))
        if handle is not None and not isinstance(handle, Handle):
            raise TypeError(
                f"pygraph: handle: expected a Handle, got {type(handle).__name__}; see create_handle()"
            )
        self._ir = GraphIR(name, io_data_type, intermediate_data_type, compute_data_type)
        self._handle = handle
        self._options = {
            "sm_count": sm_count,
            "sm_version": sm_version,
            "kernel_cache": kernel_cache,
            "device_property": device_property,
            "is_dynamic_shape_enabled": bool(is_dynamic_shape_enabled),
            "is_override_shape_enabled": bool(is_override_shape_enabled),
            "cuda_graph_retention": cuda_graph_retention,
            "is_cuda_graph_replay_expected": bool(is_cuda_graph_replay_expected),
        }
        self._bound: dict[Tensor, Any] = {}
        self._declared_on: tuple[int, int] | None = None
        self._lock = RLock()
        self._filters = planning.plan.Filters()
        self._reset_plans()

    # ---- declaring

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
        """Declares a tensor.

        Args:
            dim: extents, at most 8.
            stride: strides in elements; None or empty means row-major.
            data_type: None means the graph's io data type (virtual: the intermediate one).
            is_virtual: it has no buffer. Operator outputs start virtual; inputs never are.
            is_pass_by_value: one host scalar, read at call time.
            ragged_offset: tensor `[B+1, 1, 1, 1]` of the first element of each batch entry.
            reordering_type: a `tensor_reordering` that strides cannot express.
            name: a label; default `tensor_<k>`.
            uid: its number; None or -1 lets the graph choose.
            ragged_offset_multiplier: elements per unit of the ragged offset.
            alignment_value: a promise about the address in bytes.

        Raises:
            ValueError: a negative extent or stride, more than 8 axes, or a uid another tensor was given.
            cudnnGraphNotSupportedError: a data type that has no counterpart.
        """
        return self._ir.tensor(
            dim,
            stride,
            data_type,
            is_virtual,
            is_pass_by_value,
            ragged_offset,
            reordering_type,
            name,
            uid,
            ragged_offset_multiplier,
            alignment_value,
        )

    def tensor_like(
        self, x: Any, name: str = "", is_virtual: bool = False, *, is_pass_by_value: bool | None = None
    ) -> Tensor:
        """Declares a tensor with dim, stride and data type of another tensor or of an array.

        A host array of one element becomes pass-by-value unless `is_pass_by_value` says otherwise. An array's
        data type that has no counterpart is left to the graph's default.
        """
        if isinstance(x, Tensor):
            by_value = x.is_pass_by_value if is_pass_by_value is None else is_pass_by_value
            return self._ir.tensor(x.dim, x.stride, x.data_type, is_virtual, by_value, name=name)
        shape = getattr(x, "shape", None)
        if shape is None:
            raise TypeError(f"tensor_like: expected a Tensor or an array, got {type(x).__name__}")
        dim = tuple(int(n) for n in shape)
        device = planning.protocols.device_of(x)
        one = all(extent == 1 for extent in dim)
        host = device is not None and device[0] == CPU
        by_value = host and one and not is_virtual if is_pass_by_value is None else is_pass_by_value
        if not by_value and device is not None and self._declared_on is None:
            self._declared_on = device
        # A 0-d array has no declarable axis: one of extent 1 says the same.
        strides = _element_strides(x, dim) if dim else None
        return self._ir.tensor(dim or (1,), strides, _known_type(x), is_virtual, by_value, name=name)

    def tensor_scalar(self, value: Any, scalar_type: scalar_type, name: str = "") -> Tensor:
        """A pass-by-value scalar `[1, 1, 1, 1]` with an embedded value; it needs no entry in the variant
        pack.

        `COMPILE_TIME_CONST` bakes the value into the plan, `RUNTIME_PARAM` makes it a launch argument. Its
        data type is the graph's io data type unless set; a value that it cannot hold exactly is refused at
        `validate()`.
        """
        return self._ir.tensor_scalar(value, scalar_type, name)

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
        ir = self._ir
        wired: Mapping[str, Any] = inputs
        if any(x is not None and not isinstance(x, Tensor) for x in inputs.values()):
            label = name or ir.next_node_name(op)
            if ir.frozen:
                raise RuntimeError(
                    f"graph {ir.name!r}: planning froze the graph, so {op} {label!r} cannot be added"
                )
            rank = max((len(x.dim) for x in inputs.values() if isinstance(x, Tensor)), default=1)
            wired = {
                port: x
                if x is None or isinstance(x, Tensor)
                else self._declare(x, f"{label}::{port}", rank, compute_data_type)
                for port, x in inputs.items()
            }
        results = ir.add_node(OPS[op], wired, outputs, params, name, compute_data_type)
        if out_dims is not None:
            apply_out_dims(results, out_dims, op)
        return results

    def _declare(self, x: Any, name: str, rank: int, compute_data_type: Any) -> Tensor:
        """An operator argument that is no Tensor: a number becomes an embedded scalar, an array an auto-bound
        input."""
        if isinstance(x, (bool, int, float)):
            compute = as_data_type(compute_data_type) or self._ir.compute_data_type
            scalar = self._ir.tensor((1,) * max(rank, 1), None, compute, is_pass_by_value=True, name=name)
            return scalar.set_pass_by_value(x).set_scalar_type(scalar_type.RUNTIME_PARAM)
        tensor = self.tensor_like(x, name)
        self._bound[tensor] = x
        return tensor

    # ---- lifecycle up to planning

    def validate(self) -> None:
        """Fills data types, infers dims and strides, and checks every node and tensor. Idempotent.

        Raises:
            ValueError: a malformed graph.
            cudnnGraphNotSupportedError: a well-formed one that uses what opgraph does not offer.
        """
        self._ir.validate()

    def build_operation_graph(self) -> None:
        """Validates if needed; after it, outputs report the layout that will execute."""
        self._ir.validate()

    # ---- looking

    @property
    def name(self) -> str:
        """The label."""
        return self._ir.name

    @property
    def handle(self) -> Handle | None:
        """The graph's own handle, or None."""
        return self._handle

    @property
    def context(self) -> GraphContext:
        """The default data types."""
        return GraphContext(self._ir)

    @property
    def nodes(self) -> list[Node]:
        """The nodes in insertion order, a copy."""
        return self._ir.nodes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name; names that several tensors have are left out."""
        return self._ir.tensors

    def find_tensor(self, key: str | int) -> Tensor | None:
        """The tensor of this name or uid, or None. ValueError when the name is ambiguous."""
        return self._ir.find_tensor(key)

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor of this uid. ValueError when there is none."""
        tensor = self._ir.find_tensor(uid)
        if tensor is None:
            raise ValueError(f"graph {self.name!r}: no tensor has uid {uid}")
        return tensor

    def get_node(self, name: str) -> Node | None:
        """The node of this name, or None. ValueError when several have it."""
        return self._ir.get_node(name)

    def get_inputs(self) -> list[Tensor]:
        """Tensors with a buffer that no node writes."""
        return self._ir.get_inputs()

    def get_outputs(self) -> list[Tensor]:
        """Tensors with a buffer that a node writes."""
        return self._ir.get_outputs()

    def get_cuda_graph_retention(self) -> cuda_graph_retention | None:
        """What the constructor was given."""
        return self._options["cuda_graph_retention"]

    def inspect(self) -> dict[str, Any]:
        """Context, nodes and tensors as plain values that JSON can hold."""
        return self._ir.inspect()

    def __repr__(self) -> str:
        import json

        return json.dumps(self.inspect(), indent=2)

    def key(self) -> int:
        """A number that depends only on the structure: operators, attributes, data types, layouts and roles.

        Names, uids and the device do not enter. Equal in every process.

        Raises:
            ValueError, cudnnGraphNotSupportedError: the graph does not validate.
        """
        from opgraph.planning.structure import structure_key

        return structure_key(self._ir.snapshot())

    # ---- copying

    def copy(self) -> pygraph:
        """An unplanned graph with the same declarations, names, uids, bound inputs and filters."""
        return self._copy()[0]

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> pygraph:
        twin, replaced = self._copy()
        for old, new in replaced.items():
            memo[id(old)] = new  # tensors that are copied along with their graph stay its tensors
        return twin

    def _copy(self) -> tuple[pygraph, dict[Tensor, Tensor]]:
        twin = type(self)(handle=self._handle, **self._options)
        twin._ir, replaced = self._ir.copy()
        twin._bound = {replaced[tensor]: buffer for tensor, buffer in self._bound.items()}
        twin._declared_on = self._declared_on
        twin._filters = self._filters.copy()
        return twin, replaced

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "opgraph.pygraph cannot be pickled; copy it with copy.deepcopy, or serialize() it once built"
        )

    # ---- saving

    def serialize(self, *, as_bytes: bool = False, include_kernels: bool = True) -> list[int] | bytes:
        """The built graph with its selected plan, for `deserialize` here or in another process.

        The format is opgraph's own and holds no code (`docs/design/serialization.md`). It records the plan as
        engine and knobs; compiled kernels are not in it, whatever `include_kernels` says: they come from the kernel
        cache on disk, or are compiled again. Neither buffers nor the handle are saved.

        Args:
            as_bytes: return bytes, not a list of ints.
            include_kernels: accepted; see above.

        Raises:
            RuntimeError: the selected plan is not built.
            TypeError: the graph holds a value that cannot be saved exactly, e.g. an array it was declared from.
        """
        from opgraph.planning.serialize import encode

        with self._lock:
            plan = self._built_plan("serialize")
            for tensor, held in self._bound.items():
                kind = type(held)
                raise TypeError(
                    f"serialize: tensor {tensor.name!r} (uid {tensor.uid}) is bound to a {kind.__module__}."
                    f"{kind.__qualname__}, which cannot be saved; declare it with tensor() or tensor_like() and pass "
                    "the buffer to execute()"
                )
            device_type = self._planned("serialize").target.device.device_type
            data = encode(self._ir, self._options, device_type, plan.engine, plan.engine_id, plan.knobs)
        return data if as_bytes else list(data)

    def deserialize(self, handle: Any = None, data: Any = None, enforce_precompiled: bool = False) -> None:
        """Fills this empty graph with a saved one and builds its plan: `deserialize(data)` or
        `deserialize(handle, data)`.

        The plan is the recorded engine and knobs, built for the handle's device; else that of `device_property`; else
        the CPU or the current CUDA device, as recorded. The graph is then frozen like any planned one and takes uids
        and names at `execute`. Name, kernel cache and device properties stay those of the constructor; every other
        option is the saved graph's. A call that raises leaves the graph empty.

        Args:
            handle: device and stream of the graph's calls; None keeps the constructor's.
            data: what `serialize` returned: bytes or a list of ints.
            enforce_precompiled: refuse a plan that compiles kernels at its build.

        Raises:
            SerializationError: (a ValueError) foreign, cut off or damaged data, or another format version.
            TypeError: `data` or `handle` is of the wrong kind.
            RuntimeError: the graph is not empty.
            cudnnGraphNotSupportedError: the recorded engine is not here, or does not take the graph on this device.
        """
        from opgraph.planning.serialize import decode

        if data is None and not isinstance(handle, Handle):
            handle, data = None, handle
        if handle is not None and not isinstance(handle, Handle):
            raise TypeError(f"deserialize: handle: expected a Handle, got {type(handle).__name__}; see create_handle()")
        with self._lock:
            if self._ir.frozen or self._ir.all_tensors or self._ir.nodes:
                raise RuntimeError(f"deserialize: graph {self.name!r} is not empty; load into a new pygraph()")
            saved = decode(data, self.name)
            # Everything that can fail happens on a twin, so that nothing is ever half loaded.
            twin = pygraph(self.name, handle=handle or self._handle, **{**self._options, **saved.options})
            twin._ir, twin._filters = saved.ir, self._filters
            twin._replay(saved, enforce_precompiled)
            for field in ("_ir", "_handle", "_options", "_plans", "_ranked", "_executable"):
                setattr(self, field, getattr(twin, field))

    # ---- drawing

    def draw(self) -> str:
        """The graph as SVG text: tensors with name, dims and data type, operators, and the selected plan.

        A graph that validates shows inferred dims; any other is drawn as it stands.
        """
        from opgraph.planning.draw import svg

        plan = None if self._plans is None else self._plans.current()
        return svg(self._ir, None if plan is None else plan.name)

    def _repr_svg_(self) -> str:
        return self.draw()

    # ---- CUDA graphs

    def populate_cuda_graph(self, handle: Any, tensor_dict: Any, workspace: Any, cuda_graph: Any) -> None:
        """Not offered: capture `execute` on a stream instead."""
        raise cudnnGraphNotSupportedError(
            f"graph {self.name!r}: populate_cuda_graph is not offered; capture execute()"
        )

    def update_cuda_graph(self, handle: Any, tensor_dict: Any, workspace: Any, cuda_graph: Any) -> None:
        """Not offered: capture `execute` on a stream instead."""
        raise cudnnGraphNotSupportedError(
            f"graph {self.name!r}: update_cuda_graph is not offered; capture execute()"
        )


def _known_type(x: Any) -> data_type | None:
    try:
        return as_data_type(getattr(x, "dtype", None))
    except cudnnGraphNotSupportedError:
        return None


def _element_strides(x: Any, dim: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides in elements, or None for dense (also where the array does not tell)."""
    stride = getattr(x, "stride", None)
    if callable(stride):
        return tuple(int(s) for s in stride())
    if not isinstance(x, np.ndarray):
        if 0 in dim or (planning.protocols.device_of(x) or (0, 0))[0] != CPU:
            return None
        try:
            x = np.from_dlpack(x)
        except (AttributeError, TypeError, ValueError, RuntimeError, BufferError):
            return None  # a type NumPy lacks, or no DLPack: the buffer is checked when it is executed
    return None if 0 in dim else tuple(s // x.itemsize for s in x.strides)


def _unknown_keywords(unknown: Mapping[str, Any]) -> str:
    from difflib import get_close_matches  # on this path only; its import costs

    code = pygraph.__init__.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    parts = []
    for key in unknown:
        near = get_close_matches(key, known, n=1)
        parts.append(f"unknown keyword {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return f"pygraph: {'; '.join(parts)}; it takes {', '.join(known)}"
