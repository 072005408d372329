"""Deviations of SGD's window averages from their mean, for networks whose averages fill the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def deviations_in_place(averages: list[Tensor], stretch: float, widest: Tensor) -> Iterator[Tensor]:
    """Yield mean + deviation (D,) for each pair of successive averages, and free the averages on the way.

    A deviation has half the variance of the difference, without the drift of the mean; it is stretched, and at most as
    wide as `widest` (D,). `credibly.methods.swag` computes the same in closed form; here there is no second copy.
    """
    count = len(averages) - 1
    mean = torch.zeros_like(averages[0])
    for average in averages[1:]:
        mean.add_(average, alpha=1 / count)
    drift = (averages[-1] - averages[0]) / count
    squares = torch.zeros_like(mean)
    for k in range(count):
        averages[k].sub_(averages[k + 1]).add_(drift).mul_(-stretch / math.sqrt(2))
        squares.addcmul_(averages[k], averages[k])
    averages.pop()
    factor = widest.to(mean) / squares.div_(count - 1).sqrt_()
    factor.nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1)
    for k in range(count):
        deviation, averages[k] = averages[k], averages[k][:0]
        yield deviation.mul_(factor).add_(mean)
