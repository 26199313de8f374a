"""`Graph`: a graph described in a `with` block, built at its end, and then called like a function on
arrays."""

from __future__ import annotations

import sys
from _thread import _local
from collections.abc import Mapping
from typing import Any

import numpy as np

from opgraph import planning
from opgraph.engines.device import CPU
from opgraph.graph import pygraph
from opgraph.handle import Handle, default_handle
from opgraph.ir.datatypes import numpy_dtype
from opgraph.ir.enums import data_type
from opgraph.ir.tensor import Tensor, span
from opgraph.ops.base import GraphOps

__all__ = ["Graph"]

# What would take the graph out of the wrapper's hands.
_BLOCKED = frozenset(
    (
        "build",
        "build_operation_graph",
        "build_plans",
        "build_plan_at_index",
        "validate",
        "create_execution_plan",
        "create_execution_plans",
        "check_support",
        "select_plan",
        "deselect_engines",
        "deselect_workspace_greater_than",
        "select_behavior_notes",
        "deselect_behavior_notes",
        "select_numeric_notes",
        "deselect_numeric_notes",
        "execute",
        "execute_plan_at_index",
        "bind",
        "get_behavior_notes",
        "get_behavior_notes_for_plan_at_index",
        "get_engine_count",
        "get_execution_plan_count",
        "get_knobs_for_engine",
        "get_plan_name_at_index",
        "key",
        "populate_cuda_graph",
        "update_cuda_graph",
    )
)


class Graph:
    """Context manager around a `pygraph`.

    Inside the block call operators, `tensor` and `tensor_like` on the wrapper; arrays among the arguments
    become tensors, once per object. At the end of the block the graph is built. Then `g(*arrays)` runs it and
    returns the output array, or a list of them; `g({key: array, ...})` fills the dictionary with the outputs
    it lacks and returns it.

    Args:
        handle: a Handle; `"auto"` for the calling thread's default one; None for the graph's default stream.
        inputs, outputs: order of the arguments and results of `g(*arrays)`, see `set_io_tuples`.
        heuristics: list of `heur_mode`; default `[A, FALLBACK]`.
        workspace_alloc: own one workspace per thread and stream; False: every call passes `workspace=`.
        options: keywords of `pygraph`.
    """

    def __init__(
        self,
        *,
        handle: Handle | str | None = None,
        inputs: Any = None,
        outputs: Any = None,
        heuristics: Any = None,
        workspace_alloc: bool = True,
        **options: Any,
    ) -> None:
        for name, value in (("inputs", inputs), ("outputs", outputs), ("heuristics", heuristics)):
            if value is not None and not isinstance(value, (list, tuple)):
                raise ValueError(f"Graph: {name}: expected a list, got {type(value).__name__}")
        if handle is not None and handle != "auto" and not isinstance(handle, Handle):
            raise TypeError(f"Graph: handle: expected a Handle or 'auto', got {handle!r}")
        self._options = options
        self._handle = handle
        self._asked_inputs = inputs
        self._asked_outputs = outputs
        self._heuristics = list(heuristics or planning.plan.DEFAULT_HEURISTICS)
        self._workspace_alloc = workspace_alloc
        self._graph: pygraph | None = None
        self._ready = False
        self._arrays: dict[
            int, tuple[Any, Tensor]
        ] = {}  # id -> (array, its tensor); the array keeps the id its own
        self._recorded: dict[str, Tensor] = {}
        self._nodes: set[str] = set()
        self._inputs: list[Tensor] | None = None
        self._outputs: list[Tensor] | None = None
        self._workspaces = _local()

    # ---- describing

    def __enter__(self) -> Graph:
        if self._graph is not None:
            raise RuntimeError("Graph: a graph is described once; make another Graph")
        handle = self._handle if isinstance(self._handle, Handle) else None
        self._graph = pygraph(handle=handle, **self._options)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._graph = None
            return
        graph = self._described()
        graph.validate()
        graph.build_operation_graph()
        if not graph.plans:  # a graph that the block deserialized has its plan
            graph.create_execution_plans(self._heuristics)
        graph.check_support()
        graph.build_plans()
        self._ready = True
        if self._asked_inputs is not None or self._asked_outputs is not None:
            self.set_io_tuples(self._asked_inputs or (), self._asked_outputs or ())

    def _described(self) -> pygraph:
        if self._graph is None:
            raise RuntimeError("Graph: use it in a with statement first")
        return self._graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _BLOCKED:
            raise RuntimeError(
                f"Graph.{name} is not available: the wrapper plans, builds and runs the graph itself"
            )
        graph = self._described()
        method = getattr(graph, name)
        if not _is_operator(name):
            return method

        def add(*args: Any, **kwargs: Any) -> Any:
            return self._add(graph, name, method, args, kwargs)

        return add

    def tensor_like(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """`pygraph.tensor_like`; the array can then be named in `set_io_tuples`."""
        tensor = self._described().tensor_like(_detached(x), *args, **kwargs)
        if _is_array(x):
            self._arrays[id(x)] = x, tensor
        return tensor

    def _add(
        self, graph: pygraph, op: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = len(graph.nodes)
        asked = kwargs.get("name")
        if asked and asked in self._nodes:
            raise ValueError(f"Graph: a node named {asked!r} exists already")
        places: list[tuple[str, Tensor]] = []
        args = tuple(self._converted(value, str(i), places) for i, value in enumerate(args))
        kwargs = {key: self._converted(value, key, places) for key, value in kwargs.items()}
        result = method(*args, **kwargs)
        added = graph.nodes[before:]
        label = added[-1].name if added else asked or op
        for node in added:
            if node.name in self._nodes:
                raise ValueError(f"Graph: a node named {node.name!r} exists already")
            self._nodes.add(node.name)
        for place, tensor in places:
            self._recorded[f"{label}::{place}"] = tensor
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self._recorded[tensor.name] = tensor
        return result

    def _converted(self, value: Any, place: str, places: list[tuple[str, Tensor]]) -> Any:
        if isinstance(value, (tuple, list)):
            items = [self._converted(item, f"{place}::{j}", places) for j, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if _is_array(value):
            held = self._arrays.get(id(value))
            value = held[1] if held is not None else self.tensor_like(value)
        if isinstance(value, Tensor):
            places.append((place, value))
        return value

    # ---- the order of arguments and results

    def set_io_tuples(self, inputs: Any, outputs: Any) -> None:
        """Sets the order of `g(*arrays)`.

        Items are names (assigned, or `<node>::<argument>`), uids, Tensors, or the arrays used in the block.
        Together they must name every tensor with a buffer exactly once.

        Raises:
            ValueError: an item names no tensor, a virtual one, one twice, or a tensor is left out.
        """
        for name, value in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"set_io_tuples: {name}: expected a list, got {type(value).__name__}")
        found = [[self._find(item) for item in side] for side in (inputs, outputs)]
        needed = self._operands()
        for side, tensors, wanted in zip(("inputs", "outputs"), found, needed, strict=True):
            for tensor in tensors:
                if tensor not in wanted:
                    raise ValueError(
                        f"set_io_tuples: {side}: tensor {tensor.name!r} (uid {tensor.uid}) is none of them"
                    )
            missing = [t for t in wanted if t not in tensors]
            if missing:
                names = ", ".join(f"{t.name!r} (uid {t.uid})" for t in missing)
                raise ValueError(f"set_io_tuples: {side}: left out: {names}")
            if len(set(tensors)) != len(tensors):
                raise ValueError(f"set_io_tuples: {side}: a tensor is named twice")
        self._inputs, self._outputs = found

    def _operands(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors a call needs buffers for, and those it gives, in order of declaration."""
        graph = self._described()
        used = {t for n in graph.nodes for t in (*n.inputs.values(), *n.outputs.values())}
        used |= {t.ragged_offset for t in used if t.ragged_offset is not None}
        inputs = [t for t in graph.get_inputs() if t in used and t.pass_by_value is None]
        return inputs, [t for t in graph.get_outputs() if t in used]

    def _find(self, item: Any) -> Tensor:
        graph = self._described()
        if isinstance(item, Tensor):
            return item
        if isinstance(item, str) and item in self._recorded:
            return self._recorded[item]
        if isinstance(item, (str, int)) and not isinstance(item, bool):
            tensor = graph.find_tensor(item)
        else:
            tensor = self._arrays.get(id(item), (None, None))[1]
        if tensor is None:
            what = repr(item) if isinstance(item, (str, int)) else f"an object of type {type(item).__name__}"
            raise ValueError(
                f"Graph: {what} names no tensor; known names: {', '.join(self._recorded) or 'none'}"
            )
        return tensor

    # ---- calling

    def __call__(self, *arrays: Any, handle: Handle | None = None, workspace: Any = None) -> Any:
        """Runs the graph.

        `g(*arrays)` takes the inputs in the order of `set_io_tuples` and returns the output, or a list of
        outputs. `g({key: array})` takes buffers by name, uid, Tensor or array of the block; outputs it lacks
        are allocated and added under their name, and the dictionary is returned. Outputs are allocated by the
        first input's framework.

        Raises:
            RuntimeError: the block has not ended, an input is missing, a value is no array, or a workspace is
                required.
        """
        if not self._ready:
            raise RuntimeError("Graph: the with block has to end before the graph can run")
        if len(arrays) == 1 and isinstance(arrays[0], dict):
            return self._call_mapping(arrays[0], handle, workspace)
        if self._inputs is None or self._outputs is None:
            raise RuntimeError("Graph: positional calls need inputs= and outputs=, or set_io_tuples()")
        if len(arrays) != len(self._inputs):
            raise RuntimeError(f"Graph: expected {len(self._inputs)} arrays, got {len(arrays)}")
        pack = {t: _checked(a, t) for t, a in zip(self._inputs, arrays, strict=True)}
        results = [_allocate(t, arrays) for t in self._outputs]
        pack.update(zip(self._outputs, results, strict=True))
        self._run(pack, arrays, handle, workspace)
        return results[0] if len(results) == 1 else results

    def _call_mapping(self, given: dict[Any, Any], handle: Handle | None, workspace: Any) -> dict[Any, Any]:
        pack: dict[Tensor, Any] = {}
        for key, value in given.items():
            tensor = self._find(key)
            pack[tensor] = _checked(value, tensor)
        inputs, outputs = self._operands()
        missing = [t for t in inputs if t not in pack]
        if missing:
            names = ", ".join(f"{t.name!r} (uid {t.uid})" for t in missing)
            raise RuntimeError(f"Graph: no array for {names}")
        arrays = [pack[t] for t in inputs]
        for tensor in outputs:
            if tensor not in pack:
                given[self._canonical(tensor)] = pack[tensor] = _allocate(tensor, arrays)
        self._run(pack, arrays, handle, workspace)
        return given

    def _canonical(self, tensor: Tensor) -> str:
        return next((name for name, held in self._recorded.items() if held is tensor), tensor.name)

    def _run(self, pack: Mapping[Tensor, Any], arrays: Any, handle: Handle | None, workspace: Any) -> None:
        if handle is None and self._handle is not None:
            handle = default_handle() if isinstance(self._handle, str) else self._handle
        if workspace is None:
            workspace = self._workspace(arrays, 0 if handle is None else handle.stream)
        self._described().execute(pack, workspace, handle)

    def _workspace(self, arrays: Any, stream: int) -> Any:
        """The workspace this thread owns for this stream; None where the plan needs none."""
        if not self._workspace_alloc:
            raise RuntimeError("Graph: workspace_alloc=False, so every call has to pass workspace=")
        size = self._described().get_workspace_size()
        if size == 0:
            return None
        held = self._workspaces.__dict__  # this thread's
        key = f"stream {stream}"
        if key not in held:
            held[key] = _empty((size,), (1,), data_type.UINT8, arrays)
        return held[key]

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("opgraph.Graph cannot be copied or pickled; describe it again")


def _is_operator(name: str) -> bool:
    owner = next((c for c in pygraph.__mro__ if name in vars(c)), None)
    return owner is not None and owner is not pygraph and issubclass(owner, GraphOps)


def _is_array(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "__dlpack__")


def _detached(array: Any) -> Any:
    return array.detach() if getattr(array, "requires_grad", False) is True else array


def _checked(value: Any, tensor: Tensor) -> Any:
    number = tensor.is_pass_by_value and isinstance(value, (int, float))
    if not number and not _is_array(value) and planning.protocols.device_of(value) is None:
        raise RuntimeError(
            f"Graph: tensor {tensor.name!r} (uid {tensor.uid}): expected an array, got {type(value).__name__}"
        )
    return _detached(value)


def _allocate(tensor: Tensor, arrays: Any) -> Any:
    assert tensor.data_type is not None  # the graph is built
    return _empty(tensor.dim, tensor.stride, tensor.data_type, arrays)


def _empty(dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type, arrays: Any) -> Any:
    """An uninitialised array with these strides, of the framework of the first array that is no host
    scalar."""
    if dtype in (data_type.FP4_E2M1, data_type.INT4):
        unit = max(
            (a for a, (n, s) in enumerate(zip(dim, stride, strict=True)) if s == 1 and n > 1), default=0
        )
        dim = tuple(n // 2 if a == unit else n for a, n in enumerate(dim))
        stride = tuple(s if a == unit else max(1, s // 2) for a, s in enumerate(stride))
        dtype = data_type.UINT8
    model = next((a for a in arrays if hasattr(a, "new_empty_strided")), None)
    host = all((planning.protocols.device_of(a) or (CPU, 0))[0] == CPU for a in arrays)
    if model is not None and (host or planning.protocols.device_of(model)[0] != CPU):  # type: ignore[index]
        torch = sys.modules["torch"]  # the model is one of its tensors
        return model.new_empty_strided(dim, stride, dtype=getattr(torch, numpy_dtype(dtype).name))
    if not host:
        raise RuntimeError(
            "Graph: outputs on a device are allocated by torch only; pass them in a dictionary"
        )
    flat = np.empty(span(dim, stride), numpy_dtype(dtype))
    return np.lib.stride_tricks.as_strided(flat, dim, tuple(s * flat.itemsize for s in stride))
