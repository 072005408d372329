"""A family in the units of a Gaussian that is already close: distances from its mean in its standard deviations.

    w = loc + scale * v,   v from the base family

In these units a learning rate means the same for every weight. Without them one step of Adam changes each of the D
entries in a row of the covariance factor by the learning rate, whether the standard deviation it belongs to is 1 or
0.001. Entries of a row share the rate: the noise of the gradient costs about a quarter of its rate in nats for every
entry, so a rate that did not fall with their number would lose more to noise than the covariance can gain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.gaussians.families import Family, FullRank, LowRank, Parts
from credibly.gaussians.precisions import Precision

# Entries of a row of L below which the rate need not fall: 7 beats 12 for networks of 52 to 242 weights.
FULL_RATE_ENTRIES = 7


class Relative(Family):
    """Gaussians of a base family relative to means and standard deviations, (M, D) each.

    phi has the length of the base family's; `parts` are those of the base family, in the units of the weights.
    """

    def __init__(self, base: LowRank | FullRank, loc: Tensor, scale: Tensor) -> None:
        self.base, self.origin, self.scale = base, loc, scale
        if isinstance(base, LowRank):
            self.unit = torch.full((), 1 / math.sqrt(base.rank), dtype=loc.dtype, device=loc.device)
        else:
            dim = loc.shape[-1]
            shared = torch.full((dim, dim), min(1.0, FULL_RATE_ENTRIES / dim), dtype=loc.dtype, device=loc.device)
            self.unit = shared.fill_diagonal_(1.0)

    def parts(self, phi: Tensor | Parts) -> Parts:
        """Split phi into the parts of the base family, in the units of the weights."""
        if not isinstance(phi, Tensor):
            return phi
        loc, *sigma, factor = self.base.parts(phi)
        sigma = [self.scale * own for own in sigma]
        return self.origin + self.scale * loc, *sigma, self.scale.unsqueeze(-1) * self.unit * factor

    def phi(self, parts: Parts) -> Tensor:
        """Return the phi whose parts these are."""
        loc, *sigma, factor = parts
        sigma = [own / self.scale for own in sigma]
        return self.base.phi(
            ((loc - self.origin) / self.scale, *sigma, factor / (self.scale.unsqueeze(-1) * self.unit))
        )

    def start(self) -> Tensor:
        """Return phi of the base family's start with these means and standard deviations."""
        loc, *sigma, factor = self.base.parts(self.base.init(torch.zeros_like(self.origin), 1.0))
        return self.base.phi((loc, *sigma, factor / self.unit))

    def init(self, loc: Tensor, scale: float) -> Tensor:
        """Return phi of Gaussians with the given means and standard deviation."""
        return self.phi(self.base.parts(self.base.init(loc, scale)))

    def size(self, dim: int) -> int:
        """Return the length of the base family's phi."""
        return self.base.size(dim)

    def noise_size(self, dim: int) -> int:
        """Return the noise size of the base family."""
        return self.base.noise_size(dim)

    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """Transform noise as the base family does."""
        return self.base.draw(self.parts(phi), noise)

    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """Return the entropy in the units of the weights."""
        return self.base.entropy(self.parts(phi))

    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Return the variances in the units of the weights."""
        return self.base.variance(self.parts(phi), dim)

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """Return the factor in the units of the weights."""
        return self.base.factor(self.parts(phi))

    def loc(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Return the mean in the units of the weights."""
        return self.parts(phi)[0]

    def precision(self, phi: Tensor) -> Precision:
        """Return the precision in the units of the weights."""
        return self.base.precision(self.base.phi(self.parts(phi)))

    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Return the covariance in the units of the weights."""
        return self.base.covariance(self.parts(phi), dim)
