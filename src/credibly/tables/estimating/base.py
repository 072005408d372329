"""The shared part of the scikit-learn estimators: encodes inputs, chooses a recipe, fits it and predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from credibly.errors import InputError
from credibly.predictive.base import Predictive
from credibly.predictive.rescaling import in_double, in_units
from credibly.tables.choices.estimator_choice import choose_recipe, tuning_rule
from credibly.tables.choices.rowset import Rowset
from credibly.tables.columns.scaling import STANDARD, InputScaling
from credibly.tables.estimating.arrays import Array, is_width, seed_of
from credibly.tables.estimating.encoding import InputEncoder, new_rows
from credibly.tables.estimating.posterior_parts import from_parts, in_float64, to_parts
from credibly.tables.fit_summary import Candidate
from credibly.tables.missing.completed import predict_gaps
from credibly.tables.missing.imputation import Donors
from credibly.tables.missing.training_gaps import TrainingGaps, completed_inputs
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows
from credibly.tables.targets.scale import TargetScale
from credibly.tables.tuning import Trial, tune


class BayesianEstimator(BaseEstimator):  # type: ignore[misc]
    """The shared part of both estimators: fits a posterior to validated arrays and standardises rows as in training."""

    method: str
    hidden: int | Sequence[int]
    activation: str
    prior_scale: float
    settings: Mapping[str, Any] | None
    random_state: int | np.random.RandomState | None
    device: str | None
    verbose: bool
    tune: str | None
    categorical_features: Any
    _encoder: InputEncoder
    _y_mean: Array
    _y_scale: Array

    def _fit(self, X: Array, y: Array, weight: Array | None, recipe: Recipe, classes: int | None = None) -> Self:
        """Choose what `tune` leaves open and fit; y is in the units of the caller, or class indices."""
        seed = seed_of(self.random_state)
        encoded = self._encoder.fit(X, weight).transform(X)
        self._donors = Donors(encoded)
        x = self._donors.fill(encoded)
        gaps = TrainingGaps.of(encoded, self._donors)
        numeric = self._encoder.numeric_inputs(x)
        self.trials_: tuple[Trial | Candidate, ...] = ()
        why, rule = "", tuning_rule(self.tune, recipe)
        if rule == "folds":
            data = Rowset(x, y, numeric, Rows(len(x), None if classes is None else y), weight, classes, gaps)
            recipe, self.trials_, why = choose_recipe(recipe, data, self.__class__, seed)
        elif rule is not None:
            standardised = y if classes is not None else (y - self._y_mean) / self._y_scale
            recipe, self.trials_ = tune(
                recipe,
                x,
                standardised,
                sample_weight=weight,
                rule=rule,
                classes=classes,
                seed=seed,
                noise=recipe.noise == "learned",
                width=rule == "evidence",
            )
        self.recipe_ = recipe
        y = y if classes is not None else self._standardised(y, recipe.transform)
        self._scaling = InputScaling.fit(recipe.inputs, x, numeric)
        if gaps is not None:
            given: dict[str, Any] = {"sample_weight": weight, "classes": classes, "numeric": numeric}
            x = completed_inputs(recipe, x, y, gaps, scaling=self._scaling, seed=seed, **given)
        problem = recipe.problem(
            self._scaling(x), y, sample_weight=weight, classes=classes, seed=seed, device=self.device, numeric=numeric
        )
        rows, parameters = len(X), problem.layout.dim
        fitter = recipe.fitter(rows, parameters)
        self.method_, self.why_ = recipe.resolved(rows, parameters)
        self.why_ = why or self.why_
        posterior = fitter.fit(problem, seed=seed, progress=bool(self.verbose))
        # In float32 the last digits of a prediction depend on the other rows of the batch.
        on_cpu = problem.layout.device.type == "cpu"
        self.posterior_ = from_parts(in_float64(to_parts(posterior))) if on_cpu else posterior
        return self

    def _standardised(self, y: Array, transform: str) -> Array:
        """Return real targets on the scale of the fit, and keep the way back."""
        self._target_scale = None if transform == "none" else TargetScale.fit(y, transform)
        if self._target_scale is not None:
            return self._target_scale.standardise(y)
        scaled: Array = (y - self._y_mean) / self._y_scale
        return scaled

    def _in_units(self, predictive: Predictive) -> Predictive:
        """Return predictions of real targets in their own units."""
        scale: TargetScale | None = getattr(self, "_target_scale", None)
        if scale is not None:
            return scale.restore(in_double(predictive))
        units = (np.atleast_1d(v).tolist() for v in (self._y_mean, self._y_scale))
        return in_units(predictive, *units)

    def _recipe(self, task: str, **noise: Any) -> Recipe:
        hidden = (self.hidden,) if isinstance(self.hidden, (int, np.integer)) else self.hidden
        if not isinstance(hidden, (tuple, list, np.ndarray)) or not all(is_width(w) for w in hidden):
            raise InputError("hidden", f"must be a positive integer or a tuple such as (50, 50), got {self.hidden!r}")
        return Recipe(
            task=task,
            hidden=tuple(int(w) for w in hidden),
            activation=self.activation,
            prior_scale=self.prior_scale,
            method=self.method,
            settings={} if self.settings is None else self.settings,
            **noise,
        )

    def _predict(self, X: Any) -> Predictive:
        check_is_fitted(self)

        scaling: InputScaling = getattr(self, "_scaling", STANDARD)

        def predict(rows: Array) -> Predictive:
            return self.posterior_.predict(torch.from_numpy(scaling(rows)).to(self.posterior_.layout.dtype))

        inputs = self._encoder.transform(new_rows(self, self._encoder, X))
        return predict_gaps(predict, inputs, self._donors, scaling)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if "posterior_" in state:
            state["posterior_"] = to_parts(state["posterior_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "posterior_" in state:
            state = state | {"posterior_": from_parts(state["posterior_"])}
        super().__setstate__(state)
