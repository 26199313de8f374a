"""Fits the polynomials of erf_one in vector.cpp and prints them with the errors they reach in float32.

|x| < 1:  erf(x) = x P(x^2);  1 <= |x| < 4: erf(x) = sign(x) (1 - exp(-|x| Q(|x|))). Weighted least squares on Chebyshev
nodes in float64. Needs NumPy only (erf by math.erf). Run: python native/vector/fit_erf.py
"""

from __future__ import annotations

import math

import numpy as np


def chebyshev_nodes(low: float, high: float, n: int) -> np.ndarray:
    k = np.arange(n)
    return 0.5 * (low + high) + 0.5 * (high - low) * np.cos((2 * k + 1) * math.pi / (2 * n))


def fit(x: np.ndarray, y: np.ndarray, degree: int, weight: np.ndarray, rounds: int = 40) -> np.ndarray:
    """Lawson's reweighting: a least-squares fit that approaches the one of smallest weighted maximum error."""
    basis = np.vander(x, degree + 1)
    lawson = np.ones_like(x)
    for _ in range(rounds):
        w = np.sqrt(lawson) * weight
        coefficients = np.linalg.lstsq(basis * w[:, None], y * w, rcond=None)[0]
        error = np.abs((basis @ coefficients - y) * weight)
        lawson *= error / error.max() + 1e-6
        lawson /= lawson.sum()
    return coefficients


def horner32(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
    p = np.full_like(x, np.float32(coefficients[0]))
    for c in coefficients[1:]:
        p = p * x + np.float32(c)
    return p


def main() -> None:
    x = chebyshev_nodes(1e-4, 1.0, 2000)
    erf = np.array([math.erf(v) for v in x])
    small = fit(x * x, erf / x, 6, np.ones_like(x))
    b = chebyshev_nodes(0.95, 4.0, 4000)
    erfc = np.array([math.erfc(v) for v in b])
    big = fit(b, -np.log(erfc) / b, 8, b * erfc)
    for name, coefficients in (("P", small), ("Q", big)):
        print(name, ", ".join(f"{c:.9e}f" for c in coefficients))
    grid = np.linspace(-6, 6, 200001).astype(np.float32)
    a = np.abs(grid)
    clipped = np.minimum(a, np.float32(4))
    got = np.where(
        a < 1,
        grid * horner32(small, a * a),
        np.copysign(np.float32(1) - np.exp(-horner32(big, clipped) * clipped), grid),
    )
    want = np.array([math.erf(float(v)) for v in grid])
    print(
        "max absolute error",
        np.abs(got - want).max(),
        "max ulp",
        (np.abs(got - want) / np.spacing(np.abs(want.astype(np.float32)))).max(),
    )


if __name__ == "__main__":
    main()
