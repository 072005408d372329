"""How pages show metrics: title, one-line description, which direction is better, number of decimals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from credibly.report.page import Column

LEVEL = 0.9


@dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Attributes:
        title: column heading.
        best: which value is best, as in `Column`.
        description: one line below the table.
        fraction: whether it is a fraction, shown with three decimals whatever its size.
    """

    title: str
    best: Literal["high", "low"] | float | None
    description: str
    fraction: bool = False


REGRESSION = {
    "log_density": Metric(
        "Log density", "high", "log predictive density in nats per row; scores the mean and the interval width together"
    ),
    "rmse": Metric("RMSE", "low", "root mean squared error of the predicted mean, in units of the target"),
    "crps": Metric("CRPS", "low", "error of the whole predictive distribution, in units of the target"),
    "coverage": Metric("Coverage", LEVEL, "fraction of observed values inside their 90% interval; ideally 0.9", True),
    "width": Metric("Width", None, "mean width of the 90% interval; narrow is good only with the right coverage"),
    "calibration_error": Metric(
        "Calibration error", "low", "mean gap between nominal and observed coverage, over all levels", True
    ),
}
CLASSIFICATION = {
    "log_density": Metric("Log density", "high", "log probability of the observed class in nats per row; 0 is perfect"),
    "accuracy": Metric("Accuracy", "high", "fraction of rows whose most probable class is correct", True),
    "brier": Metric("Brier", "low", "squared error of the probabilities, from 0 to 2", True),
    "ece": Metric("ECE", "low", "expected calibration error, the mean gap between confidence and accuracy", True),
    "coverage": Metric(
        "Coverage", None, "fraction of rows whose class is in the smallest set holding 90%; ideally at least 0.9", True
    ),
    "set_size": Metric("Set size", None, "mean number of classes in that set; 1 is a clear decision"),
    "balanced_accuracy": Metric("Balanced acc.", "high", "mean recall of the classes, whatever their size", True),
    "roc_auc": Metric(
        "ROC AUC", "high", "how often a row of the rarer class gets the higher probability of it; 0.5 is chance", True
    ),
    "average_precision": Metric(
        "Avg. prec.", "high", "mean precision over all recalls of the rarer class; its frequency is chance", True
    ),
}
SURVIVAL = {
    "log_density": Metric(
        "Log density",
        "high",
        "log density of an event, log probability of no event yet of a censored row; nats per row",
    ),
    "concordance": Metric("Concordance", "high", "fraction of pairs of rows in the right order; 0.5 is chance", True),
    "coverage": Metric("Coverage", LEVEL, "estimated fraction of times inside their 90% interval; ideally 0.9", True),
    "width": REGRESSION["width"],
    "calibration_error": Metric("Calibration error", "low", "mean gap between nominal and observed fractions", True),
}


def metrics_of(task: str) -> dict[str, Metric]:
    """Return the metrics that `evaluation.evaluate` computes for the task, in display order."""
    return dict({"regression": REGRESSION, "survival": SURVIVAL}.get(task, CLASSIFICATION))


def baseline_of(task: str) -> str:
    """Return the constant prediction of the baseline, which ignores the columns, in words."""
    known = {"regression": "the training mean", "survival": "the same distribution of times"}
    return known.get(task, "the training class frequencies")


def decimals(values: Iterable[float], *, fraction: bool = False) -> int:
    """Return the number of decimals that shows about four significant digits."""
    sizes = [abs(v) for v in values if math.isfinite(v) and v]
    if fraction or not sizes:
        return 3
    return min(max(3 - math.floor(math.log10(max(sizes))), 0), 8)


def format_number(value: float) -> str:
    """Format a number for a sentence, with about four significant digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{decimals([value])}f}"


def columns(task: str, rows: Iterable[Mapping[str, float]]) -> list[tuple[str, Column]]:
    """Return the key and the column of each metric that any row has."""
    given = list(rows)
    found = []
    for key, metric in metrics_of(task).items():
        values = [row[key] for row in given if key in row]
        if values:
            digits = decimals(values, fraction=metric.fraction)
            found.append((key, Column(metric.title, metric.best, digits, metric.description)))
    return found
