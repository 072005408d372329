"""Langevin dynamics with minibatch gradients: SGHMC (Chen et al. 2014), and SGLD (Welling & Teh 2011) as its limit.

    B   m <- m + (h/2) R g                                   g: minibatch gradient of the log density
    A   w <- w + (h/2) R m
    O   m <- c m + sqrt(1 - c^2) N(0, 1),   c = exp(-friction h) = kept
    A, B again, with the gradient at the new point

R is the square root of a diagonal preconditioner P = R^2, or 1, and m the momentum of the coordinates w / R. The
friction step is exact: the momentum of a free particle has variance exactly 1 for any step size. This order (BAOAB)
gives positions of exactly the right variance on Gaussian targets with full gradients, at any stable step: h^2 times the
largest eigenvalue of R (-Hessian) R below 4. A step takes one gradient, which serves two half kicks.

With c = 0 no momentum survives a step, and what remains is, with eps = h^2,

    w <- w + (eps/2) P g + sqrt(eps) R (xi + xi') / 2,      xi, xi' the normal draws of the last step and of this one

which is SGLD with noise averaged over two steps (Leimkuhler & Matthews 2013). With independent noise its variance on a
Gaussian of precision a would be (1/a) / (1 - eps a / 4); averaged, it is 1/a.

Gradient noise of variance V (in the coordinates w / R) adds h V / (2 friction) to the temperature of SGHMC, and
eps V / 4 to the injected noise of SGLD.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Floor of the root mean squared gradient, as a fraction of its mean over coordinates.
FLOOR = 1e-5


def langevin(
    theta: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    noise: Tensor,
    size: Tensor,
    kept: Tensor,
    heat: Tensor,
    root: Tensor | None,
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one step of theta and momentum (C, D). Return both, and the gradient and value at the new point.

    Args:
        theta, momentum, gradient: the state, with the gradient of the log density at theta.
        noise: standard normal numbers (C, D).
        size, kept, heat: step size h, fraction c of the momentum kept, and scale of the noise (1 for sampling, 0 for
            none); scalars or (C, 1).
        root: R, the square root of the preconditioner, or None for the identity.
        evaluate: returns value and gradient of the log density.
    """
    half = 0.5 * size if root is None else (0.5 * size) * root
    momentum = momentum + half * gradient
    theta = theta + half * momentum
    momentum = kept * momentum + torch.sqrt(1 - kept * kept) * heat * noise
    theta = theta + half * momentum
    value, gradient = evaluate(theta)
    return theta, momentum + half * gradient, gradient, value


def adapted_root(squares: Tensor) -> Tensor:
    """Return the root of 1 / (floor + root mean squared gradient), with a geometric mean of one in every chain."""
    log = -torch.log(FLOOR * squares.mean(-1, keepdim=True).sqrt() + squares.sqrt())
    return torch.exp(0.5 * (log - log.mean(-1, keepdim=True)))
