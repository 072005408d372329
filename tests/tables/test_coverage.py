"""The defaults for tables cover what they promise, on small tables where a noise at the joint mode does not."""

import numpy as np
import pytest

import credibly as cr
from benchmarks.coverage_tables import irrelevant, linear
from credibly.tables import Config
from credibly.tables.recipe import AFFORDABLE, Recipe

TABLES = {"linear": (linear, 60), "irrelevant": (irrelevant, 80)}


def coverage(splits, names=tuple(TABLES), **given):
    """Return the coverage of 90 % intervals of new rows, averaged over tables and some splits of each."""
    found = []
    for make, rows in (TABLES[name] for name in names):
        for split in range(splits):
            x, y = make(np.random.default_rng([split, rows]), rows + 500)
            model = cr.BayesianRegressor(**given).fit(x[:rows], y[:rows])
            lower, upper = model.predict_interval(x[rows:])
            found.append(((lower <= y[rows:]) & (y[rows:] <= upper)).mean())
    return float(np.mean(found))


def test_intervals_of_the_default_cover_new_rows():
    assert 0.84 < coverage(splits=3, tune=None) < 0.94


@pytest.mark.nightly
def test_intervals_of_the_default_with_choices_by_folds_cover_new_rows():
    """Nightly: `test_estimators.py` measures the coverage of the same choices on real data."""
    assert 0.82 < coverage(splits=1) < 0.96


def test_the_noise_of_held_out_rows_lets_an_ensemble_cover_new_rows():
    # With fewer steps, to be quick.
    given, settings = {"names": ["irrelevant"], "method": "ensemble"}, {"steps": 400, "compile": False}
    assert 0.86 < coverage(2, **given, settings=settings) < 0.94
    assert coverage(2, **given, settings=settings | {"noise_from": "training"}) < 0.84


@pytest.mark.parametrize("method", [pytest.param("map", marks=pytest.mark.nightly), "laplace"])
def test_fits_around_a_mode_cover_new_rows(method):
    assert 0.85 < coverage(2, method=method) < 0.95


@pytest.mark.parametrize("kind", [cr.BayesianRegressor, cr.BayesianClassifier])
def test_the_default_method_is_that_of_the_command_line(kind):
    assert kind().method == Config("table.csv", "y").method == Recipe().method == "auto"
    rows, parameters = AFFORDABLE // 500, 500
    assert Recipe().resolved(rows, parameters)[0] == "hmc"
    assert Recipe().resolved(rows + 1, parameters)[0] == "ensemble"
    assert AFFORDABLE == 4_000_000  # as documented
    assert "4 million" in kind.__doc__


def test_settings_of_another_method_than_the_picked_one_are_explained():
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(cr.InputError, match="HMC has no 'members'.*picked by method=\"auto\".*name the method"):
        cr.BayesianRegressor(settings={"members": 3}).fit(x, x[:, 0])
