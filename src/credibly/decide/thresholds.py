"""Thresholds by cost: at which probability to act, where a missed case and a false alarm cost differently.

Acting costs c_fp where the row is not a case; not acting costs c_fn where it is one. For calibrated probabilities p the
expected cost is least if a row is flagged where p c_fn > (1 - p) c_fp, which is

    p > c_fp / (c_fp + c_fn).

`cost_threshold` is that number. `best_threshold` minimises the cost on labelled rows instead, and is the remedy where
probabilities are not calibrated, such as those of a fit with class weights; it needs enough cases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.core.checks import check_positive
from credibly.errors import InputError
from credibly.predictive.base import Predictive


class CostCurve(NamedTuple):
    """The outcome of flagging rows with a probability of at least t, at every threshold t that makes a difference.

    Attributes:
        threshold: increasing, (T,): each probability that occurs, and infinity, which flags no row.
        cost: mean cost per row, (T,).
        recall: fraction of the cases that are flagged, (T,); NaN without cases.
        precision: fraction of the flagged rows that are cases, (T,); NaN where none is flagged.
        flagged: number of flagged rows, (T,).
    """

    threshold: Tensor
    cost: Tensor
    recall: Tensor
    precision: Tensor
    flagged: Tensor


class Threshold(NamedTuple):
    """A threshold, and its outcome on labelled rows: flag the rows with a probability of at least `threshold`.

    Attributes:
        threshold: from 0 to 1; infinity flags no row.
        cost: mean cost per row.
        recall: fraction of the cases that are flagged; NaN without cases.
        precision: fraction of the flagged rows that are cases; NaN if none is flagged.
        flagged: number of flagged rows.
    """

    threshold: float
    cost: float
    recall: float
    precision: float
    flagged: int


def cost_threshold(*, false_positive: float, false_negative: float) -> float:
    """Return c_fp / (c_fp + c_fn), the threshold of least expected cost for calibrated probabilities."""
    check_positive("false_positive", false_positive)
    check_positive("false_negative", false_negative)
    return false_positive / (false_positive + false_negative)


def cost_curve(
    probabilities: Any, labels: Any, *, false_positive: float = 1.0, false_negative: float = 1.0
) -> CostCurve:
    """Return the mean cost per row at every threshold.

    Args:
        probabilities: of being a case, (N,); or predictions of two classes, of which class 1 is the case.
        labels: whether each row is a case: 0 and 1, or booleans, (N,).
        false_positive: cost of flagging a row that is not a case.
        false_negative: cost of not flagging a case.
    """
    check_positive("false_positive", false_positive)
    check_positive("false_negative", false_negative)
    p, case = _checked(probabilities, labels)
    levels, group = torch.unique(p, return_inverse=True)  # in increasing order
    flagged, cases = (_at_least(group, part, len(levels)) for part in (torch.ones_like(p), case))
    missed, alarms = case.sum() - cases, flagged - cases
    cost = (false_positive * alarms + false_negative * missed) / len(p)
    threshold = torch.cat([levels, levels.new_tensor([torch.inf])])
    return CostCurve(threshold, cost, cases / case.sum(), cases / flagged, flagged.long())


def best_threshold(
    probabilities: Any, labels: Any, *, false_positive: float = 1.0, false_negative: float = 1.0
) -> Threshold:
    """Return the threshold with the least mean cost on labelled rows; of equal ones the highest.

    The arguments are those of `cost_curve`. Use rows that the fit has not seen. The cost found is optimistic, since the
    threshold was chosen on the same rows.
    """
    curve = cost_curve(probabilities, labels, false_positive=false_positive, false_negative=false_negative)
    return _pick(curve, len(curve.cost) - 1 - int(curve.cost.flip(0).argmin()))


def outcome(
    probabilities: Any, labels: Any, threshold: float, *, false_positive: float = 1.0, false_negative: float = 1.0
) -> Threshold:
    """Return the outcome of a given threshold on labelled rows. The arguments are those of `cost_curve`."""
    curve = cost_curve(probabilities, labels, false_positive=false_positive, false_negative=false_negative)
    at = int(torch.searchsorted(curve.threshold, torch.as_tensor(float(threshold), dtype=curve.threshold.dtype)))
    return _pick(curve, min(at, len(curve.threshold) - 1))._replace(threshold=float(threshold))


def _pick(curve: CostCurve, at: int) -> Threshold:
    threshold, cost, recall, precision, flagged = (float(column[at]) for column in curve)
    return Threshold(threshold, cost, recall, precision, int(flagged))


def _at_least(group: Tensor, value: Tensor, levels: int) -> Tensor:
    """Return the total of `value` over the rows at each level or above, and of no row, (levels + 1,)."""
    total = torch.zeros(levels + 1, dtype=torch.float64).index_add_(0, group, value)
    return total.flip(0).cumsum(0).flip(0)


def _checked(probabilities: Any, labels: Any) -> tuple[Tensor, Tensor]:
    if isinstance(probabilities, Predictive):
        found = probabilities.probabilities
        if found.ndim != 2 or found.shape[1] != 2:
            raise InputError(
                "probabilities",
                f"must be predictions of two classes, got shape {tuple(found.shape)}",
                "Pass the probability of the class that is the case, (N,); for more classes use class_costs",
            )
        probabilities = found[:, 1]
    p = torch.as_tensor(probabilities).detach().cpu().double()
    case = torch.as_tensor(labels).detach().cpu().double()
    if p.ndim != 1 or len(p) == 0 or not bool(((p >= 0) & (p <= 1)).all()):
        raise InputError("probabilities", f"must be numbers from 0 to 1, (N,), got shape {tuple(p.shape)}")
    if case.shape != p.shape or not bool(((case == 0) | (case == 1)).all()):
        raise InputError("labels", f"must be 0 or 1 per row, ({len(p)},), got shape {tuple(case.shape)}")
    return p, case
