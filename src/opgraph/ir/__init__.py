"""The graph description: tensors, nodes, validation, freezing. Knows no engine and no buffer."""

from __future__ import annotations

from .datatypes import as_data_type, scalar_bytes, torch_to_cudnn_data_type
from .enums import (
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
from .errors import OperandError, cudnnGraphNotSupportedError
from .node import Node
from .program import GraphIR
from .spec import GraphSpec, NodeSpec, TensorSpec, infer_live
from .tensor import Tensor

__all__ = [
    "GraphIR",
    "GraphSpec",
    "Node",
    "NodeSpec",
    "NodeType",
    "OperandError",
    "Tensor",
    "TensorSpec",
    "as_data_type",
    "attention_implementation",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "cuda_graph_retention",
    "cudnnGraphNotSupportedError",
    "data_type",
    "diagonal_alignment",
    "heur_mode",
    "infer_live",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "reduction_mode",
    "reshape_mode",
    "scalar_bytes",
    "scalar_type",
    "tensor_reordering",
    "torch_to_cudnn_data_type",
]
