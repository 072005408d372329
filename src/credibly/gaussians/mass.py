"""Inverse masses of samplers with a momentum m ~ N(0, M): M^-1 is best near the covariance of the density.

    identity      M^-1 = I                                          None
    diagonal      M^-1 = diag(v)                                    a tensor (D,)
    correlated    M^-1 = S (I + sum_f U_f (diag(l_f) - I) U_f') S   `CorrelatedMass`

S = diag(s). The columns of all U_f are orthonormal, and each U_f (n, k) acts on n consecutive coordinates: one factor
on all of them is a low-rank mass, one per layer a block-diagonal one. In these coordinates powers are those of l_f:

    velocity   M^-1 m = s * (I + sum_f U_f (l_f - 1) U_f') (s * m)
    momentum   M^(1/2) e = (I + sum_f U_f (l_f^(-1/2) - 1) U_f') e / s       for standard normal e
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.gaussians.block_precisions import Blocks, Kronecker
from credibly.gaussians.precisions import Dense, Diagonal, LowRankPlusDiagonal, Precision

# Maximum columns of a factor that is made from a precision: a product with more costs as much as a gradient.
MOST_COLUMNS = 512


class Factor(NamedTuple):
    """The eigenvectors (n, k) and eigenvalues (k,) of a correlation on the coordinates from `start` on."""

    start: int
    vectors: Tensor
    values: Tensor


class CorrelatedMass(NamedTuple):
    """An inverse mass with correlations: s (D,) and its factors."""

    scale: Tensor
    factors: tuple[Factor, ...]

    def velocity(self, momentum: Tensor) -> Tensor:
        """Return M^-1 m, (C, D)."""
        gains = [factor.values - 1 for factor in self.factors]
        return self.scale * self._stretched(self.scale * momentum, gains)

    def momentum(self, noise: Tensor) -> Tensor:
        """Return M^(1/2) e, (C, D)."""
        gains = [factor.values.rsqrt() - 1 for factor in self.factors]
        return self._stretched(noise, gains) / self.scale

    def diagonal(self) -> Tensor:
        """Return the diagonal of M^-1, (D,)."""
        inner = torch.ones_like(self.scale)
        for start, vectors, values in self.factors:
            inner[start : start + len(vectors)] += torch.square(vectors) @ (values - 1)
        return torch.square(self.scale) * inner

    def matrix(self) -> Tensor:
        """Return M^-1 as a dense (D, D) matrix; for small D."""
        return self.velocity(torch.eye(len(self.scale), dtype=self.scale.dtype, device=self.scale.device))

    @property
    def rank(self) -> int:
        """Number of eigenvectors of all factors."""
        return sum(len(factor.values) for factor in self.factors)

    def to(self, device: torch.device, dtype: torch.dtype) -> CorrelatedMass:
        """Return a copy on another device or in another dtype."""
        factors = (Factor(f.start, f.vectors.to(device, dtype), f.values.to(device, dtype)) for f in self.factors)
        return CorrelatedMass(self.scale.to(device, dtype), tuple(factors))

    def padded(self, multiple: int) -> CorrelatedMass:
        """Return a copy with padded ranks: eigenvectors of zeros and eigenvalues of one change nothing."""
        factors = []
        for start, vectors, values in self.factors:
            more = -len(values) % multiple
            factors.append(Factor(start, F.pad(vectors, (0, more)), F.pad(values, (0, more), value=1.0)))
        return CorrelatedMass(self.scale, tuple(factors))

    def _stretched(self, vector: Tensor, gains: list[Tensor]) -> Tensor:
        """Return (I + sum_f U_f diag(gain_f) U_f') v.

        A product per chain: one of all chains would round differently for other numbers of them.
        """
        chains, dim = vector.shape
        total = vector
        for (start, vectors, _), gain in zip(self.factors, gains):
            stop = start + len(vectors)
            each = vectors.expand(chains, *vectors.shape)
            inside = torch.bmm(vector[:, start:stop].unsqueeze(1), each) * gain
            total = total + F.pad(torch.bmm(inside, each.mT).squeeze(1), (start, dim - stop))
        return total


InverseMass = Tensor | CorrelatedMass | None


def velocity(momentum: Tensor, inverse_mass: InverseMass) -> Tensor:
    """Return M^-1 m, (C, D)."""
    if inverse_mass is None:
        return momentum
    return momentum * inverse_mass if isinstance(inverse_mass, Tensor) else inverse_mass.velocity(momentum)


def fresh_momentum(noise: Tensor, inverse_mass: InverseMass) -> Tensor:
    """Return M^(1/2) e, a draw of N(0, M) for standard normal noise e (C, D)."""
    if inverse_mass is None:
        return noise
    return noise * inverse_mass.rsqrt() if isinstance(inverse_mass, Tensor) else inverse_mass.momentum(noise)


def mass_tensors(inverse_mass: InverseMass) -> dict[str, Tensor]:
    """Return the tensors that define an inverse mass; none for the identity."""
    if inverse_mass is None:
        return {}
    if isinstance(inverse_mass, Tensor):
        return {"inverse_mass": inverse_mass}
    found = {"mass.scale": inverse_mass.scale}
    for n, (start, vectors, values) in enumerate(inverse_mass.factors):
        found |= {f"mass.{n}.start": torch.tensor(float(start)), f"mass.{n}.vectors": vectors.contiguous()}
        found[f"mass.{n}.values"] = values
    return found


def mass_of_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> InverseMass:
    """Invert `mass_tensors`.

    Tensors are copied: those in a file may be unaligned, and products of unaligned operands round differently.
    """
    if "inverse_mass" in tensors:
        return tensors["inverse_mass"].to(device)
    if "mass.scale" not in tensors:
        return None
    factors: list[Factor] = []
    while (key := f"mass.{len(factors)}") + ".start" in tensors:
        vectors, values = (tensors[f"{key}.{part}"].to(device).clone() for part in ("vectors", "values"))
        factors.append(Factor(int(tensors[f"{key}.start"]), vectors, values))
    return CorrelatedMass(tensors["mass.scale"].to(device).clone(), tuple(factors))


def covariance_mass(precision: Precision) -> Tensor | CorrelatedMass:
    """Return the covariance of a Gaussian as an inverse mass, in float64.

    It is exact, except that a dense or Kronecker block of more than 512 coordinates keeps its 512 most extreme
    eigenvalues and replaces the others by their median.
    """
    scale, factors = _decompose(precision)
    return CorrelatedMass(scale, tuple(factors)) if factors else torch.square(scale)


def _decompose(precision: Precision) -> tuple[Tensor, list[Factor]]:
    if isinstance(precision, Diagonal):
        return precision.values.double().rsqrt(), []
    if isinstance(precision, LowRankPlusDiagonal):
        std = precision.std.double()
        vectors, values, _ = torch.linalg.svd(precision.factor.double() / std.unsqueeze(1), full_matrices=False)
        return std, [Factor(0, vectors, 1 + torch.square(values))]
    if isinstance(precision, Dense):
        root = precision.root.double()
        scale = root.norm(dim=1)
        vectors, values, _ = torch.linalg.svd(root / scale.unsqueeze(1))
        return most_extreme(scale, vectors, torch.square(values), MOST_COLUMNS)
    if isinstance(precision, Kronecker):
        left, right = precision.left.double(), precision.right.double()
        scale = (1 / precision.scale.double()).repeat(len(left))
        return most_extreme(scale, (left, right), 1 / precision.values.double().flatten(), MOST_COLUMNS)
    if isinstance(precision, Blocks):
        return _joined(precision)
    scale = precision.variance().double().sqrt()
    return scale, []


def most_extreme(
    scale: Tensor, vectors: Tensor | tuple[Tensor, Tensor], values: Tensor, most: int, cutoff: float = 1.0
) -> tuple[Tensor, list[Factor]]:
    """Return scales and the factor of S Q diag(values) Q' S that keeps the eigenvalues furthest from the typical one.

    The typical one is the median over all n coordinates; coordinates without an eigenvector have the eigenvalue 1. It
    becomes part of the scale, so that eigenvalues which are not kept are treated as 1.

    Args:
        scale: S, (n,).
        vectors: orthonormal Q (n, m), or two matrices whose Kronecker product it is.
        values: eigenvalues (m,).
        most: maximum number of eigenvalues to keep.
        cutoff: those within a factor of this are not kept.
    """
    every = torch.cat([values, values.new_ones(len(scale) - len(values))])
    usual = torch.quantile(every.log(), 0.5).exp()
    values, scale = values / usual, scale * usual.sqrt()
    far = values.log().abs()
    keep = far.argsort(descending=True, stable=True)[:most]
    keep = keep[far[keep] > math.log(cutoff)]
    if not len(keep):
        return scale, []
    if isinstance(vectors, Tensor):
        return scale, [Factor(0, vectors[:, keep], values[keep])]
    left, right = vectors
    columns = left[:, keep // len(right)].unsqueeze(1) * right[:, keep % len(right)]
    return scale, [Factor(0, columns.flatten(0, 1), values[keep])]


def _joined(blocks: Blocks) -> tuple[Tensor, list[Factor]]:
    """Return scales and factors of all blocks, whose coordinates may lie anywhere: rows in between are zero."""
    scale = torch.empty(blocks.dim, dtype=torch.float64, device=blocks.variance().device)
    places = torch.arange(blocks.dim, device=scale.device) if blocks.indices is None else blocks.indices
    factors = []
    for part, own in zip(blocks.parts, places.split([part.dim for part in blocks.parts])):
        inner, found = _decompose(part)
        scale[own] = inner
        for first, vectors, values in found:
            rows = own[first : first + len(vectors)]
            start, length = int(rows.min()), int(rows.max() - rows.min()) + 1
            wide = vectors.new_zeros(length, vectors.shape[1])
            wide[rows - start] = vectors
            factors.append(Factor(start, wide, values))
    return scale, factors
