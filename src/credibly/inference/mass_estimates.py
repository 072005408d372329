"""Estimates of a mass from the draws and gradients of a window of warm-up.

In a Gaussian with covariance Sigma, gradients are g = -Sigma^-1 (x - mean). Wherever the draws x lie, the covariances
C_x and C_g of draws and gradients then satisfy

    A C_g A = C_x   for   A = Sigma

so the geometric mean A of C_x and C_g^-1 is the covariance, long before chains have travelled along it (as in nutpie).
It is found in the space that draws and gradients span together, in units of s = (Var x / Var g)^(1/4). Along each of
its eigenvectors the variance is the larger of the eigenvalue and the variance of the median chain, as for a diagonal
mass: densities of networks are curved, and A alone makes trajectories too short. Eigenvectors whose variance differs
clearly from the typical one are kept.

A chain that is far from the others must not determine the mass of all of them:

- chains whose density is far below that of the others are left out of a window (`far_chains`);
- s is the median over the chains, and no chain has more weight than the median chain (`spectral_estimate`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.gaussians.mass import Factor, most_extreme

# Eigenvalues within this factor of the typical one are not worth an eigenvector.
CUTOFF = 2.0
# The estimate is shrunk as if there were this many more draws and gradients, of unit variance in every direction.
MORE_DRAWS = 1.0
# A chain is far if its log density is this many standard deviations below the median: sqrt(D/2), or that of the chains.
FAR = 5.0


def far_chains(levels: Tensor, dim: int) -> Tensor:
    """Return a mask (C,) of the chains whose mean log density (C,) is far below that of the others.

    The log density of a Gaussian has the standard deviation sqrt(D/2). Half of the chains define what is typical, so
    some chains always remain, and of two chains neither is far.
    """
    usual = torch.quantile(levels, 0.5)
    spread = 1.4826 * torch.quantile((levels - usual).abs(), 0.5)
    return levels < usual - FAR * torch.maximum(spread, torch.as_tensor(math.sqrt(dim / 2)).to(spread))


def spectral_estimate(draws: Tensor, gradients: Tensor, otherwise: Tensor, rank: int) -> tuple[Tensor, list[Factor]]:
    """Return s (d,) and the factor, if any, of the covariance of d coordinates.

    Args:
        draws, gradients: of C chains, (C, n, d) each.
        otherwise: s of coordinates that did not move, or whose gradient did not change, (d,).
        rank: maximum number of eigenvectors.
    """
    x, g = (part.double() - part.double().mean(1, keepdim=True) for part in (draws, gradients))
    scale, known = _median_scale(x, g, otherwise.double())
    x, g = x / scale * known, g * scale * known
    weight = _weights(x, g)
    rows = torch.square(weight).sum() * draws.shape[1]
    every = torch.cat([(weight * part).flatten(0, 1) for part in (x, g)])
    basis = None
    if len(every) < x.shape[2]:
        basis = torch.linalg.qr(every.mT).Q
        x, every = x @ basis, every @ basis
    eye = MORE_DRAWS * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    covariances = ((part.mT @ part + eye) / (rows + MORE_DRAWS) for part in every.chunk(2))
    values, vectors = torch.linalg.eigh(geometric_mean(*covariances))
    # In a curved density gradients vary more than its width implies, so the larger of the two variances is taken.
    values = torch.maximum(values, torch.quantile(torch.square(x @ vectors).mean(1), 0.5, dim=0)).clamp(min=1e-12)
    return most_extreme(scale, vectors if basis is None else basis @ vectors, values, rank, CUTOFF)


def geometric_mean(draws: Tensor, gradients: Tensor) -> Tensor:
    """Return the A with A G A = X of positive definite X and G: G^(-1/2) (G^(1/2) X G^(1/2))^(1/2) G^(-1/2)."""
    values, vectors = torch.linalg.eigh(gradients)
    values = values.clamp(min=values[-1] * 1e-14)
    root, inverse = ((vectors * power) @ vectors.mT for power in (values.sqrt(), values.rsqrt()))
    inner, directions = torch.linalg.eigh(root @ draws @ root)
    found: Tensor = inverse @ ((directions * inner.clamp(min=0).sqrt()) @ directions.mT) @ inverse
    return 0.5 * (found + found.mT)


def _median_scale(x: Tensor, g: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the median over chains of (Var x / Var g)^(1/4), (d,), and a mask of where it is defined."""
    squares, slopes = torch.square(x).mean(1), torch.square(g).mean(1)
    known = (squares > 0) & (slopes > 0)
    each = torch.where(known, 0.25 * (squares / slopes).log(), torch.nan)
    found, anywhere = torch.nanquantile(each, 0.5, dim=0).exp(), known.any(0)
    return torch.where(anywhere, found, otherwise), anywhere


def _weights(x: Tensor, g: Tensor) -> Tensor:
    """Return the square root of the weight of every chain, (C, 1, 1): the same for its draws and its gradients."""
    weight = x.new_ones(len(x))
    for part in (x, g):
        total = torch.square(part).sum((1, 2))
        usual = torch.quantile(total, 0.5)
        weight = torch.minimum(weight, usual / total.clamp(min=1e-300))
    return weight.clamp(max=1).sqrt().reshape(-1, 1, 1)
