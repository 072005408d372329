"""When not to answer: Chow's rule for a known cost, and a threshold that bounds the risk of the answers given.

`selective` tests thresholds on held-out rows. Given the (k+1)-th smallest uncertainty t, the rows below it are independent rows
of those that t accepts, so their mistakes are binomial with the true risk and an exact test applies. Thresholds are tested from
strict to lax, from several starts that share the allowed chance of error; a chain of tests ends at its first failure. So with the
stated confidence no threshold that passes has a risk above the limit, and the laxest of them is taken
(fixed-sequence testing, as in Angelopoulos et al. 2021; the task is that of Geifman & El-Yaniv 2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.decide.utility import expected_utility
from credibly.errors import InputError
from credibly.predictive.base import Predictive

GRID, STARTS = 100, 5  # thresholds that are tested, and where chains of tests begin


class Rejection(NamedTuple):
    """Answers with the option to give none.

    Attributes:
        label: the best class, (N, ...). accepted: whether it is given, (N, ...).
        expected_cost: of what is done: of the label where it is accepted, else of rejecting, (N, ...).
    """

    label: Tensor
    accepted: Tensor
    expected_cost: Tensor


def reject(predictive: Predictive, *, cost: float, costs: Any = None) -> Rejection:
    """Chow's rule: an answer is given where its expected cost is at most that of giving none.

    Args:
        predictive: of labels.
        cost: of giving no answer, in the units of a mistake: without `costs` a mistake costs 1, and rows are accepted whose
            highest probability is at least 1 - cost.
        costs: a table (classes, classes) of what it costs to say i where j is true.
    """
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost < math.inf:
        raise InputError("cost", f"found {cost!r}", "Pass a number from 0 up: what giving no answer costs")
    classes = _labels("predictive", predictive).probabilities.shape[-1]
    table = 1 - torch.eye(classes, dtype=torch.float64) if costs is None else torch.as_tensor(costs).double()
    if table.shape != (classes, classes):
        raise InputError("costs", f"has shape {tuple(table.shape)}", f"Pass a table ({classes}, {classes})")
    choice = expected_utility(predictive, -table)
    expected = -choice.value
    # The rounding of a sum of probabilities must not decide about a row that lies on the limit.
    accepted = expected <= cost + 4 * torch.finfo(expected.dtype).eps
    return Rejection(choice.best, accepted, torch.where(accepted, expected, float(cost)))


@dataclass(frozen=True)
class Selection:
    """A threshold on the uncertainty, and what held-out rows say about the answers below it.

    Attributes:
        threshold: rows whose uncertainty is below it are accepted; -inf where no threshold passed, so none are.
        risk: the limit that was asked for. confidence: that the true risk is within it.
        accepted, mistakes, rows: held-out rows that are accepted, mistakes among them, and rows in all.
        bound: upper bound of the true risk with the confidence that this threshold's own tests had; nan where none passed.
        score: the uncertainty that is compared, as in `Predictive.ood_score`.
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
        """Share of the held-out rows that are accepted."""
        return self.accepted / self.rows

    def accept(self, predictive: Predictive) -> Tensor:
        """Which rows to answer, (N,) booleans."""
        return self.below(predictive.ood_score(self.score))

    def below(self, uncertainty: Tensor) -> Tensor:
        """Which of these uncertainties are low enough."""
        return uncertainty.double() < self.threshold


def selective(
    predictive: Predictive, y: Any, *, risk: float = 0.01, confidence: float = 0.95, score: str = "max_probability"
) -> Selection:
    """The laxest threshold on an uncertainty for which the error rate of accepted rows is bounded, by held-out rows.

    The promise: over the drawing of the held-out rows, with probability `confidence` or more, a new row of the same kind that is
    accepted is wrong with probability `risk` or less. It says nothing about rows of another kind.

    Args:
        predictive: predictions of rows that were not trained on. y: their labels.
        risk: the largest error rate of accepted rows.
        score: the uncertainty, as in `Predictive.ood_score`.
    """
    wrong = mistakes(predictive, y)
    return selective_threshold(predictive.ood_score(score), wrong, risk=risk, confidence=confidence, score=score)


def mistakes(predictive: Predictive, y: Any) -> Tensor:
    """Where the most probable label is not y, (N,) booleans."""
    guess = _labels("predictive", predictive).probabilities.argmax(-1)
    target = (y if isinstance(y, Tensor) else torch.as_tensor(getattr(y, "values", y))).to(guess.device)
    if target.shape != guess.shape or guess.ndim != 1:
        advice = f"These predictions have {tuple(guess.shape)}; one label for each row is needed"
        raise InputError("y", f"has shape {tuple(target.shape)}", advice)
    return guess != target


def selective_threshold(
    uncertainty: Tensor,
    wrong: Tensor,
    *,
    risk: float = 0.01,
    confidence: float = 0.95,
    score: str = "max_probability",
) -> Selection:
    """`selective` from numbers: the uncertainty of each held-out row, and whether its answer is wrong, both (N,)."""
    for name, value in (("risk", risk), ("confidence", confidence)):
        if isinstance(value, bool) or not isinstance(value, float) or not 0 < value < 1:
            raise InputError(name, f"found {value!r}", "Pass a number between 0 and 1")
    u, w = uncertainty.detach().double().cpu(), wrong.detach().cpu()
    if u.ndim != 1 or len(u) == 0 or bool(u.isnan().any()):
        raise InputError("uncertainty", f"has shape {tuple(u.shape)}", "Pass one number for each row, (N,), and no NaN")
    if w.shape != u.shape or not bool(((w == 0) | (w == 1)).all()):
        raise InputError("wrong", f"has shape {tuple(w.shape)}", f"Pass True or False for each row, ({len(u)},)")
    n, level = len(u), (1 - confidence) / STARTS
    first = math.ceil(math.log(level) / math.log1p(-risk))  # with fewer rows even no mistake would prove nothing
    if first > n:
        return Selection(-math.inf, risk, confidence, 0, 0, n, math.nan, score)
    counts = sorted({round(first * (n / first) ** (i / (GRID - 1))) for i in range(GRID)})
    order = u.sort()
    made = w[order.indices].long().cumsum(0)
    best: list[Any] | None = None
    tested: dict[int, tuple[bool, float, int, int]] = {}
    for start in range(STARTS):
        for place in range(start * len(counts) // STARTS, len(counts)):
            if place not in tested:
                k = counts[place]
                limit = float(order.values[k]) if k < n else math.inf
                below = (
                    int(torch.searchsorted(order.values, limit)) if k < n else n
                )  # fewer than k where some are equal
                seen = int(made[below - 1]) if below else 0
                tested[place] = (_at_most(_log_choose(seen, below), below, risk) <= level, limit, below, seen)
            passed, *found = tested[place]
            if not passed:
                break
            best = found if best is None or found[0] > best[0] else best
    if best is None:
        return Selection(-math.inf, risk, confidence, 0, 0, n, math.nan, score)
    bound = binomial_upper(best[2], best[1], 1 - level)
    return Selection(best[0], risk, confidence, best[1], best[2], n, bound, score)


def binomial_upper(events: int, trials: int, confidence: float = 0.95) -> float:
    """Clopper and Pearson's one-sided upper bound of a probability, of which `events` in `trials` were seen."""
    if not 0 <= events <= trials or trials < 1:
        raise InputError(
            "events", f"found {events} in {trials} trials", "Pass 0 to trials of them, and at least 1 trial"
        )
    if not 0 < confidence < 1:
        raise InputError("confidence", f"found {confidence!r}", "Pass a number between 0 and 1")
    if events == trials:
        return 1.0
    low, high, ways = events / trials, 1.0, _log_choose(events, trials)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(ways, trials, middle) > 1 - confidence else (low, middle)
    return high


def _log_choose(events: int, trials: int) -> Tensor:
    """Logarithm of "trials choose i" for i from 0 to `events`, in float64."""
    i = torch.arange(events + 1, dtype=torch.float64)
    return math.lgamma(trials + 1) - torch.lgamma(i + 1) - torch.lgamma(trials - i + 1)


def _at_most(log_choose: Tensor, trials: int, p: float) -> float:
    """P(a binomial count is at most as many as there are ways given, from 0 on), for 0 < p < 1."""
    i = torch.arange(len(log_choose), dtype=torch.float64)
    return min(1.0, float((log_choose + i * math.log(p) + (trials - i) * math.log1p(-p)).exp().sum())) if p < 1 else 0.0


def _labels(name: str, predictive: Predictive) -> Predictive:
    if predictive.likelihood.support not in ("class", "binary"):
        found = f"is of {predictive.likelihood.support} targets"
        raise InputError(
            name, found, "This is for labels; for other targets use expected_utility with an action that rejects"
        )
    return predictive
