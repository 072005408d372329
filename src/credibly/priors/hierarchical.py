"""Hierarchical priors: the scale of each layer's weights is unknown, with a hyperprior, and inferred with the weights.

    w_i | s_g ~ base distribution times s_g,    s_g ~ hyperprior,    one s_g per group of parameters

The flat vector has log s_g as a further coordinate, `prior_scale.<group>`, so samplers draw weights and scales jointly.

The joint density of weights and scales has no mode: it grows without limit as s_g and the weights of the group go to 0
together, like s^-n for n weights. Methods that maximise it are rejected. Samplers that start at a mode fix the scales
at the centre of their hyperprior for that fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_positive
from credibly.errors import InputError
from credibly.networks.layout import Entry, Layout
from credibly.priors.elementwise import PRIORS, Normal, Prior, Shrink
from credibly.priors.flat import BoundPrior, Segment, assigned, bind, segments_of
from credibly.priors.gaussian import BoundGaussianPrior, GaussianPrior
from credibly.priors.parameter import Parameter

PREFIX = "prior_scale."


@dataclass(frozen=True)
class _LogScale(Prior):
    """The prior of log s, given that of s > 0; `scale` is its unit."""

    scale: float = 1.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    @property
    def centre(self) -> float:
        """Mode of the density of log s: the logarithm of the unit."""
        return math.log(self.scale)


@dataclass(frozen=True)
class HalfCauchy(_LogScale):
    """s = |c| with c Cauchy of the given scale, as the prior of log s: heavy tails leave room for large weights."""

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """log p(s) + log s = log(2 / pi) + u - log(1 + e^(2u)), with u = log(s / scale), elementwise."""
        u = w - math.log(self.scale)
        return math.log(2 / math.pi) + u - torch.nn.functional.softplus(2 * u)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw log s."""
        u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return (math.log(self.scale) + torch.log(torch.tan(0.5 * math.pi * u.clamp(1e-12, 1 - 1e-12)))).to(dtype)

    @property
    def std(self) -> float:
        """Standard deviation of log s, pi / 2."""
        return math.pi / 2


@dataclass(frozen=True)
class HalfNormal(_LogScale):
    """s = |z| with z normal of the given scale, as the prior of log s."""

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """log p(s) + log s = log sqrt(2 / pi) + u - e^(2u) / 2, with u = log(s / scale), elementwise."""
        u = w - math.log(self.scale)
        return 0.5 * math.log(2 / math.pi) + u - 0.5 * torch.exp(2 * u)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw log s."""
        z = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return (math.log(self.scale) + torch.log(z.abs().clamp_min(1e-300))).to(dtype)

    @property
    def std(self) -> float:
        """Standard deviation of log s, pi / sqrt(8)."""
        return math.pi / math.sqrt(8)


@dataclass(frozen=True)
class Hierarchical(Prior):
    """A prior whose scale is unknown: one scale s per layer, with a hyperprior, inferred with the weights.

    For samplers (`HMC`, `SGHMC`, `SGLD`) and `BayesByBackprop`. May be used for some parameters only, as in
    {"*.weight": Hierarchical(), "*": Normal()}.

    Args:
        scale: the hyperprior of s: `HalfCauchy`, `HalfNormal`, or a `Normal` of log(s), which makes s log-normal.
        base: the prior of the weights at s = 1; with `fan_in`, weights have standard deviation s / sqrt(fan-in).
        per: the group that shares a scale: a "layer" (its weight and bias), a "tensor", or "all" parameters here.
    """

    scale: Prior = field(default_factory=HalfCauchy)
    base: Prior = field(default_factory=Normal)
    per: str = "layer"

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("layer", "tensor", "all"))
        for name in ("scale", "base"):
            value = getattr(self, name)
            if not isinstance(value, Prior) or isinstance(value, Hierarchical):
                raise InputError(name, f"must be a prior, got {value!r}")
        if self.base.centre:
            raise InputError("base", f"must be centred at 0, got {self.base!r}", "Pass a base with loc=0")

    @property
    def fan_in(self) -> bool:  # type: ignore[override]
        """Whether scales are divided by the root of the fan-in."""
        return self.base.fan_in

    def group(self, pattern: str, entry: Entry) -> str:
        """Return the name of the group that a parameter belongs to."""
        if self.per == "all":
            return f"all {pattern}" if pattern != "*" else "all"
        return entry.name if self.per == "tensor" else entry.name.rpartition(".")[0] or "network"

    def log_prob(self, w: Tensor, shrink: Shrink = 1.0) -> Tensor:
        """Return the log density of each element at a scale of 1."""
        return self.base.log_prob(w, shrink)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        shrink: Shrink = 1.0,
    ) -> Tensor:
        """Draw samples at a scale of 1."""
        return self.base.sample(shape, generator, dtype=dtype, shrink=shrink)

    @property
    def std(self) -> float:
        """Standard deviation at the centre of the hyperprior."""
        return self.base.std * math.exp(self.scale.centre)


PRIORS.update({c.__name__: c for c in (HalfCauchy, HalfNormal, Hierarchical)})


def scale_parameters(prior: Any, layout: Layout) -> dict[str, Parameter]:
    """Return the log scales that a prior adds to the flat vector, by name; empty unless it is hierarchical."""
    groups = dict(prior) if isinstance(prior, Mapping) else {"*": prior}
    if not any(isinstance(member, Hierarchical) for member in groups.values()):
        return {}
    found: dict[str, Parameter] = {}
    owners: dict[str, str] = {}
    for entry, pattern in assigned(groups, layout):
        member = groups[pattern]
        if isinstance(member, Hierarchical):
            group = member.group(pattern, entry)
            name = PREFIX + group
            if owners.setdefault(group, pattern) != pattern:
                clash = f"{owners[group]!r} and {pattern!r} both have the scale of {group!r}"
                raise InputError("prior", clash, 'Use per="tensor", or one pattern for both')
            found[name] = Parameter((), member.scale, member.scale.centre)
    return found


class BoundHierarchical(BoundPrior):
    """The prior of the flat vector with unknown scales in it.

    Args:
        segments: the segments of all parameters, each of one tensor, with `Hierarchical` among their priors.
        scales: the coordinate of the log scale of every hierarchical segment, by the segment's first coordinate.
        layout: the flat vector.
    """

    def __init__(self, segments: Sequence[Segment], scales: Mapping[int, int], layout: Layout) -> None:
        super().__init__(list(segments), layout.dim, layout.device, layout.dtype, 0)
        self.scales = dict(scales)
        self.hold = False

    def held(self) -> BoundHierarchical:
        """Return a copy in which the weights exert no pull on the scales, so that it has a mode."""
        other = copy.copy(self)
        other.hold = True
        return other

    def _shrink(self, segment: Segment, theta: Tensor) -> Shrink:
        if segment.start not in self.scales:
            return segment.shrink
        at = self.scales[segment.start]
        log_scale = theta[..., at : at + 1]
        return segment.shrink * torch.exp(log_scale.detach() if self.hold else log_scale)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log p(w | s) + log p(log s): (C, D) -> (C,)."""
        parts = []
        for s in self.segments:
            prior = s.prior.base if isinstance(s.prior, Hierarchical) else s.prior
            parts.append(prior.total_log_prob(theta[..., s.start : s.stop], self._shrink(s, theta)))
        return torch.stack(parts).sum(0)

    def expected_log_prob(
        self, loc: Tensor, variance: Tensor, draws: Tensor, stretch: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """Return the average of log p over draws (M, K, D) of q: there is no closed form."""
        return self.log_prob(draws).mean(1)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw scales, then weights, (count, D)."""
        theta = torch.zeros(count, self.dim, dtype=self.dtype, device=self.device)
        # Scales come last in the flat vector, and first here.
        for s in reversed(self.segments):
            shape = (count, s.stop - s.start)
            theta[:, s.start : s.stop] = s.prior.sample(
                shape, generator, dtype=self.dtype, shrink=self._shrink(s, theta)
            )
        return theta

    @property
    def is_normal(self) -> bool:
        """Always False: given the data, neither weights nor scales have a Normal prior."""
        return False


def bind_prior(
    prior: Prior | Mapping[str, Prior] | GaussianPrior,
    layout: Layout,
    extra: Mapping[str, Prior | tuple[Prior, ...]] | None = None,
) -> BoundPrior | BoundGaussianPrior:
    """Return the prior of a layout's flat vector, as `credibly.priors.flat.bind` does, with unknown scales if any."""
    names = {e.name: e.start for e in layout.entries if e.name.startswith(PREFIX)}
    if isinstance(prior, GaussianPrior) or not names:
        return bind(prior, layout, extra)
    groups = dict(prior) if isinstance(prior, Mapping) else {"*": prior}
    scales = {}
    for entry, pattern in assigned(groups, layout):
        member = groups[pattern]
        if isinstance(member, Hierarchical):
            scales[entry.start] = names[PREFIX + member.group(pattern, entry)]
    return BoundHierarchical(segments_of(groups, layout, extra), scales, layout)


def layer_scales(posterior: Any) -> dict[str, Tensor]:
    """Return the draws of the scales s of a hierarchical prior by group, (chains, draws) each."""
    own = posterior.layout.split(posterior.draws)[1]
    return {name.removeprefix(PREFIX): value.exp() for name, value in own.items() if name.startswith(PREFIX)}
