"""The survival likelihood: times to an event, some of them right-censored, by an accelerated failure time model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_positive
from credibly.core.inputs import check_finite
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, Likelihood, row_shape
from credibly.likelihoods.continuous import LocationScale
from credibly.likelihoods.shared import Positive, SharedParameter, row_average
from credibly.priors.elementwise import Normal, Prior

FAMILIES = ("weibull", "lognormal")
EULER = 0.5772156649015329  # minus the mean of the standard extreme value distribution


@dataclass(frozen=True)
class Survival(SharedParameter):
    """Times T with log(T / unit) = f(x, w) + scale * e, where e has a standard extreme value or normal distribution.

    An observed event at t has the log density of T at t, a row that was censored at t the log survival function log
    P(T > t). Everything predicted is about T itself, the time without censoring.

    Targets are (N, 2) with columns time and event: 1 if the event was observed at that time, 0 if the row was censored
    then. They may also be (N,) with a negative sign for censored times, the internal representation: -3 means no event
    until 3.

    Args:
        family: "weibull", whose hazard is proportional too, or "lognormal".
        scale: a positive number, or "learned", which makes log(scale) a random parameter of the model. A Weibull
            variable has the shape 1 / scale: above a scale of 1 the hazard falls with time.
        scale_prior: the prior of log(scale) if it is learned; None is N(-0.5, 1).
        unit: the time at f = e = 0. None is the geometric mean of the training times, censored or not, so that the
            prior of the network does not depend on the unit of time.
    """

    family: str = "weibull"
    scale: Positive = field(default="learned", kw_only=True)
    scale_prior: Prior | None = field(default=None, kw_only=True)
    unit: float | None = field(default=None, kw_only=True)

    support: ClassVar[str] = "time"
    limits: ClassVar[tuple[float, float]] = (0.0, math.inf)
    wide: ClassVar[bool] = True  # the mean of a draw with a large scale overflows float32
    shared: ClassVar[str] = "scale"
    default_prior: ClassVar[Normal] = Normal(scale=1.0, loc=-0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("family", self.family, FAMILIES)
        if self.unit is not None:
            check_positive("unit", self.unit)

    # -- targets -----------------------------------------------------------------------------------------------------
    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Check that there is one output per time."""
        pairs = y.ndim == 2 and y.shape[1] == 2
        if output.ndim > 2 or self.arrange(output).shape[-1] != 1 or not (y.ndim == 1 or pairs):
            raise InputError(
                "net",
                f"its output has shape {row_shape(output)}, y has shape {row_shape(y)}",
                "Survival needs one output per row, and y of shape (rows, 2) with columns time and event",
            )
        return self._with_fields(squeeze=True)

    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Check times and return them as (N, 1), negative if censored."""
        check_finite("y", y)
        if y.ndim == 2 and y.shape[1] == 2:
            y = signed_times(y[:, 0], y[:, 1])
        if bool((y == 0).any()):
            raise InputError(
                "y", "has a time of 0", "Survival needs positive times: use a small one, or remove the row"
            )
        return y.reshape(-1, 1).to(dtype)

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Set the unit to the geometric mean of the times, unless it is given."""
        if self.unit is not None:
            return self
        return replace(self, unit=math.exp(float(row_average(y.double().abs().log(), weight)[0])))

    # -- the density -------------------------------------------------------------------------------------------------
    def location_scale(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the location and the scale of log T."""
        return output + math.log(self.unit or 1.0), self.shared_value(output, extra)

    def log_survival(self, e: Tensor) -> Tensor:
        """Return log P(error > e)."""
        if self.family == "weibull":
            return -torch.exp(e)
        value: Tensor = torch.special.log_ndtr(-e)
        return value

    def log_density(self, e: Tensor) -> Tensor:
        """Return the log density of the standardised error."""
        if self.family == "weibull":
            return e - torch.exp(e)
        return -0.5 * torch.square(e) - 0.5 * math.log(2 * math.pi)

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """log p(t) of an event, log P(T > t) of a censored time."""
        loc, scale = self.location_scale(output, extra)
        log_time = torch.log(y.abs())
        e = (log_time - loc) / scale
        event = self.log_density(e) - torch.log(scale) - log_time
        return torch.where(y > 0, event, self.log_survival(e)).sum(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of T, in float64."""
        loc, scale = (part.double() for part in self.location_scale(output, extra))
        if self.family == "weibull":
            log_first, log_second = torch.lgamma(1 + scale), torch.lgamma(1 + 2 * scale)
        else:
            log_first, log_second = scale**2 / 2, 2 * scale**2
        # Clipped far outside any meaningful value, so that a chain that has not converged cannot overflow.
        mean = torch.exp((loc + log_first).clamp_max(150.0))
        return mean, mean**2 * torch.expm1((log_second - 2 * log_first).clamp_max(300.0))

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy of T in nats: that of the error, plus log scale, plus E log T."""
        loc, scale = self.location_scale(output, extra)
        if self.family == "weibull":
            return 1 + EULER + torch.log(scale) + loc - EULER * scale
        return 0.5 * math.log(2 * math.pi * math.e) + torch.log(scale) + loc

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """P(T <= value), elementwise; 0 for negative values."""
        loc, scale = self.location_scale(output, extra)
        tiny = torch.finfo(output.dtype).tiny
        e = (torch.log(value.clamp_min(tiny)) - loc) / scale
        return torch.where(value > 0, -torch.expm1(self.log_survival(e)), 0.0)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw times without censoring."""
        loc, scale = self.location_scale(output, extra)
        if self.family == "weibull":
            u = torch.rand(loc.shape, generator=generator, dtype=torch.float64, device=loc.device)
            error = torch.log(-torch.log1p(-u)).clamp_min(-700.0).to(loc.dtype)
        else:
            error = torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
        return torch.exp(loc + scale * error)

    def increasing(self) -> tuple[Likelihood, Callable[[Tensor], Tensor]]:
        """Return the likelihood of log T and the exponential function."""
        return _LogTime(self), torch.exp


@dataclass(frozen=True)
class _LogTime(LocationScale):
    """The distribution of log T without censoring."""

    time: Survival

    def location_scale(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        return self.time.location_scale(output, extra)

    def standard_log_prob(self, z: Tensor) -> Tensor:
        return self.time.log_density(z)

    def standard_cdf(self, z: Tensor) -> Tensor:
        return -torch.expm1(self.time.log_survival(z))

    def standard_variance(self) -> float:
        return math.pi**2 / 6 if self.time.family == "weibull" else 1.0


def signed_times(time: Tensor, event: Tensor) -> Tensor:
    """Return times with a negative sign where the event was not observed. Raise on anything but times and 0 or 1."""
    negative = time < 0
    if bool(negative.any()):
        raise InputError("y", f"has negative times, such as {float(time[negative][0]):g}", "Times are positive")
    other = (event != 0) & (event != 1)
    if bool(other.any()):
        raise InputError("y", f"has events other than 0 and 1, such as {float(event[other][0]):g}")
    return torch.where(event == 1, time, -time)
