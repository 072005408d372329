"""Predictions in the units of the target, from a fit on a transformed and standardised target.

The fit sees z with T(y) = location + scale * z for an increasing T. Quantiles are mapped, and the density follows from
the change of variables,

    log p(y | x) = log p(z | x) - log scale + log |dT/dy|.

Mean and variance of y are closed forms for logarithms, and Gauss-Hermite quadrature for powers and the logit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.likelihoods import Likelihood, StudentT
from credibly.likelihoods.base import Extra, IndependentTargets
from credibly.likelihoods.continuous import LocationScale
from credibly.predictive.base import Predictive
from credibly.predictive.rescaling import in_units, with_likelihood
from credibly.predictive.transforms import Transform

NODES = 20  # of the quadrature over normal noise: exact for polynomials of degree 39
# Heavy tails take the trapezoidal rule over t with noise sinh(t), to 2e8 scales, where the integrand has decayed.
TAIL, TAIL_NODES = 20.0, 201
FARTHEST = 1e100  # values outside the domain of a transform are moved here


@dataclass(frozen=True)
class Transformed(IndependentTargets):
    """The likelihood of y with T(y) = location + scale * z, given that of a real target z. Results are float64.

    Noise whose tails are too heavy for the mean of y to exist (Student-t noise on a log scale) counts by its location,
    the median, and has an infinite variance; quantiles and densities are exact all the same.
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
        centre, width = self._in_transformed_units(output, extra)
        parts = [self._moments(t, centre[..., k], width[..., k]) for k, t in enumerate(self.transforms)]
        mean, variance = (torch.stack(part, -1) for part in zip(*parts))
        return mean, variance

    def _in_transformed_units(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return location and scale of T(y), (C, N, ..., K)."""
        location, scale = self._affine(output)
        loc, width = (part.double() for part in self.inner.location_scale(output, extra))
        return loc * scale + location, (width * scale).expand_as(loc)

    def _moments(self, transform: Transform, centre: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        tail = self.inner.df if isinstance(self.inner, StudentT) else math.inf
        normal = type(self.inner).standard_log_prob is LocationScale.standard_log_prob
        if transform.kind in ("log", "shifted_log") and normal:
            # Clipped like the exponents of `Transform.inverse`.
            square = (width**2).clamp_max(100.0)
            mean = torch.exp((centre + square / 2).clamp_max(300.0))
            return (mean - transform.shift).clamp_min(0), mean**2 * torch.expm1(square)
        middle = transform.inverse(centre)
        if tail < math.inf and tail <= transform.growth:
            return middle, torch.full_like(middle, math.inf)
        first, second = torch.zeros_like(middle), torch.zeros_like(middle)
        for node, weight in self._nodes():
            difference = transform.inverse(centre + width * node) - middle
            first += weight * difference
            second += weight * difference**2
        finite = tail == math.inf or tail > 2 * transform.growth
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
