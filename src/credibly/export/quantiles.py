"""Quantiles of a mixture with a fixed number of operations, so that a graph can hold them.

A quantile of a mixture lies between the smallest and the largest quantile of its components. Bisection in the network's
dtype narrows that bracket, and Newton steps in float64 finish. A Newton step counts only if it brings the CDF closer to
the level, so nothing diverges where components are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from credibly.export.tails import standard_cdf, standard_quantile
from credibly.likelihoods import Likelihood
from credibly.likelihoods.continuous import LocationScale

# Outputs under every draw, and the likelihood's own parameters.
Fit: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]
# Number of halvings of the bracket, past the resolution of float32.
HALVINGS = 26
NEWTON_STEPS = 3


def inner_likelihood(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood whose quantiles are computed: that of the standardised target, if there is one."""
    found = likelihood.standardised() or likelihood.increasing()
    return likelihood if found is None else inner_likelihood(found[0])


def has_quantiles(likelihood: Likelihood) -> bool:
    """Return whether `graph_quantiles` can compute the quantiles of mixtures of this likelihood."""
    inner = inner_likelihood(likelihood)
    return isinstance(inner, LocationScale) and standard_cdf(inner) is not None


def graph_quantiles(likelihood: Likelihood, fits: Sequence[Fit], levels: Sequence[float]) -> Tensor:
    """Return quantiles (levels, fits, rows, ..., K) in float64 of the average over the draws of each fit.

    The same as `credibly.predictive.quantiles.mixture_quantiles`, without branches that depend on values.

    Args:
        likelihood: of the target.
        fits: outputs (S, rows, ..., K) and the likelihood's own parameters (S, ...), with the same S for all.
        levels: of the quantiles.
    """
    standardised, increasing = likelihood.standardised(), likelihood.increasing()
    if standardised is not None:
        inner, location, scale = standardised
        return graph_quantiles(inner, fits, levels) * scale + location
    if increasing is not None:
        inner, function = increasing
        return function(graph_quantiles(inner, fits, levels))
    assert isinstance(likelihood, LocationScale)
    found = [likelihood.location_scale(output, extra) for output, extra in fits]
    # All fits at once, as further rows.
    loc = torch.cat([loc for loc, _ in found], 1)
    scale = torch.cat([scale.expand_as(loc) for loc, scale in found], 1)
    # Relative to the mean location, so that float32 has its digits where the mixture is.
    centre = loc.double().mean(0)
    near = loc.double() - centre
    low, high = _bisected(likelihood, near.to(loc.dtype), scale, levels)
    result: Tensor = centre + _polished(likelihood, near, scale.double(), 0.5 * (low + high), levels)
    return result.reshape(result.shape[0], len(fits), -1, *result.shape[2:])


def _bisected(likelihood: LocationScale, loc: Tensor, scale: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return brackets (levels, rows, ..., K) around the quantiles, in float64."""
    ends = [loc + scale * standard_quantile(likelihood, level) for level in levels]
    low, high = torch.stack([end.amin(0) for end in ends]), torch.stack([end.amax(0) for end in ends])
    wanted = _levels(levels, low)
    normal = type(likelihood).standard_cdf is LocationScale.standard_cdf
    exact = standard_cdf(likelihood)
    assert exact is not None

    def halve(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        middle = 0.5 * (low + high)
        z = (middle.unsqueeze(1) - loc) / scale
        # Erf is a single operation of ONNX, in float32.
        reached = 0.5 + 0.5 * torch.erf(z.float() * math.sqrt(0.5)) if normal else exact(z.double())
        below = reached.mean(1).to(wanted.dtype) < wanted
        return torch.where(below, middle, low), torch.where(below, high, middle)

    low, high = _repeat(halve, (low, high), HALVINGS)
    return low.double(), high.double()


def _polished(likelihood: LocationScale, loc: Tensor, scale: Tensor, value: Tensor, levels: Sequence[float]) -> Tensor:
    """Return the values after Newton steps in float64."""
    cdf = standard_cdf(likelihood)
    assert cdf is not None
    wanted = _levels(levels, value)

    def step(best: Tensor, error: Tensor, slope: Tensor, point: Tensor) -> tuple[Tensor, ...]:
        z = (point.unsqueeze(1) - loc) / scale
        excess = cdf(z).mean(1) - wanted
        density = (torch.exp(likelihood.standard_log_prob(z)) / scale).mean(1)
        # A comparison with NaN is false.
        better = excess.abs() < error.abs()
        best, error, slope = (
            torch.where(better, new, old) for new, old in ((point, best), (excess, error), (density, slope))
        )
        return best, error, slope, best - error / slope.clamp_min(1e-300)

    # Any excess is below 2, so the first point counts.
    start = value, torch.full_like(value, 2.0), torch.ones_like(value), value + 0
    return _repeat(step, start, NEWTON_STEPS + 1)[0]


def _repeat(function: Callable[..., tuple[Tensor, ...]], start: tuple[Tensor, ...], times: int) -> tuple[Tensor, ...]:
    """Return the values after a number of iterations, as a loop inside a traced graph."""
    from torch._higher_order_ops.scan import scan

    def body(carried: tuple[Tensor, ...], _: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return function(*carried), torch.zeros(1)

    found: tuple[Tensor, ...] = scan(body, start, torch.zeros(times, 1))[0]
    return found


def _levels(levels: Sequence[float], like: Tensor) -> Tensor:
    """Return the levels, broadcastable against (levels, rows, ..., K)."""
    return torch.tensor(list(levels), dtype=like.dtype).reshape(-1, *[1] * (like.ndim - 1))
