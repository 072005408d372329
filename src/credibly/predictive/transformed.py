"""Predictions in the units of the target, from a fit on a transformed and standardised target.

The fit sees z with T(y) = location + scale * z for an increasing T. Quantiles are mapped, and the density follows from
the change of variables,

    log p(y | x) = log p(z | x) - log scale + log |dT/dy|.

Mean and variance of y are closed forms for logarithms, and Gauss-Hermite quadrature for powers and the logit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.likelihoods.base import Extra, IndependentTargets
from credibly.likelihoods.continuous import LocationScale, StudentNoise
from credibly.predictive.base import Predictive
from credibly.predictive.joined import JoinedPredictive
from credibly.predictive.rescaling import in_units, with_likelihood
from credibly.predictive.transforms import FAR, Transform

NODES = 20  # nodes of the quadrature over normal noise: exact for polynomials of degree 39
# Heavy tails use the trapezoidal rule over t with noise sinh(t), to 2e8 scales, where the integrand has decayed.
TAIL, TAIL_NODES = 20.0, 201
FARTHEST = 1e100  # values outside the domain of a transform are moved here


class Normal(NamedTuple):
    """The CDF of a standard normal and its logarithm, for float64 tensors."""

    cdf: Callable[[Tensor], Tensor]
    log_cdf: Callable[[Tensor], Tensor]


TORCH = Normal(torch.special.ndtr, torch.special.log_ndtr)


@dataclass(frozen=True)
class Transformed(IndependentTargets):
    """The likelihood of y with T(y) = location + scale * z, given that of a real target z. Results are float64.

    For means and variances, values beyond the limits of a transform are clipped to them. Far from the training data all
    draws may lie beyond, where the mean is the limit and the variance close to 0: see `near_limits`. Without limits, if
    the tails of the noise are too heavy for the mean of y to exist (Student-t noise on a log scale), the location,
    which is the median, replaces the mean, and the variance is infinite. Quantiles and densities are exact in any case.
    """

    inner: LocationScale
    transforms: tuple[Transform, ...]
    location: tuple[float, ...]
    scale: tuple[float, ...]

    support: ClassVar[str] = "real"
    wide: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, LocationScale):
            kind = type(self.inner).__name__
            raise InputError("likelihood", f"must have a location and a scale to transform its target, got {kind}")
        if not len(self.transforms) == len(self.location) == len(self.scale):
            raise InputError("transforms", f"must be one per target, got {len(self.transforms)} of {len(self.scale)}")

    # -- T, elementwise over targets ---------------------------------------------------------------------------------
    def _each(self, function: Callable[[Transform, Tensor], Tensor], value: Tensor) -> Tensor:
        if len(set(self.transforms)) == 1:
            return function(self.transforms[0], value)
        return torch.stack([function(t, value[..., k]) for k, t in enumerate(self.transforms)], -1)

    def _affine(self, like: Tensor) -> tuple[Tensor, Tensor]:
        options = {"dtype": torch.float64, "device": like.device}
        return torch.tensor(self.location, **options), torch.tensor(self.scale, **options)  # type: ignore[arg-type]

    def _standardise(self, y: Tensor) -> Tensor:
        location, scale = self._affine(y)
        u = self._each(Transform.forward, y.double()).clamp(-FARTHEST, FARTHEST)
        return (u - location) / scale

    def _restore(self, z: Tensor) -> Tensor:
        location, scale = self._affine(z)
        return self._each(Transform.inverse, z.double() * scale + location)

    # -- the density -------------------------------------------------------------------------------------------------
    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """log p(z) - log scale + log |dT/dy|, summed over targets; -inf outside the domain of T."""
        slope = self._each(Transform.log_slope, y.double()) - self._affine(y)[1].log()
        return self.inner.log_prob(output, self._standardise(y), extra) + slope.sum(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of y."""
        return self.moments_by(TORCH, output, extra)

    def moments_by(self, normal: Normal, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of y, with the normal CDF evaluated by the given functions."""
        centre, width = self._in_transformed_units(output, extra)
        parts = [self._moments(t, centre[..., k], width[..., k], normal) for k, t in enumerate(self.transforms)]
        mean, variance = (torch.stack(part, -1) for part in zip(*parts))
        return mean, variance

    def _in_transformed_units(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return location and scale of T(y), (C, N, ..., K)."""
        location, scale = self._affine(output)
        loc, width = (part.double() for part in self.inner.location_scale(output, extra))
        return loc * scale + location, (width * scale).expand_as(loc)

    def _moments(self, transform: Transform, centre: Tensor, width: Tensor, normal: Normal) -> tuple[Tensor, Tensor]:
        tail = self.inner.df if isinstance(self.inner, StudentNoise) else math.inf
        gaussian = type(self.inner).standard_log_prob is LocationScale.standard_log_prob
        if transform.kind in ("log", "shifted_log") and gaussian:
            if transform.limits is not None:
                return _lognormal_within(transform, centre, width, normal)
            # Clipped like the exponents of `Transform.inverse`.
            square = (width**2).clamp_max(100.0)
            mean = torch.exp((centre + square / 2).clamp_max(300.0))
            return (mean - transform.shift).clamp_min(0), mean**2 * torch.expm1(square)
        middle, bounded = transform.within(transform.inverse(centre)), transform.limits is not None
        if not bounded and tail < math.inf and tail <= transform.growth:
            return middle, torch.full_like(middle, math.inf)
        first, second = torch.zeros_like(middle), torch.zeros_like(middle)
        for node, weight in self._nodes():
            difference = transform.within(transform.inverse(centre + width * node)) - middle
            first += weight * difference
            second += weight * difference**2
        finite = bounded or tail == math.inf or tail > 2 * transform.growth
        variance = (second - first**2).clamp_min(0) if finite else torch.full_like(middle, math.inf)
        return middle + first, variance

    def _nodes(self) -> list[tuple[float, float]]:
        """Return nodes and weights of an average over the standardised noise."""
        if type(self.inner).standard_log_prob is LocationScale.standard_log_prob:
            return _normal_nodes()
        t = torch.linspace(-TAIL, TAIL, TAIL_NODES, dtype=torch.float64)
        noise = torch.sinh(t)
        weight = torch.exp(self.inner.standard_log_prob(noise)) * torch.cosh(t) * (t[1] - t[0])
        return list(zip(noise.tolist(), (weight / weight.sum()).tolist()))

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy of z plus log scale minus E log |dT/dy|, per target."""
        centre, width = self._in_transformed_units(output, extra)
        found = self.inner.entropy(output, extra) + self._affine(output)[1].log()
        columns = []
        for k, transform in enumerate(self.transforms):
            middle, spread = centre[..., k], width[..., k]
            if transform.kind in ("log", "shifted_log"):
                columns.append(-middle)
                continue
            slopes = torch.zeros_like(middle)
            for node, weight in self._nodes():
                slopes += weight * transform.log_slope(transform.inverse(middle + spread * node)).clamp_min(-FARTHEST)
            columns.append(slopes)
        return found - torch.stack(columns, -1)

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value)."""
        return self.inner.cdf(output, self._standardise(value), extra)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw samples of y."""
        return self._restore(self.inner.sample(output, extra, generator))

    def increasing(self) -> tuple[Likelihood, Callable[[Tensor], Tensor]]:
        """Return the likelihood of z and the map from z to y."""
        return self.inner, self._restore


def _lognormal_within(transform: Transform, centre: Tensor, width: Tensor, normal: Normal) -> tuple[Tensor, Tensor]:
    """Return mean and variance of exp(u) - shift for normal u, with values beyond the limits clipped to them.

    With V = exp(u) and limits a < V < b, E V^k = exp(k m + k^2 s^2 / 2) [F(b_k) - F(a_k)] + a^k F(a_0) + b^k F(-b_0),
    where a_k = (log a - m) / s - k s and F is the normal CDF.
    """
    assert transform.limits is not None
    low = max(transform.limits[0], 0.0) + transform.shift
    high = transform.limits[1] + transform.shift
    width = width.clamp_min(1e-12)
    below = (math.log(low) - centre) / width if low > 0 else torch.full_like(centre, -math.inf)
    above = (math.log(high) - centre) / width
    first, second = (
        _inside(k * centre + (k * width) ** 2 / 2, below - k * width, above - k * width, normal)
        + low**k * normal.cdf(below)
        + high**k * normal.cdf(-above)
        for k in (1, 2)
    )
    return first - transform.shift, (second - first**2).clamp_min(0)


def _inside(exponent: Tensor, below: Tensor, above: Tensor, normal: Normal) -> Tensor:
    """Return exp(exponent) times the normal probability between two values, by logarithms: either may overflow."""
    # The probability of the side on which both values lie, where a difference of two close to 1 would lose digits.
    flip = below > 0
    low, high = torch.where(flip, -above, below), torch.where(flip, -below, above)
    larger, smaller = normal.log_cdf(high), normal.log_cdf(low)
    return torch.exp(exponent + larger + torch.log1p(-torch.exp(smaller - larger).clamp_max(1.0)))


@functools.cache
def _normal_nodes() -> list[tuple[float, float]]:
    """Return nodes and weights of Gauss-Hermite quadrature for a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return list(zip(nodes.tolist(), (weights / math.sqrt(2 * math.pi)).tolist()))


def in_original_units(
    predictive: Predictive, transforms: tuple[Transform, ...], location: tuple[float, ...], scale: tuple[float, ...]
) -> Predictive:
    """Return predictions of y from those of z = (T(y) - location) / scale, with one of each per target."""
    if all(transform.kind == "none" for transform in transforms):
        return in_units(predictive, list(location), list(scale))
    inner = predictive.likelihood
    if not isinstance(inner, LocationScale):
        raise InputError("likelihood", f"must have a location and a scale, got {type(inner).__name__}")
    likelihood = Transformed(inner, transforms, location, scale, axis=inner.axis, squeeze=inner.squeeze)
    return with_likelihood(predictive, likelihood)


def on_fitted_scale(predictive: Predictive) -> Predictive:
    """Return the predictions of z = (T(y) - location) / scale from those of a transformed y, or others unchanged.

    Nothing is clipped there, so the uncertainty keeps growing where the mean and variance of y stop at their limits.
    """
    if isinstance(predictive, JoinedPredictive):
        return JoinedPredictive([on_fitted_scale(part) for part in predictive.parts], predictive.places)
    likelihood = predictive.likelihood
    return with_likelihood(predictive, likelihood.inner) if isinstance(likelihood, Transformed) else predictive


def near_limits(mean: Tensor, transforms: Sequence[Transform]) -> Tensor:
    """Return the rows (N,) with a mean (N,) or (N, K) closer to a limit of its transform than to the training targets.

    Up to there, at most about half of the draws are clipped, and the variance of y is large. Beyond, it shrinks to 0 as
    the rest are.
    """
    columns = mean.reshape(len(mean), -1)
    found = torch.zeros(len(mean), dtype=torch.bool, device=mean.device)
    for k, transform in enumerate(transforms):
        if transform.limits is not None:
            low, high = transform.limits
            # The limits are FAR ranges of the training targets away from them on either side.
            margin = (high - low) * (FAR / 2) / (2 * FAR + 1)
            found |= (columns[:, k] < low + margin) | (columns[:, k] > high - margin)
    return found
