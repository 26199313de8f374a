"""Cases of gated linear attention: `gdn`, `gdn2`, `kda`, their `_bwd`, `_summary` and `_summary_bwd`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance import linear_attention_truth as truths
from conformance.layouts import row_major
from conformance.problem import Expect, Input, Problem
from conformance.tolerances import linear_attention as tolerance
from opgraph import data_type

__all__ = ["CASES", "LinearAttention", "operands"]

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
FLOAT = data_type.FLOAT


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def operands(
    variant: str,
    rng: Rng,
    lengths: Sequence[int],
    heads: tuple[int, int],
    channels: int,
    width: int,
    *,
    heads_k: int | None = None,
    strength: float = 1.0,
    correlated: bool = False,
) -> dict[str, Array]:
    """q, k [T, H, K] of length 1, v, g <= 0, beta (and w) in (0, 1) and cu_seqlens; `heads` are those of q and v."""
    tokens, out = sum(lengths), max(heads)
    keys = rng.standard_normal((tokens, heads_k or heads[0], channels))
    if correlated:
        keys = rng.standard_normal(channels) + 0.1 * keys
    gate = (tokens, out) if variant == "gdn" else (tokens, out, channels)
    found = {
        "q": unit(rng.standard_normal((tokens, heads[0], channels))),
        "k": unit(keys),
        "v": rng.standard_normal((tokens, heads[1], width)),
        "g": -strength * np.logaddexp(0, rng.standard_normal(gate) - 2),
        "beta": rng.uniform(0.9 if correlated else 0.05, 1, gate if variant == "gdn2" else gate[:2]),
        "cu_seqlens": np.cumsum([0, *lengths]),
    }
    if variant == "gdn2":
        found["w"] = rng.uniform(0.05, 1, (tokens, out, width))
    return found


class LinearAttention:
    """One operator of the family with its options."""

    data_types = (FLOAT, data_type.HALF, data_type.BFLOAT16)

    def __init__(self, variant: str, suffix: str) -> None:
        self.variant, self.suffix = variant, suffix
        self.op = self.id = variant + suffix

    def problem(
        self,
        id: str,
        rng: Rng,
        dtype: data_type,
        lengths: Sequence[int] = (3, 1),
        heads: tuple[int, int] = (1, 1),
        channels: int = 2,
        width: int = 3,
        *,
        heads_k: int | None = None,
        state: bool = True,
        final: bool = True,
        parameters: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        strength: float = 1.0,
        correlated: bool = False,
        checkpoints: bool = False,
        pool: Sequence[int] | None = None,
        packed: bool = False,
        lengths_type: data_type = data_type.INT32,
        gate_type: data_type = FLOAT,
        state_type: data_type = FLOAT,
        needs_torch: bool = False,
    ) -> Problem:
        """`final`: final_state (or its gradient) too; `parameters`: of a_log and dt_bias; `pool`: the rows of the
        sequences; `packed`: q, k and v are slices of one tensor [T, heads, channels] with heads of one width."""
        options = dict(options or {})
        values = operands(
            self.variant, rng, lengths, heads, channels, width,
            heads_k=heads_k, strength=strength, correlated=correlated,
        )  # fmt: skip
        out = max(heads)
        self._apply(options, values, rng)
        if "a_log" in parameters:
            values["a_log"] = 0.3 * rng.standard_normal(out)
        if "dt_bias" in parameters:
            values["dt_bias"] = 0.3 * rng.standard_normal(values["g"].shape[1:])
        states = (len(lengths), out, width, channels)
        every = options.get("checkpoint_every_n_tokens", 0)
        if self.suffix == "_bwd" and checkpoints:
            rows = (max(sum(lengths) // every + len(lengths), 1), *states[1:])
            values["state_checkpoints"] = np.zeros(rows)  # filled in below, from the rounded operands
        if state and self.suffix != "_summary_bwd":
            values["initial_state"] = 0.3 * rng.standard_normal(states)
        if pool is not None:
            values["state_indices"] = np.array(pool)
        if self.suffix in ("_bwd", "_summary_bwd"):
            values["dO"] = rng.standard_normal((sum(lengths), out, width))
            if final:
                values["d_final_state"] = rng.standard_normal(states)
        taken = self._ports(values)
        types = {
            "cu_seqlens": lengths_type, "state_indices": data_type.INT32, "g": gate_type, "a_log": FLOAT,
            "dt_bias": FLOAT, "initial_state": state_type, "d_final_state": state_type, "state_checkpoints": FLOAT,
            "beta": dtype if self.variant == "gdn2" else FLOAT,
        }  # fmt: skip
        inputs = {
            port: Input(
                values[port],
                types.get(port, dtype),
                _slice_of_packed(values[port].shape) if packed and port in ("q", "k", "v") else None,
                virtual_ok=port not in ("cu_seqlens", "state_indices"),
            )
            for port in taken
        }
        if "state_checkpoints" in inputs:
            exact = {port: given.values.astype(np.float64) for port, given in inputs.items()}
            exact["cu_seqlens"] = values["cu_seqlens"]
            found = truths.forward(np, exact, options)["state_checkpoints"]
            inputs["state_checkpoints"] = Input(found, FLOAT)
        expect = self._expect(inputs, states, every, dtype, options, final)
        for port, rules in expect.items():
            rules.frobenius = tolerance(
                port, dtype, neg_eigval=bool(options.get("allow_neg_eigval")), correlated=correlated
            )
        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, self._declare(options, final, expect),
            self._truth(options, expect), expect, io=dtype, needs_torch=needs_torch,
        )  # fmt: skip

    def _apply(self, options: Mapping[str, Any], values: dict[str, Array], rng: Rng) -> None:
        """Makes the operands fit the options."""
        if options.get("gate_domain") == "linear":
            values["g"] = np.exp(values["g"])
        if options.get("safe_gate"):
            values["g"] = rng.standard_normal(values["g"].shape)
        if options.get("use_beta_sigmoid"):
            values["beta"] = rng.standard_normal(values["beta"].shape)
        if options.get("use_qk_l2norm"):
            values["q"], values["k"] = 3 * values["q"], 0.5 * values["k"]

    def _ports(self, values: Mapping[str, Array]) -> list[str]:
        absent = {"_summary": ("q",), "_summary_bwd": ("v", "w")}.get(self.suffix, ())
        return [port for port in values if port not in absent]

    def _expect(
        self,
        inputs: Mapping[str, Input],
        states: tuple[int, ...],
        every: int,
        dtype: data_type,
        options: Mapping[str, Any],
        final: bool,
    ) -> dict[str, Expect]:
        sequences, out, width, channels = states
        tokens = inputs["k"].dim[0]
        kept = next((inputs[p].dtype for p in ("initial_state", "d_final_state") if p in inputs), FLOAT)

        def dense(dim: Sequence[int], dtype: data_type) -> Expect:
            return Expect(dim, row_major(dim), dtype)

        if self.suffix == "_bwd":
            order = truths.GRADIENT_OF.items()
            return {port: dense(inputs[src].dim, inputs[src].dtype) for port, src in order if src in inputs}
        if self.suffix == "":
            found = {"O": dense((tokens, out, width), dtype)}
            if final:
                found["final_state"] = dense(states, kept)
            if every:
                found["state_checkpoints"] = dense((max(tokens // every + sequences, 1), *states[1:]), dtype)
            return found
        found = {"final_state" if self.suffix == "_summary" else "d_initial_state": dense(states, kept)}
        if options.get("output_transition"):
            found["transition"] = dense((sequences, out, channels, channels), kept)
        return found

    def _declare(self, options: Mapping[str, Any], final: bool, expect: Mapping[str, Expect]) -> Any:
        forward = {"output_final_state": True} if self.suffix == "" and final else {}

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            results = getattr(graph, self.op)(**tensors, **options, **forward)
            found = {tensor.name.rpartition("::")[2]: tensor for tensor in results if tensor is not None}
            assert list(found) == [port for port in _ORDER if port in expect], f"{self.op}: outputs {list(found)}"
            return found

        return declare

    def _truth(self, options: Mapping[str, Any], expect: Mapping[str, Expect]) -> Any:
        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            if self.suffix == "_bwd":
                return truths.backward(xp, values, options, list(expect))
            solve = {"": truths.forward, "_summary": truths.summary, "_summary_bwd": truths.summary_backward}
            found = solve[self.suffix](xp, values, options)
            return {port: found[port] for port in expect}

        return truth

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        def problem(id: str, *args: Any, **kwargs: Any) -> Problem:
            return self.problem(id, rng, dtype, *args, **kwargs)

        yield problem("plain")
        yield problem("wide", [63, 64, 65, 0, 1], (1, 2), 64, 128, needs_torch=True)
        if dtype is data_type.HALF:
            return  # every option runs with a narrower and with a wider type
        yield problem("one token", [1])
        yield problem("no state, no final state", state=False, final=False)
        yield problem("empty sequences", [0, 0, 2, 0, 0, 3, 0])
        yield problem("empty sequences alone", [0, 0])
        yield problem("64-bit boundaries", lengths_type=data_type.INT64)
        yield problem("gate of the io type", gate_type=dtype)
        yield problem("states of the io type", state_type=dtype)
        yield problem("virtual", [2, 1], (1, 2)).with_virtual_edges()
        for heads, heads_k in (((1, 2), 1), ((1, 2), 2), ((2, 1), 2), ((2, 1), 1), ((4, 4), 4)):
            yield problem(f"heads {heads}, k {heads_k}", [2], heads, heads_k=heads_k)
        yield problem("heads 1 to 8", [2, 3], (1, 8), 4, 4, needs_torch=True)
        yield problem("norm", options={"use_qk_l2norm": True})
        yield problem("sigmoid", options={"use_beta_sigmoid": True})
        yield problem("negative eigenvalues", options={"use_beta_sigmoid": True, "allow_neg_eigval": True})
        yield problem("linear gate", options={"gate_domain": "linear"})
        for parameters in ((), ("a_log",), ("dt_bias",), ("a_log", "dt_bias")):
            options = {"safe_gate": True}
            yield problem(
                f"safe gate, {' '.join(parameters) or 'no parameters'}", options=options, parameters=parameters
            )
        if self.variant != "gdn":
            options = {"safe_gate": True, "gate_lower_bound": -2.0}
            yield problem("lower bound", options=options, parameters=["a_log"])
        yield from self._special_problems(problem)
        yield problem("chunk edges", [1, 15, 16, 17, 63, 64, 65], (2, 2), 8, 12, needs_torch=True)
        yield problem("strong decay", [130], (1, 2), 8, 12, strength=5.0, needs_torch=True)
        yield problem("correlated keys", [150], (1, 1), 16, 8, correlated=True, needs_torch=True)
        yield problem("slices of one tensor", [33, 40], (2, 2), 16, 16, packed=True, needs_torch=True)

    def _special_problems(self, problem: Any) -> Iterator[Problem]:
        """What only some of the operators have."""
        if self.suffix in ("", "_bwd"):
            invariant = {"batch_invariant": True, "scale": 0.7}
            yield problem("scale, batch invariant", options=invariant)
            # Lengths that fill all rows there are for checkpoints.
            for every, lengths in ((2, [3, 1]), (16, [17, 1]), (64, [65, 66]), (96, [100, 20])):
                yield problem(
                    f"checkpoints every {every}", lengths, options={"checkpoint_every_n_tokens": every},
                    checkpoints=True, needs_torch=sum(lengths) > 4,
                )  # fmt: skip
        if self.suffix == "":
            yield problem("one token each", [1] * 7, (2, 2), 4, 6, options={"max_seqlen": 1})
            yield problem("pool", [3, 0, 1], pool=[2, 0, 1])
        if self.suffix in ("_summary", "_summary_bwd"):
            yield problem("transition", [3, 0, 2], (2, 2), options={"output_transition": True})
            yield problem(
                "long transition", [70, 9], (1, 2), 8, 6, options={"output_transition": True}, needs_torch=True
            )


# In which the methods return their outputs.
_ORDER = (
    "O", "dQ", "dK", "dV", "dG", "dBeta", "dW", "final_state", "d_initial_state", "state_checkpoints", "d_a_log",
    "d_dt_bias", "transition",
)  # fmt: skip


def _slice_of_packed(dim: Sequence[int]) -> tuple[int, ...]:
    """Strides of one third of a packed [T, 3, H, D]."""
    _, heads, channels = dim
    return (3 * heads * channels, channels, 1)


CASES = tuple(
    LinearAttention(variant, suffix)
    for variant in ("gdn", "gdn2", "kda")
    for suffix in ("", "_bwd", "_summary", "_summary_bwd")
)
