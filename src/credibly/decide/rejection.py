"""Selective prediction: Chow's rule for a known cost of abstaining, and a threshold with a bound on the selective risk.

`selective` tests thresholds on held-out rows. Given the (k+1)-th smallest uncertainty t, the rows below it are an
i.i.d. sample of the rows that t accepts, so their mistakes are binomial with the true risk and an exact test applies.
Thresholds are tested from strict to lax, from several starting points that split the error probability; each sequence
stops at its first failure. With the stated confidence no threshold that passes has a risk above the limit, and the
laxest of them is returned (fixed-sequence testing as in Angelopoulos et al. 2021, for the problem of Geifman & El-Yaniv
2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.core.checks import check_probability, is_real
from credibly.core.inputs import to_values
from credibly.decide.utility import expected_utility
from credibly.errors import InputError
from credibly.predictive.base import Predictive

GRID, STARTS = 100, 5  # number of thresholds to test, and of starting points of test sequences


class Rejection(NamedTuple):
    """Predictions with a reject option.

    Attributes:
        label: the best class, (N, ...).
        accepted: whether to predict it rather than abstain, (N, ...).
        expected_cost: of the label where it is accepted, of abstaining elsewhere, (N, ...).
    """

    label: Tensor
    accepted: Tensor
    expected_cost: Tensor


def reject(predictive: Predictive, *, cost: float, costs: Any = None) -> Rejection:
    """Apply Chow's rule: predict where the expected cost of the best label is at most the cost of abstaining.

    Args:
        predictive: predictions of labels.
        cost: cost of abstaining, in the units of a mistake. Without `costs` a mistake costs 1, and rows whose highest
            probability is at least 1 - cost are accepted.
        costs: cost matrix (classes, classes): row i, column j is the cost of predicting i where j is true.
    """
    if not is_real(cost) or cost < 0:
        raise InputError("cost", f"must be a non-negative number, got {cost!r}")
    classes = _labels("predictive", predictive).probabilities.shape[-1]
    table = 1 - torch.eye(classes, dtype=torch.float64) if costs is None else torch.as_tensor(costs).double()
    if table.shape != (classes, classes):
        raise InputError("costs", f"must have shape ({classes}, {classes}), got {tuple(table.shape)}")
    choice = expected_utility(predictive, -table)
    expected = -choice.value
    # Rounding in a sum of probabilities must not reject a row that lies exactly on the limit.
    accepted = expected <= cost + 4 * torch.finfo(expected.dtype).eps
    return Rejection(choice.best, accepted, torch.where(accepted, expected, float(cost)))


@dataclass(frozen=True)
class Selection:
    """A threshold on the uncertainty with a bound on the selective risk, estimated on held-out rows.

    Attributes:
        threshold: rows with a lower uncertainty are accepted; -inf (accept none) if no threshold passed.
        risk: the requested limit on the error rate of accepted rows.
        confidence: probability that the true risk is within the limit.
        accepted, mistakes, rows: held-out rows accepted, mistakes among them, and held-out rows in total.
        bound: upper bound on the true risk at the confidence of this threshold's test; nan if none passed.
        score: the uncertainty to compare with the threshold, as in `Predictive.ood_score`.
    """

    threshold: float
    risk: float
    confidence: float
    accepted: int
    mistakes: int
    rows: int
    bound: float
    score: str = "max_probability"

    @property
    def coverage(self) -> float:
        """Fraction of the held-out rows that are accepted."""
        return self.accepted / self.rows

    def accept(self, predictive: Predictive) -> Tensor:
        """Return which rows to accept, (N,) booleans."""
        return self.below(predictive.ood_score(self.score))

    def below(self, uncertainty: Tensor) -> Tensor:
        """Return which uncertainties lie below the threshold."""
        return uncertainty.double() < self.threshold


def selective(
    predictive: Predictive, y: Any, *, risk: float = 0.01, confidence: float = 0.95, score: str = "max_probability"
) -> Selection:
    """Return the laxest threshold on the uncertainty that bounds the error rate of accepted rows, from held-out rows.

    The guarantee: with probability at least `confidence` over the held-out sample, an accepted new row from the same
    distribution is wrong with probability at most `risk`. It does not cover out-of-distribution rows.

    Args:
        predictive: predictions for rows held out from training.
        y: their labels.
        risk: the largest error rate of accepted rows.
        confidence: probability that the bound holds.
        score: the uncertainty, as in `Predictive.ood_score`.
    """
    wrong = mistakes(predictive, y)
    return selective_threshold(predictive.ood_score(score), wrong, risk=risk, confidence=confidence, score=score)


def mistakes(predictive: Predictive, y: Any) -> Tensor:
    """Return where the most probable label differs from y, (N,) booleans."""
    guess = _labels("predictive", predictive).probabilities.argmax(-1)
    target = to_values(y, "y").to(guess.device)
    if target.shape != guess.shape or guess.ndim != 1:
        advice = "One label per row is needed"
        raise InputError("y", f"has shape {tuple(target.shape)}, the predictions have {tuple(guess.shape)}", advice)
    return guess != target


def selective_threshold(
    uncertainty: Tensor,
    wrong: Tensor,
    *,
    risk: float = 0.01,
    confidence: float = 0.95,
    score: str = "max_probability",
) -> Selection:
    """Compute `selective` from the uncertainty of each held-out row and whether its prediction is wrong, both (N,)."""
    check_probability("risk", risk)
    check_probability("confidence", confidence)
    u, w = uncertainty.detach().double().cpu(), wrong.detach().cpu()
    if u.ndim != 1 or len(u) == 0 or bool(u.isnan().any()):
        raise InputError("uncertainty", f"must be one number per row, (N,), without NaN, got shape {tuple(u.shape)}")
    if w.shape != u.shape or not bool(((w == 0) | (w == 1)).all()):
        raise InputError("wrong", f"must be True or False per row, ({len(u)},), got shape {tuple(w.shape)}")
    n, level = len(u), (1 - confidence) / STARTS
    first = math.ceil(math.log(level) / math.log1p(-risk))  # with fewer rows the test fails even without a mistake
    if first > n:
        return Selection(-math.inf, risk, confidence, 0, 0, n, math.nan, score)
    counts = sorted({round(first * (n / first) ** (i / (GRID - 1))) for i in range(GRID)})
    order = u.sort()
    mistakes_up_to = w[order.indices].long().cumsum(0)
    best: list[Any] | None = None
    tested: dict[int, tuple[bool, float, int, int]] = {}
    for start in range(STARTS):
        for i in range(start * len(counts) // STARTS, len(counts)):
            if i not in tested:
                k = counts[i]
                limit = float(order.values[k]) if k < n else math.inf
                # Fewer than k where there are ties.
                below = int(torch.searchsorted(order.values, limit)) if k < n else n
                events = int(mistakes_up_to[below - 1]) if below else 0
                tested[i] = (_at_most(_log_choose(events, below), below, risk) <= level, limit, below, events)
            passed, *found = tested[i]
            if not passed:
                break
            best = found if best is None or found[0] > best[0] else best
    if best is None:
        return Selection(-math.inf, risk, confidence, 0, 0, n, math.nan, score)
    bound = binomial_upper(best[2], best[1], 1 - level)
    return Selection(best[0], risk, confidence, best[1], best[2], n, bound, score)


def binomial_upper(events: int, trials: int, confidence: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson upper bound on a probability after `events` in `trials`."""
    if not 0 <= events <= trials or trials < 1:
        raise InputError("events", f"must be from 0 to trials, of at least 1 trial, got {events} in {trials} trials")
    if not 0 < confidence < 1:
        raise InputError("confidence", f"must be strictly between 0 and 1, got {confidence!r}")
    if events == trials:
        return 1.0
    low, high, ways = events / trials, 1.0, _log_choose(events, trials)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(ways, trials, middle) > 1 - confidence else (low, middle)
    return high


def _log_choose(events: int, trials: int) -> Tensor:
    """Return log(trials choose i) for i from 0 to `events`, in float64."""
    i = torch.arange(events + 1, dtype=torch.float64)
    return math.lgamma(trials + 1) - torch.lgamma(i + 1) - torch.lgamma(trials - i + 1)


def _at_most(log_choose: Tensor, trials: int, p: float) -> float:
    """Return P(X <= events) of a binomial X, where `log_choose` has an entry for each of 0 to events."""
    i = torch.arange(len(log_choose), dtype=torch.float64)
    return min(1.0, float((log_choose + i * math.log(p) + (trials - i) * math.log1p(-p)).exp().sum())) if p < 1 else 0.0


def _labels(name: str, predictive: Predictive) -> Predictive:
    if predictive.likelihood.support not in ("class", "binary"):
        found = f"must be predictions of labels, got {predictive.likelihood.support} targets"
        raise InputError(name, found, "For other targets use expected_utility with an action that abstains")
    return predictive
