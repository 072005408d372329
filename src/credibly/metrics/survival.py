"""Metrics of predicted times when some of the observed ones are right-censored."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.errors import InputError

BLOCK = 2**22  # pairs of rows compared at a time


def concordance_index(predicted: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Return the fraction of comparable pairs of rows that the predicted times order correctly (Harrell's C).

    A pair is comparable if the earlier time is an observed event, or if the times are equal and one of the two is; an
    equal prediction counts half. 0.5 is chance; NaN if no pair is comparable.

    Args:
        predicted: predicted times such as medians, or anything that grows with them, (N,).
        time: observed times, (N,).
        event: whether the event was observed at that time, (N,).
    """
    rows = _rows(predicted=predicted, time=time, event=event)
    late, when, seen = predicted.double(), time.double(), event.bool()
    right = comparable = torch.zeros((), dtype=torch.float64, device=late.device)
    step = max(1, BLOCK // max(rows, 1))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        earlier = seen[some, None] & ((when[some, None] < when) | ((when[some, None] == when) & ~seen))
        agree = (late[some, None] < late).double() + 0.5 * (late[some, None] == late).double()
        right = right + (agree * earlier).sum()
        comparable = comparable + earlier.sum()
    return right / comparable


def censored_fraction_below(cdf: Tensor, event: Tensor, levels: Tensor) -> Tensor:
    """Return the estimated fraction of rows whose F_i(T_i) is at most each level, (levels,).

    T_i is known for events. A time censored at c_i counts by the probability of F_i(T_i) <= level given T_i > c_i under
    the prediction itself, (level - u_i) / (1 - u_i) with u_i = F_i(c_i) (Haider et al. 2020). For calibrated
    predictions the result equals levels.

    Args:
        cdf: F_i at the observed or censored time, (N,).
        event: whether the event was observed, (N,).
        levels: probabilities.
    """
    _rows(cdf=cdf, event=event)
    u, at = cdf.double(), levels.double()[:, None]
    known = (u <= at).double()
    expected = ((at - u) / (1 - u).clamp_min(1e-12)).clamp(0, 1)
    return torch.where(event.bool(), known, expected).mean(1)


def _rows(**given: Tensor) -> int:
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise InputError(", ".join(given), f"must be one value per row, got shapes {list(shapes.values())}")
    return len(next(iter(given.values())))
