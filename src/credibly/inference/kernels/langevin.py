"""Stochastic-gradient Langevin dynamics (Welling & Teh 2011), with an optional diagonal preconditioner P.

    w <- w + (eps/2) P g + N(0, eps P)            g: minibatch gradient of the log density

The stationary distribution tends to the target as eps -> 0. The bias at finite eps: on a Gaussian of precision a the
variance is (1/a) / (1 - eps a / 4), and gradient noise of variance V adds eps V / 4 to the injected noise.
"""

from __future__ import annotations

from torch import Tensor


def langevin(
    theta: Tensor, gradient: Tensor, noise: Tensor, size: Tensor, heat: Tensor, preconditioner: Tensor | None
) -> Tensor:
    """Take one step of theta (C, D); step size and heat (1 for sampling, 0 for no noise) broadcast against it."""
    if preconditioner is None:
        return theta + (0.5 * size) * gradient + (size.sqrt() * heat) * noise
    return theta + (0.5 * size) * preconditioner * gradient + (size.sqrt() * heat) * preconditioner.sqrt() * noise
