"""The hyperparameters of a Gaussian process, by its marginal likelihood: scikit-learn's objective, evaluated faster.

scikit-learn stores an (N, N, D) tensor for the gradient by the D length scales. Written with matrix products, the
gradient needs (N, N) alone, so a thousand rows take a fraction of a second per step.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from benchmarks.tables.data import Array

# Bounds of the variance, the length scales and the variance of the noise, for standardised columns and targets.
VARIANCE, LENGTH, NOISE = (1e-3, 1e4), (1e-2, 1e4), (1e-6, 10.0)
START_NOISE = 0.1


def log_marginal_likelihood(theta: Array, x: Array, y: Array) -> tuple[float, Array]:
    """Return log p(y | x, theta) and its gradient.

    The kernel is v exp(-sum_d (x_d - x'_d)^2 / 2 l_d^2) + s 1{same row}, and theta = log (v, l_1, ..., l_D, s).
    """
    variance, lengths, noise = math.exp(theta[0]), np.exp(theta[1:-1]), math.exp(theta[-1])
    scaled = x / lengths
    smooth = variance * np.exp(-0.5 * cdist(scaled, scaled, "sqeuclidean"))
    factor = cho_factor(smooth + noise * np.eye(len(x)), lower=True)
    weights = cho_solve(factor, y)
    value = -0.5 * y @ weights - np.log(np.diag(factor[0])).sum() - 0.5 * len(x) * math.log(2 * math.pi)
    outer = np.outer(weights, weights) - cho_solve(factor, np.eye(len(x)))
    product = outer * smooth
    # sum_ij P_ij (x_id - x_jd)^2 = 2 sum_i (P 1)_i x_id^2 - 2 x_d^T P x_d, for symmetric P.
    spread = 2 * product.sum(1) @ scaled**2 - 2 * np.einsum("id,id->d", scaled, product @ scaled)
    gradient = [0.5 * product.sum(), *(0.5 * spread), 0.5 * noise * np.trace(outer)]
    return float(value), np.array(gradient)


def tune(x: Array, y: Array, steps: int) -> tuple[float, Array, float]:
    """Return variance, length scales and noise variance after at most `steps` steps of L-BFGS-B."""

    def objective(theta: Array) -> tuple[float, Array]:
        try:
            value, gradient = log_marginal_likelihood(theta, x, y)
        except np.linalg.LinAlgError:  # not positive definite in floating point: as bad as can be
            return 1e25, np.zeros_like(theta)
        return -value, -gradient

    bounds = np.log([VARIANCE, *[LENGTH] * x.shape[1], NOISE])
    start = np.array([0.0, *np.zeros(x.shape[1]), math.log(START_NOISE)])
    found = minimize(objective, start, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": steps}).x
    return math.exp(found[0]), np.exp(found[1:-1]), math.exp(found[-1])
