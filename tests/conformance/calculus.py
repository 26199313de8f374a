"""Derivatives for the truth of backward operators: torch autograd in float64, or central differences with
NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["STEP", "slope", "vjp"]

STEP = 6e-6  # the cube root of float64's epsilon: truncation and rounding errors balance, both below 1e-9


def slope(xp: Any, function: Callable[[Any], Any], x: Any) -> Any:
    """f'(x) of a function that acts on each element by itself."""
    if xp is np:
        step = STEP * np.maximum(1, np.abs(x))
        above, below = x + step, x - step
        return (function(above) - function(below)) / (above - below)
    leaf = x.detach().clone().requires_grad_(True)
    function(leaf).sum().backward()
    return leaf.grad


def vjp(
    xp: Any,
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    inputs: Mapping[str, Any],
    cotangents: Mapping[str, Any],
    wanted: tuple[str, ...],
) -> dict[str, Any]:
    """d/d(input) of sum(cotangent * output), for the wanted inputs; outputs without a cotangent do not
    count."""
    if xp is np:
        return {name: _differences(function, inputs, cotangents, name) for name in wanted}
    leaves = {
        name: value.detach().clone().requires_grad_(True) if name in wanted else value
        for name, value in inputs.items()
    }
    outputs = function(leaves)
    sum((outputs[name] * cotangent).sum() for name, cotangent in cotangents.items()).backward()
    return {
        name: leaves[name].grad if leaves[name].grad is not None else xp.zeros_like(leaves[name])
        for name in wanted
    }


def _differences(function: Any, inputs: Mapping[str, Any], cotangents: Mapping[str, Any], name: str) -> Any:
    def objective(x: Any) -> float:
        outputs = function({**inputs, name: x})
        return float(sum((outputs[key] * cotangent).sum() for key, cotangent in cotangents.items()))

    x = inputs[name]
    gradient = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        step = STEP * max(1, abs(x[place]))
        moved = x.copy()
        moved[place] = x[place] + step
        above = objective(moved)
        moved[place] = x[place] - step
        gradient[place] = (above - objective(moved)) / (2 * step)
    return gradient
