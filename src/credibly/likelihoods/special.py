"""CDFs that torch lacks, and sums over counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Shape = float | Tensor

SUMMED = 128  # counts whose entropy is summed term by term
NODES = 192  # nodes of the integral over larger counts
# Degrees of freedom with a polynomial CDF, and the tail probability below which that loses accuracy.
POLYNOMIAL, FAR = (2.0, 4.0, 6.0, 8.0, 10.0), 1e-5


def student_t_cdf(z: Tensor, df: float) -> Tensor:
    """Return P(t <= z) for a standard Student-t variable, elementwise, computed in float64.

    P(|t| > |z|) = I_x(df/2, 1/2) at x = df / (df + z^2), the regularised incomplete beta function. For a small even df
    it is a polynomial in z / sqrt(df + z^2), except in the far tails, where that has no digits left.
    """
    # Beyond the ends the square would overflow.
    double = z.to(torch.float64).clamp(-1e150, 1e150)
    if df not in POLYNOMIAL:
        tail = _student_t_tail(double, df)
    else:
        tail = _even_student_t_tail(double, df)
        far = tail < FAR
        tail[far] = _student_t_tail(double[far], df)
    return torch.where(double > 0, 1 - tail, tail).to(z.dtype)


def _student_t_tail(z: Tensor, df: float) -> Tensor:
    return 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + z**2), z**2 / (df + z**2))


def _even_student_t_tail(z: Tensor, df: float) -> Tensor:
    """Return P(t > |z|) = 1/2 - s/2 sum_(i < df/2) C(2i, i) (x/4)^i with s = |z| / sqrt(df + z^2), x = 1 - s^2."""
    s = z.abs() * torch.rsqrt(df + z**2)
    x = 1 - s**2
    total = torch.zeros_like(x)
    for i in reversed(range(int(df) // 2)):
        total = total * x + math.comb(2 * i, i) / 4**i
    return 0.5 - 0.5 * s * total


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor, one_minus_x: Tensor) -> Tensor:
    """Return I_x(a, b), the CDF of a beta variable, elementwise in float64.

    1 - x is passed separately for accuracy.
    """
    return _incomplete_beta(*torch.broadcast_tensors(*(v.to(torch.float64) for v in (a, b, x, one_minus_x))))


def _incomplete_beta(a: Shape, b: Shape, x: Tensor, one_minus_x: Tensor) -> Tensor:
    """Return I_x(a, b) by the continued fraction of I_x or of 1 - I_(1-x), whichever converges faster."""
    flip = x > (a + 1) / (a + b + 2)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        direct = _beta_fraction(a, b, torch.where(flip, 0.5, x), torch.where(flip, 0.5, one_minus_x))
        mirrored = 1 - _beta_fraction(b, a, torch.where(flip, one_minus_x, 0.5), torch.where(flip, x, 0.5))
        return torch.where(flip, mirrored, direct)
    # With a shape per element one fraction suffices: the arguments of the flipped elements are exchanged.
    one, other = torch.where(flip, b, a), torch.where(flip, a, b)
    tail = _beta_fraction(one, other, torch.where(flip, one_minus_x, x), torch.where(flip, x, one_minus_x))
    return torch.where(flip, 1 - tail, tail)


def _beta_fraction(a: Shape, b: Shape, x: Tensor, one_minus_x: Tensor, terms: int = 1000) -> Tensor:
    # Modified Lentz algorithm: evaluated from the front; factors approach 1 as it converges, after about the square
    # root of the larger shape.
    tiny = 1e-300
    log_front = a * torch.log(x.clamp_min(tiny)) + b * torch.log(one_minus_x.clamp_min(tiny))
    front = torch.exp(log_front - (_lgamma(a) + _lgamma(b) - _lgamma(a + b))) / a
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


def _lgamma(value: Shape) -> Shape:
    return torch.lgamma(value) if isinstance(value, Tensor) else math.lgamma(value)


def _away_from_zero(value: Tensor, tiny: float) -> Tensor:
    return torch.where(value.abs() < tiny, tiny, value)


def entropy_of_counts(log_pmf: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor) -> Tensor:
    """Return the entropy in nats of a unimodal distribution of counts, in the shape of its mean.

    The first counts are summed. The others are integrated over log k, from 12 standard deviations below the mean to 40
    above: by the midpoint rule the sum over k equals the integral to about 1e-6 there.

    Args:
        log_pmf: the log probability of counts in the shape of the mean.
        mean, std: moments in float64.
    """
    total = torch.zeros_like(mean)
    for k in range(SUMMED):
        log_p = log_pmf(torch.full_like(mean, k))
        total = total - torch.exp(log_p) * log_p
    low = (mean - 12 * std).clamp_min(SUMMED - 0.5).log()
    high = (mean + 40 * std).clamp_min(SUMMED).log()
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    for node, weight in zip(nodes.tolist(), weights.tolist()):
        at = torch.exp(low + (high - low) * 0.5 * (1 + node))
        log_p = log_pmf(at)
        total = total - torch.exp(log_p) * log_p * at * (high - low) * 0.5 * weight
    return total
