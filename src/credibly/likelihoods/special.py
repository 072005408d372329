"""CDFs that torch lacks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def student_t_cdf(z: Tensor, df: float) -> Tensor:
    """Return P(t <= z) for a standard Student-t variable, elementwise, computed in float64.

    P(|t| > |z|) = I_x(df/2, 1/2) at x = df / (df + z^2), the regularised incomplete beta function.
    """
    double = z.to(torch.float64)
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + double**2), double**2 / (df + double**2))
    return torch.where(double > 0, 1 - tail, tail).to(z.dtype)


def _incomplete_beta(a: float, b: float, x: Tensor, one_minus_x: Tensor) -> Tensor:
    """Return I_x(a, b) by the continued fraction of I_x or of 1 - I_(1-x), whichever converges faster.

    1 - x is passed separately for accuracy.
    """
    flip = x > (a + 1) / (a + b + 2)
    direct = _beta_fraction(a, b, torch.where(flip, 0.5, x), torch.where(flip, 0.5, one_minus_x))
    mirrored = 1 - _beta_fraction(b, a, torch.where(flip, one_minus_x, 0.5), torch.where(flip, x, 0.5))
    return torch.where(flip, mirrored, direct)


def _beta_fraction(a: float, b: float, x: Tensor, one_minus_x: Tensor, terms: int = 200) -> Tensor:
    # Modified Lentz algorithm: evaluated from the front; factors approach 1 as it converges.
    tiny = 1e-300
    log_front = a * torch.log(x.clamp_min(tiny)) + b * torch.log(one_minus_x.clamp_min(tiny))
    front = torch.exp(log_front - (math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))) / a
    c = torch.ones_like(x)
    d = 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d.clone()
    for m in range(1, terms):
        for step in (
            m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + step * x * d, tiny)
            c = _away_from_zero(1 + step * x / c, tiny)
            factor = c * d
            fraction = fraction * factor
        if bool(((factor - 1).abs() < 1e-15).all()):
            break
    return front * fraction


def _away_from_zero(value: Tensor, tiny: float) -> Tensor:
    return torch.where(value.abs() < tiny, tiny, value)
