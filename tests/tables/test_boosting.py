"""Gradient boosting as the model to beat: the same rows and columns, against scikit-learn called by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import KFold

from credibly.tables.boosting import boosting_inputs, boosting_of, fit_boosting
from credibly.tables.config import Config
from credibly.tables.preparation import Preparation
from credibly.tables.prepared import prepare


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    n = 200
    x = rng.normal(size=n)
    town = rng.choice(["Bern", "Genf", "Basel"], n)
    y = 3 * x + (town == "Bern") + 0.3 * rng.normal(size=n)
    return pa.table(
        {
            "x": pa.array([None if i % 19 == 0 else v for i, v in enumerate(x)]),
            "town": pa.array([None if i % 23 == 0 else str(v) for i, v in enumerate(town)]),
            "weight": 1.0 + rng.integers(0, 3, n),
            "y": y,
            "kind": np.where(y > 1, "high", np.where(y < -1, "low", "middle")),
        }
    )


def by_hand(table):
    codes = {"Basel": 0.0, "Bern": 1.0, "Genf": 2.0, None: np.nan}
    x = [np.nan if v is None else v for v in table["x"].to_pylist()]
    return np.stack([x, [codes[v] for v in table["town"].to_pylist()]], 1)


def test_missing_cells_and_categories_are_passed_on(table):
    known = Preparation.fit(table, "y", drop=("weight", "kind"))
    x, coded = boosting_inputs(known, table)
    np.testing.assert_array_equal(x, by_hand(table))
    assert coded.tolist() == [False, True]
    # A category that was never seen is a missing one.
    x, _ = boosting_inputs(known, pa.table({"x": [1.0], "town": ["Chur"]}))
    assert np.isnan(x[0, 1])


def test_a_regression_is_a_gaussian_around_the_trees(table):
    ready = prepare(Config("t.csv", "y", drop=("kind",), weight="weight", method="map"), table, refit=False)
    found = boosting_of(ready)
    x, y = by_hand(table), np.asarray(table["y"])
    weights = np.asarray(table["weight"])[ready.train]
    xs, ys = x[ready.train], y[ready.train]
    model = HistGradientBoostingRegressor(random_state=0, categorical_features=[False, True])
    squares = np.empty(len(ys))
    for train, test in KFold(5, shuffle=True, random_state=0).split(xs):
        squares[test] = (ys[test] - model.fit(xs[train], ys[train], weights[train]).predict(xs[test])) ** 2
    std = np.sqrt((weights * squares).sum() / weights.sum())
    mean = model.fit(xs, ys, weights).predict(x[ready.held_out])
    np.testing.assert_allclose(found.predictive.mean.numpy(), mean)
    np.testing.assert_allclose(found.predictive.std.numpy(), std)
    np.testing.assert_array_equal(found.y, y[ready.held_out])
    assert found.figures["log_density"] == pytest.approx(norm.logpdf(found.y, mean, std).mean())
    assert found.figures["rmse"] == pytest.approx(np.sqrt(np.mean((found.y - mean) ** 2)))


def test_classes_have_the_probabilities_of_the_classifier(table):
    ready = prepare(Config("t.csv", "kind", drop=("y", "weight"), method="map", seed=3), table, refit=False)
    found = boosting_of(ready)
    kinds = np.asarray(table["kind"].to_pylist())
    model = HistGradientBoostingClassifier(random_state=3, categorical_features=[False, True])
    model.fit(by_hand(table)[ready.train], kinds[ready.train])
    assert list(model.classes_) == list(ready.preparation.classes)
    expected = model.predict_proba(by_hand(table)[ready.held_out])
    np.testing.assert_allclose(found.predictive.probabilities.numpy(), expected, atol=1e-12)
    assert found.figures["accuracy"] == pytest.approx(
        (model.classes_[expected.argmax(1)] == kinds[ready.held_out]).mean()
    )


def test_it_is_not_judged_on_its_training_rows(table):
    ready = prepare(Config("t.csv", "y", drop=("kind", "weight"), method="map", holdout=0.0), table, refit=False)
    assert boosting_of(ready) is None


def test_folds_predict_every_row_by_a_fit_to_others(table):
    known = Preparation.fit(table, "y", drop=("weight", "kind"))
    splits = list(KFold(4).split(np.arange(200)))
    found = fit_boosting(known, table, splits)
    one = fit_boosting(known, table, splits[1:2])
    np.testing.assert_array_equal(found.y, np.asarray(table["y"]))
    np.testing.assert_allclose(found.predictive.mean.numpy()[50:100], one.predictive.mean.numpy())
    np.testing.assert_allclose(found.predictive.std.numpy()[50:100], one.predictive.std.numpy())
