"""Predictions in the units of the target, from a fit on a standardised target.

The fit sees z with y = location + scale * z. Means and standard deviations are rescaled, and the density follows from
the change of variables,

    log p(y | x) = log p(z | x) - log scale,

so every quantity equals that of a fit in the original units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from credibly.core.inputs import Inputs
from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.likelihoods.base import Extra, IndependentTargets
from credibly.predictive.base import Predictive
from credibly.predictive.source import DrawSource


@dataclass(frozen=True)
class InUnits(IndependentTargets):
    """The likelihood of y = location + scale * z, given that of a real target z. Results are float64."""

    inner: Likelihood
    location: tuple[float, ...]
    scale: tuple[float, ...]

    support: ClassVar[str] = "real"
    wide: ClassVar[bool] = True  # with a location far from 0, float32 would round away the predicted differences

    def __post_init__(self) -> None:
        if self.inner.support != "real":
            raise InputError("likelihood", f"must have real targets, its support is {self.inner.support!r}")
        if len(self.location) != len(self.scale) or not all(math.isfinite(v) for v in self.location):
            raise InputError(
                "location", f"must be one finite number per target, got {self.location} with scale {self.scale}"
            )
        if not all(math.isfinite(v) and v > 0 for v in self.scale):
            raise InputError("scale", f"must be one positive number per target, got {self.scale}")

    def _affine(self, like: Tensor) -> tuple[Tensor, Tensor]:
        options = {"dtype": torch.float64, "device": like.device}
        return torch.tensor(self.location, **options), torch.tensor(self.scale, **options)  # type: ignore[arg-type]

    def standardised(self) -> tuple[Likelihood, Tensor, Tensor]:
        """Return the likelihood of z, the location and the scale."""
        return self.inner, *self._affine(torch.empty(0))

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return log p(z) - log scale, summed over targets."""
        location, scale = self._affine(output)
        return self.inner.log_prob(output, (y - location) / scale, extra) - scale.log().sum()

    def predictive_log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the reported log density of z minus log scale, summed over targets."""
        location, scale = self._affine(output)
        return self.inner.predictive_log_prob(output, (y - location) / scale, extra) - scale.log().sum()

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of y."""
        location, scale = self._affine(output)
        mean, variance = self.inner.moments(output, extra)
        return mean * scale + location, variance * scale**2

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy of z plus log scale."""
        return self.inner.entropy(output, extra) + self._affine(output)[1].log()

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value)."""
        location, scale = self._affine(output)
        return self.inner.cdf(output, (value - location) / scale, extra)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw samples of y."""
        location, scale = self._affine(output)
        return self.inner.sample(output, extra, generator) * scale + location


class WithLikelihood:
    """A source with its likelihood replaced."""

    def __init__(self, inner: DrawSource, likelihood: Likelihood) -> None:
        self.inner = inner
        self.likelihood = likelihood
        self.count = inner.count

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the outputs of the source."""
        return self.inner.outputs(x, start, stop, first_row)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in those draws."""
        return self.inner.extra(start, stop)

    def row_width(self) -> int:
        """Return the number of activations per row and draw."""
        return self.inner.row_width()

    def cpp_width(self) -> int | None:
        """Return the values per row that the C++ backend keeps; None if it cannot be used."""
        native = getattr(self.inner, "cpp_width", None)
        return native() if native is not None else None


class _InDouble(WithLikelihood):
    """A source with its outputs converted to float64."""

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        return self.inner.outputs(x, start, stop, first_row).double()

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in self.inner.extra(start, stop).items()}


def in_units(predictive: Predictive, location: float | list[float], scale: float | list[float]) -> Predictive:
    """Return predictions of y from those of z = (y - location) / scale, with one location and scale per target."""
    locations, scales = (
        tuple(float(v) for v in (value if isinstance(value, (list, tuple)) else [value])) for value in (location, scale)
    )
    inner = predictive.likelihood
    return with_likelihood(predictive, InUnits(inner, locations, scales, axis=inner.axis, squeeze=inner.squeeze))


def with_likelihood(predictive: Predictive, likelihood: Likelihood) -> Predictive:
    """Return the predictions of the same outputs under another likelihood, such as one in other units."""
    found = Predictive(WithLikelihood(predictive.source, likelihood), predictive.x)
    found._cached = predictive._cached
    return found


def in_double(predictive: Predictive) -> Predictive:
    """Return the same predictions computed in float64, where probabilities close to 0 and 1 do not round to them."""
    return Predictive(_InDouble(predictive.source, predictive.likelihood), predictive.x)
