"""opgraph: operator graphs on the buffers people already hold.

Describe a graph of tensor operations once with `pygraph`; `build()` picks an execution plan among the engines
that can run it; `execute()` takes NumPy, torch, JAX or CuPy buffers, or bare addresses, and runs the plan on
them. The names are those of the cuDNN frontend's Python API, so `import opgraph as cudnn` serves its scripts.

Importing this package imports NumPy and the native core, and nothing else.
"""

from __future__ import annotations

from opgraph import datatypes
from opgraph._version import __version__
from opgraph.functional import graph, graph_cache, jit
from opgraph.graph import GraphContext, pygraph
from opgraph.handle import DeviceInfo, Handle, create_handle, destroy_handle, get_stream, set_stream
from opgraph.ir.enums import (
    NodeType,
    attention_implementation,
    behavior_note,
    build_plan_policy,
    convolution_mode,
    cuda_graph_retention,
    data_type,
    diagonal_alignment,
    heur_mode,
    knob_type,
    moe_grouped_matmul_mode,
    norm_forward_phase,
    numerical_note,
    reduction_mode,
    reshape_mode,
    scalar_type,
    tensor_reordering,
)
from opgraph.ir.errors import OperandError, SerializationError, cudnnGraphNotSupportedError
from opgraph.ir.node import Node
from opgraph.ir.tensor import Tensor
from opgraph.resources import (
    backend_version,
    backend_version_string,
    create_device_properties,
    create_kernel_cache,
    get_last_error_string,
    library_version,
)
from opgraph.wrapper import Graph

handle = Handle

__all__ = [
    "DeviceInfo",
    "Graph",
    "GraphContext",
    "Handle",
    "Node",
    "NodeType",
    "OperandError",
    "SerializationError",
    "Tensor",
    "__version__",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "create_device_properties",
    "create_handle",
    "create_kernel_cache",
    "cuda_graph_retention",
    "cudnnGraphNotSupportedError",
    "data_type",
    "datatypes",
    "destroy_handle",
    "diagonal_alignment",
    "get_last_error_string",
    "get_stream",
    "graph",
    "graph_cache",
    "handle",
    "heur_mode",
    "jit",
    "knob_type",
    "library_version",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "pygraph",
    "reduction_mode",
    "reshape_mode",
    "scalar_type",
    "set_stream",
    "tensor_reordering",
]
