"""The Fisher information of a row's output, F = E_y[s s'] with s = d log p(y | f) / d f, as a root S with F = S S'.

The expectation is over y drawn from the likelihood, so F is positive semi-definite for any data. For Gaussian,
Bernoulli, Categorical and Poisson it equals the Hessian of -log p, which does not depend on y there. For the others (a
predicted variance, Student-t noise, noisy logits) the Hessian may be indefinite, and F is its expectation.

A subclass that overrides `log_prob` has another density than the class it extends, and F comes from that density.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, Heads, Likelihood, Poisson
from credibly.likelihoods.base import Extra, IndependentTargets
from credibly.likelihoods.continuous import LocationScale

# Classes with a closed form of the Fisher information.
KINDS = (Categorical, LocationScale, Bernoulli, Poisson)


def closed_form(likelihood: Likelihood) -> bool:
    """Return whether the likelihood is of a known kind and has the log_prob of that kind."""
    method = getattr(likelihood.log_prob, "__func__", None)
    if method is Gaussian.log_prob:
        # It reads the location off the output for speed, whatever a subclass defines.
        names = ("location_scale", "standard_log_prob")
        return all(getattr(type(likelihood), name) is getattr(Gaussian, name) for name in names)
    return any(method is kind.log_prob for kind in KINDS)


def fisher_root(likelihood: Likelihood, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
    """Return S (N, ..., W, R) with F = S S' for arranged outputs (N, ..., W) and `extra` (1, ...), as for one draw.

    A likelihood may implement `fisher_root`. A custom likelihood of none of the known kinds, or one that overrides the
    `log_prob` of its kind, gets the Hessian of its log_prob at y, with negative eigenvalues set to zero.
    """
    if isinstance(likelihood, Heads):
        return _of_heads(likelihood, output, y, extra)
    leaf = output.detach().requires_grad_()
    own = likelihood.fisher_root(output.detach(), extra)
    with torch.enable_grad():
        if own is not None:
            root = own
        elif not closed_form(likelihood) and isinstance(likelihood, KINDS):
            root = _projected(likelihood, leaf, y, extra)
        elif isinstance(likelihood, Categorical):
            root = _of_classes(likelihood, leaf)
        elif isinstance(likelihood, LocationScale):
            root = _of_location_scale(likelihood, leaf, extra)
        elif isinstance(likelihood, IndependentTargets) and likelihood.outputs_per_target == 1:
            root = _elementwise(likelihood, leaf, y, extra)
        else:
            root = _projected(likelihood, leaf, y, extra)
    root, kept = root.detach(), likelihood.counted(y)
    root = root if kept is None else torch.where(kept[..., None, None], root, 0)
    if not bool(torch.isfinite(root).all()):
        raise InputError(
            "likelihood",
            "its curvature in the network's output is not finite",
            "Check the network's outputs on the data",
        )
    return root


def _of_classes(likelihood: Categorical, leaf: Tensor) -> Tensor:
    """Return the columns sqrt(p_c) grad log p_c, reflected so that the last one is zero and can be dropped."""
    log_p = likelihood.log_probabilities(leaf.unsqueeze(0)).squeeze(0)
    gradients = torch.stack([_grad(log_p[..., c], leaf) for c in range(log_p.shape[-1])], -1)
    q = (0.5 * log_p.detach()).exp()
    # sum_c sqrt(p_c) column_c = grad sum_c p_c = 0: the reflection that maps q = sqrt(p) to the last axis zeroes that
    # column. Here |v|^2 = 2 (1 + q_last), which is never small.
    v = q.clone()
    v[..., -1] += 1
    columns = gradients * q.unsqueeze(-2)
    along = (columns * v.unsqueeze(-2)).sum(-1, keepdim=True) / (1 + q[..., -1])[..., None, None]
    return (columns - along * v.unsqueeze(-2))[..., :-1]


def _of_location_scale(likelihood: LocationScale, leaf: Tensor, extra: Extra) -> Tensor:
    """Return S for log p = l(z) - log s with z = (y - m)/s: moments of the scores in m and log s depend on z alone."""
    location, scale = likelihood.location_scale(leaf.unsqueeze(0), extra)
    moments = _score_moments(likelihood)
    half = torch.linalg.cholesky(moments).to(leaf)
    columns = []
    for t in range(location.shape[-1]):
        by_location = _grad(location[..., t], leaf)
        own = scale.expand_as(location)[..., t].squeeze(0)
        a = by_location / own.detach().unsqueeze(-1)
        if not scale.requires_grad:
            columns.append(moments[0, 0].sqrt().to(leaf) * a)
            continue
        b = _grad(own.log(), leaf)
        columns += [half[0, 0] * a + half[1, 0] * b, half[1, 1] * b]
    return torch.stack(columns, -1)


def _score_moments(likelihood: LocationScale) -> Tensor:
    """Return E[u u'] of u = (l'(z), z l'(z) + 1) over z of the standard density, (2, 2) in float64, by quadrature.

    With z = sinh(t) the integrand decays doubly exponentially, or fast enough for heavy tails, and the trapezoidal rule
    is exact to rounding.
    """
    t = torch.linspace(-100, 100, 40_001, dtype=torch.float64)
    z = torch.sinh(t).requires_grad_()
    log_p = likelihood.standard_log_prob(z)
    slope = _grad(log_p, z)
    z, log_p = z.detach(), log_p.detach()
    weight = torch.exp(log_p) * torch.cosh(t) * (t[1] - t[0])
    u = torch.stack([slope, z * slope + 1])
    u = torch.where(weight > 0, u, 0)
    return (u * weight) @ u.T


def _elementwise(likelihood: Likelihood, leaf: Tensor, y: Tensor, extra: Extra) -> Tensor:
    """Return S for one output per target: the root of the second derivative, on the diagonal."""
    value = likelihood.log_prob(leaf.unsqueeze(0), y, extra)
    (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
    return torch.diag_embed((-_grad(first, leaf)).clamp_min(0).sqrt())


def _projected(likelihood: Likelihood, leaf: Tensor, y: Tensor, extra: Extra) -> Tensor:
    """Return a root of the Hessian at y, projected to the positive semi-definite matrices."""
    value = likelihood.log_prob(leaf.unsqueeze(0), y, extra)
    (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
    hessian = -torch.stack([_grad(first[..., w], leaf) for w in range(leaf.shape[-1])], -1)
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root


def _of_heads(heads: Heads, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
    """Return the roots of all heads, which are independent, as blocks of S (N, W, R)."""
    columns = []
    for name, part in heads.parts():
        own = heads.output_of(part, output.detach())
        root = fisher_root(part.likelihood, own, heads.target_of(part, y), heads.extra_of(name, extra))
        # Every element (pixel) of the head has its own block.
        width, rank = root.shape[-2:]
        flat = root.reshape(len(root), -1, width, rank)
        eye = torch.eye(flat.shape[1], dtype=root.dtype, device=root.device)
        block = torch.einsum("nepr,ef->nepfr", flat, eye).reshape(*own.shape, -1)
        block = part.likelihood.rearranged(block.movedim(-1, 0), 1).movedim(0, -1)
        whole = output.new_zeros(len(output), output.shape[-1], block.shape[-1])
        whole[:, part.columns] = part.weight**0.5 * block.reshape(len(output), -1, block.shape[-1])
        columns.append(whole)
    return torch.cat(columns, -1)


def _grad(value: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient of the sum; zero if it does not depend on the leaf."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient
