"""A density that is a plain function of a vector, for the samplers to run on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credibly.errors import InputError


class Density:
    """A density that is not a network: a function of a flat vector, to run the samplers on.

    Args:
        log_prob: log density up to a constant, of a tensor (D,) to a scalar, built from torch operations; or of (C, D) to
            (C,) with batched=True.
        dim: D.
        batched: whether `log_prob` takes many points at once; otherwise `torch.func.vmap` does that.
        scale: a guess of the standard deviations, a number or (D,): starts are drawn from N(0, scale^2), and it is the
            mass before adaptation.
        name: told apart by it when a stored run is resumed.
    """

    def __init__(
        self, log_prob: Callable[[Tensor], Tensor], dim: int, *, batched: bool = False, scale: float | Tensor = 1.0, name: str = "",
        dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if not callable(log_prob):
            raise InputError("log_prob", f"found {type(log_prob).__name__}", "Pass a function of a (D,) tensor")
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise InputError("dim", f"found {dim!r}", "Pass a whole number from 1 up")
        self.log_prob, self.dim, self.batched, self.name = log_prob, dim, batched, name
        self.dtype, self.device = dtype, torch.device(device)
        guess = torch.as_tensor(scale, dtype=torch.float64, device=self.device)
        if guess.shape not in ((), (dim,)):
            raise InputError("scale", f"has shape {tuple(guess.shape)}", f"Pass one number or ({dim},)")
        self.scale = guess.expand(dim).clone()
        if not bool((torch.isfinite(self.scale) & (self.scale > 0)).all()):
            raise InputError("scale", "has values that are not positive and finite", "Pass positive numbers")
        trial = self(torch.zeros(2, dim, dtype=dtype, device=self.device))
        if trial.shape != (2,):
            takes = "(C, D) points must give (C,) values" if batched else "one (D,) point must give one number"
            raise InputError("log_prob", f"gave shape {tuple(trial.shape)} for 2 points", takes)

    def __call__(self, theta: Tensor) -> Tensor:
        """Log density (C,) at theta (C, D)."""
        value: Tensor = self.log_prob(theta) if self.batched else torch.func.vmap(self.log_prob)(theta)
        return value

    def __repr__(self) -> str:
        return f"Density({self.name or getattr(self.log_prob, '__name__', 'log_prob')}, D = {self.dim})"
