"""Gaussian shapes made of blocks, as Laplace approximations by layer have them.

kronecker   P = (U x V) diag(values) (U x V)'         of one (O, I) matrix, U (O, O) and V (I, I) orthogonal
blocks      several shapes, one after the other
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.gaussians.precisions import Precision


@dataclass(frozen=True, eq=False)
class Kronecker(Precision):
    """Of an (O, I) matrix R, row after row: r' P r = sum of values * (U' R S V)^2, with U (O, O), V (I, I), values (O, I), S = diag(s)."""

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
        return self._back(self.values * self._turned(vector), self.scale)

    def quadratic(self, offset: Tensor) -> Tensor:
        """The sum of values * (U' R S V)^2."""
        return (self.values * torch.square(self._turned(offset))).flatten(-2).sum(-1)

    def diagonal(self) -> Tensor:
        """U^2 values (V^2)' s^2."""
        turned = torch.square(self.left) @ self.values @ torch.square(self.right).mT
        return (turned * torch.square(self.scale)).flatten()

    def variance(self) -> Tensor:
        """U^2 (1 / values) (V^2)' / s^2."""
        turned = torch.square(self.left) @ (1 / self.values) @ torch.square(self.right).mT
        return (turned / torch.square(self.scale)).flatten()

    def log_det(self) -> Tensor:
        """The bases turn and do not stretch; the scale does."""
        return self.values.log().sum() + 2 * len(self.left) * self.scale.log().sum()

    def draw(self, noise: Tensor) -> Tensor:
        """U (E / sqrt(values)) V' / s."""
        return self._back(noise.unflatten(-1, tuple(self.values.shape)) * self.values.rsqrt(), 1 / self.scale)

    def _turned(self, vector: Tensor) -> Tensor:
        result: Tensor = self.left.mT @ (vector.unflatten(-1, tuple(self.values.shape)) * self.scale) @ self.right
        return result

    def _back(self, turned: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = (self.left @ turned @ self.right.mT) * scale
        return result.flatten(-2)


class Blocks(Precision):
    """Independent blocks, each on coordinates of its own: one after the other, or at `places` (D,), block after block."""

    structure: ClassVar[str] = "blocks"

    def __init__(self, *parts: Precision, places: Tensor | None = None) -> None:
        self.parts = parts
        self.places = places
        self._back = None if places is None else places.argsort()
        self._sizes = [part.dim for part in parts]

    @property
    def dim(self) -> int:
        """The sum of the blocks'."""
        return sum(self._sizes)

    def times(self, vector: Tensor) -> Tensor:
        """Block by block."""
        return self._whole([p.times(v) for p, v in zip(self.parts, self._split(vector))])

    def quadratic(self, offset: Tensor) -> Tensor:
        """The sum over blocks."""
        return torch.stack([p.quadratic(r) for p, r in zip(self.parts, self._split(offset))]).sum(0)

    def diagonal(self) -> Tensor:
        """Block by block."""
        return self._whole([p.diagonal() for p in self.parts])

    def variance(self) -> Tensor:
        """Block by block."""
        return self._whole([p.variance() for p in self.parts])

    def log_det(self) -> Tensor:
        """The sum over blocks."""
        return torch.stack([p.log_det() for p in self.parts]).sum()

    def noise_size(self) -> int:
        """The sum over blocks."""
        return sum(p.noise_size() for p in self.parts)

    def draw(self, noise: Tensor) -> Tensor:
        """Block by block."""
        pieces = noise.split([p.noise_size() for p in self.parts], -1)
        return self._whole([p.draw(e) for p, e in zip(self.parts, pieces)])

    def tensors(self) -> tuple[Tensor, ...]:
        """Those of the blocks, and their places."""
        own = tuple(t for part in self.parts for t in part.tensors())
        return own if self.places is None else (*own, self.places)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same elsewhere, or in another dtype."""
        places = None if self.places is None else self.places.to(device)
        return type(self)(*(part.to(device, dtype) for part in self.parts), places=places)

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = (vector if self.places is None else vector[..., self.places]).split(self._sizes, -1)
        return found

    def _whole(self, pieces: list[Tensor]) -> Tensor:
        joined = torch.cat(pieces, -1)
        return joined if self._back is None else joined[..., self._back]
