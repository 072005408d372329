"""Scikit-learn estimators that standardise, fit a `Recipe` and predict in the units of the target.

`BayesianRegressor` and `BayesianClassifier` follow scikit-learn's conventions (`__init__` only stores, `fit` validates,
fitted attributes end in `_`), so they work in pipelines, grid searches and cross-validation. They add `predictive(X)`,
the full `Predictive` of the rows, from which every other prediction is derived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from credibly.errors import InputError
from credibly.predictive.base import Predictive
from credibly.predictive.rescaling import in_double
from credibly.tables.estimating.arrays import Array, class_weights, moments, real_targets, to_array, weighted_rows
from credibly.tables.estimating.base import BayesianEstimator
from credibly.tables.estimating.conformal import Intervals, Sets
from credibly.tables.estimating.encoding import training_rows


class Uncertainty(NamedTuple):
    """Entropies in nats, (N,) each: total = aleatoric (label noise) + epistemic (uncertainty about the model)."""

    total: Array
    aleatoric: Array
    epistemic: Array


class BayesianRegressor(Intervals, MultiOutputMixin, RegressorMixin, BayesianEstimator):  # type: ignore[misc]
    """Bayesian neural network for regression, with predictions and uncertainties in the units of y.

    Inputs and targets are standardised by the training rows, so their units do not matter. Multiple targets, y of
    shape (N, K), are supported. X may have missing values (NaN, None, pd.NA), and categorical columns if it is a
    DataFrame. Predictions of rows with missing values are averaged over the values of similar training rows, which
    makes them more uncertain.

    Args:
        method: a name in `credibly.METHODS`, or "auto", as on the command line: HMC on small tables, where it is the
            fastest method with calibrated intervals, otherwise a deep ensemble. The limit is in rows times parameters:
            1.2 million with tune="folds", and 4 million without.
        hidden: width of the hidden layer, or a tuple of widths; () is the linear model.
        activation: "silu", "tanh", "relu" or another of `credibly.networks.zoo.ACTIVATIONS`.
        prior_scale: prior standard deviation of the weights times the square root of the fan-in; smaller values
            regularise more.
        noise: "learned" (one scale per target), "heteroscedastic" (depends on x), "student" (learned scale, heavy
            tails), "heteroscedastic-student" (both), or a known standard deviation in units of the standardised target.
        settings: settings of the method that override those of the recipe, such as {"draws": 500}; name the method too,
            as they are those of one method.
        random_state: an int, a numpy RandomState, or None for a different fit every time.
        device: where to fit, such as "cuda"; None for the CPU.
        verbose: whether to show a progress bar.
        tune: how to choose what is left at its default, on the training rows. "folds" chooses the prior scale, the
            noise, transforms of the target and of the inputs, and the network of tables too large for HMC, by the log
            density of rows left out (see `credibly.tables.choices.search`), as `credibly fit` does; it needs 50 rows.
            "rows" or "evidence" choose the prior scale, the noise and by evidence the width (see
            `credibly.tables.tuning`). None fits the parameters as they are. "auto" is "folds" if method is "auto" and
            there are no settings, and None otherwise.
        conformal: True or a number of folds for `predict_interval` with a coverage guarantee, from a fit without each.
        categorical_features: "from_dtype" for columns of a DataFrame with the dtype category or with text (and columns
            of an object array with text); None for no column; or the categorical columns as indices, names or a mask.

    Attributes:
        posterior_: `Posterior` of the weights, on standardised inputs and targets; float64 on the CPU, whatever the
            dtype of the fit.
        method_: name of the method used.
        why_: why it was chosen.
        recipe_: the recipe fitted, with the choices of `tune`.
        trials_: candidates that `tune` tried.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X has any.
        n_outputs_: number of targets per row.
    """

    def __init__(
        self,
        method: str = "auto",
        hidden: int | Sequence[int] = (50,),
        activation: str = "silu",
        prior_scale: float = 1.0,
        noise: str | float = "learned",
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = 0,
        device: str | None = None,
        verbose: bool = False,
        tune: str | None = "auto",
        conformal: bool | int = False,
        categorical_features: Any = "from_dtype",
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.activation = activation
        self.prior_scale = prior_scale
        self.noise = noise
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.tune = tune
        self.conformal = conformal
        self.categorical_features = categorical_features

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior of the weights.

        Args:
            X: inputs, (N, P), at least 2 rows: an array or a DataFrame.
            y: targets, (N,) or (N, K).
            sample_weight: weights of the rows, (N,), which multiply their log likelihoods, as in `Problem`. They also
                weigh the rows that inputs and targets are standardised by, and `tune`. None for ones.
        """
        recipe, given = self._recipe("regression", noise=self.noise), (X, y, sample_weight)
        self._encoder, X, y = training_rows(self, X, y, multi_output=True, y_numeric=True)
        X, y, weight = weighted_rows(X, real_targets(y), sample_weight)
        self._y_mean, self._y_scale = moments("y", y, weight)
        self.n_outputs_ = 1 if y.ndim == 1 else y.shape[1]
        return self._fit_folds(*given)._fit(X, y, weight, recipe)

    def predictive(self, X: Any) -> Predictive:
        """Return the `Predictive` of the rows of X in the units of y: moments, intervals, densities, samples."""
        return self._calibrated(self._in_units(self._predict(X)), X)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean in the shape of y and, with return_std=True, the standard deviation of y, noise included."""
        predictive = self.predictive(X)
        mean = to_array(predictive.mean)
        return (mean, to_array(predictive.std)) if return_std else mean

    def log_score(self, X: Any, y: Any) -> float:
        """Return the mean log predictive density of y in its own units, summed over the targets of a row."""
        return float(self.predictive(X).log_prob(real_targets(np.asarray(y))).mean())


class BayesianClassifier(Sets, ClassifierMixin, BayesianEstimator):  # type: ignore[misc]
    """Bayesian neural network for classification into two or more classes, with labels of any type.

    Inputs are standardised by the training rows, so their units do not matter. X may have missing values and
    categorical columns, as in `BayesianRegressor`.

    Args:
        method: a name in `credibly.METHODS`, or "auto", as on the command line: HMC if rows times parameters are at
            most 1.2 million with tune="folds", and 4 million without; otherwise a deep ensemble.
        hidden: width of the hidden layer, or a tuple of widths; () is the linear model.
        activation: "silu", "tanh", "relu" or another of `credibly.networks.zoo.ACTIVATIONS`.
        prior_scale: prior standard deviation of the weights times the square root of the fan-in; smaller values
            regularise more.
        settings: settings of the method that override those of the recipe, such as {"draws": 500}; name the method too,
            as they are those of one method.
        random_state: an int, a numpy RandomState, or None for a different fit every time.
        device: where to fit, such as "cuda"; None for the CPU.
        verbose: whether to show a progress bar.
        tune: how to choose what is left at its default, on the training rows: "folds" (the prior scale, transforms of
            the inputs, and the network of tables too large for HMC), "rows" or "evidence" (the prior scale, and by
            evidence the width), None or "auto", as in `BayesianRegressor`.
        class_weight: weights of the rows by class: {label: weight}, or "balanced" for the same total weight in every
            class. Probabilities are then those of a population with these weights, not of the training rows.
        conformal: True or a number of folds for `predict_set` with a coverage guarantee, from a fit without each.
        categorical_features: "from_dtype" for columns of a DataFrame with the dtype category or with text (and columns
            of an object array with text); None for no column; or the categorical columns as indices, names or a mask.

    Attributes:
        classes_: sorted labels, in the order of the columns of `predict_proba`.
        posterior_: `Posterior` of the weights, on standardised inputs; float64 on the CPU, whatever the dtype of the
            fit.
        method_: name of the method used.
        why_: why it was chosen.
        recipe_: the recipe fitted, with the choices of `tune`.
        trials_: candidates that `tune` tried.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X has any.
    """

    def __init__(
        self,
        method: str = "auto",
        hidden: int | Sequence[int] = (50,),
        activation: str = "silu",
        prior_scale: float = 2.0,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = 0,
        device: str | None = None,
        verbose: bool = False,
        tune: str | None = "auto",
        class_weight: str | Mapping[Any, float] | None = None,
        conformal: bool | int = False,
        categorical_features: Any = "from_dtype",
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.activation = activation
        self.prior_scale = prior_scale
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.tune = tune
        self.class_weight = class_weight
        self.conformal = conformal
        self.categorical_features = categorical_features

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior of the weights.

        Args:
            X: inputs, (N, P), at least 2 rows: an array or a DataFrame.
            y: labels of at least two classes, (N,): numbers, strings or booleans.
            sample_weight: weights of the rows, (N,), which multiply their log likelihoods, as in `Problem`, and those
                of `class_weight`. They also weigh the rows that inputs are standardised by, and `tune`. None for ones.
        """
        recipe, given = self._recipe("classification"), (X, y, sample_weight)
        self._encoder, X, y = training_rows(self, X, y)
        check_classification_targets(y)
        X, y, weight = weighted_rows(X, y, sample_weight)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            found = f"has one class, {self.classes_.tolist()[0]!r}"
            # scikit-learn's checks look for this sentence.
            raise InputError("y", found, "Classifier can't train when only one class is present")
        weight = class_weights(self.class_weight, self.classes_, labels, weight)
        return self._fit_folds(*given, labels)._fit(X, labels, weight, recipe, classes=len(self.classes_))

    def predictive(self, X: Any) -> Predictive:
        """Return the `Predictive` of the rows of X; its labels are indices into `classes_`."""
        return self._calibrated(in_double(self._predict(X)), X)

    def predict(self, X: Any) -> Array:
        """Return the most probable label of each row."""
        best = self.predict_proba(X).argmax(1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Return probabilities (N, classes) averaged over the posterior, in the order of `classes_`."""
        return to_array(self.predictive(X).probabilities)

    def predict_log_proba(self, X: Any) -> Array:
        """Return log probabilities, (N, classes)."""
        predictive = self.predictive(X)
        # Exact even where 1 - p would round to zero.
        if len(self.classes_) == 2:
            columns = [predictive.log_prob(torch.full((predictive.rows,), float(label))) for label in (0, 1)]
            return to_array(torch.stack(columns, 1))
        return to_array(predictive.probabilities.log())

    def uncertainty(self, X: Any) -> Uncertainty:
        """Return total, aleatoric and epistemic uncertainty of each row, in nats."""
        predictive = self.predictive(X)
        return Uncertainty(*(to_array(v) for v in (predictive.total, predictive.aleatoric, predictive.epistemic)))
