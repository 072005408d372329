"""The prior's precision of every coordinate, at one point: what it adds to the curvature of the log density."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.priors.elementwise import Normal, Prior, Shrink
from credibly.priors.flat import BoundPrior
from credibly.priors.gaussian import BoundGaussianPrior

WIDEST = 10.0  # deviations of the prior that a Gaussian in its place may have at most


def prior_precision(prior: BoundPrior | BoundGaussianPrior, theta: Tensor) -> Tensor:
    """-d^2 log p(w) / d w_j^2 at theta (D,), in float64: 1/s^2, exactly, where the prior is Normal.

    Elsewhere it is the second derivative at that point, but no less than that of a Gaussian ten times as wide as the prior:
    in their tails Student-t and scale mixtures curve upwards, and the Laplace density has no curvature at all. Of a prior
    that is an earlier posterior it is the diagonal of its precision; `prior_beside` has the rest.
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
            "is flat somewhere, so the curvature there is that of the data alone",
            "Pass a proper prior, such as priors.Normal(scale)",
        )
    return found


def prior_beside(prior: BoundPrior | BoundGaussianPrior, places: Tensor) -> Tensor | None:
    """What lies beside the diagonal of the prior's precision, (P, P) for those coordinates; None where that is nothing."""
    if not isinstance(prior, BoundGaussianPrior) or prior.is_normal:
        return None
    matrix = prior.precision.matrix().double()[places.unsqueeze(1), places]
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
