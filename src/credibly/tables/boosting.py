"""Gradient boosting by scikit-learn on the columns of a table: the model that a comparison has to beat.

It is not Bayesian: a regression predicts N(f(x), s^2) with one s for all rows, the root mean square of residuals
on folds that the model was not fitted to; classes have the probabilities of the classifier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.metrics import evaluation
from credibly.predictive.fixed import categorical_predictive, gaussian_predictive
from credibly.tables.cells.parsing import finite, numbers, positions, texts, whole_column
from credibly.tables.columns.encoders import Categorical, Numeric
from credibly.tables.preparation import Preparation
from credibly.tables.prepared import Prepared

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.predictive.base import Predictive

Array = npt.NDArray[Any]

NAME = "boosting"
TITLE = "Gradient boosting (HistGradientBoosting of scikit-learn); not Bayesian"
TASKS = ("regression", "classification")
# Folds for the residuals behind the noise of a regression.
FOLDS = 5


@dataclass(frozen=True, eq=False)
class BoostingFit:
    """Gradient boosting fitted to training rows and evaluated on others.

    Attributes:
        predictive: predictions at the evaluated rows, in the units of the target.
        y: targets of those rows (M,), or class indices.
        figures: metrics, as returned by `evaluation.evaluate`.
        seconds: duration of the fit, with its folds.
    """

    predictive: Predictive
    y: Array
    figures: dict[str, float]
    seconds: float


def boosting_of(prepared: Prepared) -> BoostingFit | None:
    """Return gradient boosting on the split of a prepared table.

    None without held-out rows, since trees reproduce their training rows, and for tasks that it does not support.
    """
    known = prepared.preparation
    if known.task not in TASKS or len(known.targets) > 1 or not len(prepared.held_out):
        return None
    table, weights = prepared.table, None
    if prepared.data.weight is not None:
        # Those of the fits: weights of rows times weights of classes.
        weights = np.ones(table.num_rows)
        weights[prepared.train] = prepared.data.weight
    splits = [(prepared.train, prepared.held_out)]
    return fit_boosting(known, table, splits, weights=weights, seed=prepared.config.seed)


def fit_boosting(
    preparation: Preparation,
    table: Table,
    splits: Sequence[tuple[Array, Array]],
    *,
    weights: Array | None = None,
    seed: int = 0,
) -> BoostingFit:
    """Fit gradient boosting to the columns that the networks get and evaluate it on rows that it was not fitted to.

    Missing cells and categories are passed unencoded, since trees handle both.

    Args:
        preparation: the columns.
        table: all rows.
        splits: (training rows, evaluated rows) as indices; several are those of a cross-validation, whose evaluated
            rows are concatenated.
        weights: weights of all rows; None for ones.
        seed: seed of the folds behind the noise and of the fits.
    """
    started = time.perf_counter()
    found = []
    for train, test in splits:
        x, categorical = boosting_inputs(preparation, table.take(train))
        y = preparation.target_values(table.take(train))
        at = boosting_inputs(preparation, table.take(test))[0]
        own = None if weights is None else weights[train]
        found.append(_predict(x, y, at, preparation.classes, {"categorical_features": categorical}, own, seed))
    seconds = time.perf_counter() - started
    known = preparation.target_values(table.take(np.concatenate([test for _, test in splits])))
    predictive = _joined(found, preparation.classes is None)
    metrics = evaluation.evaluate(predictive, torch.from_numpy(known), seed=seed)
    return BoostingFit(predictive, known, metrics, round(seconds, 3))


def boosting_inputs(preparation: Preparation, table: Table) -> tuple[Array, Array]:
    """Return inputs (N, columns) with NaN for missing cells, and which of them are codes of categories."""
    parts: list[Array] = []
    coded: list[bool] = []
    for column in preparation.used:
        cells = whole_column(table, column.name)
        if isinstance(column, Categorical):
            codes = positions(texts(cells), [*column.levels, *column.rare]).cast("float64")
            # Rare levels share a code.
            part = np.minimum(codes.to_numpy(zero_copy_only=False), len(column.levels))[:, None]
        elif isinstance(column, Numeric):
            part = finite(numbers(cells)[0])[0].to_numpy(zero_copy_only=False).astype(np.float64)[:, None]
        else:
            part = np.zeros((table.num_rows, len(column.features)), np.float32)
            column.encode(cells, part)
        parts.append(part)
        coded += [isinstance(column, Categorical)] * part.shape[1]
    return np.concatenate(parts, 1), np.array(coded)


def _joined(found: Sequence[tuple[Array, float]], regression: bool) -> Predictive:
    """Return the predictive of means (M,) with their noise, or of probabilities (M, K), over all splits."""
    values = torch.from_numpy(np.concatenate([value for value, _ in found]))
    if not regression:
        return categorical_predictive(values)
    return gaussian_predictive(values, torch.from_numpy(np.concatenate([np.full(len(v), s) for v, s in found])))


def _predict(
    x: Array, y: Array, at: Array, classes: tuple[str, ...] | None, options: dict[str, Any], weights: Any, seed: int
) -> tuple[Array, float]:
    """Return class probabilities, or means and the standard deviation of the noise."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import KFold

    options |= {"random_state": seed % 2**32}
    if classes is not None:
        model = HistGradientBoostingClassifier(**options).fit(x, y, weights)
        probabilities = np.zeros((len(at), len(classes)))
        probabilities[:, model.classes_.astype(int)] = model.predict_proba(at)
        return probabilities, 0.0
    regressor = HistGradientBoostingRegressor(**options)
    squares = np.empty(len(y))
    for train, test in KFold(min(FOLDS, len(y)), shuffle=True, random_state=seed % 2**32).split(x):
        fold = regressor.fit(x[train], y[train], None if weights is None else weights[train])
        squares[test] = (y[test] - fold.predict(x[test])) ** 2
    # A perfect fit would leave no noise at all.
    std = max(float(np.sqrt(np.average(squares, weights=weights))), 1e-6 * float(np.std(y)), np.finfo(float).tiny)
    return regressor.fit(x, y, weights).predict(at), std
