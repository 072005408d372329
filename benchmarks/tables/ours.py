"""credibly with its defaults: the command `credibly fit` on a file of the training rows, and the estimators."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import parquet

from benchmarks.tables.data import Array
from benchmarks.tables.rows import Rows
from benchmarks.tables.scores import LEVEL, Classes, Numbers


@dataclass(frozen=True)
class Predicted:
    """The predictive of credibly: its own density and quantiles, and the interval that a user gets."""

    predictive: Any
    mean: Array
    lower: Array
    upper: Array

    def log_density(self, y: Array) -> Array:
        return _array(self.predictive.log_prob(torch.from_numpy(y)))

    def quantiles(self, levels: Array) -> Array:
        return _array(self.predictive.quantile([float(level) for level in levels]))


def fit(rows: Rows) -> Numbers | Classes:
    """Fit a file of the training rows as `credibly fit` does, without its report, and predict the test rows."""
    from credibly.tables import fit_table, prepare
    from credibly.tables.config import Config
    from credibly.tables.guarantee import guaranteed
    from credibly.tables.table_choice import choose_table

    table = rows.table
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "train.parquet", Path(folder) / "run"
        parquet.write_table(rows.train, file)
        config = Config(str(file), table.target, task=_TASKS[table.task], group=table.group)
        model = fit_table(choose_table(prepare(config)), run, progress=False).model
        inputs, _ = model.inputs(rows.test.drop_columns([table.target]))
        predictive = model.predict(inputs)
        # Intervals and sets are those with the guarantee, where the fit makes one.
        found = guaranteed(model, inputs, predictive)
        promised = predictive if found is None else found
        if table.task == "classes":
            return _classes(predictive, model.preparation.classes, promised)
        return _numbers(predictive, *promised.interval(LEVEL))


def estimator(rows: Rows) -> Numbers | Classes:
    """Fit BayesianRegressor or BayesianClassifier without tuning to one-hot columns."""
    from credibly.tables.estimators import BayesianClassifier, BayesianRegressor

    x, x_test = rows.one_hot(standardise=False)
    if rows.table.task == "classes":
        model = BayesianClassifier(tune=None).fit(x, rows.y)
        predictive = model.predictive(x_test)
        return _classes(predictive, model.classes_, predictive)
    predictive = BayesianRegressor(tune=None).fit(x, rows.y).predictive(x_test)
    return _numbers(predictive, *predictive.interval(LEVEL))


# The task is given, since integers with few values, such as the grades of wines, could as well be classes.
_TASKS = {"regression": "regression", "counts": "counts", "classes": "classification"}


def _numbers(predictive: Any, lower: torch.Tensor, upper: torch.Tensor) -> Predicted:
    return Predicted(predictive, _array(predictive.mean), _array(lower), _array(upper))


def _classes(predictive: Any, labels: Any, promised: Any) -> Classes:
    sets = promised.prediction_set(LEVEL).numpy()
    return Classes(np.array([str(label) for label in labels]), _array(predictive.probabilities), sets)


def _array(values: torch.Tensor) -> Array:
    return np.asarray(values.double().numpy())


OURS = {"ours": fit, "estimator": estimator}
