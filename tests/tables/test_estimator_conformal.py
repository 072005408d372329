"""Estimators with conformal=True: coverage of wrong models, folds, copies, scikit-learn's checks and bad input."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils import estimator_checks

import credibly as cr
from credibly.conformal import CalibratedPredictive
from credibly.tables.estimating.conformal import assigned_folds

# Folds are what these tests are about; the noise of held-out rows would take ten more fits for each.
SETTINGS = {"members": 2, "steps": 80, "lr": 0.1, "validation": 0.0, "noise_from": "training"}


def regressor(**kwargs):
    return cr.BayesianRegressor(**{"method": "ensemble", "hidden": (8,), "settings": SETTINGS, "conformal": 3} | kwargs)


def classifier(**kwargs):
    return cr.BayesianClassifier(
        **{"method": "ensemble", "hidden": (8,), "settings": SETTINGS, "conformal": 3} | kwargs
    )


def waves(rows, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 2))
    return x, 50 + 10 * x[:, 0] + (0.5 + np.abs(x[:, 1])) * 5 * generator.normal(size=rows)


def points(rows, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 2))
    return x, np.array(["no", "maybe", "yes"])[np.digitize(x[:, 0] + generator.normal(size=rows), [-0.5, 0.7])]


# The checks of scikit-learn that fold fits could break: copies, parameters, state, weights and how rows are indexed.
# test_estimators.py has the whole list, for the estimators without folds.
CHECKS = (
    "check_estimators_pickle",
    "check_get_params_invariance",
    "check_set_params",
    "check_estimators_overwrite_params",
    "check_fit_idempotent",
    "check_n_features_in",
    "check_n_features_in_after_fitting",
    "check_readonly_memmap_input",
    "check_dtype_object",
    "check_fit2d_1sample",
    "check_sample_weights_pandas_series",
    "check_sample_weights_not_an_array",
    "check_sample_weights_list",
    "check_sample_weights_shape",
    "check_sample_weights_not_overwritten",
    "check_all_zero_sample_weights_error",
)
# Their classes have single rows, which fold fits refuse; `test_predictions_are_by_the_row_and_change_nothing` has the
# same for classifiers.
SINGLE_ROWS = (
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_f_contiguous_array_estimator",
    "check_methods_sample_order_invariance",
    "check_methods_subset_invariance",
)


@pytest.mark.parametrize(
    "make, name",
    [(regressor, name) for name in (*CHECKS, "check_regressor_data_not_an_array", *SINGLE_ROWS)]
    + [(classifier, name) for name in (*CHECKS, "check_classifier_data_not_an_array")],
)
def test_scikit_learn_checks(make, name):
    estimator = make(conformal=2, method="map", hidden=(2,), settings={"steps": 2, "noise_from": "training"})
    getattr(estimator_checks, name)(type(estimator).__name__, estimator)


@pytest.mark.parametrize("make, data", [(regressor, waves), (classifier, points)])
def test_predictions_are_by_the_row_and_change_nothing(make, data):
    """A row has the same interval or set in any order and in any batch; predicting leaves the estimator as it is."""
    model = make()
    before = set(vars(model))
    model.fit(*data(60, 0))
    assert all(name.startswith("_") or name.endswith("_") for name in set(vars(model)) - before)
    assert {name: getattr(model, name) for name in before} == {name: getattr(make(), name) for name in before}
    state = dict(vars(model))

    def predictions(rows):
        found = [model.predict(rows)] if make is regressor else [model.predict_proba(rows)]
        found += model.predict_interval(rows, 0.8) if make is regressor else [model.predict_set(rows, 0.8)]
        return [np.asarray(values, dtype=float) for values in found]

    # New rows: the score of a training row equals its own calibration score, and rounding would decide the tie.
    x, _ = data(20, 1)
    order = np.random.default_rng(1).permutation(20)
    by_row = [np.concatenate(parts) for parts in zip(*(predictions(row[None]) for row in x))]
    for one, shuffled, single, by_column in zip(
        predictions(x), predictions(x[order]), by_row, predictions(np.asfortranarray(x))
    ):
        np.testing.assert_allclose(shuffled, one[order], rtol=1e-5)
        np.testing.assert_allclose(single, one, rtol=1e-5)
        np.testing.assert_array_equal(by_column, one)
    assert vars(model).keys() == state.keys()
    assert all(vars(model)[name] is value for name, value in state.items())


@pytest.mark.parametrize("noise", [0.02, 5.0])
def test_intervals_are_right_where_the_model_is_wrong(noise):
    """A known noise that is far too small or too large: credible intervals are useless, the guaranteed ones are not."""
    x, y = waves(400, 1)
    model = regressor(noise=noise, conformal=True).fit(*waves(150, 0))
    assert len(model.fold_estimators_) == 5
    lower, upper = model.predict_interval(x, 0.8)
    covered = np.mean((lower <= y) & (y <= upper))
    lower, upper = model.bayesian_interval(x, 0.8)
    plain = np.mean((lower <= y) & (y <= upper))
    # Standard deviation over tables: 0.033 from the calibration rows, 0.02 from the new ones.
    assert abs(covered - 0.8) < 0.12
    assert abs(plain - 0.8) > 0.15


def test_sets_cover_and_have_a_column_per_class():
    x, y = points(400, 1)
    model = classifier().fit(*points(150, 0))
    chosen = model.predict_set(x, 0.9)
    assert chosen.shape == (400, 3)
    assert chosen.dtype == bool
    column = np.searchsorted(model.classes_, y)
    assert abs(chosen[np.arange(400), column].mean() - 0.9) < 0.1
    assert model.bayesian_set(x, 0.9).shape == (400, 3)
    assert (chosen.sum(1) >= 1).all()


def test_means_are_those_of_the_fit_to_all_rows():
    x, y = waves(60, 0)
    one, other = regressor().fit(x, y), regressor(conformal=False).fit(x, y)
    np.testing.assert_array_equal(one.predict(x), other.predict(x))
    for bound, same in zip(one.bayesian_interval(x), other.predict_interval(x)):
        np.testing.assert_array_equal(bound, same)
    np.testing.assert_array_equal(other.bayesian_interval(x)[0], other.predict_interval(x)[0])
    assert isinstance(one.predictive(x), CalibratedPredictive)
    assert not isinstance(other.predictive(x), CalibratedPredictive)


def test_every_row_is_scored_by_a_fit_without_it():
    """A row that a fit has seen is predicted closely by a table of nearly no noise; its fold's fit has not seen it."""
    x, y = waves(45, 0)
    model = regressor().fit(x, y)
    fold = assigned_folds(3, 45, 0)
    assert sorted(np.bincount(fold)) == [15, 15, 15]
    for k, own in enumerate(model.fold_estimators_):
        alone = clone(own).fit(x[fold != k], y[fold != k])
        np.testing.assert_array_equal(alone.predict(x), own.predict(x))
    np.testing.assert_array_equal(model.calibration_.fold, np.repeat([0, 1, 2], 15))


def test_targets_units_and_copies():
    x, y = waves(60, 0)
    both = np.stack([y, 1000 * y], 1)
    model = regressor().fit(x, both)
    lower, upper = model.predict_interval(x, 0.8)
    assert lower.shape == (60, 2)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_interval(x, 0.8)[1], upper)
    np.testing.assert_array_equal(clone(model).fit(x, both).predict_interval(x, 0.8)[0], lower)


def test_rows_without_weight_do_not_count():
    x, y = waves(60, 0)
    weight = np.r_[np.ones(50), np.zeros(10)]
    spoilt = np.where(weight > 0, y, 1e6)
    model, other = regressor().fit(x, spoilt, weight), regressor().fit(x[:50], y[:50])
    np.testing.assert_allclose(model.predict_interval(x)[0], other.predict_interval(x)[0], rtol=1e-6)
    assert model.calibration_.rows == 50


def test_gaps_and_categories():
    """Folds are cut from the DataFrame as it was passed, with its missing values and categories."""
    pd = pytest.importorskip("pandas")
    x, y = waves(60, 0)
    frame = pd.DataFrame({"a": x[:, 0], "b": np.where(np.arange(60) % 7, x[:, 1], np.nan), "c": ["u", "v"] * 30})
    frame["c"] = frame["c"].astype("category")
    model = regressor().fit(frame, y)
    lower, upper = model.predict_interval(frame, 0.8)
    assert np.isfinite(upper - lower).all()
    assert ((lower <= y) & (y <= upper)).mean() > 0.6
    chosen = classifier().fit(frame, np.where(y > 50, "high", "low")).predict_set(frame, 0.8)
    assert chosen.any(1).all()


def test_classes_are_spread_over_folds():
    labels = np.repeat([0, 1, 2], [40, 7, 2])
    fold = assigned_folds(5, 49, 1, labels)
    for label, count in enumerate([40, 7, 2]):
        inside = np.bincount(fold[labels == label], minlength=5)
        assert inside.max() - inside.min() <= 1
        assert count - inside.max() >= 1


def test_bad_input():
    x, y = waves(30, 0)
    for value in (1, -2, 2.5, "yes", None):
        with pytest.raises(cr.InputError, match="conformal must be True, False or a number of folds"):
            regressor(conformal=value).fit(x, y)
    with pytest.raises(cr.InputError, match="needs at least 3 rows"):
        regressor().fit(x[:2], y[:2])
    with pytest.raises(cr.InputError, match="at least two rows of every class"):
        classifier().fit(x, np.array(["a"] * 29 + ["b"]))
    with pytest.raises(cr.InputError, match="0.99 needs at least 99 calibration rows, there are 30"):
        regressor().fit(x, y).predict_interval(x, 0.99)


def test_sets_that_may_be_empty_cover_as_promised_on_an_easy_table():
    """Single classes are right in nearly all rows; only empty sets bring the coverage down to the level."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1_400, 2))
    y = np.where(x[:, 0] + 0.1 * rng.normal(size=1_400) > 0, "yes", "no")
    model = classifier().fit(x[:400], y[:400])
    column = {label: j for j, label in enumerate(model.classes_)}
    own = np.array([column[label] for label in y[400:]])
    coverage = []
    for allow_empty in (False, True):
        sets = model.predict_set(x[400:], 0.8, allow_empty=allow_empty)
        assert bool((~sets.any(1)).any()) == allow_empty
        coverage.append(sets[np.arange(1_000), own].mean())
    assert coverage[0] > 0.9
    # Of the calibration set and of the new rows.
    assert abs(coverage[1] - 0.8) < 4 * np.sqrt(0.16 * (1 / 400 + 1 / 1_000))


def test_joint_intervals_of_several_targets():
    x, y = waves(900, 8)
    both = np.stack([y, 3 * y[::-1] + 100], 1)
    model = regressor().fit(x[:300], both[:300])
    inside = []
    for joint in (False, True):
        lower, upper = model.predict_interval(x[300:], 0.8, joint=joint)
        inside.append((lower <= both[300:]) & (both[300:] <= upper))
    error = 4 * np.sqrt(0.16 * (1 / 300 + 1 / 600))
    assert abs(inside[0].mean() - 0.8) < error
    assert inside[0].all(1).mean() < 0.8 - error / 4
    assert abs(inside[1].all(1).mean() - 0.8) < error


def test_options_that_need_folds():
    x, y = waves(60, 9)
    with pytest.raises(cr.InputError, match="joint: needs an estimator with conformal=True"):
        regressor(conformal=False).fit(x, y).predict_interval(x, joint=True)
    x, labels = points(60, 9)
    with pytest.raises(cr.InputError, match="allow_empty must be False without conformal=True"):
        classifier(conformal=False).fit(x, labels).predict_set(x, allow_empty=True)
