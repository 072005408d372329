"""Quantiles of a mixture of predictive distributions, by root finding on its distribution function.

Where the components have a location and a scale the density is known beside the distribution function, and a few steps of
Newton's kind from the quantile of a Gaussian with the mixture's moments are enough; elsewhere, and for the rare rows that such
steps do not settle, a bracket is narrowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from credibly.likelihoods import Likelihood
from credibly.likelihoods.continuous import LocationScale

CACHED = 2**18  # values of a share of the rows, so that the passes over it stay in the caches
STEPS = 8  # that are tried before a bracket is used


def mixture_quantiles(
    likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]
) -> Tensor:
    """Quantiles (levels, rows, ..., K) of the average of S distributions with outputs (S, rows, ..., K).

    Both ways find it to the precision of the dtype.
    """
    other = likelihood.standardised()
    if other is not None:
        inner, location, scale = other
        return mixture_quantiles(inner, output, extra, levels) * scale.to(output.device) + location.to(output.device)
    if isinstance(likelihood, LocationScale) and torch.isfinite(torch.tensor(likelihood.standard_variance())):
        return _by_steps(likelihood, output, extra, levels)
    return _by_bracket(likelihood, output, extra, levels)


def _by_steps(likelihood: LocationScale, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]) -> Tensor:
    """Halley's steps on the distribution function, a share of the rows at a time."""
    loc, scale = likelihood.location_scale(output, extra)
    rows = max(1, CACHED // max(1, loc[:, :1].numel()))
    found = []
    for first in range(0, loc.shape[1], rows):
        some = slice(first, first + rows)
        part = output[:, some]
        own = scale if scale.ndim == 0 or scale.shape[1:2] in ((), (1,)) else scale[:, some]
        values, settled = _steps(likelihood, loc[:, some], own, levels)
        if not bool(settled.all()):
            slow = (~settled).flatten(2).any(-1).any(0)  # rows
            values[:, slow] = _by_bracket(likelihood, part[:, slow], extra, levels)
        found.append(values)
    return torch.cat(found, 1)


def _steps(likelihood: LocationScale, loc: Tensor, scale: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Quantiles (levels, rows, ..., K) and whether each has settled."""
    mean, inverse = loc.mean(0), 1 / scale
    noise = (scale**2).expand_as(loc[:, :1] if scale.ndim < loc.ndim or scale.shape[1] == 1 else loc).mean(0)
    spread = (noise * likelihood.standard_variance() + loc.var(0, correction=0)).sqrt()
    # Near the root a step leaves an error of the order of its cube where the slope is exact, of its square elsewhere.
    eps = torch.finfo(loc.dtype).eps
    tolerance = (
        eps ** (1 / 3) / 4 if type(likelihood).standard_log_prob is LocationScale.standard_log_prob else eps**0.5 / 4
    )
    results, flags = [], []
    for level in levels:
        start = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).to(mean)
        value = mean + spread * start
        settled = torch.zeros_like(value, dtype=torch.bool)
        for _ in range(STEPS):
            z = (value - loc) * inverse
            excess = likelihood.standard_cdf(z).mean(0, dtype=torch.float64) - level
            weight = likelihood.standard_log_prob(z).exp_() * inverse
            density = weight.mean(0)
            # The slope of a normal density; for heavier tails it is too steep, which costs a step or two and nothing else.
            slope = -weight.mul_(z).mul_(inverse).mean(0)
            newton = excess / density
            step = newton / (1 - 0.5 * newton * slope / density).clamp(0.5, 2.0)
            moved = (value - step.to(value)).where(torch.isfinite(step) & (step.abs() < 4 * spread), value)
            settled = (moved - value).abs() <= tolerance * spread
            stuck = ~torch.isfinite(step) | (step.abs() >= 4 * spread)
            settled &= ~stuck
            value = moved
            if bool((settled | stuck).all()):
                break
        results.append(value)
        flags.append(settled)
    return torch.stack(results), torch.stack(flags)


def _by_bracket(likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]) -> Tensor:
    """A bracket around all components is widened until it holds the level, then narrowed."""
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
