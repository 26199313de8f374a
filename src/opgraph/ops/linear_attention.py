"""Gated linear attention with the delta rule, forward and backward: `gdn`, `gdn2`, `kda` and their `_bwd`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from ..ir.enums import NodeType
from .base import GraphOps, OpDef, deferred, graph_op
from .linear_attention_rules import BACKWARD, FORWARD, VARIANTS, check_contents, inference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..ir.tensor import Tensor

__all__ = ["OPS", "LinearAttentionOps"]


class LinearAttentionOps(GraphOps):
    """Gated linear attention: GDN, GDN2 and KDA.

    Tokens of all sequences are packed along one axis. Per sequence and output head a state S [K, V] is
    carried from token to token:

        S = diag(exp(g)) S                    decay
        u = w * v - S^T (b * k)               what is written, after erasing what k reads
        S = S + k u^T
        O = scale * S^T q

    | op   | g                          | b                  | w                  |
    |------|----------------------------|--------------------|--------------------|
    | gdn  | one per head, [T, HO]      | beta [T, HO]       | the same beta      |
    | kda  | per key channel, [T, HO, K]| beta [T, HO]       | the same beta      |
    | gdn2 | per key channel, [T, HO, K]| beta [T, HO, K]    | w [T, HO, V]       |

    Ports of all operators, in elements: T tokens, N sequences, HO = max(HQ, HV) output heads.

    - q [T, HQ, K], k [T, HK, K], v [T, HV, V], O and dO [T, HO, V]. One of HQ and HV divides the other, HK is
      one of them. Output head h reads head h // (HO / Hx) of a source with Hx heads.
    - cu_seqlens [N + 1], INT32 or INT64: sequence i has the tokens from cu_seqlens[i] to cu_seqlens[i + 1].
      It starts at 0, ends at T and does not decrease; equal neighbours are an empty sequence, whose states
      pass through unchanged.
    - initial_state, final_state and their gradients [N, HO, V, K]: value axis before key axis. One data type
      for all of them, FLOAT where nothing is given. Without initial_state a sequence starts from zeros.
    - state_checkpoints [max(T // n + N, 1), HO, V, K], n = checkpoint_every_n_tokens: a sequence of length L
      owns ceil(L / n) consecutive rows, row j being the state before its token j n. Rows that are left over
      hold no state.
    - a_log [HO], dt_bias [HO] (gdn) or [HO, K]: parameters of the safe gate.
    - state_indices [N] INT32: initial_state is then a pool [rows, HO, V, K]. Sequence i starts from row
      state_indices[i] and its final state goes to the same row of final_state, which has the pool's dims;
      other rows stay as they are. Where sequences share a row it holds the final state of one of them.

    Every floating data type is accepted for every port but these two. Outputs are row-major unless set; O and
    state_checkpoints have the graph's default types, gradients those of their inputs. Outputs left virtual
    may be given a buffer at execution and are then written.

    Attributes:

    - scale: factor of q, a number; None is K^-0.5.
    - use_qk_l2norm: rows of q and k are divided by sqrt(sum(x^2) + 1e-6) first.
    - gate_domain: "log", exp(g) is the decay and g <= 0; or "linear", g is the decay itself and log(g +
      1e-10) is taken (dG with respect to g).
    - safe_gate: g holds raw logits. gdn: log decay -exp(a_log) softplus(g + dt_bias). kda, gdn2:
      gate_lower_bound * sigmoid(exp(a_log) (g + dt_bias)), with gate_lower_bound in [-5, 0), None being -5. A
      missing a_log or dt_bias counts as 0. Not with gate_domain "linear".
    - use_beta_sigmoid: beta holds logits; allow_neg_eigval doubles their sigmoid. w is taken as it is.
    - batch_invariant: a sequence's result must not depend on the rest of the batch by a bit. The CPU engine
      always keeps to that.
    - overwrite_initial_state: final_state may be the buffer of initial_state; both are needed.
    - beta_guard (gdn2): not served.
    - max_seqlen: a promise that no sequence is longer, for engines that choose by it; None promises nothing.

    A log decay below -100 counts as -100 where chunks of tokens are computed together, and has gradient 0; g
    = -inf, which forgets everything, is legal.

    Raises at `validate()`: `ValueError` for a missing port, ranks, extents or heads that do not fit, states
    of different data types, a wrong length or index type, and for attributes or ports that do not go
    together: a_log, dt_bias or gate_lower_bound without safe_gate; safe_gate with gate_domain "linear";
    allow_neg_eigval without use_beta_sigmoid; state_indices without initial_state, in a backward node or with
    checkpoints; overwrite_initial_state without both states; checkpoints without interval or the reverse.
    `cudnnGraphNotSupportedError` for beta_guard and for data types that are not HALF, BFLOAT16, FLOAT or
    DOUBLE. At execution on host memory, `OperandError` (a `ValueError`) for boundaries or pool rows that do
    not fit, before anything is written.
    """

    __slots__ = ()

    @graph_op
    def gdn(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        state_indices: Any = None,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gated delta rule; returns [O, final_state, state_checkpoints], None for what is not asked for.

            S = exp(g) S;  S = S + beta k (v - S^T k)^T;  O = scale * S^T q

        g and beta [T, HO]. final_state is there with `output_final_state`, state_checkpoints with
        `checkpoint_every_n_tokens` > 0. Everything else: see the class.
        """
        return _forward(
            self,
            "gdn",
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens,
                "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias,
                "state_indices": state_indices,
            },
            {
                "scale": scale, "output_final_state": output_final_state, "use_qk_l2norm": use_qk_l2norm,
                "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "use_beta_sigmoid": use_beta_sigmoid,
                "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
                "batch_invariant": batch_invariant, "overwrite_initial_state": overwrite_initial_state,
                "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def kda(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        state_indices: Any = None,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        gate_lower_bound: float | None = None,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Kimi delta attention, a decay per key channel; returns [O, final_state, state_checkpoints].

            S = diag(exp(g)) S;  S = S + beta k (v - S^T k)^T;  O = scale * S^T q

        g [T, HO, K], beta [T, HO], dt_bias [HO, K]. Everything else: see `gdn` and the class.
        """
        return _forward(
            self,
            "kda",
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens,
                "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias,
                "state_indices": state_indices,
            },
            {
                "scale": scale, "output_final_state": output_final_state, "use_qk_l2norm": use_qk_l2norm,
                "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "use_beta_sigmoid": use_beta_sigmoid,
                "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
                "batch_invariant": batch_invariant, "overwrite_initial_state": overwrite_initial_state,
                "gate_lower_bound": gate_lower_bound, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def gdn2(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        w: Any,
        cu_seqlens: Any,
        initial_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        state_indices: Any = None,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
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
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Second gated delta rule: decay and erasure per key channel, writing per value channel.

            S = diag(exp(g)) S;  S = S + k (w * v - S^T (beta * k))^T;  O = scale * S^T q

        Returns [O, final_state, state_checkpoints]. g and beta [T, HO, K], w [T, HO, V], dt_bias [HO, K].
        Everything else: see `gdn` and the class.
        """
        return _forward(
            self,
            "gdn2",
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "w": w, "cu_seqlens": cu_seqlens,
                "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias,
                "state_indices": state_indices,
            },
            {
                "scale": scale, "output_final_state": output_final_state, "use_qk_l2norm": use_qk_l2norm,
                "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "use_beta_sigmoid": use_beta_sigmoid,
                "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
                "batch_invariant": batch_invariant, "overwrite_initial_state": overwrite_initial_state,
                "gate_lower_bound": gate_lower_bound, "beta_guard": beta_guard, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def gdn_bwd(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        dO: Any,
        state_checkpoints: Any = None,
        initial_state: Any = None,
        d_final_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of `gdn`; returns [dQ, dK, dV, dG, dBeta, d_initial_state, d_a_log, d_dt_bias].

        They are the gradients of sum(dO * O) + sum(d_final_state * final_state), each with dims and data type
        of its input; the last three are None unless their input is given. Heads that share a source are
        summed, and the gradients go back through norms, sigmoids and gates. Inputs and attributes are those
        of the forward node; `overwrite_initial_state` must be off.

        state_checkpoints, as the forward wrote them for `checkpoint_every_n_tokens`, save computing the
        states again. Without d_final_state the final state has no gradient. Everything else: see the class.
        """
        return _backward(
            self,
            "gdn_bwd",
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, "dO": dO,
                "state_checkpoints": state_checkpoints, "initial_state": initial_state,
                "d_final_state": d_final_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "scale": scale, "use_qk_l2norm": use_qk_l2norm,
                "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "use_beta_sigmoid": use_beta_sigmoid,
                "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
                "batch_invariant": batch_invariant, "overwrite_initial_state": overwrite_initial_state,
                "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def kda_bwd(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        cu_seqlens: Any,
        dO: Any,
        state_checkpoints: Any = None,
        initial_state: Any = None,
        d_final_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        gate_lower_bound: float | None = None,
        max_seqlen: int | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of `kda`; returns [dQ, dK, dV, dG, dBeta, d_initial_state, d_a_log, d_dt_bias].

        See `gdn_bwd`; dG [T, HO, K] and d_dt_bias [HO, K] have the channels of the gate.
        """
        return _backward(
            self,
            "kda_bwd",
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, "dO": dO,
                "state_checkpoints": state_checkpoints, "initial_state": initial_state,
                "d_final_state": d_final_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "scale": scale, "use_qk_l2norm": use_qk_l2norm,
                "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "use_beta_sigmoid": use_beta_sigmoid,
                "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
                "batch_invariant": batch_invariant, "overwrite_initial_state": overwrite_initial_state,
                "gate_lower_bound": gate_lower_bound, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip

    @graph_op
    def gdn2_bwd(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        w: Any,
        cu_seqlens: Any,
        dO: Any,
        state_checkpoints: Any = None,
        initial_state: Any = None,
        d_final_state: Any = None,
        a_log: Any = None,
        dt_bias: Any = None,
        *,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
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
        out_dims: Any = None,
    ) -> list[Tensor | None]:
        """Gradients of `gdn2`; returns [dQ, dK, dV, dG, dBeta, dW, d_initial_state, d_a_log, d_dt_bias].

        See `gdn_bwd`; dG and dBeta [T, HO, K], dW [T, HO, V], d_dt_bias [HO, K].
        """
        return _backward(
            self,
            "gdn2_bwd",
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "w": w, "cu_seqlens": cu_seqlens, "dO": dO,
                "state_checkpoints": state_checkpoints, "initial_state": initial_state,
                "d_final_state": d_final_state, "a_log": a_log, "dt_bias": dt_bias,
            },
            {
                "scale": scale, "use_qk_l2norm": use_qk_l2norm,
                "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "use_beta_sigmoid": use_beta_sigmoid,
                "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
                "batch_invariant": batch_invariant, "overwrite_initial_state": overwrite_initial_state,
                "gate_lower_bound": gate_lower_bound, "beta_guard": beta_guard, "max_seqlen": max_seqlen,
            },
            name,
            compute_data_type,
            out_dims,
        )  # fmt: skip


def attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as a node keeps them: numbers of Python's own, flags as bool."""
    params: dict[str, Any] = {}
    for key, value in given.items():
        if key in ("scale", "gate_lower_bound"):
            params[key] = None if value is None else float(value)
        elif key in ("max_seqlen", "checkpoint_every_n_tokens"):
            params[key] = None if value is None else index(value)
        else:
            params[key] = value if key == "gate_domain" else bool(value)
    return params


def _forward(
    graph: GraphOps,
    op: str,
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
    name: str,
    compute_data_type: Any,
    out_dims: Any,
) -> list[Tensor | None]:
    params = attributes(given)
    outputs = ["O"]
    if params["output_final_state"]:
        outputs.append("final_state")
    if params["checkpoint_every_n_tokens"]:
        outputs.append("state_checkpoints")
    made = graph._add_node(
        op,
        inputs=inputs,
        outputs=outputs,
        params=params,
        name=name,
        compute_data_type=compute_data_type,
        out_dims=out_dims,
    )
    return [made.get(port) for port in ("O", "final_state", "state_checkpoints")]


def _backward(
    graph: GraphOps,
    op: str,
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
    name: str,
    compute_data_type: Any,
    out_dims: Any,
) -> list[Tensor | None]:
    always = ["dQ", "dK", "dV", "dG", "dBeta", *(["dW"] if "w" in inputs else [])]
    optional = {"d_initial_state": "initial_state", "d_a_log": "a_log", "d_dt_bias": "dt_bias"}
    made = graph._add_node(
        op,
        inputs=inputs,
        outputs=[*always, *(port for port, source in optional.items() if inputs[source] is not None)],
        params=attributes(given),
        name=name,
        compute_data_type=compute_data_type,
        out_dims=out_dims,
    )
    return [made.get(port) for port in (*always, *optional)]


_NODE_TYPES = {
    "gdn": (NodeType.GDN, NodeType.GDN_BACKWARD),
    "gdn2": (NodeType.GDN2, NodeType.GDN2_BACKWARD),
    "kda": (NodeType.KDA, NodeType.KDA_BACKWARD),
}

OPS = tuple(
    OpDef(
        variant.name + suffix,
        _NODE_TYPES[variant.name][role == BACKWARD],
        inference(variant, role),
        reference,
        optional_outputs=optional,
        check=check_contents,
    )
    for variant in VARIANTS
    for role, suffix, reference, optional in (
        (
            FORWARD,
            "",
            deferred("linear_attention_reference", "forward_reference"),
            ("O", "final_state", "state_checkpoints"),
        ),
        (
            BACKWARD,
            "_bwd",
            deferred("linear_attention_reference", "backward_reference"),
            ("dQ", "dK", "dV", "dG", "dBeta", "dW", "d_initial_state", "d_a_log", "d_dt_bias"),
        ),
    )
)
