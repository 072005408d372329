"""Quantiles of a mixture of predictive distributions, by root finding on its CDF.

For location-scale components the density is known too, and a few Halley steps converge from the quantile of a Gaussian
with the mixture's moments. Heavy tails, whose moments are uninformative or do not exist, other likelihoods, and the
rare rows that do not converge use a bracketing method. A quantile of a mixture lies between the smallest and the
largest quantile of its components, which needs no moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from credibly.likelihoods import Likelihood
from credibly.likelihoods.continuous import LocationScale

BLOCK_VALUES = 2**18  # values per block of rows: the repeated passes over a block stay in the CPU caches
MAX_STEPS = 8  # Halley steps before falling back to bracketing
MAX_VARIANCE = 4.0  # largest variance of a standardised component for Halley steps; beyond it the start is far off


@torch.no_grad()
def mixture_quantiles(
    likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]
) -> Tensor:
    """Return quantiles (levels, rows, ..., K) of the average of S distributions with outputs (S, rows, ..., K).

    They are accurate to the precision of the dtype, and not differentiable.
    """
    standardised = likelihood.standardised()
    if standardised is not None:
        inner, location, scale = standardised
        return mixture_quantiles(inner, output, extra, levels) * scale.to(output.device) + location.to(output.device)
    increasing = likelihood.increasing()
    if increasing is not None:
        inner, function = increasing
        return function(mixture_quantiles(inner, output, extra, levels))
    own = likelihood.mixture_quantiles(output, extra, levels)
    if own is not None:
        return own
    if isinstance(likelihood, LocationScale) and likelihood.standard_variance() <= MAX_VARIANCE:
        return _by_halley(likelihood, output, extra, levels)
    # A root next to an end of the range may be rounded past it.
    return _by_bracketing(likelihood, output, extra, levels).clamp(*likelihood.limits)


def _by_halley(likelihood: LocationScale, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]) -> Tensor:
    """Return quantiles by Halley's method on the CDF, one block of rows at a time."""
    loc, scale = likelihood.location_scale(output, extra)
    rows = max(1, BLOCK_VALUES // max(1, loc[:, :1].numel()))
    found = []
    for first in range(0, loc.shape[1], rows):
        some = slice(first, first + rows)
        part = output[:, some]
        own = scale if scale.ndim == 0 or scale.shape[1:2] in ((), (1,)) else scale[:, some]
        # For a few rows nearly all time is that of calls, so levels share them; for many the cache decides.
        together = max(1, BLOCK_VALUES // max(1, loc[:, some].numel()))
        parts = [
            _halley(likelihood, loc[:, some], own, levels[i : i + together]) for i in range(0, len(levels), together)
        ]
        values, converged = (torch.cat(part) for part in zip(*parts))
        if not bool(converged.all()):
            slow = (~converged).flatten(2).any(-1).any(0)  # rows
            values[:, slow] = _by_bracketing(likelihood, part[:, slow], extra, levels)
        found.append(values)
    return torch.cat(found, 1)


def _halley(likelihood: LocationScale, loc: Tensor, scale: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return quantiles (levels, rows, ..., K) and whether each has converged."""
    mean, inverse = loc.mean(0), 1 / scale
    noise = (scale**2).expand_as(loc[:, :1] if scale.ndim < loc.ndim or scale.shape[1] == 1 else loc).mean(0)
    # Several times faster than `Tensor.var` along the first axis, and as accurate: the mean is subtracted first.
    between = (loc - mean).square_().mean(0)
    std = (noise * likelihood.standard_variance() + between).sqrt()
    # Near the root a step of size h leaves an error O(h^3) if the slope below is exact, O(h^2) otherwise.
    eps = torch.finfo(loc.dtype).eps
    tolerance = (
        eps ** (1 / 3) / 4 if type(likelihood).standard_log_prob is LocationScale.standard_log_prob else eps**0.5 / 4
    )
    level = torch.tensor(levels, dtype=torch.float64, device=loc.device).reshape(-1, *[1] * mean.ndim)
    value = mean + std * torch.special.ndtri(level).to(mean)
    converged = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(MAX_STEPS):
        z = (value.unsqueeze(1) - loc) * inverse
        excess = likelihood.standard_cdf(z).mean(1, dtype=torch.float64) - level
        weight = likelihood.standard_log_prob(z).exp_() * inverse
        density = weight.mean(1)
        # The slope of a normal density. For heavier tails it is too steep, which only costs a step or two.
        slope = -weight.mul_(z).mul_(inverse).mean(1)
        newton = excess / density
        step = newton / (1 - 0.5 * newton * slope / density).clamp(0.5, 2.0)
        moved = (value - step.to(value)).where(torch.isfinite(step) & (step.abs() < 4 * std), value)
        failed = ~torch.isfinite(step) | (step.abs() >= 4 * std)
        converged = ((moved - value).abs() <= tolerance * std) & ~failed
        value = moved
        if bool((converged | failed).all()):
            break
    return value, converged


def _by_bracketing(likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]) -> Tensor:
    """Return quantiles from brackets that contain them."""
    if isinstance(likelihood, LocationScale):
        return _between_components(likelihood, output, extra, levels)
    means, variances = likelihood.moments(output, extra)
    # Without moments the bracket starts anywhere and takes longer to widen.
    means = means.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    std = torch.where(variances.isfinite(), variances, means.square() + 1).sqrt()
    found = []
    for level in levels:

        def excess(value: Tensor, level: float = level) -> Tensor:
            return likelihood.cdf(output, value, extra).mean(0, dtype=torch.float64) - level

        low, high = widened(excess, (means - 4 * std).amin(0), (means + 4 * std).amax(0))
        found.append(integer_root(excess, low, high) if likelihood.support == "count" else root(excess, low, high))
    return torch.stack(found)


def _between_components(
    likelihood: LocationScale, output: Tensor, extra: dict[str, Tensor], levels: Sequence[float]
) -> Tensor:
    """Return quantiles from the bracket of the components' own quantiles, computed in float64."""
    loc, scale = (part.double() for part in likelihood.location_scale(output, extra))
    # A scale that overflows puts half of its component's probability at either infinity.
    infinite = scale.isinf().expand_as(loc)
    beyond = 0.5 * infinite.double().mean(0)
    loc, scale = loc.masked_fill(infinite, 0.0), torch.where(infinite, 1.0, scale)
    found = []
    for level in levels:

        def excess(value: Tensor, level: float = level) -> Tensor:
            below = likelihood.standard_cdf((value - loc) / scale)
            return torch.where(infinite, 0.5, below).mean(0) - level

        ends = loc + scale * _standard_quantile(likelihood, level, loc.device)
        low, high = ends.amin(0), ends.amax(0)
        if bool(infinite.any()):
            low, high = widened(excess, low, high)
        value = root(excess, low, high)
        value = torch.where(level < beyond, -torch.inf, torch.where(level > 1 - beyond, torch.inf, value))
        found.append(value.to(output.dtype))
    return torch.stack(found)


def _standard_quantile(likelihood: LocationScale, level: float, device: torch.device) -> Tensor:
    """Return the quantile of a standardised component, a scalar in float64."""

    def excess(value: Tensor) -> Tensor:
        return likelihood.standard_cdf(value) - level

    one = torch.ones((), dtype=torch.float64, device=device)
    return root(excess, *widened(excess, -one, one))


def widened(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bracket around where an increasing function crosses zero, elementwise, by doubling the given one.

    An end that was too far inside becomes the other end, so the bracket is no wider than the distance to the root.
    """
    extension = (high - low).clamp_min(1e-12)
    for _ in range(200):
        too_high, too_low = excess(low) > 0, excess(high) < 0
        if not bool((too_high | too_low).any()):
            break
        low, high = (
            torch.where(too_high, low - extension, torch.where(too_low, high, low)),
            torch.where(too_low, high + extension, torch.where(too_high, low, high)),
        )
        extension = 2 * extension
    return low, high


def root(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return where an increasing function crosses zero between low and high, elementwise (Chandrupatla 1997).

    `near` is the newest point, `far` the end of the bracket across the root, `third` the point before. A step is
    inverse quadratic interpolation through the three where Chandrupatla's criterion allows it, bisection elsewhere.
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


def integer_root(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the smallest integer at which an increasing step function is not negative, by bisection."""
    low, high = torch.floor(low).clamp_min(-1), torch.ceil(high).clamp_min(0)
    while bool((high - low > 1).any()):
        middle = torch.floor(0.5 * (low + high))
        below = excess(middle) < 0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
