"""The prior's precision of every coordinate at one point: its term in the curvature of the log density."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.priors.elementwise import Normal, Prior, Shrink
from credibly.priors.flat import BoundPrior
from credibly.priors.gaussian import BoundGaussianPrior

# A Gaussian approximation of the prior is at most this many times as wide as the prior.
WIDEST = 10.0


def prior_precision(prior: BoundPrior | BoundGaussianPrior, theta: Tensor) -> Tensor:
    """Return -d^2 log p(w) / d w_j^2 at theta (D,) in float64: exactly 1/s^2 for a Normal prior.

    For other priors it is the second derivative at theta, but at least that of a Gaussian ten times as wide as the
    prior: Student-t and scale mixtures curve upwards in their tails, and the Laplace density has no curvature at all.
    For an earlier posterior it is the diagonal of its precision; `prior_off_diagonal` has the rest.
    """
    if isinstance(prior, BoundGaussianPrior):
        return prior.precision.diagonal().double()
    parts = []
    for segment in prior.segments:
        values = theta[segment.start : segment.stop].detach().double()
        parts.append(_elementwise(segment.prior, values, segment.shrink))
    found = torch.cat(parts)
    if not bool(torch.isfinite(found).all()) or bool((found <= 0).any()):
        raise InputError(
            "prior",
            "is flat somewhere, so the curvature there comes from the data alone",
            "Pass a proper prior, such as priors.Normal(scale)",
        )
    return found


def prior_off_diagonal(prior: BoundPrior | BoundGaussianPrior, indices: Tensor) -> Tensor | None:
    """Return the off-diagonal part of the prior's precision, (P, P) for those coordinates; None if it is diagonal."""
    if not isinstance(prior, BoundGaussianPrior) or prior.is_normal:
        return None
    matrix = prior.precision.matrix().double()[indices.unsqueeze(1), indices]
    return matrix - torch.diag(matrix.diagonal())


def _elementwise(prior: Prior, values: Tensor, shrink: Shrink) -> Tensor:
    factor = shrink.double() if isinstance(shrink, Tensor) else torch.tensor(shrink, dtype=torch.float64)
    factor = factor.to(values.device)
    if isinstance(prior, Normal):
        return (1 / (prior.scale * factor) ** 2).expand_as(values)
    width = prior.std if math.isfinite(prior.std) else float(getattr(prior, "scale", math.inf))
    floor = 1 / (WIDEST * width * factor) ** 2
    leaf = values.clone().requires_grad_()
    with torch.enable_grad():
        (first,) = torch.autograd.grad(prior.log_prob(leaf, factor).sum(), leaf, create_graph=True)
        second = torch.zeros_like(values)
        if first.requires_grad:
            (found,) = torch.autograd.grad(first.sum(), leaf, allow_unused=True)
            second = second if found is None else found
    return torch.maximum(-second, floor.expand_as(values))
