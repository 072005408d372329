"""credibly with its defaults: the command `credibly fit` on a file of the training rows, and the estimators."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
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
    threshold: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def covered(self, y: Array) -> Array:
        """Return the probability with which a randomised interval contains each count."""
        from credibly.conformal.counts import covered, steps_of

        assert self.threshold is not None
        return _array(covered(steps_of(self.predictive, y), self.threshold))

    def log_density(self, y: Array) -> Array:
        return _array(self.predictive.log_prob(torch.from_numpy(y)))

    def quantiles(self, levels: Array) -> Array:
        return _array(self.predictive.quantile([float(level) for level in levels]))


def fit(rows: Rows) -> Numbers | Classes:
    """Fit a file of the training rows as `credibly fit` does and predict the test rows.

    The numbers of its report are computed, too; only the page and its pictures, which need matplotlib, are left out.
    """
    from credibly.report import assess
    from credibly.tables import fit_table, prepare
    from credibly.tables.choices.table_choice import choose_table
    from credibly.tables.config import Config
    from credibly.tables.guarantee import guaranteed
    from credibly.tables.summarise import summarise

    table = rows.table
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "train.parquet", Path(folder) / "run"
        parquet.write_table(rows.train, file)
        config = Config(str(file), table.target, task=_TASKS[table.task], group=table.group)
        done = fit_table(choose_table(prepare(config)), run, progress=False)
        model, facts = done.model, summarise(done)
        inputs, _ = model.inputs(rows.test.drop_columns([table.target]))
        predictive = model.predict(inputs)
        # Intervals and sets are those with the guarantee, where the fit makes one.
        found = guaranteed(model, inputs, predictive)
        promised = predictive if found is None else found
        notes = _notes(facts, assess(facts))
        if table.task == "classes":
            return _classes(predictive, model.preparation.classes, promised, notes)
        threshold = _threshold(facts) if table.task == "counts" else None
        return _numbers(predictive, *promised.interval(LEVEL), threshold, notes)


def _notes(facts: Any, assessment: Any) -> dict[str, Any]:
    """Return the method of a fit, why it was chosen, and the verdicts."""
    found = {"method": facts.method, "why": facts.why, "verdict": assessment.predictions}
    if assessment.sampling is not None and facts.diagnostics is not None:
        spaces = facts.diagnostics.judged.values()
        found |= {"sampling": assessment.sampling, "r_hat": round(max(s.rhat_most for s in spaces), 3)}
        found["ess"] = round(min(s.ess_most for s in spaces))
    return found


def _threshold(facts: Any) -> float:
    """Return the index of randomised intervals from the rows of the folds."""
    from credibly.conformal.counts import randomised_threshold, steps_of

    return randomised_threshold(steps_of(facts.predictive, facts.y), LEVEL)


def estimator(rows: Rows) -> Numbers | Classes:
    """Fit BayesianRegressor or BayesianClassifier without tuning to one-hot columns."""
    from credibly.tables.estimators import BayesianClassifier, BayesianRegressor

    x, x_test = rows.one_hot(standardise=False)
    if rows.table.task == "classes":
        model = BayesianClassifier(tune=None).fit(x, rows.y)
        predictive = model.predictive(x_test)
        return _classes(predictive, model.classes_, predictive, {})
    predictive = BayesianRegressor(tune=None).fit(x, rows.y).predictive(x_test)
    return _numbers(predictive, *predictive.interval(LEVEL))


# The task is given, since integers with few values, such as the grades of wines, could as well be classes.
_TASKS = {"regression": "regression", "counts": "counts", "classes": "classification"}


def _numbers(
    predictive: Any, lower: torch.Tensor, upper: torch.Tensor, threshold: float | None = None, notes: Any = None
) -> Predicted:
    ends = _array(lower), _array(upper)
    return Predicted(predictive, _array(predictive.mean), *ends, threshold, notes or {})


def _classes(predictive: Any, labels: Any, promised: Any, notes: dict[str, Any]) -> Classes:
    names, p = np.array([str(label) for label in labels]), _array(predictive.probabilities)
    exact = promised.prediction_set(LEVEL, allow_empty=True).numpy() if hasattr(promised, "calibration") else None
    return Classes(names, p, promised.prediction_set(LEVEL).numpy(), exact, notes)


def _array(values: torch.Tensor) -> Array:
    return np.asarray(values.double().numpy())


OURS = {"ours": fit, "estimator": estimator}
