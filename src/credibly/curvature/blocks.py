"""Blocks of a precision matrix P = H + diag(d): H the likelihood's curvature, d > 0 the prior's precision.

Every block is kept in whitened form, P = d^1/2 (M + I) d^1/2 with M = d^-1/2 H d^-1/2 = U diag(l) U', so that roots, inverses
and determinants are exact, and other scales of prior or likelihood only multiply l and d. A Kronecker block H = B x A over
(outputs, inputs), with one prior precision for each input, has M = B x A' with A' = d^-1/2 A d^-1/2: also exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class Block(ABC):
    """The precision of some coordinates. `source` says which: a layer's name, "rest", "all" or "likelihood"."""

    kind: ClassVar[str]

    def __init__(self, source: str, pieces: Sequence[Tensor]) -> None:
        self.source = source
        self.pieces = tuple(piece.contiguous() for piece in pieces)  # as they come back from a file, for the same bits

    @property
    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """l: how many times the data's curvature is the prior's, in each direction, flat."""

    @property
    @abstractmethod
    def prior(self) -> Tensor:
        """d: the prior's precision of every coordinate, flat."""

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """Deviations (S, size) with this block's covariance from standard normal noise (S, size)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Variances of the coordinates, flat."""

    @abstractmethod
    def likelihood_precision(self) -> Tensor:
        """H, (size, size), or (size,) of a diagonal block; for small ones."""

    @abstractmethod
    def scaled(self, prior: float, likelihood: float) -> Block:
        """The block with both curvatures multiplied."""

    @property
    def size(self) -> int:
        """Coordinates in it."""
        return self.prior.numel()

    def log_det(self, prior: float = 1.0, likelihood: float = 1.0) -> float:
        """log |P| in float64 with the prior's precision and the likelihood's curvature multiplied by these factors."""
        whitened = torch.log1p(self.eigenvalues.double() * (likelihood / prior)).sum()
        return float(whitened + (self.prior.double() * prior).log().sum())

    def precision(self) -> Tensor:
        """P, (size, size); for small blocks."""
        found = self.likelihood_precision()
        return (torch.diag(found) if found.ndim == 1 else found) + torch.diag(self.prior)

    def covariance(self) -> Tensor:
        """P^-1, (size, size); for small blocks."""
        eye = torch.eye(self.size, dtype=self.prior.dtype, device=self.prior.device)
        half = self.root(eye)
        return half.mT @ half

    def to(self, dtype: torch.dtype) -> Block:
        """The same in another floating type."""
        return KINDS[self.kind](self.source, [piece.to(dtype) for piece in self.pieces])


class DiagonalBlock(Block):
    """Independent coordinates: pieces l and d."""

    kind: ClassVar[str] = "diagonal"

    @classmethod
    def of(cls, source: str, curvature: Tensor, prior: Tensor) -> DiagonalBlock:
        """From the diagonal of H and d."""
        return cls(source, (curvature / prior, prior))

    @property
    def eigenvalues(self) -> Tensor:
        """The ratios themselves."""
        return self.pieces[0]

    @property
    def prior(self) -> Tensor:
        """d."""
        return self.pieces[1]

    def root(self, noise: Tensor) -> Tensor:
        """Each coordinate by its deviation."""
        return noise * self.variance().sqrt()

    def variance(self) -> Tensor:
        """1 / P."""
        return 1 / (self.prior * (1 + self.eigenvalues))

    def likelihood_precision(self) -> Tensor:
        """The diagonal of H."""
        return self.eigenvalues * self.prior

    def scaled(self, prior: float, likelihood: float) -> Block:
        """Ratios and d multiplied."""
        return DiagonalBlock(self.source, (self.eigenvalues * (likelihood / prior), self.prior * prior))


class DenseBlock(Block):
    """Any H: pieces l, d and the basis U."""

    kind: ClassVar[str] = "dense"

    @classmethod
    def of(cls, source: str, curvature: Tensor, prior: Tensor, least: float = 0.0) -> DenseBlock:
        """From H and d. Where H holds what lies beside a prior's diagonal too, l may be as low as `least` > -1."""
        half = prior.rsqrt()
        values, basis = torch.linalg.eigh(_symmetric(curvature * half * half.unsqueeze(-1)))
        return cls(source, (values.clamp_min(least), prior, basis))

    @property
    def eigenvalues(self) -> Tensor:
        """Of M."""
        return self.pieces[0]

    @property
    def prior(self) -> Tensor:
        """d."""
        return self.pieces[1]

    def root(self, noise: Tensor) -> Tensor:
        """d^-1/2 U (l + 1)^-1/2 U' noise: the symmetric root, which does not depend on how degenerate axes are chosen."""
        basis = self.pieces[2]
        return ((noise @ basis) * (1 + self.eigenvalues).rsqrt()) @ basis.mT * self.prior.rsqrt()

    def whitened(self, gradients: Tensor) -> Tensor:
        """Gradients (..., size) turned and scaled so that their inner products are those under the covariance."""
        return ((gradients * self.prior.rsqrt()) @ self.pieces[2]) * (1 + self.eigenvalues).rsqrt()

    def variance(self) -> Tensor:
        """The diagonal of the covariance."""
        return (self.pieces[2].square() / (1 + self.eigenvalues)).sum(-1) / self.prior

    def likelihood_precision(self) -> Tensor:
        """H."""
        turned = self.pieces[2] * self.prior.sqrt().unsqueeze(-1)
        return (turned * self.eigenvalues) @ turned.mT

    def scaled(self, prior: float, likelihood: float) -> Block:
        """The basis stays."""
        return DenseBlock(self.source, (self.eigenvalues * (likelihood / prior), self.prior * prior, self.pieces[2]))


class KronBlock(Block):
    """H = B x A of a layer's (outputs, inputs): pieces l_B, U_B, l_A', U_A' and the prior's precision of each input."""

    kind: ClassVar[str] = "kron"

    @classmethod
    def of(cls, source: str, outer: Tensor, inner: Tensor, prior: Tensor) -> KronBlock:
        """From B (out, out), A (in, in) and d (in,)."""
        half = prior.rsqrt()
        low, basis = torch.linalg.eigh(_symmetric(outer))
        inside, inside_basis = torch.linalg.eigh(_symmetric(inner * half * half.unsqueeze(-1)))
        return cls(source, (low.clamp_min(0), basis, inside.clamp_min(0), inside_basis, prior))

    @property
    def ratios(self) -> Tensor:
        """l as a matrix (out, in)."""
        return self.pieces[0].unsqueeze(-1) * self.pieces[2]

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' own."""
        return self.ratios.flatten()

    @property
    def prior(self) -> Tensor:
        """d of every input, for every output."""
        return self.pieces[4].expand(len(self.pieces[0]), -1).flatten()

    def root(self, noise: Tensor) -> Tensor:
        """The symmetric root of (M + I)^-1 by the bases, then d^-1/2."""
        _, outer, _, inner, prior = self.pieces
        turned = outer.mT @ noise.unflatten(-1, (len(outer), len(inner))) @ inner
        back: Tensor = outer @ (turned * (1 + self.ratios).rsqrt()) @ inner.mT
        return (back * prior.rsqrt()).flatten(-2)

    def variance(self) -> Tensor:
        """The diagonal of the covariance."""
        _, outer, _, inner, prior = self.pieces
        return ((outer.square() @ (1 / (1 + self.ratios)) @ inner.square().mT) / prior).flatten()

    def likelihood_precision(self) -> Tensor:
        """H."""
        return torch.kron(*self.factors())

    def factors(self) -> tuple[Tensor, Tensor]:
        """B (out, out) and A (in, in) of H = B x A."""
        low, outer, inside, inner, prior = self.pieces
        turned = inner * prior.sqrt().unsqueeze(-1)
        return (outer * low) @ outer.mT, (turned * inside) @ turned.mT

    def scaled(self, prior: float, likelihood: float) -> Block:
        """The bases stay."""
        low, outer, inside, inner, own = self.pieces
        return KronBlock(self.source, (low * likelihood, outer, inside / prior, inner, own * prior))


KINDS: dict[str, type[Block]] = {b.kind: b for b in (DiagonalBlock, DenseBlock, KronBlock)}


def from_pieces(kind: str, source: str, pieces: Sequence[Tensor]) -> Block:
    """A block from what was stored of it."""
    return KINDS[kind](source, pieces)


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)
