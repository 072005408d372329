"""Statistics of the evaluated rows, shared by the findings and the pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.metrics import scores as metrics
from credibly.predictive.base import Predictive
from credibly.predictive.pit import pit_values
from credibly.report.once_per_fit import once_per_fit
from credibly.tables.fit_summary import FitSummary

# The most rows in a scatter plot.
POINTS = 400


@once_per_fit
def loss_per_row(facts: FitSummary) -> torch.Tensor:
    """Return the squared error per row, or for classes 1 where the most probable class is wrong."""
    y = torch.as_tensor(facts.y)
    if facts.task == "regression":
        return (facts.predictive.mean.cpu().double() - y).square()
    return (facts.predictive.probabilities.cpu().argmax(-1) != y).double()


@once_per_fit
def log_density_per_row(facts: FitSummary) -> torch.Tensor:
    """Return the log predictive density per row, in nats."""
    return facts.predictive.log_prob(facts.y).cpu().double()


def standard_error(values: torch.Tensor) -> float:
    """Return the standard error of the mean; infinite for a single value."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def confidence_gap(facts: FitSummary) -> tuple[float, float, float] | None:
    """Return mean confidence, accuracy, and the standard error of accuracy under perfect calibration."""
    if facts.task != "classification" or "accuracy" not in facts.figures:
        return None
    top = top_probability(facts)
    error = float((top * (1 - top)).mean() / len(top)) ** 0.5
    return float(top.mean()), facts.figures["accuracy"], max(error, 1 / len(top))


@once_per_fit
def top_probability(facts: FitSummary) -> npt.NDArray[Any]:
    """Return the probability of the most probable class of each row, (N,)."""
    return np.asarray(facts.predictive.probabilities.cpu().double().max(-1).values)


@once_per_fit
def pit(facts: FitSummary) -> npt.NDArray[Any]:
    """Return the probability integral transform of each observed value: uniform for calibrated predictions."""
    found: npt.NDArray[Any] = pit_values(facts.predictive, facts.y).cpu().double().flatten().clamp(0, 1).numpy()
    return found


def interval_coverage(facts: FitSummary, levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the fraction of values inside the central interval of each level."""
    distance = np.abs(2 * pit(facts) - 1)
    return tuple(float((distance <= level).mean()) for level in levels)


@once_per_fit
def ood_auroc(facts: FitSummary) -> tuple[float, float] | None:
    """Return the AUROC of the ood score at separating shuffled rows from real ones, and its standard error."""
    if facts.ood is None or facts.ood_far is None or min(len(facts.ood), len(facts.ood_far)) < 2:
        return None
    inside, outside = torch.as_tensor(facts.ood).double(), torch.as_tensor(facts.ood_far).double()
    area = float(metrics.auroc(inside, outside))
    n, m = len(inside), len(outside)
    # Hanley and McNeil (1982), doi:10.1148/radiology.143.1.7063747
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (m - 1) * (first - area**2) + (n - 1) * (second - area**2)
    return area, math.sqrt(max(variance, 0) / (n * m))


@dataclass(frozen=True)
class ErrorOrder:
    """Whether errors are larger where the predicted uncertainty is.

    Attributes:
        statistic: rank correlation of |error| and predicted standard deviation, from -1 to 1; for labels the AUROC of
            the uncertainty at separating wrong from right answers, shown as 2 AUROC - 1.
        larger, smaller: probability of a statistic at least as large, or as small, if the two were unrelated.
        confident, rest: median |error|, or error rate, of the more confident half of the rows and of the rest.
    """

    statistic: float
    larger: float
    smaller: float
    confident: float
    rest: float


@once_per_fit
def error_order(facts: FitSummary) -> ErrorOrder | None:
    """Test on ranks whether less confident predictions have larger errors; None if there is nothing to rank.

    Ranks, because the squares of a few outliers would drown every other row.
    """
    from scipy.stats import mannwhitneyu, spearmanr

    if facts.task == "survival":
        return None
    uncertainty = facts.predictive.total.cpu().double().reshape(len(facts.y), -1).mean(1).numpy()
    loss = loss_per_row(facts).numpy()
    if len(loss) < 20 or not loss.any() or not np.isfinite(uncertainty).all():
        return None
    if float(uncertainty.max()) <= float(uncertainty.min()) * (1 + 1e-9) or np.ptp(loss) == 0:
        return None
    order = np.argsort(uncertainty, kind="stable")
    confident, rest = loss[order[: len(order) // 2]], loss[order[len(order) // 2 :]]
    if facts.task == "regression":
        # The loss is the square of the error and has the same ranks.
        statistic = float(spearmanr(uncertainty, loss).statistic)
        larger, smaller = (float(spearmanr(uncertainty, loss, alternative=side).pvalue) for side in ("greater", "less"))
        halves = tuple(math.sqrt(float(np.median(part))) for part in (confident, rest))
    else:
        wrong, right = uncertainty[loss > 0], uncertainty[loss == 0]
        found = [mannwhitneyu(wrong, right, alternative=side) for side in ("greater", "less")]
        statistic = 2 * float(found[0].statistic) / (len(wrong) * len(right)) - 1
        larger, smaller = (float(one.pvalue) for one in found)
        halves = tuple(float(part.mean()) for part in (confident, rest))
    return ErrorOrder(statistic, larger, smaller, *halves)


def residual_rank_correlation(facts: FitSummary) -> float | None:
    """Return the rank correlation of the predicted mean and the absolute standardised residual.

    It is near 0 if predicted standard deviations are right at every level of the mean.
    """
    mean = facts.predictive.mean.cpu().double().numpy()
    size = np.abs(np.asarray(facts.y, dtype=float) - mean) / facts.predictive.std.cpu().double().numpy()
    if len(mean) < 2 or np.ptp(mean) == 0 or np.ptp(size) == 0:
        return None
    return float(np.corrcoef(_ranks(mean), _ranks(size))[0, 1])


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)


def plotted_rows(facts: FitSummary) -> tuple[Predictive, Any]:
    """Return predictions and targets of at most POINTS rows, evenly spaced, for a scatter plot."""
    y = torch.as_tensor(facts.y)
    if len(y) <= POINTS:
        return facts.predictive, y
    indices = torch.linspace(0, len(y) - 1, POINTS).round().long()
    return facts.predictive.subset(indices), y[indices]
