"""The negative binomial likelihood: counts with more variance than a Poisson variable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.core.checks import check_positive
from credibly.likelihoods.base import Extra
from credibly.likelihoods.discrete import check_counts
from credibly.likelihoods.shared import Positive, SharedParameter, row_average
from credibly.likelihoods.special import entropy_of_counts, incomplete_beta
from credibly.priors.elementwise import Normal, Prior


@dataclass(frozen=True)
class NegativeBinomial(SharedParameter):
    """Counts with mean m = unit exp(f(x, w)) and variance m + dispersion m^2, independently per target.

        log p(y) = lgamma(y + r) - lgamma(r) - log y! + r log(r / (r + m)) + y log(m / (r + m)),   r = 1 / dispersion

    Args:
        dispersion: a positive number, or "learned", which makes log(dispersion) a random parameter of the model. As it
            goes to 0 the likelihood goes to `Poisson`.
        dispersion_prior: the prior of log(dispersion) if it is learned; None is N(-1, 1.5^2).
        per_target: whether a learned dispersion has one value per target.
        unit: the mean at an output of 0. None is the mean of the training targets (of all of them together), so that
            the prior of the network does not depend on the size of the counts; 1 is the plain log link.
    """

    dispersion: Positive = "learned"
    dispersion_prior: Prior | None = field(default=None, kw_only=True)
    unit: float | None = field(default=None, kw_only=True)

    support: ClassVar[str] = "count"
    limits: ClassVar[tuple[float, float]] = (0.0, math.inf)
    shared: ClassVar[str] = "dispersion"
    default_prior: ClassVar[Normal] = Normal(scale=1.5, loc=-1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit is not None:
            check_positive("unit", self.unit)

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Set the unit to the mean of the targets, unless it is given."""
        if self.unit is not None:
            return self
        mean = float(row_average(y, weight).mean())
        return replace(self, unit=mean if mean > 0 else 1.0)

    def check_values(self, y: Tensor) -> None:
        """Raise unless every target is a non-negative integer."""
        check_counts(type(self).__name__, y)

    def _log_mean(self, output: Tensor) -> Tensor:
        return output + torch.log(torch.as_tensor(self.unit or 1.0, dtype=output.dtype, device=output.device))

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the log probability, summed over targets."""
        return self._log_pmf(self._log_mean(output), y, self.shared_value(output, extra)).sum(-1)

    def _log_pmf(self, log_mean: Tensor, y: Tensor, dispersion: Tensor) -> Tensor:
        r = 1 / dispersion
        log_odds = log_mean + torch.log(dispersion)  # of m against r
        # In float32 the difference of two large log gamma functions would lose all digits.
        wide, count = r.to(torch.float64), y.to(torch.float64)
        binomial = torch.lgamma(count + wide) - torch.lgamma(wide) - torch.lgamma(count + 1)
        return binomial.to(log_mean.dtype) - r * F.softplus(log_odds) - y * F.softplus(-log_odds)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """m and m + dispersion m^2."""
        mean = torch.exp(self._log_mean(output))
        return mean, mean + self.shared_value(output, extra) * mean**2

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy in nats: summed over small counts, integrated over large ones."""
        wide = output.to(torch.float64)
        alpha = self.shared_value(output, extra).to(torch.float64)
        mean, variance = self.moments(wide, {name: value.double() for name, value in extra.items()})

        def log_pmf(k: Tensor) -> Tensor:
            return self._log_pmf(self._log_mean(wide), k, alpha)

        return entropy_of_counts(log_pmf, mean, variance.sqrt()).to(output.dtype)

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """P(y <= value) = I_p(r, floor(value) + 1) with p = r / (r + m), elementwise."""
        count = torch.floor(value).expand_as(output)
        alpha = self.shared_value(output, extra).to(torch.float64)
        log_odds = self._log_mean(output).to(torch.float64) + torch.log(alpha)
        p, rest = torch.sigmoid(-log_odds), torch.sigmoid(log_odds)
        found = incomplete_beta(1 / alpha, count.clamp_min(0) + 1, p, rest)
        return torch.where(count < 0, 0.0, found).to(output.dtype)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw a rate m g with g of a gamma distribution of mean 1 and variance `dispersion`, then a Poisson count."""
        alpha = self.shared_value(output, extra)
        shape = (1 / alpha).expand_as(output)
        gamma = torch._standard_gamma(shape.contiguous(), generator=generator) * alpha
        return torch.poisson(torch.exp(self._log_mean(output)) * gamma, generator=generator)
