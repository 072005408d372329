"""Parallel tempering: exchanges between neighbouring temperatures, and the spacing of the temperatures.

Replica k of a ladder has the density

    p_k(w)  proportional to  p(D|w)^(beta_k / T) p(w)^(1 / T_prior),        1 = beta_0 > beta_1 > ... > beta_(K-1) > 0

with l(w) = log p(D|w) / T. Neighbours exchange their positions with probability

    min(1, exp((beta_k - beta_(k+1)) (l(w_(k+1)) - l(w_k))))

which leaves the product of all p_k invariant. Even pairs (0, 1), (2, 3), ... and odd pairs (1, 2), (3, 4), ... take
turns (Okabe et al. 2001): unlike a random choice of pairs this is not reversible, and a position keeps moving in one
direction until an exchange is rejected (Syed et al. 2021).

With r_k the mean rejection of pair k, Lambda(beta_k) = r_0 + ... + r_(k-1) is the communication barrier between the
first and the k-th temperature. It hardly depends on the ladder that it was estimated with, and temperatures at equal
distances of Lambda have equal rejections, which makes round trips as frequent as they can be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Minimum rejection of a pair when temperatures are respaced, so that Lambda increases.
LEAST = 1e-3
# Mean rejection beyond which a ladder should not reach higher: with half of the exchanges rejected the number of
# temperatures is optimal (Syed et al. 2021), and with nearly all of them rejected no position travels.
MOST = 0.6


def geometric_ladder(count: int, hottest: float) -> Tensor:
    """Return `count` inverse temperatures from 1 to 1 / hottest with a constant ratio, in float64."""
    return hottest ** -torch.linspace(0, 1, count, dtype=torch.float64)


def exchange_probability(log_likelihood: Tensor, beta: Tensor) -> Tensor:
    """Return the probability (C, K-1) of an exchange of every pair of neighbours.

    Args:
        log_likelihood: l of the positions, (C, K), in units of the problem's own temperature.
        beta: inverse temperatures (K,).
    """
    return torch.exp(((beta[:-1] - beta[1:]) * log_likelihood.diff(dim=1)).clamp(max=0))


def proposed_pairs(iteration: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return which of the K-1 pairs of `count` temperatures this iteration proposes: the even ones, or the odd ones."""
    return torch.arange(count - 1, device=device) % 2 == iteration % 2


def exchange(probability: Tensor, uniform: Tensor, iteration: int) -> Tensor:
    """Return the position (C, K) that every temperature receives, as an index into the temperatures.

    Args:
        probability: probability of an exchange, (C, K-1).
        uniform: numbers in [0, 1), (C, K-1).
        iteration: decides between even and odd pairs.
    """
    chains, pairs = probability.shape
    swapped = (uniform < probability) & proposed_pairs(iteration, pairs + 1, probability.device)
    order = torch.arange(pairs + 1, device=probability.device).repeat(chains, 1)
    order[:, :-1] += swapped.long()
    order[:, 1:] -= swapped.long()
    return order


def respace(beta: Tensor, rejection: Tensor, least: float | None = None) -> Tensor:
    """Return K inverse temperatures, (K,), at equal distances of the communication barrier.

    Args:
        beta: the inverse temperatures (K,) that the rejections were measured with.
        rejection: mean rejection of every pair of neighbours, (K-1,).
        least: None keeps both ends. Otherwise the last one is the smallest, but at least `least`, for which neighbours
            are rejected no more often than `MOST`; beyond the present one the barrier is extrapolated.
    """
    rejection = rejection.double().clamp(min=LEAST)
    barrier, logs = torch.cat([rejection.new_zeros(1), rejection.cumsum(0)]), beta.log()
    reach = barrier[-1]
    if least is not None:
        slope = rejection[-1] / (logs[-2] - logs[-1])
        further = (logs[-1] - math.log(least)).clamp(min=0)
        if further > 0:
            barrier, logs = torch.cat([barrier, barrier[-1:] + slope * further]), torch.cat([logs, logs[-1:] - further])
        reach = barrier[-1].clamp(max=MOST * len(rejection))
    wanted = reach * torch.linspace(0, 1, len(beta), dtype=torch.float64)
    spaced = interpolate(wanted, barrier, logs).exp()
    spaced[0] = beta[0]
    if least is None:
        spaced[-1] = beta[-1]
    return spaced


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the piecewise linear function through increasing x and y (K,) at some points."""
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    left = right - 1
    part = ((at - x[left]) / (x[right] - x[left])).clamp(0, 1)
    return y[left] + part * (y[right] - y[left])
