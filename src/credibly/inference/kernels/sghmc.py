"""Stochastic-gradient HMC: Langevin dynamics with a momentum, friction and the noise that matches it.

    B   m <- m + (eps/2) g                                   g: minibatch gradient of the log density
    A   w <- w + (eps/2) P m
    O   m <- c m + sqrt(1 - c^2) N(0, P^-1),   c = exp(-friction eps) = kept
    A, B again, with the gradient at the new point

The friction step is exact: a free particle has momentum of variance exactly P^-1 for any step (an Euler step would inflate
it). This order (BAOAB) gives positions of exactly the right variance on Gaussian targets with full gradients; minibatch noise
of variance V adds about eps V / (2 friction) to the temperature. One gradient a step: it serves two half kicks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sghmc(
    theta: Tensor, momentum: Tensor, gradient: Tensor, noise: Tensor, size: Tensor, kept: Tensor, heat: Tensor,
    preconditioner: Tensor | None, evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of theta, momentum (C, D); size, kept and heat are scalars or (C, 1).

    Returns theta, momentum, the gradient at the new point and the value that `evaluate` gave with it.
    """
    half = 0.5 * size
    momentum = momentum + half * gradient
    theta = theta + half * (momentum if preconditioner is None else preconditioner * momentum)
    spread = torch.sqrt(1 - kept * kept) * heat
    momentum = kept * momentum + spread * (noise if preconditioner is None else noise * preconditioner.rsqrt())
    theta = theta + half * (momentum if preconditioner is None else preconditioner * momentum)
    value, gradient = evaluate(theta)
    return theta, momentum + half * gradient, gradient, value
