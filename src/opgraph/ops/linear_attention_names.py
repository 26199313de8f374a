"""Long names of gated linear attention: `gated_delta_net`, `gated_delta_net_v2`, `kimi_delta_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.enums import reshape_mode
from ..ir.tensor import Tensor
from .base import graph_op, number, row_major
from .linear_attention import LinearAttentionOps

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LinearAttentionNames"]


class LinearAttentionNames(LinearAttentionOps):
    """`gdn`, `gdn2` and `kda` under their long names, for packed tokens or a batch of equally long sequences.

    With q [B, T, HQ, K] (and k, v, g, beta, w alike) every batch entry is a sequence: the operands are
    reshaped to [B * T, ..] and O back to [B, T, HO, V], and cu_seqlens is 0, T, 2 T, .. unless given. That
    default lives in host memory; a graph for a GPU needs cu_seqlens given. Packed operands [T, HQ, K] always
    need it.
    """

    __slots__ = ()

    @graph_op
    def gated_delta_net(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any = None,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        state_indices: Any = None,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> list[Tensor | None]:
        """`gdn` under its long name; returns [O, final_state, state_checkpoints].

        `use_qk_l2norm_in_kernel` and `use_beta_sigmoid_in_kernel` are its `use_qk_l2norm` and
        `use_beta_sigmoid`.
        """
        packed, cu_seqlens, dim = _packed(self, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, cu_seqlens)
        results = self.gdn(
            packed["q"],
            packed["k"],
            packed["v"],
            packed["g"],
            packed["beta"],
            cu_seqlens,
            initial_state,
            a_log,
            dt_bias,
            state_indices,
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            use_beta_sigmoid=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
            gate_domain=gate_domain,
            batch_invariant=batch_invariant,
            overwrite_initial_state=overwrite_initial_state,
            max_seqlen=max_seqlen,
            name=name,
            compute_data_type=compute_data_type,
        )
        return _unpacked(self, results, dim)

    @graph_op
    def gated_delta_net_v2(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        w: Any,
        cu_seqlens: Any = None,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        state_indices: Any = None,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        gate_lower_bound: float | None = None,
        beta_guard: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> list[Tensor | None]:
        """`gdn2` under its long name; see `gated_delta_net`."""
        packed, cu_seqlens, dim = _packed(self, {"q": q, "k": k, "v": v, "g": g, "beta": beta, "w": w}, cu_seqlens)
        results = self.gdn2(
            packed["q"],
            packed["k"],
            packed["v"],
            packed["g"],
            packed["beta"],
            packed["w"],
            cu_seqlens,
            initial_state,
            a_log,
            dt_bias,
            state_indices,
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            use_beta_sigmoid=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
            gate_domain=gate_domain,
            batch_invariant=batch_invariant,
            overwrite_initial_state=overwrite_initial_state,
            gate_lower_bound=gate_lower_bound,
            beta_guard=beta_guard,
            max_seqlen=max_seqlen,
            name=name,
            compute_data_type=compute_data_type,
        )
        return _unpacked(self, results, dim)

    @graph_op
    def kimi_delta_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any = None,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        state_indices: Any = None,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        gate_lower_bound: float | None = None,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> list[Tensor | None]:
        """`kda` under its long name; see `gated_delta_net`."""
        packed, cu_seqlens, dim = _packed(self, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, cu_seqlens)
        results = self.kda(
            packed["q"],
            packed["k"],
            packed["v"],
            packed["g"],
            packed["beta"],
            cu_seqlens,
            initial_state,
            a_log,
            dt_bias,
            state_indices,
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            use_beta_sigmoid=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
            gate_domain=gate_domain,
            batch_invariant=batch_invariant,
            overwrite_initial_state=overwrite_initial_state,
            gate_lower_bound=gate_lower_bound,
            max_seqlen=max_seqlen,
            name=name,
            compute_data_type=compute_data_type,
        )
        return _unpacked(self, results, dim)


def _dim(x: Any) -> tuple[int, ...]:
    return tuple(x.dim if isinstance(x, Tensor) else getattr(x, "shape", ()))


def _packed(
    graph: Any, operands: dict[str, Any], cu_seqlens: Any
) -> tuple[dict[str, Any], Any, tuple[int, ...] | None]:
    """The operands with one token axis, the boundaries, and the dim of O where it has a batch axis."""
    dim = _dim(operands["q"])
    if len(dim) != 4:
        return operands, cu_seqlens, None
    entries, tokens = dim[:2]
    packed = {
        port: x if len(_dim(x)) < 2 else _reshaped(graph, x, (number(_dim(x)[:2]), *_dim(x)[2:]))
        for port, x in operands.items()
    }
    if cu_seqlens is None:
        cu_seqlens = np.arange(entries + 1, dtype=np.int64) * tokens
    heads, width = _dim(operands["v"])[-2:] or (0, 0)
    return packed, cu_seqlens, (entries, tokens, max(dim[2], heads), width)


def _unpacked(graph: Any, results: list[Tensor | None], dim: tuple[int, ...] | None) -> list[Tensor | None]:
    return results if dim is None else [_reshaped(graph, results[0], dim), *results[1:]]


def _reshaped(graph: Any, x: Any, dim: Sequence[int]) -> Tensor:
    made: Tensor = graph.reshape(x, reshape_mode.LOGICAL, out_dims=dim)
    return made.set_stride(row_major(tuple(dim)))
