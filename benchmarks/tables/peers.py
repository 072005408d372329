"""The peers, each with its own defaults. None is a dependency; what is not installed is left out with the reason."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.tables.data import Array
from benchmarks.tables.gp import NOISE, tune
from benchmarks.tables.rows import Rows
from benchmarks.tables.scores import LEVEL, Classes, Normal, Point, from_interval, normal
from benchmarks.tables.sources import Absent

# Rows that a Gaussian process is fitted to, and those of them that its hyperparameters are optimised on.
GP_ROWS, GP_TUNING_ROWS, GP_STEPS = 2_000, 1_000, 100
# Categorical columns with more levels are target-encoded for NGBoost and the Gaussian process.
MANY_LEVELS = 12
# Test rows at a time: CV+ compares each of them with every training row.
CHUNK = 500
# Held-out training rows that give the noise of a network without one.
HELD_OUT = 0.1


def need(module: str) -> None:
    """Raise if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Absent(f"the package {module} is not installed (--site DIR names a folder that has it)")


def hgb(rows: Rows) -> Normal | Classes:
    """Fit HistGradientBoosting; regression with the CV+ intervals of MAPIE, classes with its probabilities."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import GroupKFold

    x, x_test = rows.codes()
    categories = rows.categories or None
    if rows.table.task == "classes":
        model = HistGradientBoostingClassifier(categorical_features=categories, random_state=0).fit(x, rows.y)
        return Classes(model.classes_, model.predict_proba(x_test))
    need("mapie")
    from mapie.regression import CrossConformalRegressor

    conformal = CrossConformalRegressor(
        HistGradientBoostingRegressor(categorical_features=categories, random_state=0),
        confidence_level=LEVEL,
        method="plus",
        cv=5 if rows.groups is None else GroupKFold(5),
        random_state=0 if rows.groups is None else None,
    )
    conformal.fit_conformalize(x, rows.y, groups=rows.groups)
    means, bounds = [], []
    for start in range(0, len(x_test), CHUNK):
        mean, bound = conformal.predict_interval(x_test[start : start + CHUNK])
        means.append(mean)
        bounds.append(bound[:, :, 0])
    both = np.concatenate(bounds)
    return from_interval(np.concatenate(means), both[:, 0], both[:, 1])


def catboost(rows: Rows) -> Normal | Classes:
    """Fit CatBoost: its classifier, or RMSEWithUncertainty with virtual ensembles, both uncertainties added."""
    need("catboost")
    from catboost import CatBoostClassifier, CatBoostRegressor

    x, x_test = rows.strings()
    given: dict[str, Any] = {
        "thread_count": 1, "random_seed": 0, "verbose": False, "allow_writing_files": False,
        "cat_features": rows.categories,
    }  # fmt: skip
    if rows.table.task == "classes":
        model = CatBoostClassifier(**given).fit(x, rows.y)
        return Classes(np.asarray(model.classes_), model.predict_proba(x_test))
    model = CatBoostRegressor(loss_function="RMSEWithUncertainty", posterior_sampling=True, **given).fit(x, rows.y)
    found = model.virtual_ensembles_predict(x_test, prediction_type="TotalUncertainty", virtual_ensembles_count=10)
    mean, knowledge, data = found[:, 0], found[:, 1], found[:, 2]
    return normal(mean, np.sqrt(knowledge + data))


def catboost_rmse(rows: Rows) -> Point:
    """Fit CatBoost with its default loss, which has no uncertainty: a reference for the RMSE alone."""
    need("catboost")
    from catboost import CatBoostRegressor

    if rows.table.task == "classes":
        raise Absent("only for numbers; for classes it is catboost")
    x, x_test = rows.strings()
    given: dict[str, Any] = {"thread_count": 1, "random_seed": 0, "verbose": False, "allow_writing_files": False}
    return Point(CatBoostRegressor(cat_features=rows.categories, **given).fit(x, rows.y).predict(x_test))


def ngboost(rows: Rows) -> Normal | Classes:
    """Fit NGBoost: a Gaussian, or a categorical distribution."""
    need("ngboost")
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import k_categorical

    classes = rows.table.task == "classes"
    x, x_test = rows.one_hot(standardise=False, most=None if classes else MANY_LEVELS)
    if classes:
        at = np.searchsorted(rows.classes, rows.y)
        model = NGBClassifier(Dist=k_categorical(len(rows.classes)), verbose=False, random_state=0).fit(x, at)
        return Classes(rows.classes, model.predict_proba(x_test))
    found = NGBRegressor(verbose=False, random_state=0).fit(x, rows.y).pred_dist(x_test)
    return normal(found.loc, found.scale)


def gp(rows: Rows) -> Normal | Classes:
    """Fit a Gaussian process to at most GP_ROWS random rows: an ARD RBF kernel and noise, or its classifier.

    The classifier has one length scale for all columns and takes at most GP_TUNING_ROWS rows.
    """
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x, x_test = rows.one_hot(most=None if rows.table.task == "classes" else MANY_LEVELS)
    order = np.random.default_rng(0).permutation(len(x))
    used, tuning = order[:GP_ROWS], order[:GP_TUNING_ROWS]
    if rows.table.task == "classes":
        kernel = ConstantKernel(1.0) * RBF(math.sqrt(x.shape[1]))
        model = GaussianProcessClassifier(kernel, random_state=0).fit(x[tuning], rows.y[tuning])
        return Classes(model.classes_, model.predict_proba(x_test))
    mean, std = rows.y.mean(), rows.y.std()
    y = (rows.y - mean) / std
    variance, lengths, noise = tune(x[tuning], y[tuning], GP_STEPS)
    if noise < 2 * NOISE[0] and len(np.unique(x[tuning], axis=0)) < len(tuning):
        raise Absent("rows that occur twice drive its noise to zero, and its density at their copies has no limit")
    kernel = ConstantKernel(variance) * RBF(lengths) + WhiteKernel(noise)
    model = GaussianProcessRegressor(kernel, optimizer=None).fit(x[used], y[used])
    parts = [model.predict(x_test[i : i + CHUNK], return_std=True) for i in range(0, len(x_test), CHUNK)]
    centre, spread = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    return normal(centre * std + mean, spread * std)


def mlp(rows: Rows) -> Normal | Classes:
    """Fit a scikit-learn MLP with early stopping; a tenth of the rows, held out, gives the noise of a regression."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    x, x_test = rows.one_hot()
    if rows.table.task == "classes":
        # Early stopping needs two rows of every class for its own split; the default of the classifier is none.
        model = MLPClassifier(random_state=0).fit(x, rows.y)
        return Classes(model.classes_, model.predict_proba(x_test))
    mean, std = rows.y.mean(), rows.y.std()
    y = (rows.y - mean) / std
    held, kept = _held_out(rows)
    model = MLPRegressor(early_stopping=True, random_state=0).fit(x[kept], y[kept])
    noise = float(np.sqrt(np.mean((model.predict(x[held]) - y[held]) ** 2)))
    return normal(model.predict(x_test) * std + mean, np.full(len(x_test), noise * std))


def _held_out(rows: Rows) -> tuple[Array, Array]:
    """Return the rows that give the noise and those that are fitted; no group is on both sides."""
    rng = np.random.default_rng(0)
    if rows.groups is not None:
        every = np.unique(rows.groups)
        held = np.isin(rows.groups, rng.permutation(every)[: round(HELD_OUT * len(every))])
        return np.flatnonzero(held), np.flatnonzero(~held)
    order = rng.permutation(len(rows.y))
    cut = round(HELD_OUT * len(order))
    return order[:cut], order[cut:]


PEERS: dict[str, Callable[[Rows], Normal | Classes | Point]] = {
    "hgb": hgb,
    "catboost": catboost,
    "ngboost": ngboost,
    "gp": gp,
    "mlp": mlp,
    "catboost_rmse": catboost_rmse,
}
