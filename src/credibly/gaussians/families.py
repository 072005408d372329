"""Variational families: Gaussians on the flat vector, each described by one flat parameter row phi (M, P).

    mean field   w = mu + sigma * e                     sigma = softplus(rho)
    low rank     w = mu + sigma * e + F f               F is (D, R)
    full rank    w = mu + L e                           L lower triangular, its diagonal softplus(rho)

e and f are standard normal (reparameterisation), so gradients of an expectation pass through the draws.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.errors import InputError
from credibly.gaussians.precisions import Dense, Diagonal, LowRankPlusDiagonal, Precision

Parts = tuple[Tensor, ...]
FULL_RANK_LIMIT = 4_000  # D (D + 1) / 2 numbers: 32 MiB in float32 at this size
FACTOR_SHARE = 0.05  # of a coordinate's variance, that the low-rank factor starts with


class Family(ABC):
    """A family of Gaussians over R^D.

    What takes phi takes its `parts` as well. Whoever asks for several things makes the parts once: then phi is taken apart
    once, and so is put together once in the gradient.
    """

    @abstractmethod
    def parts(self, phi: Tensor | Parts) -> Parts:
        """The mean (M, D) and what the family makes the covariance of."""

    @abstractmethod
    def size(self, dim: int) -> int:
        """Length P of phi."""

    def noise_size(self, dim: int) -> int:
        """Standard normal numbers that one draw takes."""
        return dim

    @abstractmethod
    def init(self, loc: Tensor, scale: float) -> Tensor:
        """phi (M, P) of Gaussians at loc (M, D) with independent coordinates of that standard deviation."""

    @abstractmethod
    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """Draws (M, K, D) from noise (M, K, noise_size)."""

    @abstractmethod
    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """-E_q log q in nats, (M,)."""

    @abstractmethod
    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Variance of every coordinate, (M, D)."""

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """F (M, D, R) with covariance = diagonal + F F'; None where it is diagonal."""
        return None

    @abstractmethod
    def precision(self, phi: Tensor) -> Precision:
        """The shape of the first Gaussian, as a prior has it."""

    def loc(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """The mean, (M, D)."""
        return phi[:, :dim] if isinstance(phi, Tensor) else phi[0]

    @abstractmethod
    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """The whole covariance (M, D, D); for small D."""


@dataclass(frozen=True)
class MeanField(Family):
    """Independent coordinates: phi = (mu, rho)."""

    def size(self, dim: int) -> int:
        """2 D."""
        return 2 * dim

    def init(self, loc: Tensor, scale: float) -> Tensor:
        """mu = loc, softplus(rho) = scale."""
        return torch.cat([loc, torch.full_like(loc, inverse_softplus(scale))], -1)

    def parts(self, phi: Tensor | Parts) -> Parts:
        """mu and sigma."""
        if not isinstance(phi, Tensor):
            return phi
        mu, rho = phi.chunk(2, -1)
        return mu, F.softplus(rho)

    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """mu + sigma e."""
        mu, sigma = self.parts(phi)
        return mu.unsqueeze(1) + sigma.unsqueeze(1) * noise

    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """sum log sigma + D/2 log(2 pi e)."""
        sigma = self.parts(phi)[1]
        return torch.log(sigma).sum(-1) + 0.5 * sigma.shape[-1] * math.log(2 * math.pi * math.e)

    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """sigma^2."""
        return torch.square(self.parts(phi)[1])

    def precision(self, phi: Tensor) -> Precision:
        """1 / sigma^2."""
        return Diagonal(self.parts(phi)[1][0] ** -2)

    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """diag(sigma^2)."""
        return torch.diag_embed(self.variance(phi, dim))


@dataclass(frozen=True)
class LowRank(Family):
    """Covariance diag(sigma^2) + F F': phi = (mu, rho, F)."""

    rank: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise InputError("rank", f"found {self.rank!r}", "Pass a whole number from 1 up")

    def size(self, dim: int) -> int:
        """(2 + R) D."""
        return (2 + self.rank) * dim

    def noise_size(self, dim: int) -> int:
        """D for the diagonal, R for the factor."""
        return dim + self.rank

    def init(self, loc: Tensor, scale: float) -> Tensor:
        """The factor starts with a small share of the variance, in fixed random directions.

        Its expected gradient is a matrix times the factor: at zero, or in directions that it lacks, there would be none.
        """
        members, dim = loc.shape
        factor = torch.randn(dim, self.rank, generator=torch.Generator().manual_seed(0), dtype=loc.dtype)
        factor = (scale * math.sqrt(FACTOR_SHARE) * F.normalize(factor, dim=-1)).to(loc.device)
        rho = torch.full_like(loc, inverse_softplus(scale * math.sqrt(1 - FACTOR_SHARE)))
        return torch.cat([loc, rho, factor.flatten().expand(members, -1)], -1)

    def parts(self, phi: Tensor | Parts) -> Parts:
        """mu, sigma and F."""
        if not isinstance(phi, Tensor):
            return phi
        dim = phi.shape[-1] // (2 + self.rank)
        mu, rho, factor = phi.split([dim, dim, dim * self.rank], -1)
        return mu, F.softplus(rho), factor.reshape(-1, dim, self.rank)

    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """mu + sigma e + F f."""
        mu, sigma, factor = self.parts(phi)
        e, f = noise.split([mu.shape[-1], self.rank], -1)
        result: Tensor = mu.unsqueeze(1) + sigma.unsqueeze(1) * e + f @ factor.mT
        return result

    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """Half the log determinant, by the determinant lemma: R x R instead of D x D."""
        _, sigma, factor = self.parts(phi)
        scaled = factor / sigma.unsqueeze(-1)
        inner = torch.eye(self.rank, dtype=sigma.dtype, device=sigma.device) + scaled.mT @ scaled
        factored = torch.linalg.cholesky_ex(inner).L  # NaN stays NaN, for the training loop to report
        half_log_det = torch.log(sigma).sum(-1) + torch.log(factored.diagonal(dim1=-2, dim2=-1)).sum(-1)
        return half_log_det + 0.5 * sigma.shape[-1] * math.log(2 * math.pi * math.e)

    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """sigma^2 plus the squares of the factor's rows."""
        _, sigma, factor = self.parts(phi)
        spread: Tensor = torch.square(sigma) + torch.square(factor).sum(-1)
        return spread

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """F."""
        return self.parts(phi)[2]

    def precision(self, phi: Tensor) -> Precision:
        """By the inversion lemma."""
        _, sigma, factor = self.parts(phi)
        return LowRankPlusDiagonal.of(sigma[0], factor[0])

    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """diag(sigma^2) + F F'."""
        _, sigma, factor = self.parts(phi)
        return torch.diag_embed(torch.square(sigma)) + factor @ factor.mT


@dataclass(frozen=True)
class FullRank(Family):
    """Any covariance L L': phi = (mu, the rows of L)."""

    def size(self, dim: int) -> int:
        """D + D (D + 1) / 2."""
        if dim > FULL_RANK_LIMIT:
            raise InputError(
                "family", f'"full-rank" for {dim} parameters', f'It is for at most {FULL_RANK_LIMIT}; use "low-rank"'
            )
        return dim + dim * (dim + 1) // 2

    def init(self, loc: Tensor, scale: float) -> Tensor:
        """L = scale * identity."""
        members, dim = loc.shape
        rows, columns = torch.tril_indices(dim, dim, device=loc.device)
        packed = (rows == columns).to(loc.dtype) * inverse_softplus(scale)
        return torch.cat([loc, packed.expand(members, -1)], -1)

    def parts(self, phi: Tensor | Parts) -> Parts:
        """mu and L."""
        if not isinstance(phi, Tensor):
            return phi
        dim = (math.isqrt(8 * phi.shape[-1] + 9) - 3) // 2
        rows, columns = torch.tril_indices(dim, dim, device=phi.device)
        values = phi[:, dim:]
        values = torch.where(rows == columns, F.softplus(values), values)
        factor = torch.zeros(len(phi), dim * dim, dtype=phi.dtype, device=phi.device)
        place = (rows * dim + columns).expand(len(phi), -1)
        return phi[:, :dim], factor.scatter(1, place, values).reshape(-1, dim, dim)

    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """mu + L e."""
        mu, factor = self.parts(phi)
        return mu.unsqueeze(1) + noise @ factor.mT

    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """sum log of L's diagonal + D/2 log(2 pi e)."""
        mu, factor = self.parts(phi)
        return torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1) + 0.5 * mu.shape[-1] * math.log(
            2 * math.pi * math.e
        )

    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Squares of L summed over its rows."""
        return torch.square(self.parts(phi)[1]).sum(-1)

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """L: there is no diagonal beside it."""
        return self.parts(phi)[1]

    def precision(self, phi: Tensor) -> Precision:
        """By the inverse of L."""
        return Dense.of_root(self.parts(phi)[1][0])

    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """L L'."""
        factor = self.parts(phi)[1]
        return factor @ factor.mT


def family(name: str, rank: int) -> Family:
    """The family of that name."""
    families: dict[str, Family] = {"mean-field": MeanField(), "low-rank": LowRank(rank), "full-rank": FullRank()}
    if name not in families:
        raise InputError("family", f"found {name!r}", f"Pass one of {', '.join(families)}")
    return families[name]


def inverse_softplus(value: float) -> float:
    """The x with softplus(x) = value."""
    return value + math.log(-math.expm1(-value))
