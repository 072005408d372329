"""Likelihoods of real targets: Gaussian and Student-t, each with a shared scale or one that the network predicts."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from credibly.core.checks import check_positive
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, IndependentTargets, Parameter, expand_to_output
from credibly.likelihoods.special import student_t_cdf
from credibly.priors.elementwise import Normal, Prior, student_t_draws, student_t_log_prob

# The prior of log(scale) for targets of standard deviation 1.
STANDARD = Normal(scale=1.0, loc=-1.0)
Scale = float | tuple[float, ...] | list[float] | Literal["learned"]


@dataclass(frozen=True, kw_only=True)
class LocationScale(IndependentTargets):
    """y = location + scale * z, with z standard normal unless a subclass overrides the `standard_` methods."""

    support: ClassVar[str] = "real"

    @abstractmethod
    def location_scale(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the location (C, N, ..., K) and a scale that broadcasts against it."""

    def standard_log_prob(self, z: Tensor) -> Tensor:
        """Return the log density of z."""
        return -0.5 * torch.square(z) - 0.5 * math.log(2 * math.pi)

    def standard_cdf(self, z: Tensor) -> Tensor:
        """Return the CDF of z."""
        value: Tensor = torch.special.ndtr(z)
        return value

    def standard_draws(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z in the shape of `like`."""
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def standard_variance(self) -> float:
        """Return the variance of z."""
        return 1.0

    def standard_entropy(self) -> float:
        """Return the entropy of z in nats."""
        return 0.5 * math.log(2 * math.pi * math.e)

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return log p((y - location)/scale) - log scale, summed over targets."""
        loc, scale = self.location_scale(output, extra)
        return (self.standard_log_prob((y - loc) / scale) - torch.log(scale)).sum(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the location, and scale^2 times the variance of z."""
        loc, scale = self.location_scale(output, extra)
        return loc, (scale**2 * self.standard_variance()).expand_as(loc)

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy of z plus log scale, per target."""
        loc, scale = self.location_scale(output, extra)
        return (self.standard_entropy() + torch.log(scale)).expand_as(loc)

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value), elementwise."""
        loc, scale = self.location_scale(output, extra)
        return self.standard_cdf((value - loc) / scale)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw location + scale * z."""
        loc, scale = self.location_scale(output, extra)
        return loc + scale * self.standard_draws(loc, generator)


@dataclass(frozen=True)
class _SharedScale(LocationScale):
    """A scale that does not depend on x: fixed, or a random parameter `log_scale` with its own prior."""

    scale: Scale = "learned"
    scale_prior: Prior | tuple[Prior, ...] | None = field(default=None, kw_only=True)
    per_target: bool = field(default=False, kw_only=True)
    targets: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.scale, str):
            if self.scale != "learned":
                constraint = 'must be a positive number, one per target, or "learned"'
                raise InputError("scale", f"{constraint}, got {self.scale!r}")
        elif isinstance(self.scale, (tuple, list)):
            for value in self.scale:
                check_positive("scale", value)
            object.__setattr__(self, "scale", tuple(float(value) for value in self.scale))
        else:
            check_positive("scale", self.scale)
        if isinstance(self.scale_prior, tuple) and not self.per_target:
            raise InputError("scale_prior", "must be one prior unless per_target=True, got several")

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Centre the default prior of a learned scale at the standard deviation of y, divided by e."""
        if self.scale != "learned" or self.scale_prior is not None:
            return self
        logs = _log_std(y, weight)
        if not self.per_target:
            logs = [sum(logs) / len(logs)]
        # Rounded, so that y standardised to rounding counts as standardised and has the prior STANDARD itself.
        priors = tuple(replace(STANDARD, loc=STANDARD.loc + round(value, 2)) for value in logs)
        return self._with_fields(scale_prior=priors if len(set(priors)) > 1 else priors[0])

    def parameters(self) -> dict[str, Parameter]:
        """Return `log_scale` if the scale is learned, one value or one per target."""
        if self.scale != "learned":
            return {}
        prior = STANDARD if self.scale_prior is None else self.scale_prior
        start = tuple(p.centre for p in prior) if isinstance(prior, tuple) else prior.centre
        return {"log_scale": Parameter((self.targets,) if self.per_target else (), prior, start)}

    def location_scale(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the output and the shared scale."""
        if self.scale == "learned":
            return output, expand_to_output(torch.exp(extra["log_scale"]), output, self.per_target)
        return output, torch.as_tensor(self.scale, dtype=output.dtype, device=output.device)

    def _target_fields(self, targets: int) -> dict[str, object]:
        if isinstance(self.scale, tuple) and len(self.scale) != targets:
            found = f"has {len(self.scale)} values for {targets} targets"
            raise InputError("scale", found, "Pass one number, or one per target")
        if isinstance(self.scale_prior, tuple) and len(self.scale_prior) != targets:
            found = f"has {len(self.scale_prior)} priors for {targets} targets"
            raise InputError("scale_prior", found, "Pass one prior, or one per target")
        return {"targets": targets}


@dataclass(frozen=True)
class Gaussian(_SharedScale):
    """y ~ N(f(x, w), scale^2), independently per target.

    Args:
        scale: a positive number, one per target, or "learned", which makes log(scale) a random parameter of the model.
        scale_prior: the prior of log(scale) if it is learned, or one per target. None is N(log(s) - 1, 1), where s is
            the standard deviation of the training targets (their geometric mean if several share a scale): the noise
            is expected at about a third of s whatever the units of y. The prior of the network has units of its own:
            standardise y, or scale the prior of the last layer to it.
        per_target: whether a learned scale has one value per target.
    """

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """-(y - f)^2 / (2 scale^2) - log scale - log(2 pi)/2, summed over targets."""
        if not isinstance(self.scale, (int, float)):
            return super().log_prob(output, y, extra)
        # A single fixed scale lets the constants be factored out of the sum.
        constant = output.shape[-1] * (math.log(self.scale) + 0.5 * math.log(2 * math.pi))
        return torch.square(y - output).sum(-1) * (-0.5 / self.scale**2) - constant


@dataclass(frozen=True, kw_only=True)
class StudentNoise(LocationScale):
    """z is Student-t with `df` degrees of freedom."""

    df: float = 4.0

    def standard_log_prob(self, z: Tensor) -> Tensor:
        """Return the log density of a standard Student-t variable."""
        return student_t_log_prob(z, self.df)

    def standard_cdf(self, z: Tensor) -> Tensor:
        """Return the CDF of a standard Student-t variable."""
        return student_t_cdf(z, self.df)

    def standard_draws(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw standard Student-t samples in the shape of `like`."""
        return student_t_draws(tuple(like.shape), self.df, generator).to(like.dtype)

    def standard_variance(self) -> float:
        """df / (df - 2), infinite for df <= 2."""
        return self.df / (self.df - 2) if self.df > 2 else math.inf

    def standard_entropy(self) -> float:
        """Return the entropy of a standard Student-t variable."""
        a, b = (self.df + 1) / 2, self.df / 2
        digamma = [float(torch.digamma(torch.tensor(v, dtype=torch.float64))) for v in (a, b)]
        log_beta = math.lgamma(0.5) + math.lgamma(b) - math.lgamma(a)
        return a * (digamma[0] - digamma[1]) + 0.5 * math.log(self.df) + log_beta


@dataclass(frozen=True)
class StudentT(StudentNoise, _SharedScale):
    """y = f(x, w) + scale * t with t Student-t of `df` degrees of freedom: robust to outliers.

    Args:
        scale: as for `Gaussian`.
        df: degrees of freedom. The variance is scale^2 df / (df - 2), infinite for df <= 2, and the mean exists for
            df > 1. For smaller df, predictions report the location, which is the median, as their mean.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("df", self.df)


@dataclass(frozen=True, kw_only=True)
class _PredictedScale(LocationScale):
    """A scale sqrt(floor^2 + exp(v(x, w))): the network predicts K locations and then K values v on its last axis."""

    floor: float = 0.0
    outputs_per_target: ClassVar[int] = 2
    predicts_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.floor:
            check_positive("floor", self.floor)

    def location_scale(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the locations and scales sqrt(floor^2 + exp(v))."""
        loc, log_square = output.chunk(2, -1)
        if not self.floor:
            return loc, torch.exp(0.5 * log_square)
        return loc, torch.sqrt(self.floor**2 + torch.exp(log_square))

    def with_scale_factor(self, output: Tensor, log_factor: float) -> Tensor:
        """Return outputs whose scale above the floor is larger by exp(log_factor)."""
        loc, log_square = output.chunk(2, -1)
        return torch.cat([loc, log_square + 2 * log_factor], -1)


@dataclass(frozen=True, kw_only=True)
class HeteroscedasticGaussian(_PredictedScale):
    """y ~ N(m(x, w), floor^2 + exp(v(x, w))): the network predicts K means and then K values v on its last axis.

    Args:
        floor: smallest standard deviation. Without one the density is unbounded: if rows repeat or targets take only a
            few values, the network can make the variance of those rows as close to zero as the prior allows.
    """


@dataclass(frozen=True, kw_only=True)
class HeteroscedasticStudentT(StudentNoise, _PredictedScale):
    """y = m(x, w) + sqrt(floor^2 + exp(v(x, w))) t, with t Student-t: noise that depends on x and has heavy tails.

    The network has the outputs of `HeteroscedasticGaussian`. exp(v) is the squared scale of t; the variance is
    df / (df - 2) times as large.

    Args:
        floor: smallest scale, as for `HeteroscedasticGaussian`.
        df: degrees of freedom; those of about 30 and more are nearly Gaussian.
    """

    df: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("df", self.df)


def _log_std(y: Tensor, weight: Tensor | None) -> list[float]:
    """Return the log standard deviation of every target (N, ..., K) over rows and pixels; 0 for a constant one."""
    values = y.double().reshape(len(y), -1, y.shape[-1])
    v = values.new_ones(len(y)) if weight is None else weight.double()
    share = (v / v.sum() / values.shape[1]).reshape(-1, 1, 1)
    centred = values - (share * values).sum((0, 1))
    std = (share * centred.square()).sum((0, 1)).sqrt()
    # Rounding leaves a constant with a tiny standard deviation.
    std = torch.where(values.amax((0, 1)) > values.amin((0, 1)), std, 0.0)
    return [math.log(s) if s > 0 and math.isfinite(s) else 0.0 for s in std.tolist()]
