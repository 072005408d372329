"""Precision matrices P = Sigma^-1 of Gaussians over the flat vector, in the structures of the posteriors.

    diagonal    P = diag(p)
    low-rank    Sigma = diag(s^2) + F F'                  F is (D, R); P by the inversion lemma
    dense       Sigma = L L',  P = K' K,  K = L^-1

`block_precisions` has the block structures. All are immutable, and take vectors with any leading axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.errors import InputError


class Precision(ABC):
    """Precision P of a Gaussian over R^D, with covariance Sigma = P^-1."""

    structure: ClassVar[str]

    @property
    @abstractmethod
    def dim(self) -> int:
        """D."""

    @abstractmethod
    def times(self, vector: Tensor) -> Tensor:
        """P v, (..., D)."""

    @abstractmethod
    def quadratic(self, offset: Tensor) -> Tensor:
        """r' P r: (..., D) -> (...)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of P, (D,)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of Sigma, (D,)."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """log det P, ()."""

    def noise_size(self) -> int:
        """Return the number of standard normal variates per draw."""
        return self.dim

    @abstractmethod
    def draw(self, noise: Tensor) -> Tensor:
        """Transform standard normal noise (..., noise_size) into draws (..., D) of N(0, Sigma)."""

    def matrix(self) -> Tensor:
        """Return P as a dense (D, D) matrix; for small D."""
        diagonal = self.diagonal()
        return self.times(torch.eye(self.dim, dtype=diagonal.dtype, device=diagonal.device))

    def trace_with(self, variance: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return tr(P S), (M,), of covariances S with diagonal `variance` (M, D).

        S is diagonal without a factor F (M, D, R); with one, S = diag(.) + F F'.
        """
        if factor is None:
            return (self.diagonal() * variance).sum(-1)
        rest = variance - torch.square(factor).sum(-1)
        return (self.diagonal() * rest).sum(-1) + self.quadratic(factor.mT).sum(-1)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that define the precision, in a fixed order."""
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return a copy on another device or in another dtype."""
        return type(self)(*(t.to(device, dtype) for t in self.tensors()))


@dataclass(frozen=True, eq=False)
class Diagonal(Precision):
    """Independent coordinates with precisions `values` (D,)."""

    structure: ClassVar[str] = "diagonal"
    values: Tensor

    @property
    def dim(self) -> int:
        """D."""
        return len(self.values)

    def times(self, vector: Tensor) -> Tensor:
        """p * v."""
        return self.values * vector

    def quadratic(self, offset: Tensor) -> Tensor:
        """sum p r^2."""
        return (self.values * torch.square(offset)).sum(-1)

    def diagonal(self) -> Tensor:
        """p."""
        return self.values

    def variance(self) -> Tensor:
        """1 / p."""
        return 1 / self.values

    def log_det(self) -> Tensor:
        """sum log p."""
        return self.values.log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """e / sqrt(p)."""
        return noise * self.values.rsqrt()


@dataclass(frozen=True, eq=False)
class LowRankPlusDiagonal(Precision):
    """Sigma = diag(std^2) + factor factor'. `inner` (D, R) is W in P = diag(std^-2) - W W', computed by `of`."""

    structure: ClassVar[str] = "low-rank"
    std: Tensor
    factor: Tensor
    inner: Tensor
    half_log_det: Tensor

    @classmethod
    def of(cls, std: Tensor, factor: Tensor) -> LowRankPlusDiagonal:
        """Build it from s = std (D,) and F = factor (D, R), inverting in float64."""
        s, f = std.double(), factor.double()
        scaled = f / s.unsqueeze(-1)
        small = torch.eye(f.shape[-1], dtype=s.dtype, device=s.device) + scaled.mT @ scaled
        root = torch.linalg.cholesky(small)
        inner = torch.linalg.solve_triangular(root, (scaled / s.unsqueeze(-1)).mT, upper=False).mT
        half = -s.log().sum() - root.diagonal().log().sum()
        return cls(std, factor, inner.to(std.dtype), half.to(std.dtype))

    @property
    def dim(self) -> int:
        """D."""
        return len(self.std)

    def times(self, vector: Tensor) -> Tensor:
        """v / s^2 - W W' v."""
        result: Tensor = vector / torch.square(self.std) - (vector @ self.inner) @ self.inner.mT
        return result

    def quadratic(self, offset: Tensor) -> Tensor:
        """|r / s|^2 - |W' r|^2."""
        return torch.square(offset / self.std).sum(-1) - torch.square(offset @ self.inner).sum(-1)

    def diagonal(self) -> Tensor:
        """1 / s^2 minus the squared norms of W's rows."""
        return self.std**-2 - torch.square(self.inner).sum(-1)

    def variance(self) -> Tensor:
        """s^2 plus the squared norms of F's rows."""
        return torch.square(self.std) + torch.square(self.factor).sum(-1)

    def log_det(self) -> Tensor:
        """Return log det P, by the determinant lemma."""
        return 2 * self.half_log_det

    def noise_size(self) -> int:
        """D for the diagonal, R for the factor."""
        return self.dim + self.factor.shape[-1]

    def draw(self, noise: Tensor) -> Tensor:
        """s e + F f."""
        e, f = noise.split([self.dim, self.factor.shape[-1]], -1)
        result: Tensor = self.std * e + f @ self.factor.mT
        return result


@dataclass(frozen=True, eq=False)
class Dense(Precision):
    """Sigma = L L' with L = root, P = K' K with K = whitener = L^-1, both (D, D)."""

    structure: ClassVar[str] = "dense"
    root: Tensor
    whitener: Tensor

    @classmethod
    def of_root(cls, root: Tensor) -> Dense:
        """Build it from the lower Cholesky factor of the covariance."""
        lower = root.double()
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        return cls(root, torch.linalg.solve_triangular(lower, identity, upper=False).to(root.dtype))

    @classmethod
    def of_precision(cls, precision: Tensor) -> Dense:
        """Build it from the precision matrix."""
        lower = _cholesky(precision.double(), "precision")
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower, identity, upper=False).mT
        return cls(root.to(precision.dtype), lower.mT.to(precision.dtype))

    @classmethod
    def of_covariance(cls, covariance: Tensor) -> Dense:
        """Build it from the covariance matrix."""
        return cls.of_root(_cholesky(covariance.double(), "covariance").to(covariance.dtype))

    @property
    def dim(self) -> int:
        """D."""
        return len(self.root)

    def times(self, vector: Tensor) -> Tensor:
        """K' K v."""
        result: Tensor = (vector @ self.whitener.mT) @ self.whitener
        return result

    def quadratic(self, offset: Tensor) -> Tensor:
        """|K r|^2."""
        return torch.square(offset @ self.whitener.mT).sum(-1)

    def diagonal(self) -> Tensor:
        """Squared norms of K's columns."""
        return torch.square(self.whitener).sum(0)

    def variance(self) -> Tensor:
        """Squared norms of L's rows."""
        return torch.square(self.root).sum(-1)

    def log_det(self) -> Tensor:
        """2 sum log |diag K|, as K is triangular."""
        return 2 * self.whitener.diagonal().abs().log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """L e."""
        result: Tensor = noise @ self.root.mT
        return result


def _cholesky(matrix: Tensor, name: str) -> Tensor:
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise InputError(name, "must be positive definite", "Use a diagonal one, or more draws than parameters")
    return lower
