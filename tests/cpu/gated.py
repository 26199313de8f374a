"""Calls of the gated linear attention operators on plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from conformance.linear_attention import operands
from conformance.tolerances import relative_norm
from sums import Guarded

import opgraph
from opgraph import data_type
from opgraph.ir.datatypes import numpy_dtype

Array = np.ndarray[Any, Any]

VARIANTS = ("gdn", "gdn2", "kda")
GRADIENTS = ("dQ", "dK", "dV", "dG", "dBeta", "dW", "d_initial_state", "d_a_log", "d_dt_bias")


def cast(values: Mapping[str, Any], dtype: Any) -> dict[str, Array]:
    """Floating arrays in one type; boundaries and indices as INT32."""
    arrays = {port: np.asarray(value) for port, value in values.items()}
    return {port: a.astype(dtype if a.dtype.kind == "f" else np.int32, copy=False) for port, a in arrays.items()}


class Call:
    """A built graph of one operator of the family.

    Every argument is an array; outputs are operands with guarded buffers. `results()` runs it and returns the outputs
    by port.
    """

    def __init__(
        self,
        op: str,
        values: Mapping[str, Any],
        *,
        precision: str = "float64",
        dtype: Any = np.float64,
        compute: data_type | None = None,
        graph: Mapping[str, Any] | None = None,
        virtual: bool = False,
        **options: Any,
    ) -> None:
        self.arrays = cast(values, dtype)
        io = data_type.DOUBLE if np.dtype(dtype) == np.float64 else data_type.FLOAT
        self.graph = opgraph.pygraph(io_data_type=io, compute_data_type=compute or data_type.FLOAT, **(graph or {}))
        self.inputs = {
            port: self.graph.tensor(
                a.shape, [s // a.itemsize for s in a.strides] if a.size else None, a.dtype, name=port
            )
            for port, a in self.arrays.items()
        }
        made = getattr(self.graph, op)(**self.inputs, **options)
        self.outputs = {t.name.rpartition("::")[2]: t for t in made if t is not None}
        for port, tensor in self.outputs.items():
            tensor.set_output(not virtual)
            if port in ("final_state", "d_initial_state", "transition"):
                tensor.set_data_type(io)
        self.graph.build(engine="cpu", knobs={"precision": precision})

    def buffers(self) -> dict[str, Guarded]:
        """A buffer full of NaN for every output."""
        return {
            port: Guarded(t.get_dim(), t.get_stride(), numpy_dtype(t.get_data_type()), fill=np.nan)
            for port, t in self.outputs.items()
        }

    def pack(self, buffers: Mapping[str, Any], **replaced: Any) -> dict[Any, Any]:
        """The variant pack; `replaced` are inputs by port."""
        arrays = {**self.arrays, **replaced}
        found = {tensor: arrays[port] for port, tensor in self.inputs.items()}
        return found | {
            self.outputs[port]: buffer.view if isinstance(buffer, Guarded) else buffer
            for port, buffer in buffers.items()
        }

    def results(self, **replaced: Any) -> dict[str, Array]:
        """The outputs by port."""
        buffers = self.buffers()
        self.graph.execute(self.pack(buffers, **replaced))
        for buffer in buffers.values():
            buffer.check()
        return {port: buffer.view for port, buffer in buffers.items()}


def call(op: str, values: Mapping[str, Any], **options: Any) -> dict[str, Array]:
    """The outputs of one operator by port; forward operators give the final state too."""
    if op in VARIANTS:
        options.setdefault("output_final_state", True)
    return Call(op, values, **options).results()


def problem(
    variant: str, lengths: Any, heads: tuple[int, int] = (2, 2), k: int = 8, v: int = 6, seed: int = 0, **how: Any
):
    """Random operands with an initial state; see `conformance.linear_attention.operands`."""
    rng = np.random.default_rng([seed, len(variant), *variant.encode()])
    values = operands(variant, rng, lengths, heads, k, v, **how)
    values["initial_state"] = 0.3 * rng.standard_normal((len(lengths), max(heads), v, k))
    return values


def with_gradients(values: Mapping[str, Any], seed: int = 1, final: bool = True) -> dict[str, Any]:
    """The operands of the backward operator."""
    rng = np.random.default_rng(seed)
    tokens, out = len(values["k"]), values["g"].shape[1]
    added = {"dO": rng.standard_normal((tokens, out, values["v"].shape[2]))}
    if final:
        shape = (len(values["cu_seqlens"]) - 1, out, values["v"].shape[2], values["k"].shape[2])
        added["d_final_state"] = rng.standard_normal(shape)
    return {**values, **added}


def part(values: Mapping[str, Any], low: int, high: int) -> dict[str, Any]:
    """One sequence of tokens low to high, without states."""
    tokens = ("q", "k", "v", "g", "beta", "w", "dO")
    found = {port: values[port][low:high] for port in tokens if port in values}
    return {**found, "cu_seqlens": np.array([0, high - low])}


def close(found: Mapping[str, Array], truth: Mapping[str, Array], most: float) -> None:
    """Every output within a relative Frobenius norm."""
    assert found.keys() == truth.keys()
    for port, values in found.items():
        assert np.isfinite(values).all(), f"{port} is not finite"
        error = relative_norm(values, np.asarray(truth[port]))
        assert error <= most, f"{port}: relative error {error:.2e}, at most {most:.2e}"


def same_bits(a: Array, b: Array) -> None:
    """Equal to the bit."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
