"""Numbers about a fit that its verdict and its page both read, each from the predictions on the rows it is judged on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.inputs import map_inputs
from credibly.metrics import scores as metrics
from credibly.predictive.base import Predictive
from credibly.tables.fit_summary import Facts

POINTS = 400  # rows in a picture of single rows, at most


def loss_of_rows(facts: Facts) -> torch.Tensor:
    """Squared error of each row, or 1 where the most probable class is wrong."""
    y = torch.as_tensor(facts.y)
    if facts.task == "regression":
        return (facts.predictive.mean.cpu().double() - y).square()
    return (facts.predictive.probabilities.cpu().argmax(-1) != y).double()


def confidence_gap(facts: Facts) -> tuple[float, float, float] | None:
    """Mean confidence in the top label, accuracy, and the standard error of the latter if the former were right."""
    if facts.task != "classification" or "accuracy" not in facts.figures:
        return None
    top = facts.predictive.probabilities.cpu().double().max(-1).values
    error = float((top * (1 - top)).mean() / len(top)) ** 0.5
    return float(top.mean()), facts.figures["accuracy"], max(error, 1 / len(top))


def told_apart(facts: Facts) -> tuple[float, float] | None:
    """AUROC of telling shuffled rows from those of the table by their score, and its standard error."""
    if facts.ood is None or facts.ood_far is None or min(len(facts.ood), len(facts.ood_far)) < 2:
        return None
    inside, outside = torch.as_tensor(facts.ood).double(), torch.as_tensor(facts.ood_far).double()
    area = float(metrics.auroc(inside, outside))
    n, m = len(inside), len(outside)
    # Hanley and McNeil (1982), doi:10.1148/radiology.143.1.7063747
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (m - 1) * (first - area**2) + (n - 1) * (second - area**2)
    return area, math.sqrt(max(variance, 0) / (n * m))


def halves(facts: Facts) -> tuple[float, float, float] | None:
    """Mean loss of the surer and of the less sure half of the rows, and the standard error of their difference."""
    unsure = facts.predictive.total.cpu().double().reshape(len(facts.y), -1).mean(1)
    loss = loss_of_rows(facts)
    if len(loss) < 20 or not bool(loss.any()) or float(unsure.max()) <= float(unsure.min()) * (1 + 1e-9):
        return None
    order = torch.argsort(unsure, stable=True)
    sure, rest = loss[order[: len(order) // 2]], loss[order[len(order) // 2 :]]
    error = math.sqrt(float(sure.var()) / len(sure) + float(rest.var()) / len(rest))
    return float(sure.mean()), float(rest.mean()), error


def error_with_size(facts: Facts) -> float | None:
    """Rank correlation of the predicted mean and the size of the error in predicted deviations: near 0 if widths are right."""
    mean = facts.predictive.mean.cpu().double().numpy()
    size = np.abs(np.asarray(facts.y, dtype=float) - mean) / facts.predictive.std.cpu().double().numpy()
    if len(mean) < 2 or np.ptp(mean) == 0 or np.ptp(size) == 0:
        return None
    return float(np.corrcoef(_ranks(mean), _ranks(size))[0, 1])


def density_of_rows(facts: Facts) -> torch.Tensor:
    """Log predictive density of each row, in nats."""
    return facts.predictive.log_prob(facts.y).cpu().double()


def standard_error(rows: torch.Tensor) -> float:
    """Of the mean of these values; infinite for a single one."""
    return float(rows.std()) / math.sqrt(len(rows)) if len(rows) > 1 else math.inf


def shares_inside(facts: Facts, levels: tuple[float, ...]) -> tuple[float, ...]:
    """Share of the values inside the central interval of each level."""
    distance = (2 * facts.predictive.cdf(facts.y).cpu().double().flatten() - 1).abs()
    return tuple(float((distance <= level).double().mean()) for level in levels)


def some_rows(facts: Facts) -> tuple[Predictive, Any]:
    """Predictions and targets of as many rows as a picture of single rows can hold, evenly spaced."""
    y = torch.as_tensor(facts.y)
    if len(y) <= POINTS:
        return facts.predictive, y
    places = torch.linspace(0, len(y) - 1, POINTS).round().long()
    x = map_inputs(lambda t: t[places.to(t.device)], facts.predictive._x)
    return Predictive(facts.predictive._source, x), y[places]


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
