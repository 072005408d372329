"""What the page shows of a posterior: predictions on a grid, the predictive at one input, R-hat of functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from credibly.diagnostics.convergence import MIN_DRAWS, rhat
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.predictive.base import Predictive
from credibly.web.playground.protocol import FitRequest

FUNCTIONS = 12
LEVEL = 0.9
# Points of a predictive density, and how many standard deviations they reach to either side.
DENSITY_POINTS, REACH = 101, 4.0
# Significant digits of numbers that are only plotted.
DIGITS = 6


def grid_points(request: FitRequest) -> Tensor:
    """Return the inputs (G, P) of a request's grid; of two inputs, the first varies fastest."""
    axes = [torch.linspace(low, high, count) for low, high, count in request.grid]
    if len(axes) == 1:
        return axes[0].unsqueeze(1)
    second, first = torch.meshgrid(axes[1], axes[0], indexing="ij")
    return torch.stack([first.flatten(), second.flatten()], 1)


def band(posterior: Posterior, x: Tensor, *, classes: bool) -> dict[str, Any]:
    """Return the fields of a band message that come from predictions at x."""
    p = posterior.predict(x)
    found: dict[str, Any] = {
        "draws": p.draws,
        "mean": plain(p.mean),
        "aleatoric": plain(p.aleatoric),
        "epistemic": plain(p.epistemic),
        "rhat": worst_rhat(posterior, p),
    }
    if not classes:
        found["functions"] = [plain(one) for one in p.functions(FUNCTIONS)]
    return found


def worst_rhat(posterior: Posterior, predictive: Predictive) -> float | None:
    """Return the largest R-hat of the chains' functions over all inputs; None without several draws per chain."""
    if not isinstance(posterior, SampledPosterior) or posterior.shape[1] < MIN_DRAWS:
        return None
    chains, draws, _ = posterior.shape
    return finite(rhat(predictive.functions().reshape(chains, draws, -1)).nan_to_num(nan=1.0).max())


def probe(posterior: Posterior, x: tuple[float, ...], *, classes: bool) -> dict[str, Any]:
    """Return the fields of a probe message: the predictive at one input in numbers, and its density."""
    at = torch.tensor([x])
    p = posterior.predict(at)
    found: dict[str, Any] = {
        "x": list(x),
        "mean": finite(p.mean[0]),
        "aleatoric": finite(p.aleatoric[0]),
        "epistemic": finite(p.epistemic[0]),
        "total": finite(p.total[0]),
    }
    if classes:
        return found | {"lower": None, "upper": None, "y": None, "density": None}
    lower, upper = p.interval(LEVEL)
    spread = REACH * p.std[0]
    if not bool(torch.isfinite(p.mean[0] + spread)):
        # Of chains with an overflowing variance; there is no range on which to draw a density.
        return found | {"lower": finite(lower[0]), "upper": finite(upper[0]), "y": None, "density": None}
    y = torch.linspace(float(p.mean[0] - spread), float(p.mean[0] + spread), DENSITY_POINTS)
    density = posterior.predict(at.expand(len(y), -1)).log_prob(y).exp()
    numbers = {"lower": finite(lower[0]), "upper": finite(upper[0])}
    return found | numbers | {"y": plain(y), "density": plain(density)}


def finite(value: Tensor | float) -> float | None:
    """Return a number, or None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def plain(values: Tensor) -> list[float | None]:
    """Return a flat tensor as numbers of a few digits; None where it is not finite."""
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in values.double().flatten().tolist()]
