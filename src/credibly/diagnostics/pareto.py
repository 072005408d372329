"""Leave-one-out cross-validation by Pareto-smoothed importance sampling (PSIS), and WAIC, for many rows at once.

For draws w_s from p(w | D), the posterior without row i has the importance weights r_s = 1 / p(y_i | x_i, w_s), and

    log p(y_i | y_-i)  ~  log ( sum_s r_s p(y_i | w_s) / sum_s r_s ).

A few large r_s may dominate the sum, so the M largest are replaced by the quantiles of a generalised Pareto
distribution fitted to them. Its shape k measures how heavy the tail is, and so whether the result can be trusted. The
definitions are those of Vehtari, Simpson, Gelman, Yao and Gabry (2024), the fit is that of Zhang and Stephens (2009).
arviz-stats has the same ones but loops over rows in Python; here blocks of rows are processed on their device (the
tests compare both to 1e-10).

A row of weight v enters the posterior as p(y_i | x_i, w)^v. Leaving it out leaves all of it out, r_s = p(y_i | w_s)^-v,
and its contribution to the sum over rows is v log p(y_i | y_-i).

Log likelihoods are (draws, rows), results (rows,) in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.errors import InputError

# A fifth of the draws are the tail, and a fit needs five.
MIN_DRAWS = 25
# Grid points times tail draws processed together: 4 MiB, which fits into the caches.
FIT_VALUES = 2**19
# From this shape on the weights have no finite mean.
WORST = 1.0


class LeaveOneOut(NamedTuple):
    """Per row, (rows,): the log density given the others, the log density given all, and the shape k of the weights."""

    elpd: Tensor
    lppd: Tensor
    pareto_k: Tensor


class WidelyApplicable(NamedTuple):
    """Per row, (rows,): WAIC's log density, and the variance of the log likelihood over draws that it subtracts."""

    elpd: Tensor
    variance: Tensor


def loo(log_likelihood: Tensor, *, efficiency: float = 1.0, weight: Tensor | None = None) -> LeaveOneOut:
    """Return the PSIS-LOO of each row.

    Args:
        log_likelihood: log p(y_i | x_i, w_s), (draws, rows).
        efficiency: relative efficiency, ESS per draw; correlated draws need a longer tail.
        weight: weights v of the rows in the posterior, (rows,), which multiply both log densities; None for ones.
    """
    values = checked(log_likelihood, MIN_DRAWS)
    v = torch.ones_like(values[0]) if weight is None else weight.to(values)
    elpd, shape = [], []
    length = tail_length(len(values), efficiency)
    size = max(1, FIT_VALUES // (length * _grid(length)))
    for part, own in zip(values.split(size, 1), v.split(size)):
        weights, k = psis(-part * own, length)
        elpd.append(own * torch.logsumexp(weights + part, 0))
        shape.append(k)
    return LeaveOneOut(torch.cat(elpd), v * _lppd(values), torch.cat(shape))


def waic(log_likelihood: Tensor, *, weight: Tensor | None = None) -> WidelyApplicable:
    """Return the WAIC of each row of weight v: v log mean_s p(y_i | w_s) - Var_s[v log p(y_i | w_s)]."""
    values = checked(log_likelihood, 2)
    v = torch.ones_like(values[0]) if weight is None else weight.to(values)
    variance = (v * values).var(0)
    return WidelyApplicable(v * _lppd(values) - variance, variance)


def limit(draws: int) -> float:
    """Return the largest shape k that is reliable with this many draws: 1 - 1 / log10 S, at most 0.7."""
    return min(1 - 1 / math.log10(draws), 0.7)


def tail_length(draws: int, efficiency: float = 1.0) -> int:
    """Return how many of the largest weights to smooth."""
    most = 3 * math.sqrt(draws / efficiency) if draws * efficiency > 225 else draws / 5
    return min(int(most), draws - 1)


def psis(log_ratios: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return smoothed and normalised log weights (draws, rows) from log ratios, and the shape k (rows,).

    A tail of a single value is not smoothed: k is -inf if all draws have that value, else inf.
    """
    ratios = log_ratios - log_ratios.amax(0)
    largest, indices = ratios.topk(length + 1, 0)
    cutoff, tail = largest[-1], largest[:-1].flip(0)
    excess = tail.exp() - cutoff.exp()
    shape, scale = pareto_fit(excess)
    p = ((torch.arange(length, dtype=ratios.dtype, device=ratios.device) + 0.5) / length).unsqueeze(1)
    # Quantiles of the fitted distribution; at k = 0 it is exponential.
    nonzero = torch.where(shape == 0, 1.0, shape)
    quantiles = torch.where(shape == 0, -torch.log1p(-p), torch.expm1(-nonzero * torch.log1p(-p)) / nonzero)
    smoothed = (cutoff.exp() + scale * quantiles).log().clamp_max(0.0)
    usable = shape.isfinite() & (scale > 0) & (tail[-1] > tail[0])
    weights = ratios.scatter(0, indices[:-1].flip(0), torch.where(usable, smoothed, tail))
    constant = torch.where(ratios.amin(0) == 0, -torch.inf, torch.inf)
    return weights - torch.logsumexp(weights, 0), torch.where(tail[-1] > tail[0], shape.nan_to_num(torch.inf), constant)


def pareto_fit(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Fit generalised Pareto distributions to excesses over a threshold (n, rows), sorted ascending: shape k and scale.

    The posterior mean of b = -k / scale on a grid, under a prior scaled by the first quartile. k is shrunk towards 1/2
    with the weight of ten excesses.
    """
    n = len(excess)
    count = _grid(n)
    steps = torch.arange(1, count + 1, dtype=excess.dtype, device=excess.device).unsqueeze(1)
    b = (1 - torch.sqrt(count / (steps - 0.5))) / (3 * excess[int(n / 4 + 0.5) - 1]) + 1 / excess[-1]  # (grid, rows)
    k = torch.log1p(-b.unsqueeze(1) * excess).mean(1)
    weights = torch.softmax(n * ((-b / k).log() - k - 1), 0)
    weights = torch.where(weights >= 10 * torch.finfo(weights.dtype).eps, weights, 0.0)
    mean = (b * weights).sum(0) / weights.sum(0)
    shape = torch.log1p(-mean * excess).mean(0)
    return (n * shape + 10 * 0.5) / (n + 10), -shape / mean


def checked(log_likelihood: Tensor, least: int) -> Tensor:
    """Return the log likelihoods (draws, rows) in float64. Raise if they are malformed or too few."""
    name, shape = "log_likelihood", tuple(log_likelihood.shape)
    if log_likelihood.ndim != 2 or not log_likelihood.numel():
        raise InputError(name, f"must have a non-empty shape (draws, rows), got {shape}")
    if shape[0] < least:
        raise InputError(name, f"must have at least {least} draws, got {shape[0]}")
    values = log_likelihood.detach().double()
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).any(0).nonzero()[0])
        advice = "A row that is impossible under a draw has no leave-one-out density"
        raise InputError(name, f"is not finite at row {row}", advice)
    return values


def _lppd(values: Tensor) -> Tensor:
    return torch.logsumexp(values, 0) - math.log(len(values))


def _grid(length: int) -> int:
    return 30 + int(length**0.5)
