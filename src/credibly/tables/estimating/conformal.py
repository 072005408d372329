"""Guaranteed intervals and sets of the scikit-learn estimators, from fits that leave out one fold each (CV+).

Every row is scored under the estimator that was fitted without its fold, so no row is lost: the estimator itself is
fitted to all rows, and K more to K - 1 folds each. Each of them does everything on its own rows, standardising and
tuning included.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import clone
from sklearn.utils import _safe_indexing

from credibly.conformal import CalibratedPredictive, Calibration, cross_calibrate
from credibly.core.checks import is_integer
from credibly.core.rng import stream_seed
from credibly.errors import InputError
from credibly.predictive.base import Predictive
from credibly.tables.estimating.arrays import Array, real_targets, row_weights, seed_of, to_array

FOLDS = 5  # for conformal=True


class FoldFits:
    """The part of an estimator that fits the folds and calibrates predictions by them."""

    conformal: bool | int
    random_state: int | np.random.RandomState | None
    fold_estimators_: list[Any]
    calibration_: Calibration | None

    def predictive(self, X: Any) -> Predictive:
        """Return the `Predictive` of the rows of X."""
        raise NotImplementedError

    def _fit_folds(self, X: Any, y: Any, sample_weight: Any, labels: Array | None = None) -> Self:
        """Fit an estimator without each fold and score the rows of the fold by it.

        Args:
            X: inputs, as passed to `fit`.
            y: targets or labels, as passed to `fit`.
            sample_weight: as passed to `fit`.
            labels: class indices of the rows with positive weight, for classification.
        """
        self.fold_estimators_, self.calibration_ = [], None
        if self.conformal is False:
            return self
        count = _count(self.conformal)
        X, y = (values if hasattr(values, "iloc") else np.asarray(values) for values in (X, y))
        kept = np.arange(len(y))
        if sample_weight is not None:
            weight = row_weights(sample_weight, len(y))
            assert weight is not None
            kept = np.flatnonzero(weight)
        fold = assigned_folds(count, len(kept), seed_of(self.random_state), labels)
        parts = []
        for k in range(int(fold.max()) + 1):
            train, test = kept[fold != k], kept[fold == k]
            own = clone(self).set_params(conformal=False)
            own_weight = None if sample_weight is None else _safe_indexing(np.asarray(sample_weight), train)
            own.fit(_safe_indexing(X, train), _safe_indexing(y, train), sample_weight=own_weight)
            self.fold_estimators_.append(own)
            held_out = real_targets(np.asarray(_safe_indexing(y, test))) if labels is None else labels[fold == k]
            parts.append((own.predictive(_safe_indexing(X, test)), held_out))
        self.calibration_ = cross_calibrate(parts)
        return self

    def _calibrated(self, predictive: Predictive, X: Any) -> Predictive:
        """Return predictions with guaranteed intervals and sets if the estimator has fold fits, else as they are."""
        if getattr(self, "calibration_", None) is None:
            return predictive
        assert self.calibration_ is not None
        folds = [own.predictive(X) for own in self.fold_estimators_]
        return CalibratedPredictive(predictive, self.calibration_, folds=folds)

    def _bayesian(self, X: Any) -> Predictive:
        """Return the predictions with the credible intervals and sets of the posterior."""
        predictive = self.predictive(X)
        return predictive.bayesian if isinstance(predictive, CalibratedPredictive) else predictive


class Intervals(FoldFits):
    """Interval methods of a regressor."""

    def predict_interval(self, X: Any, level: float = 0.9, joint: bool = False) -> tuple[Array, Array]:
        """Return the bounds of an interval that contains y with probability `level`, in the shape of y.

        Of several targets each has such an interval; with `joint`, which needs conformal=True, all of them together lie
        inside with that probability.

        With conformal=True they come from CV+: the coverage is close to the level or above it however wrong the model
        is, and provably at least about 2 level - 1, for rows exchangeable with the training rows. That takes 5 further
        fits, or as many as conformal=10 asks for. Otherwise they are those of `bayesian_interval`.
        """
        predictive = self.predictive(X)
        if joint and not isinstance(predictive, CalibratedPredictive):
            raise InputError("joint", "needs an estimator with conformal=True", "Leave it out")
        if joint and isinstance(predictive, CalibratedPredictive):
            lower, upper = predictive.joint_interval(level)
        else:
            lower, upper = predictive.interval(level)
        return to_array(lower), to_array(upper)

    def bayesian_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:
        """Return the bounds of the central credible interval, which is calibrated if the model is."""
        lower, upper = self._bayesian(X).interval(level)
        return to_array(lower), to_array(upper)


class Sets(FoldFits):
    """Prediction-set methods of a classifier."""

    def predict_set(self, X: Any, level: float = 0.9, allow_empty: bool = False) -> Array:
        """Return the set of classes that contains y with probability `level`, as booleans (N, classes).

        With conformal=True it comes from cross-conformal APS, with the guarantee of `BayesianRegressor`'s intervals.
        Where the most probable class is right more often than the level, only sets that may be empty have that
        coverage: with `allow_empty` they are, otherwise the most probable class is added to an empty set. Without
        conformal=True it is that of `bayesian_set`.
        """
        predictive = self.predictive(X)
        if isinstance(predictive, CalibratedPredictive):
            chosen: Array = predictive.prediction_set(level, allow_empty=allow_empty).cpu().numpy()
            return chosen
        if allow_empty:
            raise InputError("allow_empty", "must be False without conformal=True", "Bayesian sets are never empty")
        return self.bayesian_set(X, level)

    def bayesian_set(self, X: Any, level: float = 0.9) -> Array:
        """Return the smallest set of classes with probability at least `level` under the posterior, as booleans."""
        chosen: Array = self._bayesian(X).prediction_set(level).cpu().numpy()
        return chosen


def assigned_folds(folds: int, rows: int, seed: int, labels: Array | None = None) -> Array:
    """Return the fold of each row, at random; every class is spread evenly over the folds.

    Args:
        folds: number of folds; fewer if there are fewer rows.
        rows: number of rows, at least 3.
        seed: of the assignment.
        labels: class indices, (rows,), of which every class needs at least two rows; None for regression.
    """
    if rows < 3:
        raise InputError("conformal", f"needs at least 3 rows, got {rows}")
    order = np.random.default_rng(stream_seed(seed, "conformal folds")).permutation(rows)
    if labels is not None:
        counts = np.bincount(labels)
        if counts.min() < 2:
            found = f"has one row of class number {int(counts.argmin())}"
            raise InputError("y", found, "Fits without a fold need at least two rows of every class")
        order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(rows, dtype=np.int64)
    fold[order] = np.arange(rows) % min(folds, rows)
    return fold


def _count(conformal: bool | int) -> int:
    if conformal is True:
        return FOLDS
    if is_integer(conformal) and conformal >= 2:
        return conformal
    raise InputError("conformal", f"must be True, False or a number of folds of at least 2, got {conformal!r}")
