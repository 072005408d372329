"""Microcanonical Langevin dynamics: a direction u of unit length instead of a momentum (Robnik et al. 2023).

    dw = u dt,    du = (I - u u') (grad log p / (d - 1) dt + eta dW)

Both parts have exact solutions, and a palindrome of them is an integrator. With e = g/|g|, g = grad log p, and
delta = eps |g| / (d - 1),

    kick     u <- (u + e (sinh delta + (e.u)(cosh delta - 1))) / (cosh delta + (e.u) sinh delta)
    drift    w <- w + eps u

A kick changes the kinetic energy by (d - 1) log(cosh delta + (e.u) sinh delta). The energy error of a trajectory is the
sum of these changes minus the change of log p. The dynamics without noise are reversible and preserve the product of
Lebesgue measure and the uniform measure of directions up to this error, so a Metropolis step with it makes them exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.inference.kernels.hmc import Evaluate, Integrator


def kick(direction: Tensor, gradient: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return the directions (C, D) after a kick of the given size, and the change of kinetic energy (C,) in float64."""
    dim = direction.shape[-1]
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True, dtype=torch.float64)
    force = gradient / norm.clamp(min=1e-300).to(gradient)
    cosine = (force * direction).sum(-1, keepdim=True, dtype=torch.float64).clamp(-1, 1)
    delta = size * norm / (dim - 1)
    # exp(-delta) times the formula above, which cannot overflow.
    decay = torch.exp(-delta)
    along = (1 - decay) * (1 + decay + cosine * (1 - decay))
    turned = force * along.to(force) + direction * (2 * decay).to(direction)
    change = delta - math.log(2) + torch.log(1 + cosine + (1 - cosine) * decay**2)
    return unit(turned), (dim - 1) * change.squeeze(-1)


def unit(vectors: Tensor) -> Tensor:
    """Return vectors (C, D) of length one."""
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return vectors / norm.clamp(min=1e-300).to(vectors)


def isokinetic(
    scheme: Integrator,
    theta: Tensor,
    direction: Tensor,
    gradient: Tensor,
    size: float,
    scale: Tensor | None,
    evaluate: Evaluate,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Take one step in the coordinates w / scale.

    Returns theta, direction, gradient, log likelihood (C,), and the change of kinetic energy (C,) in float64.
    """

    def scaled(value: Tensor) -> Tensor:
        return value if scale is None else value * scale

    direction, change = kick(direction, scaled(gradient), scheme.kicks[0] * size)
    log_likelihood = torch.zeros_like(change)
    for drift, push in zip(scheme.drifts, scheme.kicks[1:]):
        theta = theta + (drift * size) * scaled(direction)
        log_likelihood, gradient = evaluate(theta)
        direction, more = kick(direction, scaled(gradient), push * size)
        change = change + more
    return theta, direction, gradient, log_likelihood, change


def refresh_partly(direction: Tensor, noise: Tensor, size: float, length: float) -> Tensor:
    """Return partly refreshed directions, which decorrelate over the given length; noise (C, D) is standard normal."""
    return unit(direction + refreshed_part(size, length, direction.shape[-1]) * noise)


def refreshed_part(size: float, length: float, dim: int) -> float:
    """Return the factor of the noise after a step of the given size."""
    return math.sqrt(math.expm1(min(700.0, 2 * size / length)) / dim)
