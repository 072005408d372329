"""Variational families: Gaussians on the flat vector, M of them described by the rows of phi (M, P).

    mean field   w = mu + sigma * e                     sigma = softplus(rho)
    low rank     w = mu + sigma * e + F f               F is (D, R)
    full rank    w = mu + L e                           L lower triangular, its diagonal softplus(rho)

e and f are standard normal, so gradients of an expectation pass through the draws (the reparameterisation trick).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.core.checks import check_choice, check_integer
from credibly.errors import InputError
from credibly.gaussians.precisions import Dense, Diagonal, LowRankPlusDiagonal, Precision

Parts = tuple[Tensor, ...]
FULL_RANK_LIMIT = 4_000  # D at which the D (D + 1) / 2 values take 32 MiB in float32
FACTOR_FRACTION = 0.05  # of each coordinate's initial variance, contributed by the low-rank factor


class Family(ABC):
    """A family of Gaussians over R^D.

    Every method that takes phi also takes its `parts`. Computing the parts once for several calls splits phi only once,
    in the forward pass and in the gradient.
    """

    @abstractmethod
    def parts(self, phi: Tensor | Parts) -> Parts:
        """Split phi into the mean (M, D) and the tensors that define the covariance."""

    @abstractmethod
    def phi(self, parts: Parts) -> Tensor:
        """Return the phi (M, P) whose parts these are."""

    @abstractmethod
    def size(self, dim: int) -> int:
        """Return P, the length of a row of phi."""

    def noise_size(self, dim: int) -> int:
        """Return the number of standard normal variates per draw."""
        return dim

    @abstractmethod
    def init(self, loc: Tensor, scale: float) -> Tensor:
        """Return phi (M, P) of Gaussians with means loc (M, D) and standard deviation `scale` in every coordinate."""

    @abstractmethod
    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """Transform standard normal noise (M, K, noise_size) into draws (M, K, D)."""

    @abstractmethod
    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """Return -E_q log q in nats, (M,)."""

    @abstractmethod
    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Return the variance of every coordinate, (M, D)."""

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """Return F (M, D, R) of covariance = diagonal + F F', or None if it is diagonal."""
        return None

    @abstractmethod
    def precision(self, phi: Tensor) -> Precision:
        """Return the precision of the first Gaussian, for use as a prior."""

    def loc(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Return the mean, (M, D)."""
        return phi[:, :dim] if isinstance(phi, Tensor) else phi[0]

    @abstractmethod
    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Return the dense covariance (M, D, D); for small D."""


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

    def phi(self, parts: Parts) -> Tensor:
        """Return (mu, rho)."""
        mu, sigma = parts
        return torch.cat([mu, _inverse_softplus(sigma)], -1)

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
        check_integer("rank", self.rank)

    def size(self, dim: int) -> int:
        """(2 + R) D."""
        return (2 + self.rank) * dim

    def noise_size(self, dim: int) -> int:
        """D for the diagonal, R for the factor."""
        return dim + self.rank

    def init(self, loc: Tensor, scale: float) -> Tensor:
        """Start the factor with a small fraction of the variance, in fixed random directions.

        Its expected gradient is a matrix times the factor, so a zero factor, or a missing direction, would never grow.
        """
        members, dim = loc.shape
        factor = torch.randn(dim, self.rank, generator=torch.Generator().manual_seed(0), dtype=loc.dtype)
        factor = (scale * math.sqrt(FACTOR_FRACTION) * F.normalize(factor, dim=-1)).to(loc.device)
        rho = torch.full_like(loc, inverse_softplus(scale * math.sqrt(1 - FACTOR_FRACTION)))
        return torch.cat([loc, rho, factor.flatten().expand(members, -1)], -1)

    def parts(self, phi: Tensor | Parts) -> Parts:
        """mu, sigma and F."""
        if not isinstance(phi, Tensor):
            return phi
        dim = phi.shape[-1] // (2 + self.rank)
        mu, rho, factor = phi.split([dim, dim, dim * self.rank], -1)
        return mu, F.softplus(rho), factor.reshape(-1, dim, self.rank)

    def phi(self, parts: Parts) -> Tensor:
        """Return (mu, rho, F)."""
        mu, sigma, factor = parts
        return torch.cat([mu, _inverse_softplus(sigma), factor.flatten(1)], -1)

    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """mu + sigma e + F f."""
        mu, sigma, factor = self.parts(phi)
        e, f = noise.split([mu.shape[-1], self.rank], -1)
        result: Tensor = mu.unsqueeze(1) + sigma.unsqueeze(1) * e + f @ factor.mT
        return result

    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """Return the entropy by the determinant lemma: an R x R determinant instead of D x D."""
        _, sigma, factor = self.parts(phi)
        scaled = factor / sigma.unsqueeze(-1)
        inner = torch.eye(self.rank, dtype=sigma.dtype, device=sigma.device) + scaled.mT @ scaled
        factored = torch.linalg.cholesky_ex(inner).L  # propagates NaN instead of raising: the training loop reports it
        half_log_det = torch.log(sigma).sum(-1) + torch.log(factored.diagonal(dim1=-2, dim2=-1)).sum(-1)
        return half_log_det + 0.5 * sigma.shape[-1] * math.log(2 * math.pi * math.e)

    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """sigma^2 plus the squared norms of F's rows."""
        _, sigma, factor = self.parts(phi)
        total: Tensor = torch.square(sigma) + torch.square(factor).sum(-1)
        return total

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """F."""
        return self.parts(phi)[2]

    def precision(self, phi: Tensor) -> Precision:
        """Return the precision, by the inversion lemma."""
        _, sigma, factor = self.parts(phi)
        return LowRankPlusDiagonal.of(sigma[0], factor[0])

    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """diag(sigma^2) + F F'."""
        _, sigma, factor = self.parts(phi)
        return torch.diag_embed(torch.square(sigma)) + factor @ factor.mT


@dataclass(frozen=True)
class FullRank(Family):
    """Any covariance L L': phi = (mu, the rows of L's lower triangle)."""

    def size(self, dim: int) -> int:
        """D + D (D + 1) / 2."""
        if dim > FULL_RANK_LIMIT:
            raise InputError(
                "family",
                f'"full-rank" supports at most {FULL_RANK_LIMIT} parameters, this problem has {dim}',
                'Use "low-rank"',
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
        index = (rows * dim + columns).expand(len(phi), -1)
        return phi[:, :dim], factor.scatter(1, index, values).reshape(-1, dim, dim)

    def phi(self, parts: Parts) -> Tensor:
        """Return mu and the rows of the lower triangle, its diagonal as rho."""
        mu, factor = parts
        rows, columns = torch.tril_indices(*factor.shape[-2:], device=mu.device)
        values = factor[:, rows, columns]
        diagonal = rows == columns
        rho = _inverse_softplus(torch.where(diagonal, values, 1.0))
        return torch.cat([mu, torch.where(diagonal, rho, values)], -1)

    def draw(self, phi: Tensor | Parts, noise: Tensor) -> Tensor:
        """mu + L e."""
        mu, factor = self.parts(phi)
        return mu.unsqueeze(1) + noise @ factor.mT

    def entropy(self, phi: Tensor | Parts) -> Tensor:
        """sum log diag(L) + D/2 log(2 pi e)."""
        mu, factor = self.parts(phi)
        half_log_det = torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
        return half_log_det + 0.5 * mu.shape[-1] * math.log(2 * math.pi * math.e)

    def variance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """Squared norms of L's rows."""
        return torch.square(self.parts(phi)[1]).sum(-1)

    def factor(self, phi: Tensor | Parts) -> Tensor | None:
        """L; the diagonal part is zero."""
        return self.parts(phi)[1]

    def precision(self, phi: Tensor) -> Precision:
        """Return the precision, by the inverse of L."""
        return Dense.of_root(self.parts(phi)[1][0])

    def covariance(self, phi: Tensor | Parts, dim: int) -> Tensor:
        """L L'."""
        factor = self.parts(phi)[1]
        return factor @ factor.mT


def family(name: str, rank: int) -> MeanField | LowRank | FullRank:
    """Return the family with the given name."""
    families: dict[str, MeanField | LowRank | FullRank] = {
        "mean-field": MeanField(),
        "low-rank": LowRank(rank),
        "full-rank": FullRank(),
    }
    check_choice("family", name, families)
    return families[name]


def inverse_softplus(value: float) -> float:
    """Return the x with softplus(x) = value."""
    return value + math.log(-math.expm1(-value))


def _inverse_softplus(values: Tensor) -> Tensor:
    return values + torch.log(-torch.expm1(-values))
