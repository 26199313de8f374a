"""Cases of the rotary embedding and its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.calculus import vjp
from conformance.layouts import padded
from conformance.problem import Expect, Input, Problem
from opgraph import data_type

__all__ = ["CASES"]

Rng = np.random.Generator

# (id, dims [B, H, S, D], dims of the angles, output_scale, rope_dim, strides)
_SHAPES: tuple[tuple[str, Sequence[int], Sequence[int], float, int, Sequence[int] | None], ...] = (
    ("all channels", [2, 3, 5, 8], [5, 8], 1.0, 0, None),
    ("some channels", [1, 2, 7, 12], [7, 8], 1.0, 8, None),
    ("scaled", [1, 2, 3, 4], [3, 4], 0.25, 0, None),
    ("smallest", [1, 1, 1, 2], [1, 2], 1.0, 0, None),
    ("no rows", [1, 2, 0, 4], [0, 4], 1.0, 0, None),
    ("four axes of angles", [2, 2, 3, 4], [1, 1, 3, 4], 1.0, 0, None),
    ("angles of each entry", [2, 2, 3, 4], [2, 1, 3, 4], 1.0, 0, None),
    ("BSHD", [2, 3, 5, 8], [5, 8], 1.0, 0, (120, 8, 24, 1)),
    ("padded rows", [2, 3, 5, 8], [5, 8], 1.0, 0, padded([2, 3, 5, 8])),
    ("tile edge above", [1, 1, 129, 6], [129, 6], 1.0, 0, None),
    ("positions in front", [2, 3, 5, 8], [5, 1, 1, 8], 1.0, 0, None),
    ("as many positions as entries", [5, 2, 5, 4], [5, 1, 1, 4], 1.0, 0, None),
    ("one position of each entry", [3, 2, 1, 4], [3, 1, 1, 4], 1.0, 0, None),
    ("angles of each head", [2, 3, 4, 4], [3, 4, 4], 1.0, 0, None),
    ("all angles", [2, 3, 4, 2], [2, 3, 4, 2], 1.0, 0, None),
    ("primes", [3, 5, 7, 26], [7, 22], 1.0, 22, None),
    ("some channels, scaled", [2, 1, 3, 6], [3, 4], -2.0, 4, None),
    ("no entries", [0, 2, 3, 4], [3, 4], 1.0, 0, None),
    ("no channels", [1, 2, 3, 0], [3, 0], 1.0, 0, None),
)


def rotated(xp: Any, x: Any, angles: Any, scale: float, rope_dim: int) -> Any:
    """Pairs (d, d + R/2) turned as complex numbers."""
    count = rope_dim or x.shape[-1]
    half = count // 2
    if angles.ndim == 4 and angles.shape[1:3] == (1, 1) and x.shape[2] > 1:
        angles = angles.reshape(x.shape[2], -1)  # [S, 1, 1, R]
    a = angles[..., :half]
    turn = xp.cos(a) + 1j * xp.sin(a)
    pairs = (x[..., :half] + 1j * x[..., half:count]) * turn
    join = np.concatenate if xp is np else xp.cat
    return scale * join([pairs.real, pairs.imag, x[..., count:]], -1)


class Rope:
    data_types = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE)

    def __init__(self, op: str) -> None:
        self.op = self.id = op
        self.port = "input" if op == "rope" else "dY"

    def problem(
        self, id: str, rng: Rng, dim: Sequence[int], angles: Sequence[int], scale: float, rope_dim: int,
        stride: Sequence[int] | None, dtype: data_type, *, halved: bool = False, out_stride: Any = None,
    ) -> Problem:  # fmt: skip
        """`halved`: one angle for each pair, in place of one for each channel."""
        half = rng.uniform(-4, 4, (*angles[:-1], angles[-1] // 2))
        math = data_type.DOUBLE if dtype is data_type.DOUBLE else data_type.FLOAT
        inputs = {
            self.port: Input(rng.standard_normal(dim), dtype, stride),
            # Equal in both halves: a rotation.
            "freqs": Input(half if halved else np.concatenate([half, half], -1), math),
        }

        def declare(graph: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            attributes = {"output_scale": scale, "rope_dim": rope_dim}
            y = getattr(graph, self.op)(**tensors, **attributes)
            return {"OUT": y if out_stride is None else y.set_stride(out_stride)}

        def truth(xp: Any, values: Mapping[str, Any]) -> dict[str, Any]:
            x, freqs = values[self.port], values["freqs"]
            if self.op == "rope":
                return {"OUT": rotated(xp, x, freqs, scale, rope_dim)}

            def formula(at: Mapping[str, Any]) -> dict[str, Any]:
                return {"Y": rotated(xp, at["x"], freqs, scale, rope_dim)}

            return {"OUT": vjp(xp, formula, {"x": x * 0}, {"Y": x}, ("x",))["x"]}

        return Problem(
            f"{self.op} {dtype.name}: {id}", inputs, declare, truth,
            {"OUT": Expect(dim, out_stride or inputs[self.port].stride, dtype)},
            io=dtype, intermediate=math, compute=math,
            needs_torch=self.op != "rope" and (int(np.prod(dim)) > 200 or dtype is data_type.DOUBLE),
        )  # fmt: skip

    def problems(self, dtype: data_type, rng: Rng) -> Iterator[Problem]:
        # FLOAT finds what is wrong with sizes; the others take every other one.
        for id, dim, angles, scale, rope_dim, stride in _SHAPES[:: 1 if dtype is data_type.FLOAT else 2]:
            yield self.problem(id, rng, dim, angles, scale, rope_dim, stride, dtype)
        plain = ([1, 2, 3, 4], [3, 4], 1.0, 0, None, dtype)
        yield self.problem("virtual", rng, *plain).with_virtual_edges()
        yield self.problem("padded output", rng, *plain, out_stride=padded([1, 2, 3, 4]))
        yield self.problem("BSHD output", rng, *plain, out_stride=(24, 4, 8, 1))
        yield self.problem("one angle for each pair", rng, *plain, halved=True)
        some = ([2, 3, 5, 8], [5, 1, 1, 6], 1.0, 6, None, dtype)
        yield self.problem("one angle for each pair of some channels", rng, *some, halved=True)


CASES = (Rope("rope"), Rope("rope_backward"))
