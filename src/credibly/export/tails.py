"""CDFs of standardised noise in operations that every ONNX runtime has, in float64.

The tail probability of |z| is an explicit factor times a smooth function of a variable t in [0, 1], which is a
Chebyshev series computed here from scipy's functions:

    normal       P(Z > z) = exp(-z^2 / 2) t g(t) / 2,   t = 1 / (1 + z / sqrt(8)),   g(t) = erfcx(z / sqrt(2)) / t
    Student-t    P(T > z) = w^(df/2) h(t) / 2,          t = z / sqrt(df + z^2),      w = 1 - t^2 = df / (df + z^2)

Relative errors are below 1e-9 far into the tails, where 1 - P or a float32 `Erf` would have no digits left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.likelihoods.continuous import LocationScale, StudentNoise
from credibly.predictive.transformed import TORCH, Normal

Array = npt.NDArray[Any]
CDF = Callable[[Tensor], Tensor]
Series = tuple[float, ...]

# Largest relative error of a series against scipy, which itself rounds to 1e-10 near t = 0, and its largest degree.
ACCURACY = 1e-9
DEGREE = 80


def standard_cdf(likelihood: LocationScale) -> CDF | None:
    """Return the CDF of a likelihood's standardised noise for float64 tensors; None if it is not known."""
    own = type(likelihood).standard_cdf
    # The coefficients are found here: what is traced must not call scipy.
    if own is LocationScale.standard_cdf:
        series = _normal_series()
        return None if series is None else partial(_normal_cdf, series=series)
    if own is StudentNoise.standard_cdf and isinstance(likelihood, StudentNoise):
        series = _student_series(float(likelihood.df))
        return None if series is None else partial(_student_cdf, df=float(likelihood.df), series=series)
    return None


def standard_quantile(likelihood: LocationScale, level: float) -> float:
    """Return the quantile of the standardised noise of a likelihood that `standard_cdf` knows."""
    from scipy.special import ndtri, stdtrit

    return float(stdtrit(likelihood.df, level) if isinstance(likelihood, StudentNoise) else ndtri(level))


def graph_normal() -> Normal:
    """Return the normal CDF and its logarithm by the series; by torch, which ONNX lacks, if it does not converge."""
    series = _normal_series()
    if series is None:
        return TORCH
    return Normal(partial(_normal_cdf, series=series), partial(_log_normal_cdf, series=series))


def _normal_cdf(z: Tensor, series: Series) -> Tensor:
    size = z.abs()
    t = 1 / (1 + size * (1 / math.sqrt(8)))
    return _from_tail(z, 0.5 * torch.exp(-0.5 * size * size) * t * _chebyshev(t, series))


def _log_normal_cdf(z: Tensor, series: Series) -> Tensor:
    size = z.abs()
    t = 1 / (1 + size * (1 / math.sqrt(8)))
    log_tail = torch.log(0.5 * t * _chebyshev(t, series)) - 0.5 * size * size
    # log(1 - P), where 1 - P is rounded to 1 below 1e-16.
    return torch.where(z < 0, log_tail, torch.log(1 - torch.exp(log_tail)))


def _student_cdf(z: Tensor, df: float, series: Series) -> Tensor:
    square = z * z
    t = z.abs() / torch.sqrt(df + square)
    weight = torch.exp(0.5 * df * (math.log(df) - torch.log(df + square)))
    return _from_tail(z, 0.5 * weight * _chebyshev(t, series))


def _from_tail(z: Tensor, tail: Tensor) -> Tensor:
    return torch.where(z < 0, tail, 1 - tail)


@cache
def _normal_series() -> Series | None:
    from scipy.special import erfcx

    # x = z / sqrt(2), so that t = 1 / (1 + x / 2).
    return _fitted(lambda t: erfcx(2 * (1 - t) / t) / t)


@cache
def _student_series(df: float) -> Series | None:
    from scipy.special import beta, hyp2f1

    half = df / 2
    return _fitted(lambda t: hyp2f1(half, 0.5, half + 1, 1 - t * t) / (half * beta(half, 0.5)))


def _fitted(function: Callable[[Array], Array]) -> Series | None:
    """Return Chebyshev coefficients of a function of t in (0, 1); None if they do not converge."""
    chebyshev = np.polynomial.chebyshev
    grid = np.linspace(1e-6, 1, 1001)
    exact = function(grid)
    for degree in range(16, DEGREE + 1, 8):
        # Chebyshev points of the first kind.
        points = np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
        found = chebyshev.chebfit(points, function(0.5 * (points + 1)), degree)
        if np.all(np.abs(chebyshev.chebval(2 * grid - 1, found) / exact - 1) < ACCURACY):
            return tuple(found.tolist())
    return None


def _chebyshev(t: Tensor, coefficients: Series) -> Tensor:
    """Return the series at t in [0, 1] by Clenshaw's recurrence."""
    twice = 4 * t - 2
    after, here = torch.zeros_like(t), torch.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        after, here = here, twice * here - after + coefficient
    return 0.5 * twice * here - after + coefficients[0]
