"""Weights of rows and classes in the estimators, in tuning and on the command line."""

import json

import numpy as np
import pytest
from sklearn.model_selection import cross_val_score
from sklearn.utils.class_weight import compute_sample_weight

import credibly as cr
from conftest import undrawn
from credibly.tables import Config, prepare, tuning
from credibly.tables.choices import search
from credibly.tables.choices.fallback import FoldFits, compare
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.search import choose
from credibly.tables.config import read_config
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows
from credibly.tables.tuning import tune
from own_tables import call, refused, write

BRIEF = {"steps": 60, "lr": 0.05}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = 20 * X[:, 0] + 5 * RNG.normal(size=40) + 300
LABELS = np.where(X[:, 0] + RNG.normal(size=40) > 0.8, "rare", "common")
COUNTS = RNG.integers(0, 4, 40)
ROWS = np.arange(40).repeat(COUNTS)


def regressor(**options):
    return cr.BayesianRegressor(**{"method": "map", "hidden": 6, "settings": BRIEF} | options)


def classifier(**options):
    return cr.BayesianClassifier(**{"method": "map", "hidden": 6, "settings": BRIEF} | options)


@pytest.mark.parametrize("method, settings", [("map", BRIEF), ("laplace", BRIEF)])
def test_integer_weights_equal_repeated_rows(method, settings):
    """Inputs and targets are standardised by weighted moments, so even units are the same."""
    for make, y in ((regressor, Y), (classifier, LABELS)):
        weighted = make(method=method, settings=settings).fit(X, y, sample_weight=COUNTS)
        repeated = make(method=method, settings=settings).fit(X[ROWS], y[ROWS])
        mine, theirs = (m.predictive(X).mean.numpy() for m in (weighted, repeated))
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        plain = make(method=method, settings=settings).fit(X, y).predictive(X).mean.numpy()
        assert abs(mine - plain).max() > 100 * abs(mine - theirs).max()


@pytest.mark.parametrize("method", ["ensemble", "hmc"])
def test_zero_weights_remove_rows_and_ones_do_nothing(method):
    settings = {"members": 2, **BRIEF} if method == "ensemble" else {"chains": 2, "warmup": 20, "draws": 4}
    kept = COUNTS > 0
    for make, y in ((regressor, Y), (classifier, LABELS)):
        model = make(method=method, settings=settings)
        for weights, rows in ((kept, kept), (np.ones(40), np.ones(40, bool))):
            mine = model.fit(X, y, sample_weight=weights).predictive(X).mean
            assert bool((mine == model.fit(X[rows], y[rows]).predictive(X).mean).all())


def test_class_weights_are_those_of_scikit_learn():
    for given in ("balanced", {"rare": 5, "common": 0.5}, {"rare": 3.0}):
        by_class = classifier(class_weight=given).fit(X, LABELS).predict_proba(X)
        by_row = classifier().fit(X, LABELS, sample_weight=compute_sample_weight(given, LABELS)).predict_proba(X)
        np.testing.assert_allclose(by_class, by_row, rtol=1e-5)
    # Weighted rows count by their weights, as repeated ones do.
    mine = classifier(class_weight="balanced").fit(X, LABELS, sample_weight=COUNTS).predict_proba(X)
    theirs = classifier(class_weight="balanced").fit(X[ROWS], LABELS[ROWS]).predict_proba(X)
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_balanced_classes_of_an_unbalanced_table_have_equal_weight():
    """With inputs that say nothing, balanced probabilities are one half each."""
    nothing = np.zeros((40, 1))
    settings = {"steps": 400, "lr": 0.1}
    plain, balanced = (classifier(hidden=(), class_weight=w, settings=settings) for w in (None, "balanced"))
    share = (LABELS == "rare").mean()
    assert plain.fit(nothing, LABELS).predict_proba(nothing)[0, 1] == pytest.approx(share, abs=0.05)
    assert balanced.fit(nothing, LABELS).predict_proba(nothing)[0, 1] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    "options, weights, message",
    [
        ({}, np.ones(39), r"sample_weight must have shape \(40,\)"),
        ({}, -np.ones(40), "sample_weight must be non-negative"),
        ({}, np.zeros(40), "sample_weight must be positive for at least one row"),
        ({"class_weight": "even"}, None, 'class_weight must be None, "balanced" or a dict'),
        ({"class_weight": {"rare": -1}}, None, "class_weight must be None"),
        ({"class_weight": {"other": 2}}, None, "class_weight: 'other' is not a class of y"),
        ({}, LABELS == "rare", "y: has one class"),
    ],
)
def test_weights_are_checked(options, weights, message):
    with pytest.raises(cr.InputError, match=message):
        classifier(**options).fit(X, LABELS, sample_weight=weights)


def test_cross_validation_passes_weights_on():
    scores = cross_val_score(regressor(), X, Y, cv=2, params={"sample_weight": COUNTS + 1})
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("rule", ["rows", "evidence"])
def test_tuning_scores_weighted_rows(monkeypatch, rule):
    """Candidates of weighted and of repeated rows have the same evidence; validation rows are weighted means."""
    for name in ("SETTINGS", "POINT"):
        monkeypatch.setattr(tuning, name, getattr(tuning, name) | {"steps": 40})
    y = (Y - Y.mean()) / Y.std()
    recipe = Recipe(hidden=(4,))
    _, trials = tune(recipe, X, y, sample_weight=COUNTS + 1.0, rule=rule, noise=False)
    assert all(np.isfinite(t.score) for t in trials)
    if rule == "evidence":
        again = np.arange(40).repeat(COUNTS + 1)
        _, repeated = tune(recipe, X[again], y[again], rule=rule, noise=False)
        assert [t.score for t in trials] == pytest.approx([t.score for t in repeated], abs=1e-4)
    else:
        _, doubled = tune(recipe, X, y, sample_weight=np.full(40, 2.0), rule=rule, noise=False)
        assert doubled[0].error == pytest.approx(np.std(validated(recipe, X, y), ddof=1) / 4, rel=1e-6)


def validated(recipe, x, y):
    """Return the values that the score of the first candidate is the mean of, by the same splits."""
    rng = np.random.default_rng([0, 0x7E5])
    some = rng.permutation(len(x))
    splits = tuning._splits(Rows(len(x)), some, rng)
    rows, first = (x, y, np.full(len(x), 2.0)), tuning.dataclasses.replace(recipe, prior_scale=tuning.SCALES[0])
    return np.concatenate([tuning._validate(first, rows, *split, None, 0) for split in splits])


def columns():
    return {"a": X[:, 0], "b": X[:, 1], "v": COUNTS.astype(float), "y": Y}


def test_a_column_of_the_table_weighs_its_rows(tmp_path):
    table = write(columns(), tmp_path / "table.csv")
    config = Config(str(table), "y", weight="v", holdout=0.0, method="map", hidden=(4,))
    prepared = prepare(config)
    assert prepared.preparation.names == ("a", "b")
    assert prepared.problem.sample_weight.tolist() == COUNTS[COUNTS > 0].tolist()
    options = ("--target", "y", "--weight", "v", "--method", "map", "--set", "steps=20", "--hidden", "4")
    with undrawn():
        found = call("fit", table, *options, "--out", tmp_path / "run", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rows"] == 40
    assert read_config(tmp_path / "run" / "config.toml")["weight"] == "v"


def test_a_row_without_a_target_needs_no_weight(tmp_path):
    values = columns()
    values["y"], values["v"] = [*map(str, Y[:-1]), ""], [*map(str, COUNTS[:-1]), ""]
    prepared = prepare(Config(str(write(values, tmp_path / "table.csv")), "y", weight="v", method="map"))
    assert len(prepared.train) == 39
    assert prepared.data.weight.tolist() == COUNTS[:-1].tolist()


@pytest.mark.parametrize(
    "weight, change, message",
    [
        ("w", {}, "--weight: no column 'w'"),
        ("y", {}, "--weight: 'y' is the target"),
        ("v", {"v": ["x", *map(str, COUNTS[1:])]}, "--weight: 'v'"),
        ("v", {"v": -COUNTS.astype(float)}, "--weight: 'v' must hold finite non-negative weights"),
    ],
)
def test_columns_that_are_no_weights_are_refused(tmp_path, weight, change, message):
    table = write(columns() | change, tmp_path / "table.csv")
    with pytest.raises(cr.InputError, match=message):
        prepare(Config(str(table), "y", weight=weight))
    refused(call("fit", table, "--target", "y", "--weight", weight, "--out", tmp_path / "run"), "--weight")


def test_the_search_by_folds_weighs_rows(monkeypatch):
    """Quantiles predict rows of weight 0.1 far better, those of weight 1 a little worse, of weight 0 never."""
    weights = np.tile([1.0, 0.1, 0.0], 100)

    def densities(recipe, data, fitted, predicted, seed):
        change = np.select([weights[predicted] == 1, weights[predicted] > 0], [-0.2, 1.0], -np.inf)
        noise = 0.1 * np.random.default_rng(0).normal(size=len(predicted))
        return -1 + (change + noise if recipe.inputs == "quantile" else 0 * noise)

    monkeypatch.setattr(search, "_densities", densities)
    x = np.random.default_rng(0).exponential(size=(300, 1)).astype(np.float32)
    recipe = Recipe(hidden=(4,), method="hmc", noise="learned")
    fixed = ("noise", "prior_scale", "transform")
    chosen = {}
    for name, weight in (("weighted", weights), ("equal", np.where(weights > 0, 1.0, 0.0))):
        best, candidates = choose(recipe, Rowset(x, x[:, 0], (0,), Rows(300), weight), fixed=fixed)
        chosen[name] = best.inputs, candidates[1].score
    # Weighted: (-0.2 + 0.1 * 1.0) / 1.1 = -0.09 nats; equal: (-0.2 + 1.0) / 2 = 0.4 nats.
    assert chosen == {
        "weighted": ("standard", pytest.approx(-1.09, abs=0.05)),
        "equal": ("quantile", pytest.approx(-0.6, abs=0.05)),
    }


def test_chains_and_an_ensemble_are_compared_by_weighted_rows(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    weights = np.tile([1.0, 0.01], 60)
    table = write({"x": rng.normal(size=120), "y": rng.normal(size=120), "w": weights}, tmp_path / "t.csv")
    fits = FoldFits(prepare(Config(str(table), "y", weight="w", method="map", tune="none")))
    gains = iter([np.where(weights[predicted] == 1, 1.0, -9.0) for _, predicted in fits._splits[:3]])
    monkeypatch.setattr(FoldFits, "densities", lambda self, fold: next(gains) if self is not fits else 0.0)
    assert compare(fits, FoldFits(fits.prepared)).difference == pytest.approx((1 - 0.09) / 1.01, abs=0.05)
