"""Optimisers over flat (M, D) tensors whose rows are independent problems.

They update their state in place, so a step compiled with them allocates nothing that grows with D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from credibly.core.checks import check_choice

Schedule = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015).

    m <- b1 m + (1-b1) g;   v <- b2 v + (1-b2) g^2;   w <- w - lr * m_hat / (sqrt(v_hat) + eps)
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Return two zero moments of the shape of theta."""
        return torch.zeros_like(theta), torch.zeros_like(theta)

    def corrections(self, step: int) -> tuple[float, float]:
        """Return the bias corrections of both moments, which start at zero, for step 1, 2, ..."""
        return 1 / (1 - self.beta1**step), 1 / math.sqrt(1 - self.beta2**step)

    def update(
        self, theta: Tensor, state: tuple[Tensor, ...], gradient: Tensor, lr: Tensor, c1: Tensor, c2: Tensor
    ) -> None:
        """Take one descent step along `gradient` (M, D), in place; lr is (), or (M, 1) with 0 for inactive rows."""
        m, v = state
        # `alpha` and `addcmul` are avoided: they round once in the vectorised part of a tensor and twice in its tail,
        # which would make a member's result depend on the number of members.
        m.mul_(self.beta1).add_(gradient * (1 - self.beta1))
        v.mul_(self.beta2).add_(torch.square(gradient) * (1 - self.beta2))
        theta.sub_(lr * (m * c1) / (v.sqrt() * c2 + self.eps))

    def update_at_once(
        self, theta: Tensor, state: tuple[Tensor, ...], gradient: Tensor, lr: float, count: Tensor
    ) -> None:
        """Take the same step, to rounding, in one pass over memory; count is 1.0, 2.0, ... in float32."""
        torch._fused_adam_(
            [theta],
            [gradient],
            [state[0]],
            [state[1]],
            [],
            [count],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, or plain with momentum 0.

    m <- momentum m + g;   w <- w - lr m
    """

    momentum: float = 0.9

    def init(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Return a zero momentum of the shape of theta."""
        return (torch.zeros_like(theta),)

    def corrections(self, step: int) -> tuple[float, float]:
        """Return ones: SGD needs no bias correction."""
        return 1.0, 1.0

    def update(
        self, theta: Tensor, state: tuple[Tensor, ...], gradient: Tensor, lr: Tensor, c1: Tensor, c2: Tensor
    ) -> None:
        """Take one descent step along `gradient` (M, D), in place."""
        (m,) = state
        m.mul_(self.momentum).add_(gradient)
        theta.sub_(lr * m)


Optimiser = Adam | SGD


class UpdateRule(Protocol):
    """An update rule: flat (M, P) parameters change by what an objective returns as their gradient."""

    def init(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Return the state before the first step."""

    def corrections(self, step: int) -> tuple[float, float]:
        """Return two factors of step 1, 2, ..."""

    def update(
        self, theta: Tensor, state: tuple[Tensor, ...], gradient: Tensor, lr: Tensor, c1: Tensor, c2: Tensor
    ) -> None:
        """Take one step, in place."""


def optimiser(name: str, momentum: float) -> Optimiser:
    """Return the optimiser with the given name."""
    check_choice("optimiser", name, ("adam", "sgd"))
    return Adam(beta1=momentum) if name == "adam" else SGD(momentum)


def learning_rates(schedule: str, lr: float, steps: int, warmup: int) -> list[float]:
    """Return the learning rate of every step: a linear rise over `warmup` steps, then the schedule.

    "linear" and "cosine" fall towards zero.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda u: 1.0,
        "linear": lambda u: 1 - u,
        "cosine": lambda u: 0.5 * (1 + math.cos(math.pi * u)),
    }
    check_choice("schedule", schedule, shapes)
    shape, rest = shapes[schedule], max(1, steps - warmup)
    return [lr * (t + 1) / warmup if t < warmup else lr * shape((t - warmup) / rest) for t in range(steps)]


def clip_rows(gradient: Tensor, limit: float) -> Tensor:
    """Scale each row of (M, D) down to at most the given norm."""
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return torch.mul(gradient, limit / norm.clamp_min(limit))
