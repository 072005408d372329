"""Predictions of test rows, and their scores.

Scores per row, higher is better: the log density of y in its own units (regression), the log probability of the class
(classes), minus the CRPS (counts). A density and a probability mass are not comparable, so counts are scored by the
CRPS of the quantiles, which both kinds of model have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from scipy.stats import norm

from benchmarks.tables.data import Array
from benchmarks.tables.rows import Rows

LEVEL = 0.9
# The CRPS is twice the integral of the pinball loss over the levels: here the midpoints of 50 equal parts.
LEVELS = (np.arange(50) + 0.5) / 50
# Lowest probability of a class in the log-likelihood: boosted trees give 0 for classes that they have ruled out.
LOWEST = 1e-12


class Numbers(Protocol):
    """A prediction of numbers: the mean and the bounds of the 90 % interval per row."""

    @property
    def mean(self) -> Array:
        """Means, (rows,)."""
        ...

    @property
    def lower(self) -> Array:
        """Lower bounds, (rows,)."""
        ...

    @property
    def upper(self) -> Array:
        """Upper bounds, (rows,)."""
        ...

    def log_density(self, y: Array) -> Array:
        """Return the log density of each row at its target."""
        ...

    def quantiles(self, levels: Array) -> Array:
        """Return the quantiles of each row, (levels, rows)."""
        ...


@dataclass(frozen=True)
class Normal:
    """Gaussian predictions, with their own 90 % intervals or those of another procedure."""

    mean: Array
    std: Array
    lower: Array
    upper: Array

    def log_density(self, y: Array) -> Array:
        return np.asarray(norm.logpdf(y, self.mean, self.std))

    def quantiles(self, levels: Array) -> Array:
        return np.asarray(norm.ppf(levels[:, None], self.mean, self.std))


@dataclass(frozen=True)
class Point:
    """Predictions without uncertainty."""

    mean: Array


@dataclass(frozen=True)
class Classes:
    """Probabilities of classes, and the 90 % sets; by default the smallest sets with that probability."""

    labels: Array
    probabilities: Array
    sets: Array | None = None
    randomised: Array | None = None  # sets that may be empty, whose coverage can be exact
    notes: dict[str, Any] = field(default_factory=dict)


def normal(mean: Array, std: Array) -> Normal:
    """Return Gaussian predictions with their central 90 % intervals."""
    std = np.maximum(std, 1e-9 * max(1.0, float(np.abs(mean).max())))
    reach = norm.ppf((1 + LEVEL) / 2) * std
    return Normal(mean, std, mean - reach, mean + reach)


def from_interval(mean: Array, lower: Array, upper: Array) -> Normal:
    """Return Gaussian predictions whose standard deviation is that of the given 90 % interval."""
    std = np.maximum((upper - lower) / (2 * norm.ppf((1 + LEVEL) / 2)), 1e-9 * max(1.0, float(np.abs(mean).max())))
    return Normal(mean, std, lower, upper)


def crps(quantiles: Array, levels: Array, y: Array) -> Array:
    """Return the continuous ranked probability score of each row, from its quantiles (levels, rows)."""
    gap = y - quantiles
    pinball = np.maximum(levels[:, None] * gap, (levels[:, None] - 1) * gap)
    return np.asarray(2 * pinball.mean(0))


def smallest_sets(probabilities: Array, level: float = LEVEL) -> Array:
    """Return the smallest sets of classes with at least the given probability, as booleans."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, 1)
    needed = ranked.cumsum(1) - ranked < level
    sets: Array = np.zeros_like(needed)
    np.put_along_axis(sets, order, needed, 1)
    return sets


def evaluate(found: Numbers | Classes | Point, rows: Rows) -> dict[str, Any]:
    """Return the metrics of the test rows, `scores`, the score of each, and `notes` on the fit, if any.

    `coverage` is that of the intervals or sets which a user gets. `coverage_exact` is that of randomised ones, for
    classes and counts of models that have such.
    """
    if isinstance(found, Classes):
        return _evaluate_classes(found, rows.y_test)
    y = rows.y_test
    error = found.mean - y
    if isinstance(found, Point):
        return {"rmse": float(np.sqrt(np.mean(error**2)))}
    counts = rows.table.task == "counts"
    # No model of counts may lose for mass below zero that a user would cut off.
    scores = -crps(np.maximum(found.quantiles(LEVELS), 0.0), LEVELS, y) if counts else found.log_density(y)
    return {
        "crps" if counts else "log_likelihood": float(-scores.mean() if counts else scores.mean()),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "coverage": float(np.mean((found.lower <= y) & (y <= found.upper))),
        "width": float(np.mean(found.upper - found.lower)),
        "scores": scores,
        **({"coverage_exact": float(found.covered(y).mean())} if counts and hasattr(found, "covered") else {}),
        **({"notes": found.notes} if hasattr(found, "notes") else {}),
    }


def _evaluate_classes(found: Classes, y: Array) -> dict[str, Any]:
    column = {label: k for k, label in enumerate(found.labels)}
    at = np.array([column.get(label, -1) for label in y])
    rows = np.arange(len(y))
    known = at >= 0  # a class without training rows has probability zero
    chance = np.where(known, found.probabilities[rows, at], 0.0)
    sets = smallest_sets(found.probabilities) if found.sets is None else found.sets
    exact = found.randomised
    right = known & (found.probabilities.argmax(1) == at)
    scores = np.log(np.clip(chance, LOWEST, 1.0))
    return {
        "log_likelihood": float(scores.mean()),
        "accuracy": float(right.mean()),
        "coverage": float((known & sets[rows, at]).mean()),
        "width": float(sets.sum(1).mean()),
        "scores": scores,
        "notes": found.notes,
        **({} if exact is None else {"coverage_exact": float((known & exact[rows, at]).mean())}),
    }
