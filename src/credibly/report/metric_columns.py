"""The figures of merit as pages tell them: what each means in a line, which way is better, how many decimals it is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from credibly.report.page import Column

LEVEL = 0.9


@dataclass(frozen=True)
class Figure:
    """A figure of merit.

    Attributes:
        title: its name for people. best: which way is better, as in `Column`. meaning: a line on it.
        share: whether it is a share, shown with three decimals whatever its size.
    """

    title: str
    best: Literal["high", "low"] | float | None
    meaning: str
    share: bool = False


REGRESSION = {
    "log_density": Figure(
        "Log density",
        "high",
        "how probable the observed values were, in nats a row: one figure for the prediction and its width together",
    ),
    "rmse": Figure("RMSE", "low", "typical error of the predicted mean, in the units of the target"),
    "crps": Figure("CRPS", "low", "error of the whole predicted distribution, in the same units"),
    "coverage": Figure(
        "Coverage", LEVEL, "share of observed values inside their 90% interval: right is near 0.9", True
    ),
    "width": Figure("Width", None, "mean width of that interval: narrow is good only where the coverage is right"),
    "calibration_error": Figure(
        "Calibration error", "low", "mean gap between promised and observed shares, over all levels", True
    ),
}
CLASSIFICATION = {
    "log_density": Figure("Log density", "high", "how probable the observed classes were, in nats a row; 0 is perfect"),
    "accuracy": Figure("Accuracy", "high", "share of rows whose most probable class is the right one", True),
    "brier": Figure("Brier", "low", "squared error of the probabilities, from 0 to 2", True),
    "ece": Figure("ECE", "low", "mean distance between how sure the model is and how often it is right", True),
    "coverage": Figure(
        "Coverage",
        None,
        "share of rows whose class is in the smallest set of classes that holds 90%: at least 0.9 is right",
        True,
    ),
    "set_size": Figure(
        "Set size", None, "mean number of classes in that set: 1 is a decision, more is an honest doubt"
    ),
}


def figures_of(task: str) -> dict[str, Figure]:
    """The figures that `evaluation.evaluate` gives for this task, in the order of a page."""
    return dict(REGRESSION if task == "regression" else CLASSIFICATION)


def digits(values: Iterable[float], *, share: bool = False) -> int:
    """Decimals that leave about four digits that say something."""
    sizes = [abs(v) for v in values if math.isfinite(v) and v]
    if share or not sizes:
        return 3
    return min(max(3 - math.floor(math.log10(max(sizes))), 0), 8)


def number(value: float) -> str:
    """A number within a sentence, with about four digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits([value])}f}"


def columns(task: str, rows: Iterable[Mapping[str, float]]) -> list[tuple[str, Column]]:
    """A column for each figure that any of the rows has, with its key."""
    given = list(rows)
    found = []
    for key, figure in figures_of(task).items():
        values = [row[key] for row in given if key in row]
        if values:
            places = digits(values, share=figure.share)
            found.append((key, Column(figure.title, figure.best, places, figure.meaning)))
    return found
