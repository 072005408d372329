"""`posterior.compress(n, x)`: fewer draws with nearly the same predictions.

For p the model average over all S draws and q_A that over a subset A of n draws, the subset is chosen to minimise

    KL(p || q_A) = E_x E_(y ~ p(. | x)) [log p(y | x) - log (1/n) sum_(s in A) p(y | x, w_s)],

estimated from samples of y at the rows of x: greedily, one draw at a time, then by exchanging draws as long as that
helps. It needs the density of every sample under every draw once, and no further forward pass.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_integer
from credibly.core.inputs import map_inputs, row_count
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.posterior.base import CalibratedPosterior, Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.predictive.base import Predictive

# Rows of x used for the choice, samples of y at all of them together, and values of densities held at a time.
ROWS = 300
SAMPLES = 6_000
DENSITIES = 2**25
# Candidates sampled from a posterior that is not a list of draws.
CANDIDATES = 400
# Rounds in which every chosen draw may be exchanged for another.
EXCHANGES = 3


def compress(posterior: Posterior, n: int, x: Any, y: Any = None, *, seed: int = 0) -> DrawsPosterior:
    """Return a posterior with n of the draws; see `Posterior.compress`."""
    check_seed(seed)
    check_integer("n", n)
    theta = _candidates(posterior, seed)
    if n > len(theta):
        raise InputError("n", f"must be at most {len(theta)}, the number of draws, got {n}")
    whole = DrawsPosterior(posterior.model, theta.unsqueeze(0), posterior.record)
    inputs = posterior.layout.inputs(x, True)
    rows = row_count(inputs)
    if rows > ROWS:
        kept = torch.linspace(0, rows - 1, ROWS).round().long()
        inputs = map_inputs(lambda t: t[kept.to(t.device)], inputs)
    predictive = whole.predict(inputs)
    chosen = choose(sampled_log_densities(predictive, seed), n)
    # New samples, independent of those used for the choice.
    fresh = sampled_log_densities(predictive, seed + 1)
    loss: dict[str, Any] = {"from": len(theta), "draws": n, "seed": seed, "rows": len(predictive)}
    loss |= _divergence(fresh, chosen)
    small = theta[chosen]
    if y is not None:
        before, after = (DrawsPosterior(posterior.model, t.unsqueeze(0), posterior.record) for t in (theta, small))
        loss |= {"log_density_before": float(before.predict(x).log_prob(y).double().mean())}
        loss |= {"log_density_after": float(after.predict(x).log_prob(y).double().mean())}
    history = {**posterior.record.history, "compressed": loss}
    return DrawsPosterior(posterior.model, small.unsqueeze(0), dataclasses.replace(posterior.record, history=history))


def _candidates(posterior: Posterior, seed: int) -> Tensor:
    """Return the draws to choose from, (S, D)."""
    if isinstance(posterior, CalibratedPosterior):
        found = "is calibrated for all of its draws"
        raise InputError("posterior", found, "Compress posterior.posterior, then calibrate the result")
    if isinstance(posterior, DrawsPosterior):
        return posterior.draws.flatten(0, 1)
    if isinstance(posterior, GaussianPosterior):
        return posterior.sample(CANDIDATES, seed=seed)
    found = f"{type(posterior).__name__} predicts by more than draws of the weights"
    raise InputError("posterior", found, "Pass fewer draws or passes to predict and export")


def sampled_log_densities(predictive: Predictive, seed: int) -> Tensor:
    """Return log p(y | x, w_s) of samples y of the predictive at its rows, (S, samples), in float64."""
    likelihood = predictive.likelihood

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        return likelihood.sample(output, extra, stream(seed, "compression", start, device=output.device))

    drawn = torch.cat(list(predictive.map_blocks(block)), 1)
    drawn = drawn if likelihood.support == "class" else likelihood.restore(drawn, 1)
    # Of every row some of the samples, so that all draws have the same number of them.
    rows = torch.arange(predictive.rows, device=drawn.device)
    parts = []
    total = min(SAMPLES, DENSITIES // len(drawn))
    each = max(1, min(len(drawn), total // len(rows)))
    for number in range(each):
        y = drawn[(rows * each + number) % len(drawn), rows]
        parts.append(torch.cat(list(predictive.log_likelihoods(y)), 1))
    return torch.cat(parts, 1).cpu()


def choose(log_density: Tensor, n: int) -> Tensor:
    """Return the indices of n draws, increasing, whose average is closest to that of all.

    Args:
        log_density: log p(y_j | w_s) of samples of the average over all, (S, J).
        n: number of draws to keep.
    """
    # Relative to the average over all draws. A ratio of zero would make all subsets equal.
    ratio = torch.exp(log_density - _average(log_density)).clamp_min(1e-12)
    total = torch.zeros_like(ratio[0])
    chosen: list[int] = []
    free = torch.ones(len(ratio), dtype=torch.bool)
    for _ in range(n):
        best = _best(ratio, total, len(chosen) + 1, free)
        chosen.append(best)
        free[best] = False
        total = total + ratio[best]
    for _ in range(EXCHANGES if n < len(ratio) else 0):
        changed = False
        for place, old in enumerate(chosen):
            rest = total - ratio[old]
            free[old] = True
            best = _best(ratio, rest, n, free)
            free[best] = False
            changed |= best != old
            chosen[place], total = best, rest + ratio[best]
        if not changed:
            break
    return torch.tensor(sorted(chosen))


def _best(ratio: Tensor, total: Tensor, count: int, free: Tensor) -> int:
    """Return the draw with which the average of `count` draws is closest to that of all."""
    # A sum may round to slightly below zero.
    parts = [((part + total) / count).clamp_min(1e-12) for part in ratio.split(64)]
    loss = torch.cat([divergence_terms(part).mean(1) for part in parts])
    return int(torch.where(free, loss, math.inf).argmin())


def divergence_terms(ratio: Tensor) -> Tensor:
    """Return r - 1 - log r for r = q/p, whose mean over samples of p is KL(p || q).

    E_p r = 1, so r - 1 changes nothing but the noise of the mean: every term is non-negative, and zero where q = p.
    """
    return ratio - 1 - torch.log(ratio)


def _average(log_density: Tensor) -> Tensor:
    return torch.logsumexp(log_density, 0) - math.log(len(log_density))


def _divergence(log_density: Tensor, chosen: Tensor) -> dict[str, float]:
    """Return the mean log density lost, KL(p || q), and the total variation between p and q, from samples of p."""
    ratio = torch.exp(_average(log_density[chosen]) - _average(log_density))
    # TV = E_p max(0, 1 - q/p).
    return {
        "log_density_loss": float(divergence_terms(ratio.clamp_min(1e-300)).mean()),
        "total_variation": float((1 - ratio).clamp_min(0).mean()),
    }
