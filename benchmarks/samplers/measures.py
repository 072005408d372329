"""The measures of a run: ESS and R-hat of predictions at test rows, per second, and the test log-likelihood."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.diagnostics.convergence import MIN_DRAWS, measure

# Chains and draws of a stored trace, and draws per chain from which log-likelihoods are computed.
TRACES, TRACE_DRAWS, SCORED = 4, 200, 2_000


def measured(
    functions: Any, log_noise: Any, y: Tensor, y_std: float, seconds: float, gradients: float
) -> dict[str, Any]:
    """Return the measures of one run as plain values.

    Args:
        functions: predictions (chain, draw, row) of standardised targets.
        log_noise: log standard deviations of the noise, (chain, draw) or (chain, draw, row).
        y: standardised targets of the rows.
        y_std: their standard deviation in units of the target.
        seconds: from the first warm-up step to the last draw.
        gradients: of all chains, warm-up included.
    """
    values, noise = _tensor(functions), _tensor(log_noise)
    chains, draws, rows = values.shape
    found: dict[str, Any] = {"chains": chains, "draws": draws, "rows": rows, **_scores(values, noise, y, y_std)}
    if draws < MIN_DRAWS or not bool(torch.isfinite(values).all()):
        return {**found, "ess_worst": None, "ess_median": None, "rhat_worst": None, "rhat_median": None, "trace": None}
    mixing = measure(values)
    bulk, rhat = torch.nan_to_num(mixing.bulk, nan=0.0), torch.nan_to_num(mixing.rhat, nan=math.inf, posinf=math.inf)
    worst = int(rhat.argmax())
    found |= {
        "ess_worst": float(bulk.min()),
        "ess_median": float(bulk.median()),
        "ess_tail_worst": float(torch.nan_to_num(mixing.tail, nan=0.0).min()),
        "rhat_worst": _plain(rhat.max()),
        "rhat_median": _plain(rhat.median()),
        "worst_row": worst,
        "trace": _trace(values[..., worst]),
    }
    for kind in ("worst", "median"):
        found[f"ess_{kind}_per_second"] = found[f"ess_{kind}"] / max(seconds, 1e-9)
    found["ess_worst_per_gradient"] = found["ess_worst"] / max(gradients, 1.0)
    return found


def log_likelihood(functions: Tensor, log_noise: Tensor, y: Tensor) -> Tensor:
    """Return log (1/S) sum_s N(y; f_s, sigma_s^2) of every row, (R,), for draws (S, R) and log sigmas (S, 1 or R)."""
    noise = log_noise.double()
    z = (y.double() - functions.double()) * torch.exp(-noise)
    density = -0.5 * z.square() - noise - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp(density, 0) - math.log(len(functions))


def _scores(values: Tensor, noise: Tensor, y: Tensor, y_std: float) -> dict[str, Any]:
    """Return RMSE and mean log-likelihood in units of the target, from evenly spaced draws."""
    draws = values.shape[1]
    picks = torch.linspace(0, draws - 1, min(draws, max(1, SCORED // values.shape[0]))).round().long()
    if noise.ndim == 2:
        noise = noise.unsqueeze(-1)
    some, sigma = values[:, picks].flatten(0, 1), noise[:, picks].flatten(0, 1)
    score = log_likelihood(some, sigma, y).mean() - math.log(y_std)
    rmse = (values.double().mean((0, 1)) - y.double()).square().mean().sqrt() * y_std
    return {"log_likelihood": _plain(score), "rmse": _plain(rmse)}


def _trace(row: Tensor) -> list[list[float]]:
    """Return a few chains of one prediction, thinned and rounded for a picture."""
    picks = torch.linspace(0, row.shape[1] - 1, min(row.shape[1], TRACE_DRAWS)).round().long()
    return [[round(value, 4) for value in chain] for chain in row[:TRACES, picks].tolist()]


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def _plain(value: Tensor) -> float | None:
    """Return a number that JSON can hold, or None."""
    return float(value) if math.isfinite(float(value)) else None
