"""A graph that only declares: the operator mixins on the IR, without plans, engines or buffers.

`run` evaluates its nodes one by one with their NumPy references, rounding every tensor to its own type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opgraph.ir import GraphIR, data_type
from opgraph.ir.datatypes import numpy_dtype, round_to
from opgraph.ops import OPS, Math, OutSpec, RefCall
from opgraph.ops.activation import ActivationOps
from opgraph.ops.base import apply_out_dims
from opgraph.ops.matmul import MatmulOps
from opgraph.ops.pointwise import PointwiseOps
from opgraph.ops.reduction import ReductionOps


class Declared(MatmulOps, PointwiseOps, ActivationOps, ReductionOps):
    def __init__(self, io: Any = data_type.FLOAT, intermediate: Any = None, compute: Any = None) -> None:
        self.ir = GraphIR("declared", io, intermediate, compute)
        self.tensor = self.ir.tensor
        self.validate = self.ir.validate

    def _add_node(self, op, *, inputs, outputs, params=None, name="", compute_data_type=None, out_dims=None):
        results = self.ir.add_node(OPS[op], inputs, outputs, params, name, compute_data_type)
        apply_out_dims(results, out_dims, op)
        return results


def run(graph: Declared, feeds: dict[Any, Any], *, precise: bool = True, into: dict[Any, Any] | None = None):
    """`{tensor: array}` of every tensor of the graph. `into` gives outputs memory of their own."""
    spec = graph.ir.snapshot()
    values = {tensor.uid: np.asarray(array) for tensor, array in feeds.items()}
    memory = {tensor.uid: array for tensor, array in (into or {}).items()}
    for node in spec.nodes:
        outputs = {}
        for port, uid in node.outputs.items():
            tensor = spec.tensors[uid]
            dtype = numpy_dtype(tensor.data_type)
            outputs[port] = OutSpec(tensor.dim, tensor.data_type, dtype, memory.get(uid))
        call = RefCall(
            node.params,
            {port: values[uid] for port, uid in node.inputs.items()},
            outputs,
            Math(node.compute_data_type, precise),
        )
        for port, result in OPS[node.op].reference(call).items():
            out = outputs[port]
            assert result.shape == out.shape, (node.op, port, result.shape, out.shape)
            if result is not out.view:
                result = round_to(result, out.data_type)
                if out.view is not None:
                    out.view[...] = result
                    result = out.view
            values[node.outputs[port]] = result
    return {tensor: values[tensor.uid] for tensor in graph.ir.all_tensors if tensor.uid in values}
