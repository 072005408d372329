"""A density that is a plain function of a vector, as a target for the samplers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credibly.core.checks import check_integer
from credibly.errors import InputError


class Density:
    """A density that is not a network's: a function of a flat vector, as a target for the samplers.

    Args:
        log_prob: log density up to a constant, built from torch operations: maps a tensor (D,) to a scalar, or (C, D)
            to (C,) with batched=True.
        dim: D.
        batched: whether `log_prob` takes many points at once; otherwise it is batched by `torch.func.vmap`.
        scale: a guess of the standard deviations, a number or (D,). Starting points are drawn from N(0, scale^2), and
            the initial mass is its inverse square.
        name: identifies the density when a stored run is resumed.
        dtype, device: dtype and device of the points.
    """

    def __init__(
        self,
        log_prob: Callable[[Tensor], Tensor],
        dim: int,
        *,
        batched: bool = False,
        scale: float | Tensor = 1.0,
        name: str = "",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(log_prob):
            raise InputError("log_prob", f"must be a function of a (D,) tensor, got {type(log_prob).__name__}")
        check_integer("dim", dim)
        self.log_prob, self.dim, self.batched, self.name = log_prob, dim, batched, name
        self.dtype, self.device = dtype, torch.device(device)
        guess = torch.as_tensor(scale, dtype=torch.float64, device=self.device)
        if guess.shape not in ((), (dim,)):
            raise InputError("scale", f"must be a number or a tensor of shape ({dim},), got shape {tuple(guess.shape)}")
        self.scale = guess.expand(dim).clone()
        bad = ~(torch.isfinite(self.scale) & (self.scale > 0))
        if bool(bad.any()):
            raise InputError("scale", f"must be positive and finite, got {float(self.scale[bad][0])}")
        trial = self(torch.zeros(2, dim, dtype=dtype, device=self.device))
        if trial.shape != (2,):
            rule = "return shape (C,) for points (C, D)" if batched else "return a scalar for a point (D,)"
            raise InputError("log_prob", f"must {rule}, got shape {tuple(trial.shape)} for 2 points")

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the log density (C,) at theta (C, D)."""
        value: Tensor = self.log_prob(theta) if self.batched else torch.func.vmap(self.log_prob)(theta)
        return value

    def __repr__(self) -> str:
        return f"Density({self.name or getattr(self.log_prob, '__name__', 'log_prob')}, D = {self.dim})"
