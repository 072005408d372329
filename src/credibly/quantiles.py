"""Quantiles of a mixture of predictive distributions, by root finding on its distribution function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from credibly.likelihoods import Likelihood


def mixture_quantiles(
    likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]
) -> Tensor:
    """Quantiles (levels, rows, ..., K) of the average of S distributions with outputs (S, rows, ..., K).

    A bracket around all components is widened until it holds the level, then narrowed to the precision of the dtype.
    """
    means, variances = likelihood.moments(output, extra)
    sd = variances.clamp(max=1e30).sqrt()
    found = []
    for level in levels:

        def excess(value: Tensor, level: float = level) -> Tensor:
            return likelihood.cdf(output, value, extra).mean(0, dtype=torch.float64) - level

        low, high = (means - 4 * sd).amin(0), (means + 4 * sd).amax(0)
        reach = (high - low).clamp_min(1e-12)
        for _ in range(60):
            short_low, short_high = excess(low) > 0, excess(high) < 0
            if not bool((short_low | short_high).any()):
                break
            low, high, reach = (
                torch.where(short_low, low - reach, low),
                torch.where(short_high, high + reach, high),
                2 * reach,
            )
        found.append(whole_root(excess, low, high) if likelihood.support == "count" else root(excess, low, high))
    return torch.stack(found)


def root(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Where an increasing function crosses zero between low and high, elementwise (Chandrupatla 1997).

    `near` is the newest point and `far` the end of the bracket across the root; inverse quadratic interpolation through
    them and the point before is taken where the three are in good order, bisection elsewhere.
    """
    near, far = low, high
    f_near, f_far = excess(near), excess(far)
    tolerance = 4 * torch.finfo(low.dtype).eps * (high - low)
    t = torch.full_like(f_near, 0.5)
    for _ in range(100):
        new = (near + t * (far - near)).to(low.dtype)
        f_new = excess(new)
        same = torch.sign(f_new) == torch.sign(f_near)
        third, f_third = torch.where(same, near, far), torch.where(same, f_near, f_far)
        far, f_far = torch.where(same, far, near), torch.where(same, f_far, f_near)
        near, f_near = new, f_new
        limit = (
            (tolerance + 2 * torch.finfo(low.dtype).eps * new.abs()) / (far - near).abs().clamp_min(1e-300)
        ).double()
        if bool(((limit > 0.5) | (f_near == 0)).all()):
            break
        xi = ((near - far) / (third - far)).double()
        phi = (f_near - f_far) / (f_third - f_far)
        good = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        slope = ((third - near) / (far - near)).double()
        quadratic = f_near / (f_far - f_near) * f_third / (f_far - f_third) + slope * f_near / (
            f_third - f_near
        ) * f_far / (f_third - f_far)
        t = torch.where(good & torch.isfinite(quadratic), quadratic, 0.5)
        t = torch.minimum(torch.maximum(t, limit.clamp(max=0.5)), 1 - limit.clamp(max=0.5))
    return torch.where(f_near.abs() <= f_far.abs(), near, far)


def whole_root(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The smallest whole number at which an increasing step function is not negative, by bisection."""
    low, high = torch.floor(low).clamp_min(-1), torch.ceil(high).clamp_min(0)
    while bool((high - low > 1).any()):
        middle = torch.floor(0.5 * (low + high))
        below = excess(middle) < 0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
