"""The ChEES criterion of a trajectory length T, its derivative, and the jitter that goes with it.

    C(T) = 1/4 E[(|w' - m|^2 - |w - m|^2)^2]               change in the estimator of the expected square

w is the start of a trajectory of length t = h T, w' its end, and m the mean of w, which is that of w' too. A longer
trajectory moves the end along its velocity v', so

    dC / d log T = E[(|w' - m|^2 - |w - m|^2) (w' - m) . t v']

h runs through the van der Corput sequence 1/2, 1/4, 3/4, 1/8, ..., which covers (0, 1) evenly. For a Gaussian of unit
width, C = sin^2 t in every dimension, and C per unit of T is largest at T = pi/2. (Hoffman, Radul and Sountsov 2021;
the criterion per unit of T is that of Sountsov and Hoffman 2021.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def chees(before: Tensor, after: Tensor, motion: Tensor) -> tuple[Tensor, Tensor]:
    """Return C and dC / d log T of every trajectory, (C,) each.

    Args:
        before, after: w - m and w' - m, (C, D).
        motion: t v', (C, D).
    """
    change = after.square().sum(1) - before.square().sum(1)
    return change.square() / 4, change * (after * motion).sum(1)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the means (K,) of values (K, C) with weights (C,); columns that are not finite do not count."""
    finite = torch.isfinite(values).all(0)
    # Zero times infinity is NaN, so values without weight must be finite too.
    weight, values = torch.where(finite, weight, 0.0), torch.where(finite, values, 0.0)
    return (values * weight).sum(1) / weight.sum().clamp(min=1e-300)


def van_der_corput(index: int) -> float:
    """Return the van der Corput number: the binary digits of index + 1 in reverse, after the point."""
    value, part, left = 0.0, 0.5, index + 1
    while left:
        value, part, left = value + part * (left & 1), part / 2, left >> 1
    return value
