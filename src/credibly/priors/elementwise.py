"""Elementwise priors on parameters: immutable densities with their samplers.

A `Problem` takes one of them, or a mapping from name patterns to them; `credibly.priors.flat.bind` lays them out over
the flat vector.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.checks import check_positive
from credibly.core.plain_settings import PlainSettings
from credibly.errors import InputError

Shrink = Tensor | float


class Prior(PlainSettings, ABC):
    """An elementwise density. `shrink` multiplies its scale: 1, or 1/sqrt(fan-in) if `fan_in` is set."""

    fan_in: bool

    @abstractmethod
    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """Return the normalised log density of each element, in the shape of w."""

    def total_log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """Return the log density summed over the last axis."""
        return self.log_prob(w, shrink).sum(-1)

    @abstractmethod
    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw independent samples of the given shape, on the generator's device."""

    @property
    @abstractmethod
    def std(self) -> float:
        """Standard deviation of one element before fan-in scaling; may be infinite."""

    @property
    def centre(self) -> float:
        """Mode, a starting point for optimisers."""
        return float(getattr(self, "loc", 0.0))


@dataclass(frozen=True)
class Normal(Prior):
    """N(loc, scale^2). With `fan_in`, the standard deviation of a weight is scale / sqrt(fan-in)."""

    scale: float = 1.0
    loc: float = 0.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """-(w - loc)^2 / (2 s^2) - log s - log(2 pi)/2, elementwise."""
        s = self.scale * shrink
        return -0.5 * ((w - self.loc) / s) ** 2 - _log(s) - 0.5 * math.log(2 * math.pi)

    def total_log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """Return the sum over the last axis, with constants factored out: every step of every method evaluates it."""
        offset = w - self.loc if self.loc else w
        if isinstance(shrink, Tensor):
            scales = self.scale * shrink
            logs = scales.log()
            logs = logs.sum() if logs.ndim == 1 else logs.expand_as(w).sum(-1)
            constant = logs + 0.5 * w.shape[-1] * math.log(2 * math.pi)
            return -0.5 * torch.square(offset / scales).sum(-1) - constant
        s = self.scale * shrink
        return torch.square(offset).sum(-1) * (-0.5 / s**2) - w.shape[-1] * (math.log(s) + 0.5 * math.log(2 * math.pi))

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw independent normal samples."""
        return self.loc + self.scale * shrink * _randn(shape, generator, dtype)

    @property
    def std(self) -> float:
        """The scale."""
        return self.scale


@dataclass(frozen=True)
class Laplace(Prior):
    """Laplace(loc, scale): density exp(-|w - loc| / s) / (2 s); variance 2 s^2."""

    scale: float = 1.0
    loc: float = 0.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """-|w - loc| / s - log(2 s), elementwise."""
        s = self.scale * shrink
        return -(w - self.loc).abs() / s - _log(2 * s)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw independent Laplace samples, by the inverse CDF."""
        u = _rand(shape, generator) - 0.5
        return self.loc + self.scale * shrink * (-u.sign() * torch.log1p(-2 * u.abs())).to(dtype)

    @property
    def std(self) -> float:
        """sqrt(2) times the scale."""
        return math.sqrt(2) * self.scale


@dataclass(frozen=True)
class StudentT(Prior):
    """Student-t with `df` degrees of freedom, location and scale."""

    df: float = 4.0
    scale: float = 1.0
    loc: float = 0.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        check_positive("df", self.df)
        check_positive("scale", self.scale)

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """-(df + 1)/2 log(1 + z^2/df) + normaliser, with z = (w - loc)/s, elementwise."""
        s = self.scale * shrink
        return student_t_log_prob((w - self.loc) / s, self.df) - _log(s)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw independent Student-t samples."""
        return self.loc + self.scale * shrink * student_t_draws(shape, self.df, generator).to(dtype)

    @property
    def std(self) -> float:
        """scale * sqrt(df / (df - 2)), infinite for df <= 2."""
        return self.scale * math.sqrt(self.df / (self.df - 2)) if self.df > 2 else math.inf


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """pi N(0, scale1^2) + (1 - pi) N(0, scale2^2), the spike and slab of Blundell et al. (2015)."""

    pi: float = 0.5
    scale1: float = 1.0
    scale2: float = math.exp(-6)
    fan_in: bool = False

    def __post_init__(self) -> None:
        check_positive("scale1", self.scale1)
        check_positive("scale2", self.scale2)
        if not 0 < self.pi < 1:
            raise InputError("pi", f"must be strictly between 0 and 1, got {self.pi!r}")

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """Return the log of the mixture density, elementwise."""
        wide = Normal(self.scale1).log_prob(w, shrink) + math.log(self.pi)
        narrow = Normal(self.scale2).log_prob(w, shrink) + math.log1p(-self.pi)
        return torch.logaddexp(wide, narrow)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw a component per element, then a normal sample from it."""
        wide = (_rand(shape, generator) < self.pi).to(dtype)
        return (self.scale2 + (self.scale1 - self.scale2) * wide) * shrink * _randn(shape, generator, dtype)

    @property
    def std(self) -> float:
        """sqrt(pi scale1^2 + (1 - pi) scale2^2)."""
        return math.sqrt(self.pi * self.scale1**2 + (1 - self.pi) * self.scale2**2)


PRIORS: dict[str, type[Prior]] = {c.__name__: c for c in (Normal, Laplace, StudentT, ScaleMixture)}


def student_t_log_prob(z: Tensor, df: float) -> Tensor:
    """Return the log density of a standard Student-t variable."""
    norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return norm - (df + 1) / 2 * torch.log1p(z**2 / df)


def student_t_draws(shape: tuple[int, ...], df: float, generator: torch.Generator) -> Tensor:
    """Draw standard Student-t samples in float64 from two uniforms each (Bailey's polar form, exact for any df > 0)."""
    u = 1.0 - _rand(shape, generator)  # in (0, 1]
    radius = torch.sqrt(df * torch.expm1(-2.0 / df * torch.log(u)))
    return radius * torch.cos(2 * math.pi * _rand(shape, generator))


def _log(value: Shrink) -> Shrink:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _randn(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _rand(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
