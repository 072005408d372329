"""Precisions with block structure, as in layer-wise Laplace approximations.

kronecker   P = (U x V) diag(values) (U x V)'         of one (O, I) matrix, U (O, O) and V (I, I) orthogonal
blocks      block-diagonal, each block of any structure
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.gaussians.precisions import Precision


@dataclass(frozen=True, eq=False)
class Kronecker(Precision):
    """r' P r = sum of values * (U' R S V)^2, where r holds the rows of an (O, I) matrix R.

    U is `left` (O, O), V is `right` (I, I), `values` is (O, I), and S = diag(s) with s = `scale`.
    """

    structure: ClassVar[str] = "kronecker"
    left: Tensor
    right: Tensor
    values: Tensor
    scale: Tensor  # s, (I,)

    @property
    def dim(self) -> int:
        """O I."""
        return self.values.numel()

    def times(self, vector: Tensor) -> Tensor:
        """U (values * (U' R S V)) V' S."""
        return self._from_basis(self.values * self._to_basis(vector), self.scale)

    def quadratic(self, offset: Tensor) -> Tensor:
        """sum values * (U' R S V)^2."""
        return (self.values * torch.square(self._to_basis(offset))).flatten(-2).sum(-1)

    def diagonal(self) -> Tensor:
        """U^2 values (V^2)' s^2."""
        unscaled = torch.square(self.left) @ self.values @ torch.square(self.right).mT
        return (unscaled * torch.square(self.scale)).flatten()

    def variance(self) -> Tensor:
        """U^2 (1 / values) (V^2)' / s^2."""
        unscaled = torch.square(self.left) @ (1 / self.values) @ torch.square(self.right).mT
        return (unscaled / torch.square(self.scale)).flatten()

    def log_det(self) -> Tensor:
        """sum log values + 2 O sum log s, as U and V are orthogonal."""
        return self.values.log().sum() + 2 * len(self.left) * self.scale.log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """U (E / sqrt(values)) V' / s."""
        return self._from_basis(noise.unflatten(-1, tuple(self.values.shape)) * self.values.rsqrt(), 1 / self.scale)

    def _to_basis(self, vector: Tensor) -> Tensor:
        result: Tensor = self.left.mT @ (vector.unflatten(-1, tuple(self.values.shape)) * self.scale) @ self.right
        return result

    def _from_basis(self, coefficients: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = (self.left @ coefficients @ self.right.mT) * scale
        return result.flatten(-2)


class Blocks(Precision):
    """A block-diagonal precision.

    Args:
        parts: the precision of each block.
        indices: the coordinates of the blocks in the flat vector, block after block, (D,); consecutive by default.
    """

    structure: ClassVar[str] = "blocks"

    def __init__(self, *parts: Precision, indices: Tensor | None = None) -> None:
        self.parts = parts
        self.indices = indices
        self._inverse = None if indices is None else indices.argsort()
        self._sizes = [part.dim for part in parts]

    @property
    def dim(self) -> int:
        """Sum of the blocks' dimensions."""
        return sum(self._sizes)

    def times(self, vector: Tensor) -> Tensor:
        """Return P v, block by block."""
        return self._whole([p.times(v) for p, v in zip(self.parts, self._split(vector))])

    def quadratic(self, offset: Tensor) -> Tensor:
        """Return r' P r, summed over blocks."""
        return torch.stack([p.quadratic(r) for p, r in zip(self.parts, self._split(offset))]).sum(0)

    def diagonal(self) -> Tensor:
        """Return the diagonal of P, block by block."""
        return self._whole([p.diagonal() for p in self.parts])

    def variance(self) -> Tensor:
        """Return the diagonal of Sigma, block by block."""
        return self._whole([p.variance() for p in self.parts])

    def log_det(self) -> Tensor:
        """Return log det P, summed over blocks."""
        return torch.stack([p.log_det() for p in self.parts]).sum()

    def noise_size(self) -> int:
        """Return the number of standard normal variates per draw, summed over blocks."""
        return sum(p.noise_size() for p in self.parts)

    def draw(self, noise: Tensor) -> Tensor:
        """Transform noise into draws, block by block."""
        noises = noise.split([p.noise_size() for p in self.parts], -1)
        return self._whole([p.draw(e) for p, e in zip(self.parts, noises)])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the blocks, then the indices."""
        own = tuple(t for part in self.parts for t in part.tensors())
        return own if self.indices is None else (*own, self.indices)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return a copy on another device or in another dtype."""
        indices = None if self.indices is None else self.indices.to(device)
        return type(self)(*(part.to(device, dtype) for part in self.parts), indices=indices)

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        ordered = vector if self.indices is None else vector[..., self.indices]
        blocks: tuple[Tensor, ...] = ordered.split(self._sizes, -1)
        return blocks

    def _whole(self, blocks: list[Tensor]) -> Tensor:
        joined = torch.cat(blocks, -1)
        return joined if self._inverse is None else joined[..., self._inverse]
