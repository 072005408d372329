"""The scikit-learn front: estimators that standardise, fit by a `Recipe`, and predict in the target's own units.

`BayesianRegressor` and `BayesianClassifier` follow scikit-learn's rules (`__init__` only stores, `fit` validates, what is
learned ends in `_`), so they go into pipelines, grid searches and cross-validation. What they add to a usual estimator is
`predictive(X)`: the whole `Predictive` of the rows, from which every other prediction here is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from credibly.core.inputs import blank_row, describe, map_inputs
from credibly.errors import InputError
from credibly.forward import Forward
from credibly.networks.layout import Layout
from credibly.posterior.base import Posterior
from credibly.posterior.loading import POSTERIORS
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.predictive.rescaling import in_double, in_units
from credibly.tables.recipe import Recipe
from credibly.tables.tuning import Trial, tune

Array = npt.NDArray[Any]


class Uncertainty(NamedTuple):
    """Entropies in nats, (N,) each: total = aleatoric (the labels' own noise) + epistemic (what the model does not know)."""

    total: Array
    aleatoric: Array
    epistemic: Array


class _Bayesian(BaseEstimator):  # type: ignore[misc]
    """What the two estimators share: from validated arrays to a posterior, and rows standardised as in training."""

    method: str
    hidden: int | Sequence[int]
    activation: str
    prior_scale: float
    settings: Mapping[str, Any] | None
    random_state: int | np.random.RandomState | None
    device: str | None
    verbose: bool
    tune: str | None

    def _fit(self, X: Array, y: Array, recipe: Recipe, classes: int | None = None) -> Self:
        seed = _seed(self.random_state)
        self._x_mean, scale = _moments("X", X)
        # A column that was constant says nothing about the target; infinity makes it 0 in new rows too.
        self._x_scale = np.where(X.max(0) == X.min(0), np.inf, scale)
        self.trials_: tuple[Trial, ...] = ()
        if self.tune is not None:
            recipe, self.trials_ = tune(
                recipe, self._standardised(X), y, rule=self.tune, classes=classes, seed=seed,
                noise=recipe.noise == "learned", width=self.tune == "evidence",
            )  # fmt: skip
        self.recipe_ = recipe
        problem = recipe.problem(self._standardised(X), y, classes=classes, seed=seed, device=self.device)
        rows, parameters = len(X), problem.layout.dim
        fitter = recipe.fitter(rows, parameters)
        self.method_, self.why_ = recipe.resolved(rows, parameters)
        posterior = fitter.fit(problem, seed=seed, progress=bool(self.verbose))
        # In float32 the last digits of a row's prediction depend on which rows come with it.
        on_processor = problem.layout.device.type == "cpu"
        self.posterior_ = _unpacked(_in_float64(_packed(posterior))) if on_processor else posterior
        return self

    def _recipe(self, task: str, **noise: Any) -> Recipe:
        hidden = (self.hidden,) if isinstance(self.hidden, (int, np.integer)) else self.hidden
        if not isinstance(hidden, (tuple, list, np.ndarray)) or not all(_is_width(w) for w in hidden):
            raise InputError("hidden", f"found {self.hidden!r}", "Pass a width, or a tuple of them such as (50, 50)")
        return Recipe(
            task=task, hidden=tuple(int(w) for w in hidden), activation=self.activation, prior_scale=self.prior_scale,
            method=self.method, settings={} if self.settings is None else self.settings, **noise,
        )  # fmt: skip

    def _standardised(self, X: Array) -> Array:
        # Rows far outside the training data must stay finite in float32; so far off the answer is the same.
        return np.clip((X - self._x_mean) / self._x_scale, -1e30, 1e30)

    def _predict(self, X: Any) -> Predictive:
        check_is_fitted(self)
        rows = self._standardised(validate_data(self, X, reset=False, dtype=np.float64))
        return self.posterior_.predict(torch.from_numpy(rows).to(self.posterior_.layout.dtype))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if "posterior_" in state:
            state["posterior_"] = _packed(state["posterior_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "posterior_" in state:
            state = state | {"posterior_": _unpacked(state["posterior_"])}
        super().__setstate__(state)


class BayesianRegressor(MultiOutputMixin, RegressorMixin, _Bayesian):  # type: ignore[misc]
    """A Bayesian neural network for regression, with predictions and their uncertainty in y's own units.

    Inputs and targets are standardised by the training rows, so their units do not matter. Several targets at once, y of
    shape (N, K), work too.

    Args:
        method: a name in `credibly.METHODS`, or "auto", which takes HMC where that is affordable. The default is a deep
            ensemble of randomised members: the quickest with honest intervals, since cross-validation fits many times.
        hidden: width of the hidden layer, or a tuple of widths; () is the linear model.
        activation: "silu", "tanh", "relu" or another of `credibly.networks.zoo.ACTIVATIONS`.
        prior_scale: deviation of the weights before division by the root of the fan-in: the regularisation, smaller is
            stronger.
        noise: "learned" (one scale for each target), "heteroscedastic" (it depends on x), "student" (learned, with heavy
            tails), or a known deviation in units of the standardised target.
        settings: of the method, as a dict over those the recipe gives, such as {"members": 20}.
        random_state: an int, a numpy RandomState, or None for another fit every time.
        device: where to fit, such as "cuda"; None is the processor.
        verbose: whether to show the progress of the fit.
        tune: "rows" or "evidence" first chooses by the training rows (see `credibly.tables.tuning`): the prior's scale, a noise that is to
            be learned, and by evidence the width.

    Attributes:
        posterior_: the `Posterior` of the network's weights, on standardised inputs and targets; in float64 on the
            processor, whatever the fit was done in.
        method_: the name of the method that was used.
        why_: why it was taken.
        recipe_: what was fitted; with `tune`, what it chose.
        trials_: what `tune` tried.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, where X had any.
        n_outputs_: number of targets.
    """

    def __init__(
        self, method: str = "ensemble", hidden: int | Sequence[int] = (50,), activation: str = "silu",
        prior_scale: float = 1.0, noise: str | float = "learned", settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = 0, device: str | None = None, verbose: bool = False,
        tune: str | None = None,
    ) -> None:  # fmt: skip
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

    def fit(self, X: Any, y: Any) -> Self:
        """Fits the posterior of the weights.

        Args:
            X: inputs, (N, P), from 2 rows up.
            y: targets, (N,) or (N, K).
        """
        recipe = self._recipe("regression", noise=self.noise)
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        y = _targets(y)
        self._y_mean, self._y_scale = _moments("y", y)
        self.n_outputs_ = 1 if y.ndim == 1 else y.shape[1]
        return self._fit(X, (y - self._y_mean) / self._y_scale, recipe)

    def predictive(self, X: Any) -> Predictive:
        """The `Predictive` of the rows of X in y's own units: moments, intervals, densities, samples."""
        return in_units(self._predict(X), *(np.atleast_1d(v).tolist() for v in (self._y_mean, self._y_scale)))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of each row, in the shape of y; with return_std=True also the deviation of y, noise included."""
        predictive = self.predictive(X)
        mean = _array(predictive.mean)
        return (mean, _array(predictive.std)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper end of the central interval that holds y with probability `level`, each in the shape of y."""
        lower, upper = self.predictive(X).interval(level)
        return _array(lower), _array(upper)

    def log_score(self, X: Any, y: Any) -> float:
        """Mean log predictive density of y in its own units, higher is better; targets of a row are summed."""
        return float(self.predictive(X).log_prob(_targets(np.asarray(y))).mean())


class BayesianClassifier(ClassifierMixin, _Bayesian):  # type: ignore[misc]
    """A Bayesian neural network for classification into two or more classes, with labels of any type.

    Inputs are standardised by the training rows, so their units do not matter.

    Args:
        method: a name in `credibly.METHODS`, or "auto", which takes HMC where that is affordable. The default is a deep
            ensemble of randomised members: quick, since cross-validation fits many times.
        hidden: width of the hidden layer, or a tuple of widths; () is the linear model.
        activation: "silu", "tanh", "relu" or another of `credibly.networks.zoo.ACTIVATIONS`.
        prior_scale: deviation of the weights before division by the root of the fan-in: the regularisation, smaller is
            stronger.
        settings: of the method, as a dict over those the recipe gives, such as {"members": 20}.
        random_state: an int, a numpy RandomState, or None for another fit every time.
        device: where to fit, such as "cuda"; None is the processor.
        verbose: whether to show the progress of the fit.
        tune: "rows" or "evidence" first chooses by the training rows (see `credibly.tables.tuning`): the prior's scale and, by evidence,
            the width.

    Attributes:
        classes_: the labels, sorted; columns of probabilities follow them.
        posterior_: the `Posterior` of the network's weights, on standardised inputs; in float64 on the processor, whatever
            the fit was done in.
        method_: the name of the method that was used.
        why_: why it was taken.
        recipe_: what was fitted; with `tune`, what it chose.
        trials_: what `tune` tried.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, where X had any.
    """

    def __init__(
        self, method: str = "ensemble", hidden: int | Sequence[int] = (50,), activation: str = "silu",
        prior_scale: float = 2.0, settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = 0, device: str | None = None, verbose: bool = False,
        tune: str | None = None,
    ) -> None:  # fmt: skip
        self.method = method
        self.hidden = hidden
        self.activation = activation
        self.prior_scale = prior_scale
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.tune = tune

    def fit(self, X: Any, y: Any) -> Self:
        """Fits the posterior of the weights.

        Args:
            X: inputs, (N, P), from 2 rows up.
            y: labels of at least two classes, (N,): numbers, strings or booleans.
        """
        recipe = self._recipe("classification")
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            found = f"has one class, {self.classes_[0]!r}"
            raise InputError("y", found, "Classifier can't train when only one class is present; pass rows of both")
        return self._fit(X, labels, recipe, classes=len(self.classes_))

    def predictive(self, X: Any) -> Predictive:
        """The `Predictive` of the rows of X; its labels are the places in `classes_`."""
        return in_double(self._predict(X))

    def predict(self, X: Any) -> Array:
        """The most probable label of each row."""
        best = self.predict_proba(X).argmax(1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Probabilities (N, classes) averaged over the posterior, in the order of `classes_`."""
        return _array(self.predictive(X).probabilities)

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities, (N, classes)."""
        predictive = self.predictive(X)
        if len(self.classes_) == 2:  # exact where 1 - p would round to zero
            columns = [predictive.log_prob(torch.full((predictive.rows,), float(label))) for label in (0, 1)]
            return _array(torch.stack(columns, 1))
        return _array(predictive.probabilities.log())

    def uncertainty(self, X: Any) -> Uncertainty:
        """Total, aleatoric and epistemic uncertainty of each row, in nats."""
        predictive = self.predictive(X)
        return Uncertainty(*(_array(v) for v in (predictive.total, predictive.aleatoric, predictive.epistemic)))


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """An int is the seed of the fit itself; anything else gives one as scikit-learn has it."""
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool) and random_state >= 0:
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def _is_width(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def _moments(name: str, values: Array) -> tuple[Array, Array]:
    """Mean and deviation of each column in float64; a constant one keeps its scale, so that it becomes 0 and not noise."""
    with np.errstate(over="ignore", invalid="ignore"):
        constant = values.max(0) == values.min(0)
        mean, scale = np.where(constant, values[0], values.mean(0)), np.where(constant, 1.0, values.std(0))
    if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
        raise InputError(name, "its values are so large that their variance is infinite", "Divide them by a constant")
    return mean, np.where(scale > np.finfo(np.float64).tiny, scale, 1.0)


def _targets(y: Array) -> Array:
    """Targets in float64, (N,) or (N, K)."""
    if issparse(y):
        raise InputError("y", "is a sparse matrix", "Pass a dense array, such as y.toarray()")
    return y.astype(np.float64)


def _array(tensor: Tensor) -> Array:
    result: Array = tensor.detach().cpu().numpy().astype(np.float64)
    return result


def _packed(posterior: Posterior) -> dict[str, Any]:
    """A posterior without its forward, which is made of functions that cannot be pickled."""
    model = posterior.model
    return {
        "kind": posterior.kind, "layout": model.layout, "likelihood": model.likelihood, "row": model.row,
        "looped": model.forward.looped, "precision": model.forward.precision, "record": posterior.record,
        "tensors": posterior.tensors(), "description": posterior.description(),
    }  # fmt: skip


def _in_float64(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a posterior in float64."""
    layout: Layout = parts["layout"]
    extra = {e.name: e.shape for e in layout.entries if e.name in layout.extra}
    tensors = {k: v.double() if v.is_floating_point() else v for k, v in parts["tensors"].items()}
    row = describe(map_inputs(lambda t: t.double(), blank_row(parts["row"], layout.device)))
    # Layout copies the module; that of the fit is not needed any more.
    return parts | {"layout": Layout(layout.module.double(), layout.random, extra), "tensors": tensors, "row": row}


def _unpacked(parts: dict[str, Any]) -> Posterior:
    """The inverse of `_packed`."""
    layout = parts["layout"]
    trial = blank_row(parts["row"], layout.device)
    forward = Forward(layout, "looped" if parts["looped"] else "batched", trial, precision=parts["precision"])
    model = Model(layout, parts["likelihood"], forward, parts["row"])
    return POSTERIORS[parts["kind"]].from_tensors(model, parts["tensors"], parts["record"], parts["description"])
