"""credibly with its defaults: the command `credibly fit` on a file of the training rows, and the estimators."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import parquet

from benchmarks.tables.data import Array
from benchmarks.tables.rows import Rows
from benchmarks.tables.scores import LEVEL, Classes, Numbers

# Seconds after which a fit is given up.
LONGEST = 1_800


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
    """Run `credibly fit` on a file of the training rows, and predict the test rows with the run."""
    from credibly.tables import TableRun

    table = rows.table
    options = ["--task", _task(table.task)]
    if table.group is not None:
        options += ["--group" if _has("--group") else "--drop", table.group]
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "train.parquet", Path(folder) / "run"
        parquet.write_table(rows.train, file)
        given = ["fit", str(file), "--target", table.target, "--out", str(run), "--quiet", *options]
        done = subprocess.run([*_COMMAND, *given], capture_output=True, text=True, timeout=LONGEST, check=False)
        if done.returncode or not run.is_dir():
            raise RuntimeError(f"credibly fit failed: {(done.stderr or done.stdout).strip()[-300:]}")
        model = TableRun.load(run).model
        predictive = model.predict_table(rows.test.drop_columns([table.target]))
        if table.task == "classes":
            return _classes(predictive, model.preparation.classes)
        # The columns of the prediction file, so that these are the intervals that `credibly predict` writes.
        found = model.columns(predictive)
        return Predicted(predictive, *(np.asarray(found[key], dtype=np.float64) for key in _COLUMNS))


def estimator(rows: Rows) -> Numbers | Classes:
    """Fit BayesianRegressor() or BayesianClassifier() to one-hot columns."""
    from credibly.tables.estimators import BayesianClassifier, BayesianRegressor

    x, x_test = rows.one_hot(standardise=False)
    if rows.table.task == "classes":
        model = BayesianClassifier().fit(x, rows.y)
        return _classes(model.predictive(x_test), model.classes_)
    regressor = BayesianRegressor().fit(x, rows.y)
    lower, upper = regressor.predict_interval(x_test, LEVEL)
    predictive = regressor.predictive(x_test)
    return Predicted(predictive, _array(predictive.mean), np.asarray(lower), np.asarray(upper))


_COMMAND = [sys.executable, "-m", "credibly"]
_COLUMNS = ("mean", "lower_90", "upper_90")


@cache
def _help() -> str:
    """Return the help of `credibly fit` without the frame, to see what this version offers."""
    found = subprocess.run([*_COMMAND, "fit", "--help"], capture_output=True, text=True, check=False).stdout
    return re.sub(r"[^\w,.:;()-]+", " ", found)


def _has(option: str) -> bool:
    return f" {option} " in _help()


def _task(task: str) -> str:
    """Return the value of --task; counts are a regression where there is no task for them."""
    if task == "classes":
        return "classification"
    offered = re.search(r"--task\b(.*?)--", _help())
    named = re.search(r"\bcounts?\b", offered.group(1)) if offered else None
    return named.group(0) if task == "counts" and named else "regression"


def _classes(predictive: Any, labels: Any) -> Classes:
    sets = predictive.prediction_set(LEVEL).numpy()
    return Classes(np.array([str(label) for label in labels]), _array(predictive.probabilities), sets)


def _array(values: torch.Tensor) -> Array:
    return np.asarray(values.double().numpy())


OURS = {"ours": fit, "estimator": estimator}
