"""Priors on parameters: elementwise families, groups by name pattern, fan-in scaling; and the one prior of a flat vector.

A prior here is a small immutable description. `bind` turns it, or a mapping from name patterns to priors, into a
`BoundPrior`: the normalised log density of the whole flat vector, (C, D) -> (C,), with its sampler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.layout import Layout

Shrink = Tensor | float


def positive(name: str, value: float) -> None:
    """Refuses a scale, rate or degree of freedom that is not a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(name, f"found {value!r}", "Pass a positive finite number")


class Prior(ABC):
    """One density for every element, with `scale` multiplied by `shrink` (1, or 1/sqrt(fan-in) where that is on)."""

    fan_in: bool

    @abstractmethod
    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """Elementwise normalised log density, of the shape of w."""

    @abstractmethod
    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Independent draws of the given shape, on the generator's device."""

    @property
    @abstractmethod
    def std(self) -> float:
        """Standard deviation of one element before fan-in scaling (infinite where there is none)."""

    @property
    def centre(self) -> float:
        """The mode, where an optimiser may start."""
        return float(getattr(self, "loc", 0.0))


@dataclass(frozen=True)
class Normal(Prior):
    """N(loc, scale^2). With `fan_in`, the standard deviation of a weight is scale / sqrt(its fan-in)."""

    scale: float = 1.0
    loc: float = 0.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        positive("scale", self.scale)

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """-(w - loc)^2 / (2 s^2) - log s - log(2 pi)/2, elementwise."""
        s = self.scale * shrink
        return -0.5 * ((w - self.loc) / s) ** 2 - _log(s) - 0.5 * math.log(2 * math.pi)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Independent normal draws."""
        return self.loc + self.scale * shrink * _randn(shape, generator, dtype)

    @property
    def std(self) -> float:
        """The scale itself."""
        return self.scale


@dataclass(frozen=True)
class Laplace(Prior):
    """Laplace(loc, scale): density exp(-|w - loc| / s) / (2 s); variance 2 s^2."""

    scale: float = 1.0
    loc: float = 0.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        positive("scale", self.scale)

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
        """By the inverse of the distribution function."""
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
        positive("df", self.df)
        positive("scale", self.scale)

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
        """Independent Student-t draws."""
        return self.loc + self.scale * shrink * student_t_draws(shape, self.df, generator).to(dtype)

    @property
    def std(self) -> float:
        """scale * sqrt(df / (df - 2)), infinite for df <= 2."""
        return self.scale * math.sqrt(self.df / (self.df - 2)) if self.df > 2 else math.inf


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """pi N(0, scale1^2) + (1 - pi) N(0, scale2^2): a spike and a slab (Blundell et al. 2015)."""

    pi: float = 0.5
    scale1: float = 1.0
    scale2: float = math.exp(-6)
    fan_in: bool = False

    def __post_init__(self) -> None:
        positive("scale1", self.scale1)
        positive("scale2", self.scale2)
        if not 0 < self.pi < 1:
            raise InputError("pi", f"found {self.pi!r}", "Pass a number between 0 and 1")

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """log of the mixture density, elementwise, by logaddexp."""
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
        """Each element picks its component, then a normal draw of that width."""
        wide = (_rand(shape, generator) < self.pi).to(dtype)
        return (self.scale2 + (self.scale1 - self.scale2) * wide) * shrink * _randn(shape, generator, dtype)

    @property
    def std(self) -> float:
        """Root of the mixed variances."""
        return math.sqrt(self.pi * self.scale1**2 + (1 - self.pi) * self.scale2**2)


PRIORS: dict[str, type[Prior]] = {c.__name__: c for c in (Normal, Laplace, StudentT, ScaleMixture)}


@dataclass(frozen=True)
class _Segment:
    start: int
    stop: int
    prior: Prior
    shrink: Shrink


class BoundPrior:
    """The prior of a whole flat vector: a few contiguous segments, each of one family."""

    def __init__(self, segments: list[_Segment], dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.segments = tuple(segments)
        self.dim = dim
        self.device = device
        self.dtype = dtype

    def log_prob(self, theta: Tensor) -> Tensor:
        """Normalised log density: (C, D) -> (C,)."""
        if len(self.segments) == 1:
            return self.segments[0].prior.log_prob(theta, self.segments[0].shrink).sum(-1)
        parts = [s.prior.log_prob(theta[..., s.start : s.stop], s.shrink).sum(-1) for s in self.segments]
        return torch.stack(parts).sum(0)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D)."""
        parts = [
            s.prior.sample((count, s.stop - s.start), generator, dtype=self.dtype, shrink=s.shrink)
            for s in self.segments
        ]
        return torch.cat(parts, -1)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every coordinate, (D,)."""
        ones = torch.ones(self.dim, device=self.device, dtype=self.dtype)
        return torch.cat([ones[s.start : s.stop] * s.prior.std * s.shrink for s in self.segments])

    @property
    def loc(self) -> Tensor:
        """Centre of every coordinate, (D,)."""
        ones = torch.ones(self.dim, device=self.device, dtype=self.dtype)
        return torch.cat([ones[s.start : s.stop] * s.prior.centre for s in self.segments])

    @property
    def is_normal(self) -> bool:
        """Whether every coordinate has a normal prior."""
        return all(isinstance(s.prior, Normal) for s in self.segments)


def bind(prior: Prior | Mapping[str, Prior], layout: Layout, extra: Mapping[str, Prior] | None = None) -> BoundPrior:
    """The prior of a layout's flat vector.

    Args:
        prior: one prior for all, or {name pattern: prior}; the first pattern that matches a name decides.
        layout: where each parameter lies.
        extra: priors of the layout's extra tensors by name.
    """
    groups = dict(prior) if isinstance(prior, Mapping) else {"*": prior}
    for pattern, member in groups.items():
        missing = [m for m in ("log_prob", "sample") if not callable(getattr(member, m, None))]
        if missing:
            raise InputError(
                "prior",
                f"{type(member).__name__} for {pattern!r} has no method {' and no '.join(missing)}",
                "Pass one of credibly.priors (Normal, Laplace, StudentT, ScaleMixture) or a Prior of your own",
            )
    names = [e.name for e in layout.entries if e.name not in layout.extra]
    used = set()
    segments: list[_Segment] = []
    for entry in layout.entries:
        if entry.name in layout.extra:
            chosen = (extra or {})[entry.name]
        else:
            chosen_pattern = next((p for p in groups if fnmatchcase(entry.name, p)), None)
            if chosen_pattern is None:
                raise InputError(
                    "prior", f"no pattern matches parameter {entry.name!r}", 'Add one for it, or "*" for the rest'
                )
            used.add(chosen_pattern)
            chosen = groups[chosen_pattern]
        shrink = entry.fan_in**-0.5 if chosen.fan_in else 1.0
        segments.append(_Segment(entry.start, entry.stop, chosen, shrink))
    unused = [p for p in groups if p not in used]
    if unused and not (len(unused) == 1 and unused[0] == "*"):
        raise InputError(
            "prior",
            f"pattern {unused[0]!r} matches no random parameter that an earlier one left",
            f"The names are {', '.join(names[:12])}",
        )
    return BoundPrior(_merge(segments, layout), layout.dim, layout.device, layout.dtype)


def _merge(segments: list[_Segment], layout: Layout) -> list[_Segment]:
    """Neighbours of the same prior become one segment; fan-in factors that differ become a vector."""
    runs: list[list[_Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].prior == segment.prior:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    merged = []
    for run in runs:
        shrinks = {float(s.shrink) for s in run}
        shrink: Shrink = shrinks.pop()
        if shrinks:
            shrink = torch.cat([torch.full((s.stop - s.start,), float(s.shrink), dtype=layout.dtype) for s in run]).to(
                layout.device
            )
        merged.append(_Segment(run[0].start, run[-1].stop, run[0].prior, shrink))
    return merged


def student_t_log_prob(z: Tensor, df: float) -> Tensor:
    """Log density of a standard Student-t variable."""
    norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return norm - (df + 1) / 2 * torch.log1p(z**2 / df)


def student_t_draws(shape: tuple[int, ...], df: float, generator: torch.Generator) -> Tensor:
    """Standard Student-t draws in float64 from two uniforms each (Bailey's polar form, exact for any df > 0)."""
    u = 1.0 - _rand(shape, generator)  # in (0, 1]
    radius = torch.sqrt(df * torch.expm1(-2.0 / df * torch.log(u)))
    return radius * torch.cos(2 * math.pi * _rand(shape, generator))


def _log(value: Shrink) -> Shrink:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _randn(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _rand(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
