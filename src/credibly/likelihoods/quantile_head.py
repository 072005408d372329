"""The quantile likelihood: several quantiles of y by the pinball loss, which never cross.

With outputs turned into increasing quantiles q_1 < .. < q_L at levels t_1 < .. < t_L, the log likelihood of a row is

    (1/L) sum_l log ALD(y; q_l, s_l, t_l),    log ALD = log(t (1 - t) / s) - rho_t(y - q) / s,
    rho_t(u) = u (t - [u < 0])

the mean over levels of asymmetric Laplace log densities: the pinball loss, divided by a scale. It is a working
likelihood (Yu and Moyeed 2001): its maximum has the right quantiles whatever the distribution of y, and one row counts
as one observation. With one level it is the density of y itself. With several, predictions use the distribution that
has exactly these quantiles: uniform between neighbours, and the exponential tails of the first and the last ALD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.core.checks import check_positive
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, IndependentTargets, Parameter
from credibly.likelihoods.shared import row_average
from credibly.priors.elementwise import Normal, Prior


@dataclass(frozen=True)
class Quantiles(IndependentTargets):
    """Quantiles of y at the given levels, by the pinball loss; see the module for the density.

    The last axis of the output holds one value per level: the first quantile, then the gaps to the next ones before a
    softplus, so quantiles cannot cross. For K targets each is a group of K.

    Args:
        levels: increasing levels between 0 and 1.
        scale: the scale of the pinball loss: a positive number, one per level, or "learned", which makes the logarithms
            random parameters of the model, one per level. A fixed small scale makes the posterior of the quantiles
            narrower; a learned one follows the size of the losses.
        scale_prior: the prior of the log scales if they are learned; None is N(log(s) - 2, 1), where s is the standard
            deviation of the training targets.
    """

    levels: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    scale: float | tuple[float, ...] | Literal["learned"] = field(default="learned", kw_only=True)
    scale_prior: Prior | None = field(default=None, kw_only=True)

    support: ClassVar[str] = "real"

    def __post_init__(self) -> None:
        try:
            levels = tuple(float(level) for level in self.levels)
        except (TypeError, ValueError):
            levels = ()
        rising = all(a < b for a, b in pairwise(levels))
        if not levels or not rising or not all(0 < level < 1 for level in levels):
            found = f"must be increasing numbers between 0 and 1, got {self.levels!r}"
            raise InputError("levels", found, "Pass a tuple of them, such as (0.05, 0.5, 0.95), or (0.5,) for one")
        object.__setattr__(self, "levels", levels)
        if isinstance(self.scale, str):
            if self.scale != "learned":
                raise InputError("scale", f'must be positive, one per level, or "learned", got {self.scale!r}')
            return
        scale = tuple(self.scale) if isinstance(self.scale, (tuple, list)) else (self.scale,) * len(levels)
        for value in scale:
            check_positive("scale", value)
        if len(scale) != len(levels):
            raise InputError("scale", f"has {len(scale)} values for {len(levels)} levels", "Pass one, or one per level")
        object.__setattr__(self, "scale", tuple(float(value) for value in scale))

    @property
    def outputs_per_target(self) -> int:  # type: ignore[override]
        """One output per level."""
        return len(self.levels)

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Centre the default prior of learned scales at the standard deviation of y, divided by e^2."""
        if self.scale != "learned" or self.scale_prior is not None:
            return self
        centred = y.double() - row_average(y, weight)
        std = float(row_average(centred.square(), weight).mean().sqrt())
        return replace(self, scale_prior=Normal(1.0, round(math.log(std), 2) - 2 if std > 0 else -2.0))

    def parameters(self) -> dict[str, Parameter]:
        """Return `log_scale`, one value per level, if scales are learned."""
        if self.scale != "learned":
            return {}
        prior = self.scale_prior or Normal(1.0, -2.0)
        return {"log_scale": Parameter((len(self.levels),), prior, prior.centre)}

    # -- quantiles and scales -----------------------------------------------------------------------------------------
    def quantiles(self, output: Tensor) -> Tensor:
        """Return the quantiles in increasing order, (C, N, ..., L, K)."""
        parts = output.unflatten(-1, (len(self.levels), -1))
        first, gaps = parts[..., :1, :], F.softplus(parts[..., 1:, :])
        return torch.cat([first, first + gaps.cumsum(-2)], -2)

    def scales(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the scales, which broadcast against quantiles (C, N, ..., L, K)."""
        if self.scale != "learned":
            return torch.as_tensor(self.scale, dtype=output.dtype, device=output.device).unsqueeze(-1)
        value = torch.exp(extra["log_scale"])
        return value.reshape(*value.shape[:-1], *(1,) * (output.ndim - value.ndim), len(self.levels), 1)

    def _levels(self, like: Tensor) -> Tensor:
        return torch.tensor(self.levels, dtype=like.dtype, device=like.device).unsqueeze(-1)

    # -- the density ---------------------------------------------------------------------------------------------------
    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the mean over levels of the asymmetric Laplace log densities, summed over targets."""
        q, s, t = self.quantiles(output), self.scales(output, extra), self._levels(output)
        away = y.unsqueeze(-2) - q
        pinball = torch.maximum(t * away, (t - 1) * away)
        return (torch.log(t * (1 - t) / s) - pinball / s).mean(-2).sum(-1)

    def _segments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return quantiles (.., L, K), gaps and masses between them (.., L-1, K), and rates of both tails (.., K)."""
        q = self.quantiles(output)
        s, t = self.scales(output, extra).expand_as(q), self._levels(output)
        gaps = q.diff(dim=-2).clamp_min(torch.finfo(q.dtype).tiny)
        return q, gaps, t.diff(dim=0).expand_as(gaps), (1 - t[0]) / s[..., 0, :], t[-1] / s[..., -1, :]

    def predictive_log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the log density of the distribution with these quantiles, summed over targets."""
        q, gaps, mass, low, high = self._segments(output, extra)
        place = (y.unsqueeze(-2) >= q).sum(-2)
        below = math.log(self.levels[0]) + torch.log(low) + low * (y - q[..., 0, :]).clamp_max(0)
        above = math.log(1 - self.levels[-1]) + torch.log(high) - high * (y - q[..., -1, :]).clamp_min(0)
        found = torch.where(place == 0, below, above)
        if len(self.levels) > 1:
            inner = (torch.log(mass) - torch.log(gaps)).gather(
                -2, (place - 1).clamp(0, len(self.levels) - 2).unsqueeze(-2)
            )
            between = (place > 0) & (place < len(self.levels))
            found = torch.where(between, inner.squeeze(-2), found)
        return found.sum(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the distribution with these quantiles."""
        q, gaps, mass, low, high = self._segments(output, extra)
        start, end = self.levels[0], 1 - self.levels[-1]
        centre = q.mean(-2)
        away = q - centre.unsqueeze(-2)
        middle = 0.5 * (away[..., 1:, :] + away[..., :-1, :])
        first, last = away[..., 0, :] - 1 / low, away[..., -1, :] + 1 / high
        mean = start * first + (mass * middle).sum(-2) + end * last
        second = (
            start * (first.square() + low**-2)
            + (mass * (middle.square() + gaps.square() / 12)).sum(-2)
            + end * (last.square() + high**-2)
        )
        return centre + mean, (second - mean.square()).clamp_min(0)

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy of the distribution with these quantiles, per target."""
        _, gaps, mass, low, high = self._segments(output, extra)
        start, end = self.levels[0], 1 - self.levels[-1]
        tails = start * (1 - math.log(start) - torch.log(low)) + end * (1 - math.log(end) - torch.log(high))
        return tails + (mass * (torch.log(gaps) - torch.log(mass))).sum(-2)

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value), elementwise: the level of each quantile at that quantile."""
        q, gaps, mass, low, high = self._segments(output, extra)
        inside = (mass * ((value.unsqueeze(-2) - q[..., :-1, :]) / gaps).clamp(0, 1)).sum(-2)
        below = self.levels[0] * torch.exp(low * (value - q[..., 0, :]).clamp_max(0))
        above = -(1 - self.levels[-1]) * torch.expm1(-high * (value - q[..., -1, :]).clamp_min(0))
        return below + inside + above

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw y by the inverse CDF."""
        q, gaps, mass, low, high = self._segments(output, extra)
        u = torch.rand(q[..., 0, :].shape, generator=generator, dtype=torch.float64, device=q.device)
        t = self._levels(u)
        below = torch.log((u / self.levels[0]).clamp(1e-300, 1)).to(q.dtype) / low
        above = -torch.log(((1 - u) / (1 - self.levels[-1])).clamp(1e-300, 1)).to(q.dtype) / high
        inside = (((u.unsqueeze(-2) - t[:-1]) / mass).clamp(0, 1).to(q.dtype) * gaps).sum(-2)
        return q[..., 0, :] + below + inside + above

    def fisher_root(self, output: Tensor, extra: Extra) -> Tensor | None:
        """Return a root of the expected Hessian of -log_prob, whose second derivative at y is zero or infinite.

        In the quantiles it is diagonal, p(q_l) / (L s_l), with the density p of y averaged over the two sides of q_l.
        With one level it is t (1 - t) / s^2, which is the Fisher information too.
        """
        raw = output.unsqueeze(0)
        q, gaps, mass, low, high = self._segments(raw, extra)
        s = self.scales(raw, extra).expand_as(q)
        left = torch.cat([(self.levels[0] * low).unsqueeze(-2), mass / gaps], -2)
        right = torch.cat([mass / gaps, ((1 - self.levels[-1]) * high).unsqueeze(-2)], -2)
        half = (0.5 * (left + right) / (len(self.levels) * s)).sqrt()
        # Quantile l is the first output plus the softplus of the next l.
        slope = torch.sigmoid(raw.unflatten(-1, (len(self.levels), -1)))
        slope = torch.cat([torch.ones_like(slope[..., :1, :]), slope[..., 1:, :]], -2)
        size = len(self.levels)
        lower = torch.ones(size, size, dtype=output.dtype, device=output.device).tril()
        # (outputs of target k, quantiles of target k): zero between targets.
        root = torch.einsum("...ik,li,...lk->...ilk", slope, lower, half)
        eye = torch.eye(root.shape[-1], dtype=output.dtype, device=output.device)
        return torch.einsum("...ilk,kj->...iklj", root, eye).flatten(-4, -3).flatten(-2).squeeze(0)
