"""Predictions in the units of the target: a fit on standardised y, read in y's own units with the density corrected.

With y = location + scale * z a fit knows z alone. Means and deviations are stretched, and a density is divided by the scale,

    log p(y | x) = log p(z | x) - log scale,

so that every figure is the one that a fit in the original units would give, and rescaling y changes nothing but units.
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
from credibly.predictive.base import DrawSource, Predictive


@dataclass(frozen=True)
class InUnits(IndependentTargets):
    """A likelihood of real targets z, read as one of y = location + scale * z. Numbers are float64."""

    inner: Likelihood
    location: tuple[float, ...]
    scale: tuple[float, ...]

    support: ClassVar[str] = "real"
    wide: ClassVar[bool] = True  # a far-off location would round away what a float32 knows about the rest

    def __post_init__(self) -> None:
        if self.inner.support != "real":
            raise InputError("likelihood", f"its targets are {self.inner.support}", "Only real targets have units")
        if len(self.location) != len(self.scale) or not all(math.isfinite(v) for v in self.location):
            raise InputError(
                "location", f"found {self.location} beside scales {self.scale}", "Pass one for each target"
            )
        if not all(math.isfinite(v) and v > 0 for v in self.scale):
            raise InputError("scale", f"found {self.scale}", "Pass a positive number for each target")

    def _affine(self, like: Tensor) -> tuple[Tensor, Tensor]:
        where = {"dtype": torch.float64, "device": like.device}
        return torch.tensor(self.location, **where), torch.tensor(self.scale, **where)  # type: ignore[arg-type]

    def standardised(self) -> tuple[Likelihood, Tensor, Tensor]:
        """The likelihood of z, and what leads from z to y."""
        return self.inner, *self._affine(torch.empty(0))

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Of y: that of z less the logarithm of the scale, for each target."""
        location, scale = self._affine(output)
        return self.inner.log_prob(output, (y - location) / scale, extra) - scale.log().sum()

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""
        location, scale = self._affine(output)
        mean, variance = self.inner.moments(output, extra)
        return mean * scale + location, variance * scale**2

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """That of z plus the logarithm of the scale."""
        return self.inner.entropy(output, extra) + self._affine(output)[1].log()

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """P(y <= value)."""
        location, scale = self._affine(output)
        return self.inner.cdf(output, (value - location) / scale, extra)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draws of y."""
        location, scale = self._affine(output)
        return self.inner.sample(output, extra, generator) * scale + location


class _Read:
    """A source with another likelihood in the place of its own."""

    def __init__(self, inner: DrawSource, likelihood: Likelihood) -> None:
        self.inner = inner
        self.likelihood = likelihood
        self.count = inner.count

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        return self.inner.outputs(x, start, stop, first_row)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        return self.inner.extra(start, stop)

    def row_width(self) -> int:
        return self.inner.row_width()

    def native_width(self) -> int | None:
        native = getattr(self.inner, "native_width", None)
        return native() if native is not None else None


class _Doubled(_Read):
    """A source whose outputs are float64."""

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        return self.inner.outputs(x, start, stop, first_row).double()

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in self.inner.extra(start, stop).items()}


def in_units(predictive: Predictive, location: float | list[float], scale: float | list[float]) -> Predictive:
    """A predictive of z = (y - location) / scale as one of y, with a location and a scale for each target."""
    locations, scales = (
        tuple(float(v) for v in (value if isinstance(value, (list, tuple)) else [value])) for value in (location, scale)
    )
    inner = predictive.likelihood
    likelihood = InUnits(inner, locations, scales, axis=inner.axis, squeeze=inner.squeeze)
    return Predictive(_Read(predictive.source, likelihood), predictive.x)


def in_double(predictive: Predictive) -> Predictive:
    """The same predictive with its figures in float64: probabilities near 0 and 1 keep their distance from them."""
    return Predictive(_Doubled(predictive.source, predictive.likelihood), predictive.x)
