"""Stochastic-gradient HMC: Langevin dynamics with momentum, friction and matching noise (Chen et al. 2014).

    B   m <- m + (eps/2) g                                   g: minibatch gradient of the log density
    A   w <- w + (eps/2) P m
    O   m <- c m + sqrt(1 - c^2) N(0, P^-1),   c = exp(-friction eps) = kept
    A, B again, with the gradient at the new point

The friction step is exact: the momentum of a free particle has variance exactly P^-1 for any step size (an Euler step
would inflate it). This order (BAOAB) gives positions of exactly the right variance on Gaussian targets with full
gradients; minibatch noise of variance V adds about eps V / (2 friction) to the temperature. A step takes one gradient,
which serves two half kicks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sghmc(
    theta: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    noise: Tensor,
    size: Tensor,
    kept: Tensor,
    heat: Tensor,
    preconditioner: Tensor | None,
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one step of theta and momentum (C, D). Return both, and the gradient and value at the new point.

    Args:
        theta, momentum, gradient: the state, with the gradient of the log density at theta.
        noise: standard normal numbers (C, D).
        size, kept, heat: step size eps, fraction c of the momentum kept, and scale of the noise (1 for sampling, 0 for
            none); scalars or (C, 1).
        preconditioner: the diagonal P, or None for the identity.
        evaluate: returns value and gradient of the log density.
    """
    half = 0.5 * size
    momentum = momentum + half * gradient
    theta = theta + half * (momentum if preconditioner is None else preconditioner * momentum)
    scale = torch.sqrt(1 - kept * kept) * heat
    momentum = kept * momentum + scale * (noise if preconditioner is None else noise * preconditioner.rsqrt())
    theta = theta + half * (momentum if preconditioner is None else preconditioner * momentum)
    value, gradient = evaluate(theta)
    return theta, momentum + half * gradient, gradient, value
