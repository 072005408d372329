"""Coverage of randomised intervals of counts, which is exact, unlike that of deterministic ones.

The CDF of a count is a step function, so a deterministic interval usually covers more than the level. With
v uniform on [0, 1], the randomised probability integral transform (Czado, Gneiting and Held 2009)

    u = F(y - 1) + v (F(y) - F(y - 1))

is continuous, and the interval of index t contains y if |Phi^-1(u)| <= t: an end belongs to the interval in some
rows and not in others. Nothing is sampled here. Given t, a row is covered with probability

    |[F(y - 1), F(y)] with [Phi(-t), Phi(t)]| / (F(y) - F(y - 1)),

the part of the step inside, and the threshold is the t at which these add up to the promised number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credibly.conformal.ranks import rank
from credibly.predictive.base import Predictive

# Largest t, beyond which no probability is left in float64, and halvings of the bracket.
LARGEST, HALVINGS = 8.0, 60


def steps_of(predictive: Predictive, y: Any) -> Tensor:
    """Return F(y - 1) and F(y) of every row, (2, N, ...), in float64."""
    target = torch.as_tensor(y)
    upper = predictive.cdf(target).double().cpu()
    below = predictive.cdf((target - 1).clamp_min(0)).double().cpu()
    lower = torch.where(target.cpu().reshape(below.shape) > 0, below, torch.zeros_like(below))
    return torch.stack([torch.minimum(lower, upper), upper])


def covered(steps: Tensor, t: float) -> Tensor:
    """Return the probability with which the randomised interval of index t contains each row."""
    ends = torch.special.ndtr(torch.tensor([-t, t], dtype=torch.float64))
    lower, upper = steps
    inside = (torch.minimum(upper, ends[1]) - torch.maximum(lower, ends[0])).clamp_min(0)
    point = ((lower >= ends[0]) & (upper <= ends[1])).double()
    return torch.where(upper > lower, inside / (upper - lower).clamp_min(1e-300), point)


def randomised_threshold(steps: Tensor, level: float) -> float:
    """Return the smallest t whose randomised intervals contain k = ceil((n + 1) level) of the n rows, on average."""
    wanted = rank(steps.shape[1], level) / steps.shape[1]
    low, high = 0.0, LARGEST
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        enough = float(covered(steps, middle).mean()) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high
