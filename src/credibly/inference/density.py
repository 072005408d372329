"""A density that is a plain function of a vector, as a target for the samplers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credibly.core.checks import check_integer
from credibly.core.placement import to_device, to_dtype
from credibly.errors import InputError

_ADVICE = "Use torch operations only: torch.where instead of if, and no float(), .item(), .detach() or numpy"


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
        dtype: torch.dtype | str = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(log_prob):
            raise InputError("log_prob", f"must be a function of a (D,) tensor, got {type(log_prob).__name__}")
        check_integer("dim", dim)
        self.log_prob, self.dim, self.batched, self.name = log_prob, dim, batched, name
        self.dtype, self.device = to_dtype("dtype", dtype), to_device("device", device)
        guess = torch.as_tensor(scale, dtype=torch.float64, device=self.device)
        if guess.shape not in ((), (dim,)):
            raise InputError("scale", f"must be a number or a tensor of shape ({dim},), got shape {tuple(guess.shape)}")
        self.scale = guess.expand(dim).clone()
        bad = ~(torch.isfinite(self.scale) & (self.scale > 0))
        if bool(bad.any()):
            raise InputError("scale", f"must be positive and finite, got {float(self.scale[bad][0])}")
        self._check()

    def _check(self) -> None:
        """Raise unless the function takes points as it should and has a gradient."""
        points = torch.zeros(2, self.dim, dtype=self.dtype, device=self.device)
        one = points if self.batched else points[0]
        try:
            alone = self.log_prob(one)
        except Exception as error:
            found = f"failed on a tensor of shape {tuple(one.shape)} ({_summary(error)})"
            raise InputError(
                "log_prob", found, "With batched=True it gets points (C, D), otherwise one (D,)"
            ) from error
        if not isinstance(alone, Tensor):
            raise InputError("log_prob", f"must return a tensor, got {type(alone).__name__}", _ADVICE)
        with torch.inference_mode(False), torch.enable_grad():
            points = points.clone().requires_grad_()
            try:
                trial = self(points)
            except Exception as error:
                found = f"cannot be evaluated at several points at once ({_summary(error)})"
                raise InputError("log_prob", found, f"{_ADVICE}, or pass batched=True") from error
            if trial.shape != (2,):
                rule = "return shape (C,) for points (C, D)" if self.batched else "return a scalar for a point (D,)"
                raise InputError("log_prob", f"must {rule}, got shape {tuple(trial.shape)} for 2 points")
            try:
                torch.autograd.grad(trial.sum(), points)
            except RuntimeError as error:
                raise InputError("log_prob", f"has no gradient in its argument ({_summary(error)})", _ADVICE) from error

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the log density (C,) at theta (C, D)."""
        value: Tensor = self.log_prob(theta) if self.batched else torch.func.vmap(self.log_prob)(theta)
        return value

    def __repr__(self) -> str:
        return f"Density({self.name or getattr(self.log_prob, '__name__', 'log_prob')}, D = {self.dim})"


def _summary(error: Exception) -> str:
    """Return the kind of an error and its first sentence."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{type(error).__name__}: {text.split('. ')[0]}"
