"""Stochastic-gradient Langevin dynamics, with an optional diagonal preconditioner P.

    w <- w + (eps/2) P g + N(0, eps P)            g: minibatch gradient of the log density

The stationary distribution is the target for eps -> 0. On a Gaussian of precision a the variance is (1/a) / (1 - eps a / 4),
and the noise of the gradient, of variance V, adds eps V / 4 to what the dynamics inject: documented bias, not hidden.
"""

from __future__ import annotations

from torch import Tensor


def langevin(
    theta: Tensor, gradient: Tensor, noise: Tensor, size: Tensor, heat: Tensor, preconditioner: Tensor | None
) -> Tensor:
    """One step of theta (C, D); size eps and heat (1 for sampling, 0 for none of the noise) broadcast against it."""
    if preconditioner is None:
        return theta + (0.5 * size) * gradient + (size.sqrt() * heat) * noise
    return theta + (0.5 * size) * preconditioner * gradient + (size.sqrt() * heat) * preconditioner.sqrt() * noise
