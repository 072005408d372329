"""Moments of SGD's iterates, and the last deviations from their running mean, which define SWAG's Gaussian."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from credibly.inference.adaptation import Welford
from credibly.inference.module_leaves import LARGE

# Variance floor, so that a weight that never moved has a density.
LEAST_VARIANCE = 1e-30
# Number of weights of a large network that are processed at a time.
CHUNK = 2**20


class Iterates:
    """Moments of the iterates in float64, and the last deviations from the running mean."""

    def __init__(self, rank: int, dim: int, device: torch.device) -> None:
        self.running = Welford(1, dim, device)
        self.deviations: deque[Tensor] = deque(maxlen=rank)
        self.losses: list[float] = []

    def add(self, theta: Tensor, loss: float = math.nan) -> None:
        """Add an iterate (D,)."""
        self.running.update(theta.unsqueeze(0))
        self.deviations.append((theta.double() - self.running.mean[0]).to(theta.dtype))
        self.losses.append(loss)

    def phi(self, dtype: torch.dtype) -> Tensor:
        """Return the parameters of the low-rank family, (1, P)."""
        rho = _rho(self.running.squares[0] / self.running.count)
        dim, rank = len(rho), len(self.deviations)
        phi = torch.empty(1, (2 + rank) * dim, dtype=dtype, device=rho.device)
        phi[0, :dim], phi[0, dim : 2 * dim] = self.running.mean[0], rho
        factor = phi[0, 2 * dim :].view(dim, rank)
        # Column by column, because a stack of them would be another copy of the largest tensor.
        for k, deviation in enumerate(self.deviations):
            factor[:, k] = deviation.double() / math.sqrt(2 * (rank - 1))
        return phi


class LargeIterates(Iterates):
    """`Iterates` of a large network: deviations are written to the result immediately, in chunks of the weights."""

    def __init__(self, rank: int, dim: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(rank, dim, device)
        self.rank, self.dim = rank, dim
        self.values = torch.zeros(1, (2 + rank) * dim, dtype=dtype, device=device)
        self.factor = self.values[0, 2 * dim :].view(dim, rank)

    def add(self, theta: Tensor, loss: float = math.nan) -> None:
        """Add an iterate (D,)."""
        running = self.running
        column = running.count % self.rank
        running.count += 1
        for start in range(0, self.dim, CHUNK):
            part = slice(start, start + CHUNK)
            here, mean = theta[part].to(torch.float64, copy=True), running.mean[0, part]
            gap = here - mean
            mean.add_(gap / running.count)
            here.sub_(mean)
            running.squares[0, part].addcmul_(gap, here)
            self.factor[part, column] = here.to(theta.dtype)
        self.losses.append(loss)

    def phi(self, dtype: torch.dtype) -> Tensor:
        """Return the parameters of the low-rank family, (1, P): these buffers, so nothing can be added afterwards."""
        first, running = self.running.count % self.rank, self.running
        length = max(1, CHUNK // self.rank)
        for start in range(0, self.dim, length):
            part = slice(start, min(self.dim, start + length))
            self.values[0, part] = running.mean[0, part].to(dtype)
            own = slice(self.dim + part.start, self.dim + part.stop)
            self.values[0, own] = _rho(running.squares[0, part] / running.count).to(dtype)
            # The oldest deviation comes first.
            columns = self.factor[part].roll(-first, 1).double()
            self.factor[part] = (columns / math.sqrt(2 * (self.rank - 1))).to(dtype)
        return self.values


def make_iterates(rank: int, dim: int, device: torch.device, dtype: torch.dtype) -> Iterates:
    """Return the moments of at least `rank` iterates of a network of any size."""
    return LargeIterates(rank, dim, device, dtype) if dim >= LARGE else Iterates(rank, dim, device)


def _rho(variance: Tensor) -> Tensor:
    sigma = (0.5 * variance).clamp_min(LEAST_VARIANCE).sqrt()
    return sigma + torch.log(-torch.expm1(-sigma))
