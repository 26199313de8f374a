"""Sequences as affine maps of their states: `gdn_summary`, `gdn2_summary`, `kda_summary` and their `_bwd`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ir.enums import NodeType
from .base import GraphOps, OpDef, deferred, graph_op
from .linear_attention import attributes
from .linear_attention_rules import SUMMARY, SUMMARY_BACKWARD, VARIANTS, check_contents, inference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..ir.tensor import Tensor

__all__ = ["OPS", "LinearAttentionSummaryOps"]


class LinearAttentionSummaryOps(GraphOps):
    """Summaries of gated linear attention; ports and attributes as `LinearAttentionOps` describes them.

    A run of tokens maps its state affinely. With states as they are stored, X = S^T [V, K]:

        final_state = initial_state @ transition + H

    where transition [N, HO, K, K] depends on k, g and beta alone, and H is the final state that zeros lead
    to. So pieces of a sequence can be summarised at the same time, their maps chained, and each piece run
    from its true state. Gradients go the other way by the transposed map:

        d_initial_state = d_final_state @ transition + G

    where G is the part that comes from dO. The transition of a backward summary is the transpose, in its last
    two axes, of the forward's.

    Without q the output heads HO are those of g and beta; heads of k and v (or q) divide them. Transitions
    have the states' data type unless set. Errors are those of the class named above.
    """

    __slots__ = ()

    @graph_op
    def gdn_summary(
        self,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        output_transition: bool = False,
        use_qk_l2norm: bool = False,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """The final states of `gdn` without its outputs; returns [final_state, transition].

        final_state [N, HO, V, K] starts from initial_state, or from zeros: it is then H. transition [N, HO,
        K, K] is None without `output_transition`. `use_qk_l2norm` normalises k. Everything else: see the
        class.
        """
        return _summary(
            self,
            "gdn_summary",
            {
                "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens,
                "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "output_transition": output_transition, "use_qk_l2norm": use_qk_l2norm,
                "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "gate_domain": gate_domain, "batch_invariant": batch_invariant,
                "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def kda_summary(
        self,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        output_transition: bool = False,
        use_qk_l2norm: bool = False,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        gate_lower_bound: float | None = None,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """The final states of `kda` without its outputs; returns [final_state, transition]. See
        `gdn_summary`.
        """
        return _summary(
            self,
            "kda_summary",
            {
                "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens,
                "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "output_transition": output_transition, "use_qk_l2norm": use_qk_l2norm,
                "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "gate_domain": gate_domain, "batch_invariant": batch_invariant,
                "gate_lower_bound": gate_lower_bound, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def gdn2_summary(
        self,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        w: Any,
        cu_seqlens: Any,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        output_transition: bool = False,
        use_qk_l2norm: bool = False,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        gate_lower_bound: float | None = None,
        beta_guard: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """The final states of `gdn2` without its outputs; returns [final_state, transition]. See
        `gdn_summary`.
        """
        return _summary(
            self,
            "gdn2_summary",
            {
                "k": k, "v": v, "g": g, "beta": beta, "w": w, "cu_seqlens": cu_seqlens,
                "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "output_transition": output_transition, "use_qk_l2norm": use_qk_l2norm,
                "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "gate_domain": gate_domain, "batch_invariant": batch_invariant,
                "gate_lower_bound": gate_lower_bound, "beta_guard": beta_guard, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def gdn_summary_bwd(
        self,
        q: Any,
        k: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        dO: Any,
        d_final_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        scale: float | None = None,
        output_transition: bool = False,
        use_qk_l2norm: bool = False,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """The gradient of the initial states of `gdn` alone; returns [d_initial_state, transition].

        Without d_final_state [N, HO, V, K] d_initial_state [N, HO, V, K] is G. transition [N, HO, K, K] is
        None without `output_transition`. Everything else: see the class.
        """
        return _summary_bwd(
            self,
            "gdn_summary_bwd",
            {
                "q": q, "k": k, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, "dO": dO,
                "d_final_state": d_final_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "scale": scale, "output_transition": output_transition, "use_qk_l2norm": use_qk_l2norm,
                "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "gate_domain": gate_domain, "batch_invariant": batch_invariant,
                "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def kda_summary_bwd(
        self,
        q: Any,
        k: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        dO: Any,
        d_final_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        scale: float | None = None,
        output_transition: bool = False,
        use_qk_l2norm: bool = False,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        gate_lower_bound: float | None = None,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """The gradient of the initial states of `kda` alone; returns [d_initial_state, transition]. See
        `gdn_summary_bwd`.
        """
        return _summary_bwd(
            self,
            "kda_summary_bwd",
            {
                "q": q, "k": k, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, "dO": dO,
                "d_final_state": d_final_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "scale": scale, "output_transition": output_transition, "use_qk_l2norm": use_qk_l2norm,
                "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "gate_domain": gate_domain, "batch_invariant": batch_invariant,
                "gate_lower_bound": gate_lower_bound, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def gdn2_summary_bwd(
        self,
        q: Any,
        k: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        dO: Any,
        d_final_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        scale: float | None = None,
        output_transition: bool = False,
        use_qk_l2norm: bool = False,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        gate_lower_bound: float | None = None,
        beta_guard: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """The gradient of the initial states of `gdn2` alone; returns [d_initial_state, transition].

        w does not enter. See `gdn_summary_bwd`.
        """
        return _summary_bwd(
            self,
            "gdn2_summary_bwd",
            {
                "q": q, "k": k, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, "dO": dO,
                "d_final_state": d_final_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "scale": scale, "output_transition": output_transition, "use_qk_l2norm": use_qk_l2norm,
                "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate, "gate_domain": gate_domain, "batch_invariant": batch_invariant,
                "gate_lower_bound": gate_lower_bound, "beta_guard": beta_guard, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip


def _summary(
    graph: GraphOps,
    op: str,
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
    name: str,
    compute_data_type: Any,
    out_dims: Any,
    state: str = "final_state",
) -> list[Tensor | None]:
    params = attributes(given)
    made = graph._add_node(
        op,
        inputs=inputs,
        outputs=[state, *(["transition"] if params["output_transition"] else [])],
        params=params,
        name=name,
        compute_data_type=compute_data_type,
        out_dims=out_dims,
    )
    return [made[state], made.get("transition")]


def _summary_bwd(
    graph: GraphOps,
    op: str,
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
    name: str,
    compute_data_type: Any,
    out_dims: Any,
) -> list[Tensor | None]:
    return _summary(graph, op, inputs, given, name, compute_data_type, out_dims, "d_initial_state")


_NODE_TYPES = {
    "gdn": (NodeType.GDN_SUMMARY, NodeType.GDN_SUMMARY_BACKWARD),
    "gdn2": (NodeType.GDN2_SUMMARY, NodeType.GDN2_SUMMARY_BACKWARD),
    "kda": (NodeType.KDA_SUMMARY, NodeType.KDA_SUMMARY_BACKWARD),
}

OPS = tuple(
    OpDef(
        variant.name + suffix,
        _NODE_TYPES[variant.name][role == SUMMARY_BACKWARD],
        inference(variant, role),
        reference,
        optional_outputs=(state, "transition"),
        check=check_contents,
    )
    for variant in VARIANTS
    for role, suffix, reference, state in (
        (SUMMARY, "_summary", deferred("linear_attention_reference", "forward_reference"), "final_state"),
        (
            SUMMARY_BACKWARD,
            "_summary_bwd",
            deferred("linear_attention_reference", "backward_reference"),
            "d_initial_state",
        ),
    )
)
