"""Estimators on mixed inputs: missing values, categories of several dtypes, unknown levels, and bad input."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

import credibly as cr
from credibly.tables.estimating.encoding import MAX_LEVELS, InputEncoder

BRIEF = {"members": 12, "steps": 150, "lr": 0.05, "validation": 0.0, "noise_from": "training"}
N = 150


def frame():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "size": rng.normal(100, 20, N),
            "rooms": rng.integers(1, 6, N),
            "kind": rng.choice(["flat", "house", "barn"], N),
            "new": rng.random(N) < 0.5,
        }
    )


def price(table):
    worth = table["kind"].astype(object).map({"flat": 0.0, "house": 40.0, "barn": -30.0}).to_numpy(float)
    return table["size"].to_numpy(float) + 10 * table["rooms"].to_numpy(float) + worth


def regressor(**kwargs):
    return cr.BayesianRegressor(**{"method": "ensemble", "hidden": (8,), "settings": BRIEF} | kwargs)


def encode(X, categorical="from_dtype", new=None):
    encoder = InputEncoder(categorical).learn(X)
    rows = encoder.read(X) if encoder.handles(X) else np.asarray(X, dtype=float)
    encoder.fit(rows)
    if new is not None:
        rows = encoder.read(new) if encoder.handles(new) else np.asarray(new, dtype=float)
    return encoder.transform(rows)


# -- the encoder ------------------------------------------------------------------------------------------------------
def test_numbers_are_standardised_as_without_missing_values():
    X = np.random.default_rng(1).normal(5, 3, size=(50, 3))
    assert np.array_equal(encode(X), (X - X.mean(0)) / X.std(0))
    X[:, 1] = 7.0
    assert np.array_equal(encode(X)[:, 1], np.zeros(50))


def test_missing_numbers_are_nan_with_an_indicator_and_do_not_count_for_the_moments():
    X = np.array([[1.0, 5.0], [2.0, 6.0], [np.nan, 7.0], [3.0, 8.0]])
    found = encode(X)
    scale = np.std([1, 2, 3])
    assert found.shape == (4, 3)
    assert np.allclose(found[:, 0], [-1 / scale, 0, np.nan, 1 / scale], equal_nan=True)
    assert found[:, 1].tolist() == [0, 0, 1, 0]
    # Without missing values in training there is no indicator.
    assert np.isnan(encode(X[[0, 1, 3]], new=X)[2]).tolist() == [True, False]


def test_weights_count_for_the_moments_as_repeated_rows():
    X = np.array([[1.0, 5.0], [2.0, np.nan], [np.nan, 7.0], [4.0, 8.0]])
    weight = np.array([1.0, 2.0, 1.0, 3.0])
    weighted = InputEncoder().fit(X, weight)
    repeated = InputEncoder().fit(np.repeat(X, weight.astype(int), 0))
    assert np.allclose(weighted.mean, repeated.mean)
    assert np.allclose(weighted.scale, repeated.scale)


DTYPES = {
    "category": lambda values: pd.Series(pd.Categorical(values)),
    "object": lambda values: pd.Series(values, dtype=object),
    "string": lambda values: pd.Series(values, dtype="string"),
    "str": lambda values: pd.Series(values),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_text_and_categories_become_one_input_per_level(dtype):
    X = pd.DataFrame({"a": DTYPES[dtype](["v", "u", "w", "u"])})
    assert encode(X).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
    missing = pd.DataFrame({"a": DTYPES[dtype](["v", None, "u", "u"])})
    found = encode(missing)
    assert np.isnan(found[1]).tolist() == [True, True, False]
    assert found[:, 2].tolist() == [0, 1, 0, 0]


def test_a_level_not_seen_in_training_is_missing_unless_there_are_rare_levels():
    X = pd.DataFrame({"a": ["u", "v", "u"]})
    assert np.isnan(encode(X, new=pd.DataFrame({"a": ["u", "w"]}))).tolist() == [[False, False], [True, True]]
    many = pd.DataFrame({"a": [f"level {i}" for i in range(MAX_LEVELS + 5)] + ["level 3"] * 5})
    found = encode(many, new=pd.DataFrame({"a": ["level 3", "new"]}))
    assert found.shape == (2, MAX_LEVELS + 1)
    assert found[0].sum() == found[1].sum() == 1
    assert found[1, -1] == 1
    assert encode(many)[:, -1].sum() == 5


def test_nullable_dtypes_and_booleans_are_numbers():
    X = pd.DataFrame(
        {
            "i": pd.array([1, 2, None, 3], dtype="Int64"),
            "f": pd.array([1.5, None, 2.5, 3.5], dtype="Float64"),
            "b": pd.array([True, False, None, True], dtype="boolean"),
            "p": [True, False, True, True],
            "c": ["u", "v", "u", "v"],
        }
    )
    encoder = InputEncoder().learn(X)
    expected = [[1, 1.5, 1, 1, 0], [2, np.nan, 0, 0, 1], [np.nan, 2.5, np.nan, 1, 0], [3, 3.5, 1, 1, 1]]
    assert list(encoder.codes) == [4]
    assert np.array_equal(encoder.read(X), expected, equal_nan=True)
    # The same without a categorical column, where scikit-learn converts.
    model = regressor(method="map", settings={"steps": 5}).fit(X.drop(columns="c"), [1, 2, 3, 4])
    assert np.isfinite(model.predict(X.drop(columns="c"))).all()


@pytest.mark.parametrize("chosen", [[0], [-2], ["a"], [True, False], np.array([0]), ("a",)])
def test_columns_can_be_chosen(chosen):
    X = pd.DataFrame({"a": [1, 2, 1], "b": [5.0, 6.0, 8.0]})
    assert encode(X, chosen)[:, :2].tolist() == [[1, 0], [0, 1], [1, 0]]
    if not (isinstance(chosen, (list, tuple)) and isinstance(chosen[0], str)):
        assert np.array_equal(encode(X.to_numpy(), chosen), encode(X, chosen))


@pytest.mark.parametrize(
    "chosen, says",
    [
        ("auto", "must be"),
        ([2], "indices from 0 to 1"),
        ([0.5], "indices from 0 to 1"),
        (["z"], "is not a column"),
        ([True], "mask of 1 columns"),
    ],
)
def test_bad_choices_of_columns(chosen, says):
    with pytest.raises(cr.InputError, match=says) as error:
        regressor(categorical_features=chosen).fit(frame()[["size", "rooms"]], price(frame()))
    assert error.value.argument == "categorical_features"
    with pytest.raises(cr.InputError, match="no column names"):
        encode(np.ones((3, 2)), ["a"])


def test_columns_that_are_neither_numbers_nor_categories():
    X = frame()
    with pytest.raises(cr.InputError, match="'kind' is not numeric"):
        encode(X, ["new"])
    with pytest.raises(cr.InputError, match="'day' holds dates"):
        encode(X.assign(day=pd.Timestamp("2020-01-01")))
    # Also beside numbers alone, which numpy cannot promote to one dtype with dates.
    numbers, model = X[["size", "rooms"]], regressor()
    with pytest.raises(cr.InputError, match="'day' holds dates"):
        model.fit(numbers.assign(day=pd.Timestamp("2020-01-01", tz="UTC")), price(X))
    model.fit(numbers, price(X))
    with pytest.raises(cr.InputError, match="'rooms' holds dates"):
        model.predict(numbers.assign(rooms=pd.Timedelta("1h")))


# -- estimators -------------------------------------------------------------------------------------------------------
def test_a_data_frame_with_categories_fits_as_by_hand():
    X = frame()
    by_hand = pd.concat([X[["size", "rooms"]], pd.get_dummies(X["kind"]), X[["new"]]], axis=1).astype(float)
    model = regressor().fit(X, price(X))
    assert model.feature_names_in_.tolist() == list(X.columns)
    assert model.n_features_in_ == 4
    assert model.score(X, price(X)) > 0.9
    assert model.score(X, price(X)) > regressor().fit(X.drop(columns="kind"), price(X)).score(
        X.drop(columns="kind"), price(X)
    )
    assert regressor().fit(by_hand, price(X)).posterior_.layout.dim == model.posterior_.layout.dim


def test_order_and_names_of_columns_are_checked():
    X = frame()
    model = regressor(method="map", settings={"steps": 5}).fit(X, price(X))
    with pytest.raises(ValueError, match="same order"):
        model.predict(X[["kind", "size", "rooms", "new"]])
    with pytest.raises(ValueError, match="now missing"):
        model.predict(X[["size", "rooms"]])
    with pytest.raises(ValueError, match="infinity"):
        model.predict(X.assign(size=np.inf))
    array = X.to_numpy(dtype=object)
    with pytest.raises(ValueError, match="Reshape"):
        regressor(method="map", settings={"steps": 5}).fit(array, price(X)).predict(array[:, 0])


def test_missing_and_unknown_categories_widen_the_prediction():
    X = frame()
    model = regressor().fit(X, price(X))
    unknown = model.predict(X.assign(kind="castle"), return_std=True)
    missing = model.predict(X.assign(kind=None), return_std=True)
    assert np.array_equal(unknown, missing)
    assert missing[1].mean() > 2 * model.predict(X, return_std=True)[1].mean()
    some = X.copy()
    some.loc[5, "size"] = np.nan
    mean, std = model.predict(X, return_std=True)
    again, wider = model.predict(some, return_std=True)
    others = np.delete(np.arange(N), 5)
    assert np.array_equal(again[others], mean[others])
    assert np.array_equal(wider[others], std[others])
    assert wider[5] > 1.5 * std[5]


def test_classifier_with_missing_values_and_categories():
    X = frame()
    X.loc[::6, "size"] = np.nan
    X["kind"] = X["kind"].astype("category")
    y = np.where(price(frame()) > 120, "dear", "cheap")
    model = cr.BayesianClassifier("ensemble", hidden=(8,), settings=BRIEF, class_weight="balanced").fit(X, y)
    assert model.score(X, y) > 0.8
    sure, unsure = model.uncertainty(frame()).epistemic, model.uncertainty(X.assign(kind=None, size=np.nan)).epistemic
    assert unsure.mean() > sure.mean()
    assert np.allclose(model.predict_proba(X).sum(1), 1)


def test_tools_of_scikit_learn_with_mixed_columns():
    X = frame()
    X.loc[::7, "rooms"] = np.nan
    y = price(frame())
    model = regressor(settings=BRIEF | {"members": 2, "steps": 80})
    assert model.__sklearn_tags__().input_tags.allow_nan
    assert model.__sklearn_tags__().input_tags.categorical
    fitted = clone(model).fit(X, y, sample_weight=np.linspace(0, 2, N))
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), fitted.predict(X))
    assert cross_val_score(model, X, y, cv=3).min() > 0.7
    search = GridSearchCV(model, {"categorical_features": ["from_dtype", ["kind", "new"]]}, cv=2).fit(X, y)
    assert search.best_estimator_.score(X, y) > 0.7
    pipeline = make_pipeline(FunctionTransformer(lambda table: table.assign(size=np.log(table["size"]))), model)
    assert pipeline.fit(X, y).score(X, y) > 0.7


def test_object_arrays_with_text():
    X = frame()[["size", "kind"]].to_numpy(dtype=object)
    X[3, 0], X[4, 1] = None, None
    model = regressor().fit(X, price(frame()))
    assert model.score(X, price(frame())) > 0.8


def test_polars_data_frames():
    polars = pytest.importorskip("polars")
    X = frame()
    theirs = polars.DataFrame({name: X[name].tolist() for name in X.columns})
    theirs = theirs.with_columns(polars.col("kind").cast(polars.Categorical))
    assert np.array_equal(encode(theirs), encode(X))
    assert regressor().fit(theirs, price(X)).feature_names_in_.tolist() == list(X.columns)


def test_as_accurate_as_imputing_and_encoding_by_hand():
    rng = np.random.default_rng(3)
    X, y = frame(), price(frame()) + rng.normal(size=N)
    X["size"] = X["size"] + 0.0
    # A column from which the size can be guessed, and a tenth of the numbers missing.
    X["weight"] = 2 * X["size"] + rng.normal(0, 4, N)
    for name in ("size", "weight", "rooms"):
        X[name] = X[name].astype(float).mask(rng.random(N) < 0.1)
    by_hand = make_pipeline(
        make_column_transformer(
            (SimpleImputer(strategy="median", add_indicator=True), ["size", "rooms", "weight"]),
            (OneHotEncoder(), ["kind"]),
            remainder="passthrough",
        ),
        regressor(settings=BRIEF | {"steps": 400}),
    )
    model = regressor(settings=BRIEF | {"steps": 400})
    train, test = slice(None, 100), slice(100, None)
    errors = []
    for one in (model, by_hand):
        one.fit(X[train], y[train])
        errors.append(np.sqrt(np.mean((one.predict(X[test]) - y[test]) ** 2)))
    assert errors[0] < errors[1]


def test_columns_of_the_same_name_are_rejected():
    frame = pd.DataFrame({"a": np.arange(20.0), "k": ["x", "y"] * 10})
    with pytest.raises(cr.InputError, match="X: has more than one column named 'a', 'k'. Make the names unique"):
        cr.BayesianRegressor(method="map").fit(pd.concat([frame, frame], axis=1), np.arange(20.0))
