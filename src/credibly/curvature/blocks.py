"""Blocks of a precision matrix P = H + diag(d): H the likelihood's curvature, d > 0 the prior's precision.

Every block is stored whitened: P = d^1/2 (M + I) d^1/2 with M = d^-1/2 H d^-1/2 = U diag(l) U'. Square roots, inverses
and determinants are then exact, and rescaling the prior or the likelihood only multiplies l and d. A Kronecker block H
= B x A over (outputs, inputs), with one prior precision per input, has M = B x A' with A' = d^-1/2 A d^-1/2: also
exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class Block(ABC):
    """The precision of some coordinates. `source` names them: a layer's name, "rest", "all" or "likelihood"."""

    kind: ClassVar[str]

    def __init__(self, source: str, tensors: Sequence[Tensor]) -> None:
        self.source = source
        # Contiguous, as after loading from a file: results are then bit-for-bit identical.
        self.tensors = tuple(tensor.contiguous() for tensor in tensors)

    @property
    def eigenvalues(self) -> Tensor:
        """l: the ratio of the likelihood's curvature to the prior's in each direction, flat."""
        return self.tensors[0]

    @property
    def prior(self) -> Tensor:
        """d: the prior's precision of every coordinate, flat."""
        return self.tensors[1]

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """Map standard normal noise (S, size) to samples (S, size) of N(0, P^-1)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Return the variances of the coordinates, flat."""

    @abstractmethod
    def likelihood_precision(self) -> Tensor:
        """Return H, (size, size), or (size,) for a diagonal block; for small blocks."""

    @abstractmethod
    def scaled(self, prior: float, likelihood: float) -> Block:
        """Return the block with the two curvatures multiplied by these factors."""

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.prior.numel()

    def log_det(self, prior: float = 1.0, likelihood: float = 1.0) -> float:
        """Return log |P| in float64, with the prior's and the likelihood's curvature multiplied by these factors."""
        whitened = torch.log1p(self.eigenvalues.double() * (likelihood / prior)).sum()
        return float(whitened + (self.prior.double() * prior).log().sum())

    def precision(self) -> Tensor:
        """Return P, (size, size); for small blocks."""
        likelihood = self.likelihood_precision()
        return (torch.diag(likelihood) if likelihood.ndim == 1 else likelihood) + torch.diag(self.prior)

    def covariance(self) -> Tensor:
        """Return P^-1, (size, size); for small blocks."""
        eye = torch.eye(self.size, dtype=self.prior.dtype, device=self.prior.device)
        half = self.root(eye)
        return half.mT @ half

    def to(self, dtype: torch.dtype) -> Block:
        """Return the block in another dtype."""
        return KINDS[self.kind](self.source, [tensor.to(dtype) for tensor in self.tensors])


class DiagonalBlock(Block):
    """Independent coordinates: tensors l and d."""

    kind: ClassVar[str] = "diagonal"

    @classmethod
    def of(cls, source: str, curvature: Tensor, prior: Tensor) -> DiagonalBlock:
        """Build the block from the diagonal of H and d."""
        return cls(source, (curvature / prior, prior))

    def root(self, noise: Tensor) -> Tensor:
        """Scale each coordinate by its standard deviation."""
        return noise * self.variance().sqrt()

    def variance(self) -> Tensor:
        """Return 1 / P."""
        return 1 / (self.prior * (1 + self.eigenvalues))

    def likelihood_precision(self) -> Tensor:
        """Return the diagonal of H."""
        return self.eigenvalues * self.prior

    def scaled(self, prior: float, likelihood: float) -> Block:
        """Return the block with the ratios and d multiplied."""
        return DiagonalBlock(self.source, (self.eigenvalues * (likelihood / prior), self.prior * prior))


class DenseBlock(Block):
    """Any H: tensors l, d and the basis U."""

    kind: ClassVar[str] = "dense"

    @classmethod
    def of(cls, source: str, curvature: Tensor, prior: Tensor, least: float = 0.0) -> DenseBlock:
        """Build the block from H and d. If H includes off-diagonal prior precision, l may be as low as `least` > -1."""
        half = prior.rsqrt()
        values, basis = torch.linalg.eigh(_symmetric(curvature * half * half.unsqueeze(-1)))
        return cls(source, (values.clamp_min(least), prior, basis))

    def root(self, noise: Tensor) -> Tensor:
        """Return d^-1/2 U (l + 1)^-1/2 U' noise: the symmetric root, whatever the basis of degenerate eigenspaces."""
        basis = self.tensors[2]
        return ((noise @ basis) * (1 + self.eigenvalues).rsqrt()) @ basis.mT * self.prior.rsqrt()

    def whitened(self, gradients: Tensor) -> Tensor:
        """Whiten gradients (..., size): their inner products become those under the covariance."""
        return ((gradients * self.prior.rsqrt()) @ self.tensors[2]) * (1 + self.eigenvalues).rsqrt()

    def variance(self) -> Tensor:
        """Return the diagonal of the covariance."""
        return (self.tensors[2].square() / (1 + self.eigenvalues)).sum(-1) / self.prior

    def likelihood_precision(self) -> Tensor:
        """Return H."""
        basis = self.tensors[2] * self.prior.sqrt().unsqueeze(-1)
        return (basis * self.eigenvalues) @ basis.mT

    def scaled(self, prior: float, likelihood: float) -> Block:
        """Return the scaled block; the basis does not change."""
        return DenseBlock(self.source, (self.eigenvalues * (likelihood / prior), self.prior * prior, self.tensors[2]))


class KronBlock(Block):
    """H = B x A of a layer's (outputs, inputs): tensors l_B, U_B, l_A', U_A' and the prior's precision per input."""

    kind: ClassVar[str] = "kron"

    @classmethod
    def of(cls, source: str, outer: Tensor, inner: Tensor, prior: Tensor) -> KronBlock:
        """Build the block from B (out, out), A (in, in) and d (in,)."""
        half = prior.rsqrt()
        outer_values, outer_basis = torch.linalg.eigh(_symmetric(outer))
        inner_values, inner_basis = torch.linalg.eigh(_symmetric(inner * half * half.unsqueeze(-1)))
        return cls(source, (outer_values.clamp_min(0), outer_basis, inner_values.clamp_min(0), inner_basis, prior))

    @property
    def ratios(self) -> Tensor:
        """l as a matrix (out, in)."""
        return self.tensors[0].unsqueeze(-1) * self.tensors[2]

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues."""
        return self.ratios.flatten()

    @property
    def prior(self) -> Tensor:
        """d of every input, repeated for every output."""
        return self.tensors[4].expand(len(self.tensors[0]), -1).flatten()

    def root(self, noise: Tensor) -> Tensor:
        """Apply the symmetric root of (M + I)^-1 in the eigenbases, then d^-1/2."""
        _, outer, _, inner, prior = self.tensors
        rotated = outer.mT @ noise.unflatten(-1, (len(outer), len(inner))) @ inner
        whitened: Tensor = outer @ (rotated * (1 + self.ratios).rsqrt()) @ inner.mT
        return (whitened * prior.rsqrt()).flatten(-2)

    def variance(self) -> Tensor:
        """Return the diagonal of the covariance."""
        _, outer, _, inner, prior = self.tensors
        return ((outer.square() @ (1 / (1 + self.ratios)) @ inner.square().mT) / prior).flatten()

    def likelihood_precision(self) -> Tensor:
        """Return H."""
        return torch.kron(*self.factors())

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B (out, out) and A (in, in) of H = B x A."""
        outer_values, outer, inner_values, inner, prior = self.tensors
        basis = inner * prior.sqrt().unsqueeze(-1)
        return (outer * outer_values) @ outer.mT, (basis * inner_values) @ basis.mT

    def scaled(self, prior: float, likelihood: float) -> Block:
        """Return the scaled block; the bases do not change."""
        outer_values, outer, inner_values, inner, own = self.tensors
        scaled = (outer_values * likelihood, outer, inner_values / prior, inner, own * prior)
        return KronBlock(self.source, scaled)


KINDS: dict[str, type[Block]] = {b.kind: b for b in (DiagonalBlock, DenseBlock, KronBlock)}


def block_from_tensors(kind: str, source: str, tensors: Sequence[Tensor]) -> Block:
    """Rebuild a block from its kind and tensors."""
    return KINDS[kind](source, tensors)


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)
