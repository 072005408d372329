"""The mixture-of-Gaussians likelihood: a mixture density network, for targets with several modes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from credibly.core.checks import check_integer
from credibly.likelihoods.base import Extra, IndependentTargets
from credibly.likelihoods.sampled_fisher import sampled_root

REACH, STEP = 9.0, 0.5  # points of the quadrature of the entropy, in standard deviations of each component
NODES = 3  # nodes of the quadrature between two of them


@dataclass(frozen=True)
class GaussianMixture(IndependentTargets):
    """y ~ sum_m softmax(a)_m N(mu_m, exp(2 b_m)): the network predicts a, mu and b (Bishop 1994).

    The last axis of the output holds M logits a, then M means mu, then M log standard deviations b; for K targets each
    of the 3 M is a group of K.

    The entropy is a quadrature with an error below 1e-6 nats. The Fisher information of `Laplace` is that of 256
    sampled labels per row. An unregularised fit (`MLE`) can place a component on a single row, with a density that has
    no upper limit; the prior of the network prevents that.

    Args:
        components: number of Gaussians, M.
    """

    components: int = 3

    support: ClassVar[str] = "real"

    def __post_init__(self) -> None:
        check_integer("components", self.components)

    @property
    def outputs_per_target(self) -> int:  # type: ignore[override]
        """Logit, mean and log standard deviation of every component."""
        return 3 * self.components

    def parts(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log weights, means and standard deviations, each (C, N, ..., M, K)."""
        logits, mean, log_std = output.unflatten(-1, (3 * self.components, -1)).chunk(3, -2)
        return torch.log_softmax(logits, -2), mean, torch.exp(log_std)

    def _log_density(self, y: Tensor, output: Tensor) -> Tensor:
        """Return log p of y (..., K), elementwise."""
        log_weight, mean, std = self.parts(output)
        z = (y.unsqueeze(-2) - mean) / std
        return torch.logsumexp(log_weight - 0.5 * z.square() - torch.log(std) - 0.5 * math.log(2 * math.pi), -2)

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the log of the mixture density, summed over targets."""
        return self._log_density(y, output).sum(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean, and the mean variance of the components plus the variance of their means."""
        log_weight, means, std = self.parts(output)
        weight = log_weight.exp()
        mean = (weight * means).sum(-2)
        return mean, (weight * (std.square() + (means - mean.unsqueeze(-2)).square())).sum(-2)

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return -E log p in nats per target, by Gauss-Legendre quadrature between points half a std apart."""
        wide = output.double()
        _, means, std = self.parts(wide)
        # Points around every component at its own scale, so that narrow ones are resolved inside wide ones.
        z = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.float64, device=output.device).unsqueeze(-1)
        ends = (means.unsqueeze(-2) + std.unsqueeze(-2) * z).flatten(-3, -2).sort(-2).values
        middle, half = 0.5 * (ends[..., 1:, :] + ends[..., :-1, :]), 0.5 * ends.diff(dim=-2)
        total = torch.zeros_like(means[..., 0, :])
        for centre, width in zip(middle.unbind(-2), half.unbind(-2)):
            for node, weight in zip(*np.polynomial.legendre.leggauss(NODES)):
                log_p = self._log_density(centre + width * float(node), wide)
                total = total - float(weight) * width * log_p.exp() * log_p
        return total.to(output.dtype)

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value), elementwise."""
        log_weight, means, std = self.parts(output)
        found: Tensor = torch.special.ndtr((value.unsqueeze(-2) - means) / std)
        return (log_weight.exp() * found).sum(-2)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw a component per target, then y from it."""
        log_weight, means, std = self.parts(output)
        weight = log_weight.movedim(-2, -1)
        flat = torch.multinomial(weight.exp().reshape(-1, self.components), 1, replacement=True, generator=generator)
        chosen = flat.reshape(*weight.shape[:-1], 1).movedim(-1, -2)
        mean, scale = (part.gather(-2, chosen).squeeze(-2) for part in (means, std))
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + scale * noise

    def fisher_root(self, output: Tensor, extra: Extra) -> Tensor | None:
        """Return a root of the Fisher information from sampled labels."""
        return sampled_root(self, output, extra)
