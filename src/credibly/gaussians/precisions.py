"""Gaussian shapes over the flat vector, by their precision P = Sigma^-1, in the forms that posteriors have them.

    diagonal    P = diag(p)
    low-rank    Sigma = diag(s^2) + F F'                  F is (D, R); P by the inversion lemma
    dense       Sigma = L L',  P = K' K,  K = L^-1

`block_precisions` has those that are made of blocks. All are immutable, and take offsets with any leading axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.errors import InputError


class Precision(ABC):
    """The shape of a Gaussian over R^D around its mean."""

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
        """Standard normal numbers that one draw takes."""
        return self.dim

    @abstractmethod
    def draw(self, noise: Tensor) -> Tensor:
        """Draws (..., D) of N(0, Sigma) from standard normal numbers (..., noise_size)."""

    def matrix(self) -> Tensor:
        """P itself, (D, D); for small D."""
        diagonal = self.diagonal()
        return self.times(torch.eye(self.dim, dtype=diagonal.dtype, device=diagonal.device))

    def trace_with(self, variance: Tensor, factor: Tensor | None = None) -> Tensor:
        """tr(P S), (M,), for covariances S with that diagonal (M, D) and, where they are not diagonal, S = diag(.) + F F'."""
        if factor is None:
            return (self.diagonal() * variance).sum(-1)
        rest = variance - torch.square(factor).sum(-1)
        return (self.diagonal() * rest).sum(-1) + self.quadratic(factor.mT).sum(-1)

    def tensors(self) -> tuple[Tensor, ...]:
        """What it is made of, in a fixed order."""
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same elsewhere, or in another dtype."""
        return type(self)(*(t.to(device, dtype) for t in self.tensors()))


@dataclass(frozen=True, eq=False)
class Diagonal(Precision):
    """Independent coordinates of precision `values` (D,)."""

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
        """The sum of p r^2."""
        return (self.values * torch.square(offset)).sum(-1)

    def diagonal(self) -> Tensor:
        """p."""
        return self.values

    def variance(self) -> Tensor:
        """1 / p."""
        return 1 / self.values

    def log_det(self) -> Tensor:
        """The sum of the logarithms."""
        return self.values.log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """e / sqrt(p)."""
        return noise * self.values.rsqrt()


@dataclass(frozen=True, eq=False)
class LowRankPlusDiagonal(Precision):
    """Sigma = diag(deviation^2) + factor factor'. `inner` (D, R) is W of P = diag(deviation^-2) - W W', made by `of`."""

    structure: ClassVar[str] = "low-rank"
    deviation: Tensor
    factor: Tensor
    inner: Tensor
    half_log_det: Tensor

    @classmethod
    def of(cls, deviation: Tensor, factor: Tensor) -> LowRankPlusDiagonal:
        """From the deviations (D,) and the factor (D, R); the inversion is done in float64."""
        s, f = deviation.double(), factor.double()
        scaled = f / s.unsqueeze(-1)
        small = torch.eye(f.shape[-1], dtype=s.dtype, device=s.device) + scaled.mT @ scaled
        root = torch.linalg.cholesky(small)
        inner = torch.linalg.solve_triangular(root, (scaled / s.unsqueeze(-1)).mT, upper=False).mT
        half = -s.log().sum() - root.diagonal().log().sum()
        return cls(deviation, factor, inner.to(deviation.dtype), half.to(deviation.dtype))

    @property
    def dim(self) -> int:
        """D."""
        return len(self.deviation)

    def times(self, vector: Tensor) -> Tensor:
        """v / s^2 - W W' v."""
        result: Tensor = vector / torch.square(self.deviation) - (vector @ self.inner) @ self.inner.mT
        return result

    def quadratic(self, offset: Tensor) -> Tensor:
        """|r / s|^2 - |W' r|^2."""
        return torch.square(offset / self.deviation).sum(-1) - torch.square(offset @ self.inner).sum(-1)

    def diagonal(self) -> Tensor:
        """1 / s^2 less the squares of W's rows."""
        return self.deviation**-2 - torch.square(self.inner).sum(-1)

    def variance(self) -> Tensor:
        """s^2 plus the squares of F's rows."""
        return torch.square(self.deviation) + torch.square(self.factor).sum(-1)

    def log_det(self) -> Tensor:
        """By the determinant lemma."""
        return 2 * self.half_log_det

    def noise_size(self) -> int:
        """D for the diagonal, R for the factor."""
        return self.dim + self.factor.shape[-1]

    def draw(self, noise: Tensor) -> Tensor:
        """s e + F f."""
        e, f = noise.split([self.dim, self.factor.shape[-1]], -1)
        result: Tensor = self.deviation * e + f @ self.factor.mT
        return result


@dataclass(frozen=True, eq=False)
class Dense(Precision):
    """Sigma = root root' and P = whitener' whitener, both (D, D)."""

    structure: ClassVar[str] = "dense"
    root: Tensor
    whitener: Tensor

    @classmethod
    def of_root(cls, root: Tensor) -> Dense:
        """From a lower triangular root of the covariance."""
        own = root.double()
        unit = torch.eye(len(own), dtype=own.dtype, device=own.device)
        return cls(root, torch.linalg.solve_triangular(own, unit, upper=False).to(root.dtype))

    @classmethod
    def of_precision(cls, precision: Tensor) -> Dense:
        """From the precision matrix."""
        lower = _cholesky(precision.double(), "precision")
        unit = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower, unit, upper=False).mT
        return cls(root.to(precision.dtype), lower.mT.to(precision.dtype))

    @classmethod
    def of_covariance(cls, covariance: Tensor) -> Dense:
        """From the covariance matrix."""
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
        """Squares of K summed over its columns."""
        return torch.square(self.whitener).sum(0)

    def variance(self) -> Tensor:
        """Squares of L summed over its rows."""
        return torch.square(self.root).sum(-1)

    def log_det(self) -> Tensor:
        """K is triangular."""
        return 2 * self.whitener.diagonal().abs().log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """L e."""
        result: Tensor = noise @ self.root.mT
        return result


def _cholesky(matrix: Tensor, name: str) -> Tensor:
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise InputError(name, "the matrix is not positive definite", "Use a diagonal, or more draws than parameters")
    return lower
